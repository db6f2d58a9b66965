"""The KL to a teacher model at each token, over the teacher's likeliest tokens, from hidden states of both models."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from grpo.distillation.exact import exact_kl, with_rest

from .token_log_probs import all_log_probs_of, in_blocks, num_logits


def kl_to_teacher(
    hidden: Float[Tensor, "M H"],
    head: nn.Module,
    teacher_hidden: Float[Tensor, "M H2"],
    teacher_head: nn.Module,
    *,
    top: int,
    temperature: float = 1.0,
) -> Float[Tensor, " M"]:
    """KL(p || q) at M positions, for p = softmax(head(hidden) / temperature) and the teacher's q, with k + 1 terms.

    The terms are the k tokens that are likeliest under the teacher, and all other tokens as one
    (`grpo.distillation.exact_kl`). The logits are computed in blocks, so that no [M, V] tensor exists, and those of the model
    again in the backward pass. Of the teacher, k + 1 numbers per position are kept.

    Args:
        hidden: Hidden states of the model, with gradient.
        head: Output head of the model.
        teacher_hidden: Hidden states of the teacher at the same positions.
        teacher_head: Output head of the teacher. Its vocabulary may be padded to another size.
        top: Number k of tokens. With k + 1 = V or more, the KL is exact.
        temperature: Divides the logits of both.
    """
    if not len(hidden):
        return hidden.new_zeros(0, dtype=torch.float32)
    size = min(num_logits(head, hidden), num_logits(teacher_head, teacher_hidden))
    num_chosen = min(top, size - 1)  # a rest without a token would have the probability 0

    def of_teacher(hidden: Tensor) -> tuple[Tensor, Tensor]:
        all_log_probs = all_log_probs_of(teacher_head, hidden, temperature)
        chosen = all_log_probs[:, :size].topk(num_chosen, dim=1).indices
        return chosen, with_rest(all_log_probs, chosen)

    def of_model(hidden: Tensor, chosen: Tensor, teacher_log_probs: Tensor) -> tuple[Tensor]:
        all_log_probs = all_log_probs_of(head, hidden, temperature)
        return (exact_kl(with_rest(all_log_probs, chosen), teacher_log_probs),)

    with torch.no_grad():
        chosen, teacher_log_probs = in_blocks(of_teacher, teacher_head, teacher_hidden)
    (kl,) = in_blocks(of_model, head, hidden, chosen.to(hidden.device), teacher_log_probs.to(hidden.device))
    return kl
