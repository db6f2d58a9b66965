"""Every rule of the diagnosis has a run that triggers it, and a similar run that does not."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from adapters.tracking.report.diagnosis import RULES, Finding, advised, diagnose
from adapters.tracking.report.run_data import RunData, Start
from grpo import ObjectiveConfig
from tests.support.run_folders import constant, healthy, ramp, run_of, settings, start_of

NAN = math.nan


def evaluations(first: float, last: float) -> np.ndarray:
    """An evaluation after every tenth iteration, along a line."""
    values = constant(NAN)
    values[9::10] = np.linspace(first, last, 10)
    return values


def burst(value: float, length: int) -> np.ndarray:
    """0, with `length` iterations in a row at `value`."""
    values = constant(0.0)
    values[40 : 40 + length] = value
    return values


def timed(*, config: Any = None, **changed: Any) -> RunData:
    """Iterations of twenty seconds, which someone waits for."""
    run = healthy(time__iteration=20.0, **changed)
    return run if config is None else replace(run, starts=(Start(iteration=1, settings={"config": config}),))


RISE_AND_FALL = np.concatenate([ramp(0.2, 0.9, 50), ramp(0.9, 0.3, 50)])
RISE_AND_STAY = np.concatenate([ramp(0.2, 0.9, 50), ramp(0.9, 0.85, 50)])
EARLY_RISE = np.concatenate([ramp(0.2, 0.8, 8), ramp(0.8, 0.8, 92)])
EVALUATED_3_TIMES = np.where(np.isin(np.arange(100), [9, 49, 99]), 0.3, NAN)
LATE_RISE = np.concatenate([ramp(0.2, 0.2, 92), ramp(0.2, 0.8, 8)])
FLAT = ramp(0.5, 0.5)


def distilled(**changed: Any) -> RunData:
    """A run whose rewards are all 0, and whose KL to a teacher falls."""
    metrics = {"rewards__mean": 0.0, "train__advantages_mean": 0.0, "train__advantages_std": 0.0}
    return healthy(**{**metrics, "train__kl_mean": ramp(1.0, 0.1), "train__kl_coef": 1.0, **changed})


def supervised(**changed: Any) -> RunData:
    """A run on demonstrations, beside rewards that are all 0."""
    return distilled(**{"train__kl_coef": 0.0, "train__demonstration_loss": ramp(1.0, 0.1), **changed})


Case = tuple[str, str, str, str, RunData, RunData]

CASES: list[Case] = [
    # rule, its finding's kind and title, the numbers in its text, a run that triggers the rule, a similar run that does not
    ("reward_trend", "good", "The reward rose", "from 0.227 to 0.773 (means of 10 iterations)",
     healthy(), healthy(rewards__mean=FLAT)),
    ("reward_trend", "problem", "The reward fell", "from 0.773 to 0.227 (means of 10 iterations)",
     healthy(rewards__mean=ramp(0.8, 0.2)), healthy()),
    ("reward_trend", "note", "The reward did not change clearly", "from 0.5 to 0.5",
     healthy(rewards__mean=FLAT), healthy()),
    ("reward_trend", "note", "The reward did not change clearly", "", healthy(rewards__mean=FLAT), distilled()),
    ("reward_trend", "note", "The reward did not change clearly", "", healthy(rewards__mean=FLAT), supervised()),
    ("teacher_trend", "good", "The policy came closer to its teacher", "from 0.959 to 0.141 nats per step",
     distilled(), distilled(train__advantages_std=burst(0.1, 1))),  # a reward taught it, too
    ("teacher_trend", "note", "The policy did not come clearly closer to its teacher", "from 1 to 1 nats per step",
     distilled(train__kl_mean=ramp(1.0, 1.0)), distilled(train__kl_mean=0.0)),  # it equals its reference
    ("demonstration_trend", "good", "The policy came closer to its demonstrations",
     "from 0.959 to 0.141 (means of 10 iterations)", supervised(), supervised(train__demonstration_loss=ramp(0.1, 1.0))),
    ("demonstration_trend", "note", "The loss of demonstrations did not fall clearly", "from 0.5 to 0.5",
     supervised(train__demonstration_loss=FLAT), healthy()),
    ("observation_trend", "good", "The policy foresees its environment better", "from 0.959 to 0.141",
     healthy(train__observation_loss=ramp(1.0, 0.1)), healthy(train__observation_loss=FLAT)),
    ("observation_trend", "note", "The loss of observations did not fall clearly", "from 0.5 to 0.5",
     healthy(train__observation_loss=FLAT), healthy()),
    ("fell_again", "problem", "The reward fell after a good start", "near iteration 5",
     healthy(rewards__mean=RISE_AND_FALL), healthy(rewards__mean=RISE_AND_STAY)),
    ("evaluation_lags", "problem", "Training rewards rise, the evaluation does not", "from 0.3 to 0.32",
     healthy(eval__avg_reward=evaluations(0.3, 0.32)), healthy(eval__avg_reward=evaluations(0.3, 0.7))),
    ("evaluation_lags", "problem", "Training rewards rise, the evaluation does not", "from 0.7 to 0.7",
     healthy(eval__return=evaluations(0.7, 0.7)),
     healthy(eval__return=evaluations(0.8, 0.8))),  # it is already at the best that training reaches
    ("evaluation_lags", "problem", "Training rewards rise, the evaluation does not", "",
     healthy(rewards__mean=LATE_RISE, eval__avg_reward=EVALUATED_3_TIMES),
     healthy(rewards__mean=EARLY_RISE, eval__avg_reward=evaluations(0.3, 0.3))),  # before the first evaluation
    ("failing_rewards", "note", "The reward failed now and then", "There were 1 repeated call.",
     healthy(rewards__retries=burst(1, 1)), healthy()),
    ("failing_rewards", "problem", "The reward failed now and then", "There were 2 rewards set to 0.",
     healthy(rewards__zeroed=burst(1, 2)), healthy()),
    ("failing_rewards", "problem", "The reward failed now and then", "There were 1 failed call, 6 dropped rows.",
     healthy(rewards__failed_calls=burst(1, 1), rows__dropped=burst(2, 3)), healthy()),
    ("ratio", "problem", "The ratio is not 1 at the first update", "",
     healthy(train__ratio_mean=1.02, train__num_updates=1.0), healthy(train__ratio_mean=1.02)),
    ("ratio", "problem", "The ratio is not 1 at the first update", "",
     healthy(train__ratio_mean=0.99, train__num_updates=1.0), healthy(train__ratio_mean=1.0005, train__num_updates=1.0)),
    ("lost_updates", "problem", "Updates were skipped", "4 updates",
     healthy(group_stats__zero_variance_fraction=0.0, train__skipped_updates=burst(2, 2)),
     healthy(train__skipped_updates=burst(2, 2))),  # a fifth of the groups is dead, which skips updates, too
    ("memory", "note", "Memory ran out", "3 times",
     healthy(train__out_of_memory=burst(1, 3)), healthy(train__out_of_memory=0.0)),
    ("stopped_early", "note", "The run is not complete", "100 of 101 iterations",
     run_of({"rewards/mean": FLAT}, starts=(start_of(101),)), run_of({"rewards/mean": FLAT}, starts=(start_of(100),))),
    ("slow_part", "note", "Most of the time goes into sampling", "60 %",
     timed(time__sample=12.0), timed(time__sample=9.8)),
    ("slow_part", "note", "Most of the time goes into rewards", "70 %", timed(time__reward=14.0), timed()),
    ("slow_part", "note", "Most of the time goes into sampling", "", timed(time__sample=12.0), healthy(time__sample=0.6)),
]  # fmt: skip


def found(run: RunData, title: str) -> list[Finding]:
    return [finding for finding in diagnose(run) if finding.title == title]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}: {case[2]}")
def test_a_rule_finds_its_sign_and_nothing_else_and_tells_the_numbers_behind_it(case: Case) -> None:
    rule, kind, title, numbers, with_sign, without_sign = case
    finding = next(one for one in RULES if one.__name__ == rule)(with_sign)
    assert (finding.kind, finding.title) == (kind, title)
    assert numbers in finding.text
    assert found(with_sign, title) == [finding]
    assert found(without_sign, title) == []


def test_every_rule_has_a_case() -> None:
    assert {rule.__name__ for rule in RULES} == {case[0] for case in CASES}


def test_a_healthy_run_has_one_finding_and_an_empty_one_none() -> None:
    assert [finding.title for finding in diagnose(healthy())] == ["The reward rose"]
    assert diagnose(run_of({"anything": 1.0})) == []


def test_advice_on_micro_batches_is_given_only_where_small_ones_take_long() -> None:
    """Not in fast iterations, and not if a forward pass has all rows already."""
    small, whole = {"micro_batch_size": 4}, {"micro_batch_size": None}
    [finding] = found(timed(config=small, time__update=12.0), "Most of the time goes into updates")
    assert finding.text.endswith(" A forward pass has 4 rows: if memory allows, use a larger micro_batch_size.")
    fast = replace(timed(config=small), metrics=healthy(time__iteration=0.8, time__update=0.6).metrics)
    for run in (timed(config=whole, time__update=12.0), timed(time__update=12.0), fast):
        assert [finding.text for finding in diagnose(run) if "micro_batch_size" in finding.text] == []


def test_the_report_reads_the_advice_that_the_trainer_logs() -> None:
    """Its titles are the signs of the log, and its texts end with the metrics of the run's last tenth."""
    run = healthy(train__kl_mean=0.0, rewards__code__applies=np.linspace(0.0, 0.9, 100))
    assert [(finding.kind, finding.title) for finding in advised(run)] == [
        ("note", "A part of the reward is missing"),
        ("problem", "The KL is 0"),
    ]
    assert advised(run)[0].text.endswith("Now rewards/code/applies is 0.859.")
    assert "reference_sync_every" in advised(run)[1].text


def test_a_sign_that_was_over_at_the_end_is_no_finding() -> None:
    far = np.where(np.arange(100) < 90, 0.02, 0.001)
    assert advised(healthy(train__sampler_divergence=far[::-1])) != []
    assert advised(healthy(train__sampler_divergence=far)) == []


def test_the_report_reads_the_settings_of_the_latest_start() -> None:
    """The surrogate of the first start has bounds, and that of the second has none."""
    run = healthy(train__clip_fraction=0.0, rewards__mean=FLAT)
    starts = [
        Start(iteration=1, settings=settings(objective=ObjectiveConfig(surrogate=name)))
        for name in ("clip", "reinforce")
    ]
    title = "Nothing is ever clipped"
    assert len(found(replace(run, starts=tuple(starts[::-1])), title)) == 1
    assert found(replace(run, starts=tuple(starts)), title) == []
    assert found(replace(run, starts=(Start(iteration=1, settings={"config": "damaged"}),)), title) == []


def test_problems_come_first_and_notes_last() -> None:
    run = timed(train__kl_mean=0.0, rewards__retries=burst(1, 1), time__sample=18.0)
    kinds = [finding.kind for finding in diagnose(run)]
    assert kinds == ["problem", "good", "note", "note"]
