"""Adaptive coefficients: both rules for the KL, the rule for the entropy, and their saved state."""

import json
import math

import pytest

from grpo import ConfigError, EntropyControl, GRPOConfig, KLControl, ObjectiveConfig
from grpo._updating.coefficients import Coefficients, next_entropy_coef, next_kl_coef

THRESHOLD = KLControl(target=0.25, coef_min=0.01, coef_max=1.0)


def test_the_threshold_rule_equals_hand_worked_coefficients(subtests):
    for kl, coef in [
        (0.5, 0.3),  # above 1.5 * .25 = .375: .2 * 1.5
        (0.376, 0.3),
        (0.375, 0.2),  # at the upper threshold: stays
        (0.25, 0.2),
        (0.125, 0.2),  # at the lower: stays
        (0.124, 0.2 / 1.5),
        (0.0, 0.2 / 1.5),
    ]:
        with subtests.test(kl=kl, coef=coef):
            assert next_kl_coef(0.2, kl, THRESHOLD) == pytest.approx(coef, rel=1e-15)


PROPORTIONAL = KLControl(rule="proportional", target=0.25, gain=0.5, coef_min=0.01, coef_max=1.0)


def test_the_proportional_rule_equals_hand_worked_coefficients(subtests):
    for kl, coef in [
        (0.25, 0.2),
        (0.275, 0.2 * 1.05),  # error .1, gain .5
        (0.225, 0.2 * 0.95),
        (0.3, 0.2 * 1.1),  # error .2: where it is cut
        (0.3001, 0.2 * 1.1),
        (50.0, 0.2 * 1.1),
        (0.2, 0.2 * 0.9),
        (0.0, 0.2 * 0.9),
    ]:
        with subtests.test(kl=kl, coef=coef):
            assert next_kl_coef(0.2, kl, PROPORTIONAL) == pytest.approx(coef, rel=1e-12)


def test_the_kl_coefficient_stays_between_its_bounds(subtests):
    for control in [THRESHOLD, PROPORTIONAL]:
        with subtests.test(control=control):
            assert next_kl_coef(0.95, 9.0, control) == 1.0
            assert next_kl_coef(1.0, 9.0, control) == 1.0
            assert next_kl_coef(0.0101, 0.0, control) == 0.01
            assert next_kl_coef(0.01, 0.0, control) == 0.01
            # one that starts outside is brought in, even on target
            assert next_kl_coef(5.0, 0.25, control) == 1.0
            assert next_kl_coef(0.0, 0.25, control) == 0.01


def test_a_kl_that_stays_high_or_low_moves_the_coefficient_in_every_step():
    coef, path = 0.2, []
    for kl in (1.0, 1.0, 0.25, 0.0, 0.0):
        coef = next_kl_coef(coef, kl, THRESHOLD)
        path.append(coef)
    assert path == pytest.approx([0.3, 0.45, 0.45, 0.3, 0.2])


ENTROPY = EntropyControl(target=0.5, delta=0.25, coef_min=0.125, coef_max=1.0)


def test_the_entropy_rule_equals_hand_worked_coefficients(subtests):
    for coef, entropy, following in [
        (0.5, 0.1, 0.75),  # below the target: + .25
        (0.5, 0.5, 0.75),  # at the target, too
        (0.5, 0.501, 0.25),  # above: - .25
        (0.9, 0.1, 1.0),
        (0.25, 9.0, 0.125),
    ]:
        with subtests.test(coef=coef, entropy=entropy, following=following):
            assert next_entropy_coef(coef, entropy, ENTROPY) == following


def coefficients(*, kl_coef=0.2, entropy_coef=0.5, **changes) -> Coefficients:
    controls = {"kl_control": THRESHOLD, "entropy_control": ENTROPY, **changes}
    return Coefficients(GRPOConfig(objective=ObjectiveConfig(entropy_coef=entropy_coef), **controls), kl_coef)


def test_a_first_coefficient_outside_its_bounds_is_refused(subtests):
    for outside in [{"kl_coef": 0.005}, {"kl_coef": 1.5}, {"entropy_coef": 0.0}, {"entropy_coef": 2.0}]:
        with subtests.test(outside=outside):
            ((name, value),) = outside.items()
            with pytest.raises(ConfigError, match=rf"objective\.{name}={value}"):
                coefficients(**outside)


def test_coefficients_start_as_configured_and_follow_what_is_measured():
    current = coefficients()
    assert (current.kl_coef, current.entropy_coef) == (0.2, 0.5)
    current.follow({"kl": (0.5, 9.0), "entropy": (0.25, 9.0)})  # means; the deviations say nothing
    assert current.kl_coef == pytest.approx(0.3)
    assert current.entropy_coef == 0.75


def test_the_entropy_bonus_is_0_while_the_entropy_is_above_its_target():
    current = coefficients()
    seen = []
    # .75 .5 .25 | .5: the coefficient goes down and up behind the gate
    for entropy in (0.4, 0.6, 0.6, 0.4):
        current.follow({"entropy": (entropy, 0.0)})
        seen.append(current.entropy_coef)
    assert seen == [0.75, 0.0, 0.0, 0.5]


def test_a_metric_that_was_not_measured_changes_no_coefficient():
    current = coefficients()
    for measured in ({}, {"kl": (math.nan, 0.0), "entropy": (math.inf, 0.0)}, {"reward": (3.0, 0.0)}):
        current.follow(measured)
        assert (current.kl_coef, current.entropy_coef) == (0.2, 0.5)


def test_without_a_control_a_coefficient_stays_constant():
    current = coefficients(kl_control=None, entropy_control=None)
    current.follow({"kl": (9.0, 0.0), "entropy": (9.0, 0.0)})
    assert (current.kl_coef, current.entropy_coef) == (0.2, 0.5)


def test_coefficients_may_be_positive_if_set_or_controlled(subtests):
    for kl_coef, entropy_coef, entropy_control, may_be_positive in [
        (0.0, 0.0, None, False),
        (0.1, 0.0, None, True),
        (0.0, 0.1, None, True),
        (0.0, 0.0, EntropyControl(), True),
    ]:
        with subtests.test(
            kl_coef=kl_coef, entropy_coef=entropy_coef, entropy_control=entropy_control, may_be_positive=may_be_positive
        ):
            current = coefficients(
                kl_coef=kl_coef, entropy_coef=entropy_coef, kl_control=None, entropy_control=entropy_control
            )
            assert current.may_be_positive == may_be_positive


def test_a_bonus_of_0_under_a_control_may_become_positive():
    current = coefficients(kl_coef=0.0, kl_control=None)
    current.follow({"entropy": (9.0, 0.0)})
    assert current.entropy_coef == 0.0
    assert current.may_be_positive


def test_adapted_coefficients_survive_saving_and_loading(subtests):
    for entropy in [0.4, 0.6]:
        with subtests.test(entropy=entropy):
            first, second = coefficients(), coefficients(kl_coef=0.9, entropy_coef=0.9)
            first.follow({"kl": (0.5, 0.0), "entropy": (entropy, 0.0)})
            second.load_state_dict(json.loads(json.dumps(first.state_dict())))
            for _ in range(2):
                assert (second.kl_coef, second.entropy_coef) == (first.kl_coef, first.entropy_coef)
                for current in (first, second):
                    current.follow({"kl": (0.0, 0.0), "entropy": (0.3, 0.0)})
