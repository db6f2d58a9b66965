"""What each of two processes runs: everything that `test_ranks.py` looks at, written to one file per rank.

    python -m tests.support.on_each_rank FOLDER

The process imports everything once and forks the two ranks, which meet through a file in FOLDER. Nothing is judged here: a rank
that stopped at an assertion would leave the other one waiting.
"""

import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from grpo import GRPOError, RewardConfig
from grpo.distributed import Replicated
from tests.support.configs import EVERY, Done, Rows, TellingPlanned, make_policy, make_trainer, update
from tests.support.policies import RowScoring, weights_of

NUM_RANKS = 2
LONGEST_WAIT = timedelta(minutes=3)
"""The time limit of one collective. A rank that waits longer raises, and its traceback shows where it waited."""

SHARES = {
    "one group": [range(3), range(3, 15)],
    "no advantage": [range(13), range(13, 15)],
}
"""Which rows of `Rows.example` are whose: 1 group and 4, ragged; and a rank whose only group has equal rewards."""

DIFFERENT = list({repr(replace(config, learning_rate=1.0)): name for name, config in EVERY.items()}.values())
"""Configurations that differ in more than the learning rate, which the optimizer of these tests does not use."""

PATTERNS = ["dapo", "rloo", "tool_default", "kl_cov", "clip_cov", "top_entropy", "value_loss"]
"""One configuration of each pattern of collectives."""

IDLE = [*PATTERNS, "deepseek_math", "gpg", "maxrl", "reinforce_plus_plus_baseline"]
"""Configurations for a rank without an advantage: the patterns, and each way to count or scale groups of equal rewards."""


def as_dict(done: Done) -> dict[str, Any]:
    return {"gradients": done.gradients, "weights": done.weights, "metrics": done.metrics}


def updates(engine: Replicated) -> dict[str, Any]:
    """One call of `GRPOTrainer.update` for every configuration in float64, and for every pattern in float32."""
    share = SHARES["one group"][engine.rank]
    rows, single = (Rows.example(dtype).take(share) for dtype in (torch.float64, torch.float32))
    results = {(name, "float64"): as_dict(update(EVERY[name], rows, engine=engine)) for name in DIFFERENT}
    return results | {(name, "float32"): as_dict(update(EVERY[name], single, engine=engine)) for name in PATTERNS}


def without_an_advantage(engine: Replicated) -> dict[str, Any]:
    """The same where one rank has nothing to learn from, in forwards that the policy plans."""
    rows = Rows.example().take(SHARES["no advantage"][engine.rank])
    return {name: as_dict(update(EVERY[name], rows, kind=TellingPlanned, engine=engine)) for name in IDLE}


def different_numbers_of_updates(engine: Replicated) -> dict[str, Any]:
    """Updates of 4 rows: one rank has 1 per pass, the other 3."""
    results = {}
    rows = Rows.example().take(SHARES["one group"][engine.rank])
    for name in PATTERNS:
        results[name] = as_dict(update(replace(EVERY[name], batch_size=4), rows, engine=engine))
    return results


def message_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except GRPOError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def samples_without_a_seed(engine: Any) -> list[Any]:
    """What the same policy does in the same state: built as the error about unequal weights advises, without `config.seed`."""
    config = replace(EVERY["dapo"], seed=None, group_size=16)
    trainer, _ = make_trainer(config, make_policy(RowScoring), engine=engine)
    return [list(action) for action in trainer.collect([0]).actions]


def run(engine: Any, num_states: int = 5) -> dict[str, Any]:
    """Three iterations of `train`, with the states that were rewarded in each."""
    seen: list[list[int]] = []

    def reward(states: Any, actions: Any) -> list[float]:
        seen.append(list(states))
        return [float(sum(action)) for action in actions]

    policy = make_policy(RowScoring)
    config = replace(EVERY["balanced"], num_states_per_iteration=num_states, group_size=2, num_epochs_per_update=1)
    config = replace(config, objective=replace(config.objective, kl_coef=0.0))
    trainer, _ = make_trainer(config, policy, engine=engine, reward_model=reward)
    states = [0, 1, 2, 3] * 2
    message = message_of(lambda: trainer.train(states, num_iterations=3, progress=False))
    return {"seen": seen, "weights": weights_of(policy), "message": message}


def dropped(engine: Replicated) -> dict[str, float]:
    """Four rewards on each rank; one on rank 1 is not a number."""
    rewards = [[0.0, 1.0, 2.0, 3.0], [float("nan"), 1.0, 2.0, 1.5]]
    config = replace(EVERY["dapo"], group_size=4, reward=RewardConfig(non_finite="drop"))
    trainer, _ = make_trainer(
        config, make_policy(RowScoring), engine=engine, reward_model=lambda *_: rewards[engine.rank]
    )
    return trainer.step([engine.rank])


def run_with_checkpoints(engine: Replicated, folder: Path) -> str:
    trainer, _ = make_trainer(
        replace(EVERY["dapo"], num_states_per_iteration=4),
        make_policy(RowScoring),
        engine=engine,
        reward_model=lambda states, actions: [float(sum(action)) for action in actions],
    )
    try:
        trainer.train([0, 1, 2, 3], num_iterations=8, checkpoint_dir=folder, checkpoint_every=1, progress=False)
    except Exception as error:  # of any kind: what one rank raises shows on the other as anything at all
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def main(rank: int, folder: Path) -> None:
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="objective.kl_estimator='k1'")
    store = dist.FileStore(str(folder / "rendezvous"), NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS, timeout=LONGEST_WAIT)
    engine = Replicated()
    results = {
        "updates": updates(engine),
        "different numbers": different_numbers_of_updates(engine),
        "without an advantage": without_an_advantage(engine),
        "samples": samples_without_a_seed(engine),
        "dropped": dropped(engine),
        "run": run(engine),
        "too few states": run(engine, num_states=1),
    }
    torch.save(results, folder / f"rank{rank}.pt")
    dist.barrier()
    written = run_with_checkpoints(
        engine, folder / "checkpoints"
    )  # last: a rank that fails here leaves the other behind
    (folder / f"checkpoints{rank}.txt").write_text(written)


if __name__ == "__main__":
    torch.set_num_threads(1)
    # A rank that raises ends the other one; its traceback is part of the error.
    torch.multiprocessing.start_processes(main, (Path(sys.argv[1]),), nprocs=NUM_RANKS, start_method="fork")
