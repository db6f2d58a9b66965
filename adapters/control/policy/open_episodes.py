"""Episodes that go on in the next iteration, from where they stood."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Shaped
from numpy.typing import NDArray
from torch import Tensor

from adapters.control.environments.episodes import EpisodeStart
from adapters.control.environments.pools import EnvironmentPool, WorkerLost
from grpo.errors import warn_user

Take = Callable[
    [NDArray[np.int64], Tensor, NDArray[np.int64]], tuple[Tensor, Bool[np.ndarray, " n"], NDArray[np.int64]]
]
"""Takes encoded actions in members of the pool that have taken so many steps. Returns encoded observations, which episodes have
ended, and numbers of steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEpisode:
    """An episode that has begun and not ended."""

    start: EpisodeStart
    """Where it began, with a seed."""
    actions: Shaped[Tensor, "L *action"]
    """All decisions since the start, encoded."""
    num_steps: int
    """Number of environment steps since the start."""
    total: float
    """Sum of the rewards since the start."""
    observation: Shaped[Tensor, "*features"]
    """Encoded observation of the next decision."""
    allowed: Bool[Tensor, " K"] | None
    """Mask of the allowed categories of the next decision. None if all are allowed."""

    def to_state(self) -> dict[str, Any]:
        """Fields by name, for checkpoints."""
        return {field.name: getattr(self, field.name) for field in fields(self)} | {"start": self.start.to_state()}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "OpenEpisode":
        """The inverse of `to_state`."""
        return cls(**state | {"start": EpisodeStart.from_state(state["start"])})


class OpenEpisodes:
    """The unfinished episode of each member of a pool.

    They change when a collection has ended, so a collection that is given up changes nothing. Afterwards, after the load of a
    checkpoint, and after a lost worker, the members are somewhere else than their episodes: each episode is played again, from
    its seed with its actions, and its last observation is compared. Where it differs, the environment does not repeat itself,
    and the member begins a new episode.
    """

    def __init__(self, num_members: int) -> None:
        self.by_member: list[OpenEpisode | None] = [None] * num_members
        self.are_standing = True
        """Whether the members of the pool are where their episodes stood."""
        self._has_warned = False

    def put(self, episodes: Sequence[OpenEpisode | None]) -> None:
        """Note what a collection has left unfinished in the first members."""
        self.by_member[: len(episodes)] = episodes
        self.are_standing = True

    def stand(self, pool: EnvironmentPool, encode: Callable[[Any], Tensor], take: Take) -> int:
        """Let the members stand where their episodes did. Returns the number of episodes that could not be repeated."""
        if self.are_standing:
            return 0
        members = np.array([member for member, one in enumerate(self.by_member) if one is not None], dtype=np.int64)
        same = self._played_again(pool, members, encode, take) if len(members) else []
        for member in members[~np.array(same, dtype=bool)].tolist():
            self.by_member[member] = None
        self.are_standing = True
        num_lost = len(members) - sum(same)
        if num_lost and not self._has_warned:
            self._has_warned = True
            warn_user(
                f"EpisodePolicy: {num_lost} of {len(members)} unfinished episodes could not be repeated from their seeds and "
                "actions, so new ones begin. Let reset() call super().reset(seed=seed), and draw from self.np_random."
            )
        return num_lost

    def _played_again(
        self, pool: EnvironmentPool, members: NDArray[np.int64], encode: Callable[[Any], Tensor], take: Take
    ) -> list[bool]:
        """Whether each episode came to the observation at which it stood."""
        episodes = [one for one in self.by_member if one is not None]
        try:
            observations, _ = pool.reset(members.tolist(), [one.start for one in episodes])
            now = encode(observations)
            lengths = np.array([len(one.actions) for one in episodes])
            has_ended, taken = np.zeros(len(members), dtype=bool), np.zeros(len(members), dtype=np.int64)
            for place in range(int(lengths.max())):
                rows = np.flatnonzero((lengths > place) & ~has_ended)
                if not len(rows):
                    break
                actions = torch.stack([episodes[row].actions[place] for row in rows])
                now[rows], has_ended[rows], taken[rows] = take(members[rows], actions, taken[rows])
        except WorkerLost:
            return [False] * len(members)
        return [
            not ended and bool(torch.equal(row, one.observation))
            for ended, row, one in zip(has_ended.tolist(), now, episodes, strict=True)
        ]

    def state_dict(self) -> dict[str, Any]:
        """The episodes, as plain data and tensors."""
        return {"episodes": [None if one is None else one.to_state() for one in self.by_member]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. The members are put there at the next collection. With fewer members than before,
        the last episodes are dropped."""
        episodes = [None if one is None else OpenEpisode.from_state(one) for one in state["episodes"]]
        num_members = len(self.by_member)
        self.by_member = [*episodes, *[None] * num_members][:num_members]
        self.are_standing = False
