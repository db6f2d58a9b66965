"""The example of tools runs as a user runs it, and its output shows that something was learned."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from matplotlib import image

from tests.support.example_runs import NUMBER, example_process, run_example


def shares_of_tools(printed: str) -> dict[str, list[float]]:
    """Before and after: right tool and right in all, of all tasks and of those that share no word."""
    return {
        when: [float(share) / 100 for share in re.findall(rf"({NUMBER})%", figures)]
        for when, figures in re.findall(r"^(before|after): +(.*)$", printed, re.MULTILINE)
    }


def added_tools(printed: str) -> list[dict[str, float]]:
    """At once, and later: right tools of the new, and of the others."""
    lines = re.findall(r"^(?:two tools added|after 20 more iterations): +right tool (.*)$", printed, re.MULTILINE)
    parts = "new tools, description's words", "new tools, other words", "known tools"
    return [{part: float(re.findall(rf"({NUMBER})% \({part}\)", line)[0]) / 100 for part in parts} for line in lines]


@pytest.mark.faults  # two minutes
def test_tool_routing_reaches_its_documented_accuracy(tmp_path: Path) -> None:
    """The example runs unchanged, and every call is really executed."""
    printed = run_example("tool_routing", folder=tmp_path)
    right_tool, right_in_all, right_tool_in_other_words, _ = shares_of_tools(printed)["after"]
    assert right_tool >= 0.95
    assert right_in_all >= 0.90
    assert right_tool_in_other_words >= 0.90
    at_once, later = added_tools(printed)
    assert at_once["new tools, description's words"] >= 0.60
    assert later["new tools, description's words"] >= 0.90
    assert later["known tools"] >= 0.99


@pytest.mark.slow
def test_tool_routing_learns_from_the_rewards_of_executed_calls(tmp_path: Path) -> None:
    process = example_process("tool_routing", "--iterations", "20", "--seed", "5", folder=tmp_path)
    printed = process.stdout
    assert "20/20" in process.stderr, "a progress bar"
    folder = tmp_path / "runs" / "tool_routing" / "seed-5"
    assert re.search(r"^33 tools in 6 categories", printed, re.MULTILINE), printed
    shares = shares_of_tools(printed)
    right_tool, right_in_all, *where_no_word_is_shared = shares["before"]
    assert 0.5 < right_tool < 0.65, "the descriptions, and the values in the request"
    assert right_in_all < 0.4
    assert where_no_word_is_shared[0] < 0.5
    right_tool, right_in_all, *where_no_word_is_shared = shares["after"]
    assert right_tool > 0.50
    assert right_in_all > 0.20
    assert where_no_word_is_shared[0] > 0.25
    at_once, later = added_tools(printed)
    assert at_once["new tools, description's words"] > at_once["new tools, other words"]
    assert later["known tools"] > 0.50

    assert {path.name for path in folder.iterdir()} == {
        "accuracy.png", "calls.jsonl", "confusion.png", "metrics.jsonl", "policy", "report.json",
    }  # fmt: skip
    for name in ("confusion.png", "accuracy.png"):
        pixels = image.imread(folder / name)[..., :3]
        assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 50, "an empty canvas has one colour"
    report = json.loads((folder / "report.json").read_text())
    assert report["overall"]["right_tool"] == pytest.approx(right_tool, abs=0.0006), "what was printed"
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == 20
    assert metrics[-1]["rewards/tool/mean"] > metrics[0]["rewards/tool/mean"] + 0.2
    assert metrics[-1]["rewards/executed/mean"] > metrics[0]["rewards/executed/mean"], "it has learned what can run"
    calls = [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]
    assert {call["ok"] for call in calls} == {True, False}, "they were really made: untrained, many fail"
    assert len({call["tool"] for call in calls}) == 35
