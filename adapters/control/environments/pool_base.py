"""The interface of environment pools, batches of observations, and step counters of the members.

A member of a pool is one of its environments. Axes: M members of a pool, n members in one call.
"""

import logging
import math
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import create_empty_array
from gymnasium.wrappers import NormalizeObservation, NormalizeReward, TimeLimit
from jaxtyping import Bool, Float64, Int64
from numpy.typing import NDArray

from grpo.arguments import describe
from grpo.errors import ConfigError, ContractError, GRPOError

from .episodes import EpisodeStart
from .snapshots import layers_of

LOGGER = logging.getLogger("grpo")

TO_BE_RESET = -1
"""Step number of a pool member without a running episode."""

LARGEST = float(np.finfo(np.float32).max)
"""The largest number of float32."""


class WorkerLost(GRPOError, RuntimeError):
    """Worker processes died, raised or hung. The pool was rebuilt, and every member has to be reset.

    Args:
        members: Members with lost workers.
        reason: What happened to the workers.
    """

    def __init__(self, members: Sequence[int], reason: str) -> None:
        super().__init__(members, reason)  # both, so that it can be pickled
        self.members = list(members)
        self.reason = reason

    def __str__(self) -> str:
        return (
            f"Lost the worker of {self.reason}. The pool was rebuilt: reset its members and run their episodes again."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStep:
    """One step of n members, in the order of the call."""

    observations: Any
    """Observations [n, ...], or nested arrays for nested spaces. Valid only until the next call of the pool."""
    rewards: Float64[np.ndarray, " n"]
    """Rewards of the environments."""
    terminated: Bool[np.ndarray, " n"]
    """Whether the environment terminated the episode."""
    truncated: Bool[np.ndarray, " n"]
    """Whether the episode was truncated."""
    infos: Sequence[dict[str, Any]] | None
    """One info per member. None unless the pool was created with `infos=True`."""


@runtime_checkable
class EnvironmentPool(Protocol):
    """A pool of environments that are stepped together, each in its own episode.

    A member is one of the environments. There is no automatic reset: stepping a member without a running episode raises
    ContractError.
    """

    num_members: int
    """Number of members, M."""
    observation_space: gymnasium.Space
    """Observation space of one member."""
    action_space: gymnasium.Space
    """Action space of one member."""
    max_episode_steps: int | None
    """Time limit of the environments in steps. None if they have none."""

    def reset(self, members: Sequence[int], starts: Sequence[EpisodeStart]) -> tuple[Any, list[dict[str, Any]]]:
        """Start an episode in each of `members`. Returns observations (batched, valid until the next call) and infos."""
        ...

    def step(self, members: Int64[np.ndarray, " n"], actions: Any) -> PoolStep:
        """Step only `members`. `actions[i]` belongs to `members[i]`."""
        ...

    def close(self) -> None:
        """Close the environments. A second call has no effect; any other use afterwards raises ConfigError."""
        ...


def environment_name(env: gymnasium.Env) -> str:
    """The name in error messages: the environment's id, or its class if it has no id."""
    return type(env.unwrapped).__name__ if env.spec is None else env.spec.id


def layers_in_words(env: gymnasium.Env) -> list[str]:
    """The wrappers from the outermost on, and the environment with the keywords with which it was made."""
    *wrappers, inner = [type(layer).__name__ for layer in layers_of(env)]
    kwargs = {} if env.spec is None else env.spec.kwargs
    return [*wrappers, f"{inner}({', '.join(f'{name}={_in_short(value)}' for name, value in kwargs.items())})"]


def _in_short(value: Any) -> str:
    """The value as text. A long text is cut, with a checksum, so that other values have another text."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}... ({zlib.crc32(text.encode()):08x})"


def numbers_of(envs: Sequence[gymnasium.Env]) -> dict[str, float]:
    """The attributes of equal environments and their wrappers that are numbers. Those in which they differ count something."""
    found = [
        {
            f"{type(layer).__name__}.{name}": float(value)
            for layer in layers_of(env)
            for name, value in vars(layer).items()
            if _is_number(value)
        }
        for env in envs
    ]
    return {name: value for name, value in found[0].items() if all(other.get(name) == value for other in found)}


def _is_number(value: Any) -> bool:
    """Whether a value is a finite number that a float can hold."""
    if isinstance(value, int):  # of any size
        return abs(value) <= sys.float_info.max
    return isinstance(value, float | np.number | np.bool_) and not np.iscomplexobj(value) and math.isfinite(value)


def time_limit(env: gymnasium.Env) -> int | None:
    """The environment's time limit in steps, from its registration or a `TimeLimit` wrapper. None if it has none."""
    registered = None if env.spec is None else env.spec.max_episode_steps
    wrapped = [layer._max_episode_steps for layer in layers_of(env) if isinstance(layer, TimeLimit)]
    return min((limit for limit in (registered, *wrapped) if limit is not None and limit > 0), default=None)


def remedy_for(env: Any) -> str | None:
    """What to do with an environment of another interface. None: it is not known."""
    if isinstance(env, VectorEnv):
        return "A member is a single environment: pass an id, or a function that creates one, and num_members=..."
    if hasattr(env, "num_envs") and (hasattr(env, "step_async") or hasattr(env, "step_wait")):
        return (
            "Stable-Baselines3's vector environments restart finished episodes themselves. Pass the id or the function that "
            "make_vec_env got, and num_members=..., without VecNormalize and VecMonitor: "
            "EpisodeOptions(normalize_observations=True), and returns are reported anyway."
        )
    if hasattr(env, "possible_agents") or hasattr(env, "agent_selection"):
        return (
            "PettingZoo's environments have several agents. Write a gymnasium.Env whose step() takes the action of one agent "
            "and plays the others, and pass a function that creates it."
        )
    if isinstance(env, gymnasium.Env):
        return "A single instance cannot be copied. Pass a function that creates it: lambda: YourEnvironment()."
    if hasattr(env, "reset") and hasattr(env, "step"):
        return (
            "Let its class inherit from gymnasium.Env. For environments of the old gym there is the package shimmy: "
            'gymnasium.make("GymV26Environment-v0", env=...).'
        )
    return None


def close(env: gymnasium.Env) -> None:
    """Close an environment that is not used any more. What its `close` raises is said, and changes nothing."""
    try:
        env.close()
    except Exception as error:  # recovery: nothing depends on an environment that is not used any more
        LOGGER.warning("%s: close() raised %s: %s", type(env.unwrapped).__name__, type(error).__name__, error)


def require_environment(env: Any) -> None:
    """Check that a function has created a single Gymnasium environment, with spaces.

    Raises:
        ConfigError: It has created something else, a space is missing, or the environment uses the name `spec` for something
            of its own. The message says what to do.
    """
    if not isinstance(env, gymnasium.Env):
        raise ConfigError(
            f"Every member of a pool must be a gymnasium.Env; got a {_kind(env)}. "
            f"{remedy_for(env) or 'Return one from the function.'}"
        )
    if not isinstance(env.unwrapped.spec, EnvSpec | None):
        raise ConfigError(
            f"{type(env.unwrapped).__name__}.spec must be what gymnasium.make sets, an EnvSpec; got "
            f"{describe(env.unwrapped.spec)}. Give this attribute another name."
        )
    for name in ("observation_space", "action_space"):
        found = getattr(env, name, None)
        if not isinstance(found, spaces.Space):
            raise ConfigError(
                f"{environment_name(env)}.{name} must be a space of gymnasium.spaces; got {describe(found)}. Set "
                f"self.{name} in __init__, for example to gymnasium.spaces.Discrete(2)."
            )


def require_equal_members(env: gymnasium.Env) -> None:
    """Check that no wrapper keeps running statistics, which would differ between members and change in evaluations.

    Raises:
        ConfigError: A wrapper keeps running statistics.
    """
    for layer in layers_of(env):
        if isinstance(layer, NormalizeObservation | NormalizeReward):
            keeps = layer.update_running_mean
        else:
            keeps = any(type(value).__name__ == "RunningMeanStd" for value in vars(layer).values())
        if keeps:
            raise ConfigError(
                f"{environment_name(env)}: the members of a pool must not keep statistics of their own, because equal starts "
                f"would have different observations or rewards, and evaluations would change them; {type(layer).__name__} "
                "keeps a running mean. Remove this wrapper, and pass EpisodeOptions(normalize_observations=True), which has "
                "one mean for all members; rewards need no scale, because advantages are normalised (AdvantageConfig.scale)."
            )


def find_misfit(space: gymnasium.Space, observation: Any) -> str | None:
    """Describe why an observation does not fit its space. Returns None if it fits.

    Numbers may be narrowed within their kind (float64 to float32), as in Gymnasium's vector environments.
    """
    parts: list[tuple[str, gymnasium.Space, Any]]
    match space:
        case spaces.Dict():
            if not isinstance(observation, Mapping) or set(observation) != set(space.spaces):
                got = f"the keys {list(observation)}" if isinstance(observation, Mapping) else _kind(observation)
                return f"must be a dict with the keys {list(space.spaces)}; got {got}"
            parts = [(repr(key), part, observation[key]) for key, part in space.spaces.items()]
        case spaces.Tuple():
            if not isinstance(observation, tuple) or len(observation) != len(space.spaces):
                got = str(len(observation)) if isinstance(observation, tuple) else _kind(observation)
                return f"must be a tuple of {len(space.spaces)}; got {got}"
            parts = [(str(place), part, observation[place]) for place, part in enumerate(space.spaces)]
        case _:
            required = f"must be {space.dtype} {list(space.shape or ())}"
            try:
                array = np.asarray(observation)
            except ValueError:  # rows of different lengths
                return f"{required}; got {_kind(observation)} of uneven rows"
            except Exception as error:  # recovery: an object's own conversion may raise anything
                return f"{required}; got {_kind(observation)}, which numpy cannot read: {str(error).rstrip('.')}"
            if array.shape != space.shape or not np.can_cast(array.dtype, space.dtype or array.dtype, "same_kind"):
                return f"{required}; got {array.dtype} {list(array.shape)}"
            return None if _is_inside(space, array) else f"must lie in {space}; got {observation}"
    misfits = ((name, find_misfit(part, value)) for name, part, value in parts)
    return next((f"[{name}] {misfit}" for name, misfit in misfits if misfit), None)


def _is_inside(space: gymnasium.Space, array: NDArray[Any]) -> bool:
    """Whether categories lie in their space. The bounds of boxes are not checked, because many environments exceed them."""
    match space:
        case spaces.Discrete():
            return bool(space.start <= array < space.start + space.n)
        case spaces.MultiDiscrete():
            return bool(((space.start <= array) & (array < space.start + space.nvec)).all())
        case spaces.MultiBinary():
            return bool(((array == 0) | (array == 1)).all())
        case _:
            return True


def _kind(value: Any) -> str:
    return type(value).__name__


def misfit_fault(misfit: str) -> str:
    """Error text for a description from `find_misfit`."""
    return f"the observation {misfit}. Correct what the environment returns, or its observation_space."


def exception_fault(error: Exception) -> str:
    """Error text for an exception that an environment raised."""
    return f"the environment raised {type(error).__name__}: {error}. The cause is chained. Correct the environment."


class StepFault(ContractError):
    """What an environment returned is not what Gymnasium asks for. The error of a pool adds the member and its step."""


def five_values(result: Any) -> tuple[Any, Any, Any, Any, Any]:
    """What `env.step` returned.

    Raises:
        StepFault: It is no tuple of five values, or the last one is no dict.
    """
    if not isinstance(result, tuple) or len(result) != 5:
        raise StepFault(
            f"step() must return (observation, reward, terminated, truncated, info); got {_values(result)}. "
            "Environments of the old gym return four values: use their new version, or the package shimmy."
        )
    if type(result[4]) is not dict and not isinstance(result[4], Mapping):
        raise StepFault(f"step() must return a dict as info; got a {_kind(result[4])}. Return {{}} if it is empty.")
    return result


def checked_step(result: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
    """What `env.step` returned, with a plain reward.

    Raises:
        StepFault: It is no five values, the reward is no number, or an end is neither true nor false.
    """
    observation, reward, terminated, truncated, info = five_values(result)
    if type(reward) is not float:
        reward = _number(reward)
    if type(terminated) is not bool:
        terminated = _truth("terminated", terminated)
    if type(truncated) is not bool:
        truncated = _truth("truncated", truncated)
    return observation, reward, terminated, truncated, info


def _single(value: Any) -> Any:
    """The value in an array of one, or the value itself."""
    return value.item() if isinstance(value, np.ndarray | np.generic) and value.size == 1 else value


def _truth(name: str, value: Any) -> bool:
    """An end as a bool. Many environments return 1 and 0, or numpy's bools."""
    single = _single(value)
    if not isinstance(single, int) or single not in (0, 1):
        raise StepFault(f"{name} must be True or False; got {value!r}. Correct what the environment returns.")
    return bool(single)


def _number(reward: Any) -> float:
    single = _single(reward)
    try:
        if isinstance(single, str | bytes):  # float would read them
            raise TypeError(single)
        return float(single)
    except (TypeError, ValueError, OverflowError) as error:
        raise StepFault(
            f"the reward must be a number; got {reward!r}. Correct what the environment returns."
        ) from error


def checked_reset(result: Any) -> tuple[Any, dict[str, Any]]:
    """What `env.reset` returned.

    Raises:
        StepFault: It is no pair of an observation and a dict.
    """
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], Mapping):
        raise StepFault(
            f"reset() must return (observation, info) with a dict info; got {_values(result)}. Correct reset()."
        )
    return result[0], dict(result[1])


def _values(result: Any) -> str:
    return f"{len(result)} values" if isinstance(result, tuple) else f"a {_kind(result)}"


def take_rows(batch: Any, rows: Any) -> Any:
    """`batch[rows]` for every array of a nested batch."""
    if isinstance(batch, dict):
        return {key: take_rows(part, rows) for key, part in batch.items()}
    return tuple(take_rows(part, rows) for part in batch) if isinstance(batch, tuple) else batch[rows]


def put_rows(batch: Any, rows: Any, values: Any) -> None:
    """`batch[rows] = values` for every array of a nested batch."""
    if isinstance(batch, np.ndarray):
        batch[rows] = values
        return
    for key in batch if isinstance(batch, dict) else range(len(batch)):
        put_rows(batch[key], rows, values[key])


def finite_rows(batch: Any, num_rows: int) -> Bool[np.ndarray, " n"]:
    """Mask of the rows without NaN and infinity, as float32 holds them, in which networks compute."""
    if isinstance(batch, dict | tuple):
        parts = batch.values() if isinstance(batch, dict) else batch
        return np.logical_and.reduce([finite_rows(part, num_rows) for part in parts])
    if batch.dtype.kind != "f":
        return np.ones(num_rows, dtype=bool)
    is_finite = np.isfinite(batch) if batch.dtype.itemsize <= 4 else np.abs(batch) <= LARGEST  # False for NaN
    return is_finite.all(axis=tuple(range(1, batch.ndim)))


class ObservationRows:
    """A batch of observations that is written row by row into the same memory at every call.

    Raises:
        ConfigError: Observations of the space have no fixed shape.
    """

    def __init__(self, space: gymnasium.Space, num_rows: int) -> None:
        require_fixed_shape(space)
        self.space = space
        self.batch = create_empty_array(space, num_rows, fn=np.empty)
        self._numbers = (
            range(int(space.start), int(space.start + space.n)) if isinstance(space, spaces.Discrete) else range(0)
        )
        is_box = isinstance(space, spaces.Box)
        self._shape, self._dtype = (space.shape, space.dtype) if is_box else (None, None)

    def write(self, row: int, observation: Any) -> str | None:
        """Write one row. Returns the description from `find_misfit` if the observation does not fit, otherwise None."""
        if type(observation) is int and observation in self._numbers:  # the checks below take longer than such a step
            put_rows(self.batch, row, observation)
            return None
        # numpy would broadcast a wrong shape. This first test is quick, and most observations of a box pass it.
        if type(observation) is not np.ndarray or observation.shape != self._shape or observation.dtype != self._dtype:
            misfit = find_misfit(self.space, observation)
            if misfit:
                return misfit
        put_rows(self.batch, row, observation)
        return None


def require_fixed_shape(space: gymnasium.Space) -> None:
    """Check that observations can be batched into arrays, and have numbers.

    Raises:
        ConfigError: Observations of the space have no fixed shape, or a part of them has no numbers.
    """
    if 0 in (space.shape or ()) or (isinstance(space, spaces.Dict | spaces.Tuple) and not len(space.spaces)):
        raise ConfigError(
            f"A pool needs observations with at least one number in each part; got {space}. If there is nothing to observe, "
            "return a constant: gymnasium.spaces.Box(0, 1, (1,)) and numpy.zeros(1, numpy.float32)."
        )
    match space:
        case spaces.Dict():
            for part in space.spaces.values():
                require_fixed_shape(part)
        case spaces.Tuple():
            for part in space.spaces:
                require_fixed_shape(part)
        case spaces.Box() | spaces.Discrete() | spaces.MultiDiscrete() | spaces.MultiBinary():
            return
        case _:
            raise ConfigError(
                f"A pool needs observations of a fixed shape; got {space}. Wrap the environment so that it returns a Box, "
                "Discrete, MultiDiscrete, MultiBinary, Dict or Tuple (gymnasium.wrappers.TransformObservation)."
            )


class EpisodeSteps:
    """Step counters of the members' episodes, and errors that name the member, its step and its seed.

    Args:
        name: Name of the environment.
        num_members: Number of members M.
    """

    def __init__(self, name: str, num_members: int) -> None:
        self.name = name
        self.numbers: Int64[np.ndarray, " M"] = np.full(num_members, TO_BE_RESET)
        self._starts: list[EpisodeStart] = [EpisodeStart()] * num_members

    def begin(self, members: Sequence[int], starts: Sequence[EpisodeStart]) -> None:
        """Set the counters of `members` to 0."""
        self.numbers[list(members)] = 0
        for member, start in zip(members, starts, strict=True):
            self._starts[member] = start

    def advance(self, members: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " n"]:
        """Count one step for each member, and return the new counts.

        Raises:
            ContractError: A member has no running episode.
        """
        numbers = self.numbers.take(members)
        if np.count_nonzero(numbers == TO_BE_RESET):  # faster than any(), and called at every step
            idle = members[numbers == TO_BE_RESET].tolist()
            raise ContractError(
                f"{self.name}: step() needs members with a running episode; members {idle} have none. Call "
                "reset(members, starts) first, also after the end of an episode and after a lost worker."
            )
        numbers += 1
        self.numbers[members] = numbers
        return numbers

    def end(self, members: Int64[np.ndarray, " n"], ended: Bool[np.ndarray, " n"]) -> None:
        """Mark the members whose episodes ended. They have to be reset before their next step."""
        if np.count_nonzero(ended):
            self.numbers[members[ended]] = TO_BE_RESET

    def error(self, member: int, fault: str) -> ContractError:
        """An error that names the environment, the member, its current step and the seed of its last reset."""
        start = self._starts[member]
        origin = f"seed {start.seed}" if start.snapshot is None else "from a snapshot"
        return ContractError(f"{self.name}, member {member}, step {self.numbers[member]}, {origin}: {fault}")

    def require_finite(
        self, members: Sequence[int], observations: Any, rewards: Float64[np.ndarray, " n"] | None = None
    ) -> None:
        """Check that observations and rewards contain neither NaN nor infinity, nor numbers beyond float32.

        Raises:
            ContractError: A value is not finite. The error names the first such member and its step.
        """
        finite = finite_rows(observations, len(members))
        if not finite.all():
            raise self.error(
                members[int(finite.argmin())],
                "the observation contains NaN or infinity, or a number beyond float32. Look in the environment for a division "
                "by zero or an unstable simulation, and check that actions are within their bounds.",
            )
        if rewards is not None and not (np.abs(rewards) <= LARGEST).all():  # False for NaN
            row = int((np.abs(rewards) <= LARGEST).argmin())
            fault = (
                f"the reward must be finite, also as float32; got {rewards[row]}. Correct what the environment returns."
            )
            raise self.error(members[row], fault)
