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

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo.types import ActionScores, Rows, row_totals, zero_outside

from .conditionals import CERTAIN, Entries, ScoreSteps, judge_conditionals, left_aligned
from .report import Verdict, note, passed, skipped
from .sampling import action_key, as_numbers, judge_counts, judge_lines, judge_samples, refusing_other_supports


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
        owner: Name of the sampling method, for messages.
        actions: N actions.
        log_probs: Log-prob of each step.
        mask: The steps that the policy decided.
        score: Scores other actions. None: only the log-probs of `actions` are known.
        noise: For actions of D real numbers, the numbers that the policy draws but does not decide. None: not known.
    """
    if score is not None:
        score = refusing_other_supports()(score)
    log_probs = zero_outside(log_probs.cpu().double(), mask.cpu())
    mask = mask.cpu()
    totals = log_probs.sum(1)
    numbers = as_numbers(actions)
    if numbers is not None and score is not None and len({action_key(action) for action in actions}) > len(actions) / 2:
        has_noise = noise is not None and bool(noise.any())
        if mask.shape[1] > 1 or has_noise:
            return _judge_numbers(owner, *numbers, log_probs, mask, score, noise)
    whole = judge_samples(owner, actions, totals, None if score is None else lambda others: _totals(score(others)))
    entries = Entries.of(actions)
    if whole.status == "failed" or entries is None:
        return whole
    steps = _judge_entries(owner, entries, log_probs, mask, score)
    if whole.status == "skipped" or steps.status == "failed":
        return steps if steps.status != "skipped" else skipped(f"{whole.message} {steps.message}")
    return whole if steps.status == "skipped" else passed(f"{whole.message} {steps.message}")


def _totals(scores: ActionScores) -> Tensor:
    return row_totals(scores.log_probs.cpu().double(), scores.mask.cpu())


def _judge_entries(owner: str, entries: Entries, log_probs: Tensor, mask: Tensor, score: ScoreSteps | None) -> Verdict:
    """Test the entries of actions that are sequences."""
    counts = mask.sum(1).tolist()
    in_order = left_aligned(log_probs, mask)
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
        verdict = judge_conditionals(owner, entries, score, aligned)
        if verdict.status == "failed":
            return verdict
        messages += [verdict.message] if verdict.status == "passed" else []
    return passed(" ".join(messages)) if messages else skipped("Too few steps repeat to test them one by one.")


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
        heights = scores.log_probs.cpu().double().gather(1, columns[samples].unsqueeze(1)).squeeze(1).exp()
        return torch.where(heights.isnan(), 0.0, heights)

    own = log_probs[:count].gather(1, columns.unsqueeze(1)).squeeze(1).exp()
    verdict = judge_lines(owner, values, axes, own, density)
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
        change = (scores.log_probs.cpu().double() - log_probs[: len(some)]).abs()
        found[:, d] = (change > CERTAIN * (1 + log_probs[: len(some)].abs())).any(0)
    return found
