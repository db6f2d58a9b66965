"""What a few hundred random actions show of an environment. `preset_for` chooses settings by it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import gymnasium
import numpy as np
import torch
from jaxtyping import Float64

from adapters.control.environments.episodes import EpisodeStart
from adapters.control.environments.masks import KEY, sample_mask
from adapters.control.environments.pools import EnvironmentPool, make_pool
from adapters.control.policy.observations import ObservationEncoder
from adapters.control.policy.rollouts import MAX_STEPS, take_steps

REPEAT = 4
"""Number of steps for which a probe repeats actions where single ones have found nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomSteps:
    """Steps of random actions."""

    num_steps: int
    """Number of environment steps."""
    rewards: Float64[np.ndarray, " S"]
    """The reward of each action."""
    num_terminated: int
    """Number of episodes that the environment has terminated."""
    longest: int | None
    """Number of steps of the longest episode. None: no episode has ended."""
    has_masks: bool
    """Whether the environment gives masks of allowed actions."""
    ranges: Float64[np.ndarray, " K"]
    """Largest less smallest value of each number of an observation."""


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What random actions have shown of an environment."""

    encoder: ObservationEncoder
    """Observations, without a mask of allowed actions."""
    action_space: gymnasium.Space
    """Actions."""
    limit: int | None
    """Maximum length of an episode in steps. None: the environment has no limit, and none was given."""
    single: RandomSteps
    """Steps of single actions."""
    repeated: RandomSteps | None
    """Steps of repeated actions, if single actions have found nothing: all rewards are equal, and no episode has terminated."""

    @cached_property
    def common_reward(self) -> float:
        """The commonest reward."""
        values, counts = np.unique(self.single.rewards, return_counts=True)
        return float(values[counts.argmax()])

    @cached_property
    def rare_rewards(self) -> float:
        """The fraction of steps with another reward than the commonest one."""
        return float((self.single.rewards != self.common_reward).mean())

    @property
    def is_dense(self) -> bool:
        """Whether most steps have another reward than the commonest one."""
        return self.rare_rewards > 0.5

    @property
    def has_masks(self) -> bool:
        """Whether the environment gives masks of allowed actions."""
        return self.single.has_masks

    @property
    def longest(self) -> int | None:
        """Number of steps of the longest episode with single actions. None: no episode has ended."""
        return self.single.longest

    @property
    def reach(self) -> float:
        """How far repeated actions reach: the ranges of an observation's numbers, relative to those with single actions, in the
        median. 1 if actions were not repeated."""
        if self.repeated is None:
            return 1.0
        moved = self.single.ranges > 0
        return float(np.median(self.repeated.ranges[moved] / self.single.ranges[moved])) if moved.any() else 1.0

    @property
    def num_steps(self) -> int:
        """Number of environment steps taken."""
        return self.single.num_steps + (0 if self.repeated is None else self.repeated.num_steps)


def probe(environment: str | Callable[[], gymnasium.Env], *, num_steps: int, max_episode_steps: int | None) -> Findings:
    """Take random actions in an environment. Equal environments have equal findings.

    Args:
        environment: An id, or a function that creates an environment.
        num_steps: Number of environment steps of single actions, and of repeated actions.
        max_episode_steps: Maximum length of an episode, in addition to the environment's own limit.

    Raises:
        ConfigError: The environment cannot be created, or its observations have no fixed size.
        ContractError: The environment raised, or what it returned does not fit its spaces.
    """
    pool = make_pool(environment, 1, vectorization="sync", infos=True)
    try:
        encoder = ObservationEncoder(pool.observation_space)
        limits = [limit for limit in (max_episode_steps, pool.max_episode_steps) if limit is not None]
        limit, repeated = min(limits, default=None), None
        single = _random_steps(pool, encoder, num_steps, limit or MAX_STEPS, repeat=1)
        has_found_nothing = single.num_terminated == 0 and bool(np.ptp(single.rewards) == 0)
        if has_found_nothing and not single.has_masks:  # masks and repeated actions contradict each other
            repeated = _random_steps(pool, encoder, num_steps, limit or MAX_STEPS, repeat=REPEAT)
        return Findings(encoder=encoder, action_space=pool.action_space, limit=limit, single=single, repeated=repeated)
    finally:
        pool.close()


def _random_steps(
    pool: EnvironmentPool, encoder: ObservationEncoder, num_steps: int, limit: int, *, repeat: int
) -> RandomSteps:
    """Play episodes of random actions until `num_steps` environment steps were taken."""
    member = np.array([0])
    taken = num_episodes = num_terminated = 0
    lengths, has_ended = [], False
    rewards: list[float] = []
    has_masks = False
    low = torch.full(encoder.shape, torch.inf)
    high = -low
    pool.action_space.seed(0)
    while taken < num_steps:
        observations, infos = pool.reset([0], [EpisodeStart(seed=num_episodes)])
        num_episodes, left, is_over = num_episodes + 1, min(limit, num_steps - taken), False
        begun = taken
        while left > 0 and not is_over:
            observed = encoder(observations)[0].float()
            low, high = torch.minimum(low, observed), torch.maximum(high, observed)
            mask = infos[0].get(KEY)
            has_masks |= mask is not None
            action = pool.action_space.sample(sample_mask(pool.action_space, mask))
            step, counts = take_steps(pool, member, [action], np.array([left]), repeat)
            observations, infos = step.observations, list(step.infos or [])
            rewards.append(float(step.rewards[0]))
            num_terminated += bool(step.terminated[0])
            left, taken = left - int(counts[0]), taken + int(counts[0])
            is_over = bool(step.terminated[0] or step.truncated[0])
        lengths.append(taken - begun)
        has_ended |= is_over or taken - begun == limit
    return RandomSteps(
        num_steps=taken,
        rewards=np.array(rewards),
        num_terminated=num_terminated,
        longest=max(lengths) if has_ended else None,
        has_masks=has_masks,
        ranges=(high - low).flatten().double().numpy(),
    )
