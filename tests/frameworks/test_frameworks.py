"""Agent frameworks as they are, against `ChatEndpoint`; `make test-frameworks` builds the environment that these tests need.

Each program in `programs.py` asks about a topic, calls a tool and says what it found. The language model is a script: it calls
the tool, and then it either gives the right answer or none.
"""

import inspect
import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from adapters.agents import AgentPolicy, ChatEndpoint
from tests.support.agents import Scripted, says_call
from tests.unit.adapters.agents.test_conversations import sampled_runs

pytest.importorskip("verifiers", reason="the frameworks need a separate environment: make test-frameworks")

from tests.frameworks import programs

pytestmark = [pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]  # of the frameworks

TOPICS = ["rain", "snow", "hail", "fog"]
NOTHING = "I do not know."


is_right: defaultdict[str, Iterator[bool]] = defaultdict(lambda: itertools.cycle([True, False]))
"""Whether the next answer about a topic is right."""


def topic_of(text: str) -> str:
    return re.findall(r"What about (\w+)\?", text)[-1]


def answers(text: str) -> str:
    """Every second answer about a topic is right."""
    topic = topic_of(text)
    return f"{topic} is fine" if next(is_right[topic]) else NOTHING


def speaks(text: str) -> str:
    """A call of the tool, and an answer when its result is there."""
    topic = topic_of(text)
    has_result = f"{topic} is fine" in text
    return answers(text) if has_result else says_call(arguments=json.dumps({"topic": topic}))


def speaks_smolagents(text: str) -> str:
    """The answer is a call, too."""
    said = speaks(text)
    return said if said.startswith("<tool_call>") else says_call("final_answer", json.dumps({"answer": said}))


def speaks_dspy(text: str) -> str:
    """Calls are text, with a form of their own: two steps of ReAct, and then the answer."""

    def form(**fields: str) -> str:
        return "\n\n".join(f"[[ ## {name} ## ]]\n{value}" for name, value in {**fields, "completed": ""}.items())

    if "1. `reasoning` (str)" in text:
        return form(reasoning="I looked.", answer=answers(text))
    topic = topic_of(text)
    tool, arguments = ("finish", {}) if f"{topic} is fine" in text else ("lookup", {"topic": topic})
    return form(next_thought="Hm.", next_tool_name=tool, next_tool_args=json.dumps(arguments))


@dataclass(frozen=True, kw_only=True)
class Case:
    """A program, how its model speaks, and what the endpoint sees of it."""

    program: Callable[[str, str], Any]
    speaks: Callable[[str], str] = speaks
    num_turns: int = 2
    num_contexts: int = 1
    ignored: set[str] = field(default_factory=set)


CASES = {
    "LangChain": Case(program=programs.with_langchain),
    "LangGraph": Case(program=programs.with_langgraph),
    "LiteLLM": Case(program=programs.with_litellm),
    "smolagents": Case(  # it sends calls and results back as texts
        program=programs.with_smolagents, speaks=speaks_smolagents, num_contexts=2, ignored={"tool_choice"}
    ),
    "OpenAI Agents SDK": Case(program=programs.with_openai_agents),
    "Pydantic AI": Case(program=programs.with_pydantic_ai),
    "LlamaIndex": Case(program=programs.with_llama_index, ignored={"temperature"}),
    "Haystack": Case(program=programs.with_haystack),
    "Agno": Case(program=programs.with_agno, num_contexts=2),  # it gives calls ids of its own
    "Google ADK": Case(program=programs.with_google_adk),
    "DSPy": Case(program=programs.with_dspy, speaks=speaks_dspy, num_turns=3, num_contexts=3),  # it sends no history
    "Strands": Case(program=programs.with_strands),
    "Agent Framework": Case(program=programs.with_agent_framework),
}


@pytest.mark.parametrize("name", CASES)
def test_rewards_are_at_their_rows_and_every_sampled_token_is_recorded(name: str) -> None:
    """16 conversations at the same time. The reward is the number of the topic, and 0.5 more for the right answer."""
    case = CASES[name]

    def rewarded(topic: str, answer: str) -> float:
        assert answer in (f"{topic} is fine", NOTHING)
        return TOPICS.index(topic) + 0.5 * (answer != NOTHING)

    def play(base_url: str, topic: str) -> float:
        return rewarded(topic, case.program(base_url, topic))

    async def play_async(base_url: str, topic: str) -> float:
        return rewarded(topic, await case.program(base_url, topic))

    is_right.clear()
    script = Scripted(case.speaks, max_new_tokens=400, positions=32_768)
    with ChatEndpoint(script.policy, ignore=case.ignored) as endpoint:
        program = endpoint.runs(play_async if inspect.iscoroutinefunction(case.program) else play)
        # the first conversation imports the framework, which takes a minute on a busy machine
        groups = AgentPolicy(script.policy, program, timeout=600).generate_actions(TOPICS, 4)

    decode = script.policy.tokenizer.decode
    for number, (topic, rows) in enumerate(zip(TOPICS, groups, strict=True)):
        assert sorted(row.reward for row in rows) == [number, number, number + 0.5, number + 0.5]
        for row in rows:
            assert (row.ended_by, set(row.info.get("ignored", ()))) == ("environment", case.ignored), row.info
            assert (len(row.turns), len(row.segments)) == (case.num_turns, case.num_contexts)
            assert {topic_of(decode(segment.token_ids)) for segment in row.segments} == {topic}
            last = decode(sampled_runs(row.segments[-1])[-1])
            assert (row.reward > number) == (f"{topic} is fine" in last)
    segments = [segment for rows in groups for row in rows for segment in row.segments]
    recorded = Counter(tuple(run) for segment in segments for run in sampled_runs(segment))
    assert recorded == Counter(map(tuple, script.said))
