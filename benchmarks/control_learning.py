"""Learning results of the presets of `adapters.control` on six environments, several seeds each.

The return is the mean over 20 episodes of the most likely actions, from resets that training does not use. Only training steps
are counted. For CartPole, Acrobot and Pendulum the benchmark reports the steps until the first evaluation that reaches the
threshold. For the robots it reports the return after the whole budget.

    python -m benchmarks.control_learning                                # all six; an hour or two on one core
    python -m benchmarks.control_learning --envs CartPole-v1 --workers 2
"""

import argparse
import os
import platform
import sys
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Literal

import numpy as np
import torch

from adapters.control import PRESETS, LearningCurve, episode_starts, preset_for, train_control

TO_THRESHOLD = ("CartPole-v1", "Acrobot-v1", "Pendulum-v1")
"""Environments whose runs end at the first evaluation that reaches the preset's threshold."""

NUM_SEEDS = {env_id: 10 if env_id in TO_THRESHOLD else 5 for env_id in PRESETS}


def learn(env_id: str, seed: int, total_steps: int | None = None) -> LearningCurve:
    """Train one policy with the environment's preset."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", category=DeprecationWarning)  # raised by MuJoCo's models
    torch.manual_seed(seed)
    preset = preset_for(env_id)
    if total_steps is not None:
        preset = replace(preset, total_steps=total_steps)
    policy = preset.make_policy()
    return train_control(
        preset.make_trainer(policy, seed=seed),
        episode_starts(preset.num_groups, seed=seed),
        total_steps=preset.total_steps,
        evaluate_every=preset.evaluate_every,
        stop_at=preset.threshold if env_id in TO_THRESHOLD else None,
        progress=False,
    )


def run_all(env_id: str, seeds: Sequence[int], workers: int, total_steps: int | None) -> Iterator[LearningCurve]:
    """Yield the seeds' curves in order."""
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for seed, curve in zip(
            seeds, pool.map(learn, [env_id] * len(seeds), seeds, [total_steps] * len(seeds)), strict=True
        ):
            print(
                f"{env_id} seed {seed}: {curve.returns[-1]:.1f} after {curve.steps[-1]:,}", file=sys.stderr, flush=True
            )
            yield curve


def quartiles(values: Sequence[float], method: Literal["lower", "higher"]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile. Between two values, the worse one is used."""
    low, middle, high = np.quantile(np.asarray(values, dtype=float), (0.25, 0.5, 0.75), method=method)
    return float(low), float(middle), float(high)


def report(env_id: str, curves: Sequence[LearningCurve]) -> str:
    """Print one line of the table."""
    threshold, budget = preset_for(env_id).threshold, preset_for(env_id).total_steps
    assert threshold is not None  # the table's have one
    speed = float(np.median([curve.steps[-1] / curve.seconds[-1] for curve in curves]))
    final = quartiles([curve.returns[-1] for curve in curves], "lower")
    line = f"{env_id:16s}{threshold:9g}{budget:10,d}"
    if env_id in TO_THRESHOLD:
        reached = [curve.steps_to(threshold) for curve in curves]
        needed = [float("inf") if steps is None or steps > budget else float(steps) for steps in reached]
        low, middle, high = quartiles(needed, "higher")
        count = sum(steps < float("inf") for steps in needed)
        line += f"   {count:2d}/{len(curves)} reach it, after {middle:9,.0f} steps ({low:,.0f} to {high:,.0f})"
    else:
        count = sum(curve.returns[-1] >= threshold for curve in curves)
        line += f"   {count:2d}/{len(curves)} end above, at    {final[1]:9.1f}       ({final[0]:.1f} to {final[2]:.1f})"
    return f"{line:98s}{speed:8,.0f} steps/s"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", nargs="+", choices=PRESETS, default=list(PRESETS))
    parser.add_argument("--seeds", type=int, help="runs of each; default: 10, and 5 of the robots")
    parser.add_argument("--steps", type=int, help="of each run; default: the preset's")
    parser.add_argument("--workers", type=int, default=1, help="runs at a time, one thread each")
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {args.workers} run(s) at a time on {os.cpu_count()} cores, {platform.machine()}")
    print(f"{'environment':16s}{'learned':>9s}{'budget':>10s}   median over seeds (quartiles)", flush=True)
    for env_id in args.envs:
        seeds = range(args.seeds or NUM_SEEDS[env_id])
        print(report(env_id, list(run_all(env_id, seeds, args.workers, args.steps))), flush=True)


if __name__ == "__main__":
    main()
