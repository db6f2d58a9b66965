"""What must be equal on all ranks among the arguments of a learner."""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec

import torch

from grpo._common.settings import flattened
from grpo.config import GRPOConfig
from grpo.engine import Engine, OneProcess
from grpo.policy_base import require_methods

Args = ParamSpec("Args")

ENGINE_METHODS = [name for name in vars(Engine) if callable(vars(Engine)[name]) and not name.startswith("_")]
"""The methods of an engine."""


def built_on_all_ranks(construct: Callable[Args, None]) -> Callable[Args, None]:
    """Make a constructor raise the same error on every rank, if it raises an error on any rank. Its arguments must agree with
    those of the other ranks."""

    @wraps(construct)
    def shared(*args: Args.args, **kwargs: Args.kwargs) -> None:
        given: dict[str, Any] = dict(kwargs)
        engine: Engine = OneProcess() if given.get("engine") is None else given["engine"]
        require_methods(engine, ENGINE_METHODS, "engine", "Engine")
        name = type(args[0]).__name__
        with engine.together(f"{name}()"):
            if engine.num_ranks > 1:
                engine.require_same(name, comparable_settings(given))
            construct(*args, **kwargs)

    return shared


def comparable_settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What must be equal on all ranks among the arguments of a trainer: settings, and the kinds of the other objects.

    The device may differ, and the reward model. An optimizer's settings are compared, too.
    """
    config, optimizer = arguments.get("config"), arguments.get("optimizer")
    compared = {
        name: kind_of(value) for name, value in arguments.items() if name not in ("config", "engine", "reward_model")
    }
    if isinstance(config, GRPOConfig):
        compared |= {f"config.{name}": value for name, value in flattened(config.to_dict()).items() if name != "device"}
    if isinstance(optimizer, torch.optim.Optimizer):
        for number, group in enumerate(optimizer.param_groups):
            settings = {name: value for name, value in group.items() if name != "params"}
            compared |= {f"optimizer.param_groups[{number}].{name}": value for name, value in settings.items()}
    return compared


def kind_of(value: Any) -> str | None:
    """The name of a function, or of the class of another object."""
    return None if value is None else str(getattr(value, "__qualname__", type(value).__qualname__))
