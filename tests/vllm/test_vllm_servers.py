"""Several real vLLM servers: they die, are started again, get new weights while requests come, and serve several ranks."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM needs a separate environment: make test-vllm")

from adapters.llm.sampling.sampling_config import SamplingConfig
from adapters.llm.sampling.vllm_server import VLLMServerSampler
from adapters.llm.sampling.vllm_worker import VLLMWorker
from grpo.errors import GRPOWarning
from tests.support.vllm_stand import running_stand

pytestmark = [pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]  # vLLM emits many warnings

ROOT = Path(__file__).parents[2]
SAMPLING = SamplingConfig(max_new_tokens=100, temperature=1.5)
PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [14]]
SEEDS = list(range(40))


def sample(sampler: VLLMServerSampler) -> Any:
    return sampler.sample(PROMPTS, 10, SAMPLING, end_token_ids=[], seeds=SEEDS)


def ask(url: str, path: str, body: Any = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.loads(response.read() or "null")
    except urllib.error.HTTPError as refusal:
        return refusal.code, None


def shape(value: Any) -> Any:
    """What is the same in two answers: keys and types. A list has the shape of its first entry."""
    if isinstance(value, dict):
        return {key: shape(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [shape(entry) for entry in value[:1]]
    return type(value)


def is_within(small: Any, large: Any) -> bool:
    """Whether an answer of the small server has only keys of vLLM's answer, with the same types."""
    if isinstance(small, dict):
        return isinstance(large, dict) and all(key in large and is_within(small[key], large[key]) for key in small)
    if isinstance(small, list):
        return isinstance(large, list) and all(map(is_within, small, large))
    return small is large or type(None) in (small, large)


def test_the_small_server_of_the_daily_tests_answers_as_vllm_does(
    servers: list[Any], model: Any, tmp_path: Path
) -> None:
    VLLMServerSampler(servers[0].url, weights_folder=tmp_path).sync(model)
    settings = {"max_tokens": 2, "seed": 3, "logprobs": 0, "stop_token_ids": [1], "detokenize": False}
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}}
    requests: list[tuple[str, Any]] = [
        ("/server_info?config_format=json", None),
        ("/weight_info", None),
        ("/update_weight_version", {"new_version": "loading"}),
        ("/weight_info", None),
        ("/pause?mode=wait", {}),
        ("/collective_rpc", reload),
        ("/reset_prefix_cache", {}),
        ("/update_weight_version", {"new_version": "new"}),
        ("/resume", {}),
        ("/inference/v1/generate", {"token_ids": [5, 6], "sampling_params": settings}),
        ("/inference/v1/generate", {"token_ids": [5, 36], "sampling_params": settings}),
        ("/unknown", None),
    ]
    with running_stand() as stand:
        for path, body in requests:
            theirs, ours = ask(servers[0].url, path, body), ask(stand.url, path, body)
            assert ours[0] == theirs[0], path
            if ours[0] == 200:
                assert is_within(shape(ours[1]), shape(theirs[1])), (path, ours[1], theirs[1])
            if path == "/weight_info":
                assert (ours[1] == theirs[1]) == (ours[1]["weight_version"] != "default")
            if "generate" in path and ours[0] == 200:
                spans = [answer["choices"][0]["weight_versions"] for _, answer in (ours, theirs)]
                assert spans == [[{"version": "new", "start": 0, "end": 2}]] * 2


def test_no_request_runs_while_weights_change(servers: list[Any], model: Any, tmp_path: Path) -> None:
    """Requests come all the time. A request that runs when loading begins ends with the weights that it began with."""
    VLLMServerSampler(servers[0].url, weights_folder=tmp_path).sync(model)
    worker = VLLMWorker(servers[0].url, timeout=60)
    found: list[list[dict[str, Any]]] = []
    is_over = threading.Event()

    def ask_again_and_again() -> None:
        settings = {"max_tokens": 100, "ignore_eos": True, "logprobs": 0}
        while not is_over.is_set():
            _, answer = ask(servers[0].url, "/inference/v1/generate", {"token_ids": [5], "sampling_params": settings})
            found.append(answer["choices"][0]["weight_versions"])

    threads = [threading.Thread(target=ask_again_and_again) for _ in range(4)]
    for thread in threads:
        thread.start()
    for number in range(3):
        time.sleep(0.5)
        worker.load(tmp_path, f"version {number}", "loading")
    time.sleep(0.5)
    is_over.set()
    for thread in threads:
        thread.join()
    labels = [[span["version"] for span in spans] for spans in found]
    assert {f"version {number}" for number in range(3)} <= {first for first, *_ in labels}
    assert all(len(later) == 1 or later[1:] == ["loading"] for later in labels), labels


@contextlib.contextmanager
def killed_at_its_first_row(server: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Within the block, the server holds requests back, is killed when it gets the first, and is started again.

    A fast server would otherwise have answered them all before it is killed.
    """
    is_asked = threading.Event()
    complete = VLLMWorker.complete

    def noted(worker: VLLMWorker, *request: Any) -> Any:
        if worker.url == server.url:
            is_asked.set()
        return complete(worker, *request)

    def kill_and_start_again() -> None:
        is_asked.wait()
        server.kill()
        server.start()

    monkeypatch.setattr(VLLMWorker, "complete", noted)
    assert ask(server.url, "/pause?mode=wait", {})[0] == 200
    killer = threading.Thread(target=kill_and_start_again)
    killer.start()
    try:
        yield
    finally:
        is_asked.set()
        killer.join()


def test_rows_of_a_killed_server_are_sampled_by_the_other_and_are_the_same(
    servers: list[Any], model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = VLLMServerSampler([server.url for server in servers], weights_folder=tmp_path, max_concurrency=2)
    sampler.sync(model)
    whole = sample(sampler)
    assert whole.token_ids == sample(sampler).token_ids

    with (
        pytest.warns(GRPOWarning, match=rf"{servers[1].url}.* Its 20 rows are sampled again"),
        killed_at_its_first_row(servers[1], monkeypatch),
    ):
        again = sample(sampler)
    assert again.token_ids == whole.token_ids
    torch.testing.assert_close(
        torch.tensor(again.behaviour_log_probs), torch.tensor(whole.behaviour_log_probs), rtol=0, atol=1e-4
    )
    servers[1].wait()
    with torch.no_grad():
        model.lm_head.weight.mul_(1.1)
    sampler.sync(model)  # the server that was started again joins
    assert sampler._next_probe == {}
    assert VLLMWorker(servers[0].url, timeout=60).version() == VLLMWorker(servers[1].url, timeout=60).version()
    assert sample(sampler).token_ids != whole.token_ids


def test_the_only_server_is_waited_for_and_samples_the_same_rows(
    servers: list[Any], model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are not those that the server is started with."""
    with torch.no_grad():
        model.lm_head.weight.mul_(1.3)
    sampler = VLLMServerSampler(servers[1].url, weights_folder=tmp_path, restart_timeout=300)
    sampler.sync(model)
    whole = sample(sampler)
    with (
        pytest.warns(GRPOWarning, match="Its 40 rows are sampled again"),
        killed_at_its_first_row(servers[1], monkeypatch),
    ):
        again = sample(sampler)
    assert again.token_ids == whole.token_ids
    assert sampler._version == VLLMWorker(servers[1].url, timeout=60).version()


def start_ranks(kind: str, folder: Path, own: Path, servers: list[Any], **environment: str) -> Any:
    """Two ranks that run `tests.support.ranks_with_vllm`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tests.support.ranks_with_vllm", kind, str(folder), str(own), *(server.url for server in servers)]
    all_variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | environment
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=all_variables, **output)


def results_of(ranks: Any, own: Path, printed: str = "") -> list[Any]:
    printed += ranks.communicate()[0]
    assert ranks.returncode == 0, printed[-4000:]
    first, second = (json.loads((own / f"rank{rank}.json").read_text()) for rank in range(2))
    assert first["weights"] == second["weights"]
    return [first, second]


def test_two_ranks_train_with_two_servers_of_which_one_dies(servers: list[Any], folder: Path, tmp_path: Path) -> None:
    """Each server gets each version once. After each iteration, the servers have the log-probs of the trainer."""
    ranks = start_ranks("copies", folder, tmp_path, servers)
    printed = []
    for line in ranks.stdout:
        printed.append(line)
        if line.startswith("iteration 2"):
            servers[1].kill()
            (tmp_path / "go on").touch()
        if line.startswith("iteration 4"):
            servers[1].start()
            servers[1].wait()
            (tmp_path / "go on").touch()
            break
    for found in results_of(ranks, tmp_path, "".join(printed)):
        assert found["ratios"] == pytest.approx([1.0] * 6, abs=1e-4)
        assert [number for number, _ in found["versions"]] == [2, 3, 4, 5, 6, 7]
        assert [num_servers for _, num_servers in found["versions"]] == [2, 2, 1, 1, 2, 2]
    assert f"no vLLM server answers at {servers[1].url}" in "".join(printed)


def test_ranks_with_divided_weights_send_them_whole(servers: list[Any], folder: Path, tmp_path: Path) -> None:
    for found in results_of(start_ranks("parts", folder, tmp_path, servers), tmp_path):
        assert found["ratios"] == pytest.approx([1.0] * 2, abs=1e-4)
        assert found["versions"] == [[2, 2], [3, 2]]


def test_sampling_beside_the_updates_gives_what_sampling_in_order_gives(
    servers: list[Any], folder: Path, tmp_path: Path
) -> None:
    """The tokens are the same, and so are the weights up to the rounding of vLLM's log-probs."""
    found = []
    for in_order in ("0", "1"):
        ranks = start_ranks("ahead", folder, tmp_path, servers, GRPO_AHEAD_IN_ORDER=in_order)
        found.append(results_of(ranks, tmp_path)[0])
    assert found[0]["rewards"] == found[1]["rewards"]
    assert len(set(found[0]["rewards"])) == 5
    torch.testing.assert_close(*(torch.tensor(each["weights"]) for each in found), rtol=0, atol=1e-4)
