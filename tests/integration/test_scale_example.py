"""`examples.scale` runs unchanged on one process and on two ranks."""

import re
import sys
from pathlib import Path

import pytest
import torch

from examples.scale import train
from tests.support.example_runs import NUMBER, STRICT, example_process, run_example
from tests.support.launches import printed_by

SAID = re.compile(
    rf"(\d+) ranks on cpu.*\ndigits right on held-out prompts: ({NUMBER}) before, ({NUMBER}) after (\d+) iterations\n"
    r"weights of each rank: ([0-9a-f ]+)\n"
)


def figures(printed: str) -> tuple[int, float, float, int, list[str]]:
    """Ranks, shares of right digits before and after, iterations, and a hash of each rank's weights."""
    found = SAID.search(printed)
    assert found is not None, printed
    ranks, before, after, iterations, hashes = found.groups()
    return int(ranks), float(before), float(after), int(iterations), hashes.split()


def on_two_ranks(*arguments: object, folder: Path) -> str:
    """What `torchrun --nproc-per-node 2 -m examples.scale.train` prints."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    train = "-m", "examples.scale.train"
    return printed_by(*launcher, *train, *arguments, folder=folder, seconds=280, PYTHONWARNINGS=STRICT[1])


@pytest.mark.slow
def test_one_process_trains_and_writes_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train", "--iterations", "2", "--engine", "sharded"])  # one process has no parts
    train.main()
    ranks, _, _, iterations, hashes = figures(capsys.readouterr().out)
    assert (ranks, iterations, len(hashes)) == (1, 2, 1)
    assert (tmp_path / "runs" / "scale" / "iteration-00000002").is_dir()


@pytest.mark.parametrize(
    ("has_gpu", "variables", "device", "backend"),
    [
        (False, {}, "cpu", None),
        (False, {"LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "1"}, "cpu", "gloo"),
        (True, {}, "cuda:0", None),
        (True, {"LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "1"}, "cuda:1", "nccl"),
    ],
)
def test_each_rank_takes_a_device_of_its_own(
    monkeypatch: pytest.MonkeyPatch, has_gpu: bool, variables: dict[str, str], device: str, backend: str | None
) -> None:
    """What is asked of torch, with an imitated GPU."""
    asked: list[str] = []
    for name in ("LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "set_device", asked.append)
    monkeypatch.setattr(train.dist, "init_process_group", asked.append)
    assert train.join_ranks() == device
    assert asked == [*([device] if has_gpu else []), *([backend] if backend else [])]


@pytest.mark.slow
def test_one_process_and_two_ranks_learn_the_same(tmp_path: Path) -> None:
    """Ranks draw other samples than one process, so the curves differ by their noise."""
    one = figures(run_example("scale.train", "--iterations", "60", folder=tmp_path))
    two = figures(on_two_ranks("--iterations", 60, "--folder", "two", folder=tmp_path))
    assert (one[0], two[0]) == (1, 2)
    for _, before, after, iterations, hashes in (one, two):
        assert before < 0.15
        assert after > 0.45
        assert iterations == 60
        assert len(set(hashes)) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "two"}


@pytest.mark.slow
def test_both_engines_end_with_the_same_weights(tmp_path: Path) -> None:
    """The same samples, and sums in the same order: two ranks add up two numbers. Iterations ahead change the samples."""
    of = {}
    for ahead in (0, 1):
        for engine in ("replicated", "sharded"):
            options = ["--iterations-ahead", ahead, "--engine", engine, "--folder", f"{engine} {ahead}"]
            of[ahead, engine] = figures(on_two_ranks("--iterations", 4, *options, folder=tmp_path))
        assert of[ahead, "replicated"] == of[ahead, "sharded"]
        assert len(set(of[ahead, "sharded"][-1])) == 1
    assert of[0, "sharded"][-1] != of[1, "sharded"][-1]


@pytest.mark.faults
@pytest.mark.parametrize("engine", ["replicated", "sharded"])
def test_a_run_on_two_ranks_that_is_continued_ends_with_the_weights_of_an_unbroken_run(
    engine: str, tmp_path: Path
) -> None:
    whole = figures(on_two_ranks("--engine", engine, "--iterations", 4, "--folder", "whole", folder=tmp_path))
    on_two_ranks("--engine", engine, "--iterations", 2, "--folder", "parts", folder=tmp_path)
    continued = figures(on_two_ranks("--engine", engine, "--iterations", 4, "--folder", "parts", folder=tmp_path))
    assert continued[2:] == whole[2:]


@pytest.mark.slow
def test_a_run_on_two_ranks_can_be_continued_by_one_process(tmp_path: Path) -> None:
    on_two_ranks("--engine", "sharded", "--iterations", 2, "--folder", "run", folder=tmp_path)
    run = example_process("scale.train", "--iterations", "3", "--folder", "run", folder=tmp_path, options=[])
    assert figures(run.stdout)[3] == 3
    assert "GRPOWarning" in run.stderr  # not exact, which a warning says
