"""Which classes of transformers can be trained: tiny models of real classes, with random weights."""

import re
from typing import Any

import peft
import pytest
import torch

from adapters.llm import HFPolicy
from grpo.errors import ConfigError, ContractError, GRPOError
from tests.support.llm_models import character_tokenizer
from tests.support.scored_architectures import assert_scores_as_alone
from tests.support.tiny_architectures import PAGE, is_of_page, model_types, tiny_of

pytestmark = pytest.mark.filterwarnings("ignore")  # old classes warn of much when they are built
TOKENIZER = character_tokenizer()
DIFFERENT = ["bart", "mbart", "marian", "pegasus", "blenderbot", "mvp", "trocr", "git", "deepseek_v4"]
"""Classes that ignore position ids in a padded batch, or that decode with another result than a forward pass."""


@pytest.mark.parametrize("model_type", DIFFERENT)
def test_models_that_are_wrong_beside_longer_prompts_or_in_decoding_are_refused(model_type: Any) -> None:
    with pytest.raises(ConfigError, match=r"must use the same distribution; with "):
        HFPolicy(tiny_of(model_type), TOKENIZER)


def test_a_reference_that_scores_wrong_beside_longer_prompts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"with BartForCausalLM, .* between scoring in a batch and one forward pass"):
        HFPolicy(tiny_of("llama"), TOKENIZER, reference_model=tiny_of("bart"))


@pytest.mark.parametrize(("model_type", "message"), [
    ("openai-gpt", r"must decode and score as a decoder-only model; OpenAIGPTLMHeadModel raised AttributeError"),
    ("reformer", r"must decode and score as a decoder-only model; ReformerModelWithLMHead raised AttributeError"),
    ("xlm", r"must be causal; the logits of XLMWithLMHeadModel depend on later tokens"),
    ("xlnet", r"must be causal; the logits of XLNetLMHeadModel depend on later tokens"),
    ("bert", r"with BertLMHeadModel they differ, .*encoders have another layer"),
    ("musicgen", r"one token per position; MusicgenForCausalLM has several embeddings"),
])  # fmt: skip
def test_old_classes_and_encoders_are_refused_in_words(model_type: Any, message: Any) -> None:
    with pytest.raises(ContractError, match=message):
        HFPolicy(tiny_of(model_type), TOKENIZER)


@pytest.mark.parametrize(
    "model_type", ["llama4_text", "bloom", "opt", "gpt_neox", "phi3", "deepseek_v3", "qwen3_5_text", "falcon_h1"]
)
def test_windows_states_and_others_are_sampled_and_scored_as_alone(model_type: Any) -> None:
    """Windows and chunks of 4 tokens, Qwen 3.5's layers with states, and Falcon-H1's with attention and states."""
    assert assert_scores_as_alone(model_type)


def test_limits_of_time_steps_hold_in_decoding_too(subtests: pytest.Subtests) -> None:
    """Transformers keeps them where a pass reads several tokens only. Nemotron-H and Zamba 2 always have a lower limit."""
    for model_type in ["nemotron_h", "zamba2"]:
        with subtests.test(model_type=model_type):
            assert assert_scores_as_alone(model_type, scale=30.0, time_step_min=0.1)
    for model_type in ["falcon_h1", "granitemoehybrid", "mamba2"]:
        with subtests.test(model_type=model_type):
            shares = assert_scores_as_alone(model_type, scale=30.0, time_step_limit=(0.1, 0.5))
            assert shares == (model_type != "mamba2")


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
