"""`BeginsSampling` with `iterations_ahead`: sampling beside the updates, with weights of its own, changes no number."""

import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo import BeginsSampling, GRPOConfig, GRPOTrainer, SampledActions, TrainingInterrupted
from grpo.errors import ContractError
from tests.support.policies import digest, weights_of
from tests.support.separate_sampler import Separate
from tests.support.trainers import without_time

pytestmark = pytest.mark.usefixtures("without_type_checks")

STATES = [0, 1, 2, 3]


def reward(states: Any, actions: Any) -> list[float]:
    return [float(action[0] == 1 + state % 3) for state, action in zip(states, actions, strict=True)]


def trainer_of(ahead: int, policy: Any = None, **settings: Any) -> GRPOTrainer:
    torch.manual_seed(0)
    config = GRPOConfig(group_size=4, seed=0, iterations_ahead=ahead, learning_rate=0.05, **settings)
    return GRPOTrainer(config=config, policy=policy or Separate(), reward_model=reward)


def test_sampling_goes_on_beside_the_update_and_no_weights_are_copied_meanwhile() -> None:
    trainer = trainer_of(1)
    policy: Any = trainer.policy
    assert isinstance(policy, BeginsSampling)
    policy.before = lambda: time.sleep(0.02)
    trainer.train(STATES, num_iterations=4, progress=False)
    # version 1 is the first policy, version n + 1 the policy after n updates
    assert policy.events == [
        *("sync", "beside 1", "beside 1", "sync", "beside 2", "sync", "beside 3", "sync", "sync"),
    ]


@pytest.mark.parametrize("settings", [{}, {"num_epochs_per_update": 2, "batch_size": 8}], ids=["one", "several"])
def test_the_weights_are_those_of_one_thread(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for ahead in (1, 4, 16):
        beside = trainer_of(ahead, **settings)
        beside.policy.before = lambda: time.sleep(0.004)
        metrics = beside.train(STATES, num_iterations=6, progress=False)
        monkeypatch.setenv("GRPO_AHEAD_IN_ORDER", "1")
        alone = trainer_of(ahead, **settings)
        expected = alone.train(STATES, num_iterations=6, progress=False)
        monkeypatch.delenv("GRPO_AHEAD_IN_ORDER")
        assert digest(weights_of(beside.policy)) == digest(weights_of(alone.policy))
        assert [*map(without_time, metrics)] == [*map(without_time, expected)]
        assert {event for event in alone.policy.events if event != "sync"} <= {f"main {n}" for n in range(9)}
        assert metrics[-1]["time/sample"] >= 0.004


def test_a_policy_that_cannot_begin_samples_between_the_updates() -> None:
    trainer = trainer_of(2)
    trainer.policy.can_begin = False
    trainer.train(STATES, num_iterations=3, progress=False)
    assert set(trainer.policy.events) == {"sync"}
    assert trainer.policy.calls["sample"] == 3


def test_without_iterations_ahead_begin_sampling_is_not_called() -> None:
    trainer = trainer_of(0)
    trainer.train(STATES, num_iterations=2, progress=False)
    assert set(trainer.policy.events) == {"sync"}


def test_behaviour_log_probs_are_required() -> None:
    class Silent(Separate):
        def begin_sampling(self, states: Any, num_actions_per_state: int) -> Callable[[], SampledActions]:
            sample = super().begin_sampling(states, num_actions_per_state)
            assert sample is not None
            return lambda: replace(sample(), behaviour_log_probs=None)

    with pytest.raises(ContractError, match=r"Silent.begin_sampling: the function must return behaviour_log_probs"):
        trainer_of(1, Silent()).train(STATES, num_iterations=2, progress=False)


@pytest.mark.parametrize("settings", [{}, {"num_epochs_per_update": 3}], ids=["one update", "several"])
def test_a_signal_during_sampling_waits_for_the_rows_and_the_resumed_run_ends_like_an_unbroken_one(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    unbroken = trainer_of(2, **settings)
    unbroken.train(STATES, num_iterations=7, progress=False)

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
    assert digest(weights_of(resumed.policy)) == digest(weights_of(unbroken.policy))


def test_sampling_that_fails_is_raised_and_the_checkpoint_says_what_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
    unbroken = trainer_of(1)
    unbroken.train(STATES, num_iterations=4, progress=False)
    assert digest(weights_of(resumed.policy)) == digest(weights_of(unbroken.policy))
