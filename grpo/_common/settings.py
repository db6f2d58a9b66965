"""Settings: frozen dataclasses whose values are checked, saved and loaded."""

import dataclasses
import operator
import sys
import types
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from grpo.errors import ConfigError

from .names import require_arguments

SettingsT = TypeVar("SettingsT", bound="Settings")


def setting(
    default: Any,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> Any:
    """A dataclass field with bounds that `Settings` enforces."""
    bounds = {"at_least": at_least, "above": above, "at_most": at_most, "below": below}
    return dataclasses.field(default=default, metadata={k: v for k, v in bounds.items() if v is not None})


_BOUNDS = {
    "at_least": (">=", operator.ge),
    "above": (">", operator.gt),
    "at_most": ("<=", operator.le),
    "below": ("<", operator.lt),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Base of frozen, keyword-only settings: every value is checked on construction against its type and bounds."""

    def __new__(cls: type[SettingsT], *args: Any, **values: Any) -> SettingsT:
        """Refuse settings that do not exist, or that have no name."""
        if args or not values.keys() <= {field.name for field in dataclasses.fields(cls)}:
            require_arguments(cls.__name__, cls.__init__, (None, *args), values, _how_to_pass(cls))
        return object.__new__(cls)

    def __post_init__(self) -> None:
        """Check every field against its annotation and bounds.

        Raises:
            ConfigError: A value is not allowed. The message names the field and its allowed values.
        """
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            kinds = alternatives(type(self), field.name)  # type: ignore[arg-type]
            name = f"{type(self).__name__}.{field.name}"
            if not any(_is_a(value, kind) for kind in kinds):
                raise ConfigError(f"{name} must be {' or '.join(map(_spell, kinds))}; got {value!r}.")
            if value is None:
                continue
            if isinstance(value, int) and value >= 2**63 and "at_most" not in field.metadata:  # torch has no such count
                raise ConfigError(f"{name} must be below 2**63; got {value!r}.")
            for key, bound in field.metadata.items():
                sign, holds = _BOUNDS[key]
                if not holds(value, bound):
                    raise ConfigError(f"{name} must be {sign} {bound}; got {value!r}.")

    def to_dict(self) -> dict[str, Any]:
        """Convert the settings to numbers, strings, None and dicts, for JSON and `from_dict`."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value.to_dict() if isinstance(value, Settings) else value for name, value in values.items()}

    @classmethod
    def from_dict(cls: type[SettingsT], values: Mapping[str, Any]) -> SettingsT:
        """Make settings from a dict that `to_dict` wrote. A missing setting has its default value.

        Raises:
            ConfigError: The dict has an unknown key, or a value that the setting does not allow.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(f"{cls.__name__}.from_dict needs a mapping; got a {type(values).__name__}. Pass a dict.")
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{str(key): _nested(cls, key, value) if key in names else value for key, value in values.items()})


@cache
def alternatives(cls: Any, name: str) -> tuple[Any, ...]:
    """The types that a setting may have."""
    hint = get_type_hints(cls)[name]
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _how_to_pass(cls: type[Settings]) -> dict[str, str]:
    """How each setting is passed, such as `GRPOConfig(objective=ObjectiveConfig(kl_coef=...))` for `kl_coef`."""
    found: dict[str, str] = {}
    for field in dataclasses.fields(cls):
        for kind in alternatives(cls, field.name):  # type: ignore[arg-type]
            if isinstance(kind, type) and issubclass(kind, Settings):
                found |= {n: f"{cls.__name__}({field.name}={how})" for n, how in _how_to_pass(kind).items()}
    return found | {field.name: f"{cls.__name__}({field.name}=...)" for field in dataclasses.fields(cls)}


def _nested(cls: type, name: str, value: Any) -> Any:
    for kind in alternatives(cls, name):
        if isinstance(kind, type) and issubclass(kind, Settings) and isinstance(value, Mapping):
            return kind.from_dict(value)
        if get_origin(kind) is tuple and isinstance(value, list):
            return tuple(value)  # JSON has no tuples
    return value


def _is_a(value: Any, kind: Any) -> bool:
    if kind is Any:
        return True
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if get_origin(kind) is tuple:  # tuple[X, ...]
        return isinstance(value, tuple) and all(_is_a(entry, get_args(kind)[0]) for entry in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def _spell(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(map(repr, get_args(kind)))
    if get_origin(kind) is tuple:
        return f"a tuple of {_spell(get_args(kind)[0])}"
    if get_origin(kind) is types.UnionType:
        return " or ".join(map(_spell, get_args(kind)))
    return "None" if kind is types.NoneType else "a finite number" if kind is float else str(kind.__name__)
