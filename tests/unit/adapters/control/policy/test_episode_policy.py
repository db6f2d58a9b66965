"""EpisodePolicy: sampling and scoring agree, custom parts are used, `predict`, and settings that are refused."""

import copy
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from adapters.control import EpisodeOptions, EpisodePolicy, FromTorch
from adapters.control.environments.episodes import Episode, EpisodeStart
from adapters.control.environments.pools import SerialPool
from adapters.control.policy.fast_forward import fast_forward
from grpo import ConfigError, ContractError, ExperienceBatch, GRPOConfig, GRPOTrainer
from grpo.policy_base import SplitsSteps
from tests.support.control_environments import GOALS, UNIT, Chance, Crossing, Spaces, space_of_everything
from tests.support.control_episodes import episode_of
from tests.support.control_policies import ACTIONS, IMAGE, POLICIES, STARTS, made, policy_of, rows_of, trainer_of


def test_sampling_scoring_and_single_steps_report_the_same_numbers(subtests: pytest.Subtests) -> None:
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
            states, actions = policy.split_steps(STARTS, episodes)
            assert len(states) == len(actions) == sum(map(len, episodes))
            order = torch.randperm(len(states))  # updates shuffle steps
            split = policy.score_actions(states[order], actions[order])
            assert split.log_probs.shape == (len(states), 1)
            for name in ("log_probs", "entropy", "values"):
                of_steps, of_episodes = getattr(split, name), getattr(scores, name)
                assert (of_steps is None) == (of_episodes is None)
                if of_steps is not None:
                    expected = of_episodes[scores.mask][order]
                    torch.testing.assert_close(of_steps.squeeze(1), expected, rtol=1e-6, atol=2e-6)


def test_entropy_and_log_probs_are_those_of_the_distribution(subtests: pytest.Subtests) -> None:
    categorical, laplace = made("categorical"), FromTorch(UNIT, 2, lambda mean: torch.distributions.Laplace(mean, 0.5))
    custom = policy_of(lambda: Spaces(UNIT, UNIT), distribution=laplace, hidden=(4,))
    for policy, law in (
        (categorical, lambda logits: torch.distributions.Categorical(logits=logits)),
        (custom, lambda mean: torch.distributions.Independent(torch.distributions.Laplace(mean, 0.5), 1)),
    ):
        with subtests.test(type(policy.distribution).__name__):
            episodes = rows_of(policy.sample_actions(STARTS, 2).actions)
            scores = policy.score_actions(STARTS, episodes)
            expected = law(policy.actor(torch.cat([episode.observations for episode in episodes])))
            torch.testing.assert_close(scores.entropy[scores.mask], expected.entropy())  # type: ignore[index]
            actions = torch.cat([episode.actions for episode in episodes])
            torch.testing.assert_close(scores.log_probs[scores.mask], expected.log_prob(actions))
    assert made("squashed").sample_actions(STARTS, 1).scores.entropy is None  # type: ignore[union-attr]


def test_values_are_the_critics_and_final_ones_are_0_for_terminated_episodes() -> None:
    """In the second iteration, episodes terminate, are truncated at 6 steps, or go on after 4."""
    critic = nn.Linear(3, 1)
    policy = policy_of(lambda: Chance(99, end_above=0.9), critic=critic, hidden=(4,), max_episode_steps=6, num_steps=4)
    for first in (0, 16):
        starts = [EpisodeStart(seed=first + number) for number in range(16)]
        episodes = rows_of(policy.sample_actions(starts, 1).actions)
    assert len({(episode.terminated, episode.truncated) for episode in episodes}) == 3
    scores = policy.score_actions(None, episodes)
    expected = critic(torch.stack([episode.final_observation for episode in episodes])).squeeze(1)
    assert expected.abs().min() > 1e-3
    has_rest = torch.tensor([not episode.terminated for episode in episodes])
    torch.testing.assert_close(scores.final_values, torch.where(has_rest, expected, 0.0))
    values = critic(torch.cat([episode.observations for episode in episodes])).squeeze(1)
    torch.testing.assert_close(scores.values[scores.mask], values)  # type: ignore[index]
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


def test_the_initial_log_std_is_used_by_both_kinds_of_heads() -> None:
    for std in ("shared", "observation"):
        policy = EpisodePolicy("Pendulum-v1", options=EpisodeOptions(std=std, initial_log_std=-1.5))  # type: ignore[arg-type]
        parameters = policy.decide(torch.randn(5, 3))
        torch.testing.assert_close(parameters[:, 1], torch.full((5,), -1.5), atol=0.05, rtol=0)
        assert bool((parameters[:, 0].abs() < 0.1).all())


def test_a_subclass_may_add_weights() -> None:
    class Foreseeing(EpisodePolicy):
        def __init__(self, environment: Any, **arguments: Any) -> None:
            super().__init__(environment, **arguments)
            self.expected = nn.Linear(4, 4)

    policy = Foreseeing("CartPole-v1", num_members=2)
    assert policy.sample_actions(STARTS, 1).mask.shape[0] == 2
    assert "expected.weight" in policy.get_parameters()


def test_a_torso_of_ones_own_takes_a_stack_of_images() -> None:
    stack = spaces.Box(0, 255, (4, 40, 40, 3), np.uint8)
    own = nn.Sequential(nn.Unflatten(1, (4, 4800)), nn.AvgPool1d(100), nn.Flatten())
    policy = EpisodePolicy(lambda: Spaces(stack, spaces.Discrete(2)), num_members=1, torso=own)
    assert policy.sample_actions(STARTS, 1).mask.shape == (2, 4)


# --- settings


def test_ranks_compare_the_arguments_of_a_policy(subtests: pytest.Subtests) -> None:
    usual = policy_of("CartPole-v1", num_members=2).settings()
    for changed, arguments in {
        "num_members": {"num_members": 3},
        "critic": {"critic": True},
        "torso": {"torso": nn.Linear(4, 3)},
        "action_mask": {"action_mask": lambda observations: observations[..., :2] > -9},
        "options": {"normalize_observations": True},
        "make": {"vectorization": "sync"},
    }.items():
        with subtests.test(changed):
            found = policy_of("CartPole-v1", **{"num_members": 2, **arguments}).settings()
            assert {name for name in usual if found[name] != usual[name]} == {changed}


def test_settings_that_cannot_work_are_refused(subtests: pytest.Subtests) -> None:
    one_member = SerialPool([Chance()])
    images, bits = (lambda: Spaces(IMAGE, spaces.Discrete(2))), (lambda: Spaces(UNIT, spaces.MultiBinary(2)))
    mixed = lambda: Spaces(spaces.Tuple((IMAGE, UNIT)), spaces.Discrete(2))  # noqa: E731
    for environment, settings, message in (
        (Chance, {"max_episode_steps": 0}, "EpisodeOptions.max_episode_steps must be >= 1; got 0"),
        (Chance, {"action_mask": lambda observations: observations > 0},
         r"action_mask needs actions with categories, .* or leave action_mask out"),
        (Chance, {"action_mask": "infos"}, r"action_mask must be 'info', a callable .* got 'infos'"),
        (Chance, {"torso": nn.Flatten(0)}, r"Flatten: a torso must map \[n, \*observation\] to features \[n, F\]"),
        (Chance, {"torso": nn.LSTM(3, 4)}, "LSTM: a torso must have no memory"),
        (Chance, {"critic": nn.Sequential(nn.Linear(3, 4), nn.GRU(4, 1))}, "a torso must have no memory.*got GRU"),
        (Chance, {"std": "common"}, "EpisodeOptions.std must be one of 'shared', 'observation'; got 'common'"),
        (bits, {"std": "observation"}, r"are for the Gaussian actions of a single Box; got std='observation'.*Bernoulli"),
        (bits, {"initial_log_std": -1.0}, r"single Box; got std='shared', initial_log_std=-1.0 with Bernoulli"),
        (Chance, {"critic": nn.Linear(3, 2)}, r"a critic must map observations .* to values \[n, 1\]; got \[n, 2\]"),
        (images, {"num_members": 1, "normalize_observations": True}, "normalize_observations=True does not support images"),
        (mixed, {"num_members": 1, "normalize_observations": True},
         r"whose networks scale pixels. Leave it out. With a preset: dataclasses\.replace"),
        (one_member, {"vectorization": "sync"},
         r"an existing pool of 1 members; got .* \['vectorization'\]. Leave them out"),
        (one_member, {"num_members": 3}, r"an existing pool of 1 members; got num_members=3"),
    ):  # fmt: skip
        with subtests.test(settings=settings), pytest.raises(ConfigError, match=message):
            policy_of(environment, **settings)
    with pytest.raises(ConfigError, match=r"takes hidden, std in options. Pass options=EpisodeOptions\(hidden=\.\."):
        EpisodePolicy("CartPole-v1", hidden=(8,), std="shared")


def test_the_number_of_members_is_that_of_the_pool_or_vector_environment() -> None:
    assert EpisodePolicy(SerialPool([Chance(), Chance()])).pool.num_members == 2
    assert EpisodePolicy(gymnasium.make_vec("CartPole-v1", 3)).pool.num_members == 3
    assert EpisodePolicy(Chance).pool.num_members == 16


def test_states_must_be_episode_starts() -> None:
    with pytest.raises(ContractError, match=r"states must be EpisodeStart objects; got int. Use episode_starts"):
        EpisodePolicy(Chance).sample_actions([3], 2)  # type: ignore[list-item]


def test_a_network_on_another_device_computes_there() -> None:
    policy = EpisodePolicy("Pendulum-v1", num_members=1, options=EpisodeOptions(normalize_observations=True)).to("meta")
    assert fast_forward(policy.normalizer, policy.actor) is None
    assert policy.decide(torch.zeros(2, 3)).device.type == "meta"


# --- predict has the signature of Stable-Baselines3's


def test_predict_gives_categories_for_one_observation_and_for_a_batch() -> None:
    policy = made("categorical")
    observation = np.array([0.1, 0.2, -0.3, 0.4], dtype=np.float32)
    action, state = policy.predict(observation, deterministic=True)
    assert np.shape(action) == ()
    assert state is None
    batch, state = policy.predict(np.stack([observation] * 3), state=("kept",), deterministic=True)
    assert batch.tolist() == [int(action)] * 3
    assert state == ("kept",)
    assert int(action) == int(policy.decide(torch.from_numpy(observation)[None]).argmax())
    drawn, _ = policy.predict(np.stack([observation] * 200))
    assert set(drawn.tolist()) == {0, 1}
    torch.manual_seed(7)
    first, _ = policy.predict(np.stack([observation] * 20))
    torch.manual_seed(7)
    assert policy.predict(np.stack([observation] * 20))[0].tolist() == first.tolist()


def test_predict_gives_box_actions_for_one_observation_and_for_a_batch() -> None:
    policy = made("gaussian")
    observation = np.array([1.0, 0.0, 0.5], dtype=np.float32)
    action, _ = policy.predict(observation, deterministic=True)
    assert (action.shape, action.dtype) == ((1,), np.float32)
    batch, _ = policy.predict(observation[None].repeat(4, 0), deterministic=True)
    np.testing.assert_allclose(batch, np.stack([action] * 4), rtol=1e-6)
    mean = float(policy.decide(torch.from_numpy(observation)[None])[0, 0].detach())
    assert action.item() == pytest.approx(2.0 * mean)  # the torque is in [-2, 2]
    wild, _ = EpisodePolicy("Pendulum-v1", options=EpisodeOptions(initial_log_std=2.0)).predict(
        observation[None].repeat(50, 0)
    )
    assert np.abs(wild).max() == 2.0  # clipped to the bounds


def test_predict_distinguishes_single_and_batched_observations_of_every_space(subtests: pytest.Subtests) -> None:
    for space, actions in ((spaces.Discrete(4, start=2), UNIT), (GOALS, UNIT), (space_of_everything(), ACTIONS)):
        with subtests.test(space=str(space)):
            policy = EpisodePolicy(lambda space=space, actions=actions: Spaces(space, actions), num_members=1)
            space.seed(1)
            samples = [space.sample() for _ in range(3)]
            batch = gymnasium.vector.utils.concatenate(
                space, samples, gymnasium.vector.utils.create_empty_array(space, len(samples))
            )
            one_by_one = [policy.predict(sample, deterministic=True)[0] for sample in samples]
            together, _ = policy.predict(batch, deterministic=True)
            for one, other in zip(together, one_by_one, strict=True):
                assert actions.contains(one)
                assert actions.contains(other)
                one, other = (spaces.flatten(actions, taken) for taken in (one, other))
                np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)


def test_predict_obeys_a_mask_function() -> None:
    policy = EpisodePolicy(Crossing, action_mask=lambda observations: observations > 0.5)
    observation = np.array([0.0, 1.0, 0.0, 0.0, 0.0], dtype=np.float32)
    assert {int(policy.predict(observation)[0]) for _ in range(20)} == {1}
    assert policy.predict(observation, deterministic=True)[0] == 1
