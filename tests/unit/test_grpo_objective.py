"""The loss: hand-worked values of all terms, its errors and metrics, and how it treats its inputs."""

import math
from dataclasses import fields, replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from grpo import ConfigError, ObjectiveConfig, ObjectiveInputs, Truncate, grpo_objective
from grpo._objective.ratios import RatioLevel
from grpo.metrics import Meter
from grpo.surrogates import SURROGATES, Clip, ClipCov, Dppo, Gmpo, KlCov, Vespo
from tests.support.objective_inputs import WITHOUT_LEVEL, double, objective_inputs

KL_ESTIMATORS = ["k1", "k2", "k3", "k3_weighted"]
LOG2 = math.log(2)


def shares(inputs, config) -> dict[str, float]:
    return {name: float(moments[1]) for name, moments in grpo_objective(inputs, config).metrics.items()}


# One row of two steps. log pi = log .5, log .25; old = log .4, log .25: ratios 1.25 and 1.
#   surrogate, A = 2, bound 1.2:  -2.4, -2;                        weights .5: -2.2
#   reference .25, .5: x = log 2, -log 2; k3 = log 2 - .5, 1 - log 2: sum .5, weighted .25
#   entropy .3, .5: weighted .4
def example(**changes):
    tensors = {
        "log_probs": double([[0.5, 0.25]]).log(), "advantages": double([2]),
        "old_log_probs": double([[0.4, 0.25]]).log(), "ref_log_probs": double([[0.25, 0.5]]).log(),
        "entropy": double([[0.3, 0.5]]), "weights": double([[0.5, 0.5]]),
    }  # fmt: skip
    return objective_inputs(**{**tensors, **changes})


def test_a_loss_of_the_policy_is_weighted_as_the_steps_are():
    # weights .5: .5 * 3 + .5 * 1
    auxiliary_loss = double([[3, 1]]).requires_grad_()
    output = grpo_objective(example(auxiliary_loss=auxiliary_loss), ObjectiveConfig(kl_coef=0.0))
    assert output.metrics["auxiliary_loss"].tolist() == [0, pytest.approx(2.0), 0]
    assert output.loss.item() == pytest.approx(-2.2 + 2.0)
    output.loss.backward()
    assert auxiliary_loss.grad.tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize(("of_the_config", "of_the_inputs", "coefficient"), [
    (None, None, 0.04), (0.1, None, 0.1), (0.1, 0.3, 0.3), (0.1, 0.0, 0.0), (None, 0.3, 0.3), (0.0, 0.3, 0.3), (0.0, None, 0.0),
])  # fmt: skip
def test_coefficients_of_the_inputs_override_those_of_the_config(of_the_config, of_the_inputs, coefficient):
    """The loss is policy plus KL minus entropy, of half the coefficient. Its shares count 0, because they add up."""
    inputs = example(kl_coef=of_the_inputs, entropy_coef=coefficient / 2)
    output = grpo_objective(inputs, ObjectiveConfig(kl_coef=of_the_config, entropy_coef=0.7))
    expected = {
        "policy_loss": -2.2, "kl_penalty": coefficient * 0.25, "entropy_bonus": coefficient / 2 * 0.4,
        "total_loss": -2.2 + coefficient * (0.25 - 0.2),
    }  # fmt: skip
    if not coefficient:  # a term without a coefficient is not computed
        assert expected.pop("entropy_bonus") == 0
        assert "entropy_bonus" not in output.metrics
    for name, share in expected.items():
        assert output.metrics[name].tolist() == [0, pytest.approx(share), 0], name
    assert output.loss.item() == pytest.approx(expected["total_loss"])
    configured = shares(example(), ObjectiveConfig(kl_coef=0.0, entropy_coef=0.1))
    assert configured["entropy_bonus"] == pytest.approx(0.1 * 0.4)


def test_without_a_reference_there_is_no_kl():
    for coefficient in (None, 0.0):
        output = grpo_objective(example(ref_log_probs=None), ObjectiveConfig(kl_coef=coefficient))
        assert output.loss.item() == pytest.approx(-2.2)
        assert not {"kl", "kl_penalty"} & set(output.metrics)


EXACT = {"kl_estimator": "exact"}


@pytest.mark.parametrize(("missing", "of_the_inputs", "of_the_config", "message"), [
    ("ref_log_probs", {}, {"kl_coef": 0.1}, r"objective\.kl_coef=0\.1 needs a reference"),
    ("ref_log_probs", {"kl_coef": 0.1}, {}, r"objective\.kl_coef=0\.1 needs a reference"),
    ("ref_log_probs", {"kl_coef": 0.1}, {"kl_coef": 0.0}, r"objective\.kl_coef=0\.1 needs a reference"),
    ("kl", {}, {"kl_coef": 0.1, **EXACT}, r"kl_coef=0\.1 with kl_estimator='exact' needs the KL itself"),
    ("kl", {"kl_coef": 0.3}, EXACT, r"kl_coef=0\.3 with kl_estimator='exact' needs the KL itself"),
    ("entropy", {}, {"entropy_coef": 0.01}, r"objective\.entropy_coef=0\.01 needs an exact entropy"),
    ("entropy", {"entropy_coef": 0.3}, {}, r"entropy_coef=.* needs an exact entropy"),
])  # fmt: skip
def test_a_term_without_its_inputs_is_an_error(missing, of_the_inputs, of_the_config, message):
    inputs = example(**{missing: None}, **of_the_inputs)
    with pytest.raises(ConfigError, match=message):
        grpo_objective(inputs, ObjectiveConfig(**of_the_config))


def test_without_a_bonus_a_missing_entropy_is_only_estimated_for_the_report():
    output = grpo_objective(example(entropy=None), ObjectiveConfig(kl_coef=0.0))
    assert output.loss.item() == pytest.approx(-2.2)
    # -rho log pi: 1.25 log 2, and log 4
    assert output.metrics["entropy"][1].item() == pytest.approx(1.25 * LOG2 + 2 * LOG2)


@pytest.mark.parametrize("entropy", [None, double([[9.0, 9.0]])])
def test_the_score_function_estimate_needs_no_entropy_and_reads_none(entropy):
    config = ObjectiveConfig(kl_coef=0.0, entropy_coef=0.1, entropy_estimator="score_function")
    assert shares(example(entropy=entropy), config)["entropy_bonus"] == pytest.approx(0.1 * 0.5 * 3.25 * LOG2)


def test_clip_fractions_count_steps_whose_gradient_was_cut():
    # ratio .5 and 1.5 against bounds .8 and 1.2, either sign, and one inside: cut are (.5, A < 0) and (1.5, A > 0) twice
    ratios, advantages = double([[0.5, 0.5, 1.5, 1.5, 1.5, 1.0]]), double([[-1.0, 1.0, 1.0, -1.0, 2.0, 1.0]])
    inputs = objective_inputs(ratios.log(), advantages, old_log_probs=torch.zeros(1, 6))
    metrics = grpo_objective(inputs, ObjectiveConfig()).metrics
    assert metrics["clip_fraction"].tolist() == [6, 3, 3]
    assert metrics["clip_fraction_low"].tolist() == [6, 1, 1]
    assert metrics["clip_fraction_high"].tolist() == [6, 2, 2]


def test_metrics_count_valid_steps_only():
    # valid: ratios 2, 1, .5 with A = 1, 1, -1;  x = log 2, 0, -log 2 (reference as old), so that
    # k3 = .5 + log 2 - 1, 0, 2 - log 2 - 1;  entropy .5, 1, 2
    mask, old = torch.tensor([[True, True], [True, False]]), double([[0.0, 0.0], [0.0, 5.0]])
    others = {"old_log_probs": old, "ref_log_probs": old, "entropy": double([[0.5, 1.0], [2.0, 9.0]])}
    log_probs = double([[2.0, 1.0], [0.5, 7.0]]).log()
    inputs = objective_inputs(log_probs, double([1, -1]), **others, mask=mask, weights=mask / 3)
    report = {name: moments.tolist() for name, moments in grpo_objective(inputs, ObjectiveConfig()).metrics.items()}
    assert report["ratio"] == pytest.approx([3, 3.5, 4 + 1 + 0.25])
    assert report["entropy"] == pytest.approx([3, 3.5, 0.25 + 1 + 4])
    assert report["kl"] == pytest.approx([3, 0.5, (LOG2 - 0.5) ** 2 + (1 - LOG2) ** 2])
    assert report["clip_fraction"] == [3, 2, 2]


@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_the_reported_kl_is_k3_whatever_the_estimator(estimator):
    # log 2 - .5 and 1 - log 2
    kl = grpo_objective(example(), ObjectiveConfig(kl_coef=1.0, kl_estimator=estimator)).metrics["kl"]
    assert kl.tolist() == pytest.approx([2, 0.5, (LOG2 - 0.5) ** 2 + (1 - LOG2) ** 2])


def test_metrics_carry_no_gradient():
    log_probs = double([[-1.0, -2.0]]).requires_grad_()
    output = grpo_objective(objective_inputs(log_probs, double([1])), ObjectiveConfig())
    assert output.loss.requires_grad
    assert not any(moments.requires_grad for moments in output.metrics.values())


EXTREMES = [s * d for d in (0.0, 1.0, 19.5, 20.5, 88.0, 89.0, 700.0, 710.0, 1e4) for s in (1.0, -1.0)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("estimator", KL_ESTIMATORS)
def test_extreme_ratios_stay_finite(estimator, dtype):
    difference = torch.tensor(EXTREMES, dtype=dtype).repeat(2).unsqueeze(1)
    advantages = torch.tensor([1.0, -1.0], dtype=dtype).repeat_interleave(len(EXTREMES))
    config = ObjectiveConfig(
        surrogate=Clip(low=1.0, high=1e9), kl_coef=0.1, kl_estimator=estimator, entropy_coef=0.1,
        entropy_estimator="score_function",
    )  # fmt: skip
    for current, old in [(difference, 0 * difference), (0 * difference, difference)]:
        leaf = current.clone().requires_grad_()
        output = grpo_objective(objective_inputs(leaf, advantages, old_log_probs=old, ref_log_probs=old), config)
        output.loss.backward()
        assert all(value.isfinite().all() for value in (output.loss, leaf.grad, *output.metrics.values()))
        # beyond 20: 20.5, 88, 89, 700, 710, 1e4, two signs, two advantages
        assert output.metrics["ratio_clamped_fraction"].tolist() == [36, 24, 24]


class CountsTransfers(TorchDispatchMode):
    """Counts the operations that make the host wait for a device: a number read out of a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.num_transfers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.num_transfers += "_local_scalar_dense" in str(function)
        return function(*args, **(kwargs or {}))


def test_reading_all_metrics_waits_for_the_device_once():
    inputs = objective_inputs(
        torch.zeros(4, 3), torch.ones(4), old_log_probs=torch.zeros(4, 3), ref_log_probs=torch.zeros(4, 3)
    )
    config = ObjectiveConfig(kl_coef=0.1, entropy_coef=0.1, entropy_estimator="score_function")
    metrics = grpo_objective(inputs, config).metrics
    assert len(metrics) == 11  # four loss terms, KL, entropy, ratio, four fractions
    reads: list[tuple[int, ...]] = []
    meter, plain_tolist = Meter(), torch.Tensor.tolist
    meter.add(metrics)
    meter.add(metrics)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "tolist", lambda self: reads.append(tuple(self.shape)) or plain_tolist(self))
        with CountsTransfers() as counted:
            float(torch.ones(()))
            assert counted.num_transfers == 1, "the counter does not count"
            meter.report(num_updates=1)
    assert reads == [(22, 3)]  # both micro-batches, all metrics, in one piece
    assert counted.num_transfers == 1  # and none one by one


WITH_LEVEL = [SURROGATES[name](level="row") for name in SURROGATES if name not in WITHOUT_LEVEL]


def refuse(*args, **kwargs):
    raise AssertionError("numbers of the host are copied to the device, which waits for the device")


@pytest.mark.parametrize("surrogate", [*WITH_LEVEL, *(kind() for kind in SURROGATES.values())])
@pytest.mark.parametrize("with_old", [False, True])
def test_the_objective_never_waits_for_a_device(surrogate, with_old, monkeypatch):
    """Tensors on the meta device have no numbers: reading one raises an error. Numbers are not copied to it either."""
    with pytest.raises(RuntimeError):
        torch.zeros((), device="meta").item()
    like = torch.zeros(4, 3, device="meta")
    for owner, name in ((torch, "tensor"), (torch, "as_tensor"), (torch, "from_numpy"), (torch.Tensor, "new_tensor")):
        monkeypatch.setattr(owner, name, refuse)
    leaf = like.clone().requires_grad_()
    inputs = objective_inputs(
        leaf, like[:, 0], mask=like.bool(), weights=like.double(), old_log_probs=like if with_old else None,
        ref_log_probs=like, behaviour_log_probs=like, values=like.clone().requires_grad_(), old_values=like, returns=like,
        keep=like.bool(), selected=like.bool(),
    )  # fmt: skip
    config = ObjectiveConfig(
        surrogate=surrogate, kl_coef=0.1, kl_estimator="k3_weighted", entropy_coef=0.1, entropy_estimator="score_function",
        value_clip=0.2, sampler_correction="truncate", off_policy_threshold=0.1,
    )  # fmt: skip
    output = grpo_objective(inputs, config)
    output.loss.backward()
    assert leaf.grad.shape == (4, 3)
    assert all(moments.is_meta for moments in output.metrics.values())


# log-ratios .1 and .2, and -.4; what is outside the mask does not count
MOVED_MASK = torch.tensor([[True, True, False], [True, False, False]])
MOVED = {"advantages": double([1.0, -1.0]), "mask": MOVED_MASK}
MOVED["log_probs"] = double([[0.1, 0.2, 0.5], [-0.4, 9.0, 9.0]]) - 1
MOVED["old_log_probs"] = torch.full((2, 3), -1.0, dtype=torch.float64)


@pytest.mark.parametrize(("surrogate", "log_ratios"), [
    (Clip(), [0.1, 0.2, -0.4]),
    (Clip(level="row"), [0.15, 0.15, -0.4]),
    (Clip(level="row_sum"), [0.3, 0.3, -0.4]),
    (Clip(level="row_step"), [0.15, 0.15, -0.4]),
    (Clip(level="none"), [0.0, 0.0, 0.0]),
    (Vespo(), [0.1, 0.2, -0.4]),  # without a level: the steps'
    (Gmpo(), [0.1, 0.2, -0.4]),
])  # fmt: skip
def test_the_reported_ratio_is_at_the_level_of_the_surrogate(surrogate, log_ratios):
    metrics = grpo_objective(objective_inputs(**MOVED), ObjectiveConfig(surrogate=surrogate)).metrics
    ratios = [math.exp(x) for x in log_ratios]
    assert metrics["ratio"].tolist() == pytest.approx([3, sum(ratios), sum(r * r for r in ratios)], rel=1e-13)


@pytest.mark.parametrize("level", get_args(RatioLevel))
def test_the_clamped_fraction_is_measured_at_the_level_of_the_surrogate(level):
    # each step by 12 and 12, -12 and -12: only their sums, 24 and -24, are clamped
    old = double([[12.0, 12.0], [-12.0, -12.0], [1.0, 1.0]])
    inputs = objective_inputs(torch.zeros(3, 2, dtype=torch.float64), double([1.0] * 3), old_log_probs=old)
    metrics = grpo_objective(inputs, ObjectiveConfig(surrogate=Clip(level=level))).metrics
    count = 4 if level == "row_sum" else 0
    assert metrics["ratio_clamped_fraction"].tolist() == [6, count, count]
    inputs = objective_inputs(double([[0.0, 0.0]]), double([1.0]), old_log_probs=double([[20.0, -20.0]]))
    metrics = grpo_objective(inputs, ObjectiveConfig()).metrics
    assert metrics["ratio_clamped_fraction"].tolist() == [2, 0, 0]  # exactly 20


@pytest.mark.parametrize("surrogate", [Clip(low=0.0, high=0.0), Dppo()])
def test_without_old_log_probs_the_ratio_is_1_and_nothing_is_clipped(surrogate):
    inputs = objective_inputs(double([[-1.0, -2.0]]), double([1.0]), mask=torch.tensor([[True, False]]))
    metrics = grpo_objective(inputs, ObjectiveConfig(surrogate=surrogate)).metrics
    assert metrics["ratio"].tolist() == [1, 1, 1]
    for name in ("ratio_clamped_fraction", "clip_fraction", "clip_fraction_low", "clip_fraction_high"):
        assert metrics[name].tolist() == [1, 0, 0], name


def test_the_sampled_entropy_uses_the_step_ratio_at_every_level():
    # -rho log pi with rho of the step: e^.1 * .9 + e^.2 * .8 + e^-.4 * 1.4
    config = ObjectiveConfig(surrogate=Clip(level="row_sum"), entropy_coef=1.0, entropy_estimator="score_function")
    metrics = grpo_objective(objective_inputs(**MOVED), config).metrics
    expected = math.exp(0.1) * 0.9 + math.exp(0.2) * 0.8 + math.exp(-0.4) * 1.4
    assert metrics["entropy_bonus"][1].item() == metrics["entropy"][1].item() == pytest.approx(expected, rel=1e-13)


# The terms of the loss other than the surrogate: the exact KL, the critic's error, and which steps count in which term


NAN = math.nan


# One row of two steps and a hole, on policy, A = 0 unless said otherwise: only the other terms are left. Weights .5, .25.
HOLE = torch.tensor([[True, False, True]])
WEIGHTS = double([[0.5, 0.0, 0.25]])


def on_policy(**changes) -> ObjectiveInputs:
    tensors = {"log_probs": double([[-1.0, NAN, -2.0]]), "advantages": double([0.0]), "mask": HOLE, "weights": WEIGHTS}
    return objective_inputs(**{**tensors, **changes})


EXACT_KL = ObjectiveConfig(kl_estimator="exact", kl_coef=0.1)


KL = double([[0.6, NAN, 0.2]])


def test_the_exact_kl_is_weighted_and_has_its_gradient():
    # .1 (.5 * .6 + .25 * .2) = .035;  d/d kl = .1 w
    kl = KL.clone().requires_grad_()
    output = grpo_objective(on_policy(kl=kl), EXACT_KL)
    assert output.loss.item() == pytest.approx(0.035, rel=1e-14)
    assert output.metrics["kl_penalty"].tolist() == [0, pytest.approx(0.035), 0]
    # reported unweighted, over the valid steps: .6 + .2, .36 + .04
    assert output.metrics["kl"].tolist() == [2, pytest.approx(0.8), pytest.approx(0.4)]
    assert torch.autograd.grad(output.loss, kl)[0].tolist() == [pytest.approx([0.05, 0, 0.025], rel=1e-14)]


def test_the_exact_kl_reads_neither_log_probs_nor_reference_and_other_estimators_do_not_read_it():
    log_probs = double([[-1.0, NAN, -2.0]]).requires_grad_()
    output = grpo_objective(on_policy(log_probs=log_probs, kl=KL, ref_log_probs=double([[-9.0, NAN, 3.0]])), EXACT_KL)
    assert output.loss.item() == pytest.approx(0.035, rel=1e-14)
    assert torch.autograd.grad(output.loss, log_probs)[0].tolist() == [[0, 0, 0]]
    # k3 at pi = ref is 0
    inputs = on_policy(kl=KL, ref_log_probs=double([[-1.0, NAN, -2.0]]))
    assert shares(inputs, ObjectiveConfig(kl_coef=0.1))["kl_penalty"] == 0


def test_without_a_coefficient_the_exact_kl_is_only_reported():
    config = ObjectiveConfig(kl_estimator="exact", kl_coef=0.0)
    output = grpo_objective(on_policy(kl=KL), config)
    assert output.loss.item() == 0
    assert output.metrics["kl"].tolist() == [2, pytest.approx(0.8), pytest.approx(0.4)]
    assert "kl" not in grpo_objective(on_policy(), config).metrics


# A critic. v = 1, 3; R = 2, -1: errors 1 and 16; weighted .5 + 4 = 4.5, times .5: 2.25.  d/dv = .5 w 2 (v - R)
VALUES, RETURNS = double([[1.0, NAN, 3.0]]), double([[2.0, NAN, -1.0]])


def test_the_value_loss_equals_a_hand_worked_squared_error():
    values = VALUES.clone().requires_grad_()
    output = grpo_objective(on_policy(values=values, returns=RETURNS), ObjectiveConfig())
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
    output = grpo_objective(on_policy(**given), ObjectiveConfig(**config))
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


# All terms at once. A = 2, on policy: gradient -2 w;  kl .6 .2, coefficient .1;  entropy .3 .5, .01;  values as above.
#   policy -2 (.5 + .25) = -1.5;  kl .035;  entropy .01 (.15 + .125) = .00275;  value 2.25
def everything(**changes) -> ObjectiveInputs:
    leaves = {
        "log_probs": double([[-1.0, NAN, -2.0]]), "kl": double([[0.6, NAN, 0.2]]), "entropy": double([[0.3, NAN, 0.5]]),
        "values": VALUES.clone(),
    }  # fmt: skip
    for leaf in leaves.values():
        leaf.requires_grad_()
    return on_policy(advantages=double([2.0]), returns=RETURNS, **leaves, **changes)


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
        on_policy(log_probs=log_probs, behaviour_log_probs=behaviour, entropy_weights=weights), config
    )
    # -log pi is 1 and 2: .1 (.5 u1 1 + .25 u2 2)
    expected = 0.1 * (0.5 * first + 0.25 * second * 2)
    assert output.loss.item() == pytest.approx(-expected, rel=1e-12)
    # d(-u rho sg(log pi)) / d log pi = -u log pi at rho = 1
    gradient = torch.autograd.grad(output.loss, log_probs)[0]
    assert gradient.tolist() == [pytest.approx([-0.1 * 0.5 * first, 0.0, -0.1 * 0.25 * second * 2], rel=1e-12)]
    plain = replace(config, sampler_correction="none")
    output = grpo_objective(on_policy(behaviour_log_probs=behaviour, entropy_weights=weights), plain)
    assert output.loss.item() == pytest.approx(-0.1 * (0.5 + 0.25 * 2), rel=1e-12)


# How the objective treats its inputs: masked positions, precision and gradients. It never modifies them


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


@pytest.mark.parametrize("poison", [1e9, math.nan])
def test_what_a_users_surrogate_or_correction_returns_outside_the_mask_never_counts(poison):
    def own(value: float) -> ObjectiveConfig:
        return ObjectiveConfig(
            surrogate=lambda steps: torch.where(steps.mask, -steps.ratio() * steps.advantages, value),
            sampler_correction=lambda old, behaviour, mask: torch.where(mask, 0.5, value).double(),
        )

    found, clean = (evaluated(inputs_with_leaves(tensors()), own(value)) for value in (poison, 0.0))
    assert_identical(found, clean)


def test_the_loss_can_be_differentiated_twice():
    # inside the bounds -A rho, whose second derivative in log pi is -A rho again
    leaf = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([[-1.1]], dtype=torch.float64)
    loss = grpo_objective(objective_inputs(leaf, torch.tensor([2.0]), old_log_probs=old), ObjectiveConfig()).loss
    (first,) = torch.autograd.grad(loss, leaf, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), leaf)
    assert first.item() == pytest.approx(-2 * math.exp(0.1), rel=1e-14)
    assert second.item() == pytest.approx(-2 * math.exp(0.1), rel=1e-14)


@pytest.mark.parametrize("name", [name for name in PER_STEP if name not in LEAVES])
def test_other_inputs_receive_no_gradient(name):
    given = tensors()
    leaf = given[name].clone().requires_grad_()
    inputs = replace(inputs_with_leaves(given), **{name: leaf})
    for config in (EVERY_TERM, replace(EVERY_TERM, kl_estimator="k3_weighted")):
        grpo_objective(inputs, config).loss.backward()
        assert leaf.grad is None


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
