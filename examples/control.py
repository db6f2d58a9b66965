"""Train a policy on a Gymnasium environment without a critic. Episodes with the same start are compared step by step.

    python -m examples.control                                  # CartPole-v1: learned in seconds
    python -m examples.control --env HalfCheetah-v5             # a robot; requires the extra [robots]
    python -m examples.control --env MountainCarContinuous-v0   # any environment, with default settings
    python -m examples.control --env CliffWalking-v1 --max-episode-steps 200   # an environment without a time limit
    python -m examples.control --env Hopper-v5 --video          # also records a video

Use `--import ale_py` for environments of other packages. To resume a stopped run, start it again. The script writes
metrics.jsonl, curve.json, learning_curve.png, the newest checkpoints and the best, and the video to runs/control/ENV/seed-0/.
"""

import argparse
import importlib
from pathlib import Path

import gymnasium as gym
import torch

from adapters.control import (
    episode_starts,
    evaluate_policy,
    plot_learning_curves,
    preset_for,
    record_video,
    train_control,
)
from grpo import JSONLSink
from grpo.checkpoint import best_checkpoint


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", default="CartPole-v1", metavar="ID")
    parser.add_argument(
        "--import", dest="package", metavar="PACKAGE", help="package to import first, to register its environments"
    )
    parser.add_argument("--steps", type=int, help="training steps (default: the preset's)")
    parser.add_argument("--max-episode-steps", type=int, help="maximum length of training episodes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="default: runs/control/ENV/seed-SEED")
    parser.add_argument("--video", action="store_true", help="record an episode of the best policy (mp4)")
    args = parser.parse_args()
    if args.package:
        importlib.import_module(args.package)
    torch.set_num_threads(1)  # more threads do not help networks this small
    torch.manual_seed(args.seed)

    preset = preset_for(args.env, max_episode_steps=args.max_episode_steps)
    policy = preset.make_policy()
    trainer = preset.make_trainer(policy, seed=args.seed)
    folder = args.folder or Path("runs/control") / args.env / f"seed-{args.seed}"
    total_steps = args.steps or preset.total_steps
    with JSONLSink(folder / "metrics.jsonl") as sink:
        curve = train_control(
            trainer,
            episode_starts(preset.num_groups, seed=args.seed),
            total_steps=total_steps,
            evaluate_every=min(preset.evaluate_every, total_steps),
            sinks=[sink],
            folder=folder,
        )
    trainer.load_checkpoint(best_checkpoint(folder))
    print(f"\n{args.env} after {curve.steps[-1]:,} steps, at {curve.steps[-1] / curve.seconds[-1]:,.0f} a second")
    print(f"best policy, 100 new episodes: {evaluate_policy(policy, num_episodes=100, seed=1)}")
    learned = None if preset.threshold is None else curve.steps_to(preset.threshold)
    if learned is not None:
        print(f"{preset.threshold:g} reached after {learned:,} steps")
    plot_learning_curves({"GRPO": [curve]}, folder / "learning_curve.png", title=args.env, threshold=preset.threshold)
    print(f"written: {folder}/learning_curve.png")
    if args.video:
        print(f"written: {record_video(policy, gym.spec(args.env), folder / 'video')}")


if __name__ == "__main__":
    main()
