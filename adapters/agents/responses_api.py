"""OpenAI's responses API: requests as those of chat completions, and replies as response bodies."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from grpo.arguments import describe

from .chat import Reply
from .messages import Message
from .openai_api import ApiError, called

TRANSLATED = {"instructions", "input", "tools", "max_output_tokens", "text", "previous_response_id"}
UNREAD = {"include", "reasoning", "truncation", "background", "prompt_cache_retention"}
"""Parameters that change nothing here. All others have the same name and meaning in both APIs, or are refused as there."""
PARTS = ("text", "input_text", "output_text")
"""The types of the parts of a content that are texts."""


def as_chat_request(given: Any, said_before: Callable[[str], list[Message]]) -> Any:
    """The request as one of the chat completions API, which is checked like any other.

    Args:
        given: The request.
        said_before: The messages up to the reply with an id, with the reply.

    Raises:
        ApiError: An item or a tool is of a kind that the policy does not know.
    """
    if not isinstance(given, Mapping):
        return given
    given = {name: value for name, value in given.items() if value is not None}
    if given.get("background"):
        raise ApiError(400, "background must be left out: a response is complete when it is sent.", param="background")
    request = {name: value for name, value in given.items() if name not in TRANSLATED | UNREAD}
    before = said_before(given["previous_response_id"]) if "previous_response_id" in given else []
    if "instructions" in given:  # they take the place of those of the previous response
        rest = before[1:] if before and before[0]["role"] == "system" else before
        before = [{"role": "system", "content": given["instructions"]}, *rest]
    request["messages"] = [*map(_sent, before), *_messages(given.get("input", []))]
    if (tools := given.get("tools", [])) != []:  # what is no list is refused there
        request["tools"] = (
            [_tool(place, tool) for place, tool in enumerate(tools)] if isinstance(tools, list) else tools
        )
    if "max_output_tokens" in given:
        request["max_tokens"] = given["max_output_tokens"]
    text = given.get("text", {})
    kind = text.get("format") if isinstance(text, Mapping) else text
    return request | ({"response_format": kind} if kind else {})


def responses_body(reply: Reply, given: Mapping[str, Any]) -> tuple[str, bytes]:
    """The type and the bytes of a response, or of its events with `stream`."""
    status = "incomplete" if reply.is_truncated else "completed"
    read, sampled = reply.num_context_tokens, reply.num_tokens
    whole = {
        "id": reply.id,
        "object": "response",
        "created_at": int(time.time()),
        "status": status,
        "incomplete_details": {"reason": "max_output_tokens"} if reply.is_truncated else None,
        "error": None,
        "model": str(given.get("model", "policy")),
        "output": [*_output(reply, status)],
        "parallel_tool_calls": True,
        "tool_choice": given.get("tool_choice", "auto"),
        "tools": given.get("tools") or [],
        "previous_response_id": given.get("previous_response_id"),
        "instructions": given.get("instructions"),
        "metadata": given.get("metadata") or {},
        "usage": {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + sampled,
        },
    }
    if not given.get("stream"):
        return "application/json", json.dumps(whole).encode()
    begun = whole | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    events = [
        {"type": "response.created", "response": begun},
        {"type": "response.in_progress", "response": begun},
        *(event for place, item in enumerate(whole["output"]) for event in _events(place, item)),
        {"type": f"response.{status}", "response": whole},
    ]
    lines = [
        f"event: {event['type']}\ndata: {json.dumps({**event, 'sequence_number': number})}\n\n"
        for number, event in enumerate(events)
    ]
    return "text/event-stream", "".join(lines).encode()


def _output(reply: Reply, status: str) -> Iterator[dict[str, Any]]:
    """The items of a reply: thoughts, a text, and calls."""
    said = reply.message
    if said.get("reasoning_content"):
        thought = [{"type": "reasoning_text", "text": said["reasoning_content"]}]
        yield {"type": "reasoning", "id": f"{reply.id}-reasoning", "summary": [], "content": thought, "status": status}
    calls = called(said)
    if said["content"] or not calls:
        text = [{"type": "output_text", "text": said["content"], "annotations": [], "logprobs": []}]
        common = {"type": "message", "role": "assistant", "status": status}
        yield common | {"id": f"{reply.id}-message", "content": text}
    for call in calls:
        fields = {"call_id": call["id"], **call["function"], "status": status}
        yield {"type": "function_call", "id": f"{reply.id}-{call['id']}", **fields}


def _events(place: int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of one item. Its text, or the arguments of its call, come at once."""
    at = {"output_index": place, "item_id": item["id"]}
    empty = {"content": [], "arguments": ""}
    begun = {**item, **{name: value for name, value in empty.items() if name in item}, "status": "in_progress"}
    yield {"type": "response.output_item.added", "output_index": place, "item": begun}
    if item["type"] == "message":
        (part,) = item["content"]
        whole = at | {"content_index": 0}
        yield {"type": "response.content_part.added", **whole, "part": part | {"text": ""}}
        yield {"type": "response.output_text.delta", **whole, "delta": part["text"], "logprobs": []}
        yield {"type": "response.output_text.done", **whole, "text": part["text"], "logprobs": []}
        yield {"type": "response.content_part.done", **whole, "part": part}
    if item["type"] == "function_call":
        yield {"type": "response.function_call_arguments.delta", **at, "delta": item["arguments"]}
        yield {"type": "response.function_call_arguments.done", **at, **{k: item[k] for k in ("name", "arguments")}}
    yield {"type": "response.output_item.done", "output_index": place, "item": item}


def _messages(items: Any) -> list[Any]:
    """Messages from the items of an input. What an assistant said and its calls are one message."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[Any] = []
    goes_on = False  # whether the last message is an assistant's that other items may belong to
    for place, item in enumerate(items if isinstance(items, list) else [items]):
        kind = item.get("type", "message") if isinstance(item, Mapping) else None
        if kind in ("reasoning", "function_call") and not goes_on:
            messages.append({"role": "assistant", "content": ""})
            goes_on = True
        if kind == "message":
            message = {"role": item.get("role"), "content": _text(item.get("content"))}
            if goes_on and message["role"] == "assistant" and not messages[-1]["content"]:
                messages[-1]["content"] = message["content"]
            else:
                messages.append(message)
            goes_on = message["role"] == "assistant"
        elif kind == "reasoning":
            texts = [part["text"] for part in item.get("content") or [] if isinstance(part, Mapping) and "text" in part]
            messages[-1] |= {"reasoning_content": "".join(map(str, texts))} if texts else {}
        elif kind == "function_call":
            function = {name: item.get(name) for name in ("name", "arguments")}
            calls = messages[-1].setdefault("tool_calls", [])
            calls.append({"id": item.get("call_id"), "type": "function", "function": function})
        elif kind == "function_call_output":
            goes_on = False
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": _text(item.get("output"))})
        else:
            raise ApiError(
                400,
                f"input[{place}] must be a message, a function_call, its function_call_output, or reasoning; got "
                f"{describe(item)}. Leave it out, or write it as a text.",
                param="input",
            )
    return messages


def _text(content: Any) -> Any:
    """The parts of a content as those of chat completions, which are checked there."""
    if not isinstance(content, list):
        return content
    return [
        {"type": "text", "text": part.get("text")} if isinstance(part, Mapping) and part.get("type") in PARTS else part
        for part in content
    ]


def _tool(place: int, tool: Any) -> Any:
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise ApiError(
            400, f"tools[{place}] must be of the type 'function'; got {describe(tool)}. Remove it.", param="tools"
        )
    return {
        "type": "function",
        "function": {name: tool[name] for name in ("name", "description", "parameters") if name in tool},
    }


def _sent(message: Message) -> dict[str, Any]:
    """A message of an earlier reply, as a client would send it."""
    calls = called(message)
    return {**message} | ({"tool_calls": calls} if calls else {})
