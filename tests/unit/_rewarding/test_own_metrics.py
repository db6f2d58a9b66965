"""A reward model's own metrics: means over the rows of an iteration, totals, and what failures and ranks do to them."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from grpo import GRPOConfig, GRPOTrainer, RewardConfig, Rewards, WeightedRewards
from grpo._collecting.costs import Costs
from grpo._retrying.calls import RetriedCalls
from grpo.experience_collector import ExperienceCollector


class Measuring:
    """Each action is a number of seconds. Negative actions fail."""

    def compute_rewards(self, states: Any, actions: Sequence[int]) -> Rewards:
        if min(actions) < 0:
            raise ValueError("negative")
        return Rewards(
            values=torch.tensor(actions).double(),
            metrics={"judge/calls": (0, len(actions)), "judge/seconds": (len(actions), sum(actions))},
        )

    def train(self, *_: Any) -> Any:
        return self

    eval = to = train


class Draws:
    """A policy that gives every state the actions it was made with."""

    def __init__(self, *actions: int) -> None:
        self.actions = actions

    def generate_actions(self, states: Sequence[Any], num_actions_per_state: int, **_: Any) -> list[list[int]]:
        return [list(self.actions) for _ in states]

    def get_log_probabilities(self, states: Sequence[Any], actions: Sequence[int]) -> torch.Tensor:
        return torch.zeros(len(actions))

    def get_parameters(self) -> dict[str, Any]:
        return {}

    def train(self, *_: Any) -> "Draws":
        return self

    eval = to = train


def collector(reward_model: Any, *actions: int, **settings: Any) -> ExperienceCollector:
    arguments = {"reward": RewardConfig(**settings), "reward_calls": RetriedCalls, "group_size": len(actions)}
    return ExperienceCollector(policy=Draws(*actions), reward_model=reward_model, **arguments)


def taken(found: ExperienceCollector) -> dict[str, float]:
    agreed = found.costs.agree([found.costs.of_this_rank()])
    return {name: value for name, value in agreed.items() if name.startswith("judge/")}


def test_metrics_are_means_over_all_calls_of_an_iteration_or_totals() -> None:
    """Two calls with 1, 2 and 6 s each: 6 calls of 3 s on average. The next iteration starts anew."""
    found = collector(Measuring(), 1, 2, 6)
    for _ in range(2):
        found.collect(["state"])
    assert (taken(found), taken(found)) == ({"judge/calls": 6, "judge/seconds": 3.0}, {})


def test_metrics_are_joined_over_ranks() -> None:
    """Calls of 1 and 4 s here and of 10 s on the other rank: 5 s on average."""
    found, measured = collector(Measuring(), 1, 4), {"judge/calls": (0, 1), "judge/seconds": (1, 10.0)}
    found.collect(["state"])
    others = Costs(counts={"rows/dropped": 2.0}, measured=measured, num_repeated=0)
    metrics = found.costs.agree([found.costs.of_this_rank(), others])
    assert [metrics[name] for name in ("judge/calls", "judge/seconds", "rows/dropped")] == [3, 5.0, 2.0]


@pytest.mark.parametrize(
    ("reward", "actions", "settings", "expected"),
    [
        # all rows, then each by itself: the calls with 1 and 5 s succeed
        (Measuring(), [1, -3, 5], {"on_failure": "drop"}, {"judge/calls": 2, "judge/seconds": 3.0}),
        (
            WeightedRewards({"judge": Measuring(), "one": lambda s, a: [1.0] * len(a), "again": Measuring()}),
            [1, 2],
            {},
            {"judge/calls": 4, "judge/seconds": 1.5},
        ),
    ],
)
def test_the_parts_of_a_weighted_reward_are_measured_and_a_call_that_fails_is_not(reward, actions, settings, expected):
    found = collector(reward, *actions, **settings)
    found.collect(["state"])
    assert taken(found) == expected


def test_metrics_that_no_iteration_has_reported_are_in_the_checkpoint() -> None:
    found, again = collector(Measuring(), 1, 2), collector(Measuring(), 1, 2)
    found.collect(["state"])
    again.costs.load_state_dict(found.costs.state_dict())
    assert taken(again) == taken(found) == {"judge/calls": 2, "judge/seconds": 1.5}


def test_a_trainer_reports_the_metrics_of_each_iteration() -> None:
    class Learns(torch.nn.Linear):
        """Draws the actions 1 and 3."""

        def generate_actions(self, states: Any, num_actions_per_state: int, **_: Any) -> list[list[int]]:
            return [[1, 3] for _ in states]

        def get_log_probabilities(self, states: Any, actions: Sequence[int]) -> torch.Tensor:
            return self(torch.tensor(actions).view(-1, 1).float()).squeeze(1)

        def get_parameters(self) -> dict[str, Any]:
            return dict(self.named_parameters())

    trainer = GRPOTrainer(config=GRPOConfig(group_size=2), policy=Learns(1, 1), reward_model=Measuring())
    for _ in range(2):
        metrics = trainer.step(["a", "b"])
        assert (metrics["judge/calls"], metrics["judge/seconds"]) == (4, 2.0)


@pytest.mark.parametrize("metrics", [{}, {"judge/seconds": (0, 0.0)}])
def test_a_model_without_measurements_reports_what_it_gives(metrics: dict[str, Any]) -> None:
    class Idle(Measuring):
        def compute_rewards(self, states: Any, actions: Sequence[int]) -> Rewards:
            return Rewards(values=torch.zeros(len(actions)), metrics=metrics)

    found = collector(Idle(), 1)
    found.collect(["state"])
    assert taken(found) == {name: value for name, (_, value) in metrics.items()}
