"""What needs no extra runs where only the core's six dependencies, and their own dependencies, can be imported."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.launches import printed_by
from tools.try_wheel import CORE, blocks, run_every_command

ROOT = Path(__file__).resolve().parents[2]
OPTIONAL = ["gymnasium", "matplotlib", "transformers", "pytest", "scipy.stats"]


@pytest.mark.slow
def test_the_core_its_pages_its_bandits_and_an_example_need_six_packages(tmp_path: Path) -> None:
    """In one process. First it tells that other packages cannot be imported, although this environment has them. Only the plot
    of the bandit demo needs matplotlib."""
    pages = [blocks((ROOT / page).read_text(encoding="utf-8")) for page in ("README.md", "grpo/README.md")]
    assert sum(map(len, pages)) >= 10
    assert len(CORE) == 6
    code = f"""
import contextlib, importlib.util, io, json, runpy
import tests.support.core_only
from tools.try_wheel import core_distributions, import_all_modules, imported_distributions
missing = [name for name in {OPTIONAL} if importlib.util.find_spec(name.partition(".")[0]) is None]
num_modules = import_all_modules()
with contextlib.redirect_stdout(io.StringIO()) as printed:
    for blocks in {pages!r}:
        names = {{"__name__": "__main__"}}
        for block in blocks:
            exec(block, names)
    from adapters.bandits import demo
    trainings = [getattr(demo, name)(0) for name in dir(demo) if name.startswith("train_")]
    runs = [len(trainings), len(demo.play_classics(0))]
    runpy.run_module("examples.custom_domain", run_name="__main__")
others = sorted(imported_distributions() - core_distributions())
print(json.dumps([missing, num_modules, others, runs, "new targets" in printed.getvalue()]))
"""
    missing, num_modules, others, runs, has_targets = json.loads(printed_by("-c", code, folder=tmp_path))
    assert missing == OPTIONAL
    assert num_modules > 100
    assert others == []
    assert runs == [2, 7]
    assert has_targets


@pytest.mark.slow
def test_every_command_works_or_says_in_one_line_what_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    code = "import tests.support.core_only; from adapters.cli import main; main()"
    needs = run_every_command([sys.executable, "-c", code], tmp_path)
    assert needs == ['grpo train: Settings in YAML need pip install ".[cli]" in the checkout. JSON needs nothing.\n']
    assert not (tmp_path / "runs" / "dynamic_bandit.png").exists()  # the demo has trained, without matplotlib
