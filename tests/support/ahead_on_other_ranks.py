"""A run on ranks that divide the weights, with iterations sampled ahead, which another number of ranks continues.

    torchrun --nproc-per-node N -m tests.support.ahead_on_other_ranks FOLDER LAST

The run has its checkpoints in FOLDER, and stops after iteration LAST of 6. Each rank writes the states of the rows that it
rewarded for each iteration, and what was said, to `FOLDER/rank-R-of-N.json`.
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from grpo import GRPOConfig, GRPOTrainer
from grpo.distributed import Sharded
from tests.support.layered import Layered

GROUP_SIZE, NUM_STATES, NUM_ITERATIONS = 2, 4, 6


class StopAfter:
    """Stops the run, as a limit of time would."""

    def __init__(self, last: int) -> None:
        self.last = last

    def on_iteration(self, trainer: Any, metrics: Any) -> str | None:
        return "stop" if trainer.iteration == self.last else None


def made(engine: Any, seen: list[list[int]]) -> GRPOTrainer:
    """A trainer whose reward notes the states of its rows in `seen`."""

    def reward(states: Any, actions: Any) -> list[float]:
        seen.append([int(state) for state in states])
        return [float(action == 2) for action in actions]

    config = GRPOConfig(group_size=GROUP_SIZE, num_states_per_iteration=NUM_STATES, iterations_ahead=2, seed=5)
    return GRPOTrainer(config=config, policy=Layered(), reward_model=reward, engine=engine)


def main(folder: Path, last: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    engine, seen = Sharded(timeout=20.0), []
    trainer = made(engine, seen)
    options: dict[str, Any] = {
        "checkpoint_every": 1,
        "resume": "auto",
        "progress": False,
        "callbacks": [StopAfter(last)],
    }
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.train(list(range(16)), num_iterations=NUM_ITERATIONS, checkpoint_dir=folder, **options)
    found = {"states": seen, "said": [str(warning.message) for warning in said]}
    (folder / f"rank-{engine.rank}-of-{engine.num_ranks}.json").write_text(json.dumps(found))
    engine.agree()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
