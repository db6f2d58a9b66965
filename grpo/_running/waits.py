"""Long waits of a run, which are told in the log."""

import logging
import time
from collections.abc import Callable

logger = logging.getLogger("grpo")

SECONDS_BETWEEN_LINES = 30.0
"""How often a wait is logged."""


def sleep_and_tell(seconds: float, sleep: Callable[[float], None] = time.sleep) -> None:
    """Wait for the reward model, and log every 30 seconds how long it will still take."""
    while seconds > SECONDS_BETWEEN_LINES:
        sleep(SECONDS_BETWEEN_LINES)
        seconds -= SECONDS_BETWEEN_LINES
        logger.warning("Training waits for the reward model, and calls it again in %.0f s.", seconds)
    sleep(seconds)
