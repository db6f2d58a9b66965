"""The code in README.md, docs/ and the READMEs of grpo/ and adapters/ runs as it is typed there."""

import ast
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
DOCUMENTS = [
    path
    for path in (
        README,
        ROOT / "grpo" / "README.md",
        *sorted(ROOT.glob("adapters/**/*.md")),
        *sorted(ROOT.glob("docs/**/*.md")),
    )
    if "```py" in path.read_text(encoding="utf-8")
]
NOT_RUN = "<!-- not run -->"

FENCE = re.compile(r"^```(?P<language>[\w+-]*)[^\n]*\n(?P<code>.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)


def python_blocks(document: str) -> list[tuple[int, str, bool]]:
    """(line of its first statement, code, whether it is to be run) of each block of Python."""
    blocks = []
    for found in FENCE.finditer(document):
        if found["language"] in ("python", "py"):
            above = document[: found.start()].rstrip()
            first_line = document.count("\n", 0, found.start("code")) + 1
            blocks.append((first_line, found["code"], not above.endswith(NOT_RUN)))
    return blocks


def minimal_example() -> str:
    """The first Python block after the heading that says "Minimal example"."""
    document = README.read_text(encoding="utf-8")
    heading = re.search(r"^#+ .*minimal example.*$", document, re.MULTILINE | re.IGNORECASE)
    assert heading, "README.md has no heading with 'Minimal example'"
    blocks = python_blocks(document[heading.end() :])
    assert blocks, "no Python block follows the heading"
    return blocks[0][1]


def run(code: str, *arguments: str, folder: Path) -> str:
    """Standard output of a new interpreter in an empty folder; single-threaded, without a display."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


def test_the_minimal_example_runs_as_typed_and_says_that_nothing_was_updated(tmp_path: Path) -> None:
    """Four states in groups of four are 16 rows: 8 updates of 2 rows in each of two passes, none of them applied."""
    code = minimal_example()
    for part in ("GRPOConfig(group_size=4, batch_size=2, num_epochs_per_update=2)", "trainer.step(", "print(metrics)"):
        assert part in code
    printed = run(code, folder=tmp_path)
    metrics = ast.literal_eval(printed[printed.index("{") :].strip())
    assert metrics["train/skipped_updates"] == 16.0
    assert metrics["train/grad_norm"] == metrics["train/learning_rate"] == 0.0
    assert metrics["group_stats/num_groups"] == metrics["group_stats/avg_group_size"] == 4.0
    assert all(math.isfinite(value) for value in metrics.values())


RUN_IN_ORDER = """
import json, sys
namespace = {"__name__": "__main__"}
for line, code, _ in json.loads(sys.argv[1]):
    try:
        exec(compile("\\n" * (line - 1) + code, sys.argv[2], "exec"), namespace)
    except BaseException:
        print(f"The block at line {line} of {sys.argv[2]} fails:", file=sys.stderr)
        raise
"""


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_block_runs(path: Path, tmp_path: Path) -> None:
    """In the order of the page, each after those above it, in one interpreter."""
    blocks = [block for block in python_blocks(path.read_text(encoding="utf-8")) if block[2]]
    assert blocks, "every block of this page is marked as not run"
    run(RUN_IN_ORDER, json.dumps(blocks), str(path.relative_to(ROOT)), folder=tmp_path)


def test_what_counts_as_a_block() -> None:
    document = "```python\na = 1\n```\ntext\n\n<!-- not run -->\n```python\nb = 2\nc = 3\n```\n"
    document += "```bash\nls\n```\n```py\nd\n```\n"
    assert python_blocks(document) == [(2, "a = 1\n", True), (8, "b = 2\nc = 3\n", False), (15, "d\n", True)]
