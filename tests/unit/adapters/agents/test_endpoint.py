"""`ChatEndpoint`: agent programs that speak OpenAI's API over HTTP."""

import asyncio
import contextlib
import gc
import http.client
import json
import re
import socket
import sys
import threading
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
import torch
from openai import AsyncOpenAI, OpenAI

from adapters.agents import AgentPolicy, Chat, ChatEndpoint, Conversation, EnvironmentReward, endpoint, rollouts
from adapters.agents.openai_api import error_body
from adapters.agents.templates import TOOL
from adapters.llm import SamplingConfig
from grpo import GRPOConfig, GRPOTrainer
from grpo.errors import ConfigError
from tests.support.agent_parts import before_each_batch, user
from tests.support.agents import THINKS, Scripted, chat_tokenizer, language_model, says_call, wait_for
from tests.support.clocks import ConversationClocks
from tests.unit.adapters.agents.test_conversations import text_and_sampled

USER: Any = user("you")
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
    # frameworks keep a client for each URL, and each conversation has one: open connections would fill the table of files
    assert response.will_close
    read = response.status, json.loads(response.read())
    connection.close()
    return read


def reply(client: OpenAI, *, streams: bool, **request: Any) -> tuple[dict[str, Any], str | None, Any]:
    """The message of a response, or of a stream as clients put it together, with the finish reason and the usage."""
    if not streams:
        answer = client.chat.completions.create(**request)
        assert (answer.model, answer.object) == (request["model"], "chat.completion")
        return answer.choices[0].message.model_dump(), answer.choices[0].finish_reason, answer.usage
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
    policy.tokenizer.response_template = THINKS
    (found,) = converse(policy, with_client(use))
    assert found.reward == 1.0


def test_a_streamed_reply_has_one_id_and_takes_the_reward_of_it() -> None:
    def use(client: OpenAI) -> dict[str, float]:
        asked = {"model": "m", "messages": [USER]}
        ids = [client.chat.completions.create(**asked).id]
        ids += {chunk.id for chunk in client.chat.completions.create(stream=True, **asked)}
        _, streamed = ids
        return {streamed: 2.0}

    (found,) = converse(says("Yes.", "No."), with_client(use))
    assert list(found.rewards) == [0.0, 2.0]


@pytest.mark.parametrize("streams", [False, True])
def test_a_conversation_with_tools_is_one_context(streams: bool) -> None:
    """Two calls in a turn, whose results come back in the other order, a call without a text, and a text. The usage counts
    real tokens."""
    calls = says_call(arguments='{"topic":   "sun"}') + says_call("other", "{}")
    usages = []

    def use(client: OpenAI) -> list[float]:
        messages: list[Any] = [{"role": "developer", "content": [{"type": "text", "text": t} for t in "ab"]}, USER]
        for expected in (("Hm.", "tool_calls"), ("" if streams else None, "tool_calls"), ("Fine.", "stop")):
            request: Any = {"model": "m", "messages": messages, "tools": [TOOL], "tool_choice": "auto"}
            said, reason, usage = reply(client, streams=streams, **request)
            assert (said["content"], reason) == expected
            usages.append((usage.prompt_tokens, usage.completion_tokens, usage.total_tokens))
            messages.append(said)
            for call in reversed(said.get("tool_calls") or []):
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": call["function"]["name"]})
                assert isinstance(call["function"]["arguments"], str)
        return [0.25, 0.5, 1.0]

    (found,) = converse(says("Hm. " + calls, says_call(), "Fine."), with_client(use))
    ((text, sampled),) = text_and_sampled(found)
    assert sampled == f"Hm. {calls}<|im_end|>|{says_call()}<|im_end|>|Fine.<|im_end|>"
    assert "<|im_start|>system\na\nb<|im_end|>" in text
    results = [(message["content"], message["name"]) for message in found.messages if message["role"] == "tool"]
    assert results == [("lookup",) * 2, ("other",) * 2, ("lookup",) * 2]
    assert (found.rewards, found.ended_by) == ((0.25, 0.5, 1.0), "environment")
    pairs = enumerate(pairwise((False, *found.segments[0].sampled)))
    begins = [place for place, pair in pairs if pair == (False, True)]
    counts = [turn.num_tokens for turn in found.turns]
    assert usages == [(begin, count, begin + count) for begin, count in zip(begins, counts, strict=True)]


def test_a_program_may_be_async_and_the_caller_may_have_an_event_loop() -> None:
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
            said, reason, usage = reply(client, streams=False, **ASKED, **request)
            return said["content"], reason, usage.completion_tokens

        assert ask(max_tokens=3) == ("abc", "length", 3)
        assert ask(max_tokens=9, max_completion_tokens=2) == ("ab", "length", 2)
        assert ask(stop="bd") == ("abc", "stop", 6)
        assert ask(stop=["x", "e"], max_tokens=100) == ("abcd", "stop", 6)
        assert ask(tools=[TOOL], tool_choice="none") == ("abcdef", "stop", 7)
        assert ask(max_tokens=9) == ("abcdefgh", "length", 8)  # the policy's own maximum: this context ends
        goes_on = [USER, {"role": "assistant", "content": "abcdefgh"}, user("more")]
        with pytest.raises(openai.APIStatusError, match="The conversation ended by 'length'"):
            client.chat.completions.create(**ASKED | {"messages": goes_on})
        return 0.5

    policy = says("abcdef", "abcdef", "abcbdf", "abcdef", "abcdef", "abcdefghi", max_new_tokens=8)
    (found,) = converse(policy, with_client(use), max_turns=9)
    assert (found.ended_by, found.reward) == ("environment", 0.5)
    texts = sorted(sampled for _, sampled in text_and_sampled(found))
    assert texts == ["ab", "abc", "abcbdf", "abcdef", "abcdef<|im_end|>", "abcdefgh"]
    assert not any("Tools:" in text for text, _ in text_and_sampled(found))  # tool_choice="none" shows no tools


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"temperature": 0.5}, r"temperature must be 1\.5 or left out, because the policy .* got float 0\.5\. Set Sampl"),
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
    ({"messages": [user(7)]}, r"messages\[0\]\.content must be a text, or a list of parts"),
    ({"messages": [user([{"type": "image_url", "image_url": {}}])]}, r"Send a picture as data:"),
    ({"messages": [user([{"type": "image", "path": "/etc/passwd"}])]}, r"Send a picture as data:"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, r"messages\[0\]\.tool_calls must be a list of calls"),
    ({"messages": [{"role": "assistant", "tool_calls": 7}]}, r"messages\[0\]\.tool_calls must be a list of calls"),
    ({"messages": [{"role": "a", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}]}, r"or a JSON text"),
    ({"max_tokens": 0}, r"max_tokens must be an integer of at least 1; got int 0"),
    ({"max_completion_tokens": 2.5}, r"max_completion_tokens must be an integer of at least 1"),
    ({"stop": [""]}, r"stop must be a text or a list of texts"),
    ({"stop": "end\ud83d"}, r"have no half characters; got"),
    ({"stop": 7}, r"stop must be a text or a list of texts"),
    ({"tools": [{"type": "web_search"}]}, r"tools must be a list of"),
    ({"tools": "lookup"}, r"tools must be a list of"),
]


NEUTRAL = {
    "temperature": 1.5, "top_p": 1, "top_k": None, "n": 1, "logprobs": False, "logit_bias": {},
    "frequency_penalty": 0, "presence_penalty": 0.0, "response_format": {"type": "text"}, "user": "me", "store": True,
    "metadata": {"a": "b"}, "parallel_tool_calls": False, "seed": 5, "tools": None, "stop": None, "max_tokens": None,
}  # fmt: skip


def test_what_would_change_the_distribution_is_refused_and_nothing_else(subtests: pytest.Subtests) -> None:
    """Nothing is sampled for a refused request, and the conversation goes on."""

    def program(base_url: str, state: Any) -> float:
        for request, message in REFUSED:
            with subtests.test(request=request):
                status, answer = raw(base_url, body=ASKED | request)
                error = answer["error"]
                assert (status, error["type"]) == (400, "invalid_request_error")
                assert re.search(message, error["message"]), error["message"]
                assert error["message"].startswith(error["param"] or "")
        status, answer = raw(base_url, body=ASKED | NEUTRAL)
        assert status == 200, answer
        return 1.0

    (found,) = converse(says("fine", sampling=SamplingConfig(temperature=1.5)), program)
    assert (found.reward, len(found.turns)) == (1.0, 1)


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
        half_a_character = ASKED | {"messages": [{"role": "user", "content": "\ud800"}]}
        return 1.0 if raw(base_url, body=half_a_character, Expect="100-continue")[0] == 200 else 0.0

    (found,) = converse(says("fine"), program)
    assert (found.reward, len(found.turns)) == (1.0, 1)
    status, body = error_body(KeyError("lost"))
    expected = {"message": "KeyError: 'lost'", "type": "server_error", "param": None, "code": None}
    assert (status, json.loads(body)) == (500, {"error": expected})


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


def test_two_conversations_in_one_connection_get_their_own_turns() -> None:
    """A client that connects again answers both. Of two requests in one connection, the second is not read."""
    urls, done = dict[str, str](), threading.Event()

    def program(base_url: str, state: Any) -> float:
        urls[state] = base_url
        if state == "you":
            assert done.wait(20)
            return 1.0
        try:
            wait_for(lambda: len(urls) == 2)
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
    """A byte now and then does not keep a connection open. Neither does a head without end. No wait exceeds the limit."""
    monkeypatch.setattr(endpoint, "REQUEST_SECONDS", 0.5)
    limits, settimeout = list[float | None](), socket.socket.settimeout

    def recorded(connection: socket.socket, seconds: float | None) -> None:
        if threading.current_thread().name == "chat endpoint":
            limits.append(seconds)
        settimeout(connection, seconds)

    monkeypatch.setattr(socket.socket, "settimeout", recorded)

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
    assert len(limits) > 5
    assert [seconds for seconds in limits if seconds is None or seconds > 0.5] == []


def test_the_number_of_connections_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest of the connections that say nothing is closed for a new one, and a request that waits for its turn is kept."""
    monkeypatch.setattr(endpoint, "MOST_CONNECTIONS", 3)
    monkeypatch.setattr(endpoint, "PLACE_SECONDS", 0.05)
    policy, began, goes_on = says("a", "b", "c"), threading.Event(), threading.Event()
    before_each_batch(policy, lambda prompts: (began.set(), goes_on.wait(20)))

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
            wait_for(lambda: sum(thread.name == "chat endpoint" for thread in threading.enumerate()) == 1 + 3)
            assert raw(base_url.replace("/v1", "x/v1"))[0] == 404
        finally:
            goes_on.set()
            waits.join()
            for connection in silent:
                connection.close()
        return float(statuses[0])

    assert converse(policy, program)[0].reward == 200.0


def test_clients_that_are_not_closed_leave_nothing_behind(caplog: pytest.LogCaptureFixture) -> None:
    """They outlive their event loop, and are collected in the next one, or in none. A transport that is open then says "Event
    loop is closed", in asyncio's log, or that it was not closed."""
    kept, policy = list[Any](), says(*"abcd")

    async def program(base_url: str, state: Any) -> float:
        if len(kept) == 2:  # the clients of the first round
            kept.clear()
            gc.collect()
        client = AsyncOpenAI(base_url=base_url, api_key="none")
        await client.chat.completions.create(**ASKED)
        kept.append(client)
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
    assert (found, [str(warning.message) for warning in warned], caplog.records) == ([], [], [])


def test_the_end_of_a_conversation_reaches_the_program(subtests: pytest.Subtests) -> None:
    """A program that catches it gives a reward; else the reward is 0. An error before any limit is a failure."""
    for name, ended_by, reward, error in (
        ("catches", "max_turns", "7.0", "none"),
        ("does not catch", "max_turns", "0.0", "APIStatusError: "),
        ("fails", "error", "nan", "KeyError: 'lost'"),
    ):

        def use(client: OpenAI, name: str = name) -> float:
            client.chat.completions.create(**ASKED)
            if name == "fails":
                raise KeyError("lost")
            if name == "does not catch":
                client.chat.completions.create(**ASKED)
            with pytest.raises(openai.APIStatusError) as caught:
                client.chat.completions.create(**ASKED)
            found: Any = caught.value
            assert (found.status_code, found.code, found.body["ended_by"]) == (410, "conversation_ended", "max_turns")
            return 7.0

        with subtests.test(name):
            (found,) = converse(says("a", "b"), with_client(use), max_turns=1)
            assert (found.ended_by, len(found.turns), str(found.reward)) == (ended_by, 1, reward)
            assert found.info.get("error", "none").startswith(error)


def test_a_url_is_refused_after_its_conversation_and_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MOST_ENDED", 2)
    policy = says("a", "b", "c")
    urls: list[str] = []

    def program(base_url: str, state: Any) -> float:
        urls.append(base_url)
        raw(base_url)
        assert [model["id"] for model in raw(base_url, "GET", "/models")[1]["data"]] == ["policy"]
        return 1.0

    with ChatEndpoint(policy) as served:
        agent = AgentPolicy(policy, served.runs(program), concurrency=1)
        agent.generate_actions(["you"], 1)
        for body in (ASKED, {}):
            status, answer = raw(urls[0], body=body)
            assert (status, answer["error"]["ended_by"]) == (410, "environment")
        assert raw(urls[0], "GET", "/models")[0] == 410
        agent.generate_actions(["you"], 2)
        assert [raw(url)[0] for url in urls] == [404, 410, 410]
        assert urls[0] != urls[1]
        assert urlsplit(urls[0]).netloc == urlsplit(urls[1]).netloc
    with pytest.raises(ConnectionRefusedError):
        raw(urls[0])


def test_a_client_that_gives_up_and_asks_again_gets_another_turn() -> None:
    policy, has_given_up = says("late", "again"), threading.Event()
    before_each_batch(policy, lambda prompts: has_given_up.wait(20))

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
    policy, began = says("a", "b"), threading.Event()
    before_each_batch(policy, lambda prompts: (began.set(), time.sleep(0.2)))
    statuses: list[Any] = []

    def program(base_url: str, state: Any) -> float:
        if state == "other":
            wait_for(lambda: bool(statuses))
            return float(raw(base_url)[0])
        threading.Thread(target=lambda: statuses.append(raw(base_url))).start()
        began.wait(10)
        return 1.0

    found, other = converse(policy, program, ["you", "other"])
    assert [(status, answer["error"]["ended_by"]) for status, answer in statuses] == [(410, "environment")]
    assert (len(found.turns), other.reward) == (0, 200.0)


def test_a_program_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "GRACE_SECONDS", 0.05)
    release, late, clocks = threading.Event(), [], ConversationClocks(monkeypatch)

    def program(base_url: str, state: Any) -> float:
        raw(base_url)
        if state == "bad":
            clocks.move(0)
            release.wait(60)
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
        wait_for(lambda: bool(late))
    assert (late[0][0], late[0][1]["error"]["ended_by"]) == (410, "timeout")


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
        wait_for(lambda: threading.active_count() <= before)
        with pytest.raises(openai.APIConnectionError):
            clients[-1].chat.completions.create(**ASKED)
        clients[-1].close()


def test_what_is_no_language_model_and_what_cannot_be_ignored_are_refused(subtests: pytest.Subtests) -> None:
    with pytest.raises(ConfigError, match="policy must be the language model, an HFPolicy; got"):
        ChatEndpoint(AgentPolicy(language_model(), lambda state: None))  # type: ignore[arg-type]
    for ignore in ({"messages"}, ["stop", "temperature"], "temperature"):
        with (
            subtests.test(ignore=ignore),
            pytest.raises(ConfigError, match="ignore must be names of parameters that are"),
        ):
            ChatEndpoint(says(), ignore=ignore)


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


def with_answers(said: Any) -> list[Any]:
    """A message and the results of its calls. If it has none, the user goes on."""
    calls = said.get("tool_calls") or []
    results = [{"role": "tool", "content": "fine", "tool_call_id": call["id"]} for call in calls]
    return [said, *(results or [user("go on")])]


def num_calls(messages: list[Any]) -> float:
    return float(sum(message["role"] == "tool" for message in messages))


def agent_loop(base_url: str, state: Any) -> float:
    """Calls tools for up to three turns, the second of which is streamed. The reward is the number of calls."""
    messages: list[Any] = [user(state)]
    with client_of(base_url) as client:
        for turn in range(3):
            request: Any = {"model": "policy", "messages": messages, "tools": [TOOL], "max_tokens": 20}
            messages += with_answers(reply(client, streams=turn == 1, **request)[0])
    return num_calls(messages)


async def direct_loop(chat: Chat, state: Any) -> float:
    """The same as `agent_loop`, without HTTP."""
    messages: list[Any] = [user(state)]
    for _ in range(3):
        messages += with_answers(await chat(messages, [TOOL], max_new_tokens=20))
    return num_calls(messages)


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
    assert 20 in {turn.num_tokens for row in rows for turn in row.turns[:2]}  # truncated, and the conversation went on


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
    wait_for(lambda: not [thread for thread in threading.enumerate() if thread.name == "chat endpoint"])
