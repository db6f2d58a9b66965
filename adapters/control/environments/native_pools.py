"""CartPole with all members in one array."""

from collections.abc import Sequence
from copy import deepcopy
from functools import lru_cache
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.envs.classic_control.utils import maybe_parse_reset_bounds
from gymnasium.utils.seeding import np_random
from jaxtyping import Float64, Int64

from grpo.arguments import require_integers
from grpo.errors import ConfigError, ContractError

from .episodes import EpisodeStart
from .pool_base import EpisodeSteps, PoolStep
from .snapshots import restore_snapshot

NATIVE_IDS = ("CartPole-v0", "CartPole-v1")


def is_native_keyword(name: str, value: Any) -> bool:
    """Whether the pool supports this keyword of `gymnasium.make`: `sutton_barto_reward`, or a `max_episode_steps` >= 1."""
    return name == "sutton_barto_reward" or (name == "max_episode_steps" and isinstance(value, int) and value >= 1)


class NativeCartPole:
    """An `EnvironmentPool` of CartPoles as columns of one array. One numpy operation steps all requested members.

    Starts and trajectories equal Gymnasium's single environment bit for bit: the formulas are the same in float64, and numpy
    gives the same result for a number and for an array.

    Gymnasium's `CartPoleVectorEnv` supplies settings and spaces, but is never stepped. Its own `step` always steps all columns
    and resets finished columns one step later from one generator. Its `reset` takes neither a seed per column nor a mask.

    Args:
        members: Number of members, or a `CartPoleVectorEnv` with the settings to use.
        env_id: CartPole-v1 (500 steps) or CartPole-v0 (200 steps).
        infos: Whether to fill `PoolStep.infos`. CartPole's infos are empty dicts.
        env_kwargs: `sutton_barto_reward` and `max_episode_steps`, as in `gymnasium.make`.

    Raises:
        ConfigError: There are no members.
    """

    def __init__(
        self, members: int | CartPoleVectorEnv, *, env_id: str = "CartPole-v1", infos: bool = False, **env_kwargs: Any
    ) -> None:
        if isinstance(members, int):
            require_integers("NativeCartPole", 1, members=members)
            made = gymnasium.make_vec(env_id, members, vectorization_mode="vector_entry_point", **env_kwargs)
            assert isinstance(made, CartPoleVectorEnv)
            self._env, self._make = made, (env_id, env_kwargs)
        else:
            env_id = env_id if members.spec is None else members.spec.id
            self._env, self._make = members, (env_id, {"max_episode_steps": members.max_episode_steps})
        self.num_members = self._env.num_envs
        self.observation_space: gymnasium.Space = self._env.single_observation_space
        self.action_space: gymnasium.Space = self._env.single_action_space
        self.max_episode_steps: int | None = self._env.max_episode_steps
        self._states = np.zeros((4, self.num_members))  # rows x, x', a, a' as in `moved`
        self._infos = infos
        self._steps = EpisodeSteps(env_id, self.num_members)
        # Per member: its generator, or the seed of its last reset until the generator is needed.
        self._chance: list[int | np.random.Generator | None] = [None] * self.num_members
        self._closed = False

    def reset(self, members: Sequence[int], starts: Sequence[EpisodeStart]) -> tuple[Any, list[dict[str, Any]]]:
        """Start an episode in each member, as CartPole's `reset(seed=, options=)` does, or from a snapshot of a CartPole.

        Raises:
            ConfigError: The pool is closed, or a snapshot has other settings than the pool.
        """
        self._require_open()
        self._steps.begin(members, starts)
        for member, start in zip(members, starts, strict=True):
            self._states[:, member] = self._begin(member, start)
        return self._states.T[list(members)].astype(np.float32), [{} for _ in members]

    def _begin(self, member: int, start: EpisodeStart) -> Float64[np.ndarray, " 4"]:
        """The initial state of the member's episode."""
        if start.snapshot is not None:
            env_id, env_kwargs = self._make
            single = gymnasium.make(env_id, **env_kwargs)
            restore_snapshot(single, start.snapshot)
            self._require_same_settings(single)
            self._chance[member] = deepcopy(single.unwrapped.np_random)
            self._steps.numbers[member] = single.get_wrapper_attr("_elapsed_steps")  # counted by the time limit
            return single.get_wrapper_attr("state")
        options = None if start.options is None else dict(start.options)
        low, high = maybe_parse_reset_bounds(options, -0.05, 0.05)
        if start.seed is not None:
            self._chance[member] = start.seed
            return _seeded_state(start.seed, low, high)
        return self._generator(member).uniform(low=low, high=high, size=4)

    def _generator(self, member: int) -> np.random.Generator:
        """The member's generator after its last reset. It is created on first use, because resets without a seed are rare."""
        chance = self._chance[member]
        if not isinstance(chance, np.random.Generator):
            generator, _ = np_random(chance)
            if chance is not None:
                generator.uniform(size=4)  # the draw of the reset with that seed
            self._chance[member] = chance = generator
        return chance

    def _require_same_settings(self, single: gymnasium.Env) -> None:
        """Check that a snapshot has the settings of the pool, which all columns share."""
        theirs, ours = vars(single.unwrapped), vars(self._env)
        shared = theirs.keys() & ours.keys() - {"_np_random_seed"}  # attributes of both classes
        settings = [name for name in shared if isinstance(theirs[name], bool | int | float | str)]
        differing = [name for name in settings if theirs[name] != ours[name]]
        if single.get_wrapper_attr("_max_episode_steps") != self._env.max_episode_steps:
            differing.append("max_episode_steps")
        if differing:
            raise ConfigError(
                f"NativeCartPole: a snapshot must be of a CartPole with the settings of the pool; {sorted(differing)} "
                "differ. Use vectorization='sync', where members may have different settings."
            )

    def step(self, members: Int64[np.ndarray, " n"], actions: Any) -> PoolStep:
        """Step the members. Only the actions are checked, because finite states stay finite.

        Raises:
            ConfigError: The pool is closed.
            ContractError: A member has no running episode, or an action is not 0 or 1.
        """
        self._require_open()
        env = self._env
        actions = np.asarray(actions)
        # fractions are rejected, not rounded down
        if actions.dtype.kind not in "iu" or np.count_nonzero(actions >> 1):
            got = f"{actions.dtype} {list(actions.shape)}" if actions.dtype.kind not in "iu" else actions.tolist()
            raise ContractError(
                f"{self._steps.name}: actions must be integers, 0 (push left) or 1 (push right); got {got}."
            )
        numbers = self._steps.advance(members)
        states = moved(env, self._states.take(members, axis=1), actions)  # take() is several times faster than indexing
        self._states[:, members] = states
        terminated = (np.abs(states[0]) > env.x_threshold) | (np.abs(states[2]) > env.theta_threshold_radians)
        truncated = numbers >= env.max_episode_steps
        self._steps.end(members, terminated | truncated)
        return PoolStep(
            observations=states.T.astype(np.float32),
            rewards=-terminated.astype(np.float64) if env._sutton_barto_reward else np.ones(len(members)),
            terminated=terminated,
            truncated=truncated,
            infos=[{} for _ in members] if self._infos else None,
        )

    def close(self) -> None:
        """Close the environment."""
        if not self._closed:
            self._closed = True
            self._env.close()

    def _require_open(self) -> None:
        if self._closed:
            raise ConfigError("NativeCartPole: the pool is closed. Create a new one with make_pool(...).")


def moved(
    env: CartPoleVectorEnv, states: Float64[np.ndarray, "4 n"], actions: Int64[np.ndarray, " n"]
) -> Float64[np.ndarray, "4 n"]:
    """The states after one time step of Euler integration.

    m is the mass of the pole, M the mass of pole and cart, l half the pole's length, F the force, x the position of the cart
    and a the angle of the pole:

    u   = (F + m l a'^2 sin a) / M
    a'' = (g sin a - u cos a) / (l (4/3 - m cos^2 a / M))
    x'' = u - m l a'' cos a / M

    Explicit Euler ("euler") computes x + tau x' and x' + tau x''. Any other `kinematics_integrator` computes the new x' first,
    and uses it to compute the new x.

    Source:
        Florian 2007, "Correct equations for the dynamics of the cart-pole system", without friction. The order of the
        operations is that of Gymnasium's `CartPoleEnv.step`.
    """
    x, x_dot, angle, spin = states
    cosine, sine = np.cos(angle), np.sin(angle)
    force = np.array([-env.force_mag, env.force_mag]).take(actions)
    push = (force + env.polemass_length * np.square(spin) * sine) / env.total_mass
    spin_dot = (env.gravity * sine - cosine * push) / (
        env.length * (4.0 / 3.0 - env.masspole * np.square(cosine) / env.total_mass)
    )
    x_dot_dot = push - env.polemass_length * spin_dot * cosine / env.total_mass
    following = np.empty_like(states)
    np.add(x_dot, env.tau * x_dot_dot, out=following[1])
    np.add(spin, env.tau * spin_dot, out=following[3])
    _, x_dot, _, spin = states if env.kinematics_integrator == "euler" else following
    np.add(x, env.tau * x_dot, out=following[0])
    np.add(angle, env.tau * spin, out=following[2])
    return following


@lru_cache(maxsize=4096)
def _seeded_state(seed: int, low: float, high: float) -> Float64[np.ndarray, " 4"]:
    """Initial state of CartPole's `reset(seed=...)`. It is cached, because the members of a group share a seed."""
    return np_random(seed)[0].uniform(low=low, high=high, size=4)
