"""Episode starts, and how the steps of episodes are padded to a batch."""

import math
from collections import OrderedDict, deque
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adapters.control.environments.episodes import Episode, EpisodeStart, episode_mask, episode_starts, pad_to_steps
from adapters.control.environments.plain_data import pack, unpack
from adapters.control.environments.snapshots import Snapshot
from grpo.errors import ConfigError, ContractError
from tests.support.control_episodes import episode_of
from tests.support.plain_states import assert_same, through_checkpoint


def episode(length: int) -> Episode:
    return episode_of([0.0] * length)


def test_starts_repeat_in_every_run_and_differ_between_iterations() -> None:
    drawn = [start.seed for iteration in range(50) for start in episode_starts(3)(iteration)]
    assert drawn == [start.seed for iteration in range(50) for start in episode_starts(3)(iteration)]
    assert len(set(drawn)) == 150
    assert all(seed is not None and 0 <= seed < 2**32 for seed in drawn)  # the range that Gymnasium accepts
    assert not set(drawn) & {start.seed for iteration in range(50) for start in episode_starts(3, seed=1)(iteration)}


def test_at_least_one_group_is_required() -> None:
    with pytest.raises(ConfigError, match="num_groups must be an integer >= 1; got int 0"):
        episode_starts(0)
    with pytest.raises(ConfigError, match="seed must be an integer >= 0; got int -1"):
        episode_starts(1, seed=-1)


def test_episodes_are_compared_by_identity() -> None:
    """Comparison by value would raise, because comparing tensors gives no single bool."""
    first, second = episode(3), episode(3)
    assert [second, first].index(first) == 1
    assert len({first, second}) == 2


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"rewards": [0.0, 0.0]}, "rewards must be a tensor; got a list of 2"),
        ({"allowed": 1}, "allowed must be a tensor; got int 1"),
        ({"rewards": torch.zeros(2, 1)}, r"rewards must be \[L\], one per step; got \[2, 1\]"),
        ({"log_probs": torch.zeros(3)}, r"log_probs must have one row per reward, L = 2; got \[3\]"),
        ({"allowed": torch.ones(1, 2).bool()}, r"allowed must have one row per reward, L = 2; got \[1, 2\]"),
        ({"truncated": 1}, "truncated must be True or False; got int 1"),
    ],
)
def test_an_episode_of_other_types_or_lengths_is_refused(changed: Any, message: str) -> None:
    with pytest.raises((ConfigError, ContractError), match=f"Episode: {message}"):
        replace(episode(2), **changed)


def test_an_episode_prints_its_length_return_ending_and_first_actions() -> None:
    vectors = torch.tensor([[0.5, -1.25], [1000.0, 0.0625]])
    said = str(replace(episode(2), actions=vectors))
    assert said == "2 steps, return 0, terminated; actions [0.5, -1.25], [1e+03, 0.0625]"
    assert str(replace(episode(6), terminated=False, truncated=True)).endswith("truncated; actions 0, 0, 0, 0, 0, ...")


def test_steps_are_padded_row_by_row_and_differentiably() -> None:
    mask = episode_mask([episode(2), episode(3), episode(1)])
    assert mask.tolist() == [[True, True, False], [True, True, True], [True, False, False]]
    values = torch.arange(1.0, 7.0, requires_grad=True)
    padded = pad_to_steps(values, mask)
    assert padded.tolist() == [[1.0, 2.0, 0.0], [3.0, 4.0, 5.0], [6.0, 0.0, 0.0]]
    (padded * torch.tensor([[1.0, 1.0, math.pi], [1.0, 1.0, 2.0], [3.0, math.pi, math.pi]])).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1.0, 1.0, 1.0, 1.0, 2.0, 3.0]


def test_episodes_come_back_from_a_checkpoint(tmp_path: Path, subtests: pytest.Subtests) -> None:
    record = torch.rand(5, 2)  # episodes are views of one record
    first = replace(episode(3), observations=record[:3], log_probs=torch.tensor([-0.1, float("nan"), -0.0]))
    second = replace(
        episode(2),
        observations=record[3:],
        actions=torch.tensor([[0.5, 1.5], [2.5, 3.5]], dtype=torch.float64),
        terminated=False,
        truncated=True,
        allowed=torch.tensor([[True, False], [True, True]]),
    )
    images = replace(episode(1), observations=torch.zeros(1, 2, 2, dtype=torch.uint8))
    for name, given in {"first": first, "second": second, "images": images, "empty": episode(0)}.items():
        with subtests.test(episode=name):
            assert_same(through_checkpoint(given, tmp_path / name), given)
    assert first.to_state()["observations"] is first.observations


# --- plain data of episode starts comes back with its types, its shared parts and its order


EVERYTHING: dict[Any, Any] = {
    "none": None,
    "numbers": (1, -0.0, float("nan"), float("inf"), True, 2**200, 3 - 4j),
    "text": "Grüße \ud800",
    "bytes": b"\x00\xff",
    "scalars": [np.float32(0.1), np.int64(7), np.bool_(True), np.complex64(1j), np.str_("a")],
    "arrays": [np.arange(6, dtype=np.int16).reshape(2, 3), np.array(0.5), np.zeros((0, 4)), np.array([b"ab", b"c"])],
    "nested": [[], (), {}, [()], ([],)],
    "sets": ({3, 1}, frozenset({(1, "a")}), set()),
    "queues": [deque([1, [2]], maxlen=3), deque()],
    ("tuple", 1): {2: "two", 2.5: None, None: 0},
}


def test_every_type_comes_back_as_itself(tmp_path: Path) -> None:
    assert_same(unpack(pack(EVERYTHING)), EVERYTHING)
    assert_same(unpack(through_checkpoint(pack(EVERYTHING), tmp_path)), EVERYTHING)


def test_objects_in_several_places_stay_one_object() -> None:
    array, words, table, queue, group = np.zeros(2), ["a"], {"k": 1}, deque([1]), {1}
    shared = [array, words, table, queue, group]
    found = unpack(pack({"first": [*shared, ["a"]], "second": tuple(shared)}))
    assert all(one is other for one, other in zip(found["first"], found["second"], strict=False))
    assert found["first"][1] == found["first"][5]
    assert found["first"][1] is not found["first"][5]


def test_objects_within_shared_objects_and_after_them_keep_their_numbers() -> None:
    inner: list[Any] = [1]
    outer, last = [inner, {"inner": inner}], list[Any]()
    inner.append(outer)  # which contains itself then
    found = unpack(pack([outer, inner, last, outer, last]))
    assert found[0] is found[3] is found[1][1]
    assert found[0][0] is found[0][1]["inner"] is found[1]
    assert found[1][0] == 1
    assert found[2] is found[4]
    assert found[2] == []


class Command(IntEnum):
    LEFT = 1


def test_types_that_would_be_lost_are_refused_in_words(subtests: pytest.Subtests) -> None:
    values = [Command.LEFT, OrderedDict(a=1), object(), torch.zeros(2), np.array([None]), len]
    for value in values:
        with subtests.test(kind=type(value).__name__):
            words = rf"plain data to be saved in a checkpoint; it contains a .*{type(value).__name__}. Use numbers"
            with pytest.raises(ContractError, match=f"must be {words}"):
                EpisodeStart(options={"goal": value}).to_state()


def test_packed_data_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ContractError, match="cannot contain 'pickle'"):
        unpack({"pickle": "cos\nsystem"})


def test_starts_come_back_from_a_checkpoint(tmp_path: Path, subtests: pytest.Subtests) -> None:
    snapshot = Snapshot(
        environment="Taxi-v4", observation=np.int64(3), layers=(("Wrapper", {"values": EVERYTHING}), ("Taxi", {}))
    )
    starts = {
        "empty": EpisodeStart(),
        "seed": EpisodeStart(seed=2**40),
        "options": EpisodeStart(seed=1, options={"goal": np.float32(0.5), "cells": (1, [2])}),
        "snapshot": EpisodeStart(snapshot=snapshot),
    }
    for name, start in starts.items():
        with subtests.test(start=name):
            assert_same(through_checkpoint(start, tmp_path / name), start)
