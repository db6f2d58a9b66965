"""The tables of a page: samples and settings."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from adapters.tracking.values import PICTURE
from grpo import GRPOConfig
from grpo.arguments import flattened
from grpo.sinks import as_text

from .markup import Html, element, joined
from .run_data import RunData, SampleTable, Start
from .words import counted, number

FIRST_COLUMNS = ("state", "action", "reward")
"""Columns of a sample table that come first. Parts of the reward, the advantage and the number of steps follow."""


def row_of(cells: Sequence[str], name: str = "td", classes: Sequence[str] = ()) -> Html:
    """One table row. `classes` has a CSS class for each cell, or is empty."""
    chosen = classes or [""] * len(cells)
    return element("tr", *(element(name, cell, class_=kind or None) for cell, kind in zip(cells, chosen, strict=True)))


def table_of(header: Sequence[str], rows: Sequence[Html], classes: Sequence[str] = (), **attributes: Any) -> Html:
    """A table with a header row."""
    head = element("thead", row_of(header, "th", classes))
    return element("div", element("table", head, element("tbody", *rows), **attributes), class_="scroll")


def sample_tables(run: RunData) -> Html | None:
    """Sampled rows from the beginning, the middle and the end, of evaluations and of training. None: there are none."""
    if not run.tables:
        return None
    kinds = {"eval": "Evaluation after iteration", "train": "Training, iteration"}
    shown = [
        element(
            "details", element("summary", f"{kinds[table.kind]} {table.iteration:,}"), _samples(table), open=is_open
        )
        for table, is_open in zip(run.tables, _open_tables(run.tables), strict=True)
    ]
    return joined(*shown)


def _open_tables(tables: Sequence[SampleTable]) -> list[bool]:
    """The first kind's first and last tables are open, so that both ends of the run can be compared at once."""
    of_first_kind = [place for place, table in enumerate(tables) if table.kind == tables[0].kind]
    return [place in (of_first_kind[0], of_first_kind[-1]) for place in range(len(tables))]


def _samples(table: SampleTable) -> Html:
    names = dict.fromkeys(name for row in table.rows for name in row if name != "pictures")
    measured = [name for name in names if any(row.get(name) is not None for row in table.rows)]
    columns = [*FIRST_COLUMNS, *(name for name in measured if name not in FIRST_COLUMNS)]
    classes = ["text" if name in ("state", "action") else "number" for name in columns]
    rows = [
        row_of([_with_pictures(row), *(_cell(row.get(name)) for name in columns[1:])], classes=classes)
        for row in table.rows
    ]
    return table_of(columns, rows, classes)


def _with_pictures(row: Mapping[str, Any]) -> Html:
    """The state, and small copies of the pictures of the row."""
    links = row.get("pictures")
    shown = (
        [link for link in links if isinstance(link, str) and link.startswith(PICTURE)]
        if isinstance(links, list)
        else []
    )
    return joined(_cell(row.get("state")), *(element("img", src=link, alt="picture") for link in shown))


def _cell(value: Any) -> str:
    if isinstance(value, str):
        return long_text(value)
    return number(value) if isinstance(value, int | float) else "-"


def long_text(text: str) -> Html:
    """Text as it is, line breaks included, in a box that scrolls if the text is long."""
    return element("div", as_text(text) or "(empty)", class_="answer")


def settings_section(starts: Sequence[Start]) -> Html:
    """The settings that differ from the defaults, and all other settings behind a fold."""
    if not starts:
        return element("p", "The folder has no settings.json, because the run was not recorded with RunFolder.")
    last = starts[-1].settings
    given = last.get("config")
    config, defaults = flattened(given if isinstance(given, Mapping) else {}), flattened(GRPOConfig().to_dict())
    changed = {name: value for name, value in config.items() if name not in defaults or value != defaults[name]}
    rows = [row_of([name, _plain(value), _plain(defaults.get(name, "-"))]) for name, value in changed.items()]
    others = [row_of([name, _plain(value)]) for name, value in config.items() if name not in changed]
    # the config has tables of its own
    rest = [
        row_of([name, _plain(value)]) for name, value in flattened({**last, "config": None}).items() if name != "config"
    ]
    return joined(
        table_of(["setting", "value", "default"], rows) if rows else element("p", "All settings have their defaults."),
        _changes(starts),
        folded("The run and its versions", table_of(["name", "value"], rest)),
        folded(f"{counted(len(others), 'setting')} with their defaults", table_of(["setting", "value"], others)),
    )


def folded(title: str, content: Html) -> Html:
    """Content that opens with a click on its title."""
    return element("details", element("summary", title), content)


def _changes(starts: Sequence[Start]) -> Html:
    """What each resume changed."""
    lines = []
    for old, new in pairwise(starts):
        before, after = flattened(old.settings), flattened(new.settings)
        different = [name for name in dict.fromkeys([*before, *after]) if before.get(name) != after.get(name)]
        changes = [f"{name}: {_plain(before.get(name))} → {_plain(after.get(name))}" for name in different]
        words = "; ".join(changes) or "with the same settings"
        lines.append(element("li", f"Continued at iteration {new.iteration:,}: {words}"))
    return element("ul", *lines) if lines else joined()


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return number(value)
    return as_text(value if isinstance(value, str) else repr(value))
