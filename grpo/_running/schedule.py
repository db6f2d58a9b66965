"""The learning rate of a run: it warms up, and then stays or falls."""

import math
from typing import Any

from grpo.config import GRPOConfig


def set_learning_rate(optimizer: Any, config: GRPOConfig, done: float, size: float, total: int) -> None:
    """Set every learning rate for an iteration of `size` that begins after `done` of `total`, if the settings have a schedule.

    The learning rate rises linearly over `warmup_ratio` of the run. Then it stays, or falls to 0 (linear or cosine). All
    three numbers are iterations, or what the run counts in their place, such as environment steps.
    """
    kind, warmup_ratio = config.lr_schedule, config.warmup_ratio
    if optimizer is None or (kind == "constant" and warmup_ratio == 0):
        return
    num_warmup = math.ceil(warmup_ratio * total)
    progress = min(
        (done - num_warmup) / max(total - num_warmup, 1), 1.0
    )  # iterations sampled ahead may exceed the total
    factors = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}
    factor = min((done + size) / num_warmup, 1.0) if done < num_warmup else factors[kind]
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
