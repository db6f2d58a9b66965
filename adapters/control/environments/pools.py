"""Pools of environments (their members) that are stepped together. `make_pool` chooses the kind of pool.

`SerialPool` steps any environments one after the other, `NativeCartPole` steps all members in one array, and `AsyncPool` uses
worker processes, which pay off if a step takes longer than a message round trip.
"""

import difflib
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, TypeAlias, assert_never

import gymnasium
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.envs.registration import load_env_creator
from gymnasium.error import DependencyNotInstalled, DeprecatedEnv, UnregisteredEnv
from gymnasium.error import Error as GymnasiumError
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv
from jaxtyping import Int64

from grpo.arguments import describe, install_command, require_instances, require_integers
from grpo.errors import ConfigError, GRPOError

from .async_pools import AsyncPool
from .episodes import EpisodeStart
from .masks import MasksInInfo, mask_form
from .native_pools import NATIVE_IDS, NativeCartPole, is_native_keyword
from .pool_base import (
    EnvironmentPool,
    EpisodeSteps,
    ObservationRows,
    PoolStep,
    StepFault,
    WorkerLost,
    checked_reset,
    checked_step,
    close,
    environment_name,
    exception_fault,
    layers_in_words,
    misfit_fault,
    numbers_of,
    remedy_for,
    require_environment,
    require_equal_members,
    take_rows,
    time_limit,
)
from .snapshots import restore_snapshot

__all__ = [
    "AsyncPool",
    "EnvironmentPool",
    "NativeCartPole",
    "PoolStep",
    "SerialPool",
    "Vectorization",
    "WorkerLost",
    "make_pool",
]

LOGGER = logging.getLogger("grpo")

Vectorization: TypeAlias = Literal["auto", "sync", "async", "native"]


class SerialPool:
    """An `EnvironmentPool` in this process that loops over the requested members.

    Args:
        envs: One environment per member, with equal spaces, or a `SyncVectorEnv`, from which the environments are taken.
        infos: Whether to fill `PoolStep.infos`.

    Raises:
        ConfigError: There are no environments, an environment occurs twice, spaces differ, observations have no fixed shape, or
            a wrapper keeps running statistics.
    """

    def __init__(self, envs: Sequence[gymnasium.Env] | SyncVectorEnv, *, infos: bool = False) -> None:
        # A SyncVectorEnv's own step() steps all its environments. With autoreset disabled it fails if one has finished,
        # and with NEXT_STEP it inserts a transition with reward 0 between two episodes.
        self._envs = list(envs.envs) if isinstance(envs, SyncVectorEnv) else list(envs)
        for env in self._envs:
            require_environment(env)
        num_distinct = len({id(env) for env in self._envs})
        if not self._envs or num_distinct < len(self._envs):
            raise ConfigError(
                f"SerialPool needs at least one environment, and a separate one for each member; got {num_distinct} for "
                f"{len(self._envs)} members. A factory must create a new environment at every call."
            )
        self.num_members = len(self._envs)
        self.observation_space = self._envs[0].observation_space
        self.action_space = self._envs[0].action_space
        limits = [time_limit(env) for env in self._envs]
        self.max_episode_steps = None if None in limits else max(limit for limit in limits if limit is not None)
        name = environment_name(self._envs[0])
        self.layers = layers_in_words(self._envs[0])
        """The environment and its wrappers, in words."""
        self.numbers = numbers_of(self._envs)
        """Their attributes that are numbers, by class and name, as the environments were given."""
        for member, env in enumerate(self._envs):
            require_equal_members(env)
            if env.observation_space != self.observation_space or env.action_space != self.action_space:
                raise ConfigError(
                    f"SerialPool: all members need the spaces of member 0, {self.observation_space} and "
                    f"{self.action_space}; member {member} ({name}) has {env.observation_space} and {env.action_space}. "
                    "Create all members in the same way."
                )
        self._infos = infos
        self._rows = ObservationRows(self.observation_space, self.num_members)
        self._steps = EpisodeSteps(name, self.num_members)
        self._closed = False

    def reset(self, members: Sequence[int], starts: Sequence[EpisodeStart]) -> tuple[Any, list[dict[str, Any]]]:
        """Start an episode in each member. The info is empty if the start is a snapshot.

        Raises:
            ConfigError: The pool is closed.
            ContractError: An environment raised, or an observation does not fit its space or is not finite. The error names
                the member, the step and the seed.
        """
        self._require_open()
        infos = []
        self._steps.begin(members, starts)
        for row, (member, start) in enumerate(zip(members, starts, strict=True)):
            try:
                observation, info = _begun(self._envs[member], start)
            except StepFault as fault:
                raise self._steps.error(member, str(fault)) from None
            except GRPOError:
                raise
            except Exception as error:  # recovery: the error of the environment gets a name
                raise self._steps.error(member, exception_fault(error)) from error
            if misfit := self._rows.write(row, observation):
                raise self._steps.error(member, misfit_fault(misfit))
            infos.append(info)
        observations = take_rows(self._rows.batch, slice(len(members)))
        self._steps.require_finite(members, observations)
        return observations, infos

    def step(self, members: Int64[np.ndarray, " n"], actions: Any) -> PoolStep:
        """Step the members one after the other.

        Raises:
            ConfigError: The pool is closed.
            ContractError: A member has no running episode, an environment raised, an observation does not fit its space, or
                an observation or a reward is not finite. The error names the member, the step and the seed.
        """
        self._require_open()
        self._steps.advance(members)
        num_rows, places = len(members), members.tolist()
        rewards = np.empty(num_rows)
        terminated, truncated = np.empty(num_rows, dtype=bool), np.empty(num_rows, dtype=bool)
        infos: list[dict[str, Any]] | None = [] if self._infos else None
        envs, write = self._envs, self._rows.write
        for row, member in enumerate(places):
            try:
                observation, rewards[row], terminated[row], truncated[row], info = checked_step(
                    envs[member].step(actions[row])
                )
            except StepFault as fault:
                raise self._steps.error(member, str(fault)) from None
            except GRPOError:
                raise
            except Exception as error:  # recovery: the error of the environment gets a name
                raise self._steps.error(member, exception_fault(error)) from error
            if misfit := write(row, observation):
                raise self._steps.error(member, misfit_fault(misfit))
            if infos is not None:
                infos.append(info)
        observations = take_rows(self._rows.batch, slice(num_rows))
        self._steps.require_finite(places, observations, rewards)
        self._steps.end(members, terminated | truncated)
        return PoolStep(
            observations=observations, rewards=rewards, terminated=terminated, truncated=truncated, infos=infos
        )

    def close(self) -> None:
        """Close every environment."""
        if not self._closed:
            self._closed = True
            for env in self._envs:
                close(env)

    def _require_open(self) -> None:
        if self._closed:
            raise ConfigError("SerialPool: the pool is closed. Create a new one with make_pool(...).")


def _begun(env: gymnasium.Env, start: EpisodeStart) -> tuple[Any, dict[str, Any]]:
    """The first observation and info of an episode."""
    if start.snapshot is not None:
        return restore_snapshot(env, start.snapshot), {}
    return checked_reset(env.reset(seed=start.seed, options=None if start.options is None else dict(start.options)))


def make_pool(
    env: str | Callable[[], gymnasium.Env] | VectorEnv,
    num_members: int,
    *,
    vectorization: Vectorization = "auto",
    infos: bool = False,
    **env_kwargs: Any,
) -> EnvironmentPool:
    """Create a pool of `num_members` environments.

    Args:
        env: An id, a factory that creates a new environment at every call, or a Gymnasium vector environment (an
            `AsyncVectorEnv` is closed and recreated from its factories).
        num_members: Number of members M. More members take more memory and make the network's batches larger.
        vectorization: `sync` steps the environments one after the other in this process, `async` uses one process each,
            `native` steps all CartPoles in one array, and `auto` is native for CartPole and otherwise sync.
        infos: Whether to fill `PoolStep.infos`, also with the masks of allowed actions that the environment keeps elsewhere.
        env_kwargs: Keywords of `gymnasium.make`, if `env` is an id.

    Raises:
        ConfigError: The id is unknown, a package is not installed, or settings contradict each other.

    Example:
        >>> pool = make_pool("CartPole-v1", 2)
        >>> observations, _ = pool.reset([0, 1], [EpisodeStart(seed=0), EpisodeStart(seed=1)])
        >>> pool.step(np.array([1]), np.array([0])).rewards
        array([1.])
    """
    require_integers("make_pool", 1, num_members=num_members)
    require_instances("make_pool", Vectorization, vectorization=vectorization)
    if isinstance(env, str):
        with explained(env):
            return _pool_of_id(env, num_members, vectorization, infos, env_kwargs)
    if env_kwargs:
        raise ConfigError(
            f"make_pool: keywords of gymnasium.make need an environment id; got {sorted(env_kwargs)} without an id. Set the "
            "keywords where the environment is created."
        )
    if isinstance(env, VectorEnv):
        if num_members != env.num_envs or vectorization != "auto":
            raise ConfigError(
                f"make_pool: this vector environment needs num_members={env.num_envs} and vectorization='auto'; got "
                f"{num_members} and {vectorization!r}. Pass an id or a factory to choose them."
            )
        return _pool_of_vector_env(env, infos)
    if not callable(env):
        raise ConfigError(
            f"make_pool: env must be an id, a factory of environments or a vector environment; got {type(env).__name__}. "
            f"{remedy_for(env) or 'Pass a function that creates the environment: lambda: YourEnvironment().'}"
        )
    with explained(describe_factory(env)):
        return _pool_of_factory(env, num_members, vectorization, infos)


def environment_factory(env: str | Callable[[], gymnasium.Env]) -> Callable[[], gymnasium.Env]:
    """A function that creates the environment of an id, or the function itself.

    Raises:
        ConfigError: `env` is neither. An unknown id raises when the function is called.
    """
    if isinstance(env, str):

        def make() -> gymnasium.Env:
            with explained(env):
                return gymnasium.make(env)

        return make
    if not callable(env):
        raise ConfigError(
            f"An environment must be an id or a function that creates one; got {describe(env)}. Pass lambda: YourEnvironment()."
        )
    return env


def environment_keywords(env_id: str) -> set[str]:
    """The keywords that an environment, or `gymnasium.make`, knows by name. Empty: the id is not registered."""
    try:
        spec = gymnasium.spec(env_id)
        creator = spec.entry_point if callable(spec.entry_point) else load_env_creator(str(spec.entry_point))
    except (GymnasiumError, ImportError, AttributeError):
        return set()
    functions = (
        [vars(kind)["__init__"] for kind in creator.__mro__ if "__init__" in vars(kind)]
        if isinstance(creator, type)
        else [creator]
    )
    known = [inspect.signature(function).parameters for function in (gymnasium.make, *functions)]
    return {*spec.kwargs, *(name for parameters in known for name in parameters)}


def describe_factory(factory: Callable[[], gymnasium.Env]) -> str:
    """The name of a function that creates environments."""
    return str(getattr(factory, "__qualname__", type(factory).__qualname__))


@contextmanager
def explained(env_id: str) -> Iterator[None]:
    """Turn exceptions while an environment is created into errors that name it and say what to do.

    Args:
        env_id: Its id, or the name of the function that creates it.
    """
    try:
        yield
    except GRPOError:
        raise
    except (UnregisteredEnv, DeprecatedEnv) as error:
        near = difflib.get_close_matches(env_id, gymnasium.registry, n=3, cutoff=0.5)
        meant = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise ConfigError(
            f"make_pool: no environment is registered as {env_id!r}.{meant} If it comes with another package, import the "
            f"package that registers it first. (Gymnasium: {error})"
        ) from error
    except DependencyNotInstalled as error:
        is_mujoco = "mujoco" in str(error).lower()
        remedy = install_command("robots") if is_mujoco else str(error)
        raise ConfigError(f"make_pool: {env_id} needs a package that is not installed: {remedy}") from error
    except (GymnasiumError, ImportError) as error:
        raise ConfigError(f"make_pool: {env_id!r} cannot be created: {error}") from error
    except Exception as error:  # recovery: the error of the environment's own code gets a name
        raise ConfigError(
            f"make_pool: {env_id} cannot be created: it raised {type(error).__name__}: {error}. The cause is chained. Correct "
            "the environment, or the keywords that it gets."
        ) from error


def _pool_of_id(
    env_id: str, num_members: int, vectorization: Vectorization, infos: bool, env_kwargs: dict[str, Any]
) -> EnvironmentPool:
    is_native = env_id in NATIVE_IDS and all(is_native_keyword(*item) for item in env_kwargs.items())
    if is_native and vectorization in ("auto", "native"):
        return NativeCartPole(num_members, env_id=env_id, infos=infos, **env_kwargs)
    return _pool_of_factory(partial(gymnasium.make, env_id, **env_kwargs), num_members, vectorization, infos)


def _pool_of_factory(
    factory: Callable[[], gymnasium.Env], num_members: int, vectorization: Vectorization, infos: bool
) -> EnvironmentPool:
    match vectorization:
        case "auto" | "sync":
            envs = [factory() for _ in range(num_members)]
            for env in envs:
                require_environment(env)
            if not infos:
                _say_masks(envs[0])
            return SerialPool([_with_masks(env) for env in envs] if infos else envs, infos=infos)
        case "async":
            made = partial(_made_with_masks, factory) if infos else factory
            return AsyncPool([made] * num_members, infos=infos)
        case "native":
            raise ConfigError(
                f"make_pool: vectorization='native' supports {' and '.join(NATIVE_IDS)}, with the keywords "
                f"sutton_barto_reward and max_episode_steps >= 1 only; got {factory}. Use vectorization='sync'."
            )
        case _:
            assert_never(vectorization)


def _with_masks(env: Any) -> Any:
    """The environment with its masks in `info`. What is no environment is left to the pool's error."""
    return MasksInInfo(env) if isinstance(env, gymnasium.Env) and mask_form(env) else env


def _made_with_masks(factory: Callable[[], gymnasium.Env]) -> gymnasium.Env:
    """Create the environment. A module's function, because it is sent to worker processes."""
    made: gymnasium.Env = _with_masks(factory())
    return made


def _say_masks(env: Any) -> None:
    """Say that masks are not used, if the environment has them."""
    if isinstance(env, gymnasium.Env) and (form := mask_form(env)):
        where = (
            "action_masks()" if form == "method" else 'its observations\' part "action_mask", which is taken as input'
        )
        LOGGER.warning(
            "%s gives masks of allowed actions in %s, and they are not used. EpisodePolicy(action_mask='info') uses them.",
            environment_name(env),
            where,
        )


def _pool_of_vector_env(env: VectorEnv, infos: bool) -> EnvironmentPool:
    match env:
        case SyncVectorEnv():
            return SerialPool([_with_masks(one) for one in env.envs] if infos else env, infos=infos)
        case AsyncVectorEnv():
            env.close()
            return AsyncPool([partial(_made_with_masks, make) if infos else make for make in env.env_fns], infos=infos)
        case CartPoleVectorEnv() if type(env) is CartPoleVectorEnv:  # a subclass may compute something else
            return NativeCartPole(env, infos=infos)
        case _:
            raise ConfigError(
                f"make_pool: {type(env).__name__} cannot be stepped member by member. Pass an id or a factory, a "
                "SyncVectorEnv or an AsyncVectorEnv. Apply wrappers to the single environments."
            )
