"""adapters/control on real environments: the conformance kit, training with every kind of credit, and Stable-Baselines3."""

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from adapters.control import (
    EnvironmentReward,
    EpisodeOptions,
    EpisodePolicy,
    EpisodeStart,
    StepReward,
    episode_starts,
)
from adapters.control.environments.episodes import Episode
from grpo import AdvantageConfig, GRPOConfig, GRPOTrainer, ObjectiveConfig, WeightedRewards
from grpo.checks import check_policy, check_reward_model
from grpo.surrogates import Clip
from tests.support.control_environments import GOALS, UNIT, Spaces, space_of_everything
from tests.support.control_policies import policy_of

HAS_ROBOTICS = importlib.util.find_spec("gymnasium_robotics") is not None
STARTS = [EpisodeStart(seed=1), EpisodeStart(seed=2)]


@dataclass(frozen=True)
class Case:
    """An environment, options of its policy, and the number of samples that the conformance kit draws."""

    environment: Any
    options: dict[str, Any] = field(default_factory=dict)
    num_samples: int = 30

    def policy(self, **options: Any) -> EpisodePolicy:
        return policy_of(self.environment, **{"num_members": 6, "hidden": (8,)} | self.options | options)


def nested(actions: spaces.Space, observations: spaces.Space = UNIT) -> Case:
    return Case(lambda: Spaces(observations, actions))


PENDULUM = {"max_episode_steps": 10}
CASES = {
    "CartPole, native": Case("CartPole-v1", num_samples=200),
    "CartPole, sync": Case("CartPole-v1", {"vectorization": "sync"}),
    "CartPole, critic": Case("CartPole-v1", {"critic": True}),
    "CartPole, whole episodes": Case("CartPole-v1", {"split_steps": False}),
    "Acrobot": Case("Acrobot-v1", {"max_episode_steps": 10}, num_samples=10),
    "Pendulum, gaussian": Case("Pendulum-v1", {**PENDULUM, "distribution": "gaussian", "critic": True}),
    "Pendulum, squashed": Case("Pendulum-v1", {**PENDULUM, "distribution": "squashed", "std": "observation"}),
    "Pendulum, beta": Case("Pendulum-v1", {**PENDULUM, "distribution": "beta"}),
    "Pendulum, normalised": Case("Pendulum-v1", {**PENDULUM, "normalize_observations": True}),
    "FrozenLake": Case("FrozenLake-v1"),
    "Taxi, masked": Case("Taxi-v4", {"action_mask": "info", "max_episode_steps": 10}),
    "Blackjack": Case("Blackjack-v1", {"max_episode_steps": 20}),
    "goals": nested(UNIT, GOALS),
    "dict": nested(spaces.Dict({"arm": UNIT, "grip": spaces.Discrete(3, start=1)}), space_of_everything()),
    "tuple": nested(spaces.Tuple((spaces.MultiDiscrete([3, 2]), UNIT))),
    "multidiscrete": nested(spaces.MultiDiscrete([[3, 2], [2, 2]])),
    "multibinary": nested(spaces.MultiBinary(3)),
    "HalfCheetah": Case(
        "HalfCheetah-v5", {"max_episode_steps": 8, "num_members": 3, "normalize_observations": True}, num_samples=6
    ),
    "PointMaze": Case("PointMaze_UMaze-v3", {"max_episode_steps": 8, "num_members": 3}, num_samples=6),
}


def available_cases() -> dict[str, Case]:
    """All cases; without PointMaze if gymnasium-robotics is not installed."""
    if HAS_ROBOTICS:
        import gymnasium_robotics

        gymnasium.register_envs(gymnasium_robotics)
    return {name: case for name, case in CASES.items() if HAS_ROBOTICS or name != "PointMaze"}


def counted(reward: Any, lengths: list[int]) -> Callable[[Any, Sequence[Episode]], Tensor]:
    """The rewards of a reward model. The lengths of the episodes are appended to `lengths`."""

    def rewards(states: Any, actions: Sequence[Episode]) -> Tensor:
        lengths.extend(map(len, actions))
        return reward.compute_rewards(states, actions)

    return rewards


def of_its_actions(episode: Episode) -> Tensor:
    """A reward for environments that pay nothing."""
    return episode.actions.double().reshape(len(episode), -1).sum(1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*copies of another:grpo.errors.GRPOWarning")  # Blackjack has few outcomes
def test_every_kind_of_policy_passes_the_conformance_kit_and_trains(subtests: pytest.Subtests) -> None:
    for name, case in available_cases().items():
        with subtests.test(case=name):
            torch.manual_seed(0)
            policy = case.policy()
            report = check_policy(policy, STARTS, num_samples=case.num_samples, strict=True)
            skipped_or_absent = {result.name for result in report.results if result.status != "passed"}
            assert not skipped_or_absent & {"split_steps", "sample_actions", "state_keys", "independent rows"} - (
                {"split_steps"} if case.options.get("split_steps") is False else set()
            )
            rows = [episode for group in policy.generate_actions(STARTS, 2) for episode in group]
            states = [start for start in STARTS for _ in range(2)]
            for reward in (EnvironmentReward(), EnvironmentReward(per="episode"), StepReward(of_its_actions)):
                check_reward_model(reward, states, rows, strict=True)

            lengths: list[int] = []
            terms = {"env": counted(EnvironmentReward(), lengths), "own": StepReward(of_its_actions)}
            # with a weight of 1, the loss of a game of Blackjack would cancel the reward of one more card
            for metrics in trained(policy, WeightedRewards(terms, weights={"env": 1.0, "own": 0.5}), group_size=6):
                assert metrics["train/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
                assert metrics["train/ratio_std"] < 1e-4
                assert metrics["episodes/steps"] == sum(lengths[:12])
                assert metrics["steps/mean"] == pytest.approx(sum(lengths[:12]) / 12)
                del lengths[:12]
            assert lengths == []


def trained(
    policy: EpisodePolicy, reward: Any = None, *, group_size: int = 3, **settings: Any
) -> list[dict[str, float]]:
    """Metrics of two iterations, in each of which the actor's weights changed."""
    trainer = GRPOTrainer(
        config=GRPOConfig(group_size=group_size, seed=0, **settings),
        policy=policy,
        reward_model=reward or EnvironmentReward(),
    )
    history = []
    for iteration in range(2):
        before = torch.cat([value.detach().flatten() for value in policy.actor.parameters()])
        history.append(trainer.step(episode_starts(2)(iteration)))
        after = torch.cat([value.detach().flatten() for value in policy.actor.parameters()])
        assert not torch.equal(before, after)
        assert all(bool(value.isfinite().all()) for value in policy.parameters())
    return history


def test_a_critic_learns_with_gae() -> None:
    torch.manual_seed(0)
    settings = {"learning_rate": 2e-2, "num_epochs_per_update": 8}
    config = GRPOConfig(group_size=4, seed=0, advantage=AdvantageConfig(credit="gae", gamma=0.5), **settings)
    policy = CASES["Pendulum, gaussian"].policy()
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=EnvironmentReward())
    losses = [trainer.step(STARTS)["train/value_loss"] for _ in range(5)]
    assert losses[-1] < 0.5 * losses[0]


def test_policies_train_with_every_other_kind_of_credit_with_row_ratios_and_with_replayed_rows(
    subtests: pytest.Subtests,
) -> None:
    own = StepReward(of_its_actions)
    both = WeightedRewards({"env": EnvironmentReward(), "own": own})
    row_ratios = {
        "objective": ObjectiveConfig(surrogate=Clip(level="row")),
        "advantage": AdvantageConfig(scale="group"),
    }
    cases: list[tuple[str, Any, dict[str, Any]]] = [
        ("FrozenLake", both, {"advantage": AdvantageConfig(credit="gigpo", gamma=0.9)}),
        ("Pendulum, gaussian", both, {"advantage": AdvantageConfig(credit="process_supervision", scale="group")}),
        ("CartPole, native", both, {"advantage": AdvantageConfig(baseline="leave_one_out", gamma=0.9)}),
        ("CartPole, whole episodes", EnvironmentReward(per="episode"), row_ratios),
        ("Pendulum, gaussian", None, {"replay_iterations": 1}),
        ("Taxi, masked", own, {"replay_iterations": 1}),
    ]
    for kind, reward, settings in cases:
        with subtests.test(kind=kind, settings=settings):
            torch.manual_seed(0)
            first, second = trained(CASES[kind].policy(), reward, **settings)
            if "replay_iterations" in settings:
                assert (first["rows/replayed"], second["rows/replayed"]) == (0.0, 6.0)
            else:
                assert [one["train/ratio_mean"] for one in (first, second)] == pytest.approx([1.0, 1.0], abs=1e-5)


def test_stable_baselines_can_evaluate_an_episode_policy() -> None:
    peer = pytest.importorskip("stable_baselines3.common.evaluation", reason="stable-baselines3 is not installed")
    from stable_baselines3.common.monitor import Monitor

    policy = EpisodePolicy("CartPole-v1", num_members=2, options=EpisodeOptions(hidden=(4,)))
    with torch.no_grad():
        policy.actor[1].weight.zero_()
        policy.actor[1].bias.copy_(torch.tensor([0.0, 0.1]))  # always to the right
    environment = Monitor(gymnasium.make("CartPole-v1"))
    environment.reset(seed=0)  # the peer resets without a seed, which continues the generator of this reset
    returns, lengths = peer.evaluate_policy(policy, environment, n_eval_episodes=4, return_episode_rewards=True)
    assert returns == lengths
    assert set(lengths) <= set(range(8, 12))  # the pole falls at once
    boxes = EpisodePolicy("Pendulum-v1", num_members=1, options=EpisodeOptions(hidden=(4,)))
    mean, _ = peer.evaluate_policy(boxes, Monitor(gymnasium.make("Pendulum-v1")), n_eval_episodes=1)
    assert -2000 < mean < -1
