"""Do samples come from the distribution that scores them? Tests with a false alarm in a million, and no scipy.

Discrete actions: Pearson's chi-square. Continuous ones: the probability integral transform along lines, and Kolmogorov-Smirnov.
"""

import math
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from grpo.types import Rows

from .report import Verdict, failed, passed, skipped

P_VALUE = 1e-6
"""Below it, samples do not come from the distribution: one conforming policy in a million is accused."""
MIN_EXPECTED = 10.0
"""Draws a cell of the chi-square test expects at least; rarer actions share one cell."""
MASS_TOLERANCE = 0.02
"""How far a density's numerical integral may be from 1."""
GRID = 129
"""Points of a line on which a density of several numbers is looked at."""

ScoreActions = Callable[[Rows], Float[Tensor, " M"]]
"""Log-probabilities of any M actions in the state the samples were drawn for."""

ADVICE = (
    "Sample from the distribution that is scored: the same temperature, no top-k, no epsilon, no clipping afterwards; a "
    "sampler that differs on purpose tells its behaviour_log_probs in sample_actions()."
)


def chi_square_p_value(statistic: float, degrees: int) -> float:
    """P(X >= statistic) = Q(degrees / 2, statistic / 2), the regularised upper incomplete gamma function.

    Example:
        >>> round(chi_square_p_value(3.841, 1), 3)
        0.05
    """
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def kolmogorov_smirnov(uniforms: Float[Tensor, " N"]) -> tuple[float, float]:
    """Largest distance D of the empirical distribution from the uniform one on [0, 1], and its p-value.

    P(D' >= D) ~ 2 sum_k (-1)^(k-1) exp(-2 k^2 x^2),  x = (sqrt(N) + 0.12 + 0.11 / sqrt(N)) D

    Source:
        Stephens 1970, "Use of the Kolmogorov-Smirnov, Cramer-von Mises and related statistics", J. R. Stat. Soc. B 32.
    """
    ordered, count = uniforms.double().sort().values, len(uniforms)
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    distance = float(torch.maximum(steps[1:] - ordered, ordered - steps[:-1]).max())
    x = (math.sqrt(count) + 0.12 + 0.11 / math.sqrt(count)) * distance
    if x < 0.2:  # the series converges slowly there, and the sum is 1 to ten digits
        return distance, 1.0
    terms = [(-1) ** (k - 1) * math.exp(-2 * (k * x) ** 2) for k in range(1, 101)]
    return distance, min(max(2 * math.fsum(terms), 0.0), 1.0)


def judge_samples(owner: str, actions: Rows, log_probs: Float[Tensor, " N"], score: ScoreActions | None) -> Verdict:
    """Whether N actions sampled in one state are distributed as their log-probs say.

    Args:
        owner: the sampling method, for messages.
        actions: N actions.
        log_probs: of each whole action.
        score: log-probs of other actions, for densities; None: only those of `actions` are known.
    """
    numbers = as_numbers(actions)
    keys = [action_key(action) for action in actions]
    if any(key is None for key in keys):
        return skipped("Actions can be neither hashed nor read as numbers, so repetitions cannot be counted.")
    is_dense = len(set(keys)) > len(keys) / 2
    if numbers is not None and is_dense:
        if score is None:
            return skipped("The sampler's density is known at its own samples only, so it cannot be integrated.")
        return _test_density(owner, *numbers, log_probs.double().cpu(), score)
    if is_dense:
        return skipped(f"{len(set(keys))} of {len(keys)} sampled actions differ: too few repeat to be counted.")
    return _test_counts(owner, keys, log_probs.double().cpu())


def action_key(action: Any) -> Hashable:
    """Equal for equal actions, None where that cannot be told: tensors, arrays and containers by their values."""
    if isinstance(action, Tensor | np.ndarray):
        return (tuple(action.shape), *action.reshape(-1).tolist())
    if isinstance(action, list | tuple):
        keys = tuple(action_key(entry) for entry in action)
        return None if None in keys else keys
    if isinstance(action, Mapping):
        return action_key(sorted(action.items(), key=repr))
    return action if isinstance(action, Hashable) else None


def _test_counts(owner: str, keys: list[Hashable], log_probs: Tensor) -> Verdict:
    """Pearson's chi-square of how often each action came; actions too rare to be counted share a cell with those unseen."""
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
    cells = [(counts[key], wanted) for key, wanted in expected.items() if wanted >= MIN_EXPECTED]
    rest = (total - sum(count for count, _ in cells), max(total - sum(wanted for _, wanted in cells), 0.0))
    if rest[1] >= MIN_EXPECTED or not cells:
        cells.append(rest)
    else:
        smallest = min(range(len(cells)), key=lambda i: cells[i][1])
        cells[smallest] = (cells[smallest][0] + rest[0], cells[smallest][1] + rest[1])
    if len(cells) == 1:
        if len(first) == 1 and mass > 1 - MASS_TOLERANCE:
            return passed("The one action of probability 1 came every time.")
        return skipped(f"All {len(first)} sampled actions are too rare to be counted; raise num_samples.")
    statistic = sum((count - wanted) ** 2 / wanted for count, wanted in cells)
    p_value = chi_square_p_value(statistic, len(cells) - 1)
    if p_value < P_VALUE:
        worst = max(first, key=lambda key: (counts[key] - expected[key]) ** 2 / max(expected[key], 1.0))
        return failed(
            f"{owner} must sample as exp(log_probs) says; of {total} samples {str(worst)[:60]!r} came {counts[worst]} times, "
            f"{expected[worst]:.1f} expected (chi-square p = {p_value:.1e} over {len(cells)} cells). {ADVICE}"
        )
    return passed(f"{total} samples in {len(cells)} cells agree with exp(log_probs): chi-square p = {p_value:.2g}.")


def as_numbers(actions: Rows) -> tuple[Float[Tensor, "N D"], Callable[[Tensor], Rows]] | None:
    """Actions of D real numbers as one tensor, and the way back to actions of the same kind; None: they are not."""
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

    return values.reshape(len(values), -1).double().cpu(), rebuild


def _is_real(value: Any) -> bool:
    return isinstance(value, float | np.floating)


def _test_density(
    owner: str, values: Tensor, rebuild: Callable[[Tensor], Rows], log_probs: Tensor, score: ScoreActions
) -> Verdict:
    spread = values.amax(0) - values.amin(0)
    if not bool((spread > 0).all()):
        return skipped("One of the numbers of an action never changes, so it has no density.")

    def density(numbers: Tensor) -> Tensor:
        heights: Tensor = score(rebuild(numbers)).double().cpu().exp()
        return torch.where(heights.isnan(), 0.0, heights)  # NaN: outside of the support

    if values.shape[1] == 1:
        return _test_one_number(owner, values[:, 0], density)
    return _test_lines(owner, values, log_probs.exp(), density)


def _on_wide_or_narrow(look: Callable[[float], Tensor]) -> tuple[Tensor, bool]:
    """`look` beyond the samples, or, for a policy that refuses to score actions it cannot take, among them only."""
    try:
        return look(1.0), True
    except Exception:  # recovery: the range of the samples is inside of the support
        return look(0.0), False


def _test_one_number(owner: str, samples: Tensor, density: Callable[[Tensor], Tensor]) -> Verdict:
    """The density's numerical integral must be 1, and carry the samples to uniform numbers."""
    low, high = samples.min(), samples.max()

    def grid(reach: float) -> Tensor:
        margin = reach * (high - low)
        even = torch.linspace(float(low - margin), float(high + margin), 2 * len(samples) + 1, dtype=torch.float64)
        points: Tensor = torch.cat([even, samples]).unique()
        return points

    heights, is_wide = _on_wide_or_narrow(lambda reach: density(grid(reach).unsqueeze(1)))
    points = grid(1.0 if is_wide else 0.0)
    if not bool(heights.isfinite().all()):
        return skipped("The density is infinite somewhere, so it cannot be integrated on a grid.")
    below = torch.cat([torch.zeros(1, dtype=torch.float64), torch.cumulative_trapezoid(heights, points)])
    mass = float(below[-1])
    slack = MASS_TOLERANCE + (0.0 if is_wide else 20 / len(samples))
    if not 1 - slack <= mass <= 1 + MASS_TOLERANCE:
        return failed(
            f"{owner}: exp(log_prob) must integrate to 1 over all actions; it integrates to {mass:.3f} over "
            f"[{float(points[0]):.3g}, {float(points[-1]):.3g}]. Return a normalised density: no dropped constant, and the "
            f"Jacobian of any squashing (tanh). {ADVICE}"
        )
    return _verdict_on_uniforms(owner, below[torch.searchsorted(points, samples)] / mass)


def _test_lines(owner: str, values: Tensor, own: Tensor, density: Callable[[Tensor], Tensor]) -> Verdict:
    """Along a line through a sample, parallel to an axis, the sample's place is distributed as the density on that line.

    So the integral up to the sample, over the whole line's, is uniform, whatever the other numbers' distribution.
    """
    count = max(len(values) // 2, 1)
    axes = torch.arange(count) % values.shape[1]
    places, own = values[torch.arange(count), axes], own[:count]
    low, high = values.amin(0)[axes], values.amax(0)[axes]
    even = torch.linspace(0, 1, GRID, dtype=torch.float64)

    def grid(reach: float) -> Tensor:
        start, stop = low - reach * (high - low) / 2, high + reach * (high - low) / 2
        return start.unsqueeze(1) + even * (stop - start).unsqueeze(1)

    def look(reach: float) -> Tensor:
        points = values[:count].unsqueeze(1).repeat(1, GRID, 1)
        points[torch.arange(count).unsqueeze(1), torch.arange(GRID), axes.unsqueeze(1)] = grid(reach)
        return density(points.flatten(0, 1)).view(count, GRID)

    heights, is_wide = _on_wide_or_narrow(look)
    points = grid(1.0 if is_wide else 0.0)
    clear = heights.isfinite().all(1) & (heights.sum(1).square() >= 4 * heights.square().sum(1)) & (heights.sum(1) > 0)
    if int(clear.sum()) < 100:
        return skipped("The density is too narrow to be looked at on a grid.")
    order = torch.cat([points, places.unsqueeze(1)], 1).argsort(1)
    points = torch.cat([points, places.unsqueeze(1)], 1).gather(1, order)
    heights = torch.cat([heights, own.unsqueeze(1)], 1).gather(1, order)
    below = torch.cumulative_trapezoid(heights, points, dim=1)
    below = torch.cat([torch.zeros(count, 1, dtype=torch.float64), below], 1)
    at_sample = below.gather(1, (order == GRID).int().argmax(1, keepdim=True)).squeeze(1)
    return _verdict_on_uniforms(owner, (at_sample / below[:, -1])[clear])


def _verdict_on_uniforms(owner: str, uniforms: Tensor) -> Verdict:
    """Two tests: of u, which sees what is shifted, and of |2u - 1|, uniform too, which sees what is too wide or narrow."""
    (_, shifted), (_, spread) = kolmogorov_smirnov(uniforms), kolmogorov_smirnov((2 * uniforms - 1).abs())
    p_value = min(2 * min(shifted, spread), 1.0)
    if p_value < P_VALUE:
        fault = "too wide or narrow" if spread < shifted else "too far to one side"
        return failed(
            f"{owner} must sample from the density exp(log_prob); {len(uniforms)} samples are {fault} for it "
            f"(Kolmogorov-Smirnov p = {p_value:.1e}). {ADVICE}"
        )
    return passed(
        f"{len(uniforms)} samples agree with the density exp(log_prob): Kolmogorov-Smirnov p = {p_value:.2g}."
    )
