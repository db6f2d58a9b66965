"""`VLLMServerSampler` with one server, over HTTP, with a small server that imitates vLLM and records the requests."""

import importlib.util
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from adapters.llm.sampling import vllm_server
from adapters.llm.sampling.samplers import RowLimit, SamplerError
from adapters.llm.sampling.sampling_config import SamplingConfig
from adapters.llm.sampling.vllm_engine import VLLMSampler
from adapters.llm.sampling.vllm_requests import Answer, request_settings, require_room, row_settings, sampled_tokens
from adapters.llm.sampling.vllm_server import VLLMServerSampler
from adapters.llm.sampling.vllm_worker import VLLMWorker
from grpo.errors import ConfigError, GRPOWarning
from tests.support.reward_faults import eventually
from tests.support.vllm_stand import Stand, running_stand

CONFIG = SamplingConfig(max_new_tokens=4)


@pytest.fixture
def stand() -> Iterator[Stand]:
    with running_stand() as stand:
        yield stand


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits, and the parameters of any module in place of `merged_weights`, which has its own tests."""
    monkeypatch.setattr("adapters.llm.sampling.vllm_worker.FIRST_WAIT", 0.01)
    monkeypatch.setattr(vllm_server, "merged_weights", lambda model: model.named_parameters(remove_duplicate=False))


def sample(sampler: VLLMServerSampler, *seeds: int) -> Any:
    return sampler.sample([[7]], len(seeds), CONFIG, end_token_ids=[1], seeds=seeds)


def test_every_row_is_a_request_with_its_own_seed(stand: Stand, tmp_path: Path) -> None:
    sampler = VLLMServerSampler(stand.url, weights_folder=tmp_path)
    sampled = sampler.sample([[7, 8], [9]], 2, CONFIG, end_token_ids=[1], seeds=[20, 21, 22, 23])
    # the server answers with the seed, so this shows that rows keep their order
    assert sampled.token_ids == [[20, 1], [21, 1], [22, 1], [23, 1]]
    assert sampled.behaviour_log_probs == [[0.0, 0.0]] * 4
    assert sampled.finish_reasons == ["end"] * 4
    bodies = [body for path, body in stand.heard if path == "/inference/v1/generate"]
    assert {body["sampling_params"]["seed"]: body["token_ids"] for body in bodies} == {
        20: [7, 8], 21: [7, 8], 22: [9], 23: [9],
    }  # fmt: skip
    settings = bodies[0]["sampling_params"]
    assert settings["stop_token_ids"] == [1]
    assert settings["max_tokens"] == 4
    assert settings["detokenize"] is False
    stopping = SamplingConfig(max_new_tokens=4, stop=("x",))
    sampler.sample([[7]], 1, stopping, end_token_ids=[1], seeds=[1])
    assert stand.heard[-1][1]["sampling_params"]["detokenize"] is True


def test_weights_are_sent_in_a_folder_while_no_request_runs(stand: Stand, tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    model.tied = model.weight
    folder = tmp_path / "weights"
    sampler = VLLMServerSampler(stand.url, weights_folder=folder)
    sampler.sync(model)
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    written = load_file(folder / "model.safetensors")
    assert written.keys() == {"weight", "bias", "tied"}
    assert torch.equal(written["tied"], model.weight)
    assert stand.paths() == [
        "/server_info?config_format=json", "/update_weight_version", "/pause?mode=wait", "/collective_rpc",
        "/reset_prefix_cache", "/update_weight_version", "/resume",
    ]  # fmt: skip
    assert stand.heard[3][1] == {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    while_loading, version = (body["new_version"] for path, body in stand.heard if path == "/update_weight_version")
    assert while_loading == f"{version} is loaded by rank 0"
    sampled = sample(sampler, 20)
    expected = -sum(float(value.sum()) for value in written.values())
    assert sampled.behaviour_log_probs[0] == pytest.approx([expected] * 2)

    sampler.sync(model)
    assert version.endswith(".1")
    assert stand.version == version.removesuffix("1") + "2"


def test_weights_of_another_client_are_an_error(stand: Stand, tmp_path: Path) -> None:
    sampler = VLLMServerSampler(stand.url, weights_folder=tmp_path)
    sampler.sync(nn.Linear(1, 1))
    stand.version = "mine"
    with pytest.raises(SamplerError, match="no longer has the weights of the last sync: another client changed them"):
        sample(sampler, 20)


def test_a_server_that_cannot_clear_its_cache_is_refused(stand: Stand, tmp_path: Path) -> None:
    stand.can_forget = False
    with pytest.raises(SamplerError, match="requests of other clients are running on it"):
        VLLMServerSampler(stand.url, weights_folder=tmp_path).sync(nn.Linear(1, 1))
    assert stand.version.endswith("is loaded by rank 0")  # not the version of complete weights


WITHOUT_OPTION = r"VLLM_SERVER_DEV_MODE=1 .*--enable-scale-out"
RAW = r"it reports raw_logprobs. Start it with .*--logprobs-mode processed_logprobs"


@pytest.mark.parametrize(("server", "prompt", "error", "message"), [
    ({"options": {"logprobs_mode": "raw_logprobs"}}, [7], ConfigError, RAW),
    ({"has_development_mode": False}, [7], SamplerError, rf"/weight_info with 40\d.*{WITHOUT_OPTION}"),
    ({"has_scale_out": False}, [7], SamplerError, rf"/inference/v1/generate with 40\d.*{WITHOUT_OPTION}"),
    ({}, [7] * 13, ConfigError, r"at most 16 tokens .*; prompt 1 has 13"),
    ({}, [666], SamplerError, r"/inference/v1/generate with 400: .*Token id 666 is out of vocabulary"),
])  # fmt: skip
def test_what_a_server_cannot_sample_is_refused_with_what_helps(
    stand: Stand, tmp_path: Path, server: dict[str, Any], prompt: list[int], error: type[Exception], message: str
) -> None:
    stand.options.update(server.pop("options", {}))
    for name, value in server.items():
        setattr(stand, name, value)
    sampler = VLLMServerSampler(stand.url, weights_folder=tmp_path)
    with pytest.raises(error, match=message):
        sampler.sample([[7], prompt], 1, CONFIG, end_token_ids=[1], seeds=[1, 2])


def test_a_lost_connection_is_retried_with_a_warning(stand: Stand) -> None:
    stand.to_drop = 2
    with pytest.warns(GRPOWarning, match=r"failed .*; retrying") as said:
        assert VLLMWorker(stand.url, timeout=10).get("/weight_info") == {"weight_version": "default"}
    assert len(said) == 2


@pytest.mark.filterwarnings("ignore:VLLMServerSampler. the connection to the vLLM server")
def test_a_missing_server_is_awaited_and_the_error_says_how_to_start_it() -> None:
    """The waits are 1, 2, 4 and 8 hundredths of a second."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, but not listening
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        message = rf"no vLLM server answers at {url} .*after 5 attempts. Start one: VLLM_SER"
        with pytest.raises(SamplerError, match=message):
            VLLMWorker(url, timeout=10).get("/health")


@pytest.fixture
def hangs(stand: Stand) -> Iterator[Callable[[str], None]]:
    """Lets the server answer one path never, as long as the test runs."""
    answer, has_ended = stand.answer, threading.Event()

    def hang_at(hanging: str) -> None:
        def hang(path: str, body: Any) -> Any:
            if path != hanging:
                return answer(path, body)
            stand.heard.append((path, body))
            has_ended.wait()
            return None

        stand.answer = hang  # type: ignore[method-assign]

    yield hang_at
    has_ended.set()


def test_a_request_that_times_out_is_not_repeated(stand: Stand, hangs: Callable[[str], None]) -> None:
    hangs("/weight_info")
    with pytest.raises(SamplerError, match=r"did not answer /weight_info within 0\.1 s. Raise timeout"):
        VLLMWorker(stand.url, timeout=0.1).get("/weight_info")
    eventually(lambda: stand.heard != [], "the server has read the request")
    assert stand.paths() == ["/weight_info"]


def test_a_slow_server_that_runs_is_not_lost(stand: Stand, hangs: Callable[[str], None], tmp_path: Path) -> None:
    """To repeat the request would take as long again."""
    sampler = VLLMServerSampler(stand.url, weights_folder=tmp_path)
    sample(sampler, 1)
    hangs("/inference/v1/generate")
    sampler._workers[0]._timeout = 0.1  # only the request that hangs has a short limit
    with pytest.raises(SamplerError, match=r"did not answer /inference/v1/generate within 0\.1 s. Raise timeout"):
        sample(sampler, 1)
    eventually(lambda: stand.paths().count("/inference/v1/generate") > 1, "the server has read the request")
    assert stand.paths().count("/inference/v1/generate") == 2


def test_bad_arguments_are_refused(subtests: pytest.Subtests, tmp_path: Path) -> None:
    url = "http://localhost:8000"
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ("localhost:8000", {}, "must begin with http:// or https://; got"),
        ("file:///etc/hosts", {}, "must begin with http:// or https://; got"), (3, {}, "base_url must begin with http"),
        ([], {}, "at least one server"), ([url, f"{url}/v1"], {}, "at least one server, each once"),
        (url, {"timeout": 0}, "timeout must be a number of seconds above 0"),
        (url, {"timeout": "1"}, "timeout must be a number of seconds"),
        (url, {"weights_folder": None}, "weights_folder must be a path"),
        (url, {"restart_timeout": -1}, "restart_timeout must be a number of seconds of at least 0; got -1"),
        (url, {"restart_timeout": float("inf")}, "restart_timeout must be"),
        (url, {"max_concurrency": 0}, "max_concurrency an integer of at least 1"),
    ]  # fmt: skip
    for address, options, message in cases:
        with subtests.test(address=address, **options), pytest.raises(ConfigError, match=message):
            VLLMServerSampler(address, **{"weights_folder": tmp_path} | options)


def test_the_address_may_end_in_v1() -> None:
    assert VLLMWorker("http://localhost:8000/v1/", timeout=1).url == "http://localhost:8000"


# --- requests to vLLM and its answers, without vLLM


def test_every_setting_is_sent_under_the_name_that_vllm_uses() -> None:
    config = SamplingConfig(
        max_new_tokens=9, min_new_tokens=2, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.2,
        stop=("\n", "###"),
    )  # fmt: skip
    assert request_settings(config, (1, 7)) == {
        "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2, "max_tokens": 9,
        "min_tokens": 2, "stop": ["\n", "###"], "include_stop_str_in_output": True, "skip_special_tokens": False,
        "stop_token_ids": [1, 7], "ignore_eos": True, "logprobs": 0,
    }  # fmt: skip
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
    found = [(own["max_tokens"], own["stop"], own["detokenize"]) for own in shorter]
    assert found == [(6, [], False), (5, ["a"], True)]


def answer(**changes: Any) -> Answer:
    values = {"token_ids": (4, 1), "log_probs": (-0.5, -0.25), "finish_reason": "stop", "stop_reason": None}
    return Answer(**(values | changes))


def test_answers_are_converted_to_samples() -> None:
    answers = [answer(), answer(stop_reason=1), answer(stop_reason="###"), answer(finish_reason="length")]
    sampled = sampled_tokens(answers, SamplingConfig())
    assert sampled.finish_reasons == ["end", "end", "stop", "length"]
    assert sampled.token_ids == [[4, 1]] * 4
    assert sampled.behaviour_log_probs == [[-0.5, -0.25]] * 4
    assert sampled.policy_log_probs is None
    greedy = sampled_tokens([answer()], SamplingConfig(temperature=0.0))
    assert greedy.behaviour_log_probs == [[0.0, 0.0]]


INCOMPLETE = [
    ({"finish_reason": "abort"}, "row 1 ended with 'abort' after 2 tokens"),
    ({"finish_reason": None}, "row 1 ended with None"),
    ({"log_probs": (-0.5,)}, "one log-prob per token; row 1 has 1 for 2 tokens"),
]


@pytest.mark.parametrize(("changes", "message"), INCOMPLETE)
def test_an_incomplete_answer_is_refused(changes: Any, message: Any) -> None:
    with pytest.raises(SamplerError, match=message):
        sampled_tokens([answer(), answer(**changes)], SamplingConfig())


@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_the_error_says_what_to_install() -> None:
    with pytest.raises(ImportError, match=r'pip install "\.\[vllm\]" in the checkout, in an environment of its own'):
        VLLMSampler("Qwen/Qwen3-0.6B")


def test_an_engine_of_several_processes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"one device; got \{'tensor_parallel_size': 2\}.*VLLMServerSampler"):
        VLLMSampler("Qwen/Qwen3-0.6B", tensor_parallel_size=2, pipeline_parallel_size=1)
