r"""Answers as mathematics: numbers with units, formulas, equations, lists, sets, tuples, intervals and words.

Numbers are read exactly (`arithmetic`). math-verify's grammar of LaTeX reads formulas. `equality` decides what counts as equal,
because math-verify compares after rounding to 6 decimals, drops units, ellipses, subscripts and the order of pairs, and reads
`1/0` and `12:00` as the same infinity.
"""

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any, TypeAlias

from .answer_text import UNIT, has_words
from .arithmetic import NoValueError, plain, read_value

MAX_CHARS = 2000
"""Longer answers are read as words."""


@dataclass(frozen=True, slots=True)
class Number:
    """A number that is known exactly."""

    value: Fraction
    is_decimal: bool
    unit: str


@dataclass(frozen=True, slots=True)
class Formula:
    """An expression, a matrix or a set of SymPy, without floating-point numbers."""

    expression: Any
    is_decimal: bool


@dataclass(frozen=True, slots=True)
class Several:
    """Answers together: in any order without brackets, else in order. ":" joins the parts of a ratio or a time."""

    brackets: str
    items: tuple["Answer", ...]


@dataclass(frozen=True, slots=True)
class Named:
    """A value with a name, as in x = 5."""

    name: str
    value: "Answer"


@dataclass(frozen=True, slots=True)
class Equation:
    """An equation between two formulas: their difference is 0."""

    difference: Any


@dataclass(frozen=True, slots=True)
class Words:
    """What is not read as mathematics. It equals the same words."""

    text: str


Answer: TypeAlias = Number | Formula | Several | Named | Equation | Words

_DATE = re.compile(r"[0-9]{4}[-/][0-9]{1,2}[-/][0-9]{1,2}|[0-9]{1,2}[-/][0-9]{1,2}[-/][0-9]{4}")
_UNREAD = re.compile(r"\\[lcd]?dots(?![A-Za-z])|\.\.\.|\u2026|\\[pb]?mod(?![A-Za-z])|\\equiv|\bmod\b")
_REPEATING = re.compile(r"([0-9]*)\.([0-9]*)\\(?:overline|bar|dot)\s*\{?\s*([0-9]+)\s*\}?")
_UNICODE = str.maketrans(
    {"\u221e": r"\infty ", "\u03c0": r"\pi ", "\u2264": r"\le ", "\u2265": r"\ge ", "\u222a": r"\cup ", "\u2208": r"\in ",
     "\u2260": r"\ne ", "\u00b1": r"\pm ", "\u2205": r"\emptyset ", "\u221a": r"\sqrt ", "\u03b8": r"\theta "}
)  # fmt: skip
_AND = re.compile(
    r",?\s*\\text\s*\{\s*,?\s*(?:and|or)\s*\}|,?(?<![A-Za-z\\])\s*(?:\\?\band|\bor)(?![A-Za-z])|\\text\s*\{\s*,\s*\}|(?<!\\);"
)
_COMMA = re.compile(r"(?<!\\),(?!\})")
_RELATION = re.compile(r"\\(?:leq?|geq?|neq?|lt|gt|in|approx|equiv)(?![A-Za-z])|<=|>=|[=<>\u2248]")
_NAME = re.compile(r"\\?[A-Za-z]+(?:_\{?\w+\}?)?'*(?:\s?\(\s?[A-Za-z](?:,\s?[A-Za-z])*\s?\))?")
_CONSTANTS = ("e", "i", r"\pi", r"\infty", r"\emptyset")
_DEGREES = re.compile(r"\^\s?\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])")
_TIDY = (
    (re.compile(r"\\(?:mathrm|text|rm|operatorname)\s*\{\s*([eidx])\s*\}"), r"\1"),
    (re.compile(r"\\(?:operatorname|mathrm|text)\s*\{\s*(sin|cos|tan|log|ln|exp|gcd|max|min)\s*\}"), r"\\\1 "),
    (re.compile(r"\\?sqrt\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"\\sqrt\s*([0-9A-Za-z])"), r"\\sqrt{\1}"),
    (re.compile(r"\^\s*([-+]\s?(?:[0-9]+|[A-Za-z]))"), r"^{\1}"),
    (re.compile(r"\^\s*\(([^()]*)\)"), r"^{(\1)}"),
    (re.compile(r"\\frac\s*([0-9A-Za-z])\s*\{"), r"\\frac{\1}{"),
    (re.compile(r"\\frac\s*(\{[^{}]*\}|[0-9A-Za-z])\s*([0-9A-Za-z])"), r"\\frac{\1}{\2}"),
)  # fmt: skip


@lru_cache(maxsize=256)
def read(text: str) -> Answer:
    """Read an answer. What is not mathematics is `Words`."""
    text = text.strip().translate(_UNICODE)
    text = re.sub(r"^(?:\$+|\\\(|\\\[|\*+|\s)+|(?:\$+|\\\)|\\\]|\*+|\s|(?<=[\w)}\]$*])\.)+$", "", text)
    text = re.sub(
        r"\\(?:left|right|big|Big|displaystyle|mathbf|boldsymbol|limits|m?left|m?right)(?![A-Za-z])|\\!", "", text
    )
    is_date = _DATE.fullmatch(text)  # different days have equal differences and quotients
    if (
        not text
        or is_date
        or len(text) > MAX_CHARS
        or _UNREAD.search(text)
        or text.count("{") > 200
        or text.count("(") > 200
    ):
        return Words(_words(text))
    items = _split(text)
    if len(items) > 1:
        return _several(items)
    for opening, closing in ((r"\{", r"\}"), ("{", "}")):
        if text.startswith(opening) and _closes_at_end(text, opening, closing):
            inner = text[len(opening) : -len(closing)]
            parts = _split(inner, keeps_thousands=True)
            if opening == r"\{":
                return Words(_words(text)) if "|" in inner or ":" in inner else _several(parts)
            return read(inner)
    if (text[0] in "([" and text[-1] in ")]" and _closes_at_end(text, text[0], text[-1])) or (
        text.startswith(r"\langle") and text.endswith(r"\rangle")
    ):
        inner = text[1:-1] if text[0] in "([" else text[7:-7]
        parts = _split(inner, keeps_thousands=True)
        if len(parts) > 1:
            return Several(text[0] + text[-1] if text[0] in "([" else "()", tuple(map(read, parts)))
    union = _split_at(text, re.compile(r"\\cup(?![A-Za-z])"))
    if len(union) > 1:
        return Several("", tuple(map(read, union)))
    relations = _split_at(text, _RELATION)
    if len(relations) > 1:
        return _related(relations, [match[0] for match in _top_level(text, _RELATION)], text)
    return _value(text)


def _several(items: list[str]) -> Answer:
    """Several answers without an order. The name of "x = 1, 2" belongs to all."""
    first, *others = map(read, items)
    if isinstance(first, Named) and not any(isinstance(other, Named) for other in others):
        return Named(first.name, _set(first.value, *others))
    return _set(first, *others)


def _set(*items: Answer) -> Answer:
    """A set of answers. One answer is itself."""
    different: list[Answer] = []
    for item in items:
        if not any(item == other for other in different):
            different.append(item)
    return different[0] if len(different) == 1 else Several("", tuple(different))


def _related(parts: list[str], signs: list[str], text: str) -> Answer:
    """Read a chain of relations: x = 5, 1 < x <= 2, 2x + y = 3."""
    kinds = {_kind(sign) for sign in signs}
    names = [_NAME.fullmatch(part.strip()) is not None and part.strip() not in _CONSTANTS for part in parts]
    if kinds == {"in"} and len(parts) == 2:
        return Named(_name(parts[0]), read(parts[1]))
    if kinds == {"="}:
        if names[0]:
            return Named(_name(parts[0]), read(parts[-1]))
        if isinstance(_value(parts[0]), Number):
            return Named(_name(parts[-1]), _value(parts[0])) if names[-1] else read(parts[-1])
        if names[-1]:
            return Named(_name(parts[-1]), read(parts[0]))
        sides = [read(parts[0]), read(parts[-1])]
        found = [expression_of(side) for side in sides]
        return Named(_name(parts[0]), sides[1]) if None in found or len(parts) > 2 else Equation(found[0] - found[1])
    if (
        kinds <= {"<", "<=", ">", ">="}
        and sum(names) == 1
        and len(parts) <= 3
        and len({kind[0] for kind in kinds}) == 1
    ):
        return _interval(parts, signs, names)
    return Words(_words(text))


def _interval(parts: list[str], signs: list[str], names: list[bool]) -> Answer:
    """The interval of x > 3 or 1 < x <= 2."""
    import sympy

    kinds = [_kind(sign) for sign in signs]
    if kinds[0][0] == ">":
        parts, kinds, names = parts[::-1], [kind.replace(">", "<") for kind in kinds[::-1]], names[::-1]
    place = names.index(True)
    if len(parts) == 3 and place != 1:
        return Words(_words("".join(parts)))
    low = read(parts[place - 1]) if place else Formula(-sympy.oo, False)
    high = read(parts[place + 1]) if place + 1 < len(parts) else Formula(sympy.oo, False)
    left = "[" if place and kinds[place - 1] == "<=" else "("
    right = "]" if place + 1 < len(parts) and kinds[place] == "<=" else ")"
    return Named(_name(parts[place]), Several(left + right, (low, high)))


def _kind(sign: str) -> str:
    return {
        r"\le": "<=", r"\leq": "<=", r"\ge": ">=", r"\geq": ">=", r"\lt": "<", r"\gt": ">", r"\in": "in", r"\ne": "!=",
        r"\neq": "!=", r"\approx": "=", r"\equiv": "mod", "\u2248": "=",
    }.get(sign, sign)  # fmt: skip


def _name(text: str) -> str:
    return re.sub(r"[\s{}]", "", text)


def _value(text: str) -> Answer:
    """Read a number with its unit, a ratio, a formula, or words."""
    if re.fullmatch(r"\s*[0-9]+(?:\s?:\s?[0-9]+)+\s*", text):
        return Several(":", tuple(Number(Fraction(int(part)), False, "") for part in text.split(":")))
    text = _REPEATING.sub(_as_fraction, text)
    for pattern, replacement in _TIDY:
        text = pattern.sub(replacement, text)
    is_decimal = re.search(r"[0-9]\.[0-9]|(?<![0-9])\.[0-9]|[0-9]\.?[0-9]*[eE]-[0-9]", text) is not None
    currency = re.match(r"\s*([-+]?)\s*\\?([$\u20ac\u00a3])\s*", text)
    number = _number(
        currency[1] + text[currency.end() :] if currency else text, is_decimal, currency[2] if currency else ""
    )
    if number is not None:
        return number
    if has_words(_without_text_commands(text)):
        return Words(_words(text))
    expression = _parsed(text)
    if expression is None:
        return Words(_words(text))
    return _formula(expression, is_decimal)


def _formula(expression: Any, is_decimal: bool) -> Answer:
    import sympy

    if isinstance(expression, sympy.FiniteSet):  # plus or minus
        return _set(*(_formula(each, is_decimal) for each in expression.args))
    if isinstance(expression, sympy.Rational):
        return Number(Fraction(int(expression.p), int(expression.q)), is_decimal, "")
    return Formula(expression, is_decimal)


def _number(text: str, is_decimal: bool, currency: str) -> Number | None:
    text = _DEGREES.sub(" degrees", text)
    try:
        value, rest = read_value(plain(text))
    except NoValueError:
        return None
    words = rest.strip().strip(".")
    if not words or words == "%":
        return Number(value, is_decimal, currency or words)
    came_as_text = re.search(r"\\(?:text|mathrm|mbox|rm)\b", text) is not None
    is_letter = len(words) == 1 and words.isalpha() and not (came_as_text or rest[0].isspace())
    is_unit = (re.fullmatch(UNIT, rest) is not None and not is_letter) or (
        (came_as_text or rest[0].isspace())
        and re.fullmatch(r"[A-Za-z\u00b0\u00b5\u03a9]+(?:[\s/.^{}0-9*-]+[A-Za-z]*)*", words) is not None
        and (came_as_text or has_words(words))
        and not re.search(r"[A-Za-z]\s*[-+*=]\s*\w|\\", words)
    )
    return Number(value, is_decimal, currency or _unit(words)) if is_unit else None


_ABBREVIATIONS = {
    "metre": "m", "meter": "m", "centimeter": "cm", "centimetre": "cm", "millimeter": "mm", "millimetre": "mm",
    "kilometer": "km", "kilometre": "km", "gram": "g", "kilogram": "kg", "milligram": "mg", "second": "s", "sec": "s",
    "minute": "min", "hour": "h", "hr": "h", "liter": "l", "litre": "l", "foot": "ft", "feet": "ft", "inch": "in",
    "inche": "in", "mile": "mi", "pound": "lb", "ounce": "oz", "yard": "yd", "deg": "\u00b0", "degree": "\u00b0",
    "dollar": "$", "buck": "$", "usd": "$", "euro": "\u20ac", "percent": "%", "percentage": "%", "pct": "%",
    "milliliter": "ml", "per": "/",
}  # fmt: skip


def _unit(words: str) -> str:
    """One spelling for each unit: "meters", "metre" and "m" are m, and "square meters" is m^2."""
    words = re.sub(r"[{}*\s]+", " ", words.replace("\u00b2", "^2").replace("\u00b3", "^3")).strip()
    words = re.sub(r"\b(square|sq|cubic)\b\.? (\w+)", lambda m: f"{m[2]}^{3 if m[1] == 'cubic' else 2}", words)
    found = [
        _ABBREVIATIONS.get(one, one)
        for word in re.findall(r"[^\W\d_]+|[^\w\s]|[0-9]+", words)
        if (one := word if len(word) < 3 and word.lower() != "hr" else re.sub(r"(?<!s)s$", "", word.lower()))
    ]
    return "".join("l" if word == "L" else word for word in found)


def _parsed(text: str) -> Any:
    """The formula as SymPy has it, with exact numbers. None: math-verify's grammar does not read it."""
    import sympy
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig, latex2sympy

    is_complex = re.search(r"(?<![A-Za-z\\])i(?![A-Za-z])|\\imath", text) is not None
    try:
        found = latex2sympy(
            _for_grammar(text),
            is_real=not is_complex,
            normalization_config=None,
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
    except Exception:  # the grammar's errors have no type of their own; the text is then no formula
        return None
    if is_complex and isinstance(found, sympy.Basic):
        found = found.subs({symbol: sympy.I for symbol in found.free_symbols if symbol.name == "i"})
    if isinstance(found, sympy.MatrixBase):
        return found
    if not isinstance(found, sympy.Basic) or found.has(sympy.zoo, sympy.nan):
        return None
    return found.replace(lambda each: isinstance(each, sympy.Float), lambda each: sympy.Rational(str(each)))


def _for_grammar(text: str) -> str:
    text = _DEGREES.sub(r"\\cdot\\frac{\\pi}{180}", text)
    text = re.sub(r"\\(?:begin|end)\{array\}(?:\{[^{}]*\})?", "", text)
    is_matrix = "matrix" in text
    text = re.sub(r"(?<=[0-9])(?:,|\{,\}|\\,)(?=[0-9]{3}(?![0-9]))", "", text)
    text = re.sub(r"(?<![A-Za-z0-9.])([0-9]+(?:\.[0-9]+)?)[eE]([-+]?[0-9]+)(?![\w.])", r"\1\\cdot 10^{\2}", text)
    text = re.sub(r"\\[dtc]frac(?![A-Za-z])", r"\\frac", text)
    text = re.sub(r"\\[,;: ]|\\q?quad(?![A-Za-z])|~", " ", text) if not is_matrix else text
    text = re.sub(r"(?<![\\A-Za-z])(pi|theta|sin|cos|tan|log|ln|exp|arcsin|arccos|arctan)(?![A-Za-z])", r"\\\1 ", text)
    return text.replace("\u2212", "-").replace("\u00b7", r"\cdot ").replace("\u00d7", r"\times ").replace("**", "^")


def _without_text_commands(text: str) -> str:
    return re.sub(r"\\(?:text|mathrm|mbox|textbf)\s*\{([^{}]*)\}", r" \1 ", text)


def _as_fraction(match: re.Match[str]) -> str:
    r"""0.1\overline{6} is 15/90."""
    whole, fixed, repeating = match[1] or "0", match[2], match[3]
    above = int(whole + fixed + repeating) - int(whole + fixed)
    return rf"\frac{{{above}}}{{{'9' * len(repeating)}{'0' * len(fixed)}}}"


def _words(text: str) -> str:
    text = re.sub(r"[\s${}*_~]+", " ", _without_text_commands(text)).strip(" .").casefold()
    text = re.sub(r"\s*([,=<>()\[\]+-])\s*", r"\1", text)
    return text[1:-1] if re.fullmatch(r"\([a-z]\)", text) else text


def _split(text: str, *, keeps_thousands: bool = False) -> list[str]:
    """The items of a list. A comma before three digits is a thousands separator, except in brackets with nothing else."""
    text = _AND.sub(",", text)
    joined = re.sub(r"(?<![0-9.,])([0-9]{1,3})((?:,[0-9]{3})+)(?![0-9])", lambda m: m[1] + m[2].replace(",", ""), text)
    items = [item.strip() for item in _split_at(joined, _COMMA)]
    if keeps_thousands and len(items) == 1:
        items = [item.strip() for item in _split_at(text, _COMMA)]
    return [item for item in items if item] or [text]


def _split_at(text: str, pattern: re.Pattern[str]) -> list[str]:
    """The parts between the matches that stand outside of all brackets."""
    parts, begin = [], 0
    for match in _top_level(text, pattern):
        parts.append(text[begin : match.start()])
        begin = match.end()
    return [*parts, text[begin:]]


def _top_level(text: str, pattern: re.Pattern[str]) -> list[re.Match[str]]:
    depths, depth = [], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        depths.append(depth)
    return [match for match in pattern.finditer(text) if depths[match.start()] == 0]


def _closes_at_end(text: str, opening: str, closing: str) -> bool:
    if not text.endswith(closing):
        return False
    depth = 0
    for place, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and place >= len(opening) - 1 and place < len(text) - 1 and character in ")]}":
            return False
    return depth == 0


def expression_of(answer: Answer) -> Any:
    """The answer as SymPy has it. None: it is no number and no formula."""
    import sympy

    if isinstance(answer, Number):
        value = answer.value / 100 if answer.unit == "%" else answer.value
        return sympy.Rational(value.numerator, value.denominator)
    return answer.expression if isinstance(answer, Formula) and isinstance(answer.expression, sympy.Expr) else None
