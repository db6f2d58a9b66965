"""What surrounds the policy: seeds, devices, precision, folders of ranks, synced samplers, and references that move."""

import math
import random
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from torch import Tensor

from grpo import GRPOConfig, ObjectiveConfig
from grpo._ranks.processes import SeveralProcesses
from grpo._updating.preparation import prepare
from grpo._updating.reference import MovingReference
from grpo._updating.sampler import SamplerSync
from grpo.engine import OneProcess
from tests.support.policies import TablePolicy, digest, weights_of
from tests.support.trainers import SCRIPT, by_hand, quarters

pytestmark = pytest.mark.usefixtures("without_type_checks")


class Rank(SeveralProcesses):
    """One of two ranks. The first rank has drawn or been given a seed."""

    num_ranks = 2

    def __init__(self, rank: int, first_seed: int) -> None:
        self.rank, self.first_seed = rank, first_seed

    def gather_objects(self, value: Any) -> list[Any]:
        return [self.first_seed, value] if isinstance(value, int) else [value, value]


def drawn_after(config: GRPOConfig, engine: Any) -> tuple[int, list[float]]:
    """The seed of rows and states, and the numbers that the global generators then draw."""
    torch.manual_seed(0)
    random.seed(0)
    return prepare(config, engine, TablePolicy(), None, None), [float(torch.rand(())), random.random()]


def after_seeding(seed: int) -> list[float]:
    torch.manual_seed(seed)
    random.seed(seed)
    return [float(torch.rand(())), random.random()]


def test_a_seed_seeds_the_generators_and_without_one_they_are_left_alone():
    assert drawn_after(GRPOConfig(seed=3), OneProcess()) == (3, after_seeding(3))
    seed, numbers = drawn_after(GRPOConfig(), OneProcess())
    torch.manual_seed(0)
    assert seed == int(torch.randint(2**31, ()))
    random.seed(0)
    assert numbers == [float(torch.rand(())), random.random()]


@pytest.mark.parametrize(
    ("seed", "rank", "first_seed", "own_seed"),
    [(None, 0, 5, 5), (None, 1, 5, 6), (5, 0, 5, 5), (5, 1, 5, 6), (None, 1, 2**64 - 1, 0)],
)
def test_ranks_share_the_seed_of_the_data_and_draw_other_numbers(seed, rank, first_seed, own_seed) -> None:
    """After the largest seed comes 0."""
    assert drawn_after(GRPOConfig(seed=seed), Rank(rank, first_seed)) == (first_seed, after_seeding(own_seed))


def test_models_are_moved_to_the_configured_device() -> None:
    for config, moves in ((GRPOConfig(device="cpu"), [call("cpu")]), (GRPOConfig(), [])):
        model = Mock(spec=["to"])
        prepare(config, OneProcess(), TablePolicy(), model, None)
        assert model.to.mock_calls == moves


class Synced(TablePolicy):
    def sync_sampler(self) -> None:
        self.calls["sync"] += 1


def test_whoever_samples_in_another_thread_has_finished_before_each_sync() -> None:
    policy, finished = Synced(), []
    sampler = SamplerSync(policy, lambda: 0)
    sampler.finish = lambda: finished.append(policy.calls["sync"])
    sampler.sync()
    sampler.sync()
    assert finished == [0, 1]


class WithReference(TablePolicy):
    """`ScoresReference`: probabilities 1/4 and 3/4."""

    reference_is_start = False

    def reference_log_probabilities(self, states: Any, actions: Any) -> Tensor:
        self.calls["reference"] += 1
        return torch.tensor([0.25, 0.75], dtype=torch.float64).log()[torch.as_tensor(actions)]


@pytest.mark.parametrize(
    ("kl_coef", "passes_reference", "in_force"),
    [(None, True, 0.04), (None, False, 0.0), (0.0, True, 0.0), (0.0, False, 0.0), (0.5, True, 0.5), (0.5, False, 0.5)],
)
def test_the_kl_coefficient_and_the_reference_decide_the_kl_penalty(kl_coef, passes_reference, in_force):
    """A capability alone switches nothing on; an explicit 0 scores no reference; `reference_policy` comes first."""
    reference = quarters() if passes_reference else None
    policy = WithReference(script=SCRIPT)
    config = {"objective": ObjectiveConfig(kl_coef=kl_coef)}
    metrics = by_hand(policy=policy, reference_policy=reference, config=config)[0].step(["a", "b"])
    assert metrics["train/kl_coef"] == in_force
    wanted = in_force > 0
    assert policy.calls["reference"] == (wanted and not passes_reference)
    if passes_reference:
        assert reference.calls["score"] + reference.calls["score with gradient"] == wanted
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


def run(num_steps: int, **settings: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The policy's and the reference's logits after each step."""
    reference = TablePolicy(script=SCRIPT)
    config = {"objective": ObjectiveConfig(kl_coef=0.1), **settings}
    trainer, policy = by_hand(reference_policy=reference, config=config)
    ours, theirs = [], []
    for _ in range(num_steps):
        trainer.step(["a", "b"])
        ours.append(policy.logits.detach().clone())
        theirs.append(reference.logits.detach().clone())
    return ours, theirs


def test_the_reference_is_copied_every_reference_sync_every_iterations() -> None:
    policy, reference = run(5, reference_sync_every=2)
    expected = [torch.zeros_like(policy[0]), policy[1], policy[1], policy[3], policy[3]]
    assert all(torch.equal(found, wanted) for found, wanted in zip(reference, expected, strict=True))


def test_a_reference_move_equals_hand_worked_weights() -> None:
    policy, reference = TablePolicy(logits=[[1.0, 0.0]] * 2), TablePolicy(logits=[[0.0, 4.0]] * 2)
    moving = MovingReference(GRPOConfig(reference_sync_every=2, reference_mix=0.25), policy, reference, OneProcess())
    assert [moving.move(iteration) for iteration in (1, 2, 3)] == [False, True, False]
    assert (reference.logits.tolist(), policy.logits.tolist()) == ([[0.25, 3.0]] * 2, [[1.0, 0.0]] * 2)


def moving_in(dtype: torch.dtype, mix: float) -> tuple[MovingReference, TablePolicy]:
    policy, reference = (TablePolicy(logits=[[value] * 2] * 2, dtype=dtype) for value in (1.0, 0.0))
    config = GRPOConfig(reference_sync_every=1, reference_mix=mix)
    return MovingReference(config, policy, reference, OneProcess()), reference


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_reference_in_half_precision_moves_in_small_steps(dtype):
    """(1 - .001)^2000 = .1352 of the way is left. Steps of .001 of 1 are lost near 1 in bfloat16, which has 8 bits."""
    moving, reference = moving_in(dtype, 0.001)
    for iteration in range(2_000):
        moving.move(iteration + 1)
    expected, rtol = torch.full((2, 2), 1 - 0.999**2_000, dtype=dtype), 8e-3 if dtype == torch.bfloat16 else 1e-3
    torch.testing.assert_close(reference.logits.detach(), expected, rtol=rtol, atol=0)
    assert bool(moving.state_dict()) == (dtype in (torch.float16, torch.bfloat16))


def test_a_reference_that_other_code_has_changed_moves_from_there() -> None:
    moving, reference = moving_in(torch.bfloat16, 0.5)
    moving.move(1)
    with torch.no_grad():
        reference.logits.fill_(-1.0)
    moving.move(2)
    assert reference.logits.tolist() == [[0.0, 0.0]] * 2


def test_the_exact_average_survives_saving_and_loading() -> None:
    """Two halves give the reference of an unbroken run, although its steps are smaller than bfloat16 shows."""
    whole, reference = moving_in(torch.bfloat16, 0.001)
    for iteration in range(1, 12):
        whole.move(iteration)
    second, resumed = moving_in(torch.bfloat16, 0.001)
    resumed.load_state_dict(reference.state_dict())
    second.load_state_dict(whole.state_dict())
    for moving in (whole, second):
        for iteration in range(12, 21):
            moving.move(iteration)
    average = whole.state_dict()["logits"]
    assert average.dtype == torch.float32
    assert torch.equal(average, second.state_dict()["logits"])
    assert torch.equal(reference.logits, resumed.logits)
