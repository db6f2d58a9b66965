"""Conversations with pictures: what environments and tools show, how it is scored, and what transcripts hold."""

import asyncio
import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from adapters.agents import AgentPolicy, Conversation, Message, save_transcripts, transcript_page
from adapters.agents.calls import call_functions
from adapters.agents.messages import as_messages, pictures_of, text_of
from adapters.llm import HFPolicy, Picture, SamplingConfig
from grpo.checkpoint import read_checkpoint, write_checkpoint
from grpo.errors import ContractError
from tests.support.agent_parts import calls_tools, changed, rows_of, tool_call, user
from tests.support.agents import CHATML, language_model
from tests.support.llm_models import FLOAT32_GRADIENT, gradients, relative_difference
from tests.support.vision_models import IDS, IMAGE, TEMPLATE, chat, picture, plain_inputs, tiny_vision
from tests.unit.adapters.agents.test_endpoint import converse, with_client

ENDING = TEMPLATE.replace("\n{% endfor %}{% if add", "<eos>\n{% endfor %}{% if add")
"""Writes `<eos>` behind each message, so that a context goes on."""
STOP = tuple("abcdefghi0123")


def tiny_policy(family: str = "qwen2_5_vl", *, template: str = ENDING, **options: Any) -> HFPolicy:
    model, processor = tiny_vision(family)
    processor.chat_template = template.replace("<image>", "<boi>") if family == "gemma3" else template
    sampling = options.pop("sampling", None) or SamplingConfig(max_new_tokens=6, stop=STOP)
    return HFPolicy(model, processor, sampling=sampling, **options)


class Screens:
    """Shows a picture, and after each message another one, three in all. Their sizes differ."""

    def __init__(self, state: int) -> None:
        self.state, self.turn = state, 0

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return chat("what now?", picture(16, 24, self.state)), {}

    def step(self, action: Message) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.turn += 1
        seen = np.asarray(picture(24, 16 + 8 * self.turn, 10 * self.state + self.turn))
        return seen, float(len(action["content"])), self.turn == 3, False, {}


def held(policy: HFPolicy, size: int = 2, make: Any = Screens, **options: Any) -> tuple[Any, Any, list[Conversation]]:
    agent = AgentPolicy(policy, make, **options)
    torch.manual_seed(0)
    sampled = agent.sample_actions([1, 2], size)
    return agent, sampled, rows_of(sampled.actions)


def one_by_one(policy: HFPolicy, row: Conversation) -> Tensor:
    """Log-probs of the row's steps, from a pass of the whole model over each context, with what the processor's own call makes
    of its pictures."""
    found = []
    for segment in row.segments:
        images = [one.image for one in segment.pictures]
        inputs = plain_inputs(policy.processor, chat("a", *images))
        inputs.pop("attention_mask")
        inputs["input_ids"] = torch.tensor([segment.token_ids])
        for name in inputs:
            if name.endswith("token_type_ids"):
                inputs[name] = (inputs["input_ids"] == IMAGE).long()
        logits = policy.model(**inputs, use_cache=False).logits[0, :-1]
        logits = logits.index_fill(1, torch.tensor(policy.picture_token_ids), -torch.inf)
        log_probs = logits.log_softmax(1).gather(1, inputs["input_ids"][0, 1:, None]).squeeze(1)
        found.append(log_probs[torch.tensor(segment.sampled[1:])])
    return torch.cat(found)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "idefics3"])
def test_sampled_log_probs_and_gradients_are_those_of_a_plain_pass_per_context(family: str) -> None:
    policy = tiny_policy(family)
    agent, sampled, rows = held(policy)
    assert max(len(row.turns) for row in rows) > 1
    segments = [segment for row in rows for segment in row.segments]
    assert any(len(segment.pictures) > segment.num_first_pictures > 0 for segment in segments)  # a context went on
    assert all(len(row.segments[-1].pictures) == len(row.turns) for row in rows)
    scores = agent.score_actions([None] * len(rows), rows)
    torch.testing.assert_close(scores.log_probs, sampled.behaviour_log_probs, atol=2e-5, rtol=0)
    expected = [one_by_one(policy, row) for row in rows]
    for own, found in zip(expected, scores.log_probs, strict=True):
        torch.testing.assert_close(found[: len(own)], own, atol=2e-5, rtol=0)
    weights = torch.randn(scores.log_probs.shape, generator=torch.Generator().manual_seed(1))
    plain = sum((own * weight[: len(own)]).sum() for own, weight in zip(expected, weights, strict=True))
    plain_gradients = gradients(policy.model, plain)
    found = gradients(policy.model, (scores.log_probs * weights).sum())
    assert relative_difference(found, plain_gradients) < FLOAT32_GRADIENT
    assert any("vis" in name and bool(slope.any()) for name, slope in found.items())


def test_an_update_computes_the_pictures_of_equal_prompts_once_and_those_of_longer_contexts_once_each() -> None:
    """Pictures of a pass are in one call, so their patches are counted."""
    policy = tiny_policy()
    agent, _, rows = held(policy, 4)
    segments = [segment for row in rows for segment in row.segments]
    longer = [segment for segment in segments if len(segment.pictures) > segment.num_first_pictures]
    prompts = {(one.token_ids[: one.num_context_tokens], one.pictures) for one in segments if one not in longer}
    assert longer
    assert len(prompts) < len(segments) - len(longer)  # some share
    patches: list[int] = []
    policy.model.model.visual.register_forward_pre_hook(lambda module, given: patches.append(len(given[0])))
    agent.score_actions([None] * len(rows), rows)
    pictures = [one for own in (*(one.pictures for one in longer), *(own for _, own in prompts)) for one in own]
    each = [plain_inputs(policy.processor, chat("a", one.image))["pixel_values"] for one in pictures]
    assert sum(patches) == sum(map(len, each))


def test_a_template_that_rewrites_the_history_gives_each_turn_a_context_with_all_pictures() -> None:
    policy = tiny_policy(template=TEMPLATE)  # writes no end of a turn
    agent, sampled, rows = held(policy)
    longest = max(rows, key=lambda row: len(row.turns))
    assert [len(segment.pictures) for segment in longest.segments] == list(range(1, len(longest.turns) + 1))
    assert all(len(segment.pictures) == segment.num_first_pictures for segment in longest.segments)
    scores = agent.score_actions([None] * len(rows), rows)
    torch.testing.assert_close(scores.log_probs, sampled.behaviour_log_probs, atol=2e-5, rtol=0)


def test_an_observation_is_a_picture_in_any_form_and_answers_a_call() -> None:
    image, call = picture(8, 8), tool_call("look")
    seen = {"type": "image", "image": Picture.of(image)}
    a, b = ({"type": "text", "text": text} for text in "ab")
    for given in (image, np.asarray(image), Picture.of(image)):
        assert as_messages(given) == [user([seen])]
        [result] = as_messages(given, calls_tools(call))
        assert (result["role"], result["tool_call_id"], text_of(result)) == ("tool", call["id"], "[picture]")
    link = {"type": "image_url", "image_url": {"url": Picture.of(image).link}}
    assert as_messages(user([a, link])) == [user([a, seen])]
    assert as_messages(user([a, b])) == [user("a\nb")]


def test_what_is_no_picture_and_what_cannot_show_pictures_is_refused(subtests: pytest.Subtests) -> None:
    torch.manual_seed(0)
    policy, text_only = tiny_policy(), language_model()
    rows = held(policy)[2][:1]
    no_parts = CHATML.replace("<|im_end|>", "<eos>").replace("<|im_start|>", "")

    def shows(part: Any) -> Any:
        return lambda: as_messages([user([part])])

    cases: list[tuple[Any, str]] = [
        (shows({"type": "audio", "audio": "a.wav"}), r"Part 0 of a message of 'user' must be a text or a .* 'audio'"),
        (shows({"type": "image"}), r"Part 0 of a message of 'user' has no picture"),
        (shows({"type": "image", "image": np.zeros((0, 3, 3), np.uint8)}), r"Part 0 of .* 'user' must have pixels"),
        (shows(7), r"An observation must be a text, a picture"),
        (lambda: held(text_only), r"A conversation has 1 pictures, and the policy has a tokenizer"),
        (lambda: AgentPolicy(text_only, Screens).score_actions([None], rows), "need the processor with which they"),
        (lambda: held(policy, observations=True), r"needs observations of text; .* conversations \[.*\] have pictures"),
        (lambda: held(tiny_policy(template=no_parts)), "picture"),
    ]
    for act, message in cases:
        with subtests.test(message), pytest.raises(ContractError, match=message):
            act()


def test_a_tool_returns_a_picture_or_texts_and_pictures() -> None:
    def look(count: int) -> Any:
        return picture() if count == 1 else ["two", picture(), {"n": 2}]

    async def run(function: Any, **arguments: Any) -> Any:
        return function(**arguments)

    said = calls_tools(*(tool_call("look", count=n) for n in (1, 2)))
    (one, two), num_failed = asyncio.run(call_functions(said, {"look": look}, run))
    seen = {"type": "image", "image": Picture.of(picture())}
    assert (num_failed, one["content"]) == (0, [seen])
    assert two["content"] == [{"type": "text", "text": "two"}, seen, {"type": "text", "text": '{"n": 2}'}]


def test_requests_over_http_have_pictures_and_name_no_files() -> None:
    link = {"type": "image_url", "image_url": {"url": Picture.of(picture()).link}}

    def use(client: Any) -> float:
        client.chat.completions.create(model="m", messages=[user([{"type": "text", "text": "a"}, link])])
        return 1.0

    [row] = converse(tiny_policy(sampling=SamplingConfig(max_new_tokens=3)), with_client(use))
    assert row.ended_by != "error", row.info
    assert row.segments[0].pictures == (Picture.of(picture()),)
    assert IDS["<image>"] in row.segments[0].token_ids


def test_transcripts_show_pictures_small_and_files_hold_them_whole(tmp_path: Path) -> None:
    wide = Picture.of(picture(20, 640))
    _, _, rows = held(tiny_policy(), 1, changed(Screens, reset=lambda self, **_: (picture(20, 640), {})))
    page = transcript_page(rows)
    assert "img-src data:;" in page
    assert page.count("<img ") == page.count('<img alt="picture" src="data:image/png;base64,') >= 2
    assert wide.small_picture() in page
    assert wide.link not in page
    assert Picture.of(wide.small_picture()).image.size == (320, 10)
    save_transcripts(tmp_path / "rows.jsonl", rows)
    [first, *_] = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert first["messages"][0] == {"role": "user", "content": [{"type": "image", "image": wide.link}]}
    assert Picture.of(first["messages"][0]["content"][0]["image"]) is wide
    assert str(rows[0]).startswith("assistant: ")


def test_a_checkpoint_holds_each_picture_once_and_gives_the_conversations_back(tmp_path: Path) -> None:
    policy = tiny_policy()
    agent, sampled, rows = held(policy, 4)
    write_checkpoint(tmp_path / "state", {"rows": rows}, iteration=1)
    text = "".join(path.read_text() for path in (tmp_path / "state").rglob("*.json"))
    shown = [one for row in rows for message in row.messages for one in pictures_of([message])]
    assert text.count("data:image/png;base64,") == len({*shown}) < len(shown)
    again = read_checkpoint(tmp_path / "state")["rows"]
    assert again == rows
    scores = agent.score_actions([None] * len(again), again)
    torch.testing.assert_close(scores.log_probs, sampled.behaviour_log_probs, atol=2e-5, rtol=0)


def test_equal_pictures_are_one_object() -> None:
    one = Picture.of(picture())
    again = [
        Picture.of(np.asarray(picture())),
        Picture.of(one),
        copy.deepcopy([one])[0],
        Picture.from_state(one.to_state()),
    ]
    assert all(other is one for other in again)
    assert Picture.of(picture(seed=1)) != one
    assert np.array_equal(np.asarray(one.image), np.asarray(picture()))


def test_equal_tokens_with_other_pictures_have_other_random_numbers() -> None:
    """A static prompt with two screens: replies to both have names and seeds of their own."""
    policy = tiny_policy(sampling=SamplingConfig(max_new_tokens=3))
    ids: list[list[str]] = []

    async def play(chat_: Any, state: Any) -> float:
        replies = [await chat_.reply(chat("a?", picture(16, 16, seed))) for seed in state]
        ids.append([reply.id.rsplit("-", 1)[0] for reply in replies])
        return 1.0

    AgentPolicy(policy, play).generate_actions([(0, 1, 0)], 1)
    [[first, second, third]] = ids
    assert first == third != second
