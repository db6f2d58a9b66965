"""Mistakes in the use of prompts, rewards and chat templates. Each is right all the same, refused, or said once.

At most two are silent, because nobody can know them. The page about language models names them.
"""

import json
import logging
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from tokenizers.processors import TemplateProcessing

from adapters.agents import AgentPolicy
from adapters.llm import (
    Between,
    Completion,
    CompletionRewards,
    CompletionTexts,
    ExactMatch,
    JSONSchemaMatch,
    MathMatch,
    OverlongPunishment,
    RegexMatch,
    SamplingConfig,
    correctness_first,
    tags_pattern,
)
from adapters.llm.prompts.encoder import PromptEncoder
from adapters.llm.sampling.decoding import StopStrings
from grpo.errors import GRPOError
from grpo.rewards import ask_for_rewards
from tests.support.agents import CHATML, Tools, chat_tokenizer, language_model

pandas = pytest.importorskip("pandas")

USER: Any = {"role": "user", "content": "sum it"}
TOOL: Any = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {}}}}}
ASK = "<|im_start|>user\nsum it<|im_end|>\n<|im_start|>assistant\n"
HEADLESS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
HEADLESS += "{{ '' if add_generation_prompt else '' }}"
CALL = "{{ c.function | tojson }}"
ITEMS = CHATML.replace(CALL, "{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}")
NEEDS_TEXT = CHATML.replace(CALL, "{{ c.function.name + c.function.arguments }}")
NO_TOOLS = CHATML.replace("{% if tools %}", "{% if false %}")
NO_CALLS = CHATML.replace(CALL, "").replace("m.role == 'tool'", "false")
NO_SYSTEM = CHATML.replace("{% for m in messages %}", "{% for m in messages if m.role != 'system' %}")
READS_PARTS = CHATML.replace("{{ m.content }}", "{% for p in m.content %}{{ p.text }};{% endfor %}")
ONLY_PARTS = "{% for m in messages %}{% for p in m.content %}{{ p.text }};{% endfor %}{% endfor %}"
WITH_MODE = CHATML.replace("assistant\n", "assistant\n{{ mode }}")
WITH_BOS = "{{ bos_token }}" + CHATML
THINKING = CHATML + "{# <|think|> <|/think|> #}"  # both marks are special tokens
OWN_CALLS = CHATML.replace(CALL, "{{ c.function.name }} with {{ c.function.arguments }}")


def called(arguments: Any, **more: Any) -> list[Any]:
    call = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return [USER, {"role": "assistant", "content": None, "tool_calls": [call], **more}, USER]


WIRE, DICTS = called('{"a": 1}'), called({"a": 1}, content="")


def prompt(template: str, state: Any, *, adds_bos: bool = False) -> tuple[list[int], str]:
    """The token ids of a prompt, and their text. It is encoded twice, because what is wrong is said once."""
    tokenizer = chat_tokenizer(template)
    if adds_bos:
        begin = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)])
        tokenizer.backend_tokenizer.post_processor = begin
    encoder = PromptEncoder(tokenizer, len(tokenizer), "prompt", {}, ((tokenizer.eos_token_id,), ()))
    [[*token_ids], _] = encoder([state, state])
    return token_ids, tokenizer.decode(token_ids)


def scored(functions: Any, text: str, **columns: Any) -> list[float]:
    completion = Completion(token_ids=(1, 2), text=text, finish_reason="end")
    reward = functions if isinstance(functions, CompletionRewards) else CompletionRewards(functions)
    return [float(value) for value in ask_for_rewards(reward, [{"prompt": "?", **columns}], [completion]).values]


def exact(text: str, answer: Any) -> list[float]:
    return scored({"exact": ExactMatch()}, text, answer=answer)


def math(text: str, answer: Any) -> list[float]:
    return scored({"math": MathMatch()}, text, answer=answer)


def gsm8k(text: str, answer: Any) -> list[float]:
    return scored(correctness_first(), text, answer=answer)


def with_tags(completion: str) -> float:
    return float("<b>" in completion)


def text_of(template: str, written: str) -> list[str]:
    tokenizer = chat_tokenizer(template)
    texts = CompletionTexts(tokenizer, [tokenizer.eos_token_id], keeps_special_tokens=False)
    row = tokenizer(written)["input_ids"]
    return texts([row, row])


def opened(ending: str) -> list[str]:
    tokenizer = chat_tokenizer()
    texts = CompletionTexts(tokenizer, [tokenizer.eos_token_id], keeps_special_tokens=False)
    return texts.opened_by([tokenizer(ASK + ending)["input_ids"]])


def formatted(text: str, begun: str) -> list[float]:
    reward = CompletionRewards({"f": RegexMatch(pattern=tags_pattern("think", "answer"), how="full")})
    completion = Completion(token_ids=(1,), text=text, finish_reason="end", opened=begun)
    return reward.compute_rewards(["?"], [completion]).tolist()


def stops(string: str, written: str) -> list[bool]:
    tokenizer = chat_tokenizer()
    return StopStrings(tokenizer, [string]).found(torch.tensor([tokenizer(written)["input_ids"]]))


def agent(template: str | None) -> Any:
    policy = AgentPolicy(language_model(tokenizer=chat_tokenizer(template)), Tools)
    return policy.generate_actions(["you"], 1)


Kind = Literal["right", "refused", "said", "silent"]
MISTAKES: list[tuple[Kind, str, Callable[[], Any], Any]] = [
    # Prompts: what is right is compared with the prompt that was meant, or has this text
    ("right", "arguments as JSON text", lambda: prompt(CHATML, WIRE), lambda: prompt(CHATML, DICTS)),
    ("right", "arguments as JSON text, where the template needs a dict", lambda: prompt(ITEMS, WIRE),
        lambda: prompt(ITEMS, DICTS)),
    ("right", "arguments as a dict, where the template needs text", lambda: prompt(NEEDS_TEXT, DICTS),
        lambda: prompt(NEEDS_TEXT, WIRE)),
    ("right", "all calls as JSON text",
        lambda: prompt(CHATML, called({}, tool_calls=json.dumps(DICTS[1]["tool_calls"]))), lambda: prompt(CHATML, DICTS)),
    ("right", "keys that Arrow filled", lambda: prompt(CHATML, [{**USER, "tool_calls": None, "name": None}]),
        lambda: prompt(CHATML, [USER])),
    ("right", "no content beside a call", lambda: prompt(CHATML, called({"a": 1})), lambda: prompt(CHATML, DICTS)),
    ("right", "a null that was meant", lambda: prompt(CHATML, called('{"a": null}')), '"arguments": {"a": null}'),
    ("right", "a rendered chat", lambda: prompt(CHATML, ASK), lambda: prompt(CHATML, [USER])),
    ("right", "a rendered chat with BOS", lambda: prompt(WITH_BOS, "<s>" + ASK), lambda: prompt(WITH_BOS, [USER])),
    ("right", "tools of a row", lambda: prompt(CHATML, {"prompt": [USER], "tools": [TOOL]}), "Tools: ["),
    ("right", "tools of a row as JSON text", lambda: prompt(CHATML, {"prompt": [USER], "tools": json.dumps([TOOL])}),
        lambda: prompt(CHATML, {"prompt": [USER], "tools": [TOOL]})),
    ("right", "options of a row", lambda: prompt(WITH_MODE, {"prompt": [USER], "chat_template_kwargs": {"mode": "short"}}),
        "assistant\nshort"),
    ("right", "options of a row as JSON text",
        lambda: prompt(WITH_MODE, {"prompt": [USER], "chat_template_kwargs": '{"mode": "short"}'}), "assistant\nshort"),
    ("right", "options that Arrow filled",
        lambda: prompt(WITH_MODE, {"prompt": [USER], "chat_template_kwargs": {"mode": None}}),
        lambda: prompt(WITH_MODE, [USER])),
    ("right", "padding on the left", lambda: prompt(CHATML, [0, 0, 5, 6]), lambda: prompt(CHATML, [5, 6])),
    ("right", "padding on the right", lambda: prompt(CHATML, [5, 6, 0]), lambda: prompt(CHATML, [5, 6])),
    ("right", "an attention mask", lambda: prompt(CHATML, {"prompt": [7, 5, 6], "attention_mask": [0, 1, 1]}),
        lambda: prompt(CHATML, [5, 6])),
    ("right", "parts, where the template needs text",
        lambda: prompt(CHATML, [{**USER, "content": [{"type": "text", "text": "sum it"}]}]), lambda: prompt(CHATML, [USER])),
    ("right", "two parts, where the template needs text",
        lambda: prompt(CHATML, [{**USER, "content": [{"type": "text", "text": "sum"}, {"type": "text", "text": "it"}]}]),
        "user\nsum\nit<|im_end|>"),
    ("right", "parts, where the template reads them",
        lambda: prompt(READS_PARTS, [{**USER, "content": [{"type": "text", "text": "sum"}, {"type": "text", "text": "it"}]}]),
        "user\nsum;it;<|im_end|>"),
    ("right", "parts, where the template speaks of types",
        lambda: prompt("Answer in any type.\n" + READS_PARTS, [{**USER, "content": [{"type": "text", "text": "sum it"}]}]),
        "user\nsum it;<|im_end|>"),
    ("right", "parts, where the template writes nothing before them",
        lambda: prompt(ONLY_PARTS, [{**USER, "content": [{"type": "text", "text": "sum it"}]}]), "sum it;"),
    ("refused", "arguments that are no JSON", lambda: prompt(CHATML, called("a=1")), "must be JSON where they are a text"),
    ("refused", "arguments that are a list", lambda: prompt(CHATML, called("[1]")), "must be a dict, or its JSON text"),
    ("refused", "calls in OpenAI's older form", lambda: prompt(CHATML, [USER,
        {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": "{}"}}, USER]),
        "must be in tool_calls"),
    ("refused", "a result in OpenAI's older form", lambda: prompt(CHATML, [USER, {"role": "function", "content": "3"}]),
        "role 'tool'"),
    ("refused", "a call without a name", lambda: prompt(CHATML, called({}, tool_calls=[{"id": "x"}])), "A call must be"),
    ("refused", "calls that are no list", lambda: prompt(CHATML, called({}, tool_calls={"name": "add"})),
        "must be a list of calls"),
    ("refused", "a result that is a dict", lambda: prompt(CHATML, [USER, {"role": "tool", "content": {"a": 1}}]), "json.dumps"),
    ("refused", "a mask of another length", lambda: prompt(CHATML, {"prompt": [5, 6], "attention_mask": [1]}),
        "one value per token"),
    ("refused", "a mask that pandas filled", lambda: prompt(CHATML, {"prompt": [5, 6], "attention_mask": float("nan")}),
        "one value per token .*nan"),
    ("refused", "a message without content", lambda: prompt(CHATML, [{"role": "user", "text": "sum it"}]),
        "must have a content; .*'text'"),
    ("refused", "a content that Arrow filled", lambda: prompt(CHATML, [{"role": "system", "content": None}, USER]),
        "must have a content"),
    ("refused", "a picture", lambda: prompt(CHATML, [{**USER, "content": [{"type": "image", "url": "x"}]}]),
        "must hold text only"),
    ("refused", "labels as token ids", lambda: prompt(CHATML, [5, -100]), "at least 0; got -100"),
    ("refused", "token ids of another tokenizer", lambda: prompt(CHATML, [5, 100_000]), "token ids below .* got 100000"),
    ("refused", "only padding", lambda: prompt(CHATML, [0, 0]), "at least one token"),
    ("refused", "tools that are names", lambda: prompt(CHATML, {"prompt": [USER], "tools": ["add"]}), "must be JSON"),
    ("refused", "options that are a list", lambda: prompt(CHATML, {"prompt": [USER], "chat_template_kwargs": [1]}),
        "must have options by name"),
    ("refused", "an answer at the end", lambda: prompt(CHATML, [USER, {"role": "assistant", "content": "2"}]),
        "must end with the message"),
    ("refused", "ShareGPT's keys", lambda: prompt(CHATML, [{"from": "human", "value": "hi"}]),
        "must be text, a list of chat messages"),
    ("refused", "a row without the prompt column", lambda: prompt(CHATML, {"question": "1+1"}), "needs the prompt column"),
    ("said", "arguments that Arrow filled", lambda: prompt(CHATML, called({"a": 1, "b": None})),
        r"None were left out .*add\(b=None\)"),
    ("said", "arguments in arguments that Arrow filled", lambda: prompt(CHATML, called({"of": [{"a": 1, "b": None}]})),
        r"None were left out .*add\(of\.0\.b=None\)"),
    ("said", "a BOS token inside a text", lambda: prompt(CHATML, " <s>sum", adds_bos=True), "inside, and the tokenizer writes"),
    ("said", "tools beside a text", lambda: prompt(CHATML, {"prompt": "sum it", "tools": [TOOL]}),
        "column tools .* has no effect"),
    ("said", "an unknown character", lambda: prompt(CHATML, "sum \u2211"), "no token for '\u2211'"),
    ("said", "an unknown character in a chat", lambda: prompt(CHATML, [{"role": "user", "content": "sum \u00df"}]),
        "no token for '\u00df'"),
    ("said", "a chat as JSON text", lambda: prompt(CHATML, json.dumps([USER])), "looks like a chat in JSON"),
    ("said", "two BOS tokens", lambda: prompt(CHATML, [1, 1, 5]), r"two begin-of-sequence \(BOS\) tokens"),
    ("said", "padding inside", lambda: prompt(CHATML, [5, 0, 6]), "have padding tokens"),
    ("said", "a prompt that has ended", lambda: prompt(CHATML, "sum<|im_end|>"), "ends in the end-of-sequence token"),
    ("silent", "a prompt that was cut before it came here", lambda: prompt(CHATML, "sum i")[1], "sum i"),

    # Rewards and answers: what is right has these rewards
    ("right", "an integer column for a text", lambda: exact("7", 7), [1.0]),
    ("right", "a float column, as pandas makes of integers with gaps", lambda: exact("7", 7.0), [1.0]),
    ("right", "a very small float", lambda: math("0.00002", 2e-5), [1.0]),
    ("right", "a numpy number", lambda: exact("7", np.int32(7)), [1.0]),
    ("right", "a tensor", lambda: math("7", torch.tensor(7)), [1.0]),
    ("right", "a series of accepted answers", lambda: exact("b", pandas.Series(["a", "b"])), [1.0]),
    ("right", "a list of accepted answers", lambda: gsm8k("#### 8", [7, 8]), [1.2]),
    ("right", "a bare number as the solution of GSM8K", lambda: gsm8k("#### 8", "8"), [1.2]),
    ("right", "a fraction in a box for its denominator", lambda: gsm8k(r"\boxed{\frac{1}{8}}", "8"), [0.1]),
    ("right", "a completion that hedges", lambda: gsm8k(r"\boxed{8 \text{ or } 9}", "8"), [0.0]),
    ("right", "a completion that hedges in mathematics", lambda: math(r"\boxed{8, 9}", "8"), [0.0]),
    ("right", "a completion that was cut in its box", lambda: math(r"\boxed{8} and \boxed{8", "8"), [0.0]),
    ("right", "a solution with its reasoning", lambda: math("8", r"As $2^3 = 8$, it is \boxed{8}."), [1.0]),
    ("right", "a column named state", lambda: scored(lambda completion, state: completion == state, "Ohio", state="Ohio"),
        [1.0]),
    ("right", "a verifier beside a column named state", lambda: scored({"e": ExactMatch()}, "7", state="Ohio", answer=7),
        [1.0]),
    ("right", "spaces and line ends around the answer", lambda: exact(" 7\n", "7"), [1.0]),
    ("right", "numbers of numpy as the reward", lambda: scored(lambda completions: np.ones(1), "x"), [1.0]),
    ("right", "True as the reward", lambda: scored(lambda completion: True, "x"), [1.0]),
    ("refused", "a dict as the column", lambda: exact("7", {"text": ["7"]}), "column 'answer' must hold a text"),
    ("refused", "a list in a list as the column", lambda: math("7", [["7"]]), "column 'answer' must hold a text"),
    ("refused", "True as the column", lambda: exact("True", True), "column 'answer' must hold a text"),
    ("refused", "infinity as the column", lambda: exact("inf", float("inf")), "a finite number"),
    ("refused", "bytes as the column", lambda: math("7", b"7"), "column 'answer' must hold a text"),
    ("refused", "a column that is not there", lambda: scored({"e": ExactMatch(column="gold")}, "7", answer=7),
        "needs the column 'gold'"),
    ("refused", "prompts without rows", lambda: CompletionRewards({"e": ExactMatch()}).compute_rewards(
        ["?"], [Completion(token_ids=(1,), text="7", finish_reason="end")]), "needs rows"),
    ("refused", "a solution of GSM8K without a number", lambda: gsm8k("#### 8", "many"), "number"),
    ("refused", "parameters of both kinds", lambda: CompletionRewards(lambda prompts, completion: 0.0),
        "must name its arguments"),
    ("refused", "parameters without names", lambda: CompletionRewards(lambda a, b: 0.0), "must name its arguments"),
    ("refused", "one reward too few", lambda: scored(lambda completions: [], "x"), "one number or None per row"),
    ("refused", "one number for all rows", lambda: scored(lambda completions: 1.0, "x"), "one number or None per row"),
    ("refused", "a text as the reward", lambda: scored(lambda completion: "1.0", "x"), "must return a number"),
    ("refused", "a weight without a function", lambda: CompletionRewards({"b": with_tags}, weights={"a": 1.0}), "weights"),
    ("refused", "two functions of one name", lambda: CompletionRewards([with_tags, with_tags]), "with_tags"),
    ("refused", "texts instead of completions",
        lambda: CompletionRewards(with_tags).compute_rewards(["?"], ["x"]), "must be Completions"),  # type: ignore[list-item]
    ("refused", "a name instead of a function", lambda: CompletionRewards({"a": "accuracy_reward"}), "got str|; str lacks"),
    ("refused", "a pattern that does not compile", lambda: RegexMatch(pattern="("), "must be a regular expression"),
    ("refused", "a group that the pattern lacks", lambda: RegexMatch(pattern="a", column="answer"), "must be a group"),
    ("refused", "tags with brackets", lambda: tags_pattern("<think>"), "needs different tags"),
    ("refused", "a punishment that is longer than the limit", lambda: OverlongPunishment(max_tokens=8, cache_tokens=9),
        "at most max_tokens"),
    ("refused", "a schema that is none", lambda: JSONSchemaMatch({"type": "text"}), "schema"),
    ("refused", "a mark instead of a function to extract",
        lambda: ExactMatch(extract="<answer>"), "extract"),  # type: ignore[arg-type]
    ("refused", "a time limit of 0", lambda: MathMatch(timeout=0), "timeout must be >= 1"),
    ("refused", "Between without its end", lambda: Between(start="<a>", end=None), "end"),  # type: ignore[arg-type]

    # Chat templates, their marks, and tools
    ("right", "a format whose tag the template has opened", lambda: formatted("a</think><answer>7</answer>", "<think>\n"),
        [1.0]),
    ("right", "a special token as a stop string", lambda: stops("<|im_start|>", "ab<|im_start|>"), [True]),
    ("right", "a stop string with a special token in it", lambda: stops("b<|im_start|>", "ab<|im_start|>"), [True]),
    ("refused", "a template that fails", lambda: prompt("{{ messages[0].content + 1 }}", [USER]),
        "must fit the tokenizer's chat template"),
    ("refused", "an agent without a template", lambda: agent(None), "must have a chat template"),
    ("refused", "a template whose calls nobody reads", lambda: agent(OWN_CALLS), "Set tokenizer.response_template"),
    ("refused", "tools, where the template does not write them", lambda: agent(NO_CALLS), "must write tool calls"),
    ("refused", "an empty stop string", lambda: SamplingConfig(stop=("",)), "no empty string"),
    ("refused", "a text as the stop strings", lambda: SamplingConfig(stop="###"), "tuple"),  # type: ignore[arg-type]
    ("said", "no generation prompt", lambda: prompt(HEADLESS, [USER]), "ignores add_generation_prompt"),
    ("said", "an end of turn that ends nothing", lambda: prompt(CHATML.replace("<|im_end|>", "<|eot|>"), [USER]),
        "ends an answer with '<.eot.>'"),
    ("said", "an option without a generation prompt",
        lambda: prompt(CHATML, {"prompt": [USER], "chat_template_kwargs": {"add_generation_prompt": False}}),
        "add_generation_prompt=False"),
    ("said", "dropped calls", lambda: prompt(NO_CALLS, DICTS), "does not write the calls"),
    ("said", "a dropped message", lambda: prompt(NO_SYSTEM, [{"role": "system", "content": "briefly"}, USER]),
        "drops the message of the role 'system'"),
    ("said", "dropped tools", lambda: prompt(NO_TOOLS, {"prompt": [USER], "tools": [TOOL]}), "does not write the tools"),
    ("said", "a misspelt option",
        lambda: prompt(CHATML, {"prompt": [USER], "chat_template_kwargs": {"enable_thinkin": False}}), "reads no option"),
    ("said", "documents, where the template reads none",
        lambda: prompt(CHATML, {"prompt": [USER], "chat_template_kwargs": {"documents": [{"text": "it"}]}}), "reads no option"),
    ("said", "tags that are special tokens", lambda: text_of(THINKING, "<|think|>a<|/think|>7"), "keep_special_tokens=True"),
    ("said", "a tag that the template has opened", lambda: opened("<think>\n"), "completions begin inside this tag"),
    ("silent", "a template of another model that has the same marks",
        lambda: prompt(CHATML.replace("\n", " "), [USER])[1], ASK.replace("\n", " ")),
]  # fmt: skip


def agrees(found: Any, expected: Any) -> bool:
    expected = expected() if callable(expected) else expected
    if isinstance(expected, str):
        return expected in (found[1] if isinstance(found, tuple) else found)
    return bool(found == (pytest.approx(expected) if isinstance(expected, list) else expected))


def test_each_mistake_is_right_refused_or_said_once(subtests: pytest.Subtests) -> None:
    for kind, mistake, attempt, expected in MISTAKES:
        with subtests.test(mistake=mistake), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            if kind == "refused":
                with pytest.raises(GRPOError, match=expected):
                    attempt()
                continue
            found = attempt()
            assert [str(warning.message) for warning in said][1 if kind == "said" else 0 :] == []
            if kind == "said":
                assert re.search(expected, str(said[0].message))
            else:
                assert agrees(found, expected), found


def test_the_table_has_sixty_mistakes_and_the_page_names_the_silent_ones() -> None:
    names = [mistake for _, mistake, *_ in MISTAKES]
    assert len(set(names)) == len(names) >= 60
    silent = sorted(mistake for kind, mistake, *_ in MISTAKES if kind == "silent")
    assert len(silent) <= 2
    page = " ".join((Path(__file__).parents[4] / "docs" / "llm.md").read_text(encoding="utf-8").split())
    [sentence] = re.findall(r"mistakes cannot be known: (.*?)\.", page)
    assert sorted(re.split(r", and ", sentence)) == silent


def test_a_kernel_that_nothing_uses_is_not_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    """Only on some processors, bitsandbytes says so itself. Its other warnings are kept."""
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    logger.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s", "no module")
    logger.warning("something else")
    assert [record.message for record in caplog.records] == ["something else"]
