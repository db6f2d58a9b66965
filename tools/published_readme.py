"""README.md as PyPI shows it. PyPI has no relative links or pictures, so they become addresses in the repository.

As long as the repository has no public address, pictures are left out, and links become plain text.
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"(^```.*?^```[ \t]*$)", re.MULTILINE | re.DOTALL)
PICTURE = re.compile(r"!\[(?P<text>[^\]]*)\]\((?P<target>[^()\s]+)\)")
LINK = re.compile(r"(?<!!)\[(?P<text>(?:[^\[\]]|!\[[^\]]*\]\([^)]*\))*)\]\((?P<target>[^()\s]+)\)")
"""The text of a link may be a picture."""
NOT_RELATIVE = re.compile(r"[a-z][a-z0-9+.-]*:|#|/")
"""The beginning of a URL, or of a link to a place on the same page."""


def repository_url() -> str | None:
    """The address of the repository, if it has one. It stands in one place, in pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project.get("urls", {}).get("Repository", "").rstrip("/") or None


def package_version() -> str:
    """`grpo.__version__`, without importing grpo: a build has no torch."""
    found = re.search(
        r'^__version__ = "(.+)"$', (ROOT / "grpo" / "__init__.py").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert found is not None, "grpo/__init__.py has no line __version__ = ..."
    return found[1]


def with_absolute_links(text: str, repository: str | None, version: str) -> str:
    """Replace relative links and pictures of a page in Markdown by addresses at the tag of a release. Code stays as it is.

    Without a `repository`, relative links become their text, and relative pictures go.
    """

    def address(target: str, kind: str) -> str:
        return target if NOT_RELATIVE.match(target) else f"{repository}/{kind}/v{version}/{target}"

    def picture(found: re.Match[str]) -> str:
        if repository is None and not NOT_RELATIVE.match(found["target"]):
            return ""
        return f"![{found['text']}]({address(found['target'], 'raw')})"

    def link(found: re.Match[str]) -> str:
        if repository is None and not NOT_RELATIVE.match(found["target"]):
            return found["text"]
        return f"[{found['text']}]({address(found['target'], 'tree' if found['target'].endswith('/') else 'blob')})"

    parts = FENCE.split(text)  # every second part is a block of code
    return "".join(part if i % 2 else LINK.sub(link, PICTURE.sub(picture, part)) for i, part in enumerate(parts))


def published_readme() -> str:
    """README.md with links to the files of this version."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return with_absolute_links(text, repository_url(), package_version())
