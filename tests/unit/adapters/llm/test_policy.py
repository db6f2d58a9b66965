"""`HFPolicy`: sampling, and what ends completions; wrong arguments, states and actions, refused in words; references, trained
parameters and modes; and `lora_start`."""

import ast
import copy
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import (
    AdaptionPromptConfig,
    FourierFTConfig,
    IA3Config,
    LoraConfig,
    PeftModel,
    TrainableTokensConfig,
    get_peft_model,
)

from adapters.llm import HFOptions, HFPolicy, SampledTokens, SamplingConfig, lora_start
from adapters.llm.completions import Completion
from adapters.llm.sampling.vllm_server import VLLMServerSampler
from grpo import AdvantageConfig, ExperienceBatch, GRPOConfig, GRPOTrainer, ObjectiveConfig, presets
from grpo.errors import ConfigError, ContractError, GRPOError, GRPOWarning
from grpo.policy_base import ScoresReference
from grpo.surrogates import Clip
from tests.support.llm_models import (
    CHARACTERS,
    END,
    FLOAT32_GRADIENT,
    FLOAT32_LOG_PROB,
    PAD,
    ROWS,
    STATES,
    VOCABULARY_SIZE,
    adapted_model,
    assert_rows,
    character_tokenizer,
    completion,
    encoded,
    forward_shapes,
    gradients,
    log_probs_of_rows,
    policy_of,
    relative_difference,
    sum_of_tokens,
    tiny_model,
    trainer_of,
)
from tests.support.objective_inputs import as_users_run_it

TOKENIZER = character_tokenizer()


def test_sampled_actions_have_texts_finish_reasons_log_probs_and_metrics() -> None:
    policy = policy_of(sampling=SamplingConfig(max_new_tokens=6, stop=("1", "a")))
    sampled = policy.sample_actions(STATES, 8)
    assert [len(group) for group in sampled.actions] == [8, 8, 8]
    rows = [action for group in sampled.actions for action in group]
    assert {action.finish_reason for action in rows} == {"end", "stop", "length"}
    assert sampled.mask.sum(1).tolist() == [len(action) for action in rows]
    for row, action in enumerate(rows):
        spelled = "".join(CHARACTERS[token - 2] for token in action.token_ids if token not in (PAD, END))
        assert action.text == spelled  # with the stop string, without special tokens
        assert (action.text[-1:] in ("1", "a")) == (action.finish_reason == "stop")
        assert (action.token_ids[-1] == END) == (action.finish_reason == "end")
        assert not {END, *encoded("1a")} & set(action.token_ids[:-1])
        assert len(action) == 6 or action.finish_reason != "length"
        assert sampled.behaviour_log_probs[row, : len(action)].tolist() == pytest.approx(action.behaviour_log_probs)
    assert sampled.metrics == {
        "completions/tokens": float(sum(map(len, rows))),
        "completions/truncated": float(sum(action.finish_reason == "length" for action in rows)),
    }


def test_sampling_follows_and_advances_the_seed_of_torch() -> None:
    policy = policy_of()
    torch.manual_seed(3)
    first, second = policy.generate_actions(STATES, 2), policy.generate_actions(STATES, 2)
    torch.manual_seed(3)
    assert policy.generate_actions(STATES, 2) == first != second


def test_settings_of_one_call_are_checked_and_apply_to_that_call_only() -> None:
    policy = policy_of()
    assert {len(action) for action in policy.generate_actions(STATES, 1, max_new_tokens=1)[0]} == {1}
    assert policy.sampling.max_new_tokens == 8
    with pytest.raises(ConfigError, match=r"SamplingConfig\.top_p"):
        policy.generate_actions(STATES, 1, top_p=2.0)
    message = (
        r"no settings 'max_tokens', 'topk'. Did you mean SamplingConfig\(max_new_tokens=...\)\? Did you mean .*top_k="
    )
    with pytest.raises(ConfigError, match=message):
        policy.generate_actions(STATES, 1, max_tokens=5, topk=3)


def test_texts_chats_and_rows_with_the_same_prompt_give_the_same_completions() -> None:
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
    """A sampler that returns given samples and records its arguments."""

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


TWO_ROWS = SampledTokens(
    token_ids=[[5, END], [6]], finish_reasons=["end", "stop"], behaviour_log_probs=[[-1, -2], [-3]]
)


def test_another_sampler_gets_the_prompts_and_the_weights() -> None:
    sampler = Told(TWO_ROWS)
    policy = policy_of(sampler=sampler)
    sampled = policy.sample_actions(["1+1="], 2)
    assert sampler.asked["prompts"] == [encoded("1+1=")]
    assert (sampler.asked["size"], sampler.asked["ends"]) == (2, (END,))
    assert len(set(sampler.asked["seeds"])) == 2
    assert all(0 <= seed < 2**63 for seed in sampler.asked["seeds"])
    assert sampled.scores is None  # this sampler has no log-probs under the policy
    assert sampled.behaviour_log_probs.tolist() == [[-1, -2], [-3, 0]]
    assert sampled.actions == [
        [
            Completion(token_ids=(5, END), text=CHARACTERS[3], finish_reason="end", behaviour_log_probs=(-1, -2)),
            Completion(token_ids=(6,), text=CHARACTERS[4], finish_reason="stop", behaviour_log_probs=(-3,)),
        ]
    ]
    policy.sync_sampler()
    assert sampler.synced == [policy.model]


def test_a_sampler_of_this_process_does_not_begin_sampling() -> None:
    assert policy_of().begin_sampling(STATES, 2) is None
    sampler = Told(SampledTokens(token_ids=[], finish_reasons=[], behaviour_log_probs=[]))
    assert policy_of(sampler=sampler).begin_sampling(STATES, 2) is None
    sampler.samples_beside = False  # type: ignore[attr-defined]
    assert policy_of(sampler=sampler).begin_sampling(STATES, 2) is None
    assert VLLMServerSampler.samples_beside


def test_seeds_are_drawn_when_sampling_begins_and_the_sampler_is_asked_later() -> None:
    sampler = Told(TWO_ROWS)
    sampler.samples_beside = True  # type: ignore[attr-defined]
    policy = policy_of(sampler=sampler)
    torch.manual_seed(3)
    expected = policy.sample_actions(["1+1="], 2)
    asked, after = sampler.asked, torch.get_rng_state()
    torch.manual_seed(3)
    sampler.asked = {}
    sample = policy.begin_sampling(["1+1="], 2)
    assert sampler.asked == {}
    assert torch.equal(torch.get_rng_state(), after)
    torch.manual_seed(99)
    sampled = sample()
    assert sampler.asked == asked
    assert sampled.actions == expected.actions
    assert torch.equal(sampled.behaviour_log_probs, expected.behaviour_log_probs)


def asked_ends(tokenizer: Any = TOKENIZER, model: Any = None, **options: Any) -> tuple[int, ...]:
    sampler = Told(SampledTokens(token_ids=[[5]], finish_reasons=["end"], behaviour_log_probs=[[-1]]))
    policy_of(model, tokenizer=tokenizer, sampler=sampler, **options).generate_actions(["a"], 1)
    return sampler.asked["ends"]


def test_the_end_tokens_are_those_of_the_tokenizer_and_of_the_model() -> None:
    model = tiny_model()
    model.generation_config.eos_token_id = [7, 5]  # chat models have several
    assert asked_ends(model=model) == (END, 5, 7)
    model.generation_config.eos_token_id = 7
    assert asked_ends(character_tokenizer(end=False), model) == (7,)
    assert asked_ends(model=model, end_token_ids=[9]) == (9,)


def test_a_model_without_an_end_token_needs_end_token_ids() -> None:
    model = tiny_model(eos_token_id=None)
    tokenizer = character_tokenizer(end=False)
    message = r"no completion could end.*Pass options=HFOptions\(end_token_ids=\(\.\.\.,\)\)"
    with pytest.raises(ConfigError, match=message):
        policy_of(model, tokenizer=tokenizer)
    beyond = character_tokenizer(end=False)
    beyond.add_special_tokens({"eos_token": "<end>"})  # the model has no such token
    with pytest.raises(ConfigError, match=message):
        policy_of(model, tokenizer=beyond)
    assert asked_ends(tokenizer, model, end_token_ids=[]) == ()
    assert asked_ends(tokenizer, model, sampling=SamplingConfig(stop=("\n",), max_new_tokens=8)) == ()


def test_a_tokenizer_needs_no_padding_token() -> None:
    tokenizer = character_tokenizer(pad=False)
    assert tokenizer.pad_token_id is None
    torch.manual_seed(0)
    found = policy_of(tokenizer=tokenizer).sample_actions(STATES, 2)
    torch.manual_seed(0)
    assert torch.equal(found.mask, policy_of().sample_actions(STATES, 2).mask)


@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_prompts_that_are_too_long_are_refused_before_sampling(family: Any) -> None:
    policy = policy_of(tiny_model(family), max_new_tokens=10)  # of 64 positions, so prompts of 54 tokens fit
    assert len(policy.generate_actions(["a" * 54], 1)) == 1
    with pytest.raises(ContractError, match=r"64 positions; those at \[1\] need \[65\]"):
        policy.generate_actions(["a" * 54, "a" * 55], 1)
    assert len(policy.generate_actions(["a" * 55], 1, max_new_tokens=9)) == 1


def test_the_limit_of_rows_also_splits_a_group() -> None:
    policy = policy_of(max_rows_per_decode=2)
    shapes = forward_shapes(policy.model)
    policy.generate_actions(STATES, 5)
    assert max(num_rows for num_rows, _ in shapes) == 2


def test_a_supervised_run_teaches_given_texts() -> None:
    """Two texts of different length. After training, each is what the model finds most likely, with its end."""
    torch.manual_seed(0)
    policy = policy_of(max_new_tokens=6)
    given = policy.demonstrations(["ab", "b"], ["a1", "11ba"])
    assert [action.token_ids for action in given.actions] == [(*encoded("a1"), END), (*encoded("11ba"), END)]
    assert given.mask.tolist() == [[True] * 3 + [False] * 2, [True] * 5]
    trainer = trainer_of(policy, learning_rate=2e-2, micro_batch_size=1)
    history = trainer.train(None, demonstrations=given, num_iterations=40, progress=False)
    assert history[-1]["train/demonstration_loss"] < 0.1
    found = policy.generate_actions(["ab", "b"], 1, temperature=0)
    assert [(action.text, action.finish_reason) for [action] in found] == [("a1", "end"), ("11ba", "end")]


def test_a_demonstration_ends_with_a_token_that_ends_completions() -> None:
    """The tokenizer's own end token, if it is one of them."""
    token = encoded("1")[0]
    for ends, expected in (([token], token), ([token, END], END)):
        given = policy_of(end_token_ids=ends).demonstrations(["a"], ["b"])
        assert given.actions[0].token_ids == (*encoded("b"), expected)
    with pytest.raises(ContractError, match=r"texts must have one entry per row = 1; got a list of 2 str"):
        policy_of().demonstrations(["a"], ["b", "c"])
    with pytest.raises(ContractError, match=r"demonstrations: texts must be a list of str; got None"):
        policy_of().demonstrations(["a"], [None])  # type: ignore[list-item]


def test_texts_are_no_completions() -> None:
    """Before anything is scored: the plan of the passes reads them first."""
    trainer = trainer_of(policy_of())
    message = r"actions must be Completions; got str 'b'.* demonstrations\(states, texts\)"
    with as_users_run_it(), pytest.raises(ContractError, match=message):
        trainer.update(ExperienceBatch.from_demonstrations(["a"], ["b"]))


# --- wrong models, tokenizers, settings, states and actions


def test_an_adapter_that_was_loaded_for_inference_is_refused_by_the_trainer(tmp_path: Path) -> None:
    """`PeftModel.from_pretrained` freezes the adapter unless is_trainable=True."""
    get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(str(tmp_path))
    frozen = policy_of(PeftModel.from_pretrained(tiny_model(), str(tmp_path)))
    assert len(frozen.get_parameters()) == len(list(frozen.model.parameters()))
    with pytest.raises(ConfigError, match=r"HFPolicy\.get_parameters\(\) must hold .* are frozen.*is_trainable=True"):
        trainer_of(frozen)
    trained = policy_of(PeftModel.from_pretrained(tiny_model(), str(tmp_path), is_trainable=True))
    assert all("lora" in name for name in trained.get_parameters())
    assert trainer_of(trained).step(["1+1="])["train/num_updates"] == 1


def test_a_reference_model_that_shares_trained_parameters_is_refused(subtests: pytest.Subtests) -> None:
    model, adapted = tiny_model(), adapted_model()
    tied = tiny_model()
    tied.lm_head = model.lm_head
    for trained, reference in [(model, model), (adapted, adapted.get_base_model()), (model, tied)]:
        with subtests.test(), pytest.raises(ConfigError, match=r"reference_model must be another model"):
            HFPolicy(trained, TOKENIZER, reference_model=reference)
        assert any(parameter.requires_grad for parameter in trained.parameters())
    HFPolicy(model, TOKENIZER, reference_model=copy.deepcopy(model))


def unnamed() -> Any:
    model = tiny_model()
    model.config.return_dict = False
    return model


WRONG_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"model": "gpt2"}, r"got 'gpt2'\. Use HFPolicy\.from_pretrained\('gpt2'\)"),
    ({"model": None}, r"must be a decoder-only .* got NoneType"),
    ({"model": torch.nn.Linear(2, 2)}, r"must be a decoder-only .* got Linear"),
    ({"model": unnamed()}, r"return_dict=False\. Set model\.config\.return_dict = True"),
    ({"tokenizer": None}, r"tokenizer must be the model's tokenizer; got NoneType"),
    ({"tokenizer": "gpt2"}, r"tokenizer must be the model's tokenizer; got str 'gpt2'"),
    ({"model": tiny_model(vocab_size=20)}, r"must not be larger than the model's vocabulary of 20 tokens; it has 44"),
    ({"reference_model": 3}, r"must be a decoder-only"),
    ({"reference_model": tiny_model(vocab_size=20)}, r"must have the vocabulary of the model, 44 tokens; it has 20"),
    ({"options": HFOptions(end_token_ids=(VOCABULARY_SIZE,))},
        rf"from 0 to {VOCABULARY_SIZE - 1}, .* got \({VOCABULARY_SIZE},\)"),
    ({"options": HFOptions(end_token_ids=(-1,))}, r"end_token_ids must be from 0"),
    ({"options": {"exact_entropy": True}}, r"options must be HFOptions or None; got dict"),
    ({"exact_entropy": True, "prompt_column": "q"},
        r"takes prompt_column, exact_entropy in options. Pass options=HFOptions\("),
    ({"temperature": 0.5}, r"HFPolicy has no arguments \['temperature'\]"),
    ({"sampling": {"temperature": 1.0}}, r"sampling must be a SamplingConfig or None; got dict"),
    ({"sampling": SamplingConfig(temperature=0)},
        r"sampling\.temperature must be above 0.*generate_actions\(states, 1, temperature=0\)"),
    ({"sampler": 3}, r"sampler must be 'decoding', 'recorded', 'generate', 'continuous' or a Sampler"),
]  # fmt: skip


def test_wrong_arguments_of_the_constructor_are_refused(subtests: pytest.Subtests) -> None:
    for changes, message in WRONG_ARGUMENTS:
        arguments = {"model": tiny_model(), "tokenizer": TOKENIZER, **changes}
        with subtests.test(changes=changes), as_users_run_it(), pytest.raises(GRPOError, match=message):
            HFPolicy(arguments.pop("model"), arguments.pop("tokenizer"), **arguments)


def test_a_misplaced_option_is_refused_before_the_model_is_loaded() -> None:
    with pytest.raises(ConfigError, match=r"takes exact_entropy in options"):
        HFPolicy.from_pretrained("no/such-model", exact_entropy=True)


def test_wrong_states_and_numbers_of_completions_are_refused(subtests: pytest.Subtests) -> None:
    policy = policy_of()
    chat = [{"role": "user", "content": "1+1="}]
    for states, size, message in [
        ("abc", 1, r"states must be a sequence of prompts; got str 'abc'\. Pass a list"),
        ({"prompt": "abc"}, 1, r"states must be a sequence of prompts; got dict"),
        (None, 1, r"states must be a sequence of prompts; got NoneType"),
        (3, 1, r"states must be a sequence of prompts; got int"), ([], 1, r"got none\. Pass at least one prompt"),
        (["abc"], 0, r"num_actions_per_state must be an integer of at least 1; got 0"),
        (["abc"], -1, r"at least 1; got -1"), (["abc"], 1.5, r"at least 1; got 1\.5"),
        (chat, 1, r"A chat is one state, a list of messages; got a message as a state"),
    ]:  # fmt: skip
        with subtests.test(states=states, size=size), as_users_run_it(), pytest.raises(ContractError, match=message):
            policy.generate_actions(states, size)


def test_wrong_actions_are_refused(subtests: pytest.Subtests) -> None:
    policy = policy_of()
    for states, actions, message in [
        (STATES, ROWS[:2], r"actions must have one entry per row = 3; got a list of 2"),
        (["a"], ["b"], r"actions must be Completions; got str 'b'"),
        (["a"], [completion(5, VOCABULARY_SIZE)],
            rf"scored token ids must be below {VOCABULARY_SIZE}, .*; got {VOCABULARY_SIZE}"),
    ]:  # fmt: skip
        with subtests.test(actions=actions), as_users_run_it():
            with pytest.raises(ContractError, match=message):
                policy.score_actions(states, actions)
            with pytest.raises(ContractError, match=message):
                policy.get_log_probabilities(states, actions)
    with pytest.raises(ContractError, match=r"score_groups: actions must have one entry per row = 3"):
        policy.score_groups(STATES, [[row] for row in ROWS[:2]])


def test_wrong_samples_of_another_sampler_are_refused() -> None:
    def given(*rows: list[int], **changes: Any) -> SampledTokens:
        right = {"finish_reasons": ["end"] * len(rows), "behaviour_log_probs": [[-1.0] * len(row) for row in rows]}
        return SampledTokens(**{"token_ids": [*rows], **right, **changes})

    with pytest.raises(ContractError, match=rf"sampled token ids must be below {VOCABULARY_SIZE}, .*; got 99"):
        policy_of(sampler=Told(given([99]))).generate_actions(["a"], 1)
    with pytest.raises(ContractError, match=r"the sampler: token_ids must have one entry per row = 2"):
        policy_of(sampler=Told(given([9]))).generate_actions(["a"], 2)
    wrong: list[dict[str, Any]] = [
        {"finish_reasons": []}, {"behaviour_log_probs": [[-1.0]]}, {"policy_log_probs": []}, {"entropies": [[]]},
        {"token_ids": [5]}, {"behaviour_log_probs": "ab"}, {"finish_reasons": None},
    ]  # fmt: skip
    for changes in wrong:
        refusal = pytest.raises(ContractError, match=rf"SampledTokens\.{next(iter(changes))} must have one")
        with as_users_run_it(), refusal:
            given([5, 6], **changes)


def test_a_token_that_was_added_to_the_tokenizer_only_is_refused_in_a_prompt() -> None:
    """Added tokens that no prompt has do not matter (Gemma 3 has one for images)."""
    tokenizer = character_tokenizer()
    tokenizer.add_tokens(["<new>"])
    policy = policy_of(tokenizer=tokenizer)
    assert len(policy.generate_actions(["1+1="], 1)) == 1
    message = rf"state 1 must have token ids below {VOCABULARY_SIZE}.* got {VOCABULARY_SIZE} \('<new>'\)"
    with pytest.raises(ContractError, match=message):
        policy.generate_actions(["1+1=", "1<new>"], 1)


def test_the_settings_to_start_with_are_those_that_the_docstring_gives_reasons_for() -> None:
    text = lora_start.__doc__ or ""
    parts: dict[str, dict[str, Any]] = {"": {}, "advantage.": {}, "objective.": {"surrogate": Clip(low=0.2, high=0.28)}}
    for part, name, value in re.findall(r"- `((?:\w+\.)?)(\w+)=([^`]+)`: ", text):
        parts[part][name] = ast.literal_eval(value)
    advantage, objective = AdvantageConfig(**parts["advantage."]), ObjectiveConfig(**parts["objective."])
    assert lora_start() == GRPOConfig(**parts[""], advantage=advantage, objective=objective)
    assert "- `Clip(low=0.2, high=0.28)`: " in text
    assert lora_start().learning_rate == pytest.approx(10 * presets.dapo().learning_rate)  # that of all weights


@pytest.mark.filterwarnings("ignore:step.. does not honour")  # of the lone collect() at its end
def test_a_run_with_them_is_on_policy_without_a_reference_and_trains_the_adapter() -> None:
    policy = policy_of(adapted_model(), max_new_tokens=4)
    before = {name: value.detach().clone() for name, value in policy.get_parameters().items()}
    config = replace(lora_start(), num_states_per_iteration=4)
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=sum_of_tokens)
    (metrics,) = trainer.train(["1+1=", "2+1=", "3+1=", "4+1="], num_iterations=1, progress=False)
    assert metrics["train/ratio_mean"] == pytest.approx(1.0, abs=1e-3)
    assert metrics["train/clip_fraction"] == 0.0
    assert trainer.collect(["1+1="]).ref_log_probs is None
    assert any(not value.equal(before[name]) for name, value in policy.get_parameters().items())


# --- references, trained parameters and modes


def test_without_adapter_and_reference_model_there_is_no_reference() -> None:
    assert not isinstance(policy_of(), ScoresReference)
    assert isinstance(policy_of(adapted_model()), ScoresReference)
    assert isinstance(policy_of(reference_model=tiny_model()), ScoresReference)


KINDS: dict[str, Callable[[], Any]] = {
    "a new LoRA": lambda: get_peft_model(tiny_model(), LoraConfig(r=4, target_modules=["q_proj"])),
    "a LoRA that was trained before": adapted_model, "PiSSA": lambda: adapted_model(init_lora_weights="pissa"),
    "OLoRA with a head": lambda: adapted_model(init_lora_weights="olora", modules_to_save=["lm_head"]),
    "DoRA": lambda: get_peft_model(tiny_model(), LoraConfig(r=4, target_modules=["q_proj"], use_dora=True)),
    "biases outside": lambda: get_peft_model(tiny_model("gpt2"),
        LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, bias="all")),
    "a head outside": lambda: _with_trained_head(get_peft_model(tiny_model(), LoraConfig(target_modules=["q_proj"]))),
    "tokens": lambda: get_peft_model(tiny_model(), TrainableTokensConfig(token_indices=[3, 4, 5, 6])),
    "vectors": lambda: get_peft_model(tiny_model(), IA3Config(target_modules=["q_proj"], feedforward_modules=[])),
    "a random start": lambda: get_peft_model(tiny_model(), FourierFTConfig(target_modules=["q_proj"], n_frequency=20)),
    "adaption prompts": lambda: get_peft_model(tiny_model("llama"),
        AdaptionPromptConfig(adapter_len=4, adapter_layers=1, task_type="CAUSAL_LM")),
    "add_adapter of transformers": lambda: _integrated(tiny_model()),
}  # fmt: skip


def _with_trained_head(model: Any) -> Any:
    model.get_output_embeddings().requires_grad_(True)
    return model


def _integrated(model: Any) -> Any:
    model.add_adapter(LoraConfig(r=4, target_modules=["q_proj"]))
    return model


@torch.no_grad()
def move(policy: HFPolicy) -> None:
    for value in policy.get_parameters().values():
        value.add_(0.1 * torch.randn_like(value))


@pytest.mark.parametrize(("name", "make"), KINDS.items())
def test_the_reference_is_the_policy_as_training_began(name: Any, make: Any) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        policy = policy_of(make().eval())
        start = policy.score_actions(STATES, ROWS).log_probs.detach()
        for _ in range(2):
            move(policy)
            now = policy.score_actions(STATES, ROWS).log_probs.detach()
            assert float((now - start).abs().max()) > 0.01
            found = policy.reference_log_probabilities(STATES, ROWS)
            torch.testing.assert_close(found, start, rtol=0, atol=FLOAT32_LOG_PROB)
            torch.testing.assert_close(policy.score_actions(STATES, ROWS).log_probs.detach(), now, rtol=0, atol=0)
        assert all(value.requires_grad for value in policy.get_parameters().values())


def test_a_new_lora_keeps_no_copy_of_its_weights() -> None:
    copies = {name: len(policy_of(KINDS[name]())._own_reference._start) for name in list(KINDS)[:2]}
    assert copies == {"a new LoRA": 0, "a LoRA that was trained before": 2 * 2}


def test_the_base_model_is_the_reference_on_request_where_it_is_left(subtests: pytest.Subtests) -> None:
    policy = policy_of(adapted_model(), reference="base")
    assert_rows(policy.reference_log_probabilities(STATES, ROWS), log_probs_of_rows(tiny_model()))
    for name, cause in {
        "PiSSA": "init_lora_weights='pissa' has changed the base weights",
        "OLoRA with a head": "init_lora_weights='olora'",
        "biases outside": r"bias.* is trained outside the adapter",
        "a head outside": r"lm_head.weight is trained outside",
    }.items():
        with subtests.test(kind=name), pytest.raises(ConfigError, match=cause):
            policy_of(KINDS[name](), reference="base")
    for options, cause in [
        ({}, "this model has no adapter"),
        ({"reference_model": tiny_model()}, r"options\.reference='base' and reference_model are two"),
    ]:
        with subtests.test(options=options), pytest.raises(ConfigError, match=cause):
            policy_of(reference="base", **options)


def test_a_reference_that_is_not_the_start_is_told_at_the_first_update() -> None:
    """A reference that was asked for is never judged: another model, or the base model."""

    def first_kl(policy: HFPolicy, change: bool = False) -> float:
        if change:
            move(policy)
        trainer = trainer_of(policy, learning_rate=1e-3, objective=ObjectiveConfig(kl_coef=0.1))
        return trainer.step(STATES)["train/kl_mean"]

    for name in ("a LoRA that was trained before", "PiSSA"):
        assert abs(first_kl(policy_of(KINDS[name]()))) < 1e-9
    assert first_kl(policy_of(adapted_model(), reference="base")) > 1e-3
    assert first_kl(policy_of(reference_model=tiny_model("llama"))) > 1e-3
    with pytest.warns(GRPOWarning, match=r"the policy's own reference should be .*Its weights changed after it took"):
        first_kl(policy_of(adapted_model()), change=True)


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_a_reference_model_is_frozen_and_may_have_another_architecture(family: Any) -> None:
    """Mistral has sliding windows, so its cache cannot be shared, but the policy's can."""
    model = tiny_model("llama")
    reference = tiny_model(family).train()
    policy = policy_of(model, reference_model=reference)
    assert_rows(policy.reference_log_probabilities(STATES, ROWS), log_probs_of_rows(tiny_model(family)))
    assert_rows(policy.score_actions(STATES, ROWS).log_probs, log_probs_of_rows(model))
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    assert not reference.training
    assert not policy.train()._reference.model.training
    assert not any(name.startswith("reference") for name in policy.get_parameters())


ADAPTERS: list[dict[str, Any]] = [
    {"target_modules": ["q_proj", "lm_head"]},  # the head is not a plain linear layer
    {"target_modules": ["down_proj"], "modules_to_save": ["lm_head"]},
    {"target_modules": "all-linear", "use_dora": True},
]


@pytest.mark.parametrize("options", ADAPTERS)
def test_gradients_of_adapters_are_those_of_single_rows(options: Any) -> None:
    model = adapted_model(**options)
    policy = policy_of(model)
    weights = torch.randn(3, 4)
    scores = policy.score_actions(STATES, ROWS)
    expected = log_probs_of_rows(model)
    assert_rows(scores.log_probs, expected)
    loss = sum((row * weights[i, : len(row)]).sum() for i, row in enumerate(expected))
    found = gradients(model, (scores.log_probs * weights)[scores.mask].sum())
    assert relative_difference(found, gradients(model, loss)) < FLOAT32_GRADIENT
    assert all(slope.any() for slope in found.values())


def test_the_reference_has_no_dropout_and_frozen_parts_stay_frozen() -> None:
    """In training mode too. PEFT makes all parts of an adapter trainable when it is switched on again."""
    config = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.5, init_lora_weights=False)
    model = get_peft_model(tiny_model(), config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_B" in name)
    policy = policy_of(model)
    names = policy.get_parameters().keys()
    expected = policy.eval().reference_log_probabilities(STATES, ROWS)
    found = policy.train().reference_log_probabilities(STATES, ROWS)
    torch.testing.assert_close(found, expected, rtol=0, atol=FLOAT32_LOG_PROB)
    assert model.training
    assert policy.get_parameters().keys() == names


def test_training_weights_of_half_precision_logs_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    policy_of()
    assert not caplog.records
    policy_of(tiny_model(dtype=torch.bfloat16))
    [record] = caplog.records
    assert record.message.startswith("HFPolicy: the trained weights have half precision, so small ")
