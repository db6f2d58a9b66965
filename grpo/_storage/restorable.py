"""Classes whose objects a checkpoint can hold: frozen dataclasses that define `to_state` and `from_state` themselves.

Only classes of modules that are already imported are found. Loading a checkpoint imports nothing.
"""

import sys
from types import ModuleType
from typing import Any

from grpo.errors import CheckpointError


def restorable_name(kind: type) -> str | None:
    """Return `module:qualname` of a class whose objects can be restored. None: the class does not qualify."""
    name = f"{kind.__module__}:{kind.__qualname__}"
    return name if _qualifies(kind) and _imported(name) is kind else None


def _qualifies(kind: Any) -> bool:
    """Whether a class is a frozen dataclass that defines both methods itself, so that it means to be restored."""
    if not isinstance(kind, type):
        return False
    own = vars(kind)
    is_frozen = "__dataclass_params__" in own and own["__dataclass_params__"].frozen
    return is_frozen and callable(own.get("to_state")) and isinstance(own.get("from_state"), classmethod)


def _imported(name: str) -> Any:
    """Return the class `module:qualname` if its module is imported, else None. Nothing is imported, and no code is run."""
    module, _, qualname = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        if not isinstance(found, ModuleType | type):
            return None
        found = vars(found).get(part)
    return found


def class_of(name: str) -> type:
    kind = _imported(name)
    if not _qualifies(kind):
        module = name.partition(":")[0]
        raise CheckpointError(
            f"The checkpoint holds a {name}, which must be a frozen dataclass with to_state() and from_state() in a module "
            f"that is already imported. Import {module} before loading."
        )
    return kind  # type: ignore[no-any-return]
