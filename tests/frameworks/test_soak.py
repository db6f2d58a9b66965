"""Conversations by frameworks whose clients are never closed, with one and with four requests at a time."""

import pytest

pytest.importorskip("verifiers", reason="the frameworks need a separate environment: make test-frameworks")

from tests.support.agent_soak import soak

CLIENTS = [
    ("litellm", 1000, 10), ("openai-agents", 1000, 10), ("openai-agents, parallel", 1000, 10), ("langchain", 1000, 20),
    ("openai, parallel", 340, 10), ("pydantic-ai, parallel", 340, 10),
]  # fmt: skip
"""Clients of the benchmark, their conversations, and the MB that the resident memory may grow. That of LangChain has ever more
free memory between what is in use."""


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("client", "num_conversations", "most"), CLIENTS)
def test_conversations_leave_no_file_open_and_ten_rounds_use_no_more_memory(
    client: str, num_conversations: int, most: float
) -> None:
    """The lowest memory of rounds 16 to 20 is compared with the lowest of rounds 6 to 10."""
    num_files, growth, in_use = soak(client, num_conversations)
    print(f"{client}: {num_files} open files, {growth:+} MB, {in_use:+} MB in use")
    assert num_files <= 20
    assert growth <= most
    assert in_use <= 5
