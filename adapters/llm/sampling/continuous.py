"""A sampler with transformers' continuous batching: a paged cache, shared prefixes, and CUDA graphs on a GPU."""

from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from adapters.llm.model.causal_lm import CausalLM
from adapters.llm.picture_prompts import Ids, require_no_pictures
from grpo import preserved_random_state
from grpo.errors import ConfigError

from .samplers import Ints, SampledTokens, SamplerError
from .sampling_config import SamplingConfig

PAGE = 32
"""Number of positions of one page of the cache."""
LACKS = ("min_new_tokens", "min_p", "xtc_probability", "repetition_penalty", "stop")
"""Settings of `SamplingConfig` that continuous batching does not have."""


class ContinuousSampler:
    """Samples from the model that is trained, with transformers' `generate_batch`. A row that ends makes room for the next.

    Tokens are drawn from torch's global generator with the first row's seed, so a completion depends on its batch.

    Args:
        lm: The model.
        max_rows: Maximum number of rows that are decoded together. It bounds the memory of the cache. None decodes all.
    """

    def __init__(self, lm: CausalLM, *, max_rows: int | None = None) -> None:
        self._lm, self._max_rows = lm, max_rows

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[Ids], num_per_prompt: int, config: SamplingConfig, *, end_token_ids: Ints, seeds: Ints
    ) -> SampledTokens:
        """Sample completions; see `Sampler.sample`. The scores are None, because the paged attention rounds differently."""
        require_no_pictures(prompts, "transformers' continuous batching", "Use sampler='decoding'.")
        default = SamplingConfig(max_new_tokens=config.max_new_tokens)
        lacking = {name: getattr(config, name) for name in LACKS if getattr(config, name) != getattr(default, name)}
        if lacking:
            raise ConfigError(
                f"transformers' continuous batching does not have some settings of SamplingConfig; got {lacking}. Remove "
                "them, or use sampler='decoding'."
            )
        rows = min(len(seeds), self._max_rows or len(seeds))
        pages_per_row = -(-(max(map(len, prompts)) + config.max_new_tokens) // PAGE) + 1
        with preserved_random_state(), self._lm.evaluating():
            torch.manual_seed(seeds[0])
            try:
                outputs = self._lm.plain.generate_batch(
                    [list(prompt) for prompt in prompts],
                    generation_config=GenerationConfig(
                        max_new_tokens=config.max_new_tokens,
                        num_return_sequences=num_per_prompt,
                        do_sample=True,
                        temperature=config.scoring_temperature,
                        top_k=1 if config.temperature == 0 else config.top_k or 0,
                        top_p=config.top_p,
                        eos_token_id=list(end_token_ids) or -1,
                        pad_token_id=0,
                    ),
                    continuous_batching_config=ContinuousBatchingConfig(
                        return_logprobs=True,
                        use_cuda_graph=self._lm.device.type == "cuda",
                        page_size=PAGE,
                        num_blocks=rows * pages_per_row,
                        max_batch_tokens=max(rows, *map(len, prompts)),
                        max_requests_per_batch=rows,
                    ),
                )
            except ValueError as error:  # a type of layer that its cache lacks
                raise SamplerError(
                    f"transformers' continuous batching does not serve {type(self._lm.plain).__name__}: {error}. Use "
                    "sampler='decoding'."
                ) from error
        answers = [output for output in outputs.values() if output.is_finished() and output.error is None]
        if len(answers) != len(seeds):
            raise SamplerError(
                f"transformers' generate_batch must complete {len(seeds)} rows; it completed {len(answers)}. Read its log "
                "above, or use sampler='decoding'."
            )
        return SampledTokens(
            token_ids=[answer.generated_tokens for answer in answers],
            finish_reasons=["end" if answer.generated_tokens[-1] in end_token_ids else "length" for answer in answers],
            behaviour_log_probs=[answer.logprobs for answer in answers],
        )

    def sync(self, model: Any) -> None:
        """Do nothing, because this sampler uses the weights of the trained model itself."""
