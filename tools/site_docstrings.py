"""How the site shows docstrings: examples and formulas as code. `mkdocs.yml` names this file as an extension of griffe.

Griffe knows the section "Examples:", and the docstrings here have "Example:". A formula in a docstring is a paragraph of its
own, which Markdown would join to one line. An example that is not in a docstring stands on a page of docs/api, below the line
that names the object; the site shows it with the docstring, before the members.
"""

import re
import textwrap
from pathlib import Path
from typing import Any

import griffe

EXAMPLE = re.compile(r"^Example:\n(?P<body>(?:[ \t]+\S.*\n?|\s*\n)+)", re.MULTILINE)
FORMULA = re.compile(r"^\S+.*(?: = | <- |<= ).*[^.:;]$", re.DOTALL)
SOURCE = re.compile(r"^Source:\n(?P<text>(?:[ \t]+\S.*(?:\n|\Z))+)", re.MULTILINE)
PROSE = re.compile(r"\b(?:is|are|has|have|the|a|an|of)\b (?:\w+ ){2}|https?:")


SECTION = re.compile(r"^[A-Z][a-z]+:$")
SHARED = re.compile(r"^(?P<indent>    )(?P<names>\w+(?:, \w+)+): (?P<text>.*\n?(?:^     +\S.*\n?)*)", re.MULTILINE)
"""A line below "Args:" that describes several parameters."""

API = Path(__file__).resolve().parents[1] / "docs" / "api"
BLOCK = r"(?:<!-- not run -->\n)?```python\n.*?^```\n(?:\n```text\n.*?^```\n)?"
OPTIONS = r"(?P<options>(?: {4}[^\n]*\n)*)"
DOCUMENTED = re.compile(rf"^::: (?P<name>\S+)\n{OPTIONS}(?:\n(?P<example>{BLOCK}))?", re.MULTILINE | re.DOTALL)
"""The line that documents an object, and the example below it."""


def examples_on_pages() -> dict[tuple[str, str], str]:
    """The examples on the pages of docs/api, by package and name."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(API.glob("*.md"))]
    found = [match for text in texts for match in DOCUMENTED.finditer(text) if match["example"]]
    return {tuple(match["name"].rsplit(".", 1)): match["example"] for match in found}  # type: ignore[misc]


class SiteDocstrings(griffe.Extension):
    """Rewrites each docstring before griffe parses it."""

    def __init__(self) -> None:
        super().__init__()
        self.examples = examples_on_pages()

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for every module, class, function and attribute."""
        text = for_the_site(obj.docstring.value) if obj.docstring else ""
        if obj.is_class:
            text += fields_of(obj)
        for (package, name), example in self.examples.items():
            if name == obj.name and obj.parent and obj.parent.is_module and obj.path.startswith(f"{package}."):
                text += f"\n\nExamples:\n{textwrap.indent(example, '    ')}"
        if obj.docstring:
            obj.docstring.value = text
        elif text:
            obj.docstring = griffe.Docstring(text, parent=obj, parser="google")


def fields_of(cls: griffe.Object) -> str:
    """A list of a class's fields, with what their docstrings say. The fields are not documented one by one any more."""
    fields = [member for name, member in cls.members.items() if member.is_attribute and not name.startswith("_")]
    documented = [field for field in fields if not field.is_alias and field.docstring]
    lines = [f"    {field.name}: {' '.join(field.docstring.value.split())}" for field in documented]  # type: ignore[union-attr]
    for field in documented:
        field.docstring = None
    return "\n\nAttributes:\n" + "\n".join(lines) if lines else ""


def for_the_site(docstring: str) -> str:
    """The docstring with its examples and formulas as blocks of code, and with one line per parameter."""
    docstring = EXAMPLE.sub(_as_examples, docstring + "\n").rstrip()
    docstring = SHARED.sub(_one_by_one, docstring)
    docstring = SOURCE.sub(lambda found: f"Source: {' '.join(found['text'].split())}\n", docstring)
    return "\n\n".join(_as_code(paragraph) for paragraph in docstring.split("\n\n"))


def _as_examples(found: re.Match[str]) -> str:
    body = textwrap.dedent(found["body"]).strip("\n")
    if body.startswith(">>>"):
        block = f"```pycon\n{body}\n```"
    else:
        text, _, code = body.partition("::\n")  # a sentence, and code that is indented below it
        block = f"{text}:\n\n```python\n{textwrap.dedent(code).strip()}\n```"
    return f"Examples:\n{textwrap.indent(block, '    ')}\n"


def _one_by_one(found: re.Match[str]) -> str:
    """A line that describes several parameters, once for each of them."""
    return "".join(f"{found['indent']}{name}: {found['text']}" for name in found["names"].split(", "))


def _as_code(paragraph: str) -> str:
    """A paragraph of formulas, or a table, as a block of code."""
    lines = paragraph.split("\n")
    if SECTION.match(lines[0]) or paragraph.startswith(" "):
        return paragraph
    is_table = any(re.match(r" {2,}\S+ {2,}", line) for line in lines[1:])
    is_formula = FORMULA.match(paragraph) and not PROSE.search(paragraph) and not re.search(r"[:`]|>>>", paragraph)
    return f"```text\n{paragraph}\n```" if is_table or is_formula else paragraph
