"""Settings of every config, surrogate and sampler correction: limits, contradictions, and the way to JSON and back."""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo import (
    AdvantageConfig,
    ConfigError,
    EntropyControl,
    GRPOConfig,
    KLControl,
    KPop,
    Mask,
    ObjectiveConfig,
    RewardConfig,
    Truncate,
)
from grpo.config import CORRECTIONS
from grpo.surrogates import SURROGATES, Cispo, Clip, ClipCov, Dppo, Dro, Gmpo, KlCov, Reinforce, Sapo, Vespo

pytestmark = pytest.mark.usefixtures("without_type_checks")


NOT_A_NUMBER = ["0.1", True, False, math.nan, math.inf, -math.inf, 1j, [0.1], {}]
NOT_AN_INT = ["1", True, False, 1.0, 1.5, math.nan, math.inf, [1], {}]
NOT_A_CHOICE = ["", "no_such_choice", 0, 1.0, True, ["row"], {}]
NOT_A_BOOL = [None, "True", "", 0, 1, 1.0, math.nan, [True], {}]
BELOW_ZERO = [-1e-9, -1, -1e30]
ABOVE_1 = [1.0000001, 2, 1e30]
TO_1 = [*BELOW_ZERO, 0.0, 0.5, 1.0]


class Range(NamedTuple):
    """Values that a field takes: any of these, and the ones at its bounds."""

    drawn: st.SearchStrategy
    edges: list[Any]


class Field(NamedTuple):
    """The values that a field refuses and accepts."""

    refused: list[Any]
    drawn: st.SearchStrategy
    edges: list[Any]


AT_LEAST_0 = Range(st.floats(0, 1e6), [0, 0.0, 1e-300])
ABOVE_0 = Range(st.floats(1e-9, 1e6), [1e-300, 1])
ABOVE_1_ONLY = Range(st.floats(1.001, 1e6), [1.0000001, 2])
AT_LEAST_1E_4 = Range(st.floats(1e-4, 1e6), [1e-4])
UNIT = Range(st.floats(0, 1), [0, 1, 0.0, 1.0])
ABOVE_0_TO_1 = Range(st.floats(1e-9, 1), [1e-300, 1])
BELOW_1 = Range(st.floats(0, 0.999), [0, 0.999])
ANY_NUMBER = Range(st.floats(-1e6, 1e6), [0])
NATURAL = Range(st.integers(0, 10**6), [0])
POSITIVE = Range(st.integers(1, 10**6), [1])


def number(*outside: float, optional: bool = False, allowed: Range) -> Field:
    return _field([*NOT_A_NUMBER, *outside], allowed, optional)


def integer(*outside: int, optional: bool = False, allowed: Range) -> Field:
    return _field([*NOT_AN_INT, *outside], allowed, optional)


def choice(*allowed: str, optional: bool = False) -> Field:
    spoiled = [allowed[0].upper(), allowed[0] + " "]
    return _field([*NOT_A_CHOICE, *spoiled], Range(st.sampled_from(allowed), [*allowed]), optional)


def boolean() -> Field:
    return Field(NOT_A_BOOL, st.booleans(), [True, False])


def part(config: Any, *, optional: bool = False) -> Field:
    """A field that holds another config."""
    allowed = Range(st.deferred(lambda: configs(config)), [config()])
    return _field([{}, "default", 1, config], allowed, optional)


def callable_of(choices: dict[str, Any], *, optional: bool = False, names: Sequence[str] = ()) -> Field:
    """A field that holds a surrogate or a correction: an object, the name of its class, or another of its names."""
    first, *_ = choices
    objects = st.deferred(lambda: st.one_of([configs(kind) for kind in choices.values()]))
    edges = [*choices, *names, *(kind() for kind in choices.values()), print]
    allowed = Range(st.sampled_from([*choices, *names]) | objects, edges)
    wrong = ["", "None", "no_such_choice", first.upper(), 0, 1.0, True, [first], {}, {"kind": first}]
    return _field([*wrong, *choices.values()], allowed, optional)


def _field(refused: list[Any], allowed: Range, optional: bool) -> Field:
    if optional:
        return Field(refused, st.none() | allowed.drawn, [*allowed.edges, None])
    return Field([*refused, None], allowed.drawn, allowed.edges)


AGGREGATIONS = ("row_mean", "step_mean", "row_sum", "group_mean")  # `fixed_length` has tests of its own
OVER_GROUPS = ("group", "mean", "beta")
OVER_ALL = ("none", "batch", "whiten")
LEVEL = choice("step", "row", "row_sum", "row_step", "none")
LOW = number(*BELOW_ZERO, *ABOVE_1, allowed=UNIT)
HIGH = number(*BELOW_ZERO, allowed=AT_LEAST_0)
POSITIVE_NUMBER = number(0.0, *BELOW_ZERO, allowed=ABOVE_0)
FRACTION = number(0.0, *BELOW_ZERO, *ABOVE_1, allowed=ABOVE_0_TO_1)
CORRECTION = {
    "low": number(*BELOW_ZERO, optional=True, allowed=AT_LEAST_0),
    "high": number(0, *BELOW_ZERO, optional=True, allowed=ABOVE_0),
    "level": choice("step", "row"),
}

FIELDS = {
    AdvantageConfig: {
        "credit": choice("row", "return_to_go", "process_supervision", "gae", "gigpo", optional=True),
        "baseline": choice(
            "group_mean", "group_median", "leave_one_out", "global_mean", "length_weighted", "max_at_k", "none"
        ),
        "scale": choice(*OVER_GROUPS, *OVER_ALL),
        "std_ddof": integer(-1, 2, allowed=Range(st.integers(0, 1), [0, 1])),
        "std_eps": number(*BELOW_ZERO, allowed=AT_LEAST_0),
        "k": integer(1, 0, -1, optional=True, allowed=Range(st.integers(2, 10**6), [2])),
        "several_rewards": choice("sum", "normalize_each"),
        "gamma": number(*BELOW_ZERO, *ABOVE_1, allowed=UNIT),
        "gae_lambda": number(*BELOW_ZERO, *ABOVE_1, allowed=UNIT),
        "gigpo_weight": number(*BELOW_ZERO, allowed=AT_LEAST_0),
        "upweight_live_groups": boolean(),
        "positive_weight": number(*BELOW_ZERO, allowed=AT_LEAST_0),
        "negative_only": boolean(),
        "clip": number(0.0, *BELOW_ZERO, optional=True, allowed=ABOVE_0),
        "reward_clip": number(0.0, *BELOW_ZERO, optional=True, allowed=ABOVE_0),
        "normalize_rewards": boolean(),
    },
    ObjectiveConfig: {
        "surrogate": callable_of(SURROGATES),
        "sampler_correction": callable_of(CORRECTIONS, optional=True, names=["none"]),
        "top_entropy_fraction": FRACTION,
        "off_policy_threshold": number(*BELOW_ZERO, optional=True, allowed=AT_LEAST_0),
        "kl_coef": number(*BELOW_ZERO, optional=True, allowed=AT_LEAST_0),
        "kl_estimator": choice("k1", "k2", "k3", "k3_weighted", "exact"),
        "entropy_coef": number(*BELOW_ZERO, allowed=AT_LEAST_0),
        "entropy_estimator": choice("exact", "score_function"),
        "entropy_aggregation": choice(*AGGREGATIONS, optional=True),
        "aggregation": choice(*AGGREGATIONS),
        "fixed_length": integer(0, -1, optional=True, allowed=Range(st.none(), [])),
        "value_coef": number(*BELOW_ZERO, allowed=AT_LEAST_0),
        "observation_coef": number(*BELOW_ZERO, allowed=AT_LEAST_0),
        "demonstration_coef": number(*BELOW_ZERO, 0.0, allowed=ABOVE_0),
        "value_clip": number(0.0, *BELOW_ZERO, optional=True, allowed=ABOVE_0),
    },
    KLControl: {
        "rule": choice("threshold", "proportional"),
        "target": number(0.0, *BELOW_ZERO, allowed=ABOVE_0),
        "coef_min": number(0.0, *BELOW_ZERO, allowed=ABOVE_0),
        "coef_max": number(0.0, *BELOW_ZERO, allowed=ABOVE_0),
        "gain": number(0.0, *BELOW_ZERO, allowed=ABOVE_0),
    },
    EntropyControl: {
        "target": number(*BELOW_ZERO, allowed=AT_LEAST_0),
        "delta": number(0.0, *BELOW_ZERO, allowed=ABOVE_0),
        "coef_min": number(*BELOW_ZERO, allowed=AT_LEAST_0),
        "coef_max": number(0.0, *BELOW_ZERO, allowed=ABOVE_0),
    },
    RewardConfig: {
        "non_finite": choice("raise", "drop", "zero"),
        "not_applicable": choice("raise", "drop", "zero", optional=True),
        "on_failure": choice("raise", "drop"),
        "num_retries": integer(-1, allowed=NATURAL),
        "timeout": number(0.0, *BELOW_ZERO, 1.1e9, optional=True, allowed=ABOVE_0),
        "max_concurrent": integer(0, -1, allowed=POSITIVE),
        "retry_delay": number(*BELOW_ZERO, allowed=AT_LEAST_0),
        "max_retry_seconds": number(*BELOW_ZERO, 1.1e9, allowed=AT_LEAST_0),
        "breaker_failures": integer(0, -1, allowed=POSITIVE),
        "breaker_seconds": number(*BELOW_ZERO, 1.1e9, allowed=AT_LEAST_0),
    },
    GRPOConfig: {
        "group_size": integer(0, -1, allowed=POSITIVE),
        "num_states_per_iteration": integer(0, -1, optional=True, allowed=POSITIVE),
        "num_demonstrations_per_iteration": integer(0, -1, optional=True, allowed=POSITIVE),
        "batch_size": integer(0, -1, optional=True, allowed=POSITIVE),
        "micro_batch_size": integer(0, -1, optional=True, allowed=POSITIVE),
        "num_epochs_per_update": integer(0, -1, allowed=POSITIVE),
        "learning_rate": number(0.0, *BELOW_ZERO, allowed=ABOVE_0),
        "lr_schedule": choice("constant", "linear", "cosine"),
        "warmup_ratio": number(*BELOW_ZERO, 1.0, *ABOVE_1, allowed=BELOW_1),
        "max_grad_norm": number(0.0, *BELOW_ZERO, optional=True, allowed=ABOVE_0),
        "max_skipped_updates": integer(0, -1, allowed=POSITIVE),
        "autocast_dtype": choice("bfloat16", "float16", optional=True),
        "compile_objective": boolean(),
        "device": Field([0, 1.0, True, ["cpu"]], st.sampled_from([None, "cpu", "cuda:1"]), [None, "cpu"]),
        "seed": integer(-1, 2**64, optional=True, allowed=Range(st.integers(0, 2**63 - 1), [0, 2**64 - 1])),
        "kl_control": part(KLControl, optional=True),
        "entropy_control": part(EntropyControl, optional=True),
        "reference_sync_every": integer(0, -1, optional=True, allowed=POSITIVE),
        "reference_mix": number(0.0, *BELOW_ZERO, *ABOVE_1, allowed=ABOVE_0_TO_1),
        "dynamic_sampling_rounds": integer(-1, allowed=NATURAL),
        "replay_iterations": integer(-1, allowed=NATURAL),
        "iterations_ahead": integer(-1, allowed=NATURAL),
        "advantage": part(AdvantageConfig),
        "objective": part(ObjectiveConfig),
        "reward": part(RewardConfig),
    },
    Clip: {
        "level": LEVEL,
        "low": LOW,
        "high": HIGH,
        "delta": number(*TO_1, optional=True, allowed=ABOVE_1_ONLY),
        "dual": number(*TO_1, optional=True, allowed=ABOVE_1_ONLY),
    },
    Reinforce: {},
    Cispo: {"level": LEVEL, "low": LOW, "high": HIGH},
    Sapo: {"level": LEVEL, "temperature_pos": POSITIVE_NUMBER, "temperature_neg": POSITIVE_NUMBER},
    Gmpo: {"low": LOW, "high": HIGH},
    Vespo: {
        "k_pos": POSITIVE_NUMBER,
        "lambda_pos": number(0.0, 9e-5, *BELOW_ZERO, allowed=AT_LEAST_1E_4),
        "k_neg": POSITIVE_NUMBER,
        "lambda_neg": number(0.0, 9e-5, *BELOW_ZERO, allowed=AT_LEAST_1E_4),
    },
    Dro: {"level": LEVEL, "beta": number(*BELOW_ZERO, allowed=AT_LEAST_0)},
    Dppo: {"level": LEVEL, "tv_limit": FRACTION},
    KlCov: {"level": LEVEL, "fraction": FRACTION, "coef": number(*BELOW_ZERO, allowed=AT_LEAST_0)},
    ClipCov: {
        "level": LEVEL,
        "low": LOW,
        "high": HIGH,
        "fraction": FRACTION,
        "cov_low": number(allowed=ANY_NUMBER),
        "cov_high": number(allowed=Range(st.floats(-1e6, 1e6), [1.0, 100])),
    },
    Truncate: CORRECTION,
    Mask: CORRECTION,
    KPop: {"threshold": number(0.0, *BELOW_ZERO, allowed=ABOVE_0)},
}
BESIDE: dict[Any, Callable[[Any], dict[str, Any]]] = {
    (AdvantageConfig, "baseline"): lambda value: {"k": 2} if value == "max_at_k" else {},
    (AdvantageConfig, "k"): lambda value: {"baseline": "max_at_k"} if value else {},
    (Clip, "delta"): lambda value: {"high": 0.0},
    (KLControl, "coef_min"): lambda value: {"coef_max": 1.0},
    (KLControl, "coef_max"): lambda value: {"coef_min": 1e-300},
}
"""Settings that a field needs beside it, by its value."""


def configs(config: Any) -> st.SearchStrategy:
    """Any valid settings of one class, but for `fixed_length`."""
    fields = st.fixed_dictionaries({name: field.drawn for name, field in FIELDS[config].items()})
    return fields.map(lambda values: config(**APART.get(config, dict)(values)))


def advantages_apart(values: dict[str, Any]) -> dict[str, Any]:
    """Drawn values without those that contradict one another."""
    if values["several_rewards"] == "normalize_each":
        values = values | {"baseline": "group_mean", "scale": "none"}
    if values["credit"] not in (None, "row") and values["baseline"] in ("max_at_k", "length_weighted", "global_mean"):
        values = values | {"baseline": "group_mean"}
    values = values | {"k": values["k"] or 2 if values["baseline"] == "max_at_k" else None}
    if values["negative_only"]:
        values |= {"positive_weight": float(values["positive_weight"] >= 1.0)}
    if values["credit"] == "gae" and values["scale"] in OVER_GROUPS:
        values |= {"scale": "whiten"}
    if values["several_rewards"] == "normalize_each":
        credit = values["credit"] and "row"
        values |= {"credit": credit, "reward_clip": None, "normalize_rewards": False}
    return values


def in_order(low: str, high: str, values: dict[str, Any]) -> dict[str, Any]:
    """Two bounds, where both are there, the smaller one first."""
    bounds = values[low], values[high]
    return values if None in bounds or bounds[0] <= bounds[1] else values | {low: bounds[1], high: bounds[0]}


APART: dict[type, Callable[[dict[str, Any]], dict[str, Any]]] = {
    AdvantageConfig: advantages_apart,
    KLControl: lambda values: in_order("coef_min", "coef_max", values),
    EntropyControl: lambda values: in_order("coef_min", "coef_max", values),
    GRPOConfig: lambda values: (
        values
        | {
            "group_size": max(values["group_size"], values["advantage"].k or 1),
            "iterations_ahead": 0 if values["dynamic_sampling_rounds"] else values["iterations_ahead"],
        }
    ),
    Clip: lambda values: values | {"delta": values["delta"] and values["delta"] + values["high"]},
    ClipCov: lambda values: in_order("cov_low", "cov_high", values),
    Truncate: lambda values: in_order("low", "high", values),
    Mask: lambda values: in_order("low", "high", values),
}
"""How drawn values are changed that contradict one another."""


def test_the_tested_values_cover_every_class_and_every_field() -> None:
    of_config = {AdvantageConfig, ObjectiveConfig, RewardConfig, KLControl, EntropyControl, GRPOConfig}
    assert set(FIELDS) == of_config | {*SURROGATES.values(), *CORRECTIONS.values()}
    for config, fields in FIELDS.items():
        assert set(fields) == {field.name for field in dataclasses.fields(config)}, config


def test_invalid_values_are_refused_and_their_field_named(subtests):
    for config in FIELDS:
        with subtests.test(config=config.__name__):
            wrong = []
            for name, field in FIELDS[config].items():
                for value in field.refused:
                    try:
                        config(**{name: value})
                    except ConfigError as error:
                        if not re.match(rf"{config.__name__}\.{name}\b", str(error)):
                            wrong.append(f"{name}={value!r} is refused with {error}")
                    else:
                        wrong.append(f"{name}={value!r} is accepted")
            assert not wrong, "\n".join(wrong)


def test_values_at_the_bounds_are_accepted(subtests):
    for config in FIELDS:
        with subtests.test(config=config.__name__):
            for name, field in FIELDS[config].items():
                beside = BESIDE.get((config, name), lambda value: {})
                for value in field.edges:
                    held = getattr(config(**{name: value, **beside(value)}), name)
                    choices = {"surrogate": SURROGATES, "sampler_correction": CORRECTIONS}.get(name, {})
                    assert held == (choices[value]() if isinstance(value, str) and value in choices else value)


@settings(max_examples=150)
@given(st.sampled_from([*FIELDS]).flatmap(configs))
def test_configs_survive_dict_and_json_round_trips(config):
    assert type(config).from_dict(config.to_dict()) == config
    assert type(config).from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_unknown_keys_are_refused_by_name(subtests):
    for config in FIELDS:
        with (
            subtests.test(config=config.__name__),
            pytest.raises(ConfigError, match=rf"{config.__name__} has no setting 'epsilon'"),
        ):
            config.from_dict({"epsilon": 0.2})


def test_configs_are_frozen_keyword_only_and_compared_by_value(subtests):
    for config in FIELDS:
        with subtests.test(config=config.__name__):
            for field in dataclasses.fields(config):
                with pytest.raises(dataclasses.FrozenInstanceError):
                    setattr(config(), field.name, getattr(config(), field.name))
            with pytest.raises(TypeError, match="positional"):
                config(0.2)
            assert config() == config()
            assert hash(config()) == hash(config())


# Settings that contradict one another


def test_fixed_length_is_required_by_its_aggregation_and_refused_otherwise(subtests):
    for reader in ["aggregation", "entropy_aggregation"]:
        with subtests.test(reader=reader):
            config = ObjectiveConfig(fixed_length=64, **{reader: "fixed_length"})
            assert ObjectiveConfig.from_dict(config.to_dict()) == config
            with pytest.raises(ConfigError, match=r"ObjectiveConfig\.fixed_length"):
                ObjectiveConfig(**{reader: "fixed_length"})
            with pytest.raises(ConfigError, match=r"ObjectiveConfig\.fixed_length"):
                ObjectiveConfig(fixed_length=64)


def test_an_invalid_fixed_length_is_refused(subtests):
    for value in [0, -1, 1.0, True, "64"]:
        with subtests.test(value=value), pytest.raises(ConfigError, match=r"ObjectiveConfig\.fixed_length must be"):
            ObjectiveConfig(aggregation="fixed_length", fixed_length=value)


def test_k_is_required_by_its_baseline_and_refused_otherwise():
    assert AdvantageConfig(baseline="max_at_k", k=2).k == 2
    with pytest.raises(ConfigError, match=r"AdvantageConfig\.k=None with baseline='max_at_k'"):
        AdvantageConfig(baseline="max_at_k")
    with pytest.raises(ConfigError, match=r"AdvantageConfig\.k=2 with baseline='group_mean'"):
        AdvantageConfig(k=2)


def test_negative_only_with_another_positive_weight_is_refused(subtests):
    for weight in [0.5, 0.999, 1.001, 2.0]:
        with subtests.test(weight=weight):
            for agreeing in (0.0, 1.0):
                assert AdvantageConfig(negative_only=True, positive_weight=agreeing).positive_weight == agreeing
            assert AdvantageConfig(positive_weight=weight).positive_weight == weight
            with pytest.raises(
                ConfigError, match=rf"AdvantageConfig\.negative_only and positive_weight={weight} contradict"
            ):
                AdvantageConfig(negative_only=True, positive_weight=weight)


def test_gae_with_a_scale_over_groups_is_refused(subtests):
    for scale in OVER_GROUPS:
        with subtests.test(scale=scale):
            for over_all in OVER_ALL:
                assert AdvantageConfig(credit="gae", scale=over_all).scale == over_all
            with pytest.raises(
                ConfigError, match=rf"AdvantageConfig\.scale='{scale}' needs groups, but credit='gae' has no groups"
            ):
                AdvantageConfig(credit="gae", scale=scale)


def test_normalize_each_with_another_treatment_of_rewards_is_refused(subtests):
    cases = [
        {"credit": "return_to_go"},
        {"credit": "process_supervision"},
        {"credit": "gae"},
        {"credit": "gigpo"},
        {"reward_clip": 1.0},
        {"normalize_rewards": True},
    ]
    for beside in cases:
        with subtests.test(beside=beside):
            for credit in (None, "row"):
                assert AdvantageConfig(several_rewards="normalize_each", credit=credit).credit == credit
            assert AdvantageConfig(**beside)
            with pytest.raises(ConfigError, match=r"AdvantageConfig\.several_rewards='normalize_each'"):
                AdvantageConfig(several_rewards="normalize_each", **beside)


def test_a_delta_below_the_upper_clip_bound_is_refused(subtests):
    for high, delta in [(0.2, 1.2), (0.5, 1.4), (0.25, 1.25)]:
        with subtests.test(high=high, delta=delta):
            assert Clip(high=high, delta=1.51).delta == 1.51
            with pytest.raises(ConfigError, match=rf"Clip\.delta={delta} must be above 1 \+ high = {1 + high}"):
                Clip(high=high, delta=delta)


def test_a_lower_bound_above_the_upper_bound_is_refused(subtests):
    cases = [
        (ClipCov, "cov_low", "cov_high", 5.0),
        (Truncate, "low", "high", 3.0),
        (Mask, "low", "high", 3.0),
        (KLControl, "coef_min", "coef_max", 0.1),
        (EntropyControl, "coef_min", "coef_max", 1.0),
    ]
    for config, low, high, default_high in cases:
        with subtests.test(config=config.__name__, low=low, high=high, default_high=default_high):
            assert getattr(config(**{low: 0.03, high: 0.03}), low) == 0.03
            with pytest.raises(
                ConfigError, match=rf"{config.__name__}\.{low}=6\.0 must not exceed {high}={default_high}"
            ):
                config(**{low: 6.0})


def test_a_bound_of_none_is_accepted_beside_any_other(subtests):
    for config in [Truncate, Mask]:
        with subtests.test(config=config.__name__):
            assert config(low=6.0, high=None).low == 6.0
            assert config(low=None, high=0.1).high == 0.1


def test_every_accepted_seed_can_seed_the_generators():
    for seed in (0, 2**63, 2**64 - 1):
        assert torch.Generator().manual_seed(GRPOConfig(seed=seed).seed).initial_seed() == seed
