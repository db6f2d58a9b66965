"""Memory that runs out in any pass of a run of any adapter."""

from typing import Any

import pytest
import torch

from tests.support.adapter_runs import RUNS
from tests.support.out_of_memory import SmallMemory, limit_updates, sampled_rows
from tests.support.sgd_runs import run_with_sgd

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]
NUM_ITERATIONS = 10


@pytest.mark.parametrize("name", RUNS)
def test_every_pass_of_an_update_can_run_out_of_memory(name: str, subtests: pytest.Subtests) -> None:
    def trained(**memory: Any) -> tuple[Any, SmallMemory, float]:
        trainer, states, options = run_with_sgd(name)
        limit = limit_updates(trainer, SmallMemory(**memory))
        history = trainer.train(states, num_iterations=NUM_ITERATIONS, **options)
        return trainer, limit, sum(metrics["train/out_of_memory"] for metrics in history)

    expected, unlimited, _ = trained()
    for failing in range(1, len(unlimited.sizes) + 1):
        if unlimited.sizes[failing - 1] == 1:
            continue
        with subtests.test(failing=failing):
            trainer, _, count = trained(fails_at=[failing])
            assert count == 1.0
            found, wanted = (run.optimizer.gradients for run in (trainer, expected))
            assert len(found) == len(wanted)
            for one, other in zip(found, wanted, strict=True):
                assert float((one - other).norm()) <= 1e-3 * float(other.norm())


@pytest.mark.parametrize("name", RUNS)
def test_every_call_of_the_sampler_can_run_out_of_memory(name: str, subtests: pytest.Subtests) -> None:
    for failing in range(1, NUM_ITERATIONS + 1):
        for deeper in (False, True):
            with subtests.test(failing=failing, deeper=deeper):
                trainer, states, options = run_with_sgd(name)
                memory = SmallMemory(fails_at=[failing, failing + 1] if deeper else [failing])
                memory.used_by(trainer.policy, "sample_actions", sampled_rows)
                history = trainer.train(states, num_iterations=NUM_ITERATIONS, **options)
                assert sum(metrics["train/out_of_memory"] for metrics in history) == 1.0 + deeper
                num_groups = {metrics["group_stats/num_groups"] for metrics in history}
                assert len(num_groups) == 1
                assert {metrics["group_stats/avg_group_size"] for metrics in history} == {6.0}
                assert all(torch.isfinite(weight).all() for weight in trainer.policy.get_parameters().values())
