"""A check of log-probs that somebody else has logged: they are no probabilities."""

from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from grpo.errors import ContractError


def refuse_probabilities(owner: str, behaviour: Float[Tensor, " S"], actions: Any) -> None:
    """Raise a `ContractError` if the log-probs of all sampled steps are probabilities.

    Densities of real numbers may exceed 1, so their log-probs may be from 0 to 1.
    """
    known = behaviour.detach()[~behaviour.isnan()]
    if _is_real(actions[0]) or not known.numel():
        return
    least, largest = known.aminmax()
    if 1e-5 < largest <= 1 and least >= 0:
        raise ContractError(
            f"{owner}: behaviour_log_probs of actions that have probabilities must be at most 0; got {least:.3g} to "
            f"{largest:.3g}. Pass log-probabilities: probabilities.log()."
        )


def _is_real(action: Any) -> bool:
    """Whether an action has a real number."""
    if isinstance(action, Tensor | np.ndarray):
        return "float" in str(action.dtype)
    return isinstance(action, float | np.floating) or (isinstance(action, list | tuple) and any(map(_is_real, action)))
