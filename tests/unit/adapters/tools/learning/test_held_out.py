"""Estimates of what training changes on requests that it did not learn from, with numbers worked out by hand."""

from collections.abc import Sequence

import pytest

from adapters.tools import HeldOut, ToolTask, estimate_training
from grpo.errors import ConfigError


def test_the_error_is_that_of_the_differences() -> None:
    """Differences 1, 0, 0, 0: mean 1/4, standard deviation 1/2, standard error 1/4. 4 (2/4 / 0.05)^2 = 400 requests."""
    found = HeldOut.of([0, 0, 1, 1], [1, 0, 1, 1])
    assert (found.before, found.after, found.gain, found.error) == (0.5, 0.75, 0.25, 0.25)
    assert (found.num_requests, found.requests_needed, found.is_clear) == (4, 400, False)
    assert str(found) == (
        "held out: 0.500 before, 0.750 after (+0.250 +- 0.250, 4 requests); a difference of 0.05 shows from about 400 "
        "requests on"
    )


def test_a_clear_difference_names_no_number_of_requests(subtests: pytest.Subtests) -> None:
    """Differences of 1 for 8 of 10: mean 0.8, standard deviation sqrt(1.6/9), standard error 0.1333."""
    for sign in (1, -1):
        with subtests.test(sign=sign):
            before, after = [0.0] * 10, [1.0] * 8 + [0.0] * 2
            found = HeldOut.of(before, after) if sign == 1 else HeldOut.of(after, before)
            assert found.is_clear
            assert found.error == pytest.approx((1.6 / 9 / 10) ** 0.5)
            assert str(found).endswith("+- 0.133, 10 requests)")


class Memory:
    """Knows the states that it was trained with."""

    def __init__(self) -> None:
        self.known: list[str] = ["a"]


def learn(policy: Memory, states: Sequence[str]) -> None:
    policy.known += [state for state in states if state != "a"]
    policy.known.remove("a")


def knows(policy: Memory, states: Sequence[str]) -> list[float]:
    return [float(state in policy.known) for state in states]


def test_copies_are_scored_on_what_they_did_not_learn_and_the_policy_stays(subtests: pytest.Subtests) -> None:
    """No copy has learned the states on which it is scored, not even by a twin, and all forget "a"."""
    for num_folds in (2, 3, 5):
        with subtests.test(num_folds=num_folds):
            policy = Memory()
            found = estimate_training(policy, ["a", "b", "c", "b"], learn, knows, num_folds=num_folds)
            assert (found.before, found.after, found.num_requests) == (0.25, 0.0, 4)
            assert policy.known == ["a"]


def test_tasks_of_one_text_and_vectors_are_told_apart(subtests: pytest.Subtests) -> None:
    """Two tasks share a text, so two folds are all there can be. Vectors have no text, and each counts."""
    tasks = [ToolTask(text="a", tool="x"), ToolTask(text="a", tool="y"), ToolTask(text="b", tool="x")]
    vectors = [[1.0, 2.0], [1.0, 2.0], [3.0, 4.0]]

    def sizes_of_trainings(states: Sequence[object]) -> list[int]:
        sizes: list[int] = []
        score = lambda policy, some: [0.0] * len(some)  # noqa: E731
        estimate_training(Memory(), states, lambda policy, some: sizes.append(len(some)), score)
        return sorted(sizes)

    for states, expected in ((tasks, [1, 2]), (vectors, [2, 2, 2])):
        with subtests.test(expected=expected):
            assert sizes_of_trainings(states) == expected


def test_every_state_is_held_out_once() -> None:
    seen: list[str] = []
    sizes: list[int] = []

    def score(policy: Memory, states: Sequence[str]) -> list[float]:
        seen.extend(states)
        return [0.0] * len(states)

    estimate_training(Memory(), [*"abcdefg"], lambda policy, states: sizes.append(len(states)), score, num_folds=3)
    assert seen[:7] == [*"abcdefg"]  # before training
    assert sorted(seen[7:]) == [*"abcdefg"]
    assert sorted(sizes) == [4, 5, 5]


def test_what_cannot_be_held_out_is_refused(subtests: pytest.Subtests) -> None:
    for states, num_folds, message in (
        (["a", "a"], 5, "needs at least two different requests to hold some out; got 1"),
        (["a", "b"], 1, "num_folds must be an integer >= 2"),
    ):
        with subtests.test(message), pytest.raises(ConfigError, match=f"^estimate_training.*{message}"):
            estimate_training(Memory(), states, learn, knows, num_folds=num_folds)
