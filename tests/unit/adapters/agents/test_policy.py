"""`AgentPolicy`: sampled and scored log-probs, values, gradients, scripts, and what the core makes of conversations."""

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from adapters.agents import AgentPolicy, Conversation, EnvironmentReward, Message, Segment, Turn
from adapters.agents.messages import tool_message
from adapters.agents.templates import ASKED, CALLED, TOOL
from adapters.llm import Completion, HFPolicy, SamplingConfig, ValueHead
from grpo import AdvantageConfig, GRPOConfig, GRPOTrainer, ObjectiveConfig, WeightedRewards
from grpo.checks import check_policy
from grpo.errors import ConfigError, ContractError
from grpo.types import CONTINUES
from tests.support.agent_parts import changed, conversation, fails, model_with, rows_of
from tests.support.agents import (
    CHATML,
    FORGETFUL,
    Echo,
    Scripted,
    Tools,
    converse,
    language_model,
    says_call,
    scores_one_by_one,
)
from tests.support.llm_models import (
    FAMILIES,
    FLOAT32_GRADIENT,
    adapted_model,
    forward_shapes,
    gradients,
    relative_difference,
)
from tests.unit.adapters.agents.test_rollouts import ENDS, LONG
from tests.unit.adapters.agents.test_templates import CALL, ORIGINALS, template_of

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


def test_no_history_is_computed_twice_beside_other_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted positions: each token of a context once, but for the last, which nothing follows. The group shares its prompt.
    Only the padding of new tokens is added."""
    monkeypatch.setattr("adapters.agents.rollouts.SHORTEST_WAIT", 30.0)
    policy = language_model(max_new_tokens=30)
    shapes = forward_shapes(policy.model)
    rows = rows_of(sampled_from(policy, states=["you"], size=6)[1].actions)
    assert max(len(row.turns) for row in rows) == 3
    needed = sum(len(segment.token_ids) - 1 for row in rows for segment in row.segments)
    needed -= 5 * rows[0].segments[0].num_context_tokens
    assert sum(count * length for count, length in shapes) < 1.1 * needed


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
    silent = conversation()
    assert EnvironmentReward().compute_rewards([], [*rows, silent]).tolist() == [3.0, 1.0, math.inf]
    per_step = EnvironmentReward(per_turn=True).compute_rewards([], [*rows, silent])
    assert per_step.shape == (3, ends[1][1])
    assert per_step[2].isinf().all()
    assert {place: value for place, value in enumerate(per_step[0].tolist()) if value} == {2: 1.0, 4: 2.0}
    assert {place: value for place, value in enumerate(per_step[1].tolist()) if value} == {ends[1][1] - 1: 1.0}
    parts = WeightedRewards({"game": EnvironmentReward(), "turns": lambda s, rows: [len(r.turns) for r in rows]})
    assert parts.compute_rewards([1, 2], rows).tolist() == [5.0, 3.0]
    with pytest.raises(ContractError, match="actions must be conversations of an AgentPolicy; got str"):
        EnvironmentReward().compute_rewards(["x"], ["y"])


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


# Given messages in place of the model's


zeros = lambda states, actions: [0.0] * len(states)  # noqa: E731
SCRIPTS = [[says_call(), "fine"], ["fine"]]


@pytest.mark.parametrize("template", [CHATML, FORGETFUL])
def test_a_replay_is_the_conversation_of_a_model_that_says_the_script(template: str) -> None:
    """Two conversations with scripts of different length. Tokens, masks, messages and rewards are those of a rollout."""
    policy = AgentPolicy(model_with(template, max_new_tokens=90), Tools)
    replayed = policy.replay(["you", "me"], SCRIPTS)
    for state, script, found in zip(["you", "me"], SCRIPTS, replayed, strict=True):
        agent = Scripted(script, tokenizer=policy.policy.tokenizer, max_new_tokens=90)
        (sampled,) = converse(agent.policy, Tools, state)
        ids, expected = ([(s.token_ids, s.sampled) for s in row.segments] for row in (found, sampled))
        assert ids == expected
        assert (found.messages, found.turns, found.ended_by) == (sampled.messages, sampled.turns, "environment")
        assert all(math.isnan(log_prob) for log_prob in found.behaviour_log_probs)
    scores = policy.score_actions(["you", "me"], replayed)
    assert scores.mask.sum(1).tolist() == [len(row) for row in replayed]
    assert scores.log_probs.isfinite().all()


def test_a_supervised_run_makes_the_steps_of_a_loop_by_hand() -> None:
    """The mean over all tokens of both conversations, in plain SGD without clipping."""
    torch.manual_seed(0)
    policy = AgentPolicy(language_model(max_new_tokens=20), lambda state: Echo(state, turns=2))
    states, scripts = ["you", "me"], [["yes", "no"], ["a longer turn", "no"]]
    by_hand = copy.deepcopy(policy)
    conversations = by_hand.replay(states, scripts)
    optimizer = torch.optim.SGD([*by_hand.get_parameters().values()], lr=0.1)
    for _ in range(3):
        scores = by_hand.score_actions(states, conversations)
        (-scores.log_probs[scores.mask].mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    config = GRPOConfig(seed=0, max_grad_norm=None, objective=ObjectiveConfig(aggregation="step_mean"))
    optimizer = torch.optim.SGD([*policy.get_parameters().values()], lr=0.1)
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=zeros, optimizer=optimizer)
    before = {name: value.detach().clone() for name, value in policy.get_parameters().items()}
    given = policy.demonstrations(states, scripts)
    assert given.mask.sum(1).tolist() == [len(conversation) for conversation in conversations]
    trainer.train(None, demonstrations=given, num_iterations=3, progress=False)
    for name, value in policy.get_parameters().items():
        torch.testing.assert_close(value, by_hand.get_parameters()[name], rtol=1e-4, atol=1e-5)
    assert any(not torch.equal(value, before[name]) for name, value in policy.get_parameters().items())


@pytest.mark.parametrize("template", [CHATML, FORGETFUL])
def test_observations_are_the_tokens_that_the_policy_did_not_sample(template: str) -> None:
    """Their log-probs are those of one forward pass over each context, and the steps have the same scores as without them."""
    model = model_with(template, max_new_tokens=90)
    policy, plain = AgentPolicy(model, Tools, observations=True), AgentPolicy(model, Tools)
    conversations = policy.replay(["you", "me"], SCRIPTS)
    with torch.no_grad():
        scores, without = (each.score_actions(["you", "me"], conversations) for each in (policy, plain))
    assert without.observed_log_probs is None
    torch.testing.assert_close(scores.log_probs, without.log_probs)
    assert torch.equal(scores.mask, without.mask)
    for row, replayed in enumerate(conversations):
        steps, seen = list[float](), list[float]()
        for segment in replayed.segments:
            tokens = torch.tensor([segment.token_ids])
            with torch.no_grad():
                log_softmax = model.model(input_ids=tokens).logits[0].log_softmax(1)
            for place in range(segment.num_context_tokens, len(segment.token_ids)):
                (steps if segment.sampled[place] else seen).append(float(log_softmax[place - 1, tokens[0, place]]))
        observed = (scores.observed_log_probs, scores.observed_mask, seen)
        for found, mask, expected in ((scores.log_probs, scores.mask, steps), observed):
            torch.testing.assert_close(found[row][mask[row]], torch.tensor(expected), rtol=1e-4, atol=1e-5)
    assert scores.observed_mask.sum(1).tolist()[1] == 0, "nothing was answered after a single turn"
    assert int(scores.observed_mask[0].sum()) > 0
    assert torch.equal(policy.demonstrations(["you", "me"], SCRIPTS).observed_mask, scores.observed_mask)


def test_a_model_learns_what_its_environment_answers() -> None:
    """The environment repeats what it was told. All rewards are equal, so that only its answers teach."""
    torch.manual_seed(0)
    policy = AgentPolicy(language_model(max_new_tokens=4), lambda state: Echo(state, turns=2), observations=True)
    config = GRPOConfig(group_size=2, learning_rate=1e-2, seed=0, objective=ObjectiveConfig(observation_coef=1.0))
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=zeros)
    history = trainer.train(["you"], num_iterations=12, progress=False)
    assert history[-1]["train/observation_loss"] < history[0]["train/observation_loss"] / 2


def test_a_message_and_its_text_are_the_same_turn() -> None:
    template = AgentPolicy(language_model(), Tools).template
    call = says_call(arguments='{"topic": "rain"}')
    assert template.turn(CALL) == template.turn(call) == template.turn(call + "<|im_end|>")
    assert template.turn({"role": "assistant", "content": "fine"}) == template.turn("fine")
    policy = AgentPolicy(language_model(max_new_tokens=90), Tools)
    (found,) = policy.replay(["you"], [[CALL, "fine"]])
    assert (found.messages[1], found.messages[2]["content"]) == (CALL, "rain is fine")


def test_a_conversation_ends_after_its_script() -> None:
    (found,) = AgentPolicy(language_model(), lambda state: Echo(state, turns=3)).replay(["you"], [["a", "b"]])
    assert (found.ended_by, found.rewards) == ("max_turns", (1.0, 2.0))


@pytest.mark.parametrize(
    ("scripts", "options", "message"),
    [
        ([["a"] * 4], {}, r"must have the 4 turns of its script; it ended after 3 by 'environment'"),
        ([["a"] * 3], {"max_turns": 2}, r"ended after 2 by 'max_turns'"),
        ([["a"]], {"make": lambda state: fails()}, r"by 'error', info=.*lost"),
        ([["a long turn"]], {}, r"at most sampling.max_new_tokens=6 tokens; got 12"),
        ([["a"], ["b"]], {}, r"scripts must have one entry per row = 1"),
    ],
)
def test_a_script_that_cannot_be_said_is_refused(scripts: Any, options: dict[str, Any], message: str) -> None:
    policy = AgentPolicy(language_model(), options.pop("make", Echo), **options)
    with pytest.raises(ContractError, match=message):
        policy.replay(["you"], scripts)


# A value head


def with_head(family: str = "qwen3", *, template: str = CHATML, **options: Any) -> Any:
    """A language model with a random value head."""
    head = ValueHead(16 if family == "mamba" else 32, width=8)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_(std=0.3, generator=torch.Generator().manual_seed(0))
    return model_with(template, family, value_head=head, **options)


def values_one_by_one(policy: Any, row: Conversation) -> tuple[Tensor, Tensor]:
    """Values before each step of a conversation, and after its last step, one forward pass per context."""
    before, after = [torch.zeros(0)], torch.zeros(())
    for segment in row.segments:
        ids = torch.tensor([segment.token_ids])
        hidden = policy.model(input_ids=ids, use_cache=False, output_hidden_states=True).hidden_states[-1][0]
        values = policy.value_head(hidden)
        before.append(values[:-1][torch.tensor(segment.sampled[1:])])
        after = values[-1]
    return torch.cat(before), after


def made(*segments: str, ended_by: Any = "environment") -> Conversation:
    """A conversation of one turn per segment, with `.` for context and `s` for sampled tokens."""

    def segment(number: int, marks: str) -> Segment:
        ids = tuple((7 * place + 5 * number) % 90 for place in range(len(marks)))
        sampled = tuple(mark == "s" for mark in marks)
        return Segment(token_ids=ids, sampled=sampled, log_probs=(0.0,) * marks.count("s"))

    turns = [Turn(num_tokens=marks.count("s"), reward=0.0) for marks in segments]
    turns[-1] = replace(turns[-1], is_truncated=ended_by == "length")
    made_of = tuple(segment(number, marks) for number, marks in enumerate(segments))
    return conversation(segments=made_of, turns=tuple(turns), ended_by=ended_by)


@pytest.mark.parametrize("family", ["qwen3", "mistral", "mamba"])
def test_values_are_those_of_each_context_alone(family: str) -> None:
    policy = with_head(family)
    rows = [
        made("...sss", ".....ssss", ended_by="length"),
        made("....ss...s..sss"),
        made(".s", "..........ss", ".....s..s"),
        made("..ss", ended_by="length"),
    ]
    scores = AgentPolicy(policy, Echo).score_actions([None] * 4, rows)
    for row, values, final in zip(rows, scores.values, scores.final_values, strict=True):
        before, after = values_one_by_one(policy, row)
        torch.testing.assert_close(values[: len(row)], before, atol=1e-5, rtol=0)
        assert not values[len(row) :].any()
        torch.testing.assert_close(final, after * (row.ended_by == "length"), atol=1e-5, rtol=0)


def test_the_gradient_of_values_is_the_sum_over_contexts_one_by_one() -> None:
    policy = with_head(template=FORGETFUL, max_new_tokens=40)
    torch.manual_seed(0)
    agent = AgentPolicy(policy, Echo)
    rows = rows_of(agent.generate_actions(["you", "me"], 4))
    assert sum(len(row.segments) for row in rows) > len(rows)
    scores = agent.score_actions([None] * 8, rows)
    weights = torch.randn(scores.values.shape)
    pairs = zip(rows, weights, strict=True)
    one_by_one = [(values_one_by_one(policy, row)[0] * own[: len(row)]).sum() for row, own in pairs]
    both = torch.nn.ModuleList([policy.model, policy.value_head])
    expected = gradients(both, torch.stack(one_by_one).sum())
    assert relative_difference(gradients(both, (scores.values * weights).sum()), expected) < FLOAT32_GRADIENT


def test_only_a_truncated_message_has_a_value_after_it(subtests: pytest.Subtests) -> None:
    """After all other ends, nothing follows that the policy is trained on."""
    for mask_truncated, kinds in ((False, ("environment", "max_turns", "length")), (True, ("length",))):
        for ended_by, make, turns, options, _, _ in ENDS:
            if make is not Echo or ended_by not in kinds:
                continue
            follows = LONG in turns
            with subtests.test(ended_by=ended_by, turns=turns, mask_truncated=mask_truncated):
                head = ValueHead(32, width=8)
                torch.nn.init.ones_(head.layers[3].bias)
                said = Scripted(turns, max_new_tokens=8, value_head=head, mask_truncated=mask_truncated)
                agent = AgentPolicy(said.policy, Echo, **options)
                (row,) = agent.generate_actions(["you"], 1)[0]
                assert row.ended_by == ended_by
                assert [turn.is_truncated for turn in row.turns] == [False] * (len(turns) - 1) + [follows] * bool(turns)
                assert Conversation.from_state(row.to_state()) == row
                scores = agent.score_actions([None], [row])
                is_masked = mask_truncated and ended_by == "length"
                assert scores.values.tolist() == [[1.0] * (0 if is_masked else len(row))]
                assert scores.final_values.tolist() == [float(follows and not is_masked)]


@pytest.mark.slow
def test_gae_learns_from_the_rewards_of_turns() -> None:
    def wants_short_messages(self: Any, said: Any) -> Any:
        observation, _, *others = Echo.step(self, said)
        return observation, 1 / (1 + len(said["content"])), *others

    torch.manual_seed(1)
    policy = language_model(value_head=True, max_new_tokens=8)
    agent = AgentPolicy(policy, changed(Echo, step=wants_short_messages))
    parts = {"advantage": AdvantageConfig(credit="gae", scale="batch"), "objective": ObjectiveConfig(value_clip=0.5)}
    config = GRPOConfig(group_size=16, seed=1, learning_rate=5e-3, num_epochs_per_update=2, **parts)
    trainer = GRPOTrainer(config=config, policy=agent, reward_model=EnvironmentReward(per_turn=True))
    history = trainer.train(["be brief"], num_iterations=24, progress=False)
    assert history[0]["rewards/mean"] < 0.5
    assert history[-1]["rewards/mean"] > 2.5
    (row,) = agent.generate_actions(["be brief"], 1, temperature=0)[0]
    values = agent.eval().score_actions([None], [row]).values[0]
    left = torch.tensor([3.0, 2.0, 1.0])  # what the turns left will bring
    torch.testing.assert_close(values, left, atol=0.5, rtol=0)
