"""Sampling from tiny models: the same tokens whatever the loop, the batch and the padding, and their probabilities. Then
transformers' continuous batching."""

import math
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tokenizers import AddedToken
from transformers import GenerationConfig

from adapters.llm import HFOptions, HFPolicy, SampledTokens, SamplingConfig
from adapters.llm.model.causal_lm import CausalLM
from adapters.llm.model.shared_prompts import prefill
from adapters.llm.sampling import decoding, decoding_batch
from adapters.llm.sampling.continuous import ContinuousSampler
from adapters.llm.sampling.decoding import DecodingSampler, StopStrings
from adapters.llm.sampling.recorded.model import obstacle
from adapters.llm.sampling.recorded.sampler import RecordedSampler
from adapters.llm.sampling.samplers import SamplerError
from grpo.errors import ConfigError
from tests.support.llm_models import (
    END,
    FAMILIES,
    FLOAT32_LOG_PROB,
    SHARING,
    character_tokenizer,
    encoded,
    forward_shapes,
    policy_of,
    row_log_probs,
    row_logits,
    sampling_distribution,
    tiny_model,
    trainer_of,
)
from tests.support.tiny_architectures import tiny_of

TOKENIZER = character_tokenizer()
STATES = ["1+1=", "12+30=?", "abc"]
PROMPTS = [TOKENIZER(state)["input_ids"] for state in STATES]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {}, "temperature": {"temperature": 0.7}, "top-k": {"top_k": 5}, "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.1}, "XTC": {"xtc_probability": 1.0, "xtc_threshold": 0.05},
    "penalty": {"repetition_penalty": 1.3}, "minimum": {"min_new_tokens": 4}, "stop": {"stop": ("a", "+1")},
    "all": {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "xtc_probability": 1.0, "repetition_penalty": 1.2,
        "min_new_tokens": 2, "stop": ("z", "1")},
    "likeliest": {"temperature": 0},
}  # fmt: skip


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
            assert row == pytest.approx(other, abs=FLOAT32_LOG_PROB)


@pytest.mark.parametrize(
    ("setting", "loop"),
    [("plain", "decoding"), ("temperature", "generate"), ("top-k", "decoding"), ("all", "generate")],
)
def test_the_scores_of_the_sampler_are_those_of_scoring(setting: Any, loop: Any) -> None:
    config = SamplingConfig(max_new_tokens=10, **SETTINGS[setting])
    policy = HFPolicy(tiny_model(), TOKENIZER, sampling=config, sampler=loop, options=HFOptions(exact_entropy=True))
    torch.manual_seed(1)
    sampled = policy.sample_actions(STATES, 3)
    rows = [completion for group in sampled.actions for completion in group]
    scores = policy.score_actions([state for state in STATES for _ in range(3)], rows)
    assert torch.equal(scores.mask, sampled.mask)
    torch.testing.assert_close(sampled.scores.log_probs, scores.log_probs.detach(), atol=FLOAT32_LOG_PROB, rtol=0)
    torch.testing.assert_close(sampled.scores.entropy, scores.entropy.detach(), atol=FLOAT32_LOG_PROB, rtol=0)
    assert (sampled.scores.log_probs is sampled.behaviour_log_probs) == config.is_exact


@pytest.mark.parametrize("setting", ["all", "likeliest"])
def test_reported_log_probs_are_those_of_the_sampling_distribution(setting: Any) -> None:
    config = SamplingConfig(max_new_tokens=6, **SETTINGS[setting])
    model = tiny_model()
    sampled = sample(model, config)
    for row, tokens in enumerate(sampled.token_ids):
        prompt = PROMPTS[row // 3]
        with torch.no_grad():
            logits = row_logits(model, prompt, tokens)
        for step, token in enumerate(tokens):
            if setting == "likeliest":
                assert token == int(logits[step].argmax())
                expected = 0.0
            else:
                written = [*prompt, *tokens[:step]]
                probs = sampling_distribution(logits[step].numpy(), config, written=written, step=step, excludes=True)
                expected = math.log(probs[token])
            assert sampled.behaviour_log_probs[row][step] == pytest.approx(expected, abs=FLOAT32_LOG_PROB)


@pytest.mark.parametrize("setting", SETTINGS)
def test_both_loops_draw_the_same_tokens(setting: Any) -> None:
    config = SamplingConfig(max_new_tokens=7, **SETTINGS[setting])
    own, theirs = (sample(tiny_model(), config, size=2, with_entropy=True, loop=loop) for loop in ("own", "generate"))
    assert_same(theirs, own)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_sampled_as_it_is_scored(family: Any) -> None:
    model = tiny_model(family)
    config = SamplingConfig(max_new_tokens=9, temperature=0.8)
    sampled = sample(model, config)
    assert sampled.policy_log_probs is sampled.behaviour_log_probs
    for row, tokens in enumerate(sampled.token_ids):
        with torch.no_grad():
            expected = row_log_probs(model, PROMPTS[row // 3], tokens, 0.8)
        assert sampled.behaviour_log_probs[row] == pytest.approx(expected.tolist(), abs=FLOAT32_LOG_PROB)
    if family in ("gpt2", "mistral", "mamba"):
        assert_same(sample(model, config, loop="generate"), sampled)
    assert CausalLM(model).shares_prompts == (family in SHARING)


# Rows do not depend on the batch


@pytest.mark.parametrize(
    ("family", "module", "name", "value"),
    [("qwen3", decoding, "MOST_ENDED", 0.0), ("gpt2", decoding, "MOST_ENDED", 2.0),
     *(("qwen3", decoding_batch, "GROWTH", growth) for growth in (1, 3))],
)  # fmt: skip
def test_when_finished_rows_are_removed_and_the_cache_grows_changes_no_row(
    family: Any, module: Any, name: Any, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.0 removes each row as soon as it is finished, 2.0 removes none."""
    config = SamplingConfig(max_new_tokens=20, stop=("1", "2", "a", "b"))
    expected = sample(tiny_model(family), config, size=6)
    assert len(set(map(len, expected.token_ids))) > 3
    monkeypatch.setattr(module, name, value)
    assert_same(sample(tiny_model(family), config, size=6), expected)


def test_rows_that_join_later_change_no_row(subtests: pytest.Subtests) -> None:
    """Rows end at different steps, and rows of the next prompts take their places, with states in Qwen 3.5 and Falcon-H1. With
    one row at a time, each row is alone. Mamba is sampled by transformers' loop."""
    cases = [
        *((family, "plain", 4) for family in (*SHARING, "mamba", "qwen3_5_text", "falcon_h1")), ("qwen3", "all", 4),
        ("qwen3", "penalty", 1), ("gpt2", "stop", 7), *(("qwen3", "plain", max_rows) for max_rows in range(1, 19)),
    ]  # fmt: skip
    for family, setting, max_rows in cases:
        with subtests.test(family=family, setting=setting, max_rows=max_rows):
            settings = {"stop": ("1", "2", "a", "b"), **SETTINGS[setting]}
            config = SamplingConfig(max_new_tokens=16, **settings)
            model = tiny_model(family) if family in FAMILIES else tiny_of(family)
            whole = sample(model, config, size=6, with_entropy=True)
            assert len(set(map(len, whole.token_ids))) > 2
            assert_same(sample(model, config, size=6, with_entropy=True, max_rows=max_rows), whole)
            swapped = sample(
                model, config, size=6, prompts=PROMPTS[::-1], seeds=[*range(12, 18), *range(6, 12), *range(6)],
                max_rows=max_rows,
            )  # fmt: skip
            assert swapped.token_ids == [*whole.token_ids[12:], *whole.token_ids[6:12], *whole.token_ids[:6]]


def test_a_place_is_taken_as_soon_as_its_row_ends_and_the_cache_stays_as_wide_as_one_row() -> None:
    config = SamplingConfig(max_new_tokens=16, stop=("1", "2", "a", "b"))
    model = tiny_model()
    shapes = forward_shapes(model)
    widths: list[int] = []
    drawn: list[int] = []
    model.lm_head.register_forward_pre_hook(lambda module, args: drawn.append(len(args[0])))
    held: list[torch.Size] = []

    def look(module: Any, args: Any, kwargs: Any) -> None:
        cache = kwargs["past_key_values"]
        widths.append(cache.get_seq_length())
        held.extend(layer._keys.shape for layer in cache.layers if isinstance(layer, decoding_batch.GrowingLayer))

    model.model.register_forward_pre_hook(look, with_kwargs=True)
    sampled = sample(model, config, size=6, max_rows=4)
    prompts = [shape for shape in shapes if shape[1] > 1]
    assert sorted(prompts) == sorted((1, len(prompt)) for prompt in PROMPTS)  # each prompt once
    assert drawn[0] == 4
    assert drawn == sorted(drawn, reverse=True)  # a place stays empty only when no row waits
    assert sum(drawn) == sum(map(len, sampled.token_ids))  # no row goes on after its end
    assert max(widths) <= max(map(len, PROMPTS)) + 16
    assert max(rows for rows, *_ in held) == 4
    assert max(columns for _, _, columns, _ in held) <= max(map(len, PROMPTS)) + 16 + decoding_batch.GROWTH


@pytest.mark.parametrize(
    ("family", "max_tokens", "parts"),
    [("qwen3", 21, [3]), ("qwen3", 20, [2, 1]), ("gpt2", 7, [1, 1, 1]), ("gpt2", 1, [1, 1, 1])],
)
def test_prompts_are_forwarded_within_a_budget_and_continued_together(family: Any, max_tokens: Any, parts: Any) -> None:
    """There are three prompts, and the longest has 7 tokens. Padding counts against the budget."""
    config = SamplingConfig(max_new_tokens=9)
    expected = sample(tiny_model(family), config, with_entropy=True)
    model = tiny_model(family)
    shapes = forward_shapes(model)
    assert_same(sample(model, config, with_entropy=True, max_tokens_per_forward=max_tokens), expected)
    assert shapes[: len(parts) + 1] == [*((count, 7) for count in parts), (9, 1)]


def test_the_cache_of_the_prompts_is_freed_before_decoding_continues(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("loop", ["own", "generate"])
def test_only_the_given_end_tokens_end_a_completion(loop: Any) -> None:
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
def test_the_generation_config_and_the_mode_of_the_model_are_ignored_and_kept(loop: Any) -> None:
    """The config may penalise, suppress and truncate. In training mode, layers with gradient checkpointing store no keys."""
    config = SamplingConfig(max_new_tokens=8)
    expected = sample(tiny_model(), config, loop=loop)
    model = tiny_model()
    model.generation_config = GenerationConfig(
        eos_token_id=END, repetition_penalty=2.0, no_repeat_ngram_size=1, suppress_tokens=list(range(10, 30)),
        min_new_tokens=5, do_sample=True, temperature=0.1, top_k=1,
    )  # fmt: skip
    model.gradient_checkpointing_enable()
    model.train()
    assert_same(sample(model, config, loop=loop), expected)
    assert model.generation_config.top_k == 1
    assert model.training


@pytest.mark.parametrize("loop", ["own", "generate"])
def test_stop_strings_are_ignored_before_the_minimum(loop: Any) -> None:
    strings = tuple("0123456789abcdefgh")
    early = sample(tiny_model(), SamplingConfig(max_new_tokens=12, stop=strings), size=8, loop=loop)
    late = sample(tiny_model(), SamplingConfig(max_new_tokens=12, stop=strings, min_new_tokens=5), size=8, loop=loop)
    assert min(map(len, early.token_ids)) == 1
    assert min(map(len, late.token_ids)) == 5


STOPS: list[tuple[list[str], list[str], list[bool]]] = [
    # texts of rows, stop strings, and whether a row has one of them
    (["ab+1z", "1+abz"], ["+1z"], [True, False]), (["ab+1z", "1+abz"], ["b+1z", "bz"], [True, True]),  # of several tokens
    (["ab+1z", "1+abz"], [], [False, False]),
    (["ab<eos>", "<eos>ab", "abc"], ["<eos>"], [True, True, False]),
    (["ab<eos>", "<eos>ab", "abc"], ["b<eos>"], [True, False, False]),
    (["ab<eos>", "<eos>ab", "abc"], ["<pad>"], [False, False, False]),
    (["ab<eos>", "<eos>ab", "abc"], ["ab"], [True, True, True]),
    (["ab<eos>", "<eos>ab", "abc"], ["<eos>", "c"], [True, True, True]),
    (["b<pad>c"], ["a"], [False]), (["b<pad>c"], ["bc"], [True]),  # the text that is searched leaves special tokens out
    (["z" + "a" * 20, "a" * 20 + "z"], ["z"], [False, True]),  # in the last tokens only: an earlier one has ended its row
]  # fmt: skip


@pytest.mark.parametrize(("texts", "stop", "found"), STOPS)
def test_stop_strings_are_found_in_the_text_and_among_the_special_tokens(texts: Any, stop: Any, found: Any) -> None:
    tokens = torch.tensor([TOKENIZER(text)["input_ids"] for text in texts])
    assert StopStrings(TOKENIZER, stop).found(tokens) == found


def test_a_stop_string_may_be_a_special_token(subtests: pytest.Subtests) -> None:
    """The text of a completion leaves the token out. It is named by the tokenizer, or only marked as special."""
    marked = character_tokenizer()
    marked.add_tokens([AddedToken("<|eot|>", special=True)])
    model, eot = tiny_model(vocab_size=len(marked)), len(marked) - 1
    for stop, token in [("<eos>", END), ("<|eot|>", eot)]:
        with torch.no_grad():
            model.get_output_embeddings().weight[token] *= 6.0  # it is drawn more often
        lm = CausalLM(model)
        samplers = {loop: DecodingSampler(lm, marked, loop=loop) for loop in ("own", "generate")}
        for name, sampler in {**samplers, "recorded": RecordedSampler(lm, marked)}.items():
            with subtests.test(stop=stop, sampler=name):
                config = SamplingConfig(max_new_tokens=20, stop=(stop,))
                sampled = sampler.sample(PROMPTS, 6, config, end_token_ids=[], seeds=range(18))
                drew = [token in row for row in sampled.token_ids]
                assert any(drew)
                assert [reason == "stop" for reason in sampled.finish_reasons] == drew
                assert not any(token in row[:-1] for row in sampled.token_ids)


def test_sampling_builds_no_graph() -> None:
    model, has_graph = tiny_model(), []
    model.model.register_forward_hook(lambda *call: has_graph.append(call[-1].last_hidden_state.requires_grad))
    sample(model, SamplingConfig(max_new_tokens=2))
    assert has_graph
    assert not any(has_graph)


# --- prompts that continue earlier rows compute only their new tokens, and draw the same tokens


NEW = encoded("=?")


@pytest.mark.parametrize("family", SHARING)
def test_continued_rows_draw_the_same_tokens(family: str) -> None:
    """Rows with caches of several lengths, a row without one, and more rows than one forward pass may have."""
    prompts = [encoded(text) for text in ("abc", "1+1=", "12+30=?", "z")]
    for budget in (16_384, 8):
        policy = policy_of(tiny_model(family), max_new_tokens=6, max_tokens_per_forward=budget)
        first = policy.sample_tokens(prompts, seeds=range(4), end_token_ids=range(2, 12))
        longer = [[*p, *t, *NEW[: 1 + i % 2]] for i, (p, t) in enumerate(zip(prompts, first.token_ids, strict=True))]
        longer.append(encoded("a new one"))
        expected = policy.sample_tokens(longer, seeds=range(10, 15))
        with policy.keeping_prefixes(max_rows=8):
            policy.sample_tokens(prompts, seeds=range(4), end_token_ids=range(2, 12))
            found = policy.sample_tokens(longer, seeds=range(10, 15))
        assert found.token_ids == expected.token_ids
        for one, other in zip(found.behaviour_log_probs, expected.behaviour_log_probs, strict=True):
            assert one == pytest.approx(other, abs=1e-5)


def test_only_new_tokens_are_computed_and_the_oldest_rows_are_dropped() -> None:
    policy = policy_of(max_new_tokens=2)
    with policy.keeping_prefixes(max_rows=1):
        kept = [policy.sample_tokens([encoded(text)], seeds=[0], end_token_ids=range(45)) for text in ("abcd", "bcde")]
        shapes = forward_shapes(policy.model)
        again = [[*encoded(text), *turn.token_ids[0], *NEW] for text, turn in zip(("abcd", "bcde"), kept, strict=True)]
        for prompt in reversed(again):
            cut = policy.sample_tokens([prompt], seeds=[0], max_new_tokens=1)
        policy.sample_tokens([[*again[0], *cut.token_ids[0], *NEW]], seeds=[0], max_new_tokens=1)
    # kept: the sampled token and 2 new ones; dropped: 4 + 1 + 2 tokens; a truncated row is kept, too
    assert shapes == [(1, 3), (1, 7), (1, 3)]
    with torch.no_grad():
        policy.sample_tokens([again[1]], seeds=[0], max_new_tokens=1)
    assert shapes[-1] == (1, 7)  # outside the context, nothing is kept


def test_equal_prompts_are_computed_once() -> None:
    policy = policy_of(max_new_tokens=3)
    shapes = forward_shapes(policy.model)
    together = policy.sample_tokens([encoded("abc")] * 3, seeds=[1, 2, 3])
    assert shapes[0] == (1, 3)
    apart = [policy.sample_tokens([encoded("abc")], seeds=[seed]).token_ids[0] for seed in (1, 2, 3)]
    assert together.token_ids == apart


@pytest.mark.parametrize(
    ("max_rows", "computed"),
    [(8, [1, 1, 2, 4]), (2, [1, 2, 4, 4])],
    ids=["all rows are kept", "the first abc is dropped"],
)
def test_the_longest_row_is_continued_once_for_each_time_it_was_kept(max_rows: int, computed: list[int]) -> None:
    policy = policy_of(max_new_tokens=1)
    with policy.keeping_prefixes(max_rows=max_rows):
        policy.sample_tokens([encoded(text) for text in ("abc", "ab", "abc")], seeds=range(3), end_token_ids=range(45))
        shapes = forward_shapes(policy.model)
        for text in ("abcd", "abce", "abcf", "abcg"):
            policy.sample_tokens([encoded(text)], seeds=[0])
    assert [columns for _, columns in shapes] == computed


# --- transformers' continuous batching: log-probs of each row alone, and errors in words


def sample_together(
    model: Any, *, seed: int = 0, ends: tuple[int, ...] = (END,), max_rows: int | None = None, **settings: Any
):
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
    sampled = sample_together(model, max_rows=max_rows, **settings)
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
    first, again, other = (sample_together(tiny_model(), seed=seed, ends=()) for seed in (0, 0, 100))
    assert first.token_ids == again.token_ids != other.token_ids
    assert set(first.finish_reasons) == {"length"}


def test_the_likeliest_tokens_are_certain() -> None:
    sampled = sample_together(tiny_model(), temperature=0)
    assert len(set(map(tuple, sampled.token_ids))) == len(PROMPTS)
    assert not any(map(any, sampled.behaviour_log_probs))


@pytest.mark.parametrize(
    ("name", "value"),
    [("min_new_tokens", 2), ("min_p", 0.1), ("xtc_probability", 0.5), ("repetition_penalty", 1.2), ("stop", ("a",))],
)
def test_settings_that_it_lacks_are_named(name: Any, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"does not have some settings .*{name}"):
        sample_together(tiny_model(), **{name: value})


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
        sample_together(model)


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
