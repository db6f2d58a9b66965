"""What functions receive in a worker and in this process: what their annotations say."""

from collections.abc import Iterator
from typing import Any

import pytest

from adapters.tools import ExecutorOptions
from adapters.tools.catalogue.tools import Tool, ToolCatalogue
from adapters.tools.errors import InvalidArgumentsError, PathOutsideRootError
from adapters.tools.execution.executor import ToolExecutor
from tests.support import typed_tools
from tests.support.tool_executors import LINUX, LONG, call, error_of, output_of

pytestmark = LINUX

RED = "<Colour.RED: 'red'>"
RIGHT: dict[str, Any] = {
    "colour": "red", "day": "2024-02-29", "room": {"colour": "blue", "plan": "plan.txt"}, "doors": ["red"], "coats": 3.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def executor() -> Iterator[ToolExecutor]:
    remote = Tool.from_function(typed_tools.paint_remotely, remote=True)
    with ToolExecutor(
        ToolCatalogue([Tool.from_function(typed_tools.paint), remote]),
        num_workers=1,
        options=ExecutorOptions(timeout=LONG),
    ) as made:
        (made.root / "plan.txt").write_text("four walls")
        yield made


def test_a_worker_gives_a_function_members_dates_and_paths(executor: ToolExecutor) -> None:
    day, room = "datetime.date(2024, 2, 29)", "<Colour.BLUE: 'blue'>, 'four walls'"
    assert output_of(executor, "paint", **RIGHT) == f"({RED}, {day}, {room}, [{RED}], 3)"
    assert output_of(executor, "paint", **RIGHT | {"doors": 4, "coats": 1}) == f"({RED}, {day}, {room}, 4, 1)"


def test_a_remote_function_receives_what_its_annotations_say(executor: ToolExecutor) -> None:
    found = output_of(executor, "paint_remotely", colour="red", day="2024-02-29")
    assert found == f"({RED}, datetime.date(2024, 2, 29))"


def test_values_that_do_not_fit_an_annotation_are_refused(executor: ToolExecutor, subtests: pytest.Subtests) -> None:
    for wrong, kind, message in (
        ({"colour": "green"}, InvalidArgumentsError, r"paint: at \$.colour: 'green' is not one of ['red', 'blue']."),
        ({"day": "2023-02-29"}, InvalidArgumentsError, "paint: at $.day: Input should be a valid date"),
        ({"room": {"colour": "blue"}}, InvalidArgumentsError, "'plan' is a required property"),
        ({"room": {"colour": "blue", "plan": "../x"}}, PathOutsideRootError, "must lie in the tools' folder"),
        ({"doors": "red"}, InvalidArgumentsError, "is not valid under any of the given schemas"),
        ({"doors": ["green"]}, InvalidArgumentsError, "at $.doors"), ({"coats": 0}, InvalidArgumentsError, "minimum of 1"),
    ):  # fmt: skip
        with subtests.test(wrong=str(wrong)):
            [result] = executor.run([call("paint", **RIGHT | wrong)])
            assert error_of(result) is kind
            assert message.replace("\\", "") in str(result.error)
    [late] = executor.run([call("paint_remotely", colour="red", day="tomorrow")])
    assert error_of(late) is InvalidArgumentsError
    assert "paint_remotely: at $.day: Input should be a valid date" in str(late.error)
