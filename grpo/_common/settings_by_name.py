"""Settings that are changed, listed and searched for by their dotted names."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpo.errors import ConfigError

from .names import nearest_name
from .settings import Settings, SettingsT, alternatives


def with_settings(settings: SettingsT, changes: Mapping[str, Any]) -> SettingsT:
    """Return the settings with some of them changed, by their dotted names.

    Args:
        settings: The settings, such as a `GRPOConfig`. They stay as they are.
        changes: New values by name, as `from_dict` takes them. A dict changes some settings of a part.

    Raises:
        ConfigError: There is no such setting (the message names the nearest one), or the value is not allowed.

    Example:
        >>> from grpo import GRPOConfig
        >>> config = with_settings(GRPOConfig(), {"objective.surrogate.high": 0.28, "group_size": 4})
        >>> config.objective.surrogate.high, config.objective.surrogate.low
        (0.28, 0.2)
    """
    base = _replaced(settings, {name: _merged(settings, name, changes[name]) for name in changes if "." not in name})
    # whole parts came first, so that a dotted name changes the new part
    parts: dict[str, dict[str, Any]] = {}
    for name in changes:
        if "." in name:
            _require_setting(base, name)
            first, _, rest = name.partition(".")
            parts.setdefault(first, {})[rest] = changes[name]
    updated: SettingsT = _replaced(
        base, {name: with_settings(_part(base, name), nested) for name, nested in parts.items()}
    )
    return updated


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


def _merged(settings: Settings, name: str, value: Any) -> Any:
    """The new value of a setting. A dict without a kind changes a part of the settings."""
    _require_setting(settings, name)
    part = _part(settings, name)
    is_partial = isinstance(part, Settings) and isinstance(value, Mapping) and "kind" not in value
    return with_settings(part, value) if is_partial else value


def _replaced(settings: Settings, values: Mapping[str, Any]) -> Any:
    present = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    return type(settings).from_dict({**present, **values}) if values else settings


def _part(owner: Settings, name: str) -> Any:
    """The value of a setting. If it is None and may be settings of one kind, these with their defaults."""
    value = getattr(owner, name)
    kinds = [kind for kind in alternatives(type(owner), name) if isinstance(kind, type) and issubclass(kind, Settings)]  # type: ignore[arg-type]
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


def _dotted_names(settings: Settings, prefix: str = "") -> Iterator[str]:
    for field in dataclasses.fields(settings):
        yield prefix + field.name
        part = _part(settings, field.name)
        if isinstance(part, Settings):
            yield from _dotted_names(part, f"{prefix}{field.name}.")
