"""Prompts with pictures: token ids, and the fields that a model reads beside them, such as pixels."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, overload

import torch
from torch import Tensor

from grpo.errors import ContractError

Ids: TypeAlias = Sequence[int]
"""A prompt: a list of token ids, or a `PicturePrompt`."""
Marked: TypeAlias = tuple[list[int], list[Any]]
"""Token ids with one mark for each picture, and the pictures as PIL images."""
TYPES = "token_type_ids"
"""Fields whose names end so have one number per token. All other fields have pictures, or parts of pictures, on their first
axis."""


class PicturePrompt(Sequence[int]):
    """A prompt with pictures. As a sequence, it is its token ids, in which each picture has the tokens that it takes.

    Two prompts are equal if their token ids and their pictures are.

    Args:
        token_ids: Token ids, with placeholders where the model puts the pictures.
        fields: What the processor calls the rest, for this prompt alone: `pixel_values`, `image_grid_thw`,
            `mm_token_type_ids` ([1, P]), ... Or a function that returns them, which is called when a model reads them.
        digest: A hash of the pictures. None: it is computed from the fields.
        is_whole: Whether the fields also have pictures of what follows the prompt, so that each completion is computed with its
            prompt as one row. Types of tokens are then [1, P + T].
        marked: A function that returns the token ids with one mark in place of each picture, and the pictures. None: the prompt
            is for models in this process only.
    """

    __slots__ = ("_fields", "_marked", "_token_ids", "digest", "is_whole")

    def __init__(
        self,
        token_ids: Sequence[int],
        fields: Mapping[str, Tensor] | Callable[[], Mapping[str, Tensor]],
        *,
        digest: str | None = None,
        is_whole: bool = False,
        marked: Callable[[], Marked] | None = None,
    ) -> None:
        self._token_ids = tuple(token_ids)
        self._fields = fields
        self._marked = marked
        self.digest = digest or _digest(self.fields)
        """A hash of the pictures. Prompts with other pictures have other digests."""
        self.is_whole = is_whole
        """Whether the fields also have pictures of what follows the prompt."""

    def __len__(self) -> int:
        return len(self._token_ids)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> tuple[int, ...]: ...
    def __getitem__(self, place: int | slice) -> int | tuple[int, ...]:
        return self._token_ids[place]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PicturePrompt) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[tuple[int, ...], str]:
        return self._token_ids, self.digest

    @property
    def fields(self) -> Mapping[str, Tensor]:
        """What the model reads beside the token ids, by name."""
        if callable(self._fields):
            self._fields = self._fields()
        return self._fields

    @property
    def marked(self) -> Marked:
        """The token ids with one mark in place of each picture, and the pictures as PIL images. An engine that processes
        pictures itself reads them.

        Raises:
            ContractError: The prompt was made without pictures.
        """
        if self._marked is None:
            raise ContractError(
                "A prompt for another engine needs its pictures; got fields only. Pass a text or a chat."
            )
        return self._marked()

    @property
    def num_bytes(self) -> int:
        """Memory of the fields."""
        return sum(values.nbytes for values in self.fields.values())

    def followed_by(self, token_ids: Sequence[int]) -> "PicturePrompt":
        """The prompt with more tokens of text at its end."""

        def fields() -> dict[str, Tensor]:
            return {
                name: torch.cat([values, values.new_zeros(1, len(token_ids))], 1)
                if name.endswith(TYPES) and not self.is_whole
                else values
                for name, values in self.fields.items()
            }

        whole = [*self._token_ids, *token_ids]
        return PicturePrompt(whole, fields, digest=self.digest, is_whole=self.is_whole)


def followed_by(prompt: Ids, token_ids: Sequence[int]) -> Ids:
    """A prompt with more tokens of text at its end."""
    return prompt.followed_by(token_ids) if isinstance(prompt, PicturePrompt) else [*prompt, *token_ids]


def distinct(prompts: Sequence[Ids]) -> tuple[list[Ids], list[int]]:
    """The different prompts, and the index of each prompt among them."""
    known: dict[tuple[int, ...] | PicturePrompt, int] = {}
    places = [
        known.setdefault(prompt if isinstance(prompt, PicturePrompt) else tuple(prompt), len(known))
        for prompt in prompts
    ]
    return [prompt if isinstance(prompt, PicturePrompt) else list(prompt) for prompt in known], places


def has_pictures(prompts: Sequence[Ids]) -> bool:
    """Whether one of the prompts has pictures."""
    return any(isinstance(prompt, PicturePrompt) for prompt in prompts)


def has_later_pictures(prompts: Sequence[Ids]) -> bool:
    """Whether pictures follow one of the prompts, so that each completion is computed with its prompt as one row."""
    return any(isinstance(prompt, PicturePrompt) and prompt.is_whole for prompt in prompts)


def joined_fields(
    prompts: Sequence[Ids], width: int, *, on_the_left: bool, device: torch.device, dtype: torch.dtype
) -> dict[str, Any]:
    """The fields of one forward pass over the prompts, by name. Empty if no prompt has pictures.

    The pictures of all prompts stand one after another, and smaller ones are padded with zeros, as processors do.

    Args:
        prompts: Prompts with and without pictures.
        width: Number of tokens that each prompt is padded to.
        on_the_left: Whether the padding is on the left.
        device: Where to put the fields.
        dtype: Type of the fields that are no integers.
    """
    pictured = [prompt for prompt in prompts if isinstance(prompt, PicturePrompt)]
    joined: dict[str, Any] = {}
    for name in dict.fromkeys(name for prompt in pictured for name in prompt.fields):
        if name.endswith(TYPES):
            values = torch.stack([_types(prompt, name, width, on_the_left) for prompt in prompts])
        else:
            values = stacked([prompt.fields[name] for prompt in pictured if name in prompt.fields])
        joined[name] = values.to(device, dtype if values.is_floating_point() else None)
    return joined


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """The tensors one after another along their first axis. All other axes are padded with zeros at their ends."""
    sizes = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    padding = [
        [each for size, own in zip(sizes[::-1], part.shape[:0:-1], strict=True) for each in (0, size - own)]
        for part in parts
    ]
    return torch.cat(
        [torch.nn.functional.pad(part, pad) if any(pad) else part for part, pad in zip(parts, padding, strict=True)]
    )


def require_no_pictures(prompts: Sequence[Ids], sampler: str, instead: str) -> None:
    """Refuse pictures for a sampler that does not read them."""
    rows = [row for row, prompt in enumerate(prompts) if isinstance(prompt, PicturePrompt)]
    if rows:
        raise ContractError(f"{sampler} reads token ids only; the prompts at {rows[:8]} have pictures. {instead}")


def _types(prompt: Ids, name: str, width: int, on_the_left: bool) -> Tensor:
    """The type of each token. Padding, and tokens of a completion, are text: 0."""
    types = torch.zeros(width, dtype=torch.int64)
    if isinstance(prompt, PicturePrompt) and name in prompt.fields:
        own = prompt.fields[name][0][:width]
        begin = width - len(own) if on_the_left else 0
        types[begin : begin + len(own)] = own
    return types


def _digest(fields: Mapping[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(fields):
        values = fields[name].contiguous()
        found.update(f"{name} {values.dtype} {tuple(values.shape)}".encode())
        found.update(values.flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()
