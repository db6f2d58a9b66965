"""Calls in a process of their own, which ends with them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from grpo._common.calls import Call
from grpo.errors import ConfigError

from .process import Process
from .worker import NO_GPU


def call_in_process(calls: Sequence[Call], *, timeout: float) -> list[Any]:
    """Make calls one after another in a new process, and return their answers in order.

    The process is a fork: the functions see all that this process has in memory, and nothing has to be pickled but the answers
    and the errors. What the functions write to memory is lost, but for the global random generators, which go on from where
    the calls left them. When this function returns or raises, by an interrupt too, the process and all that it started are
    killed and reaped. If this process is killed, they end as well.

    Args:
        calls: The calls. At the first error, the others are left out.
        timeout: Seconds per call.

    Raises:
        ConfigError: An argument holds tensors of a GPU, which another process cannot read.
        DeadlineError: A call did not answer in time. The message names it.
        CallError: The process died, or an answer cannot be pickled.
        Exception: What a call raised. A note shows its traceback.

    Example:
        >>> call_in_process([Call(name="sum", function=sum, arguments=([1, 2],))], timeout=60.0)
        [3]
    """
    for call in calls:
        if device := _gpu_of((*call.arguments, *call.keywords.values())):
            raise ConfigError(f"{call.name} gets tensors on {device}: {NO_GPU}")
    process = Process()
    try:
        return process.run([(call.name, call) for call in calls], timeout)
    finally:
        try:
            process.end()
        except BaseException:  # an interrupt during the clean-up
            process.end()
            raise


def _gpu_of(values: Iterable[Any], depth: int = 1) -> str | None:
    """The device of the first tensor that is not on the CPU, among values and the entries of lists, tuples and dicts."""
    for value in values:
        inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
        if isinstance(value, Tensor) and value.device.type != "cpu":
            return str(value.device)
        if depth and (device := _gpu_of(inner, depth - 1)):
            return device
    return None
