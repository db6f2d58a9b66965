"""What GRPO learns on bandits that change, beside the classics (the figures of README and benchmark), and on control.

Every day: a short horizon and ten runs, and one seed of CartPole; one seed of the dynamic bandit is in
`tests/integration/test_examples.py`. Slow: bandits as the benchmark has them, more seeds, and Acrobot.
"""

import pytest
import torch

from adapters.bandits import SoftmaxPolicy, abrupt_testbed, cumulative_regret
from adapters.bandits.demo import summarise, train_naive, train_tuned
from adapters.control import EnvironmentReward, LearningCurve, episode_starts, preset_for, train_control
from benchmarks import bandits
from grpo import ExperienceBatch, GRPOConfig, GRPOTrainer, ObjectiveConfig

pytestmark = pytest.mark.usefixtures("without_type_checks")


def mean(runs: list[dict[str, float]], name: str) -> float:
    return sum(run[name] for run in runs) / len(runs)


@pytest.mark.slow
@pytest.mark.parametrize("num_seeds", [6, pytest.param(20, marks=pytest.mark.faults)])
def test_tuned_settings_follow_the_best_arm_of_the_dynamic_bandit(num_seeds: int) -> None:
    """Chance is .2 for the probabilities and .27 for the reward; the oracle has .75."""
    runs = [summarise(train_tuned(seed)) for seed in range(num_seeds)]
    assert mean(runs, "arm 3") >= 0.85
    assert mean(runs, "arm 0") >= 0.85
    assert mean(runs, "structured reward") >= 0.67
    assert max(run["max after uniform"] for run in runs) < 0.35


@pytest.mark.slow
def test_naive_settings_do_not_find_the_second_best_arm() -> None:
    runs = [summarise(train_naive(seed)) for seed in range(3)]
    assert mean(runs, "arm 0") < 0.2
    assert mean(runs, "structured reward") < 0.45


@pytest.mark.slow
@pytest.mark.parametrize(("num_runs", "horizon"), [(10, 5_000), pytest.param(50, 10_000, marks=pytest.mark.faults)])
def test_grpo_beats_the_classics_on_the_abruptly_changing_bandit(
    num_runs: int, horizon: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the pull towards uniform the softmax saturates."""
    monkeypatch.setattr(bandits, "HORIZON", horizon)
    regret = {}
    for name, pull in bandits.abrupt_strategies().items():
        testbed = abrupt_testbed(num_runs=num_runs)
        regret[name] = float(cumulative_regret(testbed.means[:, :horizon], pull(testbed))[:, -1].mean())
    pulled = regret["GRPO, pulled towards uniform (k3, .01)"]
    assert pulled <= 1.15 * regret["sliding-window UCB"], regret
    assert pulled < min(regret["UCB1"], regret["Thompson"], regret["EXP3.S"]), regret
    assert regret["GRPO without the KL penalty"] > 2 * pulled, regret


def test_several_runs_in_one_table_learn_as_each_would_alone() -> None:
    """The benchmark's 50 runs are rows of one policy. With plain SGD each row moves as it would alone."""
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


# CartPole and Acrobot are learned by their presets, and by nothing that has the sign wrong

SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))]


def learn(env_id: str, seed: int, reward_model: object = None) -> tuple[LearningCurve, int | None]:
    """A run of the preset that ends when it has learned, and the steps it took."""
    torch.manual_seed(seed)
    preset = preset_for(env_id)
    policy = preset.make_policy()
    curve = train_control(
        preset.make_trainer(policy, seed=seed, reward_model=reward_model),
        episode_starts(preset.num_groups, seed=seed),
        total_steps=preset.total_steps,
        evaluate_every=preset.evaluate_every,
        stop_at=preset.threshold,
        progress=False,
    )
    policy.pool.close()
    return curve, curve.steps_to(preset.threshold)


@pytest.mark.parametrize("seed", SEEDS)
def test_cartpole_is_learned_within_30_000_steps(seed):
    curve, steps = learn("CartPole-v1", seed)
    assert steps is not None, curve.returns
    assert steps <= 30_000


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_acrobot_is_learned_within_120_000_steps(seed):
    curve, steps = learn("Acrobot-v1", seed)
    assert steps is not None, curve.returns
    assert steps <= 120_000


class Negated(EnvironmentReward):
    def compute_rewards(self, states, actions):
        return -super().compute_rewards(states, actions)


@pytest.mark.slow
def test_cartpole_is_not_learned_from_negated_rewards():
    curve, steps = learn("CartPole-v1", 0, Negated())
    assert steps is None
    assert max(curve.returns) < 100
