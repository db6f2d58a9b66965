"""What GRPO learns on bandits that change, beside the classics: the figures that the README and the benchmark claim."""

import numpy as np
import pytest

from adapters.bandits import (
    EXP3S,
    UCB1,
    SlidingWindowUCB,
    SoftmaxPolicy,
    ThompsonSampling,
    abrupt_testbed,
    cumulative_regret,
)
from benchmarks.bandits import HORIZON, pull_with, pull_with_grpo
from examples.dynamic_bandit import summarise, train_original, train_ours


def mean_figures(train, seeds: range) -> dict[str, float]:
    figures = [summarise(train(seed)) for seed in seeds]
    averages = {name: float(np.mean([figure[name] for figure in figures])) for name in figures[0]}
    return averages | {"highest after uniform": max(figure["max after uniform"] for figure in figures)}


def require_targets(figures: dict[str, float]) -> None:
    """Chance is .2 for the probabilities and .27 for the reward; the oracle has .75."""
    assert figures["arm 3"] >= 0.85
    assert figures["arm 0"] >= 0.85
    assert figures["structured reward"] >= 0.67
    assert figures["highest after uniform"] < 0.35


def test_our_configuration_follows_the_dynamic_bandit() -> None:
    require_targets(mean_figures(train_ours, range(2)))


def test_the_original_configuration_loses_it() -> None:
    figures = mean_figures(train_original, range(2))
    assert figures["arm 0"] < 0.3
    assert figures["structured reward"] < 0.5


@pytest.mark.slow
def test_our_configuration_follows_the_dynamic_bandit_over_20_seeds() -> None:
    require_targets(mean_figures(train_ours, range(20)))


def abrupt_regret(pull, num_runs: int = 50) -> float:
    testbed = abrupt_testbed(num_runs=num_runs)
    arms = pull(testbed)
    return float(cumulative_regret(testbed.means[:, :HORIZON], arms)[:, -1].mean())


def test_grpo_beats_the_classics_on_the_abruptly_changing_bandit() -> None:
    ours = abrupt_regret(lambda bed: pull_with_grpo(bed, learning_rate=4.0, kl_coef=0.01))
    sliding = abrupt_regret(lambda bed: pull_with(lambda r, k: SlidingWindowUCB(r, k, horizon=HORIZON), bed))
    assert ours <= 1.15 * sliding
    assert ours < abrupt_regret(lambda bed: pull_with(UCB1, bed))
    assert ours < abrupt_regret(lambda bed: pull_with(ThompsonSampling, bed))
    assert ours < abrupt_regret(lambda bed: pull_with(lambda r, k: EXP3S(r, k, horizon=HORIZON, num_changes=2), bed))


def test_without_the_pull_the_softmax_saturates() -> None:
    plain = abrupt_regret(lambda bed: pull_with_grpo(bed, learning_rate=4.0, kl_coef=0.0), num_runs=10)
    pulled = abrupt_regret(lambda bed: pull_with_grpo(bed, learning_rate=4.0, kl_coef=0.01), num_runs=10)
    assert plain > 2 * pulled


def test_runs_of_one_table_learn_as_if_alone() -> None:
    """The benchmark's 50 runs are rows of one policy: with plain SGD each moves as it would by itself."""
    import torch

    from grpo import ExperienceBatch, GRPOConfig, GRPOTrainer, ObjectiveConfig

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
