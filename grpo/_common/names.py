"""Answers to names that do not exist here, among them the names of other libraries."""

import difflib
import inspect
import re
from collections.abc import Callable, Collection, Mapping
from importlib.resources import files
from typing import Any

from grpo.errors import ArgumentError


def nearest_name(name: str, known: Collection[str]) -> str:
    """What another library's name is here, or the known name that is nearest, also by its last part, or all known names.

    Example:
        >>> nearest_name("groupsize", ["group_size", "seed"]), nearest_name("num_generations", ["group_size", "seed"])
        ("Did you mean 'group_size'?", "TRL's num_generations is group_size here.")
    """
    table = files(__package__).joinpath("names_elsewhere.txt").read_text(encoding="utf-8")
    if row := re.search(rf"^{re.escape(name)} \| (.+) \| (.+)$", table, re.MULTILINE):
        inner = re.search(r"\((\w+)=\.\.\.\)", row[2])
        is_own = inner and inner[1] in known and (not isinstance(known, Mapping) or known[inner[1]].count("(") == 1)
        return f"{row[1]}'s {name} is {inner[1] if inner and is_own else row[2]} here."
    by_last = {each.rpartition(".")[2]: each for each in reversed(list(known))}
    near = difflib.get_close_matches(name, known, n=1) or [
        by_last[last] for last in difflib.get_close_matches(name.rpartition(".")[2], by_last, n=1)
    ]
    spelled = [known[each] if isinstance(known, Mapping) else repr(each) for each in near]
    return f"Did you mean {spelled[0]}?" if near else f"There are {', '.join(known)}."


def require_arguments(
    owner: str, function: Callable[..., Any], args: Any, named: Mapping[str, Any], *parts: Mapping[str, str]
) -> None:
    """Raise an ArgumentError that says what to write, unless a function takes these arguments.

    `parts` says how settings, and settings of settings, are passed.
    """
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **named)
    except TypeError as error:
        parameters = {name: each for name, each in signature.parameters.items() if name != "self"}
        if unknown := [name for name in named if name not in parameters]:
            answers = " ".join(nearest_name(name, *parts or [list(parameters)]) for name in unknown)
            kind = ("setting" if parts else "argument") + "s" * (len(unknown) > 1)
            raise ArgumentError(f"{owner} has no {kind} {', '.join(map(repr, unknown))}. {answers}") from None
        needed = [
            each
            for each in parameters.values()
            if parts or (each.default is each.empty and each.kind is not each.VAR_KEYWORD)
        ]
        shown = ", ".join(each.name + "=..." * (each.kind is each.KEYWORD_ONLY) for each in needed[:3])
        raise ArgumentError(f"{owner}: {error}. Write {owner}({shown}).") from None
