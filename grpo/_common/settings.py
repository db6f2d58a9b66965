"""Settings: frozen dataclasses whose values are checked, saved, loaded, and changed by name."""

import dataclasses
import difflib
import operator
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from grpo.errors import ConfigError

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

    def __post_init__(self) -> None:
        """Check every field against its annotation and bounds.

        Raises:
            ConfigError: A value is not allowed. The message names the field and its allowed values.
        """
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            kinds = _alternatives(type(self), field.name)  # type: ignore[arg-type]
            name = f"{type(self).__name__}.{field.name}"
            if not any(_is_a(value, kind) for kind in kinds):
                raise ConfigError(f"{name} must be {' or '.join(map(_spell, kinds))}; got {value!r}.")
            if value is None:
                continue
            for key, bound in field.metadata.items():
                sign, holds = _BOUNDS[key]
                if not holds(value, bound):
                    raise ConfigError(f"{name} must be {sign} {bound}; got {value!r}.")

    def to_dict(self) -> dict[str, Any]:
        """Convert the settings to numbers, strings, None and dicts, for JSON and `from_dict`."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value.to_dict() if isinstance(value, Settings) else value for name, value in values.items()}

    def updated(self: SettingsT, changes: Mapping[str, Any]) -> SettingsT:
        """Return the settings with some of them changed, by their dotted names.

        Args:
            changes: New values by name, as `from_dict` takes them. A dict changes some settings of a part.

        Raises:
            ConfigError: There is no such setting (the message names the nearest one), or the value is not allowed.

        Example:
            >>> from grpo import GRPOConfig
            >>> config = GRPOConfig().updated({"objective.surrogate.high": 0.28, "group_size": 4})
            >>> config.objective.surrogate.high, config.objective.surrogate.low
            (0.28, 0.2)
        """
        base = _replaced(self, {name: _merged(self, name, changes[name]) for name in changes if "." not in name})
        parts: dict[str, dict[str, Any]] = {}
        for name in changes:
            if "." in name:
                _require_setting(base, name)
                first, _, rest = name.partition(".")
                parts.setdefault(first, {})[rest] = changes[name]
        updated: SettingsT = _replaced(
            base, {name: _part(base, name).updated(nested) for name, nested in parts.items()}
        )
        return updated

    @classmethod
    def from_dict(cls: type[SettingsT], values: Mapping[str, Any]) -> SettingsT:
        """Make settings from a dict that `to_dict` wrote. A missing setting has its default value.

        Raises:
            ConfigError: The dict has an unknown key, or a value that the setting does not allow.
        """
        if not isinstance(values, Mapping):
            raise ConfigError(
                f"{cls.__name__}.from_dict needs a mapping of settings; got a {type(values).__name__}. Pass a dict."
            )
        names = [field.name for field in dataclasses.fields(cls)]
        unknown = [key for key in values if key not in names]
        if unknown:
            near = difflib.get_close_matches(str(unknown[0]), names, n=1)
            raise ConfigError(
                f"{cls.__name__} has no setting {', '.join(map(repr, unknown))}; its settings are {', '.join(names) or 'none'}."
                + (f" Did you mean {near[0]!r}?" if near else "")
            )
        return cls(**{key: _nested(cls, key, value) for key, value in values.items()})


def _merged(settings: Settings, name: str, value: Any) -> Any:
    """The new value of a setting. A dict without a kind changes a part of the settings."""
    _require_setting(settings, name)
    part = _part(settings, name)
    is_partial = isinstance(part, Settings) and isinstance(value, Mapping) and "kind" not in value
    return part.updated(value) if is_partial else value


def _replaced(settings: Settings, values: Mapping[str, Any]) -> Any:
    present = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    return type(settings).from_dict({**present, **values}) if values else settings


def _part(owner: Settings, name: str) -> Any:
    """The value of a setting. If it is None and may be settings of one kind, these with their defaults."""
    value = getattr(owner, name)
    kinds = [kind for kind in _alternatives(type(owner), name) if isinstance(kind, type) and issubclass(kind, Settings)]  # type: ignore[arg-type]
    return kinds[0]() if value is None and len(kinds) == 1 else value


def _is_setting(settings: Any, names: Sequence[str]) -> bool:
    """Whether `settings` has a setting of this dotted name."""
    if not isinstance(settings, Settings) or names[0] not in {field.name for field in dataclasses.fields(settings)}:
        return False
    return len(names) == 1 or _is_setting(_part(settings, names[0]), names[1:])


def _require_setting(settings: Settings, name: str) -> None:
    """Refuse a name that no setting has. The error names the nearest one."""
    if _is_setting(settings, name.split(".")):
        return
    known = list(_dotted_names(settings))
    raise ConfigError(f"{type(settings).__name__} has no setting {name!r}. {nearest_name(name, known)}")


def flattened(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one dict: {"objective": {"kl_coef": 0.1}} becomes {"objective.kl_coef": 0.1}."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= flattened(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def refuse_options(whose: str, options: type[Settings], keywords: Mapping[str, Any]) -> None:
    """Refuse the keywords that are settings of `options`, and say where they belong."""
    misplaced = [field.name for field in dataclasses.fields(options) if field.name in keywords]
    if misplaced:
        raise ConfigError(
            f"{whose} takes {', '.join(misplaced)} in options. Pass options={options.__name__}({misplaced[0]}=...)."
        )


def nearest_name(name: str, known: Sequence[str]) -> str:
    """A sentence with the known name that is nearest to `name`, also by its last part, or with all known names.

    Example:
        >>> nearest_name("groupsize", ["group_size", "seed"])
        "Did you mean 'group_size'?"
    """
    by_last = {each.rpartition(".")[2]: each for each in reversed(known)}
    near = difflib.get_close_matches(name, known, n=1) or [
        by_last[last] for last in difflib.get_close_matches(name.rpartition(".")[2], by_last, n=1)
    ]
    return f"Did you mean {near[0]!r}?" if near else f"There are {', '.join(known)}."


def _dotted_names(settings: Settings, prefix: str = "") -> Iterator[str]:
    for field in dataclasses.fields(settings):
        yield prefix + field.name
        part = _part(settings, field.name)
        if isinstance(part, Settings):
            yield from _dotted_names(part, f"{prefix}{field.name}.")


@cache
def _alternatives(cls: Any, name: str) -> tuple[Any, ...]:
    hint = get_type_hints(cls)[name]
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _nested(cls: type, name: str, value: Any) -> Any:
    for kind in _alternatives(cls, name):
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
