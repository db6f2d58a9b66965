"""The whole objective against an independent plain reference, written from the formulas and sharing no code with it.

`reference_loss` adds up the losses step by step, with `detach` where the papers stop the gradient. The loss and the
gradients of `grpo_objective` have to be those of the reference, for every surrogate at every level.
"""

import math
from dataclasses import replace
from itertools import product
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from grpo import Mask, ObjectiveConfig, ObjectiveInputs, Truncate, grpo_objective
from grpo._objective.ratios import RatioLevel
from grpo.divergence import KLEstimator
from grpo.surrogates import SURROGATES, Clip, Dppo, Surrogate
from tests.support.objective_inputs import WITHOUT_LEVEL

pytestmark = pytest.mark.usefixtures("without_type_checks")

LEAVES = ("log_probs", "entropy", "kl", "values")
NAN = math.nan
MASK = torch.tensor(
    [[1, 1, 1, 1], [1, 0, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0], [1, 1, 1, 0]], dtype=torch.bool
)
COMBINATIONS = [
    (name, level) for name in SURROGATES for level in (["step"] if name in WITHOUT_LEVEL else get_args(RatioLevel))
]


def surrogate_at(name: str, level: str, **bounds: float) -> Surrogate:
    if name == "dppo":
        return Dppo(tv_limit=0.05, level=level)
    return SURROGATES[name]() if name in WITHOUT_LEVEL else SURROGATES[name](level=level, **bounds)


def inputs_of(seed: int, *, per_step: bool, far: bool, with_old: bool = True) -> ObjectiveInputs:
    """Ragged rows with holes, one without a step; NaN and infinity outside the mask; `far`: log-ratios beyond +-20."""
    random = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(*(shape or MASK.shape), generator=random, dtype=torch.float64)

    def poisoned(values: Tensor, poison: float = NAN) -> Tensor:
        return values.masked_fill(~MASK, poison)

    log_probs = uniform(-2.0, -0.3)
    old, ref, behaviour = (log_probs + uniform(-0.6, 0.6) for _ in range(3))
    behaviour[0, 1] = NAN  # unscored
    if far:
        for row, shift in ((0, 24.0), (1, -24.0), (5, -90.0)):
            old[row, 2 if row < 5 else 0] += shift
            ref[row, 3 if row < 5 else 1] -= shift
    return ObjectiveInputs(
        log_probs=poisoned(log_probs).requires_grad_(),
        old_log_probs=poisoned(old, math.inf) if with_old else None,
        advantages=poisoned(uniform(-2.0, 2.0)) if per_step else uniform(-2.0, 2.0, len(MASK)),
        mask=MASK,
        weights=poisoned(uniform(0.1, 1.0)),
        entropy=poisoned(uniform(0.1, 1.0), -math.inf).requires_grad_(),
        entropy_weights=poisoned(uniform(0.1, 1.0)),
        ref_log_probs=poisoned(ref, -math.inf),
        behaviour_log_probs=poisoned(behaviour),
        kl=poisoned(uniform(0.0, 0.5)).requires_grad_(),
        auxiliary_loss=poisoned(uniform(0.0, 0.5)).requires_grad_(),
        keep=uniform(0.0, 1.0) < 0.8,
        selected=uniform(0.0, 1.0) < 0.5,
        values=poisoned(uniform(-1.0, 1.0)).requires_grad_(),
        old_values=poisoned(uniform(-1.0, 1.0)),
        returns=poisoned(uniform(-1.0, 1.0)),
    )


def exp20(x: Tensor) -> Tensor:
    return x.clamp(-20.0, 20.0).exp()


def reference_loss(given: ObjectiveInputs, config: ObjectiveConfig) -> Tensor:
    """Row by row, over the row's valid steps alone: nothing outside the mask is touched."""
    total = torch.zeros((), dtype=torch.float64)
    for n, valid in enumerate(MASK):
        if valid.any():
            total = total + row_loss(given, config, n, valid)
    return total


def row_loss(given: ObjectiveInputs, config: ObjectiveConfig, n: int, valid: Tensor) -> Tensor:
    def here(values: Tensor) -> Tensor:
        return values[n][valid]

    log_pi, w = here(given.log_probs), here(given.weights)
    a = here(given.advantages) if given.advantages.dim() == 2 else given.advantages[n].expand(len(log_pi))
    old = log_pi.detach() if given.old_log_probs is None else here(given.old_log_probs)
    sampled = torch.where(here(given.behaviour_log_probs).isnan(), old, here(given.behaviour_log_probs))
    u = sampler_weights_of(config, old - sampled)
    x = log_pi - old
    level = getattr(config.surrogate, "level", "step")
    log_rho = {
        "step": x,
        "row": x.mean().expand(len(x)),
        "row_sum": x.sum().expand(len(x)),
        "row_step": x.mean().detach() + x - x.detach(),
        "none": x - x.detach(),
    }[level]
    rho = exp20(log_rho)
    step_losses = surrogate_of(config.surrogate, here(given.selected), log_pi, sampled, u, x, log_rho, rho, a)
    m = here(given.keep).double()
    if config.off_policy_threshold is not None:
        known = ~here(given.behaviour_log_probs).isnan()
        off = torch.where(known, sampled - log_pi.detach(), 0.0).mean()
        m = m * ((a >= 0) | (off <= config.off_policy_threshold)).double()
    if u is not None and type(config.surrogate).__name__ != "Vespo":
        m = m * u
    loss = (w * m * step_losses).sum()

    y = log_pi - here(given.ref_log_probs)
    k3 = (-y.clamp(min=-20.0)).exp() + y.clamp(min=-20.0) - 1.0
    kl = {"k1": y, "k2": y**2 / 2, "k3": k3, "k3_weighted": rho * k3, "exact": here(given.kl)}[config.kl_estimator]
    loss = loss + config.kl_coef * (w * kl).sum()
    h = here(given.entropy) if config.entropy_estimator == "exact" else -exp20(x) * log_pi.detach()
    if u is not None and config.entropy_estimator == "score_function":
        h = u * h
    loss = loss - config.entropy_coef * (here(given.entropy_weights) * h).sum()
    v, v_old, r = here(given.values), here(given.old_values), here(given.returns)
    error = (v - r) ** 2
    if config.value_clip is not None:
        error = torch.maximum(error, (v_old + (v - v_old).clamp(-config.value_clip, config.value_clip) - r) ** 2)
    return loss + config.value_coef * (w * error).sum() + (w * here(given.auxiliary_loss)).sum()


def sampler_weights_of(config: ObjectiveConfig, difference: Tensor) -> Tensor | None:
    """One weight per step, or one for the row."""
    correction = config.sampler_correction
    if correction is None:
        return None
    u = exp20(difference if correction.level == "step" else difference.sum().unsqueeze(0))
    if isinstance(correction, Truncate):
        return u.clamp(max=correction.high)
    return torch.where(u <= correction.high, u, 0.0)


def either(condition: Tensor, yes: float, no: float) -> Tensor:
    return torch.tensor([yes if c else no for c in condition.tolist()], dtype=torch.float64)


def surrogate_of(s: Any, selected, log_pi, sampled, u, x, log_rho, rho, a) -> Tensor:
    match type(s).__name__:
        case "Clip":
            unclipped = rho if s.delta is None else rho.clamp(max=s.delta)
            value = torch.minimum(unclipped * a, rho.clamp(1 - s.low, 1 + s.high) * a)
            if s.dual is not None:
                value = torch.where(a < 0, torch.maximum(value, s.dual * a), value)
            return -value
        case "ClipCov":
            return torch.where(selected, 0.0, -torch.minimum(rho * a, rho.clamp(1 - s.low, 1 + s.high) * a))
        case "Reinforce":
            return -a * log_pi
        case "Cispo":
            return -rho.clamp(1 - s.low, 1 + s.high).detach() * a * log_pi
        case "Sapo":
            tau = either(a > 0, s.temperature_pos, s.temperature_neg)
            return -4 / tau / (1 + (-tau * (rho - 1)).exp()) * a
        case "Gmpo":
            c = torch.where(a > 0, x.clamp(max=math.log(1 + s.high)), x.clamp(min=math.log(1 - s.low)))
            return -a * exp20(c.mean())
        case "Vespo":
            log_w = x.detach().clamp(-20, 20).sum()
            if u is not None:
                log_w = log_w + u.log().clamp(math.log(1e-8), 20).sum()
            log_w = log_w.clamp(math.log(1e-8), 20)
            k, rate = either(a >= 0, s.k_pos, s.k_neg), either(a >= 0, s.lambda_pos, s.lambda_neg)
            return -(k * log_w + rate * (1 - log_w.exp())).exp() * a * log_pi
        case "Dro":
            return -a * log_pi + s.beta / 2 * log_rho**2
        case "Dppo":
            moved = (log_pi.exp() - sampled.exp()).detach()
            stopped = ((a > 0) & (moved > s.tv_limit)) | ((a < 0) & (moved < -s.tv_limit))
            return -rho * a * (~stopped).double()
        case "KlCov":
            moved = log_rho.abs() * (log_rho.detach().abs() > 1e-6)
            return -rho * a + s.coef * torch.where(selected, moved, 0.0)
    raise AssertionError(s)


def gradients_of(loss: Tensor, given: ObjectiveInputs) -> list[Tensor]:
    leaves = [getattr(given, name) for name in LEAVES]
    found = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if part is None else part for leaf, part in zip(leaves, found, strict=True)]


def assert_as_the_reference(given: ObjectiveInputs, config: ObjectiveConfig) -> None:
    expected, found = reference_loss(given, config), grpo_objective(given, config).loss
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    for name, mine, theirs in zip(LEAVES, gradients_of(found, given), gradients_of(expected, given), strict=True):
        assert (mine[~MASK] == 0).all(), name
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"d {n}: {m}")


CASES = list(product((False, True), (False, True)))  # advantages per step, log-ratios beyond the bounds


def settings_for(name: str, level: str, number: int) -> dict[str, Any]:
    """One case in four each: nothing more; steps corrected, far rows left out; bounds on bad steps; rows corrected."""
    match number:
        case 1:
            correction = {"sampler_correction": Truncate(high=1.2), "off_policy_threshold": 0.05}
            return {"surrogate": surrogate_at(name, level), **correction}
        case 2 if name == "clip":
            return {"surrogate": Clip(level=level, delta=1.5, dual=1.3)}
        case 3:
            return {"surrogate": surrogate_at(name, level), "sampler_correction": Mask(high=1.5, level="row")}
        case _:
            return {"surrogate": surrogate_at(name, level)}


KL_ESTIMATORS, ENTROPY_ESTIMATORS, VALUE_CLIPS = get_args(KLEstimator), ("exact", "score_function"), (None, 0.3)
PER_COMBINATION = 8
"""Configurations per surrogate and level. They meet each of the four cases twice, and every other choice at least once."""


@pytest.mark.parametrize("name", SURROGATES)
def test_loss_and_gradients_equal_a_plain_reference(name, subtests):
    """Every surrogate x ratio level x case, beside every KL estimator, entropy estimator and value loss."""
    levels = [level for other, level in COMBINATIONS if other == name]
    for k, level in enumerate(level for level in levels for _ in range(PER_COMBINATION)):
        number, (per_step, far) = k % 4, CASES[k % 4]
        config = ObjectiveConfig(
            kl_estimator=KL_ESTIMATORS[k % 5],  # five estimators and four cases: all pairs within 20 configurations
            kl_coef=0.3,
            entropy_estimator=ENTROPY_ESTIMATORS[k // 2 % 2],
            entropy_coef=0.2,
            value_clip=VALUE_CLIPS[k // 4 % 2],
            **settings_for(name, level, number),
        )
        with subtests.test(level=level, config=config, per_step=per_step, far=far):
            assert_as_the_reference(inputs_of(k % 16, per_step=per_step, far=far), config)


def test_loss_and_gradients_without_old_log_probs_equal_a_plain_reference(subtests):
    for k, (name, level) in enumerate(COMBINATIONS):
        for per_step in (False, True):
            config = ObjectiveConfig(
                surrogate=surrogate_at(name, level), kl_estimator=KL_ESTIMATORS[k % 5], kl_coef=0.3,
                entropy_estimator=ENTROPY_ESTIMATORS[k % 2], entropy_coef=0.2,
            )  # fmt: skip
            with subtests.test(config=config, per_step=per_step):
                assert_as_the_reference(inputs_of(3, per_step=per_step, far=False, with_old=False), config)


WITHOUT_DETACH = [
    (name, level)
    for name, level in COMBINATIONS
    if name not in ("cispo", "vespo") and level in ("step", "row", "row_sum")
]


def test_gradients_agree_with_finite_differences(subtests):
    """With respect to the log-probs, where no factor of them is detached."""
    for k, (name, level) in enumerate(WITHOUT_DETACH):
        given = inputs_of(8, per_step=k % 2 == 0, far=False)
        clean = {leaf: torch.where(MASK, getattr(given, leaf).detach(), 0.5) for leaf in LEAVES}
        config = ObjectiveConfig(surrogate=surrogate_at(name, level), kl_estimator="k3_weighted", kl_coef=0.3)

        def loss(log_probs: Tensor, given=given, clean=clean, config=config) -> Tensor:
            return grpo_objective(replace(given, **{**clean, "log_probs": log_probs}), config).loss

        with subtests.test(config=config):
            assert torch.autograd.gradcheck(loss, clean["log_probs"].requires_grad_())
