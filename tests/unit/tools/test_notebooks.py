"""The committed notebooks: what counts as the same output, the pages' pictures, and the ladder of four steps."""

import json
import re

import nbformat
import pytest

from tools import notebooks

ROOT = notebooks.FOLDER.parent


def test_numbers_may_differ_by_rounding_and_words_may_not() -> None:
    assert notebooks.is_same("arm 3   0.891 +- 0.007", "arm 3   0.884  +- 0.009")
    assert notebooks.is_same("regret 460", "regret 440")
    assert not notebooks.is_same("regret 460", "regret 300")
    assert not notebooks.is_same("share 0.9", "share 0.6")
    assert not notebooks.is_same("ours 0.9", "tuned 0.9")


def test_changed_lines_and_numbers_of_lines_are_named() -> None:
    found = notebooks.differences(["a 1\nb 2", "c"], ["a 1\nb 9", "c\nd"])
    changed = "cell 0:\n  committed b 2\n  now       b 9"
    assert found == [changed, "cell 1: 1 lines are committed, and 2 are printed now"]
    assert notebooks.differences(["a 1"], ["a 1.01"]) == []


def test_neighbouring_outputs_of_one_stream_are_joined() -> None:
    parts = [("stdout", "a"), ("stdout", "b"), ("stderr", "c"), ("stdout", "d")]
    outputs = [nbformat.v4.new_output("stream", name=name, text=text) for name, text in parts]
    assert [output.text for output in notebooks.joined(outputs)] == ["ab", "c", "d"]


def test_the_committed_notebooks_are_executed_in_order_and_print_no_warning() -> None:
    for path in notebooks.FOLDER.glob("*.ipynb"):
        cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
        assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1)), path.name
        outputs = [output for cell in cells for output in cell["outputs"]]
        streams = {output.get("name") for output in outputs if output["output_type"] == "stream"}
        assert streams <= {"stdout"}, path.name


def test_the_pictures_of_the_pages_are_the_notebooks_and_small() -> None:
    for picture, (name, part) in notebooks.PICTURES.items():
        notebook = json.loads((notebooks.FOLDER / name).read_text(encoding="utf-8"))
        file = ROOT / "docs" / "images" / picture
        assert notebooks.picture_of(notebook, part) == file.read_bytes()
        assert file.stat().st_size < 150_000
        assert f"](docs/images/{picture})" in (ROOT / "README.md").read_text(encoding="utf-8")


STEPS = ("grpo_dynamic_bandit_demo", "own_domain", "robot_arm", "language_model")
"""The notebooks of the ladder, in order."""


def test_readme_and_the_site_list_the_four_steps_in_order() -> None:
    for page, folder in {"README.md": "notebooks", "docs/index.md": "../notebooks"}.items():
        (row,) = (line for line in (ROOT / page).read_text(encoding="utf-8").splitlines() if "four steps" in line)
        assert re.findall(r"\]\((\S+?)\)", row) == [f"{folder}/{step}.ipynb" for step in STEPS]


@pytest.mark.parametrize("step", STEPS)
def test_a_step_says_how_to_install_it_checks_its_policy_trains_and_ends_with_a_picture(step: str) -> None:
    cells = json.loads((notebooks.FOLDER / f"{step}.ipynb").read_text(encoding="utf-8"))["cells"]
    first = "".join(cells[0]["source"])
    assert first.startswith(f"# Step {STEPS.index(step) + 1} of 4: ")
    assert re.search(r'`pip install -e "\.\[\S*notebooks\]"`', first)
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    sources = ["".join(cell["source"]) for cell in code]
    shown = [json.dumps(cell["outputs"]) for cell in code]
    checks = next(number for number, source in enumerate(sources) if "check_policy(" in source)
    assert re.search(r"check_policy\(\w+\): \d+ passed", shown[checks])
    assert "FAILED" not in shown[checks]
    assert any(re.search(r"\.train\(|\.step\(|train_control\(", source) for source in sources[checks:])
    assert re.search(r'"image/(png|gif)"', shown[-1])
    imported = {name for source in sources for name in re.findall(r"^from ((?:grpo|adapters)\S*)", source, re.M)}
    assert not any(part.startswith("_") for name in imported for part in name.split(".")), "public names only"


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS)
def test_the_short_form_of_a_step_runs_and_draws(step: str) -> None:
    path = notebooks.FOLDER / f"{step}.ipynb"
    notebook = notebooks.executed(path, short=True)
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert {output.name for output in outputs if output.output_type == "stream"} <= {"stdout"}
    assert any("image/" in kind for kind in outputs[-1].get("data", {}))
    assert notebook != nbformat.read(path, as_version=4), "the settings are the short ones"


def test_a_short_setting_replaces_one_assignment() -> None:
    cell = nbformat.v4.new_code_cell("NUM_STEPS = 200_000  # of the environment\nNUM = NUM_STEPS\nNUM_STEPS == 1")
    notebook = nbformat.v4.new_notebook(cells=[cell], metadata={"short": {"NUM_STEPS": 16}})
    notebooks.shorten(notebook)
    assert cell.source == "NUM_STEPS = 16  # of the environment\nNUM = NUM_STEPS\nNUM_STEPS == 1"
