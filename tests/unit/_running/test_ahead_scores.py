"""Rows that were sampled ahead have log-probs of the policy that sampled them, and scores of the policy that uses them."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo import AdvantageConfig, GRPOConfig, GRPOTrainer, KLControl, ObjectiveConfig, ObjectiveOutput
from tests.support.policies import ExactSampling, TablePolicy
from tests.support.trainers import by_hand

pytestmark = pytest.mark.usefixtures("without_type_checks")


@pytest.mark.parametrize("tells_scores", [True, False])
def test_old_log_probs_are_those_at_the_start_of_the_iteration_that_uses_the_rows(tells_scores: bool) -> None:
    """In the first update of an iteration the ratio is 1; the behaviour log-probs are those of the policy of long ago."""
    seen: list[Any] = []
    policy = ExactSampling()
    policy.tells_scores = tells_scores
    trainer, _ = by_hand(
        policy=policy,
        rewards=lambda states, actions: [float(len(action)) for action in actions],
        config={"iterations_ahead": 1, "group_size": 4, "num_epochs_per_update": 2, "seed": 0},
    )
    objective = trainer.objective.of_sampled

    def noting(inputs: Any) -> Any:
        seen.append(inputs)
        return objective(inputs)

    trainer.objective.of_sampled = noting  # type: ignore[method-assign]
    trainer.train([0, 1], num_iterations=3, progress=False)
    first, second, third = seen[::2]
    for inputs in (first, second, third):
        torch.testing.assert_close(inputs.old_log_probs[inputs.mask], inputs.log_probs.detach()[inputs.mask])
    torch.testing.assert_close(first.behaviour_log_probs[first.mask], first.old_log_probs[first.mask])
    for inputs in (second, third):
        assert (inputs.behaviour_log_probs - inputs.old_log_probs)[inputs.mask].abs().max() > 1e-3


def test_an_objective_of_your_own_gets_the_behaviour_log_probs_and_no_warning() -> None:
    seen = []

    def own(inputs: Any) -> ObjectiveOutput:
        seen.append(inputs.behaviour_log_probs)
        return ObjectiveOutput(loss=-(inputs.log_probs * inputs.weights).sum(), metrics={})

    trainer, _ = by_hand(config={"iterations_ahead": 1}, objective=own)
    trainer.train(["a", "b"], num_iterations=2, progress=False)
    assert all(values is not None for values in seen)
    assert len(seen) == 2


def test_values_and_keys_are_those_at_the_start_of_the_iteration_that_uses_the_rows() -> None:
    class Critic(ExactSampling):
        def __init__(self) -> None:
            super().__init__()
            self.value = torch.nn.Parameter(torch.zeros(self.max_steps, dtype=self.head.weight.dtype))

        def score_actions(self, states: Any, actions: Any) -> Any:
            scores = super().score_actions(states, actions)
            return replace(scores, values=self.value[: scores.mask.shape[1]].repeat(len(actions), 1))

    trainer, policy = by_hand(
        policy=Critic(),
        rewards=lambda states, actions: [1.0 for _ in actions],
        config={
            "iterations_ahead": 1,
            "group_size": 2,
            "seed": 0,
            "advantage": AdvantageConfig(credit="gae"),
            "objective": ObjectiveConfig(sampler_correction="none"),
        },
    )
    objective, old_values, now = trainer.objective.of_sampled, [], []

    def noting(inputs: Any) -> Any:
        old_values.append(inputs.old_values[:, 0])
        now.append(float(policy.value[0].detach()))
        return objective(inputs)

    trainer.objective.of_sampled = noting  # type: ignore[method-assign]
    trainer.train([0, 1], num_iterations=3, progress=False)
    assert now[0] != now[1] != now[2]
    assert [values.unique().tolist() for values in old_values] == [[value] for value in now]


class NotesIteration(TablePolicy):
    """A reference that notes in which iteration of its trainer it scores rows."""

    def __init__(self) -> None:
        super().__init__()
        self.scored_in: list[int] = []
        self.trainer: Any = None

    def get_log_probabilities(self, states: Any, actions: Any) -> Any:
        if self.trainer is not None:
            self.scored_in.append(self.trainer.iteration)
        return super().get_log_probabilities(states, actions)


def test_reference_and_adaptive_coefficient_are_those_of_the_iteration_that_uses_the_rows() -> None:
    reference = NotesIteration()
    config = GRPOConfig(group_size=4, iterations_ahead=2, learning_rate=0.5, seed=0, kl_control=KLControl(target=1e-6))
    trainer = GRPOTrainer(
        config=config,
        policy=TablePolicy(),
        reward_model=lambda states, actions: [float(number % 2) for number in range(len(actions))],
        reference_policy=reference,
    )
    reference.trainer = trainer
    before: list[float] = []
    objective = trainer.objective.of_sampled

    def noting(inputs: Any) -> Any:
        before.append(inputs.kl_coef)
        return objective(inputs)

    trainer.objective.of_sampled = noting  # type: ignore[method-assign]
    trainer.train(["a", "b"], num_iterations=4, progress=False)
    assert reference.scored_in == [0, 1, 2, 3]  # at their sampling it would be 0, 0, 0, 1
    # the KL is 0 at first: 0.04 / 1.5. Then it is above its target: times 1.5. At their sampling it would be 0.04 three times.
    assert before == pytest.approx([0.04, 0.04 / 1.5, 0.04, 0.06], rel=1e-12)
