"""Rules about rewards: did they rise, did they stay, can they be trusted?"""

import math

import numpy as np

from adapters.tracking.report.run_data import RunData
from adapters.tracking.report.series import Change, change_of, share_of
from adapters.tracking.report.words import counted, number, percent

from .findings import LATE, Finding

MANY_DEAD = 0.9
"""Fraction of dead groups above which hardly anything is learned."""


def reward_change(run: RunData) -> Change | None:
    """How the mean reward changed in training. None: fewer than two iterations measured it."""
    return change_of(run.of("rewards/mean"))


def reward_trend(run: RunData) -> Finding | None:
    change = reward_change(run)
    if change is None or change.window == 1:
        return None
    numbers = f"from {number(change.first)} to {number(change.last)} (means of {change.window} iterations)"
    if not change.is_clear:
        return Finding(
            kind="note",
            title="The reward did not change clearly",
            text=f"It went {numbers}, which is within the noise. Train longer, use more rows per iteration to see small gains, "
            "or look at the gradient norm and the dead groups: without a gradient nothing is learned.",
        )
    if change.difference > 0:
        return Finding(kind="good", title="The reward rose", text=f"It went {numbers}, more than noise explains.")
    return Finding(
        kind="problem",
        title="The reward fell",
        text=f"It went {numbers}. Use a smaller learning rate, fewer epochs per update or a KL penalty, and see whether "
        "advantages have the right sign.",
    )


def fell_again(run: RunData) -> Finding | None:
    """The best tenth of the run is far above its last tenth: more than half of what was gained is lost again."""
    rewards, change = run.of("rewards/mean"), reward_change(run)
    rewards = rewards[np.isfinite(rewards)]
    if change is None or change.window == 1:
        return None
    means = np.convolve(rewards, np.ones(change.window) / change.window, mode="valid")
    best, noise = float(means.max()), float(np.std(np.diff(rewards))) / math.sqrt(change.window)
    gained, lost = best - change.first, best - change.last
    if lost <= max(gained / 2, 4 * noise) or gained <= 4 * noise:
        return None
    place = run.iterations[np.isfinite(run.of("rewards/mean"))][int(means.argmax()) + change.window - 1]
    return Finding(
        kind="problem",
        title="The reward fell after a good start",
        text=f"Its best mean was {number(best)}, near iteration {number(round(place))}; the run ended at {number(change.last)}."
        " The policy moved too far from its samples. Lower the learning rate or the number of epochs, add a KL penalty, and "
        "keep the best checkpoint.",
    )


def evaluation_lags(run: RunData) -> Finding | None:
    """Since the first evaluation, the training reward rose, and the evaluation did not, and is now below it."""
    evaluation = run.of(run.evaluation or "")
    places = np.flatnonzero(np.isfinite(evaluation))
    training = change_of(run.of("rewards/mean")[places[0] :]) if len(places) >= 3 else None
    if training is None or not training.is_clear or training.difference <= 0:
        return None
    first, last = float(evaluation[places[0]]), float(evaluation[places[-1]])
    if last >= training.last or last - first > 0.1 * training.difference:
        return None
    return Finding(
        kind="problem",
        title="Training rewards rise, the evaluation does not",
        text=f"The training reward rose by {number(training.difference)}, and the evaluation went from {number(first)} to "
        f"{number(last)}. Evaluate on the training states: if they agree with training, there are too few training states, or "
        "the evaluation states are of another kind. If not, the policy exploits a part of the reward.",
    )


def dead_groups(run: RunData) -> Finding | None:
    dead = share_of(run.of("group_stats/zero_variance_fraction"), LATE)
    if math.isnan(dead) or dead < MANY_DEAD:
        return None
    change = reward_change(run)
    has_learned = change is not None and change.is_clear and change.difference > 0
    end = "At the end, " + percent(dead) + " of the groups had equal rewards, so hardly any row had an advantage."
    if has_learned:
        text = f"{end} After a rise of the reward this usually means that the task is solved: harder states would teach more."
        return Finding(kind="note", title="There is little left to learn", text=text)
    return Finding(
        kind="problem",
        title="Nearly all groups are dead",
        text=f"{end} Does the reward read the action? If rewards are rare, use larger groups, intermediate rewards, "
        "or easier states first. config.dynamic_sampling_rounds draws other states in place of dead groups.",
    )


def no_advantages(run: RunData) -> Finding | None:
    is_zero = (run.of("train/advantages_std") == 0) & (run.of("train/advantages_mean") == 0)
    count = int((is_zero & (run.of("group_stats/zero_variance_fraction") < 1)).sum())
    if not count:
        return None
    return Finding(
        kind="problem",
        title="All advantages are 0",
        text=f"In {counted(count, 'iteration')}, rewards differed within groups, and no row had an advantage. A setting "
        "removes the differences: advantage.scale='mean', negative_only, or a reward_clip that makes rewards equal.",
    )


def failing_rewards(run: RunData) -> Finding | None:
    named = {
        "rewards/failed_calls": "failed call",
        "rewards/retries": "repeated call",
        "rows/dropped": "dropped row",
        "rewards/zeroed": "reward set to 0",
    }
    counts = {noun: int(np.nansum(run.of(name))) for name, noun in named.items()}
    seen = [f"{count:,} {_plural(noun, count)}" for noun, count in counts.items() if count]
    if not seen:
        return None
    is_bad = bool(counts["dropped row"] or counts["reward set to 0"])
    return Finding(
        kind="problem" if is_bad else "note",
        title="The reward failed now and then",
        text=f"There were {', '.join(seen)}. Rows without a reward teach nothing; retries only cost time.",
    )


def _plural(noun: str, count: int) -> str:
    first, *rest = noun.split(" ", 1)
    if count == 1:
        return noun
    return " ".join([f"{first}s", *rest]) if first == "reward" else f"{noun}s"


def missing_parts(run: RunData) -> Finding | None:
    partly = {
        name.removeprefix("rewards/").removesuffix("/applies"): share_of(values)
        for name, values in run.metrics.items()
        if name.startswith("rewards/") and name.endswith("/applies") and share_of(values) < 1
    }
    if not partly:
        return None
    shares = ", ".join(f"{name} to {percent(share)}" for name, share in partly.items())
    return Finding(
        kind="note",
        title="A part of the reward does not apply to all rows",
        text=f"It applies to a fraction of the rows: {shares}. If it should apply to all, look for NaN or None in it.",
    )
