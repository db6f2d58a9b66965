"""A tiny model in a folder, and two vLLM samplers: an engine in this process, and a server."""

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
    f"--max-model-len {MAX_LENGTH} --logprobs-mode processed_logprobs"
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


@pytest.fixture(scope="session")
def server_url(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a running server. Its process group ends with the tests."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *SERVER.split(), "--model", str(folder), "--port", str(port)],
            env=os.environ | {"VLLM_SERVER_DEV_MODE": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(url, process, log)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def wait_for(url: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 400
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(url + "/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    pytest.fail(f"the vLLM server did not start:\n{log.read_text()[-4000:]}")


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
