"""The source distribution and the wheel have what a release needs. `make package` also tries the wheel."""

import zipfile
from pathlib import Path

import pytest

from tools import package
from tools.package import checked_distributions, contents, differing_files, missing_from_the_sdist
from tools.published_readme import package_version
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
        "CHANGELOG.md",
        "Makefile",
        "docs/llm.md",
        "tests/conftest.py",
        "examples/custom_domain.py",
        "benchmarks/README.md",
    ):
        assert (source / name).is_file(), name
    files = set(contents(built))
    assert {"grpo/__init__.py", "grpo/py.typed", "adapters/py.typed", "adapters/bandits/policies.py"} <= files
    assert {name.partition("/")[0] for name in files} == {
        "grpo",
        "adapters",
        f"model_agnostic_grpo-{package_version()}.dist-info",
    }


def test_blocks_that_need_an_extra_or_are_excerpts_are_not_run_with_the_core() -> None:
    fence = "```python\na = {}\n```\n"
    page = (
        fence.format(1) + "\n<!-- not run -->\n" + fence.format(2) + "\n<!-- needs notebooks -->\n\n" + fence.format(3)
    )
    page += "text\n\n" + fence.format(4) + "\n```bash\nls\n```\n"
    assert blocks("title\n\n" + page) == ["a = 1\n", "a = 4\n"]
    assert len(BLOCK.findall("title\n\n" + page)) == 4


def test_the_core_needs_torch_and_what_torch_needs_but_no_extra() -> None:
    found = core_distributions()
    assert {"model-agnostic-grpo", "torch", "numpy", "sympy", "typing-extensions", "wadler-lindig"} <= found
    assert not found & {"gymnasium", "transformers", "matplotlib", "pytest"}
    assert normalized("Typing_Extensions") == "typing-extensions"
