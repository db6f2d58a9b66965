"""The gallery: each file is short, checks its policy, prints its baseline and GRPO in one table, and draws a picture."""

import ast
import re
from pathlib import Path

import pytest

from tests.support.example_runs import ROOT, run_example

SHORT = {
    "portfolio": (["--iterations", "3", "--markets", "50"], ["best fixed split", "GRPO", "best split of each mood"]),
    "ranking": (["--passes", "3"], ["click model", "GRPO", "the best possible"]),
    "kuhn_poker": (["--iterations", "20"], ["plain self-play", "KL to the uniform policy"]),
    "flow": (["--iterations", "2"], ["best of 16", "GRPO", "any, KL 0.05"]),
    "symbolic_regression": (
        ["--iterations", "2"],
        ["random search", "REINFORCE by hand", "GRPO, defaults", "GRPO, best of k"],
    ),
    "server_policy": (["--iterations", "3"], ["here", "on the server"]),
    "travelling_salesman": (["--iterations", "2"], ["nearest neighbour", "2-opt", "GRPO"]),
    "distillation": (
        ["--teacher-steps", "2000", "--steps", "2000"],
        ["teacher", "student, distilled", "student, by reward"],
    ),
}
"""By file: the arguments of its short form, and rows of its table."""
PICTURES = {name: f"{name}.{'gif' if name == 'distillation' else 'png'}" for name in SHORT}
BEGINS = {".png": b"\x89PNG\r\n\x1a\n", ".gif": b"GIF8"}
FOLDER = ROOT / "examples" / "gallery"
PAGE = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_each_file_of_the_gallery_is_short_complete_and_on_the_page() -> None:
    files = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
    assert files == sorted(SHORT)
    for name in files:
        text = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 150, name
        imported = [node.module or "" for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
        assert not [module for module in imported if "._" in module or module.startswith("examples")], name
        assert f"](../examples/gallery/{name}.py)" in PAGE
        picture = ROOT / "docs" / "images" / "gallery" / PICTURES[name]
        assert PAGE.count(f"](images/gallery/{picture.name})") == 2, "in the table, and in the section of the file"
        assert f"](docs/images/gallery/{picture.name})" in README
        assert picture.stat().st_size < 100_000


@pytest.mark.slow
@pytest.mark.parametrize("name", SHORT)
def test_the_short_form_runs_checks_its_policy_and_draws(name: str, tmp_path: Path) -> None:
    if name == "distillation":
        pytest.importorskip("mujoco")
    arguments, rows = SHORT[name]
    printed = run_example(f"gallery.{name}", *arguments, "--folder", "pictures", folder=tmp_path)
    assert re.match(r"check_policy\(\w+\): \d+ passed", printed)
    assert "FAILED" not in printed
    table = printed[printed.index("optional, not implemented") :]
    for row in rows:
        assert re.search(rf"^{re.escape(row)} .*\d", table, re.MULTILINE), printed
    assert "last bit" not in printed or "to the last bit: True" in printed
    if name == "distillation" and "no film:" in printed:
        assert "MUJOCO_GL" in printed
        return
    picture = tmp_path / "pictures" / PICTURES[name]
    assert picture.read_bytes().startswith(BEGINS[picture.suffix])
    assert f"written: pictures/{picture.name}" in printed
