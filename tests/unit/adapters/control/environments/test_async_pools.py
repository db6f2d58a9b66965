"""Worker processes: they answer as environments in this process do, and a lost worker is named and replaced."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from adapters.control.environments.episodes import EpisodeStart
from adapters.control.environments.pools import AsyncPool, WorkerLost, make_pool
from adapters.control.environments.snapshots import take_snapshot
from grpo.errors import ConfigError, ContractError
from tests.support.control_environments import Command, Scripted
from tests.support.control_pools import starts_of

FINE = Command.FINE


@pytest.fixture(scope="module")
def shared_pool() -> Iterator[AsyncPool]:
    """Two workers for all tests of this module, because a process costs more than a test. Each test resets first."""
    pool = AsyncPool([Scripted] * 2, infos=True)
    yield pool
    pool.close()


@pytest.fixture
def pool(shared_pool: AsyncPool) -> Iterator[AsyncPool]:
    """The shared pool. Afterwards both members complete a step, which shows that they are well."""
    yield shared_pool
    shared_pool.reset([0, 1], starts_of(0, 1))
    assert shared_pool.step(np.array([0, 1]), np.array([FINE, FINE])).rewards.tolist() == [2.0, 2.0]


@pytest.fixture(autouse=True)
def no_worker_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Workers that a test starts are gone when it ends, other than the shared pool's."""
    shared_pool = request.getfixturevalue("shared_pool")
    before = {child.pid for child in multiprocessing.active_children()}
    yield
    now = {child.pid for child in multiprocessing.active_children()}
    assert now - before - {worker.pid for worker in workers_of(shared_pool)} == set()


def workers_of(pool: AsyncPool) -> list[Any]:
    assert pool._vector is not None
    return list(pool._vector.processes)


def kill_worker(pool: AsyncPool, member: int) -> None:
    worker = workers_of(pool)[member]
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()


WRONG_SHAPE = r"the observation must be float32 \[2\]; got float32"
FAULTS = [
    (Command.NAN, "the observation contains NaN or infinity", False),
    (Command.INFINITE_REWARD, "the reward must be finite, also as float32; got -inf", False),
    (Command.WRONG_SHAPE, rf"{WRONG_SHAPE} \[2, 1\]", True),
    (Command.WRONG_DTYPE, r"the observation must be float32 \[2\]; got complex64 \[2\]", True),
    (Command.NO_REWARD, "the reward must be a number; got 'much'", True),
]
"""What is said, and whether the worker is replaced."""
FAULTS_OF_A_RESET = [
    (np.array([0, np.inf], dtype=np.float32), "the observation contains NaN", False),
    (np.float32(1.0), rf"{WRONG_SHAPE} \[\]", True),
]


@pytest.mark.parametrize("kind", ["serial", "async"])
def test_faulty_values_are_named_and_the_pool_remains_usable(
    kind: str, pool: AsyncPool, subtests: pytest.Subtests
) -> None:
    """Shared memory would accept an observation of a wrong shape, so the worker checks it."""
    tested: Any = pool if kind == "async" else make_pool(Scripted, 2)
    for command, fault, is_replaced in FAULTS:
        with subtests.test(command=command):
            tested.reset([0, 1], starts_of(0, 1))
            tested.step(np.array([0, 1]), np.array([FINE, Command.NARROWED]))
            rebuilds = pool.num_rebuilds
            with pytest.raises(ContractError, match=f"Scripted, member 1, step 2, seed 1: {fault}"):
                tested.step(np.array([0, 1]), np.array([FINE, command]))
            assert pool.num_rebuilds - rebuilds == (is_replaced and kind == "async")
    for observation, fault, is_replaced in FAULTS_OF_A_RESET:
        with subtests.test(observation=observation):
            tested.reset([0, 1], starts_of(0, 1))
            rebuilds = pool.num_rebuilds
            with pytest.raises(ContractError, match=f"Scripted, member 1, step 0, seed 7: {fault}"):
                tested.reset([1], [EpisodeStart(seed=7, options={"observation": observation})])
            assert pool.num_rebuilds - rebuilds == (is_replaced and kind == "async")


def test_a_snapshot_of_another_environment_is_not_a_lost_worker(pool: AsyncPool) -> None:
    trunk = gymnasium.make("Acrobot-v1")
    snapshot = take_snapshot(trunk, trunk.reset(seed=0)[0])
    with pytest.raises(
        ContractError, match=r"Scripted, member 1, step 0, from a snapshot: restore_snapshot: .*Acrobot-v1"
    ):
        pool.reset([1], [EpisodeStart(snapshot=snapshot)])


def test_lost_workers_are_named_in_order_and_the_pool_continues(
    pool: AsyncPool, subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised, ended = "which raised ArithmeticError: out of paper", "which ended with exit code 7"
    for commands, lost_members, reason in (
        ({0: FINE, 1: Command.RAISE}, [1], f"member 1, {raised}"),
        ({0: FINE, 1: Command.EXIT}, [1], f"member 1, {ended}"),
        ({1: Command.EXIT, 0: Command.RAISE}, [0, 1], f"member 0, {raised}; member 1, {ended}"),
        ({1: Command.HANG}, [1], "member 1, which gave no answer within 0.2 s"),
    ):
        with subtests.test(reason):
            rebuilds = pool.num_rebuilds
            pool.reset([0, 1], starts_of(0, 1))
            pool.step(np.array([0, 1]), np.array([FINE, FINE]))
            with monkeypatch.context() as patch:
                if len(commands) == 1:  # only the member that hangs is asked, whose answer cannot come in time
                    patch.setattr(pool, "_timeout", 0.2)
                with pytest.raises(WorkerLost, match=f"Lost the worker of {reason}") as lost:
                    pool.step(np.array([*commands]), np.array([*commands.values()]))
            assert lost.value.members == lost_members
            assert ("In the worker" in str(getattr(lost.value, "__notes__", ""))) == (raised in reason)
            assert pool.num_rebuilds == rebuilds + 1
            with pytest.raises(ContractError, match=r"members \[0, 1\] have none"):
                pool.step(np.array([0, 1]), np.array([FINE, FINE]))
            observations, _ = pool.reset([1, 0], starts_of(2, 0))
            np.testing.assert_array_equal(observations[0], Scripted().reset(seed=2)[0])
            assert pool.step(np.array([1]), np.array([FINE])).rewards.tolist() == [2.0]


def test_a_killed_worker_is_found_at_its_next_call(pool: AsyncPool) -> None:
    pool.reset([0, 1], starts_of(0, 1))
    kill_worker(pool, 1)
    assert pool.step(np.array([0]), np.array([FINE])).rewards.tolist() == [2.0]  # member 1 is not asked
    with pytest.raises(WorkerLost, match="member 1, which ended with exit code -9") as lost:
        pool.reset([0, 1], starts_of(0, 1))
    assert lost.value.members == [1]


def test_answers_to_an_interrupted_call_are_not_used_for_the_next_call(pool: AsyncPool) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    pool.reset([0, 1], starts_of(0, 1))
    earlier = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            pool.step(np.array([0, 1]), np.array([Command.INTERRUPT, FINE]))
    finally:
        signal.signal(signal.SIGUSR1, earlier)
    with pytest.raises(WorkerLost, match="member 0, which had not answered when an earlier call was interrupted"):
        pool.step(np.array([0]), np.array([FINE]))
    assert pool.reset([0], starts_of(0))[0][0, 1] == 0.0


class NeverCloses(Scripted):
    """Hangs for ever when its worker closes it."""

    def close(self) -> None:
        while multiprocessing.parent_process() is not None:
            time.sleep(60)


def test_closing_lets_each_worker_close_its_environment(tmp_path: Path) -> None:
    class Noted(Scripted):
        def close(self) -> None:
            if multiprocessing.parent_process() is not None:
                (tmp_path / str(os.getpid())).touch()

    AsyncPool([Noted] * 2).close()
    assert len([*tmp_path.iterdir()]) == 2


def test_closing_does_not_wait_for_dead_or_hanging_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """AsyncVectorEnv.close() raises for a dead worker, and waits forever for a hanging one."""
    monkeypatch.setattr("adapters.control.environments.async_pools.GRACE", 0.1)
    pool = AsyncPool([Scripted, NeverCloses])
    pool.reset([0, 1], starts_of(0, 1))
    kill_worker(pool, 0)
    pool.close()
    pool.close()
    with pytest.raises(ConfigError, match="AsyncPool: the pool is closed"):
        pool.step(np.array([1]), np.array([FINE]))
    with pytest.raises(ConfigError, match="AsyncPool: the pool is closed"):
        pool.reset([0], starts_of(0))


def test_the_number_of_rebuilds_in_a_row_is_limited() -> None:
    pool = AsyncPool([Scripted] * 2, max_rebuilds=2)

    def lose(member: int) -> None:
        pool.step(np.array([member]), np.array([Command.EXIT]))

    def reset_and_step(member: int) -> None:
        pool.reset([0, 1], starts_of(0, 1))
        pool.step(np.array([member]), np.array([FINE]))

    try:
        reset_and_step(1)
        with pytest.raises(WorkerLost):
            lose(1)
        reset_and_step(1)  # every lost member has completed a step, so the next loss is the first in a row
        with pytest.raises(WorkerLost):
            lose(1)
        pool.reset([0, 1], starts_of(0, 1))
        with pytest.raises(WorkerLost):
            lose(0)
        reset_and_step(0)  # member 1 has not completed a step since it was lost
        with pytest.raises(ContractError, match=r"Scripted: workers were lost 3 times before .* another step.*'sync'"):
            lose(0)
        assert pool.num_rebuilds == 3
        with pytest.raises(ConfigError, match="closed"):
            pool.reset([0], starts_of(0))
    finally:
        pool.close()


def end_in_worker(parent: int) -> gymnasium.Env:
    """Ends the worker. Gymnasium also creates an environment in the parent, which must survive."""
    if os.getpid() != parent:
        os._exit(1)
    return Scripted()


def test_a_worker_that_ends_while_it_creates_its_environment_is_named() -> None:
    with pytest.raises(ContractError, match="a worker process ended while it created its environment"):
        AsyncPool([partial(end_in_worker, os.getpid())])
