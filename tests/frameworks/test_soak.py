"""Conversations with four requests at a time, by three frameworks whose clients are never closed."""

import pytest

pytest.importorskip("verifiers", reason="the frameworks need a separate environment: make test-frameworks")

from tests.support.agent_soak import soak


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("client", ["openai, parallel", "pydantic-ai, parallel", "openai-agents, parallel"])
def test_conversations_with_parallel_requests_leave_no_file_open(client: str) -> None:
    """340 for each, so 1,020 in all."""
    num_files, growth = soak(client, 340)
    assert num_files <= 20
    assert growth <= 10
