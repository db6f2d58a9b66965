"""A check that the first update starts from the distribution that its rows were scored with: the ratio is 1."""

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
    cause = "Set dropout to 0, use no batch statistics, and let sample_actions() return the scores of score_actions()."
    if on := dropout_of(policy):
        cause = (
            f"Dropout is on in train(): set it to 0 ({', '.join(on[:3])}{f' and {len(on) - 3} more' * (len(on) > 3)})."
        )
    warn_user(
        f"{type(policy).__name__}: before any update, log-probabilities must be the same in train() and eval(); they differ "
        f"by up to {change:.2g}, so the first ratio is not 1. {cause}"
    )
    return True


def dropout_of(policy: Any) -> list[str]:
    """The dropout modules that are not at 0, of a policy that is a module, or of the modules in its attributes."""
    held = {"": policy} if isinstance(policy, nn.Module) else getattr(policy, "__dict__", {})
    roots = [(name, value) for name, value in held.items() if isinstance(value, nn.Module)]
    modules = (pair for prefix, root in roots for pair in root.named_modules(prefix=prefix))
    return [
        f"{name}.p={one.p:g}" for name, one in modules if isinstance(one, nn.modules.dropout._DropoutNd) and one.p > 0
    ]
