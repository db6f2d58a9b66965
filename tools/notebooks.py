"""Execute the notebooks, and compare what they print with what is committed; with --update, commit what they print.

python tools/notebooks.py [--update | --short] [NOTEBOOK ...]

Words must be the same, and numbers close: another processor rounds differently. Pictures are not compared. --short executes
notebooks with the settings in their metadata, such as `"short": {"NUM_ITERATIONS": 2}`, and compares and writes nothing.
"""

import argparse
import base64
import re
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"
NUMBER = re.compile(r"-?\d*\.?\d+(?:e[+-]?\d+)?")
RELATIVE, ABSOLUTE = 0.15, 0.15
"""Largest difference of two numbers that count as the same."""
PICTURES = {
    "dynamic_bandit.png": ("grpo_dynamic_bandit_demo.ipynb", 'title=name)\naxes[0].set_ylabel("probability: median'),
    "robot_arm.gif": ("robot_arm.ipynb", "film(untrained, policy)"),
}
"""Pictures of README and the pages, by name in docs/images: the notebook, and a part of the cell that draws the picture."""


def executed(path: Path, *, short: bool = False) -> Any:
    """Execute a notebook. Outputs of one stream are joined, and times are left out."""
    notebook = nbformat.read(path, as_version=4)
    if short:
        shorten(notebook)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(FOLDER.parent)}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)
    return notebook


def shorten(notebook: Any) -> None:
    """Replace each assignment `NAME = ...` to a name of `metadata.short`, which has to occur once."""
    for name, value in notebook.metadata.get("short", {}).items():
        assignment = re.compile(rf"^{name} = \S+", re.MULTILINE)
        (cell,) = (cell for cell in notebook.cells if cell.cell_type == "code" and assignment.search(cell.source))
        cell.source = assignment.sub(f"{name} = {value!r}", cell.source)


def joined(outputs: list[Any]) -> list[Any]:
    """Join neighbouring outputs of one stream."""
    result: list[Any] = []
    for output in outputs:
        last = result[-1] if result else None
        if last is not None and output.output_type == "stream" and last.get("name") == output.name:
            last.text += output.text
        else:
            result.append(output)
    return result


def printed(notebook: Any) -> list[str]:
    """What each code cell prints."""
    return [
        "".join(output.text for output in cell.outputs if output.output_type == "stream")
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def differences(committed: list[str], fresh: list[str]) -> list[str]:
    """The lines that differ in their words, or in a number by more than rounding."""
    found = []
    for number, (old, new) in enumerate(zip(committed, fresh, strict=True)):
        old_lines, new_lines = old.splitlines(), new.splitlines()
        if len(old_lines) != len(new_lines):
            found.append(f"cell {number}: {len(old_lines)} lines are committed, and {len(new_lines)} are printed now")
        for before, after in zip(old_lines, new_lines, strict=False):
            if not is_same(before, after):
                found.append(f"cell {number}:\n  committed {before}\n  now       {after}")
    return found


def is_same(before: str, after: str) -> bool:
    """Whether two lines have the same words, and numbers that are close."""
    if NUMBER.sub("#", before).split() != NUMBER.sub("#", after).split():
        return False
    pairs = zip(map(float, NUMBER.findall(before)), map(float, NUMBER.findall(after)), strict=True)
    return all(abs(a - b) <= max(ABSOLUTE, RELATIVE * abs(a)) for a, b in pairs)


def picture_of(notebook: Any, part: str) -> bytes:
    """The picture that the cell with `part` in its source has drawn: PNG or GIF."""
    (cell,) = (cell for cell in notebook["cells"] if part in "".join(cell["source"]))
    drawn = (output.get("data", {}) for output in cell["outputs"])
    (picture,) = (data[kind] for data in drawn for kind in ("image/png", "image/gif") if kind in data)
    return base64.b64decode("".join(picture))


def main() -> None:
    """Execute and compare, or update."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--update", action="store_true")
    how.add_argument("--short", action="store_true")
    parser.add_argument("notebooks", nargs="*", type=Path, default=sorted(FOLDER.glob("*.ipynb")))
    args = parser.parse_args()
    failed = False
    for path in args.notebooks:
        print(f"{path.name} ...", flush=True)
        fresh = executed(path, short=args.short)
        if args.update:
            nbformat.write(fresh, path)
            for picture, (name, part) in PICTURES.items():
                if path.name == name:
                    (FOLDER.parent / "docs" / "images" / picture).write_bytes(picture_of(fresh, part))
        elif args.short:
            continue
        elif found := differences(printed(nbformat.read(path, as_version=4)), printed(fresh)):
            failed = True
            print("\n".join(found))
    if failed:
        sys.exit("The committed outputs are not those of this code. Look at them, and run tools/notebooks.py --update.")


if __name__ == "__main__":
    main()
