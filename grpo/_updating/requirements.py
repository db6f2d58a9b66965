"""Checks that the policy, its reference and the other arguments of a trainer fit the settings."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from torch import Tensor

from grpo._collecting.contract import FINITE, require_finite
from grpo._common.conversion import describe, require_lengths
from grpo._common.protocols import parameters_of, refuse_near_misses, require_methods
from grpo._common.tensors import require_finite_values
from grpo.config import GRPOConfig
from grpo.engine import Engine
from grpo.errors import ConfigError, ContractError, RewardError, warn_user
from grpo.policy_base import CAPABILITIES, POLICY_METHODS, ScoresReference, SplitsSteps
from grpo.surrogates import traits_of
from grpo.types import ExperienceBatch

FIELDS = tuple(field.name for field in fields(ExperienceBatch))
ON_HOST = ("rewards", "group_ids", "is_demonstration")
"""Fields of a batch that must be on the CPU."""


def require_consistent(
    config: GRPOConfig,
    policy: Any,
    engine: Engine,
    *,
    is_alone: bool,
    optimizer: Any = None,
    lr_scheduler: Any,
    objective: Any,
    advantages: Any,
    group_by: Any = None,
) -> None:
    """Raise an error if an argument of the learner contradicts the settings, or is not what it is called."""
    require_methods(policy, POLICY_METHODS, "policy", "PolicyModel")
    refuse_near_misses(policy, "policy", CAPABILITIES)
    if not isinstance(config, GRPOConfig):
        raise ConfigError(f"config must be a GRPOConfig; got {describe(config)}. Pass GRPOConfig(...), or a preset.")
    require_trainable(policy)
    if is_alone and (found := settings_of_a_run(config)):
        raise ConfigError(
            f"config.{', config.'.join(found)}: only GRPOTrainer.train honours this, because a Learner knows one iteration at "
            "a time. Use GRPOTrainer, or leave the setting at its default."
        )
    loss = config.loss
    reads_rows = traits_of(loss.surrogate).reads_rows or getattr(loss.correction, "level", "step") == "row"
    if isinstance(policy, SplitsSteps) and objective is None and (reads_rows or loss.off_policy_threshold is not None):
        raise ConfigError(
            "A policy with split_steps() is updated step by step, but this loss needs whole rows: "
            f"objective.surrogate={loss.surrogate!r}, sampler_correction={loss.sampler_correction!r}, "
            f"off_policy_threshold={loss.off_policy_threshold}. Use a surrogate and a correction with level='step' and no "
            "off_policy_threshold, or leave split_steps() out."
        )
    if isinstance(policy, SplitsSteps) and loss.observation_coef > 0:
        raise ConfigError(
            f"objective.observation_coef={loss.observation_coef} needs whole rows, because observations are no steps, and "
            f"{type(policy).__name__} has split_steps(). Set observation_coef=0, or leave split_steps() out."
        )
    if config.advantage.baseline == "max_at_k" and getattr(policy, "has_dependent_rows", False):
        raise ConfigError(
            "advantage.baseline='max_at_k' needs the rows of a group to be sampled independently; "
            f"{type(policy).__name__}.has_dependent_rows is True, because its rows share steps. Use another baseline, or "
            "sample independent rows."
        )
    if lr_scheduler is not None and (config.lr_schedule != "constant" or config.warmup_ratio > 0):
        raise ConfigError("lr_scheduler and config.lr_schedule or warmup_ratio both set the learning rate: keep one.")
    if objective is not None and config.compile_objective:
        raise ConfigError(
            "config.compile_objective compiles grpo_objective, which objective=... replaces: pass torch.compile(objective) "
            "instead, and set compile_objective=False."
        )
    if advantages is not None and config.advantage.credit == "gae":
        raise ConfigError(
            "advantages=... replaces the estimator that computes the critic's targets for advantage.credit='gae'. "
            "Remove advantages=..., or use another credit."
        )
    _require_kinds(optimizer, lr_scheduler, objective=objective, advantages=advantages)
    if engine.divides_weights:
        _require_functions(type(engine).__name__, optimizer=optimizer, lr_scheduler=lr_scheduler)
    if group_by is not None and not callable(group_by):
        raise ConfigError(
            f"group_by must be a function of a state, or None; got {describe(group_by)}. Leave group_by out."
        )


def _require_kinds(optimizer: Any, lr_scheduler: Any, **functions: Any) -> None:
    """Check that each argument is what it is called. Only None means "not given": 0, "" and [] do not."""
    if optimizer is not None and not is_function(optimizer):
        require_optimizer(optimizer)
    if lr_scheduler is not None and not is_function(lr_scheduler):
        require_methods(lr_scheduler, ("step",), "lr_scheduler", "torch.optim.lr_scheduler.LRScheduler")
    for name, function in functions.items():
        if function is not None and (isinstance(function, type) or not callable(function)):
            raise ConfigError(f"{name} must be a function or None; got {describe(function)}. Leave {name} out.")


def is_function(built: Any) -> bool:
    """Whether an optimizer or a scheduler is still to be built: the argument is a function, or a class."""
    return callable(built) and (isinstance(built, type) or not hasattr(built, "step"))


def _require_functions(engine: str, **built: Any) -> None:
    """Refuse an optimizer or a scheduler that was built before the engine divides the weights, which replaces the tensors."""
    for name, given in built.items():
        if given is not None and not is_function(given):
            raise ConfigError(
                f"{name} must be a function with {engine}, which replaces the policy's parameters by parts of "
                f"them; got a {type(given).__name__}. Pass a function, such as functools.partial(torch.optim.AdamW, lr=1e-5)."
            )


def require_optimizer(optimizer: Any) -> None:
    """Check that an object is a torch optimizer, or behaves as one."""
    require_methods(optimizer, ("step", "state_dict", "load_state_dict"), "optimizer", "torch.optim.Optimizer")
    if not isinstance(getattr(optimizer, "param_groups", None), list):
        raise ConfigError(f"optimizer must have param_groups; got {describe(optimizer)}. Pass a torch optimizer.")


def require_batches(batches: Sequence[Any]) -> None:
    """Check that the rows of an update are complete, and that their rewards are finite numbers on the CPU."""
    if not batches:
        raise ContractError("update needs at least one batch; got none. Pass the result of collect().")
    for batch in batches:
        _require_batch(batch)


def _require_batch(batch: Any) -> None:
    if not isinstance(batch, ExperienceBatch):
        raise ContractError(
            f"update needs an ExperienceBatch; got {describe(batch)}. Pass the result of collect() or "
            "ExperienceBatch.from_rows() or from_demonstrations()."
        )
    if batch.num_rows == 0:
        raise ContractError("update needs at least one row; the batch has none.")
    require_lengths("update: the batch", batch.num_rows, states=batch.states, actions=batch.actions)
    for name in FIELDS:
        values, on_host = getattr(batch, name), name in ON_HOST
        if isinstance(values, Tensor) and (values.is_meta or (on_host and values.device.type != "cpu")):
            wanted = "on the CPU" if on_host else "on a device with values"
            raise ContractError(f"update: the batch's {name} must be {wanted}; got {values.device}. Pass {name}.cpu().")
    require_finite_values(
        "update: the batch's rewards", batch.rewards, batch.mask if batch.rewards.dim() == 2 else None, RewardError
    )
    require_finite("update: the batch", batch.mask, {name: getattr(batch, name) for name in FINITE})
    for name, part in batch.reward_components.items():
        if bool(part.isinf().any()):
            raise RewardError(
                f"reward_components[{name!r}] must be finite, or NaN where the part does not apply; got infinity."
            )


def require_demonstrated_steps(policy_name: str, batch: ExperienceBatch) -> None:
    """Refuse demonstrations without any step, from which nothing can be learned."""
    flags = batch.is_demonstration
    if flags is None or bool(batch.mask[flags.to(batch.mask.device)].any()):
        return
    raise ContractError(
        f"{policy_name}: demonstrations must have a step to imitate; in {int(flags.sum())} rows, the mask is False everywhere. "
        "Return True in ActionScores.mask at the policy's own steps."
    )


def require_observations(config: GRPOConfig, policy_name: str, batch: ExperienceBatch) -> None:
    """Refuse a term for observations if the policy gives none."""
    coef = config.objective.observation_coef
    if coef > 0 and batch.observed_mask is None:
        raise ConfigError(
            f"objective.observation_coef={coef} needs log-probs of observations, and {policy_name} gives none. Return "
            "ActionScores.observed_log_probs and observed_mask (AgentPolicy does on request: observations=True), or set "
            "observation_coef=0."
        )


def settings_of_a_run(config: GRPOConfig) -> list[str]:
    """The settings that only a run honours, because it knows the number of iterations or draws states itself."""
    values = {name: getattr(config, name) for name in ("lr_schedule", "warmup_ratio", "iterations_ahead")}
    default = GRPOConfig()
    return [f"{name}={value!r}" for name, value in values.items() if value != getattr(default, name)]


def require_trainable(policy: Any) -> None:
    """Raise a `ConfigError` if the policy has parameters and all of them are frozen, because training would change nothing."""
    parameters = parameters_of(policy)
    if parameters and not any(value.requires_grad for value in parameters.values()):
        raise ConfigError(
            f"{type(policy).__name__}.get_parameters() must hold a tensor that requires a gradient; all {len(parameters)} "
            f"({', '.join(list(parameters)[:3])}{', ...' if len(parameters) > 3 else ''}) are frozen, so training would change "
            "nothing. Unfreeze the parameters to train (load a PEFT adapter with is_trainable=True), and return the tensors "
            "themselves: dict(self.named_parameters()), not copies and not state_dict(). Without parameters, return {}."
        )
    if computed := [name for name, value in parameters.items() if value.requires_grad and not value.is_leaf]:
        raise ConfigError(
            f"{type(policy).__name__}.get_parameters() must hold the parameters themselves; {', '.join(computed[:3])} is "
            "computed from other tensors, so no optimizer can change it. Return dict(self.named_parameters())."
        )


def required_scores(config: GRPOConfig, *, has_own_loss: bool) -> set[str]:
    """The fields of a batch that these settings need at collection, for any number of updates."""
    credit = config.advantage.credit
    keeps_by_entropy = config.objective.top_entropy_fraction < 1.0 and not has_own_loss
    selects = traits_of(config.objective.surrogate).select is not None and not has_own_loss
    is_read = {
        "old_log_probs": config.replay_iterations > 0 or keeps_by_entropy or selects,
        "entropy": keeps_by_entropy,
        "values": credit == "gae",
        "state_keys": credit == "gigpo",
        "observed_mask": config.objective.observation_coef > 0,
    }
    return {name for name, needed in is_read.items() if needed}


def require_reference(config: GRPOConfig, policy: Any, reference_policy: Any) -> None:
    """Refuse a reference that lacks a policy's methods, shares the policy's parameters, or cannot follow the policy."""
    parameters = parameters_of(policy)
    if reference_policy is None:
        if config.reference_sync_every is not None:
            has_own = isinstance(policy, ScoresReference)
            own = f"The reference that {type(policy).__name__} itself gives never moves. " if has_own else ""
            raise ConfigError(
                f"config.reference_sync_every needs a reference to move. {own}Pass reference_policy=copy.deepcopy(policy)."
            )
        return
    require_methods(reference_policy, POLICY_METHODS, "reference_policy", "PolicyModel")
    refuse_near_misses(reference_policy, "reference_policy", CAPABILITIES)
    reference = parameters_of(reference_policy)
    trained = {value.data_ptr() for value in parameters.values() if value.requires_grad}
    shared = [name for name, value in reference.items() if value.numel() and value.data_ptr() in trained]
    if reference_policy is policy or shared:
        raise ConfigError(
            f"reference_policy shares parameters with policy ({', '.join(shared[:3]) or 'it is the same object'}), so it "
            "would move with it and the KL would stay 0. Pass copy.deepcopy(policy)."
        )
    if config.reference_sync_every is not None and set(parameters) != set(reference):
        raise ConfigError(
            f"config.reference_sync_every={config.reference_sync_every} needs a reference with the policy's parameters; "
            f"only one of the two has {sorted(set(parameters) ^ set(reference))[:4]}. Pass copy.deepcopy(policy)."
        )


def first_kl_coef(config: GRPOConfig, policy: Any, reference_policy: Any, *, has_own_loss: bool) -> float:
    """Return the initial KL coefficient. Refuse a KL term without a sound reference, and a KL control without a KL term."""
    estimator = config.objective.kl_estimator
    kl_coef = config.objective.kl_coef_with(has_reference=reference_policy is not None)
    if estimator == "exact" and reference_policy is not None:
        raise ConfigError(
            "objective.kl_estimator='exact' reads the policy's own ActionScores.kl and would ignore reference_policy. "
            "Remove reference_policy=..., or set kl_estimator='k3' to estimate the KL to reference_policy."
        )
    has_reference = reference_policy is not None or isinstance(policy, ScoresReference)
    if kl_coef > 0 and estimator != "exact" and not has_reference:
        raise ConfigError(
            f"objective.kl_coef={kl_coef} needs a reference. Pass reference_policy=..., or set kl_coef=0"
            f"{'' if config.kl_control is None else ' and kl_control=None'}."
        )
    if kl_coef == 0 and config.kl_control is not None:
        raise ConfigError(
            "config.kl_control needs a KL term to control. Pass reference_policy=copy.deepcopy(policy) with objective.kl_coef "
            "above 0, or set kl_control=None."
        )
    if kl_coef > 0 and estimator == "k1" and not has_own_loss:
        warn_user(
            "objective.kl_estimator='k1' as a loss has a gradient of zero in expectation: it adds noise and does not keep the "
            "policy near the reference. Use 'k2' or 'k3_weighted' for KL(pi || ref), or 'k3' for KL(ref || pi)."
        )
    return kl_coef


def require_discrete(surrogate: Any, actions: Any) -> None:
    """Refuse actions with a fractional part, because they have densities. Floats that are whole numbers may be class labels."""
    first = actions[0] if len(actions) else 0
    parts = first.tolist() if isinstance(first, Tensor) else first
    entries = np.asarray(parts, dtype=object).ravel()
    numbers = [entry.tolist() if isinstance(entry, Tensor) else entry for entry in entries]
    floats = [number for number in np.hstack(numbers or [0]) if isinstance(number, float | np.floating)]
    if not all(float(number).is_integer() for number in floats):
        raise ConfigError(
            f"objective.surrogate={surrogate!r} needs actions with probabilities; these actions are real numbers, which "
            "have densities. Use a surrogate that compares ratios, such as 'clip', with continuous actions."
        )


def require_probabilities(surrogate: Any, log_probs: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"]) -> None:
    """Raise a `ContractError` for log-probs above 0, because only densities have them."""
    of_steps = log_probs.detach()[mask]
    if bool((of_steps > 1e-5).any()):
        raise ContractError(
            f"objective.surrogate={surrogate!r} needs log-probs of probabilities, at most 0; got {of_steps.max():.3g}, which "
            "only a density can have. Use a surrogate that compares ratios, such as 'clip', with continuous actions."
        )


def refuse_probabilities(behaviour: Float[Tensor, " S"], actions: Any) -> None:
    """Raise a `ContractError` if the log-probs of all sampled steps are from 0 to 1, as probabilities are.

    Densities of real numbers may exceed 1, so the log-probs of real-valued actions may be from 0 to 1.
    """
    known = behaviour.detach()[~behaviour.isnan()]
    if not known.numel() or _is_real(actions[0]):
        return
    least, largest = known.aminmax()
    if 1e-5 < largest <= 1 and least >= 0:
        raise ContractError(
            f"update: behaviour_log_probs of actions that have probabilities must be at most 0; got {least:.3g} to "
            f"{largest:.3g}. Pass log-probabilities: probabilities.log()."
        )


def _is_real(action: Any) -> bool:
    """Whether an action has a real number."""
    if isinstance(action, Tensor | np.ndarray):
        return "float" in str(action.dtype)
    return isinstance(action, float | np.floating) or (isinstance(action, list | tuple) and any(map(_is_real, action)))
