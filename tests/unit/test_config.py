"""Settings of every config, surrogate and sampler correction: limits, contradictions, and the way to JSON and back."""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo import AdvantageConfig, ConfigError, EntropyControl, GRPOConfig, KLControl, ObjectiveConfig, RewardConfig
from grpo.config import CORRECTIONS, KPop, Mask, Truncate
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
    """The values that a field refuses, and a `Range`."""

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
STEPWISE = ("return_to_go", "process_supervision", "gae", "gigpo")
LEVEL = choice("step", "row", "row_sum", "row_step", "none")
FROM_0_TO_1 = number(*BELOW_ZERO, *ABOVE_1, allowed=UNIT)
FRACTION = number(0.0, *BELOW_ZERO, *ABOVE_1, allowed=ABOVE_0_TO_1)
NUMBER_AT_LEAST_0 = number(*BELOW_ZERO, allowed=AT_LEAST_0)
OPTIONAL_AT_LEAST_0 = number(*BELOW_ZERO, optional=True, allowed=AT_LEAST_0)
POSITIVE_NUMBER = number(0.0, *BELOW_ZERO, allowed=ABOVE_0)
OPTIONAL_POSITIVE = number(0.0, *BELOW_ZERO, optional=True, allowed=ABOVE_0)
OPTIONAL_ABOVE_1 = number(*TO_1, optional=True, allowed=ABOVE_1_ONLY)
SECONDS = number(*BELOW_ZERO, 1.1e9, allowed=AT_LEAST_0)
LAMBDA = number(0.0, 9e-5, *BELOW_ZERO, allowed=AT_LEAST_1E_4)
COUNT_FROM_0 = integer(-1, allowed=NATURAL)
COUNT, OPTIONAL_COUNT = (integer(0, -1, optional=optional, allowed=POSITIVE) for optional in (False, True))
CORRECTION = {"low": OPTIONAL_AT_LEAST_0, "high": OPTIONAL_POSITIVE, "level": choice("step", "row")}

FIELDS = {
    AdvantageConfig: {
        "credit": choice("row", "return_to_go", "process_supervision", "gae", "gigpo", optional=True),
        "baseline": choice(
            "group_mean", "group_median", "leave_one_out", "global_mean", "length_weighted", "max_at_k", "none"
        ),
        "scale": choice(*OVER_GROUPS, *OVER_ALL), "std_ddof": integer(-1, 2, allowed=Range(st.integers(0, 1), [0, 1])),
        "std_eps": NUMBER_AT_LEAST_0, "k": integer(1, 0, -1, optional=True, allowed=Range(st.integers(2, 10**6), [2])),
        "several_rewards": choice("sum", "normalize_each"), "gamma": FROM_0_TO_1, "gae_lambda": FROM_0_TO_1,
        "gigpo_weight": NUMBER_AT_LEAST_0, "upweight_live_groups": boolean(), "positive_weight": NUMBER_AT_LEAST_0,
        "negative_only": boolean(), "clip": OPTIONAL_POSITIVE, "reward_clip": OPTIONAL_POSITIVE,
        "normalize_rewards": boolean(),
    },
    ObjectiveConfig: {
        "surrogate": callable_of(SURROGATES),
        "sampler_correction": callable_of(CORRECTIONS, optional=True, names=["none"]), "top_entropy_fraction": FRACTION,
        "off_policy_threshold": OPTIONAL_AT_LEAST_0, "kl_coef": OPTIONAL_AT_LEAST_0,
        "kl_estimator": choice("k1", "k2", "k3", "k3_weighted", "exact"), "entropy_coef": NUMBER_AT_LEAST_0,
        "entropy_estimator": choice("exact", "score_function"),
        "entropy_aggregation": choice(*AGGREGATIONS, optional=True), "aggregation": choice(*AGGREGATIONS),
        "fixed_length": integer(0, -1, optional=True, allowed=Range(st.none(), [])), "value_coef": NUMBER_AT_LEAST_0,
        "observation_coef": NUMBER_AT_LEAST_0, "demonstration_coef": POSITIVE_NUMBER, "value_clip": OPTIONAL_POSITIVE,
    },
    KLControl: {
        "rule": choice("threshold", "proportional"), "target": POSITIVE_NUMBER, "coef_min": POSITIVE_NUMBER,
        "coef_max": POSITIVE_NUMBER, "gain": POSITIVE_NUMBER,
    },
    EntropyControl: {
        "target": NUMBER_AT_LEAST_0, "delta": POSITIVE_NUMBER, "coef_min": NUMBER_AT_LEAST_0,
        "coef_max": POSITIVE_NUMBER,
    },
    RewardConfig: {
        "non_finite": choice("raise", "drop", "zero"), "not_applicable": choice("raise", "drop", "zero", optional=True),
        "on_failure": choice("raise", "drop"), "num_retries": COUNT_FROM_0,
        "timeout": number(0.0, *BELOW_ZERO, 1.1e9, optional=True, allowed=ABOVE_0), "max_concurrent": COUNT,
        "retry_delay": NUMBER_AT_LEAST_0, "max_retry_seconds": SECONDS, "breaker_failures": COUNT,
        "breaker_seconds": SECONDS,
    },
    GRPOConfig: {
        "group_size": COUNT, "num_states_per_iteration": OPTIONAL_COUNT,
        "num_demonstrations_per_iteration": OPTIONAL_COUNT, "batch_size": OPTIONAL_COUNT,
        "micro_batch_size": OPTIONAL_COUNT, "num_epochs_per_update": COUNT, "learning_rate": POSITIVE_NUMBER,
        "lr_schedule": choice("constant", "linear", "cosine"),
        "warmup_ratio": number(*BELOW_ZERO, 1.0, *ABOVE_1, allowed=BELOW_1), "max_grad_norm": OPTIONAL_POSITIVE,
        "max_skipped_updates": COUNT, "autocast_dtype": choice("bfloat16", "float16", optional=True),
        "compile_objective": boolean(),
        "device": Field([0, 1.0, True, ["cpu"]], st.sampled_from([None, "cpu", "cuda:1"]), [None, "cpu"]),
        "seed": integer(-1, 2**64, optional=True, allowed=Range(st.integers(0, 2**63 - 1), [0, 2**64 - 1])),
        "kl_control": part(KLControl, optional=True), "entropy_control": part(EntropyControl, optional=True),
        "reference_sync_every": OPTIONAL_COUNT, "reference_mix": FRACTION, "dynamic_sampling_rounds": COUNT_FROM_0,
        "replay_iterations": COUNT_FROM_0, "iterations_ahead": COUNT_FROM_0, "advantage": part(AdvantageConfig),
        "objective": part(ObjectiveConfig), "reward": part(RewardConfig),
    },
    Clip: {
        "level": LEVEL, "low": FROM_0_TO_1, "high": NUMBER_AT_LEAST_0, "delta": OPTIONAL_ABOVE_1,
        "dual": OPTIONAL_ABOVE_1,
    },
    Reinforce: {},
    Cispo: {"level": LEVEL, "low": FROM_0_TO_1, "high": NUMBER_AT_LEAST_0},
    Sapo: {"level": LEVEL, "temperature_pos": POSITIVE_NUMBER, "temperature_neg": POSITIVE_NUMBER},
    Gmpo: {"low": FROM_0_TO_1, "high": NUMBER_AT_LEAST_0},
    Vespo: {"k_pos": POSITIVE_NUMBER, "lambda_pos": LAMBDA, "k_neg": POSITIVE_NUMBER, "lambda_neg": LAMBDA},
    Dro: {"level": LEVEL, "beta": NUMBER_AT_LEAST_0},
    Dppo: {"level": LEVEL, "tv_limit": FRACTION},
    KlCov: {"level": LEVEL, "fraction": FRACTION, "coef": NUMBER_AT_LEAST_0},
    ClipCov: {
        "level": LEVEL, "low": FROM_0_TO_1, "high": NUMBER_AT_LEAST_0, "fraction": FRACTION,
        "cov_low": number(allowed=ANY_NUMBER), "cov_high": number(allowed=Range(st.floats(-1e6, 1e6), [1.0, 100])),
    },
    Truncate: CORRECTION, Mask: CORRECTION, KPop: {"threshold": POSITIVE_NUMBER},
}  # fmt: skip
BESIDE: dict[Any, Callable[[Any], dict[str, Any]]] = {
    (AdvantageConfig, "baseline"): lambda value: {"k": 2} if value == "max_at_k" else {},
    (AdvantageConfig, "k"): lambda value: {"baseline": "max_at_k"} if value else {},
    (Clip, "delta"): lambda value: {"high": 0.0}, (KLControl, "coef_min"): lambda value: {"coef_max": 1.0},
    (KLControl, "coef_max"): lambda value: {"coef_min": 1e-300},
}  # fmt: skip
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


def grpo_apart(values: dict[str, Any]) -> dict[str, Any]:
    ahead = 0 if values["dynamic_sampling_rounds"] else values["iterations_ahead"]
    return values | {"group_size": max(values["group_size"], values["advantage"].k or 1), "iterations_ahead": ahead}


IN_ORDER = {
    KLControl: ("coef_min", "coef_max"), EntropyControl: ("coef_min", "coef_max"), ClipCov: ("cov_low", "cov_high"),
    Truncate: ("low", "high"), Mask: ("low", "high"),
}  # fmt: skip
APART: dict[type, Callable[[dict[str, Any]], dict[str, Any]]] = {
    AdvantageConfig: advantages_apart,
    GRPOConfig: grpo_apart,
    Clip: lambda values: values | {"delta": values["delta"] and values["delta"] + values["high"]},
    **{kind: partial(in_order, *names) for kind, names in IN_ORDER.items()},
}
"""How drawn values are changed that contradict one another."""


def test_the_tested_values_cover_every_class_and_every_field() -> None:
    of_config = {AdvantageConfig, ObjectiveConfig, RewardConfig, KLControl, EntropyControl, GRPOConfig}
    assert set(FIELDS) == of_config | {*SURROGATES.values(), *CORRECTIONS.values()}
    for config, fields in FIELDS.items():
        assert set(fields) == {field.name for field in dataclasses.fields(config)}, config


@pytest.mark.parametrize("config", FIELDS)
def test_invalid_values_are_refused_and_their_field_named(config):
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


@pytest.mark.parametrize("config", FIELDS)
def test_values_at_the_bounds_are_accepted(config):
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


@pytest.mark.parametrize("config", FIELDS)
def test_unknown_keys_are_refused_by_name(config):
    with pytest.raises(ConfigError, match=rf"{config.__name__} has no setting 'epsilon'"):
        config.from_dict({"epsilon": 0.2})


@pytest.mark.parametrize("config", FIELDS)
def test_configs_are_frozen_keyword_only_and_compared_by_value(config):
    for field in dataclasses.fields(config):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config(), field.name, getattr(config(), field.name))
    with pytest.raises(TypeError, match="positional"):
        config(0.2)
    assert config() == config()
    assert hash(config()) == hash(config())


LENGTH, GROUPS = {"aggregation": "fixed_length"}, "needs groups, but credit='gae' has no groups"
EACH, OF_FOUR = {"several_rewards": "normalize_each"}, AdvantageConfig(baseline="max_at_k", k=4)
ALONE = [*({"credit": credit} for credit in STEPWISE), {"reward_clip": 1.0}, {"normalize_rewards": True}]
CONTRADICT: list[tuple[type, dict[str, Any], str]] = [
    (ObjectiveConfig, LENGTH, "fixed_length"),
    (ObjectiveConfig, {"entropy_aggregation": "fixed_length"}, "fixed_length"),
    (ObjectiveConfig, {"fixed_length": 64}, "fixed_length"),
    *((ObjectiveConfig, {**LENGTH, "fixed_length": n}, "fixed_length must be") for n in (0, -1, 1.0, True, "64")),
    (AdvantageConfig, {"baseline": "max_at_k"}, "k=None with baseline='max_at_k'"),
    (AdvantageConfig, {"k": 2}, "k=2 with baseline='group_mean'"),
    *((AdvantageConfig, {"negative_only": True, "positive_weight": weight},
       f"negative_only and positive_weight={weight} contradict") for weight in (0.5, 0.999, 1.001, 2.0)),
    *((AdvantageConfig, {"credit": "gae", "scale": scale}, f"scale='{scale}' {GROUPS}") for scale in OVER_GROUPS),
    *((AdvantageConfig, {**EACH, **beside}, "several_rewards='normalize_each'") for beside in ALONE),
    *((Clip, {"high": high, "delta": delta}, f"delta={delta} must be above 1 + high = {1 + high}")
      for high, delta in ((0.2, 1.2), (0.5, 1.4), (0.25, 1.25))),
    (ClipCov, {"cov_low": 6.0}, "cov_low=6.0 must not exceed cov_high=5.0"),
    (Truncate, {"low": 6.0}, "low=6.0 must not exceed high=3.0"),
    (Mask, {"low": 6.0}, "low=6.0 must not exceed high=3.0"),
    (KLControl, {"coef_min": 6.0}, "coef_min=6.0 must not exceed coef_max=0.1"),
    (EntropyControl, {"coef_min": 6.0}, "coef_min=6.0 must not exceed coef_max=1.0"),
    (GRPOConfig, {"group_size": 3, "advantage": OF_FOUR}, "group_size=3 must be at least advantage.k=4"),
]  # fmt: skip


AGREE: list[tuple[type, dict[str, Any]]] = [
    *((ObjectiveConfig, {reader: "fixed_length", "fixed_length": 64}) for reader in ("aggregation", "entropy_aggregation")),
    (AdvantageConfig, {"baseline": "max_at_k", "k": 2}),
    *((AdvantageConfig, {"negative_only": True, "positive_weight": weight}) for weight in (0.0, 1.0)),
    *((AdvantageConfig, {"positive_weight": weight}) for weight in (0.5, 0.999, 1.001, 2.0)),
    *((AdvantageConfig, {"credit": "gae", "scale": scale}) for scale in OVER_ALL),
    *((AdvantageConfig, {**EACH, "credit": credit}) for credit in (None, "row")),
    *((AdvantageConfig, beside) for beside in ALONE),
    (GRPOConfig, {"group_size": 4, "advantage": OF_FOUR}),
    *((Clip, {"high": high, "delta": 1.51}) for high in (0.2, 0.5, 0.25)),
    *((kind, {low: 0.03, high: 0.03}) for kind, (low, high) in IN_ORDER.items()),
    *((kind, {"low": low, "high": high}) for kind in (Truncate, Mask) for low, high in ((6.0, None), (None, 0.1))),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "settings", "message"), CONTRADICT)
def test_settings_that_contradict_one_another_are_refused(kind, settings, message):
    with pytest.raises(ConfigError, match=re.escape(f"{kind.__name__}.{message}")):
        kind(**settings)


@pytest.mark.parametrize(("kind", "settings"), AGREE)
def test_settings_that_agree_are_kept(kind, settings):
    config = kind(**settings)
    assert {name: getattr(config, name) for name in settings} == settings
    assert kind.from_dict(config.to_dict()) == config
