"""Wrong models, tokenizers, settings, states and actions of `HFPolicy` are refused in words."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from adapters.llm import CompletionRewards, HFOptions, HFPolicy, JSONSchemaMatch, SampledTokens, VLLMServerSampler
from grpo import GRPOConfig, GRPOTrainer
from grpo.errors import ConfigError, ContractError, GRPOError, GRPOWarning
from tests.support.llm_models import (
    CHARACTERS,
    ROWS,
    STATES,
    VOCABULARY_SIZE,
    adapted_model,
    character_tokenizer,
    completion,
    policy_of,
    tiny_model,
)
from tests.support.objective_inputs import as_users_run_it

TOKENIZER = character_tokenizer()

# Models


def trainer_of(policy: Any, **settings: Any) -> GRPOTrainer:
    config = GRPOConfig(group_size=2, seed=0, **settings)
    return GRPOTrainer(
        config=config, policy=policy, reward_model=lambda states, actions: [float(sum(a.token_ids)) for a in actions]
    )


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


def test_a_frozen_model_may_be_the_reference() -> None:
    reference = policy_of(tiny_model().requires_grad_(False))
    trainer = GRPOTrainer(
        config=GRPOConfig(group_size=2, reference_sync_every=1),
        policy=policy_of(),
        reference_policy=reference,
        reward_model=lambda states, actions: [float(len(action)) for action in actions],
    )
    trainer.step(["1+1="])
    assert torch.equal(*(next(iter(p.get_parameters().values())) for p in (trainer.policy, reference)))


def test_a_reference_model_that_shares_trained_parameters_is_refused_and_stays_trainable(
    subtests: pytest.Subtests,
) -> None:
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
    (
        {"options": HFOptions(end_token_ids=(VOCABULARY_SIZE,))},
        rf"from 0 to {VOCABULARY_SIZE - 1}, .* got \({VOCABULARY_SIZE},\)",
    ),
    ({"options": HFOptions(end_token_ids=(-1,))}, r"end_token_ids must be from 0"),
    ({"options": {"exact_entropy": True}}, r"options must be HFOptions or None; got dict"),
    (
        {"exact_entropy": True, "prompt_column": "q"},
        r"takes prompt_column, exact_entropy in options. Pass options=HFOptions\(",
    ),
    ({"temperature": 0.5}, r"HFPolicy has no arguments \['temperature'\]"),
    ({"sampling": {"temperature": 1.0}}, r"sampling must be a SamplingConfig or None; got dict"),
    ({"sampler": 3}, r"sampler must be 'decoding', 'recorded', 'generate', 'continuous' or a Sampler"),
]


def test_wrong_arguments_of_the_constructor_are_refused(subtests: pytest.Subtests) -> None:
    for changes, message in WRONG_ARGUMENTS:
        arguments = {"model": tiny_model(), "tokenizer": TOKENIZER, **changes}
        with subtests.test(changes=changes), as_users_run_it(), pytest.raises(GRPOError, match=message):
            HFPolicy(arguments.pop("model"), arguments.pop("tokenizer"), **arguments)


def test_a_misplaced_option_is_refused_before_the_model_is_loaded() -> None:
    with pytest.raises(ConfigError, match=r"takes exact_entropy in options"):
        HFPolicy.from_pretrained("no/such-model", exact_entropy=True)


def test_an_end_token_beyond_the_vocabulary_ends_nothing() -> None:
    tokenizer = character_tokenizer(end=False)
    tokenizer.add_special_tokens({"eos_token": "<end>"})
    with pytest.raises(ConfigError, match="no completion could end before max_new_tokens"):
        policy_of(tiny_model(eos_token_id=None), tokenizer=tokenizer)


# States and actions


def test_wrong_states_and_numbers_of_completions_are_refused(subtests: pytest.Subtests) -> None:
    policy = policy_of()
    chat = [{"role": "user", "content": "1+1="}]
    for states, size, message in [
        ("abc", 1, r"states must be a sequence of prompts; got str 'abc'\. Pass a list"),
        ({"prompt": "abc"}, 1, r"states must be a sequence of prompts; got dict"),
        (None, 1, r"states must be a sequence of prompts; got NoneType"),
        (3, 1, r"states must be a sequence of prompts; got int"),
        (["abc"], 0, r"num_actions_per_state must be an integer of at least 1; got 0"),
        (["abc"], -1, r"at least 1; got -1"),
        (["abc"], 1.5, r"at least 1; got 1\.5"),
        (chat, 1, r"A chat is one state, a list of messages; got a message as a state"),
    ]:
        with subtests.test(states=states, size=size), as_users_run_it(), pytest.raises(ContractError, match=message):
            policy.generate_actions(states, size)


def test_wrong_actions_are_refused(subtests: pytest.Subtests) -> None:
    policy = policy_of()
    for states, actions, message in [
        (STATES, ROWS[:2], r"actions must have one entry per row = 3; got a list of 2"),
        (["a"], ["b"], r"actions must be Completions; got str 'b'"),
        (
            ["a"],
            [completion(5, VOCABULARY_SIZE)],
            rf"scored token ids must be below {VOCABULARY_SIZE}, .*; got {VOCABULARY_SIZE}",
        ),
    ]:
        with subtests.test(actions=actions), as_users_run_it():
            with pytest.raises(ContractError, match=message):
                policy.score_actions(states, actions)
            with pytest.raises(ContractError, match=message):
                policy.get_log_probabilities(states, actions)
    with pytest.raises(ContractError, match=r"score_groups: actions must have one entry per row = 3"):
        policy.score_groups(STATES, [[row] for row in ROWS[:2]])


class Samples:
    """A sampler that returns given tokens."""

    def __init__(self, *rows: list[int]) -> None:
        self.rows = rows

    def sample(self, *args: Any, **options: Any) -> SampledTokens:
        log_probs = [[-1.0] * len(row) for row in self.rows]
        return SampledTokens(
            token_ids=self.rows, finish_reasons=["end"] * len(self.rows), behaviour_log_probs=log_probs
        )

    def sync(self, model: Any) -> None: ...


def test_wrong_samples_of_another_sampler_are_refused() -> None:
    with pytest.raises(ContractError, match=rf"sampled token ids must be below {VOCABULARY_SIZE}, .*; got 99"):
        policy_of(sampler=Samples([99])).generate_actions(["a"], 1)
    with pytest.raises(ContractError, match=r"the sampler: token_ids must have one entry per row = 2"):
        policy_of(sampler=Samples([9])).generate_actions(["a"], 2)
    for changes in [
        {"finish_reasons": []},
        {"behaviour_log_probs": [[-1.0]]},
        {"policy_log_probs": []},
        {"entropies": [[]]},
        {"token_ids": [5]},
        {"behaviour_log_probs": "ab"},
        {"finish_reasons": None},
    ]:
        given: dict[str, Any] = {
            "token_ids": [[5, 6]],
            "finish_reasons": ["end"],
            "behaviour_log_probs": [[-1.0, -1.0]],
        }
        with (
            as_users_run_it(),
            pytest.raises(ContractError, match=rf"SampledTokens\.{next(iter(changes))} must have one"),
        ):
            SampledTokens(**given | changes)


def test_a_token_that_was_added_to_the_tokenizer_only_is_refused_in_a_prompt() -> None:
    """Added tokens that no prompt has do not matter (Gemma 3 has one for images)."""
    tokenizer = character_tokenizer()
    tokenizer.add_tokens(["<new>"])
    policy = policy_of(tokenizer=tokenizer)
    assert len(policy.generate_actions(["1+1="], 1)) == 1
    with pytest.raises(
        ContractError, match=rf"state 1 must have token ids below {VOCABULARY_SIZE}.* got {VOCABULARY_SIZE} \('<new>'\)"
    ):
        policy.generate_actions(["1+1=", "1<new>"], 1)


# The output head


def test_hooks_on_the_output_head_apply_to_sampling_and_scoring(subtests: pytest.Subtests) -> None:
    """A hook that forbids the letters, before the policy is made and after."""
    letters = [2 + CHARACTERS.index(letter) for letter in CHARACTERS if letter.isalpha()]

    def forbid(module: Any, inputs: Any, logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill(-1, torch.tensor(letters), -100.0)

    for is_early in (True, False):
        with subtests.test(is_early=is_early):
            model = tiny_model()
            if is_early:
                model.lm_head.register_forward_hook(forbid)
            policy = policy_of(model)
            if not is_early:
                model.lm_head.register_forward_hook(forbid)
            sampled = policy.sample_actions(STATES, 4)
            scores = policy.score_groups(STATES, sampled.actions)
            assert sampled.behaviour_log_probs is not None
            torch.testing.assert_close(scores.log_probs, sampled.behaviour_log_probs, atol=1e-4, rtol=0)
            assert not {token for group in sampled.actions for action in group for token in action.token_ids} & set(
                letters
            )
            scores.log_probs.sum().backward()
            assert model.lm_head.weight.grad is not None


# Other constructors


def test_wrong_arguments_of_rewards_and_servers_are_refused(subtests: pytest.Subtests) -> None:
    for make, message in [
        (lambda: CompletionRewards(len, weights=3), r"weights must be None, a mapping or a sequence"),
        (lambda: CompletionRewards(lambda completion: 1.0, prompt_column=3), r"prompt_column a text; got .* int 3"),
        (lambda: JSONSchemaMatch(None), r"needs a JSON schema as a mapping, .* got NoneType"),
        (lambda: JSONSchemaMatch({}, extract="a"), r"extract a function or None"),
        (lambda: VLLMServerSampler(3, weights_folder="w"), r"base_url must begin with http"),
        (lambda: VLLMServerSampler("http://a", weights_folder=None), r"weights_folder must be a path"),
        (
            lambda: VLLMServerSampler("http://a", weights_folder="w", max_concurrency=0),
            r"max_concurrency an integer of at",
        ),
        (
            lambda: VLLMServerSampler("http://a", weights_folder="w", timeout="1"),
            r"timeout must be a number of seconds",
        ),
    ]:
        with subtests.test(message=message), as_users_run_it(), pytest.raises(ConfigError, match=message):
            make()


def test_the_warning_of_the_first_ratio_names_the_dropout_of_an_adapter() -> None:
    with pytest.warns(GRPOWarning, match=r"first ratio is not 1\. Dropout is on in train\(\).*lora_dropout.*p=0\.5"):
        trainer_of(policy_of(adapted_model(lora_dropout=0.5))).step(["1+1=", "2+2="])
