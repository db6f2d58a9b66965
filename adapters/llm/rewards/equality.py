"""Whether two answers are the same mathematics. `formulas` reads them."""

from fractions import Fraction
from typing import Any

from .arithmetic import has_last_decimal
from .formulas import Answer, Equation, Formula, Named, Number, Several, Words, expression_of

ROUNDED = Fraction(1, 10**6)
"""Largest relative difference of a decimal and a number without a last decimal: 0.333333 is 1/3, and 0.33 is not."""
NOISE = Fraction(1, 10**12)
"""Largest relative difference of two decimals: that of floating-point numbers."""


def equal(expected: Answer, found: Answer) -> bool:
    """Whether two answers are the same mathematics. Units and names may be left out, and must not differ."""
    if isinstance(expected, Named) or isinstance(found, Named):
        if isinstance(expected, Named) and isinstance(found, Named) and expected.name != found.name:
            return False
        return equal(_unnamed(expected), _unnamed(found))
    match expected, found:
        case Words(), Words():
            return expected.text == found.text != ""
        case Several(), Several():
            return _several_are_equal(expected, found)
        case Number(), Number():
            return _numbers_are_equal(expected, found)
        case Equation(), Equation():
            return any(is_zero(expected.difference + sign * found.difference) for sign in (1, -1))
        case (Number() | Formula(), Number() | Formula()):
            return _formulas_are_equal(expected, found)
        case _:
            return False


def _unnamed(answer: Answer) -> Answer:
    return answer.value if isinstance(answer, Named) else answer


def _several_are_equal(expected: Several, found: Several) -> bool:
    if expected.brackets != found.brackets or len(expected.items) != len(found.items):
        return False
    if expected.brackets:
        return all(map(equal, expected.items, found.items))
    left = list(found.items)
    for item in expected.items:
        match = next((other for other in left if equal(item, other)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _numbers_are_equal(expected: Number, found: Number) -> bool:
    percent = "%"
    units = {expected.unit, found.unit} - {"", percent}
    if len(units) > 1 or (units and percent in (expected.unit, found.unit)):
        return False
    is_decimal = expected.is_decimal or found.is_decimal
    pairs = [(expected.value, found.value)]
    if expected.unit != found.unit and percent in (expected.unit, found.unit):
        of_percent, other = (expected, found) if expected.unit == percent else (found, expected)
        pairs.append((of_percent.value / 100, other.value))
    return any(_are_close(a, b, is_decimal=is_decimal) for a, b in pairs)


def _are_close(a: Fraction, b: Fraction, *, is_decimal: bool) -> bool:
    if a == b or not is_decimal or (a.denominator == b.denominator == 1):
        return a == b
    tolerance = NOISE if has_last_decimal(a) and has_last_decimal(b) else ROUNDED
    return abs(a - b) <= tolerance * max(abs(a), abs(b))


def _formulas_are_equal(expected: Number | Formula, found: Number | Formula) -> bool:
    import sympy

    a, b = (expression_of(each) for each in (expected, found))
    if a is None or b is None:
        first, second = (getattr(each, "expression", None) for each in (expected, found))
        if isinstance(first, sympy.MatrixBase) and isinstance(second, sympy.MatrixBase):
            return first.shape == second.shape and all(is_zero(x - y) for x, y in zip(first, second, strict=True))
        return bool(first is not None and second is not None and first == second)
    is_decimal = expected.is_decimal or found.is_decimal
    if is_decimal and not (a - b).free_symbols and not (a - b).has(sympy.oo, -sympy.oo, sympy.nan):
        size = max(abs(a.evalf(30)), abs(b.evalf(30)))
        return bool(abs((a - b).evalf(30)) <= sympy.Rational(ROUNDED.numerator, ROUNDED.denominator) * size)
    return bool(a == b) or is_zero(a - b)


def is_zero(difference: Any) -> bool:
    """Whether a formula is 0, by its digits if it has no variables, else by simplification."""
    import sympy

    if difference.has(sympy.oo, -sympy.oo, sympy.zoo, sympy.nan):
        return False
    if not difference.free_symbols:
        difference = difference.doit()
        if difference.is_Rational:
            return bool(difference == 0)
        value = difference.evalf(5, maxn=500)
        largest = max((abs(each.evalf(5)) for each in sympy.Add.make_args(difference)), default=1)
        return bool(value == 0 or abs(value) <= largest * sympy.Float("1e-300"))
    return bool(sympy.simplify(difference) == 0 or sympy.expand(difference) == 0)
