"""Requests to vLLM and its answers, without vLLM."""

import importlib.util
from typing import Any

import pytest

from adapters.llm.sampling.samplers import RowLimit, SamplerError
from adapters.llm.sampling.sampling_config import SamplingConfig
from adapters.llm.sampling.vllm_engine import VLLMSampler
from adapters.llm.sampling.vllm_requests import Answer, request_settings, require_room, row_settings, sampled_tokens
from grpo.errors import ConfigError


def test_every_setting_is_sent_under_the_name_that_vllm_uses() -> None:
    config = SamplingConfig(
        max_new_tokens=9,
        min_new_tokens=2,
        temperature=0.7,
        top_k=5,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.2,
        stop=("\n", "###"),
    )
    assert request_settings(config, (1, 7)) == {
        "temperature": 0.7,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "max_tokens": 9,
        "min_tokens": 2,
        "stop": ["\n", "###"],
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "stop_token_ids": [1, 7],
        "ignore_eos": True,
        "logprobs": 0,
    }
    assert request_settings(SamplingConfig(), ())["top_k"] == 0  # 0 means all tokens in vLLM


def test_settings_that_vllm_does_not_support_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"vLLM does not support XTC; got SamplingConfig\.xtc_probability=0\.5"):
        request_settings(SamplingConfig(xtc_probability=0.5), ())
    with pytest.raises(ConfigError, match=r"at most 2; got SamplingConfig\.temperature=2\.5"):
        request_settings(SamplingConfig(temperature=2.5), ())


def test_prompt_and_completion_must_fit() -> None:
    config = SamplingConfig(max_new_tokens=6)
    settings = row_settings(config, [], None, 2)
    require_room([[1] * 4], settings, 10)
    with pytest.raises(ConfigError, match=r"at most 10 tokens .*; prompt 1 has 5, and .*max_new_tokens=6"):
        require_room([[1] * 4, [1] * 5], settings, 10)
    limits = [RowLimit(max_new_tokens=number, stop=stop) for number, stop in ((6, ()), (5, ("a",)))]
    shorter = row_settings(config, [], limits, 2)
    require_room([[1] * 4, [1] * 5], shorter, 10)  # each row with its own limit
    assert [(own["max_tokens"], own["stop"], own["detokenize"]) for own in shorter] == [
        (6, [], False),
        (5, ["a"], True),
    ]


def answer(**changes: Any) -> Answer:
    values = {"token_ids": (4, 1), "log_probs": (-0.5, -0.25), "finish_reason": "stop", "stop_reason": None}
    return Answer(**(values | changes))


def test_answers_are_converted_to_samples() -> None:
    sampled = sampled_tokens(
        [answer(), answer(stop_reason=1), answer(stop_reason="###"), answer(finish_reason="length")], SamplingConfig()
    )
    assert sampled.finish_reasons == ["end", "end", "stop", "length"]
    assert sampled.token_ids == [[4, 1]] * 4
    assert sampled.behaviour_log_probs == [[-0.5, -0.25]] * 4
    assert sampled.policy_log_probs is None


def test_the_log_probs_of_greedy_sampling_are_0() -> None:
    assert sampled_tokens([answer()], SamplingConfig(temperature=0.0)).behaviour_log_probs == [[0.0, 0.0]]


INCOMPLETE = [
    ({"finish_reason": "abort"}, "row 1 ended with 'abort' after 2 tokens"),
    ({"finish_reason": None}, "row 1 ended with None"),
    ({"log_probs": (-0.5,)}, "one log-prob per token; row 1 has 1 for 2 tokens"),
]


def test_an_incomplete_answer_is_refused(subtests: pytest.Subtests) -> None:
    for changes, message in INCOMPLETE:
        with subtests.test(changes=changes), pytest.raises(SamplerError, match=message):
            sampled_tokens([answer(), answer(**changes)], SamplingConfig())


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_error_says_what_to_install() -> None:
    with pytest.raises(ImportError, match=r'pip install "\.\[vllm\]" in the checkout, in an environment of its own'):
        VLLMSampler("Qwen/Qwen3-0.6B")


def test_an_engine_of_several_processes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"one device; got \{'tensor_parallel_size': 2\}.*VLLMServerSampler"):
        VLLMSampler("Qwen/Qwen3-0.6B", tensor_parallel_size=2, pipeline_parallel_size=1)
