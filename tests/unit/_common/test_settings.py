"""Settings: what they accept, dicts there and back, and changes by their dotted names."""

import dataclasses
import math
import re
import sys
from typing import Literal

import pytest

from grpo import ConfigError, GRPOConfig, KLControl, ObjectiveConfig, Truncate, with_settings
from grpo.arguments import Settings, setting
from grpo.surrogates import Cispo, Clip, Steps


def test_settings_are_changed_by_their_dotted_names() -> None:
    config = GRPOConfig(seed=3, objective=ObjectiveConfig(kl_coef=0.1))
    changed = with_settings(config, {"objective.surrogate.high": 0.28, "group_size": 4, "advantage.scale": "batch"})
    assert changed == GRPOConfig(
        seed=3, group_size=4, objective=ObjectiveConfig(kl_coef=0.1, surrogate=Clip(high=0.28)),
        advantage=with_settings(config.advantage, {"scale": "batch"}),
    )  # fmt: skip
    assert config == GRPOConfig(seed=3, objective=ObjectiveConfig(kl_coef=0.1))
    assert with_settings(config, {}) is config


def test_a_part_is_replaced_before_its_settings_are_changed_and_settings_change_together() -> None:
    changes = {"objective.surrogate.high": 5.0, "objective.surrogate": "cispo"}
    assert with_settings(GRPOConfig(), changes).objective.surrogate == Cispo(high=5.0)
    changes = {"objective.aggregation": "fixed_length", "objective.fixed_length": 10}  # each needs the other one
    assert with_settings(GRPOConfig(), changes).objective.fixed_length == 10


def test_a_dict_changes_a_part_and_a_kind_replaces_it() -> None:
    objective = {"kl_coef": 0.5, "surrogate": {"low": 0.1}, "sampler_correction": {"kind": "truncate", "high": 2.0}}
    config = GRPOConfig(objective=ObjectiveConfig(surrogate=Clip(high=0.3), entropy_coef=0.2))
    assert with_settings(config, {"objective": objective}).objective == ObjectiveConfig(
        kl_coef=0.5, entropy_coef=0.2, surrogate=Clip(low=0.1, high=0.3), sampler_correction=Truncate(high=2.0)
    )
    replaced = with_settings(config, {"objective.surrogate": {"kind": "clip", "low": 0.1}})
    assert replaced.objective.surrogate == Clip(low=0.1)


def test_settings_that_are_off_begin_with_their_defaults() -> None:
    assert with_settings(GRPOConfig(), {"kl_control.target": 0.02}).kl_control == KLControl(target=0.02)
    assert with_settings(GRPOConfig(), {"kl_control": {"gain": 0.5}}).kl_control == KLControl(gain=0.5)
    on = GRPOConfig(kl_control=KLControl(gain=0.3))
    assert with_settings(on, {"kl_control.target": 0.02}).kl_control == KLControl(gain=0.3, target=0.02)
    assert with_settings(on, {"kl_control": None}).kl_control is None


def test_a_callable_of_the_users_own_is_kept() -> None:
    def own(steps: Steps) -> object:
        return steps.advantages

    config = GRPOConfig(objective=ObjectiveConfig(surrogate=own))  # type: ignore[arg-type]
    assert with_settings(config, {"objective.kl_coef": 0.1}).objective.surrogate is own
    with pytest.raises(ConfigError, match=r"no setting 'objective.surrogate.high'"):
        with_settings(config, {"objective.surrogate.high": 0.1})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            ({name: 1}, f"GRPOConfig has no setting {name!r}. {nearest}")
            for name, nearest in {
                "objective.surogate.high": "Did you mean 'objective.surrogate.high'?",
                "groupsize": "Did you mean 'group_size'?",
                "high": "Did you mean 'objective.surrogate.high'?",
                "sampler_correction": "Did you mean 'objective.sampler_correction'?",
                "kl_control.targt": "Did you mean 'kl_control.target'?",
                "group_size.x": "Did you mean 'group_size'?",
                "objective.sampler_correction.high": "Did you mean ",
                "q": "There are group_size, ",
            }.items()
        ),
        ({"objective": {"klcoef": 1}}, "ObjectiveConfig has no setting 'klcoef'. Did you mean 'kl_coef'?"),
        ({"group_size": 0}, "GRPOConfig.group_size must be >= 1; got 0"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_one_and_values_are_checked(changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        with_settings(GRPOConfig(), changes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inner(Settings):
    """A part of `Outer`."""

    depth: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outer(Settings):
    """One field of every kind."""

    count: int = setting(3, at_least=1, at_most=9)
    rate: float = setting(0.5, above=0.0, below=1.0)
    limit: float | None = setting(None, at_least=0.0)
    mode: Literal["slow", "fast"] = "slow"
    choice: Literal["a", "b"] | None = None
    name: str | None = None
    words: tuple[str, ...] = ()
    inner: Inner = Inner()


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [  # numbers, choices and parts: test_config.py, for each field
        ("count", 10, "<= 9"),
        ("rate", 1.0, "< 1"),
        ("limit", -math.inf, "None"),
        ("limit", 10**400, ""),  # too large for a float
        ("mode", 0, "'slow', 'fast'"),
        ("choice", "c", "'a', 'b' or None"),
        ("name", 5, "str or None"),
        *(("words", words, "a tuple of str") for words in ["ab", ["a"], ("a", 1)]),
    ],
)
def test_invalid_values_are_refused_by_field(field, value, says):
    with pytest.raises(ConfigError, match=rf"Outer\.{field} must be .*{says}.*; got {re.escape(repr(value))[:100]}"):
        Outer(**{field: value})
    assert Outer(limit=sys.float_info.max).limit == sys.float_info.max


def test_dicts_have_plain_values_at_every_level_and_defaults_are_filled_in():
    assert Outer(limit=2.0).to_dict() == {
        "count": 3, "rate": 0.5, "limit": 2.0, "mode": "slow", "choice": None, "name": None, "words": (),
        "inner": {"depth": 1},
    }  # fmt: skip
    assert Outer.from_dict({"count": 4, "inner": {"depth": 6}}) == Outer(count=4, inner=Inner(depth=6))
    assert Outer.from_dict({"inner": Inner(depth=6)}) == Outer(inner=Inner(depth=6))
    assert Outer.from_dict({"words": ["a", "b"]}) == Outer(words=("a", "b"))  # JSON has lists only
    assert Outer.from_dict({}) == Outer()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"cuont": 4}, r"Outer has no setting 'cuont'. Did you mean Outer\(count=...\)\?"),
        ({"inner": {"dpeth": 4}}, r"Inner has no setting 'dpeth'. Did you mean Inner\(depth=...\)\?"),
        ({"inner": {"depth": "4"}}, r"Inner\.depth must be int"),
        ({"count": 0}, r"Outer\.count must be >= 1"),
        ({"name": {"depth": 1}}, r"Outer\.name must be str or None"),
    ],
)
def test_from_dict_refuses_unknown_keys(values, says):
    with pytest.raises(ConfigError, match=says):
        Outer.from_dict(values)
