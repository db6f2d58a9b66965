"""The worker: the process that makes the calls, and sends answers, errors and the state of the random generators."""

import contextlib
import gc
import os
import pickle
import random
import struct
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from grpo._common.conversion import describe
from grpo._common.global_state import capture_random_state
from grpo._rewarding.calls import MISTAKES
from grpo.errors import CallError, ConfigError

NamedCall = tuple[str, Callable[[], Any]]
"""A name for messages, and a function without arguments."""
LENGTH = struct.Struct("!Q")
"""The length of a message, before the message."""
NO_GPU = (
    "a call with a deadline runs in another process, which cannot use the GPU of this one. Keep the call on the CPU, make the "
    "function async, or set reward.timeout=None."
)
"""Why such a call cannot use a GPU."""
MAX_CHAINED = 8
"""Largest number of chained exceptions that are sent back."""


def work(calls: Sequence[NamedCall], random_state: Any, answers: int, others: Sequence[int]) -> NoReturn:
    """Make the calls, and send their answers and the state of the random generators. Nothing of the parent is cleaned up."""
    try:
        for end in others:
            os.close(end)
        torch.set_num_threads(1)  # a fork copies no threads, and a pool that lost its threads hangs
        random.setstate(random_state)
        gc.freeze()  # finalizers of the parent's objects belong to the parent
        _send(answers, pickle.dumps(True))
        for name, call in calls:
            try:
                _send(answers, _answer(name, call))
            except BaseException as error:  # it is raised in the parent
                _send(answers, pickle.dumps((None, list(_links(name, error)))))
                break
        flush()
        _send(answers, pickle.dumps(capture_random_state()))
    finally:
        os._exit(0)


def _answer(name: str, call: Callable[[], Any]) -> bytes:
    answer = call()
    try:
        return pickle.dumps((answer, None))
    except Exception as error:
        raise CallError(
            f"{name} runs in another process, and must return what can be pickled; got {describe(answer)}. Return numbers."
        ) from error


def _send(end: int, message: bytes) -> None:
    data = memoryview(LENGTH.pack(len(message)) + message)
    while data:
        data = data[os.write(end, data) :]


def _links(name: str, error: BaseException | None) -> Iterator[Exception]:
    """An exception and its causes, each as an exception that can be pickled. The first has the traceback as a note."""
    shown = "".join(traceback.format_exception(error))
    for place in range(MAX_CHAINED):
        if error is None:
            return
        sent = _sendable(name, error)
        if place == 0:
            sent.add_note(f"In the process of the call:\n{shown}")
        yield sent
        error = error.__cause__


def _sendable(name: str, error: BaseException) -> Exception:
    text = f"{type(error).__name__}: {error}"
    if "in forked subprocess" in text:  # torch's words
        return ConfigError(f"{name} uses a GPU: {NO_GPU}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # recovery: another exception with the same text, and an error of the program stays one
        mistake = next((kind for kind in MISTAKES if isinstance(error, kind)), None)
        return CallError(f"{name} raised {text}") if mistake is None else mistake(text)
    return error if isinstance(error, Exception) else CallError(f"{name} raised {text}")


def flush() -> None:
    """Write what is printed so far."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # there is no stream, or it is closed
            stream.flush()
