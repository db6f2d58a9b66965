"""Tool calls in the published formats: what a template writes is read back, and what cannot be read back is refused."""

import json
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from adapters.agents import AgentPolicy, ChatTemplate, Message
from adapters.agents.call_check import require_readable_calls
from adapters.agents.call_formats import find_calls
from adapters.agents.calls import read_turn
from grpo.errors import ConfigError
from tests.support.agents import CHATML, THINKS, Tools, chat_tokenizer, language_model, marked_tokenizer

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
    "a mark of one's own": f"<<CALL {NAME} WITH {ARGUMENTS}>>",
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


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
TURNS = {
    "[THINK]a [TOOL_CALLS]add{}[/THINK]" + CALL: ONE,
    "<think>" + CALL + "</think>" + CALL: ONE,
    "<reasoning>" + CALL + "</reasoning>two": None,
    CALL + "</think>no": None,
    "<think>" + CALL: None,
    "<|START_THINKING|>" + CALL + "<|END_THINKING|>two": None,
    "<|channel|>analysis<|message|>to=functions.add<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>2": None,
    CALL.replace('"a": 1', '"note": "</think> and <think>"'): [("add", {"note": "</think> and <think>"})],
    CALL.replace('"a": 1', '"note": "</tool_call>"'): [("add", {"note": "</tool_call>"})],
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
    CALL + "<tool_call>{</tool_call>",
]  # fmt: skip


def test_turns_have_the_calls_that_were_meant_and_a_mark_without_a_call_is_malformed(subtests: pytest.Subtests) -> None:
    for text, calls in TURNS.items():
        with subtests.test(text=text):
            found = find_calls(text, [ADD], special_tokens=["</s>"])
            assert (None if found is None else list(found.calls)) == calls
    assert find_calls(CALL, [ADD], in_thought=True) is None
    assert find_calls(CALL + "</think>" + CALL, [ADD], in_thought=True).begin == len(CALL + "</think>")  # type: ignore[union-attr]
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
        (opened, CALL + "<|im_end|>", 0),
        (opened, f"should I <tool_call> it?</think>{CALL}<|im_end|>", 1),
        (opened + "\n</think>\n\n", CALL + "<|im_end|>", 1),
        ("<|im_start|>user\nUse <think> tags.<|im_end|>\n<|im_start|>assistant\n", CALL, 1),
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
