"""A run that is counted in a metric: its end, its schedule, its evaluations, and how it goes on."""

import math
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo import ConfigError, GRPOTrainer, GRPOWarning, SampledActions
from grpo._running.ahead import IN_ORDER
from grpo.callbacks import EarlyStopping
from grpo.checkpoint import best_checkpoint
from tests.support.checkpoint_runs import names_in
from tests.support.policies import TablePolicy
from tests.support.stopped_runs import Calls, assert_same_metrics, by_exception, by_signal, end_of, stopped
from tests.support.trainers import by_hand

pytestmark = pytest.mark.usefixtures("without_type_checks")

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
