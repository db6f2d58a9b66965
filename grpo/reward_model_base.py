"""The reward model: a protocol of four methods, and no base class. Plain functions and weighted sums are reward models, too."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from .errors import ConfigError
from .policy_base import HasState, require_methods
from .writing import as_rewards, reward_name

StateT = TypeVar("StateT", contravariant=True)
ActionT = TypeVar("ActionT", contravariant=True)


@runtime_checkable
class RewardModel(Protocol[StateT, ActionT]):
    """Returns a reward for each action. The trainer does not train a reward model, and calls `eval()` before each call."""

    def compute_rewards(self, states: Sequence[StateT], actions: Sequence[ActionT]) -> Tensor:
        """One finite number per row, [N], or one per step, [N, T] with T > 1. If every row has one step: [N]."""

    def train(self) -> Any:
        """Switch to training mode."""

    def eval(self) -> Any:
        """Switch to evaluation mode."""

    def to(self, device: torch.device | str) -> Any:
        """Move to a device, in place."""


@runtime_checkable
class ReportsComponents(Protocol):
    """A reward made of named parts. The trainer reports each part as `rewards/NAME/{mean,std}`."""

    def compute_components(self, states: Any, actions: Any) -> dict[str, Tensor]:
        """Map the name of each part to its rewards, [N] or [N, T], before weighting."""

    def combine(self, components: Mapping[str, Tensor]) -> Tensor:
        """Return the total reward from the named parts, in the shape of the parts."""


class RewardFunction:
    """A plain `(states, actions) -> rewards` as a `RewardModel`. Error messages show the function's name."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        self.function = function
        self.__name__: str = getattr(function, "__name__", type(function).__name__)

    def compute_rewards(self, states: Any, actions: Any) -> Any:
        """Call the function, and return its result. The collector checks the result."""
        return self.function(states, actions)

    def train(self, *_: Any) -> "RewardFunction":
        """Do nothing. `train`, `eval` and `to` do nothing, because a function has no mode and no device."""
        return self

    eval = to = train

    def state_dict(self) -> dict[str, Any]:
        """Return the function's own `state_dict()` if it has one, else an empty dict."""
        return kept_state(self.function)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        restore_state(self.function, state)

    def __repr__(self) -> str:
        return self.__name__


class WeightedRewards:
    """A weighted sum of named rewards: R = sum_k weight_k R_k. The trainer reports each part under its name.

    Args:
        rewards: name -> reward model, or plain `(states, actions) -> rewards`.
        weights: name -> weight. None: all weights are 1.

    Raises:
        ConfigError: there is no reward, or the names of rewards and weights differ.

    Example:
        >>> parts = {"right": lambda s, a: [1.0, 0.0], "short": lambda s, a: [2.0, 4.0]}
        >>> both = WeightedRewards(parts, {"right": 1, "short": 0.5})
        >>> both.compute_rewards(["s", "s"], ["a", "b"]).tolist()
        [2.0, 2.0]
    """

    def __init__(self, rewards: Mapping[str, Any], weights: Mapping[str, float] | None = None) -> None:
        self.rewards = {name: as_reward_model(reward) for name, reward in rewards.items()}
        self.weights = dict.fromkeys(rewards, 1.0) if weights is None else dict(weights)
        if not rewards or set(self.weights) != set(self.rewards):
            raise ConfigError(
                "WeightedRewards needs at least one reward and one weight for each; "
                f"got rewards {sorted(self.rewards)}, weights {sorted(self.weights)}. "
                "Use the same names for both."
            )

    def compute_components(self, states: Any, actions: Any) -> dict[str, Float[Tensor, "N *T"]]:
        """Map the name of each part to its rewards, before weighting."""
        is_one_row = len(states) == 1  # the rewards of a single row may have the shape [1, 1], which the caller checks
        return {
            name: as_rewards(
                reward_name(part), part.compute_rewards(states, actions), len(states), one_step_is_a_step=is_one_row
            )
            for name, part in self.rewards.items()
        }

    def combine(self, components: Mapping[str, Float[Tensor, "N *T"]]) -> Float[Tensor, "N *T"]:
        """Return sum_k weight_k R_k, added in float64. The result has the dtype of the least precise part."""
        total = torch.stack([self.weights[name] * part.double() for name, part in components.items()]).sum(0)
        return total.to(min((part.dtype for part in components.values()), key=lambda dtype: dtype.itemsize))

    def compute_rewards(self, states: Any, actions: Any) -> Float[Tensor, "N *T"]:
        """Return the weighted sum of all rewards, sum_k weight_k R_k."""
        return self.combine(self.compute_components(states, actions))

    def train(self) -> "WeightedRewards":
        """Switch every part to training mode."""
        for reward in self.rewards.values():
            reward.train()
        return self

    def eval(self) -> "WeightedRewards":
        """Switch every part to evaluation mode."""
        for reward in self.rewards.values():
            reward.eval()
        return self

    def to(self, device: torch.device | str) -> "WeightedRewards":
        """Move every part to a device."""
        for reward in self.rewards.values():
            reward.to(device)
        return self

    def state_dict(self) -> dict[str, Any]:
        """The state of each part, by name."""
        return {name: kept_state(reward) for name, reward in self.rewards.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for name, reward in self.rewards.items():
            restore_state(reward, state[name])


def kept_state(value: Any) -> dict[str, Any]:
    """Return the state of a reward model for checkpoints. For a network, this is the state of its buffers, because training
    never changes its weights."""
    if isinstance(value, torch.nn.Module):
        return dict(value.named_buffers())
    return dict(value.state_dict()) if isinstance(value, HasState) else {}


def restore_state(value: Any, state: dict[str, Any]) -> None:
    """Restore what `kept_state` returned. Raise a ConfigError if `value` has no `load_state_dict`."""
    if isinstance(value, torch.nn.Module):
        for name, buffer in value.named_buffers():
            buffer.copy_(state[name])
    elif isinstance(value, HasState):
        value.load_state_dict(state)
    elif state:
        raise ConfigError(
            f"{type(value).__name__} must have load_state_dict() to restore {sorted(state)}. Add this method."
        )


def as_reward_model(value: Any) -> Any:
    """Return `value` if it is a reward model, and wrap a plain callable in `RewardFunction`. Else raise a ProtocolError."""
    if not hasattr(value, "compute_rewards") and callable(value) and not isinstance(value, type):
        return RewardFunction(value)
    require_methods(value, ("compute_rewards", "train", "eval", "to"), "reward_model", "RewardModel")
    return value
