"""Import this first in a process: then only what the core depends on can be imported, as after `pip install` without extras."""

import sys
from importlib.machinery import ModuleSpec
from importlib.metadata import packages_distributions
from typing import Any

from tools.try_wheel import core_distributions, normalized

ALLOWED = core_distributions()
BLOCKED = {
    module
    for module, distributions in packages_distributions().items()
    if not any(normalized(name) in ALLOWED for name in distributions)
}


class CoreOnly:
    """A finder that finds what another one finds, except for packages that the core does not depend on."""

    def __init__(self, finder: Any) -> None:
        self.finder = finder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """None: the module cannot be imported."""
        return None if name.partition(".")[0] in BLOCKED else self.finder.find_spec(name, path, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.finder, name)


sys.meta_path[:] = map(CoreOnly, sys.meta_path)  # type: ignore[arg-type]
