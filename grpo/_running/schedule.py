"""The learning rate of a run: it warms up, and then stays or falls."""

import math
from typing import Any

from grpo.config import GRPOConfig


def set_learning_rate(optimizer: Any, config: GRPOConfig, position: int, num_iterations: int) -> None:
    """Set every learning rate for iteration `position` (from 0) of a run, if the settings have a schedule.

    The learning rate rises linearly over `warmup_ratio` of the run. Then it stays, or falls to 0 (linear or cosine).
    """
    kind, warmup_ratio = config.lr_schedule, config.warmup_ratio
    if optimizer is None or (kind == "constant" and warmup_ratio == 0):
        return
    num_warmup = math.ceil(warmup_ratio * num_iterations)
    progress = (position - num_warmup) / max(num_iterations - num_warmup, 1)
    factors = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}
    factor = (position + 1) / num_warmup if position < num_warmup else factors[kind]
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
