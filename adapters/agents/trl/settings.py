"""Our settings by TRL's names, and the settings that TRL does not have. What has no counterpart is refused."""

from dataclasses import dataclass
from typing import Any, NoReturn

from adapters.llm import SamplingConfig
from grpo import GRPOConfig
from grpo.errors import ConfigError
from grpo.surrogates import Cispo, Clip, Sapo, Vespo

STD_EPS = 1e-4
"""What TRL adds to every standard deviation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The counterpart of one of our settings in TRL."""

    trl: str = ""
    """TRL's names. Empty: TRL has none."""
    only: tuple[Any, ...] | None = None
    """The values that TRL can have. None: all values, but see `note`."""
    note: str = ""
    """What else is required, or why other values are refused."""


UNREAD = "not read without a setting that is refused"
ONE_BATCH = "needs one update per iteration"
SETTINGS = {
    "group_size": Setting(trl="num_generations", note="at least 2"),
    "num_states_per_iteration": Setting(trl="generation_batch_size", note="at most the number of states"),
    "num_demonstrations_per_iteration": Setting(note="TRL imitates in another trainer"),
    "batch_size": Setting(trl="gradient_accumulation_steps", note="divides the rows of an iteration"),
    "micro_batch_size": Setting(trl="per_device_train_batch_size", note="divides the rows of an update"),
    "num_epochs_per_update": Setting(trl="num_iterations"),
    "learning_rate": Setting(trl="optimizers", note="the same AdamW without weight decay"),
    "lr_schedule": Setting(trl="optimizers", note="our schedule, as a function"),
    "warmup_ratio": Setting(trl="optimizers", note="our schedule, as a function"),
    "max_grad_norm": Setting(trl="max_grad_norm"),
    "max_skipped_updates": Setting(note="TRL skips no update: the first gradient that is not finite is an error"),
    "autocast_dtype": Setting(trl="bf16, fp16"),
    "compile_objective": Setting(only=(False,), note="TRL compiles the model, not the loss"),
    "device": Setting(trl="use_cpu", note="the policy is moved first"),
    "seed": Setting(trl="seed", note="below 2**32; without one, a number of torch's generator"),
    "kl_control": Setting(only=(None,), note="TRL's beta is constant"),
    "entropy_control": Setting(only=(None,), note="TRL adapts the coefficient per update, not per iteration"),
    "reference_sync_every": Setting(trl="sync_ref_model, ref_model_sync_steps"),
    "reference_mix": Setting(trl="ref_model_mixup_alpha"),
    "dynamic_sampling_rounds": Setting(only=(0,), note="TRL keeps all groups"),
    "replay_iterations": Setting(only=(0,), note="TRL keeps no earlier rows"),
    "iterations_ahead": Setting(only=(0,), note="TRL's trainer takes turns"),
    "advantage.credit": Setting(only=(None, "row"), note="TRL has one reward per row"),
    "advantage.baseline": Setting(only=("group_mean",), note="TRL has no other baseline"),
    "advantage.scale": Setting(trl="scale_rewards", only=("none", "group", "batch"), note="TRL has no other scale"),
    "advantage.std_ddof": Setting(only=(1,), note="fixed in TRL"),
    "advantage.std_eps": Setting(note="1e-4 where a standard deviation is used, as is fixed in TRL"),
    "advantage.k": Setting(note=UNREAD),
    "advantage.several_rewards": Setting(trl="multi_objective_aggregation"),
    "advantage.gamma": Setting(note=UNREAD),
    "advantage.gae_lambda": Setting(note=UNREAD),
    "advantage.gigpo_weight": Setting(note=UNREAD),
    "advantage.upweight_live_groups": Setting(only=(False,), note="TRL does not change advantages"),
    "advantage.positive_weight": Setting(only=(1.0,), note="TRL does not change advantages"),
    "advantage.negative_only": Setting(only=(False,), note="TRL does not change advantages"),
    "advantage.clip": Setting(only=(None,), note="TRL does not change advantages"),
    "advantage.reward_clip": Setting(only=(None,), note="TRL does not change rewards"),
    "advantage.normalize_rewards": Setting(only=(False,), note="TRL does not change rewards"),
    "objective.surrogate": Setting(
        trl="loss_type, epsilon, epsilon_high, delta, importance_sampling_level, sapo_*, vespo_*",
        note="`Clip` without `dual`, `Cispo(low=1)`, `Sapo` and `Vespo`, of level `step` or `row`",
    ),
    "objective.sampler_correction": Setting(only=(None, "none"), note="in TRL for vLLM only"),
    "objective.top_entropy_fraction": Setting(
        trl="top_entropy_quantile", note="below 1: " + ONE_BATCH + " and forward pass"
    ),
    "objective.off_policy_threshold": Setting(trl="off_policy_mask_threshold", note="samples of the policy itself"),
    "objective.kl_coef": Setting(trl="beta", note="above 0: needs a reference model, and no adapter"),
    "objective.kl_estimator": Setting(trl="use_bias_correction_kl", note="`k3` and `k3_weighted`, if there is a KL"),
    "objective.entropy_coef": Setting(
        trl="entropy_coef", note="above 0: needs one forward pass per update, and all steps"
    ),
    "objective.entropy_estimator": Setting(note="`exact`, if there is a bonus"),
    "objective.entropy_aggregation": Setting(note="a mean over steps, if there is a bonus"),
    "objective.value_coef": Setting(note=UNREAD),
    "objective.observation_coef": Setting(only=(0.0,), note="TRL has no loss of observations"),
    "objective.demonstration_coef": Setting(note="TRL imitates in another trainer"),
    "objective.value_clip": Setting(note=UNREAD),
    "objective.aggregation": Setting(
        trl="loss_type",
        only=("row_mean", "step_mean", "fixed_length", "row_sum"),
        note="a `step_mean` needs one update per iteration, or one forward pass per update",
    ),
    "objective.fixed_length": Setting(trl="max_completion_length", note="equal to it"),
    "reward.non_finite": Setting(only=("raise", "zero"), note="TRL keeps rows without a reward in the loss"),
    "reward.not_applicable": Setting(only=(None,), note="TRL leaves such rows out of the group's statistics"),
    "reward.on_failure": Setting(only=("raise",), note="TRL keeps rows without a reward in the loss"),
    "reward.timeout": Setting(trl="reward_funcs", note="our calls have this limit"),
    "reward.max_concurrent": Setting(trl="reward_funcs", note="our calls have this limit"),
    "reward.num_retries": Setting(only=(0,), note="TRL does not repeat a call"),
    "reward.retry_delay": Setting(note=UNREAD),
    "reward.max_retry_seconds": Setting(note=UNREAD),
    "reward.breaker_failures": Setting(note=UNREAD),
    "reward.breaker_seconds": Setting(note=UNREAD),
    "sampling.max_new_tokens": Setting(trl="max_completion_length, generation_kwargs"),
    "sampling.min_new_tokens": Setting(only=(0,), note="TRL does not pass it on"),
    "sampling.temperature": Setting(trl="temperature"),
    "sampling.top_k": Setting(trl="top_k"),
    "sampling.top_p": Setting(trl="top_p"),
    "sampling.min_p": Setting(trl="min_p"),
    "sampling.xtc_probability": Setting(only=(0.0,), note="transformers has no such setting"),
    "sampling.xtc_threshold": Setting(note=UNREAD),
    "sampling.repetition_penalty": Setting(trl="repetition_penalty"),
    "sampling.stop": Setting(only=((),), note="TRL's completions end at tokens only"),
    "policy.sampler": Setting(note="a sampler of this process; TRL samples with `generate`"),
    "policy.reference_model": Setting(trl="beta", note="TRL loads a copy of it"),
    "policy.options.prompt_column": Setting(trl="train_dataset"),
    "policy.options.end_token_ids": Setting(note="those of the tokenizer and of the model's generation config"),
    "policy.options.exact_entropy": Setting(note="TRL always computes it"),
    "policy.options.exact_kl_top": Setting(note="TRL estimates the KL"),
    "policy.options.router_aux_loss_coef": Setting(note="TRL takes the model's, over all tokens of a forward pass"),
    "policy.options.mask_truncated": Setting(trl="mask_truncated_completions"),
    "policy.options.max_tokens_per_forward": Setting(note="TRL counts rows, not tokens: use `micro_batch_size`"),
    "policy.options.max_rows_per_decode": Setting(note="TRL decodes all rows together"),
    "policy.options.keep_special_tokens": Setting(note="TRL's texts have no special tokens"),
    "policy.options.reference": Setting(note=UNREAD),
    "policy.options.chat_template_options": Setting(trl="chat_template_kwargs"),
    "policy.value_head": Setting(note=UNREAD),
    "agent.observations": Setting(note="read with `observation_coef` only"),
    "agent.make": Setting(trl="environment_factory", note="environments whose tools are functions"),
    "agent.max_turns": Setting(
        trl="max_tool_calling_iterations", note="TRL does not answer the calls of the last turn"
    ),
    "agent.max_tokens": Setting(note="the model's maximum"),
    "agent.concurrency": Setting(note="TRL calls the tools of a batch one after another"),
    "agent.timeout": Setting(note="TRL waits for ever"),
    "agent.turn_timeout": Setting(note="TRL waits for ever"),
    "agent.num_retries": Setting(note="TRL holds no conversation again"),
    "agent.one_at_a_time": Setting(note="TRL calls the tools of a batch one after another"),
    "agent.executor": Setting(note="none: TRL calls the tools in its own process"),
    "agent.seats": Setting(note="none: the policy alone speaks to the environment"),
    "agent.branch": Setting(note="none: TRL's conversations do not branch"),
}
"""Every field of `GRPOConfig` and its parts, of `SamplingConfig`, and every argument of `HFPolicy` and `AgentPolicy`."""

LOSS_TYPES = {"row_mean": "grpo", "fixed_length": "dr_grpo", "row_sum": "luspo"}
LEVELS = {"step": "token", "row": "sequence"}


def settings_table() -> str:
    """The table of settings in Markdown."""
    lines = ["| ours | in TRL | limits |", "|---|---|---|"]
    for name, setting in SETTINGS.items():
        values = "" if setting.only is None else "only " + ", ".join(f"`{value!r}`" for value in setting.only)
        names = ", ".join(f"`{word}`" for word in setting.trl.split(", ") if word)
        limits = ": ".join(part for part in (values, setting.note) if part)
        lines.append(f"| `{name}` | {names} | {limits} |")
    return "\n".join(lines)


def refuse(name: str, value: Any, reason: str = "") -> NoReturn:
    """Raise a `ConfigError` for a setting."""
    reason = reason or SETTINGS[name].note
    raise ConfigError(
        f"train_with_trl: {name}={value!r} has no counterpart in TRL here: {reason}. Change the setting, or train with "
        "grpo.GRPOTrainer."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How many rows TRL samples, forwards and updates with."""

    rows: int
    """Rows per iteration."""
    batch: int
    """Rows per update."""
    micro: int
    """Rows per forward pass."""
    epochs: int
    """Passes over an iteration's rows."""

    @classmethod
    def of(cls, config: GRPOConfig, num_states: int) -> "Sizes":
        """The sizes of a run.

        Raises:
            ConfigError: TRL cannot divide the rows like this.
        """
        drawn = config.num_states_per_iteration or num_states
        if config.group_size < 2:
            refuse("group_size", config.group_size)
        if drawn > num_states:
            refuse("num_states_per_iteration", drawn)
        rows = drawn * config.group_size
        batch = config.batch_size or rows
        micro = config.micro_batch_size or batch
        if rows % batch:
            refuse("batch_size", batch, f"it must divide the {rows} rows of an iteration")
        if batch % micro:
            refuse("micro_batch_size", micro, f"it must divide the {batch} rows of an update")
        return cls(rows=rows, batch=batch, micro=micro, epochs=config.num_epochs_per_update)

    @property
    def updates(self) -> int:
        """Updates per iteration."""
        return self.epochs * self.rows // self.batch

    def arguments(self) -> dict[str, Any]:
        """The sizes by TRL's names."""
        return {
            "per_device_train_batch_size": self.micro,
            "gradient_accumulation_steps": self.batch // self.micro,
            "steps_per_generation": self.rows // self.micro,
            "num_iterations": self.epochs,
        }


def trl_arguments(
    config: GRPOConfig, sampling: SamplingConfig, sizes: Sizes, *, kl_coef: float, max_length: int
) -> dict[str, Any]:
    """Settings by the names of TRL's `GRPOConfig`.

    Args:
        config: The settings of training.
        sampling: The settings of sampling.
        sizes: Numbers of rows.
        kl_coef: The KL coefficient.
        max_length: TRL's `max_completion_length`.

    Raises:
        ConfigError: A setting has no counterpart.
    """
    for section, part in (("", config), ("advantage.", config.advantage), ("objective.", config.objective),
                          ("reward.", config.reward), ("sampling.", sampling)):  # fmt: skip
        for name in part.__dataclass_fields__:
            only = SETTINGS.get(section + name, Setting()).only
            if only is not None and getattr(part, name) not in only:
                refuse(section + name, getattr(part, name))
    advantage, objective = config.advantage, config.objective
    is_split = advantage.several_rewards == "normalize_each"
    if (is_split or advantage.scale != "none") and advantage.std_eps != STD_EPS:
        refuse("advantage.std_eps", advantage.std_eps)
    if kl_coef > 0 and objective.kl_estimator not in ("k3", "k3_weighted"):
        refuse("objective.kl_estimator", objective.kl_estimator)
    if config.seed is not None and config.seed >= 2**32:
        refuse("seed", config.seed)
    one_forward = sizes.micro == sizes.batch
    if objective.top_entropy_fraction < 1 and not (one_forward and sizes.updates == 1):
        refuse("objective.top_entropy_fraction", objective.top_entropy_fraction)
    if objective.off_policy_threshold is not None and not sampling.is_exact:
        refuse("objective.off_policy_threshold", objective.off_policy_threshold)
    if objective.entropy_coef > 0:
        if not one_forward or objective.top_entropy_fraction < 1:
            refuse("objective.entropy_coef", objective.entropy_coef)
        if objective.entropy_estimator != "exact":
            refuse("objective.entropy_estimator", objective.entropy_estimator)
        if (objective.entropy_aggregation or objective.aggregation) != "step_mean":
            refuse("objective.entropy_aggregation", objective.entropy_aggregation)
    if objective.fixed_length not in (None, max_length):
        refuse("objective.fixed_length", objective.fixed_length, f"it must be max_completion_length = {max_length}")
    return {
        **sizes.arguments(),
        **_loss_arguments(objective, sizes),
        "num_generations": config.group_size,
        "max_grad_norm": config.max_grad_norm or 0.0,
        "bf16": config.autocast_dtype == "bfloat16",
        "fp16": config.autocast_dtype == "float16",
        "scale_rewards": advantage.scale,
        "multi_objective_aggregation": "normalize_then_sum" if is_split else "sum_then_normalize",
        "shuffle_dataset": config.num_states_per_iteration is not None,
        "beta": kl_coef,
        "use_bias_correction_kl": objective.kl_estimator == "k3_weighted",
        "sync_ref_model": config.reference_sync_every is not None,
        "ref_model_sync_steps": (config.reference_sync_every or 1) * sizes.updates,
        "ref_model_mixup_alpha": config.reference_mix,
        "top_entropy_quantile": objective.top_entropy_fraction,
        "entropy_coef": objective.entropy_coef,
        "off_policy_mask_threshold": objective.off_policy_threshold,
        "max_completion_length": max_length,
        "generation_kwargs": {"max_new_tokens": sampling.max_new_tokens},
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or 0,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p or None,
        "repetition_penalty": sampling.repetition_penalty,
    }


def _loss_arguments(objective: Any, sizes: Sizes) -> dict[str, Any]:
    surrogate, aggregation = objective.surrogate, objective.aggregation
    arguments: dict[str, Any] = {"importance_sampling_level": LEVELS.get(getattr(surrogate, "level", "step"))}
    loss_type = LOSS_TYPES.get(aggregation)
    match surrogate:
        case Clip(dual=None):
            arguments |= {"epsilon": surrogate.low, "epsilon_high": surrogate.high, "delta": surrogate.delta}
            loss_type = loss_type or ("bnpo" if sizes.micro == sizes.batch else "dapo")
        case Cispo(low=1.0) if aggregation == "step_mean":
            arguments |= {"epsilon_high": 1 + surrogate.high}  # TRL's bound is the largest ratio
            loss_type = "cispo"
        case Sapo() if aggregation == "row_mean":
            arguments |= {f"sapo_{name}": getattr(surrogate, name) for name in ("temperature_pos", "temperature_neg")}
            loss_type = "sapo"
        case Vespo() if aggregation == "step_mean":
            names = ("k_pos", "lambda_pos", "k_neg", "lambda_neg")
            arguments |= {f"vespo_{name}": getattr(surrogate, name) for name in names}
            loss_type = "vespo"
        case _:
            loss_type = None
    if loss_type is None or arguments["importance_sampling_level"] is None:
        reason = SETTINGS["objective.surrogate"].note + f", each with its own aggregation; here it is {aggregation!r}"
        refuse("objective.surrogate", surrogate, reason)
    if loss_type in ("dapo", "cispo", "vespo") and sizes.rows != sizes.batch:
        refuse("objective.aggregation", aggregation)
    return {**arguments, "loss_type": loss_type}
