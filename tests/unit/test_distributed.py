"""Engines: what a single process does, what `Replicated` sends and returns, and that ranks start from equal weights."""

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
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
from tests.support.gloo_threads import Group, groups, on_ranks, on_threads

__all__ = ["groups"]  # a fixture

# One process


def test_a_single_process_gets_back_what_it_passes() -> None:
    engine = OneProcess()
    values = torch.tensor([1.0, 2.0])
    assert isinstance(engine, Engine)
    assert (engine.rank, engine.num_ranks) == (0, 1)
    assert engine.sum(values) is values
    rows, first = engine.gather(values)
    assert rows is values
    assert first == 0
    assert engine.gather_objects("a") == ["a"]
    with engine.waiting(60.0, "nobody waits"):
        engine.agree()
    assert engine.equal_count(3) == 3


def test_a_single_process_holds_all_weights() -> None:
    engine = OneProcess()
    assert not engine.divides_weights
    policy = object()  # nothing of it is used
    engine.divide(policy)
    with engine.whole(policy):
        pass
    rows = torch.arange(6.0).reshape(3, 2)
    assert engine.part(rows) is rows
    assert engine.divided(rows, (6, 2)) is rows
    target = torch.zeros(3, 2)
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


# A process group


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=30))
    yield
    dist.destroy_process_group()


def test_the_error_without_a_process_group_says_how_to_start_one() -> None:
    with pytest.raises(ConfigError, match=r"Replicated needs torch\.distributed: call .*init_process_group\(\) first"):
        Replicated()


@pytest.mark.usefixtures("group_of_one")
def test_a_group_of_one_process_returns_copies() -> None:
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
        assert found.dtype == rows.dtype
        assert first == 0
    assert engine.gather_objects({"a": 1}) == [{"a": 1}]


# Several ranks, as threads


WIDTHS = [
    torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
    torch.tensor([[5.0, 6.0, 7.0]]),
    torch.tensor([[8.0], [9.0], [10.0]]),
]
JOINED = [[1, 2, 0], [3, 4, 0], [5, 6, 7], [8, 0, 0], [9, 0, 0], [10, 0, 0]]


@pytest.mark.usefixtures("groups")
def test_rows_of_all_ranks_are_joined_in_rank_order() -> None:
    """Padded with 0 to the widest; the index is that of the rank's own first row, after 0, 2 and 3 rows of others."""
    for rank, (rows, first) in enumerate(on_ranks(3, lambda engine: engine.gather(WIDTHS[engine.rank]))):
        assert rows.tolist() == JOINED
        assert first == [0, 2, 3][rank]


@pytest.mark.usefixtures("groups")
def test_large_rows_are_joined_like_small_ones() -> None:
    """A rank with more than 64 numbers makes all ranks send tensors."""
    for longest in (64, 65):
        rows = [torch.arange(3.0), torch.arange(longest * 1.0), torch.zeros(0)]
        for found, first in on_ranks(3, lambda engine, rows=rows: engine.gather(rows[engine.rank]))[:2]:
            assert found.tolist() == [*range(3), *range(longest)]
            assert first in (0, 3)


@pytest.mark.usefixtures("groups")
def test_gathered_booleans_stay_booleans(subtests: pytest.Subtests) -> None:
    for width in (1, 70):
        masks = [torch.tensor([[True] * width, [False] * width]), torch.tensor([[True] * width])]
        for rank, (rows, first) in enumerate(
            on_ranks(2, lambda engine, masks=masks: engine.gather(masks[engine.rank]))
        ):
            with subtests.test(width=width, rank=rank):
                assert rows.tolist() == [[True] * width, [False] * width, [True] * width]
                assert rows.dtype == torch.bool
                assert first == 2 * rank


@pytest.mark.usefixtures("groups")
def test_a_rank_without_rows_takes_part_in_gathering() -> None:
    parts = [torch.zeros(0, 1), torch.tensor([[1.0]]), torch.tensor([[2.0]])]
    rows, first = on_ranks(3, lambda engine: engine.gather(parts[engine.rank]))[0]
    assert rows.tolist() == [[1.0], [2.0]]
    assert first == 0


@pytest.mark.usefixtures("groups")
def test_a_sum_is_a_new_tensor_of_the_same_kind(subtests: pytest.Subtests) -> None:
    """Small tensors travel with the first message; 65 numbers need an operation of their own."""
    for values in (
        torch.tensor(1.0),
        torch.ones(2, 3, dtype=torch.float64),
        torch.ones(64),
        torch.ones(65),
        torch.ones(5).int(),
    ):
        own = [values * 10**rank for rank in range(3)]
        for rank, total in enumerate(on_ranks(3, lambda engine, own=own: engine.sum(own[engine.rank]))):
            with subtests.test(values=values, rank=rank):
                assert torch.equal(total, values * 111)
                assert total.dtype == values.dtype
                assert torch.equal(own[rank], values * 10**rank)
                assert total.data_ptr() != own[rank].data_ptr()


@pytest.mark.usefixtures("groups")
def test_a_sum_is_made_in_rank_order_on_every_rank() -> None:
    """1e8 + 1 is 1e8 in float32, so that (1 + 1e8) - 1e8 = 0, and other orders give 1."""
    values = [torch.tensor([1.0]), torch.tensor([1e8]), torch.tensor([-1e8])]
    assert [total.item() for total in on_ranks(3, lambda engine: engine.sum(values[engine.rank]))] == [0.0] * 3


@pytest.mark.usefixtures("groups")
def test_tensors_of_different_kinds_are_refused_on_every_rank(subtests: pytest.Subtests) -> None:
    one, two = torch.ones(1), torch.ones(2)
    cases = [
        (
            "sum",
            one,
            two,
            "sum() needs one shape and dtype on all ranks. rank 0 passed [1] torch.float32, rank 1 passed [2]",
        ),
        ("sum", one, one.double(), "sum() needs one shape and dtype on all ranks."),
        ("gather", one, one.double(), "gather() needs one number of axes and one dtype."),
        ("gather", one, torch.ones(1, 1), "gather() needs one number of axes and one dtype."),
    ]
    for name, first, second, message in cases:
        results = on_ranks(2, lambda engine, name=name, both=(first, second): getattr(engine, name)(both[engine.rank]))
        for error in results:
            with subtests.test(name=name, message=message):
                assert isinstance(error, RankError)
                assert str(error).startswith(message)


@pytest.mark.usefixtures("groups")
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


@pytest.mark.usefixtures("groups")
def test_a_rank_that_waits_for_something_else_may_come_later_than_the_timeout() -> None:
    def body(engine: Replicated) -> list[Any]:
        if engine.rank == 1:
            with engine.waiting(30.0, "the judge is ill"):
                time.sleep(2.0)
        return engine.gather_objects(engine.rank)

    assert on_ranks(2, body, timeout=1.0) == [[0, 1], [0, 1]]


# Gradients of several ranks


@pytest.mark.usefixtures("groups")
def test_gradients_and_a_value_are_added_up_over_all_ranks(subtests: pytest.Subtests) -> None:
    """In two dtypes; float32 could not hold 1 + 1e-12. A gradient that a rank lacks counts as zeros."""

    def body(engine: Replicated) -> tuple[Tensor, list[Tensor | None]]:
        factor = 10**engine.rank
        tensors = [
            torch.zeros(2, 2),
            torch.zeros(2, dtype=torch.float64),  # rank 2 lacks it
            torch.zeros(5),  # no rank has it
            torch.zeros(()),  # rank 1 alone has it
            torch.zeros(70, dtype=torch.float64),
        ]
        tensors[0].grad = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * factor
        if engine.rank < 2:
            tensors[1].grad = torch.tensor([1.0, 1.0 + 1e-12], dtype=torch.float64)
        if engine.rank == 1:
            tensors[3].grad = torch.tensor(-4.0)
        tensors[4].grad = torch.arange(70, dtype=torch.float64) * factor
        total = engine.sum_gradients(tensors, torch.tensor([2.0, 0.5], dtype=torch.float64) * factor)
        return total, [tensor.grad for tensor in tensors]

    expected: list[Tensor | None] = [
        torch.tensor([[111.0, 222.0], [333.0, 444.0]]),
        torch.tensor([2.0, 2.0 + 2e-12], dtype=torch.float64),
        None,
        torch.tensor(-4.0),
        torch.arange(70, dtype=torch.float64) * 111,
    ]
    for rank, (total, gradients) in enumerate(on_ranks(3, body)):
        with subtests.test(rank=rank):
            assert torch.equal(total, torch.tensor([222.0, 55.5], dtype=torch.float64))
            for found, wanted in zip(gradients, expected, strict=True):
                if wanted is None:
                    assert found is None
                else:
                    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
                    assert torch.equal(found, wanted)


@pytest.mark.usefixtures("groups")
def test_gradients_of_different_tensors_are_refused_on_every_rank(subtests: pytest.Subtests) -> None:
    """Another number of tensors, size, order, dtype or shape. The ranks can go on together after the error."""
    one, two = torch.zeros(2), torch.zeros(3)
    for first, second in [
        ([one], [one, two]),
        ([one], [two]),
        ([one, two], [two, one]),
        ([], [one]),
        ([one], [one.double()]),
        ([torch.zeros(2, 3)], [torch.zeros(3, 2)]),
    ]:

        def body(engine: Replicated, both: Any = (first, second)) -> Any:
            with pytest.raises(RankError) as raised, engine.together("an update"):
                engine.sum_gradients(both[engine.rank], torch.tensor(1.0))
            return str(raised.value), engine.gather_objects(engine.rank)

        with subtests.test(first=len(first), second=len(second)):
            error = "Gradients need tensors of the same shapes and dtypes on all ranks. Build equal policies and optimizers."
            assert on_ranks(2, body) == [(error, [0, 1])] * 2


# Errors of one rank


def failing(error: BaseException, meanwhile: Callable[[Replicated], Any], doing: str = "") -> list[Any]:
    """Rank 1 raises `error` in a block, while rank 0 calls `meanwhile`."""

    def body(engine: Replicated) -> None:
        with engine.together(doing):
            if engine.rank == 1:
                raise error
            meanwhile(engine)

    return on_ranks(2, body)


@pytest.mark.usefixtures("groups")
def test_the_error_of_a_rank_is_raised_on_every_rank_whatever_it_does(subtests: pytest.Subtests) -> None:
    for name, meanwhile in {
        "sum": lambda engine: engine.sum(torch.ones(1)),
        "gather": lambda engine: engine.gather(torch.ones(1)),
        "gather_objects": lambda engine: engine.gather_objects("a" * 5_000),
        "agree": lambda engine: engine.agree(),
    }.items():
        with subtests.test(name=name):
            for error in failing(ContractError("it broke"), meanwhile):
                assert type(error) is ContractError
                assert str(error) == "Rank 1: it broke"
    with subtests.test("an error of another package"):
        first, second = failing(ZeroDivisionError("x"), lambda engine: engine.agree())
        assert str(first) == str(second) == "Rank 1 raised ZeroDivisionError: x"
        assert isinstance(second.__cause__, ZeroDivisionError)
    with subtests.test("an interrupt"):
        assert [error.signal_number for error in failing(TrainingInterrupted(15), lambda engine: engine.agree())] == [
            15,
            15,
        ]


@pytest.mark.usefixtures("groups")
def test_a_rank_that_goes_on_alone_is_never_paired_with_another_operation(subtests: pytest.Subtests) -> None:
    """Both ranks gather objects, but rank 1 has caught an error and is in its next iteration."""

    def body(engine: Replicated) -> Any:
        with engine.together(f"update in iteration {6 + engine.rank}"):
            return engine.gather_objects(None)

    def other(engine: Replicated) -> Any:
        return engine.agree() if engine.rank else engine.gather_objects(None)

    for error in on_ranks(2, body):
        with subtests.test("another iteration"):
            assert isinstance(error, RankError)
            assert str(error).startswith(
                "All ranks must make the same calls in the same order; rank 0 is at gather_objects() in "
            )
            assert " (update in iteration 6), rank 1 is at gather_objects() in " in str(error)
            assert " (update in iteration 7). If an error was caught" in str(error)
    for error in on_ranks(2, other):
        with subtests.test("another operation"):
            assert isinstance(error, RankError)
            assert ", rank 1 is at agree()." in str(error)


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


def test_an_error_is_shared_once_by_nested_blocks() -> None:
    own = ZeroDivisionError("x")
    engine = Counting(RankError("y"))
    with pytest.raises(RankError, match="y"), engine.together(), engine.together(), engine.together():
        raise own
    assert engine.shared == [own]


def test_a_block_that_ends_well_exchanges_nothing_and_a_foreign_interrupt_passes() -> None:
    engine = Counting(RankError("y"))
    with engine.together():
        pass
    with pytest.raises(KeyboardInterrupt), engine.together():
        raise KeyboardInterrupt
    assert engine.shared == []
    with pytest.raises(RankError), engine.together():
        raise TrainingInterrupted(2)
    assert len(engine.shared) == 1


def test_a_single_process_raises_its_error_as_it_is() -> None:
    own = ZeroDivisionError("x")
    with pytest.raises(ZeroDivisionError) as raised, OneProcess().together(), OneProcess().together("a step"):
        raise own
    assert raised.value is own
    OneProcess().agree()
    with pytest.raises(ZeroDivisionError):
        OneProcess().agree(own)


# Equal arguments


@pytest.mark.usefixtures("groups")
def test_values_that_differ_between_ranks_are_refused_and_named_on_every_rank() -> None:
    def body(engine: Replicated) -> None:
        values = {"lr": 0.1 * (1 + engine.rank), "same": "a", **({"extra": None} if engine.rank == 1 else {})}
        engine.require_same("Trainer", values)

    for error in on_ranks(2, body):
        assert type(error) is ConfigError
        assert str(error) == (
            "Trainer needs the same arguments on all ranks; lr is 0.1 on rank 0, 0.2 on rank 1; "
            "extra is absent on rank 0, None on rank 1. Pass the same values."
        )


@pytest.mark.usefixtures("groups")
def test_equal_values_are_accepted() -> None:
    same = on_ranks(2, lambda engine: engine.require_same("x", {"a": float("nan"), "b": [1]}))
    assert same == [None, None]


@pytest.mark.usefixtures("groups")
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


@pytest.mark.usefixtures("groups")
def test_only_the_first_values_that_differ_are_named() -> None:
    for error in on_ranks(2, lambda engine: engine.require_same("x", {str(n): engine.rank for n in range(9)})):
        assert "4 is 0 on rank 0, 1 on rank 1; and 4 more. Pass" in str(error)


def test_a_single_process_does_not_compare_values() -> None:
    class Deaf(OneProcess):
        def gather_objects(self, value: Any) -> list[Any]:
            raise AssertionError("there is no other rank")

    Deaf().require_same("x", {"a": 1})
    Deaf().require_same_soon({"a": 1})


@pytest.mark.usefixtures("groups")
def test_ranks_with_different_timeouts_are_refused() -> None:
    store = dist.HashStore()
    for error in on_threads(2, lambda rank: Replicated(Group(rank, 2, store), timeout=20.0 + rank)):
        assert type(error) is ConfigError
        assert "timeout is 20.0 on rank 0, 21.0 on rank 1" in str(error)


@pytest.mark.usefixtures("groups")
def test_a_timeout_must_be_a_finite_number_of_seconds_above_0(subtests: pytest.Subtests) -> None:
    for timeout in (0.0, -1.0, float("inf"), float("nan")):
        with (
            subtests.test(timeout=timeout),
            pytest.raises(ConfigError, match=r"Replicated\.timeout must be above 0 seconds"),
        ):
            Replicated(Group(0, 1, dist.HashStore()), timeout=timeout)


@pytest.mark.usefixtures("groups")
def test_several_engines_of_one_group_do_not_mix_their_messages() -> None:
    store = dist.HashStore()

    def body(rank: int) -> Any:
        group = Group(rank, 2, store)
        first, second = Replicated(group), Replicated(group)
        return [*second.gather_objects(rank), *first.gather_objects(-rank)]

    assert on_threads(2, body) == [[0, 1, 0, -1]] * 2


@pytest.mark.usefixtures("groups")
def test_a_reward_model_that_differs_is_told_how_it_may() -> None:
    def body(engine: Replicated) -> None:
        engine.require_same_arguments("Trainer", {"reward_model": lambda states, actions, rank=engine.rank: rank})

    for error in on_ranks(2, body):
        assert "rank=0) on rank 0, " in str(error)
        assert str(error).endswith("give it settings(), a function that returns what must be equal.")


# Equal weights


class Holding:
    """A policy with these parameters, which does nothing."""

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        self._parameters = parameters

    def get_parameters(self) -> dict[str, Tensor]:
        return self._parameters


class Ranks(SeveralProcesses):
    """Three ranks; the others start from these parameters."""

    num_ranks = 3

    def __init__(self, *others: dict[str, Tensor]) -> None:
        self.others = others

    def gather_objects(self, value: Any) -> list[Any]:
        sent: list[Any] = []

        class Listening(SeveralProcesses):
            num_ranks = 2

            def gather_objects(self, value: Any) -> list[Any]:
                sent.append(value)
                return [value]

        for parameters in self.others:
            Listening().require_equal_weights(Holding(parameters), None)
        return [value, *sent]


def parameters(*, scale: float = 1.0) -> dict[str, Tensor]:
    return {
        "weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True),
        "bias": torch.tensor([0.5, -0.5]) * scale,
        "empty": torch.zeros(0),
        "gain": torch.tensor(2.0, dtype=torch.bfloat16),
    }


def test_a_rank_with_other_weights_is_refused_and_its_difference_named(subtests: pytest.Subtests) -> None:
    Ranks(parameters(), parameters()).require_equal_weights(Holding(parameters()), None)  # equal weights are accepted
    swapped = parameters() | {"weight": torch.tensor([[2.0, 1.0], [3.0, 4.0]])}
    all_differ = {name: value.detach() + 1 for name, value in parameters().items()} | {"empty": torch.ones(1)}
    fewer = {name: value for name, value in parameters().items() if name != "gain"}
    for others, message in [
        ((parameters(scale=2.0), parameters()), r"rank 1 differs from rank 0 in bias\. Build"),
        ((parameters(), swapped), r"rank 2 differs from rank 0 in weight\. Build"),
        ((parameters(), all_differ), r"rank 2 differs from rank 0 in weight, bias, empty\. Build"),  # the first three
        ((fewer, parameters()), r"rank 1 differs from rank 0 in gain\. Build"),
    ]:
        with subtests.test(message=message), pytest.raises(ConfigError, match=message):
            Ranks(*others).require_equal_weights(Holding(parameters()), None)


class Layers(torch.nn.Module):
    """Of its tensors, `get_parameters` returns one, under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torch.nn.BatchNorm1d(2)
        self.head = torch.nn.Linear(2, 1)
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def get_parameters(self) -> dict[str, Tensor]:
        return {"trained": self.head.weight}


class Owner:
    """A policy that is no module and has one."""

    def __init__(self) -> None:
        self.model = Layers()

    def get_parameters(self) -> dict[str, Tensor]:
        return self.model.get_parameters()


def test_frozen_weights_and_persistent_buffers_count_too() -> None:
    of_body = [f"body.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")]
    assert weights_of(Layers()).keys() == {"trained", "head.bias", *of_body}
    assert weights_of(Owner()).keys() == {"trained", *(f"model.{name}" for name in ("head.bias", *of_body))}


def test_a_single_process_does_not_compare_weights() -> None:
    class Deaf(OneProcess):
        def gather_objects(self, value: Any) -> list[Any]:
            raise AssertionError("there is no other rank")

    Deaf().require_equal_weights(Holding(parameters()), None)
