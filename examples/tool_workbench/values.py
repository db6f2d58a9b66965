"""Random values for requests to the workbench's tools, and their text in a request."""

import re
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from .tools import WORKBENCH_FILES


def render(name: str, value: Any) -> str:
    """Text of a value in a request. `words` recognises it by its quotes, or by a digit, a dot or a slash."""
    if isinstance(value, list):
        texts = [str(one) for one in value]
        if name == "numbers":
            return f"{', '.join(texts[:-1])} and {texts[-1]}"
        return f'"{", ".join(texts)}"'
    if isinstance(value, str) and name in ("text", "old", "new", "column"):
        return f'"{value}"'
    return str(value)


TEXTS = (
    "the quick fox jumps. The dog sleeps.",
    "all good things come to those who wait",
    "Rain is expected tomorrow. Bring a coat.",
    "see you at noon. Do not be late! Bring Tom.",
    "Nobody expects the spanish inquisition",
    "two roads diverged in a wood",
    "My flat is small. It is warm.",
    "a stitch in time saves nine",
    "The train was late. Again! We walked home.",
    "time flies like an arrow",
)
MIXED_TEXTS = (
    "Mail anna@mail.org or see https://mail.org/help for the 3 offers #summer",
    "Order 66 went to bob@shop.net, tracked at https://shop.net/t/66 #late",
    "#news 12 people wrote to info@news.com about https://news.com/today",
    "Call 555 or write to eve@post.eu; more at https://post.eu/faq #urgent",
)
LABELS = (
    "PAD", "Lisbon", "B-17", "Monday run", "total", "Ada", "north gate", "Q4", "draft", "Zoe",
)  # fmt: skip
SWAPS = (
    ("we eat bread and bread and more bread", "bread", "rice"),
    ("the red car, the red bike, the red bus", "red", "blue"),
    ("dear Tom, as Tom said, Tom is late", "Tom", "Kim"),
    ("one day, some day, any day", "day", "night"),
    ("tea in the garden, tea in bed, tea at five", "tea", "coffee"),
)
NAMES = (
    "pear",
    "fig",
    "banana",
    "kiwi",
    "Plum",
    "lemon",
    "oslo",
    "Rome",
    "lima",
    "Paris",
    "bern",
    "ada",
    "Tom",
    "zoe",
    "Kim",
)
TEXT_FILES = tuple(name for name in WORKBENCH_FILES if name.endswith(".txt"))
TABLE_FILES = tuple(name for name in WORKBENCH_FILES if name.endswith(".csv"))


def _number(generator: Random) -> float:
    return generator.randint(2, 90) + generator.choice((0, generator.randint(1, 9) / 10))


def _some_number(generator: Random) -> dict[str, Any]:
    return {"number": _number(generator)}


def _pair(generator: Random) -> dict[str, Any]:
    return {"number": _number(generator), "other_number": _number(generator)}


def _integer(low: int, high: int) -> Callable[[Random], dict[str, Any]]:
    return lambda generator: {"number": generator.randint(low, high)}


def _date(generator: Random) -> str:
    return f"{generator.randint(1990, 2039)}-{generator.randint(1, 12):02}-{generator.randint(1, 28):02}"


def _some_date(generator: Random) -> dict[str, Any]:
    return {"date": _date(generator)}


def _items(generator: Random, low: int = 4, high: int = 7) -> list[str]:
    return generator.sample(NAMES, generator.randint(low, high))


def _repeating(generator: Random) -> dict[str, Any]:
    items = _items(generator)
    again = generator.sample(items, 2)
    return {"items": [*items, again[0], again[1].swapcase()]}


def _items_and_number(generator: Random) -> dict[str, Any]:
    return {"items": _items(generator), "number": generator.randint(2, 3)}


def _two_lists(generator: Random) -> dict[str, Any]:
    items = _items(generator, 3, 4)
    other = [*items[:2], *generator.sample([name for name in NAMES if name not in items], 2)]
    generator.shuffle(other)
    return {"items": items, "other_items": other}


def _swap(generator: Random) -> dict[str, Any]:
    text, old, new = generator.choice(SWAPS)
    return {"text": text, "old": old, "new": new}


def _file(generator: Random) -> dict[str, Any]:
    return {"path": generator.choice(tuple(WORKBENCH_FILES))}


def _text_file(generator: Random) -> dict[str, Any]:
    return {"path": generator.choice(TEXT_FILES)}


def _search(generator: Random) -> dict[str, Any]:
    path = generator.choice(TEXT_FILES)
    return {"path": path, "text": generator.choice(re.findall(r"[A-Za-z]{3,}", WORKBENCH_FILES[path]))}


VALUES: Mapping[str, Callable[[Random], dict[str, Any]]] = {
    "change_case": lambda generator: {"text": generator.choice(TEXTS)},
    "count_text": lambda generator: {"text": generator.choice(TEXTS)},
    "extract_matches": lambda generator: {"text": generator.choice(MIXED_TEXTS)},
    "pad_text": lambda generator: {"text": generator.choice(LABELS), "width": generator.randint(12, 40)},
    "encode_text": lambda generator: {"text": generator.choice(TEXTS)},
    "replace_text": _swap,
    "calculate": _pair,
    "round_number": lambda generator: {"number": (10 * generator.randint(1000, 999_999) + generator.randint(1, 9)) / 100_000},
    "summarize_numbers": lambda generator: {
        "numbers": [_number(generator) for _ in range(generator.randint(3, 6))],
    },
    "percentage": _pair,
    "factor_number": lambda generator: {"number": generator.choice((2, 3, 4, 6)) * generator.randint(2, 300)},
    "shift_date": lambda generator: {"date": _date(generator), "number": generator.randint(2, 30)},
    "date_difference": lambda generator: {"date": _date(generator), "other_date": _date(generator)},
    "weekday_of": _some_date,
    "format_date": _some_date,
    "closest_workday": _some_date,
    "period_edge": _some_date,
    "convert_length": _some_number,
    "convert_weight": _some_number,
    "convert_temperature": _some_number,
    "convert_duration": _some_number,
    "number_base": _integer(5, 4000),
    "roman_numeral": _integer(4, 3999),
    "sort_items": lambda generator: {"items": _items(generator)},
    "unique_items": _repeating,
    "chunk_items": _items_and_number,
    "join_items": lambda generator: {"items": _items(generator, 3, 6)},
    "pick_items": _items_and_number,
    "combine_lists": _two_lists,
    "read_lines": lambda generator: _text_file(generator) | {"number": generator.randint(2, 4)},
    "file_size": _file,
    "list_files": lambda generator: {"path": generator.choice(("reports/", "data/"))},
    "search_file": _search,
    "csv_column": lambda generator: {
        "path": generator.choice(TABLE_FILES), "column": generator.choice(("units", "price")),
    },
    "file_checksum": _file,
}  # fmt: skip
"""Generators of a call's free arguments, by tool."""
