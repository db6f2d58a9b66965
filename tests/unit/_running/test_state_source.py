"""What an iteration draws: states, shuffled or from iterables and samplers, and demonstrations."""

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from grpo import ConfigError, ContractError, ExperienceBatch, GRPOConfig, GRPOTrainer, JSONLSink
from grpo._running.demonstrations import DemonstrationSource
from grpo._running.state_source import StateSource
from tests.support.bad_input_places import Plain
from tests.support.imitated_ranks import ImitatedRank, on_ranks
from tests.support.objective_inputs import as_users_run_it
from tests.support.policies import RowScoring, TablePolicy, weights_of
from tests.support.stopped_runs import Unbroken, by_signal
from tests.support.trainers import by_hand, trainer_of


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


WITHOUT_LENGTH = {"list_iterator": iter([1]), "Counting": Counting(3), "function": lambda iteration: [1]}
NO_LENGTH = "num_epochs counts passes over the states, and a {} has no length"


@pytest.mark.parametrize(
    ("states", "epochs", "message"),
    [
        *((states, 1, NO_LENGTH.format(name)) for name, states in WITHOUT_LENGTH.items()),
        *(([1], epochs, "num_epochs must be a number above 0; got") for epochs in (0, -1, np.nan, np.inf, True, "1")),
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


SEQUENCES = ExperienceBatch.from_demonstrations([2, 0, 3, 1, 0], [(2, 1), (1,), (1, 2, 1, 1), (2, 2, 0), (1, 1)])


def table(states: list[str], actions: list[int]) -> ExperienceBatch:
    return ExperienceBatch.from_demonstrations(states, actions)


def refused(states: Any, actions: Any) -> Any:
    raise AssertionError("a supervised run asks for no reward")


def test_a_supervised_run_learns_the_demonstrations_and_samples_nothing() -> None:
    """Three of four actions in state a are 0: the cross-entropy is lowest at p(0) = 3/4."""
    policy = TablePolicy()
    trainer = trainer_of(policy, refused, learning_rate=0.1, seed=0)
    history = trainer.train(None, demonstrations=table(["a"] * 4, [0, 0, 0, 1]), num_iterations=150, progress=False)
    assert policy.logits.softmax(1)[0, 0].item() == pytest.approx(3 / 4, abs=1e-3)
    assert policy.calls["generate"] == 0
    entropy = -(3 / 4 * math.log(3 / 4) + 1 / 4 * math.log(1 / 4))
    assert history[-1]["train/demonstration_loss"] == pytest.approx(entropy, abs=1e-4)
    assert "rewards/mean" not in history[-1]


def test_demonstrations_are_drawn_as_states_are() -> None:
    source, places = DemonstrationSource(SEQUENCES, 2, seed=3), StateSource(range(5), 2, seed=3)
    for iteration in (0, 4):
        drawn = source(iteration)
        assert drawn.actions == [SEQUENCES.actions[place] for place in places(iteration)]
        assert drawn.states == [SEQUENCES.states[place] for place in places(iteration)]
    assert DemonstrationSource(SEQUENCES, None, seed=3)(7) is SEQUENCES


def test_num_epochs_of_a_supervised_run_are_passes_over_the_demonstrations() -> None:
    trainer, _ = by_hand(config={"num_demonstrations_per_iteration": 1})
    given = table(["a", "b", "a"], [0, 1, 1])
    assert len(trainer.train(None, demonstrations=given, num_epochs=2, progress=False)) == 6
    with pytest.raises(ConfigError, match="a function has no length"):
        by_hand()[0].train(None, demonstrations=lambda iteration: given, num_epochs=1, progress=False)


SAMPLED = ExperienceBatch.from_rows(["a"], [1], [0.0], [0])


@pytest.mark.parametrize(
    ("states", "given", "message"),
    [
        (None, None, "states=None trains on demonstrations alone, and there are none"),
        (["a"], [("a", 1)], "demonstrations must be a batch, or a function iteration -> batch; got a list of 1 tuple"),
        (["a"], SAMPLED, "demonstrations must be a batch of demonstrations; got ExperienceBatch"),
        (["a", "b"], lambda iteration: SAMPLED, r"demonstrations\(iteration\) must be a batch of demonstrations"),
        (["a"], ExperienceBatch, "demonstrations must be a batch, or a function"),
        (["a"], lambda: SAMPLED, "demonstrations must be a batch, or a function iteration -> batch; got function"),
    ],
)
def test_what_is_no_demonstration_is_refused(states, given, message):
    with pytest.raises(ConfigError, match=message):
        by_hand()[0].train(states, demonstrations=given, num_iterations=1, progress=False)


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize("has_states", [True, False])
@pytest.mark.parametrize("at", [1, 4, 6])
def test_a_stopped_run_continues_to_the_bit(has_states: bool, at: int, tmp_path: Path) -> None:
    """Stopped by a signal before or between two updates of an iteration, and continued by another trainer."""

    def trainer() -> GRPOTrainer:
        torch.manual_seed(0)
        settings = {"num_demonstrations_per_iteration": 3, "num_states_per_iteration": 2, "replay_iterations": 1}
        batches = {"batch_size": 4 if has_states else 2, "num_epochs_per_update": 2}
        return trainer_of(RowScoring(), lambda s, a: [float(sum(x)) for x in a], seed=0, **settings, **batches)

    states = [0, 1, 2, 3] if has_states else None
    options = {"demonstrations": SEQUENCES, "progress": False}
    unbroken = Unbroken(lambda _: (trainer(), states, options), num_iterations=3)
    unbroken.assert_same_after_a_stop(tmp_path, "step", at, by_signal)


def test_two_ranks_take_their_shares_of_the_demonstrations() -> None:
    """The run of two ranks is the run of one process, because an iteration has all demonstrations in either case."""

    def run(engine: ImitatedRank | None) -> torch.Tensor:
        policy = TablePolicy(logits=[[0.0, 0.5], [0.3, 0.0]])
        trainer, _ = by_hand(policy=policy, rewards=refused, config={"seed": 0}, engine=engine)
        trainer.train(None, demonstrations=table(["a", "b", "a"], [0, 1, 1]), num_iterations=3, progress=False)
        return weights_of(policy)

    expected = run(None)
    for found in on_ranks(2, run):
        torch.testing.assert_close(found, expected)


def test_every_rank_needs_a_demonstration() -> None:
    def run(engine: ImitatedRank) -> None:
        trainer = GRPOTrainer(config=GRPOConfig(seed=0), policy=TablePolicy(), reward_model=refused, engine=engine)
        trainer.train(None, demonstrations=table(["a"], [0]), num_iterations=1, progress=False)

    message = "Every one of 2 ranks needs a demonstration; got 1. Raise num_demonstrations_per_iteration."
    assert message in str(on_ranks(2, run)[0])


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_function_gives_the_demonstrations_of_the_iteration_that_is_updated(ahead) -> None:
    asked = []

    def drawn(iteration: int) -> ExperienceBatch:
        asked.append(iteration)
        return table(["a"], [iteration % 2])

    trainer = trainer_of(TablePolicy(), lambda s, a: [float(x) for x in a], iterations_ahead=ahead, seed=0)
    (metrics,) = trainer.train(None, demonstrations=drawn, num_iterations=1, progress=False)
    assert metrics["train/demonstration_loss"] == pytest.approx(math.log(2))
    history = trainer.train(["a", "b"], demonstrations=drawn, num_iterations=4, progress=False)
    assert (asked, [metrics["rows/demonstrations"] for metrics in history]) == ([0, 1, 2, 3], [1.0] * 3)
    assert all("rewards/mean" in metrics for metrics in history)


def test_dynamic_sampling_leaves_demonstrations_alone() -> None:
    """Groups of equal rewards are left out: both, so that the last draw is used. The demonstration stays."""
    trainer, _ = by_hand(rewards=[1.0] * 4, config={"dynamic_sampling_rounds": 1})
    (metrics,) = trainer.train(["a", "b"], demonstrations=table(["a"], [1]), num_iterations=1, progress=False)
    assert (metrics["group_stats/num_rounds"], metrics["rows/demonstrations"]) == (1.0, 1.0)
    assert metrics["train/num_updates"] == 1.0


def test_sinks_record_the_metrics_of_all_and_the_samples_of_sampled_rows(tmp_path: Path) -> None:
    class Recorder:
        samples: list[Any] = []  # noqa: RUF012

        def log(self, metrics: Any, iteration: int) -> None: ...

        def close(self) -> None: ...

        def log_samples(self, samples: Any, iteration: int) -> None:
            self.samples.append(samples)

    trainer, _ = by_hand()
    with JSONLSink(tmp_path / "metrics.jsonl") as sink:
        options = {"demonstrations": table(["a"], [1]), "sinks": [Recorder(), sink], "progress": False}
        trainer.train(None, num_iterations=1, **options)
        trainer.train(["a", "b"], num_iterations=2, **options)
    (samples,) = Recorder.samples
    assert len(samples.actions) == len(samples.rewards) == len(samples.advantages) == 4
    assert (tmp_path / "metrics.jsonl").read_text().count("train/demonstration_loss") == 2


def test_the_bar_shows_the_loss_where_there_is_no_reward(capsys: pytest.CaptureFixture[str]) -> None:
    by_hand()[0].train(None, demonstrations=table(["a"], [1]), num_iterations=1)
    shown = capsys.readouterr().err
    assert "demonstration_loss=0.693" in shown
    assert "Supervised: 100%" in shown


@pytest.mark.parametrize("states", [None, ["a", "b"]])
def test_nothing_says_that_a_supervised_run_does_not_learn(caplog, states):
    """Alone, until every demonstration is certain; and beside rewards that are all equal. The reference has a KL term."""
    with caplog.at_level(logging.INFO, "grpo"):
        policy = TablePolicy()
        trainer = GRPOTrainer(
            config=GRPOConfig(learning_rate=1.0, seed=0, batch_size=2, num_epochs_per_update=2),
            policy=policy,
            reference_policy=TablePolicy() if states is None else None,
            reward_model=lambda s, a: [1.0] * len(s),
        )
        given = table(["a", "b", "a", "b"], [0, 1, 0, 1])
        trainer.train(states, demonstrations=given, num_iterations=40, progress=False)
        assert policy.logits.softmax(1).max(1).values.min() > 0.999
        assert caplog.messages == []
