"""An optimizer and a scheduler may be functions, which the trainer calls once."""

from functools import partial
from typing import Any

import pytest
import torch

from grpo import ConfigError, GRPOConfig, GRPOTrainer, ProtocolError
from grpo._updating.preparation import prepare
from grpo._updating.requirements import is_function
from grpo.engine import OneProcess
from tests.support.layered import Layered
from tests.support.sharded_ranks import CASES, rows_of


def test_a_function_gets_the_trained_tensors() -> None:
    seen = []

    def build(tensors: Any) -> torch.optim.Optimizer:
        seen.append(tensors)
        return torch.optim.SGD(tensors, lr=0.5)

    policy = Layered()
    policy.branch.requires_grad_(False)
    trainer = GRPOTrainer(config=GRPOConfig(seed=0), policy=policy, reward_model=lambda *_: [], optimizer=build)
    (tensors,) = seen
    expected = [value for value in policy.parameters() if value.requires_grad]
    assert type(tensors) is list
    assert all(found is value for found, value in zip(tensors, expected, strict=True))
    assert trainer.optimizer_step.learning_rate == 0.5


def test_a_built_optimizer_makes_the_updates_of_a_given_one() -> None:
    ends = []
    for optimizer in (partial(torch.optim.SGD, lr=0.5), None):
        policy = Layered()
        given = torch.optim.SGD(policy.parameters(), lr=0.5) if optimizer is None else optimizer
        scheduler = partial(torch.optim.lr_scheduler.StepLR, step_size=1)
        trainer = GRPOTrainer(
            config=GRPOConfig(group_size=3, seed=0),
            policy=policy,
            reward_model=lambda *_: [],
            optimizer=given,
            lr_scheduler=scheduler if optimizer is not None else scheduler(given),
        )
        rates = [trainer.update(rows_of(CASES["module"], policy, 0, 1))["train/learning_rate"] for _ in range(2)]
        assert rates == pytest.approx([0.5, 0.05])
        ends.append(torch.cat([value.detach().flatten() for value in policy.parameters()]))
    assert torch.equal(*ends)


def test_a_class_is_a_function_and_what_it_returns_is_checked() -> None:
    policy = Layered()
    trainer = GRPOTrainer(
        config=GRPOConfig(seed=0), policy=policy, reward_model=lambda *_: [], optimizer=torch.optim.AdamW
    )
    assert type(trainer.optimizer_step.optimizer) is torch.optim.AdamW
    with pytest.raises(ProtocolError, match=r"optimizer must implement torch[.]optim[.]Optimizer; int lacks step"):
        GRPOTrainer(config=GRPOConfig(seed=0), policy=policy, reward_model=lambda *_: [], optimizer=len)
    assert not is_function(torch.optim.SGD(policy.parameters(), lr=1.0))
    assert not is_function(None)


class Dividing(OneProcess):
    """An engine that notes what it is asked to divide."""

    divides_weights = True

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def divide(self, policy: Any) -> None:
        self.asked.append(policy)


def test_policy_and_reference_are_divided_and_instances_are_refused() -> None:
    engine, policy, reference = Dividing(), Layered(), Layered()
    for given in (reference, None):
        prepare(GRPOConfig(), engine, policy, lambda *_: [], given)
    assert engine.asked == [policy, reference, policy]
    for name in ("optimizer", "lr_scheduler"):
        given = torch.optim.SGD(policy.parameters(), lr=1.0)
        with pytest.raises(
            ConfigError, match=rf"{name} must be a function with Dividing.*; got a SGD[.] Pass a function"
        ):
            GRPOTrainer(config=GRPOConfig(), policy=policy, reward_model=lambda *_: [], engine=engine, **{name: given})
