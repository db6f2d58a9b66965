"""Values of a call's free parameters, read from the request without a model."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import jsonschema

from adapters.tools.catalogue.tools import Tool

from .encoders import STOP_WORDS
from .request_values import DATE_EXAMPLE, DATE_FORMAT, Found, Kind, find_values, written_date

_FITS: Mapping[Kind, float] = {"quoted": 3, "address": 2, "name": 2, "code": 1.5, "phrase": 0, "number": -1}
"""How well each kind of value fits a text. A word of the parameter's name next to the value counts 2."""
_CODE_FITS: Mapping[Kind, float] = {"code": 4, "quoted": 3, "number": 3, "name": 0, "address": 0, "phrase": -2}
"""How well each kind of value fits an identifier."""
MAX_CHARACTERS = 4_000
"""Characters of a request that are read."""
_NAMED, _HINTED, _IS_NEAR = 2.0, 0.3, 0.25
_NUM_BEFORE, _NUM_AFTER, _MAX_STEM = 4, 3, 5

_PREPOSITIONS = {
    "from": "start origin departure source begin initial min", "to": "end destination arrival target final max stop",
    "in": "location city place country state area region language currency", "near": "location city place area",
    "at": "location place venue time", "by": "author artist director", "on": "date day", "until": "end",
    "between": "start min from", "least": "min", "above": "min", "over": "min", "under": "max", "below": "max",
    "within": "max distance radius", "with": "name", "of": "name", "around": "location",
}  # fmt: skip
"""Words in the names of parameters whose values often stand after a preposition."""

_NOT_A_STEM = STOP_WORDS - set(_PREPOSITIONS)
_CODE_STEMS = {"cik", "code", "id", "ident", "key", "no", "numbe", "passw", "phone", "token", "uuid", "versi", "zip"}
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_CLAUSE_END = re.compile(r"[.?!;,]\s|\sand\s")
_AND = re.compile(r"\s*(?:,|;|&|,?\s*\b(?:and|or)\b)(?:\s*also)?\s*")
_EXAMPLES = re.compile(
    r"""(?<!\w)['"]([^'"]{1,60})['"](?!\w)|(?:e\.g\.|such as|for example|like)[,:]? ([^.;)('"]{1,60})""", re.IGNORECASE
)
_NEXT_EXAMPLE = re.compile(r",\s(?![A-Z]{2}\b)(?:or |and )?| or | and ")  # not within "Seattle, WA"
_TIME_FORMAT, _PERCENT = re.compile(r"hh:mm|\b\d\d:\d\d"), re.compile(r"percent|%")
_UNCHECKED = {"type", "title", "description", "default", "examples", "format"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parameter:
    """A parameter to fill: one of the tool's, or a property of one that is an object."""

    path: tuple[str, ...]
    schema: Mapping[str, Any]
    required: bool
    names: frozenset[str]
    """Stems of the words of its name."""
    described: frozenset[str]
    """Stems of the words of its description."""
    about: str
    """Name and description in lower case."""
    examples: tuple[str, ...]
    """Values that the description names."""

    @property
    def wants_date(self) -> bool:
        """Whether its values are dates."""
        is_date = self.schema.get("format") in ("date", "date-time") or "date" in self.names
        return is_date or (DATE_FORMAT.search(self.about) or DATE_EXAMPLE.search(self.about)) is not None


class _Match(NamedTuple):
    """A value for a parameter."""

    score: float
    parameter: int
    value: Any
    used: range
    """The found values that it consists of. No other parameter gets them."""


def fill_from_request(state: Any, tool: Tool) -> dict[str, Any]:
    """Values of the parameters that the policy does not decide, read from the request.

    The slots of a task are returned as they are. From other requests the values are read: numbers, dates, times, quoted text,
    addresses, names, identifiers, and lists of them. A parameter gets a value of its schema's type: the kind that fits best,
    preferably next to a word of the parameter's name. An optional parameter only gets a value that is next to a word of its
    name, or a date or time. A parameter without such a value is left out. Defaults are not filled in. The words are English.

    Args:
        state: A `ToolTask`, a text, or a state with the text as its attribute `text`. Other states give no values.
        tool: The tool whose parameters are filled.

    Returns:
        Values by parameter name. Each value is valid under its parameter's schema.

    Example:
        >>> properties = {"day": {"type": "string", "format": "date"}, "seats": {"type": "integer"}}
        >>> schema = {"type": "object", "properties": properties}
        >>> tool = Tool(name="book", description="Book a table.", function=print, parameters=schema)
        >>> fill_from_request("Book a table with four seats on May 5th, 2027.", tool)
        {'day': '2027-05-05', 'seats': 4}
    """
    slots = getattr(state, "slots", None)
    if slots:
        return dict(slots)
    text = state if isinstance(state, str) else getattr(state, "text", None)
    if not isinstance(text, str):
        return {}
    text = text[:MAX_CHARACTERS]
    free = frozenset(tool.free_parameters)
    schemas = {name: schema for name, schema in tool.properties.items() if name in free}
    parameters = list(_parameters(schemas, tool.parameters.get("required", ())))
    own = _stems(" ".join((tool.text, *tool.properties)))
    found = [_trimmed(value, own) if value.kind == "phrase" else value for value in find_values(text)]
    filled = _assigned(parameters, _matches(parameters, found, text, own))
    return {name: value for name, value in filled.items() if _is_valid(tool.properties[name], value)}


def _parameters(
    schemas: Mapping[str, Any], required: Sequence[str], path: tuple[str, ...] = (), is_required: bool = True
) -> Iterator[_Parameter]:
    """The parameters that are not enumerated. The properties of an object take its place, one level deep."""
    for name, written in schemas.items():
        schema = _without_null(written) if isinstance(written, Mapping) else {}
        needed = is_required and name in required
        if schema.get("type") == "object" and schema.get("properties") and not path:
            yield from _parameters(schema["properties"], schema.get("required", ()), (name,), needed)
        elif not schema.keys() & {"enum", "const"}:
            names, described, about, examples = _words_about(name, str(schema.get("description", "")))
            yield _Parameter(
                path=(*path, name), schema=schema, required=needed, names=names, described=described, about=about,
                examples=examples,
            )  # fmt: skip


def _without_null(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of a value that may be null, without null."""
    branches = [one for one in schema.get("anyOf", ()) if isinstance(one, Mapping) and one.get("type") != "null"]
    if len(branches) == 1:
        schema = {**{name: value for name, value in schema.items() if name != "anyOf"}, **branches[0]}
    kinds = schema.get("type")
    if isinstance(kinds, list) and len(kinds) == 2 and "null" in kinds:
        schema = {**schema, "type": kinds[kinds[0] == "null"]}
    return schema


@lru_cache(maxsize=4096)
def _words_about(name: str, description: str) -> tuple[frozenset[str], frozenset[str], str, tuple[str, ...]]:
    found = _EXAMPLES.findall(description)
    examples = tuple(one for quoted, listed in found for one in ([quoted] if quoted else _NEXT_EXAMPLE.split(listed)))
    return _stems(name), _stems(description), f"{name} {description}".lower(), examples


def _trimmed(phrase: Found, own: frozenset[str]) -> Found:
    """A phrase without the tool's own words at its ends."""
    words = list(re.finditer(r"\S+", phrase.text))
    while len(words) > 1 and _stem(words[0][0]) in own:
        del words[0]
    while len(words) > 1 and _stem(words[-1][0]) in own:
        del words[-1]
    start, end = words[0].start(), words[-1].end()
    text = phrase.text[start:end]
    return replace(phrase, text=text, value=text, start=phrase.start + start, end=phrase.start + end)


def _matches(
    parameters: Sequence[_Parameter], found: Sequence[Found], text: str, own: frozenset[str]
) -> Iterator[_Match]:
    """All values that each parameter could have."""
    near = [_nearness(text, one) for one in found]
    for number, parameter in enumerate(parameters):
        for value, fit, used in _candidates(parameter, found, text, own):
            named = sum(near[used.start].get(stem, 0.0) for stem in parameter.names)
            if parameter.required or named > _IS_NEAR or found[used.start].kind in ("date", "time"):
                yield _Match(fit + _NAMED * named, number, value, used)


def _assigned(parameters: Sequence[_Parameter], matches: Iterable[_Match]) -> dict[str, Any]:
    """The best match first. Of equal matches, the first parameter gets the first value."""
    values: dict[tuple[str, ...], Any] = {}
    taken: set[int] = set()
    for match in sorted(matches, key=lambda one: (-one.score, one.parameter, one.used.start)):
        parameter = parameters[match.parameter]
        if parameter.path not in values and taken.isdisjoint(match.used) and _is_valid(parameter.schema, match.value):
            values[parameter.path] = match.value
            taken.update(match.used)
    filled: dict[str, Any] = {}
    for path, value in values.items():
        (filled if len(path) == 1 else filled.setdefault(path[0], {}))[path[-1]] = value
    return filled


def _is_valid(schema: Mapping[str, Any], value: Any) -> bool:
    """Whether a schema allows a value of its type. A schema with `$ref` does not: only the tool's schema resolves it."""
    if schema.keys() <= _UNCHECKED:
        return True
    return "$ref" not in str(schema) and jsonschema.Draft202012Validator(schema).is_valid(value)


def _candidates(
    parameter: _Parameter, found: Sequence[Found], text: str, own: frozenset[str]
) -> Iterator[tuple[Any, float, range]]:
    """The values that have the parameter's type, with how well each fits."""
    schema = parameter.schema
    kind, items = schema.get("type"), schema.get("items", {})
    if kind == "array" and isinstance(items, Mapping):
        for run in _lists(found, text):
            read = [value for i in run if (value := _read(items, parameter, found[i], found, own)) is not None]
            if len(read) == len(run):
                yield [item for item, _ in read], sum(fit for _, fit in read) / len(run) + 3 * (len(run) > 1), run
    for i, one in enumerate(found):
        if one.kind == "json" and isinstance(one.value, {"array": list, "object": dict}.get(str(kind), ())):
            yield one.value, 0, range(i, i + 1)
        single = _read(schema, parameter, one, found, own)
        if single is not None:
            yield *single, range(i, i + 1)
        if kind == "string" and one.kind == "name":
            yield from _joined(parameter, found, text, i)


def _lists(found: Sequence[Found], text: str) -> Iterator[range]:
    """Longest runs of values of one kind with commas or "and" between them."""
    kinds = ["text" if one.kind in ("name", "phrase", "code") else one.kind for one in found]
    start = 0
    for end in range(1, len(found) + 1):
        goes_on = end < len(found) and kinds[end] == kinds[start]
        if not (goes_on and _AND.fullmatch(text[found[end - 1].end : found[end].start])):
            yield range(start, end)
            start = end


def _joined(parameter: _Parameter, found: Sequence[Found], text: str, start: int) -> Iterator[tuple[str, float, range]]:
    """Names with commas between them, such as "Seattle, WA", if the description has an example with as many commas."""
    num_commas = max((example.count(", ") for example in parameter.examples), default=0)
    for end in range(start + 1, min(start + 1 + num_commas, len(found))):
        if found[end].kind != "name" or text[found[end - 1].end : found[end].start] != ", ":
            return
        yield text[found[start].start : found[end].end], 3 + end - start, range(start, end + 1)


def _read(
    schema: Mapping[str, Any], parameter: _Parameter, one: Found, found: Sequence[Found], own: frozenset[str]
) -> tuple[Any, float] | None:
    """A found value as the schema's type, with how well it fits. None if it is of another type."""
    kind = schema.get("type")
    if kind in ("integer", "number"):
        return _number(kind, parameter, one)
    if kind != "string" and not schema.keys() <= _UNCHECKED - {"type"}:
        return None
    if parameter.wants_date:
        written = (
            written_date(one, found, parameter.about, parameter.schema.get("format")) if one.kind == "date" else None
        )
        return None if written is None else (written, 5)
    if "time" in parameter.names and _TIME_FORMAT.search(parameter.about):
        return ("{:02d}:{:02d}".format(*one.value), 5) if one.kind == "time" else None
    if one.kind == "time":
        return (one.text, 5) if "time" in parameter.names else None
    return _text(parameter, one, own)


def _number(kind: str, parameter: _Parameter, one: Found) -> tuple[float, float] | None:
    if one.kind != "number":
        return None
    fit = -1 if one.text[0].isalpha() else 1  # "one" is often no number
    if kind == "integer":
        return (int(one.value), fit) if one.value == int(one.value) else None
    is_share = one.text.endswith(("%", "cent")) and not _PERCENT.search(parameter.about)
    return float(one.value) / (100 if is_share else 1), fit


def _text(parameter: _Parameter, one: Found, own: frozenset[str]) -> tuple[str, float] | None:
    fit = (_FITS if parameter.names.isdisjoint(_CODE_STEMS) else _CODE_FITS).get(one.kind)
    if fit is None:
        return None
    value = one.value if one.kind == "quoted" else one.text
    for example in parameter.examples:
        if f"{example.lower()},".startswith(f"{value.lower()},"):  # "Seattle" may become "Seattle, WA"
            return example, fit + 4
    if one.kind in ("name", "phrase"):
        stems = _stems(value)
        if stems <= parameter.names | parameter.described | own:
            return value, fit - 3  # the parameter's own words are seldom its value
        return value, fit + 3 * bool(stems & parameter.names)
    return value, fit


def _nearness(text: str, one: Found) -> dict[str, float]:
    """How near each stem is to a value: 1 for the word next to it, 1/2 for the second word, and so on."""
    before = _WORD.findall(_CLAUSE_END.split(text[max(0, one.start - 60) : one.start])[-1])[: -_NUM_BEFORE - 1 : -1]
    after = _WORD.findall(_CLAUSE_END.split(text[one.end : one.end + 40])[0])[:_NUM_AFTER]
    weighted = [(word, 1 / distance) for words in (before, after) for distance, word in enumerate(words, start=1)]
    hints = [_PREPOSITIONS.get(word.lower(), "").split() for word in before[:1]]
    weighted += [(hint, _HINTED) for hinted in hints for hint in hinted]
    near: dict[str, float] = {}
    for word, weight in weighted:
        near[_stem(word)] = max(near.get(_stem(word), 0.0), weight)
    return near


@lru_cache(maxsize=8192)
def _stem(word: str) -> str:
    """The first letters of a word. Empty for words without a meaning of their own."""
    return "" if word.lower() in _NOT_A_STEM else word.lower()[:_MAX_STEM].removesuffix("s")


def _stems(text: str) -> frozenset[str]:
    return frozenset(map(_stem, _WORD.findall(text))) - {""}
