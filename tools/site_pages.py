"""The pages of the site that are not in docs/, and the links to them. `mkdocs.yml` names this file as a hook.

Pages in docs/ link to files elsewhere in the repository, which works where a repository is browsed. The site has a page for
each of these files: Markdown as it is, programs as code, notebooks with their pictures. Links are rewritten to these pages.
"""

import ast
import base64
import json
import os
import re
import sys
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))  # a hook is loaded by its path
from site_docstrings import DOCUMENTED

ROOT = Path(__file__).resolve().parents[1]

MARKDOWN = {
    "README.md": "index.md",
    "grpo/README.md": "core.md",
    "adapters/README.md": "adapters/index.md",
    "adapters/control/README.md": "adapters/control.md",
    "adapters/llm/README.md": "adapters/llm.md",
    "adapters/tools/README.md": "adapters/tools.md",
    "benchmarks/README.md": "benchmarks/index.md",
}
"""Files that are pages of the site as they are, and where. docs/index.md stands for README.md."""

PLAIN = ("LICENSE", "CITATION.cff")
"""Files at the top that are shown as plain text."""

FOUND = {
    "examples": "Examples",
    "notebooks": "Notebooks",
    "benchmarks": "Benchmarks",
    "decisions": "Decisions",
    "project": "Project",
}
"""Folders of the site whose pages `mkdocs.yml` does not list, and the title of each in the menu. The project's pages are the
documents at the top of the repository, and each page of docs/ that is not listed."""

LINK_OR_FENCE = re.compile(r"^```.*?^```|(?P<before>\]\()(?P<target>[^)\s]+)\)", re.MULTILINE | re.DOTALL)
TAG = re.compile(r"(<[^>]+>)")
NO_LINKS = re.compile(r"</?(?:a|code|pre)\b")
"""Tags whose content gets no links."""
PAPER = re.compile(r"arXiv:(\d{4}\.\d{4,5})")
INCLUDED = re.compile(r"^<!-- section (?P<heading>[^,]+), from (?P<path>\S+) -->$", re.MULTILINE)


def sources() -> dict[str, str]:
    """Each file of the repository that has a page outside docs/, and the page's place on the site."""
    top = [path.name for path in sorted(ROOT.glob("*.md")) if path.name not in MARKDOWN]
    pages = {**MARKDOWN, **{name: f"project/{name.partition('.')[0].lower()}.md" for name in (*top, *PLAIN)}}
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.md")):
        pages[f"benchmarks/results/{path.name}"] = f"benchmarks/{path.name}"
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        pages[f"notebooks/{path.name}"] = f"notebooks/{path.stem}.md"
    examples = ROOT / "examples"
    for path in sorted(examples.rglob("*.py")):
        whole = path if path.parent == examples or path.stem != "__main__" else path.parent
        is_part = (path.parent / "__main__.py").exists() and whole == path  # shown on the page of its package
        if path.stem != "__init__" and not is_part:
            name = whole.relative_to(examples)
            pages[f"examples/{name}"] = f"examples/{name.with_suffix('.md')}"
    return pages


SOURCES = sources()
ORIGINS = {page: source for source, page in SOURCES.items() if source != "README.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, and the pictures of the notebooks."""
    for page, source in ORIGINS.items():
        path = ROOT / source
        if path.suffix == ".md":
            files.append(File.generated(config, page, abs_src_path=str(path)))
        elif path.suffix == ".ipynb":
            text, pictures = notebook_page(path)
            files.append(File.generated(config, page, content=text))
            for name, picture in pictures.items():
                files.append(File.generated(config, f"notebooks/{name}", content=picture))
        elif source in PLAIN:
            files.append(File.generated(config, page, content=plain_page(path)))
        else:
            files.append(File.generated(config, page, content=program_page(path)))
    unlisted = [file.src_uri for file in files.documentation_pages() if f"'{file.src_uri}'" not in str(config.nav)]
    folders = {folder: [page for page in unlisted if page.startswith(f"{folder}/")] for folder in FOUND}
    folders["project"] += [page for page in unlisted if PurePosixPath(page).parts[0] not in FOUND]
    config.nav += [{FOUND[folder]: sorted(pages, key=index_first)} for folder, pages in folders.items()]
    return files


def index_first(page: str) -> tuple[bool, str]:
    """Sorts the pages of a folder by name, after its index."""
    return PurePosixPath(page).stem not in ("index", "README"), page


def on_page_markdown(markdown: str, page: Page, files: Files, **_: Any) -> str:
    """Insert sections of other files, and let links to files of the repository lead to their pages."""
    here = page.file.src_uri
    page.meta["search"] = {"boost": boost_of(here)}
    origin = PurePosixPath(ORIGINS.get(here, f"docs/{here}"))

    def linked(found: re.Match[str], folder: PurePosixPath) -> str:
        target = found["target"]
        if target is None or "://" in target or target.startswith(("#", "mailto:")):
            return found[0]
        name, hash_mark, anchor = target.partition("#")
        uri = page_of(os.path.normpath(folder / name), files)
        relative = os.path.relpath(uri, PurePosixPath(here).parent) if uri else name  # mkdocs reports what has no page
        return f"]({relative}{hash_mark}{anchor})"

    def included(found: re.Match[str]) -> str:
        text = section_of(ROOT / found["path"], found["heading"])
        return LINK_OR_FENCE.sub(lambda link: linked(link, PurePosixPath(found["path"]).parent), text)

    if here.startswith("api/"):  # docstrings show these examples
        markdown = DOCUMENTED.sub(r"::: \g<name>\n\g<options>", markdown)
    markdown = LINK_OR_FENCE.sub(lambda link: linked(link, origin.parent), markdown)
    return INCLUDED.sub(included, markdown)


def boost_of(page: str) -> float:
    """How much a page counts in the search: names of others and guides first, then references, then reasons and history."""
    if page.startswith(("decisions/", "project/")):
        return 0.2
    if page == "names.md":
        return 300.0  # words such as `lossType` are split, and its rows have each part only once
    return 1.0 if "/" in page else 4.0


def on_page_content(html: str, **_: Any) -> str:
    """Let numbers of papers lead to the papers, except where they are code or a link already."""
    inside, parts = 0, TAG.split(html)
    for place, part in enumerate(parts):
        if place % 2:
            inside += (-1 if part[1] == "/" else 1) if NO_LINKS.match(part) else 0
        elif not inside:
            parts[place] = PAPER.sub(r'<a href="https://arxiv.org/abs/\g<1>">\g<0></a>', part)
    return "".join(parts)


def page_of(path: str, files: Files) -> str | None:
    """The page or picture of the site that shows a file or folder of the repository."""
    if path in SOURCES:
        return SOURCES[path]
    candidates = (
        [path.removeprefix("docs/"), f"{path.removeprefix('docs/')}/README.md"] if path.startswith("docs/") else []
    )
    return next((uri for uri in candidates if files.get_file_from_path(uri)), None)


def section_of(path: Path, heading: str) -> str:
    """The text below a heading of the second level, up to the next heading of that level."""
    text = path.read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"{path} has no section {heading!r}: correct the comment that includes it.")
    return found[1].strip()


def program_page(path: Path) -> str:
    """A program, or the files of a package, as code below their names."""
    parts = (
        sorted(path.glob("*.py"), key=lambda part: (part.stem != "__main__", part.name)) if path.is_dir() else [path]
    )
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    first = (ast.get_docstring(ast.parse(parts[0].read_text(encoding="utf-8"))) or module).split("\n")[0]
    text = f"# {path.stem.replace('_', ' ').capitalize()}\n\n{first}\n\nRun it with `python -m {module}`.\n"
    for part in parts:
        text += f"\n## `{part.relative_to(ROOT)}`\n\n```python\n{part.read_text(encoding='utf-8')}```\n"
    return text


def plain_page(path: Path) -> str:
    """A text as it is."""
    return f"# {path.name}\n\n```text\n{path.read_text(encoding='utf-8')}```\n"


def notebook_page(path: Path) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, with what its cells printed, and its pictures by name."""
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            kind = next((kind for kind in ("png", "gif") if f"image/{kind}" in data), None)
            if kind is not None:
                name, picture = f"{path.stem}-{len(pictures) + 1}.{kind}", data[f"image/{kind}"]
                pictures[name] = base64.b64decode("".join(picture))
                parts.append(f"![Output of the cell above]({name})")
            elif printed := printed_text(output):
                parts.append(f"```text\n{printed}\n```")
    return "\n\n".join(parts) + "\n", pictures


def printed_text(output: dict[str, Any]) -> str:
    """What a cell printed or returned, as text."""
    return "".join(output.get("text") or output.get("data", {}).get("text/plain", "")).rstrip()
