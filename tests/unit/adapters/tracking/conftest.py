"""No tracker uses the network, or the home folder, in these tests."""

import sys
from pathlib import Path

import pytest

from tests.support.tracked_runs import OFFLINE


@pytest.fixture(scope="session")
def trackio_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """trackio reads its folder once, when it is imported, which TRL may have done in another test."""
    return tmp_path_factory.mktemp("trackio")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, trackio_folder: Path) -> None:
    for name, value in {**OFFLINE, "TRACKIO_DIR": str(trackio_folder)}.items():
        monkeypatch.setenv(name, value)
    for name, module in [*sys.modules.items()]:
        if name.partition(".")[0] == "trackio" and hasattr(module, "TRACKIO_DIR"):
            monkeypatch.setattr(module, "TRACKIO_DIR", trackio_folder)
    monkeypatch.chdir(tmp_path)
