"""Sampling from tiny models: the same tokens whatever the loop, the batch and the padding, and their probabilities."""

import math
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from adapters.llm import HFPolicy, SampledTokens, SamplingConfig
from adapters.llm.model.causal_lm import CausalLM
from adapters.llm.model.shared_prompts import prefill
from adapters.llm.sampling import decoding, decoding_batch
from adapters.llm.sampling.decoding import DecodingSampler, StopStrings
from grpo import Truncate
from tests.support.llm_models import (
    CHARACTERS,
    END,
    FAMILIES,
    PAD,
    SHARING,
    character_tokenizer,
    row_log_probs,
    row_logits,
    sampling_distribution,
    tiny_model,
)

TOKENIZER = character_tokenizer()
STATES = ["1+1=", "12+30=?", "abc"]
PROMPTS = [TOKENIZER(state)["input_ids"] for state in STATES]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.1},
    "XTC": {"xtc_probability": 1.0, "xtc_threshold": 0.05},
    "penalty": {"repetition_penalty": 1.3},
    "minimum": {"min_new_tokens": 4},
    "stop": {"stop": ("a", "+1")},
    "all": {
        "temperature": 1.3,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.02,
        "xtc_probability": 1.0,
        "repetition_penalty": 1.2,
        "min_new_tokens": 2,
        "stop": ("z", "1"),
    },
    "likeliest": {"temperature": 0},
}


def sample(
    model: Any, config: SamplingConfig, *, prompts: Sequence[Sequence[int]] = PROMPTS, size: int = 3, **options: Any
) -> SampledTokens:
    seeds = options.pop("seeds", range(len(prompts) * size))
    ends = options.pop("end_token_ids", [END])
    sampler = DecodingSampler(CausalLM(model), TOKENIZER, **options)
    return sampler.sample(prompts, size, config, end_token_ids=ends, seeds=seeds)


def assert_same(found: SampledTokens, expected: SampledTokens) -> None:
    assert found.token_ids == expected.token_ids
    assert found.finish_reasons == expected.finish_reasons
    for name in ("behaviour_log_probs", "policy_log_probs", "entropies"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert (ours is None) == (theirs is None)
        for row, other in zip(ours or [], theirs or [], strict=True):
            assert row == pytest.approx(other, abs=1e-5)


# Every setting


@pytest.mark.parametrize("setting", SETTINGS)
def test_each_log_prob_is_that_of_the_distribution_drawn_from_and_of_the_policy(setting: str) -> None:
    config = SamplingConfig(max_new_tokens=10, **SETTINGS[setting])
    model = tiny_model()
    sampled = sample(model, config, with_entropy=True)
    assert sampled.policy_log_probs is not None
    assert sampled.entropies is not None
    for row, tokens in enumerate(sampled.token_ids):
        prompt = PROMPTS[row // 3]
        with torch.no_grad():
            logits = row_logits(model, prompt, tokens)
        for step, token in enumerate(tokens):
            if config.temperature == 0:
                assert token == int(logits[step].argmax())
                expected = 0.0
            else:
                written = [*prompt, *tokens[:step]]
                probs = sampling_distribution(
                    logits[step].numpy(), config, written=written, step=step, excludes=config.xtc_probability == 1
                )
                expected = math.log(probs[token])
            assert sampled.behaviour_log_probs[row][step] == pytest.approx(expected, abs=1e-5)
            policy = (logits[step].double() / config.scoring_temperature).log_softmax(0)
            assert sampled.policy_log_probs[row][step] == pytest.approx(policy[token].item(), abs=1e-5)
            assert sampled.entropies[row][step] == pytest.approx(-(policy.exp() * policy).sum().item(), abs=1e-5)


@pytest.mark.parametrize("setting", [name for name in SETTINGS if name != "likeliest"])
@pytest.mark.parametrize("loop", ["decoding", "generate"])
def test_the_scores_of_the_sampler_are_those_of_scoring(setting: str, loop: Any) -> None:
    config = SamplingConfig(max_new_tokens=10, **SETTINGS[setting])
    policy = HFPolicy(tiny_model(), TOKENIZER, sampling=config, sampler=loop, exact_entropy=True)
    torch.manual_seed(1)
    sampled = policy.sample_actions(STATES, 3)
    rows = [completion for group in sampled.actions for completion in group]
    scores = policy.score_actions([state for state in STATES for _ in range(3)], rows)
    assert sampled.scores is not None
    assert sampled.scores.entropy is not None
    assert scores.entropy is not None
    assert torch.equal(scores.mask, sampled.mask)
    torch.testing.assert_close(sampled.scores.log_probs, scores.log_probs.detach(), atol=1e-5, rtol=0)
    torch.testing.assert_close(sampled.scores.entropy, scores.entropy.detach(), atol=1e-5, rtol=0)
    assert (sampled.scores.log_probs is sampled.behaviour_log_probs) == config.is_exact


@pytest.mark.parametrize("setting", SETTINGS)
def test_both_loops_draw_the_same_tokens(setting: str) -> None:
    config = SamplingConfig(max_new_tokens=10, **SETTINGS[setting])
    own, theirs = (sample(tiny_model(), config, size=6, with_entropy=True, loop=loop) for loop in ("own", "generate"))
    assert_same(theirs, own)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_sampled_as_it_is_scored(family: str) -> None:
    model = tiny_model(family)
    config = SamplingConfig(max_new_tokens=9, temperature=0.8)
    sampled = sample(model, config)
    assert sampled.policy_log_probs is sampled.behaviour_log_probs
    for row, tokens in enumerate(sampled.token_ids):
        with torch.no_grad():
            expected = row_log_probs(model, PROMPTS[row // 3], tokens, 0.8)
        assert sampled.behaviour_log_probs[row] == pytest.approx(expected.tolist(), abs=1e-5)
    assert_same(sample(model, config, loop="generate"), sampled)
    assert CausalLM(model).shares_prompts == (family in SHARING)


@pytest.mark.parametrize("setting", ["top-k", "top-p", "min-p"])
def test_the_weight_of_what_was_drawn_is_the_share_of_the_policy_that_it_was_drawn_from(setting: str) -> None:
    """E_mu[pi / mu] is pi's mass where mu > 0: below 1, since a correction cannot weigh what is never drawn."""
    config = SamplingConfig(max_new_tokens=6, **SETTINGS[setting])
    policy = HFPolicy(tiny_model(), TOKENIZER, sampling=config)
    torch.manual_seed(0)
    sampled = policy.sample_actions(STATES, 4)
    assert sampled.scores is not None
    assert sampled.behaviour_log_probs is not None
    weights = Truncate(high=None)(sampled.scores.log_probs, sampled.behaviour_log_probs, sampled.mask)
    masses = []
    rows = [action for group in sampled.actions for action in group]
    for row, action in enumerate(rows):
        prompt = PROMPTS[row // 4]
        with torch.no_grad():
            logits = row_logits(policy.model, prompt, action.token_ids)
        for step in range(len(action)):
            written = [*prompt, *action.token_ids[:step]]
            drawn_from = sampling_distribution(logits[step].numpy(), config, written=written, step=step)
            masses.append(logits[step].double().softmax(0)[torch.from_numpy(drawn_from > 0)].sum().item())
    assert weights[sampled.mask].tolist() == pytest.approx(masses, abs=1e-5)
    assert weights[sampled.mask].mean().item() == pytest.approx(sum(masses) / len(masses), abs=1e-5)
    assert min(masses) < 0.9


@pytest.mark.parametrize("setting", ["penalty", "coin"])
def test_the_mean_weight_is_1_where_everything_may_be_drawn(setting: str) -> None:
    """To four standard errors."""
    settings: dict[str, dict[str, Any]] = {
        "penalty": {"repetition_penalty": 1.3},
        "coin": {"xtc_probability": 0.5, "xtc_threshold": 0.05},
    }
    sampled = sample(tiny_model(), SamplingConfig(max_new_tokens=1, **settings[setting]), size=2000)
    assert sampled.policy_log_probs is not None
    old, behaviour = torch.tensor(sampled.policy_log_probs), torch.tensor(sampled.behaviour_log_probs)
    everywhere = torch.ones_like(old, dtype=torch.bool)
    weights = Truncate(high=None)(old, behaviour, everywhere)
    assert weights.std() > 0.05
    assert abs(weights.mean().item() - 1) < 4 * weights.std().item() / math.sqrt(len(weights))


# Whatever is in the batch


@pytest.mark.parametrize("loop", ["own", "generate"])
@pytest.mark.parametrize("setting", ["plain", "all"])
def test_a_row_alone_is_the_row_in_a_batch(setting: str, loop: Any) -> None:
    config = SamplingConfig(max_new_tokens=12, **SETTINGS[setting])
    model = tiny_model()
    together = sample(model, config, seeds=range(40, 49), loop=loop)
    for row in (0, 4, 8):  # of each prompt, padded to 7 tokens in the batch
        alone = sample(model, config, prompts=[PROMPTS[row // 3]], size=1, seeds=[40 + row], loop=loop)
        assert alone.token_ids[0] == together.token_ids[row]
        assert alone.finish_reasons[0] == together.finish_reasons[row]
        assert alone.behaviour_log_probs[0] == pytest.approx(together.behaviour_log_probs[row], abs=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
@pytest.mark.parametrize("most_ended", [0.0, 2.0])
def test_rows_that_leave_the_batch_change_nothing(
    family: str, most_ended: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each at once (one at least has to have ended), or none ever."""
    config = SamplingConfig(max_new_tokens=20, stop=("1", "2", "a", "b"))
    expected = sample(tiny_model(family), config, size=6)
    assert len(set(map(len, expected.token_ids))) > 3
    monkeypatch.setattr(decoding, "MOST_ENDED", most_ended)
    assert_same(sample(tiny_model(family), config, size=6), expected)


@pytest.mark.parametrize("growth", [1, 3])
def test_memory_that_grows_by_small_steps_changes_nothing(growth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config = SamplingConfig(max_new_tokens=12)
    expected = sample(tiny_model(), config)
    monkeypatch.setattr(decoding_batch, "GROWTH", growth)
    assert_same(sample(tiny_model(), config), expected)


@pytest.mark.parametrize("max_rows", [1, 3, 5, 100])
@pytest.mark.parametrize("setting", ["plain", "top-p"])
def test_decoding_in_parts_changes_nothing(setting: str, max_rows: int) -> None:
    config = SamplingConfig(max_new_tokens=8, **SETTINGS[setting])
    whole = sample(tiny_model(), config, with_entropy=True)
    parts = sample(tiny_model(), config, with_entropy=True, max_rows=max_rows)
    assert_same(parts, whole)
    assert (parts.policy_log_probs is parts.behaviour_log_probs) == config.is_exact


def test_each_prompt_is_prefilled_once_and_the_batch_shrinks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    shapes = shapes_of(model)
    monkeypatch.setattr(decoding, "MOST_ENDED", 0.0)
    sampled = sample(model, SamplingConfig(max_new_tokens=20, stop=("1", "2", "a", "b")), size=6)
    alive = [sum(len(row) > step for row in sampled.token_ids) for step in range(1, max(map(len, sampled.token_ids)))]
    assert shapes == [(3, 7), *((count, 1) for count in alive)]


def shapes_of(model: Any) -> list[tuple[int, ...]]:
    """Of the token ids that the decoder is given from now on."""
    shapes: list[tuple[int, ...]] = []
    model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return shapes


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
@pytest.mark.parametrize(("max_tokens", "parts"), [(21, [3]), (20, [2, 1]), (7, [1, 1, 1]), (1, [1, 1, 1])])
def test_prompts_are_forwarded_within_a_budget_and_continued_together(
    family: str, max_tokens: int, parts: list[int]
) -> None:
    """Three prompts, the longest of 7 tokens: padding counts."""
    config = SamplingConfig(max_new_tokens=9)
    expected = sample(tiny_model(family), config, with_entropy=True)
    model = tiny_model(family)
    shapes = shapes_of(model)
    assert_same(sample(model, config, with_entropy=True, max_tokens_per_forward=max_tokens), expected)
    assert shapes[: len(parts) + 1] == [*((count, 7) for count in parts), (9, 1)]


def test_the_prompts_keys_and_values_are_let_go_before_the_rows_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def remembering(*args: Any) -> Any:
        prefilled = prefill(*args)
        made.append(weakref.ref(prefilled.cache))
        return prefilled

    monkeypatch.setattr(decoding_batch, "prefill", remembering)
    model = tiny_model()
    alive: list[list[bool]] = []
    model.model.register_forward_pre_hook(lambda module, args: alive.append([each() is not None for each in made]))
    sample(model, SamplingConfig(max_new_tokens=2, min_new_tokens=2))
    assert alive == [[], [False]]


# How completions end


def test_reasons_and_lengths() -> None:
    config = SamplingConfig(max_new_tokens=6, stop=("1",))
    sampled = sample(tiny_model(), config, size=20)
    assert set(sampled.finish_reasons) == {"end", "stop", "length"}
    one = CHARACTERS.index("1") + 2
    for tokens, reason in zip(sampled.token_ids, sampled.finish_reasons, strict=True):
        assert not {END, one} & set(tokens[:-1])
        expected = "end" if tokens[-1] == END else "stop" if tokens[-1] == one else "length"
        assert reason == expected
        assert len(tokens) == 6 or reason != "length"


@pytest.mark.parametrize("loop", ["own", "generate"])
def test_what_ends_a_completion_is_what_was_asked_for_and_not_what_the_model_would_have(loop: Any) -> None:
    """The model's own end, END, is a token like any other where others are named, or none."""
    model = tiny_model()
    assert model.generation_config.eos_token_id == END
    nothing = sample(model, SamplingConfig(max_new_tokens=20), size=6, end_token_ids=[], loop=loop)
    assert set(nothing.finish_reasons) == {"length"}
    assert any(END in row for row in nothing.token_ids)
    others = sample(model, SamplingConfig(max_new_tokens=20), size=6, end_token_ids=[5, 6], loop=loop)
    for row, unended in zip(others.token_ids, nothing.token_ids, strict=True):
        length = next((step + 1 for step, token in enumerate(unended) if token in (5, 6)), 20)
        assert row == unended[:length]
    assert any(len(row) < 20 for row in others.token_ids)


@pytest.mark.parametrize("loop", ["own", "generate"])
def test_the_models_own_defaults_do_not_reach_the_distribution(loop: Any) -> None:
    """A model comes with a generation config that penalises, suppresses and truncates."""
    config = SamplingConfig(max_new_tokens=8)
    expected = sample(tiny_model(), config, loop=loop)
    model = tiny_model()
    model.generation_config = GenerationConfig(
        eos_token_id=END,
        repetition_penalty=2.0,
        no_repeat_ngram_size=1,
        suppress_tokens=list(range(10, 30)),
        min_new_tokens=5,
        do_sample=True,
        temperature=0.1,
        top_k=1,
    )
    assert_same(sample(model, config, loop=loop), expected)
    assert model.generation_config.top_k == 1  # and are still there


@pytest.mark.parametrize("loop", ["own", "generate"])
def test_no_stop_string_is_looked_for_before_the_minimum(loop: Any) -> None:
    strings = tuple("0123456789abcdefgh")
    early = sample(tiny_model(), SamplingConfig(max_new_tokens=12, stop=strings), size=8, loop=loop)
    late = sample(tiny_model(), SamplingConfig(max_new_tokens=12, stop=strings, min_new_tokens=5), size=8, loop=loop)
    assert min(map(len, early.token_ids)) == 1
    assert min(map(len, late.token_ids)) >= 5


def test_a_stop_string_may_begin_in_one_token_and_end_in_another() -> None:
    tokens = torch.tensor([TOKENIZER("ab+1z")["input_ids"], TOKENIZER("1+abz")["input_ids"]])
    assert StopStrings(TOKENIZER, ["+1z"]).found(tokens) == [True, False]
    assert StopStrings(TOKENIZER, ["b+1z", "bz"]).found(tokens) == [True, True]
    assert StopStrings(TOKENIZER, []).found(tokens) == [False, False]


def test_the_names_of_special_tokens_are_no_part_of_the_text() -> None:
    """<pad>, which a model may well write, holds an "a"; the text, which leaves it out, does not."""
    tokens = torch.tensor([[CHARACTERS.index("b") + 2, PAD, CHARACTERS.index("c") + 2]])
    assert StopStrings(TOKENIZER, ["a"]).found(tokens) == [False]
    assert StopStrings(TOKENIZER, ["bc"]).found(tokens) == [True]


def test_a_string_is_looked_for_at_the_end_alone() -> None:
    """It would have ended the row when it came: what is further back than any string is long is not decoded again."""
    tokens = torch.tensor([TOKENIZER("z" + "a" * 20)["input_ids"], TOKENIZER("a" * 20 + "z")["input_ids"]])
    assert StopStrings(TOKENIZER, ["z"]).found(tokens) == [False, True]


# Modes


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("loop", ["own", "generate"])
def test_training_mode_with_gradient_checkpointing_samples_as_evaluation_mode(loop: Any) -> None:
    """There, layers that are run again in the backward pass keep no keys and values."""
    model = tiny_model()
    expected = sample(model, SamplingConfig(max_new_tokens=8), loop=loop)
    model.gradient_checkpointing_enable()
    model.train()
    assert_same(sample(model, SamplingConfig(max_new_tokens=8), loop=loop), expected)
    assert model.training


def test_sampling_keeps_no_graph_and_a_sampler_without_weights_of_its_own_takes_none_over() -> None:
    model = tiny_model()
    sampled = sample(model, SamplingConfig(max_new_tokens=2))
    assert isinstance(sampled.behaviour_log_probs[0][0], float)
    DecodingSampler(CausalLM(model), TOKENIZER).sync(model)
    assert all(parameter.grad is None for parameter in model.parameters())
