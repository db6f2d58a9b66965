"""Transcripts: conversations as JSON lines, and as a page to read."""

import html
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from adapters.llm import Picture
from grpo.arguments import require_lengths

from .conversations import Conversation

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem; overflow-wrap: anywhere }
.message { margin: .5rem 0; padding: .3rem .7rem; border-left: 4px solid #aaa; white-space: pre-wrap }
.assistant { border-color: #2563eb; background: #eff4ff } .tool { border-color: #b45309; background: #fff8ed }
h2 { font-size: 1rem }
img { display: block; max-width: 100% }
summary { font-weight: 600 } summary span, .role { font-weight: 400; color: #555 } .role, code { display: block }
""".strip()
PAGE = (
    '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
    "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'\">\n"
    "<title>{heading}</title>\n<style>\n{style}\n</style>\n</head>\n<body>\n<h1>{heading}</h1>\n{body}\n</body>\n</html>\n"
)


def save_transcripts(
    path: str | Path, conversations: Sequence[Conversation], *, titles: Sequence[str] | None = None
) -> None:
    """Write one JSON object per conversation, one per line.

    Each has `title`, `messages`, `rewards` (one for each turn of the policy), `reward`, `ended_by` and `info`. With seats, it
    also has `seats` (one for each turn of the policy), and `seat_replies` (what the seats said that are not trained: `seat`,
    `asked`, the last message that it answered, and `message`). With several contexts, `contexts` has the messages, rewards
    and seats of each, and `messages` has those of the last context. A number that JSON does not have, such as the reward of a
    failed environment, is null. A picture is a link with its data. Token ids are left out.

    Args:
        path: File to write, for example `transcripts.jsonl`. Its folder is created if it does not exist.
        conversations: N conversations.
        titles: N texts that say what each conversation is about.

    Raises:
        ContractError: There is not one title for each conversation.
    """
    records = _records(conversations, titles, lambda picture: picture.link)
    lines = [json.dumps(record, allow_nan=False) + "\n" for record in records]
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text("".join(lines), encoding="utf-8")


def transcript_page(
    conversations: Sequence[Conversation], *, titles: Sequence[str] | None = None, heading: str = "Transcripts"
) -> str:
    """An HTML page with the conversations: who said what, tool calls, the reward and seat of each turn, what the seats said
    that are not trained, and why each conversation ended.

    The page needs no other file and runs no script. All text is escaped. Pictures are small copies.

    Args:
        conversations: N conversations.
        titles: N texts that say what each conversation is about.
        heading: Heading of the page.

    Raises:
        ContractError: There is not one title for each conversation.
    """
    parts = []
    for number, record in enumerate(_records(conversations, titles, Picture.small_picture), 1):
        contexts = record.get("contexts", [record])
        messages = []
        for place, context in enumerate(contexts, 1):
            if len(contexts) > 1:
                messages.append(f"<h2>Context {place} of {len(contexts)}</h2>")
            # a context may begin with an assistant's messages that are not the policy's
            turns = [*zip(context["rewards"], context.get("seats", [None] * len(context["rewards"])), strict=True)]
            messages += [_message(message, turns) for message in reversed(context["messages"])][::-1]
        if record.get("seat_replies"):
            messages.append("<h2>Seats that are not trained</h2>")
        for each in record.get("seat_replies", ()):
            messages += [_message(each["asked"], []), _message(each["message"], [], each["seat"])]
        info = f"<p>info: {_json(record['info'])}</p>" if record["info"] else ""
        title = html.escape(f"{number}. {record['title']}".strip())
        facts = f"<span>reward {_number(record['reward'])}, ended by {record['ended_by']}</span>"
        parts.append("\n".join([f"<details><summary>{title} {facts}</summary>", *messages, f"{info}</details>"]))
    page = PAGE.format(heading=html.escape(heading), style=STYLE, body="\n".join(parts))
    return page.encode("utf-8", "xmlcharrefreplace").decode("utf-8")  # half of a surrogate pair has no encoding


def _records(
    conversations: Sequence[Conversation], titles: Sequence[str] | None, link_of: Callable[[Picture], str]
) -> list[dict[str, Any]]:
    titles = [""] * len(conversations) if titles is None else titles
    require_lengths("transcripts", len(conversations), titles=titles)
    names = ("messages", "rewards", "reward", "ended_by", "info")
    parts = [{name: getattr(row, name) for name in names} for row in conversations]
    for part, row in zip(parts, conversations, strict=True):
        contexts: list[dict[str, Any]] = [{"messages": said, "rewards": rewards} for said, rewards in row.contexts]
        if len(contexts) > 1:
            part["contexts"] = contexts
        if any(turn.seat is not None for turn in row.turns):
            part["seats"] = [turn.seat for turn in row.turns]
            left = iter(part["seats"])
            for context in contexts:
                context["seats"] = [next(left) for _ in context["rewards"]]
        if row.seat_replies:
            part["seat_replies"] = [
                {"seat": each.seat, "asked": each.asked, "message": each.message} for each in row.seat_replies
            ]
    return [_as_json({"title": title, **part}, link_of) for title, part in zip(titles, parts, strict=True)]


def _as_json(value: Any, link_of: Callable[[Picture], str]) -> Any:
    """A copy in which numbers that JSON does not have are None, and pictures are links."""
    if isinstance(value, dict):
        return {name: _as_json(part, link_of) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(part, link_of) for part in value]
    if isinstance(value, Picture):
        return link_of(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _message(
    message: dict[str, Any], turns: list[tuple[float | None, str | None]], other_seat: str | None = None
) -> str:
    """A message. If it is the policy's, its reward and its seat are taken from the end of `turns`."""
    role = message["role"]
    about = role if other_seat is None else f"{role} ({other_seat})"
    if role == "assistant" and turns:
        reward, seat = turns.pop()
        about = f"{role if seat is None else f'{role} ({seat})'}, reward {_number(reward)}"
    thought = f"[{message['reasoning_content']}]\n" if message.get("reasoning_content") else ""
    calls = [call["function"] for call in message.get("tool_calls") or []]
    called = "".join(f"<code>{html.escape(call['name'])}({_json(call['arguments'])})</code>" for call in calls)
    content = message.get("content") or ""
    parts = [{"text": content}] if isinstance(content, str) else content
    text = html.escape(thought) + "".join(
        f'<img alt="picture" src="{html.escape(part["image"])}">' if "image" in part else html.escape(part["text"])
        for part in parts
    )
    kind = role if role in ("assistant", "tool") else "other"
    return f'<div class="message {kind}"><span class="role">{html.escape(about)}</span>{text}{called}</div>'


def _number(value: float | None) -> str:
    return "not known" if value is None else f"{value:g}"


def _json(value: Any) -> str:
    return html.escape(json.dumps(value, ensure_ascii=False))
