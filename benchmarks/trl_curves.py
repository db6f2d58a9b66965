"""One small run with the same policy, reward and settings, by our trainer and by TRL's: the mean rewards over the iterations.

The two draw other random numbers, so the table has several seeds.

    python -m benchmarks.trl_curves
"""

import argparse
import logging
import os
import statistics
import warnings
from importlib.metadata import version
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from adapters.agents import train_with_trl
from adapters.llm import HFPolicy, SamplingConfig
from benchmarks.llm_vs_trl import Case, make_model, make_prompts, make_tokenizer
from grpo import AdvantageConfig, GRPOConfig, GRPOTrainer

CASE = Case(prompt=8, completion=16, group=8, rows=32, hazard=1 / 16)
SHAPE = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
SETTINGS: dict[str, Any] = {"group_size": 8, "learning_rate": 3e-3, "num_epochs_per_update": 2}


def share_of_even(_: Any, completions: Any) -> list[float]:
    """Reward: the share of tokens with an even id."""
    return [sum(token % 2 == 0 for token in one.token_ids) / len(one.token_ids) for one in completions]


def curve(seed: int, num_iterations: int, *, by_trl: bool) -> list[float]:
    """The mean reward of each iteration."""
    tokenizer = make_tokenizer(SHAPE["vocab_size"])
    policy = HFPolicy(
        make_model(CASE, "cpu", **SHAPE), tokenizer, sampling=SamplingConfig(max_new_tokens=CASE.completion)
    )
    config = GRPOConfig(**SETTINGS, seed=seed, advantage=AdvantageConfig(scale="group", std_eps=1e-4))
    prompts = make_prompts(CASE, SHAPE["vocab_size"])
    if by_trl:
        history = train_with_trl(policy, share_of_even, config, states=prompts, num_iterations=num_iterations)
    else:
        trainer = GRPOTrainer(config=config, policy=policy, reward_model=share_of_even)
        history = trainer.train(prompts, num_iterations=num_iterations, progress=False)
    return [metrics["rewards/mean"] for metrics in history]


def main() -> None:
    """Read the command line, run both sides, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    transformers_logging.set_verbosity_error()
    logging.getLogger("grpo").setLevel(logging.ERROR)  # its advice about the loss is for users
    print(f"torch {torch.__version__}, TRL {version('trl')}; {CASE}; {SETTINGS}; seeds 0 to {options.seeds - 1}\n")
    curves: dict[str, list[list[float]]] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for side in ("ours", "TRL"):
            curves[side] = [curve(seed, options.iterations, by_trl=side == "TRL") for seed in range(options.seeds)]
    print("| iteration | ours | TRL |\n|---|---|---|")
    shown = sorted({1, *range(options.iterations // 4, options.iterations + 1, max(options.iterations // 4, 1))} - {0})
    for iteration in shown:
        cells = []
        for runs in curves.values():
            values = [run[iteration - 1] for run in runs]
            cells.append(f"{statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})")
        print(f"| {iteration} | {cells[0]} | {cells[1]} |")


if __name__ == "__main__":
    main()
