"""The workbench: hand-worked outputs of its tools, and the documented properties of its requests."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import jsonschema
import matplotlib as mpl
import numpy as np
import pytest
from matplotlib import image, pyplot

from adapters.tools.catalogue.tools import ABSENT, Tool, ToolCatalogue
from adapters.tools.learning.evaluation import Accuracy, ToolReport
from examples.tool_workbench import scalars
from examples.tool_workbench.phrases import OPENINGS, PHRASES
from examples.tool_workbench.plots import plot_accuracy, plot_confusion
from examples.tool_workbench.tasks import make_workbench_tasks, shares_words, workbench_split
from examples.tool_workbench.tools import (
    ADDED_LATER,
    WORKBENCH_FILES,
    chunk_items,
    combine_lists,
    csv_column,
    file_checksum,
    file_size,
    join_items,
    list_files,
    make_workbench_files,
    pick_items,
    read_lines,
    search_file,
    sort_items,
    unique_items,
    workbench_catalogue,
)
from examples.tool_workbench.values import VALUES
from examples.tool_workbench.words import content_words, words, words_of
from grpo.errors import ConfigError

CATALOGUE = workbench_catalogue()


# --- the tools
def test_tools_for_single_values_return_hand_worked_outputs(subtests: pytest.Subtests) -> None:
    for name, cases in {
        "change_case": [(("one day. Two", "upper"), "ONE DAY. TWO"), (("One Day. Two", "lower"), "one day. two"),
            (("one day. two", "title"), "One Day. Two"), (("one Day. two", "sentence"), "One day. two")],
        "count_text": [(("Go on. It is 3.5 km!",), 6), (("Go on. It is 3.5 km!", "characters"), 20),
            (("Go on. It is 3.5 km!", "sentences"), 2)],
        "extract_matches": [(("a@b.org, 4.5 #x http://b.org/y.", "emails"), ["a@b.org"]),
            (("a@b.org, 4.5 #x http://b.org/y.", "numbers"), ["4.5"]),
            (("a@b.org, 4.5 #x http://b.org/y.", "links"), ["http://b.org/y"]),
            (("a@b.org, 4.5 #x http://b.org/y.", "hashtags"), ["#x"])],
        "pad_text": [(("ab", 5), "ab   "), (("ab", 5, "right"), "   ab"), (("ab", 6, "center"), "  ab  ")],
        "encode_text": [(("a b", "base64"), "YSBi"), (("a b", "hex"), "612062"), (("a b", "url"), "a%20b"),
            (("a b", "rot13"), "n o")],
        "replace_text": [(("x y x x", "x", "z"), "z y z z"), (("x y x x", "x", "z", "first"), "z y x x"),
            (("x y x x", "x", "z", "last"), "x y x z")],
        "calculate": [((6, 4, "add"), 10), ((6, 4, "subtract"), 2), ((6, 4, "multiply"), 24), ((6, 4, "divide"), 1.5),
            ((6, 0, "multiply"), 0)],
        "round_number": [((2.71828, 2), 2.72), ((2.71828, 2, "down"), 2.71), ((2.2, None, "up"), 3),
            ((-2.2, None, "down"), -3)],
        "summarize_numbers": [(([1, 2, 6], "mean"), 3), (([6, 1, 2], "median"), 2), (([2, 4, 6], "deviation"), 2),
            (([6, 1, 2], "range"), 5)],
        "percentage": [((20, 80, "share"), 25), ((20, 80, "change"), 300)],
        "factor_number": [((60,), [2, 2, 3, 5]), ((60, False), [2, 3, 5]), ((97,), [97])],
        "shift_date": [(("2024-02-28", 2, "days"), "2024-03-01"), (("2024-03-15", 2, "weeks", "earlier"), "2024-03-01"),
            (("2024-01-31", 1, "months"), "2024-02-29"), (("2024-01-31", 2, "months", "earlier"), "2023-11-30"),
            (("2024-02-29", 1, "years"), "2025-02-28")],
        "date_difference": [(("2024-03-01", "2024-02-01"), 29), (("2024-02-01", "2024-02-15", "weeks"), 2),
            (("2023-12-15", "2024-03-14", "months"), 2)],
        "weekday_of": [(("2024-01-01",), "Monday"), (("2024-01-02", "short"), "Tue"), (("2024-01-07", "digit"), "7")],
        "format_date": [(("2024-03-05", "american"), "03/05/2024"), (("2024-03-05", "european"), "05.03.2024"),
            (("2024-03-05", "long"), "5 March 2024"), (("2024-03-05", "compact"), "20240305")],
        "closest_workday": [(("2024-01-01", "monday"), "2024-01-08"), (("2024-01-01", "friday", "before"), "2023-12-29")],
        "period_edge": [(("2024-02-10", "month", "last"), "2024-02-29"), (("2024-05-10", "quarter", "first"), "2024-04-01"),
            (("2024-05-10", "quarter", "last"), "2024-06-30"), (("2024-05-10", "year", "last"), "2024-12-31")],
        "convert_length": [((2.5, "kilometres", "metres"), 2500), ((1, "miles", "feet", 3), 5280)],
        "convert_weight": [((3, "pounds", "ounces", 6), 48), ((1500, "grams", "kilograms"), 1.5)],
        "convert_temperature": [((100, "celsius", "fahrenheit", 6), 212), ((0, "celsius", "kelvin"), 273.15)],
        "convert_duration": [((90, "minutes", "hours"), 1.5), ((2, "days", "seconds"), 172800)],
        "number_base": [((10, "binary"), "1010"), ((10, "octal"), "12"), ((255, "hexadecimal", True), "0xff")],
        "roman_numeral": [((1994,), "MCMXCIV"), ((48, "small"), "xlviii")],
    }.items():  # fmt: skip
        for arguments, output in cases:
            with subtests.test(name, arguments=arguments):
                assert getattr(scalars, name)(*arguments) == output


def test_tools_for_lists_return_hand_worked_outputs() -> None:
    items = ["kiwi", "Fig", "date", "fig"]
    assert sort_items(items) == ["date", "Fig", "fig", "kiwi"]
    assert sort_items(items, order="descending") == ["kiwi", "Fig", "fig", "date"]
    assert sort_items(items, key="length") == ["Fig", "fig", "kiwi", "date"]
    assert unique_items(["a", "A", "a"]) == ["a", "A"]
    assert unique_items(["A", "a", "b"], ignore_case=True) == ["A", "b"]
    assert chunk_items(items, 3) == [["kiwi", "Fig", "date"], ["fig"]]
    assert chunk_items(items, 3, "drop") == [["kiwi", "Fig", "date"]]
    assert join_items(["a", "b"]) == "a, b"
    assert [join_items(["a", "b"], mark) for mark in ("semicolon", "dash", "slash")] == ["a; b", "a-b", "a/b"]
    assert join_items(["a", "b"], quotes="single") == "'a', 'b'"
    assert join_items(["a", "b"], "slash", "double") == '"a"/"b"'
    assert pick_items(items, 1) == ["kiwi"]
    assert pick_items(items, 2, "back") == ["date", "fig"]
    assert pick_items(items, 0, "back") == []
    assert combine_lists(["a", "b"], ["b", "c"], "union") == ["a", "b", "c"]
    assert combine_lists(["a", "b", "b"], ["b", "c"], "intersection") == ["b"]
    assert combine_lists(["a", "b"], ["b", "c"], "difference") == ["a"]


def test_tools_for_files_return_hand_worked_outputs(tmp_path) -> None:
    make_workbench_files(tmp_path)
    (tmp_path / "abc.txt").write_bytes(b"abc")
    stock, notes = tmp_path / "data/stock.csv", tmp_path / "notes.txt"
    assert read_lines(stock, 2) == ["item,units,price", "lamp,40,12.5"]
    assert read_lines(stock, 1, "tail") == ["shelf,9,35.75"]
    assert read_lines(stock, 0, "tail") == []
    assert file_size(tmp_path / "abc.txt") == 3
    assert file_size(tmp_path / "abc.txt", "kilobytes") == 0.003
    assert file_size(stock, "lines") == 5
    assert list_files(tmp_path / "data") == ["orders.csv", "readme.txt", "stock.csv"]
    assert list_files(tmp_path / "data", "size") == ["readme.txt", "stock.csv", "orders.csv"]
    assert list_files(tmp_path / "data", kind="text") == ["readme.txt"]
    assert list_files(tmp_path / "data", kind="table") == ["orders.csv", "stock.csv"]
    assert list_files(tmp_path) == ["abc.txt", "journal.txt", "notes.txt"]  # files, not folders
    assert search_file(notes, "Call") == ["Call the printer.", "Call Anna about the budget."]
    assert search_file(notes, "BUDGET") == []
    assert search_file(notes, "BUDGET", ignore_case=True) == ["Call Anna about the budget."]
    assert csv_column(stock, "units", "sum") == 68
    assert csv_column(stock, "units", "mean") == 17
    assert csv_column(stock, "price", "max") == 120
    assert csv_column(stock, "price", "min") == 12.5
    # published test vectors of "abc"
    assert file_checksum(tmp_path / "abc.txt", "crc32") == "352441c2"
    assert file_checksum(tmp_path / "abc.txt", "md5") == "900150983cd24fb0d6963f7d28e17f72"
    assert file_checksum(tmp_path / "abc.txt") == sha256(b"abc").hexdigest()


def test_invalid_arguments_of_tools_are_refused_with_a_reason(tmp_path, subtests: pytest.Subtests) -> None:
    make_workbench_files(tmp_path)
    (tmp_path / "empty.csv").touch()
    for call, message in (
        (lambda root: scalars.pad_text("a", 10**6), "width must be 0 to 1000; got 1000000"),
        (lambda root: scalars.replace_text("a", "", "b"), "old must not be empty"),
        (lambda root: scalars.calculate(1, 0, "divide"), "other_number must not be 0"),
        (lambda root: scalars.summarize_numbers([1], "deviation"), "at least two numbers; got 1"),
        (lambda root: scalars.percentage(1, 0, "share"), "must not be 0"),
        (lambda root: scalars.percentage(0, 1, "change"), "must not be 0"),
        (lambda root: scalars.factor_number(10**12), "number must be 2 to 1,000,000,000"),
        (lambda root: scalars.weekday_of("5 March 2024"), "written YYYY-MM-DD and exist; got '5 March 2024'"),
        (lambda root: scalars.weekday_of("2023-02-29"), "exist; got '2023-02-29'"),
        (lambda root: scalars.shift_date("2024-01-01", 10**9, "days"), "number must be -10,000 to 10,000"),
        (lambda root: scalars.shift_date("2024-01-01", 9999, "years"), "the year must be 1 to 9999; got 12023"),
        (lambda root: scalars.convert_temperature(-1, "kelvin", "celsius"), "absolute zero; got -1 kelvin"),
        (lambda root: scalars.roman_numeral(4000), "number must be 1 to 3999; got 4000"),
        (lambda root: chunk_items(["a"], 0), "number must be at least 1; got 0"),
        (lambda root: pick_items(["a"], 2), "number must be 0 to 1"),
        (lambda root: read_lines(root / "notes.txt", -1), "must not be negative; got -1"),
        (lambda root: read_lines(root / "none.txt", 1), "a file that exists; got 'none.txt'"),
        (lambda root: file_size(root / "data"), "a file that exists; got 'data'"),
        (lambda root: list_files(root / "notes.txt"), "must be a folder; got 'notes.txt'"),
        (lambda root: csv_column(root / "data/stock.csv", "colour", "sum"), r"columns \(item, units, price\); got 'colour'"),
        (lambda root: csv_column(root / "empty.csv", "colour", "sum"), r"columns \(none\)"),
    ):  # fmt: skip
        with subtests.test(message), pytest.raises(ValueError, match=message):
            call(tmp_path)


def test_the_catalogue_has_six_categories_real_decisions_phrases_and_values() -> None:
    assert PHRASES.keys() == VALUES.keys() == CATALOGUE.keys()
    sizes = Counter(tool.category for tool in CATALOGUE.values())
    assert sizes == {"text": 6, "arithmetic": 5, "dates": 6, "conversion": 6, "lists": 6, "files": 6}
    assert sum(bool(tool.choices) for tool in CATALOGUE.values()) == 35
    assert sum(len(tool.choices) >= 2 for tool in CATALOGUE.values()) >= 10
    for tool in CATALOGUE.values():
        assert tool.description.endswith(".")
        assert len(tool.description) < 80
    shared = Counter(name for tool in CATALOGUE.values() for name in tool.properties)
    assert {"text", "number", "date", "items", "path"} <= {name for name, count in shared.items() if count >= 5}


# --- words
def test_values_in_a_request_do_not_count_as_words() -> None:
    text = 'Swap "the fox" for "dog" in notes/a.txt (line 3), on 2024-05-06: now, in data/.'
    assert words(text) == ["swap", "for", "in", "line", "on", "now", "in"]
    assert content_words(text) == {"swap", "line"}
    assert words("A well-known sort_items, 12.5 km!") == ["a", "well", "known", "sort", "items", "km"]


def test_variants_of_a_word_count_as_one(subtests: pytest.Subtests) -> None:
    for alike in (
        "convert converts converted converting conversion conversions", "sort sorts sorted sorting sorter",
        "split splits splitting", "summary summaries summarise summarizes summarizing", "divide divides dividing division",
        "calculate calculates calculating calculated calculation", "replace replaced replacement",
        "encode encoding encoded encodes", "compute computing computation", "large larger largest", "different differences",
        "search searches searching", "multiply multiplies multiplying",
    ):  # fmt: skip
        with subtests.test(alike):
            assert len(content_words(alike)) == 1


def test_different_words_stay_different() -> None:
    different = "day date text test list length line unit unique size sort number name case count column"
    assert len(content_words(different)) == len(different.split())
    assert content_words("could you please do this for me with the one that I have?") == frozenset()


# --- the phrases
def said(phrase: str) -> frozenset[str]:
    return content_words(re.sub(r"\{\w+\}", " ", phrase))


def test_only_plain_phrases_have_words_of_the_description(subtests: pytest.Subtests) -> None:
    for name in CATALOGUE:
        with subtests.test(name):
            phrases, described = PHRASES[name], words_of(CATALOGUE[name])
            for wording, shares in ((phrases.plain, True), (phrases.oblique, False)):
                requests = {f"{one} {noun}" for one in wording.constructions for noun in wording.objects}
                assert len(wording.constructions) >= 4
                assert len(requests) >= 12
                assert all(bool(said(request) & described) == shares for request in requests)
            cues = [one for values in phrases.cues.values() for wordings in values.values() for one in wordings]
            cues += [one for wordings in phrases.extras.values() for one in wordings]
            openings = [f"{opening} {ending}" for opening, ending in OPENINGS]
            assert not any(said(phrase) & described for phrase in cues + openings)


def test_every_value_of_every_decision_has_its_own_cues(subtests: pytest.Subtests) -> None:
    for name in CATALOGUE:
        with subtests.test(name):
            choices = {choice.name: choice.values for choice in CATALOGUE[name].choices}
            assert PHRASES[name].cues.keys() == choices.keys()
            for parameter, values in choices.items():
                cues = PHRASES[name].cues[parameter]
                assert set(cues) == {value for value in values if value is not ABSENT}
                wordings = [one for several in cues.values() for one in several]
                assert len(set(wordings)) == len(wordings)


# --- the tasks
@cache
def patterns(tool: str, plain: bool) -> list[tuple[re.Pattern, str, str]]:
    wording = PHRASES[tool].plain if plain else PHRASES[tool].oblique
    found = []
    for construction in wording.constructions:
        for noun in wording.objects:
            pattern = re.escape(construction.replace("{object}", noun))
            pattern = re.sub(r"\\\{\w+\\\}", '("[^"]*"|[^",]+?|[0-9., and]+)', pattern)
            found.append((re.compile(rf"(^|\s){pattern}([,.?]|$)", re.IGNORECASE), construction, noun))
    return found


def combination(task) -> tuple[str, bool, str, str]:
    """The construction and object that a request is made of: the longest that match it."""
    found = [
        (len(construction) + len(noun), construction, noun)
        for pattern, construction, noun in patterns(task.tool, shares_words(task))
        if pattern.search(task.text)
    ]
    assert found, task.text
    _, construction, noun = max(found)
    return task.tool, shares_words(task), construction, noun


def test_held_out_requests_are_new_combinations_of_training_words() -> None:
    train, held_out = workbench_split(1400, 700, seed=0)
    seen = {combination(task) for task in train}
    new = {combination(task) for task in held_out}
    assert not seen & new
    assert len(new) == 35 * 2 * 4  # of each tool and kind, a quarter of 16 or a third of 12
    for part in (2, 3):  # but each construction and each object is known
        assert {(*one[:2], one[part]) for one in new} <= {(*one[:2], one[part]) for one in seen}
    known = {word for task in train for word in words(task.text)}
    assert all(known.issuperset(words(task.text)) for task in held_out)


def test_tools_and_kinds_are_balanced(subtests: pytest.Subtests) -> None:
    for num_train, num_held_out, seed in ((350, 71, 3), (703, 106, 2)):
        with subtests.test(num_train=num_train):
            split = workbench_split(num_train, num_held_out, seed)
            for tasks, count in zip(split, (num_train, num_held_out), strict=True):
                assert len(tasks) == count
                assert sum(not shares_words(task) for task in tasks) in {count // 2, (count + 1) // 2}
                per_tool = Counter(task.tool for task in tasks).values()
                assert max(per_tool) - min(per_tool) <= 1


@pytest.mark.slow
def test_a_split_depends_on_its_seed_alone() -> None:
    split = workbench_split(350, 70, seed=5)
    assert split == workbench_split(350, 70, seed=5)
    assert split != workbench_split(350, 70, seed=6)
    tasks = make_workbench_tasks(70, seed=5)
    assert tasks == make_workbench_tasks(70, seed=5)
    assert tasks != make_workbench_tasks(70, seed=6)


def test_the_held_out_tasks_of_a_tool_do_not_depend_on_other_tools() -> None:
    fewer, _ = workbench_split(660, 66, 0, CATALOGUE.without(*ADDED_LATER))
    _, held_out = workbench_split(700, 700, 0)
    assert not {task.tool for task in fewer} & set(ADDED_LATER)
    assert not {combination(task) for task in fewer} & {combination(task) for task in held_out}


def test_too_few_training_tasks_and_foreign_tools_are_refused() -> None:
    with pytest.raises(ConfigError, match="Use more training tasks: at least 10 for each of the 35 tools"):
        workbench_split(35, 700, seed=0)
    foreign = Tool(name="foreign", description="Do something.", function=print)
    with pytest.raises(ConfigError, match=r"it also has foreign\. Leave these tools out with catalogue.without"):
        make_workbench_tasks(10, seed=0, catalogue=ToolCatalogue([foreign]))


def test_every_request_contains_the_arguments_of_its_call() -> None:
    tasks = make_workbench_tasks(700, seed=2)
    calls = defaultdict(set)
    for task in tasks:
        tool = CATALOGUE[task.tool]
        described, asked = words_of(tool), content_words(task.text)
        assert bool(described & asked) == shares_words(task)
        assert {name: task.arguments[name] for name in task.slots} == task.slots
        enumerated = {choice.name: choice for choice in tool.choices}
        assert not enumerated.keys() & task.slots.keys()
        decided = set()
        for name, choice in enumerated.items():
            assert choice.index(task.arguments) is not None
            cues = PHRASES[task.tool].cues[name]
            if name in task.arguments and any(one in task.text for one in cues[task.arguments[name]]):
                decided.add(name)
            else:  # what is not said is the default
                assert task.arguments.get(name, ABSENT) == tool.properties[name].get("default", ABSENT)
        assert task.labels["difficulty"] == ("easy", "medium", "hard")[(not shares_words(task)) + bool(decided)]
        for value in task.slots.values():
            for part in value if isinstance(value, list) else [value]:
                assert str(part) in task.text
        assert re.fullmatch(r"[^{}]+[.?]", task.text)
        assert not task.text[0].islower()
        assert not re.search(r"  |, ,| [,.?]|\b1 places", re.sub(r'"[^"]*"', '""', task.text))
        calls[task.text].add((task.tool, str(task.arguments)))
    assert max(map(len, calls.values())) == 1
    assert {task.labels["difficulty"] for task in tasks} == {"easy", "medium", "hard"}


def test_right_calls_are_valid_and_return_a_value(tmp_path) -> None:
    make_workbench_files(tmp_path)
    for task in make_workbench_tasks(700, seed=3):
        tool = CATALOGUE[task.tool]
        jsonschema.Draft202012Validator(tool.parameters).validate(dict(task.arguments))
        arguments = {name: tmp_path / value if name == "path" else value for name, value in task.arguments.items()}
        output = tool.function(**arguments)
        assert output is not None
        assert output not in ("", []), task.text
        assert output != task.arguments.get("text") or task.tool in ("pad_text", "change_case"), task.text


def test_files_stay_below_their_root(tmp_path) -> None:
    make_workbench_files(tmp_path / "new/root")
    written = {path.relative_to(tmp_path / "new/root") for path in tmp_path.rglob("*") if path.is_file()}
    assert written == set(map(Path, WORKBENCH_FILES))


def test_tools_to_add_later_are_recognisable_from_plain_requests() -> None:
    """The description of the right tool is the only one with the largest share of its words in the request."""
    described = {name: words_of(tool) for name, tool in CATALOGUE.items()}
    later = CATALOGUE.without(*(CATALOGUE.keys() - set(ADDED_LATER)))
    tasks = make_workbench_tasks(128, seed=0, catalogue=later)
    plain = [task for task in tasks if shares_words(task)]
    assert len(plain) == 64
    for task in plain:
        asked = content_words(task.text)
        shares = {name: len(asked & own) / len(own) for name, own in described.items()}
        assert [name for name, share in shares.items() if share == max(shares.values())] == [task.tool]
        assert shares[task.tool] >= 0.5


# --- plots show the counted values with readable labels

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(autouse=True)
def no_window() -> Iterator[None]:
    mpl.use("Agg")
    pyplot.close("all")
    yield
    pyplot.close("all")


def report(confusion: list[list[int]], right_tool: float) -> ToolReport:
    """Tools a and b of one category, c and d of another."""
    overall = Accuracy(num_tasks=10, right_tool=right_tool, right_call=0.0)
    tools, category_of = ("a", "b", "c", "d", "?"), ("first", "first", "second", "second", "?")
    counted: Any = {"tools": tools, "category_of": category_of, "confusion": tuple(tuple(row) for row in confusion)}
    return ToolReport(overall=overall, by_label={}, abstention=None, errors={}, **counted)


BEFORE = report([[1, 1, 2, 0, 0], [0, 0, 2, 0, 0], [0, 0, 4, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]], 0.5)
AFTER = report([[4, 0, 0, 0, 0], [0, 1, 0, 0, 1], [0, 0, 4, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]], 0.9)


def labels(ticks: list) -> list[str]:
    return [tick.get_text() for tick in ticks]


def test_plot_confusion_draws_a_panel_per_report_with_row_shares(tmp_path) -> None:
    path = tmp_path / "new" / "confusion.png"
    figure = plot_confusion({"before": BEFORE, "after": AFTER}, path)
    assert path.read_bytes().startswith(PNG)
    assert len(np.unique(image.imread(path)[..., :3].reshape(-1, 3), axis=0)) > 50, "an empty canvas has one colour"
    left, right, scale = figure.axes
    assert [left.get_title(), right.get_title()] == ["before: 50% right", "after: 90% right"]
    assert [left.get_xlabel(), right.get_xlabel(), left.get_ylabel()] == ["called", "called", "right"]
    assert scale.get_ylabel() == "share of the tasks of a row"
    # d was neither right nor called; ? was called once
    for axis in (left, right):
        assert labels(axis.get_xticklabels()) == ["a", "b", "c", "?"]
    assert labels(left.get_yticklabels()) == ["a", "b", "c", "?"]
    drawn = [np.asarray(axis.images[0].get_array()) for axis in (left, right)]
    np.testing.assert_allclose(drawn[0], [[0.25, 0.25, 0.5, 0], [0, 0, 1, 0], [0, 0, 1, 0], [0, 0, 0, 0]])
    np.testing.assert_allclose(drawn[1], [[1, 0, 0, 0], [0, 0.5, 0, 0.5], [0, 0, 1, 0], [0, 0, 0, 0]])


def test_plot_confusion_of_categories_draws_the_share_of_each_category() -> None:
    figure = plot_confusion({"after": AFTER}, None, of="category")
    axis = figure.axes[0]
    assert labels(axis.get_xticklabels()) == ["first", "second", "?"]
    np.testing.assert_allclose(np.asarray(axis.images[0].get_array()), [[5 / 6, 0, 1 / 6], [0, 1, 0], [0, 0, 0]])


def test_plot_accuracy_draws_a_named_line_per_curve(tmp_path) -> None:
    path = tmp_path / "new" / "accuracy.png"
    curves = {"GRPO": ([0, 100, 200], [0.03, 0.5, 0.98]), "another": ([0, 200], [0.03, 0.4])}
    figure = plot_accuracy(curves, str(path))
    assert path.read_bytes().startswith(PNG)
    (axis,) = figure.axes
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("calls of tools", "share of held-out tasks")
    assert labels(axis.get_legend().get_texts()) == ["GRPO", "another"]
    assert {line.get_label(): line.get_xydata().T.tolist() for line in axis.lines} == {
        name: [list(calls), list(shares)] for name, (calls, shares) in curves.items()
    }
    low, high = axis.get_ylim()
    assert low == 0
    assert high >= 1


def test_a_written_figure_does_not_touch_pyplot_and_one_without_a_path_belongs_to_it(tmp_path) -> None:
    mpl.use("svg")
    plot_accuracy({"GRPO": ([0, 1], [0.0, 1.0])}, tmp_path / "accuracy.png")
    plot_confusion({"after": AFTER}, tmp_path / "confusion.png")
    assert (mpl.get_backend(), pyplot.get_fignums()) == ("svg", [])
    shown = [plot_accuracy({"GRPO": ([0, 1], [0.0, 1.0])}, None), plot_confusion({"after": AFTER}, None)]
    assert [pyplot.figure(number) for number in pyplot.get_fignums()] == shown
