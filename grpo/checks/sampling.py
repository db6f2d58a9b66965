"""Test whether whole actions come from the distribution that scores them. `steps` tests the steps of an action.

Discrete actions: Pearson's chi-square test. Continuous actions: the probability integral transform along lines, and the
Kolmogorov-Smirnov test.

All tests of one `check_policy` together fail for at most one correct policy in a million (Bonferroni): at most
`MAX_VERDICTS` verdicts are given, each verdict multiplies its p-values by the number of its tests, and fails below
10^-6 / `MAX_VERDICTS`.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributions import Distribution

from grpo.types import Rows

from .report import Verdict, failed, passed, skipped
from .supports import CURVED, Support, angles_start, support_of

MAX_VERDICTS = 6
"""Verdicts on samples in one `check_policy`: on whole actions and on steps, in each of three rules."""
P_VALUE = 1e-6 / MAX_VERDICTS
"""Samples with a smaller p-value fail the test."""
MIN_EXPECTED = 10.0
"""Minimum expected count of a cell in the chi-square test. Rarer actions share one cell."""
MASS_TOLERANCE = 0.02
"""Largest allowed distance of a density's numerical integral from 1."""
GRID = 129
"""Number of grid points on a line along which a density of several numbers is integrated."""

SOME = 64
"""Number of samples that show whether numbers are angles."""

ScoreActions = Callable[[Rows], Float[Tensor, " M"]]
"""A function that maps any M actions to their log-probs in the state that the samples were drawn for."""

ADVICE = (
    "Sample from the distribution that is scored: the same temperature, no top-k, no epsilon, no clipping afterwards. A "
    "sampler that differs on purpose must return its behaviour_log_probs from sample_actions()."
)


def chi_square_p_value(statistic: float, degrees: int) -> float:
    """Return the p-value of a chi-square statistic.

    P(X >= statistic) = Q(degrees / 2, statistic / 2), where Q is the regularised upper incomplete gamma function

    Example:
        >>> round(chi_square_p_value(3.841, 1), 3)
        0.05
    """
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def kolmogorov_smirnov(uniforms: Float[Tensor, " N"]) -> tuple[float, float]:
    """Largest distance D between the empirical distribution and the uniform distribution on [0, 1], and its p-value.

    P(D' >= D) ~ 2 sum_k (-1)^(k-1) exp(-2 k^2 x^2),  x = (sqrt(N) + 0.12 + 0.11 / sqrt(N)) D

    Source:
        Stephens 1970, "Use of the Kolmogorov-Smirnov, Cramer-von Mises and related statistics", J. R. Stat. Soc. B 32.
    """
    ordered, count = uniforms.double().sort().values, len(uniforms)
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    distance = float(torch.maximum(steps[1:] - ordered, ordered - steps[:-1]).max())
    x = (math.sqrt(count) + 0.12 + 0.11 / math.sqrt(count)) * distance
    if x < 0.2:  # the series converges slowly here, and its sum is 1 to ten digits
        return distance, 1.0
    terms = [(-1) ** (k - 1) * math.exp(-2 * (k * x) ** 2) for k in range(1, 101)]
    return distance, min(max(2 * math.fsum(terms), 0.0), 1.0)


def judge_samples(owner: str, actions: Rows, log_probs: Float[Tensor, " N"], score: ScoreActions | None) -> Verdict:
    """Test whether N actions sampled in one state are distributed according to their log-probs.

    Args:
        owner: Name of the sampling method, for messages.
        actions: N actions.
        log_probs: Log-prob of each whole action.
        score: Returns log-probs of other actions, to test densities. None: only the log-probs of `actions` are known.
    """
    numbers = as_numbers(actions)
    keys = [action_key(action) for action in actions]
    if any(key is None for key in keys):
        return skipped("Actions are neither hashable nor numbers, so repetitions cannot be counted.")
    is_dense = len(set(keys)) > len(keys) / 2
    if numbers is not None and is_dense:
        if score is None:
            return skipped("The sampler's density is known only at its own samples, so it cannot be integrated.")
        return _test_density(owner, *numbers, log_probs.cpu().double(), score)
    if is_dense:
        return skipped(f"{len(set(keys))} of {len(keys)} sampled actions differ: too few repeat to count them.")
    return judge_counts(owner, keys, log_probs.cpu().double())


def action_key(action: Any) -> Hashable:
    """Return a hashable key that is equal for equal actions. None: actions of this type cannot be compared."""
    if isinstance(action, Tensor | np.ndarray):
        return (tuple(action.shape), *action.reshape(-1).tolist())
    if isinstance(action, list | tuple):
        keys = tuple(action_key(entry) for entry in action)
        return None if None in keys else keys
    if isinstance(action, Mapping):
        return action_key(sorted(action.items(), key=repr))
    return action if isinstance(action, Hashable) else None


def counts_p_value(cells: list[tuple[float, float]]) -> float:
    """The p-value of counts, given as pairs (count, expected count), with one degree of freedom less than there are cells.

    The larger p-value of Pearson's statistic, sum (O - E)^2 / E, and of the likelihood ratio, 2 sum O log(O / E). Pearson's
    statistic exaggerates counts above a small E, and the likelihood ratio counts below it.
    """
    pearson = sum((count - wanted) ** 2 / wanted for count, wanted in cells)
    ratio = 2 * sum(count * math.log(count / wanted) for count, wanted in cells if count > 0)
    return max(chi_square_p_value(statistic, len(cells) - 1) for statistic in (pearson, max(ratio, 0.0)))


def enough_expected(cells: list[tuple[float, float]], total: float) -> list[tuple[float, float]]:
    """The pairs (count, expected count) with enough expected. Rare cells, and what is missing to `total`, share one cell."""
    kept = [(count, wanted) for count, wanted in cells if wanted >= MIN_EXPECTED]
    rest = (total - sum(count for count, _ in kept), max(total - sum(wanted for _, wanted in kept), 0.0))
    if rest[1] >= MIN_EXPECTED or not kept:
        return [*kept, rest]
    smallest = min(range(len(kept)), key=lambda i: kept[i][1])
    kept[smallest] = (kept[smallest][0] + rest[0], kept[smallest][1] + rest[1])
    return kept


def judge_counts(owner: str, keys: Sequence[Hashable], log_probs: Float[Tensor, " N"], tests: int = 1) -> Verdict:
    """Chi-square test of how often each action was sampled. Rare and unseen actions share one cell.

    Args:
        owner: Name of the sampling method, for messages.
        keys: One key per sample, equal for equal actions.
        log_probs: Log-prob of each sample's action.
        tests: Number of tests of this verdict; multiplies the p-value.
    """
    first = {key: place for place, key in reversed(list(enumerate(keys)))}
    counts = dict.fromkeys(first, 0)
    for key in keys:
        counts[key] += 1
    total = len(keys)
    expected = {key: total * math.exp(log_probs[place]) for key, place in first.items()}
    mass = sum(expected.values()) / total
    if mass > 1 + MASS_TOLERANCE:
        return failed(
            f"{owner}: probabilities of different actions must sum to at most 1; those of the {len(first)} sampled ones sum "
            f"to {mass:.3f}. Return normalised log-probabilities (log_softmax, not logits) of whole actions."
        )
    cells = enough_expected([(counts[key], wanted) for key, wanted in expected.items()], total)
    if len(cells) == 1:
        if len(first) == 1 and mass > 1 - MASS_TOLERANCE:
            return passed("The only action has probability 1 and was sampled every time.")
        return skipped(f"All {len(first)} sampled actions are too rare to count; raise num_samples.")
    p_value = min(tests * counts_p_value(cells), 1.0)
    if p_value < P_VALUE:
        worst = max(first, key=lambda key: (counts[key] - expected[key]) ** 2 / max(expected[key], 1.0))
        return failed(
            f"{owner} must sample from exp(log_probs); {str(worst)[:60]!r} is {counts[worst]} of {total} samples, "
            f"{expected[worst]:.1f} expected (chi-square p = {p_value:.1e} over {len(cells)} cells). {ADVICE}"
        )
    return passed(f"{total} samples in {len(cells)} cells agree with exp(log_probs): chi-square p = {p_value:.2g}.")


def as_numbers(actions: Rows) -> tuple[Float[Tensor, "N D"], Callable[[Tensor], Rows]] | None:
    """Convert actions of D real numbers to one tensor. Also return a function that converts such a tensor back to actions.

    Return None if the actions are not real numbers.
    """
    if isinstance(actions, Tensor | np.ndarray):
        values: Any = torch.as_tensor(actions).detach()
        like: Any = actions
    else:
        like = actions[0]
        if isinstance(like, Tensor | np.ndarray):
            if any(type(action) is not type(like) or action.shape != like.shape for action in actions):
                return None
            values = torch.stack([torch.as_tensor(action).detach() for action in actions])
        elif _is_real(like) or (isinstance(like, list | tuple) and like and all(map(_is_real, like))):
            values = torch.as_tensor(np.array([np.asarray(action) for action in actions]))
        else:
            return None
    if not values.is_floating_point() or values.numel() == 0:
        return None
    shape = values.shape[1:]

    def rebuild(numbers: Tensor) -> Rows:
        rows = numbers.reshape(-1, *shape).to(values)
        whole: Any = rows if isinstance(like, Tensor) else rows.cpu().numpy()
        if like is actions:
            return whole  # type: ignore[no-any-return]
        if isinstance(like, Tensor | np.ndarray | np.generic):
            return list(whole)
        return whole.tolist() if not isinstance(like, tuple) else [tuple(row) for row in whole.tolist()]

    return values.reshape(len(values), -1).cpu().double(), rebuild


def _is_real(value: Any) -> bool:
    return isinstance(value, float | np.floating)


def _test_density(
    owner: str, values: Tensor, rebuild: Callable[[Tensor], Rows], log_probs: Tensor, score: ScoreActions
) -> Verdict:
    spread = values.amax(0) - values.amin(0)
    if not bool((spread > 0).all()):
        return skipped("One of an action's numbers is the same in all samples, so it has no density.")

    def density(numbers: Tensor) -> Tensor:
        heights: Tensor = score(rebuild(numbers)).cpu().double().exp()
        return torch.where(heights.isnan(), 0.0, heights)  # NaN: outside the support

    if values.shape[1] == 1:
        return _test_one_number(owner, values[:, 0], density)
    support = support_of(values)
    if support is None:
        return skipped(CURVED)
    count = max(len(values) // 2, 1)
    axes = torch.arange(count) % len(support.directions)
    return judge_lines(owner, values, axes, log_probs[:count].exp(), lambda numbers, _: density(numbers), support)


@contextmanager
def refusing_other_supports() -> Iterator[None]:
    """Let torch's distributions refuse numbers outside their support. Importing torchrl switches this off for the process."""
    given = Distribution._validate_args
    Distribution.set_default_validate_args(True)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(given)


def _on_wide_or_narrow(evaluate: Callable[[float], Tensor]) -> tuple[Tensor, bool]:
    """Evaluate a density on a wider range than the samples, or on their own range if the policy raises outside it."""
    try:
        return evaluate(1.0), True
    except Exception:  # recovery: the range of the samples lies inside the support
        return evaluate(0.0), False


def _test_one_number(owner: str, samples: Tensor, density: Callable[[Tensor], Tensor]) -> Verdict:
    """The density must integrate to 1, and its cumulative integral must map the samples to uniform numbers."""
    low, high, some = samples.min(), samples.max(), samples[:SOME]
    own = density(some.unsqueeze(1))
    start = angles_start(samples, lambda turn: density((some + turn).unsqueeze(1)), own)
    if start is not None:
        low, high = torch.tensor(start), torch.tensor(start + 2 * math.pi)

    def grid(reach: float) -> Tensor:
        margin = reach * (high - low) if start is None else 0.0
        even = torch.linspace(float(low - margin), float(high + margin), 2 * len(samples) + 1, dtype=torch.float64)
        points: Tensor = torch.cat([even, samples]).unique()
        return points

    heights, is_wide = _on_wide_or_narrow(lambda reach: density(grid(reach).unsqueeze(1)))
    points = grid(1.0 if is_wide else 0.0)
    if not bool(heights.isfinite().all()):
        return skipped("The density is infinite somewhere, so it cannot be integrated on a grid.")
    below = torch.cat([torch.zeros(1, dtype=torch.float64), torch.cumulative_trapezoid(heights, points)])
    mass = float(below[-1])
    # the mass outside the range of N samples is about 2 / N; it is above 20 / N once in 2e7 cases, (1 + 20) exp(-20)
    slack = MASS_TOLERANCE + (0.0 if is_wide else 20 / len(samples))
    if not 1 - slack <= mass <= 1 + MASS_TOLERANCE:
        return failed(
            f"{owner}: exp(log_prob) must integrate to 1 over all actions; it integrates to {mass:.3f} over "
            f"[{float(points[0]):.3g}, {float(points[-1]):.3g}]. Return a normalised density: no dropped constant, and the "
            f"Jacobian of any squashing (tanh). {ADVICE}"
        )
    return _verdict_on_uniforms(owner, below[torch.searchsorted(points, samples)] / mass)


def judge_lines(
    owner: str,
    values: Float[Tensor, "S D"],
    axes: Int[Tensor, " N"],
    own: Float[Tensor, " N"],
    density: Callable[[Tensor, Tensor], Tensor],
    support: Support | None = None,
) -> Verdict:
    """Test densities of several numbers along one line per sample, through the sample and parallel to one direction.

    The sample's position on its line is distributed like the density along that line. So the integral up to the sample,
    divided by the integral over the whole line, is uniform for every distribution of the other numbers.

    Args:
        owner: Name of the sampling method, for messages.
        values: The samples. The first N of them have lines.
        axes: The direction of each line, as an index.
        own: The density at each sample.
        density: Maps numbers [M, D], and the index of the sample on whose line each of them is [M], to densities [M].
        support: The directions, and which points of a line count. None: the axes, and all points.
    """
    count = len(axes)
    every = torch.arange(count)
    support = support or Support(torch.eye(values.shape[1], dtype=values.dtype), values)
    places, ways = support.places[every, axes], support.directions[axes]
    low, high = support.places.amin(0), support.places.amax(0)
    margin = (high - low) / 2
    for axis in axes.unique().tolist():
        some = (axes == axis).nonzero().squeeze(1)[:SOME]
        turned = partial(_turned, values[some], ways[some], some, density)
        start = angles_start(support.places[:, axis], turned, own[some])
        if start is not None:
            low[axis], high[axis], margin[axis] = start, start + 2 * math.pi, 0.0
    even = torch.linspace(0, 1, GRID, dtype=torch.float64)

    def grid(reach: float) -> Tensor:
        start, stop = (low - reach * margin)[axes], (high + reach * margin)[axes]
        return start.unsqueeze(1) + even * (stop - start).unsqueeze(1)

    def evaluate(reach: float) -> Tensor:
        moves = (grid(reach) - places.unsqueeze(1)).unsqueeze(2) * ways.unsqueeze(1)
        points = (values[:count].unsqueeze(1) + moves).flatten(0, 1)
        lines, inside = every.repeat_interleave(GRID), support.contains(points)
        points = torch.where(inside.unsqueeze(1), points, values[lines])  # the policy is not asked about others
        return torch.where(inside, density(points, lines), 0.0).view(count, GRID)

    try:
        heights, is_wide = _on_wide_or_narrow(evaluate)
    except Exception:  # recovery: the policy refuses numbers that it does not sample
        return skipped(
            "The policy does not score numbers between its samples, so lines through samples leave its support."
        )
    points = grid(1.0 if is_wide else 0.0)
    # (sum h)^2 / sum h^2 is the number of grid points that share the mass; with fewer than 4, the sum says nothing
    clear = heights.isfinite().all(1) & (heights.sum(1).square() >= 4 * heights.square().sum(1)) & (heights.sum(1) > 0)
    if int(clear.sum()) < 100:
        return skipped("The density is too narrow to integrate on a grid.")
    order = torch.cat([points, places.unsqueeze(1)], 1).argsort(1)
    points = torch.cat([points, places.unsqueeze(1)], 1).gather(1, order)
    heights = torch.cat([heights, own.unsqueeze(1)], 1).gather(1, order)
    below = torch.cumulative_trapezoid(heights, points, dim=1)
    below = torch.cat([torch.zeros(count, 1, dtype=torch.float64), below], 1)
    at_sample = below.gather(1, (order == GRID).int().argmax(1, keepdim=True)).squeeze(1)
    return _verdict_on_uniforms(owner, (at_sample / below[:, -1])[clear])


def _turned(
    values: Tensor, ways: Tensor, lines: Tensor, density: Callable[[Tensor, Tensor], Tensor], turn: Tensor
) -> Tensor:
    return density(values + turn * ways, lines)


def _verdict_on_uniforms(owner: str, uniforms: Tensor) -> Verdict:
    """Test u, which reveals shifted samples, and |2u - 1|, which is uniform too and reveals too wide or too narrow samples."""
    (_, shifted), (_, spread) = kolmogorov_smirnov(uniforms), kolmogorov_smirnov((2 * uniforms - 1).abs())
    p_value = min(2 * min(shifted, spread), 1.0)
    if p_value < P_VALUE:
        fault = "spread too wide or too narrow" if spread < shifted else "shifted to one side"
        return failed(
            f"{owner} must sample from the density exp(log_prob); {len(uniforms)} samples are {fault} "
            f"(Kolmogorov-Smirnov p = {p_value:.1e}). {ADVICE}"
        )
    return passed(
        f"{len(uniforms)} samples agree with the density exp(log_prob): Kolmogorov-Smirnov p = {p_value:.2g}."
    )
