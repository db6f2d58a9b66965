"""`HFPolicy`: references, trained parameters and modes."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from grpo.policy_base import ScoresReference
from tests.support.llm_models import (
    FLOAT32_GRADIENT,
    FLOAT32_LOG_PROB,
    ROWS,
    STATES,
    adapted_model,
    assert_rows,
    character_tokenizer,
    gradients,
    log_probs_of_rows,
    policy_of,
    relative_difference,
    tiny_model,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing.*:FutureWarning",  # PEFT uses the old name
)

TOKENIZER = character_tokenizer()
# References


def test_without_adapter_and_reference_model_there_is_no_reference() -> None:
    assert not isinstance(policy_of(), ScoresReference)
    assert isinstance(policy_of(adapted_model()), ScoresReference)
    assert isinstance(policy_of(reference_model=tiny_model()), ScoresReference)


def test_the_reference_of_an_adapter_is_the_base_model() -> None:
    policy = policy_of(adapted_model())
    reference = policy.reference_log_probabilities(STATES, ROWS)
    assert not reference.requires_grad
    assert_rows(reference, log_probs_of_rows(tiny_model()))
    scores = policy.score_actions(STATES, ROWS)
    assert_rows(scores.log_probs, log_probs_of_rows(policy.model))
    assert float((scores.log_probs - reference).detach().abs().max()) > 0.01


def test_a_reference_model_is_frozen_and_may_have_another_architecture(subtests: pytest.Subtests) -> None:
    """Mistral has sliding windows, so its cache cannot be shared, but the policy's can."""
    for family in ("qwen3", "mistral"):
        with subtests.test(family=family):
            model = tiny_model("llama")
            reference = tiny_model(family).train()
            policy = policy_of(model, reference_model=reference)
            assert_rows(policy.reference_log_probabilities(STATES, ROWS), log_probs_of_rows(tiny_model(family)))
            assert_rows(policy.score_actions(STATES, ROWS).log_probs, log_probs_of_rows(model))
            assert not any(parameter.requires_grad for parameter in reference.parameters())
            assert not reference.training
            assert not policy.train()._reference.model.training
            assert not any(name.startswith("reference") for name in policy.get_parameters())


# Parameters and modes


def test_only_parameters_that_require_a_gradient_are_trained() -> None:
    model = adapted_model()
    names = set(policy_of(model).get_parameters())
    assert names == {name for name, _ in model.named_parameters() if "lora_" in name}
    assert len(names) == 2 * 2  # A and B of two layers


ADAPTERS: list[dict[str, Any]] = [
    {"target_modules": ["q_proj", "lm_head"]},  # the head is not a plain linear layer
    {"target_modules": ["down_proj"], "modules_to_save": ["lm_head"]},
    {"target_modules": "all-linear", "use_dora": True},
]


def test_gradients_of_adapters_are_those_of_single_rows(subtests: pytest.Subtests) -> None:
    for options in ADAPTERS:
        with subtests.test(options=options):
            model = adapted_model(**options)
            policy = policy_of(model)
            weights = torch.randn(3, 4)
            scores = policy.score_actions(STATES, ROWS)
            expected = log_probs_of_rows(model)
            assert_rows(scores.log_probs, expected)
            loss = sum((row * weights[i, : len(row)]).sum() for i, row in enumerate(expected))
            found = gradients(model, (scores.log_probs * weights)[scores.mask].sum())
            assert relative_difference(found, gradients(model, loss)) < FLOAT32_GRADIENT
            assert all(slope.any() for slope in found.values())


def test_train_eval_and_to_apply_to_the_models() -> None:
    model, reference = tiny_model(), tiny_model()
    policy = policy_of(model, reference_model=reference)
    assert policy.train() is policy
    assert model.training
    assert policy.eval() is policy
    assert not model.training
    assert policy.to("meta") is policy
    assert model.device.type == reference.device.type == "meta"


def test_the_reference_has_no_dropout_and_frozen_parts_stay_frozen() -> None:
    """In training mode too. PEFT makes all parts of an adapter trainable when it is switched on again."""
    model = get_peft_model(
        tiny_model(), LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5, init_lora_weights=False)
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    policy = policy_of(model)
    names = policy.get_parameters().keys()
    expected = policy.eval().reference_log_probabilities(STATES, ROWS)
    torch.testing.assert_close(
        policy.train().reference_log_probabilities(STATES, ROWS), expected, rtol=0, atol=FLOAT32_LOG_PROB
    )
    assert model.training
    assert policy.get_parameters().keys() == names


def test_training_weights_of_half_precision_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    policy_of()
    assert not caplog.records
    policy_of(tiny_model(dtype=torch.bfloat16))
    assert [record.message[:60] for record in caplog.records] == [
        "HFPolicy: the trained weights have half precision, so small "
    ]
