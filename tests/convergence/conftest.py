"""Whole runs, as users run them: checking shapes at every call would make them five times as long."""

from collections.abc import Iterator

import pytest

from tests.support import as_users_run_it


@pytest.fixture(autouse=True)
def without_shape_checks() -> Iterator[None]:
    with as_users_run_it():
        yield
