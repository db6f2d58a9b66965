"""A check at construction: the tool calls that the chat template writes are read back."""

import json
from collections import Counter
from typing import Any

from grpo.errors import ConfigError, ContractError

from .calls import read_turn
from .messages import Message
from .templates import ChatTemplate

SIMPLE = {"name": "lookup", "arguments": {"topic": "weather"}}
TYPED = {
    "name": "lookup",
    "arguments": {"topic": 'say "hi"', "days": 3, "exact": True, "places": ["a", "b"], "how": {"x": 1.5}, "code": "7"},
}
SECOND = {"name": "convert", "arguments": {"unit": "celsius"}}
KINDS = {"topic": "string", "days": "integer", "exact": "boolean", "places": "array", "how": "object", "code": "string"}


def _tool(name: str, kinds: dict[str, str]) -> dict[str, Any]:
    properties: dict[str, Any] = {key: {"type": kind, "description": "A value."} for key, kind in kinds.items()}
    properties |= {
        key: {**each, "items": {"type": "string"}} for key, each in properties.items() if each["type"] == "array"
    }
    parameters = {"type": "object", "properties": properties, "required": list(kinds)[:1]}
    return {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": parameters}}


TOOLS = [_tool("lookup", KINDS), _tool("convert", {"unit": "string"})]


def require_readable_calls(tokenizer: Any, template: ChatTemplate) -> None:
    """Write calls with the chat template, and read them back: a simple call, one with values of all types, and two calls.

    Not checked are a template that does not write tools, which refuses tools, and calls that a small vocabulary cannot write.
    """
    for functions in ([SIMPLE], [TYPED], [SIMPLE, SECOND]) if template.shows_tools else ():
        calls = [{"id": f"call0000{i + 1}", "type": "function", "function": f} for i, f in enumerate(functions)]
        said: Message = {"role": "assistant", "content": "", "tool_calls": calls}
        try:
            context, turn, meant = template.write(said, TOOLS)
        except ContractError as error:
            if len(functions) > 1:  # some templates write one call per turn
                continue
            raise ConfigError(
                f"AgentPolicy: {error} Or set tokenizer.response_template with a template for it."
            ) from error
        written = tokenizer.decode(turn, skip_special_tokens=False)
        if Counter("".join(meant.split())) - Counter(written):  # the vocabulary has no tokens for some characters
            continue
        if len(functions) > 1 and "celsius" not in written:  # gpt-oss writes the first call of a turn only
            continue
        text = tokenizer.decode(turn, skip_special_tokens=True)
        message, is_malformed = read_turn(tokenizer, context, turn, text, TOOLS, number=0)
        read = [call["function"] for call in message.get("tool_calls", [])]
        if read != functions:
            form = (
                "the tokenizer has a response_template"
                if getattr(tokenizer, "response_template", None)
                else "no known format"
            )
            got = "a malformed call" if is_malformed else json.dumps(read) if read else "no call"
            raise ConfigError(
                f"AgentPolicy: the calls that the chat template writes must be read back as {json.dumps(functions)}; the "
                f"template writes {written!r}, and {got} was read ({form}). Set tokenizer.response_template to the format of "
                "the template, or use a template with one of the formats in docs/agents.md."
            )
