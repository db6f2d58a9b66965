"""Surrogates and sampler corrections as settings of `ObjectiveConfig`: names, objects, dicts, and a user's own."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch

from grpo import ConfigError, GRPOConfig, KPop, Mask, ObjectiveConfig, Truncate, presets
from grpo.config import CORRECTIONS, SURROGATES
from grpo.surrogates import Cispo, Clip, ClipCov, Dppo, Dro, Gmpo, KlCov, Sapo, Steps, Vespo
from tests.support.configs import PRESETS
from tests.support.objective_inputs import as_users_run_it

DEFAULTS: dict[str, dict[str, Any]] = {
    "clip": {"level": "step", "low": 0.2, "high": 0.2, "delta": None, "dual": None},
    "reinforce": {},
    "cispo": {"level": "step", "low": 0.2, "high": 0.2},
    "sapo": {"level": "step", "temperature_pos": 1.0, "temperature_neg": 1.05},
    "gmpo": {"low": 0.2, "high": 0.2},
    "vespo": {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0},
    "dro": {"level": "step", "beta": 0.05},
    "dppo": {"level": "step", "tv_limit": 0.2},
    "kl_cov": {"level": "step", "fraction": 2e-4, "coef": 1.0},
    "clip_cov": {"level": "step", "low": 0.2, "high": 0.2, "fraction": 2e-4, "cov_low": 1.0, "cov_high": 5.0},
    "truncate": {"low": None, "high": 3.0, "level": "step"},
    "mask": {"low": None, "high": 3.0, "level": "step"},
    "kpop": {"threshold": 0.1},
}
"""Every name and the settings that it stands for."""

OTHER: dict[type, Any] = {
    Clip: Clip(low=0.1, high=0.3, delta=4.0, dual=3.0, level="row"), Cispo: Cispo(low=1.0, high=4.0, level="row_sum"),
    Sapo: Sapo(temperature_pos=2.0, temperature_neg=3.0, level="row_step"), Gmpo: Gmpo(low=0.33, high=0.49),
    Vespo: Vespo(k_pos=1.0, lambda_pos=1.5, k_neg=2.5, lambda_neg=3.5), Dro: Dro(beta=0.5, level="row_sum"),
    Dppo: Dppo(tv_limit=0.1, level="none"), KlCov: KlCov(fraction=0.1, coef=0.5, level="row"),
    ClipCov: ClipCov(low=0.1, high=0.3, fraction=0.1, cov_low=-2.0, cov_high=2.0, level="row"),
    Truncate: Truncate(low=0.5, high=2.0, level="row"), Mask: Mask(low=0.5, high=None, level="row"),
    KPop: KPop(threshold=0.2),
}  # fmt: skip
"""Every class that has settings, with none of them at its default."""

PLACES = {"surrogate": SURROGATES, "sampler_correction": CORRECTIONS}
CHOICES = [(place, name, kind) for place, choices in PLACES.items() for name, kind in choices.items()]


@pytest.mark.parametrize(("place", "name", "kind"), CHOICES)
def test_a_surrogates_name_becomes_the_object_with_its_defaults(place, name, kind):
    config = ObjectiveConfig(**{place: name})
    held = getattr(config, place)
    assert type(held) is kind
    assert held == kind(**DEFAULTS[name])
    assert config == ObjectiveConfig(**{place: kind()})
    assert hash(config) == hash(ObjectiveConfig(**{place: kind()}))
    assert config.to_dict()[place] == {"kind": name, **DEFAULTS[name]}


def test_clip_without_a_correction_is_the_default():
    assert {**SURROGATES, **CORRECTIONS}.keys() == DEFAULTS.keys()
    assert ObjectiveConfig().surrogate == Clip()
    assert ObjectiveConfig().sampler_correction is ObjectiveConfig().to_dict()["sampler_correction"] is None


@pytest.mark.parametrize(("place", "name", "kind"), CHOICES)
def test_other_settings_than_the_defaults_round_trip_through_json(place, name, kind):
    held = OTHER.get(kind, kind())
    for field in dataclasses.fields(kind):
        assert getattr(held, field.name) != field.default, f"{held}: {field.name} is at its default"
    config = GRPOConfig(objective=ObjectiveConfig(**{place: held}))
    written = json.loads(json.dumps(config.to_dict()))
    assert written["objective"][place] == {"kind": name, **dataclasses.asdict(held)}
    assert GRPOConfig.from_dict(written) == config
    assert getattr(GRPOConfig.from_dict(written).objective, place) == held


def test_an_unset_kl_coefficient_depends_on_the_reference():
    for has_reference, default in [(True, 0.04), (False, 0.0)]:
        assert ObjectiveConfig().kl_coef_with(has_reference=has_reference) == default
        for coef in (0.0, 0.3):
            assert ObjectiveConfig(kl_coef=coef).kl_coef_with(has_reference=has_reference) == coef


def test_a_dict_may_hold_only_the_name_or_some_of_the_settings():
    assert ObjectiveConfig.from_dict({"surrogate": "cispo"}).surrogate == Cispo()
    assert ObjectiveConfig.from_dict({"surrogate": {"kind": "cispo", "high": 4.0}}).surrogate == Cispo(high=4.0)
    assert ObjectiveConfig.from_dict({"sampler_correction": "mask"}).sampler_correction == Mask()
    assert ObjectiveConfig.from_dict({"sampler_correction": None}).sampler_correction is None


@pytest.mark.parametrize(("ahead", "given", "found"), [
    (0, None, None), (0, "none", None), (0, "mask", Mask()), (1, None, Truncate()), (1, "none", None),
    (1, Truncate(high=2.0), Truncate(high=2.0)),
])  # fmt: skip
def test_none_in_quotes_switches_the_correction_off_and_none_leaves_it_to_the_iterations_ahead(ahead, given, found):
    config = GRPOConfig(iterations_ahead=ahead, objective=ObjectiveConfig(sampler_correction=given))
    assert config.loss.correction == found
    again = GRPOConfig.from_dict(config.to_dict())
    assert again == config
    assert again.objective.sampler_correction == config.objective.sampler_correction
    assert GRPOConfig(iterations_ahead=1).loss == ObjectiveConfig(sampler_correction=Truncate())


@dataclasses.dataclass(frozen=True)
class Own:
    """A surrogate, or a correction, of a user's own."""

    width: float = 0.5

    def __call__(self, steps: Steps) -> torch.Tensor:
        return -steps.advantages * steps.ratio()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OwnClip(Clip):
    """A surrogate that inherits from a built-in one and is still a different surrogate."""


def own_function(steps: Steps) -> torch.Tensor:
    return -steps.advantages * steps.ratio()


@pytest.mark.parametrize(("own", "name"), [(Own(), "Own"), (OwnClip(), "OwnClip"), (own_function, "own_function")])
def test_a_user_surrogate_is_kept_written_by_name_and_not_read_back(own, name):
    for place in PLACES:
        config = GRPOConfig(objective=ObjectiveConfig(**{place: own}))
        assert getattr(config.objective, place) is own
        assert config == GRPOConfig(objective=ObjectiveConfig(**{place: own}))
        assert hash(config) == hash(GRPOConfig(objective=ObjectiveConfig(**{place: own})))
        written = json.loads(json.dumps(config.to_dict()))
        assert written["objective"][place] == {"kind": "custom", "name": name}
        advice = rf"ObjectiveConfig\.{place} was a custom callable, '{name}', .*set {place} in code"
        with pytest.raises(ConfigError, match=advice):
            GRPOConfig.from_dict(written)


ONE_OF = {place: "one of " + ", ".join(map(repr, choices)) for place, choices in PLACES.items()}


@pytest.mark.parametrize("kind", ["ppo", "none", None, ["clip"], 1])
@pytest.mark.parametrize("place", PLACES)
def test_an_unknown_kind_is_refused_with_the_known_ones(place, kind):
    with pytest.raises(ConfigError) as refused:
        ObjectiveConfig.from_dict({place: {"kind": kind}})
    assert str(refused.value) == f"ObjectiveConfig.{place}: kind must be {ONE_OF[place]}; got {str(kind)!r}."


@pytest.mark.parametrize(("make", "message"), [
    (lambda: ObjectiveConfig(surrogate="ppo"), rf"\.surrogate must be {ONE_OF['surrogate']}, .* got str 'ppo'"),
    (lambda: ObjectiveConfig(sampler_correction="ppo"),
     rf"\.sampler_correction must be {ONE_OF['sampler_correction']}, 'none', an object.* got str 'ppo'"),
    (lambda: ObjectiveConfig(sampler_correction=np.ones(2)),
     r"\.sampler_correction must be one of .*; got a numpy array \[2\] float64"),
    *((lambda place=place: ObjectiveConfig.from_dict({place: {"low": 0.1}}), rf"\.{place}: kind must be one of .*; got 'None'")
      for place in PLACES),
    *((lambda place=place, kind=kind: ObjectiveConfig(**{place: kind}),
       rf"\.{place} must be an object; got the class {kind.__name__}\. Pass {kind.__name__}\(\)")
      for place, choices in PLACES.items() for kind in (*choices.values(), Own)),
])  # fmt: skip
def test_what_is_no_surrogate_or_correction_is_refused_with_advice(make, message):
    with as_users_run_it(), pytest.raises(ConfigError, match=rf"ObjectiveConfig{message}"):
        make()


# Every preset, field by field, compared with its paper


TOOLS: dict[str, Any] = {
    "group_size": 8, "batch_size": 32, "num_epochs_per_update": 4, "learning_rate": 1e-5, "max_grad_norm": 1.0,
    "kl_control": {"rule": "threshold", "target": 0.01, "coef_min": 0.001, "coef_max": 0.1, "gain": 0.1},
    "advantage": {"scale": "group", "std_ddof": 0, "gamma": 0.99, "gae_lambda": 0.95},
    "objective": {"surrogate": {"low": 0.2, "high": 0.2}, "kl_coef": 0.02, "entropy_coef": 0.01},
}  # fmt: skip
CONVERSATIONS: dict[str, Any] = {
    "lr_schedule": "cosine", "advantage": {"reward_clip": 10.0},
    "objective": {"surrogate": {"low": 0.2, "high": 0.2}, "kl_coef": 0.1, "entropy_coef": 0.01},
}  # fmt: skip


def merged(settings: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`settings` with `changes` in their place, in nested dicts too. A dict that names its kind replaces the old one."""
    result = dict(settings)
    for name, value in changes.items():
        nested = isinstance(value, dict) and isinstance(result.get(name), dict) and "kind" not in value
        result[name] = merged(result[name], value) if nested else value
    return result


SAID: dict[str, dict[str, Any]] = {
    # 64 answers to each of 16 questions, in one update; sec. 4.2
    "deepseek_math": {"group_size": 64, "num_states_per_iteration": 16, "learning_rate": 1e-6, "advantage": {"scale": "group"},
        "objective": {"kl_coef": 0.04, "kl_estimator": "k3", "aggregation": "row_mean"}},
    # 512 prompts of 16, mini-batches of 512 answers: 16 updates; sec. 4.1. Ten draws in all: max_num_gen_batches
    "dapo": {"group_size": 16, "num_states_per_iteration": 512, "batch_size": 512, "learning_rate": 1e-6,
        "dynamic_sampling_rounds": 9, "advantage": {"scale": "group"},
        "objective": {"surrogate": {"low": 0.2, "high": 0.28}, "kl_coef": 0.0, "aggregation": "step_mean"}},
    # 128 questions of 8, mini-batches of 128 answers: 8 updates; generate_max_length=3000
    "dr_grpo": {"group_size": 8, "num_states_per_iteration": 128, "batch_size": 128, "learning_rate": 1e-6,
        "advantage": {"scale": "none"}, "objective": {"kl_coef": 0.0, "aggregation": "fixed_length", "fixed_length": 3000}},
    # 512 x 16 / 4 = 2048 rows per update; the clip of sec. 5.1
    "gspo": {"group_size": 16, "num_states_per_iteration": 512, "batch_size": 2048, "learning_rate": 1e-6,
        "advantage": {"scale": "group"},
        "objective": {"surrogate": {"low": 3e-4, "high": 4e-4, "level": "row"}, "kl_coef": 0.0}},
    # no lower bound (1 - 1 = 0), and 1 + 4 = 5 above
    "cispo": {"group_size": 16, "num_states_per_iteration": 512, "batch_size": 512, "learning_rate": 1e-6,
        "dynamic_sampling_rounds": 9, "advantage": {"scale": "group"},
        "objective": {"surrogate": {"kind": "cispo", "low": 1.0, "high": 4.0, "level": "step"},
                      "kl_coef": 0.0, "aggregation": "step_mean"}},
    "sapo": {"group_size": 16, "num_states_per_iteration": 512, "batch_size": 2048, "learning_rate": 1e-6,
        "advantage": {"scale": "group"},
        "objective": {"surrogate": {"kind": "sapo", "temperature_pos": 1.0, "temperature_neg": 1.05, "level": "step"},
                      "kl_coef": 0.0, "aggregation": "row_mean"}},
    # cliprange 0.4 is that of the log-ratio: exp(-0.4) = 0.6703 and exp(0.4) = 1.4918
    "gmpo": {"group_size": 8, "num_states_per_iteration": 128, "batch_size": 128, "learning_rate": 1e-6,
        "advantage": {"scale": "group"},
        "objective": {"surrogate": {"kind": "gmpo", "low": pytest.approx(0.32967995, abs=1e-8),
                                    "high": pytest.approx(0.49182470, abs=1e-8)},
                      "kl_coef": 0.0, "aggregation": "row_mean"}},
    # k = 4; beta 0.03 is that of TL;DR
    "rloo": {"group_size": 4, "learning_rate": 1e-6, "advantage": {"baseline": "leave_one_out", "scale": "none"},
        "objective": {"surrogate": {"kind": "reinforce"}, "kl_coef": 0.03, "kl_estimator": "k2", "aggregation": "row_sum"}},
    # train_reinforce_baseline_hybrid_engine.sh of OpenRLHF
    "reinforce_plus_plus_baseline": {"group_size": 8, "num_states_per_iteration": 128, "learning_rate": 5e-7,
        "advantage": {"baseline": "group_mean", "scale": "whiten"},
        "objective": {"kl_coef": 1e-5, "kl_estimator": "k2", "aggregation": "row_mean"}},
    # F_norm = 1, alpha = B / (B - M)
    "gpg": {"group_size": 8, "learning_rate": 1e-6, "advantage": {"scale": "none", "upweight_live_groups": True},
        "objective": {"surrogate": {"kind": "reinforce"}, "kl_coef": 0.0, "aggregation": "step_mean"}},
    # run_qwen3_training.sh: one update of 256 prompts
    "maxrl": {"group_size": 16, "num_states_per_iteration": 256, "learning_rate": 1e-6, "max_grad_norm": 0.3,
        "advantage": {"scale": "mean", "std_eps": 1e-6},
        "objective": {"surrogate": {"low": 0.2, "high": 0.2}, "kl_coef": 0.0, "aggregation": "step_mean"}},
    # recipe/bnpo/run.sh: seq-mean-token-sum
    "bnpo": {"group_size": 16, "num_states_per_iteration": 32, "learning_rate": 1e-6, "advantage": {"scale": "beta"},
        "objective": {"surrogate": {"high": 0.28, "dual": 10.0}, "kl_coef": 0.0, "aggregation": "row_sum"}},
    # algorithm 1 with lambda = 1: all outputs are the student's; k2 has the gradient of the reverse KL, beta = 1
    "on_policy_distillation": {"group_size": 4, "learning_rate": 1e-6,
        "objective": {"kl_coef": 1.0, "kl_estimator": "k2", "aggregation": "step_mean"}},
    "tool_default": TOOLS,
    "tool_use": merged(TOOLS, {"group_size": 4, "batch_size": 16, "num_epochs_per_update": 2, "learning_rate": 5e-6,
        "kl_control": {"target": 0.02},
        "objective": {"surrogate": {"low": 0.15, "high": 0.15}, "kl_coef": 0.05, "entropy_coef": 0.005}}),
    "tool_exploration": merged(TOOLS, {
        "objective": {"surrogate": {"low": 0.3, "high": 0.3}, "kl_coef": 0.01, "entropy_coef": 0.05}}),
    "tool_stable": merged(TOOLS, {"num_epochs_per_update": 2, "learning_rate": 1e-6,
        "objective": {"surrogate": {"low": 0.1, "high": 0.1}, "kl_coef": 0.1}}),
    # accumulation over 8, 4 and 2 groups: rows per update = groups x group size, one group per forward
    "conservative": merged(CONVERSATIONS, {"group_size": 32, "batch_size": 256, "micro_batch_size": 32,
        "learning_rate": 1e-6, "max_grad_norm": 0.5, "warmup_ratio": 0.2}),
    "balanced": merged(CONVERSATIONS, {"group_size": 16, "batch_size": 64, "micro_batch_size": 16,
        "learning_rate": 5e-6, "max_grad_norm": 1.0, "warmup_ratio": 0.1}),
    "aggressive": merged(CONVERSATIONS, {"group_size": 8, "batch_size": 16, "micro_batch_size": 8,
        "learning_rate": 1e-5, "max_grad_norm": 2.0, "warmup_ratio": 0.05}),
}  # fmt: skip
"""What each source says, and what stands for what it does not say; all else is at its default."""

LEFT_ALONE: dict[str, Any] = {
    "num_epochs_per_update": 1, "num_states_per_iteration": None, "batch_size": None, "micro_batch_size": None,
    "lr_schedule": "constant", "warmup_ratio": 0.0, "max_grad_norm": 1.0, "autocast_dtype": None,
    "compile_objective": False, "kl_control": None, "entropy_control": None, "reference_sync_every": None,
    "dynamic_sampling_rounds": 0, "replay_iterations": 0, "iterations_ahead": 0,
    "advantage": {
        "credit": None, "baseline": "group_mean", "scale": "none", "std_ddof": 1, "std_eps": 0.0,
        "several_rewards": "sum", "gamma": 1.0, "upweight_live_groups": False, "positive_weight": 1.0,
        "negative_only": False, "clip": None, "reward_clip": None, "normalize_rewards": False,
    },
    "objective": {
        "surrogate": {"kind": "clip", "low": 0.2, "high": 0.2, "delta": None, "dual": None, "level": "step"},
        "top_entropy_fraction": 1.0, "off_policy_threshold": None, "sampler_correction": None, "kl_estimator": "k3",
        "entropy_coef": 0.0, "entropy_estimator": "exact", "entropy_aggregation": None, "aggregation": "row_mean",
    },
}  # fmt: skip
"""Defaults that the sources agree with, or do not speak of: a change of one of them would be a change of every preset."""


def test_every_preset_is_in_the_table() -> None:
    assert set(SAID) == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_sets_exactly_the_values_of_its_source(name: Any) -> None:
    assert PRESETS[name]().to_dict() == merged(GRPOConfig().to_dict(), SAID[name])


def test_the_defaults_that_presets_rely_on_are_unchanged() -> None:
    defaults = GRPOConfig().to_dict()
    assert merged(defaults, LEFT_ALONE) == defaults


def test_dr_grpo_divides_by_the_given_length() -> None:
    changed = dataclasses.replace(presets.dr_grpo().objective, fixed_length=8)
    assert presets.dr_grpo(max_length=8) == dataclasses.replace(presets.dr_grpo(), objective=changed)
