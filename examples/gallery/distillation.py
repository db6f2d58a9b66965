"""A robot, distilled: a small policy learns from a large one, in episodes of its own and without a reward.

    python -m examples.gallery.distillation           # about a minute on one core; requires the extra [robots]
    python -m examples.gallery.distillation --seed 1

The robot is HalfCheetah, simulated by MuJoCo. A state is the start of an episode. An action is a whole episode, and each
decision on six torques is a step. GRPO trains the teacher first. The student has a tenth of the teacher's weights. The
student acts, and the teacher says how likely it would have done the same. The reward is 0, the teacher is the reference
policy, and the whole loss is the KL to it. The estimate k2 has the gradient of KL(student || teacher). This is on-policy
distillation (Agarwal et al. 2024, arXiv:2306.13649).

The baseline is a student of the same size that learns from the reward, with as many steps of the environment and the
teacher's settings. The distillation differs from them in the loss and the learning rate. The table has mean returns of 20
new episodes with the most likely actions. The script writes distillation.gif, a film: above the teacher, below its student.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from adapters.control import (
    EnvironmentReward,
    Episode,
    EpisodeOptions,
    EpisodePolicy,
    EpisodeStart,
    episode_starts,
    evaluate_policy,
    preset_for,
    record_frames,
    train_control,
)
from grpo import GRPOTrainer, ObjectiveConfig
from grpo.checks import check_policy
from grpo.errors import ConfigError

PRESET = preset_for("HalfCheetah-v5")
VIEW = {"lookat": [3.2, 0.0, 0.35], "distance": 2.1, "elevation": -6.0, "azimuth": 90.0}


def make_policy(*hidden: int) -> EpisodePolicy:
    options = EpisodeOptions(hidden=hidden, normalize_observations=True, max_episode_steps=PRESET.max_episode_steps)
    return PRESET.make_policy(options=options)


def nothing(_: list[EpisodeStart], actions: list[Episode]) -> Tensor:
    """The reward of the distillation."""
    return torch.zeros(len(actions))


def train(policy: EpisodePolicy, steps: int, seed: int, teacher: EpisodePolicy | None = None) -> EpisodePolicy:
    """Learn from a teacher, or from the reward of the environment."""
    config, reward = PRESET.make_config(seed), EnvironmentReward()
    if teacher is not None:
        objective = ObjectiveConfig(kl_coef=1.0, kl_estimator="k2", aggregation="step_mean")
        config, reward = replace(config, learning_rate=1e-3, objective=objective), nothing
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=reward, reference_policy=teacher)
    starts = episode_starts(PRESET.num_groups, seed=seed)
    train_control(trainer, starts, total_steps=steps, evaluate_every=steps, num_eval_episodes=1)
    return policy


def film(policies: list[EpisodePolicy], path: Path) -> None:
    """The first five seconds of an episode of each policy, one above the other."""
    how = {"every": 3, "num_frames": 34, "width": 320, "height": 72, "default_camera_config": VIEW}
    rows = zip(*(record_frames(policy, PRESET.env_id, **how) for policy in policies), strict=True)
    pictures = [Image.fromarray(np.concatenate(row)) for row in rows]
    palette = pictures[len(pictures) // 2].quantize(16)
    first, *others = (picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures)
    path.parent.mkdir(parents=True, exist_ok=True)
    first.save(path, save_all=True, append_images=others, duration=150, loop=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher-steps", type=int, default=400_000, help="of the teacher (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=60_000, help="of each student (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/gallery"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    teacher, *students = make_policy(64, 64), make_policy(23), make_policy(23)
    print(check_policy(students[0], episode_starts(2, seed=args.seed)(0), num_samples=64, strict=True))
    train(teacher, args.teacher_steps, args.seed)
    table = {
        "teacher": (args.teacher_steps, teacher),
        "student, distilled": (args.steps, train(students[0], args.steps, args.seed, teacher)),
        "student, by reward": (args.steps, train(students[1], args.steps, args.seed)),
    }
    print(f"\n{'':20s}{'weights':>10s}{'steps':>10s}{'return':>10s}")
    for name, (steps, policy) in table.items():
        weights = sum(weight.numel() for weight in policy.parameters())
        print(f"{name:20s}{weights:10,}{steps:10,}{evaluate_policy(policy).mean_return:10,.0f}")
    try:
        film([teacher, students[0]], args.folder / "distillation.gif")
        print(f"written: {args.folder}/distillation.gif")
    except ConfigError as error:
        print(f"no film: {error}")


if __name__ == "__main__":
    main()
