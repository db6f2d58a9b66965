"""OpenAI's chat completions API: requests as arguments of a chat, and replies and errors as response bodies."""

import json
import time
from collections.abc import Collection, Mapping
from typing import Any

from adapters.llm import Picture, SamplingConfig
from grpo.arguments import describe
from grpo.errors import GRPOError

from .chat import Reply
from .messages import Message

READ = {"messages", "model", "tools", "tool_choice", "stream", "stream_options", "stop", "max_tokens"}
READ |= {"max_completion_tokens", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
# each conversation has random numbers of its own, and the policy makes as many calls as it wants
READ |= {"seed", "parallel_tool_calls"}
"""Parameters with meaning here, and parameters that change nothing."""
ACCEPTED: dict[str, Any] = {"n": 1, "response_format": {"type": "text"}, "modalities": ["text"]}
ACCEPTED |= {"logprobs": False, "top_logprobs": 0, "frequency_penalty": 0, "presence_penalty": 0, "logit_bias": {}}
"""The value of other parameters with which the policy is sampled as it is. All others must be left out."""
ADVICE = {
    "n": "Send n requests.",
    "response_format": "Describe the format in a message, and check it in the reward.",
    "logprobs": "The conversation keeps the log-probs.",
    "functions": "Use tools.",
}


class ApiError(GRPOError):
    """A request that cannot be answered. OpenAI's clients raise the response as an `APIStatusError`."""

    def __init__(self, status: int, message: str, **fields: Any) -> None:
        super().__init__(message)
        self.status, self.fields = status, fields


def parsed(body: bytes) -> Any:
    """What a body says.

    Raises:
        ApiError: The body is no JSON.
    """
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"The body must be JSON; got {bytes(body[:80])!r}. Encode it: {error}.") from error


def read_request(given: Any, sampling: SamplingConfig, ignore: Collection[str] = ()) -> dict[str, Any]:
    """The arguments of `Chat.reply` for a request. Parameters in `ignore` are left out.

    Raises:
        ApiError: The request is malformed, or would change the distribution that the policy is trained on.
    """
    _require(isinstance(given, dict), "The body", "a JSON object", given)
    given = {name: value for name, value in given.items() if value is not None and name not in ignore}
    own = sampling.to_dict()
    for name in sorted(given.keys() - READ):
        accepted = own.get(name, ACCEPTED.get(name))
        expected = "left out" if accepted is None else f"{accepted!r} or left out"
        advice = f"Set SamplingConfig({name}=...) of the policy." if name in own else ADVICE.get(name, "Leave it out.")
        reason = ", because the policy is trained on its own distribution"
        _require(accepted is not None and given[name] == accepted, name, expected + reason, given[name], advice)
    choice, tools, stop = given.get("tool_choice", "auto"), given.get("tools", []), given.get("stop", [])
    advice = "Leave it out: the policy decides whether it calls a tool."
    _require(choice in ("auto", "none"), "tool_choice", "'auto' or 'none'", choice, advice)
    _require(_name_functions(tools), "tools", "a list of {'type': 'function', 'function': {'name': ..., ...}}", tools)
    stop = [stop] if isinstance(stop, str) else stop
    is_valid = isinstance(stop, list) and all(map(SamplingConfig.can_stop, stop))
    _require(is_valid, "stop", "a text or a list of texts that are not empty and have no half characters", stop)
    limits = {name: given[name] for name in ("max_tokens", "max_completion_tokens") if name in given}
    for name, limit in limits.items():
        _require(type(limit) is int and limit > 0, name, "an integer of at least 1", limit)
    messages: Any = given.get("messages")
    _require(isinstance(messages, list) and messages, "messages", "a list of messages, with at least one", messages)
    return {
        "messages": [_message(f"messages[{place}]", message) for place, message in enumerate(messages)],
        "tools": None if choice == "none" else tools,
        "max_new_tokens": min(limits.values(), default=None),
        "stop": stop,
    }


def response_body(reply: Reply, request: Mapping[str, Any]) -> tuple[str, bytes]:
    """The type and the bytes of a response: a chat completion or, with `stream`, its events."""
    said, calls = reply.message, called(reply.message)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if calls and not said["content"] else said["content"],
    }
    message |= {key: said[key] for key in ("reasoning_content",) if key in said}
    finish_reason = "length" if reply.is_truncated else "tool_calls" if calls else "stop"
    read, sampled = reply.num_context_tokens, reply.num_tokens
    usage = {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}
    head = {"id": reply.id, "created": int(time.time()), "model": str(request.get("model", "policy"))}
    if not request.get("stream"):
        choice = {
            "index": 0,
            "message": message | ({"tool_calls": calls} if calls else {}),
            "finish_reason": finish_reason,
        }
        whole = {**head, "object": "chat.completion", "choices": [choice], "usage": usage}
        return "application/json", json.dumps(whole).encode()
    deltas = [message, *({"tool_calls": [{"index": place} | call]} for place, call in enumerate(calls)), {}]
    reasons = [*[None] * (len(deltas) - 1), finish_reason]
    chunks: list[dict[str, Any]] = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
        for delta, reason in zip(deltas, reasons, strict=True)
    ]
    options = request.get("stream_options")
    if isinstance(options, Mapping) and options.get("include_usage"):
        chunks.append({"choices": [], "usage": usage})
    events = [json.dumps({**head, "object": "chat.completion.chunk", **chunk}) for chunk in chunks]
    return "text/event-stream", "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]).encode()


def called(message: Message) -> list[dict[str, Any]]:
    """The calls of a message, with their arguments as JSON texts, as OpenAI has them."""
    return [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", [])
    ]


def error_body(error: Exception) -> tuple[int, bytes]:
    """The status and the bytes of the response for an error. Errors of the chat are those of the request."""
    status = error.status if isinstance(error, ApiError) else 400 if isinstance(error, GRPOError) else 500
    message = str(error) if status != 500 else f"{type(error).__name__}: {error}"
    kind = "invalid_request_error" if status < 500 else "server_error"
    fields = error.fields if isinstance(error, ApiError) else {}
    body = {"message": message, "type": kind, "param": None, "code": None} | fields
    return status, json.dumps({"error": body}).encode()


def _message(name: str, given: Any) -> dict[str, Any]:
    """A message with the keys that chat templates know, and texts and pictures as its content."""
    is_valid = isinstance(given, dict) and isinstance(given.get("role"), str)
    _require(is_valid, name, "a message {'role': ..., 'content': ...}", given)
    content, calls = given.get("content") or [], given.get("tool_calls") or []
    given_parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    parts = [_part(part) for part in given_parts] if isinstance(given_parts, list) else [None]
    advice = "Send a picture as data:image/png;base64,... Sounds and files are not read: describe them in a text."
    expected = "a text, or a list of parts of the types 'text' and 'image_url'"
    _require(None not in parts, f"{name}.content", expected, content, advice)
    _require(_name_functions(calls), f"{name}.tool_calls", "a list of calls of functions", calls)
    role = "system" if given["role"] == "developer" else given["role"]
    message: dict[str, Any] = {"role": role, "content": parts}
    message |= {key: given[key] for key in ("tool_call_id", "name", "reasoning_content") if given.get(key)}
    functions = [{key: call["function"].get(key) for key in ("name", "arguments")} for call in calls]
    listed = [{"id": c.get("id"), "type": "function", "function": f} for c, f in zip(calls, functions, strict=True)]
    return message | ({"tool_calls": listed} if listed else {})  # templates write keys in the order in which they come


def _part(part: Any) -> dict[str, Any] | None:
    """A text or a picture of a content. None: it is neither. A client must not name files of this machine."""
    if not isinstance(part, dict):
        return None
    if part.get("type") == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    if part.get("type") == "image" and isinstance(part.get("image"), Picture):  # of an earlier response
        return part
    link = part.get("image_url")
    link = link.get("url") if isinstance(link, dict) else link
    is_link = part.get("type") in ("image_url", "input_image") and isinstance(link, str) and link.startswith("data:")
    return {"type": "image_url", "image_url": link} if is_link else None


def _name_functions(values: Any) -> bool:
    functions = (
        [v.get("function") if isinstance(v, dict) else None for v in values] if isinstance(values, list) else [None]
    )
    return all(isinstance(function, dict) and isinstance(function.get("name"), str) for function in functions)


def _require(condition: Any, name: str, expected: str, got: Any, advice: str = "Change it.") -> None:
    if not condition:
        raise ApiError(400, f"{name} must be {expected}; got {describe(got)}. {advice}", param=name)
