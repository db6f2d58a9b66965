"""Seats: the trained policy in several roles, frozen models and functions, and rewards by seat."""

import asyncio
import copy
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import OpenAI

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
from adapters.agents.transcripts import save_transcripts, transcript_page
from grpo import ExperienceBatch, GRPOConfig, GRPOTrainer
from grpo.errors import ConfigError, ContractError
from tests.support.agent_parts import conversation, user
from tests.support.agents import Echo, Scripted, converse, language_model
from tests.support.clocks import ConversationClocks
from tests.unit.adapters.agents.test_chat import says
from tests.unit.adapters.agents.test_conversations import text_and_sampled
from tests.unit.adapters.agents.test_endpoint import raw, with_client

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
    texts = [[message["content"] for message in said] for said, _ in row.contexts]
    assert texts == [["you", "a", "frozen", "b"], ["you", "c"]]
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
    said = re.findall(r'<span class="role">(.*?)</span>(\w+)', transcript_page([row]))
    assert said == [
        ("user", "you"), ("assistant (agent), reward 0", "a"), ("user", "frozen"), ("assistant (agent), reward 2", "b"),
        ("user", "you"), ("assistant (critic), reward 3", "c"),
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

    model = language_model(max_new_tokens=8)
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        (row,) = converse(model, play, seats=[Seat(name="a"), Seat(name="b")])
        found.append([(turn.seat, turn.reward) for turn in row.turns])
        assert len(row.segments) == 2
    assert found[0] == found[1]
    assert sorted(found[0]) == [("a", 1.0), ("b", 0.0), ("b", 2.0)]


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


def test_training_moves_the_policy_and_not_an_older_self_that_plays_over_http() -> None:
    def program(base_url: str, state: Any) -> dict[str, float]:
        def ask(seat: str, messages: list[Any]) -> str:
            return raw(base_url, body={"model": seat, "messages": messages})[1]["choices"][0]["message"]["content"]

        said = ask("older", [user("you")])
        return {"agent": float(len(ask("agent", [user(said + state)])))}

    model = language_model(max_new_tokens=8)
    older = copy.deepcopy(model)
    before = {name: value.clone() for name, value in older.get_parameters().items()}
    with ChatEndpoint(model) as served:
        policy = AgentPolicy(model, served.runs(program), seats=[Seat("agent"), Seat("older", older)])
        reward, config = EnvironmentReward(per_turn=True), GRPOConfig(group_size=8, seed=0, learning_rate=0.01)
        trainer = GRPOTrainer(config=config, policy=policy, reward_model=reward, advantages=seat_advantages)
        metrics = trainer.step(["me"])
    assert (metrics["agents/turns_of/agent"], metrics["agents/turns_of/older"]) == (8, 8)
    assert all(torch.equal(before[name], value) for name, value in older.get_parameters().items())
    assert not all(torch.equal(before[name], value) for name, value in model.get_parameters().items())


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


def test_a_function_that_hangs_ends_its_conversation_and_keeps_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("adapters.agents.rollouts.GRACE_SECONDS", 0.05)
    release, states, num_calls, clocks = threading.Event(), ["you"], [], ConversationClocks(monkeypatch)

    async def play(chat: Chat, state: Any) -> float:
        await chat.reply(YOU, seat="hangs")
        return 1.0

    def hangs(messages: Any) -> str:
        num_calls.append(1)
        clocks.move()
        return "late" if release.wait(60) else ""

    agent = AgentPolicy(says("a"), play, seats=[Seat(name="hangs", policy=hangs)], timeout=0.3)
    for error, num_abandoned in (
        ("no answer within 0.3 s", 1),
        ("an earlier environment of this state still hangs", 0),
    ):
        sampled = agent.sample_actions(states, 1)
        ((row,),) = sampled.actions
        assert (row.ended_by, row.info["error"]) == ("timeout", error)
        assert sampled.metrics["agents/abandoned"] == num_abandoned
    assert len(num_calls) == 1
    release.set()


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
