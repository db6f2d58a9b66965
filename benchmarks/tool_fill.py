"""Measure what `fill_from_request` reads from requests, apart from the choice of the tool.

The requests are BFCL's. The right tool is given, and so are the right values of the parameters that a policy decides
(enumerated values and booleans). `fill_from_request` was written and tuned with the training requests only.

    python -m benchmarks.tool_fill                            # the validation requests, a few seconds
    python -m benchmarks.tool_fill --parts train held_out
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from adapters.tools import Tool, ToolCall
from adapters.tools.text.fill import fill_from_request, find_values
from benchmarks._bfcl import Question, allows, is_right, questions, split, standard_text

PARTS = ("train", "validation", "held_out")

Fill = Callable[[str, Tool], Mapping[str, Any]]


def outcomes(question: Question, filled: Mapping[str, Any]) -> dict[str, bool]:
    """Whether each free parameter is right: it has an allowed value, or it is left out where that is allowed."""
    required = question.offered.parameters["required"]
    return {
        name: allows(question, name, filled[name])
        if name in filled
        else name not in required and "" in question.allowed.get(name, [""])
        for name in question.offered.free_parameters
    }


def right_call(question: Question, filled: Mapping[str, Any]) -> bool:
    """Whether the call is right in all, with the filled values and the right values of the other parameters."""
    free = question.offered.free_parameters
    decided = {name: value for name, value in question.arguments.items() if name not in free}
    return is_right(question, ToolCall(tool=question.tool, arguments={**decided, **filled}))


def stands_in(value: Any, text: str, numbers: Sequence[float]) -> bool:
    """Whether a request has a value, so that it can be read. A number may be written in words."""
    if isinstance(value, list | dict):
        return all(stands_in(one, text, numbers) for one in (value.values() if isinstance(value, dict) else value))
    return standard_text(value) in standard_text(text) if isinstance(value, str) else value in numbers


def request_row(part: str, asked: Sequence[Question], fill: Fill) -> str:
    """A row of shares of requests."""
    seconds, all_required, readable, right, ceiling = [], [], [], [], []
    for question in asked:
        started = time.perf_counter()
        filled = fill(question.text, question.offered)
        seconds.append(time.perf_counter() - started)
        found = outcomes(question, filled)
        required = [
            name for name in question.offered.parameters["required"] if name in found and name in question.allowed
        ]
        if required:
            numbers = [float(one.value) for one in find_values(question.text) if one.kind == "number"]
            allowed = [[value for value in question.allowed[name] if value != ""] for name in required]
            all_required.append(all(found[name] for name in required))
            readable.append(all(any(stands_in(one, question.text, numbers) for one in values) for values in allowed))
        right.append(right_call(question, filled))
        ceiling.append(is_right(question, ToolCall(tool=question.tool, arguments=question.arguments)))
    read = [found for found, can_be_read in zip(all_required, readable, strict=True) if can_be_read]
    shares = " | ".join(f"{statistics.fmean(column):.3f}" for column in (readable, all_required, read, right, ceiling))
    return f"| {part} | {len(asked)} | {len(all_required)} | {shares} | {1000 * statistics.median(seconds):.2f} |"


REQUESTS = """\
| part | requests | with required free parameters | all of their values stand in the request | all right | all right where \
all stand in the request | right in all | right in all, right values given | median ms |
|---|---|---|---|---|---|---|---|---|"""


def type_table(asked: Sequence[Question], fill: Fill) -> str:
    """Shares of parameters by type. A parameter that may be left out counts apart."""
    counts: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for question in asked:
        required = question.offered.parameters["required"]
        for name, outcome in outcomes(question, fill(question.text, question.offered)).items():
            may_be_left_out = name not in required and "" in question.allowed.get(name, [""])
            column = "required" if name in required else "may be left out" if may_be_left_out else "asked for"
            counts[_kind(question.offered.properties[name])][column].append(outcome)
    columns = ("required", "asked for", "may be left out")
    rows = [
        f"| {kind} | " + " | ".join(_share(counts[kind][column]) for column in columns) + " |"
        for kind in sorted(counts)
    ]
    heading = (
        "| type | required: right (parameters) | optional, asked for | optional, may be left out |\n|---|---|---|---|"
    )
    return "\n".join([heading, *rows])


def _kind(schema: Mapping[str, Any]) -> str:
    kind = str(schema.get("type", "any"))
    return f"array of {schema['items'].get('type', 'any')}" if kind == "array" else kind


def _share(outcomes: Sequence[bool]) -> str:
    return f"{statistics.fmean(outcomes):.3f} ({len(outcomes)})" if outcomes else "-"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["validation"])
    parts = parser.parse_args().parts
    asked = dict(zip(PARTS, split(questions()), strict=True))
    print(REQUESTS, *(request_row(part, asked[part], fill_from_request) for part in parts), sep="\n")
    for part in parts:
        print(f"\n{part}:\n\n{type_table(asked[part], fill_from_request)}")


if __name__ == "__main__":
    main()
