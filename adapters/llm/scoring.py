"""Log-probs and values of completions. Prompts are computed once for all their completions if the model supports it."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from grpo import ActionScores
from grpo.errors import ConfigError, ContractError

from .model.causal_lm import CausalLM
from .model.packed_groups import hidden_of_packs
from .model.router_balance import RouterBalance
from .model.shared_prompts import hidden_of_whole_rows, hidden_with_shared_prompts
from .model.teacher_kl import kl_to_teacher
from .model.token_log_probs import token_log_probs
from .model.token_trees import Edges, hidden_of_trees
from .model.value_head import ValueHead
from .picture_prompts import Ids, PicturePrompt, has_later_pictures
from .sampling.samplers import Sampler
from .sampling.sampling_config import SamplingConfig

CHECKED_LENGTHS = [((10, 3), 8), ((1, 1), 2)]
"""Lengths of prompts and of completions for the comparison of sampling and scoring with forward passes without padding. The
first batch has padding. The second batch has prompts of one token, which a model that keeps its state between calls would read
as a continuation of the first batch."""
PICTURE_STEPS = 6
"""Length of the completions in the comparison with pictures."""


def score_tokens(
    lm: CausalLM,
    prompts: Sequence[Ids],
    prompt_of_row: Int[Tensor, " N"],
    tokens: Int[Tensor, "N T"],
    mask: Bool[Tensor, "N T"],
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    value_head: ValueHead | None = None,
    is_cut: Bool[Tensor, " N"] | None = None,
    shares_prompts: bool,
    edges: Edges | None = None,
    balance: RouterBalance | None = None,
    teacher: CausalLM | None = None,
    top: int | None = None,
) -> ActionScores:
    """Log-probs, and entropies and values on request, where the mask is True, and 0 elsewhere.

    Args:
        lm: The model.
        prompts: Token ids of B prompts.
        prompt_of_row: Index of the prompt of each row.
        tokens: Token ids of the completions, on the CPU, padded on the right with any token.
        mask: The tokens that count, on the CPU. Tokens that do not count are context of later tokens that do.
        temperature: Divides the logits. A larger value makes the distribution flatter.
        with_entropy: Whether to compute the entropies too.
        value_head: Computes the value of the state before each token that counts. None: there are no values.
        is_cut: Rows that would have gone on after their last token that counts, on the CPU. Their final value is that of the
            state after this token. None: no row would have gone on.
        shares_prompts: Whether to compute each prompt once for all its rows. With gradient checkpointing, once per pack.
            Prompts that pictures follow are computed for each row.
        edges: The edges that the rows are, if they are edges of trees. Each is computed once for all that continue it.
        balance: Computes the auxiliary loss of a mixture of experts. None: there is none.
        teacher: The model to which the KL is computed. None: there is none.
        top: Number of the teacher's likeliest tokens over which the KL is computed, see `kl_to_teacher`.
    """
    ends = mask.flip(1).cumsum(1).gt(0).sum(1)
    if is_cut is None or value_head is None or not value_head.bootstrap_truncated:
        is_cut = torch.zeros(len(mask), dtype=torch.bool)
    cut = (is_cut & (ends > 0)).nonzero().squeeze(1)
    if len(cut):
        tokens = nn.functional.pad(tokens, (0, 1))  # a place for the state after the last token

    def hidden_by(lm: CausalLM, shares_prompts: bool) -> Float[Tensor, "N T H"]:
        if edges is not None:
            return hidden_of_trees(lm, prompts, prompt_of_row, edges.parent, tokens, edges.lengths)
        if not shares_prompts or has_later_pictures(prompts):
            return hidden_of_whole_rows(lm, prompts, prompt_of_row, tokens, ends)
        if lm.checkpoints_gradients:
            return hidden_of_packs(lm, prompts, prompt_of_row, tokens)
        return hidden_with_shared_prompts(lm, prompts, prompt_of_row, tokens)

    with nullcontext() if balance is None else balance.recording():
        hidden = hidden_by(lm, shares_prompts)
    auxiliary_loss = None
    if balance is not None:
        hidden, auxiliary_loss = balance.split(hidden, nn.functional.pad(mask, (0, hidden.shape[1] - mask.shape[1])))
        auxiliary_loss = auxiliary_loss[:, : mask.shape[1]]
    rows, columns = mask.nonzero(as_tuple=True)
    positions = (rows * mask.shape[1] + columns).to(hidden.device)

    def at(hidden: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        return hidden.flatten(0, 1).index_select(0, (rows * hidden.shape[1] + columns).to(hidden.device))

    counted = at(hidden, rows, columns)  # the heads are applied at these positions only
    log_probs, entropy = token_log_probs(
        counted, lm.head, tokens[rows, columns].to(hidden.device), temperature=temperature, with_entropy=with_entropy
    )

    def on_steps(values: Tensor) -> Tensor:
        return values.new_zeros(mask.numel()).index_copy(0, positions, values).view(mask.shape)

    kl = values = final_values = None
    if teacher is not None and top is not None:
        with torch.no_grad():
            its = at(hidden_by(teacher, teacher.shares_prompts), rows, columns)
        kl = on_steps(kl_to_teacher(counted, lm.head, its, teacher.head, top=top, temperature=temperature))
    if value_head is not None:
        values = on_steps(value_head(counted).to(hidden.device))
        after = value_head(at(hidden, cut, ends[cut])).detach().to(hidden.device)
        final_values = values.new_zeros(len(mask)).index_copy(0, cut.to(hidden.device), after)
    return ActionScores(
        log_probs=on_steps(log_probs),
        mask=mask.to(hidden.device),
        entropy=None if entropy is None else on_steps(entropy),
        values=values,
        final_values=final_values,
        kl=kl,
        auxiliary_loss=auxiliary_loss,
    )


def score_forked_rows(
    lm: CausalLM,
    prompts: Sequence[Ids],
    prompt_of_row: Int[Tensor, " N"],
    tokens: Sequence[Sequence[int]],
    mask: Bool[Tensor, "N T"],
    forks: Sequence[Sequence[int]],
    *,
    is_cut: Bool[Tensor, " N"],
    **options: Any,
) -> ActionScores:
    """Scores of rows that fork. Tokens before a fork are computed once for all rows that have them, forward and backward.

    Args:
        lm: The model.
        prompts: Token ids of B prompts.
        prompt_of_row: Index of the prompt of each row.
        tokens: Token ids of each row, without padding.
        mask: The tokens that count, on the CPU.
        forks: Numbers of tokens after which each row may be equal to other rows up to there.
        is_cut: Rows that would have gone on after their last token that counts, on the CPU.
        options: Options of `score_tokens`.
    """
    edges = Edges.of_rows(prompt_of_row, tokens, mask, forks)
    cut = (is_cut & mask.any(1)).nonzero().squeeze(1)
    last_places = torch.tensor([len(tokens[row]) - 1 for row in cut.tolist()], dtype=torch.int64)
    last = edges.place[cut, last_places] // max(edges.tokens.shape[1], 1)  # the last edge of each cut row
    cut_edges = torch.zeros(len(edges.prompt), dtype=torch.bool).index_fill(0, last, True)
    scores = score_tokens(
        lm,
        prompts,
        edges.prompt,
        edges.tokens,
        edges.mask,
        is_cut=cut_edges,
        edges=edges,
        shares_prompts=True,
        **options,
    )
    place, counts = edges.place.flatten().to(scores.mask.device), mask.to(scores.mask.device)

    def of_rows(values: Tensor | None) -> Tensor | None:  # the gradient of a shared token is the sum over its rows
        return None if values is None else values.flatten().index_select(0, place).view(mask.shape) * counts

    log_probs, final_values = of_rows(scores.log_probs), scores.final_values
    assert log_probs is not None
    if final_values is not None:
        cut, last = cut.to(final_values.device), last.to(final_values.device)
        final_values = final_values.new_zeros(len(mask)).index_copy(0, cut, final_values[last])
    return ActionScores(
        log_probs=log_probs,
        mask=counts,
        entropy=of_rows(scores.entropy),
        values=of_rows(scores.values),
        final_values=final_values,
        kl=of_rows(scores.kl),
    )


def check_scores(lm: CausalLM, sampler: Sampler | None) -> None:
    """Check that sampling and scoring a batch give the log-probs of forward passes of each row alone.

    If a model with windows or states fails with shared prompts, it computes each row as a whole from now on, and is checked
    again. The check uses no global random numbers.
    """
    if lm.shares_prompts and not lm.has_plain_cache:
        try:
            _check_scores(lm, sampler)
            return
        except (ConfigError, ContractError):  # recovery: each row as a whole
            lm.shares_prompts = False
    _check_scores(lm, sampler)


def check_pictures(lm: CausalLM, sampler: Sampler | None, prompts: Sequence[Ids]) -> None:
    """Check prompts with and without pictures as `check_scores` does, and that the model reads the pictures.

    A model that fails with shared prompts computes each row as a whole from now on, and is checked again.
    """
    longest, room = max(map(len, prompts)), lm.max_positions
    if room is not None and longest + PICTURE_STEPS > room:
        raise ContractError(
            f"HFPolicy: a small picture with {PICTURE_STEPS} tokens behind it must fit into the model's {room} positions; the "
            f"picture's prompt has {longest} tokens. Lower the size of pictures in the processor."
        )
    if lm.shares_prompts:
        try:
            _check_batches(lm, sampler, [(prompts, PICTURE_STEPS)])
        except (ConfigError, ContractError):  # recovery: each row as a whole
            lm.shares_prompts = False
    if not lm.shares_prompts:
        _check_batches(lm, sampler, [(prompts, PICTURE_STEPS)])
    first = next(prompt for prompt in prompts if isinstance(prompt, PicturePrompt))
    fields = {name: values.flip(-1) if values.is_floating_point() else values for name, values in first.fields.items()}
    with lm.on_trial():
        seen, flipped = (
            lm.log_probs_alone(prompt, [0] * PICTURE_STEPS) for prompt in (first, PicturePrompt(first, fields))
        )
    if torch.equal(seen, flipped):
        raise ContractError(
            f"HFPolicy: the model must read its pictures; {type(lm.plain).__name__} gives a picture and its mirror image equal "
            f"log-probs. The processor's fields, {sorted(fields)}, may be those of another model. Use the model's processor."
        )


def _check_scores(lm: CausalLM, sampler: Sampler | None) -> None:
    _check_batches(lm, sampler, [_prompts_of(lm, *lengths) for lengths in CHECKED_LENGTHS])


def _check_batches(lm: CausalLM, sampler: Sampler | None, given: Sequence[tuple[Sequence[Ids], int]]) -> None:
    with lm.on_trial():
        batches = [_drawn(lm, sampler, *batch) for batch in given]  # before scoring, which may clear a state
        for prompts, tokens, sampled in batches:
            alone = torch.stack([lm.log_probs_alone(*row) for row in zip(prompts, tokens.tolist(), strict=True)]).cpu()
            rows, mask = torch.arange(len(prompts)), torch.ones(tokens.shape, dtype=torch.bool)
            scored = score_tokens(lm, prompts, rows, tokens, mask, shares_prompts=lm.shares_prompts).log_probs.cpu()
            if sampled is not None:
                _require_equal(lm, "sampling", sampled, alone)
            _require_equal(lm, "scoring", scored, alone)


def _prompts_of(lm: CausalLM, lengths: tuple[int, ...], steps: int) -> tuple[list[list[int]], int]:
    """Prompts of these lengths, and the number of steps for which they leave room."""
    limit = lm.max_positions or 1000
    steps = min(steps, max(limit // 2, 1))
    prompts = [
        [(7 * row + step + 1) % lm.vocabulary_size for step in range(length)] for row, length in enumerate(lengths)
    ]
    return [prompt[: max(limit - steps, 1)] for prompt in prompts], steps


def _drawn(
    lm: CausalLM, sampler: Sampler | None, prompts: Sequence[Ids], steps: int
) -> tuple[Sequence[Ids], Int[Tensor, "N T"], Float[Tensor, "N T"] | None]:
    """The prompts, completions of this many steps, and the log-probs of the completions at sampling."""
    if sampler is None:
        tokens = torch.arange(len(prompts) * steps).view(len(prompts), steps) % lm.vocabulary_size
        excluded = torch.isin(tokens, torch.tensor(lm.picture_token_ids, dtype=torch.int64))
        return prompts, tokens.masked_fill(excluded, 0), None
    config = SamplingConfig(max_new_tokens=steps)
    sampled = sampler.sample(prompts, 1, config, end_token_ids=[], seeds=range(len(prompts)))
    return prompts, torch.tensor(sampled.token_ids), torch.tensor(sampled.behaviour_log_probs)


def _require_equal(lm: CausalLM, what: str, found: Float[Tensor, "N T"], alone: Float[Tensor, "N T"]) -> None:
    gaps = (found - alone).abs()
    # a few tokens whose experts are others are no fault
    gap = (gaps.mean() if lm.may_choose_other_experts else gaps.max()).item()
    tolerance = 0.01 if lm.computes_in_float32 else 0.5
    if not gap < tolerance:  # also if it is NaN
        raise ConfigError(
            f"HFPolicy: sampling and scoring must use the same distribution; with {type(lm.plain).__name__}, the log-prob of a "
            f"token differs by {gap:.2g} between {what} in a batch and one forward pass of its row alone (rounding explains "
            f"{tolerance} at most). The model ignores position ids or the padding mask, or its cache or state does not work in "
            "transformers. Use another architecture or another version of transformers."
        )
