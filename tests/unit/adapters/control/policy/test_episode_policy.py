"""EpisodePolicy: sampling and scoring agree, critics and copies work, and custom parts are used."""

import copy

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from adapters.control import EpisodeOptions, EpisodePolicy, FromTorch, StepReward, take_snapshot
from adapters.control.environments.episodes import Episode, EpisodeStart
from adapters.control.environments.pools import make_pool
from adapters.control.policy.networks import CNNTorso
from grpo import GRPOConfig, GRPOTrainer
from grpo.policy_base import SplitsSteps
from tests.support.control_environments import UNIT, Chance, Spaces, Watched
from tests.support.control_policies import POLICIES, STARTS, made, rows_of, trainer_of


@pytest.fixture(scope="module")
def policies() -> dict[str, EpisodePolicy]:
    """One policy of each kind. Tests sample from it, and do not change its weights."""
    torch.manual_seed(0)
    return {kind: made(kind) for kind in POLICIES}


def test_sampling_and_scoring_report_the_same_numbers(subtests: pytest.Subtests) -> None:
    for kind in POLICIES:
        with subtests.test(kind=kind):
            policy = made(kind)
            policy.sample_actions(STARTS, 2)
            with torch.no_grad():
                next(policy.actor.parameters()).mul_(1.5)  # the normaliser's statistics move with the weights
            sampled = policy.sample_actions(STARTS, 2)
            episodes = rows_of(sampled.actions)
            assert sampled.scores is not None
            scores = policy.score_actions(STARTS, episodes)
            for name in ("log_probs", "entropy", "values", "final_values"):
                told, scored = getattr(sampled.scores, name), getattr(scores, name)
                assert (told is None) == (scored is None)
                if told is not None:
                    torch.testing.assert_close(told, scored.detach(), rtol=1e-6, atol=2e-6)
            assert torch.equal(sampled.mask, scores.mask)
            assert sampled.behaviour_log_probs is not None
            torch.testing.assert_close(sampled.behaviour_log_probs, scores.log_probs.detach(), rtol=1e-6, atol=2e-6)
            assert scores.log_probs.requires_grad
            assert not sampled.scores.log_probs.requires_grad
            for row, episode in enumerate(episodes):
                own = scores.log_probs[row, : len(episode)].detach()
                torch.testing.assert_close(episode.log_probs, own, atol=2e-6, rtol=1e-6)
            totals = torch.stack([episode.log_probs.sum() for episode in episodes])
            torch.testing.assert_close(policy.get_log_probabilities(STARTS, episodes), totals, rtol=1e-5, atol=1e-5)


def test_single_steps_have_the_scores_of_their_episode(
    policies: dict[str, EpisodePolicy], subtests: pytest.Subtests
) -> None:
    for kind, policy in policies.items():
        with subtests.test(kind=kind):
            episodes = rows_of(policy.sample_actions(STARTS, 2).actions)
            whole = policy.score_actions(STARTS, episodes)
            states, actions = policy.split_steps(STARTS, episodes)
            assert len(states) == len(actions) == sum(map(len, episodes))
            order = torch.randperm(len(states))  # updates shuffle steps
            split = policy.score_actions(states[order], actions[order])
            assert split.log_probs.shape == (len(states), 1)
            for name in ("log_probs", "entropy", "values"):
                of_steps, of_episodes = getattr(split, name), getattr(whole, name)
                assert (of_steps is None) == (of_episodes is None)
                if of_steps is not None:
                    expected = of_episodes[whole.mask][order]
                    torch.testing.assert_close(of_steps.squeeze(1), expected, rtol=1e-6, atol=2e-6)


def test_padding_does_not_change_scores(policies: dict[str, EpisodePolicy], subtests: pytest.Subtests) -> None:
    for kind in ("critic", "everything", "masked"):
        with subtests.test(kind=kind):
            policy = policies[kind]
            episodes = sorted(rows_of(policy.sample_actions(STARTS, 4).actions), key=len)
            together = policy.score_actions(None, episodes)
            for row, episode in enumerate(episodes):
                alone = policy.score_actions(None, [episode])
                assert alone.mask.shape == (1, len(episode))
                for name in ("log_probs", "entropy", "values"):
                    of_one, of_all = getattr(alone, name), getattr(together, name)
                    if of_one is not None:
                        torch.testing.assert_close(of_one[0], of_all[row, : len(episode)], rtol=1e-6, atol=2e-6)
                        assert not of_all[row, len(episode) :].any()


def test_entropy_and_log_probs_are_those_of_the_distribution() -> None:
    policy = made("categorical")
    episodes = rows_of(policy.sample_actions(STARTS, 2).actions)
    scores = policy.score_actions(STARTS, episodes)
    observations = torch.cat([episode.observations for episode in episodes])
    expected = torch.distributions.Categorical(logits=policy.actor(observations))
    torch.testing.assert_close(scores.entropy[scores.mask], expected.entropy())  # type: ignore[index]
    actions = torch.cat([episode.actions for episode in episodes])
    torch.testing.assert_close(scores.log_probs[scores.mask], expected.log_prob(actions))
    assert made("squashed").sample_actions(STARTS, 1).scores.entropy is None  # type: ignore[union-attr]


def test_final_values_are_the_critics_for_truncated_and_0_for_terminated_episodes(subtests: pytest.Subtests) -> None:
    for is_cut_off in (True, False):
        with subtests.test(is_cut_off=is_cut_off):
            make = lambda cut=is_cut_off: Spaces(UNIT, spaces.Discrete(2), is_cut_off=cut)  # noqa: E731
            policy = EpisodePolicy(make, critic=True, options=EpisodeOptions(hidden=(4,)))
            episodes = rows_of(policy.sample_actions(STARTS, 2).actions)
            scores = policy.score_actions(STARTS, episodes)
            assert policy.critic is not None
            expected = policy.critic(torch.stack([episode.final_observation for episode in episodes])).squeeze(1)
            assert expected.abs().min() > 1e-3
            torch.testing.assert_close(scores.final_values, expected if is_cut_off else torch.zeros(4))
            observations = torch.stack([episode.observations for episode in episodes])
            torch.testing.assert_close(scores.values, policy.critic(observations).squeeze(-1))


def test_in_a_mixed_batch_final_values_are_0_exactly_for_terminated_episodes() -> None:
    """The policy truncates at 6 steps, and some episodes have terminated by then."""
    policy = EpisodePolicy(
        lambda: Chance(99, end_above=0.9), critic=True, options=EpisodeOptions(hidden=(4,), max_episode_steps=6)
    )
    episodes = rows_of(policy.sample_actions([EpisodeStart(seed=seed) for seed in range(8)], 1).actions)
    assert len({episode.terminated for episode in episodes}) == 2
    final_values = policy.score_actions(None, episodes).final_values
    assert final_values is not None
    assert [bool(value == 0.0) for value in final_values] == [episode.terminated for episode in episodes]


def test_a_custom_critic_is_used_and_trained() -> None:
    critic = nn.Linear(3, 1)
    policy = EpisodePolicy(Chance, critic=critic)
    episodes = rows_of(policy.sample_actions(STARTS, 1).actions)
    values = policy.score_actions(STARTS, episodes).values
    torch.testing.assert_close(values[0], critic(episodes[0].observations).squeeze(1))  # type: ignore[index]
    assert {"critic.weight", "critic.bias"} <= set(policy.get_parameters())


def test_actor_and_critic_share_no_weights() -> None:
    policy = EpisodePolicy(Chance, torso=nn.Sequential(nn.Linear(3, 4), nn.Tanh()), critic=True)
    assert policy.critic is not None
    policy.critic(torch.ones(1, 3)).sum().backward()
    assert all(value.grad is None for value in policy.actor.parameters())
    assert all(value.grad is not None for value in policy.critic.parameters())


def test_state_keys_are_equal_for_observations_that_agree_to_the_decimals() -> None:
    def episode(rows: list[list[float]]) -> Episode:
        length = len(rows)
        return Episode(
            observations=torch.tensor(rows),
            actions=torch.zeros(length),
            rewards=torch.zeros(length, dtype=torch.float64),
            terminated=True,
            truncated=False,
            final_observation=torch.zeros(2),
            log_probs=torch.zeros(length),
        )

    policy = EpisodePolicy(lambda: Spaces(UNIT, spaces.Discrete(2)), options=EpisodeOptions(state_key_decimals=2))
    first, second = episode([[0.1, 0.2], [0.104, 0.2], [0.2, 0.1]]), episode([[0.11, 0.2], [-0.001, 0.0]])
    keys = policy.state_keys(None, [first, second, episode([[0.0, 0.0]])])
    assert keys.shape == (3, 3)
    assert keys[0, 0] == keys[0, 1]  # agree to two decimals
    assert len({int(keys[0, 0]), int(keys[0, 2]), int(keys[1, 0])}) == 3
    assert keys[1, 1] == keys[2, 0]  # -0.001 rounds to 0
    alone = policy.state_keys(None, [second])
    assert alone[0].tolist() == keys[1, :2].tolist()  # other rows do not matter
    other = EpisodePolicy(lambda: Spaces(UNIT, spaces.Discrete(2)), options=EpisodeOptions(state_key_decimals=2))
    assert torch.equal(other.state_keys(None, [second]), alone)  # another policy gives the same keys


def test_without_split_steps_updates_use_whole_episodes() -> None:
    assert isinstance(EpisodePolicy(Chance), SplitsSteps)
    policy = EpisodePolicy(Chance, options=EpisodeOptions(split_steps=False))
    assert not isinstance(policy, SplitsSteps)
    assert not isinstance(copy.deepcopy(policy), SplitsSteps)
    policies = (
        EpisodePolicy(lambda: Spaces(UNIT, UNIT), options=EpisodeOptions(split_steps=split)) for split in (False, True)
    )
    for kind, num_updates in zip(policies, (2, 8), strict=True):  # batches of 3 rows, from 6 episodes or 24 steps
        trainer = trainer_of(kind, batch_size=3)
        trainer.step(STARTS)
        assert int(next(iter(trainer.optimizer_step.optimizer.state.values()))["step"]) == num_updates  # type: ignore[union-attr]


def test_a_copy_has_its_own_weights_and_shares_the_environments() -> None:
    policy = made("normalized")
    episodes = rows_of(policy.sample_actions(STARTS, 1).actions)
    twin = copy.deepcopy(policy)
    assert twin.pool is policy.pool
    assert isinstance(twin, SplitsSteps)
    before = policy.score_actions(STARTS, episodes).log_probs
    with torch.no_grad():
        for value in twin.parameters():
            value.add_(0.1)
    assert twin.normalizer is not policy.normalizer
    torch.testing.assert_close(policy.score_actions(STARTS, episodes).log_probs, before, rtol=0, atol=0)
    assert not torch.allclose(twin.score_actions(STARTS, episodes).log_probs, before)
    states, actions = twin.split_steps(STARTS, episodes)
    mine, theirs = (one.score_actions(states, actions).log_probs for one in (policy, twin))
    assert not torch.allclose(theirs, mine)
    assert torch.equal(policy.split_steps(STARTS, episodes)[0], states)


def test_a_group_starts_from_a_snapshot() -> None:
    env = gymnasium.make("Pendulum-v1")
    env.reset(seed=3)
    for _ in range(5):
        observation, *_ = env.step(np.array([1.0], dtype=np.float32))
    start = EpisodeStart(snapshot=take_snapshot(env, observation))
    policy = EpisodePolicy("Pendulum-v1", num_members=2, options=EpisodeOptions(max_episode_steps=4))
    ((first, second),) = policy.sample_actions([start], 2).actions
    for episode in (first, second):
        torch.testing.assert_close(episode.observations[0], torch.from_numpy(observation), rtol=0, atol=0)
    assert not torch.equal(first.actions, second.actions)


def test_the_initial_log_std_is_used_by_both_kinds_of_heads() -> None:
    for std in ("shared", "observation"):
        policy = EpisodePolicy("Pendulum-v1", options=EpisodeOptions(std=std, initial_log_std=-1.5))  # type: ignore[arg-type]
        parameters = policy.decide(torch.randn(5, 3))
        torch.testing.assert_close(parameters[:, 1], torch.full((5,), -1.5), atol=0.05, rtol=0)
        assert bool((parameters[:, 0].abs() < 0.1).all())


def test_images_stay_bytes_and_go_through_convolutions() -> None:
    policy = made("image")
    assert isinstance(policy.actor[0], CNNTorso)
    (episode, *_) = rows_of(policy.sample_actions(STARTS, 1).actions)
    assert episode.observations.dtype == torch.uint8


def test_a_custom_distribution_is_used() -> None:
    laplace = FromTorch(UNIT, 2, lambda mean: torch.distributions.Laplace(mean, 0.5))
    policy = EpisodePolicy(lambda: Spaces(UNIT, UNIT), distribution=laplace, options=EpisodeOptions(hidden=(4,)))
    episodes = rows_of(policy.sample_actions(STARTS, 2).actions)
    scores = policy.score_actions(STARTS, episodes)
    means = policy.actor(torch.cat([episode.observations for episode in episodes]))
    actions = torch.cat([episode.actions for episode in episodes])
    torch.testing.assert_close(
        scores.log_probs[scores.mask], torch.distributions.Laplace(means, 0.5).log_prob(actions).sum(1)
    )


def test_a_custom_pool_is_used() -> None:
    pool = Watched(make_pool("CartPole-v1", 3))
    policy = EpisodePolicy(pool)
    assert policy.pool is pool
    sampled = policy.sample_actions(STARTS, 2)
    assert sum(map(len, pool.stepped)) == sampled.metrics["episodes/steps"]


def test_the_reward_gets_the_episodes_in_the_order_of_their_states() -> None:
    policy = EpisodePolicy(Chance)
    seen: list[float] = []

    def term(episode: Episode) -> Tensor:
        seen.append(float(episode.observations[0, 0]))
        return episode.rewards

    config = GRPOConfig(group_size=2, seed=0)
    GRPOTrainer(config=config, policy=policy, reward_model=StepReward(term)).step(
        [EpisodeStart(seed=1, options={"first": 0.25}), EpisodeStart(seed=1, options={"first": 0.75})]
    )
    assert seen == [0.25, 0.25, 0.75, 0.75]
