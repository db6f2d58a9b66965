"""`VLLMServerSampler` over HTTP, with small servers that imitate vLLM and record the requests. First with one server, then with
several servers and ranks, where servers die and weights change."""

import contextlib
import os
import socket
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace
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
from adapters.llm.sampling.vllm_requests import Answer, sampled_tokens
from adapters.llm.sampling.vllm_server import VLLMServerSampler
from adapters.llm.sampling.vllm_worker import VLLMWorker
from grpo.errors import ConfigError, GRPOWarning
from tests.support.imitated_ranks import on_ranks
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
    monkeypatch.setattr(vllm_server, "SECONDS_BETWEEN_POLLS", 0.01)
    monkeypatch.setattr("adapters.llm.sampling.vllm_worker.FIRST_WAIT", 0.001)
    monkeypatch.setattr(vllm_server, "merged_weights", lambda model: model.named_parameters(remove_duplicate=False))


def sample(sampler: VLLMServerSampler, *seeds: int) -> Any:
    return sampler.sample([[7]], len(seeds), CONFIG, end_token_ids=[1], seeds=seeds)


def test_every_row_is_a_request_with_its_own_seed_and_settings(stand: Stand, tmp_path: Path) -> None:
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
    assert bodies[0]["sampling_params"]["top_k"] == 0  # all tokens
    config = SamplingConfig(
        max_new_tokens=9, min_new_tokens=2, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, repetition_penalty=1.2,
        stop=("\n", "###"),
    )  # fmt: skip
    limits = [RowLimit.of(config), RowLimit(max_new_tokens=5)]
    prompts = [[7] * 7, [7] * 11]  # 16 tokens with their limits, as many as fit
    sampler.sample(prompts, 1, config, end_token_ids=[1, 7], seeds=[2, 3], limits=limits)
    found = {
        body["sampling_params"]["seed"]: body["sampling_params"] for path, body in stand.heard if "generate" in path
    }
    assert found[2] == {
        "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2, "max_tokens": 9,
        "min_tokens": 2, "stop": ["\n", "###"], "include_stop_str_in_output": True, "skip_special_tokens": False,
        "stop_token_ids": [1, 7], "ignore_eos": True, "logprobs": 0, "detokenize": True, "seed": 2,
    }  # fmt: skip
    own = {"max_tokens": 5, "stop": [], "skip_special_tokens": True, "detokenize": False, "seed": 3}
    assert found[3] == found[2] | own


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
    ({}, [7] * 13, ConfigError, r"at most 16 tokens .*; prompt 1 has 13, and .*max_new_tokens=4"),
    ({}, [666], SamplerError, r"/inference/v1/generate with 400: .*Token id 666 is out of vocabulary"),
    ({"sampling": {"xtc_probability": 0.5}}, [7], ConfigError,
        r"vLLM does not support XTC; got SamplingConfig\.xtc_probability=0\.5"),
    ({"sampling": {"temperature": 2.5}}, [7], ConfigError, r"at most 2; got SamplingConfig\.temperature=2\.5"),
])  # fmt: skip
def test_what_a_server_cannot_sample_is_refused_with_what_helps(
    stand: Stand, tmp_path: Path, server: dict[str, Any], prompt: list[int], error: type[Exception], message: str
) -> None:
    stand.options.update(server.get("options", {}))
    config = replace(CONFIG, **server.get("sampling", {}))
    for name in server.keys() - {"options", "sampling"}:
        setattr(stand, name, server[name])
    sampler = VLLMServerSampler(stand.url, weights_folder=tmp_path)
    with pytest.raises(error, match=message):
        sampler.sample([[7], prompt], 1, config, end_token_ids=[1], seeds=[1, 2])


def test_a_lost_connection_is_retried_with_a_warning(stand: Stand) -> None:
    stand.to_drop = 2
    with pytest.warns(GRPOWarning, match=r"failed .*; retrying") as said:
        assert VLLMWorker(stand.url, timeout=10).get("/weight_info") == {"weight_version": "default"}
    assert len(said) == 2


@pytest.mark.filterwarnings("ignore:VLLMServerSampler. the connection to the vLLM server")
def test_a_missing_server_is_awaited_and_the_error_says_how_to_start_it() -> None:
    """The waits are 1, 2, 4 and 8 thousandths of a second."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, but not listening
        url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        message = rf"no vLLM server answers at {url} .*after 5 attempts. Start one: VLLM_SER"
        with pytest.raises(SamplerError, match=message):
            VLLMWorker(url, timeout=10).get("/health")


def test_a_slow_server_that_runs_is_not_lost_and_nothing_is_asked_again(stand: Stand, tmp_path: Path) -> None:
    """To repeat a request that times out would take as long again."""
    sampler = VLLMServerSampler(stand.url, weights_folder=tmp_path)
    sample(sampler, 1)
    answer, hanging, has_ended = stand.answer, {"/inference/v1/generate"}, threading.Event()

    def hang(path: str, body: Any) -> Any:
        if path not in hanging:
            return answer(path, body)
        stand.heard.append((path, body))
        has_ended.wait()
        return None

    stand.answer = hang  # type: ignore[method-assign]
    sampler._workers[0]._timeout = 0.1  # only the request that hangs has a short limit
    with pytest.raises(SamplerError, match=r"did not answer /inference/v1/generate within 0\.1 s. Raise timeout"):
        sample(sampler, 1)
    eventually(lambda: stand.paths().count("/inference/v1/generate") > 1, "the server has read the request")
    hanging.add("/server_info?config_format=json")
    num_asked = len(stand.heard)
    with pytest.raises(SamplerError, match=r"did not answer /server_info\?config_format=json within 0\.1 s"):
        VLLMWorker(stand.url, timeout=0.1).max_length()  # a request with retries
    eventually(lambda: len(stand.heard) > num_asked, "the server has read the request")
    assert stand.paths().count("/inference/v1/generate") == 2
    assert stand.paths()[num_asked:] == ["/server_info?config_format=json"]
    has_ended.set()


def test_bad_arguments_are_refused(subtests: pytest.Subtests, tmp_path: Path) -> None:
    url = "http://localhost:8000"
    cases: list[tuple[Any, dict[str, Any], str]] = [
        ("localhost:8000", {}, "must begin with http:// or https://; got"),
        ("file:///etc/hosts", {}, "must begin with http:// or https://; got"), (3, {}, "base_url must begin with http"),
        ([], {}, "at least one server"), ([url, f"{url}/v1/"], {}, "at least one server, each once"),
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


# --- requests to vLLM and its answers, without vLLM


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


def test_an_engine_of_several_processes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"one device; got \{'tensor_parallel_size': 2\}.*VLLMServerSampler"):
        VLLMSampler("Qwen/Qwen3-0.6B", tensor_parallel_size=2, pipeline_parallel_size=1)


# --- several servers and several ranks


SEEDS = list(range(2, 14))
"""Of twelve rows: six prompts with two rows each."""
PROMPTS = [[7], [8], [9], [10], [11], [12]]


@pytest.fixture
def stands() -> Iterator[list[Stand]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(running_stand()) for _ in range(3)]


def weights(value: float) -> nn.Module:
    """A model whose weights sum to `value`. The log-probs of the small servers are minus this sum."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, value)
    return model


def sampler_of(stands: list[Stand], folder: Path, **options: Any) -> VLLMServerSampler:
    return VLLMServerSampler([stand.url for stand in stands], weights_folder=folder, **options)


def synced(stands: list[Stand], folder: Path, **options: Any) -> VLLMServerSampler:
    sampler = sampler_of(stands, folder, **options)
    sampler.sync(weights(1.0))
    return sampler


def assert_sampled(sampler: VLLMServerSampler, value: float) -> None:
    """All twelve rows are answered, in their order, by servers whose weights sum to `value`."""
    sampled = sampler.sample(PROMPTS, 2, CONFIG, end_token_ids=[1], seeds=SEEDS)
    assert [tokens[0] for tokens in sampled.token_ids] == SEEDS
    assert sampled.behaviour_log_probs == [[-value] * 2] * 12


def seeds_of(stand: Stand) -> list[int]:
    return sorted(body["sampling_params"]["seed"] for path, body in stand.heard if path == "/inference/v1/generate")


def loads_of(stand: Stand) -> int:
    return stand.paths().count("/collective_rpc")


def test_only_the_owner_reads_the_weights_or_the_group_if_asked(stands: list[Stand], tmp_path: Path) -> None:
    """Whatever the umask is, and whoever has left a file behind. A folder that was there keeps its rights."""
    before = os.umask(0)
    try:
        (tmp_path / "there").mkdir(mode=0o755)
        (tmp_path / "there" / "unfinished").write_text("left behind")
        modes = {}
        for name, readable in (("own", False), ("shared", True), ("there", False)):
            sampler = sampler_of(stands, tmp_path / name, group_readable=readable)
            for _ in range(2):
                sampler.sync(weights(1.0))
            paths = (tmp_path / name, tmp_path / name / "model.safetensors")
            modes[name] = [oct(path.stat().st_mode & 0o777) for path in paths]
    finally:
        os.umask(before)
    assert modes == {"own": ["0o700", "0o600"], "shared": ["0o750", "0o640"], "there": ["0o755", "0o600"]}


def test_prompts_are_spread_and_their_rows_stay_together(stands: list[Stand], tmp_path: Path) -> None:
    sampler = synced(stands, tmp_path)
    assert_sampled(sampler, 1.0)
    assert [seeds_of(stand) for stand in stands] == [[2, 3, 8, 9], [4, 5, 10, 11], [6, 7, 12, 13]]
    assert [loads_of(stand) for stand in stands] == [1, 1, 1]


def test_a_server_that_dies_is_named_and_its_rows_are_sampled_elsewhere(stands: list[Stand], tmp_path: Path) -> None:
    sampler = synced(stands, tmp_path)
    stands[1].dies_after = 1
    with pytest.warns(GRPOWarning, match=rf"at {stands[1].url} .* Its 3 rows are sampled again") as said:
        assert_sampled(sampler, 1.0)
    assert len(said) == 1
    again = sorted(seeds_of(stands[0]) + seeds_of(stands[2]))
    assert len(again) == len(SEEDS) - 1  # the answer that came before the death is used

    num_heard = len(stands[1].heard)
    assert_sampled(sampler, 1.0)  # without another warning
    assert len(stands[1].heard) == num_heard


def test_a_dead_server_joins_again_at_the_next_sync_or_when_it_is_looked_for(
    stands: list[Stand], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = synced(stands, tmp_path)
    stands[1].die()
    with pytest.warns(GRPOWarning, match=rf"at {stands[1].url}.* It is left out until it answers again"):
        assert_sampled(sampler, 1.0)
    sampler.sync(weights(2.0))  # it is known to be dead, so nothing is said
    assert_sampled(sampler, 2.0)
    stands[1].start_again()
    sampler.sync(weights(3.0))
    for stand in stands:
        stand.heard.clear()
    assert_sampled(sampler, 3.0)
    assert all(len(seeds_of(stand)) == 4 for stand in stands)
    monkeypatch.setattr(vllm_server, "SECONDS_BETWEEN_PROBES", 0.0)
    stands[1].die()
    with pytest.warns(GRPOWarning, match="It is left out until it answers again"):  # named again
        assert_sampled(sampler, 3.0)
    stands[1].start_again()
    stands[1].heard.clear()
    assert_sampled(sampler, 3.0)
    assert loads_of(stands[1]) == 1
    assert len(seeds_of(stands[1])) == 4


def test_a_server_that_dies_in_a_sync_is_named(stands: list[Stand], tmp_path: Path) -> None:
    sampler = sampler_of(stands, tmp_path)
    stands[2].die()
    with pytest.warns(GRPOWarning) as said:
        sampler.sync(weights(1.0))
    assert "It is left out until it answers again" in str(said[-1].message)
    assert stands[2].url in str(said[-1].message)
    assert_sampled(sampler, 1.0)


@pytest.mark.filterwarnings("ignore:VLLMServerSampler. the connection")
def test_a_server_lost_while_paused_resumes(stands: list[Stand], tmp_path: Path) -> None:
    sampler, answer = sampler_of(stands[:2], tmp_path), stands[1].answer
    stands[1].answer = lambda path, body: None if path == "/resume" else answer(path, body)  # type: ignore[method-assign]
    with pytest.warns(GRPOWarning, match="It is left out until it answers again"):
        sampler.sync(weights(1.0))
    assert stands[1].is_paused
    assert sampler._version == stands[1].version
    stands[1].answer = answer  # type: ignore[method-assign]
    sampler._next_probe = dict.fromkeys(sampler._next_probe, 0.0)
    assert_sampled(sampler, 1.0)
    assert len(seeds_of(stands[1])) == 6


def test_a_server_with_weights_of_an_earlier_sync_gets_those_of_the_last(stands: list[Stand], tmp_path: Path) -> None:
    sampler = synced(stands[:1], tmp_path)
    first = stands[0].version
    sampler.sync(weights(2.0))
    stands[0].version, stands[0].weights = first, 1.0  # it could not be reached for a while
    assert_sampled(sampler, 2.0)
    assert loads_of(stands[0]) == 3


def test_the_only_server_is_waited_for_and_gets_the_weights_again(stands: list[Stand], tmp_path: Path) -> None:
    sampler = synced(stands[:1], tmp_path)
    stands[0].dies_after = 5

    def start_again_later() -> None:
        eventually(lambda: stands[0].is_dead, "the server is dead")
        time.sleep(0.2)
        stands[0].start_again()

    threading.Thread(target=start_again_later).start()
    with pytest.warns(GRPOWarning, match="Its 7 rows are sampled again"):
        assert_sampled(sampler, 1.0)
    assert loads_of(stands[0]) == 2
    assert seeds_of(stands[0])[-1] == SEEDS[-1]


def test_each_row_is_given_once_when_it_has_ended(stands: list[Stand], tmp_path: Path) -> None:
    """The first row is answered after all that the other servers answer. One of them dies after two of its four rows."""
    sampler = synced(stands, tmp_path)
    others_given, given = threading.Event(), []
    answer = stands[0].answer

    def held_back(path: str, body: Any) -> Any:
        if "generate" in path and body["sampling_params"]["seed"] == SEEDS[0]:
            assert others_given.wait(20)
        return answer(path, body)

    def on_row(*row: Any) -> None:
        given.append(row)
        if len(given) == 3 + 2 + 4:  # of the three servers
            others_given.set()

    stands[0].answer = held_back  # type: ignore[method-assign]
    stands[1].dies_after = 2
    with pytest.warns(GRPOWarning, match="Its 2 rows are sampled again"):
        sampled = sampler.sample(PROMPTS, 2, CONFIG, end_token_ids=[1], seeds=SEEDS, on_row=on_row)
    rows = zip(range(12), sampled.token_ids, sampled.behaviour_log_probs, sampled.finish_reasons, strict=True)
    assert sorted(given) == list(rows)
    assert given[0][0] != 0


@pytest.mark.parametrize("spans", [["{version}", "default"], ["default", "{version}"], None])
def test_a_row_with_tokens_from_other_weights_is_not_used(
    stands: list[Stand], tmp_path: Path, spans: list[str] | None
) -> None:
    stand = stands[0]
    sampler = synced([stand], tmp_path)
    answer, num_changed = stand.answer, 0

    def mix_the_first(path: str, body: Any) -> Any:
        nonlocal num_changed
        status, found = answer(path, body)
        if "generate" in path and num_changed == 0:
            num_changed += 1
            labels = None if spans is None else [{"version": span.format(version=stand.version)} for span in spans]
            found["choices"][0]["weight_versions"] = labels
        return status, found

    stand.answer = mix_the_first  # type: ignore[method-assign]
    with pytest.warns(GRPOWarning, match=r"sampled with other weights \(version (None|.*default.*)\)"):
        assert_sampled(sampler, 1.0)


def test_a_server_that_was_started_again_with_other_options_is_refused(stands: list[Stand], tmp_path: Path) -> None:
    sampler = synced(stands[:1], tmp_path)
    stands[0].start_again()
    stands[0].options["logprobs_mode"] = "raw_logprobs"
    with pytest.raises(ConfigError, match="it reports raw_logprobs"):
        assert_sampled(sampler, 1.0)


def test_a_server_that_hangs_is_lost(stands: list[Stand], tmp_path: Path) -> None:
    """It answers neither the request nor the question for its version."""
    sampler = synced(stands[:2], tmp_path)
    answer, is_hanging, has_ended = stands[1].answer, False, threading.Event()

    def hang(path: str, body: Any) -> Any:
        nonlocal is_hanging
        is_hanging = is_hanging or "generate" in path
        if "generate" in path:
            has_ended.wait()
        return None if is_hanging else answer(path, body)

    stands[1].answer = hang  # type: ignore[method-assign]
    sampler._workers[1]._timeout = 0.2  # the other server may take its time
    with pytest.warns(GRPOWarning, match=rf"{stands[1].url}.* Its 6 rows are sampled again"):
        assert_sampled(sampler, 1.0)
    has_ended.set()
    assert len(seeds_of(stands[0])) == 12


@pytest.mark.filterwarnings("ignore:VLLMServerSampler. no vLLM server answers")
def test_if_no_server_answers_in_time_the_error_names_all(stands: list[Stand], tmp_path: Path) -> None:
    sampler = synced(stands[:2], tmp_path, restart_timeout=0.05)
    for stand in stands:
        stand.die()
    message = rf"none of the vLLM servers \({stands[0].url}, {stands[1].url}\) has answered for 0.05 s. Start one"
    with pytest.raises(SamplerError, match=message):
        assert_sampled(sampler, 1.0)
    with pytest.raises(SamplerError, match=message):
        sampler.sync(weights(2.0))


@pytest.mark.filterwarnings("ignore:VLLMServerSampler")
def test_a_server_that_fails_again_and_again_ends_the_batch(stands: list[Stand], tmp_path: Path) -> None:
    sampler = synced(stands[:1], tmp_path)
    answer = stands[0].answer
    stands[0].answer = lambda path, body: None if "generate" in path else answer(path, body)  # type: ignore[method-assign]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with pytest.raises(SamplerError, match=rf"no vLLM server answers at {stands[0].url}"):
            assert_sampled(sampler, 1.0)
    assert len(said) == vllm_server.MAX_LOSSES == 3
    stands[0].answer = lambda path, body: (500, "") if "generate" in path else answer(path, body)  # type: ignore[method-assign]
    with pytest.raises(SamplerError, match=r"answered /inference/v1/generate with 500.* Read the server's log"):
        assert_sampled(sampler, 1.0)


def test_no_request_runs_while_weights_change(stands: list[Stand], tmp_path: Path) -> None:
    """A request that runs is finished with the old weights, and one that comes meanwhile waits for the new ones."""
    stand = stands[0]
    sampler_of([stand], tmp_path).sync(weights(1.0))
    worker = VLLMWorker(stand.url, timeout=10)
    found: list[float] = []

    def complete() -> None:
        body = {"token_ids": [7], "sampling_params": {"seed": 1}}
        found.append(worker.complete(body, None).log_probs[0])

    stand.delay = 0.1
    threads = [threading.Thread(target=complete) for _ in range(2)]
    threads[0].start()
    time.sleep(0.05)
    loading = threading.Thread(target=worker.load, args=(tmp_path, "new", "loading"))
    loading.start()
    while not stand.is_paused:
        time.sleep(0.001)
    threads[1].start()
    for thread in (*threads, loading):
        thread.join()
    assert found == [-1.0, -1.0]
    assert stand.changed_while_running == 0
    assert stand.version == "new"


def test_several_ranks_send_each_server_the_weights_once(stands: list[Stand], tmp_path: Path) -> None:
    """Three ranks sample at the same time from two servers, over four versions."""

    def run(engine: Any) -> list[str]:
        sampler = sampler_of(stands[:2], tmp_path, engine=engine)
        versions = []
        for value in (1.0, 2.0, 3.0, 4.0):
            sampler.sync(weights(value if engine.rank == 0 else 99.0))  # rank 0 writes
            assert_sampled(sampler, value)
            versions.append(stands[0].version)
        return versions

    found = on_ranks(3, run)
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == 4
    for stand in stands[:2]:
        assert loads_of(stand) == 4
        assert stand.changed_while_running == 0
        assert len(seeds_of(stand)) == 3 * 4 * 6


def test_a_restarted_server_that_two_ranks_find_at_once_gets_the_weights_from_one(
    stands: list[Stand], tmp_path: Path
) -> None:
    def run(engine: Any) -> None:
        sampler = sampler_of(stands[:2], tmp_path, engine=engine)
        sampler.sync(weights(1.0))
        if engine.rank == 0:
            stands[1].start_again()
            stands[1].delay = 0.2  # both ranks have asked for its version before one sends the weights
        engine.agree()
        assert_sampled(sampler, 1.0)
        assert_sampled(sampler, 1.0)

    assert on_ranks(2, run) == [None, None]
    assert [loads_of(stand) for stand in stands[:2]] == [1, 2]
    assert stands[1].changed_while_running == 0


def test_a_rank_without_servers_sends_the_weights_if_their_rank_does_not(
    stands: list[Stand], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0, whose server is started again, has its rows already."""
    monkeypatch.setattr(vllm_server, "SECONDS_FOR_ITS_RANK", 0.1)

    def run(engine: Any) -> None:
        sampler = sampler_of(stands[:1], tmp_path, engine=engine)
        sampler.sync(weights(1.0))
        if engine.rank == 1:
            stands[0].start_again()
            assert_sampled(sampler, 1.0)
        engine.agree()

    assert on_ranks(2, run) == [None, None]
    assert loads_of(stands[0]) == 2


def test_ranks_begin_with_different_servers(stands: list[Stand], tmp_path: Path) -> None:
    def run(engine: Any) -> None:
        sampler = sampler_of(stands, tmp_path, engine=engine)
        sampler.sync(weights(1.0))
        sampler.sample([[7 + engine.rank]], 1, CONFIG, end_token_ids=[1], seeds=[engine.rank + 1])

    on_ranks(3, run)
    assert [seeds_of(stand) for stand in stands] == [[1], [2], [3]]


@pytest.mark.filterwarnings("ignore:VLLMServerSampler. no vLLM server answers")
def test_ranks_share_what_they_know_of_servers(
    stands: list[Stand], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 sends the weights to the second server, which is dead. Rank 0 does not ask it."""
    for module in ("vllm_worker", "vllm_server"):  # filters of warnings are not safe in threads
        monkeypatch.setattr(f"adapters.llm.sampling.{module}.warn_user", lambda message: None)
    stands[1].die()

    def run(engine: Any) -> set[str]:
        sampler = sampler_of(stands[:2], tmp_path, engine=engine)
        sampler.sync(weights(1.0))
        assert_sampled(sampler, 1.0)
        return {worker.url for worker in sampler._next_probe}

    assert on_ranks(2, run) == [{stands[1].url}] * 2
    assert len(seeds_of(stands[0])) == 24


def test_an_error_in_sync_on_one_rank_is_raised_on_all(stands: list[Stand], tmp_path: Path) -> None:
    stands[1].options["logprobs_mode"] = "raw_logprobs"
    errors = on_ranks(2, lambda engine: sampler_of(stands[:2], tmp_path, engine=engine).sync(weights(1.0)))
    assert all(isinstance(error, ConfigError) for error in errors), errors
    assert all("it reports raw_logprobs" in str(error) for error in errors)


def test_a_server_that_another_rank_loads_is_waited_for(stands: list[Stand], tmp_path: Path) -> None:
    sampler = sampler_of(stands[:1], tmp_path)
    sampler._engine.num_ranks = 2  # type: ignore[misc]
    sampler.sync(weights(1.0))
    version = stands[0].version
    stands[0].version = f"{version} is loaded by rank 1"
    threading.Timer(0.1, setattr, (stands[0], "version", version)).start()
    assert_sampled(sampler, 1.0)
    assert loads_of(stands[0]) == 1
    stands[0].version = f"{version} is loaded by rank 0"  # this rank began, and did not finish
    assert_sampled(sampler, 1.0)
    assert loads_of(stands[0]) == 2
