"""`VLLMServerSampler` with several servers and several ranks: servers that die, and weights that change."""

import contextlib
import os
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from adapters.llm.sampling import vllm_server
from adapters.llm.sampling.samplers import SamplerError
from adapters.llm.sampling.sampling_config import SamplingConfig
from adapters.llm.sampling.vllm_server import VLLMServerSampler
from adapters.llm.sampling.vllm_worker import VLLMWorker
from grpo.errors import ConfigError, GRPOWarning
from tests.support.imitated_ranks import on_ranks
from tests.support.vllm_stand import Stand, running_stand

CONFIG = SamplingConfig(max_new_tokens=4)
SEEDS = list(range(2, 14))
"""Of twelve rows: six prompts with two rows each."""
PROMPTS = [[7], [8], [9], [10], [11], [12]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short waits, and the parameters of any module in place of `merged_weights`, which has its own tests."""
    monkeypatch.setattr(vllm_server, "SECONDS_BETWEEN_POLLS", 0.01)
    monkeypatch.setattr("adapters.llm.sampling.vllm_worker.FIRST_WAIT", 0.0)
    monkeypatch.setattr(vllm_server, "merged_weights", lambda model: model.named_parameters())


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


def test_a_dead_server_joins_again_at_the_next_sync(stands: list[Stand], tmp_path: Path) -> None:
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


def test_a_dead_server_is_looked_for_again(
    stands: list[Stand], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = synced(stands, tmp_path)
    monkeypatch.setattr(vllm_server, "SECONDS_BETWEEN_PROBES", 0.0)
    stands[1].die()
    with pytest.warns(GRPOWarning, match="It is left out until it answers again"):
        assert_sampled(sampler, 1.0)
    stands[1].start_again()
    stands[1].heard.clear()
    assert_sampled(sampler, 1.0)
    assert loads_of(stands[1]) == 1
    assert len(seeds_of(stands[1])) == 4
    stands[1].die()
    with pytest.warns(GRPOWarning, match="It is left out until it answers again"):  # named again
        assert_sampled(sampler, 1.0)


def test_a_server_that_was_started_again_gets_the_weights(stands: list[Stand], tmp_path: Path) -> None:
    sampler = synced(stands[:1], tmp_path)
    stands[0].start_again()
    assert_sampled(sampler, 1.0)
    assert loads_of(stands[0]) == 2


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
    threading.Timer(0.2, stands[0].start_again).start()
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


def test_rows_from_other_weights_are_not_used(stands: list[Stand], tmp_path: Path) -> None:
    """No connection breaks, and the server has the weights before the batch."""
    stand = stands[0]
    sampler = synced([stand], tmp_path, max_concurrency=1)
    answer = stand.answer

    def forget_at_the_fifth(path: str, body: Any) -> Any:
        if "generate" in path and len(seeds_of(stand)) == 4:
            stand.version, stand.weights = "default", 0.0
        return answer(path, body)

    stand.answer = forget_at_the_fifth  # type: ignore[method-assign]
    with pytest.warns(GRPOWarning, match=r"sampled with other weights \(version default\) .* Its 8 rows"):
        assert_sampled(sampler, 1.0)
    assert loads_of(stand) == 2


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
