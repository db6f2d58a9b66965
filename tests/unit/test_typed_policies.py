"""What mypy says of a policy that is passed to a trainer: the method that is missing, and nothing of a right policy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

POLICIES = """# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code=empty-body
import torch
from torch import Tensor, nn
from adapters.bandits import SoftmaxPolicy
from grpo import GRPOConfig, GRPOTrainer, PolicyModel
class WithoutTypes(nn.Module):  # as in README
    def generate_actions(self, states, num_actions_per_state):
        return torch.zeros(len(states), num_actions_per_state)
    def get_log_probabilities(self, states, actions):
        return torch.zeros(len(states))
    def get_parameters(self):
        return dict(self.named_parameters())
class OfTensors(nn.Module):
    def generate_actions(self, states: Tensor, num_actions_per_state: int) -> Tensor: ...
    def get_log_probabilities(self, states: Tensor, actions: Tensor) -> Tensor: ...
    def get_parameters(self) -> dict[str, nn.Parameter]: ...
class OfLists:
    def generate_actions(self, states: list[str], num_actions_per_state: int, **kwargs: object) -> list[list[int]]: ...
    def get_log_probabilities(self, states: list[str], actions: list[int]) -> Tensor: ...
    def get_parameters(self) -> dict[str, Tensor]: ...
    def train(self) -> None: ...
    def eval(self) -> None: ...
    def to(self, device: str) -> None: ...
    def knows(self) -> bool: ...
class Unfinished:
    def generate_actions(self, states: list[str], num_actions_per_state: int) -> list[list[int]]: ...
    def get_parameters(self) -> dict[str, Tensor]: ...
    def train(self) -> None: ...
    def eval(self) -> None: ...
    def to(self, device: str) -> None: ...
class UnfinishedModule(nn.Module):
    def generate_actions(self, states: Tensor, num_actions_per_state: int) -> Tensor: ...
    def get_parameters(self) -> dict[str, nn.Parameter]: ...
def reward(states: list[str], actions: list[int]) -> list[float]: ...
def generic(policy: PolicyModel[str, int]) -> None:
    GRPOTrainer(config=GRPOConfig(), policy=policy, reward_model=reward)
GRPOTrainer(config=GRPOConfig(), policy=WithoutTypes(), reward_model=reward)
GRPOTrainer(config=GRPOConfig(), policy=OfTensors(), reward_model=reward)
GRPOTrainer(config=GRPOConfig(), policy=SoftmaxPolicy(num_actions=4), reward_model=reward)
GRPOTrainer(config=GRPOConfig(), policy=OfLists(), reward_model=reward).policy.knows()
"""
WRONG = """GRPOTrainer(config=GRPOConfig(), policy=Unfinished(), reward_model=reward)
GRPOTrainer(config=GRPOConfig(), policy=UnfinishedModule(), reward_model=reward)
"""


def checked(folder: Path, text: str) -> str:
    """What mypy says of a file, with the settings and the cache of `make types`."""
    path = folder / "policies.py"
    path.write_text(text, encoding="utf-8")
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", str(path)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False).stdout


@pytest.mark.slow
def test_mypy_names_the_method_that_a_policy_lacks_and_accepts_right_ones(tmp_path: Path) -> None:
    assert checked(tmp_path, POLICIES) == "Success: no issues found in 1 source file\n"
    said = checked(tmp_path, POLICIES + WRONG)
    assert said.count(": error: ") == 2, said
    first, second = said.split(": error: ")[1:]
    wanted = 'Argument "policy" to "GRPOTrainer" has incompatible type "Unfinished"; expected "AnyPolicy"  [arg-type]'
    assert first.splitlines()[0] == wanted
    assert "get_log_probabilities" in first
    assert "get_log_probabilities" in second
