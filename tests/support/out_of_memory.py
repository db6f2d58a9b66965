"""A memory that runs out on purpose, and methods of policies that use it."""

from collections.abc import Callable, Collection
from typing import Any

import torch


class SmallMemory:
    """Raises `torch.OutOfMemoryError` at some uses, counted from 1, and at every use with more rows than fit.

    `sizes` keeps the number of rows of each use.
    """

    def __init__(self, *, fails_at: Collection[int] = (), fits: float = float("inf")) -> None:
        self.fails_at, self.fits = frozenset(fails_at), fits
        self.sizes: list[int] = []

    def use(self, num_rows: int) -> None:
        self.sizes.append(num_rows)
        if len(self.sizes) in self.fails_at or num_rows > self.fits:
            raise torch.OutOfMemoryError(f"injected at use {len(self.sizes)}, of {num_rows} rows")

    def used_by(self, policy: Any, method: str, num_rows: Callable[..., int]) -> None:
        """Make a method of a policy use the memory after its work, so that its random numbers have been drawn."""
        work = getattr(policy, method)

        def wrapped(*arguments: Any, **options: Any) -> Any:
            result = work(*arguments, **options)
            self.use(num_rows(*arguments))
            return result

        setattr(policy, method, wrapped)

    def used_by_backward(self, policy: Any) -> None:
        """Make the backward pass of `policy.score_actions` use the memory, before any gradient reaches the parameters."""
        work = policy.score_actions

        def wrapped(states: Any, actions: Any) -> Any:
            scores = work(states, actions)
            if scores.log_probs.requires_grad:
                scores.log_probs.register_hook(lambda _: self.use(len(actions)))
            return scores

        policy.score_actions = wrapped


def sampled_rows(states: Any, num_actions_per_state: int) -> int:
    """The number of rows of a call of `generate_actions` or `sample_actions`."""
    return len(states) * num_actions_per_state


def scored_rows(states: Any, actions: Any) -> int:
    """The number of rows of a call that scores."""
    return len(actions)


def limit_updates(trainer: Any, memory: SmallMemory) -> SmallMemory:
    """Make each forward pass of an update use the memory, after the policy has scored its rows."""
    objective = trainer.objective.of_sampled

    def limited(inputs: Any) -> Any:
        memory.use(len(inputs.mask))
        return objective(inputs)

    trainer.objective.of_sampled = limited
    return memory
