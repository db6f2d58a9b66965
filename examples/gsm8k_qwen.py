"""Teach Qwen grade school mathematics: GSM8K, a LoRA adapter, and a reward that puts correctness first.

    python -m examples.gsm8k_qwen                                      # Qwen2.5-0.5B-Instruct in 4 bits, 1,000 problems
    python -m examples.gsm8k_qwen --model Qwen/Qwen3-0.6B --no-load-in-4bit --wandb my-project
    python -m examples.gsm8k_qwen --model FOLDER --data train.jsonl    # without a network

Requires the extras llm, llm-4bit for 4 bits, and tracking for --wandb. Use a GPU. A model is a folder or a name on the hub.
Data is a JSONL file with "question" and "answer", or a name on the hub (requires `datasets`). --resume continues a run. The
script writes metrics.jsonl, config.json, checkpoints/, model/ (adapter and tokenizer) and comparison.json to runs/gsm8k_qwen/.
"""

import argparse
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, assert_never

import torch
from peft import LoraConfig

from adapters.llm import (
    CompletionRewards,
    HFOptions,
    HFPolicy,
    SamplingConfig,
    correctness_first,
    hybrid_reward,
    load_gsm8k,
)
from adapters.tracking import WandbSink
from grpo import AdvantageConfig, GRPOConfig, GRPOTrainer, JSONLSink, ObjectiveConfig, compare_policies, measure_policy


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="Qwen/Qwen2.5-0.5B-Instruct", help="folder, or name on the hub (default: %(default)s)")
    add("--data", default="openai/gsm8k", help="JSONL file, or name on the hub (default: %(default)s)")
    add("--samples", type=int, default=1000, help="training problems (default: %(default)s)")
    add(
        "--eval-samples",
        type=int,
        default=100,
        help="evaluation problems, measured before and after (default: %(default)s)",
    )
    add("--batch-size", type=int, default=8, help="problems per iteration (default: %(default)s)")
    add("--responses", type=int, default=4, help="responses per problem (default: %(default)s)")
    add("--iterations", type=int, help="iterations of GRPO (default: one pass over the problems)")
    add("--max-new-tokens", type=int, default=256, help="maximum length of a response (default: %(default)s)")
    add("--max-tokens-per-forward", type=int, default=16_384, help="smaller: less memory (default: %(default)s)")
    add("--learning-rate", type=float, default=1e-5, help="learning rate of the adapter (default: %(default)s)")
    add("--kl-coef", type=float, default=0.0, help="KL penalty to the model without the adapter (default: none)")
    add("--lora-r", type=int, default=16, help="rank of the adapter (default: %(default)s)")
    add(
        "--lora-alpha",
        type=float,
        default=32,
        help="alpha of the adapter; its scale is alpha / r (default: %(default)s)",
    )
    add(
        "--load-in-4bit",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="frozen weights in 4 bits (default: yes)",
    )
    add(
        "--reward",
        choices=["correctness_first", "hybrid"],
        default="correctness_first",
        help="reward (default: %(default)s)",
    )
    add("--wandb", metavar="PROJECT", help="also log to Weights & Biases (WANDB_MODE=offline: without a network)")
    add("--resume", action="store_true", help="resume from the newest checkpoint in the folder")
    add("--seed", type=int, default=0)
    add("--folder", type=Path, default=Path("runs/gsm8k_qwen"))
    return parser.parse_args()


def load_problems(source: str, num_train: int, num_eval: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and evaluation problems. Evaluation uses the hub's test split, or a file's problems after the training ones."""
    if Path(source).is_file():
        problems = load_gsm8k(source, num_train + num_eval)
        if len(problems) <= num_train:
            raise SystemExit(
                f"{source} has {len(problems)} problems, and evaluation needs some: use fewer --samples than {num_train}."
            )
        return problems[:num_train], problems[num_train:]
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise SystemExit(f"{source} is not a file, and data sets of the hub require: pip install datasets") from error
    train, test = (load_dataset(source, "main", split=split) for split in ("train", "test"))
    return load_gsm8k(train, num_train), load_gsm8k(test, num_eval)


def make_reward(name: Literal["correctness_first", "hybrid"]) -> CompletionRewards:
    match name:
        case "correctness_first":
            return correctness_first()
        case "hybrid":
            return hybrid_reward()
        case _:
            assert_never(name)


def main() -> None:
    args = parse_arguments()
    problems, unseen = load_problems(args.data, args.samples, args.eval_samples)
    num_iterations = args.iterations or max(len(problems) // args.batch_size, 1)

    # The model is frozen, in 4 bits, with a trainable adapter.
    torch.manual_seed(args.seed)
    policy = HFPolicy.from_pretrained(
        # an adapter stores this path: make it absolute
        str(Path(args.model).resolve()) if Path(args.model).is_dir() else args.model,
        lora=LoraConfig(r=args.lora_r, lora_alpha=args.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM"),
        load_in_4bit=args.load_in_4bit,
        sampling=SamplingConfig(max_new_tokens=args.max_new_tokens),
        options=HFOptions(
            max_tokens_per_forward=args.max_tokens_per_forward,
            chat_template_options={"enable_thinking": False},  # Qwen3 would think for longer than max_new_tokens
        ),
    )
    if policy.tokenizer.chat_template is not None:  # an instruct model expects a conversation
        for row in problems + unseen:
            row["prompt"] = [{"role": "user", "content": row["prompt"]}]

    reward = make_reward(args.reward)
    config = GRPOConfig(
        group_size=args.responses,
        num_states_per_iteration=args.batch_size,
        learning_rate=args.learning_rate,
        lr_schedule="linear",
        warmup_ratio=0.05,
        seed=args.seed,
        advantage=AdvantageConfig(scale="group"),
        objective=ObjectiveConfig(aggregation="step_mean", kl_coef=args.kl_coef),
    )
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=reward)
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    settings |= {"grpo": config.to_dict(), "sampling": policy.sampling.to_dict()}
    args.folder.mkdir(parents=True, exist_ok=True)
    (args.folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")

    # Measure, train, measure again.
    with ExitStack() as stack:
        sinks: list[Any] = [stack.enter_context(JSONLSink(args.folder / "metrics.jsonl"))]
        if args.wandb:
            sinks.append(stack.enter_context(WandbSink(args.folder, project=args.wandb)))
        question = {"label": lambda row: row["question"]}
        before = measure_policy(policy, unseen, reward, num_actions_per_state=args.responses, **question)
        trainer.train(
            problems,
            num_iterations=num_iterations,
            sinks=sinks,
            checkpoint_dir=args.folder / "checkpoints",
            resume="auto" if args.resume else None,
        )
    policy.save_pretrained(args.folder / "model", trainer=trainer)
    report = compare_policies(before, policy, unseen, reward, **question)
    report.to_json(args.folder / "comparison.json")
    print(report)
    [[response]] = policy.generate_actions(unseen[:1], 1, temperature=0)
    print(f"\n{unseen[0]['question']}\n--> {response.text.strip()}")
    print(f"\nwritten: {args.folder}/")


if __name__ == "__main__":
    main()
