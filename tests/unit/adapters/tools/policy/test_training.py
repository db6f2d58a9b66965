"""The supervised warm start: its loss by hand, its gradient, and what it learns."""

from typing import Any

import pytest
import torch

from adapters.tools.learning.tasks import ToolTask
from grpo.errors import ConfigError, ContractError
from tests.support.tool_policies import TEXTS, call, policy

TASKS = [
    ToolTask(text=TEXTS[0], tool="ping"),
    ToolTask(text=TEXTS[1], tool="shout", arguments={"tone": "soft"}),
    ToolTask(text=TEXTS[2], tool="convert", arguments={"unit": "foot", "exact": True, "value": 2.0}),
    ToolTask(text=TEXTS[3], tool="whisper", arguments={"tone": "loud"}),
]


def test_the_loss_is_the_mean_negative_log_likelihood_of_the_right_calls() -> None:
    made = policy()
    calls = [
        call("ping"),
        call("shout", tone="soft"),
        call("convert", unit="foot", exact=True),
        call("whisper", tone="loud"),
    ]
    expected = -made.get_log_probabilities(TEXTS, calls).mean()
    torch.testing.assert_close(made.loss(TASKS), expected)


def test_several_right_calls_count_with_the_sum_of_their_probabilities() -> None:
    made = policy()
    task = ToolTask(text=TEXTS[0], tool="ping", other_calls=(call("shout", tone="loud"), call("shout", tone="plain")))
    calls = [call("ping"), call("shout", tone="loud"), call("shout", tone="plain")]
    expected = -made.get_log_probabilities([TEXTS[0]] * 3, calls).exp().sum().log()
    torch.testing.assert_close(made.loss([task]), expected)
    mean = (expected + made.loss(TASKS[1:2])) / 2
    torch.testing.assert_close(made.loss([task, TASKS[1]]), mean)


def test_a_parameter_that_a_task_does_not_name_is_left_out() -> None:
    """`unit` is required and not named, so only the tool and the omission of `exact` are known."""
    made = policy()
    found = made.loss([ToolTask(text=TEXTS[2], tool="convert")])
    scores = made.score_actions([TEXTS[2]], [call("convert", unit="mile")]).log_probs[0]
    torch.testing.assert_close(found, -(scores[0] + scores[2]))


def test_a_value_that_is_not_enumerated_is_refused() -> None:
    """It must not count as a parameter that the task does not name."""
    with pytest.raises(
        ContractError, match=r"convert.unit must be one of \['mile', 'foot'\]; got convert\(unit='yard'\)"
    ):
        policy().fit([ToolTask(text=TEXTS[2], tool="convert", arguments={"unit": "yard"})])


def test_the_gradient_agrees_with_finite_differences() -> None:
    made = policy().double()
    tasks = [*TASKS, ToolTask(text="a", tool="ping", other_calls=(call("whisper", tone="soft"),))]
    made.loss(tasks).backward()
    for name, value in made.named_parameters():
        direction = torch.randn_like(value)
        slopes = []
        for sign in (1, -1):
            with torch.no_grad():
                value += sign * 1e-5 * direction
                slopes.append(float(made.loss(tasks)))
                value -= sign * 1e-5 * direction
        assert float((value.grad * direction).sum()) == pytest.approx((slopes[0] - slopes[1]) / 2e-5, rel=1e-5), name


def test_fit_learns_the_right_calls_and_returns_a_falling_loss() -> None:
    made = policy(random=False, fill=lambda state, tool: {})
    losses = made.fit([*TASKS, ToolTask(text="what a day", tool=None)], num_epochs=60, learning_rate=0.05)
    assert len(losses) == 60
    assert losses[-1] < 0.05 < 1.0 < losses[0]
    calls = made.predict(TEXTS)
    assert [(one.tool, dict(one.arguments)) for one in calls] == [
        ("ping", {}),
        ("shout", {"tone": "soft"}),
        ("convert", {"unit": "foot", "exact": True}),
        ("whisper", {"tone": "loud"}),
    ]


def test_the_epochs_losses_are_means_over_all_tasks_in_an_order_of_the_seed() -> None:
    def first_loss(**options: Any) -> float:
        torch.manual_seed(0)
        return policy().fit(TASKS, num_epochs=1, learning_rate=1e-9, **options)[0]

    whole = first_loss(batch_size=4)
    assert first_loss(batch_size=3) == pytest.approx(whole, rel=1e-5)

    def learned(seed: int) -> torch.Tensor:
        torch.manual_seed(0)
        made = policy()
        made.fit(TASKS, num_epochs=1, batch_size=1, seed=seed)
        return made.network.tool_query.weight.detach()

    assert torch.equal(learned(1), learned(1))
    assert not torch.equal(learned(1), learned(2))


def test_each_update_uses_the_gradient_of_its_own_batch() -> None:
    """A step of 1e-9 changes no gradient visibly. Without zero_grad, three epochs would leave three times the gradient."""
    made, once = policy(), policy()
    once.load_state_dict(made.state_dict())
    once.loss(TASKS).backward()
    made.fit(TASKS, num_epochs=3, learning_rate=1e-9)
    for name, value in once.named_parameters():
        torch.testing.assert_close(made.get_parameters()[name].grad, value.grad, msg=name)


def test_what_cannot_be_fitted_is_refused(subtests: pytest.Subtests) -> None:
    for tasks, options, error, message in (
        ([], {}, ConfigError, "needs tasks with a right tool"),
        ([ToolTask(text="a", tool=None)], {}, ConfigError, "needs tasks with a right tool"),
        (TASKS[0], {}, ConfigError, "fit: tasks must be a list of ToolTask objects; got ToolTask"),
        (["a"], {}, ConfigError, "fit: tasks must be a list of ToolTask objects; got 'a'"),
        (
            [ToolTask(text="a", tool="fly")],
            {},
            ContractError,
            "must be a ToolCall of one of the tools ping.*got fly\\(\\)",
        ),
        (TASKS, {"num_epochs": 0}, ConfigError, "num_epochs must be an integer >= 1"),
        (TASKS, {"batch_size": 0}, ConfigError, "batch_size must be an integer >= 1"),
        (TASKS, {"learning_rate": float("nan")}, ConfigError, "learning_rate must be a finite number"),
    ):
        with subtests.test(message), pytest.raises(error, match=message):
            policy().fit(tasks, **options)
