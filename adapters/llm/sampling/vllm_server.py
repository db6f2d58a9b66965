"""A sampler with a vLLM server, over HTTP."""

import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from adapters.llm.model.merged_weights import merged_weights
from grpo.errors import ConfigError
from grpo.writing import describe

from .samplers import SampledTokens
from .sampling_config import SamplingConfig
from .vllm_http import START, VLLMServer
from .vllm_requests import Answer, SamplerError, request_settings, require_room, sampled_tokens


class VLLMServerSampler:
    """A vLLM server on other devices or another machine. Weights are transferred through a shared folder.

    Start the server with the model that is trained::

        VLLM_SERVER_DEV_MODE=1 vllm serve Qwen/Qwen3-0.6B --logprobs-mode processed_logprobs

    In development mode, everyone who can reach the server's port can change the weights, so do not expose the port. vLLM's
    kernels round differently, so its log-probs differ slightly from the trainer's: set `objective.sampler_correction`.

    Args:
        base_url: Address of the server, for example "http://localhost:8000".
        weights_folder: Folder that `sync` writes the weights to. The server must see it under the same path.
        timeout: Time limit of one request in seconds. It includes the time that the request waits for earlier ones.
        max_concurrency: Maximum number of concurrent requests. Each completion is one request. The value of the server's
            `--max-num-seqs` is enough to keep the server busy.

    Raises:
        ConfigError: `base_url` is not an HTTP address.

    Example:
        >>> sampler = VLLMServerSampler("http://localhost:8000", weights_folder="/dev/shm/weights")  # doctest: +SKIP
        >>> policy = HFPolicy.from_pretrained("Qwen/Qwen3-0.6B", sampler=sampler)  # doctest: +SKIP
    """

    def __init__(
        self, base_url: str, *, weights_folder: str | Path, timeout: float = 600.0, max_concurrency: int = 256
    ) -> None:
        folder: Any = weights_folder
        if not isinstance(folder, str | Path) or type(max_concurrency) is not int or max_concurrency < 1:
            raise ConfigError(
                "VLLMServerSampler: weights_folder must be a path, and max_concurrency an integer of at least 1; got "
                f"{describe(folder)} and {describe(max_concurrency)}."
            )
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
        """Sample completions; see `Sampler.sample`. Each row is a request, and vLLM's prefix cache shares the prompts.

        Raises:
            ConfigError: vLLM does not support a setting, a prompt is too long, or the server was started with other options.
            SamplerError: The server does not answer, rejects a request, or no longer has the weights of the last `sync`.
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
                f"VLLMServerSampler: the vLLM server at {self._server.base_url} no longer has the weights of the last sync: it "
                "was restarted, or another client changed them. Resume from the last checkpoint, which sends the weights again."
            )
        return sampled_tokens(answers, config)

    def sync(self, model: Any) -> None:
        """Send the weights of the trained model to the server, with its adapters merged.

        Raises:
            ConfigError: An adapter cannot be merged, or the server was started with other options.
            SamplerError: The server does not answer, or did not load the weights.
        """
        self._checked_max_length()
        self._folder.mkdir(parents=True, exist_ok=True)
        unfinished = self._folder / "unfinished"
        # copies, because the format does not allow tensors that share memory
        save_file(
            {name: weight.to("cpu", copy=True).contiguous() for name, weight in merged_weights(model)}, unfinished
        )
        unfinished.replace(self._folder / "model.safetensors")
        self._server.post(
            "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(self._folder)}}
        )
        # the cache has keys and values of the old weights
        if not self._server.post("/reset_prefix_cache")["success"]:
            raise SamplerError(
                f"VLLMServerSampler.sync: the vLLM server at {self._server.base_url} must clear its prefix cache after new "
                "weights, but requests of other clients are running on it. Use a server for training only."
            )
        self._version = uuid.uuid4().hex
        self._server.post("/update_weight_version", {"new_version": self._version})

    def _checked_max_length(self) -> int:
        """The server's maximum sequence length. The first call also checks the options of the server."""
        if self._max_length is None:
            settings = self._server.get("/server_info?config_format=json")["vllm_config"]["model_config"]
            if settings["logprobs_mode"] != "processed_logprobs":
                raise ConfigError(
                    f"VLLMServerSampler: the vLLM server at {self._server.base_url} must report the log-probs of the sampling "
                    f"distribution (processed_logprobs); it reports {settings['logprobs_mode']}. Start it with {START}"
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
