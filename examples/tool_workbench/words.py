"""Content words of a request."""

import re

from adapters.tools import Tool
from adapters.tools.policy.encoders import STOP_WORDS


def words(text: str) -> list[str]:
    """The words of a text in order, in lower case, without its values.

    Values are texts in double quotes, and words that contain a digit, a slash or an inner dot: numbers, dates, file names.

    Example:
        >>> words('Read 3 lines of notes/a.txt and don\\'t show "the end"')
        ['read', 'lines', 'of', 'and', 'don', 't', 'show']
    """
    tokens = re.sub(r'"[^"]*"', " ", text.lower()).split()
    tokens = [token.strip(".,;:!?()'") for token in tokens]
    return [word for token in tokens if not re.search(r"[\d./\\]", token) for word in re.findall(r"[^\W_]+", token)]


def content_words(text: str) -> frozenset[str]:
    """Stems of a text's words, without stop words and without values (see `words`).

    Inflected forms of an English word, and its most common derivations, have the same stem.

    Example:
        >>> sorted(content_words("Converting the units: a conversion of 3 units that converts"))
        ['convert', 'unit']
    """
    return frozenset(_stem(word) for word in words(text) if len(word) > 1 and word not in STOP_WORDS)


_ENDINGS = (
    ("rsion", "rt"), ("ision", "id"), ("ization", ""), ("isation", ""), ("ation", ""), ("ition", "it"), ("ction", "ct"),
    ("ment", ""), ("ating", ""), ("ising", ""), ("izing", ""), ("ated", ""), ("ised", ""), ("ized", ""), ("ate", ""),
    ("ise", ""), ("ize", ""), ("ying", ""), ("ied", ""), ("ing", ""), ("ence", ""), ("ent", ""), ("est", ""), ("ed", ""),
    ("er", ""), ("ply", "pl"), ("ly", ""), ("or", ""), ("ical", ""), ("al", ""), ("ic", ""), ("e", ""),
)  # fmt: skip


def _stem(word: str) -> str:
    if word.endswith("ies") and len(word) > 4:
        word = word[:-3] + "y"
    elif re.search(r"(ss|x|ch|sh)es$", word):
        word = word[:-2]
    elif word.endswith("s") and not word.endswith(("ss", "us", "is")):
        word = word[:-1]
    for ending, instead in _ENDINGS:
        stem = word.removesuffix(ending)
        if stem != word and len(stem) + len(instead) >= 3 and re.search(r"[aeiouy]", stem + instead):
            word = stem + instead
            break
    if re.search(r"([bdgmnprt])\1$", word):
        word = word[:-1]
    # what an ending has left: arrange, arranged; the y of summary, but not that of day
    return re.sub(r"(?<=[a-z]{3})e$|(?<=[^aeiou])y$", "", word)


def words_of(tool: Tool) -> frozenset[str]:
    """Content words of a tool's name and description."""
    return content_words(f"{tool.name}: {tool.description}")
