"""`HFPolicy`: sampling, and what ends completions."""

from typing import Any

import pytest
import torch

from adapters.llm import HFPolicy, SampledTokens, SamplingConfig
from adapters.llm.completions import Completion
from adapters.llm.sampling.vllm_server import VLLMServerSampler
from grpo import GRPOConfig, GRPOTrainer
from grpo.errors import ConfigError, ContractError
from tests.support.llm_models import (
    CHARACTERS,
    END,
    PAD,
    STATES,
    character_tokenizer,
    encoded,
    forward_shapes,
    policy_of,
    row_logits,
    tiny_model,
)

TOKENIZER = character_tokenizer()
# Sampling


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
        assert sampled.behaviour_log_probs is not None
        assert action.behaviour_log_probs is not None
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


def test_temperature_zero_is_greedy_and_for_evaluation_only() -> None:
    policy = policy_of()
    for state, group in zip(STATES, policy.generate_actions(STATES, 2, temperature=0), strict=True):
        assert group[0] == group[1]
        with torch.no_grad():
            logits = row_logits(policy.model, encoded(state), group[0].token_ids)
        assert logits.argmax(1).tolist() == list(group[0].token_ids)
    with pytest.raises(ConfigError, match=r"sampling\.temperature must be above 0.*generate_actions\(states, 1, temp"):
        policy_of(sampling=SamplingConfig(temperature=0))


def test_settings_of_one_call_are_checked_and_apply_to_that_call_only() -> None:
    policy = policy_of()
    assert {len(action) for action in policy.generate_actions(STATES, 1, max_new_tokens=1)[0]} == {1}
    assert policy.sampling.max_new_tokens == 8
    with pytest.raises(ConfigError, match=r"SamplingConfig\.top_p"):
        policy.generate_actions(STATES, 1, top_p=2.0)
    with pytest.raises(
        ConfigError,
        match=r"no settings 'max_tokens', 'topk'. Did you mean SamplingConfig\(max_new_tokens=...\)\? Did you mean .*top_k=",
    ):
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


def test_another_sampler_gets_the_prompts_and_the_weights() -> None:
    sampler = Told(
        SampledTokens(token_ids=[[5, END], [6]], finish_reasons=["end", "stop"], behaviour_log_probs=[[-1, -2], [-3]])
    )
    policy = policy_of(sampler=sampler)
    sampled = policy.sample_actions(["1+1="], 2)
    assert sampler.asked["prompts"] == [encoded("1+1=")]
    assert (sampler.asked["size"], sampler.asked["ends"]) == (2, (END,))
    assert len(set(sampler.asked["seeds"])) == 2
    assert all(0 <= seed < 2**63 for seed in sampler.asked["seeds"])
    assert sampled.scores is None  # this sampler has no log-probs under the policy
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


def test_a_sampler_of_this_process_does_not_begin_sampling() -> None:
    assert policy_of().begin_sampling(STATES, 2) is None
    sampler = Told(SampledTokens(token_ids=[], finish_reasons=[], behaviour_log_probs=[]))
    assert policy_of(sampler=sampler).begin_sampling(STATES, 2) is None
    sampler.samples_beside = False  # type: ignore[attr-defined]
    assert policy_of(sampler=sampler).begin_sampling(STATES, 2) is None
    assert VLLMServerSampler.samples_beside


def test_seeds_are_drawn_when_sampling_begins_and_the_sampler_is_asked_later() -> None:
    sampler = Told(
        SampledTokens(token_ids=[[5, END], [6]], finish_reasons=["end", "stop"], behaviour_log_probs=[[-1, -2], [-3]])
    )
    sampler.samples_beside = True  # type: ignore[attr-defined]
    policy = policy_of(sampler=sampler)
    torch.manual_seed(3)
    expected = policy.sample_actions(["1+1="], 2)
    asked, after = sampler.asked, torch.get_rng_state()
    torch.manual_seed(3)
    sampler.asked = {}
    sample = policy.begin_sampling(["1+1="], 2)
    assert sample is not None
    assert sampler.asked == {}
    assert torch.equal(torch.get_rng_state(), after)
    torch.manual_seed(99)
    sampled = sample()
    assert sampler.asked == asked
    assert sampled.actions == expected.actions
    assert torch.equal(sampled.behaviour_log_probs, expected.behaviour_log_probs)


# End tokens


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
    with pytest.raises(
        ConfigError, match=r"no completion could end.*Pass options=HFOptions\(end_token_ids=\(\.\.\.,\)\)"
    ):
        policy_of(model, tokenizer=tokenizer)
    assert asked_ends(tokenizer, model, end_token_ids=[]) == ()
    assert asked_ends(tokenizer, model, sampling=SamplingConfig(stop=("\n",), max_new_tokens=8)) == ()


def test_a_tokenizer_needs_no_padding_token() -> None:
    tokenizer = character_tokenizer(pad=False)
    assert tokenizer.pad_token_id is None
    torch.manual_seed(0)
    found = policy_of(tokenizer=tokenizer).sample_actions(STATES, 2)
    torch.manual_seed(0)
    assert torch.equal(found.mask, policy_of().sample_actions(STATES, 2).mask)


# Length of prompts


def test_prompts_that_are_too_long_are_refused_before_sampling(subtests: pytest.Subtests) -> None:
    for family in ("qwen3", "gpt2"):
        with subtests.test(family=family):
            policy = policy_of(tiny_model(family), max_new_tokens=10)  # of 64 positions, so prompts of 54 tokens fit
            assert len(policy.generate_actions(["a" * 54], 1)) == 1
            with pytest.raises(ContractError, match=r"64 positions; those at \[1\] need \[65\]"):
                policy.generate_actions(["a" * 54, "a" * 55], 1)
            assert len(policy.generate_actions(["a" * 55], 1, max_new_tokens=9)) == 1


def test_no_prompt_is_refused() -> None:
    with pytest.raises(ContractError, match=r"got none\. Pass at least one prompt"):
        HFPolicy(tiny_model(), character_tokenizer()).generate_actions([], 2)


def test_an_unknown_sampler_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="sampler must be 'decoding', 'recorded', 'generate', 'continuous' or a Sampler"
    ):
        policy_of(sampler="vllm")


def test_the_limit_of_rows_also_splits_a_group() -> None:
    policy, free = policy_of(max_rows_per_decode=2), policy_of()
    shapes = forward_shapes(policy.model)
    torch.manual_seed(5)
    some = policy.generate_actions(STATES, 5)
    assert max(num_rows for num_rows, _ in shapes) == 2
    torch.manual_seed(5)
    assert [[c.token_ids for c in group] for group in free.generate_actions(STATES, 5)] == [
        [c.token_ids for c in group] for group in some
    ]


def test_an_end_token_that_is_given_ends_completions() -> None:
    [[action]] = policy_of(end_token_ids=[1], max_new_tokens=40).generate_actions(["abc"], 1, temperature=0)
    assert 1 not in action.token_ids[:-1]


# Demonstrations


def test_a_supervised_run_teaches_given_texts() -> None:
    """Two texts of different length. After training, each is what the model finds most likely, with its end."""
    torch.manual_seed(0)
    policy = policy_of(max_new_tokens=6)
    given = policy.demonstrations(["ab", "b"], ["a1", "11ba"])
    assert [action.token_ids for action in given.actions] == [(*encoded("a1"), END), (*encoded("11ba"), END)]
    assert given.mask.tolist() == [[True] * 3 + [False] * 2, [True] * 5]
    trainer = GRPOTrainer(
        config=GRPOConfig(learning_rate=2e-2, seed=0, micro_batch_size=1),
        policy=policy,
        reward_model=lambda states, actions: [0.0] * len(states),
    )
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
