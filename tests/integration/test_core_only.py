"""What needs no extra runs where only the core's six dependencies, and their own dependencies, can be imported."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.launches import printed_by
from tools.try_wheel import CORE, blocks, run_every_command

ROOT = Path(__file__).resolve().parents[2]
OPTIONAL = ["gymnasium", "matplotlib", "transformers", "pytest", "scipy.stats"]


def run(code: str, folder: Path) -> str:
    """The output of a new interpreter that finds no other package."""
    return printed_by("-c", f"import tests.support.core_only\n{code}", folder=folder)


@pytest.mark.slow
def test_the_core_its_bandits_and_their_pages_need_six_packages(tmp_path: Path) -> None:
    """In one process. First it tells that other packages cannot be imported, although this environment has them."""
    pages = [blocks((ROOT / page).read_text(encoding="utf-8")) for page in ("README.md", "grpo/README.md")]
    assert sum(map(len, pages)) >= 10
    assert len(CORE) == 6
    code = f"""
import contextlib, importlib.util, io, json
from tools.try_wheel import core_distributions, import_all_modules, imported_distributions
missing = [name for name in {OPTIONAL} if importlib.util.find_spec(name.partition(".")[0]) is None]
num_modules = import_all_modules()
with contextlib.redirect_stdout(io.StringIO()):
    for blocks in {pages!r}:
        names = {{"__name__": "__main__"}}
        for block in blocks:
            exec(block, names)
print(json.dumps([missing, num_modules, sorted(imported_distributions() - core_distributions())]))
"""
    missing, num_modules, others = json.loads(run(code, tmp_path))
    assert missing == OPTIONAL
    assert num_modules > 100
    assert others == []


@pytest.mark.slow
def test_all_runs_of_the_bandit_demo_need_six_packages(tmp_path: Path) -> None:
    """Only its plot needs matplotlib."""
    code = """
from adapters.bandits import demo
trainings = [getattr(demo, name) for name in dir(demo) if name.startswith("train_")]
print(len([train(0) for train in trainings]), len(demo.play_classics(0)))
"""
    assert run(code, tmp_path).split() == ["2", "7"]


@pytest.mark.slow
def test_the_example_of_a_custom_domain_needs_six_packages(tmp_path: Path) -> None:
    assert "new targets" in run(
        "import runpy; runpy.run_module('examples.custom_domain', run_name='__main__')", tmp_path
    )


@pytest.mark.slow
def test_every_command_works_or_says_in_one_line_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    code = "import tests.support.core_only; from adapters.cli import main; main()"
    needs = run_every_command([sys.executable, "-c", code], tmp_path)
    assert needs == ['grpo train: Settings in YAML need pip install ".[cli]" in the checkout. JSON needs nothing.\n']
    assert not (tmp_path / "runs" / "dynamic_bandit.png").exists()  # the demo has trained, without matplotlib
