"""A check that the log-probs of sampled actions are not probabilities."""

from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

from grpo.errors import ContractError


def refuse_probabilities(behaviour: Float[Tensor, " S"], actions: Any) -> None:
    """Raise a `ContractError` if the log-probs of all sampled steps are from 0 to 1, as probabilities are.

    Densities of real numbers may exceed 1, so the log-probs of real-valued actions may be from 0 to 1.
    """
    known = behaviour.detach()[~behaviour.isnan()]
    if not known.numel() or _is_real(actions[0]):
        return
    least, largest = known.aminmax()
    if 1e-5 < largest <= 1 and least >= 0:
        raise ContractError(
            f"update: behaviour_log_probs of actions that have probabilities must be at most 0; got {least:.3g} to "
            f"{largest:.3g}. Pass log-probabilities: probabilities.log()."
        )


def _is_real(action: Any) -> bool:
    """Whether an action has a real number."""
    if isinstance(action, Tensor | np.ndarray):
        return "float" in str(action.dtype)
    return isinstance(action, float | np.floating) or (isinstance(action, list | tuple) and any(map(_is_real, action)))
