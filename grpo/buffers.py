"""Where threads leave experience until it is trained on: a bounded queue, groups by id, and mini-batches of what came out.

`replay.RecentRows` is something else: whole iterations that the trainer trains on once more, with the advantages they had.
Nothing here is read by the trainer; `ExperienceBatch.from_rows` makes a batch of what was gathered, for `trainer.update`.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from threading import Lock
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from .errors import ConfigError

ItemT = TypeVar("ItemT")
IdT = TypeVar("IdT", bound=Hashable)


@runtime_checkable
class HasDict(Protocol):
    """An item that is written as what JSON can hold, and read from it."""

    def to_dict(self) -> Mapping[str, Any]:
        """What JSON can hold."""
        ...

    @classmethod
    def from_dict(cls, values: Any) -> Any:
        """The inverse of `to_dict`."""
        ...


class ExperienceBuffer(Generic[ItemT]):
    """First in, first out, and bounded: the oldest items leave. Any number of threads may use it at once.

    Args:
        capacity: items. Larger keeps older ones.
        item_type: of items with `to_dict` and `from_dict`, by which a state holds them; None: as they are.

    Raises:
        ConfigError: a capacity below 1, or a type without these methods.

    Example:
        >>> buffer = ExperienceBuffer[int](capacity=2)
        >>> buffer.extend([1, 2, 3])
        >>> buffer.drain(), buffer.num_dropped, len(buffer)
        ([2, 3], 1, 0)
    """

    def __init__(self, capacity: int = 10_000, *, item_type: type[ItemT] | None = None) -> None:
        _require_positive("ExperienceBuffer.capacity", capacity)
        self._encode, self._decode = _codec("ExperienceBuffer", item_type)
        self.capacity = capacity
        self._lock = Lock()
        self._items: deque[ItemT] = deque(maxlen=capacity)
        self._num_dropped = 0

    @property
    def num_dropped(self) -> int:
        """Items that left because newer ones came, and were in no `drain`."""
        return self._num_dropped

    def add(self, item: ItemT) -> None:
        """Put one item in."""
        self.extend((item,))

    def extend(self, items: Iterable[ItemT]) -> None:
        """Put several in, with none of another thread's between them."""
        listed = list(items)
        with self._lock:
            self._num_dropped += max(len(self._items) + len(listed) - self.capacity, 0)
            self._items.extend(listed)

    def __len__(self) -> int:
        return len(self._items)

    def snapshot(self) -> list[ItemT]:
        """What is in it, oldest first; it stays there."""
        with self._lock:
            return list(self._items)

    def drain(self) -> list[ItemT]:
        """What was in it, oldest first; each item is handed out once."""
        with self._lock:
            items = list(self._items)
            self._items.clear()
            return items

    def clear(self) -> None:
        """As at the start: empty, and nothing dropped."""
        with self._lock:
            self._items.clear()
            self._num_dropped = 0

    def state_dict(self) -> dict[str, Any]:
        """The items, oldest first, and how many were dropped: what JSON can hold, with an `item_type` or if the items are."""
        with self._lock:
            items, num_dropped = list(self._items), self._num_dropped
        return {"items": self._encode(items), "num_dropped": num_dropped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; of more items than fit, the oldest count as dropped."""
        listed = self._decode(state["items"])
        with self._lock:
            self._items = deque(listed, maxlen=self.capacity)
            self._num_dropped = state["num_dropped"] + len(listed) - len(self._items)


class GroupBuffer(Generic[IdT, ItemT]):
    """Items by group, put in by any number of threads, each handed out once.

    Args:
        item_type: of items with `to_dict` and `from_dict`, by which a state holds them; None: as they are.

    Raises:
        ConfigError: a type without these methods.

    Example:
        >>> buffer = GroupBuffer[str, float]()
        >>> buffer.add("task 7", 0.5)
        >>> buffer.extend("task 7", [1.0])
        >>> buffer.drain(), buffer.drain()
        ({'task 7': [0.5, 1.0]}, {})
    """

    def __init__(self, *, item_type: type[ItemT] | None = None) -> None:
        self._encode, self._decode = _codec("GroupBuffer", item_type)
        self._lock = Lock()
        self._groups: dict[IdT, list[ItemT]] = {}

    def add(self, group_id: IdT, item: ItemT) -> None:
        """Put one item into its group."""
        self.extend(group_id, (item,))

    def extend(self, group_id: IdT, items: Iterable[ItemT]) -> None:
        """Put several items into one group, with none of another thread's between them."""
        listed = list(items)
        if not listed:
            return
        with self._lock:
            self._groups.setdefault(group_id, []).extend(listed)

    def __len__(self) -> int:
        """Items, over all groups."""
        with self._lock:
            return sum(map(len, self._groups.values()))

    def drain(self, *, min_size: int = 1) -> dict[IdT, list[ItemT]]:
        """The groups that were in it, in the order of their first items; they are in it no longer.

        Args:
            min_size: smaller groups stay, and go on growing. A group that is drained too early comes in two parts, each
                compared with itself alone.
        """
        _require_positive("GroupBuffer.drain: min_size", min_size)
        with self._lock:
            taken = {group_id: items for group_id, items in self._groups.items() if len(items) >= min_size}
            self._groups = {group_id: items for group_id, items in self._groups.items() if group_id not in taken}
            return taken

    def clear(self) -> None:
        """Empty."""
        with self._lock:
            self._groups = {}

    def state_dict(self) -> dict[str, Any]:
        """Ids and items of the groups, in their order: what JSON can hold, with an `item_type` or if the items are."""
        with self._lock:
            groups = [(group_id, list(items)) for group_id, items in self._groups.items()]
        return {"groups": [[group_id, self._encode(items)] for group_id, items in groups]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, also from JSON; ids are texts, numbers, or tuples of these."""
        groups = {_hashable(group_id): self._decode(items) for group_id, items in state["groups"]}
        with self._lock:
            self._groups = groups


def mini_batches(items: Sequence[ItemT], batch_size: int) -> list[Sequence[ItemT]]:
    """Runs of `batch_size` items, in order; the last one holds the remainder.

    `GRPOConfig.batch_size` makes the trainer's own updates, with groups in a new order for each pass; this is for who trains
    by other means.

    Raises:
        ConfigError: a size below 1.

    Example:
        >>> mini_batches([1, 2, 3, 4, 5], 2)
        [[1, 2], [3, 4], [5]]
    """
    _require_positive("mini_batches: batch_size", batch_size)
    return [items[start : start + batch_size] for start in range(0, len(items), batch_size)]


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ConfigError(f"{name} must be >= 1; got {value!r}.")


def _codec(
    owner: str, item_type: type[Any] | None
) -> tuple[Callable[[list[Any]], list[Any]], Callable[[Iterable[Any]], list[Any]]]:
    """Items as a state holds them, and back."""
    if item_type is None:
        return list, list
    if not issubclass(item_type, HasDict):
        raise ConfigError(
            f"{owner}.item_type must have to_dict and from_dict; got {item_type.__name__}. "
            f"Leave it out if JSON can hold the items."
        )
    return lambda items: [item.to_dict() for item in items], lambda listed: [item_type.from_dict(one) for one in listed]


def _hashable(group_id: Any) -> Any:
    """JSON has lists for tuples, and no list is an id."""
    return tuple(map(_hashable, group_id)) if isinstance(group_id, list) else group_id
