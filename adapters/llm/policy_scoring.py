"""From completions to scores: how `HFPolicy` plans and makes the forward passes over given completions."""

import logging
from collections.abc import Sequence
from typing import Any

import torch

from grpo import ActionScores
from grpo.arguments import describe, require_lengths
from grpo.errors import ContractError

from .completions import Completion, completion_mask
from .micro_batches import plan_by_tokens
from .model.causal_lm import CausalLM
from .model.packed_groups import can_pack, pack_of_rows
from .model.router_balance import RouterBalance
from .options import HFOptions
from .picture_prompts import Ids, distinct, followed_by, has_later_pictures
from .policy_arguments import require_known, require_room
from .scoring import score_forked_rows, score_tokens


class CompletionScorer:
    """Scores completions under the trained model, and under the model of the KL term.

    Args:
        lm: The trained model.
        reference: The frozen model of the KL term. None: there is none.
        options: The policy's options.
        temperature: Temperature of the scores.
    """

    def __init__(self, lm: CausalLM, reference: CausalLM | None, options: HFOptions, temperature: float) -> None:
        self._lm, self._reference = lm, reference
        self._options, self._temperature = options, temperature
        self._balance = RouterBalance(lm, options.router_aux_loss_coef) if options.router_aux_loss_coef else None
        lm.balances_experts = self._balance is not None
        self._can_pack: bool | None = None

    def scores(
        self,
        prompts: Sequence[Ids],
        actions: Sequence[Completion],
        *,
        lm: CausalLM | None = None,
        log_probs_only: bool = False,
    ) -> ActionScores:
        """Scores of N completions. Equal prompts are computed once.

        Args:
            prompts: The prompt of each completion.
            actions: N completions.
            lm: The model. None: the trained model.
            log_probs_only: Whether to leave out entropies, values and losses beside the policy's.
        """
        prompts, prompt_of_row = distinct(prompts)
        lm = lm or self._lm
        require_lengths("HFPolicy", len(prompt_of_row), actions=actions)
        _require_completions(actions)
        require_known(self._lm.vocabulary_size, [action.token_ids for action in actions], "scored")
        lengths = [len(prompts[prompt]) + len(c) for prompt, c in zip(prompt_of_row, actions, strict=True)]
        require_room(self._lm.max_positions, lengths, "prompts with their completions")
        mask = completion_mask(actions, mask_truncated=self._options.mask_truncated)
        width, scored = mask.shape[1], self._scored_tokens(actions)
        given: dict[str, Any] = {
            "temperature": self._temperature,
            "with_entropy": self._options.exact_entropy and not log_probs_only,
            "value_head": None if log_probs_only else lm.value_head,
            "balance": self._balance if torch.is_grad_enabled() and not log_probs_only else None,
            "is_cut": torch.tensor([action.is_truncated for action in actions], dtype=torch.bool),
        }
        teacher = None
        if self._options.exact_kl_top is not None and torch.is_grad_enabled() and not log_probs_only:
            teacher = self._reference
            given |= {"teacher": teacher, "top": self._options.exact_kl_top}
        shares_prompts = self._shares_prompts if lm is self._lm else lm.shares_prompts
        rows = torch.tensor(prompt_of_row)
        forks = [action.forks for action in actions]
        shares_forks = lm.shares_forks and (teacher is None or teacher.shares_forks)
        if shares_prompts and shares_forks and any(forks) and width > 0 and not has_later_pictures(prompts):
            return score_forked_rows(lm, prompts, rows, scored, mask, forks, **given)
        padding = [[*tokens, *[0] * (width - len(tokens))] for tokens in scored]
        tokens = torch.tensor(padding, dtype=torch.int64).view(mask.shape)
        return score_tokens(lm, prompts, rows, tokens, mask, shares_prompts=shares_prompts, **given)

    def plan(self, prompts: Sequence[Ids], actions: Sequence[Completion]) -> list[Sequence[int]]:
        """Rows of each forward pass, within `max_tokens_per_forward` positions and with little padding.

        Rows with pictures behind their prompts have passes of their own, because the rows of such a pass share nothing.
        """
        _require_completions(actions)
        plan: list[Sequence[int]] = []
        for is_whole in (False, True):
            rows = [row for row, prompt in enumerate(prompts) if has_later_pictures([prompt]) is is_whole]
            if rows:
                shares = self._shares_prompts and not is_whole
                parts = self._planned([prompts[row] for row in rows], [actions[row] for row in rows], shares=shares)
                plan += [[rows[place] for place in part] for part in parts]
        return plan

    def _planned(self, prompts: Sequence[Ids], actions: Sequence[Completion], *, shares: bool) -> list[Sequence[int]]:
        # what rows share before their first fork counts once, as a prompt does
        shares_forks = self._lm.shares_forks
        shared = [action.token_ids[: min(action.forks, default=0) if shares_forks else 0] for action in actions]
        pairs = zip(prompts, shared, strict=True)
        different, given = distinct([followed_by(prompt, tokens) for prompt, tokens in pairs])
        own = zip(self._scored_tokens(actions), shared, strict=True)
        lengths = [max(len(tokens) - len(before), 0) for tokens, before in own]
        prompt_lengths = [len(prompt) for prompt in different]
        if shares and self._lm.checkpoints_gradients:  # each pack computes its prompt
            given, prompt_of_pack = pack_of_rows(prompt_lengths, given, lengths, self._lm.embedding_size)
            prompt_lengths = [prompt_lengths[prompt] for prompt in prompt_of_pack]
        limit = self._options.max_tokens_per_forward
        return plan_by_tokens(prompt_lengths, given, lengths, limit, shares_prompts=shares)

    def _scored_tokens(self, actions: Sequence[Completion]) -> list[tuple[int, ...]]:
        """The tokens of each completion that count in the loss. A masked completion has no such tokens and is not forwarded."""
        masks = self._options.mask_truncated
        return [() if masks and action.is_truncated else action.token_ids for action in actions]

    @property
    def _shares_prompts(self) -> bool:
        """Whether a prompt is computed once for several completions: by a cache, or in packs with gradient checkpointing."""
        if not self._lm.shares_prompts or not self._lm.checkpoints_gradients:
            return self._lm.shares_prompts
        if self._can_pack is None:
            self._can_pack = can_pack(self._lm)
            if not self._can_pack:
                logging.getLogger("grpo").warning(
                    "HFPolicy: with gradient checkpointing, layers store no keys and values, so "
                    f"{type(self._lm.plain).__name__} computes the prompt for each row. Without it, the prompt is computed "
                    "once per group. (This message appears once.)"
                )
        return self._can_pack


def _require_completions(actions: Sequence[Completion]) -> None:
    for action in actions:
        if not isinstance(action, Completion):
            raise ContractError(
                f"HFPolicy: actions must be Completions; got {describe(action)}. Pass what it generated, or make "
                "demonstrations of texts with demonstrations(states, texts)."
            )
