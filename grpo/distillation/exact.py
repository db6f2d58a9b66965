"""The exact KL to a teacher, from the log-probs of every choice."""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from grpo._common.checks import require_count
from grpo._common.conversion import describe
from grpo.errors import ContractError

ROUNDING = 0.1
"""Largest logarithm of the sum of all probabilities that half precision may make of 0."""


def exact_kl(
    log_probs: Float[Tensor, "*steps K"], teacher_log_probs: Float[Tensor, "*steps K"], *, top: int | None = None
) -> Float[Tensor, "*steps"]:
    """KL(pi || teacher) of each step, from the log-probs of all K choices. For `ActionScores.kl` and `kl_estimator="exact"`.

        KL = sum over choices a of pi(a) (log pi(a) - log teacher(a))

    With `top=k`, the sum has k + 1 terms: the k choices that are likeliest under the teacher, and the other choices as one,
    whose probability is the sum of theirs. This is at most the exact KL, and equal to it for k = K. Joining choices never
    increases a KL (the log-sum inequality).

    The expected gradient of `kl_k2` is the same, with more noise: it sees one sampled choice per step. No gradient flows into
    the teacher.

    Args:
        log_probs: Log-probs of all choices under the policy, with gradient. They sum to 1 as probabilities.
        teacher_log_probs: Log-probs of the same choices under the teacher.
        top: Number k of choices that are compared one by one. Larger: nearer to the exact KL. None: all K.

    Raises:
        ContractError: The arguments are no tensors of one shape, or probabilities do not sum to 1 (found on the CPU only).
        ConfigError: `top` is not a positive integer.

    Example:
        >>> pi, teacher = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.8, 0.1, 0.1])
        >>> round(exact_kl(pi.log(), teacher.log()).item(), 4)  # .5 log(.5 / .8) + 2 x .25 log(.25 / .1)
        0.2231
        >>> round(exact_kl(pi.log(), teacher.log(), top=1).item(), 4)  # .5 log(.5 / .8) + .5 log(.5 / .2)
        0.2231

    Source:
        Agarwal et al. 2024 (GKD), arXiv:2306.13649, eq. 3; one term for the rest: Cover & Thomas 2006, theorem 2.7.1.
    """
    given: tuple[Any, Any] = (log_probs, teacher_log_probs)
    are_tensors = all(isinstance(each, Tensor) and each.is_floating_point() and each.dim() for each in given)
    if not are_tensors or log_probs.shape != teacher_log_probs.shape:
        raise ContractError(
            f"exact_kl: log_probs and teacher_log_probs must have one shape, [..., K]; got {describe(log_probs)} and "
            f"{describe(teacher_log_probs)}. Pass the log-probs of all choices, in the same order."
        )
    teacher_log_probs = teacher_log_probs.detach()
    _require_whole(log_probs=log_probs, teacher_log_probs=teacher_log_probs)
    if top is not None:
        require_count("exact_kl: top", top)
        if top < log_probs.shape[-1]:
            chosen = teacher_log_probs.topk(top, dim=-1).indices
            log_probs, teacher_log_probs = with_rest(log_probs, chosen), with_rest(teacher_log_probs, chosen)
    is_possible = log_probs > -torch.inf  # 0 log 0 is 0
    difference = torch.where(is_possible, log_probs, 0.0) - torch.where(is_possible, teacher_log_probs, 0.0)
    return (log_probs.exp() * difference).sum(-1)


def _require_whole(**given: Float[Tensor, "*steps K"]) -> None:
    """Refuse logits, and choices that were left out. Other devices than the CPU would have to wait for the answer."""
    for name, log_probs in given.items():
        if log_probs.device.type != "cpu" or not log_probs.numel() or torch.compiler.is_compiling():
            continue
        totals = log_probs.detach().logsumexp(-1).flatten()
        if bool((wrong := totals.abs() > ROUNDING).any()):
            raise ContractError(
                f"exact_kl: {name} must be the log-probs of all choices, whose probabilities sum to 1; got a sum of "
                f"{totals[wrong][0].exp().item():.3g}. Pass logits.log_softmax(-1)."
            )


def with_rest(log_probs: Float[Tensor, "*steps K"], chosen: Tensor) -> Float[Tensor, "*steps k1"]:
    """The log-probs of the k chosen choices, and behind them the logarithm of what the other choices have together."""
    others = log_probs.scatter(-1, chosen, -torch.inf)
    is_possible = (others > -torch.inf).any(-1, keepdim=True)  # logsumexp of -inf alone has the gradient NaN
    rest = torch.where(is_possible, torch.where(is_possible, others, 0.0).logsumexp(-1, keepdim=True), -torch.inf)
    return torch.cat([log_probs.gather(-1, chosen), rest], dim=-1)
