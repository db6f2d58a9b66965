"""Rewards and values estimated from logged decisions: by hand, without bias on average, and in training."""

import enum
import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from grpo.checks import check_reward_model
from grpo.errors import ConfigError, ContractError, GRPOWarning
from grpo.logs import LogEstimate, LoggedDecision, LoggedRewards, LogReport, evaluate_from_logs, key_of
from tests.support.policies import TablePolicy
from tests.support.trainers import trainer_of


def row(state: Any, action: Any, probability: float, reward: float) -> LoggedDecision:
    return LoggedDecision(state=state, action=action, log_prob=math.log(probability), reward=reward)


class Size(enum.Enum):
    SMALL = "small"
    LARGE = "large"


ADD, UP, DOWN, WAIT = "add", "up", "down", "wait"
LOGS = [row("x", ADD, 0.5, 1.0), row("x", ADD, 0.25, 0.0), row("x", UP, 0.2, 0.5), row("y", WAIT, 0.1, 1.0)]
THREE = [row("x", ADD, 0.5, 3.0), row("x", ADD, 0.5, 6.0), row("y", ADD, 0.5, 12.0)]


def constant(value: float) -> Any:
    """Fit the same estimate to any decisions."""
    return lambda logs: lambda states, calls: torch.full((len(calls),), value)


def mean_reward(logs: Sequence[LoggedDecision]) -> Any:
    """Fit the mean reward to decisions."""
    return constant(sum(one.reward for one in logs) / len(logs))(logs)


def estimated(rewards: LoggedRewards, *pairs: tuple[Any, Any]) -> list[float]:
    return rewards.compute_rewards([state for state, _ in pairs], [made for _, made in pairs]).tolist()


def test_rewards_without_an_estimate_are_inverse_propensity_scores() -> None:
    """x: add (1 / .5 + 0 / .25) / 3, up (.5 / .2) / 3; y: wait 1 / .1; what was not logged has 0."""
    rewards = LoggedRewards(LOGS)
    pairs = [("x", ADD), ("x", UP), ("x", DOWN), ("y", WAIT), ("y", ADD), ("x", ADD)]
    assert estimated(rewards, *pairs) == pytest.approx([2 / 3, 2.5 / 3, 0.0, 10.0, 0.0, 2 / 3])
    assert estimated(rewards, *pairs[::-1]) == pytest.approx([2 / 3, 0.0, 10.0, 0.0, 2.5 / 3, 2 / 3]), "asked again"
    assert rewards.states == ["x", "y"]


def test_an_estimate_is_corrected_where_decisions_were_logged() -> None:
    """q = .5. add: .5 + (2 (1 - .5) + 4 (0 - .5)) / 3 = 1/6; up: its reward is as estimated; y: .5 + 10 (1 - .5)."""
    rewards = LoggedRewards(LOGS, fit=constant(0.5), num_folds=2)
    pairs = [("x", ADD), ("x", UP), ("x", DOWN), ("y", WAIT), ("y", DOWN)]
    assert estimated(rewards, *pairs) == pytest.approx([1 / 6, 0.5, 0.5, 5.5, 0.5])


def test_weights_are_cut_off_at_their_maximum() -> None:
    """At 3: add (2 * 1 + 3 * 0) / 3, up 3 * .5 / 3, wait 3 * 1. The default is 30."""
    with pytest.warns(GRPOWarning, match="max_weight=3 cuts off the weights of 75.0%"):
        rewards = LoggedRewards(LOGS, max_weight=3)
    assert estimated(rewards, ("x", ADD), ("x", UP), ("y", WAIT)) == pytest.approx([2 / 3, 0.5, 3.0])
    rare = [row("x", ADD, 1e-3, 1.0), row("x", ADD, 1 / 30, 1.0)]
    with pytest.warns(GRPOWarning, match="max_weight=30 cuts off the weights of 50.0% of the decisions"):
        rewards = LoggedRewards(rare)
    assert estimated(rewards, ("x", ADD)) == pytest.approx([30.0])
    LoggedRewards(rare, fit=constant(0.5), num_folds=2)  # an estimate fills the gap: no warning
    assert estimated(LoggedRewards(rare, max_weight=math.inf), ("x", ADD)) == pytest.approx([515.0])


@pytest.mark.filterwarnings("ignore:evaluate_from_logs")
def test_keys_say_which_states_and_actions_are_equal() -> None:
    """Case does not count in states, and only the first letter counts in actions: 1 / .5 and 3 / .25, over two decisions."""
    logs = [row("x", "add 2", 0.5, 1.0), row("X", "sort", 0.25, 3.0)]
    keys: dict[str, Any] = {"state_key": str.lower, "action_key": lambda action: action[0]}
    rewards = LoggedRewards(logs, **keys)
    assert estimated(rewards, ("x", "add 3"), ("X", "sing"), ("x", "wait")) == pytest.approx([1.0, 6.0, 0.0])
    assert rewards.states == ["x"], "the first of equal states"
    assert evaluate_from_logs(lambda states: ["add 3"], logs, **keys).ips.value == pytest.approx(1.0)


def test_tensors_arrays_and_numbers_are_states_and_actions_too() -> None:
    logs = [row(torch.tensor([1.0, 2.0]), torch.tensor(3), 0.5, 1.0), row((1.0, 2.0), 4, 0.5, 1.0)]
    rewards = LoggedRewards(logs)
    assert len(rewards.states) == 1
    asked = torch.tensor([[1.0, 2.0]] * 3), torch.tensor([3, 4, 5])
    assert rewards.compute_rewards(*asked).tolist() == pytest.approx([1.0, 1.0, 0.0])
    assert rewards.compute_rewards(np.array([[1.0, 2.0]]), [3]).tolist() == pytest.approx([1.0])
    assert key_of(torch.tensor([[1, 2], [3, 4]])) == key_of([[1, 2], [3, 4]]) == ((1, 2), (3, 4))


@dataclass(frozen=True)
class Point:
    """A state that holds a tensor."""

    place: Any
    kind: Size


@pytest.mark.parametrize("make", [
    lambda: (torch.tensor([1.0, 2.0]), torch.tensor(3)),
    lambda: {"a": [1, {"b": np.array([2.0])}]},
    lambda: Point(torch.tensor([1.0]), Size.LARGE),
    lambda: np.float32(0.5),
    lambda: None,
])  # fmt: skip
def test_states_and_actions_are_compared_by_content(make: Any) -> None:
    assert key_of(make()) == key_of(make())
    logged = LoggedRewards([row(make(), make(), 0.5, 1.0)] * 2)
    assert estimated(logged, (make(), make())) == pytest.approx([2.0])
    assert key_of(Point(1, Size.SMALL)) != key_of(Point(1, Size.LARGE))
    assert key_of({"a": 1}) != key_of({"a": 2})


@pytest.mark.parametrize("value", [object(), {1, 2}, DataLoader([1])], ids=["object", "set", "loader"])
def test_what_only_equals_itself_needs_a_key(value: Any) -> None:
    with pytest.raises(ContractError, match=r"equals no other. Pass state_key=\.\.\."):
        LoggedRewards([row(value, ADD, 0.5, 1.0)])


def test_log_probs_may_be_numbers_arrays_and_tensors_and_those_of_steps_add_up() -> None:
    """Each is log .5."""
    half = math.log(0.5)
    given = (half, np.float32(half), np.array([half]), torch.tensor(half), torch.tensor([half / 2, half / 2]), (half,))
    logs = [LoggedDecision(state=number, action=ADD, log_prob=one, reward=1.0) for number, one in enumerate(given)]
    pairs = [(number, ADD) for number in range(len(given))]
    assert estimated(LoggedRewards(iter(logs)), *pairs) == pytest.approx([2.0] * len(given), rel=1e-6)


def test_actions_that_are_never_those_of_the_log_are_reported() -> None:
    """The log has texts, and the policy numbers: after 1,000 different actions that is said once."""
    logs = [row(state, "1", 0.5, 1.0) for state in range(1200)]
    rewards = LoggedRewards(logs)
    rewards.compute_rewards(range(999), [1] * 999)
    rewards.compute_rewards(range(999), [1] * 999)  # the same actions again
    with pytest.warns(GRPOWarning, match="none of the first 1000 actions equals a logged action") as given:
        rewards.compute_rewards([999], [1])
    rewards.compute_rewards(range(1000, 1200), [1] * 200)
    assert len(given) == 1
    matched = LoggedRewards(logs)
    matched.compute_rewards([0], ["1"])
    matched.compute_rewards(range(1200), [1] * 1200)  # one action was matched: no warning


@pytest.mark.parametrize("values", [np.full(2, 0.5, np.float32), [0.5, 0.5], torch.full((2,), 0.5)])
def test_estimates_may_be_arrays_or_lists(values: Any) -> None:
    rewards = LoggedRewards(LOGS[:2], fit=lambda logs: lambda states, actions: values[: len(actions)], num_folds=2)
    assert estimated(rewards, ("x", UP)) == pytest.approx([0.5])


@pytest.mark.parametrize("make", [lambda n: torch.full((n, 1), 0.5), lambda n: 0.5, lambda n: [math.nan] * n])
def test_estimates_must_be_one_finite_number_per_row(make: Any) -> None:
    with pytest.raises(ContractError, match=r"must give finite rewards \[N\] = \[\d\]"):
        LoggedRewards(LOGS, fit=lambda logs: lambda states, actions: make(len(actions)), num_folds=2)


def test_a_decision_is_never_compared_with_an_estimate_that_has_seen_it() -> None:
    """The estimate is the number of its own decisions with a given reward, each of which is unique."""
    logs = [row(f"state {number % 4}", ADD, 0.5, float(number)) for number in range(20)]
    fitted: list[set[float]] = []
    asked: list[tuple[int, str]] = []

    def fit(rows: Sequence[LoggedDecision]) -> Any:
        fitted.append({one.reward for one in rows})
        number = len(fitted) - 1

        def estimate(states: Sequence[Any], calls: Sequence[Any]) -> Tensor:
            asked.extend((number, state) for state in states)
            return torch.zeros(len(calls))

        return estimate

    LoggedRewards(logs, fit=fit, num_folds=5)
    assert [len(seen) for seen in fitted] == [16] * 5
    left_out = [set(map(float, range(20))) - seen for seen in fitted]
    assert set.union(*left_out) == set(map(float, range(20))), "each decision is left out once"
    for fold, own in enumerate(left_out):
        states = sorted(f"state {int(number) % 4}" for number in own)
        assert sorted(state for number, state in asked if number == fold) == states


def test_each_fold_counts_in_a_state_by_its_share_of_the_states_decisions() -> None:
    """The estimate of a fold is the mean reward of the other folds, and the state's mean weights the folds."""
    # Each state has 1 or 2 decisions, and each of the 3 folds leaves out one: the other two have this mean.
    found = estimated(LoggedRewards(THREE, fit=mean_reward, num_folds=3), ("x", WAIT), ("y", WAIT))
    assert found == pytest.approx([(9.0 + 7.5) / 2, 4.5])
    # The estimate is the number of decisions that it is fitted to. Of 3 decisions in 2 folds, one fold has 2, and its estimate
    # is 1. The other has 1, and its estimate is 2: (2 * 1 + 2) / 3.
    count = lambda rows: constant(float(len(rows)))(rows)  # noqa: E731
    logged = LoggedRewards([row("x", ADD, 0.5, 1.0)] * 3, fit=count, num_folds=2)
    assert estimated(logged, ("x", WAIT)) == pytest.approx([4 / 3])


def noting(fitted: list[list[LoggedDecision]]) -> Any:
    """Fit nothing, and note the decisions."""

    def fit(rows: Sequence[LoggedDecision]) -> Any:
        fitted.append([*rows])
        return constant(0.0)(rows)

    return fit


def test_decisions_are_dealt_to_folds_by_chance_and_always_alike() -> None:
    """Dealt in turn, all decisions of x would be in one of the 2 folds, and those of y in the other."""
    logs = [row("xy"[number % 2], ADD, 0.5, float(number)) for number in range(20)]
    fitted: list[list[LoggedDecision]] = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        expected = torch.rand(1)
        torch.manual_seed(seed)
        LoggedRewards(logs, fit=noting(fitted), num_folds=2)
        assert torch.equal(torch.rand(1), expected), "no number is drawn from the global generator"
    assert [{one.state for one in rows} for rows in fitted] == [{"x", "y"}] * 4
    assert fitted[:2] == fitted[2:]


def test_an_estimate_has_five_folds_by_default() -> None:
    fitted: list[list[LoggedDecision]] = []
    logs = [row("x", ADD, 0.5, 1.0)] * 50
    LoggedRewards(logs, fit=noting(fitted))
    evaluate_from_logs(chooses({"x": ADD}), logs, fit=noting(fitted))
    assert [len(rows) for rows in fitted] == [40] * 10, "five of each"


def test_an_estimate_is_asked_once_for_each_state_and_action() -> None:
    """An estimate may be slow, and need not take an empty batch."""
    asked: list[list[tuple[Any, Any]]] = []

    def fit(rows: Sequence[LoggedDecision]) -> Any:
        def estimate(states: Sequence[Any], actions: Sequence[Any]) -> Tensor:
            asked.append([*zip(states, actions, strict=True)])
            return torch.zeros(len(actions))

        return estimate

    rewards = LoggedRewards(LOGS, fit=fit, num_folds=2)
    asked.clear()
    rewards.compute_rewards(["x", "y", "x"], [DOWN, DOWN, DOWN])
    assert asked == [[("x", DOWN), ("y", DOWN)]] * 2, "by each of two folds"
    rewards.compute_rewards(["y", "x", "x"], [DOWN, DOWN, WAIT])
    assert asked[2:] == [[("x", WAIT)]] * 2
    assert rewards.compute_rewards(["x", "y"], [WAIT, DOWN]).shape == (2,)
    assert rewards.compute_rewards([], []).shape == (0,)
    assert len(asked) == 4


def test_logged_rewards_are_a_reward_model() -> None:
    rewards = LoggedRewards(LOGS, fit=constant(0.5), num_folds=2)
    check_reward_model(rewards, ["x", "x", "y"], [ADD, DOWN, WAIT], strict=True)
    assert rewards.to("cpu").eval().train() is rewards


def logged_with(log_prob: Any) -> LoggedRewards:
    return LoggedRewards([LoggedDecision(state="x", action=ADD, log_prob=log_prob, reward=1.0)])


UNKNOWN = "with a probability above 0"


@pytest.mark.parametrize(("make", "kind", "text"), [
    (lambda: LoggedRewards([]), ConfigError, "needs a decision"),
    (lambda: LoggedRewards(LOGS, max_weight=0.5), ConfigError, "max_weight must be at least 1; got 0.5"),
    (lambda: LoggedRewards(LOGS, max_weight=math.nan), ConfigError, "max_weight must be at least 1"),
    (lambda: LoggedRewards(LOGS, fit=constant(0), num_folds=1), ConfigError, "from 2 to 4 folds"),
    (lambda: LoggedRewards(LOGS, fit=constant(0), num_folds=5), ConfigError, "num_folds=5"),
    (lambda: LoggedRewards(LOGS, num_folds=0), ConfigError, "num_folds must be >= 1; got 0"),
    (lambda: LoggedRewards(LOGS).compute_rewards(["z"], [ADD]), ContractError, "'z' has none"),
    (lambda: LoggedRewards([row("x", ADD, 1.1, 1.0)]), ContractError, "at most 1"),
    (lambda: LoggedRewards([row("x", ADD, 0.5, math.nan)]), ContractError, "a finite reward; got nan for 'add'"),
    (lambda: evaluate_from_logs(lambda states: [ADD], LOGS), ContractError, "one action per state, 2; got 1"),
    (lambda: logged_with(1e-3), ContractError, "at most 1"),  # exp(1e-3) = 1.001
    (lambda: logged_with(()), ContractError, UNKNOWN),
    (lambda: logged_with(None), ContractError, UNKNOWN),
    (lambda: logged_with((-400.0, -400.0)), ContractError, UNKNOWN),  # 0 in float64
    (lambda: logged_with((math.nan,)), ContractError, UNKNOWN),
])  # fmt: skip
def test_logs_that_say_nothing_are_refused(make: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        make()


def test_a_probability_may_be_1_and_above_it_by_rounding_only() -> None:
    """exp(1e-7) is 1 but for rounding."""
    assert estimated(logged_with(0), ("x", ADD)) == [1.0]
    assert estimated(logged_with(1e-7), ("x", ADD)) == pytest.approx([1.0])


def chooses(actions: dict[Any, Any]) -> Any:
    """A policy that is given by its choices."""
    return lambda states: [actions[state] for state in states]


def value_of(report: LogReport, name: str) -> tuple[float, float]:
    found: LogEstimate = getattr(report, name)
    return found.value, found.standard_error


@pytest.mark.filterwarnings("ignore:evaluate_from_logs")
def test_the_value_of_a_policys_predictions_equals_hand_worked_numbers() -> None:
    """x: add, y: wait. w = 2, 4, 0, 10 and w r = 2, 0, 0, 10: mean 3, deviations -1, -3, -3, 7, variance 68 / 3.

    Self-normalised: 12 / 16 = .75, w (r - .75) = .5, -3, 0, 2.5. q = .5: .5 + w (r - .5) = 1.5, -1.5, .5, 5.5: mean 1.5,
    deviations 0, -3, -1, 4, variance 26 / 3. (sum w)^2 / sum w^2 = 256 / 120. Logged: mean .625, variance .6875 / 3.
    """
    report = evaluate_from_logs(chooses({"x": ADD, "y": WAIT}), LOGS, fit=constant(0.5), num_folds=2)
    assert report.num_decisions == 4
    assert value_of(report, "ips") == pytest.approx((3.0, math.sqrt(68 / 3 / 4)))
    assert value_of(report, "snips") == pytest.approx((0.75, math.sqrt(0.25 + 9 + 6.25) / 16))
    assert value_of(report, "dr") == pytest.approx((1.5, math.sqrt(26 / 3 / 4)))
    assert value_of(report, "logged") == pytest.approx((0.625, math.sqrt(0.6875 / 3 / 4)))
    assert (report.effective_decisions, report.mean_weight) == pytest.approx((256 / 120, 4.0))
    assert str(report).splitlines() == [
        "logged  0.625 +- 0.239", "IPS     3.000 +- 2.380", "SNIPS   0.750 +- 0.246", "DR      1.500 +- 1.472",
        "4 decisions, 2 effective, mean weight 4.00",
    ]  # fmt: skip
    assert evaluate_from_logs(chooses({"x": ADD, "y": WAIT}), LOGS).dr is None
    alone = evaluate_from_logs(chooses({"x": ADD}), [row("x", ADD, 1.0, 0.5)])
    assert value_of(alone, "ips") == (0.5, math.inf), "one decision has no known standard error"


@pytest.mark.filterwarnings("ignore:evaluate_from_logs")
def test_a_state_without_an_action_earns_nothing() -> None:
    """w = 2, 4, 0 for x, whose mean is 2; y earns 0."""
    report = evaluate_from_logs(chooses({"x": ADD, "y": None}), LOGS, fit=constant(0.5), num_folds=2)
    assert (report.ips.value, report.mean_weight) == pytest.approx((0.5, 2.0))  # 2, 0, 0, 0
    assert report.dr.value == pytest.approx((1.5 - 1.5 + 0.5 + 0.0) / 4)
    nothing = evaluate_from_logs(chooses({"x": None, "y": None}), LOGS, fit=constant(0.5), num_folds=2)
    assert (nothing.ips.value, nothing.mean_weight) == (0.0, 1.0)
    assert value_of(nothing, "dr") == (0.0, 0.0)
    # The key is the first letter, which None lacks. w = 2 for up in y: (0 + 2 * 3) / 2.
    logs = [row("x", ADD, 0.5, 1.0), row("y", UP, 0.5, 3.0)]
    report = evaluate_from_logs(chooses({"x": None, "y": UP}), logs, action_key=lambda action: action[0])
    assert report.ips.value == pytest.approx(3.0)


def test_none_is_an_action_where_it_was_logged() -> None:
    """Showing nothing was drawn in half of 100 decisions, and earns 1."""
    logs = [row(state, action, 0.5, float(action is None)) for state in range(50) for action in (None, "ad")]
    assert evaluate_from_logs(lambda states: [None] * len(states), logs).ips.value == pytest.approx(1.0)
    assert estimated(LoggedRewards(logs), (3, None), (3, "ad")) == pytest.approx([1.0, 0.0])


@pytest.mark.filterwarnings("ignore:evaluate_from_logs")
def test_the_value_uses_the_estimate_that_has_not_seen_the_decision() -> None:
    """Each of 3 folds has 1 decision, and its estimate is the mean reward of the other two: 9, 7.5 and 4.5.

    x: add, w = 2: 9 + 2 (3 - 9) = -3 and 7.5 + 2 (6 - 7.5) = 4.5. y: no action, 0. The mean is .5.
    """
    report = evaluate_from_logs(chooses({"x": ADD, "y": None}), THREE, fit=mean_reward, num_folds=3)
    assert report.dr.value == pytest.approx(0.5)


def test_choices_that_the_logs_lack_are_reported() -> None:
    """The action of one of two states was never logged: the mean weight is about one half."""
    logs = [row(state, made, 0.5, 1.0) for state in "xy" for made in (ADD, UP) for _ in range(50)]
    with pytest.warns(GRPOWarning, match="almost no probability to 50% of what the policy chooses"):
        evaluate_from_logs(chooses({"x": ADD, "y": WAIT}), logs)
    with pytest.warns(GRPOWarning, match="almost no probability to 100%"):
        report = evaluate_from_logs(chooses({"x": WAIT, "y": DOWN}), logs)
    assert (report.snips, report.effective_decisions, report.ips.value) == (None, 0.0, 0.0)
    evaluate_from_logs(chooses({"x": ADD, "y": UP}), logs)  # without a warning


def test_few_decisions_that_agree_with_the_policy_are_reported() -> None:
    """Of 1,000 decisions one has the policy's choice, with probability 1 / 1000: one decision makes the mean weight 1."""
    logs = [row("x", ADD, 0.999, 0.0)] * 999 + [row("x", WAIT, 0.001, 1.0)]
    with pytest.warns(GRPOWarning, match="only 1 effective decisions agree"):
        assert evaluate_from_logs(chooses({"x": WAIT}), logs).ips.value == pytest.approx(1.0)
    enough = [row("x", action, 0.5, 1.0) for action in (ADD, WAIT) for _ in range(50)]
    evaluate_from_logs(chooses({"x": WAIT}), enough)  # 50 effective decisions: no warning
    with pytest.warns(GRPOWarning, match="only 49 effective decisions agree"):
        evaluate_from_logs(chooses({"x": WAIT}), enough[:-1])


def test_a_mean_weight_that_may_be_near_one_by_chance_is_not_reported() -> None:
    """200 decisions with a probability of 1/2, and the policy's choice in 70 of them: w = 2 or 0, with the mean .7.

    Variance (70 * 4 - 200 * .49) / 199 = .915, standard error .0676: .7 + 3 * .0676 = .903, which is not below .9.
    In 60 of them: mean .6, variance (60 * 4 - 200 * .36) / 199 = .844, standard error .0650: .6 + 3 * .0650 = .795.
    """

    def evaluate(number: int) -> LogReport:
        logs = [row("x", ADD if place < number else WAIT, 0.5, 1.0) for place in range(200)]
        # The function itself, without the checks of types that the tests put around it.
        return inspect.unwrap(evaluate_from_logs)(chooses({"x": ADD}), logs)

    assert evaluate(70).mean_weight == pytest.approx(0.7)
    with pytest.warns(GRPOWarning, match="almost no probability to 40%") as warned:
        evaluate(60)
    assert warned[0].filename == __file__, "the warning names the line that asked"


WORTH = {("x", "add"): 0.9, ("x", "wait"): 0.2, ("y", "add"): 0.1, ("y", "wait"): 0.6}
LOGGING = {"add": 0.8, "wait": 0.2}


def draw(number: int, generator: torch.Generator) -> list[LoggedDecision]:
    """Decisions with the probabilities `LOGGING` and rewards of 0 or 1 with the means `WORTH`."""
    uniform = torch.rand(number, 3, generator=generator).tolist()
    rows = []
    for first, second, third in uniform:
        state, action = "xy"[first < 0.5], ADD if second < LOGGING[ADD] else WAIT
        rows.append(row(state, action, LOGGING[action], float(third < WORTH[state, action])))
    return rows


def rough(logs: Sequence[LoggedDecision]) -> Any:
    """Fit nothing: an estimate that is near the truth, and wrong."""

    def estimate(states: Sequence[Any], actions: Sequence[Any]) -> Tensor:
        return torch.tensor([WORTH.get(pair, 0.0) + 0.1 for pair in zip(states, actions, strict=True)])

    return estimate


@pytest.mark.filterwarnings("ignore:evaluate_from_logs")
def test_estimates_are_unbiased_with_their_standard_error_as_spread_and_the_doubly_robust_one_varies_less() -> None:
    """The policy's value is (.9 + .6) / 2 = .75, and that of the logs (.8 .9 + .2 .2 + .8 .1 + .2 .6) / 2 = .48."""
    generator = torch.Generator().manual_seed(1)
    reports = [evaluate_from_logs(chooses({"x": ADD, "y": WAIT}), draw(100, generator), fit=rough) for _ in range(150)]
    spreads: dict[str, float] = {}
    for name, truth in {"logged": 0.48, "ips": 0.75, "snips": None, "dr": 0.75}.items():
        values, errors = torch.tensor([value_of(report, name) for report in reports]).T
        spreads[name] = values.std().item()
        assert errors.mean().item() == pytest.approx(spreads[name], rel=0.25), name
        assert truth is None or abs(values.mean().item() - truth) < 4 * spreads[name] / math.sqrt(150), name
    assert spreads["dr"] < 0.85 * spreads["ips"]


@pytest.mark.slow
def test_a_policy_learns_from_one_decision_per_state_what_it_would_learn_online() -> None:
    """The right action of each state is the one that earns more, in spite of a logging policy that prefers to add."""
    logs, policy = draw(400, torch.Generator().manual_seed(0)), TablePolicy("xy")
    rewards = LoggedRewards(logs, action_key=lambda action: {ADD: 0, WAIT: 1}.get(action, action))
    trainer = trainer_of(policy, rewards, group_size=8, learning_rate=0.05, seed=0)
    trainer.train(rewards.states, num_iterations=100, progress=False)
    assert policy.logits.argmax(1).tolist() == [0, 1], "to add in x, and to wait in y"
