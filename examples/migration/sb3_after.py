"""The script of sb3_before.py for this library. `tests/integration/test_migration.py` counts the changed lines.

python examples/migration/sb3_after.py
"""

import argparse

import torch

from adapters.control import episode_starts, evaluate_policy, preset_for, train_control
from adapters.tracking import TensorBoardSink
from grpo.checkpoint import best_checkpoint, load_weights

parser = argparse.ArgumentParser()
parser.add_argument("--env", default="CartPole-v1")
parser.add_argument("--steps", type=int, default=30_000)
parser.add_argument("--output", default="runs/cartpole")
args = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(0)
preset = preset_for(args.env)
policy = preset.make_policy()
trainer, starts = preset.make_trainer(policy, seed=0), episode_starts(preset.num_groups)
with TensorBoardSink(args.output) as sink:
    train_control(trainer, starts, total_steps=args.steps, evaluate_every=4_000, folder=args.output, sinks=[sink])
trainer.save_checkpoint(f"{args.output}/final")

best = preset.make_policy()
load_weights(best_checkpoint(args.output), best)
print(f"best policy: {evaluate_policy(best, num_episodes=20, seed=2)}")
