"""Relative links of README.md become addresses in the repository, and nothing else changes."""

import re
from pathlib import Path

import pytest

import grpo
from tools import published_readme as module
from tools.published_readme import NOT_RELATIVE, package_version, published_readme, with_absolute_links

ROOT = Path(__file__).resolve().parents[3]
BASE = "https://example.org/p"


def published(text: str) -> str:
    return with_absolute_links(text, BASE, "1.2")


def test_files_folders_and_pictures_have_their_own_addresses() -> None:
    assert published("[a](docs/a.md#part)") == f"[a]({BASE}/blob/v1.2/docs/a.md#part)"
    assert published("[a](docs/decisions/)") == f"[a]({BASE}/tree/v1.2/docs/decisions/)"
    assert published("![a](docs/a.png)") == f"![a]({BASE}/raw/v1.2/docs/a.png)"
    assert published("[`a`](a.py), [b](b.md)") == f"[`a`]({BASE}/blob/v1.2/a.py), [b]({BASE}/blob/v1.2/b.md)"


def test_a_picture_in_a_link_and_the_link_are_replaced() -> None:
    assert published("[![a](a.png)](a.md)") == f"[![a]({BASE}/raw/v1.2/a.png)]({BASE}/blob/v1.2/a.md)"


def test_urls_places_on_the_page_and_code_stay() -> None:
    for text in (
        "[a](https://a.org/b)",
        "[a](#part)",
        "[a](mailto:a@b.org)",
        "```python\nx[0](a)\n```\n",
        "Float[Tensor](N",
    ):
        assert published(text) == text


def test_without_an_address_links_are_text_and_pictures_go() -> None:
    text = "![a](a.png)\n[`a`](a.md#part), [![a](a.png)](b.md), [c](https://c.org), [d](#d)\n```\n[e](e)\n```\n"
    assert with_absolute_links(text, None, "1.2") == "\n`a`, , [c](https://c.org), [d](#d)\n```\n[e](e)\n```\n"


@pytest.mark.parametrize("address", [None, BASE])
def test_no_link_of_the_published_readme_is_relative_and_each_file_exists(
    address: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "repository_url", lambda: address)
    prose = re.sub(r"^```.*?^```", "", published_readme(), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^()\s]+)\)", prose)
    prefix = re.compile(rf"{re.escape(BASE)}/(?:blob|tree|raw)/v{re.escape(package_version())}/([^#]+)")
    files = [found[1] for target in targets if (found := prefix.match(target))]
    assert all(NOT_RELATIVE.match(target) for target in targets)
    assert len(files) > 10 or address is None
    assert not re.search(r"(?:src|href)=\"(?!https?:|#)", prose), "HTML with a relative address is not rewritten"
    assert [name for name in files if not (ROOT / name).exists()] == []


def test_the_version_is_read_without_importing_grpo() -> None:
    assert package_version() == grpo.__version__
