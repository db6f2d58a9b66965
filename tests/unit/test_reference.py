"""A reference that stays, one that is copied now and then, and one that follows slowly."""

import copy
from typing import Any

import pytest
import torch

from grpo import ConfigError, GRPOConfig, GRPOTrainer, ObjectiveConfig
from grpo.reference import move_reference
from tests.policies import TablePolicy


def run(num_steps: int, **settings: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The policy's and the reference's logits after each step."""
    policy = TablePolicy(script=[[0, 1], [1, 0]])
    reference = copy.deepcopy(policy)
    trainer = GRPOTrainer(
        config=GRPOConfig(group_size=2, objective=ObjectiveConfig(kl_coef=0.1), **settings),
        policy=policy,
        reward_model=lambda states, actions: [1.0, 0.0, 0.0, 1.0],
        reference_policy=reference,
        optimizer=torch.optim.SGD(policy.parameters(), lr=1.0),
    )
    ours, theirs = [], []
    for _ in range(num_steps):
        trainer.step(["a", "b"])
        ours.append(policy.logits.detach().clone())
        theirs.append(reference.logits.detach().clone())
    return ours, theirs


def test_frozen_unless_told_otherwise() -> None:
    policy, reference = run(3)
    assert all(torch.equal(logits, torch.zeros(2, 2)) for logits in (logits.float() for logits in reference))
    assert not torch.equal(policy[-1], reference[-1])


def test_copied_every_so_many_iterations() -> None:
    policy, reference = run(5, reference_sync_every=2)
    zero = torch.zeros_like(policy[0])
    expected = [zero, policy[1], policy[1], policy[3], policy[3]]
    assert all(torch.equal(found, wanted) for found, wanted in zip(reference, expected, strict=True))


def test_a_moving_average() -> None:
    policy, reference = run(3, reference_sync_every=1, reference_mix=0.25)
    expected = torch.zeros_like(policy[0])
    for now, found in zip(policy, reference, strict=True):
        expected = 0.75 * expected + 0.25 * now
        torch.testing.assert_close(found, expected, rtol=1e-14, atol=1e-15)


def test_a_move_by_hand() -> None:
    reference, policy = {"w": torch.tensor([0.0, 4.0])}, {"w": torch.tensor([1.0, 0.0])}
    move_reference(reference, policy, mix=0.25)
    assert reference["w"].tolist() == [0.25, 3.0]
    assert policy["w"].tolist() == [1.0, 0.0]


def test_nothing_to_move_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"reference_sync_every needs a reference"):
        GRPOTrainer(
            config=GRPOConfig(reference_sync_every=1), policy=TablePolicy(), reward_model=lambda s, a: [0.0] * len(s)
        )


def test_a_reference_of_another_shape_is_refused() -> None:
    other = TablePolicy()
    other.register_parameter("bias", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(ConfigError, match=r"only one of them has \['bias'\]"):
        GRPOTrainer(
            config=GRPOConfig(reference_sync_every=1),
            policy=TablePolicy(),
            reward_model=lambda s, a: [0.0] * len(s),
            reference_policy=other,
        )
