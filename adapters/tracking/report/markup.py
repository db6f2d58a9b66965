"""HTML from Python. Text is escaped by default, so that no completion and no setting can become part of the page."""

import html
import math
from typing import Any


class Html(str):
    """Finished markup. Every other string is text, which `element` escapes."""

    __slots__ = ()


def element(tag: str, /, *children: str, **attributes: Any) -> Html:
    """One element: `element("td", "a < b", class_="number")` is `<td class="number">a &lt; b</td>`.

    Args:
        tag: The element's name.
        children: `Html` is inserted as it is, and any other string is escaped.
        attributes: Their values are escaped. An underscore at the end of a name is removed, and others become hyphens. False
            leaves the attribute out, and True writes its name alone. Numbers get at most two decimals.
    """
    written = "".join(_attribute(key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items())
    inner = "".join(map(escaped, children))
    return Html(f"<{tag}{written}>" if tag in _VOID else f"<{tag}{written}>{inner}</{tag}>")


_VOID = {"meta", "br", "link", "img"}
"""Elements without an end tag."""


def joined(*parts: str) -> Html:
    """Markup and text, one after the other. Text is escaped."""
    return Html("".join(map(escaped, parts)))


def escaped(text: str) -> Html:
    """Text as markup. Control characters, and characters that UTF-8 does not have, are written as their escape codes."""
    if isinstance(text, Html):
        return text
    return Html(html.escape(plain(text)))


def plain(text: str) -> str:
    """Text with the escape codes of characters other than printable ones, line breaks, tabs, and spaces of any width."""

    def written(mark: str) -> str:
        is_harmless = mark in "\n\t" or mark.isprintable() or (mark.isspace() and ord(mark) >= 0xA0)
        return mark if is_harmless else mark.encode("unicode_escape").decode()

    return "".join(map(written, text))


def _attribute(name: str, value: Any) -> str:
    if value is False or value is None:
        return ""
    if value is True:
        return f" {name}"
    if isinstance(value, float):
        value = f"{value:.2f}".rstrip("0").rstrip(".") if math.isfinite(value) else "0"
    return f' {name}="{escaped(str(value))}"'
