"""Which reference is scored, and references that stay, are copied now and then, or follow slowly."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo import ConfigError, GRPOConfig, GRPOTrainer, GRPOWarning, ObjectiveConfig
from grpo._training.environment import move_reference
from tests.support.policies import TablePolicy, digest, weights_of
from tests.support.trainers import SCRIPT, by_hand, quarters


class WithReference(TablePolicy):
    """`ScoresReference`: probabilities 1/4 and 3/4."""

    def reference_log_probabilities(self, states: Any, actions: Any) -> Tensor:
        self.calls["reference"] += 1
        return torch.tensor([0.25, 0.75], dtype=torch.float64).log()[torch.as_tensor(actions)]


def test_which_kl_coefficient_is_in_force_and_when_the_reference_is_scored(subtests: pytest.Subtests) -> None:
    """A capability alone switches nothing on; an explicit 0 scores no reference; `reference_policy` comes first."""
    for kl_coef, passes_reference, in_force in [
        (None, True, 0.04),
        (None, False, 0.0),
        (0.0, True, 0.0),
        (0.0, False, 0.0),
        (0.5, True, 0.5),
        (0.5, False, 0.5),
    ]:
        with subtests.test(kl_coef=kl_coef, passes_reference=passes_reference, in_force=in_force):
            reference = quarters() if passes_reference else None
            policy = WithReference(script=SCRIPT)
            trainer, _ = by_hand(
                policy=policy, reference_policy=reference, config={"objective": ObjectiveConfig(kl_coef=kl_coef)}
            )
            metrics = trainer.step(["a", "b"])
            assert metrics["train/kl_coef"] == in_force
            scored_by_policy = policy.calls["reference"]
            scored_by_reference = (
                0 if reference is None else reference.calls["score"] + reference.calls["score with gradient"]
            )
            wanted = in_force > 0
            assert (scored_by_reference, scored_by_policy) == (
                int(wanted and passes_reference),
                int(wanted and not passes_reference),
            )
            mean = (0.5 + math.log(2.0) - 1.0 + 1.5 + math.log(2.0 / 3.0) - 1.0) / 2
            assert metrics["train/kl_penalty"] == pytest.approx(in_force * mean)
            assert metrics["train/kl_mean"] == pytest.approx(mean if wanted else 0.0)


def test_a_reference_is_frozen_in_evaluation_and_stays_as_it_was() -> None:
    reference = quarters()
    before = digest(weights_of(reference))
    trainer, _ = by_hand(reference_policy=reference)
    for _ in range(3):
        trainer.step(["a", "b"])
    assert digest(weights_of(reference)) == before
    assert reference.logits.grad is None
    assert not reference.training


def test_kl_without_a_reference_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"objective\.kl_coef=0\.04 needs a reference.*reference_policy=.*kl_coef=0"):
        by_hand(config={"objective": ObjectiveConfig(kl_coef=0.04)})


def test_a_reference_that_shares_parameters_is_refused() -> None:
    policy = TablePolicy()
    for reference in (policy, copy.copy(policy)):
        with pytest.raises(ConfigError, match=r"reference_policy shares parameters with policy \(logits\).*deepcopy"):
            by_hand(policy=policy, reference_policy=reference)
    by_hand(policy=policy, reference_policy=copy.deepcopy(policy))


def test_parameters_without_an_entry_are_shared_with_nobody() -> None:
    """All of them have the same address, 0."""

    class Padded(TablePolicy):
        def __init__(self) -> None:
            super().__init__(script=SCRIPT)
            self.nothing = torch.nn.Parameter(torch.empty(0, 3))

    policy = Padded()
    trainer, _ = by_hand(policy=policy, reference_policy=copy.deepcopy(policy))
    trainer.step(["a", "b"])
    assert policy.logits.tolist() == [[0.125, -0.125]] * 2  # the KL to an equal has no gradient


def test_k1_as_a_loss_warns_and_only_where_it_is_the_loss() -> None:
    objective = ObjectiveConfig(kl_estimator="k1", kl_coef=0.1)
    with pytest.warns(GRPOWarning, match="gradient of zero in expectation"):
        by_hand(reference_policy=quarters(), config={"objective": objective})
    with pytest.warns(GRPOWarning, match="gradient of zero in expectation"):  # kl_coef=None: on with a reference
        by_hand(reference_policy=quarters(), config={"objective": ObjectiveConfig(kl_estimator="k1")})
    by_hand(config={"objective": ObjectiveConfig(kl_estimator="k1")})
    by_hand(reference_policy=quarters(), config={"objective": ObjectiveConfig(kl_estimator="k1", kl_coef=0.0)})


# A reference that moves


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
    policy, reference = TablePolicy(logits=[[1.0, 0.0]] * 2), TablePolicy(logits=[[0.0, 4.0]] * 2)
    config = GRPOConfig(reference_sync_every=2, reference_mix=0.25)
    assert [move_reference(config, policy, reference, iteration) for iteration in (1, 2, 3)] == [False, True, False]
    assert reference.logits.tolist() == [[0.25, 3.0]] * 2
    assert policy.logits.tolist() == [[1.0, 0.0]] * 2


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
