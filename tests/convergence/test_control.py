"""Short runs of control: CartPole and Acrobot are learned by the presets, and by nothing that has the sign wrong."""

import pytest
import torch

from adapters.control import EnvironmentReward, LearningCurve, episode_starts, preset_for, train_control

pytestmark = pytest.mark.usefixtures("without_type_checks")

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
