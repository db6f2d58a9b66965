"""Docstrings: the examples of `grpo` run and give what they say, and all entries of arguments and errors have one style."""

import ast
import doctest
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

import grpo
from grpo import config, group_relative_advantages, step_weights
from grpo._advantages.groups import Baseline, Credit, Scale
from grpo._objective.weights import Aggregation
from grpo.surrogates import SURROGATES

DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
PARSER = doctest.DocTestParser()


def documented_examples() -> Iterator[doctest.DocTest]:
    """Read from the source: the type checks of these tests wrap functions, and `doctest` would pass over them."""
    names = ["grpo", *(module.name for module in pkgutil.walk_packages(grpo.__path__, prefix="grpo."))]
    for name in names:
        module = importlib.import_module(name)
        assert module.__file__ is not None
        for node in ast.walk(ast.parse(Path(module.__file__).read_text(encoding="utf-8"))):
            text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
            if text and ">>>" in text:
                where = f"{name}.{getattr(node, 'name', '')}".rstrip(".")
                yield PARSER.get_doctest(text, dict(vars(module)), where, module.__file__, getattr(node, "lineno", 0))


EXAMPLES = list(documented_examples())


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_every_docstring_example_runs_and_prints_what_it_shows(
    example: doctest.DocTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len({one.name for one in EXAMPLES}) >= 8
    monkeypatch.chdir(tmp_path)
    report: list[str] = []
    results = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=report.append)
    assert results.attempted + sum(doctest.SKIP in shown.options for shown in example.examples) > 0
    assert results.failed == 0, "".join(report)


ROOT = Path(__file__).resolve().parents[2]
SECTION = re.compile(r"^(?:Args|Raises):\n((?:    .*\n?|\n)+)", re.MULTILINE)
ENTRY = re.compile(r"^    (?=\S)[\w*, `]+: (.)", re.MULTILINE)


def test_entries_of_arguments_and_errors_begin_as_sentences() -> None:
    """`name: Meaning.` and not `name: meaning.`, as in Google's style."""
    lower = [
        (path.relative_to(ROOT).as_posix(), getattr(node, "name", ""), entry[0].strip())
        for path in sorted([*ROOT.glob("grpo/**/*.py"), *ROOT.glob("adapters/**/*.py")])
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, DOCUMENTED)
        for section in SECTION.findall(ast.get_docstring(node) or "")
        for entry in ENTRY.finditer(section)
        if entry[1].islower()
    ]
    assert not lower


def choices_in(table: str) -> list[str]:
    """The first words of the table's lines, each followed by two spaces or more."""
    return re.findall(r"^ +(\w+)  +\S", table, re.MULTILINE)


def test_the_docstrings_of_the_functions_have_a_line_for_each_choice() -> None:
    baselines, scales = (group_relative_advantages.__doc__ or "").split("the scale s is one of")
    assert set(choices_in(baselines)) == {*get_args(Baseline)}
    assert set(choices_in(scales)) == {*get_args(Scale)}
    assert set(choices_in(step_weights.__doc__ or "")) == {*get_args(Aggregation)}


def test_the_docstring_of_credit_explains_each_credit() -> None:
    (settings,) = ast.parse(inspect.getsource(config.AdvantageConfig)).body
    assert isinstance(settings, ast.ClassDef)
    fields = [node.target.id if isinstance(node, ast.AnnAssign) else "" for node in settings.body]  # type: ignore[union-attr]
    docstring = ast.unparse(settings.body[fields.index("credit") + 1])
    assert set(re.findall(r"`(\w+)`: ", docstring)) == {*get_args(Credit)}


@pytest.mark.parametrize("name", SURROGATES)
def test_the_docstring_of_each_surrogate_has_its_formula_and_its_source(name: str) -> None:
    text = inspect.getdoc(SURROGATES[name]) or ""
    assert re.search(r"^l\[n,t\] = .+\n(.*\n)+Source:\n    \S", text, re.MULTILINE), text
