"""The ridge around the weights at which a tool policy is held, in GRPO training."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.tools import ToolSelectionPolicy
from grpo import GRPOConfig, GRPOTrainer, HasPenalty
from grpo.checks import check_policy
from grpo.errors import ConfigError
from tests.support.tool_policies import CATALOGUE, TEXTS, policy


def moved(made: ToolSelectionPolicy, by: float) -> int:
    """Move all weights, and return their number."""
    with torch.no_grad():
        for value in made.parameters():
            value += by
    return sum(value.numel() for value in made.parameters())


def test_the_penalty_is_a_ridge_around_the_weights_at_the_call() -> None:
    """strength / (2 N) |w - start|^2 = 0.5 / 20 n 0.2^2 for n weights that move by 0.2, with gradient 0.5 / 10 0.2 = 0.01."""
    made = policy()
    made.hold_weights(num_requests=10, strength=0.5)
    assert made.penalty is not None
    assert float(made.penalty().detach()) == 0.0
    count = moved(made, 0.2)
    found = made.penalty()
    assert float(found.detach()) == pytest.approx(0.5 / 20 * count * 0.04, rel=1e-4)
    found.backward()
    for name, value in made.named_parameters():
        torch.testing.assert_close(value.grad, torch.full_like(value, 0.01), msg=name, rtol=1e-4, atol=1e-7)


def test_a_policy_that_is_not_held_has_no_penalty() -> None:
    made = policy()
    assert not isinstance(made, HasPenalty)
    made.hold_weights(num_requests=4)
    assert isinstance(made, HasPenalty)
    assert isinstance(copy.deepcopy(made), HasPenalty)
    made.hold_weights(num_requests=4, strength=0)
    assert not isinstance(made, HasPenalty)


def test_a_held_policy_keeps_every_rule() -> None:
    made = policy()
    made.hold_weights(num_requests=4)
    report = check_policy(made, TEXTS, num_samples=0)
    assert report.ok, str(report)
    assert next(result for result in report.results if result.name == "penalty").status == "passed"


def test_a_copy_has_the_penalty_of_its_own_weights() -> None:
    made = policy()
    made.hold_weights(num_requests=1, strength=1.0)
    copied = copy.deepcopy(made)
    moved(copied, 1.0)
    assert made.penalty is not None
    assert copied.penalty is not None
    assert float(made.penalty().detach()) == 0.0
    assert float(copied.penalty().detach()) > 1.0


def test_training_moves_held_weights_less() -> None:
    def distance(strength: float) -> tuple[float, dict[str, float]]:
        torch.manual_seed(0)
        made = policy(random=False)
        made.hold_weights(num_requests=len(TEXTS), strength=strength)
        start = [value.detach().clone() for value in made.parameters()]
        reward: Any = lambda states, calls: [float(one.tool == "ping") for one in calls]  # noqa: E731
        trainer = GRPOTrainer(
            config=GRPOConfig(group_size=8, learning_rate=0.05, seed=0), policy=made, reward_model=reward
        )
        for _ in range(10):
            metrics = trainer.step(TEXTS)
        squares = [(value - first).square().sum() for value, first in zip(made.parameters(), start, strict=True)]
        return float(torch.stack(squares).sum().detach()), metrics

    (free, without), (held, metrics) = distance(0.0), distance(5.0)
    assert held < 0.5 * free
    assert "train/penalty" not in without
    assert metrics["train/penalty"] > 0


def test_a_resumed_policy_is_held_where_it_was_and_a_saved_one_is_not(tmp_path: Path) -> None:
    made = policy()
    made.hold_weights(num_requests=1, strength=1.0)
    count = moved(made, 0.5)
    resumed = policy()
    moved(resumed, -3.0)
    resumed.hold_weights(num_requests=1, strength=1.0)
    resumed.load_state_dict(made.state_dict())
    assert resumed.penalty is not None
    assert float(resumed.penalty().detach()) == pytest.approx(count / 8, rel=1e-4)
    made.save(tmp_path)
    assert ToolSelectionPolicy.load(tmp_path, CATALOGUE, encoder=made.encoder).penalty is None


def test_numbers_out_of_range_are_refused(subtests: pytest.Subtests) -> None:
    for options, message in (
        ({"num_requests": 0}, "num_requests must be an integer >= 1"),
        ({"num_requests": 1, "strength": -1.0}, "strength must be at least 0"),
        ({"num_requests": 1, "strength": float("nan")}, "strength must be a finite number"),
    ):
        with subtests.test(message), pytest.raises(ConfigError, match=message):
            policy().hold_weights(**options)
