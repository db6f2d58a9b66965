"""The reward model: a protocol of four methods, and no base class. A plain function is a reward model, too."""

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor

from ._common.conversion import describe, reward_name
from ._processes.reward_models import ComponentsInProcess, RewardsInProcess, gpus_of
from .deadlines import Call, await_all, call_in_process, is_async
from .errors import ConfigError, ProtocolError
from .policy_base import HasState, require_methods

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
    """A reward made of named parts. The trainer reports each part as `rewards/NAME/{mean,std,applies}`."""

    def compute_components(self, states: Any, actions: Any) -> dict[str, Tensor]:
        """Map the name of each part to its rewards, [N] or [N, T], before weighting."""

    def combine(self, components: Mapping[str, Tensor]) -> Tensor:
        """Return the total reward from the named parts, in the shape of the parts."""


@runtime_checkable
class LosesRewards(Protocol):
    """A reward model that loses rewards for reasons other than the action, such as a server that is gone.

    The trainer drops the rows of lost rewards and counts them. It ignores `RewardConfig.non_finite` for these rows.
    """

    def lost_rewards(self) -> dict[str, Tensor]:
        """Map the name of a metric to a mask [N] of the rows whose reward the last call lost for that reason.

        Every call returns the same names. The lost rewards themselves are NaN.
        """


@runtime_checkable
class MeasuresCalls(Protocol):
    """A reward model that measures its work, such as the seconds of each tool. The trainer reports the measurements."""

    def call_metrics(self) -> dict[str, tuple[float, float]]:
        """Map the name of each metric to (count, sum) over the rows of the last call. Names may differ from call to call.

        The trainer adds up counts and sums over the calls and ranks of an iteration, and reports sum / count. A count of 0
        marks a total: the sum itself is reported.
        """


@runtime_checkable
class ComparesActions(Protocol):
    """A reward that depends on the other actions of its group, such as a win rate. The trainer says which rows are a group."""

    compares_actions: bool
    """Whether any part of the reward depends on the group."""

    def in_groups(self, group_ids: Int[Tensor, " N"]) -> Any:
        """Return a reward model with the same parts and the same state, for N rows of these groups. Change nothing."""


@runtime_checkable
class LimitsCalls(Protocol):
    """A reward model that passes the limits of `RewardConfig` on to its parts. Any other reward model is one part."""

    def limit_calls(self, *, timeout: float | None, max_concurrent: int) -> Any:
        """Return a reward model with the same parts and the same state, whose calls have these limits. Change nothing.

        Args:
            timeout: seconds per call of a part. None: no deadline.
            max_concurrent: largest number of calls that are awaited at the same time.
        """


class RewardFunction:
    """A plain `(states, actions) -> rewards` as a `RewardModel`. Error messages show the function's name.

    Args:
        function: a function, or an `async def`, which is awaited.
        timeout: seconds per call, see `RewardConfig.timeout`.
    """

    def __init__(self, function: Callable[..., Any], *, timeout: float | None = None) -> None:
        self.function = function
        self.timeout = timeout
        self.is_async = is_async(function)
        """Whether the function is awaited."""
        self.__name__: str = getattr(function, "__name__", type(function).__name__)

    def compute_rewards(self, states: Any, actions: Any) -> Any:
        """Call the function, and return its result. The collector checks the result."""
        return self.call(states, actions)

    def call(self, *arguments: Any) -> Any:
        """Call the function within the deadline, with any arguments."""
        call = Call(name=self.__name__, function=self.function, arguments=arguments)
        if self.is_async:
            return await_all([call], timeout=self.timeout)[0]
        return call() if self.timeout is None else call_in_process([call], timeout=self.timeout)[0]

    def limit_calls(self, *, timeout: float | None, max_concurrent: int) -> "RewardFunction":
        """Return the same function with a deadline. There is one call at a time.

        Raises:
            ConfigError: the function is not async, and cannot run in another process.
        """
        if timeout is not None and not self.is_async:
            require_process(self, timeout)
        return RewardFunction(self.function, timeout=timeout)

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


def add_call_metrics(parts: Iterable[Mapping[str, tuple[float, float]]]) -> dict[str, tuple[float, float]]:
    """Add up the counts and the sums of several `call_metrics()`."""
    total: dict[str, tuple[float, float]] = {}
    for part in parts:
        for name, (count, value) in part.items():
            known_count, known_value = total.get(name, (0.0, 0.0))
            total[name] = (known_count + count, known_value + value)
    return total


def compares_actions(reward_model: Any) -> bool:
    """Whether a reward model depends on the other actions of the group."""
    return isinstance(reward_model, ComparesActions) and reward_model.compares_actions


def with_limits(reward_model: Any, *, timeout: float | None, max_concurrent: int) -> Any:
    """A reward model that makes the same calls within limits. The reward model itself is not changed.

    Raises:
        ConfigError: a part is not async, and cannot run in another process.
    """
    if isinstance(reward_model, LimitsCalls):
        return reward_model.limit_calls(timeout=timeout, max_concurrent=max_concurrent)
    if timeout is None:
        return reward_model
    kind = ComponentsInProcess if isinstance(reward_model, ReportsComponents) else RewardsInProcess
    require_process(reward_model, timeout)
    return kind(reward_model, name=reward_name(reward_model), timeout=timeout)


def require_process(reward_model: Any, timeout: float) -> None:
    """Check that a reward model can be called in another process.

    Raises:
        ConfigError: there are no such processes, or the reward model keeps a state or is on a GPU.
    """
    what = f"RewardConfig.timeout={timeout:g} calls {reward_name(reward_model)} in another process, which can be killed"
    remedy = "Make it an async function, or set reward.timeout=None."
    if not hasattr(os, "fork"):
        raise ConfigError(f"{what}, but this system has no os.fork. {remedy}")
    if state := kept_state(reward_model):
        raise ConfigError(
            f"{what}, so its state ({', '.join(map(str, state))}) would change there and be lost. {remedy}"
        )
    if gpus := gpus_of(reward_model.function if isinstance(reward_model, RewardFunction) else reward_model):
        raise ConfigError(f"{what}, but it is on {', '.join(gpus)}, which that process cannot use. {remedy}")


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


def is_function(value: Any) -> bool:
    """Whether `value` is called as it is: a function or a callable object without `compute_rewards`, and not a class."""
    return callable(value) and not isinstance(value, type) and not hasattr(value, "compute_rewards")


def as_reward_model(value: Any) -> Any:
    """Return `value` if it is a reward model, and wrap a plain `(states, actions) -> rewards` in `RewardFunction`.

    Raises:
        ProtocolError: `value` is neither, such as a list of functions, or a function with the arguments of another library.
    """
    if isinstance(value, Mapping | list | tuple):
        raise ProtocolError(
            f"reward_model must be one reward; got {describe(value)}. Pass the sum of several, WeightedRewards({{'name': "
            "function, ...}, weights), or for language models adapters.llm.CompletionRewards(functions, weights)."
        )
    if is_function(value):
        _require_states_and_actions(value)
        return RewardFunction(value)
    require_methods(value, ("compute_rewards", "train", "eval", "to"), "reward_model", "RewardModel")
    return value


def _require_states_and_actions(function: Callable[..., Any]) -> None:
    """Refuse a function that cannot be called as `function(states, actions)`, and one that takes TRL's arguments by name."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # recovery: a function without a readable signature is called as it is
        return
    names = list(signature.parameters)
    takes_any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    # The second argument may be called `completions`: these are our actions. TRL also gives columns by name.
    is_of_trl = "completions" in names and (takes_any_name or names[1:2] != ["completions"])
    try:
        signature.bind(None, None)
    except TypeError:
        pass
    else:
        if not is_of_trl:
            return
    raise ProtocolError(
        f"reward_model must be a function of (states, actions); got {reward_name(RewardFunction(function))}{signature}. "
        "A function of prompts, completions and columns by name, as in TRL, belongs in "
        "adapters.llm.CompletionRewards(function). Give any other function these two arguments."
    )
