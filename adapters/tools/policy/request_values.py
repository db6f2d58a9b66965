"""Values in a request's text: numbers, dates, times, quoted text, addresses, names and phrases. For English."""

import contextlib
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .encoders import STOP_WORDS

Kind = Literal["json", "quoted", "address", "date", "time", "code", "number", "name", "phrase"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A value in a text."""

    kind: Kind
    """`address`: an e-mail address, URL, path or file name. `code`: an identifier or a formula, such as `A12-7` or `x^2`.
    `name`: words with capitals. `phrase`: words without capitals."""
    value: Any
    """A number, a text, a JSON list or object, a date (year or None, month, day), or a time (hour, minute, second)."""
    text: str
    """The value as the request has it."""
    start: int
    """Position of its first character in the request."""
    end: int
    """Position after its last character."""


_REQUEST_WORDS = """
add also analyze assist avoiding best book buy calculate check closest compute convert count create currently delete determine
display estimate evaluate exactly fetch find generate good hello help hey hi identify including interested last latest least
like list locate look looking love name names nearest new next open order play please predict provide rated recent reserve
retrieve search send set show solve start tell thank thanks today tomorrow top upcoming update want wants yesterday
"""
REQUEST_WORDS = STOP_WORDS | frozenset(_REQUEST_WORDS.split())
"""Words with which people ask. No name at the start of a sentence starts with them, and no phrase contains them."""

_MONTH_NAMES = "jan feb mar apr may jun jul aug sep oct nov dec"
_ONES_NAMES = """
zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen
nineteen
"""
_TENS_NAMES = "twenty thirty forty fifty sixty seventy eighty ninety"
_MONTHS, _ONES, _TENS = _MONTH_NAMES.split(), _ONES_NAMES.split(), _TENS_NAMES.split()
_SCALES = {
    "hundred": 100, "k": 1000, "thousand": 1000, "m": 10**6, "million": 10**6, "b": 10**9, "billion": 10**9,
    "trillion": 10**12,
}  # fmt: skip


def _date(match: re.Match[str]) -> tuple[int | None, int, int] | None:
    parts = match.groupdict()
    written = parts["month"].lower()
    month = int(written) if written.isdecimal() else _MONTHS.index(written[:3]) + 1
    year, day = int(parts["year"]) if parts["year"] else None, int(parts.get("day") or 1)
    if month > 12:  # the day is written first
        month, day = day, month
    return (year, month, day) if 1 <= month <= 12 and 1 <= day <= 31 else None


def _time(match: re.Match[str]) -> tuple[int, int, int] | None:
    hour, minute, second = (int(match[part] or 0) for part in ("hour", "minute", "second"))
    half = (match["half"] or match["bare_half"] or "").lower()
    if half and hour <= 12:
        hour = hour % 12 + (12 if half.startswith("p") else 0)
    return (hour, minute, second) if hour < 24 and minute < 60 and second < 60 else None


def _number(match: re.Match[str]) -> float | int | None:
    digits = match["digits"].replace(",", "").lower()
    scale = _SCALES.get((match["scale"] or "").strip().lower(), 1)
    number = (int(digits) if digits.isdecimal() else float(digits)) * scale
    number = number / int(match["divisor"]) if match["divisor"] else number
    if not math.isfinite(number):
        return None
    return -number if match["sign"] else number


def _number_in_words(match: re.Match[str]) -> int:
    """Two hundred and five thousand: a scale from a thousand on closes a part of the sum."""
    total = part = 0
    for word in re.split(r"[\s-]+", match["words"].lower()):
        if word == "hundred":
            part = max(part, 1) * 100
        elif word in _SCALES:
            total, part = total + max(part, 1) * _SCALES[word], 0
        elif word != "and":
            part += _ONES.index(word) if word in _ONES else 10 * _TENS.index(word) + 20
    return total + part


def _json(match: re.Match[str]) -> Any:
    for text in (match[0], match[0].replace("'", '"')):
        with contextlib.suppress(ValueError):
            return json.loads(text)
    return None  # its parts are read one by one


def _quoted(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None)


def _text(match: re.Match[str]) -> str:
    return match[0]


_MONTH = (
    r"(?P<month>jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    r"|nov(?:ember)?|dec(?:ember)?)\b\.?"
)
_DAY, _YEAR = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?", r"(?P<year>[12]\d{3})"
_MONTH_NUMBER, _DAY_NUMBER = r"(?P<month>\d{1,2})", r"(?P<day>\d{1,2})"
_SMALL = "|".join([*_ONES[::-1], *_TENS])
_CAPITAL = r"[A-Z](?:[\w&’'.-]*\w|\.(?=\s))?"
_NAME = re.compile(rf"\b{_CAPITAL}(?:\s(?:(?:of|the|de|da|van|von|del|and the)\s)?{_CAPITAL})*")
_PHRASE = re.compile(r"(?<!['’\w])[^\W\d_A-Z][\w'-]*(?: [^\W\d_A-Z][\w'-]*)*")

_CLOCK = (
    r"(?<![\w.:])(?P<hour>\d{1,2})(?::(?P<minute>\d\d)(?::(?P<second>\d\d))?\s*(?P<half>[ap]\.?m\b\.?)?"
    r"|\s*(?P<bare_half>[ap]\.?m\b\.?))(?![\w:])"
)
_FORMULA = r"(?<!\w)(?=\S{0,60}(?:\^|\*\*))[\w.^*/()+-]+(?:\s?[-+*/]\s?[\w.^*/()]+)*"
_CODE = (
    r"(?<![\w.-])(?:0\d{4,}|\d+(?:\.\d+){2,}|\d+(?:-\d+){2,}|\d{4}-\d{4}|(?=[\w/-]{0,60}\d)(?=[\w/-]{0,60}[a-z])"
    r"(?!\d+[a-z]{1,3}\b|\d+-[a-z]|\d+e\d+\b)[a-z\d][\w/-]*\w|[a-z]+(?:_[a-z\d]+)+)(?![\w-])"
)
_PERCENT = r"(?:\s?%|\s?per\s?cent\b)?"
_DIGITS = (
    r"(?:(?<![\w.)])(?P<sign>[-\u2212])|(?<![\w.]))[$€£]?(?P<digits>\d{1,3}(?:,\d{3}){1,9}(?:\.\d+)?"
    r"|\d{1,40}(?:\.\d+)?(?:e[-+]?\d{1,3})?|\.\d+)(?:/(?P<divisor>[1-9]\d{0,9}))?"
    rf"(?P<scale>(?-i:[kMB])\b|\s(?:hundred|thousand|million|billion|trillion)\b)?{_PERCENT}(?!\d)"
)
_WORDS = rf"\b(?P<words>(?:{_SMALL})(?:[\s-](?:and\s)?(?:{_SMALL}|hundred|thousand|million|billion))*)\b{_PERCENT}"

DATE_FORMAT = re.compile(r"\b(?:yyyy|mm|dd)(?:[-/. ](?:yyyy|mm|dd)){2}\b(?P<time>[ t]hh:mm(?::ss)?)?")
"""A format that a description asks for, in lower case."""
DATE_EXAMPLE = re.compile(r"\b(?:(\d{4})-\d\d-\d\d|\d\d/\d\d/(\d{4}))\b")
"""A date in a description."""

_READERS: tuple[tuple[Kind, Callable[[re.Match[str]], Any], str], ...] = (
    ("json", _json, r"\[\s*(?=[\[{])(?:[^\[\]]|\[[^\[\]]*\])*\]|\{[^{}]*\}"),
    ("quoted", _quoted, r"(?<!\w)'([^'\n]+(?:'\w[^'\n]*)*)'(?!\w)|\"([^\"\n]+)\"|“([^”\n]+)”|‘([^’\n]+)’|`([^`\n]+)`"),
    ("address", _text, r"https?://[^\s'\"<>]*[\w/]|[\w.+-]{1,64}@[\w-]+(?:\.[\w-]+)+"),
    (
        "address",
        _text,
        r"(?:\b[a-z]:\\|(?<!\w)(?:~|\.\.?)?/)[\w./\\-]*\w|\b[\w-]{1,64}(?:[./][\w-]{1,64}){0,9}\.(?=[a-z])[a-z0-9]{2,4}\b",
    ),
    ("date", _date, rf"\b{_YEAR}-{_MONTH_NUMBER}-{_DAY_NUMBER}T\d\d:\d\d(?::[\d.]+)?(?:Z|[-+]\d\d:\d\d)?"),
    ("date", _date, rf"(?<![\w.-]){_YEAR}\s?[-/.]\s?{_MONTH_NUMBER}\s?[-/.]\s?{_DAY_NUMBER}(?![\w-])"),
    ("date", _date, rf"(?<![\w.-]){_MONTH_NUMBER}[-/.]{_DAY_NUMBER}[-/.]{_YEAR}(?![\w-])"),
    ("date", _date, rf"\b{_MONTH}\s+{_DAY}\b(?:,?\s*(?:of\s+)?{_YEAR})?(?!\w)"),
    ("date", _date, rf"\b{_DAY}(?:\s+of)?\s+{_MONTH}(?:,?\s+{_YEAR})?(?!\w)"),
    ("date", _date, rf"\b{_MONTH},?\s+(?:of\s+)?{_YEAR}\b"),
    ("time", _time, _CLOCK),
    ("code", _text, _FORMULA),
    ("code", _text, _CODE),
    (
        "name",
        _text,
        r"\b\d+[a-z]?(?-i:\s[A-Z][\w.]*)+\s(?:street|st|avenue|ave|road|rd|boulevard|blvd|lane|drive|way)\b",
    ),
    ("number", _number, _DIGITS),
    ("number", _number_in_words, _WORDS),
)
_COMPILED = tuple((kind, read, re.compile(pattern, re.IGNORECASE)) for kind, read, pattern in _READERS)


def find_values(text: str) -> list[Found]:
    """All values of a text, in its order. No two of them overlap: what one reader takes, the readers after it do not see."""
    found: list[Found] = []
    rest = text
    for kind, read, pattern in _COMPILED:
        taken = [(match, value) for match in pattern.finditer(rest) if (value := read(match)) is not None]
        found += (Found(kind=kind, value=value, text=m[0], start=m.start(), end=m.end()) for m, value in taken)
        rest = _blanked(rest, [match.span() for match, _ in taken])
    names = list(_names(rest))
    found += (Found(kind="name", value=text[s:e], text=text[s:e], start=s, end=e) for s, e in names)
    phrases = _phrases(_blanked(rest, names))
    found += (Found(kind="phrase", value=text[s:e], text=text[s:e], start=s, end=e) for s, e in phrases)
    return sorted(found, key=lambda one: one.start)


def _blanked(text: str, spans: Iterable[tuple[int, int]]) -> str:
    for start, end in spans:
        text = f"{text[:start]}{chr(0) * (end - start)}{text[end:]}"
    return text


def _names(text: str) -> Iterator[tuple[int, int]]:
    for match in _NAME.finditer(text):
        words = [(word.start() + match.start(), word.end() + match.start()) for word in re.finditer(r"\S+", match[0])]
        before = text[: match.start()].rstrip(" ")
        if not before or before[-1] in ".?!:>\n":  # the sentence's first word has a capital anyway
            while words and _is_request_word(text[slice(*words[0])]):
                del words[0]
            if len(words) == 1 and words[0][0] == match.start() and match[0][1:].islower():
                del words[0]
        elif not match[0][1:].isupper() and match[0].partition("'")[0].lower() in STOP_WORDS:
            continue
        if words:
            yield words[0][0], words[-1][1] - 2 * match[0].endswith(("'s", "’s"))


def _phrases(text: str) -> Iterator[tuple[int, int]]:
    for match in _PHRASE.finditer(text):
        part: list[int] = []
        for word in (*re.finditer(r"\S+", match[0]), None):
            if word is not None and not _is_request_word(word[0]):
                part += (word.start() + match.start(), word.end() + match.start())
            elif part:
                yield part[0], part[-1]
                part = []


def _is_request_word(word: str) -> bool:
    return word.partition("'")[0].strip(",").lower() in REQUEST_WORDS


def written_date(one: Found, found: Sequence[Found], about: str, schema_format: str | None) -> str | None:
    """A date in the format that the schema or the description asks for, or as the request has it if neither asks for one.

    `about` is the parameter's description in lower case. A date without a year has the year of another date of the request, or
    of the description's example.
    """
    year, month, day = one.value
    written, example = DATE_FORMAT.search(about), DATE_EXAMPLE.search(about)
    if year is None:
        years = [other.value[0] for other in found if other.kind == "date" and other.value[0]]
        years += [
            int(other.text) for other in found if other.kind == "number" and re.fullmatch("[12][0-9]{3}", other.text)
        ]
        years += [int(example[1] or example[2])] if example else []
        year = years[0] if years else None
    is_iso = example or schema_format == "date"
    form = written[0] if written else "yyyy-mm-dd" if is_iso else None
    if "T" in one.text[8:11] and schema_format != "date":  # an ISO timestamp
        return one.text
    if year is None or form is None:
        return None if schema_format is not None else one.text
    if written and written["time"]:
        times = [other.value for other in found if other.kind == "time" and other.start >= one.end]
        hour, minute, second = times[0] if times else (0, 0, 0)
        form = form.replace("hh:mm", f"{hour:02d}:{minute:02d}").replace("ss", f"{second:02d}").replace("t", "T")
    return form.replace("yyyy", f"{year:04d}").replace("mm", f"{month:02d}").replace("dd", f"{day:02d}")
