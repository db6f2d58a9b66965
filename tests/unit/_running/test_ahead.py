"""Which policy samples an iteration with `iterations_ahead`, and that threads change no number."""

import asyncio
import itertools
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from grpo import (
    AdvantageConfig,
    BeginsSampling,
    GRPOConfig,
    GRPOTrainer,
    KLControl,
    ObjectiveConfig,
    RewardConfig,
    SampledActions,
    TrainingInterrupted,
    WeightedRewards,
)
from grpo._running.ahead import seed_of
from grpo._running.background import Background, Task
from grpo.engine import OneProcess
from grpo.errors import ConfigError, ContractError, RewardError
from grpo.rewards import Call, call_in_process
from tests.support.checkpoint_runs import CountingNetwork, NoisyReward
from tests.support.policies import Critic, ExactSampling, TablePolicy, VectorPolicy, digest, weights_of
from tests.support.separate_sampler import Separate
from tests.support.trainers import by_hand, without_time

pytestmark = pytest.mark.usefixtures("without_type_checks")


class Versioned(TablePolicy):
    """Notes after how many updates each iteration was sampled and each iteration was updated on."""

    def __init__(self) -> None:
        super().__init__(script=[[0, 1], [1, 0]])
        self.sampled_after: list[int] = []
        self.optimizer, self.num_updates = torch.optim.SGD(self.parameters(), lr=0.1), 0
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
def test_the_rows_of_iteration_n_come_from_the_policy_after_iteration_n_minus_1_minus_k(ahead, expected) -> None:
    policy, seen = Versioned(), []
    config = {"iterations_ahead": ahead, "objective": ObjectiveConfig(sampler_correction="none")}
    trainer, _ = by_hand(policy=policy, config=config, optimizer=policy.optimizer)

    def states(iteration: int) -> list[str]:
        seen.append(iteration)
        return ["a", "b"]

    history = trainer.train(states, num_iterations=6, progress=False)
    assert (policy.sampled_after, seen) == (expected, [0, 1, 2, 3, 4, 5])
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


def is_main() -> bool:
    return threading.current_thread() is threading.main_thread()


def threads_of_rewards(trainer: GRPOTrainer) -> list[bool]:
    """Note, for each call of the reward from now on, whether the main thread makes it."""
    ask, threads = trainer.collector.rewards_of, []
    trainer.collector.rewards_of = lambda *arguments: (threads.append(is_main()), ask(*arguments))[1]  # type: ignore[method-assign]
    return threads


def run(
    model: Any = None, num_iterations: int = 9, policy: Any = VectorPolicy, states: Any = None, **config: Any
) -> tuple[GRPOTrainer, list[bool], Any, str]:
    """A trainer after a run, the threads of its rewards, its metrics without times, and a digest of the weights."""
    torch.manual_seed(0)
    made = policy(dropout=0.3) if policy is VectorPolicy else policy()
    states = torch.randn(5, 3, generator=torch.Generator().manual_seed(5)) if states is None else states
    settings = {"group_size": 4, "num_states_per_iteration": 2, "learning_rate": 0.05, "seed": 3, **config}
    trainer = GRPOTrainer(config=GRPOConfig(**settings), policy=made, reward_model=model or Slow())
    threads = threads_of_rewards(trainer)
    history = trainer.train(states, num_iterations=num_iterations, progress=False)
    return trainer, threads, [without_time(metrics) for metrics in history], digest(weights_of(made))


class Slow:
    """A reward whose time is random."""

    __name__ = "slow"

    def __init__(self, seconds: float = 0.003) -> None:
        self.seconds, self._clock = seconds, random.Random()

    def __call__(self, states: Any, actions: Any) -> list[float]:
        time.sleep(self.seconds * self._clock.random())
        return [float(np.sum(action) % 3 == row % 3) for row, action in enumerate(actions)]


@pytest.mark.filterwarnings("ignore:.*the first ratio is not 1:grpo.errors.GRPOWarning")
@pytest.mark.parametrize(
    ("ahead", "settings"),
    [
        *((ahead, {}) for ahead in (1, 4, 16)),
        (4, {"num_epochs_per_update": 2, "batch_size": 4}),
        (4, {"replay_iterations": 1}),
        (4, {"policy": ExactSampling, "states": [0, 1, 2, 3], "num_epochs_per_update": 2}),
    ],
)
def test_rewards_beside_the_updates_give_the_weights_of_one_thread(ahead, settings, monkeypatch: pytest.MonkeyPatch):
    settings = {"num_iterations": 6, "iterations_ahead": ahead, **settings}
    _, threads, *found = run(Slow(), **settings)
    monkeypatch.setenv("GRPO_AHEAD_IN_ORDER", "1")
    _, threads_in_order, *expected = run(Slow(0.0), **settings)
    assert found == expected
    assert threads == [True] + [False] * 5  # the first call tells whether the reward draws
    assert threads_in_order == [True] * 6


def test_without_iterations_ahead_no_second_thread_is_used() -> None:
    assert run(Slow(0.0))[1] == [True] * 9


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
    [*((name, 60.0 if "process" in name else None) for name in IN_ORDER), ("python", 60.0), ("one of two parts", 60.0)],
)
def test_a_reward_that_draws_keeps_a_state_or_forks_is_asked_in_order_and_one_line_says_so(name, timeout, caplog):
    make, said = IN_ORDER[name]
    options = {"num_iterations": 5, "iterations_ahead": 2}
    trainer, threads, _, weights = run(make(), reward=RewardConfig(timeout=timeout), **options)
    (line,) = [message for message in caplog.messages if "iterations_ahead" in message]
    assert said in line
    assert "iterations_ahead=2 hides no time" in line
    assert (threads, trainer.ahead.pending) == ([True] * 5, [])
    assert weights == run(make(), **options)[3]


@pytest.mark.parametrize("timeout", [None, 60.0])
def test_a_reward_without_draws_state_and_forks_is_asked_in_the_second_thread(timeout, caplog):
    parts = {"x": in_turn, "y": in_turn} if timeout else {"x": one, "y": Slow(0.0)}
    settings = {"num_iterations": 4, "iterations_ahead": 2, "reward": RewardConfig(timeout=timeout)}
    assert run(WeightedRewards(parts), **settings)[1] == [True, False, False, False]
    assert not caplog.records


def test_a_reward_that_forks_only_later_is_asked_again_in_the_thread_that_may(caplog: pytest.LogCaptureFixture) -> None:
    """A fork beside an update could hang, and would set the random generators that the update draws from."""
    forked_here, num_calls = [], itertools.count(1)

    def later(states: Any, actions: Any) -> list[float]:
        if next(num_calls) == 1:
            return one(states, actions)
        answer = call_in_process([Call(name="one", function=one, arguments=(states, actions))], timeout=60.0)[0]
        forked_here.append(is_main())
        return answer

    trainer, _, *found = run(later, num_iterations=6, iterations_ahead=2)
    (line,) = [message for message in caplog.messages if "iterations_ahead" in message]
    assert "later starts processes" in line
    assert (forked_here, trainer.ahead.pending) == ([True] * 5, [])
    assert found == [*run(one, num_iterations=6, iterations_ahead=2)[2:]]
    call_in_process([Call(name="one", function=int)], timeout=60.0)  # any thread may, after the run


def test_step_collect_and_update_refuse_iterations_ahead() -> None:
    trainer, _ = by_hand(config={"iterations_ahead": 3})
    batch = by_hand()[0].collect(["a", "b"])
    for name, call in {"collect": lambda: trainer.collect(["a", "b"]), "update": lambda: trainer.update(batch)}.items():
        words = rf"config.iterations_ahead=3 samples .* {name}\(\) knows one iteration only. Call train\(\)"
        with pytest.raises(ConfigError, match=words):
            call()
    for _ in range(2):
        with pytest.raises(ConfigError, match="iterations_ahead=3"):
            trainer.step(["a", "b"])
        trainer.train(["a", "b"], num_iterations=trainer.iteration + 1, progress=False)


def test_dynamic_sampling_and_iterations_ahead_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match=r"iterations_ahead=2 samples .* dynamic_sampling_rounds=1 waits .* set one"):
        GRPOConfig(iterations_ahead=2, dynamic_sampling_rounds=1)
    assert GRPOConfig(iterations_ahead=0, dynamic_sampling_rounds=1).iterations_ahead == 0


def test_a_failing_reward_is_raised_when_its_iteration_is_used() -> None:
    calls = []

    def third_fails(states: Any, actions: Any) -> list[float]:
        calls.append(is_main())
        if len(calls) == 3:
            raise ValueError("no answer")
        return [0.0, 1.0, 2.0, 3.0]

    trainer, _ = by_hand(rewards=third_fails, config={"iterations_ahead": 1})
    with pytest.raises(RewardError, match="third_fails raised ValueError: no answer"):
        trainer.train(["a", "b"], num_iterations=9, progress=False)
    assert (trainer.iteration, calls[:3]) == (2, [True, False, False])
    names = [thread.name for thread in threading.enumerate() if "later iterations" in thread.name]
    assert names in ([], ["rewards of later iterations"])


def test_seconds_that_are_hidden_and_waited_for_are_reported() -> None:
    def slow(states: Any, actions: Any) -> list[float]:
        time.sleep(0.05)
        return [0.0, 1.0, 2.0, 3.0]

    class SlowPolicy(TablePolicy):
        def get_log_probabilities(self, states: Any, actions: Any) -> Any:
            time.sleep(0.1 if torch.is_grad_enabled() else 0.0)
            return super().get_log_probabilities(states, actions)

    trainer, _ = by_hand(rewards=slow, policy=SlowPolicy(script=[[0, 1], [1, 0]]), config={"iterations_ahead": 1})
    first, *others = trainer.train(["a", "b"], num_iterations=4, progress=False)
    assert first["time/waited"] >= 0.05  # the first call tells whether the reward draws
    assert first["time/hidden"] == 0.0
    for metrics in others:
        assert metrics["time/reward"] >= 0.05
        assert metrics["time/hidden"] > 0.0
        assert metrics["time/hidden"] == pytest.approx(metrics["time/reward"] - metrics["time/waited"])


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
    seeds = {seed_of(*numbers) for numbers in itertools.product((0, 1, 2**64 - 1), range(5), range(4))}
    assert (len(seeds), seed_of(1, 2, 3)) == (60, seed_of(1, 2, 3))


def test_this_thread_tells_the_other_ranks_why_the_second_thread_takes_long() -> None:
    told, num_calls = [], itertools.count(1)

    class Told(OneProcess):
        def waiting(self, seconds: float, reason: str) -> Any:
            told.append((seconds, reason, is_main()))
            return nullcontext()

    def second_fails_once(states: Any, actions: Any) -> list[float]:
        if next(num_calls) == 2:
            raise ConnectionError("not now")
        return [0.0, 1.0, 2.0, 3.0]

    config = {"iterations_ahead": 1, "reward": RewardConfig(num_retries=1, retry_delay=0.8)}
    trainer, _ = by_hand(rewards=second_fails_once, config=config, engine=Told())
    history = trainer.train(["a", "b"], num_iterations=3, progress=False)
    assert [metrics["rewards/retries"] for metrics in history] == [0.0, 1.0, 0.0]
    reason = "second_fails_once failed, and is called again later (reward.num_retries)"
    assert {each[1:] for each in told} == {(reason, True)}
    assert all(0.0 < seconds <= 0.8 for seconds, *_ in told)


def test_a_first_call_that_exceeds_its_deadline_leaves_the_question_to_the_next_call() -> None:
    """A killed process leaves the generators anywhere, which says nothing about the reward."""
    late = [60.0]

    async def judge(states: Any, actions: Any) -> list[float]:
        if late:
            await asyncio.sleep(late.pop())
        return [0.0, 1.0, 2.0, 3.0]

    reward = RewardConfig(timeout=0.05, num_retries=1, retry_delay=0.0)
    trainer, _ = by_hand(rewards=judge, config={"iterations_ahead": 2, "seed": 0, "reward": reward})
    before, threads = torch.random.get_rng_state(), threads_of_rewards(trainer)
    trainer.train(["a", "b"], num_iterations=4, progress=False)
    assert threads == [True, True, False, False]
    assert torch.equal(torch.random.get_rng_state(), before)


# Rows that were sampled ahead have log-probs of the policy that sampled them, and scores of the policy that uses them


def noted_inputs(trainer: GRPOTrainer, note: Callable[[Any], Any]) -> list[Any]:
    """What `note` makes of the inputs of each loss from now on."""
    objective, noted = trainer.objective.of_sampled, []
    trainer.objective.of_sampled = lambda inputs: (noted.append(note(inputs)), objective(inputs))[1]  # type: ignore[method-assign]
    return noted


@pytest.mark.parametrize("tells_scores", [True, False])
def test_old_log_probs_are_those_at_the_start_of_the_iteration_that_uses_the_rows(tells_scores: bool) -> None:
    """In the first update of an iteration the ratio is 1; the behaviour log-probs are those of the policy of long ago."""
    policy = ExactSampling()
    policy.tells_scores = tells_scores
    config = {"iterations_ahead": 1, "group_size": 4, "num_epochs_per_update": 2, "seed": 0}
    trainer, _ = by_hand(policy=policy, rewards=lambda states, actions: [*map(float, map(len, actions))], config=config)
    seen = noted_inputs(trainer, lambda inputs: inputs)
    trainer.train([0, 1], num_iterations=3, progress=False)
    first, second, third = seen[::2]
    for inputs in (first, second, third):
        torch.testing.assert_close(inputs.old_log_probs[inputs.mask], inputs.log_probs.detach()[inputs.mask])
    torch.testing.assert_close(first.behaviour_log_probs[first.mask], first.old_log_probs[first.mask])
    for inputs in (second, third):
        assert (inputs.behaviour_log_probs - inputs.old_log_probs)[inputs.mask].abs().max() > 1e-3


def test_values_and_keys_are_those_at_the_start_of_the_iteration_that_uses_the_rows() -> None:
    class SamplingCritic(Critic, ExactSampling): ...

    settings = {"advantage": AdvantageConfig(credit="gae"), "objective": ObjectiveConfig(sampler_correction="none")}
    config = {"iterations_ahead": 1, "group_size": 2, "seed": 0, **settings}
    trainer, policy = by_hand(
        policy=SamplingCritic(), rewards=lambda states, actions: [1.0] * len(actions), config=config
    )
    seen = noted_inputs(trainer, lambda inputs: (inputs.old_values[:, 0], float(policy.value[0].detach())))
    trainer.train([0, 1], num_iterations=3, progress=False)
    assert len({now for _, now in seen}) == 3
    assert all(values.unique().tolist() == [now] for values, now in seen)


def test_reference_and_adaptive_coefficient_are_those_of_the_iteration_that_uses_the_rows() -> None:
    reference, scored_in = TablePolicy(), []
    score = reference.get_log_probabilities
    config = GRPOConfig(group_size=4, iterations_ahead=2, learning_rate=0.5, seed=0, kl_control=KLControl(target=1e-6))
    trainer = GRPOTrainer(
        config=config,
        policy=TablePolicy(),
        reward_model=lambda states, actions: [float(number % 2) for number in range(len(actions))],
        reference_policy=reference,
    )
    reference.get_log_probabilities = lambda *rows: (scored_in.append(trainer.iteration), score(*rows))[1]
    before = noted_inputs(trainer, lambda inputs: inputs.kl_coef)
    trainer.train(["a", "b"], num_iterations=4, progress=False)
    assert scored_in == [0, 1, 2, 3]  # at their sampling it would be 0, 0, 0, 1
    # the KL is 0 at first: 0.04 / 1.5. Then it is above its target: times 1.5. At their sampling it would be 0.04 three times.
    assert before == pytest.approx([0.04, 0.04 / 1.5, 0.04, 0.06], rel=1e-12)


# Tasks that a second thread does


def test_a_task_has_a_result_an_error_and_a_time() -> None:
    task = Task(lambda: time.sleep(0.02) or 5)
    assert not task.done()
    before = time.perf_counter()
    task.run()
    assert 0.02 <= task.seconds <= time.perf_counter() - before
    assert (task.result(), task.done(), task.exception()) == (5, True, None)
    failing = Task(lambda: 1 // 0)
    failing.run()
    assert failing.done()
    with pytest.raises(ZeroDivisionError):
        failing.result()
    assert Task.of("there").result() == "there"


def test_an_interrupt_of_this_thread_is_raised_at_once_and_the_task_is_not_done() -> None:
    task = Task(Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        task.run()
    assert not task.done()


@pytest.mark.parametrize("drops", [False, True])
def test_closing_ends_the_thread_after_the_current_task_or_after_all(drops: bool) -> None:
    background = Background("test of closing", in_order=False)
    begun, go = threading.Event(), threading.Event()

    def slow() -> int:
        begun.set()
        go.wait(5.0)
        return 1

    first, second = Task(slow), Task(lambda: 2)
    background.submit(first)
    background.submit(second)
    begun.wait(5.0)
    background.close(drops=drops, waits=False)
    assert not first.done()
    go.set()
    background.close(drops=drops, waits=True)
    assert first.result() == 1
    assert second.done() is not drops


def test_a_task_that_tries_to_exit_fails_and_the_next_is_done() -> None:
    background = Background("test of exits", in_order=False)
    background.wait()  # for nothing
    first, second = Task(Mock(side_effect=SystemExit(3))), Task(lambda: 2)
    background.submit(first)
    background.submit(second)
    background.wait()
    assert second.done()
    with pytest.raises(SystemExit):
        first.result()
    background.close(drops=False, waits=True)
    Background("unused", in_order=False).close(drops=True, waits=True)


STATES = [0, 1, 2, 3]


def reward(states: Any, actions: Any) -> list[float]:
    return [float(action[0] == 1 + state % 3) for state, action in zip(states, actions, strict=True)]


def trainer_of(ahead: int, policy: Any = None, **settings: Any) -> GRPOTrainer:
    torch.manual_seed(0)
    config = GRPOConfig(group_size=4, seed=0, iterations_ahead=ahead, learning_rate=0.05, **settings)
    return GRPOTrainer(config=config, policy=policy or Separate(), reward_model=reward)


def trained(ahead: int, num_iterations: int, **settings: Any) -> GRPOTrainer:
    trainer = trainer_of(ahead, **settings)
    trainer.train(STATES, num_iterations=num_iterations, progress=False)
    return trainer


def weights(trainer: GRPOTrainer) -> str:
    return digest(weights_of(trainer.policy))


def test_sampling_goes_on_beside_the_update_and_no_weights_are_copied_meanwhile() -> None:
    trainer = trainer_of(1)
    policy: Any = trainer.policy
    assert isinstance(policy, BeginsSampling)
    policy.before = lambda: time.sleep(0.02)
    trainer.train(STATES, num_iterations=4, progress=False)
    # version 1 is the first policy, version n + 1 the policy after n updates
    assert policy.events == [*("sync", "beside 1", "beside 1", "sync", "beside 2", "sync", "beside 3", "sync", "sync")]


@pytest.mark.parametrize("settings", [{}, {"num_epochs_per_update": 2, "batch_size": 8}], ids=["one", "several"])
@pytest.mark.parametrize("ahead", [1, 4, 16])
def test_the_weights_are_those_of_one_thread(ahead, settings, monkeypatch: pytest.MonkeyPatch) -> None:
    beside = trainer_of(ahead, **settings)
    beside.policy.before = lambda: time.sleep(0.004)
    metrics = beside.train(STATES, num_iterations=6, progress=False)
    monkeypatch.setenv("GRPO_AHEAD_IN_ORDER", "1")
    alone = trained(ahead, 6, **settings)
    assert weights(beside) == weights(alone)
    assert [*map(without_time, metrics)] == [*map(without_time, alone.history)]
    assert {event for event in alone.policy.events if event != "sync"} <= {f"main {n}" for n in range(9)}
    assert metrics[-1]["time/sample"] >= 0.004


@pytest.mark.parametrize(("ahead", "can_begin"), [(2, False), (0, True)])
def test_a_policy_that_cannot_begin_and_a_run_without_iterations_ahead_sample_between_the_updates(ahead, can_begin):
    trainer = trainer_of(ahead)
    trainer.policy.can_begin = can_begin
    trainer.train(STATES, num_iterations=3, progress=False)
    assert (set(trainer.policy.events), trainer.policy.calls["sample"]) == ({"sync"}, 3)


def test_behaviour_log_probs_are_required() -> None:
    class Silent(Separate):
        def begin_sampling(self, states: Any, num_actions_per_state: int) -> Callable[[], SampledActions]:
            sample = super().begin_sampling(states, num_actions_per_state)
            assert sample is not None
            return lambda: replace(sample(), behaviour_log_probs=None)

    with pytest.raises(ContractError, match=r"Silent.begin_sampling: the function must return behaviour_log_probs"):
        trainer_of(1, Silent()).train(STATES, num_iterations=2, progress=False)


@pytest.mark.parametrize("settings", [{}, {"num_epochs_per_update": 3}], ids=["one update", "several"])
def test_a_signal_during_sampling_waits_for_the_rows_and_the_resumed_run_ends_like_an_unbroken_one(settings, tmp_path):
    stopped = trainer_of(2, **settings)

    def slow_and_interrupted() -> None:
        if stopped.iteration == 2:
            stopped.policy.before = lambda: None
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)

    stopped.policy.before = slow_and_interrupted
    with pytest.raises(TrainingInterrupted):
        stopped.train(STATES, num_iterations=7, checkpoint_dir=tmp_path, checkpoint_every=100, progress=False)
    resumed = trainer_of(2, **settings)
    resumed.train(STATES, num_iterations=7, checkpoint_dir=tmp_path, resume="auto", progress=False)
    assert weights(resumed) == weights(trained(2, 7, **settings))


def test_sampling_that_fails_is_raised_and_the_checkpoint_says_what_is_missing(tmp_path: Path, caplog) -> None:
    trainer = trainer_of(1)

    def fails_later() -> None:
        if trainer.iteration == 2:
            raise ConnectionError("the server is gone")

    trainer.policy.before = fails_later
    with caplog.at_level(logging.WARNING), pytest.raises(ConnectionError, match="the server is gone") as caught:
        trainer.train(STATES, num_iterations=7, checkpoint_dir=tmp_path, checkpoint_every=2, progress=False)
    assert "could not be sampled" in "".join(caught.value.__notes__)
    assert sorted(path.name for path in tmp_path.iterdir())[-1] == "iteration-00000002"
    resumed = trainer_of(1)
    resumed.train(STATES, num_iterations=4, checkpoint_dir=tmp_path, resume="auto", progress=False)
    assert weights(resumed) == weights(trained(1, 4))
