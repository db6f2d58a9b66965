"""Log-probs of given tokens from hidden states. The output head runs in blocks, forward and backward.

No [N, T, V] tensor ever exists. For each block of positions, only the tokens' log-probs and, on request, the entropies are
kept. The backward pass computes the logits of the block again, except for the first blocks on a CPU.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

BLOCK_BYTES = 31 * 2**20
"""Bytes of float32 logits per block on a CPU. The C library returns memory of 32 MiB or more to the system at once, so larger
blocks would cost page faults each time."""
GPU_BLOCK_BYTES = 256 * 2**20
"""Bytes of float32 logits per block on other devices: enough to keep a GPU busy, and small compared with other memory."""
KEPT_BYTES = 256 * 2**20
"""Bytes of logits that a CPU keeps for the backward pass, where each product with the head takes a sixth of an update. A GPU
keeps none: the product takes little time there."""


def token_log_probs(
    hidden: Float[Tensor, "M H"],
    head: nn.Module,
    tokens: Int[Tensor, " M"],
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
) -> tuple[Float[Tensor, " M"], Float[Tensor, " M"] | None]:
    """Log-prob of each token and entropy, for p = softmax(head(hidden) / temperature), in float32 or better.

    With p the softmax, y the token and H the entropy (temperature 1):
    d log p(y) / d logits = onehot(y) - p,   dH / d logits = -p (log p + H).

    Args:
        hidden: Hidden states of M positions of any rows, in any order.
        head: Output head. A plain `nn.Linear` computes its gradient in blocks. Any other head, and a head with hooks, is called
            as a module, with gradient checkpointing.
        tokens: Chosen token at each position.
        temperature: Divides the logits. A larger value makes the distribution flatter.
        with_entropy: Whether to compute the entropies too.

    Returns:
        The log-probs, and the entropies (None unless requested).
    """
    if type(head) is nn.Linear and not is_intercepted(head):
        weight: Tensor = head.weight
        bias: Tensor | None = head.bias
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
            hidden, weight = hidden.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        log_probs, entropy = _LinearHead.apply(hidden, weight, bias, tokens, temperature, with_entropy)
    else:
        log_probs, entropy = _checkpointed(hidden, head, tokens, temperature, with_entropy)
    return log_probs, entropy if with_entropy else None


def is_intercepted(layer: nn.Module) -> bool:
    """Whether a call of the head does more than its class does: it has hooks, or a `forward` of its own (accelerate)."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return any(hooks) or "forward" in vars(layer)


def blocks(count: int, vocabulary_size: int, device: torch.device) -> Iterator[slice]:
    """Divide `range(count)` into slices (at least one) whose float32 logits fit into one block on this device."""
    step = max(1, (BLOCK_BYTES if device.type == "cpu" else GPU_BLOCK_BYTES) // (4 * vocabulary_size))
    return (slice(start, min(start + step, count)) for start in range(0, max(count, 1), step))


def wide(logits: Float[Tensor, "M V"], temperature: float) -> Float[Tensor, "M V"]:
    """`logits / temperature` in float32 or better. The argument may be overwritten."""
    logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    return logits if temperature == 1 else logits.div_(temperature)


class _LinearHead(torch.autograd.Function):
    """Log-probs and entropies of a linear head in blocks. Few of their values are kept for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, tokens: Tensor, temperature: float, entropy: bool
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        log_probs = hidden.new_empty(len(tokens), dtype=dtype)
        normaliser = torch.empty_like(log_probs)
        entropies = torch.empty_like(log_probs) if entropy else log_probs.new_empty(0)
        left = KEPT_BYTES if hidden.device.type == "cpu" and any(ctx.needs_input_grad) else 0
        ctx.kept = []
        for block in blocks(len(tokens), len(weight), hidden.device):
            logits = wide(nn.functional.linear(hidden[block], weight, bias), temperature)
            all_log_probs = logits.log_softmax(1)  # one pass over the logits; logsumexp takes four
            log_probs[block] = all_log_probs.gather(1, tokens[block, None]).squeeze(1)
            normaliser[block] = logits.gather(1, tokens[block, None]).squeeze(1) - log_probs[block]
            if entropy:
                entropies[block] = -(all_log_probs.exp() * all_log_probs).sum(1)
            left -= logits.nbytes
            if left >= 0:
                ctx.kept.append(logits)
        ctx.save_for_backward(hidden, weight, bias, tokens, normaliser, entropies)
        ctx.temperature = temperature
        ctx.set_materialize_grads(False)
        return log_probs, entropies

    @staticmethod
    def backward(ctx: Any, log_prob_slopes: Tensor | None, entropy_slopes: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, tokens, normaliser, entropies = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        of_hidden = torch.empty_like(hidden) if needs_hidden else None
        # the blocks' gradients are summed in float32
        of_weight = torch.zeros_like(weight, dtype=normaliser.dtype) if needs_weight else None
        of_bias = torch.zeros_like(bias, dtype=normaliser.dtype) if needs_bias else None
        kept, ctx.kept = ctx.kept, []  # they are overwritten, so another backward pass computes them
        for block in blocks(len(tokens), len(weight), hidden.device):
            logits = kept.pop(0) if kept else wide(nn.functional.linear(hidden[block], weight, bias), ctx.temperature)
            slopes = _slopes_of_logits(
                logits.sub_(normaliser[block, None]),
                tokens[block],
                None if log_prob_slopes is None else log_prob_slopes[block],
                None if entropy_slopes is None or not len(entropies) else entropy_slopes[block],
                entropies[block] if len(entropies) else entropies,
            )
            if ctx.temperature != 1:
                slopes.div_(ctx.temperature)
            if of_bias is not None:
                of_bias += slopes.sum(0)
            slopes = slopes.to(weight.dtype)
            if of_hidden is not None:
                torch.mm(slopes, weight, out=of_hidden[block])
            if of_weight is not None:
                if of_weight.dtype == slopes.dtype:
                    of_weight.addmm_(slopes.t(), hidden[block])
                elif of_weight.is_cuda:  # the products of float32 copies would not use the tensor cores
                    of_weight += torch.mm(slopes.t(), hidden[block], out_dtype=of_weight.dtype)
                else:
                    of_weight.addmm_(slopes.t().to(of_weight.dtype), hidden[block].to(of_weight.dtype))
        if of_weight is not None:
            of_weight = of_weight.to(weight.dtype)
        return of_hidden, of_weight, None if of_bias is None else of_bias.to(bias.dtype), None, None, None


def _slopes_of_logits(
    all_log_probs: Tensor, tokens: Tensor, of_log_probs: Tensor | None, of_entropy: Tensor | None, entropy: Tensor
) -> Tensor:
    """Gradient of the logits, from the gradients of log-probs and entropies. `all_log_probs` is overwritten."""
    if of_entropy is None:
        assert of_log_probs is not None
        slopes = all_log_probs.exp_().mul_(-of_log_probs[:, None])
    else:
        probs = all_log_probs.exp()
        slopes = all_log_probs.add_(entropy[:, None]).mul_(-of_entropy[:, None])
        if of_log_probs is not None:
            slopes -= of_log_probs[:, None]
        slopes *= probs
    if of_log_probs is not None:
        slopes.scatter_add_(1, tokens[:, None], of_log_probs[:, None].to(slopes.dtype))
    return slopes


def _checkpointed(
    hidden: Tensor, head: nn.Module, tokens: Tensor, temperature: float, with_entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """Log-probs and entropies of any other head, such as a quantised head or a head with LoRA, with gradient checkpointing."""

    def of_block(hidden: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
        all_log_probs = all_log_probs_of(head, hidden, temperature)
        log_probs = all_log_probs.gather(1, tokens[:, None]).squeeze(1)
        return (log_probs, -(all_log_probs.exp() * all_log_probs).sum(1)) if with_entropy else (log_probs,)

    log_probs, *entropy = in_blocks(of_block, head, hidden, tokens)
    return log_probs, entropy[0] if entropy else None


def all_log_probs_of(head: nn.Module, hidden: Float[Tensor, "M H"], temperature: float) -> Float[Tensor, "M V"]:
    """Log-probs of all tokens at M positions, in float32 or better."""
    return (head(hidden).to(torch.promote_types(hidden.dtype, torch.float32)) / temperature).log_softmax(1)


def in_blocks(
    of_block: Callable[..., tuple[Tensor, ...]], head: nn.Module, hidden: Float[Tensor, "M H"], *others: Tensor
) -> tuple[Tensor, ...]:
    """Call `of_block(hidden, *others)` on blocks of the M positions, with gradient checkpointing, and join what it returns."""
    vocabulary_size = num_logits(head, hidden)
    has_dropout = head.training and any(getattr(part, "p", 0) for part in head.modules())
    parts = []
    for block in blocks(len(hidden), vocabulary_size, hidden.device):
        arguments = hidden[block], *(values[block] for values in others)
        if torch.is_grad_enabled():
            parts.append(
                torch.utils.checkpoint.checkpoint(
                    of_block, *arguments, use_reentrant=False, preserve_rng_state=has_dropout
                )
            )
        else:
            parts.append(of_block(*arguments))
    return tuple(torch.cat(values) for values in zip(*parts, strict=True))


def num_logits(head: nn.Module, hidden: Float[Tensor, "M H"]) -> int:
    """Number of logits of an output head per position."""
    size: int = getattr(head, "out_features", None) or head(hidden[:1].detach()).shape[-1]
    return size
