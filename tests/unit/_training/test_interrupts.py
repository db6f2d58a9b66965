"""What the first and the second signal do, in scripts, in interactive sessions, in threads and in forked children."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

from grpo import TrainingInterrupted
from grpo._training.interrupts import Interrupts
from grpo.checkpoint import read_checkpoint
from tests.support.policies import TablePolicy
from tests.support.trainers import by_hand

ROOT = Path(__file__).parents[3]
BOTH = (signal.SIGTERM, signal.SIGINT)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_a_signal_raises_at_once_or_at_the_next_check(subtests: pytest.Subtests) -> None:
    def stop_later() -> None:
        send(number)
        reached.append("after the signal")
        interrupts.check()
        reached.append("after the check")

    def stop_at_once() -> None:
        with interrupts.at_once():
            send(number)
            reached.append("after the signal")

    def stop_before() -> None:
        send(number)
        with interrupts.at_once():
            reached.append("inside")

    for number in BOTH:
        for stops, expected in [(stop_later, ["after the signal"]), (stop_at_once, []), (stop_before, [])]:
            with subtests.test(number=number, stops=stops.__name__):
                interrupts, reached = Interrupts(), list[str]()
                with pytest.raises(TrainingInterrupted) as stop, interrupts.handled(*BOTH):
                    stops()
                assert reached == expected
                assert (stop.value.signal_number, stop.value.code) == (number, 128 + number)


def test_a_signal_after_the_last_check_is_not_lost() -> None:
    interrupts = Interrupts()
    with pytest.raises(TrainingInterrupted), interrupts.handled(*BOTH):
        send(signal.SIGTERM)
    interrupts.check()  # nothing is left over


def test_handlers_are_restored_and_a_handler_of_the_user_stays() -> None:
    seen: list[int] = []
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        own = signal.getsignal(signal.SIGTERM)
        interrupts = Interrupts()
        with interrupts.handled(*BOTH):
            assert signal.getsignal(signal.SIGTERM) is own
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
            send(signal.SIGTERM)
            interrupts.check()
        assert seen == [signal.SIGTERM]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)
    with pytest.raises(TrainingInterrupted), interrupts.handled(*BOTH):
        send(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_another_thread_trains_without_handlers() -> None:
    found: list[Any] = []

    def work() -> None:
        with Interrupts().handled(*BOTH):
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [signal.default_int_handler]


def test_a_signal_ends_a_forked_child_without_raising_in_it() -> None:
    with Interrupts().handled(*BOTH):
        child = os.fork()
        if child == 0:
            try:
                send(signal.SIGTERM)
                signal.pause()
            finally:
                os._exit(7)  # the child has left the handler as if it were training
        _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGTERM


# A whole run

SCRIPT = """
    import os, signal, sys, time
    from grpo import GRPOConfig, GRPOTrainer
    from tests.support.policies import TablePolicy

    folder, number, again, prompt = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "again", sys.argv[4] == "interactive"
    if prompt:
        sys.ps1 = ">>> "
    calls = 0

    def reward(states, actions):
        global calls
        calls += 1
        if calls == 3:
            os.kill(os.getpid(), number)
            time.sleep(60)
        return [float(action) for action in actions]

    policy = TablePolicy()
    trainer = GRPOTrainer(config=GRPOConfig(group_size=4, seed=1), policy=policy, reward_model=reward)
    if again:
        save = trainer.safe_points._save_after
        trainer.safe_points._save_after = lambda error: (os.kill(os.getpid(), number), time.sleep(60))
    try:
        trainer.train(["a", "b"], num_iterations=9, checkpoint_dir=folder or None, progress=False)
    except KeyboardInterrupt as stop:
        print(type(stop).__name__, len(trainer.history), trainer.iteration, flush=True)
        raise
"""


def run_script(folder: Path | str, number: int, *, again: bool = False, interactive: bool = False) -> Any:
    arguments = [str(folder), str(int(number)), "again" if again else "", "interactive" if interactive else ""]
    command = [sys.executable, "-c", textwrap.dedent(SCRIPT), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50, check=False)


def test_a_signal_while_collecting_leaves_a_checkpoint_and_the_exit_code_of_the_signal(
    subtests: pytest.Subtests, tmp_path: Path
) -> None:
    for number, code in [(signal.SIGTERM, 143), (signal.SIGINT, 130)]:
        with subtests.test(number=number):
            done = run_script(tmp_path / str(code), number)
            assert done.returncode == code
            assert done.stdout.split() == ["TrainingInterrupted", "2", "2"]
            assert f"Stopped by {number.name} at iteration 2." in done.stderr
            assert "Traceback" not in done.stderr
            assert read_checkpoint(tmp_path / str(code))["counters"]["iteration"] == 2


def test_a_second_signal_ends_the_process_at_once(tmp_path: Path) -> None:
    done = run_script(tmp_path, signal.SIGTERM, again=True)
    assert done.returncode == -signal.SIGTERM
    assert not done.stdout


def test_in_an_interactive_session_a_sigint_is_a_keyboard_interrupt(tmp_path: Path) -> None:
    done = run_script(tmp_path, signal.SIGINT, interactive=True)
    assert done.stdout.split() == ["KeyboardInterrupt", "2", "2"]
    assert "KeyboardInterrupt: Stopped by SIGINT at iteration 2." in done.stderr


def test_without_a_folder_a_sigterm_ends_the_process_and_a_sigint_stops_the_run(subtests: pytest.Subtests) -> None:
    for number, code, printed in [
        (signal.SIGTERM, -signal.SIGTERM, []),
        (signal.SIGINT, 130, ["TrainingInterrupted", "2", "2"]),
    ]:
        with subtests.test(number=number):
            done = run_script("", number)
            assert done.returncode == code
            assert done.stdout.split() == printed


def test_a_keyboard_interrupt_in_an_update_waits_for_the_optimizer_step() -> None:
    """Two iterations of two updates, and the signal arrives while the loss of the fourth update is computed."""
    trainer, policy = by_hand(policy=TablePolicy(), config={"batch_size": 2, "group_size": 2})
    inner, calls = trainer.objective, []

    def loss(inputs: Any) -> Any:
        calls.append(len(calls))
        if len(calls) == 4:
            send(signal.SIGINT)
        return inner(inputs)

    trainer.objective = loss  # type: ignore[assignment]
    steps: list[Any] = []
    trainer.optimizer_step.optimizer.register_step_post_hook(lambda *_: steps.append(policy.logits.detach().clone()))
    with pytest.raises(KeyboardInterrupt):
        trainer.train(["a", "b"], num_iterations=9, progress=False)
    assert len(calls) == 4
    assert (policy.logits == steps[-1]).all()
    assert len(trainer.history) == trainer.iteration == 1
    assert policy.logits.grad is None
