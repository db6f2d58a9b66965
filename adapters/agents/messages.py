"""Messages: what agents, environments and users say to one another, in the form of OpenAI's chat API."""

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, TypeAlias, TypedDict

from adapters.llm import Picture
from grpo.arguments import describe
from grpo.errors import ContractError


class Message(TypedDict, total=False):
    """A chat message: a plain dict with these keys. `role` is required."""

    role: str
    """Who speaks: "system", "user", "assistant" (the policy), or "tool" (a tool's result)."""
    content: Any
    """The text. With pictures, the parts: `{"type": "text", "text": ...}` and `{"type": "image", "image": Picture}`. Messages
    of the policy have a text."""
    tool_calls: list[dict[str, Any]]
    """Of the assistant: `{"id": ..., "type": "function", "function": {"name": ..., "arguments": {...}}}` for each call. The
    arguments are a dict. A JSON text, as in OpenAI's API, is accepted and converted."""
    tool_call_id: str
    """Of a tool: the id of the call that this message answers."""
    name: str
    """Of a tool: its name."""
    reasoning_content: str
    """Of the assistant: its thoughts, if the tokenizer's response parser separates them from the content."""
    opened: str
    """Of the assistant: the tag in which its prompt ends, such as a `<think>` of the template. It stands before the content and
    is not sampled. The key is missing if there is no such tag, or if the thoughts are in `reasoning_content`."""


Observation: TypeAlias = str | Picture | Message | Sequence[Message]
"""What an environment shows to the agent: a text, a picture (also as an array or a PIL image), a message or several
messages."""


def as_messages(given: Any, action: Message | None = None) -> list[Message]:
    """Messages of an observation or a history. Tool results are sorted into the order of the calls of the turn before them.

    Args:
        given: A text, a picture, a message or a sequence of messages. A text or a picture answers the action's tool call if
            there is exactly one, and else is a message of the user.
        action: The assistant's message that the observation answers.

    Raises:
        ContractError: The observation has another type, or a picture in it cannot be read.
    """
    calls = [] if action is None else action.get("tool_calls", [])
    if isinstance(given, str) or Picture.accepts(given):
        content = given if isinstance(given, str) else [picture_part(given, "The picture of an observation")]
        return [tool_message(calls[0], content) if len(calls) == 1 else {"role": "user", "content": content}]
    listed = [given] if isinstance(given, Mapping) else given
    if not isinstance(listed, Sequence) or not all(_is_message(message) for message in listed):
        raise ContractError(
            "An observation must be a text, a picture, a message {'role': ..., 'content': ...} with a text or a list of parts "
            f"as content, or a list of messages; got {describe(given)}. Convert it to text in the environment."
        )
    return _in_the_order_of_calls([_with_decoded_arguments(message) for message in listed], calls)


def picture_part(picture: Any, whose: str) -> dict[str, Any]:
    """A picture as a part of a message."""
    return {"type": "image", "image": Picture.of(picture, whose)}


def pictures_of(messages: Sequence[Message]) -> list[Picture]:
    """The pictures of messages, in order."""
    contents = (message.get("content") for message in messages)
    return [part["image"] for content in contents if isinstance(content, list) for part in content if "image" in part]


def text_of(message: Message) -> str:
    """The text of a message, with `[picture]` where pictures are."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join("[picture]" if "image" in part else part["text"] for part in content)


def tool_message(call: Mapping[str, Any], content: str | list[dict[str, Any]]) -> Message:
    """The result of a tool call as a message."""
    return {"role": "tool", "content": content, "tool_call_id": call["id"], "name": call["function"]["name"]}


def _in_the_order_of_calls(messages: Sequence[Message], calls: Sequence[dict[str, Any]]) -> list[Message]:
    """The messages, with the tool results after a turn in the order of its calls. Results without a name get that of the tool.

    Agent programs send results in the order in which they have them, and many chat templates write no ids.

    Args:
        messages: The messages.
        calls: The calls of the turn before them.
    """
    ordered: list[Message] = []
    for are_turns, run in groupby(messages, lambda message: message["role"] == "assistant"):
        said = list(run)
        if are_turns:
            ordered, calls = ordered + said, said[-1].get("tool_calls") or []
            continue
        places = {call.get("id"): place for place, call in enumerate(calls)}
        found = [(places.get(one.get("tool_call_id"), len(calls)), one) for one in said if one["role"] == "tool"]
        results = iter(sorted(found, key=lambda pair: pair[0]))
        for message in said:
            place, result = next(results) if message["role"] == "tool" else (len(calls), message)
            named: Any = {"name": calls[place]["function"]["name"]} if place < len(calls) else {}
            ordered.append({**named, **result})
    return ordered


def with_names_as_ids(messages: Sequence[Message]) -> list[Message]:
    """The messages with ids such as `functions.add:0` for the calls: the name of the tool, and the number of the call."""
    ids: dict[Any, str] = {}
    renamed: list[Any] = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or []:
            ids[call.get("id")] = f"functions.{call['function']['name']}:{len(ids)}"
            calls.append({**call, "id": ids[call.get("id")]})
        own = message.get("tool_call_id")
        renamed.append(
            message | ({"tool_calls": calls} if calls else {}) | ({"tool_call_id": ids[own]} if own in ids else {})
        )
    return renamed


def say_the_same(one: Sequence[Message], other: Sequence[Message]) -> bool:
    """Whether two lists of messages have equal roles, texts, calls and call ids."""
    return len(one) == len(other) and all(_essence(a) == _essence(b) for a, b in zip(one, other, strict=True))


def _essence(message: Message) -> tuple[Any, ...]:
    calls = [
        (call.get("id"), call["function"].get("name"), call["function"].get("arguments"))
        for call in message.get("tool_calls") or []
    ]
    return message["role"], message.get("content") or "", calls, message.get("tool_call_id")


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("role"), str)
        and (isinstance(content := value.get("content"), str | None) or _are_parts(content))
    )


def _are_parts(content: Any) -> bool:
    return isinstance(content, list | tuple) and all(isinstance(part, Mapping) for part in content)


def _content(message: Mapping[str, Any]) -> str | list[dict[str, Any]]:
    """The content as a text, or as texts and pictures. Line breaks join texts without a picture, as vLLM's server does it."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    parts: list[dict[str, Any]] = []
    for place, part in enumerate(content):
        picture = Picture.of_part(part, f"Part {place} of a message of {message['role']!r}")
        if picture is None and not isinstance(part.get("text"), str):
            raise ContractError(
                f"Part {place} of a message of {message['role']!r} must be a text or a picture; got a part of the type "
                f"{part.get('type')!r}. Pass frames of a video as pictures, and sound as a text."
            )
        parts.append({"type": "text", "text": part["text"]} if picture is None else {"type": "image", "image": picture})
    if any("image" in part for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _with_decoded_arguments(message: Mapping[str, Any]) -> Message:
    """A copy, in which the arguments of tool calls are dicts, and the content is a text, or texts and pictures."""
    copied: Any = {**message, "content": _content(message)}
    if message.get("tool_calls"):
        copied["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _decoded(call["function"].get("arguments"))}}
            for call in message["tool_calls"]
        ]
    return copied


def _decoded(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return json.loads(arguments or "{}")
    except json.JSONDecodeError as error:
        raise ContractError(
            f"The arguments of a tool call must be a dict or a JSON text; got {arguments[:80]!r}. Encode them with json.dumps."
        ) from error
