"""Content words of a request."""

import re

from adapters.tools import Tool
from adapters.tools.text.encoders import STOP_WORDS


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
    """The first four letters of each of a text's words, without stop words and without values (see `words`).

    Most inflected forms of an English word begin with the same four letters.

    Example:
        >>> sorted(content_words("Converting the units: a conversion of 3 units that converts"))
        ['conv', 'unit']
    """
    return frozenset(word[:4] for word in words(text) if len(word) > 1 and word not in STOP_WORDS)


def words_of(tool: Tool) -> frozenset[str]:
    """Content words of a tool's name and description."""
    return content_words(f"{tool.name}: {tool.description}")
