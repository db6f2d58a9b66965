"""Weights that the engine divides among the ranks, and optimizers that are built from them."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from grpo.distributed import Engine, ShardsWeights
from grpo.errors import ConfigError


def divided_weights(
    engine: Engine, policy: Any, reference_policy: Any, **built: Any
) -> tuple[Callable[[], AbstractContextManager[None]], Callable[[int], int] | None]:
    """Divide the weights of the policy and of the reference, if the engine does that.

    Args:
        engine: joins the ranks.
        policy: the policy.
        reference_policy: the reference. None: there is none.
        built: the user's optimizer and scheduler by name, or functions that build them, or None.

    Returns:
        A function that returns the context in which the policy samples, with all weights on this rank, and a function from a
        number of forward passes to the number that all ranks make. None: each rank makes its own number.

    Raises:
        ConfigError: an optimizer or a scheduler was built before the weights were divided.
    """
    if not isinstance(engine, ShardsWeights):
        return nullcontext, None
    for name, given in built.items():
        if given is not None and not is_function(given):
            raise ConfigError(
                f"{name} must be a function with {type(engine).__name__}, which replaces the policy's parameters by parts of "
                f"them; got a {type(given).__name__}. Pass a function, such as functools.partial(torch.optim.AdamW, lr=1e-5)."
            )
    for model in (policy, reference_policy):
        if model is not None:
            engine.shard(model)
    samples_itself = getattr(policy, "samples_itself", True)
    return partial(engine.whole, policy) if samples_itself else nullcontext, engine.equal_count


def is_function(built: Any) -> bool:
    """Whether an optimizer or a scheduler is still to be built: the argument is a function, or a class."""
    return callable(built) and (isinstance(built, type) or not hasattr(built, "step"))
