"""Teach a small language model to work with a calculator, over several turns.

    python -m examples.tool_agent                  # three seeds, a few minutes each on one core; nothing is downloaded
    python -m examples.tool_agent --seeds 0

A problem is a text such as (17+25)*6. The calculator does one operation at a time, so the model must call it with 17+25, read
42, call it with 42*6, read 252, and answer 252. The model never calculates. It learns which operation comes first, and to copy
numbers from the problem and from the calculator's results.

The script creates a tokenizer of 102 tokens and a Qwen3 model of 0.1 million parameters. A supervised warm-up trains the model
on scripted conversations. The script knows how to call the calculator, but not what to ask: it picks operations at random, and
often answers too early. Then GRPO takes over: the model works on each of 32 problems 8 times, and what led to right answers
becomes more likely. Turns are also compared with the turns of the same problem in the same state (GiGPO), which is what the
calculator has returned so far.

Some problems are held out: no other problem has the same two numbers in its sum, in any order. The script prints a table of the
accuracies on held-out problems, with one sampled conversation for each, and shows a conversation. It writes metrics.jsonl and
conversations.json to runs/tool_agent/seed-0/.
"""

import argparse
import json
import random
import re
import string
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from adapters.agents import AgentPolicy, Conversation, EnvironmentReward, Message
from adapters.llm import HFPolicy, SamplingConfig
from grpo import AdvantageConfig, GRPOConfig, GRPOTrainer, JSONLSink, WeightedRewards

MARKS = ["<pad>", "<|end|>", "<|user|>", "<|assistant|>", "<|tool|>"]
CALL = ('<tool_call>{"name": "calculate", "arguments": {"expression": "', '"}}</tool_call>')
"""What is written around the expression of a call: one token each, so that a call has about 8 tokens."""
TOKENS = [*MARKS, *CALL, *string.printable[:95]]
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
OPERATION = re.compile(r"(\d{1,6})([-+*])(\d{1,6})")


def calculated(expression: str) -> str:
    """The result of one operation. It is "error" if the expression is not two numbers with +, - or * between them."""
    operation = OPERATION.fullmatch(expression)
    if operation is None:
        return "error"
    a, b = int(operation[1]), int(operation[3])
    return str({"+": a + b, "-": a - b, "*": a * b}[operation[2]])


@dataclass(frozen=True)
class Problem:
    """(a+b)*c or c*(a+b)."""

    a: int
    b: int
    c: int
    sum_is_first: bool

    @property
    def question(self) -> str:
        return f"({self.a}+{self.b})*{self.c}" if self.sum_is_first else f"{self.c}*({self.a}+{self.b})"

    @property
    def operations(self) -> tuple[str, str]:
        """The two operations that the calculator must do."""
        return f"{self.a}+{self.b}", f"{self.a + self.b}*{self.c}"

    @property
    def results(self) -> tuple[str, str]:
        """The results of the two operations. The second one is the answer."""
        first, second = self.operations
        return calculated(first), calculated(second)


class Calculator:
    """An environment: the calculator is a tool, and a message without a call is the answer. Its reward is 1 if it is right."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.results: list[str] = []

    def calculate(self, expression: str) -> str:
        """Calculates one operation.

        Args:
            expression: Two numbers with +, - or * between them.
        """
        self.results.append(calculated(expression))
        return self.results[-1]

    def tools(self) -> list[Any]:
        return [self.calculate]

    def state_key(self) -> list[str]:
        return list(self.results)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
        return self.problem.question, {}

    def step(self, action: Message) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", float(action["content"] == self.problem.results[1]), True, False, {}


def share_calculated(problems: Sequence[Problem], conversations: Sequence[Conversation]) -> list[float]:
    """A reward function: the share of the problem's two results that the calculator has returned."""
    shares = []
    for problem, conversation in zip(problems, conversations, strict=True):
        returned = {message["content"] for message in conversation.messages if message["role"] == "tool"}
        shares.append(sum(result in returned for result in problem.results) / 2)
    return shares


def make_problems(num_scripts: int, seed: int) -> dict[str, list[Problem]]:
    """Held-out problems, problems for scripts, and problems to train on."""
    rng = random.Random(seed)
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]
    rng.shuffle(pairs)

    def problems(count: int, some: list[tuple[int, int]]) -> list[Problem]:
        chosen = (rng.sample(rng.choice(some), 2) for _ in range(count))
        return [Problem(a, b, rng.randrange(2, 10), sum_is_first=rng.random() < 0.5) for a, b in chosen]

    return {
        "held out": problems(300, pairs[:300]),
        "scripts": problems(num_scripts, pairs[300:]),
        "train": problems(5_000, pairs[300:]),
    }


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, and one for each mark and for what is written around an expression."""
    characters = Tokenizer(models.WordLevel({token: number for number, token in enumerate(TOKENS)}, "<pad>"))
    characters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    characters.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=characters, pad_token="<pad>", eos_token="<|end|>", extra_special_tokens=MARKS[2:]
    )
    tokenizer.add_tokens(list(CALL))  # found in a text before it is divided into characters
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_policy() -> AgentPolicy:
    config = Qwen3Config(
        vocab_size=len(TOKENS),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.125,  # 1 / sqrt(hidden_size); the default, 0.02, is for wider models
        bos_token_id=None,
        eos_token_id=1,
    )
    model = HFPolicy(Qwen3ForCausalLM(config), make_tokenizer(), sampling=SamplingConfig(max_new_tokens=14))
    return AgentPolicy(model, Calculator, max_turns=4, concurrency=256)


def make_script(problem: Problem, rng: random.Random) -> list[str]:
    """The turns of an agent that can call the calculator, but does not know what to ask. One in six of them is right."""
    first, rest = rng.choice([(f"{problem.a}+{problem.b}", problem.c), (f"{problem.b}*{problem.c}", problem.a)])
    calls = [first]
    if rng.random() < 2 / 3:
        calls.append(f"{calculated(first)}{rng.choice('+*')}{rest}")
    return [*(operation.join(CALL) for operation in calls), calculated(calls[-1])]


def warm_up(policy: AgentPolicy, problems: list[Problem], num_steps: int, seed: int) -> None:
    """Supervised learning from one scripted conversation about each problem."""
    rng = random.Random(seed)
    conversations = policy.replay(problems, [make_script(problem, rng) for problem in problems])
    optimizer = torch.optim.AdamW(policy.get_parameters().values(), lr=2e-3)
    policy.train()
    with tqdm(range(num_steps), desc="Warm-up", unit="step") as bar:
        for _ in bar:
            some = torch.randperm(len(problems))[:64].tolist()
            scores = policy.score_actions([problems[i] for i in some], [conversations[i] for i in some])
            loss = -scores.log_probs[scores.mask].mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            bar.set_postfix(loss=f"{loss.item():.2f}")


def converse(policy: AgentPolicy, problems: list[Problem]) -> list[Conversation]:
    """One sampled conversation about each problem."""
    policy.eval()
    return [conversation for [conversation] in policy.generate_actions(problems, 1)]


def accuracy(conversations: Sequence[Conversation]) -> float:
    """Share of the conversations with a right answer."""
    return sum(conversation.reward for conversation in conversations) / len(conversations)


def train(seed: int, args: argparse.Namespace) -> tuple[list[float], Conversation]:
    """The accuracies on held-out problems before, after the warm-up and after GRPO; and a held-out conversation."""
    folder = args.folder / f"seed-{seed}"
    (folder / "metrics.jsonl").unlink(missing_ok=True)  # left by an earlier run
    torch.manual_seed(seed)
    problems, policy = make_problems(args.scripts, seed), make_policy()
    before = converse(policy, problems["held out"])
    warm_up(policy, problems["scripts"], args.warmup_steps, seed)
    warm = converse(policy, problems["held out"])
    config = GRPOConfig(
        group_size=8,
        num_states_per_iteration=32,
        batch_size=256 // args.updates,
        learning_rate=5e-4,
        lr_schedule="linear",
        seed=seed,
        advantage=AdvantageConfig(credit="gigpo", scale="group"),
    )
    parts = {"right": EnvironmentReward(), "calculated": share_calculated}
    reward = WeightedRewards(parts, {"right": 1, "calculated": 0.5})
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=reward)
    with JSONLSink(folder / "metrics.jsonl") as sink:
        trainer.train(problems["train"], num_iterations=args.iterations, sinks=[sink])
    after = converse(policy, problems["held out"])
    (folder / "conversations.json").write_text(json.dumps([conversation.messages for conversation in after], indent=1))
    return [accuracy(before), accuracy(warm), accuracy(after)], after[0]


def arguments(typed: Sequence[str] | None = None) -> argparse.Namespace:
    """The settings of a run, from what was typed behind the script's name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--scripts", type=int, default=2000, help="scripted conversations (default: %(default)s)")
    parser.add_argument("--warmup-steps", type=int, default=400, help="warm-up steps (default: %(default)s)")
    parser.add_argument("--iterations", type=int, default=60, help="iterations of GRPO (default: %(default)s)")
    parser.add_argument("--updates", type=int, default=1, help="updates in an iteration (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=Path("runs/tool_agent"))
    return parser.parse_args(typed)


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)  # more threads do not help a model this small
    lines = ["| seed | before | warm-up alone | after GRPO | CPU, wall-clock seconds |", "|---|---|---|---|---|"]
    for seed in args.seeds:
        start, cpu_start = time.perf_counter(), time.process_time()
        shares, conversation = train(seed, args)
        seconds = f"{time.process_time() - cpu_start:.0f}, {time.perf_counter() - start:.0f}"
        lines.append(f"| {seed} | {' | '.join(f'{share:.1%}' for share in shares)} | {seconds} |")
        print("\n" + "\n".join(lines) + "\n", flush=True)
    for message in conversation.messages:
        print(message["role"], *(call["function"] for call in message.get("tool_calls", [])), message["content"])


if __name__ == "__main__":
    main()
