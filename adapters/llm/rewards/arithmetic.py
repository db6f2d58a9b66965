r"""Exact values of arithmetic that is written as text or LaTeX: `3/4`, `2\frac{1}{2}`, `1.5e3`, `\sqrt{16}`."""

import math
import re
import unicodedata
from fractions import Fraction

MAX_CHARS = 300
"""Longer arithmetic has no value. This bounds the time of reading."""
MAX_DEPTH = 30
MAX_BITS = 20_000
"""Powers with more bits have no value."""

SCALES = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
"""Words after a number, and their powers of ten."""

_SIGNS = str.maketrans(
    {
        "\u2212": "-", "\ufe63": "-", "\uff0d": "-", "\u00d7": "*", "\u22c5": "*", "\u00b7": "*", "\u00f7": "/", "\u2044": "/",
        "\u2215": "/", "\u2248": "=", "\u00a0": " ", "\u2009": " ", "\u202f": " ", "\u200b": "", "\u221a": r"\sqrt ",
    }
)  # fmt: skip
_GROUPED = re.compile(
    r"(?<![\w.,])([0-9]{1,3}(?:(?:,(?:\\!)?|\{,\}|\\,|\\ |[ ~_'\u2019](?=[0-9]{3}(?![0-9])))[0-9]{3})+)(?!,?[0-9])"
)
_NUMBER = re.compile(r"((?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE]([-+]?[0-9]{1,4})(?![\w.]))?)")
_BASE = re.compile(r"_(?:\{\s*([0-9]{1,2})\s*\}|([0-9]{1,2}))")
_FRACTION_OF_DIGITS = re.compile(r"\\frac\s*([0-9])\s*([0-9])")
_COMMANDS = (
    (re.compile(r"\\[dtc]frac(?![A-Za-z])"), r"\\frac"),
    (re.compile(r"\\(?:left|right|big|Big|displaystyle|boxed|fbox|mathbf|boldsymbol|limits)(?![A-Za-z])"), ""),
    (re.compile(r"\\(?:times|cdot|ast)(?![A-Za-z])"), "*"),
    (re.compile(r"\\div(?![A-Za-z])"), "/"),
    (re.compile(r"\\approx(?![A-Za-z])"), "="),
    (re.compile(r"\\(?:text(?:bf|it|rm|normal)?|math(?:rm|it)|mbox|operatorname)\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\\[()\[\]]"), " "),
    (re.compile(r"\\[,;:! ]|\\q?quad(?![A-Za-z])|~"), " "),
    (re.compile(r"\\([%$#&])"), r"\1"),
    (re.compile(r"(?<=[0-9)}])(?:\*\*(?=[-(0-9{])| \*\* (?=[-(0-9{]))"), "^"),
)


def plain(text: str) -> str:
    r"""Write signs and commands of LaTeX that have the same meaning in one way, and remove thousands separators.

    Example:
        >>> plain("2\\,000 \\times \\dfrac{1}{2}")
        '2000 * \\frac{1}{2}'
    """
    text = "".join(map(_ascii, text)).translate(_SIGNS)
    text = _GROUPED.sub(lambda match: re.sub(r"[^0-9]", "", match[1]), text)
    for pattern, replacement in _COMMANDS:
        text = pattern.sub(replacement, text)
    return _FRACTION_OF_DIGITS.sub(r"\\frac{\1}{\2}", text).strip()


def _ascii(character: str) -> str:
    """Write one half as a fraction and superscripts as exponents."""
    if character.isascii():
        return character
    kind, _, digits = unicodedata.decomposition(character).partition(" ")
    if kind == "<fraction>":
        above, _, below = "".join(chr(int(code, 16)) for code in digits.split()).partition("\u2044")
        return rf" \frac{{{above}}}{{{below}}}" if below else character
    if kind == "<super>" and chr(int(digits, 16)).isdigit():
        return f"^{{{chr(int(digits, 16))}}}"
    return character


class NoValueError(ValueError):
    """The text is arithmetic without a value that can be computed exactly, such as the root of 2."""


def read_value(text: str) -> tuple[Fraction, str]:
    r"""The value of the arithmetic at the start of a text from `plain`, and the text after it.

    Raises:
        NoValueError: The text does not start with arithmetic, or the arithmetic has no exact value.

    Example:
        >>> read_value("2\\frac{1}{2} apples")
        (Fraction(5, 2), ' apples')
    """
    reader = _Reader(text[:MAX_CHARS])
    value = reader.sum(0)
    if reader.place > MAX_CHARS - 20 and len(text) > MAX_CHARS:
        raise NoValueError("too long")
    return value, text[reader.place :]


def has_last_decimal(value: Fraction) -> bool:
    """Whether a number can be written with finitely many decimals: 3/4 can, and 1/3 cannot."""
    rest = value.denominator
    for prime in (2, 5):
        while rest % prime == 0:
            rest //= prime
    return rest == 1


class _Reader:
    """A recursive descent over sums, products, powers and numbers."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.place = 0

    def sum(self, depth: int) -> Fraction:
        value = self.product(depth)
        while sign := self.operator("+-", r"\s*(?:[$0-9.({\[\\+-])"):
            term = self.product(depth)
            value = value + term if sign == "+" else value - term
        return value

    def product(self, depth: int) -> Fraction:
        value = self.signed(depth)
        while True:
            if sign := self.operator("*/", r"\s*(?:[$0-9.({\[\\-])"):
                factor = self.signed(depth)
                if sign == "/" and factor == 0:
                    raise NoValueError("a division by 0")
                value = value * factor if sign == "*" else value / factor
            elif re.match(r"\(\s*[-0-9.\\(]|\{\s*[0-9]|\s*\\(?:sqrt|frac)(?![A-Za-z])", self.rest):
                value = value * self.power(depth)
            else:
                return value

    def signed(self, depth: int) -> Fraction:
        match = re.match(r"\s*([-+]?)\s*", self.rest)
        assert match is not None
        self.place += match.end()
        return -self.power(depth) if match[1] == "-" else self.power(depth)

    def power(self, depth: int) -> Fraction:
        value = self.atom(depth)
        if match := re.match(r"\s*%(?=\s*[-+*/]\s*[0-9(\\])", self.rest):  # a percent sign at the end is a unit
            self.place += match.end()
            value /= 100
        if self.operator("^", r"\s*[-0-9({\\]"):
            return _power(value, self.signed(depth + 1))
        return value

    def atom(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise NoValueError("too deep")
        self.skip(r"\s*(?:[$\u20ac\u00a3]{1,2}\s?(?=[-.0-9(\\]))?")
        if self.skip(r"\\frac(?![A-Za-z])"):
            above, below = self.argument(depth), self.argument(depth)
            if below == 0:
                raise NoValueError("a division by 0")
            return above / below
        if self.skip(r"\\sqrt(?![A-Za-z])"):
            degree = self.skip(r"\s*\[\s*([0-9]{1,3})\s*\]")
            return _root(self.argument(depth), int(degree[1]) if degree else 2)
        for opening, closing in ("()", "{}", "[]"):
            if self.skip(rf"\s*\{opening}"):
                value = self.sum(depth + 1)
                if not self.skip(rf"\s*%?\s*\{closing}"):
                    raise NoValueError(f"no {closing}")
                return value
        if self.skip(r"-\s?(?=[0-9.])"):  # $-5
            return -self.number()
        return self.number()

    def number(self) -> Fraction:
        match = self.skip(_NUMBER.pattern)
        if match is None:
            raise NoValueError("no number")
        if base := self.skip(_BASE.pattern):
            try:
                return Fraction(int(match[1], int(base[1] or base[2])))
            except ValueError as error:
                raise NoValueError("no number of this base") from error
        value = Fraction(match[1])
        if value.denominator == 1 and match[1].isdigit():
            if mixed := self.skip(r"\s*\\frac\s*\{\s*([0-9]{1,20})\s*\}\s*\{\s*([0-9]{1,20})\s*\}"):
                return value + _proper(mixed)
            if mixed := self.skip(r"[ ]+([0-9]{1,20})/([0-9]{1,20})(?![0-9.,/])"):
                return value + _proper(mixed)
        if scale := self.skip(rf"\s*({'|'.join(SCALES)})(?![A-Za-z])"):
            value *= 10 ** SCALES[scale[1]]
        return value

    def argument(self, depth: int) -> Fraction:
        """What follows a command: a group, or one digit."""
        if self.skip(r"\s*(?=[({])"):
            return self.atom(depth + 1)
        if digit := self.skip(r"\s*([0-9]+)"):
            return Fraction(int(digit[1]))
        raise NoValueError("no argument")

    def operator(self, signs: str, then: str) -> str:
        match = re.match(rf"\s*([{re.escape(signs)}])(?={then})", self.rest)
        if match is None:
            return ""
        self.place += match.end()
        return match[1]

    def skip(self, pattern: str) -> re.Match[str] | None:
        match = re.match(pattern, self.rest)
        self.place += match.end() if match else 0
        return match

    @property
    def rest(self) -> str:
        return self.text[self.place :]


def _proper(mixed: re.Match[str]) -> Fraction:
    """The fraction of a mixed number, between 0 and 1."""
    above, below = int(mixed[1]), int(mixed[2])
    if not 0 < above < below:
        raise NoValueError("no mixed number")
    return Fraction(above, below)


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    whole = exponent.numerator
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if size * abs(whole) > MAX_BITS or exponent.denominator > 64 or (base == 0 and exponent <= 0):
        raise NoValueError("too large")
    return _root(Fraction(base**whole), exponent.denominator)


def _root(value: Fraction, degree: int) -> Fraction:
    if degree < 1 or (value < 0 and degree % 2 == 0):
        raise NoValueError("no real root")
    sign = -1 if value < 0 else 1
    return sign * Fraction(_whole_root(abs(value.numerator), degree), _whole_root(value.denominator, degree))


def _whole_root(value: int, degree: int) -> int:
    if degree == 2:
        root = math.isqrt(value)
    else:
        low, high = 0, 1 << (value.bit_length() // degree + 1)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if middle**degree <= value else (low, middle - 1)
        root = low
    if root**degree != value:
        raise NoValueError("no exact root")
    return root
