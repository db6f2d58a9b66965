"""The trainer's settings."""

from dataclasses import dataclass
from typing import Literal

from .advantage_estimator import AdvantageConfig
from .grpo_objective import ObjectiveConfig
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
    """Rows per update. Smaller: more updates per iteration, each noisier and further off-policy. None: all rows."""
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
    advantage: AdvantageConfig = AdvantageConfig()
    """Rewards into advantages."""
    objective: ObjectiveConfig = ObjectiveConfig()
    """What is minimised."""
    reward: RewardConfig = RewardConfig()
    """What happens when a reward cannot be had."""
