"""Mistakes in the use of prompts, rewards and chat templates. Each is right all the same, refused, or said once.

At most two are silent, because nobody can know them. The page about language models names them. Then the page about coming from
TRL.
"""

import ast
import dataclasses
import functools
import importlib.util
import inspect
import json
import logging
import re
import sys
import warnings
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from tokenizers.processors import TemplateProcessing

from adapters.agents import AgentPolicy
from adapters.llm import (
    Between,
    Completion,
    CompletionRewards,
    CompletionTexts,
    JSONSchemaMatch,
    MathMatch,
    Picture,
    VLLMSampler,
    add_lora,
    correctness_first,
    load_model,
)
from adapters.llm.prompts.encoder import PromptEncoder
from grpo.errors import GRPOError
from grpo.rewards import ask_for_rewards
from tests.support.agents import CHATML, Tools, chat_tokenizer, language_model
from tests.support.llm_models import tiny_model

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
THINKING = CHATML + "{# <|think|> <|/think|> #}"  # both marks are special tokens
OWN_CALLS = CHATML.replace(CALL, "{{ c.function.name }} with {{ c.function.arguments }}")


def called(arguments: Any, **more: Any) -> list[Any]:
    call = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return [USER, {"role": "assistant", "content": None, "tool_calls": [call], **more}, USER]


def with_options(options: Any) -> dict[str, Any]:
    return {"prompt": [USER], "chat_template_kwargs": options}


ONE_PART = [{**USER, "content": [{"type": "text", "text": "sum it"}]}]
TWO_PARTS = [{**USER, "content": [{"type": "text", "text": text} for text in ("sum", "it")]}]
WIRE, DICTS = called('{"a": 1}'), called({"a": 1}, content="")


def prompt(template: str | None, state: Any, *, adds_bos: bool = False) -> tuple[list[int], str]:
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


def math(text: str, answer: Any) -> list[float]:
    return scored({"math": MathMatch()}, text, answer=answer)


def gsm8k(text: str, answer: Any) -> list[float]:
    return scored(correctness_first(), text, answer=answer)


def text_of(template: str, written: str) -> list[str]:
    tokenizer = chat_tokenizer(template)
    texts = CompletionTexts(tokenizer, [tokenizer.eos_token_id], keeps_special_tokens=False)
    row = tokenizer(written)["input_ids"]
    return texts([row, row])


def opened(ending: str) -> list[str]:
    tokenizer = chat_tokenizer()
    texts = CompletionTexts(tokenizer, [tokenizer.eos_token_id], keeps_special_tokens=False)
    return texts.opened_by([tokenizer(ASK + ending)["input_ids"]])


def agent(template: str | None) -> Any:
    policy = AgentPolicy(language_model(tokenizer=chat_tokenizer(template)), Tools)
    return policy.generate_actions(["you"], 1)


Kind = Literal["right", "refused", "said", "silent"]
MISTAKES: list[tuple[Kind, str, Any, Any]] = [
    # Prompts from a template and a state: what is right is compared with the prompt that was meant, or has this text
    ("right", "arguments as JSON text", (CHATML, WIRE), (CHATML, DICTS)),
    ("right", "arguments as JSON text, where the template needs a dict", (ITEMS, WIRE), (ITEMS, DICTS)),
    ("right", "arguments as a dict, where the template needs text", (NEEDS_TEXT, DICTS), (NEEDS_TEXT, WIRE)),
    ("right", "all calls as JSON text", (CHATML, called({}, tool_calls=json.dumps(DICTS[1]["tool_calls"]))), (CHATML, DICTS)),
    ("right", "keys that Arrow filled", (CHATML, [{**USER, "tool_calls": None, "name": None}]), (CHATML, [USER])),
    ("right", "no content beside a call", (CHATML, called({"a": 1})), (CHATML, DICTS)),
    ("right", "a null that was meant", (CHATML, called('{"a": null}')), '"arguments": {"a": null}'),
    ("right", "a rendered chat", (CHATML, ASK), (CHATML, [USER])),
    ("right", "tools of a row", (CHATML, {"prompt": [USER], "tools": [TOOL]}), "Tools: ["),
    ("right", "tools of a row as JSON text", (CHATML, {"prompt": [USER], "tools": json.dumps([TOOL])}),
        (CHATML, {"prompt": [USER], "tools": [TOOL]})),
    ("right", "options of a row", (WITH_MODE, with_options({"mode": "short"})), "assistant\nshort"),
    ("right", "options of a row as JSON text", (WITH_MODE, with_options('{"mode": "short"}')), "assistant\nshort"),
    ("right", "options that Arrow filled", (WITH_MODE, with_options({"mode": None})), (WITH_MODE, [USER])),
    ("right", "padding on the left", (CHATML, [0, 0, 5, 6]), (CHATML, [5, 6])),
    ("right", "padding on the right", (CHATML, [5, 6, 0]), (CHATML, [5, 6])),
    ("right", "an attention mask", (CHATML, {"prompt": [7, 5, 6], "attention_mask": [0, 1, 1]}), (CHATML, [5, 6])),
    ("right", "parts, where the template needs text", (CHATML, ONE_PART), (CHATML, [USER])),
    ("right", "two parts, where the template needs text", (CHATML, TWO_PARTS), "user\nsum\nit<|im_end|>"),
    ("right", "parts, where the template reads them", (READS_PARTS, TWO_PARTS), "user\nsum;it;<|im_end|>"),
    ("right", "parts, where the template speaks of types", ("Answer in any type.\n" + READS_PARTS, ONE_PART),
        "user\nsum it;<|im_end|>"),
    ("right", "parts, where the template writes nothing before them", (ONLY_PARTS, ONE_PART), "sum it;"),
    ("refused", "arguments that are no JSON", (CHATML, called("a=1")), "must be JSON where they are a text"),
    ("refused", "arguments that are a list", (CHATML, called("[1]")), "must be a dict, or its JSON text"),
    ("refused", "calls in OpenAI's older form",
        (CHATML, [USER, {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": "{}"}}, USER]),
        "must be in tool_calls"),
    ("refused", "a result in OpenAI's older form", (CHATML, [USER, {"role": "function", "content": "3"}]), "role 'tool'"),
    ("refused", "a call without a name", (CHATML, called({}, tool_calls=[{"id": "x"}])), "A call must be"),
    ("refused", "calls that are no list", (CHATML, called({}, tool_calls={"name": "add"})), "must be a list of calls"),
    ("refused", "a result that is a dict", (CHATML, [USER, {"role": "tool", "content": {"a": 1}}]), "json.dumps"),
    ("refused", "a mask of another length", (CHATML, {"prompt": [5, 6], "attention_mask": [1]}), "one value per token"),
    ("refused", "a mask that pandas filled", (CHATML, {"prompt": [5, 6], "attention_mask": float("nan")}),
        "one value per token .*nan"),
    ("refused", "a message without content", (CHATML, [{"role": "user", "text": "sum it"}]), "must have a content; .*'text'"),
    ("refused", "a content that Arrow filled", (CHATML, [{"role": "system", "content": None}, USER]), "must have a content"),
    ("refused", "a picture", (CHATML, [{**USER, "content": [{"type": "image", "url": "x"}]}]), "must hold text only"),
    ("refused", "labels as token ids", (CHATML, [5, -100]), "at least 0; got -100"),
    ("refused", "token ids of another tokenizer", (CHATML, [5, 100_000]), "token ids below .* got 100000"),
    ("refused", "only padding", (CHATML, [0, 0]), "at least one token"),
    ("refused", "an empty text", (CHATML, ""), r"prompt of state 0 has none\. Remove"),
    ("refused", "tools that are names", (CHATML, {"prompt": [USER], "tools": ["add"]}), "must be JSON"),
    ("refused", "options that are a list", (CHATML, with_options([1])), "must have options by name"),
    ("refused", "a row without the prompt column", (CHATML, {"question": "1+1"}), "needs the prompt column"),
    ("said", "arguments that Arrow filled", (CHATML, called({"a": 1, "b": None})), r"None were left out .*add\(b=None\)"),
    ("said", "arguments in arguments that Arrow filled", (CHATML, called({"of": [{"a": 1, "b": None}]})),
        r"None were left out .*add\(of\.0\.b=None\)"),
    ("said", "a BOS token inside a text", lambda: prompt(CHATML, " <s>sum", adds_bos=True), "inside, and the tokenizer writes"),
    ("said", "tools beside a text", (CHATML, {"prompt": "sum it", "tools": [TOOL]}), "column tools .* has no effect"),
    ("said", "an unknown character", (CHATML, "sum \u2211"), "no token for '\u2211'"),
    ("said", "an unknown character in a chat", (CHATML, [{"role": "user", "content": "sum \u00df"}]), "no token for '\u00df'"),
    ("said", "half a character", (CHATML, "sum \ud83d"), r"state 0 has half a character, '\\ud83d'"),
    ("said", "half a character in a chat", (CHATML, [{"role": "user", "content": "sum \ude00 it"}]),
        r"state 0 has half a character, '\\ude00'"),
    ("refused", "half a character in an answer", lambda: language_model().demonstrations(["sum"], ["\ud83d"]),
        "no tokenizer reads half a character"),
    ("said", "a chat as JSON text", (CHATML, json.dumps([USER])), "looks like a chat in JSON"),
    ("said", "two BOS tokens", (CHATML, [1, 1, 5]), r"two begin-of-sequence \(BOS\) tokens"),
    ("said", "padding inside", (CHATML, [5, 0, 6]), "have padding tokens"),
    ("silent", "a prompt that was cut before it came here", lambda: prompt(CHATML, "sum i")[1], "sum i"),

    # Rewards and answers: what is right has these rewards
    ("right", "a very small float", lambda: math("0.00002", 2e-5), [1.0]),
    ("right", "a list of accepted answers", lambda: gsm8k("#### 8", [7, 8]), [1.2]),
    ("right", "a bare number as the solution of GSM8K", lambda: gsm8k("#### 8", "8"), [1.2]),
    ("right", "a completion that hedges in mathematics", lambda: math(r"\boxed{8, 9}", "8"), [0.0]),
    ("refused", "a text as the reward", lambda: scored(lambda completion: "1.0", "x"), "must return a number"),
    ("refused", "Between without its end", lambda: Between(start="<a>", end=None), "end"),  # type: ignore[arg-type]

    # Chat templates, their marks, and tools
    ("refused", "a template that refuses", ("{{ raise_exception('roles must alternate') }}", [USER]),
        "must fit the tokenizer's chat template; for the chat of state 0, the template says: roles must alternate"),
    ("refused", "a template that fails", ("{{ messages[0].content + 1 }}", [USER]), "must fit the tokenizer's chat template"),
    ("refused", "a chat without a template", (None, [USER]), r"state 0 is a chat, and the tokenizer has none\. Set"),
    ("refused", "an agent without a template", lambda: agent(None), "must have a chat template"),
    ("refused", "a template whose calls nobody reads", lambda: agent(OWN_CALLS), "Set tokenizer.response_template"),
    ("refused", "tools, where the template does not write them", lambda: agent(NO_CALLS), "must write tool calls"),
    ("said", "no generation prompt", (HEADLESS, [USER]), "ignores add_generation_prompt"),
    ("said", "an end of turn that ends nothing", (CHATML.replace("<|im_end|>", "<|eot|>"), [USER]),
        "ends an answer with '<.eot.>'"),
    ("said", "an option without a generation prompt", (CHATML, with_options({"add_generation_prompt": False})),
        "add_generation_prompt=False"),
    ("said", "dropped calls", (NO_CALLS, DICTS), "does not write the calls"),
    ("said", "a dropped message", (NO_SYSTEM, [{"role": "system", "content": "briefly"}, USER]),
        "drops the message of the role 'system'"),
    ("said", "dropped tools", (NO_TOOLS, {"prompt": [USER], "tools": [TOOL]}), "does not write the tools"),
    ("said", "a misspelt option", (CHATML, with_options({"enable_thinkin": False})), "reads no option"),
    ("said", "documents, where the template reads none", (CHATML, with_options({"documents": [{"text": "it"}]})),
        "reads no option"),
    ("said", "tags that are special tokens", lambda: text_of(THINKING, "<|think|>a<|/think|>7"), "keep_special_tokens=True"),
    ("said", "a tag that the template has opened", lambda: opened("<think>\n"), "completions begin inside this tag"),
    ("silent", "a template of another model that has the same marks", lambda: prompt(CHATML.replace("\n", " "), [USER])[1],
        ASK.replace("\n", " ")),
]  # fmt: skip


def agrees(found: Any, expected: Any) -> bool:
    if isinstance(expected, tuple):
        return bool(found == prompt(*expected))
    if isinstance(expected, str):
        return expected in (found[1] if isinstance(found, tuple) else found)
    return bool(found == (pytest.approx(expected) if isinstance(expected, list) else expected))


def test_each_mistake_is_right_refused_or_said_once(subtests: pytest.Subtests) -> None:
    for kind, mistake, attempt, expected in MISTAKES:
        with subtests.test(mistake=mistake), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            make = attempt if callable(attempt) else functools.partial(prompt, *attempt)
            if kind == "refused":
                with pytest.raises(GRPOError, match=expected):
                    make()
                continue
            found = make()
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


EXTRAS: list[tuple[str, Any, str]] = [
    ("peft", lambda: add_lora(tiny_model()), r'LoRA needs PEFT: pip install "\.\[llm\]" in the checkout'),
    (
        "bitsandbytes",
        lambda: load_model("any", lora=True, load_in_4bit=True),
        r'pip install "\.\[llm-4bit\]" in the checkout',
    ),
    ("math_verify", MathMatch, r'^MathMatch needs math-verify: pip install "\.\[math\]" in the checkout$'),
    ("jsonschema", lambda: JSONSchemaMatch({}), r'JSONSchemaMatch needs .*: pip install "\.\[llm\]" in the checkout'),
    ("PIL", lambda: Picture.of(np.zeros((4, 4, 3), np.uint8)), r"Pictures need Pillow: pip install .*\[vision\]"),
    ("vllm", lambda: VLLMSampler("any"), r'pip install "\.\[vllm\]" in the checkout, in an environment of its own'),
]


@pytest.mark.parametrize(("package", "use", "message"), EXTRAS, ids=[package for package, *_ in EXTRAS])
def test_without_a_package_the_error_names_the_extra(
    package: str, use: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=message):
        use()


def test_a_kernel_that_nothing_uses_is_not_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    """Only on some processors, bitsandbytes says so itself. Its other warnings are kept."""
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    logger.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s", "no module")
    logger.warning("something else")
    assert [record.message for record in caplog.records] == ["something else"]
    spec = importlib.util.find_spec("bitsandbytes")
    if spec is not None and spec.origin is not None:
        source = Path(spec.origin).with_name("backends") / "cpu" / "ops.py"
        assert re.search(r'logger\.warning\(\s*"[^"]*kernels-community', source.read_text(encoding="utf-8"))
        assert "logger = logging.getLogger(__name__)" in source.read_text(encoding="utf-8")


# --- the names of TRL in the page about coming from another library exist in the installed TRL


COMING = (Path(__file__).parents[4] / "docs" / "coming_from.md").read_text(encoding="utf-8")
NO_SETTINGS = {"async", "accuracy_reward", "prompt", "image", "images"}
BESIDE = {
    "generation_kwargs", "cache_implementation", "use_transformers_continuous_batching", "eval_dataset", "eval_strategy",
    "eval_steps", "logging_steps", "log_completions", "run_name", "callbacks", "load_best_model_at_end", "weight_decay",
    "optim_args", "processing_class", "use_liger_kernel", "vllm_enable_sleep_mode", "vllm_structured_outputs_regex",
    "warmup_steps", "train_dataset", "reward_funcs", "peft_config", "chat_template_kwargs",
}  # fmt: skip
"""Settings that a script has, and that do not concern the algorithm."""


def settings_of_the_tables() -> list[tuple[str, str | None]]:
    """Names, each with the value that the table gives it."""
    section = COMING.partition("\n## TRL\n")[2].partition("\n## ")[0]
    cells = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| ")]
    quoted = [text for cell in cells for text in re.findall(r"`([^`]+)`", cell)]
    found = [re.fullmatch(r"([a-z]\w*)(?:=(.+))?", text) for text in quoted]
    return [(match[1], match[2]) for match in found if match]


@pytest.mark.filterwarnings("ignore:.*deprecated.*:FutureWarning")  # TRL takes old and new names
def test_every_name_is_a_setting_of_trl_and_its_config_is_built_from_all_of_them(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    defaults = trl.GRPOConfig(output_dir=str(tmp_path), bf16=False, report_to="none", use_cpu=True)
    fields = {field.name for field in dataclasses.fields(trl.GRPOConfig) if field.init}
    arguments = set(inspect.signature(trl.GRPOTrainer.__init__).parameters)
    names = {name for name, _ in settings_of_the_tables()}
    modes = {name for name in names if name.startswith(("token_", "sequence_"))}
    unknown = names - fields - arguments - NO_SETTINGS - modes
    assert not unknown
    assert names >= BESIDE
    assert "warmup_ratio" not in fields | names
    # resolved by the config itself from the others
    derived = {"generation_batch_size", "steps_per_generation"}
    chosen = {name: getattr(defaults, name) for name in names & fields - derived}
    assert trl.GRPOConfig(**chosen | {"output_dir": str(tmp_path), "use_cpu": True}).beta == defaults.beta
    # and from each value that the tables name
    valued = [(name, ast.literal_eval(value)) for name, value in settings_of_the_tables() if value and name in fields]
    assert len(valued) >= 20
    for name, value in valued:
        config = trl.GRPOConfig(**chosen | {"output_dir": str(tmp_path), "use_cpu": True, name: value})
        assert getattr(config, name) == value
