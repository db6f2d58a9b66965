"""The demonstrations of each training iteration."""

from collections.abc import Callable
from typing import Any

import torch

from grpo._collecting.batches import select_batch
from grpo._common.calls import takes
from grpo._common.conversion import describe
from grpo.config import GRPOConfig
from grpo.errors import ConfigError
from grpo.reward_model_base import is_function
from grpo.types import ExperienceBatch

from .state_source import StateSource


class DemonstrationSource:
    """Returns the demonstrations of each iteration. They depend only on the seed and the iteration, so that a run can resume.

    Args:
        demonstrations: A batch of `ExperienceBatch.from_demonstrations`, which is drawn in shuffled epochs without replacement,
            or a function `iteration -> batch`.
        num_per_iteration: Number of demonstrations of an iteration. None: all of a batch.
        seed: Decides the order of a batch.
    """

    def __init__(self, demonstrations: Any, num_per_iteration: int | None, seed: int) -> None:
        self._draw: Callable[[int], Any]
        self._places: StateSource | None = None
        if isinstance(demonstrations, ExperienceBatch):
            batch = _require_demonstrations("train: demonstrations", demonstrations)
            places = self._places = StateSource(range(batch.num_rows), num_per_iteration, seed)
            is_whole = num_per_iteration is None
            self._draw = lambda iteration: batch if is_whole else select_batch(batch, torch.tensor(places(iteration)))
        elif is_function(demonstrations) and takes(demonstrations, 1):
            self._draw = demonstrations
        else:
            raise ConfigError(
                "train: demonstrations must be a batch, or a function iteration -> batch; got "
                f"{describe(demonstrations)}. Pass ExperienceBatch.from_demonstrations(states, actions)."
            )

    def __call__(self, iteration: int) -> ExperienceBatch:
        """The demonstrations of one iteration. Iterations count from 0."""
        return _require_demonstrations("train: demonstrations(iteration)", self._draw(iteration))

    def num_iterations(self, num_epochs: float) -> int:
        """The number of iterations in which each demonstration is drawn `num_epochs` times, rounded up."""
        if self._places is None:
            raise ConfigError(
                "num_epochs counts passes over the demonstrations, and a function has no length. Pass num_iterations=..., or a "
                "batch."
            )
        return self._places.num_iterations(num_epochs)


def sources_of(
    states: Any, demonstrations: Any, config: GRPOConfig, seed: int, first: int
) -> tuple[StateSource | None, DemonstrationSource | None]:
    """The sources of the states and of the demonstrations of a run. None: there are none of a kind.

    Args:
        states: As in `StateSource`, or None.
        demonstrations: As in `DemonstrationSource`, or None.
        config: The numbers of both in an iteration.
        seed: Decides the orders.
        first: The number of the first draw of states.
    """
    if states is None and demonstrations is None:
        raise ConfigError(
            "train: states=None trains on demonstrations alone, and there are none. Pass states, or demonstrations="
            "ExperienceBatch.from_demonstrations(states, actions)."
        )
    source = None if states is None else StateSource(states, config.num_states_per_iteration, seed, first)
    if demonstrations is None:
        return source, None
    return source, DemonstrationSource(demonstrations, config.num_demonstrations_per_iteration, seed)


def _require_demonstrations(owner: str, batch: Any) -> ExperienceBatch:
    """Check that all rows of a batch are demonstrations."""
    if isinstance(batch, ExperienceBatch) and batch.is_demonstration is not None and bool(batch.is_demonstration.all()):
        return batch
    raise ConfigError(
        f"{owner} must be a batch of demonstrations; got {describe(batch)}. Pass "
        "ExperienceBatch.from_demonstrations(states, actions)."
    )
