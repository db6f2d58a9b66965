"""The network of a policy, its distribution of calls (a tool, then a value for each enumerated parameter), and its calibration.

Axes: those of `menu.py`, and as in `grpo` B states, N rows. In addition F features of a state, D of a text.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor, nn

from adapters.tools.catalogue.calls import ToolCall
from grpo.errors import ConfigError
from grpo.types import ActionScores

SIMILARITY_GAIN = 20.0
"""Factor of the weight s in the tool logits. Similarities are small: without the factor, Adam would change s too slowly."""

EVIDENCE_GAIN = 4.0
"""Factor of the weights t1 and t2 in the tool logits, for the same reason."""

CONTAINED = 4.0
"""Bonus in the logit of a value that the request contains. It is not trained: as a weight it grew to 12, and then a value that
the request only mentions won against the value that is meant."""

ROWS_AT_ONCE = 4
"""Rows are padded to a multiple of this number, because a CPU sums a matrix product of 1 to 3 rows in another order."""

Calls: TypeAlias = tuple[Int64[Tensor, " N"], Int64[Tensor, "N T"]]
"""The state and the steps of each call."""

CONFIDENCE_TEMPERATURE = 3.0
"""Temperature of confidences. Training makes probabilities extreme; at this temperature, confidences separate requests without
a right tool better (on BFCL, AUROC 0.94 instead of 0.91). The order of the tools is that of pi."""


class ToolNetwork(nn.Module):
    """See `ToolSelectionPolicy` for the formula, `num_features` and `hidden`. `num_text_features` is D."""

    def __init__(self, num_features: int | None, num_text_features: int, hidden: Sequence[int]) -> None:
        super().__init__()
        widths = [num_text_features if num_features is None else num_features, *hidden]
        self.body = nn.Sequential(*(layer for a, b in pairwise(widths) for layer in (nn.Linear(a, b), nn.Tanh())))
        self.tool_query = nn.Linear(widths[-1], num_text_features)
        self.value_query = nn.Linear(widths[-1], num_text_features)
        for weight in (*self.tool_query.parameters(), *self.value_query.parameters()):
            nn.init.zeros_(weight)
        # 1/2 and not 0: an untrained policy is useful; at 1, rewards against a description are found late
        self.similarity = nn.Parameter(torch.tensor([0.5, 0.0])) if num_features is None else None
        self.evidence = nn.Parameter(torch.tensor([0.5, 0.15])) if num_features is None else None

    def forward(
        self,
        vectors: Float[Tensor, "B F"],
        tools: Float[Tensor, "K D"],
        values: Float[Tensor, "C D"],
        evidence: tuple[Float[Tensor, "B K"], Float[Tensor, "B K"], Float[Tensor, "B C"]] | None = None,
    ) -> tuple[Float[Tensor, "B K"], Float[Tensor, "B C"]]:
        """Logits of all tools and of all values, both at least in float32."""
        num_states = len(vectors)
        vectors = nn.functional.pad(vectors, (0, 0, 0, -num_states % ROWS_AT_ONCE))
        hidden = self.body(vectors)
        tool_query, value_query = self.tool_query(hidden), self.value_query(hidden)
        if self.similarity is not None:
            tool_query = tool_query + SIMILARITY_GAIN * self.similarity[0] * vectors
            value_query = value_query + self.similarity[1] * vectors
        # bfloat16 has only 3 digits, and float16 cannot represent values below -65504.
        wide = torch.promote_types(vectors.dtype, torch.float32)
        of_tools = (tool_query @ tools.T)[:num_states].to(wide)
        of_values = (value_query @ values.T)[:num_states].to(wide)
        if evidence is not None and self.evidence is not None:
            weights = EVIDENCE_GAIN * self.evidence.to(wide)
            named, filled, contained = (each.to(of_tools) for each in evidence)
            of_tools = of_tools + weights[0] * named + weights[1] * filled
            of_values = of_values + CONTAINED * contained
        return of_tools, of_values


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A call that a policy proposes."""

    call: ToolCall
    """The tool, with its most likely parameter values."""
    confidence: float
    """Confidence in the tool, from 0 to 1: softmax(logits / 3), where pi(tool | state) is softmax(logits)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDistribution:
    """pi(call | state) for B states. Steps are those of a `Menu`: a tool, then its values, then -1."""

    tools: Float[Tensor, "B K"]
    """log pi(tool | state)."""
    values: Float[Tensor, "B C"]
    """Logits of all value texts."""
    places: Int64[Tensor, "K J V"]
    """Index into the value texts of each value of each tool, and -1 at padding."""

    @property
    def confidences(self) -> Float[Tensor, "B K"]:
        """softmax(logits / 3) of the tools, where pi is softmax(logits)."""
        return (self.tools / CONFIDENCE_TEMPERATURE).softmax(1)

    def draw(self, num_calls: int, generator: torch.Generator | None) -> Calls:
        """Draw calls for each state."""
        tools = torch.multinomial(self.tools.exp(), num_calls, replacement=True, generator=generator)
        return self._calls(tools, lambda log_probs: torch.multinomial(log_probs.exp(), 1, generator=generator))

    def best(self, num_tools: int) -> tuple[Calls, Float[Tensor, "B G"]]:
        """The most likely tools of each state, with their most likely values, and the confidences."""
        found = self.confidences.topk(num_tools, dim=1)
        return self._calls(found.indices, lambda log_probs: log_probs.argmax(1)), found.values

    def score(self, rows: Int64[Tensor, " N"], steps: Int64[Tensor, "N T"]) -> ActionScores:
        """Log-probs and exact entropy of each step of calls in the states `rows`. Steps of -1 are masked."""
        rows, steps = rows.to(self.tools.device), steps.to(self.tools.device)
        of_values, mask = self._of_values(rows, steps[:, 0]), steps >= 0
        log_probs, entropy = [self.tools[rows, steps[:, 0]].unsqueeze(1)], [_entropy(self.tools)[rows].unsqueeze(1)]
        if of_values.shape[1]:
            later = of_values.gather(2, steps[:, 1:].clamp(min=0).unsqueeze(2)).squeeze(2)
            log_probs.append(later.where(mask[:, 1:], 0.0))
            entropy.append(_entropy(of_values).where(mask[:, 1:], 0.0))
        return ActionScores(log_probs=torch.cat(log_probs, dim=1), mask=mask, entropy=torch.cat(entropy, dim=1))

    def _calls(self, tools: Int64[Tensor, "B G"], pick: Callable[[Tensor], Tensor]) -> Calls:
        """Calls of `tools`, with values that `pick` takes from rows of log-probs."""
        rows = torch.arange(len(tools), device=tools.device).repeat_interleave(tools.shape[1])
        tools = tools.flatten()
        of_values = self._of_values(rows, tools)
        exists = (self.places[tools] >= 0).any(2)[:, : of_values.shape[1]]
        chosen = pick(of_values.flatten(0, 1)).view_as(exists) if of_values.numel() else exists.long()
        return rows, torch.cat([tools.unsqueeze(1), chosen.where(exists, -1)], dim=1)

    def _of_values(self, rows: Int64[Tensor, " N"], tools: Int64[Tensor, " N"]) -> Float[Tensor, "N J V"]:
        """log pi(value | state, tool) for each parameter of each row's tool, and almost -inf at padding."""
        places = self.places[tools]
        places = places[:, : int((places >= 0).any(2).sum(1).max()) if len(tools) else 0]
        logits = self.values[rows.view(-1, 1, 1), places.clamp(min=0)]
        return logits.masked_fill(places < 0, torch.finfo(logits.dtype).min).log_softmax(2)


def _entropy(log_probs: Float[Tensor, "*rows K"]) -> Float[Tensor, "*rows"]:
    """H = - sum p log p, in nats, exact and differentiable. A choice with probability 0 adds 0."""
    # Without the clamp, at p = 0 a log-prob of almost -inf times a gradient above 1 is -inf, and -inf times p is NaN.
    return -torch.linalg.vecdot(log_probs.exp(), log_probs.clamp(min=-1000.0))


def offset_of_added(logits: Float[Tensor, "B K"], is_added: Bool[Tensor, " K"], share: float) -> float:
    """The number to add to the logits of all added tools, so that they win the given share of requests of known tools.

    It is the `share`-quantile over the requests of (max over known tools of the logit - max over added tools of the logit).
    It is needed because training raises the logits of known tools for all requests.
    """
    if len(logits) == 0 or not 0 <= share <= 1 or bool(is_added.all()) or not bool(is_added.any()):
        raise ConfigError(
            "ToolSelectionPolicy.calibrate needs states, a share from 0 to 1, and both added and other tools; got "
            f"{len(logits)} states, share={share}, {int(is_added.sum())} added and {int((~is_added).sum())} other tools."
        )
    gap = logits[:, ~is_added].amax(1) - logits[:, is_added].amax(1)
    return float(gap.double().quantile(share))
