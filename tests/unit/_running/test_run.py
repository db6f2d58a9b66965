"""A run of many iterations: its total, its evaluations, its sinks, its best checkpoint, and what further calls continue."""

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from itertools import count, product
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo import (
    ActionScores,
    CheckpointError,
    ConfigError,
    GRPOConfig,
    GRPOTrainer,
    GRPOWarning,
    RewardConfig,
    Rewards,
    SampledActions,
    WeightedRewards,
    measure_policy,
)
from grpo._running.ahead import IN_ORDER
from grpo._running.run import beside_the_bar
from grpo._running.silent_parts import NUM_ITERATIONS, SilentParts
from grpo.callbacks import EarlyStopping
from grpo.checkpoint import best_checkpoint
from tests.support.checkpoint_runs import built, names_in
from tests.support.policies import TablePolicy
from tests.support.stopped_runs import Calls, assert_same_metrics, by_exception, by_signal, end_of, stopped
from tests.support.trainers import by_hand

pytestmark = pytest.mark.usefixtures("without_type_checks")


def test_train_reports_evaluations_to_history_and_sinks() -> None:
    seen: list[tuple[int, bool]] = []

    class Sink:
        def log(self, metrics: Any, iteration: int) -> None:
            seen.append((iteration, "eval/avg_reward" in metrics))

        def close(self) -> None:
            raise AssertionError("whoever opened the sink closes it")

    trainer, _ = by_hand(policy=TablePolicy(), rewards=lambda states, actions: [float(a) for a in actions])
    options = {"eval_states": ["a"], "eval_every": 2, "sinks": [Sink()], "progress": False}
    history = trainer.train(["a", "b"], num_iterations=5, **options)
    assert seen == [(1, False), (2, True), (3, False), (4, True), (5, True)]
    assert ["eval/avg_reward_std" in metrics for metrics in history] == [False, True, False, True, True]


@pytest.mark.parametrize(
    ("name", "value"), list(product(["num_iterations", "eval_every", "checkpoint_every", "keep_last"], [0, -1]))
)
def test_counts_below_1_are_refused_by_train(tmp_path, name, value):
    trainer, policy = by_hand()
    arguments: dict[str, Any] = {"num_iterations": 1, name: value}
    with pytest.raises(ConfigError, match=rf"{name} must be >= 1; got {value}"):
        trainer.train(["a", "b"], eval_states=["a"], checkpoint_dir=tmp_path, progress=False, **arguments)
    with pytest.raises(ConfigError, match=rf"num_actions_per_state must be >= 1; got {value}"):
        trainer.evaluate(["a", "b"], num_actions_per_state=value)
    assert policy.calls["generate"] == 0


def evaluated(folder: Path, *totals: int, scores: list[float], **options: Any) -> None:
    """A run, or further calls of `train`, whose evaluations after each iteration have these scores."""
    trainer, _ = by_hand()
    reports = iter([{"eval/avg_reward": score} for score in scores])
    trainer.evaluate = lambda states: next(reports)  # type: ignore[method-assign]
    options = {"eval_states": ["a"], "eval_every": 1, "checkpoint_every": 9, "keep_last": 9, **options}
    for total in totals:
        trainer.train(["a", "b"], num_iterations=total, checkpoint_dir=folder, progress=False, **options)


@pytest.mark.parametrize(
    ("scores", "best", "written", "keep_last"),
    [
        ([1.0, math.nan, 0.5, 0.75], 1, [1, 4], 1),
        ([math.nan, 1.0, 0.5, 0.75], 2, [2, 4], 9),
        ([0.5, math.nan, 1.0, math.nan], 3, [3, 4], 1),  # iteration 1 was written, and has left
        ([0.5, math.nan, 1.0, math.nan], 3, [1, 3, 4], 9),
        ([math.nan, -1.0, math.nan, -2.0], 2, [2, 4], 9),
    ],
)
def test_an_evaluation_that_is_nan_is_never_the_best(tmp_path, scores, best, written, keep_last):
    """Four evaluations: an iteration is written when it is better than all before, and the last one always."""
    evaluated(tmp_path, 4, scores=scores, keep_last=keep_last)
    assert names_in(tmp_path) == [f"iteration-{number:08d}" for number in written]
    assert best_checkpoint(tmp_path).name == f"iteration-{best:08d}"


def test_if_every_evaluation_is_nan_no_checkpoint_is_the_best(tmp_path: Path) -> None:
    evaluated(tmp_path, 2, scores=[math.nan] * 2)
    with pytest.raises(CheckpointError, match="No checkpoint with a score"):
        best_checkpoint(tmp_path)


@pytest.mark.parametrize("shows", [False, True])
def test_a_progress_bar_is_shown_if_requested(shows, capsys: pytest.CaptureFixture[str]) -> None:
    by_hand(config={"num_epochs_per_update": 2})[0].train(["a", "b"], num_iterations=2, progress=shows)
    shown = capsys.readouterr().err
    assert ("GRPO" in shown, "2/2" in shown) == (shows, shows)


@pytest.mark.parametrize("root_has_handlers", [True, False])
def test_a_line_of_the_log_is_printed_once_beside_the_bar(
    root_has_handlers, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler()] if root_has_handlers else [])
    with beside_the_bar():
        logging.getLogger("grpo").warning("a line")
    assert capsys.readouterr().err == "a line\n"


def test_an_evaluation_reports_the_parts_of_the_reward_and_the_number_of_steps() -> None:
    """Actions 0 1 | 1 1: `right` is 0 1 1 1; `long` applies to the second state only, and gives 4 and 6; two steps a row."""

    class TwoSteps(TablePolicy):
        def sample_actions(self, states: Any, num_actions_per_state: int) -> SampledActions:
            actions = self.generate_actions(states, num_actions_per_state)
            mask = torch.tensor([[True, True], [True, False], [True, False], [True, False]])
            return SampledActions(actions=actions, mask=mask)

        def score_actions(self, states: Any, actions: Any) -> ActionScores:
            log_probs = self.get_log_probabilities(states, actions).unsqueeze(1).expand(-1, 2)
            return ActionScores(log_probs=log_probs, mask=torch.ones(len(actions), 2, dtype=torch.bool))

    parts = {
        "right": lambda states, actions: [float(action) for action in actions],
        "long": lambda states, actions: [math.nan, math.nan, 4.0, 6.0],
    }
    rewards = WeightedRewards(parts, weights={"right": 1.0, "long": 0.5})
    policy = TwoSteps(script=[[0, 1], [1, 1]])
    trainer = GRPOTrainer(config=GRPOConfig(group_size=2), policy=policy, reward_model=rewards)
    expected = {
        "eval/avg_reward": pytest.approx((0 + 1 + 3 + 4) / 4),
        "eval/avg_reward_std": pytest.approx(math.sqrt((4 + 1 + 1 + 4) / 4)),
        "eval/right/mean": 0.75,
        "eval/long/mean": 5.0,
        "eval/steps_mean": 1.25,
    }
    assert trainer.evaluate(["a", "b"]) == expected
    measured = measure_policy(policy, ["a", "b"], rewards, num_actions_per_state=2, progress=False)
    assert (measured.metrics(), measured.num_steps.tolist()) == (expected, [[2, 1], [1, 1]])


def test_an_evaluation_is_over_the_rows_that_have_a_reward() -> None:
    """The rewards are NaN 0 | 2 4: rows, not states, have the same weight. `part` applies to the second state only."""

    def reward(states: Any, actions: Any) -> Rewards:
        part = torch.tensor([9.0, math.nan, 1.0, 2.0])
        return Rewards(values=torch.tensor([math.nan, 0.0, 2.0, 4.0]), components={"part": part})

    policy, settings = TablePolicy(script=[[0, 1], [1, 1]]), RewardConfig(non_finite="drop")
    trainer = GRPOTrainer(config=GRPOConfig(group_size=2, reward=settings), policy=policy, reward_model=reward)
    measured = measure_policy(policy, ["a", "b"], reward, num_actions_per_state=2, reward=settings, progress=False)
    expected = {"eval/avg_reward": 2.0, "eval/avg_reward_std": math.sqrt(8 / 3), "eval/part/mean": 1.5}
    assert trainer.evaluate(["a", "b"]) == measured.metrics() == pytest.approx(expected)
    assert [answer.reward for answer in measured.answers] == [0.0, 2.0]  # the first one of each state


@pytest.mark.parametrize(
    "case",
    [
        "epochs of batches",
        "reference, running baseline, reward with a state and scheduler of the caller",
        "random numbers in scoring",
        "loss scaler",
        "evaluated",
        "replay",
        "dynamic sampling",
        "reference that follows, adaptive KL",
        "steps drawn at random",
    ],
)
def test_two_calls_are_one_run(case):
    """Three iterations and three more equal six, to the last bit: weights, all parts, metrics, generators."""
    whole, states, options = built(case, seed=1)
    expected = whole.train(states, num_iterations=6, **options)
    end = end_of(whole)
    trainer, states, options = built(case, seed=1)
    first = trainer.train(states, num_iterations=3, **options)
    assert_same_metrics([*first, *trainer.train(states, num_iterations=6, **options)], expected)
    assert (len(expected), trainer.iteration, end_of(trainer)) == (6, 6, end)


def test_a_call_at_the_total_says_what_to_pass() -> None:
    trainer, policy = by_hand()
    trainer.train(["a", "b"], num_iterations=3, progress=False)
    for total, larger in [(3, 6), (2, 5)]:
        words = (
            rf"={total} is the total, and the trainer is at iteration 3\. Pass a larger total: num_iterations={larger}"
        )
        with pytest.raises(ConfigError, match=rf"num_iterations{words} makes {total} further iterations\."):
            trainer.train(["a", "b"], num_iterations=total, progress=False)
    assert (trainer.iteration, policy.calls["generate"]) == (3, 3)
    assert len(trainer.train(["a", "b"], num_iterations=4, progress=False)) == 1


def test_with_resume_a_call_at_the_total_has_nothing_left_to_do(tmp_path: Path) -> None:
    """A job that is started again after its end is no error."""
    options: dict[str, Any] = {"num_iterations": 3, "checkpoint_dir": tmp_path, "resume": "auto", "progress": False}
    by_hand()[0].train(["a", "b"], **options)
    names = names_in(tmp_path)
    trainer, policy = by_hand()
    words = "num_iterations=3 is the total, and the trainer is at iteration 3, so there is nothing left to do. Raise"
    with pytest.warns(GRPOWarning, match=words):
        assert trainer.train(["a", "b"], **options) == []
    assert (trainer.iteration, policy.calls["generate"], names_in(tmp_path)) == (3, 0, names)


def drawn_by(states: Any, *totals: int, **how: Any) -> list[list[Any]]:
    """The states of each iteration, in one call of `train` for each total. Two states make an iteration."""
    seen: list[list[Any]] = []

    def reward(states: Any, actions: Any) -> list[float]:
        seen.append(list(states)[::2])
        return [float(action) for action in actions]

    policy = TablePolicy("abcdef")
    trainer, _ = by_hand(policy=policy, rewards=reward, config={"num_states_per_iteration": 2, "seed": 1})
    for total in totals:
        trainer.train(states, num_iterations=total, progress=False, **how)
    return seen


class Letters:
    def __iter__(self) -> Iterator[str]:
        return iter("abcdef")


@pytest.mark.parametrize(
    "states",
    [
        lambda: list("abcdef"),
        lambda: lambda iteration: list("abcdef"[2 * iteration : 2 * iteration + 2]),
        lambda: iter("abcdef"),
        Letters,
    ],
    ids=["list", "sampler", "iterator", "iterable"],
)
def test_a_further_call_draws_the_states_after_those_of_the_first(states) -> None:
    """Each state once in three iterations of a list. A sampler is asked for the next iteration, and an iterator goes on. What
    can be iterated again skips the states that were drawn, as after a checkpoint."""
    in_two = drawn_by(states(), 1, 3)
    assert in_two == drawn_by(states(), 3)
    assert sorted(letter for drawn in in_two for letter in drawn) == list("abcdef")


def test_passes_over_the_states_are_a_total_too() -> None:
    """Six states, two in each iteration: three iterations are a pass."""
    trainer, _ = by_hand(policy=TablePolicy(), rewards=[0.0] * 4, config={"num_states_per_iteration": 2})
    states = ["a", "b"] * 3
    assert [len(trainer.train(states, num_epochs=epochs, progress=False)) for epochs in (1, 1.5)] == [3, 2]
    with pytest.raises(ConfigError, match="num_iterations=5 is the total"):
        trainer.train(states, num_epochs=1.5, progress=False)


@pytest.mark.parametrize("schedule", [{"lr_schedule": "cosine"}, {"lr_schedule": "linear"}, {"warmup_ratio": 0.5}, {}])
def test_another_total_under_a_schedule_is_a_warning_that_names_both(schedule: dict[str, Any], tmp_path: Path) -> None:
    message = r"num_iterations was 2 and is 4, and config\.lr_schedule=.* learning rate"
    trainer, _ = by_hand(config=schedule)
    trainer.train(["a", "b"], num_iterations=2, checkpoint_dir=tmp_path, progress=False)
    loaded, _ = by_hand(config=schedule)
    loaded.load_checkpoint(tmp_path)
    for one in (trainer, loaded):
        with pytest.warns(GRPOWarning, match=message) if schedule else nullcontext():  # where a warning is an error
            assert len(one.train(["a", "b"], num_iterations=4, progress=False)) == 2


@pytest.mark.parametrize(("phase", "at", "iteration"), [("step", 6, 1), ("callback", 2, 2)])
def test_a_further_call_gives_up_what_the_first_call_left_unfinished(phase, at, iteration):
    """Stopped in the second iteration: after the first of its updates, it is made anew; if only its record is missing, it
    counts."""
    trainer, states, options = built("epochs of batches", seed=1)
    calls = Calls(trainer, phase, by_exception, at=at)
    with stopped():
        trainer.train(states, num_iterations=4, callbacks=calls.callbacks, **options)
    assert trainer.iteration == iteration
    assert (trainer.in_progress.rows is not None) == (phase == "step")
    assert (trainer.progress.unrecorded is not None) == (phase == "callback")
    history = trainer.train(states, num_iterations=4, **options)
    assert (trainer.iteration, len(history)) == (4, 4 - iteration)
    assert [metrics["train/num_updates"] for metrics in history] == [4.0] * len(history)


def test_a_refused_total_leaves_a_loaded_run_loaded(tmp_path: Path) -> None:
    """The loaded run is in the middle of an iteration, which the next call finishes."""
    stopped = by_hand(config={"num_epochs_per_update": 2})[0]
    stopped.step(["a", "b"])
    rows = stopped.prepared(stopped.collect(["a", "b"]))
    stopped.in_progress.rows = rows
    next(iter(rows.updates()))
    stopped.save_checkpoint(tmp_path / "here")
    trainer = by_hand(config={"num_epochs_per_update": 2})[0]
    trainer.load_checkpoint(tmp_path / "here")
    with pytest.raises(ConfigError, match="num_iterations=1 is the total, and the trainer is at iteration 1"):
        trainer.train(["a", "b"], num_iterations=1, progress=False)
    assert trainer.in_progress.num_planned == 1
    (metrics,) = trainer.train(["a", "b"], num_iterations=2, progress=False)
    assert metrics["train/num_updates"] == 1.0, "the other update was made before the checkpoint"


# Parts of a reward that are always 0 are named once, after 20 iterations


def test_a_part_that_is_always_0_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    parts = SilentParts()
    with caplog.at_level(logging.WARNING, logger="grpo"):
        for iteration in range(NUM_ITERATIONS + 5):
            assert len(caplog.records) == (iteration >= NUM_ITERATIONS)
            late = float(iteration == NUM_ITERATIONS - 1)
            of_parts = {"format": (0.0, 0.0), "late": (late, 0.0), "balanced": (0.0, 1.0)}
            means = {f"rewards/{name}/mean": mean for name, (mean, _) in of_parts.items()}
            stds = {f"rewards/{name}/std": std for name, (_, std) in of_parts.items()}
            parts.see({"rewards/mean": 0.0, **means, **stds})
    (message,) = caplog.messages
    assert message.startswith("The reward part format was 0 for every row of the first 20 iterations,")


def test_nothing_is_said_where_every_part_is_earned(caplog: pytest.LogCaptureFixture) -> None:
    parts = SilentParts()
    with caplog.at_level(logging.WARNING, logger="grpo"):
        for _ in range(NUM_ITERATIONS):
            parts.see({"rewards/mean": 0.0, "rewards/right/mean": 0.5})
    assert not caplog.records


@pytest.mark.parametrize(("extra", "num_named"), [(-1, 0), (0, 1), (3, 1)])
def test_train_names_a_part_that_no_action_of_20_iterations_earned(extra, num_named, caplog) -> None:
    right = lambda states, actions: [float(action) for action in actions]  # noqa: E731
    rewards = WeightedRewards({"format": lambda states, actions: [0.0] * len(actions), "right": right})
    with caplog.at_level(logging.WARNING, logger="grpo"):
        trainer = GRPOTrainer(config=GRPOConfig(group_size=2), policy=TablePolicy(), reward_model=rewards)
        trainer.train(["a", "b"], num_iterations=NUM_ITERATIONS + extra, progress=False)
    named = [message for message in caplog.messages if "The reward part" in message]
    assert [message.partition(" for every")[0] for message in named] == ["The reward part format was 0"] * num_named


SIZES = (3, 5, 4, 6, 2, 7, 3, 1, 4, 2)
"""What the draws of states count. After n draws: 3, 8, 12, 18, 20, 27, 30, 31, 35, 37."""
UNIT = "own/size"


class Sized(TablePolicy):
    """Tells the size of each draw as a metric."""

    def __init__(self) -> None:
        super().__init__(states=range(len(SIZES)))

    def sample_actions(self, states: Any, num_actions_per_state: int) -> SampledActions:
        actions = self.generate_actions(states, num_actions_per_state)
        rows = len(states) * num_actions_per_state
        metrics = {UNIT: float(sum(SIZES[state] for state in states)), "own/rows": float(rows)}
        return SampledActions(actions=actions, mask=torch.ones(rows, 1, dtype=torch.bool), metrics=metrics)


def of_actions(states: Any, actions: Any) -> list[float]:
    return [float(action) for action in actions]


def made(rewards: Any = of_actions, **config: Any) -> GRPOTrainer:
    torch.manual_seed(3)
    return by_hand(policy=Sized(), rewards=rewards, config={"seed": 1, "group_size": 8, **config})[0]


def train(trainer: GRPOTrainer, total: int, **options: Any) -> list[dict[str, float]]:
    return trainer.train(lambda draw: [draw], budget=(UNIT, total), progress=False, **options)


@pytest.mark.parametrize(("total", "expected"), [(1, [3]), (3, [3]), (4, [3, 8]), (8, [3, 8]), (9, [3, 8, 12])])
def test_the_last_iteration_is_the_one_that_reaches_the_total(total, expected):
    assert [metrics["own/total_size"] for metrics in train(made(), total)] == expected


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_with_iterations_ahead_the_end_follows_from_the_iterations_before_and_not_from_time(ahead, monkeypatch) -> None:
    """Iteration n exists if the iterations up to n - 1 - K are below the total of 8: two iterations, and K more."""
    ends = set()
    for in_order in ("", "1"):
        monkeypatch.setenv(IN_ORDER, in_order)
        trainer = made(iterations_ahead=ahead, lr_schedule="linear")
        assert len(train(trainer, 8)) == 2 + ahead
        ends.add(end_of(trainer))
    assert len(ends) == 1


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ({"lr_schedule": "linear"}, [1, 1 - 3 / 12, 1 - 8 / 12]),
        ({"lr_schedule": "cosine"}, [(1 + math.cos(math.pi * part / 12)) / 2 for part in (0, 3, 8)]),
        ({"warmup_ratio": 0.5}, [3 / 6, 1, 1]),
        ({"warmup_ratio": 0.5, "lr_schedule": "linear"}, [3 / 6, 1, 1 - (8 - 6) / 6]),
    ],
)
def test_schedules_read_what_is_done_of_the_total(schedule, expected):
    """Of 12, iterations begin at 0, 3, 8. A warm-up over half of it: (0 + 3) / 6, and 1 because 3 + 5 is beyond 6."""
    assert [metrics["train/learning_rate"] for metrics in train(made(**schedule), 12)] == pytest.approx(expected)


def test_what_dynamic_sampling_leaves_out_counts() -> None:
    """The first draw has equal rewards, so each iteration ends with a second draw: 3 + 5, and then 4 in one draw."""

    def rewards(states: Any, actions: Any) -> list[float]:
        return [float(place % 2) * (states[0] > 0) for place in range(len(actions))]

    history = train(made(rewards, dynamic_sampling_rounds=1), 12)
    assert [metrics["own/total_size"] for metrics in history] == [8, 12]
    assert [metrics["group_stats/num_rounds"] for metrics in history] == [1, 0]


def test_evaluations_and_checkpoints_come_with_multiples_and_at_the_end(tmp_path: Path) -> None:
    """The ends are 3, 8, 12, 18, 20. Multiples of 5: 5, 10, 15, 20. Of 9: 9, 18."""
    scores, trainer = count(5, -1), made()
    evaluation = lambda: {"eval/own": float(next(scores)), "eval/more": 9.0}  # noqa: E731
    options = {"checkpoint_dir": tmp_path, "checkpoint_every": 9, "keep_last": 9}
    history = train(trainer, 20, evaluation=evaluation, eval_every=5, **options)
    assert [metrics.get("eval/own") for metrics in history] == [None, 5, 4, 3, 2]
    assert names_in(tmp_path) == [f"iteration-{number:08d}" for number in (2, 3, 4, 5)]
    assert best_checkpoint(tmp_path).name == "iteration-00000002", "the first evaluation is the best, and is written"
    again = train(made(), 20, eval_every=100, evaluation=lambda: {"eval/own": 1.0})
    assert [place for place, metrics in enumerate(again) if "eval/own" in metrics] == [4]


def test_an_evaluation_leaves_generators_and_the_mode_of_the_policy() -> None:
    def evaluation() -> dict[str, float]:
        trainer.policy.eval()
        return {"eval/own": float(torch.rand(()))}

    trainer = made()
    train(trainer, 20, evaluation=evaluation, eval_every=1)
    without = made()
    train(without, 20)
    assert trainer.policy.training
    assert torch.equal(trainer.policy.logits, without.policy.logits)


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize(
    ("phase", "at", "stop"), [("step", 4, by_signal), ("callback", 2, by_exception), ("callback", 0, by_exception)]
)
def test_a_stopped_run_goes_on_to_the_same_end(ahead, phase, at, stop, tmp_path: Path) -> None:
    """With a schedule, and a callback with a state. Five iterations and K more; 0 stands for the last one. A stop leaves a
    checkpoint of its place."""
    settings: dict[str, Any] = {"iterations_ahead": ahead, "lr_schedule": "linear", "num_epochs_per_update": 2}

    def options() -> dict[str, Any]:
        return {"evaluation": lambda: {"eval/own": 1.0}, "eval_every": 6, "callbacks": [EarlyStopping("eval/own")]}

    whole = made(**settings)
    expected = train(whole, 20, **options())
    assert len(expected) == 5 + ahead
    files: dict[str, Any] = {"checkpoint_dir": tmp_path, "resume": "auto"}
    trainer, with_stop = made(**settings), options()
    with_stop["callbacks"] += Calls(trainer, phase, stop, at or 5 + ahead).callbacks
    with stopped():
        train(trainer, 20, **with_stop, **files)
    resumed = made(**settings)
    rest = train(resumed, 20, **options(), **files)
    assert_same_metrics(rest, expected[len(expected) - len(rest) :])
    assert end_of(resumed) == end_of(whole)


def test_a_further_call_goes_on_to_a_larger_total_and_another_unit_counts_anew(tmp_path: Path) -> None:
    trainer = made()
    assert len(train(trainer, 8, checkpoint_dir=tmp_path)) == 2
    message = r"own/size=8 is the total, and the trainer is at 8\. .*own/size=16 makes 8 further size\."
    with pytest.raises(ConfigError, match=message):
        train(trainer, 8)
    with pytest.warns(GRPOWarning, match="own/size=8 is the total, and the trainer is at 8, so there is nothing left"):
        assert train(made(), 8, checkpoint_dir=tmp_path, resume="auto") == []
    assert [metrics["own/total_size"] for metrics in train(trainer, 18)] == [12, 18]
    assert len(trainer.train(lambda draw: [draw], num_iterations=6, progress=False)) == 2
    assert len(trainer.train(lambda draw: [draw], budget=("own/rows", 20), progress=False)) == 3


def test_another_unit_under_a_schedule_is_a_warning_that_names_both() -> None:
    trainer = made(lr_schedule="linear")
    trainer.train(lambda draw: [draw], num_iterations=1, progress=False)
    with pytest.warns(GRPOWarning, match=r"num_iterations was 1 and is own/size=4, and config\.lr_schedule="):
        train(trainer, 4)


def test_the_bar_counts_the_unit(capsys: pytest.CaptureFixture[str]) -> None:
    made().train(lambda draw: [draw], budget=(UNIT, 8), progress=True)
    assert "8/8" in (shown := capsys.readouterr().err)
    assert "size" in shown


def broken(metrics: Any) -> dict[str, Any]:
    return {"budget": (UNIT, 8), "evaluation": lambda: metrics}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, r"train needs num_iterations, num_epochs or budget; got .*Pass exactly one"),
        ({"budget": (UNIT, 3), "num_iterations": 3}, r"num_iterations=3, num_epochs=None, budget=\('own/size', 3\)"),
        ({"budget": UNIT}, r"budget must be a metric and its total, \(\"episodes/steps\", 100_000\); got str"),
        ({"budget": (UNIT, 0)}, r"own/size must be >= 1; got 0"),
        ({"budget": ("own/sise", 8)}, r"'own/sise', 8\) counts a metric.*got None\. Did you mean 'own/size'"),
        ({**broken({"eval/a": 1.0}), "eval_states": [1]}, "two ways to evaluate. Pass one of them"),
        (broken({"score": 1.0}), r"evaluation must return a dict of metrics eval/\.\.\. and their numbers; got dict"),
        (broken({}), r"evaluation must return a dict of metrics"),
        (broken({5: 1.0}), r"evaluation must return a dict of metrics eval/\.\.\. .*; got dict \{5: 1\.0\}"),
        (broken({"eval/score": "0.5"}), r"eval/\.\.\. and their numbers; got dict \{'eval/score': '0\.5'\}"),
        (broken({"eval/score": torch.ones(2)}), r"and their numbers"),
        (broken(None), r"evaluation must return a dict of metrics eval/\.\.\. and their numbers; got None"),
    ],
)
def test_what_no_run_can_count_or_evaluate_is_refused(arguments: Mapping[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        made().train(lambda draw: [draw], progress=False, **arguments)
