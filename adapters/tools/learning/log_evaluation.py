"""What a policy would earn per request, estimated from logged decisions of another policy."""

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from jaxtyping import Float64
from torch import Tensor

from adapters.tools.catalogue.calls import ToolCall
from adapters.tools.catalogue.tools import ToolCatalogue
from grpo.errors import GRPOWarning

from .logs import LoggedRows
from .records import ToolSample
from .reward_regression import FitsEstimate


class DecidesCalls(Protocol):
    """A `ToolSelectionPolicy`, or any other policy that can be evaluated from logs."""

    catalogue: ToolCatalogue

    def predict(self, states: Any) -> Sequence[ToolCall | None]:
        """Return the most likely call for each state. None: no tool."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEstimate:
    """An estimated mean reward per request."""

    value: float
    """The estimate."""
    standard_error: float
    """Its standard error, with the decisions taken as independent."""

    def __str__(self) -> str:
        return f"{self.value:.3f} +- {self.standard_error:.3f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogReport:
    """Result of `evaluate_from_logs`: what a policy would earn per request, with decision i weighted by w_i."""

    num_decisions: int
    """Number of logged decisions."""
    logged: LogEstimate
    """Mean reward of the logged decisions, which is what the logging policy earned."""
    ips: LogEstimate
    """Inverse propensity scoring: mean of w r. Unbiased, with a large variance."""
    snips: LogEstimate | None
    """Self-normalised: sum of w r / sum of w. A small bias and less variance. None: all weights are 0."""
    dr: LogEstimate | None
    """Doubly robust: mean of q(x, predict(x)) + w (r - q(x, a_i)). Unbiased, and varies less. None: there is no q."""
    effective_decisions: float
    """(sum of w)^2 / sum of w^2: the number of equally weighted decisions that would say as much about the policy."""
    mean_weight: float
    """Mean of w, about 1 if the logging policy gave every choice of the policy a fair chance. 0.7: about 30 % of the
    choices are not in the logs."""

    def __str__(self) -> str:
        names = {"logged": self.logged, "IPS": self.ips, "SNIPS": self.snips, "DR": self.dr}
        lines = [f"{name:8s}{one}" for name, one in names.items() if one is not None]
        size = f"{self.num_decisions} decisions, {self.effective_decisions:.0f} effective"
        return "\n".join([*lines, f"{size}, mean weight {self.mean_weight:.2f}"])


def evaluate_from_logs(
    policy: DecidesCalls,
    logs: Sequence[ToolSample],
    fit: FitsEstimate | None = None,
    *,
    num_folds: int = 5,
) -> LogReport:
    """Estimate what a policy would earn per request, from logged decisions of another policy. No tool is executed.

        w_i = 1[a_i = predict(x_i)] / mu(a_i | x_i)

    A request for which `predict` returns None earns 0. The estimate for a policy that was trained on the same decisions is too
    high: keep some apart.

    Args:
        policy: The policy to evaluate.
        logs: Decisions with their rewards and their log-probs under the logging policy.
        fit: Fits q, for the doubly robust estimate, as in `LoggedRewards`.
        num_folds: Number of folds for q.

    Raises:
        ConfigError: There is no decision.
        SampleError: A decision has no probability, or one above 1.

    Warns:
        GRPOWarning: The logging policy gave almost no probability to much of what the policy chooses, so the logs cannot say
            what it would earn.

    Source:
        Dudík, Langford and Li 2011, arXiv:1103.4601, eq. 2 and 5; self-normalised: Swaminathan and Joachims 2015, NeurIPS.
    """
    rows = LoggedRows(logs, policy.catalogue, fit, num_folds)
    states = list(rows.states)
    calls = policy.predict(states)
    chosen = [rows.decisions.of(call) if call is not None else () for call in calls]
    hits = [chosen[place] == made != () for place, made in zip(rows.places.tolist(), rows.made, strict=True)]
    weights = torch.tensor(hits).double() * (-rows.log_probs).exp()
    doubly_robust = None
    if fit is not None:
        doubly_robust = _mean(rows.estimates_of(calls) + weights * (rows.rewards - rows.logged_estimates()))
    report = LogReport(
        num_decisions=len(logs),
        logged=_mean(rows.rewards),
        ips=_mean(weights * rows.rewards),
        snips=_self_normalised(weights, rows.rewards),
        dr=doubly_robust,
        effective_decisions=(weights.sum().square() / weights.square().sum().clamp(min=1e-300)).item(),
        mean_weight=weights.mean().item(),
    )
    if report.mean_weight + 3 * _mean(weights).standard_error < MIN_WEIGHT:
        warnings.warn(
            f"evaluate_from_logs: the logging policy gave almost no probability to {1 - report.mean_weight:.0%} of what the "
            "policy chooses (mean weight far below 1), so the logs cannot say what these choices earn. Log more of them.",
            GRPOWarning,
            stacklevel=2,
        )
    return report


MIN_WEIGHT = 0.9
"""Mean weight below which `evaluate_from_logs` warns, with three standard errors added."""


def _mean(values: Float64[Tensor, " N"]) -> LogEstimate:
    error = values.std().item() / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return LogEstimate(value=values.mean().item(), standard_error=error)


def _self_normalised(weights: Float64[Tensor, " N"], rewards: Float64[Tensor, " N"]) -> LogEstimate | None:
    total = weights.sum()
    if total == 0:
        return None
    value = (weights * rewards).sum() / total
    error = (weights * (rewards - value)).square().sum().sqrt() / total
    return LogEstimate(value=value.item(), standard_error=error.item())
