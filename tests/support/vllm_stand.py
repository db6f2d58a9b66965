"""A small server that imitates vLLM's: it has the same requests and answers, and can be killed and started again.

`tests/vllm/test_vllm_servers.py` sends the same requests to this server and to vLLM, and compares the answers.
"""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

VOCABULARY = 36
MAX_LENGTH = 16


class Stand:
    """The state of the server, and the requests that it received. A completion's log-probs are minus the sum of the weights."""

    def __init__(self) -> None:
        self.url = ""
        self.heard: list[tuple[str, Any]] = []
        self.options = {"logprobs_mode": "processed_logprobs", "max_model_len": MAX_LENGTH}
        self.has_development_mode = True
        self.has_scale_out = True
        self.can_forget = True
        self.to_drop = 0
        self.delay = 0.0
        self.dies_after: int | None = None
        """Number of completions that the server still answers."""
        self.changed_while_running = 0
        """How often weights changed while a request ran."""
        self._free = threading.Condition()
        self._num_starts = 0
        self.start_again()

    def start_again(self) -> None:
        """Start, with the first weights and their label."""
        with self._free:
            self.is_dead, self.is_paused, self.num_running = False, False, 0
            self.version, self.weights = "default", 0.0
            self.dies_after = None
            self._num_starts += 1
            self._free.notify_all()

    def die(self) -> None:
        with self._free:
            self.is_dead = True
            self._free.notify_all()

    def paths(self) -> list[str]:
        return [path for path, _ in self.heard]

    def answer(self, path: str, body: Any) -> tuple[int, Any] | None:
        """Status and body of an answer. None: the connection breaks."""
        if self.to_drop > 0:
            self.to_drop -= 1
            return None
        if self.is_dead:
            return None
        self.heard.append((path, body))
        if path == "/inference/v1/generate":
            return self._generate(body)
        if not self.has_development_mode:
            return 404, {"detail": "Not Found"}
        time.sleep(self.delay)
        return self._developed(path, body)

    def _generate(self, body: Any) -> tuple[int, Any] | None:
        if not self.has_scale_out:
            return 403, {"error": {"message": "Restart vllm serve with --enable-scale-out to enable them."}}
        settings = body["sampling_params"]
        if max(body["token_ids"]) >= VOCABULARY:
            return 400, {"error": {"message": f"Token id {max(body['token_ids'])} is out of vocabulary"}}
        with self._free:
            self._free.wait_for(lambda: not self.is_paused or self.is_dead)
            self.num_running += 1
            version, weights, start = self.version, self.weights, self._num_starts
        time.sleep(self.delay)
        with self._free:
            if start != self._num_starts:
                return None
            self.num_running -= 1
            if self.dies_after is not None:
                self.dies_after -= 1
                self.is_dead = self.is_dead or self.dies_after < 0
            self._free.notify_all()
            if self.is_dead:
                return None
        tokens = [settings["seed"] % VOCABULARY, 1]
        steps = [{"token_id": token, "logprob": -weights, "rank": 1, "top_logprobs": []} for token in tokens]
        choice = {
            "index": 0, "token_ids": tokens, "logprobs": {"content": steps}, "finish_reason": "stop", "stop_reason": 1,
            "weight_versions": [{"version": version, "start": 0, "end": len(tokens)}],
        }  # fmt: skip
        return 200, {"choices": [choice]}

    def _developed(self, path: str, body: Any) -> tuple[int, Any]:
        match path:
            case "/server_info?config_format=json":
                return 200, {"vllm_config": {"model_config": self.options}}
            case "/weight_info":
                return 200, {"weight_version": self.version}
            case "/pause?mode=wait":
                with self._free:
                    self.is_paused = True
                    self._free.wait_for(lambda: self.num_running == 0)
                return 200, {"status": "paused"}
            case "/resume":
                with self._free:
                    self.is_paused = False
                    self._free.notify_all()
                return 200, {"status": "resumed"}
            case "/collective_rpc":
                self.changed_while_running += self.num_running > 0 or not self.is_paused
                folder = Path(body["kwargs"]["weights_path"])
                self.weights = sum(float(value.sum()) for value in load_file(folder / "model.safetensors").values())
                return 200, {"results": [None]}
            case "/reset_prefix_cache":
                return 200, {"success": self.can_forget}
            case "/update_weight_version":
                self.version = body["new_version"]
                return 200, {"success": True, "new_version": self.version}
        return 404, {"detail": "Not Found"}


@contextlib.contextmanager
def running_stand() -> Iterator[Stand]:
    """The small server at an address of its own."""
    stand = Stand()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
            answer = stand.answer(self.path, body)
            if answer is None:
                self.close_connection = True
                return
            data = json.dumps(answer[1]).encode()
            self.send_response(answer[0])
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # the client may have closed the connection
                self.wfile.write(data)

        def log_message(self, *parts: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # many connections come at once

    server = Server(("127.0.0.1", 0), Handler)
    stand.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield stand
    finally:
        stand.die()
        server.shutdown()
        thread.join()
        server.server_close()
