"""What an agent program may ask of a `Chat`: shorter messages, stop strings, several histories, results in any order."""

import asyncio
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from adapters.agents import AgentPolicy, Chat, Message
from adapters.llm import RowLimit, SamplingConfig
from grpo.errors import ContractError
from tests.support.agent_parts import rows_of, user
from tests.support.agents import Scripted, chat_tokenizer, converse, language_model, lookup, says_call
from tests.support.llm_models import forward_shapes
from tests.unit.adapters.agents.test_conversations import text_and_sampled

ASKED: list[Message] = [user("you")]


def says(*turns: str, **options: Any) -> Any:
    return Scripted(turns, **{"max_new_tokens": 20} | options).policy


def asks(said: Message, text: str, before: list[Message] = ASKED) -> list[Message]:
    return [*before, said, user(text)]


def asking(**settings: Any) -> Any:
    """A program with one request."""

    async def play(chat: Chat, state: Any) -> float:
        await chat(ASKED, **settings)
        return 1.0

    return play


def test_a_shorter_message_does_not_end_the_conversation() -> None:
    replies = []

    async def play(chat: Chat, state: Any) -> float:
        first = await chat.reply(ASKED, max_new_tokens=3)
        second = await chat.reply(asks(first.message, "more"), max_new_tokens=21)  # the policy's 20 are fewer
        replies.extend([first, second])
        return 1.0

    policy = says("abcdef", "fine")
    (found,) = converse(policy, play, max_tokens=200)
    ((text, sampled),) = text_and_sampled(found)
    assert text.endswith("you<|im_end|>\n<|im_start|>assistant\nabc<|im_end|>\n<|im_start|>user\nmore"
                         "<|im_end|>\n<|im_start|>assistant\nfine<|im_end|>")  # fmt: skip
    assert sampled == "abc|fine<|im_end|>"
    assert [reply.is_truncated for reply in replies] == [True, False]
    assert [reply.num_tokens for reply in replies] == [3, 5]
    (segment,) = found.segments
    assert [reply.num_context_tokens for reply in replies] == [segment.num_context_tokens, len(segment.token_ids) - 5]
    assert (found.ended_by, found.rewards) == ("environment", (0.0, 1.0))


def test_a_message_that_reaches_the_policys_maximum_ends_the_conversation_and_a_shorter_one_needs_less_room() -> None:
    for maximum in (20, 100):
        (found,) = converse(says("b" * 30), asking(max_new_tokens=maximum))
        assert (found.ended_by, found.rewards, len(found)) == ("length", (0.0,), 20)
    room = len(chat_tokenizer().encode("<|im_start|>user\nyou<|im_end|>\n<|im_start|>assistant\n")) + 5
    for max_tokens, ended_by in ((room, "environment"), (room - 1, "length")):
        assert converse(says("ok"), asking(max_new_tokens=5), max_tokens=max_tokens)[0].ended_by == ended_by


def test_a_stop_string_is_cut_off_and_its_tokens_are_scored(subtests: pytest.Subtests) -> None:
    """The next turn has a context of its own, because its history does not have the stop string."""

    async def play(chat: Chat, state: Any) -> float:
        first = await chat(ASKED, stop=["Result:", "?"])
        assert first["content"] == "Look"
        await chat(asks(first, "more"))
        return 1.0

    reads_all = {"content": {"close_pattern": r"<\|im_end\|>", "content": "text"}}
    parser = {"defaults": {"role": "assistant"}, "start_anchor": "<|im_start|>assistant\n", "fields": reads_all}
    for template in (None, parser):
        with subtests.test(parser=template is not None):
            policy = says("LookResult:", "LookResult:fine")
            if template is not None:
                policy.tokenizer.response_template = template
            (found,) = converse(policy, play)
            (first, sampled), (second, also) = text_and_sampled(found)
            assert (sampled, also) == ("LookResult:", "LookResult:fine<|im_end|>")
            assert first.endswith("assistant\nLookResult:")
            assert second.endswith("assistant\nLook<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n"
                                   "<|im_start|>assistant\nLookResult:fine<|im_end|>")  # fmt: skip
            assert found.messages[-1]["content"] == "LookResult:fine"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1; got 0"),
        ({"stop": "x"}, "stop must be a list of texts"),
        ({"stop": ["x", ""]}, "stop must be a list of texts"),
        ({"stop": ["\ud83d"]}, "stop must be a list of texts"),
    ],
)
def test_wrong_settings_of_a_message_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=message):
        converse(says(), asking(**settings))


def test_settings_of_a_message_reach_only_its_sampling_and_tokens_do_not_depend_on_concurrency() -> None:
    async def play(chat: Chat, state: Any) -> float:
        first = await chat(ASKED, max_new_tokens=3 + 2 * (state % 2), stop=["a", "b"] if state > 1 else [])
        await chat(asks(first, "more"), max_new_tokens=9)
        return 1.0

    policy = language_model(sampling=SamplingConfig(max_new_tokens=20, min_new_tokens=4, stop=("c",)))
    policy.sample_tokens = Mock(wraps=policy.sample_tokens)
    found = []
    for concurrency in (64, 1):
        torch.manual_seed(0)
        agent = AgentPolicy(policy, play, concurrency=concurrency)
        rows = rows_of(agent.generate_actions([0, 1, 2, 3], 1))
        found.append([[segment.token_ids for segment in row.segments] for row in rows])
    assert found[0] == found[1]
    assert {limit for call in policy.sample_tokens.call_args_list for limit in call.kwargs["limits"]} == {
        RowLimit(max_new_tokens=limit, stop=("c", *agent.template.stop, *stop))
        for limit, stop in ((3, ()), (5, ()), (3, ("a", "b")), (5, ("a", "b")), (9, ()))
    }


def test_several_histories_go_on_each_with_its_own_tokens() -> None:
    """Two histories in turn, then a second answer to an earlier turn of each. No turn is tokenized again: odd spaces stay."""

    async def play(chat: Chat, state: Any) -> dict[str, float]:
        both = (ASKED, [user("they")])
        said = [*await asyncio.gather(*(chat.reply(asked, [lookup]) for asked in both))]
        mine, theirs = (
            [*asked, message, {"role": "tool", "content": text, "tool_call_id": message["tool_calls"][0]["id"]}]
            for asked, text, message in zip(both, ("is 1", "is 2"), [reply.message for reply in said], strict=True)
        )
        said.append(await chat.reply(mine, [lookup]))
        said.append(await chat.reply(theirs, [lookup]))
        said.append(await chat.reply([*chat.messages, user("go on")], [lookup]))
        said.append(await chat.reply(mine, [lookup]))
        said.append(await chat.reply(asks({"role": "assistant", "content": "B"}, "again", theirs), [lookup]))
        return {reply.id: 1.0 + place for place, reply in enumerate(said)}

    call = '<tool_call>{"name":  "lookup", "arguments": {"topic": "x"}}</tool_call>'
    (found,) = converse(says(call, call, "A", "B", "C", "D", "E", max_new_tokens=100), play)
    texts = text_and_sampled(found)
    begins = [text.split("<|im_start|>user\n")[1].split("<|im_end|>")[0] for text, _ in texts]
    assert begins == ["they", "they", "you", "you"]  # several tasks asked, so the order is that of the tokens
    end = "<|im_end|>"
    # after B, "again" comes before "go on", though it was asked later
    expected = [f"{call}{end}|B{end}|E{end}", "C" + end, f"{call}{end}|A{end}", "D" + end]
    assert [sampled for _, sampled in texts] == expected
    assert texts[1][0] == texts[0][0].replace("again", "go on").replace("E<", "C<")
    assert all(call + end in text for text, _ in texts)
    assert found.segments[2].token_ids[:-2] == found.segments[3].token_ids[:-2]
    assert found.rewards == (2.0, 4.0, 7.0, 5.0, 1.0, 3.0, 6.0)
    assert [turn.num_tokens for turn in found.turns] == [len(call) + 1, 2, 2, 2, len(call) + 1, 2, 2]
    assert [turn.message["content"] for turn in found.turns] == ["", "B", "E", "C", "", "A", "D"]
    for segment, last in zip(found.segments, "ECAD", strict=True):
        assert segment.messages[-1]["content"] == last
    assert found.messages == found.segments[-1].messages


def test_log_probs_of_several_histories_are_those_of_scoring_and_no_prefix_is_computed_twice() -> None:
    """Counted positions. Truncated messages keep their caches, too."""

    async def play(chat: Chat, state: Any) -> float:
        other = [user("they are here")]
        a = await chat(ASKED, max_new_tokens=4)
        b = await chat(other, max_new_tokens=5)
        await chat(asks(a, "and"))
        await chat(asks(b, "but", other))
        return 1.0

    torch.manual_seed(0)
    policy = language_model(max_new_tokens=200)
    shapes = forward_shapes(policy.model)
    agent = AgentPolicy(policy, play)
    sampled = agent.sample_actions(["you"], 1)
    (row,) = sampled.actions[0]
    computed = sum(rows * columns for rows, columns in shapes)
    assert computed == sum(len(segment.token_ids) - 1 for segment in row.segments)
    lengths = [sum(turn.num_tokens for turn in turns) for turns in (row.turns[:2], row.turns[2:])]
    assert [len(segment.log_probs) for segment in row.segments] == lengths
    scores = agent.score_actions([None], [row])
    torch.testing.assert_close(scores.log_probs, sampled.behaviour_log_probs, atol=1e-5, rtol=0)


def test_results_come_in_the_order_of_the_calls_and_have_names_and_calls_may_have_other_keys() -> None:
    async def play(chat: Chat, state: Any) -> float:
        said = await chat(ASKED, [lookup])
        calls = [{**call, "index": 0, "function": {**call["function"], "parsed": None}} for call in said["tool_calls"]]
        given = {"none": "who?"} | {call["id"]: f"result {place}" for place, call in reversed([*enumerate(calls)])}
        results: Any = [{"role": "tool", "content": text, "tool_call_id": name} for name, text in given.items()]
        await chat([*ASKED, {**said, "tool_calls": calls}, *results], [lookup])
        return 1.0

    (found,) = converse(says(says_call() + says_call("other"), "fine", max_new_tokens=200), play)
    shown = [(message["content"], message.get("name")) for message in found.messages if message["role"] == "tool"]
    assert shown == [("result 0", "lookup"), ("result 1", "other"), ("who?", None)]
    assert len(found.segments) == 1
