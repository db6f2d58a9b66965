"""Sampling with a vLLM server over HTTP."""

import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from adapters.llm.model.merged_weights import merged_weights
from grpo.errors import ConfigError

from .samplers import SampledTokens
from .sampling_config import SamplingConfig
from .vllm_http import START, VLLMServer
from .vllm_requests import Answer, SamplerError, request_settings, require_room, sampled_tokens


class VLLMServerSampler:
    """A vLLM server, on other devices or another machine, which the trainer gives its weights through a folder both can read.

    Start the server on the model that is trained::

        VLLM_SERVER_DEV_MODE=1 vllm serve Qwen/Qwen3-0.6B --logprobs-mode processed_logprobs

    Development mode opens what changes weights to everyone who can reach the port: keep it to this machine or this network. The
    importance weights of `objective.sampler_correction` make up for the difference between vLLM's kernels and the trainer's.

    Args:
        base_url: as in "http://localhost:8000".
        weights_folder: where `sync` writes the weights, by a path that means the same to the server.
        timeout: seconds that one answer may take; a completion waits for those before it.
        max_concurrency: requests at a time, one per completion. As many as the server's `--max-num-seqs` keep it busy.

    Raises:
        ConfigError: not an HTTP address.

    Example:
        >>> sampler = VLLMServerSampler("http://localhost:8000", weights_folder="/dev/shm/weights")  # doctest: +SKIP
        >>> policy = HFPolicy.from_pretrained("Qwen/Qwen3-0.6B", sampler=sampler)  # doctest: +SKIP
    """

    def __init__(
        self, base_url: str, *, weights_folder: str | Path, timeout: float = 600.0, max_concurrency: int = 256
    ) -> None:
        self._server = VLLMServer(base_url, timeout=timeout)
        self._folder = Path(weights_folder).resolve()
        self._max_concurrency = max_concurrency
        self._max_length: int | None = None
        self._version: str | None = None

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        num_per_prompt: int,
        config: SamplingConfig,
        *,
        end_token_ids: Sequence[int],
        seeds: Sequence[int],
    ) -> SampledTokens:
        """See `Sampler`. A group's rows are requests of their own, which share their prompt through the prefix cache.

        Raises:
            ConfigError: what vLLM does not do, a prompt too long, or a server that was started otherwise.
            SamplerError: the server is not there, refuses, or has lost the weights it was given.
        """
        require_room(prompts, config, self._checked_max_length())
        settings = request_settings(config, end_token_ids) | {"return_token_ids": True}
        bodies = [
            {"prompt": list(prompts[row // num_per_prompt]), "seed": seed, **settings} for row, seed in enumerate(seeds)
        ]
        with ThreadPoolExecutor(min(self._max_concurrency, len(bodies))) as pool:
            answers = list(pool.map(self._answer, bodies))
        if self._version is not None and self._server.get("/weight_info")["weight_version"] != self._version:
            raise SamplerError(
                f"The vLLM server at {self._server.base_url} no longer has the weights it was given: it was started anew, or "
                "somebody else changed them. Go on from the last checkpoint, which gives it the weights again."
            )
        return sampled_tokens(answers, config)

    def sync(self, model: Any) -> None:
        """Take over the weights of a model, its adapters merged.

        Raises:
            ConfigError: adapters that cannot be merged, or a server that was started otherwise.
            SamplerError: the server is not there, or could not take the weights.
        """
        self._checked_max_length()
        self._folder.mkdir(parents=True, exist_ok=True)
        unfinished = self._folder / "unfinished"
        # a copy of each, also of those that share their memory, which the format does not allow
        save_file(
            {name: weight.to("cpu", copy=True).contiguous() for name, weight in merged_weights(model)}, unfinished
        )
        unfinished.replace(self._folder / "model.safetensors")
        self._server.post(
            "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(self._folder)}}
        )
        # or prompts seen before would be read through the old weights
        if not self._server.post("/reset_prefix_cache")["success"]:
            raise SamplerError(
                f"The vLLM server at {self._server.base_url} could not forget the prompts it has seen: requests of others are "
                "running on it. Training needs a server of its own."
            )
        self._version = uuid.uuid4().hex
        self._server.post("/update_weight_version", {"new_version": self._version})

    def _checked_max_length(self) -> int:
        """The longest sequence the server takes; asked once, together with whether it is set up as it must be."""
        if self._max_length is None:
            settings = self._server.get("/server_info?config_format=json")["vllm_config"]["model_config"]
            if settings["logprobs_mode"] != "processed_logprobs":
                raise ConfigError(
                    f"The vLLM server at {self._server.base_url} must tell the log-probabilities it draws with, "
                    f"processed_logprobs; it tells {settings['logprobs_mode']}. Start it with {START}"
                )
            self._max_length = int(settings["max_model_len"])
        return self._max_length

    def _answer(self, body: dict[str, Any]) -> Answer:
        (choice,) = self._server.post("/v1/completions", body)["choices"]
        return Answer(
            token_ids=choice["token_ids"],
            log_probs=choice["logprobs"]["token_logprobs"],
            finish_reason=choice["finish_reason"],
            stop_reason=choice["stop_reason"],
        )
