"""Test whether each step of sampled actions comes from the distribution that scores the step.

Actions of several steps rarely repeat, so whole actions cannot be counted. Their steps can. With a = (a_1, ..., a_T) and
log-probs l_t, the sampler is right if and only if P(a_t = v | a_<t) = exp(l_t(v, a_<t)) for every t. Three tests follow:

1. Prefixes. P(a_<=t) = exp(l_1 + ... + l_t), so the first step, the first two steps and so on are counted like whole
   actions, by a chi-square test, as long as they repeat.
2. Conditionals. The entry a_t of a sample is replaced by other values v that were sampled at t, and the policy scores the
   altered actions. That gives p(v) = exp(l_t(v, a_<t)) for the sample's own prefix. Values that were not sampled share one
   cell of probability 1 - sum_v p(v). The values come from one half of the samples, and the other half is tested, so the cells
   do not depend on the samples under test. With cells in order of probability, F their cumulative sums and U uniform on [0, 1],

       u = F(a_t -) + U p(a_t)

   is uniform for every prefix, and independent of the u of other steps (the randomised probability integral transform), so
   all steps share one Kolmogorov-Smirnov test. The p(v) also add up to the expected number of each value, and of values
   that occur twice in an action. And the sum of log p(a_t), whose mean and variance the p(v) give, is tested by Bernstein's
   inequality. It is the derivative by the inverse temperature, so it is the most sensitive to another temperature.
3. If the steps are not the entries in order, or if there is one log-prob per action, the same with the log-prob of the whole
   action: a_e given all other entries has the distribution p(v) / sum_v' p(v') over the values v, v' that are compared.

Actions of real numbers are tested along lines (see `judge_lines`). The line of a number uses only the step that scores the
number. It is the first step whose log-prob depends on the number. Steps may depend on numbers that no step scores, such as
the noise that a flow starts with: numbers that do not change with the parameters are not tested.

Source:
    Rosenblatt 1952, "Remarks on a multivariate transformation", Ann. Math. Statist. 23 (conditionals);
    Czado, Gneiting and Held 2009, "Predictive model assessment for count data", Biometrics 65 (randomised transform);
    Boucheron, Lugosi and Massart 2013, "Concentration inequalities", corollary 2.11 (Bernstein).
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo.types import ActionScores, Rows, row_totals, zero_outside

from .report import Verdict, failed, note, passed, skipped
from .sampling import (
    ADVICE,
    MASS_TOLERANCE,
    P_VALUE,
    action_key,
    as_numbers,
    counts_p_value,
    enough_expected,
    judge_counts,
    judge_lines,
    judge_samples,
    kolmogorov_smirnov,
)

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


def judge_draws(
    owner: str,
    actions: Rows,
    log_probs: Float[Tensor, "N T"],
    mask: Bool[Tensor, "N T"],
    score: ScoreSteps | None,
    noise: Bool[Tensor, " D"] | None = None,
) -> Verdict:
    """Test whether N actions sampled in one state, and their steps, are distributed according to their log-probs.

    Args:
        owner: name of the sampling method, for messages.
        actions: N actions.
        log_probs: log-prob of each step.
        mask: the steps that the policy decided.
        score: scores other actions. None: only the log-probs of `actions` are known.
        noise: for actions of D real numbers, the numbers that the policy draws but does not decide. None: there are none.
    """
    log_probs = zero_outside(log_probs.double().cpu(), mask.cpu())
    mask = mask.cpu()
    totals = log_probs.sum(1)
    numbers = as_numbers(actions)
    if numbers is not None and score is not None and len({action_key(action) for action in actions}) > len(actions) / 2:
        has_noise = noise is not None and bool(noise.any())
        if mask.shape[1] > 1 or has_noise:
            return _judge_numbers(owner, *numbers, log_probs, mask, score, noise)
    whole = judge_samples(owner, actions, totals, None if score is None else lambda others: _totals(score(others)))
    entries = _Entries.of(actions)
    if whole.status == "failed" or entries is None:
        return whole
    steps = _judge_entries(owner, entries, log_probs, mask, score)
    if whole.status == "skipped" or steps.status == "failed":
        return steps if steps.status != "skipped" else skipped(f"{whole.message} {steps.message}")
    return whole if steps.status == "skipped" else passed(f"{whole.message} {steps.message}")


def _totals(scores: ActionScores) -> Tensor:
    return row_totals(scores.log_probs.double(), scores.mask)


@dataclass(frozen=True, slots=True)
class _Entries:
    """Actions as sequences of values."""

    rows: list[list[Any]]
    """The entries of each action."""
    keys: list[tuple[Hashable, ...]]
    """The same, as values that can be compared."""
    rebuild: Callable[[list[list[Any]]], Rows]
    """Makes actions of entries."""

    @classmethod
    def of(cls, actions: Rows) -> "_Entries | None":
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


def _judge_entries(owner: str, entries: _Entries, log_probs: Tensor, mask: Tensor, score: ScoreSteps | None) -> Verdict:
    """Test the entries of actions that are sequences."""
    counts = mask.sum(1).tolist()
    in_order = _compact(log_probs, mask)
    decided = [keys[:count] for keys, count in zip(entries.keys, counts, strict=True)]
    aligned = all(len(keys) == count for keys, count in zip(decided, counts, strict=True)) and mask.shape[1] > 1
    aligned = aligned and _prefixes_agree(decided, in_order)
    same_length = len({len(keys) for keys in entries.keys}) == len(set(counts)) == 1
    messages: list[str] = []
    if aligned:
        entries = replace(entries, keys=decided)  # entries after the last step are padding
        verdict = _judge_prefixes(owner, decided, in_order)
        if verdict.status == "failed":
            return verdict
        messages += [verdict.message] if verdict.status == "passed" else []
    if score is not None and (aligned or same_length) and max(map(len, entries.keys)) > 1:
        cells = _conditionals(entries, score, aligned)
        verdict = _judge_conditionals(owner, cells, aligned)
        if verdict.status == "failed":
            return verdict
        messages += [verdict.message] if verdict.status == "passed" else []
    return passed(" ".join(messages)) if messages else skipped("Too few steps repeat to test them one by one.")


def _compact(log_probs: Tensor, mask: Tensor) -> Tensor:
    """The valid steps of each row, moved to the left, and 0 after them."""
    order = (~mask).int().argsort(dim=1, stable=True)
    return zero_outside(log_probs, mask).gather(1, order)


def _prefixes_agree(keys: Sequence[tuple[Hashable, ...]], log_probs: Tensor) -> bool:
    """Whether the log-prob of step t is the same in all samples that agree in their first t entries."""
    seen: dict[Hashable, float] = {}
    for row, values in zip(keys, log_probs.tolist(), strict=True):
        for t in range(len(row)):
            expected = seen.setdefault(row[: t + 1], values[t])
            if not abs(values[t] - expected) <= CERTAIN * (1 + abs(expected)):
                return False
    return True


def _judge_prefixes(owner: str, keys: Sequence[tuple[Hashable, ...]], log_probs: Tensor) -> Verdict:
    """Count the first step, the first two steps, and so on, as long as they repeat."""
    sums, deepest = log_probs.cumsum(1), 0
    while deepest < log_probs.shape[1] and len({row[: deepest + 1] for row in keys}) <= len(keys) / 2:
        deepest += 1
    messages = []
    for t in range(deepest):
        first = "the first step" if t == 0 else f"the first {t + 1} steps"
        verdict = judge_counts(f"{owner}, {first}", [row[: t + 1] for row in keys], sums[:, t], tests=deepest)
        if verdict.status == "failed":
            return verdict
        messages += [f"{first[0].upper()}{first[1:]}: {verdict.message}"] if verdict.status == "passed" else []
    return passed(messages[-1]) if messages else skipped("No first steps repeat.")


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


def _conditionals(entries: _Entries, score: ScoreSteps, aligned: bool) -> _Cells | None:
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
    entries: _Entries,
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
    log_probs = zero_outside(scores.log_probs.double().cpu(), kept)
    if aligned:
        found = _compact(log_probs, kept).gather(1, places.clamp(max=kept.shape[1] - 1).unsqueeze(1)).squeeze(1)
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


def _judge_conditionals(owner: str, cells: _Cells | None, aligned: bool) -> Verdict:
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


def _judge_numbers(
    owner: str,
    values: Tensor,
    rebuild: Callable[[Tensor], Rows],
    log_probs: Tensor,
    mask: Tensor,
    score: ScoreSteps,
    noise: Tensor | None,
) -> Verdict:
    """Test each step's density along lines parallel to the numbers that the step scores."""
    spread = values.amax(0) > values.amin(0)
    decided = spread if noise is None else spread & ~noise
    try:
        depends = _dependencies(values, rebuild, log_probs, score)
    except Exception:  # recovery: the policy may refuse numbers that it cannot sample
        return skipped("The policy does not score altered actions, and its steps cannot be told apart.")
    step_of: dict[int, int] = {}
    for column in range(mask.shape[1]):
        if bool(mask[:, column].all()):
            new = [d for d in (depends[column] & decided).nonzero().squeeze(1).tolist() if d not in step_of]
            if noise is None and len(new) > 1 and mask.shape[1] > 1:
                return skipped(
                    "Samples of the same seed differ, so noise cannot be told from what the policy decides. Draw from torch's "
                    "own generator, or keep your generator in state_dict()."
                )
            step_of |= dict.fromkeys(new, column)
            if not new and bool((depends[column] & decided).any()):
                return skipped(
                    "Steps score numbers that earlier steps depend on, so they have no conditional densities."
                )
    if not step_of:
        return skipped("No log-prob of a step that all samples have depends on a number that the policy decides.")
    count = max(len(values) // 2, 1)
    axes = torch.tensor(list(step_of))[torch.arange(count) % len(step_of)]
    columns = torch.tensor([step_of[axis] for axis in axes.tolist()])

    def density(numbers: Tensor, samples: Tensor) -> Tensor:
        scores = score(rebuild(numbers))
        heights = scores.log_probs.double().cpu().gather(1, columns[samples].unsqueeze(1)).squeeze(1).exp()
        return torch.where(heights.isnan(), 0.0, heights)

    own = log_probs[:count].gather(1, columns.unsqueeze(1)).squeeze(1).exp()
    verdict = judge_lines(owner, values[:count], axes, own, density)
    unscored = (decided & ~depends.any(0)).nonzero().squeeze(1).tolist()
    if verdict.status == "passed" and unscored:
        return note(
            f"{verdict.message} No log-prob depends on the numbers {unscored[:8]} of an action. That is right if they follow "
            "from the others, like the last step of a flow. If they are drawn, score them."
        )
    return verdict


def _dependencies(
    values: Tensor, rebuild: Callable[[Tensor], Rows], log_probs: Tensor, score: ScoreSteps
) -> Bool[Tensor, "T D"]:
    """Whether the log-prob of a step changes with a number of the action: each number is exchanged between samples."""
    some = values[: min(len(values), 16)]
    found = torch.zeros(log_probs.shape[1], values.shape[1], dtype=torch.bool)
    for d in range(values.shape[1]):
        other = some.clone()
        other[:, d] = some[:, d].roll(1)
        scores = score(rebuild(other))
        change = (scores.log_probs.double().cpu() - log_probs[: len(some)]).abs()
        found[:, d] = (change > CERTAIN * (1 + log_probs[: len(some)].abs())).any(0)
    return found
