"""A tiny model in a folder, and two vLLM samplers: an engine in this process, and servers."""

import contextlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CALL = '<tool_call>{"name":"lookup","arguments":{}}</tool_call>'
"""A whole tool call as one word, so that a model with random weights makes some."""
VOCABULARY = ["<pad>", "<eos>", *(f"w{number}" for number in range(30)), "user", "assistant", "tool", CALL]
CHAT = (
    "{% for m in messages %}{{ m.role }} {{ m.content }}"
    "{% for call in m.tool_calls or [] %} {{ call.function | tojson }}{% endfor %} <eos> {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
MAX_LENGTH = 256
SERVER = (
    f"-m vllm.entrypoints.openai.api_server --host 127.0.0.1 --dtype float32 --enforce-eager "
    f"--max-model-len {MAX_LENGTH} --logprobs-mode processed_logprobs --enable-scale-out"
)

if importlib.util.find_spec("vllm"):  # vLLM reads them when it is imported
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 model with two layers and tied embeddings, and a tokenizer of 36 words with a chat template."""
    path = tmp_path_factory.mktemp("model")
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>")
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    shape = {
        "vocab_size": len(VOCABULARY),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "head_dim": 32,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    config = Qwen3Config(
        **shape, **heads, initializer_range=0.2, max_position_embeddings=MAX_LENGTH, eos_token_id=1, bos_token_id=None
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


@pytest.fixture
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="session")
def engine(folder: Path) -> Any:
    from adapters.llm.sampling.vllm_engine import VLLMSampler

    before = torch.get_rng_state()
    sampler = VLLMSampler(folder, dtype="float32", enforce_eager=True, max_model_len=MAX_LENGTH)
    assert torch.equal(before, torch.get_rng_state())  # vLLM seeds the generators, and the sampler must restore them
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in os.environ
    return sampler


class RunningServer:
    """A vLLM server in a process group of its own, which can be killed and started again at the same address."""

    def __init__(self, model: Path, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._model, self._log = model, log
        self.start()

    def start(self) -> None:
        with self._log.open("a") as output:
            self.process = subprocess.Popen(
                [sys.executable, *SERVER.split(), "--model", str(self._model), "--port", str(self.port)],
                env=os.environ | {"VLLM_SERVER_DEV_MODE": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self) -> None:
        """Wait until the server answers."""
        deadline = time.monotonic() + 400
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        pytest.fail(f"the vLLM server did not start:\n{self._log.read_text()[-4000:]}")

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()


@pytest.fixture(scope="session")
def servers(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RunningServer]]:
    """Two running servers. They end with the tests."""
    logs = tmp_path_factory.mktemp("servers")
    servers = [RunningServer(folder, logs / str(number)) for number in range(2)]
    try:
        for server in servers:
            server.wait()
        yield servers
    finally:
        for server in servers:
            server.stop()


@pytest.fixture
def server_url(servers: list[RunningServer]) -> str:
    """Address of a running server."""
    return servers[0].url


@pytest.fixture(params=["engine", "server"])
def make_sampler(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Any]:
    """A function that makes a sampler, for each of the two kinds."""
    if request.param == "engine":
        engine = request.getfixturevalue("engine")
        return lambda: engine
    url = request.getfixturevalue("server_url")
    from adapters.llm.sampling.vllm_server import VLLMServerSampler

    # every sampler has its own folder, because the server reads from the folder of the last sync
    return lambda: VLLMServerSampler(url, weights_folder=tmp_path_factory.mktemp("weights"), timeout=120)
