"""An HTTP endpoint for agent programs: one URL per conversation, which any client of OpenAI's chat completions API can use."""

import asyncio
import concurrent.futures
import contextlib
import io
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any

from adapters.llm import HFPolicy, SamplingConfig
from grpo.arguments import describe
from grpo.errors import ConfigError

from .chat import Chat, ConversationEnded, PlaysConversations
from .messages import Message
from .openai_api import READ, ApiError, error_body, parsed, read_request, response_body
from .responses_api import as_chat_request, responses_body
from .threads import OwnThread

METHODS = {"v1/chat/completions": "POST", "v1/responses": "POST", "v1/models": "GET"}
"""The method of each path."""
MOST_BYTES = 64 * 2**20
"""Maximum size of a request."""
HEAD_BYTES = 2**16
"""Maximum size of what comes before the body of a request."""
MOST_ENDED = 10_000
"""Number of ended conversations that are remembered, so that late requests learn why they are refused."""
REQUEST_SECONDS = 20.0
"""How long a client may take to send a request, and to read the response."""
MOST_CONNECTIONS = 512
"""Number of connections at a time. Others wait."""
PLACE_SECONDS = 1.0
"""How long others wait before the oldest connection is closed that has not named a conversation."""


@dataclass(slots=True, eq=False)
class _Line:
    """An open conversation, and the requests that wait for it."""

    chat: Chat
    loop: asyncio.AbstractEventLoop
    waiting: set[concurrent.futures.Future] = field(default_factory=set)


class ChatEndpoint:
    """Serves conversations over HTTP, for agent programs that use OpenAI's chat completions or responses API, in any language.

    Each conversation has its own URL: the `base_url` of the program's client. Requests to it are answered as by `chat` in
    `async def play(chat, state)`. The server starts when it is needed. After `close`, it has no port and no thread.

    Args:
        policy: The language model. Requests may not change its sampling settings.
        ignore: Parameters of requests that are left out instead of refused, such as `{"temperature", "response_format"}`, of
            programs that cannot leave them out. The program then does not get what it asked for: `Conversation.info["ignored"]`
            has what was left out.
        host: The address to listen at. 127.0.0.1 is this computer alone. Sandboxes in containers need another one, such as that
            of the bridge of Docker, 172.17.0.1. Nothing is encrypted, and the token in the URL is all that protects it.
        public_host: The name or the address in the URL of a conversation, if programs reach this computer by another one than
            `host`: with `host="0.0.0.0"`, which listens at all addresses, nobody else can use `host` in a URL. None: `host`.

    Raises:
        ConfigError: The policy is no language model, or a parameter cannot be ignored.

    Example:
        Train a program that uses OpenAI's client::

            def program(base_url, state):
                client = OpenAI(base_url=base_url, api_key="none")
                asked = [{"role": "user", "content": state["question"]}]
                answer = client.chat.completions.create(model="policy", messages=asked)
                return float(state["answer"] in answer.choices[0].message.content)

            with ChatEndpoint(model) as endpoint:
                policy = AgentPolicy(model, endpoint.runs(program))
                GRPOTrainer(config=config, policy=policy, reward_model=EnvironmentReward()).train(tasks, num_iterations=100)
    """

    def __init__(
        self,
        policy: HFPolicy,
        *,
        ignore: Collection[str] = (),
        host: str = "127.0.0.1",
        public_host: str | None = None,
    ) -> None:
        sampling = getattr(policy, "sampling", None)
        if not isinstance(sampling, SamplingConfig):
            raise ConfigError(
                f"ChatEndpoint: policy must be the language model, an HFPolicy; got {describe(policy)}. Pass the policy that "
                "AgentPolicy gets."
            )
        needed = READ - {"tool_choice"}
        if isinstance(ignore, str) or needed.intersection(ignore):
            raise ConfigError(
                f"ChatEndpoint: ignore must be names of parameters that are refused otherwise; got {ignore!r}. Leave out those "
                f"that are read, and a single text: {sorted(needed.intersection(ignore))}."
            )
        self._sampling, self._ignore = sampling, frozenset(ignore)
        self._host, self._public_host = host, public_host or host
        self._server: _Server | None = None
        self._lines: dict[str, _Line] = {}
        self._ended: dict[str, str] = {}
        self._lock = threading.Lock()

    def runs(self, program: Callable[[str, Any], Any]) -> PlaysConversations:
        """An agent program for `AgentPolicy`, which calls `program(base_url, state)` for each conversation.

        If a limit has ended the conversation, an error of the program is taken for the refusal of its last request: the reward
        is 0, and `Conversation.info["error"]` has the error. After any other error, the conversation has no reward.

        Args:
            program: Holds one conversation over HTTP, and returns its reward, or one reward for each message of the policy. A
                plain function runs in a thread of its own. It may also be `async def`.
        """

        async def play(chat: Chat, state: Any) -> Any:
            thread, token, outcome = OwnThread(), secrets.token_urlsafe(16), "error"
            chat.threads.append(thread)
            url = self._open(token, _Line(chat, asyncio.get_running_loop()))
            try:
                rewards = await thread.run(program, url, state)
                outcome = "environment"
            except Exception as error:
                if chat.reached is None:
                    raise
                chat.info["error"] = f"{type(error).__name__}: {error}"
                raise ConversationEnded(chat.reached) from error
            finally:
                self._hang_up(token, chat.ended_by or chat.limited_by or outcome)
                await thread.finish()
            return rewards

        return play

    def close(self) -> None:
        """End the server. Requests that wait get an error. The server starts again when it is needed again."""
        for token in list(self._lines):
            self._hang_up(token, "error")
        with self._lock:
            server, self._server = self._server, None
        if server is not None:
            server.end()

    def __enter__(self) -> "ChatEndpoint":
        """The endpoint itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the endpoint."""
        self.close()

    def answer(self, token: str, body: bytes, *, is_responses: bool = False) -> tuple[str, bytes]:
        """The type and the bytes of the response to a request, for the threads of the server. Waits for the policy.

        Raises:
            ApiError: The conversation has ended, or the request is malformed or refused.
            ContractError: The chat template does not accept the messages or the tools.
        """
        given = parsed(body)
        line = self._line(token)
        request = as_chat_request(given, partial(_said_before, line.chat)) if is_responses else given
        arguments = read_request(request, self._sampling, self._ignore) | line.chat.seat_of(given.get("model"))
        ignored = {name: request[name] for name in sorted(self._ignore & request.keys()) if request[name] is not None}
        with self._lock:
            self.require(token)
            line.chat.ignored |= ignored
            future = asyncio.run_coroutine_threadsafe(line.chat.reply(**arguments), line.loop)
            line.waiting.add(future)
        try:
            return (responses_body if is_responses else response_body)(future.result(), given)
        except ConversationEnded as end:
            raise _gone(end.ended_by) from end
        except concurrent.futures.CancelledError as error:
            raise _gone(self._ended.get(token, "error")) from error
        finally:
            line.waiting.discard(future)

    def models(self, token: str) -> bytes:
        """The response to `GET /v1/models`: who speaks in a conversation.

        Raises:
            ApiError: The conversation has ended.
        """
        models = [
            {"id": name, "object": "model", "created": 0, "owned_by": "you"} for name in self._line(token).chat.models
        ]
        return json.dumps({"object": "list", "data": models}).encode()

    def require(self, token: str) -> None:
        """Raise an `ApiError` if there is no conversation with this URL, or no longer."""
        if token in self._ended:
            raise _gone(self._ended[token])
        if token not in self._lines:
            raise ApiError(404, "No conversation has this URL. Use the base_url that the program was called with.")

    def _line(self, token: str) -> _Line:
        self.require(token)
        with self._lock:
            line = self._lines.get(token)
        if line is None:  # it ended meanwhile
            raise _gone(self._ended.get(token, "error"))
        return line

    def _open(self, token: str, line: _Line) -> str:
        with self._lock:
            self._server = self._server or _Server(self, self._host)
            self._lines[token] = line
            return f"http://{self._public_host}:{self._server.server_address[1]}/{token}/v1"

    def _hang_up(self, token: str, ended_by: str) -> None:
        with self._lock:
            self._ended.setdefault(token, ended_by)
            if len(self._ended) > MOST_ENDED:
                del self._ended[next(iter(self._ended))]
            line = self._lines.pop(token, None)
            for future in [] if line is None else list(line.waiting):
                future.cancel()


class _Server(ThreadingTCPServer):
    """Serves an endpoint at a free port, in a thread for itself and one for each connection."""

    request_queue_size = 128

    def __init__(self, endpoint: ChatEndpoint, host: str) -> None:
        super().__init__((host, 0), _Handler)
        self.endpoint = endpoint
        self.strangers: dict[socket.socket, None] = {}
        """Connections that have not named a conversation, the oldest first."""
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._place = threading.Condition()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.1,), daemon=True, name="chat endpoint")
        self._thread.start()

    def process_request(self, request: Any, client_address: Any) -> None:
        arguments = (request, client_address)
        thread = threading.Thread(target=self.process_request_thread, args=arguments, daemon=True, name="chat endpoint")
        with self._place:
            while not self._place.wait_for(lambda: len(self._connections) < MOST_CONNECTIONS, PLACE_SECONDS):
                _end(next(iter(list(self.strangers)), None))
            self._connections[request] = thread
            self.strangers[request] = None
        thread.start()

    def shutdown_request(self, request: Any) -> None:
        self.strangers.pop(request, None)
        with self._place:
            self._connections.pop(request, None)
            self._place.notify()
        super().shutdown_request(request)

    def end(self) -> None:
        """Close the port and the connections, and wait for the threads."""
        self.shutdown()
        self.server_close()
        self._thread.join()
        for connection, thread in list(self._connections.items()):
            _end(connection)  # a response that is being written is finished
            thread.join(REQUEST_SECONDS)


class _Request(io.RawIOBase):
    """The bytes that a client sends, up to a time and a size."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._until = time.monotonic() + REQUEST_SECONDS
        self.left = HEAD_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        seconds = self._until - time.monotonic()
        if seconds <= 0 or self.left <= 0:
            raise TimeoutError
        self._connection.settimeout(seconds)  # of the whole request: a byte now and then does not keep the connection
        count = self._connection.recv_into(buffer)
        self.left -= count
        return count


class _Handler(BaseHTTPRequestHandler):
    """Answers the request of one connection. Every error is a response in OpenAI's form."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._request = _Request(self.connection)
        self.rfile = io.BufferedReader(self._request)

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # the client is gone
            super().handle()

    def do_POST(self) -> None:
        self._unread = 0
        status, kind = 200, "application/json"
        try:
            kind, body = self._response()
        except Exception as error:  # the program gets it, and may fail with it
            self._skip()
            status, body = error_body(error)
        self._send(status, kind, body)

    do_GET = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_POST

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer what is no HTTP request."""
        self._send(code, "application/json", error_body(ApiError(code, message or self.responses[code][1]))[1])

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def _response(self) -> tuple[str, bytes]:
        length = self.headers.get("Content-Length", "" if "Transfer-Encoding" in self.headers else "0")
        if not length.isdecimal() or len(length) > 15:
            raise ApiError(
                411, f"A request needs a Content-Length in bytes; got {length[:80]!r}. Send the body at once."
            )
        self._unread = self._request.left = int(length)
        token, *path = self.path.split("?")[0].strip("/").split("/")
        method = METHODS.get("/".join(path))
        if method is None:
            raise ApiError(404, f"Only /{', /'.join(METHODS)} are served; got {self.path[:200]!r}.")
        if self.command != method:
            raise ApiError(405, f"{self.path[:200]} needs the method {method}; got {self.command}.")
        self.server.endpoint.require(token)  # before the body is read: a stranger gets no memory
        self.server.strangers.pop(self.request, None)
        if self._unread > MOST_BYTES:
            raise ApiError(413, f"A request may have {MOST_BYTES} bytes; got {length}. Shorten the messages.")
        body, self._unread = self.rfile.read(self._unread), 0
        if method == "POST":
            return self.server.endpoint.answer(token, body, is_responses=path[-1] == "responses")
        return "application/json", self.server.endpoint.models(token)

    def _skip(self) -> None:
        """Read the rest of the request, so that the client reads the answer. Keep nothing."""
        while part := self.rfile.read(min(self._unread, HEAD_BYTES)):
            self._unread -= len(part)

    def _send(self, status: int, kind: str, body: bytes) -> None:
        self.connection.settimeout(REQUEST_SECONDS)
        self.send_response(status)
        # Clients would keep the connection for later requests, but the next conversation has another URL and often another
        # client: a run would end with too many open files. This header closes the connection here, too.
        headers = {"Content-Type": kind, "Content-Length": len(body), "Connection": "close"}
        for name, value in (headers | {"x-should-retry": "false"}).items():  # for OpenAI's clients
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _end(connection: socket.socket | None) -> None:
    with contextlib.suppress(OSError):  # the client has closed it
        if connection is not None:
            connection.shutdown(socket.SHUT_RD)


def _said_before(chat: Chat, name: str) -> list[Message]:
    said = chat.said_before(name)
    if said is None:
        raise ApiError(404, f"No reply of this conversation has the id {name!r}.", param="previous_response_id")
    return said


def _gone(ended_by: str) -> ApiError:
    message = f"The conversation ended by {ended_by!r}. Catch this error (status 410), and return a reward."
    # gone, and not an error to retry: clients of OpenAI's API repeat 429 and 5xx
    return ApiError(410, message, code="conversation_ended", ended_by=ended_by)
