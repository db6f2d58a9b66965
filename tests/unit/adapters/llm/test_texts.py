"""Special tokens in the text of completions, and tags that the prompt has opened."""

import warnings
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from adapters.llm import Completion, CompletionRewards, RegexMatch, tags_pattern
from adapters.llm.texts import CompletionTexts
from tests.support.agents import CHATML, Scripted, chat_tokenizer


def tokenizer_of(*special: str) -> Any:
    marks = ["<pad>", "<end>", *special]
    vocabulary = {
        mark: number for number, mark in enumerate([*marks, *"\n abcdefghijklmnopqrstuvwxyz0123456789<>/[]_|"])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>", extra_special_tokens=[*special]
    )


def texts_of(tokenizer: Any, *, keeps: bool = False) -> CompletionTexts:
    return CompletionTexts(tokenizer, [1], keeps_special_tokens=keeps)


TAGGED = [
    (("<think>", "</think>"), "<think>a</think>7", "a7"),
    (("[THINK]", "[/THINK]"), "[THINK]a[/THINK]7", "a7"),
    (("<answer>", "</answer>", "<x>"), "a<x><answer>7</answer>", "a7"),
    (("<|channel|>", "<|message|>"), "<|channel|>final<|message|>7", "final7"),
    (("<tool_call>",), "<tool_call>7", "7"),
]


def test_special_tags_are_kept_on_demand_and_else_missed_in_words(subtests: pytest.Subtests) -> None:
    for special, written, without in TAGGED:
        tokenizer = tokenizer_of(*special)
        token_ids = [*tokenizer(written)["input_ids"], 1, 0]
        with subtests.test(special=special):
            assert texts_of(tokenizer, keeps=True)([token_ids]) == [written]
            texts = texts_of(tokenizer)
            with pytest.warns(UserWarning, match=r"special tokens .*leaves out.*HFOptions\(keep_special_tokens=True\)"):
                assert texts([token_ids]) == [without]
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert texts([token_ids]) == [without]  # said once


def test_marks_of_roles_are_no_tags() -> None:
    tokenizer = tokenizer_of("<start_of_turn>", "<end_of_turn>")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert texts_of(tokenizer)([tokenizer("<start_of_turn>a<end_of_turn>")["input_ids"]]) == ["a"]


def test_a_mark_that_ends_is_no_tag_and_is_never_kept() -> None:
    """Gemma 4 ends a turn with `<|tool_response>`, and gpt-oss with `<|call|>`."""
    tokenizer = tokenizer_of("<|tool_response>")
    row = tokenizer("a<|tool_response>")["input_ids"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for keeps in (False, True):
            assert CompletionTexts(tokenizer, [1, row[-1]], keeps_special_tokens=keeps)([row]) == ["a"]


OPENED = [
    ("ab<think>\n", "<think>\n", True),
    ("ab<reasoning>", "<reasoning>", True),
    ("<think>", "<think>", True),
    ("ab<think>\n\n</think>\n\n", "<think>\n\n</think>\n\n", False),
    ("ab<think>c", "", False),
    ("ab</think>\n", "", False),
    ("ab<assistant>\n", "", False),
    ("ab", "", False),
]


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
        ("<think>\n", "ab</think><answer>7</answer>", 1.0),
        ("", "ab</think><answer>7</answer>", 0.0),
        ("<think>\n", "<think>ab</think><answer>7</answer>", 1.0),
        ("<think>\n\n</think>\n", "<answer>7</answer>", 1.0),
        ("<think>\n", "ab<answer>7</answer>", 0.0),
    ]
    rows = [Completion(token_ids=(1,), text=text, finish_reason="end", opened=opened) for opened, text, _ in cases]
    assert reward.compute_rewards(["?"] * len(cases), rows).tolist() == [score for _, _, score in cases]
    anywhere = CompletionRewards({"format": RegexMatch(pattern="<think>")})  # searches what the model wrote
    assert anywhere.compute_rewards(["?"] * len(cases), rows).tolist() == [0.0, 0.0, 1.0, 0.0, 0.0]


def test_the_policy_gives_completions_the_tags_and_what_the_prompt_has_opened() -> None:
    template = (
        CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}") + "{# <|think|> <|/think|> #}"
    )
    chat, says = [{"role": "user", "content": "sum it"}], "a</think><|think|>7"
    for keeps, text, warned in [
        (True, says, ["ends in <think>"]),
        (False, "a</think>7", ["<|think|>", "ends in <think>"]),
    ]:
        model = Scripted([says] * 2, tokenizer=chat_tokenizer(template), keep_special_tokens=keeps, max_new_tokens=40)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            [[one, other]] = model.policy.generate_actions([chat], 2)
        assert [(c.text, c.opened) for c in (one, other)] == [(text, "<think>\n")] * 2
        messages = sorted(str(warning.message) for warning in said)
        assert len(messages) == len(warned)
        assert all(any(words in message for message in messages) for words in warned)
