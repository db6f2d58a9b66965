"""The workbench's tools for texts, numbers, dates and quantities. Their docstrings are the descriptions that a policy sees."""

import base64
import calendar
import math
import re
import statistics
import urllib.parse
from datetime import date as Date
from datetime import timedelta
from string import ascii_lowercase, ascii_uppercase
from typing import Literal

# --- text ---------------------------------------------------------------------------------------------------------------


def change_case(text: str, case: Literal["upper", "lower", "title", "sentence"]) -> str:
    """Rewrite a text in another letter case."""
    return {"upper": text.upper(), "lower": text.lower(), "title": text.title(), "sentence": text.capitalize()}[case]


def count_text(text: str, unit: Literal["words", "characters", "sentences"] = "words") -> int:
    """Count what a text consists of."""
    if unit == "characters":
        return len(text)
    if unit == "words":
        return len(text.split())
    return len([part for part in re.split(r"[.!?]+(?:\s|$)", text) if part.strip()])


def extract_matches(text: str, kind: Literal["emails", "numbers", "links", "hashtags"]) -> list[str]:
    """Extract every match of one kind from a text."""
    patterns = {
        "emails": r"[\w.+-]+@\w[\w-]*(?:\.\w+)+",
        "numbers": r"\b\d+(?:\.\d+)?\b",
        "links": r"https?://[^\s,;]+[^\s,;.]",
        "hashtags": r"#\w+",
    }
    return re.findall(patterns[kind], text)


def pad_text(text: str, width: int, align: Literal["left", "right", "center"] = "left") -> str:
    """Pad a text with blanks up to a width."""
    if not 0 <= width <= 1000:
        raise ValueError(f"width must be 0 to 1000; got {width}.")
    return {"left": text.ljust(width), "right": text.rjust(width), "center": text.center(width)}[align]


_ROT13 = {
    ord(a): letters[place - 13] for letters in (ascii_lowercase, ascii_uppercase) for place, a in enumerate(letters)
}


def encode_text(text: str, encoding: Literal["base64", "hex", "url", "rot13"]) -> str:
    """Encode a text in a standard encoding."""
    if encoding == "base64":
        return base64.b64encode(text.encode()).decode()
    if encoding == "hex":
        return text.encode().hex()
    return urllib.parse.quote(text) if encoding == "url" else text.translate(_ROT13)


def replace_text(text: str, old: str, new: str, which: Literal["all", "first", "last"] = "all") -> str:
    """Replace one piece of a text by another."""
    if not old:
        raise ValueError("old must not be empty.")
    if which == "last":
        return new.join(text.rsplit(old, 1))
    return text.replace(old, new, 1 if which == "first" else -1)


# --- arithmetic ---------------------------------------------------------------------------------------------------------


def calculate(number: float, other_number: float, operation: Literal["add", "subtract", "multiply", "divide"]) -> float:
    """Carry out one of the basic arithmetic operations on two numbers."""
    if operation == "divide" and other_number == 0:
        raise ValueError("other_number must not be 0 in a division.")
    return {
        "add": lambda: number + other_number,
        "subtract": lambda: number - other_number,
        "multiply": lambda: number * other_number,
        "divide": lambda: number / other_number,
    }[operation]()


def round_number(number: float, digits: int | None = None, mode: Literal["nearest", "up", "down"] = "nearest") -> float:
    """Round a number to some decimals."""
    scale = 10.0 ** (digits or 0)
    whole = {"nearest": round(number * scale), "up": math.ceil(number * scale), "down": math.floor(number * scale)}[
        mode
    ]
    return whole / scale


def summarize_numbers(numbers: list[float], statistic: Literal["mean", "median", "deviation", "range"]) -> float:
    """Compute a summary statistic of several numbers."""
    if len(numbers) < 2:
        raise ValueError(f"numbers must contain at least two numbers; got {len(numbers)}.")
    return {
        "mean": statistics.fmean(numbers),
        "median": statistics.median(numbers),
        "deviation": statistics.stdev(numbers),
        "range": max(numbers) - min(numbers),
    }[statistic]


def percentage(number: float, other_number: float, kind: Literal["share", "change"]) -> float:
    """Work out a percentage from two numbers."""
    base = other_number if kind == "share" else number
    if base == 0:
        raise ValueError(f"{'other_number' if kind == 'share' else 'number'} counts as 100 % and must not be 0.")
    return 100 * number / base if kind == "share" else 100 * (other_number - number) / base


def factor_number(number: int, repeated: bool = True) -> list[int]:
    """Split a whole number into its prime factors."""
    if not 2 <= number <= 10**9:
        raise ValueError(f"number must be 2 to 1,000,000,000; got {number}.")
    factors, divisor = [], 2
    while divisor * divisor <= number:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    factors += [number] if number > 1 else []
    return factors if repeated else sorted(set(factors))


# --- dates --------------------------------------------------------------------------------------------------------------


def shift_date(
    date: str,
    number: int,
    unit: Literal["days", "weeks", "months", "years"],
    direction: Literal["later", "earlier"] = "later",
) -> str:
    """Move a date by a stretch of time."""
    start, amount = _date(date), number if direction == "later" else -number
    if abs(amount) > 10_000:
        raise ValueError(f"number must be -10,000 to 10,000; got {number}.")
    if unit in ("days", "weeks"):
        return (start + timedelta(days=amount * (7 if unit == "weeks" else 1))).isoformat()
    months = start.year * 12 + start.month - 1 + amount * (12 if unit == "years" else 1)
    year, month = months // 12, months % 12 + 1
    if not 1 <= year <= 9999:
        raise ValueError(f"the year must be 1 to 9999; got {year}.")
    return Date(year, month, min(start.day, calendar.monthrange(year, month)[1])).isoformat()


def date_difference(date: str, other_date: str, unit: Literal["days", "weeks", "months"] = "days") -> float:
    """Measure how far apart two dates are."""
    first, last = sorted((_date(date), _date(other_date)))
    if unit == "months":
        return (last.year - first.year) * 12 + last.month - first.month - (last.day < first.day)
    return (last - first).days / (7 if unit == "weeks" else 1)


def weekday_of(date: str, form: Literal["full", "short", "digit"] = "full") -> str:
    """Name the weekday of a date."""
    day = _date(date).weekday()
    return {"full": calendar.day_name[day], "short": calendar.day_abbr[day], "digit": str(day + 1)}[form]


def format_date(date: str, style: Literal["american", "european", "long", "compact"]) -> str:
    """Write a date in another notation."""
    day = _date(date)
    if style == "long":
        return f"{day.day} {calendar.month_name[day.month]} {day.year}"
    return day.strftime({"american": "%m/%d/%Y", "european": "%d.%m.%Y", "compact": "%Y%m%d"}[style])


def closest_workday(
    date: str,
    workday: Literal["monday", "tuesday", "wednesday", "thursday", "friday"],
    direction: Literal["after", "before"] = "after",
) -> str:
    """Find the workday that is closest to a date."""
    step = 1 if direction == "after" else -1
    wanted = ("monday", "tuesday", "wednesday", "thursday", "friday").index(workday)
    days = (_date(date) + timedelta(days=step * distance) for distance in range(1, 8))
    return next(day for day in days if day.weekday() == wanted).isoformat()


def period_edge(date: str, period: Literal["month", "quarter", "year"], edge: Literal["first", "last"]) -> str:
    """Find the edge of the period in which a date lies."""
    day = _date(date)
    length = {"month": 1, "quarter": 3, "year": 12}[period]
    month = (day.month - 1) // length * length + 1
    if edge == "first":
        return Date(day.year, month, 1).isoformat()
    month += length - 1
    return Date(day.year, month, calendar.monthrange(day.year, month)[1]).isoformat()


def _date(text: str) -> Date:
    try:
        return Date.fromisoformat(text)
    except ValueError as error:
        raise ValueError(f"a date must be written YYYY-MM-DD and exist; got {text!r}.") from error


# --- conversion ---------------------------------------------------------------------------------------------------------

LengthUnit = Literal["metres", "kilometres", "miles", "feet"]
WeightUnit = Literal["grams", "kilograms", "pounds", "ounces"]
TemperatureUnit = Literal["celsius", "fahrenheit", "kelvin"]
DurationUnit = Literal["seconds", "minutes", "hours", "days"]

_ROMAN = (
    (1000, "M"), (900, "CM"), (500, "D"), (400, "CD"), (100, "C"), (90, "XC"), (50, "L"), (40, "XL"), (10, "X"), (9, "IX"),
    (5, "V"), (4, "IV"), (1, "I"),
)  # fmt: skip


def convert_length(number: float, from_unit: LengthUnit, to_unit: LengthUnit, digits: int | None = None) -> float:
    """Convert a length into another unit."""
    metres = {"metres": 1, "kilometres": 1000, "miles": 1609.344, "feet": 0.3048}
    return _rounded(number * metres[from_unit] / metres[to_unit], digits)


def convert_weight(number: float, from_unit: WeightUnit, to_unit: WeightUnit, digits: int | None = None) -> float:
    """Convert a weight into another unit."""
    grams = {"grams": 1, "kilograms": 1000, "pounds": 453.59237, "ounces": 28.349523125}
    return _rounded(number * grams[from_unit] / grams[to_unit], digits)


def convert_temperature(
    number: float, from_unit: TemperatureUnit, to_unit: TemperatureUnit, digits: int | None = None
) -> float:
    """Convert a temperature to another scale."""
    kelvin = {"celsius": number + 273.15, "fahrenheit": (number + 459.67) * 5 / 9, "kelvin": number}[from_unit]
    if kelvin < 0:
        raise ValueError(f"number must not be below absolute zero; got {number} {from_unit}.")
    return _rounded(
        {"celsius": kelvin - 273.15, "fahrenheit": kelvin * 9 / 5 - 459.67, "kelvin": kelvin}[to_unit], digits
    )


def convert_duration(number: float, from_unit: DurationUnit, to_unit: DurationUnit, digits: int | None = None) -> float:
    """Convert a duration into another unit."""
    seconds = {"seconds": 1, "minutes": 60, "hours": 3600, "days": 86400}
    return _rounded(number * seconds[from_unit] / seconds[to_unit], digits)


def number_base(number: int, base: Literal["binary", "octal", "hexadecimal"], prefix: bool = False) -> str:
    """Write a number in another base."""
    return format(number, ("#" if prefix else "") + {"binary": "b", "octal": "o", "hexadecimal": "x"}[base])


def roman_numeral(number: int, letters: Literal["capital", "small"] = "capital") -> str:
    """Write a number as a Roman numeral."""
    if not 1 <= number <= 3999:
        raise ValueError(f"number must be 1 to 3999; got {number}.")
    numeral = ""
    for value, symbol in _ROMAN:
        numeral += symbol * (number // value)
        number %= value
    return numeral if letters == "capital" else numeral.lower()


def _rounded(value: float, digits: int | None) -> float:
    return value if digits is None else round(value, digits)
