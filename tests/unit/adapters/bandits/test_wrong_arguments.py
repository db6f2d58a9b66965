"""Constructors answer every wrong input with a ConfigError that names the class and the argument."""

from typing import Any

import numpy as np
import pytest

from adapters.bandits import (
    EXP3S,
    UCB1,
    BanditEnv,
    BanditReward,
    DiscountedUCB,
    GradientBandit,
    MLPPolicy,
    Oracle,
    SlidingWindowUCB,
    SoftmaxPolicy,
    Testbed,
    ThompsonSampling,
    Uniform,
    random_walk_testbed,
)
from grpo.errors import ConfigError

RIGHT: dict[Any, dict[str, Any]] = {
    SoftmaxPolicy: {"num_actions": 2, "num_states": 1},
    MLPPolicy: {"num_features": 2, "num_actions": 2, "hidden": (4,), "activation": "tanh"},
    Testbed: {"means": np.zeros((1, 2, 3)), "noise": "bernoulli", "num_runs": 2, "pulls_per_step": 1, "seed": 0},
    random_walk_testbed: {"num_runs": 1, "num_steps": 3, "step_std": 0.1, "pulls_per_step": 1, "seed": 0},
    UCB1: {"num_runs": 1, "num_arms": 2, "exploration": 0.5, "reward_range": 1.0},
    DiscountedUCB: {"num_runs": 1, "num_arms": 2, "horizon": 9, "discount": 0.9},
    SlidingWindowUCB: {"num_runs": 1, "num_arms": 2, "horizon": 9, "window": 3},
    ThompsonSampling: {"num_runs": 1, "num_arms": 2, "discount": 0.9, "likelihood": "gaussian"},
    EXP3S: {"num_runs": 1, "num_arms": 2, "horizon": 9, "num_changes": 1, "exploration": 0.1, "sharing": 0.1},
    GradientBandit: {"num_runs": 1, "num_arms": 2, "step_size": 0.1, "baseline_step_size": 0.1, "logit_decay": 0.1},
    Uniform: {"num_runs": 1, "num_arms": 2},
    BanditReward: {"testbed": Testbed(np.zeros((1, 1, 2)))},
    BanditEnv: {"testbed": Testbed(np.zeros((1, 1, 2)))},
    Oracle: {"testbed": Testbed(np.zeros((1, 1, 2)))},
}


def test_wrong_arguments_are_refused_by_name(subtests: pytest.Subtests) -> None:
    for make, right in RIGHT.items():
        make(**right)
        for name in right:
            for wrong in ("abc", {}, [None], float("nan"), object(), b"x", -1):
                with subtests.test(make=make.__name__, name=name, wrong=repr(wrong)):
                    with pytest.raises(ConfigError) as raised:
                        make(**right | {name: wrong})
                    assert name in str(raised.value)
