"""The code in README.md, docs/ and the READMEs of grpo/ and adapters/ runs as it is typed there."""

import ast
import json
import math
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.launches import printed_by

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

FENCE = re.compile(
    r"^```(?P<language>[\w+-]*)[^\n]*\n(?P<code>.*?)^```[ \t]*$(?:\n+^```text\n(?P<printed>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A block of Python."""

    line: int
    """The line of the block's first statement."""
    code: str
    is_run: bool
    printed: str | None
    """The text that follows it in a block of its own."""


def python_blocks(document: str) -> list[Block]:
    blocks = []
    for found in FENCE.finditer(document):
        if found["language"] in ("python", "py"):
            above = document[: found.start()].rstrip()
            first_line = document.count("\n", 0, found.start("code")) + 1
            blocks.append(Block(first_line, found["code"], not above.endswith(NOT_RUN), found["printed"]))
    return blocks


def minimal_example() -> str:
    """The first Python block of the core's README after the heading that says "Minimal example"."""
    document = (ROOT / "grpo" / "README.md").read_text(encoding="utf-8")
    heading = re.search(r"^#+ .*minimal example.*$", document, re.MULTILINE | re.IGNORECASE)
    assert heading, "grpo/README.md has no heading with 'Minimal example'"
    blocks = python_blocks(document[heading.end() :])
    assert blocks, "no Python block follows the heading"
    return blocks[0].code


def run(code: str, *arguments: str, folder: Path) -> str:
    """Standard output of a new interpreter in an empty folder; single-threaded, without a display."""
    return printed_by("-c", code, *arguments, folder=folder, seconds=280, MPLBACKEND="Agg")


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


def test_the_readme_opens_with_a_policy_that_learns(tmp_path: Path) -> None:
    """It prints the probabilities of five arms, and arm 3 has nearly all."""
    first = python_blocks(README.read_text(encoding="utf-8"))[0].code
    assert first != minimal_example()
    printed = run(first, folder=tmp_path)
    assert float(re.findall(r"[0-9.]+", printed[printed.index("[") :])[3]) > 0.9


RUN_IN_ORDER = """
import contextlib, io, json, sys, traceback
path, namespace, results = sys.argv[1], {"__name__": "__main__"}, []
for line, code, _, _ in json.loads(sys.argv[2]):
    printed, failure = io.StringIO(), None
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile("\\n" * (line - 1) + code, path, "exec"), namespace)
    except BaseException:
        failure = traceback.format_exc()
    results.append((printed.getvalue(), failure))
    if failure:
        break
print(json.dumps(results))
"""


def blocks_of(path: Path) -> list[Block]:
    return [block for block in python_blocks(path.read_text(encoding="utf-8")) if block.is_run]


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [path for path in DOCUMENTS if blocks_of(path)], ids=lambda p: str(p.relative_to(ROOT))
)
def test_every_block_runs_and_prints_the_output_shown_below_it(path: Path, tmp_path: Path) -> None:
    """In the order of the page, each after those above it, in one new interpreter."""
    blocks = blocks_of(path)
    results = json.loads(run(RUN_IN_ORDER, path.name, json.dumps(blocks), folder=tmp_path))
    for block, (printed, failure) in zip(blocks, results, strict=False):  # nothing runs after a failure
        assert failure is None, f"The block at line {block.line} fails:\n{failure}"
        assert block.printed in (None, printed), f"line {block.line}"
    assert len(results) == len(blocks)


def test_python_blocks_are_found_with_their_line_marker_and_output() -> None:
    document = "```python\na = 1\n```\ntext\n\n<!-- not run -->\n```python\nb = 2\nc = 3\n```\n"
    document += "```bash\nls\n```\n```py\nd\n```\n\n```text\nprinted\n```\n"
    assert python_blocks(document) == [
        (2, "a = 1\n", True, None),
        (8, "b = 2\nc = 3\n", False, None),
        (15, "d\n", True, "printed\n"),
    ]
    read_first = ["README.md", "grpo/README.md", "docs/index.md", "docs/your_domain.md", "docs/tracking.md"]
    assert sum(block.printed is not None for name in read_first for block in blocks_of(ROOT / name)) > 5
