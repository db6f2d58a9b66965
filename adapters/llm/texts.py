"""The text of completions: which special tokens it keeps, and what the prompt has opened for it."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from grpo.errors import warn_user

_OPENED = re.compile(
    r"(?:<(?!(?:assistant|bot|model|user|system|s|bos|pad|end)>)([A-Za-z_]\w*)>|\[(THINK)\])\s*(?:(?:</\1>|\[/\2\])\s*)?$"
)


class CompletionTexts:
    """Decodes sampled tokens, and finds the tag in which a prompt ends.

    Args:
        tokenizer: The model's tokenizer.
        end_token_ids: Tokens that end a completion. They are never part of the text, and padding and begin tokens neither.
        keeps_special_tokens: Whether the text has the other special tokens.
    """

    def __init__(self, tokenizer: Any, end_token_ids: Iterable[int], *, keeps_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._keeps = keeps_special_tokens
        marks = (getattr(tokenizer, f"{name}_token_id", None) for name in ("eos", "pad", "bos"))
        self._left_out = {*end_token_ids, *(mark for mark in marks if mark is not None)}
        added = getattr(tokenizer, "added_tokens_decoder", {})
        special = {token_id: str(token) for token_id, token in added.items() if token.special}
        # a start tag whose end tag is special, too: <think> and </think>
        contents = set(special.values())
        closing = {text for text in contents if "/" in text and text.replace("/", "", 1) in contents}
        tags = closing | {text.replace("/", "", 1) for text in closing}
        self._tags = {token_id: text for token_id, text in special.items() if text in tags} if not self._keeps else {}
        self._has_warned_of_opening = False

    def __call__(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """The text of each row of tokens."""
        if self._keeps:
            kept = [[token for token in row if token not in self._left_out] for row in rows]
            return list(self._tokenizer.batch_decode(kept, skip_special_tokens=False))
        if self._tags:
            lost = sorted({self._tags[token] for row in rows for token in row if token in self._tags})
            if lost:
                self._tags = {}
                warn_user(
                    f"HFPolicy: completions have the special tokens {', '.join(lost)}, which Completion.text leaves out, so no "
                    "reward can see them. Pass HFOptions(keep_special_tokens=True). (This warning is given once.)"
                )
        return list(self._tokenizer.batch_decode(rows, skip_special_tokens=True))

    def opened_by(self, prompts: Sequence[Sequence[int]]) -> list[str]:
        r"""The tag in which each prompt ends, such as "<think>\n", or ""."""
        known: dict[int, str] = {}  # repeated states share one list
        for prompt in prompts:
            if id(prompt) not in known:
                tail = self._tokenizer.batch_decode([list(prompt[-64:])], skip_special_tokens=False)[0]
                found = _OPENED.search(tail)
                known[id(prompt)] = found[0] if found else ""
        for opened in known.values():
            if opened and "/" not in opened and not self._has_warned_of_opening:
                self._has_warned_of_opening = True
                warn_user(
                    f"HFPolicy: the prompt ends in {opened.strip()}, so completions begin inside this tag and do not write it. "
                    'RegexMatch(how="full") reads the tag as well. A format reward of your own has to read Completion.opened '
                    "+ Completion.text. (This warning is given once.)"
                )
        return [known[id(prompt)] for prompt in prompts]
