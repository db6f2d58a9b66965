"""Sampling: what a policy is called with, and how calls that run out of memory are repeated and joined."""

import logging
import random
import weakref
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo import ActionScores, ContractError, ExperienceBatch, GRPOConfig, GRPOTrainer, SampledActions
from grpo._collecting.dynamic_sampling import collect_live_groups
from grpo._collecting.sampling import SampleCalls
from grpo.errors import ConfigError, GRPOWarning
from tests.support.out_of_memory import SmallMemory, sampled_rows
from tests.support.policies import ExactSampling, TablePolicy, VectorPolicy


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
    """Draws actions from the three global generators, a call at a time."""

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
