"""What a call leaves in its worker harms no later call: threads, and data that nobody asked for."""

from collections.abc import Iterator
from typing import Any

import pytest

from adapters.tools import ExecutorOptions
from adapters.tools.errors import ToolTimeoutError, WorkerDiedError
from adapters.tools.execution.executor import ToolExecutor
from tests.support.tool_executors import CATALOGUE, LINUX, LONG, USERS, call, error_of, output_of

pytestmark = LINUX


@pytest.fixture(scope="module", params=USERS)
def executor(request: pytest.FixtureRequest) -> Iterator[ToolExecutor]:
    with ToolExecutor(CATALOGUE, num_workers=1, options=ExecutorOptions(timeout=LONG, limits=request.param)) as made:
        yield made


@pytest.mark.parametrize(
    "how", ["late_raw_thread", "late_process", "late_hook", "late_garbage", "late_error", "late_writer"]
)
def test_the_call_after_a_forged_answer_runs_on_another_worker(executor: ToolExecutor, how: str) -> None:
    for _ in range(2):
        before = output_of(executor, "who")["pid"]
        assert output_of(executor, "misbehave", how=how) == "left"
        results = executor.run([call("add", a=1), call("who")])
        assert all(result.ok for result in results), results
        assert results[0].output == 2
        assert how == "late_process" or results[1].output["pid"] != before


def test_the_call_after_a_part_of_a_forged_answer_runs_on_another_worker_at_its_timeout(executor: ToolExecutor) -> None:
    assert output_of(executor, "misbehave", how="late_part_of_a_frame") == "left"
    [result] = executor.run([call("short_nap", seconds=0.0)])
    assert result.output == "rested"
    assert output_of(executor, "add", a=1) == 2


@pytest.mark.parametrize("how", ["garbage", "fake_frame", "huge_frame", "flood", "close_socket"])
def test_a_call_that_sends_invalid_data_itself_fails_on_any_worker(executor: ToolExecutor, how: str) -> None:
    assert output_of(executor, "add", a=1) == 2
    for _ in range(2):  # on a worker with earlier calls, and on a new worker
        assert error_of(executor.run([call("misbehave", how=how)])[0]) is WorkerDiedError
    assert error_of(executor.run([call("hang", how="drip")])[0]) is ToolTimeoutError


def test_a_worker_with_a_thread_that_threading_does_not_know_is_replaced(executor: ToolExecutor) -> None:
    before = output_of(executor, "who")["pid"]
    assert output_of(executor, "misbehave", how="raw_thread_left") == "left"
    assert output_of(executor, "who")["pid"] != before


def test_a_worker_whose_threads_have_ended_is_kept(executor: ToolExecutor) -> None:
    before: Any = output_of(executor, "who")
    for _ in range(20):
        assert output_of(executor, "misbehave", how="joined_threads") == 2
    assert output_of(executor, "who")["pid"] == before["pid"]
