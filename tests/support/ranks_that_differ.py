"""Two processes that differ in one thing, and what both raise when they train.

    python -m tests.support.ranks_that_differ FOLDER listed

The process imports everything once and forks the two ranks, which play all cases one after another. Nothing is judged here: a
rank that stopped at an assertion would leave the other one waiting.
"""

import copy
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import LambdaLR, StepLR

from grpo import GRPOConfig, GRPOError, GRPOTrainer, ObjectiveConfig
from grpo.distributed import Replicated, Sharded
from tests.support.policies import TablePolicy

NUM_RANKS = 2
STATES = ["a", "b", "c", "d"]


class Policy(TablePolicy):
    """A table with a frozen weight that `get_parameters` leaves out, a buffer, and a setting."""

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__(STATES, num_actions=3, logits=torch.randn(4, 3))
        self.frozen = torch.nn.Linear(2, 1).requires_grad_(False)
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("scratch", torch.ones(3), persistent=False)
        self.temperature = temperature

    def get_parameters(self) -> dict[str, torch.Tensor]:
        return {name: value for name, value in self.named_parameters() if value.requires_grad}

    def settings(self) -> dict[str, Any]:
        return {"temperature": self.temperature}


def reward(states: Any, actions: Any) -> list[float]:
    return [float(action) for action in actions]


def other_reward(states: Any, actions: Any) -> list[float]:
    return reward(states, actions)


def scaled(states: Any, actions: Any, scale: float) -> list[float]:
    return [scale * value for value in reward(states, actions)]


class Service:
    """A reward with a state that no other rank sees, which says what must be equal."""

    def __init__(self, model: str) -> None:
        self.model = model

    def settings(self) -> dict[str, str]:
        return {"model": self.model}

    def __call__(self, states: Any, actions: Any) -> list[float]:
        return reward(states, actions)


def returning_scaled(scale: float) -> Callable[..., Any]:
    return lambda states, actions: scaled(states, actions, scale)


def returning_sgd(**settings: Any) -> Callable[..., Any]:
    return lambda tensors: SGD(tensors, **settings)


def in_two_groups(tensors: Any) -> SGD:
    return SGD([{"params": [tensor]} for tensor in tensors] + [{"params": [torch.nn.Parameter(torch.ones(1))]}], lr=0.1)


def decaying(rate: float) -> Callable[..., Any]:
    return lambda optimizer: LambdaLR(optimizer, lambda epoch: rate**epoch)


class At:
    """A callback that changes something after the first iteration."""

    def __init__(self, change: Callable[[Any], object]) -> None:
        self.change = change

    def on_iteration(self, trainer: Any, metrics: Any) -> None:
        if trainer.iteration == 1:
            self.change(trainer)


def add(tensor: torch.Tensor, value: float) -> None:
    with torch.no_grad():
        tensor.flatten()[0] += value


def group_of(trainer: Any) -> dict[str, Any]:
    return trainer.optimizer.param_groups[0]  # type: ignore[no-any-return]


def changed(policy: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    policy.logits = torch.nn.Parameter(change(policy.logits.detach()))


# A case is what a rank does differently, given its number. `learner` changes the arguments of the trainer, `policy` and
# `reference` change the models before the trainer is built, `built` changes the trainer, and `later` changes it in a callback.
# The word must be in the error.


@dataclass(frozen=True, kw_only=True)
class Case:
    word: str
    learner: Callable[[int], dict[str, Any]] = lambda rank: {}
    policy: Callable[[Any, int], object] = lambda policy, rank: None
    reference: Callable[[Any, int], object] | None = None
    built: Callable[[Any, int], object] = lambda trainer, rank: None
    later: Callable[[Any, int], object] | None = None
    at_end: Callable[[Any, int], object] | None = None
    """The last change of a loop of `step`, before `save_checkpoint`. None: `train` is called."""
    engine: str = "Replicated"
    saves: bool = True
    """False: no checkpoint is saved, because its exchange would refuse the difference, too."""


CASES = {
    # each argument of a learner; `tests/unit/_ranks/test_messages.py` has the kinds of functions
    "partial": Case(word="lr=0.1", learner=lambda r: {"optimizer": partial(SGD, lr=0.1 + r)}),
    "closure": Case(word="'lr': 0.1", learner=lambda r: {"optimizer": returning_sgd(lr=0.1 + r)}),
    "other class": Case(word="Adam", learner=lambda r: {"optimizer": partial([SGD, Adam][r], lr=0.1)}),
    "other groups": Case(word="optimizer", learner=lambda r: {"optimizer": [returning_sgd(lr=0.1), in_two_groups][r]}),
    # schedulers
    "step size": Case(word="step_size=1", learner=lambda r: {"lr_scheduler": partial(StepLR, step_size=1 + r)}),
    "a scheduler on one rank": Case(
        word="lr_scheduler is None", learner=lambda r: {"lr_scheduler": partial(StepLR, step_size=1) if r else None}
    ),
    # rewards and other functions
    "reward closure": Case(word="scale=1.0", learner=lambda r: {"reward_model": returning_scaled(1.0 + r)}),
    "other reward": Case(word="other_reward", learner=lambda r: {"reward_model": [reward, other_reward][r]}),
    "reward settings": Case(
        word="settings().model is 'a' on rank 0, 'b' on rank 1", learner=lambda r: {"reward_model": Service("ab"[r])}
    ),
    "advantages": Case(
        word="factor=1",
        learner=lambda r: {
            "advantages": (lambda factor: lambda batch: factor * (batch.rewards - batch.rewards.mean()))(1 + r)
        },
    ),
    "group_by": Case(word="group_by", learner=lambda r: {"group_by": [str, repr][r]}),
    # settings of the policy
    "policy settings": Case(
        word="policy.settings().temperature is 1.0 on rank 0, 2.0 on rank 1",
        policy=lambda p, r: setattr(p, "temperature", 1.0 + r),
    ),
    # weights, buffers and references at the build
    "weight": Case(word="logits", policy=lambda p, r: add(p.logits, 1e-6 * r)),
    "dtype": Case(
        word="rank 1 differs from rank 0 in logits (float64[4, 3] ",
        policy=lambda p, r: changed(p, lambda logits: logits.float()) if r else None,
    ),
    "shape": Case(word="logits", policy=lambda p, r: changed(p, lambda logits: torch.zeros(9)) if r else None),
    "frozen weight": Case(word="frozen.weight", policy=lambda p, r: add(p.frozen.weight, r)),
    "buffer": Case(word="scale", policy=lambda p, r: add(p.scale, r)),
    "reference": Case(word="reference: logits", reference=lambda p, r: add(p.logits, r)),
    "buffer of the reference": Case(word="reference: scale", reference=lambda p, r: add(p.scale, r)),
    # after the build
    "weight after the build": Case(word="parameters.logits", built=lambda t, r: add(t.policy.logits, r), saves=False),
    "reference after the build": Case(
        word="reference.logits",
        reference=lambda p, r: None,
        built=lambda t, r: add(t.reference_policy.logits, r),
        saves=False,
    ),
    "rate after the build": Case(
        word="lr is 0.1 on rank 0, 1.1 on rank 1", built=lambda t, r: group_of(t).update(lr=0.1 + r), saves=False
    ),
    "decay after the build": Case(word="weight_decay", built=lambda t, r: group_of(t).update(weight_decay=0.1 * r)),
    "group after the build": Case(
        word="param_groups[1]",
        built=lambda t, r: t.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]}) if r else None,
    ),
    "weight in a callback": Case(word="parameters.logits", later=lambda t, r: add(t.policy.logits, r)),
    "reference in a callback": Case(
        word="reference.logits", reference=lambda p, r: None, later=lambda t, r: add(t.reference_policy.logits, r)
    ),
    "rate in a callback": Case(word="lr is 0.1", later=lambda t, r: group_of(t).update(lr=0.1 + r), saves=False),
    "rate between steps": Case(
        word="lr is 0.1", built=lambda t, r: group_of(t).update(lr=0.1 + r), at_end=lambda t, r: None, saves=False
    ),
    "weight before a checkpoint": Case(word="parameters.logits", at_end=lambda t, r: add(t.policy.logits, r)),
    "rate before a checkpoint": Case(word="lr is 0.1", at_end=lambda t, r: group_of(t).update(lr=0.1 + r)),
    # divided weights
    "divided: name before a checkpoint": Case(
        word="parameters.other is absent on rank 0, float64[1] ",
        at_end=lambda t, r: setattr(t.policy, "other", torch.nn.Parameter(torch.ones(1).double())) if r else None,
        engine="Sharded",
    ),
    "divided: dtype before a checkpoint": Case(
        word="parameters.logits is float64[4, 3] on rank 0, float32[4, 3] on rank 1",
        at_end=lambda t, r: changed(t.policy, lambda logits: logits.float()) if r else None,
        engine="Sharded",
    ),
    "divided: shape before a checkpoint": Case(
        word="parameters.logits is float64[4, 3] on rank 0, float64[3, 4] on rank 1",
        at_end=lambda t, r: changed(t.policy, lambda logits: logits.t().contiguous()) if r else None,
        engine="Sharded",
    ),
}
BOTH = ("partial", "weight", "shape", "rate in a callback", "rate before a checkpoint")
"""Cases of divided weights, too."""
CASES |= {f"divided: {name}": replace(CASES[name], engine="Sharded") for name in BOTH}


def equal_on_both(rank: int) -> dict[str, Any]:
    """What differs between processes, and does not count: addresses, what rank 0 alone does, and what settings() leaves out."""
    opened, service = object(), Service("a")
    service.url = f"http://localhost:800{rank}"  # type: ignore[attr-defined]

    def own_reward(states: Any, actions: Any) -> list[float]:
        assert opened is not None
        return service(states, actions)

    return {"reward_model": own_reward, "optimizer": partial(SGD, lr=0.1), "lr_scheduler": decaying(0.9)}


def play(case: Case, engine: Any, folder: Path) -> str:
    """What this rank raises, or that nothing was raised."""
    rank = engine.rank
    torch.manual_seed(0)
    policy = Policy()
    reference = None if case.reference is None else copy.deepcopy(policy)
    case.policy(policy, rank)
    if case.reference is not None:
        case.reference(reference, rank)
    config = GRPOConfig(group_size=4, seed=0, objective=ObjectiveConfig(kl_coef=0.1 if reference is not None else 0.0))
    given: dict[str, Any] = {"reward_model": reward, "optimizer": partial(SGD, lr=0.1), **case.learner(rank)}
    later = [] if case.later is None else [At(lambda trainer: case.later(trainer, rank))]  # type: ignore[misc]
    try:
        trainer = GRPOTrainer(config=config, policy=policy, reference_policy=reference, engine=engine, **given)
        if case.at_end is None:
            case.built(trainer, rank)
            kept: dict[str, Any] = {"checkpoint_dir": folder, "checkpoint_every": 1} if case.saves else {}
            trainer.train(STATES, num_iterations=3, callbacks=later, progress=False, **kept)
        else:
            trainer.step(STATES[:2])
            case.built(trainer, rank)
            trainer.step(STATES[2:])
            case.at_end(trainer, rank)
            if case.saves:
                trainer.save_checkpoint(folder)
    except GRPOError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def main(rank: int, folder: Path, cases: dict[str, Case]) -> None:
    warnings.simplefilter("ignore")
    store = dist.FileStore(str(folder / "rendezvous"), NUM_RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=NUM_RANKS)
    engines = {"Replicated": Replicated(), "Sharded": Sharded()}
    equal = {f"equal, {name}": Case(word="nothing was raised", learner=equal_on_both, engine=name) for name in engines}
    found = {name: play(case, engines[case.engine], folder / name) for name, case in (cases | equal).items()}
    torch.save(found, folder / f"rank{rank}.pt")
    dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    # A rank that raises ends the other one; its traceback is part of the error.
    arguments = Path(sys.argv[1]), CASES
    torch.multiprocessing.start_processes(main, arguments, nprocs=NUM_RANKS, start_method="fork")
