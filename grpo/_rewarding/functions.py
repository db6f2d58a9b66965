"""Reward models that ask one function of the user's, about rows or about the actions of a group."""

import copy
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from jaxtyping import Int
from torch import Tensor

from grpo._common.conversion import require_lengths
from grpo.errors import ConfigError
from grpo.reward_model_base import RewardFunction

Own = TypeVar("Own")
"""The class of the reward model itself."""


class AsksFunction:
    """A reward model that asks one function. It has no mode and no device, and its state is that of the function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = RewardFunction(function)
        self.__name__ = self._function.__name__

    def parts(self) -> Iterable[Any]:
        """The function that is asked."""
        return (self._function,)

    def train(self: Own, *_: Any) -> Own:
        """Do nothing. `train`, `eval` and `to` do nothing, because a function has no mode and no device."""
        return self

    eval = to = train

    def state_dict(self) -> dict[str, Any]:
        """Return the function's own `state_dict()` if it has one, else an empty dict."""
        return self._function.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._function.load_state_dict(state)


class AsksAboutGroups(AsksFunction):
    """A reward model whose function compares the actions of a group."""

    _group_ids: Tensor | None = None

    def in_groups(self: Own, group_ids: Int[Tensor, " N"]) -> Own:
        """Return a copy that compares N rows within these groups. Groups may have different sizes."""
        grouped: Any = copy.copy(self)
        grouped._group_ids = group_ids.cpu()
        return grouped  # type: ignore[no-any-return]

    def groups_of(self, states: Any, actions: Any) -> Int[Tensor, " N"]:
        """The group of each row.

        Raises:
            ConfigError: The groups are not known.
            ContractError: There are more or fewer rows than the groups have.
        """
        name = type(self).__name__
        if self._group_ids is None:
            raise ConfigError(
                f"{name}({self.__name__}) must know which rows are a group. Call in_groups(group_ids) and use its result; "
                "GRPOTrainer, measure_policy and compare_policies do so."
            )
        require_lengths(f"{name}.in_groups(group_ids)", len(self._group_ids), states=states, actions=actions)
        return self._group_ids
