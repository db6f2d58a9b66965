"""A fitted value function and short iterations beside Stable-Baselines3's PPO, at equal numbers of environment steps.

Each run has the steps of the preset. Its policy is then evaluated in 20 episodes with random actions, as in training, and in 20
with the most likely ones, from resets that training does not use. PPO has the settings of rl-baselines3-zoo, and the library's
defaults where the zoo has none. Results go to a file, a line per run, and a run that is there is not made again: stop the
program at any time, and start it again.

    python -m benchmarks.control_fitted                                      # both sides, seeds 0 to 4; hours
    python -m benchmarks.control_fitted --envs CartPole-v1 --sides fitted    # without PPO; a minute
"""

import argparse
import importlib.util
import json
import platform
import time
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from adapters.control import FITTED_PRESETS, episode_starts, evaluate_policy, preset_for
from adapters.control.training.evaluation import EVALUATION_SEED

NUM_EPISODES = 20
"""Episodes of each evaluation."""

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
}
"""Settings of PPO in `hyperparams/ppo.yml` of DLR-RM/rl-baselines3-zoo; for InvertedPendulum those of version 3."""


def with_fitted_values(env_id: str, seed: int, total_steps: int | None) -> dict[str, float]:
    """Train with the preset, and evaluate."""
    preset = preset_for(env_id, credit="fitted")
    trainer = preset.make_trainer(seed=seed)
    steps = total_steps or preset.total_steps
    started = time.process_time()
    starts = episode_starts(preset.num_groups, seed=seed)
    history = trainer.train(starts, budget=("episodes/steps", steps), progress=False)
    seconds = time.process_time() - started
    sampled, greedy = (
        evaluate_policy(trainer.policy, num_episodes=NUM_EPISODES, deterministic=most_likely).mean_return
        for most_likely in (False, True)
    )
    return {"sampled": sampled, "greedy": greedy, "seconds": seconds, "steps": history[-1]["episodes/total_steps"]}


def with_ppo(env_id: str, seed: int, total_steps: int | None) -> dict[str, float]:
    """Train Stable-Baselines3's PPO, and evaluate."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy as evaluate
    from stable_baselines3.common.vec_env import VecNormalize

    settings = dict(ZOO.get(env_id, {}))
    num_envs, normalizes = settings.pop("n_envs", 1), settings.pop("normalize", False)
    for name in ("learning_rate", "clip_range"):
        if isinstance(settings.get(name), str):
            settings[name] = Falling(float(settings[name].rpartition(" ")[2]))
    envs = make_vec_env(env_id, num_envs, seed=seed)
    if normalizes:
        envs = VecNormalize(envs, gamma=settings.get("gamma", 0.99))
    learner = PPO("MlpPolicy", envs, seed=seed, device="cpu", **settings)
    steps = total_steps or preset_for(env_id, credit="fitted").total_steps
    started = time.process_time()
    learner.learn(steps)
    seconds = time.process_time() - started
    tested = make_vec_env(env_id, 1, seed=EVALUATION_SEED)
    if normalizes:
        tested = VecNormalize(tested, training=False, norm_reward=False)
        tested.obs_rms = envs.obs_rms
    sampled, greedy = (
        float(np.mean(evaluate(learner, tested, NUM_EPISODES, deterministic=most_likely)[0]))
        for most_likely in (False, True)
    )
    return {"sampled": sampled, "greedy": greedy, "seconds": seconds, "steps": float(learner.num_timesteps)}


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


SIDES = {"fitted": with_fitted_values, "PPO": with_ppo}


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
    return f"{env_id:25s} {side:7s}{steps:8,.0f} {'  '.join(columns)} {seconds:8.1f} s   {each}"


def main() -> None:
    """Make the runs that are missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", nargs="+", choices=FITTED_PRESETS, default=list(FITTED_PRESETS))
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(5)))
    parser.add_argument("--steps", type=int, help="of each run; default: the preset's")
    parser.add_argument("--file", type=Path, default=Path("runs/control_fitted.jsonl"), help="results, a line per run")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", category=DeprecationWarning)  # raised by MuJoCo's models
    has_ppo = importlib.util.find_spec("stable_baselines3") is not None
    peer = f"Stable-Baselines3 {version('stable_baselines3')}" if has_ppo else "Stable-Baselines3 is not installed"
    print(f"torch {torch.__version__}, one thread, {platform.machine()}, {peer}")
    titles = "steps   sampled    worst    greedy    worst      CPU      sampled, by seed"
    print(f"{'environment':25s} {'':7s}   {titles}", flush=True)
    args.file.parent.mkdir(parents=True, exist_ok=True)
    for env_id in args.envs:
        for side in args.sides:
            if side == "PPO" and not has_ppo:
                continue
            for seed in args.seeds:
                if (side, env_id, seed) not in made_runs(args.file):
                    result = SIDES[side](env_id, seed, args.steps)
                    row = {"side": side, "environment": env_id, "seed": seed, "result": result}
                    with args.file.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
            found = made_runs(args.file)
            print(report(env_id, side, [found[side, env_id, seed] for seed in args.seeds]), flush=True)


if __name__ == "__main__":
    main()
