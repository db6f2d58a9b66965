"""The two files of a saved policy: the weights, and a description with the hash of the weights."""

import json
import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from grpo.errors import ConfigError

DESCRIPTION, WEIGHTS = "policy.json", "policy.safetensors"

_HASH = "weights_sha256"
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "num_features": (int, type(None)), "hidden": list, "num_text_features": int, _HASH: str,
}  # fmt: skip
_AGAIN = "Save the policy again, or copy both files again."


def write_policy(folder: Path, description: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write both files under temporary names, then rename them, the description last.

    If the disk is full or the process is killed, the previous policy remains. If the process is killed between the two
    renames, `read_policy` raises.

    Args:
        folder: Target folder. It is created if it does not exist.
        description: Values that JSON can represent.
        tensors: The weights.
    """
    weights = save({name: value.contiguous() for name, value in tensors.items()})
    text = json.dumps({**description, _HASH: sha256(weights).hexdigest()}, indent=2) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = {folder / WEIGHTS: weights, folder / DESCRIPTION: text.encode()}
    try:
        for path, data in unfinished.items():  # write both files completely before the first rename
            _write(_beside(path), data)
        for path in unfinished:
            _beside(path).replace(path)
    finally:
        for path in unfinished:
            _beside(path).unlink(missing_ok=True)


def read_policy(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the description and the weights that `write_policy` wrote.

    Raises:
        ConfigError: A file is missing, truncated or altered, or the two files do not belong together. The message names the
            file.
    """
    path = folder / DESCRIPTION
    try:
        description = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ConfigError(
            f"{folder} holds no policy: {DESCRIPTION} is missing. Write a policy with ToolSelectionPolicy.save."
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}. {_AGAIN}") from error
    if not isinstance(description, dict):
        raise ConfigError(f"{path} must hold an object; got {description!r:.80}. {_AGAIN}")
    wrong = [
        name for name, kind in _TYPES.items() if name not in description or not isinstance(description[name], kind)
    ]
    if wrong or not all(isinstance(width, int) for width in description["hidden"]):
        raise ConfigError(f"{path} must have {', '.join(wrong or ['hidden'])} with the right type. {_AGAIN}")
    return description, _read_weights(folder / WEIGHTS, description[_HASH])


def _read_weights(path: Path, digest: str) -> dict[str, Tensor]:
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is missing, although {DESCRIPTION} exists. {_AGAIN}") from error
    if sha256(data).hexdigest() != digest:
        raise ConfigError(
            f"{path} does not belong to {DESCRIPTION}: it was truncated or altered, or saving was interrupted. {_AGAIN}"
        )
    try:
        return load(data)
    except SafetensorError as error:
        raise ConfigError(f"{path} holds no weights: {error}. {_AGAIN}") from error


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".unfinished")


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
