"""Transcripts: JSON lines, and a page that shows what was said, whatever was said."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from adapters.agents import AgentPolicy, Conversation, Turn, save_transcripts, transcript_page
from grpo.errors import ContractError
from tests.support.agent_parts import conversation, tool_call
from tests.support.agents import Tools, language_model, says_call

HOSTILE = "</div></details><script>alert('&amp;')</script>\x1b[2J\u202e\u2028\ud800 \"end\"\n{heading} %s"


def rewarded(messages: list[dict[str, Any]], rewards: tuple[float, ...], **parts: Any) -> Conversation:
    turns = tuple(Turn(num_tokens=1, reward=reward) for reward in rewards)
    return conversation(turns=turns, messages=tuple(messages), **parts)


def said(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


class Page(HTMLParser):
    """The texts of a page, each with the elements around it. It fails if elements are not closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag != "meta":
            self.open.append(f"{tag}.{dict(attrs).get('class')}" if dict(attrs).get("class") else tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop().split(".")[0] == tag

    def handle_data(self, data: str) -> None:
        if data.strip() and self.open[-1] != "style":
            self.texts.append((self.open[-1], data))


def test_a_replayed_conversation_as_lines_and_as_a_page(tmp_path: Path) -> None:
    policy = AgentPolicy(language_model(max_new_tokens=90), Tools)
    rows = policy.replay(["you", "me"], [[says_call(), "fine"], ["good"]])
    save_transcripts(tmp_path / "new" / "rows.jsonl", rows, titles=["first", "second"])
    first, second = (json.loads(line) for line in (tmp_path / "new" / "rows.jsonl").read_text().splitlines())
    common = {"title": "first", "ended_by": "environment", "info": {}}
    assert first == common | {"messages": list(rows[0].messages), "rewards": [0.0, 1.0], "reward": 1.0}
    assert second["title"] == "second"
    assert Page(transcript_page(rows[:1], titles=["first"], heading="Tools")).texts == [
        ("title", "Tools"), ("h1", "Tools"), ("summary", "1. first "), ("span", "reward 1, ended by environment"),
        ("span.role", "user"), ("div.message other", "Hello you"),
        ("span.role", "assistant, reward 0"), ("code", 'lookup({"topic": "weather"})'),
        ("span.role", "tool"), ("div.message tool", "weather is fine"),
        ("span.role", "assistant, reward 1"), ("div.message assistant", "fine"),
        ("span.role", "user"), ("div.message other", "bye"),
    ]  # fmt: skip


def test_hostile_texts_are_shown_as_they_are(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """Markup, control characters, line separators and half a surrogate pair, in every place that holds a text."""
    call = tool_call(HOSTILE, **{HOSTILE: [HOSTILE]})
    places = {
        "content": rewarded([said("user", HOSTILE)], ()),
        "role": rewarded([said(HOSTILE, "")], ()),
        "thought": rewarded([said("assistant", "", reasoning_content=HOSTILE)], (1.0,)),
        "call": rewarded([said("assistant", "", tool_calls=[call])], (1.0,)),
        "info": rewarded([], (), info={HOSTILE: HOSTILE}),
        "title": rewarded([], ()),
    }
    plain = [tag for tag, _ in Page(transcript_page([rewarded([], ())], titles=["."], heading=".")).texts]
    for place, row in places.items():
        with subtests.test(place=place):
            titles = [HOSTILE if place == "title" else "."]
            page = transcript_page([row], titles=titles, heading=HOSTILE if place == "title" else ".")
            (tmp_path / "page.html").write_text(page, encoding="utf-8")
            assert "<script" not in page
            tags = [tag for tag, _ in Page(page).texts]
            assert {*tags} <= {*plain, "div.message other", "div.message assistant", "span.role", "code", "p"}
            if place in ("content", "role", "title", "thought"):
                texts = [text.replace("\ufffd", "&#55296;") for _, text in Page(page).texts]
                assert any(HOSTILE.replace("\ud800", "&#55296;") in text for text in texts)
            save_transcripts(tmp_path / "rows.jsonl", [row], titles=titles)
            (line,) = (tmp_path / "rows.jsonl").read_text(encoding="utf-8").splitlines()
            read = json.loads(line)
            assert read["messages"] == list(row.messages)
            assert (read["info"], read["title"]) == (row.info, titles[0])


def test_rewards_that_are_not_known_and_what_is_not_a_number_are_null(tmp_path: Path) -> None:
    call = tool_call("pay", amount=float("inf"))
    info = {"error": "lost"}
    failed = rewarded([said("assistant", "a", tool_calls=[call])], (float("nan"),), ended_by="error", info=info)
    texts = [text for _, text in Page(transcript_page([failed])).texts]
    assert texts[2:5] == ["1. ", "reward not known, ended by error", "assistant, reward not known"]
    assert {"a", 'info: {"error": "lost"}'} < {*texts[5:]}
    save_transcripts(tmp_path / "rows.jsonl", [failed])
    read = json.loads((tmp_path / "rows.jsonl").read_text(), parse_constant=pytest.fail)
    assert (read["rewards"], read["reward"], read["title"]) == ([None], None, "")
    assert read["messages"][0]["tool_calls"][0]["function"]["arguments"] == {"amount": None}


def test_rewards_belong_to_the_last_messages_of_the_assistant(subtests: pytest.Subtests) -> None:
    """An environment may begin with examples, and after a rewritten history the transcript has fewer turns."""
    messages = [said("assistant", "example"), said("user", "now you"), said("assistant", "a")]
    for rewards, expected in (
        ((0.25,), ["assistant", "assistant, reward 0.25"]),
        ((1.0, 2.0, 3.0), ["assistant, reward 2", "assistant, reward 3"]),
    ):
        with subtests.test(rewards=rewards):
            texts = [text for _, text in Page(transcript_page([rewarded(messages, rewards)])).texts]
            assert [text for text in texts if text.startswith("assistant")] == expected


def test_titles_must_fit(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="titles must have one entry per row = 0"):
        save_transcripts(tmp_path / "rows.jsonl", [], titles=["a"])
    assert not (tmp_path / "rows.jsonl").exists()
    with pytest.raises(ContractError, match="titles must have one entry per row = 0"):
        transcript_page([], titles=["a"])
