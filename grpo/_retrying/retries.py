"""When a failed call is made again: after delays that double, and after many failures in a row, when a long wait is over.

A long wait is told in the log.
"""

import logging
import time
from collections.abc import Callable, Iterator

from grpo.config import RewardConfig

LOGGER = logging.getLogger("grpo")
SECONDS_BETWEEN_LINES = 30.0
"""How often a wait is logged."""
MAX_LENGTH = 200
"""The line that is logged so often has at most so many characters of the error."""


class Retries:
    """Says when a failed call is made again, as `RewardConfig` has it.

    It is also a circuit breaker: open after `breaker_failures` failed calls in a row, and closed by one successful call.

    Args:
        name: The function that is called, in messages.
        config: The number of retries, the delays, and the settings of the breaker.
        clock: Returns seconds.
        sleep: Waits for some seconds.
    """

    def __init__(
        self, name: str, config: RewardConfig, *, clock: Callable[[], float], sleep: Callable[[float], None]
    ) -> None:
        self.num_failed = 0
        """Number of failed calls in a row."""
        self.last_error = ""
        """The type and the text of the last error."""
        self._name, self._config, self._clock, self._sleep = name, config, clock, sleep
        self._failed_at = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the next call has to wait, and is a trial."""
        return self.num_failed >= self._config.breaker_failures

    def delays(self) -> Iterator[float]:
        """The seconds before each retry of a call: they double, and add up to at most `max_retry_seconds`."""
        delay, left = self._config.retry_delay, self._config.max_retry_seconds
        for _ in range(self._config.num_retries):
            shortened = min(delay, left)
            if shortened == 0.0 < delay:
                return
            yield shortened
            delay, left = 2 * delay, left - shortened

    def succeed(self) -> None:
        """Note a successful call."""
        self.num_failed = 0

    def fail(self, error: Exception) -> None:
        """Note a failed call."""
        self.num_failed += 1
        self._failed_at, self.last_error = self._clock(), f"{type(error).__name__}: {error}"

    def wait(self) -> None:
        """Wait until a trial is allowed, and log it. Return at once if the breaker is closed."""
        if not self.is_open:
            return
        seconds = max(0.0, self._failed_at + self._config.breaker_seconds - self._clock())
        LOGGER.warning(
            "%s failed %d times in a row. Training waits %.1f s (reward.breaker_seconds=%g) before the next trial. "
            "It raised last: %s",
            self._name,
            self.num_failed,
            seconds,
            self._config.breaker_seconds,
            self.last_error,
        )
        self._sleep(seconds)


def sleep_and_tell(seconds: float, name: str, error: str, sleep: Callable[[float], None] = time.sleep) -> None:
    """Wait for a function, and log every 30 seconds how long it will still take, and how the function failed last."""
    while seconds > SECONDS_BETWEEN_LINES:
        sleep(SECONDS_BETWEEN_LINES)
        seconds -= SECONDS_BETWEEN_LINES
        LOGGER.warning("%s is called again in %.0f s. It raised last: %s", name, seconds, error[:MAX_LENGTH])
    sleep(seconds)
