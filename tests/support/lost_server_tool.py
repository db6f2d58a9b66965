"""A tool whose own server is gone. It has its own module, because it imports the error that says so."""

import os

if "MODEL_AGNOSTIC_GRPO_TOOL_WORKER" in os.environ:
    from . import light_packages  # noqa: F401  # the worker imports no torch

from adapters.tools.errors import ServerLostError


def ask_lost_server() -> None:
    """Ask a database that is gone."""
    raise ServerLostError("the database is gone")
