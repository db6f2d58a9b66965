"""Arguments that a hostile call may have, for the tests of the executor."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

NESTED: Any = 0
for _ in range(100):
    NESTED = [NESTED]
CIRCLE: dict[str, Any] = {}
CIRCLE["a"] = CIRCLE
LAUGHS: Any = "ha"
for _ in range(20):
    LAUGHS = [LAUGHS] * 10


class Raises(Mapping[str, Any]):
    """Arguments that raise while they are read."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __getitem__(self, key: str) -> Any:
        raise self.error

    def __iter__(self) -> Iterator[str]:
        return iter(["a"])

    def __len__(self) -> int:
        raise self.error

    def __repr__(self) -> str:
        raise self.error


class Endless(Mapping[str, Any]):
    """Arguments that never end."""

    def __getitem__(self, key: str) -> Any:
        return 1

    def __iter__(self) -> Iterator[str]:
        return map(str, itertools.count())

    def __len__(self) -> int:
        return 1


class Name(str):
    """A name that raises when it is looked up."""

    __slots__ = ()

    def __hash__(self) -> int:
        raise RuntimeError

    def __eq__(self, other: object) -> bool:
        raise RuntimeError

    __str__ = __repr__ = __hash__  # type: ignore[assignment]
