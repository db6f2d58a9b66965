"""Markup is escaped, whatever it contains."""

import pytest

from adapters.tracking.report.markup import Html, element, escaped, joined


def test_text_is_escaped_and_markup_is_not() -> None:
    assert element("td", "<b> & 'x'", element("i", "y")) == "<td>&lt;b&gt; &amp; &#x27;x&#x27;<i>y</i></td>"
    assert joined("<", Html("<br>")) == "&lt;<br>"


def test_attributes_are_escaped_and_named_after_python_names() -> None:
    found = element("a", class_='"><script>', aria_label="x", open=True, hidden=False, title=None, x=1.234, y=2.0, z=3)
    assert found == '<a class="&quot;&gt;&lt;script&gt;" aria-label="x" open x="1.23" y="2" z="3"></a>'
    assert element("meta", charset="utf-8") == '<meta charset="utf-8">'


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\n\tb", "a\n\tb"),
        ("\x00\x1b[31m", "\\x00\\x1b[31m"),
        ("\ud800", "\\ud800"),
        ("\u202eabc", "\\u202eabc"),  # turns the direction of the text around
        ("\r\x0b", "\\r\\x0b"),
        ("né 漢字 √ \xa0", "né 漢字 √ \xa0"),
    ],
)
def test_characters_that_a_page_must_not_have_become_codes(text: str, shown: str) -> None:
    assert escaped(text) == shown
    escaped(text).encode("utf-8")
