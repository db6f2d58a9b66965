"""Continue a run whose weights are divided with another number of ranks than wrote the checkpoint."""

from collections.abc import Mapping
from typing import Any

from grpo._common.global_state import capture_random_state, preserved_random_state, seed_everything
from grpo.checkpoint import Checkpoint
from grpo.engine import Engine
from grpo.errors import CheckpointError, warn_user


def for_other_ranks(checkpoint: Checkpoint, engine: Engine) -> Mapping[str, Any]:
    """The state of this rank, made from a checkpoint of any number of ranks. A GRPOWarning says what is not exact.

    Weights, optimizer, schedule, counters and the order of states belong to the run, and are exact. Generators, replayed rows
    and the states of policy and reward model belong to a rank. Rank r continues those of rank r, if there was one.

    Raises:
        CheckpointError: The checkpoint was written in the middle of an iteration, whose rows belong to ranks.
    """
    before, now, state = checkpoint.num_ranks, engine.num_ranks, checkpoint.state
    if before == now:
        return state
    if state["parts"]["in_progress"]["rows"] is not None:
        raise CheckpointError(
            f"{checkpoint.path} was written by {before} ranks in the middle of an iteration, and {now} load it. Start {before} "
            "ranks to finish the iteration, or load an earlier checkpoint."
        )
    if engine.rank >= before:
        state = {**state, "random": _new_generators(state, engine.rank)}
        state["parts"] = {**state["parts"], "replay": {"rows": []}}
    warn_user(
        f"{checkpoint.path} was written by {before} ranks, and {now} load it. Exact: weights, optimizer, learning rate, "
        "counters, and the order of states. Not exact: each rank has another share of the states, and "
        f"{_what_changes(before, now)}."
    )
    return state


def _new_generators(state: Mapping[str, Any], rank: int) -> dict[str, Any]:
    """Random generators of a rank that the run did not have before. They depend on the run, the iteration and the rank."""
    counters = state["parts"]["counters"]
    with preserved_random_state():
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
