"""The gate for forks of a second thread, and calls that leave the generators of this process as they are."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import copy_context
from typing import Any

import numpy as np
import pytest
import torch

from grpo._common.global_state import capture_random_state
from grpo._rewarding.gate import ForkGate, Turns, fork_gate, keeps_generators
from grpo.errors import DeadlineError
from grpo.rewards import Call, call_in_process
from tests.support.objective_inputs import as_users_run_it
from tests.support.policies import digest


@pytest.fixture(autouse=True)
def no_type_checks() -> Iterator[None]:
    """beartype draws from Python's global generator."""
    with as_users_run_it():
        yield


class Passer:
    """A thread that passes a gate, and notes when."""

    def __init__(self, gate: ForkGate) -> None:
        self.passed = threading.Event()
        self._gate = gate
        self.thread = threading.Thread(target=self._pass)
        self.thread.start()

    def _pass(self) -> None:
        with self._gate.passed():
            self.passed.set()

    def has_passed(self, seconds: float = 5.0) -> bool:
        return self.passed.wait(seconds)


def test_an_open_gate_is_passed_at_once() -> None:
    gate = ForkGate()
    passer = Passer(gate)
    assert passer.has_passed()
    passer.thread.join()
    assert gate.num_forks == 1


def test_a_closed_gate_is_passed_by_its_thread_only_until_it_opens() -> None:
    gate = ForkGate()
    with gate.closed():
        with gate.passed():
            pass
        assert gate.num_forks == 1
        passer = Passer(gate)
        assert not passer.has_passed(0.05)
        with gate.opened():
            assert passer.has_passed()
        passer.thread.join()
        second = Passer(gate)
        assert not second.has_passed(0.05)  # `opened` has closed it again
    assert second.has_passed()
    second.thread.join()
    assert gate.num_forks == 3


def test_a_gate_inside_a_closed_gate_stays_closed_afterwards() -> None:
    gate = ForkGate()
    with gate.closed():
        with gate.closed():
            pass
        passer = Passer(gate)
        assert not passer.has_passed(0.05)
    passer.thread.join()


def test_threads_that_wait_are_let_pass_and_the_gate_is_closed_again() -> None:
    gate = ForkGate()
    with gate.closed():
        first, second = Passer(gate), Passer(gate)
        while gate._num_waiting < 2:
            time.sleep(0.001)
        gate.let_pass()
        assert first.passed.is_set()
        assert second.passed.is_set()
        third = Passer(gate)
        assert not third.has_passed(0.05)
    third.thread.join()


def test_nobody_is_let_pass_by_a_thread_that_has_not_closed_the_gate() -> None:
    gate = ForkGate()
    closed, done = threading.Event(), threading.Event()

    def close() -> None:
        with gate.closed():
            closed.set()
            done.wait(5.0)

    closer = threading.Thread(target=close)
    closer.start()
    closed.wait(5.0)
    passer = Passer(gate)
    gate.let_pass()
    with gate.opened():
        assert not passer.has_passed(0.05)
    gate.wait_for_fork(0.05)
    assert not passer.passed.is_set()
    done.set()
    assert passer.has_passed()
    closer.join()
    passer.thread.join()


def test_a_thread_waits_for_the_fork_of_another_and_not_longer_than_it_says() -> None:
    gate = ForkGate()
    with gate.closed():
        start = time.monotonic()
        gate.wait_for_fork(0.05)
        assert 0.04 < time.monotonic() - start < 2.0
        late = threading.Timer(0.05, lambda: Passer(gate))
        late.start()
        start = time.monotonic()
        gate.wait_for_fork(30.0)
        assert time.monotonic() - start < 10.0
        assert gate.num_forks == 1


def test_a_thread_that_waits_for_its_turn_lets_the_other_fork() -> None:
    turns, taken, events = Turns(), threading.Event(), []

    def second() -> None:
        with turns.taken():
            taken.set()
            time.sleep(0.02)
            with fork_gate.passed():
                events.append("fork")
            time.sleep(0.02)
            events.append("end")

    thread = threading.Thread(target=second)
    with fork_gate.closed():
        thread.start()
        taken.wait(5.0)
        with turns.taken():
            events.append("first")
    thread.join(5.0)
    assert events == ["fork", "end", "first"]


def test_a_turn_that_ends_with_an_error_is_over() -> None:
    turns = Turns()
    with pytest.raises(ValueError, match="x"), turns.taken():
        raise ValueError("x")
    with turns.taken():
        pass


def test_calls_of_a_second_thread_do_not_hang_while_this_thread_draws() -> None:
    """Without the gate, the process of each call has a copy of the generator's lock that nobody releases."""
    answers: list[Any] = []

    def ask() -> None:
        for _ in range(3):
            answers.extend(call_in_process([Call(name="one", function=lambda: 1)], timeout=20.0))

    thread = threading.Thread(target=ask)
    values = torch.empty(1_000_000)
    with fork_gate.closed():
        thread.start()
        while thread.is_alive():
            for _ in range(3):
                values.normal_()
            fork_gate.let_pass()
    assert answers == [1, 1, 1]


def draw() -> float:
    return random.random() + float(np.random.random()) + float(torch.rand(()))  # noqa: NPY002


def hang() -> None:
    time.sleep(60.0)


@pytest.mark.parametrize("keeps", [False, True])
def test_draws_in_another_process_come_back_unless_the_generators_are_kept(keeps: bool) -> None:
    before = digest(capture_random_state())

    def called(function: Callable[[], Any], timeout: float) -> bool:
        """Whether the generators are where they were."""
        keeps_generators.set(keeps)
        try:
            call_in_process([Call(name="call", function=function)], timeout=timeout)
        except DeadlineError:
            assert function is hang
        return digest(capture_random_state()) == before

    assert copy_context().run(called, draw, 20.0) is keeps
    before = digest(capture_random_state())
    assert copy_context().run(called, hang, 0.05) is keeps
