"""The mutation script changes one place at a time, and finds the tests of a module."""

from pathlib import Path

import pytest

from tools.mutation import failure_of, listed_as_equivalent, mirror_of, mutants_of, stages_of

CHANGES = {
    "a + b": ["a - b"], "a @ b": ["a * b"], "a and b or c": ["a and b and c", "a or b or c"],
    "a < b <= c": ["a <= b <= c", "a < b < c"], "a is not None": ["a is None"], "(a) * (b)": ["(a) / (b)"], "-a": ["(a)"],
    "not a": ["(a)"], "x = True": ["x = False"], "x = 0.5": ["x = 1.5"], "x = a if b else c": ["x = a if (not (b)) else c"],
    "[a for a in b if c]": ["[a for a in b if (not (c))]"], "if a: b()": ["if (not (a)): b()", "if a: pass"],
    "x += y": ["pass", "x -= y"], "raise ValueError(2)": ["pass"], "x: Literal[1] = 2": ["x: Literal[1] = 3"],
    "def f(x: Literal[1] = 2) -> Literal[3]: return x": [
        "def f(x: Literal[1] = 3) -> Literal[3]: return x", "def f(x: Literal[1] = 2) -> Literal[3]: return None",
    ],
    "@dataclass(frozen=True)\nclass A: x = 1": ["@dataclass(frozen=True)\nclass A: x = 2"],
}  # fmt: skip
"""A source text, and the mutants of it in any order, without those that replace a whole expression by `pass`."""


def test_each_operator_constant_condition_and_statement_has_its_mutant(subtests: pytest.Subtests) -> None:
    for text, expected in CHANGES.items():
        with subtests.test(text=text):
            found = [mutant.source for mutant in mutants_of("a.py", text)]
            assert sorted(source for source in found if source != "pass" or "pass" in expected) == sorted(expected)


def test_texts_annotations_and_unreachable_lines_have_no_mutants(subtests: pytest.Subtests) -> None:
    for text in (
        '"""A docstring."""', "assert_never(a)", "if TYPE_CHECKING:\n    import a", "x: int", "return", 'x = f"{a + 1}"',
    ):  # fmt: skip
        with subtests.test(text=text):
            assert list(mutants_of("a.py", text)) == []


def test_a_mutant_names_its_line_before_and_after() -> None:
    (mutant,) = mutants_of("grpo/a.py", "é = b\nx = (\n    'é',  c - d)\n")
    assert str(mutant) == "grpo/a.py:3\n    - 'é', c - d)\n    + 'é', c + d)"
    assert mutant.source == "é = b\nx = (\n    'é',  c + d)\n"


def test_the_tests_of_a_module_are_its_mirror_its_room_or_the_whole_core(tmp_path: Path) -> None:
    unit = tmp_path / "tests" / "unit"
    for folder in (unit / "_room", unit / "adapters", tmp_path / "grpo" / "_room"):
        folder.mkdir(parents=True)
    for name in ("_room/test_steps.py", "_room/test_steps_masks.py", "test_trainer.py", "test_metrics.py"):
        (unit / name).touch()
    mirror = ["tests/unit/_room/test_steps.py", "tests/unit/_room/test_steps_masks.py"]
    assert mirror_of("grpo/_room/steps.py", tmp_path) == mirror
    assert mirror_of("grpo/_room/other.py", tmp_path) == ["tests/unit/_room"]
    assert mirror_of("grpo/trainer.py", tmp_path) == ["tests/unit/test_trainer.py"]
    core = ["tests/unit/_room", "tests/unit/test_metrics.py", "tests/unit/test_trainer.py"]
    assert mirror_of("grpo/types.py", tmp_path) == core
    assert stages_of("grpo/types.py", tmp_path) == {"mirror": core, "property": ["tests/property"], "core": core}


def test_a_mutant_of_an_adapter_is_run_against_its_mirror_and_the_tests_of_its_adapter(tmp_path: Path) -> None:
    room = tmp_path / "tests" / "unit" / "adapters" / "tools" / "text"
    room.mkdir(parents=True)
    (room / "test_fill.py").touch()
    assert stages_of("adapters/tools/text/fill.py", tmp_path) == {
        "mirror": ["tests/unit/adapters/tools/text/test_fill.py"],
        "adapter": ["tests/unit/adapters/tools"],
    }
    assert stages_of("adapters/tools/text/spans.py", tmp_path)["mirror"] == ["tests/unit/adapters/tools/text"]
    assert stages_of("adapters/cli.py", tmp_path)["adapter"] == ["tests/unit/adapters"]


def test_the_listed_mutants_are_still_in_the_source() -> None:
    root = Path(__file__).resolve().parents[3]
    listed = listed_as_equivalent()
    texts = {path: (root / path).read_text(encoding="utf-8") for path in {path for path, _, _ in listed}}
    today = {(path, m.before, m.after) for path, text in texts.items() for m in mutants_of(path, text)}
    assert set(listed) <= today
    assert all(reason.endswith(".") for reason in listed.values())


def test_files_with_slow_tests_only_notice_nothing_and_a_failing_or_broken_file_is_returned(tmp_path: Path) -> None:
    texts = {
        "slow": "import pytest\n@pytest.mark.slow\ndef test_it(): assert False",
        "right": "def test_it(): assert True",
        "wrong": "def test_it(): assert not 'so'",
        "broken": "import no_such_module",
    }
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    for name, text in texts.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    slow, right, wrong, broken = (failure_of(tmp_path, [f"test_{name}.py"], 60) for name in texts)
    assert (slow, right, "not 'so'" in str(wrong), "no_such_module" in str(broken)) == (None, None, True, True)
