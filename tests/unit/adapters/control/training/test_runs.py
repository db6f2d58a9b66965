"""Whole runs: when they evaluate, when they stop, and how an interrupted run resumes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.control import EnvironmentReward, LearningCurve, evaluate_policy, preset_for, train_control
from adapters.control.environments.episodes import episode_starts
from adapters.control.environments.pools import SerialPool
from adapters.control.training.evaluation import EVALUATION_SEED
from grpo import AdvantageConfig, GRPOConfig, GRPOTrainer
from grpo.errors import ConfigError
from grpo.sinks import Samples
from tests.support.control_environments import Chance, Watched
from tests.support.control_policies import policy_of


class Sink:
    """Records metrics, and interrupts the run after a number of iterations."""

    def __init__(self, interrupt_after: int = 10**9) -> None:
        self.metrics: list[tuple[int, dict[str, float]]] = []
        self.interrupt_after = interrupt_after

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.metrics.append((step, dict(metrics)))
        if len(self.metrics) >= self.interrupt_after:
            raise KeyboardInterrupt

    def close(self) -> None:
        pass


def trainer_of(environment: Any, **options: Any) -> GRPOTrainer:
    torch.manual_seed(2)
    policy = policy_of(environment, **{"hidden": (8,), "num_members": 4} | options)
    config = GRPOConfig(
        group_size=2, batch_size=16, num_epochs_per_update=2, seed=0, advantage=AdvantageConfig(scale="batch")
    )
    return GRPOTrainer(config=config, policy=policy, reward_model=EnvironmentReward())


def of_five_steps() -> GRPOTrainer:
    """20 steps per iteration: two groups of two episodes of five."""
    return trainer_of(lambda: Chance(5))


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
    target = evaluate_policy(
        of_five_steps().policy, num_episodes=3
    ).mean_return  # the actions do not matter, so it is always the same

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


@pytest.mark.slow
def test_a_resumed_run_gives_the_same_curve(tmp_path: Path) -> None:
    def run(folder: Path, sink: Sink) -> tuple[LearningCurve, GRPOTrainer]:
        trainer = trainer_of("CartPole-v1", normalize_observations=True)
        curve = train_control(
            trainer, episode_starts(2), total_steps=450, evaluate_every=150, folder=folder, sinks=[sink], **QUIET
        )
        return curve, trainer

    whole = Sink()
    unbroken, first = run(tmp_path / "unbroken", whole)
    evaluated = [place for place, (_, metrics) in enumerate(whole.metrics) if "eval/return" in metrics]
    assert len(evaluated) >= 3
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "broken", Sink(interrupt_after=evaluated[1]))  # between the first and the second evaluation
    again = Sink()
    resumed, second = run(tmp_path / "broken", again)
    assert again.metrics[0][0] == evaluated[0] + 2  # resumes after the first evaluation; iterations count from 1
    assert (resumed.steps, resumed.returns) == (unbroken.steps, unbroken.returns)
    for name, value in first.policy.state_dict().items():
        assert torch.equal(second.policy.state_dict()[name], value), name
    saved = json.loads((tmp_path / "broken" / "curve.json").read_text())
    del saved["settings"]
    assert LearningCurve(**saved) == resumed
    with pytest.raises(
        ConfigError, match=r"the settings must equal those of the run in .*; they differ. Use another folder"
    ):
        train_control(
            preset_for("CartPole-v1").make_trainer(first.policy, seed=123),
            episode_starts(2),
            total_steps=450,
            evaluate_every=150,
            folder=tmp_path / "broken",
            **QUIET,
        )
    assert resumed.seconds == sorted(resumed.seconds)


@pytest.mark.slow
def test_a_finished_run_does_not_continue_unless_more_steps_are_requested(tmp_path: Path) -> None:
    def run(**settings: Any) -> tuple[LearningCurve, Sink]:
        sink = Sink()
        curve = train_control(
            of_five_steps(), episode_starts(2), evaluate_every=50, folder=tmp_path, sinks=[sink], **QUIET, **settings
        )
        return curve, sink

    stopped, _ = run(total_steps=200, stop_at=-1.0)
    assert stopped.steps == [60]
    again, sink = run(total_steps=200, stop_at=-1.0)  # the target is already reached
    assert again == stopped
    assert sink.metrics == []
    longer, sink = run(total_steps=120)
    assert longer.steps == [60, 100, 120]
    assert len(sink.metrics) == 3
    assert run(total_steps=120)[1].metrics == []


def test_a_curve_that_is_ahead_of_the_checkpoint_is_cut_to_it(tmp_path: Path) -> None:
    """The curve is written first, so a run that ends between the two writes leaves one evaluation too many."""
    settings: dict[str, Any] = {"evaluate_every": 20, "folder": tmp_path, **QUIET}
    curve = train_control(of_five_steps(), episode_starts(2), total_steps=60, **settings)
    written = json.loads((tmp_path / "curve.json").read_text())
    for name, value in (("iterations", 4), ("steps", 80), ("returns", 9.0), ("seconds", 99.0)):
        written[name].append(value)
    (tmp_path / "curve.json").write_text(json.dumps(written))
    assert train_control(of_five_steps(), episode_starts(2), total_steps=60, **settings) == curve


@pytest.mark.slow
def test_the_best_checkpoint_has_the_highest_return(tmp_path: Path) -> None:
    trainer = trainer_of("CartPole-v1")
    curve = train_control(trainer, episode_starts(2), total_steps=500, evaluate_every=120, folder=tmp_path, **QUIET)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", "curve.json", "last"]
    last = {name: value.clone() for name, value in trainer.policy.state_dict().items()}
    trainer.load_checkpoint(tmp_path / "best")
    assert evaluate_policy(trainer.policy, num_episodes=3).mean_return == max(curve.returns)
    trainer.load_checkpoint(tmp_path / "last")
    for name, value in trainer.policy.state_dict().items():
        assert torch.equal(value, last[name])


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
