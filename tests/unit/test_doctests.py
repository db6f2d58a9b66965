"""Docstrings: the examples of `grpo` run and give what they say, and all entries of arguments and errors have one style."""

import ast
import doctest
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import grpo

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


def test_at_least_eight_docstring_examples_are_found() -> None:
    assert len({example.name for example in EXAMPLES}) >= 8


def test_every_docstring_example_runs_and_prints_what_it_shows(
    subtests: pytest.Subtests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for example in EXAMPLES:
        with subtests.test(example=example.name):
            torch.manual_seed(0)
            report: list[str] = []
            results = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=report.append)
            assert results.attempted + sum(doctest.SKIP in shown.options for shown in example.examples) > 0
            assert results.failed == 0, "".join(report)


ROOT = Path(__file__).resolve().parents[2]
ENTRY = re.compile(r"^    (?=\S)[\w*, `]+: (.)", re.MULTILINE)


def test_entries_of_arguments_and_errors_begin_as_sentences(subtests: pytest.Subtests) -> None:
    """`name: Meaning.` and not `name: meaning.`, as in Google's style."""
    for path in sorted([*ROOT.glob("grpo/**/*.py"), *ROOT.glob("adapters/**/*.py")]):
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
            if not text:
                continue
            for section in re.findall(r"^(?:Args|Raises):\n((?:    .*\n?|\n)+)", text, re.MULTILINE):
                lower = [entry[0].strip() for entry in ENTRY.finditer(section) if entry[1].islower()]
                with subtests.test(where=f"{name}: {getattr(node, 'name', '')}"):
                    assert not lower
