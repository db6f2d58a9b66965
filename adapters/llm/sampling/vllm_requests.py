"""Requests and answers of vLLM, shared by both vLLM samplers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from adapters.llm.completions import FinishReason
from adapters.llm.picture_prompts import Ids, PicturePrompt
from grpo.errors import ConfigError

from .samplers import RowLimit, SampledTokens, SamplerError
from .sampling_config import SamplingConfig

LOWEST_BIAS = -100.0
"""The lowest bias of a logit that vLLM accepts. The probability of the token is then that of its logit, times 4e-44."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """vLLM's answer for one completion."""

    token_ids: Sequence[int]
    """The sampled tokens, including the token that ended the completion."""
    log_probs: Sequence[float]
    """Log-prob of each token under the sampling distribution."""
    finish_reason: str | None
    """vLLM's finish reason: "stop", "length", or another value after a failure."""
    stop_reason: int | str | None
    """The token or the string that ended the completion. None if neither did."""
    prompt_token_ids: Sequence[int] | None = None
    """The prompt as vLLM read it. None: not reported."""


def request_settings(config: SamplingConfig, end_token_ids: Sequence[int]) -> dict[str, Any]:
    """Sampling settings under vLLM's names, which are the same in `SamplingParams` and over HTTP, without the seed.

    All settings are given, because a server takes missing settings from the model's `generation_config.json`.
    """
    if config.xtc_probability > 0:
        raise ConfigError(
            f"vLLM does not support XTC; got SamplingConfig.xtc_probability={config.xtc_probability}. Set it to 0, or use "
            "sampler='decoding'."
        )
    if config.temperature > 2:
        raise ConfigError(
            f"vLLM needs a temperature of at most 2; got SamplingConfig.temperature={config.temperature}. Lower it, or use "
            "sampler='decoding'."
        )
    return {
        "temperature": config.temperature,
        "top_k": config.top_k or 0,
        "top_p": config.top_p,
        "min_p": config.min_p,
        "repetition_penalty": config.repetition_penalty,
        "max_tokens": config.max_new_tokens,
        "min_tokens": config.min_new_tokens,
        "stop": list(config.stop),
        "include_stop_str_in_output": True,
        "skip_special_tokens": not config.stop,  # a stop string may be a special token
        "stop_token_ids": list(end_token_ids),
        "ignore_eos": True,  # only `end_token_ids` end a completion
        "logprobs": 0,  # report the log-prob of the sampled token only
    }


def row_settings(
    config: SamplingConfig,
    end_token_ids: Sequence[int],
    limits: Sequence[RowLimit] | None,
    count: int,
    excluded: Sequence[int] = (),
) -> list[dict[str, Any]]:
    """`request_settings` of each of N rows, with its own limits, and whether vLLM has to search for stop strings.

    Args:
        config: Sampling settings.
        end_token_ids: Tokens that end a completion.
        limits: Where each row ends. None: at the limits of the settings.
        count: N.
        excluded: Tokens that no completion may have.
    """
    bias = {"logit_bias": dict.fromkeys(excluded, LOWEST_BIAS)} if excluded else {}
    own = {
        limit: request_settings(limit.applied_to(config), end_token_ids) | {"detokenize": bool(limit.stop)} | bias
        for limit in dict.fromkeys(limits or [RowLimit.of(config)])
    }
    return [own[limit] for limit in limits or [RowLimit.of(config)] * count]


def require_room(prompts: Sequence[Sequence[int]], settings: Sequence[dict[str, Any]], max_length: int) -> None:
    """Check that each prompt and `max_new_tokens` fit into the maximum sequence length."""
    num_per_prompt = len(settings) // max(len(prompts), 1)
    for index, prompt in enumerate(prompts):
        own = settings[index * num_per_prompt : (index + 1) * num_per_prompt]
        longest = max((each["max_tokens"] for each in own), default=0)
        if len(prompt) + longest > max_length:
            raise ConfigError(
                f"vLLM was started for sequences of at most {max_length} tokens (max_model_len); prompt {index} has "
                f"{len(prompt)}, and SamplingConfig.max_new_tokens={longest}. Raise max_model_len, shorten the "
                "prompt, or lower max_new_tokens."
            )


def require_equal_prompts(prompts: Sequence[Ids], answers: Sequence[Answer]) -> None:
    """Check that vLLM put as many tokens in place of each picture as the policy did, because scores are those of the policy's
    prompt.

    Args:
        prompts: The prompt of each row.
        answers: The answer for each row.

    Raises:
        SamplerError: VLLM read another prompt, or does not say what it read.
    """
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        if isinstance(prompt, PicturePrompt) and list(answer.prompt_token_ids or ()) != list(prompt):
            read = "none" if answer.prompt_token_ids is None else f"{len(answer.prompt_token_ids)}"
            raise SamplerError(
                f"vLLM must read a prompt with pictures as the policy's processor does; of row {row}, the policy has "
                f"{len(prompt)} tokens, and vLLM reports {read}, or others. Give vLLM the same sizes of pictures "
                "(mm_processor_kwargs), and start it with the folder of this processor."
            )


def sampled_tokens(answers: Sequence[Answer], config: SamplingConfig) -> SampledTokens:
    """Convert vLLM's answers for all rows to `SampledTokens`."""
    for row, answer in enumerate(answers):
        if len(answer.token_ids) != len(answer.log_probs):
            raise SamplerError(
                f"vLLM must return one log-prob per token; row {row} has {len(answer.log_probs)} for {len(answer.token_ids)} "
                "tokens. Check the server's version and options."
            )
    if config.temperature == 0:  # the choice is certain, but vLLM reports log-probs from before the choice
        log_probs = [[0.0] * len(answer.token_ids) for answer in answers]
    else:
        log_probs = [list(answer.log_probs) for answer in answers]
    return SampledTokens(
        token_ids=[list(answer.token_ids) for answer in answers],
        finish_reasons=[_finish_reason(row, answer) for row, answer in enumerate(answers)],
        behaviour_log_probs=log_probs,
    )


def _finish_reason(row: int, answer: Answer) -> FinishReason:
    match answer.finish_reason:
        case "length":
            return "length"
        case "stop":
            return "stop" if isinstance(answer.stop_reason, str) else "end"
        case other:
            raise SamplerError(
                f"vLLM must end a completion with 'stop' or 'length'; row {row} ended with {other!r} after "
                f"{len(answer.token_ids)} tokens. Read vLLM's log."
            )
