"""The parts of a learner. A learner's state is the states of its parts, by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo._common.global_state import capture_random_state, restore_random_state
from grpo._common.protocols import kept_state, restore_state
from grpo.engine import Engine
from grpo.policy_base import HasState


@dataclass(slots=True, kw_only=True)
class Counters:
    """What a learner counts, and the seed of its data."""

    data_seed: int
    """The seed of the order of rows and states, equal on all ranks."""
    iteration: int = 0
    """Number of finished iterations."""

    def state_dict(self) -> dict[str, Any]:
        """Both numbers."""
        return {"data_seed": self.data_seed, "iteration": self.iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.data_seed, self.iteration = state["data_seed"], state["iteration"]


class RewardModelState:
    """The state of a reward model, which may be a network: its weights never change, so only its buffers are kept."""

    def __init__(self, reward_model: Any) -> None:
        self._reward_model = reward_model

    def state_dict(self) -> dict[str, Any]:
        """The reward model's own state, or the buffers of a network."""
        return kept_state(self._reward_model)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        restore_state(self._reward_model, state)


class Parts:
    """The parts of a learner that have a state, the weights of its policies, and the global random generators."""

    def __init__(self, policy: Any, reference_policy: Any, reward_model: Any, engine: Engine) -> None:
        self.policy, self.reference_policy, self.reward_model = policy, reference_policy, reward_model
        self.by_name: dict[str, Any] = {}
        """The parts."""
        self.lasting: set[str] = set()
        """The names of the parts whose states change only together with weights."""
        self._engine = engine
        self.add(policy=policy, reward_model=RewardModelState(reward_model))

    def add(self, *, is_lasting: bool = False, **parts: Any) -> None:
        """Add those of these parts that have `state_dict` and `load_state_dict`, by name.

        Args:
            is_lasting: Whether their states change only together with weights.
            parts: The parts. None and objects without a state are left out.
        """
        found = {name: part for name, part in parts.items() if isinstance(part, HasState)}
        self.by_name |= found
        self.lasting |= set(found) if is_lasting else set()

    def weights(self) -> dict[str, dict[str, Tensor]]:
        """The parameters of the policy and of the reference, by name. No tensor is copied."""
        reference = {} if self.reference_policy is None else dict(self.reference_policy.get_parameters())
        return {"parameters": dict(self.policy.get_parameters()), "reference": reference}

    def set_weights(self, weights: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Copy parameters into the policy and the reference, in place."""
        with torch.no_grad():
            for kind, present in self.weights().items():
                for name, value in present.items():
                    self._engine.copy_into(value, weights[kind][name])

    def state_dict(self) -> dict[str, Any]:
        """The weights, the state of each part, and the state of the random generators. No tensor is copied."""
        states = {name: part.state_dict() for name, part in self.by_name.items()}
        return {**self.weights(), "parts": states, "random": capture_random_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. The generators come last."""
        self.set_weights(state)
        for name, part in self.by_name.items():
            part.load_state_dict(state["parts"][name])
        restore_random_state(state["random"])
