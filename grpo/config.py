"""Every setting but those of surrogates and sampler corrections, which hold their own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ._advantages.groups import Baseline, Credit, Scale
from ._objective.sampler import Mask, SamplerCorrection, Truncate, require_order
from ._objective.weights import Aggregation
from .divergence import EntropyEstimator, KLEstimator
from .errors import ConfigError
from .surrogates import SURROGATES, Clip, Surrogate, traits_of
from .writing import Settings, describe, setting

DEFAULT_KL_COEF = 0.04
"""The KL coefficient where a reference policy is passed and none is set (DeepSeekMath, arXiv:2402.03300, sec. 4.2)."""

CORRECTIONS: dict[str, type[Settings]] = {"truncate": Truncate, "mask": Mask}
"""A sampler correction's name stands for the class with its defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageConfig(Settings):
    """How rewards become advantages."""

    credit: Credit | None = None
    """The steps that a reward is credited to. `row`: all steps of its row alike. For rewards per step: `return_to_go`, the
    step and those before it; `process_supervision`, the same after standardising step rewards within the group. `gae`: by
    a critic, which is trained beside the policy (the policy gives `values`). `gigpo`: the row, plus what followed in the
    same state (the policy gives `state_keys`). None: `return_to_go` for rewards per step, `row` for rewards per row."""
    baseline: Baseline = "group_mean"
    """What a reward is compared with; see `group_relative_advantages`. `gae` has its own baseline."""
    scale: Scale = "none"
    """What the difference is divided by. The group's standard deviation makes easy and hard states weigh the same, and lets
    noise in nearly constant groups weigh as much as signal elsewhere."""
    std_ddof: int = setting(1, at_least=0, at_most=1)
    """The divisor of the standard deviation is n - ddof."""
    std_eps: float = setting(0.0, at_least=0.0)
    """Added to the divisor. Larger damps groups with small differences."""
    k: int | None = setting(None, at_least=2)
    """Attempts of the baseline `max_at_k`. Larger cares more for rare successes, and less for being right every time."""
    several_rewards: Literal["sum", "normalize_each"] = "sum"
    """Several named rewards: normalise their weighted sum, or normalise each before they are added (GDPO)."""
    gamma: float = setting(1.0, at_least=0.0, at_most=1.0)
    """Discount per column, for rewards per step, `gae` and `gigpo`; masked columns count. Smaller looks less far ahead."""
    gae_lambda: float = setting(0.95, at_least=0.0, at_most=1.0)
    """For `gae`. Larger trusts the rewards that followed, smaller trusts the critic."""
    gigpo_weight: float = setting(1.0, at_least=0.0)
    """For `gigpo`: the weight of the step's advantage among equal states, beside the row's advantage among its group."""
    upweight_live_groups: bool = False
    """Multiply by rows / rows in groups with differences: groups without differences then do not shrink the gradient (GPG)."""
    positive_weight: float = setting(1.0, at_least=0.0)
    """Factor on advantages above 0. Smaller learns more from what went wrong, which keeps the policy varied."""
    negative_only: bool = False
    """Set advantages above 0 to 0: the same as a `positive_weight` of 0."""
    clip: float | None = setting(None, above=0.0)
    """Bound on the size of an advantage. Smaller tames outliers and adds bias. None: no bound."""
    reward_clip: float | None = setting(None, above=0.0)
    """Bound on the size of a reward before anything else is done with it. Metrics show unclipped rewards. None: no bound."""
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
                f"AdvantageConfig.scale={self.scale!r} is over groups, and credit='gae' has no groups: use 'none', 'batch' or "
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
        self._require_plain_normalisation()

    def _require_plain_normalisation(self) -> None:
        """GDPO standardises each reward its own way, so it contradicts other ways."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveConfig(Settings):
    """What is minimised: surrogate + KL - entropy (+ value error). Every choice is independent of the others."""

    surrogate: Surrogate | str = Clip()  # noqa: RUF009 - frozen
    """The policy's loss per step: an object of `grpo.surrogates` such as `Clip(high=0.28)`, its name, or any function
    `Steps -> [N, T]` of your own. A name becomes the object with its defaults."""
    sampler_correction: SamplerCorrection | str | None = None
    """Importance weights for actions that another distribution sampled (`behaviour_log_probs`): `Truncate(...)`, `Mask(...)`,
    the name of one, or a callable of your own. They multiply the surrogate only. None: no correction."""
    top_entropy_fraction: float = setting(1.0, above=0.0, at_most=1.0)
    """Fraction of the update's steps, those of highest entropy, that the surrogate counts. Smaller learns from the most open
    decisions only. Needs an exact entropy."""
    off_policy_threshold: float | None = setting(None, at_least=0.0)
    """Rows with A < 0 leave the surrogate once the mean of sampled minus current log-probs exceeds this. Larger keeps more
    rows. None: all rows count."""
    kl_coef: float | None = setting(None, at_least=0.0)
    """Weight of the KL to the reference. Larger stays closer to it. None: 0.04 if a reference policy is passed, else 0."""
    kl_estimator: KLEstimator = "k3"
    """How the KL is estimated from the sampled step; see the gradient notes in `grpo.divergence`. `exact`: the policy gives
    it in `ActionScores.kl`."""
    entropy_coef: float = setting(0.0, at_least=0.0)
    """Weight of the entropy bonus. Larger keeps the policy more random. The entropy is per step: a policy that returns the
    log-prob of several decisions as one [N] has one large entropy where [N, T] has T small ones."""
    entropy_estimator: EntropyEstimator = "exact"
    """`exact` needs a policy that gives `ActionScores.entropy`; `score_function` works for every policy, with noise."""
    entropy_aggregation: Aggregation | None = None
    """How the entropy term is aggregated. None: as `aggregation`."""
    value_coef: float = setting(0.5, at_least=0.0)
    """Weight of the squared error of a critic's values. Larger trains the critic faster. For `advantage.credit="gae"`."""
    value_clip: float | None = setting(None, above=0.0)
    """How far a value may move from its value at collection before its error has no gradient. None: no bound."""
    aggregation: Aggregation = "row_mean"
    """How per-step losses become one number. The trainer turns it into weights (see `step_weights`). With `split_steps` a step
    is a row of its own: every choice but `fixed_length` then gives each step of the update the same weight."""
    fixed_length: int | None = setting(None, at_least=1)
    """The divisor of every row under `aggregation="fixed_length"`, whatever the row's length."""

    def __post_init__(self) -> None:
        """Check every value, and turn names into objects."""
        object.__setattr__(self, "surrogate", _as_object("surrogate", self.surrogate, SURROGATES))
        if self.sampler_correction is not None:
            correction = _as_object("sampler_correction", self.sampler_correction, CORRECTIONS)
            object.__setattr__(self, "sampler_correction", correction)
        Settings.__post_init__(self)
        traits_of(self.surrogate)
        uses_length = "fixed_length" in (self.aggregation, self.entropy_aggregation)
        if uses_length != (self.fixed_length is not None):
            raise ConfigError(
                f"ObjectiveConfig.fixed_length={self.fixed_length} with aggregation={self.aggregation!r}: 'fixed_length' needs "
                "fixed_length=the longest that a row can be, and the others need fixed_length=None."
            )

    def kl_coef_with(self, *, has_reference: bool) -> float:
        """The KL coefficient: `DEFAULT_KL_COEF` with a reference and 0 without one, unless it is set."""
        return self.kl_coef if self.kl_coef is not None else DEFAULT_KL_COEF if has_reference else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON and `from_dict`. A callable of your own is written as {"kind": "custom", "name": ...}."""
        correction = self.sampler_correction
        return {
            **Settings.to_dict(self),
            "surrogate": _as_dict(self.surrogate, SURROGATES),
            "sampler_correction": None if correction is None else _as_dict(correction, CORRECTIONS),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ObjectiveConfig":
        """The settings that `to_dict` wrote. A missing key takes its default.

        Raises:
            ConfigError: an unknown key, a value that the field does not allow, or a custom callable.
        """
        choices = {"surrogate": SURROGATES, "sampler_correction": CORRECTIONS}
        if isinstance(values, Mapping):
            values = {
                key: _from_dict(key, value, choices[key]) if key in choices and isinstance(value, Mapping) else value
                for key, value in values.items()
            }
        return super(ObjectiveConfig, cls).from_dict(values)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig(Settings):
    """What happens when a reward model raises or returns NaN."""

    non_finite: Literal["raise", "drop", "zero"] = "raise"
    """A NaN or infinite reward is an error; or its row leaves the batch and its group's statistics; or it counts as 0."""
    on_failure: Literal["raise", "drop"] = "raise"
    """The reward model raised, and raised again on every retry: an error; or the rows are rewarded one by one, and rows that
    still raise leave the batch."""
    num_retries: int = setting(0, at_least=0)
    """Further calls after one that raised. Larger outlasts longer outages, and hides real bugs for longer."""
    retry_delay: float = setting(1.0, at_least=0.0)
    """Seconds before the first retry; the delay doubles with each retry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KLControl(Settings):
    """How `objective.kl_coef` follows the measured KL, once per iteration; see `next_kl_coef`."""

    rule: Literal["threshold", "proportional"] = "threshold"
    """`threshold`: x 1.5 above 1.5 times the target, / 1.5 below half of it. `proportional`: by the relative error."""
    target: float = setting(0.01, above=0.0)
    """KL per step to hold. Larger lets the policy move further from its reference."""
    coef_min: float = setting(1e-3, above=0.0)
    """Smallest coefficient."""
    coef_max: float = setting(0.1, above=0.0)
    """Largest coefficient."""
    gain: float = setting(0.1, above=0.0)
    """For `proportional`: larger reacts faster."""

    def __post_init__(self) -> None:
        """Check every value, and the order of the bounds."""
        Settings.__post_init__(self)
        require_order("KLControl.coef_min", self.coef_min, "coef_max", self.coef_max)


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyControl(Settings):
    """How `objective.entropy_coef` follows the measured entropy, once per iteration; see `next_entropy_coef`."""

    target: float = setting(0.2, at_least=0.0)
    """Entropy per step, in nats, below which the bonus acts. Larger keeps the policy more random."""
    delta: float = setting(5e-3, above=0.0)
    """Added to the coefficient below the target, subtracted above it. Larger reacts faster."""
    coef_min: float = setting(0.0, at_least=0.0)
    """Smallest coefficient."""
    coef_max: float = setting(1.0, above=0.0)
    """Largest coefficient."""

    def __post_init__(self) -> None:
        """Check every value, and the order of the bounds."""
        Settings.__post_init__(self)
        require_order("EntropyControl.coef_min", self.coef_min, "coef_max", self.coef_max)


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOConfig(Settings):
    """How a policy is trained. Every value is checked; `to_dict` and `from_dict` round-trip.

    Raises:
        ConfigError: names the field.

    Example:
        >>> GRPOConfig.from_dict({"group_size": 4, "objective": {"surrogate": {"kind": "clip", "low": 0.1}}}).group_size
        4
    """

    group_size: int = setting(8, at_least=1)
    """Actions sampled per state (G). Larger: better baselines, fewer states for the same work. A group of one learns nothing
    under a baseline of its own group."""
    num_states_per_iteration: int | None = setting(None, at_least=1)
    """States that `train` draws for one iteration (B). None: all of them."""
    batch_size: int | None = setting(None, at_least=1)
    """Rows per update, on each rank. Smaller: more updates per iteration, each noisier and further off-policy. None: all."""
    micro_batch_size: int | None = setting(None, at_least=1)
    """Rows per forward. Smaller: less memory, the same gradient. None: all rows of the update."""
    num_epochs_per_update: int = setting(1, at_least=1)
    """Passes over one iteration's rows. Larger: more learned per sample, until clipping stops it."""
    learning_rate: float = setting(1e-3, above=0.0)
    """Learning rate of the AdamW that is made when no optimizer is passed."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls to 0 over the iterations of `train`, or that it stays."""
    warmup_ratio: float = setting(0.0, at_least=0.0, below=1.0)
    """Fraction of `train`'s iterations over which the learning rate rises from 0."""
    max_grad_norm: float | None = setting(1.0, above=0.0)
    """Total gradient norm above which gradients are scaled down. Smaller: steadier, slower. None: no bound."""
    max_skipped_updates: int = setting(10, at_least=1)
    """Training stops after this many updates in a row with a non-finite gradient."""
    autocast_dtype: Literal["bfloat16", "float16"] | None = None
    """Run the policy under `torch.autocast`; float16 on CUDA scales the loss too. None: the policy's own precision."""
    compile_objective: bool = False
    """Run the loss through `torch.compile`. Faster for large batches of long rows, after a wait at the first updates."""
    device: str | None = None
    """Where policy, reference and reward model are moved to. None: they stay where they are."""
    seed: int | None = setting(None, at_least=0, at_most=2**64 - 1)
    """Seeds Python, numpy and torch when the trainer is built, and the order of rows and states. None: nothing is seeded
    by one process; several ranks are given different seeds."""
    kl_control: KLControl | None = None
    """How the KL coefficient follows the measured KL. None: it stays."""
    entropy_control: EntropyControl | None = None
    """How the entropy coefficient follows the measured entropy. None: it stays."""
    reference_sync_every: int | None = setting(None, at_least=1)
    """Iterations after which the reference policy moves towards the policy. Smaller pulls back less. None: it is frozen."""
    reference_mix: float = setting(1.0, above=0.0, at_most=1.0)
    """How far the reference moves: 1 copies the policy. With `reference_sync_every=1`, an exponential moving average of decay
    1 - mix. Copying at every iteration leaves no KL to pull on: use a longer interval or a smaller mix."""
    dynamic_sampling_rounds: int = setting(0, at_least=0)
    """Times that `train` may draw more states to replace groups without differences, which are left out. Larger fills the
    batch more often, and costs more samples. 0: every group is used as it comes."""
    replay_iterations: int = setting(0, at_least=0)
    """Earlier iterations whose rows are used again beside the new ones. Larger learns more from each sample, and from older
    policies. 0: every row is used in its own iteration only."""
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    """Rewards into advantages."""
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    """What is minimised."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """What happens when a reward model raises or returns NaN."""

    def __post_init__(self) -> None:
        """Check every value, and that groups are large enough for their baseline."""
        Settings.__post_init__(self)
        if self.advantage.k is not None and self.advantage.k > self.group_size:
            raise ConfigError(
                f"GRPOConfig.group_size={self.group_size} has fewer rows than the advantage.k={self.advantage.k} attempts it "
                "is to estimate the best of: raise group_size, or lower k."
            )


def _as_object(name: str, value: Any, choices: Mapping[str, type[Settings]]) -> Callable[..., Any]:
    """A name as the object it stands for, with its defaults; a callable as it is."""
    if isinstance(value, str) and value in choices:
        value = choices[value]()
    if isinstance(value, type):
        raise ConfigError(f"ObjectiveConfig.{name} must be an object; got the class {value.__name__}. Call it first.")
    if not callable(value):
        raise ConfigError(
            f"ObjectiveConfig.{name} must be one of {', '.join(map(repr, choices))}, an object of these kinds, or a callable; "
            f"got {describe(value)}."
        )
    found: Callable[..., Any] = value
    return found


def _as_dict(value: Any, choices: Mapping[str, type[Settings]]) -> dict[str, Any]:
    for kind, known in choices.items():
        if type(value) is known:
            return {"kind": kind, **value.to_dict()}
    return {"kind": "custom", "name": getattr(value, "__qualname__", type(value).__qualname__)}


def _from_dict(name: str, values: Mapping[str, Any], choices: Mapping[str, type[Settings]]) -> Settings:
    kind = str(values.get("kind"))
    if kind == "custom":
        raise ConfigError(
            f"ObjectiveConfig.{name} was a custom callable, {values.get('name')!r}, which no file can hold: pass the object."
        )
    if kind not in choices:
        raise ConfigError(f"ObjectiveConfig.{name}: kind must be one of {', '.join(map(repr, choices))}; got {kind!r}.")
    return choices[kind].from_dict({key: value for key, value in values.items() if key != "kind"})
