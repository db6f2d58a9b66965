"""UCB strategies with full, discounted or sliding-window memory. All runs are played in parallel.

Each strategy is a `Baseline`: `select(rng) -> arms[R]`, `update(arms[R], rewards[R])`. Ties are broken at random.

`reward_range` is the width of the rewards' noise: 1 for rewards in [0, 1], 2 for unit-variance Gaussian noise, because
Hoeffding's bound uses a range of 2 s for sub-Gaussian noise with standard deviation s.
"""

from math import ceil, log, sqrt

import numpy as np
from jaxtyping import Bool, Float64

from grpo.arguments import require_integers, require_numbers
from grpo.errors import ConfigError

from .play import Arms, Rewards, require_discount


def random_argmax(values: Float64[np.ndarray, "R K"], rng: np.random.Generator) -> Arms:
    """Argmax of each row, with ties broken at random."""
    best: Bool[np.ndarray, "R K"] = values == values.max(axis=1, keepdims=True)
    return np.where(best, rng.random(values.shape), -1.0).argmax(axis=1)


class _UpperConfidence:
    """Base class of the UCB strategies: pull argmax_a mean_a + bonus_a. Arms with a count of 0 come first.

    bonus_a = reward_range * scale * sqrt(exploration * log(n) / counts_a), where n is the sum of the counts
    """

    scale = 1.0
    """Factor of the bonus."""
    discount = 1.0
    """Factor of counts and sums per pull. 1 never forgets."""

    def __init__(self, num_runs: int, num_arms: int, *, exploration: float = 0.5, reward_range: float = 1.0) -> None:
        owner = type(self).__name__
        require_integers(owner, 1, num_runs=num_runs, num_arms=num_arms)
        require_numbers(owner, exploration=exploration, reward_range=reward_range)
        if exploration < 0 or reward_range <= 0:
            raise ConfigError(
                f"{owner}: exploration must be >= 0 and reward_range > 0; got {exploration}, {reward_range}."
            )
        self.exploration = exploration
        self.reward_range = reward_range
        self.runs = np.arange(num_runs)
        self.counts = np.zeros((num_runs, num_arms))
        self.sums = np.zeros((num_runs, num_arms))
        self.total_count = 0.0

    def select(self, rng: np.random.Generator) -> Arms:
        """Pull the arm with the largest index."""
        counts = np.maximum(self.counts, 1e-300)  # no division by 0: arms without a pull come first anyway
        log_count = log(max(self.total_count, 1.0))
        bonus = self.reward_range * self.scale * np.sqrt(self.exploration * log_count / counts)
        return random_argmax(np.where(self.counts > 0, self.sums / counts + bonus, np.inf), rng)

    def update(self, arms: Arms, rewards: Rewards) -> None:
        """Discount the memory, then add one pull per run."""
        self.total_count = self.discount * self.total_count + 1
        self.counts *= self.discount
        self.sums *= self.discount
        self.counts[self.runs, arms] += 1
        self.sums[self.runs, arms] += rewards


class UCB1(_UpperConfidence):
    """UCB1 for stationary arms. It never forgets.

    index_a(t) = mean_a + reward_range * sqrt(exploration * log(t) / counts_a)

    Args:
        exploration: A larger value explores more. Garivier & Moulines' simulations use 1/2, Auer et al. use 2.
        reward_range: Width of the rewards' range.

    Source:
        Auer, Cesa-Bianchi & Fischer 2002, Machine Learning 47, figure 1; Garivier & Moulines 2008, arXiv:0805.3415, section 4,
        for the constant.
    """


class DiscountedUCB(_UpperConfidence):
    """UCB with counts and sums that decay by a factor per pull.

    index_a(t) = mean_a + 2 * reward_range * sqrt(exploration * log(sum_b counts_b) / counts_a),
    counts and sums are multiplied by `discount` at every pull

    Args:
        horizon: Total number of pulls per run. It sets the default discount.
        discount: Discount factor per pull. None uses 1 - 1 / (4 sqrt(horizon)) as in the paper's simulations. A smaller value
            forgets faster.
        exploration: A larger value explores more.
        reward_range: Width of the rewards' range.

    Source:
        Garivier & Moulines 2008, arXiv:0805.3415, section 2 (D-UCB) and section 4.
    """

    scale = 2.0

    def __init__(
        self,
        num_runs: int,
        num_arms: int,
        *,
        horizon: int,
        discount: float | None = None,
        exploration: float = 0.5,
        reward_range: float = 1.0,
    ) -> None:
        super().__init__(num_runs, num_arms, exploration=exploration, reward_range=reward_range)
        require_integers("DiscountedUCB", 1, horizon=horizon)
        self.discount = 1 - 1 / (4 * sqrt(horizon)) if discount is None else discount
        require_discount("DiscountedUCB", self.discount)


class SlidingWindowUCB(_UpperConfidence):
    """UCB over a sliding window of the last `window` pulls.

    index_a(t) = mean_a + reward_range * sqrt(exploration * log(min(t, window)) / counts_a),
    where mean_a and counts_a are over the window

    Args:
        horizon: Total number of pulls per run. It sets the default window.
        window: Number of pulls in the window. None uses 4 sqrt(horizon log(horizon)), as in the paper's simulations. A
            smaller window forgets faster.
        exploration: A larger value explores more.
        reward_range: Width of the rewards' range.

    Source:
        Garivier & Moulines 2008, arXiv:0805.3415, section 2 (SW-UCB) and section 4.
    """

    def __init__(
        self,
        num_runs: int,
        num_arms: int,
        *,
        horizon: int,
        window: int | None = None,
        exploration: float = 0.5,
        reward_range: float = 1.0,
    ) -> None:
        super().__init__(num_runs, num_arms, exploration=exploration, reward_range=reward_range)
        require_integers("SlidingWindowUCB", 1, horizon=horizon)
        self.window = max(1, ceil(4 * sqrt(horizon * log(horizon)))) if window is None else window
        require_integers("SlidingWindowUCB", 1, window=self.window)
        self.num_pulls = 0
        self._arms = np.zeros((self.window, num_runs), dtype=np.int64)
        self._rewards = np.zeros((self.window, num_runs))

    def update(self, arms: Arms, rewards: Rewards) -> None:
        """Add one pull per run and drop the oldest pull from the window."""
        slot = self.num_pulls % self.window  # the arrays are rings: the oldest pull is overwritten
        if self.num_pulls >= self.window:
            self.counts[self.runs, self._arms[slot]] -= 1
            self.sums[self.runs, self._arms[slot]] -= self._rewards[slot]
            self.total_count -= 1
        self._arms[slot] = arms
        self._rewards[slot] = rewards
        super().update(arms, rewards)
        self.num_pulls += 1
