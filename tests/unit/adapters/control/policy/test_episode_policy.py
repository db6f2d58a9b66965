"""EpisodePolicy: sampling and scoring agree, critics and copies work, and custom parts are used."""

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from adapters.control import EnvironmentReward, EpisodeOptions, EpisodePolicy, FromTorch, StepReward, take_snapshot
from adapters.control.environments.episodes import Episode, EpisodeStart
from adapters.control.environments.pools import make_pool
from grpo import ActionScores, ConfigError, ContractError, ExperienceBatch, GRPOConfig, GRPOTrainer, ObjectiveConfig
from grpo.policy_base import SplitsSteps
from tests.support.control_environments import UNIT, Chance, Spaces, Watched
from tests.support.control_episodes import episode_of
from tests.support.control_policies import POLICIES, STARTS, made, policy_of, rows_of, trainer_of


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


def test_values_are_the_critics_and_final_ones_are_0_for_terminated_episodes() -> None:
    """The policy truncates at 6 steps, and some episodes have terminated by then."""
    policy = policy_of(lambda: Chance(99, end_above=0.9), critic=True, hidden=(4,), max_episode_steps=6)
    assert policy.critic is not None
    episodes = rows_of(policy.sample_actions([EpisodeStart(seed=seed) for seed in range(8)], 1).actions)
    assert len({episode.terminated for episode in episodes}) == 2
    scores = policy.score_actions(None, episodes)
    expected = policy.critic(torch.stack([episode.final_observation for episode in episodes])).squeeze(1)
    assert expected.abs().min() > 1e-3
    is_cut = torch.tensor([not episode.terminated for episode in episodes])
    torch.testing.assert_close(scores.final_values, torch.where(is_cut, expected, 0.0))
    values = policy.critic(torch.cat([episode.observations for episode in episodes])).squeeze(1)
    torch.testing.assert_close(scores.values[scores.mask], values)  # type: ignore[index]


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
        return episode_of([0.0] * len(rows), observations=rows)

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


def test_recordings_are_the_episodes_that_the_policy_would_have_sampled(subtests: pytest.Subtests) -> None:
    """Observations and actions of sampled episodes, in the environment's format, with and without the last observation."""
    inside = EpisodeOptions(initial_log_std=-4.0)  # no action is clipped
    wide: Any = lambda seen: seen[:, :2] < 9  # noqa: E731
    for environment, mask, options in (
        ("CartPole-v1", None, None), ("Pendulum-v1", None, inside), ("CartPole-v1", wide, None)
    ):  # fmt: skip
        policy = EpisodePolicy(environment, num_members=2, action_mask=mask, options=options)
        sampled = rows_of(policy.sample_actions(STARTS, 1).actions)
        last = [episode.final_observation.unsqueeze(0) for episode in sampled]
        taken = [policy.distribution.to_env(episode.actions) for episode in sampled]
        for is_whole in (False, True):
            with subtests.test(environment=environment, is_masked=mask is not None, is_whole=is_whole):
                seen = [episode.observations for episode in sampled]
                seen = [torch.cat(each) for each in zip(seen, last, strict=True)] if is_whole else seen
                given = policy.demonstrations([each.numpy() for each in seen], taken)
                assert given.is_demonstration is not None
                assert bool(given.is_demonstration.all())
                found = policy.score_actions(given.states, given.actions)
                torch.testing.assert_close(found.log_probs, policy.score_actions(STARTS, sampled).log_probs)
                assert torch.equal(found.mask, given.mask)
                assert policy.demonstrations(seen, taken).num_rows == len(sampled), "tensors"


def test_a_policy_imitates_a_recorded_expert() -> None:
    """The expert answers the sign of the observation. Beside rewards that are all equal, only it teaches."""
    policy = EpisodePolicy("CartPole-v1", num_members=2)
    seen = np.linspace(-1, 1, 40, dtype=np.float32)[:, None] * np.ones((1, 4), dtype=np.float32)
    given = policy.demonstrations([seen], [(seen[:, 0] > 0).astype(np.int64)])
    config = GRPOConfig(group_size=2, learning_rate=0.02, batch_size=20, seed=0)
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=lambda states, actions: [1.0] * len(states))
    history = trainer.train(None, demonstrations=given, num_iterations=30, progress=False)
    assert history[-1]["train/demonstration_loss"] < 0.1
    (beside,) = trainer.train(STARTS, demonstrations=given, num_iterations=31, progress=False)
    assert beside["rows/demonstrations"] == 1.0


def test_recordings_that_do_not_fit_are_refused(subtests: pytest.Subtests) -> None:
    policy, seen, taken = EpisodePolicy("CartPole-v1", num_members=2), np.zeros((5, 4)), np.zeros(5, dtype=np.int64)
    fits = r"demonstrations: an episode must have L observations, or L \+ 1, of Box.* for its L actions; got"
    cases: list[tuple[str, Any, Any]] = [
        (fits, [seen[:, :3]], [taken]),
        (fits, [seen], [taken[:3]]),
        (fits, [seen], [taken[:0]]),
        (fits, [None], [None]),
        (r"needs \[n, \*shape\] = \['n'\]", seen, taken),  # one episode without the axis of episodes
        ("action 0 is not in the space", [seen], [taken + 2]),
        ("actions must have one entry per row = 1", [seen], [taken, taken]),
        ("there must be a row to imitate", [], []),
    ]
    for words, observations, actions in cases:
        with subtests.test(words), pytest.raises(ContractError, match=words):
            policy.demonstrations(observations, actions)
    with subtests.test("steps"), pytest.raises(ContractError, match="actions must be a list of Episode objects; got"):
        trainer_of(policy).update(
            ExperienceBatch.from_demonstrations(torch.zeros(3, 4), torch.zeros(3, dtype=torch.int64))
        )
    masked = EpisodePolicy("CartPole-v1", num_members=2, action_mask="info")
    with pytest.raises(ConfigError, match="a recording has no masks, which action_mask='info' needs"):
        masked.demonstrations([seen], [taken])


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


class Foreseeing(EpisodePolicy):
    """With a density of the next observation: a Gaussian with standard deviation 1 around what a linear layer says."""

    def __init__(self, environment: Any, **arguments: Any) -> None:
        super().__init__(environment, **arguments)
        self.expected = torch.nn.Linear(4, 4)

    def score_actions(self, states: Any, actions: Any) -> ActionScores:
        scores = super().score_actions(states, actions)
        rows = [
            torch.distributions.Normal(self.expected(one.observations), 1.0).log_prob(next_observations(one)).sum(1)
            for one in actions
        ]
        return replace(scores, observed_log_probs=pad_sequence(rows, batch_first=True), observed_mask=scores.mask)


def next_observations(episode: Episode) -> torch.Tensor:
    return torch.cat([episode.observations[1:], episode.final_observation[None]])


def test_a_density_of_the_next_observation_is_learned_with_its_own_gradient() -> None:
    """Least squares by hand: c times the mean over all observations of |x W + b - y|^2 / 2. They teach nothing else, so the
    actor's step is that of a policy without them."""
    torch.manual_seed(0)
    options = EpisodeOptions(split_steps=False)
    plain = EpisodePolicy("CartPole-v1", num_members=2, options=options)
    torch.manual_seed(0)
    policy = Foreseeing("CartPole-v1", num_members=2, options=options)
    batches = []
    for each, coef in ((plain, 0.0), (policy, 0.5)):
        objective = ObjectiveConfig(observation_coef=coef, aggregation="step_mean")
        config = GRPOConfig(group_size=2, seed=0, max_grad_norm=None, objective=objective)
        trainer = GRPOTrainer(
            config=config, policy=each, reward_model=EnvironmentReward(), optimizer=partial(torch.optim.SGD, lr=0.1)
        )
        batches.append(trainer.collect([EpisodeStart(seed=0), EpisodeStart(seed=1)]))
        start = copy.deepcopy(dict(each.named_parameters()))
        trainer.update(batches[-1])
    x = torch.cat([one.observations for one in batches[1].actions]).double()
    y = torch.cat([next_observations(one) for one in batches[1].actions]).double()
    weight, bias = (start[f"expected.{name}"].detach().double() for name in ("weight", "bias"))
    error = x @ weight.T + bias - y
    torch.testing.assert_close(
        policy.expected.weight.double(), weight - 0.1 * 0.5 * error.T @ x / len(x), rtol=1e-4, atol=1e-6
    )
    torch.testing.assert_close(policy.expected.bias.double(), bias - 0.1 * 0.5 * error.mean(0), rtol=1e-4, atol=1e-6)
    for name, value in plain.named_parameters():
        torch.testing.assert_close(policy.get_parameters()[name], value, msg=name)
