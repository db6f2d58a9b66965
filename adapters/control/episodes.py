"""Where an episode begins, and what happened in it: the states and actions of control."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from grpo.errors import ConfigError

from .snapshots import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeStart:
    """A state, in the sense of GRPO: where every episode of a group begins.

    Environments that are reset with the same seed begin alike, and draw the same random numbers from then on: what differs
    within a group is then due to its actions alone.
    """

    seed: int | None = None
    """Of `env.reset`; None: drawn when the episodes are sampled, one for the whole group."""
    options: Mapping[str, Any] | None = None
    """Of `env.reset`."""
    snapshot: Snapshot | None = None
    """Begin in the middle of an episode, see `take_snapshot`; `seed` and `options` are then not read."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # tensors have no one truth to compare by
class Episode:
    """An action, in the sense of GRPO: all decisions from a start to an end, L of them."""

    observations: Shaped[Tensor, "L *features"]
    """What each decision was based on, as `ObservationEncoder` encodes it."""
    actions: Shaped[Tensor, "L *action"]
    """As the policy's distribution encodes them: whole numbers for discrete spaces, reals for boxes."""
    rewards: Float[Tensor, " L"]
    """The environment's, float64."""
    terminated: bool
    """The environment came to an end: nothing follows."""
    truncated: bool
    """It was cut off: a critic values what would have followed."""
    final_observation: Shaped[Tensor, "*features"]
    """After the last decision."""
    log_probs: Float[Tensor, " L"]
    """Of the actions, under the policy that took them."""
    allowed: Bool[Tensor, "L K"] | None = None
    """Which categories the environment allowed at each decision; None: all."""

    def __len__(self) -> int:
        """L."""
        return len(self.rewards)


def episode_starts(num_groups: int, *, seed: int = 0) -> Callable[[int], list[EpisodeStart]]:
    """A source of states for `GRPOTrainer.train`: iteration -> B starts with seeds of their own, the same in every run.

    Args:
        num_groups: B. Larger learns from more different beginnings per iteration.
        seed: another seed, other beginnings.

    Example:
        >>> starts = episode_starts(2)
        >>> starts(7) == starts(7), starts(7) == starts(8)
        (True, False)
    """
    if num_groups < 1 or seed < 0:
        raise ConfigError(f"episode_starts: num_groups must be >= 1 and seed >= 0; got {num_groups}, {seed}.")

    def starts(iteration: int) -> list[EpisodeStart]:
        seeds = np.random.SeedSequence([seed, iteration]).generate_state(num_groups)
        return [EpisodeStart(seed=int(start)) for start in seeds]

    return starts


def episode_mask(episodes: Sequence[Episode], device: torch.device | None = None) -> Bool[Tensor, "N T"]:
    """True for each episode's steps; T is the longest's number."""
    lengths = torch.tensor([len(episode) for episode in episodes])
    return (torch.arange(int(lengths.max())) < lengths.unsqueeze(1)).to(device)


def pad_to_steps(values: Shaped[Tensor, " S"], mask: Bool[Tensor, "N T"]) -> Shaped[Tensor, "N T"]:
    """One number per valid step, row by row, as [N, T] with 0 elsewhere; with gradient."""
    padded = values.new_zeros(mask.shape)
    padded[mask] = values
    return padded
