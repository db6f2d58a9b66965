"""A check that the first update starts from the distribution that its rows were scored with: the ratio is 1."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from grpo.errors import warn_user
from grpo.types import ObjectiveInputs, zero_outside

TOLERANCE = 0.05
"""Largest change of a log-prob that counts as rounding, which half precision can reach."""


def warns_of_ratio(policy: Any, inputs: ObjectiveInputs) -> bool:
    """Warn, and return True, if log-probs before the first update differ from the log-probs at collection."""
    assert inputs.old_log_probs is not None
    now, old = (zero_outside(values.detach(), inputs.mask) for values in (inputs.log_probs, inputs.old_log_probs))
    # float32 rounds large log-probs by 1e-7 of their size
    if torch.allclose(now, old.to(now.dtype), atol=TOLERANCE, rtol=1e-6):
        return False
    change = (now - old).abs().max().item()
    random = list(random_parts(policy))
    if random:
        listed = ", ".join(random[:3]) + (f" and {len(random) - 3} more" if len(random) > 3 else "")
        cause = f"Dropout is on in train(): set it to 0 ({listed})."
    else:
        cause = (
            "Dropout, batch normalisation or random numbers are on in train(), or sample_actions() returns other scores than "
            "score_actions(). Set dropout to 0, and score actions in the same way every time."
        )
    warn_user(
        f"{type(policy).__name__}: before any update, log-probabilities must be the same in train() and eval(); they differ "
        f"by up to {change:.2g}, so the first ratio is not 1. {cause}"
    )
    return True


def random_parts(policy: Any) -> Iterator[str]:
    """Name each dropout rate above 0: of dropout modules, and of other modules, such as `nn.LSTM.dropout`.

    A policy is a module itself, or holds modules in its attributes.
    """
    held = {"": policy} if isinstance(policy, nn.Module) else getattr(policy, "__dict__", {})
    roots = [(name, value) for name, value in held.items() if isinstance(value, nn.Module)]
    for name, module in (pair for prefix, root in roots for pair in root.named_modules(prefix=prefix)):
        for key, value in vars(module).items():
            is_rate = "drop" in key or (key == "p" and isinstance(module, nn.modules.dropout._DropoutNd))
            if is_rate and isinstance(value, float) and value > 0:
                yield f"{name}.{key}={value:g}".removeprefix(".")
