"""Plain functions as rewards: their arguments and their return values; and verifiers."""

import asyncio
import doctest
import functools
import math
import os
import socket
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from torch import Tensor, nn

from adapters.llm import MathMatch, correctness_first, hybrid_reward
from adapters.llm.completions import Completion
from adapters.llm.rewards import completion_rewards, gsm8k, gsm8k_rewards, json_schema, verifiers
from adapters.llm.rewards.columns import accepted_answers
from adapters.llm.rewards.completion_rewards import CompletionRewards
from adapters.llm.rewards.json_schema import JSONSchemaMatch
from adapters.llm.rewards.verifiers import Between, ExactMatch, OverlongPunishment, PerToken, RegexMatch, tags_pattern
from grpo import RewardConfig
from grpo._retrying.calls import RetriedCalls
from grpo.checks import check_reward_model
from grpo.errors import ConfigError, ContractError, ProtocolError, RewardError, RewardTimeoutError
from grpo.rewards import ask_for_rewards
from tests.support.clocks import skipping_clock
from tests.support.reward_faults import children


def completion(text: str) -> Completion:
    return Completion(token_ids=tuple(map(ord, text)), text=text, finish_reason="end")


A, B, C = completion("a"), completion("bb"), completion("ccc")
ROWS = [{"prompt": p, "answer": a} for p, a in (("p", "a"), ("q", "x"), ("r", "ccc"))]


def rewards_of(functions: Any, states: Sequence[Any] = ROWS, actions: Sequence[Completion] = (A, B, C), **options: Any):
    return CompletionRewards(functions, **options).compute_rewards(list(states), list(actions))


def retried(rewards: CompletionRewards, **settings: Any) -> Any:
    """The rewards of the three rows, asked for under these settings."""
    return RetriedCalls(rewards, RewardConfig(**settings))(ROWS, [A, B, C])


def right(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def length(completion: str) -> int:
    return len(completion)


def test_rewards_are_weighted_by_name_or_in_order() -> None:
    # right: 1, 0, 1; length: 1, 2, 3.  right + .5 length: 1.5, 1, 2.5
    total = rewards_of([right, length], weights=[1.0, 0.5])
    assert total.dtype == torch.float64
    assert total.tolist() == [1.5, 1.0, 2.5]
    assert rewards_of({"r": right, "l": length}, weights={"l": 0.5, "r": 1}).tolist() == [1.5, 1.0, 2.5]
    assert rewards_of(length).tolist() == [1.0, 2.0, 3.0]
    parts = ask_for_rewards(CompletionRewards([right, length]), ROWS, [A, B, C]).components
    assert {name: part.tolist() for name, part in parts.items()} == {"right": [1, 0, 1], "length": [1, 2, 3]}


def test_a_function_with_kwargs_gets_the_arguments_that_trl_passes() -> None:
    seen: dict[str, Any] = {}
    chat = [{"role": "user", "content": "hello"}]
    rows = [{"prompt": "p", "answer": 1, "completion": "gold"}, {"prompt": chat, "answer": 2, "completion": ""}]
    rewards_of(lambda **kwargs: seen.update(kwargs) or [0.0, 0.0], rows, [A, B])
    assert seen == {
        "prompts": ["p", chat], "completions": ["a", [{"role": "assistant", "content": "bb"}]],
        "completion_ids": [[97], [98, 98]], "answer": [1, 2],
    }  # fmt: skip


def test_trls_own_reward_functions_work() -> None:
    trl_rewards = pytest.importorskip("trl.rewards")
    chats = [[{"role": "user", "content": "?"}]] * 2
    texts = [completion("<think>1</think>2"), completion("2")]
    overlong = trl_rewards.get_soft_overlong_punishment(max_completion_len=20, soft_punish_cache=4)
    # lengths 17 and 1: 17 is one token of four into the cache
    assert rewards_of([trl_rewards.think_format_reward, overlong], chats, texts).tolist() == [1.0 - 0.25, 0.0]


def test_a_function_of_one_row_gets_the_arguments_that_it_names() -> None:
    seen = []

    def reward(prompt: str, completion: str, action: Completion, state: Any, answer: str, scale: float = 2.0) -> float:
        seen.append((prompt, completion, action, state, answer))
        return scale

    assert rewards_of(functools.partial(reward, scale=3.0), ROWS[:1], [A]).tolist() == [3.0]
    assert seen == [("p", "a", A, ROWS[0], "a")]

    rewards_of(lambda completion, **kwargs: seen.append(kwargs), ROWS[:1], [A])
    assert seen[1] == {"prompt": "p", "answer": "a"}


def test_columns_with_the_names_of_the_trainers_objects_reach_functions(subtests: pytest.Subtests) -> None:
    rows = [{"prompt": "p", "state": "Ohio", "action": "walk", "states": 50, "actions": 3, "answer": "a"}]
    seen: list[Any] = []
    functions: list[tuple[Any, Any]] = [
        (lambda completion, state: seen.append(state), "Ohio"), (lambda prompt, action: seen.append(action), "walk"),
        (lambda completion, states, actions: seen.append([states, actions]), [50, 3]),
        (lambda completions, state, **kwargs: seen.append([state, kwargs["action"]]) or [0.0], [["Ohio"], ["walk"]]),
        (lambda prompts, states: seen.append(states) or [0.0], [50]), (lambda state: seen.append(state), "Ohio"),
    ]  # fmt: skip
    for number, (function, expected) in enumerate(functions):
        with subtests.test(number=number):
            rewards_of(function, rows, [A])
            assert seen.pop() == expected
    with subtests.test("ready-made verifiers read the whole row"):
        assert rewards_of({"right": ExactMatch(), "length": PerToken(amount=1.0)}, rows, [A]).tolist() == [2.0]
    with subtests.test("without the column"), pytest.raises(RewardError, match="needs state; the rows offer"):
        rewards_of(lambda completions, state: [0.0])


def test_a_reward_model_is_summed_with_functions() -> None:
    class Model(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.register_buffer("value", torch.tensor(value))

        def compute_rewards(self, states: Any, actions: Any) -> Tensor:
            return self.value.expand(len(states))

    rewards = CompletionRewards({"model": Model(0.25), "length": length})
    assert rewards.compute_rewards(ROWS, [A, B, C]).tolist() == [1.25, 2.25, 3.25]
    assert rewards.state_dict()["model"] == {"value": torch.tensor(0.25)}
    assert CompletionRewards({"model": Model(math.nan)}).compute_rewards(["p"], [A]).tolist() == [math.inf]


def test_the_prompt_column_can_have_another_name() -> None:
    rows = [{"question": "p", "answer": "a"}]
    assert rewards_of(lambda prompt, question, answer, completion: prompt + question + answer == "ppa", rows, [A],
                      prompt_column="question").tolist() == [1.0]  # fmt: skip
    with pytest.raises(ContractError, match="needs the prompt column 'prompt'"):
        rewards_of(length, rows, [A])


def test_each_function_gets_its_own_lists() -> None:
    def careless(completions: list[str], **kwargs: Any) -> list[float]:
        completions.clear()
        return [0.0, 0.0, 0.0]

    assert rewards_of({"careless": careless, "right": right}).tolist() == [1.0, 0.0, 1.0]


NUMBERS = [
    [1, True, 2.5], (1.0, 1.0, 2.5), torch.tensor([1.0, 1.0, 2.5]), torch.tensor([1.0, 1.0, 2.5]).numpy(),
    [torch.tensor(1), torch.tensor(1.0).numpy()[()], torch.tensor(True).numpy()[()] + 1.5],
]  # fmt: skip


def test_any_kind_of_number_is_a_reward(subtests: pytest.Subtests) -> None:
    for answers in NUMBERS:
        with subtests.test(type=type(answers)):
            assert rewards_of(lambda prompts, answers=answers: answers).tolist() == [1.0, 1.0, 2.5]


# --- None and NaN


def only_short(completion: str) -> float | None:
    return 10.0 if completion == "a" else None


def long_or_fault(completion: str) -> float | None:
    return {"a": None, "bb": 2.0}.get(completion, math.nan)


def test_none_is_excluded_from_the_sum_of_a_row() -> None:
    rewards = CompletionRewards({"short": only_short, "long": long_or_fault}, {"short": 0.5, "long": 3.0})
    found = ask_for_rewards(rewards, ["p"] * 2, [A, B])
    parts = {name: part.tolist() for name, part in found.components.items()}
    assert str(parts) == "{'short': [10.0, nan], 'long': [nan, 2.0]}"
    assert found.values.tolist() == [5.0, 6.0]  # .5 * 10 and 3 * 2
    assert ask_for_rewards(CompletionRewards(only_short), ["p"] * 2, [A, B]).values.isnan().tolist() == [False, True]


def test_nan_is_an_error_even_if_another_function_applies() -> None:
    rewards = CompletionRewards({"long": long_or_fault, "length": length}, {"long": 0.0, "length": 1.0})
    assert rewards.compute_rewards(["p"] * 2, [A, B]).tolist() == [1.0, 2.0]
    with pytest.raises(RewardError, match=r"must return finite numbers; got .* at rows \[2\] of 3"):
        retried(rewards)
    assert retried(rewards, non_finite="drop").values.tolist() == [1.0, 2.0]


# --- errors


WRONG_ANSWERS = [
    (lambda prompts: [1.0, 2.0], r"<lambda> must return one number or None per row, a list of 3; got a list of 2"),
    (lambda prompts: 1.0, r"a list of 3; got float 1.0 for rows 0 to 2"),
    (lambda prompts: "abc", r"a list of 3; got str 'abc'"),
    (lambda prompts: torch.zeros(3, 1), r"got a list of 1 float at row 0"),
    (lambda prompts: [1.0, "two", 3.0], r"must return a number, or None where it does not apply; got str 'two' at row 1"),
    (lambda completion: 1j, r"got complex 1j at row 0"),
    (lambda completion: torch.zeros(2), r"got \[2\] float32 at row 0"),
    (lambda completion, truth, hint: 0.0, r"<lambda> needs truth, hint; the rows offer action, answer, completion, "),
    (lambda completions, trainer_state: [0.0], r"<lambda> needs trainer_state; the rows offer actions, answer, "),
]  # fmt: skip


def test_an_error_says_what_a_function_returned_or_lacked(subtests: pytest.Subtests) -> None:
    for function, message in WRONG_ANSWERS:
        with subtests.test(message=message), pytest.raises(RewardError, match=message):
            rewards_of(function)


def test_rows_with_other_columns_and_actions_that_are_not_completions_are_refused() -> None:
    with pytest.raises(RewardError, match=r"the same columns; row 1 lacks 'answer'. Set the column to None"):
        rewards_of(length, [*ROWS[:1], "text only"], [A, B])
    with pytest.raises(RewardError, match=r"actions must be Completions; got str 'text' at row 1"):
        rewards_of(length, ROWS[:2], [A, "text"])  # type: ignore[list-item]


WRONG_SETTINGS = [
    (lambda p, c: 0.0, {}, r"<lambda>\(p, c\) must name its arguments: prompts, completions, .* Rename its parameters"),
    (lambda prompts, completion: 0.0, {}, "do not mix the two kinds"),
    (lambda answer: 0.0, {}, "must name its arguments"), (lambda completion, /: 0.0, {}, "must name its arguments"),
    ([length, length], {}, r"different names; got length, length. Pass {'name': function, ...}"),
    ([], {}, "needs at least one reward"), ([right, length], {"weights": [1.0]}, "one weight per function, 2; got 1"),
    ({"right": right}, {"weights": {"wrong": 1.0}}, "one weight for each"),
    (length, {"weights": 3}, "weights must be None, a mapping or a sequence"),
    (length, {"prompt_column": 3}, "prompt_column a text; got .* int 3"),
    ({"name": "accuracy"}, {}, "reward_model must implement RewardModel; str lacks"),
]  # fmt: skip


@pytest.mark.parametrize(("functions", "options", "message"), WRONG_SETTINGS)
def test_wrong_settings_are_refused(functions: Any, options: Any, message: Any) -> None:
    with pytest.raises((ConfigError, ProtocolError), match=message):
        CompletionRewards(functions, **options)


def picky(completion: str) -> float:
    return {"a": 1.0, "ccc": 3.0}[completion]


@pytest.mark.parametrize("timeout", [None, 60.0], ids=["in this process", "in another process"])
def test_an_exception_names_the_function_its_row_and_its_cause_and_can_drop_the_row(timeout: Any) -> None:
    message = r"raised RuntimeError: picky raised KeyError: 'bb' at row 1 for rows 0 to 2"
    with pytest.raises(RewardError, match=message) as caught:
        retried(CompletionRewards(picky), timeout=timeout)
    cause: Any = caught.value.__cause__
    assert isinstance(cause, RuntimeError)
    assert isinstance(cause.__cause__, KeyError)
    assert timeout is None or "in picky" in cause.__notes__[0]
    kept = retried(CompletionRewards(picky), on_failure="drop", timeout=timeout)
    assert kept.values.tolist() == [1.0, 3.0]
    assert kept.metrics["rows/dropped"] == 1.0


async def later(completions: list[str], **kwargs: Any) -> list[float | None]:
    await asyncio.sleep(0.01)
    return [None, 0.5, 0.5]


def test_a_slow_awaited_call_times_out_and_names_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    skip = skipping_clock(monkeypatch)

    async def slow(completion: str) -> float:
        if completion == "bb":
            skip(90.0)
            await asyncio.sleep(3600)
        return 1.0

    message = r"exceeded reward\.timeout=60: slow at row 1 did not answer within 60 s for rows 0 to 2, in 1 call"
    with pytest.raises(RewardTimeoutError, match=message):
        retried(CompletionRewards(slow), timeout=60)
    dropped = retried(CompletionRewards(slow), timeout=60, on_failure="drop")
    assert dropped.values.tolist() == [1.0, 1.0]


def test_parts_of_every_kind_run_within_a_time_limit() -> None:
    """right: 1, 0, 1; length: 1, 2, 3; later: -, .5, .5; the model: .25 each."""

    class Model(nn.Module):
        def compute_rewards(self, states: Any, actions: Any) -> Tensor:
            assert os.getpid() != parent
            return torch.full([len(states)], 0.25)

    parent = os.getpid()
    parts = {"right": right, "length": length, "later": later, "model": Model()}
    found = retried(CompletionRewards(parts), timeout=60.0)
    assert found.values.tolist() == [2.25, 2.75, 4.75]
    assert list(found.components) == [*parts]
    assert children() == set()


def test_the_conformance_kit_passes() -> None:
    async def judge(completion: str) -> float:
        return float(len(completion))

    rewards = CompletionRewards({"right": right, "judge": judge})
    check_reward_model(rewards, ROWS, [A, B, C], strict=True).raise_for_failures()


# --- verifiers on texts and lengths with known rewards


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


WRONG_VERIFIERS = [
    (lambda: RegexMatch(pattern="("), r"RegexMatch.pattern must be a regular expression; '\(' is not: missing \)"),
    (lambda: RegexMatch(pattern="a", column="answer"), "RegexMatch.group must be a group of the pattern 'a'; got 1. Add"),
    (lambda: RegexMatch(pattern="(a)", column="answer", group="b"), "RegexMatch.group must be a group of .*; got 'b'"),
    (lambda: RegexMatch(pattern="a", how="match"), "RegexMatch.how must be one of 'search', 'full'"),
    (lambda: OverlongPunishment(max_tokens=4, cache_tokens=5), "cache_tokens must be at most max_tokens=4; got 5"),
    (lambda: OverlongPunishment(max_tokens=0, cache_tokens=0), "max_tokens must be >= 1"),
    *((lambda tags=tags: tags_pattern(*tags), "tags_pattern needs different tags")
        for tags in [(), ("a", "a"), ("a b",), ("a>",)]),
    (lambda: ExactMatch(extract="<a>"), "ExactMatch.extract must be Callable or None; got '<a>'"),
    (lambda: JSONSchemaMatch(None), r"needs a JSON schema as a mapping, .* got NoneType"),
    (lambda: JSONSchemaMatch({}, extract="a"), r"extract a function or None"),
    (lambda: JSONSchemaMatch({"type": "point"}), r"JSONSchemaMatch needs a JSON schema; at \$.type: 'point' is not valid"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), WRONG_VERIFIERS)
def test_wrong_settings_of_verifiers_are_refused(make: Any, message: Any) -> None:
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
    ('"\ud800\x00"', 0.0), ('{"x": NaN}', 0.0), ('{"x": -Infinity}', 0.0), ('{"x": 1e999}', 0.0),
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


# --- The columns of a data set, given to a reward
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
