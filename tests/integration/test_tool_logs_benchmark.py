"""The benchmark of logs: its logging policies, and a run of it that is too short to learn."""

import math

import pytest
import torch

from benchmarks import tool_logs
from benchmarks._bfcl import catalogue_of, questions, split


def test_logging_policies_log_their_own_probabilities(
    monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    monkeypatch.setattr(tool_logs, "NUM_DECISIONS", 300)
    catalogue = catalogue_of(4)
    training = split(questions(catalogue), 0)[0]
    place = {question.text: number for number, question in enumerate(training)}
    for kind in tool_logs.LOGGING_POLICIES:
        with subtests.test(kind):
            probabilities = tool_logs.function_probabilities(kind, catalogue, training, seed=0)
            assert probabilities.shape == (len(training), 74)
            assert torch.allclose(probabilities.sum(1), torch.ones(len(training)))
            for logged in tool_logs.draw_logs(kind, catalogue, training, seed=0):
                decided = catalogue[logged.tool].choices
                assert len(logged.log_prob) == 1 + len(decided)
                probability = probabilities[place[logged.state], list(catalogue).index(logged.tool)].item()
                expected = [probability, *(1 / len(choice.values) for choice in decided)]
                assert logged.log_prob == pytest.approx(tuple(map(math.log, expected)))
                assert 0 <= logged.reward <= 1


@pytest.mark.slow
def test_the_benchmark_prints_its_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(tool_logs, "NUM_DECISIONS", 200)
    monkeypatch.setattr(tool_logs, "NUM_ITERATIONS", 2)
    monkeypatch.setattr("sys.argv", ["tool_logs", "--seeds", "1"])
    tool_logs.main()
    printed = capsys.readouterr().out
    rows = [line.split("|")[1].strip() for line in printed.splitlines() if line.startswith("| ")]
    assert rows == [
        "learned from", "online", "uniform, doubly robust", "uniform, IPS", "router, doubly robust", "router, IPS",
        "by rank, doubly robust", "by rank, IPS",
    ]  # fmt: skip
