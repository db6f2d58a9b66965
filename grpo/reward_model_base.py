"""What a reward model is, how a plain function becomes one, and how several are weighed together."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from .coercion import as_rewards
from .errors import ConfigError
from .policy_base import HasState, require_methods

StateT = TypeVar("StateT", contravariant=True)
ActionT = TypeVar("ActionT", contravariant=True)


@runtime_checkable
class RewardModel(Protocol[StateT, ActionT]):
    """Says how good each action was. It is never trained here: it is put in `eval()` before it is asked."""

    def compute_rewards(self, states: Sequence[StateT], actions: Sequence[ActionT]) -> Tensor:
        """One finite number per row, [N], or one per step, [N, T] where T > 1; where every row has one step, [N]."""
        ...

    def train(self) -> Any:
        """Switch to training mode."""
        ...

    def eval(self) -> Any:
        """Switch to evaluation mode."""
        ...

    def to(self, device: torch.device | str) -> Any:
        """Move to a device, in place."""
        ...


@runtime_checkable
class ReportsComponents(Protocol):
    """A reward made of named parts, each of which is reported as `rewards/NAME/{mean,std}`."""

    def compute_components(self, states: Any, actions: Any) -> dict[str, Tensor]:
        """Each part's rewards [N], before weighting."""
        ...

    def combine(self, components: Mapping[str, Tensor]) -> Tensor:
        """The reward [N] made of them."""
        ...


class RewardFunction:
    """A plain `(states, actions) -> rewards` as a `RewardModel`."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        self.function = function

    def compute_rewards(self, states: Any, actions: Any) -> Any:
        """Whatever the function returns; the collector checks it."""
        return self.function(states, actions)

    def train(self) -> "RewardFunction":
        """Nothing to switch."""
        return self

    def eval(self) -> "RewardFunction":
        """Nothing to switch."""
        return self

    def to(self, device: torch.device | str) -> "RewardFunction":
        """Nothing to move."""
        return self

    def state_dict(self) -> dict[str, Any]:
        """The function's own, where it is an object with a state."""
        return kept_state(self.function)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        restore_state(self.function, state)

    def __repr__(self) -> str:
        return reward_name(self)


class WeightedRewards:
    """Several rewards by name: R = sum_k weight_k R_k, each part reported under its name.

    Args:
        rewards: name -> reward model, or plain `(states, actions) -> rewards`.
        weights: name -> weight; None: all 1.

    Raises:
        ConfigError: names that do not match.

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
                f"WeightedRewards needs at least one reward and one weight for each; "
                f"got rewards {sorted(self.rewards)}, weights {sorted(self.weights)}."
            )

    def compute_components(self, states: Any, actions: Any) -> dict[str, Float[Tensor, "N *T"]]:
        """Each named reward [N], before weighting."""
        return {
            name: as_rewards(
                reward_name(reward),
                reward.compute_rewards(states, actions),
                len(states),
                one_step_is_a_step=len(states) == 1,  # whether it may be is for who asked for one row to say
            )
            for name, reward in self.rewards.items()
        }

    def combine(self, components: Mapping[str, Float[Tensor, "N *T"]]) -> Float[Tensor, "N *T"]:
        """The weighted sum, added in float64, as precise as the least precise part: rounding is no difference."""
        total = torch.stack([self.weights[name] * part.double() for name, part in components.items()]).sum(0)
        return total.to(min((part.dtype for part in components.values()), key=lambda dtype: dtype.itemsize))

    def compute_rewards(self, states: Any, actions: Any) -> Float[Tensor, "N *T"]:
        """The weighted sum of all parts."""
        return self.combine(self.compute_components(states, actions))

    def train(self) -> "WeightedRewards":
        """Every part into training mode."""
        for reward in self.rewards.values():
            reward.train()
        return self

    def eval(self) -> "WeightedRewards":
        """Every part into evaluation mode."""
        for reward in self.rewards.values():
            reward.eval()
        return self

    def to(self, device: torch.device | str) -> "WeightedRewards":
        """Every part to the device."""
        for reward in self.rewards.values():
            reward.to(device)
        return self

    def state_dict(self) -> dict[str, Any]:
        """Each part's state, by name."""
        return {name: kept_state(reward) for name, reward in self.rewards.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for name, reward in self.rewards.items():
            restore_state(reward, state[name])


def kept_state(value: Any) -> dict[str, Any]:
    """The state an exact resume needs of something that rewards. Of a network, the buffers: its weights do not change here."""
    if isinstance(value, torch.nn.Module):
        return dict(value.named_buffers())
    return dict(value.state_dict()) if isinstance(value, HasState) else {}


def restore_state(value: Any, state: dict[str, Any]) -> None:
    """Restore what `kept_state` returned.

    Raises:
        ConfigError: there is a state, and nothing to take it.
    """
    if isinstance(value, torch.nn.Module):
        for name, buffer in value.named_buffers():
            buffer.copy_(state[name])
    elif isinstance(value, HasState):
        value.load_state_dict(state)
    elif state:
        raise ConfigError(f"{type(value).__name__} has no load_state_dict() to take {sorted(state)}.")


def as_reward_model(value: Any) -> Any:
    """`value` itself if it has `compute_rewards`, else the callable lifted.

    Raises:
        ProtocolError: neither a reward model nor callable; all missing methods are named.
    """
    if not hasattr(value, "compute_rewards") and callable(value) and not isinstance(value, type):
        return RewardFunction(value)
    require_methods(value, ("compute_rewards", "train", "eval", "to"), "reward_model", "RewardModel")
    return value


def reward_name(reward_model: Any) -> str:
    """What error messages call it."""
    if isinstance(reward_model, RewardFunction):
        return getattr(reward_model.function, "__name__", type(reward_model.function).__name__)
    return f"{type(reward_model).__name__}.compute_rewards"
