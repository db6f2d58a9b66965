"""What the first and the second signal do, in scripts, in interactive sessions, in threads and in forked children."""

import json
import os
import signal
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from grpo import TrainingInterrupted
from grpo._running.interrupts import Interrupts
from grpo.checkpoint import read_checkpoint
from tests.support.launches import printed_by
from tests.support.policies import TablePolicy
from tests.support.trainers import by_hand

BOTH = (signal.SIGTERM, signal.SIGINT)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", BOTH)
def test_a_signal_raises_at_once_or_at_the_next_check(number) -> None:
    interrupts, reached = Interrupts(), []

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

    for stops, expected in [(stop_later, ["after the signal"]), (stop_at_once, []), (stop_before, [])]:
        interrupts, reached = Interrupts(), []
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
        own, interrupts = signal.getsignal(signal.SIGTERM), Interrupts()
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
                time.sleep(5)
            finally:
                os._exit(7)  # the child has left the handler as if it were training
        _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGTERM


# A whole run

SCRIPT = """
    import json, os, signal, sys, time
    from grpo import GRPOConfig, GRPOTrainer
    from grpo.checkpoint import read_checkpoint
    from tests.support.policies import TablePolicy

    def run(folder, number, again, prompt):
        if prompt:
            sys.ps1 = ">>> "
        calls = []

        def reward(states, actions):
            calls.append(len(calls))
            if len(calls) == 3:
                os.kill(os.getpid(), number)
                time.sleep(60)
            return [float(action) for action in actions]

        trainer = GRPOTrainer(config=GRPOConfig(group_size=4, seed=1), policy=TablePolicy(), reward_model=reward)
        if again:
            trainer.safe_points._save_after = lambda error: (os.kill(os.getpid(), number), time.sleep(60))
        try:
            trainer.train(["a", "b"], num_iterations=9, checkpoint_dir=folder, progress=False)
        except KeyboardInterrupt as stop:
            print(type(stop).__name__, len(trainer.history), trainer.iteration, flush=True)
            if prompt:
                print(stop)
                sys.exit(77)  # the session goes on
            raise

    for place, case in enumerate(json.loads(sys.argv[2])):
        output = f"{sys.argv[1]}/{place}.out"
        child = os.fork()
        if child == 0:
            for stream in (1, 2):
                os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
            run(**case)
            sys.exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        saved = read_checkpoint(case["folder"])["parts"]["counters"]["iteration"] if code > 0 and case["folder"] else None
        print(json.dumps([code, open(output).read(), saved]), flush=True)
"""


@pytest.mark.slow
def test_what_signals_do_to_a_run(tmp_path: Path) -> None:
    """The third collection is interrupted, and would take a minute. An uncaught exception would end the process with 1."""
    term, interrupt = int(signal.SIGTERM), int(signal.SIGINT)
    stopped, by_person = "TrainingInterrupted 2 2", "Stopped by SIGINT at iteration 2."
    cases: list[tuple[int, bool, bool, bool, int, str, str, int | None]] = [
        # signal, folder, a second signal, interactive; exit code, what the script prints, what is said, saved iteration
        (term, True, False, False, 143, stopped, "Stopped by SIGTERM at iteration 2.", 2),
        (interrupt, True, False, False, 130, stopped, by_person, 2),
        (term, True, True, False, -term, "", "", None),
        (interrupt, True, True, False, -interrupt, "", "", None),
        (interrupt, True, False, True, 77, "KeyboardInterrupt 2 2", by_person, 2),
        (term, False, False, False, -term, "", "", None),
        (interrupt, False, False, False, 130, stopped, "Nothing was saved, because", None),
    ]
    asked = []
    for place, (number, has_folder, again, prompt, *_) in enumerate(cases):
        folder = str(tmp_path / f"run {place}") if has_folder else None
        asked.append({"number": number, "folder": folder, "again": again, "prompt": prompt})
    printed = printed_by("-c", textwrap.dedent(SCRIPT), tmp_path, json.dumps(asked), seconds=200)
    found = [json.loads(line) for line in printed.splitlines()]
    for (*case, expected_code, prints, said, expected_saved), (code, output, saved) in zip(cases, found, strict=True):
        assert (code, saved) == (expected_code, expected_saved), (case, output)
        assert not prints or prints in output.splitlines(), case
        assert prints or "Interrupt" not in output, case
        assert said in output, case
    assert read_checkpoint(tmp_path / "run 4")["parts"]["counters"]["iteration"] == 2


def test_a_keyboard_interrupt_in_an_update_waits_for_the_optimizer_step() -> None:
    """Two iterations of two updates, and the signal arrives while the loss of the fourth update is computed."""
    trainer, policy = by_hand(policy=TablePolicy(), config={"batch_size": 2, "group_size": 2})
    inner, calls = trainer.objective, []

    def loss(scored: Any) -> Any:
        calls.append(len(calls))
        if len(calls) == 4:
            send(signal.SIGINT)
        return inner(scored)

    trainer.objective = loss  # type: ignore[assignment]
    steps: list[Any] = []
    trainer.optimizer_step.optimizer.register_step_post_hook(lambda *_: steps.append(policy.logits.detach().clone()))
    with pytest.raises(KeyboardInterrupt):
        trainer.train(["a", "b"], num_iterations=9, progress=False)
    assert len(calls) == 4
    assert (policy.logits == steps[-1]).all()
    assert len(trainer.history) == trainer.iteration == 1
    assert policy.logits.grad is None
