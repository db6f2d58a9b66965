"""Slow tools, and requests with limits of their own: what they cost conversations that go on together.

Each of 64 conversations has three turns with a call of a tool that takes 50 ms, and an answer. The model's turns are given, and
take half a second for all conversations together, as a small model would need. All conversations go on together, so the tools
should cost little.

Then each of 16 conversations has three messages of 32 tokens, or a limit of its own, from 24 to 40 tokens, or also a stop
string of its own, which no message contains. Requests with other limits and stop strings share a batch, so all three cases
should take as many batches, and as many CPU seconds.

    python -m benchmarks.agents
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch

from adapters.agents import AgentPolicy, Chat
from adapters.llm import HFPolicy, SampledTokens, SamplingConfig
from benchmarks.agent_vs_trl import CLOSE, OPEN, make_tokenizer
from benchmarks.llm_vs_trl import TINY, make_model

CONVERSATIONS, NAP, MODEL_SECONDS, CALLS = 64, 0.05, 0.5, 3


def look(words: str) -> str:
    """Looks something up.

    Args:
        words: What to look up.
    """
    time.sleep(NAP)
    return f"nothing about {words}"


class Slow:
    """Has a slow tool, and ends with the first answer."""

    def __init__(self, question: str) -> None:
        self.question = question

    def tools(self) -> list[Any]:
        """The tool."""
        return [look]

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        """Ask the question."""
        return self.question, {}

    def step(self, action: Any) -> Any:
        """End the conversation."""
        return "", 1.0, True, False, {}


class Says(HFPolicy):
    """Calls the tool three times, and answers. Each batch takes at least half a second."""

    seconds = 0.0

    def sample_tokens(self, prompts: Sequence[Sequence[int]], **_: Any) -> SampledTokens:
        """The next turn of each conversation, by the number of calls in its context."""
        begin = time.perf_counter()
        call, answer = ([*map(self.tokenizer.convert_tokens_to_ids, turn)] for turn in ([OPEN, "w1 ", CLOSE], ["w2 "]))
        end = self.tokenizer.eos_token_id
        turns = [[*(call if prompt.count(call[0]) < CALLS else answer), end] for prompt in prompts]
        time.sleep(max(0.0, MODEL_SECONDS - (time.perf_counter() - begin)))
        self.seconds += time.perf_counter() - begin
        zeros = [[0.0] * len(turn) for turn in turns]
        return SampledTokens(token_ids=turns, finish_reasons=["end"] * len(turns), behaviour_log_probs=zeros)


class Counted(HFPolicy):
    """Counts its batches and its tokens."""

    num_batches = num_tokens = 0

    def sample_tokens(self, prompts: Sequence[Sequence[int]], **options: Any) -> SampledTokens:
        """The next turn of each conversation."""
        sampled = super().sample_tokens(prompts, **options)
        self.num_batches += 1
        self.num_tokens += sum(map(len, sampled.token_ids))
        return sampled


async def talks(chat: Chat, request: tuple[int, list[str]]) -> float:
    """Three messages of the policy, each as long as its limit."""
    limit, stop = request
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    for _ in range(3):
        said = await chat(messages, max_new_tokens=limit, stop=stop)
        messages = [*messages, said, {"role": "user", "content": "more"}]
    return 0.0


def compare_limits(repeats: int) -> None:
    """Print batches, tokens and CPU seconds with equal limits, with other limits, and with other stop strings too."""
    sampling = SamplingConfig(max_new_tokens=48, min_new_tokens=48)  # no message ends before its limit
    model = make_model(TINY["tiny"], "cpu", vocab_size=500, hidden_size=256, intermediate_size=512, num_hidden_layers=4)
    policy = Counted(model, make_tokenizer(500), sampling=sampling)
    agent = AgentPolicy(policy, talks)
    limits = [24, *range(25, 32), *range(33, 40), 40]
    requests: dict[str, list[tuple[int, list[str]]]] = {
        "equal limits": [(32, [])] * 16,
        "other limits": [(limit, []) for limit in limits],
        "other stop strings": [(limit, [f"end of {limit}"]) for limit in limits],
    }
    seconds: dict[str, list[float]] = {name: [] for name in requests}
    counts = {}
    for _ in range(repeats):
        for name, given in requests.items():
            policy.num_batches = policy.num_tokens = 0
            begin = time.process_time()
            agent.generate_actions(given, 1)
            seconds[name].append(time.process_time() - begin)
            counts[name] = f"{policy.num_batches} batches, {policy.num_tokens} tokens"
    for name, spent in seconds.items():
        ratios = [own / equal for equal, own in zip(seconds["equal limits"], spent, strict=True)]
        print(f"16 conversations of 3 turns, {name}: {counts[name]}")
        print(
            f"  CPU seconds: {statistics.median(spent):.2f}   "
            f"of equal limits: median {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )


def main() -> None:
    """Read the command line, and print the times and the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = make_tokenizer(500)
    model = make_model(TINY["tiny"], "cpu", vocab_size=500, hidden_size=32, intermediate_size=64, num_hidden_layers=1)
    policy = Says(model, tokenizer, sampling=SamplingConfig(max_new_tokens=32))
    agent = AgentPolicy(policy, Slow)
    totals, models = [], []
    for _ in range(options.repeats):
        policy.seconds, begin = 0.0, time.perf_counter()
        (conversations,) = agent.generate_actions(["hi"], CONVERSATIONS)
        totals.append(time.perf_counter() - begin)
        models.append(policy.seconds)
        assert all(len(c.turns) == CALLS + 1 and c.reward == 1 for c in conversations)
    ratio = statistics.median(total / own for total, own in zip(totals, models, strict=True))
    print(
        f"{CONVERSATIONS} conversations, {CALLS} calls of {1e3 * NAP:.0f} ms each, {CALLS + 1} turns of {MODEL_SECONDS} s"
    )
    print(
        f"  seconds: {statistics.median(totals):.2f}, of which the model {statistics.median(models):.2f}   ratio {ratio:.2f}"
    )
    alone = CONVERSATIONS * CALLS * NAP
    print(f"  one call after another would add {alone:.1f} s: ratio {1 + alone / statistics.median(models):.2f}")
    compare_limits(options.repeats)


if __name__ == "__main__":
    main()
