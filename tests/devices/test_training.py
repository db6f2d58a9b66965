"""The objective, training, checkpoints and running out of memory on a GPU."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grpo import GRPOConfig, GRPOTrainer, ObjectiveInputs, grpo_objective, step_weights
from tests.support.configs import PRESETS as FUNCTIONS

pytestmark = pytest.mark.slow

PRESETS = {name: make() for name, make in FUNCTIONS.items()}
STATES = [[0.0, 1.0], [1.0, 0.0], [1.0, 1.0], [-1.0, 0.5]]
NUM_ACTIONS = 5


class Network(nn.Module):
    """Vectors to discrete actions. It samples on the device of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, NUM_ACTIONS))

    def _log_probs(self, states: Any) -> Tensor:
        weight = self.net[0].weight
        return self.net(torch.as_tensor(states, dtype=weight.dtype, device=weight.device)).log_softmax(1)

    def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> list[list[int]]:
        return torch.multinomial(self._log_probs(states).exp(), num_actions_per_state, replacement=True).tolist()

    def get_log_probabilities(self, states: Any, actions: Any) -> Tensor:
        log_probs = self._log_probs(states)
        return log_probs.gather(1, torch.as_tensor(actions, device=log_probs.device).unsqueeze(1)).squeeze(1)

    def get_parameters(self) -> dict[str, Tensor]:
        return dict(self.named_parameters())


class LargeNetwork(Network):
    """Each row of a forward pass with gradient occupies 16 MiB until the backward pass."""

    def _log_probs(self, states: Any) -> Tensor:
        log_probs = super()._log_probs(states)
        if not torch.is_grad_enabled():
            return log_probs
        kept = log_probs.new_zeros(len(log_probs), 2**22).requires_grad_()
        return log_probs + (kept * kept).sum(1, keepdim=True)


def sum_of_state_is_near(states: Any, actions: Any) -> list[float]:
    return [-abs(sum(state) - action) for state, action in zip(states, actions, strict=True)]


def trainer_on(device: torch.device, policy: type[Network] = Network, **settings: Any) -> GRPOTrainer:
    torch.manual_seed(0)
    config = GRPOConfig(**{"group_size": 8, "learning_rate": 0.05, "seed": 1, "device": str(device)} | settings)
    return GRPOTrainer(config=config, policy=policy(), reward_model=sum_of_state_is_near)


def weights_of(trainer: GRPOTrainer) -> list[Tensor]:
    return [value.detach().cpu() for value in trainer.policy.get_parameters().values()]


def random_inputs(num_rows: int = 64, num_steps: int = 33) -> ObjectiveInputs:
    """Ragged rows, with ratios on both sides of the usual bounds."""

    def noise() -> Tensor:
        return torch.randn(num_rows, num_steps, dtype=torch.float64)

    log_probs = -3.0 * torch.rand(num_rows, num_steps, dtype=torch.float64)
    mask = torch.arange(num_steps) < torch.randint(1, num_steps + 1, (num_rows, 1))
    return ObjectiveInputs(
        log_probs=log_probs,
        old_log_probs=log_probs + 0.2 * noise(),
        advantages=torch.randn(num_rows, dtype=torch.float64),
        mask=mask,
        weights=torch.zeros_like(log_probs),
        entropy=torch.rand(num_rows, num_steps, dtype=torch.float64),
        ref_log_probs=log_probs + 0.3 * noise(),
        behaviour_log_probs=log_probs + 0.1 * noise(),
    )


def moved(inputs: ObjectiveInputs, device: torch.device, dtype: torch.dtype) -> ObjectiveInputs:
    """The same inputs on a device; floats with another precision."""
    changes: dict[str, Any] = {}
    for field in fields(inputs):
        value = getattr(inputs, field.name)
        if isinstance(value, Tensor):
            changes[field.name] = value.to(device, dtype if value.is_floating_point() else None)
    return replace(inputs, **changes)


def loss_and_gradient(inputs: ObjectiveInputs, config: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    weights = step_weights(inputs.mask, config.aggregation, fixed_length=config.fixed_length)
    inputs = replace(inputs, log_probs=inputs.log_probs.requires_grad_(), weights=weights.to(inputs.log_probs.dtype))
    output = grpo_objective(inputs, config)
    (gradient,) = torch.autograd.grad(output.loss, inputs.log_probs)
    return output.loss.detach(), gradient, dict(output.metrics)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)])
@pytest.mark.parametrize("name", sorted(PRESETS))
def test_the_objective_and_its_gradient_equal_those_of_the_cpu(
    name: str, dtype: torch.dtype, tolerance: float, device: torch.device
) -> None:
    config = PRESETS[name].objective
    inputs = random_inputs()
    loss, gradient, metrics = loss_and_gradient(moved(inputs, torch.device("cpu"), torch.float64), config)
    found = loss_and_gradient(moved(inputs, device, dtype), config)
    assert found[0].device.type == found[1].device.type == device.type
    torch.testing.assert_close(found[0].cpu().double(), loss, rtol=tolerance, atol=tolerance)
    assert float((found[1].cpu().double() - gradient).norm() / gradient.norm()) < tolerance
    assert found[2].keys() == metrics.keys()
    for key, value in metrics.items():
        torch.testing.assert_close(found[2][key].cpu().double(), value.double(), rtol=100 * tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"batch_size": 16, "micro_batch_size": 5, "num_epochs_per_update": 2},
        {"autocast_dtype": "bfloat16"},
        {"autocast_dtype": "float16"},
        {"replay_iterations": 2, "dynamic_sampling_rounds": 1},
    ],
    ids=str,
)
def test_a_policy_is_moved_and_learns(settings: dict[str, Any], device: torch.device) -> None:
    if settings.get("autocast_dtype") == "float16" and device.type == "cpu":
        pytest.skip("float16 is for GPUs")
    trainer = trainer_on(device, learning_rate=0.02, group_size=16, **settings)
    trainer.train(STATES, num_iterations=200)
    assert {value.device.type for value in trainer.policy.get_parameters().values()} == {device.type}
    best = trainer.policy._log_probs(STATES).argmax(1).tolist()
    assert best == [1, 1, 2, 0]


@pytest.mark.parametrize("autocast_dtype", [None, "float16"])
def test_a_resumed_run_ends_with_the_weights_of_the_unbroken_one(
    autocast_dtype: Any, device: torch.device, tmp_path: Path
) -> None:
    """The generator of the GPU samples the actions, so its state has to be in the checkpoint, as have the loss scale and the
    optimizer's moments."""
    if autocast_dtype is not None and device.type == "cpu":
        pytest.skip("float16 is for GPUs")
    settings = {"autocast_dtype": autocast_dtype, "batch_size": 16}
    unbroken = trainer_on(device, **settings)
    unbroken.train(STATES, num_iterations=9)
    first = trainer_on(device, **settings)
    first.train(STATES, num_iterations=5, checkpoint_dir=tmp_path, checkpoint_every=4)
    again = trainer_on(device, **settings)
    again.train(STATES, num_iterations=9, checkpoint_dir=tmp_path, resume="auto")
    for one, other in zip(weights_of(unbroken), weights_of(again), strict=True):
        assert torch.equal(one, other)


def test_weights_of_a_gpu_are_read_on_the_cpu(device: torch.device, tmp_path: Path) -> None:
    trainer = trainer_on(device)
    trainer.train(STATES, num_iterations=2)
    path = trainer.save_checkpoint(tmp_path / "run")
    on_cpu = trainer_on(torch.device("cpu"))
    on_cpu.load_checkpoint(path)
    assert all(torch.equal(one, other) for one, other in zip(weights_of(trainer), weights_of(on_cpu), strict=True))


def test_an_update_that_does_not_fit_is_repeated_in_smaller_parts(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("the memory of a CPU has no limit that a test could set")
    weights: list[list[Tensor]] = []
    repeated: list[float] = []
    for limit in (8.0, 0.5):  # GiB, for 64 rows of 16 MiB and their gradients
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(limit * 2**30 / total)
        try:
            trainer = trainer_on(device, LargeNetwork, group_size=16)
            metrics = trainer.train(STATES, num_iterations=2)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        weights.append(weights_of(trainer))
        repeated.append(metrics[0]["train/out_of_memory"])
    assert repeated[0] == 0 < repeated[1]
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
