"""The script of trl_before.py for this library. `tests/integration/test_migration.py` counts the changed lines.

python examples/migration/trl_after.py --model Qwen/Qwen3-0.6B
"""

import argparse

import torch
from datasets import Dataset
from peft import LoraConfig

from adapters.llm import CompletionRewards, HFPolicy, SamplingConfig
from adapters.tracking import TensorBoardSink
from grpo import AdvantageConfig, GRPOConfig, GRPOTrainer, ObjectiveConfig


def right(completions, answer, **kwargs):
    return [float(completion.strip() == truth) for completion, truth in zip(completions, answer, strict=True)]


def short(completions, **kwargs):
    return [-len(completion) / 10 for completion in completions]


parser = argparse.ArgumentParser()
parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
parser.add_argument("--output", default="runs/addition")
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()

numbers = range(8)
dataset = Dataset.from_list([{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in numbers for b in numbers])
lora = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")

config = GRPOConfig(
    group_size=8,
    num_states_per_iteration=8,
    learning_rate=1e-4,
    lr_schedule="linear",
    advantage=AdvantageConfig(scale="group", std_eps=1e-4),
    objective=ObjectiveConfig(aggregation="step_mean"),
    autocast_dtype="bfloat16" if torch.cuda.is_available() else None,
    seed=0,
)
policy = HFPolicy.from_pretrained(args.model, lora=lora, sampling=SamplingConfig(max_new_tokens=8))
trainer = GRPOTrainer(config=config, policy=policy, reward_model=CompletionRewards([right, short], [1.0, 0.5]))
saved = {"checkpoint_dir": args.output, "checkpoint_every": 4, "resume": "auto" if args.resume else None}
with TensorBoardSink(args.output) as sink:
    trainer.train(dataset, num_epochs=1, sinks=[sink], **saved)
policy.save_pretrained(args.output, trainer=trainer)
