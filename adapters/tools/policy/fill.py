"""Values of a call's free parameters, read from the request without a model. For English."""

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import date
from typing import Any, Literal, NamedTuple

import jsonschema

from adapters.tools.catalogue.tools import Tool

from .encoders import STOP_WORDS

MAX_CHARACTERS = 4_000
"""Characters of a request that are read."""

Kind = Literal["json", "quoted", "address", "date", "time", "code", "number", "name", "phrase"]
"""`address`: an e-mail address, URL or path. `code`: a word with digits. `name`: words with capitals. `phrase`: words without
capitals. A phrase ends at a stop word."""

_FITS: Mapping[Kind, float] = {
    "quoted": 3, "address": 2, "name": 2, "code": 1.5, "phrase": 0, "number": -1, "date": -1, "time": -1,
}  # fmt: skip
"""How well each kind of value fits a text. A word of the parameter's name next to the value counts 2."""
_NAMED, _IS_NEAR, _HINTED = 2.0, 0.25, 0.3
_PREPOSITIONS = {
    "from": "from start origin departure source", "to": "to end destination arrival target", "by": "author artist",
    "in": "city location place country area", "near": "location", "at": "location place", "on": "date day",
}  # fmt: skip
"""Words in the names of parameters whose values often stand after a preposition."""


class Found(NamedTuple):
    """A value in a request, and where it stands."""

    kind: Kind
    value: Any
    text: str
    start: int
    end: int


_OF_CODES = {"id", "code", "key", "phone", "versi", "zip"}
"""Stems of the names of parameters whose values have digits."""
_ONES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_SCALES = {"k": 1000, "thousand": 1000, "M": 10**6, "million": 10**6, "billion": 10**9}
_NO_YEAR = 4
"""Year of a date without a year, in a request that names no year. It is a leap year."""
_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]


def _date(match: re.Match[str]) -> date | None:
    month = match["month"].lower()
    number = _MONTHS.index(month[:3]) + 1 if month[:3] in _MONTHS else int(month)
    year = match["year"] or next(iter(re.findall(r"\b[12]\d{3}\b", match.string)), _NO_YEAR)
    with contextlib.suppress(ValueError):  # no such day
        return date(int(year), number, int(match["day"]))
    return None


def _number(match: re.Match[str]) -> float | int:
    if match["word"]:
        return _ONES.index(match["word"].lower())
    text = re.sub("[,$€£]", "", match["digits"]).replace("\u2212", "-")
    return (int(text) if text.lstrip("-").isdecimal() else float(text)) * _SCALES.get(match["scale"], 1)


def _json(match: re.Match[str]) -> Any:
    for text in (match[0], match[0].replace("'", '"')):
        with contextlib.suppress(ValueError):
            return json.loads(text)
    return None  # its parts are read one by one


def _text(match: re.Match[str]) -> str:
    return next((group for group in match.groups() if group), match[0])


_DAY, _YEAR = r"(?P<day>\d\d?)(?:st|nd|rd|th)?", r"(?P<year>[12]\d{3})"
_MONTH, _MONTH_NUMBER = rf"(?P<month>{'|'.join(_MONTHS)})[a-z]*\.?", r"(?P<month>\d\d?)"
_DIGITS = r"(?<![\w.])(?P<digits>[-\u2212]?[$€£]?(?:\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d{1,40}(?:\.\d+)?|\.\d+))"
_SCALE, _IN_WORDS = rf"\s?(?P<scale>{'|'.join(_SCALES)})\b", rf"(?i:\b(?P<word>{'|'.join(_ONES)})\b)"
_NAME = r"(?:[A-Z][\w.&’'-]*\w|[A-Z])"
_READERS: Sequence[tuple[Kind, Callable[[re.Match[str]], Any], str]] = (
    ("json", _json, r"\[\s*(?=[\[{])(?:[^\[\]]|\[[^\[\]]*\])*\]|\{[^{}]*\}"),
    ("quoted", _text, r"(?<!\w)'([^'\n]+(?:'\w[^'\n]*)*)'(?!\w)|\"([^\"\n]+)\"|“([^”\n]+)”|`([^`\n]+)`"),
    ("address", _text, r"https?://[^\s'\"<>]*[\w/]|[\w.+-]{1,64}@[\w-]+(?:\.[\w-]+)+|(?<![\w/])[~.]{0,2}/[\w./-]*\w"),
    ("address", _text, r"\b[\w-]{1,64}(?:\.[\w-]{1,64}){0,9}\.[a-z]{2,4}\b"),
    ("date", _date, rf"(?<![\w-]){_YEAR}[-/.]{_MONTH_NUMBER}[-/.]{_DAY}(?![\w-])"),
    ("date", _date, rf"(?<![\w-]){_MONTH_NUMBER}[-/.]{_DAY}[-/.]{_YEAR}(?![\w-])"),
    ("date", _date, rf"(?i:\b{_MONTH}\s{_DAY}\b(?:,?\s{_YEAR}\b)?)"),
    ("date", _date, rf"(?i:\b{_DAY}\s(?:of\s)?{_MONTH}\b(?:,?\s{_YEAR}\b)?)"),
    ("time", _text, r"(?i:(?<![\w:])\d\d?(?::\d\d){1,2}(?:\s?[ap]m)?\b|\b\d\d?\s?[ap]m\b)"),
    ("code", _text, r"(?<![\w.-])(?:0\d{4,}|\d+(?:[.-]\d+){2,})\b|\b[a-z]+(?:_[a-z\d]+)+\b"),
    ("code", _text, r"(?<![\w.-])(?=[\w-]{0,60}\d)(?=[\w-]{0,60}[A-Za-z])(?!\d+(?:[A-Za-z]{1,3}\b|-[a-z]))\w[\w-]*\w(?![\w-])"),
    ("number", _number, rf"{_DIGITS}(?:%|{_SCALE})?|{_IN_WORDS}"),
    ("name", _text, rf"(?<!^)(?<![.?!:\n] )\b{_NAME}(?:\s(?:(?:of|the|de|da|van)\s)?{_NAME})*(?:, [A-Z]{{2}}\b)?(?<!['’]s)"),
    ("phrase", _text, r"(?<!['’\w])[a-z][\w'-]*(?: [a-z][\w'-]*)*"),
)  # fmt: skip
"""The kinds of values in the order in which they are read. No name starts at the first word of a sentence."""
_COMPILED = tuple((kind, read, re.compile(pattern)) for kind, read, pattern in _READERS)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_CLAUSE_END = re.compile(r"[.?!;,]\s|\sand\s")
_FORM = re.compile(r"(?i:\b(?:yyyy|mm|dd)(?:[-/. ](?:yyyy|mm|dd)){2}\b)")
"""The form of a date in a description."""
_AND = re.compile(r"\s*(?:,|;|&|,?\s*\b(?:and|or)\b)\s*")


def fill_from_request(state: Any, tool: Tool) -> dict[str, Any]:
    """Values of the parameters that the policy does not decide, read from the request.

    The slots of a task are returned as they are. From other requests the values are read: numbers, dates, times, quoted text,
    addresses, names, identifiers, and lists of them. A parameter gets a value of its schema's type: the kind that fits best,
    preferably next to a word of the parameter's name. An optional parameter only gets a date, or a value that is next to a word
    of its name. A parameter without such a value is left out. Defaults are not filled in. The words are English.

    Args:
        state: A `ToolTask`, a text, or a state with the text as its attribute `text`. Other states give no values.
        tool: The tool whose parameters are filled.

    Returns:
        Values by parameter name. Each value is valid under its parameter's schema.

    Example:
        >>> properties = {"day": {"type": "string", "format": "date"}, "seats": {"type": "integer"}}
        >>> schema = {"type": "object", "properties": properties}
        >>> tool = Tool(name="book", description="Book a table.", function=print, parameters=schema)
        >>> fill_from_request("Book four seats for the day May 5th, 2027.", tool)
        {'day': '2027-05-05', 'seats': 4}
    """
    slots = getattr(state, "slots", None)
    if slots:
        return dict(slots)
    text = state if isinstance(state, str) else getattr(state, "text", None)
    if not isinstance(text, str):
        return {}
    text, own = text[:MAX_CHARACTERS], _stems(f"{tool.text} {' '.join(tool.properties)}")
    found = find_values(text)
    near = [_nearness(text, one) for one in found]
    matches = []
    for name in tool.free_parameters:
        schema = _without_null(tool.properties.get(name, {}))
        for value, fit, used in _candidates(schema, name, found, text, own):
            named = sum(near[used.start].get(stem, 0.0) for stem in _stems(name))
            if name in tool.required_free or named > _IS_NEAR or found[used.start].kind == "date":
                matches.append((fit + _NAMED * named, name, value, used))
    filled: dict[str, Any] = {}
    taken: set[int] = set()
    for _, name, value, used in sorted(matches, key=lambda match: -match[0]):  # the best first, ties in their order
        if name not in filled and taken.isdisjoint(used):
            filled[name] = value
            taken.update(used)
    return filled


def find_values(text: str) -> list[Found]:
    """All values of a text, in its order. No two of them overlap: what one reader takes, the readers after it do not see."""
    found: list[Found] = []
    for kind, read, pattern in _COMPILED:
        if kind == "phrase":
            found += itertools.chain.from_iterable(map(_phrases, pattern.finditer(text)))
            continue
        for match in pattern.finditer(text):
            value = read(match)
            if value is not None and not (kind == "name" and value.partition("'")[0].lower() in STOP_WORDS):
                found.append(Found(kind, value, match[0], *match.span()))
                text = f"{text[: match.start()]}{chr(0) * len(match[0])}{text[match.end() :]}"
    return sorted(found, key=lambda one: one.start)


def _phrases(match: re.Match[str]) -> Iterator[Found]:
    """The parts of a text between stop words."""
    words = [(word[0], match.start() + word.start()) for word in re.finditer(r"\S+", match[0])]
    for is_stop, part in itertools.groupby(words, lambda word: word[0].partition("'")[0] in STOP_WORDS):
        if not is_stop:
            texts, starts = zip(*part, strict=True)
            yield Found("phrase", " ".join(texts), " ".join(texts), starts[0], starts[-1] + len(texts[-1]))


def _candidates(
    schema: Mapping[str, Any], name: str, found: Sequence[Found], text: str, own: frozenset[str]
) -> Iterator[tuple[Any, float, range]]:
    """The values that a schema allows: each with how well it fits, and the found values that it consists of."""
    if schema.keys() & {"enum", "const"} or "$ref" in str(schema):  # only the tool's whole schema resolves a `$ref`
        return
    is_list, items = schema.get("type") == "array", schema.get("items", {})
    part = schema if not is_list else items if isinstance(items, Mapping) else {}
    has_commas = not is_list and any(", " in example for example in _examples(schema))
    is_valid = jsonschema.Draft202012Validator(schema).is_valid
    for used in _lists(found, text) if is_list else [range(i, i + 1) for i in range(len(found))]:
        read = [_read(part, name, found[i], own) for i in used]
        value, fit = [one for one, _ in read] if is_list else read[0][0], sum(fit for _, fit in read) / len(read)
        if all(one is not None for one, _ in read) and is_valid(value):
            yield value, fit + 3 * (len(used) > 1), used
        two = found[used.start : used.stop + 1]  # "Sydney, Australia" is one name if the description writes such names
        if has_commas and [one.kind for one in two] == ["name"] * 2 and text[two[0].end : two[1].start] == ", ":
            yield text[two[0].start : two[1].end], fit + 2, range(used.start, used.stop + 1)
    for i, one in enumerate(found):
        if one.kind == "json" and is_valid(one.value):
            yield one.value, 4, range(i, i + 1)


def _read(schema: Mapping[str, Any], name: str, one: Found, own: frozenset[str]) -> tuple[Any, float]:
    """A found value as the schema's type, with how well it fits. None if it is of another type."""
    kind = schema.get("type", None if schema.keys() - {"title", "description", "default"} else "string")
    if kind in ("integer", "number"):
        if one.kind != "number":
            return None, 0
        fit: float = -1 if one.text.isalpha() else 1  # "one" is often no number
        if kind == "integer":
            return int(one.value) if one.value % 1 == 0 else None, fit
        is_share = one.text.endswith("%") and "percent" not in schema.get("description", "").lower()
        return float(one.value) / (100 if is_share else 1), fit
    if kind != "string" or one.kind == "json":
        return None, 0
    if schema.get("format") == "date" or "date" in _stems(name) or _FORM.search(schema.get("description", "")):
        return (_written(one, schema) if one.kind == "date" else None), 5
    if one.kind == "time" and "time" in _stems(name):
        return one.text, 5
    value = one.value if one.kind == "quoted" else one.text
    for example in _examples(schema):
        if f"{example.lower()},".startswith(f"{value.lower()},"):  # "Seattle" may become "Seattle, WA"
            return example, _FITS[one.kind] + 4
    if one.kind == "phrase":
        words = value.split()
        mine = [i for i, word in enumerate(words) if _stem(word) not in own] or [0]
        value = " ".join(words[mine[0] : mine[-1] + 1])
    stems, names, fit = _stems(value), _stems(name), _FITS[one.kind]
    if names & _OF_CODES and any(letter.isdigit() for letter in value):
        return value, 4
    if one.kind in ("name", "phrase") and stems <= names | own:
        return value, fit - 3  # the tool's own words are seldom values
    return value, fit + 3 if one.kind in ("name", "phrase") and stems & names else fit


def _examples(schema: Mapping[str, Any]) -> list[str]:
    """What a description quotes, or names after words such as "e.g."."""
    found = re.findall(
        r"['\"]([^'\"]+)['\"]|(?:e\.g\.|such as|like|instance),? ([^.;()'\"]+)", schema.get("description", "")
    )
    return [quoted or named for quoted, named in found]


def _written(one: Found, schema: Mapping[str, Any]) -> str:
    """A date in the form that the description names, such as MM/DD/YYYY, or as ISO 8601 writes it."""
    about = schema.get("description", "").lower()
    day = one.value
    if day.year == _NO_YEAR:
        year = re.search(r"\b[12]\d{3}\b", about)
        if year is None:
            return one.text
        day = day.replace(year=int(year[0]))
    form = _FORM.search(about)
    written = form[0] if form else "yyyy-mm-dd"
    return written.replace("yyyy", f"{day.year:04d}").replace("mm", f"{day.month:02d}").replace("dd", f"{day.day:02d}")


def _lists(found: Sequence[Found], text: str) -> Iterator[range]:
    """Longest runs of values of one kind with commas or "and" between them."""
    start = 0
    for end in range(1, len(found) + 1):
        between = text[found[end - 1].end : found[end].start] if end < len(found) else ""
        if not _AND.fullmatch(between):
            yield range(start, end)
            start = end


def _without_null(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a value that may be null, without null."""
    branches = [one for one in schema.get("anyOf", ()) if isinstance(one, Mapping) and one.get("type") != "null"]
    kinds = schema.get("type")
    if isinstance(kinds, list) and len(kinds) == 2 and "null" in kinds:
        return {**schema, "type": kinds[kinds[0] == "null"]}
    return {**schema, **branches[0]} if len(branches) == 1 else schema


def _nearness(text: str, one: Found) -> dict[str, float]:
    """How near each stem is to a value: 1 for the word next to it, 1/2 for the second word, and so on."""
    before = _WORD.findall(_CLAUSE_END.split(text[max(0, one.start - 60) : one.start])[-1])[:-5:-1]
    after = _WORD.findall(_CLAUSE_END.split(text[one.end : one.end + 40])[0])[:3]
    near = dict.fromkeys(map(_stem, _PREPOSITIONS.get(before[0].lower(), "").split() if before else ()), _HINTED)
    for words in (before, after):
        for distance, word in enumerate(words, start=1):
            near[_stem(word)] = max(near.get(_stem(word), 0.0), 1 / distance)
    return near


def _stem(word: str) -> str:
    return word.lower()[:5].removesuffix("s")


def _stems(text: str) -> frozenset[str]:
    return frozenset(_stem(word) for word in _WORD.findall(text) if word.lower() not in STOP_WORDS or word == text)
