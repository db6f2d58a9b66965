"""Sampling with transformers' continuous batching: log-probs of each row alone, and errors in words."""

from typing import Any

import pytest
import torch

from adapters.llm import SampledTokens, SamplingConfig
from adapters.llm.model.causal_lm import CausalLM
from adapters.llm.sampling.continuous import ContinuousSampler
from adapters.llm.sampling.recorded.model import obstacle
from adapters.llm.sampling.samplers import SamplerError
from grpo.errors import ConfigError
from tests.support.llm_models import (
    END,
    FAMILIES,
    FLOAT32_LOG_PROB,
    encoded,
    policy_of,
    row_logits,
    tiny_model,
    trainer_of,
)
from tests.support.tiny_architectures import tiny_of

PROMPTS = [encoded(state) for state in ("1+1=", "12+30=?", "abc")]


def sample(model: Any, *, seed: int = 0, ends: tuple[int, ...] = (END,), max_rows: int | None = None, **settings: Any):
    config = SamplingConfig(**{"max_new_tokens": 9} | settings)
    sampler = ContinuousSampler(CausalLM(model), max_rows=max_rows)
    return sampler.sample(PROMPTS, 3, config, end_token_ids=ends, seeds=range(seed, seed + 9))


def assert_log_probs_as_alone(model: Any, sampled: SampledTokens, temperature: float, top_k: int | None) -> None:
    for row, (tokens, found) in enumerate(zip(sampled.token_ids, sampled.behaviour_log_probs, strict=True)):
        with torch.no_grad():
            logits = row_logits(model, PROMPTS[row // 3], tokens) / temperature
        if top_k is not None:
            logits = logits.masked_fill(logits < logits.topk(top_k, dim=1).values[:, -1:], -torch.inf)
        expected = logits.log_softmax(1).gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
        assert list(found) == pytest.approx(expected.tolist(), abs=2 * FLOAT32_LOG_PROB)


@pytest.mark.parametrize(
    ("family", "settings", "max_rows"),
    [("qwen3", {"temperature": 0.7}, None), ("mistral", {}, 2), ("gemma2", {"top_k": 5}, None), ("aria_text", {}, 3)],
)
def test_log_probs_are_those_of_each_row_alone(family: Any, settings: Any, max_rows: Any) -> None:
    """Prompts and completions are longer than Gemma 2's and Mistral's window of 4 tokens. Aria has no recorded steps."""
    model = (tiny_model(family) if family in FAMILIES else tiny_of(family)).train()
    assert (obstacle(CausalLM(model)) is None) == (family != "aria_text")
    attention, state = model.config._attn_implementation, torch.get_rng_state()
    sampled = sample(model, max_rows=max_rows, **settings)
    assert len(sampled.token_ids) == 9
    assert model.training
    assert model.config._attn_implementation == attention
    assert torch.equal(torch.get_rng_state(), state)
    assert sampled.policy_log_probs is None
    model.eval()
    assert_log_probs_as_alone(model, sampled, settings.get("temperature", 1.0), settings.get("top_k"))
    for tokens, reason in zip(sampled.token_ids, sampled.finish_reasons, strict=True):
        assert END not in tokens[:-1]
        assert reason == ("end" if tokens[-1] == END else "length")
        assert reason == "end" or len(tokens) == 9


def test_rows_depend_on_the_seed_only() -> None:
    first, again, other = (sample(tiny_model(), seed=seed, ends=()) for seed in (0, 0, 100))
    assert first.token_ids == again.token_ids != other.token_ids
    assert set(first.finish_reasons) == {"length"}


def test_the_likeliest_tokens_are_certain() -> None:
    sampled = sample(tiny_model(), temperature=0)
    assert len(set(map(tuple, sampled.token_ids))) == len(PROMPTS)
    assert not any(map(any, sampled.behaviour_log_probs))


@pytest.mark.parametrize(
    ("name", "value"),
    [("min_new_tokens", 2), ("min_p", 0.1), ("xtc_probability", 0.5), ("repetition_penalty", 1.2), ("stop", ("a",))],
)
def test_settings_that_it_lacks_are_named(name: Any, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"does not have some settings .*{name}"):
        sample(tiny_model(), **{name: value})


@pytest.mark.parametrize("harm", [
    lambda outputs: outputs.pop(next(iter(outputs))), lambda outputs: setattr(next(iter(outputs.values())), "error", "x"),
], ids=["left out", "failed"])  # fmt: skip
def test_a_row_that_is_left_out_or_fails_is_an_error(harm: Any) -> None:
    model = tiny_model()
    whole = model.generate_batch

    def harmed(*args: Any, **options: Any) -> Any:
        outputs = whole(*args, **options)
        harm(outputs)
        return outputs

    model.generate_batch = harmed
    with pytest.raises(SamplerError, match="must complete 9 rows; it completed 8"):
        sample(model)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("model_type", "reason"), [
    ("qwen3_5_text", "does not serve Qwen3_5ForCausalLM: Invalid layer type"), ("falcon_h1", "does not serve FalconH1"),
    ("falcon", "must complete 2 rows; it completed 0"), ("gpt_neo", "must use the same distribution; with GPTNeo"),
])  # fmt: skip
def test_models_that_it_does_not_serve_are_refused_at_construction(model_type: Any, reason: Any) -> None:
    """GPT-Neo has attention of its own, which reads no paged cache."""
    with pytest.raises((SamplerError, ConfigError), match=reason):
        policy_of(tiny_of(model_type), sampler="continuous")


def test_training_samples_with_the_new_weights() -> None:
    policy = policy_of(sampler="continuous", max_new_tokens=4)
    assert policy.samples_itself
    trainer_of(policy, learning_rate=1e-2).step(["1+1=", "abc"])
    sampled = policy.sample_actions(["1+1=", "abc"], 4)
    assert sampled.scores is None
    scored = policy.score_groups(["1+1=", "abc"], sampled.actions)
    torch.testing.assert_close(sampled.behaviour_log_probs, scored.log_probs.detach(), atol=1e-4, rtol=0)
