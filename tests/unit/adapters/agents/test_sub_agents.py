"""Several agents in one conversation: their requests come in any order, and nothing depends on it."""

import asyncio
import json
import random
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
from openai import OpenAI

from adapters.agents import AgentPolicy, Chat, ChatEndpoint, ConversationEnded, Seat, save_transcripts, transcript_page
from adapters.llm import RowLimit, SamplingConfig
from grpo import GRPOConfig, GRPOTrainer
from grpo.errors import ContractError
from grpo.judges import ListwiseJudge, RubricJudge
from tests.support.agent_parts import before_each_batch, rows_of, sizes_of_batches, user
from tests.support.agents import Scripted, converse, language_model, wait_for
from tests.unit.adapters.agents.test_chat import says
from tests.unit.adapters.agents.test_endpoint import client_of, raw, reply
from tests.unit.adapters.agents.test_responses import final

NAMES = ("you", "they", "we", "she")


def in_tasks(jitter: Callable[[], float]) -> Any:
    """Four sub-agents with two turns each. The reward of a turn is its own: by who spoke, and what was said."""

    async def play(chat: Chat, state: Any) -> dict[str, float]:
        rewards = {}

        async def talk(place: int, name: str) -> None:
            messages = [user(name)]
            for turn in range(2):
                await asyncio.sleep(jitter())
                reply = await chat.reply(messages, max_new_tokens=5)
                rewards[reply.id] = 100.0 * place + 10.0 * turn + len(reply.message["content"])
                messages = [*messages, reply.message, user("more")]

        await asyncio.gather(*(talk(place, name) for place, name in enumerate(NAMES)))
        return rewards

    return play


def over_http(jitter: Callable[[], float]) -> Any:
    """The same over HTTP, in four threads."""

    def program(base_url: str, state: Any) -> dict[str, float]:
        rewards = {}

        def talk(place: int, name: str) -> None:
            messages: list[Any] = [user(name)]
            for turn in range(2):
                time.sleep(jitter())
                status, body = raw(base_url, body={"model": "m", "messages": messages, "max_tokens": 5})
                assert status == 200
                said = body["choices"][0]["message"]
                rewards[body["id"]] = 100.0 * place + 10.0 * turn + len(said["content"] or "")
                messages += [said, user("more")]

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(talk, range(4), NAMES))
        return rewards

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
@pytest.mark.parametrize("is_http", [False, True], ids=["tasks", "http"])
def test_rewards_reach_their_own_turns_and_one_seed_has_one_result_at_any_timing(is_http: bool, num_runs: int) -> None:
    draw = random.Random(0)
    model = language_model(sampling=SamplingConfig(max_new_tokens=6, min_new_tokens=2))
    found = []
    for run in range(num_runs):
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


@pytest.mark.parametrize("delays", [(0.0, 0.3), (0.3, 0.0)])
def test_a_list_of_clients_whose_requests_do_not_overlap_is_refused(delays: tuple[float, float]) -> None:
    """The order of arrival is not who asks. A list is taken from clients of which each continues the one before."""

    def program(base_url: str, state: Any) -> list[float]:
        def ask(place: int, messages: list[Any]) -> Any:
            time.sleep(delays[place])
            return raw(base_url, body={"model": "m", "messages": messages})[1]["choices"][0]["message"]

        if state == "apart":
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(ask, range(2), ([user(name)] for name in NAMES[:2])))
        else:
            ask(1, [user("you"), ask(0, [user("you")]), user("more")])
        return [1.0, 2.0]

    model = Scripted(("a", "b", "c", "d")).policy
    with ChatEndpoint(model) as endpoint:
        agent = AgentPolicy(model, endpoint.runs(program))
        assert agent.generate_actions(["in turn"], 1)[0][0].rewards == (1.0, 2.0)
        with pytest.raises(ContractError, match="must return rewards by message, because these"):
            agent.generate_actions(["apart"], 1)


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


def test_a_truncated_agent_ends_alone() -> None:
    async def play(chat: Chat, state: Any) -> dict[str, float]:
        async def talk(name: str) -> float:
            said = await chat.reply([user(name)])
            if said.ends_context:
                with pytest.raises(ConversationEnded, match="'length'"):
                    await chat.reply([user(name), said.message, user("more")])
                return {said.id: -1.0}
            again = await chat.reply([user(name), said.message, user("more")])
            return {said.id: 0.0, again.id: 1.0}

        first, second = await asyncio.gather(talk("you"), talk("they"))
        return first | second

    (row,) = converse(Scripted(("abcdefghij", "b", "c"), max_new_tokens=6).policy, play)
    assert sorted(row.rewards) == [-1.0, 0.0, 1.0]
    assert [turn.is_truncated for turn in row.turns].count(True) == 1
    assert row.ended_by == "environment"


def chats(client: OpenAI, name: str, *, streams: bool) -> tuple[str, str | None, list[Any]]:
    """What an agent says, why its message ended, and the history."""
    said, reason, _ = reply(client, streams=streams, model="m", messages=[user(name)])
    return said["content"], reason, [user(name), {"role": "assistant", "content": said["content"]}]


def responds(client: OpenAI, name: str, *, streams: bool) -> tuple[str, str | None, list[Any]]:
    """The same over the responses API."""
    response = final(client, streams=streams, input=name)
    details = response.incomplete_details
    assert details is None or details.reason == "max_output_tokens"
    reason = {"incomplete": "length", "completed": "stop"}[response.status]
    return response.output_text, reason, [user(name), {"role": "assistant", "content": response.output_text}]


@pytest.mark.parametrize(
    ("ask", "streams", "fails"),
    [(chats, False, False), (chats, True, True), (responds, False, True), (responds, True, False)],
)
def test_over_http_a_truncated_agent_gets_its_message_with_the_reason_and_the_others_go_on(
    ask: Any, streams: bool, fails: bool
) -> None:
    """Two clients at the same time, one of which reaches the policy's own maximum. A program that fails after a limit has the
    reward 0."""

    def program(base_url: str, state: Any) -> float:
        both_have_said = threading.Barrier(2, timeout=20)

        def talk(name: str) -> tuple[str, str | None]:
            with client_of(base_url) as client:
                text, reason, history = ask(client, name, streams=streams)
                both_have_said.wait()
                more: Any = {"model": "m", "messages": [*history, user("more")]}
                if reason == "stop":
                    assert client.chat.completions.create(**more).choices[0].message.content == "d"
                    return text, reason
                with pytest.raises(openai.APIStatusError, match="The conversation ended by 'length'"):
                    client.chat.completions.create(**more)
                return text, reason

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


def test_transcripts_reward_functions_and_judges_see_every_context(tmp_path: Path) -> None:
    async def play(chat: Chat, state: Any) -> dict[str, float]:
        said = await asyncio.gather(*(chat.reply([user(name)]) for name in NAMES[:2]))
        more = [user(NAMES[0]), said[0].message, user("more")]
        return {said[0].id: 1.0, said[1].id: 2.0, (await chat.reply(more)).id: 3.0}

    (row,) = converse(Scripted(("a", "b", "c")).policy, play)
    texts = [[message["content"] for message in said] for said, _ in row.contexts]
    assert texts == [["they", texts[0][1]], ["you", texts[1][1], "more", "c"]]
    assert [rewards for _, rewards in row.contexts] == [(2.0,), (1.0, 3.0)]
    assert {texts[0][1], texts[1][1]} == {"a", "b"}
    assert str(row).splitlines() == [
        "Context 1 of 2", f"assistant: {texts[0][1]}", "Context 2 of 2", f"assistant: {texts[1][1]}", "user: more",
        "assistant: c", "(environment)",
    ]  # fmt: skip
    judged = []

    def judge(states: Any, actions: Any) -> list[float]:
        judged.extend([[message["content"] for message in said] for said, _ in row.contexts] for row in actions)
        return [1.0] * len(actions)

    reward_models: list[tuple[Any, list[float]]] = [
        (judge, [1.0, 1.0]),
        (RubricJudge(lambda state, row: {"kind": judge([state], [row])[0]}, {"kind": 2.0}), [1.0, 1.0]),
        (ListwiseJudge(lambda state, rows: (judge([state], rows), [1, 0])[1]), [0.0, 1.0]),
    ]
    for reward_model, rewards in reward_models:
        judged.clear()
        agent = AgentPolicy(Scripted(lambda text: "c" if "more" in text else "a").policy, play)
        trainer = GRPOTrainer(config=GRPOConfig(group_size=2), policy=agent, reward_model=reward_model)
        assert trainer.collect(["you"]).rewards.tolist() == rewards
        assert judged == [[["they", "a"], ["you", "a", "more", "c"]]] * 2
    save_transcripts(tmp_path / "said.jsonl", [row])
    (record,) = map(json.loads, (tmp_path / "said.jsonl").read_text().splitlines())
    assert [[message["content"] for message in context["messages"]] for context in record["contexts"]] == texts
    assert [context["rewards"] for context in record["contexts"]] == [[2.0], [1.0, 3.0]]
    page = transcript_page([row])
    shown = ("Context 1 of 2", "they", "reward 2", "Context 2 of 2", "reward 1", "reward 3")
    places = [page.index(text) for text in shown]
    assert places == sorted(places)


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


def test_over_http_a_request_too_many_is_refused_and_the_others_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adapters.agents.chat.MOST_WAITING", 1)
    model, waits, goes_on = says("a", "b"), threading.Event(), threading.Event()
    before_each_batch(model, lambda prompts: (waits.set(), goes_on.wait(20)))

    def program(base_url: str, state: Any) -> float:
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(raw, base_url)
            assert waits.wait(20)
            status, answer = raw(base_url)
            goes_on.set()
            assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
            assert "at most 1 requests may wait at the same time" in answer["error"]["message"]
            return float(first.result()[0] == raw(base_url)[0] == 200)

    with ChatEndpoint(model) as endpoint:
        (row,) = converse(model, endpoint.runs(program))
    assert (row.reward, len(row.turns)) == (1.0, 2)


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
