"""Runs of every adapter whose gradients are recorded and compared."""

from typing import Any

import torch

from tests.support.adapter_runs import RUNS
from tests.support.policies import RecordingSGD


def run_with_sgd(name: str) -> Any:
    """The run of an adapter with plain SGD, which does not magnify rounding as Adam does; states, and options of `train`."""
    trainer, states, options = RUNS[name](0)
    trainer.optimizer_step.optimizer = RecordingSGD(trainer.policy, lr=0.01)
    if name == "llm":  # its first rewards are all equal
        trainer.advantages = lambda batch: torch.linspace(-1.0, 1.0, batch.num_rows)
    return trainer, states, {"progress": False, **options}
