"""Tools whose annotations need pydantic, for the tests of the executor. They return what they received, in words."""

import datetime
import enum
from pathlib import Path
from typing import Annotated

from pydantic import Field
from typing_extensions import TypedDict


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Room(TypedDict):
    colour: Colour
    plan: Path


def paint(
    colour: Colour,
    day: datetime.date,
    room: Room,
    doors: int | list[Colour],
    coats: Annotated[int, Field(ge=1, description="Number of coats.")] = 2,
) -> str:
    """Paint a room."""
    return repr((colour, day, room["colour"], room["plan"].read_text(), doors, coats))


async def paint_remotely(colour: Colour, day: datetime.date) -> str:
    """Let somebody paint a room."""
    return repr((colour, day))
