"""Learning from logs that have one decision per state, and evaluation from them, by doubly robust estimates."""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from itertools import compress
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor

from grpo.errors import ConfigError, ContractError, warn_user
from grpo.types import Rows

from ._common.checks import require_count
from ._common.conversion import describe
from ._common.shown import show_text


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedDecision:
    """One decision of a policy in service, with its probability and its reward."""

    state: Any
    """What the logging policy saw."""
    action: Any
    """What it chose."""
    log_prob: Any
    """Log-probability of the choice under the logging policy, in nats: a number, or one for each step. Log it when the
    decision is made. It cannot be recovered later."""
    reward: float
    """What the choice earned."""


Estimate: TypeAlias = Callable[[Sequence[Any], Sequence[Any]], Any]
"""q(states, actions) -> [N], the expected reward of each action in its state: a tensor, an array or a list."""
FitsEstimate: TypeAlias = Callable[[Sequence[Any]], Estimate]
"""Fits an estimate to logged decisions."""


def key_of(value: Any) -> Hashable:
    """What equal states or actions have in common: the contents of tensors, arrays, lists, tuples, dicts and dataclasses.

    Raises:
        ContractError: The value has no hash of its own, so that no two of them would be equal.
    """
    if isinstance(value, Tensor | np.ndarray | np.generic):
        return key_of(value.tolist())
    if isinstance(value, list | tuple):
        return tuple(map(key_of, value))
    if isinstance(value, Mapping):
        return frozenset((key, key_of(each)) for key, each in value.items())
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), *(key_of(getattr(value, field.name)) for field in fields(value) if field.compare)
    own_hash: Any = type(value).__hash__
    if own_hash in (None, object.__hash__) and not isinstance(value, Enum | type | None):
        raise ContractError(
            f"learning from logs compares states and actions, and a {type(value).__name__} equals no other. Pass state_key=... "
            "or action_key=..., a function to something hashable that equal ones have in common."
        )
    key: Hashable = value
    return key


class LoggedRewards:
    """Rewards of any action in a logged state, estimated from logged decisions. A policy trains on them as it trains online.

        r(x, a) = mean over the n decisions (a_i, r_i) logged for x of  q(x, a) + 1[a = a_i] w_i (r_i - q(x, a_i))
        w_i     = min(1 / mu(a_i | x), max_weight)

    mu(a_i | x) is the probability with which the logging policy made decision i. The estimate is unbiased for every q if mu is
    right, every action had a chance to be logged, and no weight is cut off. A good q makes its variance small. q is fitted to
    the decisions of the other folds, so that it never sees the decision it is compared with. Without q it is 0: inverse
    propensity scoring.

    Args:
        logs: `LoggedDecision`s, or other objects with its attributes. Keep decisions for actions that the new policy lacks:
            without them, every estimate would be too high, because the probabilities of the other decisions would no longer
            add up to 1.
        fit: Fits q to decisions: logs -> (states, actions) -> [N]. None: q is 0.
        state_key: Maps a state to what equal states have in common, a hashable object.
        action_key: Maps an action to what the policy decides of it. Two actions with the same key are equal.
        max_weight: Largest w. A larger value has less bias and more variance. math.inf: no bound. Without `fit`, a bound makes
            rewards of rare actions too small.
        num_folds: Number of folds for q. More folds fit q to more of the decisions, and take longer.

    Raises:
        ConfigError: There is no decision, or a setting is out of range.
        ContractError: A decision has no probability, or one above 1, or a reward is not finite.

    Warns:
        GRPOWarning: Weights were cut off, and there is no `fit`. Or none of many actions equals a logged one.

    Example:
        >>> log = [LoggedDecision(state="x", action="a", log_prob=math.log(0.5), reward=1.0)]
        >>> LoggedRewards(log).compute_rewards(["x", "x"], ["a", "b"])
        tensor([2., 0.], dtype=torch.float64)

    Source:
        Dudík, Langford and Li 2011, arXiv:1103.4601, eq. 5 (with q = 0: eq. 2).
    """

    def __init__(
        self,
        logs: Iterable[Any],
        *,
        fit: FitsEstimate | None = None,
        state_key: Callable[[Any], Hashable] = key_of,
        action_key: Callable[[Any], Hashable] = key_of,
        max_weight: float = 30.0,
        num_folds: int = 5,
    ) -> None:
        if not max_weight >= 1:
            raise ConfigError(f"LoggedRewards.max_weight must be at least 1; got {max_weight}.")
        logs = list(logs)
        self._state_key, self._action_key = state_key, action_key
        self._rows = rows = _Rows(logs, fit, state_key, num_folds)
        self.states: list[Any] = rows.states
        """The different logged states, to train on: `trainer.train(rewards.states)`."""
        weights = (-rows.log_probs).exp()
        cut = (weights > 1.001 * max_weight).double().mean().item()
        if fit is None and cut > 0.001:
            warn_user(
                f"LoggedRewards: max_weight={max_weight:g} cuts off the weights of {cut:.1%} of the "
                "decisions, so the rewards of rarely logged actions are too small. Pass fit=..., or raise max_weight."
            )
        weights = weights.clamp(max=max_weight)
        residuals = weights * (rows.rewards - rows.estimates) / rows.places.bincount()[rows.places]
        self._corrections: dict[tuple[int, Hashable], float] = defaultdict(float)
        for place, row, residual in zip(rows.places.tolist(), logs, residuals.tolist(), strict=True):
            self._corrections[place, action_key(row.action)] += residual
        self._shares = rows.fold_shares()
        # Actions of a batch are often equal, and equal to those of the batches before.
        self._known: dict[tuple[int, Hashable], float] = {}
        self._num_unmatched = 0.0

    def compute_rewards(self, states: Rows, actions: Rows) -> Float64[Tensor, " N"]:
        """The estimated reward of each action.

        Raises:
            ContractError: A state has no logged decision.
        """
        rows = self._rows
        keys = list(map(self._state_key, states))
        for key in keys:
            if key not in rows.place_of:
                raise ContractError(
                    f"LoggedRewards: every state must have a logged decision; {key!r:.100} has none. Train on rewards.states."
                )
        pairs = [(rows.place_of[key], self._action_key(action)) for key, action in zip(keys, actions, strict=True)]
        new = {pair: row for row, pair in enumerate(pairs) if pair not in self._known}
        total = torch.tensor([self._corrections.get(pair, 0.0) for pair in new], dtype=torch.float64)
        self._count_unmatched(new.keys())
        asked = [states[row] for row in new.values()], [actions[row] for row in new.values()]
        for share, estimate in zip(self._shares.T, rows.fitted if new else (), strict=False):
            total += share[[place for place, _ in new]] * _estimated(estimate, *asked)
        self._known.update(zip(new, total.tolist(), strict=True))
        return torch.tensor([self._known[pair] for pair in pairs], dtype=torch.float64)

    def _count_unmatched(self, pairs: Collection[tuple[int, Hashable]]) -> None:
        """Warn once if none of the first `NUM_UNMATCHED` different actions equals a logged action of its state."""
        is_matched = any(pair in self._corrections for pair in pairs)
        self._num_unmatched += -math.inf if is_matched else len(pairs)
        if self._num_unmatched >= NUM_UNMATCHED:
            self._num_unmatched = -math.inf
            warn_user(
                f"LoggedRewards: none of the first {NUM_UNMATCHED} actions equals a logged action of its state, so the logged "
                "rewards are not used. Pass action_key=..., a function to what equal actions have in common."
            )

    def train(self, *_: Any) -> "LoggedRewards":
        """Do nothing. `train`, `eval` and `to` do nothing, because the rewards are numbers on the CPU."""
        return self

    eval = to = train


class _Rows:
    """Logged decisions as tensors, and an estimate for each fold that is fitted to the other folds."""

    def __init__(
        self,
        logs: Sequence[Any],
        fit: FitsEstimate | None,
        state_key: Callable[[Any], Hashable],
        num_folds: int,
    ) -> None:
        require_count("num_folds", num_folds)
        if not logs or (fit is not None and not 2 <= num_folds <= len(logs)):
            raise ConfigError(
                f"learning from logs needs a decision, and from 2 to {len(logs)} folds for an estimate; got {len(logs)} "
                f"decisions and num_folds={num_folds}."
            )
        state_of: dict[Hashable, Any] = {}
        keys = [state_key(row.state) for row in logs]
        for key, row in zip(keys, logs, strict=True):
            state_of.setdefault(key, row.state)
        self.states = list(state_of.values())
        self.place_of = {key: place for place, key in enumerate(state_of)}
        self.places = torch.tensor([self.place_of[key] for key in keys])
        self.log_probs = torch.tensor([_log_prob(row) for row in logs], dtype=torch.float64)
        self.rewards = torch.tensor([float(row.reward) for row in logs], dtype=torch.float64)
        if not bool(self.rewards.isfinite().all()):
            wrong = logs[int(self.rewards.isfinite().int().argmin())]
            raise ContractError(
                f"a logged decision must have a finite reward; got {wrong.reward} for {wrong.action!r:.200}."
            )
        # the order of a log is that of time, and a fold of neighbours would be a time of its own; the seed repeats the folds
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
                self.estimates[is_own] = _estimated(estimate, [row.state for row in own], [row.action for row in own])
                self.fitted.append(estimate)

    def fold_shares(self) -> Float64[Tensor, "S K"]:
        """Share of each state's decisions that are in each fold."""
        counts = torch.zeros(len(self.states), int(self.folds.max()) + 1, dtype=torch.float64)
        counts.index_put_((self.places, self.folds), torch.ones(len(self.places)).double(), accumulate=True)
        return counts / counts.sum(1, keepdim=True)

    def estimates_of(self, actions: Sequence[Any], is_given: Sequence[bool]) -> Float64[Tensor, " N"]:
        """q of one action per state, for each row of the state, from the row's own estimate. 0 where no action is given."""
        asked = [*compress(self.states, is_given)], [*compress(actions, is_given)]
        found = torch.zeros(len(actions), len(self.fitted), dtype=torch.float64)
        for fold, estimate in enumerate(self.fitted if asked[0] else ()):
            found[torch.tensor(is_given), fold] = _estimated(estimate, *asked)
        return found[self.places, self.folds]


def _estimated(estimate: Estimate, states: Sequence[Any], actions: Sequence[Any]) -> Float64[Tensor, " N"]:
    """q as a checked tensor."""
    values = torch.as_tensor(estimate(states, actions), dtype=torch.float64).detach().cpu()
    if list(values.shape) != [len(states)] or not bool(values.isfinite().all()):
        raise ContractError(
            f"an estimate that `fit` returns must give finite rewards [N] = [{len(states)}], one per action; got "
            f"{describe(values)}."
        )
    return values


def _log_prob(row: Any) -> float:
    steps = [] if row.log_prob is None else np.asarray(row.log_prob, dtype=np.float64).ravel().tolist()
    total = math.fsum(steps)
    if not steps or not total <= 1e-6 or math.exp(total) == 0.0:
        raise ContractError(
            "a logged decision must have its log-prob under the logging policy, with a probability above 0 and at most 1; got "
            f"log_prob={row.log_prob} for {row.action!r:.200}. Log the probability when the decision is made."
        )
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEstimate:
    """An estimated mean reward per state."""

    value: float
    """The estimate."""
    standard_error: float
    """Its standard error, with the decisions taken as independent."""

    def __str__(self) -> str:
        return f"{self.value:.3f} +- {self.standard_error:.3f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogReport:
    """Result of `evaluate_from_logs`: what a policy would earn per state, with decision i weighted by w_i."""

    num_decisions: int
    """Number of logged decisions."""
    logged: LogEstimate
    """Mean reward of the logged decisions, which is what the logging policy earned."""
    ips: LogEstimate
    """Inverse propensity scoring: mean of w r. Unbiased, with a large variance."""
    snips: LogEstimate | None
    """Self-normalised: sum of w r / sum of w. A small bias and less variance. None: all weights are 0."""
    dr: LogEstimate | None
    """Doubly robust: mean of q(x, choice of x) + w (r - q(x, a_i)). Unbiased, and varies less. None: there is no q."""
    effective_decisions: float
    """(sum of w)^2 / sum of w^2: the number of equally weighted decisions that would say as much about the policy."""
    mean_weight: float
    """Mean of w where the policy chooses an action, about 1 if the logging policy gave every choice of the policy a fair
    chance. 0.7: about 30 % of the choices are not in the logs."""

    _repr_pretty_ = show_text

    def __str__(self) -> str:
        names = {"logged": self.logged, "IPS": self.ips, "SNIPS": self.snips, "DR": self.dr}
        lines = [f"{name:8s}{one}" for name, one in names.items() if one is not None]
        size = f"{self.num_decisions} decisions, {self.effective_decisions:.0f} effective"
        return "\n".join([*lines, f"{size}, mean weight {self.mean_weight:.2f}"])


def evaluate_from_logs(
    choose: Callable[[list[Any]], Sequence[Any]],
    logs: Iterable[Any],
    *,
    fit: FitsEstimate | None = None,
    state_key: Callable[[Any], Hashable] = key_of,
    action_key: Callable[[Any], Hashable] = key_of,
    num_folds: int = 5,
) -> LogReport:
    """Estimate what a policy's choices would earn per state, from logged decisions of another policy.

        w_i = 1[a_i = choice of x_i] / mu(a_i | x_i)

    The estimate for a policy that was trained on the same decisions is too high: keep some apart.

    Args:
        choose: Maps states to the policy's choices, one action per state. None in place of an action earns 0, unless None is
            among the logged actions: then it is an action like the others.
        logs: As in `LoggedRewards`.
        fit: Fits q, for the doubly robust estimate, as in `LoggedRewards`.
        state_key: As in `LoggedRewards`.
        action_key: As in `LoggedRewards`.
        num_folds: Number of folds for q.

    Raises:
        ConfigError: There is no decision.
        ContractError: A decision has no probability, or one above 1, a reward is not finite, or `choose` does not return one
            action per state.

    Warns:
        GRPOWarning: The logging policy gave almost no probability to much of what the policy chooses, or few decisions agree
            with its choices, so the logs cannot say what it would earn.

    Source:
        Dudík, Langford and Li 2011, arXiv:1103.4601, eq. 2 and 5; self-normalised: Swaminathan and Joachims 2015, NeurIPS.
    """
    logs = list(logs)
    rows = _Rows(logs, fit, state_key, num_folds)
    actions = [*choose(rows.states)]
    if len(actions) != len(rows.states):
        raise ContractError(f"`choose` must return one action per state, {len(rows.states)}; got {len(actions)}.")
    none_is_action = any(row.action is None for row in logs)
    is_given = [none_is_action or action is not None for action in actions]
    chosen = [(action_key(action),) if given else () for action, given in zip(actions, is_given, strict=True)]
    hits = [chosen[place] == (action_key(row.action),) for place, row in zip(rows.places.tolist(), logs, strict=True)]
    weights = torch.tensor(hits).double() * (-rows.log_probs).exp()
    of_actions = weights[torch.tensor(is_given)[rows.places]]
    doubly_robust = None
    if fit is not None:
        doubly_robust = _mean(rows.estimates_of(actions, is_given) + weights * (rows.rewards - rows.estimates))
    report = LogReport(
        num_decisions=len(logs),
        logged=_mean(rows.rewards),
        ips=_mean(weights * rows.rewards),
        snips=_self_normalised(weights, rows.rewards),
        dr=doubly_robust,
        effective_decisions=(weights.sum().square() / weights.square().sum().clamp(min=1e-300)).item(),
        mean_weight=of_actions.mean().item() if len(of_actions) else 1.0,
    )
    problem = None
    if len(of_actions) and report.mean_weight + 3 * _mean(of_actions).standard_error < MIN_WEIGHT:
        problem = (
            f"the logging policy gave almost no probability to {1 - report.mean_weight:.0%} of what the policy chooses"
        )
    elif len(of_actions) and report.effective_decisions < MIN_EFFECTIVE:
        problem = f"only {report.effective_decisions:.0f} effective decisions agree with what the policy chooses"
    if problem is not None:
        warn_user(f"evaluate_from_logs: {problem}, so the logs cannot say what these choices earn. Log more of them.")
    return report


MIN_WEIGHT, MIN_EFFECTIVE = 0.9, 50
"""`evaluate_from_logs` warns if the mean weight, with three standard errors added, or the effective number is lower."""
NUM_UNMATCHED = 1_000
"""Number of different actions without a logged one among them after which `LoggedRewards` warns."""


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
