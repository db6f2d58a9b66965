"""Learning from logs that have one decision per request, and evaluation from them, by doubly robust estimates."""

import math
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Protocol

import torch
from jaxtyping import Float64
from torch import Tensor

from adapters.tools.catalogue.calls import ToolCall
from adapters.tools.catalogue.inputs import require_whole
from adapters.tools.catalogue.tools import ToolCatalogue
from grpo.errors import ConfigError, ContractError, GRPOWarning

from .evaluation import PredictsCalls
from .records import SampleError, ToolSample
from .reward_regression import Decisions, Estimate, FitsEstimate, state_key


class LoggedRewards:
    """Rewards of any call in a logged request, estimated from logged decisions. The policy trains on them as it trains online.

        r(x, a) = mean over the n decisions (a_i, r_i) logged for x of  q(x, a) + 1[a = a_i] w_i (r_i - q(x, a_i))
        w_i     = min(1 / mu(a_i | x), max_weight)

    mu(a_i | x) is the probability with which the logging policy made decision i, exp of the sum of `ToolSample.log_prob`. The
    estimate is unbiased for every q if mu is right, every call had a chance to be logged, and no weight is cut off. A good q
    makes its variance small. q is fitted to the decisions of the other folds, so that it never sees the decision it is compared
    with. Without q it is 0: inverse propensity scoring.

    Two calls are equal if they have the same tool and the same enumerated values, because the policy decides nothing else.

    Args:
        logs: Decisions with their rewards. Keep decisions of tools that the catalogue lacks: without them, every estimate
            would be too high, because the probabilities of the other decisions would no longer add up to 1.
        catalogue: The policy's tools.
        fit: Fits q to decisions, for example `RewardRegression(catalogue, policy.encoder)`. None: q is 0.
        max_weight: Largest w. A larger value has less bias and more variance. math.inf: no bound.
        num_folds: Number of folds for q. More folds fit q to more of the decisions, and take longer.

    Raises:
        ConfigError: There is no decision, or a setting is out of range.
        SampleError: A decision has no probability, or one above 1.

    Source:
        Dudík, Langford and Li 2011, arXiv:1103.4601, eq. 5 (with q = 0: eq. 2).
    """

    def __init__(
        self,
        logs: Sequence[ToolSample],
        catalogue: ToolCatalogue,
        *,
        fit: FitsEstimate | None = None,
        max_weight: float = 30.0,
        num_folds: int = 5,
    ) -> None:
        if not max_weight >= 1:
            raise ConfigError(f"LoggedRewards.max_weight must be at least 1; got {max_weight}.")
        rows = LoggedRows(logs, catalogue, fit, num_folds)
        self.states = list(rows.states)
        """The different logged requests, to train on: `trainer.train(rewards.states)`."""
        self._rows = rows
        weights = (-rows.log_probs).exp().clamp(max=max_weight)
        residuals = weights * (rows.rewards - rows.estimates) / rows.places.bincount()[rows.places]
        self._corrections: dict[tuple[int, tuple[int, ...]], float] = defaultdict(float)
        for place, made, residual in zip(rows.places.tolist(), rows.made, residuals.tolist(), strict=True):
            if made:
                self._corrections[place, made] += residual
        self._shares = rows.fold_shares()
        # Calls of a batch are often equal, and equal to those of the batches before.
        self._known: dict[tuple[int, tuple[int, ...]], float] = {}

    def compute_rewards(self, states: Sequence[Any], actions: Sequence[ToolCall]) -> Float64[Tensor, " N"]:
        """The estimated reward of each call.

        Raises:
            ContractError: A state has no logged decision.
        """
        rows = self._rows
        keys = list(map(state_key, states))
        for key in keys:
            if key not in rows.states:
                raise ContractError(
                    f"LoggedRewards: every state must have a logged decision; {key!r:.100} has none. Train on rewards.states."
                )
        pairs = [(rows.states[key], rows.decisions.of(call)) for key, call in zip(keys, actions, strict=True)]
        new = {pair: row for row, pair in enumerate(pairs) if pair not in self._known}
        total = torch.tensor([self._corrections.get(pair, 0.0) for pair in new], dtype=torch.float64)
        asked = [states[row] for row in new.values()], [actions[row] for row in new.values()]
        for share, estimate in zip(self._shares.T, rows.fitted if new else (), strict=False):
            total += share[[place for place, _ in new]] * estimate(*asked).double()
        self._known.update(zip(new, total.tolist(), strict=True))
        return torch.tensor([self._known[pair] for pair in pairs], dtype=torch.float64)

    def train(self, *_: Any) -> "LoggedRewards":
        """Do nothing. `train`, `eval` and `to` do nothing, because the rewards are numbers on the CPU."""
        return self

    eval = to = train


class LoggedRows:
    """Logged decisions as tensors, and an estimate for each fold that is fitted to the other folds."""

    def __init__(
        self, logs: Sequence[ToolSample], catalogue: ToolCatalogue, fit: FitsEstimate | None, num_folds: int
    ) -> None:
        require_whole("num_folds", num_folds=num_folds)
        if not logs or (fit is not None and not 2 <= num_folds <= len(logs)):
            raise ConfigError(
                f"learning from logs needs a decision, and from 2 to {len(logs)} folds for an estimate; got {len(logs)} "
                f"decisions and num_folds={num_folds}."
            )
        self.decisions = Decisions(catalogue)
        keys = [state_key(row.state) for row in logs]
        self.states = {key: place for place, key in enumerate(dict.fromkeys(keys))}
        self.places = torch.tensor([self.states[key] for key in keys])
        self.made = [self.decisions.of(row.call) for row in logs]
        self.log_probs = torch.tensor([_log_prob(row) for row in logs], dtype=torch.float64)
        self.rewards = torch.tensor([row.reward for row in logs], dtype=torch.float64)
        order = torch.randperm(len(logs), generator=torch.Generator().manual_seed(0))
        self.folds = order % num_folds
        self.fitted: list[Estimate] = []
        self.estimates = torch.zeros(len(logs), dtype=torch.float64)
        """q of each logged decision, from the estimate that has not seen it. 0 without q."""
        if fit is not None:
            for fold in range(num_folds):
                is_own = self.folds == fold
                estimate = fit([*compress(logs, (~is_own).tolist())])
                own = [*compress(logs, is_own.tolist())]
                self.estimates[is_own] = estimate([row.state for row in own], [row.call for row in own]).double()
                self.fitted.append(estimate)

    def fold_shares(self) -> Float64[Tensor, "S K"]:
        """Share of each state's decisions that are in each fold."""
        counts = torch.zeros(len(self.states), int(self.folds.max()) + 1, dtype=torch.float64)
        counts.index_put_((self.places, self.folds), torch.ones(len(self.places)).double(), accumulate=True)
        return counts / counts.sum(1, keepdim=True)

    def estimates_of(self, calls: Sequence[ToolCall | None]) -> Float64[Tensor, " N"]:
        """q of one call per state, for each row of the state, from the row's own estimate. 0 for no call."""
        given = [(state, call) for state, call in zip(self.states, calls, strict=True) if call is not None]
        is_given = torch.tensor([call is not None for call in calls])
        found = torch.zeros(len(calls), len(self.fitted), dtype=torch.float64)
        for fold, estimate in enumerate(self.fitted if given else ()):
            found[is_given, fold] = estimate(*map(list, zip(*given, strict=True))).double()
        return found[self.places, self.folds]


def _log_prob(row: ToolSample) -> float:
    total = math.fsum(row.log_prob)
    if not row.log_prob or total > 1e-6 or math.exp(total) == 0.0:
        raise SampleError(
            "a logged decision must have the log-probs of its steps under the logging policy, with a probability above 0 and "
            f"at most 1; got log_prob={row.log_prob} for {row.call}. Log the probability when the decision is made."
        )
    return total


class DecidesCalls(PredictsCalls, Protocol):
    """A `ToolSelectionPolicy`, or any other policy that can be evaluated from logs."""

    catalogue: ToolCatalogue


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
        doubly_robust = _mean(rows.estimates_of(calls) + weights * (rows.rewards - rows.estimates))
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
