"""Hand-worked values of the loss, its errors and its metrics."""

import math
from typing import get_args

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from grpo import ConfigError, ObjectiveConfig, grpo_objective
from grpo._objective.ratios import RatioLevel
from grpo.metrics import Meter
from grpo.surrogates import SURROGATES, Clip, Dppo, Gmpo, Vespo
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


def test_total_is_policy_plus_kl_minus_entropy():
    output = grpo_objective(example(), ObjectiveConfig(kl_coef=0.1, entropy_coef=0.01))
    assert output.loss.item() == pytest.approx(-2.2 + 0.1 * 0.25 - 0.01 * 0.4)
    parts = {"policy_loss": -2.2, "kl_penalty": 0.025, "entropy_bonus": 0.004, "total_loss": -2.179}
    for name, share in parts.items():  # a share of the loss counts 0: shares add up
        assert output.metrics[name].tolist() == [0, pytest.approx(share), 0]


def test_a_loss_of_the_policy_is_weighted_as_the_steps_are():
    # weights .5: .5 * 3 + .5 * 1
    auxiliary_loss = double([[3, 1]]).requires_grad_()
    output = grpo_objective(example(auxiliary_loss=auxiliary_loss), ObjectiveConfig(kl_coef=0.0))
    assert output.metrics["auxiliary_loss"].tolist() == [0, pytest.approx(2.0), 0]
    assert output.loss.item() == pytest.approx(-2.2 + 2.0)
    output.loss.backward()
    assert auxiliary_loss.grad.tolist() == [[0.5, 0.5]]


def test_the_gradient_of_surrogate_and_kl_equals_hand_worked_values():
    # surrogate: step 0 is past its bound: 0; step 1: -w A rho = -1
    # k3: d/dlog pi = 1 - exp(-x) = .5, -1; weighted .25, -.5; times .1
    inputs = example(log_probs=double([[0.5, 0.25]]).log().requires_grad_())
    grpo_objective(inputs, ObjectiveConfig(kl_coef=0.1)).loss.backward()
    assert inputs.log_probs.grad.tolist() == [pytest.approx([0.025, -1.05])]


@pytest.mark.parametrize(("of_the_config", "of_the_inputs", "coefficient"), [
    (None, None, 0.04), (0.1, None, 0.1), (0.1, 0.3, 0.3), (0.1, 0.0, 0.0), (None, 0.3, 0.3), (0.0, None, 0.0),
])  # fmt: skip
def test_the_kl_coefficient_of_the_inputs_overrides_that_of_the_config(of_the_config, of_the_inputs, coefficient):
    penalty = shares(example(kl_coef=of_the_inputs), ObjectiveConfig(kl_coef=of_the_config))["kl_penalty"]
    assert penalty == pytest.approx(coefficient * 0.25)


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
