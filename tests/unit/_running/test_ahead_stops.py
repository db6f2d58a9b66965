"""Runs with `iterations_ahead` that are stopped: what a checkpoint holds of the iterations that wait for their rewards."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo import GRPOConfig, GRPOTrainer, TrainingInterrupted
from grpo.checkpoint import read_checkpoint
from tests.support.checkpoint_runs import built
from tests.support.policies import VectorPolicy, digest, weights_of
from tests.support.stopped_runs import Unbroken, by_exception, by_signal

pytestmark = pytest.mark.usefixtures("without_type_checks")


@pytest.mark.parametrize("case", ["one iteration ahead, dropout", "ahead, reward with a state"])
@pytest.mark.filterwarnings("ignore:.*the first ratio is not 1:grpo.errors.GRPOWarning")
def test_a_stopped_run_ends_like_an_unbroken_run(case: str, subtests: pytest.Subtests, tmp_path: Path) -> None:
    unbroken = Unbroken(lambda seed: built(case, seed), num_iterations=5)
    for phase, at, stop in [
        ("reward", 2, by_signal),
        ("reward", 4, by_exception),
        ("loss", 2, by_exception),
        ("step", 3, by_signal),
        ("callback", 2, by_signal),
    ]:
        with subtests.test(phase=phase, at=at):
            unbroken.assert_same_after_a_stop(tmp_path / f"{phase} {at}", phase, at, stop)


def trainer_of(reward: Any) -> GRPOTrainer:
    torch.manual_seed(1)
    config = GRPOConfig(group_size=4, num_states_per_iteration=2, seed=1, iterations_ahead=3)
    return GRPOTrainer(config=config, policy=VectorPolicy(), reward_model=reward)


def trained(trainer: Any, **options: Any) -> GRPOTrainer:
    """Train, and return the trainer, or a new trainer with this reward."""
    trainer = trainer if isinstance(trainer, GRPOTrainer) else trainer_of(trainer)
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
    released = threading.Event()
    asked: list[Any] = []

    def fourth_hangs(states: Any, actions: Any) -> list[float]:
        asked.append(digest(list(actions)))
        if len(asked) == 4:
            released.wait(30.0)
        return quick(states, actions)

    def stop() -> None:
        while trainer.iteration < 3:
            time.sleep(0.002)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGTERM)

    trainer = trainer_of(fourth_hangs)
    threading.Thread(target=stop).start()
    start = time.monotonic()
    trained(trainer, checkpoint_dir=tmp_path)
    assert time.monotonic() - start < 5.0
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
    assert again[0] == asked[3]
    assert len(again) == 5
    assert digest(weights_of(resumed.policy)) == digest(weights_of(trained(quick).policy))


def test_finished_rewards_of_later_iterations_are_not_asked_for_again(tmp_path: Path) -> None:
    def stop(trainer: Any, metrics: Any) -> None:
        while not all(pending.answer.done() for pending in trainer.ahead.pending):
            time.sleep(0.002)
        if trainer.iteration == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    stopper = type("Stopper", (), {"on_iteration": staticmethod(stop)})()
    trainer = trained(quick, checkpoint_dir=tmp_path, callbacks=[stopper])
    assert [pending["answer"] is None for pending in trainer.state_dict()["parts"]["ahead"]["pending"]] == [
        False,
        False,
        False,
    ]
    asked = []

    def noting(states: Any, actions: Any) -> list[float]:
        asked.append(len(actions))
        return quick(states, actions)

    resumed = trained(noting, checkpoint_dir=tmp_path, resume="auto")
    assert len(asked) == 2  # of 8 iterations 3 were done and 3 had their rewards
    assert digest(weights_of(resumed.policy)) == digest(weights_of(trained(quick).policy))


def test_a_run_that_a_callback_ends_leaves_the_rest_and_a_new_run_begins_anew(tmp_path: Path) -> None:
    trainer = trained(quick, callbacks=[Ends()])
    assert trainer.iteration == 2
    assert len(trainer.ahead.pending) == 3
    assert not [thread for thread in threading.enumerate() if thread.name == "rewards of later iterations"]
    trainer.train(torch.zeros(2, 3), num_iterations=3, progress=False)
    assert trainer.ahead.pending == []
    assert trainer.iteration == 3


def test_a_run_that_goes_on_with_fewer_iterations_ahead_uses_what_was_sampled(tmp_path: Path) -> None:
    stopped = trained(quick, callbacks=[Ends()], checkpoint_dir=tmp_path)
    assert len(stopped.ahead.pending) == 3
    sampled: list[int] = []

    policy = VectorPolicy()
    generate = policy.generate_actions

    def noting(*arguments: Any) -> Any:
        sampled.append(trainer.iteration)
        return generate(*arguments)

    policy.generate_actions = noting  # type: ignore[method-assign]
    config = GRPOConfig(group_size=4, num_states_per_iteration=2, seed=1)
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=quick)
    with pytest.warns(match="iterations_ahead was 3 and is 0"):
        trainer.load_checkpoint(tmp_path)
    trainer.train(torch.zeros(5, 3), num_iterations=7, progress=False)
    assert trainer.iteration == 7
    assert sampled == [5, 6]  # iterations 2, 3 and 4 were sampled before
