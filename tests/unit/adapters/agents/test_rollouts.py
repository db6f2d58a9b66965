"""How conversations end, and what slow, failing and hanging environments cost."""

import asyncio
import contextlib
import gc
import inspect
import logging
import math
import queue
import re
import threading
import time
from ast import literal_eval
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args
from unittest.mock import Mock

import pytest
import torch

from adapters.agents import AgentPolicy, Chat, ConversationEnded, EnvironmentReward, Seat, rollouts
from adapters.agents.chat import MOST_WAITING
from adapters.agents.conversations import EndedBy
from adapters.agents.templates import ChatTemplate
from adapters.llm import SamplingConfig
from grpo import GRPOConfig, GRPOTrainer, WeightedRewards
from grpo.errors import ConfigError, ContractError, DeadlineError, RewardError
from tests.support.agent_parts import before_each_batch, changed, fails, rows_of, user
from tests.support.agents import (
    Echo,
    Scripted,
    Tools,
    chat_tokenizer,
    converse,
    language_model,
    lookup,
    says_call,
    wait_for,
)
from tests.support.clocks import ConversationClocks, skipping_clock


def says(*turns: str, **options: Any) -> Any:
    return Scripted(turns, **{"max_new_tokens": 8} | options).policy


class Counting(Echo):
    """Counts how often it is closed."""

    num_closed = 0

    def close(self) -> None:
        type(self).num_closed += 1


def one_with(method: str, does: Callable[..., Any]) -> type[Counting]:
    """An environment in which one method does something else."""
    return changed(Counting, **{method: lambda self, *args, **kwargs: does()}, num_closed=0)


ROOM = len(chat_tokenizer().encode("<|im_start|>user\nHello you<|im_end|>\n<|im_start|>assistant\n")) + 8
LONG = "z" * 8
"""A message that reaches `max_new_tokens`."""
HEARD = ["Hello you", "a", "I heard 1", "b", "I heard 2", "c", "I heard 3"]


def asking(*texts: str, catches: bool = True, then: Callable[[], Any] = lambda: 7.0) -> Any:
    """A program that asks about texts, each in a context of its own, and returns 7."""

    async def play(chat: Chat, state: Any) -> Any:
        for text in texts:
            with contextlib.suppress(ConversationEnded) if catches else contextlib.nullcontext():
                await chat([user(text)])
        found = then()
        return await found if inspect.isawaitable(found) else found

    return play


def hours_pass(skip: Callable[[float], None], is_over: Callable[[], bool]) -> None:
    """Let time pass until something holds, at most for a minute.

    In steps, because a limit may begin after the model was asked, and the last step may come after `is_over` holds: alone it
    must not exceed the next limit of 60 seconds.
    """
    for _ in range(1200):
        if is_over():
            return
        skip(40.0)
        time.sleep(0.05)


def late_after_one(skip: Callable[[float], None], text: str) -> str:
    """What a model says that is late with its second message to an `Echo`."""
    num_closed = len(Echo.closed)
    if "I heard" in text:
        hours_pass(skip, lambda: len(Echo.closed) > num_closed)
    return "a"


async def hangs() -> None:
    """Hang for an hour, by the `ConversationClocks` of a test."""
    rollouts._LoopClock().move()  # type: ignore[attr-defined]
    await asyncio.sleep(60)


ENDS: list[tuple[EndedBy, Any, Any, dict[str, Any], list[str], list[float]]] = [
    ("environment", Echo, ["a", "b", "c"], {}, HEARD, [1.0, 2.0, 3.0]),
    ("environment", Echo, ["a", "b", "c"], {"max_turns": 3}, HEARD, [1.0, 2.0, 3.0]),  # exactly at the limit
    ("environment", asking("x"), ["a"], {"max_turns": 1}, ["x", "a"], [7.0]),
    ("environment", asking("x", "y"), [LONG, "a"], {}, ["y", "a"], [0.0, 7.0]),  # the limit was not the last message's
    ("max_turns", Echo, ["a", "b"], {"max_turns": 2}, HEARD[:5], [1.0, 2.0]),
    ("max_turns", asking("x", "y"), ["a"], {"max_turns": 1}, ["x", "a"], [7.0]),
    ("max_turns", asking("x", "y", catches=False), ["a"], {"max_turns": 1}, ["x", "a"], [0.0]),
    ("length", Echo, ["a", LONG], {}, [*HEARD[:3], LONG], [1.0, 0.0]),
    ("length", Echo, ["a"], {"max_tokens": ROOM}, HEARD[:3], [1.0]),  # no room for a second turn
    ("length", Echo, [], {"max_tokens": ROOM - 1}, HEARD[:1], []),  # no room for the first
    ("length", asking("x", "y"), ["a", LONG], {}, ["y", LONG], [0.0, 7.0]),
    ("length", asking("x", "y", catches=False), [LONG], {}, ["x", LONG], [0.0]),
    ("length", asking("x", "y" * ROOM), ["a"], {"max_tokens": ROOM}, ["x", "a"], [7.0]),
    ("timeout", one_with("step", hangs), ["a"], {"timeout": 0.3}, HEARD[:2], [math.nan]),
    ("timeout", asking("x", then=hangs), ["a"], {"timeout": 0.3}, ["x", "a"], [math.nan]),
    ("timeout", Echo, late_after_one, {"turn_timeout": 60.0}, HEARD[:2], [math.nan]),
    ("error", one_with("step", fails), ["a"], {}, HEARD[:2], [math.nan]),
    ("error", asking("x", "y", then=fails), ["a"], {"max_turns": 1}, ["x", "a"], [math.nan]),
]
"""How a conversation ends, with what, what the model says, options, all messages, and the rewards."""


def lines_of(heading: str) -> list[list[str]]:
    """The cells of a table of the page, without code marks. Its header begins with a heading."""
    page = (Path(__file__).parents[4] / "docs/agents.md").read_text(encoding="utf-8")
    (table,) = re.findall(rf"^\| {heading} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", page, re.MULTILINE)
    return [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_the_limits_of_the_page_have_their_defaults() -> None:
    given = {name: each.default for name, each in inspect.signature(AgentPolicy).parameters.items()}
    names = ["max_turns", "max_tokens", "timeout", "turn_timeout", "num_retries", "concurrency"]
    others = {"sampling.max_new_tokens": SamplingConfig().max_new_tokens, "requests that wait": MOST_WAITING}
    told = {name: literal_eval(default) for name, default, _ in lines_of("limit")}
    assert told == {name: given[name] for name in names} | others


def test_every_way_to_end_is_a_line_of_the_page(subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the other side said last stays in the transcript. A truncated message is not answered."""
    ConversationClocks(monkeypatch)
    skip = skipping_clock(monkeypatch)
    lines = [name for name, *_ in lines_of("`ended_by`")]
    assert lines == list(get_args(EndedBy)) == list(dict.fromkeys(ended_by for ended_by, *_ in ENDS))
    for ended_by, make, turns, options, messages, rewards in ENDS:
        with subtests.test(ended_by=ended_by, turns=turns, **options):
            turns = partial(turns, skip) if turns is late_after_one else turns
            policy = Scripted(turns, max_new_tokens=8).policy
            sampled = AgentPolicy(policy, make, **options).sample_actions(["you"], 1)
            (row,) = sampled.actions[0]
            assert row.ended_by == ended_by
            assert list(row.rewards) == pytest.approx(rewards, nan_ok=True)
            assert [message["content"] for message in row.messages] == messages
            has_reward = bool(rewards) and ended_by not in ("timeout", "error")
            assert math.isfinite(row.reward) == has_reward  # nor is there one without a turn
            counts = {name: n for name, n in sampled.metrics.items() if name.startswith("agents/ended_by")}
            assert [name for name, count in counts.items() if count] == [f"agents/ended_by_{ended_by}"]
            assert sampled.metrics["agents/abandoned"] == 0  # what awaits is cancelled in time
    ((row,),) = AgentPolicy(says(says_call(), max_new_tokens=90), Tools, max_turns=1).generate_actions(["you"], 1)
    assert row.messages[-1]["content"] == "weather is fine"


async def says_nothing(chat: Chat, state: Any) -> float:
    return 1.0


PARTS = {"environment": EnvironmentReward(), "price": lambda states, actions: [-0.5] * len(actions)}
REWARD_MODELS: dict[str, Any] = {
    "whole": EnvironmentReward(),
    "per turn": EnvironmentReward(per_turn=True),
    "a part": WeightedRewards(PARTS),
}
"""The part beside the environment has a reward for every row, which does not count where the environment has none."""


def test_a_row_without_a_reward_is_explained_by_state_cause_and_remedy(subtests: pytest.Subtests) -> None:
    async def gives_nan(chat: Chat, state: Any) -> float:
        await chat([user("you")])
        return float("nan")

    cases: list[tuple[Any, dict[str, Any], str]] = [
        (one_with("step", fails), {}, r"the environment or the program raised KeyError: 'lost'\. Fix .*num_retries"),
        (one_with("reset", fails), {}, r"the environment or the program raised KeyError: 'lost'\. Fix .*num_retries"),
        (one_with("step", lambda: time.sleep(1.0)), {"timeout": 0.3}, r"no answer within 0\.3 s\. .*timeout="),
        (Echo, {"max_tokens": 9}, r"its first prompt has no room for a message\. Shorten .* or raise .*max_tokens"),
        (says_nothing, {}, r"the program returned without a message of the model\. Await"),
        (gives_nan, {}, r"the environment gave NaN as a reward\. Return a number"),
    ]
    for make, options, cause in cases:
        for name, reward in REWARD_MODELS.items():
            with subtests.test(cause, reward=name):
                agent = AgentPolicy(says(*"abcdef"), make, **options)
                trainer = GRPOTrainer(config=GRPOConfig(group_size=2), policy=agent, reward_model=reward)
                with pytest.raises(RewardError, match=rf"set reward\.non_finite .* State 'task 7': {cause}") as caught:
                    trainer.step(["task 7"])
                assert str(caught.value).count("State 'task 7'") == 1


def test_a_conversation_that_failed_is_held_again_with_the_same_random_numbers() -> None:
    tries: list[str] = []

    async def play(chat: Chat, state: Any) -> float:
        messages = [user("you")]
        for _ in range(2):
            said = await chat(messages, max_new_tokens=3)
            tries.append(said["content"])
            messages = [*messages, said, user("more")]
        return fails() if len(tries) == 2 else 1.0

    model = language_model(max_new_tokens=6)
    for num_retries, ended_by in ((1, "environment"), (0, "error")):
        tries.clear()
        torch.manual_seed(0)
        sampled = AgentPolicy(model, play, num_retries=num_retries).sample_actions(["you"], 1)
        ((row,),) = sampled.actions
        assert (row.ended_by, sampled.metrics["agents/retries"]) == (ended_by, num_retries)
        assert row.reward == pytest.approx(1.0 if num_retries else math.nan, nan_ok=True)
        assert tries == tries[:2] * (1 + num_retries)


def test_an_environment_that_fails_only_beside_others_is_named_with_the_remedy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    inside = threading.Semaphore(1)

    def step(self: Echo, action: Any) -> Any:
        """Fails if another one steps at the same time, as a package with one parser for all."""
        if not inside.acquire(blocking=False):
            return fails()
        time.sleep(0.02)
        inside.release()
        return Echo.step(self, action)

    make = partial(changed(Echo, step=step), turns=1)
    with caplog.at_level(logging.WARNING, logger="grpo"):
        agent = AgentPolicy(says(*["a"] * 40), make)
        sampled = agent.sample_actions(["you", "me"], 4)
        assert sampled.metrics["agents/retries"] == 1, "one was enough to find the cause"
        assert "error" in {row.ended_by for row in rows_of(sampled.actions)}
        assert agent.sample_actions(["you"], 4).metrics["agents/retries"] == 0
    [told] = [record.message for record in caplog.records if "one_at_a_time" in record.message]
    assert told == (
        "AgentPolicy: the environment of the state 'you' failed beside others and not alone: its package may not be safe "
        "in several threads. Set one_at_a_time=True, or num_retries=1 if it fails now and then. Its error: KeyError: 'lost'"
    )
    remedied = AgentPolicy(says(*["a"] * 8), make, one_at_a_time=True).sample_actions(["you", "me"], 4)
    assert remedied.metrics["agents/ended_by_error"] == remedied.metrics["agents/retries"] == 0


def test_environments_that_fail_alone_too_are_tried_once_for_each_state_and_not_for_ever() -> None:
    made: list[Any] = []
    broken = one_with("reset", fails)
    make = lambda state: (made.append(state), broken(state))[1]  # noqa: E731
    agent = AgentPolicy(says(), make)
    for states, num_tries in ((["a", "b"], 2), ([*"cdefghijkl"], 6), (["m"], 0)):
        made.clear()
        assert agent.sample_actions(states, 3).metrics["agents/retries"] == num_tries
        assert len(made) == 3 * len(states) + num_tries
    assert AgentPolicy(says(), make, concurrency=1).sample_actions(["a"], 3).metrics["agents/retries"] == 0


def test_a_reply_that_a_program_edits_in_place_is_another_history() -> None:
    async def play(chat: Chat, state: Any) -> float:
        said = await chat([user("you")], [lookup])
        said["tool_calls"][0]["function"]["arguments"]["topic"] = "Rome"
        await chat([user("you"), said, user("you")], [lookup])
        return 1.0

    policy = Scripted([says_call(), "b"], max_new_tokens=90)
    (row,) = converse(policy.policy, play)
    first, second = [segment.messages for segment in row.segments]
    assert row.turns[0].message == first[-1] != second[1]
    assert "Rome" in policy.policy.tokenizer.decode(policy.contexts[1])


def test_a_text_that_no_context_has_room_for_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten million characters hold up the other conversations for many seconds. The longest token has 12 characters."""
    huge = 10_000_000 * "x"

    shown = {"reset": lambda self, **_: (huge if self.state == "first" else "you", {})}
    answers = changed(Echo, **shown, step=lambda self, action: (huge, 1.0, False, False, {}))
    longest: list[int] = []
    for name in ("render", "bridge"):
        real = getattr(ChatTemplate, name)

        def spied(self: Any, *given: Any, real: Any = real) -> Any:
            messages = [one for one in given if isinstance(one, list) and one and isinstance(one[0], dict)]
            longest.extend(len(message["content"]) for of in messages for message in of if "content" in message)
            return real(self, *given)

        monkeypatch.setattr(ChatTemplate, name, spied)
    for state, rewards in (("first", ()), ("step", (1.0,))):
        ((row,),) = AgentPolicy(says("a"), answers).generate_actions([state], 1)
        assert (row.ended_by, row.rewards, len(row.messages[-1]["content"])) == ("length", rewards, len(huge))
    assert max(longest) < 1000


@pytest.mark.parametrize("method", ["__init__", "reset", "step", "state_key", "tools", "close"])
def test_an_environment_that_raises_has_no_reward_and_is_closed(method: str, caplog: pytest.LogCaptureFixture) -> None:
    make = one_with(method, fails)
    with caplog.at_level(logging.WARNING, logger="grpo"):
        sampled = AgentPolicy(says(*"abcdefghi"), make).sample_actions(["you"], 2)
    for row in sampled.actions[0]:
        assert (row.ended_by, row.info, row.reward != row.reward) == ("error", {"error": "KeyError: 'lost'"}, True)
    assert sampled.metrics["agents/ended_by_error"] == 2
    assert make.num_closed == (0 if method in ("__init__", "close") else 3), "one of the two was tried again, alone"
    assert sampled.metrics["agents/retries"] == 1
    assert [record.message.count("KeyError: 'lost'") for record in caplog.records] == [1]


def test_an_environment_needs_no_close_and_may_be_async() -> None:
    closed: list[Any] = []

    async def reset(self: Any, *, seed: Any = None, options: Any = None) -> Any:
        await asyncio.sleep(0)
        return "hi", {}

    async def step(self: Any, action: Any) -> Any:
        await asyncio.sleep(0)
        return "", 2.0, False, True, {}

    async def close(self: Any) -> None:
        closed.append(self)

    for more in ({}, {"close": close}):
        make = changed(object, reset=reset, step=step, **more)
        (row,) = converse(says("a"), lambda state, make=make: make())
        assert (row.rewards, row.ended_by, len(closed)) == ((2.0,), "environment", len(more))


@pytest.mark.parametrize(
    ("method", "does", "message"),
    [
        ("reset", lambda: "text", "Changed.reset must return"),
        ("step", lambda: ("text", 1.0, True, False), "Changed.step must return"),
        ("step", lambda: ("text", "much", True, False, {}), "Changed.step must return a number as the reward"),
        ("step", lambda: (7, 1.0, True, False, {}), "An observation must be a text"),
        ("tools", lambda: [lambda x: x], "A tool must be a JSON schema, or a function"),
    ],
)
def test_an_environment_that_breaks_the_protocol_ends_the_run(method: str, does: Any, message: str) -> None:
    make = one_with(method, does)
    with pytest.raises(ContractError, match=message):
        AgentPolicy(says("a"), make).generate_actions(["you"], 1)
    assert make.num_closed == 1


def test_a_state_that_hangs_costs_its_rows_and_is_not_held_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten rows of one state keep ten threads. The next iteration, and the retries, would keep more of them. Others go on."""
    monkeypatch.setattr(rollouts, "GRACE_SECONDS", 0.05)
    release, made, waiting, clocks = threading.Event(), [], [], ConversationClocks(monkeypatch)

    def step(self: Any, action: Any) -> Any:
        if self.state == "bad" and not release.is_set():
            waiting.append(self)
            if len(waiting) == 10:  # all of them: they are the first conversations
                clocks.move(*range(10))
            release.wait(60)
        return Counting.step(self, action)

    hangs = changed(Counting, step=step, num_closed=0)
    make = lambda state: (made.append(state), hangs(state, turns=1))[1]  # noqa: E731
    agent = AgentPolicy(says(*"abcdefgh" * 8), make, timeout=1.0, num_retries=1)
    for num_made, error in ((10, "no answer within 1 s"), (0, "an earlier environment of this state still hangs")):
        made.clear()
        sampled = agent.sample_actions(["bad", "you"], 10)
        bad, good = sampled.actions
        assert {(row.ended_by, row.info["error"], str(row.reward)) for row in bad} == {("timeout", error, "nan")}
        assert {len(row.turns) for row in bad} == {num_made // 10}
        assert [row.reward for row in good] == [1.0] * 10
        assert (made.count("bad"), sampled.metrics["agents/abandoned"]) == (num_made, num_made)
    (told,) = EnvironmentReward().explain_missing(["bad"], bad[:1])
    assert told.startswith("State 'bad': an earlier environment of this state still hangs. Find out what it waits for")
    assert hangs.num_closed == 20
    release.set()
    wait_for(lambda: not any(thread.name == "environment" for thread in threading.enumerate()))
    assert hangs.num_closed == 30, "each is closed as soon as it answers"
    found = rows_of(agent.sample_actions(["bad", "you"], 10).actions)  # it was only slow
    assert [row.reward for row in found] == [1.0] * 20


def test_hanging_environments_of_too_many_states_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "GRACE_SECONDS", 0.02)
    release = threading.Event()
    agent = AgentPolicy(says(*"abcdefgh"), one_with("reset", lambda: release.wait(20)), timeout=1.0)
    agent.sample_actions([*"abcdefg"], 1)
    with pytest.raises(DeadlineError, match=r"environments of 8 states did not answer within timeout=1 s"):
        agent.sample_actions(["h"], 1)
    release.set()


def test_the_time_of_the_model_is_not_the_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, clocks = says(*"abc"), ConversationClocks(monkeypatch)
    before_each_batch(policy, lambda prompts: (clocks.move(), time.sleep(0.2)))
    (row,) = AgentPolicy(policy, Echo, timeout=0.15).generate_actions(["you"], 1)[0]
    assert row.ended_by == "environment"


def test_a_program_that_blocks_the_event_loop_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "GRACE_SECONDS", 0.02)
    monkeypatch.setattr(rollouts, "BLOCKED_SECONDS", 0.2)
    release = threading.Event()

    async def play(chat: Chat, state: Any) -> float:
        release.wait(20)
        return 1.0

    with pytest.raises(DeadlineError, match=r"an async function has not awaited anything for 0.2 s"):
        AgentPolicy(says(), play, timeout=0.1).generate_actions(["you"], 1)
    release.set()


@pytest.mark.parametrize("content", ["you", "too long " * 300])
def test_a_program_that_asks_again_after_every_refusal_ends_alone(content: str) -> None:
    """Each request after a limit is refused at once, so that the program never waits for the model."""

    async def play(chat: Chat, state: Any) -> float:
        while state == "bad":
            with contextlib.suppress(Exception):
                await chat([user(content)])
        await asyncio.sleep(0.05)
        await chat([user(state)])
        return 1.0

    agent = AgentPolicy(says(*"abc"), play, max_turns=2, timeout=1.0)
    (bad,), (good,) = agent.generate_actions(["bad", "you"], 1)
    assert (bad.ended_by, bad.info, good.reward) == ("timeout", {"error": "no answer within 1 s"}, 1.0)


def test_what_a_program_raises_is_its_own_error_and_an_exit_in_another_task_is_named(subtests: pytest.Subtests) -> None:
    async def leaves() -> None:
        raise SystemExit(2)

    async def leaves_elsewhere(chat: Chat, state: Any) -> None:
        await asyncio.gather(leaves())

    async def play(chat: Chat, state: Any) -> float:
        await chat([user("you" if isinstance(state, BaseException) else state)])
        if isinstance(state, BaseException):
            raise state
        return 1.0

    for state, cause in (
        (SystemExit(2), "RuntimeError: the agent program raised SystemExit: 2"),
        (KeyboardInterrupt(), "RuntimeError: the agent program raised KeyboardInterrupt: "),
    ):
        with subtests.test(cause):
            (odd,), (good,) = AgentPolicy(says(*"ab"), play).generate_actions([state, "you"], 1)
            assert (odd.ended_by, odd.info["error"].startswith(cause), good.reward) == ("error", True, 1.0), odd.info
    with pytest.raises(ContractError, match="a task of an agent program raised SystemExit, which ends the event loop"):
        AgentPolicy(says("a"), leaves_elsewhere).generate_actions(["you"], 1)


def test_half_a_character_of_a_call_or_a_state_costs_no_reward() -> None:
    (called,) = converse(says(says_call(arguments='{"topic": "\\ud83d"}'), "done", max_new_tokens=120), Tools)
    (told,) = converse(says("a", "b", "c"), Echo, state="\ud83d")
    assert [row.ended_by for row in (called, told)] == ["environment"] * 2
    assert called.messages[2]["content"] == "\ud83d is fine"


def test_a_request_after_the_end_is_refused() -> None:
    ended: list[Chat] = []

    async def play(chat: Chat, state: Any) -> float:
        await chat([user(state)])
        if state == "early":
            ended.append(chat)
            return 1.0
        while not ended or ended[0].ended_by is None:
            await asyncio.sleep(0.01)
        with pytest.raises(ConversationEnded, match="'environment'"):
            await ended[0]([user("still there?")])
        return 2.0

    policy = Scripted(["a", "b"], max_new_tokens=8)
    rows = rows_of(AgentPolicy(policy.policy, play).generate_actions(["early", "you"], 1))
    assert [row.rewards for row in rows] == [(1.0,), (2.0,)]
    assert len(policy.contexts) == 2


def test_seconds_in_which_nothing_could_run_are_not_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop stands still for longer than the timeout, as if the process were stopped: for two minutes by the clock."""
    monkeypatch.setattr(rollouts, "BEAT_SECONDS", 0.05)
    skip = skipping_clock(monkeypatch)

    async def play(chat: Chat, state: Any) -> float:
        await chat([user(state)])
        if state == "stops":
            await asyncio.sleep(0.1)
            skip(120.0)
        else:
            for _ in range(4):
                await asyncio.sleep(0.1)
        return 1.0

    rows = AgentPolicy(says(*"ab"), play, timeout=60.0).generate_actions(["stops", "works"], 1)
    assert [(row.ended_by, row.reward) for (row,) in rows] == [("environment", 1.0)] * 2


def test_many_programs_that_are_slow_together_do_not_block_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thirty of them hold up the event loop for 1.5 seconds, and none of them for a tenth of a second."""
    monkeypatch.setattr(rollouts, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(rollouts, "BLOCKED_SECONDS", 0.5)

    async def play(chat: Chat, state: Any) -> float:
        for _ in range(2):
            time.sleep(0.05)
            await asyncio.sleep(0)
        await chat([user(state)])
        return 1.0

    (rows,) = AgentPolicy(says(*"a" * 30), play, timeout=0.7).generate_actions(["you"], 30)
    assert {row.ended_by for row in rows} == {"environment"}


def test_conversations_may_end_while_the_caller_waits_or_samples(subtests: pytest.Subtests) -> None:
    with subtests.test("waits"):  # the wait times out at the moment at which the last conversation ends
        batches = rollouts._Batches(0.001, 8)
        batches.loop = asyncio.new_event_loop()
        batches.loop.close()
        batches._require_running_loop()
        batches.end()
        assert batches.next() == []
    with subtests.test("samples"):
        policy, samples = says(*"ab"), threading.Event()

        def until_all_ended(prompts: Any) -> None:
            samples.set()
            wait_for(lambda: all(thread.name != "conversations" for thread in threading.enumerate()))

        async def play(chat: Chat, state: Any) -> float:
            if state == "asks":
                await chat([user(state)])
            while not samples.is_set():
                await asyncio.sleep(0.01)
            raise ContractError("the program is wrong")

        before_each_batch(policy, until_all_ended)
        with pytest.raises(ContractError, match="the program is wrong"):
            AgentPolicy(policy, play).generate_actions(["asks", "fails"], 1)


def test_errors_of_the_sampler_end_all_conversations() -> None:
    policy = language_model()
    policy.sample_tokens = Mock(side_effect=MemoryError("no memory"))
    made: list[Any] = []

    Echo.closed.clear()

    def make(state: Any) -> Echo:
        time.sleep(0.05 * len(made))  # some are still being made when the first batch is sampled
        made.append(Echo(state))
        return made[-1]

    with pytest.raises(MemoryError, match="no memory"):
        AgentPolicy(policy, make).generate_actions(["you"], 4)
    wait_for(lambda: len(Echo.closed) == len(made) > 0)
    assert not [thread for thread in threading.enumerate() if thread.name == "conversations"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_turns": 0}, "max_turns must be an integer >= 1; got int 0"),
        ({"max_tokens": 0}, "max_tokens must be an integer >= 1, or None; got int 0"),
        ({"concurrency": 0}, "concurrency must be an integer >= 1; got int 0"),
        ({"num_retries": -1}, "num_retries must be an integer >= 0; got int -1"),
        ({"timeout": 0.0}, r"timeout must be above 0; got 0\.0"),
        ({"turn_timeout": -1.0}, r"turn_timeout must be above 0; got -1\.0"),
        ({"make": 7}, "make must be a function"),
        ({"make": says_nothing, "one_at_a_time": True}, "one_at_a_time is for environments, .* got an agent program"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AgentPolicy(SimpleNamespace(tokenizer=None), **{"make": Echo} | options)  # type: ignore[arg-type]


def test_tools_of_eight_conversations_are_called_at_the_same_time() -> None:
    together = threading.Barrier(8)
    waiting = changed(Echo, step=lambda self, action: (together.wait(timeout=60), Echo.step(self, action))[1])
    AgentPolicy(says(*["a"] * 48), waiting).generate_actions(["you"], 16)
    assert not together.broken


@pytest.mark.parametrize(
    ("arriving", "num_taken"),
    [
        ([0, 1, 1], 2),  # both ask
        ([0, 0, 1, 1], 4),  # both ask, and the first has asked twice, so more requests may come right after
    ],
)
def test_a_batch_waits_for_more_requests_once_a_conversation_had_several(arriving: list[int], num_taken: int) -> None:
    """Two conversations. The next request arrives as soon as the batch waits at all, however short."""
    given = {"context": [], "seed": 0, "max_new_tokens": 1, "stop": (), "turn": Mock(**{"done.return_value": False})}
    requests = iter([rollouts.Request(index=index, speaker=None, **given) for index in arriving])

    def get(timeout: float | None) -> rollouts.Request:
        request = None if timeout == 0 else next(requests, None)
        if request is None:
            raise queue.Empty
        return request

    batches = rollouts._Batches(timeout=None, max_requests=8)
    batches.seconds = 1e9  # so it waits for the second conversation, however busy this machine is
    batches._requests = Mock(get=get)
    with batches.one_more(), batches.one_more():
        assert [request.index for request in batches.next()] == arriving[:num_taken]


@pytest.mark.parametrize("loop", ["own", "generate"])
def test_a_turn_returns_when_it_ends_and_not_when_the_longest_ends(loop: Any) -> None:
    """The second turn goes on only after the environment of the first one has answered."""
    answered, num_forwards = threading.Event(), [0]
    policy = language_model(max_new_tokens=8, end_scale=0.0)
    policy._sampler._given_loop = loop

    def wait(*args: Any) -> None:
        num_forwards[0] += 1
        if num_forwards[0] == 4:
            assert answered.wait(20)

    async def play(chat: Chat, state: Any) -> float:
        reply = await chat.reply([user("you")], max_new_tokens=1 if state == "short" else 7)
        if state == "short":
            answered.set()
        return float(reply.num_tokens)

    def held() -> list[tuple[Any, Any]]:
        torch.manual_seed(0)
        rows = rows_of(AgentPolicy(policy, play).generate_actions(["short", "long"], 1))
        return [(row.segments[0].token_ids, row.segments[0].log_probs) for row in rows]

    hook = (policy.model if loop == "generate" else policy.model.model).register_forward_pre_hook(wait)
    found = held()
    hook.remove()
    assert answered.is_set()
    assert num_forwards[0] >= 7
    real = policy.sample_tokens
    policy.sample_tokens = lambda *args, on_row=None, **options: real(*args, **options)
    assert held() == found, "the early turns are those of the whole batch"


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_turn_that_takes_too_long_ends_its_conversation_and_says_so(
    is_frozen: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, late, causes, skip = says(*"abcd"), threading.Event(), [], skipping_clock(monkeypatch)
    seats = [Seat(name="slow", policy=says(*"abcd"))] if is_frozen else []
    before_each_batch(seats[0].policy if seats else policy, lambda prompts: hours_pass(skip, late.is_set))

    async def play(chat: Chat, state: Any) -> float:
        try:
            for seat in ["slow", None] if seats else [None]:
                await chat.reply([user(state)], seat=seat)
        except ConversationEnded as end:
            causes.append(end.ended_by)
            late.set()
            raise
        return 1.0

    options: dict[str, Any] = {"turn_timeout": 60.0, "seats": seats}
    assert converse(policy, play, num_retries=1, **options)[0].reward == 1.0, "held again"
    late.clear()
    sampled = AgentPolicy(policy, play, **options).sample_actions(["you"], 1)
    ((row,),) = sampled.actions
    assert (row.ended_by, sampled.metrics["agents/ended_by_timeout"]) == ("timeout", 1.0)
    assert causes == ["timeout"] * 2
    [told] = EnvironmentReward().explain_missing(["you"], [row])
    assert told == (
        "State 'you': the model sent no message within turn_timeout=60 s. Raise AgentPolicy(turn_timeout=...), or lower "
        "max_new_tokens or concurrency."
    )
    gc.collect()
    assert not [record for record in caplog.records if record.name == "asyncio"]
