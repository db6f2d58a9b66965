"""adapters/control on real environments: the conformance kit, training with every kind of credit, and Stable-Baselines3."""

import copy
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
from grpo.errors import ConfigError
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


@pytest.mark.filterwarnings("ignore:.*copies of another:grpo.errors.GRPOWarning")  # Blackjack has few outcomes
@pytest.mark.slow
def test_every_kind_of_policy_passes_the_conformance_kit(subtests: pytest.Subtests) -> None:
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*copies of another:grpo.errors.GRPOWarning")  # Blackjack has few outcomes
def test_every_kind_of_policy_trains_for_two_iterations(subtests: pytest.Subtests) -> None:
    for name, case in available_cases().items():
        with subtests.test(case=name):
            torch.manual_seed(0)
            lengths: list[int] = []
            policy = case.policy()
            terms = {"env": counted(EnvironmentReward(), lengths), "own": StepReward(of_its_actions)}
            # with a weight of 1, the loss of a game of Blackjack would cancel the reward of one more card
            reward = WeightedRewards(terms, weights={"env": 1.0, "own": 0.5})
            trainer = GRPOTrainer(config=GRPOConfig(group_size=6, seed=0), policy=policy, reward_model=reward)
            for iteration in range(2):
                before = [value.clone() for value in policy.actor.parameters()]
                lengths.clear()
                metrics = trainer.step(episode_starts(2)(iteration))
                assert metrics["train/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
                assert metrics["train/ratio_std"] < 1e-4
                assert metrics["episodes/steps"] == sum(lengths)
                assert metrics["steps/mean"] == pytest.approx(sum(lengths) / 12)
                assert len(lengths) == 12
                after = policy.actor.parameters()
                assert any(not torch.equal(now, then) for now, then in zip(after, before, strict=True))
                assert all(bool(value.isfinite().all()) for value in policy.parameters())


# Credit, ratios, references


def trained(
    policy: EpisodePolicy, reward: Any = None, reference: Any = None, **settings: Any
) -> list[dict[str, float]]:
    """Metrics of two iterations, in each of which the weights changed."""
    trainer = GRPOTrainer(
        config=GRPOConfig(group_size=3, seed=0, **settings),
        policy=policy,
        reward_model=reward or EnvironmentReward(),
        reference_policy=reference,
    )
    history = []
    for iteration in range(2):
        before = torch.cat([value.detach().flatten() for value in policy.parameters()])
        history.append(trainer.step(episode_starts(2)(iteration)))
        after = torch.cat([value.detach().flatten() for value in policy.parameters()])
        assert bool(after.isfinite().all())
        assert not torch.equal(before, after)
    return history


def test_a_critic_learns_with_gae() -> None:
    torch.manual_seed(0)
    policy = CASES["Pendulum, gaussian"].policy()
    assert policy.critic is not None
    config = GRPOConfig(
        group_size=4,
        seed=0,
        learning_rate=2e-2,
        num_epochs_per_update=8,
        advantage=AdvantageConfig(credit="gae", gamma=0.5),
    )
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=EnvironmentReward())
    losses = [trainer.step(STARTS)["train/value_loss"] for _ in range(5)]
    assert losses[-1] < 0.5 * losses[0]


def test_policies_train_with_every_other_kind_of_credit(subtests: pytest.Subtests) -> None:
    reward = WeightedRewards({"env": EnvironmentReward(), "own": StepReward(of_its_actions)})
    for kind, advantage in (
        ("FrozenLake", AdvantageConfig(credit="gigpo", gamma=0.9)),
        ("CartPole, native", AdvantageConfig(credit="gigpo")),
        ("Pendulum, gaussian", AdvantageConfig(credit="process_supervision", scale="group")),
        ("CartPole, native", AdvantageConfig(baseline="leave_one_out", gamma=0.9)),
    ):
        with subtests.test(kind=kind, advantage=advantage):
            torch.manual_seed(0)
            for metrics in trained(CASES[kind].policy(), reward, advantage=advantage):
                assert metrics["train/ratio_mean"] == pytest.approx(1.0, abs=1e-5)


def test_state_keys_find_the_recurring_states_of_frozen_lake() -> None:
    """Without recurring states, gigpo would equal the row's advantage."""
    policy = CASES["FrozenLake"].policy()
    episodes = policy.generate_actions(STARTS[:1], 6)[0]
    keys = policy.state_keys(None, episodes)
    numbers = torch.cat([one.observations.argmax(1) for one in episodes])
    mask = torch.arange(keys.shape[1]) < torch.tensor([[len(one)] for one in episodes])
    assert len(keys[mask].unique()) == len(numbers.unique()) < len(numbers)


def test_ratios_of_whole_episodes_are_1_and_are_refused_where_steps_are_split() -> None:
    policy = EpisodePolicy("CartPole-v1", num_members=6, options=EpisodeOptions(hidden=(8,), split_steps=False))
    history = trained(
        policy,
        EnvironmentReward(per="episode"),
        objective=ObjectiveConfig(surrogate=Clip(level="row")),
        advantage=AdvantageConfig(scale="group"),
    )
    assert [metrics["train/ratio_mean"] for metrics in history] == pytest.approx([1.0, 1.0], abs=1e-5)
    with pytest.raises(ConfigError, match=r"level='row'"):  # single steps have no ratio of the row
        trained(EpisodePolicy("CartPole-v1", num_members=6), objective=ObjectiveConfig(surrogate=Clip(level="row")))


def test_splitting_steps_does_not_change_the_gradient() -> None:
    """In one update of all steps with equal weights, single steps and whole episodes give the same gradient."""

    def weights(split_steps: bool) -> Tensor:
        torch.manual_seed(4)
        policy = EpisodePolicy(
            "CartPole-v1", num_members=6, options=EpisodeOptions(hidden=(8,), split_steps=split_steps)
        )
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
        config = GRPOConfig(group_size=3, seed=0, objective=ObjectiveConfig(aggregation="step_mean"))
        trainer = GRPOTrainer(config=config, policy=policy, reward_model=EnvironmentReward(), optimizer=optimizer)
        trainer.step(STARTS)
        return torch.cat([value.detach().flatten() for value in policy.parameters()])

    torch.testing.assert_close(weights(True), weights(False), rtol=1e-5, atol=1e-7)


def test_episodes_are_replayed_with_and_without_masks() -> None:
    for kind, reward in (("Pendulum, gaussian", None), ("Taxi, masked", StepReward(of_its_actions))):
        first, second = trained(CASES[kind].policy(), reward, replay_iterations=1)
        assert (first["rows/replayed"], second["rows/replayed"]) == (0.0, 6.0)


def test_a_reference_policy_stays_frozen_while_the_kl_grows(subtests: pytest.Subtests) -> None:
    for split_steps in (True, False):
        with subtests.test(split_steps=split_steps):
            torch.manual_seed(0)
            policy = EpisodePolicy(
                "CartPole-v1", num_members=6, options=EpisodeOptions(hidden=(8,), split_steps=split_steps)
            )
            reference = copy.deepcopy(policy)
            frozen = [value.clone() for value in reference.parameters()]
            objective = ObjectiveConfig(kl_coef=0.1, kl_estimator="k3")
            first, second = trained(policy, reference=reference, objective=objective, learning_rate=0.02)
            assert first["train/kl_mean"] == pytest.approx(0.0, abs=1e-6)
            assert second["train/kl_mean"] > 1e-5
            assert all(torch.equal(now, then) for now, then in zip(reference.parameters(), frozen, strict=True))


def test_dynamic_sampling_counts_the_steps_of_all_samples() -> None:
    lengths: list[int] = []
    policy = EpisodePolicy(
        "Pendulum-v1",
        num_members=6,
        options=EpisodeOptions(hidden=(8,), max_episode_steps=5, normalize_observations=True),
    )
    is_first = iter([True])

    def rewards(states: Any, actions: Sequence[Episode]) -> Tensor:
        lengths.extend(map(len, actions))
        dead = next(is_first, False)
        return torch.zeros(len(actions)) if dead else torch.stack([one.rewards.sum() for one in actions])

    config = GRPOConfig(group_size=3, seed=0, dynamic_sampling_rounds=1)
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=rewards)
    (metrics,) = trainer.train(episode_starts(2), num_iterations=1, progress=False)
    assert len(lengths) == 12
    assert metrics["episodes/steps"] == sum(lengths)
    assert metrics["train/ratio_mean"] == pytest.approx(1.0, abs=1e-5)


def test_rewarded_actions_become_more_likely() -> None:
    torch.manual_seed(0)
    policy = EpisodePolicy(lambda: Spaces(UNIT, spaces.Discrete(4)), num_members=8, options=EpisodeOptions(hidden=(8,)))
    config = GRPOConfig(group_size=8, seed=0, learning_rate=0.02, advantage=AdvantageConfig(scale="batch"))
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=EnvironmentReward())
    returns = [
        metrics["rewards/mean"] for metrics in trainer.train(episode_starts(2), num_iterations=25, progress=False)
    ]
    assert returns[0] < 4 * 3.0  # random actions get 2.5 per step
    assert returns[-1] > 4 * 3.5  # the best action gets 4 per step


# Peers


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
