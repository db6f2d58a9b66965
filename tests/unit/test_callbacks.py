"""Callbacks: when they are called, how they stop a run, and what a resumed run keeps of them."""

import math
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo import (
    CheckpointError,
    ConfigError,
    EarlyStopping,
    GRPOConfig,
    GRPOTrainer,
    GRPOWarning,
    KeepBestPolicy,
    TimeBudget,
    TrainingInterrupted,
)
from grpo.callbacks import Callbacks
from tests.support.imitated_ranks import ImitatedRank, on_ranks
from tests.support.policies import TablePolicy

QUIET: dict[str, Any] = {"progress": False}


def trainer_of() -> GRPOTrainer:
    return GRPOTrainer(
        config=GRPOConfig(group_size=4, seed=0, learning_rate=0.1),
        policy=TablePolicy(),
        reward_model=lambda states, actions: [float(action) for action in actions],
    )


class Recorder:
    """Notes every call, with the length of the history at that time."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.stop_at = stop_at

    def on_iteration(self, trainer: Any, metrics: Any) -> str | None:
        assert metrics is trainer.history[-1]
        self.calls.append(("iteration", trainer.iteration, len(trainer.history)))
        return "stop" if trainer.iteration == self.stop_at else None

    def on_evaluation(self, trainer: Any, metrics: Any) -> None:
        assert "eval/avg_reward" in metrics
        self.calls.append(("evaluation", trainer.iteration, len(trainer.history)))

    def on_checkpoint(self, trainer: Any, path: Path) -> None:
        assert (path / "manifest.json").exists()
        self.calls.append(("checkpoint", trainer.iteration, path.name))

    def on_interrupt(self, trainer: Any, error: BaseException) -> None:
        self.calls.append(("interrupt", trainer.iteration, type(error).__name__))


def test_callbacks_are_called_in_order(tmp_path: Path) -> None:
    recorder = Recorder()
    trainer_of().train(
        ["a", "b"],
        num_iterations=3,
        eval_states=["a"],
        eval_every=2,
        callbacks=[recorder],
        checkpoint_dir=tmp_path,
        checkpoint_every=3,
        **QUIET,
    )
    assert recorder.calls == [
        ("iteration", 1, 1),
        ("evaluation", 2, 2),
        ("iteration", 2, 2),
        ("checkpoint", 2, "iteration-00000002"),  # the best evaluation
        ("evaluation", 3, 3),
        ("iteration", 3, 3),
        ("checkpoint", 3, "iteration-00000003"),
    ]


def test_stop_ends_the_run_after_the_iteration_with_a_checkpoint(tmp_path: Path) -> None:
    first, second = Recorder(stop_at=2), Recorder()
    trainer = trainer_of()
    history = trainer.train(
        ["a", "b"],
        num_iterations=9,
        callbacks=[first, second],
        checkpoint_dir=tmp_path,
        checkpoint_every=9,
        **QUIET,
    )
    assert len(history) == trainer.iteration == 2
    assert first.calls == second.calls == [
        ("iteration", 1, 1), ("iteration", 2, 2), ("checkpoint", 2, "iteration-00000002"),
    ]  # fmt: skip
    resumed = trainer_of()
    assert len(resumed.train(["a", "b"], num_iterations=9, checkpoint_dir=tmp_path, resume="auto", **QUIET)) == 7


def test_an_evaluation_can_stop_the_run_too() -> None:
    class Stops:
        def on_evaluation(self, trainer: Any, metrics: Any) -> str:
            return "stop"

    history = trainer_of().train(
        ["a", "b"], num_iterations=9, eval_states=["a"], eval_every=4, callbacks=[Stops()], **QUIET
    )
    assert len(history) == 4


def test_an_interrupt_is_told_after_its_checkpoint_was_written(tmp_path: Path) -> None:
    class Interrupts(Recorder):
        def on_iteration(self, trainer: Any, metrics: Any) -> None:
            if trainer.iteration == 2:
                os.kill(os.getpid(), signal.SIGTERM)

        def on_interrupt(self, trainer: Any, error: BaseException) -> None:
            super().on_interrupt(trainer, error)
            self.calls.append(tuple(sorted(path.name for path in tmp_path.glob("iteration-*"))))

    recorder = Interrupts()
    with pytest.raises(TrainingInterrupted):
        trainer_of().train(["a", "b"], num_iterations=9, callbacks=[recorder], checkpoint_dir=tmp_path, **QUIET)
    assert recorder.calls[-2:] == [
        ("interrupt", 2, "TrainingInterrupted"), ("iteration-00000001", "iteration-00000002"),
    ]  # fmt: skip


def test_what_a_callback_raises_ends_the_run_and_a_resume_asks_it_again(tmp_path: Path) -> None:
    class Pruned(Exception):
        pass

    class Prunes(Recorder):
        def on_iteration(self, trainer: Any, metrics: Any) -> None:
            super().on_iteration(trainer, metrics)
            if trainer.iteration == 2:
                raise Pruned

    pruned = Prunes()
    trainer = trainer_of()
    with pytest.raises(Pruned):
        trainer.train(["a", "b"], num_iterations=4, callbacks=[pruned], checkpoint_dir=tmp_path, **QUIET)
    assert len(trainer.history) == 1
    recorder = Recorder()
    resumed = trainer_of()
    resumed.train(["a", "b"], num_iterations=4, callbacks=[recorder], checkpoint_dir=tmp_path, resume="auto", **QUIET)
    assert [call[:2] for call in recorder.calls if call[0] == "iteration"] == [
        ("iteration", 2), ("iteration", 3), ("iteration", 4),
    ]  # fmt: skip


def test_objects_that_are_no_callbacks_are_refused(subtests: pytest.Subtests) -> None:
    class Misspelled:
        def on_iterations(self, trainer: Any, metrics: Any) -> None: ...

    for value, message in [
        ([Misspelled()], r"Misspelled.on_iterations is never called. Did you mean on_iteration\?"),
        ([Misspelled], r"Misspelled is a class. Pass an object: Misspelled"),
        ([print], r"must have at least one of the methods on_iteration, on_evaluation, on_checkpoint, on_interrupt"),
    ]:
        with subtests.test(message=message), pytest.raises(ConfigError, match=message):
            trainer_of().train(["a"], num_iterations=1, callbacks=value, **QUIET)


def test_an_answer_other_than_stop_and_none_is_refused() -> None:
    class Says:
        def on_iteration(self, trainer: Any, metrics: Any) -> bool:
            return False

    with pytest.raises(ConfigError, match=r'Says.on_iteration must return "stop" or None; got bool False'):
        trainer_of().train(["a"], num_iterations=1, callbacks=[Says()], **QUIET)


def test_a_state_that_no_checkpoint_can_hold_is_refused_before_the_first_iteration(tmp_path: Path) -> None:
    class Unsavable(Recorder):
        def state_dict(self) -> dict[str, Any]:
            return {"function": print}

        def load_state_dict(self, state: Any) -> None: ...

    recorder = Unsavable()
    with pytest.raises(CheckpointError, match=r"callbacks"):
        trainer_of().train(["a"], num_iterations=1, callbacks=[recorder], checkpoint_dir=tmp_path, **QUIET)
    assert recorder.calls == []


# EarlyStopping


class Told:
    """A trainer at an iteration, for callbacks that are called by hand."""

    config = policy = None

    def __init__(self, iteration: int, policy: Any = None) -> None:
        self.iteration, self.policy = iteration, policy
        self.history: list[dict[str, float]] = []

    def save_checkpoint(self, path: Any) -> Path:
        raise AssertionError


def stops_at(callback: EarlyStopping, values: list[float]) -> int | None:
    """The number of the measurement after which the callback stops."""
    for number, value in enumerate(values, start=1):
        if callback.on_iteration(Told(number), {callback.metric: value}) == "stop":
            return number
    return None


def test_early_stopping_waits_for_its_patience(subtests: pytest.Subtests) -> None:
    for options, values, expected in [
        ({"patience": 2}, [1, 2, 2, 2, 3], 4),  # an equal value is not better
        ({"patience": 2}, [1, 0, 2, 1, 3, 2, 2.9], 7),
        ({"patience": 1}, [1, 2, 3, math.nan, 3], 5),  # NaN is no measurement
        ({"patience": 2, "mode": "min"}, [3, 2, 3, 1, 1, 1], 6),
        ({"patience": 2, "min_delta": 0.5}, [0, 0.25, 0.5, 0.75, 0.9], 5),  # .5 is better by .5; .75 and .9 are not
        ({"patience": 3}, [5, 4, 3], None),
    ]:
        with subtests.test(options=options, values=values):
            callback = EarlyStopping("metric", **options)  # type: ignore[arg-type]
            assert stops_at(callback, [float(value) for value in values]) == expected


def test_early_stopping_knows_the_best_value() -> None:
    callback = EarlyStopping("metric", patience=9)
    stops_at(callback, [1.0, 3.0, 2.0])
    assert (callback.best, callback.best_iteration, callback.num_since_best) == (3.0, 2, 1)


def test_iterations_without_the_metric_do_not_count() -> None:
    callback = EarlyStopping("eval/avg_reward", patience=1)
    assert all(callback.on_iteration(Told(number), {"rewards/mean": 0.0}) is None for number in range(9))
    assert callback.best is None


def test_a_metric_that_will_never_be_measured_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"EarlyStopping waits for eval/avg_reward, and this run has no evaluations"):
        trainer_of().train(["a"], num_iterations=1, callbacks=[EarlyStopping()], **QUIET)
    callbacks = [KeepBestPolicy("eval/avg_rewrd")]
    with pytest.raises(ConfigError, match=r"no 'eval/avg_rewrd'. Did you mean 'eval/avg_reward'"):
        trainer_of().train(["a"], num_iterations=1, eval_states=["a"], callbacks=callbacks, **QUIET)


def test_settings_of_early_stopping_are_checked(subtests: pytest.Subtests) -> None:
    for options, message in [
        ({"patience": 0}, "patience must be >= 1"),
        ({"min_delta": -1.0}, "min_delta must be >= 0"),
        ({"min_delta": math.inf}, "min_delta must be >= 0"),
    ]:
        with subtests.test(options=options), pytest.raises(ConfigError, match=message):
            EarlyStopping("metric", **options)  # type: ignore[arg-type]


def test_a_resumed_run_goes_on_counting(tmp_path: Path) -> None:
    """The metric never becomes better, and the run is resumed after two of three measurements without a better one."""

    def run(num_iterations: int) -> tuple[GRPOTrainer, EarlyStopping]:
        stopping, trainer = EarlyStopping("constant", patience=3), trainer_of()
        finished = trainer.finished
        trainer.finished = lambda rows: {**finished(rows), "constant": 1.0}  # type: ignore[method-assign]
        options: dict[str, Any] = {"checkpoint_dir": tmp_path, "resume": "auto", **QUIET}
        trainer.train(["a", "b"], num_iterations=num_iterations, callbacks=[stopping], **options)
        return trainer, stopping

    _, first = run(3)
    assert first.num_since_best == 2
    trainer, second = run(9)
    assert trainer.iteration == 4
    assert second.best_iteration == 1


def test_states_are_restored_by_class_and_number() -> None:
    saved = Callbacks([EarlyStopping("a"), KeepBestPolicy("b"), EarlyStopping("c")])
    state = saved.state_dict()
    assert list(state) == ["EarlyStopping", "KeepBestPolicy", "EarlyStopping 2"]
    for number, name in enumerate(state):
        state[name]["best"] = float(number)
    one, two, best = EarlyStopping("a"), EarlyStopping("c"), KeepBestPolicy("b")
    Callbacks([best, Recorder(), one, two]).load_state_dict(state)  # in another order, with another one between
    assert (one.best, best.best, two.best) == (0.0, 1.0, 2.0)


def test_a_callback_that_cannot_take_its_state_back_has_none() -> None:
    class Half(Recorder):
        def state_dict(self) -> dict[str, Any]:
            raise AssertionError

    assert Callbacks([Half()]).state_dict() == {}


def test_a_resume_with_other_callbacks_names_what_is_new_and_what_is_lost() -> None:
    state = Callbacks([EarlyStopping("a")]).state_dict()
    with pytest.warns(
        GRPOWarning, match=r"New: KeepBestPolicy\. Missing, so that their state is lost: EarlyStopping\."
    ):
        Callbacks([KeepBestPolicy("b")]).load_state_dict(state)
    Callbacks([KeepBestPolicy("b")]).load_state_dict({})  # a run without callbacks has no states to lose


def test_a_run_that_early_stopping_has_ended_stays_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"num_iterations": 9, "checkpoint_dir": tmp_path, "resume": "auto", **QUIET}

    def stopping(patience: int) -> list[Any]:
        return [EarlyStopping("group_stats/num_groups", patience=patience)]  # it never changes

    assert len(trainer_of().train(["a", "b"], callbacks=stopping(2), **options)) == 3
    assert "Stopped by EarlyStopping after iteration 3." in caplog.text
    again = trainer_of()
    with pytest.warns(GRPOWarning, match=r"EarlyStopping has ended the run already"):
        assert again.train(["a", "b"], callbacks=stopping(2), **options) == []
    assert len(trainer_of().train(["a", "b"], callbacks=stopping(4), **options)) == 2


# KeepBestPolicy


def test_the_best_weights_are_kept_and_restored(tmp_path: Path) -> None:
    best, trainer = KeepBestPolicy(), trainer_of()
    seen: list[tuple[float, torch.Tensor]] = []

    class Notes:
        def on_evaluation(self, trainer: Any, metrics: Any) -> None:
            seen.append((metrics["eval/avg_reward"], trainer.policy.logits.detach().clone()))

    options: dict[str, Any] = {"eval_states": ["a", "b"], "eval_every": 1, "checkpoint_dir": tmp_path, "resume": "auto"}
    trainer.train(["a", "b"], num_iterations=6, callbacks=[Notes(), best], **options, **QUIET)
    score, weights = max(seen, key=lambda pair: pair[0])
    assert best.best == score
    assert torch.equal(best.weights["logits"], weights)
    again = KeepBestPolicy()
    trainer_of().train(["a", "b"], num_iterations=7, callbacks=[Notes(), again], **options, **QUIET)
    assert again.best is not None
    assert again.best >= score
    if again.best == score:
        assert torch.equal(again.weights["logits"], weights)
    best.restore(trainer.policy)
    assert torch.equal(trainer.policy.logits, weights)
    assert best.weights["logits"].data_ptr() != trainer.policy.logits.data_ptr()


def test_weights_that_do_not_fit_or_do_not_exist_are_not_restored() -> None:
    best = KeepBestPolicy()
    with pytest.raises(ConfigError, match=r"eval/avg_reward was never measured. Pass eval_states"):
        best.restore(TablePolicy())
    best.on_iteration(Told(1, TablePolicy()), {"eval/avg_reward": 1.0})
    with pytest.raises(ConfigError, match=r"must have the parameters of the one that was trained"):
        best.restore(TablePolicy(num_actions=3))


def test_restored_weights_reach_a_separate_sampler() -> None:
    class Synced(TablePolicy):
        def sync_sampler(self) -> None:
            self.synced = self.logits.detach().clone()

    policy, best = Synced(), KeepBestPolicy("rewards/mean")
    best.on_iteration(Told(1, policy), {"rewards/mean": 1.0})
    with torch.no_grad():
        policy.logits += 1.0
    best.restore(policy)
    assert torch.equal(policy.synced, best.weights["logits"])


# TimeBudget


def test_a_run_ends_before_its_time_is_over(subtests: pytest.Subtests) -> None:
    """Iterations end at these seconds; the first one took 10, and the budget is 60 seconds."""
    for ends, expected in [
        ([10, 20, 30, 40, 50, 60], 6),  # 60 + 10 > 60, and 50 + 10 is not
        ([10, 20, 45, 50], 3),  # the longest took 25: 45 + 25 > 60
        ([10, 20, 30], None),
    ]:
        with subtests.test(ends=ends):
            clock = iter(ends)
            budget, stopped = TimeBudget(timedelta(minutes=1), clock=lambda clock=clock: float(next(clock))), None
            for number in range(1, len(ends) + 1):
                if budget.on_iteration(Told(number), {"time/iteration": 10.0}) == "stop":
                    stopped = number
                    break
            assert stopped == expected


def test_a_budget_that_is_no_time_is_refused(subtests: pytest.Subtests) -> None:
    for limit in (timedelta(0), timedelta(seconds=-1)):
        with subtests.test(limit=limit), pytest.raises(ConfigError, match=r"TimeBudget.limit must be a timedelta"):
            TimeBudget(limit)


# Several ranks


def test_stop_on_one_rank_stops_all_and_only_the_first_rank_records() -> None:
    """Random generators are shared by the threads, and only counts are compared."""

    class Notes:
        def __init__(self) -> None:
            self.iterations: list[int] = []

        def log(self, metrics: Any, iteration: int) -> None:
            self.iterations.append(iteration)

        def close(self) -> None: ...

    def run(engine: ImitatedRank) -> tuple[int, list[int], int]:
        sink, callback = Notes(), Recorder(stop_at=3 if engine.rank == 1 else None)
        trainer = GRPOTrainer(
            config=GRPOConfig(group_size=2),
            policy=TablePolicy(),
            reward_model=lambda states, actions: [float(action) for action in actions],
            engine=engine,
        )
        history = trainer.train(["a", "b"], num_iterations=9, sinks=[sink], callbacks=[callback], **QUIET)
        return len(history), sink.iterations, len(callback.calls)

    assert on_ranks(2, run) == [(3, [1, 2, 3], 3), (3, [], 3)]
