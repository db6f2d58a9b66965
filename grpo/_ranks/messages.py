"""Messages that all ranks would print are printed once, by rank 0. A message of one rank only is printed by that rank."""

import logging
import warnings
from collections.abc import Callable, Iterable
from typing import Any
from zlib import crc32

from grpo.errors import GRPOWarning

_LOGGER = logging.getLogger("grpo")


class PrintedOnce(logging.Filter):
    """Holds back each `GRPOWarning` and each line of the logger "grpo" on ranks above 0, until rank 0 has said what it printed.

    Rank 0 prints at once. The ranks tell one another in their next meeting what they said. What rank 0 has said is dropped, the
    rest is printed with the number of the rank in front. `close` prints what is still held back.

    Args:
        rank: The number of this rank.
    """

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank
        self._printed: set[int] = set()
        self._said: list[int] = []
        self._held: list[tuple[int, Callable[[], None]]] = []
        self._show, self._hook = warnings.showwarning, self._show_once
        warnings.showwarning = self._hook
        _LOGGER.addFilter(self)

    def said(self) -> list[int]:
        """Numbers that stand for what this rank has said since the last call."""
        said, self._said = self._said, []
        return said if self._rank == 0 else []

    def printed_by_first(self, numbers: Iterable[int]) -> None:
        """Drop what rank 0 has printed from what is held back, and print the rest."""
        self._printed.update(numbers)
        held, self._held = self._held, []
        for number, show in held:
            if number not in self._printed:
                show()

    def close(self) -> None:
        """Print everything that is held back, and hold back nothing further."""
        if warnings.showwarning == self._hook:
            warnings.showwarning = self._show
        _LOGGER.removeFilter(self)
        self.printed_by_first(())

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a log line is printed now."""
        text = record.getMessage()

        def show() -> None:
            record.msg, record.args = f"Rank {self._rank}: {text}", ()
            _LOGGER.callHandlers(record)

        return self._is_printed_now(f"{record.levelname} {text}", show)

    def _show_once(self, message: Any, category: type[Warning], *place: Any, **named: Any) -> None:
        def show() -> None:
            self._show(category(f"Rank {self._rank}: {message}"), category, *place, **named)

        if not issubclass(category, GRPOWarning) or self._is_printed_now(f"{category.__name__} {message}", show):
            self._show(message, category, *place, **named)

    def _is_printed_now(self, text: str, show: Callable[[], None]) -> bool:
        number = crc32(text.encode(errors="replace"))
        if self._rank == 0:
            self._said.append(number)
            return True
        self._held.append((number, show))
        return False
