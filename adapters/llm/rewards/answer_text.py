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

_NUMBER = (
    r"[-+\u2212]?(?:\\?[$\u20ac\u00a3])?\s?(?:[0-9]+(?:(?:,|\{,\}|\\,)[0-9]{3})*(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
    r"(?:\s?\\?%)?"
)
_SYMBOLS = "cm|mm|km|dm|nm|ft|yd|mi|in|kg|mg|lb|lbs|oz|ml|mL|kW|Hz|ms|mph|hr|hrs|min|sec|deg|m|g|h|s|l|L"
_UNIT_WORDS = (
    "[a-z]*(?:met(?:er|re)|lit(?:er|re)|gram|hour|minute|second|day|week|month|year|degree|dollar|cent|inch|mile|pound|percent)"
    "(?:s|es)?|feet|foot"
)
_POWER_OF_UNIT = rf"(?:{_SYMBOLS}|{_UNIT_WORDS})(?:\^\{{?[0-9]\}}?|[\u00b2\u00b3])?"
UNIT = rf"\s?(?:\u00b0|(?:square |cubic )?{_POWER_OF_UNIT}(?:\s?/\s?{_POWER_OF_UNIT})?(?![A-Za-z]))"
_RUN = (
    rf"(?<![\w.,])[(\[]{{0,4}}{_NUMBER}"
    rf"(?:\s?(?:[-+*/^:\u00d7\u00f7\u00b7\u2212=]|\*\*)\s?[(\[]{{0,4}}{_NUMBER}[)\]]{{0,4}}){{0,20}}"
    rf"(?:{UNIT})?(?![0-9]|[A-Za-z](?![A-Za-z]))"
)
_DELIMITED = (
    r"(?<!\\)\$\$(?P<a>(?:[^$]|\\\$){1,1000})\$\$|(?<![\\$])\$(?=[^\s$])(?P<b>(?:[^$\n\\]|\\.){0,500}(?:[^$\s\\]|\\[^\n]))\$(?![0-9])"
    r"|\\\((?P<c>.{1,1000}?)\\\)|\\\[(?P<d>.{1,1000}?)\\\]"
)
_ARGUMENT = r"\s*(?:\{[^{}]{1,100}\}|[0-9])"
_BARE = rf"[-\u2212]?[0-9]{{0,9}}(?:\\[dtc]?frac{_ARGUMENT}{_ARGUMENT}|\\sqrt{_ARGUMENT})"
_PIECE = re.compile(rf"{_DELIMITED}|(?P<e>{_BARE}|{_RUN})", re.DOTALL)
_STATED = re.compile(r"(?:####|(?i:\banswer\s*(?:is\b|equals\b|would\s+be\b|[:=]))(?:\s*:)?)[\s*_~]{0,20}")
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_SHORT_WORD = re.compile(rf"(?<![\\A-Za-z])(?!(?:{_SYMBOLS}|ln|or|pi)(?![A-Za-z]))[A-Za-z]{{2}}(?![A-Za-z])")
_FUNCTIONS = frozenset(
    re.findall(
        r"\w+", "sin cos tan cot sec csc log exp sqrt lim max min gcd lcm det arcsin arccos arctan sinh cosh tanh and"
    )
)


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


def answer_part(text: str) -> str:
    r"""The part of a completion that holds the answer; "" if there is none.

    It is the content of the last box; else what follows the last `####`, "answer is" or "answer:", if that is a formula or a
    number; else the last formula in `$...$`, `\(...\)` or `\[...\]`, or the last number.
    """
    boxed = boxed_answer(text)
    if boxed is not None:
        return boxed
    stated = last_match(_STATED, text)
    if stated is not None:
        line = text[stated.end() : stated.end() + 200].partition("\n")[0].strip()
        if line and _is_formula(line):
            return line
        if piece := _PIECE.match(text, stated.end()):
            return _content(piece)
    if len(text) <= 200 and _is_formula(text):
        return text
    piece = last_match(_PIECE, text)
    return text if piece is None and len(text) <= 200 else "" if piece is None else _content(piece)


def expected_part(text: str) -> str:
    """The answer in the text of a column: the whole text, unless a box, a mark or a formula in `$...$` marks it."""
    is_marked = any(mark in text for mark in ("$", "\\boxed", "\\fbox", "####", "\\(", "\\["))
    return answer_part(text) if is_marked else text


def has_words(text: str) -> bool:
    """Whether a text has words of three letters that are no functions."""
    return any(
        word[0] not in _FUNCTIONS
        for word in _WORD.finditer(re.sub(r"\\(?:begin|end)\s*\{[a-z]*\}|\\[A-Za-z]+", " ", text))
    )


def _is_formula(text: str) -> bool:
    return not has_words(text) and not _SHORT_WORD.search(text)


def _content(piece: re.Match[str]) -> str:
    content = next(group for group in piece.groups() if group is not None)
    percent = re.match(r"\s*\\?%", piece.string[piece.end() :])
    return rf"{content}\%" if percent and "%" not in content else content
