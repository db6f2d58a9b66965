"""Sampling: what a policy is called with, and how calls that run out of memory are repeated and joined."""

import logging
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from grpo import ActionScores, ContractError, SampledActions
from grpo._collecting.sampling import SampleCalls
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
    assert rows == ["a", "a", "b", "b", "c", "c"]
    assert actions == ["a.0", "a.1", "b.2", "b.3", "c.4", "c.5"]
    assert sampled is None
    assert policy.asked[0][0] is states
    assert memory.sizes == [6]
    assert (sample.rows_per_call, sample.num_repeated) == (None, 0)


def test_a_call_that_runs_out_of_memory_is_repeated_with_half_the_states() -> None:
    """Five states of two actions: 10 rows fail, then 6 of three states; calls of 4, 2 and 4 rows fit."""
    sample, _, memory = numbered(fits=4)
    rows, actions, _ = sample(["a", "b", "c", "d", "e"], 2)
    assert rows == [state for state in "abcde" for _ in range(2)]
    assert [action[0] for action in actions] == rows
    assert [int(action[2:]) for action in actions] == [*range(16, 26)]  # 10 and 6 actions were thrown away
    assert memory.sizes == [10, 6, 4, 2, 4]
    assert (sample.rows_per_call, sample.num_repeated) == (4, 2)


def test_later_calls_keep_to_the_number_of_rows_that_fits() -> None:
    sample, _, memory = numbered(fits=4)
    sample(["a", "b", "c", "d", "e"], 2)
    memory.sizes.clear()
    sample(["a", "b", "c", "d", "e"], 2)
    sample(["a"], 4)
    assert sample(["a", "b"], 3)[1][3].startswith("b")
    assert memory.sizes == [4, 2, 4, 4, 3, 3]
    assert sample.num_repeated == 2


def test_a_single_state_gets_fewer_actions_per_call() -> None:
    sample, _, memory = numbered(fits=2)
    rows, actions, _ = sample(["a"], 5)
    assert rows == ["a"] * 5
    assert [int(action[2:]) for action in actions] == [8, 9, 10, 11, 12]  # 5 and 3 actions were thrown away
    assert memory.sizes == [5, 3, 2, 1, 2]
    assert sample.rows_per_call == 2


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
    class Broken(TablePolicy):
        def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> Any:
            self.calls["generate"] += 1
            raise RuntimeError("out of memory, in words alone")

    policy = Broken()
    sample = SampleCalls(policy)
    with pytest.raises(RuntimeError, match="in words alone"):
        sample(["a", "b"], 2)
    assert policy.calls["generate"] == 1
    assert sample.rows_per_call is None


def test_states_and_actions_keep_their_containers_when_calls_are_joined(subtests: pytest.Subtests) -> None:
    """Seven states in calls of two states, by policies that return lists, tensors and arrays."""
    vectors = torch.arange(21.0).reshape(7, 3)
    for container, kind in (("list", list), ("tensor", Tensor), ("array", np.ndarray)):
        for states in (vectors, vectors.numpy(), vectors.tolist()):
            with subtests.test(container=container, states=type(states).__name__):
                policy = VectorPolicy(container=container)
                memory = SmallMemory(fits=8)
                memory.used_by(policy, "generate_actions", sampled_rows)
                rows, actions, _ = SampleCalls(policy)(states, 4)
                assert type(rows) is type(states)
                assert np.array_equal(np.asarray(rows), vectors.numpy().repeat(4, axis=0))
                assert isinstance(actions, kind)
                assert len(actions) == 28
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

    assert drawn(None, fits=4) == drawn(4)
    assert drawn(None, fits=3) == drawn(2)


class Ragged(ExactSampling):
    """Each state is its number of steps; log-probs are -state, behaviour log-probs half of it."""

    def sample_actions(self, states: Any, num_actions_per_state: int) -> SampledActions:
        lengths = torch.tensor(states).repeat_interleave(num_actions_per_state)
        mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
        log_probs = -lengths.double().unsqueeze(1).expand(mask.shape)
        return SampledActions(
            actions=[[(state,)] * num_actions_per_state for state in states],
            mask=mask,
            behaviour_log_probs=log_probs / 2,
            scores=ActionScores(log_probs=log_probs, mask=mask, final_values=lengths.double())
            if self.tells_scores
            else None,
            metrics={"sampler/tokens": float(mask.sum())},
        )


def test_samples_with_scores_are_joined_and_padded_to_the_most_steps() -> None:
    policy = Ragged()
    memory = SmallMemory(fits=2)
    memory.used_by(policy, "sample_actions", sampled_rows)
    rows, actions, sampled = SampleCalls(policy)([1, 3, 2], 2)
    assert rows == [1, 1, 3, 3, 2, 2]
    assert actions == [(1,), (1,), (3,), (3,), (2,), (2,)]
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
            activations = torch.ones(len(states))
            tensors.append(weakref.ref(activations))
            if len(states) > 1:
                raise torch.OutOfMemoryError
            return super().generate_actions(states, num_actions_per_state)

    tensors: list[Any] = []
    SampleCalls(Heavy())(["a", "b", "c", "d"], 1)
    assert len(tensors) == 6


def test_unused_memory_of_cuda_is_released_before_a_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[int] = []
    monkeypatch.setattr("grpo._collecting.sampling.release_cached_memory", lambda: released.append(len(memory.sizes)))
    sample, _, memory = numbered(fits=2)
    sample(["a", "b", "c", "d"], 2)
    assert memory.sizes == [8, 4, 2, 2, 2, 2]
    assert released == [1, 2]


def test_each_new_number_of_rows_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    sample, _, _ = numbered(fits=4)
    with caplog.at_level(logging.WARNING, logger="grpo"):
        sample(["a", "b", "c", "d", "e"], 2)
        sample(["a", "b", "c", "d", "e"], 2)
    assert [record.message for record in caplog.records] == [
        "Sampling ran out of memory with up to 10 rows per forward pass. It is repeated, and from now on has at most 6.",
        "Sampling ran out of memory with up to 6 rows per forward pass. It is repeated, and from now on has at most 4.",
    ]
