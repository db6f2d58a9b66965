"""Execute the notebooks, and compare what they print with what is committed; with --update, commit what they print.

python tools/notebooks.py [--update] [NOTEBOOK ...]

Words must be the same, and numbers close: another processor rounds differently. Pictures are not compared.
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
HERO = ("grpo_dynamic_bandit_demo.ipynb", 'title=name)\naxes[0].set_ylabel("probability: median', "dynamic_bandit.png")
"""A notebook, a part of the cell that draws the README's picture, and the picture's name in docs/images."""


def executed(path: Path) -> Any:
    """Execute a notebook. Outputs of one stream are joined, and times are left out."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(FOLDER.parent)}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)
    return notebook


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


def write_hero(notebook: Any) -> None:
    """Write the README's picture, which is one of the notebook's."""
    (cell,) = (cell for cell in notebook.cells if HERO[1] in cell.source)
    (picture,) = (output.data["image/png"] for output in cell.outputs if "image/png" in output.get("data", {}))
    (FOLDER.parent / "docs" / "images" / HERO[2]).write_bytes(base64.b64decode(picture))


def main() -> None:
    """Execute and compare, or update."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true")
    parser.add_argument("notebooks", nargs="*", type=Path, default=sorted(FOLDER.glob("*.ipynb")))
    args = parser.parse_args()
    failed = False
    for path in args.notebooks:
        print(f"{path.name} ...", flush=True)
        fresh = executed(path)
        if args.update:
            nbformat.write(fresh, path)
            if path.name == HERO[0]:
                write_hero(fresh)
        elif found := differences(printed(nbformat.read(path, as_version=4)), printed(fresh)):
            failed = True
            print("\n".join(found))
    if failed:
        sys.exit("The committed outputs are not those of this code. Look at them, and run tools/notebooks.py --update.")


if __name__ == "__main__":
    main()
