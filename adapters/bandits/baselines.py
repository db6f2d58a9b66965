"""Randomised strategies: Thompson sampling, EXP3.S and the gradient bandit. All runs are played in parallel in numpy.

Each strategy is a `Baseline`: `select(rng) -> arms[R]`, `update(arms[R], rewards[R])`.

Rewards: Thompson sampling requires rewards in [0, 1], or `likelihood="gaussian"` for unit-variance noise. EXP3.S maps
the range from `reward_low` to `reward_high` to [0, 1] and clips rewards outside that range. With Gaussian noise, clipping
shrinks large gaps between arms; the effect is small if the range covers three standard deviations around the means. The
gradient bandit takes any rewards.
"""

from math import e, log, sqrt
from typing import Literal, TypeAlias, assert_never

import numpy as np
from jaxtyping import Float64

from grpo.arguments import require_instances, require_integers, require_numbers
from grpo.errors import ConfigError, RewardError

from .play import Arms, Rewards, require_discount

Likelihood: TypeAlias = Literal["bernoulli", "gaussian"]


def sample_rows(probabilities: Float64[np.ndarray, "R K"], rng: np.random.Generator) -> Arms:
    """Draw one arm per row by inverting the cumulative distribution function. The last arm absorbs the rounding error."""
    below = np.cumsum(probabilities[:, :-1], axis=1) <= rng.random((len(probabilities), 1))
    return below.sum(axis=1)


class ThompsonSampling:
    """Draw the arms' means from the posterior and pull the best arm. With `discount` < 1 the posterior forgets.

    Each pull multiplies all counts and sums by `discount`, then adds 1 to the pulled arm's count, and the reward to its sum.
    The mean of an arm is drawn from Beta(1 + sums_a, 1 + counts_a - sums_a) for "bernoulli", and from
    N(sums_a / (1 + counts_a), 1 / (1 + counts_a)) for "gaussian". A reward between 0 and 1 counts as a fractional success.

    Args:
        discount: Discount factor per pull. 1 is plain Thompson sampling. A smaller discount forgets faster; an unpulled arm
            returns to the prior.
        likelihood: Likelihood of the rewards. "gaussian" has unit variance and a N(0, 1) prior.

    Source:
        Thompson 1933; with discount: Raj & Kalyani 2017, arXiv:1707.09727, algorithm 1.
    """

    def __init__(
        self, num_runs: int, num_arms: int, *, discount: float = 1.0, likelihood: Likelihood = "bernoulli"
    ) -> None:
        require_integers("ThompsonSampling", 1, num_runs=num_runs, num_arms=num_arms)
        require_discount("ThompsonSampling", discount)
        require_instances("ThompsonSampling", Likelihood, likelihood=likelihood)
        self.discount = discount
        self.likelihood: Likelihood = likelihood
        self.runs = np.arange(num_runs)
        self.counts = np.zeros((num_runs, num_arms))
        self.sums = np.zeros((num_runs, num_arms))

    def select(self, rng: np.random.Generator) -> Arms:
        """Pull the best arm of one posterior draw."""
        match self.likelihood:
            case "bernoulli":
                failures = np.maximum(self.counts - self.sums, 0.0)
                return rng.beta(1 + self.sums, 1 + failures).argmax(axis=1)
            case "gaussian":
                noise = rng.standard_normal(self.counts.shape)
                return (self.sums / (1 + self.counts) + noise / np.sqrt(1 + self.counts)).argmax(axis=1)
            case _:
                assert_never(self.likelihood)

    def update(self, arms: Arms, rewards: Rewards) -> None:
        """Discount the posterior, then add one pull per run.

        Raises:
            RewardError: The likelihood is Bernoulli, and a reward is outside [0, 1].
        """
        if self.likelihood == "bernoulli" and (rewards.min() < 0 or rewards.max() > 1):
            raise RewardError(
                f"ThompsonSampling: likelihood='bernoulli' requires rewards in [0, 1]; got {rewards.min():g} to "
                f"{rewards.max():g}. Use likelihood='gaussian', or rescale the rewards."
            )
        self.counts *= self.discount
        self.sums *= self.discount
        self.counts[self.runs, arms] += 1
        self.sums[self.runs, arms] += rewards


class EXP3S:
    """Exponential weights against an adversary that may change its best arm.

    p_a = (1 - gamma) w_a / sum_b w_b + gamma / K;  w_a <- w_a exp(gamma x_a / (K p_a)) + e alpha / K * sum_b w_b,
    x_a = the rescaled reward of the pulled arm, 0 for the others

    Args:
        horizon: Total number of pulls per run, T.
        num_changes: Number of changes of the best arm. There are S = num_changes + 1 segments.
        exploration: Gamma in EXP3.S. None uses min(1, sqrt(K (S log(K T) + e) / ((e - 1) T))). A larger value explores more.
        sharing: Alpha in EXP3.S. None uses 1 / T. A larger value forgets faster.
        reward_low: Reward that is mapped to 0. Smaller rewards are clipped.
        reward_high: Reward that is mapped to 1. Larger rewards are clipped.

    Source:
        Auer, Cesa-Bianchi, Freund & Schapire 2002, SIAM J. Comput. 32(1), figure 4 and corollary 8.3.
    """

    def __init__(
        self,
        num_runs: int,
        num_arms: int,
        *,
        horizon: int,
        num_changes: int,
        exploration: float | None = None,
        sharing: float | None = None,
        reward_low: float = 0.0,
        reward_high: float = 1.0,
    ) -> None:
        require_integers("EXP3S", 1, num_runs=num_runs, num_arms=num_arms, horizon=horizon)
        require_integers("EXP3S", 0, num_changes=num_changes)
        given = {"exploration": exploration, "sharing": sharing, "reward_low": reward_low, "reward_high": reward_high}
        require_numbers("EXP3S", **{name: value for name, value in given.items() if value is not None})
        segments = num_changes + 1
        tuned = sqrt(num_arms * (segments * log(num_arms * horizon) + e) / ((e - 1) * horizon))
        self.exploration = min(1.0, tuned) if exploration is None else exploration
        self.sharing = 1 / horizon if sharing is None else sharing
        if not 0 < self.exploration <= 1 or self.sharing < 0 or reward_low >= reward_high:
            raise ConfigError(
                f"EXP3S: exploration must lie in (0, 1], sharing >= 0 and reward_low < reward_high; got "
                f"{self.exploration}, {self.sharing}, {reward_low}, {reward_high}."
            )
        self.reward_low = reward_low
        self.reward_high = reward_high
        self.num_arms = num_arms
        self.runs = np.arange(num_runs)
        self.weights = np.full((num_runs, num_arms), 1 / num_arms)

    def probabilities(self) -> Float64[np.ndarray, "R K"]:
        """Probabilities of the next arm."""
        return (1 - self.exploration) * self.weights + self.exploration / self.num_arms

    def select(self, rng: np.random.Generator) -> Arms:
        """Draw one arm per run."""
        return sample_rows(self.probabilities(), rng)

    def update(self, arms: Arms, rewards: Rewards) -> None:
        """Update the weights with the rewards of the pulled arms, and normalise the weights to sum 1."""
        scaled = np.clip((rewards - self.reward_low) / (self.reward_high - self.reward_low), 0.0, 1.0)
        chosen = self.probabilities()[self.runs, arms]
        weights = self.weights.copy()
        weights[self.runs, arms] *= np.exp(self.exploration / self.num_arms * scaled / chosen)
        weights += e * self.sharing / self.num_arms  # times the sum of the old weights, which is 1
        self.weights = weights / weights.sum(axis=1, keepdims=True)


class GradientBandit:
    """Stochastic gradient ascent on softmax preferences, with a running-average baseline.

    H_a <- (1 - logit_decay) H_a + step_size (r - baseline) (1{a pulled} - pi_a),  pi = softmax(H);
    the baseline is the average of the rewards before this one (the first reward is its own baseline)

    Args:
        step_size: A larger step learns faster and forgets faster.
        baseline_step_size: Step size of the baseline. None averages all rewards. A number uses
            baseline <- baseline + number * (r - baseline), which follows a changing reward level.
        logit_decay: Decay of the preferences per pull. 0 gives the algorithm of the book. A positive decay keeps the policy
            closer to uniform, so that it still tries bad arms and finds changes.

    Source:
        Sutton & Barto, Reinforcement Learning, 2nd edition 2018, section 2.8, eq. 2.12.
    """

    def __init__(
        self,
        num_runs: int,
        num_arms: int,
        *,
        step_size: float = 0.1,
        baseline_step_size: float | None = None,
        logit_decay: float = 0.0,
    ) -> None:
        require_integers("GradientBandit", 1, num_runs=num_runs, num_arms=num_arms)
        require_numbers("GradientBandit", step_size=step_size, logit_decay=logit_decay)
        if baseline_step_size is not None:
            require_numbers("GradientBandit", baseline_step_size=baseline_step_size)
        averages = baseline_step_size is None or 0 < baseline_step_size <= 1
        if step_size <= 0 or not 0 <= logit_decay < 1 or not averages:
            raise ConfigError(
                f"GradientBandit: step_size must be > 0, logit_decay in [0, 1) and baseline_step_size in (0, 1] or "
                f"None; got {step_size}, {logit_decay}, {baseline_step_size}."
            )
        self.step_size = step_size
        self.baseline_step_size = baseline_step_size
        self.logit_decay = logit_decay
        self.num_pulls = 0
        self.runs = np.arange(num_runs)
        self.baseline = np.zeros(num_runs)
        self.preferences = np.zeros((num_runs, num_arms))

    def probabilities(self) -> Float64[np.ndarray, "R K"]:
        """Softmax of the preferences."""
        weights = np.exp(self.preferences - self.preferences.max(axis=1, keepdims=True))
        return weights / weights.sum(axis=1, keepdims=True)

    def select(self, rng: np.random.Generator) -> Arms:
        """Draw one arm per run."""
        return sample_rows(self.probabilities(), rng)

    def update(self, arms: Arms, rewards: Rewards) -> None:
        """Take one gradient step on the preferences, then update the baseline."""
        if self.num_pulls == 0:
            self.baseline = np.array(rewards, dtype=np.float64)
        self.num_pulls += 1
        direction = -self.probabilities()
        direction[self.runs, arms] += 1
        advantage = (rewards - self.baseline)[:, None]
        self.preferences = (1 - self.logit_decay) * self.preferences + self.step_size * advantage * direction
        share = 1 / self.num_pulls if self.baseline_step_size is None else self.baseline_step_size
        self.baseline = self.baseline + share * (rewards - self.baseline)
