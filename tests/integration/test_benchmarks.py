"""Benchmarks run, and what they compare is the same. How fast is for a person to read, not for a test."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import control_speed
from benchmarks._memory import peak_extra_memory
from benchmarks.objective import CASES, HAS_TRL, INSTALL, TOLERANCE, Batch, largest_difference, our_run, their_run
from benchmarks.overhead import check_same

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("by_group", [False, True])
def test_the_hand_written_loop_does_the_same_mathematics(by_group: bool) -> None:
    assert check_same(by_group) < 1e-9


def test_the_overhead_benchmark_prints_a_ratio_for_each_size() -> None:
    command = [sys.executable, "-W", "error", "-m", "benchmarks.overhead", "--rows", "64", "128", "--repeats", "3"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert printed.count("ratio") == 4
    assert printed.count("state once per group") == 2


def test_peak_memory_counts_what_is_freed_again_and_temporaries_of_an_operation() -> None:
    """Of four float32 tensors of 1000 in a row two exist at once; a sum in float64 copies its operand first."""
    values = torch.ones(1000)
    assert peak_extra_memory(lambda: values.neg()) == 4000
    assert peak_extra_memory(lambda: values.neg().neg().neg().neg()) == 8000
    assert peak_extra_memory(lambda: values.sum(dtype=torch.float64)) >= 8000


@pytest.mark.skipif(not HAS_TRL, reason=f"TRL is {INSTALL}")
@pytest.mark.parametrize("name", CASES)
def test_the_objective_and_trl_compute_the_same(name: str) -> None:
    torch.manual_seed(0)
    batch = Batch.random(64, 32, "cpu")
    assert largest_difference(our_run(batch, CASES[name]), their_run(batch, CASES[name])) < TOLERANCE


def test_the_objective_benchmark_prints_a_line_for_each_comparison() -> None:
    size = ["--rows", "64", "--steps", "32", "--repeats", "3"]
    command = [sys.executable, "-W", "error", "-m", "benchmarks.objective", *size]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert printed.count(" : floor") == len(CASES)
    assert printed.count(" : TRL") == (len(CASES) if HAS_TRL else 0)
    assert (INSTALL in printed) != HAS_TRL


@pytest.mark.skipif(not HAS_TRL, reason=f"TRL is {INSTALL}")
def test_the_language_model_benchmark_times_both_and_the_bare_loop() -> None:
    command = [sys.executable, "-m", "benchmarks.llm_vs_trl", "--cases", "tiny", "--pairs", "1", "--skip-memory"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "prompt 8, completion 4, group 2, 4 rows" in printed
    assert printed.count(" x (") == 2  # against TRL, against the bare loop


def test_the_control_benchmark_prints_a_line_for_each_comparison() -> None:
    command = [sys.executable, "-W", "error", "-m", "benchmarks.control_speed", "--quick"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    has_sb3, has_mujoco = control_speed.HAS_SB3, control_speed.HAS_MUJOCO
    assert printed.count("CartPole, training : ") == 1 + has_sb3
    assert printed.count("HalfCheetah, training : ") == (has_sb3 and has_mujoco)
    assert printed.count("HalfCheetah, rollout of 16 : ") == has_mujoco
    assert (printed.count(" : bare loop"), printed.count(" : bare pool")) == (2, 1)
    assert printed.count("CartPole until 475, ") == 2 * has_sb3
    assert (control_speed.INSTALL in printed) != (has_sb3 and has_mujoco)


def test_an_evaluation_is_the_mean_length_of_twenty_episodes() -> None:
    """Pushing left always ends within a dozen steps; pushing towards where the pole falls lasts to the end."""
    pool = control_speed.make_pool(control_speed.CARTPOLE, control_speed.NUM_EVAL_EPISODES)
    assert not control_speed.is_learned(pool, _Rule(lambda seen: 0 * seen[:, 0]))
    assert control_speed.is_learned(pool, _Rule(lambda seen: seen @ [0.0, 0.1, 1.0, 0.5] > 0))


class _Rule:
    """Acts as Stable-Baselines3's learners are asked to, by a rule instead of a network."""

    def __init__(self, rule: Callable[[np.ndarray], np.ndarray]) -> None:
        self.rule = rule

    def predict(self, observations: np.ndarray, *, deterministic: bool) -> tuple[np.ndarray, None]:
        return self.rule(observations).astype(np.int64), None
