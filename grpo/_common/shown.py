"""What a notebook shows of an object in the last line of a cell."""

from typing import Any


def show_text(shown: object, printer: Any, _: bool) -> None:
    """Show the `str`, which is a table for people, where the `repr` would fill pages: `_repr_pretty_ = show_text` in a class.

    IPython looks for this name in the class itself before it takes the `__repr__` that a dataclass has.
    """
    printer.text(str(shown))
