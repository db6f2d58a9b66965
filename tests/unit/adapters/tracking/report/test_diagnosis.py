"""Every rule of the diagnosis has a run that triggers it, and a similar run that does not."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from adapters.tracking.report.diagnosis import Finding, diagnose
from adapters.tracking.report.diagnosis import rules as rules_module
from adapters.tracking.report.run_data import RunData
from tests.support.run_folders import constant, healthy, ramp, run_of, start_of

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


def quick(**changed: Any) -> RunData:
    """Iterations of a tenth of a second, which are fast enough."""
    return healthy(time__iteration=0.1, **changed)


RISE_AND_FALL = np.concatenate([ramp(0.2, 0.9, 50), ramp(0.9, 0.3, 50)])
RISE_AND_STAY = np.concatenate([ramp(0.2, 0.9, 50), ramp(0.9, 0.85, 50)])
EARLY_RISE = np.concatenate([ramp(0.2, 0.8, 8), ramp(0.8, 0.8, 92)])
EVALUATED_3_TIMES = np.where(np.isin(np.arange(100), [9, 49, 99]), 0.3, NAN)
LATE_RISE = np.concatenate([ramp(0.2, 0.2, 92), ramp(0.2, 0.8, 8)])
FLAT = ramp(0.5, 0.5)

Case = tuple[str, str, RunData, RunData]

CASES: list[Case] = [
    # rule, its finding's title, a run that triggers the rule, a similar run that does not
    ("reward_trend", "The reward rose", healthy(), healthy(rewards__mean=FLAT)),
    ("reward_trend", "The reward fell", healthy(rewards__mean=ramp(0.8, 0.2)), healthy()),
    ("reward_trend", "The reward did not change clearly", healthy(rewards__mean=FLAT), healthy()),
    (
        "fell_again",
        "The reward fell after a good start",
        healthy(rewards__mean=RISE_AND_FALL),
        healthy(rewards__mean=RISE_AND_STAY),
    ),
    (
        "evaluation_lags",
        "Training rewards rise, the evaluation does not",
        healthy(eval__avg_reward=evaluations(0.3, 0.32)),
        healthy(eval__avg_reward=evaluations(0.3, 0.7)),
    ),
    (
        "evaluation_lags",
        "Training rewards rise, the evaluation does not",
        healthy(eval__return=evaluations(0.7, 0.7)),
        healthy(eval__return=evaluations(0.8, 0.8)),  # it is already at the best that training reaches
    ),
    (
        "evaluation_lags",
        "Training rewards rise, the evaluation does not",
        healthy(rewards__mean=LATE_RISE, eval__avg_reward=EVALUATED_3_TIMES),
        healthy(rewards__mean=EARLY_RISE, eval__avg_reward=evaluations(0.3, 0.3)),  # before the first evaluation
    ),
    (
        "dead_groups",
        "Nearly all groups are dead",
        healthy(rewards__mean=FLAT, group_stats__zero_variance_fraction=0.95),
        healthy(rewards__mean=FLAT, group_stats__zero_variance_fraction=0.85),
    ),
    (
        "dead_groups",
        "There is little left to learn",
        healthy(group_stats__zero_variance_fraction=np.linspace(0.0, 1.0, 100)),
        healthy(group_stats__zero_variance_fraction=np.linspace(1.0, 0.0, 100)),
    ),
    ("failing_rewards", "The reward failed now and then", healthy(rewards__retries=burst(1, 1)), healthy()),
    ("failing_rewards", "The reward failed now and then", healthy(rows__dropped=burst(2, 1)), healthy()),
    (
        "missing_parts",
        "A part of the reward does not apply to all rows",
        healthy(rewards__code__applies=0.25),
        healthy(rewards__code__applies=1.0),
    ),
    (
        "entropy",
        "The entropy has collapsed",
        healthy(train__entropy=np.geomspace(1.0, 0.01, 100)),
        healthy(train__entropy=np.geomspace(1.0, 0.1, 100)),
    ),
    (
        "kl_is_zero",
        "The KL is 0, although it has a coefficient",
        healthy(train__kl_mean=np.sign(burst(1, 9))),
        healthy(train__kl_mean=np.sign(burst(1, 11))),  # a policy may come back to its reference for a while
    ),
    (
        "kl_is_zero",
        "The KL is 0, although it has a coefficient",
        healthy(train__kl_mean=0.0, train__num_updates=1.0),
        healthy(train__kl_mean=0.0, train__kl_coef=0.0),
    ),
    (
        "kl_is_zero",
        "The KL is 0, although it has a coefficient",
        healthy(train__kl_mean=0.0),
        healthy(train__kl_mean=0.0, train__num_updates=0.0),
    ),
    (
        "clipping",
        "Much of the gradient is clipped",
        healthy(train__clip_fraction=np.linspace(0.0, 0.4, 100)),
        healthy(train__clip_fraction=np.linspace(0.4, 0.0, 100)),
    ),
    (
        "clipping",
        "Nothing is ever clipped",
        healthy(train__clip_fraction=0.0),
        healthy(train__clip_fraction=0.0, train__num_updates=1.0),
    ),
    (
        "clipping",
        "Nothing is ever clipped",
        healthy(train__clip_fraction=0.0),
        healthy(train__clip_fraction=burst(0.1, 1)),
    ),
    (
        "sampler",
        "The sampler is not the policy",
        healthy(train__sampler_divergence=burst(0.02, 10)),
        healthy(train__sampler_divergence=burst(0.02, 9)),
    ),
    (
        "sampler",
        "The sampler is not the policy",
        healthy(train__sampler_divergence=0.02),
        healthy(train__sampler_divergence=0.02, train__sampler_ratio_mean=1.0),
    ),
    (
        "ratio",
        "The ratio is not 1 at the first update",
        healthy(train__ratio_mean=1.02, train__num_updates=1.0),
        healthy(train__ratio_mean=1.02),
    ),
    (
        "ratio",
        "The ratio is not 1 at the first update",
        healthy(train__ratio_mean=0.99, train__num_updates=1.0),
        healthy(train__ratio_mean=1.0005, train__num_updates=1.0),
    ),
    (
        "extreme_ratios",
        "Ratios are extreme",
        healthy(train__ratio_clamped_fraction=burst(0.01, 1)),
        healthy(train__ratio_clamped_fraction=0.0),
    ),
    (
        "no_advantages",
        "All advantages are 0",
        healthy(train__advantages_std=0.0, train__advantages_mean=0.0),
        healthy(train__advantages_std=0.0, train__advantages_mean=0.0, group_stats__zero_variance_fraction=1.0),
    ),
    (
        "no_advantages",
        "All advantages are 0",
        healthy(train__advantages_std=0.0, train__advantages_mean=0.0),
        healthy(train__advantages_std=0.0, train__advantages_mean=-0.5),  # with negative_only
    ),
    (
        "entropy",
        "The entropy has collapsed",
        healthy(train__entropy=np.geomspace(1.0, 1e-6, 100).clip(0.01)),  # within the first tenth of a long run
        run_of({"train/entropy": np.geomspace(1.0, 0.01, 9)}),  # too short to tell
    ),
    (
        "lost_updates",
        "Updates were skipped",
        healthy(group_stats__zero_variance_fraction=0.0, train__skipped_updates=burst(1, 2)),
        healthy(train__skipped_updates=burst(1, 2)),  # a fifth of the groups is dead, which skips updates, too
    ),
    ("memory", "Memory ran out", healthy(train__out_of_memory=burst(1, 3)), healthy(train__out_of_memory=0.0)),
    ("slow_part", "Most of the time goes into sampling", healthy(time__sample=0.6), healthy(time__sample=0.49)),
    ("slow_part", "Most of the time goes into rewards", healthy(time__reward=0.7), healthy()),
    ("slow_part", "Most of the time goes into sampling", healthy(time__sample=0.6), quick(time__sample=0.06)),
    (
        "stopped_early",
        "The run is not complete",
        run_of({"rewards/mean": FLAT}, starts=(start_of(101),)),
        run_of({"rewards/mean": FLAT}, starts=(start_of(100),)),
    ),
]


def found(run: RunData, title: str) -> list[Finding]:
    return [finding for finding in diagnose(run) if finding.title == title]


@pytest.mark.parametrize(("rule", "title", "with_sign", "without_sign"), CASES, ids=[f"{c[0]}: {c[1]}" for c in CASES])
def test_a_rule_finds_its_sign_and_nothing_else(
    rule: str, title: str, with_sign: RunData, without_sign: RunData
) -> None:
    apply = next(one for one in rules_module.RULES if one.__name__ == rule)
    finding = apply(with_sign)
    assert finding is not None
    assert finding.title == title
    assert found(with_sign, title) == [finding]
    assert found(without_sign, title) == []


def test_every_rule_has_a_case() -> None:
    assert {rule.__name__ for rule in rules_module.RULES} == {case[0] for case in CASES}


def test_a_healthy_run_has_one_finding_and_an_empty_one_none() -> None:
    assert [finding.title for finding in diagnose(healthy())] == ["The reward rose"]
    assert diagnose(run_of({"anything": 1.0})) == []


def test_problems_come_first_and_notes_last() -> None:
    run = healthy(train__kl_mean=0.0, rewards__retries=burst(1, 1), time__sample=0.9)
    kinds = [finding.kind for finding in diagnose(run)]
    assert kinds == ["problem", "good", "note", "note"]


def numbers_in(rule: Callable[[RunData], Finding | None], run: RunData) -> str:
    finding = rule(run)
    assert finding is not None
    return finding.text


def test_findings_tell_the_numbers_behind_them(subtests: pytest.Subtests) -> None:
    rules: dict[str, Any] = {rule.__name__: rule for rule in rules_module.RULES}
    cases: list[tuple[str, RunData, str]] = [
        ("reward_trend", healthy(), "from 0.227 to 0.773 (means of 10 iterations)"),
        ("fell_again", healthy(rewards__mean=RISE_AND_FALL), "near iteration 5"),
        ("dead_groups", healthy(rewards__mean=FLAT, group_stats__zero_variance_fraction=0.95), "95 % of the groups"),
        (
            "failing_rewards",
            healthy(rewards__failed_calls=burst(1, 1), rows__dropped=burst(2, 3), rewards__zeroed=burst(1, 2)),
            "There were 1 failed call, 6 dropped rows, 2 rewards set to 0.",
        ),
        ("missing_parts", healthy(rewards__code__applies=0.25), "code to 25 %"),
        ("clipping", healthy(train__clip_fraction=0.4), "40 % of the steps"),
        (
            "lost_updates",
            run_of({"group_stats/zero_variance_fraction": 0.0, "train/skipped_updates": burst(2, 2)}),
            "4 updates",
        ),
        ("extreme_ratios", healthy(train__ratio_clamped_fraction=burst(0.01, 2)), "In 2 iterations"),
        ("entropy", healthy(train__entropy=np.geomspace(1.0, 0.01, 100)), "from 0.955 to 0.0124 nats"),
        ("memory", healthy(train__out_of_memory=burst(1, 3)), "3 times"),
        ("slow_part", healthy(time__sample=0.6), "60 %"),
        ("stopped_early", run_of({"a": FLAT}, starts=(start_of(101),)), "100 of 101 iterations"),
    ]
    for name, run, numbers in cases:
        with subtests.test(rule=name):
            assert numbers in numbers_in(rules[name], run)


def test_lost_rewards_are_a_problem_and_repeated_calls_only_a_note() -> None:
    title = "The reward failed now and then"
    assert [finding.kind for finding in found(healthy(rewards__retries=burst(1, 1)), title)] == ["note"]
    assert [finding.kind for finding in found(healthy(rewards__zeroed=burst(1, 1)), title)] == ["problem"]


def test_a_task_that_was_solved_is_no_problem() -> None:
    run = healthy(group_stats__zero_variance_fraction=np.linspace(0.0, 1.0, 100))
    assert [finding.kind for finding in found(run, "There is little left to learn")] == ["note"]
