"""A check of log-probs that somebody else has logged: they are no probabilities."""

import math
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from grpo.errors import ContractError


def refuse_probabilities(owner: str, behaviour: Float[Tensor, " S"], actions: Any) -> None:
    """Raise a `ContractError` if the log-probs of sampled steps are probabilities. Densities of real numbers may exceed 1."""
    largest = behaviour.detach().nan_to_num(-math.inf).amax().item() if behaviour.numel() else 0.0
    are_densities = _is_real(actions[0]) or not bool(((behaviour >= 0) & (behaviour <= 1)).all())
    if largest > 1e-5 and (_is_label(actions[0]) or not are_densities):
        raise ContractError(
            f"{owner}: behaviour_log_probs of actions that have probabilities must be at most 0; got {largest:.3g}. Pass "
            "log-probabilities: probabilities.log()."
        )


def _is_label(action: Any) -> bool:
    """Whether an action is a number of a class or a text, or several."""
    if isinstance(action, Tensor | np.ndarray):
        return str(action.dtype).removeprefix("torch.").startswith(("int", "uint", "bool"))
    if isinstance(action, list | tuple):
        return len(action) > 0 and all(map(_is_label, action))
    return isinstance(action, int | str | bytes | np.integer | np.bool_)


def _is_real(action: Any) -> bool:
    """Whether an action has a real number."""
    if isinstance(action, Tensor | np.ndarray):
        return "float" in str(action.dtype)
    return isinstance(action, float | np.floating) or (isinstance(action, list | tuple) and any(map(_is_real, action)))
