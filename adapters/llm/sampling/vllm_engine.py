"""A sampler with vLLM in the trainer's process."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adapters.llm.model.merged_weights import merged_weights
from adapters.llm.picture_prompts import Ids, PicturePrompt
from grpo import preserved_random_state
from grpo.arguments import install_command
from grpo.errors import ConfigError

from .samplers import Ints, LimitsRows, RowLimit, SampledTokens, SamplerError
from .sampling_config import SamplingConfig
from .vllm_requests import Answer, require_equal_prompts, require_room, row_settings, sampled_tokens

IN_OTHER_PROCESSES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


class VLLMSampler(LimitsRows):
    """A vLLM engine on the same device as the trained model. Weights are transferred in memory.

    vLLM's kernels round differently, so its log-probs differ slightly from the trainer's: set `objective.sampler_correction`.
    vLLM applies min-p before top-k and top-p. A completion depends on its row's seed and, through rounding, on the batch.

    Args:
        model: Folder or hub name of the model, for its configuration, tokenizer and first weights. With
            `load_format="dummy"` the weights are not read, because `sync` replaces them.
        engine_options: Options of `vllm.LLM`. `gpu_memory_utilization` is vLLM's share of the device's memory; training needs
            the rest. `dtype="float32"` is slower and closer to a trainer in float32.

    Raises:
        ImportError: VLLM is not installed.
        ConfigError: The engine would use several processes, and weights cannot be transferred to them in memory.

    Example:
        >>> sampler = VLLMSampler("Qwen/Qwen3-0.6B", gpu_memory_utilization=0.3)  # doctest: +SKIP
        >>> policy = HFPolicy.from_pretrained("Qwen/Qwen3-0.6B", sampler=sampler)  # doctest: +SKIP

    Source:
        Kwon et al. 2023, arXiv:2309.06180.
    """

    limits_rows = True
    excluded_token_ids: Ints = ()
    """Tokens that no completion may have."""

    def __init__(self, model: str | Path, **engine_options: Any) -> None:
        spread = {name: engine_options[name] for name in IN_OTHER_PROCESSES if engine_options.get(name, 1) != 1}
        if spread:
            raise ConfigError(
                f"VLLMSampler must use one process on one device; got {spread}. For several devices, start a vLLM server and "
                "use VLLMServerSampler."
            )
        vllm = _vllm()
        separate = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # weights are transferred within this process
        try:
            with preserved_random_state():  # vLLM seeds the global generators
                self.engine = vllm.LLM(str(model), logprobs_mode="processed_logprobs", **engine_options)
        finally:
            if separate is None:
                del os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"]
            else:
                os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = separate
        self._params = vllm.SamplingParams
        self._max_length: int = self.engine.llm_engine.vllm_config.model_config.max_model_len

    def sample(
        self,
        prompts: Sequence[Ids],
        num_per_prompt: int,
        config: SamplingConfig,
        *,
        end_token_ids: Ints,
        seeds: Ints,
        limits: Sequence[RowLimit] | None = None,
    ) -> SampledTokens:
        """Sample completions; see `Sampler.sample` and `LimitsRows`.

        Each row is a request, and vLLM's prefix cache shares the prompts.

        Raises:
            ConfigError: VLLM does not support a setting, or a prompt is too long.
            SamplerError: VLLM did not complete a request, or reads other tokens in place of a picture.
        """
        settings = row_settings(config, end_token_ids, limits, len(seeds), self.excluded_token_ids)
        require_room(prompts, settings, self._max_length)
        requests = [_request(prompt) for prompt in prompts]
        with preserved_random_state():  # vLLM uses the global generators although every row has a seed
            outputs = self.engine.generate(
                [dict(request) for request in requests for _ in range(num_per_prompt)],
                [self._params(seed=seed, **own) for seed, own in zip(seeds, settings, strict=True)],
                use_tqdm=False,
            )
        answers = [_answer(request) for request in outputs]
        require_equal_prompts([prompt for prompt in prompts for _ in range(num_per_prompt)], answers)
        return sampled_tokens(answers, config)

    def sync(self, model: Any) -> None:
        """Copy the weights of the trained model to the engine, with its adapters merged.

        Raises:
            ConfigError: An adapter cannot be merged.
            SamplerError: VLLM could not clear its prefix cache.
        """
        self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": merged_weights(model)})
        if not self.engine.reset_prefix_cache():  # the cache has keys and values of the old weights
            raise SamplerError(
                "VLLMSampler.sync: vLLM must clear its prefix cache after new weights, but other requests are running on the "
                "engine. Wait for them, or use an engine for training only."
            )


def _request(prompt: Ids) -> dict[str, Any]:
    """A prompt as vLLM reads it. VLLM replaces the mark of each picture by the picture's tokens."""
    if not isinstance(prompt, PicturePrompt):
        return {"prompt_token_ids": list(prompt)}
    token_ids, pictures = prompt.marked
    return {"prompt_token_ids": token_ids, "multi_modal_data": {"image": pictures}}


def _answer(request: Any) -> Answer:
    output = request.outputs[0]
    return Answer(
        token_ids=output.token_ids,
        log_probs=[chosen[token].logprob for chosen, token in zip(output.logprobs, output.token_ids, strict=True)],
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        prompt_token_ids=request.prompt_token_ids,
    )


def _vllm() -> Any:
    try:
        import vllm
    except ImportError as error:
        raise ImportError(
            f"VLLMSampler needs vLLM: {install_command('vllm')}, in an environment of its own, because vLLM pins "
            "versions of torch and transformers. With VLLMServerSampler, only the server needs vLLM."
        ) from error
    return vllm
