"""Episode starts and episodes: the states and actions of control."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from grpo.arguments import describe, require_instances, require_integers, with_checked_arguments
from grpo.errors import ContractError

from .plain_data import pack, unpack
from .snapshots import Snapshot

NUM_SHOWN = 5
"""Number of actions that `str(episode)` shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeStart:
    """A state for GRPO: the common start of all episodes of a group.

    Environments that are reset with the same seed have the same start and draw the same random numbers, so differences within a
    group come from the actions alone.
    """

    seed: int | None = None
    """Seed of `env.reset`. None draws one seed for the whole group when episodes are sampled."""
    options: Mapping[str, Any] | None = None
    """Options of `env.reset`."""
    snapshot: Snapshot | None = None
    """Snapshot from the middle of an episode, see `take_snapshot`. With a snapshot, `seed` and `options` are ignored."""

    def __post_init__(self) -> None:
        require_integers("EpisodeStart", 0, optional=True, seed=self.seed)
        require_instances("EpisodeStart", Mapping | None, "a mapping or None", options=self.options)
        require_instances(
            "EpisodeStart", Snapshot | None, "a Snapshot of take_snapshot, or None", snapshot=self.snapshot
        )

    def __str__(self) -> str:
        """`seed 3`, with the options if there are any; or `snapshot`."""
        if self.snapshot is not None:
            return "snapshot"
        seed = "any seed" if self.seed is None else f"seed {self.seed}"
        return seed if self.options is None else f"{seed}, options {dict(self.options)}"

    def to_state(self) -> dict[str, Any]:
        """Fields by name, for checkpoints. A snapshot is left as it is: many starts may share it, and it is stored once.

        Raises:
            ContractError: The options contain objects that are not plain data.
        """
        return {
            "seed": self.seed,
            "options": None if self.options is None else pack(dict(self.options)),
            "snapshot": self.snapshot,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "EpisodeStart":
        """The inverse of `to_state`."""
        options = state["options"]
        return cls(
            seed=state["seed"],
            options=None if options is None else unpack(options),
            snapshot=state["snapshot"],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)  # comparing tensors gives no single bool
class Episode:
    """An action for GRPO: all L decisions from a start to the end of the episode."""

    observations: Shaped[Tensor, "L *features"]
    """Encoded observation at each decision, from `ObservationEncoder`."""
    actions: Shaped[Tensor, "L *action"]
    """Actions as the policy's distribution encodes them: integers for discrete spaces, floats for boxes."""
    rewards: Float[Tensor, " L"]
    """The environment's reward at each step, float64."""
    terminated: bool
    """Whether the environment terminated the episode."""
    truncated: bool
    """Whether the episode was truncated by a time limit. If there is a critic, it estimates the rest of the return."""
    final_observation: Shaped[Tensor, "*features"]
    """Observation after the last decision."""
    log_probs: Float[Tensor, " L"]
    """Log-prob of each action under the policy that took it."""
    allowed: Bool[Tensor, "L K"] | None = None
    """Mask of the allowed categories at each decision. None if all were allowed."""

    def __post_init__(self) -> None:
        for name in ("observations", "actions", "rewards", "log_probs", "final_observation", "allowed"):
            value = getattr(self, name)
            if not (isinstance(value, Tensor) or (value is None and name == "allowed")):
                raise ContractError(
                    f"Episode: {name} must be a tensor; got {describe(value)}. Use torch.as_tensor(...)."
                )
        if self.rewards.dim() != 1:
            raise ContractError(f"Episode: rewards must be [L], one per step; got {describe(self.rewards)}.")
        for name in ("observations", "actions", "log_probs", "allowed"):
            value = getattr(self, name)
            if value is not None and value.shape[:1] != self.rewards.shape:
                raise ContractError(
                    f"Episode: {name} must have one row per reward, L = {len(self.rewards)}; got {describe(value)}."
                )
        for name in ("terminated", "truncated"):
            require_instances("Episode", bool, "True or False", **{name: getattr(self, name)})

    def __str__(self) -> str:
        """`12 steps, return 12, terminated; actions 0, 1, 1, ...`."""
        ending = "terminated" if self.terminated else "truncated" if self.truncated else "unfinished"
        shown = [_short(action) for action in self.actions[:NUM_SHOWN].tolist()]
        actions = ", ".join([*shown, "..."] if len(self) > NUM_SHOWN else shown)
        return f"{len(self)} steps, return {float(self.rewards.sum()):.6g}, {ending}; actions {actions}"

    def __len__(self) -> int:
        """Number of decisions, L."""
        return len(self.rewards)

    def to_state(self) -> dict[str, Any]:
        """Fields by name, for checkpoints. No tensor is copied."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Episode":
        """The inverse of `to_state`."""
        return cls(**state)


def _short(action: Any) -> str:
    """An action as text, with numbers of three digits."""
    if isinstance(action, list):
        return f"[{', '.join(map(_short, action))}]"
    return str(action) if isinstance(action, int) else f"{action:.3g}"


@with_checked_arguments
def episode_starts(num_groups: int, *, seed: int = 0) -> Callable[[int], list[EpisodeStart]]:
    """Make the states for `GRPOTrainer.train`: a function that maps an iteration to B starts, the same in every run.

    Args:
        num_groups: Number of starts B per iteration, each with its own seed. A larger number learns from more starts.
        seed: Seed of the sequence of starts.

    Example:
        >>> starts = episode_starts(2)
        >>> starts(7) == starts(7), starts(7) == starts(8)
        (True, False)
    """
    require_integers("episode_starts", 1, num_groups=num_groups)
    require_integers("episode_starts", 0, seed=seed)

    def starts(iteration: int) -> list[EpisodeStart]:
        seeds = np.random.SeedSequence([seed, iteration]).generate_state(num_groups)
        return [EpisodeStart(seed=int(start)) for start in seeds]

    return starts


def episode_mask(episodes: Sequence[Episode], device: torch.device | None = None) -> Bool[Tensor, "N T"]:
    """Mask of each episode's steps. T is the number of steps of the longest episode."""
    lengths = torch.tensor([len(episode) for episode in episodes])
    return (torch.arange(int(lengths.max())) < lengths.unsqueeze(1)).to(device)


def pad_to_steps(values: Shaped[Tensor, " S"], mask: Bool[Tensor, "N T"]) -> Shaped[Tensor, "N T"]:
    """Pad one number per valid step, row by row, to [N, T] with zeros. Gradients pass through."""
    padded = values.new_zeros(mask.shape)
    padded[mask] = values
    return padded
