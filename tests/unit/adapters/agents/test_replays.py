"""`AgentPolicy.replay`: conversations with given messages, for supervised training."""

import math
from typing import Any

import pytest
import torch

from adapters.agents import AgentPolicy, ChatTemplate, Message
from grpo import GRPOConfig, GRPOTrainer, ObjectiveConfig
from grpo.errors import ContractError
from tests.support.agents import (
    CHATML,
    ENDS,
    FORGETFUL,
    ORIGINALS,
    Echo,
    Scripted,
    Tools,
    chat_tokenizer,
    converse,
    language_model,
    original_template,
    says_call,
)

CALL: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "call00000", "type": "function", "function": {"name": "lookup", "arguments": {"topic": "rain"}}}
    ],
}


@pytest.mark.parametrize("template", [CHATML, FORGETFUL])
def test_a_replay_is_the_conversation_of_a_model_that_says_the_script(template: str) -> None:
    """Two conversations with scripts of different length. Tokens, masks, messages and rewards are those of a rollout."""
    scripts = [[says_call(), "fine"], ["fine"]]
    policy = AgentPolicy(language_model(tokenizer=chat_tokenizer(template), max_new_tokens=90), Tools)
    replayed = policy.replay(["you", "me"], scripts)
    for state, script, found in zip(["you", "me"], scripts, replayed, strict=True):
        agent = Scripted(script, tokenizer=chat_tokenizer(template), max_new_tokens=90)
        (sampled,) = converse(agent.policy, Tools, state)
        assert [(s.token_ids, s.sampled) for s in found.segments] == [
            (s.token_ids, s.sampled) for s in sampled.segments
        ]
        assert (found.messages, found.turns, found.ended_by) == (sampled.messages, sampled.turns, "environment")
        assert all(math.isnan(log_prob) for log_prob in found.behaviour_log_probs)
    scores = policy.score_actions(["you", "me"], replayed)
    assert scores.mask.sum(1).tolist() == [len(row) for row in replayed]
    assert scores.log_probs.isfinite().all()


def test_a_supervised_run_makes_the_script_likely() -> None:
    """The loop of the documentation."""
    policy = AgentPolicy(language_model(max_new_tokens=20), lambda state: Echo(state, turns=2))
    given = policy.demonstrations(["you"], [["yes", "no"]])
    assert given.mask.sum().item() == len(given.actions[0])
    trainer = GRPOTrainer(
        config=GRPOConfig(learning_rate=3e-2, seed=0, max_grad_norm=None),
        policy=policy,
        reward_model=lambda states, actions: [0.0] * len(states),
    )
    trainer.train(None, demonstrations=given, num_iterations=25, progress=False)
    ((found,),) = policy.generate_actions(["you"], 1, temperature=0)
    assert [message["content"] for message in found.messages if message["role"] == "assistant"] == ["yes", "no"]


@pytest.mark.parametrize("template", [CHATML, FORGETFUL])
def test_observations_are_the_tokens_that_the_policy_did_not_sample(template: str) -> None:
    """Their log-probs are those of one forward pass over each context, and the steps have the same scores as without them."""
    scripts = [[says_call(), "fine"], ["fine"]]
    model = language_model(tokenizer=chat_tokenizer(template), max_new_tokens=90)
    policy, plain = AgentPolicy(model, Tools, observations=True), AgentPolicy(model, Tools)
    conversations = policy.replay(["you", "me"], scripts)
    with torch.no_grad():
        scores, without = (each.score_actions(["you", "me"], conversations) for each in (policy, plain))
    assert scores.observed_log_probs is not None
    assert scores.observed_mask is not None
    assert without.observed_log_probs is None
    torch.testing.assert_close(scores.log_probs, without.log_probs)
    assert torch.equal(scores.mask, without.mask)
    for row, conversation in enumerate(conversations):
        steps: list[float] = []
        seen: list[float] = []
        for segment in conversation.segments:
            tokens = torch.tensor([segment.token_ids])
            with torch.no_grad():
                log_softmax = model.model(input_ids=tokens).logits[0].log_softmax(1)
            for place in range(segment.num_context_tokens, len(segment.token_ids)):
                (steps if segment.sampled[place] else seen).append(float(log_softmax[place - 1, tokens[0, place]]))
        for found, mask, expected in (
            (scores.log_probs, scores.mask, steps),
            (scores.observed_log_probs, scores.observed_mask, seen),
        ):
            torch.testing.assert_close(found[row][mask[row]], torch.tensor(expected), rtol=1e-4, atol=1e-5)
    assert scores.observed_mask.sum(1).tolist()[1] == 0, "nothing was answered after a single turn"
    assert int(scores.observed_mask[0].sum()) > 0
    given = policy.demonstrations(["you", "me"], scripts)
    assert given.observed_mask is not None
    assert torch.equal(given.observed_mask, scores.observed_mask)


def test_a_model_learns_what_its_environment_answers() -> None:
    """The environment repeats what it was told. All rewards are equal, so that only its answers teach."""
    torch.manual_seed(0)
    policy = AgentPolicy(language_model(max_new_tokens=4), lambda state: Echo(state, turns=2), observations=True)
    trainer = GRPOTrainer(
        config=GRPOConfig(group_size=2, learning_rate=1e-2, seed=0, objective=ObjectiveConfig(observation_coef=1.0)),
        policy=policy,
        reward_model=lambda states, actions: [0.0] * len(states),
    )
    history = trainer.train(["you"], num_iterations=12, progress=False)
    assert history[-1]["train/observation_loss"] < history[0]["train/observation_loss"] / 2


THINKS_FIRST = {"deepseek_r1_distill", "deepseekv3", *(name for name in ORIGINALS if name.startswith("nemotron"))}
"""Templates whose prompt begins a thought. They write no message without a thought there."""


@pytest.mark.parametrize("name", ORIGINALS)
def test_the_template_writes_messages_of_a_script(name: str) -> None:
    """A written turn is what the template has in the whole conversation, and ends with an end-of-turn token."""
    tokenizer = chat_tokenizer(original_template(name))
    ends = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(list(ENDS.get(name, ())))]
    template = ChatTemplate(tokenizer, end_token_ids=ends)
    said = [{"role": "assistant", "content": "sunny"}, *([CALL] if template.shows_tools else [])]
    for message in said:
        if name in THINKS_FIRST:
            with pytest.raises(ContractError, match="the text that the policy would write"):
                template.turn(message)
            continue
        token_ids = template.turn(message)
        assert token_ids[-1] in template.end_token_ids
        assert not {*token_ids[:-1]} & {*template.end_token_ids}
        text = tokenizer.decode(token_ids)
        assert all(word in text for word in (["lookup", "topic", "rain"] if message is CALL else ["sunny"]))


def test_a_turn_ends_as_the_template_ends_it() -> None:
    """gpt-oss ends a call and an answer with different tokens. A text has the answer's, unless it has one already."""
    tokenizer = chat_tokenizer(original_template("gptoss"))
    ends = tokenizer.convert_tokens_to_ids(list(ENDS["gptoss"]))
    template = ChatTemplate(tokenizer, end_token_ids=ends)
    turns = [CALL, {"role": "assistant", "content": "sunny"}, "sunny", "lookup<|call|>"]
    found = [tokenizer.convert_ids_to_tokens(template.turn(turn)[-2:]) for turn in turns]
    assert found == [["}", "<|call|>"], ["y", "<|return|>"], ["y", "<|return|>"], ["p", "<|call|>"]]
    # a template that writes no token there: the first of the given ones
    plain = chat_tokenizer("{% for m in messages %}{{ m.content }}!{% endfor %}")
    assert ChatTemplate(plain, end_token_ids=[plain.eos_token_id, 7]).turn("")[-1] == plain.eos_token_id


def test_a_message_and_its_text_are_the_same_turn() -> None:
    template = AgentPolicy(language_model(), Tools).template
    call = '<tool_call>\n{"name": "lookup", "arguments": {"topic": "rain"}}\n</tool_call>'
    assert template.turn(CALL) == template.turn(call) == template.turn(call + "<|im_end|>")
    assert template.turn({"role": "assistant", "content": "fine"}) == template.turn("fine")
    policy = AgentPolicy(language_model(max_new_tokens=90), Tools)
    (found,) = policy.replay(["you"], [[CALL, "fine"]])
    assert found.messages[1] == CALL
    assert found.messages[2]["content"] == "rain is fine"


def test_a_conversation_ends_after_its_script() -> None:
    (found,) = AgentPolicy(language_model(), lambda state: Echo(state, turns=3)).replay(["you"], [["a", "b"]])
    assert (found.ended_by, found.rewards) == ("max_turns", (1.0, 2.0))


def refusing(state: Any) -> Any:
    raise OSError("no such game")


@pytest.mark.parametrize(
    ("scripts", "options", "message"),
    [
        ([["a"] * 4], {}, r"must have the 4 turns of its script; it ended after 3 by 'environment'"),
        ([["a"] * 3], {"max_turns": 2}, r"ended after 2 by 'max_turns'"),
        ([["a"]], {"make": refusing}, r"by 'error', info=.*no such game"),
        ([["a long turn"]], {}, r"at most sampling.max_new_tokens=6 tokens; got 12"),
        ([["a"], ["b"]], {}, r"scripts must have one entry per row = 1"),
    ],
)
def test_a_script_that_cannot_be_said_is_refused(scripts: Any, options: dict[str, Any], message: str) -> None:
    policy = AgentPolicy(language_model(), options.pop("make", Echo), **options)
    with pytest.raises(ContractError, match=message):
        policy.replay(["you"], scripts)


def test_a_message_that_the_template_cannot_write_is_refused() -> None:
    template = ChatTemplate(chat_tokenizer("{% for m in messages %}{{ m.content }}!{% endfor %}"))
    with pytest.raises(ContractError, match="none is known for the turn 'fine'"):
        template.turn("fine")
    greets = "{% if add_generation_prompt %}Hello{% endif %}"
    template = ChatTemplate(chat_tokenizer(greets + CHATML))
    with pytest.raises(ContractError, match="after the prompt of a turn"):
        template.turn({"role": "assistant", "content": "fine"})
