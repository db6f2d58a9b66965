"""The trained part of a policy: from the vector of a state to the logits of tools and values."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor, nn

SIMILARITY_GAIN = 20.0
"""Factor of the weight s in the tool logits, where s multiplies the similarity of request and description. Similarities are
small, and without the factor Adam would change s too slowly."""

ROWS_AT_ONCE = 4
"""Rows are padded to a multiple of this number. On a CPU, a matrix product of 1 to 3 rows sums in another order
than a larger product, and would give slightly different log-probs."""


class ToolNetwork(nn.Module):
    """See `ToolSelectionPolicy` for the formula. No weight belongs to a single tool.

    Args:
        num_features: Length of the states' vectors. None: of texts, which can be compared with tools.
        num_text_features: Length of the vectors of tools and values.
        hidden: Widths of the layers of h.
    """

    def __init__(self, num_features: int | None, num_text_features: int, hidden: Sequence[int]) -> None:
        super().__init__()
        widths = [num_text_features if num_features is None else num_features, *hidden]
        layers = [[nn.Linear(a, b), nn.Tanh()] for a, b in pairwise(widths)]
        self.body = nn.Sequential(*(layer for pair in layers for layer in pair))
        self.tool_query = nn.Linear(widths[-1], num_text_features)
        self.value_query = nn.Linear(widths[-1], num_text_features)
        for weight in (*self.tool_query.parameters(), *self.value_query.parameters()):
            nn.init.zeros_(weight)
        self.similarity = nn.Parameter(torch.tensor([0.5, 0.0])) if num_features is None else None

    def forward(
        self, vectors: Float[Tensor, "B F"], tools: Float[Tensor, "K D"], values: Float[Tensor, "C D"]
    ) -> tuple[Float[Tensor, "B K"], Float[Tensor, "B C"]]:
        """Logits of all tools and of all values, both at least in float32."""
        num_states = len(vectors)
        vectors = nn.functional.pad(vectors, (0, 0, 0, -num_states % ROWS_AT_ONCE))
        hidden = self.body(vectors)
        tool_query, value_query = self.tool_query(hidden), self.value_query(hidden)
        if self.similarity is not None:
            tool_query = tool_query + SIMILARITY_GAIN * self.similarity[0] * vectors
            value_query = value_query + self.similarity[1] * vectors
        return _wide(tool_query @ tools.T)[:num_states], _wide(value_query @ values.T)[:num_states]


def _wide(logits: Float[Tensor, "B K"]) -> Float[Tensor, "B K"]:
    """Convert to float32, or keep float64: bfloat16 has only 3 digits, and float16 cannot represent values below -65504."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
