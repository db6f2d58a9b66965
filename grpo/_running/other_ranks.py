"""Continue a run with another number of ranks than wrote the checkpoint, or divide weights that it has whole."""

from collections.abc import Mapping
from typing import Any

from grpo._common.global_state import capture_random_state, seed_everything
from grpo._common.preserved import preserved_random_state
from grpo._sharding.tensors import is_sharded
from grpo.checkpoint import Checkpoint, SavedRows, SavedTensor
from grpo.engine import Engine
from grpo.errors import CheckpointError, warn_user


def for_other_ranks(checkpoint: Checkpoint, engine: Engine) -> Mapping[str, Any]:
    """The state of this rank, made from a checkpoint of any number of ranks. A GRPOWarning says what is not exact.

    Weights, optimizer, schedule, counters and the order of states belong to the run, and are exact. Generators, replayed rows
    and the states of policy and reward model belong to a rank. Rank r continues those of rank r, if there was one. Iterations
    that were sampled ahead are sampled again in the same states, because their rows were those of other ranks.

    Raises:
        CheckpointError: The checkpoint was written in the middle of an iteration, whose rows belong to ranks.
    """
    before, now, state = checkpoint.num_ranks, engine.num_ranks, checkpoint.state
    if before == now:
        return state
    parts = state["parts"]
    if parts["in_progress"]["rows"] is not None:
        raise CheckpointError(
            f"{checkpoint.path} was written by {before} ranks in the middle of an iteration, and {now} load it. Start {before} "
            "ranks to finish the iteration, or load an earlier checkpoint."
        )
    ahead, progress, again = parts["ahead"]["pending"], parts["progress"], ""
    if ahead:
        num_rows = sum(one["rows"]["group_ids"].shape[0] for one in ahead)
        again = f", and {len(ahead)} iterations that were sampled ahead ({num_rows} rows per rank) are sampled again"
        num_draws = progress["num_draws"] - len(ahead)  # each of them has drawn its states once
        parts = {**parts, "ahead": {"pending": []}, "progress": {**progress, "num_draws": num_draws}}
    if engine.rank >= before:
        state, parts = {**state, "random": _new_generators(state, engine.rank)}, {**parts, "replay": {"rows": []}}
    warn_user(
        f"{checkpoint.path} was written by {before} ranks, and {now} load it. Exact: weights, optimizer, learning rate, "
        "counters, and the order of states. Not exact: each rank has another share of the states, "
        f"{_what_changes(before, now)}{again}."
    )
    return {**state, "parts": parts}


def with_rows(state: Mapping[str, Any], weights: Mapping[str, Any], optimizer: Any) -> Mapping[str, Any]:
    """The state with rows in place of whole tensors, where the ranks have divided the tensor. Each rank then reads its own.

    Args:
        state: The state of a checkpoint, with placeholders for tensors.
        weights: The weights of the trainer, by kind and name.
        optimizer: The optimizer of the trainer. Its state in the checkpoint has numbers in place of parameters.
    """
    found: dict[str, Any] = {
        kind: {name: _divided(saved, present.get(name)) for name, saved in state[kind].items()}
        for kind, present in weights.items()
        if isinstance(state.get(kind), Mapping)
    }
    parts = state.get("parts")  # what is missing is named when the state is loaded
    of_optimizer = parts.get("optimizer") if isinstance(parts, Mapping) else None
    moments = of_optimizer.get("state") if isinstance(of_optimizer, Mapping) else None
    tensors = dict(enumerate(tensor for group in getattr(optimizer, "param_groups", []) for tensor in group["params"]))
    if parts and of_optimizer and moments and any(map(is_sharded, tensors.values())):
        rows = {n: {name: _divided(one, tensors.get(n)) for name, one in own.items()} for n, own in moments.items()}
        found["parts"] = {**parts, "optimizer": {**of_optimizer, "state": rows}}
    return {**state, **found}


def _divided(saved: Any, present: Any) -> Any:
    """A placeholder for the rows of this rank, if the checkpoint has the tensor whole and the ranks have divided it."""
    is_whole = isinstance(saved, SavedTensor) and not isinstance(saved, SavedRows)
    if not is_whole or present is None or not is_sharded(present) or saved.shape != tuple(present.shape):
        return saved
    return SavedRows(name=saved.name, shape=saved.shape, dtype=saved.dtype)


def _new_generators(state: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Random generators of a rank that the run did not have before. They depend on the run, the iteration and the rank."""
    counters = state["parts"]["counters"]
    with preserved_random_state():
        # a prime far above the number of ranks, so that no rank of another iteration has the same seed
        seed_everything((counters["data_seed"] + 1_000_003 * (counters["iteration"] + 1) + rank) % 2**64)
        return capture_random_state()


def _what_changes(before: int, now: int) -> str:
    if now < before:
        return (
            "the random generators, the replayed rows, and the states of policy and reward model of the ranks from "
            f"{now} on are left out"
        )
    return (
        f"the ranks from {before} on have new random generators and no replayed rows, and continue the states of policy and "
        "reward model of lower ranks"
    )
