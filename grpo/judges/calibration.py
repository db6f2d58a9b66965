"""Is a judge right? It compares pairs of actions of which the better one is known."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import torch

from grpo._common.shown import show_text
from grpo.config import MAX_CONCURRENT
from grpo.errors import ConfigError, ContractError
from grpo.rewards import ask_for_rewards


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownPair:
    """Two actions for one state, of which the better one is known."""

    state: Any
    """The state."""
    better: Any
    """The action that a right judge prefers."""
    worse: Any
    """The other action."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeReport:
    """The result of `measure_judge`. `print(report)` shows it."""

    num_pairs: int
    """Number of pairs."""
    num_lost: int
    """Number of pairs without a verdict in either order. They are in no other number."""
    accuracy: float
    """Share of the verdicts that prefer the better action; a tie counts half. Each pair has the same weight. 0.5 is chance."""
    interval: tuple[float, float]
    """Confidence interval of the accuracy (Wilson's), for the number of pairs."""
    confidence: float
    """Confidence level of the interval."""
    ties: float
    """Share of the verdicts that are ties."""
    flipped: float
    """Share of the pairs whose verdict depends on which action comes first."""
    first_preferred: float
    """Share of the verdicts, without ties, that prefer the action that came first. 0.5: no preference for a place. NaN: there
    are only ties."""

    @property
    def is_informative(self) -> bool:
        """Whether the judge is better than chance, by its interval."""
        return self.interval[0] > 0.5

    def __str__(self) -> str:
        low, high = self.interval
        interval = f"{self.confidence:.0%} interval {low:.1%} to {high:.1%}"
        order = (
            f"verdicts that depend on the order {self.flipped:.1%}, first action preferred {self.first_preferred:.1%}"
        )
        lines = [
            f"right in {self.accuracy:.1%} of {self.num_pairs - self.num_lost} pairs ({interval})",
            f"ties {self.ties:.1%}, {order}",
        ]
        if self.num_lost:
            lines.append(f"{self.num_lost} pairs had no verdict")
        if not self.is_informative:
            lines.append("These pairs do not show that the judge is better than chance.")
        return "\n".join(lines)

    _repr_pretty_ = show_text


def measure_judge(
    judge: Any,
    pairs: Sequence[KnownPair],
    *,
    confidence: float = 0.95,
    timeout: float | None = None,
    max_concurrent: int = MAX_CONCURRENT,
) -> JudgeReport:
    """Measure how often a judge prefers the better of two actions. Ask for each pair twice, with each action first.

    Args:
        judge: A `ListwiseJudge`, a `RubricJudge`, `PairwiseRewards`, or any other reward model or function. Each pair is a
            group.
        pairs: Pairs with known answers, of the kind that the policy will produce. 100 pairs give an interval of about +-8
            points at an accuracy of 80 %.
        confidence: Confidence level of the interval. Larger: a wider interval.
        timeout: Seconds per call. None: no deadline.
        max_concurrent: Largest number of calls that are awaited at the same time.

    Raises:
        ConfigError: `confidence` is not between 0 and 1.
        ContractError: There are no pairs, or none has a verdict.
        Exception: What the judge raised, if all of its calls failed.

    Example:
        >>> pairs = [KnownPair(state="2 + 2", better="4", worse="5")] * 8
        >>> print(measure_judge(lambda states, actions: [action == "4" for action in actions], pairs))
        right in 100.0% of 8 pairs (95% interval 67.6% to 100.0%)
        ties 0.0%, verdicts that depend on the order 0.0%, first action preferred 50.0%

    Source:
        Both orders: Zheng et al. 2023, arXiv:2306.05685, sec. 3.4. Interval: Wilson 1927, "Probable inference".
    """
    if not 0 < confidence < 1:
        raise ConfigError(f"measure_judge: confidence must be > 0 and < 1; got {confidence}.")
    given: Any = pairs
    if not isinstance(given, Sequence) or not given or not all(isinstance(pair, KnownPair) for pair in given):
        raise ContractError(
            "measure_judge: pairs must be a list of KnownPair, at least one. Pass [KnownPair(...), ...]."
        )
    states = [pair.state for pair in pairs for _ in range(4)]
    actions = [action for pair in pairs for action in (pair.better, pair.worse, pair.worse, pair.better)]
    answer = ask_for_rewards(
        judge,
        states,
        actions,
        group_ids=torch.arange(2 * len(pairs)).repeat_interleave(2),
        timeout=timeout,
        max_concurrent=max_concurrent,
    )
    rewards = answer.values.double()
    rewards = rewards if rewards.dim() == 1 else rewards.sum(1)
    for rows in answer.lost.values():
        rewards = rewards.masked_fill(rows, math.nan)
    first, second = rewards.view(-1, 2, 2).unbind(2)  # [pairs, orders] of the action that comes first, and of the other
    gap = first - second
    verdicts = (0.5 + 0.5 * gap.sign()).masked_fill(gap.isnan(), math.nan)  # 1: the first is preferred; sign(NaN) is 0
    right = torch.stack([verdicts[:, 0], 1 - verdicts[:, 1]], dim=1)  # the better action comes first, then second
    known = ~right.isnan()
    has_verdict = known.any(1)
    if not bool(has_verdict.any()):
        raise ContractError("measure_judge: no pair has a verdict, because the judge lost all of them. Fix the judge.")
    of_pairs = right.nanmean(1)[has_verdict]
    given, decided = verdicts[known], verdicts[known & (verdicts != 0.5)]
    accuracy, num_judged = float(of_pairs.mean()), len(of_pairs)
    return JudgeReport(
        num_pairs=len(pairs),
        num_lost=len(pairs) - num_judged,
        accuracy=accuracy,
        interval=wilson_interval(accuracy, num_judged, confidence),
        confidence=confidence,
        ties=float((given == 0.5).double().mean()),
        flipped=float((known.all(1) & (right[:, 0] != right[:, 1])).double().sum() / num_judged),
        first_preferred=float(decided.mean()),
    )


def wilson_interval(share: float, count: int, confidence: float) -> tuple[float, float]:
    """Wilson's confidence interval of a share of `count` independent trials, z the normal quantile of the level.

    (p + z^2 / 2n +- z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    Source:
        Wilson 1927, "Probable inference, the law of succession, and statistical inference".
    """
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    centre = share + z * z / (2 * count)
    width = z * math.sqrt(share * (1 - share) / count + (z / (2 * count)) ** 2)
    divisor = 1 + z * z / count
    return max((centre - width) / divisor, 0.0), min((centre + width) / divisor, 1.0)
