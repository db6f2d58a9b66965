"""What the two vLLM samplers share: a draw in vLLM's words, and what an answer means."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from adapters.llm.completions import FinishReason
from grpo.errors import ConfigError, GRPOError

from .samplers import SampledTokens
from .sampling_config import SamplingConfig


class SamplerError(GRPOError, RuntimeError):
    """An engine or a server that samples did not do what it was asked to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What vLLM says about one completion."""

    token_ids: Sequence[int]
    """The sampled tokens, the one it stopped at included."""
    log_probs: Sequence[float]
    """Log-prob of each token under the sampling distribution."""
    finish_reason: str | None
    """vLLM's: "stop", "length", or that something went wrong."""
    stop_reason: int | str | None
    """The token or the string it stopped at."""


def request_settings(config: SamplingConfig, end_token_ids: Sequence[int]) -> dict[str, Any]:
    """A draw in vLLM's words, which are the same in `SamplingParams` and over HTTP; the seed is each row's own.

    Everything is said: what is left out, a server takes from the model's `generation_config.json`.

    Raises:
        ConfigError: something that vLLM does not do.
    """
    if config.xtc_probability > 0:
        raise ConfigError(
            f"vLLM has no XTC; got SamplingConfig.xtc_probability={config.xtc_probability}. Set it to 0, or sample otherwise."
        )
    if config.temperature > 2:
        raise ConfigError(f"vLLM takes temperatures of at most 2; got SamplingConfig.temperature={config.temperature}.")
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
        "stop_token_ids": list(end_token_ids),
        "ignore_eos": True,  # the model's own: `end_token_ids` are what ends a completion
        "logprobs": 0,  # of the sampled token alone
    }


def require_room(prompts: Sequence[Sequence[int]], config: SamplingConfig, max_length: int) -> None:
    """Prompt and completion fit, so that no completion is cut off before `max_new_tokens`.

    Raises:
        ConfigError: naming the first prompt that is too long.
    """
    for index, prompt in enumerate(prompts):
        if len(prompt) + config.max_new_tokens > max_length:
            raise ConfigError(
                f"vLLM was started for sequences of at most {max_length} tokens (max_model_len); prompt {index} has "
                f"{len(prompt)}, and SamplingConfig.max_new_tokens={config.max_new_tokens}. Raise max_model_len, shorten the "
                "prompt, or lower max_new_tokens."
            )


def sampled_tokens(answers: Sequence[Answer], config: SamplingConfig) -> SampledTokens:
    """The answers of all rows.

    Raises:
        SamplerError: one that is not a whole completion.
    """
    for row, answer in enumerate(answers):
        if len(answer.token_ids) != len(answer.log_probs):
            raise SamplerError(
                f"vLLM must give one log-probability per token; row {row} has {len(answer.log_probs)} for "
                f"{len(answer.token_ids)} tokens."
            )
    if config.temperature == 0:  # what is certain; vLLM tells the likelihoods before the choice
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
                f"vLLM must end a completion by 'stop' or 'length'; row {row} ended by {other!r} after "
                f"{len(answer.token_ids)} tokens. Its own log says why."
            )
