"""From prompts to completions: which sampler `HFPolicy` has, what it asks of it, and what it makes of the answer."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from torch import Tensor

from grpo import ActionScores, SampledActions
from grpo.arguments import describe, require_lengths
from grpo.errors import ConfigError, ContractError

from .completions import Completion, completion_mask, padded
from .model.causal_lm import CausalLM
from .options import HFOptions
from .picture_prompts import Ids, distinct
from .policy_arguments import require_known, require_room
from .prompts.control_tokens import whole_characters
from .sampling.continuous import ContinuousSampler
from .sampling.decoding import DecodingSampler
from .sampling.recorded.sampler import RecordedSampler
from .sampling.samplers import (
    ExcludesTokens,
    GivesRows,
    LimitsRows,
    OnRow,
    RowLimit,
    SampledTokens,
    Sampler,
    sample_by_limit,
)
from .sampling.sampling_config import SamplingConfig
from .texts import CompletionTexts

SamplerName = Literal["decoding", "recorded", "generate", "continuous"]
"""The samplers of the trained model in this process."""


def sampler_of(given: Sampler | SamplerName, lm: CausalLM, tokenizer: Any, options: HFOptions) -> Sampler:
    """The sampler of a policy. It does not draw tokens that stand for pictures.

    Raises:
        ConfigError: `given` is neither a name nor a sampler.
    """
    sampler: Sampler
    match given:
        case "decoding" | "generate" | "recorded":
            sampler = (RecordedSampler if given == "recorded" else DecodingSampler)(
                lm,
                tokenizer,
                with_entropy=options.exact_entropy,
                max_rows=options.max_rows_per_decode,
                max_tokens_per_forward=options.max_tokens_per_forward,
                loop="generate" if given == "generate" else "own",
            )
        case "continuous":
            sampler = ContinuousSampler(lm, max_rows=options.max_rows_per_decode)
        case _ if not isinstance(given, str) and hasattr(given, "sample") and hasattr(given, "sync"):
            sampler = given
        case _:
            raise ConfigError(
                "HFPolicy: sampler must be 'decoding', 'recorded', 'generate', 'continuous' or a Sampler, such as "
                f"VLLMSampler(...); got {given!r}."
            )
    if isinstance(sampler, ExcludesTokens):
        sampler.excluded_token_ids = lm.picture_token_ids
    return sampler


def sample_rows(
    sampler: Any,
    lm: CausalLM,
    prompts: Sequence[Ids],
    given: dict[str, Any],
    *,
    end_token_ids: Sequence[int],
    seeds: Sequence[int],
    limits: Sequence[RowLimit] | None,
    on_row: OnRow | None,
) -> SampledTokens:
    """One completion of each of N prompts, with a limit for each row where the sampler has them. See `HFPolicy.sample_tokens`.

    Args:
        sampler: The sampler.
        lm: The policy's model.
        prompts: Token ids of N prompts.
        given: Fields of `SamplingConfig`.
        end_token_ids: Tokens that end a completion.
        seeds: N seeds.
        limits: Where each row ends. None: as `given` says.
        on_row: Called with each row that has ended, by samplers that are `GivesRows`.
    """
    if limits is not None:
        longest = max(limit.max_new_tokens for limit in limits)
        given = given | {"max_new_tokens": longest, "min_new_tokens": min(given["min_new_tokens"], longest)}
    config = SamplingConfig.from_dict(given)
    numbers = [limit.max_new_tokens for limit in limits or [RowLimit.of(config)] * len(prompts)]
    room = lm.max_positions
    lengths = [len(prompt) + number for prompt, number in zip(prompts, numbers, strict=True)]
    require_room(room, lengths, "prompts with max_new_tokens")
    different, places = distinct(prompts)
    size, rest = divmod(len(prompts), len(different))
    if rest or places != [place for place in range(len(different)) for _ in range(size)]:
        different, size = list(prompts), 1
    # an ended row stays in the batch for a while, so each needs room for as many tokens as the longest
    most = max(map(len, prompts)) + config.max_new_tokens
    limits_rows = isinstance(sampler, LimitsRows) and (room is None or most <= room)
    sample: Any = sampler.sample if limits_rows else partial(sample_by_limit, sampler)
    early: dict[str, Any] = {"on_row": on_row} if limits_rows and isinstance(sampler, GivesRows) else {}
    sampled = sample(different, size, config, end_token_ids=end_token_ids, seeds=seeds, limits=limits, **early)
    return sampled if lm.computes_in_float32 else replace(sampled, policy_log_probs=None)


def completions_of(
    sampled: SampledTokens, texts: CompletionTexts, opened: Sequence[str], vocabulary_size: int
) -> list[Completion]:
    """The sampled rows as completions.

    Args:
        sampled: Tokens and log-probs of N rows.
        texts: Decodes the tokens.
        opened: The tag in which the prompt of each row ends, or "".
        vocabulary_size: Number of the model's tokens. Others are refused.
    """
    require_lengths("HFPolicy: the sampler", len(opened), token_ids=sampled.token_ids)
    require_known(vocabulary_size, sampled.token_ids, "sampled")
    rows = zip(
        sampled.token_ids,
        texts(sampled.token_ids),
        sampled.finish_reasons,
        sampled.behaviour_log_probs,
        opened,
        strict=True,
    )
    return [
        Completion(
            token_ids=tuple(token_ids),
            text=text,
            finish_reason=reason,
            behaviour_log_probs=tuple(log_probs),
            opened=tag,
        )
        for token_ids, text, reason, log_probs, tag in rows
    ]


def demonstrated(texts: Sequence[str], tokenizer: Any, end_token_ids: Sequence[int]) -> list[Completion]:
    """Texts as completions that nobody sampled: each has the text's tokens, and an end token if there is one."""
    for text in texts:
        if not isinstance(text, str):
            raise ContractError(f"HFPolicy.demonstrations: texts must be a list of str; got {describe(text)}.")
        if text != whole_characters(text):
            raise ContractError(
                f"HFPolicy.demonstrations: no tokenizer reads half a character, which {describe(text)} has. Cut texts between "
                "characters."
            )
    own = tokenizer.eos_token_id
    ends = [own] if own in end_token_ids else list(end_token_ids)[:1]
    return [
        Completion(
            token_ids=(*tokenizer(text, add_special_tokens=False)["input_ids"], *ends), text=text, finish_reason="end"
        )
        for text in texts
    ]


def with_scores(
    completions: list[Completion], sampled: SampledTokens, size: int, lm: CausalLM, *, mask_truncated: bool
) -> SampledActions:
    """Completions in groups of `size`, with their log-probs at sampling and, for models in float32, their scores."""
    mask = completion_mask(completions, mask_truncated=mask_truncated).to(lm.device)
    width = mask.shape[1]

    def beside(values: Sequence[Sequence[float]]) -> Tensor:
        return padded(values, width).to(mask.device)

    behaviour = beside(sampled.behaviour_log_probs)
    scores = None
    # below float32, decoding and scoring round differently, so the trainer must score the policy itself
    if sampled.policy_log_probs is not None and lm.computes_in_float32:
        scores = ActionScores(
            log_probs=behaviour
            if sampled.policy_log_probs is sampled.behaviour_log_probs
            else beside(sampled.policy_log_probs),
            mask=mask,
            entropy=None if sampled.entropies is None else beside(sampled.entropies),
        )
    num_tokens = sum(len(completion) for completion in completions)
    return SampledActions(
        actions=grouped(completions, size),
        mask=mask,
        behaviour_log_probs=behaviour,
        scores=scores,
        metrics={
            "completions/tokens": float(num_tokens),
            "completions/truncated": float(sum(completion.is_truncated for completion in completions)),
        },
    )


def grouped(completions: list[Completion], size: int) -> list[list[Completion]]:
    """The completions of each prompt."""
    return [completions[begin : begin + size] for begin in range(0, len(completions), size)]
