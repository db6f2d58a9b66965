"""What GRPO learns on bandits that change, beside the classics: the figures that the README and the benchmark claim.

They are measured in a process of its own, as users run it: checking shapes at every call takes five times as long.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.bandits import SoftmaxPolicy
from grpo import ExperienceBatch, GRPOConfig, GRPOTrainer, ObjectiveConfig

ROOT = Path(__file__).resolve().parents[2]

MEASURE = """
import json
import torch
from adapters.bandits import EXP3S, SlidingWindowUCB, ThompsonSampling, UCB1, abrupt_testbed, cumulative_regret
from benchmarks.bandits import HORIZON, pull_with, pull_with_grpo
from examples.dynamic_bandit import summarise, train_original, train_ours

torch.set_num_threads(1)

def regret(pull):
    testbed = abrupt_testbed(num_runs=50)
    return float(cumulative_regret(testbed.means[:, :HORIZON], pull(testbed))[:, -1].mean())

print(json.dumps({
    "ours": [summarise(train_ours(seed)) for seed in range(20)],
    "original": [summarise(train_original(seed)) for seed in range(5)],
    "regret": {
        "pulled": regret(lambda bed: pull_with_grpo(bed, learning_rate=4.0, kl_coef=0.01)),
        "plain": regret(lambda bed: pull_with_grpo(bed, learning_rate=4.0, kl_coef=0.0)),
        "sliding-window UCB": regret(lambda bed: pull_with(lambda r, k: SlidingWindowUCB(r, k, horizon=HORIZON), bed)),
        "UCB1": regret(lambda bed: pull_with(UCB1, bed)),
        "Thompson": regret(lambda bed: pull_with(ThompsonSampling, bed)),
        "EXP3.S": regret(lambda bed: pull_with(lambda r, k: EXP3S(r, k, horizon=HORIZON, num_changes=2), bed)),
    },
}))
"""


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    result = subprocess.run([sys.executable, "-c", MEASURE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout)


def mean(runs: list[dict[str, float]], name: str) -> float:
    return sum(run[name] for run in runs) / len(runs)


def test_our_configuration_follows_the_dynamic_bandit_over_20_seeds(measured: dict[str, Any]) -> None:
    """Chance is .2 for the probabilities and .27 for the reward; the oracle has .75."""
    runs = measured["ours"]
    assert len(runs) == 20
    assert mean(runs, "arm 3") >= 0.85
    assert mean(runs, "arm 0") >= 0.85
    assert mean(runs, "structured reward") >= 0.67
    assert max(run["max after uniform"] for run in runs) < 0.35


def test_the_original_configuration_loses_it(measured: dict[str, Any]) -> None:
    assert mean(measured["original"], "arm 0") < 0.2
    assert mean(measured["original"], "structured reward") < 0.45


def test_grpo_beats_the_classics_on_the_abruptly_changing_bandit(measured: dict[str, Any]) -> None:
    regret = measured["regret"]
    assert regret["pulled"] <= 1.15 * regret["sliding-window UCB"]
    assert regret["pulled"] < min(regret["UCB1"], regret["Thompson"], regret["EXP3.S"])


def test_without_the_pull_the_softmax_saturates(measured: dict[str, Any]) -> None:
    assert measured["regret"]["plain"] > 2 * measured["regret"]["pulled"]


def test_runs_of_one_table_learn_as_if_alone() -> None:
    """The benchmark's 50 runs are rows of one policy: with plain SGD each moves as it would by itself."""
    config = GRPOConfig(group_size=8, max_grad_norm=None, objective=ObjectiveConfig(kl_coef=0.01))
    arms, rewards = torch.randint(3, (2, 8)), torch.rand(2, 8, dtype=torch.float64)

    def train(runs: list[int], num_states: int) -> torch.Tensor:
        policy = SoftmaxPolicy(3, num_states=num_states).double()
        optimizer = torch.optim.SGD(policy.parameters(), lr=4.0 * len(runs))
        trainer = GRPOTrainer(config=config, policy=policy, reward_model=lambda s, a: a, optimizer=optimizer)
        states = torch.arange(len(runs)).repeat_interleave(8)
        trainer.update(
            ExperienceBatch.from_rows(states, arms[runs].flatten(), rewards[runs].flatten(), group_ids=states)
        )
        return policy.logits.detach()

    together = train([0, 1], 2)
    alone = torch.cat([train([0], 1), train([1], 1)])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-12)
