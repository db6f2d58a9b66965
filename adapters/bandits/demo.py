"""A policy tracks the best arm of a bandit that changes.

There are five arms. Every 20 steps the regime changes: all arms equal, arm 3 best, all equal, arm 0 best. One iteration of GRPO
is 32 pulls in one step of the environment. This script trains with naive settings, which fail, and with tuned settings, and
compares both with classic strategies. `notebooks/grpo_dynamic_bandit_demo.ipynb` explains the failure and the correction.
"""

import argparse
import copy
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from adapters.plots import is_installed
from grpo import (
    AdvantageConfig,
    GRPOConfig,
    GRPOTrainer,
    ObjectiveConfig,
    ObjectiveInputs,
    ObjectiveOutput,
    grpo_objective,
)
from grpo.arguments import install_command
from grpo.callbacks import RunningTrainer
from grpo.surrogates import Clip

from .baselines import EXP3S, GradientBandit, ThompsonSampling
from .metrics import best_arm_probability, mean_by_regime, pull_fractions, structured_reward, time_to_reach
from .play import Baseline, play
from .plots import Run, plot_dynamic_runs
from .policies import SoftmaxPolicy
from .rewards import BanditReward
from .testbeds import dynamic_regimes, dynamic_testbed
from .upper_confidence import UCB1, DiscountedUCB, SlidingWindowUCB

NUM_ARMS, NUM_STEPS, PULLS_PER_STEP = 5, 100, 32


class ProbabilityRecorder:
    """A callback that records the policy's probabilities before the run, and after each iteration."""

    def __init__(self, policy: SoftmaxPolicy) -> None:
        self.probabilities = [policy.probabilities()[0].numpy().copy()]

    def on_iteration(self, trainer: RunningTrainer, metrics: Mapping[str, float]) -> None:
        """Record the probabilities."""
        self.probabilities.append(trainer.policy.probabilities()[0].numpy().copy())


def train(name: str, trainer: GRPOTrainer, *, progress: bool) -> Run:
    """Train for 100 steps, and return the record of the run."""
    recorder = ProbabilityRecorder(trainer.policy)
    trainer.train(["the bandit"], num_iterations=NUM_STEPS, callbacks=[recorder], progress=progress)
    return Run(
        name=name,
        rewards=np.array([metrics["rewards/mean"] for metrics in trainer.history]),
        probabilities=np.array(recorder.probabilities),
        losses=np.array([metrics["train/total_loss"] for metrics in trainer.history]),
    )


def train_tuned(seed: int, *, progress: bool = False) -> Run:
    """Train with unscaled advantages, a KL penalty towards the uniform policy, and a learning rate that can follow the changes.

    The penalty is KL(pi || uniform) = log 5 - H(pi), so it acts as an entropy bonus. The gradient of `k3_weighted` is exact in
    expectation. The reference is the policy's own fixed uniform reference (`ScoresReference`).
    """
    policy = SoftmaxPolicy(num_actions=NUM_ARMS)
    trainer = GRPOTrainer(
        config=GRPOConfig(
            group_size=PULLS_PER_STEP,
            num_epochs_per_update=10,
            seed=seed,
            objective=ObjectiveConfig(surrogate=Clip(low=0.5, high=0.5), kl_coef=0.1, kl_estimator="k3_weighted"),
        ),
        policy=policy,
        reward_model=BanditReward(dynamic_testbed(pulls_per_step=PULLS_PER_STEP)),
        optimizer=torch.optim.AdamW(policy.parameters(), lr=0.05),
    )
    return train("tuned settings", trainer, progress=progress)


def train_naive(seed: int, *, progress: bool = False) -> Run:
    """Train with settings that are common for language models. They fail after the first change of the best arm.

    The reference is copied from the policy after every iteration, so that the KL penalty has no effect.
    """
    policy = SoftmaxPolicy(num_actions=NUM_ARMS)
    reference = copy.deepcopy(policy)
    objective = ObjectiveConfig(surrogate=Clip(low=0.3, high=0.3), kl_coef=0.1)

    def with_sampled_entropy(inputs: ObjectiveInputs) -> ObjectiveOutput:
        """An entropy bonus from the sample's mean of -log pi. Its value is right, but its gradient is 0 in expectation."""
        output = grpo_objective(inputs, objective)
        bonus = 0.02 * (-inputs.log_probs * inputs.weights.to(inputs.log_probs.dtype)).sum()
        return ObjectiveOutput(loss=output.loss - bonus, metrics=output.metrics)

    trainer = GRPOTrainer(
        config=GRPOConfig(
            group_size=PULLS_PER_STEP,
            num_epochs_per_update=10,
            seed=seed,
            reference_sync_every=1,
            advantage=AdvantageConfig(scale="batch"),
            objective=objective,
        ),
        policy=policy,
        reference_policy=reference,
        reward_model=BanditReward(dynamic_testbed(pulls_per_step=PULLS_PER_STEP)),
        optimizer=torch.optim.AdamW(policy.parameters(), lr=0.005),
        objective=with_sampled_entropy,
    )
    return train("naive settings", trainer, progress=progress)


def classic_strategies(num_runs: int) -> dict[str, Baseline]:
    """Classic strategies with their papers' constants for this horizon."""
    horizon = NUM_STEPS * PULLS_PER_STEP
    return {
        "sliding-window UCB": SlidingWindowUCB(num_runs, NUM_ARMS, horizon=horizon),
        "discounted UCB": DiscountedUCB(num_runs, NUM_ARMS, horizon=horizon),
        "discounted Thompson": ThompsonSampling(num_runs, NUM_ARMS, discount=0.99),
        "UCB1": UCB1(num_runs, NUM_ARMS),
        "Thompson": ThompsonSampling(num_runs, NUM_ARMS),
        "EXP3.S": EXP3S(num_runs, NUM_ARMS, horizon=horizon, num_changes=4),
        "gradient bandit": GradientBandit(num_runs, NUM_ARMS, baseline_step_size=0.05, logit_decay=0.001),
    }


def play_classics(seed: int) -> list[Run]:
    """Play each classic strategy with the same budget of 32 pulls per step. The strategies learn after every pull."""
    runs = []
    for name, strategy in classic_strategies(num_runs=1).items():
        testbed = dynamic_testbed(pulls_per_step=PULLS_PER_STEP, seed=seed)
        record = play(strategy, testbed, num_pulls=NUM_STEPS * PULLS_PER_STEP, seed=seed)
        fractions = pull_fractions(record.arms, NUM_ARMS, PULLS_PER_STEP)[0]
        rewards = record.rewards[0].reshape(NUM_STEPS, PULLS_PER_STEP).mean(1)
        runs.append(Run(name=name, rewards=rewards, probabilities=np.concatenate([fractions, fractions[-1:]])))
    return runs


def summarise(run: Run) -> dict[str, float]:
    """Metrics of one run: pulls on the best arms, time to find them, and reward."""
    regimes = dynamic_regimes(NUM_STEPS)
    means = dynamic_testbed().means[0]
    acting = run.probabilities[:-1]
    found = mean_by_regime(best_arm_probability(acting, means), regimes)
    waits = time_to_reach(best_arm_probability(acting, means), regimes)
    return {
        "arm 3": float(found[1]),
        "arm 0": float(found[3]),
        "structured reward": float(structured_reward(run.rewards, regimes)),
        "steps to 50 %": float(np.mean([waits[1], waits[3]])),
        "max after uniform": float(max(run.probabilities[20].max(), run.probabilities[60].max())),
    }


CHANCE, BEST_POSSIBLE = 0.27, 0.75
"""Mean reward, while one arm is best, of pulls at random and of pulls on the best arm only."""


def print_table(runs: list[Run], classics: list[Run]) -> None:
    """Print one line per strategy, and what the table shows."""
    columns = ("arm 3", "arm 0", "structured reward", "steps to 50 %")
    print(f"\n{'':22s}" + "".join(f"{column:>19s}" for column in columns))
    for run in [*runs, *classics]:
        figures = summarise(run)
        name = f"GRPO, {run.name}" if run in runs else run.name
        print(f"{name:22s}" + "".join(f"{figures[column]:19.3f}" for column in columns))
    naive, tuned = map(summarise, runs)
    print(
        "\narm 3, arm 0: share of pulls on this arm in the 20 steps in which it was the best one.\n"
        f"structured reward: mean reward of these 40 steps; chance {CHANCE}, best possible {BEST_POSSIBLE}.\n"
        "steps to 50 %: steps until half of the pulls are on the new best arm, mean of both changes; never counts as 20.\n\n"
        f"With the tuned settings, GRPO puts half of its pulls on the new best arm {tuned['steps to 50 %']:.1f} steps after a "
        f"change, and earns {tuned['structured reward']:.2f}.\nWith the naive settings, {naive['arm 0']:.0%} of its pulls are "
        f"on arm 0 while it is the best, and it earns {naive['structured reward']:.2f}.\n"
        "Sliding-window UCB is best: it knows that this is a bandit, and keeps one mean per arm. GRPO trains any policy, and\n"
        "here this policy has five numbers."
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, compare, plot.

    Args:
        arguments: The command line. None: that of this process.
    """
    parser = argparse.ArgumentParser(prog="demo", description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of both runs and of the classic strategies")
    parser.add_argument("--plot", type=Path, default=Path("runs/dynamic_bandit.png"), help="PNG file to write")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)  # more threads do not help five logits
    # it would say that nothing can be learned while all arms are alike
    logging.getLogger("grpo").setLevel(logging.ERROR)
    print(
        "A bandit has five arms, and the best one changes every 20 steps. GRPO trains a policy that picks 32 arms per step."
    )
    print(
        "Training with naive settings: learning rate .005, advantages divided by their deviation, no pull to all arms ..."
    )
    naive = train_naive(args.seed, progress=True)
    print("Training with tuned settings: learning rate .05, advantages not divided, a penalty for leaving arms out ...")
    tuned = train_tuned(args.seed, progress=True)
    print_table([naive, tuned], play_classics(args.seed))
    if is_installed():
        plot_dynamic_runs([naive, tuned], args.plot, dynamic_testbed().means[0])
        print(f"\nPlot: {args.plot}")
    else:
        print(f"\nThere is no picture, because it needs matplotlib: {install_command('tracking')}")


if __name__ == "__main__":
    main()
