"""Options of `HFPolicy`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from grpo.arguments import Settings, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class HFOptions(Settings):
    """Options of an `HFPolicy` that are plain values.

    Raises:
        ConfigError: A value is not allowed.
    """

    prompt_column: str = "prompt"
    """Column with the prompt, for states that are rows of a data set."""
    reference: Literal["start", "base"] = "start"
    """What a model with an adapter gives as the reference of a KL term. "start": the model as training begins: without its
    adapter if the adapter is new, and with a copy of the trained weights otherwise. "base": the model without its adapter, even
    if the adapter was trained before."""
    end_token_ids: tuple[int, ...] | None = None
    """Tokens that end a completion. None uses the end-of-sequence tokens of the tokenizer and of the model's generation
    config."""
    exact_entropy: bool = False
    """Whether scores include the entropy of every step. It costs one more pass over the logits."""
    router_aux_loss_coef: float = setting(0.0, at_least=0)
    """Coefficient of a mixture of experts' load-balancing loss, over the tokens of each row that count. A larger value keeps
    the experts more equally busy, and moves the policy more. 0: there is no such loss. TRL's default is the model's."""
    exact_kl_top: int | None = setting(None, at_least=1)
    """For `objective.kl_estimator="exact"`: number k of tokens over which the KL to `reference_model` is computed at each step,
    those that are likeliest under it. All other tokens count as one, so that the KL is a little too small. A larger number is
    nearer to the exact KL and takes more memory. Each update makes a forward pass of the reference, and computes the logits
    once more. None: scores have no KL."""
    mask_truncated: bool = False
    """Whether completions that reached `max_new_tokens` are excluded from the loss (DAPO, arXiv:2503.14476)."""
    keep_special_tokens: bool = False
    """Whether `Completion.text` has special tokens, such as a `<think>` that is one, except those that end, begin or pad.
    Without them, a reward for such a format can never be earned."""
    max_tokens_per_forward: int = setting(16_384, at_least=1)
    """Maximum number of positions per forward pass in scoring and training, padding and prompts included, and of shared prompts
    in decoding. A larger number is faster on a GPU and uses more memory."""
    max_rows_per_decode: int | None = setting(None, at_least=1)
    """Maximum number of rows decoded together. When a row ends, the next one takes its place. A smaller number needs less
    memory and takes more time. None decodes all."""
    chat_template_options: Mapping = field(default_factory=dict)
    """Options of the chat template, for prompts that are chat messages, for example `{"enable_thinking": False}`."""
