"""Measuring and comparing policies: hand-worked numbers, what both sides share, what stays unchanged, and the report."""

import copy
import itertools
import json
import math
import os
import random
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grpo import (
    ConfigError,
    ContractError,
    ProtocolError,
    RewardConfig,
    RewardError,
    Rewards,
    SampledActions,
    WeightedRewards,
    compare_policies,
)
from grpo._common.global_state import capture_random_state
from grpo.evaluation import Answer, ComparisonReport, measure_policy, paired_interval, pass_at_k
from grpo.evaluation.attempts import bootstrap_intervals, numbers_of_attempts
from tests.support.comparisons import (
    AFTER,
    BEFORE,
    STATES,
    action_itself,
    compared,
    measured,
    of_many,
    paying,
    scripted,
)
from tests.support.policies import DuckPolicy, ExactSampling, TablePolicy, VectorPolicy, digest


def test_the_report_equals_hand_worked_means_differences_and_outcomes() -> None:
    report = compared(BEFORE, AFTER)
    assert report.mean_reward_before == pytest.approx((0.25 + 1.0 + 0.5) / 3)
    assert report.mean_reward_after == pytest.approx((0.75 + 0.5 + 0.5) / 3)
    assert (report.improvement, report.improvement_percent) == (pytest.approx(0.0), pytest.approx(0.0))
    rows = [(state.label, state.before, state.after, state.difference, state.outcome) for state in report.states]
    assert rows == [
        ("up", 0.25, 0.75, 0.5, "improved"),
        ("down", 1.0, 0.5, -0.5, "worse"),
        ("same", 0.5, 0.5, 0.0, "unchanged"),
    ]
    assert (report.num_improved, report.num_worse, report.num_unchanged) == (1, 1, 1)
    assert report.num_actions_per_state == 4
    assert report.components_before == report.components_after == {}


@pytest.mark.parametrize(
    ("before", "after", "percent"),
    [
        (2, 3, 50.0),  # 100 (3 - 2) / 2
        (4, 0, -100.0),
        (4, -2, -150.0),
        (-2, -1, None),  # a percentage of a loss says neither "better" nor how much better
        (-2, -3, None),
        (-2, 2, None),
        (0, 5, None),  # of nothing
        (0, 0, None),
    ],
)
def test_the_improvement_is_a_percentage_only_of_a_positive_mean_before(before, after, percent) -> None:
    assert compared([[before]], [[after]]).improvement_percent == percent


def test_a_baseline_that_is_only_rounding_has_no_percentage() -> None:
    """.1 + .2 - .3 is 5.6e-17 in float64."""
    report = compared([[0, 1, 2]], [[3, 3, 3]], paying(0.1, 0.2, -0.3, 1.0))
    assert report.mean_reward_before != 0.0
    assert report.improvement_percent is None
    assert report.improvement == pytest.approx(1.0)


DROP: dict[str, Any] = {"reward": RewardConfig(non_finite="drop")}


@pytest.mark.parametrize("batch_size", [1, 2])
def test_the_answer_is_the_first_action_that_has_a_reward(batch_size) -> None:
    policy, rewards = Looked(["a", "b"], script=[[0, 2, 1], [1, 2, 0]]), paying(math.nan, 2.0, 3.0)
    found = measured(policy, ["a", "b"], rewards, num_actions_per_state=3, batch_size=batch_size, **DROP)
    assert found.answers == (Answer(text="2", reward=3.0), Answer(text="1", reward=2.0))


@pytest.mark.parametrize(
    ("action", "text"),
    [
        ("x" * 2_000, "x" * 2_000),
        ("x" * 1_500 + "y" * 1_500, "x" * 1_000 + " [... 1,000 more ...] " + "y" * 1_000),
        (torch.tensor([0.5, 1.0]), "[0.5, 1.0]"),
    ],
)
def test_answers_are_text_for_people(action, text) -> None:
    policy = TablePolicy(["s"], script=[[action]])
    assert measured(policy, ["s"], lambda states, actions: [1.0], num_actions_per_state=1).answers[0].text == text


def test_differences_from_rounding_count_as_unchanged() -> None:
    """In float32 the means of (.3, 0) and (.1, .2) differ by 1e-9; by 1e-3 is a change."""
    report = compared([[0, 1], [0, 1]], [[2, 3], [2, 4]], paying(*torch.tensor([0.3, 0.0, 0.1, 0.2, 0.203])))
    assert report.states[0].difference != 0.0
    assert [state.outcome for state in report.states] == ["unchanged", "improved"]


def test_the_interval_is_that_of_the_paired_differences_and_one_state_has_none():
    # Differences 0 and 1, whatever the rewards: resampled means are 0, .5, 1 with probability 1/4, 1/2, 1/4.
    report = compared([[5], [-5]], [[5], [-4]])
    assert (report.confidence, report.confidence_interval) == (0.95, (0.0, 1.0))
    assert compared([[5], [-5]], [[5], [-4]], confidence=0.4).confidence_interval == (0.5, 0.5)
    report = compared([[0]], [[1]])
    assert report.confidence_interval is None
    assert report.improvement == 1.0
    assert "none from one state" in str(report)
    assert paired_interval(np.array([0.25, 0.25, 0.25]), confidence=0.99, seed=3) == (0.25, 0.25)
    # 60 % and two states: quantiles .2 and .8 lie within the outer quarters
    assert paired_interval(np.array([0.0, 1.0]), confidence=0.6, seed=0) == (0.0, 1.0)
    assert paired_interval(np.array([7.0]), confidence=0.95, seed=0) is None


def test_the_interval_follows_the_seed() -> None:
    differences = np.arange(12.0) ** 2
    expected = [paired_interval(differences, confidence=0.95, seed=seed) for seed in (0, 7)]
    squares = lambda states, actions: [action**2 for action in actions]  # noqa: E731
    assert [of_many(12, squares, seed).confidence_interval for seed in (0, 7)] == expected
    assert expected[0] != expected[1]


def test_for_many_states_the_interval_is_the_normal_one() -> None:
    """Mean -+ 1.96 s / sqrt(B), by the central limit theorem; 400 states are resampled in several blocks."""
    differences = np.random.default_rng(0).normal(0.3, 2.0, size=400)
    low, high = paired_interval(differences, confidence=0.95, seed=1)
    half = 1.96 * differences.std() / math.sqrt(400)
    assert low == pytest.approx(differences.mean() - half, abs=0.05 * half)
    assert high == pytest.approx(differences.mean() + half, abs=0.05 * half)
    lower, higher = paired_interval(differences, confidence=0.99, seed=1)
    assert lower < low < high < higher


def test_parts_are_reported_unweighted() -> None:
    """right = action: 7/12 and 7/12; twice = 2 action, weighed .25: total 1.5 action."""
    parts = {"right": action_itself, "twice": lambda states, actions: [2.0 * action for action in actions]}
    report = compared(BEFORE, [[1] * 4] * 3, reward_model=WeightedRewards(parts, {"right": 1.0, "twice": 0.25}))
    assert report.components_before == pytest.approx({"right": 7 / 12, "twice": 14 / 12})
    assert (report.components_after, report.mean_reward_after) == ({"right": 1.0, "twice": 2.0}, 1.5)
    assert "twice" in str(report)


def ragged(states: Any, actions: Any) -> Rewards:
    """Part "odd" is reported only for batches with a state "odd", and is NaN for actions of 0."""
    own = torch.tensor([float(action) for action in actions])
    odd = {"odd": torch.where(own > 0, 10 * own, math.nan)} if "odd" in states else {}
    return Rewards(values=own, components={"all": own, **odd})


class Looked(TablePolicy):
    """`script` by state, in any batch."""

    def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> Any:
        self.calls[f"batch of {len(states)}"] += 1
        return [self.script[self.places[state]] for state in states]  # type: ignore[index]


def test_a_reward_part_is_averaged_over_the_states_it_applies_to() -> None:
    """Part "odd" applies to state "odd" alone. Actions (0, 2) give the mean 20, and actions (3, 1) the mean of 30 and 10."""
    states, options = ["even", "odd"], {"num_actions_per_state": 2, "batch_size": 1, "progress": False}
    sides = [Looked(states, script=[[1, 1], row]) for row in ([0, 2], [3, 1])]
    report = compare_policies(*sides, states, ragged, **options)
    assert report.components_before == {"all": 1.0, "odd": 20.0}
    assert report.components_after == {"all": 1.5, "odd": 20.0}
    report = compare_policies(Looked(states, script=[[1, 1], [0, 0]]), sides[0], states, ragged, **options)
    assert (report.components_before, report.components_after) == ({"all": 0.5}, {"all": 1.0, "odd": 20.0})
    line = next(line for line in str(report).splitlines() if line.endswith("  odd") and "20.0000" in line)
    assert line.split() == ["-", "20.0000", "-", "odd"]


def test_a_reward_part_weighs_every_state_equally() -> None:
    """Part "odd" is NaN and 40 in one state, 10 and 10 in the other. Its mean is (40 + 10) / 2, not 60 / 3."""
    policy = Looked(["odd", "too"], script=[[0, 4], [1, 1]])
    found = measured(policy, ["odd", "too"], ragged, num_actions_per_state=2)
    assert found.component_means == {"all": 1.5, "odd": 25.0}


class ThreeSteps(ExactSampling):
    """Rows of 1, 2 and 3 decisions out of 3."""

    def sample_actions(self, states: Any, num_actions_per_state: int) -> SampledActions:
        mask = torch.tensor([[True, False, False], [True, True, False], [True, True, True]])
        return SampledActions(actions=[["a", "b", "c"]], mask=mask)


def test_rewards_per_step_are_summed_over_the_policys_own_steps_of_the_rows_that_are_left():
    # Steps pay 1, 10, 100 and nothing that is read off the mask: 1, 11, 111.
    steps = [[1.0, math.nan, math.nan], [1.0, 10.0, math.inf], [1.0, 10.0, 100.0]]
    reward = WeightedRewards({"steps": lambda states, actions: steps})
    found = measured(ThreeSteps(), ["s"], reward, num_actions_per_state=3)
    assert found.rewards.tolist() == [[1.0, 11.0, 111.0]]
    assert (found.components["steps"].tolist(), found.mean_reward) == ([[1.0, 11.0, 111.0]], 41.0)
    # The first row is left out: 11 and 111, mean 61.
    steps = [[math.nan, 5.0, 5.0], [1.0, 10.0, 5.0], [1.0, 10.0, 100.0]]
    found = measured(ThreeSteps(), ["s"], lambda states, actions: steps, num_actions_per_state=3, **DROP)
    assert found.rewards[0, 1:].tolist() == [11.0, 111.0]
    assert found.rewards[0, 0].isnan()
    assert found.mean_reward == 61.0


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_both_policies_are_measured_with_the_same_random_numbers(batch_size) -> None:
    policy, options = TablePolicy(STATES, 50), {"batch_size": batch_size, "progress": False}
    report = compare_policies(policy, copy.deepcopy(policy), STATES, action_itself, **options)
    assert (report.num_unchanged, report.improvement) == (3, 0.0)


def test_measuring_is_repeatable_and_follows_the_seed() -> None:
    policy = TablePolicy(STATES, 50)
    first = measured(policy)
    torch.rand(7)
    assert torch.equal(measured(policy).rewards, first.rewards)
    assert not torch.equal(measured(policy, seed=1).rewards, first.rewards)
    assert len(set(map(tuple, measured(policy, batch_size=1).rewards.tolist()))) == 3  # batches differ


def test_global_random_generators_are_untouched() -> None:
    def random_reward(states: Any, actions: Any) -> list[float]:
        return [random.random() + np.random.rand() for _ in actions]  # noqa: NPY002

    def generators() -> str:
        """Those of numpy and torch; the type checks of these tests draw from Python's own."""
        return digest({name: state for name, state in capture_random_state().items() if name != "python"})

    before = generators()
    first = measured(TablePolicy(STATES), reward_model=random_reward)
    assert generators() == before
    assert torch.equal(first.rewards, measured(TablePolicy(STATES), reward_model=random_reward).rewards)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_measuring_restores_the_training_mode_and_the_generators(training, fails):
    def reward(states: Any, actions: Any) -> list[float]:
        seen.append(policy.training or policy.net[2].training)
        torch.rand(1)
        return [math.nan] * len(actions) if fails else action_itself(states, actions)

    policy, seen = VectorPolicy(dropout=0.5).train(training), []
    policy.net[2].train(not training)
    before = torch.get_rng_state()
    with pytest.raises(RewardError) if fails else nullcontext():
        measured(policy, torch.zeros(2, 3), reward)
    assert seen == [False]
    assert (policy.training, policy.net[2].training) == (training, not training)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_mode_of_a_policy_that_is_no_module_is_restored_if_it_reports_one() -> None:
    hidden = DuckPolicy()
    measured(hidden, [0, 1])
    assert hidden.mode == "eval"  # it does not tell its mode
    telling = DuckPolicy()
    telling.training = True  # type: ignore[attr-defined]
    measured(telling, [0, 1])
    assert telling.mode == "train"


def test_a_separate_sampler_receives_the_weights_before_measuring() -> None:
    class Synced(TablePolicy):
        def sync_sampler(self) -> None:
            assert not self.calls["generate"]
            self.calls["sync"] += 1

    policy = Synced(STATES)
    measured(policy, batch_size=1)
    assert policy.calls == {"sync": 1, "generate": 3}


def test_an_earlier_measurement_gives_the_same_report_as_the_policy() -> None:
    before, after = TablePolicy(STATES, 9), TablePolicy(STATES, 9, logits=torch.randn(3, 9))
    options: dict[str, Any] = {"num_actions_per_state": 5, "batch_size": 2, "seed": 4, "progress": False}
    earlier = measured(before, **options)
    expected = compare_policies(before, after, STATES, action_itself, **options)
    assert compare_policies(earlier, after, STATES, action_itself, progress=False) == expected
    assert compare_policies(earlier, after, STATES, action_itself, **options) == expected


@pytest.mark.parametrize(
    ("is_measured", "option", "message"),
    [
        (True, {"num_actions_per_state": 4}, "num_actions_per_state must be 8, as `original` was measured; got 4"),
        (True, {"batch_size": 1}, "batch_size must be 32"),
        (True, {"seed": 1}, "seed must be 0"),
        (False, {"num_actions_per_state": 0}, "num_actions_per_state must be >= 1; got 0"),
        (False, {"batch_size": 0}, "batch_size must be >= 1; got 0"),
        (False, {"seed": -1}, "seed must be >= 0; got -1"),
        (False, {"confidence": 0.0}, "confidence must be > 0 and < 1; got 0.0"),
        (False, {"confidence": 1.0}, "confidence must be > 0 and < 1; got 1.0"),
    ],
)
def test_options_out_of_range_or_other_than_those_of_the_earlier_measurement_are_refused(is_measured, option, message):
    policy = TablePolicy(STATES)
    with pytest.raises(ConfigError, match=message):
        compare_policies(
            measured(policy) if is_measured else policy, TablePolicy(STATES), STATES, action_itself, **option
        )


def test_states_that_differ_from_the_earlier_measurement_are_refused() -> None:
    policy = TablePolicy(STATES)
    before = measured(policy)
    with pytest.raises(ContractError, match="must be the 3 that `original` was measured in; got 2"):
        compare_policies(before, policy, STATES[:2], action_itself)
    with pytest.raises(ContractError, match="in the same order; state 0 was 'up' and is a different one now"):
        compare_policies(before, policy, STATES[::-1], action_itself)
    assert policy.calls == {"generate": 1}  # found out before anything was sampled


@pytest.mark.parametrize("kind", [copy.deepcopy, torch.tensor, np.array])
def test_states_may_be_a_list_a_tensor_or_an_array(kind):
    policy, values = VectorPolicy(), [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    before = measured(policy, kind(values), batch_size=1)
    assert before.rewards.shape == (2, 8)
    assert compare_policies(before, policy, kind(values), action_itself, progress=False).num_unchanged == 2
    changed = kind(values)
    changed[1][2] += 1e-6
    with pytest.raises(ContractError, match="state 1"):
        compare_policies(before, policy, changed, action_itself, progress=False)


def test_fingerprints_of_states_depend_on_their_contents() -> None:
    def fingerprint(state: Any) -> str:
        return measured(TablePolicy(script=[[0]]), [state], num_actions_per_state=1).fingerprints[0]

    class Opaque: ...

    row = {"prompt": "1+1=", "answer": 2, "vector": torch.ones(2, dtype=torch.bfloat16)}
    assert fingerprint(row) == fingerprint({**row, "vector": torch.ones(2, dtype=torch.bfloat16)})
    others = [
        {**row, "answer": 3},
        {**row, "vector": torch.zeros(2, dtype=torch.bfloat16)},
        1,
        "1",
        1.5,
        None,
        Opaque(),
    ]
    others += [torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32)]  # the same bytes
    assert len({fingerprint(state) for state in [row, *others]}) == 1 + len(others)
    assert fingerprint(Opaque()) == fingerprint(Opaque())  # nothing is known of it but its type


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda policy: measured(policy, []), ContractError, "pass at least one"),
    (lambda policy: compare_policies(policy, policy, STATES, action_itself), ConfigError, "pass what measure_policy returned"),
    (lambda policy: compare_policies("policy", policy, STATES, action_itself), ProtocolError,
     "original must implement PolicyModel"),
    (lambda policy: compare_policies(policy, measured(TablePolicy(STATES)), STATES, action_itself), ProtocolError,
     "trained must implement PolicyModel"),
    (lambda policy: measured(policy, reward_model=object()), ProtocolError, "reward_model must implement RewardModel"),
])  # fmt: skip
def test_wrong_arguments_are_refused_by_name_before_anything_is_sampled(call, error, message) -> None:
    policy = TablePolicy(STATES)
    with pytest.raises(error, match=message):
        call(policy)
    assert policy.calls == {}


def test_rows_without_a_reward_can_be_left_out() -> None:
    """Before: (NaN, 1) -> 1 and (0, 0) -> 0; after: 1 and 1, nothing left out."""
    before, after, reward_model = [[2, 1], [0, 0]], [[1, 1], [1, 1]], paying(0.0, 1.0, math.nan)
    with pytest.raises(RewardError, match="finite"):
        compared(before, after, reward_model)
    report = compared(before, after, reward_model, **DROP)
    assert [(state.before, state.after) for state in report.states] == [(1.0, 1.0), (0.0, 1.0)]
    assert report.reward_failures_before["rows/dropped"] == 1.0
    assert report.reward_failures_after["rows/dropped"] == 0.0
    assert "rows/dropped: 1 before, 0 after" in str(report)
    assert "rewards/zeroed" not in str(report)
    tiny = compared([[2, 0]], [[1, 1]], paying(0.0, 1e-9, math.nan), **DROP)
    assert tiny.states[0].outcome == "improved"  # 1e-9 is much for a state whose largest reward is 1e-9


def test_a_state_without_any_reward_is_an_error() -> None:
    policy = scripted([[0, 1], [2, 2], [1, 1]])
    with pytest.raises(RewardError, match=r"all 2 rows of state\(s\) \[1\] were left out, .* 'down'"):
        measured(policy, STATES, paying(0.0, 1.0, math.nan), num_actions_per_state=2, **DROP)


def test_the_progress_bar_counts_states_and_can_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    measured(TablePolicy(STATES), batch_size=2)
    assert capsys.readouterr().err == ""
    measured(TablePolicy(STATES), batch_size=2, progress=True)
    assert "3/3" in capsys.readouterr().err


def test_a_measurement_calls_a_reward_with_a_deadline_in_another_process() -> None:
    def process(states: Any, actions: Any) -> list[int]:
        return [os.getpid()] * len(actions)

    options: dict[str, Any] = {"reward": RewardConfig(timeout=60.0), "progress": False}
    (measured,) = measure_policy(TablePolicy(), ["a"], process, num_actions_per_state=1, **options).rewards.unique()
    assert measured.item() not in (os.getpid(), 0)


# avg@k and pass@k: by hand, against all subsets of attempts, and through both measurements


NAN = math.nan


def test_pass_at_k_is_the_share_of_subsets_with_a_pass() -> None:
    """All C(6, k) subsets of six attempts with 0 to 6 passes."""
    rewards = torch.tril(torch.ones(7, 6, dtype=torch.float64), diagonal=-1)
    for k in range(1, 7):
        subsets = list(itertools.combinations(range(6), k))
        expected = [sum(any(row[i] for i in subset) for subset in subsets) / len(subsets) for row in rewards.tolist()]
        assert pass_at_k(rewards, k, 1.0).tolist() == pytest.approx(expected)


def test_attempts_without_a_reward_do_not_count() -> None:
    """One pass of two known attempts: pass@1 is 1/2, and pass@2 is 1. No pass of three: 0."""
    rewards = torch.tensor([[1.0, NAN, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    assert pass_at_k(rewards, 1, 1.0).tolist() == [0.5, 0.0]
    assert pass_at_k(rewards, 2, 1.0).tolist() == [1.0, 0.0]
    with pytest.raises(ConfigError, match=r"pass@3 needs 3 attempts at each state; a state has 2"):
        pass_at_k(rewards, 3, 1.0)
    with pytest.raises(ConfigError, match=r"pass_at_k: k must be >= 1"):
        pass_at_k(rewards, 0, 1.0)
    assert numbers_of_attempts(rewards) == [1, 2]


def test_the_numbers_of_attempts_double_up_to_all() -> None:
    found = [numbers_of_attempts(torch.zeros(2, size).double()) for size in (1, 2, 3, 8, 12)]
    assert found == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 12]]


def test_intervals_of_several_columns_draw_the_same_states() -> None:
    columns = np.random.default_rng(0).normal(size=(50, 3))
    found = bootstrap_intervals(columns, confidence=0.9, seed=4)
    assert found == [pytest.approx(paired_interval(column, confidence=0.9, seed=4)) for column in columns.T]
    assert bootstrap_intervals(columns[:1], confidence=0.9, seed=4) == [None] * 3


def test_a_measurement_has_both_with_intervals() -> None:
    """Means .25, 1 and .5. Of three states, the lowest is drawn three times in 1 of 27 resamples, more than 2.5 %."""
    found = measured(scripted(BEFORE), num_actions_per_state=4)
    average, two = found.average(), found.pass_at(2)
    assert (average.value, average.interval) == (pytest.approx(7 / 12), (0.25, 1.0))
    assert (two.value, two.interval) == (pytest.approx(7 / 9), pytest.approx((0.5, 1.0)))
    low, high = found.average(confidence=0.5).interval
    assert high - low < 0.5
    with pytest.raises(ConfigError, match=r"pass@5 needs 5 attempts"):
        found.pass_at(5)
    with pytest.raises(ConfigError, match=r"confidence must be > 0 and < 1; got 1"):
        found.average(confidence=1)


def test_what_passes_must_be_said_unless_all_rewards_are_0_or_1() -> None:
    found = measured(scripted(BEFORE), reward_model=paying(0.2, 0.8), num_actions_per_state=4)
    with pytest.raises(ConfigError, match=r"pass_reward must say from which reward on an attempt passes"):
        found.pass_at(1)
    assert found.pass_at(1, pass_reward=0.8).value == pytest.approx(7 / 12)
    assert (found.pass_at(1, pass_reward=0.81).value, found.pass_at(1, pass_reward=-1).value) == (0.0, 1.0)


def test_a_comparison_has_both_policies_and_their_difference() -> None:
    report = compared(BEFORE, AFTER)
    assert (report.pass_reward, [at.k for at in report.pass_at_k]) == (1.0, [1, 2, 4])
    two = report.pass_at_k[1]
    assert (two.before, two.after, two.difference) == pytest.approx((7 / 9, 8 / 9, 1 / 9))
    assert (two.difference_interval, report.avg_at_k.k) == (pytest.approx((-1 / 6, 1 / 2)), 4)
    assert report.avg_at_k.difference_interval == report.confidence_interval
    expected = measured(scripted(BEFORE), num_actions_per_state=4).average(confidence=0.5).interval
    assert compared(BEFORE, AFTER, confidence=0.5).avg_at_k.before_interval == pytest.approx(expected)


def test_rewards_on_a_scale_have_no_pass_unless_it_is_given() -> None:
    without = compared(BEFORE, AFTER, paying(0.5, 1.0))
    assert (without.pass_at_k, without.pass_reward) == ((), None)
    given = compared(BEFORE, AFTER, paying(0.5, 1.0), pass_reward=0.9)
    assert [at.before for at in given.pass_at_k] == [at.before for at in compared(BEFORE, AFTER).pass_at_k]
    assert given.pass_reward == 0.9
    assert {at.before for at in compared(BEFORE, AFTER, paying(0.5, 1.0), pass_reward=0.0).pass_at_k} == {1.0}


def test_dropped_rows_lower_the_largest_k() -> None:
    """One of four actions of the first state has no reward, so three are left."""

    def reward(states: list[str], actions: list[int]) -> list[float]:
        return [NAN if row == 2 else float(action) for row, action in enumerate(actions)]

    report = compared(BEFORE, AFTER, reward, **DROP)
    assert ([at.k for at in report.pass_at_k], report.avg_at_k.k) == ([1, 2, 3], 4)


# What a comparison prints and keeps: a table that fits a terminal, and JSON


def test_labels_come_from_the_states_cut_to_200_characters_or_from_label() -> None:
    states = ["a prompt", ("a", 1), "x" * 300, ("x" * 300,)]
    labels = measured(TablePolicy(states), states).labels
    assert (labels[:3], len(labels[3])) == (("a prompt", "('a', 1)", "x" * 300), 200)
    rows, policy = [{"prompt": "1+1="}, {"prompt": "2+2="}], TablePolicy(script=[[0], [1]])
    assert measured(policy, rows, num_actions_per_state=1, label=lambda row: row["prompt"]).labels == ("1+1=", "2+2=")


def test_the_json_of_a_report_is_complete_and_strict(tmp_path: Path) -> None:
    report = compared([[0, 0]], [[1, 0]], WeightedRewards({"part": action_itself}))
    assert report.improvement_percent is None
    assert report.confidence_interval is None
    path = tmp_path / "reports" / "report.json"
    text = report.to_json(path)
    assert (path.read_text(encoding="utf-8"), report.to_json()) == (text + "\n", text)
    assert text.startswith('{\n  "')  # a line for each field, for people and for diffs

    found = json.loads(text, parse_constant=pytest.fail)
    assert found["states"] == [{
        "label": "up", "before": 0.0, "after": 0.5, "difference": 0.5, "outcome": "improved",
        "answer_before": {"text": "0", "reward": 0.0}, "answer_after": {"text": "1", "reward": 1.0},
    }]  # fmt: skip
    assert found["improvement_percent"] is None
    assert found["components_after"] == {"part": 0.5}
    assert found["avg_at_k"] == {
        "k": 2, "before": 0.0, "before_interval": None, "after": 0.5, "after_interval": None, "difference": 0.5,
        "difference_interval": None,
    }  # fmt: skip
    assert [(at["k"], at["before"], at["after"]) for at in found["pass_at_k"]] == [(1, 0.0, 0.5), (2, 0.0, 1.0)]
    assert found == {**asdict(report), "states": found["states"], "pass_at_k": found["pass_at_k"]}
    interval = json.loads(compared(BEFORE, AFTER).to_json())["confidence_interval"]
    assert interval == pytest.approx([-0.5, 0.5])  # all three resampled alike: 1/27, more than 2.5 %


@pytest.mark.parametrize(
    "report", [compared(BEFORE, AFTER), compared([[0]], [[1]], WeightedRewards({"part": action_itself}))]
)
def test_a_report_is_read_back_from_its_json(report) -> None:
    assert ComparisonReport.from_json(report.to_json()) == report


WHOLE = json.loads(compared(BEFORE, AFTER).to_json())
STATE = WHOLE["states"][0]
WRONG: dict[str, list[Any]] = {
    "confidence_interval": [5, "x", [], {}, [0.1], [0.1, "x"], [0.1, 10**400]],
    "seed": [None, 0.5, True, []], "states": [5, None, {}], "components_before": [[], None, {"part": "x"}],
    "mean_reward_after": ["x", None, [], 10**400], "pass_reward": ["x", []], "pass_at_k": [5, None], "avg_at_k": [],
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("report.json", r"needs the JSON text that to_json wrote; got 'report.json'.* and not its path"),
        ("[]", "ComparisonReport needs mean_reward_before, .* got a list"),
        ('{"seed": 0}', "ComparisonReport needs .* got seed. Pass what to_json wrote"),
        (json.dumps({**WHOLE, "states": [{"label": "up"}]}), "StateComparison needs label, .* got label"),
        (json.dumps({**WHOLE, "states": [{**STATE, "answer_before": "0"}]}), "Answer needs text, reward; got a str"),
        (json.dumps({**WHOLE, "pass_at_k": [{"k": 1}]}), "AtK needs k, before, .* got k"),
        (
            json.dumps({**WHOLE, "states": [{**STATE, "answer_after": {"text": 5, "reward": 0.0}}]}),
            r"Answer\.text must be what to_json wrote; got int 5",
        ),
        *(
            (json.dumps({**WHOLE, name: value}), rf"ComparisonReport\.{name} must be what to_json wrote; got")
            for name, values in WRONG.items()
            for value in values
        ),
        *(
            (json.dumps({**WHOLE, "states": [{**STATE, name: value}]}), rf"StateComparison\.{name} must")
            for name, value in {"label": 5, "outcome": [], "before": None}.items()
        ),
        *(
            (json.dumps({**WHOLE, "avg_at_k": {**WHOLE["avg_at_k"], name: value}}), rf"AtK\.{name} must")
            for name, value in {"k": 0.5, "before": None, "after_interval": [0.1]}.items()
        ),
    ],
)
def test_text_that_is_no_report_is_refused(text, message) -> None:
    with pytest.raises(ConfigError, match=message):
        ComparisonReport.from_json(text)


def test_a_mean_before_that_is_not_positive_is_printed_without_a_percentage() -> None:
    first = str(compared([[0]], [[1]], paying(-2.0, 1.0))).splitlines()[0]
    assert first == "Mean reward: -2.0000 -> 1.0000, +3.0000 (no percentage: the mean before is not above 0)"


def test_the_printed_table_equals_the_expected_lines() -> None:
    report = compared(BEFORE, AFTER, WeightedRewards({"right": action_itself}))
    assert str(report).splitlines() == [
        "Mean reward: 0.5833 -> 0.5833, +0.0000 (+0 %)",
        "95 % confidence interval of the difference: -0.5000 to +0.5000",
        "avg@4: 0.2500 to 1.0000 before, 0.5000 to 0.7500 after",
        "3 states: 1 improved, 1 worse, 1 unchanged; 4 actions in each",
        "",
        "      before       after  difference  one of k actions earns at least 1",
        "      0.5833      0.5833     +0.0000  pass@1",
        "      0.7778      0.8889     +0.1111  pass@2",
        "      1.0000      1.0000     +0.0000  pass@4",
        "",
        "      before       after  difference  part of the reward",
        "      0.5833      0.5833     +0.0000  right",
        "",
        "      before       after  difference  state",
        "      0.2500      0.7500     +0.5000  up",
        "      0.5000      0.5000     +0.0000  same",
        "      1.0000      0.5000     -0.5000  down",
    ]


@pytest.mark.parametrize(("max_rows", "shown"), [
    (3, ["gains 5", "gains 4", "... 3 more", "gains 0"]), (2, ["gains 5", "... 4 more", "gains 0"]),
    (0, ["... 6 more"]), (6, [f"gains {k}" for k in (5, 4, 3, 2, 1, 0)]),
    (None, [f"gains {k}" for k in (5, 4, 3, 2, 1, 0)]),
])  # fmt: skip
def test_a_shortened_table_shows_the_largest_gains_and_losses(max_rows, shown) -> None:
    lines = of_many(6).table(max_rows=max_rows).splitlines()
    start = next(place for place, line in enumerate(lines) if line.endswith("difference  state"))
    assert [line[38:] for line in lines[start + 1 :]] == shown
    assert len(str(of_many(32)).splitlines()) == 4 + 2 + 21  # it is short by default


def test_no_label_can_widen_the_table_beyond_100_columns_or_break_a_line() -> None:
    states = ["long " * 100, "two\nlines\tand \x1b[31mred\x1b[0m \ud800", "x" * 62, "x" * 63]
    sides = [scripted([[k]] * 4, states) for k in (0, 1)]
    reward_model = WeightedRewards({"a name " * 30: lambda states, actions: [-1.23e30 * a for a in actions]})
    lines = str(compare_policies(*sides, states, reward_model, num_actions_per_state=1, progress=False)).splitlines()
    assert max(map(len, lines)) == 100
    assert "  -1.23e+30   -1.23e+30" in lines[6]
    assert lines[-3].endswith("  two lines and \\x1b[31mred\\x1b[0m \\ud800")
    assert lines[-2].endswith("x" * 62)
    assert lines[-1].endswith("x" * 59 + "...")
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0.0000"), (1e-4, "0.0001"), (99e-6, "9.90e-05"), (99_999, "99999.0000"), (-123_456, "-1.23e+05")],
)
def test_numbers_of_any_size_fit_their_column(value, shown):
    row = str(compared([[0]], [[1]], paying(value, value))).splitlines()[-1]
    assert row == f"{shown:>12}{shown:>12}{'+0.0000':>12}  up"
