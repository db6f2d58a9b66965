"""A script for Stable-Baselines3: PPO on CartPole, with evaluations, saving, loading and TensorBoard.

python examples/migration/sb3_before.py
"""

import argparse

import torch
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy

parser = argparse.ArgumentParser()
parser.add_argument("--env", default="CartPole-v1")
parser.add_argument("--steps", type=int, default=30_000)
parser.add_argument("--output", default="runs/cartpole")
args = parser.parse_args()

torch.set_num_threads(1)
env = make_vec_env(args.env, n_envs=8, seed=0)
eval_env = make_vec_env(args.env, n_envs=1, seed=1)
evaluations = EvalCallback(eval_env, eval_freq=500, n_eval_episodes=20, best_model_save_path=args.output)
model = PPO("MlpPolicy", env, n_steps=64, tensorboard_log=args.output, seed=0)
model.learn(total_timesteps=args.steps, callback=evaluations)
model.save(f"{args.output}/final")

best = PPO.load(f"{args.output}/best_model")
mean_return, std_return = evaluate_policy(best, eval_env, n_eval_episodes=20)
print(f"best policy: return {mean_return:.1f} +- {std_return:.1f} in 20 episodes")
