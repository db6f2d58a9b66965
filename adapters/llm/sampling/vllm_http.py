"""Requests to a vLLM server: JSON over HTTP, with retries."""

import http.client
import json
import time
import urllib.error
import urllib.request
from typing import Any, cast

from grpo.errors import ConfigError, warn_user

from .samplers import SamplerError

START = "VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --host 127.0.0.1 --logprobs-mode processed_logprobs --enable-scale-out"
"""Command that starts a server that accepts weights, and reports with every token its weights' version and its log-prob."""

NUM_RETRIES = 4
FIRST_WAIT = 0.5
"""Seconds before a request is repeated for the first time. Each further wait is twice as long."""


class ServerLostError(SamplerError):
    """A vLLM server does not answer, has failed, or has lost its weights. Another server may do its work."""


class ServerTimeoutError(ServerLostError):
    """A vLLM server did not answer in time. It may have ended, or need more time."""


class VLLMServer:
    """A running vLLM server that was started with the command `START`.

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
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self._timeout = timeout

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
        return self._send(urllib.request.Request(self.base_url + path), timeout or self._timeout, num_retries)

    def post(self, path: str, body: dict[str, Any] | None = None, *, num_retries: int = NUM_RETRIES) -> Any:
        """Send a POST request and return the decoded answer; see `get`."""
        data = json.dumps(body or {}).encode()
        request = urllib.request.Request(self.base_url + path, data, {"Content-Type": "application/json"})
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
                        f"VLLMServerSampler: the vLLM server at {self.base_url} did not answer {request.selector} within "
                        f"{timeout:g} s. Raise timeout, request fewer or shorter completions, or read the server's log."
                    ) from failure
                if attempt == num_retries:
                    attempts = "" if attempt == 0 else f" after {attempt + 1} attempts"
                    raise ServerLostError(
                        f"VLLMServerSampler: no vLLM server answers at {self.base_url} ({failure}){attempts}. Start one: "
                        f"{START}"
                    ) from failure
                warn_user(
                    f"VLLMServerSampler: the connection to the vLLM server at {self.base_url} failed ({failure}); retrying."
                )
                time.sleep(FIRST_WAIT * 2**attempt)
        raise AssertionError("unreachable")

    def _refusal(self, path: str, refusal: urllib.error.HTTPError) -> SamplerError:
        """Error with the server's answer and a remedy. A server that answers with 500 or more has failed."""
        text = refusal.read().decode(errors="replace")[:500]
        said = f"VLLMServerSampler: the vLLM server at {self.base_url} answered {path} with {refusal.code}: {text}"
        if refusal.code >= 500:
            return ServerLostError(f"{said} Read the server's log.")
        if refusal.code in (403, 404):
            return SamplerError(f"{said} Start it with {START}, and do not expose its port.")
        return SamplerError(said)
