"""The optimizer step: its learning rate, its counts, cleared gradients, and loss scales, which do not change the update."""

import math
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from grpo import (
    ActionScores,
    AdvantageConfig,
    ConfigError,
    ContractError,
    ExperienceBatch,
    GRPOConfig,
    GRPOTrainer,
    GRPOWarning,
    NonFiniteGradientError,
    ObjectiveInputs,
    ObjectiveOutput,
    ProtocolError,
)
from grpo._updating.preparation import prepare
from grpo._updating.requirements import is_function
from grpo.engine import OneProcess
from tests.support.layered import Layered
from tests.support.policies import DuckPolicy, RowScoring, TablePolicy, digest, weights_of
from tests.support.sharded_ranks import CASES, rows_of
from tests.support.trainers import REWARDS, SCRIPT, by_hand, poisoned

STEP = torch.tensor([[0.125, -0.125]] * 2, dtype=torch.float64)
"""Minus the gradient of the logits: advantages are +-1/2, so per row (1/4)(1/2)(e - p), with p = (1/2, 1/2)."""
NORM = 0.25
"""sqrt(4/64)."""


def trainer_of(policy: Any, optimizer: Any = None, **settings: Any) -> GRPOTrainer:
    """Plain SGD of rate 1, unless told otherwise."""
    return by_hand(policy=policy, config=settings, **({} if optimizer is None else {"optimizer": optimizer}))[0]


def close(found: Tensor, expected: Any) -> None:
    torch.testing.assert_close(found.detach(), torch.as_tensor(expected, dtype=found.dtype), rtol=1e-6, atol=1e-9)


def test_a_callers_scheduler_is_in_force_during_train() -> None:
    """The rate is halved after each update that was applied. In the first iteration these are 1 and 1/2. The second has one:
    the other gradient is NaN. The third has none, because all rewards are equal, and the fourth has 1/8 and 1/16."""
    policy, rewards = poisoned(TablePolicy(script=SCRIPT), 2), iter([REWARDS, REWARDS, [1.0] * 4, REWARDS])
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    given: dict[str, Any] = {"optimizer": optimizer, "lr_scheduler": scheduler, "config": {"num_epochs_per_update": 2}}
    trainer, _ = by_hand(policy=policy, rewards=lambda states, actions: next(rewards), **given)
    history = trainer.train(["a", "b"], num_iterations=4, progress=False)
    assert [metrics["train/learning_rate"] for metrics in history] == [3 / 4, 1 / 4, 1 / 8, 3 / 32]


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({}, [1, 1, 1, 1, 1]),
        ({"lr_schedule": "linear"}, [1, 0.8, 0.6, 0.4, 0.2]),
        ({"lr_schedule": "cosine"}, [0.5 * (1 + math.cos(math.pi * k / 5)) for k in range(5)]),
        ({"warmup_ratio": 0.4}, [0.5, 1, 1, 1, 1]),
        ({"lr_schedule": "linear", "warmup_ratio": 0.4}, [0.5, 1, 1, 2 / 3, 1 / 3]),
    ],
)
def test_each_schedule_and_warmup_gives_its_learning_rates(settings, rates):
    trainer, _ = by_hand(config={**settings, "learning_rate": 0.25}, optimizer=None)
    history = trainer.train(["a", "b"], num_iterations=5, progress=False)
    assert [metrics["train/learning_rate"] for metrics in history] == pytest.approx([0.25 * rate for rate in rates])


def test_the_default_optimizer_is_adamw_without_weight_decay() -> None:
    """Adam's first step is lr * sign(gradient), up to eps; a weight with no gradient stays: there is no decay."""
    policy = TablePolicy(num_actions=3, logits=[[5.0, 5.0, -900.0]] * 2, script=SCRIPT)
    by_hand(policy=policy, optimizer=None, config={"learning_rate": 0.01})[0].step(["a", "b"])
    expected = torch.tensor([[5.01, 4.99, -900.0]] * 2, dtype=torch.float64)
    torch.testing.assert_close(policy.logits.detach(), expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize(("bound", "entry"), [(0.025, 1 / 80), (0.2, 1 / 10), (0.3, 1 / 8)])
def test_gradients_are_clipped_to_their_total_norm(bound, entry):
    """The norm is 1/4 (each of four entries is +-1/8); clipped to 1/40, entries are +-1/80; above 1/4, they stay."""
    trainer, policy = by_hand(config={"max_grad_norm": bound})
    assert trainer.step(["a", "b"])["train/grad_norm"] == pytest.approx(0.25)
    torch.testing.assert_close(policy.logits[0].tolist(), [entry, -entry], rtol=1e-4, atol=0)


def test_an_optimizer_that_holds_none_of_the_parameters_is_refused() -> None:
    other = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ConfigError, match=r"optimizer holds none of the 1 trainable tensors of TablePolicy"):
        by_hand(optimizer=torch.optim.SGD([other], lr=1.0))


def test_a_policy_without_parameters_is_scored_and_not_updated() -> None:
    class Fixed(DuckPolicy):
        def get_parameters(self) -> dict[str, Tensor]:
            return {}

        def get_log_probabilities(self, states: Any, actions: Any) -> Tensor:
            return super().get_log_probabilities(states, actions).detach()

    config = {"group_size": 4, "batch_size": 2, "num_epochs_per_update": 2}
    metrics = by_hand(policy=Fixed(), rewards=torch.arange(8.0), config=config, optimizer=None)[0].step([0, 1])
    assert metrics["train/skipped_updates"] == 8.0
    assert metrics["train/grad_norm"] == metrics["train/learning_rate"] == 0.0
    assert metrics["train/ratio_mean"] == 1.0


class Impossible(TablePolicy):
    """In updates, actions of state b have probability 0. Without parameters where it is fixed."""

    is_fixed = False

    def get_parameters(self) -> dict[str, Tensor]:
        return {} if self.is_fixed else super().get_parameters()

    def get_log_probabilities(self, states: Any, actions: Any) -> Tensor:
        log_probs = super().get_log_probabilities(states, actions)
        impossible = torch.tensor([self.training and state == "b" for state in states])
        log_probs = torch.where(impossible, -math.inf, log_probs)
        return log_probs.detach() if self.is_fixed else log_probs


@pytest.mark.parametrize("is_fixed", [False, True])
def test_a_log_prob_that_is_not_finite_in_any_micro_batch_is_refused(is_fixed: bool) -> None:
    """The rows of state b are the second of two micro-batches."""
    policy = Impossible(script=SCRIPT)
    policy.is_fixed = is_fixed
    trainer, _ = by_hand(policy=policy, rewards=[0, 1, 0, 1], config={"micro_batch_size": 2}, optimizer=None)
    with pytest.raises(ContractError, match=r"Impossible: log-probabilities of steps and observations must be finite"):
        trainer.step(["a", "b"])
    assert policy.logits.tolist() == [[0.0, 0.0]] * 2
    assert policy.logits.grad is None


def scaled(policy: Any, optimizer: Any = None, *, init_scale: float = 3000.0, **settings: Any) -> GRPOTrainer:
    trainer = trainer_of(policy, optimizer, **settings)
    trainer.optimizer_step.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=2)
    return trainer


@pytest.mark.parametrize(("bound", "factor"), [(None, 1.0), (0.5, 1.0), (0.025, 0.1)])
def test_a_loss_scale_changes_neither_the_update_nor_the_norm(bound, factor) -> None:
    """The norm of 1/4 is below a bound of 1/2, and ten times a bound of 1/40."""
    metrics = scaled(policy := TablePolicy(script=SCRIPT), max_grad_norm=bound).step(["a", "b"])
    torch.testing.assert_close(policy.logits.detach(), STEP * factor, rtol=1e-4, atol=0)
    assert metrics["train/grad_norm"] == pytest.approx(NORM, rel=1e-6)
    assert (metrics["train/skipped_updates"], policy.logits.grad) == (0.0, None)


@pytest.mark.parametrize("settings", [{}, {"micro_batch_size": 3}, {"batch_size": 2, "num_epochs_per_update": 2}])
def test_a_loss_scale_that_grows_changes_nothing_for_adam(settings):
    """The default optimizer, fused where the device has it, over several updates and doublings of the scale."""
    weights = []
    for make in (trainer_of, scaled):
        policy = TablePolicy(script=SCRIPT)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=0.1, weight_decay=0.0, fused=True)
        trainer = make(policy, optimizer, seed=1, **settings)
        for _ in range(5):
            trainer.step(["a", "b"])
        weights.append(weights_of(policy))
    close(weights[1], weights[0])
    assert trainer.optimizer_step.scaler.get_scale() > 3000.0


@pytest.mark.parametrize(("when", "fused", "factor"), list(product([0, 1], [False, True], [math.inf, math.nan, 1e24])))
def test_under_a_loss_scale_a_non_finite_gradient_changes_only_the_scale(when, fused, factor):
    """The scale is halved. Weights and Adam's state stay bitwise equal, also before Adam has one. Then training continues."""
    policy = poisoned(TablePolicy(script=SCRIPT, dtype=torch.float32), when, factor=factor)
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.1, fused=fused)
    trainer = scaled(policy, optimizer)
    for _ in range(when):
        trainer.step(["a", "b"])
    before = digest(weights_of(policy), optimizer.state_dict())
    metrics = trainer.step(["a", "b"])
    assert digest(weights_of(policy), optimizer.state_dict()) == before
    assert metrics["train/skipped_updates"] == 1.0
    assert policy.logits.grad is None
    assert trainer.optimizer_step.scaler.get_scale() == 1500.0
    assert trainer.step(["a", "b"])["train/skipped_updates"] == 0.0
    close(policy.logits, [[0.1 * (when + 1), -0.1 * (when + 1)]] * 2)  # Adam's steps are lr * sign(gradient) here


def test_skipped_updates_end_a_run_once_the_scale_has_come_down() -> None:
    """From 4 it comes down to 2, 1, 1/2: the first skip is put down to the scale, the next two to the policy."""
    policy = poisoned(TablePolicy(script=SCRIPT, dtype=torch.float32), *range(9), factor=math.inf)
    trainer = scaled(policy, init_scale=4.0, max_skipped_updates=2)
    assert [trainer.step(["a", "b"])["train/skipped_updates"] for _ in range(2)] == [1.0, 1.0]
    with pytest.raises(NonFiniteGradientError, match="2 updates in a row"):
        trainer.step(["a", "b"])
    assert weights_of(trainer.policy).tolist() == [0.0] * 4


def test_under_a_loss_scale_training_continues_after_an_error_the_caller_fixed() -> None:
    """The log-prob is found to be infinite after the gradients were unscaled, which may be done once per update."""
    policy = TablePolicy(script=SCRIPT)
    trainer = scaled(policy)
    trainer.step(["a", "b"])
    sound, weights = policy.get_log_probabilities, weights_of(policy)
    policy.get_log_probabilities = lambda states, actions: sound(states, actions) * math.inf  # type: ignore[method-assign]
    with pytest.raises(ContractError, match="must be finite"):
        trainer.step(["a", "b"])
    assert torch.equal(weights_of(policy), weights)
    policy.get_log_probabilities = sound  # type: ignore[method-assign]
    assert trainer.step(["a", "b"])["train/skipped_updates"] == 0.0


class Biased(TablePolicy):
    """The same bias for both states: its gradient is the sum of theirs, (-1/4, 1/4), of norm sqrt(1/8)."""

    tells_bias = True

    def __init__(self) -> None:
        super().__init__(script=SCRIPT)
        self.bias = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def _logits_of(self, states: Any) -> Tensor:
        return super()._logits_of(states) + self.bias

    def get_parameters(self) -> dict[str, Tensor]:
        parameters: dict[str, Tensor] = dict(self.named_parameters())
        return parameters if self.tells_bias else {"logits": self.logits}


class Unsaid(Biased):
    """Its bias is no part of `get_parameters()`."""

    tells_bias = False


BOTH = math.sqrt(4 / 64 + 2 / 16)


def test_parameters_outside_the_optimizer_are_named_and_excluded_from_the_norm() -> None:
    policy = Biased()
    with pytest.warns(GRPOWarning, match=r"does not hold bias, so 1 of 2 trainable tensors of Biased stay as they are"):
        trainer = trainer_of(policy, torch.optim.SGD([policy.logits], lr=1.0), max_grad_norm=0.025)
    assert trainer.step(["a", "b"])["train/grad_norm"] == pytest.approx(NORM)
    torch.testing.assert_close(policy.logits.detach(), STEP / 10, rtol=1e-4, atol=0)
    assert policy.bias.tolist() == [0.0, 0.0]
    assert policy.bias.grad is None


@pytest.mark.parametrize(("bound", "kind"), list(product([None, BOTH / 10], [Biased, Unsaid])))
def test_a_parameter_group_that_is_added_later_is_cleared_counted_and_clipped(bound, kind):
    policy = kind()
    optimizer = torch.optim.SGD([policy.logits, torch.nn.Parameter(torch.zeros(0))], lr=1.0)
    if policy.tells_bias:
        with pytest.warns(GRPOWarning, match="does not hold bias"):
            trainer = trainer_of(policy, optimizer, max_grad_norm=bound)
    else:
        trainer = trainer_of(policy, optimizer, max_grad_norm=bound)
    optimizer.add_param_group({"params": [policy.bias]})
    policy.bias.grad = torch.full((2,), 100.0, dtype=torch.float64)
    assert trainer.step(["a", "b"])["train/grad_norm"] == pytest.approx(BOTH)
    factor = 1.0 if bound is None else 0.1
    torch.testing.assert_close(policy.logits.detach(), STEP * factor, rtol=1e-4, atol=0)
    torch.testing.assert_close(policy.bias.detach(), 2 * STEP[0] * factor, rtol=1e-4, atol=0)
    assert policy.bias.grad is None


class HalfScores(RowScoring):
    def score_actions(self, states: Any, actions: Any) -> ActionScores:
        scores = super().score_actions(states, actions)
        return ActionScores(log_probs=scores.log_probs.half(), mask=scores.mask)


def times_advantages(inputs: ObjectiveInputs) -> ObjectiveOutput:
    dtype = inputs.log_probs.dtype
    weights = inputs.weights.to(dtype) * inputs.advantages.to(dtype).unsqueeze(1)
    return ObjectiveOutput(loss=-(weights * inputs.log_probs).sum(), metrics={})


@pytest.mark.parametrize("objective", [None, times_advantages])
def test_gradients_below_the_smallest_float16_reach_the_weights(objective) -> None:
    """float16 ends at 6e-8. A gradient of 1e-8 is scaled by 65,536 before it passes through float16."""
    norms, config = [], GRPOConfig(autocast_dtype="float16", advantage=AdvantageConfig(scale="none"))
    for size in (1.0, 1e-8):
        torch.manual_seed(0)
        trainer = GRPOTrainer(config=config, policy=HalfScores(), reward_model=lambda s, a: [], objective=objective)
        batch = ExperienceBatch.from_rows([0, 0], [(1,), (0,)], [0.0, size], [0, 0])
        norms.append(trainer.update(batch)["train/grad_norm"])
    assert norms[1] == pytest.approx(1e-8 * norms[0], rel=1e-2)
    assert norms[0] > 0.1


# An optimizer and a scheduler may be functions, which the trainer calls once


def layered(policy: Layered, **settings: Any) -> GRPOTrainer:
    return GRPOTrainer(config=GRPOConfig(group_size=3, seed=0), policy=policy, reward_model=lambda *_: [], **settings)


def test_a_function_gets_the_trained_tensors() -> None:
    policy, build = Layered(), Mock(side_effect=partial(torch.optim.SGD, lr=0.5))
    policy.branch.requires_grad_(False)
    trainer = layered(policy, optimizer=lambda tensors: build(tensors))
    ((tensors,), _) = build.call_args
    assert type(tensors) is list
    expected = [value for value in policy.parameters() if value.requires_grad]
    assert all(found is value for found, value in zip(tensors, expected, strict=True))
    assert (build.call_count, trainer.optimizer_step.learning_rate) == (1, 0.5)


def test_a_built_optimizer_makes_the_updates_of_a_given_one() -> None:
    ends = []
    for is_built in (True, False):
        policy, scheduler = Layered(), partial(torch.optim.lr_scheduler.StepLR, step_size=1)
        given = partial(torch.optim.SGD, lr=0.5) if is_built else torch.optim.SGD(policy.parameters(), lr=0.5)
        trainer = layered(policy, optimizer=given, lr_scheduler=scheduler if is_built else scheduler(given))
        rates = [trainer.update(rows_of(CASES["module"], policy, 0, 1))["train/learning_rate"] for _ in range(2)]
        assert rates == pytest.approx([0.5, 0.05])
        ends.append(weights_of(policy))
    assert torch.equal(*ends)


def test_a_class_is_a_function_and_what_it_returns_is_checked() -> None:
    policy = Layered()
    assert type(layered(policy, optimizer=torch.optim.AdamW).optimizer_step.optimizer) is torch.optim.AdamW
    with pytest.raises(ProtocolError, match=r"optimizer must implement torch[.]optim[.]Optimizer; int lacks step"):
        layered(policy, optimizer=len)
    assert not is_function(torch.optim.SGD(policy.parameters(), lr=1.0))
    assert not is_function(None)


class Dividing(OneProcess):
    divides_weights = True

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def divide(self, policy: Any) -> None:
        self.asked.append(policy)


def test_policy_and_reference_are_divided_and_instances_are_refused() -> None:
    engine, policy, reference = Dividing(), Layered(), Layered()
    for given in (reference, None):
        prepare(GRPOConfig(), engine, policy, lambda *_: [], given)
    assert engine.asked == [policy, reference, policy]
    for name in ("optimizer", "lr_scheduler"):
        given = torch.optim.SGD(policy.parameters(), lr=1.0)
        message = rf"{name} must be a function with Dividing.*; got a SGD[.] Pass a function"
        with pytest.raises(ConfigError, match=message):
            layered(policy, engine=engine, **{name: given})
