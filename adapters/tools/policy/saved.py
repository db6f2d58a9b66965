"""The file of a saved policy: weights in safetensors format, with the sizes and the tools as metadata."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from adapters.tools.catalogue.tools import ToolCatalogue
from adapters.tools.text.fitted import FittedEncoder, JoinedEncoder
from grpo.errors import ConfigError

if TYPE_CHECKING:
    from .policy import ToolSelectionPolicy

FILE = "policy.safetensors"
NUM_PROBES = 50
"""Texts of tools that are encoded to check that a loaded policy gets the encoder it was trained with."""
_FITTED = "encoder."


def save_policy(policy: "ToolSelectionPolicy", folder: Path) -> None:
    """Carry out `ToolSelectionPolicy.save`. The file is written under a temporary name, then renamed."""
    tensors = policy.state_dict()
    description = {
        "num_features": policy.num_features,
        "hidden": policy.hidden,
        "calibration": tensors.pop("_extra_state"),
        "tools": list(policy.catalogue),
        "probes": [tool.text for tool in policy.catalogue.values()][:NUM_PROBES],
    }
    encoder = policy.encoder.encoder
    if isinstance(encoder, FittedEncoder | JoinedEncoder):
        tensors |= {_FITTED + name: value for name, value in encoder.fitted().items()}
    tensors = {name: value.contiguous() for name, value in tensors.items()} | {
        "probe": policy.encoder(description["probes"])
    }
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{FILE}.unfinished"
    try:
        with unfinished.open("wb") as file:
            file.write(save(tensors, {"description": json.dumps(description)}))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(folder / FILE)
    finally:
        unfinished.unlink(missing_ok=True)


def load_policy(
    kind: "type[ToolSelectionPolicy]", folder: Path, catalogue: ToolCatalogue, options: dict[str, Any]
) -> "ToolSelectionPolicy":
    """Carry out `ToolSelectionPolicy.load`."""
    try:
        with safe_open(folder / FILE, framework="pt") as file:
            about = json.loads(file.metadata()["description"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    except (OSError, SafetensorError, TypeError, KeyError, ValueError) as error:
        raise ConfigError(
            f"{folder / FILE} must be a file that ToolSelectionPolicy.save wrote, and not be truncated or altered; got "
            f"{error!r}. Save the policy again, or copy the file again."
        ) from error
    fitted = {name.removeprefix(_FITTED): tensors.pop(name) for name in list(tensors) if name.startswith(_FITTED)}
    if fitted and isinstance(options.get("encoder"), FittedEncoder | JoinedEncoder):
        options = options | {"encoder": options["encoder"].restored(fitted)}
    policy = kind(catalogue, num_features=about["num_features"], hidden=about["hidden"], **options)
    probe, found = tensors.pop("probe"), policy.encoder(about["probes"])
    # Vectors have length 1, and a change of precision alone makes a smaller difference.
    if probe.shape != found.shape or float((found - probe).norm(dim=1).amax()) > 0.05:
        raise ConfigError(
            f"{folder}: the policy was trained with another encoder, of {probe.shape[1]} features; this encoder has "
            f"{found.shape[1]}. Pass the encoder of the training as encoder=..."
        )
    policy.load_state_dict(tensors | {"_extra_state": about["calibration"]})
    policy.menu.set_offsets(dict.fromkeys(set(catalogue) - set(about["tools"]), 0.0) | policy.menu.offset_of)
    return policy
