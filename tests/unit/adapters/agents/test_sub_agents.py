"""Several agents in one conversation: their requests come in any order, and seats that are trained or not."""

import asyncio
import itertools
import json
import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import torch
from openai import AsyncOpenAI, OpenAI

from adapters.agents import (
    AgentPolicy,
    Chat,
    ChatEndpoint,
    Conversation,
    ConversationEnded,
    Message,
    Seat,
    Segment,
    Turn,
    seat_advantages,
)
from adapters.agents.transcripts import save_transcripts, transcript_page
from adapters.llm import RowLimit, SamplingConfig
from grpo import ExperienceBatch
from grpo.errors import ConfigError, ContractError
from tests.support.agent_parts import before_each_batch, conversation, rows_of, sizes_of_batches, user
from tests.support.agents import Echo, Scripted, converse, language_model, wait_for
from tests.support.clocks import ConversationClocks
from tests.unit.adapters.agents.test_conversations import says, text_and_sampled
from tests.unit.adapters.agents.test_endpoint import client_of, reply, with_client

NAMES = ("you", "they", "we", "she")


async def sub_agents(ask: Callable[[list[Any]], Any], jitter: Callable[[], float]) -> dict[str, float]:
    """Four sub-agents with two turns each. The reward of a turn is its own: by who spoke, and what was said."""
    rewards = {}

    async def talk(place: int, name: str) -> None:
        messages = [user(name)]
        for turn in range(2):
            await asyncio.sleep(jitter())
            reply_id, said = await ask(messages)
            rewards[reply_id] = 100.0 * place + 10.0 * turn + len(said["content"] or "")
            messages = [*messages, said, user("more")]

    await asyncio.gather(*(talk(place, name) for place, name in enumerate(NAMES)))
    return rewards


def in_tasks(jitter: Callable[[], float]) -> Any:
    async def play(chat: Chat, state: Any) -> dict[str, float]:
        async def ask(messages: list[Any]) -> Any:
            said = await chat.reply(messages, max_new_tokens=5)
            return said.id, said.message

        return await sub_agents(ask, jitter)

    return play


def over_http(jitter: Callable[[], float]) -> Any:
    async def program(base_url: str, state: Any) -> dict[str, float]:
        async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:

            async def ask(messages: list[Any]) -> Any:
                said = await client.chat.completions.create(model="m", messages=messages, max_tokens=5)
                return said.id, said.choices[0].message.model_dump()

            return await sub_agents(ask, jitter)

    return program


def rewards_by_speaker(conversation: Any) -> dict[str, list[float]]:
    """The rewards of each speaker's turns, without what they say of the text. A message that was cut begins a new context."""
    found, turns = {}, iter(conversation.turns)
    for said, rewards in conversation.contexts:
        texts = [next(turns).message["content"] for _ in rewards]
        found.setdefault(said[0]["content"], []).extend(
            reward - len(text) for reward, text in zip(rewards, texts, strict=True)
        )
    return found


def are_equal(one: Any, other: Any) -> bool:
    """Whether two conversations are equal in all. Log-probs round differently in another batch."""
    states = [each.to_state() for each in (one, other)]
    found, expected = ([part.pop("log_probs") for part in state["segments"]] for state in states)
    return states[0] == states[1] and all(
        ours == pytest.approx(theirs, abs=1e-4) for ours, theirs in zip(found, expected, strict=True)
    )


@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_runs", [3, pytest.param(100, marks=pytest.mark.faults)])
def test_rewards_reach_their_own_turns_and_one_seed_has_one_result_at_any_timing(num_runs: int) -> None:
    """In tasks and over HTTP, which samples what it would without HTTP."""
    draw = random.Random(0)
    model = language_model(sampling=SamplingConfig(max_new_tokens=6, min_new_tokens=2))
    found = []
    for run, is_http in itertools.product(range(num_runs), (False, True)):
        jitter = lambda longest=(0.0, 0.03, 0.1)[run % 3]: draw.random() * longest  # noqa: E731
        torch.manual_seed(3)
        with ChatEndpoint(model) as endpoint:
            agent = AgentPolicy(model, endpoint.runs(over_http(jitter)) if is_http else in_tasks(jitter))
            rows = rows_of(agent.generate_actions([0, 1], 4))
        assert len(rows) == 8
        for row in rows:
            assert rewards_by_speaker(row) == {name: [100.0 * i, 100.0 * i + 10] for i, name in enumerate(NAMES)}
        found.append(rows)
    assert all(all(map(are_equal, each, found[0])) for each in found)
    assert found[0][0].segments != found[0][1].segments


async def branches(chat: Chat, jitter: Callable[[], float]) -> dict[str, float]:
    """A plan, and three tasks that go on from it."""
    plan = await chat.reply([user("plan")])

    async def talk(place: int) -> dict[str, float]:
        await asyncio.sleep(jitter())
        messages = [user("plan"), plan.message, user(NAMES[place])]
        said = await chat.reply(messages)
        return {said.id: 10.0 * place, (await chat.reply([*messages, said.message, user("more")])).id: 10.0 * place + 1}

    found = await asyncio.gather(*(talk(place) for place in range(3)))
    return {plan.id: -1.0} | {name: reward for each in found for name, reward in each.items()}


async def other_limits(chat: Chat, jitter: Callable[[], float]) -> dict[str, float]:
    """Equal prompts with other ends."""

    async def talk(place: int, **end: Any) -> tuple[str, float]:
        await asyncio.sleep(jitter())
        return (await chat.reply([user("you")], **end)).id, float(place)

    ends: list[dict[str, Any]] = [{}, {"max_new_tokens": 3}, {"max_new_tokens": 5}, {"stop": ["zz"]}]
    return dict(await asyncio.gather(*(talk(place, **end) for place, end in enumerate(ends))))


@pytest.mark.parametrize("program", [branches, other_limits])
def test_any_order_of_tasks_gives_the_same_conversation(program: Any) -> None:
    model, draw = language_model(sampling=SamplingConfig(max_new_tokens=99, min_new_tokens=2)), random.Random(0)

    def held(longest: float) -> Any:
        torch.manual_seed(3)

        async def play(chat: Chat, state: Any) -> dict[str, float]:
            return await program(chat, lambda: draw.random() * longest)

        ((row,),) = AgentPolicy(model, play).generate_actions([0], 1)
        return row

    expected = held(0.0)
    assert all(are_equal(held(0.1), expected) for _ in range(6))
    if program is branches:
        assert sorted(expected.rewards) == [-1.0, 0.0, 1.0, 10.0, 11.0, 20.0, 21.0]
        assert [len(segment.messages) for segment in expected.segments] == [6, 6, 6]


def test_equal_requests_have_turns_of_their_own() -> None:
    async def play(chat: Chat, state: Any) -> float:
        said = await asyncio.gather(*(chat.reply([user("you")]) for _ in range(4)))
        assert len({reply.id for reply in said}) == 4
        return 1.0

    torch.manual_seed(0)
    model = language_model(sampling=SamplingConfig(max_new_tokens=8, min_new_tokens=8))
    ((row,),) = AgentPolicy(model, play).generate_actions([0], 1)
    assert len({segment.token_ids for segment in row.segments}) == 4


def test_all_that_wait_are_one_batch_whatever_their_limits() -> None:
    """Sixteen conversations of four agents with other limits and stop strings, three turns each."""

    async def play(chat: Chat, state: int) -> float:
        async def talk(place: int) -> None:
            messages = [user(NAMES[place])]
            for _ in range(3):
                said = await chat(messages, max_new_tokens=2 + place + state % 3, stop=["a"] * (place % 2))
                messages = [*messages, said, user("more")]

        await asyncio.gather(*(talk(place) for place in range(4)))
        return 1.0

    model = language_model(sampling=SamplingConfig(max_new_tokens=20))
    sizes = sizes_of_batches(model)
    AgentPolicy(model, play, max_turns=12).generate_actions(list(range(8)), 2)
    assert sum(sizes) == 16 * 4 * 3
    assert len(sizes) <= 6  # three, unless this machine is busy
    sizes.clear()
    AgentPolicy(model, play, concurrency=16, max_turns=12).generate_actions(list(range(8)), 2)
    assert max(sizes) == 16  # no batch is larger


def test_clients_of_one_conversation_over_http_are_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batch waits until all 32 clients have asked. A batch waits for each conversation, so this machine's load
    decides only whether the last of them has just missed the second batch."""
    monkeypatch.setattr("adapters.agents.rollouts.SHORTEST_WAIT", 20.0)
    model, asked, real = language_model(max_new_tokens=6), list[int](), Chat.reply

    async def counted(*args: Any, **options: Any) -> Any:
        asked.append(1)
        return await real(*args, **options)

    monkeypatch.setattr(Chat, "reply", counted)
    before_each_batch(model, lambda prompts: wait_for(lambda: len(asked) >= 32))
    sizes = sizes_of_batches(model)
    with ChatEndpoint(model) as endpoint:
        AgentPolicy(model, endpoint.runs(over_http(lambda: 0.0))).generate_actions([0, 1], 4)
    assert sum(sizes) == 8 * 4 * 2
    assert sum(sizes[:2]) >= 31
    assert len(sizes) <= 8, "each batch has a message of each conversation that goes on, and each has eight"


def test_a_batch_has_a_request_of_each_conversation_before_the_second_of_any(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation with 20 requests at once, in every place, and one with three in turn. A batch has room for two."""
    monkeypatch.setattr("adapters.agents.rollouts.SHORTEST_WAIT", 20.0)  # the batch waits for the second conversation

    async def play(chat: Chat, state: str) -> float:
        if state == "many":
            await asyncio.gather(*(chat([user(f"{state} {place}")], max_new_tokens=1) for place in range(20)))
        for place in range(3 if state == "few" else 0):
            await chat([user(f"{state} {place}")], max_new_tokens=1)
        return 1.0

    for states in (["many", "few"], ["few", "many"]):
        model, seen = language_model(max_new_tokens=2), list[list[str]]()
        decode = model.tokenizer.decode
        before_each_batch(
            model, lambda prompts, seen=seen, decode=decode: seen.append([decode(prompt) for prompt in prompts])
        )
        AgentPolicy(model, play, concurrency=2, max_turns=20).generate_actions(states, 1)
        assert sum(map(len, seen)) == 23
        assert max(map(len, seen)) == 2
        assert [sum("user\nfew" in text for text in batch) for batch in seen] == [1] * 3 + [0] * (len(seen) - 3)


@pytest.mark.parametrize("fails", [False, True])
def test_over_http_a_truncated_agent_gets_its_message_with_the_reason_and_the_others_go_on(fails: bool) -> None:
    """Two clients at the same time, one of which reaches the policy's own maximum. A program that fails after a limit has the
    reward 0."""

    def program(base_url: str, state: Any) -> float:
        both_have_said = threading.Barrier(2, timeout=20)

        def talk(name: str) -> tuple[str, str | None]:
            with client_of(base_url) as client:
                said, reason, *_ = reply(client, streams=fails, model="m", messages=[user(name)])
                both_have_said.wait()
                history = [user(name), {"role": "assistant", "content": said["content"]}, user("more")]
                more: Any = {"model": "m", "messages": history}
                if reason == "stop":
                    assert client.chat.completions.create(**more).choices[0].message.content == "d"
                else:
                    with pytest.raises(openai.APIStatusError, match="The conversation ended by 'length'"):
                        client.chat.completions.create(**more)
                return said["content"], reason

        with ThreadPoolExecutor(2) as pool:
            assert [*pool.map(talk, ("you", "they"))] == [("abcdef", "length"), ("b", "stop")]
        if fails:
            raise KeyError("what the first agent did not say")
        return 1.0

    turns = {"more": "d", "you": "abcdefghij", "they": "b"}
    model = Scripted(lambda text: next(turns[key] for key in turns if key in text), max_new_tokens=6).policy
    with ChatEndpoint(model) as endpoint:
        (row,) = converse(model, endpoint.runs(program))
    assert (row.reward, row.ended_by) == ((0.0, "length") if fails else (1.0, "environment"))
    assert [len(segment.messages) for segment in row.segments] == [4, 2]
    assert row.info == ({"error": "KeyError: 'what the first agent did not say'"} if fails else {})


def test_an_agent_in_a_task_group_that_reaches_a_limit_is_no_failure() -> None:
    async def play(chat: Chat, state: Any) -> float:
        async with asyncio.TaskGroup() as group:
            group.create_task(chat([user("you")]))
        return 1.0

    (row,) = converse(Scripted(("abcdefghij",), max_new_tokens=6).policy, play)
    assert (row.reward, row.ended_by) == (0.0, "length")


def test_rewards_of_several_agents_need_ids(subtests: pytest.Subtests) -> None:
    async def together(chat: Chat) -> list[str]:
        return [reply.id for reply in await asyncio.gather(*(chat.reply([user(name)]) for name in NAMES[:2]))]

    async def one_by_one(chat: Chat) -> list[str]:
        return [(await chat.reply([user(name)])).id for name in NAMES[:2]]

    wrongs = (None, "good", [1.0], [[1.0, 2.0]])
    cases: list[tuple[Any, Any, str | list[float]]] = [
        (together, lambda ids: [1.0, 2.0], "must return rewards by message, because"),
        (together, lambda ids: {ids[0]: 1.0, "turn-1": 2.0}, "by Reply.id or seat; got .'turn-1'., which no message"),
        (together, lambda ids: {ids[0]: "good"}, "must return one reward, or one for each"),
        (together, lambda ids: {ids[0]: 1.0}, [0.0, 1.0]),  # "they" comes before "you"
        (together, lambda ids: 3.0, [0.0, 3.0]),
        (one_by_one, lambda ids: [1.0, 2.0], [1.0, 2.0]),
        (one_by_one, lambda ids: {ids[1]: 2.0}, [0.0, 2.0]),
        *((one_by_one, lambda ids, wrong=wrong: wrong, "of the policy's messages = 2") for wrong in wrongs),
    ]
    for number, (talk, rewards, expected) in enumerate(cases):

        async def play(chat: Chat, state: Any, talk: Any = talk, rewards: Any = rewards) -> Any:
            return rewards(await talk(chat))

        model = Scripted(("a", "b"), max_new_tokens=6).policy
        with subtests.test(number):
            if isinstance(expected, str):
                with pytest.raises(ContractError, match=expected):
                    converse(model, play)
            else:
                assert list(converse(model, play)[0].rewards) == expected


@pytest.mark.parametrize("seat", [None, "function"])
def test_the_number_of_requests_that_wait_is_bounded(seat: str | None) -> None:
    async def play(chat: Chat, state: Any) -> float:
        await asyncio.gather(*(chat.reply([user(str(place))], seat=seat) for place in range(257)))
        return 1.0

    seats = [Seat("function", lambda messages: time.sleep(0.5) or "late")]
    with pytest.raises(ContractError, match="at most 256 requests may wait"):
        AgentPolicy(language_model(max_new_tokens=1), play, max_turns=1000, seats=seats).generate_actions([0], 1)


@pytest.mark.parametrize(("words", "ended_by"), [((1, 40), "environment"), ((40, 40), "length")])
def test_an_agent_without_room_for_another_message_ends_alone(words: tuple[int, int], ended_by: str) -> None:
    """The conversation ended by the limit if all agents did."""

    async def play(chat: Chat, state: Any) -> float:
        async def talk(name: str, count: int) -> bool:
            said = (await chat.reply([user(name)], max_new_tokens=1)).message
            try:
                await chat.reply([user(name), said, user(" ".join(["more"] * count))], max_new_tokens=1)
            except ConversationEnded as end:
                return end.ended_by != "length"
            return True

        return float(sum(await asyncio.gather(*map(talk, NAMES, words))))

    ((row,),) = AgentPolicy(language_model(max_new_tokens=2), play, max_tokens=90).generate_actions([0], 1)
    assert (row.reward, row.ended_by) == (float(words.count(1)), ended_by)


def test_rows_of_one_call_end_at_their_own_limits_as_in_calls_of_their_own(subtests: pytest.Subtests) -> None:
    prompts = [[5, 6, 7], [8, 9], [5, 6, 7], [10]]
    limits = [RowLimit(max_new_tokens=3), RowLimit(max_new_tokens=9, stop=("a", "b")), RowLimit(max_new_tokens=9),
              RowLimit(max_new_tokens=1, stop=("a",))]  # fmt: skip
    for options in ({}, {"max_rows_per_decode": 2}, {"sampler": "recorded"}):
        with subtests.test(**options):
            model = language_model(sampling=SamplingConfig(max_new_tokens=12, min_new_tokens=2), **options)
            together = model.sample_tokens(prompts, seeds=[1, 2, 3, 4], limits=limits)
            for row, limit in enumerate(limits):
                own = {"max_new_tokens": limit.max_new_tokens, "min_new_tokens": min(2, limit.max_new_tokens)}
                alone = model.sample_tokens([prompts[row]], seeds=[row + 1], stop=limit.stop, **own)
                assert together.token_ids[row] == alone.token_ids[0]
                assert together.finish_reasons[row] == alone.finish_reasons[0]
                found, expected = together.behaviour_log_probs[row], alone.behaviour_log_probs[0]
                torch.testing.assert_close(torch.tensor(found), torch.tensor(expected))
            assert [len(row) for row in together.token_ids] != [12] * 4
            assert getattr(model._sampler, "records", True)


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_a_long_context_with_a_small_limit_fits_beside_a_short_one_with_a_large_limit(family: str) -> None:
    """The model has 24 positions. GPT-2 has a table of them, in which an ended row finds no further place."""
    model = language_model(family, positions=24, sampling=SamplingConfig(max_new_tokens=20, min_new_tokens=20))
    prompts, limits = [[5] * 22, [6, 7], [8, 9]], [RowLimit(max_new_tokens=n) for n in (2, 20, 20)]
    found = model.sample_tokens(prompts, seeds=[1, 2, 3], limits=limits)
    assert [len(row) for row in found.token_ids] == [2, 20, 20]
    with pytest.raises(ContractError, match=r"24 positions; those at \[0\] need \[25\]"):
        model.sample_tokens(prompts, seeds=[1, 2, 3], limits=[RowLimit(max_new_tokens=3), *limits[1:]])


def test_a_sampler_without_limits_of_rows_samples_each_limit_by_itself() -> None:
    model = language_model(sampling=SamplingConfig(max_new_tokens=12))
    limits = [RowLimit(max_new_tokens=1 + row % 3) for row in range(6)]
    prompts = [[5, 6 + row] for row in range(6)]
    expected = model.sample_tokens(prompts, seeds=range(6), limits=limits)
    inner, sizes = model._sampler, []

    def sample(prompts: Any, num_per_prompt: int, config: Any, *, end_token_ids: Any, seeds: Any) -> Any:
        sizes.append(len(prompts))
        return inner.sample(prompts, num_per_prompt, config, end_token_ids=end_token_ids, seeds=seeds)

    model._sampler = SimpleNamespace(sample=sample, sync=lambda model: None)
    found = model.sample_tokens(prompts, seeds=range(6), limits=limits)
    assert found.token_ids == expected.token_ids
    assert found.finish_reasons == expected.finish_reasons
    assert sizes == [2, 2, 2]


# Seats


YOU: list[Message] = [user("you")]


def upper(messages: list[Message]) -> str:
    return messages[-1]["content"].upper()


async def later(messages: list[Message]) -> Message:
    await asyncio.sleep(0.01)
    return {"role": "assistant", "content": "later"}


def test_seats_speak_and_what_is_not_trained_is_context(tmp_path: Path) -> None:
    seen = []

    async def play(chat: Chat, state: Any) -> dict[str, float]:
        asked = (await chat.reply(YOU, seat="agent")).message
        answers = [await chat.reply([*YOU, asked], seat=seat) for seat in ("user", "loud", "late")]
        assert len({answer.id for answer in answers}) == 3
        seen.extend(answer.message["content"] for answer in answers)
        answers[1].message["content"] += " (edited)"  # the record stays what was said
        await chat.reply([*YOU, asked, user(answers[0].message["content"])], seat="agent")
        await chat.reply(YOU, seat="critic")
        return {"agent": 2.0, "critic": 3.0, "user": 9.0}

    frozen = says("frozen", "frozen")
    seats = [
        Seat("agent"),
        Seat("critic"),
        Seat("user", frozen),
        Seat("loud", upper),
        Seat("late", later),
        Seat("silent"),
    ]
    agent = AgentPolicy(says("a", "b", "c"), play, seats=seats)
    sampled = agent.sample_actions(["you"], 1)
    ((row,),) = sampled.actions
    assert seen == ["frozen", "A", "later"]
    # the rewards of seats that are not trained are left out
    spoken = [(turn.seat, turn.message["content"], turn.reward) for turn in row.turns]
    assert spoken == [("agent", "a", 0.0), ("agent", "b", 2.0), ("critic", "c", 3.0)]
    contexts = [([message["content"] for message in said], [*rewards]) for said, rewards in row.contexts]
    assert contexts == [(["you", "a", "frozen", "b"], [0.0, 2.0]), (["you", "c"], [3.0])]
    assert str(row).splitlines() == [
        "Context 1 of 2", "assistant: a", "user: frozen", "assistant: b", "Context 2 of 2", "assistant: c", "(environment)",
    ]  # fmt: skip
    (again,) = agent.replay(["you"], [["a", "b", "c"]])
    assert (again.messages, again.seat_replies) == (row.messages, row.seat_replies), "a script is for the policy alone"
    found = {name.removeprefix("agents/"): value for name, value in sampled.metrics.items() if "_of/" in name}
    turns = {"turns_of/agent": 2, "turns_of/critic": 1, "turns_of/user": 1, "turns_of/loud": 1, "turns_of/late": 1}
    assert found == turns | {"rewards_of/agent": 2.0, "rewards_of/critic": 3.0}
    (_, own) = text_and_sampled(row)[0]
    assert own == "a<|im_end|>|b<|im_end|>", "what others say is not trained"
    assert Conversation.from_state(row.to_state()) == row
    save_transcripts(tmp_path / "said.jsonl", [row])
    record = json.loads((tmp_path / "said.jsonl").read_text())
    assert record["seats"] == ["agent", "agent", "critic"]
    assert [context["seats"] for context in record["contexts"]] == [["agent", "agent"], ["critic"]]
    shown = [([each["content"] for each in context["messages"]], context["rewards"]) for context in record["contexts"]]
    assert shown == contexts
    said = re.findall(r'<(?:span class="role"|h2)>(.*?)</(?:span|h2)>(\w*)', transcript_page([row]))
    assert said == [
        ("Context 1 of 2", ""),
        ("user", "you"), ("assistant (agent), reward 0", "a"), ("user", "frozen"), ("assistant (agent), reward 2", "b"),
        ("Context 2 of 2", ""), ("user", "you"), ("assistant (critic), reward 3", "c"),
        ("Seats that are not trained", ""),
        ("assistant", "a"), ("assistant (user)", "frozen"), ("assistant", "a"), ("assistant (loud)", "A"),
        ("assistant", "a"), ("assistant (late)", "later"),
    ]  # fmt: skip
    # in the order of time, because one task asked
    others = [(each["seat"], each["asked"]["content"], each["message"]["content"]) for each in record["seat_replies"]]
    assert others == [("user", "a", "frozen"), ("loud", "a", "A"), ("late", "a", "later")]


def test_two_seats_with_the_same_history_have_contexts_of_their_own() -> None:
    async def play(chat: Chat, state: Any) -> dict[str, float]:
        _, second = await asyncio.gather(*(chat.reply(YOU, seat=seat, max_new_tokens=7) for seat in ("a", "b")))
        await chat.reply([*YOU, second.message, user("more")], seat="b", max_new_tokens=7)
        return {"a": 1.0, "b": 2.0}

    (row,) = converse(language_model(max_new_tokens=8), play, seats=[Seat(name="a"), Seat(name="b")])
    assert len(row.segments) == 2
    assert sorted((turn.seat, turn.reward) for turn in row.turns) == [("a", 1.0), ("b", 0.0), ("b", 2.0)]


def test_a_seat_is_the_model_of_a_request_over_http_and_a_frozen_judge_gives_the_reward() -> None:
    """In both of OpenAI's APIs. A response of any seat goes on from the previous one by its id."""

    def use(client: OpenAI) -> dict[str, float]:
        assert [model.id for model in client.models.list()] == ["policy", "agent", "loud", "judge"]
        said = {}
        for name in ("agent", "loud", "policy"):
            answer = client.chat.completions.create(model=name, messages=[{"role": "user", "content": "you"}])
            said[name] = answer.choices[0].message.content
        assert said == {"agent": "a", "loud": "YOU", "policy": "b"}
        for name, texts in (("loud", ["ME", "MORE"]), ("judge", ["0.25", "0.75"])):
            first = client.responses.create(model=name, input="me")
            second = client.responses.create(model=name, previous_response_id=first.id, input="more")
            assert [first.output_text, second.output_text] == texts
        return {"agent": float(second.output_text)}

    judge = Scripted(lambda text: "0.75" if "assistant\n0.25<|im_end|>" in text else "0.25", max_new_tokens=20).policy
    model, seats = says("a", "b"), [Seat("agent"), Seat("loud", upper), Seat("judge", judge)]
    with ChatEndpoint(model) as served:
        (row,) = converse(model, served.runs(with_client(use)), seats=seats)
    assert sorted((turn.seat or "", turn.reward) for turn in row.turns) == [("", 0.0), ("agent", 0.75)]
    # requests over HTTP count as several tasks, so the order is that of what they read
    assert [(each.seat, each.asked["content"], each.message["content"]) for each in row.seat_replies] == [
        ("judge", "me", "0.25"), ("loud", "me", "ME"), ("loud", "you", "YOU"),
        ("judge", "more", "0.75"), ("loud", "more", "MORE"),
    ]  # fmt: skip


def test_a_frozen_model_of_another_kind_samples_with_its_own_settings_and_template() -> None:
    async def play(chat: Chat, state: Any) -> float:
        said = await chat.reply(YOU, seat="other")
        assert said.num_tokens == 3
        await chat.reply(YOU, max_new_tokens=2)
        again = await chat.reply(YOU, seat="other", max_new_tokens=2)
        assert (again.num_tokens, again.is_truncated, again.ends_context) == (2, True, False)
        assert again.id != said.id
        return 1.0

    other = language_model("llama", max_new_tokens=3, end_scale=0.0)
    model, seats = language_model(max_new_tokens=5), [Seat(name="other", policy=other)]
    (row,) = converse(model, play, seats=seats, max_turns=1)
    assert len(row.turns) == 1  # only the trained policy's messages count


def test_a_function_that_hangs_ends_its_conversation_and_keeps_its_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adapters.agents.rollouts.GRACE_SECONDS", 0.05)
    release, clocks = threading.Event(), ConversationClocks(monkeypatch)

    async def play(chat: Chat, state: Any) -> float:
        await chat.reply(YOU, seat="hangs")
        return 1.0

    def hangs(messages: Any) -> str:
        clocks.move()
        return "late" if release.wait(60) else ""

    agent = AgentPolicy(says("a"), play, seats=[Seat(name="hangs", policy=hangs)], timeout=0.3)
    sampled = agent.sample_actions(["you"], 1)
    release.set()
    ((row,),) = sampled.actions
    assert (row.ended_by, row.info["error"]) == ("timeout", "no answer within 0.3 s")
    assert sampled.metrics["agents/abandoned"] == 1


def test_what_is_wrong_with_seats_is_named(subtests: pytest.Subtests) -> None:
    async def play(chat: Chat, seat: str) -> float:
        await chat.reply(YOU, seat=seat)
        return 1.0

    model = says()
    mute, older = Seat(name="user", policy=lambda messages: None), Seat(name="older", policy=model)
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: Seat(name=""), ConfigError, "Seat: name must be a text"),
        (lambda: Seat(name="turn-1"), ConfigError, "Seat: name must be a text that does not begin like the id"),
        (lambda: Seat(name="a", policy="gpt"), ConfigError, "Seat 'a': policy must be a language model"),
        (lambda: AgentPolicy(model, play, seats=[mute] * 2), ConfigError, "must be a list of Seat with a name each"),
        (lambda: AgentPolicy(model, play, seats=["user"]), ConfigError, "seats must be a list of Seat"),
        (lambda: AgentPolicy(model, play, seats=[older]), ConfigError, "must be another one than the trained model"),
        (lambda: AgentPolicy(model, Echo, seats=[mute]), ConfigError, "seats need an agent program"),
        (lambda: converse(says("a"), play, "u", seats=[mute]), ContractError, "seat must be one of ['user']; got 'u'"),
        (lambda: converse(says("a"), play, "user", seats=[mute]), ContractError, "must return a text or a message"),
    ]
    for make, error, message in cases:
        with subtests.test(message), pytest.raises(error, match=re.escape(message)):
            make()


def seated(*turns: tuple[str, int]) -> Conversation:
    """Turns by seat and number of tokens."""
    count = sum(length for _, length in turns)
    segment = Segment(token_ids=(1,) * (count + 1), sampled=(False, *[True] * count), log_probs=(0.0,) * count)
    taken = tuple(Turn(num_tokens=length, reward=0.0, seat=seat) for seat, length in turns)
    return conversation(segments=(segment,), turns=taken)


def test_each_seat_is_compared_with_itself() -> None:
    """Worked by hand. Group 0: A has 1, 3 and 2 (mean 2), B has 5 and 1 (mean 3). Group 1: A has 7 alone."""
    rows = [seated(("A", 2), ("B", 1)), seated(("B", 1), ("A", 1)), seated(("A", 1)), seated(("A", 1))]
    rewards = torch.tensor([[0.0, 1, 5], [1, 3, 0], [2, 0, 0], [7, 0, 0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 0, 0]], dtype=torch.bool)
    groups = torch.tensor([4, 4, 4, 9])

    def found(rewards: torch.Tensor, order: list[int]) -> torch.Tensor:
        given = {"rewards": rewards[order], "group_ids": groups[order], "mask": mask[order]}
        return seat_advantages(ExperienceBatch(states=["s"] * 4, actions=[rows[i] for i in order], **given))

    expected = [[-1.0, -1, 2], [-2, 1, 0], [0, 0, 0], [0, 0, 0]]
    for order in ([0, 1, 2, 3], [2, 0, 3, 1]):
        assert found(rewards, order).tolist() == [expected[i] for i in order]
    with pytest.raises(ContractError, match="seat_advantages needs conversations with rewards per step"):
        found(rewards.sum(1), order)
