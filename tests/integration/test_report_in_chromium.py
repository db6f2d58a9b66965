"""The report in a real browser without a network: no errors, no scrolling to the side, and no text of a policy that runs."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from adapters.tracking import write_report
from adapters.tracking.report.page import POLICY
from tests.support.comparisons import compared
from tests.support.run_folders import healthy, lines_of, sample, settings, write_run

pytestmark = pytest.mark.slow

BROWSERS = ("chromium", "chromium-browser", "google-chrome")

ATTACK = '</div><script>window.attacked = 1</script><img src="x.png" onerror="window.attacked = 2"><b style="position:fixed">'

PROBE = """
<script>
addEventListener("load", () => { document.body.dataset.probe = JSON.stringify({
  scroll: document.documentElement.scrollWidth, client: document.documentElement.clientWidth,
  attacked: window.attacked ?? 0,
  loading: document.querySelectorAll("img, iframe, object, embed, video, audio, [src], link[rel=stylesheet]").length,
  charts: [...document.querySelectorAll("svg")].filter(svg => svg.getBoundingClientRect().width > 200).length,
  outside: [...document.querySelectorAll("svg text")].filter(text => {
    const box = text.getBoundingClientRect(), chart = text.ownerSVGElement.getBoundingClientRect();
    return getComputedStyle(text).visibility === "visible" && (box.right > chart.right + 1 || box.left < chart.left - 1);
  }).map(text => text.textContent),
  background: getComputedStyle(document.body).backgroundColor, ink: getComputedStyle(document.body).color,
}); });
</script>
"""


def opened(page: Path, profile: Path, *options: str) -> tuple[str, list[str]]:
    """Open a page in headless Chromium. Returns the document, and what the console says."""
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    assert browser is not None, f"This test needs one of {', '.join(BROWSERS)}: apt-get install chromium"
    done = subprocess.run(
        [
            browser,
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            f"--user-data-dir={profile}",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            "--enable-logging=stderr",
            "--dump-dom",
            *options,
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def probed(page: Path, profile: Path, *options: str) -> dict[str, Any]:
    """Measure a page from inside, by a script. The page's policy would refuse the script, so the policy is removed."""
    text = page.read_text(encoding="utf-8")
    assert "default-src &#x27;none&#x27;" in text
    open_page = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    copy = page.with_name("probed.html")
    copy.write_text(open_page.replace("</body>", f"{PROBE}</body>"), encoding="utf-8")
    document, console = opened(copy, profile, *options)
    assert console == []
    found = re.search(r'data-probe="(.*?)"', document)
    return dict(json.loads(found.group(1).replace("&quot;", '"')))


@pytest.fixture(scope="module")
def attacked_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with every section, whose texts attack it and are as long and as wide as texts can be."""
    words = f"{ATTACK} {'x' * 1500}"
    lines = [
        {**line, f"rewards/{ATTACK}/mean": 0.5, "rewards/b/mean": 1.0, "eval/avg_reward": 0.5}
        for line in lines_of(healthy())
    ]
    samples = [
        {
            "iteration": k,
            "kind": kind,
            "rows": 8,
            "samples": [sample(state=words, action=words, **{f"reward/{ATTACK}": 1e-7})],
        }
        for k in (1, 50, 100)
        for kind in ("train", "eval")
    ]
    folder = tmp_path_factory.mktemp("run")
    write_run(folder, lines, samples, settings={**settings(learning_rate=0.1), "policy": ATTACK, "reward_model": words})
    script = [[words], [words], [words]]
    compared(script, script, lambda states, actions: [1.0 for _ in actions], label=lambda state: words).to_json(
        folder / "comparison.json"
    )
    return write_report(folder)


def brightness(colour: str) -> float:
    return sum(map(float, re.findall(r"\d+", colour)[:3])) / 765


def test_the_page_opens_without_a_network_and_without_errors(attacked_page: Path, tmp_path: Path) -> None:
    document, console = opened(attacked_page, tmp_path)
    assert console == []
    assert "What the numbers say" in document
    assert POLICY.split(";")[0] == "default-src 'none'"


@pytest.mark.parametrize(("width", "mode"), [(1280, "light"), (600, "light"), (1280, "dark")])
def test_no_text_of_a_policy_runs_or_scrolls_and_colours_follow_the_screen(
    attacked_page: Path, width: int, mode: str, tmp_path: Path
) -> None:
    """Nor does a text load anything, or is it cut off."""
    options = ["--force-dark-mode"] if mode == "dark" else []
    found = probed(attacked_page, tmp_path, f"--window-size={width},900", *options)
    assert (found["attacked"], found["loading"]) == (0, 0)
    assert width - 30 <= found["client"] <= width
    assert found["scroll"] <= found["client"]
    assert found["charts"] >= 9
    assert found["outside"] == []
    paper, ink = brightness(found["background"]), brightness(found["ink"])
    assert (paper > 0.9 > 0.2 > ink) if mode == "light" else (paper < 0.2 < 0.8 < ink)


def test_the_probe_notices_a_page_that_is_too_wide_runs_scripts_or_has_errors(tmp_path: Path) -> None:
    page = write_report(write_run(tmp_path / "run", lines_of(healthy())))
    text = page.read_text(encoding="utf-8")
    wide = '<link rel="stylesheet" href="other.css"><div style="width: 1500px">x</div>'
    bad = f'{wide}{ATTACK}<script>console.error("seen")</script></body>'
    page.write_text(text.replace("</body>", bad), encoding="utf-8")
    _, console = opened(page, tmp_path / "refused")
    assert any("Content Security Policy" in line for line in console)  # the page as it is refuses scripts
    page.write_text(text.replace("</body>", bad.replace("<script>console", "<script>//")), encoding="utf-8")
    found = probed(page, tmp_path / "open", "--window-size=1280,900")
    assert found["scroll"] > found["client"]
    assert found["attacked"] == 2  # the script, and then the image that does not exist
    assert found["loading"] == 2
