"""Engines: what a single process does, what `Replicated` sends and returns, and that ranks start from equal weights."""

import re
import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from grpo import ConfigError, ContractError
from grpo._ranks.equality import weights_of
from grpo._ranks.processes import SeveralProcesses
from grpo._ranks.shared_errors import shared_by_all
from grpo.distributed import Replicated
from grpo.engine import Engine, OneProcess
from grpo.errors import RankError, TrainingInterrupted
from tests.support.clocks import skipping_clock
from tests.support.gloo_threads import Group, groups, on_ranks, on_threads
from tests.support.reward_faults import eventually

__all__ = ["groups"]  # a fixture
pytestmark = pytest.mark.usefixtures("groups")


def test_a_single_process_gets_back_what_it_passes() -> None:
    engine, values, policy = OneProcess(), torch.tensor([1.0, 2.0]), object()  # nothing of the policy is used
    assert isinstance(engine, Engine)
    assert (engine.rank, engine.num_ranks, engine.divides_weights) == (0, 1, False)
    assert engine.sum(values) is values
    rows, first = engine.gather(values)
    assert rows is values
    assert first == 0
    assert engine.gather_objects("a") == ["a"]
    assert engine.equal_count(3) == 3
    with engine.waiting(60.0, "nobody waits"), engine.whole(policy):
        engine.agree()
    engine.divide(policy)
    engine.require_same("x", {"a": 1})  # there is no rank to compare with
    engine.require_same_soon({"a": 1})
    engine.require_equal_weights(policy, None)
    own = ZeroDivisionError("x")
    with pytest.raises(ZeroDivisionError) as raised, engine.together(), engine.together("a step"):
        raise own
    assert raised.value is own
    with pytest.raises(ZeroDivisionError):
        engine.agree(own)
    rows, target = torch.arange(6.0).reshape(3, 2), torch.zeros(3, 2)
    assert engine.part(rows) is engine.divided(rows, (6, 2)) is rows
    engine.copy_into(target, rows)
    assert torch.equal(target, rows)
    assert target.data_ptr() != rows.data_ptr()
    engine.accompany(policy, lambda: pytest.fail("a single process makes only its own passes"))


def test_a_single_process_keeps_its_gradients_and_clips_them() -> None:
    """Gradients (3, 0) and 4 have the norm 5. Nothing changes at a limit of 6; a limit of 1 gives (0.6, 0) and 0.8."""
    engine = OneProcess()
    tensors = [torch.zeros(2), torch.tensor(0.0), torch.zeros(3)]
    gradients = [torch.tensor([3.0, 0.0]), torch.tensor(4.0)]
    tensors[0].grad, tensors[1].grad = gradients
    value = torch.tensor(7.0)
    assert engine.sum_gradients(tensors, value) is value
    assert value.item() == 7
    assert tensors[0].grad is gradients[0]
    assert tensors[1].grad is gradients[1]
    assert tensors[2].grad is None
    assert [gradient.tolist() for gradient in gradients] == [[3, 0], 4]
    norm = engine.total_norm(gradients)
    assert (norm.item(), norm.shape) == (5, ())
    engine.clip_gradients(tensors[:2], 6.0, norm)
    assert [gradient.tolist() for gradient in gradients] == [[3, 0], 4]
    engine.clip_gradients(tensors[:2], 1.0, norm)
    assert gradients[0].tolist() == pytest.approx([0.6, 0.0])
    assert gradients[1].item() == pytest.approx(0.8)


def test_the_error_without_a_process_group_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # torch's own functions, in place of those of `groups`
    with pytest.raises(ConfigError, match=r"Replicated needs torch\.distributed: call .*init_process_group\(\) first"):
        Replicated()


def test_a_group_of_one_process_returns_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=30))
    try:
        engine = Replicated()
        assert isinstance(engine, Engine)
        assert (engine.rank, engine.num_ranks) == (0, 1)
        values = torch.tensor([[1.0, -2.0]], dtype=torch.float64)
        total = engine.sum(values)
        assert torch.equal(total, values)
        assert total.data_ptr() != values.data_ptr()
        for rows in (values, torch.tensor([True, False]), torch.zeros(0, 3, dtype=torch.int64)):
            found, first = engine.gather(rows)
            assert torch.equal(found, rows)
            assert (found.dtype, first) == (rows.dtype, 0)
        assert engine.gather_objects({"a": 1}) == [{"a": 1}]
    finally:
        dist.destroy_process_group()


GATHERED: dict[str, list[Tensor]] = {
    "padded with 0 to the widest": [
        torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0, 7.0]]), torch.tensor([[8.0], [9.0]]),
    ],
    "a rank without rows": [torch.zeros(0, 1), torch.tensor([[1.0]]), torch.tensor([[2.0]])],
    "64 numbers": [torch.arange(3.0), torch.arange(64.0), torch.zeros(0)],
    "65 numbers, so that all ranks send tensors": [torch.arange(3.0), torch.arange(65.0), torch.zeros(0)],
    "booleans": [torch.tensor([[True], [False]]), torch.tensor([[True]])],
    "many booleans": [torch.tensor([[True] * 70, [False] * 70]), torch.tensor([[True] * 70])],
}  # fmt: skip


@pytest.mark.parametrize("case", GATHERED)
def test_rows_of_all_ranks_are_joined_in_rank_order(case: str) -> None:
    """The index is that of the rank's own first row, after the rows of lower ranks."""
    parts = GATHERED[case]
    width = max(part.shape[-1] for part in parts)
    padded = [torch.nn.functional.pad(part, (0, width - part.shape[1])) if part.dim() == 2 else part for part in parts]
    for rank, (rows, first) in enumerate(on_ranks(len(parts), lambda engine: engine.gather(parts[engine.rank]))):
        assert torch.equal(rows, torch.cat(padded))
        assert rows.dtype == parts[0].dtype
        assert first == sum(len(part) for part in parts[:rank])


@pytest.mark.parametrize(
    "values", [torch.tensor(1.0), torch.ones(2, 3).double(), torch.ones(64), torch.ones(65), torch.ones(5).int()]
)
def test_a_sum_is_a_new_tensor_of_the_same_kind(values: Tensor) -> None:
    """Small tensors travel with the first message; 65 numbers need an operation of their own."""
    own = [values * 10**rank for rank in range(3)]
    for rank, total in enumerate(on_ranks(3, lambda engine: engine.sum(own[engine.rank]))):
        assert torch.equal(total, values * 111)
        assert total.dtype == values.dtype
        assert torch.equal(own[rank], values * 10**rank)
        assert total.data_ptr() != own[rank].data_ptr()


def test_a_sum_is_made_in_rank_order_on_every_rank() -> None:
    """1e8 + 1 is 1e8 in float32, so that (1 + 1e8) - 1e8 = 0, and other orders give 1."""
    values = [torch.tensor([1.0]), torch.tensor([1e8]), torch.tensor([-1e8])]
    assert [total.item() for total in on_ranks(3, lambda engine: engine.sum(values[engine.rank]))] == [0.0] * 3


SUM, GATHER = "sum() needs one shape and dtype on all ranks.", "gather() needs one number of axes and one dtype."


@pytest.mark.parametrize(("name", "other", "message"), [
    ("sum", torch.ones(2), f"{SUM} rank 0 passed [1] torch.float32, rank 1 passed [2]"),
    ("sum", torch.ones(1).double(), SUM),
    ("gather", torch.ones(1).double(), GATHER),
    ("gather", torch.ones(1, 1), GATHER),
])  # fmt: skip
def test_tensors_of_different_kinds_are_refused_on_every_rank(name: str, other: Tensor, message: str) -> None:
    both = torch.ones(1), other
    for error in on_ranks(2, lambda engine: getattr(engine, name)(both[engine.rank])):
        assert isinstance(error, RankError)
        assert str(error).startswith(message)


def test_tensors_on_an_accelerator_travel_over_the_group_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """With NCCL, only messages use gloo. The device is the CPU here."""
    used: list[str] = []

    def all_reduce(total: Tensor, group: Any) -> None:
        used.append(f"all_reduce {group.rank}")
        total.mul_(2)

    def all_gather(parts: list[Tensor], own: Tensor, group: Any) -> None:
        used.append(f"all_gather {group.rank}")
        for part in parts:
            part.copy_(own)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "all_gather", all_gather)
    engine = Replicated(Group(0, 1, dist.HashStore(), "nccl"))
    assert engine._device == torch.device("cuda")
    engine._device = torch.device("cpu")
    assert torch.equal(engine.sum(torch.ones(65)), torch.full((65,), 2.0))
    assert torch.equal(engine.gather(torch.ones(65))[0], torch.ones(65))
    assert used == ["all_reduce 0", "all_gather 0"]


def test_a_rank_that_waits_for_something_else_may_come_later_than_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes 32 seconds later, in steps of an imitated clock. At each step, rank 0 has heard again that rank 1 is busy."""
    skip, watches = skipping_clock(monkeypatch), []

    def body(engine: Replicated) -> list[Any]:
        if engine.rank == 0:
            watches.append(engine._meetings._watch)
            return engine.gather_objects(0)
        with engine.waiting(3600.0, "the judge is ill"):
            for _ in range(8):
                now = time.monotonic()
                eventually(
                    lambda now=now: watches and watches[0].busy_at.get(1, ("", now))[1] > now, "rank 0 has heard it"
                )
                skip(4.0)
        return engine.gather_objects(1)

    assert on_ranks(2, body, timeout=20.0) == [[0, 1], [0, 1]]


def test_gradients_and_a_value_are_added_up_over_all_ranks() -> None:
    """In two dtypes; float32 could not hold 1 + 1e-12. A gradient that a rank lacks counts as zeros."""
    double = torch.float64

    def body(engine: Replicated) -> tuple[Tensor, list[Tensor | None]]:
        factor = 10**engine.rank
        tensors = [
            torch.zeros(2, 2),
            torch.zeros(2).double(),
            torch.zeros(5),
            torch.zeros(()),
            torch.zeros(70).double(),
        ]
        tensors[0].grad = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * factor
        if engine.rank < 2:
            tensors[1].grad = torch.tensor([1.0, 1.0 + 1e-12], dtype=double)
        if engine.rank == 1:
            tensors[3].grad = torch.tensor(-4.0)
        tensors[4].grad = torch.arange(70, dtype=double) * factor
        total = engine.sum_gradients(tensors, torch.tensor([2.0, 0.5], dtype=double) * factor)
        return total, [tensor.grad for tensor in tensors]

    expected = [
        torch.tensor([[111.0, 222.0], [333.0, 444.0]]),
        torch.tensor([2.0, 2.0 + 2e-12], dtype=double),
        None,  # no rank has it
        torch.tensor(-4.0),
        torch.arange(70, dtype=double) * 111,
    ]
    for total, gradients in on_ranks(3, body):
        assert torch.equal(total, torch.tensor([222.0, 55.5], dtype=double))
        for found, wanted in zip(gradients, expected, strict=True):
            if wanted is None:
                assert found is None
            else:
                assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
                assert torch.equal(found, wanted)


ONE, TWO = torch.zeros(2), torch.zeros(3)


@pytest.mark.parametrize("both", [
    *(([ONE], [ONE, TWO]), ([ONE], [TWO]), ([ONE, TWO], [TWO, ONE]), ([], [ONE]), ([ONE], [ONE.double()])),
    ([torch.zeros(2, 3)], [torch.zeros(3, 2)]),
])  # fmt: skip
def test_gradients_of_different_tensors_are_refused_on_every_rank(both: Any) -> None:
    """Another number of tensors, size, order, dtype or shape. The ranks can go on together after the error."""

    def body(engine: Replicated) -> Any:
        with pytest.raises(RankError) as raised, engine.together("an update"):
            engine.sum_gradients(both[engine.rank], torch.tensor(1.0))
        return str(raised.value), engine.gather_objects(engine.rank)

    error = "Gradients need tensors of the same shapes and dtypes on all ranks. Build equal policies and optimizers."
    assert on_ranks(2, body) == [(error, [0, 1])] * 2


def failing(error: BaseException, meanwhile: Callable[[Replicated], Any], doing: str = "") -> list[Any]:
    """Rank 1 raises `error` in a block, while rank 0 calls `meanwhile`."""

    def body(engine: Replicated) -> None:
        with engine.together(doing):
            if engine.rank == 1:
                raise error
            meanwhile(engine)

    return on_ranks(2, body)


MEANWHILE: dict[str, Callable[[Replicated], Any]] = {
    "sum": lambda engine: engine.sum(torch.ones(1)),
    "gather": lambda engine: engine.gather(torch.ones(1)),
    "gather_objects": lambda engine: engine.gather_objects("a" * 5_000),
    "agree": lambda engine: engine.agree(),
}


@pytest.mark.parametrize("name", MEANWHILE)
def test_the_error_of_a_rank_is_raised_on_every_rank_whatever_it_does(name: str) -> None:
    for error in failing(ContractError("it broke"), MEANWHILE[name]):
        assert type(error) is ContractError
        assert str(error) == "Rank 1: it broke"


def test_errors_of_other_packages_and_interrupts_are_raised_on_every_rank() -> None:
    first, second = failing(ZeroDivisionError("x"), lambda engine: engine.agree())
    assert str(first) == str(second) == "Rank 1 raised ZeroDivisionError: x"
    assert isinstance(second.__cause__, ZeroDivisionError)
    interrupts = failing(TrainingInterrupted(15), lambda engine: engine.agree())
    assert [error.signal_number for error in interrupts] == [15, 15]


def test_a_rank_that_goes_on_alone_is_never_paired_with_another_operation() -> None:
    """Both ranks gather objects, but rank 1 has caught an error and is in its next iteration."""

    def body(engine: Replicated) -> Any:
        with engine.together(f"update in iteration {6 + engine.rank}"):
            return engine.gather_objects(None)

    start = "All ranks must make the same calls in the same order; rank 0 is at gather_objects() in "
    for said in said_on_ranks(RankError, body):
        assert said.startswith(start)
        assert " (update in iteration 6), rank 1 is at gather_objects() in " in said
        assert " (update in iteration 7). If an error was caught" in said
    other = lambda engine: engine.agree() if engine.rank else engine.gather_objects(None)  # noqa: E731
    assert all(", rank 1 is at agree()." in said for said in said_on_ranks(RankError, other))


class Counting(SeveralProcesses):
    """Counts how often an error is shared. `raises`: what all ranks raise then."""

    num_ranks = 2

    def __init__(self, raises: BaseException) -> None:
        self.shared: list[BaseException | None] = []
        self.raises = raises

    def agree(self, error: BaseException | None = None) -> None:
        self.shared.append(error)
        shared_by_all(self.raises)
        raise self.raises


def test_an_error_is_shared_once_by_nested_blocks_and_a_foreign_interrupt_is_not() -> None:
    own = ZeroDivisionError("x")
    engine = Counting(RankError("y"))
    with pytest.raises(RankError, match="y"), engine.together(), engine.together(), engine.together():
        raise own
    assert engine.shared == [own]
    engine.shared.clear()
    with engine.together():
        pass
    with pytest.raises(KeyboardInterrupt), engine.together():
        raise KeyboardInterrupt
    assert engine.shared == []
    with pytest.raises(RankError), engine.together():
        raise TrainingInterrupted(2)
    assert len(engine.shared) == 1


def said_on_ranks(kind: type[Exception], body: Callable[[Replicated], Any]) -> list[str]:
    """What the errors of two ranks say, which are of this kind."""
    errors = on_ranks(2, body)
    assert [type(error) for error in errors] == [kind] * 2
    return [str(error) for error in errors]


def test_values_that_differ_between_ranks_are_refused_and_named_on_every_rank() -> None:
    def body(engine: Replicated) -> None:
        values = {"lr": 0.1 * (1 + engine.rank), "same": "a", **({"extra": None} if engine.rank == 1 else {})}
        engine.require_same("Trainer", values)

    needs = "Trainer needs the same arguments on all ranks; lr is 0.1 on rank 0, 0.2 on rank 1; "
    extra = "extra is absent on rank 0, None on rank 1. Pass the same values."
    assert said_on_ranks(ConfigError, body) == [needs + extra] * 2
    many = lambda engine: engine.require_same("x", {str(n): engine.rank for n in range(9)})  # noqa: E731
    assert all("4 is 0 on rank 0, 1 on rank 1; and 4 more. Pass" in said for said in said_on_ranks(ConfigError, many))
    same = on_ranks(2, lambda engine: engine.require_same("x", {"a": float("nan"), "b": [1]}))
    assert same == [None, None]


def test_values_are_compared_in_the_next_exchange_without_a_meeting_of_their_own() -> None:
    """Equal values need the one meeting of the exchange. Different ones are named, and the ranks can go on together."""

    def body(engine: Replicated) -> Any:
        engine.require_same_soon({"group": {"lr": 0.1}})
        engine.require_same_soon({"weight": torch.ones(3)})
        before = engine._meetings._meeting
        engine.agree()
        num_meetings = engine._meetings._meeting - before
        engine.require_same_soon({"group": {"lr": 0.1 + engine.rank, "beta": 0.9}})
        with pytest.raises(RankError) as raised:
            engine.gather_objects(engine.rank)
        return num_meetings, str(raised.value), engine.gather_objects(engine.rank)

    said = "Ranks have become different; group.lr is 0.1 on rank 0, 1.1 on rank 1. Change weights and settings in the same "
    assert on_ranks(2, body) == [(1, f"{said}way on every rank.", [0, 1])] * 2


def test_ranks_with_different_timeouts_are_refused() -> None:
    store = dist.HashStore()
    for error in on_threads(2, lambda rank: Replicated(Group(rank, 2, store), timeout=20.0 + rank)):
        assert type(error) is ConfigError
        assert "timeout is 20.0 on rank 0, 21.0 on rank 1" in str(error)


@pytest.mark.parametrize("timeout", [0.0, -1.0, float("inf"), float("nan")])
def test_a_timeout_must_be_a_finite_number_of_seconds_above_0(timeout: float) -> None:
    with pytest.raises(ConfigError, match=r"Replicated\.timeout must be above 0 seconds"):
        Replicated(Group(0, 1, dist.HashStore()), timeout=timeout)


def test_several_engines_of_one_group_do_not_mix_their_messages() -> None:
    store = dist.HashStore()

    def body(rank: int) -> Any:
        group = Group(rank, 2, store)
        first, second = Replicated(group), Replicated(group)
        return [*second.gather_objects(rank), *first.gather_objects(-rank)]

    assert on_threads(2, body) == [[0, 1, 0, -1]] * 2


def test_a_reward_model_that_differs_is_told_how_it_may() -> None:
    def body(engine: Replicated) -> None:
        engine.require_same_arguments("Trainer", {"reward_model": lambda states, actions, rank=engine.rank: rank})

    for error in on_ranks(2, body):
        assert "rank=0) on rank 0, " in str(error)
        assert str(error).endswith("give it settings(), a function that returns what must be equal.")


def holding(parameters: dict[str, Tensor]) -> Any:
    """A policy with these parameters, which does nothing."""
    return SimpleNamespace(get_parameters=lambda: parameters)


def compared(*ranks: dict[str, Tensor]) -> list[Any]:
    """What each rank raises, or None, where the ranks start from these parameters."""
    policies = [holding(parameters) for parameters in ranks]
    return on_ranks(len(ranks), lambda engine: engine.require_equal_weights(policies[engine.rank], None))


def parameters(*, scale: float = 1.0) -> dict[str, Tensor]:
    return {
        "weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True), "bias": torch.tensor([0.5, -0.5]) * scale,
        "empty": torch.zeros(0), "gain": torch.tensor(2.0, dtype=torch.bfloat16),
    }  # fmt: skip


def test_a_rank_with_other_weights_is_refused_and_its_difference_named() -> None:
    assert compared(parameters(), parameters(), parameters()) == [None] * 3
    swapped = parameters() | {"weight": torch.tensor([[2.0, 1.0], [3.0, 4.0]])}
    all_differ = {name: value.detach() + 1 for name, value in parameters().items()} | {"empty": torch.ones(1)}
    fewer = {name: value for name, value in parameters().items() if name != "gain"}
    on_both = r"float32\[2.*\] (\w{16}) on rank 0, float32\[2.*\] (?!\1)\w{16} on rank"
    first_three = r"in weight \([^()]*\), bias \([^()]*\), empty \(.* on rank 0, float32\[1\] 1\.0 on rank 2\)\. Build"
    for others, message in [
        ((parameters(scale=2.0), parameters()), rf"rank 1 differs from rank 0 in bias \({on_both} 1\)\. Build"),
        ((parameters(), swapped), rf"rank 2 differs from rank 0 in weight \({on_both} 2\)\. Build"),
        ((parameters(), all_differ), rf"rank 2 differs from rank 0 {first_three}"),
        ((fewer, parameters()), r"rank 0 in gain \(bfloat16\[\] 2\.0 on rank 0, absent on rank 1\)\. Build"),
    ]:
        for error in compared(parameters(), *others):
            assert type(error) is ConfigError
            assert re.search(message, str(error))


class Layers(torch.nn.Module):
    """Of its tensors, `get_parameters` returns one, under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.BatchNorm1d(2)
        self.head = torch.nn.Linear(2, 1)
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def get_parameters(self) -> dict[str, Tensor]:
        return {"trained": self.head.weight}


def test_frozen_weights_and_persistent_buffers_count_too() -> None:
    of_body = [f"body.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")]
    layers = Layers()
    assert weights_of(layers).keys() == {"trained", "head.bias", *of_body}
    owner = SimpleNamespace(model=layers, get_parameters=layers.get_parameters)  # it is no module, and has one
    assert weights_of(owner).keys() == {"trained", *(f"model.{name}" for name in ("head.bias", *of_body))}
