"""Long waits for a reward model are logged."""

import pytest

from grpo._running.pending import sleep_and_tell
from tests.support.policies import TablePolicy
from tests.support.trainers import trainer_of


def test_a_long_wait_is_logged_every_30_seconds(caplog: pytest.LogCaptureFixture) -> None:
    slept: list[float] = []
    sleep_and_tell(75.0, slept.append)
    assert slept == [30.0, 30.0, 15.0]
    said = "Training waits for the reward model, and calls it again in {} s."
    assert [record.getMessage() for record in caplog.records] == [said.format(45), said.format(15)]
    sleep_and_tell(30.0, slept.append)
    assert slept[3:] == [30.0]
    assert len(caplog.records) == 2


def test_a_run_waits_aloud() -> None:
    assert trainer_of(TablePolicy()).collector.ask_for_rewards.sleep is sleep_and_tell
