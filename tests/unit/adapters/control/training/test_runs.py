"""Whole runs: when they evaluate, when they stop, and how an interrupted run resumes."""

import itertools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from adapters.control import (
    EnvironmentReward,
    EpisodeOptions,
    EpisodePolicy,
    FittedAdvantages,
    LearningCurve,
    evaluate_policy,
    train_control,
)
from adapters.control.environments.episodes import episode_starts
from adapters.control.environments.pools import SerialPool
from adapters.control.training.evaluation import EVALUATION_SEED
from grpo import AdvantageConfig, GRPOConfig, GRPOTrainer
from grpo.callbacks import EarlyStopping
from grpo.checkpoint import best_checkpoint
from grpo.errors import ConfigError, GRPOWarning
from grpo.sinks import Samples
from tests.support.control_environments import Chance, Watched
from tests.support.control_policies import policy_of
from tests.support.stopped_runs import Calls, by_exception, by_signal, stopped

pytestmark = pytest.mark.usefixtures("without_type_checks")


class Sink:
    """Records metrics."""

    def __init__(self) -> None:
        self.metrics: list[tuple[int, dict[str, float]]] = []

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.metrics.append((step, dict(metrics)))

    def close(self) -> None:
        pass


def trainer_of(
    environment: Any,
    *,
    normalize_observations: bool = False,
    num_steps: int | None = None,
    is_fitted: bool = False,
    **config: Any,
) -> GRPOTrainer:
    torch.manual_seed(2)
    options = {"normalize_observations": normalize_observations, "num_steps": num_steps}
    policy = policy_of(environment, hidden=(8,), num_members=4, **options)
    settings = {"group_size": 2, "batch_size": 16, "num_epochs_per_update": 2, "seed": 0} | config
    return GRPOTrainer(
        config=GRPOConfig(**settings, advantage=AdvantageConfig(scale="batch")),
        policy=policy,
        reward_model=EnvironmentReward(),
        advantages=FittedAdvantages(policy, gamma=0.9, num_features=10, num_kept=100) if is_fitted else None,
    )


def of_five_steps(**config: Any) -> GRPOTrainer:
    """20 steps per iteration: two groups of two episodes of five."""
    return trainer_of(lambda: Chance(5), **config)


QUIET: dict[str, Any] = {"progress": False, "num_eval_episodes": 3}


def test_evaluations_come_at_their_steps_and_at_the_end(subtests: pytest.Subtests) -> None:
    for total_steps, evaluate_every, evaluated_at in (
        (130, 50, [60, 100, 140]),  # due at 50 and 100, and at the end
        (100, 50, [60, 100]),
        (100, 1000, [100]),
        (60, 1, [20, 40, 60]),
        (1, 50, [20]),
    ):
        with subtests.test(total_steps=total_steps, evaluate_every=evaluate_every):
            sink, trainer = Sink(), of_five_steps()
            steps = {"total_steps": total_steps, "evaluate_every": evaluate_every}
            curve = train_control(trainer, episode_starts(2), sinks=[sink], **steps, **QUIET)
            assert curve.steps == evaluated_at
            assert trainer.iteration == evaluated_at[-1] // 20
            assert curve.iterations == [steps // 20 for steps in evaluated_at]
            assert [step for step, _ in sink.metrics] == list(range(1, trainer.iteration + 1))
            totals = [metrics["episodes/total_steps"] for _, metrics in sink.metrics]
            assert totals == [20 * step for step, _ in sink.metrics]
            logged = {20 * step: metrics["eval/return"] for step, metrics in sink.metrics if "eval/return" in metrics}
            assert logged == dict(zip(curve.steps, curve.returns, strict=True))
            assert curve.seconds == sorted(curve.seconds)
            assert curve.seconds[0] > 0.0


def test_numbers_of_steps_below_1_are_refused() -> None:
    for total_steps, evaluate_every, name in ((0, 1, "total_steps"), (1, 0, "evaluate_every")):
        with pytest.raises(ConfigError, match=f"{name} must be an integer >= 1; got int 0"):
            train_control(
                of_five_steps(), episode_starts(2), total_steps=total_steps, evaluate_every=evaluate_every, **QUIET
            )


def test_training_and_evaluation_use_their_own_starts() -> None:
    pool = Watched(SerialPool([Chance(5) for _ in range(4)]))
    trainer = trainer_of(pool)
    curve = train_control(trainer, episode_starts(2, seed=4), total_steps=20, evaluate_every=20, **QUIET)
    first, second = (start.seed for start in episode_starts(2, seed=4)(0))
    seeds = [start.seed for _, start in pool.begun]
    assert seeds == [first, first, second, second, *(EVALUATION_SEED + number for number in range(3))]
    assert curve.returns == [evaluate_policy(trainer.policy, num_episodes=3).mean_return]


def test_a_run_stops_when_an_evaluation_reaches_the_target() -> None:
    # the actions do not matter, so it is always the same
    target = evaluate_policy(of_five_steps().policy, num_episodes=3).mean_return

    def run(stop_at: float) -> LearningCurve:
        return train_control(
            of_five_steps(), episode_starts(2), total_steps=200, evaluate_every=50, stop_at=stop_at, **QUIET
        )

    assert run(target).steps == [60]
    assert run(target + 0.01).steps == [60, 100, 160, 200]


def test_a_learning_curve_finds_when_and_whether_a_threshold_is_reached() -> None:
    curve = LearningCurve(iterations=[1, 2, 3], steps=[10, 20, 30], returns=[1.0, 5.0, 3.0], seconds=[0.1, 0.2, 0.3])
    assert [curve.steps_to(threshold) for threshold in (0.5, 1.0, 1.1, 5.0, 5.1)] == [10, 10, 20, 20, None]
    assert [curve.ends_at(threshold) for threshold in (2.9, 3.0, 3.1, None)] == [True, True, False, False]
    assert not LearningCurve().ends_at(0.0)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "schedule": {"lr_schedule": "cosine", "warmup_ratio": 0.2},
    "ahead": {"iterations_ahead": 1, "lr_schedule": "linear"},
    "dynamic": {"dynamic_sampling_rounds": 2},
    "dynamic, with fitted values": {"dynamic_sampling_rounds": 2, "lr_schedule": "cosine", "is_fitted": True},
    "short iterations": {"num_steps": 20, "group_size": 1, "lr_schedule": "linear", "is_fitted": True},
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_run_that_was_stopped_ends_as_one_that_was_not(kind: str, tmp_path: Path, subtests: pytest.Subtests) -> None:
    """By a signal in an optimizer step, and by an error in a callback. Everything goes on: weights, curve, callbacks."""

    def run(
        folder: Path | None, phase: str = "callback", stop: Any = by_exception, at: int | None = None
    ) -> tuple[LearningCurve, GRPOTrainer, EarlyStopping]:
        trainer = trainer_of("CartPole-v1", normalize_observations=True, **SETTINGS[kind])
        stopping = EarlyStopping("eval/return", patience=99)
        callbacks = [stopping, *Calls(trainer, phase, stop, at).callbacks]
        options = {"total_steps": 250, "evaluate_every": 90, "folder": folder, "callbacks": callbacks}
        return train_control(trainer, episode_starts(2), **options, **QUIET), trainer, stopping

    expected, first, best = run(None)
    assert len(expected.steps) >= 3
    for phase, stop, at in (("step", by_signal, 8), ("callback", by_exception, 2)):
        with subtests.test(phase=phase):
            folder = tmp_path / phase
            with stopped():
                run(folder, phase, stop, at)
            curve, second, again = run(folder)
            for name in ("iterations", "steps", "returns"):
                assert getattr(curve, name) == getattr(expected, name)
            assert curve.seconds == sorted(curve.seconds)
            assert asdict(curve) == json.loads((folder / "curve.json").read_text())
            assert again.state_dict() == best.state_dict()
            for name, value in first.policy.state_dict().items():
                found = second.policy.state_dict()[name]  # with short iterations, also the episodes that go on
                assert torch.equal(found, value) if isinstance(value, torch.Tensor) else str(found) == str(value), name


def test_progress_is_steps_done_and_a_schedule_reads_it() -> None:
    """Four iterations of 20 steps, and a learning rate that falls to 0 over 80."""
    trainer = of_five_steps(lr_schedule="linear", learning_rate=1.0)
    train_control(trainer, episode_starts(2), total_steps=80, evaluate_every=80, **QUIET)
    rates = [metrics["train/learning_rate"] for metrics in trainer.history]
    assert rates == pytest.approx([1.0, 0.75, 0.5, 0.25])


def test_a_budget_counts_steps_of_the_environment_where_actions_are_repeated() -> None:
    """Two groups of two episodes of five steps: three decisions each, 20 steps in all."""
    torch.manual_seed(2)
    policy = policy_of(lambda: Chance(5), hidden=(4,), num_members=4, repeat=2)
    trainer = GRPOTrainer(config=GRPOConfig(group_size=2), policy=policy, reward_model=EnvironmentReward())
    curve = train_control(trainer, episode_starts(2), total_steps=40, evaluate_every=40, **QUIET)
    assert curve.steps == [40]
    assert [metrics["steps/mean"] for metrics in trainer.history] == [3, 3]


def test_groups_with_equal_rewards_are_replaced_and_their_steps_count() -> None:
    """All groups are dead: an iteration draws three times, and has 3 x 20 steps."""
    trainer = of_five_steps(dynamic_sampling_rounds=2)
    trainer.reward_model.compute_rewards = lambda states, actions: torch.zeros(len(actions), 5)
    pool: Any = trainer.policy.pool
    curve = train_control(trainer, episode_starts(2), total_steps=120, evaluate_every=200, **QUIET)
    assert curve.steps == [120]
    assert [metrics["group_stats/num_rounds"] for metrics in trainer.history] == [2, 2]
    assert trainer.progress.num_draws == 6
    assert pool is trainer.policy.pool


def test_a_run_that_reached_its_target_or_its_total_stays_ended_and_says_so(tmp_path: Path) -> None:
    def run(**settings: Any) -> LearningCurve:
        return train_control(
            of_five_steps(), episode_starts(2), evaluate_every=50, folder=tmp_path, **QUIET, **settings
        )

    stopped_early = run(total_steps=200, stop_at=-1.0)
    assert stopped_early.steps == [60]
    with pytest.warns(GRPOWarning, match="StopAt has ended the run already"):
        assert run(total_steps=200, stop_at=-1.0) == stopped_early
    longer = run(total_steps=120)
    assert longer.steps == [60, 100, 120]
    with pytest.warns(GRPOWarning, match=r"episodes/steps=120 is the total, .* nothing left to do"):
        assert run(total_steps=120) == longer


def test_the_folder_of_another_run_is_refused_by_name(tmp_path: Path, subtests: pytest.Subtests) -> None:
    def run(seed: int = 0, limit: int = 6, **environment: Any) -> LearningCurve:
        options = EpisodeOptions(hidden=(4,), max_episode_steps=limit)
        given = environment.pop("environment", "Pendulum-v1")
        policy = EpisodePolicy(given, num_members=2, options=options, **environment)
        trainer = GRPOTrainer(config=GRPOConfig(group_size=2), policy=policy, reward_model=EnvironmentReward())
        steps = {"total_steps": 12, "evaluate_every": 12, "num_eval_episodes": 1, "max_eval_steps": 6}
        return train_control(trainer, episode_starts(1, seed=seed), folder=tmp_path, progress=False, **steps)

    curve = run()
    for changed, words in (
        ({"g": 0.5}, r"make was \{\} and is \{'g': 0\.5\}"),
        ({"environment": lambda: gymnasium.make("Pendulum-v1", g=0.5)}, r"environment was Pendulum-v1 and is function"),
        ({"environment": "MountainCarContinuous-v0"}, "environment was Pendulum-v1 and is MountainCarContinuous-v0"),
        ({"seed": 3}, r"first starts was \['seed \d+'\] and is \['seed \d+'\]"),
        ({"limit": 5}, r"options was .*'max_episode_steps': 6.* and is .*'max_episode_steps': 5"),
        ({"distribution": "beta"}, "distribution was auto and is beta"),
    ):
        with subtests.test(words), pytest.raises(ConfigError, match=f"holds another run: .*{words}"):
            run(**changed)
    with pytest.warns(GRPOWarning, match="nothing left to do"):
        assert run(vectorization="sync") == curve


def test_an_environment_with_other_numbers_is_refused_by_name(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """An environment of one's own has no keywords that a folder could note. What counts instances is no setting."""
    count = itertools.count()

    class Scaled(gymnasium.RewardWrapper):
        def __init__(self, env: gymnasium.Env, scale: float) -> None:
            super().__init__(env)
            self.scale, self.number = scale, next(count)
            self.nothing, self.huge, self.phase = float("nan"), 10**400, np.complex64(1j)  # are not compared

        def reward(self, reward: Any) -> Any:
            return self.scale * reward

    def run(num_steps: int = 5, scale: float = 2.0) -> LearningCurve:
        trainer = trainer_of(lambda: Scaled(Chance(num_steps), scale))
        return train_control(
            trainer, episode_starts(2), total_steps=20, evaluate_every=20, folder=tmp_path / "run", **QUIET
        )

    curve = run()
    for changed, words in (
        ({"num_steps": 4}, r"Chance\.\w+ was 5 and is 4"),
        ({"scale": 3.0}, "Scaled.scale was 2 and is 3"),
    ):
        with subtests.test(words), pytest.raises(ConfigError, match=f"holds another run: {words}"):
            run(**changed)  # type: ignore[arg-type]
    with pytest.warns(GRPOWarning, match="nothing left to do"):
        assert run() == curve


def test_the_best_checkpoint_has_the_highest_return(tmp_path: Path) -> None:
    trainer = trainer_of("CartPole-v1")
    curve = train_control(trainer, episode_starts(2), total_steps=400, evaluate_every=100, folder=tmp_path, **QUIET)
    assert len(curve.returns) > 3
    assert sum(path.name.startswith("iteration-") for path in tmp_path.iterdir()) in (3, 4)
    trainer.load_checkpoint(best_checkpoint(tmp_path))
    assert evaluate_policy(trainer.policy, num_episodes=3).mean_return == max(curve.returns)


def test_a_budget_of_few_iterations_is_said(caplog: pytest.LogCaptureFixture) -> None:
    for total_steps, is_said in ((60, True), (20 * 20, False)):
        caplog.clear()
        train_control(of_five_steps(), episode_starts(2), total_steps=total_steps, evaluate_every=1000, **QUIET)
        found = [line for line in caplog.messages if line.startswith("train_control")]
        assert found == (
            [f"train_control: {total_steps} steps were only 3 iterations" + found[0].partition("iterations")[2]]
            if is_said
            else []
        )


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train_control(of_five_steps(), episode_starts(2), total_steps=40, evaluate_every=20, **QUIET)
    assert list(tmp_path.iterdir()) == []


def test_sinks_that_record_samples_get_the_episodes_of_each_iteration() -> None:
    class Recorder(Sink):
        def __init__(self) -> None:
            super().__init__()
            self.samples: list[tuple[int, str, int]] = []

        def log_samples(self, samples: Samples, iteration: int) -> None:
            self.samples.append((iteration, samples.kind, len(samples.rewards)))

    sink, trainer = Recorder(), of_five_steps()
    train_control(trainer, episode_starts(2), total_steps=40, evaluate_every=40, sinks=[sink], **QUIET)
    assert sink.samples == [(1, "train", 4), (2, "train", 4)]
    assert trainer.samples is None  # so that later iterations are not kept


def test_callbacks_see_each_iteration_and_stop_the_run() -> None:
    """An iteration has 2 x 2 episodes of five steps."""

    class Stops:
        def __init__(self) -> None:
            self.calls: list[str] = []

        def on_iteration(self, trainer: Any, metrics: Any) -> str | None:
            self.calls.append(f"iteration {trainer.iteration}")
            assert metrics is trainer.history[-1]
            return "stop" if trainer.iteration == 3 else None

        def on_evaluation(self, trainer: Any, metrics: Any) -> None:
            self.calls.append(f"evaluation {metrics['eval/return']}")

    callback, trainer = Stops(), of_five_steps()
    curve = train_control(trainer, episode_starts(2), total_steps=400, evaluate_every=40, callbacks=[callback], **QUIET)
    assert [call for call in callback.calls if call.startswith("iteration")] == [f"iteration {n}" for n in (1, 2, 3)]
    assert callback.calls[1] == f"evaluation {curve.returns[0]}"
    assert len(trainer.history) == 3
