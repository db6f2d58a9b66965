import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from adapters.llm import HFPolicy, SampledTokens, SamplingConfig, scoring, token_log_probs
from adapters.llm.completions import Completion
from grpo.errors import ConfigError, ContractError
from grpo.policy_base import ScoresReference
from tests.support.llm_models import (
    CHARACTERS,
    END,
    PAD,
    character_tokenizer,
    completion,
    gradients,
    relative_difference,
    row_log_probs,
    row_logits,
    tiny_model,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*gradient_checkpointing.*:FutureWarning",  # transformers renames it; PEFT asks for it
)

TOKENIZER = character_tokenizer()
STATES = ["1+1=", "12+30=?", "abc"]
ROWS = [completion(5, 6, 7), completion(9), completion(4, 12, 30, 2)]


def policy_of(model: Any = None, *, max_new_tokens: int = 8, **options: Any) -> HFPolicy:
    sampling = options.pop("sampling", SamplingConfig(max_new_tokens=max_new_tokens))
    return HFPolicy(model or tiny_model(), options.pop("tokenizer", TOKENIZER), sampling=sampling, **options)


def adapted(model: Any = None, **options: Any) -> Any:
    """With LoRA that does something: PEFT makes B 0."""
    peft_model = get_peft_model(model or tiny_model(), LoraConfig(r=4, **{"target_modules": ["q_proj"]} | options))
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return peft_model.eval()


def encoded(state: str) -> list[int]:
    return TOKENIZER(state)["input_ids"]


def by_hand(model: Any, temperature: float = 1.0) -> list[Tensor]:
    """Log-probs of `ROWS` after `STATES`."""
    return [
        row_log_probs(model, encoded(state), action.token_ids, temperature)
        for state, action in zip(STATES, ROWS, strict=True)
    ]


def assert_rows(values: Tensor, expected: Sequence[Tensor], tolerance: float = 2e-6) -> None:
    for row, numbers in zip(values, expected, strict=True):
        torch.testing.assert_close(row[: len(numbers)], numbers, atol=tolerance, rtol=0)


# Sampling


def test_sampled_actions_say_all_that_is_known() -> None:
    policy = policy_of(sampling=SamplingConfig(max_new_tokens=6, stop=("1", "a")))
    sampled = policy.sample_actions(STATES, 8)
    assert [len(group) for group in sampled.actions] == [8, 8, 8]
    rows = [action for group in sampled.actions for action in group]
    assert {action.finish_reason for action in rows} == {"end", "stop", "length"}
    assert sampled.mask.sum(1).tolist() == [len(action) for action in rows]
    for row, action in enumerate(rows):
        spelled = "".join(CHARACTERS[token - 2] for token in action.token_ids if token not in (PAD, END))
        assert action.text == spelled  # a stop string included, special tokens left out
        assert (action.text[-1:] in ("1", "a")) == (action.finish_reason == "stop")
        assert sampled.behaviour_log_probs is not None
        assert action.behaviour_log_probs is not None
        assert sampled.behaviour_log_probs[row, : len(action)].tolist() == pytest.approx(action.behaviour_log_probs)
    assert sampled.metrics == {
        "completions/tokens": float(sum(map(len, rows))),
        "completions/truncated": float(sum(action.finish_reason == "length" for action in rows)),
    }


def test_sampling_follows_torchs_seed_and_moves_on() -> None:
    policy = policy_of()
    torch.manual_seed(3)
    first, second = policy.generate_actions(STATES, 2), policy.generate_actions(STATES, 2)
    torch.manual_seed(3)
    assert policy.generate_actions(STATES, 2) == first != second


def test_temperature_zero_is_for_evaluation_and_takes_the_likeliest() -> None:
    policy = policy_of()
    for state, group in zip(STATES, policy.generate_actions(STATES, 2, temperature=0), strict=True):
        assert group[0] == group[1]
        with torch.no_grad():
            logits = row_logits(policy.model, encoded(state), group[0].token_ids)
        assert logits.argmax(1).tolist() == list(group[0].token_ids)
    with pytest.raises(ConfigError, match=r"sampling\.temperature must be above 0.*generate_actions\(states, 1, temp"):
        policy_of(sampling=SamplingConfig(temperature=0))


def test_settings_of_one_call_are_checked_and_do_not_stay() -> None:
    policy = policy_of()
    assert {len(action) for action in policy.generate_actions(STATES, 1, max_new_tokens=1)[0]} == {1}
    assert policy.sampling.max_new_tokens == 8
    with pytest.raises(ConfigError, match=r"SamplingConfig\.top_p"):
        policy.generate_actions(STATES, 1, top_p=2.0)
    with pytest.raises(ConfigError, match=r"no setting 'max_tokens', 'topk'; it has max_new_tokens, .*top_k, "):
        policy.generate_actions(STATES, 1, max_tokens=5, topk=3)


def test_rows_chats_and_texts_are_sampled_alike() -> None:
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    policy = policy_of(tokenizer=tokenizer, prompt_column="question")
    chat = [{"role": "user", "content": "1+1="}]
    found = []
    for state in ("1+1=", chat, {"question": "1+1=", "answer": "2"}, {"question": chat}):
        torch.manual_seed(0)
        found.append(policy.generate_actions([state], 3))
    assert found[0] == found[1] == found[2] == found[3]


class Told:
    """A sampler that says what it is told to, and remembers what it was asked."""

    def __init__(self, sampled: SampledTokens) -> None:
        self.sampled = sampled
        self.asked: dict[str, Any] = {}
        self.synced: list[Any] = []

    def sample(
        self, prompts: Any, num_per_prompt: int, config: Any, *, end_token_ids: Any, seeds: Any
    ) -> SampledTokens:
        self.asked = {"prompts": prompts, "size": num_per_prompt, "ends": end_token_ids, "seeds": seeds}
        return self.sampled

    def sync(self, model: Any) -> None:
        self.synced.append(model)


def test_another_sampler_is_asked_and_given_the_weights() -> None:
    sampler = Told(
        SampledTokens(token_ids=[[5, END], [6]], finish_reasons=["end", "stop"], behaviour_log_probs=[[-1, -2], [-3]])
    )
    policy = policy_of(sampler=sampler)
    sampled = policy.sample_actions(["1+1="], 2)
    assert sampler.asked["prompts"] == [encoded("1+1=")]
    assert (sampler.asked["size"], sampler.asked["ends"]) == (2, [END])
    assert len(set(sampler.asked["seeds"])) == 2
    assert all(0 <= seed < 2**63 for seed in sampler.asked["seeds"])
    assert sampled.scores is None  # it cannot tell what the policy would say
    assert sampled.behaviour_log_probs is not None
    assert sampled.behaviour_log_probs.tolist() == [[-1, -2], [-3, 0]]
    assert sampled.actions == [
        [
            Completion(token_ids=(5, END), text=CHARACTERS[3], finish_reason="end", behaviour_log_probs=(-1, -2)),
            Completion(token_ids=(6,), text=CHARACTERS[4], finish_reason="stop", behaviour_log_probs=(-3,)),
        ]
    ]
    policy.sync_sampler()
    assert sampler.synced == [policy.model]


# What ends a completion


def asked_ends(tokenizer: Any = TOKENIZER, model: Any = None, **options: Any) -> list[int]:
    sampler = Told(SampledTokens(token_ids=[[5]], finish_reasons=["end"], behaviour_log_probs=[[-1]]))
    policy_of(model, tokenizer=tokenizer, sampler=sampler, **options).generate_actions(["a"], 1)
    return sampler.asked["ends"]


def test_completions_end_with_the_tokens_of_tokenizer_and_model() -> None:
    model = tiny_model()
    model.generation_config.eos_token_id = [7, 5]  # chat models have several
    assert asked_ends(model=model) == [END, 5, 7]
    model.generation_config.eos_token_id = 7
    assert asked_ends(character_tokenizer(end=False), model) == [7]
    assert asked_ends(model=model, end_token_ids=[9]) == [9]


def test_without_any_end_something_has_to_be_said() -> None:
    model = tiny_model(eos_token_id=None)
    tokenizer = character_tokenizer(end=False)
    with pytest.raises(ConfigError, match=r"no completion could end.*Pass end_token_ids=\[\.\.\.\]"):
        policy_of(model, tokenizer=tokenizer)
    assert asked_ends(tokenizer, model, end_token_ids=[]) == []
    assert asked_ends(tokenizer, model, sampling=SamplingConfig(stop=("\n",), max_new_tokens=8)) == []


def test_a_padding_token_is_not_needed() -> None:
    tokenizer = character_tokenizer(pad=False)
    assert tokenizer.pad_token_id is None
    torch.manual_seed(0)
    found = policy_of(tokenizer=tokenizer).sample_actions(STATES, 2)
    torch.manual_seed(0)
    assert torch.equal(found.mask, policy_of().sample_actions(STATES, 2).mask)


# Room


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_what_does_not_fit_is_refused_before_anything_is_sampled(family: str) -> None:
    policy = policy_of(tiny_model(family), max_new_tokens=10)  # of 64 positions: prompts of 54 tokens fit
    assert len(policy.generate_actions(["a" * 54], 1)) == 1
    with pytest.raises(ContractError, match=r"64 positions; those at \[1\] need \[65\]"):
        policy.generate_actions(["a" * 54, "a" * 55], 1)
    assert len(policy.generate_actions(["a" * 55], 1, max_new_tokens=9)) == 1


# Scores


def test_the_temperature_of_sampling_holds_in_scoring_and_of_the_reference() -> None:
    policy = policy_of(sampling=SamplingConfig(temperature=0.6), reference_model=tiny_model("llama"))
    assert_rows(policy.score_actions(STATES, ROWS).log_probs, by_hand(policy.model, 0.6))
    assert_rows(policy.reference_log_probabilities(STATES, ROWS), by_hand(tiny_model("llama"), 0.6))


def test_log_probabilities_of_completions_are_sums() -> None:
    policy = policy_of(tiny_model())
    expected = torch.stack([row.sum() for row in by_hand(policy.model)])
    torch.testing.assert_close(policy.get_log_probabilities(STATES, ROWS), expected, atol=5e-6, rtol=0)


def test_truncated_completions_can_be_left_out() -> None:
    policy = policy_of(mask_truncated=True, max_new_tokens=20)
    sampled = policy.sample_actions(STATES, 8)
    rows = [action for group in sampled.actions for action in group]
    expected = [0 if action.is_truncated else len(action) for action in rows]
    assert 0 in expected
    assert any(expected)
    assert sampled.mask.sum(1).tolist() == expected
    scores = policy.score_groups(STATES, sampled.actions)
    assert torch.equal(scores.mask, sampled.mask)
    assert not scores.log_probs[~scores.mask].any()
    kept = policy_of(policy.model).score_groups(STATES, sampled.actions)
    counted = kept.log_probs[:, : scores.mask.shape[1]][scores.mask]
    torch.testing.assert_close(scores.log_probs[scores.mask], counted, atol=2e-6, rtol=0)
    assert sum(len(part) for part in policy.plan_micro_batches([s for s in STATES for _ in range(8)], rows)) == len(
        rows
    )
    widths: list[int] = []
    policy.model.model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    policy.score_groups(STATES, sampled.actions)
    assert widths[1] == max(expected) - 1 < 19  # those left out are the longest, and are not forwarded


def test_the_entropy_is_exact_and_only_told_on_request() -> None:
    assert policy_of().score_actions(STATES, ROWS).entropy is None
    policy = policy_of(exact_entropy=True, sampling=SamplingConfig(temperature=1.5))
    entropy = policy.score_actions(STATES, ROWS).entropy
    assert entropy is not None
    expected = []
    for state, action in zip(STATES, ROWS, strict=True):
        all_log_probs = (row_logits(policy.model, encoded(state), action.token_ids) / 1.5).log_softmax(1)
        expected.append(-(all_log_probs.exp() * all_log_probs).sum(1))
    assert_rows(entropy, expected)


@pytest.mark.parametrize("of", ["adapter", "reference model"])
def test_nobody_computes_the_entropy_of_a_reference_or_of_a_sum(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def asking(*args: Any, with_entropy: bool, **options: Any) -> Any:
        asked.append(with_entropy)
        return token_log_probs(*args, with_entropy=with_entropy, **options)

    options = {"model": adapted()} if of == "adapter" else {"reference_model": tiny_model()}
    policy = policy_of(exact_entropy=True, **options)
    monkeypatch.setattr(scoring, "token_log_probs", asking)
    policy.reference_log_probabilities(STATES, ROWS)
    policy.get_log_probabilities(STATES, ROWS)
    assert asked == [False, False]
    policy.score_actions(STATES, ROWS)
    policy.score_groups(STATES, [[row] for row in ROWS])
    assert asked[2:] == [True, True]


@pytest.mark.parametrize("of", ["log_probs", "entropy"])
def test_gradients_agree_with_finite_differences(of: str) -> None:
    model = tiny_model("gpt2", dtype=torch.float64)
    policy = policy_of(model, exact_entropy=True, sampling=SamplingConfig(temperature=0.7))
    weights = torch.randn(3, 4, dtype=torch.float64)

    def value() -> Tensor:
        scores = policy.score_actions(STATES, ROWS)
        steps = getattr(scores, of)
        return (steps * weights)[scores.mask].sum()

    slopes = gradients(model, value())
    named = dict(model.named_parameters())
    for name in ("transformer.wte.weight", "transformer.h.0.attn.c_attn.weight", "transformer.ln_f.weight"):
        direction = torch.randn_like(named[name])
        differences = []
        with torch.no_grad():
            for sign in (1, -1):
                named[name].add_(direction, alpha=sign * 1e-6)
                differences.append(value())
                named[name].sub_(direction, alpha=sign * 1e-6)
        finite = (differences[0] - differences[1]) / 2e-6
        torch.testing.assert_close((slopes[name] * direction).sum(), finite, rtol=1e-5, atol=1e-6)


def test_tokens_are_scored_as_they_were_sampled_and_never_tokenized_again() -> None:
    """ "a", "b" and "ab" are tokens: the text of (a, b) would be tokenized as one."""
    vocabulary = {"<pad>": 0, "<eos>": 1, "a": 2, "b": 3, "ab": 4}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="a", prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<pad>")
    assert fast("ab")["input_ids"] == [4]
    model = tiny_model(vocab_size=5)
    policy = policy_of(model, tokenizer=fast)
    scores = policy.score_actions(["ab", "ab"], [completion(2, 3), completion(4)])
    assert scores.mask.sum(1).tolist() == [2, 1]
    assert_rows(scores.log_probs, [row_log_probs(model, [4], [2, 3]), row_log_probs(model, [4], [4])])
    sampled = policy.sample_actions(["ab"], 40)
    changed = [action for action in sampled.actions[0] if fast(action.text)["input_ids"] != list(action.token_ids)]
    assert any(3 in action.token_ids and 2 in action.token_ids for action in changed)
    again = policy.score_groups(["ab"], sampled.actions)
    assert sampled.scores is not None
    torch.testing.assert_close(again.log_probs, sampled.scores.log_probs, atol=1e-5, rtol=0)


# Precision


def test_a_model_in_bfloat16_is_scored_in_float32_and_its_sampler_does_not_claim_to_be_exact() -> None:
    model = tiny_model(dtype=torch.bfloat16)
    policy = policy_of(model, exact_entropy=True)
    sampled = policy.sample_actions(STATES, 2)
    assert sampled.scores is None
    assert sampled.behaviour_log_probs is not None
    assert sampled.behaviour_log_probs.dtype == torch.float32
    scores = policy.score_groups(STATES, sampled.actions)
    assert scores.log_probs.dtype == torch.float32
    assert scores.entropy is not None
    assert scores.entropy.dtype == torch.float32
    torch.testing.assert_close(scores.log_probs, sampled.behaviour_log_probs, atol=0.2, rtol=0)
    wide = policy_of(copy.deepcopy(model).float()).score_groups(STATES, sampled.actions)
    torch.testing.assert_close(scores.log_probs, wide.log_probs, atol=0.2, rtol=0)
    assert all(slope.dtype == torch.bfloat16 for slope in gradients(model, scores.log_probs.sum()).values())


def test_under_autocast_scores_are_float32_and_the_sampler_gives_none() -> None:
    policy = policy_of(tiny_model())
    exact = policy.score_actions(STATES, ROWS).log_probs
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert policy.sample_actions(STATES, 2).scores is None
        rounded = policy.score_actions(STATES, ROWS).log_probs
    assert rounded.dtype == torch.float32
    assert 1e-4 < float((rounded - exact).detach().abs().max()) < 0.2
    assert all(slope.dtype == torch.float32 for slope in gradients(policy.model, rounded.sum()).values())


# Gradient checkpointing


def test_gradient_checkpointing_gives_the_same_gradient_and_says_once_what_it_costs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny_model()
    policy = policy_of(model).train()
    weights = torch.randn(3, 4)
    scores = policy.score_actions(STATES, ROWS)
    expected = gradients(model, (scores.log_probs * weights).sum())
    assert not caplog.records
    model.gradient_checkpointing_enable()
    again = policy.score_actions(STATES, ROWS)
    found = gradients(model, (again.log_probs * weights).sum())
    policy.score_actions(STATES, ROWS)
    assert [record.message for record in caplog.records if "gradient checkpointing" in record.message] == [
        (
            "HFPolicy: with gradient checkpointing, layers keep no keys and values, so each row computes its prompt again. "
            "Without it, a prompt is computed once per group. (Said once.)"
        )
    ]
    torch.testing.assert_close(again.log_probs, scores.log_probs, atol=2e-6, rtol=0)
    assert relative_difference(found, expected) < 5e-7
    shapes: list[tuple[int, ...]] = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    policy.score_actions(["abcd"] * 3, ROWS)
    policy.eval().score_actions(["abcd"] * 3, ROWS)  # nothing is run again there: prompts are shared
    assert shapes == [(3, 4 + 4), (1, 4), (3, 3)]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_gives_an_adapter_the_same_gradient(use_reentrant: bool) -> None:
    model = adapted(target_modules="all-linear")
    policy = policy_of(model).train()
    weights = torch.randn(3, 4)
    scores = policy.score_actions(STATES, ROWS)
    expected = gradients(model, (scores.log_probs * weights).sum())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})
    again = policy.score_actions(STATES, ROWS)
    (again.log_probs * weights).sum().backward()
    found = {name: parameter.grad for name, parameter in policy.get_parameters().items()}
    assert relative_difference(found, expected) < 2e-6
    assert all(slope.any() for slope in expected.values())


def test_plans_count_prompts_as_they_are_computed() -> None:
    model = tiny_model()
    policy = policy_of(model, max_tokens_per_forward=30)
    rows = [completion(*range(2, 7))] * 4
    # shared: 10 + 4 * 5 = 30; not shared: a row is 15
    assert len(policy.plan_micro_batches(["abcdefghij"] * 4, rows)) == 1
    model.gradient_checkpointing_enable()
    policy.train()
    assert len(policy.plan_micro_batches(["abcdefghij"] * 4, rows)) == 2
    with pytest.raises(ConfigError, match="max_tokens_per_forward must be at least 1; got 0"):
        policy_of(max_tokens_per_forward=0)


# References


def test_without_adapter_and_reference_model_there_is_no_reference() -> None:
    assert not isinstance(policy_of(), ScoresReference)
    assert isinstance(policy_of(adapted()), ScoresReference)
    assert isinstance(policy_of(reference_model=tiny_model()), ScoresReference)


def test_with_the_adapter_off_the_reference_is_the_base() -> None:
    policy = policy_of(adapted())
    reference = policy.reference_log_probabilities(STATES, ROWS)
    assert not reference.requires_grad
    assert_rows(reference, by_hand(tiny_model()))
    scores = policy.score_actions(STATES, ROWS)
    assert_rows(scores.log_probs, by_hand(policy.model))
    assert float((scores.log_probs - reference).detach().abs().max()) > 0.01


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_a_reference_model_may_be_of_another_family_and_is_frozen(family: str) -> None:
    """One with sliding windows, whose cache cannot be shared as the policy's is."""
    model = tiny_model("llama")
    reference = tiny_model(family).train()
    policy = policy_of(model, reference_model=reference)
    assert_rows(policy.reference_log_probabilities(STATES, ROWS), by_hand(tiny_model(family)))
    assert_rows(policy.score_actions(STATES, ROWS).log_probs, by_hand(model))
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    assert not reference.training
    assert not policy.train()._reference.model.training
    assert not any(name.startswith("reference") for name in policy.get_parameters())


# Parameters and modes


def test_only_what_requires_a_gradient_is_trained() -> None:
    model = adapted()
    names = set(policy_of(model).get_parameters())
    assert names == {name for name, _ in model.named_parameters() if "lora_" in name}
    assert len(names) == 2 * 2  # A and B of two layers


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "lm_head"]},  # the head is no plain linear layer any more
        {"target_modules": ["down_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": "all-linear", "use_dora": True},
    ],
)
def test_gradients_of_adapters_are_those_of_single_rows(options: dict[str, Any]) -> None:
    model = adapted(**options)
    policy = policy_of(model)
    weights = torch.randn(3, 4)
    scores = policy.score_actions(STATES, ROWS)
    expected = by_hand(model)
    assert_rows(scores.log_probs, expected)
    loss = sum((row * weights[i, : len(row)]).sum() for i, row in enumerate(expected))
    found = gradients(model, (scores.log_probs * weights)[scores.mask].sum())
    assert relative_difference(found, gradients(model, loss)) < 1e-6
    assert all(slope.any() for slope in found.values())


def test_modes_and_devices_are_the_models() -> None:
    model, reference = tiny_model(), tiny_model()
    policy = policy_of(model, reference_model=reference)
    assert policy.train() is policy
    assert model.training
    assert policy.eval() is policy
    assert not model.training
    assert policy.to("meta") is policy
    assert model.device.type == reference.device.type == "meta"


def test_no_prompt_at_all() -> None:
    with pytest.raises(ContractError, match="pass at least one prompt"):
        HFPolicy(tiny_model(), character_tokenizer()).generate_actions([], 2)


def test_the_reference_is_scored_without_dropout_and_leaves_frozen_parts_frozen() -> None:
    """Whatever mode the policy is in; PEFT trains all of an adapter again when it is switched back on."""
    model = get_peft_model(
        tiny_model(), LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5, init_lora_weights=False)
    )
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    policy = policy_of(model)
    names = policy.get_parameters().keys()
    expected = policy.eval().reference_log_probabilities(STATES, ROWS)
    torch.testing.assert_close(policy.train().reference_log_probabilities(STATES, ROWS), expected, rtol=0, atol=0)
    assert model.training
    assert policy.get_parameters().keys() == names


def test_an_unknown_sampler_is_named() -> None:
    with pytest.raises(ConfigError, match="sampler must be 'decoding', 'generate' or a Sampler"):
        policy_of(sampler="vllm")


def test_weights_of_half_precision_are_trained_with_a_word_of_warning(caplog: pytest.LogCaptureFixture) -> None:
    policy_of()
    assert not caplog.records
    policy_of(tiny_model(dtype=torch.bfloat16))
    assert [record.message[:60] for record in caplog.records] == [
        "HFPolicy: weights of half precision are trained, where small"
    ]


def test_a_prompt_that_two_groups_share_is_computed_once() -> None:
    policy = policy_of()
    widths: list[int] = []
    policy.model.model.register_forward_pre_hook(
        lambda module, args, kwargs: widths.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    policy.score_groups(["abc", "abc"], [ROWS[:1], ROWS[1:]])
    assert widths[0] == 1


@pytest.mark.parametrize("name", ["max_tokens_per_forward", "max_rows_per_decode"])
def test_limits_are_at_least_one(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at least 1; got 0"):
        policy_of(**{name: 0})


def test_a_limit_of_rows_holds_within_a_group_too() -> None:
    policy, free = policy_of(max_rows_per_decode=2), policy_of()
    rows: list[int] = []
    policy.model.model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    torch.manual_seed(5)
    some = policy.generate_actions(STATES, 5)
    assert max(rows) == 2
    torch.manual_seed(5)
    assert [[c.token_ids for c in group] for group in free.generate_actions(STATES, 5)] == [
        [c.token_ids for c in group] for group in some
    ]


def test_one_end_token_may_be_a_number() -> None:
    [[action]] = policy_of(end_token_ids=1, max_new_tokens=40).generate_actions(["abc"], 1, temperature=0)
    assert 1 not in action.token_ids[:-1]
