"""Memory that runs out while a policy of any adapter samples. `faults/test_out_of_memory.py` has updates."""

from typing import Any

import pytest
import torch

from grpo import ExperienceBatch
from tests.support.adapter_runs import RUNS
from tests.support.out_of_memory import SmallMemory, sampled_rows
from tests.support.sgd_runs import run_with_sgd


def test_any_adapter_samples_complete_groups_with_fewer_rows_per_call(subtests: pytest.Subtests) -> None:
    """Groups of six, in calls of at most four rows: each group comes in two calls."""
    for name in RUNS:
        with subtests.test(name=name):
            trainer, states, options = run_with_sgd(name)
            memory = SmallMemory(fits=4)
            memory.used_by(trainer.policy, "sample_actions", sampled_rows)
            batches: list[ExperienceBatch] = []
            collect = trainer.collector.collect

            def kept(states: Any, collect: Any = collect, batches: list[ExperienceBatch] = batches) -> ExperienceBatch:
                batches.append(collect(states))
                return batches[-1]

            trainer.collector.collect = kept
            (metrics,) = trainer.train(states, num_iterations=1, **options)
            assert memory.sizes[-4:] == [3, 3, 3, 3]
            assert metrics["train/out_of_memory"] >= 2.0
            (batch,) = batches
            assert batch.group_ids.bincount().unique().tolist() == [6]
            assert len(batch.states) == len(batch.actions) == batch.num_rows
            # another trainer with the same weights scores the same steps
            twin, _, _ = run_with_sgd(name)
            with torch.no_grad():
                scores = twin.policy.score_actions(batch.states, batch.actions)
            assert torch.equal(scores.mask, batch.mask[:, : scores.mask.shape[1]])
            behaviour = batch.behaviour_log_probs[:, : scores.mask.shape[1]]
            torch.testing.assert_close(scores.log_probs[scores.mask], behaviour[scores.mask], rtol=0.0, atol=1e-4)
