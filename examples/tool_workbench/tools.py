"""A catalogue of 35 small working tools in six categories, for learning and tests.

Many tools are similar on purpose: there are four unit conversions, and texts, lists and files can all be measured or searched.
Parameters with the same meaning have the same name in all tools, because the values of a request fill the arguments of any
chosen tool. A function raises ValueError for arguments that make no sense.
"""

import csv
import hashlib
import math
import statistics
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from adapters.tools.catalogue.tools import Tool, ToolCatalogue

from .scalars import (
    calculate,
    change_case,
    closest_workday,
    convert_duration,
    convert_length,
    convert_temperature,
    convert_weight,
    count_text,
    date_difference,
    encode_text,
    extract_matches,
    factor_number,
    format_date,
    number_base,
    pad_text,
    percentage,
    period_edge,
    replace_text,
    roman_numeral,
    round_number,
    shift_date,
    summarize_numbers,
    weekday_of,
)  # fmt: skip

ADDED_LATER = ("encode_text", "roman_numeral")
"""Two tools with requests close to their descriptions. Leave them out of training and add them afterwards."""

# --- lists --------------------------------------------------------------------------------------------------------------


def sort_items(
    items: list[str],
    key: Literal["alphabet", "length"] = "alphabet",
    order: Literal["ascending", "descending"] = "ascending",
) -> list[str]:
    """Sort a list of items."""
    return sorted(items, key=len if key == "length" else str.casefold, reverse=order == "descending")


def unique_items(items: list[str], ignore_case: bool = False) -> list[str]:
    """Drop the duplicates from a list of items."""
    seen: dict[str, str] = {}
    for item in items:
        seen.setdefault(item.casefold() if ignore_case else item, item)
    return list(seen.values())


def chunk_items(items: list[str], number: int, rest: Literal["keep", "drop"] = "keep") -> list[list[str]]:
    """Split a list of items into groups of equal size."""
    if number < 1:
        raise ValueError(f"number must be at least 1; got {number}.")
    chunks = [items[start : start + number] for start in range(0, len(items), number)]
    return [chunk for chunk in chunks if rest == "keep" or len(chunk) == number]


def join_items(
    items: list[str],
    separator: Literal["comma", "semicolon", "dash", "slash"] = "comma",
    quotes: Literal["single", "double"] | None = None,
) -> str:
    """Join items to one string."""
    mark = {"single": "'", "double": '"', None: ""}[quotes]
    between = {"comma": ", ", "semicolon": "; ", "dash": "-", "slash": "/"}[separator]
    return between.join(f"{mark}{item}{mark}" for item in items)


def pick_items(items: list[str], number: int, end: Literal["front", "back"] = "front") -> list[str]:
    """Take some items from one end of a list."""
    if not 0 <= number <= len(items):
        raise ValueError(f"number must be 0 to {len(items)}, the number of items; got {number}.")
    return items[:number] if end == "front" else items[len(items) - number :]


def combine_lists(
    items: list[str], other_items: list[str], operation: Literal["union", "intersection", "difference"]
) -> list[str]:
    """Combine two lists as sets."""
    if operation == "union":
        return list(dict.fromkeys([*items, *other_items]))
    return [item for item in dict.fromkeys(items) if (item in other_items) == (operation == "intersection")]


# --- files --------------------------------------------------------------------------------------------------------------


def read_lines(path: Path, number: int, part: Literal["head", "tail"] = "head") -> list[str]:
    """Read a few lines of a file."""
    if number < 0:
        raise ValueError(f"number must not be negative; got {number}.")
    lines = _file(path).read_text("utf-8").splitlines()
    return lines[:number] if part == "head" else lines[max(0, len(lines) - number) :]


def file_size(path: Path, unit: Literal["bytes", "kilobytes", "lines"] = "bytes") -> float:
    """Report the size of a file."""
    content = _file(path).read_bytes()
    return {"bytes": len(content), "kilobytes": len(content) / 1000, "lines": len(content.splitlines())}[unit]


def list_files(
    path: Path, order: Literal["name", "size"] = "name", kind: Literal["text", "table"] | None = None
) -> list[str]:
    """List the files in a folder."""
    if not path.is_dir():
        raise ValueError(f"path must be a folder; got {path.name!r}.")
    suffix = {"text": ".txt", "table": ".csv", None: ""}[kind]
    files = [file for file in path.iterdir() if file.is_file() and file.name.endswith(suffix)]
    files.sort(key=lambda file: (-file.stat().st_size if order == "size" else 0, file.name))
    return [file.name for file in files]


def search_file(path: Path, text: str, ignore_case: bool = False) -> list[str]:
    """Search a file for a text."""
    wanted = text.casefold() if ignore_case else text
    lines = _file(path).read_text("utf-8").splitlines()
    return [line for line in lines if wanted in (line.casefold() if ignore_case else line)]


def csv_column(path: Path, column: str, statistic: Literal["sum", "mean", "max", "min"]) -> float:
    """Evaluate one column of a CSV table."""
    with _file(path).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows or column not in rows[0]:
        raise ValueError(
            f"column must be one of the table's columns ({', '.join(rows[0]) if rows else 'none'}); got {column!r}."
        )
    values = [float(row[column]) for row in rows]
    return {"sum": math.fsum(values), "mean": statistics.fmean(values), "max": max(values), "min": min(values)}[
        statistic
    ]


def file_checksum(path: Path, algorithm: Literal["crc32", "md5", "sha256"] = "sha256") -> str:
    """Compute the checksum of a file."""
    content = _file(path).read_bytes()
    if algorithm == "crc32":
        return f"{zlib.crc32(content):08x}"
    return hashlib.new(algorithm, content, usedforsecurity=False).hexdigest()


def _file(path: Path) -> Path:
    if not path.is_file():
        raise ValueError(f"path must be a file that exists; got {path.name!r}.")
    return path


WORKBENCH_FILES: Mapping[str, str] = {
    "notes.txt": "Call the printer.\nbuy milk and bread\nCall Anna about the budget.\nwater the plants\nRead chapter five.\n",
    "journal.txt": "Monday: rain all day.\nTuesday: the budget is late.\nWednesday: sun.\nThursday: rain.\nFriday: no milk.\n",
    "reports/spring.txt": "Spring report\nThe budget held.\nSales rose.\nStaff: twelve.\nEnd of report\n",
    "reports/autumn.txt": "Autumn report\nRain hurt sales.\nThe budget did not hold.\nStaff: ten.\nEnd of report\n",
    "reports/sales.csv": "month,units,price\nJanuary,12,3.5\nFebruary,18,3.5\nMarch,9,4.25\n",
    "data/stock.csv": "item,units,price\nlamp,40,12.5\nchair,15,49.0\ndesk,4,120.0\nshelf,9,35.75\n",
    "data/orders.csv": "order,units,price\nA1,2,12.5\nA2,1,49.0\nA3,6,35.75\n",
    "data/readme.txt": "Tables of the shop.\nPrices are in euros.\nUnits are pieces.\nThe budget is elsewhere.\nAsk Anna.\n",
}
"""Files for the file tools: the text of each file, by its path below the root."""


def make_workbench_files(root: Path) -> None:
    """Write `WORKBENCH_FILES` below a folder. The folder is created if it does not exist."""
    for name, content in WORKBENCH_FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content, "utf-8")


_FUNCTIONS: Mapping[str, tuple[Callable[..., Any], ...]] = {
    "text": (change_case, count_text, extract_matches, pad_text, encode_text, replace_text),
    "arithmetic": (calculate, round_number, summarize_numbers, percentage, factor_number),
    "dates": (shift_date, date_difference, weekday_of, format_date, closest_workday, period_edge),
    "conversion": (
        convert_length, convert_weight, convert_temperature, convert_duration, number_base, roman_numeral,
    ),
    "lists": (sort_items, unique_items, chunk_items, join_items, pick_items, combine_lists),
    "files": (read_lines, file_size, list_files, search_file, csv_column, file_checksum),
}  # fmt: skip


def workbench_catalogue() -> ToolCatalogue:
    """The 35 tools, 5 or 6 in each of six categories."""
    return ToolCatalogue(
        Tool.from_function(function, category=category)
        for category, functions in _FUNCTIONS.items()
        for function in functions
    )
