"""What the last line of a notebook's cell shows: tables and lines for people, where a `repr` would fill pages."""

from types import SimpleNamespace
from typing import Any

from IPython.lib.pretty import pretty

from grpo import GRPOConfig, GRPOTrainer
from grpo.checks import check_policy
from grpo.evaluation import compare_policies
from grpo.logs import evaluate_from_logs
from tests.support.policies import TablePolicy


def reward(states: Any, actions: Any) -> Any:
    return [float(action == 1) for action in actions]


def test_reports_are_shown_as_their_tables() -> None:
    states = ["a", "b"]
    logs = [SimpleNamespace(state=name, action=0, log_prob=-0.5, reward=1.0) for name in states * 30]
    policies = [TablePolicy(), TablePolicy()]
    for report in (
        check_policy(policies[0], states),
        compare_policies(*policies, states, reward, num_actions_per_state=1, progress=False),
        evaluate_from_logs(lambda states: [0] * len(states), logs),
    ):
        assert pretty(report) == str(report)
        assert "\n" in pretty(report)


def test_a_trainer_and_what_train_returns_are_shown_in_a_line() -> None:
    trainer = GRPOTrainer(config=GRPOConfig(seed=0), policy=TablePolicy(), reward_model=reward)
    history = trainer.train(["a"] * 4, num_iterations=2, progress=False)
    first, last = (metrics["rewards/mean"] for metrics in history)
    line = f"2 iterations, rewards/mean {first:.3g} -> {last:.3g}"
    assert pretty(history) == line
    assert repr(trainer).endswith(f" at iteration 2; the latest train: {line}")
    assert "TablePolicy" in pretty(trainer)
    assert history == list(history)
