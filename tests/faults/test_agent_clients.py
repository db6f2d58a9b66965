"""Agent programs whose clients are never closed use up neither files nor memory."""

from collections.abc import Callable

import pytest

from tests.support.agent_soak import soak

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("client", ["httpx", "openai", "openai, async", "pydantic-ai"])
def test_a_thousand_conversations_leave_no_file_open(
    client: str, record_property: Callable[[str, object], None]
) -> None:
    """At most 20 are open after any of 20 rounds, and ten rounds need at most 10 MB more."""
    num_files, growth = soak(client, 1000)
    record_property(client, f"{num_files} open files, {growth:+} MB")
    assert num_files <= 20
    assert growth <= 10
