"""What belongs to a rank and not to the run, when another number of ranks continues a run."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo import GRPOConfig, GRPOTrainer
from grpo._common.global_state import capture_random_state, restore_random_state
from grpo._ranks.processes import SeveralProcesses
from grpo._running.other_ranks import for_other_ranks
from grpo.checkpoint import Checkpoint
from grpo.errors import CheckpointError, GRPOWarning
from tests.support.policies import TablePolicy

WAITING = {"rows": {"group_ids": torch.zeros(4, dtype=torch.long)}}
"""An iteration of four rows that was sampled ahead."""


class Rank(SeveralProcesses):
    """One of several ranks. It never meets the others."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        self._rank, self._num_ranks = rank, num_ranks

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def num_ranks(self) -> int:
        return self._num_ranks


def written_by(num_ranks: int, iteration: int = 5, rows: Any = None, num_ahead: int = 0) -> Checkpoint:
    """A checkpoint in memory. Its files are not needed."""
    checkpoint = object.__new__(Checkpoint)
    counters = {"data_seed": 3, "iteration": iteration}
    parts = {"replay": {"rows": ["old"]}, "policy": {"calls": 2}, "counters": counters, "in_progress": {"rows": rows}}
    parts |= {"ahead": {"pending": [WAITING] * num_ahead}, "progress": {"num_draws": 9, "best_score": 0.5}}
    whole = {"random": {"torch": "saved"}, "parts": parts}
    for name, value in {"path": Path("run"), "num_ranks": num_ranks, "state": whole}.items():
        object.__setattr__(checkpoint, name, value)
    return checkpoint


def test_the_same_number_of_ranks_continues_exactly() -> None:
    checkpoint = written_by(2, rows={"num_planned": 1})
    assert for_other_ranks(checkpoint, Rank(1, 2)) is checkpoint.state


def test_fewer_ranks_continue_their_own_states_and_say_what_is_left_out() -> None:
    checkpoint = written_by(4)
    with pytest.warns(
        GRPOWarning, match=r"run was written by 4 ranks, and 2 load it.*of the ranks from 2 on are left out"
    ):
        assert for_other_ranks(checkpoint, Rank(1, 2)) == checkpoint.state


def test_new_ranks_have_new_generators_and_nothing_to_replay() -> None:
    drawn = set()
    for iteration, rank in ((5, 2), (5, 3), (6, 2)):
        checkpoint, before = written_by(2, iteration), capture_random_state()
        with pytest.warns(GRPOWarning, match="the ranks from 2 on have new random generators and no replayed rows"):
            state = for_other_ranks(checkpoint, Rank(rank, 4))
        assert torch.equal(capture_random_state()["torch"], before["torch"])  # only the checkpoint's are replaced
        assert state["parts"] == checkpoint.state["parts"] | {"replay": {"rows": []}}
        assert checkpoint.state["parts"]["replay"] == {"rows": ["old"]}
        restore_random_state(state["random"])
        drawn.add(float(torch.rand(())))
        restore_random_state(before)
    assert len(drawn) == 3
    with pytest.warns(GRPOWarning, match="the ranks from 2 on have new"):
        assert for_other_ranks(written_by(2), Rank(1, 4))["random"] == {"torch": "saved"}


def test_an_unfinished_iteration_needs_the_same_number_of_ranks() -> None:
    with pytest.raises(
        CheckpointError, match=r"written by 2 ranks in the middle of an iteration, and 4 load it[.] Start 2 ranks"
    ):
        for_other_ranks(written_by(2, rows={"num_planned": 1}), Rank(0, 4))


def test_iterations_that_were_sampled_ahead_are_sampled_again_in_the_same_states() -> None:
    checkpoint = written_by(2, num_ahead=3)
    assert for_other_ranks(checkpoint, Rank(0, 2))["parts"]["ahead"] == {"pending": [WAITING] * 3}
    for rank, now in ((0, 1), (1, 4), (3, 4)):
        with pytest.warns(
            GRPOWarning, match=r"and 3 iterations that were sampled ahead \(12 rows per rank\) are sampled again[.]"
        ):
            parts = for_other_ranks(checkpoint, Rank(rank, now))["parts"]
        assert parts["ahead"] == {"pending": []}
        assert parts["progress"] == {"num_draws": 6, "best_score": 0.5}
    assert checkpoint.state["parts"]["progress"]["num_draws"] == 9


def test_a_run_with_iterations_ahead_makes_whole_iterations_on_another_number_of_ranks() -> None:
    """The rows of every iteration are those of its states, in the order of a run that nothing stopped."""
    seen: list[Any] = []

    def reward(states: Any, actions: Any) -> list[float]:
        seen.append(list(states))
        return [float(action) for action in actions]

    def made() -> GRPOTrainer:
        config = GRPOConfig(group_size=2, num_states_per_iteration=2, iterations_ahead=2, seed=0)
        return GRPOTrainer(config=config, policy=TablePolicy("abcdefgh"), reward_model=reward)

    states, how = [*"abcdefgh"], {"progress": False}
    made().train(states, num_iterations=8, **how)
    unbroken = [*seen]
    first = made()
    saved: list[Any] = []

    class Keep:
        def on_iteration(self, trainer: Any, metrics: Any) -> None:
            if trainer.iteration == 4:
                saved.append(copy.deepcopy(trainer.state_dict()))

    first.train(states, num_iterations=8, callbacks=[Keep()], **how)
    checkpoint = written_by(2)
    object.__setattr__(checkpoint, "state", saved[0])
    second = made()
    seen.clear()
    with pytest.warns(GRPOWarning, match=r"2 iterations that were sampled ahead \(8 rows per rank\) are sampled again"):
        second.load_state_dict(for_other_ranks(checkpoint, Rank(0, 1)))
    second.train(states, num_iterations=8, **how)
    assert seen == unbroken[4:]
