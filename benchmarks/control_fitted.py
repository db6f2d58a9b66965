"""A fitted value function and short iterations beside Stable-Baselines3's PPO, at equal numbers of environment steps.

Each run has the steps of the preset. Its policy is then evaluated in 20 episodes with random
actions, as in training, and in 20 with the most likely ones, from resets that training does not use. PPO has the
settings of rl-baselines3-zoo, and the library's defaults where the zoo has none; on Taxi it is MaskablePPO, with the
mask. Where our preset repeats actions, PPO also runs in a wrapper that repeats them. Beside the CPU-seconds of a run
are its updates, steps of the optimizer, and the milliseconds of CPU that it took for each of them. Where our preset
makes far fewer updates than PPO, a second run of ours has more epochs, and makes as many. With `--until`, a run ends
when an evaluation with the most likely actions reaches the preset's threshold, and its CPU-seconds without evaluations
are the result. Results go to a file, a line per run, and a run that is there is not made again: stop the program at any
time, and start it again.

    python -m benchmarks.control_fitted                                      # all sides, 5 seeds, and 3 of PPO; hours
    python -m benchmarks.control_fitted --envs CartPole-v1 --sides fitted    # without PPO; a minute
    python -m benchmarks.control_fitted --envs CartPole-v1 --until           # CPU-seconds until it is learned

LunarLander needs `pip install "gymnasium[box2d]"`, DoorKey `pip install minigrid`, and PPO on Taxi `pip install sb3-contrib`.
"""

import argparse
import importlib.util
import json
import platform
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import nn

from adapters.control import FITTED_PRESETS, ControlPreset, episode_starts, evaluate_policy, preset_for
from adapters.control.training.evaluation import EVALUATION_SEED

NUM_EPISODES = 20
"""Episodes of each evaluation."""

SEEDS = {"fitted": range(10, 15), "more epochs": range(10, 13), "PPO": range(10, 13), "PPO, repeated": range(10, 13)}
"""Seeds of each side. No setting was chosen on them."""

EPOCHS = {"CartPole-v1": 18, "Acrobot-v1": 12}
"""Epochs with which our side makes as many updates as PPO, where the preset makes far fewer."""

DOOR_KEY = "MiniGrid-DoorKey-5x5-v0"

LIMITS = {"CliffWalking-v1": 1_000}
"""Maximum length of episodes in evaluations, where the environment has no limit of its own."""

EVALUATE_EVERY = 2_000
"""Steps between evaluations with `--until`."""

ROBOT = {"normalize": True, "n_envs": 1, "n_steps": 512} | {
    "policy_kwargs": {
        "log_std_init": -2,
        "ortho_init": False,
        "activation_fn": nn.ReLU,
        "net_arch": {"pi": [256, 256], "vf": [256, 256]},
    }
}

ZOO: dict[str, dict[str, Any]] = {
    "CartPole-v1": {"n_envs": 8, "n_steps": 32, "batch_size": 256, "gae_lambda": 0.8, "gamma": 0.98, "n_epochs": 20}
    | {"learning_rate": "falls from 1e-3", "clip_range": "falls from 0.2"},
    "Acrobot-v1": {"normalize": True, "n_envs": 16, "n_steps": 256, "gae_lambda": 0.94, "gamma": 0.99, "n_epochs": 4},
    "Pendulum-v1": {"n_envs": 4, "n_steps": 1024, "gae_lambda": 0.95, "gamma": 0.9, "n_epochs": 10}
    | {"learning_rate": 1e-3, "clip_range": 0.2, "use_sde": True, "sde_sample_freq": 4},
    "MountainCar-v0": {
        "normalize": True,
        "n_envs": 16,
        "n_steps": 16,
        "gae_lambda": 0.98,
        "gamma": 0.99,
        "n_epochs": 4,
    },
    "MountainCarContinuous-v0": {"normalize": True, "n_envs": 1, "n_steps": 8, "batch_size": 256, "gamma": 0.9999}
    | {"learning_rate": 7.77e-5, "ent_coef": 0.00429, "clip_range": 0.1, "n_epochs": 10, "gae_lambda": 0.9}
    | {"max_grad_norm": 5.0, "vf_coef": 0.19, "use_sde": True}
    | {"policy_kwargs": {"log_std_init": -3.29, "ortho_init": False}},
    "InvertedPendulum-v5": {"normalize": True, "n_envs": 1, "n_steps": 32, "batch_size": 64, "gamma": 0.999}
    | {"learning_rate": 2.22425e-4, "ent_coef": 1.37976e-7, "clip_range": 0.4, "n_epochs": 5, "gae_lambda": 0.9}
    | {"max_grad_norm": 0.3, "vf_coef": 0.19816},
    "LunarLander-v3": {"n_envs": 16, "n_steps": 1024, "batch_size": 64, "gae_lambda": 0.98, "gamma": 0.999}
    | {"n_epochs": 4, "ent_coef": 0.01},
    "HalfCheetah-v5": ROBOT
    | {"batch_size": 64, "gamma": 0.98, "learning_rate": 2.0633e-5, "ent_coef": 0.000401762, "clip_range": 0.1}
    | {"n_epochs": 20, "gae_lambda": 0.92, "max_grad_norm": 0.8, "vf_coef": 0.58096},
    "Hopper-v5": ROBOT
    | {"batch_size": 32, "gamma": 0.999, "learning_rate": 9.80828e-5, "ent_coef": 0.00229519, "clip_range": 0.2}
    | {"n_epochs": 5, "gae_lambda": 0.99, "max_grad_norm": 0.7, "vf_coef": 0.835671},
    "Swimmer-v5": {"normalize": True, "gamma": 0.9999},
    "Reacher-v5": {"normalize": True, "n_envs": 1, "n_steps": 512, "batch_size": 32, "gamma": 0.9}
    | {"learning_rate": 0.000104019, "ent_coef": 7.52585e-8, "clip_range": 0.3, "n_epochs": 5, "gae_lambda": 1.0}
    | {"max_grad_norm": 0.9, "vf_coef": 0.950368},
    DOOR_KEY: {"normalize": True, "n_envs": 8, "n_steps": 128, "batch_size": 64, "gae_lambda": 0.95, "gamma": 0.99}
    | {"n_epochs": 10, "learning_rate": 2.5e-4, "clip_range": 0.2},
}
"""Settings of PPO in `hyperparams/ppo.yml` of DLR-RM/rl-baselines3-zoo, of the version that it has: LunarLander v2, robots v3,
Reacher v2."""


class Repeated(gymnasium.Wrapper):
    """Takes each action several times, and sums the rewards.

    Args:
        env: The environment.
        repeat: Number of steps.
    """

    def __init__(self, env: gymnasium.Env, repeat: int) -> None:
        super().__init__(env)
        self._repeat = repeat

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Take the action until the episode ends, at most `repeat` times."""
        total = 0.0
        for _ in range(self._repeat):
            observation, reward, terminated, truncated, info = self.env.step(action)
            total += float(reward)
            if terminated or truncated:
                break
        return observation, total, terminated, truncated, info


class WithMasks(gymnasium.Wrapper):
    """Taxi with its masks where MaskablePPO looks for them."""

    def action_masks(self) -> Any:
        """The mask of the present state."""
        taxi: Any = self.unwrapped
        return taxi.action_mask(taxi.s).astype(bool)


def preset_of(env_id: str, total_steps: int | None) -> ControlPreset:
    """The preset, with other steps if they are given."""
    return preset_for(env_id, credit="fitted", total_steps=total_steps)


class Evaluations:
    """Evaluations until a threshold is reached, and the CPU-seconds that they take.

    Args:
        threshold: The mean return. None: there are no evaluations.
        mean_return: Evaluates the policy with the most likely actions.
    """

    def __init__(self, threshold: float | None, mean_return: Any) -> None:
        self._threshold, self._mean_return = threshold, mean_return
        self._next = EVALUATE_EVERY
        self.seconds = 0.0
        self.has_reached = False

    def look(self, steps: float) -> bool:
        """Whether the threshold is reached after a number of training steps."""
        if self._threshold is None or steps < self._next:
            return False
        self._next += EVALUATE_EVERY
        started = time.process_time()
        self.has_reached = self._mean_return() >= self._threshold
        self.seconds += time.process_time() - started
        return self.has_reached

    def on_iteration(self, trainer: Any, metrics: Mapping[str, float]) -> str | None:
        """A callback of `GRPOTrainer.train`."""
        return "stop" if self.look(metrics["episodes/total_steps"]) else None


def with_fitted_values(
    env_id: str, seed: int, total_steps: int | None, until: bool = False, has_more_epochs: bool = False
) -> dict[str, float]:
    """Train with the preset, and evaluate."""
    preset = preset_of(env_id, total_steps)
    preset = replace(preset, num_epochs=EPOCHS[env_id]) if has_more_epochs else preset
    trainer = preset.make_trainer(seed=seed)

    def mean_return(deterministic: bool) -> float:
        return evaluate_policy(
            trainer.policy, num_episodes=NUM_EPISODES, deterministic=deterministic, max_steps=LIMITS.get(env_id)
        ).mean_return

    evaluations = Evaluations(preset.threshold if until else None, lambda: mean_return(True))
    started = time.process_time()
    history = trainer.train(
        episode_starts(preset.num_groups, seed=seed),
        budget=("episodes/steps", preset.total_steps),
        callbacks=[evaluations],
        progress=False,
    )
    seconds = time.process_time() - started - evaluations.seconds
    updates = sum(metrics["train/num_updates"] for metrics in history)
    spent = {"seconds": seconds, "steps": history[-1]["episodes/total_steps"], "updates": updates}
    if until:
        return spent | {"reached": float(evaluations.has_reached)}
    return spent | {"sampled": mean_return(False), "greedy": mean_return(True)}


def with_ppo(
    env_id: str, seed: int, total_steps: int | None, until: bool = False, repeats: bool = False
) -> dict[str, float]:
    """Train Stable-Baselines3's PPO, and evaluate."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy as evaluate_without_masks
    from stable_baselines3.common.vec_env import VecNormalize

    preset = preset_of(env_id, total_steps)
    repeat = preset.repeat if repeats else 1
    settings = dict(ZOO.get(env_id, {}))
    num_envs, normalizes = settings.pop("n_envs", 1), settings.pop("normalize", False)
    for name in ("learning_rate", "clip_range"):
        if isinstance(settings.get(name), str):
            settings[name] = Falling(float(settings[name].rpartition(" ")[2]))
    algorithm: Any = PPO
    evaluate: Any = evaluate_without_masks
    if preset.action_mask is not None:
        from sb3_contrib import MaskablePPO
        from sb3_contrib.common.maskable.evaluation import evaluate_policy as evaluate_with_masks

        algorithm, evaluate = MaskablePPO, evaluate_with_masks

    def make(limit: int | None = None) -> gymnasium.Env:
        env = (
            gymnasium.make(env_id)
            if preset.environment is None
            else gymnasium.wrappers.FlattenObservation(preset.environment())
        )
        env = env if limit is None else gymnasium.wrappers.TimeLimit(env, limit)
        env = WithMasks(env) if preset.action_mask is not None else env
        return env if repeat == 1 else Repeated(env, repeat)

    envs = make_vec_env(make, num_envs, seed=seed)
    tested = make_vec_env(partial(make, LIMITS.get(env_id)), 1, seed=EVALUATION_SEED)
    if normalizes:
        envs = VecNormalize(envs, gamma=settings.get("gamma", 0.99))
        tested = VecNormalize(tested, training=False, norm_reward=False)
        tested.obs_rms = envs.obs_rms
    learner = algorithm("MlpPolicy", envs, seed=seed, device="cpu", **settings)

    def mean_return(deterministic: bool) -> float:
        tested.seed(EVALUATION_SEED)
        return float(np.mean(evaluate(learner, tested, NUM_EPISODES, deterministic=deterministic)[0]))

    evaluations = Evaluations(preset.threshold if until else None, lambda: mean_return(True))

    class Evaluate(BaseCallback):
        """Called between an update and the next rollout."""

        def _on_rollout_start(self) -> None:
            evaluations.look(repeat * self.num_timesteps)

        def _on_step(self) -> bool:
            return not evaluations.has_reached

    num_updates = 0

    def count(*_: Any) -> None:
        nonlocal num_updates
        num_updates += 1

    learner.policy.optimizer.register_step_post_hook(count)
    started = time.process_time()
    learner.learn(preset.total_steps // repeat, callback=Evaluate())
    seconds = time.process_time() - started - evaluations.seconds
    spent = {"seconds": seconds, "steps": float(repeat * learner.num_timesteps), "updates": float(num_updates)}
    if until:
        return spent | {"reached": float(evaluations.has_reached)}
    return spent | {"sampled": mean_return(False), "greedy": mean_return(True)}


class Falling:
    """A schedule of Stable-Baselines3 that falls to 0 over a run.

    Args:
        first: Its value at the beginning.
    """

    def __init__(self, first: float) -> None:
        self._first = first

    def __call__(self, left: float) -> float:
        """The value where a fraction `left` of the run is left."""
        return self._first * left


SIDES = {
    "fitted": with_fitted_values,
    "more epochs": partial(with_fitted_values, has_more_epochs=True),
    "PPO": with_ppo,
    "PPO, repeated": partial(with_ppo, repeats=True),
}


def until(side: str) -> str:
    """The name of a side whose runs end at a threshold."""
    return f"{side}, until learned"


def made_runs(path: Path) -> dict[tuple[str, str, int], dict[str, float]]:
    """The runs in a file, by side, environment and seed."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    rows = [json.loads(line) for line in lines]
    return {(row["side"], row["environment"], row["seed"]): row["result"] for row in rows}


def report(env_id: str, side: str, results: Sequence[dict[str, float]]) -> str:
    """One line of the table."""
    sampled, greedy = (sorted(row[name] for row in results) for name in ("sampled", "greedy"))
    columns = [f"{np.median(values):8.1f} {values[0]:8.1f}" for values in (sampled, greedy)]
    each = " ".join(f"{row['sampled']:.5g}" for row in results)
    seconds = float(np.median([row["seconds"] for row in results]))
    steps = float(np.median([row["steps"] for row in results]))
    # the first runs in a file may be older than this count
    updates = float(np.median([row.get("updates", np.nan) for row in results]))
    spent = f"{seconds:8.1f} s {updates:8,.0f} {1_000 * seconds / max(updates, 1):6.2f} ms"
    return f"{env_id:25s} {side:14s}{steps:8,.0f} {'  '.join(columns)} {spent}   {each}"


def report_until(env_id: str, side: str, results: Sequence[dict[str, float]]) -> str:
    """One line of the table of CPU-seconds."""
    seconds = float(np.median([row["seconds"] if row["reached"] else np.inf for row in results]))
    each = " ".join(f"{row['seconds']:.3g}{'' if row['reached'] else ' (not learned)'}" for row in results)
    steps = float(np.median([row["steps"] for row in results]))
    return f"{env_id:25s} {side:14s} {seconds:8.1f} s of CPU {steps:8,.0f} steps   {each}"


def main() -> None:
    """Make the runs that are missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    environments = list(FITTED_PRESETS)
    parser.add_argument("--envs", nargs="+", choices=environments, default=environments)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--seeds", nargs="+", type=int, help="default: 10 to 14, and 10 to 12 of PPO")
    parser.add_argument("--steps", type=int, help="of each run; default: the preset's")
    parser.add_argument("--until", action="store_true", help="end runs when they have learned")
    parser.add_argument("--file", type=Path, default=Path("runs/control_fitted.jsonl"), help="results, a line per run")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", category=DeprecationWarning)  # raised by MuJoCo's models
    has_ppo = importlib.util.find_spec("stable_baselines3") is not None
    peer = f"Stable-Baselines3 {version('stable_baselines3')}" if has_ppo else "Stable-Baselines3 is not installed"
    print(f"torch {torch.__version__}, one thread, {platform.machine()}, {peer}")
    titles = "steps   sampled    worst    greedy    worst      CPU    updates  per update   sampled, by seed"
    print(f"{'environment':25s} {'':14s}   {'until learned' if args.until else titles}", flush=True)
    args.file.parent.mkdir(parents=True, exist_ok=True)
    for env_id in args.envs:
        preset = FITTED_PRESETS[env_id]
        if args.until and preset.threshold is None:
            continue
        for side in args.sides:
            if side.startswith("PPO") and not has_ppo:
                continue
            if side == "more epochs" and env_id not in EPOCHS:
                continue
            if side == "PPO, repeated" and preset.repeat == 1:
                continue
            name, seeds = until(side) if args.until else side, args.seeds or SEEDS[side]
            for seed in seeds:
                if (name, env_id, seed) not in made_runs(args.file):
                    result = SIDES[side](env_id, seed, args.steps, args.until)
                    row = {"side": name, "environment": env_id, "seed": seed, "result": result}
                    with args.file.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
            found = made_runs(args.file)
            results = [found[name, env_id, seed] for seed in seeds]
            print((report_until if args.until else report)(env_id, side, results), flush=True)


if __name__ == "__main__":
    main()
