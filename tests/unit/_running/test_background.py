"""Tasks that a second thread does."""

import threading
import time

import pytest

from grpo._running.background import Background, Task


def test_a_task_has_a_result_an_error_and_a_time() -> None:
    task = Task(lambda: time.sleep(0.02) or 5)
    assert not task.done()
    task.run()
    assert (task.result(), task.done(), task.exception()) == (5, True, None)
    assert 0.02 <= task.seconds < 5.0
    failing = Task(lambda: 1 // 0)
    failing.run()
    assert failing.done()
    with pytest.raises(ZeroDivisionError):
        failing.result()
    assert Task.of("there").result() == "there"


def test_an_interrupt_of_this_thread_is_raised_at_once_and_the_task_is_not_done() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    task = Task(interrupted)
    with pytest.raises(KeyboardInterrupt):
        task.run()
    assert not task.done()


@pytest.mark.parametrize("in_order", [False, True])
def test_tasks_are_done_in_order_and_in_one_thread(in_order: bool) -> None:
    background = Background("test of tasks", in_order=in_order)
    seen = []
    tasks = [Task(lambda n=n: seen.append((n, threading.current_thread().name))) for n in range(3)]
    for task in tasks:
        background.submit(task)
        assert task.done() or not in_order
    background.wait()
    assert all(task.done() for task in tasks)
    name = threading.current_thread().name if in_order else "test of tasks"
    assert seen == [(n, name) for n in range(3)]
    background.close(drops=False, waits=True)
    assert "test of tasks" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("drops", [False, True])
def test_closing_ends_the_thread_after_the_current_task_or_after_all(drops: bool) -> None:
    background = Background("test of closing", in_order=False)
    begun, go = threading.Event(), threading.Event()

    def slow() -> int:
        begun.set()
        go.wait(5.0)
        return 1

    first, second = Task(slow), Task(lambda: 2)
    background.submit(first)
    background.submit(second)
    begun.wait(5.0)
    background.close(drops=drops, waits=False)
    assert not first.done()
    go.set()
    background.close(drops=drops, waits=True)
    assert first.result() == 1
    assert second.done() is not drops


def test_a_task_that_tries_to_exit_fails_and_the_next_is_done() -> None:
    background = Background("test of exits", in_order=False)

    def leave() -> None:
        raise SystemExit(3)

    first, second = Task(leave), Task(lambda: 2)
    background.submit(first)
    background.submit(second)
    with pytest.raises(SystemExit):
        first.result()
    assert second.result() == 2
    background.close(drops=False, waits=True)


def test_nothing_to_wait_for_and_nothing_to_close() -> None:
    background = Background("unused", in_order=False)
    background.wait()
    background.close(drops=True, waits=True)
