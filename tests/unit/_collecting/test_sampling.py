"""Sampling, and work that runs out of memory: which sizes are tried, what is put back, and how calls are joined."""

import copy
import logging
import random
import weakref
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo import ActionScores, ContractError, ExperienceBatch, GRPOConfig, GRPOTrainer, SampledActions
from grpo._collecting.costs import Costs
from grpo._collecting.dynamic_sampling import collect_live_groups
from grpo._collecting.out_of_memory import PassSizes
from grpo._collecting.sampling import SampleCalls
from grpo._collecting.update_plan import cut_parts, half, parts_in_order
from grpo._ranks.processes import SeveralProcesses
from grpo._rewarding.calls import COUNTED
from grpo.errors import ConfigError, GRPOWarning
from grpo.experience_collector import ExperienceCollector
from tests.support.out_of_memory import SmallMemory, sampled_rows, scored_rows
from tests.support.policies import ExactSampling, RowScoring, TablePolicy, VectorPolicy


class Numbered(TablePolicy):
    """Action g of state s is the text "s.g", where g counts on over calls, so that each action shows when it was made."""

    def __init__(self) -> None:
        super().__init__()
        self.num_made = 0
        self.asked: list[tuple[Any, int]] = []

    def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> Any:
        self.asked.append((states, num_actions_per_state))
        groups = []
        for state in states:
            groups.append([f"{state}.{self.num_made + place}" for place in range(num_actions_per_state)])
            self.num_made += num_actions_per_state
        return groups


def numbered(**memory: Any) -> tuple[SampleCalls, Numbered, SmallMemory]:
    policy, limit = Numbered(), SmallMemory(**memory)
    limit.used_by(policy, "generate_actions", sampled_rows)
    return SampleCalls(policy), policy, limit


def test_without_an_error_there_is_one_call_with_the_states_as_they_came() -> None:
    sample, policy, memory = numbered()
    states = ("a", "b", "c")
    rows, actions, sampled = sample(states, 2)
    assert (rows, actions) == (["a", "a", "b", "b", "c", "c"], ["a.0", "a.1", "b.2", "b.3", "c.4", "c.5"])
    assert sampled is None
    assert policy.asked[0][0] is states
    assert (memory.sizes, sample.rows_per_call, sample.num_repeated) == ([6], None, 0)


def test_a_call_that_runs_out_of_memory_is_repeated_with_half_the_states_and_later_calls_have_no_more(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five states of two actions: 10 rows fail, then 6 of three states; calls of 4, 2 and 4 rows fit."""
    released: list[int] = []
    monkeypatch.setattr("grpo._collecting.sampling.release_cached_memory", lambda: released.append(len(memory.sizes)))
    sample, _, memory = numbered(fits=4)
    with caplog.at_level(logging.WARNING, logger="grpo"):
        rows, actions, _ = sample(["a", "b", "c", "d", "e"], 2)
        assert rows == [state for state in "abcde" for _ in range(2)]
        assert [action[0] for action in actions] == rows
        assert [int(action[2:]) for action in actions] == [*range(16, 26)]  # 10 and 6 actions were thrown away
        assert (memory.sizes, sample.rows_per_call, sample.num_repeated) == ([10, 6, 4, 2, 4], 4, 2)
        memory.sizes.clear()
        sample(["a", "b", "c", "d", "e"], 2)
        sample(["a"], 4)
        assert sample(["a", "b"], 3)[1][3].startswith("b")
    assert (memory.sizes, sample.num_repeated, released) == ([4, 2, 4, 4, 3, 3], 2, [1, 2])
    assert caplog.messages == [
        "Sampling ran out of memory with up to 10 rows per forward pass. It is repeated, and from now on has at most 6.",
        "Sampling ran out of memory with up to 6 rows per forward pass. It is repeated, and from now on has at most 4.",
    ]


def test_a_single_state_gets_fewer_actions_per_call() -> None:
    sample, _, memory = numbered(fits=2)
    rows, actions, _ = sample(["a"], 5)
    assert rows == ["a"] * 5
    assert [int(action[2:]) for action in actions] == [8, 9, 10, 11, 12]  # 5 and 3 actions were thrown away
    assert (memory.sizes, sample.rows_per_call) == ([5, 3, 2, 1, 2], 2)


def test_a_single_row_that_does_not_fit_is_an_error_that_says_what_to_do() -> None:
    sample, _, memory = numbered(fits=0)
    with pytest.raises(torch.OutOfMemoryError, match="injected at use 4, of 1 rows") as caught:
        sample(["a", "b", "c"], 2)
    assert memory.sizes == [6, 4, 2, 1]
    (note,) = caught.value.__notes__
    assert note.startswith("grpo: sampling ran out of memory in a forward pass of a single row")
    assert "Make the rows shorter" in note
    assert sample.num_repeated == 3


def test_other_errors_pass_at_once() -> None:
    policy = TablePolicy()
    policy.generate_actions = Mock(side_effect=RuntimeError("out of memory, in words alone"))
    sample = SampleCalls(policy)
    with pytest.raises(RuntimeError, match="in words alone"):
        sample(["a", "b"], 2)
    assert (policy.generate_actions.call_count, sample.rows_per_call) == (1, None)


@pytest.mark.parametrize(("container", "kind"), [("list", list), ("tensor", Tensor), ("array", np.ndarray)])
@pytest.mark.parametrize("convert", [torch.Tensor.clone, torch.Tensor.numpy, torch.Tensor.tolist])
def test_states_and_actions_keep_their_containers_when_calls_are_joined(container, kind, convert):
    """Seven states in calls of two states, by policies that return lists, tensors and arrays."""
    vectors = torch.arange(21.0).reshape(7, 3)
    states, policy, memory = convert(vectors), VectorPolicy(container=container), SmallMemory(fits=8)
    memory.used_by(policy, "generate_actions", sampled_rows)
    rows, actions, _ = SampleCalls(policy)(states, 4)
    assert (type(rows), len(actions)) == (type(states), 28)
    assert np.array_equal(np.asarray(rows), vectors.numpy().repeat(4, axis=0))
    assert isinstance(actions, kind)
    assert memory.sizes[-1] <= 8


class DrawsEverywhere(TablePolicy):
    def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> Any:
        return [
            [(torch.rand(()).item(), np.random.rand(), random.random()) for _ in range(num_actions_per_state)]  # noqa: NPY002
            for _ in states
        ]


def test_a_repeated_call_draws_the_random_numbers_of_a_run_that_began_with_it() -> None:
    def drawn(rows_per_call: int | None, **memory: Any) -> tuple[Any, list[float]]:
        torch.manual_seed(0)
        np.random.seed(1)  # noqa: NPY002
        random.seed(2)
        policy = DrawsEverywhere()
        SmallMemory(**memory).used_by(policy, "generate_actions", sampled_rows)
        sample = SampleCalls(policy)
        sample.rows_per_call = rows_per_call
        actions = sample(["a", "b", "c", "d"], 2)[1]
        return actions, [torch.rand(()).item(), np.random.rand(), random.random()]  # noqa: NPY002

    assert (drawn(None, fits=4), drawn(None, fits=3)) == (drawn(4), drawn(2))


class Ragged(ExactSampling):
    """Each state is its number of steps; log-probs are -state, behaviour log-probs half of it."""

    def sample_actions(self, states: Any, num_actions_per_state: int) -> SampledActions:
        lengths = torch.tensor(states).repeat_interleave(num_actions_per_state)
        mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
        log_probs = -lengths.double().unsqueeze(1).expand(mask.shape)
        scores = ActionScores(log_probs=log_probs, mask=mask, final_values=lengths.double())
        return SampledActions(
            actions=[[(state,)] * num_actions_per_state for state in states],
            mask=mask,
            behaviour_log_probs=log_probs / 2,
            scores=scores if self.tells_scores else None,
            metrics={"sampler/tokens": float(mask.sum())},
        )


def test_samples_with_scores_are_joined_and_padded_to_the_most_steps() -> None:
    policy = Ragged()
    SmallMemory(fits=2).used_by(policy, "sample_actions", sampled_rows)
    rows, actions, sampled = SampleCalls(policy)([1, 3, 2], 2)
    assert (rows, actions) == ([1, 1, 3, 3, 2, 2], [(1,), (1,), (3,), (3,), (2,), (2,)])
    assert sampled.behaviour_log_probs is not None
    assert sampled.mask.sum(1).tolist() == [1, 1, 3, 3, 2, 2]
    assert torch.equal(sampled.scores.mask, sampled.mask)
    masked = torch.where(sampled.mask, sampled.scores.log_probs, 0.0)
    assert masked.tolist() == [[-1, 0, 0]] * 2 + [[-3, -3, -3]] * 2 + [[-2, -2, 0]] * 2
    assert torch.equal(torch.where(sampled.mask, sampled.behaviour_log_probs, 0.0), masked / 2)
    assert sampled.scores.final_values.tolist() == [1, 1, 3, 3, 2, 2]
    assert sampled.scores.entropy is None
    assert sampled.metrics == {"sampler/tokens": 12.0}


def test_joined_samples_have_no_scores_if_the_sampler_gives_none() -> None:
    policy = Ragged()
    policy.tells_scores = False
    SmallMemory(fits=2).used_by(policy, "sample_actions", sampled_rows)
    _, _, sampled = SampleCalls(policy)([1, 3], 2)
    assert sampled.scores is None
    assert sampled.mask.tolist() == [[True, False, False]] * 2 + [[True] * 3] * 2


def test_each_of_several_calls_is_checked_for_its_own_number_of_actions() -> None:
    class Stubborn(Numbered):
        def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> Any:
            return super().generate_actions(states, 4)

    policy = Stubborn()
    SmallMemory(fails_at=[1]).used_by(policy, "generate_actions", sampled_rows)
    with pytest.raises(ContractError, match=r"must return 2 actions for each of 1 states; got 1 groups of \[4\]"):
        SampleCalls(policy)(["a"], 4)


def test_the_tensors_of_a_failed_call_are_gone_before_it_is_repeated() -> None:
    class Heavy(Numbered):
        def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> Any:
            assert [held() for held in tensors] == [None] * len(tensors)
            activations = torch.ones(len(states))  # alive while the error is raised
            tensors.append(weakref.ref(activations))
            if len(states) > 1:
                raise torch.OutOfMemoryError
            return super().generate_actions(states, num_actions_per_state)

    tensors: list[Any] = []
    SampleCalls(Heavy())(["a", "b", "c", "d"], 1)
    assert len(tensors) == 6


# Groups without differences are left out, and others drawn in their place: bounded, and counted


STATES = list(range(8))
WITHOUT_MORE_STATES = r"step\(\) does not honour config\.dynamic_sampling_rounds=\d \(without more_states\)"


class Scripted(TablePolicy):
    """Every group is the actions 0 and 1; remembers the states it acted in."""

    def __init__(self) -> None:
        super().__init__(STATES)
        self.drawn: list[list[int]] = []

    def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> Any:
        self.drawn.append(list(states))
        return [[0, 1] for _ in states]


def odd_states_differ(states: Any, actions: Any) -> list[float]:
    """Rewards differ in groups of odd states only: 0 and 1 there, 0.3 twice elsewhere."""
    return [float(action) if state % 2 else 0.3 for state, action in zip(states, actions, strict=True)]


def trainer_of(rounds: int, reward: Any = odd_states_differ, **settings: Any) -> tuple[GRPOTrainer, Scripted]:
    policy = Scripted()
    config = GRPOConfig(group_size=2, dynamic_sampling_rounds=rounds, **settings)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    return GRPOTrainer(config=config, policy=policy, reward_model=reward, optimizer=optimizer), policy


def test_dead_groups_are_replaced_until_the_batch_is_full() -> None:
    trainer, _ = trainer_of(rounds=5)
    further = iter([[2, 3], [5, 7], [1, 1]])
    batch = trainer.collect([0, 1, 4], more_states=lambda: next(further))
    # 0 and 4 are dead, so is 2; 1, 3 and 5 fill the three places, and 7 is one too many
    assert (batch.states, batch.group_ids.tolist()) == ([1, 1, 3, 3, 5, 5], [0, 0, 1, 1, 2, 2])
    assert (batch.metrics["group_stats/num_drawn"], batch.metrics["group_stats/num_rounds"]) == (7, 2)
    assert batch.metrics["group_stats/num_left_out"] == 4
    # of seven groups, 1, 3, 5 and 7 have the mean 1/2, and 0, 4 and 2 have 0.3
    assert batch.metrics["rewards/mean_drawn"] == pytest.approx((4 * 0.5 + 3 * 0.3) / 7)
    assert next(further) == [1, 1]


def test_groups_of_one_row_are_refused_unless_states_are_grouped() -> None:
    class Single(Scripted):
        def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> Any:
            return [[state % 2] for state in states]

    def collected(**settings: Any) -> ExperienceBatch:
        config = GRPOConfig(group_size=1, dynamic_sampling_rounds=1)
        trainer = GRPOTrainer(config=config, policy=Single(), reward_model=lambda states, actions: actions, **settings)
        return trainer.collect([0, 1], more_states=lambda: [2, 3])

    message = r"with group_size=1 every group is one row\. Set dynamic_sampling_rounds=0, or"
    with pytest.raises(ConfigError, match=message):
        collected()
    assert collected(group_by=lambda state: state // 2).group_ids.tolist() == [0, 0, 1, 1]


def test_sampling_stops_after_the_allowed_rounds_with_fewer_groups() -> None:
    trainer, policy = trainer_of(rounds=2)
    batch = trainer.collect([0, 1, 4], more_states=lambda: [6])
    assert (len(policy.drawn), batch.states) == (3, [1, 1])
    metrics = trainer.update(batch)
    assert (metrics["group_stats/num_groups"], metrics["group_stats/zero_variance_fraction"]) == (1, 0)


def test_a_batch_without_dead_groups_draws_no_further_states() -> None:
    trainer, policy = trainer_of(rounds=2)
    batch = trainer.collect([1, 3], more_states=lambda: pytest.fail("nothing is missing"))
    assert (batch.states, batch.metrics["group_stats/num_rounds"]) == ([1, 1, 3, 3], 0)
    assert policy.drawn == [[1, 3]]


def test_if_all_groups_stay_dead_the_last_batch_is_returned() -> None:
    trainer, policy = trainer_of(rounds=1)
    before = policy.logits.detach().clone()
    metrics = trainer.step([0, 2], more_states=lambda: [4])
    assert (metrics["group_stats/zero_variance_fraction"], metrics["group_stats/num_left_out"]) == (1, 3)
    assert torch.equal(policy.logits, before)


def test_a_step_without_further_states_only_leaves_dead_groups_out() -> None:
    """The gradient is that of the live group alone: twice what it would be among two groups."""
    filtered, policy = trainer_of(rounds=3)
    with pytest.warns(GRPOWarning, match=WITHOUT_MORE_STATES):
        metrics = filtered.step([0, 1])
    assert (policy.drawn, metrics["group_stats/num_groups"]) == ([[0, 1]], 1)
    alone, other = trainer_of(rounds=0)
    alone.step([1])
    assert torch.equal(policy.logits, other.logits)
    assert not torch.equal(policy.logits, torch.zeros_like(policy.logits))


def test_train_takes_further_draws_from_its_own_states() -> None:
    """With one state per draw, an iteration that meets an even state takes the next; none is seen twice in a pass."""
    trainer, policy = trainer_of(rounds=10, num_states_per_iteration=1, seed=3)
    trainer.train(STATES, num_iterations=4, progress=False)
    drawn = [state for states in policy.drawn for state in states]
    assert (len(set(drawn[:8])), sum(state % 2 for state in drawn), drawn[-1] % 2) == (len(drawn[:8]), 4, 1)
    assert trainer.progress.num_draws == len(drawn)


def test_mean_drawn_sums_valid_steps_over_all_drawn_rows() -> None:
    """Rewards per step, with 50 behind the end of each row: rows of 3 and 4, then of 1 and 1 (dead), 11 in all for 5 rows."""
    drawn = iter(
        [
            ([[1.0, 2.0, 50.0], [4.0, 50.0, 50.0]], [[True, True, False], [True, False, False]]),
            ([[0.5, 0.5], [0.5, 0.5]], [[True, True], [True, True]]),
            ([[2.0, 50.0]], [[True, False]]),
        ]
    )

    def collect(states: Any) -> ExperienceBatch:
        rewards, mask = next(drawn)
        rows = [0] * len(rewards)
        batch = ExperienceBatch.from_rows(rows, rows, rewards, rows, mask=torch.tensor(mask))
        return replace(batch, rewards=torch.tensor(rewards))  # as a collector of the user's own may leave them

    batch = collect_live_groups(collect, [0, 1], lambda: [0], GRPOConfig(dynamic_sampling_rounds=2))
    assert batch.num_rows == 2
    assert batch.metrics["rewards/mean_drawn"] == pytest.approx((3.0 + 4.0 + 1.0 + 1.0 + 2.0) / 5)
    assert batch.metrics["group_stats/num_drawn"] == 3


ROWS: dict[str, Any] = {
    "states": [0, 0, 1, 1, 2, 2, 3, 3],
    "actions": [(1, 2, 0), (0,), (2, 0), (1,), (1, 1, 1, 1), (2,), (0,), (2, 2, 0)],
    "rewards": [0.0, 1.0] * 4,
    "group_ids": [0, 0, 1, 1, 2, 2, 3, 3],
}
MASK = torch.arange(4) < torch.tensor([len(action) for action in ROWS["actions"]]).unsqueeze(1)


def batch() -> ExperienceBatch:
    return ExperienceBatch.from_rows(**ROWS, mask=MASK)


def worked(sizes: PassSizes, memory: SmallMemory, num_rows: int, **options: Any) -> list[int]:
    """Pass over rows, in forward passes of half as many rows after each halving. Return the sizes of the last attempt."""

    def work() -> list[int]:
        found = []
        for part in sizes.passes(parts_in_order(num_rows, None, sizes.num_halvings)):
            memory.use(part.stop - part.start)
            found.append(part.stop - part.start)
        return found

    return sizes.repeat(work, **options)


@pytest.mark.parametrize(
    ("size", "times", "expected"),
    [(8, 0, 8), (8, 1, 4), (8, 3, 1), (8, 9, 1), (5, 1, 3), (5, 2, 2), (5, 3, 1), (1, 1, 1)],
)
def test_half_is_rounded_up(size, times, expected):
    assert half(size, times) == expected


def test_parts_in_order_and_parts_of_a_plan_have_half_the_rows():
    assert parts_in_order(7, None, 1) == [slice(0, 4), slice(4, 7)]
    assert parts_in_order(7, 4, 1) == [slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 7)]
    assert parts_in_order(3, 2, 9) == [slice(0, 1), slice(1, 2), slice(2, 3)]
    assert parts_in_order(0, None, 2) == []
    plan: list[Any] = [torch.tensor([6, 0, 3]), torch.tensor([1]), torch.tensor([5, 4])]
    assert [part.tolist() for part in cut_parts(plan, 0)] == [[6, 0, 3], [1], [5, 4]]  # type: ignore[union-attr]
    assert [part.tolist() for part in cut_parts(plan, 1)] == [[6, 0], [3], [1], [5], [4]]  # type: ignore[union-attr]
    assert [part.tolist() for part in cut_parts(plan, 2)] == [[6], [0], [3], [1], [5], [4]]  # type: ignore[union-attr]
    assert cut_parts([slice(2, 5)], 1) == [slice(2, 4), slice(4, 5)]


def test_work_is_repeated_with_half_the_rows_until_it_fits_and_stays_there(caplog: pytest.LogCaptureFixture) -> None:
    sizes, memory = PassSizes("an update"), SmallMemory(fits=2)
    with caplog.at_level(logging.WARNING, logger="grpo"):
        assert (worked(sizes, memory, 7), memory.sizes) == ([2, 2, 2, 1], [7, 4, 2, 2, 2, 1])
        assert (sizes.num_halvings, sizes.num_repeated) == (2, 2)
        assert worked(sizes, memory, 8) == [2, 2, 2, 2]
    assert (sizes.num_halvings, sizes.num_repeated) == (2, 2)
    message = "An update ran out of memory with up to {} rows per forward pass. It is repeated, and from now on has at most {}."
    assert caplog.messages == [message.format(7, 4), message.format(4, 2)]


def test_what_an_attempt_left_behind_is_put_back_before_each_repetition() -> None:
    left: list[str] = []
    sizes, memory = PassSizes("work"), SmallMemory(fits=2)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)

    def work() -> Tensor:
        assert left == []
        drawn = torch.rand(2)
        for part in sizes.passes(parts_in_order(8, None, sizes.num_halvings)):
            left.append("pass")
            memory.use(part.stop - part.start)
        return drawn

    assert torch.equal(sizes.repeat(work, left.clear), expected)
    assert left == ["pass"] * 4


def interrupted(sizes: PassSizes, error: BaseException, after: int) -> None:
    """Raise an error after a number of two forward passes, of 3 rows and of 1: with 0 before them, with 3 after them."""

    def work() -> None:
        if after > 0:
            for number, _ in enumerate(sizes.passes([slice(0, 3), slice(0, 1)]), start=1):
                if number == after:
                    raise error
        raise error

    sizes.repeat(work)


@pytest.mark.parametrize(
    ("error", "after", "num_notes"),
    [
        (torch.OutOfMemoryError, 0, 0),  # before the passes
        (torch.OutOfMemoryError, 3, 0),  # after them
        (torch.OutOfMemoryError, 2, 1),  # in a pass of a single row, though another part is larger
        (MemoryError, 1, 0),
        (KeyboardInterrupt, 1, 0),
        (partial(RuntimeError, "CUDA out of memory, in words alone"), 1, 0),
    ],
)
def test_only_an_error_of_memory_in_a_pass_of_several_rows_is_repeated(error, after, num_notes):
    sizes, error = PassSizes("work"), error()
    with pytest.raises(type(error)) as caught:
        interrupted(sizes, error, after)
    assert len(getattr(caught.value, "__notes__", [])) == num_notes
    assert (sizes.num_halvings, sizes.num_repeated) == (0, 0)


def test_an_error_before_the_passes_of_a_second_attempt_is_not_repeated() -> None:
    sizes, memory = PassSizes("work"), SmallMemory(fails_at=[1, 2])

    def work() -> None:
        if sizes.num_halvings == 1:
            memory.use(0)  # while the second attempt is planned
        for part in sizes.passes([slice(0, 4)]):
            memory.use(part.stop)

    with pytest.raises(torch.OutOfMemoryError, match="at use 2, of 0 rows"):
        sizes.repeat(work)
    assert (sizes.num_halvings, sizes.num_repeated) == (1, 1)


def test_unused_memory_of_cuda_is_released_before_a_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: released.append(len(memory.sizes)))
    generators = [torch.tensor([7], dtype=torch.uint8)]
    restored: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: generators)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", restored.append)
    memory = SmallMemory(fits=2)
    worked(PassSizes("work"), memory, 8)
    assert (released, restored) == ([1, 2], [generators, generators])


class OtherRank(SeveralProcesses):
    """A second rank that runs out of memory in some of its attempts, counted from 1."""

    num_ranks = 2

    def __init__(self, *fails_in: int) -> None:
        self.fails_in, self.num_meetings = fails_in, 0

    def gather_objects(self, value: Any) -> list[Any]:
        self.num_meetings += 1
        return [value, self.num_meetings in self.fails_in]


def test_a_rank_repeats_what_another_rank_could_not_do(caplog: pytest.LogCaptureFixture) -> None:
    """Two halvings for the other rank, none for this one; only errors of this rank are counted and logged."""
    engine, memory = OtherRank(1, 2), SmallMemory()
    sizes = PassSizes("work", engine)
    with caplog.at_level(logging.WARNING, logger="grpo"):
        assert worked(sizes, memory, 8, together=True) == [2, 2, 2, 2]
    assert memory.sizes == [8, 4, 4, 2, 2, 2, 2]
    assert (sizes.num_halvings, sizes.num_repeated, engine.num_meetings) == (2, 0, 3)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("fails_in", "fits", "num_rows", "together", "expected", "counts"),
    [
        ([1], 4, 8, True, [4, 4], (1, 1, 2)),  # two ranks that fail in one attempt halve once
        ([1], 0, 0, True, [], (1, 0, 2)),  # a rank without rows waits for the other one
        ([1, 2, 3], 4, 8, False, [4, 4], (1, 1, 0)),  # work of a rank by itself
    ],
)
def test_ranks_that_work_together_halve_together(fails_in, fits, num_rows, together, expected, counts):
    engine = OtherRank(*fails_in)
    sizes = PassSizes("work", engine)
    assert worked(sizes, SmallMemory(fits=fits), num_rows, together=together) == expected
    assert (sizes.num_halvings, sizes.num_repeated, engine.num_meetings) == counts


class OwnReference(RowScoring):
    def __init__(self) -> None:
        super().__init__()
        self.reference = RowScoring()

    def reference_log_probabilities(self, states: Any, actions: Any) -> Tensor:
        scores = self.reference.score_actions(states, actions)
        return torch.where(scores.mask, scores.log_probs, 0.0)


def zeros(states: Any, actions: Any) -> list[float]:
    return [0.0] * len(actions)


def completed(policy: Any, reference: Any = None, **settings: Any) -> tuple[ExperienceBatch, ExperienceCollector]:
    settings |= {"group_size": 2, "reference_policy": reference, "use_reference": True, "needs": ("entropy",)}
    collector = ExperienceCollector(policy=policy, reward_model=zeros, **settings)
    return collector.complete(batch(), several_updates=True), collector


def reported(collector: ExperienceCollector, *others: Costs) -> float:
    """The number of repetitions on this rank and others, as an iteration reports it."""
    return collector.costs.agree([collector.costs.of_this_rank(), *others])["train/out_of_memory"]


@pytest.mark.parametrize("failing", [1, 2])
@pytest.mark.parametrize("failing_part", ["policy", "reference", "own reference"])
def test_scores_are_the_same_whichever_call_runs_out_of_memory(failing_part, failing):
    """Two calls of four rows for the policy and two for the reference. The failing call is repeated with two rows each."""
    policies = [OwnReference()] if failing_part == "own reference" else [RowScoring(), RowScoring()]
    expected, _ = completed(*policies, micro_batch_size=2)
    memory, twins = SmallMemory(fails_at=[failing]), copy.deepcopy(policies)
    method = "reference_log_probabilities" if failing_part == "own reference" else "score_actions"
    memory.used_by(twins[failing_part == "reference"], method, scored_rows)
    found, collector = completed(*twins, micro_batch_size=4)
    assert memory.sizes == [4] * failing + [2] * 4
    assert (collector.scoring.num_halvings, reported(collector)) == (1, 1)
    for name in ("old_log_probs", "ref_log_probs", "entropy"):
        torch.testing.assert_close(getattr(found, name)[MASK], getattr(expected, name)[MASK], rtol=1e-12, atol=0)


def test_steps_of_sampled_actions_are_found_with_fewer_rows_too() -> None:
    torch.manual_seed(0)
    policy, memory = RowScoring(), SmallMemory(fits=3)
    memory.used_by(policy, "score_actions", scored_rows)
    found = ExperienceCollector(policy=policy, reward_model=zeros, group_size=3).collect([0, 1])
    assert memory.sizes == [6, 3, 3]
    expected = RowScoring.score_actions(policy, found.states, found.actions)
    assert torch.equal(found.mask, expected.mask)
    assert torch.allclose(found.old_log_probs[found.mask], expected.log_probs[found.mask].detach(), rtol=1e-12, atol=0)


def test_repetitions_of_all_ranks_count_and_each_rank_keeps_its_own_sizes() -> None:
    collector = ExperienceCollector(policy=RowScoring(), reward_model=zeros, group_size=1)
    collector.sample.rows_per_call, collector.scoring.num_halvings, collector.sample.num_repeated = 8, 1, 1
    assert reported(collector, Costs(counts={}, measured={}, num_repeated=2)) == 3
    assert (collector.sample.rows_per_call, collector.scoring.num_halvings) == (8, 1)


def test_the_state_restores_every_count_and_no_size() -> None:
    """How many rows fit into memory depends on the machine that resumes."""
    collector, twin = (ExperienceCollector(policy=RowScoring(), reward_model=zeros, group_size=1) for _ in range(2))
    fresh = {"num_repeated": [0, 0, 0], "reward_counts": dict.fromkeys(COUNTED, 0.0), "reward_metrics": {}}
    assert collector.costs.state_dict() == fresh
    collector.sample.rows_per_call, collector.updating.num_halvings = 6, 2
    collector.sample.num_repeated, collector.scoring.num_repeated, collector.updating.num_repeated = 3, 4, 5
    collector.costs.add({"rewards/failed_calls": 2.0}, {"judge/seconds": (1, 3.0)})
    twin.costs.load_state_dict(collector.costs.state_dict())
    assert (twin.sample.rows_per_call, twin.updating.num_halvings) == (None, 0)
    assert (twin.costs.state_dict(), reported(twin)) == (collector.costs.state_dict(), 12)
