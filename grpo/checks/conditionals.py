"""The conditional distribution of one entry of a sampled action, given other entries. `steps` says what is tested, and why."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo.types import ActionScores, Rows, zero_outside

from .report import Verdict, failed, passed, skipped
from .sampling import ADVICE, MASS_TOLERANCE, P_VALUE, action_key, counts_p_value, enough_expected, kolmogorov_smirnov

MAX_VALUES = 64
"""Maximum number of values that replace one entry: those that were sampled most often."""
MAX_TESTED = 2048
"""Maximum number of entries that are replaced, over all samples."""
LEAST_CHANCE = 1e-3
"""Probabilities below this count as this one in the sum of log-probs, so that one rare value does not decide the test."""
MIN_SAMPLES = 50
"""Minimum number of samples in a test of conditional distributions."""
MAX_POSITIONS = 8
"""With at most this number of positions, each of them has a test of its own."""
CERTAIN = 1e-4
"""Differences of log-probs up to this size, relative to 1 + |log-prob|, count as rounding."""

ScoreSteps = Callable[[Rows], ActionScores]
"""A function that scores any M actions in the state that the samples were drawn for."""


@dataclass(frozen=True, slots=True)
class Entries:
    """Actions as sequences of values."""

    rows: list[list[Any]]
    """The entries of each action."""
    keys: list[tuple[Hashable, ...]]
    """The same, as values that can be compared."""
    rebuild: Callable[[list[list[Any]]], Rows]
    """Makes actions of entries."""

    @classmethod
    def of(cls, actions: Rows) -> "Entries | None":
        """The entries of actions that are lists, tuples, tensors or arrays. None: the actions are something else."""
        like: Any = actions if isinstance(actions, Tensor | np.ndarray) else actions[0]
        kind, batched = type(like), like is actions
        if kind not in (list, tuple, Tensor, np.ndarray) or any(type(row) is not kind for row in actions):
            return None
        if isinstance(like, Tensor | np.ndarray) and like.ndim != 1 + batched:
            return None
        rows = [row.tolist() if isinstance(row, Tensor | np.ndarray) else list(row) for row in actions]
        keys = [tuple(action_key(entry) for entry in row) for row in rows]
        if not all(keys) or any(None in row for row in keys):
            return None

        def rebuild(rows: list[list[Any]]) -> Rows:
            if batched and isinstance(like, Tensor):
                return torch.tensor(rows, dtype=like.dtype, device=like.device)
            if batched:
                return np.array(rows, dtype=like.dtype)
            if isinstance(like, Tensor):
                return [torch.tensor(row, dtype=like.dtype, device=like.device) for row in rows]
            return [np.array(row, like.dtype) if isinstance(like, np.ndarray) else kind(row) for row in rows]

        return cls(rows, keys, rebuild)


def left_aligned(log_probs: Tensor, mask: Tensor) -> Tensor:
    """The valid steps of each row, moved to the left, and 0 after them."""
    order = (~mask).int().argsort(dim=1, stable=True)
    return zero_outside(log_probs, mask).gather(1, order)


@dataclass(frozen=True, slots=True)
class _Cells:
    """The conditional distributions of one entry per sample."""

    probabilities: Float[Tensor, "M C"]
    """The probability of each value."""
    own: list[int]
    """The place of the sample's own value. -1: it is none of the values."""
    values: list[list[Hashable]]
    """The values, padded with None."""
    repeats: Bool[Tensor, "M C"]
    """Whether a value stands elsewhere in the action."""
    positions: list[int]
    """The place of the entry in its action."""
    matters: Bool[Tensor, " M"]
    """Whether the log-prob depends on the entry."""


def judge_conditionals(owner: str, entries: Entries, score: ScoreSteps, aligned: bool) -> Verdict:
    """Test samples given their other entries.

    Args:
        owner: Name of the sampling method, for messages.
        entries: The samples.
        score: Scores other actions.
        aligned: Whether each entry is a step, in order. If it is, entries are tested given the entries before them.
    """
    return _judge_cells(owner, _conditionals(entries, score, aligned), aligned)


def _conditionals(entries: Entries, score: ScoreSteps, aligned: bool) -> _Cells | None:
    """Score each sample of the second half with other values in one of its entries. None: the policy does not score them."""
    half = len(entries.rows) // 2
    often = _values_by_position(entries.keys[:half], entries.rows, None if aligned else _paddings(entries.keys))
    rounds = len(often) if aligned else 1  # given the steps before them, the steps of one sample are independent
    tested = [  # the choice of a position may depend on the entries before it, but not on the entry itself
        (n, place)
        for start in range(rounds)
        for n in range(half, len(entries.rows))
        if (place := (n + start) % len(often)) < len(entries.keys[n]) and len(often[place]) > 1
    ][:MAX_TESTED]
    if not tested:
        return None
    try:
        return _scored(entries, score, aligned, tested, often, leave_out_taken=False)
    except Exception:  # recovery: the policy may refuse actions that it cannot take, such as repetitions
        if not aligned:
            return None
    try:
        return _scored(entries, score, aligned, tested, often, leave_out_taken=True)
    except Exception:  # recovery: altered actions are not tested
        return None


def _values_by_position(
    keys: Sequence[tuple[Hashable, ...]], rows: list[list[Any]], left_out: Collection[Hashable] | None
) -> list[dict[Hashable, Any]]:
    """For each place in an action, the values that most samples have there."""
    found = []
    for place in range(max(map(len, keys))):
        raw = {row[place]: rows[n][place] for n, row in enumerate(keys) if len(row) > place}
        counts = Counter(row[place] for row in keys if len(row) > place and row[place] not in (left_out or ()))
        found.append({key: raw[key] for key, _ in counts.most_common(MAX_VALUES)})
    return found


def _paddings(keys: Sequence[tuple[Hashable, ...]]) -> set[Hashable]:
    """Values that are followed only by themselves. Before another value they would make an action that is never sampled."""
    followed = {one for row in keys for one, other in pairwise(row) if one != other}
    return {one for row in keys for one, other in pairwise(row) if one == other} - followed


def _scored(
    entries: Entries,
    score: ScoreSteps,
    aligned: bool,
    tested: list[tuple[int, int]],
    often: list[dict[Hashable, Any]],
    leave_out_taken: bool,
) -> _Cells:
    width = max(len(often[place]) for _, place in tested)
    altered: list[list[Any]] = []
    spots: list[tuple[int, int, int]] = []
    own, values, positions = [], [], []
    repeats = torch.zeros(len(tested), width, dtype=torch.bool)
    for i, (n, place) in enumerate(tested):
        keys, row = entries.keys[n], entries.rows[n]
        candidates = list(often[place])
        own.append(candidates.index(keys[place]) if keys[place] in often[place] else -1)
        values.append([*candidates, *[None] * (width - len(candidates))])
        positions.append(place)
        for c, key in enumerate(candidates):
            elsewhere = keys[:place] if aligned else keys[:place] + keys[place + 1 :]
            repeats[i, c] = key in elsewhere
            if leave_out_taken and key in keys[:place]:
                continue
            other = list(row)
            if aligned and key in keys[place + 1 :]:  # keep the action free of repetitions: the later entry moves
                other[keys.index(key, place + 1)] = row[place]
            other[place] = often[place][key]
            altered.append(other)
            spots.append((i, c, place))
    probabilities = torch.zeros(len(tested), width, dtype=torch.float64)
    scores = score(entries.rebuild(altered))
    rows, columns, places = (torch.tensor(index) for index in zip(*spots, strict=True))
    kept = scores.mask.cpu()
    log_probs = zero_outside(scores.log_probs.cpu().double(), kept)
    if aligned:
        found = left_aligned(log_probs, kept).gather(1, places.clamp(max=kept.shape[1] - 1).unsqueeze(1)).squeeze(1)
        found = torch.where(places < kept.sum(1), found, -torch.inf)
        matters = torch.ones(len(tested), dtype=torch.bool)
    else:
        found = log_probs.sum(1)
        top = torch.full((len(tested),), -torch.inf, dtype=torch.float64).scatter_reduce(0, rows, found, "amax")
        bottom = torch.full_like(top, torch.inf).scatter_reduce(0, rows, found, "amin")
        matters = top - bottom > CERTAIN
        found = found - top[rows]
    probabilities[rows, columns] = found.exp().nan_to_num(0.0)
    return _Cells(probabilities, own, values, repeats, positions, matters)


def _judge_cells(owner: str, cells: _Cells | None, aligned: bool) -> Verdict:
    if cells is None:
        return skipped("The policy does not score altered actions.")
    own, chances, positions = torch.tensor(cells.own), cells.probabilities, torch.tensor(cells.positions)
    if any(not bool(cells.matters[positions == place].any()) for place in set(cells.positions)):
        return skipped("The log-prob does not depend on some entries, which may follow from others.")
    if aligned:
        mass, place = chances.sum(1).max(0)
        if mass > 1 + MASS_TOLERANCE:
            return failed(
                f"{owner}: the probabilities of a step's values must sum to at most 1; those of step "
                f"{cells.positions[int(place)]} sum to {float(mass):.3f}. Return normalised log-probabilities of each step, "
                "given the steps before it and not given the step itself."
            )
        chances = torch.cat([chances, (1 - chances.sum(1, keepdim=True)).clamp(min=0.0)], 1)
        own = torch.where(own < 0, chances.shape[1] - 1, own)
        kept = torch.arange(len(own))
    else:
        kept = ((own >= 0) & (chances.sum(1) > 0)).nonzero().squeeze(1)
        chances = chances / chances.sum(1, keepdim=True).clamp(min=1e-300)
    if len(kept) < MIN_SAMPLES:
        return skipped("Too few values repeat.")
    values = [[*row, None] for row in cells.values] if aligned else cells.values
    repeats = torch.nn.functional.pad(cells.repeats, (0, chances.shape[1] - cells.repeats.shape[1]))
    chances, own, positions, repeats = chances[kept], own[kept], positions[kept], repeats[kept]
    values = [values[i] for i in kept.tolist()]
    found = list(_tests(chances, own, values, repeats, positions))
    p_value, what = min(found)
    p_value = min(p_value * len(found), 1.0)
    where = "given the steps before it" if aligned else "given the other entries"
    if p_value < P_VALUE:
        return failed(
            f"{owner} must sample each step from exp(log_probs), {where}; of {len(own)} samples, {what} (p = {p_value:.1e} in "
            f"{len(found)} tests). {ADVICE} Mask the same actions in both."
        )
    return passed(f"{len(own)} steps agree with exp(log_probs), {where}: p = {p_value:.2g}.")


def _tests(
    chances: Tensor, own: Tensor, values: list[list[Hashable]], repeats: Tensor, positions: Tensor
) -> Iterator[tuple[float, str]]:
    """The p-value of each test, and what was seen."""
    every = torch.arange(len(own))
    ordered, order = chances.sort(dim=1, descending=True, stable=True)
    below = ordered.cumsum(1) - ordered
    rank = (order == own.unsqueeze(1)).int().argmax(1)
    uniforms = below[every, rank] + torch.rand(len(own), dtype=torch.float64) * ordered[every, rank]
    uniforms = uniforms.clamp(0.0, 1.0)
    logs = chances.clamp(min=LEAST_CHANCE).log()
    means = (chances * logs).sum(1)
    excess = float((logs[every, own] - means).sum())
    variance = float(((chances * logs.square()).sum(1) - means.square()).clamp(min=0.0).sum())
    yield (
        2 * math.exp(-(excess**2) / (2 * variance + 2 / 3 * -math.log(LEAST_CHANCE) * abs(excess) + 1e-9)),
        f"the mean log-prob is {excess / len(own):+.3f} off",
    )
    groups = {"all positions": every}
    if 1 < len(places := positions.unique().tolist()) <= MAX_POSITIONS:
        groups |= {f"position {place}": (positions == place).nonzero().squeeze(1) for place in places}
    for name, group in groups.items():
        if len(group) >= MIN_SAMPLES:
            u = uniforms[group]
            yield kolmogorov_smirnov(u)[1], f"likely or unlikely values are too frequent at {name}"
            yield kolmogorov_smirnov((2 * u - 1).abs())[1], f"values of medium probability are too frequent at {name}"
        observed = float(repeats[group, own[group]].sum())
        expected = float((chances[group] * repeats[group]).sum())
        yield (
            _poisson_p_value(observed, expected),
            f"{observed:.0f} values occur twice in their action at {name}, {expected:.1f} expected",
        )
    wanted: defaultdict[Hashable, float] = defaultdict(float)
    for row, chance in zip(values, chances.tolist(), strict=True):
        for key, p in zip(row, chance, strict=True):
            wanted[key] += p
    counts = Counter(row[place] for row, place in zip(values, own.tolist(), strict=True))
    kept = enough_expected([(counts[key], wanted[key]) for key in wanted if key is not None], len(own))
    if len(kept) > 1:
        worst = max(wanted, key=lambda key: (counts[key] - wanted[key]) ** 2 / max(wanted[key], 1.0))
        name = "no frequent value" if worst is None else repr(worst)[:40]
        yield counts_p_value(kept), f"{counts[worst]} are {name}, {wanted[worst]:.1f} expected"


def _poisson_p_value(observed: float, expected: float) -> float:
    """Twice the smaller tail of a Poisson distribution, which bounds that of a sum of rare events (Hoeffding 1956)."""
    mean = torch.tensor(max(expected, 1e-12), dtype=torch.float64)
    at_least = torch.special.gammainc(torch.tensor(observed, dtype=torch.float64), mean) if observed > 0 else 1.0
    at_most = torch.special.gammaincc(torch.tensor(observed + 1, dtype=torch.float64), mean)
    return min(2 * float(min(at_least, at_most)), 1.0)
