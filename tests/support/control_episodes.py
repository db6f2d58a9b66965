"""Episodes of control that no environment has played, and episodes that are played again by hand."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adapters.control import Episode, EpisodePolicy
from adapters.control.policy.observations import as_batch


def episode_of(
    rewards: Sequence[float],
    *,
    observations: Any = None,
    actions: Any = None,
    final: Any = None,
    terminated: bool = True,
) -> Episode:
    """Observations of two numbers, and actions, are 0 where they are not given."""
    count = len(rewards)
    return Episode(
        observations=torch.zeros(count, 2) if observations is None else torch.as_tensor(observations).float(),
        actions=torch.zeros(count, dtype=torch.int64) if actions is None else actions,
        rewards=torch.tensor(rewards, dtype=torch.float64),
        terminated=terminated,
        truncated=not terminated,
        final_observation=torch.zeros(2) if final is None else torch.as_tensor(final).float(),
        log_probs=torch.zeros(count),
    )


class Hand:
    """Plays what a policy has sampled from a seed again, in an environment of its own, and compares every number."""

    def __init__(self, env: Any, policy: EpisodePolicy, seed: int) -> None:
        self.env, self.policy, self.seed = env, policy, seed
        self.all_steps = 0
        self._begin()

    def _begin(self) -> None:
        self.observation, _ = self.env.reset(seed=self.seed)
        self.total, self.num_steps = 0.0, 0

    def _encoded(self) -> Tensor:
        batch, _ = as_batch(self.policy.pool.observation_space, self.observation)
        return self.policy.encoder(batch)[0]

    def play(self, episode: Episode) -> tuple[float, int] | None:
        """Take the actions of an episode, or of the next part of one. Returns the return and the length of one that ends."""
        limit = self.policy.max_episode_steps or self.policy.time_limit
        terminated = truncated = False
        for number, action in enumerate(self.policy.distribution.to_env(episode.actions)):
            assert torch.equal(self._encoded(), episode.observations[number])
            reward = 0.0
            for _ in range(self.policy.repeat):
                if not (terminated or truncated):
                    self.observation, paid, terminated, truncated, _ = self.env.step(action)
                    reward += float(paid)
                    self.num_steps += 1
                    self.all_steps += 1
                    truncated = truncated or self.num_steps == limit
            assert reward == float(episode.rewards[number])
            self.total += reward
        assert torch.equal(self._encoded(), episode.final_observation)
        assert (episode.terminated, episode.truncated) == (terminated, truncated and not terminated)
        if not (terminated or truncated):
            return None
        ended = self.total, self.num_steps
        self._begin()
        return ended
