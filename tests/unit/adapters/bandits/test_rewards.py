"""The reward model: every row moves its run's clock, and a state brings all of it back."""

import numpy as np
import torch

from adapters.bandits import BanditReward, Testbed, abrupt_testbed, dynamic_testbed


def test_every_row_pulls_an_arm_once_in_order() -> None:
    reward_model = BanditReward(dynamic_testbed(pulls_per_step=2))
    states = ["whatever"] * 40
    arm = torch.full((40,), 3)
    assert reward_model.compute_rewards(states, arm).tolist() == [0.4] * 40  # 20 steps of 2 pulls: regime 0
    assert reward_model.eval() is reward_model
    assert reward_model.compute_rewards([None] * 3, [3, 0, 2]).tolist() == [0.8, 0.1, 0.0]  # steps 20, 20 and 21
    assert reward_model.testbed.pulls.tolist() == [43]


def test_with_several_runs_states_are_run_numbers() -> None:
    testbed = Testbed(np.array([[[0.0, 1.0]], [[2.0, 3.0]]]), noise="deterministic", cyclic=True)
    reward_model = BanditReward(testbed)
    rewards = reward_model.compute_rewards(torch.tensor([1, 0, 1]), torch.tensor([0, 1, 1]))
    assert rewards.dtype == torch.float64
    assert rewards.tolist() == [2.0, 1.0, 3.0]
    assert testbed.pulls.tolist() == [1, 2]
    assert reward_model.compute_rewards([0, 1], [0, 0]).tolist() == [0.0, 2.0]


def test_a_resumed_reward_model_gives_the_same_rewards() -> None:
    reward_model = BanditReward(abrupt_testbed(num_runs=2, seed=1))
    runs, arms = torch.arange(200) % 2, torch.arange(200) % 3
    reward_model.compute_rewards(runs, arms)
    state = reward_model.state_dict()
    expected = reward_model.compute_rewards(runs, arms)
    other = BanditReward(abrupt_testbed(num_runs=2, seed=2))
    other.load_state_dict(state)
    assert torch.equal(other.to("cpu").compute_rewards(runs, arms), expected)
