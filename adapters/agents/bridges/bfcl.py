"""Multi-turn tasks of the Berkeley Function Calling Leaderboard. Requires `pip install --no-deps bfcl-eval` and `mpmath`."""

import ast
import importlib
import json
from copy import deepcopy
from importlib.resources import files
from typing import Any, Literal

from adapters.agents.messages import Message, tool_message

from .packages import needed


def bfcl_tasks(category: Literal["base", "miss_param", "long_context"] = "base") -> list[dict[str, Any]]:
    """The 200 multi-turn tasks of a category, each with the calls that solve it. Use them as states."""
    needed("bfcl_eval", by="BFCL", install="--no-deps bfcl-eval mpmath")
    name = f"BFCL_v4_multi_turn_{category}.json"
    return [task | truth for task, truth in zip(_read(name), _read(f"possible_answer/{name}"), strict=True)]


class BFCL:
    """A task with several requests of a user, and tools that work on files, messages, tickets, trades, trips or a car.

    The policy may call tools as often as it likes. A message without a call is its answer to a request, and the next request
    follows. The reward at the end is 1 if the task is solved, and 0 otherwise. As in BFCL's own evaluation, a task is solved
    if, after each request, everything is as the right calls leave it, and the policy has called something and has seen all
    results of the right calls.

    Args:
        task: One of `bfcl_tasks()`.
    """

    def __init__(self, task: dict[str, Any]) -> None:
        from bfcl_eval.constants import executable_backend_config as backend

        self._task, self._num_answered, self._is_right = task, 0, True
        self._own, self._reference = _instances(task), _instances(task)
        documents = [backend.MULTI_TURN_FUNC_DOC_FILE_MAPPING[name] for name in self._own]
        known = [function for document in documents for function in _read(f"multi_turn_func_doc/{document}")]
        self._functions = [each for each in known if each["name"] not in task.get("excluded_function", [])]
        self._results: list[str] = []
        self._has_called = False

    def tools(self) -> list[dict[str, Any]]:
        """JSON schemas of the task's functions."""
        shown = ("name", "description", "parameters")
        return [
            {"type": "function", "function": {key: _schema(function[key]) for key in shown}}
            for function in self._functions
        ]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """The first request."""
        return self._task["question"][0], {}

    def step(self, action: Message) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """The results of the calls, or the next request."""
        if calls := action.get("tool_calls"):
            allowed = {function["name"] for function in self._functions}
            made = [(call["function"]["name"], (), call["function"]["arguments"]) for call in calls]
            results = [
                _result(self._own, *call) if call[0] in allowed else f"Error: no tool {call[0]}" for call in made
            ]
            self._results, self._has_called = self._results + results, True
            return [tool_message(*each) for each in zip(calls, results, strict=True)], 0.0, False, False, {}
        self._check(self._task["ground_truth"][self._num_answered])
        self._num_answered, self._has_called = self._num_answered + 1, False
        is_over = self._num_answered == len(self._task["question"])
        request = [] if is_over else self._task["question"][self._num_answered]
        return request, float(is_over and self._is_right), is_over, False, {"is_right": self._is_right}

    def _check(self, calls: list[str]) -> None:
        from bfcl_eval.eval_checker.multi_turn_eval import multi_turn_checker as checker

        expected = [_result(self._reference, *_parsed(call)) for call in calls]
        if calls:  # without calls, the request cannot be fulfilled yet, and BFCL does not look at the state
            same = checker.state_checker(self._own, self._reference)["valid"]
            seen = checker.response_checker(self._results, expected, self._num_answered)["valid"]
            self._is_right = self._is_right and self._has_called and same and seen


def _instances(task: dict[str, Any]) -> dict[str, Any]:
    from bfcl_eval.constants.executable_backend_config import CLASS_FILE_PATH_MAPPING

    made = {}
    for name in task["involved_classes"]:
        made[name] = getattr(importlib.import_module(CLASS_FILE_PATH_MAPPING[name]), name)()
        if hasattr(made[name], "_load_scenario"):
            config = deepcopy(task["initial_config"].get(name, {}))
            made[name]._load_scenario(config, long_context="long_context" in task["id"])
    return made


def _result(instances: dict[str, Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    owner = [instance for instance in instances.values() if hasattr(instance, name)][-1]
    try:
        result = getattr(owner, name)(*args, **kwargs)
    except Exception as error:  # the policy reads the error
        return f"Error during execution: {error}"
    return json.dumps(result, default=str) if isinstance(result, dict) else str(result)


def _parsed(call: str) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    parsed: Any = ast.parse(call, mode="eval").body
    named = {keyword.arg: ast.literal_eval(keyword.value) for keyword in parsed.keywords}
    return parsed.func.id, tuple(map(ast.literal_eval, parsed.args)), named


def _schema(value: Any, key: str = "") -> Any:
    """A copy in which types have the names of JSON schemas."""
    from bfcl_eval.constants.type_mappings import GORILLA_TO_OPENAPI

    if isinstance(value, dict):
        return {name: _schema(part, name) for name, part in value.items()}
    return GORILLA_TO_OPENAPI.get(value, value) if key == "type" else value


def _read(path: str) -> list[dict[str, Any]]:
    lines = files("bfcl_eval").joinpath("data", path).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
