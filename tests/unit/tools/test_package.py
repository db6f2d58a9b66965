"""The source distribution and the wheel have what a release needs. `make package` also tries the wheel."""

import re
import zipfile
from pathlib import Path

import pytest

import grpo
from tools import package
from tools import published_readme as module
from tools.package import checked_distributions, contents, differing_files, missing_from_the_sdist
from tools.published_readme import NOT_RELATIVE, package_version, published_readme, with_absolute_links
from tools.try_wheel import BLOCK, blocks, core_distributions, normalized


def wheel(path: Path, **files: str) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def test_wheels_differ_in_the_files_that_one_lacks_or_that_changed(tmp_path: Path) -> None:
    first = wheel(tmp_path / "a.whl", same="1", changed="2", only_here="3")
    second = wheel(tmp_path / "b.whl", same="1", changed="4", only_there="5")
    assert differing_files(first, second) == ["changed", "only_here", "only_there"]
    assert differing_files(first, first) == []


def test_a_file_that_the_sdist_lacks_is_named_but_not_those_of_the_repository(tmp_path: Path) -> None:
    (tmp_path / "README.md").touch()
    files = [".github/workflows/ci.yml", ".gitignore", "README.md", "tests/conftest.py"]
    assert missing_from_the_sdist(tmp_path, files) == ["tests/conftest.py"]


@pytest.mark.slow
def test_the_sdist_has_tests_docs_and_changelog_and_builds_the_same_wheel(tmp_path: Path) -> None:
    sdist, built = checked_distributions(tmp_path)
    source = package.unpacked(sdist, tmp_path / "source")
    for name in (
        "CHANGELOG.md", "Makefile", "docs/llm.md", "tests/conftest.py", "examples/custom_domain.py", "benchmarks/README.md",
    ):  # fmt: skip
        assert (source / name).is_file(), name
    files = set(contents(built))
    assert {"grpo/__init__.py", "grpo/py.typed", "adapters/py.typed", "adapters/bandits/policies.py"} <= files
    folders = {"grpo", "adapters", f"model_agnostic_grpo-{package_version()}.dist-info"}
    assert {name.partition("/")[0] for name in files} == folders


def test_blocks_that_need_an_extra_or_are_excerpts_are_not_run_with_the_core() -> None:
    fence = "```python\na = {}\n```\n"
    page = "title\n\n" + fence.format(1) + "\n<!-- not run -->\n" + fence.format(2)
    page += "\n<!-- needs notebooks -->\n\n" + fence.format(3)
    page += "text\n\n" + fence.format(4) + "\n```bash\nls\n```\n"
    assert blocks(page) == ["a = 1\n", "a = 4\n"]
    assert len(BLOCK.findall(page)) == 4


def test_the_core_needs_torch_and_what_torch_needs_but_no_extra() -> None:
    found = core_distributions()
    assert {"model-agnostic-grpo", "torch", "numpy", "sympy", "typing-extensions", "wadler-lindig"} <= found
    assert not found & {"gymnasium", "transformers", "matplotlib", "pytest"}
    assert normalized("Typing_Extensions") == "typing-extensions"


# --- relative links of README.md become addresses in the repository, and nothing else changes
ROOT = Path(__file__).resolve().parents[3]
BASE = "https://example.org/p"


STAYS = ("[a](https://a.org/b)", "[a](#part)", "[a](mailto:a@b.org)", "```python\nx[0](a)\n```\n", "Float[Tensor](N")


@pytest.mark.parametrize(("text", "published"), [
    ("[a](docs/a.md#part)", f"[a]({BASE}/blob/v1.2/docs/a.md#part)"),
    ("[a](docs/decisions/)", f"[a]({BASE}/tree/v1.2/docs/decisions/)"),
    ("![a](docs/a.png)", f"![a]({BASE}/raw/v1.2/docs/a.png)"),
    ("[`a`](a.py), [b](b.md)", f"[`a`]({BASE}/blob/v1.2/a.py), [b]({BASE}/blob/v1.2/b.md)"),
    ("[![a](a.png)](a.md)", f"[![a]({BASE}/raw/v1.2/a.png)]({BASE}/blob/v1.2/a.md)"),  # both are replaced
    *((text, text) for text in STAYS),
])  # fmt: skip
def test_files_folders_and_pictures_have_their_own_addresses_and_the_rest_stays(text: str, published: str) -> None:
    assert with_absolute_links(text, BASE, "1.2") == published


def test_without_an_address_links_are_text_and_pictures_go() -> None:
    text = "![a](a.png)\n[`a`](a.md#part), [![a](a.png)](b.md), [c](https://c.org), [d](#d)\n```\n[e](e)\n```\n"
    assert with_absolute_links(text, None, "1.2") == "\n`a`, , [c](https://c.org), [d](#d)\n```\n[e](e)\n```\n"


@pytest.mark.parametrize("address", [None, BASE])
def test_no_link_of_the_published_readme_is_relative_and_each_file_exists(address: str | None, monkeypatch) -> None:
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
