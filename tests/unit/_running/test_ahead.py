"""Which policy samples an iteration with `iterations_ahead`, and that threads change no number."""

import asyncio
import itertools
import math
import random
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch

from grpo import (
    GRPOConfig,
    GRPOTrainer,
    ObjectiveConfig,
    RewardConfig,
    WeightedRewards,
)
from grpo._running.ahead import seed_of
from grpo.engine import OneProcess
from grpo.errors import ConfigError, RewardError
from grpo.rewards import Call, call_in_process
from tests.support.checkpoint_runs import CountingNetwork, NoisyReward
from tests.support.policies import ExactSampling, TablePolicy, VectorPolicy, digest, weights_of
from tests.support.trainers import by_hand, without_time

pytestmark = pytest.mark.usefixtures("without_type_checks")


class Versioned(TablePolicy):
    """Notes after how many updates each iteration was sampled and each iteration was updated on."""

    def __init__(self) -> None:
        super().__init__(script=[[0, 1], [1, 0]])
        self.sampled_after: list[int] = []
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.num_updates = 0
        self.optimizer.register_step_post_hook(lambda *_: setattr(self, "num_updates", self.num_updates + 1))

    def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> Any:
        self.sampled_after.append(self.num_updates)
        return super().generate_actions(states, num_actions_per_state)


@pytest.mark.parametrize(
    ("ahead", "expected"),
    [
        (0, [0, 1, 2, 3, 4, 5]),
        (1, [0, 0, 1, 2, 3, 4]),  # iteration n by the policy after iteration n - 2
        (2, [0, 0, 0, 1, 2, 3]),
        (5, [0, 0, 0, 0, 0, 0]),
        (9, [0, 0, 0, 0, 0, 0]),
    ],
)
def test_the_rows_of_iteration_n_come_from_the_policy_after_iteration_n_minus_1_minus_k(
    ahead: int, expected: list[int]
) -> None:
    policy = Versioned()
    seen: list[int] = []
    config = {"iterations_ahead": ahead, "objective": ObjectiveConfig(sampler_correction="none")}
    trainer, _ = by_hand(policy=policy, config=config, optimizer=policy.optimizer)

    def states(iteration: int) -> list[str]:
        seen.append(iteration)
        return ["a", "b"]

    history = trainer.train(states, num_iterations=6, progress=False)
    assert policy.sampled_after == expected
    assert seen == [0, 1, 2, 3, 4, 5]
    assert len(history) == policy.num_updates == 6
    assert trainer.ahead.pending == []


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        # Advantages +-1/2, 4 rows. Iteration 0: 2 (1/2 1/2 1/2) / 4 = 1/8. The good action then has p = sigmoid(1/4).
        # Iteration 1 was sampled with 1/2, so the ratios are 2p and 2(1 - p), and the step is
        # (2p (1 - p) / 2 + 2(1 - p) p / 2) / 4 = p (1 - p) / 2.
        (None, 0.125 + 0.562177 * 0.437823 / 2),
        # Without the ratios: ((1 - p) / 2 + p / 2) / 4 = 1/8.
        ("none", 0.25),
    ],
)
def test_two_updates_by_hand_with_and_without_the_correction(correction: str | None, expected: float) -> None:
    config = {"iterations_ahead": 1, "objective": ObjectiveConfig(sampler_correction=correction)}
    trainer, policy = by_hand(config=config)
    history = trainer.train(["a", "b"], num_iterations=2, progress=False)
    # in state a action 0 is the better one, in state b (actions 1, 0; rewards 3, 4) it is action 0, too
    assert weights_of(policy).tolist() == pytest.approx([expected, -expected] * 2, abs=1e-6)
    ratios = [metrics.get("train/sampler_ratio_mean") for metrics in history]
    assert ratios == ([None, None] if correction else pytest.approx([1.0, 1.0], abs=1e-9))
    if correction is None:
        # the ratios 2p = 1.124354 and 2(1 - p) = 0.875646 have the mean square 1 + (2p - 1)^2 = 1.015464
        assert history[0]["train/effective_sample_size"] == pytest.approx(1.0)
        assert history[1]["train/effective_sample_size"] == pytest.approx(1 / 1.015464, abs=1e-6)


def run(
    policy: Callable[[], Any] = lambda: VectorPolicy(dropout=0.3),
    reward: Any = None,
    states: Any = None,
    num_iterations: int = 9,
    reward_config: RewardConfig | None = None,
    on_rewards: Callable[[], None] = lambda: None,
    **config: Any,
) -> Any:
    """A trainer after a run, its metrics without times, and a digest of the weights."""
    torch.manual_seed(0)
    made = policy()
    states = torch.randn(5, 3, generator=torch.Generator().manual_seed(5)) if states is None else states
    settings = {"group_size": 4, "num_states_per_iteration": 2, "learning_rate": 0.05, "seed": 3, **config}
    settings |= {} if reward_config is None else {"reward": reward_config}
    trainer = GRPOTrainer(config=GRPOConfig(**settings), policy=made, reward_model=reward or Slow())
    ask = trainer.collector.rewards_of

    def noted(*arguments: Any) -> Any:
        on_rewards()
        return ask(*arguments)

    trainer.collector.rewards_of = noted  # type: ignore[method-assign]
    history = trainer.train(states, num_iterations=num_iterations, progress=False)
    return trainer, [without_time(metrics) for metrics in history], digest(weights_of(made))


class Slow:
    """A reward whose time is random, and which notes its threads."""

    __name__ = "slow"

    def __init__(self, seconds: float = 0.003) -> None:
        self.seconds, self.threads = seconds, []
        self._clock = random.Random()

    def __call__(self, states: Any, actions: Any) -> list[float]:
        self.threads.append(threading.current_thread() is threading.main_thread())
        time.sleep(self.seconds * self._clock.random())
        return [float(np.sum(action) % 3 == row % 3) for row, action in enumerate(actions)]


LAGS = (1, 4, 16)
SETTINGS: dict[str, dict[str, Any]] = {
    "one update": {},
    "several updates": {"num_epochs_per_update": 2, "batch_size": 4},
    "replay": {"replay_iterations": 1},
    "exact sampler": {"policy": ExactSampling, "states": [0, 1, 2, 3], "num_epochs_per_update": 2},
}


@pytest.mark.filterwarnings("ignore:.*the first ratio is not 1:grpo.errors.GRPOWarning")
@pytest.mark.parametrize("name", SETTINGS)
def test_rewards_beside_the_updates_give_the_weights_of_one_thread(
    name: str, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    found = set()
    for ahead in LAGS if name == "one update" else LAGS[1:2]:
        with subtests.test(ahead=ahead):
            options = SETTINGS[name]
            reward, alone = Slow(), Slow(0.0)
            _, metrics, weights = run(reward=reward, num_iterations=6, iterations_ahead=ahead, **options)
            monkeypatch.setenv("GRPO_AHEAD_IN_ORDER", "1")
            _, expected_metrics, expected = run(reward=alone, num_iterations=6, iterations_ahead=ahead, **options)
            monkeypatch.setenv("GRPO_AHEAD_IN_ORDER", "0")
            assert weights == expected
            assert metrics == expected_metrics
            assert reward.threads == [True] + [False] * 5  # the first call tells whether the reward draws
            assert alone.threads == [True] * 6
            found.add(weights)
    assert len(found) == (3 if name == "one update" else 1)  # the lag decides


def test_without_iterations_ahead_no_second_thread_is_used() -> None:
    reward = Slow(0.0)
    run(reward=reward)
    assert reward.threads == [True] * 9


def one(states: Any, actions: Any) -> list[float]:
    return [float(action == 1) for action in actions]


async def in_turn(states: Any, actions: Any) -> list[float]:
    return one(states, actions)


def drawing(states: Any, actions: Any) -> list[float]:
    return [random.random() for _ in actions]


def drawing_from_numpy(states: Any, actions: Any) -> list[float]:
    return [np.random.random() for _ in actions]  # noqa: NPY002


def drawing_from_torch(states: Any, actions: Any) -> list[float]:
    return torch.rand(len(actions)).tolist()


IN_ORDER: dict[str, tuple[Callable[[], Any], str]] = {
    "python": (lambda: drawing, "drawing draws from the global random generators"),
    "numpy": (lambda: drawing_from_numpy, "drawing_from_numpy draws from the global random generators"),
    "torch": (lambda: drawing_from_torch, "drawing_from_torch draws from the global random generators"),
    "one of two parts": (lambda: WeightedRewards({"x": drawing, "y": one}), " draws from the global random generators"),
    "buffer": (lambda: CountingNetwork(0), "CountingNetwork.compute_rewards keeps a state"),
    "state of a part": (lambda: WeightedRewards({"x": CountingNetwork(0), "y": one}), " keeps a state"),
    "state of a function": (lambda: NoisyReward(0), "NoisyReward keeps a state"),
    "process": (lambda: one, "one starts processes"),
    "process of a part": (lambda: WeightedRewards({"x": in_turn, "y": one}), " starts processes"),
}


@pytest.mark.parametrize(
    ("name", "timeout"),
    [
        *((name, 60.0 if "process" in name else None) for name in IN_ORDER),
        ("python", 60.0),
        ("one of two parts", 60.0),
    ],
)
def test_a_reward_that_draws_keeps_a_state_or_forks_is_asked_in_order_and_one_line_says_so(
    name: str, timeout: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    make, said = IN_ORDER[name]
    threads: list[bool] = []
    trainer, _, weights = run(
        reward=make(),
        num_iterations=5,
        iterations_ahead=2,
        reward_config=RewardConfig(timeout=timeout),
        on_rewards=lambda: threads.append(threading.current_thread() is threading.main_thread()),
    )
    lines = [record.getMessage() for record in caplog.records if "iterations_ahead" in record.getMessage()]
    assert len(lines) == 1
    assert said in lines[0]
    assert "iterations_ahead=2 hides no time" in lines[0]
    assert threads == [True] * 5
    assert trainer.ahead.pending == []
    assert weights == run(reward=make(), num_iterations=5, iterations_ahead=2)[2]


@pytest.mark.parametrize("timeout", [None, 60.0])
def test_a_reward_without_draws_state_and_forks_is_asked_in_the_second_thread(
    timeout: float | None, caplog: pytest.LogCaptureFixture
) -> None:
    threads: list[bool] = []
    run(
        reward=WeightedRewards({"x": in_turn, "y": in_turn} if timeout else {"x": one, "y": Slow(0.0)}),
        num_iterations=4,
        iterations_ahead=2,
        reward_config=RewardConfig(timeout=timeout),
        on_rewards=lambda: threads.append(threading.current_thread() is threading.main_thread()),
    )
    assert threads == [True, False, False, False]
    assert not caplog.records


def test_a_reward_that_forks_only_later_is_asked_again_in_the_thread_that_may(caplog: pytest.LogCaptureFixture) -> None:
    """A fork beside an update could hang, and would set the random generators that the update draws from."""

    class Later:
        __name__ = "later"

        def __init__(self) -> None:
            self.forked_here: list[bool] = []
            self.num_calls = 0

        def __call__(self, states: Any, actions: Any) -> list[float]:
            self.num_calls += 1
            if self.num_calls == 1:
                return one(states, actions)
            answer = call_in_process([Call(name="one", function=one, arguments=(states, actions))], timeout=60.0)[0]
            self.forked_here.append(threading.current_thread() is threading.main_thread())
            return answer

    reward = Later()
    trainer, history, weights = run(reward=reward, num_iterations=6, iterations_ahead=2)
    lines = [record.getMessage() for record in caplog.records if "iterations_ahead" in record.getMessage()]
    assert len(lines) == 1
    assert "later starts processes" in lines[0]
    assert reward.forked_here == [True] * 5
    assert trainer.ahead.pending == []
    _, expected_history, expected = run(reward=one, num_iterations=6, iterations_ahead=2)
    assert (weights, history) == (expected, expected_history)
    call_in_process([Call(name="one", function=int)], timeout=60.0)  # any thread may, after the run


def test_step_collect_and_update_refuse_iterations_ahead() -> None:
    trainer, _ = by_hand(config={"iterations_ahead": 3})
    batch = by_hand()[0].collect(["a", "b"])
    for name, call in {
        "collect": lambda: trainer.collect(["a", "b"]),
        "update": lambda: trainer.update(batch),
    }.items():
        words = rf"config.iterations_ahead=3 samples .* {name}\(\) knows one iteration only. Call train\(\)"
        with pytest.raises(ConfigError, match=words):
            call()
    with pytest.raises(ConfigError, match="iterations_ahead=3"):
        trainer.step(["a", "b"])
    trainer.train(["a", "b"], num_iterations=1, progress=False)
    with pytest.raises(ConfigError, match="iterations_ahead=3"):
        trainer.step(["a", "b"])


def test_dynamic_sampling_and_iterations_ahead_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match=r"iterations_ahead=2 samples .* dynamic_sampling_rounds=1 waits .* set one"):
        GRPOConfig(iterations_ahead=2, dynamic_sampling_rounds=1)
    assert GRPOConfig(iterations_ahead=0, dynamic_sampling_rounds=1).iterations_ahead == 0


def test_a_failing_reward_is_raised_when_its_iteration_is_used() -> None:
    calls = []

    def third_fails(states: Any, actions: Any) -> list[float]:
        calls.append(threading.current_thread() is threading.main_thread())
        if len(calls) == 3:
            raise ValueError("no answer")
        return [0.0, 1.0, 2.0, 3.0]

    trainer, _ = by_hand(rewards=third_fails, config={"iterations_ahead": 1})
    with pytest.raises(RewardError, match="third_fails raised ValueError: no answer"):
        trainer.train(["a", "b"], num_iterations=9, progress=False)
    assert trainer.iteration == 2
    assert calls[:3] == [True, False, False]
    assert [thread.name for thread in threading.enumerate() if "later iterations" in thread.name] in ([], [NAME])


NAME = "rewards of later iterations"


def test_rows_that_fail_leave_their_group_and_the_iteration_that_uses_them_counts_them() -> None:
    calls = []

    def second_has_a_nan(states: Any, actions: Any) -> list[float]:
        calls.append(len(actions))
        return [math.nan if len(calls) == 2 else 5.0, 1.0, 2.0, 3.0]

    trainer, _ = by_hand(
        rewards=second_has_a_nan, config={"iterations_ahead": 2, "reward": RewardConfig(non_finite="drop")}
    )
    history = trainer.train(["a", "b"], num_iterations=4, progress=False)
    assert [metrics["rows/dropped"] for metrics in history] == [0.0, 1.0, 0.0, 0.0]
    assert [metrics["rewards/max"] for metrics in history] == [5.0, 3.0, 5.0, 5.0]


def test_seconds_that_are_hidden_and_waited_for_are_reported() -> None:
    def slow(states: Any, actions: Any) -> list[float]:
        time.sleep(0.05)
        return [0.0, 1.0, 2.0, 3.0]

    class SlowPolicy(TablePolicy):
        def get_log_probabilities(self, states: Any, actions: Any) -> Any:
            time.sleep(0.1 if torch.is_grad_enabled() else 0.0)
            return super().get_log_probabilities(states, actions)

    policy = SlowPolicy(script=[[0, 1], [1, 0]])
    trainer, _ = by_hand(rewards=slow, policy=policy, config={"iterations_ahead": 1})
    first, *others = trainer.train(["a", "b"], num_iterations=4, progress=False)
    assert first["time/waited"] >= 0.05  # the first call tells whether the reward draws
    assert first["time/hidden"] == 0.0
    for metrics in others:
        assert metrics["time/reward"] >= 0.05
        assert metrics["time/hidden"] > 0.0
        assert metrics["time/hidden"] == pytest.approx(metrics["time/reward"] - metrics["time/waited"])


@pytest.mark.parametrize("ahead", [1, 4])
def test_each_reward_is_computed_beside_the_update_before_it(ahead: int) -> None:
    """Each waits for the other to begin, which would never happen one after the other."""
    rewards, updates = ([threading.Event() for _ in range(6)] for _ in range(2))
    asked, updated = itertools.count(), itertools.count()

    def meeting(states: Any, actions: Any) -> list[float]:
        number = next(asked)
        rewards[number].set()
        assert number == 0 or updates[number - 1].wait(60)
        return [0.0, 1.0, 2.0, 3.0]

    class MeetingPolicy(TablePolicy):
        def get_log_probabilities(self, states: Any, actions: Any) -> Any:
            if torch.is_grad_enabled():
                number = next(updated)
                updates[number].set()
                assert number == 5 or rewards[number + 1].wait(60)
            return super().get_log_probabilities(states, actions)

    trainer, _ = by_hand(
        rewards=meeting, policy=MeetingPolicy(script=[[0, 1], [1, 0]]), config={"iterations_ahead": ahead}
    )
    trainer.train(["a", "b"], num_iterations=6, progress=False)
    assert (next(asked), next(updated)) == (6, 6)


def test_an_evaluation_never_asks_at_the_same_time_as_the_second_thread() -> None:
    inside, most = [0], [0]

    def counting(states: Any, actions: Any) -> list[float]:
        inside[0] += 1
        most[0] = max(most[0], inside[0])
        time.sleep(0.005)
        inside[0] -= 1
        return [float(action) for action in actions]

    trainer, _ = by_hand(rewards=counting, config={"iterations_ahead": 4})
    history = trainer.train(["a", "b"], num_iterations=8, eval_states=["a", "b"], eval_every=1, progress=False)
    assert most == [1]
    assert all("eval/avg_reward" in metrics for metrics in history)


def test_a_second_run_begins_with_the_policy_as_it_is_and_draws_other_numbers() -> None:
    drawn: list[Any] = []

    class Noting(TablePolicy):
        def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> Any:
            drawn.append(torch.rand(3).tolist())
            return super().generate_actions(states, num_actions_per_state)

    trainer, _ = by_hand(policy=Noting(script=[[0, 1], [1, 0]]), config={"iterations_ahead": 1, "seed": 5})
    before = torch.random.get_rng_state()
    trainer.train(["a", "b"], num_iterations=3, progress=False)
    trainer.train(["a", "b"], num_iterations=5, progress=False)
    assert len({tuple(numbers) for numbers in drawn}) == 5
    assert torch.equal(torch.random.get_rng_state(), before)  # sampling has generators of its own
    torch.manual_seed(seed_of(5, 3, 0))
    assert drawn[3] == torch.rand(3).tolist()


def test_every_seed_iteration_and_rank_has_random_numbers_of_its_own() -> None:
    seeds = {
        seed_of(seed, iteration, rank) for seed in (0, 1, 2**64 - 1) for iteration in range(5) for rank in range(4)
    }
    assert len(seeds) == 60
    assert seed_of(1, 2, 3) == seed_of(1, 2, 3)


def test_this_thread_tells_the_other_ranks_why_the_second_thread_takes_long() -> None:
    told: list[tuple[float, str, bool]] = []

    class Told(OneProcess):
        def waiting(self, seconds: float, reason: str) -> Any:
            told.append((seconds, reason, threading.current_thread() is threading.main_thread()))
            return nullcontext()

    calls = []

    def second_fails_once(states: Any, actions: Any) -> list[float]:
        calls.append(len(actions))
        if len(calls) == 2:
            raise ConnectionError("not now")
        return [0.0, 1.0, 2.0, 3.0]

    trainer, _ = by_hand(
        rewards=second_fails_once,
        config={"iterations_ahead": 1, "reward": RewardConfig(num_retries=1, retry_delay=0.8)},
        engine=Told(),
    )
    history = trainer.train(["a", "b"], num_iterations=3, progress=False)
    assert [metrics["rewards/retries"] for metrics in history] == [0.0, 1.0, 0.0]
    assert told
    for seconds, reason, is_main in told:
        assert 0.0 < seconds <= 0.8
        assert reason == "second_fails_once failed, and is called again later (reward.num_retries)"
        assert is_main


def test_a_first_call_that_exceeds_its_deadline_leaves_the_question_to_the_next_call() -> None:
    """A killed process leaves the generators anywhere, which says nothing about the reward."""
    threads = []
    late = [True]

    class Late:
        __name__ = "late"

        async def __call__(self, states: Any, actions: Any) -> list[float]:
            if late:
                late.clear()
                await asyncio.sleep(60.0)
            return [0.0, 1.0, 2.0, 3.0]

    trainer, _ = by_hand(
        rewards=Late(),
        config={
            "iterations_ahead": 2,
            "seed": 0,
            "reward": RewardConfig(timeout=0.05, num_retries=1, retry_delay=0.0),
        },
    )
    before = torch.random.get_rng_state()
    ask = trainer.collector.rewards_of

    def noted(*arguments: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return ask(*arguments)

    trainer.collector.rewards_of = noted  # type: ignore[method-assign]
    trainer.train(["a", "b"], num_iterations=4, progress=False)
    assert threads == [True, True, False, False]
    assert torch.equal(torch.random.get_rng_state(), before)
