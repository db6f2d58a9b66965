"""Teach a small vision-language model to count, with a reward that only says whether an answer is right.

    python -m examples.counting            # minutes on one core; nothing is downloaded
    python -m examples.counting --seed 1

The script creates a LLaVA of 0.2 million parameters with a processor and a tokenizer of words. Its pictures are generated: red
and blue squares on a grey field, zero to six of each. "how many red squares ?" is answered in words, "four red squares". A
supervised warm-up ends when about one in four answers is right. Then GRPO takes over: the model answers each of 32 questions 8
times, and right answers become more likely. Each picture is computed once for its 8 answers.

Accuracies are measured on pictures that neither phase has seen. The script writes questions.png, with pictures and the answers
before and after GRPO, and the run's metrics to runs/counting/seed-0/.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib import pyplot as plt
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from adapters.llm import CompletionRewards, HFOptions, HFPolicy, SamplingConfig
from adapters.tracking import RunFolder
from grpo import AdvantageConfig, GRPOConfig, GRPOTrainer, ObjectiveConfig

NUMBERS = ["zero", "one", "two", "three", "four", "five", "six"]
COLOURS = {"red": (220, 40, 40), "blue": (40, 60, 220)}
WORDS = ["<end>", "<image>", "how", "many", "squares", "?", *COLOURS, *NUMBERS]
SIDE, CELL = 32, 8


def make_processor() -> LlavaProcessor:
    """A processor of pictures with 16 cells, and a tokenizer with one token per word."""
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, "<end>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<end>", extra_special_tokens={"image_token": "<image>"}
    )
    pixels = CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    return LlavaProcessor(
        pixels, tokenizer, patch_size=CELL, vision_feature_select_strategy="default", num_additional_image_tokens=1
    )


def make_model() -> LlavaForConditionalGeneration:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
    text = {"model_type": "llama", "vocab_size": len(WORDS), "max_position_embeddings": 64, "initializer_range": 0.1}
    vision = {"model_type": "clip_vision_model", "image_size": SIDE, "patch_size": CELL, "initializer_range": 0.1}
    config = LlavaConfig(
        text_config=text | sizes | {"bos_token_id": None, "eos_token_id": 0},
        vision_config=vision | sizes,
        image_token_index=WORDS.index("<image>"),
        vision_feature_layer=-1,
    )
    return LlavaForConditionalGeneration(config)


def make_questions(count: int, seed: int) -> list[dict[str, Any]]:
    """Rows with a prompt, a picture and an answer."""
    random, rows = np.random.default_rng(seed), []
    for _ in range(count):
        picture = np.full((SIDE, SIDE, 3), 128, np.uint8)
        counts = dict(zip(COLOURS, random.integers(0, len(NUMBERS), len(COLOURS)).tolist(), strict=True))
        cells = random.permutation((SIDE // CELL) ** 2)[: sum(counts.values())].tolist()
        for cell, colour in zip(cells, [name for name in counts for _ in range(counts[name])], strict=True):
            top, left = (CELL * place + 1 for place in divmod(cell, SIDE // CELL))
            picture[top : top + CELL - 2, left : left + CELL - 2] = COLOURS[colour]
        asked = str(random.choice(list(COLOURS)))
        prompt, answer = f"<image> how many {asked} squares ?", f"{NUMBERS[counts[asked]]} {asked} squares"
        rows.append({"prompt": prompt, "image": picture, "answer": answer})
    return rows


def right(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """The reward function: 1 for the right answer, 0 otherwise."""
    return [float(completion == truth) for completion, truth in zip(completions, answer, strict=True)]


def answers(policy: HFPolicy, questions: list[dict[str, Any]]) -> list[str]:
    """The likeliest answer to each question."""
    policy.eval()
    return [answer.text for [answer] in policy.generate_actions(questions, 1, temperature=0)]


def share_right(found: list[str], questions: list[dict[str, Any]]) -> float:
    """Fraction of the answers that are right."""
    return sum(answer == row["answer"] for answer, row in zip(found, questions, strict=True)) / len(questions)


class Suffices:
    """Ends a run when an evaluation finds this accuracy."""

    def __init__(self, accuracy: float) -> None:
        self.accuracy = accuracy

    def on_evaluation(self, trainer: object, metrics: dict[str, float]) -> str | None:
        return "stop" if metrics["eval/accuracy"] >= self.accuracy else None


def warm_up(
    policy: HFPolicy, train: list[dict[str, Any]], others: list[dict[str, Any]], args: argparse.Namespace
) -> None:
    """Supervised learning until the accuracy on `others` reaches `args.warmup_accuracy`."""
    config = GRPOConfig(num_demonstrations_per_iteration=64, learning_rate=1e-3, max_grad_norm=None, seed=args.seed)
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=CompletionRewards(right))
    trainer.train(
        None,
        demonstrations=policy.demonstrations(train, [row["answer"] for row in train]),
        num_iterations=args.warmup_steps,
        evaluation=lambda: {"eval/accuracy": share_right(answers(policy, others), others)},
        eval_every=5,
        callbacks=[Suffices(args.warmup_accuracy)],
    )


def plot(questions: list[dict[str, Any]], before: list[str], after: list[str], path: Path) -> None:
    """Pictures with the question, and the answers before and after GRPO."""
    figure, axes = plt.subplots(2, 4, figsize=(10, 6.4), layout="constrained")
    for axis, row, first, last in zip(axes.flat, questions, before, after, strict=False):
        marks = ["right" if answer == row["answer"] else "wrong" for answer in (first, last)]
        axis.imshow(row["image"])
        axis.set_axis_off()
        asked = row["prompt"].removeprefix("<image> ")
        axis.set_title(f"{asked}\nbefore: {first} ({marks[0]})\nafter: {last} ({marks[1]})", fontsize=8)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=300, help="iterations of GRPO (default: %(default)s)")
    parser.add_argument("--pictures", type=int, default=4000, help="training pictures (default: %(default)s)")
    parser.add_argument("--warmup-steps", type=int, default=500, help="maximum warm-up steps (default: %(default)s)")
    parser.add_argument("--warmup-accuracy", type=float, default=0.25, help="ends the warm-up (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="of GRPO (default: %(default)s)")
    parser.add_argument("--entropy-coef", type=float, default=0.03, help="of the bonus (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="default: runs/counting/seed-SEED")
    args = parser.parse_args()
    folder = args.folder or Path("runs/counting") / f"seed-{args.seed}"
    torch.set_num_threads(1)  # more threads do not help a model this small
    torch.manual_seed(args.seed)
    start = time.process_time()

    train, others, held_out = (make_questions(n, 3 * args.seed + i) for i, n in enumerate((args.pictures, 200, 500)))
    sampling, options = SamplingConfig(max_new_tokens=4), HFOptions(exact_entropy=True)
    policy = HFPolicy(make_model(), make_processor(), sampling=sampling, options=options)
    warm_up(policy, train, others, args)
    before = answers(policy, held_out)

    config = GRPOConfig(
        group_size=8,
        num_states_per_iteration=32,
        learning_rate=args.learning_rate,
        lr_schedule="linear",
        warmup_ratio=0.1,  # large first steps would destroy what the warm-up taught
        seed=args.seed,
        dynamic_sampling_rounds=4,  # in nine of ten groups the answers soon agree, right or wrong, and teach nothing
        advantage=AdvantageConfig(scale="group"),
        objective=ObjectiveConfig(entropy_coef=args.entropy_coef),  # else the answers of a group may soon be all equal
    )
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=CompletionRewards(right))
    with RunFolder(folder) as sink:
        trainer.train(train, num_iterations=args.iterations, eval_states=held_out[:100], sinks=[sink])

    after = answers(policy, held_out)
    shares = [share_right(found, held_out) for found in (before, after)]
    print(f"held-out pictures counted right: {shares[0]:.1%} -> {shares[1]:.1%}")
    print(f"processor time {time.process_time() - start:.0f} s")
    plot(held_out, before, after, folder / "questions.png")
    print(f"written: {folder}/")


if __name__ == "__main__":
    main()
