"""The distribution of a policy's calls: a tool, then a value for each of the tool's enumerated parameters.

Axes as in `grpo`: B states, N rows, T steps. In addition: K tools, J enumerated parameters, V values, C value texts.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from adapters.tools.catalogue.calls import ToolCall
from grpo.types import ActionScores

from .menu import Menu

CONFIDENCE_TEMPERATURE = 3.0
"""Temperature of confidences. Training makes probabilities extreme; at this temperature, confidences separate requests without
a right tool better (on BFCL, AUROC 0.94 instead of 0.91). The order of the tools is that of pi."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A call that a policy proposes."""

    call: ToolCall
    """The tool, with its most likely parameter values."""
    confidence: float
    """Confidence in the tool, from 0 to 1: softmax(logits / 3), where pi(tool | state) is softmax(logits)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDistribution:
    """pi(call | state) for B states. Steps [N, T] are the index of a tool, then the indices of its values, 0 at padding."""

    tools: Float[Tensor, "B K"]
    """log pi(tool | state)."""
    values: Float[Tensor, "B C"]
    """Logits of all value texts."""
    menu: Menu
    """The tools."""

    @property
    def confidences(self) -> Float[Tensor, "B K"]:
        """softmax(logits / 3) of the tools, where pi is softmax(logits)."""
        return (self.tools / CONFIDENCE_TEMPERATURE).softmax(1)

    def draw(
        self, num_calls: int, generator: torch.Generator | None
    ) -> tuple[Int64[Tensor, " N"], Int64[Tensor, "N T"]]:
        """Draw calls for each state. Returns the state and the steps of each call."""
        tools = torch.multinomial(self.tools.exp(), num_calls, replacement=True, generator=generator)
        rows = torch.arange(len(tools), device=tools.device).repeat_interleave(num_calls)
        of_values = self._of_values(rows, tools.flatten()).exp()
        chosen = rows.new_zeros(len(rows), 0)
        if of_values.numel():
            chosen = torch.multinomial(of_values.flatten(0, 1), 1, generator=generator).view(len(rows), -1)
        return rows, self._steps(tools.flatten(), chosen)

    def best(self, num_tools: int) -> tuple[Int64[Tensor, " N"], Int64[Tensor, "N T"], Float[Tensor, " N"]]:
        """The most likely tools of each state, with their most likely values. Returns states, steps and confidences."""
        found = self.confidences.topk(num_tools, dim=1)
        rows = torch.arange(len(self.tools), device=self.tools.device).repeat_interleave(num_tools)
        of_values = self._of_values(rows, found.indices.flatten())
        chosen = of_values.argmax(2) if of_values.numel() else rows.new_zeros(len(rows), 0)
        return rows, self._steps(found.indices.flatten(), chosen), found.values.flatten()

    def score(self, rows: Int64[Tensor, " N"], steps: Int64[Tensor, "N T"]) -> ActionScores:
        """Log-probs and exact entropy of each step of calls in the states `rows`."""
        of_values = self._of_values(rows, steps[:, 0])
        mask = self.menu.decides[steps[:, 0]][:, : 1 + of_values.shape[1]]
        log_probs = self.tools[rows, steps[:, 0]].unsqueeze(1)
        entropy = _entropy(self.tools)[rows].unsqueeze(1)
        if of_values.shape[1]:
            later = of_values.gather(2, steps[:, 1 : mask.shape[1]].unsqueeze(2)).squeeze(2)
            log_probs = torch.cat([log_probs, later.where(mask[:, 1:], 0.0)], dim=1)
            entropy = torch.cat([entropy, _entropy(of_values).where(mask[:, 1:], 0.0)], dim=1)
        return ActionScores(log_probs=log_probs, mask=mask, entropy=entropy)

    def _steps(self, tools: Int64[Tensor, " N"], chosen: Int64[Tensor, "N J"]) -> Int64[Tensor, "N T"]:
        decided = self.menu.decides[tools, 1 : 1 + chosen.shape[1]]
        return torch.cat([tools.unsqueeze(1), chosen.where(decided, 0)], dim=1)

    def _of_values(self, rows: Int64[Tensor, " N"], tools: Int64[Tensor, " N"]) -> Float[Tensor, "N J V"]:
        """log pi(value | state, tool) for each parameter of each row's tool, and almost -inf at padding."""
        width = int(self.menu.decides[tools].sum(1).max()) - 1 if len(tools) else 0
        places, exists = self.menu.values[tools][:, :width], self.menu.exists[tools][:, :width]
        logits = self.values[rows.view(-1, 1, 1), places]
        return logits.masked_fill(~exists, torch.finfo(logits.dtype).min).log_softmax(2)


def _entropy(log_probs: Float[Tensor, "*rows K"]) -> Float[Tensor, "*rows"]:
    """H = - sum p log p, in nats, exact and differentiable. A choice with probability 0 adds 0."""
    # Without the clamp, at p = 0 a log-prob of almost -inf times a gradient above 1 is -inf, and -inf times p is NaN.
    return -torch.linalg.vecdot(log_probs.exp(), log_probs.clamp(min=-1000.0))
