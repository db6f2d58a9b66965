"""Seats: the trained policy in several roles, frozen models and functions, and rewards by seat."""

import asyncio
import re
import threading
from typing import Any

import pytest
import torch

from adapters.agents import (
    AgentPolicy,
    Chat,
    ChatEndpoint,
    Conversation,
    EnvironmentReward,
    Message,
    Seat,
    Segment,
    Turn,
    seat_advantages,
)
from grpo import ExperienceBatch, GRPOConfig, GRPOTrainer
from grpo.errors import ConfigError, ContractError
from tests.support.agents import Echo, Scripted, language_model
from tests.unit.adapters.agents.test_endpoint import raw

YOU: list[Message] = [{"role": "user", "content": "you"}]


def says(*turns: str) -> Any:
    return Scripted(turns, max_new_tokens=20).policy


def one(policy: Any, play: Any, seats: list[Seat], **options: Any) -> Conversation:
    ((row,),) = AgentPolicy(policy, play, seats=seats, **options).generate_actions(["you"], 1)
    return row


def upper(messages: list[Message]) -> str:
    return messages[-1]["content"].upper()


async def later(messages: list[Message]) -> Message:
    await asyncio.sleep(0.01)
    return {"role": "assistant", "content": "later"}


def test_seats_speak_and_what_is_not_trained_is_context() -> None:
    seen = []

    async def play(chat: Chat, state: Any) -> dict[str, float]:
        asked = (await chat.reply(YOU, seat="agent")).message
        answers = [await chat.reply([*YOU, asked], seat=seat) for seat in ("user", "loud", "late")]
        assert len({answer.id for answer in answers}) == 3
        seen.extend(answer.message["content"] for answer in answers)
        await chat.reply([*YOU, asked, {"role": "user", "content": answers[0].message["content"]}], seat="agent")
        await chat.reply(YOU, seat="critic")
        return {"agent": 2.0, "critic": 3.0, "user": 9.0}

    frozen = says("frozen")
    before = {name: value.clone() for name, value in frozen.get_parameters().items()}
    seats = [Seat(name="agent"), Seat(name="critic"), Seat(name="user", policy=frozen), Seat(name="loud", policy=upper),
             Seat(name="late", policy=later), Seat(name="silent")]  # fmt: skip
    agent = AgentPolicy(says("a", "b", "c"), play, seats=seats)
    sampled = agent.sample_actions(["you"], 1)
    ((row,),) = sampled.actions
    assert seen == ["frozen", "A", "later"]
    assert [(turn.seat, turn.message["content"], turn.reward) for turn in row.turns] == [
        ("agent", "a", 0.0),
        ("agent", "b", 2.0),
        ("critic", "c", 3.0),
    ]  # the rewards of seats that are not trained are left out
    assert [[message["content"] for message in said] for said, _ in row.contexts] == [
        ["you", "a", "frozen", "b"],
        ["you", "c"],
    ]
    turns = {
        name.removeprefix("agents/turns_of/"): count for name, count in sampled.metrics.items() if "turns_of" in name
    }
    assert turns == {"agent": 2, "critic": 1, "user": 1, "loud": 1, "late": 1}
    assert all(torch.equal(before[name], value) for name, value in frozen.get_parameters().items())
    assert Conversation.from_state(row.to_state()) == row


def test_two_seats_with_the_same_history_have_contexts_of_their_own() -> None:
    async def play(chat: Chat, state: Any) -> dict[str, float]:
        _, second = await asyncio.gather(*(chat.reply(YOU, seat=seat, max_new_tokens=7) for seat in ("a", "b")))
        more = [*YOU, second.message, {"role": "user", "content": "more"}]
        await chat.reply(more, seat="b", max_new_tokens=7)
        return {"a": 1.0, "b": 2.0}

    model = language_model(max_new_tokens=8)
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        row = one(model, play, [Seat(name="a"), Seat(name="b")])
        found.append([(turn.seat, turn.reward) for turn in row.turns])
        assert len(row.segments) == 2
    assert found[0] == found[1]
    assert sorted(found[0]) == [("a", 1.0), ("b", 0.0), ("b", 2.0)]


def test_a_seat_is_the_model_of_a_request_over_http() -> None:
    def program(base_url: str, state: Any) -> dict[str, float]:
        said = {}
        for name in ("agent", "loud", "policy"):
            status, body = raw(base_url, body={"model": name, "messages": YOU})
            assert status == 200
            said[name] = body["choices"][0]["message"]["content"]
        assert said == {"agent": "a", "loud": "YOU", "policy": "b"}
        return {"agent": 1.0}

    model = says("a", "b")
    with ChatEndpoint(model) as served:
        row = one(model, served.runs(program), [Seat(name="agent"), Seat(name="loud", policy=upper)])
    assert sorted((turn.seat or "", turn.reward) for turn in row.turns) == [("", 0.0), ("agent", 1.0)]


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
    row = one(language_model(max_new_tokens=5), play, [Seat(name="other", policy=other)], max_turns=1)
    assert len(row.turns) == 1  # only the trained policy's messages count


def test_functions_of_seats_do_not_hold_up_other_conversations() -> None:
    all_speak = threading.Barrier(8, timeout=20)

    def slow(messages: list[Message]) -> str:
        all_speak.wait()
        return "slow"

    async def play(chat: Chat, state: Any) -> float:
        await chat.reply(YOU, seat="slow")
        await chat(YOU)
        return 1.0

    rows = AgentPolicy(says(*"a" * 8), play, seats=[Seat(name="slow", policy=slow)]).generate_actions(["you"], 8)
    assert [row.reward for row in rows[0]] == [1.0] * 8


def test_a_function_that_hangs_ends_its_conversation() -> None:
    release = threading.Event()

    async def play(chat: Chat, state: Any) -> float:
        await chat.reply(YOU, seat="hangs")
        return 1.0

    seats = [Seat(name="hangs", policy=lambda messages: "late" if release.wait(20) else "")]
    row = one(says("a"), play, seats, timeout=0.3)
    release.set()
    assert (row.ended_by, row.info["error"]) == ("timeout", "no answer within 0.3 s")


def test_what_is_wrong_with_seats_is_named(subtests: pytest.Subtests) -> None:
    async def play(chat: Chat, state: Any) -> float:
        await chat.reply(YOU, seat="ueser")
        return 1.0

    async def asks_a_function(chat: Chat, state: Any) -> float:
        await chat.reply(YOU, seat="user")
        return 1.0

    def trained_in_a_seat() -> AgentPolicy:
        model = says()
        return AgentPolicy(model, play, seats=[Seat(name="older", policy=model)])

    user = Seat(name="user", policy=lambda messages: None)
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: Seat(name=""), ConfigError, "Seat: name must be a text"),
        (lambda: Seat(name="turn-1"), ConfigError, "Seat: name must be a text that does not begin like the id"),
        (lambda: Seat(name="a", policy="gpt"), ConfigError, "Seat 'a': policy must be a language model"),
        (
            lambda: AgentPolicy(says(), play, seats=[user, user]),
            ConfigError,
            "seats must be a list of Seat with a name each",
        ),
        (lambda: AgentPolicy(says(), play, seats=["user"]), ConfigError, "seats must be a list of Seat"),
        (
            lambda: trained_in_a_seat(),
            ConfigError,
            "must be another one than the trained model, which is not frozen; got",
        ),
        (lambda: AgentPolicy(says(), Echo, seats=[user]), ConfigError, "seats need an agent program"),
        (lambda: one(says("a"), play, [user]), ContractError, "seat must be one of ['user']; got 'ueser'"),
        (lambda: one(says("a"), asks_a_function, [user]), ContractError, "must return a text or a message"),
    ]
    for make, error, message in cases:
        with subtests.test(message), pytest.raises(error, match=re.escape(message)):
            make()


def conversation(*turns: tuple[str, int]) -> Conversation:
    """Turns by seat and number of tokens."""
    count = sum(length for _, length in turns)
    segment = Segment(token_ids=(1,) * (count + 1), sampled=(False, *[True] * count), log_probs=(0.0,) * count)
    return Conversation(
        segments=(segment,),
        turns=tuple(Turn(num_tokens=length, reward=0.0, seat=seat) for seat, length in turns),
        messages=(),
        ended_by="environment",
        info={},
    )


def test_each_seat_is_compared_with_itself() -> None:
    """Worked by hand. Group 0: A has 1, 3 and 2 (mean 2), B has 5 and 1 (mean 3). Group 1: A has 7 alone."""
    rows = [
        conversation(("A", 2), ("B", 1)),
        conversation(("B", 1), ("A", 1)),
        conversation(("A", 1)),
        conversation(("A", 1)),
    ]
    rewards = torch.tensor([[0.0, 1, 5], [1, 3, 0], [2, 0, 0], [7, 0, 0]])
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 0, 0]], dtype=torch.bool)
    batch = ExperienceBatch(
        states=["s"] * 4, actions=rows, rewards=rewards, group_ids=torch.tensor([4, 4, 4, 9]), mask=mask
    )
    expected = [[-1.0, -1, 2], [-2, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert seat_advantages(batch).tolist() == expected
    order = torch.tensor([2, 0, 3, 1])
    shuffled = ExperienceBatch(
        states=["s"] * 4,
        actions=[rows[i] for i in order],
        rewards=rewards[order],
        group_ids=batch.group_ids[order],
        mask=mask[order],
    )
    assert seat_advantages(shuffled).tolist() == [expected[i] for i in order]
    per_row = ExperienceBatch(
        states=["s"] * 4, actions=rows, rewards=rewards.sum(1), group_ids=batch.group_ids, mask=mask
    )
    with pytest.raises(ContractError, match="seat_advantages needs conversations with rewards per step"):
        seat_advantages(per_row)


def test_the_core_trains_seats_with_rewards_of_their_own() -> None:
    """One seat is rewarded for long messages and the other for short ones: each learns its own."""

    async def play(chat: Chat, state: Any) -> dict[str, float]:
        long, short = await asyncio.gather(
            chat.reply([{"role": "user", "content": "long"}], seat="long", max_new_tokens=7),
            chat.reply([{"role": "user", "content": "short"}], seat="short", max_new_tokens=7),
        )
        return {"long": float(long.num_tokens), "short": -float(short.num_tokens)}

    torch.manual_seed(0)
    agent = AgentPolicy(language_model(max_new_tokens=8), play, seats=[Seat(name="long"), Seat(name="short")])
    config = GRPOConfig(group_size=16, learning_rate=3e-3, seed=0)
    trainer = GRPOTrainer(
        config=config, policy=agent, reward_model=EnvironmentReward(per_turn=True), advantages=seat_advantages
    )

    def lengths() -> dict[str, float]:
        rows = agent.generate_actions(["you"], 64)[0]
        spoken = [turn for row in rows for turn in row.turns]
        return {seat: sum(turn.num_tokens for turn in spoken if turn.seat == seat) / 64 for seat in ("long", "short")}

    for _ in range(12):
        trainer.step(["you"])
    found = lengths()
    assert found["long"] > found["short"] + 2
