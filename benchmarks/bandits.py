"""Compare GRPO with classic bandit strategies at the same budget of pulls, on three non-stationary bandits.

- dynamic: five arms, 100 steps of 32 pulls, regimes of 20 steps (`adapters/bandits/demo.py`); 20 seeds;
- abrupt: Garivier & Moulines 2008, three Bernoulli arms, 10,000 pulls, the best arm changes at 3,000 and back at 5,000;
- random walk: Sutton & Barto, exercise 2.5, ten Gaussian arms with drifting means, 10,000 pulls.

The classic strategies learn after every pull. GRPO pulls a group with one policy, then learns. On the last two bandits, the 50
runs are rows of one policy table that is trained jointly; with plain SGD the rows do not affect each other.

    python -m benchmarks.bandits                     # about two minutes
    python -m benchmarks.bandits --seeds 3 --runs 10
"""

import argparse
from collections.abc import Callable

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
    Testbed,
    ThompsonSampling,
    Uniform,
    abrupt_testbed,
    cumulative_regret,
    dynamic_testbed,
    play,
    random_walk_testbed,
    segment_starts,
)
from adapters.bandits.demo import (
    NUM_STEPS,
    PULLS_PER_STEP,
    Run,
    play_classics,
    summarise,
    train_naive,
    train_tuned,
)
from grpo import GRPOConfig, GRPOTrainer, ObjectiveConfig

HORIZON, GROUP_SIZE, BLOCK = 10_000, 8, 40


def pull_with_grpo(testbed: Testbed, *, learning_rate: float, kl_coef: float, seed: int = 0) -> np.ndarray:
    """Arms [R, P] that GRPO pulls: groups of 8, one SGD step per group, a k3 penalty towards the uniform policy."""
    num_runs = testbed.num_runs
    policy = SoftmaxPolicy(testbed.num_arms, num_states=num_runs)
    config = GRPOConfig(
        group_size=GROUP_SIZE,
        max_grad_norm=None,
        seed=seed,
        objective=ObjectiveConfig(kl_coef=kl_coef, kl_estimator="k3"),
    )
    trainer = GRPOTrainer(
        config=config,
        policy=policy,
        reward_model=BanditReward(testbed),
        optimizer=torch.optim.SGD(policy.parameters(), lr=learning_rate * num_runs),  # the loss is a mean over runs
    )
    runs, arms = torch.arange(num_runs), []
    for _ in range(HORIZON // GROUP_SIZE):
        batch = trainer.collect(runs)
        arms.append(torch.as_tensor(batch.actions).view(num_runs, GROUP_SIZE).numpy())
        trainer.update(batch)
    return np.concatenate(arms, axis=1)


def pull_with(strategy: Callable[[int, int], Baseline], testbed: Testbed) -> np.ndarray:
    """Arms [R, P] that a classic strategy pulls."""
    return play(strategy(testbed.num_runs, testbed.num_arms), testbed, num_pulls=HORIZON).arms


def pulls_to_half(arms: np.ndarray, best: np.ndarray, change: int) -> int:
    """Pulls after `change` until half of the pulls in a block of 40 are on the best arm; -1 if not before the next change."""
    on_best = (arms == best).mean(0)[change:]
    until = np.flatnonzero(np.diff(best[change:]))
    on_best = on_best[: until[0] + 1] if len(until) else on_best
    blocks = on_best[: len(on_best) // BLOCK * BLOCK].reshape(-1, BLOCK).mean(1)
    reached = np.flatnonzero(blocks >= 0.5)
    return int(reached[0]) * BLOCK if len(reached) else -1


def dynamic_table(num_seeds: int) -> None:
    """Print the table of the dynamic bandit."""
    print(f"\nDynamic bandit, {num_seeds} seeds. The structured reward is .27 by chance, and .75 for the oracle.\n")
    print("| strategy | arm 3 | arm 0 | structured reward | steps to 50 % | regret | max after uniform |")
    print("|---|---|---|---|---|---|---|")
    means = np.repeat(dynamic_testbed().means[0][:NUM_STEPS], PULLS_PER_STEP, axis=0)
    rows: dict[str, list[tuple[dict[str, float], float]]] = {}
    for seed in range(num_seeds):
        for run in (train_tuned(seed), train_naive(seed), *play_classics(seed)):
            rows.setdefault(run.name, []).append((summarise(run), regret_of(run, means)))
    for name, results in rows.items():
        figures = {key: np.array([result[key] for result, _ in results]) for key in results[0][0]}
        regrets = np.array([regret for _, regret in results])
        reward = figures["structured reward"]
        print(
            f"| {name} | {figures['arm 3'].mean():.3f} | {figures['arm 0'].mean():.3f} "
            f"| {reward.mean():.3f} ± {reward.std():.3f} "
            f"| {figures['steps to 50 %'].mean():.1f} | {regrets.mean():.0f} | {figures['max after uniform'].max():.2f} |"
        )


def regret_of(run: Run, means: np.ndarray) -> float:
    """Best possible reward minus received reward, summed over all pulls (the rewards have no noise)."""
    return float(means.max(1).sum() - PULLS_PER_STEP * run.rewards.sum())


def long_table(title: str, make: Callable[[], Testbed], strategies: dict[str, Callable[[Testbed], np.ndarray]]) -> None:
    """Print each strategy's regret over 10,000 pulls and, if changes are given, its number of pulls to follow each change."""
    print(f"\n{title}\n")
    testbed = make()
    means = testbed.means[:, :HORIZON]
    best = means[0].argmax(1)
    is_shared = bool((testbed.means == testbed.means[:1]).all())
    changes = [int(start) for start in segment_starts(best)[1:]] if is_shared else []
    print("| strategy | regret |" + "".join(f" pulls to 50 % after {change:,} |" for change in changes))
    print("|---|---|" + "---|" * len(changes))
    for name, pull in strategies.items():
        arms = pull(make())
        regrets = cumulative_regret(means, arms)[:, -1]
        waits = [pulls_to_half(arms, best, change) for change in changes]
        error = regrets.std() / np.sqrt(len(regrets))
        print(
            f"| {name} | {regrets.mean():.0f} ± {error:.0f} |"
            + "".join(f" {wait if wait >= 0 else 'never'} |" for wait in waits)
        )


def abrupt_strategies() -> dict[str, Callable[[Testbed], np.ndarray]]:
    """Strategies with their papers' constants for this horizon and two changes."""
    return {
        "GRPO, pulled towards uniform (k3, .01)": lambda bed: pull_with_grpo(bed, learning_rate=4.0, kl_coef=0.01),
        "GRPO without the KL penalty": lambda bed: pull_with_grpo(bed, learning_rate=4.0, kl_coef=0.0),
        "sliding-window UCB": lambda bed: pull_with(lambda r, k: SlidingWindowUCB(r, k, horizon=HORIZON), bed),
        "discounted UCB": lambda bed: pull_with(lambda r, k: DiscountedUCB(r, k, horizon=HORIZON), bed),
        "discounted Thompson .99": lambda bed: pull_with(lambda r, k: ThompsonSampling(r, k, discount=0.99), bed),
        "EXP3.S": lambda bed: pull_with(lambda r, k: EXP3S(r, k, horizon=HORIZON, num_changes=2), bed),
        "gradient bandit": lambda bed: pull_with(
            lambda r, k: GradientBandit(r, k, baseline_step_size=0.05, logit_decay=0.001), bed
        ),
        "UCB1": lambda bed: pull_with(UCB1, bed),
        "Thompson": lambda bed: pull_with(ThompsonSampling, bed),
        "uniform": lambda bed: pull_with(Uniform, bed),
    }


def walk_strategies() -> dict[str, Callable[[Testbed], np.ndarray]]:
    """Strategies with likelihoods and ranges for Gaussian rewards of unit variance."""
    return {
        "GRPO, pulled towards uniform (k3, .02)": lambda bed: pull_with_grpo(bed, learning_rate=2.0, kl_coef=0.02),
        "GRPO without the KL penalty": lambda bed: pull_with_grpo(bed, learning_rate=2.0, kl_coef=0.0),
        "sliding-window UCB": lambda bed: pull_with(
            lambda r, k: SlidingWindowUCB(r, k, horizon=HORIZON, reward_range=1.0), bed
        ),
        "discounted UCB": lambda bed: pull_with(
            lambda r, k: DiscountedUCB(r, k, horizon=HORIZON, reward_range=1.0), bed
        ),
        "discounted Thompson .998": lambda bed: pull_with(
            lambda r, k: ThompsonSampling(r, k, discount=0.998, likelihood="gaussian"), bed
        ),
        "EXP3.S": lambda bed: pull_with(
            lambda r, k: EXP3S(r, k, horizon=HORIZON, num_changes=20, reward_low=-4.0, reward_high=4.0), bed
        ),
        "gradient bandit": lambda bed: pull_with(
            lambda r, k: GradientBandit(r, k, baseline_step_size=0.05, logit_decay=0.002), bed
        ),
        "UCB1": lambda bed: pull_with(lambda r, k: UCB1(r, k, reward_range=2.0), bed),
        "Thompson": lambda bed: pull_with(lambda r, k: ThompsonSampling(r, k, likelihood="gaussian"), bed),
        "uniform": lambda bed: pull_with(Uniform, bed),
    }


def main() -> None:
    """Print the three tables as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="of the dynamic bandit")
    parser.add_argument("--runs", type=int, default=50, help="of the two long ones")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dynamic_table(args.seeds)
    long_table(
        f"Abruptly changing Bernoulli bandit, {args.runs} runs: regret ± standard error",
        lambda: abrupt_testbed(num_runs=args.runs),
        abrupt_strategies(),
    )
    long_table(
        f"Random walk, {args.runs} runs: regret ± standard error",
        lambda: random_walk_testbed(num_runs=args.runs),
        walk_strategies(),
    )


if __name__ == "__main__":
    main()
