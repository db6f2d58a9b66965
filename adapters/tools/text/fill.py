"""Values of a call's free parameters, read from the request without a model. For English."""

import contextlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from fractions import Fraction
from typing import Any, Literal, NamedTuple

import jsonschema

from adapters.tools.catalogue.tools import Tool

from .encoders import STOP_WORDS

MAX_CHARACTERS = 4_000
"""Characters of a request that are read."""


class Found(NamedTuple):
    """A value in a request, and where it stands."""

    kind: str
    value: Any
    text: str
    start: int
    end: int


_FITS = {
    "quoted": 3, "address": 2, "name": 2, "code": 2, "phrase": 0, "number": -1, "date": -1, "time": -1,
}  # fmt: skip
"""How well each kind of value fits a text. `address`: an e-mail address, URL or path. `code`: a word with digits. `name`: words
with capitals. `phrase`: words without capitals, up to a stop word."""
_PREPOSITIONS = {
    "from": "from start origin departure source", "to": "to end destination arrival target", "by": "author artist",
    "in": "city location place country area", "near": "location", "at": "location place", "on": "date day",
}  # fmt: skip
"""Words in the names of parameters whose values often stand after a preposition. A hint counts 0.3 of a word of the name."""
_WITH_DIGITS = {"id", "code", "key", "phone", "versi", "zip", "time"}
"""Stems of the names of parameters whose values have digits."""
_ONES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_SCALES = {"k": 1000, "thousand": 1000, "M": 10**6, "million": 10**6, "billion": 10**9}
_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_DAY, _YEAR = r"(?P<day>\d\d?)(?:st|nd|rd|th)?", r"(?P<year>[12]\d{3})"
_MONTH, _MONTH_NUMBER = rf"(?P<month>{'|'.join(_MONTHS)})[a-z]*\.?", r"(?P<month>\d\d?)"
_DIGITS = r"(?<![\w.])(?P<digits>[-\u2212]?[$€£]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d{1,40}(?:\.\d+)?|\.\d+))"
_SCALE, _IN_WORDS = rf"\s?(?P<scale>{'|'.join(_SCALES)})\b", rf"(?i:\b(?P<word>{'|'.join(_ONES)})\b)"
_STOP = rf"(?:{'|'.join(STOP_WORDS)})(?![\w-])"
_CONTENT = rf"(?!{_STOP})[a-z][\w'-]*"
_NAME = r"(?:[A-Z][\w.&’'-]*\w|[A-Z])"
_PATTERNS = tuple((kind, re.compile(pattern)) for kind, pattern in (
    ("quoted", r"(?<!\w)'([^'\n]+(?:'\w[^'\n]*)*)'(?!\w)|\"([^\"\n]+)\"|“([^”\n]+)”|`([^`\n]+)`"),
    ("address", r"https?://[^\s'\"<>]*[\w/]|[\w.+-]{1,64}@[\w-]+(?:\.[\w-]+)+|(?<![\w/])[~.]{0,2}/[\w./-]*\w"),
    ("address", r"\b[\w-]{1,64}(?:\.[\w-]{1,64}){0,9}\.[a-z]{2,4}\b"),
    ("date", rf"(?<![\w-]){_YEAR}[-/.]{_MONTH_NUMBER}[-/.]{_DAY}(?![\w-])"),
    ("date", rf"(?<![\w-]){_MONTH_NUMBER}[-/.]{_DAY}[-/.]{_YEAR}(?![\w-])"),
    ("date", rf"(?i:\b{_MONTH}\s{_DAY}\b(?:,?\s{_YEAR}\b)?)"),
    ("date", rf"(?i:\b{_DAY}\s(?:of\s)?{_MONTH}\b(?:,?\s{_YEAR}\b)?)"),
    ("time", r"(?i:(?<![\w:])\d\d?(?::\d\d){1,2}(?:\s?[ap]m)?\b|\b\d\d?\s?[ap]m\b)"),
    ("code", r"(?<![\w.-])(?:0\d{4,}|\d+(?:[.-]\d+){2,})\b"),
    ("code", r"(?<![\w.-])(?=[\w-]{0,60}\d)(?=[\w-]{0,60}[A-Za-z])(?!\d+(?:[A-Za-z]{1,3}\b|-[a-z]))\w[\w-]*\w(?![\w-])"),
    ("number", rf"{_DIGITS}(?:%|{_SCALE})?|{_IN_WORDS}"),
    ("name", rf"(?<!^)(?<![.?!:\n] )\b(?!(?i:{_STOP})(?! [A-Z])){_NAME}(?:\s(?:(?:of|the|de|da|van)\s)?{_NAME})*(?<!['’]s)"),
    ("phrase", rf"(?<!['’\w]){_CONTENT}(?: {_CONTENT})*"),
))  # fmt: skip
"""The kinds of values in the order in which they are read. No name starts at the first word of a sentence."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_CLAUSE_END = re.compile(r"[.?!;,]\s|\sand\s")
_AND = re.compile(r"\s*(?:,|;|&|,?\s*\b(?:and|or)\b)\s*")
_DATE_FORM = re.compile(r"\b(?:yyyy|mm|dd)(?:[-/. ](?:yyyy|mm|dd)){2}\b", re.IGNORECASE)
_EXAMPLE = re.compile(r"['\"]([^'\"]+)['\"]|(?:e\.g\.|such as|like|instance),? ([^.;()'\"]+)")
"""What a description quotes, or names after words such as "e.g."."""


def fill_from_request(state: Any, tool: Tool) -> dict[str, Any]:
    """Values of the parameters that the policy does not decide: the slots of a task, or values read from another request.

    These are numbers, dates, times, quoted text, addresses, names, identifiers, and lists of them. A parameter gets a value of
    its schema's first type: the kind that fits best, preferably next to a word of the parameter's name. An optional parameter
    only gets a date, or a value that is next to a word of its name. A parameter without a valid value is left out.

    Args:
        state: A `ToolTask`, a text, or a state with the text as its attribute `text`. Other states give no values.
        tool: The tool.

    Returns:
        Values by parameter name, such as {"day": "2027-05-05", "seats": 4} for "four seats for the day May 5th, 2027".
    """
    if slots := getattr(state, "slots", None):
        return dict(slots)
    text = state if isinstance(state, str) else getattr(state, "text", None)
    if not isinstance(text, str):
        return {}
    text = text[:MAX_CHARACTERS]
    found, own, required = find_values(text), _stems(tool.text), tool.required_free
    near = {one: _nearness(text, one) for one in found}
    matches = []
    for name in tool.free_parameters:
        for value, fit, used in _candidates(tool.properties.get(name, {}), name, found, text, own):
            named = sum(near[used[0]].get(stem, 0.0) for stem in _stems(name))
            if name in required or named > 0.25 or used[0].kind == "date":
                matches.append((fit + 2 * named, name, value, used))
    filled: dict[str, Any] = {}
    taken: set[Found] = set()
    for _, name, value, used in sorted(matches, key=lambda match: -match[0]):  # the best first, ties in their order
        if name not in filled and taken.isdisjoint(used):
            filled[name] = value
            taken.update(used)
    return filled


def kind_taken(name: str, schema: Mapping[str, Any]) -> Literal["number", "date", "text"] | None:
    """The kind of values that a parameter takes, as elements if it takes a list. None for other types."""
    part = {} if "$ref" in str(schema) else _part(schema)
    if part.get("type") == "string":
        return "date" if _is_date(part, name) else "text"
    return "number" if part.get("type") in ("integer", "number") else None


def find_values(text: str) -> list[Found]:
    """All values of a text, in its order. No two of them overlap: what one pattern takes, the patterns after it do not see."""
    found: list[Found] = []
    for kind, pattern in _PATTERNS:
        for match in pattern.finditer(text):
            quoted = next(filter(None, match.groups()), match[0])
            value = _date(match) if kind == "date" else _number(match) if kind == "number" else quoted
            if value is not None:
                found.append(Found(kind, value, match[0], *match.span()))
                text = f"{text[: match.start()]}{chr(0) * len(match[0])}{text[match.end() :]}"
    return sorted(found, key=lambda one: one.start)


def _date(match: re.Match[str]) -> date | None:
    month = match["month"].lower()
    number = _MONTHS.index(month[:3]) + 1 if month[:3] in _MONTHS else int(month)
    year = match["year"] or next(iter(re.findall(r"\b[12]\d{3}\b", match.string)), 0)
    with contextlib.suppress(ValueError):  # no such day, or no year
        return date(int(year), number, int(match["day"]))
    return None


def _number(match: re.Match[str]) -> Fraction:
    if match["word"]:
        return Fraction(_ONES.index(match["word"].lower()))
    digits = match["digits"].translate(str.maketrans("\u2212", "-", ",$€£"))
    return Fraction(digits) * _SCALES.get(match["scale"], 1)


def _candidates(
    schema: Mapping[str, Any], name: str, found: Sequence[Found], text: str, own: frozenset[str]
) -> Iterator[tuple[Any, float, Sequence[Found]]]:
    """The values that a schema allows: each with how well it fits, and the found values that it consists of."""
    if "$ref" in str(schema):  # only the tool's whole schema resolves a `$ref`
        return
    schema = _first_branch(schema)
    is_valid = jsonschema.Draft202012Validator(schema).is_valid
    is_list, part = schema["type"] == "array", _part(schema)
    examples = [quoted or named for quoted, named in _EXAMPLE.findall(part.get("description", ""))]
    for used in _runs(found, text) if is_list else ([one] for one in found):
        read = [one for one in (_read(part, name, one, own, examples) for one in used) if one is not None]
        value = [one for one, _ in read] if is_list else read[0][0] if read else None
        if len(read) == len(used) and is_valid(value):
            yield value, sum(fit for _, fit in read) / len(read) + 3 * (len(used) > 1), used
    if not is_list and any(", " in example for example in examples):  # "Sydney, Australia" is one name
        for one, after in itertools.pairwise(found):
            if one.kind == after.kind == "name" and text[one.end : after.start] == ", ":
                yield text[one.start : after.end], _FITS["name"] + 2, (one, after)


def _first_branch(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema of several types with its first type that is not null. Without a type it becomes a text."""
    branches = [one for one in schema.get("anyOf", ()) if isinstance(one, Mapping) and one.get("type") != "null"]
    merged = {**schema, **(branches or [{}])[0]}
    kinds = merged.get("type", "string")
    return merged | {
        "type": next((one for one in kinds if one != "null"), "null") if isinstance(kinds, list) else kinds
    }


def _part(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of one value: of a list's items, or the schema itself."""
    schema = _first_branch(schema)
    items = schema.get("items")
    return _first_branch(items if isinstance(items, Mapping) else {}) if schema["type"] == "array" else schema


def _is_date(schema: Mapping[str, Any], name: str) -> bool:
    form = _DATE_FORM.search(schema.get("description", ""))
    return schema.get("format") == "date" or "date" in _stems(name) or form is not None


def _runs(found: Sequence[Found], text: str) -> list[Sequence[Found]]:
    """Longest runs of values with commas or "and" between them."""
    pairs = enumerate(itertools.pairwise(found), start=1)
    ends = [place for place, (one, after) in pairs if not _AND.fullmatch(text[one.end : after.start])]
    return [found[start:end] for start, end in itertools.pairwise([0, *ends, len(found)]) if found]


def _read(
    schema: Mapping[str, Any], name: str, one: Found, own: frozenset[str], examples: Sequence[str]
) -> tuple[Any, float] | None:
    """A found value as the schema's type, with how well it fits. None if it is of another type."""
    kind, about, names = schema["type"], schema.get("description", ""), _stems(name)
    if kind in ("integer", "number"):
        if one.kind != "number" or (kind == "integer" and one.value % 1):
            return None
        is_share = one.text.endswith("%") and "percent" not in about.lower()
        value = int(one.value) if kind == "integer" else float(one.value / (100 if is_share else 1))
        return value, -1 if one.text.isalpha() else 1  # "one" is often no number
    if kind != "string":
        return None
    if _is_date(schema, name):
        if one.kind != "date":
            return None
        form = _DATE_FORM.search(about)
        written = form[0].lower().replace("yyyy", "%Y").replace("mm", "%m").replace("dd", "%d") if form else "%Y-%m-%d"
        return one.value.strftime(written), 5
    text, fit = one.value if one.kind == "quoted" else one.text, _FITS[one.kind]
    for example in examples:
        if example.lower().startswith(text.lower()):  # "Seattle" may become "Seattle, WA"
            return example, fit + 4
    if names & _WITH_DIGITS and any(letter.isdigit() for letter in text):
        return text, 4
    if one.kind == "phrase":
        text = " ".join(word for word in text.split() if _stem(word) not in own) or text
    if one.kind in ("name", "phrase"):
        stems = _stems(text)
        fit += -3 if stems <= names | own else 3 if stems & names else 0  # the tool's own words are seldom values
    return text, fit


def _nearness(text: str, one: Found) -> dict[str, float]:
    """How near each stem is to a value: 1 for the word next to it, 1/2 for the second word, and so on."""
    before = _WORD.findall(_CLAUSE_END.split(text[max(0, one.start - 60) : one.start])[-1])[:-5:-1]
    after = _WORD.findall(_CLAUSE_END.split(text[one.end : one.end + 40])[0])[:3]
    hints = _PREPOSITIONS.get(before[0].lower(), "").split() if before else []
    words = [*enumerate(before, start=1), *enumerate(after, start=1), *((1 / 0.3, hint) for hint in hints)]
    return {_stem(word): 1 / distance for distance, word in sorted(words, reverse=True)}  # the nearest one counts


def _stem(word: str) -> str:
    return word.lower()[:5].removesuffix("s")


def _stems(text: str) -> frozenset[str]:
    return frozenset(_stem(word) for word in _WORD.findall(text))
