"""Packages that the bridges need when they are used."""

import importlib
from typing import Any

from grpo.errors import ConfigError


def needed(package: str, *, by: str, install: str) -> Any:
    """The package, imported."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(f"{by} needs {package}; got {error}. Install it: pip install {install}") from error
