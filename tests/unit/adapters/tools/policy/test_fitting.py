"""Training from right calls and from rewards: the loss by hand, what is learned, and the share of it that is kept."""

import warnings
from collections.abc import Collection, Sequence
from typing import Any, cast

import pytest
import torch

from adapters.tools import Tool, ToolCatalogue, ToolTask
from adapters.tools.policy import fitting
from adapters.tools.policy.fitting import Descent, FitReport, fit, fit_to_rewards
from grpo import GRPOConfig, GRPOTrainer
from grpo.errors import ConfigError, ContractError, GRPOWarning
from tests.support.tool_policies import CATALOGUE, TEXTS, assert_gradients_agree, call, policy, pong

TASKS = [
    ToolTask(text=TEXTS[0], tool="ping"),
    ToolTask(text=TEXTS[1], tool="shout", arguments={"tone": "soft"}),
    ToolTask(text=TEXTS[2], tool="convert", arguments={"unit": "foot", "exact": True, "value": 2.0}),
    ToolTask(text=TEXTS[3], tool="whisper", arguments={"tone": "loud"}),
]


def test_the_loss_is_the_mean_negative_log_likelihood_of_the_right_calls() -> None:
    """With several right calls, their probabilities add up."""
    made = policy()
    calls = [one.right_calls[0] for one in TASKS]
    torch.testing.assert_close(made.loss(TASKS), -made.get_log_probabilities(TEXTS, calls).mean())
    right = [call("ping"), call("shout", tone="loud"), call("shout", tone="plain")]
    several = ToolTask(text=TEXTS[0], tool="ping", other_calls=right[1:])
    expected = -made.get_log_probabilities([TEXTS[0]] * 3, right).exp().sum().log()
    torch.testing.assert_close(made.loss([several]), expected)
    torch.testing.assert_close(made.loss([several, TASKS[1]]), (expected + made.loss(TASKS[1:2])) / 2)


def test_a_parameter_that_a_task_does_not_name_is_left_out() -> None:
    """`unit` is required and not named, so only the tool and the omission of `exact` are known."""
    made = policy()
    found = made.loss([ToolTask(text=TEXTS[2], tool="convert")])
    scores = made.score_actions([TEXTS[2]], [call("convert", unit="mile")]).log_probs[0]
    torch.testing.assert_close(found, -(scores[0] + scores[2]))


def test_the_gradient_agrees_with_finite_differences() -> None:
    made = policy().double()
    tasks = [*TASKS, ToolTask(text="a", tool="ping", other_calls=(call("whisper", tone="soft"),))]
    assert_gradients_agree(made, lambda: made.loss(tasks))


def test_fit_learns_the_right_calls_and_returns_a_falling_loss() -> None:
    made = policy(random=False, fill=lambda state, tool: {})
    no_tool = ToolTask(text="what a day", tool=None)
    losses = made.fit([*TASKS, no_tool], num_epochs=60, learning_rate=0.05, num_folds=1).losses
    assert len(losses) == 60
    assert losses[-1] < 0.05 < 1.0 < losses[0]
    assert made.predict(TEXTS) == [
        call("ping"), call("shout", tone="soft"), call("convert", unit="foot", exact=True), call("whisper", tone="loud"),
    ]  # fmt: skip


def test_the_epochs_losses_are_means_over_all_tasks_in_an_order_of_the_seed() -> None:
    def first_loss(**options: Any) -> float:
        torch.manual_seed(0)
        return policy().fit(TASKS, num_epochs=1, learning_rate=1e-9, num_folds=1, **options).losses[0]

    whole = first_loss(batch_size=4)
    assert first_loss(batch_size=3) == pytest.approx(whole, rel=1e-5)

    def learned(seed: int) -> torch.Tensor:
        torch.manual_seed(0)
        made = policy()
        made.fit(TASKS, num_epochs=1, batch_size=1, seed=seed, num_folds=1)
        return made.network.tool_query.weight.detach()

    assert torch.equal(learned(1), learned(1))
    assert not torch.equal(learned(1), learned(2))


def test_training_chooses_among_the_tools_that_tasks_ask_for() -> None:
    """The other tools leave no trace in the weights, and a warning names them. `whisper` is a right call of the first task."""
    quiet = ToolTask(text="be quiet", tool="whisper", arguments={"tone": "soft"})
    tasks = [ToolTask(text=TEXTS[0], tool="ping", other_calls=(call("whisper", tone="soft"),)), TASKS[1], quiet]
    torch.manual_seed(0)
    made, smaller = policy(), policy(CATALOGUE.without("convert"))
    smaller.load_state_dict(made.state_dict())
    with pytest.warns(GRPOWarning, match=r"fit: no request asks for 1 of the tools, such as convert\."):
        made.fit(tasks, num_epochs=3, num_folds=1)
    smaller.fit(tasks, num_epochs=3, num_folds=1)
    assert made.loss(tasks) > smaller.loss(tasks)  # all tools count again
    torch.testing.assert_close(made.loss(tasks, among=list(smaller.catalogue)), smaller.loss(tasks))
    for name, value in smaller.get_parameters().items():
        torch.testing.assert_close(made.get_parameters()[name], value, msg=name)


def test_tools_that_nothing_tells_apart_are_named() -> None:
    """The hashing encoder reads all numbers as the same word."""
    catalogue = ToolCatalogue(Tool.from_function(pong, name=name) for name in ("pong_v1", "other", "pong_v2"))
    tasks = [ToolTask(text=name, tool=name) for name in catalogue]
    with pytest.warns(GRPOWarning, match="fit: pong_v1 and pong_v2 have equal vectors"):
        policy(catalogue).fit(tasks, num_epochs=1, num_folds=1)


def test_training_makes_the_steps_of_adam_on_the_loss_and_changes_nothing_else() -> None:
    made, by_hand = policy(), policy()
    by_hand.load_state_dict(made.state_dict())
    optimizer = torch.optim.Adam(by_hand.parameters(), lr=0.02)
    asked_for = {str(task.tool) for task in TASKS}
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = by_hand.loss(TASKS, among=asked_for)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    before = torch.get_rng_state()
    report = made.eval().fit(TASKS, num_epochs=3, learning_rate=0.02, num_folds=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert not made.training
    assert report.losses == pytest.approx(losses, rel=1e-5)
    for name, value in by_hand.named_parameters():
        torch.testing.assert_close(made.get_parameters()[name], value, msg=name)


def test_what_cannot_be_fitted_is_refused(subtests: pytest.Subtests) -> None:
    for tasks, options, error, message in (
        ([], {}, ConfigError, "needs tasks with a right tool"),
        ([ToolTask(text="a", tool=None)], {}, ConfigError, "needs tasks with a right tool"),
        (TASKS[0], {}, ConfigError, "fit: tasks must be a list of ToolTask objects; got ToolTask"),
        (["a"], {}, ConfigError, "fit: tasks must be a list of ToolTask objects; got 'a'"),
        ([ToolTask(text="a", tool="fly")], {}, ContractError, "must be a ToolCall of one of the tools ping.*got fly\\(\\)"),
        # it must not count as a parameter that the task does not name
        ([ToolTask(text="a", tool="convert", arguments={"unit": "yard"})], {}, ContractError,
         r"convert.unit must be one of \['mile', 'foot'\]; got convert\(unit='yard'\)"),
        (TASKS, {"num_epochs": 0}, ConfigError, "num_epochs must be an integer >= 1"),
        (TASKS, {"num_folds": 0}, ConfigError, "num_folds must be an integer >= 1"),
        (TASKS[:1], {}, ConfigError, "needs at least two different requests to hold some out; got 1"),
        (TASKS, {"batch_size": 0}, ConfigError, "batch_size must be an integer >= 1"),
        (TASKS, {"learning_rate": float("nan")}, ConfigError, "learning_rate must be a finite number"),
        (TASKS, {"learning_rate": -0.02}, ConfigError, "learning_rate must be above 0; got -0.02"),
    ):  # fmt: skip
        with subtests.test(message), pytest.raises(error, match=message):
            policy().fit(tasks, **options)


class OneWeight(torch.nn.Module):
    """A weight w that starts at 0. The text of a task is its target y, with loss (w - y)^2. The most likely tool is `ping`
    below w = 1/2, and `shout` from there on. The only action is w."""

    catalogue = CATALOGUE

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def right_log_probs(self, tasks: Sequence[ToolTask], *, among: Collection[str] | None = None) -> torch.Tensor:
        return -(self.weight - torch.tensor([float(task.text) for task in tasks])).square()

    def tool_probabilities(self, states: Sequence[ToolTask]) -> torch.Tensor:
        return torch.eye(4)[[int(self.weight >= 0.5)] * len(states)]

    def generate_actions(self, states: Sequence[str], num_actions_per_state: int) -> list[list[float]]:
        return [[float(self.weight)] * num_actions_per_state for _ in states]

    def get_log_probabilities(self, states: Sequence[str], actions: Sequence[float]) -> torch.Tensor:
        return torch.zeros(len(states)) * self.weight

    def get_parameters(self) -> dict[str, torch.nn.Parameter]:
        return {"weight": self.weight}

    @torch.no_grad()
    def learn(self, targets: Sequence[float]) -> None:
        """Set the weight to the mean of the targets, which has the lowest loss."""
        self.weight.fill_(sum(targets) / len(targets))


class Exact:
    """Training to the lowest loss, in place of `Descent`."""

    seed = 0

    @torch.no_grad()
    def __call__(self, made: OneWeight, tasks: Sequence[ToolTask], among: Collection[str]) -> tuple[float, float]:
        before = -float(made.right_log_probs(tasks).mean())
        made.learn([float(task.text) for task in tasks])
        return before, -float(made.right_log_probs(tasks).mean())


def fitted(*targets: float, tool: str = "shout", num_folds: int = 5) -> tuple[float, FitReport]:
    made, descent = OneWeight(), cast("Descent", Exact())
    tasks = [ToolTask(text=str(target), tool=tool) for target in targets]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*no request asks for 3 of the tools")
        report = fit(made, tasks, descent, num_folds)
    return float(made.weight.detach()), report


def test_the_share_that_is_kept_has_the_lowest_loss_on_held_out_tasks() -> None:
    """Without the target 2, training finds 1, and without 1 it finds 2. The held-out losses (m - 2)^2 + (2m - 1)^2 are lowest
    at m = 8/10. Trained with both targets, the weight is 1.5, and 0.8 of the way is 1.2. The weights of both folds, 0.8 and
    1.6, choose the right tool, and 0 does not."""
    weight, report = fitted(2, 1)
    assert report.share == 0.8
    assert weight == pytest.approx(1.2, abs=1e-3)
    assert report.losses[-1] == pytest.approx(0.25, abs=1e-3)
    assert (report.held_out.before, report.held_out.after) == (0.0, 1.0)
    assert str(report).splitlines()[0] == "share 0.8 of the way to the trained weights"


def test_all_is_kept_if_it_gives_clearly_more_right_tools() -> None:
    """Ten targets near 0.6 and 3, each held out alone. Without one of 0.6, training finds (18 - 0.6)/9 = 1.933, and without
    one of 3, 1.667. The held-out losses are lowest at m = (0.6 1.933 + 3 1.667) / (1.933^2 + 1.667^2) = 0.945, so 0.9 is the
    best share. But all ten trained weights choose `shout`, and the start chooses `ping`."""
    targets = [value + 1e-6 * i for i in range(5) for value in (0.6, 3.0)]
    assert fitted(*targets, num_folds=10)[1].share == 1.0
    with pytest.warns(GRPOWarning, match="fewer held-out requests"):
        assert fitted(*targets, tool="ping", num_folds=10)[1].share == 0.9


def test_a_policy_stays_as_it_was_if_other_tasks_teach_nothing() -> None:
    """Each target teaches the opposite of the other: (m + 1)^2 is lowest at m = 0. Equal requests are held out together: if
    the twin of a request stayed in the training, m would not be 0."""
    with pytest.warns(GRPOWarning, match="fit: the weights stay as they were.*; fully trained, held out: 0.000 before"):
        weight, report = fitted(1, -1)
    assert (weight, report.share) == (0.0, 0.0)
    assert report.held_out.gain == 0.0
    with pytest.warns(GRPOWarning, match="the weights stay as they were"):
        assert fitted(1, 1, -1, -1)[1].share == 0.0


def test_an_accuracy_that_falls_is_told_although_the_loss_falls() -> None:
    """The loss wants w = 1, and the tool is right below 1/2."""
    with pytest.warns(GRPOWarning, match="fewer held-out requests.*1.000 before, 0.000 after"):
        weight, report = fitted(1, 1.0001, tool="ping")
    assert report.share == 1.0
    assert weight == pytest.approx(1, abs=1e-3)


def test_one_fold_keeps_everything_and_estimates_nothing() -> None:
    weight, report = fitted(1, -0.5, num_folds=1)
    assert weight == pytest.approx(0.25, abs=1e-3)
    assert (report.share, report.held_out, report.fully_trained) == (1.0, None, None)
    assert str(report) == "loss 0.625 to 0.562; no request was held out"


def test_held_out_tasks_that_do_not_fit_into_one_pass_count_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = [0.5, 0.25, 0.6, 0.05, 0.4, -0.1, 0.2]  # never enough for the other tool
    whole = fitted(*targets, num_folds=2)
    monkeypatch.setattr(fitting, "AT_ONCE", 2)  # folds of 4 and 3
    weight, report = fitted(*targets, num_folds=2)
    assert (weight, report) == whole
    assert 0 < report.share < 1


# --- from rewards
def near(states: Sequence[str], actions: Sequence[float]) -> list[float]:
    """A request's text is its target y: the reward is 1 - |w - y|, and at least 0."""
    return [max(0.0, 1 - abs(action - float(state))) for state, action in zip(states, actions, strict=True)]


def rewarded(
    *targets: str, num_calls: int = 1, seen: list[Any] | None = None, **options: Any
) -> tuple[float, FitReport]:
    """Training sets the weight to the mean of the targets. `seen` lists the requests of each training."""
    made, seen = OneWeight(), [] if seen is None else seen

    def train(states: Sequence[str]) -> None:
        seen.append(list(states))
        made.learn([*map(float, states)])

    options = {"held_out": None, "num_folds": 5, "seed": 0, "reward_model": near} | options
    report = fit_to_rewards(made, targets, train, num_calls=num_calls, **options)
    return float(made.weight.detach()), report


def test_the_share_that_is_kept_has_the_largest_mean_log_reward_on_held_out_requests() -> None:
    """Without 0.8, training finds 0.4, and without 0.4 it finds 0.8. The rewards at m are 1 - |0.4 m - 0.8| and
    1 - |0.8 m - 0.4|. One call counts (reward + 1/2) / 2. The logs of 0.7 + 0.4 m and of 1.5 - |0.8 m - 0.4| have the largest
    sum at m = 0.5: the slope is 0.4/0.9 + 0.8/1.5 before, and 0.4/0.9 - 0.8/1.5 < 0 after. Trained with both, the weight is
    0.6, and half of the way is 0.3. The rewards were 0.2 and 0.6, and become 0.4 and 1."""
    weight, report = rewarded("0.4", "0.8")
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
    assert rewarded("0.5", "1")[1].share == 0.5
    assert rewarded("0.5", "1", num_calls=1000)[1].share in (0.7, 0.8)
    assert rewarded("0.5", "1.6")[1].share == 0.3


def test_a_policy_stays_as_it_was_if_requests_teach_nothing_for_others(subtests: pytest.Subtests) -> None:
    """Each target teaches the opposite of the other."""
    message = "fit_to_rewards: the weights stay as they were.*fully trained, held out: 0.500"
    for targets, held_out in ((("0.5", "-0.5"), None), (("0.5",), ["-0.5"])):
        with subtests.test(held_out=held_out):
            with pytest.warns(GRPOWarning, match=message):
                weight, report = rewarded(*targets, held_out=held_out)
            assert (weight, report.share) == (0.0, 0.0)
            assert report.fully_trained.gain == pytest.approx(-0.5)


def test_requests_apart_choose_the_share_of_one_training() -> None:
    """0.4 and 0.8 teach 0.6. At m, those apart earn 1 - |0.6 m - 0.3| and 1 - |0.6 m - 0.45|. For 0.6 m from 0.3 to 0.45,
    one falls as fast as the other rises, so the product of both, each + 1/2, is largest where they are equal: at 0.6 m = 0.375.
    The nearest share is 0.6. The rewards were 0.7 and 0.55, and become 0.94 and 0.91."""
    seen: list[list[str]] = []
    weight, report = rewarded("0.4", "0.8", held_out=["0.3", "0.45"], seen=seen)
    assert (seen, report.share) == ([["0.4", "0.8"]], 0.6)
    assert weight == pytest.approx(0.36)
    assert (report.held_out.before, report.held_out.after) == pytest.approx((0.625, 0.925))


def test_a_mean_reward_that_falls_is_told_although_fewer_requests_earn_nothing() -> None:
    """w = 0 earns 1 for a request and nothing for the other, and training finds w = 1, which earns 0.45 for each."""

    def reward(states: Sequence[str], actions: Sequence[float]) -> list[float]:
        return [(0.45 if action > 0.95 else float(state == "1")) for state, action in zip(states, actions, strict=True)]

    with pytest.warns(GRPOWarning, match="mean reward of held-out requests falls.*0.500 before, 0.450 after"):
        assert rewarded("1", "1.0", reward_model=reward, num_calls=8)[1].share == 1.0


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


def test_a_policy_learns_from_rewards_and_keeps_what_it_learned() -> None:
    """Every request wants `ping`, so what some requests teach is right for the others."""
    torch.manual_seed(0)
    made = policy(random=False)
    right: Any = lambda states, calls: [float(one.tool == "ping") for one in calls]  # noqa: E731

    def train(states: Sequence[str]) -> None:
        trainer = GRPOTrainer(config=GRPOConfig(learning_rate=0.05, seed=0), policy=made, reward_model=right)
        trainer.train(states, num_iterations=30, progress=False)

    report = made.fit_to_rewards(TEXTS, train, right)
    assert report.held_out.gain > 0.5
    assert report.share > 0.5
    assert float(made.tool_probabilities(["what is new?"])[0, 0]) > 0.5


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


def test_what_cannot_be_fitted_to_rewards_is_refused(subtests: pytest.Subtests) -> None:
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
