"""A pool of environments in worker processes. Workers that are lost are restarted."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty
from typing import Any

import gymnasium
import numpy as np
from gymnasium.vector import AsyncVectorEnv, AutoresetMode
from jaxtyping import Int64

from grpo.errors import ConfigError, ContractError, GRPOError

from .episodes import EpisodeStart
from .pool_base import (
    TO_BE_RESET,
    EpisodeSteps,
    PoolStep,
    WorkerLost,
    checked_reset,
    checked_step,
    environment_name,
    find_misfit,
    layers_in_words,
    misfit_fault,
    require_environment,
    require_equal_members,
    require_fixed_shape,
    take_rows,
    time_limit,
)
from .snapshots import restore_snapshot

SNAPSHOT = "adapters.control.snapshot"
"""Key of the reset options under which a snapshot is sent to a worker."""

GRACE = 2.0
"""Seconds that all workers together have to close their environments before they are killed."""

LAST_WORDS = 1.0
"""Seconds to wait for the exception or the exit code of a lost worker."""


class WorkerEnv(gymnasium.Wrapper):
    """The environment inside a worker. It restores snapshots, and checks observations before they enter shared memory.

    Shared memory stores numbers without a shape, so an observation of a wrong shape could go unnoticed.
    """

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        require_equal_members(env)
        # AsyncVectorEnv passes the metadata on
        own = {"name": environment_name(env), "time_limit": time_limit(env), "layers": layers_in_words(env)}
        self.metadata = {**env.metadata, **own}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Reset the environment, or restore the snapshot in `options`."""
        if options is not None and SNAPSHOT in options:
            return self._checked(restore_snapshot(self.env, options[SNAPSHOT])), {}
        observation, info = checked_reset(self.env.reset(seed=seed, options=options))
        return self._checked(observation), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step the environment. The reward is converted to float."""
        observation, reward, terminated, truncated, info = checked_step(self.env.step(action))
        return self._checked(observation), reward, terminated, truncated, info

    def _checked(self, observation: Any) -> Any:
        if misfit := find_misfit(self.observation_space, observation):
            raise ContractError(misfit_fault(misfit))
        return observation


def make_worker_env(env_fn: Callable[[], gymnasium.Env]) -> WorkerEnv:
    """Create the environment. Called in the worker process."""
    env = env_fn()
    require_environment(env)
    return WorkerEnv(env)


class AsyncPool:
    """An `EnvironmentPool` in worker processes, on Gymnasium's `AsyncVectorEnv` with shared memory.

    AsyncVectorEnv's own step() steps every worker, waits for all, and cannot tell which worker failed. This pool sends the same
    messages through `parent_pipes` to the requested members only.

    If a worker dies, raises or does not answer in time, all workers are killed and restarted, and `WorkerLost` names the
    lost members. The count of consecutive rebuilds returns to 0 when every lost member has completed a step.

    Args:
        env_fns: One factory per member.
        timeout: Time limit of one call in seconds. With None, an environment that hangs blocks forever.
        max_rebuilds: Maximum number of consecutive rebuilds. One more rebuild raises ContractError.
        infos: Whether to fill `PoolStep.infos`.

    Raises:
        ConfigError: There are no environments, observations have no fixed shape, or a wrapper keeps running statistics.
        ContractError: A worker ended while it created its environment.
    """

    def __init__(
        self,
        env_fns: Sequence[Callable[[], gymnasium.Env]],
        *,
        timeout: float | None = 60.0,
        max_rebuilds: int = 3,
        infos: bool = False,
    ) -> None:
        if not env_fns or (timeout is not None and timeout <= 0) or max_rebuilds < 0:
            raise ConfigError(
                "AsyncPool needs at least one environment, timeout > 0 or None, and max_rebuilds >= 0; got "
                f"{len(env_fns)} environments, timeout={timeout}, max_rebuilds={max_rebuilds}."
            )
        self._env_fns = [partial(make_worker_env, env_fn) for env_fn in env_fns]
        self._timeout = timeout
        self._max_rebuilds = max_rebuilds
        self._infos = infos
        self.num_members = len(env_fns)
        self.num_rebuilds = 0
        self._vector: AsyncVectorEnv | None = None
        vector = self._build()
        self.observation_space = vector.single_observation_space
        self.action_space = vector.single_action_space
        self.max_episode_steps: int | None = vector.metadata["time_limit"]
        self.layers: list[str] = vector.metadata["layers"]
        """The environment and its wrappers, in words."""
        self._steps = EpisodeSteps(vector.metadata["name"], self.num_members)
        self._rebuilds_in_a_row = 0
        self._unproven: set[int] = set()  # lost members that have not completed a step since
        self._waiting = False  # for answers; true between two calls only if an exception interrupted the first

    def _build(self) -> AsyncVectorEnv:
        try:
            vector = AsyncVectorEnv(self._env_fns, autoreset_mode=AutoresetMode.DISABLED)
        except (EOFError, ConnectionError) as error:
            raise ContractError(
                "AsyncPool: a worker process ended while it created its environment. Use vectorization='sync' to see the error."
            ) from error
        self._vector = vector
        try:
            require_fixed_shape(vector.single_observation_space)
        except ConfigError:
            self.close()
            raise
        return vector

    def reset(self, members: Sequence[int], starts: Sequence[EpisodeStart]) -> tuple[Any, list[dict[str, Any]]]:
        """Start an episode in each member. The info is empty if the start is a snapshot.

        Raises:
            ConfigError: The pool is closed.
            ContractError: An observation does not fit its space, or is not finite.
            WorkerLost: A worker was lost, and the pool was rebuilt.
        """
        vector = self._open_vector()
        self._steps.begin(members, starts)
        answers = self._ask(list(members), [("reset", _reset_arguments(start)) for start in starts])
        observations = take_rows(vector.observations, list(members))
        self._steps.require_finite(members, observations)
        return observations, [info for _, info in answers]

    def step(self, members: Int64[np.ndarray, " n"], actions: Any) -> PoolStep:
        """Step the members concurrently.

        Raises:
            ConfigError: The pool is closed.
            ContractError: A member has no running episode, an observation does not fit its space, or an observation or a
                reward is not finite.
            WorkerLost: A worker was lost, and the pool was rebuilt.
        """
        vector = self._open_vector()
        self._steps.advance(members)
        places = members.tolist()
        answers = self._ask(places, [("step", actions[row]) for row in range(len(places))])
        if self._unproven:
            self._unproven.difference_update(places)
            self._rebuilds_in_a_row = self._rebuilds_in_a_row if self._unproven else 0
        _, rewards, terminated, truncated, infos = zip(*answers, strict=True)
        step = PoolStep(
            observations=take_rows(vector.observations, members),
            rewards=np.array(rewards, dtype=np.float64),
            terminated=np.array(terminated, dtype=bool),
            truncated=np.array(truncated, dtype=bool),
            infos=infos if self._infos else None,
        )
        self._steps.require_finite(places, step.observations, step.rewards)
        self._steps.end(members, step.terminated | step.truncated)
        return step

    def _ask(self, members: list[int], messages: list[tuple[str, Any]]) -> list[Any]:
        """Send one message to each member, and return the answers."""
        if self._waiting:
            # After Ctrl-C, for example, answers to the interrupted call may still be in the pipes.
            raise self._rebuild(dict.fromkeys(members, "had not answered when an earlier call was interrupted"), [])
        self._waiting = True
        pipes = self._open_vector().parent_pipes
        deadline = None if self._timeout is None else time.monotonic() + self._timeout
        lost: dict[int, str | ContractError] = {}
        for member, message in zip(members, messages, strict=True):
            try:
                pipes[member].send(message)
            except OSError:
                lost[member] = self._how_it_ended(member)
        answers, raised = [], []
        for member in members:
            if member in lost:
                continue
            try:
                if not pipes[member].poll(None if deadline is None else max(0.0, deadline - time.monotonic())):
                    lost[member] = f"gave no answer within {self._timeout:g} s"
                    continue
                answer, is_well = pipes[member].recv()
            except (EOFError, OSError):
                lost[member] = self._how_it_ended(member)
                continue
            if is_well:
                answers.append(answer)
            else:
                raised.append(member)
                lost[member] = "raised an exception that did not reach this process"
        traces: list[str] = []
        for _ in raised:
            lost.update(self._next_exception(traces))
        if lost:
            raise self._rebuild(lost, traces)
        self._waiting = False
        return answers

    def _how_it_ended(self, member: int) -> str:
        process = self._open_vector().processes[member]
        process.join(LAST_WORDS)  # the pipe closes a moment before the exit code is available
        return f"ended with exit code {process.exitcode}"

    def _next_exception(self, traces: list[str]) -> dict[int, str | ContractError]:
        """The next exception from the queue that all workers share, by member. Empty if it could not be pickled."""
        try:
            member, kind, value, trace = self._open_vector().error_queue.get(timeout=LAST_WORDS)
        except Empty:
            return {}
        traces.append(trace)
        if issubclass(kind, GRPOError):  # raised by the checks of `WorkerEnv`: a second try would fail as well
            return {member: self._steps.error(member, str(value))}
        return {member: f"raised {kind.__name__}: {value}"}

    def _rebuild(self, lost: dict[int, str | ContractError], traces: list[str]) -> ContractError | WorkerLost:
        """Replace all workers. Returns the exception to raise."""
        error = self._replace_workers(lost)
        for trace in traces:
            error.add_note(f"In the worker:\n{trace}")
        return error

    def _replace_workers(self, lost: dict[int, str | ContractError]) -> ContractError | WorkerLost:
        self._stop(grace=0.0)
        self._waiting = False
        self._steps.numbers[:] = TO_BE_RESET
        self._unproven |= set(lost)
        members = sorted(lost)
        reason = "; ".join(f"member {member}, which {lost[member]}" for member in members)
        if self._rebuilds_in_a_row >= self._max_rebuilds:
            return ContractError(
                f"{self._steps.name}: workers were lost {self._rebuilds_in_a_row + 1} times before every lost member had "
                f"completed another step. The last loss: {reason}. The pool is closed. Run the environment with "
                "vectorization='sync' to see its own errors."
            )
        self._rebuilds_in_a_row += 1
        self.num_rebuilds += 1
        self._build()
        faults = [fault for fault in lost.values() if isinstance(fault, ContractError)]
        return faults[0] if faults else WorkerLost(members, reason)

    def close(self) -> None:
        """Ask the workers to close their environments, and kill workers that take too long."""
        self._stop(grace=GRACE)

    def _stop(self, grace: float) -> None:
        # AsyncVectorEnv.close() alone would wait forever for a worker that hangs or ignores SIGTERM.
        vector, self._vector = self._vector, None
        if vector is None:
            return
        if grace:
            for pipe in vector.parent_pipes:
                with suppress(OSError):  # the worker has ended already
                    pipe.send(("close", None))
        deadline = time.monotonic() + grace
        for process in vector.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()  # no effect on a process that has ended
        vector.close(terminate=True)

    def _open_vector(self) -> AsyncVectorEnv:
        if self._vector is None:
            raise ConfigError("AsyncPool: the pool is closed. Create a new one with make_pool(...).")
        return self._vector


def _reset_arguments(start: EpisodeStart) -> dict[str, Any]:
    if start.snapshot is not None:
        return {"seed": None, "options": {SNAPSHOT: start.snapshot}}
    return {"seed": start.seed, "options": None if start.options is None else dict(start.options)}
