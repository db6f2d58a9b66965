"""Build the wheel and the source distribution, check them, and try the wheel with the core's dependencies only.

    python -m tools.package            # leaves both in dist/

The wheel is installed into a new environment and tried outside the checkout by `tools/try_wheel.py`.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Iterable
from pathlib import Path

from tools.published_readme import repository_url

ROOT = Path(__file__).resolve().parents[1]
NOT_IN_THE_SDIST = (".gitignore", ".github/")
"""Files of the repository, not of the package."""


def copy_files(folder: Path) -> list[str]:
    """Copy the checkout without what git ignores: an old `build/` would bring deleted modules into a wheel."""
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    files = sorted(name for name in names if name and (ROOT / name).is_file())
    for name in files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    return files


def build(kind: str, source: Path, folder: Path) -> Path:
    """Build the "wheel" or the "sdist" of the files in `source`, in an isolated environment, as a release is built."""
    command = [sys.executable, "-m", "build", f"--{kind}", "--outdir", folder, source]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        sys.exit(f"{done.stdout}\nThe {kind} of {source} cannot be built.")
    (built,) = folder.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


def unpacked(sdist: Path, folder: Path) -> Path:
    """The folder with the files of a source distribution."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (source,) = folder.iterdir()
    return source


def missing_from_the_sdist(source: Path, files: Iterable[str]) -> list[str]:
    """The files of the checkout that a source distribution lacks."""
    return [name for name in files if not name.startswith(NOT_IN_THE_SDIST) and not (source / name).is_file()]


def contents(wheel: Path) -> dict[str, str]:
    """The SHA-256 of each file in a wheel, by name."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in sorted(archive.namelist())}


def differing_files(first: Path, second: Path) -> list[str]:
    """The files that two wheels do not have in common, or whose contents differ."""
    a, b = contents(first), contents(second)
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


def checked_distributions(folder: Path) -> tuple[Path, Path]:
    """Build the source distribution and the wheel into `folder`, and check what is in them.

    Raises:
        SystemExit: A file of the checkout is missing, or the source distribution builds another wheel.
    """
    with tempfile.TemporaryDirectory() as name:
        temporary = Path(name)
        files = copy_files(temporary / "checkout")
        sdist = build("sdist", temporary / "checkout", folder)
        wheel = build("wheel", temporary / "checkout", folder)
        source = unpacked(sdist, temporary / "sdist")
        if missing := missing_from_the_sdist(source, files):
            sys.exit(f"{sdist.name} lacks {', '.join(missing)}. Add these files to MANIFEST.in.")
        if differing := differing_files(wheel, build("wheel", source, temporary / "wheel")):
            sys.exit(f"The wheel that {sdist.name} builds differs from that of the checkout in {', '.join(differing)}.")
    return sdist, wheel


def try_in_a_new_environment(wheel: Path, folder: Path) -> None:
    """Install a wheel with its core dependencies only, and run `tools/try_wheel.py` in a folder without the checkout."""
    environment, elsewhere = folder / "environment", folder / "elsewhere"
    venv.create(environment, with_pip=True)
    python = environment / ("Scripts" if sys.platform == "win32" else "bin") / "python"
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*install, "-c", ROOT / "constraints.txt", wheel], check=True)
    elsewhere.mkdir()
    for name in ("README.md", "tools/try_wheel.py", "examples/custom_domain.py"):
        shutil.copy(ROOT / name, elsewhere)
    subprocess.run([python, "-I", "try_wheel.py", "README.md", "custom_domain.py"], cwd=elsewhere, check=True)
    try_the_cure(python, wheel)


def try_the_cure(python: Path, wheel: Path) -> None:
    """Install the two projects with the same import names, and then run the commands that grpo/README.md recommends.

    Raises:
        SystemExit: There is nothing to cure any more, so that the page says too much.
    """
    pip = [python, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    code = "from adapters.bandits import SoftmaxPolicy; from grpo import GRPOTrainer"
    imports = [python, "-I", "-c", code]
    for other in ("grpo", "adapters"):
        subprocess.run([*pip, "install", "--no-deps", other], check=True)
        if subprocess.run(imports, check=False, capture_output=True).returncode == 0:
            sys.exit(
                f"{other!r} on PyPI overwrites nothing any more. Correct the section on packages in grpo/README.md."
            )
        subprocess.run([*pip, "uninstall", "--yes", "grpo", "adapters"], check=True)
        subprocess.run([*pip, "install", "--force-reinstall", "--no-deps", wheel], check=True)
        subprocess.run(imports, check=True)
    print("The page's commands repair an environment with PyPI's grpo or adapters.")


def main() -> None:
    """Build, check and try."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    dist = ROOT / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    sdist, wheel = checked_distributions(dist)
    print(f"{sdist.name} has all files, and builds the same wheel as the checkout: {wheel.name}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        try_in_a_new_environment(wheel, Path(folder))
    if repository_url() is None:
        print("Do not upload these files: pyproject.toml has no address of the project. See docs/project/release.md.")


if __name__ == "__main__":
    main()
