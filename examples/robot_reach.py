"""A robot arm learns to reach targets, with a reward made of named terms.

    python -m examples.robot_reach                    # one to two minutes on one core; requires the extra [robots]
    python -m examples.robot_reach --steps 1000000    # a longer run

The arm has two joints, and the target changes with every episode. All episodes of a group have the same target and the same
start, so differences in reward within a group come from the arm's movements alone. The script writes reach.gif, a film of the
trained policy, to runs/robot_reach/, and prints a message if the film cannot be rendered.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import gymnasium as gym
import imageio.v3 as imageio
import numpy as np
import torch
from torch import Tensor

from adapters.control import (
    EnvironmentReward,
    Episode,
    EpisodePolicy,
    StepReward,
    effort,
    episode_starts,
    evaluate_policy,
    preset_for,
    record_frames,
    train_control,
)
from grpo import WeightedRewards
from grpo.errors import ConfigError

FROM_ABOVE = {"trackbodyid": 0, "distance": 0.8, "elevation": -90.0, "azimuth": 90.0}
TARGET = slice(8, 10)  # part of Reacher's observation: vector from the fingertip to the target, in metres


def precision(episode: Episode) -> Tensor:
    """A custom reward term, [L]: 1 on the target, 1/e at a distance of two centimetres, nearly 0 beyond ten centimetres."""
    return torch.exp(-episode.observations[:, TARGET].norm(dim=1) / 0.02)


# Each term is reported under its name (`rewards/precision/mean`). Training uses the weighted sum.
REWARD = WeightedRewards(
    {"env": EnvironmentReward(), "precision": StepReward(precision), "effort": StepReward(effort)},
    weights={"env": 1.0, "precision": 0.2, "effort": 0.1},
)


def mean_miss(policy: EpisodePolicy, num_episodes: int = 50) -> float:
    """Mean distance between fingertip and target at the end of an episode, in centimetres."""
    env, misses = gym.make("Reacher-v5"), []
    for seed in range(num_episodes):
        (observation, _), ended = env.reset(seed=seed), False
        while not ended:
            action, _ = policy.predict(observation, deterministic=True)
            observation, _, terminated, truncated, _ = env.step(action)
            ended = terminated or truncated
        misses.append(100 * np.linalg.norm(observation[TARGET]))
    env.close()
    return float(np.mean(misses))


def report(when: str, policy: EpisodePolicy) -> None:
    # Evaluate with the environment's reward alone, so that the custom terms do not affect the result.
    own = evaluate_policy(policy, num_episodes=50)
    print(f"{when}: {mean_miss(policy):.1f} cm from the target at the end, {own}")


def film(policy: EpisodePolicy, folder: Path) -> str:
    """Record three episodes as a GIF, or as single PNG files if GIFs cannot be written. Returns the path."""
    how = {"width": 240, "height": 240, "default_camera_config": FROM_ABOVE}
    frames = record_frames(policy, "Reacher-v5", every=4, num_frames=39, **how)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        imageio.imwrite(folder / "reach.gif", np.stack(frames), duration=100, loop=0)
        return f"{folder}/reach.gif"
    except OSError as error:
        for number, frame in enumerate(frames):
            imageio.imwrite(folder / f"reach_{number:02d}.png", frame)
        return f"{folder}/reach_*.png, because GIFs cannot be written here ({error})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400_000, help="training steps (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/robot_reach"))
    args = parser.parse_args()
    torch.set_num_threads(1)  # more threads do not help networks this small
    torch.manual_seed(args.seed)

    preset = replace(preset_for("Reacher-v5"), initial_log_std=-1.0)  # small movements at first, since effort costs
    policy = preset.make_policy()
    trainer = preset.make_trainer(policy, seed=args.seed, reward_model=REWARD)
    report("before", policy)
    train_control(
        trainer,
        episode_starts(preset.num_groups, seed=args.seed),
        total_steps=args.steps,
        evaluate_every=max(args.steps // 5, 1),
    )
    report("after ", policy)
    try:
        print(f"written: {film(policy, args.folder)}")
    except ConfigError as error:
        print(f"no film: {error}")


if __name__ == "__main__":
    main()
