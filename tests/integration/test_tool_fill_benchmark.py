"""The benchmark of `fill_from_request` counts what it says, and its figures are those of the results page."""

import re
from pathlib import Path
from typing import Any

from adapters.tools import Tool
from adapters.tools.text.fill import fill_from_request
from benchmarks import tool_fill
from benchmarks._bfcl import Question, questions, split

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks/results/tools_bfcl.md"

TEXT, INTEGER = {"type": "string"}, {"type": "integer"}


def question(text: str, allowed: dict[str, list[Any]], required: list[str]) -> Question:
    properties = {"who": TEXT, "n": INTEGER, "loud": {"type": "boolean"}, "tags": {"type": "array", "items": TEXT}}
    parameters = {"type": "object", "properties": properties, "required": required}
    tool = Tool(name="f", description="f", function=print, parameters=parameters)
    return Question(text=text, offered=tool, allowed=allowed, menu=("f",))


ASKED = [
    question("Ann, 2", {"who": ["Ann"], "n": ["", 2], "loud": [True]}, ["who", "loud"]),
    question("nobody", {"who": ["Bob"], "tags": [["a", "nobody"]]}, ["who", "tags"]),
    question("two", {"n": [2, 3]}, ["n"]),
    question("none", {"loud": ["", False]}, []),
]


def fill(text: str, tool: Tool) -> dict[str, Any]:
    """Right for the first request, wrong for the second, a wrong optional value for the third."""
    return {
        "Ann, 2": {"who": "ann"},
        "nobody": {"who": "nobody", "tags": ["a", "nobody"]},
        "two": {"n": 2, "who": "x"},
    }.get(text, {})


def test_requests_are_right_where_all_required_values_are() -> None:
    """Three requests have required free parameters. Of these, "Ann" and "two" stand in the request and are right; the third is
    wrong. Right in all are the first, where the answer gives `loud`, and the last, where nothing has to be given."""
    row = tool_fill.request_row("some", ASKED, fill)
    assert re.fullmatch(r"\| some \| 4 \| 3 \| 0\.667 \| 0\.667 \| 1\.000 \| 0\.500 \| 1\.000 \| \d+\.\d\d \|", row)


def test_parameters_are_counted_by_type_and_by_need() -> None:
    """`who` is right in one of two requests that require it. The filled `who` of the third request is allowed nowhere."""
    assert tool_fill.type_table(ASKED, fill).splitlines()[2:] == [
        "| array of string | 1.000 (1) | - | 1.000 (3) |",
        "| integer | 1.000 (1) | - | 1.000 (3) |",
        "| string | 0.500 (2) | - | 0.500 (2) |",
    ]
    asked_for = [question("a", {"n": [1]}, [])]
    assert "| integer | - | 0.000 (1) | - |" in tool_fill.type_table(asked_for, fill)


def test_the_results_page_has_the_shares_of_the_validation_requests() -> None:
    row = tool_fill.request_row("validation", split(questions())[1], fill_from_request)
    shares = row.rpartition(" | ")[0]  # the last column is a time
    assert shares in RESULTS.read_text(encoding="utf-8"), f"python -m benchmarks.tool_fill gives {row}"
