"""Peak memory of saving and loading, in a process of its own: a checkpoint is never in memory a second time."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PRELUDE = """
    import gc, json, sys
    from pathlib import Path
    import torch

    folder, size = Path(sys.argv[1]), 96 * 2**20

    def peak_of(call):
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is in use
        before = status("VmRSS")
        call()
        return (status("VmHWM") - before) * 1024 / size

    def status(name):
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(name))
"""
CHECKPOINT = """
    from grpo.checkpoint import load_weights, read_checkpoint, write_checkpoint

    class Policy:
        def __init__(self, weights):
            self.weights = weights
        def get_parameters(self):
            return self.weights

    def state():
        third = torch.randn(size // 12)
        weights = {"a": third.requires_grad_()}
        return {"parameters": weights, "moments": [torch.randn(2, size // 24).t(), torch.randn(size // 12)]}

    read_checkpoint(write_checkpoint(folder / "small", {"x": torch.ones(2_000_000)}, iteration=1))
    measured, kept = {}, state()
    measured["save"] = peak_of(lambda: write_checkpoint(folder / "large", kept, iteration=1))
    policy = Policy({"a": torch.zeros(size // 12)})
    measured["load_weights"] = peak_of(lambda: load_weights(folder / "large", policy))
    assert torch.equal(policy.weights["a"], kept["parameters"]["a"])
    del kept, policy
    measured["load"] = peak_of(lambda: read_checkpoint(folder / "large"))
    print(json.dumps(measured))
"""
TRAINER = """
    from grpo import GRPOConfig, GRPOTrainer
    from tests.support.policies import TablePolicy

    class Large(TablePolicy):
        def __init__(self):
            super().__init__(dtype=torch.float32)
            self.more = torch.nn.ParameterList(torch.randn(size // 48) for _ in range(4))
        def get_log_probabilities(self, states, actions):
            return super().get_log_probabilities(states, actions) + 1e-9 * sum(value.mean() for value in self.more)

    def trainer():
        return GRPOTrainer(config=GRPOConfig(), policy=Large(), reward_model=lambda states, actions: list(map(float, actions)))

    used, measured = trainer(), {}
    used.step(["a", "b"])
    measured["save"] = peak_of(lambda: used.save_checkpoint(folder / "large"))
    measured["size"] = (folder / "large" / "rank-0" / "tensors.safetensors").stat().st_size / size
    measured["load after training"] = peak_of(lambda: used.load_checkpoint(folder / "large"))
    del used
    fresh = trainer()
    measured["load"] = peak_of(lambda: fresh.load_checkpoint(folder / "large"))
    print(json.dumps(measured))
"""


def measured_by(script: str, folder: Path) -> dict[str, float]:
    """What a script prints, which measures in a process of its own."""
    command = [sys.executable, "-c", textwrap.dedent(PRELUDE) + textwrap.dedent(script), str(folder)]
    # the allocator returns large blocks when they are freed, so that a later call cannot take memory of an earlier one
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
    result = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    measured: dict[str, float] = json.loads(result.stdout)
    return measured


needs_linux = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="only Linux tells the peak of a part of a program"
)


@pytest.mark.slow
@needs_linux
def test_saving_adds_at_most_a_fifth_and_loading_at_most_one_and_a_fifth(tmp_path: Path) -> None:
    measured = measured_by(CHECKPOINT, tmp_path)
    assert measured["save"] <= 0.2, measured
    assert 0.7 <= measured["load"] <= 1.2, measured  # less would say that nothing was measured
    assert 0.3 <= measured["load_weights"] <= 0.5, measured  # the weights are a third


@pytest.mark.slow
@needs_linux
def test_a_trainer_with_adamw_needs_no_more(tmp_path: Path) -> None:
    measured = measured_by(TRAINER, tmp_path)
    assert 0.99 <= measured["size"] <= 1.01, measured  # the weights, which are also the policy's state, and two moments
    assert measured["save"] <= 0.2, measured
    assert 0.7 <= measured["load"] <= 1.2, measured
    assert 0.7 <= measured["load after training"] <= 1.2, measured
