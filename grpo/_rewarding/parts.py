"""The calls that a reward is made of: planned, checked once for whether they can be killed, and made within limits."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from grpo._common.calls import Call
from grpo._common.conversion import reward_name
from grpo._common.protocols import kept_state
from grpo.config import MAX_CONCURRENT
from grpo.engine import CallsInProcess
from grpo.errors import ConfigError
from grpo.reward_model_base import RewardFunction

from .deadlines import await_all, is_async


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCalls:
    """The calls that give the rewards of some rows, and what becomes of their answers."""

    calls: Sequence[Call]
    """The calls, in the order in which they are made. `async def` functions are awaited together, after the others."""
    combine: Callable[[list[Any]], Any]
    """Takes the answers in the order of `calls`, and returns what `compute_rewards` may return."""

    def then(self, change: Callable[[Any], Any]) -> "PlannedCalls":
        """The same calls. `change` gets what `combine` returns."""
        return PlannedCalls(calls=self.calls, combine=lambda answers: change(self.combine(answers)))


@runtime_checkable
class PlansCalls(Protocol):
    """A reward that is made of functions or reward models, such as a sum. It says which calls it needs, and makes none itself.

    Whoever asks for the rewards makes the calls: all `async def` functions together, and the others one after another, with
    the deadlines and processes of `RewardConfig`. Any other reward model is a single call of `compute_rewards`.
    """

    def parts(self) -> Iterable[Any]:
        """The functions (as `RewardFunction`) and the reward models that are called. They may plan calls themselves."""

    def plan_calls(self, states: Any, actions: Any) -> PlannedCalls:
        """The calls for these rows, and how their answers become the rewards."""


def compares_actions(reward_model: Any) -> bool:
    """Whether a reward model has `in_groups`. `WeightedRewards` has it exactly if one of its parts has it."""
    return hasattr(reward_model, "in_groups")  # isinstance() finds properties that raise, from Python 3.12 on


def planned(reward_model: Any, states: Any, actions: Any) -> PlannedCalls:
    """The calls of a reward model for these rows."""
    if hasattr(reward_model, "plan_calls"):  # isinstance() takes as long as a small reward
        plan: PlannedCalls = reward_model.plan_calls(states, actions)
        return plan
    call = Call(name=reward_name(reward_model), function=_called(reward_model), arguments=(states, actions))
    return PlannedCalls(calls=[call], combine=itemgetter(0))


@torch.no_grad()
def ask(
    reward_model: Any,
    states: Any,
    actions: Any,
    *,
    timeout: float | None = None,
    max_concurrent: int = MAX_CONCURRENT,
    in_process: CallsInProcess | None = None,
) -> Any:
    """Make all calls of a reward model for these rows, without gradients, and return its answer, which is not checked.

    Args:
        reward_model: A `RewardModel`.
        states: N states.
        actions: N actions.
        timeout: Seconds per call. Functions that are not async run in another process, which is killed then. None: no deadline.
        max_concurrent: Largest number of calls that are awaited at the same time.
        in_process: Makes calls in another process. None: all functions with a deadline are async.
    """
    plan = planned(reward_model, states, actions)
    awaited = [place for place, call in enumerate(plan.calls) if is_async(call.function)]
    others = [place for place in range(len(plan.calls)) if place not in set(awaited)]
    plain = [plan.calls[place] for place in others]
    if plain and timeout is not None and in_process is not None:
        made = in_process(plain, timeout=timeout)
    else:
        made = [call() for call in plain]
    answers = dict(zip(others, made, strict=True))
    if awaited:
        together = [plan.calls[place] for place in awaited]
        found = await_all(together, timeout=timeout, max_concurrent=max_concurrent)
        answers |= dict(zip(awaited, found, strict=True))
    return plan.combine([answers[place] for place in range(len(plan.calls))])


def _called(reward_model: Any) -> Callable[..., Any]:
    """What a call of a reward model calls."""
    called: Callable[..., Any] = (
        reward_model.function if isinstance(reward_model, RewardFunction) else reward_model.compute_rewards
    )
    return called


def require_killable(reward_model: Any, timeout: float | None, *, has_processes: bool = True) -> None:
    """Check that each call of a reward model can have a deadline. `async def` functions can, and so can all without a timeout.

    Args:
        reward_model: A `RewardModel`.
        timeout: Seconds per call. None: no deadline.
        has_processes: Whether the caller can make calls in other processes, as a run can.

    Raises:
        ConfigError: A part would run in another process, but there are no such processes, or the part keeps a state or is on
            a GPU.
    """
    if timeout is None:
        return
    if isinstance(reward_model, PlansCalls):
        for part in reward_model.parts():
            require_killable(part, timeout, has_processes=has_processes)
        return
    if is_async(_called(reward_model)):
        return
    what = f"RewardConfig.timeout={timeout:g} calls {reward_name(reward_model)} in another process, which can be killed"
    remedy = "Make it an async function, or set reward.timeout=None."
    if not has_processes:
        raise ConfigError(f"{what}, and only GRPOTrainer starts processes. Use GRPOTrainer. {remedy}")
    if not hasattr(os, "fork"):
        raise ConfigError(f"{what}, but this system has no os.fork. {remedy}")
    if state := kept_state(reward_model):
        raise ConfigError(
            f"{what}, so its state ({', '.join(map(str, state))}) would change there and be lost. {remedy}"
        )
    if gpus := _gpus_of(reward_model.function if isinstance(reward_model, RewardFunction) else reward_model):
        raise ConfigError(f"{what}, but it is on {', '.join(gpus)}, which that process cannot use. {remedy}")


def _gpus_of(value: Any) -> list[str]:
    """The devices, other than the CPU, of a module or object: of its parameters, buffers, and attributes one level deep."""
    values = (value, *getattr(value, "__dict__", {}).values())
    return sorted({str(tensor.device) for tensor in _tensors_among(values) if tensor.device.type != "cpu"})


def _tensors_among(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, torch.nn.Module):
            yield from (*value.parameters(), *value.buffers())
        elif isinstance(value, Tensor):
            yield value
