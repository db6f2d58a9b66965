"""Gradients and log-probs that are not finite: no weight changes, and too many of them end the run."""

import math
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo import ContractError, NonFiniteGradientError
from tests.support.policies import DuckPolicy, TablePolicy, weights_of
from tests.support.trainers import state_of, trainer_of


class Poisoned(TablePolicy):
    """Puts a value into its gradient at the given backward passes, counted from 0."""

    def __init__(self, when: set[int], value: float) -> None:
        super().__init__()
        number = count()

        def hook(gradient: Tensor) -> Tensor:
            if next(number) not in when:
                return gradient
            poisoned = gradient.clone()
            poisoned[1, 0] = value
            return poisoned

        self.logits.register_hook(hook)


@pytest.mark.parametrize(
    ("at", "bad", "duck"), [(0, math.nan, False), (2, math.inf, True), (3, -math.inf, False), (5, math.nan, True)]
)
def test_an_update_with_a_non_finite_gradient_changes_nothing(at: int, bad: float, duck: bool) -> None:
    """Six updates in two iterations; the poisoned one leaves weights and Adam's moments bitwise as they were."""
    policy: Any = Poisoned({at}, bad)
    if duck:
        inner, policy = policy, DuckPolicy(num_actions=2)
        policy.tensors = {"logits": inner.logits}
    trainer = trainer_of(policy, batch_size=3, seed=0)
    history = [state_of(trainer)]
    apply = trainer.optimizer_step.apply

    def applied_and_seen(sum_of_scores: Tensor) -> None:
        apply(sum_of_scores)
        history.append(state_of(trainer))

    trainer.optimizer_step.apply = applied_and_seen  # type: ignore[method-assign]
    states = [0, 1] if duck else ["a", "b"]
    skipped = [trainer.step(states)["train/skipped_updates"] for _ in range(2)]
    assert skipped == ([1.0, 0.0] if at < 3 else [0.0, 1.0])
    assert [before != after for before, after in pairwise(history)] == [n != at for n in range(6)]
    assert torch.isfinite(weights_of(policy)).all()


def test_a_poisoned_micro_batch_skips_its_whole_update() -> None:
    """8 rows in forwards of 3: three backward passes per update; the second of the first update is poisoned."""
    policy = Poisoned({1}, math.nan)
    trainer = trainer_of(policy, micro_batch_size=3)
    before = state_of(trainer)
    metrics = trainer.step(["a", "b"])
    assert metrics["train/skipped_updates"] == 1.0
    assert state_of(trainer) == before
    assert policy.logits.grad is None
    trainer.step(["a", "b"])
    assert state_of(trainer) != before


@pytest.mark.parametrize("limit", [1, 3])
def test_too_many_skipped_updates_in_a_row_end_the_run_with_a_checkpoint(limit: int, tmp_path: Path) -> None:
    """Iterations 0 and 1 are sound, then nothing is."""
    trainer = trainer_of(Poisoned(set(range(2, 100)), math.nan), max_skipped_updates=limit, seed=0)
    states: list[str] = []
    sink = SimpleNamespace(log=lambda metrics, iteration: states.append(state_of(trainer)), close=lambda: None)
    run: dict[str, Any] = {"sinks": [sink], "checkpoint_dir": tmp_path, "checkpoint_every": 100, "progress": False}
    with pytest.raises(
        NonFiniteGradientError, match=rf"{limit} updates in a row had a gradient of norm nan.*no weight"
    ):
        trainer.train(["a", "b"], num_iterations=20, **run)
    assert len(states) == 2 + limit - 1
    assert set(states[1:]) == {state_of(trainer)}
    fresh = trainer_of(Poisoned(set(), math.nan), max_skipped_updates=limit, seed=9)
    fresh.load_checkpoint(tmp_path)
    assert state_of(fresh) == state_of(trainer)
    assert fresh.iteration == len(states)


def test_loading_a_run_ended_by_skipped_updates_resets_their_count(tmp_path: Path) -> None:
    """Three bad updates in a row end a run. After loading, two more are skipped and the third ends the run."""
    trainer = trainer_of(Poisoned(set(range(1, 100)), math.nan), max_skipped_updates=3)
    with pytest.raises(NonFiniteGradientError):
        trainer.train(["a", "b"], num_iterations=9, checkpoint_dir=tmp_path, checkpoint_every=9, progress=False)
    resumed = trainer_of(Poisoned(set(range(100)), math.nan), max_skipped_updates=3)
    resumed.load_checkpoint(tmp_path)
    with pytest.raises(NonFiniteGradientError, match="3 updates in a row"):
        resumed.train(["a", "b"], num_iterations=9, progress=False)
    assert [metrics["train/skipped_updates"] for metrics in resumed.history] == [1.0, 1.0]


def test_one_finite_update_resets_the_count_of_skipped_updates() -> None:
    trainer = trainer_of(Poisoned({0, 1, 3, 4, 6, 7}, math.inf), max_skipped_updates=3)
    skipped = [trainer.step(["a", "b"])["train/skipped_updates"] for _ in range(9)]
    assert skipped == [1.0, 1.0, 0.0] * 3


def test_a_run_whose_first_gradient_is_0_for_a_reason_that_stays_is_an_error() -> None:
    class Detached(TablePolicy):
        """Its log-probs depend on the logits, but not on how large the logits are."""

        scale = 0.0

        def get_log_probabilities(self, states: Any, actions: Any) -> Tensor:
            found = super().get_log_probabilities(states, actions)
            return found.detach() + self.scale * found

    message = r"Detached: in the first update, .*0 for all 1 \(logits\), because no log-prob"
    with pytest.raises(ContractError, match=message):
        trainer_of(Detached()).step(["a", "b"])
    later = trainer_of(Detached())
    for scale, num_zero in ((1.0, 0.0), (0.0, 1.0)):
        later.policy.scale = scale
        assert later.step(["a", "b"])["train/zero_gradients"] == num_zero


def test_a_gradient_of_0_that_says_nothing_of_the_policy_is_no_error() -> None:
    """Equal actions with opposite advantages cancel; without advantages, there is nothing to learn."""
    for script, rewards in [([[0, 0], [1, 1]], [1.0, 0.0, 0.0, 1.0]), ([[0, 1], [1, 0]], [1.0, 1.0, 0.0, 0.0])]:
        trainer = trainer_of(TablePolicy(script=script), lambda states, actions, given=rewards: given, group_size=2)
        assert trainer.step(["a", "b"])["train/grad_norm"] == 0.0
