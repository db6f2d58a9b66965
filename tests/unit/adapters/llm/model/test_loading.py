"""Models in local folders: precision, quantisation, adapters and saving. The weights that a sampler gets are those that the
trainer computes with."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import peft
import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from adapters.llm import HFOptions, HFPolicy, SamplingConfig
from adapters.llm.model.loading import add_lora, load_model, save_model
from adapters.llm.model.merged_weights import merged_weights
from grpo.errors import ConfigError, ContractError
from tests.support import saved_adapters
from tests.support.llm_models import (
    END,
    FLOAT32_LOG_PROB,
    character_tokenizer,
    completion,
    gradients,
    relative_difference,
    saved_model,
    tiny_model,
)
from tests.support.tiny_architectures import tiny_of

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def base_model() -> Any:
    """A model with sizes that are multiples of 32, which 4-bit packing on a CPU needs."""
    return tiny_model(hidden_size=64, intermediate_size=64, head_dim=16)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved_model(tmp_path / "base", base_model())


@torch.no_grad()
def logits(model: Any) -> Tensor:
    return model(input_ids=TOKENS, use_cache=False).logits


@torch.no_grad()
def disturb(model: Any) -> None:
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.add_(0.05 * torch.randn_like(parameter))


def test_a_model_and_its_tokenizer_are_loaded_from_a_folder(folder: Path) -> None:
    sampling, options = SamplingConfig(max_new_tokens=4), HFOptions(exact_entropy=True)
    policy = HFPolicy.from_pretrained(folder, sampling=sampling, options=options)
    torch.testing.assert_close(logits(policy.model), logits(base_model()))
    assert policy.model.dtype == torch.float32  # the saved data type
    assert policy.tokenizer.eos_token_id == END
    assert policy.sampling.max_new_tokens == 4
    assert policy.sample_actions(["1+1="], 2).scores.entropy is not None
    assert len(policy.get_parameters()) == len(list(policy.model.parameters()))
    assert not isinstance(load_model(folder, lora=False)[0], PeftModel)


def test_precision_attention_and_device_can_be_chosen(folder: Path) -> None:
    model, _ = load_model(str(folder), dtype=torch.bfloat16, attention="eager", device="cpu")
    assert model.dtype == torch.bfloat16
    assert model.config._attn_implementation == "eager"
    assert next(model.parameters()).device.type == "cpu"
    half = saved_model(folder.parent / "half", model)
    assert load_model(half)[0].dtype == torch.bfloat16
    assert load_model(half, dtype=torch.float32)[0].dtype == torch.float32


def test_under_torchrun_a_rank_loads_to_its_own_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **arguments: Any) -> None:
        raise LookupError(arguments["device_map"])  # there is no GPU to load to

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", refuse)
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(LookupError) as loaded:
        load_model(folder)
    assert loaded.value.args == ({"": torch.device("cuda:1")},)


def test_lora_is_added_with_defaults_or_with_a_config(folder: Path) -> None:
    model, _ = load_model(folder, lora=True)
    config = model.peft_config["default"]
    assert (config.r, config.lora_alpha) == (16, 32)
    adapted = {name.split(".")[-1] for name, part in model.named_modules() if hasattr(part, "lora_A")}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert all("lora_" in name for name, parameter in model.named_parameters() if parameter.requires_grad)
    torch.testing.assert_close(logits(model), logits(base_model()))  # the adapter changes nothing yet
    own, _ = load_model(folder, lora=LoraConfig(r=2, target_modules=["q_proj"]))
    assert own.peft_config["default"].r == 2


def test_revision_and_trust_in_remote_code_are_passed_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both apply to the model and to the tokenizer."""
    asked: list[dict[str, Any]] = []

    def remember(result: Any) -> Any:
        return classmethod(lambda cls, name, **options: asked.append({"name": name} | options) or result)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", remember(tiny_model()))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", remember(character_tokenizer()))
    load_model("some/model", revision="abc")
    load_model("some/model", trust_remote_code=True)
    found = [(each["name"], each["revision"], each["trust_remote_code"]) for each in asked]
    assert found == [("some/model", "abc", False)] * 2 + [("some/model", None, True)] * 2


def test_code_that_comes_with_a_model_is_not_executed(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "homemade", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    with pytest.raises(ValueError, match="trust_remote_code"):
        HFPolicy.from_pretrained(folder)
    assert not (folder / "ran").exists()


# Quantised


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("bits", "layer"), [("load_in_4bit", "Linear4bit"), ("load_in_8bit", "Linear8bitLt")])
def test_an_adapter_of_quantised_weights_has_gradients_and_is_saved(
    bits: str, layer: str, folder: Path, tmp_path: Path
) -> None:
    """Sampled, evaluated, scored with gradients, merged, saved by itself. With 4 bits, the merged weights are exact, and the
    gradients are those of a plain model with these weights. On some CPUs, bitsandbytes stores evaluated 4-bit weights in a form
    without a gradient, and training continues without an error."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    quantised: dict[str, Any] = {bits: True, "dtype": torch.float32}
    policy = HFPolicy.from_pretrained(folder, lora=True, sampling=SamplingConfig(max_new_tokens=4), **quantised)
    linear = policy.model.get_base_model().model.layers[0].mlp.up_proj.base_layer
    assert type(linear) is getattr(bitsandbytes.nn, layer)
    if bits == "load_in_4bit":
        assert (linear.weight.quant_type, linear.weight.compress_statistics) == ("nf4", True)
    assert policy.sample_actions(["1+1="], 2).scores is None  # rounding of products depends on the batch
    assert all("lora_" in name for name in policy.get_parameters())
    disturb(policy.model)
    logits(policy.model.eval())

    def slopes(each: HFPolicy) -> dict[str, Tensor]:
        rows = ["abc", "1+1=", "1+1="], [completion(3, 4, 5), completion(6, 7), completion(8)]
        return gradients(each.model, each.train().score_actions(*rows).log_probs.sum())

    found = slopes(policy)  # before the weights are read, which would unpack them
    assert any(bool(slope.any()) for slope in found.values())
    policy.save_pretrained(tmp_path / "merged", merge=True)
    assert relative_difference(slopes(policy), found) < 1e-6
    plain = HFPolicy.from_pretrained(tmp_path / "merged").model
    assert plain.state_dict().keys() == base_model().state_dict().keys()
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    wanted = logits(policy.model.train())
    if bits == "load_in_8bit":
        assert float((logits(plain) - wanted).abs().max()) < 0.1 * float(wanted.abs().max())
    else:
        torch.testing.assert_close(logits(plain), wanted, rtol=1e-4, atol=1e-4)
        with policy.model.disable_adapter():
            plain.load_state_dict(dict(merged_weights(policy.model)))
        other = HFPolicy(add_lora(plain), character_tokenizer())
        other.model.load_state_dict(policy.get_parameters(), strict=False)
        assert relative_difference(found, slopes(other)) < 1e-4
    policy.save_pretrained(tmp_path / "adapter")
    again = HFPolicy.from_pretrained(tmp_path / "adapter", **quantised).eval()
    saved = policy.get_parameters()
    assert all(torch.equal(value, saved[name]) for name, value in again.get_parameters().items())
    torch.testing.assert_close(logits(again.model), logits(policy.eval().model), rtol=0, atol=FLOAT32_LOG_PROB)


@pytest.mark.filterwarnings("ignore")
def test_dora_on_quantised_weights_is_not_merged(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    dora = LoraConfig(r=4, target_modules=["q_proj"], use_dora=True)
    model, tokenizer = load_model(folder, lora=dora, load_in_4bit=True, dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"plain LoRA; the adapter of model\.layers\.0\.self_attn\.q_proj is not"):
        save_model(model, tokenizer, tmp_path / "merged", merge=True)


class Packed(nn.Linear):
    """Behaves like `Linear4bit` on a CPU with AVX512-BF16."""

    support_avx512bf16_for_cpu = True
    """If True, evaluation packs the frozen weight and records it in the weight's state."""

    def forward(self, x: Tensor) -> Tensor:
        if self.support_avx512bf16_for_cpu and not self.training:
            self.weight.quant_state.packing_format_for_cpu = True
        return super().forward(x)


def four_bit_model() -> Any:
    model = base_model()
    layer = model.model.layers[0].mlp
    plain, layer.up_proj = layer.up_proj, Packed(64, 64, bias=False)
    layer.up_proj.weight = plain.weight.requires_grad_(False)
    layer.up_proj.weight.quant_state = SimpleNamespace(packing_format_for_cpu=False)
    return model.eval()


def test_a_quantised_model_is_not_packed_if_the_policy_is_made_before_an_evaluation() -> None:
    """A model that is packed cannot be trained."""
    model = four_bit_model()
    HFPolicy(model, character_tokenizer())
    logits(model.eval())
    linear = model.model.layers[0].mlp.up_proj
    assert not linear.weight.quant_state.packing_format_for_cpu
    model = four_bit_model()
    logits(model)
    with pytest.raises(ConfigError, match=r"packed .* Load the model again, and make the HFPolicy before"):
        HFPolicy(model, character_tokenizer())
    HFPolicy(model.requires_grad_(False), character_tokenizer())


def test_settings_that_exclude_each_other(folder: Path, tmp_path: Path, subtests: pytest.Subtests) -> None:
    adapter = tmp_path / "adapter"
    HFPolicy.from_pretrained(folder, lora=True).save_pretrained(adapter)
    assert isinstance(HFPolicy.from_pretrained(adapter, lora=False).model, PeftModel)
    untrainable = r"quantised weights cannot be trained\. Pass lora=True"
    for of, settings, message in (
        (folder, {"load_in_4bit": True}, untrainable),
        (folder, {"load_in_8bit": True, "lora": False}, untrainable),
        (folder, {"load_in_4bit": True, "load_in_8bit": True, "lora": True}, "exclude each other"),
        (adapter, {"lora": True}, r"already has an adapter, and training continues with it\. Leave out lora"),
    ):
        with subtests.test(settings=settings), pytest.raises(ConfigError, match=message):
            HFPolicy.from_pretrained(of, **settings)


# Round trips


@pytest.mark.filterwarnings("ignore")  # PEFT and transformers warn of what is tested here
def test_a_saved_adapter_gives_the_same_log_probs(folder: Path, tmp_path: Path, subtests: pytest.Subtests) -> None:
    """By itself and merged; also new names, new tokens, adapters of transformers, and a whole model without an adapter."""
    linear = {"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    configs: dict[str, Any] = {
        "lora": LoraConfig(**linear), "dora": LoraConfig(**linear, use_dora=True),
        "pissa": LoraConfig(**linear, init_lora_weights="pissa"),
        "biases and a head": LoraConfig(**linear, bias="all", modules_to_save=["lm_head"]),
        "loha": peft.LoHaConfig(**linear),
        "oft": peft.OFTConfig(r=0, oft_block_size=8, target_modules=["q_proj"], task_type="CAUSAL_LM"),
        "mine": LoraConfig(**linear), "integrated": LoraConfig(**linear), "resized": LoraConfig(**linear), "whole": None,
    }  # fmt: skip
    for name, config in configs.items():
        model, tokenizer = load_model(folder)
        if name == "resized":
            tokenizer.add_tokens(["<one>", "<two>"])
            model.resize_token_embeddings(len(tokenizer))
        if name == "integrated":
            model.add_adapter(config)
        elif config is not None:
            model = peft.get_peft_model(model, config, adapter_name="mine" if name == "mine" else "default")
        disturb(model)
        policy = HFPolicy(model, tokenizer, sampling=SamplingConfig(max_new_tokens=4))
        expected = policy.score_actions(["1+1="], [completion(5, 6, 7)]).log_probs.detach()
        for merge in (False, True):
            with subtests.test(name=name, merge=merge):
                saved, is_adapter = tmp_path / f"{name}-{merge}", config is not None and not merge
                policy.save_pretrained(saved, merge=merge)
                written = {path.name for path in saved.iterdir()} & {"adapter_model.safetensors", "model.safetensors"}
                assert written == {"adapter_model.safetensors" if is_adapter else "model.safetensors"}
                again = HFPolicy.from_pretrained(saved, sampling=policy.sampling)
                assert isinstance(again.model, PeftModel if is_adapter else Qwen3ForCausalLM)
                assert again.tokenizer("1+1=")["input_ids"] == tokenizer("1+1=")["input_ids"]
                found = again.score_actions(["1+1="], [completion(5, 6, 7)]).log_probs.detach()
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
                unchanged = policy.score_actions(["1+1="], [completion(5, 6, 7)]).log_probs.detach()
                torch.testing.assert_close(unchanged, expected, rtol=0, atol=FLOAT32_LOG_PROB)


OUTSIDE = {"LILY", "POLY", "SHADOW", "CPT", *saved_adapters.PROMPTS}
"""Types of adapters that do not act in the decoder's layers alone."""
NO_BYTES = {"ADAMSS", "DELORA", "FROD", "GLORA", "OSF", "PSOFT", "TINYLORA"}
"""Types that PEFT cannot build around quantised weights."""
MERGED = {"LORA", "LN_TUNING", "TRAINABLE_TOKENS"}
"""Types that are merged into quantised weights, or beside them."""
OUTCOMES: dict[str | None, tuple[set[str], set[str], set[str] | None]] = {
    None: (set(), OUTSIDE, {"BEFT", "ADAPTION_PROMPT"}),
    "load_in_4bit": (
        {*NO_BYTES, "DEFT"},
        {*OUTSIDE, "HRA", "LOHA", "LOKR", "PEANUT", "SUPERTUNING"},  # PEFT reads the packed bytes as a matrix
        None,
    ),
    "load_in_8bit": (NO_BYTES, {*OUTSIDE, "SUPERTUNING"}, None),
}
"""By quantisation: the types that PEFT does not build, those that are refused, and those that are not merged (all but `MERGED`
if None). BEFT's biases have no place in layers without a bias."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # PEFT and transformers warn of what is tested here
@pytest.mark.parametrize("bits", OUTCOMES)
def test_every_type_of_adapter_gives_the_same_log_probs_in_a_fresh_process(bits: str | None, tmp_path: Path) -> None:
    quantised = {} if bits is None else {bits: True}
    small = tiny_model("llama", hidden_size=64, intermediate_size=64, num_hidden_layers=1)
    base = saved_model(tmp_path / "base", small)
    written: list[dict[str, Any]] = []
    expected: list[list[float]] = []
    not_built, refused, saved, not_merged = set(), set(), set(), set()
    for name, config in saved_adapters.configs().items():
        model = load_model(base, lora=None if bits is None else True, dtype=torch.float32, **quantised)[0]
        try:
            model = peft.get_peft_model(model.unload() if quantised else model, config)
        except (RuntimeError, TypeError, ValueError):
            not_built.add(name)
            continue
        disturb(model)
        try:
            policy = HFPolicy(model, character_tokenizer(), sampling=saved_adapters.SAMPLING)
        except ContractError:
            refused.add(name)
            continue
        saved.add(name)
        wanted = saved_adapters.log_probs_of(policy)
        for merge in (False, True):
            to = str(tmp_path / f"{name}-{merge}")
            try:
                policy.save_pretrained(to, merge=merge)
            except ConfigError:
                assert merge
                not_merged.add(name)
                continue
            written.append({"name_or_folder": to} | ({} if merge else quantised))
            if merge and bits == "load_in_8bit":
                floats = saved_adapters.with_float_layers(model)
                plain = HFPolicy(floats, character_tokenizer(), sampling=saved_adapters.SAMPLING)
                assert saved_adapters.log_probs_of(plain) == pytest.approx(wanted, rel=0, abs=0.1)
                wanted = saved_adapters.log_probs_of(plain)
            expected.append(wanted)
    assert (not_built, refused) == OUTCOMES[bits][:2]
    assert not_merged == (saved - MERGED if OUTCOMES[bits][2] is None else OUTCOMES[bits][2])
    command = [sys.executable, "-m", "tests.support.saved_adapters", json.dumps(written)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for arguments, wanted, found in zip(written, expected, json.loads(printed), strict=True):
        assert found == pytest.approx(wanted, rel=0, abs=1e-5), arguments


@pytest.mark.filterwarnings("ignore")  # PEFT and transformers warn of what is tested here
def test_tied_weights_stay_tied_unless_they_are_trained_apart(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """Checkpoints of mixtures of experts have other names than their weights in memory."""
    saved_model(tmp_path / "base", tiny_model(tie_word_embeddings=True))
    saved_model(tmp_path / "experts", tiny_of("mixtral", tie_word_embeddings=True))
    linear = {"r": 4, "task_type": "CAUSAL_LM"}
    for base, targets, whole, stays_tied in (
        ("base", ["q_proj"], ["lm_head"], False), ("base", ["q_proj"], ["lm_head", "embed_tokens"], False),
        ("base", ["lm_head"], None, False), ("experts", ["lm_head"], None, False), ("base", ["q_proj"], None, True),
    ):  # fmt: skip
        model, tokenizer = load_model(tmp_path / base)
        model = peft.get_peft_model(model, LoraConfig(**linear, target_modules=targets, modules_to_save=whole))
        disturb(model)
        for merge in (False, True):
            with subtests.test(base=base, targets=targets, whole=whole, merge=merge):
                saved = tmp_path / f"{base}-{targets}-{whole}-{merge}"
                save_model(model, tokenizer, saved, merge=merge)
                again, _ = load_model(saved)
                torch.testing.assert_close(logits(again), logits(model), rtol=1e-4, atol=1e-5)
                if merge:
                    is_tied = again.get_output_embeddings().weight is again.get_input_embeddings().weight
                    assert is_tied == stays_tied


@pytest.mark.filterwarnings("ignore")  # PEFT and transformers warn of what is tested here
@pytest.mark.parametrize("integrated", [False, True])
def test_what_peft_leaves_out_of_an_adapter_is_saved_merged_only(integrated: Any, folder: Path, tmp_path: Path) -> None:
    """Norms that were made trainable beside the adapter are in no folder of an adapter."""
    model, tokenizer = load_model(folder)
    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    if integrated:
        model.add_adapter(config)
    else:
        model = peft.get_peft_model(model, config)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.requires_grad_(True)
    disturb(model)
    with pytest.raises(ConfigError, match=r"PEFT leaves out \d+ parameters .*norm.* merge=True"):
        save_model(model, tokenizer, tmp_path / f"adapter-{integrated}")
    save_model(model, tokenizer, tmp_path / f"merged-{integrated}", merge=True)
    found = logits(load_model(tmp_path / f"merged-{integrated}")[0])
    torch.testing.assert_close(found, logits(model), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # PEFT and transformers warn of what is tested here
def test_what_a_reader_would_not_find_is_refused(tmp_path: Path, subtests: pytest.Subtests) -> None:
    linear = {"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}

    def two() -> Any:
        model = peft.get_peft_model(base_model(), LoraConfig(**linear))
        model.add_adapter("other", LoraConfig(**linear))
        model.base_model.set_adapter(["default", "other"])
        return model

    def quantised_by(method: str) -> Any:
        model = add_lora(base_model())
        quantised = SimpleNamespace(quantization_config=SimpleNamespace(quant_method=method))
        model.get_base_model().hf_quantizer = quantised
        return model

    prompts = peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=1, task_type="CAUSAL_LM")
    cases: list[tuple[Any, bool, str]] = [
        (two(), False, "only one adapter can be saved"),
        (peft.get_peft_model(base_model(), LoraConfig(**linear, lora_bias=True)), True, "PEFT cannot merge the adapter of"),
        (peft.get_peft_model(tiny_model("llama"), prompts), True, "adaption prompts change no weights"),
        *((quantised_by(method), True, f"these are quantised by {method}") for method in ("hqq", "torchao", "gptq")),
    ]  # fmt: skip
    for model, merge, message in cases:
        with subtests.test(message=message), pytest.raises(ConfigError, match=message):
            save_model(model, character_tokenizer(), tmp_path / "refused", merge=merge)


def test_a_merged_model_that_computes_something_else_is_refused(tmp_path: Path) -> None:
    """Mamba reads the weight of `dt_proj` without calling the layer, so an adapter of the layer does not act."""
    config = LoraConfig(r=4, target_modules=["dt_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny_model("mamba"), config)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "lora_" in name:
                value.normal_()
    with pytest.raises(ContractError, match="must give the log-probs of the adapted model"):
        save_model(model, character_tokenizer(), tmp_path / "merged", merge=True)


@pytest.mark.filterwarnings("ignore")  # the layers warn that kernels are missing
@pytest.mark.parametrize(
    ("family", "layers"),
    [("mamba", {"in_proj", "x_proj"}), *((family, {"in_proj"}) for family in ("mamba2", "falcon_h1", "nemotron_h"))],
)
def test_models_with_mamba_layers_get_lora_where_it_acts_and_it_is_saved(
    family: Any, layers: set[str], tmp_path: Path
) -> None:
    model = add_lora(tiny_of(family))
    assert layers <= {name.split(".")[-1] for name, part in model.named_modules() if hasattr(part, "lora_A")}
    disturb(model)
    policy = HFPolicy(model, character_tokenizer(), sampling=SamplingConfig(max_new_tokens=4))
    scores = policy.score_actions(["1+1="], [completion(5, 6, 7)]).log_probs
    slopes = gradients(model, scores.sum())
    assert [name for name, slope in slopes.items() if not slope.any()] == []
    policy.save_pretrained(tmp_path / family, merge=True)
    again = HFPolicy.from_pretrained(tmp_path / family, sampling=policy.sampling)
    found = again.score_actions(["1+1="], [completion(5, 6, 7)]).log_probs
    torch.testing.assert_close(found, scores, rtol=0, atol=1e-5)


# --- merged weights


@torch.no_grad()
def adapted(model: Any, **options: Any) -> Any:
    """A model with random adapters. PEFT starts with B = 0."""
    peft_model = get_peft_model(model, LoraConfig(r=4, lora_alpha=8, **options)).eval()
    for name, parameter in peft_model.named_parameters():
        if parameter.requires_grad and "lora_magnitude_vector" not in name:
            parameter.add_(0.1 * torch.randn_like(parameter))
    return peft_model


ADAPTERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "LoRA, tied embeddings": ("qwen3", {"tie_word_embeddings": True}, {"target_modules": ["q_proj", "down_proj"]}),
    "LoRA of every linear layer": ("qwen3", {}, {"target_modules": "all-linear"}),
    "rank-stabilised LoRA": ("qwen3", {}, {"target_modules": ["v_proj"], "use_rslora": True}),
    "DoRA": ("qwen3", {}, {"target_modules": ["o_proj"], "use_dora": True}),
    "a head that is trained whole": ("qwen3", {}, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "transposed weights": ("gpt2", {}, {"target_modules": ["c_attn"], "fan_in_fan_out": True}),
}


@pytest.mark.parametrize("kind", ADAPTERS)
def test_merged_weights_in_a_plain_model_give_the_adapted_logits(kind: str) -> None:
    family, changes, options = ADAPTERS[kind]
    plain = tiny_model(family, **changes)
    before = logits(plain)
    other = copy.deepcopy(plain)
    model = adapted(plain, **options)
    expected = logits(model)
    assert (expected - before).abs().max() > 0.05  # the adapter has an effect
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    other.load_state_dict(dict(merged_weights(model)), strict=True)

    torch.testing.assert_close(logits(other), expected, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)


def test_a_plain_model_gives_its_own_tensors_under_all_their_names() -> None:
    model = tiny_model(tie_word_embeddings=True)
    weights = dict(merged_weights(model))
    assert weights.keys() == model.state_dict().keys()
    assert weights["lm_head.weight"] is weights["model.embed_tokens.weight"]  # one tensor, two names, no copy
    assert not any(tensor.requires_grad and tensor.grad_fn for tensor in weights.values())


def test_disabled_or_merged_adapters_give_the_weights_of_the_base() -> None:
    model = adapted(tiny_model(), target_modules=["q_proj"])
    base = model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight
    with model.disable_adapter():
        assert dict(merged_weights(model))["model.layers.0.self_attn.q_proj.weight"] is base
    expected = logits(model)
    model.merge_adapter()
    other = tiny_model()
    other.load_state_dict(dict(merged_weights(model)))
    torch.testing.assert_close(logits(other), expected, rtol=1e-4, atol=1e-4)


def test_weights_of_experts_have_the_names_of_their_checkpoint(tmp_path: Path) -> None:
    """In memory, all experts are one tensor. Checkpoints, and engines that read them, have one tensor per expert."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 16, "vocab_size": 24}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "num_key_value_heads": 1}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(num_attention_heads=2, initializer_range=0.2, **sizes, **experts)).eval()
    model.save_pretrained(tmp_path)
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "model.layers.0.mlp.experts.2.gate_proj.weight" in names

    model = adapted(model, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
    weights = dict(merged_weights(model))

    assert weights.keys() == names
    save_file({name: weight.clone() for name, weight in weights.items()}, tmp_path / "model.safetensors")
    other = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(logits(other), logits(model), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*ensure_weight_tying:UserWarning")  # PEFT warns of what is refused
@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_an_adapter_on_one_of_two_tied_weights_is_refused(target: Any) -> None:
    model = get_peft_model(tiny_model(tie_word_embeddings=True), LoraConfig(r=2, target_modules=[target]))
    with pytest.raises(ConfigError, match="one weight for its input embeddings and its output head"):
        dict(merged_weights(model))
