"""Prompts that continue earlier rows compute only their new tokens, and draw the same tokens."""

import pytest
import torch

from tests.support.llm_models import SHARING, encoded, forward_shapes, policy_of, tiny_model

NEW = encoded("=?")


@pytest.mark.parametrize("family", SHARING)
def test_continued_rows_draw_the_same_tokens(family: str) -> None:
    """Rows with caches of several lengths, a row without one, and more rows than one forward pass may have."""
    prompts = [encoded(text) for text in ("abc", "1+1=", "12+30=?", "z")]
    for budget in (16_384, 8):
        policy = policy_of(tiny_model(family), max_new_tokens=6, max_tokens_per_forward=budget)
        first = policy.sample_tokens(prompts, seeds=range(4), end_token_ids=range(2, 12))
        longer = [[*p, *t, *NEW[: 1 + i % 2]] for i, (p, t) in enumerate(zip(prompts, first.token_ids, strict=True))]
        longer.append(encoded("a new one"))
        expected = policy.sample_tokens(longer, seeds=range(10, 15))
        with policy.keeping_prefixes(max_rows=8):
            policy.sample_tokens(prompts, seeds=range(4), end_token_ids=range(2, 12))
            found = policy.sample_tokens(longer, seeds=range(10, 15))
        assert found.token_ids == expected.token_ids
        for one, other in zip(found.behaviour_log_probs, expected.behaviour_log_probs, strict=True):
            assert one == pytest.approx(other, abs=1e-5)


def test_only_new_tokens_are_computed_and_the_oldest_rows_are_dropped() -> None:
    policy = policy_of(max_new_tokens=2)
    with policy.keeping_prefixes(max_rows=1):
        kept = [policy.sample_tokens([encoded(text)], seeds=[0], end_token_ids=range(45)) for text in ("abcd", "bcde")]
        shapes = forward_shapes(policy.model)
        again = [[*encoded(text), *turn.token_ids[0], *NEW] for text, turn in zip(("abcd", "bcde"), kept, strict=True)]
        for prompt in reversed(again):
            cut = policy.sample_tokens([prompt], seeds=[0], max_new_tokens=1)
        policy.sample_tokens([[*again[0], *cut.token_ids[0], *NEW]], seeds=[0], max_new_tokens=1)
    # kept: the sampled token and 2 new ones; dropped: 4 + 1 + 2 tokens; a truncated row is kept, too
    assert shapes == [(1, 3), (1, 7), (1, 3)]
    with torch.no_grad():
        policy.sample_tokens([again[1]], seeds=[0], max_new_tokens=1)
    assert shapes[-1] == (1, 7)  # outside the context, nothing is kept


def test_models_with_windows_compute_the_whole_prompt() -> None:
    policy = policy_of(tiny_model("mistral"), max_new_tokens=3)
    with policy.keeping_prefixes(max_rows=4):
        first = policy.sample_tokens([encoded("abc")], seeds=[1])
        longer = [[*encoded("abc"), *first.token_ids[0], *NEW]]
        found = policy.sample_tokens(longer, seeds=[2])
    assert found.token_ids == policy.sample_tokens(longer, seeds=[2]).token_ids


def test_equal_prompts_are_computed_once() -> None:
    policy = policy_of(max_new_tokens=3)
    shapes = forward_shapes(policy.model)
    together = policy.sample_tokens([encoded("abc")] * 3, seeds=[1, 2, 3])
    assert shapes[0] == (1, 3)
    apart = [policy.sample_tokens([encoded("abc")], seeds=[seed]).token_ids[0] for seed in (1, 2, 3)]
    assert together.token_ids == apart


@pytest.mark.parametrize(
    ("max_rows", "computed"),
    [(8, [1, 1, 2, 4]), (2, [1, 2, 4, 4])],
    ids=["all rows are kept", "the first abc is dropped"],
)
def test_the_longest_row_is_continued_once_for_each_time_it_was_kept(max_rows: int, computed: list[int]) -> None:
    policy = policy_of(max_new_tokens=1)
    with policy.keeping_prefixes(max_rows=max_rows):
        policy.sample_tokens([encoded(text) for text in ("abc", "ab", "abc")], seeds=range(3), end_token_ids=range(45))
        shapes = forward_shapes(policy.model)
        for text in ("abcd", "abce", "abcf", "abcg"):
            policy.sample_tokens([encoded(text)], seeds=[0])
    assert [columns for _, columns in shapes] == computed
