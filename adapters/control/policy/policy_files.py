"""Files of one policy each: its weights and statistics as safetensors, and how it was built as JSON. They contain no pickle."""

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from grpo.errors import CheckpointError, ConfigError

KEY = "adapters.control.EpisodePolicy"
"""Name of the JSON in the file's metadata."""

NO_DATA = "no data"
"""The key of an argument that a file cannot hold, such as a function or a network. The name of its type is the value."""


def as_plain(value: Any) -> Any:
    """An argument as a file holds it."""
    return copy.deepcopy(value) if _is_plain(value) else {NO_DATA: type(value).__name__}


def as_name(value: Any) -> Any:
    """What `as_plain` returned, with the name of the type alone where there is no data."""
    return value[NO_DATA] if _is_no_data(value) else value


def _is_plain(value: Any) -> bool:
    """Whether JSON gives the value back as it is."""
    if type(value) is list:
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(type(key) is str for key in value) and all(map(_is_plain, value.values()))
    return isinstance(value, str | bool | int | float | None)


def _is_no_data(value: Any) -> bool:
    return isinstance(value, dict) and [*value] == [NO_DATA]


def as_bytes(content: Mapping[str, Any]) -> Tensor:
    """Plain values as a tensor, so that everything in a state dict is a tensor."""
    return torch.tensor([*json.dumps(content, sort_keys=True).encode()], dtype=torch.uint8)


def require_same(owner: str, saved: Any, present: Mapping[str, Any]) -> None:
    """Check that weights belong to a policy that is built as the one that was saved.

    Args:
        owner: Names the policy in the message.
        saved: What `as_bytes` returned.
        present: How the present policy is built.

    Raises:
        CheckpointError: Names what differs.
    """
    before = json.loads(bytes(saved.tolist()))
    changed = [
        f"{name} was {before.get(name)!r} and is {value!r}"
        for name, value in present.items()
        if before.get(name) != value
    ]
    if changed:
        raise CheckpointError(
            f"{owner} must be built as the policy that was saved: {'; '.join(changed)}. The weights mean something else there."
        )


def save_policy(path: str | Path, state: Mapping[str, Tensor], arguments: Mapping[str, Any]) -> Path:
    """Write a file completely or not at all. Missing folders are created."""
    target = Path(path)
    tensors = {name: value.detach().cpu().clone().contiguous() for name, value in state.items()}
    new = target.with_name(f"{target.name}.new")
    target.parent.mkdir(parents=True, exist_ok=True)
    new.unlink(missing_ok=True)
    with new.open("xb") as file:
        file.write(save(tensors, {KEY: json.dumps(arguments)}))
    new.replace(target)
    return target


def read_policy(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors and the arguments in a file.

    Raises:
        CheckpointError: The file is missing, damaged, or holds no policy.
    """
    try:
        with safe_open(str(path), framework="pt") as file:
            arguments: Any = json.loads((file.metadata() or {})[KEY])
            if not isinstance(arguments, dict) or not isinstance(arguments.get("make"), dict):
                raise ValueError(f"{KEY} is {arguments!r:.100}")
            return {name: file.get_tensor(name) for name in file.keys()}, arguments  # noqa: SIM118  # no dict
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path} must be a file of EpisodePolicy.save; it cannot be read: {error!r}. A folder of a run is read with "
            "grpo.load_weights."
        ) from error


def load_policy(path: str | Path, build: Callable[..., Any], given: Mapping[str, Any]) -> Any:
    """Build a policy as the one in a file was built, and load its weights.

    Args:
        path: The file.
        build: Builds a policy from arguments.
        given: Arguments of the caller, in place of those in the file.

    Raises:
        ConfigError: An argument is no data, and the caller has not passed it.
        CheckpointError: The file cannot be read, or the policy that was built does not fit it.
    """
    tensors, saved = read_policy(path)
    saved_make = saved.pop("make")
    if given.get("environment") is not None:  # keywords of the environment in the file are not for another one
        saved_make = {}
    arguments = {name: value for name, value in given.items() if value is not None}
    for name, value in {**saved, **saved_make}.items():
        # "module:Name-v0" would run the module
        imports = name == "environment" and isinstance(value, str) and ":" in value
        if imports or _is_no_data(value):
            if given.get(name) is None:
                raise ConfigError(
                    f"The policy in {path} was built with {name}={as_name(value)}, which a file cannot hold. Pass {name}=... "
                    "to EpisodePolicy.load."
                )
        else:
            arguments.setdefault(name, value)
    policy: nn.Module = build(arguments)
    try:
        policy.load_state_dict(tensors)
    except (RuntimeError, CheckpointError) as error:
        raise CheckpointError(f"{path} does not fit the policy that was built: {error}") from error
    return policy
