"""A tiny language model for the domain, made here, and scripted conversations to warm it up."""

import copy
import random
import re
import string

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from adapters.agents import Message
from adapters.llm import HFPolicy, SamplingConfig

from .service import ITEMS, OPENINGS, OUTCOMES, REASONS, STATUSES, SYLLABLES, WEEKS, Scenario, right_call, right_outcome

ASKS = ("please tell me your order number.", "your order number?")
ASKS_BOTH = ("please tell me your order number and the reason.", "your order number and the reason?")
ASKS_REASON = ("please tell me the reason.", "the reason?")
"""Questions of the agent, polite and curt."""
CLOSINGS = {
    "refund": ("thank you, the refund of {amount} euros is done.", "the refund of {amount} euros is done."),
    "send_again": ("thank you, a new parcel is sent.", "a new parcel is sent."),
    "cancel_order": ("thank you, the order is cancelled.", "the order is cancelled."),
    "escalate": ("thank you, a colleague will write to you.", "a colleague will write to you."),
    "refuse": ("sorry, we cannot do this.", "we cannot do this."),
    "wait": ("sorry, the parcel is on its way.", "the parcel is on its way."),
}
SHOP = (
    "hello, i am . the number is it is for a goodbye. order weeks ago, in stock, sold out: euros. done. Error no such"
)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per digit, per word of the domain, and per fixed part of a tool call. Other text is spelled."""
    tools = ("look_up_order", *(tool for tool in OUTCOMES if tool not in ("refuse", "wait")))
    calls = [f'<tool_call>{{"name": "{tool}", "arguments": {{"order_number": "' for tool in tools]
    spoken = [*ASKS, *ASKS_BOTH, *ASKS_REASON, *REASONS, *ITEMS, *WEEKS, SHOP]
    spoken += [text for texts in (*OPENINGS.values(), *STATUSES.values(), *CLOSINGS.values()) for text in texts]
    words = {word for text in spoken for word in re.findall(r"\w+", text)} | {*SYLLABLES}
    whole = [*calls, '", "amount": ', '"}}</tool_call>', "}}</tool_call>", "user\n", "assistant\n", "tool\n"]
    whole += [space + word for word in words for space in ("", " ")]
    whole = sorted(whole, key=lambda text: (-len(text), text))
    special = ["<|im_end|>", "<|im_start|>"]
    vocabulary = {token: i for i, token in enumerate([*special, *dict.fromkeys([*whole, *string.printable])])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, "<|im_end|>"))
    pattern = "|".join([*map(re.escape, whole), r"[\s\S]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=special[0], extra_special_tokens=special[1:])
    fast.chat_template = TEMPLATE
    return fast


def make_model() -> HFPolicy:
    """A Qwen3 model of 0.13 million parameters with random weights."""
    tokenizer = make_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.08,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    return HFPolicy(Qwen3ForCausalLM(config), tokenizer, sampling=SamplingConfig(max_new_tokens=18))


def with_reference(policy: HFPolicy) -> HFPolicy:
    """The same model, with a frozen copy of what it is now as its reference."""
    reference = copy.deepcopy(policy.model)
    return HFPolicy(policy.model, policy.tokenizer, sampling=policy.sampling, reference_model=reference)


def careless_script(scenario: Scenario, rng: random.Random) -> list[str | Message]:
    """What a careless colleague says. The numbers are right, and so is what the colleague does in most conversations.

    The colleague asks for the reason at random, forgets the look-up in three of ten conversations, pays the money back in three
    of ten, whatever the policy says, and is curt in six of ten messages.
    """
    manner, order = scenario["context"]["manner"], scenario["context"]["order"]
    asks_reason = rng.random() < 0.5
    outcome = right_outcome(scenario) if rng.random() < 0.7 else "refund"

    def pick(texts: tuple[str, str]) -> str:
        return texts[rng.random() < 0.6]

    script: list[str | Message] = []
    if manner == "open":
        script += [pick(ASKS_REASON)] if asks_reason else []
    else:
        script += [pick(ASKS_BOTH if asks_reason else ASKS)]
        script += [pick(ASKS)] if manner == "vague" else []
    calls = [("look_up_order", {"order_number": order})] if rng.random() < 0.7 else []
    for name, arguments in [*calls, *right_call(scenario, outcome)]:
        call = {"id": "call00000", "type": "function", "function": {"name": name, "arguments": arguments}}
        script.append({"role": "assistant", "content": "", "tool_calls": [call]})
    return [*script, pick(CLOSINGS[outcome]).format(**scenario["context"])]
