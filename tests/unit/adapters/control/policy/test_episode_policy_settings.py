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
from grpo.errors import ConfigError, ContractError
from tests.support.control_environments import UNIT, Chance, Spaces
from tests.support.control_policies import IMAGE, STARTS, policy_of


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
    for environment, settings, message in (
        (Chance, {"max_episode_steps": 0}, "EpisodeOptions.max_episode_steps must be >= 1; got 0"),
        (Chance, {"action_mask": "infos"}, r"action_mask must be 'info', a callable .* got 'infos'"),
        (Chance, {"torso": nn.Flatten(0)}, r"Flatten: a torso must map \[n, \*observation\] to features \[n, F\]"),
        (Chance, {"torso": nn.LSTM(3, 4)}, "LSTM: a torso must have no memory"),
        (Chance, {"critic": nn.Sequential(nn.Linear(3, 4), nn.GRU(4, 1))}, "a torso must have no memory.*got GRU"),
        (Chance, {"std": "common"}, "EpisodeOptions.std must be one of 'shared', 'observation'; got 'common'"),
        (
            bits,
            {"std": "observation"},
            r"are for the Gaussian actions of a single Box; got std='observation'.*Bernoulli",
        ),
        (bits, {"initial_log_std": -1.0}, r"single Box; got std='shared', initial_log_std=-1.0 with Bernoulli"),
        (Chance, {"critic": nn.Linear(3, 2)}, r"a critic must map observations .* to values \[n, 1\]; got \[n, 2\]"),
        (
            images,
            {"num_members": 1, "normalize_observations": True},
            "normalize_observations=True does not support images",
        ),
        (
            one_member,
            {"vectorization": "sync"},
            r"an existing pool of 1 members; got .* \['vectorization'\]. Leave them out",
        ),
        (one_member, {"num_members": 3}, r"an existing pool of 1 members; got num_members=3"),
    ):
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
        (
            stack,
            r"images with three axes.* in Box observations.* 19,200 numbers",
        ),
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


def test_the_wrapper_that_the_error_names_makes_a_frame_stack_work() -> None:
    merged = spaces.Box(0, 255, (40, 40, 12), np.uint8)

    def make() -> gymnasium.Env:
        stacked = gymnasium.wrappers.FrameStackObservation(
            Spaces(spaces.Box(0, 255, (40, 40, 3), np.uint8), spaces.Discrete(2)), 4
        )
        return gymnasium.wrappers.TransformObservation(stacked, lambda frames: np.concatenate(frames, axis=-1), merged)

    policy = EpisodePolicy(make, num_members=1)
    assert policy.sample_actions(STARTS, 1).actions[0][0].observations.shape == (4, 40, 40, 12)
    assert sum(value.numel() for value in policy.parameters()) < 100_000


def test_small_grids_are_flattened() -> None:
    grid = spaces.Dict(cells=spaces.Box(0, 10, (7, 7, 3), np.uint8), direction=spaces.Discrete(4))
    policy = EpisodePolicy(lambda: Spaces(grid, spaces.Discrete(2)), num_members=1)
    assert policy.encoder.shape == (151,)


def test_the_number_of_members_is_that_of_the_pool_or_vector_environment() -> None:
    assert EpisodePolicy(SerialPool([Chance(), Chance()])).pool.num_members == 2
    assert EpisodePolicy(gymnasium.make_vec("CartPole-v1", 3)).pool.num_members == 3
    assert EpisodePolicy(Chance).pool.num_members == 16


def test_states_must_be_episode_starts() -> None:
    with pytest.raises(ContractError, match=r"states must be EpisodeStart objects; got int. Use episode_starts"):
        EpisodePolicy(Chance).sample_actions([3], 2)  # type: ignore[list-item]


def test_a_mask_needs_a_distribution_with_categories() -> None:
    policy = EpisodePolicy(Chance, action_mask=lambda observations: observations > 0)
    with pytest.raises(ContractError, match="Gaussian has no categories that a mask could exclude"):
        policy.sample_actions(STARTS, 1)


def test_a_network_on_another_device_computes_there() -> None:
    policy = EpisodePolicy("Pendulum-v1", num_members=1, options=EpisodeOptions(normalize_observations=True)).to("meta")
    assert fast_forward(policy.normalizer, policy.actor) is None
    assert policy.decide(torch.zeros(2, 3)).device.type == "meta"
