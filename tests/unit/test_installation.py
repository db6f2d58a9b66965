"""What people are told to install works where they are, and what stands in the place of this package is named."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from grpo.arguments import install_command

ROOT = Path(__file__).resolve().parents[2]
CHECKOUT = 'pip install ".[gym]" in the checkout'
CLONE = {"url": "https://x/y.git", "vcs_info": {"vcs": "git"}}
WHEEL = {"url": "file:///tmp/the.whl", "archive_info": {}}


@pytest.mark.parametrize(
    ("files", "command"),
    [
        ({"RECORD": ""}, 'pip install "model-agnostic-grpo[gym]"'),  # from an index
        ({"RECORD": "", "direct_url.json": json.dumps({"url": "file:///a/checkout", "dir_info": {}})}, CHECKOUT),
        (
            {"RECORD": "", "direct_url.json": json.dumps(CLONE)},
            'pip install "model-agnostic-grpo[gym] @ git+https://x/y.git"',
        ),
        (
            {"RECORD": "", "direct_url.json": json.dumps(WHEEL)},
            'pip install "model-agnostic-grpo[gym] @ file:///tmp/the.whl"',
        ),
        ({}, CHECKOUT),  # metadata that a build left in a checkout
    ],
)
def test_the_command_follows_where_the_package_came_from(
    files: dict[str, str], command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model_agnostic_grpo-0.1.0.dist-info"
    folder.mkdir()
    for name, text in {"METADATA": "Name: model-agnostic-grpo\nVersion: 0.1.0\n", **files}.items():
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert install_command("gym") == command


def test_no_page_and_no_message_names_what_no_index_has() -> None:
    """Anybody could register the name. One function knows whether this package came from an index."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    named = [
        name
        for name in listing.split("\0")
        if Path(name).suffix in (".py", ".md", ".ipynb") and name != "tests/unit/test_installation.py"
        if re.search(r"model-agnostic-grpo\[", (ROOT / name).read_text(encoding="utf-8"))
    ]
    assert named == []


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_the_help_of_the_command_imports_no_torch(tmp_path: Path) -> None:
    code = "import sys; from adapters.cli import main\ntry: main(['--help'])\nfinally: print(sorted(sys.modules))"
    done = run(tmp_path, "-c", code)
    assert "COMMAND" in done.stdout
    assert "'adapters.cli'" in done.stdout
    assert "'torch'" not in done.stdout


@pytest.mark.slow
def test_the_command_has_a_version(tmp_path: Path) -> None:
    import grpo

    done = run(tmp_path, "-c", "from adapters.cli import main; main(['--version'])")
    assert done.stdout == f"model-agnostic-grpo {grpo.__version__}\n"
    assert done.returncode == 0


def test_a_script_called_grpo_is_named(tmp_path: Path) -> None:
    script = tmp_path / "grpo.py"
    script.write_text("from adapters.bandits import SoftmaxPolicy\n")
    done = run(tmp_path, "grpo.py")
    says = f"`import grpo` must find {ROOT / 'grpo' / '__init__.py'}, but it finds {script}. Rename that file"
    assert says in done.stderr
    (tmp_path / "train.py").write_text("from grpo import GRPOTrainer\n")
    script.write_text("")
    assert str(script) in run(tmp_path, "train.py").stderr  # Python's own message
