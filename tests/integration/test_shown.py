"""What people read in place of a `repr` that would fill pages: states and actions in tables of samples, reports, runs."""

from types import SimpleNamespace
from typing import Any

import pytest
from IPython.lib.pretty import pretty

from adapters.agents import Conversation
from adapters.control import EpisodeStart
from adapters.llm.completions import Completion
from adapters.tools import ToolCall
from grpo import GRPOConfig, GRPOTrainer
from grpo.checks import check_policy
from grpo.evaluation import compare_policies
from grpo.logs import evaluate_from_logs
from grpo.sinks import as_text
from tests.support.policies import TablePolicy

MESSAGES: list[Any] = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hello"},
    {
        "role": "assistant",
        "content": "Hm.",
        "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1, "b": "x"}}}],
    },
    {"role": "tool", "content": "2"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "end", "arguments": [1]}}]},
]
FOUR_LINES = "assistant: Hm. add(a=1, b='x')\ntool: 2\nassistant: end([1])\n(max_turns)"


def conversation(messages: list[Any], ended_by: Any) -> Conversation:
    return Conversation(segments=(), turns=(), messages=tuple(messages), ended_by=ended_by, info={})


@pytest.mark.parametrize(("value", "text"), [
    (EpisodeStart(), "any seed"),
    (EpisodeStart(seed=3, options={"goal": 1}), "seed 3, options {'goal': 1}"),
    (ToolCall(tool="convert", arguments={"unit": "km", "exact": True}), "convert(unit='km', exact=True)"),
    (Completion(token_ids=(5,), text="1 + 1", finish_reason="end", behaviour_log_probs=(-0.5,)), "1 + 1"),
    (conversation(MESSAGES, "max_turns"), FOUR_LINES),  # from the first message of the policy on, with its calls
    (conversation([], "error"), "(error)"),
])  # fmt: skip
def test_a_state_or_an_action_of_an_adapter_is_a_short_text(value: Any, text: str) -> None:
    assert as_text(value) == text


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
