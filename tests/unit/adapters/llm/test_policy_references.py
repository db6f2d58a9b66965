"""`HFPolicy`: references, trained parameters and modes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import AdaptionPromptConfig, FourierFTConfig, IA3Config, LoraConfig, TrainableTokensConfig, get_peft_model

from adapters.llm import HFPolicy
from grpo import ObjectiveConfig
from grpo.errors import ConfigError, GRPOWarning
from grpo.policy_base import ScoresReference
from tests.support.llm_models import (
    FLOAT32_GRADIENT,
    FLOAT32_LOG_PROB,
    ROWS,
    STATES,
    adapted_model,
    assert_rows,
    gradients,
    log_probs_of_rows,
    policy_of,
    relative_difference,
    tiny_model,
    trainer_of,
)


def test_without_adapter_and_reference_model_there_is_no_reference() -> None:
    assert not isinstance(policy_of(), ScoresReference)
    assert isinstance(policy_of(adapted_model()), ScoresReference)
    assert isinstance(policy_of(reference_model=tiny_model()), ScoresReference)


KINDS: dict[str, Callable[[], Any]] = {
    "a new LoRA": lambda: get_peft_model(tiny_model(), LoraConfig(r=4, target_modules=["q_proj"])),
    "a LoRA that was trained before": adapted_model, "PiSSA": lambda: adapted_model(init_lora_weights="pissa"),
    "OLoRA with a head": lambda: adapted_model(init_lora_weights="olora", modules_to_save=["lm_head"]),
    "DoRA": lambda: get_peft_model(tiny_model(), LoraConfig(r=4, target_modules=["q_proj"], use_dora=True)),
    "biases outside": lambda: get_peft_model(tiny_model("gpt2"),
        LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, bias="all")),
    "a head outside": lambda: _with_trained_head(get_peft_model(tiny_model(), LoraConfig(target_modules=["q_proj"]))),
    "tokens": lambda: get_peft_model(tiny_model(), TrainableTokensConfig(token_indices=[3, 4, 5, 6])),
    "vectors": lambda: get_peft_model(tiny_model(), IA3Config(target_modules=["q_proj"], feedforward_modules=[])),
    "a random start": lambda: get_peft_model(tiny_model(), FourierFTConfig(target_modules=["q_proj"], n_frequency=20)),
    "adaption prompts": lambda: get_peft_model(tiny_model("llama"),
        AdaptionPromptConfig(adapter_len=4, adapter_layers=1, task_type="CAUSAL_LM")),
    "add_adapter of transformers": lambda: _integrated(tiny_model()),
}  # fmt: skip


def _with_trained_head(model: Any) -> Any:
    model.get_output_embeddings().requires_grad_(True)
    return model


def _integrated(model: Any) -> Any:
    model.add_adapter(LoraConfig(r=4, target_modules=["q_proj"]))
    return model


@torch.no_grad()
def move(policy: HFPolicy) -> None:
    """Change every trained weight."""
    for value in policy.get_parameters().values():
        value.add_(0.1 * torch.randn_like(value))


@pytest.mark.parametrize(("name", "make"), KINDS.items())
def test_the_reference_is_the_policy_as_training_began(name: Any, make: Any) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        policy = policy_of(make().eval())
        start = policy.score_actions(STATES, ROWS).log_probs.detach()
        for _ in range(2):
            move(policy)
            now = policy.score_actions(STATES, ROWS).log_probs.detach()
            assert float((now - start).abs().max()) > 0.01
            found = policy.reference_log_probabilities(STATES, ROWS)
            torch.testing.assert_close(found, start, rtol=0, atol=FLOAT32_LOG_PROB)
            torch.testing.assert_close(policy.score_actions(STATES, ROWS).log_probs.detach(), now, rtol=0, atol=0)
        assert all(value.requires_grad for value in policy.get_parameters().values())


def test_a_new_lora_keeps_no_copy_of_its_weights() -> None:
    copies = {name: len(policy_of(KINDS[name]())._own_reference._start) for name in list(KINDS)[:2]}
    assert copies == {"a new LoRA": 0, "a LoRA that was trained before": 2 * 2}


def test_the_base_model_is_the_reference_on_request_where_it_is_left(subtests: pytest.Subtests) -> None:
    policy = policy_of(adapted_model(), reference="base")
    assert_rows(policy.reference_log_probabilities(STATES, ROWS), log_probs_of_rows(tiny_model()))
    for name, cause in {
        "PiSSA": "init_lora_weights='pissa' has changed the base weights",
        "OLoRA with a head": "init_lora_weights='olora'",
        "biases outside": r"bias.* is trained outside the adapter",
        "a head outside": r"lm_head.weight is trained outside",
    }.items():
        with subtests.test(kind=name), pytest.raises(ConfigError, match=cause):
            policy_of(KINDS[name](), reference="base")
    for options, cause in [
        ({}, "this model has no adapter"),
        ({"reference_model": tiny_model()}, r"options\.reference='base' and reference_model are two"),
    ]:
        with subtests.test(options=options), pytest.raises(ConfigError, match=cause):
            policy_of(reference="base", **options)


def test_a_reference_that_is_not_the_start_is_told_at_the_first_update() -> None:
    """A reference that was asked for is never judged: another model, or the base model."""

    def first_kl(policy: HFPolicy, change: bool = False) -> float:
        if change:
            move(policy)
        trainer = trainer_of(policy, learning_rate=1e-3, objective=ObjectiveConfig(kl_coef=0.1))
        return trainer.step(STATES)["train/kl_mean"]

    for name in ("a LoRA that was trained before", "PiSSA"):
        assert abs(first_kl(policy_of(KINDS[name]()))) < 1e-9
    assert first_kl(policy_of(adapted_model(), reference="base")) > 1e-3
    assert first_kl(policy_of(reference_model=tiny_model("llama"))) > 1e-3
    with pytest.warns(GRPOWarning, match=r"the policy's own reference should be .*Its weights changed after it took"):
        first_kl(policy_of(adapted_model()), change=True)


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_a_reference_model_is_frozen_and_may_have_another_architecture(family: Any) -> None:
    """Mistral has sliding windows, so its cache cannot be shared, but the policy's can."""
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


@pytest.mark.parametrize("options", ADAPTERS)
def test_gradients_of_adapters_are_those_of_single_rows(options: Any) -> None:
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
    config = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5, init_lora_weights=False)
    model = get_peft_model(tiny_model(), config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    policy = policy_of(model)
    names = policy.get_parameters().keys()
    expected = policy.eval().reference_log_probabilities(STATES, ROWS)
    found = policy.train().reference_log_probabilities(STATES, ROWS)
    torch.testing.assert_close(found, expected, rtol=0, atol=FLOAT32_LOG_PROB)
    assert model.training
    assert policy.get_parameters().keys() == names


def test_training_weights_of_half_precision_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    policy_of()
    assert not caplog.records
    policy_of(tiny_model(dtype=torch.bfloat16))
    [record] = caplog.records
    assert record.message.startswith("HFPolicy: the trained weights have half precision, so small ")
