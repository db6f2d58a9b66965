"""`ChatEndpoint`: agent programs that speak OpenAI's APIs over HTTP."""

import asyncio
import contextlib
import http.client
import json
import re
import socket
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from openai import OpenAI

from adapters.agents import AgentPolicy, ChatEndpoint, Conversation, endpoint, rollouts
from adapters.agents.openai_api import error_body
from adapters.agents.templates import TOOL
from adapters.llm import SamplingConfig
from grpo.errors import ConfigError, ContractError
from tests.support.agent_parts import before_each_batch, rows_of, user
from tests.support.agents import THINKS, Scripted, language_model, says_call, wait_for
from tests.support.clocks import ConversationClocks
from tests.unit.adapters.agents.test_conversations import text_and_sampled

USER: Any = user("you")
ASKED: dict[str, Any] = {"model": "policy", "messages": [USER]}


def says(*turns: str, **options: Any) -> Any:
    return Scripted(turns, **{"max_new_tokens": 200} | options).policy


def converse(
    policy: Any, program: Callable[..., Any], states: Any = ("you",), *, ignore: Any = (), **options: Any
) -> list[Conversation]:
    """Conversations of a program with an endpoint that is closed afterwards."""
    with ChatEndpoint(policy, ignore=ignore) as served:
        agent = AgentPolicy(policy, served.runs(program), **options)
        return rows_of(agent.generate_actions(list(states), 1))


@pytest.fixture(autouse=True)
def _no_leftover_threads() -> Iterator[None]:
    """Every endpoint of these tests is closed."""
    yield
    wait_for(lambda: not [thread for thread in threading.enumerate() if thread.name == "chat endpoint"])


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


def reply(client: OpenAI, *, streams: bool, **request: Any) -> tuple[dict[str, Any], str | None, Any, str]:
    """The message of a response, or of a stream as clients put it together, with the finish reason, the usage and the id."""
    if not streams:
        answer = client.chat.completions.create(**request)
        assert (answer.model, answer.object) == (request["model"], "chat.completion")
        return answer.choices[0].message.model_dump(), answer.choices[0].finish_reason, answer.usage, answer.id
    message: dict[str, Any] = {"role": "", "content": ""}
    reason, usage, ids = None, None, set[str]()
    for chunk in client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **request):
        ids.add(chunk.id)
        usage = chunk.usage or usage
        for choice in chunk.choices:
            reason = choice.finish_reason or reason
            message["role"] += choice.delta.role or ""
            message["content"] += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                message.setdefault("tool_calls", []).append(call.model_dump(exclude={"index"}))
                assert call.index == len(message["tool_calls"]) - 1
    (name,) = ids
    return message, reason, usage, name


def test_thoughts_that_the_tokenizers_parser_separates_go_out_and_come_back() -> None:
    def use(client: OpenAI) -> float:
        said = client.chat.completions.create(**ASKED).choices[0].message.model_dump()
        assert (said["reasoning_content"], said["content"]) == ("hm", "Yes.")
        (chunk, _) = client.chat.completions.create(model="m", messages=[USER, said, USER], stream=True)
        assert chunk.choices[0].delta.model_extra == {"reasoning_content": "so"}
        first = client.responses.create(model="m", input="me")
        thought, text = first.output
        assert (thought.type, thought.content[0].text, text.content[0].text) == ("reasoning", "hm", "Yes.")
        items: list[Any] = [item.model_dump(exclude_none=True) for item in first.output]
        client.responses.create(model="m", input=[user("me"), *items, user("more")])
        return 1.0

    policy = says("<think>hm</think>Yes.", "<think>so</think>No.", "<think>hm</think>Yes.", "No.")
    policy.tokenizer.response_template = THINKS
    (found,) = converse(policy, with_client(use))
    assert found.reward == 1.0
    assert len(found.segments) == 2  # both histories continue what was sampled


@pytest.mark.parametrize("streams", [False, True])
def test_a_conversation_with_tools_is_one_context(streams: bool) -> None:
    """Two calls in a turn, whose results come back in the other order, a call without a text, and a text. The usage counts
    real tokens. A streamed reply takes the reward of its id."""
    calls = says_call(arguments='{"topic":   "sun"}') + says_call("other", "{}")
    usages, ids = [], []

    def use(client: OpenAI) -> Any:
        messages: list[Any] = [{"role": "developer", "content": [{"type": "text", "text": t} for t in "ab"]}, USER]
        for expected in (("Hm.", "tool_calls"), ("" if streams else None, "tool_calls"), ("Fine.", "stop")):
            request: Any = {"model": "m", "messages": messages, "tools": [TOOL], "tool_choice": "auto"}
            said, reason, usage, name = reply(client, streams=streams, **request)
            assert (said["content"], reason) == expected
            ids.append(name)
            usages.append((usage.prompt_tokens, usage.completion_tokens, usage.total_tokens))
            messages.append(said)
            for call in reversed(said.get("tool_calls") or []):
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": call["function"]["name"]})
                assert isinstance(call["function"]["arguments"], str)
        rewards = [0.25, 0.5, 1.0]
        return dict(zip(ids, rewards, strict=True)) if streams else rewards

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


def test_limits_and_stop_strings_of_a_request() -> None:
    def use(client: OpenAI) -> float:
        def ask(**request: Any) -> tuple[str, str, int]:
            said, reason, usage, _ = reply(client, streams=False, **ASKED, **request)
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


REFUSED_RESPONSES: list[tuple[dict[str, Any], str]] = [
    ({"input": [{"type": "item_reference", "id": "a"}]}, r"input\[0\] must be a message, a function_call"),
    ({"input": ["you"]}, r"input\[0\] must be a message"),
    ({"input": []}, r"messages must be a list of messages, with at least one"),
    ({"input": [user([{"type": "input_image", "image_url": "a"}])]}, "Send a picture as data:"),
    ({"input": "you", "tools": [{"type": "web_search"}]}, r"tools\[0\] must be of the type 'function'"),
    ({"input": "you", "tool_choice": "required"}, r"tool_choice must be 'auto' or 'none'"),
    ({"input": "you", "temperature": 0.5}, r"temperature must be 1\.5 or left out"),
    ({"input": "you", "text": {"format": {"type": "json_object"}}}, r"response_format must be"),
    ({"input": "you", "background": True}, r"background must be left out"),
    ({"input": "you", "max_tool_calls": 3}, r"max_tool_calls must be left out"),
    ({"input": "you", "tools": 7}, r"tools must be a list of"),
    ({"input": "you", "tools": "lookup"}, r"tools must be a list of"),
    ({"input": "you", "tools": [None]}, r"tools\[0\] must be of the type 'function'"),
    ({"input": "you", "text": ["a"]}, r"response_format must be"),
    ({"input": 7}, r"input\[0\] must be a message"),
    ({"input": [None]}, r"input\[0\] must be a message"),
    ({"input": [user(7)]}, r"messages\[0\]\.content must be a text"),
    ({"input": [user([7])]}, r"messages\[0\]\.content must be a text"),
    ({"input": [{"type": "function_call", "name": 7}]}, r"messages\[0\]\.tool_calls must be a list of calls"),
    ({"input": [{"type": "reasoning", "content": [7]}, user(7)]}, r"messages\[1\]\.content must be"),
    ({"input": "you", "instructions": 7}, r"messages\[0\]\.content must be a text"),
    ({"input": "you", "max_output_tokens": "many"}, r"max_tokens must be an integer"),
]
BAD_HTTP: list[tuple[dict[str, Any], int, str]] = [
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


def test_what_cannot_be_answered_gets_an_error_in_openais_form(
    subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would change the distribution is refused, and nothing else. Nothing is sampled, and the conversation goes on."""
    monkeypatch.setattr(endpoint, "MOST_BYTES", 1000)
    cases = [({"body": ASKED | request}, 400, message) for request, message in REFUSED]
    cases += [({"body": request, "path": "/responses"}, 400, message) for request, message in REFUSED_RESPONSES]

    def program(base_url: str, state: Any) -> float:
        for request, status, message in [*cases, *BAD_HTTP]:
            with subtests.test(request=str(request)[:200]):
                found, answer = raw(base_url, **request)
                error = answer["error"]
                assert (found, error["type"]) == (status, "server_error" if status > 500 else "invalid_request_error")
                assert re.search(message, error["message"]), error["message"]
                assert error["message"].startswith(error["param"] or "")
                assert error.keys() == {"message", "type", "param", "code"}
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
        assert raw(base_url, body=half_a_character, Expect="100-continue")[0] == 200
        return float(raw(base_url, body=ASKED | NEUTRAL)[0] == 200)

    (found,) = converse(says("fine", "fine", sampling=SamplingConfig(temperature=1.5)), program)
    assert (found.reward, len(found.turns)) == (1.0, 2)
    status, body = error_body(KeyError("lost"))
    expected = {"message": "KeyError: 'lost'", "type": "server_error", "param": None, "code": None}
    assert (status, json.loads(body)) == (500, {"error": expected})
    assert error_body(ContractError("too many requests wait"))[0] == 400


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
        address, body = urlsplit(base_url), json.dumps(ASKED)
        head = f"POST {address.path}/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        whole, slow = (head + body).encode(), [b"."] * 1000
        cases: dict[str, list[bytes]] = {
            "line": slow,
            "headers": [whole.split(b"\r\n")[0] + b"\r\n", *slow],
            "body": [whole[:-100], *slow],
            "a stranger's body": [whole.replace(b"/v1", b"x/v1")[:-1].replace(b"Length: ", b"Length: 99"), *slow],
            "no end": [b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 90, *[b"c: " + b"d" * 60_000 + b"\r\n"] * 9],
        }
        for name, sent in cases.items():
            connection = socket.create_connection(("127.0.0.1", address.port), timeout=20)
            with subtests.test(name), connection, contextlib.suppress(ConnectionError):
                for part in sent:
                    connection.sendall(part)
                    time.sleep(0.02)
                assert connection.recv(1000) == b""
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


@pytest.mark.parametrize("catches", [True, False])
def test_the_end_of_a_conversation_reaches_the_program(catches: bool) -> None:
    """A program that catches it gives a reward; else the reward is 0."""

    def use(client: OpenAI) -> float:
        client.chat.completions.create(**ASKED)
        with pytest.raises(openai.APIStatusError) as caught:
            client.chat.completions.create(**ASKED)
        found: Any = caught.value
        assert (found.status_code, found.code, found.body["ended_by"]) == (410, "conversation_ended", "max_turns")
        if not catches:
            raise found
        return 7.0

    (found,) = converse(says("a"), with_client(use), max_turns=1)
    assert (found.ended_by, found.rewards) == ("max_turns", (7.0 if catches else 0.0,))
    assert found.info.get("error", "none").startswith("none" if catches else "APIStatusError: ")


def test_an_error_before_any_limit_is_a_failure() -> None:
    def program(base_url: str, state: Any) -> float:
        raise KeyError(f"lost, after {raw(base_url)[0]}")

    (found,) = converse(says("a"), program, max_turns=1)
    assert (found.ended_by, len(found.turns), found.reward != found.reward) == ("error", 1, True)
    assert found.info["error"] == "KeyError: 'lost, after 200'"


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
    """The other conversation goes on, and the policy samples for it."""
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
        clocks.move()
        release.wait(60)
        late.append(raw(base_url))
        return 1.0

    policy = says("a")
    with ChatEndpoint(policy) as served:
        sampled = AgentPolicy(policy, served.runs(program), timeout=1.0).sample_actions(["you"], 1)
        assert (sampled.metrics["agents/ended_by_timeout"], sampled.metrics["agents/abandoned"]) == (1, 1)
        release.set()
        wait_for(lambda: bool(late))
    assert (late[0][0], late[0][1]["error"]["ended_by"]) == (410, "timeout")


def test_no_port_and_no_thread_stay_after_close() -> None:
    before = threading.active_count()
    policy, urls, idle = says("a", "b"), list[str](), list[socket.socket]()

    def program(base_url: str, state: Any) -> float:
        urls.append(base_url)
        idle.append(socket.create_connection(("127.0.0.1", urlsplit(base_url).port)))
        return float(raw(base_url)[0])

    served = ChatEndpoint(policy)
    served.close()
    agent = AgentPolicy(policy, served.runs(program))
    for _ in range(2):  # the endpoint starts again
        assert agent.generate_actions(["you"], 1)[0][0].reward == 200.0
        began = time.monotonic()
        served.close()
        assert time.monotonic() - began < 10  # it does not wait for idle connections
        wait_for(lambda: threading.active_count() <= before)
        with pytest.raises(ConnectionRefusedError):
            raw(urls[-1])
        idle[-1].close()


def test_what_is_no_language_model_and_what_cannot_be_ignored_are_refused(subtests: pytest.Subtests) -> None:
    with pytest.raises(ConfigError, match="policy must be the language model, an HFPolicy; got"):
        ChatEndpoint(AgentPolicy(language_model(), lambda state: None))  # type: ignore[arg-type]
    for ignore in ({"messages"}, ["stop", "temperature"], "temperature"):
        with (
            subtests.test(ignore=ignore),
            pytest.raises(ConfigError, match="ignore must be names of parameters that are"),
        ):
            ChatEndpoint(says(), ignore=ignore)


def test_an_agent_of_pydantic_ai_is_one_context() -> None:
    """It sends back what was said as it was said, with two calls in a turn. The reward is the number of its tool's calls. The
    program is async, and the caller has an event loop, as in a notebook."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    async def program(base_url: str, state: Any) -> float:
        topics: list[str] = []
        model = OpenAIChatModel("policy", provider=OpenAIProvider(base_url=base_url, api_key="none"))
        agent = Agent(model, instructions="Use your tool.")

        @agent.tool_plain
        def lookup(topic: str) -> str:
            """Looks something up."""
            topics.append(topic)
            return f"{topic} is fine"

        async with agent:
            first = await agent.run(state)
            await agent.run("Go on.", message_history=first.all_messages())
        return float(len(topics))

    two = "Hm. " + says_call() + says_call(arguments='{"topic": "sun"}')

    async def cell() -> list[Conversation]:
        return converse(says(two, says_call(), "Fine.", "Good."), program)

    (found,) = asyncio.run(cell())
    ((text, sampled),) = text_and_sampled(found)
    end = "<|im_end|>"
    assert sampled == f"{two}{end}|{says_call()}{end}|Fine.{end}|Good.{end}"
    assert text.index("weather is fine") < text.index("sun is fine")
    assert (found.reward, found.ended_by) == (3.0, "environment")


# The responses API


FLAT = {"type": "function", "strict": True, **TOOL["function"]}


def final(client: OpenAI, *, streams: bool, **request: Any) -> Any:
    """The response, from its events if it streams. The client checks that the events fit together."""
    if not streams:
        return client.responses.create(model="m", **request)
    with client.responses.stream(model="m", **request) as stream:
        events = list(stream)
    kinds = [event.type for event in events]
    response: Any = events[-1].response
    assert (kinds[0], kinds[-1]) == ("response.created", f"response.{response.status}")
    done = [event.item.id for event in events if event.type == "response.output_item.done"]
    assert done == [item.id for item in response.output]
    return response


@pytest.mark.parametrize("streams", [False, True])
def test_a_conversation_with_tools_over_the_responses_api_is_one_context(streams: bool) -> None:
    call = says_call(arguments='{"topic":   "sun"}')

    def use(client: OpenAI) -> dict[str, float]:
        asked: list[Any] = [user([{"type": "input_text", "text": "you"}])]
        common: Any = {"instructions": "Be short.", "tools": [FLAT], "streams": streams}
        first = final(client, input=asked, **common)
        said, called = first.output
        assert (said.type, said.content[0].text) == ("message", "Hm.")
        assert (called.type, called.name, called.arguments) == ("function_call", "lookup", '{"topic": "sun"}')
        result = {"type": "function_call_output", "call_id": called.call_id, "output": "bright"}
        items = [*asked, *(item.model_dump(exclude_none=True) for item in first.output), result]
        second = final(client, input=items, parallel_tool_calls=False, **common)  # changes nothing
        assert (second.output_text, second.status) == ("Fine.", "completed")
        assert second.usage.total_tokens == second.usage.input_tokens + second.usage.output_tokens
        return {first.id: 0.25, second.id: 1.0}

    (row,) = converse(says("Hm. " + call, "Fine."), with_client(use))
    ((text, sampled),) = text_and_sampled(row)
    assert sampled == f"Hm. {call}<|im_end|>|Fine.<|im_end|>"
    assert "<|im_start|>system\nBe short.<|im_end|>" in text
    assert "bright" in text
    assert row.rewards == (0.25, 1.0)


def test_a_response_goes_on_from_the_previous_one_by_its_id() -> None:
    def use(client: OpenAI) -> dict[str, float]:
        first = client.responses.create(model="m", instructions="One.", input="you")
        second = client.responses.create(model="m", previous_response_id=first.id, input="more")
        short: Any = {"instructions": "Two.", "max_output_tokens": 2}
        other = final(client, streams=True, previous_response_id=first.id, input="more", **short)
        assert (first.incomplete_details, other.incomplete_details.reason) == (None, "max_output_tokens")
        assert [(each.output_text, each.status) for each in (first, second, other)] == [
            ("a", "completed"), ("b", "completed"), ("cd", "incomplete"),
        ]  # fmt: skip
        with pytest.raises(openai.NotFoundError, match="No reply of this conversation has the id 'resp_1'"):
            client.responses.create(model="m", previous_response_id="resp_1", input="more")
        return {first.id: 1.0, second.id: 2.0, other.id: 3.0}

    (row,) = converse(says("a", "b", "cdef"), with_client(use))
    texts = [text for text, _ in text_and_sampled(row)]
    assert len(texts) == 2  # other instructions begin another context
    assert sum("system\nOne.<" in text and "user\nmore<" in text for text in texts) == 1
    assert sum("system\nTwo.<" in text and "user\nmore<" in text for text in texts) == 1
    assert sorted((turn.message["content"], turn.reward) for turn in row.turns) == [("a", 1.0), ("b", 2.0), ("cd", 3.0)]


@pytest.mark.parametrize("fails", [False, True])
def test_parameters_may_be_ignored_and_the_conversation_says_which(fails: bool) -> None:
    form: Any = {"type": "json_object"}

    def use(client: OpenAI) -> float:
        said = client.chat.completions.create(**ASKED, temperature=0.5, tool_choice="required", tools=[TOOL])
        again = client.responses.create(model="m", input="you", temperature=0.25, text={"format": form})
        with pytest.raises(openai.BadRequestError, match=r"top_p must be 1\.0 or left out"):
            client.chat.completions.create(**ASKED, top_p=0.5)
        if fails:
            raise KeyError("lost")
        return float((said.choices[0].message.content, again.output_text) == ("a", "b"))

    (row,) = converse(says("a", "b"), with_client(use), ignore={"temperature", "tool_choice", "response_format"})
    assert str(row.reward) == ("nan" if fails else "1.0")
    ignored = {"temperature": 0.25, "tool_choice": "required", "response_format": form}
    assert row.info == {"ignored": ignored} | ({"error": "KeyError: 'lost'"} if fails else {})


@pytest.mark.parametrize(("public_host", "name"), [(None, "0.0.0.0"), ("127.0.0.2", "127.0.0.2")])
def test_an_endpoint_may_listen_for_containers_and_have_a_public_name(public_host: str | None, name: str) -> None:
    urls = []

    def program(base_url: str, state: Any) -> float:
        urls.append(base_url)
        url = base_url.replace("0.0.0.0", "127.0.0.2")
        assert raw(url.replace("/v1", "x/v1"))[0] == 404, "without the token"
        return float(raw(url)[0] == 200)

    policy = says("a", sampling=SamplingConfig(max_new_tokens=8))
    with ChatEndpoint(policy, host="0.0.0.0", public_host=public_host) as served:
        ((row,),) = AgentPolicy(policy, served.runs(program)).generate_actions(["you"], 1)
    assert row.reward == 1.0
    assert urls[0].startswith(f"http://{name}:")
