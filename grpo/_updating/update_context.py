"""Settings and objects that the updates of all iterations use."""

from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass
from typing import Any

import torch

from grpo.config import GRPOConfig
from grpo.engine import Engine
from grpo.experience_collector import ExperienceCollector
from grpo.policy_base import SplitsSteps
from grpo.surrogates import SurrogateTraits, traits_of

from .coefficients import Coefficients


@dataclass(eq=False)
class UpdateContext:
    """Settings and objects that the updates of all iterations use."""

    config: GRPOConfig
    """The settings: batch size, epochs, aggregation, selections."""
    collector: ExperienceCollector
    """Scores rows and plans forward passes."""
    coefficients: Coefficients
    """The current KL and entropy coefficients."""
    engine: Engine
    """Joins the ranks."""
    has_own_loss: bool
    """Whether the user passed a whole objective, so that no shortcut applies."""
    seed: InitVar[int]
    """Seed of the order of rows. It is equal on all ranks."""
    has_compared_modes: bool = False
    """Whether the log-probs of train() and eval() have been compared, in the first update."""
    between: Callable[[], None] = lambda: None
    """Called before the first update of an iteration, and after each update. A run can stop and continue there."""

    def __post_init__(self, seed: int) -> None:
        policy = self.collector.policy
        self.policy_name = type(policy).__name__
        self.splitter = policy if isinstance(policy, SplitsSteps) else None
        self.traits = SurrogateTraits() if self.has_own_loss else traits_of(self.config.objective.surrogate)
        """The traits of the loss. A user's own objective may read anything, so it has the safe defaults."""
        self.row_order = torch.Generator().manual_seed(seed)
        self.step_choice = torch.Generator().manual_seed(seed)
        """Generator of the random choices. It is in the same state on all ranks, whatever their numbers of rows."""

    def state_dict(self) -> dict[str, Any]:
        """The generators of the order of rows and of random choices."""
        return {"row_order": self.row_order.get_state(), "step_choice": self.step_choice.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.row_order.set_state(state["row_order"])
        self.step_choice.set_state(state["step_choice"])
