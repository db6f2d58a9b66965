"""Settings that are changed by their dotted names."""

import pytest

from grpo import ConfigError, GRPOConfig, KLControl, ObjectiveConfig, Truncate, with_settings
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


def test_a_part_is_replaced_before_its_settings_are_changed() -> None:
    changes = {"objective.surrogate.high": 5.0, "objective.surrogate": "cispo"}
    assert with_settings(GRPOConfig(), changes).objective.surrogate == Cispo(high=5.0)


def test_settings_that_need_one_another_are_changed_together() -> None:
    changes = {"objective.aggregation": "fixed_length", "objective.fixed_length": 10}
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


def test_an_unknown_name_is_refused_with_the_nearest_one(subtests: pytest.Subtests) -> None:
    for name, nearest in [
        ("objective.surogate.high", "Did you mean 'objective.surrogate.high'?"),
        ("groupsize", "Did you mean 'group_size'?"),
        ("high", "Did you mean 'objective.surrogate.high'?"),
        ("sampler_correction", "Did you mean 'objective.sampler_correction'?"),
        ("kl_control.targt", "Did you mean 'kl_control.target'?"),
        ("group_size.x", "Did you mean 'group_size'?"),
        ("objective.sampler_correction.high", "Did you mean "),
        ("q", "There are group_size, "),
    ]:
        with subtests.test(name=name), pytest.raises(ConfigError) as caught:
            with_settings(GRPOConfig(), {name: 1})
        assert f"GRPOConfig has no setting {name!r}. {nearest}" in str(caught.value)


def test_an_unknown_name_in_a_dict_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"ObjectiveConfig has no setting 'klcoef'. Did you mean 'kl_coef'\?"):
        with_settings(GRPOConfig(), {"objective": {"klcoef": 1}})
    with pytest.raises(
        ConfigError, match=r"GRPOConfig has no setting 'groupsize'. Did you mean GRPOConfig\(group_size=...\)\?"
    ):
        GRPOConfig.from_dict({"groupsize": 1})


def test_a_changed_value_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"GRPOConfig.group_size must be >= 1; got 0"):
        with_settings(GRPOConfig(), {"group_size": 0})
