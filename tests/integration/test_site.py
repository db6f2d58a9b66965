"""The site builds without a warning, fits in 1,280 px, loads nothing from elsewhere, and has every public name.

`test_readme.py` runs the code on the pages, and `test_docs.py` checks the settings, metrics and links that they name.
"""

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from grpo._advantages.groups import Baseline, Credit, Scale
from grpo._objective.weights import Aggregation
from grpo.config import CORRECTIONS
from grpo.divergence import KLEstimator
from grpo.surrogates import SURROGATES
from tests.support.browser import walked
from tests.support.launches import printed_by
from tools import site_pages
from tools.site_docstrings import DOCUMENTED

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
DOMAINS = sorted(path.parent.name for path in (ROOT / "adapters").glob("*/__init__.py"))
NEEDS_MORE = {"VLLMSampler", "VLLMServerSampler", "MCPServer", "train_with_trl", "train_parts"}
"""Their examples are not run with the pages, because they need vLLM, a server, TRL's trainer, or a model with pictures. Other
tests run them."""


def documented(package: str) -> dict[str, str]:
    """The names of a package on the pages of docs/api, each with the example below it."""
    pages = [path for path in sorted((DOCS / "api").glob("*.md")) if path.stem != "modules"]  # of whole modules
    found = [match for page in pages for match in DOCUMENTED.finditer(page.read_text(encoding="utf-8"))]
    return {
        match["name"].rpartition(".")[2]: match["example"] or ""
        for match in found
        if match["name"].rpartition(".")[0] == package
    }


@pytest.mark.parametrize("package", ["grpo", *(f"adapters.{domain}" for domain in DOMAINS)])
def test_every_public_name_is_on_an_api_page_with_an_example_that_runs(package: str) -> None:
    """The example uses the name. A name of `grpo` may have it in its docstring: `test_doctests.py` runs these."""
    module, examples = importlib.import_module(package), documented(package)
    assert set(module.__all__) == set(examples)
    for name in module.__all__:
        doctest = (getattr(module, name).__doc__ or "") if package == "grpo" else ""
        assert re.search(rf"\b{name}\b", examples[name]) or ">>>" in doctest, f"{name} has no example"
        assert ("not run" in examples[name]) == (name in NEEDS_MORE), name


def test_the_table_of_choices_lists_every_choice() -> None:
    rows = re.findall(r"^\| [^|]*\? \| ([^|]+) \| ([^|]+) \|$", (DOCS / "choosing.md").read_text(), re.MULTILINE)
    table = {
        setting.split(",")[0].strip(" `").split(".")[1]: set(re.findall(r"`(\w+)`", found)) for setting, found in rows
    }
    assert table == {
        "baseline": set(get_args(Baseline)),
        "scale": set(get_args(Scale)),
        "credit": set(get_args(Credit)),
        "surrogate": set(SURROGATES),
        "aggregation": set(get_args(Aggregation)),
        "kl_coef": set(get_args(KLEstimator)),
        "sampler_correction": set(CORRECTIONS),
    }


NAME_ROW = re.compile(
    r"^\| (?P<names>`.*?) \| (?P<where>[^|]+) \| (?P<here>[^|]+) \| (?P<differs>[^|]*) \|$", re.MULTILINE
)
PEERS = {
    "TRL": ("trl", ("trainer/grpo_config.py", "trainer/grpo_trainer.py")),
    "SB3": ("stable_baselines3", ("ppo/ppo.py", "common/base_class.py")),
    "torchrl": ("torchrl", ("objectives/llm/grpo.py", "objectives/ppo.py")),
}
"""Peers that are installed for the tests, and the files that hold their names."""


def source_of(peer: str) -> str:
    package, files = PEERS[peer]
    spec = importlib.util.find_spec(package)
    folder = Path(spec.submodule_search_locations[0])
    return "\n".join((folder / file).read_text(encoding="utf-8") for file in files)


def test_names_used_elsewhere_exist_there(subtests: pytest.Subtests) -> None:
    """More than 60 names, in alphabetical order. Those of installed libraries are in their source."""
    rows = list(NAME_ROW.finditer((DOCS / "names.md").read_text(encoding="utf-8")))
    names = [row["names"].strip("`").lower() for row in rows]
    assert len(names) >= 60
    assert names == sorted(names)
    sources = {peer: source_of(peer) for peer in PEERS}
    inherited = {
        "gradient_accumulation_steps",
        "per_device_train_batch_size",
        "report_to",
        "save_total_limit",
    }  # of transformers
    for row in rows:
        for peer in PEERS.keys() & set(re.split(r", ", row["where"])):
            for name in re.findall(r"`([\w/.]+)", row["names"]):
                with subtests.test(peer=peer, name=name):
                    last = name.rpartition("/")[2] if peer == "SB3" else name
                    assert last in inherited or f"{last}" in sources[peer] or last in NAMES_OF_EXAMPLES, name


NAMES_OF_EXAMPLES = {"sample_log_prob", "MCAdvantage"}
"""Names of torchrl that other files of it define."""


@pytest.mark.slow
def test_the_script_of_the_scaling_page_learns_on_two_ranks(tmp_path: Path) -> None:
    page = (DOCS / "scaling.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^```python\n(# train\.py.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    printed = printed_by("-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py", folder=tmp_path)
    assert printed.count("reward: ") == 1
    assert float(printed.partition("reward: ")[2][:3]) >= 0.9


@pytest.mark.slow
def test_the_structured_policies_learn_what_their_page_says(tmp_path: Path) -> None:
    """The page shows the reward before and after, rounded. Other machines may round differently."""
    page = (DOCS / "structured_actions.md").read_text(encoding="utf-8")
    shown = re.findall(r"# (-?[\d.]+) -> (-?[\d.]+)$", page, re.MULTILINE)
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL))
    printed = re.findall(r"^(-?[\d.]+) -> (-?[\d.]+)$", printed_by("-c", code, folder=tmp_path), re.MULTILINE)
    assert len(shown) == len(printed) == 3
    for (before, after), (old, new) in zip(shown, printed, strict=True):
        assert float(old) == pytest.approx(float(before), abs=0.3)
        assert float(new) == pytest.approx(float(after), abs=0.3)
        assert float(new) > float(old) + 0.5


def test_links_to_files_lead_to_their_pages_and_an_included_section_ends_before_the_next_heading() -> None:
    pages = {
        "grpo/README.md": "core.md", "notebooks/control.ipynb": "notebooks/control.md",
        "examples/customer_service": "examples/customer_service.md",
        "examples/migration/sb3_after.py": "examples/migration/sb3_after.md",
    }  # fmt: skip
    assert pages.items() <= site_pages.SOURCES.items()
    assert "examples/customer_service/model.py" not in site_pages.SOURCES  # a part of the page above
    text = site_pages.section_of(ROOT / "grpo" / "README.md", "Papers")
    assert "deepseek_math" in text
    assert "## " not in text.replace("### ", "")
    with pytest.raises(ValueError, match="no section 'Nothing'"):
        site_pages.section_of(ROOT / "README.md", "Nothing")


def build(folder: Path) -> str:
    """Build the site, and return what mkdocs says. The notice of Material for MkDocs about MkDocs 2 is switched off, as in the
    Makefile."""
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


FOUND_AT = {
    "lossType": "names.html",
    "GrpoOptimizer": "names.html",
    "W&B": "tracking.html",
    "kl_coef": "debugging.html",
    "how to resume": "reliability.html",
    "LoRA": "llm.html",
    "MCP server": "tools.html",
    "torchrun": "scaling.html",
    "clip_range": "names.html",
    "check_policy": "checks.html",
    "gymnasium": "control.html",
    "out of memory": "debugging.html",
}
"""What people search for, and a page that has to be among the first three."""


@pytest.mark.slow
def test_the_site_has_no_warning_no_wide_page_and_nothing_from_other_hosts(tmp_path: Path) -> None:
    """Neither a page nor a table or a block of code in it scrolls sideways at 1,280 px, and the search finds other names."""
    printed = build(tmp_path)
    assert [line for line in printed.splitlines() if not line.startswith("INFO ")] == []
    pages = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.html"))
    assert {"index.html", "names.html", "api/tools.html", "examples/custom_domain.html", "404.html"} <= set(pages)
    seen = walked(tmp_path, pages, list(FOUND_AT), phones=["index.html", "llm.html", "core.html"], seconds=280)
    assert set(seen["pages"]) == set(pages)
    wrong = {
        page: found
        for page, found in seen["pages"].items()
        if found["too_wide"] or found["boxes"] or found["elsewhere"]
    }
    assert wrong == {}
    assert seen["cut"] == {"index.html": [], "llm.html": [], "core.html": []}
    for words, links in seen["found"].items():
        first = list(dict.fromkeys(link.partition("?")[0].partition("#")[0].rpartition("/")[2] for link in links))[:3]
        assert FOUND_AT[words] in first, (words, first)
    papers = (tmp_path / "papers.html").read_text(encoding="utf-8")
    assert '<a href="https://arxiv.org/abs/2402.03300">' in papers


WIDE = """<!doctype html><title>wide</title><article>
<div style="width:1400px">wide</div><pre style="overflow:auto;width:100px">a line that is longer than its box, and scrolls</pre>
<img src="http://elsewhere.example/x.png"></article>"""


@pytest.mark.slow
def test_the_walk_finds_what_is_wide_and_what_is_from_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "wide.html").write_text(WIDE)
    (tmp_path / "fine.html").write_text("<!doctype html><title>fine</title><article>fine</article>")
    seen = walked(tmp_path, ["wide.html", "fine.html"])["pages"]
    assert seen["wide.html"]["too_wide"] >= 1400
    assert seen["wide.html"]["boxes"] == ["a line that is longer than its box, and scrolls"]
    assert seen["wide.html"]["elsewhere"] == ["http://elsewhere.example/x.png"]
    assert seen["fine.html"] == {"title": "fine", "too_wide": 0, "boxes": [], "elsewhere": []}
