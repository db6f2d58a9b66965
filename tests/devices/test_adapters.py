"""The policies of the adapters on a GPU: the rules for every policy, the numbers of the CPU, training, and saved files."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adapters.bandits import MLPPolicy, SoftmaxPolicy
from adapters.control import EnvironmentReward, EpisodePolicy, episode_starts
from adapters.tools import RewardRegression, ToolSample, ToolSelectionPolicy, ToolTask
from grpo import GRPOConfig, GRPOTrainer, GRPOWarning
from grpo.checks import check_policy
from tests.support.tool_policies import ALL_CALLS, CATALOGUE, TEXTS, call, policy

pytestmark = pytest.mark.slow

CASES: dict[str, Any] = {
    "table of a bandit": (lambda: SoftmaxPolicy(4, num_states=3), [0, 1, 2]),
    "network of a bandit": (lambda: MLPPolicy(2, 4), [[0.0, 1.0], [1.0, -1.0]]),
    "tools, texts": (policy, TEXTS),
    "tools, vectors": (lambda: policy(num_features=3), [[0.3, -1.0, 2.0], [1.5, 0.0, -0.5]]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_policy_keeps_every_rule(name: str, device: torch.device) -> None:
    make, states = CASES[name]
    report = check_policy(make(), states, device=device)
    assert report.ok, str(report)


@pytest.mark.parametrize("name", CASES)
def test_scores_and_gradients_equal_those_of_the_cpu(name: str, device: torch.device) -> None:
    make, states = CASES[name]
    on_cpu = make()
    on_device = copy.deepcopy(on_cpu).to(device)
    sampled = on_cpu.sample_actions(states, 6)
    results: list[list[Tensor]] = []
    for one in (on_cpu, on_device):
        rows = [state for state in states for _ in range(6)]
        scores = one.score_actions(rows, [action for group in sampled.actions for action in group])
        weights = torch.arange(scores.log_probs.numel()).reshape(scores.log_probs.shape).to(scores.log_probs)
        parameters = list(one.get_parameters().values())
        slopes = torch.autograd.grad((scores.log_probs * weights)[scores.mask].sum(), parameters, allow_unused=True)
        assert scores.log_probs.device.type == parameters[0].device.type
        results.append([scores.log_probs, *(slope for slope in slopes if slope is not None)])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)


def right_tool(states: Any, actions: Any) -> list[float]:
    return [
        float(action.tool == list(CATALOGUE)[TEXTS.index(state)]) for state, action in zip(states, actions, strict=True)
    ]


def test_a_tool_policy_learns_on_the_device_and_is_loaded_elsewhere(device: torch.device, tmp_path: Path) -> None:
    learner = policy(random=False)
    config = GRPOConfig(group_size=8, learning_rate=0.05, seed=0, device=str(device))
    GRPOTrainer(config=config, policy=learner, reward_model=right_tool).train(TEXTS, num_iterations=60)
    found = [best for [best] in learner.predict_top(TEXTS, 1)]
    assert [one.call.tool for one in found] == list(CATALOGUE)
    assert next(learner.parameters()).device.type == device.type
    learner.save(tmp_path)
    loaded = ToolSelectionPolicy.load(tmp_path, CATALOGUE, encoder=learner.encoder)
    assert next(loaded.parameters()).device.type == "cpu"
    for one, [other] in zip(found, loaded.predict_top(TEXTS, 1), strict=True):
        assert other.call == one.call
        assert other.confidence == pytest.approx(one.confidence, abs=1e-5)


def test_tools_are_fitted_added_calibrated_and_removed_as_on_the_cpu(device: torch.device) -> None:
    last = list(CATALOGUE)[-1]
    tasks = [ToolTask(text=text, tool=tool, slots={}) for text, tool in zip(TEXTS, CATALOGUE, strict=True)]
    results = []
    for where in (torch.device("cpu"), device):
        learner = policy(CATALOGUE.without(last), random=False).to(where)
        learner.fit(tasks[:-1], num_folds=1)
        learner.add_tools(CATALOGUE[last])
        learner.calibrate(TEXTS[:-1])
        grown = learner.tool_probabilities(TEXTS)
        assert grown.device.type == where.type
        assert {value.device.type for value in learner.parameters()} == {where.type}
        with warnings.catch_warnings():  # so few requests may not tell
            warnings.simplefilter("ignore", GRPOWarning)
            threshold = learner.calibrate_threshold(TEXTS, ["a good wine", "how far is the moon", "tea, please", "oh"])
        learner.threshold = 0.0
        learner.remove_tools("ping")
        results.append((grown.cpu(), torch.tensor(threshold), learner.tool_probabilities(TEXTS).cpu()))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_a_reward_regression_reads_calls_that_a_policy_on_the_device_made(device: torch.device) -> None:
    learner = policy().to(device)
    logs = [
        ToolSample(state=TEXTS[row % 4], tool=one.tool, arguments=one.arguments, log_prob=[-1.0], reward=float(row % 2))
        for row, one in enumerate(ALL_CALLS)
    ]
    estimate = RewardRegression(CATALOGUE, learner.encoder)(logs)
    assert estimate(TEXTS, [call("ping")] * 4).shape == (4,)


def test_episodes_of_an_environment_are_scored_on_the_device(device: torch.device) -> None:
    learner = EpisodePolicy("CartPole-v1", num_members=8)
    config = GRPOConfig(group_size=8, learning_rate=0.01, seed=0, device=str(device), batch_size=64)
    trainer = GRPOTrainer(config=config, policy=learner, reward_model=EnvironmentReward())
    metrics = trainer.train(episode_starts(num_groups=2), num_iterations=15)
    assert {value.device.type for value in learner.get_parameters().values()} == {device.type}
    assert metrics[-1]["rewards/mean"] > metrics[0]["rewards/mean"]
