"""One vLLM server as a worker: it loads weights, says their version, and draws completions with them. JSON over HTTP."""

import http.client
import json
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, cast

from grpo.errors import ConfigError, warn_user

from .samplers import SamplerError
from .vllm_requests import Answer

START = "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --host 127.0.0.1 --logprobs-mode processed_logprobs --enable-scale-out"
"""Command that starts a server that accepts weights, and reports with every token its weights' version and its log-prob."""

NUM_RETRIES = 4
FIRST_WAIT = 0.5
"""Seconds before a request is repeated for the first time. Each further wait is twice as long."""

FIRST_VERSION = "default"
"""What a vLLM server calls the weights that it was started with."""

PROBE_SECONDS = 10.0
"""A server that does not say its version within this time is lost."""


class ServerLostError(SamplerError):
    """A vLLM server does not answer, has failed, or has lost its weights. Another server may do its work."""


class ServerTimeoutError(ServerLostError):
    """A vLLM server did not answer in time. It may have ended, or need more time."""


class VLLMWorker:
    """A running vLLM server that was started with the command `START`, with a label, the version, for its weights.

    Args:
        base_url: Address of the server, for example "http://localhost:8000".
        timeout: Time limit of one request in seconds.

    Raises:
        ConfigError: `base_url` is not an HTTP address.
    """

    def __init__(self, base_url: str, *, timeout: float) -> None:
        address, seconds = cast("tuple[Any, Any]", (base_url, timeout))
        if not isinstance(address, str) or not address.startswith(("http://", "https://")):
            raise ConfigError(f"VLLMServerSampler: base_url must begin with http:// or https://; got {base_url!r}.")
        if not isinstance(seconds, int | float) or not seconds > 0:
            raise ConfigError(f"VLLMServerSampler: timeout must be a number of seconds above 0; got {timeout!r}.")
        self.url = base_url.rstrip("/").removesuffix("/v1")
        """Address of the server."""
        self._timeout = timeout
        self._max_length: int | None = None

    def version(self) -> str:
        """The label of the server's weights. A server that does not answer soon is lost.

        Raises:
            ServerLostError: The server does not answer.
            SamplerError: The server was started without development mode.
        """
        return str(self.get("/weight_info", timeout=PROBE_SECONDS, num_retries=0)["weight_version"])

    def max_length(self) -> int:
        """The server's maximum sequence length. The first call also checks the options of the server.

        Raises:
            ConfigError: The server was started with other options.
            SamplerError: The server does not answer, or was started without development mode.
        """
        if self._max_length is None:
            settings = self.get("/server_info?config_format=json")["vllm_config"]["model_config"]
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
        self.post("/update_weight_version", {"new_version": label})
        self.post("/pause?mode=wait")
        self.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        if not self.post("/reset_prefix_cache")["success"]:  # it has keys and values of the old weights
            raise SamplerError(
                f"VLLMServerSampler.sync: the vLLM server at {self.url} must clear its prefix cache after new weights, but "
                "requests of other clients are running on it. Use a server for training only."
            )
        self.post("/update_weight_version", {"new_version": version})
        self.resume()

    def resume(self) -> None:
        """Let requests run that were held back. Does nothing if the server is not paused.

        Raises:
            SamplerError: The server does not answer.
        """
        self.post("/resume")

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
            response = self.post("/inference/v1/generate", body, num_retries=0)
        except ServerTimeoutError:
            self.version()  # raises if the server has not only been slow
            raise
        (choice,) = response["choices"]
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
            prompt_token_ids=response.get("prompt_token_ids"),
        )

    def get(self, path: str, *, timeout: float | None = None, num_retries: int = NUM_RETRIES) -> Any:
        """Send a GET request and return the decoded answer.

        Args:
            path: Path and query of the request.
            timeout: Time limit in seconds. None uses the server's.
            num_retries: How often the request is repeated if the connection fails, after 0.5, 1, 2, ... seconds.

        Raises:
            ServerLostError: The server does not answer, or has failed.
            SamplerError: The server rejects the request.
        """
        return self._send(urllib.request.Request(self.url + path), timeout or self._timeout, num_retries)

    def post(self, path: str, body: dict[str, Any] | None = None, *, num_retries: int = NUM_RETRIES) -> Any:
        """Send a POST request and return the decoded answer; see `get`."""
        data = json.dumps(body or {}).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        return self._send(request, self._timeout, num_retries)

    def _send(self, request: urllib.request.Request, timeout: float, num_retries: int) -> Any:
        for attempt in range(num_retries + 1):
            try:
                with urllib.request.urlopen(request, timeout=timeout) as response:
                    return json.loads(response.read() or "null")
            except urllib.error.HTTPError as refusal:  # the server has answered, so a retry would not help
                raise self._refusal(request.selector, refusal) from refusal
            except (OSError, http.client.HTTPException) as failure:
                if isinstance(getattr(failure, "reason", failure), TimeoutError):
                    raise ServerTimeoutError(
                        f"VLLMServerSampler: the vLLM server at {self.url} did not answer {request.selector} within "
                        f"{timeout:g} s. Raise timeout, request fewer or shorter completions, or read the server's log."
                    ) from failure
                if attempt == num_retries:
                    attempts = "" if attempt == 0 else f" after {attempt + 1} attempts"
                    raise ServerLostError(
                        f"VLLMServerSampler: no vLLM server answers at {self.url} ({failure}){attempts}. Start one: "
                        f"{START}"
                    ) from failure
                warn_user(
                    f"VLLMServerSampler: the connection to the vLLM server at {self.url} failed ({failure}); retrying."
                )
                time.sleep(FIRST_WAIT * 2**attempt)
        raise AssertionError("unreachable")

    def _refusal(self, path: str, refusal: urllib.error.HTTPError) -> SamplerError:
        """Error with the server's answer and a remedy. A server that answers with 500 or more has failed."""
        text = refusal.read().decode(errors="replace")[:500]
        said = f"VLLMServerSampler: the vLLM server at {self.url} answered {path} with {refusal.code}: {text}"
        if refusal.code >= 500:
            return ServerLostError(f"{said} Read the server's log.")
        if refusal.code in (403, 404):
            return SamplerError(f"{said} Start it with {START}, and do not expose its port.")
        return SamplerError(said)
