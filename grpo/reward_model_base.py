"""The reward model: a protocol of four methods, and no base class. A plain function is a reward model, too.

A reward model returns numbers, or `Rewards`, which holds more than the numbers. It knows nothing of failures, deadlines and
retries: `RewardConfig` has them for every reward model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ._common.calls import require_states_and_actions
from ._common.conversion import as_reward_values, describe
from ._common.protocols import kept_state, refuse_near_misses, require_methods, restore_state
from ._common.tensors import TensorFields
from .errors import ContractError, ProtocolError, RewardError
from .policy_base import HasState

StateT = TypeVar("StateT", contravariant=True)
ActionT = TypeVar("ActionT", contravariant=True)


@runtime_checkable
class RewardModel(Protocol[StateT, ActionT]):
    """Returns a reward for each action. The trainer does not train a reward model, and calls `eval()` before each call."""

    def compute_rewards(self, states: Sequence[StateT], actions: Sequence[ActionT]) -> "Tensor | Rewards":
        """One finite number per row, [N], or one per step, [N, T] with T > 1. If every row has one step: [N].

        A tensor, an array or a list is enough. `Rewards` says more.
        """

    def train(self) -> Any:
        """Switch to training mode."""

    def eval(self) -> Any:
        """Switch to evaluation mode."""

    def to(self, device: torch.device | str) -> Any:
        """Move to a device, in place."""


@dataclass(frozen=True, slots=True, init=False)
class Rewards(TensorFields):
    """The rewards of N rows, and what else a reward model knows about them. Lists and arrays of numbers become tensors.

    Example:
        >>> Rewards([1.5, 0.0], components={"right": [1, 0], "short": [1, 0]}, weights={"short": 0.5}).values
        tensor([1.5000, 0.0000], dtype=torch.float64)
    """

    values: Float[Tensor, "N *T"]
    """The rewards: one per row, [N], or one per step, [N, T]."""
    components: Mapping[str, Float[Tensor, "N *T"]]
    """The named parts of the rewards before weighting, in the shape of `values`. NaN: the part does not apply there. The
    trainer reports each part as `rewards/NAME/{mean,std,applies}`."""
    weights: Mapping[str, float]
    """The weight of each part. The weight of a missing name is 1."""
    lost: Mapping[str, Bool[Tensor, " N"]]
    """By the name of a metric: the rows whose rewards were lost for a reason other than the action, such as a server that is
    gone. The trainer drops and counts these rows, whatever their `values` are. Give the same names in every call."""
    metrics: Mapping[str, tuple[float, float]]
    """By name: (count, sum) of measurements, such as the seconds of each tool. The trainer adds them up over the calls and
    ranks of an iteration, and reports sum / count. A count of 0 marks a total: the sum itself is reported."""

    def __init__(
        self,
        values: Any,
        *,
        components: Mapping[str, Any] | None = None,
        weights: Mapping[str, float] | None = None,
        lost: Mapping[str, Any] | None = None,
        metrics: Mapping[str, tuple[float, float]] | None = None,
    ) -> None:
        """Convert numbers to tensors, and check every field.

        Raises:
            RewardError: `values` or a part is wrong, as if the reward model had returned it as a tensor.
            ContractError: Any other field is wrong. The message names the field.
        """
        values = as_reward_values("Rewards.values must be numbers, [N] or [N, T]", values)
        if isinstance(components, Mapping):  # anything else is refused below
            components = {name: self._part(name, part, values.shape) for name, part in components.items()}
        if isinstance(lost, Mapping):
            lost = {name: rows.cpu() if isinstance(rows, Tensor) else rows for name, rows in lost.items()}
        given = {"components": components, "weights": weights, "lost": lost, "metrics": metrics}
        object.__setattr__(self, "values", values)
        for name, value in given.items():
            object.__setattr__(self, name, {} if value is None else value)
        self.__post_init__()
        if unknown := [name for name in self.weights if name not in self.components]:
            raise ContractError(
                f"Rewards.weights must have names of components, {sorted(self.components)}; got {unknown}. Remove these."
            )

    @staticmethod
    def _part(name: Any, part: Any, shape: torch.Size) -> Tensor:
        required = f"Rewards.components[{name!r}] must be numbers in the shape of values, {list(shape)}"
        numbers = as_reward_values(required, part)
        if numbers.shape != shape:
            raise RewardError(f"{required}; got {describe(part)}. Expand it.")
        return numbers


@runtime_checkable
class ComparesActions(Protocol):
    """A reward that depends on the other actions of its group, such as a win rate. The trainer says which rows are a group."""

    def in_groups(self, group_ids: Int[Tensor, " N"]) -> Any:
        """Return a reward model with the same parts and the same state, for N rows of these groups. Change nothing."""


class RewardFunction:
    """A plain `(states, actions) -> rewards` as a `RewardModel`. Error messages show the function's name.

    Args:
        function: A function, or an `async def`, which is awaited by whoever asks for the rewards.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__: str = getattr(function, "__name__", type(function).__name__)

    def compute_rewards(self, states: Any, actions: Any) -> Any:
        """Call the function, and return its result, which for an `async def` has to be awaited."""
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


def is_function(value: Any) -> bool:
    """Whether `value` is called as it is: a function or a callable object without `compute_rewards`, and not a class."""
    return callable(value) and not isinstance(value, type) and not hasattr(value, "compute_rewards")


def as_reward_model(value: Any) -> Any:
    """Return `value` if it is a reward model, and wrap a plain `(states, actions) -> rewards` in `RewardFunction`.

    Raises:
        ProtocolError: `value` is neither, such as a list of functions, or a function with the arguments of another library.
    """
    if isinstance(value, Mapping | list | tuple):  # TRL takes a list of rewards
        raise ProtocolError(
            f"reward_model must be one reward; got {describe(value)}. Pass the sum of several, WeightedRewards({{'name': "
            "function, ...}, weights), or for language models adapters.llm.CompletionRewards(functions, weights)."
        )
    refuse_near_misses(value, "reward_model", (ComparesActions, HasState))
    if is_function(value):
        model = RewardFunction(value)
        require_states_and_actions(model.__name__, value)
        return model
    require_methods(value, ("compute_rewards", "train", "eval", "to"), "reward_model", "RewardModel")
    return value
