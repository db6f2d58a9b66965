"""The published formats of tool calls: what a model writes where it calls tools, as names and arguments.

A format is a mark and a body. The marks say where a call begins; the body says which tool is called:

- JSON, one or several calls: `{"name": "add", "arguments": {"a": 1}}` (Hermes, Qwen, Llama, Mistral, Command R, Granite, Phi-4)
- a name, and the arguments as JSON: `add[ARGS]{"a": 1}` (Mistral, DeepSeek, Kimi K2, gpt-oss, Gemma 4)
- tags: `<function=add><parameter=a>1</parameter></function>` (Qwen3-Coder, Nemotron), `<invoke name="add">` (MiniMax), and
  `add<arg_key>a</arg_key><arg_value>1</arg_value>` (GLM)
- Python: `[add(a=1)]` (LFM2, Llama, OLMo)

What stands inside thoughts, such as `<think>...</think>`, is no call.
"""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Called: TypeAlias = tuple[str, dict[str, Any]]
"""The name of a tool, and the arguments."""
Types: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The JSON schemas of the parameters, by tool."""

THOUGHTS = {
    "<think>": "</think>", "<thinking>": "</thinking>", "<thought>": "</thought>", "<reasoning>": "</reasoning>",
    "<seed:think>": "</seed:think>", "[THINK]": "[/THINK]", "<|START_THINKING|>": "<|END_THINKING|>", "◁think▷": "◁/think▷",
    "<|channel>thought": "<channel|>", "<|channel|>analysis<|message|>": "<|end|>",
    "<|begin_of_thought|>": "<|end_of_thought|>",
}  # fmt: skip
"""Marks around what a model only thinks."""
THOUGHT = re.compile("|".join(f"{re.escape(a)}.*?(?:{re.escape(b)}|\\Z)" for a, b in THOUGHTS.items()), re.DOTALL)
OPEN = re.compile(
    r"<tool_calls?>|<TOOLCALL>|<\|tool_calls?\|?>|<\|tool_call_(?:start|begin)\|>|<\|tool_calls_section_begin\|>"
    r"|<｜tool▁calls?▁begin｜>|\[TOOL_CALLS\]|<\|python_tag\|>|<\|START_ACTION\|>|Action:\s*(?=```json)"
    r"|<\|action_start\|>\s*<\|plugin\|>|<function_?calls?>|<\|tools_prefix\|>|<(?:[\w-]+:|｜DSML｜)(?:tool|function)_calls?>"
    r"|<(?:[\w-]+:|｜DSML｜)?invoke (?=name=)|<(?=function=)"
    r"|(?:<\|start\|>assistant)?(?:<\|channel\|>\w+)?\s*to=(?=functions\.)"
)
"""Marks with which calls begin."""
FENCE = re.compile(r"\s*(?:```(?:json|tool_call|tool_code|python)?\s*)?")
HEAD = re.compile(
    r"(?:function<｜tool▁sep｜>|call:|functions\.)?([A-Za-z_][\w.-]*)(?P<id>:\d+)?"
    r"(?:\s*(?:\[CALL_ID\]\w*|\[ARGS\]|<｜tool▁sep｜>|<\|tool_call_argument_begin\|>"
    r"|<\|channel\|>\w*|<\|constrain\|>\w*|json(?=<)|<\|message\|>))*\s*(?:```json\s*)?(?=[{(<\]]|\Z)"
)
"""The name of a tool, and what stands between it and the arguments."""
INVOKE = re.compile(r"(?:<(?P<space>[\w-]+:|｜DSML｜)?invoke )?name=\"([^\"]+)\"\s*>")
TAGGED = re.compile(r"<?function=([^>\s]+?)>")
PARAMETERS = (
    re.compile(r"\s*<parameter=([^>]+?)>(.*?)</parameter>", re.DOTALL),
    re.compile(
        r"\s*<(?:[\w-]+:|｜DSML｜)?parameter name=\"([^\"]+)\"[^>]*>(.*?)</(?:[\w-]+:|｜DSML｜)?parameter>", re.DOTALL
    ),
    re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL),
)
NAMES, ARGUMENTS = ("name", "tool_name", "function"), ("arguments", "parameters")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCalls:
    """The calls of a turn, and where the first of them begins."""

    calls: tuple[Called, ...]
    """Names and arguments."""
    begin: int
    """Place of the first call's mark in the text."""


def find_calls(
    text: str, tools: Sequence[Mapping[str, Any]], *, in_thought: bool = False, special_tokens: Sequence[str] = ()
) -> FoundCalls | None:
    """The tool calls of a turn. None: there are none.

    Args:
        text: The turn, with its special tokens.
        tools: Schemas of the tools. They say which type a value has that is written without quotes.
        in_thought: Whether the turn begins inside a thought, because the prompt has opened it.
        special_tokens: Special tokens, which may stand around a call.

    Raises:
        ValueError: A mark is there, and what follows is no call.
    """
    functions = [tool["function"] if isinstance(tool.get("function"), Mapping) else tool for tool in tools]
    types: Types = {each.get("name", ""): (each.get("parameters") or {}).get("properties") or {} for each in functions}
    place = spoken = _after_first_thought(text, types, in_thought=in_thought)
    begin, calls = None, []
    while mark := OPEN.search(text, place):
        thought = THOUGHT.search(text, place)
        if thought and thought.start() <= mark.start():
            place = spoken = thought.end()
            continue
        begin = mark.start() if begin is None else begin
        found, place = _body(text, mark, types)
        calls += found
    while begin is None and (thought := THOUGHT.search(text, spoken)):
        spoken = thought.end()
    calls = calls if begin is not None else _bare(text[spoken:], types, special_tokens)
    return FoundCalls(calls=tuple(calls), begin=spoken if begin is None else begin) if calls else None


def _after_first_thought(text: str, types: Types, *, in_thought: bool) -> int:
    """Where a thought ends that the prompt has opened. 0: there is none."""
    places = [
        (place, place + len(close))
        for open_, close in THOUGHTS.items()
        if close != "<|end|>" and (place := text.find(close)) >= 0 and not 0 <= text.find(open_) < place
    ]
    begin, end = min(places, default=(len(text), len(text) if in_thought else 0))
    mark = None if in_thought else OPEN.search(text, 0, begin)
    if places and mark is not None:  # the text of an argument is no end of a thought
        try:
            return 0 if _body(text, mark, types)[1] > end else end
        except ValueError:
            return end
    return end


def _bare(text: str, types: Types, special_tokens: Sequence[str]) -> list[Called]:
    """The calls of a turn that is a call and nothing else, as Llama and xLAM write it."""
    spoken = without(text, special_tokens).strip()
    start = FENCE.match(spoken).end()  # type: ignore[union-attr]  # matches the empty text too
    try:
        if re.match(r"\[?\s*[A-Za-z_][\w.]*\(", spoken[start:]):
            calls, end = _python(spoken, start, types)
            return calls if not spoken[end:].strip("` \n") and all(name in types for name, _ in calls) else []
        values, end = _json_values(spoken, start)
        calls = [call for value in values for call in _from_json(value, known=types)]
    except ValueError:
        if re.match(r'\[?\s*\{\s*"(?:name|tool_calls)"', spoken[start:]):
            raise
        return []
    if calls and spoken[end:].strip("` \n"):
        raise ValueError(f"a turn that begins with a call must be one; got {spoken[:80]!r}")
    return calls


def without(text: str, special_tokens: Sequence[str]) -> str:
    """The text without these tokens."""
    return re.sub("|".join(map(re.escape, sorted(special_tokens, key=len, reverse=True))) or r"(?!)", "", text)


def _body(text: str, mark: re.Match[str], types: Types) -> tuple[list[Called], int]:
    """The calls behind a mark, and where they end.

    Raises:
        ValueError: There is no call.
    """
    place = FENCE.match(text, mark.end()).end()  # type: ignore[union-attr]
    if inner := OPEN.match(text, place):
        return _body(text, inner, types)
    if text[place : place + 1] in ("{", "[") and (read := _json_values(text, place))[0]:
        return [call for value in read[0] for call in _from_json(value)], read[1]
    if head := (TAGGED.match(text, place) or INVOKE.match(text, place)):
        name = head.groups()[-1]
        place = FENCE.match(text, head.end()).end()  # type: ignore[union-attr]
        if text[place : place + 1] == "{":
            arguments, place = _json_value(text, place)
            return [(name, _as_dict(arguments))], place
        arguments, place = _parameters(text, place, types.get(name, {}))
        closing = re.compile(r"\s*</(?:function|(?:[\w-]+:|｜DSML｜)?invoke)>").match(text, place)
        if closing is None:
            raise ValueError(f"the call of {name} must end; got {text[place : place + 80]!r}")
        return [(name, arguments)], closing.end()
    head = HEAD.match(text, place)
    if head is None or text[head.end() : head.end() + 1] in ("(", "]") or text[place : place + 1] == "[":
        return _python(text, place, types)
    name, place = head[1], head.end()
    if text[place : place + 1] == "{":
        arguments, place = _json_value(text, place)
        return [(name, _as_dict(arguments))], place
    arguments, place = _parameters(text, place, types.get(name, {}))
    if not re.compile(r"\s*</tool_call>").match(text, place):
        raise ValueError(f"the call of {name} must end; got {text[place : place + 80]!r}")
    return [(name, arguments)], place


def _json_values(text: str, place: int) -> tuple[list[Any], int]:
    """One JSON value after another, and where they end."""
    values: list[Any] = []
    while text[place : place + 1] in ("{", "["):
        try:
            value, place = _json_value(text, place)
        except ValueError:
            if values or text[place] == "{":
                raise
            return [], place  # a list in Python
        values.append(value)
        following = re.compile(r"[\s,;]*(?=[{\[])").match(text, place)
        if following is None or OPEN.match(text, following.end()):
            break
        place = following.end()
    return values, place


def _json_value(text: str, place: int) -> tuple[Any, int]:
    if '<|"|>' not in text:
        return json.JSONDecoder().raw_decode(text, place)
    end = _closing(text, place)  # Gemma 4: keys without quotes, and texts between <|"|>
    parts = text[place:end].split('<|"|>')
    parts[0::2] = [re.sub(r"(?<=[{,])\s*(\w+):", r'"\1":', part) for part in parts[0::2]]
    parts[1::2] = [json.dumps(part) for part in parts[1::2]]
    return json.loads("".join(parts)), end


def _closing(text: str, place: int) -> int:
    """Where the brackets that open at `place` are closed, outside the texts between `<|"|>`."""
    depth, is_text = 0, False
    for token in re.compile(r'<\|"\|>|[{}\[\]]').finditer(text, place):
        is_text ^= token[0] == '<|"|>'
        if not is_text and token[0] != '<|"|>':
            depth += 1 if token[0] in "{[" else -1
            if depth == 0:
                return token.end()
    raise ValueError("the brackets of a call must be closed")


def _from_json(value: Any, known: Types | None = None) -> list[Called]:
    """The calls of a JSON value. With `known`, an object without arguments is a call of these tools only."""
    if isinstance(value, list):
        return [call for each in value for call in _from_json(each, known)]
    if not isinstance(value, dict):
        if known is not None:
            return []
        raise ValueError(f"a call must be an object; got {value!r}")
    if isinstance(value.get("tool_calls"), list):
        return _from_json(value["tool_calls"], known)
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name = next((value[key] for key in NAMES if key in value), None)
    arguments = next((value[key] for key in ARGUMENTS if key in value), None)
    if known is None and name is None and len(value) == 1:  # Apertus: {"add": {"a": 1}}
        [(name, arguments)] = value.items()
    if known is not None and (name is None or (isinstance(name, str) and arguments is None and name not in known)):
        return []
    if not isinstance(name, str):
        raise ValueError(f"a call must have a name; got {value!r}")
    return [(name, _as_dict(arguments))]


def _as_dict(arguments: Any) -> dict[str, Any]:
    arguments = json.loads(arguments) if isinstance(arguments, str) and arguments else arguments or {}
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of a call must be an object; got {arguments!r}")
    return arguments


def _parameters(text: str, place: int, schemas: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Arguments between tags, and where they end."""
    arguments: dict[str, Any] = {}
    while found := next((found for form in PARAMETERS if (found := form.match(text, place))), None):
        key = found[1].strip()
        arguments[key] = _typed(re.sub(r"\A\n|\n\Z", "", found[2]), schemas.get(key))
        place = found.end()
    return arguments, place


def _typed(text: str, schema: Any) -> Any:
    """A value that is written without quotes, in the type that the schema says. Text that has another type stays text."""
    types, spoken = _types(schema), text.strip()
    if "string" in types and not ("null" in types and spoken in ("null", "None")):
        return text
    for read in (json.loads, ast.literal_eval):
        try:
            value = read({"True": "true", "False": "false", "None": "null"}.get(spoken, spoken))
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
        kinds = {
            bool: "boolean",
            int: "integer number",
            float: "number",
            list: "array",
            dict: "object",
            type(None): "null",
        }
        if isinstance(value, float) and "integer" in types and value.is_integer():
            return int(value)
        return value if not types or any(kind in kinds.get(type(value), "").split() for kind in types) else text
    return text


def _types(schema: Any) -> list[str]:
    if not isinstance(schema, Mapping):
        return ["string"] if schema is None else []
    declared = schema.get("type", [])
    types = [declared] if isinstance(declared, str) else list(declared)
    types += ["null"] if schema.get("nullable") else []
    return types + [each for union in ("anyOf", "oneOf") for part in schema.get(union) or [] for each in _types(part)]


def _python(text: str, place: int, types: Types) -> tuple[list[Called], int]:
    """Calls written in Python, in a list or one after another, and where they end."""
    calls: list[Called] = []
    while begin := re.compile(r"[\s;,]*(?=\[|[A-Za-z_][\w.]*\()").match(text, place):
        for end in re.compile(r"[\])]").finditer(text, begin.end()):
            try:
                read: Any = ast.parse(text[begin.end() : end.end()].strip(), mode="eval").body
            except (SyntaxError, ValueError, MemoryError, RecursionError):
                continue
            calls += [_python_call(call, types) for call in (read.elts if isinstance(read, ast.List) else [read])]
            place = end.end()
            break
        else:
            raise ValueError(f"a call in Python must be complete; got {text[place : place + 80]!r}")
    if not calls:
        raise ValueError(f"a call must follow the mark; got {text[place : place + 80]!r}")
    return calls, place


def _python_call(call: Any, types: Types) -> Called:
    if not isinstance(call, ast.Call) or any(keyword.arg is None for keyword in call.keywords):
        raise ValueError(f"a call in Python must be written as name(key=value); got {ast.unparse(call)[:80]!r}")
    name = ast.unparse(call.func).removesuffix(".call")
    if len(call.args) > len(types.get(name, {})):
        raise ValueError(f"a call in Python must name its arguments; got {ast.unparse(call)[:80]!r}")
    values = [*zip(types.get(name, {}), call.args, strict=False), *((k.arg, k.value) for k in call.keywords)]
    return name, {str(key): ast.literal_eval(_Constants().visit(value)) for key, value in values}


class _Constants(ast.NodeTransformer):
    """JSON's true, false and null as Python's. Other names are texts without quotes."""

    def visit_Name(self, node: ast.Name) -> ast.Constant:
        return ast.Constant({"true": True, "false": False, "null": None}.get(node.id, node.id))
