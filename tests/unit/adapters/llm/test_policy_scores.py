"""`HFPolicy`: scores, their gradients, precision and gradient checkpointing, and which rows are scored in one pass."""

import copy
import itertools
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from adapters.agents import AgentPolicy
from adapters.llm import SamplingConfig, policy_scoring, scoring, token_log_probs
from adapters.llm.micro_batches import FORWARD_COST, plan_by_tokens
from adapters.llm.model.value_head import ValueHead
from grpo import ConfigError
from grpo.errors import ContractError
from tests.support.llm_models import (
    FLOAT32_GRADIENT,
    FLOAT32_LOG_PROB,
    ROWS,
    STATES,
    adapted_model,
    assert_rows,
    completion,
    encoded,
    forward_shapes,
    gradients,
    log_probs_of_rows,
    policy_of,
    relative_difference,
    row_log_probs,
    row_logits,
    tiny_model,
)


def test_the_sampling_temperature_applies_to_scores_and_to_the_reference() -> None:
    policy = policy_of(sampling=SamplingConfig(temperature=0.6), reference_model=tiny_model("llama"))
    assert_rows(policy.score_actions(STATES, ROWS).log_probs, log_probs_of_rows(policy.model, 0.6))
    assert_rows(policy.reference_log_probabilities(STATES, ROWS), log_probs_of_rows(tiny_model("llama"), 0.6))


def test_the_log_probability_of_a_completion_is_the_sum_over_its_tokens() -> None:
    policy = policy_of(tiny_model())
    expected = torch.stack([row.sum() for row in log_probs_of_rows(policy.model)])
    torch.testing.assert_close(policy.get_log_probabilities(STATES, ROWS), expected, atol=4 * FLOAT32_LOG_PROB, rtol=0)


@torch.no_grad()
def test_a_head_in_float32_beside_half_precision_gives_float32_logits_in_sampling_and_scoring() -> None:
    """As TRL's `cast_lm_head_to_fp32`: the expected log-probs come from the hidden states that the head gets, and a product in
    float32. The hidden states themselves are in bfloat16, and kernels of one token and of many round them differently."""
    model, seen = tiny_model(dtype=torch.bfloat16), []
    head = model.get_output_embeddings().float()
    head.register_forward_pre_hook(lambda head, inputs: seen.append(inputs[0]) or (inputs[0].float(),))
    policy = policy_of(model, max_new_tokens=4)
    [[action]] = policy.generate_actions(["1+1="], 1)
    tokens = torch.tensor(action.token_ids)
    sampled_from = torch.cat(seen[-len(tokens) :])
    scores = policy.score_actions(["1+1="], [action])
    assert head.weight.dtype == torch.float32

    def of_tokens(logits: Tensor) -> Tensor:
        return logits.float().log_softmax(1).gather(1, tokens[:, None]).squeeze(1)

    for hidden, found in ((sampled_from, torch.tensor(action.behaviour_log_probs)), (seen[-1], scores.log_probs[0])):
        assert (hidden.dtype, len(hidden)) == (torch.bfloat16, len(tokens))
        expected = of_tokens(hidden.float() @ head.weight.T)
        rounded = of_tokens(hidden @ head.weight.bfloat16().T)
        assert float((expected - rounded).abs().max()) > 1e-3  # what a head in half precision loses
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_truncated_completions_can_be_masked() -> None:
    policy = policy_of(mask_truncated=True, max_new_tokens=20)
    sampled = policy.sample_actions(STATES, 8)
    rows = [action for group in sampled.actions for action in group]
    expected = [0 if action.is_truncated else len(action) for action in rows]
    assert 0 in expected
    assert any(expected)
    assert sampled.mask.sum(1).tolist() == expected
    scores = policy.score_groups(STATES, sampled.actions)
    assert torch.equal(scores.mask, sampled.mask)
    assert not scores.log_probs[~scores.mask].any()
    kept = policy_of(policy.model).score_groups(STATES, sampled.actions)
    counted = kept.log_probs[:, : scores.mask.shape[1]][scores.mask]
    torch.testing.assert_close(scores.log_probs[scores.mask], counted, atol=FLOAT32_LOG_PROB, rtol=0)
    plan = policy.plan_micro_batches([s for s in STATES for _ in range(8)], rows)
    assert sum(map(len, plan)) == len(rows)
    shapes = forward_shapes(policy.model)
    policy.score_groups(STATES, sampled.actions)
    assert shapes[1][1] == max(expected) - 1 < 19  # the masked completions are the longest, and are not forwarded


def test_the_exact_entropy_is_computed_on_request() -> None:
    assert policy_of().score_actions(STATES, ROWS).entropy is None
    policy = policy_of(exact_entropy=True, sampling=SamplingConfig(temperature=1.5))
    entropy = policy.score_actions(STATES, ROWS).entropy
    expected = []
    for state, action in zip(STATES, ROWS, strict=True):
        all_log_probs = (row_logits(policy.model, encoded(state), action.token_ids) / 1.5).log_softmax(1)
        expected.append(-(all_log_probs.exp() * all_log_probs).sum(1))
    assert_rows(entropy, expected)


def test_the_entropy_is_computed_for_scores_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def asking(*args: Any, with_entropy: bool, **options: Any) -> Any:
        asked.append(with_entropy)
        return token_log_probs(*args, with_entropy=with_entropy, **options)

    adapted = policy_of(adapted_model(), exact_entropy=True)
    with_second_model = policy_of(exact_entropy=True, reference_model=tiny_model())
    monkeypatch.setattr(scoring, "token_log_probs", asking)
    adapted.reference_log_probabilities(STATES, ROWS)
    with_second_model.reference_log_probabilities(STATES, ROWS)
    adapted.get_log_probabilities(STATES, ROWS)
    assert asked == [False] * 3
    adapted.score_actions(STATES, ROWS)
    assert asked[3:] == [True]


def test_tokens_are_scored_as_they_were_sampled_and_never_tokenized_again() -> None:
    """The vocabulary has "a", "b" and "ab", so the text of the tokens (a, b) would be tokenized as one token."""
    vocabulary = {"<pad>": 0, "<eos>": 1, "a": 2, "b": 3, "ab": 4}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="a", prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    assert fast("ab")["input_ids"] == [4]
    model = tiny_model(vocab_size=5)
    policy = policy_of(model, tokenizer=fast)
    scores = policy.score_actions(["ab", "ab"], [completion(2, 3), completion(4)])
    assert scores.mask.sum(1).tolist() == [2, 1]
    assert_rows(scores.log_probs, [row_log_probs(model, [4], [2, 3]), row_log_probs(model, [4], [4])])
    sampled = policy.sample_actions(["ab"], 40)
    changed = [action for action in sampled.actions[0] if fast(action.text)["input_ids"] != list(action.token_ids)]
    assert any(3 in action.token_ids and 2 in action.token_ids for action in changed)
    again = policy.score_groups(["ab"], sampled.actions)
    torch.testing.assert_close(again.log_probs, sampled.scores.log_probs, atol=FLOAT32_LOG_PROB, rtol=0)


def test_a_model_in_bfloat16_has_float32_scores_and_no_scores_from_sampling() -> None:
    model = tiny_model(dtype=torch.bfloat16)
    policy = policy_of(model, exact_entropy=True)
    sampled = policy.sample_actions(STATES, 2)
    assert sampled.scores is None
    assert sampled.behaviour_log_probs.dtype == torch.float32
    scores = policy.score_groups(STATES, sampled.actions)
    assert scores.log_probs.dtype == scores.entropy.dtype == torch.float32
    torch.testing.assert_close(scores.log_probs, sampled.behaviour_log_probs, atol=0.2, rtol=0)
    wide = policy_of(copy.deepcopy(model).float()).score_groups(STATES, sampled.actions)
    torch.testing.assert_close(scores.log_probs, wide.log_probs, atol=0.2, rtol=0)
    assert all(slope.dtype == torch.bfloat16 for slope in gradients(model, scores.log_probs.sum()).values())


def test_under_autocast_scores_are_float32_and_sampling_gives_none() -> None:
    policy = policy_of(tiny_model())
    exact = policy.score_actions(STATES, ROWS).log_probs
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert policy.sample_actions(STATES, 2).scores is None
        rounded = policy.score_actions(STATES, ROWS).log_probs
    assert rounded.dtype == torch.float32
    assert 1e-4 < float((rounded - exact).detach().abs().max()) < 0.2
    assert all(slope.dtype == torch.float32 for slope in gradients(policy.model, rounded.sum()).values())


# Gradient checkpointing


@pytest.mark.parametrize(
    ("family", "shape"),
    [*((family, (1, 4 + 3 * 3)) for family in ("qwen3", "llama", "granite", "cohere")), ("mistral", (3, 4 + 4))],
)
def test_gradient_checkpointing_does_not_change_the_gradient(
    family: Any, shape: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """All but Mistral compute a prompt once per pack. Mistral, with its window, computes it for each row and says so once."""
    model = tiny_model(family)
    policy = policy_of(model).train()
    weights = torch.randn(3, 4)
    scores = policy.score_actions(STATES, ROWS)
    expected = gradients(model, (scores.log_probs * weights).sum())
    assert not caplog.records
    model.gradient_checkpointing_enable()
    again = policy.score_actions(STATES, ROWS)
    found = gradients(model, (again.log_probs * weights).sum())
    torch.testing.assert_close(again.log_probs, scores.log_probs, atol=FLOAT32_LOG_PROB, rtol=0)
    assert relative_difference(found, expected) < FLOAT32_GRADIENT
    shapes = forward_shapes(model)
    policy.score_actions(["abcd"] * 3, ROWS)
    policy.eval().score_actions(["abcd"] * 3, ROWS)  # in evaluation mode, all models have a cache
    assert shapes == [shape, (1, 4), (3, 3)]
    said = ["MistralForCausalLM computes the prompt for each row" in record.message for record in caplog.records]
    assert said == [True] * (family == "mistral")


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_does_not_change_the_gradient_of_an_adapter(use_reentrant: Any) -> None:
    model = adapted_model(target_modules="all-linear")
    policy = policy_of(model).train()
    weights = torch.randn(3, 4)
    scores = policy.score_actions(STATES, ROWS)
    expected = gradients(model, (scores.log_probs * weights).sum())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    again = policy.score_actions(STATES, ROWS)
    (again.log_probs * weights).sum().backward()
    found = {name: parameter.grad for name, parameter in policy.get_parameters().items()}
    assert relative_difference(found, expected) < FLOAT32_GRADIENT
    assert all(slope.any() for slope in expected.values())


def test_plans_count_a_shared_prompt_once_and_others_per_row() -> None:
    model = tiny_model("mistral")
    policy = policy_of(model, max_tokens_per_forward=30)
    rows = [completion(*range(2, 7))] * 4
    # shared: 10 + 4 * 5 = 30; not shared: a row is 15
    assert len(policy.plan_micro_batches(["abcdefghij"] * 4, rows)) == 1
    model.gradient_checkpointing_enable()
    policy.train()
    assert len(policy.plan_micro_batches(["abcdefghij"] * 4, rows)) == 2


def test_plans_count_a_prompt_once_per_pack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packs of two rows: 10 + 2 * 5 = 20 positions each, so two packs exceed 30, and 40 holds both."""
    monkeypatch.setattr(policy_scoring, "pack_of_rows", lambda *arguments: ([0, 0, 1, 1], [0, 0]))
    model = tiny_model()
    rows = [completion(*range(2, 7))] * 4
    for limit, expected in ((30, 2), (40, 1)):
        policy = policy_of(model, max_tokens_per_forward=limit).train()
        model.gradient_checkpointing_enable()
        assert len(policy.plan_micro_batches(["abcdefghij"] * 4, rows)) == expected


def test_turns_fit_into_the_model_and_have_no_scores_below_float32() -> None:
    policy, half = policy_of(), policy_of(tiny_model(dtype=torch.bfloat16))
    found, rounded = (each.sample_tokens([encoded("abc")], seeds=[3]) for each in (policy, half))
    assert found.policy_log_probs is found.behaviour_log_probs
    assert rounded.policy_log_probs is None
    with pytest.raises(ContractError, match=r"must fit into the model's 64 positions"):
        policy.sample_tokens([[5] * 64], seeds=[0])


# Micro-batches


def positions(
    part: Sequence[int], prompts: Sequence[int], of_row: Sequence[int], lengths: Sequence[int], shares: bool
) -> int:
    """Positions of one pass with padding: K max P + R max T if prompts are shared, R max(P + T) otherwise."""
    if not shares:
        return len(part) * max(prompts[of_row[row]] + lengths[row] for row in part)
    used = {of_row[row] for row in part}
    return len(used) * max(prompts[prompt] for prompt in used) + len(part) * max(lengths[row] for row in part)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], int, bool]:
    prompts = draw(st.lists(st.integers(1, 300), min_size=1, max_size=4))
    of_row = draw(st.lists(st.integers(0, len(prompts) - 1), min_size=1, max_size=12))
    lengths = draw(st.lists(st.integers(0, 300), min_size=len(of_row), max_size=len(of_row)))
    return prompts, of_row, lengths, draw(st.integers(1, 4000)), draw(st.booleans())


@given(batches())
def test_every_plan_is_a_partition_within_budget_and_no_worse_than_simple_plans(
    batch: tuple[list[int], list[int], list[int], int, bool],
) -> None:
    prompts, of_row, lengths, budget, shares = batch
    plan = plan_by_tokens(prompts, of_row, lengths, budget, shares_prompts=shares)

    def size(part: Sequence[int]) -> int:
        return positions(part, prompts, of_row, lengths, shares)

    assert sorted(row for part in plan for row in part) == list(range(len(of_row)))
    assert all(size(part) <= budget or len(part) == 1 for part in plan)
    for part in plan:  # rows of a prompt are adjacent
        changes = sum(of_row[first] != of_row[second] for first, second in itertools.pairwise(part))
        assert changes == len({of_row[row] for row in part}) - 1
    cost = sum(size(part) + FORWARD_COST for part in plan)
    assert cost <= sum(size([row]) + FORWARD_COST for row in range(len(of_row)))
    everything = range(len(of_row))
    if size(everything) <= budget:
        assert cost <= size(everything) + FORWARD_COST


def test_rows_are_split_only_if_padding_costs_more_than_a_pass() -> None:
    # together 1 * 10 + 4 * 20 = 90 positions; a split would cost 256 for another pass
    assert plan_by_tokens([10], [0] * 4, [20, 1, 5, 20], 1000, shares_prompts=True) == [[0, 3, 2, 1]]
    # together 10 + 4 * 1000 = 4010 + 256; in two passes (10 + 2 * 1000) + (10 + 2 * 1) + 2 * 256 = 2534
    assert plan_by_tokens([10], [0] * 4, [1000, 1, 1, 1000], 10**6, shares_prompts=True) == [[0, 3], [1, 2]]


def test_rows_of_a_shared_prompt_stay_together_and_others_count_it_each() -> None:
    # two groups of three in 2 x (100 + 3 * 10) = 260 positions; a budget of 150 allows one group per pass, not two
    plan = plan_by_tokens([100, 100], [0, 1, 0, 1, 0, 1], [10] * 6, 150, shares_prompts=True)
    assert sorted(map(sorted, plan)) == [[0, 2, 4], [1, 3, 5]]
    # three rows of 100 + 10 are 330 positions: a budget of 329 takes two passes
    assert len(plan_by_tokens([100], [0] * 3, [10] * 3, 330, shares_prompts=False)) == 1
    assert len(plan_by_tokens([100], [0] * 3, [10] * 3, 329, shares_prompts=False)) == 2
    assert len(plan_by_tokens([100], [0] * 3, [10] * 3, 130, shares_prompts=True)) == 1


# --- weights that ranks divide: each layer is called equally often in each pass, and the scores are the same


def test_ranks_compare_how_a_language_model_samples_and_its_reference_model() -> None:
    reference = tiny_model("qwen3")
    usual = policy_of(reference_model=reference)
    hotter = policy_of(sampling=SamplingConfig(max_new_tokens=8, temperature=0.5), reference_model=reference)
    found, other = usual.settings(), hotter.settings()
    assert {name for name in found if found[name] != other[name]} == {"sampling"}
    assert (found["sampling"]["temperature"], other["sampling"]["temperature"]) == (1.0, 0.5)
    assert found["reference_model"].keys() == dict(reference.named_parameters()).keys()
    assert AgentPolicy.settings(SimpleNamespace(policy=usual)).keys() == found.keys()  # an agent says the same


@pytest.mark.parametrize(
    ("family", "kind"), [("qwen3", "Qwen3DecoderLayer"), ("gpt2", "GPT2Block"), ("mamba", "MambaBlock")]
)
def test_the_units_are_the_layers_and_the_modules_around_them(family: str, kind: str) -> None:
    head = ValueHead(16 if family == "mamba" else 32)
    policy = policy_of(tiny_model(family), value_head=head, reference_model=tiny_model(family))
    first, second, *rest = policy.shard_units()
    assert [type(module).__name__ for module in (first, second, *rest[:2])] == [kind] * 4
    assert rest[2:] == [policy.model, policy.value_head, policy.reference_model]
    assert first in list(policy.model.modules())
    assert rest[0] in list(policy.reference_model.modules())


def test_each_scoring_pass_calls_each_layer_twice_whatever_the_rows_are() -> None:
    policy = policy_of(mask_truncated=True)
    batches = [
        (["12", "3+4"], [completion(5), completion(6)]),
        (["12", "12"], [completion(5, 6, 7), completion(9)]),
        (["12"], [completion(5, 6, finish_reason="length")]),  # no token counts
    ]
    expected = [policy.score_actions(*batch) for batch in batches]
    layer = policy.shard_units()[0]
    calls: list[int] = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    for batch, scores in zip(batches, expected, strict=True):
        calls.clear()
        found = policy.score_actions(*batch)
        assert len(calls) == 2
        assert found.mask.tolist() == scores.mask.tolist()
        assert torch.allclose(found.log_probs, scores.log_probs, rtol=0, atol=FLOAT32_LOG_PROB)
    assert not found.mask.any()
    found.log_probs.sum().backward()
    assert layer.self_attn.q_proj.weight.grad.abs().sum() == 0


def test_rows_that_fork_are_scored_without_sharing_what_follows_the_prompt() -> None:
    policy = policy_of(max_tokens_per_forward=8)
    forked = [replace(row, forks=(2,)) for row in (completion(5, 6, 7), completion(5, 6, 8))]
    expected = policy.score_actions(["1", "1"], forked)
    assert [list(rows) for rows in policy.plan_micro_batches(["1", "1"], forked)] == [[0, 1]]
    layer = policy.shard_units()[0]
    calls: list[tuple[int, ...]] = []
    layer.register_forward_hook(lambda module, given, output: calls.append(tuple(given[0].shape[:2])))
    found = policy.score_actions(["1", "1"], forked)
    assert calls == [(1, 1), (2, 2)]  # the prompt, and both rows but for their last token
    assert torch.allclose(found.log_probs, expected.log_probs, rtol=0, atol=FLOAT32_LOG_PROB)


def test_an_agent_is_not_divided() -> None:
    message = r"AgentPolicy: weights cannot be divided among ranks; got the engine Sharded[.]"
    with pytest.raises(ConfigError, match=message):
        AgentPolicy.shard_units(object())
