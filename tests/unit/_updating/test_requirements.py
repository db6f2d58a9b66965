"""What settings require of the trainer's arguments, which combinations are refused, and coefficients that adapt."""

import copy
import json
import math
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo import (
    AdvantageConfig,
    ConfigError,
    ContractError,
    EntropyControl,
    GRPOConfig,
    GRPOWarning,
    KLControl,
    Mask,
    ObjectiveConfig,
    Truncate,
)
from grpo._updating.coefficients import Coefficients, next_entropy_coef, next_kl_coef
from grpo._updating.requirements import (
    first_kl_coef,
    require_consistent,
    require_discrete,
    require_probabilities,
    require_reference,
    required_scores,
)
from grpo.engine import OneProcess
from grpo.surrogates import Clip, Dppo, Gmpo, Vespo
from tests.support.policies import EpisodePolicy, TablePolicy


def check(config: GRPOConfig, policy: Any = None, **arguments: Any) -> None:
    given = {"lr_scheduler": None, "objective": None, "advantages": None, **arguments}
    require_consistent(config, TablePolicy() if policy is None else policy, OneProcess(), is_alone=False, **given)


def of_objective(**settings: Any) -> GRPOConfig:
    return GRPOConfig(objective=ObjectiveConfig(**settings))


@pytest.mark.parametrize(
    "settings",
    [
        *({"surrogate": Clip(level=level)} for level in ("row", "row_sum", "row_step")),
        {"surrogate": Gmpo()},
        {"surrogate": Vespo()},
        {"sampler_correction": Truncate(level="row")},
        {"sampler_correction": Mask(level="row")},
        {"off_policy_threshold": 0.1},
    ],
)
def test_a_loss_that_needs_whole_rows_is_refused_if_the_policy_splits_steps(settings):
    with pytest.raises(ConfigError, match=r"A policy with split_steps\(\) is updated step by step"):
        check(of_objective(**settings), EpisodePolicy())
    check(of_objective(**settings))  # a policy that keeps its rows whole
    check(of_objective(**settings), EpisodePolicy(), objective=lambda inputs: inputs)  # a loss of the user's


@pytest.mark.parametrize(
    "settings", [{}, {"surrogate": Clip(level="none")}, {"sampler_correction": Truncate(level="step")}]
)
def test_a_loss_of_steps_is_accepted_if_the_policy_splits_steps(settings):
    check(of_objective(**settings), EpisodePolicy())


SCHEDULER = torch.optim.lr_scheduler.LRScheduler.__new__(torch.optim.lr_scheduler.LRScheduler)


@pytest.mark.parametrize(
    ("config", "arguments", "message"),
    [
        (GRPOConfig(lr_schedule="linear"), {"lr_scheduler": SCHEDULER}, r"lr_scheduler and config\.lr_schedule"),
        (GRPOConfig(warmup_ratio=0.5), {"lr_scheduler": SCHEDULER}, r"lr_scheduler and config\.lr_schedule"),
        (GRPOConfig(compile_objective=True), {"objective": lambda inputs: inputs}, r"pass torch\.compile\(objective\)"),
        (
            GRPOConfig(advantage=AdvantageConfig(credit="gae")),
            {"advantages": lambda batch: batch},
            r"advantages=\.\.\. replaces the estimator that computes the critic's targets",
        ),
    ],
)
def test_arguments_that_contradict_the_settings_are_refused(config, arguments, message):
    with pytest.raises(ConfigError, match=message):
        check(config, **arguments)
    check(config)
    check(GRPOConfig(), **arguments)


@pytest.mark.parametrize(
    ("config", "expected", "with_own_loss"),
    [
        (GRPOConfig(), set(), set()),
        (GRPOConfig(replay_iterations=1), {"old_log_probs"}, {"old_log_probs"}),
        (of_objective(top_entropy_fraction=0.9), {"old_log_probs", "entropy"}, set()),
        (of_objective(surrogate="kl_cov"), {"old_log_probs"}, set()),
        (of_objective(surrogate="clip_cov"), {"old_log_probs"}, set()),
        (GRPOConfig(advantage=AdvantageConfig(credit="gae")), {"values"}, {"values"}),
        (GRPOConfig(advantage=AdvantageConfig(credit="gigpo")), {"state_keys"}, {"state_keys"}),
        (GRPOConfig(advantage=AdvantageConfig(credit="return_to_go")), set(), set()),
    ],
)
def test_required_scores_follow_from_the_config_and_a_user_loss_requires_none_for_selecting_steps(
    config, expected, with_own_loss
):
    assert required_scores(config, has_own_loss=False) == expected
    assert required_scores(config, has_own_loss=True) == with_own_loss


def test_a_reference_that_shares_trainable_parameters_is_refused_and_three_are_named() -> None:
    policy = TablePolicy()
    for name in ("a", "b", "c"):
        policy.register_parameter(name, torch.nn.Parameter(torch.zeros(1)))
    message = r"reference_policy shares parameters with policy \(logits, a, b\).*deepcopy"
    for reference in (policy, copy.copy(policy)):
        with pytest.raises(ConfigError, match=message):
            require_reference(GRPOConfig(), policy, reference)
    require_reference(GRPOConfig(), policy, copy.deepcopy(policy))


def test_a_frozen_parameter_may_be_shared() -> None:
    policy, reference = TablePolicy(), TablePolicy()
    shared = torch.nn.Parameter(torch.zeros(3))
    for each in (policy, reference):
        each.register_parameter("shared", shared)
    with pytest.raises(ConfigError, match=r"shares parameters with policy \(shared\)"):
        require_reference(GRPOConfig(), policy, reference)
    shared.requires_grad_(False)
    require_reference(GRPOConfig(), policy, reference)


def test_empty_parameters_do_not_count_as_shared() -> None:
    """All of them have the same address, 0."""
    policy, reference = TablePolicy(), TablePolicy()
    for each in (policy, reference):
        each.register_parameter("nothing", torch.nn.Parameter(torch.empty(0, 3)))
    assert policy.nothing.data_ptr() == reference.nothing.data_ptr()
    require_reference(GRPOConfig(), policy, reference)


def test_a_moving_reference_needs_to_exist_and_to_have_the_policys_parameters() -> None:
    moving = GRPOConfig(reference_sync_every=1)
    with pytest.raises(ConfigError, match=r"reference_sync_every needs a reference to move\. Pass reference_policy="):
        require_reference(moving, TablePolicy(), None)
    with pytest.raises(ConfigError, match=r"The reference that WithReference itself gives never moves\. Pass"):
        require_reference(moving, WithReference(), None)
    require_reference(GRPOConfig(), TablePolicy(), None)
    other = TablePolicy()
    for name in "edcba":
        other.register_parameter(name, torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(ConfigError, match=r"every=1 needs .*; only one of the two has \['a', 'b', 'c', 'd'\]\. Pass"):
        require_reference(moving, TablePolicy(), other)
    require_reference(GRPOConfig(), TablePolicy(), other)
    require_reference(moving, TablePolicy(), TablePolicy())


class WithReference(TablePolicy):
    def reference_log_probabilities(self, states: Any, actions: Any) -> Tensor:
        return torch.zeros(len(actions), dtype=torch.float64)


def kl_coef_of(config: GRPOConfig, policy: Any = None, reference: Any = None, *, has_own_loss: bool = False) -> float:
    return first_kl_coef(config, policy or TablePolicy(), reference, has_own_loss=has_own_loss)


def test_a_kl_term_without_a_reference_is_refused() -> None:
    message = r"objective\.kl_coef=0\.04 needs a reference.*reference_policy=.*kl_coef=0\.$"
    with pytest.raises(ConfigError, match=message):
        kl_coef_of(of_objective(kl_coef=0.04))
    controlled = GRPOConfig(objective=ObjectiveConfig(kl_coef=0.04), kl_control=KLControl())
    with pytest.raises(ConfigError, match=r"set kl_coef=0 and kl_control=None\."):
        kl_coef_of(controlled)


def test_a_kl_control_without_a_kl_term_and_a_reference_beside_the_exact_kl_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"config\.kl_control needs a KL term to control"):
        kl_coef_of(GRPOConfig(kl_control=KLControl()))
    assert kl_coef_of(GRPOConfig(kl_control=KLControl()), reference=TablePolicy()) == 0.04
    assert kl_coef_of(GRPOConfig()) == 0.0
    exact = of_objective(kl_coef=0.04, kl_estimator="exact")
    assert kl_coef_of(exact) == 0.04
    with pytest.raises(ConfigError, match=r"kl_estimator='exact' .* would ignore reference_policy"):
        kl_coef_of(exact, reference=TablePolicy())


@pytest.mark.parametrize(("kl_coef", "has_reference", "has_own_loss", "estimator", "warns"), [
    (0.1, True, False, "k1", True), (None, True, False, "k1", True), (None, False, False, "k1", False),
    (0.0, True, False, "k1", False), (0.1, True, True, "k1", False), (0.1, True, False, "k2", False),
])  # fmt: skip
def test_k1_warns_if_it_is_the_kl_term_of_the_loss(kl_coef, has_reference, has_own_loss, estimator, warns):
    config = of_objective(kl_coef=kl_coef, kl_estimator=estimator)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kl_coef_of(config, reference=TablePolicy() if has_reference else None, has_own_loss=has_own_loss)
    assert [warning.category for warning in caught] == [GRPOWarning] * warns
    assert all("gradient of zero in expectation" in str(warning.message) for warning in caught)


@pytest.mark.parametrize(
    "actions",
    [torch.full((3,), 0.3), torch.full((3, 2), 0.3), [0.5, 1.0], [[0.1, 0.2], [0.3, 0.4]], [torch.full((2,), 0.3)] * 2],
)
def test_real_valued_actions_have_no_probabilities(actions):
    with pytest.raises(ConfigError, match=r"objective.surrogate=Dppo\(.*\) needs actions with probabilities"):
        require_discrete(Dppo(), actions)


@pytest.mark.parametrize(
    "actions", [torch.tensor([1, 2]), [1, 2], [(1, 2), (3,)], ["left", "right"], [()], [], [2.0, 3.0]]
)
def test_discrete_actions_of_any_kind_have_probabilities(actions):
    """Whole numbers may well be classes."""
    assert require_discrete(Dppo(), actions) is None


@pytest.mark.parametrize(
    ("largest", "is_refused"), [(-0.5, False), (0.0, False), (5e-6, False), (2e-5, True), (1.0, True)]
)
def test_log_probs_above_rounding_are_densities(largest, is_refused):
    """Log-probs outside the mask are not looked at. The largest one is named."""
    log_probs, mask = torch.tensor([[-1.0, largest], [7.0, 7.0]]), torch.tensor([[True, True], [False, False]])
    message = rf"surrogate=Dppo.*at most 0; got {largest:.3g}, which only a density"
    with pytest.raises(ContractError, match=message) if is_refused else nullcontext():
        require_probabilities(Dppo(), log_probs, mask)


def test_a_policy_whose_parameters_are_all_frozen_is_refused() -> None:
    policy = TablePolicy()
    policy.logits.requires_grad_(False)
    with pytest.raises(ConfigError, match=r"must hold a tensor that requires a gradient; all 1 \(logits\) are frozen"):
        check(GRPOConfig(), policy)


def test_a_frozen_reference_and_a_policy_without_parameters_are_accepted() -> None:
    policy = TablePolicy()
    reference = copy.deepcopy(policy)
    for value in reference.get_parameters().values():
        value.requires_grad_(False)
    require_reference(GRPOConfig(reference_sync_every=1), policy, reference)
    policy.get_parameters = dict
    check(GRPOConfig(), policy)
    with pytest.raises(ConfigError, match=r"with policy \(it is the same object\)"):
        require_reference(GRPOConfig(), policy, policy)


THRESHOLD = KLControl(target=0.25, coef_min=0.01, coef_max=1.0)
PROPORTIONAL = KLControl(rule="proportional", target=0.25, gain=0.5, coef_min=0.01, coef_max=1.0)


@pytest.mark.parametrize(
    ("control", "kl", "coef"),
    [
        (THRESHOLD, 0.376, 0.3),  # above 1.5 * .25 = .375: .2 * 1.5
        (THRESHOLD, 0.375, 0.2),  # at the upper threshold: stays
        (THRESHOLD, 0.125, 0.2),  # at the lower: stays
        (THRESHOLD, 0.124, 0.2 / 1.5),
        (PROPORTIONAL, 0.25, 0.2),
        (PROPORTIONAL, 0.275, 0.2 * 1.05),  # error .1, gain .5
        (PROPORTIONAL, 0.225, 0.2 * 0.95),
        (PROPORTIONAL, 50.0, 0.2 * 1.1),  # the error is cut at .2
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


@pytest.mark.parametrize("entropy", [0.4, 0.6])
def test_adapted_coefficients_survive_saving_and_loading(entropy):
    first, second = coefficients(), coefficients(kl_coef=0.9, entropy_coef=0.9)
    first.follow({"kl": (0.5, 0.0), "entropy": (entropy, 0.0)})
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for _ in range(2):
        assert (second.kl_coef, second.entropy_coef) == (first.kl_coef, first.entropy_coef)
        for current in (first, second):
            current.follow({"kl": (0.0, 0.0), "entropy": (0.3, 0.0)})
