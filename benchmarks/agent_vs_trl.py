"""Time of one GRPO iteration of an agent with a tool, compared with the multi-turn loop of TRL's `GRPOTrainer`.

Both sides train copies of the same random Qwen3 with the same environment class, written for TRL's `environment_factory`. The
model's head only allows tool calls of 32 tokens, whose words are random, so every conversation has the same number of turns and
tokens on both sides. TRL's own `train()` runs, and after each of its steps our trainer runs one, so that both sides are timed
in turn in one process. Times are CPU seconds. TRL has its best settings (`benchmarks/_trl.py`), and ours computes the exact
entropy, because TRL does.

    python -m benchmarks.agent_vs_trl
    python -m benchmarks.agent_vs_trl --pairs 3 --rows 16
"""

import argparse
import copy
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from transformers.utils import logging

from adapters.agents import AgentPolicy, EnvironmentReward
from adapters.agents.bridges.trl import trl_environments
from adapters.llm import HFOptions, HFPolicy, SamplingConfig
from benchmarks._trl import LEARNING_RATE, PASSES, SAMPLERS, fastest_sampler, run_trl
from benchmarks.llm_vs_trl import Case, make_model
from grpo import GRPOConfig, GRPOTrainer

PROMPT, TURNS, TOKENS, GROUP = 256, 4, 32, 8
"""Tokens of a prompt with its tools, turns of a conversation, tokens of a turn, and conversations per prompt."""
VOCABULARY = 32_000
WORDS = TOKENS - 3
"""Words of a call. The other tokens of a turn are `OPEN`, `CLOSE` and the end of the turn."""
OPEN, CLOSE, END = '<tool_call>\n{"name": "look", "arguments": {"words": "', '"}}\n</tool_call>', "<|im_end|>"
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALLS = {"open": "<tool_call>", "close_pattern": r"</tool_call>\s*", "repeats": True, "content": "json"}
RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {**CALLS, "transform": {"type": "function", "function": "{content}"}},
        "content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"},
    },
}
"""How transformers reads a turn. Both sides use it."""


class Look:
    """An environment for TRL: a tool, and a reward for the words of the calls."""

    def reset(self, **row: Any) -> None:
        """Begin."""
        self.num_words = self.num_even = 0

    def look(self, words: str) -> str:
        """Looks something up.

        Args:
            words: What to look up.
        """
        self.num_words += len(words.split())
        self.num_even += sum(int(word.removeprefix("w")) % 2 == 0 for word in words.split())
        return "nothing found"

    def get_reward(self) -> float:
        """The share of words with an even number. TRL does not answer the calls of the last turn, and ours does."""
        return self.num_even / max(self.num_words, 1)


def make_tokenizer(vocabulary_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer with one word per token, a chat template, and the tokens of a call."""
    split = pre_tokenizers.Split(Regex(r"\w+ ?|\s|[^\w\s]"), "isolated")
    fixed = ["<pad>", "<unk>", "<|im_start|>", END, OPEN, CLOSE]
    tokenizer = _tokenizer({token: i for i, token in enumerate(fixed)}, split)
    messages = [{"role": role, "content": "nothing found"} for role in ("system", "user", "assistant", "tool")]
    text = tokenizer.apply_chat_template(messages, tools=[Look().look], tokenize=False, add_generation_prompt=True)
    pieces = sorted({piece for piece, _ in split.pre_tokenize_str(text)} - {*fixed})
    vocabulary = [*fixed, *pieces]
    vocabulary += [f"w{i} " for i in range(vocabulary_size - len(vocabulary))]
    return _tokenizer({token: i for i, token in enumerate(vocabulary)}, split)


def _tokenizer(vocabulary: dict[str, int], split: Any) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = split, decoders.Fuse()
    special: dict[str, Any] = {"pad_token": "<pad>", "eos_token": END, "extra_special_tokens": ["<|im_start|>"]}
    found = PreTrainedTokenizerFast(tokenizer_object=tokenizer, padding_side="left", **special)
    found.chat_template, found.response_template = TEMPLATE, RESPONSE
    return found


def make_rows(tokenizer: Any, count: int) -> list[dict[str, Any]]:
    """Prompts of `PROMPT` tokens, the template and the tool included."""

    def length(question: str) -> int:
        messages = [{"role": "user", "content": question}]
        rendered = tokenizer.apply_chat_template(messages, tools=[Look().look], add_generation_prompt=True)
        return len(rendered["input_ids"])

    missing = PROMPT - length("")
    questions = ["".join(f"w{j * 97 + i} " for j in range(missing)) for i in range(count)]
    assert {length(question) for question in questions} == {PROMPT}
    return [{"prompt": [{"role": "user", "content": question}]} for question in questions]


def make_caller(tokenizer: Any) -> Qwen3ForCausalLM:
    """A model that can only say calls: the first dimensions of an embedding are the place of the token in a call.

    The final hidden state has them unchanged in direction, and the head gives each token of another place a logit that is lower
    by about 30. The words are drawn from as many sets as a call has words.
    """
    model = make_model(Case(prompt=PROMPT, completion=TOKENS, group=GROUP), "cpu", vocab_size=VOCABULARY)
    size = model.config.vocab_size
    begin = tokenizer.convert_tokens_to_ids("w0 ")
    place = torch.full((size,), TOKENS)  # the place of tokens that are no part of a call
    place[begin:] = 1 + torch.arange(size - begin) % WORDS
    for token, its_place in ((OPEN, 0), (CLOSE, WORDS + 1), (END, WORDS + 2)):
        place[tokenizer.convert_tokens_to_ids(token)] = its_place
    codes = TOKENS + 1
    with torch.no_grad():
        embedding, head = model.model.embed_tokens.weight, model.lm_head
        embedding[:, :codes] = 10 * nn.functional.one_hot(place, codes)
        allowed = nn.functional.one_hot((place - 1) % codes, codes)  # what comes before each token
        head.weight[:, :codes] = 2.0 * (allowed - 1)
        head.bias.zero_()
    return model


def our_iteration(model: Qwen3ForCausalLM, tokenizer: Any, rows: list[Any]) -> Callable[[], dict[str, float]]:
    """A function that runs one `GRPOTrainer.step`."""
    sampling = SamplingConfig(max_new_tokens=TOKENS)
    policy = HFPolicy(model, tokenizer, sampling=sampling, options=HFOptions(exact_entropy=True))
    agent = AgentPolicy(policy, trl_environments(Look), max_turns=TURNS)
    config = GRPOConfig(group_size=GROUP, learning_rate=LEARNING_RATE, seed=0)
    trainer = GRPOTrainer(config=config, policy=agent, reward_model=EnvironmentReward())
    return lambda: trainer.step(rows)


def trl_iterations(
    model: Qwen3ForCausalLM,
    tokenizer: Any,
    rows: list[Any],
    steps: int,
    after_step: Callable[[float], None],
    sampler: str,
) -> list[dict[str, Any]]:
    """Run TRL's `train()` and pass its step times to `after_step`. Returns TRL's metrics."""
    arguments = {
        "max_completion_length": 2 * TURNS * TOKENS,
        "generation_kwargs": {"max_new_tokens": TOKENS},
        "max_tool_calling_iterations": TURNS - 1,
        "scale_rewards": "none",
    }
    _, metrics = run_trl(
        model,
        tokenizer,
        rows,
        steps,
        after_step,
        group=GROUP,
        sampler=sampler,
        arguments=arguments,
        environment_factory=Look,
    )
    return metrics


def main() -> None:
    """Read the command line, run both sides, and print the times, the ratio and the counts."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--rows", type=int, default=32, help=f"conversations per iteration, a multiple of {GROUP}")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sampler", choices=SAMPLERS, help="how TRL samples, instead of the fastest way")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    logging.set_verbosity_error()
    tokenizer = make_tokenizer(VOCABULARY)
    rows = make_rows(tokenizer, options.rows // GROUP)
    model = make_caller(tokenizer)
    step = our_iteration(copy.deepcopy(model), copy.deepcopy(tokenizer), rows)
    times: list[tuple[float, float]] = []
    metrics: list[dict[str, float]] = []

    def run_ours(seconds_of_trl: float) -> None:
        begin = time.process_time()
        metrics.append(step())
        times.append((seconds_of_trl, time.process_time() - begin))

    print(
        f"torch {torch.__version__}, transformers {version('transformers')}, TRL {version('trl')}, Python "
        f"{platform.python_version()}, {options.threads} thread(s); CPU seconds, medians of {options.pairs} interleaved "
        f"iterations\nprompt {PROMPT}, {TURNS} turns of {TOKENS} tokens, group {GROUP}, {options.rows} conversations"
    )

    def seconds_of(sampler: str) -> float:
        seconds: list[float] = []
        trl_iterations(copy.deepcopy(model), tokenizer, rows, 2, seconds.append, sampler)
        return seconds[-1]

    sampler = options.sampler or fastest_sampler(seconds_of)
    theirs = trl_iterations(model, tokenizer, rows, options.pairs + 1, run_ours, sampler)
    print(f"  TRL samples with {sampler}, in {PASSES} passes per update")
    timed = times[1:]  # the first pair warms up
    ratios = [trl / ours for trl, ours in timed]
    print(
        f"  s/iteration   TRL {statistics.median(t for t, _ in timed):.2f}   ours {statistics.median(o for _, o in timed):.2f}"
    )
    print(f"  speed against TRL {statistics.median(ratios):.2f} x ({min(ratios):.2f} to {max(ratios):.2f})")
    turns = {1 + entry["tools/call_frequency"] for entry in theirs}
    tokens = {entry["completions/mean_length"] for entry in theirs}
    print(f"  TRL:  turns per conversation {turns}, sampled tokens per conversation {tokens}")
    print(
        f"  ours: turns per conversation { {m['agents/turns'] / options.rows for m in metrics} }, sampled tokens per "
        f"conversation { {m['agents/tokens'] / options.rows for m in metrics} }"
    )
    mean = statistics.fmean
    print(
        f"  mean reward   TRL {mean(e['reward'] for e in theirs):.3f}   ours {mean(m['rewards/mean'] for m in metrics):.3f}"
    )


if __name__ == "__main__":
    main()
