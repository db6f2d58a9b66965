"""Processes of which one rank fails in a chosen phase of training, and what all ranks raised.

    python -m tests.support.failing_ranks FOLDER

The process imports everything once, forks the ranks of each case of `FOLDER/cases.json`, and prints what they raised. Rank 0
holds the store, as without a launcher. Nothing is judged here: a test compares the outcomes.
"""

import json
import os
import re
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from grpo import ContractError, GRPOConfig, GRPOTrainer, GRPOWarning, RewardConfig
from grpo.distributed import Replicated, Sharded
from grpo.engine import Engine, OneProcess
from grpo.errors import TrainingInterrupted
from tests.support.launches import printed_by

PHASES = ["engine", "constructor", "sampling", "reward", "scoring", "advantages", "update", "apply", "report"]
PHASES += ["evaluate", "save", "load"]
"""Where a rank can fail, in the order of a run."""

DIVIDED_PHASES = [*PHASES, "forward", "backward"]
"""Where a rank that holds a part of the weights can fail, too: while the other ranks gather or add up for a layer."""

FAULTS = ["killed", "stopped", "asleep"]
"""How a rank disappears. It can also raise `ContractError`, `ZeroDivisionError` or `TrainingInterrupted`.

In the phase "outage", the rank's reward fails for a second, and its rank then waits for longer than the timeout. With the fault
"waits", nothing else happens. Otherwise the rank disappears while it waits.
"""

SLACK = 30.0
"""Seconds for a machine that does other work, too. A rank that never gives up is killed after a minute."""

AT_ONCE = 4
"""Number of cases at a time. Most of a case is waiting."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run of several ranks, one of which fails."""

    phase: str
    fault: str
    culprit: int
    num_ranks: int = 2
    timeout: float = 4.0
    engine: str = "Replicated"
    """The engine: "Replicated" or "Sharded"."""
    sigterm: bool = False
    """Send SIGTERM to the other ranks while they wait for the culprit."""


class Failing:
    """Makes the culprit fail when it reaches the phase for the first time. Notes the time for the others."""

    def __init__(self, case: Case, rank: int, folder: Path) -> None:
        self.case, self.rank, self.folder, self.is_armed = case, rank, folder, rank == case.culprit
        self.outage_ends = 0.0

    def reached(self, phase: str) -> None:
        if not self.is_armed or phase != self.case.phase:
            return
        self.is_armed = False
        if phase == "outage":
            self.outage_ends = time.monotonic() + 1.0
            threading.Timer(2.0, self._strike).start()
        else:
            self._strike()

    def _strike(self) -> None:
        (self.folder / "struck").write_text(repr(time.monotonic()))
        if self.case.fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.case.fault == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.case.fault == "asleep":
            time.sleep(3600)
        if self.case.fault == "ContractError":
            raise ContractError("the policy is tired")
        if self.case.fault == "ZeroDivisionError":
            raise ZeroDivisionError("no division today")
        if self.case.fault == "TrainingInterrupted":
            raise TrainingInterrupted(signal.SIGTERM)


class Scale(torch.nn.Module):
    """A layer that says when its forward pass begins and when its backward pass begins."""

    def __init__(self, failing: Failing) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.ones(4))
        self.failing = failing

    def forward(self, logits: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return logits * self.factor
        self.failing.reached("forward")
        scaled = logits * self.factor
        scaled.register_hook(lambda gradient: self.failing.reached("backward"))
        return scaled


class Arms(torch.nn.Module):
    """A softmax over four arms that says which phase calls it."""

    def __init__(self, failing: Failing) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.zeros(4))
        self.scales = torch.nn.ModuleList([Scale(failing), Scale(failing)])
        self.failing, self.is_evaluating = failing, False

    def shard_units(self) -> list[torch.nn.Module]:
        return [*self.scales]

    def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> list[list[int]]:
        self.failing.reached("evaluate" if self.is_evaluating else "sampling")
        probs = self.logits.detach().softmax(0).expand(len(states), -1)
        return torch.multinomial(probs, num_actions_per_state, replacement=True).tolist()

    def get_log_probabilities(self, states: Any, actions: Any) -> torch.Tensor:
        self.failing.reached("update" if self.training else "scoring")
        scaled = self.scales[1](self.scales[0](self.logits))
        return scaled.log_softmax(0)[torch.tensor(list(actions))]

    def get_parameters(self) -> dict[str, torch.Tensor]:
        self.failing.reached("constructor")
        return dict(self.named_parameters())

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.failing.reached("save")
        return {"calls": 1}

    def load_state_dict(self, state: Any, **kwargs: Any) -> None:
        self.failing.reached("load")


def run(case: Case, rank: int, folder: Path, engine: Engine | None = None) -> None:
    """Two iterations with an evaluation and a checkpoint after each, and loading the last one."""
    failing = Failing(case, rank, folder)
    failing.reached("engine")
    policy = Arms(failing)

    def reward(states: Any, actions: Any) -> list[float]:
        failing.reached("reward")
        failing.reached("outage")
        if time.monotonic() < failing.outage_ends:
            raise ConnectionError("the judge is ill")
        warnings.warn("every rank says this", GRPOWarning, stacklevel=1)
        if failing.rank == 1:
            warnings.warn("one rank says this", GRPOWarning, stacklevel=1)
        policy.is_evaluating = not policy.is_evaluating  # an evaluation follows every iteration
        return [float(action) for action in actions]

    def advantages(batch: Any) -> torch.Tensor:
        failing.reached("advantages")
        return batch.rewards - 1.5

    class Step(torch.optim.SGD):
        def step(self, closure: Callable[[], float] | None = None) -> Any:
            failing.reached("apply")
            return super().step(closure)

    class Callback:
        def on_iteration(self, trainer: Any, metrics: Any) -> None:
            failing.reached("report")

    engine = engine or {"Replicated": Replicated, "Sharded": Sharded}[case.engine](timeout=case.timeout)
    trainer = GRPOTrainer(
        config=GRPOConfig(
            group_size=8,
            batch_size=16,
            num_epochs_per_update=2,
            seed=0,
            reward=RewardConfig(on_failure="drop", breaker_failures=1, breaker_seconds=1.5 * case.timeout)
            if case.phase == "outage"
            else RewardConfig(),
        ),
        policy=policy,
        reward_model=reward,
        optimizer=lambda tensors: Step(tensors, lr=0.1),
        advantages=advantages,
        engine=engine,
    )
    states = list(range(2 * case.num_ranks))
    how: dict[str, Any] = {"eval_states": states[:1], "eval_every": 1, "checkpoint_every": 1, "progress": False}
    trainer.train(states, num_iterations=2, checkpoint_dir=folder / "checkpoints", callbacks=[Callback()], **how)
    trainer.load_checkpoint(folder / "checkpoints")


def outcome_of(case: Case, rank: int, folder: Path) -> dict[str, Any]:
    """What a rank raised, and how many seconds after the failure."""
    raised: dict[str, Any] = {"kind": "nothing", "said": "", "cause": ""}
    try:
        run(case, rank, folder)
    except (Exception, TrainingInterrupted) as error:
        cause = type(error.__cause__).__name__ if error.__cause__ is not None else ""
        raised = {"kind": type(error).__name__, "said": str(error), "cause": cause, "trace": traceback.format_exc()}
    struck = folder / "struck"
    seconds = time.monotonic() - float(struck.read_text()) if struck.exists() else float("nan")
    return raised | {"seconds": seconds}


def start(case: Case, rank: int, folder: Path) -> int:
    """Fork a rank. Return its process number."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        sys.stdout = sys.stderr = (folder / f"output{rank}").open("w")
        os.dup2(sys.stdout.fileno(), 1)
        os.dup2(sys.stdout.fileno(), 2)
        warnings.simplefilter("always")
        dist.init_process_group("gloo", store=store_of(case, rank, folder), rank=rank, world_size=case.num_ranks)
        (folder / f"joined{rank}").touch()
        while not all((folder / f"joined{other}").exists() for other in range(case.num_ranks)):
            time.sleep(0.01)  # what happens while the process group forms is not the engine's concern
        outcome = outcome_of(case, rank, folder)
        (folder / f"part{rank}").write_text(json.dumps(outcome))
        (folder / f"part{rank}").rename(folder / f"outcome{rank}")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def store_of(case: Case, rank: int, folder: Path) -> Any:
    """The store of a case. Rank 0 holds it and writes its port to a file, which the other ranks read."""
    port, longest = folder / "port", timedelta(seconds=60)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, case.num_ranks, True, longest, wait_for_workers=False)
        (folder / "part").write_text(str(store.port))
        (folder / "part").rename(port)
        return store
    while not port.exists():
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int(port.read_text()), case.num_ranks, False, longest)


def play(case: Case, folder: Path) -> dict[str, Any]:
    """Run a case until all ranks but the culprit have ended, or a generous deadline is over. Then kill what is left."""
    folder.mkdir()
    waiting = {start(case, rank, folder): rank for rank in range(case.num_ranks)}
    codes: dict[int, int] = {}
    deadline = time.monotonic() + 60.0 + case.timeout
    gone, is_sent = case.fault in FAULTS, not case.sigterm
    while time.monotonic() < deadline and set(waiting.values()) - ({case.culprit} if gone else set()):
        for process, rank in list(waiting.items()):
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                codes[rank] = os.waitstatus_to_exitcode(status)
                del waiting[process]
        if not is_sent and (folder / "struck").exists():
            time.sleep(1.0)  # the others wait for the culprit by now
            is_sent = True
            for process, rank in waiting.items():
                if rank != case.culprit:
                    os.kill(process, signal.SIGTERM)
        time.sleep(0.02)
    for process in waiting:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
    found: dict[str, Any] = {"case": asdict(case), "codes": codes, "ranks": []}
    for rank in range(case.num_ranks):
        written = folder / f"outcome{rank}"
        outcome = (
            json.loads(written.read_text()) if written.exists() else {"kind": "no outcome", "said": "", "seconds": 1e9}
        )
        found["ranks"].append(outcome | {"output": (folder / f"output{rank}").read_text()[-2000:]})
    return found


def main(folder: Path) -> None:
    cases = [Case(**case) for case in json.loads((folder / "cases.json").read_text())]
    if any(case.engine == "Sharded" for case in cases):
        import torch.distributed.fsdp  # noqa: F401  # slow, and each rank would do it
    (folder / "alone").mkdir()
    run(
        Case(phase="none", fault="none", culprit=0, num_ranks=1), 0, folder / "alone", OneProcess()
    )  # imports what it needs
    with ThreadPoolExecutor(AT_ONCE) as pool:
        outcomes = list(pool.map(lambda item: play(item[1], folder / str(item[0])), enumerate(cases)))
    json.dump(outcomes, sys.stdout)


def launch(cases: list[Case], folder: Path) -> list[dict[str, Any]]:
    """Run the cases in processes of their own, and return what all ranks did."""
    (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
    outcomes: list[dict[str, Any]] = json.loads(printed_by("-m", "tests.support.failing_ranks", folder))
    return outcomes


def figures_of(outcomes: list[dict[str, Any]]) -> str:
    """The number of cases, and how long a rank took at the longest to raise after another one had failed."""
    longest = max(
        found["seconds"]
        for outcome in outcomes
        for rank, found in enumerate(outcome["ranks"])
        if rank != outcome["case"]["culprit"]
    )
    return f"{len(outcomes)} cases, at most {longest:.1f} s"


def require_named(outcome: dict[str, Any]) -> None:
    """Every rank but the culprit has ended in time, with the same `RankError`, which names the culprit."""
    culprit, timeout = outcome["case"]["culprit"], outcome["case"]["timeout"]
    others = [found for rank, found in enumerate(outcome["ranks"]) if rank != culprit]
    assert [found["kind"] for found in others] == ["RankError"] * len(others), others
    said = {found["said"] for found in others}
    assert len(said) == 1, said
    assert re.match(f"Rank {culprit} (did not reach|ended or lost the connection)", said.pop()), others
    assert max(found["seconds"] for found in others) < timeout + SLACK, others


def require_shared(outcome: dict[str, Any]) -> None:
    """Every rank, the failing one too, has raised the same error soon after the failure."""
    case, ranks = outcome["case"], outcome["ranks"]
    kinds = {"ContractError": {"ContractError"}, "ZeroDivisionError": {"RankError"}}
    kinds["ZeroDivisionError"] |= {"RewardRaisedError"} if case["phase"] in ("reward", "evaluate") else set()
    if case["phase"] == "load" and case["fault"] in kinds:
        kinds[case["fault"]] = {"CheckpointError"}
    assert len({(found["kind"], found["said"]) for found in ranks}) == 1, ranks
    assert ranks[0]["kind"] in kinds.get(case["fault"], {case["fault"]}), ranks
    if case["fault"] != "TrainingInterrupted":
        assert ranks[0]["said"].startswith(f"Rank {case['culprit']}"), ranks
    assert ranks[case["culprit"]]["cause"], ranks
    assert max(found["seconds"] for found in ranks) < case["timeout"], ranks


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
