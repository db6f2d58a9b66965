"""CartPole with all members in one array."""

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.envs.classic_control.utils import maybe_parse_reset_bounds
from gymnasium.utils.seeding import np_random
from jaxtyping import Float64, Int64

from grpo.errors import ConfigError, ContractError

from .episodes import EpisodeStart
from .pool_base import TO_BE_RESET, EpisodeSteps, PoolStep
from .snapshots import restore_snapshot

NATIVE_IDS = ("CartPole-v0", "CartPole-v1")


def is_native_keyword(name: str, value: Any) -> bool:
    """Whether the vector environment understands this keyword of `gymnasium.make` (a limit below 1 means none there)."""
    return name == "sutton_barto_reward" or (name == "max_episode_steps" and isinstance(value, int) and value >= 1)


class NativeCartPole:
    """An `EnvironmentPool` on Gymnasium's `CartPoleVectorEnv`: one numpy step for all columns, wanted or not.

    Beginnings and trajectories are those of the id's single environment, bit for bit: both compute in float64 by the same
    formulas, and numpy's functions give the same for a number as for an array of them.

    `CartPoleVectorEnv` itself begins an episode on its own, one step late, from one generator for all, and takes neither a
    list of seeds nor a mask. What belongs to a member is therefore written into its column: `state`, `steps`, `prev_done`.
    Columns without an episode go on beginning episodes of their own, which keeps their numbers small; nobody sees them.

    Args:
        members: how many, or a `CartPoleVectorEnv`, which is taken over.
        env_id: CartPole-v1, 500 steps, or CartPole-v0, 200.
        infos: whether `PoolStep.infos` is filled (all are empty).
        env_kwargs: `sutton_barto_reward`, `max_episode_steps`.

    Raises:
        ConfigError: no members.
    """

    def __init__(
        self, members: int | CartPoleVectorEnv, *, env_id: str = "CartPole-v1", infos: bool = False, **env_kwargs: Any
    ) -> None:
        if isinstance(members, int):
            if members < 1:
                raise ConfigError(f"NativeCartPole needs at least one member; got {members}.")
            made = gymnasium.make_vec(env_id, members, vectorization_mode="vector_entry_point", **env_kwargs)
            assert isinstance(made, CartPoleVectorEnv)
            self._env, self._make = made, (env_id, env_kwargs)
        else:
            env_id = env_id if members.spec is None else members.spec.id
            self._env, self._make = members, (env_id, {"max_episode_steps": members.max_episode_steps})
        self.num_members = self._env.num_envs
        self.observation_space: gymnasium.Space = self._env.single_observation_space
        self.action_space: gymnasium.Space = self._env.single_action_space
        self._env.reset()  # makes the array; each column is written when its member begins
        self._infos = infos
        self._steps = EpisodeSteps(env_id, self.num_members)
        self._generators: list[np.random.Generator | None] = [None] * self.num_members
        self._actions = np.zeros(self.num_members, dtype=np.int64)
        self._closed = False

    def reset(self, members: Sequence[int], starts: Sequence[EpisodeStart]) -> tuple[Any, list[dict[str, Any]]]:
        """Begin an episode in each, as CartPole's `reset(seed=, options=)` does, or from a snapshot of a CartPole.

        Raises:
            ConfigError: the pool is closed.
        """
        self._require_open()
        states = self._states()
        for member, start in zip(members, starts, strict=True):
            states[:, member], self._env.steps[member] = self._begin(member, start)
            self._env.prev_done[member] = False
        self._steps.begin(members)
        return states.T[list(members)].astype(np.float32), [{} for _ in members]

    def _begin(self, member: int, start: EpisodeStart) -> tuple[Float64[np.ndarray, " 4"], int]:
        """State [4], and how many steps of the time limit are gone."""
        if start.snapshot is not None:
            env_id, env_kwargs = self._make
            single = gymnasium.make(env_id, **env_kwargs)
            restore_snapshot(single, start.snapshot)
            self._require_same_settings(single)
            self._generators[member] = deepcopy(single.unwrapped.np_random)
            return single.get_wrapper_attr("state"), single.get_wrapper_attr("_elapsed_steps")
        generator = self._generators[member]
        if start.seed is not None or generator is None:
            generator = self._generators[member] = np_random(start.seed)[0]
        options = None if start.options is None else dict(start.options)
        low, high = maybe_parse_reset_bounds(options, -0.05, 0.05)
        return generator.uniform(low=low, high=high, size=4), 0

    def _require_same_settings(self, single: gymnasium.Env) -> None:
        """A snapshot brings its settings along, but all columns share theirs."""
        theirs, ours = vars(single.unwrapped), vars(self._env)
        shared = theirs.keys() & ours.keys() - {"_np_random_seed"}  # the numbers and words that both classes know
        settings = [name for name in shared if isinstance(theirs[name], bool | int | float | str)]
        differing = [name for name in settings if theirs[name] != ours[name]]
        if single.get_wrapper_attr("_max_episode_steps") != self._env.max_episode_steps:
            differing.append("max_episode_steps")
        if differing:
            raise ConfigError(
                f"NativeCartPole: a snapshot must be of a CartPole with the settings of the pool; {sorted(differing)} "
                "differ. Use vectorization='sync'."
            )

    def _states(self) -> Float64[np.ndarray, "4 M"]:
        states: Any = self._env.state  # declared as None, which it is before the first reset
        return states

    def step(self, members: Int64[np.ndarray, " n"], actions: Any) -> PoolStep:
        """Step each. States are finite where actions are valid, which the environment checks; nothing is checked again.

        Raises:
            ConfigError: the pool is closed.
            ContractError: a member has no episode, or actions are not whole numbers.
        """
        self._require_open()
        actions = np.asarray(actions)
        if actions.dtype.kind not in "iu":  # numpy would cut off what is behind the point
            got = f"{actions.dtype} {list(actions.shape)}"
            raise ContractError(f"{self._steps.name}: actions must be whole numbers, 0 or 1; got {got}.")
        self._steps.advance(members)
        self._actions[members] = actions
        env = self._env
        paused = self._paused(members)
        before = self._states()  # the step makes a new array
        observations, rewards, terminated, truncated, _ = env.step(self._actions)
        if paused is not None:
            self._states()[:, paused] = before[:, paused]
            env.steps[paused] -= 1
            env.prev_done[paused] = False
        terminated, truncated = terminated[members], truncated[members]
        self._steps.end(members, terminated | truncated)
        return PoolStep(
            observations=observations.take(members, axis=0),  # five times as fast as indexing
            rewards=rewards[members].astype(np.float64),
            terminated=terminated,
            truncated=truncated,
            infos=[{} for _ in members] if self._infos else None,
        )

    def _paused(self, members: Int64[np.ndarray, " n"]) -> Int64[np.ndarray, " p"] | None:
        """In the middle of an episode, but not to be stepped; None: nobody."""
        if len(members) == self.num_members:
            return None
        others = self._steps.numbers != TO_BE_RESET
        others[members] = False
        return np.flatnonzero(others) if others.any() else None

    def close(self) -> None:
        """Close the environment."""
        if not self._closed:
            self._closed = True
            self._env.close()

    def _require_open(self) -> None:
        if self._closed:
            raise ConfigError("NativeCartPole: the pool is closed. Make another one with make_pool(...).")
