"""How the objective treats its inputs: masked positions, precision and gradients. It never modifies them."""

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo import ObjectiveConfig, ObjectiveInputs, grpo_objective
from grpo.surrogates import SURROGATES, ClipCov, KlCov
from tests.support.objective_inputs import WITHOUT_LEVEL, objective_inputs

LEAVES = ("log_probs", "entropy", "kl", "values")
PER_STEP = (
    "log_probs", "old_log_probs", "advantages", "weights", "entropy", "entropy_weights", "ref_log_probs",
    "behaviour_log_probs", "kl", "values", "old_values", "returns",
)  # fmt: skip
SHAPE = (7, 3)
MASK = torch.tensor([[1, 1, 1], [1, 0, 1], [1, 1, 0], [0, 0, 0], [1, 0, 0], [1, 1, 1], [0, 1, 1]], dtype=torch.bool)


def tensors(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Everything that inputs can hold: padded rows, a hole, a row without steps, an unscored step, ratios on both sides."""
    random = torch.Generator().manual_seed(11)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(*SHAPE, generator=random, dtype=torch.float64).to(dtype)

    log_probs = uniform(-2.0, -0.6)
    behaviour = log_probs + uniform(-0.4, 0.4)
    behaviour[0, 1] = math.nan
    return {
        "log_probs": log_probs, "old_log_probs": log_probs + uniform(-0.5, 0.5), "behaviour_log_probs": behaviour,
        "ref_log_probs": log_probs + uniform(-0.5, 0.5), "advantages": uniform(-2.0, 2.0), "mask": MASK,
        "weights": uniform(0.1, 1.0).double(), "entropy": uniform(0.1, 1.0),
        "entropy_weights": uniform(0.1, 1.0).double(), "kl": uniform(0.0, 0.5), "values": uniform(-1.0, 1.0),
        "old_values": uniform(-1.0, 1.0), "returns": uniform(-1.0, 1.0), "keep": uniform(0.0, 1.0) < 0.8,
        "selected": uniform(0.0, 1.0) < 0.5, "kl_coef": 0.3, "entropy_coef": 0.2,
    }  # fmt: skip


EVERYTHING: dict[str, Any] = {
    "kl_estimator": "exact", "value_clip": 0.2, "sampler_correction": "truncate", "off_policy_threshold": 0.1,
}  # fmt: skip
EVERY_TERM = ObjectiveConfig(**EVERYTHING)


def inputs_with_leaves(given: dict[str, Any], names: tuple[str, ...] = LEAVES) -> ObjectiveInputs:
    leaves = {name: given[name].clone().requires_grad_() for name in names if given[name] is not None}
    return objective_inputs(**{**given, **leaves})


def evaluated(inputs: ObjectiveInputs, config: ObjectiveConfig) -> dict[str, Tensor]:
    """Loss, metrics and gradients by name."""
    output = grpo_objective(inputs, config)
    output.loss.backward()
    gradients = {f"d {name}": getattr(inputs, name).grad for name in LEAVES}
    return {"loss": output.loss.detach(), **output.metrics, **gradients}


def assert_identical(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, value in expected.items():
        if value is None:
            assert found[name] is None, name
        else:
            assert value.isfinite().all(), name
            assert torch.equal(found[name], value), name


LEVELS = [
    SURROGATES[name](level=level) for name in SURROGATES if name not in WITHOUT_LEVEL for level in ("row", "row_step")
]


@pytest.mark.parametrize("surrogate", [*(kind() for kind in SURROGATES.values()), *LEVELS])
@pytest.mark.parametrize(("poison", "flag"), [(math.nan, False), (math.inf, True)])
def test_no_surrogate_uses_what_is_outside_the_mask(surrogate, poison, flag):
    """All inputs at once, with and without the level of rows; `flag`: what `keep` and `selected` say outside the mask."""
    config, clean = ObjectiveConfig(surrogate=surrogate, **EVERYTHING), tensors()
    poisoned = {**clean, **{field: clean[field].masked_fill(~MASK, poison) for field in PER_STEP}}
    poisoned |= {field: clean[field].masked_fill(~MASK, flag) for field in ("keep", "selected")}
    found = evaluated(inputs_with_leaves(poisoned), config)
    assert_identical(found, evaluated(inputs_with_leaves(clean), config))
    assert (found["d log_probs"][MASK] != 0).any()


@pytest.mark.parametrize("surrogate", [KlCov(fraction=0.4), ClipCov(fraction=0.4, cov_low=-9.0, cov_high=9.0)])
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_no_selection_among_these_rows_uses_what_is_outside_the_mask(surrogate, poison):
    results = []
    for value in (poison, -1.0):
        given = {**tensors(), "keep": None, "selected": None}
        given |= {field: given[field].masked_fill(~MASK, value) for field in PER_STEP}
        torch.manual_seed(0)
        config = ObjectiveConfig(surrogate=surrogate, top_entropy_fraction=0.6)
        results.append(evaluated(inputs_with_leaves(given), config))
    assert_identical(*results)
    assert 0 < results[0]["selected_fraction"][1] < MASK.sum()
    assert 0 < results[0]["kept_fraction"][1] < MASK.sum()


def test_gradients_reach_parameters_that_several_inputs_share():
    """The log-probs and the entropy of one softmax: the gradient in the logits is the sum of both ways."""
    logits = torch.randn(*SHAPE, 4, dtype=torch.float64, requires_grad=True)
    log_softmax = logits.log_softmax(-1)
    given = tensors() | {"old_log_probs": None, "behaviour_log_probs": None, "keep": None}
    chosen = torch.randint(4, (*SHAPE, 1))
    given["log_probs"] = log_softmax.gather(-1, chosen).squeeze(-1)
    given["entropy"] = -(log_softmax.exp() * log_softmax).sum(-1)
    loss = grpo_objective(objective_inputs(**given), ObjectiveConfig(kl_estimator="exact", value_coef=0.0)).loss
    # ratio 1: -w A log pi, and -.2 w_H H
    weights, entropy_weights = (torch.where(MASK, given[name], 0.0) for name in ("weights", "entropy_weights"))
    plain = -(weights * given["advantages"] * given["log_probs"] + 0.2 * entropy_weights * given["entropy"]).sum()
    found, expected = (torch.autograd.grad(one, logits, retain_graph=True)[0] for one in (loss, plain))
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-15)


def test_the_loss_can_be_differentiated_twice():
    # inside the bounds -A rho, whose second derivative in log pi is -A rho again
    leaf = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1.1]], dtype=torch.float64)
    loss = grpo_objective(objective_inputs(leaf, torch.tensor([2.0]), old_log_probs=old), ObjectiveConfig()).loss
    (first,) = torch.autograd.grad(loss, leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), leaf)
    assert first.item() == pytest.approx(-2 * math.exp(0.1), rel=1e-14)
    assert second.item() == pytest.approx(-2 * math.exp(0.1), rel=1e-14)


def test_only_inputs_that_require_a_gradient_get_one():
    found = evaluated(inputs_with_leaves(tensors(), ("log_probs", "values")), EVERY_TERM)
    assert found["d entropy"] is None
    assert found["d kl"] is None
    everything = evaluated(inputs_with_leaves(tensors()), EVERY_TERM)
    assert torch.equal(found["d log_probs"], everything["d log_probs"])
    assert torch.equal(found["d values"], everything["d values"])


@pytest.mark.parametrize("name", [name for name in PER_STEP if name not in LEAVES])
def test_other_inputs_receive_no_gradient(name):
    given = tensors()
    leaf = given[name].clone().requires_grad_()
    inputs = replace(inputs_with_leaves(given), **{name: leaf})
    for config in (EVERY_TERM, replace(EVERY_TERM, kl_estimator="k3_weighted")):
        grpo_objective(inputs, config).loss.backward()
        assert leaf.grad is None


def test_under_no_grad_the_loss_is_the_same_without_a_gradient():
    inputs = inputs_with_leaves(tensors())
    with torch.no_grad():
        quiet = grpo_objective(inputs, EVERY_TERM)
    loud = grpo_objective(inputs, EVERY_TERM)
    assert not quiet.loss.requires_grad
    assert_identical({"loss": quiet.loss, **quiet.metrics}, {"loss": loud.loss.detach(), **loud.metrics})


@pytest.mark.parametrize("only", ["values", "entropy", "kl"])
def test_an_input_that_no_term_reads_may_be_the_only_one_with_a_gradient(only):
    given = tensors() | {"returns": None, "kl_coef": 0.0, "entropy_coef": 0.0}
    assert grpo_objective(inputs_with_leaves(given, (only,)), ObjectiveConfig()).loss.isfinite()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", SURROGATES)
def test_gradients_keep_their_inputs_dtype_and_the_loss_is_at_least_float32(name, dtype):
    """Half precision is raised first: the result is that of the same numbers in float32, and only gradients are rounded."""
    config, given = ObjectiveConfig(surrogate=name, **EVERYTHING), tensors(dtype)
    found = evaluated(inputs_with_leaves(given), config)
    computed = torch.float64 if dtype == torch.float64 else torch.float32
    raised = {key: given[key].to(computed) for key in PER_STEP if "weights" not in key}
    expected = evaluated(inputs_with_leaves(given | raised), config)
    assert found["loss"].dtype == expected["loss"].dtype == computed
    for key, value in expected.items():
        if key.startswith("d "):
            assert found[key].dtype == dtype
            assert torch.equal(found[key], value.to(dtype)), key
        else:
            assert torch.equal(found[key], value), key


def test_the_objective_does_not_modify_its_inputs():
    inputs = inputs_with_leaves(tensors())
    before = replace(inputs)
    evaluated(inputs, EVERY_TERM)
    evaluated(inputs, replace(EVERY_TERM, surrogate=KlCov(), kl_estimator="k3_weighted", top_entropy_fraction=0.5))
    for field in fields(inputs):
        assert getattr(inputs, field.name) is getattr(before, field.name)
    for name, value in tensors().items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(getattr(inputs, name).detach(), value, rtol=0, atol=0, equal_nan=True)
