"""The memory of long runs does not grow, and memory may run out in any pass of a run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.test_memory import growth_of
from tests.support.adapter_runs import RUNS
from tests.support.agent_soak import soak
from tests.support.out_of_memory import SmallMemory, limit_updates, sampled_rows
from tests.support.sgd_runs import run_with_sgd

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]
Record = Callable[[str, object], None]
NUM_ITERATIONS = 10
CLIENTS = ["httpx", "openai", "openai, async", "pydantic-ai", "openai, parallel", "pydantic-ai, parallel"]
"""Clients of the benchmark that the daily environment has. The parallel ones make four requests at a time."""


@pytest.mark.parametrize("client", CLIENTS)
def test_a_thousand_conversations_leave_no_file_open(client: str, record_property: Record) -> None:
    """At most 20 are open after any of 20 rounds, and ten rounds need at most 10 MB more, and 5 MB more of what is in use."""
    num_files, growth, in_use = soak(client, 1000)
    record_property(client, f"{num_files} open files, {growth:+} MB, {in_use:+} MB in use")
    assert num_files <= 20
    assert growth <= 10
    assert in_use <= 5


@pytest.mark.parametrize("name", RUNS)
def test_the_second_500_iterations_need_at_most_5_mb_more(name: str, tmp_path: Path, record_property: Record) -> None:
    growth = growth_of(name, 1000, tmp_path / "run")
    record_property(name, f"{growth:+.1f} MB")
    assert growth <= 5.0


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
