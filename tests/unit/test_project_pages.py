"""Pages about the package say what pyproject.toml, the installed packages and the package itself do."""

import asyncio
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageMetadata, PackageNotFoundError, metadata, version
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import grpo
from adapters.tracking import RunFolder
from grpo import GRPOConfig, GRPOTrainer
from grpo.errors import DeadlineError
from grpo.rewards import ask_for_rewards
from tests.faults.conftest import LINES
from tests.support.policies import TablePolicy

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
PROJECT = tomllib.loads(PYPROJECT)["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIREMENTS = [
    requirement
    for entries in (PROJECT["dependencies"], *EXTRAS.values())
    for requirement in map(Requirement, entries)
    if requirement.name != PROJECT["name"]
]
CVE = re.compile(r"CVE-\d{4}-\d+")


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the table below a header that begins with `heading`, without code marks."""
    text = (ROOT / page).read_text(encoding="utf-8")
    (table,) = re.findall(rf"^\| {re.escape(heading)} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_the_version_has_one_source() -> None:
    assert "version" in PROJECT["dynamic"]
    assert version(PROJECT["name"]) == grpo.__version__
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(r"^version: (.+)$", citation, re.MULTILINE)[1] == grpo.__version__  # type: ignore[index]


def test_the_page_of_packages_names_each_extra() -> None:
    lines = [(name, packages) for names, _, packages in rows("grpo/README.md", "extra") for name in names.split(", ")]
    assert sorted(name for name, _ in lines) == sorted(EXTRAS), "each extra once"
    for extra, packages in lines:
        if packages:
            assert packages.split(", ") == list(dict.fromkeys(Requirement(entry).name for entry in EXTRAS[extra])), (
                extra
            )


def test_each_direct_dependency_has_a_line_with_its_extras() -> None:
    lines = rows("docs/project/licences.md", "package")
    assert [name for name, _, _ in lines] == list(dict.fromkeys(requirement.name for requirement in REQUIREMENTS))
    for name, _, why in lines:
        extras = [extra for extra, entries in EXTRAS.items() if name in {Requirement(entry).name for entry in entries}]
        assert why.startswith(", ".join(extras)), name


WORDS = {"Apache-2.0": "apache", "BSD-2-Clause": "bsd", "BSD-3-Clause": "bsd", "PSF-2.0": "python software foundation"}
"""What a licence is called where metadata has no SPDX expression. Others are called by their id."""


def says(found: PackageMetadata, licence: str) -> bool:
    """Whether metadata say that a package has the licence, in any of their three forms."""
    if found.get("License-Expression"):
        return found["License-Expression"] == licence
    classifiers = [each for each in found.get_all("Classifier") or [] if each.startswith("License")]
    said = " ".join([found.get("License") or "", *classifiers]).lower()
    return all(WORDS.get(name, name.lower()) in said for name in licence.split(" AND "))


def test_licences_are_those_of_the_installed_packages(subtests: pytest.Subtests) -> None:
    """vllm has its own environment, and the metadata of torchrl name no licence: its file LICENSE has MIT's text."""
    for name, licence, _ in rows("docs/project/licences.md", "package"):
        with subtests.test(name=name):
            try:
                found = metadata(name)
            except PackageNotFoundError:
                assert name == "vllm"
                continue
            assert says(found, licence) or name == "torchrl", (
                licence,
                found.get("License-Expression"),
                found.get("License"),
            )


def test_each_start_of_vllms_server_listens_on_this_computer_alone() -> None:
    starts = [
        line
        for folder, kind in (("docs", "md"), ("adapters", "py"), ("benchmarks", "py"), ("examples", "py"))
        for path in (ROOT / folder).rglob(f"*.{kind}")
        for line in path.read_text(encoding="utf-8").splitlines()
        if "vllm serve " in line and "--" in line
    ]
    assert len(starts) >= 3
    for line in starts:
        assert "--host 127.0.0.1" in line


def test_checkpoints_and_run_folders_follow_the_umask(tmp_path: Path) -> None:
    for umask in (0o077, 0o022):
        before, folder = os.umask(umask), tmp_path / oct(umask)
        try:
            trainer = GRPOTrainer(
                config=GRPOConfig(group_size=2),
                policy=TablePolicy("ab"),
                reward_model=lambda states, actions: [float(action) for action in actions],
            )
            with RunFolder(folder / "run") as sink:
                options = {"checkpoint_dir": folder / "checkpoints", "sinks": [sink]}
                trainer.train(["a"], num_iterations=1, progress=False, **options)
        finally:
            os.umask(before)
        found = [path for path in folder.rglob("*") if path.name != ".lock"]
        assert len(found) >= 8
        for path in found:
            whole = 0o777 if path.is_dir() else 0o666
            assert path.stat().st_mode & 0o777 == whole & ~umask, path


def test_a_process_that_an_async_reward_starts_outlives_its_deadline() -> None:
    """What the page says that a user has to end himself."""
    started: list[subprocess.Popen[bytes]] = []

    async def reward(states: Any, actions: Any) -> list[float]:
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
        await asyncio.sleep(60)
        return [0.0]

    try:
        with pytest.raises(DeadlineError, match=r"reward did not answer within 0\.2 s"):
            ask_for_rewards(reward, ["state"], ["action"], timeout=0.2)
        assert started[0].poll() is None
    finally:
        started[0].kill()
        started[0].wait()


def test_the_lowest_versions_in_the_table_are_those_of_pyproject(subtests: pytest.Subtests) -> None:
    lines = rows("SECURITY.md", "package")
    assert {cve for line in lines for cve in CVE.findall(line[2])} == set(CVE.findall(PYPROJECT))
    for name, lowest, why in lines:
        with subtests.test(name=name):
            found = [each for each in REQUIREMENTS if canonicalize_name(each.name) == name]
            assert found
            for requirement in found:
                (floor,) = (each.version for each in requirement.specifier if each.operator == ">=")
                assert floor == lowest
                assert all(Version(fixed) <= Version(lowest) for fixed in re.findall(r"below ([\d.]+\d)", why))
                assert not any(requirement.specifier.contains(last) for last in re.findall(r"up to ([\d.]+\d)", why))


def test_classifiers_name_the_versions_of_python_that_are_tested() -> None:
    classified = {name.rsplit(" ", 1)[1] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", name)}
    workflow = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    assert classified == {"3.11", "3.12", "3.13"} == set(re.findall(r'"(3\.\d+)"', workflow))


def test_the_hosted_checks_run_ours_with_pinned_actions_of_github() -> None:
    workflow = (ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8")
    uses = re.findall(r"uses: (\S+)@(\S+)", workflow)
    assert {name for name, _ in uses} == {"actions/checkout", "actions/setup-python"}
    assert all(re.fullmatch(r"[0-9a-f]{40}", commit) for _, commit in uses)
    assert "run: .ci/run\n" in workflow


def test_the_longest_tests_run_on_a_schedule_and_print_the_table_of_the_page() -> None:
    """Every line that they print is the beginning of one line of the page, and every name is a test."""
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    assert {"schedule", "workflow_dispatch"} <= jobs[True].keys()  # YAML reads the key `on` as true
    commands = {name: [step.get("run", "") for step in job["steps"]] for name, job in jobs["jobs"].items()}
    assert "make test-faults" in commands["faults"]
    assert "make test-frameworks" in commands["frameworks"]
    only = {name: job["if"].count("==") for name, job in jobs["jobs"].items()}
    assert only == {"ci": 0, "versions": 0, "faults": 2, "frameworks": 2}
    rows = re.findall(r"^\| (.*?) \|", (ROOT / "docs/reliability.md").read_text(encoding="utf-8"), re.MULTILINE)
    defined = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests/faults").glob("test_*.py"))
    for name, line in LINES.items():
        assert len([row for row in rows if row.startswith(line)]) == 1, line
        assert f"def {name}(" in defined, name
    assert "runs `make test-faults` before the change lands" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_our_checks_include_every_target_that_can_fail_a_release() -> None:
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    (targets,) = re.findall(r"for target in (.*); do", script)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert {"test", "test-slow", "lint", "types", "layers", "notebooks", "package"} <= set(targets.split())
    assert all(re.search(rf"^{target}(?: [\w-]+)*:", makefile, re.MULTILINE) for target in targets.split())


def test_no_page_leads_to_an_address_that_the_project_does_not_have() -> None:
    """Its address, when it has one, stands in pyproject.toml alone."""
    address = PROJECT.get("urls", {}).get("Repository", "example.org")
    assert all(url.startswith(address) for url in PROJECT.get("urls", {}).values())
    for page in ("README.md", "grpo/README.md", "CITATION.cff", "SECURITY.md", "CONTRIBUTING.md"):
        assert address not in (ROOT / page).read_text(encoding="utf-8"), page


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/index.md", "grpo/README.md"])
def test_the_commands_of_a_page_exist(page: str) -> None:
    """Targets of the Makefile, extras, and modules that are run."""
    text = (ROOT / page).read_text(encoding="utf-8")
    targets = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE))
    extras = {name for names in re.findall(r'"\.\[([\w,-]*)\]', text) for name in names.split(",")}
    modules = set(re.findall(r"python -m ((?:examples|benchmarks)\.[\w.]+)", text))
    assert targets | extras | modules
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert targets <= set(re.findall(r"^([a-z-]+)(?: [a-z-]+)*:", makefile, re.MULTILINE))
    assert extras <= set(EXTRAS)
    for module in modules:
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
