"""The mutation script changes one place at a time, and runs the tests that execute it."""

import subprocess
from pathlib import Path
from typing import cast
from unittest.mock import Mock

import coverage
import pytest

from tests.support.launches import printed_by
from tools.mutation import copy_checkout, executed_by, executors_of, failed_test, listed_as_equivalent, mutants_of

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


def test_a_mutant_is_run_against_the_tests_that_execute_its_line() -> None:
    executed = coverage.CoverageData(no_disk=True)
    for context, lines in {
        "": [1, 2, 9],  # at import
        "tests/test_other.py::test_all|run": [3, 4, 7],
        "tests/test_steps.py::test_it[a|b]|run": [3, 4],
        "tests/adapters/test_a.py::test_it|teardown": [4],
        "tests/test_fixture.py::test_it|setup": [7],
        "tests/test_fixture.py::test_it|run": [7],
    }.items():
        executed.set_context(context)
        executed.add_lines({"grpo/steps.py": lines})
    expected = {
        3: ["tests/test_steps.py::test_it[a|b]", "tests/test_other.py::test_all"],
        5: ["tests/test_steps.py::test_it[a|b]", "tests/test_other.py::test_all", "tests/adapters/test_a.py::test_it"],
        7: ["tests/test_fixture.py", "tests/test_other.py::test_all"],
        9: [
            "tests/test_steps.py::test_it[a|b]", "tests/test_fixture.py", "tests/test_other.py::test_all",
            "tests/adapters/test_a.py::test_it",
        ],
    }  # fmt: skip
    assert {line: executors_of("grpo/steps.py", line, executed) for line in expected} == expected
    assert executors_of("grpo/none.py", 1, executed) == []


def test_the_coverage_of_the_same_files_is_taken_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a checkout of one module and two tests."""
    monkeypatch.setattr("tools.mutation.ROOT", tmp_path)
    for name, text in {
        "grpo/a.py": "def first(): return 1\n\n\ndef second(): return 2\n",
        "tests/test_a.py": "from grpo import a\ndef test_first(): a.first()\ndef test_second(): a.second()\n",
        "pytest.ini": "[pytest]\nmarkers =\n slow\n faults\npythonpath = .\n",
        ".gitignore": ".mutants/\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "--quiet"], cwd=tmp_path, check=True)
    tree = copy_checkout(tmp_path / ".mutants" / "tree")
    executed = executed_by(tree, 1)
    assert [executors_of("grpo/a.py", line, executed) for line in (1, 4)] == [
        ["tests/test_a.py::test_first"], ["tests/test_a.py::test_second"],
    ]  # fmt: skip
    monkeypatch.setattr("subprocess.run", Mock(wraps=subprocess.run))
    executed_by(tree, 1)
    assert [call.args[0][0] for call in cast(Mock, subprocess.run).call_args_list] == ["git"]


def test_the_listed_mutants_are_still_in_the_source() -> None:
    root = Path(__file__).resolve().parents[3]
    listed = listed_as_equivalent()
    texts = {path: (root / path).read_text(encoding="utf-8") for path in {path for path, _, _ in listed}}
    today = {(path, m.before, m.after) for path, text in texts.items() for m in mutants_of(path, text)}
    assert set(listed) <= today
    assert all(reason.endswith(".") for reason in listed.values())


def test_a_mutant_is_killed_by_a_failing_or_broken_file_and_by_no_fault_of_the_runner(tmp_path: Path) -> None:
    """The tests run in a process that a second one forks, so a program asks here, and ends with both."""
    texts = {
        "slow": "import pytest\n@pytest.mark.slow\ndef test_it(): assert False",
        "right": "def test_it(): assert True",
        "wrong": "def test_it(): assert not 'so'",
        "broken": "import no_such_module",
    }
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n slow\n faults\n")
    for name, text in texts.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    ask = "from pathlib import Path; from tools.mutation import outcome_of_tests; import sys; tree = Path(sys.argv[1])"
    each = "print(*[outcome_of_tests(tree, [f'test_{name}.py']) for name in sys.argv[2:]])"
    assert printed_by("-c", f"{ask}; {each}", tmp_path, *texts).split() == ["survived", "survived", "killed", "killed"]
    (tmp_path / "conftest.py").write_text("def pytest_unconfigure(): raise ValueError('at the end')")
    expected = "try: outcome_of_tests(tree, ['test_right.py'])\nexcept RuntimeError as error: print(error)"
    assert "ValueError: at the end" in printed_by("-c", f"{ask}\n{expected}", tmp_path)
    assert printed_by("-c", f"{ask}; {each}", tmp_path, "wrong").split() == ["killed"], (
        "also if it leaves something open"
    )


def test_the_first_test_that_failed_is_named(tmp_path: Path) -> None:
    (tmp_path / "tree.log").write_text(
        "E   FAILED text.py\nSUBFAILED[text='a b'] tests/test_a.py::test_b[c d] - assert 0\nFAILED tests/test_a.py::test_e\n"
    )
    assert failed_test(tmp_path / "tree") == "tests/test_a.py::test_b[c d]"
    (tmp_path / "tree.log").write_text("ERROR tests/test_a.py\n")
    assert failed_test(tmp_path / "tree") == "tests/test_a.py"
    (tmp_path / "tree.log").write_text("2 passed\n")
    assert failed_test(tmp_path / "tree") == ""
