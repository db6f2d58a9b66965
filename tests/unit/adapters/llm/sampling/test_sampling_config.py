import json

import pytest

from adapters.llm import SamplingConfig
from grpo.errors import ConfigError

OUT_OF_BOUNDS = [
    ("max_new_tokens", 0, ">= 1"),
    ("min_new_tokens", -1, ">= 0"),
    ("temperature", -0.1, ">= 0"),
    ("top_k", 0, ">= 1"),
    ("top_p", 0.0, "> 0"),
    ("top_p", 1.1, "<= 1"),
    ("min_p", -0.1, ">= 0"),
    ("min_p", 1.5, "<= 1"),
    ("xtc_probability", 1.5, "<= 1"),
    ("xtc_threshold", 0.0, "> 0"),
    ("xtc_threshold", 0.6, "<= 0.5"),
    ("repetition_penalty", 0.0, "> 0"),
    ("stop", ["a"], "tuple"),
    ("stop", "a", "tuple"),
    ("temperature", float("nan"), "finite"),
]


def test_a_value_out_of_bounds_is_named(subtests: pytest.Subtests) -> None:
    for setting, value, bound in OUT_OF_BOUNDS:
        message = rf"SamplingConfig\.{setting} must be .*{bound}"
        with subtests.test(setting=setting), pytest.raises(ConfigError, match=message):
            SamplingConfig(**{setting: value})


def test_the_minimum_of_tokens_cannot_exceed_the_maximum() -> None:
    assert SamplingConfig(min_new_tokens=4, max_new_tokens=4).min_new_tokens == 4
    with pytest.raises(ConfigError, match=r"min_new_tokens must be at most max_new_tokens=3; got 4"):
        SamplingConfig(min_new_tokens=4, max_new_tokens=3)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ConfigError, match="empty string"):
        SamplingConfig(stop=("###", ""))


EXACT = [
    ({}, True),
    ({"temperature": 0.7}, True),
    ({"stop": ("a",)}, True),  # it ends completions, and changes no distribution
    ({"xtc_threshold": 0.3}, True),  # XTC is off
    ({"temperature": 0.0}, False),
    ({"min_new_tokens": 1}, False),
    ({"top_k": 10**6}, False),
    ({"top_p": 0.99}, False),
    ({"min_p": 0.01}, False),
    ({"xtc_probability": 0.1}, False),
    ({"repetition_penalty": 1.1}, False),
]


def test_tokens_are_drawn_from_the_policy_if_only_a_positive_temperature_is_set(subtests: pytest.Subtests) -> None:
    for changes, is_exact in EXACT:
        with subtests.test(changes=changes):
            assert SamplingConfig(**changes).is_exact is is_exact


def test_the_scoring_temperature_is_the_temperature_or_1_for_temperature_0() -> None:
    assert SamplingConfig(temperature=0.7).scoring_temperature == 0.7
    assert SamplingConfig(temperature=0).scoring_temperature == 1.0


def test_settings_survive_json() -> None:
    config = SamplingConfig(stop=("\n", "###"), top_k=5, temperature=0.5)
    assert SamplingConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
