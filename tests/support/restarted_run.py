"""A run on ranks that divide the weights. One of them may kill itself, once.

    torchrun --nproc-per-node 2 --max-restarts 2 -m tests.support.restarted_run FOLDER KILL_AT

The last rank kills itself in the reward of iteration KILL_AT of the first start; 0 means never. At the end, rank 0 writes
the SHA-256 of the whole weights and of the optimizer's tensors to `FOLDER/hashes.json`.
"""

import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from grpo import GRPOConfig, GRPOTrainer
from grpo.distributed import Sharded
from tests.support.layered import Layered
from tests.support.tensor_hashes import hashes_of

NUM_ITERATIONS = 6


def main(folder: Path, kill_at: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    engine = Sharded(timeout=20.0)
    num_calls = 0

    def reward(states: Any, actions: Any) -> list[float]:
        nonlocal num_calls
        num_calls += 1
        is_victim = engine.rank == engine.num_ranks - 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
        if is_victim and num_calls == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return [float(action == 2) + random.random() for action in actions]

    config = GRPOConfig(group_size=4, batch_size=4, num_epochs_per_update=2, num_states_per_iteration=4, seed=5)
    trainer = GRPOTrainer(config=config, policy=Layered(), reward_model=reward, engine=engine)
    options: dict[str, Any] = {"checkpoint_every": 1, "resume": "auto", "progress": False}
    trainer.train(list(range(7)), num_iterations=NUM_ITERATIONS, checkpoint_dir=folder / "checkpoints", **options)
    found = hashes_of(trainer)
    if engine.rank == 0:
        restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        (folder / "hashes.json").write_text(json.dumps({"hashes": found, "restarts": restarts}))
    engine.agree()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
