"""Learn to choose among the functions of BFCL from logs with one decision per request, and compare with learning online.

A logging policy has decided 50,000 times, in one of three ways. `LoggedRewards` estimates from these decisions what any call
would earn, and GRPO trains on the estimates. Figures are the share of the held-out requests for which the right function is
chosen, in percent.

    python -m benchmarks.tool_logs                    # about fifteen minutes
    python -m benchmarks.tool_logs --seeds 1
"""

import argparse
import math
import random
import statistics
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from adapters.tools import RewardRegression, ToolCall, ToolCatalogue, ToolSample, ToolSelectionPolicy
from adapters.tools.catalogue.tools import ABSENT
from benchmarks._bfcl import Question, catalogue_of, questions, split, wordllama_encoder
from benchmarks.tools_bfcl import CONFIG, NUM_ITERATIONS, no_values, reward
from grpo import AdvantageConfig, GRPOConfig, GRPOTrainer
from grpo.logs import LoggedRewards

NUM_DECISIONS = 50_000

LOGS_CONFIG = replace(CONFIG, group_size=16, batch_size=128, advantage=AdvantageConfig(scale="group"))
"""As online, but with twice as many calls per request, because calls cost nothing."""

LOGGING_POLICIES = {
    "uniform": "every function equally often",
    "router": "a softmax of 10 times the similarity of request and description, and 10 % uniform",
    "by rank": "the function of rank k, in an arbitrary order, with a probability proportional to 1 / k",
}
"""How the logging policies draw a function. Parameter values are uniform."""


def function_probabilities(kind: str, catalogue: ToolCatalogue, asked: Sequence[Question], seed: int) -> Tensor:
    """The logging policy's probability of each function for each question, [N, K]."""
    num_tools = len(catalogue)
    if kind == "by rank":
        ranks = torch.randperm(num_tools, generator=torch.Generator().manual_seed(seed)) + 1
        return (1 / ranks / (1 / ranks).sum()).expand(len(asked), -1)
    if kind == "uniform":
        return torch.full((len(asked), num_tools), 1 / num_tools)
    encoder = wordllama_encoder()
    requests, tools = (
        torch.as_tensor(encoder(texts))
        for texts in ([question.text for question in asked], [tool.text for tool in catalogue.values()])
    )
    near = (10 * (requests - requests.mean(0)) @ (tools - tools.mean(0)).T).softmax(1)
    return 0.9 * near + 0.1 / num_tools


def draw_logs(kind: str, catalogue: ToolCatalogue, asked: Sequence[Question], seed: int) -> list[ToolSample]:
    """Decisions of a logging policy, each for a question at random."""
    generator, names = random.Random(seed), list(catalogue)
    probabilities = function_probabilities(kind, catalogue, asked, seed).tolist()
    logged = []
    for place in generator.choices(range(len(asked)), k=NUM_DECISIONS):
        [chosen] = generator.choices(range(len(names)), probabilities[place])
        choices = catalogue[names[chosen]].choices
        values = {choice.name: generator.choice(choice.values) for choice in choices}
        call = ToolCall(
            tool=names[chosen], arguments={key: value for key, value in values.items() if value is not ABSENT}
        )
        steps = [probabilities[place][chosen], *(1 / len(choice.values) for choice in choices)]
        logged.append(
            ToolSample(
                state=asked[place].text,
                tool=call.tool,
                arguments=call.arguments,
                log_prob=tuple(map(math.log, steps)),
                reward=reward([asked[place]], [call])[0],
            )
        )
    return logged


def learn(
    catalogue: ToolCatalogue, states: Sequence[Any], reward_model: Any, config: GRPOConfig
) -> ToolSelectionPolicy:
    """Train a policy. States are questions, or their texts."""
    torch.manual_seed(config.seed or 0)
    policy = ToolSelectionPolicy(catalogue, encoder=wordllama_encoder(), describe=text_of, fill=no_values)
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=reward_model)
    shuffled = random.Random(config.seed).sample(list(states), len(states))
    trainer.train(shuffled, num_iterations=NUM_ITERATIONS, progress=False)
    return policy


def text_of(state: Any) -> str:
    """The text of a question, or the text itself."""
    return state.text if isinstance(state, Question) else state


def right_tool(policy: ToolSelectionPolicy, asked: Sequence[Question]) -> float:
    """Share of the questions, in percent, for which the most likely function is right."""
    calls = policy.predict([question.text for question in asked])
    right = [call is not None and call.tool == question.tool for question, call in zip(asked, calls, strict=True)]
    return 100 * statistics.fmean(right)


def measure(seed: int) -> dict[str, float]:
    """The share of right functions by method, for one split and one log of each kind."""
    catalogue = catalogue_of(4)
    training, _, held_out = split(questions(catalogue), seed)
    config = replace(CONFIG, seed=seed)
    online = learn(catalogue, training, reward, config)
    found = {"online": right_tool(online, held_out)}
    for kind in LOGGING_POLICIES:
        logs = draw_logs(kind, catalogue, training, seed)
        for method, fit in (("doubly robust", RewardRegression(catalogue, online.encoder)), ("IPS", None)):
            rewards = LoggedRewards(logs, fit=fit, action_key=catalogue.decisions)
            learned = learn(catalogue, rewards.states, rewards, replace(LOGS_CONFIG, seed=seed))
            found[f"{kind}, {method}"] = right_tool(learned, held_out)
    return found


def main() -> None:
    """Print the table as Markdown: median, least and most over the seeds, and the difference to learning online."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "ToolSelectionPolicy: fill gave no value")
    warnings.filterwarnings("ignore", "LoggedRewards: max_weight")  # IPS is shown with its bound
    several = []
    for seed in range(args.seeds):
        several.append(measure(seed))
        print(f"seed {seed}: {several[-1]}", flush=True)
    print(f"\n{NUM_DECISIONS:,} decisions, {args.seeds} seeds: median (least to most). Logging policies:\n")
    print("\n".join(f"- {kind}: {text}" for kind, text in LOGGING_POLICIES.items()) + "\n")
    print("| learned from | right function, % | less than online |\n|---|---|---|")
    for name in several[0]:
        shares = [found[name] for found in several]
        lost = statistics.median(found["online"] - found[name] for found in several)
        print(f"| {name} | {statistics.median(shares):.1f} ({min(shares):.1f} to {max(shares):.1f}) | {lost:.1f} |")


if __name__ == "__main__":
    main()
