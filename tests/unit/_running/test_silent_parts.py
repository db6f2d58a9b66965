"""Parts of a reward that are always 0 are named once, after 20 iterations."""

import logging

import pytest

from grpo import GRPOConfig, GRPOTrainer, WeightedRewards
from grpo._running.silent_parts import NUM_ITERATIONS, SilentParts
from tests.support.policies import TablePolicy


def test_a_part_that_is_always_0_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    parts = SilentParts()
    with caplog.at_level(logging.WARNING, logger="grpo"):
        for iteration in range(NUM_ITERATIONS + 5):
            assert len(caplog.records) == (iteration >= NUM_ITERATIONS)
            late = float(iteration == NUM_ITERATIONS - 1)
            parts.see(
                {
                    "rewards/mean": 0.0,
                    "rewards/format/mean": 0.0,
                    "rewards/format/std": 0.0,
                    "rewards/late/mean": late,
                    "rewards/late/std": 0.0,
                    "rewards/balanced/mean": 0.0,
                    "rewards/balanced/std": 1.0,
                }
            )
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == [
        "The reward part format was 0 for every row of the first 20 iterations"
    ]


def test_nothing_is_said_where_every_part_is_earned_or_has_no_name(caplog: pytest.LogCaptureFixture) -> None:
    parts = SilentParts()
    with caplog.at_level(logging.WARNING, logger="grpo"):
        for _ in range(NUM_ITERATIONS):
            parts.see({"rewards/mean": 0.0, "rewards/right/mean": 0.5})
    assert not caplog.records


def test_train_names_a_part_that_no_action_of_20_iterations_earned(caplog: pytest.LogCaptureFixture) -> None:
    rewards = WeightedRewards(
        {
            "format": lambda states, actions: [0.0] * len(actions),
            "right": lambda states, actions: [float(action) for action in actions],
        }
    )
    for num_iterations, num_named in [(NUM_ITERATIONS - 1, 0), (NUM_ITERATIONS, 1), (NUM_ITERATIONS + 3, 1)]:
        caplog.clear()
        trainer = GRPOTrainer(config=GRPOConfig(group_size=2), policy=TablePolicy(), reward_model=rewards)
        with caplog.at_level(logging.WARNING, logger="grpo"):
            trainer.train(["a", "b"], num_iterations=num_iterations, progress=False)
        named = [record.getMessage() for record in caplog.records if "The reward part" in record.getMessage()]
        assert len(named) == num_named
        assert all(message.startswith("The reward part format was 0 for every row") for message in named)
