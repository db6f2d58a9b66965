"""Bad input is answered with a typed error that names what was required and what came. The generator: `tests/support`.

The whole run, with 20,000 inputs: `tests/faults/test_bad_inputs.py`.
"""

import math
import re
from collections import deque
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import StepLR

from grpo import (
    AdvantageConfig,
    ConfigError,
    ContractError,
    ExperienceBatch,
    GRPOConfig,
    GRPOError,
    GRPOTrainer,
    ObjectiveConfig,
    ObjectiveInputs,
    ProtocolError,
    RewardError,
    Rewards,
    WeightedRewards,
    group_relative_advantages,
    group_relative_returns,
    grpo_objective,
)
from grpo.advantage_estimator import decoupled_advantages, generalized_advantages
from grpo.arguments import as_rewards
from grpo.evaluation import measure_policy
from tests.support.bad_input_places import (
    Plain,
    Scoring,
    good_batch,
    good_inputs,
    good_rows,
    places,
    rewards_of,
    trainer_of,
)
from tests.support.bad_inputs import KINDS, Frame, Series, counted, table
from tests.support.policies import TablePolicy

pytestmark = pytest.mark.usefixtures("without_type_checks")

NAN, INF = math.nan, math.inf


def test_generated_inputs_give_typed_errors_or_finite_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(KINDS) >= 60
    every = places()
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


# What the trainer is built with


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("config", None, ConfigError),
        ("config", {"group_size": 4}, ConfigError),
        ("objective", 0, ConfigError),
        ("objective", "", ConfigError),
        ("advantages", [], ConfigError),
        ("advantages", AdvantageConfig, ConfigError),
        ("engine", "", ProtocolError),
        ("engine", 0, ProtocolError),
        ("optimizer", 0, ProtocolError),
        ("lr_scheduler", [], ProtocolError),
    ],
)
def test_falsy_and_wrong_arguments_of_the_trainer_are_refused(name: str, value: Any, error: type[GRPOError]) -> None:
    given = {"config": GRPOConfig(), "policy": Plain(), "reward_model": rewards_of, name: value}
    with pytest.raises(error, match=rf"^{name} must "):
        GRPOTrainer(**given)


@pytest.mark.parametrize("device", ["mps", "x", "cuda:99", "cpu:x"])
def test_a_device_that_this_computer_lacks_is_refused_by_the_name_of_its_field(device: str) -> None:
    with pytest.raises(ConfigError, match=rf"config\.device must be a device of this computer; got '{device}'"):
        GRPOTrainer(config=GRPOConfig(device=device), policy=Plain(), reward_model=rewards_of)


def test_a_scheduler_of_another_optimizer_is_refused() -> None:
    policy = TablePolicy()
    optimizer, other = (torch.optim.SGD([policy.logits], lr=0.1) for _ in range(2))
    given: dict[str, Any] = {"config": GRPOConfig(), "policy": policy, "reward_model": rewards_of}
    for mine in (optimizer, None):
        with pytest.raises(ConfigError, match="lr_scheduler was built from another optimizer"):
            GRPOTrainer(**given, optimizer=mine, lr_scheduler=StepLR(other, 1))
    GRPOTrainer(**given, optimizer=optimizer, lr_scheduler=StepLR(optimizer, 1))
    GRPOTrainer(**given, lr_scheduler=partial(StepLR, step_size=1))


def test_no_gradient_flows_through_rewards(subtests: pytest.Subtests) -> None:
    """A reward that keeps its gradient on purpose is refused, because the loss would not follow it."""
    worth = torch.nn.Parameter(torch.tensor([0.0, 1.0]))

    def with_gradient(part: bool) -> Any:
        with torch.enable_grad():
            return Rewards(values=worth * 2, components={"part": worth * 2}) if part else worth * 2

    for part in (False, True):
        trainer = GRPOTrainer(
            config=GRPOConfig(group_size=2),
            policy=TablePolicy(),
            reward_model=lambda s, a, part=part: with_gradient(part),
        )
        for use in (trainer.step, trainer.evaluate):
            with (
                subtests.test(part=part),
                pytest.raises(RewardError, match=r"without a gradient.*Return rewards\.detach"),
            ):
                use(["a"])
    with pytest.raises(RewardError, match="without a gradient"):
        ExperienceBatch.from_rows(["a", "a"], [0, 1], worth * 2, torch.tensor([0, 0]))


def test_a_number_of_actions_beyond_64_bits_is_refused() -> None:
    for name in ("group_size", "num_states_per_iteration", "batch_size", "replay_iterations"):
        with pytest.raises(ConfigError, match=rf"GRPOConfig\.{name} must be below 2\*\*63; got 1180591620717411303424"):
            GRPOConfig(**{name: 2**70})
    assert GRPOConfig(seed=2**64 - 1).seed == 2**64 - 1
    with pytest.raises(
        ConfigError, match=r"num_actions_per_state must be >= 1; got 1180591620717411303424\. Pass an int"
    ):
        GRPOTrainer(config=GRPOConfig(), policy=TablePolicy(), reward_model=rewards_of).evaluate(
            ["a"], num_actions_per_state=2**70
        )
    with pytest.raises(ConfigError, match="num_actions_per_state must be >= 1; got 1180591620717411303424"):
        measure_policy(TablePolicy(), ["a"], rewards_of, num_actions_per_state=2**70)


@pytest.mark.parametrize(
    "value", [None, [], [torch.zeros(2)], {"w": None}, {0: torch.zeros(1)}, {"w": torch.zeros(2, device="meta")}]
)
def test_parameters_that_are_no_tensors_by_name_are_refused(value: Any) -> None:
    with pytest.raises(ContractError, match=r"^Plain\.get_parameters must return a dict of dense tensors by name"):
        trainer_of(Plain(get_parameters=value))


def test_no_parameters_are_legal() -> None:
    policy = Plain(get_parameters={})
    policy.logits.requires_grad_(False)
    trainer_of(policy).step(["a"])


# States


@pytest.mark.parametrize(
    "states",
    [
        *("abc", {"a": 1}, {"a"}, None, 3, 2.5, iter("ab"), (s for s in "ab")),
        *(Frame(), Series([1.0, 2.0]), np.array(1.0), torch.tensor(1.0), torch.zeros(2, 3).to_sparse()),
        *(torch.zeros(2, 3, device="meta"), np.ma.masked_array([1.0, 2.0], mask=[False, True])),
    ],
    ids=lambda value: type(value).__name__,
)
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


def test_update_needs_a_batch() -> None:
    trainer = trainer_of(Scoring())
    for wrong in (None, [], {}, "abc", good_batch()):
        with pytest.raises(ContractError, match="update needs an ExperienceBatch"):
            trainer.update(wrong)  # type: ignore[arg-type]
    with pytest.raises(ContractError, match="states must have one entry per row = 8"):
        trainer.update(ExperienceBatch(**good_batch(states=["a"])))
    with pytest.raises(RewardError, match="rewards must be finite"):
        trainer.update(ExperienceBatch(**good_batch(rewards=torch.full((8,), NAN))))
    with pytest.raises(RewardError, match=r"reward_components\['one'\] must be finite, or NaN where"):
        trainer.update(ExperienceBatch(**good_batch(reward_components={"one": torch.full((8,), INF)})))


@pytest.mark.parametrize("value", [0, 1.5, "3", True, [2]])
def test_the_number_of_iterations_is_an_integer(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"num_iterations must be >= 1"):
        trainer_of().train(["a"], num_iterations=value, progress=False)


@pytest.mark.parametrize("path", [3, b"abc", None, "a\0b", ["a"]])
def test_a_path_is_text_or_a_path(path: Any) -> None:
    for use in (trainer_of().save_checkpoint, trainer_of().load_checkpoint):
        with pytest.raises(GRPOError, match=r"path must be a str or a Path"):
            use(path)


# Rewards and group ids


@pytest.mark.parametrize(
    "group_ids",
    [
        [0.0, 0.0, 1.0, 1.0],
        torch.tensor([0.5, 0.5, 1, 1]),
        np.zeros(4),
        ["a", 0.0, "a", 0.0],
        [None, "a", "a", "a"],
        [{"a"}, {"a"}, {"b"}, {"b"}],
        [1j] * 4,
    ],
)
def test_group_ids_that_are_no_integers_are_refused(group_ids: Any) -> None:
    with pytest.raises(ContractError, match=r"group_ids must be \[N\], one integer or text per row"):
        ExperienceBatch.from_rows([0] * 4, [0] * 4, [0.0, 1, 0, 1], group_ids)
    with pytest.raises(ContractError, match="group_ids must be"):
        group_relative_advantages(torch.arange(4.0), group_ids)


MASKED = np.ma.masked_array([1.0, 2.0, 3.0, 4.0], mask=[False, True, False, False])


def test_arrays_with_masked_entries_are_refused(subtests: pytest.Subtests) -> None:
    """`torch` and `numpy.array` drop the mask, so that an entry which is not there would count."""
    good = {"states": [0] * 4, "actions": [0] * 4, "rewards": [0.0, 1, 0, 1], "group_ids": [0, 0, 1, 1]}
    for name in good:
        with subtests.test(name=name), pytest.raises((ContractError, RewardError)):
            ExperienceBatch.from_rows(**{**good, name: MASKED})
    with pytest.raises(RewardError, match=r"reward must return .*; got a numpy array \[4\] float64"):
        as_rewards("reward", MASKED, 4)
    nothing_masked = np.ma.masked_array([1.0, 2.0])
    assert as_rewards("reward", nothing_masked, 2).tolist() == [1, 2]


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


def test_an_infinite_part_is_refused_by_gdpo_and_nan_means_does_not_apply() -> None:
    ids = torch.tensor([0, 0, 0])
    parts = {"a": torch.tensor([1.0, NAN, 3.0])}
    assert decoupled_advantages(parts, {}, ids)[1] == 0
    with pytest.raises(RewardError, match=r"components\['a'\] must be finite"):
        decoupled_advantages({"a": torch.tensor([1.0, INF, 3.0])}, {}, ids)


def test_weighted_rewards_take_dicts_of_finite_weights(subtests: pytest.Subtests) -> None:
    cases: list[tuple[Any, Any]] = [([rewards_of], None), ({"a": rewards_of}, [1.0]), ({"a": rewards_of}, {"a": NAN})]
    for rewards, weights in [*cases, ({"a": rewards_of}, {"a": "1"})]:
        with subtests.test(weights=weights), pytest.raises(ConfigError, match="WeightedRewards"):
            WeightedRewards(rewards, weights)


# Scores


@pytest.mark.parametrize(
    "wrong",
    [
        *([[-0.7] * 3] * 8, None, torch.zeros(8, 3).to_sparse()),
        *(torch.zeros(8, 3, dtype=torch.complex64), torch.zeros(8, 3, dtype=torch.int64), torch.zeros(8, 4)),
        *(np.zeros((8, 3)), torch.nested.nested_tensor([torch.zeros(3)] * 8, layout=torch.jagged)),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("name", ["log_probs", "entropy", "values", "kl"])
def test_scores_that_are_no_dense_floating_point_tensors_are_refused(name: str, wrong: Any) -> None:
    if wrong is None and name != "log_probs":
        pytest.skip("the policy does not compute it")
    with pytest.raises(
        ContractError, match=r"^ActionScores\.(\w+) must be a dense (floating-point|bool) tensor \[N, T\]"
    ):
        trainer_of(Scoring(**{name: wrong})).step(["a", "b"])


def test_scores_without_values_are_refused() -> None:
    """On the device meta: all of them, or one beside others that have values."""
    nowhere = torch.zeros(8, 3, device="meta")
    everything = dict.fromkeys(("log_probs", "entropy", "values", "kl"), nowhere)
    for wrong in (
        {"log_probs": nowhere},
        {"entropy": nowhere},
        {**everything, "mask": nowhere.bool(), "final_values": None},
    ):
        with pytest.raises(ContractError, match=r"log_probs must be|ActionScores\.\w+ must be"):
            trainer_of(Scoring(**wrong)).step(["a", "b"])


def test_a_surrogate_that_returns_no_loss_per_step_is_refused(subtests: pytest.Subtests) -> None:
    for wrong in (None, 1.0, torch.zeros(8), torch.zeros(8, 2), torch.zeros(8, 3, dtype=torch.int64), [[0.0] * 3] * 8):
        config = GRPOConfig.from_dict({}).objective
        trainer = trainer_of(Scoring(), objective=type(config)(surrogate=lambda steps, wrong=wrong: wrong))
        with (
            subtests.test(wrong=str(wrong)),
            pytest.raises(
                ContractError, match=re.escape("must return a dense floating-point tensor [N, T] = [8, 3] or [N, 1]")
            ),
        ):
            trainer.update(ExperienceBatch.from_rows(**good_rows()))


def test_what_is_off_the_mask_never_counts(subtests: pytest.Subtests) -> None:
    """Weights, and what a surrogate or a sampler correction of one's own returns there: huge, or NaN."""
    mask = torch.tensor([[True, True, False]] * 8)
    log_probs = torch.linspace(-2, -0.1, 24, dtype=torch.float64).reshape(8, 3)
    config = ObjectiveConfig(
        surrogate=lambda steps: torch.where(steps.mask, -steps.ratio() * steps.advantages, poison),
        sampler_correction=lambda old, behaviour, mask: torch.where(mask, 0.5, poison).double(),
        value_coef=1.0,
        kl_coef=0.1,
        entropy_coef=0.1,
    )
    found = []
    for poison in (0.0, 1e9, NAN):
        weights = torch.where(mask, 0.1, poison).double()
        changes = {"mask": mask, "weights": weights, "entropy_weights": weights, "keep": None, "selected": None}
        leaf = log_probs.clone().requires_grad_()
        output = grpo_objective(ObjectiveInputs(**good_inputs(**changes, log_probs=leaf)), config)
        output.loss.backward()
        found.append((output.loss.item(), leaf.grad))
    for loss, gradient in found[1:]:
        with subtests.test(loss=loss):
            assert loss == found[0][0]
            assert torch.equal(gradient, found[0][1])
