"""Descriptions of observations that do not fit, and the error about lost workers."""

import pickle

import numpy as np
import pytest
from gymnasium import spaces

from adapters.control.environments.pool_base import WorkerLost, find_misfit


def test_the_error_describes_an_observation_outside_its_space(subtests: pytest.Subtests) -> None:
    pair = spaces.Box(0, 1, (2,))
    one_key, one_part = spaces.Dict({"a": spaces.Discrete(2)}), spaces.Tuple([spaces.Discrete(2)])
    for space, observation, misfit in [
        (spaces.Discrete(3), 2, None),
        (spaces.Discrete(3), np.int32(2), None),
        (spaces.Discrete(3), 2.0, "must be int64 []; got float64 []"),
        (pair, [0, 1], None),
        (pair, np.zeros(2, np.float64), None),
        (pair, None, "must be float32 [2]; got object []"),
        (pair, [[1], [1, 2]], "must be float32 [2]; got list of uneven rows"),
        (one_key, {"a": 1}, None),
        (one_key, {"b": 1}, "must be a dict with the keys ['a']; got the keys ['b']"),
        (one_key, 1, "must be a dict with the keys ['a']; got int"),
        (one_key, {"a": [1]}, "['a'] must be int64 []; got int64 [1]"),
        (one_part, (1,), None),
        (one_part, (1, 2), "must be a tuple of 1; got 2"),
        (one_part, [1], "must be a tuple of 1; got list"),
        (one_part, (0.5,), "[0] must be int64 []; got float64 []"),
    ]:
        with subtests.test(space=str(space), observation=observation):
            assert find_misfit(space, observation) == misfit


def test_a_lost_workers_error_survives_pickling() -> None:
    lost = WorkerLost((0, 2), "member 0, which raised ValueError: x; member 2, which ended with exit code 7")
    again = pickle.loads(pickle.dumps(lost))
    assert again.members == [0, 2]
    assert str(again) == (
        "Lost the worker of member 0, which raised ValueError: x; member 2, which ended with exit code 7. "
        "The pool was rebuilt: reset its members and run their episodes again."
    )
