r"""Where the answer stands in a completion: in a box, after a mark or a statement, else in the last formula or number."""

import re
from collections import deque

_OPEN = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*(\{)?")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)
_JOINS = re.compile(
    r"(?:[\s$.]|\\[()\[\],;! ]|\\q?quad)*(?:,|;|\\?\band\b|\bor\b|\\text\s*\{[\s,]*(?:and|or)\s*\})"
    r"(?:[\s$,]|\\[()\[\],;! ]|\band\b|\bor\b)*"
)
_CONTINUES = re.compile(
    r"\s*\$?\s*(?:\\(?:times|cdot|div|frac|sqrt)(?![A-Za-z])|[/^\u00d7\u00f7\u00b7+]|\*(?!\*)\s*[0-9$\\(]|[-\u2212]\s*[0-9$\\(])"
)
_PERCENT = re.compile(r"\s*\$?\s*(?:\\?%|percent\b)")


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """The last of the matches that a search from the left finds. A match begins where the one before it ends, or later."""
    last = deque(pattern.finditer(text), maxlen=1)
    return last[0] if last else None


def boxed_answer(text: str, *, joins_lists: bool = True) -> str | None:
    r"""What the last `\boxed{...}` holds. None if the text has no box, and "" if the last box is empty or does not end.

    Boxes that follow one another as a list, `\boxed{1}, \boxed{2}`, are one answer. A box that goes on with an operator,
    `\boxed{3}/4`, holds no answer. Braces may be nested. A box in a box belongs to the outer box.

    Args:
        text: A completion or a solution.
        joins_lists: Whether boxes that follow one another as a list are one answer. Otherwise the last one counts.

    Example:
        >>> boxed_answer(r"\boxed{2}. No, it is \boxed{\frac{1}{3}}."), boxed_answer("3"), boxed_answer(r"\boxed{3}, \boxed{")
        ('\\frac{1}{3}', None, '')
    """
    answer, end, place = None, 0, 0
    while match := _OPEN.search(text, place):
        closing = _closing(text, match.end()) if match[1] else None
        if closing is None:
            return ""
        content = text[match.end() : closing].strip()
        joins = (
            joins_lists
            and answer
            and content
            and match.start() - end < 40
            and _JOINS.fullmatch(text, end, match.start())
        )
        answer = f"{answer}, {content}" if joins else content
        place = end = closing + 1
    if not answer:
        return answer
    if _CONTINUES.match(text, end):
        return ""
    return rf"{answer}\%" if _PERCENT.match(text, end) and "%" not in answer else answer


def _closing(text: str, place: int) -> int | None:
    """The place of the brace that closes a group whose content starts at `place`."""
    depth = 1
    for match in _BRACE.finditer(text, place):
        depth += {"{": 1, "}": -1}.get(match[0], 0)
        if depth == 0:
            return match.start()
    return None
