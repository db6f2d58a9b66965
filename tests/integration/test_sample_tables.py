"""One iteration of every adapter gives a table of samples that people can read."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from adapters.agents import AgentPolicy, Conversation, EnvironmentReward
from adapters.control import EpisodeStart
from grpo import GRPOConfig, GRPOTrainer, Samples
from tests.support.adapter_runs import RUNS, trainer_of
from tests.support.agents import Scripted, Tools, says_call


class Tables:
    """A sink that keeps the tables."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def log(self, metrics: Any, iteration: int) -> None: ...

    def close(self) -> None: ...

    def log_samples(self, samples: Samples, iteration: int) -> None:
        self.rows += samples.table()


def agent(seed: int) -> Any:
    says = [says_call(), "It is fine.", "No."] * 2
    policy = AgentPolicy(Scripted(says, max_new_tokens=100).policy, Tools, max_turns=3)
    return trainer_of(policy, EnvironmentReward(), seed, group_size=2), [{"question": "How is the weather?"}], {}


class TensorPolicy(torch.nn.Module):
    """States and actions are rows of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.nn.Parameter(torch.zeros(2))

    def generate_actions(self, states: Any, num_actions_per_state: int) -> torch.Tensor:
        return (self.mean.detach() + torch.randn(len(states), num_actions_per_state, 2)).round()

    def get_log_probabilities(self, states: Any, actions: torch.Tensor) -> torch.Tensor:
        return -(actions - self.mean).square().sum(-1)

    def get_parameters(self) -> dict[str, torch.Tensor]:
        return dict(self.named_parameters())


def tensors(seed: int) -> Any:
    def sums(states: torch.Tensor, actions: torch.Tensor) -> torch.Tensor:
        return actions.sum(-1)

    config = GRPOConfig(group_size=3, seed=seed)
    return GRPOTrainer(config=config, policy=TensorPolicy(), reward_model=sums), torch.tensor([[0.5, 1.0]]), {}


ADAPTERS: dict[str, tuple[Callable[[int], Any], str, str]] = {
    "bandit": (RUNS["bandit"], r"\d", r"\d"),
    "control": (RUNS["control"], r"seed \d+", r"12 steps, return 12, truncated; actions [01](, [01]){4}, \.\.\."),
    "critic": (
        RUNS["critic"],
        r"seed \d+",
        r"6 steps, return -\d+\.\d+, truncated; actions \[-?\d\.\d+\](, \[-?\d\.?\d*\]){4}, \.\.\.",
    ),
    "tools": (
        RUNS["tools"],
        r"[a-z ,?]+",
        r"(ping|shout|convert|whisper)\(((tone|unit|exact)=('\w+'|True|False)(, )?)*\)",
    ),
    "llm": (RUNS["llm"], r"1\+1=|12\+30=\?", r"[^<>]{0,5}"),
    "agent": (agent, r"\{'question': 'How is the weather\?'\}", r"assistant: (.|\n)+\nuser: bye\n\(environment\)"),
    "tensors": (tensors, r"\[0\.5, 1\.0\]", r"\[-?\d\.0, -?\d\.0\]"),
}
"""Per adapter: a run, and what a state and an action look like."""


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_table_shows_states_and_actions_as_short_texts(name: str) -> None:
    run, state, action = ADAPTERS[name]
    trainer, states, options = run(0)
    tables = Tables()
    trainer.train(states, num_iterations=1, sinks=[tables], progress=False, **options)
    assert 2 <= len(tables.rows) <= 4
    for row in tables.rows:
        assert re.fullmatch(state, row["state"]), row["state"]
        assert re.fullmatch(action, row["action"]), row["action"]
        assert isinstance(row["reward"], float)
        assert row["steps"] >= 1


def test_a_conversation_is_shown_from_the_first_message_of_the_policy_with_its_calls() -> None:
    messages: list[Any] = [
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
    row = Conversation(segments=(), turns=(), messages=tuple(messages), ended_by="max_turns", info={})
    assert str(row) == "assistant: Hm. add(a=1, b='x')\ntool: 2\nassistant: end([1])\n(max_turns)"
    assert str(Conversation(segments=(), turns=(), messages=(), ended_by="error", info={})) == "(error)"


def test_an_episodes_start_is_shown_with_its_options() -> None:
    assert str(EpisodeStart()) == "any seed"
    assert str(EpisodeStart(seed=3, options={"goal": 1})) == "seed 3, options {'goal': 1}"
