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
