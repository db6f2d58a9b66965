"""All settings of training. Surrogates and sampler corrections hold their own settings."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ._advantages.groups import Baseline, Credit, Scale
from ._common.conversion import describe
from ._common.settings import Settings, setting
from ._objective.sampler import KPop, Mask, SamplerCorrection, Truncate, require_order
from ._objective.weights import Aggregation
from .divergence import EntropyEstimator, KLEstimator
from .errors import ConfigError
from .surrogates import SURROGATES, Clip, Surrogate, traits_of

DEFAULT_KL_COEF = 0.04
"""The KL coefficient if a reference policy is passed and no coefficient is set (DeepSeekMath, arXiv:2402.03300, sec. 4.2)."""

CORRECTIONS: dict[str, type[Settings]] = {"truncate": Truncate, "mask": Mask, "kpop": KPop}
"""Maps the name of a sampler correction in the settings to its class. A name means the class with its defaults."""

NO_CORRECTION = "none"
"""The name that switches the sampler correction off."""

MAX_CONCURRENT = 64
"""Default for the largest number of calls of reward functions that are awaited at the same time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageConfig(Settings):
    """How rewards become advantages."""

    credit: Credit | None = None
    """The steps that a reward is credited to. `row`: all steps of the row get the same advantage. `return_to_go`: a reward per
    step counts for this step and for the steps before it. `process_supervision`: as `return_to_go`, after standardising step
    rewards within the group. `gae`: a critic, trained together with the policy, credits steps (the policy returns `values`).
    `gigpo`: the row's advantage plus the advantage among steps in the same state (the policy has `state_keys`). None:
    `return_to_go` for rewards per step, `row` for rewards per row."""
    baseline: Baseline = "group_mean"
    """The number that is subtracted from a reward; see `group_relative_advantages`. `gae` has its own baseline."""
    scale: Scale = "none"
    """What (reward - baseline) is divided by. Dividing by the group's standard deviation gives easy and hard states the same
    weight. It also gives noise in nearly constant groups as much weight as signal in other groups."""
    std_ddof: int = setting(1, at_least=0, at_most=1)
    """A standard deviation of n numbers is computed with the divisor n - `std_ddof`."""
    std_eps: float = setting(0.0, at_least=0.0)
    """Number added to the standard deviation before dividing. Larger: smaller advantages in groups with small differences."""
    k: int | None = setting(None, at_least=2)
    """Number of attempts k of the baseline `max_at_k`. Larger gives rare successes more weight, and reliable success less."""
    several_rewards: Literal["sum", "normalize_each"] = "sum"
    """How several named rewards are combined: normalise their weighted sum, or normalise each before the sum (GDPO)."""
    gamma: float = setting(1.0, at_least=0.0, at_most=1.0)
    """Discount per column of [N, T], for rewards per step, `gae` and `gigpo`. Smaller looks less far ahead."""
    gae_lambda: float = setting(0.95, at_least=0.0, at_most=1.0)
    """The lambda of `credit="gae"`. Larger relies more on the rewards that followed, smaller relies more on the critic."""
    gigpo_weight: float = setting(1.0, at_least=0.0)
    """For `credit="gigpo"`: weight of a step's advantage among steps in the same state. The row's advantage has weight 1."""
    upweight_live_groups: bool = False
    """Multiply advantages by (number of rows) / (number of rows in groups whose rewards differ), so that groups with equal
    rewards do not shrink the gradient (GPG)."""
    positive_weight: float = setting(1.0, at_least=0.0)
    """Factor on advantages above 0. Smaller learns more from bad actions, which keeps the policy more random."""
    negative_only: bool = False
    """Set advantages above 0 to 0: the same as a `positive_weight` of 0."""
    clip: float | None = setting(None, above=0.0)
    """Bound on the size of an advantage. Smaller limits outliers and adds bias. None: no bound."""
    reward_clip: float | None = setting(None, above=0.0)
    """Bound on the size of a reward, applied before everything else. Metrics show unclipped rewards. None: no bound."""
    normalize_rewards: bool = False
    """Divide rewards by the running standard deviation of the rows' total rewards. A learning rate then fits rewards of any
    size."""

    def __post_init__(self) -> None:
        """Check every value, and check that settings do not contradict one another."""
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
                f"AdvantageConfig.scale={self.scale!r} needs groups, but credit='gae' has no groups. Use scale='none', 'batch' "
                "or 'whiten'."
            )
        if self.credit not in (None, "row") and self.baseline in ("max_at_k", "length_weighted"):
            raise ConfigError(
                f"AdvantageConfig.baseline={self.baseline!r} compares whole rows: use it with credit='row', not "
                f"{self.credit!r}."
            )
        if self.credit in ("process_supervision", "gigpo") and self.baseline == "global_mean":
            raise ConfigError(
                f"AdvantageConfig.baseline='global_mean' has no meaning under credit={self.credit!r}, which compares within "
                "groups. Use baseline='group_mean'."
            )
        self._require_plain_normalisation()

    def _require_plain_normalisation(self) -> None:
        """Refuse settings that contradict GDPO, which standardises each reward in its own way."""
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
    """Settings of the loss: surrogate + KL - entropy (+ a critic's error). The settings are independent of one another."""

    surrogate: Surrogate | str = Clip()  # noqa: RUF009 - frozen
    """The policy's loss per step: an object of `grpo.surrogates` such as `Clip(high=0.28)`, its name, or any function `Steps ->
    [N, T]` of your own. A name becomes the object with its defaults."""
    sampler_correction: SamplerCorrection | str | None = None
    """Importance weights for actions that another distribution sampled (`behaviour_log_probs`): `Truncate(...)`, `Mask(...)`,
    `KPop(...)`, the name of one, or a callable of your own. The weights multiply the surrogate and the estimate of
    `entropy_estimator="score_function"`. `"none"`: no correction. None: `Truncate()` if `iterations_ahead` is above 0, else no
    correction."""
    top_entropy_fraction: float = setting(1.0, above=0.0, at_most=1.0)
    """The surrogate counts only this fraction of the update's steps, the steps with the highest entropy. Smaller learns from
    the most uncertain decisions only. The policy must return an exact entropy."""
    off_policy_threshold: float | None = setting(None, at_least=0.0)
    """A row with A < 0 is left out of the surrogate if its mean of sampled minus current log-probs exceeds this threshold.
    Larger keeps more rows. None: all rows count."""
    kl_coef: float | None = setting(None, at_least=0.0)
    """Weight of the KL to the reference. Larger keeps the policy closer to it. None: 0.04 if a reference policy is passed, else
    0."""
    kl_estimator: KLEstimator = "k3"
    """How the KL is estimated from the sampled step; `grpo.divergence` states the gradient of each estimate. `exact`: the
    policy returns the KL in `ActionScores.kl`."""
    entropy_coef: float = setting(0.0, at_least=0.0)
    """Weight of the entropy bonus. Larger keeps the policy more random. The bonus uses the entropy per step, which is larger if
    a step is several decisions with one common log-prob."""
    entropy_estimator: EntropyEstimator = "exact"
    """`exact` uses `ActionScores.entropy`, which the policy must return. `score_function` estimates the entropy from the
    sampled steps of any policy, with more noise."""
    entropy_aggregation: Aggregation | None = None
    """How the entropies of steps become one number. None: the same as `aggregation`."""
    value_coef: float = setting(0.5, at_least=0.0)
    """Weight of the squared error of a critic's values. Larger trains the critic faster. Used with `advantage.credit="gae"`."""
    value_clip: float | None = setting(None, above=0.0)
    """How far a value may move from its value at collection before its error has no gradient. None: no bound."""
    demonstration_coef: float = setting(1.0, above=0.0)
    """Weight of the cross-entropy of demonstrations, if there are any. Larger imitates more, and learns less from rewards."""
    observation_coef: float = setting(0.0, at_least=0.0)
    """Weight of the cross-entropy of what the environment answered, which the policy returns in
    `ActionScores.observed_log_probs`. Larger learns more from answers, also where no row has an advantage. 0: no such term."""
    aggregation: Aggregation = "row_mean"
    """How per-step losses become one number. The trainer turns the choice into weights (see `step_weights`). If the policy has
    `split_steps`, each step is a row, and every choice but `fixed_length` gives each step of the update the same weight."""
    fixed_length: int | None = setting(None, at_least=1)
    """For `aggregation="fixed_length"`: the number by which every row's loss is divided, instead of the row's own length."""

    def __post_init__(self) -> None:
        """Check every value, and replace names by objects."""
        object.__setattr__(self, "surrogate", _as_object("surrogate", self.surrogate, SURROGATES))
        is_none = isinstance(self.sampler_correction, str) and self.sampler_correction == NO_CORRECTION
        if self.sampler_correction is not None and not is_none:  # an array has no truth value
            correction = _as_object("sampler_correction", self.sampler_correction, CORRECTIONS, NO_CORRECTION)
            object.__setattr__(self, "sampler_correction", correction)
        Settings.__post_init__(self)
        traits_of(self.surrogate)
        uses_length = "fixed_length" in (self.aggregation, self.entropy_aggregation)
        if uses_length != (self.fixed_length is not None):
            raise ConfigError(
                f"ObjectiveConfig.fixed_length={self.fixed_length} with aggregation={self.aggregation!r}: 'fixed_length' needs "
                "fixed_length=(the largest number of steps of a row), and the other aggregations need fixed_length=None."
            )

    @property
    def correction(self) -> SamplerCorrection | None:
        """The sampler correction. None: no correction."""
        correction = self.sampler_correction
        return None if correction is None or isinstance(correction, str) else correction

    def kl_coef_with(self, *, has_reference: bool) -> float:
        """The KL coefficient. If it is not set: `DEFAULT_KL_COEF` with a reference, 0 without one."""
        return self.kl_coef if self.kl_coef is not None else DEFAULT_KL_COEF if has_reference else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Convert the settings to plain values for JSON and `from_dict`. A callable of your own becomes {"kind": "custom",
        "name": ...}."""
        correction = self.correction
        return {
            **Settings.to_dict(self),
            "surrogate": _as_dict(self.surrogate, SURROGATES),
            "sampler_correction": self.sampler_correction if correction is None else _as_dict(correction, CORRECTIONS),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ObjectiveConfig":
        """Make settings from a dict that `to_dict` wrote. A missing setting has its default value.

        Raises:
            ConfigError: The dict has an unknown key, a value that the setting does not allow, or a custom callable.
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
    """Settings for a reward model that raises, hangs, or returns rubbish or NaN. Only `GRPOTrainer` makes failed calls again.

    A call has failed if it raises, exceeds `timeout`, or returns anything but one number per row (or per step). A failed call
    for all rows is retried. If the last retry fails too, `on_failure="raise"` raises the error, and `on_failure="drop"` calls
    the reward model for each row by itself and drops the rows that fail again. If all rows fail, none is dropped: the call for
    all rows is made again. After `breaker_failures` failed calls in a row, a circuit breaker opens: the next call for all rows
    waits `breaker_seconds`, and is a trial. Trials take the place of the retries that are left. A call that succeeds, for a
    single row too, closes the breaker. If three trials in a row fail, training stops with an error. An error of the program
    (TypeError, NameError, AttributeError, KeyError, ImportError) for every row of the first call is raised at once.
    """

    non_finite: Literal["raise", "drop", "zero"] = "raise"
    """What happens to a NaN or infinite reward. `raise`: training stops with an error. `drop`: the row is removed from the
    batch and from its group's statistics. `zero`: the reward counts as 0."""
    not_applicable: Literal["raise", "drop", "zero"] | None = None
    """What happens to a row to which no part of the reward applies: every part is NaN, or every function of
    `CompletionRewards` returned None. `raise`, `drop`, `zero`: as for `non_finite`. None: `non_finite` decides. Set
    `not_applicable="drop"` and leave `non_finite="raise"` to skip such rows and still find bugs."""
    on_failure: Literal["raise", "drop"] = "raise"
    """What happens if a call of the reward model fails, and every retry fails. `raise`: training stops with an error. `drop`:
    the reward model is called for each row separately, and rows that still fail are removed from the batch."""
    timeout: float | None = setting(None, above=0.0, at_most=1e9)
    """Seconds per call of a reward function. An `async def` is cancelled then. Any other function, and a `RewardModel`, runs in
    a forked process that is killed then, with all that it started: what the function writes to memory is lost, except for the
    global random generators, and it cannot use a GPU. A function that is called once per row has these seconds for each row.
    Smaller: hanging calls cost less time, but slow calls are lost. None: no deadline, and no other process."""
    max_concurrent: int = setting(MAX_CONCURRENT, at_least=1)
    """Largest number of `async def` calls that are awaited at the same time. Larger: faster, and more load on servers."""
    num_retries: int = setting(0, at_least=0)
    """Number of retries after a failed call. Larger survives longer outages, and hides bugs for longer."""
    retry_delay: float = setting(1.0, at_least=0.0)
    """Seconds before the first retry; the delay doubles with each retry."""
    max_retry_seconds: float = setting(300.0, at_least=0.0, at_most=1e9)
    """Largest sum of the delays before the retries of one call. When it is used up, the call has failed."""
    breaker_failures: int = setting(5, at_least=1)
    """Number of failed calls in a row after which the next call waits. Calls of other iterations, retries and calls for single
    rows count. Smaller: a service that is down gets fewer calls."""
    breaker_seconds: float = setting(60.0, at_least=0.0, at_most=1e9)
    """Seconds from the last of these failures to the next trial. Three trials in a row may fail, so training survives outages
    of up to three times this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KLControl(Settings):
    """How `objective.kl_coef` follows the measured KL, once per iteration; see `next_kl_coef`."""

    rule: Literal["threshold", "proportional"] = "threshold"
    """`threshold`: multiply the coefficient by 1.5 if the KL is above 1.5 times the target, divide by 1.5 if the KL is below
    half the target. `proportional`: change the coefficient by the relative error."""
    target: float = setting(0.01, above=0.0)
    """Target of the KL per step. Larger lets the policy move further from its reference."""
    coef_min: float = setting(1e-3, above=0.0)
    """Smallest KL coefficient."""
    coef_max: float = setting(0.1, above=0.0)
    """Largest KL coefficient."""
    gain: float = setting(0.1, above=0.0)
    """For `rule="proportional"`: relative change of the coefficient per relative error of the KL. Larger reacts faster."""

    def __post_init__(self) -> None:
        """Check every value, and check that `coef_min` is at most `coef_max`."""
        Settings.__post_init__(self)
        require_order("KLControl.coef_min", self.coef_min, "coef_max", self.coef_max)


@dataclass(frozen=True, slots=True, kw_only=True)
class EntropyControl(Settings):
    """How `objective.entropy_coef` follows the measured entropy, once per iteration; see `next_entropy_coef`."""

    target: float = setting(0.2, at_least=0.0)
    """Target entropy per step, in nats. The bonus acts below the target. Larger keeps the policy more random."""
    delta: float = setting(5e-3, above=0.0)
    """Step of the coefficient: added if the entropy is below the target, subtracted if it is above. Larger reacts faster."""
    coef_min: float = setting(0.0, at_least=0.0)
    """Smallest entropy coefficient."""
    coef_max: float = setting(1.0, above=0.0)
    """Largest entropy coefficient."""

    def __post_init__(self) -> None:
        """Check every value, and check that `coef_min` is at most `coef_max`."""
        Settings.__post_init__(self)
        require_order("EntropyControl.coef_min", self.coef_min, "coef_max", self.coef_max)


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOConfig(Settings):
    """All settings of training. Every value is checked. `to_dict` and `from_dict` save and load the settings.

    Raises:
        ConfigError: A value is not allowed, or settings contradict one another. The message names the field.

    Example:
        >>> GRPOConfig.from_dict({"group_size": 4, "objective": {"surrogate": {"kind": "clip", "low": 0.1}}}).group_size
        4
    """

    group_size: int = setting(8, at_least=1)
    """Actions sampled per state (G). Larger: better baselines, but fewer states for the same work. With 1, all advantages are 0
    unless `advantage.baseline` is independent of the group."""
    num_states_per_iteration: int | None = setting(None, at_least=1)
    """Number of states that `train` draws for one iteration (B). None: all states."""
    num_demonstrations_per_iteration: int | None = setting(None, at_least=1)
    """Number of demonstrations that `train` draws for one iteration. None: all demonstrations."""
    batch_size: int | None = setting(None, at_least=1)
    """Rows per update, on each rank. Smaller: more updates per iteration, which are noisier and further off-policy. None: all
    rows in one update."""
    micro_batch_size: int | None = setting(None, at_least=1)
    """Rows per forward pass. Smaller: less memory, the same gradient. None: all rows of the update."""
    num_epochs_per_update: int = setting(1, at_least=1)
    """Passes over one iteration's rows. Larger: more is learned per sample, until clipping stops it."""
    learning_rate: float = setting(1e-3, above=0.0)
    """Learning rate of the default optimizer, AdamW. Not used if an optimizer is passed."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Whether the learning rate stays constant or falls to 0 over the iterations of `train`, linearly or along a cosine."""
    warmup_ratio: float = setting(0.0, at_least=0.0, below=1.0)
    """Fraction of `train`'s iterations in which the learning rate rises from 0."""
    max_grad_norm: float | None = setting(1.0, above=0.0)
    """Bound on the gradient's total norm; larger gradients are scaled down. Smaller: steadier and slower training. None: no
    bound."""
    max_skipped_updates: int = setting(10, at_least=1)
    """Training stops after this many updates in a row with a non-finite gradient."""
    autocast_dtype: Literal["bfloat16", "float16"] | None = None
    """Run the policy under `torch.autocast` in this precision. float16 also scales the loss. None: the policy's own
    precision."""
    compile_objective: bool = False
    """Run the loss through `torch.compile`: faster for large batches of long rows, after a wait at the first updates."""
    device: str | None = None
    """Device to move policy, reference and reward model to. None: they stay where they are."""
    seed: int | None = setting(None, at_least=0, at_most=2**64 - 1)
    """Seed of the order of rows and states, and of the generators of Python, numpy and torch, which the trainer seeds when it
    is built. None: the generators are not seeded, but with several ranks each rank gets a different seed."""
    kl_control: KLControl | None = None
    """How the KL coefficient follows the measured KL. None: the coefficient is constant."""
    entropy_control: EntropyControl | None = None
    """How the entropy coefficient follows the measured entropy. None: the coefficient is constant."""
    reference_sync_every: int | None = setting(None, at_least=1)
    """Number of iterations after which the reference moves towards the policy. Smaller: the reference holds the policy back
    less. None: the reference never moves."""
    reference_mix: float = setting(1.0, above=0.0, at_most=1.0)
    """How far the reference moves: 1 copies the policy. With `reference_sync_every=1`, the reference is an exponential moving
    average with decay 1 - mix. A copy at every iteration makes the KL nearly 0: use a longer interval or a smaller mix."""
    dynamic_sampling_rounds: int = setting(0, at_least=0)
    """Dynamic sampling: how often per iteration `train` may draw more states, to replace groups whose rewards are all equal.
    Larger fills the batch more often, and costs more samples. 0: every group is used."""
    replay_iterations: int = setting(0, at_least=0)
    """Number of earlier iterations whose rows are used again together with the new rows. Larger learns more from each sample,
    but the samples come from older policies. 0: every row is used in its own iteration only."""
    iterations_ahead: int = setting(0, at_least=0)
    """Asynchrony of `train`: the rows of iteration n are sampled by the policy after iteration n - 1 - `iterations_ahead`, and
    their rewards are asked for beside the updates in between. Larger hides slower rewards, and the samples come from older
    policies. The result does not depend on the timing. 0: sample, reward and update take turns."""
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    """How rewards become advantages."""
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    """Settings of the loss."""
    reward: RewardConfig = field(default_factory=RewardConfig)
    """What happens when a reward model raises, hangs, or returns rubbish or NaN."""

    def __post_init__(self) -> None:
        """Check every value, and check that settings do not contradict one another."""
        Settings.__post_init__(self)
        if self.iterations_ahead > 0 and self.dynamic_sampling_rounds > 0:
            raise ConfigError(
                f"GRPOConfig.iterations_ahead={self.iterations_ahead} samples an iteration before the rewards of earlier ones "
                f"are known, and dynamic_sampling_rounds={self.dynamic_sampling_rounds} waits for them: set one of them to 0."
            )
        if self.advantage.k is not None and self.advantage.k > self.group_size:
            raise ConfigError(
                f"GRPOConfig.group_size={self.group_size} must be at least advantage.k={self.advantage.k}, because the "
                "baseline 'max_at_k' compares k rows of a group: raise group_size, or lower k."
            )

    @property
    def loss(self) -> ObjectiveConfig:
        """The settings of the loss that training uses: `objective`, with the sampler correction that None stands for."""
        if self.iterations_ahead > 0 and self.objective.sampler_correction is None:
            return replace(self.objective, sampler_correction=Truncate())
        return self.objective

    def learning_rate_factor(self, done: float, total: float, size: float = 1.0) -> float:
        """The learning rate of an iteration of `size` that begins after `done` of `total`, divided by `learning_rate`.

        It rises linearly over `warmup_ratio` of the run. Then it stays 1, or falls to 0 (linear or cosine). All three numbers
        are iterations, or what the run counts in their place, such as environment steps.
        """
        num_warmup = math.ceil(self.warmup_ratio * total)
        if done < num_warmup:
            return min((done + size) / num_warmup, 1.0)
        # iterations that are sampled ahead may exceed the total
        progress = min((done - num_warmup) / max(total - num_warmup, 1), 1.0)
        falling = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}
        return falling[self.lr_schedule]


def _as_object(name: str, value: Any, choices: Mapping[str, type[Settings]], *others: str) -> Callable[..., Any]:
    """Turn a name into an object with its defaults. A callable is returned unchanged."""
    if isinstance(value, str) and value in choices:
        value = choices[value]()
    if isinstance(value, type):
        raise ConfigError(
            f"ObjectiveConfig.{name} must be an object; got the class {value.__name__}. Pass {value.__name__}()."
        )
    if not callable(value):
        raise ConfigError(
            f"ObjectiveConfig.{name} must be one of {', '.join(map(repr, (*choices, *others)))}, an object of their kind, or a "
            f"callable; got {describe(value)}."
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
            f"ObjectiveConfig.{name} was a custom callable, {values.get('name')!r}, which no file can hold: set {name} in code."
        )
    if kind not in choices:
        raise ConfigError(f"ObjectiveConfig.{name}: kind must be one of {', '.join(map(repr, choices))}; got {kind!r}.")
    return choices[kind].from_dict({key: value for key, value in values.items() if key != "kind"})
