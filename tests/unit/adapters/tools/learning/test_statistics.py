"""Running statistics by hand, and as the sink of a real run."""

import json
import math
from typing import Any

import pytest

from adapters.tools import RunningStatistics
from grpo import ConfigError, GRPOConfig, GRPOTrainer
from tests.support.policies import TablePolicy

THREE: list[dict[str, float]] = [
    {"rewards/mean": reward, "train/total_loss": loss, "train/kl_mean": kl, "train/entropy": entropy,
        "train/num_updates": 2.0, "group_stats/num_groups": 3.0, "group_stats/avg_group_size": 10 / 3}
    for reward, loss, kl, entropy in [(1.0, 0.5, 0.0, math.nan), (3.0, 0.25, 0.01, 0.7), (2.0, -1.0, 0.04, math.nan)]
]  # fmt: skip


def told(*iterations: dict[str, float], **settings: Any) -> RunningStatistics:
    statistics = RunningStatistics(**settings)
    for number, metrics in enumerate(iterations, start=1):
        statistics.log(metrics, number)
    return statistics


def test_a_nan_count_adds_nothing(subtests: pytest.Subtests) -> None:
    for name, counted in (
        ("train/num_updates", (2, 20)), ("group_stats/num_groups", (4, 10)), ("group_stats/avg_group_size", (4, 10)),
    ):  # fmt: skip
        for value in (math.nan, math.inf):
            with subtests.test(value=value, name=name):
                statistics = told(THREE[0], {**THREE[1], name: value})
                assert (statistics.num_updates, statistics.num_samples) == counted


def test_moving_averages_and_the_history_equal_hand_worked_values() -> None:
    averages = told(*THREE, decay=0.5).averages
    # weights 1/4, 1/2, 1 over their sum 7/4
    assert averages["reward"] == pytest.approx((1.0 / 4 + 3.0 / 2 + 2.0) / (7 / 4))  # 15/7
    assert averages["loss"] == pytest.approx((0.5 / 4 + 0.25 / 2 - 1.0) / (7 / 4))  # -3/7
    assert averages["kl"] == pytest.approx((0.0 / 4 + 0.01 / 2 + 0.04) / (7 / 4))
    assert averages["entropy"] == 0.7  # measured once: NaN does not count, nor does it age what was measured
    assert told(*THREE, decay=0.0).averages["reward"] == 2.0  # without a memory: the last
    for settings, rewards in (({}, [1.0, 3.0, 2.0]), ({"history": 2}, [3.0, 2.0]), ({"history": 1}, [2.0])):
        assert told(*THREE, **settings).reward_history == rewards, "the history is bounded"


def test_a_metric_that_was_never_measured_has_no_average() -> None:
    assert RunningStatistics().averages == {"reward": None, "loss": None, "kl": None, "entropy": None}
    statistics = told({"rewards/max": 1.0}, {"rewards/mean": math.inf})
    assert (statistics.averages["reward"], statistics.reward_history) == (None, [])
    assert (statistics.num_iterations, statistics.num_updates, statistics.num_samples) == (2, 0, 0)


def test_statistics_restored_from_json_continue_exactly_and_reset_ones_anew() -> None:
    unbroken, stopped = told(*THREE, decay=0.9, history=2), told(*THREE[:2], decay=0.9, history=2)
    resumed = RunningStatistics.from_dict(json.loads(json.dumps(stopped.to_dict(), allow_nan=False)))
    resumed.log(THREE[2], 3)
    assert resumed.to_dict() == unbroken.to_dict()
    resumed.reset()
    assert resumed.to_dict() == RunningStatistics(decay=0.9, history=2).to_dict()
    resumed.log(THREE[1], 1)
    assert (resumed.averages["reward"], resumed.num_samples) == (3.0, 10)


def test_unknown_and_missing_keys_and_invalid_settings_are_refused(subtests: pytest.Subtests) -> None:
    whole = RunningStatistics().to_dict()
    for wrong in (whole | {"mood": 1}, {"decay": 0.9}, whole | {"moments": {"reward": [0.0, 0.0]}}):
        with subtests.test(wrong=wrong), pytest.raises(ConfigError, match="Pass what to_dict"):
            RunningStatistics.from_dict(wrong)
    for name, value in (("decay", 1.0), ("decay", -0.1), ("decay", math.nan), ("history", 0)):
        with subtests.test(name, value=value), pytest.raises(ConfigError, match=f"RunningStatistics.{name}"):
            RunningStatistics(**{name: value})


def trained(reward: Any, states: list[str], num_iterations: int, sink: Any, **settings: Any) -> tuple[GRPOTrainer, Any]:
    config = GRPOConfig(group_size=6, seed=0, **settings)
    trainer = GRPOTrainer(config=config, policy=TablePolicy(), reward_model=reward)
    return trainer, trainer.train(states, num_iterations=num_iterations, sinks=[sink], progress=False)


def test_groups_left_out_by_dynamic_sampling_count_as_samples() -> None:
    executed = []

    def one_in_four(states: Any, actions: Any) -> list[float]:
        executed.extend(actions)
        return [float(action if state == "a" else 0.5) for state, action in zip(states, actions, strict=True)]

    statistics, settings = RunningStatistics(), {"num_states_per_iteration": 4, "dynamic_sampling_rounds": 2}
    trained(one_in_four, ["a", "b", "b", "b"], 2, statistics, **settings)
    assert statistics.num_samples == len(executed) > 2 * 4 * 6


def test_as_the_sink_of_a_run_statistics_match_its_history() -> None:
    statistics = RunningStatistics(decay=0.5)
    reward: Any = lambda states, actions: [float(action) for action in actions]  # noqa: E731
    trainer, history = trained(reward, ["a", "b"], 3, statistics, batch_size=4, num_epochs_per_update=2)
    assert statistics.num_iterations == 3
    assert statistics.num_samples == 3 * 2 * 6
    assert statistics.num_updates == 3 * 2 * 3  # two passes over 12 rows, 4 at a time
    means = [metrics["rewards/mean"] for metrics in history]
    assert statistics.reward_history == means
    assert statistics.averages["reward"] == pytest.approx((means[0] / 4 + means[1] / 2 + means[2]) / (7 / 4))
    statistics.log(trainer.update(trainer.collect(["a"])), trainer.iteration)  # whoever has no run logs by hand
    assert statistics.num_samples == 3 * 12 + 6
