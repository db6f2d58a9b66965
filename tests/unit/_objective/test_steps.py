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
    assert steps.log_probs.tolist() == [[-1, 0, -2]]
    assert steps.old_log_probs.tolist() == [[-1.5, 0, -1.75]]
    assert steps.sampled_log_probs.tolist() == [[-2, 0, -1.75]]
    assert steps.advantages.tolist() == [[1, 0, -2]]
    assert steps.constant(double([[5.0, NAN, 6.0]])).tolist() == [[5, 0, 6]]


def test_advantages_per_row_become_one_column():
    assert steps_of().advantages.tolist() == [[3.0]]


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
    assert torch.equal(steps.old_log_probs, steps.log_probs)
    assert torch.equal(steps.sampled_log_probs, steps.log_probs)
    assert steps.ratio().tolist() == [[1, 1, 1]]
    assert torch.autograd.grad(steps.ratio().sum(), leaf)[0].tolist() == [[1, 0, 1]]


def test_sampled_log_probs_are_the_behaviours_if_known_and_else_the_old_policys():
    assert torch.equal(steps_of().sampled_log_probs, steps_of().old_log_probs)
    steps = steps_of(old_log_probs=None, behaviour_log_probs=BEHAVIOUR)
    assert steps.sampled_log_probs.tolist() == [[-2, 0, -2]]


def test_log_ratio_and_ratio_at_each_level_equal_hand_worked_values(subtests):
    for level, x in [
        ("step", [0.5, 0, -0.25]),
        ("row", [0.125]),
        ("row_sum", [0.25]),
        ("row_step", [0.125, 0, 0.125]),
        ("none", [0, 0, 0]),
    ]:
        with subtests.test(level=level, x=x):
            steps = steps_of()
            assert steps.log_ratio(level).tolist() == [x]
            assert steps.ratio(level)[0].tolist() == pytest.approx([math.exp(entry) for entry in x], rel=1e-15)
            assert steps.ratio(level) is steps.ratio(level)


def test_the_ratio_level_defaults_to_step():
    steps = steps_of()
    assert torch.equal(steps.log_ratio(), steps.log_ratio("step"))
    assert steps.ratio() is steps.ratio("step")


def test_the_ratio_is_clamped_and_the_log_ratio_is_not():
    steps = steps_of(log_probs=double([[-1.0, NAN, -2.0]]), old_log_probs=double([[-31.0, NAN, 28.0]]))
    assert steps.log_ratio().tolist() == [[30, 0, -30]]
    assert steps.ratio()[0].tolist() == pytest.approx([math.exp(20), 1, math.exp(-20)], rel=1e-14)


# from the sampler to the old policy: e^.5, and 1 where the step is not scored
def test_sampler_weights_come_from_old_and_behaviour_log_probs(subtests):
    for correction, weights in [
        (None, None),
        (Truncate(), [math.exp(0.5), 1, 1]),
        (Truncate(high=1.5), [1.5, 1, 1]),
        (Mask(high=1.5), [0, 1, 1]),
        (Truncate(level="row"), [math.exp(0.5)]),
        (lambda old, behaviour, mask: old + 10 * mask, [8.5, 0, 8.25]),  # a correction of one's own
    ]:
        with subtests.test(correction=correction, weights=weights):
            found = steps_of(correction, behaviour_log_probs=BEHAVIOUR).sampler_weights
            assert (None if found is None else found[0].tolist()) == (
                None if weights is None else pytest.approx(weights)
            )


def test_a_correction_without_behaviour_log_probs_is_refused():
    assert steps_of().sampler_weights is None
    message = r"objective\.sampler_correction=Mask\(.*\) needs behaviour_log_probs\. Return them in SampledActions"
    with pytest.raises(ConfigError, match=message):
        steps_of(Mask())


def test_the_given_selection_is_kept_unchanged():
    selected = torch.tensor([[True, True, False]])
    steps = steps_of(selected=selected)
    assert steps.selected is steps.require_selected() is selected


def test_steps_are_on_policy_without_old_log_probs():
    assert steps_of(old_log_probs=None).old_is_current
    assert not steps_of(old_log_probs=LOG_PROBS).old_is_current


def test_everything_is_computed_in_float32_or_in_the_precision_of_log_probs(subtests):
    for given, computed in [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ]:
        with subtests.test(given=given, computed=computed):
            tensors = {"old_log_probs": OLD, "behaviour_log_probs": BEHAVIOUR, "advantages": double([[3.0, NAN, 0.1]])}
            steps = steps_of(Truncate(), log_probs=LOG_PROBS.to(given), **tensors)
            found = [
                steps.log_probs, steps.old_log_probs, steps.sampled_log_probs, steps.advantages, steps.sampler_weights,
                steps.ratio("row"), steps.log_ratio(), steps_of(log_probs=LOG_PROBS.to(given)).advantages,
            ]  # fmt: skip
            assert {value.dtype for value in found} == {computed}
