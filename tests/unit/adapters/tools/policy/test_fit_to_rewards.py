"""Training from rewards: the share that is kept, worked out by hand, what is held out, and what is refused."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from adapters.tools import FitReport, ToolTask
from adapters.tools.policy.fitting import fit_to_rewards
from grpo import GRPOConfig, GRPOTrainer
from grpo.errors import ConfigError, GRPOWarning
from tests.support.tool_policies import TEXTS, policy


class OneWeight(torch.nn.Module):
    """Its only action is its weight w, which starts at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def generate_actions(self, states: Sequence[str], num_actions_per_state: int) -> list[list[float]]:
        return [[float(self.weight)] * num_actions_per_state for _ in states]

    def get_log_probabilities(self, states: Sequence[str], actions: Sequence[float]) -> torch.Tensor:
        return torch.zeros(len(states)) * self.weight

    def get_parameters(self) -> dict[str, torch.nn.Parameter]:
        return {"weight": self.weight}


def near(states: Sequence[str], actions: Sequence[float]) -> list[float]:
    """A request's text is its target y: the reward is 1 - |w - y|, and at least 0."""
    return [max(0.0, 1 - abs(action - float(state))) for state, action in zip(states, actions, strict=True)]


def fitted(*targets: str, num_calls: int = 1, **options: Any) -> tuple[float, FitReport]:
    """Training sets the weight to the mean of the targets."""
    made = OneWeight()

    def train(states: Sequence[str]) -> None:
        with torch.no_grad():
            made.weight.fill_(sum(map(float, states)) / len(states))

    options = {"held_out": None, "num_folds": 5, "seed": 0, "reward_model": near} | options
    report = fit_to_rewards(made, targets, train, num_calls=num_calls, **options)
    return float(made.weight.detach()), report


def test_the_share_that_is_kept_has_the_largest_mean_log_reward_on_held_out_requests() -> None:
    """Without 0.8, training finds 0.4, and without 0.4 it finds 0.8. The rewards at m are 1 - |0.4 m - 0.8| and
    1 - |0.8 m - 0.4|. One call counts (reward + 1/2) / 2. The logs of 0.7 + 0.4 m and of 1.5 - |0.8 m - 0.4| have the largest
    sum at m = 0.5: the slope is 0.4/0.9 + 0.8/1.5 before, and 0.4/0.9 - 0.8/1.5 < 0 after. Trained with both, the weight is
    0.6, and half of the way is 0.3. The rewards were 0.2 and 0.6, and become 0.4 and 1."""
    weight, report = fitted("0.4", "0.8")
    assert report.share == 0.5
    assert weight == pytest.approx(0.3)
    assert (report.losses, report.held_out is None, report.fully_trained is None) == ((), False, False)
    assert (report.held_out.before, report.held_out.after) == pytest.approx((0.4, 0.7))
    assert report.fully_trained.after == pytest.approx(0.6)
    assert str(report).splitlines()[0] == "share 0.5 of the way to the trained weights"


def test_more_calls_trust_a_reward_of_zero_more_and_a_request_that_never_earns_decides_nothing() -> None:
    """Without 0.5, training finds 1, which earns 1 - |m - 0.5| there, and without 1 it finds 0.5, which earns m / 2. With one
    call, (m / 2 + 1/2) (1.5 - |m - 0.5|) is proportional to (1 + m) (2 - m) from m = 1/2 on: largest at 1/2. With many calls,
    m (1.5 - m) is largest at m = 3/4, where 0.7 and 0.8 are equal: 0.7 0.8 = 0.8 0.7.
    The target 1.6 earns 0 with what 0.5 teaches. The target 0.5 earns 1 - |1.6 m - 0.5|, which is largest at m = 0.3."""
    assert fitted("0.5", "1")[1].share == 0.5
    assert fitted("0.5", "1", num_calls=1000)[1].share in (0.7, 0.8)
    assert fitted("0.5", "1.6")[1].share == 0.3


def test_a_policy_stays_as_it_was_if_other_requests_teach_nothing() -> None:
    """Each target teaches the opposite of the other."""
    message = "fit_to_rewards: the weights stay as they were.*fully trained, held out: 0.500"
    with pytest.warns(GRPOWarning, match=message):
        weight, report = fitted("0.5", "-0.5")
    assert (weight, report.share) == (0.0, 0.0)


def test_a_mean_reward_that_falls_is_told_although_fewer_requests_earn_nothing() -> None:
    """w = 0 earns 1 for a request and nothing for the other, and training finds w = 1, which earns 0.45 for each."""

    def reward(states: Sequence[str], actions: Sequence[float]) -> list[float]:
        return [(0.45 if action > 0.95 else float(state == "1")) for state, action in zip(states, actions, strict=True)]

    with pytest.warns(GRPOWarning, match="mean reward of held-out requests falls.*0.500 before, 0.450 after"):
        assert fitted("1", "1.0", reward_model=reward, num_calls=8)[1].share == 1.0


def test_every_request_is_left_out_once_with_its_twins(subtests: pytest.Subtests) -> None:
    """Two tasks of one text are left out together. Vectors have no text, and each is left out alone."""
    tasks = [ToolTask(text="a", tool="ping"), ToolTask(text="a", tool="shout"), ToolTask(text="b", tool="ping")]
    vectors = [[1.0, 2.0], [1.0, 2.0], [3.0, 4.0]]
    for requests, expected in ((tasks, [1, 2, 3]), (vectors, [2, 2, 2, 3])):
        sizes: list[int] = []
        earned = lambda states, actions: [0.5] * len(states)  # noqa: E731
        train = lambda some: sizes.append(len(some))  # noqa: B023, E731
        with subtests.test(expected=expected), pytest.warns(GRPOWarning, match="has changed no weight of this policy"):
            fit_to_rewards(OneWeight(), requests, train, earned, held_out=None, num_folds=5, num_calls=2, seed=0)
        assert sizes[-1] == 3  # the last training is that with all requests
        assert sorted(sizes) == expected


def training(made: Any, reward_model: Any, learning_rate: float, num_iterations: int) -> Any:
    """A function that trains a policy on requests."""

    def train(states: Sequence[str]) -> None:
        config = GRPOConfig(learning_rate=learning_rate, seed=0)
        trainer = GRPOTrainer(config=config, policy=made, reward_model=reward_model)
        trainer.train(states, num_iterations=num_iterations, progress=False)

    return train


def test_a_policy_learns_from_rewards_and_keeps_what_it_learned() -> None:
    """Every request wants `ping`, so what some requests teach is right for the others."""
    torch.manual_seed(0)
    made = policy(random=False)
    right: Any = lambda states, calls: [float(one.tool == "ping") for one in calls]  # noqa: E731
    report = made.fit_to_rewards(TEXTS, training(made, right, 0.05, 30), right)
    assert report.held_out.gain > 0.5
    assert report.share > 0.5
    assert float(made.tool_probabilities(["what is new?"])[0, 0]) > 0.5


def test_requests_apart_choose_the_share_of_one_training() -> None:
    """0.4 and 0.8 teach 0.6. At m, those apart earn 1 - |0.6 m - 0.3| and 1 - |0.6 m - 0.45|. For 0.6 m from 0.3 to 0.45,
    one falls as fast as the other rises, so the product of both, each + 1/2, is largest where they are equal: at 0.6 m = 0.375.
    The nearest share is 0.6. The rewards were 0.7 and 0.55, and become 0.94 and 0.91."""
    seen: list[list[str]] = []
    made = OneWeight()

    def train(states: Sequence[str]) -> None:
        seen.append(list(states))
        with torch.no_grad():
            made.weight.fill_(0.6)

    options: Any = {"held_out": ["0.3", "0.45"], "num_folds": 5, "num_calls": 1, "seed": 0}
    report = fit_to_rewards(made, ["0.4", "0.8"], train, near, **options)
    assert (seen, report.share) == ([["0.4", "0.8"]], 0.6)
    assert float(made.weight.detach()) == pytest.approx(0.36)
    assert (report.held_out.before, report.held_out.after) == pytest.approx((0.625, 0.925))


def test_a_training_that_makes_other_requests_worse_is_told_and_undone(subtests: pytest.Subtests) -> None:
    """The right tool of an untrained policy is that of the description, and the training's rewards ask for another one."""
    right = {"write in capitals": "shout", "say that you are there": "ping", "convert a length": "convert"}

    def reward(tool_of: dict[str, str]) -> Any:
        return lambda states, calls: [float(one.tool == tool_of[text]) for text, one in zip(states, calls, strict=True)]

    for held_out, requests in ((None, [*right]), (["convert a length"], [*right][:2])):
        with subtests.test(held_out=held_out):
            made = policy(random=False)
            before = made.tool_probabilities(requests)
            train = training(made, reward(dict.fromkeys(right, "whisper")), 0.2, 8)
            with pytest.warns(GRPOWarning, match="stay as they were.*fully trained, held out: "):
                report = made.fit_to_rewards(requests, train, reward(right), held_out=held_out)
            assert report.share == 0
            assert report.fully_trained.gain < -0.3
            torch.testing.assert_close(made.tool_probabilities(requests), before)


def test_a_training_of_another_policy_is_told() -> None:
    made, other = policy(), policy()
    train = training(other, lambda states, calls: torch.arange(len(calls)), 0.02, 1)
    with pytest.warns(GRPOWarning, match="changed no weight of this policy. Let it train this policy and no copy"):
        made.fit_to_rewards(TEXTS, train, lambda states, calls: [0.5] * len(calls))


def test_a_failing_training_leaves_the_weights_as_they_were() -> None:
    made = policy()
    before = made.network.tool_query.weight.detach().clone()

    def train(states: Sequence[str]) -> None:
        with torch.no_grad():
            made.network.tool_query.weight += 1.0
        raise RuntimeError("no more calls")

    with pytest.raises(RuntimeError, match="no more calls"):
        made.fit_to_rewards(TEXTS, train, lambda states, calls: [0.5] * len(calls))
    torch.testing.assert_close(made.network.tool_query.weight.detach(), before)


def test_what_cannot_be_fitted_is_refused(subtests: pytest.Subtests) -> None:
    rewards: Any = lambda value: lambda states, calls: [value] * len(states)  # noqa: E731
    no_training: Any = lambda some: pytest.fail("it has trained")  # noqa: E731
    for requests, options, reward, message in (
        (["a", "a"], {}, 0.5, "needs at least two different requests to hold some out; got 1"),
        (TEXTS, {"num_folds": 1}, 0.5, "num_folds must be an integer >= 2"),
        (TEXTS, {"num_calls": 0}, 0.5, "num_calls must be an integer >= 1"),
        (TEXTS, {}, -1.0, "rewards must be from 0 to 1; got from -1 to -1. Scale them"),
        (TEXTS, {}, 2.0, "rewards must be from 0 to 1; got from 2 to 2. Scale them"),
        (TEXTS, {"held_out": []}, 0.5, "needs requests to train on, and requests in held_out; got 4 and 0"),
        ([], {"held_out": TEXTS}, 0.5, "needs requests to train on, and requests in held_out; got 0 and 4"),
        (TEXTS, {"held_out": ["new", TEXTS[2]]}, 0.5, "held_out must have no request of the training; got 'how many feet"),
        (TEXTS, {"train": 3}, 0.5, "train must be a function that trains the policy on requests; got int"),
    ):  # fmt: skip
        with subtests.test(message), pytest.raises(ConfigError, match=f"fit_to_rewards.*{message}"):
            policy().fit_to_rewards(requests, **{"train": no_training, "reward_model": rewards(reward)} | options)
