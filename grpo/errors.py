"""The errors a user can meet, all under `GRPOError`.

Each message says what was required, what came, whose it was, and what to do.
"""


class GRPOError(Exception):
    """Base of every error raised on purpose by this package."""


class ProtocolError(GRPOError, TypeError):
    """An object lacks methods of the protocol it is used as; every missing method is named."""


class ConfigError(GRPOError, ValueError):
    """A setting has a value, or a combination of values, that has no meaning; the field is named."""


class ContractError(GRPOError, ValueError):
    """A policy returned something that breaks the contract of its protocol."""


class RewardError(GRPOError, ValueError):
    """A reward model raised, or returned something that is not one finite number per row (or step)."""


class RewardRaisedError(RewardError):
    """A reward model raised, which `reward.on_failure` may forgive; the cause is chained."""


class NonFiniteGradientError(GRPOError, RuntimeError):
    """Too many updates in a row had a gradient with NaN or infinity; no weight was changed by them."""


class CheckpointError(GRPOError, RuntimeError):
    """A checkpoint cannot be written, or what is on disk is not what was written; the file is named."""


class GRPOWarning(UserWarning):
    """Training goes on, but probably not as intended. Each one is said once per trainer."""
