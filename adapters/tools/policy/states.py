"""States as a policy reads them: a text or vector for each state, and the tools that may be chosen in it."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from adapters.tools.catalogue.calls import ToolCall
from adapters.tools.learning.tasks import ToolTask
from grpo.errors import ContractError

from .encoders import Encoder

Available = Callable[[Any], Collection[str] | None]
"""Maps a state to the names of the tools that may be chosen, or to None for all tools."""

UNAVAILABLE = -1e30
"""Log-probs below this threshold belong to unavailable tools."""


def state_text(state: Any) -> Any:
    """The text of a `ToolTask`, or the state itself (a text or a vector)."""
    return state.text if isinstance(state, ToolTask) else state


def state_vectors(
    described: Sequence[Any], num_features: int | None, encoder: Encoder, like: Tensor
) -> Float[Tensor, "B F"]:
    """Vectors of states that are texts, or that are vectors themselves, with the dtype and device of `like`.

    Raises:
        ContractError: A state is of the other kind, or a vector of another length.
    """
    if num_features is None:
        for what in described:
            if not isinstance(what, str):
                raise ContractError(
                    f"ToolSelectionPolicy: states must be texts; got {type(what).__name__}. Pass num_features=... if states "
                    "are vectors, or describe=... to convert states to texts."
                )
        return torch.as_tensor(encoder(described)).to(like)
    vectors: list[Tensor] = []
    for what in described:
        came = what if isinstance(what, str) else torch.as_tensor(what, dtype=like.dtype)
        if isinstance(came, str) or came.shape != (num_features,):
            shown = repr(came) if isinstance(came, str) else list(came.shape)
            raise ContractError(
                f"ToolSelectionPolicy: states must be vectors of num_features = {num_features}; got {shown}."
            )
        vectors.append(came)
    return torch.stack(vectors).to(like.device) if vectors else like.new_zeros(0, num_features)


def availability(available: Available, states: Any, names: Collection[str]) -> Bool[Tensor, "B K"]:
    """Whether each tool may be chosen in each state.

    Raises:
        ContractError: No tool may be chosen in a state.
    """
    rows = []
    for place, state in enumerate(states):
        allowed = available(state)
        row = [True] * len(names) if allowed is None else [name in allowed for name in names]
        if not any(row):
            raise ContractError(
                f"ToolSelectionPolicy: available(state) must name at least one tool of the catalogue; for state {place} it "
                f"named {list(allowed or ())[:9]}."
            )
        rows.append(row)
    return torch.tensor(rows, dtype=torch.bool).view(-1, len(names))


def require_available(log_probs: Float[Tensor, " N"], calls: Sequence[ToolCall]) -> None:
    """Check that the tool of each scored call may be chosen in its state.

    Raises:
        ContractError: A call has the log-prob of an unavailable tool.
    """
    unavailable = (log_probs < UNAVAILABLE).nonzero().flatten().tolist()
    if unavailable:
        row = unavailable[0]
        raise ContractError(
            f"ToolSelectionPolicy: {calls[row].tool} must be available in the state of row {row} to be scored, but "
            f"available(state) does not name it. Let available(state) name the same tools on every call."
        )
