"""A language model whose weights ranks divide calls its layers equally often in each pass, and gives the same scores."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from adapters.agents import AgentPolicy
from adapters.llm import HFPolicy, SamplingConfig
from adapters.llm.model.value_head import ValueHead
from grpo import ConfigError
from tests.support.llm_models import FLOAT32_LOG_PROB, character_tokenizer, completion, hf_policy, tiny_model


def policy_of(family: str = "qwen3", **options: object) -> HFPolicy:
    return hf_policy(tiny_model(family), character_tokenizer(), **options)


def test_ranks_compare_how_a_language_model_samples_and_its_reference_model() -> None:
    reference = tiny_model("qwen3")
    usual = policy_of(sampling=SamplingConfig(max_new_tokens=4), reference_model=reference)
    hotter = policy_of(sampling=SamplingConfig(max_new_tokens=4, temperature=0.5), reference_model=reference)
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
    policy = policy_of(family, value_head=head, reference_model=tiny_model(family))
    first, second, *rest = policy.shard_units()
    assert [type(module).__name__ for module in (first, second, *rest[:2])] == [kind] * 4
    assert rest[2:] == [policy.model, policy.value_head, policy.reference_model]
    assert first in list(policy.model.modules())
    assert rest[0] in list(policy.reference_model.modules())


def test_each_scoring_pass_calls_each_layer_twice_whatever_the_rows_are() -> None:
    policy = policy_of()
    batches = [
        (["12", "3+4"], [completion(5), completion(6)]),
        (["12", "12"], [completion(5, 6, 7), completion(9)]),
        (["12"], [completion(5, finish_reason="length")]),
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


def test_a_pass_without_tokens_calls_each_layer_twice_and_has_a_gradient() -> None:
    policy = policy_of(mask_truncated=True)
    layer = policy.shard_units()[0]
    calls: list[int] = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    scores = policy.score_actions(["12"], [completion(5, 6, finish_reason="length")])
    assert len(calls) == 2
    assert not scores.mask.any()
    scores.log_probs.sum().backward()
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
