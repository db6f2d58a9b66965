"""A report of what rounding does to a mixture of experts: other experts in sampling than in scoring."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .completions import Completion, padded
from .model.causal_lm import CausalLM

EXPLAINED = 0.05
"""Largest difference of a log-prob that half precision gives with the same experts. Tiny dense models reach 0.02."""


class ExpertRounding:
    """Compares log-probs at sampling with those of the first scores after it, and logs once if they differ."""

    def __init__(self, lm: CausalLM) -> None:
        self._lm = lm
        self._is_due = self._was_logged = False

    def sampled(self, is_exact: bool) -> None:
        """Note that rows were sampled. `is_exact`: from the policy itself, without truncation or penalties."""
        self._is_due = is_exact and not self._was_logged and self._lm.may_choose_other_experts

    def scored(self, actions: Sequence[Completion], log_probs: Tensor, mask: Tensor) -> None:
        """Compare the scores with the samples, if no weights can have changed and no dropout is on."""
        if not self._is_due:
            return
        given = [action.behaviour_log_probs for action in actions]
        if None in given:
            return
        self._is_due = False
        if any(isinstance(part, nn.Dropout) and part.training and part.p > 0 for part in self._lm.model.modules()):
            return
        behaviour = padded([own or () for own in given], mask.shape[1]).to(mask.device)
        gaps = (behaviour - log_probs.detach())[mask].abs()
        if not len(gaps) or gaps.max() <= EXPLAINED:
            return
        self._was_logged = True
        share = (gaps > EXPLAINED).to(torch.float32).mean()
        logging.getLogger("grpo").warning(
            f"HFPolicy: {type(self._lm.plain).__name__} is a mixture of experts in half precision, and rounding chooses other "
            f"experts in scoring than in sampling: the log-prob of a token differs by up to {gaps.max():.2g}, and that of "
            f"{share:.2%} of {len(gaps)} tokens by more than {EXPLAINED}. Weigh such tokens with "
            "ObjectiveConfig(sampler_correction='truncate'), or train in float32. (This message appears once.)"
        )
