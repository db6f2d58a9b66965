"""The learning rate of a run: it warms up, and then stays or falls."""

from typing import Any

from grpo.config import GRPOConfig


def set_learning_rate(optimizer: Any, config: GRPOConfig, done: float, size: float, total: int) -> None:
    """Set every learning rate for an iteration of `size` that begins after `done` of `total`, as the schedule says."""
    if optimizer is None or (config.lr_schedule == "constant" and config.warmup_ratio == 0):
        return
    factor = config.learning_rate_factor(done, total, size)
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
