"""The errors and the warning of this package. All errors derive from `GRPOError`.

Each message says what was required, what came instead, which object it came from, and what to do.
"""

import sys
import warnings
from types import FrameType


class GRPOError(Exception):
    """Base class of every error that this package raises on purpose."""


class ProtocolError(GRPOError, TypeError):
    """An object lacks required methods, such as those of `PolicyModel`. The message names every missing method."""


class ConfigError(GRPOError, ValueError):
    """A setting is out of range, or two settings contradict each other. The message names the field."""


class ArgumentError(ConfigError, TypeError):
    """An argument or a setting is unknown, missing, or was not passed by its name. The message says what to write."""


class ContractError(GRPOError, ValueError):
    """A policy, or a caller, passed values that break the contract, such as a tensor of the wrong shape."""


class RewardError(GRPOError, ValueError):
    """The reward model raised, or did not return one finite number per row (or per step)."""


class RewardRaisedError(RewardError):
    """The reward model raised. `reward.on_failure` can tolerate this error. The cause is chained."""


class RewardTimeoutError(RewardRaisedError):
    """The reward model did not answer within `reward.timeout`. The message names the function, the seconds and the rows."""


class DeadlineError(GRPOError, TimeoutError):
    """A call did not answer before its deadline, and was ended."""


class CallError(GRPOError, RuntimeError):
    """A call ended without an answer: its process died, its answer cannot be sent back, or the function tried to exit."""


class NonFiniteGradientError(GRPOError, RuntimeError):
    """Too many updates in a row had a NaN or infinite gradient. These updates changed no weight."""


class CheckpointError(GRPOError, RuntimeError):
    """A checkpoint cannot be written, or its files differ from what was written. The message names the file."""


class DamagedCheckpointError(CheckpointError):
    """The files of one checkpoint cannot be used, so that an older checkpoint of the same folder is tried instead."""


class RankError(GRPOError, RuntimeError):
    """A rank died, did not answer in time, or raised an error of another package. The message names the rank and the cause."""


class TrainingInterrupted(KeyboardInterrupt, SystemExit):
    """A signal asked `train` to stop. If nobody catches this exception, the process ends with the exit code 128 + signal.

    The exit code is 143 for SIGTERM and 130 for SIGINT. `except KeyboardInterrupt` catches the exception, too.
    """

    def __init__(self, signal_number: int) -> None:
        super().__init__(128 + signal_number)
        self.signal_number = signal_number
        """The number of the signal: 15 for SIGTERM, 2 for SIGINT."""
        self.code = 128 + signal_number
        """The exit code of the process."""


class GRPOWarning(UserWarning):
    """Training continues, but probably not as intended. Each warning is given once per trainer."""


_OURS = {"grpo", "adapters", "torch", "jaxtyping", "contextlib", "functools", "threading", "concurrent"}
"""Packages whose lines a warning does not name: this project's, and those that may stand between a user and this project."""


def warn_user(message: str) -> None:
    """Give a `GRPOWarning` that names the user's line: the innermost line that is not in this project."""
    frame = caller = sys._getframe(1)
    while frame.f_back and _is_ours(frame):
        frame = frame.f_back
    place = caller if _is_ours(frame) else frame  # a thread of this project has no line of the user
    warnings.warn_explicit(
        message,
        GRPOWarning,
        place.f_code.co_filename,
        place.f_lineno,
        module=place.f_globals.get("__name__"),
        registry=place.f_globals.setdefault("__warningregistry__", {}),
    )


def _is_ours(frame: FrameType) -> bool:
    """Whether a frame is not the user's. The code of a wrapper that was made while the program runs has no file."""
    module = frame.f_globals.get("__name__", "").partition(".")[0]
    return module in _OURS or frame.f_code.co_filename.startswith("<")
