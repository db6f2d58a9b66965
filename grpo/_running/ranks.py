"""A run on several ranks: its arguments must agree."""

import inspect
from collections.abc import Callable, Mapping, Sized
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

from grpo._ranks.description import kind_of
from grpo.engine import HasEngine
from grpo.types import ExperienceBatch

Args = ParamSpec("Args")
Result = TypeVar("Result")
Owner = TypeVar("Owner", bound=HasEngine)

_OF_EACH_RANK = ("self", "sinks", "callbacks", "progress")
"""Arguments of `train` that may differ between ranks."""

_GIVEN_OR_NONE = ("eval_states", "evaluation", "checkpoint_dir")
"""Arguments of `train` that all ranks pass, or no rank. Their values may differ."""


def run_on_all_ranks(
    train: Callable[Concatenate[Owner, Args], Result],
) -> Callable[Concatenate[Owner, Args], Result]:
    """Make `train` raise the same error on every rank, if it raises an error on any rank. Its arguments must agree with those
    of the other ranks."""

    @wraps(train)
    def shared(trainer: Owner, /, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        with trainer.engine.together("train"):
            if trainer.engine.num_ranks > 1:
                arguments = inspect.signature(train).bind(trainer, *args, **kwargs)
                arguments.apply_defaults()
                trainer.engine.require_same("train", comparable_arguments(arguments.arguments))
            return train(trainer, *args, **kwargs)

    return shared


def comparable_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What must be equal on all ranks among the arguments of `train`: otherwise ranks would meet at different places."""
    compared = {name: value for name, value in arguments.items() if name not in _OF_EACH_RANK}
    states, given = compared.pop("states"), compared.pop("demonstrations")
    compared |= {name: _Given(compared[name] is not None) for name in _GIVEN_OR_NONE}
    compared["the number of demonstrations"] = given.num_rows if isinstance(given, ExperienceBatch) else kind_of(given)
    return compared | {"the number of states": len(states) if isinstance(states, Sized) else kind_of(states)}


class _Given:
    """Whether an argument is given, in words."""

    def __init__(self, is_given: bool) -> None:
        self._is_given = is_given

    def __repr__(self) -> str:
        return "given" if self._is_given else "None"
