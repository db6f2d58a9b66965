"""Rules about training itself: entropy, KL, clipping, sampler, ratio, updates, memory and time."""

import numpy as np

from adapters.tracking.report.run_data import RunData
from adapters.tracking.report.series import longest_streak, share_of
from adapters.tracking.report.words import counted, number, percent

from .findings import LATE, PATIENCE, Finding

NUM_FIRST = 3
"""Number of iterations whose mean entropy is the entropy at the beginning, because it may collapse within a few more."""
LOW_ENTROPY = 0.05
"""Fraction of the entropy at the beginning below which the entropy counts as collapsed."""
MANY_CLIPPED = 0.3
"""Clip fraction above which most of the gradient is lost."""
FAR_SAMPLER = 0.01
"""Divergence in nats per step between sampler and policy that rounding cannot explain."""
FAR_RATIO = 1e-3
"""Distance of the mean ratio from 1 that rounding cannot explain if there is one update per iteration."""
MOST = 0.9
"""Fraction of the iterations that must show a sign which is normal now and then."""
TINY = 1e-6
"""A metric below this size counts as 0."""


def entropy(run: RunData) -> Finding | None:
    measured = run.of("train/entropy")
    measured = measured[np.isfinite(measured)]
    if len(measured) < PATIENCE:
        return None
    first, last = float(measured[:NUM_FIRST].mean()), share_of(measured, LATE)
    if first <= 0 or last >= LOW_ENTROPY * first:
        return None
    return Finding(
        kind="problem",
        title="The entropy has collapsed",
        text=f"It fell from {number(first)} to {number(last)} nats per step: the policy is nearly deterministic. "
        "That is normal if each state has one right action and the reward is at its best. Otherwise lower the learning rate, "
        "raise the upper clip bound, or add an entropy bonus or a KL penalty.",
    )


def kl_is_zero(run: RunData) -> Finding | None:
    updated = (run.of("train/kl_coef") > 0) & (run.of("train/num_updates") > 0)
    is_zero = np.abs(run.of("train/kl_mean")[updated]) < TINY
    if len(is_zero) < PATIENCE or is_zero.mean() < MOST:
        return None
    return Finding(
        kind="problem",
        title="The KL is 0, although it has a coefficient",
        text="The policy equals its reference, so that the KL penalty does nothing. Copy the policy to the reference once, "
        "before training, or use a larger reference_sync_every.",
    )


def clipping(run: RunData) -> Finding | None:
    clipped, updates = run.of("train/clip_fraction"), run.of("train/num_updates")
    late = share_of(clipped, LATE)
    if late > MANY_CLIPPED:
        return Finding(
            kind="problem",
            title="Much of the gradient is clipped",
            text=f"At the end, {percent(late)} of the steps were clipped. Use fewer epochs per update or a smaller "
            "learning rate.",
        )
    several = updates > 1
    if several.sum() < PATIENCE or not run.has("train/clip_fraction") or np.nan_to_num(clipped[several]).any():
        return None
    return Finding(
        kind="note",
        title="Nothing is ever clipped",
        text="There are several updates per iteration, and no ratio has left its bounds. A larger learning rate or more epochs "
        "would learn more from each sample.",
    )


def sampler(run: RunData) -> Finding | None:
    far = longest_streak(run.of("train/sampler_divergence") > FAR_SAMPLER) >= PATIENCE
    if not far or run.has("train/sampler_ratio_mean"):  # a correction is set
        return None
    return Finding(
        kind="problem",
        title="The sampler is not the policy",
        text=f"Actions are sampled from another distribution: {number(share_of(run.of('train/sampler_divergence')))} nats per "
        "step on average. Look at top_k, top_p, penalties, the engine's precision and its weights, or set "
        "objective.sampler_correction='truncate'.",
    )


def ratio(run: RunData) -> Finding | None:
    off = (np.abs(run.of("train/ratio_mean") - 1) > FAR_RATIO) & (run.of("train/num_updates") == 1)
    off &= ~(run.of("train/skipped_updates") > 0) & ~(run.of("rows/replayed") > 0)
    if longest_streak(off) < PATIENCE:
        return None
    return Finding(
        kind="problem",
        title="The ratio is not 1 at the first update",
        text="With one update per iteration, the policy that is updated is the policy that sampled, so every ratio is 1. The "
        "policy scores differently in train() and in eval(), for example because of dropout, or its scores are wrong: run "
        "grpo.checks.check_policy.",
    )


def extreme_ratios(run: RunData) -> Finding | None:
    count = int((run.of("train/ratio_clamped_fraction") > 0).sum())
    if not count:
        return None
    return Finding(
        kind="problem",
        title="Ratios are extreme",
        text=f"In {counted(count, 'iteration')}, ratios of the new to the old policy were so far from 1 that they were bounded "
        "to stay finite. The policy moves too far in one iteration: lower the learning rate or the number of epochs.",
    )


def lost_updates(run: RunData) -> Finding | None:
    alive = run.of("group_stats/zero_variance_fraction") == 0
    lost = float(np.nansum(np.where(alive, run.of("train/skipped_updates"), 0.0)))
    if lost == 0:
        return None
    return Finding(
        kind="problem",
        title="Updates were skipped",
        text=f"{counted(int(lost), 'update')} changed no weight, although all groups had different rewards: the gradient was "
        "not finite. Look for log(0), 0/0 and overflow in the policy, and lower the learning rate.",
    )


def memory(run: RunData) -> Finding | None:
    count = int(np.nansum(run.of("train/out_of_memory")))
    if not count:
        return None
    return Finding(
        kind="note",
        title="Memory ran out",
        text=f"Work was repeated {counted(count, 'time')} with half the rows. Set config.micro_batch_size to the number in the "
        "warning, so that the next run does not repeat work.",
    )


SLOW = 0.5
"""Seconds per iteration below which nobody waits."""
PHASE = {"sample": "sampling", "reward": "rewards", "score": "scoring", "update": "updates"}
ADVICE_ON_TIME = {
    "sample": "To be faster, sample for all states in one call, take shorter rows, or use a faster sampler.",
    "reward": "To be faster, compute all rows of a call together or in threads, and cache repeated results.",
    "score": "To be faster, return scores from sample_actions, or use a larger micro_batch_size.",
    "update": "To be faster, use a larger micro_batch_size, fewer epochs per update, or autocast_dtype='bfloat16'.",
}


def slow_part(run: RunData) -> Finding | None:
    total = share_of(run.of("time/iteration"))
    parts = {name: share_of(run.of(f"time/{name}")) for name in ADVICE_ON_TIME}
    largest = max(parts, key=lambda name: np.nan_to_num(parts[name]))
    if not total > SLOW or not parts[largest] > total / 2:
        return None
    return Finding(
        kind="note",
        title=f"Most of the time goes into {PHASE[largest]}",
        text=f"It takes {percent(parts[largest] / total)} of an iteration. {ADVICE_ON_TIME[largest]}",
    )


def stopped_early(run: RunData) -> Finding | None:
    planned, last = run.starts[-1].settings.get("num_iterations") if run.starts else None, int(run.iterations[-1])
    if not isinstance(planned, int) or last >= planned:
        return None
    return Finding(
        kind="note",
        title="The run is not complete",
        text=f"It has {last:,} of {counted(planned, 'iteration')}. It goes on, was stopped, or was ended by a callback. "
        "train(..., checkpoint_dir=..., resume='auto') continues a stopped run.",
    )
