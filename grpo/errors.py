"""The errors and the warning of this package. All errors derive from `GRPOError`.

Each message says what was required, what came instead, which object it came from, and what to do.
"""


class GRPOError(Exception):
    """Base class of every error that this package raises on purpose."""


class ProtocolError(GRPOError, TypeError):
    """An object lacks required methods, such as those of `PolicyModel`. The message names every missing method."""


class ConfigError(GRPOError, ValueError):
    """A setting is out of range, or two settings contradict each other. The message names the field."""


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
