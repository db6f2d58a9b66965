"""Sampling from tiny models: the same tokens whatever the loop, the batch and the padding, and their probabilities."""

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
from adapters.llm.sampling.decoding import DecodingSampler, StopStrings
from adapters.llm.sampling.recorded.sampler import RecordedSampler
from grpo import Truncate
from tests.support.llm_models import (
    CHARACTERS,
    END,
    FAMILIES,
    FLOAT32_LOG_PROB,
    PAD,
    SHARING,
    character_tokenizer,
    forward_shapes,
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
            assert row == pytest.approx(other, abs=FLOAT32_LOG_PROB)


# Every setting


def test_reported_log_probs_are_those_of_the_sampling_distribution_and_of_the_policy(subtests: pytest.Subtests) -> None:
    for setting in SETTINGS:
        with subtests.test(setting=setting):
            config = SamplingConfig(max_new_tokens=6, **SETTINGS[setting])
            model = tiny_model()
            sampled = sample(model, config, with_entropy=True)
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
                            logits[step].numpy(),
                            config,
                            written=written,
                            step=step,
                            excludes=config.xtc_probability == 1,
                        )
                        expected = math.log(probs[token])
                    assert sampled.behaviour_log_probs[row][step] == pytest.approx(expected, abs=FLOAT32_LOG_PROB)
                    policy = (logits[step].double() / config.scoring_temperature).log_softmax(0)
                    assert sampled.policy_log_probs[row][step] == pytest.approx(
                        policy[token].item(), abs=FLOAT32_LOG_PROB
                    )
                    assert sampled.entropies[row][step] == pytest.approx(
                        -(policy.exp() * policy).sum().item(), abs=FLOAT32_LOG_PROB
                    )


def test_the_scores_of_the_sampler_are_those_of_scoring(subtests: pytest.Subtests) -> None:
    for setting, loop in [
        ("plain", "decoding"),
        ("temperature", "generate"),
        ("top-k", "decoding"),
        ("all", "generate"),
    ]:
        with subtests.test(setting=setting, loop=loop):
            config = SamplingConfig(max_new_tokens=10, **SETTINGS[setting])
            policy = HFPolicy(
                tiny_model(), TOKENIZER, sampling=config, sampler=loop, options=HFOptions(exact_entropy=True)
            )
            torch.manual_seed(1)
            sampled = policy.sample_actions(STATES, 3)
            rows = [completion for group in sampled.actions for completion in group]
            scores = policy.score_actions([state for state in STATES for _ in range(3)], rows)
            assert sampled.scores.entropy is not None
            assert torch.equal(scores.mask, sampled.mask)
            torch.testing.assert_close(
                sampled.scores.log_probs, scores.log_probs.detach(), atol=FLOAT32_LOG_PROB, rtol=0
            )
            torch.testing.assert_close(sampled.scores.entropy, scores.entropy.detach(), atol=FLOAT32_LOG_PROB, rtol=0)
            assert (sampled.scores.log_probs is sampled.behaviour_log_probs) == config.is_exact


def test_both_loops_draw_the_same_tokens(subtests: pytest.Subtests) -> None:
    for setting in SETTINGS:
        with subtests.test(setting=setting):
            config = SamplingConfig(max_new_tokens=7, **SETTINGS[setting])
            own, theirs = (
                sample(tiny_model(), config, size=2, with_entropy=True, loop=loop) for loop in ("own", "generate")
            )
            assert_same(theirs, own)


def test_every_family_is_sampled_as_it_is_scored(subtests: pytest.Subtests) -> None:
    for family in FAMILIES:
        with subtests.test(family=family):
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


def test_the_importance_weight_under_truncation_is_the_probability_that_truncation_keeps(
    subtests: pytest.Subtests,
) -> None:
    """E_mu[pi / mu] is pi's mass where mu > 0. It is below 1, because tokens that are never drawn have no weight."""
    for setting in ["top-k", "top-p", "min-p"]:
        with subtests.test(setting=setting):
            config = SamplingConfig(max_new_tokens=6, **SETTINGS[setting])
            policy = HFPolicy(tiny_model(), TOKENIZER, sampling=config)
            torch.manual_seed(0)
            sampled = policy.sample_actions(STATES, 4)
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
            assert weights[sampled.mask].tolist() == pytest.approx(masses, abs=FLOAT32_LOG_PROB)
            assert weights[sampled.mask].mean().item() == pytest.approx(sum(masses) / len(masses), abs=FLOAT32_LOG_PROB)
            assert min(masses) < 0.9


def test_the_mean_importance_weight_is_1_if_every_token_can_be_drawn(subtests: pytest.Subtests) -> None:
    """The mean of 1800 weights is within four standard errors of 1."""
    for setting in ["penalty", "coin"]:
        with subtests.test(setting=setting):
            settings: dict[str, dict[str, Any]] = {
                "penalty": {"repetition_penalty": 1.3},
                "coin": {"xtc_probability": 0.5, "xtc_threshold": 0.05},
            }
            sampled = sample(tiny_model(), SamplingConfig(max_new_tokens=1, **settings[setting]), size=600)
            assert sampled.policy_log_probs is not None
            old, behaviour = torch.tensor(sampled.policy_log_probs), torch.tensor(sampled.behaviour_log_probs)
            everywhere = torch.ones_like(old, dtype=torch.bool)
            weights = Truncate(high=None)(old, behaviour, everywhere)
            assert weights.std() > 0.05
            assert abs(weights.mean().item() - 1) < 4 * weights.std().item() / math.sqrt(len(weights))


# Rows do not depend on the batch


def test_a_row_is_sampled_alone_as_it_is_in_a_batch(subtests: pytest.Subtests) -> None:
    for setting, loop in [("plain", "own"), ("all", "generate")]:
        with subtests.test(setting=setting, loop=loop):
            config = SamplingConfig(max_new_tokens=12, **SETTINGS[setting])
            model = tiny_model()
            together = sample(model, config, seeds=range(40, 49), loop=loop)
            for row in (0, 4, 8):  # of each prompt, padded to 7 tokens in the batch
                alone = sample(model, config, prompts=[PROMPTS[row // 3]], size=1, seeds=[40 + row], loop=loop)
                assert alone.token_ids[0] == together.token_ids[row]
                assert alone.finish_reasons[0] == together.finish_reasons[row]
                assert alone.behaviour_log_probs[0] == pytest.approx(
                    together.behaviour_log_probs[row], abs=FLOAT32_LOG_PROB
                )


def test_removing_finished_rows_from_the_batch_changes_no_row(
    subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.0 removes each row as soon as it is finished, 2.0 removes none."""
    for family, most_ended in [("qwen3", 0.0), ("gpt2", 2.0)]:
        with subtests.test(family=family, most_ended=most_ended), monkeypatch.context() as patch:
            config = SamplingConfig(max_new_tokens=20, stop=("1", "2", "a", "b"))
            expected = sample(tiny_model(family), config, size=6)
            assert len(set(map(len, expected.token_ids))) > 3
            patch.setattr(decoding, "MOST_ENDED", most_ended)
            assert_same(sample(tiny_model(family), config, size=6), expected)


def test_growing_the_cache_by_small_steps_changes_no_row(
    subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch
) -> None:
    for growth in (1, 3):
        with subtests.test(growth=growth), monkeypatch.context() as patch:
            config = SamplingConfig(max_new_tokens=12)
            expected = sample(tiny_model(), config)
            patch.setattr(decoding_batch, "GROWTH", growth)
            assert_same(sample(tiny_model(), config), expected)


def test_decoding_some_rows_at_a_time_changes_no_row(subtests: pytest.Subtests) -> None:
    for setting, max_rows in [("plain", 1), ("top-p", 3), ("plain", 5), ("plain", 100)]:
        with subtests.test(setting=setting, max_rows=max_rows):
            config = SamplingConfig(max_new_tokens=8, **SETTINGS[setting])
            whole = sample(tiny_model(), config, with_entropy=True)
            parts = sample(tiny_model(), config, with_entropy=True, max_rows=max_rows)
            assert_same(parts, whole)
            assert (parts.policy_log_probs is parts.behaviour_log_probs) == config.is_exact


def test_rows_that_join_later_change_no_row(subtests: pytest.Subtests) -> None:
    """Rows end at different steps, and rows of the next prompts take their places."""
    cases = [
        *((family, "plain", 4) for family in SHARING),
        ("qwen3", "all", 4),
        ("qwen3", "penalty", 1),
        ("gpt2", "stop", 7),
    ]
    for family, setting, max_rows in cases:
        with subtests.test(family=family, setting=setting, max_rows=max_rows):
            settings = {"stop": ("1", "2", "a", "b"), **SETTINGS[setting]}
            config = SamplingConfig(max_new_tokens=16, **settings)
            model = tiny_model(family)
            whole = sample(model, config, size=6, with_entropy=True)
            assert len(set(map(len, whole.token_ids))) > 2
            assert_same(sample(model, config, size=6, with_entropy=True, max_rows=max_rows), whole)
            swapped = sample(
                model,
                config,
                size=6,
                prompts=PROMPTS[::-1],
                seeds=[*range(12, 18), *range(6, 12), *range(6)],
                max_rows=max_rows,
            )
            assert swapped.token_ids == [*whole.token_ids[12:], *whole.token_ids[6:12], *whole.token_ids[:6]]


def test_a_place_is_taken_as_soon_as_its_row_ends_and_the_cache_stays_as_wide_as_one_row() -> None:
    config = SamplingConfig(max_new_tokens=16, stop=("1", "2", "a", "b"))
    model = tiny_model()
    shapes = forward_shapes(model)
    widths: list[int] = []
    drawn: list[int] = []
    model.lm_head.register_forward_pre_hook(lambda module, args: drawn.append(len(args[0])))
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["past_key_values"].get_seq_length()), with_kwargs=True
    )
    sampled = sample(model, config, size=6, max_rows=4)
    prompts = [shape for shape in shapes if shape[1] > 1]
    assert sorted(prompts) == sorted((1, len(prompt)) for prompt in PROMPTS)  # each prompt once
    assert drawn[0] == 4
    assert drawn == sorted(drawn, reverse=True)  # a place stays empty only when no row waits
    assert sum(drawn) == sum(map(len, sampled.token_ids))  # no row goes on after its end
    assert max(widths) <= max(map(len, PROMPTS)) + 16


def test_each_prompt_is_forwarded_once_and_the_batch_shrinks(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model()
    shapes = forward_shapes(model)
    monkeypatch.setattr(decoding, "MOST_ENDED", 0.0)
    sampled = sample(model, SamplingConfig(max_new_tokens=20, stop=("1", "2", "a", "b")), size=6)
    alive = [sum(len(row) > step for row in sampled.token_ids) for step in range(1, max(map(len, sampled.token_ids)))]
    assert shapes == [(3, 7), *((count, 1) for count in alive)]


def test_prompts_are_forwarded_within_a_budget_and_continued_together(subtests: pytest.Subtests) -> None:
    """There are three prompts, and the longest has 7 tokens. Padding counts against the budget."""
    for family, max_tokens, parts in [
        ("qwen3", 21, [3]),
        ("qwen3", 20, [2, 1]),
        ("gpt2", 7, [1, 1, 1]),
        ("gpt2", 1, [1, 1, 1]),
    ]:
        with subtests.test(family=family, max_tokens=max_tokens):
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


def test_a_completion_ends_at_an_end_token_a_stop_string_or_the_limit() -> None:
    config = SamplingConfig(max_new_tokens=6, stop=("1",))
    sampled = sample(tiny_model(), config, size=20)
    assert set(sampled.finish_reasons) == {"end", "stop", "length"}
    one = CHARACTERS.index("1") + 2
    for tokens, reason in zip(sampled.token_ids, sampled.finish_reasons, strict=True):
        assert not {END, one} & set(tokens[:-1])
        expected = "end" if tokens[-1] == END else "stop" if tokens[-1] == one else "length"
        assert reason == expected
        assert len(tokens) == 6 or reason != "length"


def test_only_the_given_end_tokens_end_a_completion(subtests: pytest.Subtests) -> None:
    """The end token of the model, END, ends no completion if `end_token_ids` does not have it."""
    for loop in ["own", "generate"]:
        with subtests.test(loop=loop):
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


def test_the_generation_config_of_the_model_is_ignored(subtests: pytest.Subtests) -> None:
    """The generation config of a model may penalise, suppress and truncate; sampling does not use it."""
    for loop in ["own", "generate"]:
        with subtests.test(loop=loop):
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
            assert model.generation_config.top_k == 1  # the model keeps its config


def test_stop_strings_are_ignored_before_the_minimum(subtests: pytest.Subtests) -> None:
    for loop in ["own", "generate"]:
        with subtests.test(loop=loop):
            strings = tuple("0123456789abcdefgh")
            early = sample(tiny_model(), SamplingConfig(max_new_tokens=12, stop=strings), size=8, loop=loop)
            late = sample(
                tiny_model(), SamplingConfig(max_new_tokens=12, stop=strings, min_new_tokens=5), size=8, loop=loop
            )
            assert min(map(len, early.token_ids)) == 1
            assert min(map(len, late.token_ids)) == 5


def test_a_stop_string_can_span_several_tokens() -> None:
    tokens = torch.tensor([TOKENIZER("ab+1z")["input_ids"], TOKENIZER("1+abz")["input_ids"]])
    assert StopStrings(TOKENIZER, ["+1z"]).found(tokens) == [True, False]
    assert StopStrings(TOKENIZER, ["b+1z", "bz"]).found(tokens) == [True, True]
    assert StopStrings(TOKENIZER, []).found(tokens) == [False, False]


def test_a_stop_string_may_be_a_special_token(subtests: pytest.Subtests) -> None:
    """The text of a completion leaves the token out. It is named by the tokenizer, or only marked as special."""
    rows = torch.tensor([TOKENIZER(text)["input_ids"] for text in ("ab<eos>", "<eos>ab", "abc")])
    for stop, found in [
        ("<eos>", [True, True, False]),
        ("b<eos>", [True, False, False]),
        ("<pad>", [False, False, False]),
        ("ab", [True, True, True]),
    ]:
        assert StopStrings(TOKENIZER, [stop]).found(rows) == found
    assert StopStrings(TOKENIZER, ["<eos>", "c"]).found(rows) == [True, True, True]
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


def test_special_tokens_are_not_part_of_the_text_that_is_searched_for_stop_strings() -> None:
    """The name of <pad> has an "a", but the decoded text leaves <pad> out."""
    tokens = torch.tensor([[CHARACTERS.index("b") + 2, PAD, CHARACTERS.index("c") + 2]])
    assert StopStrings(TOKENIZER, ["a"]).found(tokens) == [False]
    assert StopStrings(TOKENIZER, ["bc"]).found(tokens) == [True]


def test_a_stop_string_is_searched_for_in_the_last_tokens_only() -> None:
    """An earlier stop string would have ended the row, so tokens further back are not decoded again."""
    tokens = torch.tensor([TOKENIZER("z" + "a" * 20)["input_ids"], TOKENIZER("a" * 20 + "z")["input_ids"]])
    assert StopStrings(TOKENIZER, ["z"]).found(tokens) == [False, True]


# Modes


def test_training_mode_with_gradient_checkpointing_samples_as_evaluation_mode_does(subtests: pytest.Subtests) -> None:
    """In training mode, layers with gradient checkpointing store no keys and values."""
    for loop in ["own", "generate"]:
        with subtests.test(loop=loop):
            model = tiny_model()
            expected = sample(model, SamplingConfig(max_new_tokens=8), loop=loop)
            model.gradient_checkpointing_enable()
            model.train()
            assert_same(sample(model, SamplingConfig(max_new_tokens=8), loop=loop), expected)
            assert model.training


def test_sampling_builds_no_graph_and_sync_changes_nothing() -> None:
    model = tiny_model()
    sampled = sample(model, SamplingConfig(max_new_tokens=2))
    assert isinstance(sampled.behaviour_log_probs[0][0], float)
    DecodingSampler(CausalLM(model), TOKENIZER).sync(model)
    assert all(parameter.grad is None for parameter in model.parameters())
