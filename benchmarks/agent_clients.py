"""Open files and memory of a run whose agent programs use a framework, each conversation with a client of its own.

No program closes its client, as in most code that is copied from a framework's pages. The model's turns are given, because only
the connections are measured. Frameworks that are not installed are left out.

    python -m benchmarks.agent_clients
"""

import argparse
import asyncio
import ctypes
import gc
import importlib
import importlib.util
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from adapters.agents import AgentPolicy, ChatEndpoint
from adapters.llm import HFPolicy, SampledTokens, SamplingConfig
from benchmarks.agent_vs_trl import make_tokenizer
from benchmarks.llm_vs_trl import TINY, make_model

ASKED: Any = [{"role": "user", "content": "w1"}]
TURNS = 2
PARALLEL = 4
"""Requests at the same time, of the programs that are called parallel."""


class Says(HFPolicy):
    """Answers with one word."""

    def sample_tokens(self, prompts: Sequence[Sequence[int]], **_: Any) -> SampledTokens:
        """The same turn for each conversation."""
        turn = [self.tokenizer.convert_tokens_to_ids("w2 "), self.tokenizer.eos_token_id]
        count = len(prompts)
        return SampledTokens(
            token_ids=[turn] * count, finish_reasons=["end"] * count, behaviour_log_probs=[[0.0, 0.0]] * count
        )


def with_httpx(base_url: str) -> float:
    """An HTTP client."""
    import httpx

    client = httpx.Client(trust_env=False)
    for _ in range(TURNS):
        client.post(f"{base_url}/chat/completions", json={"model": "policy", "messages": ASKED}).raise_for_status()
    return 1.0


def with_openai(base_url: str) -> float:
    """OpenAI's client."""
    from openai import OpenAI

    client = OpenAI(base_url=base_url, api_key="none")
    for _ in range(TURNS):
        client.chat.completions.create(model="policy", messages=ASKED)
    return 1.0


async def with_async_openai(base_url: str) -> float:
    """OpenAI's client for programs that are `async def`."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=base_url, api_key="none")
    for _ in range(TURNS):
        await client.chat.completions.create(model="policy", messages=ASKED)
    return 1.0


async def with_pydantic_ai(base_url: str) -> float:
    """An agent of Pydantic AI."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    agent = Agent(OpenAIChatModel("policy", provider=OpenAIProvider(base_url=base_url, api_key="none")))
    for _ in range(TURNS):
        await agent.run("w1")
    return 1.0


def with_litellm(base_url: str) -> float:
    """LiteLLM, which keeps a client for each URL."""
    from litellm import completion

    for _ in range(TURNS):
        completion(model="openai/policy", api_base=base_url, api_key="none", messages=ASKED)
    return 1.0


async def with_async_litellm(base_url: str) -> float:
    """LiteLLM in programs that are `async def`."""
    from litellm import acompletion

    for _ in range(TURNS):
        await acompletion(model="openai/policy", api_base=base_url, api_key="none", messages=ASKED)
    return 1.0


def with_langchain(base_url: str) -> float:
    """A chat model of LangChain."""
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="policy", base_url=base_url, api_key="none")  # type: ignore[arg-type]
    for _ in range(TURNS):
        model.invoke("w1")
    return 1.0


def with_smolagents(base_url: str) -> float:
    """A model of smolagents."""
    from smolagents import ChatMessage, MessageRole, OpenAIServerModel

    model = OpenAIServerModel("policy", api_base=base_url, api_key="none")
    for _ in range(TURNS):
        model.generate([ChatMessage(role=MessageRole.USER, content="w1")])
    return 1.0


async def with_agents_sdk(base_url: str) -> float:
    """An agent of OpenAI's Agents SDK."""
    from agents import Agent, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    model = OpenAIChatCompletionsModel("policy", openai_client=AsyncOpenAI(base_url=base_url, api_key="none"))
    for _ in range(TURNS):
        await Runner.run(Agent(name="agent", model=model), "w1")
    return 1.0


async def with_parallel_openai(base_url: str) -> float:
    """Sub-agents that ask at the same time, with OpenAI's async client."""
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=base_url, api_key="none")
    for _ in range(TURNS):
        await asyncio.gather(*(client.chat.completions.create(model="policy", messages=ASKED) for _ in range(PARALLEL)))
    return 1.0


async def with_parallel_pydantic_ai(base_url: str) -> float:
    """Runs of an agent of Pydantic AI at the same time."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    agent = Agent(OpenAIChatModel("policy", provider=OpenAIProvider(base_url=base_url, api_key="none")))
    for _ in range(TURNS):
        await asyncio.gather(*(agent.run("w1") for _ in range(PARALLEL)))
    return 1.0


async def with_parallel_agents_sdk(base_url: str) -> float:
    """Agents of OpenAI's Agents SDK that work at the same time."""
    from agents import Agent, OpenAIChatCompletionsModel, Runner, set_tracing_disabled
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    model = OpenAIChatCompletionsModel("policy", openai_client=AsyncOpenAI(base_url=base_url, api_key="none"))
    for _ in range(TURNS):
        await asyncio.gather(*(Runner.run(Agent(name="agent", model=model), "w1") for _ in range(PARALLEL)))
    return 1.0


PROGRAMS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "httpx": ("httpx", with_httpx),
    "openai": ("openai", with_openai),
    "openai, async": ("openai", with_async_openai),
    "pydantic-ai": ("pydantic_ai", with_pydantic_ai),
    "litellm": ("litellm", with_litellm),
    "litellm, async": ("litellm", with_async_litellm),
    "langchain": ("langchain_openai", with_langchain),
    "smolagents": ("smolagents", with_smolagents),
    "openai-agents": ("agents", with_agents_sdk),
    "openai, parallel": ("openai", with_parallel_openai),
    "pydantic-ai, parallel": ("pydantic_ai", with_parallel_pydantic_ai),
    "openai-agents, parallel": ("agents", with_parallel_agents_sdk),
}


def open_files() -> int:
    """Number of files and sockets that this process has open. The folder that lists them is one of them."""
    return len(list(Path("/proc/self/fd").iterdir())) - 1


def resident_memory() -> float:
    """MB that this process holds, after memory that is free inside the process was returned."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


class Mallinfo(ctypes.Structure):
    """What glibc's `mallinfo2` returns."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in [
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        ]
    ]


def memory_in_use() -> float:
    """MB that are allocated, at most: Python's small blocks count 512 bytes each.

    The resident memory also has what is free between allocated blocks, which grows for a while without a leak.
    """
    mallinfo2 = ctypes.CDLL("libc.so.6").mallinfo2
    mallinfo2.restype = Mallinfo
    found = mallinfo2()
    return (found.uordblks + found.hblkhd + 512 * sys.getallocatedblocks()) / 1e6


def measure(program: Callable[[str], Any], conversations: int) -> None:
    """Hold conversations, in 20 rounds, and print the most open files after a round, and the MB that ten rounds need more:
    resident, and in use.

    All rounds are equal, so the number of conversations is rounded up to a multiple of 20.
    Memory goes up and down by 10 MB between rounds, so the lowest of rounds 16 to 20 is compared with the lowest of 6 to 10.
    """
    tokenizer = make_tokenizer(500)
    model = make_model(TINY["tiny"], "cpu", vocab_size=500, hidden_size=32, intermediate_size=64, num_hidden_layers=1)
    policy = Says(model, tokenizer, sampling=SamplingConfig(max_new_tokens=8))
    files, memory, in_use = list[int](), list[float](), list[float]()
    with ChatEndpoint(policy) as endpoint:
        agent = AgentPolicy(policy, endpoint.runs(lambda base_url, _: program(base_url)), concurrency=8, timeout=600)
        for _ in range(20):
            (held,) = agent.generate_actions(["w1"], math.ceil(conversations / 20))
            assert [row.reward for row in held] == [1.0] * len(held), held[0].info
            files.append(open_files())
            memory.append(resident_memory())
            in_use.append(memory_in_use())
    grown = [min(each[15:]) - min(each[5:10]) for each in (memory, in_use)]
    print(f"{max(files):>10} {grown[0]:>+21.1f} {grown[1]:>+9.1f}")


def main() -> None:
    """Read the command line, and measure each framework in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--conversations", type=int, default=1000)
    parser.add_argument("--only", choices=PROGRAMS, help="measure one framework in this process")
    options = parser.parse_args()
    if options.only:
        package, program = PROGRAMS[options.only]
        importlib.import_module(package)  # an import takes long, and would hold up all conversations
        measure(program, options.conversations)
        return
    print(f"{options.conversations} conversations with {TURNS} turns")
    print(f"{'':<24}open files   MB in ten rounds    in use     lines of errors")
    for name, (package, _) in PROGRAMS.items():
        if importlib.util.find_spec(package) is not None:
            command = [sys.executable, "-m", "benchmarks.agent_clients", "--only", name]
            command += ["--conversations", str(options.conversations)]
            environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # it would be fetched
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            print(f"{name:<24}{done.stdout.rstrip() or 'failed':<42} {len(done.stderr.splitlines()):>17}", flush=True)
            if done.returncode:
                raise SystemExit(done.stderr)


if __name__ == "__main__":
    main()
