"""The processor of an image-text model: which token ids and fields a text with pictures has."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from adapters.llm.picture_prompts import TYPES, PicturePrompt, stacked
from grpo.arguments import describe
from grpo.errors import ContractError

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
        return PicturePrompt(token_ids, whole)

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
