"""Bad input and arguments are answered with a typed error that names what was required and what came.

The whole run, with 20,000 inputs: `tests/faults/test_failures.py`.
"""

import math
import re
from collections import deque
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from grpo import GRPOTrainer, Rewards, arguments, group_relative_advantages, group_relative_returns
from grpo.advantage_estimator import decoupled_advantages, generalized_advantages
from grpo.arguments import is_finite, require_each, require_instances, require_integers, require_numbers, require_widths
from grpo.config import AdvantageConfig, GRPOConfig, ObjectiveConfig
from grpo.errors import ConfigError, ContractError, GRPOError, ProtocolError, RewardError
from grpo.evaluation import measure_policy
from grpo.types import ExperienceBatch
from tests.support import bad_input_places
from tests.support.bad_input_places import Plain, Scoring, good_batch, good_rows, rewards_of, trainer_of
from tests.support.bad_inputs import KINDS, Frame, Series, counted, table
from tests.support.policies import TablePolicy

pytestmark = pytest.mark.usefixtures("without_type_checks")

NAN, INF = math.nan, math.inf


def test_generated_inputs_give_typed_errors_or_finite_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(KINDS) >= 60
    every = bad_input_places.places()
    free = {place.entry for place in every if place.is_free}  # their untyped errors are only counted, in tests/faults
    found = counted(every, 600, seed=int(np.random.default_rng(7).integers(2**31)))
    wrong = {
        name: [
            line
            for entry, one in found.items()
            for line in one.examples[name]
            if name != "untyped" or entry not in free
        ]
        for name in ("untyped", "silent NaN", "hang")
    }
    assert not any(wrong.values()), f"{table(found)}\n{wrong}"


def built(**given: Any) -> GRPOTrainer:
    return GRPOTrainer(**{"config": GRPOConfig(), "policy": TablePolicy(), "reward_model": rewards_of, **given})


def updated(**changes: Any) -> None:
    trainer_of(Scoring()).update(ExperienceBatch(**good_batch(**changes)))


def from_rows(**changes: Any) -> ExperienceBatch:
    rows = {"states": [0] * 4, "actions": [0] * 4, "rewards": [0.0, 1, 0, 1], "group_ids": [0, 0, 1, 1]}
    return ExperienceBatch.from_rows(**{**rows, **changes})


MASKED = np.ma.masked_array([1.0, 2.0, 3.0, 4.0], mask=[False, True, False, False])  # torch and numpy drop the mask
BIG, MANY = 2**70, rf"num_actions_per_state must be >= 1; got {2**70}"
SIZES = ("group_size", "num_states_per_iteration", "batch_size", "replay_iterations")
NO_IDS = [
    *([0.0, 0.0, 1.0, 1.0], torch.tensor([0.5, 0.5, 1, 1]), np.zeros(4), ["a", 0.0, "a", 0.0]),
    *([None, "a", "a", "a"], [{"a"}, {"a"}, {"b"}, {"b"}], [1j] * 4),
]


@pytest.mark.parametrize(("call", "error", "message"), [
    *((partial(built, config=value), ConfigError, "^config must ") for value in (None, {"group_size": 4})),
    *((partial(built, objective=value), ConfigError, "^objective must ") for value in (0, "")),
    *((partial(built, advantages=value), ConfigError, "^advantages must ") for value in ([], AdvantageConfig)),
    *((partial(built, engine=value), ProtocolError, "^engine must ") for value in ("", 0)),
    (partial(built, optimizer=0), ProtocolError, "^optimizer must "),
    (partial(built, optimizer=Mock(spec=["step", "state_dict", "load_state_dict"])), ConfigError, "must have param_groups"),
    (partial(built, lr_scheduler=[]), ProtocolError, "^lr_scheduler must "),
    *((lambda device=device: built(config=GRPOConfig(device=device)), ConfigError,
       rf"config\.device must be a device of this computer; got '{device}'")
      for device in ("mps", "x", "cuda:99", "cpu:x", *["cuda"] * (not torch.cuda.is_available()))),
    *((partial(GRPOConfig, **{name: BIG}), ConfigError, rf"GRPOConfig\.{name} must be below 2\*\*63; got {BIG}")
      for name in SIZES),
    (lambda: built().evaluate(["a"], num_actions_per_state=BIG), ConfigError, rf"{MANY}\. Pass an int"),
    (lambda: measure_policy(TablePolicy(), ["a"], rewards_of, num_actions_per_state=BIG), ConfigError, MANY),
    *((lambda wrong=wrong: trainer_of(Scoring()).update(wrong), ContractError, "update needs an ExperienceBatch")
      for wrong in (None, [], {}, "abc", good_batch())),
    (partial(updated, states=["a"]), ContractError, "states must have one entry per row = 8"),
    (partial(updated, rewards=torch.full((8,), NAN)), RewardError, "rewards must be finite"),
    (partial(updated, reward_components={"one": torch.full((8,), INF)}), RewardError,
     r"reward_components\['one'\] must be finite, or NaN where"),
    *((lambda n=n: trainer_of().train(["a"], num_iterations=n, progress=False), ConfigError, "num_iterations must be >= 1")
      for n in (0, 1.5, "3", True, [2])),
    *((lambda path=path, name=name: getattr(trainer_of(), name)(path), GRPOError, "path must be a str or a Path")
      for path in (3, b"abc", None, "a\0b", ["a"]) for name in ("save_checkpoint", "load_checkpoint")),
    *((partial(from_rows, group_ids=ids), ContractError, r"group_ids must be \[N\], one integer or text per row")
      for ids in NO_IDS),
    *((partial(group_relative_advantages, torch.arange(4.0), ids), ContractError, "group_ids must be") for ids in NO_IDS),
    *((partial(from_rows, **{name: MASKED}), (ContractError, RewardError), name)
      for name in ("states", "actions", "rewards", "group_ids")),
    (lambda: arguments.as_rewards("reward", MASKED, 4), RewardError,
     r"reward must return .*; got a numpy array \[4\] float64"),
    (lambda: decoupled_advantages({"a": torch.tensor([1.0, INF, 3.0])}, {}, torch.tensor([0, 0, 0])), RewardError,
     r"components\['a'\] must be finite"),
])  # fmt: skip
def test_what_is_refused_says_what_was_required(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


def test_what_is_nearly_refused_is_accepted() -> None:
    assert arguments.as_rewards("reward", np.ma.masked_array([1.0, 2.0]), 2).tolist() == [1, 2]  # nothing is masked
    parts = {"a": torch.tensor([1.0, NAN, 3.0])}  # NaN: it does not apply
    assert decoupled_advantages(parts, {}, torch.tensor([0, 0, 0]))[1] == 0


def test_a_scheduler_of_another_optimizer_is_refused() -> None:
    policy = TablePolicy()
    optimizer, other = (torch.optim.SGD([policy.logits], lr=0.1) for _ in range(2))
    for mine in (optimizer, None):
        with pytest.raises(ConfigError, match="lr_scheduler was built from another optimizer"):
            built(policy=policy, optimizer=mine, lr_scheduler=StepLR(other, 1))
    built(policy=policy, optimizer=optimizer, lr_scheduler=StepLR(optimizer, 1))
    built(policy=policy, lr_scheduler=partial(StepLR, step_size=1))


@pytest.mark.parametrize("part", [False, True])
def test_no_gradient_flows_through_rewards(part: bool) -> None:
    """A reward that keeps its gradient on purpose is refused, because the loss would not follow it."""
    worth = torch.nn.Parameter(torch.tensor([0.0, 1.0]))

    def with_gradient(states: Any, actions: Any) -> Any:
        with torch.enable_grad():
            return Rewards(values=worth * 2, components={"part": worth * 2}) if part else worth * 2

    trainer = built(config=GRPOConfig(group_size=2), reward_model=with_gradient)
    for use in (trainer.step, trainer.evaluate):
        with pytest.raises(RewardError, match=r"without a gradient.*Return rewards\.detach"):
            use(["a"])
    with pytest.raises(RewardError, match="without a gradient"):
        ExperienceBatch.from_rows(["a", "a"], [0, 1], worth * 2, torch.tensor([0, 0]))


@pytest.mark.parametrize(
    "value", [None, [], [torch.zeros(2)], {"w": None}, {0: torch.zeros(1)}, {"w": torch.zeros(2, device="meta")}]
)
def test_parameters_that_are_no_tensors_by_name_are_refused(value: Any) -> None:
    with pytest.raises(ContractError, match=r"^Plain\.get_parameters must return a dict of dense tensors by name"):
        trainer_of(Plain(get_parameters=value))
    policy = Plain(get_parameters={})  # no parameters are legal
    policy.logits.requires_grad_(False)
    trainer_of(policy).step(["a"])


@pytest.mark.parametrize("states", [
    *("abc", {"a": 1}, {"a"}, None, 3, 2.5, iter("ab"), (s for s in "ab")),
    *(Frame(), Series([1.0, 2.0]), np.array(1.0), torch.tensor(1.0), torch.zeros(2, 3).to_sparse()),
    *(torch.zeros(2, 3, device="meta"), np.ma.masked_array([1.0, 2.0], mask=[False, True])),
], ids=lambda value: type(value).__name__)  # fmt: skip
def test_states_that_are_no_rows_are_refused(states: Any) -> None:
    trainer = trainer_of()
    for ask in (trainer.step, trainer.collect, trainer.evaluate):
        with pytest.raises(ContractError, match=r"^states must be a list with one entry per row"):
            ask(states)


@pytest.mark.parametrize(
    "states", [["a"], ("a",), range(2), deque("ab"), np.array(["a", "b"]), np.array([{}, None], dtype=object)]
)
def test_states_that_are_rows_are_taken_as_they_are(states: Any) -> None:
    assert trainer_of().step(states)["group_stats/num_groups"] == len(states)


def test_integer_rewards_give_the_advantages_of_equal_floats() -> None:
    rewards, ids = torch.tensor([1, 3, 2, 0, 4]), torch.tensor([0, 0, 1, 1, 1])
    found = group_relative_advantages(rewards, ids, scale="group")
    assert found.dtype == torch.float64
    assert torch.equal(found, group_relative_advantages(rewards.double(), ids, scale="group"))
    steps, mask = torch.tensor([[1, 0], [2, 3]]), torch.ones(2, 2, dtype=torch.bool)
    same = torch.tensor([0, 0])
    assert torch.equal(group_relative_returns(steps, mask, same), group_relative_returns(steps.double(), mask, same))


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_rewards_that_are_not_finite_are_refused_by_free_functions(bad: float) -> None:
    rewards, ids = torch.tensor([1.0, bad, 2.0]), torch.tensor([0, 0, 1])
    with pytest.raises(RewardError, match="rewards must be finite"):
        group_relative_advantages(rewards, ids)
    steps = rewards.unsqueeze(1).expand(3, 2)
    mask = torch.ones(3, 2, dtype=torch.bool)
    with pytest.raises(RewardError, match="rewards must be finite"):
        group_relative_returns(steps, mask, ids)
    with pytest.raises(RewardError, match="rewards must be finite"):
        generalized_advantages(steps, torch.zeros(3, 2), mask, gamma=1.0, gae_lambda=1.0)
    mask = mask & steps.isfinite()  # outside the mask, a reward is never read
    assert group_relative_returns(steps, mask, ids).isfinite().all()


@pytest.mark.parametrize("wrong", [
    *([[-0.7] * 3] * 8, None, torch.zeros(8, 3).to_sparse()),
    *(torch.zeros(8, 3, dtype=torch.complex64), torch.zeros(8, 3, dtype=torch.int64), torch.zeros(8, 4)),
    *(np.zeros((8, 3)), torch.nested.nested_tensor([torch.zeros(3)] * 8, layout=torch.jagged)),
], ids=lambda value: type(value).__name__)  # fmt: skip
@pytest.mark.parametrize("name", ["log_probs", "entropy", "values", "kl"])
def test_scores_that_are_no_dense_floating_point_tensors_are_refused(name: str, wrong: Any) -> None:
    if wrong is None and name != "log_probs":
        pytest.skip("the policy does not compute it")
    message = r"^ActionScores\.(\w+) must be a dense (floating-point|bool) tensor \[N, T\]"
    with pytest.raises(ContractError, match=message):
        trainer_of(Scoring(**{name: wrong})).step(["a", "b"])


NOWHERE = torch.zeros(8, 3, device="meta")
EVERYTHING = dict.fromkeys(("log_probs", "entropy", "values", "kl"), NOWHERE)


@pytest.mark.parametrize(
    "wrong",
    [{"log_probs": NOWHERE}, {"entropy": NOWHERE}, {**EVERYTHING, "mask": NOWHERE.bool(), "final_values": None}],
    ids=["log_probs", "entropy", "everything"],
)
def test_scores_without_values_are_refused(wrong: Any) -> None:
    """On the device meta: all of them, or one beside others that have values."""
    with pytest.raises(ContractError, match=r"log_probs must be|ActionScores\.\w+ must be"):
        trainer_of(Scoring(**wrong)).step(["a", "b"])


@pytest.mark.parametrize(
    "wrong", [None, 1.0, torch.zeros(8), torch.zeros(8, 2), torch.zeros(8, 3, dtype=torch.int64), [[0.0] * 3] * 8]
)
def test_a_surrogate_that_returns_no_loss_per_step_is_refused(wrong: Any) -> None:
    trainer = trainer_of(Scoring(), objective=ObjectiveConfig(surrogate=lambda steps: wrong))
    message = re.escape("must return a dense floating-point tensor [N, T] = [8, 3] or [N, 1]")
    with pytest.raises(ContractError, match=message):
        trainer.update(ExperienceBatch.from_rows(**good_rows()))


integers, numbers = partial(require_integers, "Owner"), partial(require_numbers, "Owner")
instances, widths = partial(require_instances, "Owner"), partial(require_widths, "Owner")
texts, directions = partial(instances, str | None, "a text, or None"), partial(instances, Literal["up", "down"])
words = partial(require_each, "Owner: words", str)
NO_NUMBERS = [NAN, INF, True, "1", None, 1j, 10**400]


def test_arguments_that_fit_pass() -> None:
    integers(2, a=2, b=3, c=np.int64(2))
    integers(0, a=0)
    integers(1, optional=True, a=None, b=1)
    numbers(a=0, b=-1.5, c=np.float32(2), d=Fraction(1, 3))
    texts(a="x", b=None)
    directions(a="up", b="down")
    widths([])
    widths((64, np.int64(1)))
    assert words(word for word in ("a", "b")) == ["a", "b"]
    assert words([]) == []
    assert [value for value in NO_NUMBERS if is_finite(value)] == []


@pytest.mark.parametrize(("call", "message"), [
    (partial(integers, 2, fine=9, size=1), "size must be an integer >= 2; got int 1."),
    (partial(integers, 1, fine=9, size=True), "size must be an integer >= 1; got bool True."),
    (partial(integers, 1, fine=9, size=2.0), "size must be an integer >= 1; got float 2.0."),
    (partial(integers, 1, fine=9, size="3"), "size must be an integer >= 1; got str '3'."),
    (partial(integers, 1, fine=9, size=None), "size must be an integer >= 1; got NoneType None."),
    (partial(integers, 1, optional=True, size=0), "size must be an integer >= 1, or None; got int 0."),
    *((partial(numbers, fine=1.0, rate=value), f"rate must be a finite number; got {type(value).__name__} ")
      for value in NO_NUMBERS),
    (partial(texts, a="x", b=1), "b must be a text, or None; got int 1."),
    *((partial(directions, a="up", b=value), f"b must be one of 'up', 'down'; got {shown}")
      for value, shown in (("left", "str 'left'"), (1, "int 1"), (None, "NoneType None"), (["up"], "a list of 1"))),
    (partial(widths, 8), "hidden must be a list of widths; got int 8."),
    (partial(widths, [8, 0]), "hidden[1] must be an integer >= 1; got int 0."),
    (partial(widths, b"8"), "hidden must be a list of widths; got bytes b'8'."),
    *((partial(words, value), f"words must be a list of str objects; got {shown}.")
      for value, shown in ((["a", 1], "1"), ("ab", "'ab'"), (7, "7"), (None, "None"))),
])  # fmt: skip
def test_arguments_that_do_not_fit_are_refused_by_name(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(f'Owner: {message}')}"):
        call()
