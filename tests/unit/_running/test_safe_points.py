"""A run that is stopped at any call, by a signal or by an exception, continues to the same end as an unbroken run."""

import os
import random
import signal
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo import GRPOConfig, GRPOTrainer, TrainingInterrupted
from grpo.checkpoint import read_checkpoint
from tests.support.adapter_runs import RUNS
from tests.support.checkpoint_runs import CASES, built
from tests.support.policies import VectorPolicy, digest, weights_of
from tests.support.stopped_runs import PHASES, Unbroken, by_exception, by_signal

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*the first ratio is not 1:grpo.errors.GRPOWarning"),
    pytest.mark.filterwarnings("ignore:.*so there is nothing left to do:grpo.errors.GRPOWarning"),
    pytest.mark.usefixtures("without_type_checks"),
]


def assert_same_after_stops(unbroken: Unbroken, phases: Iterable[str], earliest: int, seed: str, folder: Path) -> None:
    """One stop in each phase, at a call that is drawn at random, by a signal or by an exception."""
    draw = random.Random(seed)
    for phase in phases:
        at, stop = draw.randint(earliest, unbroken.counts[phase]), draw.choice([by_exception, by_signal])
        unbroken.assert_same_after_a_stop(folder / f"{phase} {at} {stop.__name__}", phase, at, stop)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_run_stopped_at_any_call_continues_to_the_same_end(case, tmp_path: Path) -> None:
    unbroken = Unbroken(lambda seed: built(case, seed), num_iterations=4)
    assert_same_after_stops(unbroken, PHASES, 1, f"5 {case}", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_any_adapter_continues_to_the_same_end(name, tmp_path: Path) -> None:
    def quiet(seed):
        trainer, states, options = RUNS[name](seed)
        return trainer, states, {"progress": False, **options}

    assert_same_after_stops(Unbroken(quiet, num_iterations=3), ("reward", "loss", "step"), 2, f"7 {name}", tmp_path)


# Runs with `iterations_ahead` that are stopped: what a checkpoint holds of the iterations that wait for their rewards


@pytest.mark.parametrize("case", ["one iteration ahead, dropout", "ahead, reward with a state"])
@pytest.mark.parametrize(("phase", "at", "stop"), [
    ("reward", 2, by_signal), ("reward", 4, by_exception), ("loss", 2, by_exception), ("step", 3, by_signal),
    ("callback", 2, by_signal),
])  # fmt: skip
def test_a_stopped_run_ends_like_an_unbroken_run(case, tmp_path, phase, at, stop):
    unbroken = Unbroken(lambda seed: built(case, seed), num_iterations=5)
    unbroken.assert_same_after_a_stop(tmp_path / f"{phase} {at}", phase, at, stop)


def ahead_of(reward: Any) -> GRPOTrainer:
    torch.manual_seed(1)
    config = GRPOConfig(group_size=4, num_states_per_iteration=2, seed=1, iterations_ahead=3)
    return GRPOTrainer(config=config, policy=VectorPolicy(), reward_model=reward)


def trained(trainer: Any, **options: Any) -> GRPOTrainer:
    """Train, and return the trainer, or a new trainer with this reward."""
    trainer = trainer if isinstance(trainer, GRPOTrainer) else ahead_of(trainer)
    states = torch.randn(5, 3, generator=torch.Generator().manual_seed(5))
    try:
        trainer.train(states, num_iterations=8, progress=False, **options)
    except TrainingInterrupted:
        assert "checkpoint_dir" in options
    return trainer


class Ends:
    """A callback that ends a run after two iterations."""

    def on_iteration(self, trainer: Any, metrics: Any) -> str | None:
        return "stop" if trainer.iteration == 2 else None


def quick(states: Any, actions: Any) -> list[float]:
    return [float(action == 2) for action in actions]


def test_a_signal_during_a_hanging_reward_stops_at_once_and_finished_rewards_are_kept(tmp_path: Path) -> None:
    released, returned = threading.Event(), threading.Event()
    asked: list[Any] = []

    def fourth_hangs(states: Any, actions: Any) -> list[float]:
        asked.append(digest(list(actions)))
        if len(asked) == 4:
            released.wait(60.0)
            returned.set()
        return quick(states, actions)

    def stop() -> None:
        while trainer.iteration < 3:
            time.sleep(0.002)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGTERM)

    trainer = ahead_of(fourth_hangs)
    threading.Thread(target=stop).start()
    trained(trainer, checkpoint_dir=tmp_path)
    assert not returned.is_set()
    assert trainer.iteration == 3
    (newest,) = sorted(tmp_path.glob("iteration-00000003*"))
    saved = read_checkpoint(newest)["parts"]["ahead"]["pending"]
    # the signal came while iteration 3 waited for its rewards; the safe point was before the sampling of iteration 6
    assert [pending["answer"] is None for pending in saved] == [True, True, True]
    released.set()

    again: list[Any] = []

    def noting(states: Any, actions: Any) -> list[float]:
        again.append(digest(list(actions)))
        return quick(states, actions)

    resumed = trained(noting, checkpoint_dir=tmp_path, resume="auto")
    assert (again[0], len(again)) == (asked[3], 5)
    assert digest(weights_of(resumed.policy)) == digest(weights_of(trained(quick).policy))


def test_finished_rewards_of_later_iterations_are_not_asked_for_again(tmp_path: Path) -> None:
    def stop(trainer: Any, metrics: Any) -> None:
        while not all(pending.answer.done() for pending in trainer.ahead.pending):
            time.sleep(0.002)
        if trainer.iteration == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    stopper = type("Stopper", (), {"on_iteration": staticmethod(stop)})()
    trainer = trained(quick, checkpoint_dir=tmp_path, callbacks=[stopper])
    pending = trainer.state_dict()["parts"]["ahead"]["pending"]
    assert [each["answer"] is None for each in pending] == [False] * 3
    asked = []

    def noting(states: Any, actions: Any) -> list[float]:
        asked.append(len(actions))
        return quick(states, actions)

    resumed = trained(noting, checkpoint_dir=tmp_path, resume="auto")
    assert len(asked) == 2  # of 8 iterations 3 were done and 3 had their rewards
    assert digest(weights_of(resumed.policy)) == digest(weights_of(trained(quick).policy))


def test_a_run_that_a_callback_ends_leaves_the_rest_and_a_new_run_begins_anew(tmp_path: Path) -> None:
    trainer = trained(quick, callbacks=[Ends()])
    assert (trainer.iteration, len(trainer.ahead.pending)) == (2, 3)
    assert not [thread for thread in threading.enumerate() if thread.name == "rewards of later iterations"]
    trainer.train(torch.zeros(2, 3), num_iterations=3, progress=False)
    assert (trainer.ahead.pending, trainer.iteration) == ([], 3)


def test_a_run_that_goes_on_with_fewer_iterations_ahead_uses_what_was_sampled(tmp_path: Path) -> None:
    assert len(trained(quick, callbacks=[Ends()], checkpoint_dir=tmp_path).ahead.pending) == 3
    sampled, policy = [], VectorPolicy()
    generate = policy.generate_actions
    policy.generate_actions = lambda *arguments: (sampled.append(trainer.iteration), generate(*arguments))[1]
    config = GRPOConfig(group_size=4, num_states_per_iteration=2, seed=1)
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=quick)
    with pytest.warns(match="iterations_ahead was 3 and is 0"):
        trainer.load_checkpoint(tmp_path)
    trainer.train(torch.zeros(5, 3), num_iterations=7, progress=False)
    assert (trainer.iteration, sampled) == (7, [5, 6])  # iterations 2, 3 and 4 were sampled before
