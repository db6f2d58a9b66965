"""What policies, rewards, gradients and rollouts can do wrong in an iteration: the error that names it, and nothing changes.

The shapes that a policy may return are tested in `_collecting/test_contract.py` and `test_experience_collector.py`, and the
rules for rewards in `_rewarding/test_calls.py`.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import count, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from grpo import (
    ActionScores,
    AdvantageEstimator,
    ConfigError,
    ContractError,
    ExperienceBatch,
    GRPOConfig,
    GRPOTrainer,
    Learner,
    NonFiniteGradientError,
    ObjectiveConfig,
    ProtocolError,
    WeightedRewards,
)
from grpo.checks import check_reward_model
from grpo.config import AdvantageConfig, RewardConfig
from tests.support.objective_inputs import as_users_run_it
from tests.support.policies import (
    Changing,
    DuckPolicy,
    RowScoring,
    SequencePolicy,
    TablePolicy,
    digest,
    weights_of,
)
from tests.support.trainers import ROLLOUTS, by_hand, state_of, trainer_of, without_time


def refuses(policy: Any, pattern: str, states: Any = ("a", "b"), **settings: Any) -> None:
    """The first step raises a `ContractError` with this text, and changes nothing."""
    trainer = trainer_of(policy, **settings)
    before = state_of(trainer)
    with pytest.raises(ContractError, match=pattern):
        trainer.step(list(states))
    assert state_of(trainer) == before


class Mutant(TablePolicy):
    """A table policy whose log-probs pass through a function."""

    def __init__(self, log_probs: Callable[[Tensor], Any] = lambda x: x) -> None:
        super().__init__()
        self.change_log_probs = log_probs

    def get_log_probabilities(self, states: Any, actions: Any) -> Any:
        return self.change_log_probs(super().get_log_probabilities(states, actions))


HALF = type("Half", (), {"generate_actions": print, "eval": print, "to": "cpu"})()  # `to` is no method


@pytest.mark.parametrize(("build", "message"), [
    (lambda: trainer_of(HALF),
     r"policy must implement PolicyModel; Half lacks get_log_probabilities\(\), get_parameters\(\), train\(\), to\(\)\."),
    (lambda: trainer_of(TablePolicy), "policy must be an instance; got the class TablePolicy"),
    (lambda: by_hand(reference_policy=object()), r"reference_policy must implement PolicyModel; object lacks generate_actions"),
])  # fmt: skip
def test_what_is_no_policy_is_refused_and_every_missing_method_named(build: Any, message: str) -> None:
    with pytest.raises(ProtocolError, match=f"^{message}") as caught:
        build()
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("states", [[], (), torch.zeros(0, 3), np.zeros((0, 2))], ids=lambda x: type(x).__name__)
def test_empty_states_are_refused(states: Any) -> None:
    trainer = trainer_of(TablePolicy())
    for ask in (trainer.step, trainer.collect, trainer.evaluate):
        with pytest.raises(ContractError, match="No states to act in: pass at least one"):
            ask(states)
    with pytest.raises(ContractError, match="No states to train on"):
        trainer.train(states, num_iterations=1, progress=False)


PER_ROW = r"\.get_log_probabilities must return \[N\] = \[8\] or \[N, T\]"
ADVICE = r".*Return one log-probability per \(state, action\) pair"


@pytest.mark.parametrize(("change", "message"), [
    (lambda x: x.reshape(8, 1, 1), rf"{PER_ROW}; got \[8, 1, 1\] float64{ADVICE}"),
    (lambda x: x.tolist(), rf"{PER_ROW}; got a list of 8{ADVICE}"),
    (lambda x: x.long(), rf"{PER_ROW}, floating-point; got \[8\] int64"),
    (lambda x: x.detach(),
     r": log-probabilities do not carry a gradient, but get_parameters\(\) holds tensors that require one"),
])  # fmt: skip
def test_log_probs_of_a_wrong_shape_or_dtype_or_without_a_gradient_are_refused(change: Any, message: str) -> None:
    refuses(Mutant(change), f"Mutant{message}")


COPIES: dict[str, Callable[[TablePolicy], Any]] = {
    "leaf copies": lambda policy: {"logits": policy.logits.detach().clone().requires_grad_()},
    "computed": lambda policy: {"logits": policy.logits * 1.0},
    "detached": lambda policy: {"logits": policy.logits.detach()},
    "state_dict": lambda policy: policy.state_dict(),
    "nothing": lambda policy: {},
}


@pytest.mark.parametrize("case", COPIES)
def test_get_parameters_that_returns_copies_is_refused(case: str) -> None:
    policy = type("Copies", (TablePolicy,), {"get_parameters": COPIES[case]})()
    before = digest(policy.logits)
    error: Any = ConfigError if case == "computed" else (ConfigError, ContractError)
    what = ".*logits is computed from other tensors" if case == "computed" else ""
    with pytest.raises(error, match=rf"Copies.*get_parameters\(\){what}.*dict\(self\.named_parameters\(\)\)"):
        trainer_of(policy).step(["a", "b"])
    assert digest(policy.logits) == before


@pytest.mark.parametrize(
    ("bad", "first", "row"), [(-math.inf, True, 0), (math.nan, True, 7), (-math.inf, False, 7), (math.inf, False, 0)]
)
def test_a_non_finite_log_prob_of_a_sampled_action_is_refused(bad: float, first: bool, row: int) -> None:
    """The error is raised while collecting, or before the update once a plain policy needs no scoring pass."""
    policy = Mutant()
    trainer = trainer_of(policy)
    if not first:
        trainer.step(["a", "b"])
    before = state_of(trainer)
    policy.change_log_probs = lambda log_probs: torch.where(torch.arange(len(log_probs)) == row, bad, log_probs)
    with pytest.raises(ContractError, match=r"Mutant: .*steps.* must be finite.*finfo\(dtype\)\.min, not -inf"):
        trainer.step(["a", "b"])
    assert state_of(trainer) == before
    policy.change_log_probs = lambda log_probs: log_probs
    trainer.step(["a", "b"])  # and the policy is as good as before
    assert torch.isfinite(policy.logits).all()


def widened(scores: ActionScores, *, counts: bool) -> ActionScores:
    """One more column, which counts or does not."""
    log_probs, mask = nn.functional.pad(scores.log_probs, (0, 1)), nn.functional.pad(scores.mask, (0, 1), value=counts)
    return ActionScores(log_probs=log_probs, mask=mask)


def flipped(scores: ActionScores) -> ActionScores:
    mask = scores.mask.clone()
    mask[1, 0] = False
    return ActionScores(log_probs=scores.log_probs, mask=mask)


OTHER_STEPS: dict[str, Callable[[ActionScores], ActionScores]] = {
    "wider": lambda scores: widened(scores, counts=True),
    "wider, unmasked": lambda scores: widened(scores, counts=False),
    "narrower": lambda scores: ActionScores(log_probs=scores.log_probs[:, :-1], mask=scores.mask[:, :-1]),
    "another step": flipped,
}


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("case", OTHER_STEPS)
def test_scoring_other_steps_in_an_update_than_at_collection_is_refused(case: str, epochs: int) -> None:
    message = r"Changing must score the batch's steps, but the masks differ: .*score the same steps every time"
    refuses(Changing(OTHER_STEPS[case]), message, (0, 1), num_epochs_per_update=epochs)


# Gradients and log-probs that are not finite: no weight changes, and too many of them end the run


class Poisoned(TablePolicy):
    """Puts a value into its gradient at the given backward passes, counted from 0."""

    def __init__(self, when: set[int], value: float) -> None:
        super().__init__()
        number = count()

        def hook(gradient: Tensor) -> Tensor:
            if next(number) not in when:
                return gradient
            poisoned = gradient.clone()
            poisoned[1, 0] = value
            return poisoned

        self.logits.register_hook(hook)


@pytest.mark.parametrize(
    ("at", "bad", "duck"), [(0, math.nan, False), (2, math.inf, True), (3, -math.inf, False), (5, math.nan, True)]
)
def test_an_update_with_a_non_finite_gradient_changes_nothing(at: int, bad: float, duck: bool) -> None:
    """Six updates in two iterations; the poisoned one leaves weights and Adam's moments bitwise as they were."""
    policy: Any = Poisoned({at}, bad)
    if duck:
        inner, policy = policy, DuckPolicy(num_actions=2)
        policy.tensors = {"logits": inner.logits}
    trainer = trainer_of(policy, batch_size=3, seed=0)
    history = [state_of(trainer)]
    apply = trainer.optimizer_step.apply

    def applied_and_seen(sum_of_scores: Tensor) -> None:
        apply(sum_of_scores)
        history.append(state_of(trainer))

    trainer.optimizer_step.apply = applied_and_seen  # type: ignore[method-assign]
    states = [0, 1] if duck else ["a", "b"]
    skipped = [trainer.step(states)["train/skipped_updates"] for _ in range(2)]
    assert skipped == ([1.0, 0.0] if at < 3 else [0.0, 1.0])
    assert [before != after for before, after in pairwise(history)] == [n != at for n in range(6)]
    assert torch.isfinite(weights_of(policy)).all()


def test_a_poisoned_micro_batch_skips_its_whole_update() -> None:
    """8 rows in forwards of 3: three backward passes per update; the second of the first update is poisoned."""
    policy = Poisoned({1}, math.nan)
    trainer = trainer_of(policy, micro_batch_size=3)
    before = state_of(trainer)
    metrics = trainer.step(["a", "b"])
    assert metrics["train/skipped_updates"] == 1.0
    assert state_of(trainer) == before
    assert policy.logits.grad is None
    trainer.step(["a", "b"])
    assert state_of(trainer) != before


@pytest.mark.parametrize("limit", [1, 3])
def test_too_many_skipped_updates_in_a_row_end_the_run_with_a_checkpoint(limit: int, tmp_path: Path) -> None:
    """Iterations 0 and 1 are sound, then nothing is."""
    trainer = trainer_of(Poisoned(set(range(2, 100)), math.nan), max_skipped_updates=limit, seed=0)
    states: list[str] = []
    sink = SimpleNamespace(log=lambda metrics, iteration: states.append(state_of(trainer)), close=lambda: None)
    run: dict[str, Any] = {"sinks": [sink], "checkpoint_dir": tmp_path, "checkpoint_every": 100, "progress": False}
    with pytest.raises(
        NonFiniteGradientError, match=rf"{limit} updates in a row had a gradient of norm nan.*no weight"
    ):
        trainer.train(["a", "b"], num_iterations=20, **run)
    assert len(states) == 2 + limit - 1
    assert set(states[1:]) == {state_of(trainer)}
    fresh = trainer_of(Poisoned(set(), math.nan), max_skipped_updates=limit, seed=9)
    fresh.load_checkpoint(tmp_path)
    assert state_of(fresh) == state_of(trainer)
    assert fresh.iteration == len(states)


def test_loading_a_run_ended_by_skipped_updates_resets_their_count(tmp_path: Path) -> None:
    """Three bad updates in a row end a run. After loading, two more are skipped and the third ends the run."""
    trainer = trainer_of(Poisoned(set(range(1, 100)), math.nan), max_skipped_updates=3)
    with pytest.raises(NonFiniteGradientError):
        trainer.train(["a", "b"], num_iterations=9, checkpoint_dir=tmp_path, checkpoint_every=9, progress=False)
    resumed = trainer_of(Poisoned(set(range(100)), math.nan), max_skipped_updates=3)
    resumed.load_checkpoint(tmp_path)
    with pytest.raises(NonFiniteGradientError, match="3 updates in a row"):
        resumed.train(["a", "b"], num_iterations=9, progress=False)
    assert [metrics["train/skipped_updates"] for metrics in resumed.history] == [1.0, 1.0]


def test_one_finite_update_resets_the_count_of_skipped_updates() -> None:
    trainer = trainer_of(Poisoned({0, 1, 3, 4, 6, 7}, math.inf), max_skipped_updates=3)
    skipped = [trainer.step(["a", "b"])["train/skipped_updates"] for _ in range(9)]
    assert skipped == [1.0, 1.0, 0.0] * 3


def test_a_run_whose_first_gradient_is_0_for_a_reason_that_stays_is_an_error() -> None:
    class Detached(TablePolicy):
        """Its log-probs depend on the logits, but not on how large the logits are."""

        scale = 0.0

        def get_log_probabilities(self, states: Any, actions: Any) -> Tensor:
            found = super().get_log_probabilities(states, actions)
            return found.detach() + self.scale * found

    message = r"Detached: in the first update, .*0 for all 1 \(logits\), because no log-prob"
    with pytest.raises(ContractError, match=message):
        trainer_of(Detached()).step(["a", "b"])
    later = trainer_of(Detached())
    for scale, num_zero in ((1.0, 0.0), (0.0, 1.0)):
        later.policy.scale = scale
        assert later.step(["a", "b"])["train/zero_gradients"] == num_zero


def test_a_gradient_of_0_that_says_nothing_of_the_policy_is_no_error() -> None:
    """Equal actions with opposite advantages cancel; without advantages, there is nothing to learn."""
    for script, rewards in [([[0, 0], [1, 1]], [1.0, 0.0, 0.0, 1.0]), ([[0, 1], [1, 0]], [1.0, 1.0, 0.0, 0.0])]:
        trainer = trainer_of(TablePolicy(script=script), lambda states, actions, given=rewards: given, group_size=2)
        assert trainer.step(["a", "b"])["train/grad_norm"] == 0.0


# What bad rewards do to an iteration: errors change nothing, and recoveries show in the metrics


@pytest.mark.parametrize(("row", "bad"), [(0, math.nan), (3, math.inf), (6, -math.inf)])
def test_a_dropped_row_does_not_count_in_its_groups_statistics(row: int, bad: float) -> None:
    """Rewards 1, 2, 4, 8 in both groups: without one, the mean is that of the other three."""
    values = [1.0, 2.0, 4.0, 8.0] * 2
    rewards = torch.tensor([bad if n == row else value for n, value in enumerate(values)])
    trainer = trainer_of(TablePolicy(), lambda s, a: rewards, reward=RewardConfig(non_finite="drop"))
    batch = trainer.collect(["a", "b"])
    kept = [n for n in range(8) if n != row]
    means = {g: sum(values[n] for n in kept if n // 4 == g) / sum(n // 4 == g for n in kept) for g in (0, 1)}
    assert trainer.advantages(batch).tolist() == pytest.approx([values[n] - means[n // 4] for n in kept], rel=1e-6)
    metrics = trainer.update(batch)
    assert (metrics["rows/dropped"], metrics["rewards/zeroed"]) == (1.0, 0.0)
    assert metrics["group_stats/avg_group_size"] == 3.5


def test_the_counts_of_an_iteration_that_fails_later_are_reported_by_the_next() -> None:
    """The iteration has asked for rewards and dropped a row when its advantages fail."""
    fails, estimated = iter([True]), AdvantageEstimator(AdvantageConfig())

    def advantages(batch: ExperienceBatch) -> Tensor:
        if next(fails, False):
            raise ValueError("only the first time")
        return estimated(batch)

    config = {"group_size": 4, "reward": RewardConfig(non_finite="drop")}
    rewards = [3.0, math.nan, 7.0, 10.0]
    trainer, _ = by_hand(policy=TablePolicy(), rewards=rewards, config=config, advantages=advantages)
    with pytest.raises(ValueError, match="only the first time"):
        trainer.step(["a"])
    assert [trainer.step(["a"])["rows/dropped"] for _ in range(2)] == [2.0, 1.0]


def test_zeroed_rewards_count_as_0_in_advantages() -> None:
    """Rewards 3, 0, 7, 10: mean 5."""
    zero = RewardConfig(non_finite="zero")
    trainer = trainer_of(TablePolicy(), lambda s, a: [3.0, math.nan, 7.0, 10.0], reward=zero)
    batch = trainer.collect(["a"])
    assert trainer.advantages(batch).tolist() == [-2, -5, 2, 5]
    assert trainer.update(batch)["rewards/zeroed"] == 1.0


def test_a_part_that_does_not_apply_to_a_row_is_left_out_of_its_statistics() -> None:
    """x = (-, 1, 2, 3): mean 2, std 1; rewards (1, 2, 3, 4). A part that applies to no row has no mean."""
    parts = {"x": lambda s, a: [math.nan, 1.0, 2.0, 3.0], "y": lambda s, a: [1.0] * 4, "z": lambda s, a: [math.nan] * 4}
    metrics = trainer_of(TablePolicy(), WeightedRewards(parts)).step(["a"])
    assert (metrics["rewards/x/mean"], metrics["rewards/x/std"]) == (2.0, 1.0)
    assert not any(math.isnan(value) for value in metrics.values())
    assert "rewards/z/mean" not in metrics
    assert [metrics[f"rewards/{name}/applies"] for name in "xyz"] == [0.75, 1.0, 0.0]
    assert metrics["rewards/mean"] == 2.5
    report = check_reward_model(WeightedRewards(parts), ["a"] * 4, [0, 1, 2, 3])
    assert report["components"].status == "passed", str(report)


def test_rewards_outside_the_steps_of_rollouts_are_never_read() -> None:
    """NaN outside the mask, as an environment that pads its rewards may give it."""
    mask = torch.tensor([[True, True, False], [True, False, False]])
    rewards = torch.tensor([[1.0, 2.0, math.nan], [3.0, math.inf, math.nan]])
    batch = ExperienceBatch.from_rows([0, 0], [(1, 0), (0,)], rewards, [0, 0], mask=mask)
    assert batch.rewards.tolist() == [[1.0, 2.0, 0.0], [3.0, 0.0, 0.0]]


def test_groups_of_one_row_learn_nothing_and_this_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    trainer = trainer_of(TablePolicy(), group_size=1)
    before = state_of(trainer)
    metrics = trainer.step(["a", "b"])
    assert "every group has one row" in caplog.text
    assert state_of(trainer) == before
    assert metrics["train/skipped_updates"] == 1.0
    assert metrics["group_stats/avg_group_size"] == 1.0
    assert metrics["group_stats/zero_variance_fraction"] == 1.0


# Rollouts, references and advantages that do not fit the policy's steps, and those that just do


class AnotherStep(RowScoring):
    """Masks the first step of row 1."""

    def score_actions(self, states: Any, actions: Any) -> ActionScores:
        return flipped(super().score_actions(states, actions))


def test_a_forward_may_leave_out_columns_that_are_masked_for_all_rows() -> None:
    """Rows of one forward are padded to their own longest."""
    policy = RowScoring()
    actions = [(1, 2, 2, 0), (0,), (0,), (1, 0)]
    mask = torch.tensor([[place < len(action) for place in range(4)] for action in actions])
    trainer = trainer_of(policy, micro_batch_size=2)
    batch = ExperienceBatch.from_rows([0, 0, 1, 1], actions, [0.0, 1.0, 0.0, 1.0], [0, 0, 1, 1], mask=mask)
    assert trainer.update(batch)["train/num_updates"] == 1


@pytest.mark.parametrize("mask", [None, [[True, True], [True, True]], [[True, False], [True, True]]])
def test_rollouts_whose_mask_differs_from_the_policys_are_refused(mask: Any) -> None:
    """The policy decided two steps and one. The batch says one each, two each, or one and two."""
    batch = ExperienceBatch.from_rows([0, 0], [(1, 0), (0,)], [0.0, 1.0], [0, 0], mask=mask)
    with pytest.raises(ContractError, match=r"masks differ.*ExperienceBatch\.from_rows the mask"):
        trainer_of(RowScoring(), num_epochs_per_update=2).update(batch)


class OwnReference(RowScoring):
    """`ScoresReference`, with so many steps per row."""

    reference_is_start = False

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self.num_steps = num_steps

    def reference_log_probabilities(self, states: Any, actions: Any) -> Tensor:
        return torch.full((len(actions), self.num_steps), -1.0, dtype=torch.float64)


def trainer_with_reference(reference: Any, **settings: Any) -> GRPOTrainer:
    config, own = {"objective": ObjectiveConfig(kl_coef=0.1), **settings}, isinstance(reference, OwnReference)
    policy, given = (reference, None) if own else (RowScoring(), reference)
    return by_hand(policy=policy, reference_policy=given, config=config)[0]


@pytest.mark.parametrize("micro_batch_size", [None, 2])
@pytest.mark.parametrize(("reference", "name"), [
    (lambda: OwnReference(1), r"OwnReference\.reference_log_probabilities"),
    (lambda: OwnReference(2), r"OwnReference\.reference_log_probabilities"),
    (SequencePolicy, "reference SequencePolicy"),
    (AnotherStep, "reference AnotherStep"),
])  # fmt: skip
def test_a_reference_that_leaves_out_steps_is_refused(reference: Any, name: str, micro_batch_size: int | None) -> None:
    """A step it says nothing of must not count as one it is sure of."""
    trainer = trainer_with_reference(reference(), micro_batch_size=micro_batch_size)
    before = state_of(trainer)
    with pytest.raises(ContractError, match=rf"{name} must score every step"):
        trainer.update(ExperienceBatch.from_rows(**ROLLOUTS))
    assert state_of(trainer) == before


def test_a_reference_need_not_score_what_is_masked_for_all() -> None:
    """A fourth step that no row has: three are enough."""
    mask = torch.nn.functional.pad(ROLLOUTS["mask"], (0, 1), value=False)
    trainer = trainer_with_reference(OwnReference(3))
    metrics = trainer.update(ExperienceBatch.from_rows(**{**ROLLOUTS, "mask": mask}))
    assert metrics["train/kl_mean"] > 0


def test_rows_without_a_step_are_legal_and_carry_no_loss() -> None:
    """Two rows, the second empty: the mean over rows counts both, so the gradient is that of the first, halved."""
    mask = torch.tensor([[True, True], [False, False]])
    batch = ExperienceBatch.from_rows([0, 0], [(1, 0), ()], [1.0, 0.0], [0, 0], mask=mask)
    metrics = trainer_of(RowScoring()).update(batch)
    assert metrics["steps/mean"] == 1.0
    assert metrics["train/policy_loss"] == pytest.approx(-0.5 * 0.5)  # advantage 1/2, ratio 1, weight 1/2


def test_invalid_advantages_are_refused_and_change_nothing() -> None:
    trainer, _ = by_hand(rewards=[0.0, 1.0, 2.0, 3.0], advantages=lambda batch: torch.ones(batch.num_rows, 2))
    before = state_of(trainer)
    message = r"advantages must be a tensor \[N\] = \[4\].*got \[4, 2\] float32"
    with as_users_run_it(), pytest.raises(ContractError, match=message):
        trainer.step(["a", "b"])
    assert state_of(trainer) == before


def with_advantages(values: list[list[float]], filler: float) -> tuple[str, dict[str, float]]:
    """Three updates on `ROLLOUTS` with these advantages on its mask, and `filler` off it: the state after, the metrics."""
    torch.manual_seed(1)
    own = lambda batch: torch.tensor(values).where(batch.mask, filler)  # noqa: E731
    trainer, _ = by_hand(policy=RowScoring(), advantages=own)
    for _ in range(3):
        metrics = trainer.update(ExperienceBatch.from_rows(**ROLLOUTS))
    return state_of(trainer), without_time(metrics)


def test_advantages_outside_the_mask_are_never_read() -> None:
    """NaN outside the mask gives exactly the same updates as 0, and does not keep a row from being skipped."""
    values = [[1.0, -2.0, 0.5], [-1.0, 0.0, 0.0], [2.0, 0.0, 0.0], [3.0, 0.0, 0.0]]
    state, metrics = with_advantages(values, math.nan)
    assert (state, metrics) == with_advantages(values, 0.0)
    assert math.isfinite(metrics["train/grad_norm"])
    _, metrics = with_advantages([[1.0, -2.0, 0.5], [0.0] * 3, [0.0] * 3, [3.0, 0.0, 0.0]], math.nan)
    assert metrics["rows/skipped_zero_advantage"] == 2.0


MASK, LIKE_MASK = r"mask must be bool \[N, T\] with N = 4; got", r"behaviour_log_probs must be like mask, \[4, 3\]; got"


@pytest.mark.parametrize(("changes", "message"), [
    ({"states": [0]}, r"states must have one entry per row = 4; got a list of 1"),
    ({"actions": [0]}, r"actions must have one entry per row = 4; got a list of 1"),
    ({"mask": ROLLOUTS["mask"].double()}, rf"{MASK} \[4, 3\] float64"),
    ({"mask": ROLLOUTS["mask"].long()}, rf"{MASK} \[4, 3\] int64"),
    ({"mask": ROLLOUTS["mask"][:3]}, rf"{MASK} \[3, 3\] bool"),
    ({"mask": ROLLOUTS["mask"][:, 0]}, rf"{MASK} \[4\] bool"),
    ({"behaviour_log_probs": torch.zeros(4, 2)}, rf"{LIKE_MASK} \[4, 2\]"),
    ({"behaviour_log_probs": torch.zeros(4)}, rf"{LIKE_MASK} \[4, 1\]"),
    ({"behaviour_log_probs": torch.zeros(3, 3)}, r"behaviour_log_probs must .*\[4\] or \[N, T\]; got \[3, 3\]"),
    ({"rewards": torch.zeros(4, 2)}, r"rewards per step must be like mask, \[4, 3\]; got \[4, 2\]"),
    ({"group_ids": [[0], [0], [1], [1]]}, r"group_ids must be \[N\].*got \[4, 1\] int64"),
    ({"group_ids": torch.tensor(0)}, r"group_ids must be \[N\].*got \[\] int64"),
])  # fmt: skip
def test_rollouts_of_a_wrong_shape_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ContractError, match=rf"ExperienceBatch\.from_rows: {message}"):
        ExperienceBatch.from_rows(**{**ROLLOUTS, **changes})


@pytest.mark.parametrize(("name", "bad"), [
    *itertools.product(("old_log_probs", "ref_log_probs"), (-math.inf, math.inf, math.nan)),
    *itertools.product(["behaviour_log_probs"], (-math.inf, math.inf)),  # NaN: not scored
])  # fmt: skip
@pytest.mark.filterwarnings("ignore::grpo.GRPOWarning")  # the supplied log-probs are not the policy's
def test_supplied_log_probs_that_are_not_finite_are_refused(name: str, bad: float) -> None:
    """Only where the policy decided a step: padding may hold anything."""
    trainer = trainer_of(RowScoring(), num_epochs_per_update=2)
    before, mask = state_of(trainer), torch.tensor([[True, True], [True, False]])
    wrong, right = torch.tensor([[-1.0, bad], [-1.0, -1.0]]), torch.tensor([[-1.0, -1.0], [-1.0, bad]])
    batch = replace(ExperienceBatch.from_rows([0, 0], [(1, 0), (0,)], [0.0, 1.0], [0, 0], mask=mask), **{name: wrong})
    with pytest.raises(ContractError, match=rf"the batch: {name} of sampled steps must be finite; rows \[0\]"):
        trainer.update(batch)
    assert state_of(trainer) == before
    assert trainer.update(replace(batch, **{name: right}))["train/num_updates"] == 2


def test_an_exact_entropy_of_nan_is_refused_even_if_no_term_of_the_loss_reads_it() -> None:
    """An action is masked with logits of -inf, and the entropy is computed as the sum of p log p, which is then NaN."""
    policy, log_probs = RowScoring(), torch.tensor([0.5, 0.5, 0.0]).log()
    score = policy.score_actions
    entropy = -(log_probs.exp() * log_probs).sum().expand(2, 1)
    policy.score_actions = lambda *rows: replace(score(*rows), entropy=entropy)  # type: ignore[method-assign]
    batch = ExperienceBatch.from_rows([0, 0], [(1,), (0,)], [0.0, 1.0], [0, 0])
    with pytest.raises(ContractError, match=r"RowScoring: .*exact entropy.*some are not.*finfo\(dtype\)\.min"):
        trainer_of(policy).update(batch)


DENSITIES = torch.tensor([0.5, 0.25, 0.25, 0.5])


def updated(actions: Any, behaviour_log_probs: Tensor) -> None:
    """Train once, without a run, on four rows with actions of any kind, which the policy does not look at."""

    class Blind(TablePolicy):
        def get_log_probabilities(self, states: Any, actions: Any) -> Tensor:
            return self.logits.log_softmax(1)[[0] * len(actions), [place % 2 for place in range(len(actions))]]

    learner = Learner(
        config=GRPOConfig(group_size=2), policy=Blind(), reward_model=lambda states, actions: [0.0] * len(actions)
    )
    rows = ExperienceBatch.from_rows([0] * 4, actions, [0.0] * 4, [0] * 4, behaviour_log_probs=behaviour_log_probs)
    learner.update(rows)


@pytest.mark.parametrize("values", [DENSITIES, torch.ones(4)])
@pytest.mark.parametrize("labels", [
    *([0, 1, 0, 1], torch.tensor([0, 1, 0, 1]), np.array([0, 1, 0, 1], np.uint8), list("abcd")),
    *([(0, 1)] * 4, [True, False] * 2, [object()] * 4),
])  # fmt: skip
def test_probabilities_are_refused_as_log_probs(labels: Any, values: Tensor) -> None:
    """Values from 0 to 1 alone are no log-probs of labels, texts or objects."""
    with pytest.raises(ContractError, match=r"probabilities\.log"):
        updated(labels, values)


def test_densities_and_log_probs_are_taken_for_what_they_are() -> None:
    """Densities of real numbers may be above 1."""
    updated(list("abcd"), DENSITIES - 0.5)  # some are below 0
    for actions in [torch.randn(4, 2), [0.3, 0.1, 0.5, 0.2], [(0.5, 1), (0.1, 2), (1.5, 0), (2.5, 1)]]:
        updated(actions, DENSITIES)
    updated([object()] * 4, DENSITIES * 5)
    for allowed in (DENSITIES.log(), torch.zeros(4), torch.tensor([math.nan, -1.0, math.nan, -2.0])):
        updated([0, 1, 0, 1], allowed)
