"""Checks of token ids: padding, tokens that the model does not have, and characters that the tokenizer does not know."""

import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from grpo.arguments import describe
from grpo.errors import ContractError

from .control_tokens import whole_characters
from .said_once import SaidOnce


class TokenChecks:
    """Refuses or says once what is wrong with the token ids of prompts."""

    def __init__(self, tokenizer: Any, vocabulary_size: int, say: SaidOnce) -> None:
        self._tokenizer = tokenizer
        self._vocabulary_size = vocabulary_size
        self._say = say
        self._known_characters: set[str] = set()

    def without_padding(self, token_ids: Sequence[int], row: Mapping[str, Any], position: int) -> list[int]:
        """Token ids without those that the row's attention_mask masks. Without a mask, padding at both ends is left out."""
        kept, mask = list(token_ids), row.get("attention_mask")
        if mask is not None:
            mask = [bool(value) for value in mask] if hasattr(mask, "__len__") else mask
            if not isinstance(mask, list) or len(mask) != len(kept):
                raise ContractError(
                    f"The attention_mask of state {position} must have one value per token ({len(kept)}); got "
                    f"{describe(mask)}. Pass the mask of this prompt, or remove the column."
                )
            kept = [token for token, is_kept in zip(kept, mask, strict=True) if is_kept]
        pad, bos = (getattr(self._tokenizer, name, None) for name in ("pad_token_id", "bos_token_id"))
        others = (bos, self._tokenizer.eos_token_id, getattr(self._tokenizer, "unk_token_id", None))
        if mask is None and pad is not None and pad not in others:
            while kept and kept[-1] == pad:
                kept.pop()
            while kept and kept[0] == pad:
                kept.pop(0)
            repeated = pad in kept
        else:
            repeated = pad is not None and mask is None and kept[:2] == [pad, pad]
        if repeated:
            self._say(
                f"the token ids of state {position} have padding tokens ({pad}), which the model reads as text. Remove them, "
                "or pass the column attention_mask."
            )
        if bos is not None and bos != pad and kept[:2] == [bos, bos]:
            self._say(
                f"the token ids of state {position} begin with two begin-of-sequence (BOS) tokens. Tokenize a rendered chat "
                "with add_special_tokens=False."
            )
        return kept

    def check_characters(self, text: str, token_ids: Sequence[int], position: int) -> None:
        """Say once which characters the tokenizer does not know. It drops them, or writes its unknown token."""
        found = set(text)
        halves = sorted(c for c in found if unicodedata.category(c) == "Cs")
        if halves and "\ufffd" in whole_characters(text):
            self._say(
                f"the prompt of state {position} has half a character, {halves[0]!r}, and the model reads U+FFFD in its place. "
                "The text was cut inside a character. Cut it before or after."
            )
        new = {c for c in found - self._known_characters if not c.isspace() and unicodedata.category(c)[0] not in "CM"}
        self._known_characters |= new
        unknown_ids = _unknown_ids(self._tokenizer)
        for character in sorted(new) if hasattr(self._tokenizer, "backend_tokenizer") or unknown_ids else ():
            tokens = set(self._tokenizer(character, add_special_tokens=False)["input_ids"])
            if not tokens or (tokens & unknown_ids and not unknown_ids.isdisjoint(token_ids)):
                self._say(
                    f"the tokenizer has no token for {character!r} in the prompt of state {position}, so the model does not "
                    "read it. Use the model's tokenizer, or replace the character."
                )

    def check(self, token_ids: Sequence[int], position: int) -> None:
        """Refuse tokens that the model does not have, and warn once of a prompt that ends in the end token."""
        if min(token_ids) < 0:
            raise ContractError(
                f"The prompt of state {position} must have token ids of at least 0; got {min(token_ids)}. Remove the labels of "
                "ignored tokens, such as -100."
            )
        largest = max(token_ids)
        if largest >= self._vocabulary_size:
            raise ContractError(
                f"The prompt of state {position} must have token ids below {self._vocabulary_size}, the size of the model's "
                f"vocabulary; got {largest} ({self._tokenizer.convert_ids_to_tokens(largest)!r}). Use the model's tokenizer, "
                "or call model.resize_token_embeddings(len(tokenizer)) after adding tokens."
            )
        # a token that also begins texts may be a whole prompt (GPT-2)
        if len(token_ids) > 1 and token_ids[-1] == self._tokenizer.eos_token_id:
            self._say(
                f"the prompt of state {position} ends in the end-of-sequence token {self._tokenizer.eos_token!r}, so "
                "the model has to continue a text that has ended. Remove the token from the text or the chat template, or set "
                "tokenizer.add_eos_token = False."
            )


def _unknown_ids(tokenizer: Any) -> set[int]:
    model = getattr(getattr(tokenizer, "backend_tokenizer", None), "model", None)
    unknown = getattr(model, "unk_token", None)
    ids = {getattr(tokenizer, "unk_token_id", None), tokenizer.convert_tokens_to_ids(unknown) if unknown else None}
    return {token for token in ids if token is not None}
