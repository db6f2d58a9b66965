"""Adaptive coefficients: both rules for the KL, the rule for the entropy, and their saved state."""

import json
import math

import pytest

from grpo import ConfigError, EntropyControl, GRPOConfig, KLControl, ObjectiveConfig
from grpo._updating.coefficients import Coefficients, next_entropy_coef, next_kl_coef

THRESHOLD = KLControl(target=0.25, coef_min=0.01, coef_max=1.0)


PROPORTIONAL = KLControl(rule="proportional", target=0.25, gain=0.5, coef_min=0.01, coef_max=1.0)


@pytest.mark.parametrize(
    ("control", "kl", "coef"),
    [
        (THRESHOLD, 0.5, 0.3),  # above 1.5 * .25 = .375: .2 * 1.5
        (THRESHOLD, 0.376, 0.3),
        (THRESHOLD, 0.375, 0.2),  # at the upper threshold: stays
        (THRESHOLD, 0.25, 0.2),
        (THRESHOLD, 0.125, 0.2),  # at the lower: stays
        (THRESHOLD, 0.124, 0.2 / 1.5),
        (THRESHOLD, 0.0, 0.2 / 1.5),
        (PROPORTIONAL, 0.25, 0.2),
        (PROPORTIONAL, 0.275, 0.2 * 1.05),  # error .1, gain .5
        (PROPORTIONAL, 0.225, 0.2 * 0.95),
        (PROPORTIONAL, 0.3, 0.2 * 1.1),  # error .2: where it is cut
        (PROPORTIONAL, 0.3001, 0.2 * 1.1),
        (PROPORTIONAL, 50.0, 0.2 * 1.1),
        (PROPORTIONAL, 0.2, 0.2 * 0.9),
        (PROPORTIONAL, 0.0, 0.2 * 0.9),
    ],
)
def test_both_rules_equal_hand_worked_coefficients(control, kl, coef):
    assert next_kl_coef(0.2, kl, control) == pytest.approx(coef, rel=1e-15 if control is THRESHOLD else 1e-12, abs=0)


@pytest.mark.parametrize("control", [THRESHOLD, PROPORTIONAL])
def test_the_kl_coefficient_stays_between_its_bounds(control):
    assert (next_kl_coef(0.95, 9.0, control), next_kl_coef(1.0, 9.0, control)) == (1.0, 1.0)
    assert (next_kl_coef(0.0101, 0.0, control), next_kl_coef(0.01, 0.0, control)) == (0.01, 0.01)
    # one that starts outside is brought in, even on target
    assert (next_kl_coef(5.0, 0.25, control), next_kl_coef(0.0, 0.25, control)) == (1.0, 0.01)


def test_a_kl_that_stays_high_or_low_moves_the_coefficient_in_every_step():
    coef, path = 0.2, []
    for kl in (1.0, 1.0, 0.25, 0.0, 0.0):
        coef = next_kl_coef(coef, kl, THRESHOLD)
        path.append(coef)
    assert path == pytest.approx([0.3, 0.45, 0.45, 0.3, 0.2])


ENTROPY = EntropyControl(target=0.5, delta=0.25, coef_min=0.125, coef_max=1.0)


@pytest.mark.parametrize(
    ("coef", "entropy", "following"),
    [
        (0.5, 0.1, 0.75),  # below the target: + .25
        (0.5, 0.5, 0.75),  # at the target, too
        (0.5, 0.501, 0.25),  # above: - .25
        (0.9, 0.1, 1.0),
        (0.25, 9.0, 0.125),
    ],
)
def test_the_entropy_rule_equals_hand_worked_coefficients(coef, entropy, following):
    assert next_entropy_coef(coef, entropy, ENTROPY) == following


def coefficients(*, kl_coef=0.2, entropy_coef=0.5, **changes) -> Coefficients:
    controls = {"kl_control": THRESHOLD, "entropy_control": ENTROPY, **changes}
    return Coefficients(GRPOConfig(objective=ObjectiveConfig(entropy_coef=entropy_coef), **controls), kl_coef)


@pytest.mark.parametrize(
    "outside", [{"kl_coef": 0.005}, {"kl_coef": 1.5}, {"entropy_coef": 0.0}, {"entropy_coef": 2.0}]
)
def test_a_first_coefficient_outside_its_bounds_is_refused(outside):
    ((name, value),) = outside.items()
    with pytest.raises(ConfigError, match=rf"objective\.{name}={value}"):
        coefficients(**outside)


def test_coefficients_start_as_configured_and_follow_what_is_measured():
    current = coefficients()
    assert (current.kl_coef, current.entropy_coef) == (0.2, 0.5)
    current.follow({"kl": (0.5, 9.0), "entropy": (0.25, 9.0)})  # means; the deviations say nothing
    assert (current.kl_coef, current.entropy_coef) == (pytest.approx(0.3), 0.75)


def test_the_entropy_bonus_is_0_while_the_entropy_is_above_its_target():
    current, seen = coefficients(), []
    # .75 .5 .25 | .5: the coefficient goes down and up behind the gate
    for entropy in (0.4, 0.6, 0.6, 0.4):
        current.follow({"entropy": (entropy, 0.0)})
        seen.append(current.entropy_coef)
    assert seen == [0.75, 0.0, 0.0, 0.5]


def test_without_a_measurement_or_a_control_a_coefficient_stays_constant():
    current = coefficients()
    for measured in ({}, {"kl": (math.nan, 0.0), "entropy": (math.inf, 0.0)}, {"reward": (3.0, 0.0)}):
        current.follow(measured)
        assert (current.kl_coef, current.entropy_coef) == (0.2, 0.5)
    current = coefficients(kl_control=None, entropy_control=None)
    current.follow({"kl": (9.0, 0.0), "entropy": (9.0, 0.0)})
    assert (current.kl_coef, current.entropy_coef) == (0.2, 0.5)


@pytest.mark.parametrize(
    ("kl_coef", "entropy_coef", "entropy_control", "may_be_positive"),
    [(0.0, 0.0, None, False), (0.1, 0.0, None, True), (0.0, 0.1, None, True), (0.0, 0.0, EntropyControl(), True)],
)
def test_coefficients_may_be_positive_if_set_or_controlled(kl_coef, entropy_coef, entropy_control, may_be_positive):
    current = coefficients(kl_coef=kl_coef, entropy_coef=entropy_coef, kl_control=None, entropy_control=entropy_control)
    assert current.may_be_positive == may_be_positive


def test_a_bonus_of_0_under_a_control_may_become_positive():
    current = coefficients(kl_coef=0.0, kl_control=None)
    current.follow({"entropy": (9.0, 0.0)})
    assert (current.entropy_coef, current.may_be_positive) == (0.0, True)


@pytest.mark.parametrize("entropy", [0.4, 0.6])
def test_adapted_coefficients_survive_saving_and_loading(entropy):
    first, second = coefficients(), coefficients(kl_coef=0.9, entropy_coef=0.9)
    first.follow({"kl": (0.5, 0.0), "entropy": (entropy, 0.0)})
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for _ in range(2):
        assert (second.kl_coef, second.entropy_coef) == (first.kl_coef, first.entropy_coef)
        for current in (first, second):
            current.follow({"kl": (0.0, 0.0), "entropy": (0.3, 0.0)})
