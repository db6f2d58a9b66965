"""What a run's numbers say, in words: the advice of `grpo.evaluation.advice`, and what only a whole run can tell."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from jaxtyping import Float64

from grpo.evaluation.advice import PATIENCE, advice_on

from .run_data import RunData, phase_times
from .series import Change, change_of, longest_streak, share_of
from .signals import is_distilled, signals_of
from .words import counted, number, percent

Kind: TypeAlias = Literal["good", "note", "problem"]

FAR_RATIO = 1e-3
"""Distance of the mean ratio from 1 that rounding cannot explain if there is one update per iteration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that the numbers say."""

    kind: Kind
    """`problem`: look at it. `note`: good to know. `good`: as it should be."""
    title: str
    """The finding in a few words."""
    text: str
    """The numbers behind it, and what to do."""


def diagnose(run: RunData) -> list[Finding]:
    """All findings of a run: problems first, then what is good, then notes."""
    found = [finding for rule in RULES if (finding := rule(run)) is not None] + advised(run)
    order: list[Kind] = ["problem", "good", "note"]
    return sorted(found, key=lambda finding: order.index(finding.kind))


def advised(run: RunData) -> list[Finding]:
    """The advice that the trainer logs while it trains, without what was over at the end of the run."""
    return [
        Finding(
            kind="problem" if rule.kind == "problem" else "note",
            title=rule.sign[0].upper() + rule.sign[1:],
            text=rule.words(at_end(run)),
        )
        for rule in advice_on(iterations_of(run), config_of(run))
    ]


def iterations_of(run: RunData) -> Iterator[dict[str, float]]:
    """The metrics that each logged iteration measured."""
    columns = {name: values.tolist() for name, values in run.metrics.items()}
    for place in range(len(run.iterations)):
        yield {name: values[place] for name, values in columns.items() if math.isfinite(values[place])}


def config_of(run: RunData) -> dict[str, Any]:
    """The `GRPOConfig` of the latest start, as plain values. Empty: the folder has no settings."""
    config = run.starts[-1].settings.get("config") if run.starts else None
    return config if isinstance(config, dict) else {}


def at_end(run: RunData) -> dict[str, float]:
    """The mean of each metric over the last tenth of the run."""
    return {name: mean for name, values in run.metrics.items() if math.isfinite(mean := share_of(values, 0.1))}


def reward_change(run: RunData) -> Change | None:
    """How the mean reward changed in training. None: fewer than two iterations measured it."""
    return change_of(run.of("rewards/mean"))


def teacher_trend(run: RunData) -> Finding | None:
    change = change_of(run.of("train/kl_mean"))
    if not is_distilled(run) or change is None or change.window == 1:
        return None
    numbers = f"from {number(change.first)} to {number(change.last)} nats per step"
    why = "All rewards of each group are equal, so the policy learns from its reference alone, its teacher."
    if change.is_clear and change.difference < 0:
        text = f"The KL to it went {numbers}. {why}"
        return Finding(kind="good", title="The policy came closer to its teacher", text=text)
    return Finding(
        kind="note",
        title="The policy did not come clearly closer to its teacher",
        text=f"The KL to it went {numbers}. {why} Train longer, use a larger learning rate, or look at the gradient norm. The "
        "estimator k1 has an expected gradient of 0.",
    )


def demonstration_trend(run: RunData) -> Finding | None:
    return _trend_of_loss(
        run.of("train/demonstration_loss"),
        falls="The policy came closer to its demonstrations",
        stays="The loss of demonstrations did not fall clearly",
        advice="Train longer or use a larger learning rate. Beside rewards, raise objective.demonstration_coef.",
    )


def observation_trend(run: RunData) -> Finding | None:
    return _trend_of_loss(
        run.of("train/observation_loss"),
        falls="The policy foresees its environment better",
        stays="The loss of observations did not fall clearly",
        advice="Random answers cannot be foreseen. A larger objective.observation_coef learns more from answers.",
    )


def _trend_of_loss(values: Float64[np.ndarray, " I"], *, falls: str, stays: str, advice: str) -> Finding | None:
    change = change_of(values)
    if change is None or change.window == 1:
        return None
    numbers = (
        f"The loss went from {number(change.first)} to {number(change.last)} (means of {change.window} iterations)."
    )
    if change.is_clear and change.difference < 0:
        return Finding(kind="good", title=falls, text=numbers)
    return Finding(kind="note", title=stays, text=f"{numbers} {advice}")


def reward_trend(run: RunData) -> Finding | None:
    change = reward_change(run)
    is_signal = any(signal.metric == "rewards/mean" for signal in signals_of(run))
    if change is None or change.window == 1 or not is_signal:
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
    # four, because the best of many means is above the others by chance
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


def failing_rewards(run: RunData) -> Finding | None:
    named = {
        "rewards/failed_calls": ("failed call", "failed calls"),
        "rewards/retries": ("repeated call", "repeated calls"),
        "rows/dropped": ("dropped row", "dropped rows"),
        "rewards/zeroed": ("reward set to 0", "rewards set to 0"),
    }
    counts = {name: int(np.nansum(run.of(name))) for name in named}
    seen = [f"{count:,} {named[name][count > 1]}" for name, count in counts.items() if count]
    if not seen:
        return None
    is_bad = bool(counts["rows/dropped"] or counts["rewards/zeroed"])
    return Finding(
        kind="problem" if is_bad else "note",
        title="The reward failed now and then",
        text=f"There were {', '.join(seen)}. Rows without a reward teach nothing; retries only cost time.",
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


SLOW = 10.0
"""Seconds per iteration below which no advice on time is given."""
PHASE = {"sample": "sampling", "reward": "rewards", "score": "scoring", "update": "updates"}
ADVICE_ON_TIME = {
    "sample": "To be faster, sample for all states in one call, take shorter rows, or use a faster sampler.",
    "reward": "To be faster, compute all rows of a call together or in threads, and cache repeated results.",
    "score": "To be faster, return scores from sample_actions.",
    "update": "To be faster, use fewer epochs per update, or autocast_dtype='bfloat16'.",
}
IN_SMALL_PARTS = " A forward pass has {size} rows: if memory allows, use a larger micro_batch_size."


def slow_part(run: RunData) -> Finding | None:
    times = phase_times(run)
    largest, total = max(times, key=lambda name: times[name], default="other"), sum(times.values())
    if not share_of(run.of("time/iteration")) > SLOW or largest == "other" or not times[largest] > total / 2:
        return None
    size = config_of(run).get("micro_batch_size")  # None: all rows of an update are one forward pass already
    is_in_small_parts = largest in ("score", "update") and size is not None
    return Finding(
        kind="note",
        title=f"Most of the time goes into {PHASE[largest]}",
        text=f"It takes {percent(times[largest] / total)} of an iteration. {ADVICE_ON_TIME[largest]}"
        f"{IN_SMALL_PARTS.format(size=size) if is_in_small_parts else ''}",
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


RULES: tuple[Callable[[RunData], Finding | None], ...] = (
    reward_trend,
    teacher_trend,
    demonstration_trend,
    observation_trend,
    fell_again,
    evaluation_lags,
    failing_rewards,
    ratio,
    lost_updates,
    memory,
    slow_part,
    stopped_early,
)
"""The rules that need more than the metrics of one iteration after another, in the order in which findings are shown."""
