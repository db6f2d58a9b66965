"""Tables of phrases for requests: constructions, objects, and cues for parameter values.

A request is an opening, a construction around an object, and the cues of parameters: "Could you {arrange} {the names "x, y"},
{the longest first}?" Braces in a phrase are replaced: `{object}` in a construction by an object (appended if the construction
lacks it), a parameter's name by its value. If a construction contains an enumerated parameter, the request has no cue for it.

Plain phrases use words of the tool's name or description. Oblique phrases, cues and openings never use those words.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Wording:
    """Constructions and objects to ask for a tool. Every construction fits every object."""

    constructions: tuple[str, ...]
    """Imperatives, at least four."""
    objects: tuple[str, ...]
    """Noun phrases, at least three."""

    def __post_init__(self) -> None:
        """Append `{object}` to constructions that lack it."""
        complete = (one if "{object}" in one else one + " {object}" for one in self.constructions)
        object.__setattr__(self, "constructions", tuple(complete))


@dataclass(frozen=True, slots=True, kw_only=True)
class Phrases:
    """All phrases for one tool."""

    plain: Wording
    """Wording in which every combination shares content words with the tool's name or description."""
    oblique: Wording
    """Wording in which no combination shares a content word with the tool's name or description."""
    cues: Mapping[str, Mapping[Any, tuple[str, ...]]] = field(default_factory=dict)
    """Wordings for enumerated parameters, by parameter and value."""
    extras: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Wordings for free parameters that most requests omit."""


def _wording(constructions: str, objects: str) -> Wording:
    return Wording(constructions=_alternatives(constructions), objects=_alternatives(objects))


def _cues(**values: str) -> dict[Any, tuple[str, ...]]:
    """Wordings by value. The keywords `true` and `false` stand for the booleans."""
    names: dict[str, Any] = {"true": True, "false": False}
    return {names.get(value, value): _alternatives(wordings) for value, wordings in values.items()}


def _alternatives(listed: str) -> tuple[str, ...]:
    return tuple(one.strip() for one in listed.split("|"))


OPENINGS: tuple[tuple[str, str], ...] = (
    ("", "."),
    ("please", "."),
    ("could you", "?"),
    ("can you please", "?"),
    ("would you", "?"),
    ("I need you to", "."),
    ("I would like you to", "."),
    ("I want you to", ", thanks."),
    ("hello, please", "."),
    ("my boss asks you to", "."),
    ("now", "."),
    ("I wonder if you could", "."),
    ("for my homework,", "."),
    ("when you have a moment,", ", please."),
    ("as a favour,", "."),
    ("here is a job for you:", "."),
)
"""Beginnings and endings of requests, for any tool."""

_PLAIN_TEXTS = "the text {text} | my text {text} | the short text {text} | the English text {text}"
_OBLIQUE_TEXTS = "the snippet {text} | the passage {text} | the phrase {text} | my remark {text}"
_PLAIN_PAIRS = "the numbers {number} and {other_number} | the two numbers {number} and {other_number} | "
_PLAIN_PAIRS += "the pair of numbers {number} and {other_number}"
_OBLIQUE_PAIRS = "{number} and {other_number} | the pair {number} and {other_number} | "
_OBLIQUE_PAIRS += "the figures {number} and {other_number} | the amounts {number} and {other_number}"
_DATES = "the date {date} | the deadline {date} | the meeting on {date} | the delivery on {date}"
_OBLIQUE_DATES = "{date} | the deadline {date} | the meeting on {date} | the delivery on {date}"
_LISTS = "the list {items} | the names {items} | the entries {items} | the labels {items}"
_OBLIQUE_LISTS = "the names {items} | the entries {items} | the labels {items} | the terms {items}"
_FILES = "the file {path} | {path} | the document {path} | my copy of {path}"
_OBLIQUE_FILES = "{path} | the document {path} | my copy of {path} | the enclosed {path}"
_DIGITS = ("rounded to {digits} places", "with {digits} digits after the point")
_METRES = {
    "metres": "metres | m",
    "kilometres": "kilometres | km",
    "miles": "miles | statute miles",
    "feet": "feet | ft",
}
_GRAMS = {"grams": "grams | g", "kilograms": "kilograms | kg", "pounds": "pounds | lb", "ounces": "ounces | oz"}
_DEGREES = {
    "celsius": "degrees Celsius | Celsius",
    "fahrenheit": "degrees Fahrenheit | Fahrenheit",
    "kelvin": "kelvin | K",
}
_SECONDS = {"seconds": "seconds | sec", "minutes": "minutes | min", "hours": "hours | hrs", "days": "days"}


def _units(units: Mapping[str, str]) -> dict[str, dict[Any, tuple[str, ...]]]:
    return {"from_unit": _cues(**units), "to_unit": _cues(**units)}


PHRASES: Mapping[str, Phrases] = {
    # --- text
    "change_case": Phrases(
        plain=_wording("change the case of | change the letter case of | rewrite {object} in another case | switch letters in",
                       _PLAIN_TEXTS),
        oblique=_wording("retype | restyle | fix the capitals in | adjust the capitals of", _OBLIQUE_TEXTS),
        cues={"case": _cues(
            upper="all in capitals | in block capitals | as if shouting",
            lower="without any capitals | all in small type | with no capitals at all",
            title="with every word capitalised | like a headline | as in a book title",
            sentence="with only the first word capitalised | as in ordinary prose",
        )},
    ),
    "count_text": Phrases(
        plain=_wording("count what is in | count what {object} consists of | give me a count for | count through",
                       _PLAIN_TEXTS),
        oblique=_wording("tell me how long {object} is | measure | work out the length of | tally up", _OBLIQUE_TEXTS),
        cues={"unit": _cues(
            words="in words | word by word",
            characters="in characters | character by character",
            sentences="in sentences | sentence by sentence",
        )},
    ),
    "extract_matches": Phrases(
        plain=_wording("extract the matches from | extract what you need from | extract everything there is from | "
                       "give me the matches in", _PLAIN_TEXTS),
        oblique=_wording("pull the interesting bits out of | fish the useful parts out of | harvest | scan", _OBLIQUE_TEXTS),
        cues={"kind": _cues(
            emails="only the e-mail addresses | looking for mail addresses",
            numbers="only the figures | looking for numbers",
            links="only the web addresses | looking for links",
            hashtags="only the hashtags | looking for hash tags",
        )},
    ),
    "pad_text": Phrases(
        plain=_wording("pad {object} to a width of {width} | pad out {object} with blanks to {width} characters | "
                       "fill {object} with blanks up to {width} | bring {object} to the width {width}", _PLAIN_TEXTS),
        oblique=_wording("stretch {object} to {width} characters | make {object} fill {width} positions | "
                         "set {object} in a field of {width} characters | lay out {object} over {width} columns",
                         _OBLIQUE_TEXTS),
        cues={"align": _cues(
            left="flush left | aligned on the left",
            right="flush right | aligned on the right",
            center="centred | in the middle",
        )},
    ),
    "encode_text": Phrases(
        plain=_wording("encode | encode {object} in a standard encoding | put {object} in a standard encoding | "
                       "give me a standard encoding of", _PLAIN_TEXTS),
        oblique=_wording("scramble | make {object} safe to send | obfuscate | wrap {object} for the wire", _OBLIQUE_TEXTS),
        cues={"encoding": _cues(
            base64="as base64 | by means of base64",
            hex="as hex digits | byte by byte in hex",
            url="percent style, as in a URL | so that it fits in a URL",
            rot13="by rot13 | rotated by rot13",
        )},
    ),
    "replace_text": Phrases(
        plain=_wording("replace {old} by {new} in | replace the piece {old} with {new} in | have {new} replace {old} in | "
                       "do a replacement of {old} by {new} in", _PLAIN_TEXTS),
        oblique=_wording("swap {old} for {new} in | turn {old} into {new} in | substitute {new} for {old} in | "
                         "write {new} instead of {old} in", _OBLIQUE_TEXTS),
        cues={"which": _cues(
            all="everywhere | wherever it occurs",
            first="only the first time | at the first place alone",
            last="only the last time | at the last place alone",
        )},
    ),
    # --- arithmetic
    "calculate": Phrases(
        plain=_wording("calculate with | do basic arithmetic on | carry out the operation on | "
                       "apply an arithmetic operation to",
                       _PLAIN_PAIRS + " | the values {number} and {other_number}"),
        oblique=_wording("crunch | reckon with | do the maths on | compute with", _OBLIQUE_PAIRS),
        cues={"operation": _cues(
            add="adding them up | as a sum",
            subtract="taking the second away from the first | as a difference",
            multiply="multiplying them | as a product",
            divide="dividing the first by the second | as a quotient",
        )},
    ),
    "round_number": Phrases(
        plain=_wording("round | round off | do a rounding of | give {object} in round form",
                       "the number {number} | the figure {number} | {number} | the amount {number}"),
        oblique=_wording("tidy up | shorten | simplify | make {object} less precise",
                         "the figure {number} | {number} | the amount {number} | the result {number}"),
        cues={"mode": _cues(
            nearest="whichever way is closer | to the nearest",
            up="always upwards | towards the ceiling",
            down="always downwards | towards the floor",
        )},
        extras={"digits": ("keeping {digits} places", "with {digits} digits after the point")},
    ),
    "summarize_numbers": Phrases(
        plain=_wording("summarise | compute a statistic of | give a summary of | find the summary statistic for",
                       "the numbers {numbers} | the scores {numbers} | the readings {numbers} | the prices {numbers}"),
        oblique=_wording("boil down | condense | characterise | describe",
                         "the scores {numbers} | the readings {numbers} | the prices {numbers} | the ages {numbers}"),
        cues={"statistic": _cues(
            mean="as their mean | as an average",
            median="as their median | by the one in the middle",
            deviation="as their standard deviation | by how widely they scatter",
            range="by their range | by the gap between lowest and highest",
        )},
    ),
    "percentage": Phrases(
        plain=_wording("work out the percentage for | give me the percentage from | find a percentage from | "
                       "express {object} as a percentage", _PLAIN_PAIRS + " | the amounts {number} and {other_number}"),
        oblique=_wording("relate | put {object} in proportion | compare {object} on a scale up to a hundred | "
                         "tell me the relative size of", _OBLIQUE_PAIRS),
        cues={"kind": _cues(
            share="taking the first as part of the second | with the second as the whole",
            change="as growth from the first to the second | with the first as the starting point",
        )},
    ),
    "factor_number": Phrases(
        plain=_wording("factor | split {object} into primes | find the prime factors of | give the factors of",
                       "the number {number} | the whole number {number} | {number} | the figure {number}"),
        oblique=_wording("decompose | break {object} down | take {object} apart | write {object} as a product",
                         "{number} | the figure {number} | the integer {number} | the value {number}"),
        cues={"repeated": _cues(
            true="with repeats | as often as each occurs",
            false="without repeats | listing each only once",
        )},
    ),
    # --- dates
    "shift_date": Phrases(
        plain=_wording("move {object} by {number} {unit} | shift {object} by {number} {unit} | "
                       "do a shift of {object} by {number} {unit} | make {object} move by {number} {unit}", _DATES),
        oblique=_wording("push {object} by {number} {unit} | reschedule {object} by {number} {unit} | "
                         "slide {object} by {number} {unit} | jump {number} {unit} away from", _OBLIQUE_DATES),
        cues={
            "unit": _cues(days="days | calendar days", weeks="weeks | full weeks", months="months | calendar months",
                          years="years | full years"),
            "direction": _cues(later="forwards | into the future", earlier="backwards | into the past"),
        },
    ),
    "date_difference": Phrases(
        plain=_wording("measure how far apart {object} are | give the difference between | "
                       "tell me how far apart {object} lie | find the difference of",
                       "the dates {date} and {other_date} | the two dates {date} and {other_date} | "
                       "the deadlines {date} and {other_date} | the birthdays {date} and {other_date}"),
        oblique=_wording("compute the interval between | say how long I wait between | work out the gap between | "
                         "count the span between", "{date} and {other_date} | the deadlines {date} and {other_date} | "
                         "the birthdays {date} and {other_date} | the invoices of {date} and {other_date}"),
        cues={"unit": _cues(days="in days | as a count of days", weeks="in weeks | as a count of weeks",
                             months="in months | as a count of months")},
    ),
    "weekday_of": Phrases(
        plain=_wording("name the weekday of | give me the weekday of | find the weekday for | look up the weekday of", _DATES),
        oblique=_wording("tell me which of the seven days {object} falls on | check what kind of day {object} is | "
                         "look up in the calendar which day {object} is | say if {object} falls on a Monday or another day",
                         _OBLIQUE_DATES),
        cues={"form": _cues(
            full="in full | spelled out",
            short="abbreviated | in three letters",
            digit="as a digit | counting from Monday as one",
        )},
    ),
    "format_date": Phrases(
        plain=_wording("format | write {object} in another notation | change the notation of | give {object} another format",
                       _DATES),
        oblique=_wording("print | render | spell | display", _OBLIQUE_DATES),
        cues={"style": _cues(
            american="the American way | month first, with slashes",
            european="the European way | day first, with dots",
            long="with the month spelled out | the long way",
            compact="as eight digits | without any separators",
        )},
    ),
    "closest_workday": Phrases(
        plain=_wording("find the closest {workday} to | look for the {workday} closest to | give me the closest {workday} to | "
                       "find the {workday} that is the closest workday to", _DATES),
        oblique=_wording("pick a {workday} near | choose the {workday} beside | tell me when it is {workday} around | "
                         "schedule a {workday} near", _OBLIQUE_DATES),
        cues={
            "workday": _cues(monday="Monday", tuesday="Tuesday", wednesday="Wednesday", thursday="Thursday",
                             friday="Friday"),
            "direction": _cues(after="after it | looking ahead", before="before it | looking back"),
        },
    ),
    "period_edge": Phrases(
        plain=_wording("find the edge, the {edge} of the {period}, for | "
                       "find the {edge} of the {period} in which {object} lies | "
                       "give the {edge} as the edge of the {period} of | look up the {edge} of the period, a {period}, around",
                       _DATES),
        oblique=_wording("tell me the {edge} of the {period} that contains | say which is the {edge} of the {period} around | "
                         "go to the {edge} of the {period} with | jump from {object} to the {edge} of its {period}",
                         _OBLIQUE_DATES),
        cues={
            "period": _cues(month="month | calendar month", quarter="quarter | business quarter", year="year | calendar year"),
            "edge": _cues(first="first day | opening day", last="last day | closing day"),
        },
    ),
    # --- conversion
    "convert_length": Phrases(
        plain=_wording("convert {object} to {to_unit} | make a conversion of {object} to {to_unit} | "
                       "change the unit of {object} to {to_unit} | find the conversion of {object} to {to_unit}",
                       "a length of {number} {from_unit} | {number} {from_unit} | a height of {number} {from_unit} | "
                       "a distance of {number} {from_unit}"),
        oblique=_wording("express {object} in {to_unit} | tell me what {object} is in {to_unit} | "
                         "restate {object} in {to_unit} | state {object} in {to_unit}",
                         "{number} {from_unit} | a height of {number} {from_unit} | a distance of {number} {from_unit} | "
                         "a rope of {number} {from_unit}"),
        cues=_units(_METRES),
        extras={"digits": _DIGITS},
    ),
    "convert_weight": Phrases(
        plain=_wording("convert {object} to {to_unit} | make a conversion of {object} to {to_unit} | "
                       "change the unit of {object} to {to_unit} | find the conversion of {object} to {to_unit}",
                       "a weight of {number} {from_unit} | {number} {from_unit} | a load of {number} {from_unit} | "
                       "a mass of {number} {from_unit}"),
        oblique=_wording("express {object} in {to_unit} | tell me what {object} is in {to_unit} | "
                         "restate {object} in {to_unit} | state {object} in {to_unit}",
                         "{number} {from_unit} | a load of {number} {from_unit} | a mass of {number} {from_unit} | "
                         "a parcel of {number} {from_unit}"),
        cues=_units(_GRAMS),
        extras={"digits": _DIGITS},
    ),
    "convert_temperature": Phrases(
        plain=_wording("convert {object} to {to_unit} | make a conversion of {object} to {to_unit} | "
                       "change the scale of {object} to {to_unit} | find the conversion of {object} to {to_unit}",
                       "a temperature of {number} {from_unit} | {number} {from_unit} | water at {number} {from_unit} | "
                       "an oven at {number} {from_unit}"),
        oblique=_wording("express {object} in {to_unit} | tell me what {object} is in {to_unit} | "
                         "restate {object} in {to_unit} | state {object} in {to_unit}",
                         "{number} {from_unit} | water at {number} {from_unit} | an oven at {number} {from_unit} | "
                         "a room at {number} {from_unit}"),
        cues=_units(_DEGREES),
        extras={"digits": _DIGITS},
    ),
    "convert_duration": Phrases(
        plain=_wording("convert {object} to {to_unit} | make a conversion of {object} to {to_unit} | "
                       "change the unit of {object} to {to_unit} | find the conversion of {object} to {to_unit}",
                       "a duration of {number} {from_unit} | {number} {from_unit} | a trip of {number} {from_unit} | "
                       "a break of {number} {from_unit}"),
        oblique=_wording("express {object} in {to_unit} | tell me what {object} is in {to_unit} | "
                         "restate {object} in {to_unit} | state {object} in {to_unit}",
                         "{number} {from_unit} | a trip of {number} {from_unit} | a break of {number} {from_unit} | "
                         "a film of {number} {from_unit}"),
        cues=_units(_SECONDS),
        extras={"digits": _DIGITS},
    ),
    "number_base": Phrases(
        plain=_wording("write {object} in another base | change the base of | give {object} in another base | "
                       "do a change of base on",
                       "the number {number} | the integer {number} | {number} | the value {number}"),
        oblique=_wording("represent | restate | show {object} the way a computer does | express",
                         "the integer {number} | {number} | the value {number} | the quantity {number}"),
        cues={
            "base": _cues(binary="in binary | with zeros and ones alone", octal="in octal | with digits up to seven",
                          hexadecimal="in hexadecimal | with digits up to F"),
            "prefix": _cues(true="with a prefix | marked as in source code", false="without a prefix | bare"),
        },
    ),
    "roman_numeral": Phrases(
        plain=_wording("write {object} as a Roman numeral | turn {object} into a Roman numeral | give the Roman numeral for | "
                       "write the Roman numeral of",
                       "the number {number} | the year number {number} | the chapter number {number} | "
                       "the page number {number}"),
        oblique=_wording("put {object} the way the Caesars did | engrave {object} as on a monument | "
                         "show {object} as on an old clock | style {object} as after the name of a king",
                         "{number} | the year {number} | the chapter {number} | the page {number}"),
        cues={"letters": _cues(capital="in capitals | in big letters", small="in small letters | without capitals")},
    ),
    # --- lists
    "sort_items": Phrases(
        plain=_wording("sort | bring {object} into sorted form | do a sort of | give me a sorted version of", _LISTS),
        oblique=_wording("arrange | order | rank | put {object} in sequence", _OBLIQUE_LISTS),
        cues={
            "key": _cues(alphabet="alphabetically | by the alphabet", length="by length | by how long they are"),
            "order": _cues(ascending="going up | upwards", descending="going down | downwards"),
        },
    ),
    "unique_items": Phrases(
        plain=_wording("drop the duplicates from | make {object} unique | find the unique ones in | "
                       "remove the duplicates from", _LISTS),
        oblique=_wording("weed out the repeats in | clear {object} of repetitions | throw away what comes twice in | "
                         "show each different one of", _OBLIQUE_LISTS),
        cues={"ignore_case": _cues(
            true="treating capitals like small letters | whatever the capitals",
            false="minding the capitals | telling capitals from small letters",
        )},
    ),
    "chunk_items": Phrases(
        plain=_wording("split {object} into groups of {number} | split {object} into chunks of {number} | "
                       "chunk {object} by {number} | make groups of {number} from", _LISTS),
        oblique=_wording("cut {object} into batches of {number} | portion {object} out by {number} | "
                         "divide {object} into teams of {number} | hand out {object} in lots of {number}", _OBLIQUE_LISTS),
        cues={"rest": _cues(
            keep="with a shorter last one if need be | keeping the remainder",
            drop="leaving out an incomplete last one | without the remainder",
        )},
    ),
    "join_items": Phrases(
        plain=_wording("join | join up | make one string of | join {object} to one string",
                       "the items {items} | the names {items} | the entries {items} | the labels {items}"),
        oblique=_wording("glue {object} together | chain | stick {object} together | concatenate", _OBLIQUE_LISTS),
        cues={
            "separator": _cues(comma="with commas | comma by comma", semicolon="with semicolons | semicolon by semicolon",
                               dash="with dashes | with hyphens", slash="with slashes | with strokes"),
            "quotes": _cues(single="each in single quotes | each in apostrophes",
                            double="each in double quotes | each in double quotation marks"),
        },
    ),
    "pick_items": Phrases(
        plain=_wording("take {number} of | pick {number} of | take {number} items out of | pick {number} items from", _LISTS),
        oblique=_wording("select {number} of | give me {number} of | keep just {number} of | choose {number} of",
                         _OBLIQUE_LISTS),
        cues={"end": _cues(
            front="at the front | starting from the beginning",
            back="at the back | starting from the tail",
        )},
    ),
    "combine_lists": Phrases(
        plain=_wording("combine | combine {object} as sets | do a combination of | treat {object} as sets",
                       "the lists {items} and {other_items} | the two lists {items} and {other_items} | "
                       "the sets {items} and {other_items}"),
        oblique=_wording("compare | hold {object} against each other | match up | cross",
                         "the entries {items} and the entries {other_items} | the names {items} and the names {other_items} | "
                         "the choices {items} and the choices {other_items}"),
        cues={"operation": _cues(
            union="uniting them | everything that is in either",
            intersection="only what both have | only the overlap",
            difference="only what the second lacks | without what is in the second",
        )},
    ),
    # --- files
    "read_lines": Phrases(
        plain=_wording("read {number} lines of | read out {number} lines from | give me {number} lines of | "
                       "read me {number} lines of", _FILES),
        oblique=_wording("show me {number} rows of | print {number} rows of | preview {number} rows of | "
                         "peek at {number} rows of", _OBLIQUE_FILES),
        cues={"part": _cues(head="at the top | from the beginning", tail="at the bottom | from the tail")},
    ),
    "file_size": Phrases(
        plain=_wording("report the size of | tell me the size of | find the size of | give me the size of", _FILES),
        oblique=_wording("tell me how big {object} is | say how much space {object} takes | check how heavy {object} is | "
                         "measure", _OBLIQUE_FILES),
        cues={"unit": _cues(bytes="in bytes | counted in bytes", kilobytes="in kilobytes | in kB",
                            lines="in lines | counted in lines")},
    ),
    "list_files": Phrases(
        plain=_wording("list the files in | list what is in | give me a listing of | list all of",
                       "the folder {path} | {path} | the directory {path} | the archive {path}"),
        oblique=_wording("show what is in | look into | tell me what lies in | display the contents of",
                         "{path} | the directory {path} | the archive {path} | the place {path}"),
        cues={
            "order": _cues(name="by name | alphabetically", size="by size | the biggest first"),
            "kind": _cues(text="only texts | nothing but plain text", table="only tables | nothing but spreadsheets"),
        },
    ),
    "search_file": Phrases(
        plain=_wording("search {object} for {text} | search for {text} in | do a search for {text} in | "
                       "run a search of {object} for {text}", _FILES),
        oblique=_wording("find {text} in | look for {text} in | tell me where {text} occurs in | locate {text} in",
                         _OBLIQUE_FILES),
        cues={"ignore_case": _cues(
            true="treating capitals like small letters | whatever the capitals",
            false="minding the capitals | telling capitals from small letters",
        )},
    ),
    "csv_column": Phrases(
        plain=_wording("evaluate {column} in | evaluate the column {column} of | run through the column {column} of | "
                       "do an evaluation of {column} in",
                       "the table {path} | {path} | the spreadsheet {path} | the data in {path}"),
        oblique=_wording("aggregate {column} in | condense {column} in | crunch {column} in | boil down {column} in",
                         "{path} | the spreadsheet {path} | the data in {path} | the sheet {path}"),
        cues={"statistic": _cues(
            sum="as a sum | adding everything up",
            mean="as a mean | as an average",
            max="at its highest | as a maximum",
            min="at its lowest | as a minimum",
        )},
    ),
    "file_checksum": Phrases(
        plain=_wording("compute the checksum of | give me the checksum of | find the checksum of | do a checksum of", _FILES),
        oblique=_wording("fingerprint | hash | take a digest of | make a signature for", _OBLIQUE_FILES),
        cues={"algorithm": _cues(
            crc32="by CRC-32 | with the CRC-32 code",
            md5="by MD5 | with the MD5 algorithm",
            sha256="by SHA-256 | with the SHA-256 algorithm",
        )},
    ),
}  # fmt: skip
"""Phrases by tool."""
