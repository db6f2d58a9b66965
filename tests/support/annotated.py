"""Functions with annotations that need pydantic, and their classes, for the tests of annotations and of the executor."""

import dataclasses
import datetime
import enum
from pathlib import Path
from typing import Annotated, NotRequired

import pydantic
from typing_extensions import TypedDict


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Row(TypedDict):
    colour: Colour
    file: NotRequired[Path]


@dataclasses.dataclass
class Size:
    width: int
    height: int = 3


class Order(pydantic.BaseModel):
    number: int = pydantic.Field(description="Which one.", title="No.")
    parts: "list[Order]" = []


def typed(
    colour: Colour,
    day: datetime.date,
    row: Row,
    size: Size | str,
    pages: Annotated[int, pydantic.Field(ge=1, description="Number of pages.", title="Pages")],
    tags: set[str],
    by_number: dict[int, str],
    folder: pydantic.DirectoryPath,
    shade: Annotated[Colour | None, pydantic.Field(description="A shade.")] = None,
    tint: Colour = Colour.BLUE,
    until: datetime.datetime | datetime.date | None = None,
    never: None = None,
) -> None:
    """Take types."""


class Room(TypedDict):
    colour: Colour
    plan: Path


def paint(
    colour: Colour,
    day: datetime.date,
    room: Room,
    doors: int | list[Colour],
    coats: Annotated[int, pydantic.Field(ge=1, description="Number of coats.")] = 2,
) -> str:
    """Paint a room. Returns what came, in words."""
    return repr((colour, day, room["colour"], room["plan"].read_text(), doors, coats))


async def paint_remotely(colour: Colour, day: datetime.date) -> str:
    """Let somebody paint a room."""
    return repr((colour, day))
