"""The auxiliary loss of a mixture of experts is that of transformers for each row alone, whatever shares or pads the rows."""

from typing import Any

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from adapters.llm import Completion, HFPolicy, SamplingConfig
from grpo.errors import ConfigError
from tests.support.llm_models import (
    character_tokenizer,
    completion,
    gradients,
    hf_policy,
    relative_difference,
    trainer_of,
)
from tests.support.tiny_architectures import tiny_of

TOKENIZER = character_tokenizer()
COEF = 0.5
STATES = ["1+1=", "12+30=?"]
GROUPS = [[completion(5, 6, 7, 9), completion(9, 5)], [completion(4, 12, 30), completion(6, finish_reason="length")]]
WEIGHTS = torch.tensor([1.0, 2.0, 3.0, 4.0])


def policy_of(model_type: str = "mixtral", **options: Any) -> HFPolicy:
    sampling = SamplingConfig(max_new_tokens=4)
    return hf_policy(tiny_of(model_type), TOKENIZER, sampling=sampling, router_aux_loss_coef=COEF, **options)


def row_losses(policy: HFPolicy, groups: list[list[Completion]]) -> torch.Tensor:
    """[N]: transformers' loss of each row alone, over the positions that predict tokens of the completion."""
    model, losses = policy.model, []
    for state, group in zip(STATES, groups, strict=True):
        prompt = TOKENIZER(state)["input_ids"]
        for action in group:
            row = torch.tensor([[*prompt, *action.token_ids]])
            counted = torch.zeros_like(row)
            counted[0, len(prompt) - 1 : -1] = 1
            routers = model(input_ids=row, use_cache=False, output_router_logits=True).router_logits
            losses.append(load_balancing_loss_func(routers, model.num_experts, model.num_experts_per_tok, counted))
    return torch.stack(losses)


def assert_as_rows_alone(policy: HFPolicy, groups: list[list[Completion]] = GROUPS) -> None:
    policy.train()
    scores = policy.score_groups(STATES, groups)
    counts = scores.mask.sum(1)
    means = (scores.auxiliary_loss * scores.mask).sum(1) / counts
    expected = COEF * row_losses(policy, groups)
    torch.testing.assert_close(means, expected, rtol=1e-5, atol=1e-5)
    found = gradients(policy.model, (means * WEIGHTS).sum())
    slopes = gradients(policy.model, (expected * WEIGHTS).sum())
    assert any(bool(slope.any()) for name, slope in slopes.items() if name.endswith(("gate.weight", "router.weight")))
    assert relative_difference(found, slopes) < 1e-4


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_values_and_gradients_are_those_of_transformers_for_each_row_alone(model_type: Any) -> None:
    policy = policy_of(model_type)
    assert policy._lm.shares_prompts
    assert_as_rows_alone(policy)


def test_rows_in_packs_whole_rows_and_rows_that_fork_give_the_same(subtests: pytest.Subtests) -> None:
    with subtests.test("gradient checkpointing"):
        policy = policy_of("mixtral")
        policy.model.gradient_checkpointing_enable()
        assert policy.train()._scorer._shares_prompts
        assert_as_rows_alone(policy)
    with subtests.test("whole rows"):
        policy = policy_of("mixtral")
        policy._lm.shares_prompts = False
        assert_as_rows_alone(policy)
    with subtests.test("forks"):
        forked = [Completion(token_ids=(5, 6, end), text="", finish_reason="end", forks=(2,)) for end in (7, 9)]
        assert_as_rows_alone(policy_of("mixtral"), [forked, GROUPS[1]])


def test_tokens_that_do_not_count_have_no_loss() -> None:
    policy = policy_of("mixtral", mask_truncated=True)
    loss = policy.train().score_groups(STATES, GROUPS).auxiliary_loss
    assert loss[3].abs().sum() == 0
    expected = COEF * row_losses(policy, GROUPS)
    torch.testing.assert_close(loss[:3].sum(1) / torch.tensor([4, 2, 3]), expected[:3], rtol=1e-5, atol=1e-5)


def test_hidden_states_keep_their_precision_and_log_probs_do_not_change() -> None:
    with_loss = policy_of("mixtral")
    without = hf_policy(tiny_of("mixtral"), TOKENIZER)
    for dtype in [torch.float32, torch.bfloat16]:
        found, expected = (
            policy.model.to(dtype) and policy.score_groups(STATES, GROUPS) for policy in (with_loss, without)
        )
        assert torch.equal(found.log_probs, expected.log_probs)
        assert expected.auxiliary_loss is None


def test_an_update_has_the_same_loss_and_gradient_in_any_micro_batches() -> None:
    found = []
    for limit in [16_384, 12]:
        policy = policy_of("mixtral", max_tokens_per_forward=limit)
        found.append(trainer_of(policy, learning_rate=1e-3, max_grad_norm=None).step(STATES))
    assert found[0]["train/auxiliary_loss"] == pytest.approx(found[1]["train/auxiliary_loss"], rel=1e-5)
    assert found[0]["train/grad_norm"] == pytest.approx(found[1]["train/grad_norm"], rel=1e-4)
    total = found[0]["train/policy_loss"] + found[0]["train/auxiliary_loss"]
    assert found[0]["train/total_loss"] == pytest.approx(total, rel=1e-5)


def test_a_model_without_routers_is_refused() -> None:
    for model_type in ["llama", "deepseek_v3"]:
        message = r"router_aux_loss_coef=0\.5 needs a mixture of experts whose router logits"
        with pytest.raises(ConfigError, match=message):
            policy_of(model_type)
