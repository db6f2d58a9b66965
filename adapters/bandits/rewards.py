"""A testbed as a reward model."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from .testbeds import Testbed


class BanditReward:
    """Rewards of pulling arms: states are run numbers, or anything at all when the testbed has one run.

    Every row is a pull and moves its run's clock, in row order; so does `trainer.evaluate`. What an arm is worth now can be
    looked at for nothing: `testbed.expected_rewards`.
    """

    def __init__(self, testbed: Testbed) -> None:
        self.testbed = testbed

    def compute_rewards(self, states: Any, actions: Any) -> Float64[Tensor, " N"]:
        """One reward per row.

        Raises:
            RewardError: runs or arms that do not exist, or a pull past the testbed's last step.
        """
        arms = _as_array(actions)
        runs = np.zeros(len(arms), dtype=np.int64) if self.testbed.num_runs == 1 else _as_array(states)
        return torch.from_numpy(self.testbed.pull(runs, arms))

    def train(self) -> "BanditReward":
        """Nothing to switch."""
        return self

    def eval(self) -> "BanditReward":
        """Nothing to switch."""
        return self

    def to(self, device: torch.device | str) -> "BanditReward":
        """Nothing to move: the testbed is numpy."""
        return self

    def state_dict(self) -> dict[str, Any]:
        """The testbed's clocks and generator."""
        return self.testbed.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state_dict` was taken."""
        self.testbed.load_state_dict(state)


def _as_array(values: Any) -> np.ndarray:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
