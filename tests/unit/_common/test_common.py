"""User inputs: accepted, converted and refused values, settings by their dotted names, and random generators."""

import dataclasses
import decimal
import math
import random
import re
import sys
from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo import (
    ConfigError,
    ExperienceBatch,
    GRPOConfig,
    KLControl,
    ObjectiveConfig,
    Truncate,
    preserved_random_state,
    seed_everything,
    with_settings,
)
from grpo._common.global_state import capture_random_state, restore_random_state
from grpo.arguments import (
    Settings,
    as_advantages,
    as_log_probs,
    as_mask,
    as_rewards,
    as_state_keys,
    describe,
    pad_steps,
    require_lengths,
    setting,
)
from grpo.errors import ContractError, RewardError
from grpo.surrogates import Cispo, Clip, Steps
from tests.support.objective_inputs import as_users_run_it

# container -> the dtype it arrives in. Nothing loses a digit: integers and Python numbers are float64.
KINDS = {
    "list of float": (lambda values: [[float(v) for v in row] for row in values], torch.float64),
    "list of int": (lambda values: values, torch.float64),
    "list of bool": (lambda values: [[bool(v) for v in row] for row in values], torch.float64),
    "tuple": (lambda values: tuple(tuple(row) for row in values), torch.float64),
    "list of numpy scalars": (lambda values: [[np.float64(v) for v in row] for row in values], torch.float64),
    **{
        f"ndarray {dtype.__name__}": (lambda values, d=dtype: np.array(values, dtype=d), expected)
        for dtype, expected in [
            (np.float16, torch.float32), (np.float32, torch.float32), (np.float64, torch.float64),
            (np.bool_, torch.float64), (np.uint8, torch.float64), (np.int32, torch.float64), (np.int64, torch.float64),
        ]
    },
    **{
        f"tensor {dtype}": (lambda values, d=dtype: torch.tensor(values, dtype=d), expected)
        for dtype, expected in [
            (torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float32, torch.float32),
            (torch.float64, torch.float64), (torch.bool, torch.float64), (torch.uint8, torch.float64),
            (torch.int32, torch.float64), (torch.int64, torch.float64),
        ]
    },
}  # fmt: skip
ZEROS_AND_ONES = st.integers(0, 1)  # the same in every dtype


@st.composite
def tables(draw: st.DrawFn) -> list[list[int]]:
    width = draw(st.integers(2, 4))
    return draw(st.lists(st.lists(ZEROS_AND_ONES, min_size=width, max_size=width), min_size=1, max_size=6))


@settings(max_examples=100)
@given(kind=st.sampled_from(sorted(KINDS)), table=tables())
def test_rewards_may_be_one_number_per_row_or_per_step(kind, table):
    make, dtype = KINDS[kind]
    first_column = make(table)[:, 0] if hasattr(make(table), "dtype") else [row[0] for row in make(table)]
    for value, expected in [(first_column, [row[0] for row in table]), (make(table), table)]:
        rewards = as_rewards("judge", value, len(table))
        assert (rewards.dtype, rewards.device.type, rewards.tolist()) == (dtype, "cpu", expected)


@settings(max_examples=100)
@given(kind=st.sampled_from(sorted(KINDS)), table=tables(), case=st.sampled_from(["N 1", "N+1", "0-d", "N T 1", "1 N"]))
def test_rewards_of_another_shape_are_refused(kind, table, case):
    make, _ = KINDS[kind]
    value = {
        "N 1": lambda: make([row[:1] for row in table]),
        "N+1": lambda: make([*table, table[0]]),
        "0-d": lambda: make(table)[0][0],
        "N T 1": lambda: make(table)[:, :, None] if hasattr(make(table), "dtype") else [[[v] for v in r] for r in table],
        "1 N": lambda: make([[row[0] for row in table] * 2]),
    }[case]()  # fmt: skip
    count = 3 if case == "1 N" else len(table)
    with pytest.raises(RewardError, match=rf"^judge must return one number per row, \[N\] = \[{count}\]"):
        as_rewards("judge", value, count)


NOT_NUMBERS = [
    None, "ab", b"ab", ["a", "b"], ["1", "2"], [1.0, None], [None, None], 1j, [1j, 2.0], np.array([1j, 2]),
    torch.tensor([1j, 2]), object(), [object(), object()], {"a": 1, "b": 2}, {1.0, 2.0}, (n for n in (1, 2)), [[1.0], [1, 2]],
    [decimal.Decimal(1), decimal.Decimal(2)], np.array(["2020", "2021"], dtype="datetime64"), [{}, {}], [2**70, 1], lambda: 1,
    [torch.tensor([1.0]), torch.tensor([1.0, 2.0])], [torch.tensor(1j), torch.tensor(2j)], [], 5, 5.0,
]  # fmt: skip


@pytest.mark.parametrize("value", NOT_NUMBERS)
def test_rewards_that_are_no_numbers_are_refused_with_the_owners_name(value):
    with pytest.raises(RewardError, match=r"^judge must return one number per row, \[N\] = \[2\].*; got "):
        as_rewards("judge", value, 2)


def test_the_error_names_the_cause_and_suggests_removing_a_last_axis_of_1():
    with pytest.raises(RewardError, match=r"got \[3, 1\] float32\. Squeeze the last axis"):
        as_rewards("judge", torch.zeros(3, 1), 3)
    with pytest.raises(RewardError) as caught:
        as_rewards("judge", ["good", "bad"], 2)
    assert isinstance(caught.value.__cause__, TypeError)


def test_lists_of_tensors_large_numbers_and_read_only_arrays_keep_their_values():
    read_only = np.arange(3.0)
    read_only.flags.writeable = False
    for value, expected in [
        ([torch.tensor(1.0), torch.tensor(2.0)], [1, 2]),
        ([torch.zeros(3), torch.ones(3)], [[0, 0, 0], [1, 1, 1]]),
        ([0.1, 1e8 + 1], [0.1, 1e8 + 1]),
        (torch.tensor([2**53 - 1, 1]), [2**53 - 1, 1]),
        (read_only[::-1], [2, 1, 0]),
    ]:
        assert as_rewards("judge", value, len(value)).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_one_log_prob_per_row_is_one_step_in_float32_or_better_with_its_gradient(dtype):
    log_probs = torch.tensor([-0.5, -2.0], dtype=dtype, requires_grad=True)
    lifted = as_log_probs("Policy.score", log_probs, 2)
    assert (lifted.dtype, lifted.tolist()) == (torch.promote_types(dtype, torch.float32), [[-0.5], [-2.0]])
    lifted.sum().backward()
    assert log_probs.grad.tolist() == [1, 1]


@pytest.mark.parametrize("value", [
    None, [-1.0, -2.0], np.zeros(2), *(torch.zeros(shape) for shape in [(), 3, (1, 2), (2, 1, 3)]),
    *(torch.zeros(2, dtype=dtype) for dtype in (torch.int64, torch.bool, torch.complex64)),
])  # fmt: skip
def test_log_probs_of_another_shape_or_type_are_refused(value):
    floating = ", floating-point" if isinstance(value, torch.Tensor) and value.shape == (2,) else ""
    with pytest.raises(ContractError, match=rf"^Policy\.score must return \[N\] = \[2\] or \[N, T\]{floating}; got "):
        as_log_probs("Policy.score", value, 2)


def test_rewards_in_the_reward_models_own_memory_are_copied():
    for dtype in (torch.float32, torch.float64, torch.int64):
        memory = torch.tensor([1, 0, 2], dtype=dtype)
        for value in (memory, memory.numpy()):
            rewards = as_rewards("judge", value, 3)
            memory.zero_()
            assert rewards.tolist() == [1, 0, 2]
            memory.copy_(rewards)


def test_a_column_is_accepted_as_one_step_if_allowed():
    assert as_rewards("judge", [[5.0]], 1, one_step_is_a_step=True).tolist() == [[5]]


STEPS = torch.tensor([[True, True], [True, False], [False, False]])


def test_advantages_per_row_or_per_step_are_detached_and_zero_outside_the_mask():
    per_row = as_advantages(torch.tensor([1.0, -2.0, 0.5], dtype=torch.bfloat16, requires_grad=True), STEPS)
    assert (per_row.tolist(), per_row.dtype, per_row.requires_grad) == ([1, -2, 0.5], torch.float32, False)
    nan = float("nan")
    per_step = as_advantages(torch.tensor([[1.0, 2.0], [3.0, nan], [nan, nan]], dtype=torch.float64), STEPS)
    assert (per_step.tolist(), per_step.dtype) == ([[1, 2], [3, 0], [0, 0]], torch.float64)
    huge = torch.full((3,), 3e38)  # the sum is more than float32 holds
    assert as_advantages(huge, STEPS).tolist() == huge.tolist()


@pytest.mark.parametrize(
    ("value", "got"),
    [
        (torch.ones(2), r"got \[2\] float32"), (torch.ones(3, 1), r"got \[3, 1\] float32"),
        (torch.ones(2, 3), r"got \[2, 3\] float32"), (torch.ones(3, 2, 1), r"got \[3, 2, 1\] float32"),
        (torch.tensor(1.0), r"got \[\] float32"), ([1.0] * 3, "got a list of 3"),
        (np.ones(3), r"got a numpy array \[3\] float64"),
        (None, "got NoneType"), (torch.tensor([1.0, math.nan, 1.0]), "got NaN or infinity"),
        (torch.tensor([[1.0, -math.inf], [0.0, 0.0], [0.0, 0.0]]), "got NaN or infinity"),
    ],
)  # fmt: skip
def test_advantages_that_are_not_one_number_per_row_or_step_are_refused(value, got):
    message = rf"^advantages must be a tensor \[N\] = \[3\] or \[N, T\] = \[3, 2\], finite; {got}"
    with as_users_run_it(), pytest.raises(ContractError, match=message):
        as_advantages(value, STEPS)


def test_masks_and_state_keys_become_tensors_with_one_entry_per_step():
    assert as_mask("batch", None, (2, 3)).tolist() == [[True] * 3] * 2
    assert as_mask("batch", [[True, False]], (1, 5)).tolist() == [[True, False]]
    assert as_state_keys("batch", [[3, 4]]).tolist() == [[3, 4]]


@pytest.mark.parametrize(
    ("value", "got"), [([0, 1], r"\[2\] int64"), ([[0.5]], r"\[1, 1\] float64"), ([[[0]]], r"\[1, 1, 1\] int64")]
)
def test_state_keys_of_another_shape_or_dtype_are_refused(value, got):
    with pytest.raises(ContractError, match=rf"^batch: state_keys must be integers \[N, T\], like mask; got {got}"):
        as_state_keys("batch", value)
    mask = torch.ones(1, 1, dtype=torch.bool)
    with pytest.raises(ContractError, match=r"^ExperienceBatch\.from_rows: state_keys must be integers"):
        ExperienceBatch.from_rows([0], ["x"], [1.0], [0], mask=mask, state_keys=value)


def test_a_field_of_a_wrong_length_is_refused_by_name():
    require_lengths("collect", 2, states=["a", "b"], actions=torch.zeros(2, 5))
    with pytest.raises(ContractError, match="collect: actions must have one entry per row = 2; got a list of 3"):
        require_lengths("collect", 2, states=["a", "b"], actions=[1, 2, 3])
    with pytest.raises(ContractError, match=r"collect: states .*; got int 5"):
        require_lengths("collect", 2, states=5)


@pytest.mark.parametrize(("value", "words"), [
    (torch.zeros(8, 1, 3), "[8, 1, 3] float32"), (np.zeros((2, 3)), "a numpy array [2, 3] float64"),
    ([1, 2], "a list of 2 int"), (["a", 2], "a list of 2"), ((), "a tuple of 0"), (None, "NoneType None"),
    ("x" * 500, "str '" + "x" * 115),
])  # fmt: skip
def test_errors_describe_values_by_shape_type_and_length(value, words):
    assert describe(value) == words


def test_padding_is_added_on_the_right_and_copies_nothing_if_not_needed():
    values = torch.tensor([[1.0, 2.0]])
    assert pad_steps(values, 4, -1.0).tolist() == [[1, 2, -1, -1]]
    assert pad_steps(values, 2, -1.0) is values
    assert pad_steps(torch.tensor([[True]]), 3, False).tolist() == [[True, False, False]]


def drawn() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]  # noqa: NPY002


@pytest.fixture
def generators():
    """The global generators are put back after a test that seeds them."""
    with as_users_run_it(), preserved_random_state():
        yield


@pytest.mark.usefixtures("generators")
@pytest.mark.parametrize("seed", [0, 7, 2**40 + 7])
def test_a_seed_fixes_all_three_generators(seed):
    seed_everything(seed)
    first = drawn()
    assert drawn() != first
    seed_everything(seed)
    assert drawn() == first
    seed_everything(seed + 1)
    assert not set(drawn()) & set(first)


@pytest.mark.usefixtures("generators")
def test_a_captured_state_is_restored():
    state, first = capture_random_state(), [drawn(), drawn()]
    restore_random_state(state)
    assert [drawn(), drawn()] == first


@pytest.mark.usefixtures("generators")
def test_an_error_in_a_preserving_block_does_not_change_later_random_numbers():
    seed_everything(3)
    expected = drawn()
    seed_everything(3)
    with pytest.raises(ZeroDivisionError), preserved_random_state():
        _ = drawn()[0] / 0
    assert drawn() == expected


def test_settings_are_changed_by_their_dotted_names() -> None:
    config = GRPOConfig(seed=3, objective=ObjectiveConfig(kl_coef=0.1))
    changed = with_settings(config, {"objective.surrogate.high": 0.28, "group_size": 4, "advantage.scale": "batch"})
    assert changed == GRPOConfig(
        seed=3, group_size=4, objective=ObjectiveConfig(kl_coef=0.1, surrogate=Clip(high=0.28)),
        advantage=with_settings(config.advantage, {"scale": "batch"}),
    )  # fmt: skip
    assert config == GRPOConfig(seed=3, objective=ObjectiveConfig(kl_coef=0.1))
    assert with_settings(config, {}) is config


def test_a_part_is_replaced_before_its_settings_are_changed_and_settings_change_together() -> None:
    changes = {"objective.surrogate.high": 5.0, "objective.surrogate": "cispo"}
    assert with_settings(GRPOConfig(), changes).objective.surrogate == Cispo(high=5.0)
    changes = {"objective.aggregation": "fixed_length", "objective.fixed_length": 10}  # each needs the other one
    assert with_settings(GRPOConfig(), changes).objective.fixed_length == 10


def test_a_dict_changes_a_part_and_a_kind_replaces_it() -> None:
    objective = {"kl_coef": 0.5, "surrogate": {"low": 0.1}, "sampler_correction": {"kind": "truncate", "high": 2.0}}
    config = GRPOConfig(objective=ObjectiveConfig(surrogate=Clip(high=0.3), entropy_coef=0.2))
    assert with_settings(config, {"objective": objective}).objective == ObjectiveConfig(
        kl_coef=0.5, entropy_coef=0.2, surrogate=Clip(low=0.1, high=0.3), sampler_correction=Truncate(high=2.0)
    )
    replaced = with_settings(config, {"objective.surrogate": {"kind": "clip", "low": 0.1}})
    assert replaced.objective.surrogate == Clip(low=0.1)


def test_settings_that_are_off_begin_with_their_defaults() -> None:
    assert with_settings(GRPOConfig(), {"kl_control.target": 0.02}).kl_control == KLControl(target=0.02)
    assert with_settings(GRPOConfig(), {"kl_control": {"gain": 0.5}}).kl_control == KLControl(gain=0.5)
    on = GRPOConfig(kl_control=KLControl(gain=0.3))
    assert with_settings(on, {"kl_control.target": 0.02}).kl_control == KLControl(gain=0.3, target=0.02)
    assert with_settings(on, {"kl_control": None}).kl_control is None


def test_a_callable_of_the_users_own_is_kept() -> None:
    def own(steps: Steps) -> object:
        return steps.advantages

    config = GRPOConfig(objective=ObjectiveConfig(surrogate=own))  # type: ignore[arg-type]
    assert with_settings(config, {"objective.kl_coef": 0.1}).objective.surrogate is own
    with pytest.raises(ConfigError, match=r"no setting 'objective.surrogate.high'"):
        with_settings(config, {"objective.surrogate.high": 0.1})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(
            ({name: 1}, f"GRPOConfig has no setting {name!r}. {nearest}")
            for name, nearest in {
                "objective.surogate.high": "Did you mean 'objective.surrogate.high'?",
                "groupsize": "Did you mean 'group_size'?",
                "high": "Did you mean 'objective.surrogate.high'?",
                "sampler_correction": "Did you mean 'objective.sampler_correction'?",
                "kl_control.targt": "Did you mean 'kl_control.target'?",
                "group_size.x": "Did you mean 'group_size'?",
                "objective.sampler_correction.high": "Did you mean ",
                "q": "There are group_size, ",
            }.items()
        ),
        ({"objective": {"klcoef": 1}}, "ObjectiveConfig has no setting 'klcoef'. Did you mean 'kl_coef'?"),
        ({"group_size": 0}, "GRPOConfig.group_size must be >= 1; got 0"),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_one_and_values_are_checked(changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        with_settings(GRPOConfig(), changes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inner(Settings):
    """A part of `Outer`."""

    depth: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outer(Settings):
    """One field of every kind."""

    count: int = setting(3, at_least=1, at_most=9)
    rate: float = setting(0.5, above=0.0, below=1.0)
    limit: float | None = setting(None, at_least=0.0)
    mode: Literal["slow", "fast"] = "slow"
    choice: Literal["a", "b"] | None = None
    name: str | None = None
    words: tuple[str, ...] = ()
    inner: Inner = Inner()


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [  # numbers, choices and parts: test_config.py, for each field
        ("count", 10, "<= 9"),
        ("rate", 1.0, "< 1"),
        ("limit", -math.inf, "None"),
        ("limit", 10**400, ""),  # too large for a float
        ("mode", 0, "'slow', 'fast'"),
        ("choice", "c", "'a', 'b' or None"),
        ("name", 5, "str or None"),
        *(("words", words, "a tuple of str") for words in ["ab", ["a"], ("a", 1)]),
    ],
)
def test_invalid_values_are_refused_by_field(field, value, says):
    with pytest.raises(ConfigError, match=rf"Outer\.{field} must be .*{says}.*; got {re.escape(repr(value))[:100]}"):
        Outer(**{field: value})
    assert Outer(limit=sys.float_info.max).limit == sys.float_info.max


def test_dicts_have_plain_values_at_every_level_and_defaults_are_filled_in():
    assert Outer(limit=2.0).to_dict() == {
        "count": 3, "rate": 0.5, "limit": 2.0, "mode": "slow", "choice": None, "name": None, "words": (),
        "inner": {"depth": 1},
    }  # fmt: skip
    assert Outer.from_dict({"count": 4, "inner": {"depth": 6}}) == Outer(count=4, inner=Inner(depth=6))
    assert Outer.from_dict({"inner": Inner(depth=6)}) == Outer(inner=Inner(depth=6))
    assert Outer.from_dict({"words": ["a", "b"]}) == Outer(words=("a", "b"))  # JSON has lists only
    assert Outer.from_dict({}) == Outer()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"cuont": 4}, r"Outer has no setting 'cuont'. Did you mean Outer\(count=...\)\?"),
        ({"inner": {"dpeth": 4}}, r"Inner has no setting 'dpeth'. Did you mean Inner\(depth=...\)\?"),
        ({"inner": {"depth": "4"}}, r"Inner\.depth must be int"),
        ({"count": 0}, r"Outer\.count must be >= 1"),
        ({"name": {"depth": 1}}, r"Outer\.name must be str or None"),
    ],
)
def test_from_dict_refuses_unknown_keys(values, says):
    with pytest.raises(ConfigError, match=says):
        Outer.from_dict(values)
