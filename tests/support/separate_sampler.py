"""A policy that samples from a copy of its weights, in any thread."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch

from grpo import SampledActions
from tests.support.policies import ExactSampling


class Separate(ExactSampling):
    """`BeginsSampling`. Two tokens per row: the first depends on a seed and on the copied weights, the second ends the row."""

    def __init__(self) -> None:
        super().__init__()
        self.tells_scores = False
        self.copies = [copy.deepcopy(self.head)]
        self.version = 0
        self.events: list[str] = []
        self.is_sampling = False
        self.before: Callable[[], None] = lambda: None
        self.can_begin = True

    def sync_sampler(self) -> None:
        assert not self.is_sampling
        self.version += 1
        self.events.append("sync")
        self.copies[0] = copy.deepcopy(self.head)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {}

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any: ...

    def begin_sampling(self, states: Any, num_actions_per_state: int) -> Callable[[], SampledActions] | None:
        if not self.can_begin:
            return None
        seed = int(torch.randint(2**31, ()))

        def sample() -> SampledActions:
            is_main = threading.current_thread() is threading.main_thread()
            self.events.append(f"{'main' if is_main else 'beside'} {self.version}")
            self.is_sampling = True
            try:
                self.before()
            finally:
                self.is_sampling = False
            generator = torch.Generator().manual_seed(seed)
            rows = [state for state in states for _ in range(num_actions_per_state)]
            tokens = torch.randint(1, 4, (len(rows), 1), generator=generator)
            weight = self.copies[0].weight.sum()  # the samples depend on the copy of the weights
            tokens = (tokens + int(weight * 1e6) % 3) % 3 + 1
            actions = [(int(token), 0) for token in tokens]
            size = num_actions_per_state
            return SampledActions(
                actions=[actions[start : start + size] for start in range(0, len(actions), size)],
                mask=torch.ones(len(rows), 2, dtype=torch.bool),
                behaviour_log_probs=torch.full((len(rows), 2), -1.0, dtype=torch.float64),
            )

        return sample
