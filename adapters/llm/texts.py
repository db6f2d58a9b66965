"""The text of completions: which special tokens it keeps, and what the prompt has opened for it."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from grpo.errors import warn_user

from .prompts.control_tokens import OWN, special_tokens

_OPENED = re.compile(
    r"(?:<(?!(?:assistant|bot|model|user|system|s|bos|pad|end)>)([A-Za-z_]\w*)>|\[(THINK)\])\s*(?:(?:</\1>|\[/\2\])\s*)?$"
)


class CompletionTexts:
    """Decodes sampled tokens, and finds the tag in which a prompt ends.

    Args:
        tokenizer: The model's tokenizer.
        end_token_ids: Tokens that end a completion. They are never part of the text, and padding and begin tokens neither.
        keeps_special_tokens: Whether the text has the other special tokens.
        whose: The class that warnings name.
        text: What a reward reads, in warnings.
        opened: Where a reward finds the tag in which a prompt ends, in warnings.
    """

    def __init__(
        self,
        tokenizer: Any,
        end_token_ids: Iterable[int],
        *,
        keeps_special_tokens: bool,
        whose: str = "HFPolicy",
        text: str = "Completion.text",
        opened: str = "Completion.opened",
    ) -> None:
        self._tokenizer = tokenizer
        self._keeps = keeps_special_tokens
        self._whose, self._text, self._opened = whose, text, opened
        marks = (getattr(tokenizer, f"{name}_token_id", None) for name in ("eos", "pad", "bos"))
        self._left_out = {*end_token_ids, *(mark for mark in marks if mark is not None)}
        special = special_tokens(tokenizer)
        self.hidden = [text for token_id, text in special.items() if token_id in self._left_out or not self._keeps]
        """The special tokens that a text does not have."""
        # a start tag whose end tag is special, too, such as <think> and </think>; and marks such as <|channel|> of gpt-oss
        contents = set(special.values())
        closing = {text for text in contents if "/" in text and text.replace("/", "", 1) in contents}
        tags = (
            closing | {text.replace("/", "", 1) for text in closing} | {text for text in contents if OWN.search(text)}
        )
        self._tags = {
            token_id: text
            for token_id, text in special.items()
            if text in tags and token_id not in self._left_out and not self._keeps
        }
        self._roles = {text for text in contents if f"{text[:1]}/{text[1:]}" not in contents}
        """Special tokens that nothing closes. At the end of a prompt, they name who speaks."""
        self._has_warned_of_opening = False

    def __call__(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """The text of each row of tokens. The first tag that is left out is said in a warning."""
        for row in rows:
            self.say_lost(row)
        return self.decode(rows)

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """The text of each row of tokens, without a warning."""
        if self._keeps:
            rows = [[token for token in row if token not in self._left_out] for row in rows]
        return list(self._tokenizer.batch_decode(rows, skip_special_tokens=not self._keeps))

    def say_lost(self, row: Sequence[int]) -> None:
        """Warn once of tags among these tokens that the text leaves out."""
        lost = sorted({self._tags[token] for token in row if token in self._tags}) if self._tags else []
        if lost:
            self._tags = {}
            warn_user(
                f"{self._whose}: the model writes the special tokens {', '.join(lost)}, which {self._text} leaves out, so no "
                "reward can see them. Pass HFOptions(keep_special_tokens=True). (This warning is given once.)"
            )

    def opened_by(self, prompts: Sequence[Sequence[int]]) -> list[str]:
        r"""The tag in which each prompt ends, such as "<think>\n", or ""."""
        known: dict[int, str] = {}  # repeated states share one list
        for prompt in prompts:
            if id(prompt) not in known:
                tail = self._tokenizer.batch_decode([list(prompt[-64:])], skip_special_tokens=False)[0]
                found = _OPENED.search(tail)
                known[id(prompt)] = found[0] if found and found[0].strip() not in self._roles else ""
        for opened in known.values():
            if opened and "/" not in opened and not self._has_warned_of_opening:
                self._has_warned_of_opening = True
                warn_user(
                    f"{self._whose}: the prompt ends in {opened.strip()}, so completions begin inside this tag and do not "
                    f"write it. A format reward of your own has to read {self._opened} + {self._text}, as "
                    "RegexMatch(how='full') does with completions. (This warning is given once.)"
                )
        return [known[id(prompt)] for prompt in prompts]
