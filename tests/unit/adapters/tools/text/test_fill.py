"""Values in a request: they go to the parameter that they fit, and are evidence for the tools that take them."""

import copy
import datetime
import pickle
from types import SimpleNamespace
from typing import Any, Literal

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.tools import Tool, ToolCatalogue, ToolSelectionPolicy, ToolTask
from adapters.tools.text.evidence import Evidence
from adapters.tools.text.fill import MAX_CHARACTERS, fill_from_request
from tests.support.tool_policies import policy

NUMBER, INTEGER, TEXT = {"type": "number"}, {"type": "integer"}, {"type": "string"}
NUMBERS, TEXTS = {"type": "array", "items": NUMBER}, {"type": "array", "items": TEXT}


def tool(required: str = "", description: str = "Do it.", **schemas: Any) -> Tool:
    parameters = {"type": "object", "properties": schemas, "required": required.split()}
    return Tool(name="f", description=description, function=print, parameters=parameters)


def read(text: str, schema: dict[str, Any], name: str = "x") -> Any:
    """The value of the only parameter, which is required."""
    return fill_from_request(text, tool(name, **{name: schema})).get(name)


@pytest.mark.parametrize(("text", "number"), [
    ("it is 3", 3.0), ("-2.5 it is", -2.5), ("pay $1,000.50 now", 1000.5), ("a 2.5 million loan", 2_500_000.0),
    ("$1.2M", 1_200_000.0), ("about 5k", 5000.0), ("9 billion of them", 9e9), ("at 40%", 0.4), (".5 l", 0.5),
    ("6cm wide", 6.0), ("€7", 7.0), ("nothing", None), ("\u22124 degrees", -4.0), ("one of 9", 9.0), ("Twelve", 12.0),
    ("298K", 298.0), ("123,456,789", 123_456_789.0), ("two", 2.0), ("3 thousand", 3000.0), ("2-bedroom flat", 2.0),
])  # fmt: skip
def test_numbers_are_read_as_people_write_them(text: str, number: float | None) -> None:
    assert read(text, NUMBER) == number


def test_a_number_has_the_type_and_the_bounds_of_the_schema() -> None:
    for text, schema, number in (
        ("3 or 4", NUMBER, 3.0), ("2.5 of 4.0", INTEGER, 4), ("1, 50 or 7", INTEGER | {"minimum": 5, "maximum": 10}, 7),
        ("1 and 2", NUMBER | {"exclusiveMinimum": 1}, 2.0), ("999", INTEGER | {"maximum": 10}, None),
        ("at 40%", NUMBER | {"description": "Share in percent."}, 40.0), ("at 40%", INTEGER, 40),
        # only the first characters are read
        ("." * (MAX_CHARACTERS - 2) + " 3", INTEGER, 3), ("." * (MAX_CHARACTERS - 1) + " 3", INTEGER, None),
    ):  # fmt: skip
        assert repr(read(text, schema)) == repr(number)


@pytest.mark.parametrize("text", [
    "on 2023-05-02", "2023/5/2", "2023.05.02", "05/02/2023", "May 2nd, 2023", "may 2 2023", "2 May 2023",
    "2nd of May, 2023", "the 2nd of may 2023?", "13 people on 05-02-2023",
])  # fmt: skip
def test_dates_are_read_in_the_usual_forms_and_written_as_the_schema_asks(text: str) -> None:
    assert read(text, TEXT | {"format": "date"}) == "2023-05-02"
    assert read(text, TEXT | {"description": "Day as MM/DD/YYYY."}) == "05/02/2023"


def test_a_date_is_written_as_the_description_and_the_request_say() -> None:
    iso = TEXT | {"format": "date"}
    for text, schema, date in (
        ("12/1/2024", iso, "2024-12-01"), ("1/32/2024", iso, None), ("99/99/2023", iso, None),
        ("May 2nd 2021", TEXT | {"description": "Such as '2021-12-31', as DD.MM.YYYY"}, "02.05.2021"),
        ("May 2nd, this year is 2019", iso, "2019-05-02"), ("May 2nd", iso, None),  # of which year?
    ):  # fmt: skip
        assert read(text, schema) == date
    both = tool("start_date end_date", start_date=iso, end_date=iso)
    filled = fill_from_request("from April 3rd to April 5th 2023", both)
    assert filled == {"start_date": "2023-04-03", "end_date": "2023-04-05"}


def test_times_are_read_as_the_request_has_them() -> None:
    times = {"7:30": "7:30", "at 7:30 pm": "7:30 pm", "2pm sharp": "2pm", "at 10:00:05": "10:00:05"}
    assert {text: read(text, TEXT, "time") for text in times} == times
    assert read("at 7:30 for 2 people", INTEGER) == 2


@pytest.mark.parametrize(("text", "name", "value"), [
    ("play 'Toy Story 4' now", "title", "Toy Story 4"), ('say "it\'s on" please', "message", "it's on"),
    ("write to bob.smith@x.org today", "email", "bob.smith@x.org"), ("open https://x.org/a?b=1.", "url", "https://x.org/a?b=1"),
    ("read /tmp/notes.txt", "path", "/tmp/notes.txt"), ("read the report.pdf", "file", "report.pdf"),
    ("on rds.example.org", "host", "rds.example.org"), ("weather in New York City", "place", "New York City"),
    ("show Leonardo da Vinci's works", "artist", "Leonardo da Vinci"),
    ("my user ID is U123456", "user_id", "U123456"), ("Web ID 0012345", "id", "0012345"), ("release 1.2.3", "version", "1.2.3"),
    ("call 555-123-4567", "phone", "555-123-4567"), ("Compose for Rome", "x", "Rome"), ("in Benicia, CA.", "x", "Benicia"),
    ("Find vegan brownies", "dish", "vegan brownies"), ("I've seen Paris", "city", "Paris"),
])  # fmt: skip
def test_texts_are_read_by_their_kind(text: str, name: str, value: str) -> None:
    assert read(text, TEXT, name) == value


def test_a_name_has_commas_where_the_descriptions_example_has_them() -> None:
    state = TEXT | {"description": "The city, e.g. Seattle, Washington"}
    examples = TEXT | {"description": "Such as 'New York, NY' or 'Berkeley, CA'."}
    for text, schema, name in (
        ("weather in Portland, Oregon today", state, "Portland, Oregon"), ("see Portland, Oregon today", TEXT, "Portland"),
        ("weather in Seattle", state, "Seattle, Washington"), ("a spa in Berkeley", examples, "Berkeley, CA"),
        ("from Portland near Salem", state, "Portland"), ("of s", TEXT | {"description": "'S' or 'M'"}, "S"),
    ):  # fmt: skip
        assert read(text, schema) == name


def test_lists_are_values_with_commas_or_and_between_them_and_objects_are_left_out() -> None:
    whole, nested = {"type": "array", "items": INTEGER}, {"type": "array", "items": NUMBERS}
    for text, schema, values in (
        ("sort [3, 1, 2] up", NUMBERS, [3.0, 1.0, 2.0]), ("sort 3, 1 and -2.5", NUMBERS, [3.0, 1.0, -2.5]),
        ("5 times 2, 4", whole, [2, 4]), ("get milk, brown bread and eggs", TEXTS, ["milk", "brown bread", "eggs"]),
        ("for 'a b', 'c' or 'd'", TEXTS, ["a b", "c", "d"]), ("only Paris", TEXTS, ["Paris"]),
        ("the matrix [[1, 2], [3, 4]]", nested, None), ("take 1, 2", whole | {"minItems": 3}, None),
        ("[[1, 'a'], {]", nested, None), ("with {'a': 1, \"b\": [2]}", {"type": "object"}, None),
        ("with {'a': 1}", {"type": ["null", "object"]}, None),
    ):  # fmt: skip
        assert read(text, schema) == values


def test_values_go_to_the_parameters_whose_names_stand_next_to_them() -> None:
    area = tool("base height", base=INTEGER, height=INTEGER)
    rooms = tool("numBeds numBaths", numBeds=INTEGER, numBaths=INTEGER)
    trip = tool("origin destination", origin=TEXT, destination=TEXT)
    play, mixed = tool("game league", game=TEXT, league=TEXT), tool("id name", id=TEXT, name=TEXT)
    for text, asked, filled in (
        ("with height 4 and a base of 9", area, {"base": 9, "height": 4}),
        ("use 4 and 9", area, {"base": 4, "height": 9}),  # in order where no word decides
        ("2 baths, 3 beds", rooms, {"numBeds": 3, "numBaths": 2}),
        ("fly to Rome from Oslo", trip, {"origin": "Oslo", "destination": "Rome"}),
        # a preposition counts less than the name
        ("a destination in Rome, to Oslo origin", trip, {"origin": "Oslo", "destination": "Rome"}),
        ("who leads the Premier League in 'Chess'", play, {"game": "Chess", "league": "Premier League"}),
        ("set Bob 77", mixed, {"id": "77", "name": "Bob"}),
    ):
        assert fill_from_request(text, asked) == filled
    assert read("maybe I'm with Ann", TEXT) == "Ann"


def test_the_tools_own_words_are_seldom_values() -> None:
    """`recipe` and `search` describe the tool, so the phrase between them is the dish."""
    cook = tool("dish", description="Search for a recipe.", dish=TEXT)
    assert fill_from_request("A recipe soup recipe", cook) == {"dish": "soup"}
    assert fill_from_request("the Recipe for Goulash", cook) == {"dish": "Goulash"}


def test_an_optional_parameter_needs_a_word_of_its_name_next_to_the_value() -> None:
    shop = tool("item", item=TEXT, color=TEXT, quantity=INTEGER, day=TEXT | {"format": "date"})
    assert fill_from_request("buy 'shoes' for 90 on 2024-05-06", shop) == {"item": "shoes", "day": "2024-05-06"}
    assert fill_from_request("'shoes', quantity 2", shop) == {"item": "shoes", "quantity": 2}
    twice = "'shoes', a quantity at a quantity 2"  # 1 for the nearer word, not 1/4 for the other one
    assert fill_from_request(twice, shop) == {"item": "shoes", "quantity": 2}
    far = "'shoes' with a quantity that is most certainly larger still than 2"
    assert fill_from_request(far, shop) == {"item": "shoes"}


def test_parameters_that_the_policy_decides_and_defaults_are_left_alone() -> None:
    with_default = {"type": "integer", "default": 7}
    decided = tool("a b c d", a={"enum": ["x", "y"]}, b={"type": "boolean"}, c={"const": 3}, d=with_default)
    assert fill_from_request("x true 3", decided) == {"d": 3}
    assert fill_from_request("x true", decided) == {}


def test_a_value_that_may_be_null_is_filled_and_of_a_union_the_first_type() -> None:
    null, unknown = {"type": "null"}, {"$ref": "#/$defs/a"}
    for text, schema, value in (
        ("it is 3", {"anyOf": [INTEGER, null], "default": None}, 3), ("it is 3", {"type": ["null", "integer"]}, 3),
        ("it is 3", {"type": ["integer", "null"]}, 3), ("it is 3", {"anyOf": [INTEGER, TEXT]}, 3),
        ("it is 3", {"anyOf": [INTEGER, TEXT, null]}, 3), ("it is 3", {"type": ["string", "integer"]}, "3"),
        ("it is 3", {"type": ["null"]}, None), ("it is 3", unknown, None), ("see Rome", {}, "Rome"),
        ("it is [[3]]", {"type": "array", "items": unknown}, None),
        ("ask Ann, Bob", {"type": "array", "items": True}, ["Ann", "Bob"]),
    ):  # fmt: skip
        assert read(text, schema) == value
    assert fill_from_request("it is 3", tool("x", x={"not": TEXT})) == {}, "null is no value of the request"
    assert fill_from_request("ask Ann, Bob", tool("x", x={"type": "array", "items": null})) == {}


def test_a_task_gives_its_slots_and_other_states_their_text() -> None:
    count = tool("x", x=INTEGER)
    assert fill_from_request(ToolTask(text="it is 3", tool="f", slots={"x": 5, "y": 1}), count) == {"x": 5, "y": 1}
    assert fill_from_request(ToolTask(text="it is 3", tool="f"), count) == {"x": 3}
    assert fill_from_request(SimpleNamespace(text="it is 3"), count) == {"x": 3}
    assert fill_from_request(3, count) == fill_from_request(SimpleNamespace(text=3), count) == {}


SCHEMAS = st.fixed_dictionaries(
    {},
    optional={
        "seats": st.sampled_from([INTEGER, INTEGER | {"minimum": 2}, {"type": ["integer", "null"]}]),
        "share": st.sampled_from([NUMBER, NUMBER | {"maximum": 1}]),
        "date": st.sampled_from([TEXT, TEXT | {"pattern": "^[0-9-]+$"}, TEXT | {"description": "YYYY-MM-DD HH:mm:ss"}]),
        "city": st.just(TEXT | {"description": "e.g. Seattle, WA"}),
        "user_id": st.sampled_from([TEXT, TEXT | {"maxLength": 4}, {}]),
        "numbers": st.sampled_from([NUMBERS, NUMBERS | {"minItems": 2}]),
        "names": st.sampled_from([TEXTS, {"type": "array"}, {"type": "array", "items": True}]),
        "any": st.sampled_from([{"type": ["integer", "string"]}, {"minLength": 2}, {"type": "null"}]),
        "person": st.just({"type": "object", "properties": {"time": TEXT, "age": INTEGER}, "required": ["age"]}),
        "data": st.just({"type": "object"}),
    },
)
PIECES = st.sampled_from(
    ["3", "-4.5", "1,000", "40%", "two", "May 5th", "2023-02-30", "7:30 pm", "'a b'", "Rome", "Seattle", ", ", " and ", "of",
     "[[1]]", "{'a': 1}", "[1, 2]", "seats", "share", "age", "a@b.co", "x^2", "U12", "é", "0/0", "1e400", "one hundred",
     "\n", "."]
)  # fmt: skip
REQUESTS = st.one_of(st.text(max_size=60), st.lists(PIECES, max_size=12).map(" ".join))


@settings(max_examples=100)
@given(text=REQUESTS, schemas=SCHEMAS, data=st.data())
def test_any_request_gives_values_that_schemas_allow(text: str, schemas: dict[str, Any], data: st.DataObject) -> None:
    required = data.draw(st.sets(st.sampled_from(sorted(schemas)))) if schemas else set()
    filled = fill_from_request(text, tool(" ".join(sorted(required)), **schemas))
    assert filled.keys() <= schemas.keys()
    for name, value in filled.items():
        jsonschema.validate(value, schemas[name])
    assert filled == fill_from_request(text, tool(" ".join(sorted(required)), **schemas))


@pytest.mark.parametrize(
    "piece", ["1-", "a-", "the ", "The A ", "' ", "[1", "1 ", "one ", "x^", "2020-", "A. ", "@a", "a/"]
)
def test_a_long_request_of_any_pattern_is_read(piece: str) -> None:
    """A pattern that tries exponentially many ways takes longer than a test may take."""
    fill_from_request(piece * MAX_CHARACTERS, tool("x y", x=NUMBERS, y=TEXT))


# --- evidence for tools
def play(
    artist: str, genre: Literal["Hip Hop", "hip", "jazz"], volume: int, loop: bool = False, year: int | None = None
): ...
def remind(day: datetime.date, text: str, at: Literal["in", "morning"], repeats: list[int] | None = None): ...
def scan(device: Literal["jazz drive", "morning", "new_york"], options: dict[str, str], sheets: list[int]): ...


TOOLS = [Tool.from_function(function, description="Do it.") for function in (play, remind, scan)]
OWN = ToolCatalogue(TOOLS)
EVIDENCE = Evidence(OWN)


def evidence_of(text: str) -> tuple[list[float], list[float], set[str]]:
    """`named`, `filled`, and the value texts that the request contains."""
    named, filled, contained = EVIDENCE([text])
    values = {value for value, place in OWN.value_places.items() if contained[0, place]}
    return named[0].tolist(), filled[0].tolist(), values


@pytest.mark.parametrize(("text", "named", "values"), [
    ("some jazz", [1, 0, 0], {"jazz genre"}), ("SOME JAZZ!", [1, 0, 0], {"jazz genre"}),
    ("the Jazz Drives", [1, 0, 1], {"jazz genre", "jazz drive device"}),  # a final s does not count
    ("a jazz/drive", [1, 0, 1], {"jazz genre", "jazz drive device"}),  # signs are no words
    ("jazz for the drive", [1, 0, 0], {"jazz genre"}),  # other words are
    ("hip hop", [2, 0, 0], {"Hip Hop genre", "hip genre"}),
    ("this morning, every morning", [0, 1, 1], {"morning at", "morning device"}),  # once for each value
    ("a jazzy evening in the mornings' light", [0, 1, 1], {"morning at", "morning device"}),
    ("a flight to New York", [0, 0, 1], {"new_york device"}),
    ("look in here", [0, 0, 0], set()),  # two letters are too few
    ("true or false", [0, 0, 0], set()),  # not said of a boolean
    ("", [0, 0, 0], set()), ("x " * 1990 + "jazz", [1, 0, 0], {"jazz genre"}),
    ("x " * 2000 + "jazz", [0, 0, 0], set()),  # only the start of a long request is read
])  # fmt: skip
def test_the_values_that_a_request_contains(text: str, named: list[float], values: set[str]) -> None:
    assert evidence_of(text)[::2] == (named, values)


@pytest.mark.parametrize(("text", "filled"), [
    # Free: play takes a text and a number (required) and a number; remind a date and a text (required) and numbers; scan
    # numbers (required, a list), and an object that is of no kind.
    ("please", [-2, -2, -1]),
    ("3", [1 - 1, 1 - 2, 1]),  # play lacks the text; remind lacks date and text, but takes the number
    ("3 and 4", [2 - 1, 1 - 2, 1]),
    ("3 and 4 and 5", [2 - 1, 1 - 2, 1]),  # no parameter is left for the third
    ("'so what' 3", [1 + 1, 1 + 1 - 1, 1]), ("'so what' on 2027-05-05", [1 - 1, 2, -1]),
    ("'so what' on 2027-05-05 at 12:30", [1 - 1, 2, -1]),  # a time is a text
    ("mail it to a@b.org", [1 - 1, 1 - 1, -1]),  # and so is an address
])  # fmt: skip
def test_parameters_that_the_values_of_a_request_fill(text: str, filled: list[float]) -> None:
    assert evidence_of(text)[1] == filled


def test_each_request_is_read_alone_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    evidence, texts = Evidence(OWN), ["some jazz", "3 and 4", "hip hop in the morning"]
    together = evidence(texts)
    monkeypatch.setattr(evidence, "_readings", None)
    for row, text in enumerate(texts):
        for part, alone in zip(together, evidence([text]), strict=True):
            assert torch.equal(part[row], alone[0])
    assert [part.shape for part in evidence([])] == [(0, 3), (0, 3), (0, len(OWN.value_places))]


def test_added_and_removed_tools_change_the_evidence_which_can_be_copied_and_pickled() -> None:
    made = ToolSelectionPolicy(ToolCatalogue(TOOLS[:1]))
    made.add_tools(*TOOLS[1:])
    assert made.menu.evidence(["the morning"])[0].tolist() == [[0, 1, 1]]
    made.remove_tools("remind")
    for menu in (made.menu, copy.deepcopy(made.menu), pickle.loads(pickle.dumps(made.menu))):
        assert menu.evidence(["the morning"])[0].tolist() == [[0, 1]]


def test_the_evidence_is_added_in_float32_at_least() -> None:
    """In bfloat16, 2 + 0.6 would be 2.59375."""
    assert policy(num_features=3).network.evidence is None, "vectors have no values"
    made = policy(random=False).to(torch.bfloat16)
    with torch.no_grad():
        made.network.similarity.zero_()
    logits, _ = made._logits(["two miles"])
    assert logits.tolist() == [[0, 0, 2 + 4 * made.network.evidence[1].item(), 0]]
