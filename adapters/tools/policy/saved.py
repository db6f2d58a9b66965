"""The file of a saved policy: weights in safetensors format, with the sizes and the tools as metadata."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from adapters.tools.catalogue.tools import ToolCatalogue
from adapters.tools.text.encoders import CachedEncoder
from adapters.tools.text.fitted import FittedEncoder, JoinedEncoder
from grpo.errors import ConfigError

FILE = "policy.safetensors"
NUM_PROBES = 50
"""Texts of tools that are encoded to check that a loaded policy gets the encoder it was trained with."""
_FITTED = "encoder."


def save_policy(
    folder: Path, state: Mapping[str, Any], sizes: Mapping[str, Any], catalogue: ToolCatalogue, encoder: CachedEncoder
) -> None:
    """Carry out `ToolSelectionPolicy.save`. The file is written under a temporary name, then renamed.

    Args:
        folder: Folder to write to.
        state: The policy's `state_dict`.
        sizes: Arguments of the policy's constructor that decide the shapes of the weights.
        catalogue: The policy's tools.
        encoder: The policy's encoder.
    """
    tensors = dict(state)
    calibration = tensors.pop("_extra_state")
    description: dict[str, Any] = {
        "sizes": dict(sizes),
        "calibration": calibration,
        "tools": list(catalogue),
        "probes": [tool.text for tool in catalogue.values()][:NUM_PROBES],
    }
    if isinstance(encoder.encoder, FittedEncoder | JoinedEncoder):
        tensors |= {_FITTED + name: value for name, value in encoder.encoder.fitted().items()}
    tensors = {name: value.contiguous() for name, value in tensors.items()} | {"probe": encoder(description["probes"])}
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{FILE}.unfinished"
    unfinished.unlink(missing_ok=True)
    try:
        with unfinished.open("xb") as file:  # "x" follows no link
            file.write(save(tensors, {"description": json.dumps(description)}))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(folder / FILE)
    finally:
        unfinished.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedPolicy:
    """What the file of a saved policy contains."""

    state: Mapping[str, Any]
    """The policy's `state_dict`."""
    sizes: Mapping[str, Any]
    """Arguments of the constructor that decide the shapes of the weights."""
    tools: Sequence[str]
    """Names of the tools that the policy chose from."""
    probes: Sequence[str]
    """Texts that were encoded when the policy was saved."""
    probe: Tensor
    """Their vectors."""
    fitted: Mapping[str, Tensor]
    """What the encoder had fitted. Empty for an encoder without fitted numbers."""

    @classmethod
    def read(cls, folder: Path) -> "SavedPolicy":
        """Read the file that `save_policy` wrote.

        Raises:
            ConfigError: The folder holds no complete file of a policy.
        """
        try:
            with safe_open(folder / FILE, framework="pt") as file:
                about = json.loads(file.metadata()["description"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
            return cls(
                probe=tensors.pop("probe"),
                probes=about["probes"],
                tools=about["tools"],
                sizes=about["sizes"],
                fitted={
                    name.removeprefix(_FITTED): tensors.pop(name) for name in [*tensors] if name.startswith(_FITTED)
                },
                state=tensors | {"_extra_state": about["calibration"]},
            )
        except (OSError, SafetensorError, TypeError, KeyError, ValueError) as error:
            raise ConfigError(
                f"{folder / FILE} must be a file that ToolSelectionPolicy.save wrote, and not be truncated or altered; got "
                f"{error!r}. Save the policy again, or copy the file again."
            ) from error

    def with_fitted(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options of the constructor, where an encoder that can be fitted has the numbers of the saved encoder."""
        encoder = options.get("encoder")
        if self.fitted and isinstance(encoder, FittedEncoder | JoinedEncoder):
            return {**options, "encoder": encoder.restored(self.fitted)}
        return dict(options)

    def require_same_encoder(self, encoder: CachedEncoder, folder: Path) -> None:
        """Check that an encoder gives the vectors of the saved policy's encoder.

        Raises:
            ConfigError: The encoders differ.
        """
        found = encoder(self.probes)
        # Vectors have length 1, and a change of precision alone makes a smaller difference.
        if self.probe.shape != found.shape or float((found - self.probe).norm(dim=1).amax()) > 0.05:
            raise ConfigError(
                f"{folder}: the policy was trained with another encoder, of {self.probe.shape[1]} features; this encoder has "
                f"{found.shape[1]}. Pass the encoder of the training as encoder=..."
            )
