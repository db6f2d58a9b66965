"""The states of an iteration: shuffled passes, restarted iterables, samplers, and refused inputs."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from grpo import ConfigError, ContractError
from grpo._training.state_source import StateSource


def test_without_a_number_every_iteration_gets_all_states_in_order():
    source = StateSource(["a", "b", "c"], None, seed=0)
    assert [source(i) for i in range(3)] == [["a", "b", "c"]] * 3


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 9), num=st.integers(1, 20), seed=st.integers(0, 99))
def test_each_pass_takes_every_state_once(size, num, seed):
    source = StateSource(list(range(size)), num, seed)
    drawn = [state for iteration in range(size) for state in source(iteration)]
    assert len(drawn) == size * num
    for start in range(0, len(drawn), size):
        assert sorted(drawn[start : start + size]) == list(range(size))


@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 9), num=st.integers(1, 20), iteration=st.integers(0, 30))
def test_the_states_of_an_iteration_do_not_depend_on_earlier_iterations(size, num, iteration):
    walked = StateSource(list(range(size)), num, seed=3)
    for earlier in range(iteration):
        walked(earlier)
    assert StateSource(list(range(size)), num, seed=3)(iteration) == walked(iteration)


def test_passes_are_shuffled_by_the_seed():
    orders = {tuple(StateSource(list(range(6)), 6, seed)(0)) for seed in range(20)}
    assert len(orders) > 10


def test_later_passes_have_a_different_order():
    source = StateSource(list(range(20)), 20, seed=0)
    assert source(0) != source(1)


def test_arrays_and_tensors_keep_their_type_and_whole_rows(subtests):
    for container in [np.asarray, torch.as_tensor]:
        with subtests.test(container=container):
            states = container(np.arange(12).reshape(6, 2))
            drawn = StateSource(states, 4, seed=0)(0)
            assert type(drawn) is type(states)
            assert drawn.shape == (4, 2)
            assert all(int(b) == int(a) + 1 for a, b in drawn)  # rows stay whole
            assert len({int(a) for a, _ in drawn}) == 4
            assert StateSource(states, None, seed=0)(5) is states


def test_a_tuple_of_states_is_accepted():
    assert sorted(StateSource(("a", "b", "c"), 3, seed=0)(0)) == ["a", "b", "c"]


class Counting:
    """An iterable without a length, which counts how often it is begun."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.begun = 0

    def __iter__(self):
        self.begun += 1
        return iter(range(self.size))


def test_an_iterable_is_read_in_order_and_restarted_at_its_end():
    states = Counting(5)
    source = StateSource(states, 3, seed=0)
    assert [source(i) for i in range(4)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]
    assert states.begun == 3


def test_an_iterable_shorter_than_an_iteration_is_restarted_within_it():
    assert StateSource(Counting(2), 5, seed=0)(0) == [0, 1, 0, 1, 0]


def test_a_resumed_run_skips_what_an_iterable_gave_before():
    assert StateSource(Counting(5), 3, seed=0)(2) == [1, 2, 3]


def test_the_error_for_an_exhausted_iterator_says_how_many_states_are_missing():
    source = StateSource(iter(range(5)), 3, seed=0)
    assert source(0) == [0, 1, 2]
    with pytest.raises(ContractError, match="3 states per iteration; it ended after 2"):
        source(1)


def test_an_endless_generator_is_never_restarted():
    source = StateSource((n * n for n in range(10**9)), 2, seed=0)
    assert [source(i) for i in range(3)] == [[0, 1], [4, 9], [16, 25]]


def test_a_state_sampler_is_called_once_per_iteration():
    source = StateSource(lambda iteration: [f"state of {iteration}"], None, seed=0)
    assert [source(i) for i in (0, 7)] == [["state of 0"], ["state of 7"]]


def test_empty_states_are_refused(subtests):
    for states in [[], (), np.zeros((0, 2)), torch.zeros(0, 2)]:
        with subtests.test(states=states), pytest.raises(ContractError, match="at least one"):
            StateSource(states, None, seed=0)


def test_a_single_state_instead_of_a_sequence_is_refused(subtests):
    for states in ["one prompt", b"one prompt", {"prompt": "one"}]:
        with (
            subtests.test(states=states),
            pytest.raises(ConfigError, match=f"got a {type(states).__name__}.*list of states"),
        ):
            StateSource(states, None, seed=0)


def test_an_iterable_without_num_states_per_iteration_is_refused():
    with pytest.raises(ConfigError, match="num_states_per_iteration"):
        StateSource(iter([1]), None, seed=0)


def test_values_that_are_no_container_of_states_are_refused(subtests):
    for states in [None, 5, 1.5]:
        with subtests.test(states=states), pytest.raises(ConfigError, match=f"got {type(states).__name__}"):
            StateSource(states, None, seed=0)


def test_a_loader_of_batches_is_refused_and_what_the_error_advises_works(subtests):
    states = ["a", "b", "c", "d", "e"]
    for loader in [
        DataLoader(states, batch_size=2),
        DataLoader(states, batch_size=2, shuffle=True),
        DataLoader(torch.zeros(5, 2), batch_size=2),
    ]:
        with (
            subtests.test(loader=loader),
            pytest.raises(
                ConfigError,
                match=r"yields batches.*loader\.dataset, with GRPOConfig\.num_states_per_iteration=2.*batch_size=None",
            ),
        ):
            StateSource(loader, 2, seed=0)
    of_dataset = StateSource(DataLoader(states, batch_size=2).dataset, 2, seed=0)
    assert sorted(of_dataset(0) + of_dataset(1) + of_dataset(2)[:1]) == states
    one_by_one = StateSource(DataLoader(states, batch_size=None), 2, seed=0)
    assert [one_by_one(i) for i in range(3)] == [["a", "b"], ["c", "d"], ["e", "a"]]


def test_an_iterable_with_a_length_is_not_said_to_have_none():
    with pytest.raises(
        ConfigError, match=r"must be set, because a set of states has no entries by number.*list\(states\)"
    ):
        StateSource({"a", "b"}, None, seed=0)
