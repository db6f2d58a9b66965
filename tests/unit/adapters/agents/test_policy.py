"""`AgentPolicy`: sampled and scored log-probs, gradients, concurrency, and what the core makes of conversations."""

from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from adapters.agents import AgentPolicy, Conversation, EnvironmentReward, Message, rollouts
from adapters.agents.messages import tool_message
from adapters.agents.templates import ASKED, CALLED, TOOL
from adapters.llm import Completion, HFPolicy, SamplingConfig
from grpo import AdvantageConfig, GRPOConfig, GRPOTrainer, RewardConfig, WeightedRewards
from grpo.checks import check_policy
from grpo.errors import ConfigError, ContractError, RewardError
from grpo.types import CONTINUES
from tests.support.agent_parts import changed, fails, model_with, rows_of
from tests.support.agents import CHATML, FORGETFUL, Echo, Scripted, Tools, language_model, says_call, scores_one_by_one
from tests.support.llm_models import (
    FAMILIES,
    FLOAT32_GRADIENT,
    adapted_model,
    forward_shapes,
    gradients,
    relative_difference,
)
from tests.unit.adapters.agents.test_templates import ORIGINALS, template_of

pytestmark = pytest.mark.filterwarnings("ignore:AgentPolicy. the prompt ends in <think>:UserWarning")


def sampled_from(policy: Any, make: Any = Echo, states: Any = ("you", "me"), size: int = 3, **options: Any) -> Any:
    torch.manual_seed(0)
    agent = AgentPolicy(policy, make, **options)
    return agent, agent.sample_actions(list(states), size)


MARKED = [pytest.param(name, marks=[pytest.mark.slow] * (i % 6 > 0)) for i, name in enumerate(ORIGINALS)]


@pytest.mark.parametrize("name", MARKED)
def test_no_sampled_token_is_lost_with_any_template(name: str) -> None:
    """Three turns: a call, text with a call, and text, with a tool's results in between where the template shows tools."""
    template, tokenizer = template_of(name)
    ends = template.end_token_ids
    policy = language_model(tokenizer=tokenizer, max_new_tokens=12, positions=8192, end_token_ids=ends, end_scale=0.1)
    turns: list[list[int]] = []
    real = policy.sample_tokens
    prompt = tokenizer.apply_chat_template([ASKED], tokenize=False, add_generation_prompt=True)
    says = "</think>" * prompt.rstrip().endswith("<think>") + says_call()  # a call within a thought is none

    def keeping(prompts: Any, on_row: Any, **options: Any) -> Any:
        found = real(prompts, **options)
        call = tokenizer(says, add_special_tokens=False)["input_ids"] if len(turns) < 2 else []
        text = [token for token in found.token_ids[0] if token not in tokenizer.all_special_ids] if turns else []
        forced = [*text, *call, agent.template.end_token_ids[-1]]
        turns.append(forced)
        completion = Completion(token_ids=tuple(forced), text="", finish_reason="end")
        log_probs = policy.score_actions(prompts, [completion]).log_probs.tolist()
        scores = {"behaviour_log_probs": log_probs, "policy_log_probs": log_probs}
        return replace(found, token_ids=[forced], finish_reasons=["end"], **scores)

    policy.sample_tokens = keeping
    agent = AgentPolicy(policy, Echo)
    if agent.template.shows_tools:  # calls are answered with a tool's result, and other messages by the user
        agent = AgentPolicy(policy, changed(Echo, tools=lambda self: [TOOL]))
    with torch.no_grad():
        (row,) = rows_of(agent.generate_actions(["you"], 1))
        scores = agent.score_actions([None], [row])
    roles = [message["role"] for message in row.messages]
    assert roles == ["user", "assistant", *["tool" if agent.template.shows_tools else "user", "assistant"] * 2, "user"]
    kept = [token for s in row.segments for token, own in zip(s.token_ids, s.sampled, strict=True) if own]
    assert kept == [token for turn in turns for token in turn]
    expected = torch.tensor(row.behaviour_log_probs)
    torch.testing.assert_close(scores.log_probs[0], expected, atol=1e-5, rtol=0)


def test_no_history_is_computed_twice_within_a_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted positions: a conversation alone computes each token of its context once, but for the last, which nothing
    follows. In a batch, only the padding of new tokens is added."""
    monkeypatch.setattr(rollouts, "SHORTEST_WAIT", 30.0)
    policy = language_model(max_new_tokens=30)
    shapes = forward_shapes(policy.model)
    for size in (1, 6):
        shapes.clear()
        rows = rows_of(sampled_from(policy, states=["you"], size=size)[1].actions)
        assert max(len(row.turns) for row in rows) == 3
        needed = sum(len(segment.token_ids) - 1 for row in rows for segment in row.segments)
        needed -= (size - 1) * rows[0].segments[0].num_context_tokens  # the group shares its prompt
        computed = sum(rows * columns for rows, columns in shapes)
        assert computed == needed if size == 1 else computed < 1.1 * needed


def test_settings_of_a_call_reach_the_sampler() -> None:
    agent = AgentPolicy(language_model(max_new_tokens=40), Echo)
    one, two = (agent.generate_actions(["you"], 1, temperature=0)[0][0] for _ in range(2))
    assert one == two
    (short,) = agent.generate_actions(["you"], 1, max_new_tokens=2)[0]
    assert all(turn.num_tokens <= 2 for turn in short.turns)


def test_scores_of_sampling_are_given_only_if_sampling_is_exact() -> None:
    _, sampled = sampled_from(language_model(sampling=SamplingConfig(max_new_tokens=10, top_k=5)))
    assert sampled.scores is None
    assert sampled.behaviour_log_probs is not None


def test_truncated_conversations_can_be_masked() -> None:
    policy = language_model(max_new_tokens=12, mask_truncated=True)
    agent, sampled = sampled_from(policy, lambda state: Echo(state, turns=1), size=6)
    rows = rows_of(sampled.actions)
    assert {row.ended_by for row in rows} == {"length", "environment"}
    expected = [0 if row.ended_by == "length" else len(row) for row in rows]
    assert sampled.mask.sum(1).tolist() == expected
    scores = agent.score_actions([None] * 12, rows)
    assert torch.equal(scores.mask, sampled.mask)
    torch.testing.assert_close(scores.log_probs, sampled.scores.log_probs * sampled.mask, atol=1e-5, rtol=0)


def test_the_reference_scores_the_same_steps() -> None:
    policy = model_with(FORGETFUL, max_new_tokens=30)
    assert not hasattr(AgentPolicy(policy, Echo), "reference_log_probabilities")
    tokenizer = policy.tokenizer
    reference = language_model("llama", tokenizer=tokenizer).model
    adapted = language_model(max_new_tokens=30, tokenizer=tokenizer, reference_model=reference)
    agent, sampled = sampled_from(adapted)
    rows = rows_of(sampled.actions)
    found = agent.reference_log_probabilities([None] * 6, rows)
    assert found.shape == sampled.mask.shape
    for row, log_probs in zip(rows, found, strict=True):
        torch.testing.assert_close(log_probs[: len(row)], scores_one_by_one(reference, row), atol=1e-5, rtol=0)
        assert not log_probs[len(row) :].any()
    silent = AgentPolicy(adapted, Echo, max_tokens=1).generate_actions(["you"], 1)[0][0]  # no room for a turn
    assert agent.reference_log_probabilities([None], [silent]).shape == (1, 0)
    lora = adapted_model(language_model(tokenizer=tokenizer).model)
    with_lora = HFPolicy(lora, tokenizer, sampling=SamplingConfig(max_new_tokens=4))
    assert hasattr(AgentPolicy(with_lora, Echo), "reference_log_probabilities")


def test_the_conformance_kit_passes() -> None:
    agent = AgentPolicy(model_with(FORGETFUL, max_new_tokens=4), KEYED)
    report = check_policy(agent, ["you", "me"], num_samples=20)
    report.raise_for_failures()
    assert report["sample_actions"].status == report["state_keys"].status == "passed"


# Credit


KEYED = changed(Echo, state_key=lambda self: ("turn", self.count))
"""Every turn is taken in a state of its own, the same for all conversations of a group."""


@pytest.mark.parametrize("credit", ["row", "return_to_go", "gigpo", "process_supervision", "gae"])
def test_the_core_trains_on_conversations(credit: Any) -> None:
    agent = AgentPolicy(model_with(FORGETFUL, max_new_tokens=20, value_head=credit == "gae"), KEYED, max_turns=3)
    before = {name: weight.clone() for name, weight in agent.get_parameters().items()}
    reward = EnvironmentReward(per_turn=credit in ("return_to_go", "process_supervision", "gae"))
    advantage = AdvantageConfig(credit=credit)
    sizes: Any = {"group_size": 4, "num_epochs_per_update": 2, "batch_size": 4}
    config = GRPOConfig(seed=0, learning_rate=1e-5 if credit == "gae" else 1e-4, advantage=advantage, **sizes)
    metrics = GRPOTrainer(config=config, policy=agent, reward_model=reward).step(["you", "me"])
    assert metrics["train/num_updates"] == 4
    assert metrics["train/ratio_mean"] == pytest.approx(1, abs=0.02)
    moved = {name for name, weight in agent.get_parameters().items() if not torch.equal(before[name], weight)}
    assert {name.startswith("value_head.") for name in moved} == ({False, True} if credit == "gae" else {False})


def test_state_keys_are_equal_in_equal_states() -> None:
    agent, sampled = sampled_from(language_model(max_new_tokens=30), KEYED)
    rows = rows_of(sampled.actions)
    keys = agent.state_keys([None] * 6, rows)
    by_turn = {}
    for row, of_row in zip(rows, keys.tolist(), strict=True):
        begin = 0
        for number, turn in enumerate(row.turns):
            key = by_turn.setdefault(number, of_row[begin])
            decision = [key, *[CONTINUES] * (turn.num_tokens - 1)]  # a turn counts once
            assert of_row[begin : begin + turn.num_tokens] == decision
            begin += turn.num_tokens
    assert len(set(by_turn.values())) == len(by_turn) == 3
    with pytest.raises(ConfigError, match=r"an environment has no state_key\(\)"):
        agent.state_keys([None], rows_of(sampled_from(language_model())[1].actions)[:1])


def test_rewards_stand_at_the_end_of_their_turns_or_are_added_up() -> None:
    model = Scripted(["ab", "c", says_call(), "d"], max_new_tokens=100).policy
    makes = (lambda state: Echo(state, turns=2)), Tools
    rows = [AgentPolicy(model, make).generate_actions(["you"], 1)[0][0] for make in makes]
    ends = [3, 5], [len(says_call()) + 1, len(says_call()) + 3]
    assert EnvironmentReward().compute_rewards([], rows).tolist() == [3.0, 1.0]
    per_step = EnvironmentReward(per_turn=True).compute_rewards([], rows)
    assert per_step.shape == (2, ends[1][1])
    assert {place: value for place, value in enumerate(per_step[0].tolist()) if value} == {2: 1.0, 4: 2.0}
    assert {place: value for place, value in enumerate(per_step[1].tolist()) if value} == {ends[1][1] - 1: 1.0}
    parts = WeightedRewards({"game": EnvironmentReward(), "turns": lambda s, rows: [len(r.turns) for r in rows]})
    assert parts.compute_rewards([1, 2], rows).tolist() == [5.0, 3.0]
    with pytest.raises(ContractError, match="actions must be conversations of an AgentPolicy; got str"):
        EnvironmentReward().compute_rewards(["x"], ["y"])


def test_a_failed_environment_leaves_its_row_to_the_reward_settings() -> None:
    failing = changed(Echo, step=lambda self, said: fails() if self.state == "bad" else Echo.step(self, said))
    for per_turn in (False, True):
        agent = AgentPolicy(language_model(max_new_tokens=60), failing)
        config = GRPOConfig(group_size=4, seed=0)
        reward = EnvironmentReward(per_turn=per_turn)
        with pytest.raises(RewardError, match="EnvironmentReward"):
            GRPOTrainer(config=config, policy=agent, reward_model=reward).step(["bad", "good"])
        dropping = replace(config, reward=RewardConfig(non_finite="drop"))
        metrics = GRPOTrainer(config=dropping, policy=agent, reward_model=reward).step(["bad", "good"])
        assert metrics["rows/dropped"] == metrics["agents/ended_by_error"] > 0


# --- what is sampled is what is scored


STOP = tuple("abcdefghikmnoprstu12345XYZ\n")
"""Turns end at these letters, so that a model with random weights holds conversations of three turns."""


def held(family: str, template: str, *, size: int = 3) -> tuple[Any, AgentPolicy, Any, list[Conversation]]:
    """A language model, and conversations of it with tool results between the turns."""
    sampling = SamplingConfig(max_new_tokens=40, stop=STOP)
    policy = model_with(template, family, sampling=sampling)

    def step(self: Echo, action: Message) -> Any:
        observation, *others = Echo.step(self, action)
        calls = action.get("tool_calls") or CALLED["tool_calls"]
        return tool_message(calls[0], observation), *others

    agent, sampled = sampled_from(policy, changed(Echo, step=step), size=size)
    return policy, agent, sampled, rows_of(sampled.actions)


@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_log_probs_are_scored_log_probs(family: str) -> None:
    """Every model family, three turns with tool results in between, for a template that appends and one that rewrites."""
    for template in (CHATML, FORGETFUL):
        policy, agent, sampled, rows = held(family, template)
        longest = max(rows, key=lambda row: len(row.turns))
        assert [message["role"] for message in longest.messages] == ["user", *["assistant", "tool"] * 3]
        counts = [sum(len(getattr(row, name)) for row in rows) for name in ("turns", "segments")]
        is_blank = family == "gpt2"  # with random weights, it only repeats the line break, and nothing is rewritten
        assert counts[0] > counts[1] if template == CHATML or is_blank else counts[1] > len(rows)
        scores = agent.score_actions([None] * len(rows), rows)
        assert torch.equal(scores.mask, sampled.mask)
        assert scores.mask.sum(1).tolist() == [len(row) for row in rows]
        torch.testing.assert_close(scores.log_probs, sampled.behaviour_log_probs, atol=1e-5, rtol=0)
        assert sampled.scores is not None
        for row, log_probs in zip(rows, scores.log_probs, strict=True):
            torch.testing.assert_close(log_probs[: len(row)], scores_one_by_one(policy.model, row), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "family", ["qwen3", *(pytest.param(each, marks=pytest.mark.slow) for each in ("mistral", "mamba"))]
)
def test_the_gradient_is_the_sum_over_contexts_one_by_one(family: str) -> None:
    """In float64, for models with shared prompts, with sliding windows, and with states."""
    for template in (CHATML, FORGETFUL):
        policy, agent, sampled, rows = held(family, template, size=2)
        policy.model.double()
        weights = torch.randn(sampled.mask.shape, dtype=torch.float64)
        found = gradients(policy.model, (agent.score_actions([None] * len(rows), rows).log_probs * weights).sum())
        pairs = zip(rows, weights, strict=True)
        one_by_one = [(scores_one_by_one(policy.model, row) * own[: len(row)]).sum() for row, own in pairs]
        expected = gradients(policy.model, torch.stack(one_by_one).sum())
        assert relative_difference(found, expected) < FLOAT32_GRADIENT


@pytest.mark.parametrize(("template", "make"), [(CHATML, Echo), (CHATML, Tools), (FORGETFUL, Echo)])
def test_requests_and_seeds_do_not_depend_on_the_concurrency(template: str, make: Any) -> None:
    """Three turns in each of eight conversations, with a seed for each turn."""
    found, tokenizer = [], model_with(template).tokenizer
    for concurrency in (1, 64):
        says = lambda text: "fine" if text.count("<tool_response>") == 2 else says_call()  # noqa: E731
        policy = Scripted(says, tokenizer=tokenizer, max_new_tokens=100).policy
        policy.sample_tokens = Mock(wraps=policy.sample_tokens)
        _, sampled = sampled_from(policy, make, size=4, concurrency=concurrency)
        batches = [(call.args[0], call.kwargs) for call in policy.sample_tokens.call_args_list]
        asked = [each for prompts, o in batches for each in zip(o["seeds"], prompts, o["limits"], strict=True)]
        found.append((sorted(asked, key=lambda each: each[0]), sampled.actions))
    assert found[0] == found[1]
    assert len({seed for seed, _, _ in found[0][0]}) == len(found[0][0]) == 2 * 4 * 3
