"""Sampled episodes: the record of a rollout as actions of GRPO, their metrics, and what is odd about them."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adapters.control.environments.episodes import Episode
from grpo.errors import warn_user

from .open_episodes import OpenEpisode
from .rollouts import MAX_STEPS, Record


def all_steps(episodes: Sequence[Episode]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Observations, actions and masks of all steps of all episodes, in order."""
    allowed = [episode.allowed for episode in episodes]
    return (
        torch.cat([episode.observations for episode in episodes]),
        torch.cat([episode.actions for episode in episodes]),
        None if allowed[0] is None else torch.cat(allowed),  # type: ignore[arg-type]
    )


def as_episodes(record: Record, log_probs: Tensor) -> list[Episode]:
    """Split the record into episodes. Their tensors are views."""

    def rows(values: Tensor | None) -> Sequence[Any]:
        return [None] * len(record.lengths) if values is None else values.split(record.lengths)

    columns = map(rows, (record.observations, record.actions, record.rewards, log_probs, record.allowed))
    return [
        Episode(
            observations=observations,
            actions=actions,
            rewards=rewards,
            log_probs=of_actions,
            allowed=allowed,
            terminated=terminated,
            truncated=not terminated and going_on is None,
            final_observation=final,
        )
        for observations, actions, rewards, of_actions, allowed, terminated, going_on, final in zip(
            *columns, record.terminated, record.going_on, record.final_observations, strict=True
        )
    ]


def _content(episode: Episode) -> bytes:
    """Actions and rewards, to compare episodes of one start."""
    return episode.actions.numpy().tobytes() + episode.rewards.numpy().tobytes()


def metrics_of(record: Record) -> dict[str, float]:
    """Counts of this iteration: environment steps, terminated episodes, and lost environments."""
    return {
        "episodes/steps": float(sum(record.num_steps)),
        "episodes/terminated": float(sum(record.terminated)),
        "episodes/lost_environments": float(record.num_lost),
    }


def metrics_of_ended(record: Record, before: Sequence[OpenEpisode | None]) -> dict[str, float]:
    """Number of the episodes that have ended, and the means of their returns and lengths, earlier parts included.

    Args:
        record: The parts of an iteration.
        before: The open episodes before it, by row. None where an episode began.
    """
    ended = [row for row, going_on in enumerate(record.going_on) if going_on is None]
    if not ended:
        return {"episodes/ended": 0.0}
    totals, steps = [float(part.sum()) for part in record.rewards.split(record.lengths)], record.num_steps
    earlier = {row: one for row, one in enumerate(before) if one is not None}
    returns = [totals[row] + (earlier[row].total if row in earlier else 0.0) for row in ended]
    lengths = [steps[row] + (earlier[row].num_steps if row in earlier else 0) for row in ended]
    mean_return, mean_length = sum(returns) / len(ended), sum(lengths) / len(ended)
    return {
        "episodes/ended": float(len(ended)),
        "episodes/return": mean_return,
        "episodes/length": mean_length,
    }


class EpisodeWarnings:
    """Says once what is odd about sampled episodes.

    Args:
        has_limit: Whether the environment or the user limits the length of an episode.
    """

    def __init__(self, *, has_limit: bool) -> None:
        self._has_said_cut, self._has_warned_of_strangers, self._has_looked_for_twins = has_limit, False, False

    def look_at(self, record: Record, episodes: Sequence[Episode], group_size: int) -> None:
        """Look at an iteration's episodes."""
        self._say_cut(record)
        self._warn_of_strangers(episodes, group_size)
        self._warn_of_twins(episodes, group_size)

    def _say_cut(self, record: Record) -> None:
        """Say once that episodes were cut at a limit that nobody has chosen."""
        if not self._has_said_cut:
            counts = zip(record.num_steps, record.terminated, strict=True)
            num_cut = sum(count >= MAX_STEPS and not terminated for count, terminated in counts)
            self._has_said_cut = num_cut > 0
            if num_cut:
                logging.getLogger("grpo").warning(
                    "EpisodePolicy: %d of %d episodes were truncated after %s steps, because the environment has no limit. "
                    "Pass EpisodeOptions(max_episode_steps=...).",
                    num_cut,
                    len(record.num_steps),
                    f"{MAX_STEPS:,}",
                )

    def _warn_of_strangers(self, episodes: Sequence[Episode], group_size: int) -> None:
        """Warn once if episodes of one group have different starts."""
        if self._has_warned_of_strangers or group_size == 1:
            return
        first = torch.stack([episode.observations[0] for episode in episodes]).unflatten(0, (-1, group_size))
        differs = (first != first[:, :1]).flatten(1).any(1)
        if bool(differs.any()):
            self._has_warned_of_strangers = True
            warn_user(
                "EpisodePolicy: all episodes of a group must have the same start, because they are compared with their mean; "
                f"in {int(differs.sum())} of {len(differs)} groups the first observations differ. Let reset() call "
                "super().reset(seed=seed) and draw from self.np_random, and let no wrapper keep a state across resets. "
                "check_environment(...) shows what is wrong. If a start cannot be repeated, use a critic and credit='gae'."
            )

    def _warn_of_twins(self, episodes: Sequence[Episode], group_size: int) -> None:
        """Warn in the first iteration with groups if most episodes are copies."""
        if self._has_looked_for_twins or group_size == 1:
            return
        self._has_looked_for_twins = True
        groups = [episodes[first : first + group_size] for first in range(0, len(episodes), group_size)]
        num_copies = len(episodes) - sum(len({_content(episode) for episode in group}) for group in groups)
        if 2 * num_copies >= len(episodes):
            warn_user(
                f"EpisodePolicy: the episodes of a group should differ; {num_copies} of {len(episodes)} are copies of another "
                "episode of their group, with the same actions and rewards. Copies cost time and add nothing. The seed of the "
                "group fixes all random events, so short episodes with few actions have few outcomes: use a smaller group_size "
                "and more starts per iteration. If the policy is already trained, it may take almost no other action."
            )
