"""Updates that run out of memory: the replay has the gradient of smaller micro-batches, and leaves no other trace."""

import copy
import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from grpo import ActionScores, ExperienceBatch, GRPOConfig, GRPOTrainer
from tests.support.imitated_ranks import ImitatedRank, on_ranks
from tests.support.out_of_memory import SmallMemory, sampled_rows, scored_rows
from tests.support.policies import Planning, RecordingSGD, RowScoring, weights_of
from tests.support.trainers import without_time

STATES = [0, 1, 2, 3]
PLAN = [[6, 0, 3], [1, 2, 4, 5, 7]]


class Dropping(RowScoring):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dropout = nn.Dropout(0.4)

    def _logits(self, states: list[int], tokens: Tensor) -> Tensor:
        return super()._logits(states, tokens) + self.dropout(torch.ones(len(states), tokens.shape[1], 1))


class Planned(Planning):
    plan = staticmethod(lambda num_rows: PLAN)


def reward(states: Any, actions: Any) -> list[float]:
    return [float(sum(action)) + 0.3 * place for place, action in enumerate(actions)]


class Switching(RecordingSGD):
    """Halves the forward passes of its trainer's updates after some steps: what an error in the next update does."""

    trainer: GRPOTrainer | None = None
    after = -1

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        if self.trainer is not None and len(self.gradients) == self.after:
            self.trainer.collector.updating.num_halvings = 1


def made(kind: Any = RowScoring, *, after: int = -1, reward_model: Any = reward, **settings: Any) -> GRPOTrainer:
    """A trainer of eight rows of float64 per iteration, with two updates of forward passes of four rows."""
    torch.manual_seed(0)
    policy = kind(dtype=torch.float64)
    optimizer = Switching(policy)
    settings = {"group_size": 2, "num_epochs_per_update": 2, "micro_batch_size": 4, "seed": 3, **settings}
    trainer = GRPOTrainer(config=GRPOConfig(**settings), policy=policy, reward_model=reward_model, optimizer=optimizer)
    optimizer.trainer, optimizer.after = trainer, after
    if after == 0:
        trainer.collector.updating.num_halvings = 1
    return trainer


def in_forward(policy: Any, memory: SmallMemory) -> None:
    def rows_with_gradient(states: Any, actions: Any) -> int:
        return scored_rows(states, actions) if torch.is_grad_enabled() else 0

    updates = SmallMemory()
    updates.use = lambda num_rows: memory.use(num_rows) if num_rows else None  # type: ignore[method-assign]
    updates.used_by(policy, "score_actions", rows_with_gradient)


def in_backward(policy: Any, memory: SmallMemory) -> None:
    memory.used_by_backward(policy)


def after_backward(policy: Any, memory: SmallMemory) -> None:
    """When gradients of this forward pass have reached some parameters but not the last."""
    policy.start.weight.register_hook(lambda _: memory.use(policy.rows_scored[-1]))


def assert_equal_runs(found: GRPOTrainer, expected: GRPOTrainer, tolerance: float = 0.0) -> None:
    runs = [[*run.optimizer_step.optimizer.gradients, weights_of(run.policy)] for run in (found, expected)]
    torch.testing.assert_close(*runs, rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore:Dropping. before any update:grpo.GRPOWarning")
@pytest.mark.slow
@pytest.mark.parametrize("where", [in_forward, in_backward, after_backward])
@pytest.mark.parametrize("failing", range(1, 5))
def test_a_replay_equals_smaller_micro_batches_to_the_last_bit(where, failing):
    """Whichever of the four forward and backward passes of an iteration fails, with random numbers drawn in each."""
    expected = made(Dropping, after=(failing - 1) // 2)
    expected_metrics, expected_draw = expected.step(STATES), torch.rand(3)
    found, memory = made(Dropping), SmallMemory(fails_at=[failing])
    where(found.policy, memory)
    metrics = found.step(STATES)
    assert memory.sizes == [4] * failing + [2] * (4 if failing > 2 else 8)
    assert torch.equal(torch.rand(3), expected_draw)
    assert_equal_runs(found, expected)
    assert (metrics.pop("train/out_of_memory"), expected_metrics.pop("train/out_of_memory")) == (1.0, 0.0)
    assert without_time(metrics) == without_time(expected_metrics)


def test_each_part_of_a_policys_plan_is_halved() -> None:
    found, memory = made(Planned, num_epochs_per_update=1), SmallMemory(fits=4)
    in_forward(found.policy, memory)
    found.step(STATES)
    assert memory.sizes == [3, 5, 2, 1, 3, 2]


def test_a_single_row_that_does_not_fit_ends_the_update_with_the_weights_as_they_were() -> None:
    found, memory = made(), SmallMemory(fits=0)
    before = weights_of(found.policy)
    in_backward(found.policy, memory)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        found.step(STATES)
    assert memory.sizes == [4, 2, 1]
    assert "an update ran out of memory in a forward pass of a single row" in caught.value.__notes__[0]
    assert torch.equal(weights_of(found.policy), before)


class Saved(SimpleNamespace): ...  # which can be referenced weakly


class Watched(RowScoring):
    """Counts, at each forward pass with gradient, the tensors that earlier ones have saved and that are still in memory."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.saved: list[weakref.ref[Saved]] = []
        self.num_alive: list[int] = []

    def score_actions(self, states: Any, actions: Any) -> ActionScores:
        if not torch.is_grad_enabled():
            return super().score_actions(states, actions)
        self.num_alive.append(sum(one() is not None for one in self.saved))

        def pack(tensor: Tensor) -> Saved:
            saved = Saved(tensor=tensor.detach())  # a tensor with its graph would hold itself
            self.saved.append(weakref.ref(saved))
            return saved

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.tensor):
            return super().score_actions(states, actions)


@pytest.mark.parametrize("where", [in_forward, in_backward])
def test_a_failed_attempt_holds_no_tensors_when_the_next_begins(where):
    found, memory = made(Watched, micro_batch_size=None, num_epochs_per_update=1), SmallMemory(fits=4)
    where(found.policy, memory)
    found.step(STATES)
    assert memory.sizes == [8, 4, 4]
    assert len(found.policy.saved) > 0
    assert found.policy.num_alive == [0, 0, 0]


def test_log_probs_of_a_failed_attempt_are_not_checked() -> None:
    """The first forward pass gives NaN, the second one runs out of memory, and the replay gives numbers."""

    class Recovering(RowScoring):
        num_passes = 0

        def score_actions(self, states: Any, actions: Any) -> ActionScores:
            scores = super().score_actions(states, actions)
            self.num_passes += torch.is_grad_enabled()
            if self.num_passes == 1:
                return replace(scores, log_probs=scores.log_probs * float("nan"))
            return scores

    found, memory = made(Recovering, num_epochs_per_update=1), SmallMemory(fails_at=[2])
    in_forward(found.policy, memory)
    metrics = found.step(STATES)
    assert metrics["train/num_updates"] == 1.0
    assert math.isfinite(metrics["train/policy_loss"])


def test_an_optimizer_that_runs_out_of_memory_is_not_repeated() -> None:
    found, step = made(), Mock(side_effect=torch.OutOfMemoryError("in the optimizer"))
    found.optimizer_step.optimizer.step = step
    with pytest.raises(torch.OutOfMemoryError, match="in the optimizer"):
        found.step(STATES)
    assert (step.call_count, found.collector.updating.num_halvings) == (1, 0)


def test_repetitions_of_sampling_scoring_and_updates_add_up_in_one_metric() -> None:
    found = made()
    SmallMemory(fails_at=[1, 2]).used_by(found.policy, "generate_actions", sampled_rows)
    SmallMemory(fails_at=[1, 6]).used_by(found.policy, "score_actions", scored_rows)  # a scoring, and an update
    assert found.step(STATES)["train/out_of_memory"] == 4.0
    assert found.step(STATES)["train/out_of_memory"] == 0.0


def test_evaluations_are_repeated_with_fewer_rows() -> None:
    found, memory = made(), SmallMemory(fits=4)
    memory.used_by(found.policy, "generate_actions", sampled_rows)
    found.evaluate(STATES)
    assert memory.sizes == [8, 4, 4]
    assert found.step(STATES)["train/out_of_memory"] == 1.0


def test_a_resumed_run_halves_again_only_if_its_memory_runs_out(tmp_path: Path) -> None:
    first = made()
    in_forward(first.policy, SmallMemory(fits=2))
    first.step(STATES)
    first.save_checkpoint(tmp_path / "checkpoint")
    first.step(STATES)
    for fits, sizes in ((4, [4] * 4), (2, [4] + [2] * 8)):
        second, memory = made(), SmallMemory(fits=fits)
        in_forward(second.policy, memory)
        second.load_checkpoint(tmp_path / "checkpoint")
        second.step(STATES)
        assert memory.sizes == sizes
        torch.testing.assert_close(weights_of(second.policy), weights_of(first.policy), rtol=1e-5, atol=1e-7)


ROLLOUTS = [
    {"states": [0, 0, 1, 1], "actions": [(1, 2), (0, 1), (2, 0), (1, 1)], "rewards": [0.0, 1.0, 0.0, 2.0]},
    {"states": [2, 2, 3, 3], "actions": [(2, 2), (1, 0), (0, 0), (2, 1)], "rewards": [1.0, 0.0, 3.0, 0.0]},
]


def in_two_threads(work: Callable[[GRPOTrainer, int], Any]) -> tuple[list[GRPOTrainer], list[Any]]:
    """Call `work` on two ranks that start from the same weights. Return their trainers and what `work` returned."""
    torch.manual_seed(0)
    start = RowScoring(dtype=torch.float64)

    def run(engine: ImitatedRank) -> tuple[GRPOTrainer, Any]:
        policy, config = copy.deepcopy(start), GRPOConfig(group_size=2, micro_batch_size=4, seed=1)
        others = {"reward_model": reward, "optimizer": RecordingSGD(policy), "engine": engine}
        trainer = GRPOTrainer(config=config, policy=policy, **others)
        return trainer, work(trainer, engine.rank)

    trainers, results = zip(*on_ranks(2, run), strict=True)
    return list(trainers), list(results)


@pytest.mark.parametrize(
    ("fails", "sizes", "count"),
    [
        # at which forward passes a rank runs out of memory
        ({}, [4], 0.0),
        ({0: [1]}, [4, 2, 2], 1.0),
        ({1: [1]}, [4, 2, 2], 1.0),
        ({0: [1], 1: [1]}, [4, 2, 2], 2.0),
        ({0: [1], 1: [3]}, [4, 2, 2, 1, 1, 1, 1], 2.0),
    ],
)
def test_all_ranks_replay_together_with_the_gradient_of_the_run_without_an_error(fails, sizes, count):
    def one_update(trainer: GRPOTrainer, rank: int) -> float:
        in_forward(trainer.policy, memories[rank])
        mask = torch.ones(4, 2, dtype=torch.bool)
        batch = ExperienceBatch.from_rows(**ROLLOUTS[rank], group_ids=[0, 0, 1, 1], mask=mask)
        return trainer.update(batch)["train/out_of_memory"]

    memories = [SmallMemory(), SmallMemory()]
    (expected, _), _ = in_two_threads(one_update)
    memories = [SmallMemory(fails_at=fails.get(rank, ())) for rank in range(2)]
    trainers, counts = in_two_threads(one_update)
    assert ([memory.sizes for memory in memories], counts) == ([sizes] * 2, [count] * 2)
    for trainer in trainers:
        assert_equal_runs(trainer, expected, 1e-12)


def test_each_rank_keeps_the_sizes_that_fit_it_and_updates_have_one_size() -> None:
    """Rank 1 runs out of memory in the first iteration. In the second, rank 0 samples and scores as before."""
    sampling, scoring = ([SmallMemory(), SmallMemory(fits=fits)] for fits in (4, 2))

    def two_steps(trainer: GRPOTrainer, rank: int) -> list[float]:
        policy = trainer.policy
        sampling[rank].used_by(policy, "generate_actions", sampled_rows)
        scoring[rank].used_by(policy, "score_actions", scored_rows)
        counts = [trainer.step(STATES)["train/out_of_memory"]]
        sampling[rank].sizes.clear()
        scoring[rank].sizes.clear()
        return [*counts, trainer.step(STATES)["train/out_of_memory"]]

    _, counts = in_two_threads(two_steps)
    assert counts[0] == counts[1] == [3.0, 0.0]  # a sampling, a scoring and an update of rank 1
    assert [memory.sizes for memory in sampling] == [[8], [4, 4]]
    assert [memory.sizes for memory in scoring] == [[4] * 2 + [2] * 4, [2] * 8]
