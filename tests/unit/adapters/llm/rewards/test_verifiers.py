"""Verifiers on texts and lengths with known rewards."""

import doctest
import random
import socket
import sys
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from adapters.llm import MathMatch, correctness_first, hybrid_reward
from adapters.llm.completions import Completion
from adapters.llm.rewards import completion_rewards, gsm8k, gsm8k_rewards, json_schema, verifiers
from adapters.llm.rewards.columns import accepted_answers
from adapters.llm.rewards.completion_rewards import CompletionRewards
from adapters.llm.rewards.json_schema import JSONSchemaMatch
from adapters.llm.rewards.verifiers import Between, ExactMatch, OverlongPunishment, PerToken, RegexMatch, tags_pattern
from grpo.errors import ConfigError, RewardError


def of_length(length: int) -> Completion:
    return Completion(token_ids=(5,) * length, text="x" * length, finish_reason="length")


def test_the_examples_in_the_docstrings_of_all_rewards_hold(subtests: pytest.Subtests) -> None:
    examples = {completion_rewards: 5, gsm8k: 4, gsm8k_rewards: 3, json_schema: 1, verifiers: 7}
    for module, count in examples.items():
        with subtests.test(module=module.__name__):
            assert doctest.testmod(module) == (0, count)


EXACT_MATCHES = [
    ({}, "Oslo", "Oslo", 1.0), ({}, " Oslo\n", "Oslo", 1.0), ({}, "New \n York", "New York", 1.0),
    ({}, "NewYork", "New York", 0.0), ({}, "oslo", "Oslo", 0.0), ({}, "", "Oslo", 0.0), ({}, "72", 72, 1.0),
    ({}, "Oslo", None, None), ({"ignore_case": True}, "OSLO", "oslo", 1.0),
    ({"ignore_case": True}, "STRASSE", "straße", 1.0), ({"ignore_spacing": False}, "Oslo ", "Oslo", 0.0),
    ({"ignore_spacing": False}, "Oslo", "Oslo", 1.0),
    ({"extract": Between(start="<a>", end="</a>")}, "<a>Rome</a>, or <a> Oslo </a>.", "Oslo", 1.0),
    ({"extract": Between(start="<a>", end="</a>")}, "Oslo", "Oslo", 0.0),
]  # fmt: skip


@pytest.mark.parametrize(("options", "text", "answer", "expected"), EXACT_MATCHES)
def test_exact_match_compares_the_text_with_the_column(options: Any, text: Any, answer: Any, expected: Any) -> None:
    assert ExactMatch(**options)(text, {"answer": answer}) == expected
    assert ExactMatch(column="truth", **options)(text, {"answer": "?", "truth": answer}) == expected


@pytest.mark.parametrize("text", ["", "<a>", "<a>1", "1</a>", "</a>1<a>"])
def test_between_gives_none_without_both_marks(text: Any) -> None:
    assert Between(start="<a>", end="</a>")(text) is None


REGEX_MATCHES = [
    ({"pattern": r"\d+"}, "a 1", 1.0), ({"pattern": r"\d+"}, "a", 0.0),
    ({"pattern": r"\d+", "how": "full"}, "a 1", 0.0), ({"pattern": r"\d+", "how": "full"}, "12", 1.0),
    ({"pattern": r"(?i)YES"}, "yes", 1.0), ({"pattern": r"= (\d+)", "column": "answer"}, "= 3, no: = 4 ", 1.0),
    ({"pattern": r"= (\d+)", "column": "answer"}, "= 4, no: = 3", 0.0),
    ({"pattern": r"= (\d+)", "column": "answer"}, "4", 0.0),
    ({"pattern": r"= (\d+)?", "column": "answer"}, "= ", 0.0),  # the group did not match
    ({"pattern": r"= (?P<n>\s*\d+)", "column": "answer", "group": "n"}, "=  4", 1.0),
    ({"pattern": r"\d+", "column": "answer", "group": 0}, "4", 1.0),
    ({"pattern": r"= (\d+)", "column": "nothing"}, "= 4", None),
    ({"pattern": "^a", "max_chars": 3}, "abcd", 0.0),  # only "bcd" is searched
    ({"pattern": "^b", "max_chars": 3}, "abcd", 1.0), ({"pattern": ".*", "how": "full", "max_chars": 3}, "abcd", 0.0),
    ({"pattern": ".*", "how": "full", "max_chars": 4}, "abcd", 1.0),
]  # fmt: skip


@pytest.mark.parametrize(("options", "text", "expected"), REGEX_MATCHES)
def test_regex_match_searches_or_matches_the_whole_text(options: Any, text: Any, expected: Any) -> None:
    assert RegexMatch(**options)(text, {"answer": 4, "nothing": None}) == expected


TAGGED = [
    ("<think>a</think><answer>4</answer>", 1.0), ("\n<think>\na\n</think>\n\n<answer>\n4\n</answer>\n", 1.0),
    ("<think></think><answer>4</answer>", 1.0), ("<think>a < b</think><answer>4</answer>", 1.0),
    ("<think>a</think><answer>5</answer>", 0.0), ("<answer>4</answer><think>a</think>", 0.0),
    ("<think>a</think>4", 0.0), ("so: <think>a</think><answer>4</answer>", 0.0),
    ("<think>a</think><answer>4</answer>.", 0.0), ("<think>a</think><answer>5</answer><answer>4</answer>", 0.0),
    ("<think><answer>5</answer></think><answer>4</answer>", 0.0),
]  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), TAGGED)
def test_tags_pattern_matches_each_tag_once_and_in_order(text: Any, expected: Any) -> None:
    verifier = RegexMatch(pattern=tags_pattern("think", "answer"), how="full", column="answer", group="answer")
    assert verifier(text, {"answer": "4"}) == expected


def test_tags_pattern_reads_long_texts() -> None:
    """In quadratic time, 400,000 characters take longer than a test may take."""
    length = 400_000
    verifier = RegexMatch(pattern=tags_pattern("think", "answer"), how="full", max_chars=2 * length)
    texts = ["<think>" * (length // 7), "<think>" + " " * length, "<think>a</think>" + "\n" * length, "<" * length]
    assert [verifier(text) for text in texts] == [0.0] * 4


@pytest.mark.parametrize("tags", [(), ("a", "a"), ("a b",), ("a>",)])
def test_tags_pattern_refuses_wrong_tags(tags: Any) -> None:
    with pytest.raises(ConfigError, match="tags_pattern needs different tags"):
        tags_pattern(*tags)


WRONG_SETTINGS = [
    (lambda: RegexMatch(pattern="("), r"RegexMatch.pattern must be a regular expression; '\(' is not: missing \)"),
    (lambda: RegexMatch(pattern="a", column="answer"), "RegexMatch.group must be a group of the pattern 'a'; got 1. Add"),
    (lambda: RegexMatch(pattern="(a)", column="answer", group="b"), "RegexMatch.group must be a group of .*; got 'b'"),
    (lambda: RegexMatch(pattern="a", how="match"), "RegexMatch.how must be one of 'search', 'full'"),
    (lambda: OverlongPunishment(max_tokens=4, cache_tokens=5), "cache_tokens must be at most max_tokens=4; got 5"),
    (lambda: OverlongPunishment(max_tokens=0, cache_tokens=0), "max_tokens must be >= 1"),
    (lambda: ExactMatch(extract="<a>"), "ExactMatch.extract must be Callable or None; got '<a>'"),
    (lambda: JSONSchemaMatch(None), r"needs a JSON schema as a mapping, .* got NoneType"),
    (lambda: JSONSchemaMatch({}, extract="a"), r"extract a function or None"),
    (lambda: JSONSchemaMatch({"type": "point"}), r"JSONSchemaMatch needs a JSON schema; at \$.type: 'point' is not valid"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), WRONG_SETTINGS)
def test_wrong_settings_are_refused(make: Any, message: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_missing_column_is_named() -> None:
    with pytest.raises(RewardError, match="ExactMatch needs the column 'answer'; the row has 'prompt', 'truth'"):
        ExactMatch()("text", {"prompt": "p", "truth": "t"})
    message = r"RegexMatch needs rows \(dicts\) with a column 'answer'; got str 'p' as a prompt"
    with pytest.raises(RewardError, match=message):
        RegexMatch(pattern="(a)", column="answer")("text", "p")


LENGTHS = [
    # L_max 20, cache 4: nothing up to 16, then 1/4 per token
    (4, 0, 0.0), (4, 16, 0.0), (4, 17, -0.25), (4, 18, -0.5), (4, 19, -0.75), (4, 20, -1.0), (4, 21, -1.0), (4, 90, -1.0),
    (0, 19, 0.0), (0, 20, 0.0), (0, 21, -1.0),  # without a cache, it is a step
]  # fmt: skip


@pytest.mark.parametrize(("cache", "length", "expected"), LENGTHS)
def test_overlong_punishment_falls_from_0_to_minus_1_within_the_cache(cache: Any, length: Any, expected: Any) -> None:
    assert OverlongPunishment(max_tokens=20, cache_tokens=cache)(of_length(length)) == expected


def test_per_token_counts_tokens_up_to_the_maximum() -> None:
    assert PerToken(amount=-0.5)(of_length(3)) == -1.5
    assert [PerToken(amount=0.25, max_tokens=4)(of_length(length)) for length in (0, 3, 4, 9)] == [0.0, 0.75, 1.0, 1.0]


POINT = {
    "type": "object", "properties": {"x": {"type": "number", "multipleOf": 0.5}, "next": {"$ref": "#"}},
    "required": ["x"], "additionalProperties": False,
}  # fmt: skip
JSON_TEXTS = [
    ('{"x": 1.5}', 1.0), (' {"x": 1, "next": {"x": 2}}\n', 1.0), ('{"x": 1, "next": {}}', 0.0), ('{"x": 1.3}', 0.0),
    ('{"x": "1"}', 0.0), ('{"x": 1, "y": 2}', 0.0), ("[]", 0.0), ('{"x": 1} and so on', 0.0), ("", 0.0),
    ('{"x": NaN}', 0.0), ('{"x": -Infinity}', 0.0), ('{"x": 1e999}', 0.0),
    ('{"x": ' + "9" * 400 + "}", 0.0),  # multipleOf would divide it by a float
    ('{"x": ' + "9" * 5000 + "}", 0.0), ("[" * 200_000, 0.0),
    ('{"x": 1, "next": ' * 2000 + '{"x": 1}' + "}" * 2000, 0.0), (" " * 1_000_001 + '{"x": 1}', 0.0),
]  # fmt: skip


def test_json_schema_match_accepts_valid_json_only(subtests: pytest.Subtests) -> None:
    for text, expected in JSON_TEXTS:
        with subtests.test(text=text[:40], length=len(text)):
            assert JSONSchemaMatch(POINT)(text) == expected


def test_json_is_extracted_from_a_text() -> None:
    verifier = JSONSchemaMatch(POINT, extract=Between(start="```json", end="```"))
    assert verifier('Here:\n```json\n{"x": 1}\n```\nDone.') == 1.0
    assert verifier('{"x": 1}') == 0.0


def test_a_reference_in_a_schema_is_not_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def no_network(*args: object) -> None:
        asked.append(args)
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    verifier = JSONSchemaMatch({"$ref": "http://localhost:9/schema.json"})
    row = Completion(token_ids=(), text="1", finish_reason="end")
    with pytest.raises(RuntimeError, match=r"json raised .*Unresolvable"):
        CompletionRewards({"json": verifier}).compute_rewards(["p"], [row])
    assert not asked


def test_without_jsonschema_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(ImportError, match=r'pip install "\.\[llm\]" in the checkout'):
        JSONSchemaMatch({})


def test_verifiers_are_weighted_and_summed() -> None:
    verifiers_of_text = {
        "format": RegexMatch(pattern=tags_pattern("answer"), how="full"),
        "right": ExactMatch(extract=Between(start="<answer>", end="</answer>")),
        "length": OverlongPunishment(max_tokens=32, cache_tokens=16),
    }
    rewards = CompletionRewards(verifiers_of_text, weights={"format": 0.25, "right": 1.0, "length": 0.5})
    texts = ["<answer>4</answer>", "so <answer>4</answer>", "4"]  # 18, 21 and 1 tokens
    actions = [Completion(token_ids=tuple(map(ord, text)), text=text, finish_reason="end") for text in texts]
    total = rewards.compute_rewards([{"prompt": "2 + 2", "answer": 4}] * 3, actions)
    # .25 + 1 - .5 * 2/16;  1 - .5 * 5/16;  0
    assert total.tolist() == [1.1875, 0.84375, 0.0]


def test_verifiers_do_not_raise_on_any_text() -> None:
    generator = random.Random(0)
    verifiers_of_text = [
        ExactMatch(),
        RegexMatch(pattern=tags_pattern("a"), how="full", column="answer", group="a"),
        lambda text, state: JSONSchemaMatch(POINT)(text),
    ]
    for _ in range(200):
        text = "".join(generator.choices('<a></a>{}[]":,0123 \x00\ud800é', k=generator.randrange(40)))
        for verifier in verifiers_of_text:
            assert verifier(text, {"answer": "1"}) in (0.0, 1.0)


# --- The columns of a data set, given to a reward


pandas = pytest.importorskip("pandas")
CONVERTED: list[tuple[Any, list[str]]] = [
    ("Rome", ["Rome"]), (np.str_("Rome"), ["Rome"]), (7, ["7"]), (7.0, ["7"]), (-2.5, ["-2.5"]), (2e-7, ["0.0000002"]),
    (3e20, ["300000000000000000000"]), (np.float32(0.1), ["0.1"]), (np.int64(7), ["7"]), (np.array(7), ["7"]),
    (np.array([1.5, 2.0]), ["1.5", "2"]), (torch.tensor(7), ["7"]), (torch.tensor(0.1), ["0.1"]),
    (torch.tensor(0.5, dtype=torch.bfloat16), ["0.5"]), (torch.tensor([1, 2]), ["1", "2"]), (Decimal("1.50"), ["1.50"]),
    (Fraction(2, 3), ["2/3"]), (["Rome", "Roma"], ["Rome", "Roma"]), (("4", 4.0, torch.tensor(4)), ["4", "4", "4"]),
    (pandas.Series([1, 2]), ["1", "2"]), (pandas.array([1, None], dtype="Int64"), ["1"]), (None, []),
    (float("nan"), []), (np.float32("nan"), []), (torch.tensor(float("nan")), []), (pandas.NA, []), (pandas.NaT, []),
    (Decimal("nan"), []), ([], []), ([None, "Rome"], ["Rome"]),
]  # fmt: skip
REFUSED = [
    True, np.True_, b"Rome", {"text": ["Rome"]}, [["Rome"]], np.zeros((2, 2)), 1j, float("inf"), object(), range(3),
]  # fmt: skip


def test_a_column_is_converted_or_refused(subtests: pytest.Subtests) -> None:
    for value, texts in CONVERTED:
        with subtests.test(value=repr(value)):
            assert [answer.text for answer in accepted_answers({"gold": value}, "gold", "Test")] == texts
    for value in REFUSED:
        message = "Test: the column 'gold' must hold a text, a finite number, None, or a list of accepted answers; got "
        with subtests.test(value=repr(value)), pytest.raises(RewardError, match=message):
            accepted_answers({"gold": value}, "gold", "Test")


def test_all_verifiers_read_columns_through_one_door(subtests: pytest.Subtests) -> None:
    frame = pandas.DataFrame({"prompt": ["?"] * 3, "answer": [4, None, 6]})
    listed: list[dict[str, Any]] = [
        {"prompt": "?", "answer": [4, "four"]}, {"prompt": "?", "answer": None}, {"prompt": "?", "answer": 5.0},
    ]  # fmt: skip
    words = {"exact": ExactMatch(), "regex": RegexMatch(pattern=r"(\d+)", column="answer"), "math": MathMatch()}
    texts = [Completion(token_ids=(1,), text="4", finish_reason="end")] * 3
    for rows in (frame.to_dict("records"), listed):
        for name, verifier in words.items():
            with subtests.test(name=name):
                found = CompletionRewards({name: verifier, "one": lambda completion: 0.0}).compute_rewards(rows, texts)
                assert found.tolist() == [1.0, 0.0, 0.0]
        with subtests.test(name="correctness_first"):
            assert correctness_first().compute_rewards(rows, texts).tolist() == pytest.approx([1.1, 0.1, 0.1])
        with subtests.test(name="hybrid_reward"):
            assert hybrid_reward().compute_rewards(rows, texts).tolist() == pytest.approx([0.7, 0.1, 0.3])


def test_a_number_equals_every_spelling_of_it_and_a_text_only_itself() -> None:
    spellings = ["5", "5.0", " 5 ", "5e0"]
    assert [ExactMatch()(text, {"answer": 5}) for text in spellings] == [1.0] * 4
    assert [ExactMatch()(text, {"answer": 5}) for text in ("5x", "6", "5_0", "nan", "1e999999999")] == [0.0] * 5
    assert ExactMatch()("5.0", {"answer": "5"}) == 0.0
    assert ExactMatch()("0.001", {"answer": 1e-3}) == 1.0
    assert RegexMatch(pattern=r"= (\S+)", column="answer")("= 2.50", {"answer": [7, 2.5]}) == 1.0
