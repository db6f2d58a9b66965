r"""Verifiers: reward functions of one completion, for `CompletionRewards`.

    rewards = {
        "format": RegexMatch(pattern=tags_pattern("think", "answer"), how="full"),
        "right": ExactMatch(column="answer", extract=Between(start="<answer>", end="</answer>")),
        "length": OverlongPunishment(max_tokens=512, cache_tokens=128),
    }
    GRPOTrainer(..., reward_model=CompletionRewards(rewards, weights={"format": 0.1, "right": 1.0, "length": 0.5}))

A verifier that reads a column of the row returns None where the column is None: the reward does not apply to this row. No
verifier runs the text of a completion as code.

A column holds a text, a number or a list of accepted answers, of Python, torch, numpy or pandas. NaN means None.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, assert_never

from adapters.llm.completions import Completion
from grpo.arguments import Settings, setting
from grpo.errors import ConfigError

from .answer_text import last_match
from .columns import accepted_answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Between(Settings):
    """The text between the last pair of a start mark and an end mark. None if there is no such pair. For `extract=`.

    Example:
        >>> Between(start="<answer>", end="</answer>")("<answer>1</answer> no: <answer> 2 </answer>")
        ' 2 '
    """

    start: str
    """Mark before the text."""
    end: str
    """Mark after the text."""

    def __call__(self, text: str) -> str | None:
        """Return the text between the marks."""
        before_end, end, _ = text.rpartition(self.end)
        _, start, part = before_end.rpartition(self.start)
        return part if start and end else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactMatch(Settings):
    """Reward 1 if the completion equals the right answer, which is a column of the row, else 0.

    Example:
        >>> ExactMatch(ignore_case=True)("  New\\n York", {"answer": "new york"})
        1.0
    """

    column: str = "answer"
    """Column with the right answer, or with a list of accepted answers. A number equals every text that Python reads as it."""
    extract: Callable | None = None
    """Function that returns the part of the completion to compare. If it returns None, the reward is 0. Without a function, the
    whole completion is compared."""
    ignore_case: bool = False
    """Whether to ignore upper and lower case."""
    ignore_spacing: bool = True
    """Whether to ignore surrounding whitespace, and to treat each run of whitespace as one space."""

    def __call__(self, completion: str, state: object) -> float | None:
        """Compare the completion with its row's column."""
        accepted = accepted_answers(state, self.column, self)
        if not accepted:
            return None
        found = completion if self.extract is None else self.extract(completion)
        if found is None:
            return 0.0
        text = self._normalised(found)
        return float(any(replace(each, text=self._normalised(each.text)).equals(text) for each in accepted))

    def _normalised(self, text: str) -> str:
        text = " ".join(text.split()) if self.ignore_spacing else text
        return text.casefold() if self.ignore_case else text


@dataclass(frozen=True, slots=True, kw_only=True)
class RegexMatch(Settings):
    r"""Reward 1 if a regular expression matches, else 0. With `column`, the captured group must also equal the column.

    Some patterns take very long, and Python cannot interrupt a match. A repetition inside a repetition, such as `(a+)+$`, takes
    exponential time on text that almost matches. `.*<` takes quadratic time, because `.` also matches `<`: write `[^<]*<`.
    `max_chars` bounds quadratic time, and does not help against exponential time.

    Example:
        >>> RegexMatch(pattern=r"#### (-?\d+)", column="answer")("#### 3, no: #### 4", {"answer": 4})
        1.0
    """

    pattern: str
    """Regular expression in the syntax of `re`. Write flags inside the pattern: `(?is)`."""
    how: Literal["search", "full"] = "search"
    """"search": the pattern may match anywhere, and the last match counts. "full": it must match the whole text, with or
    without the tag before it in which the prompt ends (`Completion.opened`)."""
    column: str | None = None
    """Column that the captured group must equal, as in `ExactMatch`. Outer spaces do not count. None: a match is enough."""
    group: str | int = 1
    """The captured group to compare with `column`."""
    max_chars: int = setting(50_000, at_least=1)
    """Maximum number of characters to search, counted from the end. With how="full", longer texts never match."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: A value is invalid. The message names the field.
        """
        super(RegexMatch, self).__post_init__()  # slots=True creates a new class, so super() needs arguments
        try:
            groups = re.compile(self.pattern)
        except re.error as error:
            raise ConfigError(
                f"RegexMatch.pattern must be a regular expression; {self.pattern!r} is not: {error}."
            ) from error
        if self.column is not None and self.group not in {*range(groups.groups + 1), *groups.groupindex}:
            raise ConfigError(
                f"RegexMatch.group must be a group of the pattern {self.pattern!r}; got {self.group!r}. Add "
                "a group in parentheses."
            )

    def __call__(self, completion: str, state: object = None, action: Completion | None = None) -> float | None:
        """Match the completion, and compare the captured group with the row's column."""
        accepted = () if self.column is None else accepted_answers(state, self.column, self)
        if self.column is not None and not accepted:
            return None
        match = self._match(completion)
        if match is None and self.how == "full" and action is not None and action.opened:
            match = self._match(action.opened + completion)
        if match is None or self.column is None:
            return float(match is not None)
        found = (match[self.group] or "").strip()
        return float(any(replace(each, text=each.text.strip()).equals(found) for each in accepted))

    def _match(self, text: str) -> re.Match[str] | None:
        match self.how:
            case "search":
                return last_match(re.compile(self.pattern), text[-self.max_chars :])
            case "full":
                return re.fullmatch(self.pattern, text) if len(text) <= self.max_chars else None
            case _:
                assert_never(self.how)


def tags_pattern(*tags: str) -> str:
    """A pattern for `RegexMatch(how="full")`: these tags in this order, each exactly once, and nothing outside them.

    The text inside a tag is captured under the tag's name, for `group="answer"`. Matching takes linear time.

    Example:
        >>> format = RegexMatch(pattern=tags_pattern("think", "answer"), how="full")
        >>> format("<think>1 + 1</think> <answer>2</answer>"), format("<think>1</think><answer>2</answer><answer>3</answer>")
        (1.0, 0.0)
    """
    bad = [tag for tag in tags if not (tag.isidentifier() and tag.isascii())]
    if bad or not tags or len(set(tags)) < len(tags):
        raise ConfigError(
            f"tags_pattern needs different tags of letters, digits and '_'; got {', '.join(map(repr, tags))}."
        )
    content = rf"(?:(?!</?(?:{'|'.join(tags)})>)[\s\S])*"
    return r"\s*" + r"\s*".join(rf"<{tag}>(?P<{tag}>{content})</{tag}>" for tag in tags) + r"\s*"


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlongPunishment(Settings):
    """DAPO's soft overlong punishment: 0 for short completions, then falling linearly to -1.

    r = 0 if L <= max - cache;  ((max - cache) - L) / cache if L <= max;  -1 otherwise.   L = number of tokens

    Example:
        >>> OverlongPunishment(max_tokens=4, cache_tokens=2)(Completion(token_ids=(1, 2, 3), text="", finish_reason="end"))
        -0.5

    Source:
        Yu et al. 2025 (DAPO), arXiv:2503.14476, eq. 13.
    """

    max_tokens: int = setting(256, at_least=1)
    """Length at which the punishment reaches -1, usually `SamplingConfig.max_new_tokens`."""
    cache_tokens: int = setting(64, at_least=0)
    """Number of tokens before `max_tokens` at which the punishment starts. A larger number gives a gentler slope."""

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ConfigError: A value is invalid. The message names the field.
        """
        super(OverlongPunishment, self).__post_init__()  # slots=True creates a new class, so super() needs arguments
        if self.cache_tokens > self.max_tokens:
            raise ConfigError(
                f"OverlongPunishment.cache_tokens must be at most max_tokens={self.max_tokens}; got {self.cache_tokens}."
            )

    def __call__(self, action: Completion) -> float:
        """The punishment, from -1 to 0."""
        excess = len(action) - (self.max_tokens - self.cache_tokens)
        return 0.0 if excess <= 0 else -1.0 if excess >= self.cache_tokens else -excess / self.cache_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PerToken(Settings):
    """A constant reward per token, up to a number of tokens: a penalty or a bonus for length.

    Example:
        >>> PerToken(amount=-0.5)(Completion(token_ids=(1, 2, 3), text="", finish_reason="end"))
        -1.5
    """

    amount: float = -0.001
    """Reward per token. A negative amount favours short completions, a positive amount long completions."""
    max_tokens: int | None = setting(None, at_least=1)
    """Maximum number of tokens that count. None counts all."""

    def __call__(self, action: Completion) -> float:
        """The reward: amount * min(number of tokens, max_tokens)."""
        return self.amount * (len(action) if self.max_tokens is None else min(len(action), self.max_tokens))
