"""Parts of the tests of `adapters.agents`: messages, rows, changed environments, and what happens before a batch."""

from collections.abc import Callable
from typing import Any

from adapters.agents import Conversation, Message
from adapters.llm import HFPolicy
from tests.support.agents import chat_tokenizer, language_model


def user(content: Any) -> Message:
    """A message of the user."""
    return {"role": "user", "content": content}


def tool_call(name: str, number: int = 0, /, **arguments: Any) -> dict[str, Any]:
    """A call of a tool, as a message has it."""
    return {"id": f"call{number:05}", "type": "function", "function": {"name": name, "arguments": arguments}}


def calls_tools(*calls: dict[str, Any]) -> Message:
    """A message of the policy that has only calls."""
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


def changed(base: type, **members: Any) -> Any:
    """A subclass with other members."""
    return type("Changed", (base,), members)


def fails() -> Any:
    """Raise an error, as an environment that lost something."""
    raise KeyError("lost")


def rows_of(groups: Any) -> list[Conversation]:
    """The rows of all groups."""
    return [row for group in groups for row in group]


def before_each_batch(policy: Any, does: Callable[[Any], Any]) -> None:
    """Call a function with the prompts of each batch, before the policy samples it."""
    real = policy.sample_tokens
    policy.sample_tokens = lambda prompts, **options: (does(prompts), real(prompts, **options))[1]


def sizes_of_batches(policy: Any) -> list[int]:
    """The number of prompts of each batch that the policy samples from now on."""
    sizes: list[int] = []
    before_each_batch(policy, lambda prompts: sizes.append(len(prompts)))
    return sizes


def conversation(**parts: Any) -> Conversation:
    """A conversation of these parts, which its environment has ended."""
    return Conversation(**{"segments": (), "turns": (), "messages": (), "ended_by": "environment", "info": {}} | parts)


def model_with(template: str, family: str = "qwen3", **options: Any) -> HFPolicy:
    """A tiny model with random weights and this chat template."""
    return language_model(family, tokenizer=chat_tokenizer(template), **options)
