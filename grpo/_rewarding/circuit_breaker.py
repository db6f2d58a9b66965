"""A circuit breaker: after many failed calls in a row, the next call waits."""

import logging
import time
from collections.abc import Callable

LOGGER = logging.getLogger("grpo")


class CircuitBreaker:
    """Counts failed calls in a row. It is open after `num_failures` of them, and one successful call closes it.

    Args:
        name: the function that is called, in messages.
        num_failures: number of failed calls in a row that open the breaker.
        seconds: time from the last failed call to the next trial.
        clock: returns seconds. None: `time.monotonic`.
        sleep: waits for some seconds. None: `time.sleep`.
    """

    def __init__(
        self,
        *,
        name: str,
        num_failures: int,
        seconds: float,
        clock: Callable[[], float] | None = None,
        sleep: Callable[[float], None] | None = None,
    ) -> None:
        self.num_failed = 0
        """Number of failed calls in a row."""
        self._name, self._num_failures, self._seconds = name, num_failures, seconds
        self._clock, self._sleep = clock or time.monotonic, sleep or time.sleep
        self._failed_at, self._raised = 0.0, ""

    @property
    def is_open(self) -> bool:
        """Whether the next call has to wait, and is a trial."""
        return self.num_failed >= self._num_failures

    def succeed(self) -> None:
        """Note a successful call."""
        self.num_failed = 0

    def fail(self, error: Exception) -> None:
        """Note a failed call."""
        self.num_failed += 1
        self._failed_at, self._raised = self._clock(), f"{type(error).__name__}: {error}"

    def wait(self) -> None:
        """Wait until a trial is allowed, and log it. Return at once if the breaker is closed."""
        if not self.is_open:
            return
        seconds = max(0.0, self._failed_at + self._seconds - self._clock())
        LOGGER.warning(
            "%s failed %d times in a row. Training waits %.1f s (reward.breaker_seconds=%g) before the next trial. "
            "It raised last: %s",
            self._name,
            self.num_failed,
            seconds,
            self._seconds,
            self._raised,
        )
        self._sleep(seconds)
