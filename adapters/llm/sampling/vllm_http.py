"""JSON over HTTP to a vLLM server: retries, and errors that say what to do."""

import http.client
import json
import time
import urllib.error
import urllib.request
import warnings
from typing import Any

from grpo.errors import ConfigError, GRPOWarning

from .vllm_requests import SamplerError

START = "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs"
"""What has to be run for a server that can be given weights, and that tells the log-probabilities it draws with."""


class VLLMServer:
    """A running server; see `START`.

    Args:
        base_url: as in "http://localhost:8000".
        timeout: seconds that one answer may take.
        num_retries: how often a request is sent again when the connection fails, after .5, 1, 2, ... seconds.

    Raises:
        ConfigError: not an HTTP address.
    """

    def __init__(self, base_url: str, *, timeout: float, num_retries: int = 4) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"base_url must begin with http:// or https://; got {base_url!r}.")
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._timeout = timeout
        self._num_retries = num_retries

    def get(self, path: str) -> Any:
        """What stands at a path."""
        return self._send(urllib.request.Request(self.base_url + path))

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The answer to a request, which must be one that may be sent twice.

        Raises:
            SamplerError: no answer, or a refusal.
        """
        data = json.dumps(body or {}).encode()
        return self._send(urllib.request.Request(self.base_url + path, data, {"Content-Type": "application/json"}))

    def _send(self, request: urllib.request.Request) -> Any:
        for attempt in range(self._num_retries + 1):
            try:
                with urllib.request.urlopen(request, timeout=self._timeout) as response:
                    return json.loads(response.read() or "null")
            except urllib.error.HTTPError as refusal:  # an answer: asking again would not change it
                raise SamplerError(self._refusal(request.selector, refusal)) from refusal
            except (OSError, http.client.HTTPException) as failure:
                if isinstance(getattr(failure, "reason", failure), TimeoutError):
                    raise SamplerError(
                        f"The vLLM server at {self.base_url} did not answer {request.selector} within {self._timeout:g} s. "
                        "Raise timeout, ask for fewer or shorter completions, or look into the server's log."
                    ) from failure
                if attempt == self._num_retries:
                    raise SamplerError(
                        f"No vLLM server answers at {self.base_url} ({failure}), asked {attempt + 1} times. Start one: {START}"
                    ) from failure
                warnings.warn(
                    f"The connection to the vLLM server at {self.base_url} failed ({failure}); trying again.",
                    GRPOWarning,
                    stacklevel=2,
                )
                time.sleep(0.5 * 2**attempt)
        raise AssertionError("unreachable")

    def _refusal(self, path: str, refusal: urllib.error.HTTPError) -> str:
        """What the server said, and what to do about it."""
        text = refusal.read().decode(errors="replace")
        if refusal.code == 404 and not path.startswith("/v1/"):
            return (
                f"The vLLM server at {self.base_url} has no {path}, which it has in development mode only. Start it with "
                f"{START}, where nobody else can reach it."
            )
        return f"The vLLM server at {self.base_url} answered {path} with {refusal.code}: {text[:500]}"
