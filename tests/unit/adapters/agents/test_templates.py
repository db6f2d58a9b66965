"""`ChatTemplate`: which templates append, what a bridge is, and that it never changes what was rendered."""

import re
from functools import cache
from typing import Any

import pytest

from adapters.agents import ChatTemplate, Message
from adapters.agents.call_check import require_readable_calls
from adapters.agents.messages import tool_message
from adapters.agents.templates import ANSWERED, ASKED, CALLED, RESULT, RETURNED, TOOL
from grpo.errors import ConfigError, ContractError
from tests.support.agent_parts import calls_tools, tool_call, user
from tests.support.agents import CHATML, ENDS, ORIGINALS, chat_tokenizer, marked_tokenizer, original_template

REWRITES_AT_USER = {
    "deepseek_r1_distill", "deepseekv3", "diffusion_gemma", "glm4moe", "gptoss", "lfm2_2_5", "lfm2_2_5_v2", "lfm2_2_5_vl",
    "muse_glimmer", "nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra", "qwen3",
    "qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8",
}  # fmt: skip
"""Templates that rewrite some turn once a user answers it: they drop or move its thoughts."""


@cache
def template_of(name: str) -> tuple[ChatTemplate, Any]:
    tokenizer = chat_tokenizer(original_template(name))
    ends = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(list(ENDS.get(name, ())))]
    return ChatTemplate(tokenizer, end_token_ids=ends), tokenizer


FOUR: Message = {"role": "assistant", "content": "four"}


def test_a_bridge_is_what_the_template_writes_after_the_turn_with_the_end_that_the_turn_lacks() -> None:
    tokenizer = chat_tokenizer()
    template = ChatTemplate(tokenizer)
    prompt = "<|im_start|>user\nquestion<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(template.render([ASKED])) == prompt
    turn = tokenizer("four<|im_end|>")["input_ids"]
    bridge = template.bridge(turn, FOUR, [user("sure?")])
    assert tokenizer.decode(bridge) == "\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"
    answer = tokenizer.decode(template.bridge(turn, {**CALLED, "content": ""}, [RETURNED], [TOOL]))
    assert answer == "\n<|im_start|>user\n<tool_response>\nsunshine<|im_end|>\n<|im_start|>assistant\n"
    cut = tokenizer("four")["input_ids"]  # a stop string of the user ended it
    assert tokenizer.decode(template.bridge(cut, FOUR, [user("sure?")])) == "<|im_end|>" + tokenizer.decode(bridge)


def test_a_bridge_renders_one_conversation_if_another_one_had_its_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = chat_tokenizer()
    template = ChatTemplate(tokenizer)
    turn, rendered, apply = tokenizer("four<|im_end|>")["input_ids"], [], tokenizer.apply_chat_template
    monkeypatch.setattr(tokenizer, "apply_chat_template", lambda *a, **b: (rendered.append(a), apply(*a, **b))[1])
    for number in range(70):
        tool = {**TOOL, "function": {**TOOL["function"], "name": f"look_{number}"}}
        bridges = []
        for expected in (2, 3):
            bridges.append(template.bridge(turn, FOUR, [user("sure?")], [tool]))
            assert len(rendered) == expected
        assert bridges[0] == bridges[1]
        rendered.clear()


def test_special_tokens_that_the_tokenizer_does_not_name_separate_messages_too() -> None:
    named, marked = (ChatTemplate(tokenizer) for tokenizer in (chat_tokenizer(), marked_tokenizer()))
    tokenizer = chat_tokenizer()
    assert marked.end_token_ids == named.end_token_ids == (tokenizer.eos_token_id,)
    assert (marked.opening_token_ids, marked.stop) == (named.opening_token_ids, named.stop)
    turn = tokenizer("a<|im_start|>b<|im_end|>")["input_ids"]
    assert [template.bridge(turn, FOUR, [ASKED]) for template in (named, marked)] == [None, None]


def test_the_token_that_ends_a_turn_may_end_its_header_too() -> None:
    fields = "{% for m in messages %}{{ m.role }}</s>{{ m.content }}</s>{% endfor %}"
    tokenizer = chat_tokenizer(fields + "{% if add_generation_prompt %}assistant</s>{% endif %}")
    bridge = ChatTemplate(tokenizer).bridge(tokenizer("four</s>")["input_ids"], FOUR, [ASKED])
    assert tokenizer.decode(bridge) == "user</s>question</s>assistant</s>"


def test_a_turn_that_another_token_ended_has_no_bridge() -> None:
    tokenizer = chat_tokenizer()
    template = ChatTemplate(tokenizer, end_token_ids=[tokenizer.bos_token_id])
    # an end token that the template does not write; the begin of another message; an unknown token in the turn
    for turn in ("four<s>", "four<|im_start|>", "fo<pad>ur<|im_end|>"):
        assert template.bridge(tokenizer(turn)["input_ids"], FOUR, [ASKED]) is None


@pytest.mark.slow
def test_the_same_message_in_any_history_is_the_same_tokens(subtests: pytest.Subtests) -> None:
    """For all original templates: a bridge continues the rendered history exactly, wherever there is one."""
    num_bridges = 0
    histories: list[list[Message]] = [[ASKED], [user("Tell me\n more "), ANSWERED, user("again")]]
    replies: list[tuple[Message, list[Message]]] = [
        (ANSWERED, [user("another question")]),
        (CALLED, [tool_message(CALLED["tool_calls"][0], "clouds, 12 degrees")]),
    ]
    for name in ORIGINALS:
        template, _ = template_of(name)
        for history in histories:
            for said, new in replies:
                tools = [TOOL] if said is CALLED else None
                if tools and not template.shows_tools:
                    continue
                with subtests.test(template=name, history=len(history), after=new[0]["role"]):
                    prompt = template.render(history, tools)
                    whole = template.render([*history, said, *new], tools)
                    if not template.appends_after(new[0]["role"], with_tools=bool(tools)):
                        continue
                    begin = len(prompt)
                    end = next(place for place in range(begin, len(whole)) if whole[place] in template.end_token_ids)
                    turn = whole[begin : end + 1]
                    assert [*prompt, *turn, *(template.bridge(turn, said, new, tools) or [])] == whole
                    num_bridges += 1
    assert num_bridges > 80


def test_which_original_templates_rewrite_the_history_and_all_calls_are_read_back(subtests: pytest.Subtests) -> None:
    assert len(ORIGINALS) == 41
    at_user, at_tool, show_tools = set(), set(), set()
    for name in ORIGINALS:
        template, tokenizer = template_of(name)
        if not all(template.appends_after("user", with_text=with_text) for with_text in (False, True)):
            at_user.add(name)
        with subtests.test(template=name):
            require_readable_calls(tokenizer, template)
        if template.shows_tools:
            show_tools.add(name)
            if not any(template.appends_after("tool", with_tools=True, with_text=text) for text in (False, True)):
                at_tool.add(name)
    assert (at_user, at_tool) == (REWRITES_AT_USER, {"deepseekv3", "diffusion_gemma"})
    assert len(show_tools) == 28


def test_marks_of_other_speakers_end_a_turn_and_the_begin_of_the_next_turn_does_not() -> None:
    assert ChatTemplate(chat_tokenizer()).stop == ("<tool_response>",)
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    plain += "{% if add_generation_prompt %}assistant:{% endif %}"
    assert ChatTemplate(chat_tokenizer(plain)).stop == ("\nuser:",)
    short = plain.replace("assistant:", "me:").replace("{{ m.role }}", "{{ m.role.replace('assistant', 'me') }}")
    assert ChatTemplate(chat_tokenizer(short)).stop == ("\nuser:",)  # not the policy's own mark
    marks = "{% for m in messages %}{% if m.role == 'user' %}<|user|>{% else %}<|assistant|>{% endif %}{{ m.content }}"
    # a template that writes nothing after an answer
    tokenizer = chat_tokenizer(marks + "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}")
    ids = (tokenizer.convert_tokens_to_ids("<|user|>"),)
    assert ChatTemplate(tokenizer, end_token_ids=ids).end_token_ids == ids


def test_templates_read_parts_or_arguments_as_text_where_they_need_them() -> None:
    template, tokenizer = template_of("idefics3")
    assert ("question" in tokenizer.decode(template.render([ASKED])), template.shows_tools) == (True, False)
    template, tokenizer = template_of("deepseekv3")
    rendered = tokenizer.decode(template.render([ASKED, CALLED, RETURNED], [TOOL]))
    assert all(text in rendered for text in ('{"topic": "weather"}', RESULT))


def test_unusable_templates_are_refused() -> None:
    with pytest.raises(ConfigError, match="must have a chat template; got none"):
        ChatTemplate(chat_tokenizer(None))
    for text, message in (("nothing", "question and an answer"), ("{{ raise_exception('no') }}", "answer; got 'no'")):
        with pytest.raises(ConfigError, match=f"must render a .*{message}"):
            ChatTemplate(chat_tokenizer(text))


def test_a_template_that_does_not_show_tools_refuses_them() -> None:
    silent = CHATML.replace("m.role == 'tool'", "false").replace("{{ c.function | tojson }}", "")
    for text in (silent, original_template("llama3"), original_template("gemma")):
        template = ChatTemplate(chat_tokenizer(text))
        assert not template.shows_tools
        with pytest.raises(ContractError, match="must write tool calls and their results"):
            template.render([ASKED, CALLED, RETURNED])
    strict = ChatTemplate(chat_tokenizer(original_template("gemma3")))
    with pytest.raises(ContractError, match=r"must accept the conversation; got .*alternate"):
        strict.render([ASKED, ASKED])


def test_a_template_that_does_not_say_which_tools_there_are_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    undescribed = re.sub(r"{%[^%]*if tools.*?endif %}", "", CHATML, flags=re.DOTALL)
    assert undescribed != CHATML
    for text, num_times in ((undescribed, 1), (CHATML, 0)):
        caplog.clear()
        template = ChatTemplate(chat_tokenizer(text))
        assert template.shows_tools
        template.render([ASKED])
        assert caplog.text == ""
        for _ in range(2):
            template.render([ASKED], [TOOL])
        assert caplog.text.count("the model is not told of its tools") == num_times


# Turns of a script

CALL: Message = calls_tools(tool_call("lookup", topic="rain"))
THINKS_FIRST = {"deepseek_r1_distill", "deepseekv3", *(name for name in ORIGINALS if name.startswith("nemotron"))}
"""Templates whose prompt begins a thought. They write no message without a thought there."""


@pytest.mark.parametrize("name", ORIGINALS)
def test_the_template_writes_messages_of_a_script(name: str) -> None:
    """A written turn is what the template has in the whole conversation, and ends with an end-of-turn token."""
    template, tokenizer = template_of(name)
    said = [{"role": "assistant", "content": "sunny"}, *([CALL] if template.shows_tools else [])]
    for message in said:
        if name in THINKS_FIRST:
            with pytest.raises(ContractError, match="the text that the policy would write"):
                template.turn(message)
            continue
        token_ids = template.turn(message)
        assert token_ids[-1] in template.end_token_ids
        assert not {*token_ids[:-1]} & {*template.end_token_ids}
        text = tokenizer.decode(token_ids)
        assert all(word in text for word in (["lookup", "topic", "rain"] if message is CALL else ["sunny"]))


def test_a_turn_ends_as_the_template_ends_it() -> None:
    """gpt-oss ends a call and an answer with different tokens. A text has the answer's, unless it has one already."""
    template, tokenizer = template_of("gptoss")
    turns = [CALL, {"role": "assistant", "content": "sunny"}, "sunny", "lookup<|call|>"]
    found = [tokenizer.convert_ids_to_tokens(template.turn(turn)[-2:]) for turn in turns]
    assert found == [["}", "<|call|>"], ["y", "<|return|>"], ["y", "<|return|>"], ["p", "<|call|>"]]
    # a template that writes no token there: the first of the given ones
    plain = chat_tokenizer("{% for m in messages %}{{ m.content }}!{% endfor %}")
    assert ChatTemplate(plain, end_token_ids=[plain.eos_token_id, 7]).turn("")[-1] == plain.eos_token_id


def test_a_message_that_the_template_cannot_write_is_refused() -> None:
    template = ChatTemplate(chat_tokenizer("{% for m in messages %}{{ m.content }}!{% endfor %}"))
    with pytest.raises(ContractError, match="none is known for the turn 'fine'"):
        template.turn("fine")
    greets = "{% if add_generation_prompt %}Hello{% endif %}"
    template = ChatTemplate(chat_tokenizer(greets + CHATML))
    with pytest.raises(ContractError, match="after the prompt of a turn"):
        template.turn({"role": "assistant", "content": "fine"})
