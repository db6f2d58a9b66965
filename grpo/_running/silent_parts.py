"""Parts of a reward that no completion has earned so far."""

import logging
import re
from collections.abc import Mapping

logger = logging.getLogger("grpo")

NUM_ITERATIONS = 20
"""Number of iterations after which a part that was always 0 is named."""
_MEAN = re.compile(r"rewards/(.+)/mean")


class SilentParts:
    """Names, once, the parts of the reward that are 0 for every row of the first iterations of a call of `train`."""

    def __init__(self) -> None:
        self._num_seen = 0
        self._silent: set[str] | None = None

    def see(self, metrics: Mapping[str, float]) -> None:
        """Take the metrics of an iteration into account."""
        if self._num_seen == NUM_ITERATIONS:
            return
        self._num_seen += 1
        parts = {match[1]: value for name, value in metrics.items() if (match := _MEAN.fullmatch(name))}
        silent = {name for name, mean in parts.items() if mean == 0 and metrics.get(f"rewards/{name}/std", 0.0) == 0}
        self._silent = silent if self._silent is None else self._silent & silent
        if self._num_seen == NUM_ITERATIONS and self._silent:
            logger.warning(
                "The reward part %s was 0 for every row of the first %d iterations, so it teaches nothing. Look at some "
                "actions: a format that the policy never writes, or tags that the reward does not see, cannot be earned.",
                ", ".join(sorted(self._silent)),
                NUM_ITERATIONS,
            )
