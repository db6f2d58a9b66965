"""The terms of the loss other than the surrogate: the exact KL, the critic's error, and which steps count in which term."""

import math
from dataclasses import replace

import pytest
import torch

from grpo import ObjectiveConfig, ObjectiveInputs, Truncate, grpo_objective
from grpo.surrogates import Dppo
from tests.support.objective_inputs import double, objective_inputs

NAN = math.nan


# One row of two steps and a hole, on policy, A = 0 unless said otherwise: only the other terms are left. Weights .5, .25.
MASK = torch.tensor([[True, False, True]])
WEIGHTS = double([[0.5, 0.0, 0.25]])


def example(**changes) -> ObjectiveInputs:
    tensors = {"log_probs": double([[-1.0, NAN, -2.0]]), "advantages": double([0.0]), "mask": MASK, "weights": WEIGHTS}
    return objective_inputs(**{**tensors, **changes})


def share(inputs: ObjectiveInputs, config: ObjectiveConfig, name: str) -> float:
    return grpo_objective(inputs, config).metrics[name][1].item()


EXACT = ObjectiveConfig(kl_estimator="exact", kl_coef=0.1)


KL = double([[0.6, NAN, 0.2]])


def test_the_exact_kl_is_weighted_and_has_its_gradient():
    # .1 (.5 * .6 + .25 * .2) = .035;  d/d kl = .1 w
    kl = KL.clone().requires_grad_()
    output = grpo_objective(example(kl=kl), EXACT)
    assert output.loss.item() == pytest.approx(0.035, rel=1e-14)
    assert output.metrics["kl_penalty"].tolist() == [0, pytest.approx(0.035), 0]
    # reported unweighted, over the valid steps: .6 + .2, .36 + .04
    assert output.metrics["kl"].tolist() == [2, pytest.approx(0.8), pytest.approx(0.4)]
    assert torch.autograd.grad(output.loss, kl)[0].tolist() == [pytest.approx([0.05, 0, 0.025], rel=1e-14)]


def test_the_exact_kl_reads_neither_log_probs_nor_reference_and_other_estimators_do_not_read_it():
    log_probs = double([[-1.0, NAN, -2.0]]).requires_grad_()
    output = grpo_objective(example(log_probs=log_probs, kl=KL, ref_log_probs=double([[-9.0, NAN, 3.0]])), EXACT)
    assert output.loss.item() == pytest.approx(0.035, rel=1e-14)
    assert torch.autograd.grad(output.loss, log_probs)[0].tolist() == [[0, 0, 0]]
    # k3 at pi = ref is 0
    inputs = example(kl=KL, ref_log_probs=double([[-1.0, NAN, -2.0]]))
    assert share(inputs, ObjectiveConfig(kl_coef=0.1), "kl_penalty") == 0


def test_without_a_coefficient_the_exact_kl_is_only_reported():
    config = ObjectiveConfig(kl_estimator="exact", kl_coef=0.0)
    output = grpo_objective(example(kl=KL), config)
    assert output.loss.item() == 0
    assert output.metrics["kl"].tolist() == [2, pytest.approx(0.8), pytest.approx(0.4)]
    assert "kl" not in grpo_objective(example(), config).metrics


# A critic. v = 1, 3; R = 2, -1: errors 1 and 16; weighted .5 + 4 = 4.5, times .5: 2.25.  d/dv = .5 w 2 (v - R)
VALUES, RETURNS = double([[1.0, NAN, 3.0]]), double([[2.0, NAN, -1.0]])


def test_the_value_loss_equals_a_hand_worked_squared_error():
    values = VALUES.clone().requires_grad_()
    output = grpo_objective(example(values=values, returns=RETURNS), ObjectiveConfig())
    assert output.loss.item() == 2.25
    assert output.metrics["value_loss"].tolist() == [0, 2.25, 0]
    assert torch.autograd.grad(output.loss, values)[0].tolist() == [[0.5 * -1, 0, 0.25 * 4]]


FAR_VALUES = double([[9.0, NAN, 9.0]])


@pytest.mark.parametrize(("given", "config", "loss"), [
    ({"values": VALUES, "returns": RETURNS}, {"value_coef": 2.0}, 9.0),
    ({"values": VALUES, "returns": RETURNS}, {"value_coef": 0.0}, 0.0),
    ({"values": VALUES, "returns": RETURNS, "old_values": FAR_VALUES}, {}, 2.25),  # no bound: it is not clipped
    ({"values": VALUES, "returns": RETURNS}, {"value_clip": 0.1}, 2.25),  # and without old values neither
    ({"values": VALUES}, {}, 0.0),
    ({"returns": RETURNS}, {}, 0.0),
])  # fmt: skip
def test_the_value_loss_needs_values_and_returns_and_a_bound_to_be_clipped(given, config, loss):
    output = grpo_objective(example(**given), ObjectiveConfig(**config))
    assert output.loss.item() == loss
    assert ("value_loss" in output.metrics) == (len(given) > 1)


# Each with R = 0, bound .5 around the value at collection: e = max(v^2, (old + clip(v - old))^2), weight 1, coefficient 1.
@pytest.mark.parametrize(("value", "old", "error", "slope"), [
    (1.2, 1.0, 1.44, 2.4),  # has moved by .2: both are the same
    (0.8, 1.0, 0.64, 1.6),
    (2.0, 1.0, 4.0, 4.0),  # away from R and beyond: the value's own error is larger
    (0.2, 1.0, 0.25, 0.0),  # towards R and beyond: that of .5 is, which no longer moves
    (-0.2, -1.0, 0.25, 0.0),
    (-2.0, -1.0, 4.0, -4.0),
    (-3.0, 1.0, 9.0, -6.0),  # through R and far out on the other side
])  # fmt: skip
def test_a_value_beyond_its_clip_bound_towards_its_target_gets_no_gradient(value, old, error, slope):
    values = double([[value]]).requires_grad_()
    inputs = objective_inputs(
        double([[-1.0]]), double([0.0]), values=values, old_values=double([[old]]), returns=double([[0.0]])
    )
    loss = grpo_objective(inputs, ObjectiveConfig(value_coef=1.0, value_clip=0.5)).loss
    assert loss.item() == pytest.approx(error, rel=1e-14)
    assert torch.autograd.grad(loss, values)[0].item() == pytest.approx(slope, rel=1e-14)


def test_returns_and_values_at_collection_carry_no_gradient():
    leaves = [values.clone().requires_grad_() for values in (VALUES, RETURNS, VALUES - 0.1)]
    inputs = example(values=leaves[0], returns=leaves[1], old_values=leaves[2])
    loss = grpo_objective(inputs, ObjectiveConfig(value_clip=0.2)).loss
    by_values, *others = torch.autograd.grad(loss, leaves, allow_unused=True)
    assert (by_values[MASK] != 0).any()
    assert others == [None, None]


# All terms at once. A = 2, on policy: gradient -2 w;  kl .6 .2, coefficient .1;  entropy .3 .5, .01;  values as above.
#   policy -2 (.5 + .25) = -1.5;  kl .035;  entropy .01 (.15 + .125) = .00275;  value 2.25
def everything(**changes) -> ObjectiveInputs:
    leaves = {
        "log_probs": double([[-1.0, NAN, -2.0]]), "kl": double([[0.6, NAN, 0.2]]), "entropy": double([[0.3, NAN, 0.5]]),
        "values": VALUES.clone(),
    }  # fmt: skip
    for leaf in leaves.values():
        leaf.requires_grad_()
    return example(advantages=double([2.0]), returns=RETURNS, **leaves, **changes)


ALL_TERMS = ObjectiveConfig(kl_estimator="exact", kl_coef=0.1, entropy_coef=0.01)
OTHER_TERMS = {"kl": [0.05, 0, 0.025], "entropy": [-0.005, 0, -0.0025], "values": [-0.5, 0, 1.0]}


@pytest.mark.parametrize(("keep", "policy_loss", "gradient"), [
    (None, -1.5, [-1.0, 0, -0.5]),
    ([[True, True, True]], -1.5, [-1.0, 0, -0.5]),
    ([[True, False, False]], -1.0, [-1.0, 0, 0]),
    ([[False, True, True]], -0.5, [0, 0, -0.5]),
    ([[False, False, False]], 0.0, [0, 0, 0]),
])  # fmt: skip
def test_keep_excludes_steps_from_the_surrogate_and_no_other_term(keep, policy_loss, gradient):
    """The weights do not change: a kept step counts as much as before."""
    inputs = everything(keep=None if keep is None else torch.tensor(keep))
    output = grpo_objective(inputs, ALL_TERMS)
    assert output.loss.item() == pytest.approx(policy_loss + 0.035 - 0.00275 + 2.25, rel=1e-14)
    output.loss.backward()
    assert inputs.log_probs.grad.tolist() == [gradient]
    for name, expected in OTHER_TERMS.items():
        assert getattr(inputs, name).grad.tolist() == [pytest.approx(expected, rel=1e-14)], name


def far_off(**changes) -> ObjectiveInputs:
    """A row with a negative advantage. Each of its steps is e^.5 less likely than when it was sampled."""
    return replace(everything(old_log_probs=double([[-0.5, NAN, -1.5]])), advantages=double([-2.0]), **changes)


def test_a_row_too_far_off_policy_keeps_its_other_terms():
    inputs = far_off()
    output = grpo_objective(inputs, replace(ALL_TERMS, off_policy_threshold=0.4))
    assert output.loss.item() == pytest.approx(0.035 - 0.00275 + 2.25, rel=1e-14)
    assert output.metrics["kept_fraction"].tolist() == [2, 0, 0]
    output.loss.backward()
    assert inputs.log_probs.grad.tolist() == [[0, 0, 0]]
    for name, expected in OTHER_TERMS.items():
        assert getattr(inputs, name).grad.tolist() == [pytest.approx(expected, rel=1e-14)], name
    # within the threshold it counts fully: clipped below at .8 where A < 0: -min(rho A, .8 A) = .8 * 2
    metrics = grpo_objective(far_off(), replace(ALL_TERMS, off_policy_threshold=0.6)).metrics
    assert metrics["policy_loss"][1].item() == pytest.approx(1.6 * 0.75, rel=1e-14)
    assert metrics["kept_fraction"].tolist() == [2, 2, 2]
    assert "kept_fraction" not in grpo_objective(far_off(), ALL_TERMS).metrics


def test_a_step_counts_only_if_it_is_kept_and_its_row_is_near():
    # two rows of two steps on policy; the second was sampled e^.5 likelier, and is bad. Of each the first step is kept
    keep, behaviour = torch.tensor([[True, False], [True, False]]), torch.full((2, 2), -0.5, dtype=torch.float64)
    inputs = objective_inputs(behaviour - 0.5, double([2.0, -2.0]), keep=keep, behaviour_log_probs=behaviour)
    for threshold, loss, kept in ((0.4, -2.0, 1), (0.6, -2.0 + 2.0, 2)):
        output = grpo_objective(inputs, ObjectiveConfig(off_policy_threshold=threshold))
        assert output.loss.item() == loss
        assert output.metrics["kept_fraction"].tolist() == [4, kept, kept]


@pytest.mark.parametrize(("of_the_config", "of_the_inputs", "in_force"), [
    (0.1, None, 0.1), (0.1, 0.3, 0.3), (0.1, 0.0, 0.0), (0.0, 0.3, 0.3),
])  # fmt: skip
def test_coefficients_in_the_inputs_override_the_configured_ones(of_the_config, of_the_inputs, in_force):
    # unweighted by a coefficient: kl .35, entropy .275
    config = ObjectiveConfig(kl_estimator="exact", kl_coef=of_the_config, entropy_coef=of_the_config)
    output = grpo_objective(everything(kl_coef=of_the_inputs, entropy_coef=of_the_inputs), config)
    assert output.metrics["kl_penalty"][1].item() == pytest.approx(0.35 * in_force, rel=1e-14)
    bonus = output.metrics["entropy_bonus"][1].item() if in_force else 0.0
    assert bonus == pytest.approx(0.275 * in_force, rel=1e-14)
    assert output.loss.item() == pytest.approx(-1.5 + in_force * (0.35 - 0.275) + 2.25, rel=1e-14)


def test_steps_stopped_by_their_sampler_count_as_clipped_before_any_update():
    # pi = .9 was sampled with .1: it has moved by .8 > .2 in the direction of A > 0, so DPPO drops the step
    log_probs, behaviour = double([[0.9]]).log().requires_grad_(), double([[0.1]]).log()
    inputs = objective_inputs(log_probs, double([1.0]), old_log_probs=None, behaviour_log_probs=behaviour)
    output = grpo_objective(inputs, ObjectiveConfig(surrogate=Dppo(tv_limit=0.2)))
    assert output.loss.item() == 0
    assert output.metrics["clip_fraction_high"].tolist() == [1, 1, 1]
    assert output.metrics["clip_fraction_low"].tolist() == [1, 0, 0]


def test_the_sampled_entropy_is_an_expectation_over_the_old_policy() -> None:
    """Behaviour log-probs log 1/4 and log 1/2, old and current ones -1 and -2: u = 4 / e = 1.4715 and 2 / e^2 = 0.2707."""
    first, second = 4 / math.e, 2 / math.e**2
    config = ObjectiveConfig(
        kl_coef=0.0, entropy_coef=0.1, entropy_estimator="score_function", sampler_correction=Truncate(high=3.0)
    )
    log_probs = double([[-1.0, NAN, -2.0]]).requires_grad_()
    behaviour = double([[math.log(0.25), NAN, math.log(0.5)]])
    weights = double([[0.5, 0.0, 0.25]])
    output = grpo_objective(
        example(log_probs=log_probs, behaviour_log_probs=behaviour, entropy_weights=weights), config
    )
    # -log pi is 1 and 2: .1 (.5 u1 1 + .25 u2 2)
    expected = 0.1 * (0.5 * first + 0.25 * second * 2)
    assert output.loss.item() == pytest.approx(-expected, rel=1e-12)
    # d(-u rho sg(log pi)) / d log pi = -u log pi at rho = 1
    gradient = torch.autograd.grad(output.loss, log_probs)[0]
    assert gradient.tolist() == [pytest.approx([-0.1 * 0.5 * first, 0.0, -0.1 * 0.25 * second * 2], rel=1e-12)]
    plain = replace(config, sampler_correction="none")
    output = grpo_objective(example(behaviour_log_probs=behaviour, entropy_weights=weights), plain)
    assert output.loss.item() == pytest.approx(-0.1 * (0.5 + 0.25 * 2), rel=1e-12)
