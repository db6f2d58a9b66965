"""Collecting one iteration's experience: calls of the policy and their order, checks, and the contents of the batch."""

import copy
import math
import time
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo import ActionScores, ConfigError, ContractError, ExperienceBatch, ProtocolError, RewardConfig, SampledActions
from grpo._retrying.calls import RetriedCalls
from grpo.evaluation.measurement import measured_rows
from grpo.experience_collector import ExperienceCollector
from tests.support.objective_inputs import as_users_run_it
from tests.support.policies import ExactSampling, GroupScoring, Planning, RowScoring, TablePolicy

ACTIONS = [[0, 1, 1], [1, 0, 2]]
"""Three actions of the states "a" and "b"."""


def value_of(states: Any, actions: Any) -> list[float]:
    """The action, and 10 more in state "b"."""
    return [action + 10.0 * (state == "b") for state, action in zip(states, actions, strict=True)]


def scripted(**others: Any) -> TablePolicy:
    return TablePolicy(num_actions=3, script=ACTIONS, **others)


def collector_of(policy: Any, judge: Any = value_of, group_size: int = 3, **others: Any) -> ExperienceCollector:
    return ExperienceCollector(policy=policy, reward_model=judge, group_size=group_size, **others)


def zeros(states: Any, actions: Any) -> list[float]:
    return [0.0] * len(actions)


def test_missing_requirements_are_named_at_construction() -> None:
    with pytest.raises(ProtocolError, match=r"^policy must implement PolicyModel; object lacks generate_actions\(\)"):
        collector_of(object())
    with pytest.raises(ConfigError, match="TablePolicy has no reference_log_probabilities"):
        collector_of(TablePolicy(), use_reference=True)


def test_a_collected_batch_equals_hand_worked_values() -> None:
    batch = collector_of(scripted()).collect(["a", "b"])
    assert batch.states == ["a"] * 3 + ["b"] * 3
    assert batch.actions == [0, 1, 1, 1, 0, 2]
    assert batch.group_ids.tolist() == [0, 0, 0, 1, 1, 1]
    assert batch.rewards.tolist() == [0, 1, 1, 11, 10, 12]
    assert batch.mask.tolist() == [[True]] * 6
    assert batch.old_log_probs.flatten().tolist() == pytest.approx([-math.log(3.0)] * 6)
    assert (batch.behaviour_log_probs, batch.entropy, batch.values) == (None, None, None)
    assert set(batch.metrics) == {"time/sample", "time/reward", "time/score"}


def preceded(function: Any, do: Any) -> Any:
    """The function, before each call of which `do()` is called."""

    def call(*arguments: Any, **options: Any) -> Any:
        do()
        return function(*arguments, **options)

    return call


def watched(sampling: Any, scoring: Any) -> TablePolicy:
    """A policy that calls `sampling()` before it samples, and `scoring()` before it scores."""
    policy = scripted()
    policy.generate_actions = preceded(policy.generate_actions, sampling)  # type: ignore[method-assign]
    policy.get_log_probabilities = preceded(policy.get_log_probabilities, scoring)  # type: ignore[method-assign]
    return policy


def test_seconds_are_reported_for_sampling_scoring_and_rewards() -> None:
    """Each part takes at least its own sleep, and no second is counted twice."""
    policy = watched(lambda: time.sleep(0.01), lambda: time.sleep(0.02))
    collector = collector_of(policy, preceded(zeros, lambda: time.sleep(0.04)))
    begun = time.perf_counter()
    metrics = collector.collect(["a", "b"]).metrics
    total = time.perf_counter() - begun
    parts = [metrics[f"time/{name}"] for name in ("sample", "score", "reward")]
    assert all(part >= slept for part, slept in zip(parts, (0.01, 0.02, 0.04), strict=True))
    assert sum(parts) <= total


def test_sampling_and_rewards_run_in_evaluation_mode_without_gradients() -> None:
    seen = []

    def note() -> None:
        seen.append((torch.is_grad_enabled(), policy.training))

    policy = watched(note, lambda: None)
    collector = collector_of(policy, preceded(zeros, note))
    policy.train()
    batch = collector.collect(["a", "b"])
    policy.train()
    measured_rows(collector, ["a", "b"], 3)
    assert seen == [(False, False)] * 4
    assert not batch.old_log_probs.requires_grad


def test_a_samplers_mask_scores_and_metrics_are_kept_unchanged() -> None:
    class Telling(ExactSampling):
        def sample_actions(self, states: Any, num_actions_per_state: int) -> SampledActions:
            sampled = super().sample_actions(states, num_actions_per_state)
            apart = replace(sampled.scores, log_probs=sampled.scores.log_probs - 1.0)
            return replace(sampled, scores=apart, metrics={"sampler/tokens": 7.0})

    policy = Telling()
    batch = collector_of(policy, zeros).collect([0, 1])
    assert batch.behaviour_log_probs is not None
    assert batch.old_log_probs is not None
    assert torch.equal(batch.old_log_probs, batch.behaviour_log_probs - 1.0)
    assert policy.calls == {"sample": 1}
    assert batch.metrics["sampler/tokens"] == 7.0


def with_behaviour(value: float) -> SampledActions:
    sampled = ExactSampling().sample_actions([0, 1], 3)
    behaviour = sampled.behaviour_log_probs.clone()
    behaviour[4, 0] = value
    return replace(sampled, behaviour_log_probs=behaviour)


TOO_FEW = replace(ExactSampling().sample_actions([0, 1], 3), actions=[[(0,)] * 3])
THREE_EACH = r"must return 3 actions for each of 2 states; got 1"


@pytest.mark.parametrize(("kind", "method", "answer", "message"), [
    (TablePolicy, "generate_actions", [[0, 1]], rf"generate_actions {THREE_EACH}"),
    (TablePolicy, "get_log_probabilities", torch.zeros(5), r"get_log_probabilities must return \[N\] = \[6\]"),
    (TablePolicy, "get_log_probabilities", torch.full((6,), -math.inf), r": old_log_probs of sampled .* finite"),
    (RowScoring, "score_actions", torch.zeros(6), r"score_actions must return ActionScores"),
    (GroupScoring, "score_groups", torch.zeros(6), r"score_groups must return ActionScores"),
    (Planning, "plan_micro_batches", [[0, 1]], r"plan_micro_batches must return every row of range\(6\)"),
    (ExactSampling, "sample_actions", [[0] * 3] * 2, r"sample_actions must return SampledActions"),
    (ExactSampling, "sample_actions", TOO_FEW, rf"sample_actions {THREE_EACH}"),
    (ExactSampling, "sample_actions", with_behaviour(-math.inf), r": behaviour_log_probs .*rows \[4\] are not"),
])  # fmt: skip
def test_samples_are_checked_before_rewards_are_computed(kind: Any, method: str, answer: Any, message: str) -> None:
    policy = TablePolicy((0, 1)) if kind is TablePolicy else kind()
    setattr(policy, method, lambda *arguments: answer)
    collector = collector_of(policy, lambda states, actions: pytest.fail("asked for rewards"))
    with as_users_run_it(), pytest.raises(ContractError, match=rf"^{kind.__name__}(\.|: |){message}"):
        collector.collect([0, 1])


@pytest.mark.parametrize("make", [lambda: TablePolicy((0, 1)), RowScoring, GroupScoring, ExactSampling])
def test_rows_without_a_reward_are_dropped_from_every_field(make: Any) -> None:
    policy, seen = make(), []

    def reward(states: Any, actions: Any) -> list[float]:
        seen.extend(actions)
        return [1.0, math.nan, 3.0, math.inf, 5.0, 6.0]

    twin = copy.deepcopy(policy)
    torch.manual_seed(5)
    whole = collector_of(twin, zeros).collect([0, 1])
    torch.manual_seed(5)
    collector = collector_of(policy, reward, reward=RewardConfig(non_finite="drop"))
    batch = collector.collect([0, 1])
    kept = [0, 2, 4, 5]
    assert batch.rewards.tolist() == [1, 3, 5, 6]
    assert batch.states == batch.group_ids.tolist() == [0, 0, 1, 1]
    assert batch.actions == [seen[row] for row in kept]
    assert batch.mask.tolist() == whole.mask[kept].tolist()
    assert torch.equal(batch.old_log_probs.nan_to_num(), whole.old_log_probs[kept].nan_to_num())
    assert collector.costs.agree([collector.costs.of_this_rank()])["rows/dropped"] == 2.0


def test_rewards_receive_the_samplers_steps() -> None:
    """Rewards of steps that the sampler masks count as 0, in a batch and in an evaluation."""
    policy = ExactSampling()
    sampled = SampledActions(actions=[[(1, 0), (0,)]], mask=torch.tensor([[True, True], [True, False]]))
    policy.sample_actions = lambda *arguments: sampled  # type: ignore[method-assign]
    collector = collector_of(policy, lambda s, a: torch.tensor([[1.0, 2.0], [3.0, math.nan]]), group_size=2)
    assert collector.collect([0]).rewards.tolist() == [[1, 2], [3, 0]]
    rows, _ = measured_rows(collector, [0], 2)
    assert rows.rewards.tolist() == [3, 3]


def test_failures_of_evaluations_and_collections_are_counted_until_they_are_reported() -> None:
    """The first and the third call raise: of an evaluation, and of a collection."""
    outcomes = iter([True, False, True, False, False])

    def reward(states: Any, actions: Any) -> list[float]:
        if next(outcomes):
            raise ConnectionError
        return [1.0] * len(actions)

    settings = RewardConfig(num_retries=1, retry_delay=0.0)
    collector = collector_of(TablePolicy(), reward, reward=settings, reward_calls=RetriedCalls)
    measured_rows(collector, ["a"], 2)
    collector.collect(["a"])
    reported = [collector.costs.agree([collector.costs.of_this_rank()])["rewards/failed_calls"] for _ in range(2)]
    assert reported == [2.0, 0.0]


def test_everything_the_policy_computes_runs_in_the_given_context() -> None:
    entered: list[int] = []
    inside: list[int] = []

    @contextmanager
    def autocast() -> Any:
        entered.append(1)
        yield
        entered.append(-1)

    policy, reference = (watched(*[lambda: inside.append(sum(entered))] * 2) for _ in range(2))
    collector = collector_of(policy, zeros, autocast=autocast, reference_policy=reference, use_reference=True)
    collector.complete(collector.collect(["a", "b"]), several_updates=True)
    assert entered == [1, -1] * 3
    assert inside == [1] * 3


RAGGED: dict[str, Any] = {
    "states": [0, 0], "actions": [(1, 2, 0), (0,)], "rewards": [0.0, 1.0], "group_ids": [0, 0],
    "mask": torch.tensor([[True, True, True, False], [True, False, False, False]]),
}  # fmt: skip
"""Rows of three and one steps, with a column more than the longest row has."""


class Telling(RowScoring):
    """Tells a critic's values and the keys of states as well."""

    def score_actions(self, states: Any, actions: Any) -> ActionScores:
        scores = super().score_actions(states, actions)
        values = torch.full(scores.mask.shape, 3.0, dtype=torch.float64)
        return replace(scores, values=values, final_values=torch.tensor([4.0, 5.0], dtype=torch.float64))

    def state_keys(self, states: Any, actions: Any) -> Tensor:
        self.calls["keys"] += 1
        return torch.tensor([[1, 2, 3], [1, 0, 0]])


def ragged(**others: Any) -> ExperienceBatch:
    return ExperienceBatch.from_rows(**{**RAGGED, **others})


def completed(policy: Any, batch: ExperienceBatch | None = None, several_updates: bool = False, **others: Any) -> Any:
    return collector_of(policy, **others).complete(batch or ragged(), several_updates=several_updates)


def test_with_several_updates_old_log_probs_are_added() -> None:
    policy, batch = RowScoring(), ragged()
    policy.train()
    whole = completed(policy, batch, several_updates=True)
    assert policy.calls == {"score": 1}
    assert not policy.training
    assert whole.old_log_probs.shape == (2, 4)
    sums = torch.where(batch.mask, whole.old_log_probs, 0.0).sum(1)
    expected = policy.get_log_probabilities(RAGGED["states"], RAGGED["actions"]).detach()
    torch.testing.assert_close(sums, expected, rtol=1e-12, atol=0)
    assert (whole.entropy, whole.values, whole.state_keys) == (None, None, None)
    assert completed(policy, whole, several_updates=True) is whole


def test_required_scores_are_added_and_padded_to_the_width_of_the_batch() -> None:
    policy = Telling()
    whole = completed(policy, needs=("entropy", "values", "state_keys"))
    assert policy.calls == {"score": 1, "keys": 1}
    assert whole.entropy.shape == (2, 4)
    assert whole.values.tolist() == [[3, 3, 3, 0], [3, 3, 3, 0]]
    assert whole.final_values.tolist() == [4, 5]
    assert whole.state_keys.tolist() == [[1, 2, 3, 0], [1, 0, 0, 0]]


def test_state_keys_need_no_scoring_and_are_computed_once() -> None:
    policy = Telling()
    whole = completed(policy, needs=("state_keys",))
    assert policy.calls == {"keys": 1}
    for known in (whole, ragged(state_keys=torch.zeros(2, 4, dtype=torch.int64))):
        assert completed(policy, known, needs=("state_keys",)) is known


def test_with_one_update_old_log_probs_are_removed_unless_they_are_read() -> None:
    """With one update the current policy is the old one. Log-probs of a sampler or earlier pass are kept if read."""
    known = replace(ragged(), old_log_probs=torch.zeros(2, 4), entropy=torch.zeros(2, 4))
    assert completed(RowScoring(), known).old_log_probs is None
    assert completed(RowScoring(), known, several_updates=True) is known
    assert completed(RowScoring(), known, needs=("entropy",)) is known
    assert completed(ExactSampling(), known) is known


class Own(RowScoring):
    def reference_log_probabilities(self, states: Any, actions: Any) -> Tensor:
        return torch.full((2, 3), -2.0, dtype=torch.float64)


def test_a_reference_is_scored_once() -> None:
    for policy, reference in [(RowScoring(), RowScoring()), (Own(), None)]:
        whole = completed(policy, reference_policy=reference, use_reference=True)
        assert whole.ref_log_probs.shape == (2, 4)
        assert policy.calls == {}
        if reference is None:
            assert whole.ref_log_probs[0, :3].tolist() == [-2] * 3
        else:
            assert reference.calls == {"score": 1}
        assert completed(policy, whole, reference_policy=reference, use_reference=True) is whole
    assert completed(RowScoring(), reference_policy=RowScoring()).ref_log_probs is None


def test_scores_of_other_steps_and_non_finite_log_probs_are_refused() -> None:
    class Bad(RowScoring):
        def score_actions(self, states: Any, actions: Any) -> ActionScores:
            scores = super().score_actions(states, actions)
            return replace(scores, log_probs=torch.full_like(scores.log_probs, -math.inf))

    with pytest.raises(ContractError, match=r"RowScoring must score the batch's steps, but the masks differ"):
        completed(RowScoring(), ragged(mask=None), several_updates=True)  # one step per row
    with pytest.raises(ContractError, match=r"Bad: old_log_probs of sampled steps must be finite; rows \[0, 1\]"):
        completed(Bad(), several_updates=True)
    with pytest.raises(ContractError, match=r"reference Bad: ref_log_probs of sampled steps must be finite"):
        completed(RowScoring(), reference_policy=Bad(), use_reference=True)


def test_seconds_of_several_scorings_are_summed() -> None:
    batch = replace(ragged(), metrics={"rows/dropped": 1.0, "time/score": 60.0})
    metrics = completed(RowScoring(), batch, several_updates=True).metrics
    assert set(metrics) == {"rows/dropped", "time/score"}
    assert metrics["time/score"] > 60.0


def test_forwards_follow_the_policys_plan_or_else_the_micro_batch_size() -> None:
    rows: Any = [0] * 5, [(0,)] * 5
    assert collector_of(RowScoring()).plan_parts(*rows) == [slice(0, 5)]
    in_twos = collector_of(RowScoring(), micro_batch_size=2)
    assert in_twos.plan_parts(*rows) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert in_twos.plan_parts(*rows, torch.tensor([4, 0, 3])) == [slice(0, 2), slice(2, 3)]
    assert in_twos.plan_parts(*rows, slice(1, 1)) == []
    planning = Planning()
    planning.plan = lambda num_rows: [[num_rows - 1], list(range(num_rows - 1))]  # type: ignore[method-assign]
    planned = collector_of(planning, micro_batch_size=2)
    assert [part.tolist() for part in planned.plan_parts(*rows)] == [[4], [0, 1, 2, 3]]  # type: ignore[union-attr]
    assert [part.tolist() for part in planned.plan_parts(*rows, slice(2, 5))] == [[2], [0, 1]]  # type: ignore[union-attr]
    assert planned.plan_parts(*rows, slice(2, 2)) == []
    assert planning.calls["plan"] == 2
    policy = RowScoring()
    collector_of(policy, zeros, micro_batch_size=4).collect([0, 1])
    assert policy.rows_scored == [4, 2]
