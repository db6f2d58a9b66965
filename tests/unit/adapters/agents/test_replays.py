"""`AgentPolicy.replay`: conversations with given messages, for supervised training."""

import math
from typing import Any

import pytest
import torch

from adapters.agents import AgentPolicy, ChatTemplate, Message
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


def test_supervised_steps_make_the_script_likely() -> None:
    """The loop of the documentation."""
    policy = AgentPolicy(language_model(max_new_tokens=20), lambda state: Echo(state, turns=2))
    conversations = policy.replay(["you"], [["yes", "no"]])
    optimizer = torch.optim.Adam(policy.get_parameters().values(), lr=3e-2)
    for _ in range(25):
        scores = policy.score_actions(["you"], conversations)
        loss = -scores.log_probs[scores.mask].mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    ((found,),) = policy.generate_actions(["you"], 1, temperature=0)
    assert [message["content"] for message in found.messages if message["role"] == "assistant"] == ["yes", "no"]


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
