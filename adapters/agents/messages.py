"""Messages: what agents, environments and users say to one another, in the form of OpenAI's chat API."""

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, TypeAlias, TypedDict

from grpo.arguments import describe
from grpo.errors import ContractError


class Message(TypedDict, total=False):
    """A chat message: a plain dict with these keys. `role` is required."""

    role: str
    """Who speaks: "system", "user", "assistant" (the policy), or "tool" (a tool's result)."""
    content: str
    """The text."""
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


Observation: TypeAlias = str | Message | Sequence[Message]
"""What an environment shows to the agent: a text, a message or several messages."""


def as_messages(given: Any, action: Message | None = None) -> list[Message]:
    """Messages of an observation. Tool results are sorted into the order of the action's calls.

    Args:
        given: A text, a message or a sequence of messages. A text answers the action's tool call if there is exactly one, and
            else is a message of the user.
        action: The assistant's message that the observation answers.
    """
    calls = [] if action is None else action.get("tool_calls", [])
    if isinstance(given, str):
        return [tool_message(calls[0], given) if len(calls) == 1 else {"role": "user", "content": given}]
    listed = [given] if isinstance(given, Mapping) else given
    if not isinstance(listed, Sequence) or not all(_is_message(message) for message in listed):
        raise ContractError(
            "An observation must be a text, a message {'role': ..., 'content': ...} with a text as content, or a list of "
            f"messages; got {describe(given)}. Convert it to text in the environment."
        )
    messages = [_with_decoded_arguments(message) for message in listed]
    order = {call.get("id"): place for place, call in enumerate(calls)}
    results = iter(
        sorted(
            (message for message in messages if message["role"] == "tool"),
            key=lambda message: order.get(message.get("tool_call_id"), len(order)),
        )
    )
    return [next(results) if message["role"] == "tool" else message for message in messages]


def tool_message(call: Mapping[str, Any], content: str) -> Message:
    """The result of a tool call as a message."""
    return {"role": "tool", "content": content, "tool_call_id": call["id"], "name": call["function"]["name"]}


def in_the_order_of_calls(messages: Sequence[Message]) -> list[Message]:
    """The messages, with the tool results after a turn in the order of its calls. Results without a name get that of the tool.

    Agent programs send results in the order in which they have them, and many chat templates write no ids.
    """
    ordered: list[Message] = []
    for are_results, run in groupby(messages, lambda message: message["role"] == "tool"):
        if not are_results:
            ordered += run
            continue
        calls = ordered[-1].get("tool_calls", []) if ordered else []
        places = {call.get("id"): place for place, call in enumerate(calls)}
        for result in sorted(run, key=lambda result: places.get(result.get("tool_call_id"), len(calls))):
            place = places.get(result.get("tool_call_id"))
            ordered.append(result if place is None else {"name": calls[place]["function"]["name"], **result})
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
        and isinstance(value.get("content"), str | None)
    )


def _with_decoded_arguments(message: Mapping[str, Any]) -> Message:
    """A copy, in which the arguments of tool calls are dicts and the content is a text."""
    copied: Any = {**message, "content": message.get("content") or ""}
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
