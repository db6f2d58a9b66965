"""The whole objective against a plain reference that autograd differentiates, written from the formulas and sharing no code.

`reference_loss` is the loss as a sum over steps, one by one where that is clearest, with `detach` where the papers stop the
gradient. What `grpo_objective` puts together from slopes in closed form has to be the gradient of that.
"""

import math
from dataclasses import replace
from itertools import product
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from grpo import ObjectiveConfig, ObjectiveInputs, grpo_objective
from grpo.divergence import KLEstimator
from grpo.ratios import RatioLevel
from grpo.surrogates import Surrogate

LEAVES = ("log_probs", "entropy", "kl", "values")
NAN = math.nan
MASK = torch.tensor(
    [[1, 1, 1, 1], [1, 0, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0], [1, 1, 1, 0]], dtype=torch.bool
)


def inputs_of(seed: int, *, per_step: bool, far: bool, with_old: bool = True) -> ObjectiveInputs:
    """Ragged rows with holes, one without a step; NaN and infinity off the mask; `far`: log-ratios beyond +-20."""
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
    weights = torch.where(MASK, uniform(0.1, 1.0), 0.0)
    return ObjectiveInputs(
        log_probs=poisoned(log_probs).requires_grad_(),
        old_log_probs=poisoned(old, math.inf) if with_old else None,
        advantages=poisoned(uniform(-2.0, 2.0)) if per_step else uniform(-2.0, 2.0, len(MASK)),
        mask=MASK,
        weights=weights,
        entropy=poisoned(uniform(0.1, 1.0), -math.inf).requires_grad_(),
        entropy_weights=torch.where(MASK, uniform(0.1, 1.0), 0.0),
        ref_log_probs=poisoned(ref, -math.inf),
        behaviour_log_probs=poisoned(behaviour),
        kl=poisoned(uniform(0.0, 0.5)).requires_grad_(),
        keep=uniform(0.0, 1.0) < 0.8,
        penalised=uniform(0.0, 1.0) < 0.5,
        values=poisoned(uniform(-1.0, 1.0)).requires_grad_(),
        old_values=poisoned(uniform(-1.0, 1.0)),
        returns=poisoned(uniform(-1.0, 1.0)),
    )


def exp20(x: Tensor) -> Tensor:
    return x.clamp(-20.0, 20.0).exp()


def reference_loss(given: ObjectiveInputs, config: ObjectiveConfig) -> Tensor:
    """Row by row, over its valid steps alone: nothing off the mask is ever touched."""
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
    x = log_pi - old
    log_rho = {
        "step": x,
        "row": x.mean().expand(len(x)),
        "row_sum": x.sum().expand(len(x)),
        "row_step": x.mean().detach() + x - x.detach(),
        "none": x - x.detach(),
    }[config.ratio_level]
    rho = exp20(log_rho)
    step_losses = surrogate_of(config, here, given, log_pi, sampled, x, log_rho, rho, a)
    u = 1.0
    if config.sampler_correction == "truncate" and config.surrogate != "vespo":
        u = exp20(old - sampled).clamp(max=config.sampler_ratio_high).detach()
    m = here(given.keep).double()
    if config.off_policy_threshold is not None:
        known = ~here(given.behaviour_log_probs).isnan()
        off = torch.where(known, sampled - log_pi.detach(), 0.0).mean()
        m = m * ((a >= 0) | (off <= config.off_policy_threshold)).double()
    loss = (w * m * u * step_losses).sum()

    y = log_pi - here(given.ref_log_probs)
    k3 = (-y.clamp(min=-20.0)).exp() + y.clamp(min=-20.0) - 1.0
    kl = {"k1": y, "k2": y**2 / 2, "k3": k3, "k3_weighted": rho * k3, "exact": here(given.kl)}[config.kl_estimator]
    loss = loss + config.kl_coef * (w * kl).sum()
    h = here(given.entropy) if config.entropy_estimator == "exact" else -exp20(x) * log_pi.detach()
    loss = loss - config.entropy_coef * (here(given.entropy_weights) * h).sum()
    v, v_old, r = here(given.values), here(given.old_values), here(given.returns)
    error = (v - r) ** 2
    if config.value_clip is not None:
        error = torch.maximum(error, (v_old + (v - v_old).clamp(-config.value_clip, config.value_clip) - r) ** 2)
    return loss + config.value_coef * (w * error).sum()


def either(condition: Tensor, yes: float, no: float) -> Tensor:
    return torch.tensor([yes if c else no for c in condition.tolist()], dtype=torch.float64)


def surrogate_of(config, here, given, log_pi, sampled, x, log_rho, rho, a) -> Tensor:
    low, high = 1 - config.clip_low, 1 + config.clip_high
    match config.surrogate:
        case "clip" | "clip_cov":
            unclipped = rho if config.delta is None else rho.clamp(max=config.delta)
            value = torch.minimum(unclipped * a, rho.clamp(low, high) * a)
            if config.dual_clip is not None:
                value = torch.where(a < 0, torch.maximum(value, config.dual_clip * a), value)
            return -value
        case "none":
            return -a * log_pi
        case "cispo":
            return -rho.clamp(low, high).detach() * a * log_pi
        case "sapo":
            tau = either(a > 0, config.sapo_temperature_pos, config.sapo_temperature_neg)
            return -4 / tau / (1 + (-tau * (rho - 1)).exp()) * a
        case "gmpo":
            c = torch.where(a > 0, x.clamp(max=math.log(high)), x.clamp(min=math.log(low)))
            return -a * exp20(c.mean())
        case "vespo":
            log_w = x.detach().clamp(-20, 20).sum()
            if config.sampler_correction == "truncate":
                old = log_pi.detach() - x.detach()
                log_w = (
                    log_w
                    + exp20(old - sampled).clamp(max=config.sampler_ratio_high).log().clamp(min=math.log(1e-8)).sum()
                )
            log_w = log_w.clamp(math.log(1e-8), 20)
            k = either(a >= 0, config.vespo_k_pos, config.vespo_k_neg)
            rate = either(a >= 0, config.vespo_lambda_pos, config.vespo_lambda_neg)
            return -(k * log_w + rate * (1 - log_w.exp())).exp() * a * log_pi
        case "dro":
            return -a * log_pi + config.dro_beta / 2 * log_rho**2
        case "dppo_tv":
            moved = (log_pi.exp() - sampled.exp()).detach()
            stopped = ((a > 0) & (moved > config.tv_limit)) | ((a < 0) & (moved < -config.tv_limit))
            return -rho * a * (~stopped).double()
        case "kl_cov":
            moved = log_rho.abs() * (log_rho.detach().abs() > 1e-6)
            return -rho * a + config.cov_kl_coef * torch.where(here(given.penalised), moved, 0.0)
    raise AssertionError(config.surrogate)


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


def settings_for(surrogate: Surrogate, number: int) -> dict[str, Any]:
    """Now and then a correction for the sampler and for distance, or further bounds."""
    if number % 3 == 1:
        return {"sampler_correction": "truncate", "off_policy_threshold": 0.05, "sampler_ratio_high": 1.2}
    return {"delta": 1.5, "dual_clip": 1.3} if number % 3 == 2 and surrogate in ("clip", "clip_cov") else {}


CASES = list(product((False, True), (False, True)))  # advantages per step, log-ratios beyond the bounds


@pytest.mark.parametrize("estimator", get_args(KLEstimator))
@pytest.mark.parametrize("level", get_args(RatioLevel))
@pytest.mark.parametrize("surrogate", get_args(Surrogate))
def test_gradients_are_those_of_a_plain_reference(surrogate: Surrogate, level: RatioLevel, estimator: KLEstimator):
    """Every surrogate x ratio level x KL estimator x entropy term x value term."""
    settings = product(("exact", "score_function"), (None, 0.3), enumerate(CASES))
    for seed, (entropy, value_clip, (number, (per_step, far))) in enumerate(settings):
        config = ObjectiveConfig(
            surrogate=surrogate,
            ratio_level=level,
            kl_estimator=estimator,
            kl_coef=0.3,
            entropy_estimator=entropy,
            entropy_coef=0.2,
            value_clip=value_clip,
            tv_limit=0.05,
            **settings_for(surrogate, number),
        )
        assert_as_the_reference(inputs_of(seed, per_step=per_step, far=far), config)


@pytest.mark.parametrize("level", get_args(RatioLevel))
@pytest.mark.parametrize("surrogate", get_args(Surrogate))
def test_gradients_where_the_old_policy_is_the_one_now(surrogate: Surrogate, level: RatioLevel):
    for estimator, entropy in product(get_args(KLEstimator), ("exact", "score_function")):
        config = ObjectiveConfig(
            surrogate=surrogate, ratio_level=level, kl_estimator=estimator, kl_coef=0.3, entropy_estimator=entropy,
            entropy_coef=0.2, tv_limit=0.05,
        )  # fmt: skip
        for per_step in (False, True):
            given = inputs_of(3, per_step=per_step, far=False, with_old=False)
            assert_as_the_reference(given, config)


@pytest.mark.parametrize("level", ["step", "row", "row_sum"])
@pytest.mark.parametrize("surrogate", ["clip", "sapo", "gmpo", "dro", "kl_cov"])
def test_gradients_agree_with_finite_differences(surrogate: Surrogate, level: RatioLevel):
    """Where nothing is detached, with respect to all four inputs at once."""
    given = inputs_of(8, per_step=False, far=False)
    clean = {name: torch.where(MASK, getattr(given, name).detach(), 0.5).requires_grad_() for name in LEAVES}
    config = ObjectiveConfig(
        surrogate=surrogate,
        ratio_level=level,
        kl_estimator="k3_weighted",
        kl_coef=0.3,
        entropy_coef=0.2,
        value_clip=0.3,
    )

    def loss(*leaves: Tensor) -> Tensor:
        return grpo_objective(replace(given, **dict(zip(LEAVES, leaves, strict=True))), config).loss

    unread = tuple(clean[name] if name != "kl" else clean[name].detach() for name in LEAVES)
    assert torch.autograd.gradcheck(loss, unread)
