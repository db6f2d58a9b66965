"""Evaluation of a policy without noise, on episode starts that training does not use."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from adapters.control.environments.episodes import EpisodeStart
from adapters.control.policy.episode_policy import EpisodePolicy
from adapters.control.policy.rollouts import Record
from grpo import preserved_random_state
from grpo.arguments import require_instances, require_integers, with_checked_arguments

EVALUATION_SEED = 2**31
"""First seed of resets for evaluation. Training seeds are spread over all 32-bit numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Returns and lengths of E episodes."""

    returns: NDArray[np.float64]
    """Undiscounted return of each episode, [E]."""
    lengths: NDArray[np.int64]
    """Number of environment steps of each episode, [E]."""

    def __post_init__(self) -> None:
        for name in ("returns", "lengths"):
            require_instances("Evaluation", np.ndarray, "an array [E]", **{name: getattr(self, name)})

    @property
    def mean_return(self) -> float:
        """Mean return over the episodes."""
        return float(self.returns.mean())

    def __str__(self) -> str:
        """Mean and standard deviation of the returns, and the mean length, as text."""
        spread, length = self.returns.std(), self.lengths.mean()
        return f"return {self.mean_return:.1f} +- {spread:.1f} in {len(self.returns)} episodes of {length:.0f} steps"


@with_checked_arguments
def evaluate_policy(
    policy: EpisodePolicy,
    *,
    num_episodes: int = 20,
    seed: int = EVALUATION_SEED,
    deterministic: bool = True,
    max_steps: int | None = None,
) -> Evaluation:
    """Run episodes from resets with seeds `seed`, `seed + 1`, ... The policy and random generators do not change.

    Args:
        policy: The policy. Do not call this while the policy samples, because both use its pool.
        num_episodes: Number of episodes E. A larger number gives more exact means.
        seed: Seed of the first reset, and of the noise.
        deterministic: Whether to take the most likely action at each step, instead of a random one.
        max_steps: Maximum number of steps per episode, in addition to the environment's own limit.

    Raises:
        ConfigError: `num_episodes` or `max_steps` is below 1.
    """
    require_instances("evaluate_policy", EpisodePolicy, "an EpisodePolicy", policy=policy)
    require_integers("evaluate_policy", 1, num_episodes=num_episodes)
    require_integers("evaluate_policy", 0, seed=seed)
    require_integers("evaluate_policy", 1, optional=True, max_steps=max_steps)
    starts = [EpisodeStart(seed=seed + number) for number in range(num_episodes)]
    with preserved_random_state():
        record = act_out(policy, starts, seed=seed, deterministic=deterministic, max_steps=max_steps)
    returns = [float(part.sum()) for part in record.rewards.split(record.lengths)]
    return Evaluation(returns=np.array(returns), lengths=np.array(record.num_steps))


def act_out(
    policy: EpisodePolicy, starts: list[EpisodeStart], *, seed: int, deterministic: bool, max_steps: int | None
) -> Record:
    """Run one episode from each start in evaluation mode, and restore the mode of every module."""
    training = {module: module.training for module in policy.modules()}
    policy.eval()
    try:
        return policy.roll_out(starts, seed=seed, max_steps=max_steps, deterministic=deterministic)
    finally:
        for module, mode in training.items():  # module by module, because a user may keep one in evaluation mode
            module.training = mode
