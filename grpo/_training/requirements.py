"""What settings ask of the policy and of the other arguments of a trainer, checked when the trainer is built."""

from typing import Any

import numpy as np
from torch import Tensor

from grpo.config import GRPOConfig
from grpo.errors import ConfigError
from grpo.policy_base import SplitsSteps
from grpo.surrogates import traits_of


def require_consistent(config: GRPOConfig, policy: Any, *, lr_scheduler: Any, objective: Any, advantages: Any) -> None:
    """The settings and the trainer's arguments do not contradict one another.

    Raises:
        ConfigError: they do.
    """
    if isinstance(policy, SplitsSteps) and objective is None:
        require_step_level(config)
    if lr_scheduler is not None and (config.lr_schedule != "constant" or config.warmup_ratio > 0):
        raise ConfigError("lr_scheduler and config.lr_schedule or warmup_ratio both set the learning rate: keep one.")
    if objective is not None and config.compile_objective:
        raise ConfigError(
            "config.compile_objective compiles grpo_objective, which objective=... replaces: pass torch.compile(objective) "
            "instead, and set compile_objective=False."
        )
    if advantages is not None and config.advantage.credit == "gae":
        raise ConfigError(
            "advantages=... stands in for the estimator that advantage.credit='gae' trains the critic by: keep one of them."
        )


def require_step_level(config: GRPOConfig) -> None:
    """The loss of a policy that splits rows into steps does not look at rows.

    Raises:
        ConfigError: a setting that works on rows.
    """
    loss = config.objective
    correction_level = getattr(loss.sampler_correction, "level", "step")
    if traits_of(loss.surrogate).reads_rows or correction_level == "row" or loss.off_policy_threshold is not None:
        raise ConfigError(
            "A policy with split_steps() is updated step by step, and this loss looks at rows: "
            f"objective.surrogate={loss.surrogate!r}, sampler_correction={loss.sampler_correction!r}, "
            f"off_policy_threshold={loss.off_policy_threshold}. Use a surrogate and a correction with level='step' and no "
            "off_policy_threshold, or leave split_steps() out."
        )


def required_scores(config: GRPOConfig, *, has_own_loss: bool) -> set[str]:
    """The fields of a batch that these settings read at collection, whatever the number of updates."""
    objective = config.objective
    selects = objective.top_entropy_fraction < 1.0 or traits_of(objective.surrogate).select is not None
    needed = set()
    if config.replay_iterations or (selects and not has_own_loss):
        needed.add("old_log_probs")
    if objective.top_entropy_fraction < 1.0 and not has_own_loss:
        needed.add("entropy")
    if config.advantage.credit == "gae":
        needed.add("values")
    if config.advantage.credit == "gigpo":
        needed.add("state_keys")
    return needed


def require_discrete(surrogate: Any, actions: Any) -> None:
    """Refuse real-valued actions, which have densities: floats that are whole numbers may well be classes.

    Raises:
        ConfigError: an action has a fractional part.
    """
    first = actions[0] if len(actions) else 0
    parts = first.tolist() if isinstance(first, Tensor) else first
    entries = np.asarray(parts, dtype=object).ravel()
    numbers = [entry.tolist() if isinstance(entry, Tensor) else entry for entry in entries]
    if any(
        isinstance(number, float | np.floating) and not float(number).is_integer()
        for number in np.hstack(numbers or [0])
    ):
        raise ConfigError(
            f"objective.surrogate={surrogate!r} compares probabilities of actions, and these actions are real numbers, which "
            "have densities. Use a surrogate that compares ratios, such as 'clip', with continuous actions."
        )
