"""Pictures of prompts: from PIL images, arrays, files and links with data to RGB images of 8 bits."""

import base64
import binascii
import hashlib
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from grpo.arguments import describe, install_command
from grpo.errors import ContractError

PICTURE_PARTS = ("image", "image_url", "input_image")
"""Types of message parts that are pictures: those of Hugging Face's messages and of OpenAI's two APIs."""
SOURCES = ("image", "image_url", "url", "path", "base64")
"""Keys of a part that may have the picture."""
COLUMNS = ("images", "image")
"""Columns of a row with its pictures: a list, or one picture."""
ORIENTATION = 0x0112
"""The tag of EXIF that says how a camera was held. 1: upright."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False, weakref_slot=True)
class Picture:
    """A picture that checkpoints and transcripts can hold. `Picture.of` makes it.

    Equal pictures are one object while it is in use, and a checkpoint has each object once. So the rows of a group share their
    picture in waiting rows, in the replay buffer and in a checkpoint, whatever the group size.

    Example:
        Rows whose pictures are in checkpoints once::

            states = [{"prompt": "<image>how many?", "image": Picture.of(file)} for file in files]
    """

    link: str
    """The picture as a PNG file in a link, `data:image/png;base64,...`, as browsers and OpenAI's API read it."""
    digest: str
    """A hash of its size and its pixels. Equal pictures have equal digests."""

    @classmethod
    def of(cls, value: Any, whose: str = "A picture") -> "Picture":
        """The picture of a PIL image, an array of bytes, a path, the content of a file or a link with data.

        Args:
            value: The picture.
            whose: What errors call it.

        Raises:
            ContractError: The value is no picture, the file is damaged, or its conversion to 8 bits of red, green and blue
                would depend on a choice.
            ImportError: Pillow is missing.
        """
        if isinstance(value, cls):
            return value
        image = picture_of(value, whose)
        digest = hashlib.sha256(f"{image.size}".encode() + image.tobytes()).hexdigest()
        known = _KNOWN.get(digest)
        if known is None:
            known = _KNOWN[digest] = cls(link=_link_of(image), digest=digest)
        return known

    @classmethod
    def of_part(cls, part: Any, whose: str) -> "Picture | None":
        """The picture of a message's part, in Hugging Face's form or OpenAI's. None: the part is no picture.

        Raises:
            ContractError: The part has no picture, or a damaged one.
        """
        if not _is_picture(part):
            return None
        source = source_of(part)
        if source is None:
            raise ContractError(f"{whose} has no picture. Put it into the part: {{'type': 'image', 'image': ...}}.")
        return cls.of(source, whose)

    @staticmethod
    def accepts(value: Any) -> bool:
        """Whether a value is a picture by its type: a `Picture`, a PIL image or an array. A text may be anything."""
        pillow = sys.modules.get("PIL.Image")  # there are no PIL images before somebody imports it
        return isinstance(value, Picture | np.ndarray) or (pillow is not None and isinstance(value, pillow.Image))

    @property
    def image(self) -> Any:
        """The picture as a PIL image."""
        return picture_of(self, "A picture")

    def small_picture(self, side: int = 320) -> str:
        """A link with a copy of at most `side` pixels in each direction, for pages and tables."""
        image = self.image
        if max(image.size) <= side:
            return self.link
        image.thumbnail((side, side))
        return _link_of(image)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Picture) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"Picture({self.digest[:8]})"

    def __deepcopy__(self, memo: Any) -> "Picture":
        return self

    def to_state(self) -> dict[str, Any]:
        """The link, for checkpoints."""
        return {"link": self.link}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Picture":
        """The inverse of `to_state`."""
        return cls.of(state["link"])


_KNOWN: WeakValueDictionary[str, Picture] = WeakValueDictionary()
"""The pictures in use, by digest."""


def picture_of(value: Any, whose: str) -> Any:
    """A picture as a PIL image in RGB.

    Args:
        value: A `Picture`, a PIL image, an array [height, width, 3] or [height, width] of bytes, a path, the content of a file
            as bytes, a link "data:image/...;base64,...", or what a `datasets.Image` column holds without decoding.
        whose: What errors call the picture.

    Raises:
        ContractError: The value is no picture, the file is damaged, or its conversion to 8 bits of red, green and blue would
            depend on a choice: transparency needs a background, more than 8 bits need a range, and a film has many pictures.
        ImportError: Pillow is missing.
    """
    image_module = _pillow()
    if isinstance(value, Picture):
        value = value.link
    if isinstance(value, np.ndarray):
        return _in_rgb(_from_array(value, whose), whose)
    if isinstance(value, Mapping) and (value.get("bytes") or value.get("path")):  # a datasets.Image with decode=False
        value = value.get("bytes") or value["path"]
    if isinstance(value, str) and value.startswith("data:"):
        value = _from_link(value, whose)
    if isinstance(value, str) and "://" in value:
        raise ContractError(
            f"{whose} must not be loaded from the network during training; got {value[:80]!r}. Download it before, and pass "
            "the path."
        )
    if not isinstance(value, str | bytes | Path | image_module.Image):
        raise ContractError(
            f"{whose} must be a PIL image, an array of bytes [height, width, 3], a path, or the content of a file; got "
            f"{describe(value)}. Convert it, for example with PIL.Image.fromarray."
        )
    try:
        if isinstance(value, image_module.Image):  # its file may not be read yet, and may be closed
            return _in_rgb(value, whose)
        with image_module.open(BytesIO(value) if isinstance(value, bytes) else value) as opened:
            return _in_rgb(opened, whose)
    except ContractError:
        raise
    except (OSError, SyntaxError, ValueError, AttributeError, image_module.DecompressionBombError) as error:
        shown = repr(str(value)[:80]) if isinstance(value, str | Path) else f"the {type(value).__name__} given"
        raise ContractError(
            f"{whose} must be a picture that Pillow reads; {shown}: {error}. Repair it, or remove the state."
        ) from error


def pictures_of_row(row: Mapping[str, Any], whose: str) -> list[Any]:
    """The pictures in the columns of a row."""
    for column in COLUMNS:
        value = row.get(column)
        if value is not None:
            listed = value if isinstance(value, list | tuple) else [value]
            return [
                picture_of(each, f"Picture {i} of the column {column!r} of {whose}") for i, each in enumerate(listed)
            ]
    return []


def with_pictures(chat: Sequence[Mapping[str, Any]], given: Sequence[Any], whose: str) -> tuple[list[Any], list[Any]]:
    """A chat whose pictures are parts `{"type": "image"}`, and the pictures in the order of these parts.

    Args:
        chat: Messages. A part of type "image" without a picture takes the next one of the row's columns.
        given: Pictures of the row's columns. If no part asks for them, they stand before the text of the first message of
            the user, as TRL puts them.
        whose: What errors call the chat.
    """
    waiting = list(given)
    pictures: list[Any] = []
    if waiting and not any(_is_picture(part) for message in chat for part in _parts(message)):
        chat = _before_first_question(chat, len(waiting), whose)

    def read(part: Any, place: str) -> Any:
        if not _is_picture(part):
            return part
        source = source_of(part)
        if source is not None:
            pictures.append(picture_of(source, place))
        elif waiting:
            pictures.append(waiting.pop(0))
        else:
            raise ContractError(
                f"{place} has no picture, and the row's columns {' and '.join(map(repr, COLUMNS))} have none left. Put the "
                "picture into the part, {'type': 'image', 'image': ...}, or into the column."
            )
        return {"type": "image"}

    messages = [
        {**message, "content": [read(part, f"Part {i} of message {place} of {whose}") for i, part in enumerate(parts)]}
        if (parts := _parts(message))
        else message
        for place, message in enumerate(chat)
    ]
    if waiting:
        raise ContractError(
            f"{whose} has {len(given)} pictures in its columns, and parts of type 'image' for {len(given) - len(waiting)}. "
            "Give each picture a part, or remove all such parts: the pictures then stand before the first message of the user."
        )
    return messages, pictures


def source_of(part: Mapping[str, Any]) -> Any:
    """What a part of a message has as its picture. None: it has nothing."""
    name = next((name for name in SOURCES if part.get(name) is not None), None)
    source = None if name is None else part[name]
    if isinstance(source, Mapping) and "url" in source:
        source = source["url"]
    return f"data:;base64,{source}" if name == "base64" else source


def _before_first_question(chat: Sequence[Mapping[str, Any]], count: int, whose: str) -> list[Any]:
    place = next((place for place, message in enumerate(chat) if message["role"] == "user"), None)
    if place is None:
        raise ContractError(
            f"{whose} has {count} pictures in its columns and no message of the user to put them before. Add parts of the type "
            "'image' where the pictures belong."
        )
    message = chat[place]
    text = message.get("content") or ""
    parts = [{"type": "text", "text": text}] if isinstance(text, str) else list(text)
    return [*chat[:place], {**message, "content": [{"type": "image"}] * count + parts}, *chat[place + 1 :]]


def _parts(message: Mapping[str, Any]) -> list[Any]:
    content = message.get("content")
    return list(content) if isinstance(content, list | tuple) else []


def _is_picture(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in PICTURE_PARTS


def kinds_of_parts(chat: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The types of the parts of a chat's messages."""
    for message in chat:
        for part in _parts(message):
            yield str(part.get("type")) if isinstance(part, Mapping) else type(part).__name__


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(f"Pictures need Pillow: {install_command('vision')}") from error
    return Image


def _in_rgb(image: Any, whose: str) -> Any:
    if 0 in image.size:
        raise ContractError(f"{whose} must have pixels; its size is {image.size[0]} x {image.size[1]}. Remove it.")
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        raise ContractError(
            f"{whose} must have 8 bits per channel; its mode is {image.mode!r}, and what is black and what is white in it is "
            "not known. Scale it to 0 to 255: PIL.Image.fromarray((array / array.max() * 255).astype('uint8'))."
        )
    # photos of phones (MPO) have a second picture, for screens
    if image.format != "MPO" and getattr(image, "is_animated", False):
        raise ContractError(
            f"{whose} must be one picture; it has {image.n_frames}. Pass frames as pictures: "
            "PIL.ImageSequence.all_frames(picture)."
        )
    image.load()
    image = _turned(image)
    if image.has_transparency_data:
        image = image.convert("RGBA")
        if image.getchannel("A").getextrema()[0] < 255:
            raise ContractError(
                f"{whose} must be opaque; it has transparent pixels, whose colour depends on the background. Put it on one: "
                "PIL.Image.alpha_composite(PIL.Image.new('RGBA', picture.size, 'white'), picture.convert('RGBA'))."
            )
    return image if image.mode == "RGB" else image.convert("RGB")


def _turned(image: Any) -> Any:
    """The picture as viewers show it: cameras store how to turn it. If these fields are damaged, it stays as it is."""
    from PIL import ImageOps

    try:
        return image if image.getexif().get(ORIENTATION, 1) == 1 else ImageOps.exif_transpose(image)
    except (SyntaxError, ValueError, TypeError, OSError, struct.error):  # what Pillow raises for damaged fields
        return image


def _from_array(array: np.ndarray, whose: str) -> Any:
    shape = array.shape
    if array.dtype != np.uint8 or len(shape) not in (2, 3) or (len(shape) == 3 and shape[2] not in (1, 3, 4)):
        is_first = len(shape) == 3 and shape[0] in (1, 3, 4) and shape[2] not in (1, 3, 4)
        hints = {
            "np.moveaxis(array, 0, -1)": is_first,
            "list(array), which has one picture per entry": len(shape) == 4,
            "(array * 255).round().astype('uint8') if 1 is white, and array.round().astype('uint8') if 255 is":
                array.dtype.kind in "fb",
            "array.astype('uint8') if 255 is white": array.dtype.kind in "iu" and array.dtype != np.uint8,
        }  # fmt: skip
        advice = ", and then with ".join(hint for hint, fits in hints.items() if fits) or "PIL.Image.fromarray"
        raise ContractError(
            f"{whose} must be an array of uint8, [height, width], [height, width, 3] or [height, width, 4]; got {array.dtype}, "
            f"{list(shape)}. Convert it, for example with {advice}."
        )
    if 0 in shape:
        raise ContractError(f"{whose} must have pixels; its shape is {list(shape)}. Remove it.")
    return _pillow().fromarray(array[:, :, 0] if len(shape) == 3 and shape[2] == 1 else array)


def _link_of(image: Any) -> str:
    file = BytesIO()
    image.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _from_link(link: str, whose: str) -> bytes:
    head, _, data = link.partition(",")
    try:
        if not head.endswith(";base64"):
            raise ValueError("the link does not say ;base64")
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ContractError(
            f"{whose} must be data:image/...;base64,...; got {link[:40]!r} ...: {error}. Encode it with base64.b64encode."
        ) from error
