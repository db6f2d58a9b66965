"""The examples run as a user runs them, and what they print shows that something was learned."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import imageio.v3 as iio
import numpy as np
import pytest
from matplotlib import image

ROOT = Path(__file__).resolve().parents[2]
NUMBER = r"\d+\.\d+"


def run_example(name: str, *arguments: str, folder: Path) -> str:
    """What `python -m examples.NAME` prints, started in `folder`: nothing may depend on where it is run from."""
    return example_process(name, *arguments, folder=folder).stdout


def example_process(name: str, *arguments: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """The same with what it writes to its standard error, where progress is shown."""
    process = subprocess.run(
        [sys.executable, "-W", "error", "-m", f"examples.{name}", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return process


@pytest.fixture(scope="module")
def bandit(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[float]], Path, Path]:
    """Figures of the table by strategy, the plot, and the folder it was started in."""
    folder, plots = tmp_path_factory.mktemp("elsewhere"), tmp_path_factory.mktemp("plots")
    plot = plots / "new folder" / "bandit.png"
    printed = run_example("dynamic_bandit", "--seed", "3", "--plot", str(plot), folder=folder)
    rows = re.findall(rf"^(\S.*?) {{2,}}({NUMBER}(?: +{NUMBER}){{3}})$", printed, re.MULTILINE)
    return {name: [float(figure) for figure in figures.split()] for name, figures in rows}, plot, folder


def test_dynamic_bandit_follows_the_best_arm(bandit: tuple[dict[str, list[float]], Path, Path]) -> None:
    table, _, _ = bandit
    assert len(table) == 9, f"two configurations and seven classics; got {sorted(table)}"
    arm_3, arm_0, structured_reward, steps_to_half = table["GRPO, ours"]
    assert arm_3 > 0.8
    assert arm_0 > 0.8
    assert structured_reward > 0.66  # chance .27, best possible .75
    assert steps_to_half < 4


def test_dynamic_bandit_shows_that_the_original_configuration_loses_arm_0(
    bandit: tuple[dict[str, list[float]], Path, Path],
) -> None:
    table, _, _ = bandit
    _, arm_0, structured_reward, _ = table["GRPO, original"]
    assert arm_0 < 0.25
    assert structured_reward < table["GRPO, ours"][2] - 0.15


def test_dynamic_bandit_draws_what_it_found(bandit: tuple[dict[str, list[float]], Path, Path]) -> None:
    _, plot, folder = bandit
    assert plot.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = image.imread(plot)[..., :3]
    height, width, _ = pixels.shape
    assert height > 500
    assert width > 500
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 100, "an empty canvas has one colour"
    assert list(folder.iterdir()) == [], "with --plot nothing is written where it was started"


@pytest.fixture(scope="module")
def catapult(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run_example("custom_domain", folder=tmp_path_factory.mktemp("elsewhere"))


def test_custom_domain_learns(catapult: str) -> None:
    """Closeness on held-out targets; the best *single* shot for all of them has .34, so .6 takes looking at the target."""
    found = re.search(rf"new targets: ({NUMBER}) before, ({NUMBER}) after; the best of all shots ({NUMBER})", catapult)
    assert found is not None, catapult
    before, after, best = map(float, found.groups())
    assert before < 0.25
    assert after > 0.6
    assert after <= best < 1


def test_custom_domain_passes_the_conformance_kit(catapult: str) -> None:
    for subject in ("check_policy(Gunner)", "check_reward_model(Closeness)"):
        assert re.search(rf"^{re.escape(subject)}: \d+ passed", catapult, re.MULTILINE), catapult
    assert "FAILED" not in catapult
    assert re.search(r"passed +generated samples ", catapult), "samples were really compared with the log-probs"


def test_custom_domain_can_be_read_in_one_go() -> None:
    lines = (ROOT / "examples" / "custom_domain.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) < 120


def test_control_learns_writes_what_it_says_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "control" / "CartPole-v1" / "seed-0"
    printed = run_example("control", "--steps", "1500", folder=tmp_path)
    found = re.search(rf"100 new episodes: return ({NUMBER}) ", printed)
    assert found is not None, printed
    assert float(found.group(1)) > 30, "it falls within 10 steps at first"
    assert {"metrics.jsonl", "curve.json", "learning_curve.png", "best", "last"} == {
        path.name for path in folder.iterdir()
    }
    assert (folder / "learning_curve.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    first = json.loads((folder / "curve.json").read_text())
    assert first["steps"][-1] >= 1500

    run_example("control", "--steps", "4000", folder=tmp_path)
    second = json.loads((folder / "curve.json").read_text())
    assert second["steps"][: len(first["steps"])] == first["steps"]
    assert second["steps"][-1] >= 4000
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == list(range(1, len(lines) + 1)), "none twice, none left out"
    assert [line["episodes/total_steps"] for line in lines if "eval/return" in line] == second["steps"]


def test_robot_reach_learns_from_named_terms_and_films_the_result(tmp_path: Path) -> None:
    pytest.importorskip("mujoco")
    printed = run_example("robot_reach", "--steps", "3000", folder=tmp_path)
    before, after = map(float, re.findall(rf"^(?:before|after ): ({NUMBER}) cm", printed, re.MULTILINE))
    assert after < before, printed
    films = list(tmp_path.rglob("*.gif"))
    if "no film:" in printed:
        assert not films
        assert "MUJOCO_GL" in printed
        return
    assert f"written: {films[0].relative_to(tmp_path)}" in printed
    assert films[0].read_bytes().startswith(b"GIF8")
    frames = iio.imread(films[0])
    assert len(frames) <= 40
    assert max(frames.shape[1:3]) <= 240
    assert len(np.unique(frames.reshape(-1, frames.shape[-1]), axis=0)) > 20, "an empty picture has one colour"


def test_robot_reach_says_so_where_nothing_can_be_rendered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mujoco")
    monkeypatch.setenv("MUJOCO_GL", "disable")
    printed = run_example("robot_reach", "--steps", "1", folder=tmp_path)
    assert re.search(r"^no film: Reacher-v5 cannot be rendered here", printed, re.MULTILINE), printed
    assert not list(tmp_path.rglob("*.gif"))


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


@pytest.mark.slow
def test_tool_routing_reaches_what_is_said_of_it(tmp_path: Path) -> None:
    """As it stands, every call really executed."""
    printed = run_example("tool_routing", folder=tmp_path)
    right_tool, right_in_all, right_tool_in_other_words, _ = shares_of_tools(printed)["after"]
    assert right_tool >= 0.95
    assert right_in_all >= 0.90
    assert right_tool_in_other_words >= 0.90
    at_once, later = added_tools(printed)
    assert at_once["new tools, description's words"] >= 0.60
    assert later["new tools, description's words"] >= 0.90
    assert later["known tools"] >= 0.99


@pytest.mark.parametrize(
    ("num_iterations", "learned", "right_call", "without_words"),
    [(20, 0.40, 0.10, 0.25), pytest.param(60, 0.80, 0.25, 0.70, marks=pytest.mark.slow)],
)
def test_tool_routing_learns_from_what_its_calls_bring_in(
    num_iterations: int, learned: float, right_call: float, without_words: float, tmp_path: Path
) -> None:
    process = example_process("tool_routing", "--iterations", str(num_iterations), "--seed", "5", folder=tmp_path)
    printed = process.stdout
    assert f"{num_iterations}/{num_iterations}" in process.stderr, "a progress bar"
    folder = tmp_path / "runs" / "tool_routing" / "seed-5"
    assert re.search(r"^33 tools in 6 categories", printed, re.MULTILINE), printed
    shares = shares_of_tools(printed)
    right_tool, right_in_all, *where_no_word_is_shared = shares["before"]
    assert right_tool < 0.04, "chance is 1/33"
    assert right_in_all < 0.03
    assert where_no_word_is_shared[0] < 0.06
    right_tool, right_in_all, *where_no_word_is_shared = shares["after"]
    assert right_tool > learned
    assert right_in_all > right_call
    assert where_no_word_is_shared[0] > without_words
    at_once, later = added_tools(printed)
    assert at_once["new tools, description's words"] > at_once["new tools, other words"]
    assert later["known tools"] > learned

    assert {path.name for path in folder.iterdir()} == {
        "accuracy.png", "calls.jsonl", "confusion.png", "metrics.jsonl", "policy", "report.json",
    }  # fmt: skip
    for name in ("confusion.png", "accuracy.png"):
        pixels = image.imread(folder / name)[..., :3]
        assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 50, "an empty canvas has one colour"
    report = json.loads((folder / "report.json").read_text())
    assert report["overall"]["right_tool"] == pytest.approx(right_tool, abs=0.0006), "what was printed"
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(metrics) == num_iterations
    assert metrics[-1]["rewards/tool/mean"] > metrics[0]["rewards/tool/mean"] + 0.2
    assert metrics[-1]["rewards/executed/mean"] > metrics[0]["rewards/executed/mean"], "it has learned what can run"
    calls = [json.loads(line) for line in (folder / "calls.jsonl").read_text().splitlines()]
    assert {call["ok"] for call in calls} == {True, False}, "they were really made: untrained, many fail"
    assert len({call["tool"] for call in calls}) == 35
