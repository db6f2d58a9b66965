"""`VLLMServerSampler` over HTTP, with a small server that imitates vLLM and records the requests."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from adapters.llm.sampling import vllm_server
from adapters.llm.sampling.sampling_config import SamplingConfig
from adapters.llm.sampling.vllm_http import VLLMServer
from adapters.llm.sampling.vllm_requests import SamplerError
from adapters.llm.sampling.vllm_server import VLLMServerSampler
from grpo.errors import ConfigError, GRPOWarning

CONFIG = SamplingConfig(max_new_tokens=4)


class Stand:
    """The answers of the small server, and the requests that it received."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, Any]] = []
        self.logprobs_mode = "processed_logprobs"
        self.has_development_mode = True
        self.can_forget = True
        self.version = "default"
        self.to_drop = 0
        self.delay = 0.0

    def reply(self, path: str, body: Any) -> tuple[int, Any]:
        self.heard.append((path, body))
        time.sleep(self.delay)
        if path == "/v1/completions":
            if body["seed"] == 666:
                return 400, {"error": {"message": "a bad number"}}
            choice = {
                "token_ids": [body["seed"], 1],
                "logprobs": {"token_logprobs": [-float(body["seed"]), -0.5]},
                "finish_reason": "stop",
                "stop_reason": 1,
            }
            return 200, {"choices": [choice]}
        if not self.has_development_mode:
            return 404, {"detail": "Not Found"}
        match path:
            case "/server_info?config_format=json":
                settings = {"logprobs_mode": self.logprobs_mode, "max_model_len": 16}
                return 200, {"vllm_config": {"model_config": settings}}
            case "/collective_rpc":
                return 200, {"results": [None]}
            case "/reset_prefix_cache":
                return 200, {"success": self.can_forget}
            case "/update_weight_version":
                self.version = body["new_version"]
                return 200, {"success": True}
            case "/weight_info":
                return 200, {"weight_version": self.version}
        return 404, {}


@pytest.fixture
def stand() -> Iterator[tuple[Stand, str]]:
    """The small server and its address."""
    state = Stand()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
            if state.to_drop > 0:
                state.to_drop -= 1
                self.close_connection = True
                return
            code, answer = state.reply(self.path, body)
            data = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # the client may have closed the connection
                self.wfile.write(data)

        def log_message(self, *parts: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield state, f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replaces the waits between retries by a list of their seconds."""
    waited: list[float] = []
    monkeypatch.setattr("adapters.llm.sampling.vllm_http.time", SimpleNamespace(sleep=waited.append))
    return waited


@pytest.fixture
def plain_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces `merged_weights`, which has its own tests, by the parameters of any module."""
    monkeypatch.setattr(vllm_server, "merged_weights", lambda model: model.named_parameters(remove_duplicate=False))


def test_every_row_is_a_request_with_its_own_seed(stand: tuple[Stand, str], tmp_path: Path) -> None:
    state, url = stand
    sampler = VLLMServerSampler(url, weights_folder=tmp_path)
    sampled = sampler.sample([[7, 8], [9]], 2, CONFIG, end_token_ids=[1], seeds=[20, 21, 22, 23])
    # the server answers with the seed, so this shows that rows keep their order
    assert sampled.token_ids == [[20, 1], [21, 1], [22, 1], [23, 1]]
    assert sampled.behaviour_log_probs == [[-20.0, -0.5], [-21.0, -0.5], [-22.0, -0.5], [-23.0, -0.5]]
    assert sampled.finish_reasons == ["end"] * 4
    bodies = [body for path, body in state.heard if path == "/v1/completions"]
    prompts = {body["seed"]: body["prompt"] for body in bodies}
    assert prompts == {20: [7, 8], 21: [7, 8], 22: [9], 23: [9]}
    assert all(body["return_token_ids"] and body["stop_token_ids"] == [1] for body in bodies)


@pytest.mark.usefixtures("plain_weights")
def test_weights_are_sent_in_a_folder_and_the_prefix_cache_is_cleared(stand: tuple[Stand, str], tmp_path: Path) -> None:
    state, url = stand
    model = nn.Linear(2, 1)
    model.tied = model.weight
    folder = tmp_path / "weights"
    sampler = VLLMServerSampler(url, weights_folder=folder)
    sampler.sync(model)
    assert [path.name for path in folder.iterdir()] == ["model.safetensors"]
    written = load_file(folder / "model.safetensors")
    assert written.keys() == {"weight", "bias", "tied"}
    assert torch.equal(written["tied"], model.weight)
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    assert [path for path, _ in state.heard] == [
        "/server_info?config_format=json",
        "/collective_rpc",
        "/reset_prefix_cache",
        "/update_weight_version",
    ]
    assert state.heard[1][1] == reload
    sampler.sample([[7]], 1, CONFIG, end_token_ids=[1], seeds=[20])

    state.version = "default"  # as after a restart
    with pytest.raises(SamplerError, match="no longer has the weights of the last sync"):
        sampler.sample([[7]], 1, CONFIG, end_token_ids=[1], seeds=[20])


@pytest.mark.usefixtures("plain_weights")
def test_a_server_that_cannot_clear_its_cache_is_refused(stand: tuple[Stand, str], tmp_path: Path) -> None:
    state, url = stand
    state.can_forget = False
    with pytest.raises(SamplerError, match="requests of other clients are running on it"):
        VLLMServerSampler(url, weights_folder=tmp_path).sync(nn.Linear(1, 1))


def test_a_server_with_raw_log_probs_is_refused(stand: tuple[Stand, str], tmp_path: Path) -> None:
    state, url = stand
    state.logprobs_mode = "raw_logprobs"
    with pytest.raises(
        ConfigError, match=r"it reports raw_logprobs. Start it with .*--logprobs-mode processed_logprobs"
    ):
        VLLMServerSampler(url, weights_folder=tmp_path).sample([[7]], 1, CONFIG, end_token_ids=[1], seeds=[1])


def test_a_server_without_development_mode_is_refused(stand: tuple[Stand, str], tmp_path: Path) -> None:
    state, url = stand
    state.has_development_mode = False
    with pytest.raises(SamplerError, match=r"has no /server_info.*VLLM_SERVER_DEV_MODE=1 vllm serve"):
        VLLMServerSampler(url, weights_folder=tmp_path).sample([[7]], 1, CONFIG, end_token_ids=[1], seeds=[1])


def test_a_prompt_that_is_too_long_is_named(stand: tuple[Stand, str], tmp_path: Path) -> None:
    _, url = stand
    sampler = VLLMServerSampler(url, weights_folder=tmp_path)
    with pytest.raises(ConfigError, match=r"at most 16 tokens .*; prompt 1 has 13"):
        sampler.sample([[7], [7] * 13], 1, CONFIG, end_token_ids=[1], seeds=[1, 2])


def test_the_error_has_the_message_of_the_server(stand: tuple[Stand, str], tmp_path: Path) -> None:
    _, url = stand
    sampler = VLLMServerSampler(url, weights_folder=tmp_path)
    with pytest.raises(SamplerError, match=r"/v1/completions with 400: .*a bad number"):
        sampler.sample([[7]], 2, CONFIG, end_token_ids=[1], seeds=[1, 666])


def test_a_lost_connection_is_retried_with_a_warning(stand: tuple[Stand, str], impatient: list[float]) -> None:
    state, url = stand
    state.to_drop = 2
    with pytest.warns(GRPOWarning, match=r"failed .*; retrying") as said:
        assert VLLMServer(url, timeout=10).get("/weight_info") == {"weight_version": "default"}
    assert len(said) == 2
    assert impatient == [0.5, 1.0]


@pytest.mark.filterwarnings("ignore:VLLMServerSampler. the connection to the vLLM server")
def test_the_error_for_a_missing_server_says_how_to_start_it(impatient: list[float]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, but not listening
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(
            SamplerError, match=rf"no vLLM server answers at {url} .*after 5 attempts. Start one: VLLM_SER"
        ):
            VLLMServer(url, timeout=10).get("/health")
    assert impatient == [0.5, 1.0, 2.0, 4.0]


def test_a_request_that_times_out_is_not_repeated(stand: tuple[Stand, str]) -> None:
    state, url = stand
    state.delay = 0.5
    with pytest.raises(SamplerError, match=r"did not answer /weight_info within 0\.1 s. Raise timeout"):
        VLLMServer(url, timeout=0.1).get("/weight_info")
    assert len(state.heard) == 1


def test_an_address_that_is_not_http_is_refused(subtests: pytest.Subtests, tmp_path: Path) -> None:
    for address in ["localhost:8000", "file:///etc/hosts"]:
        message = "must begin with http:// or https://; got"
        with subtests.test(address=address), pytest.raises(ConfigError, match=message):
            VLLMServerSampler(address, weights_folder=tmp_path)


def test_the_address_may_end_in_v1() -> None:
    assert VLLMServer("http://localhost:8000/v1/", timeout=1).base_url == "http://localhost:8000"
