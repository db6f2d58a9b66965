"""Every setting of the four configs: what it refuses, and that dicts carry it there and back."""

import dataclasses
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo import AdvantageConfig, ConfigError, GRPOConfig, ObjectiveConfig, RewardConfig
from tests.support import as_users_run_it


@pytest.fixture(autouse=True)
def _as_users_run_it() -> Iterator[None]:
    with as_users_run_it():
        yield


NOT_A_NUMBER = ["0.1", True, False, math.nan, math.inf, -math.inf, 1j, [0.1], {}]
NOT_AN_INT = ["1", True, False, 1.0, 1.5, math.nan, math.inf, [1], {}]
NOT_A_CHOICE = ["", "no_such_choice", 0, 1.0, True, ["row"], {}]
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


def part(config: Any) -> tuple[list[Any], st.SearchStrategy]:
    """What a field that holds another config refuses, and what it takes."""
    return [None, {}, "default", 1, config], st.deferred(lambda: configs(config))


AT_LEAST_0 = st.floats(0, 1e6)
ABOVE_0 = st.floats(1e-9, 1e6)
POSITIVE = st.integers(1, 10**6)
UNIT = st.floats(0, 1)
ABOVE_1 = [1.0000001, 2, 1e30]
AGGREGATIONS = ("row_mean", "step_mean", "row_sum", "group_mean")  # `fixed_length` has tests of its own

FIELDS = {
    AdvantageConfig: {
        "credit": choice("row", "return_to_go", optional=True),
        "baseline": choice("group_mean", "group_median", "leave_one_out", "global_mean", "none"),
        "scale": choice("none", "group", "batch"),
        "std_ddof": integer(-1, 2, allowed=st.integers(0, 1)),
        "std_eps": number(*BELOW_ZERO, allowed=AT_LEAST_0),
        "gamma": number(*BELOW_ZERO, *ABOVE_1, allowed=UNIT),
        "clip": number(0.0, *BELOW_ZERO, optional=True, allowed=ABOVE_0),
    },
    ObjectiveConfig: {
        "clip_low": number(*BELOW_ZERO, *ABOVE_1, allowed=UNIT),
        "clip_high": number(*BELOW_ZERO, allowed=AT_LEAST_0),
        "kl_coef": number(*BELOW_ZERO, optional=True, allowed=AT_LEAST_0),
        "kl_estimator": choice("k1", "k2", "k3", "k3_weighted"),
        "entropy_coef": number(*BELOW_ZERO, allowed=AT_LEAST_0),
        "entropy_estimator": choice("exact", "score_function"),
        "entropy_aggregation": choice(*AGGREGATIONS, optional=True),
        "aggregation": choice(*AGGREGATIONS),
        "fixed_length": integer(0, -1, optional=True, allowed=st.none()),
        "sampler_correction": choice("none", "truncate", "mask"),
        "sampler_ratio_low": number(*BELOW_ZERO, optional=True, allowed=UNIT),
        "sampler_ratio_high": number(0, *BELOW_ZERO, optional=True, allowed=st.floats(1, 1e6)),
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
    return st.builds(config, **{field: allowed for field, (_, allowed) in FIELDS[config].items()})


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
    ("name", "config"), [("advantage", AdvantageConfig), ("objective", ObjectiveConfig), ("reward", RewardConfig)]
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
        }
    )
    assert config == GRPOConfig(
        group_size=4,
        objective=ObjectiveConfig(clip_high=0.28),
        advantage=AdvantageConfig(scale="group"),
        reward=RewardConfig(num_retries=2),
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


@pytest.mark.parametrize("seed", [0, 2**63, 2**64 - 1])
def test_every_seed_that_is_accepted_can_be_used(seed):
    torch.Generator().manual_seed(GRPOConfig(seed=seed).seed)


def test_a_seed_that_torch_cannot_take_is_refused_at_once():
    with pytest.raises(ConfigError, match=r"GRPOConfig\.seed"):
        GRPOConfig(seed=2**64)
