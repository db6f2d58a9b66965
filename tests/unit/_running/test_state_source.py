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


def test_without_a_number_every_iteration_gets_all_states_in_order_or_those_of_a_sampler():
    source = StateSource(["a", "b", "c"], None, seed=0)
    assert [source(i) for i in range(3)] == [["a", "b", "c"]] * 3
    source = StateSource(lambda iteration: [f"state of {iteration}"], None, seed=0)
    assert [source(i) for i in (0, 7)] == [["state of 0"], ["state of 7"]]


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


def test_passes_are_shuffled_by_the_seed_and_differ():
    assert len({tuple(StateSource(list(range(6)), 6, seed)(0)) for seed in range(20)}) > 10
    source = StateSource(list(range(20)), 20, seed=0)
    assert source(0) != source(1)
    assert sorted(StateSource(("a", "b", "c"), 3, seed=0)(0)) == ["a", "b", "c"]


@pytest.mark.parametrize("container", [np.asarray, torch.as_tensor])
def test_arrays_and_tensors_keep_their_type_and_whole_rows(container):
    states = container(np.arange(12).reshape(6, 2))
    drawn = StateSource(states, 4, seed=0)(0)
    assert type(drawn) is type(states)
    assert drawn.shape == (4, 2)
    assert all(int(b) == int(a) + 1 for a, b in drawn)  # rows stay whole
    assert len({int(a) for a, _ in drawn}) == 4
    assert StateSource(states, None, seed=0)(5) is states


class Counting:
    """An iterable without a length, which counts how often it is begun."""

    def __init__(self, size: int) -> None:
        self.size, self.begun = size, 0

    def __iter__(self):
        self.begun += 1
        return iter(range(self.size))


def test_an_iterable_is_restarted_at_its_end_and_an_iterator_is_not():
    states = Counting(5)
    source = StateSource(states, 3, seed=0)
    assert [source(i) for i in range(4)] == [[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]]
    assert states.begun == 3
    assert StateSource(Counting(5), 3, seed=0)(2) == [1, 2, 3]  # a resumed run skips what was given before
    assert StateSource(Counting(2), 5, seed=0)(0) == [0, 1, 0, 1, 0]
    source = StateSource(iter(range(5)), 3, seed=0)
    assert source(0) == [0, 1, 2]
    with pytest.raises(ContractError, match="3 states per iteration; it ended after 2"):
        source(1)
    source = StateSource((n * n for n in range(10**9)), 2, seed=0)
    assert [source(i) for i in range(3)] == [[0, 1], [4, 9], [16, 25]]


@pytest.mark.parametrize(
    ("states", "error", "message"),
    [
        *((empty, ContractError, "at least one") for empty in ([], (), np.zeros((0, 2)), torch.zeros(0, 2))),
        ("one prompt", ConfigError, "got a str.*list of states"),
        (b"one prompt", ConfigError, "got a bytes.*list of states"),
        ({"prompt": "one"}, ConfigError, "got a dict.*list of states"),
        (iter([1]), ConfigError, "num_states_per_iteration"),
        ({"a", "b"}, ConfigError, r"must be set, because a set of states has no entries by number.*list\(states\)"),
        (None, ConfigError, "got NoneType"),
        (5, ConfigError, "got int"),
        (1.5, ConfigError, "got float"),
    ],
)
def test_what_is_no_container_of_states_is_refused(states, error, message):
    with pytest.raises(error, match=message):
        StateSource(states, None, seed=0)


LETTERS = ["a", "b", "c", "d", "e"]


@pytest.mark.parametrize("loader", [
    DataLoader(LETTERS, batch_size=2), DataLoader(LETTERS, batch_size=2, shuffle=True),
    DataLoader(torch.zeros(5, 2), batch_size=2),
])  # fmt: skip
def test_a_loader_of_batches_is_refused(loader):
    message = r"yields batches.*loader\.dataset, with GRPOConfig\.num_states_per_iteration=2.*batch_size=None"
    with pytest.raises(ConfigError, match=message):
        StateSource(loader, 2, seed=0)
    trainer = GRPOTrainer(config=GRPOConfig(), policy=Plain(), reward_model=lambda s, a: [0.0] * len(a))
    for use in (trainer.step, trainer.evaluate):
        message = r"Pass its data set, loader\.dataset, because its entries"
        with as_users_run_it(), pytest.raises(ContractError, match=message):
            use(loader)


def test_what_the_error_for_a_loader_of_batches_advises_works():
    of_dataset = StateSource(DataLoader(LETTERS, batch_size=2).dataset, 2, seed=0)
    assert sorted(of_dataset(0) + of_dataset(1) + of_dataset(2)[:1]) == LETTERS
    one_by_one = StateSource(DataLoader(LETTERS, batch_size=None), 2, seed=0)
    assert [one_by_one(i) for i in range(3)] == [["a", "b"], ["c", "d"], ["e", "a"]]


@pytest.mark.parametrize(
    ("num_states", "num", "epochs", "expected"),
    [(6, 2, 1, 3), (6, 4, 1, 2), (6, 4, 2, 3), (6, None, 3, 3), (5, 16, 1, 1), (8, 2, 0.5, 2)],
)
def test_epochs_are_counted_in_iterations_rounded_up(num_states, num, epochs, expected):
    source = StateSource(list(range(num_states)), num, seed=0)
    assert source.num_iterations(epochs) == expected
    drawn = [state for iteration in range(expected) for state in source(iteration)]
    assert min([drawn.count(state) for state in range(num_states)]) >= int(epochs)


def test_sets_and_loaders_of_single_states_have_epochs():
    assert StateSource({"a", "b", "c"}, 1, seed=0).num_iterations(2) == 6
    assert StateSource(DataLoader(["a", "b"], batch_size=None), 2, seed=0).num_iterations(3) == 3


@pytest.mark.parametrize(
    ("states", "epochs", "message"),
    [
        *(
            (states, 1, rf"num_epochs counts passes over the states, and a {name} has no length")
            for states, name in [
                (iter([1]), "list_iterator"),
                (Counting(3), "Counting"),
                (lambda iteration: [1], "function"),
            ]
        ),
        *(
            ([1], epochs, "num_epochs must be a number above 0; got")
            for epochs in (0, -1, float("nan"), float("inf"), True, "1")
        ),
    ],
)
def test_epochs_of_states_without_a_length_and_wrong_epochs_are_refused(states, epochs, message):
    with as_users_run_it(), pytest.raises(ConfigError, match=message):
        StateSource(states, 1, seed=0).num_iterations(epochs)


def test_a_run_takes_either_iterations_or_epochs():
    config = GRPOConfig(group_size=2, num_states_per_iteration=2, seed=0)

    def trained(states, **length):
        trainer = GRPOTrainer(config=config, policy=Plain(), reward_model=lambda s, a: [float(x) for x in a])
        return len(trainer.train(states, progress=False, **length))

    assert (trained(LETTERS, num_epochs=2), trained(LETTERS, num_iterations=3)) == (5, 3)
    for both_or_none in ({}, {"num_iterations": 3, "num_epochs": 1}):
        with pytest.raises(ConfigError, match=r"train needs num_iterations, num_epochs or budget; got .* exactly one"):
            trained(LETTERS, **both_or_none)
