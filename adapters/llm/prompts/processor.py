"""The processor of an image-text model: which token ids and fields a text with pictures has."""

import copy
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from adapters.llm.picture_prompts import TYPES, Ids, PicturePrompt, stacked
from grpo.arguments import describe
from grpo.errors import ContractError

from .pictures import Picture

KEPT_BYTES = 2**30
"""Memory for the fields of prompts, and of single pictures, between calls. An iteration needs each several times."""
OF_TOKENS = ("input_ids", "attention_mask", "labels")
"""What a processor returns about tokens. One prompt has no padding, and no answer."""


def is_processor(given: Any) -> bool:
    """Whether an argument is a processor with a tokenizer and not a tokenizer."""
    return hasattr(given, "tokenizer") and hasattr(given, "image_processor")


def tokenizer_of(processor: Any) -> Any:
    """The processor's tokenizer, with the processor's chat template. The given tokenizer is not changed."""
    template = getattr(processor, "chat_template", None)
    if template is None or template == getattr(processor.tokenizer, "chat_template", None):
        return processor.tokenizer
    tokenizer = copy.copy(processor.tokenizer)
    tokenizer.chat_template = template["default"] if isinstance(template, dict) else template
    return tokenizer


def picture_token_ids(processor: Any, config: Any) -> tuple[int, ...]:
    """The tokens that stand for pictures, frames and sounds in what the model reads.

    Raises:
        ContractError: The processor or the model does not name them.
    """
    named = [getattr(config, f"{kind}_token_id", None) for kind in ("image", "video", "audio")]
    found = sorted({token for token in named if isinstance(token, int)})
    if not found or not isinstance(getattr(processor, "image_token", None), str):
        raise ContractError(
            "HFPolicy: a processor and its model must name the token that stands for a picture, as image_token and "
            f"image_token_id; {type(processor).__name__} and {type(config).__name__} do not. Pass the tokenizer, for prompts "
            "without pictures."
        )
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """What a processor returns for one picture."""

    token_ids: list[int]
    """The tokens that stand for the picture in what the model reads."""
    fields: dict[str, Tensor]
    """The fields of the picture."""
    types: dict[str, dict[int, int]]
    """For each field with types of tokens: the types that are not 0, by token id."""

    @property
    def num_bytes(self) -> int:
        return sum(values.nbytes for values in self.fields.values())


class Processor:
    """Calls a processor of transformers for one prompt at a time.

    Args:
        processor: The processor.
        token_ids: Tokens that stand for pictures in what the model reads.
    """

    def __init__(self, processor: Any, token_ids: Sequence[int]) -> None:
        self._processor = processor
        self.mark: str = processor.image_token
        """What stands for a picture in a text, before the processor replaces it by the picture's tokens."""
        self.token_ids = tuple(token_ids)
        """Tokens that stand for pictures in what the model reads."""
        self._read: dict[str, _Read] = {}
        """Single pictures by their digests, the oldest first."""

    def encoded(self, parts: Sequence[str], pictures: Sequence[Picture], whose: str) -> list[int]:
        """Token ids of a text that may be a part of a conversation. Each picture is processed by itself, so that its tokens do
        not depend on the pictures that come before and after it.

        Args:
            parts: The text, cut where no token may reach across.
            pictures: The pictures, in the order of their marks.
            whose: What errors call the text.
        """
        behind_marks = re.compile(f"(?<={re.escape(self.mark)})")
        pieces = [piece for part in parts for piece in behind_marks.split(part) if piece]
        return list(self(pieces, [picture.image for picture in pictures], whose, add_special_tokens=False))

    def prompt(self, token_ids: Sequence[int], pictures: Sequence[Picture], later: Ids = ()) -> PicturePrompt:
        """The prompt of token ids that `encoded` has returned, and tokens between them. Its fields are computed when they are
        needed.

        Args:
            token_ids: Token ids of the prompt.
            pictures: The pictures of the prompt, and of `later`, in order.
            later: Token ids of what follows the prompt, if there are pictures in it.
        """
        different = {picture.digest: picture for picture in pictures}

        def fields() -> dict[str, Tensor]:
            read = {digest: self._read_alone(picture) for digest, picture in different.items()}
            each = [read[picture.digest] for picture in pictures]
            joined = {name: stacked([one.fields[name] for one in each]) for name in each[0].fields}
            for name in each[0].types:
                types = {token: kind for one in each for token, kind in one.types[name].items()}
                joined[name] = torch.tensor([[types.get(token, 0) for token in (*token_ids, *later)]])
            return joined

        # what follows is a part of the identity, because its pictures may be at other places
        identity = f"{[picture.digest for picture in pictures]} {list(later)}"
        digest = hashlib.sha256(identity.encode()).hexdigest()
        return PicturePrompt(
            token_ids,
            fields,
            digest=digest,
            is_whole=len(later) > 0,
            marked=lambda: (self._with_marks(token_ids, pictures), [picture.image for picture in pictures]),
        )

    def _with_marks(self, token_ids: Sequence[int], pictures: Sequence[Picture]) -> list[int]:
        """The token ids of `prompt` with one mark in place of the tokens of each picture."""
        mark, found, left = self._tokens([self.mark], {"add_special_tokens": False}), [], list(token_ids)
        for picture in pictures:
            own = self._read_alone(picture).token_ids
            places = (place for place in range(len(left)) if left[place : place + len(own)] == own)
            place = next(places, None)
            if place is None:
                raise ContractError(
                    f"The tokens of a picture must stand together in its prompt, for an engine that processes pictures itself; "
                    f"those of {type(self._processor).__name__} join the text around them. Use sampler='decoding'."
                )
            found += [*left[:place], *mark]
            left = left[place + len(own) :]
        return [*found, *left]

    def _tokens(self, parts: Sequence[str], options: Mapping[str, Any]) -> list[int]:
        """Token ids of a text with marks, as the tokenizer alone reads it."""
        tokenizer = self._processor.tokenizer
        return [token for part in parts for token in tokenizer(part, **options)["input_ids"]]

    def _read_alone(self, picture: Picture) -> _Read:
        """What the processor returns for one picture."""
        found = self._read.get(picture.digest)
        if found is None:
            ids, fields = self._of_part(self.mark, [picture.image], "A picture", {"add_special_tokens": False})
            found = self._read[picture.digest] = _Read(
                token_ids=ids,
                fields={name: values for name, values in fields.items() if not name.endswith(TYPES)},
                types={
                    name: {token: kind for token, kind in zip(ids, values[0].tolist(), strict=True) if kind}
                    for name, values in fields.items()
                    if name.endswith(TYPES)
                },
            )
            drop_oldest(self._read, {digest: one.num_bytes for digest, one in self._read.items()})
        return found

    def __call__(self, parts: Sequence[str], pictures: Sequence[Any], whose: str, **options: Any) -> PicturePrompt:
        """The prompt of a text with pictures.

        Args:
            parts: The text, cut where no token may reach across.
            pictures: The pictures, in the order of their marks.
            whose: What errors call the prompt.
            options: Options of the tokenizer.
        """
        marks = [part.count(self.mark) for part in parts]
        # some processors put the mark of a picture before a text that has none (PaliGemma)
        if len(parts) > 1 and sum(marks) != len(pictures):
            raise ContractError(
                f"{whose} has {len(pictures)} pictures, and its text {sum(marks)} times the mark {self.mark!r} of a picture. "
                "Use the processor's chat template, which writes one mark per picture."
            )
        token_ids: list[int] = []
        fields: dict[str, list[Tensor]] = {}
        begin = 0
        for part, count in zip(parts, marks, strict=True):
            own = pictures[begin : begin + count] if len(parts) > 1 else pictures
            begin += count
            ids, found = self._of_part(part, own, whose, options)
            token_ids += ids
            for name, values in found.items():
                fields.setdefault(name, []).append(values)
        if not set(self.token_ids).intersection(token_ids):
            raise ContractError(
                f"{whose} has {len(pictures)} pictures, and no token for them. Write {self.mark!r} where each picture belongs."
            )
        whole = {
            name: torch.cat(parts, 1) if name.endswith(TYPES) else stacked(parts) for name, parts in fields.items()
        }
        return PicturePrompt(token_ids, whole, marked=lambda: (self._tokens(parts, options), list(pictures)))

    def _of_part(
        self, text: str, pictures: Sequence[Any], whose: str, options: dict[str, Any]
    ) -> tuple[list[int], dict[str, Tensor]]:
        given = {"images": [list(pictures)]} if pictures else {}
        try:
            found = dict(self._processor(text=[text], return_tensors="pt", **given, **options))
        except (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
            raise ContractError(
                f"{whose} must fit its processor; {type(self._processor).__name__} says of {len(pictures)} pictures and "
                f"{text.count(self.mark)} marks {self.mark!r}: {type(error).__name__}: {str(error).strip()[:300]} Correct what "
                "this error names."
            ) from error
        token_ids = found["input_ids"][0].tolist()
        fields = {name: values for name, values in found.items() if name not in OF_TOKENS}
        strange = [name for name, values in fields.items() if not isinstance(values, Tensor)]
        if strange:
            raise ContractError(
                f"{whose}: the processor must return tensors; {type(self._processor).__name__} returns {strange[0]!r} as "
                f"{describe(fields[strange[0]])}, which cannot be put together with those of other prompts. Use another "
                "architecture."
            )
        return token_ids, fields


def drop_oldest(kept: dict[Any, Any], sizes: Mapping[Any, int]) -> None:
    """Remove the oldest entries until the rest have `KEPT_BYTES` at most. The last one stays."""
    held = sum(sizes.values())
    for key in list(kept)[:-1]:
        if held <= KEPT_BYTES:
            break
        held -= sizes[key]
        del kept[key]
