"""How conversations end, and what slow, failing and hanging environments cost."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adapters.agents import AgentPolicy, Chat, ChatTemplate, ConversationEnded, EnvironmentReward, Message, rollouts
from grpo import GRPOConfig, GRPOTrainer, WeightedRewards
from grpo.errors import ConfigError, ContractError, DeadlineError, RewardError
from tests.support.agents import Echo, Scripted, Tools, chat_tokenizer, language_model, says_call


def says(*turns: str, **options: Any) -> Any:
    return Scripted(turns, **{"max_new_tokens": 8} | options).policy


class Counting(Echo):
    """Counts how often it is closed."""

    num_closed = 0

    def close(self) -> None:
        type(self).num_closed += 1


def one_with(method: str, does: Callable[..., Any]) -> type[Counting]:
    """An environment in which one method does something else."""
    return type("Changed", (Counting,), {method: lambda self, *args, **kwargs: does(), "num_closed": 0})


def fails() -> Any:
    raise KeyError("lost")


def test_every_way_to_end(subtests: pytest.Subtests) -> None:
    long = {
        "max_tokens": len(chat_tokenizer().encode("<|im_start|>user\nHello you<|im_end|>\n<|im_start|>assistant\n"))
    }
    cases: list[tuple[str, Any, list[str], dict[str, Any], int, list[float]]] = [
        ("environment", Echo, ["a", "b", "c"], {}, 3, [1.0, 2.0, 3.0]),
        ("max_turns", Echo, ["a", "b"], {"max_turns": 2}, 2, [1.0, 2.0]),
        ("length", Echo, ["a", "b" * 8], {}, 2, [1.0, 0.0]),  # the turn is truncated, and not answered
        ("length", Echo, ["a"], {"max_tokens": long["max_tokens"] + 8}, 1, [1.0]),  # no room for a second turn
        ("length", Echo, [], {"max_tokens": long["max_tokens"] + 7}, 0, []),  # no room for the first
    ]
    for ended_by, make, turns, options, num_turns, rewards in cases:
        with subtests.test(ended_by=ended_by, turns=turns):
            sampled = AgentPolicy(says(*turns), make, **options).sample_actions(["you"], 1)
            (row,) = sampled.actions[0]
            assert row.ended_by == ended_by
            assert len(row.turns) == num_turns
            assert list(row.rewards) == rewards
            assert (row.reward == sum(rewards)) == bool(rewards)  # without a turn, there is no reward: NaN
            counts = {name: n for name, n in sampled.metrics.items() if name.startswith("agents/ended_by")}
            assert [name for name, count in counts.items() if count] == [f"agents/ended_by_{ended_by}"]


def test_a_row_without_a_reward_is_explained_by_state_cause_and_remedy(subtests: pytest.Subtests) -> None:
    async def says_nothing(chat: Chat, state: Any) -> float:
        return 1.0

    async def gives_nan(chat: Chat, state: Any) -> float:
        await chat([{"role": "user", "content": "you"}])
        return float("nan")

    cases: list[tuple[Any, dict[str, Any], str]] = [
        (
            one_with("step", fails),
            {},
            r"the environment or the program raised KeyError: 'lost'\. Fix it, or set .*num_retries",
        ),
        (one_with("step", lambda: time.sleep(1.0)), {"timeout": 0.3}, r"no answer within 0\.3 s\. .*timeout="),
        (
            Echo,
            {"max_tokens": 9},
            r"its first prompt has no room for a message\. Shorten the prompt, or raise .*max_tokens",
        ),
        (says_nothing, {}, r"the program returned without a message of the model\. Await"),
        (gives_nan, {}, r"the environment gave NaN as a reward\. Return a number"),
    ]
    for make, options, cause in cases:
        for reward in (EnvironmentReward(), WeightedRewards({"environment": EnvironmentReward()})):
            with subtests.test(cause, reward=type(reward).__name__):
                logging.getLogger("grpo").disabled = True
                agent = AgentPolicy(says(*"abcdef"), make, **options)
                trainer = GRPOTrainer(config=GRPOConfig(group_size=2), policy=agent, reward_model=reward)
                with pytest.raises(RewardError, match=rf"set reward\.non_finite .* State 'task 7': {cause}") as caught:
                    trainer.step(["task 7"])
                assert str(caught.value).count("State 'task 7'") == 1
                logging.getLogger("grpo").disabled = False


def test_a_conversation_that_failed_is_held_again_with_the_same_random_numbers() -> None:
    tries: list[str] = []

    async def play(chat: Chat, state: Any) -> float:
        messages: list[Message] = [{"role": "user", "content": "you"}]
        for _ in range(2):
            said = await chat(messages, max_new_tokens=3)
            tries.append(said["content"])
            messages = [*messages, said, {"role": "user", "content": "more"}]
        if len(tries) == 2:
            raise KeyError("lost")
        return 1.0

    logging.getLogger("grpo").disabled = True
    model = language_model(max_new_tokens=6)
    for num_retries, ended_by in ((1, "environment"), (0, "error")):
        tries.clear()
        torch.manual_seed(0)
        sampled = AgentPolicy(model, play, num_retries=num_retries).sample_actions(["you"], 1)
        assert sampled.actions[0][0].ended_by == ended_by
        assert sampled.metrics["agents/retries"] == num_retries
        assert tries == tries[:2] * (1 + num_retries)
    logging.getLogger("grpo").disabled = False
    with pytest.raises(ConfigError, match="num_retries must be at least 0; got -1"):
        AgentPolicy(model, play, num_retries=-1)


def test_environments_that_are_not_safe_in_threads_are_called_one_at_a_time() -> None:
    inside, most = [0], [0]

    class Unsafe(Echo):
        def step(self, action: Any) -> Any:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            time.sleep(0.02)
            inside[0] -= 1
            return super().step(action)

    found = []
    for one_at_a_time in (False, True):
        most[0] = 0
        agent = AgentPolicy(says(*"abcdefgh"), partial(Unsafe, turns=1), one_at_a_time=one_at_a_time)
        agent.generate_actions(["you"], 8)
        found.append(most[0])
    assert found[0] > 1 == found[1]


def test_an_environment_that_fails_beside_others_and_not_alone_is_named_with_the_remedy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    inside = threading.Semaphore(1)

    class Unsafe(Echo):
        """Fails if another one steps at the same time, as a package with one parser for all."""

        def step(self, action: Any) -> Any:
            if not inside.acquire(blocking=False):
                return fails()
            time.sleep(0.02)
            inside.release()
            return super().step(action)

    make = partial(Unsafe, turns=1)
    with caplog.at_level(logging.WARNING, logger="grpo"):
        agent = AgentPolicy(says(*["a"] * 40), make)
        sampled = agent.sample_actions(["you", "me"], 4)
        rows = [row for group in sampled.actions for row in group]
        assert sampled.metrics["agents/retries"] == 1, "one was enough to find the cause"
        assert sum(row.ended_by == "error" for row in rows) >= 1
        assert agent.sample_actions(["you"], 4).metrics["agents/retries"] == 0
    told = [record.message for record in caplog.records if "one_at_a_time" in record.message]
    assert told == [
        (
            "AgentPolicy: the environment of the state 'you' failed beside others and not alone: its package may not be safe "
            "in several threads. Set one_at_a_time=True, or num_retries=1 if it fails now and then. Its error: KeyError: 'lost'"
        )
    ]
    remedied = AgentPolicy(says(*["a"] * 8), make, one_at_a_time=True).sample_actions(["you", "me"], 4)
    assert remedied.metrics["agents/ended_by_error"] == remedied.metrics["agents/retries"] == 0


def test_environments_that_fail_alone_too_are_tried_once_for_each_state_and_not_for_ever() -> None:
    made: list[Any] = []

    class Broken(Echo):
        def __init__(self, state: Any) -> None:
            made.append(state)
            super().__init__(state)

        def reset(self, **kwargs: Any) -> Any:
            return fails()

    logging.getLogger("grpo").disabled = True
    agent = AgentPolicy(says(), Broken)
    for states, num_tries in ((["a", "b"], 2), ([*"cdefghijkl"], 6), (["m"], 0)):
        made.clear()
        assert agent.sample_actions(states, 3).metrics["agents/retries"] == num_tries
        assert len(made) == 3 * len(states) + num_tries
    assert AgentPolicy(says(), Broken, concurrency=1).sample_actions(["a"], 3).metrics["agents/retries"] == 0
    logging.getLogger("grpo").disabled = False


def test_what_the_other_side_said_last_stays_in_the_transcript() -> None:
    """Also if a limit ends the conversation before the policy can answer. A truncated message is not answered."""
    room = len(chat_tokenizer().encode("<|im_start|>user\nHello you<|im_end|>\n<|im_start|>assistant\n")) + 8
    cases: list[tuple[Any, list[str], dict[str, Any], list[str]]] = [
        (Echo, ["a", "b"], {"max_turns": 2}, ["Hello you", "a", "I heard 1", "b", "I heard 2"]),
        (Echo, ["a"], {"max_tokens": room}, ["Hello you", "a", "I heard 1"]),
        (Echo, [], {"max_tokens": room - 1}, ["Hello you"]),
        (Echo, ["a", "b" * 8], {}, ["Hello you", "a", "I heard 1", "b" * 8]),
    ]
    for make, turns, options, expected in cases:
        ((row,),) = AgentPolicy(says(*turns), make, **options).generate_actions(["you"], 1)
        assert [message["content"] for message in row.messages] == expected
    call = says_call()
    ((row,),) = AgentPolicy(Scripted([call], max_new_tokens=90).policy, Tools, max_turns=1).generate_actions(["you"], 1)
    assert row.messages[-1]["content"] == "weather is fine"


def test_a_program_that_changed_the_history_ends_with_what_was_said() -> None:
    async def play(chat: Chat, state: Any) -> float:
        await chat([{"role": "user", "content": "one"}])
        await chat([{"role": "user", "content": "another"}])
        return 1.0

    ((row,),) = AgentPolicy(says("a"), play, max_turns=1).generate_actions(["you"], 1)
    assert [message["content"] for message in row.messages] == ["one", "a"]


def test_a_context_stays_within_its_limit() -> None:
    policy = language_model(max_new_tokens=12)
    agent = AgentPolicy(policy, lambda state: Echo(state, turns=100), max_turns=50, max_tokens=200)
    rows = agent.generate_actions(["you"], 20)[0]
    lengths = [len(segment.token_ids) for row in rows for segment in row.segments]
    assert 150 < max(lengths) <= 200


@pytest.mark.parametrize("method", ["reset", "step", "state_key", "tools", "close"])
def test_an_environment_that_raises_has_no_reward_and_is_closed(method: str, caplog: pytest.LogCaptureFixture) -> None:
    make = one_with(method, fails)
    with caplog.at_level(logging.WARNING, logger="grpo"):
        sampled = AgentPolicy(says(*"abcdefghi"), make).sample_actions(["you"], 2)
    for row in sampled.actions[0]:
        assert row.ended_by == "error"
        assert row.info == {"error": "KeyError: 'lost'"}
        assert row.reward != row.reward  # NaN
    assert sampled.metrics["agents/ended_by_error"] == 2
    assert make.num_closed == (0 if method == "close" else 3), "one of the two was tried again, alone"
    assert sampled.metrics["agents/retries"] == 1
    assert [record.message.count("KeyError: 'lost'") for record in caplog.records] == [1]


def test_an_environment_that_cannot_be_made_has_no_reward() -> None:
    (row,) = AgentPolicy(says(), lambda state: fails()).generate_actions(["you"], 1)[0]
    assert (row.ended_by, len(row.turns), row.reward != row.reward) == ("error", 0, True)


def test_one_failing_environment_changes_no_other() -> None:
    class Sometimes(Echo):
        def step(self, action: Any) -> Any:
            return fails() if self.state == "bad" else super().step(action)

    good = [row.rewards for row in AgentPolicy(says(*"abcdefghij"), Sometimes).generate_actions(["bad", "you"], 1)[1]]
    assert good == [(1.0, 2.0, 3.0)]


def test_an_environment_needs_no_close_and_may_be_async() -> None:
    class Awaited:
        closed: list[str] = []  # noqa: RUF012

        def __init__(self, state: Any) -> None:
            self.state = state

        async def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            await asyncio.sleep(0)
            return "hi", {}

        async def step(self, action: Any) -> Any:
            await asyncio.sleep(0)
            return "", 2.0, False, True, {}

    class Closing(Awaited):
        async def close(self) -> None:
            self.closed.append(self.state)

    for make in (Awaited, Closing):
        (row,) = AgentPolicy(says("a"), make).generate_actions(["you"], 1)[0]
        assert (row.rewards, row.ended_by) == ((2.0,), "environment")
    assert Awaited.closed == ["you"]


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


def test_a_hanging_environment_is_given_up_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "GRACE_SECONDS", 0.05)
    release = threading.Event()

    class Hangs(Counting):
        num_closed = 0

        def step(self, action: Any) -> Any:
            if self.state == "bad":
                release.wait(20)
            return super().step(action)

    agent = AgentPolicy(says(*"abcdefgh"), Hangs, timeout=0.3)
    sampled = agent.sample_actions(["bad", "you"], 1)
    (bad,), (good,) = sampled.actions
    assert (bad.ended_by, bad.reward != bad.reward, len(bad.turns)) == ("timeout", True, 1)
    assert good.rewards == (1.0, 2.0, 3.0)
    assert sampled.metrics["agents/abandoned"] == 1
    assert Hangs.num_closed == 1
    release.set()
    _wait_for(lambda: Hangs.num_closed == 2)  # it is closed as soon as it answers


def test_too_many_hanging_environments_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "GRACE_SECONDS", 0.02)
    release = threading.Event()
    agent = AgentPolicy(says(*"abcdefgh"), one_with("step", lambda: release.wait(20)), timeout=0.1)
    agent.sample_actions(["you"], 7)
    agent.policy = says("a")
    with pytest.raises(DeadlineError, match=r"8 environments did not answer within timeout=0.1 s"):
        agent.sample_actions(["you"], 1)
    release.set()


def test_an_awaiting_program_is_cancelled_in_time() -> None:
    cancelled: list[bool] = []

    async def play(chat: Chat, state: Any) -> float:
        await chat([{"role": "user", "content": state}])
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.append(True)
        return 1.0

    sampled = AgentPolicy(says("a"), play, timeout=0.1).sample_actions(["you"], 1)
    assert sampled.actions[0][0].ended_by == "timeout"
    assert sampled.metrics["agents/abandoned"] == 0
    assert cancelled == [True]


def test_the_time_of_the_model_is_not_the_programs() -> None:
    policy = says(*"abc")
    real = policy.sample_tokens

    def slow(*args: Any, **options: Any) -> Any:
        time.sleep(0.2)
        return real(*args, **options)

    policy.sample_tokens = slow
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


def test_conversations_may_end_while_the_caller_waits_or_samples(subtests: pytest.Subtests) -> None:
    with subtests.test("waits"):  # the wait times out at the moment at which the last conversation ends
        batches = rollouts._Batches(0.001, 8)
        batches.loop = asyncio.new_event_loop()
        batches.loop.close()
        batches._require_running_loop()
        batches.end()
        assert batches.next() == []
    with subtests.test("samples"):
        policy = says(*"ab")
        real = policy.sample_tokens
        samples = threading.Event()

        def slow(*args: Any, **options: Any) -> Any:
            samples.set()
            while any(thread.name == "conversations" for thread in threading.enumerate()):
                time.sleep(0.01)
            return real(*args, **options)

        async def play(chat: Chat, state: Any) -> float:
            if state == "asks":
                await chat([{"role": "user", "content": state}])
            while not samples.is_set():
                await asyncio.sleep(0.01)
            raise ContractError("the program is wrong")

        policy.sample_tokens = slow
        with pytest.raises(ContractError, match="the program is wrong"):
            AgentPolicy(policy, play).generate_actions(["asks", "fails"], 1)


def test_errors_of_the_sampler_end_all_conversations() -> None:
    policy = language_model()

    def broken(*args: Any, **options: Any) -> Any:
        raise MemoryError("no memory")

    policy.sample_tokens = broken
    made: list[Any] = []

    class Listed(Counting):
        num_closed = 0

        def __init__(self, state: Any) -> None:
            time.sleep(0.05 * len(made))  # some are still being made when the first batch is sampled
            super().__init__(state)
            made.append(self)

    with pytest.raises(MemoryError, match="no memory"):
        AgentPolicy(policy, Listed).generate_actions(["you"], 4)
    _wait_for(lambda: Listed.num_closed == len(made) > 0)
    assert not [thread for thread in threading.enumerate() if thread.name == "conversations"]


def test_it_works_inside_a_running_event_loop() -> None:
    """As in a notebook."""

    async def cell() -> Any:
        return AgentPolicy(says("a", "b", "c"), Echo).generate_actions(["you"], 1)

    assert asyncio.run(cell())[0][0].ended_by == "environment"


def test_no_thread_stays() -> None:
    before = threading.active_count()
    AgentPolicy(says(*"abcdef"), Echo).generate_actions(["you"], 2)
    _wait_for(lambda: threading.active_count() <= before)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_turns": 0}, "max_turns must be at least 1; got 0"),
        ({"max_tokens": 0}, "max_tokens must be at least 1; got 0"),
        ({"concurrency": 0}, "concurrency must be at least 1; got 0"),
        ({"timeout": 0.0}, r"timeout must be above 0; got 0\.0"),
        ({"turn_timeout": -1.0}, r"turn_timeout must be above 0; got -1\.0"),
        ({"make": 7}, "make must be a function"),
    ],
)
def test_wrong_settings_are_refused(options: dict[str, Any], message: str) -> None:
    policy = SimpleNamespace(tokenizer=None)
    with pytest.raises(ConfigError, match=message):
        AgentPolicy(policy, **{"make": Echo} | options)  # type: ignore[arg-type]


def test_tools_of_eight_conversations_are_called_at_the_same_time() -> None:
    """Each call waits until seven others are waiting."""
    together = threading.Barrier(8)

    class Waiting(Echo):
        def step(self, action: Any) -> Any:
            together.wait(timeout=60)
            return super().step(action)

    AgentPolicy(says(*["a"] * 48), Waiting).generate_actions(["you"], 16)
    assert not together.broken


def test_a_tokenizer_without_a_template_is_refused() -> None:
    with pytest.raises(ConfigError, match="the tokenizer must have a chat template"):
        ChatTemplate(chat_tokenizer(None))


def _wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


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
        reply = await chat.reply([{"role": "user", "content": "you"}], max_new_tokens=1 if state == "short" else 7)
        if state == "short":
            answered.set()
        return float(reply.num_tokens)

    def held() -> list[tuple[Any, Any]]:
        torch.manual_seed(0)
        rows = [row for [row] in AgentPolicy(policy, play).generate_actions(["short", "long"], 1)]
        return [(row.segments[0].token_ids, row.segments[0].log_probs) for row in rows]

    hook = policy.model.register_forward_pre_hook(wait) if loop == "generate" else None
    inner = policy.model.model.register_forward_pre_hook(wait) if loop == "own" else None
    found = held()
    for each in (hook, inner):
        if each is not None:
            each.remove()
    assert answered.is_set()
    assert num_forwards[0] >= 7
    real = policy.sample_tokens
    policy.sample_tokens = lambda *args, on_row=None, **options: real(*args, **options)
    assert held() == found, "the early turns are those of the whole batch"


def test_a_turn_that_takes_too_long_ends_its_conversation_and_says_so() -> None:
    policy = says(*"abcd")
    real, late, causes = policy.sample_tokens, threading.Event(), []

    def slow(*args: Any, **options: Any) -> Any:
        late.wait(20)
        return real(*args, **options)

    async def play(chat: Chat, state: Any) -> float:
        try:
            await chat([{"role": "user", "content": state}])
        except ConversationEnded as end:
            causes.append(end.ended_by)
            late.set()
            raise
        return 1.0

    policy.sample_tokens = slow
    agent = AgentPolicy(policy, play, turn_timeout=0.2, num_retries=1)
    ((row,),) = agent.generate_actions(["you"], 1)
    assert row.reward == 1.0, "held again"
    late.clear()
    sampled = AgentPolicy(policy, play, turn_timeout=0.2).sample_actions(["you"], 1)
    ((row,),) = sampled.actions
    assert (row.ended_by, sampled.metrics["agents/ended_by_timeout"]) == ("timeout", 1.0)
    assert causes == ["timeout"] * 2
    [told] = EnvironmentReward().explain_missing(["you"], [row])
    assert told == (
        "State 'you': the model sent no message within turn_timeout=0.2 s. Raise AgentPolicy(turn_timeout=...), or lower "
        "max_new_tokens or concurrency."
    )
