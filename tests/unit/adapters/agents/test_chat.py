"""What an agent program may ask of a `Chat`: shorter messages, stop strings, several histories, results in any order."""

import asyncio
from typing import Any

import pytest
import torch

from adapters.agents import AgentPolicy, Chat, Message, rollouts
from adapters.llm import RowLimit, SamplingConfig
from grpo.errors import ContractError
from tests.support.agents import Scripted, chat_tokenizer, converse, language_model, lookup, says_call
from tests.support.llm_models import forward_shapes
from tests.unit.adapters.agents.test_conversations import text_and_sampled

ASKED: list[Message] = [{"role": "user", "content": "you"}]


def says(*turns: str, **options: Any) -> Any:
    return Scripted(turns, **{"max_new_tokens": 20} | options).policy


def asks(said: Message, text: str, before: list[Message] = ASKED) -> list[Message]:
    return [*before, said, {"role": "user", "content": text}]


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


def test_a_message_that_reaches_the_policys_maximum_ends_the_conversation() -> None:
    for maximum in (20, 100):

        async def play(chat: Chat, state: Any, maximum: int | None = maximum) -> float:
            await chat(ASKED, max_new_tokens=maximum)
            return 1.0

        (found,) = converse(says("b" * 30), play)
        assert (found.ended_by, found.rewards, len(found)) == ("length", (0.0,), 20)


def test_a_shorter_message_needs_less_room() -> None:
    async def play(chat: Chat, state: Any) -> float:
        await chat(ASKED, max_new_tokens=5)
        return 1.0

    room = len(chat_tokenizer().encode("<|im_start|>user\nyou<|im_end|>\n<|im_start|>assistant\n")) + 5
    assert converse(says("ok"), play, max_tokens=room)[0].ended_by == "environment"
    assert converse(says("ok"), play, max_tokens=room - 1)[0].ended_by == "length"


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
    ],
)
def test_wrong_settings_of_a_message_are_refused(settings: dict[str, Any], message: str) -> None:
    async def play(chat: Chat, state: Any) -> float:
        await chat(ASKED, **settings)
        return 1.0

    with pytest.raises(ContractError, match=message):
        converse(says(), play)


def test_settings_of_a_message_reach_only_its_sampling_and_tokens_do_not_depend_on_concurrency() -> None:
    async def play(chat: Chat, state: Any) -> float:
        first = await chat(ASKED, max_new_tokens=3 + 2 * (state % 2), stop=["a", "b"] if state > 1 else [])
        await chat(asks(first, "more"), max_new_tokens=9)
        return 1.0

    policy = language_model(sampling=SamplingConfig(max_new_tokens=20, min_new_tokens=4, stop=("c",)))
    real, settings = policy.sample_tokens, []

    def noting(prompts: Any, **options: Any) -> Any:
        settings.extend(options["limits"])
        return real(prompts, **options)

    policy.sample_tokens = noting
    found = []
    for concurrency in (64, 1):
        torch.manual_seed(0)
        agent = AgentPolicy(policy, play, concurrency=concurrency)
        rows = [row for group in agent.generate_actions([0, 1, 2, 3], 1) for row in group]
        found.append([[segment.token_ids for segment in row.segments] for row in rows])
    assert found[0] == found[1]
    template = agent.template.stop
    assert set(settings) == {
        RowLimit(max_new_tokens=limit, stop=("c", *template, *stop))
        for limit, stop in ((3, ()), (5, ()), (3, ("a", "b")), (5, ("a", "b")), (9, ()))
    }


def test_several_histories_go_on_each_with_its_own_tokens() -> None:
    """Two histories in turn, then a second answer to an earlier turn of each. No turn is tokenized again: odd spaces stay."""

    async def play(chat: Chat, state: Any) -> dict[str, float]:
        other: list[Message] = [{"role": "user", "content": "they"}]
        said = [*await asyncio.gather(chat.reply(ASKED, [lookup]), chat.reply(other, [lookup]))]
        a, b = said[0].message, said[1].message
        results = [
            {"role": "tool", "content": f"is {text}", "tool_call_id": message["tool_calls"][0]["id"]}
            for text, message in (("1", a), ("2", b))
        ]
        said.append(await chat.reply([*ASKED, a, results[0]], [lookup]))
        said.append(await chat.reply([*other, b, results[1]], [lookup]))
        said.append(await chat.reply(asks(chat.messages[-1], "go on", chat.messages[:-1]), [lookup]))
        said.append(await chat.reply([*ASKED, a, results[0]], [lookup]))
        said.append(
            await chat.reply(asks({"role": "assistant", "content": "B"}, "again", [*other, b, results[1]]), [lookup])
        )
        return {reply.id: 1.0 + place for place, reply in enumerate(said)}

    call = '<tool_call>{"name":  "lookup", "arguments": {"topic": "x"}}</tool_call>'
    (found,) = converse(says(call, call, "A", "B", "C", "D", "E", max_new_tokens=100), play)
    texts = text_and_sampled(found)
    begins = [text.split("<|im_start|>user\n")[1].split("<|im_end|>")[0] for text, _ in texts]
    assert begins == ["they", "they", "you", "you"]  # several tasks asked, so the order is that of the tokens
    end = "<|im_end|>"
    assert [sampled for _, sampled in texts] == [
        f"{call}{end}|B{end}|C{end}",
        "E" + end,
        f"{call}{end}|A{end}",
        "D" + end,
    ]
    assert texts[1][0] == texts[0][0].replace("go on", "again").replace("C<", "E<")
    assert all(call + end in text for text, _ in texts)
    assert found.segments[2].token_ids[:-2] == found.segments[3].token_ids[:-2]
    assert found.rewards == (2.0, 4.0, 5.0, 7.0, 1.0, 3.0, 6.0)
    assert [turn.num_tokens for turn in found.turns] == [len(call) + 1, 2, 2, 2, len(call) + 1, 2, 2]
    assert [turn.message["content"] for turn in found.turns] == ["", "B", "C", "E", "", "A", "D"]
    for segment, last in zip(found.segments, "CEAD", strict=True):
        assert segment.messages[-1]["content"] == last
    assert found.messages == found.segments[-1].messages


def test_log_probs_of_several_histories_are_those_of_scoring_and_no_prefix_is_computed_twice() -> None:
    """Counted positions. Truncated messages keep their caches, too."""

    async def play(chat: Chat, state: Any) -> float:
        other: list[Message] = [{"role": "user", "content": "they are here"}]
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
    assert [len(segment.log_probs) for segment in row.segments] == [
        sum(turn.num_tokens for turn in row.turns[:2]),
        sum(turn.num_tokens for turn in row.turns[2:]),
    ]
    scores = agent.score_actions([None], [row])
    torch.testing.assert_close(scores.log_probs, sampled.behaviour_log_probs, atol=1e-5, rtol=0)


def test_results_come_in_the_order_of_the_calls_and_have_names() -> None:
    async def play(chat: Chat, state: Any) -> float:
        said = await chat(ASKED, [lookup])
        results: list[Message] = [
            {"role": "tool", "content": f"result {i}", "tool_call_id": call["id"]}
            for i, call in enumerate(said["tool_calls"])
        ]
        unknown: Message = {"role": "tool", "content": "who?", "tool_call_id": "none"}
        await chat([*ASKED, said, unknown, *reversed(results)], [lookup])
        return 1.0

    (found,) = converse(says(says_call() + says_call("other"), "fine", max_new_tokens=200), play)
    shown = [(message["content"], message.get("name")) for message in found.messages if message["role"] == "tool"]
    assert shown == [("result 0", "lookup"), ("result 1", "other"), ("who?", None)]
    assert len(found.segments) == 1


def test_a_call_may_come_back_with_other_keys() -> None:
    async def play(chat: Chat, state: Any) -> float:
        said = await chat(ASKED, [lookup])
        call = said["tool_calls"][0]
        again = {**call, "index": 0, "function": {**call["function"], "parsed": None}}
        result: Message = {"role": "tool", "content": "fine", "tool_call_id": call["id"]}
        await chat([*ASKED, {**said, "tool_calls": [again]}, result], [lookup])
        other = {**call, "function": {**call["function"], "arguments": {}}}
        await chat([*ASKED, {**said, "tool_calls": [other]}, result], [lookup])
        return 1.0

    (found,) = converse(says(says_call(), "a", "b", max_new_tokens=200), play)
    assert len(found.segments) == 2


def test_requests_with_different_settings_are_sampled_in_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "SHORTEST_WAIT", 30.0)  # however busy this machine is

    async def play(chat: Chat, state: Any) -> float:
        return float(len((await chat(ASKED, max_new_tokens=1 + state))["content"]))

    policy = says(*["abcdef"] * 6)
    real, sizes = policy.sample_tokens, []
    policy.sample_tokens = lambda prompts, **options: (sizes.append(len(prompts)), real(prompts, **options))[1]
    rows = [row for group in AgentPolicy(policy, play).generate_actions([0, 1, 2], 2) for row in group]
    assert sizes == [6]
    assert [row.reward for row in rows] == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
