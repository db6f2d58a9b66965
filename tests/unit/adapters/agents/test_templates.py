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
from tests.support.agents import CHATML, ENDS, FORGETFUL, ORIGINALS, chat_tokenizer, marked_tokenizer, original_template

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


def test_a_bridge_is_what_the_template_writes_after_the_turn() -> None:
    tokenizer = chat_tokenizer()
    template = ChatTemplate(tokenizer)
    prompt = "<|im_start|>user\nquestion<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(template.render([ASKED])) == prompt
    turn = tokenizer("four<|im_end|>")["input_ids"]
    bridge = template.bridge(turn, {"role": "assistant", "content": "four"}, [{"role": "user", "content": "sure?"}])
    assert tokenizer.decode(bridge) == "\n<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n"
    said: Message = {**CALLED, "content": ""}
    answer = template.bridge(turn, said, [RETURNED], [TOOL])
    assert tokenizer.decode(answer) == (
        "\n<|im_start|>user\n<tool_response>\nsunshine<|im_end|>\n<|im_start|>assistant\n"
    )


def test_special_tokens_that_the_tokenizer_does_not_name_separate_messages_too() -> None:
    named, marked = (ChatTemplate(tokenizer) for tokenizer in (chat_tokenizer(), marked_tokenizer()))
    tokenizer = chat_tokenizer()
    assert marked.end_token_ids == named.end_token_ids == (tokenizer.eos_token_id,)
    assert (marked.opening_token_ids, marked.stop) == (named.opening_token_ids, named.stop)
    turn = tokenizer("a<|im_start|>b<|im_end|>")["input_ids"]
    for template in (named, marked):
        assert template.bridge(turn, {"role": "assistant", "content": "ab"}, [ASKED]) is None


def test_the_token_that_ends_a_turn_may_end_its_header_too() -> None:
    fields = "{% for m in messages %}{{ m.role }}</s>{{ m.content }}</s>{% endfor %}"
    tokenizer = chat_tokenizer(fields + "{% if add_generation_prompt %}assistant</s>{% endif %}")
    said: Message = {"role": "assistant", "content": "four"}
    bridge = ChatTemplate(tokenizer).bridge(tokenizer("four</s>")["input_ids"], said, [ASKED])
    assert tokenizer.decode(bridge) == "user</s>question</s>assistant</s>"


def test_a_turn_without_its_end_gets_the_end_as_context() -> None:
    tokenizer = chat_tokenizer()
    turn = tokenizer("four.")["input_ids"]  # a stop string of the user ended it
    bridge = ChatTemplate(tokenizer).bridge(turn, {"role": "assistant", "content": "four."}, [ASKED])
    assert tokenizer.decode(bridge).startswith("<|im_end|>\n<|im_start|>user")


def test_a_turn_that_another_token_ended_has_no_bridge() -> None:
    tokenizer = chat_tokenizer()
    template = ChatTemplate(tokenizer, end_token_ids=[tokenizer.bos_token_id])
    said: Message = {"role": "assistant", "content": "four"}
    for mark in ("<s>", "<|im_start|>"):  # an end token that the template does not write; the begin of another message
        assert template.bridge(tokenizer(f"four{mark}")["input_ids"], said, [ASKED]) is None
    assert template.bridge(tokenizer("fo<pad>ur<|im_end|>")["input_ids"], said, [ASKED]) is None


def test_a_template_that_drops_what_was_said_has_no_bridge() -> None:
    tokenizer = chat_tokenizer(FORGETFUL)
    template = ChatTemplate(tokenizer)
    assert not template.appends_after("user")
    assert template.bridge(tokenizer("four<|im_end|>")["input_ids"], ANSWERED, [ASKED]) is None


@pytest.mark.slow
def test_the_same_message_in_any_history_is_the_same_tokens(subtests: pytest.Subtests) -> None:
    """For all original templates: a bridge continues the rendered history exactly, wherever there is one."""
    num_bridges = 0
    histories: list[list[Message]] = [
        [ASKED],
        [{"role": "user", "content": "Tell me\n more "}, ANSWERED, {"role": "user", "content": "again"}],
    ]
    replies: list[tuple[Message, list[Message]]] = [
        (ANSWERED, [{"role": "user", "content": "another question"}]),
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
                    tail = next(
                        begin for begin in range(len(prompt), len(whole)) if whole[begin] in template.end_token_ids
                    )
                    turn = whole[len(prompt) : tail + 1]
                    assert whole[: len(prompt)] == prompt
                    bridge = template.bridge(turn, said, new, tools)
                    assert bridge is not None
                    assert [*prompt, *turn, *bridge] == whole
                    num_bridges += 1
    assert num_bridges > 80


def test_which_original_templates_rewrite_the_history() -> None:
    assert len(ORIGINALS) == 41
    found, at_tool = set(), set()
    for name in ORIGINALS:
        template, _ = template_of(name)
        appends = [template.appends_after("user", with_text=with_text) for with_text in (False, True)]
        if not all(appends):
            found.add(name)
        if template.shows_tools and not any(
            template.appends_after("tool", with_tools=True, with_text=with_text) for with_text in (False, True)
        ):
            at_tool.add(name)
    assert found == REWRITES_AT_USER
    assert at_tool == {"deepseekv3", "diffusion_gemma"}


def test_the_calls_of_all_original_templates_are_read_back(subtests: pytest.Subtests) -> None:
    checked = 0
    for name in ORIGINALS:
        template, tokenizer = template_of(name)
        with subtests.test(template=name):
            require_readable_calls(tokenizer, template)
        checked += template.shows_tools
    assert checked == 28


def test_marks_of_other_speakers_end_a_turn() -> None:
    template = ChatTemplate(chat_tokenizer())
    assert template.stop == ("<tool_response>",)
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    plain += "{% if add_generation_prompt %}assistant:{% endif %}"
    assert ChatTemplate(chat_tokenizer(plain)).stop == ("\nuser:",)
    short = plain.replace("assistant:", "me:").replace("{{ m.role }}", "{{ m.role.replace('assistant', 'me') }}")
    assert ChatTemplate(chat_tokenizer(short)).stop == ("\nuser:",)  # not the policy's own mark


def test_the_begin_of_the_next_turn_is_no_end() -> None:
    """A template that writes nothing after an answer."""
    marks = "{% for m in messages %}{% if m.role == 'user' %}<|user|>{% else %}<|assistant|>{% endif %}{{ m.content }}"
    tokenizer = chat_tokenizer(marks + "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}")
    user = tokenizer.convert_tokens_to_ids("<|user|>")
    assert ChatTemplate(tokenizer, end_token_ids=[user]).end_token_ids == (user,)


def test_templates_of_models_with_images_read_parts() -> None:
    template, tokenizer = template_of("idefics3")
    assert "question" in tokenizer.decode(template.render([ASKED]))
    assert not template.shows_tools


def test_arguments_are_text_where_the_template_needs_text() -> None:
    template, tokenizer = template_of("deepseekv3")
    rendered = tokenizer.decode(template.render([ASKED, CALLED, RETURNED], [TOOL]))
    assert '{"topic": "weather"}' in rendered
    assert RESULT in rendered


def test_unusable_templates_are_refused() -> None:
    with pytest.raises(ConfigError, match="must have a chat template; got none"):
        ChatTemplate(chat_tokenizer(None))
    with pytest.raises(ConfigError, match="must render a question and an answer"):
        ChatTemplate(chat_tokenizer("nothing"))
    with pytest.raises(ConfigError, match="must render a question and an answer; got 'no'"):
        ChatTemplate(chat_tokenizer("{{ raise_exception('no') }}"))


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
