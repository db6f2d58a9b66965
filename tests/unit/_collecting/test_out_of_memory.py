"""Work that runs out of memory: which sizes are tried, what is put back, when the error is raised, and how ranks agree."""

import copy
import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo import ExperienceBatch
from grpo._collecting.costs import Costs
from grpo._collecting.out_of_memory import PassSizes
from grpo._collecting.update_plan import cut_parts, half, parts_in_order
from grpo._ranks.processes import SeveralProcesses
from grpo._rewarding.calls import COUNTED
from grpo.experience_collector import ExperienceCollector
from tests.support.out_of_memory import SmallMemory, scored_rows
from tests.support.policies import Planning, RowScoring

ROWS: dict[str, Any] = {
    "states": [0, 0, 1, 1, 2, 2, 3, 3],
    "actions": [(1, 2, 0), (0,), (2, 0), (1,), (1, 1, 1, 1), (2,), (0,), (2, 2, 0)],
    "rewards": [0.0, 1.0] * 4,
    "group_ids": [0, 0, 1, 1, 2, 2, 3, 3],
}
MASK = torch.arange(4) < torch.tensor([len(action) for action in ROWS["actions"]]).unsqueeze(1)


def batch() -> ExperienceBatch:
    return ExperienceBatch.from_rows(**ROWS, mask=MASK)


def worked(sizes: PassSizes, memory: SmallMemory, num_rows: int, **options: Any) -> list[int]:
    """Pass over rows, in forward passes of half as many rows after each halving. Return the sizes of the last attempt."""

    def work() -> list[int]:
        found = []
        for part in sizes.passes(parts_in_order(num_rows, None, sizes.num_halvings)):
            memory.use(part.stop - part.start)
            found.append(part.stop - part.start)
        return found

    return sizes.repeat(work, **options)


@pytest.mark.parametrize(
    ("size", "times", "expected"),
    [(8, 0, 8), (8, 1, 4), (8, 3, 1), (8, 9, 1), (5, 1, 3), (5, 2, 2), (5, 3, 1), (1, 1, 1)],
)
def test_half_is_rounded_up(size, times, expected):
    assert half(size, times) == expected


def test_parts_in_order_and_parts_of_a_plan_have_half_the_rows():
    assert parts_in_order(7, None, 1) == [slice(0, 4), slice(4, 7)]
    assert parts_in_order(7, 4, 1) == [slice(0, 2), slice(2, 4), slice(4, 6), slice(6, 7)]
    assert parts_in_order(3, 2, 9) == [slice(0, 1), slice(1, 2), slice(2, 3)]
    assert parts_in_order(0, None, 2) == []
    plan: list[Any] = [torch.tensor([6, 0, 3]), torch.tensor([1]), torch.tensor([5, 4])]
    assert [part.tolist() for part in cut_parts(plan, 0)] == [[6, 0, 3], [1], [5, 4]]  # type: ignore[union-attr]
    assert [part.tolist() for part in cut_parts(plan, 1)] == [[6, 0], [3], [1], [5], [4]]  # type: ignore[union-attr]
    assert [part.tolist() for part in cut_parts(plan, 2)] == [[6], [0], [3], [1], [5], [4]]  # type: ignore[union-attr]
    assert cut_parts([slice(2, 5)], 1) == [slice(2, 4), slice(4, 5)]


def test_work_is_repeated_with_half_the_rows_until_it_fits_and_stays_there(caplog: pytest.LogCaptureFixture) -> None:
    """Each new size is logged once."""
    sizes, memory = PassSizes("an update"), SmallMemory(fits=2)
    with caplog.at_level(logging.WARNING, logger="grpo"):
        assert (worked(sizes, memory, 7), memory.sizes) == ([2, 2, 2, 1], [7, 4, 2, 2, 2, 1])
        assert (sizes.num_halvings, sizes.num_repeated) == (2, 2)
        assert worked(sizes, memory, 8) == [2, 2, 2, 2]
    assert (sizes.num_halvings, sizes.num_repeated) == (2, 2)
    message = "An update ran out of memory with up to {} rows per forward pass. It is repeated, and from now on has at most {}."
    assert caplog.messages == [message.format(7, 4), message.format(4, 2)]


@pytest.mark.parametrize("failing", range(1, 5))
def test_all_passes_are_repeated_whichever_failed(failing):
    sizes, memory = PassSizes("work"), SmallMemory(fails_at=[failing])
    sizes.num_halvings = 1
    assert worked(sizes, memory, 8) == ([4, 4] if failing > 2 else [2] * 4)
    assert len(memory.sizes) == (2 if failing > 2 else failing + 4)


def test_what_an_attempt_left_behind_is_put_back_before_each_repetition() -> None:
    left: list[str] = []
    sizes, memory = PassSizes("work"), SmallMemory(fits=2)
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)

    def work() -> Tensor:
        assert left == []
        drawn = torch.rand(2)
        for part in sizes.passes(parts_in_order(8, None, sizes.num_halvings)):
            left.append("pass")
            memory.use(part.stop - part.start)
        return drawn

    assert torch.equal(sizes.repeat(work, left.clear), expected)
    assert left == ["pass"] * 4


def test_a_single_row_that_does_not_fit_is_an_error_that_says_what_to_do() -> None:
    sizes, memory = PassSizes("an update"), SmallMemory(fits=0)
    with pytest.raises(torch.OutOfMemoryError, match="injected at use 3, of 1 rows") as caught:
        worked(sizes, memory, 4)
    assert memory.sizes == [4, 2, 1]
    (note,) = caught.value.__notes__
    assert note.startswith("grpo: an update ran out of memory in a forward pass of a single row")
    assert "Make the rows shorter" in note


def interrupted(sizes: PassSizes, error: BaseException, after: int) -> None:
    """Raise an error after a number of two forward passes, of 3 rows and of 1: with 0 before them, with 3 after them."""

    def work() -> None:
        if after > 0:
            for number, _ in enumerate(sizes.passes([slice(0, 3), slice(0, 1)]), start=1):
                if number == after:
                    raise error
        raise error

    sizes.repeat(work)


@pytest.mark.parametrize(
    ("error", "after", "num_notes"),
    [
        (torch.OutOfMemoryError, 0, 0),  # before the passes
        (torch.OutOfMemoryError, 3, 0),  # after them
        (torch.OutOfMemoryError, 2, 1),  # in a pass of a single row, though another part is larger
        (MemoryError, 1, 0),
        (KeyboardInterrupt, 1, 0),
        (partial(RuntimeError, "CUDA out of memory, in words alone"), 1, 0),
    ],
)
def test_only_an_error_of_memory_in_a_pass_of_several_rows_is_repeated(error, after, num_notes):
    sizes, error = PassSizes("work"), error()
    with pytest.raises(type(error)) as caught:
        interrupted(sizes, error, after)
    assert len(getattr(caught.value, "__notes__", [])) == num_notes
    assert (sizes.num_halvings, sizes.num_repeated) == (0, 0)


def test_an_error_before_the_passes_of_a_second_attempt_is_not_repeated() -> None:
    sizes, memory = PassSizes("work"), SmallMemory(fails_at=[1, 2])

    def work() -> None:
        if sizes.num_halvings == 1:
            memory.use(0)  # while the second attempt is planned
        for part in sizes.passes([slice(0, 4)]):
            memory.use(part.stop)

    with pytest.raises(torch.OutOfMemoryError, match="at use 2, of 0 rows"):
        sizes.repeat(work)
    assert (sizes.num_halvings, sizes.num_repeated) == (1, 1)


def test_unused_memory_of_cuda_is_released_before_a_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: released.append(len(memory.sizes)))
    generators = [torch.tensor([7], dtype=torch.uint8)]
    restored: list[Any] = []
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: generators)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", restored.append)
    memory = SmallMemory(fits=2)
    worked(PassSizes("work"), memory, 8)
    assert (released, restored) == ([1, 2], [generators, generators])


class OtherRank(SeveralProcesses):
    """A second rank that runs out of memory in some of its attempts, counted from 1."""

    num_ranks = 2

    def __init__(self, *fails_in: int) -> None:
        self.fails_in, self.num_meetings = fails_in, 0

    def gather_objects(self, value: Any) -> list[Any]:
        self.num_meetings += 1
        return [value, self.num_meetings in self.fails_in]


def test_a_rank_repeats_what_another_rank_could_not_do(caplog: pytest.LogCaptureFixture) -> None:
    """Two halvings for the other rank, none for this one; only errors of this rank are counted and logged."""
    engine, memory = OtherRank(1, 2), SmallMemory()
    sizes = PassSizes("work", engine)
    with caplog.at_level(logging.WARNING, logger="grpo"):
        assert worked(sizes, memory, 8, together=True) == [2, 2, 2, 2]
    assert memory.sizes == [8, 4, 4, 2, 2, 2, 2]
    assert (sizes.num_halvings, sizes.num_repeated, engine.num_meetings) == (2, 0, 3)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("fails_in", "fits", "num_rows", "together", "expected", "counts"),
    [
        ([1], 4, 8, True, [4, 4], (1, 1, 2)),  # two ranks that fail in one attempt halve once
        ([1], 0, 0, True, [], (1, 0, 2)),  # a rank without rows waits for the other one
        ([1, 2, 3], 4, 8, False, [4, 4], (1, 1, 0)),  # work of a rank by itself
    ],
)
def test_ranks_that_work_together_halve_together(fails_in, fits, num_rows, together, expected, counts):
    engine = OtherRank(*fails_in)
    sizes = PassSizes("work", engine)
    assert worked(sizes, SmallMemory(fits=fits), num_rows, together=together) == expected
    assert (sizes.num_halvings, sizes.num_repeated, engine.num_meetings) == counts


class OwnReference(RowScoring):
    """Has a reference of its own: another network with the same interface."""

    def __init__(self) -> None:
        super().__init__()
        self.reference = RowScoring()

    def reference_log_probabilities(self, states: Any, actions: Any) -> Tensor:
        scores = self.reference.score_actions(states, actions)
        return torch.where(scores.mask, scores.log_probs, 0.0)


def zeros(states: Any, actions: Any) -> list[float]:
    return [0.0] * len(actions)


def completed(policy: Any, reference: Any = None, **settings: Any) -> tuple[ExperienceBatch, ExperienceCollector]:
    settings |= {"group_size": 2, "reference_policy": reference, "use_reference": True, "needs": ("entropy",)}
    collector = ExperienceCollector(policy=policy, reward_model=zeros, **settings)
    return collector.complete(batch(), several_updates=True), collector


def reported(collector: ExperienceCollector, *others: Costs) -> float:
    """The number of repetitions on this rank and others, as an iteration reports it."""
    return collector.costs.agree([collector.costs.of_this_rank(), *others])["train/out_of_memory"]


@pytest.mark.parametrize("failing", [1, 2])
@pytest.mark.parametrize("failing_part", ["policy", "reference", "own reference"])
def test_scores_are_the_same_whichever_call_runs_out_of_memory(failing_part, failing):
    """Two calls of four rows for the policy and two for the reference. The failing call is repeated with two rows each."""
    policies = [OwnReference()] if failing_part == "own reference" else [RowScoring(), RowScoring()]
    expected, _ = completed(*policies, micro_batch_size=2)
    memory, twins = SmallMemory(fails_at=[failing]), copy.deepcopy(policies)
    method = "reference_log_probabilities" if failing_part == "own reference" else "score_actions"
    memory.used_by(twins[failing_part == "reference"], method, scored_rows)
    found, collector = completed(*twins, micro_batch_size=4)
    assert memory.sizes == [4] * failing + [2] * 4
    assert (collector.scoring.num_halvings, reported(collector)) == (1, 1)
    for name in ("old_log_probs", "ref_log_probs", "entropy"):
        torch.testing.assert_close(getattr(found, name)[MASK], getattr(expected, name)[MASK], rtol=1e-12, atol=0)


def test_parts_of_a_plan_are_halved_when_scoring() -> None:
    policy = Planning()
    policy.plan = lambda num_rows: [[6, 0, 3], [1, 2, 4, 5, 7]]  # type: ignore[method-assign]
    expected, _ = completed(copy.deepcopy(policy), policy)
    memory = SmallMemory(fits=3)
    twin = copy.deepcopy(policy)
    memory.used_by(twin, "score_actions", scored_rows)
    found, _ = completed(twin, policy)
    assert memory.sizes == [3, 5, 2, 1, 3, 2]
    assert torch.allclose(found.old_log_probs[MASK], expected.old_log_probs[MASK], rtol=1e-12, atol=0)


def test_steps_of_sampled_actions_are_found_with_fewer_rows_too() -> None:
    torch.manual_seed(0)
    policy, memory = RowScoring(), SmallMemory(fits=3)
    memory.used_by(policy, "score_actions", scored_rows)
    found = ExperienceCollector(policy=policy, reward_model=zeros, group_size=3).collect([0, 1])
    assert memory.sizes == [6, 3, 3]
    expected = RowScoring.score_actions(policy, found.states, found.actions)
    assert torch.equal(found.mask, expected.mask)
    assert torch.allclose(found.old_log_probs[found.mask], expected.log_probs[found.mask].detach(), rtol=1e-12, atol=0)


def test_repetitions_of_all_ranks_count_and_each_rank_keeps_its_own_sizes() -> None:
    collector = ExperienceCollector(policy=RowScoring(), reward_model=zeros, group_size=1)
    collector.sample.rows_per_call, collector.scoring.num_halvings, collector.sample.num_repeated = 8, 1, 1
    assert reported(collector, Costs(counts={}, measured={}, num_repeated=2)) == 3
    assert (collector.sample.rows_per_call, collector.scoring.num_halvings) == (8, 1)


def test_the_state_restores_every_count_and_no_size() -> None:
    """How many rows fit into memory depends on the machine that resumes."""
    collector, twin = (ExperienceCollector(policy=RowScoring(), reward_model=zeros, group_size=1) for _ in range(2))
    fresh = {"num_repeated": [0, 0, 0], "reward_counts": dict.fromkeys(COUNTED, 0.0), "reward_metrics": {}}
    assert collector.costs.state_dict() == fresh
    collector.sample.rows_per_call, collector.updating.num_halvings = 6, 2
    collector.sample.num_repeated, collector.scoring.num_repeated, collector.updating.num_repeated = 3, 4, 5
    twin.costs.load_state_dict(collector.costs.state_dict())
    assert (twin.sample.rows_per_call, twin.updating.num_halvings) == (None, 0)
    assert (twin.costs.state_dict(), reported(twin)) == (collector.costs.state_dict(), 12)
