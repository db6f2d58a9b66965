"""Models in local folders: precision, quantisation, adapters and saving."""

import importlib.util
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
from peft import LoraConfig, PeftModel
from torch import Tensor, nn
from transformers import Qwen3ForCausalLM

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
    trainer_of,
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
    """Change all trained parameters."""
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
    assert not isinstance(load_model(folder, lora=False)[0], PeftModel)


def test_revision_and_trust_in_remote_code_are_passed_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both apply to the model and to the tokenizer."""
    asked: list[dict[str, Any]] = []

    def remember(result: Any) -> Any:
        return classmethod(lambda cls, name, **options: asked.append({"name": name} | options) or result)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", remember(tiny_model()))
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", remember(character_tokenizer()))
    load_model("some/model", revision="abc")
    assert [options["name"] for options in asked] == ["some/model"] * 2
    assert [options["revision"] for options in asked] == ["abc"] * 2
    assert [options["trust_remote_code"] for options in asked] == [False] * 2
    asked.clear()
    load_model("some/model", trust_remote_code=True)
    assert [options["trust_remote_code"] for options in asked] == [True] * 2
    assert [options["revision"] for options in asked] == [None] * 2


def test_code_that_comes_with_a_model_is_not_executed(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "homemade", "auto_map": {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "code.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\n")
    with pytest.raises(ValueError, match="trust_remote_code"):
        HFPolicy.from_pretrained(folder)
    assert not (folder / "ran").exists()


def test_a_whole_model_is_saved_and_loaded(folder: Path, tmp_path: Path) -> None:
    policy = HFPolicy.from_pretrained(folder)
    disturb(policy.model)
    policy.save_pretrained(tmp_path / "saved")
    again = HFPolicy.from_pretrained(tmp_path / "saved")
    torch.testing.assert_close(logits(again.model), logits(policy.model), rtol=0, atol=FLOAT32_LOG_PROB)
    assert again.tokenizer("1+1=")["input_ids"] == policy.tokenizer("1+1=")["input_ids"]


def test_an_adapter_is_saved_by_itself_or_merged_as_a_plain_model(folder: Path, tmp_path: Path) -> None:
    policy = HFPolicy.from_pretrained(folder, lora=True)
    disturb(policy.model)
    expected = logits(policy.model)
    assert float((expected - logits(base_model())).abs().max()) > 0.05
    for merge, kind, num_parameters in (
        (False, PeftModel, len(policy.get_parameters())),
        (True, Qwen3ForCausalLM, None),
    ):
        policy.save_pretrained(tmp_path / str(merge), merge=merge)
        written = {path.name for path in (tmp_path / str(merge)).iterdir()}
        assert ("adapter_model.safetensors" in written, "model.safetensors" in written) == (not merge, merge)
        again = HFPolicy.from_pretrained(tmp_path / str(merge))
        assert isinstance(again.model, kind)
        assert num_parameters in (None, len(again.get_parameters()))
        torch.testing.assert_close(logits(again.model), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logits(policy.model), expected, rtol=0, atol=FLOAT32_LOG_PROB)  # it has not changed
    plain = HFPolicy.from_pretrained(folder)
    plain.save_pretrained(tmp_path / "plain", merge=True)  # nothing to merge
    found = logits(load_model(tmp_path / "plain")[0])
    torch.testing.assert_close(found, logits(plain.model), rtol=0, atol=FLOAT32_LOG_PROB)


def test_tied_weights_stay_tied_when_merged(tmp_path: Path) -> None:
    base = saved_model(tmp_path / "base", tiny_model(tie_word_embeddings=True))
    policy = HFPolicy.from_pretrained(base, lora=True)
    disturb(policy.model)
    policy.save_pretrained(tmp_path / "merged", merge=True)
    again, _ = load_model(tmp_path / "merged")
    assert again.lm_head.weight is again.model.embed_tokens.weight
    torch.testing.assert_close(logits(again), logits(policy.model), rtol=1e-4, atol=1e-4)


# Quantised


def test_four_bits_train_an_adapter(folder: Path, tmp_path: Path) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    sampling = SamplingConfig(max_new_tokens=4)
    policy = HFPolicy.from_pretrained(folder, lora=True, load_in_4bit=True, dtype=torch.float32, sampling=sampling)
    linear = policy.model.get_base_model().model.layers[0].mlp.up_proj.base_layer
    assert isinstance(linear, bitsandbytes.nn.Linear4bit)
    assert linear.weight.quant_type == "nf4"
    assert linear.weight.compress_statistics
    assert policy.sample_actions(["1+1="], 2).scores is None  # rounding of products depends on the batch
    with policy.model.disable_adapter():
        base = logits(policy.model)
    before = {name: value.detach().clone() for name, value in policy.get_parameters().items()}
    trainer_of(policy, learning_rate=1e-2).step(["1+1=", "ab"])
    policy.eval()
    assert any(not torch.equal(value, before[name]) for name, value in policy.get_parameters().items())
    assert all("lora_" in name for name in before)
    with policy.model.disable_adapter():
        torch.testing.assert_close(logits(policy.model), base, rtol=0, atol=FLOAT32_LOG_PROB)
    disturb(policy.model)
    policy.save_pretrained(tmp_path / "adapter")
    again = HFPolicy.from_pretrained(tmp_path / "adapter", load_in_4bit=True, dtype=torch.float32).eval()
    saved = policy.get_parameters()
    assert all(torch.equal(value, saved[name]) for name, value in again.get_parameters().items())
    torch.testing.assert_close(logits(again.model), logits(policy.model), rtol=0, atol=FLOAT32_LOG_PROB)
    assert float((logits(again.model) - base).abs().max()) > 0.5


def test_four_bit_weights_have_gradients_after_an_evaluation(folder: Path) -> None:
    """The gradients are those of a plain model with the dequantised weights. On some CPUs, bitsandbytes stores evaluated
    weights in a form without a gradient, and training continues without an error."""
    pytest.importorskip("bitsandbytes")
    policy = HFPolicy.from_pretrained(folder, lora=True, load_in_4bit=True, dtype=torch.float32)
    disturb(policy.model)
    logits(policy.model.eval())

    def slopes(each: HFPolicy) -> dict[str, Tensor]:
        rows = ["abc", "1+1=", "1+1="], [completion(3, 4, 5), completion(6, 7), completion(8)]
        return gradients(each.model, each.train().score_actions(*rows).log_probs.sum())

    found = slopes(policy)  # before the weights are read, which would unpack them
    plain = base_model()
    with policy.model.disable_adapter():
        plain.load_state_dict(dict(merged_weights(policy.model)))
    other = HFPolicy(add_lora(plain), character_tokenizer())
    other.model.load_state_dict(policy.get_parameters(), strict=False)
    assert relative_difference(found, slopes(other)) < 1e-4


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


@pytest.mark.filterwarnings("ignore:MatMul8bitLt:UserWarning")
def test_eight_bits_train_an_adapter_before_and_after_a_merge(folder: Path) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    policy = HFPolicy.from_pretrained(folder, lora=True, load_in_8bit=True, dtype=torch.float32)
    linear = policy.model.get_base_model().model.layers[0].mlp.up_proj.base_layer
    assert isinstance(linear, bitsandbytes.nn.Linear8bitLt)
    rows = ["abc", "1+1="], [completion(3, 4, 5), completion(6, 7)]

    def slopes() -> dict[str, torch.Tensor]:
        return gradients(policy.model, policy.train().score_actions(*rows).log_probs.sum())

    before = slopes()
    assert any(bool(slope.any()) for slope in before.values())
    assert all(weight.is_floating_point() for _, weight in merged_weights(policy.model))
    assert relative_difference(slopes(), before) < 1e-6


def test_settings_of_quantised_weights_that_exclude_each_other(folder: Path, subtests: pytest.Subtests) -> None:
    untrainable = r"quantised weights cannot be trained\. Pass lora=True"
    for settings, message in (
        ({"load_in_4bit": True}, untrainable),
        ({"load_in_8bit": True, "lora": False}, untrainable),
        ({"load_in_4bit": True, "load_in_8bit": True, "lora": True}, "exclude each other"),
    ):
        with subtests.test(settings=settings), pytest.raises(ConfigError, match=message):
            HFPolicy.from_pretrained(folder, **settings)


def test_a_folder_with_an_adapter_takes_no_second_one(folder: Path, tmp_path: Path) -> None:
    HFPolicy.from_pretrained(folder, lora=True).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ConfigError, match=r"already has an adapter, and training continues with it\. Leave out lora"):
        HFPolicy.from_pretrained(tmp_path / "adapter", lora=True)
    assert isinstance(HFPolicy.from_pretrained(tmp_path / "adapter", lora=False).model, PeftModel)


def test_without_bitsandbytes_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find, missing = importlib.util.find_spec, "bitsandbytes"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == missing else find(name, *rest))
    with pytest.raises(ImportError, match=r'pip install "\.\[llm-4bit\]" in the checkout'):
        HFPolicy.from_pretrained(folder, lora=True, load_in_4bit=True)


def test_without_peft_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match=r'LoRA needs PEFT: pip install "\.\[llm\]" in the checkout'):
        add_lora(tiny_model())


# Round trips


@pytest.mark.filterwarnings("ignore")  # PEFT and transformers warn of what is tested here
def test_a_saved_adapter_gives_the_same_log_probs(folder: Path, tmp_path: Path, subtests: pytest.Subtests) -> None:
    """By itself and merged; new names, new tokens and adapters of transformers included."""
    linear = {"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    configs: dict[str, Any] = {
        "lora": LoraConfig(**linear), "dora": LoraConfig(**linear, use_dora=True),
        "pissa": LoraConfig(**linear, init_lora_weights="pissa"),
        "biases and a head": LoraConfig(**linear, bias="all", modules_to_save=["lm_head"]),
        "loha": peft.LoHaConfig(**linear),
        "oft": peft.OFTConfig(r=0, oft_block_size=8, target_modules=["q_proj"], task_type="CAUSAL_LM"),
        "mine": LoraConfig(**linear), "integrated": LoraConfig(**linear), "resized": LoraConfig(**linear),
    }  # fmt: skip
    for name, config in configs.items():
        model, tokenizer = load_model(folder)
        if name == "resized":
            tokenizer.add_tokens(["<one>", "<two>"])
            model.resize_token_embeddings(len(tokenizer))
        if name == "integrated":
            model.add_adapter(config)
        else:
            model = peft.get_peft_model(model, config, adapter_name="mine" if name == "mine" else "default")
        disturb(model)
        policy = HFPolicy(model, tokenizer, sampling=SamplingConfig(max_new_tokens=4))
        expected = policy.score_actions(["1+1="], [completion(5, 6, 7)]).log_probs.detach()
        for merge in (False, True):
            with subtests.test(name=name, merge=merge):
                policy.save_pretrained(tmp_path / f"{name}-{merge}", merge=merge)
                again = HFPolicy.from_pretrained(tmp_path / f"{name}-{merge}", sampling=policy.sampling)
                assert hasattr(again.model, "get_base_model") != merge
                found = again.score_actions(["1+1="], [completion(5, 6, 7)]).log_probs.detach()
                torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


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
def test_tied_weights_that_are_trained_apart_are_saved_untied(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """Checkpoints of mixtures of experts have other names than their weights in memory."""
    saved_model(tmp_path / "base", tiny_model(tie_word_embeddings=True))
    saved_model(tmp_path / "experts", tiny_of("mixtral", tie_word_embeddings=True))
    linear = {"r": 4, "task_type": "CAUSAL_LM"}
    for base, targets, whole in (
        ("base", ["q_proj"], ["lm_head"]), ("base", ["q_proj"], ["lm_head", "embed_tokens"]),
        ("base", ["lm_head"], None), ("experts", ["lm_head"], None),
    ):  # fmt: skip
        model, tokenizer = load_model(tmp_path / base)
        model = peft.get_peft_model(model, LoraConfig(**linear, target_modules=targets, modules_to_save=whole))
        disturb(model)
        for merge in (False, True):
            with subtests.test(base=base, targets=targets, whole=whole, merge=merge):
                saved = tmp_path / f"{base}-{targets}-{whole}-{merge}"
                save_model(model, tokenizer, saved, merge=merge)
                torch.testing.assert_close(logits(load_model(saved)[0]), logits(model), rtol=1e-4, atol=1e-5)


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


@pytest.mark.parametrize("bits", ["load_in_4bit", "load_in_8bit"])
def test_a_merged_model_of_quantised_weights_is_a_plain_model(bits: Any, folder: Path, tmp_path: Path) -> None:
    model, tokenizer = load_model(folder, lora=True, dtype=torch.float32, **{bits: True})
    disturb(model)
    policy = HFPolicy(model, tokenizer)
    policy.save_pretrained(tmp_path / bits, merge=True)
    again = HFPolicy.from_pretrained(tmp_path / bits).model
    assert dict(again.state_dict()).keys() == base_model().state_dict().keys()
    assert "quantization_config" not in json.loads((tmp_path / bits / "config.json").read_text())
    wanted = logits(model)
    assert float((logits(again) - wanted).abs().max()) < 0.1 * float(wanted.abs().max())


@pytest.mark.filterwarnings("ignore")  # PEFT and transformers warn of what is tested here
def test_what_a_reader_would_not_find_is_refused(folder: Path, tmp_path: Path, subtests: pytest.Subtests) -> None:
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


def test_models_with_mamba_layers_get_lora_where_it_acts() -> None:
    model = add_lora(tiny_model("mamba"))
    adapted = {name.split(".")[-1] for name, part in model.named_modules() if hasattr(part, "lora_A")}
    assert adapted == {"in_proj", "x_proj"}


@pytest.mark.filterwarnings("ignore")  # the layers warn that kernels are missing
@pytest.mark.parametrize("family", ["mamba2", "falcon_h1", "nemotron_h"])
def test_lora_of_mamba_2_layers_is_trained_and_saved(family: Any, tmp_path: Path) -> None:
    model = add_lora(tiny_of(family))
    disturb(model)
    policy = HFPolicy(model, character_tokenizer(), sampling=SamplingConfig(max_new_tokens=4))
    scores = policy.score_actions(["1+1="], [completion(5, 6, 7)]).log_probs
    slopes = gradients(model, scores.sum())
    assert [name for name, slope in slopes.items() if not slope.any()] == []
    policy.save_pretrained(tmp_path / family, merge=True)
    again = HFPolicy.from_pretrained(tmp_path / family, sampling=policy.sampling)
    found = again.score_actions(["1+1="], [completion(5, 6, 7)]).log_probs
    torch.testing.assert_close(found, scores, rtol=0, atol=1e-5)
