"""How the site shows docstrings: examples and formulas as code. `mkdocs.yml` names this file as an extension of griffe.

Griffe knows the section "Examples:", and the docstrings here have "Example:". A formula in a docstring is a paragraph of its own,
which Markdown would join to one line.
"""

import re
import textwrap
from typing import Any

import griffe

EXAMPLE = re.compile(r"^Example:\n(?P<body>(?:[ \t]+\S.*\n?|\s*\n)+)", re.MULTILINE)
FORMULA = re.compile(r"^\S+.*(?: = | <- |<= ).*[^.:;,]$")
PROSE = re.compile(r"\b(?:is|are|has|have|the|a|an|of)\b (?:\w+ ){2}|https?:")


class SiteDocstrings(griffe.Extension):
    """Rewrites each docstring before griffe parses it."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for every module, class, function and attribute."""
        if obj.docstring:
            obj.docstring.value = for_the_site(obj.docstring.value)


def for_the_site(docstring: str) -> str:
    """The docstring with its examples and formulas as blocks of code."""
    docstring = EXAMPLE.sub(_as_examples, docstring + "\n").rstrip()
    return "\n\n".join(_as_code(paragraph) for paragraph in docstring.split("\n\n"))


def _as_examples(found: re.Match[str]) -> str:
    body = textwrap.dedent(found["body"]).strip("\n")
    if body.startswith(">>>"):
        return f"Examples:\n{textwrap.indent(body, '    ')}\n"
    text, _, code = body.partition("::\n")  # a sentence, and code that is indented below it
    block = f"{text}:\n\n```python\n{textwrap.dedent(code).strip()}\n```"
    return f"Examples:\n{textwrap.indent(block, '    ')}\n"


def _as_code(paragraph: str) -> str:
    """A paragraph of formulas, as a block of code."""
    lines = paragraph.split("\n")
    is_formula = FORMULA.match(lines[0]) and not PROSE.search(paragraph) and not re.search(r"[:`]|>>>", paragraph)
    return f"```text\n{paragraph}\n```" if is_formula else paragraph
