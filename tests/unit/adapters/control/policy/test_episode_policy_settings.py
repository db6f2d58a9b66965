"""Settings of EpisodePolicy that cannot work are refused, with what was required and what to do."""

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from adapters.control import EpisodeOptions, EpisodePolicy
from adapters.control.environments.pools import SerialPool
from adapters.control.policy.fast_forward import fast_forward
from adapters.control.policy.observations import as_batch
from grpo.errors import ConfigError, ContractError
from tests.support.control_environments import GOALS, UNIT, Chance, Crossing, Spaces, space_of_everything
from tests.support.control_policies import ACTIONS, IMAGE, STARTS, made, policy_of


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


def test_an_option_among_the_keywords_of_the_environment_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"takes hidden, std in options. Pass options=EpisodeOptions\(hidden=\.\.\.\)"
    ):
        EpisodePolicy("CartPole-v1", hidden=(8,), std="shared")


def test_images_that_would_be_flattened_are_refused(subtests: pytest.Subtests) -> None:
    """Their first layer would have millions of weights. A torso of the user's own may take them."""
    stack = spaces.Box(0, 255, (4, 40, 40, 3), np.uint8)
    for observations, message in (
        (stack, r"images with three axes.* in Box observations.* 19,200 numbers"),
        (spaces.Tuple((UNIT, spaces.Dict(camera=stack))), "in Tuple observations"),
        (spaces.Box(0, 255, (84, 84), np.uint8), "add one to images without channels"),
        (spaces.Box(0.0, 1.0, (4, 96, 96, 3)), r"must have at most 10,000 numbers .* got 110,592"),
        (spaces.Discrete(10_001), r"must have at most 10,000 numbers .* got 10,001 from Discrete"),
    ):
        with subtests.test(observations=str(observations)), pytest.raises(ConfigError, match=message):
            EpisodePolicy(lambda space=observations: Spaces(space, spaces.Discrete(2)), num_members=1)
    own = nn.Sequential(nn.Unflatten(1, (4, 4800)), nn.AvgPool1d(100), nn.Flatten())
    policy = EpisodePolicy(lambda: Spaces(stack, spaces.Discrete(2)), num_members=1, torso=own)
    assert policy.sample_actions(STARTS, 1).mask.shape == (2, 4)


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
    for space in (spaces.Discrete(4, start=2), GOALS, space_of_everything()):
        with subtests.test(space=str(space)):
            policy = EpisodePolicy(lambda space=space: Spaces(space, UNIT), num_members=1)  # type: ignore[misc]
            space.seed(1)
            samples = [space.sample() for _ in range(3)]
            one_by_one = np.stack([policy.predict(sample, deterministic=True)[0] for sample in samples])
            batch = gymnasium.vector.utils.concatenate(
                space, samples, gymnasium.vector.utils.create_empty_array(space, len(samples))
            )
            together, _ = policy.predict(batch, deterministic=True)
            assert together.shape == (3, 2)
            np.testing.assert_allclose(together, one_by_one, rtol=1e-6, atol=1e-7)
            assert as_batch(space, samples[0])[1]
            assert not as_batch(space, batch)[1]


def test_predict_gives_nested_actions_in_the_environments_format() -> None:
    policy = EpisodePolicy(lambda: Spaces(UNIT, ACTIONS), num_members=1)
    action, _ = policy.predict(np.zeros(2, dtype=np.float32))
    assert ACTIONS.contains(action)
    batch, _ = policy.predict(np.zeros((3, 2), dtype=np.float32))
    assert [ACTIONS.contains(one) for one in batch] == [True] * 3


def test_a_mask_function_is_obeyed_and_a_mask_in_infos_is_refused() -> None:
    policy = EpisodePolicy(Crossing, action_mask=lambda observations: observations > 0.5)
    observation = np.array([0.0, 1.0, 0.0, 0.0, 0.0], dtype=np.float32)
    assert {int(policy.predict(observation)[0]) for _ in range(20)} == {1}
    assert policy.predict(observation, deterministic=True)[0] == 1
    with pytest.raises(ConfigError, match=r"predict gets no info, .* Pass action_masks=.* or use evaluate_policy"):
        EpisodePolicy(Crossing, action_mask="info").predict(observation)
