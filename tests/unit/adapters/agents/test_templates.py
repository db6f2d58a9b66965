"""`ChatTemplate`: which templates append, what a bridge is, and that the calls that a template writes are read back."""

import json
import re
from functools import cache
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from adapters.agents import AgentPolicy, ChatTemplate, Message
from adapters.agents.call_check import require_readable_calls
from adapters.agents.call_formats import find_calls
from adapters.agents.calls import read_turn
from adapters.agents.messages import tool_message
from adapters.agents.templates import ANSWERED, ASKED, CALLED, RETURNED, TOOL
from grpo.errors import ConfigError, ContractError
from tests.support.agent_parts import calls_tools, tool_call, user
from tests.support.agents import (
    CHATML,
    ENDS,
    ORIGINALS,
    THINKS,
    Tools,
    chat_tokenizer,
    language_model,
    marked_tokenizer,
    original_template,
)

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


# Tool calls in the published formats


TYPES: dict[str, Any] = {"a": "integer", "note": "string", "exact": "boolean", "of": "array"}
PROPERTIES = {name: {"type": kind} for name, kind in TYPES.items()}
PROPERTIES |= {"unit": {"type": "string", "nullable": True}, "free": {}}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": PROPERTIES}}}
ONE = [("add", {"a": 1})]
TAGGED_CALL = "<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
NAME, ARGUMENTS = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
EACH, END = "{% for k, v in c.function.arguments | items %}", "{% endfor %}"
VALUE = "{{ v if v is string else v | tojson }}"
QWEN_VALUE = "{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}"
PYTHON = f"{NAME}({EACH}{{{{ k }}}}={{{{ v | tojson }}}}{{{{ ', ' if not loop.last }}}}{END})"
JSON = f'{{"name": "{NAME}", "arguments": {ARGUMENTS}}}'
PARAMETERS = f'{{"name": "{NAME}", "parameters": {ARGUMENTS}}}'
KEY = "{{ k }}"

WRITTEN = {
    "Hermes": f"<tool_call>\n{JSON}\n</tool_call>",
    "a call in OpenAI's form": "<tool_call>{{ c | tojson }}</tool_call>",
    "Mistral, from Large 2411 on": f"[TOOL_CALLS]{NAME}[ARGS]{ARGUMENTS}",
    "Mistral, with ids": f"[TOOL_CALLS]{NAME}[CALL_ID]{{{{ c.id }}}}[ARGS]{ARGUMENTS}",
    "Mistral, with a name only": f"[TOOL_CALLS]{NAME}{ARGUMENTS}",
    "DeepSeek V3": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{NAME}\n```json\n{ARGUMENTS}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "DeepSeek V3.1": f"<｜tool▁call▁begin｜>{NAME}<｜tool▁sep｜>{ARGUMENTS}<｜tool▁call▁end｜>",
    "GLM 4.5": f"<tool_call>{NAME}\n{EACH}<arg_key>{KEY}</arg_key>\n<arg_value>{VALUE}</arg_value>\n{END}</tool_call>",
    "GLM 4.7": f"<tool_call>{NAME}{EACH}<arg_key>{KEY}</arg_key><arg_value>{VALUE}</arg_value>{END}</tool_call>",
    "Qwen3-Coder": f"<tool_call>\n<function={NAME}>\n{EACH}<parameter={KEY}>\n{QWEN_VALUE}\n</parameter>\n{END}</function>\n"
    "</tool_call>",
    "Seed-OSS": f"<seed:tool_call>\n<function={NAME}>\n{EACH}<parameter={KEY}>{VALUE}</parameter>\n{END}</function>\n"
    "</seed:tool_call>",
    "Llama, with a function of your own": f"<function={NAME}>{ARGUMENTS}</function>",
    "MiniMax M2": f'<minimax:tool_call>\n<invoke name="{NAME}">\n{EACH}<parameter name="{KEY}">{VALUE}</parameter>\n{END}'
    "</invoke>\n</minimax:tool_call>",
    "DeepSeek V3.2": f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="{NAME}">\n{EACH}<｜DSML｜parameter name="{KEY}" '
    f'string="{{{{ v is string }}}}">{VALUE}</｜DSML｜parameter>\n{END}</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    "Kimi K2": f"<|tool_calls_section_begin|><|tool_call_begin|>functions.{NAME}:{{{{ loop.index0 }}}}"
    f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_calls_section_end|>",
    "Kimi K2, the call's id": f"<|tool_call_begin|>{{{{ c.id }}}}<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|>",
    "gpt-oss": f"<|channel|>commentary to=functions.{NAME} <|constrain|>json<|message|>{ARGUMENTS}<|call|>",
    "Command R": f'Action:\n```json\n[\n    {{"tool_name": "{NAME}",\n     "parameters": {ARGUMENTS}}}\n]\n```',
    "Command A": f'<|START_ACTION|>[{{"tool_call_id": "0", "tool_name": "{NAME}", "parameters": {ARGUMENTS}}}]<|END_ACTION|>',
    "Granite 3": f"<|tool_call|>[{JSON}]",
    "Granite 20B": f"<function_call> {JSON}",
    "Phi-4 mini": f"<|tool_call|>[{JSON}]<|/tool_call|>",
    "InternLM": f"<|action_start|><|plugin|>\n{PARAMETERS}<|action_end|>",
    "Nemotron": f"<TOOLCALL>[{JSON}]</TOOLCALL>",
    "Hunyuan": f"<tool_calls><tool_call>{NAME}\n```json\n{ARGUMENTS}\n```</tool_call></tool_calls>",
    "Jamba": f"<tool_calls>[{JSON}]</tool_calls>",
    "Apertus": f'<|tools_prefix|>[{{"{NAME}": {ARGUMENTS}}}]<|tools_suffix|>',
    "LFM2": f"<|tool_call_start|>[{PYTHON}]<|tool_call_end|>",
    "OLMo 3": f"<function_calls>{PYTHON}</function_calls>",
    "Llama 3.1": f"<|python_tag|>{PARAMETERS}",
    "Llama 3.1, a built-in tool": "<|python_tag|>" + PYTHON.replace("(", ".call(", 1),
    "Llama 3.1, JSON alone": PARAMETERS + '{{ "; " if not loop.last }}',
}
"""How templates write one call."""
LISTED = {
    "Mistral, up to Nemo": ("[TOOL_CALLS] [", "]"),
    "xLAM": ("[", "]"),
    "xLAM, with a thought": ('{"thought": "so", "tool_calls": [', "]}"),
}
"""Formats in which one list has all calls of a turn: what stands before it, and after it."""
UNREADABLE = {
    "arguments as key=value": f"<tool_call>{NAME}:{EACH}{{{{ k }}}}={{{{ v }}}};{END}</tool_call>",
    "arguments in Python's form": JSON.replace(" | tojson", "").join(("<tool_call>", "</tool_call>")),
    "all values as texts": f'<tool_call>{{"name": "{NAME}", "arguments": {{{{ "{{" }}}}{EACH}"{KEY}": "{{{{ v }}}}"'
    f'{{{{ ", " if not loop.last }}}}{END}{{{{ "}}" }}}}}}</tool_call>',
    "a mark before the first call only": f"{{{{ '<tool_call>' if loop.first else 'also ' }}}}{JSON}</tool_call>",
    "a mark of one's own": f"<<ADDS {NAME} WITH {ARGUMENTS}>>",
    "a sentence": f"I call {NAME} with {ARGUMENTS}",
    "a name in another field": f'<tool_call>{{"tool": "{NAME}", "input": {ARGUMENTS}}}</tool_call>',
}


def template_with(calls: str) -> str:
    """ChatML with the calls in this form."""
    return CHATML.replace(TAGGED_CALL, calls)


def all_templates() -> dict[str, str]:
    each = "{% for c in m.tool_calls or [] %}", "{% endfor %}"
    call = JSON + '{{ ", " if not loop.last }}'
    found = {name: template_with(form) for name, form in WRITTEN.items()}
    for name, (begin, end) in LISTED.items():
        listed = f"{{% if m.tool_calls %}}{begin}{call.join(each)}{end}{{% endif %}}"
        found[name] = CHATML.replace(TAGGED_CALL.join(each), listed)
    return found


def test_the_calls_that_published_templates_write_are_read_back(subtests: pytest.Subtests) -> None:
    """A call, a call with values of all types, and two calls, each as the template writes it."""
    for name, form in all_templates().items():
        with subtests.test(form=name):
            tokenizer = chat_tokenizer(form)
            template = ChatTemplate(tokenizer)
            assert template.shows_tools
            require_readable_calls(tokenizer, template)


def test_a_template_whose_calls_cannot_be_read_back_is_refused(subtests: pytest.Subtests) -> None:
    for name, form in UNREADABLE.items():
        with subtests.test(form=name):
            tokenizer = chat_tokenizer(template_with(form))
            with pytest.raises(ConfigError, match=r"must be read back as .*Set tokenizer\.response_template"):
                require_readable_calls(tokenizer, ChatTemplate(tokenizer))


def test_a_parser_of_contents_leaves_the_calls_to_the_published_formats() -> None:
    tokenizer = chat_tokenizer()
    tokenizer.response_template = THINKS | {"fields": {"content": THINKS["fields"]["content"]}}
    require_readable_calls(tokenizer, ChatTemplate(tokenizer))


@pytest.mark.parametrize("character", ["{", "l", '"'])
def test_calls_that_the_vocabulary_cannot_write_are_not_checked(character: str) -> None:
    """The tokenizer reads its unknown token in place of the character."""
    whole = chat_tokenizer(template_with(f"<tool_call>\n{JSON}\n</tool_call>"))
    state = json.loads(whole.backend_tokenizer.to_str())
    del state["model"]["vocab"][character]
    small = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(state)), eos_token=whole.eos_token)
    small.chat_template = whole.chat_template
    require_readable_calls(small, ChatTemplate(small))


def test_the_agents_policy_checks_the_template_and_the_response_template() -> None:
    form = f"<<{NAME} {ARGUMENTS}>>"
    tokenizer = chat_tokenizer(template_with(form))
    with pytest.raises(ConfigError, match=r"no call was read \(no known format\)"):
        AgentPolicy(language_model(tokenizer=tokenizer), Tools)
    calls = {"open_pattern": r"<<(?P<name>\w+) ", "close": ">>", "repeats": True, "content": "json"}
    calls |= {"transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}}
    fields = {"tool_calls": calls, "content": THINKS["fields"]["content"]}
    tokenizer.response_template = THINKS | {"fields": fields}
    AgentPolicy(language_model(tokenizer=tokenizer), Tools)
    calls["open_pattern"] = r"<<call (?P<name>\w+) "
    with pytest.raises(ConfigError, match=r"no call was read \(the tokenizer has a response_template\)"):
        AgentPolicy(language_model(tokenizer=tokenizer), Tools)


ADDS = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
TURNS = {
    "[THINK]a [TOOL_CALLS]add{}[/THINK]" + ADDS: ONE,
    "<think>" + ADDS + "</think>" + ADDS: ONE,
    "<reasoning>" + ADDS + "</reasoning>two": None,
    ADDS + "</think>no": None,
    "<think>" + ADDS: None,
    "<|START_THINKING|>" + ADDS + "<|END_THINKING|>two": None,
    "<|channel|>analysis<|message|>to=functions.add<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>2": None,
    ADDS.replace('"a": 1', '"note": "</think> and <think>"'): [("add", {"note": "</think> and <think>"})],
    ADDS.replace('"a": 1', '"note": "</tool_call>"'): [("add", {"note": "</tool_call>"})],
    "<function=add><parameter=note>\n  two lines\n\n</parameter></function>": [("add", {"note": "  two lines\n"})],
    "<tool_call>add</tool_call>": [("add", {})],
    "<function=add>\n</function>": [("add", {})],
    '{"name": "Bob", "age": 3}': None,
    '{"answer": 3}': None,
    "[add(a=1), add(exact=True)]": [*ONE, ("add", {"exact": True})],
    "[print(1)]": None,
    "add(1, free=x)": [("add", {"a": 1, "free": "x"})],
    "print('add(a=1)')": None,
    '```json\n{"name": "add", "arguments": {"a": 1}}\n```': ONE,
    '[{"name": "add", "arguments": "{\\"a\\": 1}"}]</s>': ONE,
    '{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {}}': [*ONE, ("add", {})],
    "the sum is 1": None,
    "": None,
}
"""Turns with their calls."""
MALFORMED = [
    "<tool_call>add a=1</tool_call>", "<tool_call></tool_call>", '[TOOL_CALLS]add[ARGS]{"a": 1', "<|python_tag|>import os",
    "<function=add><parameter=a>1</parameter>", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</function>\n</tool_call>",
    '<tool_call>{"name": "add", "arguments": [1]}</tool_call>', '<tool_call>[1]</tool_call>', '{"name": "add"} done',
    "<|tool_call_start|>[add(a=f(1))]<|tool_call_end|>", "<|tool_call_start|>[add(1, 2, 3, 4, 5, 6, 7)]<|tool_call_end|>",
    ADDS + "<tool_call>{</tool_call>",
]  # fmt: skip


def test_turns_have_the_calls_that_were_meant_and_a_mark_without_a_call_is_malformed(subtests: pytest.Subtests) -> None:
    for text, calls in TURNS.items():
        with subtests.test(text=text):
            found = find_calls(text, [ADD], special_tokens=["</s>"])
            assert (None if found is None else list(found.calls)) == calls
    assert find_calls(ADDS, [ADD], in_thought=True) is None
    assert find_calls(ADDS + "</think>" + ADDS, [ADD], in_thought=True).begin == len(ADDS + "</think>")  # type: ignore[union-attr]
    for text in MALFORMED:
        with subtests.test(text=text), pytest.raises(ValueError, match=r"."):
            find_calls(text, [ADD])


VALUES = [
    ("a", "3", 3), ("a", "3.0", 3), ("a", "three", "three"), ("a", "1e400", "1e400"), ("a", "true", "true"),
    ("note", "3", "3"), ("note", "null", "null"),
    ("note", "True", "True"), ("exact", "True", True), ("exact", "false", False), ("of", '["x"]', ["x"]),
    ("of", "['x', 1]", ["x", 1]),
    ("unit", "null", None), ("unit", "None", None), ("unit", "kg", "kg"), ("free", "2", 2), ("free", "two", "two"),
    ("new", "2", "2"),
]  # fmt: skip


def test_values_without_quotes_have_the_type_of_the_schema(subtests: pytest.Subtests) -> None:
    for key, written, value in VALUES:
        with subtests.test(key=key, written=written):
            found: Any = find_calls(f"<function=add><parameter={key}>{written}</parameter></function>", [ADD])
            assert found.calls == (("add", {key: value}),)
            assert type(found.calls[0][1][key]) is type(value)


def read(tokenizer: Any, prompt: str, turn: str) -> tuple[Message, bool]:
    """The message of a turn after a prompt, and whether it has a malformed call."""
    ids = tokenizer(turn)["input_ids"]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return read_turn(tokenizer, tokenizer(prompt)["input_ids"], ids, text, [ADD], number=0)


def test_a_thought_that_the_prompt_opened_is_no_call(subtests: pytest.Subtests) -> None:
    opened = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    for prompt, turn, num_calls in (
        (opened, ADDS + "<|im_end|>", 0),
        (opened, f"should I <tool_call> it?</think>{ADDS}<|im_end|>", 1),
        (opened + "\n</think>\n\n", ADDS + "<|im_end|>", 1),
        ("<|im_start|>user\nUse <think> tags.<|im_end|>\n<|im_start|>assistant\n", ADDS, 1),
    ):
        with subtests.test(prompt=prompt, turn=turn):
            message, is_malformed = read(chat_tokenizer(), prompt, turn)
            assert (len(message.get("tool_calls", [])), is_malformed) == (num_calls, False)


def test_special_tokens_that_the_tokenizer_does_not_name_end_a_call_and_a_thought_too() -> None:
    """As `<|eom_id|>` of Llama 3.1, behind a call that is JSON alone."""
    for tokenizer in (chat_tokenizer(), marked_tokenizer()):
        turn = '{"name": "add", "parameters": {"a": 1}}<|im_end|>'
        message, is_malformed = read(tokenizer, "<think>is a tag.<|im_start|>assistant\n", turn)
        assert (len(message["tool_calls"]), message["content"], is_malformed) == (1, "", False)


def test_what_was_said_before_a_call_has_no_marks() -> None:
    tokenizer = chat_tokenizer(all_templates()["Kimi K2"] + "<|channel|><|message|><|start|><|end|><|call|>")
    spoken = {
        "Let me see. <|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{}"
        "<|tool_call_end|>": ("Let me see.", None),
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I add.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.add json<|message|>{"a": 1}<|call|>': ("I add.", "Hm."),
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>2": ("2", "Hm."),
    }  # fmt: skip
    for turn, (content, thought) in spoken.items():
        message, _ = read(tokenizer, "", turn)
        assert (message["content"], message.get("reasoning_content")) == (content, thought)
