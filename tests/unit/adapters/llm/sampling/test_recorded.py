"""Decoding by steps of fixed shape: the tokens of `DecodingSampler`, few sizes, and the weights of the last update."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer

from adapters.llm import SampledTokens, SamplingConfig
from adapters.llm.model.causal_lm import CausalLM
from adapters.llm.sampling.decoding import DecodingSampler
from adapters.llm.sampling.recorded import model as recorded_model
from adapters.llm.sampling.recorded import sampler as recorded
from adapters.llm.sampling.recorded.model import FusedNorms
from adapters.llm.sampling.recorded.room import HostReads, NotRecordable
from adapters.llm.sampling.recorded.sampler import RecordedSampler
from tests.support.llm_models import (
    adapted_model,
    character_tokenizer,
    encoded,
    gaps_after_updates,
    policy_of,
    tiny_model,
    trainer_of,
)
from tests.support.tiny_architectures import model_types, tiny_of

TOKENIZER = character_tokenizer()
PROMPTS = [encoded(state) for state in ("12+34=46+abc", "1", "2+2+a")]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "truncated": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
    "all": {"repetition_penalty": 1.2, "min_new_tokens": 3, "xtc_probability": 0.5, "stop": ("a", "1")},
    "likeliest": {"temperature": 0},
}
ENDS = range(1, 6)
"""Tokens that end rows early."""
PLACES = 3e-5
"""Largest difference of log-probs."""


@pytest.fixture
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps grow from 16 to 32 columns, and rows are removed early."""
    monkeypatch.setattr(recorded, "COLUMNS", 16)
    monkeypatch.setattr(recorded, "STEPS_BETWEEN_ENDS", 4)


def sample(sampler: Any, *, ends: Sequence[int] = (1, 7), **settings: Any) -> SampledTokens:
    config = SamplingConfig(**{"max_new_tokens": 20} | settings)
    return sampler.sample(PROMPTS, 3, config, end_token_ids=ends, seeds=range(9))


def assert_as_today(lm: CausalLM, sampler: RecordedSampler, **settings: Any) -> None:
    assert sampler.records
    found, expected = sample(sampler, **settings), sample(DecodingSampler(lm, TOKENIZER, with_entropy=True), **settings)
    assert sampler.records
    assert found.token_ids == expected.token_ids
    assert found.finish_reasons == expected.finish_reasons
    for name in ("behaviour_log_probs", "policy_log_probs", "entropies"):
        for row, other in zip(getattr(found, name), getattr(expected, name), strict=True):
            assert row == pytest.approx(other, abs=PLACES), name


def test_tokens_are_those_of_the_growing_loop_with_every_setting(subtests: pytest.Subtests, small_sizes: None) -> None:
    """Windows of 4 tokens; rows end early; the second sampler decodes 5 and 4 rows."""
    for family in ["qwen3", "gemma2"]:
        lm = CausalLM(tiny_model(family))
        sampler = RecordedSampler(lm, TOKENIZER, with_entropy=True)
        for name, settings in SETTINGS.items():
            with subtests.test(family=family, settings=name):
                assert_as_today(lm, sampler, **settings)
        bounded = RecordedSampler(lm, TOKENIZER, with_entropy=True, max_rows=5)
        assert_as_today(lm, bounded)
        assert max(rows for rows, _ in bounded.sizes) <= 5


@pytest.mark.parametrize("num_sizes", [1, 9])
def test_each_row_is_given_once_when_it_ends(
    monkeypatch: pytest.MonkeyPatch, small_sizes: None, num_sizes: int
) -> None:
    """With room for one size only, the rows that are left are sampled without recordings, and nothing is given again."""
    sampler = RecordedSampler(CausalLM(tiny_model()), TOKENIZER)
    given: list[tuple[Any, ...]] = []
    num_given = []
    real = recorded.recorded_step

    def record(step: Callable[[], None], room: Any) -> Callable[[], None]:
        num_given.append(len(given))
        if len(num_given) > num_sizes:
            raise NotRecordable("it has enough")
        return real(step, room)

    monkeypatch.setattr(recorded, "recorded_step", record)
    sampled = sampler.sample(
        PROMPTS, 3, SamplingConfig(max_new_tokens=20), end_token_ids=ENDS, seeds=range(9),
        on_row=lambda *row: given.append(row),
    )  # fmt: skip
    rows = zip(range(9), sampled.token_ids, sampled.behaviour_log_probs, sampled.finish_reasons, strict=True)
    assert 0 < num_given[1] < 9
    for found, expected in zip(sorted(given), rows, strict=True):
        assert found[:2] == expected[:2]
        assert found[2] == pytest.approx(expected[2], abs=PLACES)
        assert found[3] == expected[3]


@pytest.mark.slow
@pytest.mark.parametrize("model", [tiny_model, partial(tiny_model, "gemma2"), partial(tiny_of, "qwen3_moe")])
def test_each_size_is_one_graph(model: Any, monkeypatch: pytest.MonkeyPatch, small_sizes: None) -> None:
    """Room for 16 rows, then for fewer as rows end, in steps of 16 and 32 columns. A second call compiles nothing."""
    graphs: list[Any] = []

    def counting(graph: Any, inputs: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def compiled(step: Callable[[], None], room: Any) -> Callable[[], None]:
        return torch.compile(step, backend=counting, fullgraph=True, dynamic=False)

    torch._dynamo.reset()
    sampler = RecordedSampler(CausalLM(model()), TOKENIZER)
    expected = sample(sampler, ends=ENDS)
    sizes = set(sampler.sizes)
    sampler.forget()
    monkeypatch.setattr(recorded, "recorded_step", compiled)
    assert sample(sampler, ends=ENDS).token_ids == expected.token_ids
    assert len(graphs) == len(sizes) > 1
    assert sample(sampler, ends=ENDS).token_ids == expected.token_ids
    assert len(graphs) == len(sizes)


@pytest.mark.parametrize(
    ("model", "autocast", "tolerance"),
    [(tiny_model, False, PLACES), (tiny_model, True, 0.3), (partial(tiny_model, dtype=torch.bfloat16), False, 0.3),
     (adapted_model, False, PLACES), (adapted_model, True, 0.3)],
)  # fmt: skip
def test_sampled_equals_scored_after_updates_in_place_and_by_replacement(
    model: Any, autocast: Any, tolerance: Any
) -> None:
    policy = policy_of(model(), sampler="recorded", max_new_tokens=6)
    assert max(gaps_after_updates(policy, ["1+1=", "abc"], autocast=autocast)) < tolerance


def test_recordings_are_made_again_when_weights_or_adapters_change(subtests: pytest.Subtests) -> None:
    model = adapted_model()
    model.add_adapter("second", model.peft_config["default"])
    for name, parameter in model.named_parameters():
        if "lora_B.second" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    lm = CausalLM(model)
    sampler = RecordedSampler(lm, TOKENIZER, with_entropy=True)
    layers = [part for part in model.modules() if isinstance(part, LoraLayer)]
    weight = layers[0].weight
    changes: dict[str, Callable[[], Any]] = {
        "set_adapter": lambda: model.set_adapter("second"),
        "scale_layer": lambda: [layer.scale_layer(0.5) for layer in layers],
        "merge_adapter": model.merge_adapter,
        "unmerge_adapter": model.unmerge_adapter,
        "disable_adapters": model.base_model.disable_adapter_layers,
        "enable_adapters": model.base_model.enable_adapter_layers,
        "data": lambda: setattr(weight, "data", weight.data.clone()),
        "load_state_dict": lambda: model.load_state_dict(
            {name: value.clone() for name, value in model.state_dict().items()}, assign=True
        ),
        "to": lambda: model.to(torch.float64),
    }
    assert_as_today(lm, sampler)
    for name, change in changes.items():
        before = sampler.sizes
        assert_as_today(lm, sampler)
        assert sampler.sizes is before
        change()
        with subtests.test(name):
            assert_as_today(lm, sampler)
            assert sampler.sizes is not before


def test_experts_have_a_fixed_shape_only_in_the_steps() -> None:
    model = tiny_of("qwen3_moe")
    model.set_experts_implementation("eager")
    lm = CausalLM(model)
    assert_as_today(lm, RecordedSampler(lm, TOKENIZER, with_entropy=True))
    assert model.config._experts_implementation == "eager"


def test_a_model_without_experts_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers refuses to set grouped products, the choice on Hopper, for a model without experts."""
    monkeypatch.setattr(recorded_model, "_experts_of_fixed_shape", lambda lm: "grouped_mm")
    lm = CausalLM(tiny_model())
    with pytest.raises(ValueError, match="does not support setting experts"):
        lm.plain.set_experts_implementation("grouped_mm")
    assert_as_today(lm, RecordedSampler(lm, TOKENIZER, with_entropy=True))


FUSED: dict[str, set[str]] = {
    "qwen3": {"Qwen3RMSNorm"}, "llama": {"LlamaRMSNorm"}, "olmo2": {"Olmo2RMSNorm"}, "bamba": {"BambaRMSNorm"},
    "gemma2": set(), "cohere": set(), "qwen3_next": set(),
}  # fmt: skip


@pytest.mark.parametrize(("model_type", "fused"), FUSED.items())
def test_only_norms_that_equal_the_fused_one_are_fused(model_type: Any, fused: Any) -> None:
    """Gemma's weight is an offset from 1, Cohere subtracts the mean, and Qwen 3-Next's gated norm has a second input."""
    lm = CausalLM(tiny_of(model_type))
    norms = FusedNorms(lm)
    with norms.applied():
        changed = {type(layer).__name__ for layer in lm.plain.modules() if "forward" in vars(layer)}
    assert changed == fused
    assert not any("forward" in vars(layer) for layer in lm.plain.modules())


@pytest.mark.parametrize("of_weight", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("of_hidden", [torch.float32, torch.bfloat16])
def test_a_fused_norm_has_the_type_and_values_of_the_norm(of_weight: torch.dtype, of_hidden: torch.dtype) -> None:
    """A hidden state of size 0.001 shows the constant, which is as large as its mean square."""
    lm = CausalLM(tiny_model())
    norm: Any = lm.plain.model.norm.to(of_weight)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2.0, len(norm.weight)))
    hidden = torch.linspace(-1.0, 1.5, len(norm.weight)).repeat(2, 1) * torch.tensor([[1.0], [1e-3]])
    hidden = hidden.to(of_hidden)
    for autocast in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            expected = norm(hidden)
            with FusedNorms(lm).applied():
                found = norm(hidden)
        assert found.dtype == expected.dtype
        is_half = torch.bfloat16 in (of_weight, of_hidden)
        torch.testing.assert_close(found, expected, rtol=2**-7 if is_half else 1e-6, atol=0)


def test_norms_are_fused_whatever_the_default_device_is_and_not_with_a_hook() -> None:
    lm = CausalLM(tiny_model())
    with torch.device("meta"):
        norms = FusedNorms(lm)
    with norms.applied():
        assert "forward" in vars(lm.plain.model.norm)
    lm.plain.model.norm.register_forward_hook(lambda module, arguments, output: output)
    with FusedNorms(lm).applied():
        assert "forward" not in vars(lm.plain.model.norm)
        assert "forward" in vars(lm.plain.model.layers[0].input_layernorm)


def test_an_update_without_memory_releases_the_room() -> None:
    policy = policy_of(sampler="recorded", max_new_tokens=4)
    trainer = trainer_of(policy)
    batch = trainer.collect(["1+1=", "abc"])
    sampler: Any = policy._sampler
    assert sampler.sizes
    failures = [torch.OutOfMemoryError("CUDA out of memory")]

    def fail(module: Any, arguments: Any) -> None:
        if torch.is_grad_enabled() and failures:
            raise failures.pop()

    policy.model.model.register_forward_pre_hook(fail)
    trainer.update(batch)
    assert not failures
    assert not sampler.sizes


def test_what_a_recording_cannot_do_is_found(subtests: pytest.Subtests) -> None:
    values = torch.arange(4.0)
    for name, step in {
        "a value is read": lambda: values.sum().item(),
        "a shape depends on values": lambda: values.nonzero(),
        "a mask selects": lambda: values[values > 1],
        "a list is copied": lambda: values + torch.tensor([1.0, 2.0, 3.0, 4.0]),
        "a device is crossed": lambda: values.to("meta"),
    }.items():
        with subtests.test(name), pytest.raises(NotRecordable, match="between the host and the device"), HostReads():
            step()
    with HostReads():
        values[values.argsort()].clone()[1:] = 0  # indices and numbers are recorded


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("gpt_neo", "no cache of fixed shape"),
        ("qwen3_5_text", "layers have states"),
        ("falcon", "reads or copies values"),
    ],
)
def test_what_cannot_be_recorded_is_sampled_and_said_once(
    model_type: Any, reason: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "grpo"):
        caplog.clear()
        lm = CausalLM(tiny_of(model_type))
        sampler = RecordedSampler(lm, TOKENIZER)
        assert not sampler.records
        for _ in range(2):
            assert sample(sampler).token_ids == sample(DecodingSampler(lm, TOKENIZER)).token_ids
        assert [reason in record.getMessage() for record in caplog.records if record.name == "grpo"] == [True]


@pytest.mark.parametrize(("reason", "give"), {
    "are quantised": lambda lm, patch: patch.setattr(lm.plain, "is_quantized", True, raising=False),
    "are divided among ranks": lambda lm, patch: patch.setattr(recorded_model, "is_divided", lambda plain: True),
    "are on several devices": lambda lm, patch: lm.plain.model.norm.to("meta"),
}.items())  # fmt: skip
def test_weights_that_cannot_be_recorded_are_named(reason: Any, give: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = CausalLM(tiny_model())
    assert recorded_model.obstacle(lm) is None
    give(lm, monkeypatch)
    assert recorded_model.obstacle(lm) == f"its weights {reason}"


def test_weights_that_are_divided_later_are_found_and_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lm = CausalLM(tiny_model())
    sampler = RecordedSampler(lm, TOKENIZER, with_entropy=True)
    assert_as_today(lm, sampler)
    monkeypatch.setattr(recorded_model, "is_divided", lambda plain: True)
    with caplog.at_level(logging.WARNING, "grpo"):
        for _ in range(2):
            assert sample(sampler).token_ids == sample(DecodingSampler(lm, TOKENIZER)).token_ids
    assert ["divided among ranks" in record.getMessage() for record in caplog.records] == [True]
    assert not sampler.sizes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_class_that_is_recorded_draws_the_tokens_of_today(subtests: pytest.Subtests) -> None:
    recorded_types = set()
    for model_type in model_types():
        try:
            lm = CausalLM(tiny_of(model_type))
            lm.check_logits()
        except Exception:  # configs that are not tiny or that are refused
            continue
        sampler = RecordedSampler(lm, TOKENIZER, with_entropy=True)
        if sampler.records:
            with subtests.test(model_type=model_type):
                # no truncation: where a probability is at its bound, rounding decides whether a token is excluded
                assert_as_today(lm, sampler)
                recorded_types.add(model_type)
    assert len(recorded_types) >= 60, sorted(recorded_types)
