"""What a run's numbers say, in words: one small rule per sign, which `docs/debugging.md` explains at length."""

from collections.abc import Callable

from adapters.tracking.report.run_data import RunData

from . import reward_rules, training_rules
from .findings import Finding, Kind

RULES: tuple[Callable[[RunData], Finding | None], ...] = (
    reward_rules.reward_trend,
    reward_rules.fell_again,
    reward_rules.evaluation_lags,
    reward_rules.dead_groups,
    reward_rules.no_advantages,
    reward_rules.failing_rewards,
    reward_rules.missing_parts,
    training_rules.entropy,
    training_rules.kl_is_zero,
    training_rules.clipping,
    training_rules.sampler,
    training_rules.ratio,
    training_rules.extreme_ratios,
    training_rules.lost_updates,
    training_rules.memory,
    training_rules.slow_part,
    training_rules.stopped_early,
)
"""The rules, in the order in which findings of one kind are shown."""


def diagnose(run: RunData) -> list[Finding]:
    """All findings of a run: problems first, then what is good, then notes."""
    found = [finding for rule in RULES if (finding := rule(run)) is not None]
    order: list[Kind] = ["problem", "good", "note"]
    return sorted(found, key=lambda finding: order.index(finding.kind))
