"""Teach a small language model to add, with a reward that only says whether an answer is right.

    python -m examples.arithmetic_llm            # three to four minutes on one core; nothing is downloaded
    python -m examples.arithmetic_llm --seed 1

The script creates a tokenizer of 13 tokens and a Qwen3 model of 0.8 million parameters. A supervised warm-up trains the model
on sums with their answers until about one in four answers is right. Then GRPO takes over: the model answers each of 32 sums 16
times, and right answers become more likely. Answers are written with the last digit first, because addition by hand starts with
it: 17+25=24 means 42.

Some sums are held out: neither phase trains on them, or on the same sums with the numbers swapped. All printed accuracies are
measured on held-out sums. The script writes report.html, learning_curve.png, the run's metrics and samples, comparison.json and
the model to runs/arithmetic_llm/seed-0/.
"""

import argparse
import random
import time
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from adapters.llm import CompletionRewards, HFPolicy, SamplingConfig
from adapters.tracking import RunFolder, write_report
from grpo import AdvantageConfig, GRPOConfig, GRPOTrainer, ObjectiveConfig, compare_policies, measure_policy

CHARACTERS = ["<end>", *"0123456789+="]
PROMPT_LENGTH, MAX_NEW_TOKENS = len("12+34="), len("134") + 1


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character."""
    tokenizer = Tokenizer(models.WordLevel({character: number for number, character in enumerate(CHARACTERS)}, "<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def make_model() -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=len(CHARACTERS),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=32,
        tie_word_embeddings=True,
        initializer_range=0.08,  # about 1 / sqrt(hidden_size); the default, 0.02, is for wider models
        bos_token_id=None,
        eos_token_id=0,
    )
    return Qwen3ForCausalLM(config)


def make_sums(seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]], list[dict[str, str]]]:
    """Rows with a prompt and an answer: rows to train on, rows that decide when the warm-up ends, and held-out rows."""
    pairs = [(a, b) for a in range(10, 100) for b in range(a, 100)]  # each pair gives two sums: a + b and b + a
    random.Random(seed).shuffle(pairs)

    def rows(some: list[tuple[int, int]]) -> list[dict[str, str]]:
        both = [pair for a, b in some for pair in dict.fromkeys([(a, b), (b, a)])]
        return [{"prompt": f"{a}+{b}=", "answer": str(a + b)[::-1]} for a, b in both]

    return rows(pairs[300:]), rows(pairs[200:300]), rows(pairs[:200])


def right(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """The reward function: 1 for the right answer, 0 otherwise."""
    return [float(completion == truth) for completion, truth in zip(completions, answer, strict=True)]


def accuracy(policy: HFPolicy, sums: list[dict[str, str]]) -> float:
    """Fraction of the sums whose most likely answer is right."""
    policy.eval()
    answers = policy.generate_actions(sums, 1, temperature=0)
    return sum(answer.text == row["answer"] for [answer], row in zip(answers, sums, strict=True)) / len(sums)


class Suffices:
    """Ends a run when an evaluation finds this accuracy."""

    def __init__(self, accuracy: float) -> None:
        self.accuracy = accuracy

    def on_evaluation(self, trainer: object, metrics: dict[str, float]) -> str | None:
        return "stop" if metrics["eval/accuracy"] >= self.accuracy else None


def warm_up(
    policy: HFPolicy, train: list[dict[str, str]], others: list[dict[str, str]], args: argparse.Namespace
) -> None:
    """Supervised learning until the accuracy on `others` reaches `args.warmup_accuracy`."""
    config = GRPOConfig(
        num_demonstrations_per_iteration=128,
        learning_rate=5e-4,
        max_grad_norm=None,
        seed=args.seed,
        objective=ObjectiveConfig(aggregation="step_mean"),
    )
    GRPOTrainer(config=config, policy=policy, reward_model=CompletionRewards(right)).train(
        None,
        demonstrations=policy.demonstrations(train, [row["answer"] for row in train]),
        num_iterations=args.warmup_steps,
        evaluation=lambda: {"eval/accuracy": accuracy(policy, others)},
        eval_every=5,
        callbacks=[Suffices(args.warmup_accuracy)],
    )


def plot(history: list[dict[str, float]], before: float, path: Path) -> None:
    iterations = range(1, len(history) + 1)
    measured = {0: before} | {i: m["eval/avg_reward"] for i, m in enumerate(history, 1) if "eval/avg_reward" in m}
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    axis.plot(iterations, [m["rewards/mean"] for m in history], ".", alpha=0.3, label="training sums")
    axis.plot(list(measured), list(measured.values()), "o-", label="held-out sums")
    axis.set(xlabel="iteration of GRPO", ylabel="share of sampled answers that are right", ylim=(0, 1))
    axis.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=600, help="iterations of GRPO (default: %(default)s)")
    parser.add_argument("--warmup-steps", type=int, default=1000, help="maximum warm-up steps (default: %(default)s)")
    parser.add_argument("--warmup-accuracy", type=float, default=0.25, help="ends the warm-up (default: %(default)s)")
    parser.add_argument(
        "--learning-rate", type=float, default=4e-4, help="learning rate of GRPO (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="default: runs/arithmetic_llm/seed-SEED")
    args = parser.parse_args()
    folder = args.folder or Path("runs/arithmetic_llm") / f"seed-{args.seed}"
    torch.set_num_threads(1)  # more threads do not help a model this small
    torch.manual_seed(args.seed)
    start, cpu_start = time.perf_counter(), time.process_time()

    train, others, held_out = make_sums(args.seed)
    policy = HFPolicy(make_model(), make_tokenizer(), sampling=SamplingConfig(max_new_tokens=MAX_NEW_TOKENS))
    warm_up(policy, train, others, args)

    reward = CompletionRewards(right)
    shown = {"label": lambda row: row["prompt"] + row["answer"]}
    before = measure_policy(policy, held_out, reward, batch_size=200, **shown)
    likeliest_before = accuracy(policy, held_out)
    config = GRPOConfig(
        group_size=16,
        num_states_per_iteration=32,
        batch_size=128,
        learning_rate=args.learning_rate,
        lr_schedule="linear",
        warmup_ratio=0.2,  # large first steps would destroy what the warm-up taught
        seed=args.seed,
        advantage=AdvantageConfig(scale="group"),
    )
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=reward)
    with RunFolder(folder) as sink:
        history = trainer.train(train, num_iterations=args.iterations, eval_states=held_out[:100], sinks=[sink])

    report = compare_policies(before, policy, held_out, reward, **shown)
    print(f"\n{report.table(max_rows=10)}\n")
    print(f"held-out sums right, sampled: {report.mean_reward_before:.1%} -> {report.mean_reward_after:.1%}")
    print(f"held-out sums right, likeliest: {likeliest_before:.1%} -> {accuracy(policy, held_out):.1%}")
    print(f"{time.perf_counter() - start:.0f} s, processor time {time.process_time() - cpu_start:.0f} s")
    report.to_json(folder / "comparison.json")
    write_report(folder)
    plot(history, report.mean_reward_before, folder / "learning_curve.png")
    policy.save_pretrained(folder / "model", trainer=trainer)
    print(f"written: {folder}/")


if __name__ == "__main__":
    main()
