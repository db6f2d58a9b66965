"""What plots of all domains share: matplotlib, labels at the ends of lines, and files of pictures.

Requires matplotlib, which each function imports when it draws. This module knows no domain, so every adapter may use it.
"""

import io
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from xml.etree import ElementTree

from grpo.arguments import install_command

Args = ParamSpec("Args")
ResultT = TypeVar("ResultT")

SVG: dict[Any, Any] = {"svg.fonttype": "none", "text.parse_math": False}
"""Settings of matplotlib for SVG: text stays text, and a dollar sign in it means no formula."""

NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


def is_installed() -> bool:
    """Whether matplotlib can be imported."""
    try:
        return find_spec("matplotlib") is not None
    except ValueError:  # recovery: an import that a program has forbidden finds nothing
        return False


def pyplot() -> Any:
    """Import matplotlib's pyplot, or say how to install it."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError(f"Plots need matplotlib: {install_command('tracking')}") from error
    return plt


def saved(figure: Any, path: str | Path | None, dpi: int = 110) -> Any:
    """Write a figure to a file, whose folder is created, and close it. None only returns the figure, which stays open."""
    if path is not None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=dpi)
        pyplot().close(figure)
    return figure


def label_ends(axis: Any, ends: Mapping[str, tuple[float, str]], x: float, *, distance: float = 0.07) -> None:
    """Write the name of each line beside its end, in its colour. Names that would overlap are moved apart.

    Args:
        axis: Where the lines are.
        ends: The last value of each line, and its colour, by its name.
        x: Where the lines end.
        distance: Smallest distance between two names, as a fraction of the axis' height.
    """
    bottom, top = axis.get_ylim()
    names = sorted(ends, key=lambda name: ends[name][0])
    heights = [(ends[name][0] - bottom) / (top - bottom) for name in names]
    for _ in range(100):  # push neighbours apart until no two overlap
        for i in range(1, len(heights)):
            overlap = distance - (heights[i] - heights[i - 1])
            if overlap > 0:
                heights[i - 1] -= overlap / 2
                heights[i] += overlap / 2
        if heights:
            heights[0] = max(heights[0], 0.0)
    for name, height in zip(names, heights, strict=True):
        end = (x, bottom + height * (top - bottom))
        beside = {"xytext": (5, 0), "textcoords": "offset points", "annotation_clip": False}
        axis.annotate(name, end, color=ends[name][1], va="center", fontsize=10, **beside)


def for_pages(draw: Callable[Args, ResultT]) -> Callable[Args, ResultT]:
    """Let a function draw with the settings that `svg_of` needs."""

    @wraps(draw)
    def drawing(*args: Args.args, **kwargs: Args.kwargs) -> ResultT:
        import matplotlib

        with matplotlib.rc_context(SVG):
            return draw(*args, **kwargs)

    return drawing


def svg_of(figure: Any, titles: Mapping[str, Sequence[str]], label: str, colours: Mapping[str, str]) -> str:
    """A figure of a function `for_pages` as one `<svg>` element for a page of HTML. Equal figures are equal text.

    Args:
        figure: The figure.
        titles: For each `gid` of a line with markers, the words that a browser shows at each of its points, as a `<title>`. A
            point has the CSS class `point`, and `hidden` if the `gid` begins with "points".
        label: What the picture shows, for those who do not see it. Pictures of one page have different labels.
        colours: Maps a colour of the figure, `#2563c9`, to what the page calls it, `var(--reward)`.
    """
    import matplotlib

    written = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": label}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the browser has the glyph, and draws the text
        figure.savefig(written, format="svg", transparent=True, metadata=NO_METADATA)
    text = re.sub(r' xmlns="[^"]*"| xmlns:xlink="[^"]*"', "", written.getvalue()).replace("xlink:href", "href")
    root = ElementTree.fromstring(text)
    for parent in list(root.iter()):
        if parent.tag == "g" and parent.get("id") in titles:
            for use, words in zip(parent.iter("use"), titles[parent.get("id", "")], strict=True):
                use.set("class", "point hidden" if parent.get("id", "").startswith("points") else "point")
                ElementTree.SubElement(use, "title").text = words
        if parent.tag == "g":
            parent.attrib.pop("id", None)  # matplotlib numbers groups in each figure, and a page has several figures
        parent.attrib.pop("clip-path", None)  # everything is inside its axes
        for child in list(parent):
            if child.tag in ("style", "clipPath", "metadata"):
                parent.remove(child)
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.attrib |= {"role": "img", "aria-label": label}
    page = re.sub(r"font-family: [^;\"]*;? ?", "", ElementTree.tostring(root, encoding="unicode"))
    for colour, name in colours.items():
        page = page.replace(colour, name)
    return page
