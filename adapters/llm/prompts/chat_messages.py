"""Chats and tools in the form that chat templates read, whatever form they came in."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from grpo.arguments import describe
from grpo.errors import ContractError


def readable_messages(chat: Sequence[Mapping[str, Any]], whose: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The messages with texts as contents and dicts as arguments of calls, and the arguments that were None.

    - Arguments that are JSON text, as in OpenAI's API, become dicts; templates would write the text as JSON once more.
    - Keys that are None are left out, and so are arguments: a `datasets.Dataset` gives each row the keys of all others. A null
      that is meant is kept in arguments that are JSON text.
    - A content that is None, as OpenAI's API has it beside calls, becomes an empty text.
    """
    empty: list[str] = []
    return [_message(message, f"message {i} of {whose}", empty) for i, message in enumerate(chat)], empty


def _message(message: Mapping[str, Any], whose: str, empty: list[str]) -> dict[str, Any]:
    read = {key: value for key, value in message.items() if value is not None}
    if "function_call" in read or message["role"] == "function":
        raise ContractError(
            f"The calls of {whose} must be in tool_calls, and results in messages of the role 'tool', because templates "
            "do not read OpenAI's older form, function_call and the role 'function'. Convert the message."
        )
    if message["role"] not in ("assistant", "tool", "ipython") and "content" not in read:
        raise ContractError(
            f"{whose[0].upper()}{whose[1:]} must have a content; got a message of {message['role']!r} with the keys "
            f"{sorted(map(str, read))}. Name its text content."
        )
    content = read.setdefault("content", "")
    if isinstance(content, list | tuple):
        read["content"] = [without_none(part) for part in content]
    elif not isinstance(content, str):
        raise ContractError(
            f"The content of {whose} must be a text or a list of parts; got {describe(content)}. Convert it, for example with "
            "json.dumps."
        )
    calls = _from_json(read.pop("tool_calls", []), f"The tool_calls of {whose}")
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        raise ContractError(f"The tool_calls of {whose} must be a list of calls; got {describe(calls)}. Convert them.")
    return read | ({"tool_calls": [_call(call, whose, empty) for call in calls]} if calls else {})


def _call(call: Mapping[str, Any], whose: str, empty: list[str]) -> dict[str, Any]:
    read = {key: value for key, value in call.items() if value is not None}
    function: Any = read.get("function", read)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ContractError(
            "A call must be {'type': 'function', 'function': {'name': ..., 'arguments': ...}}; a call in "
            f"{whose} is {describe(call)}. Convert it."
        )
    given = function.get("arguments")
    arguments = _from_json(given or {}, f"The arguments of a call in {whose}")
    if not isinstance(arguments, Mapping):
        raise ContractError(
            f"The arguments of a call in {whose} must be a dict, or its JSON text; got {describe(given)}. Convert them."
        )
    if not isinstance(given, str):
        empty += [f"{function['name']}({place}=None)" for place in _places_of_none(arguments)]
        arguments = without_none(arguments)
    whole = {**function, "arguments": dict(arguments)}
    return {**read, "function": whole} if "function" in read else whole


def readable_tools(tools: Any, whose: str) -> list[Any]:
    """The schemas or functions of a row's column `tools`: a list, its JSON text, or a list of such texts."""
    listed = _from_json(tools or [], f"The tools of {whose}")
    listed = (
        [_from_json(tool, f"A tool of {whose}") for tool in listed] if isinstance(listed, list | tuple) else [listed]
    )
    for tool in listed:
        if not callable(tool) and not (isinstance(tool, Mapping) and isinstance(tool.get("function", tool), Mapping)):
            raise ContractError(
                f"The tools of {whose} must be a list of JSON schemas or functions; got {describe(tool)}. Convert them."
            )
    return [without_none(tool) for tool in listed]


def with_arguments_as_text(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with JSON text as arguments of calls, which some templates need."""

    def as_text(call: Mapping[str, Any]) -> dict[str, Any]:
        function = call.get("function", call)
        whole = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
        return {**call, "function": whole} if "function" in call else whole

    return [
        {**message, "tool_calls": [as_text(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else dict(message)
        for message in messages
    ]


def with_contents_as_text(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with texts in place of lists of parts, which many templates do not read. Line breaks join the parts."""
    return [
        {
            **message,
            "content": message["content"]
            if isinstance(message["content"], str)
            else "\n".join(part if isinstance(part, str) else part["text"] for part in message["content"]),
        }
        for message in messages
    ]


def without_none(value: Any) -> Any:
    """A copy of dicts and lists in which no dict has a key that is None."""
    if isinstance(value, Mapping):
        return {key: without_none(part) for key, part in value.items() if part is not None}
    return [without_none(part) for part in value] if isinstance(value, list | tuple) else value


def _places_of_none(value: Any) -> list[str]:
    """Which keys `without_none` leaves out, such as `filter.day`."""
    if isinstance(value, Mapping):
        missing = [str(key) for key, part in value.items() if part is None]
        return missing + [f"{key}.{place}" for key, part in value.items() for place in _places_of_none(part)]
    listed = value if isinstance(value, list | tuple) else ()
    return [f"{i}.{place}" for i, part in enumerate(listed) for place in _places_of_none(part)]


def _from_json(value: Any, name: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise ContractError(
            f"{name} must be JSON where they are a text; got {value[:80]!r}: {error}. Use json.dumps."
        ) from error
