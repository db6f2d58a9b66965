"""One vLLM server as a worker: it loads weights, says their version, and draws completions with them."""

from pathlib import Path
from typing import Any

from grpo.errors import ConfigError

from .samplers import SamplerError
from .vllm_http import START, ServerLostError, ServerTimeoutError, VLLMServer
from .vllm_requests import Answer

FIRST_VERSION = "default"
"""What a vLLM server calls the weights that it was started with."""

PROBE_SECONDS = 10.0
"""A server that does not say its version within this time is lost."""


class VLLMWorker:
    """A vLLM server with a label, the version, for its weights.

    Args:
        base_url: Address of the server.
        timeout: Time limit of one request in seconds.

    Raises:
        ConfigError: `base_url` is not an HTTP address.
    """

    def __init__(self, base_url: str, *, timeout: float) -> None:
        self._server = VLLMServer(base_url, timeout=timeout)
        self._max_length: int | None = None

    @property
    def url(self) -> str:
        """Address of the server."""
        return self._server.base_url

    def version(self) -> str:
        """The label of the server's weights. A server that does not answer soon is lost.

        Raises:
            ServerLostError: The server does not answer.
            SamplerError: The server was started without development mode.
        """
        return str(self._server.get("/weight_info", timeout=PROBE_SECONDS, num_retries=0)["weight_version"])

    def max_length(self) -> int:
        """The server's maximum sequence length. The first call also checks the options of the server.

        Raises:
            ConfigError: The server was started with other options.
            SamplerError: The server does not answer, or was started without development mode.
        """
        if self._max_length is None:
            settings = self._server.get("/server_info?config_format=json")["vllm_config"]["model_config"]
            if settings["logprobs_mode"] != "processed_logprobs":
                raise ConfigError(
                    f"VLLMServerSampler: the vLLM server at {self.url} must report the log-probs of the sampling distribution "
                    f"(processed_logprobs); it reports {settings['logprobs_mode']}. Start it with {START}"
                )
            self._max_length = int(settings["max_model_len"])
        return self._max_length

    def load(self, folder: Path, version: str, label: str) -> None:
        """Let the server load the weights in a folder. No request runs while weights change.

        The server finishes the requests that run, and holds others back until the weights are complete.

        Args:
            folder: Folder with the weights, which the server sees under the same path.
            version: Label of the weights once they are complete.
            label: Label of the weights until then.

        Raises:
            ConfigError: The server was started with other options.
            SamplerError: The server does not answer, or did not load the weights.
        """
        self._max_length = None  # it may have been restarted with other options
        self.max_length()
        self._server.post("/update_weight_version", {"new_version": label})
        self._server.post("/pause?mode=wait")
        self._server.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        if not self._server.post("/reset_prefix_cache")["success"]:  # it has keys and values of the old weights
            raise SamplerError(
                f"VLLMServerSampler.sync: the vLLM server at {self.url} must clear its prefix cache after new weights, but "
                "requests of other clients are running on it. Use a server for training only."
            )
        self._server.post("/update_weight_version", {"new_version": version})
        self.resume()

    def resume(self) -> None:
        """Let requests run that were held back. Does nothing if the server is not paused.

        Raises:
            SamplerError: The server does not answer.
        """
        self._server.post("/resume")

    def complete(self, body: dict[str, Any], version: str | None) -> Answer:
        """The completion of one request.

        Args:
            body: The request.
            version: Label of the weights that every token must come from. None accepts all weights.

        Raises:
            ServerLostError: The server does not answer, or some tokens come from other weights.
            ServerTimeoutError: The server did not answer in time, although it runs.
            SamplerError: The server rejects the request.
        """
        try:
            (choice,) = self._server.post("/inference/v1/generate", body, num_retries=0)["choices"]
        except ServerTimeoutError:
            self.version()  # raises if the server has not only been slow
            raise
        found = {span["version"] for span in choice["weight_versions"] or [{"version": None}]}
        if version is not None and found != {version}:
            raise ServerLostError(
                f"VLLMServerSampler: the vLLM server at {self.url} sampled with other weights (version "
                f"{', '.join(map(str, sorted(found, key=str)))}) than those of the last sync ({version})."
            )
        return Answer(
            token_ids=choice["token_ids"],
            log_probs=[step["logprob"] for step in choice["logprobs"]["content"]],
            finish_reason=choice["finish_reason"],
            stop_reason=choice["stop_reason"],
        )
