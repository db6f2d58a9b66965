"""Observations in updates: their cross-entropy by hand, their own denominator and mask, and who is asked for them."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grpo import (
    ActionScores,
    ConfigError,
    ContractError,
    ExperienceBatch,
    GRPOTrainer,
    ObjectiveConfig,
    ObjectiveOutput,
    SampledActions,
)
from tests.support.policies import EpisodePolicy, TablePolicy
from tests.support.stopped_runs import Unbroken, by_signal
from tests.support.trainers import assert_same, trainer_of, updated

SCRIPT = [[(0, 1), (1, 0, 1)], [(1,), (0, 1)]]
"""Two moves in each of two states, each with what the environment answered: 1, 2, 0 and 1 observations."""
ROWS: dict[str, Any] = {
    "states": ["a", "a", "b", "b"],
    "actions": [action for group in SCRIPT for action in group],
    "rewards": [1.0, 0.0, 3.0, 4.0],
    "group_ids": [0, 0, 1, 1],
}


class Foreseeing(TablePolicy):
    """A table policy that also foresees what the environment answers, from a table of its own. Padding is NaN.

    An action is a move and the answers to it.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.answers = nn.Parameter(torch.zeros(2, 2, dtype=torch.float64))

    def score_actions(self, states: Any, actions: Any) -> ActionScores:
        log_probs = self.get_log_probabilities(states, [move for move, *_ in actions]).unsqueeze(1)
        width = max(len(answers) for _, *answers in actions)
        foreseen = self.answers[[self.places[state] for state in states]].log_softmax(1)
        rows = [[foreseen[row, answer] for answer in answers] for row, (_, *answers) in enumerate(actions)]
        nan = torch.tensor(math.nan, dtype=torch.float64)
        observed = torch.stack([torch.stack([*row, *[nan] * (width + 1 - len(row))])[:width] for row in rows])
        return ActionScores(
            log_probs=log_probs,
            mask=torch.ones_like(log_probs, dtype=torch.bool),
            observed_log_probs=observed,
            observed_mask=torch.arange(width) < torch.tensor([len(row) for row in rows]).unsqueeze(1),
        )

    def sample(self, states: Any, size: int) -> tuple[list[list[tuple[int, ...]]], Tensor]:
        """Moves, each answered by its own number, once or twice."""
        moves = super().generate_actions(states, size)
        rows = [[(move, *[move] * (1 + place % 2)) for place, move in enumerate(group)] for group in moves]
        return rows, torch.tensor([[True, place % 2 == 1] for group in moves for place, _ in enumerate(group)])

    def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> Any:
        return SCRIPT if self.script is not None else self.sample(states, num_actions_per_state)[0]


def sampled(*rows: int) -> ExperienceBatch:
    chosen = rows or range(4)
    return ExperienceBatch.from_rows(**{name: [values[i] for i in chosen] for name, values in ROWS.items()})


def learned(*batches: ExperienceBatch, policy: Any = None, **settings: Any) -> tuple[Tensor, dict[str, float], Any]:
    """The gradient of one update, its metrics, and the policy."""
    policy = Foreseeing() if policy is None else policy
    settings = {"objective": ObjectiveConfig(observation_coef=0.5), **settings}
    (gradient,), metrics = updated(policy, *(batches or [sampled()]), **settings)
    return gradient, metrics, policy


def test_each_row_counts_the_same_and_its_observations_share_its_weight() -> None:
    """All answers have probability 1/2. The rows have 1, 2, 0 and 1 observations, which weigh 1/4, 1/8 each, and 1/4, so the
    loss is 0.5 log 2 (1/4 + 1/4 + 0 + 1/4). The gradient of an observation is its weight times p - onehot: in state a,
    1/4 (1/2, -1/2) + 1/8 (-1/2, 1/2) + 1/8 (1/2, -1/2), and in state b, 1/4 (1/2, -1/2). The moves' gradient is GRPO's: the
    advantages are 1/2, -1/2, -1/2, 1/2, for moves 0, 1, 1, 0."""
    gradient, metrics, _ = learned()
    moves = [-1 / 8, 1 / 8, -1 / 8, 1 / 8]
    assert_same(gradient, torch.tensor([*moves, *[0.5 / 8, -0.5 / 8, 0.5 / 8, -0.5 / 8]], dtype=torch.float64))
    assert metrics["train/observation_loss"] == pytest.approx(0.5 * math.log(2) * 3 / 4)
    parts = metrics["train/policy_loss"] + metrics["train/observation_loss"]
    assert metrics["train/total_loss"] == pytest.approx(parts)
    assert metrics["steps/max"] == 1.0, "observations are no steps"


def test_a_mean_over_observations_divides_by_their_number() -> None:
    """Four observations weigh 1/4 each, whatever the number of steps."""
    gradient, metrics, _ = learned(objective=ObjectiveConfig(observation_coef=2.0, aggregation="step_mean"))
    assert metrics["train/observation_loss"] == pytest.approx(2.0 * math.log(2))
    a, b = [(1 - 1 + 1) / 2, (-1 + 1 - 1) / 2], [1 / 2, -1 / 2]
    assert_same(gradient[4:], 2.0 / 4 * torch.tensor([*a, *b], dtype=torch.float64))


def test_a_policy_foresees_its_environment_also_where_no_row_has_an_advantage() -> None:
    """The rewards are all equal, so that without observations no row would be forwarded."""
    gradient, metrics, policy = learned(replace(sampled(), rewards=torch.zeros(4)))
    assert metrics["rows/skipped_zero_advantage"] == 0.0
    assert_same(gradient[:4], torch.zeros(4, dtype=torch.float64))
    assert float(gradient[4:].abs().sum()) > 0
    assert policy.calls["score with gradient"] == 1


def test_demonstrations_have_observations_too() -> None:
    """Beside the sampled rows, one demonstration with one observation: five rows share the weight, and the demonstration's
    answer adds 1/5 (1/2, -1/2) in state b. The cross-entropy of its move is separate."""
    given = ExperienceBatch.from_demonstrations(["b"], [(1, 1)])
    gradient, metrics, policy = learned(sampled(), given, micro_batch_size=2)
    assert metrics["train/observation_loss"] == pytest.approx(0.5 * math.log(2) * 4 / 5)
    assert metrics["train/demonstration_loss"] == pytest.approx(math.log(2))
    answers = torch.tensor([1 / 2, -1 / 2, 1.0, -1.0], dtype=torch.float64) * 0.5 / 5
    assert_same(gradient[4:], answers)
    assert_same(gradient[:4], torch.tensor([-1 / 8, 1 / 8, -1 / 8 + 1 / 2, 1 / 8 - 1 / 2], dtype=torch.float64))
    _, metrics, _ = learned(given)
    assert metrics["train/observation_loss"] == pytest.approx(0.5 * math.log(2))
    assert policy.calls["score"] == 3, "two passes of sampled rows, and one of the demonstration"


def test_without_the_coefficient_observations_are_never_read() -> None:
    class Poisoned(Foreseeing):
        def score_actions(self, states: Any, actions: Any) -> ActionScores:
            scores = super().score_actions(states, actions)
            return replace(scores, observed_log_probs=scores.observed_log_probs * math.nan)

    gradient, metrics, policy = learned(policy=Poisoned(), objective=ObjectiveConfig())
    assert_same(gradient[4:], torch.zeros(4, dtype=torch.float64))
    assert "train/observation_loss" not in metrics
    assert policy.calls["score"] == 0
    with pytest.raises(ContractError, match="log-probabilities of steps and observations must be finite"):
        learned(policy=Poisoned())


def test_an_objective_of_the_users_own_stands_beside_them() -> None:
    def own(inputs: Any) -> ObjectiveOutput:
        return ObjectiveOutput(loss=0.0 * inputs.log_probs.sum(), metrics={})

    gradient, metrics, _ = learned(own_loss=own)
    assert_same(gradient[4:], learned()[0][4:])
    assert_same(gradient[:4], torch.zeros(4, dtype=torch.float64))
    assert metrics["train/total_loss"] == metrics["train/observation_loss"]


class Telling(Foreseeing):
    """Samples with masks."""

    def sample_actions(self, states: Any, num_actions_per_state: int) -> SampledActions:
        actions, observed_mask = self.sample(states, num_actions_per_state)
        mask = torch.ones(len(observed_mask), 1, dtype=torch.bool)
        return SampledActions(actions=actions, mask=mask, observed_mask=observed_mask)


@pytest.mark.parametrize(
    ("kind", "coef", "num_passes"), [(Telling, 0.5, 0), (Telling, 0.0, 0), (Foreseeing, 0.5, 1), (Foreseeing, 0.0, 1)]
)
def test_a_sampler_that_tells_the_mask_saves_a_pass(kind, coef, num_passes):
    """`Foreseeing` is scored once to find its steps, with or without observations."""
    policy = kind()
    trainer_of(policy, objective=ObjectiveConfig(observation_coef=coef), seed=0).step(["a", "b"])
    assert (policy.calls["score"], policy.calls["score with gradient"]) == (num_passes, 1)


def test_the_policy_learns_the_answers_of_a_run_that_samples_ahead() -> None:
    """Each move is answered by its number, and the reward wants move 1 in both states: then the answer is 1."""
    objective = ObjectiveConfig(observation_coef=1.0, sampler_correction="none")
    settings = {"objective": objective, "iterations_ahead": 1, "seed": 0, "learning_rate": 0.1}
    policy = Telling()
    trainer = trainer_of(policy, lambda s, a: [float(x[0]) for x in a], **settings)
    trainer.train(["a", "b"], num_iterations=80, progress=False)
    assert policy.logits.softmax(1)[:, 1].min() > 0.9
    assert policy.answers.softmax(1)[:, 1].min() > 0.9


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize("at", [2, 3, 4])
def test_a_stopped_run_continues_to_the_bit(at: int, tmp_path: Path) -> None:
    """With replayed rows, stopped before or between updates."""

    def trainer() -> GRPOTrainer:
        torch.manual_seed(0)
        objective = ObjectiveConfig(observation_coef=0.5)
        return trainer_of(Foreseeing(), seed=0, batch_size=6, replay_iterations=1, objective=objective)

    given = ExperienceBatch.from_demonstrations(["b"], [(1, 1)])
    options = {"demonstrations": given, "progress": False}
    unbroken = Unbroken(lambda _: (trainer(), ["a", "b"], options), num_iterations=2)
    unbroken.assert_same_after_a_stop(tmp_path, "step", at, by_signal)


class Wrong(Foreseeing):
    """Its scores are changed by a function."""

    def __init__(self, change: Callable[[ActionScores], dict[str, Any]]) -> None:
        super().__init__()
        self.change = change

    def score_actions(self, states: Any, actions: Any) -> ActionScores:
        scores = super().score_actions(states, actions)
        return replace(scores, **self.change(scores))


NOTHING = {"observed_log_probs": None, "observed_mask": None}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda scores: {"observed_log_probs": scores.observed_log_probs.detach()},
            "Wrong: observed_log_probs must carry a gradient, as log_probs do, or it teaches",
        ),
        (lambda scores: {"observed_mask": None}, "observed_log_probs and observed_mask together; got one of them"),
        (
            lambda scores: NOTHING if torch.is_grad_enabled() else {},
            r"must score the batch's observations, .*: the policy scored none, .* has \[4, 2\]",
        ),
        (
            lambda scores: {"observed_mask": scores.observed_mask & (not torch.is_grad_enabled())},
            r"Wrong must score the batch's observations, .*score the same observations every time",
        ),
    ],
)
def test_wrong_observations_are_refused(change, message):
    with pytest.raises(ContractError, match=message):
        learned(policy=Wrong(change))


def test_a_coefficient_without_observations_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"observation_coef=0\.5 needs log-probs of observations, and TablePolicy gives"
    ):
        learned(replace(sampled(), actions=[0, 1, 1, 0]), policy=TablePolicy())
    with pytest.raises(ConfigError, match="EpisodePolicy has split_steps"):
        trainer_of(EpisodePolicy(), objective=ObjectiveConfig(observation_coef=0.1))
    with pytest.raises(ConfigError, match="observation_coef must be >= 0"):
        ObjectiveConfig(observation_coef=-0.1)
