"""Write and read checkpoints. A checkpoint is written completely or not at all, and contains no pickle.

A checkpoint is a folder with one folder for each process (`rank-0`, `rank-1` ...), which has `state.json` and
`tensors.safetensors`, and with `manifest.json`, which is written last. Every file is verified against the manifest before it is
used. `open_checkpoint` returns a `Checkpoint`, and `CheckpointFolder` keeps the checkpoints of a run.
"""

import copy
import os
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._common.protocols import parameters_of, require_methods
from ._sharding.tensors import copy_into
from ._storage.commit import commit, require_equal, require_finite, typed_errors
from ._storage.decoding import SavedRows, SavedTensor
from ._storage.encoding import encode, require_encodable
from ._storage.files import as_path, make_folder
from ._storage.folder import CheckpointFolder, best_of
from ._storage.lock import FolderLock
from ._storage.manifest import without_files
from ._storage.opening import Checkpoint, checkpoints_in, manifests_of, open_checkpoint, read_again, require_intact
from .engine import Engine, OneProcess
from .errors import CheckpointError, DamagedCheckpointError, warn_user
from .policy_base import HasState

__all__ = [
    "Checkpoint", "CheckpointFolder", "SavedRows", "SavedTensor", "best_checkpoint", "load_weights",
    "open_checkpoint", "read_checkpoint", "require_encodable", "write_checkpoint",
]  # fmt: skip


def write_checkpoint(
    path: str | Path,
    state: Mapping[str, Any],
    *,
    iteration: int,
    update: int | None = None,
    score: float | None = None,
    engine: Engine | None = None,
) -> Path:
    """Write `state` to the folder `path`, completely or not at all. An existing checkpoint is replaced.

    Args:
        path: The checkpoint's folder. Missing parent folders are created.
        state: Tensors, arrays, numbers, strings, None, frozen dataclasses with `to_state` and `from_state`, and dicts, lists
            and tuples of these. On several ranks, each rank passes its own state.
        iteration: The number of iterations that training has completed.
        update: The number of finished updates of an iteration that is not finished. None: the last iteration is finished.
        score: Decides which of several checkpoints is the best. Larger is better. A NaN or infinite score counts as no score.
        engine: Joins the ranks, which all call this function. None: one process.

    Raises:
        CheckpointError: The disk is full or not writable, `state` holds a value of another type, `state["parameters"]` has
            NaN or infinity, another process writes to `path`, or `path` exists and is not a checkpoint. Earlier checkpoints
            are intact, and no temporary file remains.
    """
    engine = engine or OneProcess()
    target = as_path(path)
    real = Path(os.path.realpath(target))
    manifest = without_files(iteration=iteration, update=update, score=score, num_ranks=engine.num_ranks)
    with ExitStack() as held:
        with engine.together(), typed_errors(target):
            require_finite(state)
            require_equal(state, engine)
            if engine.rank == 0:
                make_folder(real.parent)
                held.enter_context(FolderLock(real.with_name(f".{real.name}.lock"), target))
        commit(real, lambda sink: encode(state, sink), manifest, engine)
    return target


def read_checkpoint(path: str | Path) -> dict[str, Any]:
    """Return the whole state in a checkpoint, after verifying its files. Of a checkpoint of several ranks: rank 0's state.

    Args:
        path: A checkpoint's folder, or a folder of checkpoints: the newest intact one is read.

    Raises:
        CheckpointError: A file is missing, truncated, altered, or written by another program or a newer version. The
            message names the file.
    """
    checkpoint = open_checkpoint(path, None)
    _tell_skipped(checkpoint)
    state: dict[str, Any] = checkpoint.load(checkpoint.state)
    return state


def best_checkpoint(folder: str | Path) -> Path:
    """Return the path of the checkpoint with the highest score in `folder`, after verifying its files.

    A warning names each checkpoint that is left out because it is damaged: its score may be higher.

    Raises:
        CheckpointError: No intact checkpoint in `folder` has a score.
    """
    manifests, problems = manifests_of(checkpoints_in(as_path(folder)))
    while (best := best_of(manifests)) is not None:
        manifest = manifests.pop(best)
        try:
            read_again(partial(require_intact, best, manifest))
        except DamagedCheckpointError as error:
            problems.append(str(error))
            continue
        if problems:
            warn_user(
                f"{best} has the highest score of the intact checkpoints. Others are left out: {' '.join(problems)}"
            )
        return best
    missing = f"No checkpoint with a score in {folder}. Train with eval_states=..., which gives scores."
    raise CheckpointError(" ".join([missing, *problems]))


def load_weights(path: str | Path, policy: Any) -> None:
    """Load the weights of a checkpoint into a policy, without a trainer. Optimizer, generators and counters are not read.

    The policy's own state (`HasState`) is loaded, too. Either everything is loaded, or the policy does not change. The number
    of ranks that wrote the checkpoint does not matter.

    Args:
        path: A checkpoint's folder, or a folder of checkpoints: the newest intact one is read.
        policy: A policy that is built like the one that was saved.

    Raises:
        CheckpointError: The checkpoint is damaged, or its names or shapes differ from the policy's. The message names them.
    """
    require_methods(policy, ("get_parameters",), "policy", "PolicyModel")
    owner, parameters = type(policy).__name__, parameters_of(policy)
    checkpoint = open_checkpoint(path, None, lambda found: _require_weights(found, owner, policy, parameters))
    _tell_skipped(checkpoint)
    parts = checkpoint.state.get("parts", {})
    saved = checkpoint.load([checkpoint.state["parameters"], parts.get("policy")])
    weights, own_state = saved
    if isinstance(policy, HasState):
        before = copy.deepcopy(policy.state_dict())
        try:
            policy.load_state_dict(own_state)
        except Exception as error:
            policy.load_state_dict(before)
            raise CheckpointError(
                f"{owner}.load_state_dict must accept the state in {checkpoint.path}; it raised {error!r}. The policy is "
                "unchanged. Build it as it was when it was saved."
            ) from error
    with torch.no_grad():
        for name, value in parameters.items():
            copy_into(value, weights[name])


def _tell_skipped(checkpoint: Checkpoint) -> None:
    """Say which newer checkpoints were left out, and why."""
    if checkpoint.skipped:
        warn_user(
            f"{checkpoint.path} was loaded, because newer checkpoints are damaged: {' '.join(checkpoint.skipped)}"
        )


def _require_weights(found: Checkpoint, owner: str, policy: Any, parameters: Mapping[str, Tensor]) -> None:
    """Require that a checkpoint has tensors of the same names and shapes as the policy, and its state if it has one."""
    saved, parts = found.state.get("parameters"), found.state.get("parts", {})
    if not isinstance(saved, dict) or not isinstance(parts, dict):
        raise CheckpointError(
            f"{found.path} must have been written by a trainer; it has no 'parameters'. Use a checkpoint of a trainer."
        )
    missing, extra = sorted(set(parameters) - set(saved)), sorted(set(saved) - set(parameters))
    if missing or extra:
        raise CheckpointError(
            f"The parameters in {found.path} must be those of {owner}; missing: {missing[:3] or 'nothing'}, unexpected: "
            f"{extra[:3] or 'nothing'}. Build the policy as it was when it was saved."
        )
    for name, value in parameters.items():
        shape = saved[name].shape if isinstance(saved[name], SavedTensor) else None
        if shape != tuple(value.shape):
            raise CheckpointError(
                f"{owner}: {name} has shape {list(value.shape)}, but {shape and list(shape)} in {found.path}. Build the policy "
                "as it was when it was saved."
            )
    if isinstance(policy, HasState) != ("policy" in parts):
        has, lacks = (owner, "the checkpoint") if isinstance(policy, HasState) else ("the checkpoint", owner)
        raise CheckpointError(
            f"{found.path}: {has} has a state of the policy (state_dict), and {lacks} has none. Build the policy as it was "
            "when it was saved."
        )
