"""Two seats that share one policy: a proposer writes problems with a given answer, and a solver solves them.

    python -m examples.proposer_and_solver               # three seeds, about two minutes each on one core; no downloads
    python -m examples.proposer_and_solver --seeds 0

A problem is a digit d, and its answer is the last digit of 7 d + 3. Nobody tells the policy this rule. The state is an answer.
The proposer reads it and writes a problem that has it, which is the rule backwards; the solver reads the problem and answers. A
checker that knows the rule rewards each of them: the proposer for a problem with the given answer, and the solver for the right
answer to the problem it got. Both seats are one Qwen3 model of 0.05 million parameters, without any warm-up.

`seat_advantages` compares each seat with the same seat in the other conversations of the group. The baseline is a solver that
learns alone, from the same number of problems, which a function takes from a list. The script prints how often the two seats
are right before training, for the solver alone, and for both together.
"""

import argparse
import time
from collections.abc import Callable
from typing import TypeAlias

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from adapters.agents import AgentPolicy, Chat, EnvironmentReward, Message, Seat, seat_advantages
from adapters.llm import HFPolicy, SamplingConfig
from grpo import GRPOConfig, GRPOTrainer, ObjectiveConfig

MARKS = ["<pad>", "<|end|>", "<|user|>", "<|assistant|>"]
ORDERS = ["propose", "solve"]
DIGITS = [*"0123456789"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
ANSWERS = {digit: str((7 * int(digit) + 3) % 10) for digit in DIGITS}
Proposer: TypeAlias = Callable[[list[Message]], str] | None
"""A proposer that is not trained. None: the policy."""


async def play(chat: Chat, answer: str) -> dict[str, float]:
    """One problem, written and solved. A problem that is no digit is not solved."""
    written = await chat.reply([{"role": "user", "content": f"propose{answer}"}], seat="proposer")
    problem = written.message["content"]
    if problem not in ANSWERS:
        return {"proposer": 0.0}
    solved = await chat.reply([{"role": "user", "content": f"solve{problem}"}], seat="solver")
    return {
        "proposer": float(ANSWERS[problem] == answer),
        "solver": float(solved.message["content"] == ANSWERS[problem]),
    }


def from_a_list(messages: list[Message]) -> str:
    """A proposer that is not trained: it takes the problems in the order of the states."""
    return messages[-1]["content"].removeprefix("propose")


def make_model() -> HFPolicy:
    tokens = [*MARKS, *ORDERS, *DIGITS]
    words = Tokenizer(models.WordLevel({token: number for number, token in enumerate(tokens)}, "<pad>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    words.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<|end|>", extra_special_tokens=MARKS[2:]
    )
    tokenizer.add_tokens(ORDERS)
    tokenizer.chat_template = TEMPLATE
    config = Qwen3Config(
        vocab_size=len(tokens),
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        initializer_range=0.14,  # 1 / sqrt(hidden_size)
        bos_token_id=None,
        eos_token_id=1,
    )
    return HFPolicy(Qwen3ForCausalLM(config), tokenizer, sampling=SamplingConfig(max_new_tokens=2))


def make_policy(model: HFPolicy, proposer: Proposer = None) -> AgentPolicy:
    """The model in both seats, or in that of the solver, with another proposer."""
    seats = [Seat(name="proposer", policy=proposer), Seat(name="solver")]
    return AgentPolicy(model, play, seats=seats, max_turns=2, concurrency=256)


def shares_right(model: HFPolicy) -> tuple[float, float]:
    """How often the solver is right about each problem of the list, and the proposer about each answer."""
    model.eval()
    shares = []
    for seat, proposer in (("solver", from_a_list), ("proposer", None)):
        groups = make_policy(model, proposer).generate_actions(DIGITS, 30)
        turns = [turn for group in groups for row in group for turn in row.turns if turn.seat == seat]
        shares.append(sum(turn.reward for turn in turns) / len(turns))
    return shares[0], shares[1]


def train(model: HFPolicy, iterations: int, seed: int, proposer: Proposer = None) -> None:
    # without the bonus, the solver settles on a few answers before the proposer writes all problems
    objective = ObjectiveConfig(entropy_coef=0.02, entropy_estimator="score_function")
    config = GRPOConfig(group_size=16, learning_rate=3e-3, seed=seed, objective=objective)
    trainer = GRPOTrainer(
        config=config,
        policy=make_policy(model, proposer),
        reward_model=EnvironmentReward(per_turn=True),
        advantages=seat_advantages,
    )
    trainer.train(DIGITS, num_iterations=iterations)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=100, help="iterations of GRPO (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)  # more threads do not help a model this small
    lines = ["| seed | | solver | proposer | seconds |", "|---|---|---|---|---|"]
    for seed in args.seeds:
        for name, proposer in (("untrained", None), ("solver alone", from_a_list), ("both together", None)):
            start = time.perf_counter()
            torch.manual_seed(seed)
            model = make_model()
            if name != "untrained":
                train(model, args.iterations, seed, proposer)
            solver_right, proposer_right = shares_right(model)
            seconds = time.perf_counter() - start
            lines.append(f"| {seed} | {name} | {solver_right:.1%} | {proposer_right:.1%} | {seconds:.0f} |")
        print("\n" + "\n".join(lines) + "\n", flush=True)


if __name__ == "__main__":
    main()
