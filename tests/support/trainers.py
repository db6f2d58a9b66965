"""Small trainers that the tests of `grpo.trainer` build, and what they compare."""

import math
from itertools import count
from typing import Any

import torch
from torch import Tensor

from grpo import ExperienceBatch, GRPOConfig, GRPOTrainer, Learner
from tests.support.policies import RecordingSGD, TablePolicy, digest, weights_of

# Two states, two actions each, all probabilities 1/2. Advantages (the group's mean subtracted) are +-1/2.
SCRIPT = [[0, 1], [1, 0]]
REWARDS = [1.0, 0.0, 3.0, 4.0]

ROLLOUTS: dict[str, Any] = {
    "states": [0, 0, 1, 1],
    "actions": [(1, 2, 0), (0,), (2, 0), (1,)],
    "rewards": [0.0, 1.0, 0.0, 1.0],
    "group_ids": [0, 0, 1, 1],
    "mask": torch.tensor([[True, True, True], [True, False, False], [True, True, False], [True, False, False]]),
}
"""Rows of 3, 1, 2 and 1 steps, for a `RowScoring`: the arguments of `ExperienceBatch.from_rows`."""


def by_hand(
    *, rewards: Any = None, policy: Any = None, config: dict[str, Any] | None = None, **others: Any
) -> tuple[GRPOTrainer, Any]:
    """A trainer of a scripted table policy with plain SGD of rate 1, unless told otherwise; and the policy."""
    policy = policy or TablePolicy(script=SCRIPT)
    values = REWARDS if rewards is None else rewards
    settings = {"group_size": 2, "max_grad_norm": None, **(config or {})}
    if "optimizer" not in others:
        others["optimizer"] = torch.optim.SGD(list(policy.get_parameters().values()), lr=1.0)
    reward_model = values if callable(values) else (lambda states, actions: list(values))
    return GRPOTrainer(config=GRPOConfig(**settings), policy=policy, reward_model=reward_model, **others), policy


def updated(
    policy: Any, *batches: ExperienceBatch, own_loss: Any = None, engine: Any = None, **settings: Any
) -> tuple[list[Tensor], dict[str, float]]:
    """The unclipped gradient of each update on these rows, and the metrics."""
    optimizer = RecordingSGD(policy)
    learner = Learner(
        config=GRPOConfig(**{"group_size": 2, "max_grad_norm": None, "seed": 0, **settings}),
        policy=policy,
        reward_model=lambda states, actions: [0.0] * len(states),
        optimizer=optimizer,
        objective=own_loss,
        engine=engine,
    )
    metrics = learner.update(*batches)
    return optimizer.gradients, metrics


def assert_same(found: Any, expected: Any) -> None:
    """Compare gradients in float64."""
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def quarters() -> TablePolicy:
    """A reference with probabilities (1/4, 3/4) for both states."""
    return TablePolicy(logits=[[0.0, math.log(3.0)]] * 2)


def poisoned(policy: TablePolicy, *when: int, factor: float = math.nan) -> TablePolicy:
    """The gradients of these backward passes, counted from 0, are multiplied; losses stay finite."""
    number = count()
    policy.logits.register_hook(lambda gradient: gradient * factor if next(number) in when else gradient)
    return policy


def without_time(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics that two equal iterations agree on."""
    return {name: value for name, value in metrics.items() if not name.startswith("time/")}


def trainer_of(
    policy: Any, judge: Any = lambda states, actions: torch.arange(float(len(actions))), **settings: Any
) -> GRPOTrainer:
    """A trainer with groups of 4 and the default optimizer. The reward of row n is n, unless told otherwise."""
    return GRPOTrainer(config=GRPOConfig(**{"group_size": 4, **settings}), policy=policy, reward_model=judge)


def state_of(trainer: GRPOTrainer) -> str:
    """SHA-256 over the weights and the optimizer's state."""
    optimizer = trainer.optimizer
    return digest(weights_of(trainer.policy), None if optimizer is None else optimizer.state_dict())
