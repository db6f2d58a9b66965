"""The cost of tracking: iterations with a sink compared with the same iterations without sinks.

A bandit (the example of `adapters.bandits`: 32 pulls and 10 updates per iteration) and a small language model are trained in
blocks of iterations, in turn with and without the sink, in one process. "In calls" is the wall time that the training thread
spends in the sink, as a part of an iteration without sinks. "CPU" is the ratio of the process's CPU time, with threads of the
tracker, minus 1. Trackers write to a temporary folder, and W&B is offline.

    python -m benchmarks.tracking
    python -m benchmarks.tracking --tasks bandit --sinks tensorboard wandb
"""

import argparse
import contextlib
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from adapters.bandits import BanditReward, SoftmaxPolicy, dynamic_testbed
from adapters.tracking import MLflowSink, TensorBoardSink, TrackioSink, WandbSink
from grpo import GRPOConfig, GRPOTrainer, JSONLSink, ObjectiveConfig
from grpo.surrogates import Clip

OFFLINE = {
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "HF_HUB_OFFLINE": "1",
}


def bandit() -> tuple[GRPOTrainer, Any]:
    """The bandit of `adapters.bandits`."""
    testbed = dynamic_testbed(pulls_per_step=32)
    objective = ObjectiveConfig(surrogate=Clip(low=0.3, high=0.3), entropy_coef=0.1)
    config = GRPOConfig(group_size=32, learning_rate=0.05, num_epochs_per_update=10, objective=objective)
    policy = SoftmaxPolicy(num_actions=testbed.num_arms)
    return GRPOTrainer(config=config, policy=policy, reward_model=BanditReward(testbed)), [0]


def language_model() -> tuple[GRPOTrainer, Any]:
    """A Qwen3 of 4 layers with random weights: 2 prompts of 32 tokens, 8 completions of 32 tokens each."""
    from adapters.llm import HFPolicy, SamplingConfig
    from benchmarks.llm_vs_trl import Case, make_model, make_prompts, make_tokenizer, share_of_even_tokens

    case = Case(prompt=32, completion=32, group=8, rows=16)
    model = make_model(case, "cpu")
    tokenizer = make_tokenizer(model.config.vocab_size)
    policy = HFPolicy(model, tokenizer, sampling=SamplingConfig(max_new_tokens=case.completion))

    def reward(_: Any, actions: Any) -> list[float]:
        return share_of_even_tokens([action.token_ids for action in actions])

    config = GRPOConfig(group_size=case.group, learning_rate=1e-6)
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=reward)
    return trainer, make_prompts(case, model.config.vocab_size)


TASKS: dict[str, tuple[Callable[[], tuple[GRPOTrainer, Any]], int, int, list[int]]] = {
    "bandit": (bandit, 60, 12, [1, 10]),
    "language model": (language_model, 2, 15, [1]),
}
"""Task -> what makes it, iterations per block, pairs of blocks, values of `log_every`."""
SINKS: dict[str, Callable[..., Any]] = {
    "jsonl": lambda folder, log_every: JSONLSink(folder / "metrics.jsonl", log_every=log_every),
    "tensorboard": TensorBoardSink,
    "wandb": WandbSink,
    "mlflow": lambda folder, log_every: MLflowSink(folder, tracking_uri=f"sqlite:///{folder}/db", log_every=log_every),
    "trackio": TrackioSink,
}


@dataclass(kw_only=True)
class Timed:
    """Calls a sink, and adds up the time of its calls after `start`."""

    sink: Any
    seconds: float = 0.0
    log_every: int = field(init=False)

    def __post_init__(self) -> None:
        self.log_every = self.sink.log_every

    def start(self, settings: Any, iteration: int) -> None:
        """Not timed: a run starts once."""
        self.sink.start(settings, iteration)

    def log(self, metrics: Any, iteration: int) -> None:
        """Timed."""
        start = time.perf_counter()
        self.sink.log(metrics, iteration)
        self.seconds += time.perf_counter() - start

    def log_samples(self, samples: Any, iteration: int) -> None:
        """Timed, if the sink takes samples."""
        start = time.perf_counter()
        if hasattr(self.sink, "log_samples"):
            self.sink.log_samples(samples, iteration)
        self.seconds += time.perf_counter() - start

    def close(self) -> None:
        """Close the sink."""
        self.sink.close()


@dataclass(kw_only=True)
class Clock:
    """A callback that notes wall time and CPU time of the iterations after the first."""

    marks: list[tuple[float, float]] = field(default_factory=list)

    def on_iteration(self, trainer: Any, metrics: Any) -> None:
        """Note the times after an iteration."""
        self.marks.append((time.perf_counter(), time.process_time()))

    def per_iteration(self) -> tuple[float, float]:
        """Wall and CPU seconds of an iteration."""
        (wall, cpu), (last_wall, last_cpu) = self.marks[0], self.marks[-1]
        return (last_wall - wall) / (len(self.marks) - 1), (last_cpu - cpu) / (len(self.marks) - 1)


def block(trainer: GRPOTrainer, states: Any, num_iterations: int, sinks: list[Any]) -> tuple[float, float]:
    """Train one block. Returns wall and CPU seconds of an iteration."""
    clock = Clock()
    total = trainer.iteration + num_iterations
    trainer.train(states, num_iterations=total, sinks=sinks, callbacks=[clock], progress=False)
    return clock.per_iteration()


def cost(task: str, sink: str, log_every: int, folder: Path, num_pairs: int) -> str:
    """One line: wall time of an iteration, cost in calls and in CPU time."""
    make, num_iterations, *_ = TASKS[task]
    torch.manual_seed(0)
    trainer, states = make()
    timed = Timed(sink=SINKS[sink](folder / f"{task}-{sink}-{log_every}", log_every=log_every))
    block(trainer, states, num_iterations, [timed])  # opens the run
    walls, in_calls, ratios = [], [], []
    for pair in range(num_pairs):
        times: dict[bool, tuple[float, float]] = {}
        for with_sink in (True, False) if pair % 2 else (False, True):
            timed.seconds = 0.0
            times[with_sink] = block(trainer, states, num_iterations, [timed] if with_sink else [])
            if with_sink:
                in_calls.append(timed.seconds / num_iterations)
        walls.append(times[False][0])
        ratios.append(times[True][1] / times[False][1])
    timed.close()
    wall = statistics.median(walls)
    low, ratio, high = statistics.quantiles(ratios, n=4)
    share = statistics.mean(in_calls) / wall  # a mean, because some sinks write seldom and then much
    return (
        f"{task:15s} {sink:12s} {log_every:5d} {1e3 * wall:9.1f} ms {1e3 * share * wall:8.2f} ms {100 * share:7.1f} %"
        f" {100 * (ratio - 1):7.1f} % ({100 * (low - 1):.1f} to {100 * (high - 1):.1f})"
    )


def main() -> None:
    """Print one line per task, sink and `log_every`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--sinks", nargs="+", choices=SINKS, default=list(SINKS))
    parser.add_argument(
        "--pairs", type=int, help="pairs of blocks; default: 12 of the bandit, 15 of the language model"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("error", UserWarning)  # a sink that is switched off would cost nothing
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        os.environ |= OFFLINE | {"TRACKIO_DIR": f"{name}/trackio"}
        os.chdir(name)  # MLflow's artifacts
        print(f"{'task':15s} {'sink':12s} {'every':>5s} {'iteration':>12s} {'in calls':>11s} {'':9s}   CPU (quartiles)")
        for task in args.tasks:
            for sink in args.sinks:
                for log_every in TASKS[task][3]:
                    with contextlib.redirect_stdout(None):
                        line = cost(task, sink, log_every, Path(name), args.pairs or TASKS[task][2])
                    print(line, flush=True)


if __name__ == "__main__":
    main()
