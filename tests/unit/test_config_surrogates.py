"""Surrogates and sampler corrections as settings of `ObjectiveConfig`: names, objects, dicts, and a user's own."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import torch

from grpo import ConfigError, GRPOConfig, KPop, Mask, ObjectiveConfig, Truncate
from grpo.config import CORRECTIONS, SURROGATES
from grpo.surrogates import Cispo, Clip, ClipCov, Dppo, Dro, Gmpo, KlCov, Sapo, Steps, Vespo
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


@pytest.mark.parametrize(("place", "name", "kind"), CHOICES)
def test_an_unknown_key_inside_a_surrogate_or_a_correction_is_refused(place, name, kind):
    with pytest.raises(ConfigError, match=rf"{kind.__name__} has no setting 'clip_low'"):
        GRPOConfig.from_dict({"objective": {place: {"kind": name, "clip_low": 0.1}}})
    with pytest.raises(TypeError, match="clip_low"):
        kind(clip_low=0.1)
