"""`check_objective`, and the identities that every loss of the GRPO family keeps.

With w the weights, A the advantages, l the log-probs and rho = exp(l - l_old), the losses of `grpo.surrogates` have at rho = 1
the gradient of REINFORCE (except `ClipCov`, which leaves steps out, and `level="row_sum"`),

    dL / dl[n,t] = -w[n,t] A[n,t]  at the steps of the mask, and 0 elsewhere.

The weights hold the whole normalisation. So the losses of the parts of a batch add up to the loss of the batch, and padding
changes nothing. A bound on rho stops the gradient only where A pushes rho away from 1: above 1 for A > 0, below 1 for A < 0.

The KL term is tested on a softmax policy over four actions, pi = softmax(theta), whose expectations are sums. Rows are all four
actions with weights pi(a), so the gradient in theta is an expectation under pi. One gradient step on the term must lower
KL(pi || ref), whose gradient is pi_k (x_k - KL) with x = log(pi / ref).

Source:
    Schulman et al. 2017, arXiv:1707.06347, eq. 7 (bounds); Schulman 2020, "Approximating KL divergence" (estimators);
    Tang and Munos 2025, arXiv:2506.09477 (the gradient of an estimator is not an estimator of the gradient).
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from grpo._common.conversion import describe
from grpo._common.global_state import seed_everything
from grpo._common.preserved import preserved_random_state
from grpo.config import ObjectiveConfig
from grpo.errors import ContractError
from grpo.grpo_objective import Objective, grpo_objective, with_selections
from grpo.types import ObjectiveInputs, ObjectiveOutput

from .probe import difference
from .report import CheckReport, Rule, Verdict, failed, passed, run_rules, skipped

CLOSE = 1e-4
"""Largest difference, relative to 1 + |value|, between gradients that must be equal."""
KL_COEF = 0.5
"""The KL coefficient of the test of the KL term."""
FACTORS = (0.2, 0.5, 2.0, 5.0)
"""Probability ratios at which bounds are looked for."""


@dataclass(frozen=True, slots=True)
class ObjectiveProbe:
    """A loss under test, and inputs made for it."""

    objective: Objective
    """The loss."""
    select: Callable[[ObjectiveInputs], ObjectiveInputs]
    """Selects steps over the whole update, as the trainer does. A loss of the user's own has no such selection."""

    def inputs(self) -> ObjectiveInputs:
        """Four rows in two groups with 4, 2, 3 and 1 of 4 steps, in float64.

        The weights add up to 1. They differ between rows only, because a ratio of the row shares its gradient among the steps.
        """
        mask = torch.arange(4) < torch.tensor([[4], [2], [3], [1]])
        weights = torch.where(mask, torch.rand(4, 1, dtype=torch.float64) + 0.5, 0.0)
        log_probs = -0.2 - 2 * torch.rand(4, 4, dtype=torch.float64)
        return ObjectiveInputs(
            log_probs=torch.where(mask, log_probs, 0.0),
            old_log_probs=torch.where(mask, log_probs, 0.0),
            advantages=torch.tensor([1.5, -0.5, 2.0, -1.0], dtype=torch.float64),
            mask=mask,
            weights=weights / weights.sum(),
        )

    def ask(self, inputs: ObjectiveInputs) -> tuple[float, Float[Tensor, "N T"]]:
        """The loss, and its gradient with respect to the log-probs."""
        leaf = inputs.log_probs.detach().clone().requires_grad_()
        loss = self.output(replace(inputs, log_probs=leaf)).loss
        (gradient,) = torch.autograd.grad(loss, leaf, allow_unused=True, materialize_grads=True)
        return float(loss.detach()), gradient

    def output(self, inputs: ObjectiveInputs) -> ObjectiveOutput:
        """What the loss returns, checked for its type."""
        output: Any = self.objective(inputs)
        loss: Any = getattr(output, "loss", None)
        if not isinstance(loss, Tensor) or loss.dim() != 0 or not loss.is_floating_point():
            raise ContractError(
                "The objective must return ObjectiveOutput(loss=a scalar tensor, metrics=...); got "
                f"{type(output).__name__ if loss is None else describe(loss)}. Sum the steps' losses, times their weights."
            )
        return output  # type: ignore[no-any-return]


def expected_gradient(inputs: ObjectiveInputs) -> Float[Tensor, "N T"]:
    """-w A at the steps of the mask: the gradient of REINFORCE."""
    return torch.where(inputs.mask, -inputs.weights * inputs.advantages.unsqueeze(1), 0.0)


def _check_output(probe: ObjectiveProbe) -> Verdict:
    leaf = probe.inputs().log_probs.requires_grad_()
    loss = probe.output(replace(probe.inputs(), log_probs=leaf)).loss
    if not loss.requires_grad:
        return failed(
            "The loss must carry a gradient to log_probs; it carries none. Compute it without detach() or item()."
        )
    return passed(f"{describe(loss)}.")


def _check_policy_gradient(probe: ObjectiveProbe) -> Verdict:
    inputs = probe.inputs()
    expected = expected_gradient(inputs)
    for name, given in {
        "old_log_probs = log_probs": inputs,
        "no old_log_probs": replace(inputs, old_log_probs=None),
    }.items():
        _, gradient = probe.ask(given)
        if not bool(gradient.any()):
            return failed(
                f"At ratio 1 ({name}) the gradient with respect to log_probs must be -weights x advantages; it is 0. Do not "
                "detach log_probs, and divide by the old log-probs as constants: exp(log_probs - log_probs.detach())."
            )
        if (gap := difference(gradient, expected)) > CLOSE:
            scale = float((gradient * expected).sum() / expected.square().sum())
            return failed(
                f"At ratio 1 ({name}) the gradient with respect to log_probs must be -weights x advantages; it differs by "
                f"{gap:.2g}, and is {scale:.3g} times as large along it. The weights hold the whole normalisation: do not "
                "divide again by steps, rows or a standard deviation. Multiply by advantages.unsqueeze(1), and mind the sign."
            )
    return passed("At ratio 1 the gradient is -weights x advantages.")


def _check_mask(probe: ObjectiveProbe) -> Verdict:
    inputs = probe.inputs()
    loss, gradient = probe.ask(inputs)
    for what, value in (("large numbers", -30.0), ("NaN", torch.nan)):
        outside: dict[str, Any] = {
            name: torch.where(inputs.mask, getattr(inputs, name), value) for name in ("log_probs", "old_log_probs")
        }
        outside["weights"] = torch.where(inputs.mask, inputs.weights, 0.0)
        other, moved = probe.ask(replace(inputs, **outside))
        inside = torch.where(inputs.mask, moved, 0.0)
        if not abs(other - loss) <= CLOSE * (1 + abs(loss)) or difference(inside, gradient) > CLOSE:
            return failed(
                f"Steps outside the mask must have no influence; {what} there change the loss from {loss:.4g} to {other:.4g}, "
                "or the gradient. Use torch.where(mask, values, 0.0) before all arithmetic: NaN x 0 is NaN."
            )
        if bool(moved[~inputs.mask].isnan().any()) or float(moved[~inputs.mask].abs().max()) > 0:
            return failed(
                "Steps outside the mask must have no gradient; some have one. Use torch.where(mask, log_probs, 0.0) first."
            )
    return passed("Steps outside the mask have no influence.")


def _check_padding(probe: ObjectiveProbe) -> Verdict:
    inputs = probe.inputs()
    loss, gradient = probe.ask(inputs)
    padded: dict[str, Any] = {
        name: torch.nn.functional.pad(getattr(inputs, name), (0, 3))
        for name in ("log_probs", "old_log_probs", "weights", "mask")
    }
    other, wider = probe.ask(replace(inputs, **padded))
    if abs(other - loss) > CLOSE * (1 + abs(loss)) or difference(wider[:, :4], gradient) > CLOSE:
        return failed(
            f"Columns that are masked in all rows must change nothing; three of them change the loss from {loss:.4g} to "
            f"{other:.4g}, or the gradient. Take no means over columns: sum, with the weights."
        )
    return passed("Masked columns change nothing.")


def _part(inputs: ObjectiveInputs, rows: Tensor) -> ObjectiveInputs:
    names = ("log_probs", "old_log_probs", "advantages", "mask", "weights", "keep", "selected")
    cut: dict[str, Any] = {name: getattr(inputs, name)[rows] for name in names if getattr(inputs, name) is not None}
    return replace(inputs, **cut)


def _check_parts(probe: ObjectiveProbe) -> Verdict:
    inputs = probe.inputs()
    inputs = replace(inputs, log_probs=torch.where(inputs.mask, inputs.log_probs + 0.05, 0.0))
    inputs = probe.select(inputs)
    _, whole = probe.ask(inputs)
    for sizes in ((1, 1, 1, 1), (3, 1)):
        parts = [probe.ask(_part(inputs, rows))[1] for rows in torch.arange(4).split(list(sizes))]
        if (gap := difference(torch.cat(parts), whole)) > CLOSE:
            return failed(
                f"The gradients of micro-batches of {', '.join(map(str, sizes))} rows must add up to the gradient of the whole "
                f"batch; they differ by {gap:.2g}. Take no statistics over rows (means, standard deviations of advantages): "
                "advantages and weights already come from the whole update."
            )
    return passed("Micro-batches add up to the batch.")


def _check_bounds(probe: ObjectiveProbe) -> Verdict:
    stopped: dict[tuple[int, float], bool] = {}
    for sign in (1, -1):
        for factor in FACTORS:
            inputs = probe.inputs()
            inputs = replace(
                inputs,
                advantages=sign * inputs.advantages.abs(),
                log_probs=torch.where(inputs.mask, inputs.old_log_probs + torch.tensor(factor).log(), 0.0),  # type: ignore[operator]
            )
            _, gradient = probe.ask(inputs)
            stopped[sign, factor] = not bool(gradient.any())
    wrong = [
        f"A {'>' if sign > 0 else '<'} 0 and ratio {factor:g}"
        for (sign, factor), is_stopped in stopped.items()
        if is_stopped and (factor < 1) == (sign > 0) and not stopped[sign, 1 / factor]
    ]
    if wrong:
        return failed(
            f"The gradient must stop where the advantage pushes the ratio away from 1; it stops on the other side, at "
            f"{'; '.join(wrong)}. PPO takes the minimum of the two objectives: -min(ratio A, clip(ratio) A)."
        )
    if not any(stopped.values()):
        return passed(f"The gradient does not stop at the ratios {', '.join(f'{factor:g}' for factor in FACTORS)}.")
    return passed("The gradient stops only where the advantage pushes the ratio away from 1.")


def _check_kl(probe: ObjectiveProbe) -> Verdict:
    theta = torch.tensor([0.3, -0.8, 1.1, 0.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([0.4, 0.1, 0.2, 0.3], dtype=torch.float64)
    probs = theta.detach().softmax(0)
    x = (probs / ref).log()
    wanted = KL_COEF * probs * (x - (probs * x).sum())

    def gradient(coef: float) -> Tensor:
        log_probs = theta.log_softmax(0).unsqueeze(1)
        inputs = ObjectiveInputs(
            log_probs=log_probs,
            old_log_probs=log_probs.detach(),
            advantages=torch.zeros(4, dtype=torch.float64),
            mask=torch.ones(4, 1, dtype=torch.bool),
            weights=probs.unsqueeze(1),
            ref_log_probs=ref.log().unsqueeze(1),
            kl_coef=coef,
        )
        loss = probe.output(inputs).loss
        return torch.autograd.grad(loss, theta, allow_unused=True, materialize_grads=True)[0]

    with_term, without = gradient(KL_COEF), gradient(0.0)
    term = with_term - without
    if difference(with_term, wanted) < CLOSE or difference(term, wanted) < CLOSE:
        return passed("The KL term has the gradient of KL(pi || ref).")
    if torch.equal(with_term, torch.zeros_like(with_term)):
        return skipped("The loss does not read ref_log_probs.")
    term = term if bool(term.any()) else with_term  # a loss with a coefficient of its own does not read kl_coef
    along = float((term * wanted).sum() / wanted.square().sum())
    if along < 0.1:
        what = "raises the KL" if along < -CLOSE else "does not lower the KL: its expected gradient is 0"
        return failed(
            f"A step along the KL term must lower KL(pi || ref); on a policy over four actions it {what} ({along:.2g} of its "
            "gradient). Use k3 = exp(r) - 1 - r with r = ref_log_probs - log_probs, or 0.5 r^2. The gradient of the log-ratio "
            "itself has mean 0, and its negative sign moves the policy away."
        )
    return passed(
        f"The KL term lowers KL(pi || ref); its gradient is {along:.2g} of the KL's along it, and not equal to it."
    )


def _check_half(probe: ObjectiveProbe) -> Verdict:
    # below 2^16, with which torch's GradScaler begins, so that float16 does not overflow
    scale, inputs = 2.0**14, probe.inputs()
    inputs = replace(inputs, weights=inputs.weights * 1e-6)  # an update of a million steps
    expected = expected_gradient(inputs) * scale
    for dtype in (torch.float16, torch.bfloat16):
        leaf = inputs.log_probs.to(dtype).requires_grad_()
        given = replace(
            inputs,
            log_probs=leaf,
            old_log_probs=leaf.detach(),
            advantages=inputs.advantages.float(),
            weights=inputs.weights.float(),
        )
        (gradient,) = torch.autograd.grad(probe.output(given).loss.float() * scale, leaf)
        gap = float(((gradient.double() - expected).abs() / expected.abs().amax()).max())
        if not gap < 0.05:
            return failed(
                f"A gradient of {float(expected.abs().max() / scale):.1g} must survive {str(dtype).removeprefix('torch.')} "
                f"log-probs with a loss scale of {scale:.0f}; it is {gap:.0%} off. Convert log_probs to float32 first, and "
                "return a float32 loss."
            )
    return passed("Small gradients survive half precision.")


OBJECTIVE_RULES: tuple[Rule, ...] = (
    Rule("output", _check_output),
    Rule("policy gradient", _check_policy_gradient, ("output",)),
    Rule("mask", _check_mask, ("output",)),
    Rule("padding", _check_padding, ("output",)),
    Rule("micro-batches", _check_parts, ("output",)),
    Rule("bounds", _check_bounds, ("policy gradient",)),
    Rule("kl", _check_kl, ("output",)),
    Rule("half precision", _check_half, ("policy gradient",)),
)
"""The rules in order. Each rule comes after the rules that it needs."""


def check_objective(
    objective: Callable[[ObjectiveInputs], ObjectiveOutput] | ObjectiveConfig,
    *,
    seed: int = 0,
    strict: bool = False,
    skip: Collection[str] = (),
) -> CheckReport:
    """Check a loss of your own by identities that every loss of the GRPO family keeps.

    The identities are those of a loss without sampler correction and critic. No test is statistical.

    Args:
        objective: The loss, as passed to `GRPOTrainer(objective=...)`; or the settings of the built-in loss, for a surrogate of
            your own: `ObjectiveConfig(surrogate=my_surrogate)`.
        seed: Seed of the numbers that the loss is tested with.
        strict: Raise if a rule is broken.
        skip: Names of rules to leave out. A loss that is meant to differ from REINFORCE at ratio 1 leaves out
            "policy gradient".

    Returns:
        One result per rule. Use `print(report)` and `report.ok`.

    Raises:
        ContractError: `strict` is set and a rule is broken. The message lists all failures.
        ConfigError: `skip` contains an unknown name.

    Example:
        >>> check_objective(ObjectiveConfig()).ok
        True
    """
    if isinstance(objective, ObjectiveConfig):
        config = objective
        probe = ObjectiveProbe(
            lambda inputs: grpo_objective(inputs, config), lambda inputs: with_selections(inputs, config)
        )
        name = f"ObjectiveConfig({getattr(config.surrogate, '__name__', type(config.surrogate).__name__)})"
    else:
        probe, name = (
            ObjectiveProbe(objective, lambda inputs: inputs),
            getattr(objective, "__name__", type(objective).__name__),
        )
    with preserved_random_state():
        results = run_rules(OBJECTIVE_RULES, probe, prepare=lambda: seed_everything(seed), skip=skip)
    report = CheckReport(subject=f"check_objective({name})", results=results)
    if strict:
        report.raise_for_failures()
    return report
