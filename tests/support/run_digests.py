"""Whether every setting still trains the same, bit by bit: compare the runs of this checkout with those of another commit.

    python -m tests.support.run_digests --against 42a833e

The runs are both runs of each case of `test_every_setting_has_an_effect`, and the runs of `checkpoint_runs`. A digest covers
the weights, the optimizer, the random generators, and all metrics but `LATER`.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from grpo import ExperienceBatch, GRPOTrainer, WeightedRewards
from grpo.errors import GRPOError
from tests.support import checkpoint_runs
from tests.support.policies import digest, weights_of
from tests.unit import test_every_setting_has_an_effect as settings

ROOT = Path(__file__).parents[2]
LATER = ("time/", "train/zero_gradients")
"""Metrics that are left out: times, and what earlier commits do not measure."""


def digest_of(trainer: Any, error: str) -> str:
    """A digest of everything that a run leaves but times."""
    optimizer = trainer.optimizer if hasattr(trainer, "optimizer") else trainer.optimizer_step.optimizer
    metrics = [
        {name: metrics[name] for name in sorted(metrics) if not name.startswith(LATER)} for metrics in trainer.history
    ]
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    return digest(weights_of(trainer.policy), optimizer.state_dict(), *generators, metrics, trainer.iteration, error)


def setting_runs() -> Iterator[tuple[str, Any, settings.Scene]]:
    """The name, the settings and the conditions of each run. Runs that several cases share occur once."""
    seen = set()
    for kind, cases in settings.CASES.items():
        for name, case in cases.items():
            shared, changed, scene = case if isinstance(case, tuple) else _parts(name, settings.case_of(kind, name))
            for values in (shared, shared | changed):
                config = settings.config_with(kind, values, scene)
                if (config, scene) not in seen:
                    seen.add((config, scene))
                    yield f"{kind.__name__}.{name} {values}", config, scene


def _parts(name: str, case: Any) -> tuple[dict[str, Any], dict[str, Any], settings.Scene]:
    """What commits up to 050f06f7 write as a case."""
    return case.shared, {name: case.value}, case.scene


def digest_of_setting(config: Any, scene: settings.Scene) -> str:
    """The digest of two iterations with these settings."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"max_steps": 3, "dtype": torch.float32 if scene.float32 else torch.float64}
    policy, reference = scene.policy(**options), scene.policy(**options)
    if scene.nan_gradients:
        policy.head.weight.register_hook(lambda gradient: gradient * float("nan"))
    rewards: Any = settings.Rewards(scene)
    if scene.one_part:
        rewards = WeightedRewards({"ones": rewards})
    if scene.several_rewards:
        rewards = WeightedRewards({"ones": rewards, "lengths": settings.lengths})
    if scene.awaited:
        awaited = settings.Awaited()
        rewards = WeightedRewards({"one": awaited, "two": awaited})
    # commits up to 9300cf4 read the module's sleep
    with mock.patch.object(time, "sleep"), mock.patch.object(torch, "compile", lambda function: function):
        try:
            trainer = GRPOTrainer(config=config, policy=policy, reward_model=rewards, reference_policy=reference)
        except GRPOError as refused:
            return type(refused).__name__
        if hasattr(trainer.collector, "ask_for_rewards"):
            trainer.collector.ask_for_rewards.sleep = lambda *_: None
        error = ""
        try:
            given = {}
            if getattr(scene, "demonstrations", False):
                given["demonstrations"] = ExperienceBatch.from_demonstrations([0, 1], [(1, 2), (2,)])
            trainer.train([0, 1, 2, 3], num_iterations=2, progress=False, **given)
        except GRPOError as raised:
            error = type(raised).__name__
    return digest_of(trainer, error)


def all_digests() -> dict[str, str]:
    """The digest of each run, by its name."""
    found = {name: digest_of_setting(config, scene) for name, config, scene in setting_runs()}
    for case in checkpoint_runs.CASES:
        trainer, states, options = checkpoint_runs.built(case, 1)
        trainer.train(states, num_iterations=4, **options)
        found[f"run: {case}"] = digest_of(trainer, "")
    return found


def digests_at(commit: str) -> Mapping[str, str]:
    """The digests that another commit gives, with this file."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        subprocess.run(["git", "worktree", "add", "--detach", "--quiet", tree, commit], cwd=ROOT, check=True)
        try:
            (tree / "tests/support" / Path(__file__).name).write_text(Path(__file__).read_text())
            command = [sys.executable, "-m", "tests.support.run_digests"]
            environment = {**os.environ, "PYTHONPATH": str(tree)}
            printed = subprocess.run(command, cwd=tree, env=environment, check=True, capture_output=True, text=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
    found: Mapping[str, str] = json.loads(printed.stdout)
    return found


def main() -> None:
    """Print the digests, or the runs that differ from another commit's."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", metavar="COMMIT", help="the commit to compare with")
    commit = parser.parse_args().against
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found = all_digests()
    if commit is None:
        print(json.dumps(found, indent=1))
        return
    expected = digests_at(commit)
    common = [name for name in expected if name in found]
    differing = [name for name in common if found[name] != expected[name]]
    print(
        f"{len(common)} runs compared with {commit}, {len(set(expected) ^ set(found))} not in both; differing: {differing}"
    )
    sys.exit(bool(differing) or not common)


if __name__ == "__main__":
    main()
