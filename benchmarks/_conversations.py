"""A catalogue of 37 functions of BFCL's conversations, and 427 requests from these conversations.

The functions are those of the simulated systems in which BFCL's files `multi_turn` take place: a file system, a car, a
broker, a travel agency, tickets, messages, posts and mathematics. `_bfcl` has other functions, with the same names in three
cases. A request is what the user says in one turn. A turn counts if its right calls are all of one function, not counting
changes of the folder (`cd`), which only prepare other calls. A turn may mean what earlier turns said ("and now sort it"),
which a router does not see.

The data come inside the package `bfcl-eval`, as in `_bfcl`.
"""

import ast
import functools
import math
import random
from collections import defaultdict

from adapters.tools import ToolCatalogue, ToolTask
from benchmarks._bfcl import read_folder, read_lines, tool_of

FILE = "BFCL_v4_multi_turn_base.json"
"""The conversations. BFCL's other files of conversations repeat their requests with changes."""

PREPARES = "cd"
"""The function whose calls do not count."""

MIN_REQUESTS = 6
"""Functions with fewer requests are left out."""

HELD_OUT = 1 / 3
"""Share of each function's requests that `split` holds out."""


@functools.cache
def _requests() -> dict[str, list[str]]:
    """Different requests by the function that is right for each, in order of appearance."""
    answers = {answer["id"]: answer["ground_truth"] for answer in read_lines(f"possible_answer/{FILE}")}
    texts: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for entry in read_lines(FILE):
        for messages, calls in zip(entry["question"], answers[entry["id"]], strict=True):
            text = "\n".join(message["content"] for message in messages if message["role"] == "user")
            called = {_function(call) for call in calls} - {PREPARES}
            if text and len(called) == 1:
                texts[called.pop()].setdefault(" ".join(text.split()).casefold(), text)
    return {name: list(own.values()) for name, own in texts.items() if len(own) >= MIN_REQUESTS}


def _function(call: str) -> str:
    """The function of a call that is written as code: "sort('a.txt')" -> "sort"."""
    expression = ast.parse(call, mode="eval").body
    assert isinstance(expression, ast.Call)
    return ast.unparse(expression.func).rpartition(".")[2]


@functools.cache
def catalogue() -> ToolCatalogue:
    """The functions with BFCL's descriptions and parameters, as tools that are never called."""
    described = {}
    for file in sorted(read_folder("multi_turn_func_doc")):
        for function in read_lines(file):
            described.setdefault(function["name"], function)
    return ToolCatalogue(tool_of(described[name]) for name in _requests())


def split(num_per_tool: int, seed: int) -> tuple[list[ToolTask], list[ToolTask]]:
    """At most `num_per_tool` training requests of each function, and a third of its requests, which are held out."""
    training, held_out = [], []
    for name, texts in _requests().items():
        generator = random.Random(f"{seed} {name}")
        order = generator.sample(texts, len(texts))
        num_held_out = math.floor(HELD_OUT * len(order) + generator.random())
        held_out += [ToolTask(text=text, tool=name) for text in order[:num_held_out]]
        training += [ToolTask(text=text, tool=name) for text in order[num_held_out:][:num_per_tool]]
    return training, held_out
