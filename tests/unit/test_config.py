"""Every setting of every config: what it refuses, what it cannot stand beside, and that dicts carry it there and back."""

import dataclasses
import json
import math
from collections.abc import Callable, Iterator
from typing import Any

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
    ObjectiveConfig,
    RewardConfig,
)
from tests.support import as_users_run_it


@pytest.fixture(autouse=True)
def _as_users_run_it() -> Iterator[None]:
    with as_users_run_it():
        yield


NOT_A_NUMBER = ["0.1", True, False, math.nan, math.inf, -math.inf, 1j, [0.1], {}]
NOT_AN_INT = ["1", True, False, 1.0, 1.5, math.nan, math.inf, [1], {}]
NOT_A_CHOICE = ["", "no_such_choice", 0, 1.0, True, ["row"], {}]
NOT_A_BOOL = [None, "True", "", 0, 1, 1.0, math.nan, [True], {}]
BELOW_ZERO = [-1e-9, -1, -1e30]


def number(*outside: float, optional: bool = False, allowed: st.SearchStrategy) -> tuple[list[Any], st.SearchStrategy]:
    """What a float field refuses, and what it takes."""
    return [*NOT_A_NUMBER, *outside, *([] if optional else [None])], (st.none() | allowed if optional else allowed)


def integer(*outside: int, optional: bool = False, allowed: st.SearchStrategy) -> tuple[list[Any], st.SearchStrategy]:
    """What an int field refuses, and what it takes."""
    return [*NOT_AN_INT, *outside, *([] if optional else [None])], (st.none() | allowed if optional else allowed)


def choice(*allowed: str, optional: bool = False) -> tuple[list[Any], st.SearchStrategy]:
    """What a field of literals refuses, and what it takes."""
    spoiled = [allowed[0].upper(), allowed[0] + " ", *([] if optional else [None])]
    return [*NOT_A_CHOICE, *spoiled], st.sampled_from([*allowed, *([None] if optional else [])])


def boolean() -> tuple[list[Any], st.SearchStrategy]:
    """What a field of bool refuses, and what it takes."""
    return NOT_A_BOOL, st.booleans()


def part(config: Any, *, optional: bool = False) -> tuple[list[Any], st.SearchStrategy]:
    """What a field that holds another config refuses, and what it takes."""
    allowed = st.deferred(lambda: configs(config))
    return [{}, "default", 1, config, *([] if optional else [None])], (st.none() | allowed if optional else allowed)


AT_LEAST_0 = st.floats(0, 1e6)
ABOVE_0 = st.floats(1e-9, 1e6)
POSITIVE = st.integers(1, 10**6)
UNIT = st.floats(0, 1)
ABOVE_0_TO_1 = st.floats(1e-9, 1)
ANY_NUMBER = st.floats(-1e6, 1e6)
ABOVE_1 = [1.0000001, 2, 1e30]
TO_1 = [*BELOW_ZERO, 0.0, 0.5, 1.0]
AGGREGATIONS = ("row_mean", "step_mean", "row_sum", "group_mean")  # `fixed_length` has tests of its own
SURROGATES = ("clip", "none", "cispo", "sapo", "gmpo", "vespo", "dro", "dppo_tv", "kl_cov", "clip_cov")
OVER_GROUPS = ("group", "mean", "beta")
OVER_ALL = ("none", "batch", "whiten")

FIELDS = {
    AdvantageConfig: {
        "credit": choice("row", "return_to_go", "process_supervision", "gae", "gigpo", optional=True),
        "baseline": choice(
            "group_mean", "group_median", "leave_one_out", "global_mean", "length_weighted", "max_at_k", "none"
        ),
        "scale": choice(*OVER_GROUPS, *OVER_ALL),
        "std_ddof": integer(-1, 2, allowed=st.integers(0, 1)),
        "std_eps": number(*BELOW_ZERO, allowed=AT_LEAST_0),
        "k": integer(1, 0, -1, optional=True, allowed=st.integers(2, 10**6)),
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
        "surrogate": choice(*SURROGATES),
        "ratio_level": choice("step", "row", "row_sum", "row_step", "none"),
        "clip_low": number(*BELOW_ZERO, *ABOVE_1, allowed=UNIT),
        "clip_high": number(*BELOW_ZERO, allowed=AT_LEAST_0),
        "delta": number(*TO_1, optional=True, allowed=st.floats(1.001, 1e6)),
        "dual_clip": number(*TO_1, optional=True, allowed=st.floats(1.001, 1e6)),
        "sapo_temperature_pos": number(0.0, *BELOW_ZERO, allowed=ABOVE_0),
        "sapo_temperature_neg": number(0.0, *BELOW_ZERO, allowed=ABOVE_0),
        "vespo_k_pos": number(0.0, *BELOW_ZERO, allowed=ABOVE_0),
        "vespo_lambda_pos": number(0.0, 9e-5, *BELOW_ZERO, allowed=st.floats(1e-4, 1e6)),
        "vespo_k_neg": number(0.0, *BELOW_ZERO, allowed=ABOVE_0),
        "vespo_lambda_neg": number(0.0, 9e-5, *BELOW_ZERO, allowed=st.floats(1e-4, 1e6)),
        "dro_beta": number(*BELOW_ZERO, allowed=AT_LEAST_0),
        "tv_limit": number(0.0, *BELOW_ZERO, *ABOVE_1, allowed=ABOVE_0_TO_1),
        "cov_fraction": number(0.0, *BELOW_ZERO, *ABOVE_1, allowed=ABOVE_0_TO_1),
        "cov_low": number(allowed=ANY_NUMBER),
        "cov_high": number(allowed=ANY_NUMBER),
        "cov_kl_coef": number(*BELOW_ZERO, allowed=AT_LEAST_0),
        "top_entropy_fraction": number(0.0, *BELOW_ZERO, *ABOVE_1, allowed=ABOVE_0_TO_1),
        "off_policy_threshold": number(*BELOW_ZERO, optional=True, allowed=AT_LEAST_0),
        "kl_coef": number(*BELOW_ZERO, optional=True, allowed=AT_LEAST_0),
        "kl_estimator": choice("k1", "k2", "k3", "k3_weighted", "exact"),
        "entropy_coef": number(*BELOW_ZERO, allowed=AT_LEAST_0),
        "entropy_estimator": choice("exact", "score_function"),
        "entropy_aggregation": choice(*AGGREGATIONS, optional=True),
        "aggregation": choice(*AGGREGATIONS),
        "fixed_length": integer(0, -1, optional=True, allowed=st.none()),
        "sampler_correction": choice("none", "truncate", "mask"),
        "sampler_ratio_level": choice("step", "row"),
        "sampler_ratio_low": number(*BELOW_ZERO, optional=True, allowed=AT_LEAST_0),
        "sampler_ratio_high": number(0, *BELOW_ZERO, optional=True, allowed=ABOVE_0),
        "value_coef": number(*BELOW_ZERO, allowed=AT_LEAST_0),
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
        "on_failure": choice("raise", "drop"),
        "num_retries": integer(-1, allowed=st.integers(0, 10**6)),
        "retry_delay": number(*BELOW_ZERO, allowed=AT_LEAST_0),
    },
    GRPOConfig: {
        "group_size": integer(0, -1, allowed=POSITIVE),
        "num_states_per_iteration": integer(0, -1, optional=True, allowed=POSITIVE),
        "batch_size": integer(0, -1, optional=True, allowed=POSITIVE),
        "micro_batch_size": integer(0, -1, optional=True, allowed=POSITIVE),
        "num_epochs_per_update": integer(0, -1, allowed=POSITIVE),
        "learning_rate": number(0.0, *BELOW_ZERO, allowed=ABOVE_0),
        "lr_schedule": choice("constant", "linear", "cosine"),
        "warmup_ratio": number(*BELOW_ZERO, 1.0, *ABOVE_1, allowed=st.floats(0, 0.999)),
        "max_grad_norm": number(0.0, *BELOW_ZERO, optional=True, allowed=ABOVE_0),
        "max_skipped_updates": integer(0, -1, allowed=POSITIVE),
        "autocast_dtype": choice("bfloat16", "float16", optional=True),
        "device": ([0, 1.0, True, ["cpu"]], st.sampled_from([None, "cpu", "cuda:1"])),
        "seed": integer(-1, optional=True, allowed=st.integers(0, 2**63 - 1)),
        "kl_control": part(KLControl, optional=True),
        "entropy_control": part(EntropyControl, optional=True),
        "reference_sync_every": integer(0, -1, optional=True, allowed=POSITIVE),
        "reference_mix": number(0.0, *BELOW_ZERO, *ABOVE_1, allowed=ABOVE_0_TO_1),
        "dynamic_sampling_rounds": integer(-1, allowed=st.integers(0, 10**6)),
        "replay_iterations": integer(-1, allowed=st.integers(0, 10**6)),
        "advantage": part(AdvantageConfig),
        "objective": part(ObjectiveConfig),
        "reward": part(RewardConfig),
    },
}
INVALID = [
    pytest.param(config, field, value, id=f"{config.__name__}.{field}={value!r}")
    for config, fields in FIELDS.items()
    for field, (refused, _) in fields.items()
    for value in refused
]


def configs(config: Any) -> st.SearchStrategy:
    """Any valid settings of one class, but for `fixed_length`."""
    fields = st.fixed_dictionaries({field: allowed for field, (_, allowed) in FIELDS[config].items()})
    return fields.map(lambda values: config(**APART[config](values)))


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


def objectives_apart(values: dict[str, Any]) -> dict[str, Any]:
    """Likewise: bounds in order, and `delta` beyond the one that clips."""
    values = in_order("sampler_ratio_low", "sampler_ratio_high", in_order("cov_low", "cov_high", values))
    if values["surrogate"] not in ("clip", "clip_cov"):
        values = values | {"delta": None, "dual_clip": None}
    return values | {"delta": values["delta"] and values["delta"] + values["clip_high"]}


def in_order(low: str, high: str, values: dict[str, Any]) -> dict[str, Any]:
    """Two bounds, where both are there, the smaller one first."""
    bounds = values[low], values[high]
    return values if None in bounds or bounds[0] <= bounds[1] else values | {low: bounds[1], high: bounds[0]}


APART: dict[type, Callable[[dict[str, Any]], dict[str, Any]]] = {
    AdvantageConfig: advantages_apart,
    ObjectiveConfig: objectives_apart,
    KLControl: lambda values: in_order("coef_min", "coef_max", values),
    EntropyControl: lambda values: in_order("coef_min", "coef_max", values),
    RewardConfig: dict,
    GRPOConfig: lambda values: values | {"group_size": max(values["group_size"], values["advantage"].k or 1)},
}


@pytest.mark.parametrize("config", FIELDS)
def test_the_table_above_knows_every_field(config):
    assert set(FIELDS[config]) == {field.name for field in dataclasses.fields(config)}


@pytest.mark.parametrize(("config", "field", "value"), INVALID)
def test_an_invalid_value_is_refused_and_its_field_named(config, field, value):
    with pytest.raises(ConfigError, match=rf"^{config.__name__}\.{field}\b"):
        config(**{field: value})


@settings(max_examples=100, deadline=None)
@given(st.one_of([configs(config) for config in FIELDS]))
def test_dicts_and_json_round_trip(config):
    assert type(config).from_dict(config.to_dict()) == config
    assert type(config).from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("config", FIELDS)
def test_unknown_keys_are_refused_by_name(config):
    with pytest.raises(ConfigError, match=rf"{config.__name__} has no setting 'epsilon'"):
        config.from_dict({"epsilon": 0.2})


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("advantage", AdvantageConfig),
        ("objective", ObjectiveConfig),
        ("reward", RewardConfig),
        ("kl_control", KLControl),
        ("entropy_control", EntropyControl),
    ],
)
def test_unknown_keys_of_a_part_are_refused_too(name, config):
    with pytest.raises(ConfigError, match=rf"{config.__name__} has no setting 'epsilon'"):
        GRPOConfig.from_dict({name: {"epsilon": 0.2}})


def test_nested_dicts_become_parts():
    config = GRPOConfig.from_dict(
        {
            "group_size": 4,
            "objective": {"clip_high": 0.28},
            "advantage": {"scale": "group"},
            "reward": {"num_retries": 2},
            "kl_control": {"target": 0.02},
            "entropy_control": {"delta": 0.01},
        }
    )
    assert config == GRPOConfig(
        group_size=4,
        objective=ObjectiveConfig(clip_high=0.28),
        advantage=AdvantageConfig(scale="group"),
        reward=RewardConfig(num_retries=2),
        kl_control=KLControl(target=0.02),
        entropy_control=EntropyControl(delta=0.01),
    )


def test_an_invalid_value_of_a_part_names_the_part():
    with pytest.raises(ConfigError, match=r"ObjectiveConfig\.clip_low must be <= 1\.0; got 2"):
        GRPOConfig.from_dict({"objective": {"clip_low": 2}})


@pytest.mark.parametrize("config", FIELDS)
def test_configs_are_frozen_and_take_keywords_only(config):
    field = dataclasses.fields(config)[0]
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(config(), field.name, getattr(config(), field.name))
    with pytest.raises(TypeError, match="positional"):
        config(getattr(config(), field.name))


@pytest.mark.parametrize("config", FIELDS)
def test_equal_settings_are_equal_and_hash_alike(config):
    assert config() == config()
    assert hash(config()) == hash(config())


@pytest.mark.parametrize("reader", ["aggregation", "entropy_aggregation"])
def test_fixed_length_is_given_exactly_where_it_is_read(reader):
    config = ObjectiveConfig(fixed_length=64, **{reader: "fixed_length"})
    assert ObjectiveConfig.from_dict(config.to_dict()) == config
    with pytest.raises(ConfigError, match=r"ObjectiveConfig\.fixed_length"):
        ObjectiveConfig(**{reader: "fixed_length"})
    with pytest.raises(ConfigError, match=r"ObjectiveConfig\.fixed_length"):
        ObjectiveConfig(fixed_length=64)


@pytest.mark.parametrize("value", [0, -1, 1.0, True, "64"])
def test_a_length_that_is_read_is_checked(value):
    with pytest.raises(ConfigError, match=r"ObjectiveConfig\.fixed_length must be"):
        ObjectiveConfig(aggregation="fixed_length", fixed_length=value)


def test_k_is_given_exactly_where_the_baseline_reads_it():
    assert AdvantageConfig(baseline="max_at_k", k=2).k == 2
    with pytest.raises(ConfigError, match=r"AdvantageConfig\.k=None with baseline='max_at_k'"):
        AdvantageConfig(baseline="max_at_k")
    with pytest.raises(ConfigError, match=r"AdvantageConfig\.k=2 with baseline='group_mean'"):
        AdvantageConfig(k=2)


@pytest.mark.parametrize("weight", [0.5, 0.999, 1.001, 2.0])
def test_negative_only_stands_beside_no_other_weight(weight):
    for agreeing in (0.0, 1.0):
        assert AdvantageConfig(negative_only=True, positive_weight=agreeing).positive_weight == agreeing
    assert AdvantageConfig(positive_weight=weight).positive_weight == weight
    with pytest.raises(ConfigError, match=rf"AdvantageConfig\.negative_only and positive_weight={weight} contradict"):
        AdvantageConfig(negative_only=True, positive_weight=weight)


@pytest.mark.parametrize("scale", OVER_GROUPS)
def test_a_critic_has_no_groups_to_scale_by(scale):
    for over_all in OVER_ALL:
        assert AdvantageConfig(credit="gae", scale=over_all).scale == over_all
    with pytest.raises(
        ConfigError, match=rf"AdvantageConfig\.scale='{scale}' is over groups, which credit='gae' has not"
    ):
        AdvantageConfig(credit="gae", scale=scale)


@pytest.mark.parametrize(
    "beside",
    [
        {"credit": "return_to_go"},
        {"credit": "process_supervision"},
        {"credit": "gae"},
        {"credit": "gigpo"},
        {"reward_clip": 1.0},
        {"normalize_rewards": True},
    ],
)
def test_rewards_that_are_normalised_each_are_left_alone_otherwise(beside):
    for credit in (None, "row"):
        assert AdvantageConfig(several_rewards="normalize_each", credit=credit).credit == credit
    assert AdvantageConfig(**beside)
    with pytest.raises(ConfigError, match=r"AdvantageConfig\.several_rewards='normalize_each'"):
        AdvantageConfig(several_rewards="normalize_each", **beside)


@pytest.mark.parametrize(("clip_high", "delta"), [(0.2, 1.2), (0.5, 1.4), (0.25, 1.25)])
def test_delta_lies_beyond_the_bound_that_clips(clip_high, delta):
    assert ObjectiveConfig(clip_high=clip_high, delta=1.51).delta == 1.51
    with pytest.raises(
        ConfigError, match=rf"ObjectiveConfig\.delta={delta} must be above 1 \+ clip_high = {1 + clip_high}"
    ):
        ObjectiveConfig(clip_high=clip_high, delta=delta)


@pytest.mark.parametrize(
    ("config", "low", "high", "default_high"),
    [
        (ObjectiveConfig, "cov_low", "cov_high", 5.0),
        (ObjectiveConfig, "sampler_ratio_low", "sampler_ratio_high", 3.0),
        (KLControl, "coef_min", "coef_max", 0.1),
        (EntropyControl, "coef_min", "coef_max", 1.0),
    ],
)
def test_bounds_are_in_order(config, low, high, default_high):
    assert getattr(config(**{low: 0.03, high: 0.03}), low) == 0.03
    with pytest.raises(ConfigError, match=rf"{config.__name__}\.{low}=6\.0 must not exceed {high}={default_high}"):
        config(**{low: 6.0})


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1])
def test_every_seed_that_is_accepted_can_be_used(seed):
    torch.Generator().manual_seed(GRPOConfig(seed=seed).seed)


def test_a_seed_that_torch_cannot_take_is_refused_at_once():
    with pytest.raises(ConfigError, match=r"GRPOConfig\.seed"):
        GRPOConfig(seed=2**64)
