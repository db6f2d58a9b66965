"""The committed notebooks: what counts as the same output, and the README's picture."""

import base64
import json

import nbformat

from tools import notebooks


def test_numbers_may_differ_by_rounding_and_words_may_not() -> None:
    assert notebooks.is_same("arm 3   0.891 +- 0.007", "arm 3   0.884  +- 0.009")
    assert notebooks.is_same("regret 460", "regret 440")
    assert not notebooks.is_same("regret 460", "regret 300")
    assert not notebooks.is_same("share 0.9", "share 0.6")
    assert not notebooks.is_same("ours 0.9", "tuned 0.9")


def test_changed_lines_and_numbers_of_lines_are_named() -> None:
    found = notebooks.differences(["a 1\nb 2", "c"], ["a 1\nb 9", "c\nd"])
    assert found == [
        "cell 0:\n  committed b 2\n  now       b 9",
        "cell 1: 1 lines are committed, and 2 are printed now",
    ]
    assert notebooks.differences(["a 1"], ["a 1.01"]) == []


def test_neighbouring_outputs_of_one_stream_are_joined() -> None:
    parts = [("stdout", "a"), ("stdout", "b"), ("stderr", "c"), ("stdout", "d")]
    outputs = [nbformat.v4.new_output("stream", name=name, text=text) for name, text in parts]
    assert [output.text for output in notebooks.joined(outputs)] == ["ab", "c", "d"]


def test_the_committed_notebooks_are_executed_in_order_and_print_no_warning() -> None:
    for path in notebooks.FOLDER.glob("*.ipynb"):
        cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
        assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), path.name
        streams = {
            output.get("name") for cell in cells for output in cell["outputs"] if output["output_type"] == "stream"
        }
        assert streams <= {"stdout"}, path.name


def test_the_picture_of_the_readme_is_the_notebooks() -> None:
    name, part, picture = notebooks.HERO
    cells = json.loads((notebooks.FOLDER / name).read_text(encoding="utf-8"))["cells"]
    (cell,) = (cell for cell in cells if part in "".join(cell["source"]))
    (drawn,) = (output["data"]["image/png"] for output in cell["outputs"] if "image/png" in output.get("data", {}))
    file = notebooks.FOLDER.parent / "docs" / "images" / picture
    assert base64.b64decode("".join(drawn)) == file.read_bytes()
    assert f"](docs/images/{picture})" in (notebooks.FOLDER.parent / "README.md").read_text(encoding="utf-8")
