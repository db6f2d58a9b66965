"""A testbed as a reward model."""

from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from grpo.arguments import require_instances

from .testbeds import Testbed


class BanditReward:
    """Rewards of pulling arms. States are run numbers; a testbed with one run accepts any states.

    Each row is one pull, in row order, and advances the time of its run. `trainer.evaluate` also advances the time. Use
    `testbed.means_now` to read the arms' current means without a pull.
    """

    def __init__(self, testbed: Testbed) -> None:
        require_instances("BanditReward", Testbed, "a Testbed", testbed=testbed)
        self.testbed = testbed

    def compute_rewards(self, states: Any, actions: Any) -> Float64[Tensor, " N"]:
        """Pull the arms and return one reward per row.

        Raises:
            RewardError: A run or an arm does not exist, or a pull is past the testbed's last step.
        """
        arms = _as_array(actions)
        runs = np.zeros(len(arms), dtype=np.int64) if self.testbed.num_runs == 1 else _as_array(states)
        return torch.from_numpy(self.testbed.pull(runs, arms))

    def train(self, *_: Any) -> "BanditReward":
        """Do nothing. `train`, `eval` and `to` do nothing, because the testbed has no mode, and uses numpy."""
        return self

    eval = to = train

    def state_dict(self) -> dict[str, Any]:
        """The testbed's state: the number of pulls of each run, and the random generator."""
        return self.testbed.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state, so that the rewards continue exactly."""
        self.testbed.load_state_dict(state)


def _as_array(values: Any) -> np.ndarray:
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
