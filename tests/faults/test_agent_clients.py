"""Agent programs whose clients are never closed use up neither files nor memory."""

from collections.abc import Callable

import pytest

from tests.support.agent_soak import soak

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]


CLIENTS = ["httpx", "openai", "openai, async", "pydantic-ai", "openai, parallel", "pydantic-ai, parallel"]
"""Clients of the benchmark that the daily environment has. The parallel ones make four requests at a time."""


@pytest.mark.parametrize("client", CLIENTS)
def test_a_thousand_conversations_leave_no_file_open(
    client: str, record_property: Callable[[str, object], None]
) -> None:
    """At most 20 are open after any of 20 rounds, and ten rounds need at most 10 MB more, and 5 MB more of what is in use."""
    num_files, growth, in_use = soak(client, 1000)
    record_property(client, f"{num_files} open files, {growth:+} MB, {in_use:+} MB in use")
    assert num_files <= 20
    assert growth <= 10
    assert in_use <= 5
