"""Scores and gradients of ragged batches, with shared prompts and without, against one forward pass per row."""

from typing import Any

import pytest
import torch
from torch import Tensor

from adapters.llm import Completion, HFOptions, HFPolicy
from adapters.llm.model.causal_lm import CausalLM
from adapters.llm.model.shared_prompts import Rows, hidden_of_whole_rows, hidden_with_shared_prompts, prefill
from grpo.errors import ContractError
from tests.support.llm_models import (
    FAMILIES,
    FLOAT32_GRADIENT,
    FLOAT32_LOG_PROB,
    FLOAT64,
    character_tokenizer,
    completion,
    forward_shapes,
    gradients,
    relative_difference,
    row_log_probs,
    tiny_model,
)

TOKENIZER = character_tokenizer()
STATES = ["12+30=?", "abc", "1+1=", "z"]
LENGTHS = [[5, 0, 9], [1, 3], [12, 1, 2, 7], [0]]  # groups of different sizes, with rows of 0 and 1 tokens


def groups() -> list[list[Completion]]:
    generator = torch.Generator().manual_seed(3)
    return [
        [completion(*torch.randint(2, 40, (length,), generator=generator).tolist()) for length in lengths]
        for lengths in LENGTHS
    ]


def group_major() -> tuple[list[str], list[Completion]]:
    actions = groups()
    states = [state for state, group in zip(STATES, actions, strict=True) for _ in group]
    return states, [action for group in actions for action in group]


def interleaved() -> tuple[list[str], list[Completion]]:
    states, actions = group_major()
    order = torch.randperm(len(states), generator=torch.Generator().manual_seed(1)).tolist()
    return [states[i] for i in order], [actions[i] for i in order]


def regular() -> tuple[list[str], list[Completion]]:
    """Prompts of one length with adjacent groups of one size, which need neither masks nor copies of prompts."""
    rows = [completion(5, 6, 7), completion(8), completion(9, 10, 11, 12), completion(13, 14)]
    return ["abc", "abc", "1+1", "1+1"], rows


ROWS = {"group-major": group_major, "interleaved": interleaved, "regular": regular}


def by_hand(model: Any, states: list[str], actions: list[Completion], width: int, temperature: float) -> Tensor:
    rows = []
    for state, action in zip(states, actions, strict=True):
        values = row_log_probs(model, TOKENIZER(state)["input_ids"], action.token_ids, temperature)
        rows.append(torch.nn.functional.pad(values, (0, width - len(values))))
    return torch.stack(rows)


def assert_scores_are_exact(policy: HFPolicy, model: Any, order: str, precision: float = 1.0) -> None:
    states, actions = ROWS[order]()
    scores = policy.score_actions(states, actions)
    expected = by_hand(model, states, actions, scores.mask.shape[1], policy.sampling.scoring_temperature)
    assert scores.mask.sum(1).tolist() == [len(action) for action in actions]
    assert not scores.log_probs[~scores.mask].any()
    torch.testing.assert_close(scores.log_probs, expected, atol=precision * FLOAT32_LOG_PROB, rtol=0)
    weights = torch.randn(scores.mask.shape, generator=torch.Generator().manual_seed(7), dtype=scores.log_probs.dtype)
    found = gradients(model, (scores.log_probs * weights).sum())
    assert relative_difference(found, gradients(model, (expected * weights).sum())) < precision * FLOAT32_GRADIENT


@pytest.mark.parametrize(("family", "order"), [
    *((family, "group-major") for family in FAMILIES), ("qwen3", "interleaved"), ("mistral", "interleaved"),
    ("qwen3", "regular"), ("mamba", "regular"),
])  # fmt: skip
def test_each_row_is_scored_as_it_is_alone(family: Any, order: Any) -> None:
    model = tiny_model(family)
    assert_scores_are_exact(HFPolicy(model, TOKENIZER), model, order)


@pytest.mark.parametrize("order", ROWS)
def test_scores_in_float64_are_exact_up_to_rounding(order: Any) -> None:
    model = tiny_model("gpt2", dtype=torch.float64)
    assert_scores_are_exact(HFPolicy(model, TOKENIZER), model, order, precision=FLOAT64)


@pytest.mark.parametrize(("family", "attention"), [("gpt2", "eager"), ("qwen3", "eager"), ("qwen3", "sdpa")])
def test_eager_and_sdpa_attention_give_the_same_scores(family: Any, attention: Any) -> None:
    model = tiny_model(family, attn_implementation=attention)
    assert model.config._attn_implementation == attention
    assert_scores_are_exact(HFPolicy(model, TOKENIZER), model, "group-major")


def test_padding_tokens_change_no_hidden_state() -> None:
    """Any tokens may pad a completion on the right."""
    lm = CausalLM(tiny_model(dtype=torch.float64))
    prompts, rows = [[5, 6, 7, 8], [9]], torch.tensor([0, 1])
    tokens = torch.tensor([[10, 11, 0, 0], [12, 13, 14, 15]])
    other = torch.tensor([[10, 11, 33, 34], [12, 13, 14, 15]])
    lengths = torch.tensor([2, 4])
    for of, more in ((hidden_with_shared_prompts, ()), (hidden_of_whole_rows, (lengths,))):
        first, second = of(lm, prompts, rows, tokens, *more), of(lm, prompts, rows, other, *more)
        assert torch.equal(first[0, :2], second[0, :2])
        assert torch.equal(first[1], second[1])


@pytest.mark.parametrize("checkpoints", [False, True])
def test_padding_beyond_the_last_position_changes_no_score(checkpoints: Any) -> None:
    """The model has 12 positions. The first row has 9 + 3 tokens, the second 2 + 10, and padding makes the first longer."""
    model = tiny_model("gpt2", n_positions=12)
    policy = HFPolicy(model, TOKENIZER)
    if checkpoints:
        model.gradient_checkpointing_enable()
        policy.train()
    states, actions = ["abcdefghi", "ab"], [completion(5, 6, 7), completion(*range(2, 12))]
    scores = policy.score_actions(states, actions)
    for row, (state, action) in enumerate(zip(states, actions, strict=True)):
        alone = row_log_probs(model, TOKENIZER(state)["input_ids"], action.token_ids)
        torch.testing.assert_close(scores.log_probs[row, : len(action)], alone, rtol=0, atol=FLOAT32_LOG_PROB)
    message = r"must fit into the model's 12 positions; those at \[1\] need \[13\]"
    with pytest.raises(ContractError, match=message):
        policy.score_actions(states, [actions[0], completion(*range(2, 13))])


def test_a_group_shares_one_forward_pass_over_its_prompt() -> None:
    model = tiny_model()
    shapes = forward_shapes(model)
    policy = HFPolicy(model, TOKENIZER)
    shapes.clear()  # forget the checks of the constructor
    policy.score_actions(["abcdef"] * 5, [completion(4, 5, 6)] * 5)
    assert shapes == [(1, 6), (5, 2)]  # the last token of a completion predicts nothing
    shapes.clear()
    policy.score_groups(["abcdef", "abc"], [[completion(4)] * 2, [completion(5)] * 3])
    assert shapes == [(2, 6)]  # a single token needs the hidden state of the prompt only


def test_uneven_groups_are_scored_as_their_rows() -> None:
    policy = HFPolicy(tiny_model("gpt2", dtype=torch.float64), TOKENIZER)
    by_group = policy.score_groups(STATES, groups())
    by_row = policy.score_actions(*group_major())
    assert torch.equal(by_group.mask, by_row.mask)
    torch.testing.assert_close(by_group.log_probs, by_row.log_probs, atol=FLOAT64 * FLOAT32_LOG_PROB, rtol=0)


def test_whole_rows_are_as_wide_as_the_longest_of_them() -> None:
    """A long prompt with a short completion, and a short prompt with a long one, are 2 rows of 10 and not of 9 + 8."""
    model = tiny_model("mamba")
    policy = HFPolicy(model, TOKENIZER, options=HFOptions(max_tokens_per_forward=20))
    rows = ["abcdefghi", "ab"], [completion(5), completion(*range(2, 10))]
    assert list(map(len, policy.plan_micro_batches(*rows))) == [2]
    shapes = forward_shapes(model)
    policy.score_actions(*rows)
    assert shapes == [(2, 10)]


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_completions_without_a_token_have_scores_of_width_0(family: Any) -> None:
    scores = HFPolicy(tiny_model(family), TOKENIZER).score_actions(["abc", "1"], [completion(), completion()])
    assert scores.log_probs.shape == scores.mask.shape == (2, 0)


GROUPS = [([0, 0, 1, 1, 2, 2], 2), ([0, 1, 2], 1), ([0, 0, 1, 2], None), ([0, 1, 2, 0, 1, 2], None), ([2, 1, 0], None)]


@pytest.mark.parametrize(("prompt", "size"), GROUPS)
def test_only_adjacent_groups_of_one_size_are_regular(prompt: Any, size: Any) -> None:
    assert Rows(torch.tensor(prompt), 3, torch.device("cpu")).group_size == size
    assert Rows(torch.tensor(prompt), 3, torch.device("meta")).group_size == size  # needs no values on the device


@pytest.mark.parametrize("prompt", [[0, 0, 1, 1], [1, 0, 0, 1]])
def test_each_row_joins_the_keys_of_its_prompt_and_its_own(prompt: Any) -> None:
    of_prompts, of_rows = torch.randn(2, 3, 5, 4), torch.randn(4, 3, 2, 4)
    joined = Rows(torch.tensor(prompt), 2, torch.device("cpu")).join(of_prompts, of_rows)
    expected = torch.stack([torch.cat([of_prompts[p], of_rows[row]], 1) for row, p in enumerate(prompt)])
    assert torch.equal(joined, expected)


def test_prompts_are_padded_on_the_left_only_if_their_lengths_differ() -> None:
    lm = CausalLM(tiny_model("gpt2", dtype=torch.float64))
    ragged = prefill(lm, [[5, 6, 7], [8]])
    assert ragged.mask.tolist() == [[True, True, True], [False, False, True]]
    assert ragged.lengths.tolist() == [3, 1]
    alone = prefill(lm, [[8]])
    assert alone.mask is None
    torch.testing.assert_close(ragged.last_hidden[1], alone.last_hidden[0], atol=FLOAT64 * FLOAT32_LOG_PROB, rtol=0)
    torch.testing.assert_close(
        ragged.cache.layers[1].keys[1, :, 2:], alone.cache.layers[1].keys[0], atol=FLOAT64 * FLOAT32_LOG_PROB, rtol=0
    )
