"""Thread-safe buffers that collect experience for training, and a function that splits items into mini-batches.

The trainer does not read these buffers: pass `batch_from_groups(buffer.drain())` to `trainer.update`.
The trainer's own replay (`replay_iterations`) uses another class and keeps whole iterations.
"""

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from threading import Lock
from typing import Any, Generic, TypeVar

from grpo.arguments import require_integers
from grpo.errors import ConfigError

ItemT = TypeVar("ItemT")
IdT = TypeVar("IdT", bound=Hashable)


class ExperienceBuffer(Generic[ItemT]):
    """A bounded queue, first in, first out. A full buffer drops its oldest items. Safe to use from several threads.

    Args:
        capacity: Maximum number of items. Larger: items stay longer, and more memory is used.
        item_type: A class with `to_dict` and `from_dict`: `state_dict` stores dicts. None: it stores the items themselves.

    Raises:
        ConfigError: `capacity` is no integer >= 1, or `item_type` lacks `to_dict` or `from_dict`.

    Example:
        >>> buffer = ExperienceBuffer[int](capacity=2)
        >>> buffer.extend([1, 2, 3])
        >>> buffer.drain(), buffer.num_dropped, len(buffer)
        ([2, 3], 1, 0)
    """

    def __init__(self, capacity: int = 10_000, *, item_type: type[ItemT] | None = None) -> None:
        require_integers("ExperienceBuffer", 1, capacity=capacity)
        self._encode, self._decode = _codec("ExperienceBuffer", item_type)
        self.capacity = capacity
        self._lock = Lock()
        self._items: deque[ItemT] = deque(maxlen=capacity)
        self.num_dropped = 0
        """How many items were dropped to make room for newer ones."""

    def add(self, item: ItemT) -> None:
        """Add one item."""
        self.extend((item,))

    def extend(self, items: Iterable[ItemT]) -> None:
        """Add several items. They stay adjacent: no other thread's items come between them."""
        listed = list(items)
        with self._lock:
            self.num_dropped += max(len(self._items) + len(listed) - self.capacity, 0)
            self._items.extend(listed)

    def __len__(self) -> int:
        return len(self._items)

    def snapshot(self) -> list[ItemT]:
        """All items, oldest first. The buffer keeps them."""
        with self._lock:
            return list(self._items)

    def drain(self) -> list[ItemT]:
        """Remove and return all items, oldest first. Each item is returned by one `drain` only."""
        with self._lock:
            items, self._items = self._items, deque(maxlen=self.capacity)
        return list(items)

    def clear(self) -> None:
        """Remove all items and set `num_dropped` to 0."""
        with self._lock:
            self._items.clear()
            self.num_dropped = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the items, oldest first, and `num_dropped`. JSON can store the state if it can store the items."""
        with self._lock:
            items, num_dropped = list(self._items), self.num_dropped
        return {"items": self._encode(items), "num_dropped": num_dropped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned. If there are more items than fit, the oldest are dropped and counted."""
        listed = self._decode(state["items"])
        with self._lock:
            self._items = deque(listed, maxlen=self.capacity)
            self.num_dropped = state["num_dropped"] + len(listed) - len(self._items)


class GroupBuffer(Generic[IdT, ItemT]):
    """Items collected by group, without a bound on their number. Safe to use from several threads.

    Args:
        item_type: A class with `to_dict` and `from_dict`: `state_dict` stores dicts. None: it stores the items themselves.

    Raises:
        ConfigError: `item_type` lacks `to_dict` or `from_dict`.

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
        """Add one item to a group."""
        self.extend(group_id, (item,))

    def extend(self, group_id: IdT, items: Iterable[ItemT]) -> None:
        """Add several items to a group. They stay adjacent: no other thread's items come between them."""
        listed = list(items)
        if not listed:
            return
        with self._lock:
            self._groups.setdefault(group_id, []).extend(listed)

    def __len__(self) -> int:
        """The number of items in all groups."""
        with self._lock:
            return sum(map(len, self._groups.values()))

    def drain(self, *, min_size: int = 1) -> dict[IdT, list[ItemT]]:
        """Remove and return the groups, in the order of their first items.

        Args:
            min_size: Groups with fewer items stay in the buffer. Set it to the size of a complete group: a group that
                is drained in two parts gets two baselines.
        """
        require_integers("GroupBuffer.drain", 1, min_size=min_size)
        with self._lock:
            taken = {group_id: items for group_id, items in self._groups.items() if len(items) >= min_size}
            for group_id in taken:
                del self._groups[group_id]
            return taken

    def clear(self) -> None:
        """Remove all groups."""
        with self._lock:
            self._groups = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the ids and items of the groups, in order. JSON can store the state if it can store ids and items."""
        with self._lock:
            groups = [(group_id, list(items)) for group_id, items in self._groups.items()]
        return {"groups": [[group_id, self._encode(items)] for group_id, items in groups]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, also from JSON. Ids must be strings, numbers, or tuples of these."""
        groups = {_hashable(group_id): self._decode(items) for group_id, items in state["groups"]}
        with self._lock:
            self._groups = groups


def mini_batches(items: Sequence[ItemT], batch_size: int) -> list[Sequence[ItemT]]:
    """Split items into batches of `batch_size`, in order. The last batch holds the remainder.

    The trainer does not need this function: `GRPOConfig.batch_size` splits an iteration into updates.

    Raises:
        ConfigError: `batch_size` is no integer >= 1.

    Example:
        >>> mini_batches([1, 2, 3, 4, 5], 2)
        [[1, 2], [3, 4], [5]]
    """
    require_integers("mini_batches", 1, batch_size=batch_size)
    return [items[start : start + batch_size] for start in range(0, len(items), batch_size)]


def _codec(
    owner: str, item_type: Any
) -> tuple[Callable[[Iterable[Any]], list[Any]], Callable[[Iterable[Any]], list[Any]]]:
    """Return two functions: one converts items for `state_dict`, the other converts them back."""
    if item_type is None:
        return list, list
    if not (hasattr(item_type, "to_dict") and hasattr(item_type, "from_dict")):
        raise ConfigError(
            f"{owner}.item_type must have to_dict and from_dict; got {item_type.__name__}. "
            "Add both methods, or leave item_type out if JSON can hold the items."
        )
    return lambda items: [item.to_dict() for item in items], lambda listed: [item_type.from_dict(one) for one in listed]


def _hashable(group_id: Any) -> Any:
    """Convert lists back to tuples, because JSON turns tuples into lists, and lists cannot be dict keys."""
    return tuple(map(_hashable, group_id)) if isinstance(group_id, list) else group_id
