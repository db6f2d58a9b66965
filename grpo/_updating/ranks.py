"""Methods of the trainer that run on all ranks: an error on one rank is raised on every rank, and settings must be equal."""

import inspect
from collections.abc import Callable, Mapping, Sized
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from grpo._common.settings import flattened
from grpo.config import GRPOConfig
from grpo.distributed import Engine, OneProcess, require_same_on_all_ranks, same_error
from grpo.policy_base import require_methods

Args = ParamSpec("Args")
Result = TypeVar("Result")

_OF_EACH_RANK = ("self", "sinks", "callbacks", "progress")
"""Arguments of `train` that may differ between ranks."""

_GIVEN_OR_NONE = ("eval_states", "checkpoint_dir")
"""Arguments of `train` that all ranks pass, or no rank. Their values may differ."""


def on_all_ranks(method: Callable[Args, Result]) -> Callable[Args, Result]:
    """Make a method of the trainer raise the same error on every rank, if it raises an error on any rank."""

    @wraps(method)
    def shared(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        trainer: Any = args[0]
        with same_error(trainer.engine, f"{method.__name__} in iteration {trainer.iteration + 1}"):
            return method(*args, **kwargs)

    return shared


def built_on_all_ranks(construct: Callable[Args, None]) -> Callable[Args, None]:
    """The same as `on_all_ranks` for the constructor, whose arguments must agree with those of the other ranks."""

    @wraps(construct)
    def shared(*args: Args.args, **kwargs: Args.kwargs) -> None:
        given: dict[str, Any] = dict(kwargs)
        engine: Engine = OneProcess() if given.get("engine") is None else given["engine"]
        require_methods(engine, ("sum", "gather", "gather_objects", "agree", "waiting"), "engine", "Engine")
        with same_error(engine, "GRPOTrainer()"):
            if engine.num_ranks > 1:
                require_same_on_all_ranks(engine, "GRPOTrainer", comparable_settings(given))
            construct(*args, **kwargs)

    return shared


def run_on_all_ranks(train: Callable[Args, Result]) -> Callable[Args, Result]:
    """The same as `on_all_ranks` for `train`, whose arguments must agree with those of the other ranks."""

    @wraps(train)
    def shared(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        trainer: Any = args[0]
        with same_error(trainer.engine, "train"):
            if trainer.engine.num_ranks > 1:
                arguments = inspect.signature(train).bind(*args, **kwargs)
                arguments.apply_defaults()
                require_same_on_all_ranks(trainer.engine, "train", comparable_arguments(arguments.arguments))
            return train(*args, **kwargs)

    return shared


def comparable_settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What must be equal on all ranks among the arguments of a trainer: settings, and the kinds of the other objects.

    The device may differ, and the reward model. An optimizer's settings are compared, too.
    """
    config, optimizer = arguments.get("config"), arguments.get("optimizer")
    compared = {
        name: _kind(value) for name, value in arguments.items() if name not in ("config", "engine", "reward_model")
    }
    if isinstance(config, GRPOConfig):
        compared |= {f"config.{name}": value for name, value in flattened(config.to_dict()).items() if name != "device"}
    if isinstance(optimizer, torch.optim.Optimizer):
        for number, group in enumerate(optimizer.param_groups):
            settings = {name: value for name, value in group.items() if name != "params"}
            compared |= {f"optimizer.param_groups[{number}].{name}": value for name, value in settings.items()}
    return compared


def comparable_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What must be equal on all ranks among the arguments of `train`: otherwise ranks would meet at different places."""
    compared = {name: value for name, value in arguments.items() if name not in _OF_EACH_RANK}
    states = compared.pop("states")
    compared |= {name: _Given(compared[name] is not None) for name in _GIVEN_OR_NONE}
    return compared | {"the number of states": len(states) if isinstance(states, Sized) else _kind(states)}


class _Given:
    """Whether an argument is given, in words."""

    def __init__(self, is_given: bool) -> None:
        self._is_given = is_given

    def __repr__(self) -> str:
        return "given" if self._is_given else "None"


def _kind(value: Any) -> str | None:
    """The name of a function, or of the class of another object."""
    return None if value is None else str(getattr(value, "__qualname__", type(value).__qualname__))
