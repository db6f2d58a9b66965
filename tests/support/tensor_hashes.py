"""Hashes of the weights and of the optimizer of a trainer, whose tensors may be divided among the ranks."""

import hashlib
from typing import Any

import torch


def hash_of(value: Any) -> str:
    """The SHA-256 of a tensor. Of a divided tensor, all ranks compute it together from the whole."""
    whole = value.full_tensor() if hasattr(value, "full_tensor") else value
    return hashlib.sha256(whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def hashes_of(trainer: Any) -> dict[str, str]:
    """The SHA-256 of each weight and of each tensor of the optimizer."""
    moments = trainer.optimizer.state_dict()["state"]
    named = {f"{number} {name}": value for number, state in moments.items() for name, value in state.items()}
    return {name: hash_of(value) for name, value in {**trainer.policy.get_parameters(), **named}.items()}
