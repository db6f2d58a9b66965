"""What an `EpisodePolicy` is built from: its environments, and its networks."""

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from inspect import signature
from typing import Any, assert_never

import torch
from gymnasium.vector import VectorEnv
from torch import nn

from adapters.control.environments.pools import EnvironmentPool, environment_keywords, make_pool
from grpo.arguments import nearest_name
from grpo.errors import ArgumentError, ConfigError

from .distributions import ActionDistribution, Gaussian, SquashedGaussian
from .networks import CNNTorso, MixedTorso, SharedStd, linear, mlp_torso, num_outputs
from .observations import ObservationEncoder
from .options import EpisodeOptions

DEFAULT_MEMBERS = 16
"""Number of concurrent environments, unless it is given."""

HEAD_GAIN = 0.01
"""Gain of the last layer. A small gain makes the initial policy nearly uniform, or its mean near 0."""

LOGGER = logging.getLogger("grpo")


def pool_of(
    environment: Any, num_members: int | None, make: Mapping[str, Any], *, infos: bool, names: Sequence[str]
) -> tuple[EnvironmentPool, Callable[[], EnvironmentPool] | None]:
    """The pool of a policy, and a function that makes another one like it. None: its environments cannot be made again.

    `names` are the arguments of the policy, one of which a wrong keyword may mean. The others are as in `EpisodePolicy`.

    Raises:
        ConfigError: The environment cannot be created, or keywords have no effect.
        ArgumentError: A keyword is unknown.
    """
    if isinstance(environment, EnvironmentPool):
        if make or num_members not in (None, environment.num_members):
            raise ConfigError(
                f"EpisodePolicy: num_members and keywords of make_pool have no effect on an existing pool of "
                f"{environment.num_members} members; got num_members={num_members} and {sorted(make)}. Leave them out."
            )
        return environment, None
    if isinstance(environment, str):
        _refuse_near_misses(environment, make, names)
    default = environment.num_envs if isinstance(environment, VectorEnv) else DEFAULT_MEMBERS
    members = default if num_members is None else num_members

    def new_pool() -> EnvironmentPool:
        return make_pool(environment, members, infos=infos, **make)

    try:
        pool = new_pool()
    except (TypeError, ConfigError) as error:
        cause = error if isinstance(error, TypeError) else error.__cause__
        strange = [name for name in make if isinstance(cause, TypeError) and repr(name) in str(cause)]
        if not strange:
            raise
        raise ArgumentError(
            f"EpisodePolicy and its environment have no argument {strange[0]!r}. {nearest_name(strange[0], list(names))}"
        ) from error
    return pool, None if isinstance(environment, VectorEnv) else new_pool


def _refuse_near_misses(env_id: str, make: Mapping[str, Any], names: Sequence[str]) -> None:
    """Refuse keywords that nearly are those of the policy, because an environment with `**kwargs` would swallow them.

    Raises:
        ArgumentError: Names the keyword that was meant.
    """
    own = [*names, *(field.name for field in fields(EpisodeOptions))]
    for name in sorted(make.keys() - {*environment_keywords(env_id), *signature(make_pool).parameters}):
        meant = nearest_name(name, own)
        if get_close_matches(name, own, n=1, cutoff=0.8) or not meant.startswith(("Did you mean", "There are")):
            raise ArgumentError(
                f"EpisodePolicy and {env_id} have no argument {name!r}. {meant} If the environment takes it among its "
                f"**kwargs, pass a function that creates it: lambda: gymnasium.make({env_id!r}, {name}=...)."
            )


def networks_of(
    encoder: ObservationEncoder,
    distribution: ActionDistribution,
    torso: nn.Module | None,
    critic: bool | nn.Module,
    options: EpisodeOptions,
) -> tuple[nn.Sequential, nn.Module | None]:
    """The actor, from observations to the parameters of the distribution, and the critic, from observations to [n, 1].

    Raises:
        ConfigError: No default network suits the observations, the critic has several outputs, or options do not suit the
            distribution.
    """

    def outputs_of(module: nn.Module) -> int:
        return num_outputs(module, encoder.shape, encoder.dtype)

    body = _default_torso(encoder, options) if torso is None else torso
    actor = nn.Sequential(body, _head(distribution, outputs_of(body), options))
    if critic is True:
        own = _default_torso(encoder, options) if torso is None else copy.deepcopy(torso)
        critic = nn.Sequential(own, linear(outputs_of(own), 1, gain=1.0))
    if not isinstance(critic, nn.Module):
        return actor, None
    if outputs_of(critic) != 1:
        raise ConfigError(
            "EpisodePolicy: a critic must map observations [n, *shape] to values [n, 1]; got "
            f"[n, {outputs_of(critic)}]. Let its last layer have one output."
        )
    return actor, critic


def _default_torso(encoder: ObservationEncoder, options: EpisodeOptions) -> nn.Module:
    if encoder.is_image:
        return CNNTorso(encoder.shape)
    encoder.require_flat()
    if encoder.has_images:
        return MixedTorso(encoder.parts)
    if len(encoder.space.shape or ()) == 3:
        LOGGER.warning(
            "EpisodePolicy: %s is smaller than 36 x 36, so the default network takes it as a row of %d numbers. Pass "
            "torso=... for another network.",
            encoder.space,
            encoder.shape[0],
        )
    return mlp_torso(encoder.shape[0], options.hidden, options.activation)


def _head(distribution: ActionDistribution, num_features: int, options: EpisodeOptions) -> nn.Module:
    """The last layer of the actor, from features to parameters of the distribution."""
    num_parameters, std, initial_log_std = distribution.num_parameters, options.std, options.initial_log_std
    if not isinstance(distribution, Gaussian | SquashedGaussian):
        if std != "shared" or initial_log_std != 0.0:
            raise ConfigError(
                f"EpisodePolicy: std and initial_log_std are for the Gaussian actions of a single Box; got std={std!r}, "
                f"initial_log_std={initial_log_std} with {type(distribution).__name__}. Leave them out. In Dict and "
                "Tuple spaces, each standard deviation depends on the observation and is initially about 1."
            )
        return linear(num_features, num_parameters, HEAD_GAIN)
    num_actions = num_parameters // 2
    match std:
        case "shared":
            return SharedStd(num_features, num_actions, gain=HEAD_GAIN, initial_log_std=initial_log_std)
        case "observation":
            head = linear(num_features, num_parameters, HEAD_GAIN)
            with torch.no_grad():
                head.bias[num_actions:] = initial_log_std
            return head
        case _:
            assert_never(std)
