"""Which tools an executor accepts, and what its workers get of them."""

import os
import pickle
from collections.abc import Collection

from adapters.tools.catalogue.schemas import names_path_format, slow_keyword
from adapters.tools.catalogue.tools import Tool, ToolCatalogue
from grpo.errors import ConfigError

from .commands import Command


def needs_worker(tool: Tool) -> bool:
    """Whether a worker is needed to execute the tool, or to check its arguments where the check may be slow."""
    return not tool.remote or slow_keyword(tool.parameters) is not None


def allowed_tools(catalogue: ToolCatalogue, allow: Collection[str] | None) -> list[Tool]:
    """The allowed tools. Their schemas are checked."""
    unknown = [str(name) for name in allow or () if name not in catalogue]
    if unknown:
        raise ConfigError(
            f"ToolExecutor.allow must name tools of the catalogue; the catalogue has no {', '.join(sorted(unknown))}."
        )
    if not hasattr(os, "fork") and any(needs_worker(tool) for tool in catalogue.values()):
        raise ConfigError(
            "ToolExecutor needs Unix for its worker processes. On this system, tools must be `remote`. Schemas "
            "must not have `pattern`, `patternProperties`, `uniqueItems` or a recursive `$ref`: workers check these."
        )
    allowed = [tool for name, tool in catalogue.items() if allow is None or name in allow]
    for tool in allowed:
        slow = slow_keyword(tool.parameters)
        if tool.remote and slow is not None and names_path_format(tool.parameters):
            raise ConfigError(
                f'Tool {tool.name}: parameters of a remote tool must not have both "format": "path" and `{slow}`: this '
                f"process checks paths, and a check of `{slow}` could block all other calls. Remove one of the two from the "
                "schema, or leave the tool out of `allow`."
            )
    return allowed


def pickled(tool: Tool) -> bytes:
    """The tool's function, for the fork server."""
    if tool.remote:
        return pickle.dumps("".format)  # accepts any arguments and returns a text; the worker only checks the arguments
    if isinstance(tool.function, Command):
        tool.function.check(tool)
    try:
        return pickle.dumps(tool.function)
    except Exception as error:  # pickle's errors, or anything that an object's own methods raise
        raise ConfigError(
            f"Tool {tool.name}: workers must be able to import its function by name; the import fails: {error}. Define the "
            "function at the top level of a module, or make the tool `remote` with an `async def`."
        ) from error
