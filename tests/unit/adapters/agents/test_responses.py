"""OpenAI's responses API, with the official client, and what an endpoint may ignore."""

from typing import Any

import openai
import pytest
from openai import OpenAI

from adapters.agents import AgentPolicy, ChatEndpoint, Conversation
from adapters.agents.templates import TOOL
from adapters.llm import SamplingConfig
from tests.support.agent_parts import user
from tests.support.agents import THINKS, says_call
from tests.unit.adapters.agents.test_conversations import text_and_sampled
from tests.unit.adapters.agents.test_endpoint import ASKED, raw, says, with_client

FLAT = {"type": "function", "strict": True, **TOOL["function"]}


def converse(policy: Any, use: Any, **options: Any) -> Conversation:
    """The conversation of a program with an endpoint."""
    with ChatEndpoint(policy, **options) as served:
        ((row,),) = AgentPolicy(policy, served.runs(with_client(use))).generate_actions(["you"], 1)
    return row


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

    row = converse(says("Hm. " + call, "Fine."), use)
    ((text, sampled),) = text_and_sampled(row)
    assert sampled == f"Hm. {call}<|im_end|>|Fine.<|im_end|>"
    assert "<|im_start|>system\nBe short.<|im_end|>" in text
    assert "bright" in text
    assert row.rewards == (0.25, 1.0)


def test_a_response_goes_on_from_the_previous_one_by_its_id() -> None:
    def use(client: OpenAI) -> dict[str, float]:
        first = client.responses.create(model="m", instructions="One.", input="you")
        second = client.responses.create(model="m", previous_response_id=first.id, input="more")
        other = client.responses.create(model="m", previous_response_id=first.id, input="more", instructions="Two.")
        assert [each.output_text for each in (first, second, other)] == ["a", "b", "c"]
        with pytest.raises(openai.NotFoundError, match="No reply of this conversation has the id 'resp_1'"):
            client.responses.create(model="m", previous_response_id="resp_1", input="more")
        return {first.id: 1.0, second.id: 2.0, other.id: 3.0}

    row = converse(says("a", "b", "c"), use)
    texts = [text for text, _ in text_and_sampled(row)]
    assert len(texts) == 2  # other instructions begin another context
    assert sum("system\nOne.<" in text and "user\nmore<" in text for text in texts) == 1
    assert sum("system\nTwo.<" in text and "user\nmore<" in text for text in texts) == 1
    assert sorted((turn.message["content"], turn.reward) for turn in row.turns) == [("a", 1.0), ("b", 2.0), ("c", 3.0)]


def test_a_truncated_response_is_incomplete() -> None:
    def use(client: OpenAI) -> float:
        for streams in (False, True):
            response = final(client, streams=streams, input="you", max_output_tokens=3)
            assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
            assert response.output_text == "abc"
        return 1.0

    assert converse(says("abcdef", "abcdef"), use).reward == 1.0


def test_thoughts_go_out_and_come_back() -> None:
    policy = says("<think>hm</think>Yes.", "No.")
    policy.tokenizer.response_template = THINKS

    def use(client: OpenAI) -> float:
        first = client.responses.create(model="m", input="you")
        thought, said = first.output
        assert (thought.type, thought.content[0].text, said.content[0].text) == ("reasoning", "hm", "Yes.")
        items: list[Any] = [item.model_dump(exclude_none=True) for item in first.output]
        client.responses.create(model="m", input=[user("you"), *items, user("more")])
        return 1.0

    assert len(converse(policy, use).segments) == 1  # the history continues what was sampled


def test_what_the_policy_does_not_know_is_refused_by_name(subtests: pytest.Subtests) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"input": [{"type": "item_reference", "id": "a"}]}, r"input\[0\] must be a message, a function_call"),
        ({"input": ["you"]}, r"input\[0\] must be a message"),
        ({"input": []}, r"messages must be a list of messages, with at least one"),
        ({"input": [user([{"type": "input_image", "image_url": "a"}])]}, "Send a picture as data:"),
        ({"input": "you", "tools": [{"type": "web_search"}]}, r"tools\[0\] must be of the type 'function'"),
        ({"input": "you", "tool_choice": "required"}, r"tool_choice must be 'auto' or 'none'"),
        ({"input": "you", "temperature": 0.5}, r"temperature must be 1\.0 or left out"),
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

    def use(client: OpenAI) -> float:
        for request, message in cases:
            with subtests.test(request=request), pytest.raises(openai.BadRequestError, match=message):
                client.responses.create(model="m", **request)
        return float(client.responses.create(model="m", input="you").output_text == "fine")

    assert converse(says("fine"), use).reward == 1.0


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

    row = converse(says("a", "b"), use, ignore={"temperature", "tool_choice", "response_format"})
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
