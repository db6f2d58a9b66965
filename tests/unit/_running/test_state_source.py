"""The states of an iteration: shuffled passes, restarted iterables, samplers, and refused inputs."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from grpo import ConfigError, ContractError, GRPOConfig, GRPOTrainer
from grpo._running.state_source import StateSource
from tests.support.bad_input_places import Plain
from tests.support.objective_inputs import as_users_run_it


def test_without_a_number_every_iteration_gets_all_states_in_order():
    source = StateSource(["a", "b", "c"], None, seed=0)
    assert [source(i) for i in range(3)] == [["a", "b", "c"]] * 3


@settings(max_examples=60)
@given(size=st.integers(1, 9), num=st.integers(1, 20), seed=st.integers(0, 99))
def test_each_pass_takes_every_state_once(size, num, seed):
    source = StateSource(list(range(size)), num, seed)
    drawn = [state for iteration in range(size) for state in source(iteration)]
    assert len(drawn) == size * num
    for start in range(0, len(drawn), size):
        assert sorted(drawn[start : start + size]) == list(range(size))


@settings(max_examples=60)
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


def test_a_loader_of_batches_is_refused_for_a_step_and_an_evaluation_too():
    trainer = GRPOTrainer(config=GRPOConfig(), policy=Plain(), reward_model=lambda s, a: [0.0] * len(a))
    for use in (trainer.step, trainer.evaluate):
        with (
            as_users_run_it(),
            pytest.raises(ContractError, match=r"Pass its data set, loader\.dataset, because its entries"),
        ):
            use(DataLoader(["a", "b"], batch_size=2))


def test_an_iterable_with_a_length_is_not_said_to_have_none():
    with pytest.raises(
        ConfigError, match=r"must be set, because a set of states has no entries by number.*list\(states\)"
    ):
        StateSource({"a", "b"}, None, seed=0)


def test_epochs_are_counted_in_iterations_rounded_up(subtests):
    cases = [(6, 2, 1, 3), (6, 4, 1, 2), (6, 4, 2, 3), (6, None, 3, 3), (5, 16, 1, 1), (8, 2, 0.5, 2)]
    for num_states, num, epochs, expected in cases:
        with subtests.test(num_states=num_states, num=num, epochs=epochs):
            source = StateSource(list(range(num_states)), num, seed=0)
            assert source.num_iterations(epochs) == expected
            drawn = [state for iteration in range(expected) for state in source(iteration)]
            counts = [drawn.count(state) for state in range(num_states)]
            assert min(counts) >= int(epochs)
    assert StateSource({"a", "b", "c"}, 1, seed=0).num_iterations(2) == 6
    assert StateSource(DataLoader(["a", "b"], batch_size=None), 2, seed=0).num_iterations(3) == 3


def test_epochs_of_states_without_a_length_and_wrong_epochs_are_refused(subtests):
    for states, name in [(iter([1]), "list_iterator"), (Counting(3), "Counting"), (lambda iteration: [1], "function")]:
        with (
            subtests.test(name=name),
            pytest.raises(ConfigError, match=rf"num_epochs counts passes over the states, and a {name} has no length"),
        ):
            StateSource(states, 1, seed=0).num_iterations(1)
    for epochs in (0, -1, float("nan"), float("inf"), True, "1"):
        with (
            subtests.test(epochs=epochs),
            as_users_run_it(),
            pytest.raises(ConfigError, match="num_epochs must be a number above 0; got"),
        ):
            StateSource([1], 1, seed=0).num_iterations(epochs)


def test_a_run_takes_either_iterations_or_epochs():
    config = GRPOConfig(group_size=2, num_states_per_iteration=2, seed=0)

    def trained(states, **length):
        trainer = GRPOTrainer(config=config, policy=Plain(), reward_model=lambda s, a: [float(x) for x in a])
        return len(trainer.train(states, progress=False, **length))

    states = ["a", "b", "c", "d", "e"]
    assert trained(states, num_epochs=2) == 5
    assert trained(states, num_iterations=3) == 3
    for both_or_none in ({}, {"num_iterations": 3, "num_epochs": 1}):
        with pytest.raises(ConfigError, match=r"train needs num_iterations, num_epochs or budget; got .* exactly one"):
            trained(states, **both_or_none)
