"""Rewards and values estimated from logged decisions: by hand, without bias on average, and in training."""

import math
from collections.abc import Sequence
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from adapters.tools.catalogue.calls import ToolCall
from adapters.tools.catalogue.tools import Tool, ToolCatalogue
from adapters.tools.learning.logs import LogEstimate, LoggedRewards, LogReport, evaluate_from_logs
from adapters.tools.learning.records import SampleError, ToolSample
from adapters.tools.learning.tasks import ToolTask
from adapters.tools.policy.encoders import HashingEncoder
from adapters.tools.policy.policy import ToolSelectionPolicy
from grpo import GRPOConfig, GRPOTrainer
from grpo.checks import check_reward_model
from grpo.errors import ConfigError, ContractError, GRPOWarning


def add(number: float = 0.0) -> None:
    """Add numbers."""


def sort(order: Literal["up", "down"] = "up") -> None:
    """Sort items."""


def wait() -> None:
    """Wait a little."""


CATALOGUE = ToolCatalogue(Tool.from_function(function) for function in (add, sort, wait))


def call(tool: str, **arguments: Any) -> ToolCall:
    return ToolCall(tool=tool, arguments=arguments)


def row(state: Any, made: ToolCall, probability: float, reward: float) -> ToolSample:
    return ToolSample(
        state=state, tool=made.tool, arguments=made.arguments, log_prob=[math.log(probability)], reward=reward
    )


ADD, UP, DOWN, WAIT = call("add"), call("sort", order="up"), call("sort", order="down"), call("wait")
LOGS = [row("x", ADD, 0.5, 1.0), row("x", ADD, 0.25, 0.0), row("x", UP, 0.2, 0.5), row("y", WAIT, 0.1, 1.0)]


def constant(value: float) -> Any:
    """Fit the same estimate to any decisions."""
    return lambda logs: lambda states, calls: torch.full((len(calls),), value)


def estimated(rewards: LoggedRewards, *pairs: tuple[Any, ToolCall]) -> list[float]:
    return rewards.compute_rewards([state for state, _ in pairs], [made for _, made in pairs]).tolist()


# --- rewards


def test_rewards_without_an_estimate_are_inverse_propensity_scores() -> None:
    """x: add (1 / .5 + 0 / .25) / 3, up (.5 / .2) / 3; y: wait 1 / .1; what was not logged has 0."""
    rewards = LoggedRewards(LOGS, CATALOGUE)
    pairs = [("x", ADD), ("x", UP), ("x", DOWN), ("y", WAIT), ("y", ADD), ("x", ADD)]
    assert estimated(rewards, *pairs) == pytest.approx([2 / 3, 2.5 / 3, 0.0, 10.0, 0.0, 2 / 3])
    assert estimated(rewards, *pairs[::-1]) == pytest.approx([2 / 3, 0.0, 10.0, 0.0, 2.5 / 3, 2 / 3]), "asked again"
    assert rewards.states == ["x", "y"]


def test_an_estimate_is_corrected_where_decisions_were_logged() -> None:
    """q = .5. add: .5 + (2 (1 - .5) + 4 (0 - .5)) / 3 = 1/6; up: its reward is as estimated; y: .5 + 10 (1 - .5)."""
    rewards = LoggedRewards(LOGS, CATALOGUE, fit=constant(0.5), num_folds=2)
    pairs = [("x", ADD), ("x", UP), ("x", DOWN), ("y", WAIT), ("y", DOWN)]
    assert estimated(rewards, *pairs) == pytest.approx([1 / 6, 0.5, 0.5, 5.5, 0.5])


def test_weights_are_cut_off_at_their_maximum() -> None:
    """At 3: add (2 * 1 + 3 * 0) / 3, up 3 * .5 / 3, wait 3 * 1. The default is 30."""
    rewards = LoggedRewards(LOGS, CATALOGUE, max_weight=3)
    assert estimated(rewards, ("x", ADD), ("x", UP), ("y", WAIT)) == pytest.approx([2 / 3, 0.5, 3.0])
    rare = [row("x", ADD, 1e-3, 1.0)]
    assert estimated(LoggedRewards(rare, CATALOGUE), ("x", ADD)) == pytest.approx([30.0])
    assert estimated(LoggedRewards(rare, CATALOGUE, max_weight=math.inf), ("x", ADD)) == pytest.approx([1000.0])


def test_calls_are_compared_by_what_the_policy_decides() -> None:
    """The tool and the enumerated values. A value at its default is the value, and an unknown tool only counts in n."""
    logs = [row("x", call("add", number=3.0), 0.5, 1.0), row("x", call("fly"), 0.5, 9.0)]
    rewards = LoggedRewards(logs, CATALOGUE)
    pairs = [("x", call("add", number=4.0)), ("x", call("fly")), ("x", call("sing"))]
    assert estimated(rewards, *pairs) == pytest.approx([1.0, 0.0, 0.0])


def test_the_steps_of_a_decision_multiply() -> None:
    logged = ToolSample(state="x", tool="sort", arguments={"order": "up"}, log_prob=[math.log(0.5)] * 2, reward=1.0)
    assert estimated(LoggedRewards([logged], CATALOGUE), ("x", UP)) == pytest.approx([4.0])


def test_tasks_and_vectors_are_states_too() -> None:
    rewards = LoggedRewards([row("x", ADD, 0.5, 1.0)], CATALOGUE)
    assert estimated(rewards, (ToolTask(text="x", tool="add"), ADD)) == pytest.approx([2.0])
    rewards = LoggedRewards([row([1.0, 2.0], ADD, 0.5, 1.0)], CATALOGUE)
    assert rewards.states == [(1.0, 2.0)]
    assert rewards.compute_rewards(torch.tensor([[1.0, 2.0]]), [ADD]).tolist() == pytest.approx([2.0])


def test_a_decision_is_never_compared_with_an_estimate_that_has_seen_it() -> None:
    """The estimate is the number of its own decisions with a given reward, each of which is unique."""
    logs = [row(f"state {number % 4}", ADD, 0.5, float(number)) for number in range(20)]
    fitted: list[set[float]] = []
    asked: list[tuple[int, str]] = []

    def fit(rows: Sequence[ToolSample]) -> Any:
        fitted.append({one.reward for one in rows})
        number = len(fitted) - 1

        def estimate(states: Sequence[Any], calls: Sequence[ToolCall]) -> Tensor:
            asked.extend((number, state) for state in states)
            return torch.zeros(len(calls))

        return estimate

    LoggedRewards(logs, CATALOGUE, fit=fit, num_folds=5)
    assert [len(seen) for seen in fitted] == [16] * 5
    left_out = [set(map(float, range(20))) - seen for seen in fitted]
    assert set.union(*left_out) == set(map(float, range(20))), "each decision is left out once"
    for fold, own in enumerate(left_out):
        states = sorted(f"state {int(number) % 4}" for number in own)
        assert sorted(state for number, state in asked if number == fold) == states


def test_each_fold_counts_in_a_state_by_its_share_of_the_states_decisions() -> None:
    """The estimate of a fold is the mean reward of the other folds, and the state's mean weights the folds."""

    def fit(rows: Sequence[ToolSample]) -> Any:
        mean = sum(one.reward for one in rows) / len(rows)
        return lambda states, calls: torch.full((len(calls),), mean)

    # Each state has 1 or 2 decisions, and each of the 3 folds leaves out one: the other two have this mean.
    logs = [row("x", ADD, 0.5, 3.0), row("x", ADD, 0.5, 6.0), row("y", ADD, 0.5, 12.0)]
    found = estimated(LoggedRewards(logs, CATALOGUE, fit=fit, num_folds=3), ("x", WAIT), ("y", WAIT))
    assert found == pytest.approx([(9.0 + 7.5) / 2, 4.5])


def test_logged_rewards_pass_the_conformance_kit() -> None:
    check_reward_model(
        LoggedRewards(LOGS, CATALOGUE, fit=constant(0.5), num_folds=2), ["x", "x", "y"], [ADD, DOWN, WAIT], strict=True
    )


def test_logs_that_say_nothing_are_refused(subtests: pytest.Subtests) -> None:
    sure = ToolSample(state="x", tool="add", log_prob=[0.0], reward=1.0)
    for make, kind, text in (
        (lambda: LoggedRewards([], CATALOGUE), ConfigError, "needs a decision"),
        (lambda: LoggedRewards(LOGS, CATALOGUE, max_weight=0.5), ConfigError, "max_weight must be at least 1; got 0.5"),
        (lambda: LoggedRewards(LOGS, CATALOGUE, max_weight=math.nan), ConfigError, "max_weight must be at least 1"),
        (lambda: LoggedRewards(LOGS, CATALOGUE, fit=constant(0), num_folds=1), ConfigError, "from 2 to 4 folds"),
        (lambda: LoggedRewards(LOGS, CATALOGUE, fit=constant(0), num_folds=5), ConfigError, "num_folds=5"),
        (lambda: LoggedRewards(LOGS, CATALOGUE, num_folds=0), ConfigError, "num_folds must be a whole number"),
        (lambda: LoggedRewards(LOGS, CATALOGUE).compute_rewards(["z"], [ADD]), ContractError, "'z' has none"),
        (lambda: LoggedRewards([row("x", ADD, 1.1, 1.0)], CATALOGUE), SampleError, "at most 1"),
    ):
        with subtests.test(text), pytest.raises(kind, match=text):
            make()
    for steps in ((), (-400.0, -400.0)):  # no probability, and one that is 0 in float64
        logged = ToolSample(state="x", tool="add", log_prob=steps, reward=1.0)
        with subtests.test(steps=steps), pytest.raises(SampleError, match="with a probability above 0"):
            LoggedRewards([sure, logged], CATALOGUE)
    assert estimated(LoggedRewards([sure], CATALOGUE), ("x", ADD)) == [1.0], "a probability of 1 is a probability"


# --- the value of a policy


class Chooses:
    """A policy that is given by its calls."""

    catalogue = CATALOGUE

    def __init__(self, calls: dict[Any, ToolCall | None]) -> None:
        self.calls = calls

    def predict(self, states: Sequence[Any]) -> list[ToolCall | None]:
        return [self.calls[state] for state in states]


def value_of(report: LogReport, name: str) -> tuple[float, float]:
    found: LogEstimate = getattr(report, name)
    return found.value, found.standard_error


def test_the_value_of_a_policys_predictions_equals_hand_worked_numbers() -> None:
    """x: add, y: wait. w = 2, 4, 0, 10 and w r = 2, 0, 0, 10: mean 3, deviations -1, -3, -3, 7, variance 68 / 3.

    Self-normalised: 12 / 16 = .75, w (r - .75) = .5, -3, 0, 2.5. q = .5: .5 + w (r - .5) = 1.5, -1.5, .5, 5.5: mean 1.5,
    deviations 0, -3, -1, 4, variance 26 / 3. (sum w)^2 / sum w^2 = 256 / 120. Logged: mean .625, variance .6875 / 3.
    """
    report = evaluate_from_logs(Chooses({"x": ADD, "y": WAIT}), LOGS, constant(0.5), num_folds=2)
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
    assert evaluate_from_logs(Chooses({"x": ADD, "y": WAIT}), LOGS).dr is None


def test_a_request_without_a_tool_earns_nothing() -> None:
    report = evaluate_from_logs(Chooses({"x": ADD, "y": None}), LOGS, constant(0.5), num_folds=2)
    assert report.ips.value == pytest.approx(0.5)  # 2, 0, 0, 0
    assert report.dr is not None
    assert report.dr.value == pytest.approx((1.5 - 1.5 + 0.5 + 0.0) / 4)


def test_choices_that_the_logs_lack_are_reported() -> None:
    """Half of the requests are answered by a tool that was never logged: the mean weight is about one half."""
    logs = [row(state, made, 0.5, 1.0) for state in "xy" for made in (ADD, UP) for _ in range(50)]
    with pytest.warns(GRPOWarning, match="almost no probability to 50% of what the policy chooses") as given:
        evaluate_from_logs(Chooses({"x": ADD, "y": WAIT}), logs)
    assert given[0].filename == __file__  # the line that called it
    with pytest.warns(GRPOWarning, match="almost no probability to 100%"):
        report = evaluate_from_logs(Chooses({"x": WAIT, "y": DOWN}), logs)
    assert (report.snips, report.effective_decisions, report.ips.value) == (None, 0.0, 0.0)
    evaluate_from_logs(Chooses({"x": ADD, "y": UP}), logs)  # without a warning


def test_one_decision_has_no_known_standard_error() -> None:
    report = evaluate_from_logs(Chooses({"x": ADD}), [row("x", ADD, 1.0, 0.5)])
    assert value_of(report, "ips") == (0.5, math.inf)


# --- on average, and in training

WORTH = {("x", "add"): 0.9, ("x", "wait"): 0.2, ("y", "add"): 0.1, ("y", "wait"): 0.6}
LOGGING = {"add": 0.8, "wait": 0.2}


def draw(number: int, generator: torch.Generator) -> list[ToolSample]:
    """Decisions with the probabilities `LOGGING` and rewards of 0 or 1 with the means `WORTH`."""
    uniform = torch.rand(number, 3, generator=generator).tolist()
    rows = []
    for first, second, third in uniform:
        state, tool = "xy"[first < 0.5], "add" if second < LOGGING["add"] else "wait"
        rows.append(row(state, call(tool), LOGGING[tool], float(third < WORTH[state, tool])))
    return rows


def rough(logs: Sequence[ToolSample]) -> Any:
    """Fit nothing: an estimate that is near the truth, and wrong."""
    return lambda states, calls: torch.tensor(
        [WORTH.get((state, made.tool), 0.0) + 0.1 for state, made in zip(states, calls, strict=True)]
    )


@pytest.mark.filterwarnings("ignore:evaluate_from_logs")  # 40 decisions may have few of the policy's
def test_both_estimates_are_unbiased_and_the_doubly_robust_one_varies_less() -> None:
    """400 logs of 40 decisions. The policy's value is (.2 + .6) / 2 = .4, and the reward of waiting in y is .6."""
    generator = torch.Generator().manual_seed(0)
    policy = Chooses({"x": WAIT, "y": WAIT})
    found: dict[str, list[float]] = {"IPS": [], "DR": [], "reward, IPS": [], "reward, DR": []}
    for _ in range(400):
        logs = [*draw(40, generator)]
        if {one.state for one in logs} != {"x", "y"}:
            continue
        report = evaluate_from_logs(policy, logs, rough, num_folds=2)
        assert report.dr is not None
        found["IPS"].append(report.ips.value)
        found["DR"].append(report.dr.value)
        for name, fit in (("reward, IPS", None), ("reward, DR", rough)):
            found[name] += estimated(LoggedRewards(logs, CATALOGUE, fit=fit, num_folds=2), ("y", WAIT))
    truth = {"IPS": 0.4, "DR": 0.4, "reward, IPS": 0.6, "reward, DR": 0.6}
    for name, values in found.items():
        spread = torch.tensor(values).std().item()
        error = sum(values) / len(values) - truth[name]
        assert abs(error) < 4 * spread / math.sqrt(len(values)), name
        assert spread / math.sqrt(len(values)) < 0.02, "the test can tell a bias of .08"
    for ours, other in (("DR", "IPS"), ("reward, DR", "reward, IPS")):
        assert torch.tensor(found[ours]).std() < 0.85 * torch.tensor(found[other]).std()


@pytest.mark.filterwarnings("ignore:evaluate_from_logs")
def test_standard_errors_are_the_spread_of_the_estimates() -> None:
    generator = torch.Generator().manual_seed(1)
    reports = [evaluate_from_logs(Chooses({"x": ADD, "y": WAIT}), draw(100, generator), rough) for _ in range(150)]
    for name in ("logged", "ips", "snips", "dr"):
        values, errors = torch.tensor([value_of(report, name) for report in reports]).T
        assert errors.mean().item() == pytest.approx(values.std().item(), rel=0.25), name


def test_a_policy_learns_from_one_decision_per_request_what_it_would_learn_online() -> None:
    """The right tool of each request is the one that earns more, in spite of a logging policy that prefers to add."""
    generator = torch.Generator().manual_seed(0)
    logs = draw(400, generator)
    policy = ToolSelectionPolicy(CATALOGUE, encoder=HashingEncoder(16))
    rewards = LoggedRewards(logs, CATALOGUE, fit=rough)
    trainer = GRPOTrainer(
        config=GRPOConfig(group_size=8, learning_rate=0.05, seed=0), policy=policy, reward_model=rewards
    )
    trainer.train(rewards.states, num_iterations=25, progress=False)
    assert [made.tool for made in policy.predict(["x", "y"])] == ["add", "wait"]
