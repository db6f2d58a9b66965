"""Constructors answer every wrong input with an error of this package that names the argument."""

from typing import Any

import pytest

from adapters.tools import (
    Command,
    ExecutorOptions,
    HashingEncoder,
    MCPServer,
    Tool,
    ToolCatalogue,
    ToolExecutor,
    ToolRewards,
    ToolSelectionPolicy,
    ToolTask,
    WorkerLimits,
    executed,
    latency_cost,
)
from grpo.errors import GRPOError


async def rest() -> None:
    """Do nothing."""


CATALOGUE = ToolCatalogue([Tool.from_function(rest, remote=True)])
TASK = {"text": "", "tool": "t", "arguments": {}, "slots": {}, "labels": {}, "other_calls": []}
RIGHT: dict[Any, dict[str, Any]] = {
    Tool: {"name": "t", "description": "d", "function": rest, "category": "c", "parameters": {"type": "object"},
           "remote": True, "timeout": 1.0, "cost": 0.0},
    ToolCatalogue: {"tools": list(CATALOGUE.values())},
    ToolExecutor: {"catalogue": CATALOGUE, "num_workers": 1, "allow": ["rest"], "options": None},
    ExecutorOptions: {"timeout": 1.0, "max_output_bytes": 9, "max_concurrency": 1, "root": None, "fresh_folder": False,
                      "confinement": "auto", "readable": (), "log_path": None, "redact": ("a",), "limits": WorkerLimits()},
    ToolSelectionPolicy: {"catalogue": CATALOGUE, "num_features": 2, "hidden": (2,), "encoder": HashingEncoder(8),
                          "describe": str, "fill": lambda state, tool: {}, "available": lambda state: None},
    HashingEncoder: {"num_features": 8},
    ToolTask: TASK,
    Command: {"argv": ("wc",), "max_output_bytes": 5},
    MCPServer: {"command": ["a"], "env": {}, "cwd": ".", "start_timeout": 1.0},
    latency_cost: {"per_second": 1.0},
}  # fmt: skip
ALSO_RIGHT: list[tuple[str, Any]] = [
    ("name", "abc"), ("description", "abc"), ("category", "abc"), ("text", "abc"), ("tool", "abc"), ("arguments", {}),
    ("slots", {}), ("labels", {}), ("env", {}), ("cwd", "abc"), ("cost", -1), ("allow", {}), ("root", "abc"),
    ("log_path", "abc"),
]  # fmt: skip
"""Arguments that are right for some class, though they are wrong for others."""


def test_wrong_arguments_are_refused_by_name(subtests: pytest.Subtests) -> None:
    for make, right in RIGHT.items():
        made = make(**right)
        if isinstance(made, ToolExecutor):
            made.close()
        for name in right:
            for wrong in ("abc", {}, [None], float("nan"), object(), b"x", -1):
                if isinstance(wrong, str | dict | int) and (name, wrong) in ALSO_RIGHT:
                    continue
                with subtests.test(make=make.__name__, name=name, wrong=repr(wrong)):
                    with pytest.raises(GRPOError) as raised:
                        make(**right | {name: wrong})
                    assert name.split("_")[0] in str(raised.value)


def test_rewards_refuse_what_is_no_executor_and_no_function(subtests: pytest.Subtests) -> None:
    for executor, functions in ((5, {"e": executed}), (CATALOGUE, {"e": executed}), (None, {}), ("abc", None)):
        with subtests.test(repr(executor)), pytest.raises(GRPOError, match="ToolRewards"):
            ToolRewards(executor, functions)  # type: ignore[arg-type]
