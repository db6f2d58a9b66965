"""A policy's separate sampler, and whether its weights are those of the policy."""

from collections.abc import Callable
from typing import Any

from grpo.policy_base import SyncsSampler


class SamplerSync:
    """Keeps the weights of a policy's separate sampler up to date. Does nothing if the policy has no `sync_sampler`."""

    def __init__(self, policy: Any, num_steps: Callable[[], int]) -> None:
        self._syncer = policy if isinstance(policy, SyncsSampler) else None
        self._num_steps, self._synced_at = num_steps, -1
        self.finish: Callable[[], None] = lambda: None
        """Waits until no actions are being sampled in another thread."""

    def sync(self) -> None:
        """Copy the weights if they have changed. No actions are being sampled then, and when this method returns."""
        self.finish()
        num_steps = self._num_steps()
        if self._syncer is not None and self._synced_at != num_steps:
            self._syncer.sync_sampler()
        self._synced_at = num_steps

    def forget(self) -> None:
        """Count the sampler's weights as old, because other code has changed the policy's."""
        self._synced_at = -1
