"""Adapt the KL and entropy coefficients to measurements: keep the KL near a target, and the entropy above a target."""

import math
from collections.abc import Mapping
from typing import Any

from grpo.config import EntropyControl, GRPOConfig, KLControl
from grpo.errors import ConfigError

THRESHOLD_FACTOR = 1.5
"""Rule `threshold`: the factor by which the coefficient is multiplied or divided. The coefficient rises if the KL is above this
multiple of the target."""

MAX_PROPORTIONAL_ERROR = 0.2
"""Rule `proportional`: bound on the relative error that the coefficient reacts to."""


def next_kl_coef(coef: float, kl: float, control: KLControl) -> float:
    """Return the KL coefficient after an iteration with mean KL `kl`, which is k3 or exact and never negative.

    threshold     coef 1.5 if kl > 1.5 target, coef / 1.5 if kl < target / 2, else coef
    proportional  coef (1 + gain clip(kl / target - 1, -0.2, 0.2))

    Example:
        >>> next_kl_coef(0.02, 0.05, KLControl(target=0.01))
        0.03

    Source:
        threshold: Schulman et al. 2017, arXiv:1707.06347, sec. 4, with a milder factor; proportional: Ziegler et al. 2019,
        arXiv:1909.08593, sec. 2.2.
    """
    if control.rule == "proportional":
        error = kl / control.target - 1.0
        coef = coef * (1.0 + control.gain * min(max(error, -MAX_PROPORTIONAL_ERROR), MAX_PROPORTIONAL_ERROR))
    elif kl > THRESHOLD_FACTOR * control.target:
        coef = coef * THRESHOLD_FACTOR
    elif kl < control.target / 2.0:
        coef = coef / THRESHOLD_FACTOR
    return min(max(coef, control.coef_min), control.coef_max)


def next_entropy_coef(coef: float, entropy: float, control: EntropyControl) -> float:
    """Return the next entropy coefficient: delta higher if `entropy` is at most the target, delta lower if it is above.

    Source:
        He et al. 2025 (Skywork-OR1), arXiv:2505.22312.
    """
    step = control.delta if entropy <= control.target else -control.delta
    return min(max(coef + step, control.coef_min), control.coef_max)


class Coefficients:
    """The current KL and entropy coefficients. Initial coefficients must be within the bounds of their controls."""

    def __init__(self, config: GRPOConfig, kl_coef: float) -> None:
        self.kl_coef = kl_coef
        self._entropy_coef = config.objective.entropy_coef
        self._is_entropy_low = True
        self._kl_control, self._entropy_control = config.kl_control, config.entropy_control
        starts = (("kl", kl_coef, config.kl_control), ("entropy", self._entropy_coef, config.entropy_control))
        for name, coef, control in starts:
            if control is not None and not control.coef_min <= coef <= control.coef_max:
                raise ConfigError(
                    f"objective.{name}_coef={coef} is where config.{name}_control starts, and must be between its coef_min="
                    f"{control.coef_min} and coef_max={control.coef_max}. Change the coefficient or the bounds."
                )

    @property
    def entropy_coef(self) -> float:
        """The entropy coefficient; 0 while the entropy is above its target."""
        return self._entropy_coef if self._is_entropy_low else 0.0

    @property
    def may_be_positive(self) -> bool:
        """Whether the KL or the entropy coefficient is above 0 now, or may rise above 0 later."""
        return self.kl_coef > 0 or self._entropy_coef > 0 or self._entropy_control is not None

    def report(self, suffix: str) -> dict[str, float]:
        """Return both coefficients as metrics, with `suffix` added to the metric names."""
        return {f"train/kl_coef{suffix}": self.kl_coef, f"train/entropy_coef{suffix}": self.entropy_coef}

    def follow(self, measured: Mapping[str, tuple[float, float]]) -> None:
        """Adapt to the mean and standard deviation of each metric of an iteration. A metric that was not measured changes
        nothing."""
        kl, entropy = (measured.get(name, (math.nan, 0.0))[0] for name in ("kl", "entropy"))
        if self._kl_control is not None and math.isfinite(kl):
            self.kl_coef = next_kl_coef(self.kl_coef, kl, self._kl_control)
        if self._entropy_control is not None and math.isfinite(entropy):
            self._entropy_coef = next_entropy_coef(self._entropy_coef, entropy, self._entropy_control)
            self._is_entropy_low = entropy <= self._entropy_control.target

    def state_dict(self) -> dict[str, Any]:
        """The adapted coefficients."""
        return {"kl": self.kl_coef, "entropy": self._entropy_coef, "is_entropy_low": self._is_entropy_low}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.kl_coef, self._entropy_coef = state["kl"], state["entropy"]
        self._is_entropy_low = state["is_entropy_low"]
