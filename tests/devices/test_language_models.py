"""Language models on a GPU: log-probs, gradients and sampling against the CPU, half precision, adapters and quantisation."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adapters.llm import HFPolicy, SamplingConfig
from adapters.llm.model.causal_lm import CausalLM
from adapters.llm.model.token_log_probs import token_log_probs
from adapters.llm.sampling.decoding import DecodingSampler
from adapters.llm.sampling.recorded.sampler import RecordedSampler
from grpo import GRPOConfig, GRPOTrainer, ObjectiveConfig
from tests.support.llm_models import (
    FAMILIES,
    FLOAT32_GRADIENT,
    FLOAT32_LOG_PROB,
    FLOAT64,
    ROWS,
    STATES,
    assert_rows,
    character_tokenizer,
    encoded,
    gaps_after_updates,
    gradients,
    log_probs_of_rows,
    policy_of,
    relative_difference,
    tiny_model,
)

pytestmark = pytest.mark.slow

TOKENIZER = character_tokenizer()
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    {"repetition_penalty": 1.2, "min_new_tokens": 3, "xtc_probability": 0.5, "stop": ("a", "1")},
    {"temperature": 0},
]


@pytest.fixture(autouse=True)
def full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """No hub, and float32 products without TensorFloat-32, so that errors are those of float32."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert not torch.backends.cuda.matmul.allow_tf32
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def weighted_sum(log_probs: Tensor, mask: Tensor) -> Tensor:
    """A loss in which each step has its own weight."""
    return (log_probs * torch.arange(1.0, log_probs.numel() + 1).reshape(log_probs.shape).to(log_probs))[mask].sum()


def on_cpu(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.cpu() for name, value in values.items()}


@pytest.mark.parametrize(
    ("family", "dtype"), [*((family, torch.float32) for family in FAMILIES), ("gpt2", torch.float64)], ids=str
)
def test_log_probs_and_gradients_are_those_of_single_rows_on_the_cpu(
    family: str, dtype: torch.dtype, device: torch.device
) -> None:
    """GPT-2 for float64: rotary embeddings compute sines in float32, which differ between devices in the last bit."""
    precision = 1.0 if dtype == torch.float32 else FLOAT64
    plain = tiny_model(family, dtype=dtype)
    expected = log_probs_of_rows(plain)
    policy = policy_of(tiny_model(family, dtype=dtype).to(device))
    scores = policy.score_actions(STATES, ROWS)
    assert scores.log_probs.device.type == device.type
    assert_rows(scores.log_probs.cpu(), [row.detach() for row in expected], precision * FLOAT32_LOG_PROB)
    padded = torch.nn.utils.rnn.pad_sequence(expected, batch_first=True)
    slopes = gradients(plain, weighted_sum(padded, scores.mask.cpu()))
    found = on_cpu(gradients(policy.model, weighted_sum(scores.log_probs, scores.mask)))
    assert relative_difference(found, slopes) < precision * FLOAT32_GRADIENT


@pytest.mark.parametrize("loop", ["decoding", "generate", "recorded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_log_probs_are_those_of_scoring(family: str, loop: Any, device: torch.device) -> None:
    policy = policy_of(tiny_model(family).to(device), max_new_tokens=6, sampler=loop)
    sampled = policy.sample_actions(STATES, 5)
    scores = policy.score_groups(STATES, sampled.actions)
    assert sampled.mask.device.type == device.type
    assert torch.equal(sampled.mask, scores.mask)
    sampling, scoring = sampled.behaviour_log_probs[scores.mask], scores.log_probs[scores.mask]
    torch.testing.assert_close(sampling, scoring, rtol=0, atol=FLOAT32_LOG_PROB)
    assert getattr(policy._sampler, "records", True) == ((family, loop) != ("mamba", "recorded"))


def test_a_row_is_drawn_from_its_seed_on_every_device(device: torch.device) -> None:
    """A row's tokens depend on one number of the CPU's generator, so a seed gives the same completions on both devices."""
    completions = []
    for model in (tiny_model(dtype=torch.float64), tiny_model(dtype=torch.float64).to(device)):
        torch.manual_seed(3)
        actions = policy_of(model, max_new_tokens=6).generate_actions(STATES, 4)
        completions.append([one.token_ids for group in actions for one in group])
    assert completions[0] == completions[1]


@pytest.mark.parametrize(("family", "dtype"), [("qwen3", torch.float64), ("gemma2", torch.float32)], ids=str)
def test_recorded_steps_draw_the_tokens_of_the_growing_loop(
    family: str, dtype: torch.dtype, device: torch.device
) -> None:
    """Ragged prompts, rows that end, windows, and every setting. Gemma 2's eager attention has no float64."""
    lm = CausalLM(tiny_model(family, dtype=dtype).to(device))
    samplers = [kind(lm, TOKENIZER, with_entropy=True) for kind in (RecordedSampler, DecodingSampler)]
    prompts = [encoded(state) for state in STATES]
    for settings in SETTINGS:
        config = SamplingConfig(max_new_tokens=40, **settings)
        recorded, growing = (
            sampler.sample(prompts, 3, config, end_token_ids=[1, 7], seeds=range(3 * len(prompts)))
            for sampler in samplers
        )
        assert samplers[0].records
        assert recorded.token_ids == growing.token_ids, settings
        assert recorded.finish_reasons == growing.finish_reasons, settings


@pytest.mark.parametrize("autocast", [False, True])
def test_recordings_follow_updates_in_place_and_by_replacement(autocast: bool, device: torch.device) -> None:
    policy = policy_of(tiny_model().to(device), sampler="recorded", max_new_tokens=6)
    assert max(gaps_after_updates(policy, STATES, autocast=autocast)) < (0.3 if autocast else FLOAT32_LOG_PROB)


def reward(states: Any, actions: Any) -> list[float]:
    """The share of one digit."""
    return [sum(token == 7 for token in one.token_ids) / max(len(one.token_ids), 1) for one in actions]


def trained(policy: HFPolicy, *, steps: int = 3, **settings: Any) -> list[dict[str, float]]:
    config = GRPOConfig(**{"group_size": 8, "learning_rate": 0.003, "seed": 0} | settings)
    return GRPOTrainer(config=config, policy=policy, reward_model=reward).train(STATES, num_iterations=steps)


def test_training_on_the_device_gives_the_weights_of_the_cpu(device: torch.device) -> None:
    """In float64, rounding is too small to change a sampled token, so two steps of Adam end at the same weights."""
    ends = []
    for where in (torch.device("cpu"), device):
        policy = policy_of(tiny_model(dtype=torch.float64), max_new_tokens=5)
        trained(policy, device=str(where))
        assert policy.model.device.type == where.type
        ends.append(on_cpu({name: value.detach() for name, value in policy.get_parameters().items()}))
    start = dict(tiny_model(dtype=torch.float64).named_parameters())
    assert any(not torch.equal(start[name], value) for name, value in ends[0].items())
    assert relative_difference(ends[1], ends[0]) < 1e-6


@pytest.mark.parametrize(
    ("sampler", "settings"),
    [
        ("recorded", {}),
        ("continuous", {}),
        ("decoding", {"autocast_dtype": "bfloat16"}),
        ("decoding", {"autocast_dtype": "float16"}),
        ("decoding", {"micro_batch_size": 3, "batch_size": 12, "num_epochs_per_update": 2}),
    ],
    ids=str,
)
def test_a_model_learns_on_the_device(sampler: Any, settings: dict[str, Any], device: torch.device) -> None:
    if settings.get("autocast_dtype") == "float16" and device.type == "cpu":
        pytest.skip("float16 is for GPUs")
    policy = policy_of(tiny_model(), max_new_tokens=4, sampler=sampler)
    metrics = trained(policy, steps=12, device=str(device), **settings)
    assert all(value.dtype == torch.float32 for value in policy.get_parameters().values())
    assert metrics[-1]["rewards/mean"] > metrics[0]["rewards/mean"] + 0.1


def test_a_half_precision_head_sums_its_gradient_in_float32(device: torch.device) -> None:
    """700 positions take several blocks. Against float64, the sum over blocks is as exact as one rounding to bfloat16."""
    random = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, 64, generator=random).bfloat16() for size in (700, 50_000))
    tokens = torch.randint(len(weight), (len(hidden),), generator=random)
    slopes = []
    for where, dtype in ((torch.device("cpu"), torch.float64), (device, torch.bfloat16)):
        head = torch.nn.Linear(64, len(weight), bias=False, device=where, dtype=dtype)
        head.weight.data.copy_(weight / 8)
        log_probs, _ = token_log_probs(hidden.to(where, dtype), head, tokens.to(where))
        (slope,) = torch.autograd.grad(log_probs.sum(), head.weight)
        slopes.append(slope.cpu().double())
    assert float((slopes[1] - slopes[0]).norm() / slopes[0].norm()) < 2**-8


def test_half_precision_scores_stay_near_those_of_float32(device: torch.device) -> None:
    """bfloat16 has 8 bits: logits of size 20 move by up to 0.1 per rounding."""
    expected = log_probs_of_rows(tiny_model())
    policy = policy_of(tiny_model(dtype=torch.bfloat16).to(device).requires_grad_(False))
    found = policy.score_actions(STATES, ROWS).log_probs
    assert found.dtype == torch.float32
    assert_rows(found.cpu(), [row.detach() for row in expected], 0.5)


def test_an_adapter_is_trained_saved_and_loaded_on_the_device(device: torch.device, tmp_path: Path) -> None:
    base = tiny_model()
    base.save_pretrained(tmp_path / "base")
    character_tokenizer().save_pretrained(tmp_path / "base")
    sampling = SamplingConfig(max_new_tokens=4)
    policy = HFPolicy.from_pretrained(
        tmp_path / "base", lora=True, dtype=torch.float32, device=device, sampling=sampling
    )
    frozen = {
        name: value.detach().clone() for name, value in policy.model.named_parameters() if not value.requires_grad
    }
    reference = policy.reference_log_probabilities(STATES, ROWS)
    trained(policy, learning_rate=0.02)
    policy.eval()
    scores = policy.score_actions(STATES, ROWS).log_probs.detach()
    assert all(torch.equal(frozen[name], value) for name, value in policy.model.named_parameters() if name in frozen)
    torch.testing.assert_close(policy.reference_log_probabilities(STATES, ROWS), reference)
    assert float((scores - reference).abs().max()) > 0.01
    policy.save_pretrained(tmp_path / "adapter")
    for where in (device, torch.device("cpu")):
        again = HFPolicy.from_pretrained(tmp_path / "adapter", dtype=torch.float32, device=where).eval()
        found = again.score_actions(STATES, ROWS).log_probs.cpu()
        torch.testing.assert_close(found, scores.cpu(), rtol=0, atol=2 * FLOAT32_LOG_PROB)


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs bitsandbytes")
@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_model_trains_its_adapter(bits: int, device: torch.device, tmp_path: Path) -> None:
    if bits == 8 and device.type == "cpu":
        pytest.skip("tests of the CPU cover 4 bits")
    model = tiny_model(hidden_size=64, intermediate_size=64, head_dim=16)
    model.save_pretrained(tmp_path / "base")
    character_tokenizer().save_pretrained(tmp_path / "base")
    quantised: dict[str, Any] = {f"load_in_{bits}bit": True, "dtype": torch.float32, "device": device}
    policy = HFPolicy.from_pretrained(
        tmp_path / "base", lora=True, sampling=SamplingConfig(max_new_tokens=4), **quantised
    )
    reference = policy.reference_log_probabilities(STATES, ROWS)
    metrics = trained(policy, steps=10, learning_rate=0.02)
    assert metrics[-1]["rewards/mean"] > metrics[0]["rewards/mean"]
    policy.eval()
    scores = policy.score_actions(STATES, ROWS).log_probs.detach()
    torch.testing.assert_close(policy.reference_log_probabilities(STATES, ROWS), reference, rtol=0, atol=1e-3)
    policy.save_pretrained(tmp_path / "adapter")
    again = HFPolicy.from_pretrained(tmp_path / "adapter", **quantised).eval()
    torch.testing.assert_close(again.score_actions(STATES, ROWS).log_probs.detach(), scores, rtol=0, atol=1e-3)


def test_a_reference_model_is_moved_with_the_policy(device: torch.device) -> None:
    policy = policy_of(tiny_model(), reference_model=tiny_model("llama"), max_new_tokens=4)
    metrics = trained(policy, steps=2, device=str(device), objective=ObjectiveConfig(kl_coef=0.1))
    assert metrics[-1]["train/kl_penalty"] > 0
    found = policy.reference_log_probabilities(STATES, ROWS)
    assert found.device.type == device.type
    assert_rows(found.cpu(), [row.detach() for row in log_probs_of_rows(tiny_model("llama"))])
