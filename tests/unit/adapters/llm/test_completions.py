"""Completions: their masks, special tokens in their text, and tags that the prompt has opened."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from adapters.llm import Completion, CompletionRewards, RegexMatch, tags_pattern
from adapters.llm.completions import completion_mask, padded
from adapters.llm.texts import CompletionTexts
from grpo.errors import ContractError
from tests.support.agents import CHATML, Scripted, chat_tokenizer
from tests.support.llm_models import completion
from tests.support.objective_inputs import as_users_run_it
from tests.support.plain_states import assert_same, through_checkpoint


def test_a_completion_has_a_length_and_knows_whether_it_is_truncated() -> None:
    cut = Completion(token_ids=(5, 6, 7), text="abc", finish_reason="length")
    assert len(cut) == 3
    truncated = [completion(5, finish_reason=reason).is_truncated for reason in ("end", "stop", "length")]
    assert truncated == [False, False, True]


def test_the_mask_is_as_wide_as_the_longest_completion() -> None:
    mask = completion_mask([completion(5), completion(), completion(5, 6, 7)])
    assert mask.dtype == torch.bool
    assert mask.tolist() == [[True, False, False], [False] * 3, [True] * 3]
    assert completion_mask([]).shape == (0, 0)
    assert completion_mask([completion(), completion()]).shape == (2, 0)


def test_truncated_completions_are_masked_on_request_and_keep_their_row() -> None:
    rows = [completion(5, finish_reason="stop"), completion(5, 6, finish_reason="length")]
    assert completion_mask(rows).tolist() == [[True, False], [True, True]]
    assert completion_mask(rows, mask_truncated=True).tolist() == [[True], [False]]  # as wide as what counts


def test_numbers_are_padded_with_zeros() -> None:
    values = padded([[-1.5], [], [-0.25, -3.0]], 3)
    assert values.dtype == torch.float32
    assert values.tolist() == [[-1.5, 0, 0], [0, 0, 0], [-0.25, -3.0, 0]]


def test_completions_come_back_from_a_checkpoint(tmp_path: Path, subtests: pytest.Subtests) -> None:
    completions = {
        "sampled": Completion(token_ids=(5, 2**31, 7), text='Grüße,\u2028"\ud800', finish_reason="stop",
            behaviour_log_probs=(-0.1, float("nan"), float("-inf"))),
        "given": Completion(token_ids=(5,), text="a", finish_reason="length"),
        "empty": Completion(token_ids=(), text="", finish_reason="end", behaviour_log_probs=()),
    }  # fmt: skip
    for name, given in completions.items():
        with subtests.test(completion=name):
            assert_same(through_checkpoint(given, tmp_path / name), given)


def test_wrong_values_are_refused(subtests: pytest.Subtests) -> None:
    right: dict[str, Any] = {
        "token_ids": (5, 6), "text": "ab", "finish_reason": "end", "behaviour_log_probs": (-1.0, -2.0),
    }  # fmt: skip
    assert Completion(**right).token_ids == (5, 6)
    for name, wrongs in {
        "token_ids": [[5, 6], (5, -1), (5, 1.5), None, "ab", torch.tensor([5, 6]), (True, 1)],
        "text": [None, b"ab", 3],
        "finish_reason": ["stopped", None, ["end"]],
        "behaviour_log_probs": [(-1.0,), [-1.0, -2.0], ("a", "b"), torch.zeros(2), 3],
    }.items():
        for wrong in wrongs:
            refusal = pytest.raises(ContractError, match=rf"Completion\.{name} ")
            with subtests.test(name=name, wrong=wrong), as_users_run_it(), refusal:
                Completion(**right | {name: wrong})


# --- special tokens in the text, and tags that the prompt has opened


def tokenizer_of(*special: str) -> Any:
    marks = ["<pad>", "<end>", *special]
    characters = "\n abcdefghijklmnopqrstuvwxyz0123456789<>/[]_|"
    tokenizer = Tokenizer(models.WordLevel({mark: i for i, mark in enumerate([*marks, *characters])}, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    named = {"eos_token": "<end>", "pad_token": "<pad>", "extra_special_tokens": [*special]}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)


def texts_of(tokenizer: Any, *, keeps: bool = False) -> CompletionTexts:
    return CompletionTexts(tokenizer, [1], keeps_special_tokens=keeps)


TAGGED = [
    (("<think>", "</think>"), "<think>a</think>7", "a7"), (("[THINK]", "[/THINK]"), "[THINK]a[/THINK]7", "a7"),
    (("<answer>", "</answer>", "<x>"), "a<x><answer>7</answer>", "a7"),
    (("<|channel|>", "<|message|>"), "<|channel|>final<|message|>7", "final7"), (("<tool_call>",), "<tool_call>7", "7"),
]  # fmt: skip


def test_special_tags_are_kept_on_demand_and_else_missed_in_words(subtests: pytest.Subtests) -> None:
    for special, written, without in TAGGED:
        tokenizer = tokenizer_of(*special)
        token_ids = [*tokenizer(written)["input_ids"], 1, 0]
        with subtests.test(special=special):
            assert texts_of(tokenizer, keeps=True)([token_ids]) == [written]
            texts = texts_of(tokenizer)
            with pytest.warns(UserWarning, match=r"special tokens .*leaves out.*HFOptions\(keep_special_tokens=True\)"):
                assert texts([token_ids]) == [without]
            assert texts([token_ids]) == [without]  # said once: another warning would be an error


def test_marks_of_roles_and_of_ends_are_no_tags_and_an_end_is_never_kept() -> None:
    """Gemma 4 ends a turn with `<|tool_response>`, and gpt-oss with `<|call|>`. A warning would be an error."""
    roles = tokenizer_of("<start_of_turn>", "<end_of_turn>")
    tokenizer = tokenizer_of("<|tool_response>")
    row = tokenizer("a<|tool_response>")["input_ids"]
    assert texts_of(roles)([roles("<start_of_turn>a<end_of_turn>")["input_ids"]]) == ["a"]
    for keeps in (False, True):
        assert CompletionTexts(tokenizer, [1, row[-1]], keeps_special_tokens=keeps)([row]) == ["a"]


OPENED = [
    ("ab<think>\n", "<think>\n", True), ("ab<reasoning>", "<reasoning>", True), ("<think>", "<think>", True),
    ("ab<think>\n\n</think>\n\n", "<think>\n\n</think>\n\n", False), ("ab<think>c", "", False),
    ("ab</think>\n", "", False), ("ab<assistant>\n", "", False), ("ab", "", False),
]  # fmt: skip


def test_the_tag_in_which_a_prompt_ends_is_found_and_said_once(subtests: pytest.Subtests) -> None:
    tokenizer = tokenizer_of()
    for prompt, opened, is_said in OPENED:
        token_ids = tokenizer(prompt)["input_ids"]
        with subtests.test(prompt=prompt), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            texts = texts_of(tokenizer)
            assert texts.opened_by([token_ids, token_ids]) == [opened] * 2
            assert texts.opened_by([token_ids]) == [opened]
            assert len(said) == is_said


def test_a_special_token_that_nothing_closes_names_who_speaks() -> None:
    token_ids = {"<policy>": "", "<think>": "<think>"}
    for marks in (["<policy>"], ["<policy>", "<think>", "</think>"]):
        tokenizer = tokenizer_of(*marks)
        for mark in marks[:2]:
            texts = texts_of(tokenizer)
            with warnings.catch_warnings():
                warnings.simplefilter("error" if mark == "<policy>" else "ignore")
                assert texts.opened_by([tokenizer(f"ab{mark}")["input_ids"]]) == [token_ids[mark]]


def test_a_format_counts_the_tag_that_the_prompt_has_opened() -> None:
    reward = CompletionRewards({"format": RegexMatch(pattern=tags_pattern("think", "answer"), how="full")})
    cases = [
        ("<think>\n", "ab</think><answer>7</answer>", 1.0), ("", "ab</think><answer>7</answer>", 0.0),
        ("<think>\n", "<think>ab</think><answer>7</answer>", 1.0), ("<think>\n\n</think>\n", "<answer>7</answer>", 1.0),
        ("<think>\n", "ab<answer>7</answer>", 0.0),
    ]  # fmt: skip
    rows = [Completion(token_ids=(1,), text=text, finish_reason="end", opened=opened) for opened, text, _ in cases]
    assert reward.compute_rewards(["?"] * len(cases), rows).tolist() == [score for _, _, score in cases]
    anywhere = CompletionRewards({"format": RegexMatch(pattern="<think>")})  # searches what the model wrote
    assert anywhere.compute_rewards(["?"] * len(cases), rows).tolist() == [0.0, 0.0, 1.0, 0.0, 0.0]


def test_the_policy_gives_completions_the_tags_and_what_the_prompt_has_opened() -> None:
    template = (
        CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}") + "{# <|think|> <|/think|> #}"
    )
    chat, says = [{"role": "user", "content": "sum it"}], "a</think><|think|>7"
    cases = [(True, says, ["ends in <think>"]), (False, "a</think>7", ["<|think|>", "ends in <think>"])]
    for keeps, text, warned in cases:
        model = Scripted([says] * 2, tokenizer=chat_tokenizer(template), keep_special_tokens=keeps, max_new_tokens=40)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            [[one, other]] = model.policy.generate_actions([chat], 2)
        assert [(c.text, c.opened) for c in (one, other)] == [(text, "<think>\n")] * 2
        messages = sorted(str(warning.message) for warning in said)
        assert len(messages) == len(warned)
        assert all(any(words in message for message in messages) for words in warned)
