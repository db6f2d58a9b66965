"""The file of a saved policy: weights in safetensors format, with the sizes and the tools as metadata."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from adapters.tools.catalogue.tools import ToolCatalogue
from grpo.errors import ConfigError

from .fitted import HasFit

if TYPE_CHECKING:
    from .policy import ToolSelectionPolicy

FILE = "policy.safetensors"
PROBE = "Convert 12 miles to feet, please."
"""Text that is encoded to check that a loaded policy gets the encoder it was trained with."""

_FITTED = "encoder."
_AGAIN = "Save the policy again, or copy the file again."


def save_policy(policy: "ToolSelectionPolicy", folder: Path) -> None:
    """Carry out `ToolSelectionPolicy.save`. The file is written under a temporary name, then renamed."""
    tensors = policy.state_dict()
    description = {
        "num_features": policy.num_features,
        "hidden": policy.hidden,
        "num_text_features": policy.menu.tool_vectors.shape[1],
        "calibration": tensors.pop("_extra_state"),
        "tools": [
            {"name": t.name, "category": t.category, "description": t.description, "parameters": dict(t.parameters)}
            for t in policy.catalogue.values()
        ],
    }
    encoder: object = policy.encoder.encoder
    fitted: Mapping[str, Tensor] = encoder.fitted() if isinstance(encoder, HasFit) else {}
    tensors |= {_FITTED + name: value for name, value in fitted.items()} | {"probe": policy.encoder([PROBE])}
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{FILE}.unfinished"
    try:
        with unfinished.open("wb") as file:
            metadata = {"description": json.dumps(description)}
            file.write(save({name: value.contiguous() for name, value in tensors.items()}, metadata))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(folder / FILE)
    finally:
        unfinished.unlink(missing_ok=True)


def load_policy(
    kind: "type[ToolSelectionPolicy]", folder: Path, catalogue: ToolCatalogue, options: Mapping[str, Any]
) -> "ToolSelectionPolicy":
    """Carry out `ToolSelectionPolicy.load`."""
    about, tensors = _read(folder)
    fitted = {name.removeprefix(_FITTED): tensors.pop(name) for name in list(tensors) if name.startswith(_FITTED)}
    if fitted and isinstance(options.get("encoder"), HasFit):
        options["encoder"].restore(fitted)
    policy = kind(catalogue, num_features=about["num_features"], hidden=about["hidden"], **options)
    probe, found = tensors.pop("probe"), policy.encoder([PROBE])
    # A change of precision alone makes a smaller difference.
    if probe.shape != found.shape or float((found - probe).norm()) > 0.05 * float(probe.norm()):
        raise ConfigError(
            f"{folder}: the policy was trained with another encoder, of {about['num_text_features']} features; this encoder "
            f"has {found.shape[1]}. Pass the encoder of the training as encoder=..."
        )
    policy.load_state_dict(tensors | {"_extra_state": about["calibration"]})
    policy.menu.added |= set(catalogue) - {tool["name"] for tool in about["tools"]}
    return policy


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The description and the weights in the file."""
    path = folder / FILE
    if not path.is_file():
        raise ConfigError(f"{folder} holds no policy: {FILE} is missing. Write a policy with ToolSelectionPolicy.save.")
    try:
        with safe_open(path, framework="pt") as file:
            description = json.loads((file.metadata() or {})["description"])
            return description, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    except SafetensorError as error:
        raise ConfigError(f"{path} is truncated or altered: {error}. {_AGAIN}") from error
    except (KeyError, ValueError) as error:
        raise ConfigError(f"{path} was not written by ToolSelectionPolicy.save. {_AGAIN}") from error
