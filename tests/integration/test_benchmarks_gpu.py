"""The benchmark for a GPU runs on a CPU with a tiny model, and writes a line for each sampler, measured or not."""

import inspect
import time
from pathlib import Path
from typing import get_args

import pytest

from adapters.llm import HFPolicy
from adapters.llm.sampling.recorded import sampler as recorded
from benchmarks import gpu
from benchmarks.objective import HAS_TRL, INSTALL
from tests.support.launches import printed_by
from tests.support.objective_inputs import as_users_run_it

LINES = [("all", "4"), ("LoRA", "8"), ("all", "8"), ("LoRA", "4")]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.split("|")[1:-1]]


def lines_of(run: str, tmp_path: Path, *, seconds: float = 600) -> list[list[str]]:
    """The cells of the lines that a sampler writes."""
    output = tmp_path / "gpu.md"
    with as_users_run_it():
        gpu.run_sampler(run, output, time.time() + seconds, 1, tiny=True)
    return [cells(line) for line in output.read_text().splitlines()]


@pytest.mark.parametrize("sampler", ["decoding", "recorded"])
def test_a_sampler_writes_a_line_for_each_size_with_all_weights_and_lora(sampler: str, tmp_path: Path) -> None:
    lines = lines_of(f"ours:{sampler}", tmp_path)
    assert [tuple(line[2:4]) for line in lines] == LINES
    for line in lines:
        assert (len(line), line[:2], line[-1]) == (len(gpu.COLUMNS), ["ours", sampler], "-")
        of_token, whole, sample, score, update, _, divergence = map(float, line[4:-1])
        assert abs(divergence) < 1e-4
        # equal on any machine but for their rounding: `update` is the rest of the whole
        assert of_token == pytest.approx(1e3 * sample / 4, abs=3)
        assert sample + score + update == pytest.approx(whole, abs=0.02)


def test_every_sampler_of_the_policy_is_measured() -> None:
    annotation = inspect.signature(HFPolicy.__init__).parameters["sampler"].annotation
    names = {name for part in get_args(annotation) for name in get_args(part)}
    assert "decoding" in names
    assert names <= set(gpu.OURS)


@pytest.mark.parametrize(("sampler", "seconds", "reason"), [
    ("telepathic", 600, "ConfigError: HFPolicy: sampler must be"), ("recorded", 600, "ConfigError: its layers have states"),
    ("decoding", -1, "TimeoutError: no time was left"),
])  # fmt: skip
def test_what_cannot_be_measured_is_one_line_with_the_reason(
    sampler: str, seconds: int, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(recorded, "obstacle", lambda lm: "its layers have states")
    (line,) = lines_of(f"ours:{sampler}", tmp_path, seconds=seconds)
    assert line[:2] == ["ours", sampler]
    assert line[4].startswith(f"not run. {reason}")


def test_medians_leave_out_the_first_iteration_and_iterations_end_before_the_deadline() -> None:
    """The first took 9 s. Then 2, 3 and 4 s, of which 1, 2 and 3 s of sampling of 4 tokens, and 0.5 s of scoring."""
    times = gpu.Times(deadline=time.time() + 60, repeats=3)
    times.sample, times.score = [5.0, 1.0, 2.0, 3.0], [0.5, 0.5, 0.5, 0.5]
    assert [times.add(seconds) for seconds in (9.0, 2.0, 3.0, 4.0)] == [False, False, False, True]
    assert times.cells(4) == ["500.00", "3.00", "2.00", "0.50", "0.50", "9.00", "-"]
    late = gpu.Times(deadline=time.time() + 5, repeats=3)
    assert [late.add(seconds) for seconds in (9.0, 9.0)] == [False, True]  # one is measured in any case


def test_trl_divides_the_rows_so_that_a_pass_has_as_many_tokens_as_ours() -> None:
    """16 rows of 768 tokens are 12,288, and 64 rows in 4 passes are 12,288 each; 3 passes do not divide 64 rows."""
    assert {setup.case.rows: setup.passes for setup in gpu.setups(tiny=False)} == {16: 1, 64: 4}


@pytest.mark.slow
@pytest.mark.timeout(900)  # five processes
@pytest.mark.skipif(not HAS_TRL, reason=f"TRL is {INSTALL}")
def test_the_benchmark_for_a_gpu_runs_as_typed(tmp_path: Path) -> None:
    test = "tests/devices/test_training.py::test_weights_of_a_gpu_are_read_on_the_cpu"
    output = tmp_path / "gpu.md"
    runs = ["ours:decoding", "TRL:generate", "TRL:vLLM"]
    options = ["--tiny", "--output", output, "--seconds", "1200", "--repeats", "1", "--only", *runs, "--tests", test]
    printed_by("-m", "benchmarks.gpu", *options)
    written = output.read_text()
    assert "; Python 3." in written.splitlines()[0]
    table = [cells(line) for line in written.splitlines() if line.startswith("| ")]
    assert tuple(table[0]) == gpu.COLUMNS
    assert [tuple(line[:4]) for line in table[1:9]] == [(*run.split(":"), *line) for run in runs[:2] for line in LINES]
    assert all(float(line[4]) > 0 for line in table[1:9])
    assert table[9][:2] == ["TRL", "vLLM"]
    assert "passed" in written.splitlines()[-1]
