"""`ChatEndpoint`: agent programs that speak OpenAI's API over HTTP."""

import asyncio
import contextlib
import gc
import http.client
import json
import logging
import re
import socket
import sys
import threading
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
import torch
from openai import AsyncOpenAI, OpenAI

from adapters.agents import AgentPolicy, Chat, ChatEndpoint, Conversation, EnvironmentReward, endpoint, rollouts
from adapters.agents.templates import TOOL
from adapters.llm import SamplingConfig
from grpo import GRPOConfig, GRPOTrainer
from grpo.errors import ConfigError
from tests.support.agents import Scripted, chat_tokenizer, language_model, says_call
from tests.unit.adapters.agents.test_conversations import text_and_sampled

USER = {"role": "user", "content": "you"}
ASKED: dict[str, Any] = {"model": "policy", "messages": [USER]}


def says(*turns: str, **options: Any) -> Any:
    return Scripted(turns, **{"max_new_tokens": 200} | options).policy


def converse(policy: Any, program: Callable[..., Any], states: Any = ("you",), **options: Any) -> list[Conversation]:
    """Conversations of a program with an endpoint that is closed afterwards."""
    with ChatEndpoint(policy) as served:
        agent = AgentPolicy(policy, served.runs(program), **options)
        return [row for group in agent.generate_actions(list(states), 1) for row in group]


def client_of(base_url: str, **options: Any) -> OpenAI:
    return OpenAI(base_url=base_url, api_key="none", **{"max_retries": 0} | options)


def with_client(use: Callable[[OpenAI], Any]) -> Callable[..., Any]:
    """A program that returns what `use` returns."""

    def program(base_url: str, state: Any) -> Any:
        with client_of(base_url) as client:
            return use(client)

    return program


def raw(base_url: str, method: str = "POST", path: str = "/chat/completions", body: Any = ASKED, **headers: str) -> Any:
    """The status and the JSON of a response."""
    split = urlsplit(base_url)
    connection = http.client.HTTPConnection(split.netloc, timeout=20)
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, split.path + path, sent, headers)
    response = connection.getresponse()
    read = response.status, json.loads(response.read())
    connection.close()
    return read


def streamed(client: OpenAI, **request: Any) -> tuple[dict[str, Any], str | None, Any]:
    """The message of a stream, as clients put it together, with the finish reason and the usage."""
    message: dict[str, Any] = {"role": "", "content": ""}
    reason, usage = None, None
    for chunk in client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **request):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            message["role"] += choice.delta.role or ""
            message["content"] += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                message.setdefault("tool_calls", []).append(call.model_dump(exclude={"index"}))
                assert call.index == len(message["tool_calls"]) - 1
    return message, reason, usage


def test_thoughts_that_the_tokenizers_parser_separates_are_sent() -> None:
    def use(client: OpenAI) -> float:
        said = client.chat.completions.create(**ASKED).choices[0].message.model_dump()
        assert (said["reasoning_content"], said["content"]) == ("hm", "Yes.")
        (chunk, _) = client.chat.completions.create(model="m", messages=[USER, said, USER], stream=True)
        assert chunk.choices[0].delta.model_extra == {"reasoning_content": "so"}
        return 1.0

    policy = says("<think>hm</think>Yes.", "<think>so</think>No.")
    policy.tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "reasoning_content": {"open": "<think>", "close_pattern": "</think>", "content": "text"},
            "content": {"close_pattern": r"<\|im_end\|>", "content": "text"},
        },
    }
    (found,) = converse(policy, with_client(use))
    assert found.reward == 1.0


@pytest.mark.parametrize("streams", [False, True])
def test_a_conversation_with_tools_is_one_context(streams: bool) -> None:
    """Two calls in a turn, whose results come back in the other order, and a text. The usage counts real tokens."""
    calls = says_call(arguments='{"topic":   "sun"}') + says_call("other", "{}")
    usages = []

    def use(client: OpenAI) -> list[float]:
        messages: list[Any] = [{"role": "developer", "content": [{"type": "text", "text": t} for t in "ab"]}, USER]
        for expected in ("tool_calls", "stop"):
            request: Any = {"model": "m", "messages": messages, "tools": [TOOL], "tool_choice": "auto"}
            if streams:
                said, reason, usage = streamed(client, **request)
            else:
                answer = client.chat.completions.create(**request)
                assert (answer.model, answer.object) == ("m", "chat.completion")
                choice, usage = answer.choices[0], answer.usage
                said, reason = choice.message.model_dump(), choice.finish_reason
            assert reason == expected
            usages.append((usage.prompt_tokens, usage.completion_tokens, usage.total_tokens))
            messages.append(said)
            for call in reversed(said.get("tool_calls") or []):
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": call["function"]["name"]})
                assert isinstance(call["function"]["arguments"], str)
        assert messages[-1]["content"] == "Fine."
        return [0.25, 1.0]

    (found,) = converse(says("Hm. " + calls, "Fine."), with_client(use))
    ((text, sampled),) = text_and_sampled(found)
    assert sampled == f"Hm. {calls}<|im_end|>|Fine.<|im_end|>"
    assert "<|im_start|>system\na\nb<|im_end|>" in text
    results = [message for message in found.messages if message["role"] == "tool"]
    assert [(result["content"], result["name"]) for result in results] == [("lookup",) * 2, ("other",) * 2]
    assert (found.rewards, found.ended_by) == ((0.25, 1.0), "environment")
    (segment,) = found.segments
    begin, length = segment.num_context_tokens, len(segment.token_ids)
    first, second = (turn.num_tokens for turn in found.turns)
    assert usages == [(begin, first, begin + first), (length - second, second, length)]


def test_a_message_with_calls_only_has_no_content() -> None:
    def use(client: OpenAI) -> float:
        message = client.chat.completions.create(**ASKED, tools=[TOOL]).choices[0].message
        assert message.content is None
        assert message.tool_calls
        said = {"role": "assistant", "content": None, "tool_calls": [message.tool_calls[0].model_dump()]}
        result = {"role": "tool", "content": "sun", "tool_call_id": message.tool_calls[0].id}
        client.chat.completions.create(model="m", messages=[USER, said, result], tools=[TOOL])
        return 1.0

    (found,) = converse(says(says_call(), "fine"), with_client(use))
    assert (found.reward, len(found.segments)) == (1.0, 1)


def test_a_program_may_be_async_and_the_caller_may_have_an_event_loop() -> None:
    """As in a notebook."""

    async def program(base_url: str, state: Any) -> float:
        async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
            said = await asyncio.gather(*(client.chat.completions.create(**ASKED) for _ in range(2)))
        return float(sum(int(answer.choices[0].message.content) for answer in said))

    async def cell() -> list[Conversation]:
        return converse(says(*"1234"), program, ["a", "b"])

    assert sum(row.reward for row in asyncio.run(cell())) == 10  # in whatever order the requests came


def test_limits_and_stop_strings_of_a_request() -> None:
    def use(client: OpenAI) -> float:
        def ask(**request: Any) -> tuple[str, str, int]:
            answer = client.chat.completions.create(**ASKED, **request)
            choice = answer.choices[0]
            return choice.message.content, choice.finish_reason, answer.usage.completion_tokens

        assert ask(max_tokens=3) == ("abc", "length", 3)
        assert ask(max_tokens=9, max_completion_tokens=2) == ("ab", "length", 2)
        assert ask(stop="bd") == ("abc", "stop", 6)
        assert ask(stop=["x", "e"], max_tokens=100) == ("abcd", "stop", 6)
        assert ask(tools=[TOOL], tool_choice="none") == ("abcdef", "stop", 7)
        assert ask(max_tokens=9) == ("abcdefgh", "length", 8)  # the policy's own maximum: this context ends
        goes_on = [
            *ASKED["messages"],
            {"role": "assistant", "content": "abcdefgh"},
            {"role": "user", "content": "more"},
        ]
        with pytest.raises(openai.APIStatusError, match="The conversation ended by 'length'"):
            client.chat.completions.create(**ASKED | {"messages": goes_on})
        return 0.5

    policy = says("abcdef", "abcdef", "abcbdf", "abcdef", "abcdef", "abcdefghi", max_new_tokens=8)
    (found,) = converse(policy, with_client(use), max_turns=9)
    assert (found.ended_by, found.reward) == ("environment", 0.5)
    texts = [sampled for _, sampled in text_and_sampled(found)]
    assert texts == ["abc", "ab", "abcbdf", "abcdef", "abcdef<|im_end|>", "abcdefgh"]
    assert not any("Tools:" in text for text, _ in text_and_sampled(found))  # tool_choice="none" shows no tools


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"temperature": 0.5},
        r"temperature must be 1\.5 or left out, because the policy is .* got float 0\.5\. Set Sampl",
    ),
    ({"top_p": 0.9}, r"top_p must be 1\.0 or left out, .* Set SamplingConfig\(top_p=\.\.\.\)"),
    ({"top_k": 5}, r"top_k must be left out, .* Set SamplingConfig\(top_k=\.\.\.\)"),
    ({"n": 2}, r"n must be 1 or left out, .* Send n requests"),
    ({"tool_choice": "required"}, r"tool_choice must be 'auto' or 'none'; .* the policy decides"),
    ({"tool_choice": {"type": "function", "function": {"name": "a"}}}, r"tool_choice must be 'auto'"),
    ({"response_format": {"type": "json_object"}}, r"response_format must be .* Describe the format in a message"),
    ({"logprobs": True}, r"logprobs must be False or left out.* The conversation keeps the log-probs"),
    ({"frequency_penalty": 0.1}, r"frequency_penalty must be 0 or left out.* Leave it out"),
    ({"presence_penalty": 0.1}, r"presence_penalty must be 0 or left out"),
    ({"logit_bias": {"5": 1}}, r"logit_bias must be {} or left out"),
    ({"reasoning_effort": "high"}, r"reasoning_effort must be left out"),
    ({"functions": []}, r"functions must be left out, .* Use tools"),
    ({"messages": []}, r"messages must be a list of messages, with at least one; got a list of 0"),
    ({"messages": None}, r"messages must be a list of messages"),
    ({"messages": ["hi"]}, r"messages\[0\] must be a message"),
    ({"messages": [USER, {"content": "hi"}]}, r"messages\[1\] must be a message"),
    ({"messages": [{"role": "user", "content": 7}]}, r"messages\[0\]\.content must be a text, or a list of parts"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, r"describe them in a text"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, r"messages\[0\]\.tool_calls must be a list of calls"),
    ({"messages": [{"role": "assistant", "tool_calls": 7}]}, r"messages\[0\]\.tool_calls must be a list of calls"),
    ({"messages": [{"role": "a", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}]}, r"or a JSON text"),
    ({"max_tokens": 0}, r"max_tokens must be an integer of at least 1; got int 0"),
    ({"max_completion_tokens": 2.5}, r"max_completion_tokens must be an integer of at least 1"),
    ({"stop": [""]}, r"stop must be a text or a list of texts"),
    ({"stop": 7}, r"stop must be a text or a list of texts"),
    ({"tools": [{"type": "web_search"}]}, r"tools must be a list of"),
    ({"tools": "lookup"}, r"tools must be a list of"),
]


def test_what_would_change_the_distribution_is_refused(subtests: pytest.Subtests) -> None:
    """Nothing is sampled, and the conversation goes on."""

    def program(base_url: str, state: Any) -> float:
        for request, message in REFUSED:
            with subtests.test(request=request):
                status, answer = raw(base_url, body=ASKED | request)
                assert status == 400
                error = answer["error"]
                assert error["type"] == "invalid_request_error"
                assert re.search(message, error["message"]), error["message"]
                assert error["message"].startswith(error["param"] or "")
        return 1.0 if raw(base_url)[0] == 200 else 0.0

    (found,) = converse(says("fine", sampling=SamplingConfig(temperature=1.5)), program)
    assert (found.reward, len(found.turns)) == (1.0, 1)


def test_settings_that_change_nothing_are_accepted() -> None:
    neutral = {
        "temperature": 1.5, "top_p": 1, "top_k": None, "n": 1, "logprobs": False, "logit_bias": {},
        "frequency_penalty": 0, "presence_penalty": 0.0, "response_format": {"type": "text"}, "user": "me", "store": True,
        "metadata": {"a": "b"}, "parallel_tool_calls": False, "seed": 5, "tools": None, "stop": None, "max_tokens": None,
    }  # fmt: skip

    def program(base_url: str, state: Any) -> float:
        status, answer = raw(base_url, body=ASKED | neutral)
        assert status == 200, answer
        return 1.0

    policy = says("fine", sampling=SamplingConfig(temperature=1.5))
    assert converse(policy, program)[0].reward == 1.0


def test_bad_http_gets_an_error_in_openais_form(subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MOST_BYTES", 1000)
    cases: list[tuple[dict[str, Any], int, str]] = [
        ({"body": b"{"}, 400, "The body must be JSON"),
        ({"body": b"\xff"}, 400, "The body must be JSON"),
        ({"body": b"[" * 900}, 400, "must be"),
        ({"body": b"[]"}, 400, "The body must be a JSON object; got a list of 0"),
        ({"body": b"7" * 1001}, 413, "A request may have 1000 bytes; got 1001"),
        ({"body": ASKED, "Content-Length": "many"}, 411, "A request needs a Content-Length in bytes; got 'many'"),
        ({"body": ASKED, "Content-Length": "9" * 5000}, 411, "A request needs a Content-Length"),
        ({"body": b"", "Transfer-Encoding": "chunked"}, 411, "A request needs a Content-Length"),
        ({"path": "/embeddings"}, 404, "Only /v1/chat/completions, /v1/responses, /v1/models are served"),
        ({"method": "GET", "body": b""}, 405, "needs the method POST; got GET"),
        ({"method": "DELETE", "path": "/models", "body": b""}, 405, "needs the method GET; got DELETE"),
        ({"method": "BREW"}, 501, "BREW"),
        ({"body": ASKED | {"messages": [{"role": "user", "content": "\ud800"}]}}, 500, "Error"),
    ]

    def program(base_url: str, state: Any) -> float:
        for request, status, message in cases:
            with subtests.test(request=str(request)[:80]):
                found, answer = raw(base_url, **request)
                assert (found, message in answer["error"]["message"]) == (status, True), answer
                assert answer["error"].keys() == {"message", "type", "param", "code"}
        address = ("127.0.0.1", urlsplit(base_url).port)
        with subtests.test("no HTTP"), socket.create_connection(address) as connection:
            connection.sendall(b"hello\r\n\r\n")
            assert b"Bad request syntax" in connection.recv(1000)
        with subtests.test("a client that leaves"), socket.create_connection(address) as connection:
            connection.sendall(b"POST / HTTP/1.1\r\nContent-Length: 100\r\n\r\n{")
        with subtests.test("an unknown URL"):
            status, answer = raw(base_url.replace("/v1", "x/v1"))
            assert (status, "No conversation has this URL" in answer["error"]["message"]) == (404, True)
        return 1.0 if raw(base_url, Expect="100-continue")[0] == 200 else 0.0

    (found,) = converse(says("fine"), program)
    assert (found.reward, len(found.turns)) == (1.0, 1)


def exchange(base_url: str, *sent: bytes) -> bytes:
    """What comes back through one connection, until the endpoint closes it."""
    received = b""
    with socket.create_connection(("127.0.0.1", urlsplit(base_url).port), timeout=20) as connection:
        for part in sent:
            connection.sendall(part)
            time.sleep(0.02 if len(sent) > 9 else 0)
        while part := connection.recv(10_000):
            received += part
    return received


def request_to(base_url: str, body: bytes = json.dumps(ASKED).encode()) -> bytes:
    path = urlsplit(base_url).path + "/chat/completions"
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def test_every_response_ends_its_connection() -> None:
    """Frameworks keep a client for each URL, and each conversation has one: open connections would fill the table of files."""

    def program(base_url: str, state: Any) -> float:
        split = urlsplit(base_url)
        connection = http.client.HTTPConnection(split.netloc)
        for method, path, body, status in (
            ("POST", "/chat/completions", ASKED, 200), ("POST", "/chat/completions", {}, 400), ("GET", "/models", {}, 200),
            ("PUT", "/models", ASKED, 405), ("POST", "/chat/completions", ASKED, 200), ("X", "", {}, 501),
        ):  # fmt: skip
            connection.request(method, split.path + path, json.dumps(body))
            response = connection.getresponse()
            assert (response.status, response.will_close) == (status, True)
            response.read()
        connection.putrequest("POST", split.path)
        connection.putheader("Transfer-Encoding", "chunked")  # such a body is not read
        connection.endheaders()
        assert connection.getresponse().status == 411
        connection.close()
        return 1.0

    assert converse(says("a", "b"), program)[0].reward == 1.0


def test_two_conversations_in_one_connection_get_their_own_turns() -> None:
    """A client that connects again answers both. Of two requests in one connection, the second is not read."""
    urls, done = dict[str, str](), threading.Event()

    def program(base_url: str, state: Any) -> float:
        urls[state] = base_url
        if state == "you":
            assert done.wait(20)
            return 1.0
        try:
            _wait_for(lambda: len(urls) == 2)
            connection = http.client.HTTPConnection(urlsplit(base_url).netloc)
            for name in ("you", "me", "you"):
                connection.request("POST", urlsplit(urls[name]).path + "/chat/completions", json.dumps(ASKED))
                assert connection.getresponse().status == 200
            both = exchange(base_url, request_to(urls["me"]) + request_to(urls["you"]))
            assert both.count(b"HTTP/1.1 200") == both.count(b"HTTP/1.1 ") == 1
        finally:
            done.set()
        return 1.0

    you, me = converse(says(*"abcde"), program, ["you", "me"])
    assert [(row.reward, len(row.turns)) for row in (you, me)] == [(1.0, 2), (1.0, 2)]


def test_a_strangers_request_costs_no_memory() -> None:
    """The token is looked at before the body is read. The client reads the answer."""
    body = bytes(30 * 2**20)

    def program(base_url: str, state: Any) -> float:
        tracemalloc.start()
        try:
            for url, status in ((base_url.replace("/v1", "x/v1"), 404), (base_url + "/elsewhere", 404)):
                assert raw(url, body=body)[0] == status
            assert tracemalloc.get_traced_memory()[1] < 2**21
        finally:
            tracemalloc.stop()
        return float(raw(base_url)[0])

    assert converse(says("a"), program)[0].reward == 200.0


def test_slow_and_endless_requests_are_cut_off(subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then does not keep a connection open. Neither does a head without end."""
    monkeypatch.setattr(endpoint, "REQUEST_SECONDS", 0.5)

    def program(base_url: str, state: Any) -> float:
        whole, slow = request_to(base_url), [b"."] * 1000
        cases: dict[str, list[bytes]] = {
            "line": slow,
            "headers": [whole.split(b"\r\n")[0] + b"\r\n", *slow],
            "body": [whole[:-100], *slow],
            "a stranger's body": [whole.replace(b"/v1", b"x/v1")[:-1].replace(b"Length: ", b"Length: 99"), *slow],
            "no end": [b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 90, *[b"c: " + b"d" * 60_000 + b"\r\n"] * 9],
        }
        for name, sent in cases.items():
            with subtests.test(name):
                answered = b""
                with contextlib.suppress(ConnectionError):
                    answered = exchange(base_url, *sent)
                assert answered == b""
        return float(raw(base_url)[0])

    assert converse(says("a"), program, timeout=None)[0].reward == 200.0


def test_the_number_of_connections_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest of the connections that say nothing is closed for a new one, and a request that waits for its turn is kept."""
    monkeypatch.setattr(endpoint, "MOST_CONNECTIONS", 3)
    monkeypatch.setattr(endpoint, "PLACE_SECONDS", 0.05)
    policy = says("a", "b", "c")
    real, began, goes_on = policy.sample_tokens, threading.Event(), threading.Event()
    policy.sample_tokens = lambda *a, **k: (began.set(), goes_on.wait(20), real(*a, **k))[2]

    def program(base_url: str, state: Any) -> float:
        statuses = list[int]()
        waits = threading.Thread(target=lambda: statuses.append(raw(base_url)[0]))
        waits.start()
        assert began.wait(20)
        address = ("127.0.0.1", urlsplit(base_url).port)
        silent = [socket.create_connection(address, timeout=20) for _ in range(6)]
        try:
            for connection in silent[:4]:
                assert connection.recv(1) == b""
            _wait_for(lambda: sum(thread.name == "chat endpoint" for thread in threading.enumerate()) == 1 + 3)
            assert raw(base_url.replace("/v1", "x/v1"))[0] == 404
        finally:
            goes_on.set()
            waits.join()
            for connection in silent:
                connection.close()
        return float(statuses[0])

    assert converse(policy, program)[0].reward == 200.0


def test_clients_that_are_not_closed_leave_nothing_behind() -> None:
    """They outlive their event loop. A transport that is open then says "Event loop is closed", or that it was not closed."""
    kept, policy = list[Any](), says(*"abcd")

    async def program(base_url: str, state: Any) -> float:
        kept.append(AsyncOpenAI(base_url=base_url, api_key="none"))
        await kept[-1].chat.completions.create(**ASKED)
        return 1.0

    with ChatEndpoint(policy) as served:
        agent = AgentPolicy(policy, served.runs(program))
        for _ in range(2):
            assert [row.reward for row in agent.generate_actions(["you"], 2)[0]] == [1.0, 1.0]
        found = list[str]()
        with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            patch.setattr(sys, "unraisablehook", lambda unraisable: found.append(str(unraisable.exc_value)))
            kept.clear()
            gc.collect()
    assert (found, [str(warning.message) for warning in warned]) == ([], [])


def test_models_are_listed() -> None:
    def use(client: OpenAI) -> float:
        assert [model.id for model in client.models.list()] == ["policy"]
        client.chat.completions.create(**ASKED)
        return 1.0

    assert converse(says("a"), with_client(use))[0].reward == 1.0


def test_the_end_of_a_conversation_reaches_the_program(subtests: pytest.Subtests) -> None:
    """A program that catches it gives a reward; else the reward is 0. An error before any limit is a failure."""

    def catches(client: OpenAI) -> float:
        client.chat.completions.create(**ASKED)
        with pytest.raises(openai.APIStatusError) as caught:
            client.chat.completions.create(**ASKED)
        assert caught.value.status_code == 410
        assert caught.value.code == "conversation_ended"
        assert caught.value.body["ended_by"] == "max_turns"
        return 7.0

    def does_not(client: OpenAI) -> float:
        for _ in range(2):
            client.chat.completions.create(**ASKED)
        return 7.0

    def fails(client: OpenAI) -> float:
        client.chat.completions.create(**ASKED)
        raise KeyError("lost")

    cases = [
        (catches, "max_turns", 7.0, None),
        (does_not, "max_turns", 0.0, "APIStatusError: "),
        (fails, "error", None, "KeyError: 'lost'"),
    ]
    for use, ended_by, reward, error in cases:
        with subtests.test(ended_by=ended_by, reward=reward):
            logging.getLogger("grpo").disabled = use is fails
            (found,) = converse(says("a", "b"), with_client(use), max_turns=1)
            logging.getLogger("grpo").disabled = False
            assert (found.ended_by, len(found.turns)) == (ended_by, 1)
            assert found.reward == reward if reward is not None else found.reward != found.reward
            assert found.info.get("error", "").startswith(error or "")
            assert ("error" in found.info) == (error is not None)


def test_a_url_is_refused_after_its_conversation() -> None:
    policy = says("a", "b")
    urls: list[str] = []

    def program(base_url: str, state: Any) -> float:
        urls.append(base_url)
        raw(base_url)
        return 1.0

    with ChatEndpoint(policy) as served:
        agent = AgentPolicy(policy, served.runs(program))
        agent.generate_actions(["you"], 1)
        for body in (ASKED, {}):
            status, answer = raw(urls[0], body=body)
            assert (status, answer["error"]["ended_by"]) == (410, "environment")
        assert raw(urls[0], "GET", "/models")[0] == 410
        agent.generate_actions(["you"], 1)
        assert urls[0] != urls[1]
        assert urlsplit(urls[0]).netloc == urlsplit(urls[1]).netloc
    with pytest.raises(ConnectionRefusedError):
        raw(urls[0])


def test_the_number_of_remembered_conversations_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MOST_ENDED", 2)
    policy, urls, statuses = says(), [], []

    def program(base_url: str, state: Any) -> float:
        urls.append(base_url)
        return 1.0

    with ChatEndpoint(policy) as served:
        AgentPolicy(policy, served.runs(program), concurrency=1).generate_actions(["you"], 3)
        statuses = [raw(url)[0] for url in urls]
    assert statuses == [404, 410, 410]


def test_two_clients_at_once_share_the_conversation() -> None:
    """Each has a history of its own, with two turns. Nothing is lost."""

    def program(base_url: str, state: Any) -> float:
        both = threading.Barrier(2, timeout=20)

        def talk(name: str) -> None:
            messages: list[Any] = [{"role": "user", "content": name}]
            for _ in range(2):
                said = raw(base_url, body={"model": "m", "messages": messages})[1]["choices"][0]["message"]
                messages += [said, {"role": "user", "content": "more"}]
                both.wait()

        threads = [threading.Thread(target=talk, args=(name,)) for name in ("one", "two")]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return 1.0

    (found,) = converse(says("a  ", "b  ", "c", "d"), program)
    texts = text_and_sampled(found)
    said = "".join(sampled for _, sampled in texts).replace("<|im_end|>", "").replace("|", "")
    assert sorted(said.replace(" ", "")) == ["a", "b", "c", "d"]
    for name in ("one", "two"):
        last = [text for text, _ in texts if f"user\n{name}<|im_end|>" in text][-1]
        assert last.count("  <|im_end|>") == 1  # as it was sampled
        assert last.endswith(("c<|im_end|>", "d<|im_end|>"))
    assert len(found.turns) == 4


def test_a_client_that_gives_up_and_asks_again_gets_another_turn() -> None:
    """Both turns are scored. OpenAI's client asks again after a timeout."""
    policy = says("late", "again")
    real, has_given_up = policy.sample_tokens, threading.Event()
    policy.sample_tokens = lambda *a, **k: (has_given_up.wait(20), real(*a, **k))[1]

    def program(base_url: str, state: Any) -> float:
        with pytest.raises(openai.APITimeoutError), client_of(base_url, timeout=1.0) as client:
            client.chat.completions.create(**ASKED)
        has_given_up.set()
        return float(raw(base_url)[1]["choices"][0]["message"]["content"] == "again")

    (found,) = converse(policy, program)
    assert found.reward == 1.0
    assert [sampled for _, sampled in text_and_sampled(found)] == ["late<|im_end|>", "again<|im_end|>"]


def test_a_request_that_waits_when_the_program_returns_is_refused() -> None:
    """Also while other conversations go on, for which the policy samples."""
    policy = says("a", "b")
    real, began = policy.sample_tokens, threading.Event()
    policy.sample_tokens = lambda *a, **k: (began.set(), time.sleep(0.2), real(*a, **k))[2]
    statuses: list[Any] = []

    def program(base_url: str, state: Any) -> float:
        if state == "other":
            _wait_for(lambda: bool(statuses))
            return float(raw(base_url)[0])
        threading.Thread(target=lambda: statuses.append(raw(base_url))).start()
        began.wait(10)
        return 1.0

    found, other = converse(policy, program, ["you", "other"])
    assert [(status, answer["error"]["ended_by"]) for status, answer in statuses] == [(410, "environment")]
    assert (len(found.turns), other.reward) == (0, 200.0)


def test_a_program_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "GRACE_SECONDS", 0.05)
    release, late = threading.Event(), []

    def program(base_url: str, state: Any) -> float:
        raw(base_url)
        if state == "bad":
            release.wait(20)
            late.append(raw(base_url))
        return 1.0

    policy = says(*"abc")
    with ChatEndpoint(policy) as served:
        sampled = AgentPolicy(policy, served.runs(program), timeout=1.0).sample_actions(["bad", "you"], 1)
        (bad,), (good,) = sampled.actions
        assert (bad.ended_by, len(bad.turns), bad.reward != bad.reward) == ("timeout", 1, True)
        assert good.reward == 1.0
        assert sampled.metrics["agents/abandoned"] == 1
        release.set()
        _wait_for(lambda: bool(late))
    assert (late[0][0], late[0][1]["error"]["ended_by"]) == (410, "timeout")


def test_the_time_of_the_model_is_not_the_programs() -> None:
    policy = says("a")
    real = policy.sample_tokens
    policy.sample_tokens = lambda *a, **k: (time.sleep(1.3), real(*a, **k))[1]
    (found,) = converse(policy, lambda base_url, state: float(raw(base_url)[0]), timeout=1.0)
    assert (found.ended_by, found.reward) == ("environment", 200.0)


def test_errors_of_the_sampler_end_all_programs() -> None:
    policy, outcomes = says(), []

    def broken(*args: Any, **options: Any) -> Any:
        raise MemoryError("no memory")

    def program(base_url: str, state: Any) -> float:
        outcomes.append(raw(base_url))
        return 1.0

    policy.sample_tokens = broken
    with pytest.raises(MemoryError, match="no memory"):
        converse(policy, program, ["a", "b"])
    _wait_for(lambda: len(outcomes) == 2)
    assert [status for status, _ in outcomes] == [410, 410]


def test_no_port_and_no_thread_stay_after_close() -> None:
    before = threading.active_count()
    policy, clients = says("a", "b"), []

    def program(base_url: str, state: Any) -> float:
        clients.append(client_of(base_url))  # it keeps its connection open
        clients[-1].chat.completions.create(**ASKED)
        return 1.0

    served = ChatEndpoint(policy)
    served.close()
    agent = AgentPolicy(policy, served.runs(program))
    for _ in range(2):  # the endpoint starts again
        assert agent.generate_actions(["you"], 1)[0][0].reward == 1.0
        began = time.monotonic()
        served.close()
        assert time.monotonic() - began < 10  # it does not wait for idle connections
        _wait_for(lambda: threading.active_count() <= before)
        with pytest.raises(openai.APIConnectionError):
            clients[-1].chat.completions.create(**ASKED)
        clients[-1].close()


def test_what_is_no_language_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="policy must be the language model, an HFPolicy; got"):
        ChatEndpoint(AgentPolicy(language_model(), lambda state: None))  # type: ignore[arg-type]


# Real models


CALL = says_call(arguments='{"topic": "rain"}')


def calling_model(**options: Any) -> Any:
    """A model that often calls a tool, because the whole call is one token, and often ends its turn."""
    tokenizer = chat_tokenizer()
    tokenizer.add_tokens([CALL])
    policy = language_model(tokenizer=tokenizer, **{"max_new_tokens": 24, "end_scale": 3.0} | options)
    prompt = tokenizer("<|im_start|>assistant\n", return_tensors="pt", add_special_tokens=False)["input_ids"]
    with torch.no_grad():
        state = policy.model(prompt, output_hidden_states=True).hidden_states[-1][0, -1]
        weight = policy.model.get_output_embeddings().weight
        for token in (tokenizer.convert_tokens_to_ids(CALL), tokenizer.eos_token_id):
            weight[token] = 8 * state / state.dot(state)
    return policy


def agent_loop(base_url: str, state: Any) -> float:
    """Calls tools for up to three turns, the second of which is streamed. The reward is the number of calls."""
    messages: list[Any] = [{"role": "user", "content": state}]
    count = 0
    with client_of(base_url) as client:
        for turn in range(3):
            request: Any = {"model": "policy", "messages": messages, "tools": [TOOL], "max_tokens": 20}
            if turn == 1:
                said, _, _ = streamed(client, **request)
            else:
                said = client.chat.completions.create(**request).choices[0].message.model_dump()
            calls = said.get("tool_calls") or []
            count += len(calls)
            answers = [{"role": "tool", "content": "fine", "tool_call_id": call["id"]} for call in calls]
            messages += [said, *(answers or [{"role": "user", "content": "go on"}])]
    return float(count)


async def direct_loop(chat: Chat, state: Any) -> float:
    """The same as `agent_loop`, without HTTP."""
    messages: list[Any] = [{"role": "user", "content": state}]
    count = 0
    for _ in range(3):
        said = await chat(messages, [TOOL], max_new_tokens=20)
        calls = said.get("tool_calls", [])
        count += len(calls)
        answers = [{"role": "tool", "content": "fine", "tool_call_id": call["id"]} for call in calls]
        messages += [said, *(answers or [{"role": "user", "content": "go on"}])]
    return float(count)


def test_a_program_over_http_samples_and_scores_what_it_would_without_http() -> None:
    """Three turns with tools, one of them streamed. The tokens do not depend on the number of conversations at a time."""
    policy = calling_model()
    with ChatEndpoint(policy) as served:
        torch.manual_seed(0)
        agent = AgentPolicy(policy, served.runs(agent_loop), concurrency=64)
        sampled = agent.sample_actions(["you", "me"], 2)
        rows = [row for group in sampled.actions for row in group]
        scores = agent.score_actions([None] * 4, rows)
    assert torch.equal(scores.mask, sampled.mask)
    torch.testing.assert_close(scores.log_probs, sampled.behaviour_log_probs, atol=1e-5, rtol=0)
    torch.manual_seed(0)
    direct = AgentPolicy(policy, direct_loop, concurrency=1).generate_actions(["you", "me"], 2)
    expected = [[segment.token_ids for segment in row.segments] for group in direct for row in group]
    assert [[segment.token_ids for segment in row.segments] for row in rows] == expected
    assert {len(row.turns) for row in rows} == {3}
    assert 1 in {len(row.segments) for row in rows}
    assert sum(row.reward for row in rows) > 1
    assert any(
        turn.num_tokens == 20 for row in rows for turn in row.turns[:2]
    )  # truncated, and the conversation went on


def test_a_program_is_trained_as_it_is() -> None:
    policy = calling_model()
    with ChatEndpoint(policy) as served:
        agent = AgentPolicy(policy, served.runs(agent_loop))
        before = {name: weight.clone() for name, weight in agent.get_parameters().items()}
        config = GRPOConfig(group_size=4, seed=0, learning_rate=1e-3)
        trainer = GRPOTrainer(config=config, policy=agent, reward_model=EnvironmentReward())
        metrics = trainer.step(["you"])
    assert metrics["train/ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert metrics["agents/ended_by_environment"] == 4
    assert any(not torch.equal(before[name], weight) for name, weight in agent.get_parameters().items())


async def pydantic_program(base_url: str, state: Any) -> float:
    """An agent of Pydantic AI with a tool, and two questions. The reward is the number of its tool's calls."""
    from pydantic_ai import Agent, UnexpectedModelBehavior
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    topics: list[str] = []
    model = OpenAIChatModel("policy", provider=OpenAIProvider(base_url=base_url, api_key="none"))
    agent = Agent(model, instructions="Use your tool.")

    @agent.tool_plain
    def lookup(topic: str) -> str:
        """Looks something up."""
        topics.append(topic)
        return f"{topic} is fine"

    with contextlib.suppress(UnexpectedModelBehavior):  # empty messages, again and again
        async with agent:
            first = await agent.run(state)
            await agent.run("Go on.", message_history=first.all_messages())
    return float(len(topics))


@pytest.mark.slow
def test_an_agent_of_pydantic_ai_is_one_context() -> None:
    """It sends back what was said as it was said, with two calls in a turn."""
    two = "Hm. " + says_call() + says_call(arguments='{"topic": "sun"}')
    (found,) = converse(says(two, says_call(), "Fine.", "Good."), pydantic_program)
    ((text, sampled),) = text_and_sampled(found)
    end = "<|im_end|>"
    assert sampled == f"{two}{end}|{says_call()}{end}|Fine.{end}|Good.{end}"
    assert text.index("weather is fine") < text.index("sun is fine")
    assert (found.reward, found.ended_by) == (3.0, "environment")


@pytest.mark.slow
def test_an_agent_of_pydantic_ai_is_trained_as_it_is() -> None:
    policy = calling_model(max_new_tokens=60)
    with ChatEndpoint(policy) as served:
        agent = AgentPolicy(policy, served.runs(pydantic_program), max_turns=6)
        sampled = agent.sample_actions(["you"], 4)
        scores = agent.score_actions([None] * 4, sampled.actions[0])
        torch.testing.assert_close(scores.log_probs, sampled.behaviour_log_probs, atol=1e-5, rtol=0)
        config = GRPOConfig(group_size=8, seed=0, learning_rate=1e-3)
        trainer = GRPOTrainer(config=config, policy=agent, reward_model=EnvironmentReward())
        for _ in range(2):  # the agent works in the event loop of each iteration
            metrics = trainer.step(["you"])
            assert metrics["train/ratio_mean"] == pytest.approx(1, abs=1e-5)
            assert metrics["agents/ended_by_error"] == 0
            assert metrics["agents/turns"] > 16
            assert metrics["rewards/mean"] > 0


@pytest.fixture(autouse=True)
def _no_leftover_threads() -> Iterator[None]:
    """Every endpoint of these tests is closed."""
    yield
    _wait_for(lambda: not [thread for thread in threading.enumerate() if thread.name == "chat endpoint"])


def _wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)
