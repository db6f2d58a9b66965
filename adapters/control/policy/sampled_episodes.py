"""Sampled episodes: the record of a rollout as actions of GRPO, their metrics, and what is odd about them."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adapters.control.environments.episodes import Episode
from grpo.arguments import describe
from grpo.errors import ContractError, warn_user

from .action_distribution import ActionDistribution
from .observations import ObservationEncoder
from .open_episodes import OpenEpisode
from .rollouts import MAX_STEPS, Record


def all_steps(episodes: Sequence[Episode]) -> tuple[Tensor, Tensor, Tensor | None]:
    """Observations, actions and masks of all steps of all episodes, in order."""
    given: Any = episodes
    if not isinstance(given, Sequence) or not given or not all(isinstance(each, Episode) for each in given):
        raise ContractError(
            f"EpisodePolicy: actions must be a list of Episode objects; got {describe(given)}. Pass what sample_actions "
            "returned, or make demonstrations of recordings with demonstrations(observations, actions)."
        )
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


def recorded_episode(
    encoder: ObservationEncoder, distribution: ActionDistribution, observations: Any, actions: Any, mask: Any
) -> Episode:
    """An episode that somebody else played. `mask` maps encoded observations to the mask of the allowed actions, or is None."""
    required = (
        f"EpisodePolicy.demonstrations: an episode must have L observations, or L + 1, of {encoder.space} for its L actions; "
        f"got {describe(observations)} and {describe(actions)}. Pass a batch of observations and one of actions per episode."
    )
    try:
        encoded, taken = encoder(_as_array(observations)), distribution.from_env(_as_array(actions))
    except ContractError:
        raise
    except ValueError as error:  # numpy's, of values that are no batch
        raise ContractError(required) from error
    num_steps = len(taken)
    if num_steps == 0 or len(encoded) - num_steps not in (0, 1) or encoded.shape[1:] != encoder.shape:
        raise ContractError(required)
    return Episode(
        observations=encoded[:num_steps],
        actions=taken,
        rewards=torch.zeros(num_steps, dtype=torch.float64),  # nothing reads them
        terminated=False,
        truncated=True,
        final_observation=encoded[-1],
        log_probs=torch.full((num_steps,), torch.nan),
        allowed=None if mask is None else mask(encoded[:num_steps]),
    )


def _as_array(batch: Any) -> Any:
    return batch.cpu().numpy() if isinstance(batch, Tensor) else batch


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
        self._generators: tuple[Tensor, Tensor] | None = None
        self._has_warned_of_seeds = False

    def look_at_generator(self, before: Tensor, after: Tensor) -> None:
        """Warn once if two collections leave torch's global generator equal that did not find it equal."""
        if self._generators is not None and not self._has_warned_of_seeds:
            earlier, left = self._generators
            if torch.equal(after, left) and not torch.equal(before, earlier):
                self._has_warned_of_seeds = True
                warn_user(
                    "EpisodePolicy: the environment seeds torch's global generator, which the policy draws from, so every "
                    "iteration explores with the same random numbers. Let it use self.np_random, or a torch.Generator of its "
                    "own, in place of torch.manual_seed."
                )
        self._generators = before, after

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
