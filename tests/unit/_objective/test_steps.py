"""What a surrogate reads: shapes, precision, gradients, and the defaults for inputs that are missing."""

import math

import pytest
import torch

from grpo import ConfigError, Mask, Truncate
from grpo.surrogates import Steps
from tests.support.objective_inputs import double, objective_inputs

NAN, INF = math.nan, math.inf
MASK = torch.tensor([[True, False, True]])
LOG_PROBS = double([[-1.0, NAN, -2.0]])
OLD = double([[-1.5, INF, -1.75]])
BEHAVIOUR = double([[-2.0, -INF, NAN]])


def steps_of(correction=None, **changes) -> Steps:
    tensors = {"log_probs": LOG_PROBS, "advantages": double([3.0]), "old_log_probs": OLD, "mask": MASK}
    return Steps(objective_inputs(**{**tensors, **changes}), correction)


def test_values_are_zero_outside_the_mask():
    steps = steps_of(behaviour_log_probs=BEHAVIOUR, advantages=double([[1.0, NAN, -2.0]]))
    assert steps.mask is MASK
    assert (steps.log_probs.tolist(), steps.old_log_probs.tolist()) == ([[-1, 0, -2]], [[-1.5, 0, -1.75]])
    assert (steps.sampled_log_probs.tolist(), steps.advantages.tolist()) == ([[-2, 0, -1.75]], [[1, 0, -2]])
    assert steps.constant(double([[5.0, NAN, 6.0]])).tolist() == [[5, 0, 6]]
    selected = torch.tensor([[True, True, False]])  # is kept unchanged, and one advantage per row is one column
    steps = steps_of(selected=selected)
    assert steps.selected is steps.require_selected() is selected
    assert steps.advantages.tolist() == [[3.0]]


def test_only_log_probs_carry_a_gradient():
    leaves = {
        "log_probs": LOG_PROBS.clone(), "old_log_probs": OLD.clone(), "behaviour_log_probs": BEHAVIOUR.clone(),
        "advantages": double([3.0]),
    }  # fmt: skip
    for leaf in leaves.values():
        leaf.requires_grad_()
    steps = steps_of(Truncate(), **leaves)
    assert steps.log_probs.requires_grad
    assert steps.log_ratio().requires_grad
    per_step = double([[1.0, 2.0, 3.0]]).requires_grad_()
    constants = [
        steps.old_log_probs, steps.sampled_log_probs, steps.advantages, steps.sampler_weights,
        steps.constant(per_step), steps_of(advantages=per_step).advantages, steps_of(old_log_probs=None).old_log_probs,
    ]  # fmt: skip
    assert not any(constant.requires_grad for constant in constants)


def test_without_old_log_probs_the_ratio_is_1_and_has_the_gradient_of_log_probs():
    leaf = LOG_PROBS.clone().requires_grad_()
    steps = steps_of(log_probs=leaf, old_log_probs=None)
    assert steps.old_is_current
    assert not steps_of(old_log_probs=LOG_PROBS).old_is_current
    assert torch.equal(steps.old_log_probs, steps.log_probs)
    assert torch.equal(steps.sampled_log_probs, steps.log_probs)
    assert steps.ratio().tolist() == [[1, 1, 1]]
    assert torch.autograd.grad(steps.ratio().sum(), leaf)[0].tolist() == [[1, 0, 1]]


def test_sampled_log_probs_are_the_behaviours_if_known_and_else_the_old_policys():
    assert torch.equal(steps_of().sampled_log_probs, steps_of().old_log_probs)
    assert steps_of(old_log_probs=None, behaviour_log_probs=BEHAVIOUR).sampled_log_probs.tolist() == [[-2, 0, -2]]


def test_the_ratio_is_clamped_and_the_log_ratio_is_not():
    """Both are those of steps unless another level is named."""
    steps = steps_of(log_probs=double([[-1.0, NAN, -2.0]]), old_log_probs=double([[-31.0, NAN, 28.0]]))
    assert steps.log_ratio().tolist() == steps.log_ratio("step").tolist() == [[30, 0, -30]]
    assert steps.ratio()[0].tolist() == pytest.approx([math.exp(20), 1, math.exp(-20)], rel=1e-14)
    assert steps.ratio() is steps.ratio("step")


# from the sampler to the old policy: e^.5, and 1 where the step is not scored
@pytest.mark.parametrize(
    ("correction", "weights"),
    [
        (None, None),
        (Truncate(), [math.exp(0.5), 1, 1]),
        (Truncate(high=1.5), [1.5, 1, 1]),
        (Mask(high=1.5), [0, 1, 1]),
        (Truncate(level="row"), [math.exp(0.5)]),
        (lambda old, behaviour, mask: old + 10 * mask, [8.5, 0, 8.25]),  # a correction of one's own
    ],
)
def test_sampler_weights_come_from_old_and_behaviour_log_probs(correction, weights):
    found = steps_of(correction, behaviour_log_probs=BEHAVIOUR).sampler_weights
    assert (None if found is None else found[0].tolist()) == (None if weights is None else pytest.approx(weights))


def test_a_correction_without_behaviour_log_probs_is_refused():
    assert steps_of().sampler_weights is None
    message = r"objective\.sampler_correction=Mask\(.*\) needs behaviour_log_probs\. Return them in SampledActions"
    with pytest.raises(ConfigError, match=message):
        steps_of(Mask())


@pytest.mark.parametrize(
    ("given", "computed"),
    [
        *((given, torch.float32) for given in (torch.float16, torch.bfloat16, torch.float32)),
        (torch.float64, torch.float64),
    ],
)
def test_everything_is_computed_in_float32_or_in_the_precision_of_log_probs(given, computed):
    tensors = {"old_log_probs": OLD, "behaviour_log_probs": BEHAVIOUR, "advantages": double([[3.0, NAN, 0.1]])}
    steps = steps_of(Truncate(), log_probs=LOG_PROBS.to(given), **tensors)
    found = [
        steps.log_probs, steps.old_log_probs, steps.sampled_log_probs, steps.advantages, steps.sampler_weights,
        steps.ratio("row"), steps.log_ratio(), steps_of(log_probs=LOG_PROBS.to(given)).advantages,
    ]  # fmt: skip
    assert {value.dtype for value in found} == {computed}
