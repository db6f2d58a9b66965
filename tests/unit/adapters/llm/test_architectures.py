"""Which models can be trained: tiny models of real classes, with random weights; the check that a model samples from the
distribution that it scores; and mixtures of experts below float32."""

import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
from peft import LilyConfig, LoraConfig, PrefixTuningConfig, get_peft_model
from torch import nn
from transformers import Qwen3Model, T5Config, T5ForConditionalGeneration

from adapters.llm import HFPolicy, SamplingConfig
from adapters.llm.model.causal_lm import CausalLM, LogitsPostprocessing
from adapters.llm.sampling.decoding import DecodingSampler
from adapters.llm.scoring import check_scores
from grpo.errors import ConfigError, ContractError, GRPOError
from tests.support.llm_models import (
    FAMILIES,
    character_tokenizer,
    completion,
    forward_shapes,
    tiny_model,
)
from tests.support.scored_architectures import assert_scores_as_alone
from tests.support.tiny_architectures import PAGE, is_of_page, model_types, tiny_of

TOKENIZER = character_tokenizer()


DIFFERENT = ["bart", "mbart", "marian", "pegasus", "blenderbot", "mvp", "trocr", "git", "deepseek_v4"]
"""Classes that ignore position ids in a padded batch, or that decode with another result than a forward pass."""
REFUSED = [
    *((model_type, r"must use the same distribution; with ") for model_type in DIFFERENT),
    # `generate` gives it every new token without the state of the tokens before
    ("rwkv", r"with RwkvForCausalLM, .* differs by [\d.]+ between .* Use another"),
    # keeps its state in its modules, and reads a prompt of one token as the next token of the last batch
    ("recurrent_gemma", r"same distribution; with RecurrentGemmaForCausalLM, the log-prob"),
    ("openai-gpt", r"must decode and score as a decoder-only model; OpenAIGPTLMHeadModel raised AttributeError"),
    ("reformer", r"must decode and score as a decoder-only model; ReformerModelWithLMHead raised AttributeError"),
    ("xlm", r"must be causal; the logits of XLMWithLMHeadModel depend on later tokens"),
    ("xlnet", r"must be causal; the logits of XLNetLMHeadModel depend on later tokens"),
    ("bert", r"with BertLMHeadModel they differ, .*encoders have another layer"),
    ("musicgen", r"one token per position; MusicgenForCausalLM has several embeddings"),
]


@pytest.mark.filterwarnings("ignore")  # old classes warn of much when they are built
@pytest.mark.parametrize(("model_type", "message"), REFUSED)
def test_classes_that_sample_and_score_differently_and_encoders_are_refused_in_words(
    model_type: Any, message: Any
) -> None:
    with pytest.raises((ConfigError, ContractError), match=message):
        HFPolicy(tiny_of(model_type), TOKENIZER)


@pytest.mark.filterwarnings("ignore")
def test_a_reference_that_scores_wrong_beside_longer_prompts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"with BartForCausalLM, .* between scoring in a batch and one forward pass"):
        HFPolicy(tiny_of("llama"), TOKENIZER, reference_model=tiny_of("bart"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "model_type",
    ["llama4_text", "bloom", "opt", "gpt_neox", "phi3", "deepseek_v3", "qwen3_5_text", "qwen3_next", "falcon_h1"],
)
def test_windows_states_and_others_are_sampled_and_scored_as_alone(model_type: Any) -> None:
    """Windows and chunks of 4 tokens, Qwen 3.5's layers with states, and Falcon-H1's with attention and states."""
    assert assert_scores_as_alone(model_type)


@pytest.mark.filterwarnings("ignore")
def test_layers_with_attention_and_states_are_sampled_by_the_loop_of_transformers_too() -> None:
    HFPolicy(tiny_of("falcon_h1"), TOKENIZER, sampler="generate")  # a difference would be refused


@pytest.mark.filterwarnings("ignore")
def test_limits_of_time_steps_hold_in_decoding_too(subtests: pytest.Subtests) -> None:
    """Transformers keeps them where a pass reads several tokens only. Nemotron-H and Zamba 2 always have a lower limit."""
    for model_type in ["nemotron_h", "zamba2"]:
        with subtests.test(model_type=model_type):
            assert assert_scores_as_alone(model_type, scale=30.0, time_step_min=0.1)
    for model_type in ["falcon_h1", "granitemoehybrid", "mamba2"]:
        with subtests.test(model_type=model_type):
            shares = assert_scores_as_alone(model_type, scale=30.0, time_step_limit=(0.1, 0.5))
            assert shares == (model_type != "mamba2")


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_around_a_layer_with_limits_is_added_before_they_apply() -> None:
    """A policy of the plain model puts the limits on the layer that PEFT then wraps."""
    model = tiny_of("nemotron_h", scale=30.0, time_step_min=0.1)
    HFPolicy(model, TOKENIZER)
    config = peft.LoraConfig(target_modules=["in_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    row = torch.arange(8)[None]
    with torch.no_grad():
        HFPolicy(adapted, TOKENIZER)
        limited = adapted(row).logits
        for module in model.modules():
            module._forward_hooks.clear()
        torch.testing.assert_close(limited, adapted(row).logits, rtol=0, atol=1e-4)


ROW_BY_ROW = {"axk2", "deepseek_v32", "dots3_note", "dots3_note_text", "glm_moe_dsa", "hy_v4"}  # indexed attention
ROW_BY_ROW |= {"falcon_mamba", "jamba", "mamba", "mamba2", "minimax"}
"""Types that the page lists as computed row by row."""


def plain_name(model_type: str) -> str:
    """The page writes "Dots 3 Note" and "GLM DSA" for dots3_note, dots3_note_text and glm_moe_dsa."""
    return re.sub(r"[^a-z0-9]|moe|text$", "", model_type.lower())


def test_the_page_names_the_models_that_are_computed_row_by_row() -> None:
    table = PAGE.partition("| models | why |\n|---|---|\n")[2].partition("| with gradient checkpointing")[0]
    names = {plain_name(name) for line in table.splitlines() for name in line.split("|")[1].split(",")}
    assert names == set(map(plain_name, ROW_BY_ROW))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_class_is_scored_as_alone_or_refused_in_words(subtests: pytest.Subtests) -> None:
    shared, whole, refused = set(), set(), {}
    for model_type in model_types():
        try:
            tiny_of(model_type)
        except Exception:  # configs that are not tiny, or that need other packages
            continue
        with subtests.test(model_type=model_type):
            try:
                (shared if assert_scores_as_alone(model_type) else whole).add(model_type)
            except GRPOError as error:
                refused[model_type] = str(error)
    assert len(shared) >= 120, refused
    assert whole == ROW_BY_ROW
    if is_of_page():
        found = re.search(
            r"Of (\d+) tiny models .* (\d+) share prompts, (\d+) compute .*, (\d+) are refused in words", PAGE
        )
        assert found is not None
        counts = len(shared), len(whole), len(refused)
        assert (sum(counts), *counts) == tuple(map(int, found.groups())), refused


# --- the check at construction


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_the_check_changes_neither_the_model_nor_the_random_state(family: Any) -> None:
    """The random state, the mode and `requires_grad` stay the same, and dropout does not disturb the check."""
    model = get_peft_model(tiny_model(family), LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5))
    model.gradient_checkpointing_enable()
    model.train()
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    before = torch.get_rng_state()
    HFPolicy(model, TOKENIZER)
    assert torch.equal(torch.get_rng_state(), before)
    assert model.training
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == trained
    assert all(parameter.grad is None for parameter in model.parameters())


def test_another_sampler_is_not_checked() -> None:
    policy = HFPolicy(tiny_of("rwkv"), TOKENIZER, sampler=SimpleNamespace(sample=None, sync=None))
    assert policy.score_actions(["ab"], [completion(3, 4)]).log_probs.shape == (1, 2)


def test_the_check_takes_eighteen_forward_passes_of_short_rows() -> None:
    """Eight tokens after prompts of 10 and 3 tokens, and two tokens after prompts of one token: drawn, alone, and scored."""
    model = tiny_model()
    shapes = forward_shapes(model)
    lm = CausalLM(model)
    check_scores(lm, DecodingSampler(lm, TOKENIZER))
    drawn = [(2, 10), *[(2, 1)] * 7, (2, 1), (2, 1)]
    assert shapes == [*drawn, (1, 18), (1, 11), (2, 10), (2, 7), (1, 3), (1, 3), (2, 1), (2, 1)]


@pytest.mark.parametrize("positions", [8, 9, 17])
def test_the_check_fits_into_a_model_of_few_positions(positions: Any) -> None:
    HFPolicy(tiny_model("gpt2", n_positions=positions), TOKENIZER)


# --- mixtures of experts below float32


PROMPTS = ["1+1=", "12+30=?"]


def experts(model_type: str, dtype: torch.dtype, **sampling: Any) -> HFPolicy:
    return HFPolicy(tiny_of(model_type).to(dtype), TOKENIZER, sampling=SamplingConfig(max_new_tokens=4, **sampling))


def reports(policy: HFPolicy, caplog: pytest.LogCaptureFixture, *, times: int = 1) -> list[str]:
    """What the log says if the first token had a log-prob that was 1.5 higher at sampling."""
    caplog.clear()
    for _ in range(times):
        groups = [list(group) for group in policy.sample_actions(PROMPTS, 2).actions]
        first, *rest = groups[0][0].behaviour_log_probs
        groups[0][0] = replace(groups[0][0], behaviour_log_probs=(first + 1.5, *rest))
        policy.score_groups(PROMPTS, groups)
    return [record.getMessage() for record in caplog.records if "experts" in record.getMessage()]


def test_tokens_with_other_experts_are_reported_once_with_the_class(caplog: pytest.LogCaptureFixture) -> None:
    (message,) = reports(experts("mixtral", torch.bfloat16), caplog, times=2)
    assert "MixtralForCausalLM is a mixture of experts in half precision" in message
    assert "differs by up to 1.5, and that of " in message
    assert "ObjectiveConfig(sampler_correction='truncate')" in message


def test_other_models_precisions_and_distributions_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    assert reports(experts("mixtral", torch.float32), caplog) == []
    assert reports(experts("llama", torch.bfloat16), caplog) == []
    assert reports(experts("mixtral", torch.bfloat16, top_k=5), caplog) == []
    with_dropout = experts("mixtral", torch.bfloat16)
    with_dropout.model.dropout = torch.nn.Dropout()
    with_dropout.train()
    assert reports(with_dropout, caplog) == []


def test_scores_after_an_update_are_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    policy = experts("mixtral", torch.bfloat16)
    actions = policy.sample_actions(PROMPTS, 2).actions
    policy.score_groups(PROMPTS, actions)
    moved = [[replace(action, behaviour_log_probs=(0.0,) * len(action)) for action in group] for group in actions]
    caplog.clear()
    policy.score_groups(PROMPTS, moved)
    assert "experts" not in caplog.text


def test_one_token_whose_experts_are_others_is_no_reason_to_refuse_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = CausalLM.log_probs_alone

    def with_others(self: CausalLM, prompt: Any, tokens: Any) -> torch.Tensor:
        return alone(self, prompt, tokens) + torch.tensor([1.7, *[0.0] * (len(tokens) - 1)])

    monkeypatch.setattr(CausalLM, "log_probs_alone", with_others)
    monkeypatch.setattr("adapters.llm.scoring.CHECKED_LENGTHS", [((10, 3), 8)])
    experts("mixtral", torch.bfloat16)
    for model_type, dtype in (("llama", torch.bfloat16), ("mixtral", torch.float32)):
        with pytest.raises(ConfigError, match=r"must use the same distribution"):
            experts(model_type, dtype)


# --- the parts of a causal language model


POSTPROCESSING = [
    ({}, [2.0, -8.0], [2.0, -8.0]),
    ({"logits_scaling": 4.0}, [2.0, -8.0], [0.5, -2.0]),  # Granite divides
    ({"logit_scale": 0.25}, [2.0, -8.0], [0.5, -2.0]),  # Cohere multiplies
    ({"final_logit_softcapping": 2.0}, [2.0, 0.0], [2 * 0.76159416, 0.0]),  # Gemma: 2 tanh(2 / 2)
    ({"final_logit_softcapping": None, "logit_scale": None}, [1.0, 2.0], [1.0, 2.0]),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plain_linear_head_stays_one(family: Any) -> None:
    """It has its gradient in blocks."""
    assert (type(CausalLM(tiny_model(family)).head) is nn.Linear) == (family not in ("granite", "cohere", "gemma2"))


@pytest.mark.parametrize(("settings", "logits", "expected"), POSTPROCESSING)
def test_logits_are_capped_and_scaled_as_the_config_says(settings: Any, logits: Any, expected: Any) -> None:
    post = LogitsPostprocessing(SimpleNamespace(**settings))
    torch.testing.assert_close(post(torch.tensor(logits)), torch.tensor(expected))
    assert post.is_identity == (logits == expected)


def test_a_model_that_changes_its_logits_after_the_head_is_refused() -> None:
    CausalLM(tiny_of("falcon_h1")).check_logits()
    with pytest.raises(ContractError, match=r"with FalconH1ForCausalLM they differ, .* Report the"):
        CausalLM(tiny_of("falcon_h1", lm_head_multiplier=0.5)).check_logits()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_float32_and_float64_count_as_float32(dtype: Any) -> None:
    assert CausalLM(tiny_model(dtype=dtype)).computes_in_float32 == (dtype in (torch.float32, torch.float64))


def test_longrope_is_limited_to_its_original_length() -> None:
    rotary = {
        "rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 16,
        "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 4.0,
    }  # fmt: skip
    model = tiny_model("llama", rope_parameters=rotary, max_position_embeddings=64)
    assert CausalLM(model).max_positions == 16


@pytest.mark.filterwarnings("ignore")  # PEFT and transformers warn of what is tested here
def test_what_cannot_be_trained_is_refused_for_its_reason(subtests: pytest.Subtests) -> None:
    linear = {"r": 2, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}

    def merged() -> Any:
        model = get_peft_model(tiny_model(), LoraConfig(**linear))
        model.merge_adapter()
        return model

    def compiled_in_place() -> Any:
        model = tiny_model()
        model.compile(backend="eager")
        return model

    def on_two_devices() -> Any:
        model = tiny_model()
        model.hf_device_map = {"model": 0, "lm_head": 1}
        return model

    t5 = T5Config(d_model=16, d_ff=16, num_layers=1, num_heads=2, d_kv=8, vocab_size=50)
    cases: dict[str, Callable[[], Any]] = {
        r"decoder-only .* got T5ForConditionalGeneration\. Load it with": lambda: T5ForConditionalGeneration(t5),
        r"decoder-only .* got Qwen3Model\. Load it with": lambda: Qwen3Model(tiny_model().config),
        "must be on one device": on_two_devices,
        "got aLoRA, which acts only": lambda: get_peft_model(tiny_model(),
            LoraConfig(**linear, alora_invocation_tokens=[5, 6])),
        "got LILY, which mixes its experts": lambda: get_peft_model(tiny_model(), LilyConfig(**linear)),
        "got PREFIX_TUNING, which adds virtual tokens": lambda: get_peft_model(tiny_model(),
            PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")),
        "must not be merged": merged,
        "must not be compiled as a whole": lambda: torch.compile(tiny_model(), backend="eager"),
        r"must not be compiled as a whole.*layer\.compile": compiled_in_place,
        "must not be a PeftMixedModel": lambda: get_peft_model(tiny_model(), LoraConfig(**linear), mixed=True),
        "on the meta device": lambda: tiny_model().to("meta"),
    }  # fmt: skip
    for message, make in cases.items():
        with subtests.test(message=message), pytest.raises(ContractError, match=message):
            CausalLM(make())
