"""The progress of a run."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo.callbacks import Callbacks


@dataclass(slots=True, kw_only=True)
class RunProgress:
    """The progress of a run. A checkpoint holds it, and the next call of `train` continues from it."""

    num_iterations: int | None = None
    """The total number of iterations of the latest call of `train`. None: there was none."""
    num_draws: int = 0
    """How often states were drawn."""
    best_score: float = -math.inf
    """The best evaluation so far."""
    unrecorded: dict[str, float] | None = None
    """The metrics of an iteration after its updates, before it is evaluated and recorded. None: there is no such iteration."""
    callbacks: Callbacks = field(default_factory=lambda: Callbacks([]))
    """The callbacks of the run."""
    loaded_callbacks: Mapping[str, Any] = field(default_factory=dict)
    """The states of the callbacks of the run that was loaded."""
    is_loaded: bool = False
    """Whether a checkpoint was loaded and no run has continued from it yet."""

    def begin(self, callbacks: Callbacks) -> None:
        """Begin a call of `train`. After a checkpoint was loaded, the callbacks continue, too."""
        self.callbacks = callbacks
        if self.is_loaded:
            callbacks.load_state_dict(self.loaded_callbacks)
        self.is_loaded = False

    def state_dict(self) -> dict[str, Any]:
        """What a run continues from."""
        return {
            "num_iterations": self.num_iterations,
            "num_draws": self.num_draws,
            "best_score": self.best_score,
            "unrecorded": self.unrecorded,
            "callbacks": self.loaded_callbacks if self.is_loaded else self.callbacks.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.num_iterations, self.num_draws = state["num_iterations"], state["num_draws"]
        self.best_score, self.unrecorded = state["best_score"], state["unrecorded"]
        self.loaded_callbacks = state["callbacks"]
