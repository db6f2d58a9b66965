"""Requests to a vLLM server: JSON over HTTP, with retries."""

import http.client
import json
import time
import urllib.error
import urllib.request
import warnings
from typing import Any, cast

from grpo.errors import ConfigError, GRPOWarning

from .vllm_requests import SamplerError

START = "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs"
"""Command that starts a server that accepts weights and reports the log-probs of the sampling distribution."""


class VLLMServer:
    """A running vLLM server that was started with the command `START`.

    Args:
        base_url: Address of the server, for example "http://localhost:8000".
        timeout: Time limit of one request in seconds.
        num_retries: How often a request is repeated if the connection fails, after 0.5, 1, 2, ... seconds.

    Raises:
        ConfigError: `base_url` is not an HTTP address.
    """

    def __init__(self, base_url: str, *, timeout: float, num_retries: int = 4) -> None:
        address, seconds = cast("tuple[Any, Any]", (base_url, timeout))
        if not isinstance(address, str) or not address.startswith(("http://", "https://")):
            raise ConfigError(f"VLLMServerSampler: base_url must begin with http:// or https://; got {base_url!r}.")
        if not isinstance(seconds, int | float) or not seconds > 0:
            raise ConfigError(f"VLLMServerSampler: timeout must be a number of seconds above 0; got {timeout!r}.")
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._timeout = timeout
        self._num_retries = num_retries

    def get(self, path: str) -> Any:
        """Send a GET request and return the decoded answer.

        Raises:
            SamplerError: The server does not answer, or rejects the request.
        """
        return self._send(urllib.request.Request(self.base_url + path))

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Send a POST request and return the decoded answer. The request may be sent more than once.

        Raises:
            SamplerError: The server does not answer, or rejects the request.
        """
        data = json.dumps(body or {}).encode()
        return self._send(urllib.request.Request(self.base_url + path, data, {"Content-Type": "application/json"}))

    def _send(self, request: urllib.request.Request) -> Any:
        for attempt in range(self._num_retries + 1):
            try:
                with urllib.request.urlopen(request, timeout=self._timeout) as response:
                    return json.loads(response.read() or "null")
            except urllib.error.HTTPError as refusal:  # the server has answered, so a retry would not help
                raise SamplerError(self._refusal(request.selector, refusal)) from refusal
            except (OSError, http.client.HTTPException) as failure:
                if isinstance(getattr(failure, "reason", failure), TimeoutError):
                    raise SamplerError(
                        f"VLLMServerSampler: the vLLM server at {self.base_url} did not answer {request.selector} within "
                        f"{self._timeout:g} s. Raise timeout, request fewer or shorter completions, or read the server's log."
                    ) from failure
                if attempt == self._num_retries:
                    raise SamplerError(
                        f"VLLMServerSampler: no vLLM server answers at {self.base_url} ({failure}) after {attempt + 1} "
                        f"attempts. Start one: {START}"
                    ) from failure
                warnings.warn(
                    f"VLLMServerSampler: the connection to the vLLM server at {self.base_url} failed ({failure}); retrying.",
                    GRPOWarning,
                    stacklevel=2,
                )
                time.sleep(0.5 * 2**attempt)
        raise AssertionError("unreachable")

    def _refusal(self, path: str, refusal: urllib.error.HTTPError) -> str:
        """Message with the server's answer and a remedy."""
        text = refusal.read().decode(errors="replace")
        if refusal.code == 404 and not path.startswith("/v1/"):
            return (
                f"VLLMServerSampler: the vLLM server at {self.base_url} has no {path}, which needs development mode. Start it "
                f"with {START}, and do not expose its port."
            )
        return (
            f"VLLMServerSampler: the vLLM server at {self.base_url} answered {path} with {refusal.code}: {text[:500]}"
        )
