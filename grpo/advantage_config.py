"""The settings of the advantages."""

from dataclasses import dataclass
from typing import Literal

from .errors import ConfigError
from .group_advantages import Baseline, Scale
from .settings import Settings, setting

Credit = Literal["row", "return_to_go", "process_supervision", "gae", "gigpo"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageConfig(Settings):
    """How rewards become advantages."""

    credit: Credit | None = None
    """Which steps a reward is credited to. `row`: all steps of its row alike. For rewards per step: `return_to_go`, the steps
    before it; `process_supervision`, likewise, after standardising step rewards within the group. `gae`: by a critic (the
    policy gives `values`), which is trained beside the policy. `gigpo`: the row, plus what followed in the same state (the
    policy gives `state_keys`). None: `return_to_go` for rewards per step, `row` for rewards per row."""
    baseline: Baseline = "group_mean"
    """What a reward is compared with; see `group_relative_advantages`. `gae` has its own."""
    scale: Scale = "none"
    """What the difference is divided by. Dividing by the group's standard deviation makes easy and hard states weigh alike,
    and lets noise in nearly constant groups weigh as much as signal elsewhere."""
    std_ddof: int = setting(1, at_least=0, at_most=1)
    """Divisor n - ddof in the standard deviation."""
    std_eps: float = setting(0.0, at_least=0.0)
    """Added to what is divided by. Larger damps groups with small differences."""
    k: int | None = setting(None, at_least=2)
    """Attempts of the baseline `max_at_k`. Larger cares more for rare successes, and less for being right every time."""
    several_rewards: Literal["sum", "normalize_each"] = "sum"
    """Several named rewards: their weighted sum is normalised, or each is, before they are added (GDPO)."""
    gamma: float = setting(1.0, at_least=0.0, at_most=1.0)
    """Discount per column, for rewards per step, masked columns included. Smaller looks less far ahead."""
    gae_lambda: float = setting(0.95, at_least=0.0, at_most=1.0)
    """`gae`: larger trusts what followed, smaller trusts the critic."""
    gigpo_weight: float = setting(1.0, at_least=0.0)
    """`gigpo`: weight of the step's advantage among equal states, beside the row's among its group."""
    upweight_live_groups: bool = False
    """Multiply by rows / rows in groups with differences, so that dead groups do not shrink the gradient (GPG)."""
    positive_weight: float = setting(1.0, at_least=0.0)
    """Factor on advantages above 0. Smaller learns more from what went wrong, which keeps the policy varied."""
    negative_only: bool = False
    """Advantages above 0 become 0: the same as a `positive_weight` of 0."""
    clip: float | None = setting(None, above=0.0)
    """Bound on the advantage's size; smaller tames outliers, and biases."""
    reward_clip: float | None = setting(None, above=0.0)
    """Bound on a reward's size, before anything else is done with it. Metrics show rewards as they came."""
    normalize_rewards: bool = False
    """Divide rewards by the running standard deviation of rows' total rewards: a learning rate then fits any unit of reward."""

    def __post_init__(self) -> None:
        """Check every value, and that choices do not contradict one another."""
        Settings.__post_init__(self)
        if (self.baseline == "max_at_k") != (self.k is not None):
            raise ConfigError(
                f"AdvantageConfig.k={self.k} with baseline={self.baseline!r}: 'max_at_k' needs k=the number of attempts, and "
                "the other baselines need k=None."
            )
        if self.negative_only and self.positive_weight not in (0.0, 1.0):
            raise ConfigError(
                f"AdvantageConfig.negative_only and positive_weight={self.positive_weight} contradict each other: keep one."
            )
        if self.credit == "gae" and self.scale not in ("none", "batch", "whiten"):
            raise ConfigError(
                f"AdvantageConfig.scale={self.scale!r} is over groups, which credit='gae' has not: use 'none', 'batch' or "
                "'whiten'."
            )
        if self.credit not in (None, "row") and self.baseline in ("max_at_k", "length_weighted"):
            raise ConfigError(
                f"AdvantageConfig.baseline={self.baseline!r} compares whole rows: use it with credit='row', not "
                f"{self.credit!r}."
            )
        if self.credit in ("process_supervision", "gigpo") and self.baseline == "global_mean":
            raise ConfigError(
                f"AdvantageConfig.baseline='global_mean' has no meaning under credit={self.credit!r}, which compares within "
                "groups."
            )
        if self.several_rewards == "normalize_each" and (
            self.credit not in (None, "row")
            or (self.baseline, self.scale) != ("group_mean", "none")
            or self.reward_clip is not None
            or self.normalize_rewards
        ):
            raise ConfigError(
                "AdvantageConfig.several_rewards='normalize_each' standardises each reward within its group and their sum over "
                f"the batch, and reads nothing else; got credit={self.credit!r}, baseline={self.baseline!r}, "
                f"scale={self.scale!r}, reward_clip={self.reward_clip}, normalize_rewards={self.normalize_rewards}. Set "
                "credit=None, baseline='group_mean', scale='none', reward_clip=None, normalize_rewards=False."
            )
