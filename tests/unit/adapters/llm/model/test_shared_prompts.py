"""Scores and gradients of ragged batches against one forward pass per row: shared prompts, whole rows, packs and forks."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from adapters.llm import Completion, HFOptions, HFPolicy, ValueHead
from adapters.llm.model.causal_lm import CausalLM
from adapters.llm.model.packed_groups import can_pack, hidden_of_packs, pack_of_rows
from adapters.llm.model.shared_prompts import Rows, hidden_of_whole_rows, prefill
from adapters.llm.model.token_trees import Edges
from grpo.errors import ContractError
from tests.support.llm_models import (
    FAMILIES,
    FLOAT32_GRADIENT,
    FLOAT32_LOG_PROB,
    FLOAT64,
    SHARING,
    character_tokenizer,
    completion,
    encoded,
    forward_shapes,
    gradients,
    policy_of,
    relative_difference,
    row_log_probs,
    tiny_model,
)
from tests.support.tiny_architectures import PAGE, is_of_page, model_types, tiny_of

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


ORDERS = {"group-major": group_major, "interleaved": interleaved, "regular": regular}


def by_hand(model: Any, states: list[str], actions: list[Completion], width: int, temperature: float) -> Tensor:
    rows = []
    for state, action in zip(states, actions, strict=True):
        values = row_log_probs(model, TOKENIZER(state)["input_ids"], action.token_ids, temperature)
        rows.append(torch.nn.functional.pad(values, (0, width - len(values))))
    return torch.stack(rows)


def assert_scores_are_exact(policy: HFPolicy, model: Any, order: str, precision: float = 1.0) -> None:
    states, actions = ORDERS[order]()
    scores = policy.score_actions(states, actions)
    expected = by_hand(model, states, actions, scores.mask.shape[1], policy.sampling.scoring_temperature)
    assert scores.mask.sum(1).tolist() == [len(action) for action in actions]
    assert not scores.log_probs[~scores.mask].any()
    torch.testing.assert_close(scores.log_probs, expected, atol=precision * FLOAT32_LOG_PROB, rtol=0)
    weights = torch.randn(scores.mask.shape, generator=torch.Generator().manual_seed(7), dtype=scores.log_probs.dtype)
    found = gradients(model, (scores.log_probs * weights).sum())
    assert relative_difference(found, gradients(model, (expected * weights).sum())) < precision * FLOAT32_GRADIENT


@pytest.mark.parametrize(("family", "order", "changes"), [
    *((family, "group-major", {}) for family in FAMILIES), ("qwen3", "interleaved", {}), ("mistral", "interleaved", {}),
    ("qwen3", "regular", {}), ("mamba", "regular", {}), ("gpt2", "group-major", {"attn_implementation": "eager"}),
    ("qwen3", "group-major", {"attn_implementation": "eager"}),
    *(("gpt2", order, {"dtype": torch.float64}) for order in ORDERS),
])  # fmt: skip
def test_each_row_is_scored_as_it_is_alone(family: Any, order: Any, changes: Any) -> None:
    model = tiny_model(family, **changes)
    assert_scores_are_exact(HFPolicy(model, TOKENIZER), model, order, precision=FLOAT64 if "dtype" in changes else 1.0)


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
def test_only_adjacent_groups_of_one_size_need_no_copies_of_their_prompts(prompt: Any, size: Any) -> None:
    assert Rows(torch.tensor(prompt), 3, torch.device("meta")).group_size == size  # needs no values on the device


def test_prompts_are_masked_only_if_their_lengths_differ() -> None:
    lm = CausalLM(tiny_model())
    assert prefill(lm, [[5, 6, 7], [8]]).mask.tolist() == [[True, True, True], [False, False, True]]
    assert prefill(lm, [[8], [9]]).mask is None


# --- with gradient checkpointing: a prompt and its completions in one row


PROMPTS = [[5, 6, 7, 8], [9], [1, 2]]
PROMPT_OF_ROW = torch.tensor([0, 1, 0, 1, 0, 2])
TOKENS = torch.arange(24).view(6, 4)


def test_the_cheapest_size_of_packs_by_hand() -> None:
    """H = 10, P = 30, T = 30. Sizes 1, 2 and 3 cost 3 * 60 * (1 + 60 / 60) = 360, 2 * 90 * (1 + 1.5) = 450 and
    120 * (1 + 2) = 360, so the smallest is taken, and for P = 31 they cost 369, 459 and 365. For P = 60 they cost
    3 * 90 * 2.5 = 675, 2 * 120 * 3 = 720 and 150 * 3.5 = 525. A prompt without tokens to share is not packed. A group of 16
    with a long prompt is one pack: 512 + 16 * 63 positions in place of 16 * 575."""
    assert pack_of_rows([30], [0, 0, 0], [30, 30, 30], 10) == ([0, 1, 2], [0, 0, 0])
    assert pack_of_rows([31], [0, 0, 0], [30, 30, 30], 10) == ([0, 0, 0], [0])
    assert pack_of_rows([60], [0, 0, 0], [30, 20, 30], 10) == ([0, 0, 0], [0])
    assert pack_of_rows([1, 60], [0, 1, 0, 1], [30] * 4, 10) == ([0, 2, 1, 2], [0, 0, 1])
    assert pack_of_rows([512], [0] * 16, [63] * 16, 1024)[1] == [0]


@pytest.mark.parametrize("family", ["qwen3", "llama", "gpt2", "granite", "cohere"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_hidden_states_are_those_of_whole_rows(family: str, attention: str) -> None:
    """Uneven groups of prompts of different lengths, and completions of 4, 1 and 0 tokens."""
    model = tiny_model(family, dtype=torch.float64)
    model.set_attn_implementation(attention)
    lm = CausalLM(model)
    assert can_pack(lm)
    for width in (4, 1, 0):
        tokens = TOKENS[:, :width]
        found = hidden_of_packs(lm, PROMPTS, PROMPT_OF_ROW, tokens)
        lengths = torch.full((6,), width)
        expected = hidden_of_whole_rows(lm, PROMPTS, PROMPT_OF_ROW, tokens, lengths)
        # transformers' eager attention has a softmax in float32
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12 if attention == "sdpa" else 1e-5)


def test_what_cannot_be_packed_is_found(subtests: pytest.Subtests) -> None:
    """A bias by distance, a window inside the layers, windows in the cache, states, and attention without a mask of pairs."""
    for model_type in ("bloom", "gpt_neo", "mistral", "qwen3_5_text", "mamba"):
        with subtests.test(model_type=model_type):
            assert not can_pack(CausalLM(tiny_of(model_type)))
    model = tiny_model()
    model.set_attn_implementation("flex_attention")
    assert not can_pack(CausalLM(model))


def test_rows_that_fork_are_packed_with_their_whole_prompt() -> None:
    """Without a cache, nothing behind a prompt is shared."""
    model = tiny_model(dtype=torch.float64)
    policy = policy_of(model).train()
    rows = [Completion(token_ids=(5, 6, 7, last), text="", finish_reason="end", forks=(2,)) for last in (8, 9)]
    expected = policy.score_actions(["abc", "abc"], rows).log_probs
    plan = policy.plan_micro_batches(["abc", "abc"], rows)
    model.gradient_checkpointing_enable()
    found = policy.score_actions(["abc", "abc"], rows).log_probs
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert policy.plan_micro_batches(["abc", "abc"], rows) == plan == [[0, 1]]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_class_that_packs_has_the_gradients_of_whole_rows(subtests: pytest.Subtests) -> None:
    """Prompts of 37 and 5 tokens. The page says how many of the classes of its version of transformers pack."""
    prompts = [[token % 30 + 1 for token in range(37)], [4, 3, 2, 1, 5]]
    packed = set()
    for model_type in model_types():
        try:
            lm = CausalLM(tiny_of(model_type))
            lm.check_logits()
        except Exception:  # configs that are not tiny or that are refused
            continue
        if not (lm.shares_prompts and can_pack(lm)):
            continue
        with subtests.test(model_type=model_type):
            results = []
            for of, more in ((hidden_of_packs, ()), (hidden_of_whole_rows, (torch.full((4,), 4),))):
                hidden = of(lm, prompts, torch.tensor([0, 1, 0, 0]), TOKENS[:4] + 1, *more)
                weights = torch.linspace(-1.0, 1.0, hidden.numel()).view(hidden.shape)
                results.append((hidden, gradients(lm.plain, (hidden * weights).sum())))
            (found, slopes), (expected, expected_slopes) = results
            torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
            assert relative_difference(slopes, expected_slopes) < 1e-3
            packed.add(model_type)
    assert len(packed) >= 70, sorted(packed)
    if is_of_page():
        assert f"{len(packed)} of the tiny models of transformers' classes pack" in PAGE, sorted(packed)


# --- rows that fork: each shared token is computed once


FORKED_STATES = ["12+30=?", "12+30=?", "12+30=?", "abc", "abc", "12+30=?", "z"]
FORKED = [
    ((5, 6, 7, 8, 9, 10), (3, 5)), ((5, 6, 7, 8, 9, 11, 12), (3, 5)), ((5, 6, 7, 20), (3,)),
    ((5, 6, 7, 8), (3,)),  # the same tokens after another prompt
    ((5, 6, 7), (3,)),  # the fork stands at the end
    ((21, 22), ()), ((23,), (1,)),
]  # fmt: skip


def rows_that_fork(sampled: bool = True) -> list[Completion]:
    """Completions in which the second token is context, if there are three or more."""
    rows = [Completion(token_ids=tokens, text="", finish_reason="end", forks=forks) for tokens, forks in FORKED]
    if not sampled:
        return rows
    return [replace(row, sampled=tuple(i != 1 or len(row) < 3 for i in range(len(row)))) for row in rows]


@pytest.mark.parametrize("family", SHARING)
def test_rows_that_fork_have_the_scores_and_gradients_of_single_rows(family: str) -> None:
    policy = policy_of(tiny_model(family))
    weights = torch.randn(len(FORKED), 7, generator=torch.Generator().manual_seed(0))
    scores = policy.score_actions(FORKED_STATES, rows_that_fork())
    expected, total = [], torch.zeros(())
    for state, row, weight in zip(FORKED_STATES, rows_that_fork(), weights, strict=True):
        log_probs = row_log_probs(policy.model, encoded(state), row.token_ids) * torch.tensor(row.sampled)
        expected.append(log_probs.detach())
        total = total + (log_probs * weight[: len(row)]).sum()
    for found, log_probs, mask in zip(scores.log_probs, expected, scores.mask, strict=True):
        torch.testing.assert_close(found[: len(log_probs)], log_probs, atol=FLOAT32_LOG_PROB, rtol=0)
        assert not found[~mask].any()
    slopes = gradients(policy.model, (scores.log_probs * weights).sum())
    assert relative_difference(slopes, gradients(policy.model, total)) < FLOAT32_GRADIENT


def test_tokens_before_a_fork_are_computed_once() -> None:
    """Prompts of 3 tokens, padded on the left to 7. Then the passes of all edges at one depth, padded on the right."""
    policy = policy_of()
    shapes = forward_shapes(policy.model)
    policy.score_actions(FORKED_STATES, rows_that_fork())
    # depth 0: 5 6 7 after "12+30=?", 5 6 7 after "abc", 21 22, 23; depth 1: 8 9, 20, and 8 after "abc"; depth 2: 10, 11 12
    assert shapes == [(3, 7), (4, 3), (3, 2), (2, 2)]


def test_entropies_and_masked_rows_follow_the_rows() -> None:
    policy = policy_of(exact_entropy=True, mask_truncated=True)
    actions = rows_that_fork(sampled=False)
    cut = Completion(token_ids=FORKED[1][0], text="", finish_reason="length", forks=FORKED[1][1])
    scores = policy.score_actions(FORKED_STATES, [actions[0], cut, *actions[2:]])
    alone = [Completion(token_ids=row.token_ids, text="", finish_reason="end") for row in actions]
    short = Completion(token_ids=(2,), text="", finish_reason="length")
    expected = policy.score_actions(FORKED_STATES, [alone[0], short, *alone[2:]])
    assert torch.equal(scores.mask, expected.mask)
    for name in ("log_probs", "entropy"):
        found: Any = getattr(scores, name)
        torch.testing.assert_close(found, getattr(expected, name), atol=FLOAT32_LOG_PROB, rtol=0)
    assert not scores.mask[1].any()


def test_the_model_may_be_at_its_last_position() -> None:
    """The padding of a short edge after a long one would be behind it."""
    policy = policy_of(tiny_model("gpt2"))
    longest = 64 - len("abc")
    tokens = tuple(5 + i % 30 for i in range(longest))
    forks = [(tokens, longest - 2), ((*tokens[: longest - 2], 9), longest - 2), ((6, *tokens[1:]), 2)]
    rows = [Completion(token_ids=row, text="", finish_reason="end", forks=(fork,)) for row, fork in forks]
    scores = policy.score_actions(["abc"] * 3, rows).log_probs
    for row, log_probs in zip(rows, scores, strict=True):
        expected = row_log_probs(policy.model, encoded("abc"), row.token_ids)
        torch.testing.assert_close(log_probs[: len(row)], expected, atol=FLOAT32_LOG_PROB, rtol=0)


@pytest.mark.parametrize(("family", "changes", "shares"), [
    ("qwen3", {}, True), ("qwen3", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}, False),
    ("mistral", {}, False), ("mistral", {"sliding_window": None}, True), ("mamba", {}, False),
])  # fmt: skip
def test_forks_are_shared_with_full_attention_only(family: Any, changes: Any, shares: bool) -> None:
    """Padding between edges would move a sliding window."""
    assert CausalLM(tiny_model(family, **changes)).shares_forks == shares


def test_edges_are_shared_only_by_rows_that_are_equal_up_to_the_fork() -> None:
    prompt_of_row = torch.tensor([0, 0, 1, 0])
    tokens = [[1, 2, 3], [1, 2, 4], [1, 2, 3], [1, 2, 3]]
    mask = torch.tensor([[True] * 3, [True] * 3, [True] * 3, [False, True, True]])
    edges = Edges.of_rows(prompt_of_row, tokens, mask, [(2,), (2,), (2,), (2,)])
    assert edges.tokens.tolist() == [[1, 2], [3, 0], [4, 0], [1, 2], [3, 0], [1, 2], [3, 0]]
    assert edges.parent.tolist() == [-1, 0, 0, -1, 3, -1, 5]
    assert edges.prompt.tolist() == [0, 0, 0, 1, 1, 0, 0]
    assert edges.lengths.tolist() == [2, 1, 1, 2, 1, 2, 1]
    assert edges.place.tolist() == [[0, 1, 2], [0, 1, 4], [6, 7, 8], [10, 11, 12]]


def test_rows_of_a_tree_are_planned_into_one_pass_where_they_fit() -> None:
    """Two trees with a prompt of 3 and a trunk of 20 tokens, whose 4 rows go on for 5 tokens: 23 + 4 * 5 = 43 positions each.
    Without the forks, it would be 3 + 4 * 25 = 103."""
    actions = [
        Completion(token_ids=(*range(4 + tree, 24 + tree), *(30 + row,) * 5), text="", finish_reason="end", forks=(20,))
        for row in range(4)
        for tree in range(2)
    ]
    policy = policy_of(max_tokens_per_forward=43)
    assert sorted(map(sorted, policy.plan_micro_batches(["abc"] * 8, actions))) == [[0, 2, 4, 6], [1, 3, 5, 7]]


def test_values_and_final_values_follow_the_rows() -> None:
    """Three rows are cut: at a leaf, at a fork where another row goes on, and after a prompt alone."""
    policy = policy_of(tiny_model(), value_head=ValueHead(32, dropout=0.0))
    with torch.no_grad():
        policy.value_head.layers[-1].weight.normal_(generator=torch.Generator().manual_seed(0))
    reasons = ["end", "length", "end", "end", "length", "length", "end"]
    actions = [replace(row, finish_reason=reason) for row, reason in zip(rows_that_fork(), reasons, strict=True)]
    scores = policy.score_actions(FORKED_STATES, actions)
    expected = policy.score_actions(FORKED_STATES, [replace(row, forks=()) for row in actions])
    assert (expected.final_values != 0).tolist() == [reason == "length" for reason in reasons]
    torch.testing.assert_close(scores.final_values, expected.final_values, atol=FLOAT32_LOG_PROB, rtol=0)
    torch.testing.assert_close(scores.values, expected.values, atol=FLOAT32_LOG_PROB, rtol=0)
