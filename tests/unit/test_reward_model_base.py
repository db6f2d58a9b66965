"""A plain function as a reward model: what error messages call it, and the state that it keeps."""

import functools
from typing import Any

import pytest
import torch

from grpo import ConfigError, WeightedRewards
from grpo.reward_model_base import RewardFunction, kept_state, restore_state
from grpo.writing import reward_name


class Counting:
    """A callable with a state."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, states: Any, actions: Any) -> list[float]:
        self.count += 1
        return [0.0] * len(states)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def length(states: Any, actions: Any) -> list[float]:
    return [float(len(action)) for action in actions]


def test_a_function_is_called_by_its_own_name_or_its_types(subtests: pytest.Subtests) -> None:
    cases = [
        (length, "length"),
        (lambda states, actions: [], "<lambda>"),
        (functools.partial(length), "partial"),
        (Counting(), "Counting"),
    ]
    for function, name in cases:
        with subtests.test(function=function, name=name):
            assert reward_name(RewardFunction(function)) == name
            assert repr(RewardFunction(function)) == name


def test_a_reward_model_is_called_by_its_class_and_method() -> None:
    assert reward_name(WeightedRewards({"length": length})) == "WeightedRewards.compute_rewards"


def test_the_state_of_a_function_goes_through_its_wrappers() -> None:
    counting = Counting()
    both = WeightedRewards({"a": counting, "b": length})
    both.compute_rewards(["s"], ["xy"])
    state = both.state_dict()
    assert state == {"a": {"count": 1}, "b": {}}
    both.compute_rewards(["s"], ["xy"])
    both.load_state_dict(state)
    assert counting.count == 1


def test_a_network_keeps_its_buffers_alone() -> None:
    judge = torch.nn.BatchNorm1d(2, track_running_stats=True)
    saved = {name: value.clone() for name, value in kept_state(judge).items()}
    assert set(saved) == {"running_mean", "running_var", "num_batches_tracked"}
    judge(torch.randn(4, 2))
    restore_state(judge, saved)
    assert judge.num_batches_tracked == 0


def test_a_state_that_nothing_can_restore_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"function has no load_state_dict\(\) to restore \['count'\]"):
        RewardFunction(length).load_state_dict({"count": 1})


def test_weighted_parts_keep_the_least_precise_dtype() -> None:
    """0.1 in float32 and 0.2 in float64 make a sum that is only as precise as float32."""
    parts = {"a": torch.tensor([0.1]), "b": torch.tensor([0.2], dtype=torch.float64)}
    total = WeightedRewards({"a": length, "b": length}, {"a": 1.0, "b": 2.0}).combine(parts)
    assert total.dtype == torch.float32
    assert total.item() == pytest.approx(0.5)
