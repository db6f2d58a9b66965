"""A policy tracks the best arm of a bandit that changes.

There are five arms. Every 20 steps the regime changes: all arms equal, arm 3 best, all equal, arm 0 best. One iteration of GRPO
is 32 pulls in one step of the environment. This script trains a first configuration that fails and the corrected one, and
compares both with classic strategies. `notebooks/grpo_dynamic_bandit_demo.ipynb` explains the failure and the correction.

    python -m examples.dynamic_bandit                # trains, prints a table, writes runs/dynamic_bandit.png
    python -m examples.dynamic_bandit --seed 7
"""

import argparse
import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from adapters.bandits import (
    EXP3S,
    UCB1,
    BanditReward,
    Baseline,
    DiscountedUCB,
    GradientBandit,
    SlidingWindowUCB,
    SoftmaxPolicy,
    ThompsonSampling,
    best_arm_probability,
    dynamic_regimes,
    dynamic_testbed,
    mean_by_regime,
    play,
    pull_fractions,
    structured_reward,
    time_to_reach,
)
from adapters.bandits.plots import plot_dynamic_runs
from grpo import (
    AdvantageConfig,
    GRPOConfig,
    GRPOTrainer,
    ObjectiveConfig,
    ObjectiveInputs,
    ObjectiveOutput,
    grpo_objective,
)
from grpo.surrogates import Clip

NUM_ARMS, NUM_STEPS, PULLS_PER_STEP = 5, 100, 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Record of one strategy: its rewards and probabilities in each step."""

    name: str
    rewards: np.ndarray
    """[S] mean reward of each step's 32 pulls."""
    probabilities: np.ndarray
    """[S + 1, K] probabilities of the arms in each step, and after the last step. Classic strategies record fractions
    of pulls instead."""
    losses: np.ndarray | None = None
    """[S] loss of each step. None if the strategy is not trained by gradients."""


@dataclass(slots=True)
class Recorder:
    """A sink that records metrics and the policy's probabilities."""

    policy: SoftmaxPolicy
    rewards: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    probabilities: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.probabilities.append(self.policy.probabilities()[0].numpy().copy())

    def log(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Record one iteration."""
        self.rewards.append(metrics["rewards/mean"])
        self.losses.append(metrics.get("train/total_loss", 0.0))
        self.probabilities.append(self.policy.probabilities()[0].numpy().copy())

    def close(self) -> None:
        """There is nothing to close."""

    def run(self, name: str) -> Run:
        """The record of the whole run."""
        return Run(
            name=name,
            rewards=np.array(self.rewards),
            probabilities=np.array(self.probabilities),
            losses=np.array(self.losses),
        )


def train_ours(seed: int, *, progress: bool = False) -> Run:
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
    recorder = Recorder(policy)
    trainer.train(["the bandit"], num_iterations=NUM_STEPS, sinks=[recorder], progress=progress)
    return recorder.run("GRPO, ours")


class CopyPolicyToReference:
    """A sink that copies the policy to the reference after every iteration."""

    def __init__(self, policy: SoftmaxPolicy, reference: SoftmaxPolicy) -> None:
        self.policy, self.reference = policy, reference

    def log(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Copy the policy."""
        self.reference.load_state_dict(self.policy.state_dict())

    def close(self) -> None:
        """There is nothing to close."""


def train_original(seed: int, *, progress: bool = False) -> Run:
    """Train the first configuration of this demo. It fails after the first change of the best arm."""
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
            advantage=AdvantageConfig(scale="batch"),
            objective=objective,
        ),
        policy=policy,
        reference_policy=reference,
        reward_model=BanditReward(dynamic_testbed(pulls_per_step=PULLS_PER_STEP)),
        optimizer=torch.optim.AdamW(policy.parameters(), lr=0.005),
        objective=with_sampled_entropy,
    )
    recorder = Recorder(policy)
    sinks = [recorder, CopyPolicyToReference(policy, reference)]
    trainer.train(["the bandit"], num_iterations=NUM_STEPS, sinks=sinks, progress=progress)
    return recorder.run("GRPO, original")


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


def print_table(runs: list[Run]) -> None:
    """Print one line per strategy."""
    columns = ("arm 3", "arm 0", "structured reward", "steps to 50 %")
    print(f"\n{'':22s}" + "".join(f"{column:>19s}" for column in columns))
    for run in runs:
        figures = summarise(run)
        print(f"{run.name:22s}" + "".join(f"{figures[column]:19.3f}" for column in columns))
    print(
        "\narm 3, arm 0: share of pulls on the best arm while it was best. Structured reward: chance .27, oracle .75.\n"
        "Sliding-window UCB is best: it keeps one mean per arm, which is exact here, and learns after every pull. GRPO\n"
        "updates a policy by gradients, once per 32 pulls, and its exploration bonus costs some reward."
    )


def main() -> None:
    """Train, compare, plot."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, default=Path("runs/dynamic_bandit.png"))
    args = parser.parse_args()
    torch.set_num_threads(1)  # more threads do not help five logits
    print("Training GRPO on a bandit with a moving best arm: 100 steps of 32 pulls ...")
    ours = train_ours(args.seed, progress=True)
    print("Training the first configuration of this demo ...")
    original = train_original(args.seed, progress=True)
    classics = play_classics(args.seed)
    print_table([ours, original, *classics])
    plot_dynamic_runs([ours, original], args.plot, dynamic_regimes(NUM_STEPS), dynamic_testbed().means[0])
    print(f"\nPlot: {args.plot}")


if __name__ == "__main__":
    main()
