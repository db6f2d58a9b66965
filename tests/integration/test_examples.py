"""The examples run as a user runs them, and their output shows that something was learned."""

import json
import re
from pathlib import Path

import imageio.v3 as iio
import numpy as np
import pytest
from matplotlib import image

from tests.support.example_runs import NUMBER, ROOT, run_example

SHORT = {
    "customer_service": "--seeds 0 --scripts 24 --warmup-steps 2 --iterations 1 --held-out 4",
    "text_game": "--seeds 0 --warmup-steps 2 --iterations 1",
    "tool_agent": "--seeds 0 --scripts 64 --warmup-steps 2 --iterations 1",
}
"""What is typed for a run that learns nothing, of the examples whose learning only `make test-faults` has time for."""


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_an_example_that_learns_for_minutes_has_a_short_form(name: str, tmp_path: Path) -> None:
    assert run_example(name, *SHORT[name].split(), folder=tmp_path)


@pytest.fixture(scope="module")
def bandit(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, list[float]], Path, Path]:
    """Figures of the table by strategy, the plot, and the folder it was started in."""
    folder, plots = tmp_path_factory.mktemp("elsewhere"), tmp_path_factory.mktemp("plots")
    plot = plots / "new folder" / "bandit.png"
    printed = run_example("dynamic_bandit", "--seed", "3", "--plot", str(plot), folder=folder)
    rows = re.findall(rf"^(\S.*?) {{2,}}({NUMBER}(?: +{NUMBER}){{3}})$", printed, re.MULTILINE)
    return {name: [float(figure) for figure in figures.split()] for name, figures in rows}, plot, folder


@pytest.mark.slow
def test_dynamic_bandit_follows_the_best_arm(bandit: tuple[dict[str, list[float]], Path, Path]) -> None:
    table, _, _ = bandit
    assert len(table) == 9, f"two configurations and seven classics; got {sorted(table)}"
    arm_3, arm_0, structured_reward, steps_to_half = table["GRPO, tuned settings"]
    assert arm_3 > 0.8
    assert arm_0 > 0.8
    assert structured_reward > 0.66  # chance .27, best possible .75
    assert steps_to_half < 4


@pytest.mark.slow
def test_dynamic_bandit_shows_that_naive_settings_abandon_arm_0(
    bandit: tuple[dict[str, list[float]], Path, Path],
) -> None:
    table, _, _ = bandit
    _, arm_0, structured_reward, _ = table["GRPO, naive settings"]
    assert arm_0 < 0.25
    assert structured_reward < table["GRPO, tuned settings"][2] - 0.15


def test_dynamic_bandit_writes_a_plot_and_no_other_file(bandit: tuple[dict[str, list[float]], Path, Path]) -> None:
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


@pytest.mark.slow
def test_custom_domain_learns_to_hit_targets_it_has_not_seen(catapult: str) -> None:
    """Closeness on held-out targets; the best *single* shot for all of them has .34, so .6 takes looking at the target."""
    found = re.search(rf"new targets: ({NUMBER}) before, ({NUMBER}) after; the best of all shots ({NUMBER})", catapult)
    assert found is not None, catapult
    before, after, best = map(float, found.groups())
    assert before < 0.25
    assert after > 0.6
    assert after <= best < 1


@pytest.mark.slow
def test_custom_domain_passes_the_conformance_kit(catapult: str) -> None:
    for subject in ("check_policy(Gunner)", "check_reward_model(Closeness)"):
        assert re.search(rf"^{re.escape(subject)}: \d+ passed", catapult, re.MULTILINE), catapult
    assert "FAILED" not in catapult
    assert re.search(r"passed +generated samples ", catapult), "samples were really compared with the log-probs"


def test_custom_domain_has_fewer_than_120_lines() -> None:
    lines = (ROOT / "examples" / "custom_domain.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) < 120


@pytest.mark.slow
def test_control_learns_writes_its_files_and_resumes_where_it_stopped(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "control" / "CartPole-v1" / "seed-0"
    printed = run_example("control", "--steps", "1500", folder=tmp_path)
    found = re.search(rf"100 new episodes: return ({NUMBER}) ", printed)
    assert found is not None, printed
    assert float(found.group(1)) > 30, "it falls within 10 steps at first"
    names = {path.name for path in folder.iterdir() if not path.name.startswith("iteration-")}
    assert names == {"metrics.jsonl", "curve.json", "run.json", "learning_curve.png"}
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_robot_reach_reports_that_nothing_can_be_rendered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mujoco")
    monkeypatch.setenv("MUJOCO_GL", "disable")
    printed = run_example("robot_reach", "--steps", "1", folder=tmp_path)
    assert re.search(r"^no film: Reacher-v5 cannot be rendered here", printed, re.MULTILINE), printed
    assert not list(tmp_path.rglob("*.gif"))
