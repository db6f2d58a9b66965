"""A script for TRL: a data set, two reward functions, LoRA, TensorBoard, checkpoints and resuming.

python examples/migration/trl_before.py --model Qwen/Qwen3-0.6B
"""

import argparse

import torch
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer


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
    output_dir=args.output,
    num_generations=8,
    per_device_train_batch_size=64,
    max_completion_length=8,
    learning_rate=1e-4,
    reward_weights=[1.0, 0.5],
    num_train_epochs=1,
    save_steps=4,
    logging_steps=1,
    report_to="tensorboard",
    bf16=torch.cuda.is_available(),
    seed=0,
)
trainer = GRPOTrainer(
    model=args.model, args=config, reward_funcs=[right, short], train_dataset=dataset, peft_config=lora
)
trainer.train(resume_from_checkpoint=args.resume)
trainer.save_model(args.output)
