"""The trainer's settings."""

from dataclasses import dataclass, field
from typing import Literal

from .adaptive_coefficients import EntropyControl, KLControl
from .advantage_estimator import AdvantageConfig
from .errors import ConfigError
from .objective_config import ObjectiveConfig
from .reward_calls import RewardConfig
from .settings import Settings, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOConfig(Settings):
    """How a policy is trained; every value is checked, `to_dict` and `from_dict` round-trip.

    Raises:
        ConfigError: naming the field.

    Example:
        >>> GRPOConfig.from_dict({"group_size": 4, "objective": {"clip_low": 0.1}}).objective.clip_low
        0.1
    """

    group_size: int = setting(8, at_least=1)
    """Actions sampled per state (G). Larger: better baselines, fewer states for the same work. Groups of one learn nothing
    under a baseline of their own group."""
    num_states_per_iteration: int | None = setting(None, at_least=1)
    """States that `train` draws for one iteration (B). None: all of them."""
    batch_size: int | None = setting(None, at_least=1)
    """Rows per update, on each rank. Smaller: more updates per iteration, each noisier and further off-policy. None: all."""
    micro_batch_size: int | None = setting(None, at_least=1)
    """Rows per forward. Smaller: less memory, the same gradient. None: all rows of the update."""
    num_epochs_per_update: int = setting(1, at_least=1)
    """Passes over one iteration's rows. Larger: more learned per sample, until clipping stops it."""
    learning_rate: float = setting(1e-3, above=0.0)
    """Of the AdamW that is made when no optimizer is passed."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """From the learning rate to 0 over the iterations of `train`, or not at all."""
    warmup_ratio: float = setting(0.0, at_least=0.0, below=1.0)
    """Fraction of `train`'s iterations over which the learning rate rises from 0."""
    max_grad_norm: float | None = setting(1.0, above=0.0)
    """Total gradient norm above which gradients are scaled down. Smaller: steadier, slower. None: no bound."""
    max_skipped_updates: int = setting(10, at_least=1)
    """Updates in a row with a gradient that is not finite, after which training stops."""
    autocast_dtype: Literal["bfloat16", "float16"] | None = None
    """Run the policy under `torch.autocast`; float16 on CUDA scales the loss too. None: as the policy computes."""
    device: str | None = None
    """Where policy, reference and reward model are moved to. None: they stay where they are."""
    seed: int | None = setting(None, at_least=0, at_most=2**64 - 1)
    """Seeds Python, numpy and torch when the trainer is built, and the order of rows and states. None: left alone."""
    kl_control: KLControl | None = None
    """How the KL coefficient follows the measured divergence. None: it stays."""
    entropy_control: EntropyControl | None = None
    """How the entropy coefficient follows the measured entropy. None: it stays."""
    reference_sync_every: int | None = setting(None, at_least=1)
    """Iterations after which the reference policy moves towards the policy. Smaller pulls back less far. None: it is frozen."""
    reference_mix: float = setting(1.0, above=0.0, at_most=1.0)
    """How far it moves: 1 copies the policy. With `reference_sync_every=1`, an exponential moving average of decay 1 - mix.
    Copying at every iteration leaves no divergence to pull on: use a longer interval or a smaller mix."""
    dynamic_sampling_rounds: int = setting(0, at_least=0)
    """Times that `train` may draw more states to replace groups without differences, which are left out. Larger fills the
    batch more often, and costs more samples. 0: every group is used as it comes."""
    replay_iterations: int = setting(0, at_least=0)
    """Earlier iterations whose rows are used again beside the new ones: the limit on their staleness. Larger learns more from
    each sample, and from older policies. 0: every row is used in its own iteration only."""
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    """Rewards into advantages."""
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    """What is minimised."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """What happens when a reward cannot be had."""

    def __post_init__(self) -> None:
        """Check every value, and that groups are large enough for what they are compared by."""
        Settings.__post_init__(self)
        if self.advantage.k is not None and self.advantage.k > self.group_size:
            raise ConfigError(
                f"GRPOConfig.group_size={self.group_size} has fewer rows than the advantage.k={self.advantage.k} attempts it "
                "is to estimate the best of: raise group_size, or lower k."
            )


def needed_fields(config: GRPOConfig, *, has_own_loss: bool) -> set[str]:
    """What these settings read of a batch beside what every update needs."""
    needed = set()
    if config.replay_iterations or (config.objective.selects_across_rows and not has_own_loss):
        needed.add("old_log_probs")
    if config.objective.top_entropy_fraction < 1.0 and not has_own_loss:
        needed.add("entropy")
    if config.advantage.credit == "gae":
        needed.add("values")
    if config.advantage.credit == "gigpo":
        needed.add("state_keys")
    return needed


def require_step_level(config: GRPOConfig) -> None:
    """A policy that splits its rows into steps has no rows left for the loss to look at.

    Raises:
        ConfigError: a setting that works on rows.
    """
    loss = config.objective
    looks_at_rows = loss.ratio_level not in ("step", "none") or loss.surrogate in ("gmpo", "vespo")
    if looks_at_rows or loss.sampler_ratio_level == "row" or loss.off_policy_threshold is not None:
        raise ConfigError(
            "A policy with split_steps() is updated step by step, and this loss looks at rows: "
            f"objective.ratio_level={loss.ratio_level!r}, surrogate={loss.surrogate!r}, "
            f"sampler_ratio_level={loss.sampler_ratio_level!r}, off_policy_threshold={loss.off_policy_threshold}. Set all to "
            "those of steps, or leave split_steps() out."
        )
