"""Callbacks: when they are called, how they stop a run, and what a resumed run keeps of them."""

import math
import os
import signal
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo import CheckpointError, ConfigError, GRPOConfig, GRPOTrainer, GRPOWarning, TrainingInterrupted
from grpo.callbacks import Callbacks, EarlyStopping, KeepBestPolicy, TimeBudget
from tests.support.imitated_ranks import ImitatedRank, on_ranks
from tests.support.policies import TablePolicy


def trainer_of(**others: Any) -> GRPOTrainer:
    return GRPOTrainer(
        config=GRPOConfig(group_size=4, seed=None if others else 0, learning_rate=0.1),
        policy=TablePolicy(),
        reward_model=lambda states, actions: [float(action) for action in actions],
        **others,
    )


def train(*callbacks: Any, num_iterations: int = 1, trainer: GRPOTrainer | None = None, **options: Any) -> Any:
    """The history of a run with these callbacks."""
    arguments = {"num_iterations": num_iterations, "callbacks": [*callbacks], "progress": False, **options}
    return (trainer or trainer_of()).train(["a", "b"], **arguments)


class Recorder:
    """Notes every call, with the length of the history at that time."""

    def __init__(self, stop_at: int | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.stop_at = stop_at

    def on_start(self, trainer: Any) -> None:
        self.calls.append(("start", trainer.iteration, len(trainer.history)))

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
    run: dict[str, Any] = {"eval_states": ["a"], "eval_every": 2, "checkpoint_dir": tmp_path, "checkpoint_every": 3}
    train(recorder, num_iterations=3, **run)
    assert recorder.calls == [
        ("start", 0, 0), ("iteration", 1, 1), ("evaluation", 2, 2), ("iteration", 2, 2),
        ("checkpoint", 2, "iteration-00000002"),  # the best evaluation
        ("evaluation", 3, 3), ("iteration", 3, 3), ("checkpoint", 3, "iteration-00000003"),
    ]  # fmt: skip


def test_stop_ends_the_run_after_the_iteration_with_a_checkpoint(tmp_path: Path) -> None:
    first, second, trainer = Recorder(stop_at=2), Recorder(), trainer_of()
    history = train(first, second, num_iterations=9, trainer=trainer, checkpoint_dir=tmp_path, checkpoint_every=9)
    assert len(history) == trainer.iteration == 2
    assert first.calls == second.calls == [
        ("start", 0, 0), ("iteration", 1, 1), ("iteration", 2, 2), ("checkpoint", 2, "iteration-00000002"),
    ]  # fmt: skip
    assert len(train(num_iterations=9, checkpoint_dir=tmp_path, resume="auto")) == 7
    stops = SimpleNamespace(on_evaluation=lambda trainer, metrics: "stop")
    assert len(train(stops, num_iterations=9, eval_states=["a"], eval_every=4)) == 4


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
        train(recorder, num_iterations=9, checkpoint_dir=tmp_path)
    assert recorder.calls[-2:] == [
        ("interrupt", 2, "TrainingInterrupted"), ("iteration-00000001", "iteration-00000002"),
    ]  # fmt: skip


def test_what_a_callback_raises_ends_the_run_and_a_resume_asks_it_again(tmp_path: Path) -> None:
    class PrunedError(Exception):
        pass

    class Prunes(Recorder):
        def on_iteration(self, trainer: Any, metrics: Any) -> None:
            super().on_iteration(trainer, metrics)
            if trainer.iteration == 2:
                raise PrunedError

    trainer, recorder = trainer_of(), Recorder()
    with pytest.raises(PrunedError):
        train(Prunes(), num_iterations=4, trainer=trainer, checkpoint_dir=tmp_path)
    assert len(trainer.history) == 1
    train(recorder, num_iterations=4, checkpoint_dir=tmp_path, resume="auto")
    assert [call[1] for call in recorder.calls if call[0] == "iteration"] == [2, 3, 4]


class Misspelled:
    def on_iterations(self, trainer: Any, metrics: Any) -> None: ...


METHODS = "on_start, on_iteration, on_evaluation, on_checkpoint, on_interrupt"


@pytest.mark.parametrize(("call", "message"), [
    (lambda: train(Misspelled()), r"Misspelled.on_iterations is never called. Did you mean on_iteration\?"),
    (lambda: train(Misspelled), r"Misspelled is a class. Pass an object: Misspelled"),
    (lambda: train(print), rf"must have at least one of the methods {METHODS}"),
    (lambda: train(SimpleNamespace(on_iteration=lambda trainer, metrics: False)),
     'SimpleNamespace.on_iteration must return "stop" or None; got bool False'),
    (lambda: train(EarlyStopping()), "EarlyStopping waits for eval/avg_reward, and this run has no evaluations"),
    (lambda: train(KeepBestPolicy("eval/avg_rewrd"), eval_states=["a"]),
     r"no 'eval/avg_rewrd'. Did you mean 'eval/avg_reward'"),
    (lambda: EarlyStopping("metric", patience=0), "patience must be >= 1"),
    (lambda: EarlyStopping("metric", min_delta=-1.0), "min_delta must be >= 0"),
    (lambda: EarlyStopping("metric", min_delta=math.inf), "min_delta must be >= 0"),
    (lambda: TimeBudget(timedelta(0)), "TimeBudget.limit must be a timedelta"),
    (lambda: TimeBudget(timedelta(seconds=-1)), "TimeBudget.limit must be a timedelta"),
])  # fmt: skip
def test_what_is_no_callback_and_what_will_never_be_measured_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


def test_a_state_that_no_checkpoint_can_hold_is_refused_before_the_first_iteration(tmp_path: Path) -> None:
    recorder: Any = Recorder()
    recorder.state_dict, recorder.load_state_dict = lambda: {"function": print}, print
    with pytest.raises(CheckpointError, match=r"callbacks"):
        train(recorder, checkpoint_dir=tmp_path)
    assert recorder.calls == []


def test_nothing_of_a_callback_but_its_methods_is_read() -> None:
    """Other attributes and methods, and attributes with the name of a method that are none, are the callback's own."""

    class Episode(Recorder):
        on_evaluation = on_checkpoint = on_policy = True  # type: ignore[assignment]

        def should_stop(self) -> bool:
            raise AssertionError

        stop = ended = is_done = finished = has_ended = should_stop

    episode = Episode()
    assert len(train(episode, num_iterations=2, eval_states=["a"])) == 2
    assert episode.calls == [("start", 0, 0), ("iteration", 1, 1), ("iteration", 2, 2)]


def told(iteration: int, policy: Any = None) -> Any:
    """A trainer at an iteration, for callbacks that are called by hand."""
    return SimpleNamespace(iteration=iteration, policy=policy, config=None, history=[], save_checkpoint=print)


def stops_at(callback: EarlyStopping, values: list[float]) -> int | None:
    """The number of the measurement after which the callback stops."""
    for number, value in enumerate(values, start=1):
        if callback.on_iteration(told(number), {callback.metric: value}) == "stop":
            return number
    return None


@pytest.mark.parametrize(("options", "values", "expected"), [
    ({"patience": 2}, [1, 2, 2, 2, 3], 4),  # an equal value is not better
    ({"patience": 2}, [1, 0, 2, 1, 3, 2, 2.9], 7),
    ({"patience": 1}, [1, 2, 3, math.nan, 3], 5),  # NaN is no measurement
    ({"patience": 2, "mode": "min"}, [3, 2, 3, 1, 1, 1], 6),
    ({"patience": 2, "min_delta": 0.5}, [0, 0.25, 0.5, 0.75, 0.9], 5),  # .5 is better by .5; .75 and .9 are not
    ({"patience": 3}, [5, 4, 3], None),
])  # fmt: skip
def test_early_stopping_waits_for_its_patience(options: Any, values: list[float], expected: int | None) -> None:
    assert stops_at(EarlyStopping("metric", **options), [float(value) for value in values]) == expected


def test_early_stopping_knows_the_best_value_of_its_metric() -> None:
    callback = EarlyStopping("metric", patience=9)
    stops_at(callback, [1.0, 3.0, 2.0])
    assert (callback.best, callback.best_iteration, callback.num_since_best) == (3.0, 2, 1)
    callback = EarlyStopping("eval/avg_reward", patience=1)
    assert all(callback.on_iteration(told(number), {"rewards/mean": 0.0}) is None for number in range(9))
    assert callback.best is None


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
    half = SimpleNamespace(on_start=print, state_dict=lambda: pytest.fail("it is asked"))
    assert Callbacks([half]).state_dict() == {}


def test_a_resume_with_other_callbacks_names_what_is_new_and_what_is_lost() -> None:
    best, stops = KeepBestPolicy("b"), EarlyStopping("a")
    for saved, present, message in (
        ([stops], [best], r"New: KeepBestPolicy\. Missing, so that their state is lost: EarlyStopping\."),
        ([stops], [stops, best], r"New: KeepBestPolicy\. Missing, so that their state is lost: none\."),
        ([stops, best], [stops], r"New: none\. Missing, so that their state is lost: KeepBestPolicy\."),
    ):
        with pytest.warns(GRPOWarning, match=message):
            Callbacks(present).load_state_dict(Callbacks(saved).state_dict())
    Callbacks([KeepBestPolicy("b")]).load_state_dict({})  # a run without callbacks has no states to lose


def test_a_run_that_early_stopping_has_ended_stays_ended_and_a_resumed_run_goes_on_counting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The metric never changes."""
    options: dict[str, Any] = {"num_iterations": 9, "checkpoint_dir": tmp_path, "resume": "auto"}
    first, second, third = (EarlyStopping("group_stats/num_groups", patience=patience) for patience in (2, 2, 4))
    assert len(train(first, **options)) == 3
    assert "Stopped by EarlyStopping after iteration 3." in caplog.text
    with pytest.warns(GRPOWarning, match=r"EarlyStopping has ended the run already"):
        assert train(second, **options) == []
    assert len(train(third, **options)) == 2
    assert (third.best_iteration, third.num_since_best) == (1, 4)


def test_the_best_weights_are_kept_and_restored(tmp_path: Path) -> None:
    best, again, trainer = KeepBestPolicy(), KeepBestPolicy(), trainer_of()
    seen: list[tuple[float, torch.Tensor]] = []

    def note(trainer: Any, metrics: Any) -> None:
        seen.append((metrics["eval/avg_reward"], trainer.policy.logits.detach().clone()))

    notes = SimpleNamespace(on_evaluation=note)
    options: dict[str, Any] = {"eval_states": ["a", "b"], "eval_every": 1, "checkpoint_dir": tmp_path, "resume": "auto"}
    train(notes, best, num_iterations=6, trainer=trainer, **options)
    score, weights = max(seen, key=lambda pair: pair[0])
    assert best.best == score
    assert torch.equal(best.weights["logits"], weights)
    train(notes, again, num_iterations=7, **options)
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
    best.on_iteration(told(1, TablePolicy()), {"eval/avg_reward": 1.0})
    with pytest.raises(ConfigError, match=r"must have the parameters of the one that was trained"):
        best.restore(TablePolicy(num_actions=3))


def test_restored_weights_reach_a_separate_sampler() -> None:
    class Synced(TablePolicy):
        def sync_sampler(self) -> None:
            self.synced = self.logits.detach().clone()

    policy, best = Synced(), KeepBestPolicy("rewards/mean")
    best.on_iteration(told(1, policy), {"rewards/mean": 1.0})
    with torch.no_grad():
        policy.logits += 1.0
    best.restore(policy)
    assert torch.equal(policy.synced, best.weights["logits"])


@pytest.mark.parametrize(("ends", "expected"), [
    ([10, 20, 30, 40, 50, 60], 6),  # 60 + 10 > 60, and 50 + 10 is not
    ([10, 20, 45, 50], 3),  # the longest took 25: 45 + 25 > 60
    ([10, 20, 30], None),
])  # fmt: skip
def test_a_run_ends_before_its_time_is_over(ends: list[int], expected: int | None) -> None:
    """Iterations end at these seconds; the first one took 10, and the budget is 60 seconds."""
    clock = iter(ends)
    budget = TimeBudget(timedelta(minutes=1), clock=lambda: float(next(clock)))
    answers = (budget.on_iteration(told(number), {"time/iteration": 10.0}) for number in range(1, len(ends) + 1))
    assert next((number for number, answer in enumerate(answers, start=1) if answer == "stop"), None) == expected


@pytest.mark.parametrize("stopping", [0, 1])
def test_a_callback_that_one_rank_alone_has_stops_all_and_only_the_first_rank_records(stopping: int) -> None:
    """Random generators are shared by the threads, and only counts are compared."""

    def run(engine: ImitatedRank) -> tuple[int, list[int], int]:
        iterations: list[int] = []
        sink = SimpleNamespace(log=lambda metrics, iteration: iterations.append(iteration), close=lambda: None)
        recorder = Recorder(stop_at=3)
        callbacks = [recorder] if engine.rank == stopping else []
        history = train(*callbacks, num_iterations=9, trainer=trainer_of(engine=engine), sinks=[sink])
        return len(history), iterations, len(recorder.calls)

    calls = [4, 0] if stopping == 0 else [0, 4]
    assert on_ranks(2, run) == [(3, [1, 2, 3], calls[0]), (3, [], calls[1])]


def test_a_run_that_has_ended_on_one_rank_has_ended_on_all() -> None:
    class Ends:
        def __init__(self, rank: int) -> None:
            self.on_start = lambda trainer: "stop" if rank == 1 else None

    def run(engine: ImitatedRank) -> int:
        return len(train(Ends(engine.rank), num_iterations=2, trainer=trainer_of(engine=engine)))

    with pytest.warns(GRPOWarning, match=r"Ends has ended the run already"):
        assert on_ranks(2, run) == [0, 0]
