"""Speed of executing tools, and of choosing among a thousand tools.

- Latency: 64 calls of 50 ms each, of which 32 run at once, take at least 0.1 s. The benchmark prints their time with worker
  processes and with awaited remote tools, with the start of the executor (cold) and without it (warm).
- Rate: calls per second of a tool that adds two numbers.
- Policy: `ToolSelectionPolicy` over 1,000 tools is compared with a bare torch loop of the same mathematics. Both sample 10,000
  calls with their scores, then score them for training.

Neither side encodes or reads texts: the policy looks up what it keeps of each, and the loop has the vectors, and the evidence
of the values in the texts, in tensors. The loop makes a
tuple of two names per call, the tool's and the value's, and keeps its draws in tensors. The loop omits two parts of the
policy's work: building a `ToolCall` with all arguments, and reading the choices back from a call. The benchmark first
checks that both sides draw the same calls from one seed, with the same log-probs and entropies.

    python -m benchmarks.tool_speed            # about a minute
    python -m benchmarks.tool_speed --quick    # whether it runs
"""

import argparse
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from adapters.tools import ExecutorOptions, Tool, ToolCall, ToolCatalogue, ToolExecutor, ToolSelectionPolicy
from adapters.tools.policy.distribution import CONTAINED, EVIDENCE_GAIN, SIMILARITY_GAIN
from benchmarks import _slow_tools
from benchmarks._timing import keep_freed_memory, time_pairs
from grpo import ActionScores

NUM_CALLS, CONCURRENCY, LATENCY = 64, 32, 0.05
IDEAL = NUM_CALLS / CONCURRENCY * LATENCY
NUM_TOOLS, NUM_VALUES = 1_000, 4


# execution


def executor_of(tool: Tool, num_workers: int) -> ToolExecutor:
    """An executor for one tool. The workers only sleep, so there may be more workers than cores."""
    return ToolExecutor(
        ToolCatalogue([tool]), num_workers=num_workers, options=ExecutorOptions(max_concurrency=CONCURRENCY)
    )


def timed_run(executor: ToolExecutor, calls: list[ToolCall]) -> float:
    """Seconds until the last result. Checks that all results are right."""
    start = time.perf_counter()
    results = executor.run(calls)
    seconds = time.perf_counter() - start
    assert all(result.ok for result in results), next(result.error for result in results if not result.ok)
    return seconds


def print_latency(name: str, tool: Tool, repeats: int) -> bool:
    """Print one line. Returns whether the target is met."""
    calls = [ToolCall(tool=tool.name, arguments={"seconds": LATENCY})] * NUM_CALLS
    colds, warms = [], []
    for _ in range(3):
        start = time.perf_counter()
        with executor_of(tool, CONCURRENCY) as executor:
            timed_run(executor, calls)
            colds.append(time.perf_counter() - start)
            warms += [timed_run(executor, calls) for _ in range(repeats)]
    warm, cold = statistics.median(warms), statistics.median(colds)
    print(
        f"{NUM_CALLS} calls of {1e3 * LATENCY:.0f} ms, {CONCURRENCY} at once, {name:8s}: warm {warm:6.3f} s "
        f"({min(warms):.3f} to {max(warms):.3f}), {warm / IDEAL:.2f} x the ideal {IDEAL:.1f} s, at most 3; cold {cold:6.3f} s"
    )
    return warm <= 3 * IDEAL


def print_rate(name: str, tool: Tool, num_workers: int, num_calls: int, repeats: int) -> None:
    """Print one line."""
    calls = [ToolCall(tool=tool.name, arguments={"a": i, "b": 1}) for i in range(num_calls)]
    with executor_of(tool, num_workers) as executor:
        timed_run(executor, calls[:100])
        seconds = statistics.median(timed_run(executor, calls) for _ in range(repeats))
    print(f"calls that only add, {name:31s}: {num_calls / seconds:9,.0f} per second")


# policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A policy over `NUM_TOOLS` tools, and its requests."""

    policy: ToolSelectionPolicy
    texts: list[str]
    num_calls: int
    """Number of calls per text."""
    batch_size: int
    """Number of texts in a batch."""


def make_problem(num_texts: int, num_calls: int, batch_size: int) -> Problem:
    """Tools described by random words, each with a text and one of four values to choose. The weights are random."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghijklmnoprstuvw", k=rng.randint(3, 9))) for _ in range(3_000)]
    tools = []
    for i in range(NUM_TOOLS):
        values = rng.sample(words[:200], NUM_VALUES)
        schema = {
            "type": "object",
            "properties": {"text": {"type": "string"}, "mode": {"enum": values}},
            "required": ["text", "mode"],
        }
        description = " ".join(rng.choices(words, k=8))
        tools.append(Tool(name=f"tool_{i}", description=description, function=_slow_tools.nap, parameters=schema))
    texts = [" ".join(rng.choices(words, k=12)) for _ in range(num_texts)]
    policy = ToolSelectionPolicy(ToolCatalogue(tools), fill=lambda text, tool: {"text": text})  # noqa: ARG005
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter))
    return Problem(policy=policy, texts=texts, num_calls=num_calls, batch_size=batch_size)


def policy_work(problem: Problem) -> Callable[[], ActionScores]:
    """Sample with scores, then score for training, batch by batch. Returns the scores of the last batch."""
    policy, size = problem.policy, problem.batch_size
    chunks = [problem.texts[i : i + size] for i in range(0, len(problem.texts), size)]

    def work() -> ActionScores:
        for texts in chunks:
            sampled = policy.sample_actions(texts, problem.num_calls)
            scores = policy.score_groups(texts, sampled.actions)
        return scores

    return work


class BareLoop:
    """The policy's mathematics in a bare torch loop."""

    def __init__(self, problem: Problem) -> None:
        policy = problem.policy
        assert policy.network.similarity is not None
        assert policy.network.evidence is not None
        size = problem.batch_size
        known = (policy.encoder(problem.texts), *policy.menu.evidence(problem.texts))
        self.chunks = list(zip(*(each.split(size) for each in known), strict=True))
        self.evidence = policy.network.evidence
        self.num_calls = problem.num_calls
        self.tool_weight, self.tool_bias = policy.network.tool_query.weight, policy.network.tool_query.bias
        self.value_weight, self.value_bias = policy.network.value_query.weight, policy.network.value_query.bias
        self.similarity = policy.network.similarity
        self.tools, self.values = policy.menu.tool_vectors, policy.menu.value_vectors
        self.names = list(policy.catalogue)
        choices = [tool.choices[0] for tool in policy.catalogue.values()]
        self.value_names = [choice.values for choice in choices]
        place = {text: i for i, text in enumerate(dict.fromkeys(text for choice in choices for text in choice.texts))}
        self.places = torch.tensor([[place[text] for text in choice.texts] for choice in choices])

    def __call__(self) -> tuple[Tensor, Tensor]:
        """Do the work of `policy_work`. Returns log-probs [N, 2] and entropies [N, 2] of the last batch."""
        for chunk in self.chunks:
            with torch.no_grad():
                tools, values = self._log_probs(*chunk)
                drawn = torch.multinomial(tools.exp(), self.num_calls, replacement=True).flatten()
                of_values = self._of_values(values, drawn)
                chosen = torch.multinomial(of_values.exp(), 1).flatten()
                self._scores(tools, of_values, drawn, chosen)
                pairs = zip(drawn.tolist(), chosen.tolist(), strict=True)
                self.calls = [(self.names[tool], self.value_names[tool][value]) for tool, value in pairs]
            tools, values = self._log_probs(*chunk)
            scores = self._scores(tools, self._of_values(values, drawn), drawn, chosen)
        return scores

    def _log_probs(self, vectors: Tensor, named: Tensor, filled: Tensor, contained: Tensor) -> tuple[Tensor, Tensor]:
        tool_query = torch.nn.functional.linear(vectors, self.tool_weight, self.tool_bias)
        value_query = torch.nn.functional.linear(vectors, self.value_weight, self.value_bias)
        tool_query = tool_query + SIMILARITY_GAIN * self.similarity[0] * vectors
        value_query = value_query + self.similarity[1] * vectors
        of_named, of_filled = EVIDENCE_GAIN * self.evidence
        tools = tool_query @ self.tools.T + of_named * named + of_filled * filled
        return tools.log_softmax(1), value_query @ self.values.T + CONTAINED * contained

    def _of_values(self, values: Tensor, drawn: Tensor) -> Tensor:
        return values.repeat_interleave(self.num_calls, 0).gather(1, self.places[drawn]).log_softmax(1)

    def _scores(self, tools: Tensor, of_values: Tensor, drawn: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        first = tools.gather(1, drawn.view(-1, self.num_calls)).flatten()
        second = of_values.gather(1, chosen.unsqueeze(1)).squeeze(1)
        entropies = (
            -(tools.exp() * tools).sum(1).repeat_interleave(self.num_calls),
            -(of_values.exp() * of_values).sum(1),
        )
        return torch.stack([first, second], dim=1), torch.stack(entropies, dim=1)


def check_same(problem: Problem) -> float:
    """Largest difference between the log-probs and entropies of both sides. Raises if the calls of the last batch differ."""
    policy = problem.policy
    calls: list[ToolCall] = []
    score_groups = policy.score_groups

    def keeping(states: list[str], actions: list[list[ToolCall]]) -> ActionScores:
        calls[:] = [call for group in actions for call in group]
        return score_groups(states, actions)

    loop = BareLoop(problem)
    policy.score_groups = keeping  # type: ignore[method-assign]
    try:
        torch.manual_seed(1)
        ours = policy_work(problem)()
    finally:
        del policy.score_groups
    torch.manual_seed(1)
    log_probs, entropy = loop()
    assert [(call.tool, call.arguments["mode"]) for call in calls] == loop.calls
    assert ours.entropy is not None
    with torch.no_grad():
        return max(float((ours.log_probs - log_probs).abs().max()), float((ours.entropy - entropy).abs().max()))


def print_policy(num_decisions: int, num_calls: int, batch_size: int, repeats: int) -> bool:
    """Print one line. Returns whether the target is met."""
    problem = make_problem(num_decisions // num_calls, num_calls, batch_size)
    difference = check_same(problem)
    assert difference < 1e-4, f"the two sides do not compute the same: they differ by {difference}"
    pair = time_pairs(policy_work(problem), BareLoop(problem), repeats=repeats, warmup=1, clock=time.process_time)
    print(
        f"{num_decisions:,} calls, {NUM_TOOLS:,} tools, {num_calls} per text, {batch_size:4d} texts at once: {pair}, "
        f"at most 1.2; they differ by {difference:.0e}"
    )
    return pair.ratio <= 1.2


def main() -> None:
    """Print a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="whether it runs: few repeats, few calls")
    parser.add_argument("--check", action="store_true", help="end with status 1 where a target is missed")
    args = parser.parse_args()
    repeats = 2 if args.quick else args.repeats
    torch.set_num_threads(1)
    keep_freed_memory()
    print(
        f"torch {torch.__version__}, 1 thread on {os.cpu_count()} cores, {platform.processor() or platform.machine()}, "
        f"load {os.getloadavg()[0]:.1f}"
    )
    met = [
        print_latency("workers", Tool.from_function(_slow_tools.nap), repeats),
        print_latency("awaited", Tool.from_function(_slow_tools.wait, remote=True), repeats),
    ]
    num_calls = 200 if args.quick else 5_000
    for num_workers in (1, 2):
        name = f"{num_workers} worker{'s' * (num_workers > 1)}"
        print_rate(name, Tool.from_function(_slow_tools.add), num_workers, num_calls, repeats)
    print_rate("awaited", Tool.from_function(_slow_tools.add_elsewhere, remote=True), 1, num_calls, repeats)
    num_decisions = 400 if args.quick else 10_000
    print(f"{'':64s}{'policy':>12s} {'bare loop':>12s}")
    met += [print_policy(num_decisions, 8, 125, repeats), print_policy(num_decisions, 1, 500, repeats)]
    if args.check and not all(met):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
