"""Small agents: tokenizers with chat templates, tiny models, and environments with known rewards."""

import importlib.util
import re
import string
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from adapters.agents import AgentPolicy, Conversation, Message
from adapters.llm import HFPolicy, SamplingConfig
from tests.support.llm_models import hf_policy, one_token_each, row_log_probs, tiny_model

CHATML = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.role == 'tool' %}<tool_response>\n{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A template that only appends, in the manner of Qwen2.5."""
FORGETFUL = CHATML.replace("{{ m.content }}", "{{ m.content if loop.last or m.role != 'assistant' else '' }}")
"""A template that drops what the assistant said once somebody answers."""

TEMPLATES = Path(importlib.util.find_spec("trl").submodule_search_locations[0]) / "chat_templates"  # type: ignore[union-attr,index]
ORIGINALS = sorted(path.stem for path in TEMPLATES.glob("*.jinja") if not path.stem.endswith("_training"))
"""The original templates in TRL, without those that TRL has changed for training."""
ENDS = {"gptoss": ("<|call|>", "<|return|>"), "glm4moe": ("<|user|>", "<|observation|>"), "llava_next": ("</s>",)}
ENDS |= dict.fromkeys((name for name in ORIGINALS if name.startswith("gemma4")), ("<|tool_response>",))
"""Tokens that end a turn, where the template does not write one after an answer."""


THINKS: dict[str, Any] = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "reasoning_content": {"open": "<think>", "close_pattern": "</think>", "content": "text"},
        "content": {"close_pattern": r"<\|im_end\|>", "content": "text"},
    },
}
"""A tokenizer's own parser of turns, which separates thoughts."""


def chat_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """One token per character. The marks of the template, such as `<|im_start|>`, are special tokens."""
    marks = re.findall(r"<[|｜][^\s'\"{}<>]*?[|｜]>|<\|?/?\w+\|>|<\|\w+\|?>|<(?:start|end)_of_\w+>", template or "")
    special = ["<pad>", "<s>", "</s>", *sorted(set(marks))]
    characters = sorted({*string.printable, *(template or "")})
    tokenizer = one_token_each([*special, *characters])
    end = "<|im_end|>" if "<|im_end|>" in special else "</s>"
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token=end, pad_token="<pad>", extra_special_tokens=special[3:]
    )
    fast.chat_template = template
    return fast


def marked_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    """Its special tokens are marked where they are added, and only three of them are named, as those of Llama 3."""
    state = chat_tokenizer(template).backend_tokenizer.to_str()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(state), bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    tokenizer.chat_template = template
    return tokenizer


def original_template(name: str) -> str:
    """The text of one of `ORIGINALS`."""
    return (TEMPLATES / f"{name}.jinja").read_text()


def language_model(
    family: str = "qwen3", *, tokenizer: Any = None, max_new_tokens: int = 6, positions: int = 2048, **options: Any
) -> HFPolicy:
    """A tiny model with random weights that reads chats."""
    tokenizer = tokenizer or chat_tokenizer()
    length = {"n_positions": positions} if family == "gpt2" else {"max_position_embeddings": positions}
    length = {} if family == "mamba" else length
    model = tiny_model(family, vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **length)
    with torch.no_grad():  # more turns end
        model.get_output_embeddings().weight[tokenizer.eos_token_id] *= options.pop("end_scale", 4.0)
    sampling = options.pop("sampling", None) or SamplingConfig(max_new_tokens=max_new_tokens)
    return hf_policy(model, tokenizer, sampling=sampling, **options)


class Scripted:
    """A language model that says given turns, each followed by the end-of-turn token unless it is there.

    The turns are a list, or a function of the text before a turn. `said` has the tokens of all turns.
    """

    def __init__(self, turns: Sequence[str] | Callable[[str], str], **options: Any) -> None:
        self.policy = language_model(**options)
        self.turns = turns if callable(turns) else list(turns)
        self.contexts: list[list[int]] = []
        self.said: list[list[int]] = []
        tokenizer = self.policy.tokenizer

        def sample(prompts: Any, num_per_prompt: int, config: Any, *, end_token_ids: Any, seeds: Any) -> Any:
            from adapters.llm import SampledTokens

            self.contexts += [list(prompt) for prompt in prompts]
            rows, reasons = [], []
            for prompt in (prompt for prompt in prompts for _ in range(num_per_prompt)):
                turn = self.turns(tokenizer.decode(prompt)) if callable(self.turns) else self.turns.pop(0)
                row = tokenizer(turn, add_special_tokens=False)["input_ids"]
                is_cut = len(row) >= config.max_new_tokens
                has_stop = any(stop in tokenizer.decode(row) for stop in config.stop)
                reasons.append("length" if is_cut else "stop" if has_stop else "end")
                if reasons[-1] == "end" and row[-1] not in end_token_ids:
                    row = [*row, tokenizer.eos_token_id]
                rows.append(row[: config.max_new_tokens])
            self.said += rows
            return SampledTokens(
                token_ids=rows, finish_reasons=reasons, behaviour_log_probs=[[-1.0] * len(row) for row in rows]
            )

        self.policy._sampler = type("Says", (), {"sample": staticmethod(sample), "sync": lambda self, model: None})()


class Echo:
    """Answers every message with a text, for some turns. The reward of turn i is i + 1."""

    closed: ClassVar[list["Echo"]] = []

    def __init__(self, state: Any = None, turns: int = 3) -> None:
        self.state, self.turns, self.count, self.said, self.seed = state, turns, 0, [], None

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.seed = seed
        return f"Hello {self.state}", {}

    def step(self, action: Message) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.said.append(action["content"])
        self.count += 1
        return f"I heard {self.count}", float(self.count), self.count >= self.turns, False, {"count": self.count}

    def close(self) -> None:
        Echo.closed.append(self)


def lookup(topic: str) -> str:
    """Looks something up.

    Args:
        topic: What to look up.
    """
    return f"{topic} is fine"


def says_call(name: str = "lookup", arguments: str = '{"topic": "weather"}') -> str:
    """A tool call in the format of Hermes and Qwen."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


class Tools(Echo):
    """Has the tool `lookup`, and ends at the first message without a call."""

    def tools(self) -> list[Any]:
        return [lookup]

    def step(self, action: Message) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return "bye", 1.0, True, False, {}


def converse(policy: Any, make: Any, state: Any = "you", *, size: int = 1, **options: Any) -> list[Conversation]:
    """Conversations about one state."""
    (conversations,) = AgentPolicy(policy, make, **options).generate_actions([state], size)
    return conversations


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds, at most for a minute."""
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def scores_one_by_one(model: Any, conversation: Conversation) -> torch.Tensor:
    """[T]: log-probs of a conversation's steps, one forward pass per sampled token's segment."""
    values = []
    for segment in conversation.segments:
        all_log_probs = row_log_probs(model, segment.token_ids[:1], segment.token_ids[1:])
        values.append(all_log_probs[torch.tensor(segment.sampled[1:])])
    return torch.cat(values) if values else torch.zeros(0)
