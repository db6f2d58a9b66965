"""One package per domain; import the domain itself: `from adapters.bandits import SoftmaxPolicy`."""

from importlib.util import find_spec as _find_spec
from pathlib import Path as _Path

# A script or folder of the user that is called `grpo` comes before the package of this name.
_spec, _ours = _find_spec("grpo"), _Path(__file__).resolve().parents[1] / "grpo" / "__init__.py"
if _spec is None or _spec.origin is None or _Path(_spec.origin).resolve() != _ours:
    _found = None if _spec is None else _spec.origin or list(_spec.submodule_search_locations or [])
    raise ImportError(f"`import grpo` must find {_ours}, but it finds {_found}. Rename that file or folder.")
