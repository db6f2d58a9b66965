"""A reward that never answers: whatever it is, the call ends at its deadline, and leaves no process."""

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from adapters.llm.completions import Completion
from adapters.llm.rewards.completion_rewards import CompletionRewards
from grpo import RewardConfig, WeightedRewards
from grpo._rewarding.calls import RewardCalls
from grpo.errors import DeadlineError, RewardRaisedError, RewardTimeoutError
from grpo.rewards import call_in_process
from tests.support.reward_faults import asked, children, counts

TIMEOUT = 0.2
released = threading.Event()
"""Ends the call that blocks."""


def ones(states: Any, actions: Any) -> list[float]:
    return [1.0] * len(actions)


async def awaits(states: Any, actions: Any) -> None:
    await asyncio.sleep(3600)


async def blocks(states: Any, actions: Any) -> None:
    released.wait(60)


def sleeps(states: Any, actions: Any) -> None:
    time.sleep(3600)


def sleeps_for_bb(completion: str) -> float:
    return time.sleep(3600 if completion == "bb" else 0) or 1.0


async def awaits_for_bb(completion: str) -> float:
    return await asyncio.sleep(3600 if completion == "bb" else 0) or 1.0


class Judge(torch.nn.Linear):
    def compute_rewards(self, states: Any, actions: Any) -> None:
        time.sleep(3600)


HANGING: dict[str, tuple[Callable[[], Any], str]] = {
    "async": (lambda: awaits, "awaits"),
    "async that blocks": (lambda: blocks, "blocks"),
    "plain": (lambda: sleeps, "sleeps"),
    "reward model": (lambda: Judge(1, 1), "Judge.compute_rewards"),
    "part of a sum": (lambda: WeightedRewards({"ones": ones, "slow": sleeps}), "sleeps"),
    "async part of a sum": (lambda: WeightedRewards({"ones": ones, "slow": awaits}), "awaits"),
    "part of a part": (
        lambda: WeightedRewards({"inner": WeightedRewards({"slow": Judge(1, 1)})}),
        "Judge.compute_rewards",
    ),
    "row of completions": (lambda: CompletionRewards(sleeps_for_bb), "sleeps_for_bb at row 1"),
    "awaited row of completions": (lambda: CompletionRewards(awaits_for_bb), "awaits_for_bb at row 1"),
    "all completions": (lambda: CompletionRewards(sleeps), "sleeps"),
    "reward model of completions": (lambda: CompletionRewards({"model": Judge(1, 1)}), "Judge.compute_rewards"),
}


@pytest.mark.slow
def test_a_reward_that_never_answers_ends_at_its_deadline(subtests: pytest.Subtests) -> None:
    actions = [Completion(token_ids=(1,), text=text, finish_reason="end") for text in ("a", "bb", "ccc")]
    before = children()
    for kind, (make, name) in HANGING.items():
        with subtests.test(kind=kind):
            calls = RewardCalls(make(), RewardConfig(timeout=TIMEOUT), in_process=call_in_process)
            message = (
                rf"exceeded reward\.timeout=0\.2: {name} did not answer within 0\.2 s.* for rows 0 to 2, in 1 call"
            )
            with pytest.raises(RewardTimeoutError, match=message) as caught:
                calls(["p"] * 3, actions)
            assert isinstance(caught.value.__cause__, DeadlineError)
            assert children() == before
    released.set()


def test_timeouts_are_counted_retried_and_dropped() -> None:
    """The first call hangs, and a call with row 2 alone. The call after the first raises."""
    asked_for: list[int] = []

    async def reward(states: Any, actions: Any) -> list[float]:
        asked_for.append(len(actions))
        if len(asked_for) == 1 or [*actions] == [2]:
            await asyncio.sleep(3600)
        return [1.0] * len(actions) if len(asked_for) > 2 else 1 / 0

    found = asked(reward, timeout=0.5, num_retries=1, on_failure="drop")
    assert found.kept.tolist() == [True, True, False, True]
    assert found.metrics == counts(timeouts=2, failed_calls=3, retries=1, dropped=1)


def test_a_timeout_of_the_function_itself_is_no_timeout() -> None:
    def reward(states: Any, actions: Any) -> None:
        raise TimeoutError("server busy")

    with pytest.raises(RewardRaisedError, match="reward raised TimeoutError: server busy") as caught:
        asked(reward, timeout=60.0)
    assert not isinstance(caught.value, RewardTimeoutError)
    assert asked(Once(reward, ones), timeout=None, num_retries=1).metrics == counts(failed_calls=1, retries=1)


class Once:
    """Another reward in the first call."""

    def __init__(self, first: Any, rest: Any) -> None:
        self.rewards = [rest, first]

    def __call__(self, states: Any, actions: Any) -> Any:
        return (self.rewards.pop() if len(self.rewards) > 1 else self.rewards[0])(states, actions)
