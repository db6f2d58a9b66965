"""What a reward model can do wrong: the error that names it, or the recovery that is counted."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo import ExperienceBatch, RewardConfig, RewardError, SampledActions, WeightedRewards
from grpo.checks import check_reward_model
from tests.support.policies import ExactSampling, GroupScoring, RowScoring, TablePolicy, weights_of
from tests.support.trainers import ROLLOUTS, state_of, trainer_of


def good(count: int) -> list[float]:
    return [float(n % 3) for n in range(count)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", ["list", "tensor", "array"])
def test_a_reward_that_is_not_finite_is_an_error_at_every_position(bad: float, kind: str) -> None:
    make: Any = {"list": list, "tensor": torch.tensor, "array": np.array}[kind]
    for row in range(8):

        def broken(states: Any, actions: Any, row: int = row) -> Any:
            return make([bad if n == row else value for n, value in enumerate(good(8))])

        trainer = trainer_of(TablePolicy(), broken)
        before = state_of(trainer)
        with pytest.raises(
            RewardError, match=rf"broken must return finite numbers; got .* at rows \[{row}\] of 8"
        ) as caught:
            trainer.step(["a", "b"])
        assert str(bad) in str(caught.value)
        assert "'drop' or 'zero'" in str(caught.value)
        assert state_of(trainer) == before


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_zeroed_rewards_count_as_zero(bad: float) -> None:
    for row in range(4):
        values = [3.0, 5.0, 7.0, 9.0]
        trainer = trainer_of(
            TablePolicy(),
            lambda s, a, row=row, values=values: [bad if n == row else v for n, v in enumerate(values)],
            reward=RewardConfig(non_finite="zero"),
        )
        batch = trainer.collect(["a"])
        expected = [0.0 if n == row else v for n, v in enumerate(values)]
        assert batch.rewards.tolist() == expected
        assert trainer.advantages(batch).tolist() == pytest.approx([v - sum(expected) / 4 for v in expected])
        metrics = trainer.update(batch)
        assert (metrics["rewards/zeroed"], metrics["rows/dropped"]) == (1.0, 0.0)


@pytest.mark.parametrize("kind", [TablePolicy, RowScoring, GroupScoring, ExactSampling])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_dropped_row_leaves_the_batch_and_its_groups_statistics(kind: Any, bad: float) -> None:
    """Rewards 1, 2, 4, 8 in both groups: without one, the mean is that of the other three."""
    policy = TablePolicy(states=(0, 1)) if kind is TablePolicy else kind()
    values = [1.0, 2.0, 4.0, 8.0] * 2
    for row in range(8):
        kept = [n for n in range(8) if n != row]
        trainer = trainer_of(
            policy,
            lambda s, a, row=row: torch.tensor([bad if n == row else v for n, v in enumerate(values)]),
            reward=RewardConfig(non_finite="drop"),
        )
        batch = trainer.collect([0, 1])
        assert batch.num_rows == 7
        assert batch.rewards.tolist() == [values[n] for n in kept]
        assert batch.group_ids.tolist() == [n // 4 for n in kept]
        assert batch.states == [n // 4 for n in kept]
        assert len(batch.actions) == len(batch.mask) == 7
        means = {g: sum(values[n] for n in kept if n // 4 == g) / sum(n // 4 == g for n in kept) for g in (0, 1)}
        assert trainer.advantages(batch).tolist() == pytest.approx([values[n] - means[n // 4] for n in kept], rel=1e-6)
        metrics = trainer.update(batch)
        assert metrics["rows/dropped"] == 1.0
        assert metrics["group_stats/avg_group_size"] == 3.5
        assert metrics["rewards/max"] == 8.0


def test_when_every_reward_is_dropped_there_is_nothing_to_learn_from() -> None:
    trainer = trainer_of(TablePolicy(), lambda s, a: [math.nan] * len(a), reward=RewardConfig(non_finite="drop"))
    before = state_of(trainer)
    with pytest.raises(RewardError, match=r"<lambda>: no row of 8 has a reward"):
        trainer.step(["a", "b"])
    assert state_of(trainer) == before


WRONG_REWARDS = [
    (lambda n: torch.zeros(n - 1), r"got \[7\] float32"),
    (lambda n: [0.0] * (n + 1), r"got a list of 9"),
    (lambda n: [], r"got a list of 0"),
    (lambda n: torch.zeros(n, 1), r"got \[8, 1\] float32\. Squeeze the last axis"),
    (lambda n: np.zeros((n, 1)), r"got \[8, 1\] float64\. Squeeze the last axis"),
    (lambda n: [[0.0]] * n, r"got a list of 8"),
    (lambda n: torch.zeros(n, 2, 2), r"got \[8, 2, 2\] float32"),
    (lambda n: torch.zeros(1, n), r"got \[1, 8\] float32"),
    (lambda n: torch.tensor(0.0), r"got \[\] float32"),
    (lambda n: 1.0, r"got float 1\.0"),
    (lambda n: None, r"got NoneType None"),
    (lambda n: [None] * n, r"got a list of 8"),
    (lambda n: [1.0, None] * (n // 2), r"got a list of 8"),
    (lambda n: ["1.0"] * n, r"got a list of 8"),
    (lambda n: "12345678", r"got str"),
    (lambda n: [1j] * n, r"got a list of 8.*real numbers"),
    (lambda n: torch.zeros(n, dtype=torch.complex64), r"got \[8\] complex64.*real numbers"),
    (lambda n: [object()] * n, r"got a list of 8"),
    (lambda n: dict.fromkeys(range(n), 1.0), r"got dict"),
    (lambda n: [[1.0], [1.0, 2.0]] * (n // 2), r"got a list of 8"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "got"), WRONG_REWARDS)
def test_rewards_of_a_wrong_kind(make: Any, got: str) -> None:
    def reward(states: Any, actions: Any) -> Any:
        return make(len(actions))

    trainer = trainer_of(TablePolicy(), reward)
    before = state_of(trainer)
    with pytest.raises(RewardError, match=rf"reward must return one number per row, \[N\] = \[8\].*{got}"):
        trainer.step(["a", "b"])
    assert state_of(trainer) == before


@pytest.mark.parametrize(
    "make",
    [
        lambda values: values,
        tuple,
        lambda values: [int(v) for v in values],
        lambda values: torch.tensor(values),
        lambda values: torch.tensor(values).half(),
        lambda values: torch.tensor(values).bfloat16(),
        lambda values: torch.tensor(values).int(),
        lambda values: torch.tensor(values, requires_grad=True),
        lambda values: np.array(values, dtype=np.float32),
        lambda values: np.array(values, dtype=np.uint8),
        lambda values: np.array(values)[::-1][::-1],
        lambda values: [np.float32(v) for v in values],
        lambda values: [torch.tensor(v) for v in values],
        lambda values: [v > 0 for v in values],
    ],
)  # fmt: skip
def test_rewards_of_every_right_kind(make: Any) -> None:
    values = [1.0, 0.0, 0.0, 1.0]
    batch = trainer_of(TablePolicy(), lambda s, a: make(values)).collect(["a"])
    assert batch.rewards.tolist() == values
    assert not batch.rewards.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("make", [lambda x: x, lambda x: x.numpy(), lambda x: WeightedRewards({"x": lambda s, a: x})])
def test_rewards_that_are_the_rewards_models_own_memory_are_copied(make: Any, dtype: torch.dtype) -> None:
    memory = torch.tensor([1, 0, 2, 3], dtype=dtype)
    made = make(memory)
    batch = trainer_of(TablePolicy(), made if isinstance(made, WeightedRewards) else lambda s, a: made).collect(["a"])
    memory.zero_()
    assert batch.rewards.tolist() == [1.0, 0.0, 2.0, 3.0]
    assert all(part.tolist() == [1.0, 0.0, 2.0, 3.0] for part in batch.reward_components.values())


def test_parts_of_a_zeroed_reward_are_zeroed_too() -> None:
    """x = (NaN, 1, 2, 3) counts as (0, 1, 2, 3): mean 3/2; its row's reward, NaN + 1, as 0."""
    parts = {"x": lambda s, a: [math.nan, 1.0, 2.0, 3.0], "y": lambda s, a: [1.0] * 4}
    trainer = trainer_of(TablePolicy(), WeightedRewards(parts), reward=RewardConfig(non_finite="zero"))
    metrics = trainer.step(["a"])
    assert metrics["rewards/x/mean"] == 1.5
    assert metrics["rewards/x/std"] == pytest.approx(math.sqrt(5 / 3))
    assert metrics["rewards/y/mean"] == 1.0
    assert metrics["rewards/mean"] == pytest.approx((0 + 2 + 3 + 4) / 4)


class OfWhatApplies(WeightedRewards):
    """The sum of the parts that are no NaN, which marks a part that does not apply to the row."""

    def combine(self, components: Any) -> torch.Tensor:
        parts = torch.stack(list(components.values()))
        return parts.nansum(0).where(~parts.isnan().all(0), math.nan)


def test_a_part_that_does_not_apply_to_a_row_is_left_out_of_its_statistics() -> None:
    """x = (-, 1, 2, 3): mean 2, std 1; rewards (1, 2, 3, 4). A part that applies to no row has no mean."""
    parts = {"x": lambda s, a: [math.nan, 1.0, 2.0, 3.0], "y": lambda s, a: [1.0] * 4, "z": lambda s, a: [math.nan] * 4}
    metrics = trainer_of(TablePolicy(), OfWhatApplies(parts)).step(["a"])
    assert (metrics["rewards/x/mean"], metrics["rewards/x/std"]) == (2.0, 1.0)
    assert math.isnan(metrics["rewards/z/mean"])
    assert metrics["rewards/mean"] == 2.5
    report = check_reward_model(OfWhatApplies(parts), ["a"] * 4, [0, 1, 2, 3])
    assert report["components"].status == "passed", str(report)


def test_a_row_to_which_no_part_applies_names_the_parts_and_zeroes_its_own_only() -> None:
    """Row 0 has no reward and counts as 0; x does not apply to row 1, which does not count as 0: mean of x (0 + 2 + 3)/3."""
    parts = {"x": lambda s, a: [math.nan, math.nan, 2.0, 3.0], "y": lambda s, a: [math.nan, 1.0, 1.0, 1.0]}
    with pytest.raises(RewardError, match=r"rows \[0\] of 4, from x, y"):
        trainer_of(TablePolicy(), OfWhatApplies(parts)).step(["a"])
    trainer = trainer_of(TablePolicy(), OfWhatApplies(parts), reward=RewardConfig(non_finite="zero"))
    metrics = trainer.step(["a"])
    assert metrics["rewards/x/mean"] == pytest.approx(5 / 3)
    assert metrics["rewards/mean"] == pytest.approx((0 + 1 + 3 + 4) / 4)


def test_one_part_of_a_weighted_reward_is_named_when_it_is_wrong() -> None:
    def right(states: Any, actions: Any) -> Any:
        return [0.0] * len(actions)

    def wrong(states: Any, actions: Any) -> Any:
        return torch.zeros(len(actions), 1)

    with pytest.raises(RewardError, match=r"wrong must return one number per row"):
        trainer_of(TablePolicy(), WeightedRewards({"one": right, "two": wrong})).step(["a", "b"])


def test_a_reward_model_is_named_by_its_class() -> None:
    class Judge:
        def compute_rewards(self, states: Any, actions: Any) -> Any:
            raise KeyError("lost")

        def train(self) -> None: ...

        def eval(self) -> None: ...

        def to(self, device: Any) -> None: ...

    with pytest.raises(
        RewardError, match=r"Judge\.compute_rewards raised KeyError: 'lost' for rows 0 to 7, in 1 call"
    ) as caught:
        trainer_of(TablePolicy(), Judge()).step(["a", "b"])
    assert isinstance(caught.value.__cause__, KeyError)


class Flaky:
    """Raises on the given calls (from 0), and whenever one of the given actions is among those to be judged."""

    def __init__(self, calls: set[int] = frozenset(), actions: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self.bad_calls, self.bad_actions, self.calls = calls, actions, 0

    def __call__(self, states: Any, actions: Any) -> list[float]:
        self.calls += 1
        if self.calls - 1 in self.bad_calls or self.bad_actions & set(actions):
            raise TimeoutError("the judge is away")
        return [float(action) for action in actions]


@pytest.mark.parametrize("retries", [0, 1, 3])
@pytest.mark.parametrize("failing", range(4))
def test_a_reward_that_raises_on_call_k_is_asked_again(failing: int, retries: int) -> None:
    """Three iterations; the call `failing` raises once. Without retries that is the end of its iteration."""
    flaky = Flaky({failing})
    trainer = trainer_of(TablePolicy(num_actions=9), flaky, reward=RewardConfig(num_retries=retries, retry_delay=0.0))
    for iteration in range(3):
        fails_now = failing == iteration
        if fails_now and retries == 0:
            before = state_of(trainer)
            with pytest.raises(
                RewardError, match=r"Flaky raised TimeoutError: the judge is away for rows 0 to 7, in 1 call"
            ):
                trainer.step(["a", "b"])
            assert state_of(trainer) == before
        else:
            metrics = trainer.step(["a", "b"])
            assert metrics["rewards/retries"] == float(fails_now)
    assert flaky.calls == 3 + (failing < 3 and retries > 0)


@pytest.mark.parametrize("retries", [0, 1, 2, 3])
@pytest.mark.parametrize("failures", [1, 2, 3, 4])
def test_retries_outlast_as_many_failures_and_no_more(failures: int, retries: int) -> None:
    flaky = Flaky(set(range(failures)))
    trainer = trainer_of(TablePolicy(num_actions=9), flaky, reward=RewardConfig(num_retries=retries, retry_delay=0.0))
    if failures <= retries:
        assert trainer.step(["a", "b"])["rewards/retries"] == failures
        assert flaky.calls == failures + 1
    else:
        with pytest.raises(RewardError, match=rf"in {retries + 1} call"):
            trainer.step(["a", "b"])
        assert flaky.calls == retries + 1


def test_rows_whose_reward_raises_are_dropped_one_by_one() -> None:
    """Actions 0..3 of state a, 0, 4, 5, 6 of state b; whatever holds a 0 raises. One call for all, then eight."""
    script = [[0, 1, 2, 3], [0, 4, 5, 6]]
    flaky = Flaky(actions={0})
    policy = TablePolicy(num_actions=7, script=script)
    trainer = trainer_of(policy, flaky, reward=RewardConfig(on_failure="drop"))
    batch = trainer.collect(["a", "b"])
    assert flaky.calls == 9
    assert batch.actions == [1, 2, 3, 4, 5, 6]
    assert batch.states == ["a"] * 3 + ["b"] * 3
    assert batch.group_ids.tolist() == [0, 0, 0, 1, 1, 1]
    assert trainer.advantages(batch).tolist() == [-1.0, 0.0, 1.0] * 2
    assert trainer.update(batch)["rows/dropped"] == 2.0


def test_retries_come_before_rows_are_dropped() -> None:
    flaky = Flaky({0})
    trainer = trainer_of(TablePolicy(), flaky, reward=RewardConfig(on_failure="drop", num_retries=1, retry_delay=0.0))
    assert trainer.step(["a", "b"])["rows/dropped"] == 0.0
    assert flaky.calls == 2


def test_when_every_row_raises_that_is_an_error() -> None:
    trainer = trainer_of(TablePolicy(), Flaky(actions={0, 1}), reward=RewardConfig(on_failure="drop"))
    with pytest.raises(RewardError, match=r"Flaky raised for every one of 8 rows") as caught:
        trainer.step(["a", "b"])
    assert isinstance(caught.value.__cause__, TimeoutError)


def test_a_row_asked_for_alone_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four calls for all rows, with pauses of 1, 2 and 4 seconds; then one for each of eight rows, at once."""
    pauses: list[float] = []
    monkeypatch.setattr("time.sleep", pauses.append)
    flaky = Flaky(actions={0})
    policy = TablePolicy(num_actions=7, script=[[0, 1, 2, 3], [0, 4, 5, 6]])
    batch = trainer_of(policy, flaky, reward=RewardConfig(on_failure="drop", num_retries=3)).collect(["a", "b"])
    assert pauses == [1.0, 2.0, 4.0]
    assert flaky.calls == 4 + 8
    assert batch.metrics["rewards/retries"] == 3.0
    assert batch.actions == [1, 2, 3, 4, 5, 6]


class RaggedScript(RowScoring):
    """Always acts as `ROLLOUTS`: rows of 3, 1, 2 and 1 steps."""

    def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> Any:
        actions = ROLLOUTS["actions"]
        return [actions[:2], actions[2:]]


RAGGED_REWARDS = [[2.0, 3.0, 1.0], [1.0, 0.0, 0.0], [3.0, 1.0, 0.0], [2.0, 0.0, 0.0]]
"""1 + token, of every step of `ROLLOUTS`."""


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("failing", [None, 0, 1, 2, 3])
def test_ragged_rewards_per_step_survive_being_asked_for_row_by_row(failing: int | None, weighted: bool) -> None:
    """The call for all raises, and that for one row, or none; row 0 is the longest, rows 1 and 3 have one step."""

    def reward(states: Any, actions: Any) -> Any:
        (action,) = actions  # raises for more than one
        if failing is not None and action == ROLLOUTS["actions"][failing]:
            raise TimeoutError("the judge is away")
        return [[1.0 + token for token in action]]

    judge = WeightedRewards({"x": reward}) if weighted else reward
    trainer = trainer_of(RaggedScript(), judge, group_size=2, reward=RewardConfig(on_failure="drop"))
    batch = trainer.collect([0, 1])
    kept = [row for row in range(4) if row != failing]
    assert batch.actions == [ROLLOUTS["actions"][row] for row in kept]
    assert batch.mask.tolist() == ROLLOUTS["mask"][kept].tolist()
    assert batch.rewards.tolist() == [RAGGED_REWARDS[row] for row in kept]
    assert trainer.update(batch)["rows/dropped"] == 4 - len(kept)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda action: torch.ones(2),
        lambda action: torch.ones(1, 2, 2),
        lambda action: torch.ones(1, 9),
        lambda action: torch.ones(1, 2) if len(action) == 3 else torch.ones(1, len(action)),
        lambda action: torch.ones(1) if len(action) == 2 else torch.ones(1, len(action)),
        lambda action: torch.ones(1, len(action)) if len(action) == 2 else torch.ones(1),
        lambda action: ["one"],
    ],
    ids=[
        "two rows",
        "three axes",
        "too many steps",
        "one step too few",
        "one row per row",
        "one row per step",
        "words",
    ],
)
def test_a_wrong_shape_is_an_error_also_row_by_row(wrong: Any) -> None:
    def reward(states: Any, actions: Any) -> Any:
        (action,) = actions
        return wrong(action)

    trainer = trainer_of(RaggedScript(), reward, group_size=2, reward=RewardConfig(on_failure="drop"))
    before = state_of(trainer)
    with pytest.raises(RewardError, match="reward"):
        trainer.step([0, 1])
    assert state_of(trainer) == before


def test_rows_that_raise_and_rows_that_are_not_finite_are_both_dropped() -> None:
    def reward(states: Any, actions: Any) -> Any:
        if 0 in actions:
            raise ValueError("no zero")
        return [math.nan if action == 1 else float(action) for action in actions]

    policy = TablePolicy(num_actions=5, script=[[0, 1, 2, 3], [1, 4, 2, 0]])
    trainer = trainer_of(policy, reward, reward=RewardConfig(on_failure="drop", non_finite="drop"))
    batch = trainer.collect(["a", "b"])
    assert batch.actions == [2, 3, 4, 2]
    assert batch.rewards.tolist() == [2.0, 3.0, 4.0, 2.0]
    assert batch.metrics["rows/dropped"] == 4.0


def test_parts_of_a_weighted_reward_leave_with_their_rows() -> None:
    parts = WeightedRewards(
        {"x": Flaky(actions={0}), "y": lambda s, a: [10.0 * action for action in a]}, {"x": 1, "y": 0.1}
    )
    policy = TablePolicy(num_actions=4, script=[[0, 1, 2, 3]])
    batch = trainer_of(policy, parts, reward=RewardConfig(on_failure="drop")).collect(["a"])
    assert batch.rewards.tolist() == pytest.approx([2.0, 4.0, 6.0])
    assert batch.reward_components["x"].tolist() == [1.0, 2.0, 3.0]
    assert batch.reward_components["y"].tolist() == [10.0, 20.0, 30.0]


def test_rewards_per_step_must_fit_the_policys_steps() -> None:
    with pytest.raises(RewardError, match=r"Rewards per step must be \[8, 4\].*got \[8, 9\]"):
        trainer_of(ExactSampling(), lambda s, a: torch.zeros(len(a), 9)).step([0, 1])


@pytest.mark.parametrize("elsewhere", [False, True])
def test_rewards_of_steps_that_are_not_the_policys_are_never_looked_at(elsewhere: bool) -> None:
    """NaN off the mask, as an environment that pads its rewards may give it."""

    def padded(mask: Tensor) -> Tensor:
        return torch.where(mask, torch.arange(float(mask.numel())).view(mask.shape), math.nan)

    policy = ExactSampling()
    masks: list[Tensor] = []
    sample = policy.sample_actions

    def remembered(*arguments: Any) -> SampledActions:
        masks.append((sampled := sample(*arguments)).mask)
        return sampled

    policy.sample_actions = remembered  # type: ignore[method-assign]
    trainer = trainer_of(policy, lambda s, a: padded(masks[-1]))
    if elsewhere:
        mask = torch.tensor([[True, True, False], [True, False, False]])
        batch = ExperienceBatch.from_rows([0, 0], [(1, 0), (0,)], padded(mask), [0, 0], mask=mask)
    else:
        batch = trainer.collect([0, 1])
    metrics = trainer.update(batch)
    assert all(math.isfinite(value) for value in metrics.values())
    assert torch.isfinite(weights_of(policy)).all()


def test_groups_of_one_learn_nothing_and_it_is_said(caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_of(TablePolicy(), group_size=1)
    before = state_of(trainer)
    metrics = trainer.step(["a", "b"])
    assert "nothing to learn from: in every group all rewards are equal, or there is one row" in caplog.text
    assert state_of(trainer) == before
    assert metrics["train/skipped_updates"] == 1.0
    assert metrics["group_stats/avg_group_size"] == 1.0
    assert metrics["group_stats/zero_variance_fraction"] == 1.0
