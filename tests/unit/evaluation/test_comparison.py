"""Measuring and comparing policies: hand-worked numbers, what both sides share, and what a measurement leaves unchanged."""

import copy
import math
import random
from typing import Any

import numpy as np
import pytest
import torch

from grpo import (
    ConfigError,
    ContractError,
    GRPOConfig,
    GRPOTrainer,
    ProtocolError,
    RewardConfig,
    RewardError,
    Rewards,
    SampledActions,
    WeightedRewards,
    compare_policies,
)
from grpo._common.global_state import capture_random_state
from grpo.evaluation import Answer, paired_interval
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
from tests.support.policies import DuckPolicy, ExactSampling, TablePolicy, VectorPolicy, digest, weights_of

# Numbers


def test_the_report_equals_hand_worked_means_differences_and_outcomes() -> None:
    report = compared(BEFORE, AFTER)
    assert report.mean_reward_before == pytest.approx((0.25 + 1.0 + 0.5) / 3)
    assert report.mean_reward_after == pytest.approx((0.75 + 0.5 + 0.5) / 3)
    assert report.improvement == pytest.approx(0.0)
    assert report.improvement_percent == pytest.approx(0.0)
    rows = [(state.label, state.before, state.after, state.difference, state.outcome) for state in report.states]
    assert rows == [
        ("up", 0.25, 0.75, 0.5, "improved"),
        ("down", 1.0, 0.5, -0.5, "worse"),
        ("same", 0.5, 0.5, 0.0, "unchanged"),
    ]
    assert (report.num_improved, report.num_worse, report.num_unchanged) == (1, 1, 1)
    assert report.num_actions_per_state == 4
    assert report.components_before == report.components_after == {}


def test_the_improvement_is_a_percentage_only_of_a_positive_mean_before(subtests: pytest.Subtests) -> None:
    cases = [
        (2, 3, 50.0),  # 100 (3 - 2) / 2
        (4, 0, -100.0),
        (4, -2, -150.0),
        (-2, -1, None),  # a percentage of a loss says neither "better" nor how much better
        (-2, -3, None),
        (-2, 2, None),
        (0, 5, None),  # of nothing
        (0, 0, None),
    ]
    for before, after, percent in cases:
        with subtests.test(before=before, after=after, percent=percent):
            assert compared([[before]], [[after]]).improvement_percent == percent


def test_a_baseline_that_is_only_rounding_has_no_percentage() -> None:
    """.1 + .2 - .3 is 5.6e-17 in float64."""
    report = compared([[0, 1, 2]], [[3, 3, 3]], paying(0.1, 0.2, -0.3, 1.0))
    assert report.mean_reward_before != 0.0
    assert report.improvement_percent is None
    assert report.improvement == pytest.approx(1.0)


def test_a_report_keeps_one_answer_of_each_policy_in_each_state_with_its_reward() -> None:
    report = compared(BEFORE, AFTER, paying(0.25, 1.0))
    assert [state.answer_before for state in report.states] == [
        Answer(text="0", reward=0.25),  # BEFORE has the first actions 0, 1, 1
        Answer(text="1", reward=1.0),
        Answer(text="1", reward=1.0),
    ]
    assert [state.answer_after.text for state in report.states] == ["1", "1", "0"]  # the first actions of AFTER


def test_the_answer_is_the_first_action_that_has_a_reward() -> None:
    rewards = paying(math.nan, 2.0, 3.0)
    found = measured(
        Looked(["a", "b"], script=[[0, 2, 1], [1, 2, 0]]),
        ["a", "b"],
        rewards,
        num_actions_per_state=3,
        batch_size=1,
        reward=RewardConfig(non_finite="drop"),
    )
    assert found.answers == (Answer(text="2", reward=3.0), Answer(text="1", reward=2.0))


def test_answers_are_text_for_people(subtests: pytest.Subtests) -> None:
    cases: list[tuple[Any, str]] = [
        ("x" * 2_000, "x" * 2_000),
        ("x" * 1_500 + "y" * 1_500, "x" * 1_000 + " [... 1,000 more ...] " + "y" * 1_000),
        (torch.tensor([0.5, 1.0]), "[0.5, 1.0]"),
    ]
    for action, text in cases:
        with subtests.test(text=text):
            policy = TablePolicy(["s"], script=[[action]])
            answers = measured(policy, ["s"], lambda states, actions: [1.0], num_actions_per_state=1).answers
            assert answers[0].text == text


def test_differences_from_rounding_count_as_unchanged() -> None:
    """In float32 the means of (.3, 0) and (.1, .2) differ by 1e-9; by 1e-3 is a change."""
    report = compared([[0, 1], [0, 1]], [[2, 3], [2, 4]], paying(*torch.tensor([0.3, 0.0, 0.1, 0.2, 0.203])))
    assert report.states[0].difference != 0.0
    assert [state.outcome for state in report.states] == ["unchanged", "improved"]


def test_one_state_has_no_interval() -> None:
    report = compared([[0]], [[1]])
    assert report.confidence_interval is None
    assert report.improvement == 1.0
    assert "none from one state" in str(report)


def test_the_interval_is_that_of_the_paired_differences() -> None:
    """Differences 0 and 1, whatever the rewards: resampled means are 0, .5, 1 with probability 1/4, 1/2, 1/4."""
    report = compared([[5], [-5]], [[5], [-4]])
    assert report.confidence == 0.95
    assert report.confidence_interval == (0.0, 1.0)
    assert compared([[5], [-5]], [[5], [-4]], confidence=0.4).confidence_interval == (0.5, 0.5)


def test_the_interval_follows_the_seed() -> None:
    differences = np.arange(12.0) ** 2
    for seed in (0, 7):
        expected = paired_interval(differences, confidence=0.95, seed=seed)
        assert (
            of_many(12, lambda states, actions: [action**2 for action in actions], seed).confidence_interval == expected
        )
    assert expected != paired_interval(differences, confidence=0.95, seed=0)


def test_paired_intervals_equal_hand_worked_bounds() -> None:
    assert paired_interval(np.array([0.25, 0.25, 0.25]), confidence=0.99, seed=3) == (0.25, 0.25)
    # 60 % and two states: quantiles .2 and .8 lie within the outer quarters
    assert paired_interval(np.array([0.0, 1.0]), confidence=0.6, seed=0) == (0.0, 1.0)
    assert paired_interval(np.array([7.0]), confidence=0.95, seed=0) is None


def test_for_many_states_the_interval_is_the_normal_one() -> None:
    """Mean -+ 1.96 s / sqrt(B), by the central limit theorem; 400 states are resampled in several blocks."""
    differences = np.random.default_rng(0).normal(0.3, 2.0, size=400)
    low, high = paired_interval(differences, confidence=0.95, seed=1) or (math.nan, math.nan)
    half = 1.96 * differences.std() / math.sqrt(400)
    assert low == pytest.approx(differences.mean() - half, abs=0.05 * half)
    assert high == pytest.approx(differences.mean() + half, abs=0.05 * half)
    wider = paired_interval(differences, confidence=0.99, seed=1)
    assert wider is not None
    assert wider[0] < low < high < wider[1]
    assert paired_interval(differences, confidence=0.95, seed=1) == (low, high)
    assert paired_interval(differences, confidence=0.95, seed=2) != (low, high)


# Parts of the reward


def test_parts_are_reported_unweighted() -> None:
    """right = action: 7/12 and 7/12; twice = 2 action, weighed .25: total 1.5 action."""
    reward = WeightedRewards(
        {"right": action_itself, "twice": lambda states, actions: [2.0 * action for action in actions]},
        {"right": 1.0, "twice": 0.25},
    )
    report = compared(BEFORE, [[1] * 4] * 3, reward_model=reward)
    assert report.components_before == pytest.approx({"right": 7 / 12, "twice": 14 / 12})
    assert report.components_after == {"right": 1.0, "twice": 2.0}
    assert report.mean_reward_after == 1.5
    assert "twice" in str(report)


class Ragged:
    """Part "odd" is reported only for batches with a state "odd", and is NaN for actions of 0."""

    def compute_rewards(self, states: Any, actions: Any) -> Rewards:
        own = torch.tensor([float(action) for action in actions])
        parts = {"all": own}
        if "odd" in states:
            parts["odd"] = torch.where(own > 0, 10 * own, math.nan)
        return Rewards(values=own, components=parts)

    def train(self) -> None: ...

    def eval(self) -> None: ...

    def to(self, device: Any) -> None: ...


class Looked(TablePolicy):
    """`script` by state, in any batch."""

    def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> Any:
        self.calls[f"batch of {len(states)}"] += 1
        return [self.script[self.places[state]] for state in states]  # type: ignore[index]


def test_a_reward_part_is_averaged_over_the_states_it_applies_to() -> None:
    """Part "odd" applies to state "odd" alone. Actions (0, 2) give the mean 20, and actions (3, 1) the mean of 30 and 10."""
    states = ["even", "odd"]
    sides = [Looked(states, script=[[1, 1], row]) for row in ([0, 2], [3, 1])]
    report = compare_policies(*sides, states, Ragged(), num_actions_per_state=2, batch_size=1, progress=False)
    assert report.components_before == {"all": 1.0, "odd": 20.0}
    assert report.components_after == {"all": 1.5, "odd": 20.0}
    nothing = Looked(states, script=[[1, 1], [0, 0]])
    report = compare_policies(
        nothing, sides[0], states, Ragged(), num_actions_per_state=2, batch_size=1, progress=False
    )
    assert report.components_before == {"all": 0.5}
    assert report.components_after == {"all": 1.0, "odd": 20.0}
    line = next(line for line in str(report).splitlines() if line.endswith("  odd") and "20.0000" in line)
    assert line.split() == ["-", "20.0000", "-", "odd"]


def test_a_reward_part_weighs_every_state_equally() -> None:
    """Part "odd" is NaN and 40 in one state, 10 and 10 in the other. Its mean is (40 + 10) / 2, not 60 / 3."""
    policy = Looked(["odd", "too"], script=[[0, 4], [1, 1]])
    found = measured(policy, ["odd", "too"], Ragged(), num_actions_per_state=2)
    assert found.component_means == {"all": 1.5, "odd": 25.0}


class ThreeSteps(ExactSampling):
    """Rows of 1, 2 and 3 decisions out of 3."""

    def sample_actions(self, states: Any, num_actions_per_state: int) -> SampledActions:
        mask = torch.tensor([[True, False, False], [True, True, False], [True, True, True]])
        return SampledActions(actions=[["a", "b", "c"]], mask=mask)


def test_rewards_per_step_are_summed_over_the_policys_own_steps() -> None:
    """Steps pay 1, 10, 100 and nothing that is read off the mask: 1, 11, 111."""
    reward = WeightedRewards(
        {"steps": lambda states, actions: [[1.0, math.nan, math.nan], [1.0, 10.0, math.inf], [1.0, 10.0, 100.0]]}
    )
    found = measured(ThreeSteps(), ["s"], reward, num_actions_per_state=3)
    assert found.rewards.tolist() == [[1.0, 11.0, 111.0]]
    assert found.components["steps"].tolist() == [[1.0, 11.0, 111.0]]
    assert found.mean_reward == 41.0


def test_the_steps_of_a_left_out_row_are_left_out_too() -> None:
    """The first row is left out: 11 and 111, mean 61."""
    found = measured(
        ThreeSteps(),
        ["s"],
        lambda states, actions: [[math.nan, 5.0, 5.0], [1.0, 10.0, 5.0], [1.0, 10.0, 100.0]],
        num_actions_per_state=3,
        reward=RewardConfig(non_finite="drop"),
    )
    assert found.rewards[0, 1:].tolist() == [11.0, 111.0]
    assert found.rewards[0, 0].isnan()
    assert found.mean_reward == 61.0


# Random numbers, gradients, modes


def test_both_policies_are_measured_with_the_same_random_numbers() -> None:
    policy = TablePolicy(STATES, 50)
    for batch_size in (1, 2, 3):
        report = compare_policies(
            policy, copy.deepcopy(policy), STATES, action_itself, batch_size=batch_size, progress=False
        )
        assert report.num_unchanged == 3
        assert report.improvement == 0.0


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

    def failing(states: Any, actions: Any) -> list[float]:
        torch.rand(1)
        raise ValueError("broken")

    with pytest.raises(RewardError, match="broken"):
        measured(TablePolicy(STATES), reward_model=failing)
    assert generators() == before


def test_measuring_trains_nothing_and_keeps_no_gradient() -> None:
    class Watching(TablePolicy):
        def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> Any:
            assert not torch.is_grad_enabled()
            return super().generate_actions(states, num_actions_per_state)

    def watching(states: Any, actions: Any) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        return torch.ones(len(actions)) * worth

    worth = torch.ones((), requires_grad=True)
    policy = Watching(STATES)
    before = weights_of(policy)
    found = measured(policy, reward_model=watching)
    assert not found.rewards.requires_grad
    assert torch.equal(weights_of(policy), before)
    assert policy.logits.grad is None
    assert policy.calls == {"generate": 1}  # and nothing was scored


def test_measuring_restores_the_training_mode(subtests: pytest.Subtests) -> None:
    policy = VectorPolicy(dropout=0.5)
    seen = []

    def reward(states: Any, actions: Any) -> list[float]:
        seen.append(policy.training or policy.net[2].training)
        return action_itself(states, actions)

    for training in [True, False]:
        with subtests.test(training=training):
            policy.train(training)
            policy.net[2].train(not training)
            measured(policy, torch.zeros(2, 3), reward)
            assert not seen.pop()
            assert seen == []
            assert policy.training is training
            assert policy.net[2].training is not training
            with pytest.raises(RewardError):
                measured(policy, torch.zeros(2, 3), lambda states, actions: None)
            assert policy.training is training


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


# Before and after


def test_before_and_after_training_of_one_policy() -> None:
    policy = TablePolicy(STATES)
    before = measured(policy, num_actions_per_state=64, seed=5)
    config = GRPOConfig(seed=0, learning_rate=0.3, num_states_per_iteration=3)
    GRPOTrainer(config=config, policy=policy, reward_model=action_itself).train(
        STATES, num_iterations=20, progress=False
    )
    report = compare_policies(before, policy, STATES, action_itself, progress=False)
    assert report.mean_reward_before == pytest.approx(0.5, abs=0.1)
    assert report.mean_reward_after > 0.9
    assert report.num_improved == 3
    assert report.confidence_interval is not None
    assert report.confidence_interval[0] > 0.3
    assert (report.num_actions_per_state, report.seed) == (64, 5)  # as it was measured


def test_an_earlier_measurement_gives_the_same_report_as_the_policy() -> None:
    before, after = TablePolicy(STATES, 9), TablePolicy(STATES, 9, logits=torch.randn(3, 9))
    options: dict[str, Any] = {"num_actions_per_state": 5, "batch_size": 2, "seed": 4, "progress": False}
    earlier = measured(before, **options)
    expected = compare_policies(before, after, STATES, action_itself, **options)
    assert compare_policies(earlier, after, STATES, action_itself, progress=False) == expected
    assert compare_policies(earlier, after, STATES, action_itself, **options) == expected


def test_options_that_differ_from_the_earlier_measurement_are_refused(subtests: pytest.Subtests) -> None:
    cases = [
        ({"num_actions_per_state": 4}, "num_actions_per_state must be 8, as `original` was measured; got 4"),
        ({"batch_size": 1}, "batch_size must be 32"),
        ({"seed": 1}, "seed must be 0"),
    ]
    for option, message in cases:
        with subtests.test(option=option, message=message), pytest.raises(ConfigError, match=message):
            compare_policies(measured(TablePolicy(STATES)), TablePolicy(STATES), STATES, action_itself, **option)


def test_states_that_differ_from_the_earlier_measurement_are_refused() -> None:
    policy = TablePolicy(STATES)
    before = measured(policy)
    with pytest.raises(ContractError, match="must be the 3 that `original` was measured in; got 2"):
        compare_policies(before, policy, STATES[:2], action_itself)
    with pytest.raises(ContractError, match="in the same order; state 0 was 'up' and is a different one now"):
        compare_policies(before, policy, STATES[::-1], action_itself)
    assert policy.calls == {"generate": 1}  # found out before anything was sampled


def vectors(kind: str) -> Any:
    values = [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    return {"list": values, "tensor": torch.tensor(values), "array": np.array(values)}[kind]


def test_states_may_be_a_list_a_tensor_or_an_array(subtests: pytest.Subtests) -> None:
    for kind in ["list", "tensor", "array"]:
        with subtests.test(kind=kind):
            policy = VectorPolicy()
            before = measured(policy, vectors(kind), batch_size=1)
            assert before.rewards.shape == (2, 8)
            assert compare_policies(before, policy, vectors(kind), action_itself, progress=False).num_unchanged == 2
            changed = vectors(kind)
            changed[1][2] += 1e-6
            with pytest.raises(ContractError, match="state 1"):
                compare_policies(before, policy, changed, action_itself, progress=False)


def test_fingerprints_of_states_depend_on_their_contents() -> None:
    def fingerprint(state: Any) -> str:
        policy = TablePolicy(script=[[0]])
        return measured(policy, [state], num_actions_per_state=1).fingerprints[0]

    class Opaque:
        pass

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


# What is refused, left out, or called by name


def test_numbers_out_of_range_are_refused_by_name(subtests: pytest.Subtests) -> None:
    cases = [
        ({"num_actions_per_state": 0}, "num_actions_per_state must be >= 1; got 0"),
        ({"batch_size": 0}, "batch_size must be >= 1; got 0"),
        ({"seed": -1}, "seed must be >= 0; got -1"),
        ({"confidence": 0.0}, "confidence must be > 0 and < 1; got 0.0"),
        ({"confidence": 1.0}, "confidence must be > 0 and < 1; got 1.0"),
    ]
    for option, message in cases:
        with subtests.test(option=option, message=message), pytest.raises(ConfigError, match=message):
            compare_policies(TablePolicy(STATES), TablePolicy(STATES), STATES, action_itself, **option)


def test_wrong_arguments_are_refused_by_name() -> None:
    policy = TablePolicy(STATES)
    with pytest.raises(ContractError, match="pass at least one"):
        measured(policy, [])
    with pytest.raises(ConfigError, match="pass what measure_policy returned"):
        compare_policies(policy, policy, STATES, action_itself)
    with pytest.raises(ProtocolError, match="original must implement PolicyModel"):
        compare_policies("policy", policy, STATES, action_itself)
    with pytest.raises(ProtocolError, match="trained must implement PolicyModel"):
        compare_policies(policy, measured(policy), STATES, action_itself)
    with pytest.raises(ProtocolError, match="reward_model must implement RewardModel"):
        measured(policy, reward_model=object())
    assert policy.calls == {"generate": 1}


def test_rows_without_a_reward_can_be_left_out() -> None:
    """Before: (NaN, 1) -> 1 and (0, 0) -> 0; after: 1 and 1, nothing left out."""
    before, after, reward_model = [[2, 1], [0, 0]], [[1, 1], [1, 1]], paying(0.0, 1.0, math.nan)
    with pytest.raises(RewardError, match="finite"):
        compared(before, after, reward_model)
    report = compared(before, after, reward_model, reward=RewardConfig(non_finite="drop"))
    assert [(state.before, state.after) for state in report.states] == [(1.0, 1.0), (0.0, 1.0)]
    assert report.reward_failures_before["rows/dropped"] == 1.0
    assert report.reward_failures_after["rows/dropped"] == 0.0
    assert "rows/dropped: 1 before, 0 after" in str(report)
    assert "rewards/zeroed" not in str(report)
    tiny = compared([[2, 0]], [[1, 1]], paying(0.0, 1e-9, math.nan), reward=RewardConfig(non_finite="drop"))
    assert tiny.states[0].outcome == "improved"  # 1e-9 is much for a state whose largest reward is 1e-9


def test_a_state_without_any_reward_is_an_error() -> None:
    policy = scripted([[0, 1], [2, 2], [1, 1]])
    options: dict[str, Any] = {"num_actions_per_state": 2, "reward": RewardConfig(non_finite="drop")}
    with pytest.raises(RewardError, match=r"all 2 rows of state\(s\) \[1\] were left out, .* 'down'"):
        measured(policy, STATES, paying(0.0, 1.0, math.nan), **options)


def test_the_progress_bar_counts_states_and_can_be_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    measured(TablePolicy(STATES), batch_size=2)
    assert capsys.readouterr().err == ""
    measured(TablePolicy(STATES), batch_size=2, progress=True)
    assert "3/3" in capsys.readouterr().err
