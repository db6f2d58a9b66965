"""Tool calls: reading them from the policy's text, and calling functions with them."""

import inspect
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from transformers.utils.chat_template_utils import get_json_schema

from adapters.llm import Picture, special_tokens
from grpo.arguments import describe
from grpo.errors import ContractError

from .call_formats import THOUGHTS, find_calls, without
from .messages import Message, picture_part, tool_message


def tool_schemas(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """The JSON schema of each tool: a schema as it is, or that of a function with type hints and a Google-style docstring."""
    schemas = []
    for tool in tools:
        if isinstance(tool, Mapping):
            schemas.append(dict(tool))
            continue
        try:
            schemas.append(get_json_schema(tool))
        except Exception as error:  # transformers raises several types, and also AttributeError for other objects
            raise ContractError(
                "A tool must be a JSON schema, or a function with type hints and a docstring that describes each argument "
                f"under 'Args:'; got {describe(tool)}: {error}. Add them."
            ) from error
    return schemas


def read_turn(
    tokenizer: Any,
    context: Sequence[int],
    turn: Sequence[int],
    text: str,
    tools: Sequence[Any] | None,
    *,
    number: int,
    hidden: Sequence[str] | None = None,
) -> tuple[Message, bool]:
    """The policy's turn as a message, and whether it has a malformed tool call. A malformed call stays in the text.

    The tokenizer's own response parser reads the turn if the tokenizer has a `response_template`. If not, calls are read in
    the published formats of `call_formats`. What stands inside thoughts is no call.

    Args:
        tokenizer: The policy's tokenizer.
        context: Token ids before the turn.
        turn: Token ids of the turn.
        text: The turn's text without the hidden tokens and without a stop string.
        tools: Schemas of the tools. Without tools, a turn has no calls.
        number: Number of the turn, for the ids of the calls.
        hidden: Special tokens that are left out of the text beside calls. None: all.
    """
    whole: Message = {"role": "assistant", "content": text}
    raw = tokenizer.decode(list(turn), skip_special_tokens=False)  # marks are special tokens in some tokenizers
    parser, special = getattr(tokenizer, "response_template", None), special_tokens(tokenizer)
    found, said = None, raw
    try:
        if tools and (parser is None or "tool_calls" not in parser["fields"]):
            in_thought = _opens_thought(tokenizer, context, special)
            found = find_calls(raw, tools, in_thought=in_thought, special_tokens=[*special.values()])
            said = raw if found is None else raw[: found.begin]
        called: list[Any] = [] if found is None else [{"name": n, "arguments": given} for n, given in found.calls]
        if parser is not None:
            before = tokenizer.decode(list(context), skip_special_tokens=False)
            parsed = tokenizer.parse_response(said, prefix=before, tools=list(tools) if tools else None)
            called += [call.get("function", call) for call in parsed.pop("tool_calls", [])]
            spoken: Any = {**parsed, "role": "assistant", "content": parsed.get("content") or ""}
            whole = spoken
        elif "<|channel|>" in raw and "<|message|>" in raw:
            whole.update(_channels(said))
        elif found is not None:
            whole["content"] = without(said, [*special.values()] if hidden is None else hidden).strip()
        calls = [_call(call, number, i) for i, call in enumerate(called)]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):  # what parsers raise for malformed text
        return {"role": "assistant", "content": text}, True
    return _message(whole, calls), False


def _opens_thought(tokenizer: Any, context: Sequence[int], special: Mapping[int, str]) -> bool:
    """Whether the prompt ends inside a thought, as `<think>` in the template's generation prompt."""
    tail: list[int] = []
    for token in reversed(context[-64:]):
        if token in special and special[token] not in (*THOUGHTS, *THOUGHTS.values()):
            break
        tail.append(token)
    text = tokenizer.decode(tail[::-1], skip_special_tokens=False)
    return any(text.rfind(mark) > text.rfind(end) for mark, end in THOUGHTS.items())


def _channels(raw: str) -> Message:
    """What a turn of gpt-oss says on its channels: the analysis is a thought."""
    said = re.findall(r"<\|channel\|>(\w+)[^<]*(?:<\|constrain\|>\w*)?<\|message\|>(.*?)(?=<\||\Z)", raw, re.DOTALL)
    thoughts = "\n".join(text for channel, text in said if channel == "analysis")
    message: Message = {"content": "\n".join(text for channel, text in said if channel != "analysis")}
    return {**message, "reasoning_content": thoughts} if thoughts else message


async def call_functions(
    message: Message, functions: Mapping[str, Callable[..., Any]], run: Callable[..., Awaitable[Any]]
) -> tuple[list[Message], int]:
    """Results of the message's tool calls, in the order of the calls, and how many of the calls failed.

    A call of an unknown tool, with wrong arguments, or that raises an error has a result that says so.
    """
    results, num_failed = [], 0
    for call in message.get("tool_calls", []):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if name not in functions:
            content = f"Error: there is no tool {name!r}. The tools are {', '.join(functions)}."
            num_failed += 1
        else:
            try:
                inspect.signature(functions[name]).bind(**arguments)
                content = await run(functions[name], **arguments)
            except Exception as error:  # the policy reads the error, and it is counted
                content = f"Error: {type(error).__name__}: {error}"
                num_failed += 1
        results.append(tool_message(call, result_content(name, content)))
    return results, num_failed


def result_content(name: str, result: Any) -> str | list[dict[str, Any]]:
    """What a tool returned, as the policy reads it: a text or a picture as it is, a list that has pictures as texts and
    pictures, and any other value as JSON."""
    if isinstance(result, str):
        return result
    listed = list(result) if isinstance(result, list | tuple) else [result]
    if any(map(Picture.accepts, listed)):
        return [
            picture_part(one, f"The result of the tool {name}")
            if Picture.accepts(one)
            else {"type": "text", "text": str(result_content(name, one))}
            for one in listed
        ]
    try:
        return json.dumps(result)
    except (TypeError, ValueError) as error:
        raise ContractError(
            f"The tool {name} must return a text, a picture, or a value that json.dumps accepts; got {describe(result)}. "
            "Convert it."
        ) from error


def _call(read: Any, number: int, place: int) -> dict[str, Any]:
    """A call in OpenAI's form. Its id has 9 letters and digits, which is what all chat templates accept."""
    name, arguments = read["name"], read.get("arguments", read.get("parameters")) or {}
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError(f"a call must have a name and a dict of arguments; got {read!r}")
    return {
        "id": f"call{number:03d}{place:02d}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _message(message: Message, calls: list[dict[str, Any]]) -> Message:
    return {**message, "tool_calls": calls} if calls else message
