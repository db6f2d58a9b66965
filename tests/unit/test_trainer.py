"""The trainer against updates worked out by hand, its semantics, and every capability a policy may have."""

import copy
import dataclasses
import logging
import math
import random
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
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
    ObjectiveConfig,
    ObjectiveInputs,
    ObjectiveOutput,
    WeightedRewards,
    grpo_objective,
)
from tests.policies import (
    DuckPolicy,
    EpisodePolicy,
    ExactSampling,
    GroupScoring,
    Planning,
    RecordingSGD,
    RowScoring,
    TablePolicy,
    VectorPolicy,
    digest,
    flat,
    gradient_of,
    weights_of,
)

LN2 = math.log(2.0)

# Two states, two actions each, all probabilities 1/2. Advantages (mean of the group subtracted): +-1/2.
SCRIPT = [[0, 1], [1, 0]]
REWARDS = [1.0, 0.0, 3.0, 4.0]


def by_hand(
    *, rewards: Any = None, policy: Any = None, config: dict[str, Any] | None = None, **others: Any
) -> tuple[GRPOTrainer, Any]:
    """A trainer of a scripted table policy with plain SGD of rate 1, unless told otherwise."""
    policy = policy or TablePolicy(script=SCRIPT)
    values = REWARDS if rewards is None else rewards
    settings = {"group_size": 2, "max_grad_norm": None, **(config or {})}
    if "optimizer" not in others:
        others["optimizer"] = torch.optim.SGD(list(policy.get_parameters().values()), lr=1.0)
    reward_model = values if callable(values) else (lambda states, actions: list(values))
    return GRPOTrainer(config=GRPOConfig(**settings), policy=policy, reward_model=reward_model, **others), policy


def without_time(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("time/")}


# One update, by hand


def test_one_step_is_the_update_worked_out_by_hand() -> None:
    """d loss / d logits[a] = -(1/4)(1/2)(e0 - p) + (1/4)(1/2)(e1 - p) = (-1/8, 1/8), and the same for b."""
    trainer, policy = by_hand()
    trainer.step(["a", "b"])
    assert torch.equal(policy.logits.detach(), torch.tensor([[0.125, -0.125], [0.125, -0.125]], dtype=torch.float64))


@pytest.mark.parametrize("num_epochs", [1, 3])
def test_steps_are_those_of_plain_autograd(num_epochs: int) -> None:
    """Clipped ratio of the current to the first policy, mean over rows, SGD; written out without the package."""
    torch.manual_seed(3)
    logits = torch.randn(2, 3, dtype=torch.float64)
    script, rewards = [[0, 2, 2, 1], [1, 1, 0, 2]], [1.0, 0.0, 2.0, 0.5, 0.0, 3.0, 1.0, 1.0]
    policy = TablePolicy(num_actions=3, logits=logits, script=script)
    trainer, _ = by_hand(policy=policy, rewards=rewards, config={"group_size": 4, "num_epochs_per_update": num_epochs})
    trainer.step(["a", "b"])

    rows = torch.tensor([0] * 4 + [1] * 4)
    actions = torch.tensor(script).reshape(-1)
    grouped = torch.tensor(rewards, dtype=torch.float64).reshape(2, 4)
    advantages = (grouped - grouped.mean(1, keepdim=True)).reshape(-1)
    expected = logits.clone().requires_grad_()
    old = expected.detach().log_softmax(1)[rows, actions]
    for _ in range(num_epochs):
        ratio = (expected.log_softmax(1)[rows, actions] - old).exp()
        loss = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        (gradient,) = torch.autograd.grad(loss, expected)
        expected = (expected.detach() - gradient).requires_grad_()
    torch.testing.assert_close(policy.logits.detach(), expected.detach(), rtol=1e-12, atol=1e-14)


def test_a_duck_typed_policy_is_trained_alike() -> None:
    duck, table = DuckPolicy(num_actions=2), TablePolicy(states=(0, 1), script=SCRIPT)
    duck.generate_actions = lambda states, count, **_: [list(group) for group in SCRIPT]  # type: ignore[method-assign]
    for policy in (duck, table):
        by_hand(policy=policy)[0].step([0, 1])
    assert torch.equal(weights_of(duck), weights_of(table))
    assert duck.mode == "train"


# Metrics

OBJECTIVE_METRICS = {
    f"train/{name}"
    for name in (
        "total_loss", "policy_loss", "kl_penalty", "kl_mean", "kl_std", "entropy_bonus", "entropy", "value_loss",
        "ratio_mean", "ratio_std", "ratio_clamped_fraction", "clip_fraction", "clip_fraction_low", "clip_fraction_high",
        "advantages_mean", "advantages_std", "grad_norm", "learning_rate", "kl_coef", "kl_coef_next", "entropy_coef",
        "entropy_coef_next", "num_updates", "skipped_updates",
    )
}  # fmt: skip
METRICS = (
    OBJECTIVE_METRICS
    | {f"rewards/{name}" for name in ("mean", "std", "max", "min", "median", "q25", "q75")}
    | {f"group_stats/{name}" for name in ("num_groups", "avg_group_size", "zero_variance_fraction")}
    | {"rows/dropped", "rows/replayed", "rows/skipped_zero_advantage", "steps/mean", "steps/max"}
    | {f"time/{name}" for name in ("sample", "reward", "score", "update", "iteration")}
)
"""The names of design.md, "Metric names"."""


def quarters() -> TablePolicy:
    """A reference with probabilities (1/4, 3/4) for both states."""
    return TablePolicy(logits=[[0.0, math.log(3.0)]] * 2)


def test_metrics_of_a_step_worked_out_by_hand() -> None:
    """log(pi/ref) is ln 2 for action 0 and ln 2/3 for action 1; k3 = exp(-x) + x - 1; each action is taken twice."""
    trainer, _ = by_hand(reference_policy=quarters())
    metrics = trainer.step(["a", "b"])
    k3 = [0.5 + LN2 - 1.0, 1.5 + math.log(2.0 / 3.0) - 1.0]
    kl_mean, kl_std = sum(k3) / 2, (k3[0] - k3[1]) / 2
    # the KL's gradient adds, per row, 0.04 (1 - exp(-x)) (e - p) / 4: for a logit pair (g, -g) with
    g = -0.125 + 0.04 / 4 * 0.5 * ((1 - 0.5) - (1 - 1.5))
    expected = {
        "train/policy_loss": 0.0,  # ratios are 1 and advantages sum to 0
        "train/total_loss": 0.04 * kl_mean,
        "train/kl_penalty": 0.04 * kl_mean,
        "train/kl_mean": kl_mean,
        "train/kl_std": kl_std,
        "train/kl_coef": 0.04,
        "train/kl_coef_next": 0.04,
        "train/entropy_bonus": 0.0,
        "train/entropy_coef": 0.0,
        "train/entropy_coef_next": 0.0,
        "train/entropy": LN2,
        "train/value_loss": 0.0,
        "train/ratio_mean": 1.0,
        "train/ratio_std": 0.0,
        "train/ratio_clamped_fraction": 0.0,
        "train/clip_fraction": 0.0,
        "train/clip_fraction_low": 0.0,
        "train/clip_fraction_high": 0.0,
        "train/advantages_mean": 0.0,
        "train/advantages_std": 0.5,
        "train/grad_norm": 2.0 * abs(g),
        "train/learning_rate": 1.0,
        "train/num_updates": 1.0,
        "train/skipped_updates": 0.0,
        "rewards/mean": 2.0,
        "rewards/std": math.sqrt((1 + 4 + 1 + 4) / 3),
        "rewards/max": 4.0,
        "rewards/min": 0.0,
        "rewards/median": 2.0,
        "rewards/q25": 0.75,
        "rewards/q75": 3.25,
        "group_stats/num_groups": 2.0,
        "group_stats/avg_group_size": 2.0,
        "group_stats/zero_variance_fraction": 0.0,
        "rows/dropped": 0.0,
        "rows/replayed": 0.0,
        "rows/skipped_zero_advantage": 0.0,
        "steps/mean": 1.0,
        "steps/max": 1.0,
    }
    assert set(expected) | {name for name in METRICS if name.startswith("time/")} == METRICS
    assert set(metrics) >= METRICS
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-9, abs=1e-12), name
    parts = [metrics[f"time/{part}"] for part in ("sample", "reward", "score")]
    assert all(part >= 0 for part in parts)
    assert metrics["time/update"] > 0
    assert metrics["time/iteration"] >= metrics["time/update"]
    assert all(isinstance(value, float) for value in metrics.values())


def test_metrics_of_a_second_pass_see_the_changed_policy() -> None:
    """SGD of rate 8 moves the logits to (1, -1): p = e / (e + 1/e) = 0.8808, so ratios are 1.7616 and 0.2384.

    Both lie outside [0.8, 1.2]: the higher ones have advantage 1/2, the lower ones -1/2, so the second pass is
    clipped everywhere. Metrics are means over both passes; the loss of the second is -(1.2 - 0.8) / 4.
    """
    policy = TablePolicy(script=SCRIPT)
    optimizer = torch.optim.SGD(policy.parameters(), lr=8.0)
    trainer, _ = by_hand(policy=policy, optimizer=optimizer, config={"num_epochs_per_update": 2})
    metrics = trainer.step(["a", "b"])
    high = 2 * math.e / (math.e + 1 / math.e)
    ratios = [1.0] * 4 + [high, 2 - high] * 2
    assert metrics["train/ratio_mean"] == pytest.approx(1.0)
    assert metrics["train/ratio_std"] == pytest.approx(float(np.std(ratios)))
    assert metrics["train/clip_fraction"] == 0.5
    assert metrics["train/clip_fraction_low"] == 0.25
    assert metrics["train/clip_fraction_high"] == 0.25
    assert metrics["train/policy_loss"] == pytest.approx((0.0 - 0.1) / 2)
    assert metrics["train/grad_norm"] == pytest.approx((0.25 + 0.0) / 2)
    assert torch.equal(policy.logits.detach(), torch.tensor([[1.0, -1.0]] * 2, dtype=torch.float64))


def test_every_name_is_there_in_an_iteration_without_anything_to_learn() -> None:
    trainer, _ = by_hand(rewards=[1.0] * 4)
    metrics = trainer.step(["a", "b"])
    assert set(metrics) >= METRICS
    assert metrics["train/total_loss"] == metrics["train/policy_loss"] == metrics["train/grad_norm"] == 0.0


def test_what_was_not_measured_is_said_to_be_so() -> None:
    """No forward pass: no ratio and no entropy, no loss; the learning rate is there all the same."""
    trainer, _ = by_hand(rewards=[1.0] * 4)
    metrics = trainer.step(["a", "b"])
    assert metrics["train/learning_rate"] == 1.0
    losses = ("total_loss", "policy_loss", "kl_penalty", "entropy_bonus", "value_loss")
    assert [metrics[f"train/{name}"] for name in losses] == [0.0] * 5
    assert all(math.isnan(metrics[f"train/{name}"]) for name in ("entropy", "ratio_mean", "ratio_std"))


def poisoned(policy: TablePolicy, *when: int) -> TablePolicy:
    """The gradients of these backward passes, counted from 0, are NaN; losses stay finite."""
    num_backwards = 0

    def hook(gradient: Tensor) -> Tensor:
        nonlocal num_backwards
        num_backwards += 1
        return gradient * math.nan if num_backwards - 1 in when else gradient

    policy.logits.register_hook(hook)
    return policy


@pytest.mark.parametrize("when", [(0,), (0, 1)])
def test_losses_are_means_over_the_updates_that_were_computed(when: tuple[int, ...]) -> None:
    """Two updates of two rows, none of which changes what the next one sees: the loss is that of all four rows."""
    trainer, _ = by_hand(
        policy=poisoned(TablePolicy(script=SCRIPT), *when), reference_policy=quarters(), config={"batch_size": 2}
    )
    metrics = trainer.step(["a", "b"])
    kl_mean = (0.5 + LN2 - 1.0 + 1.5 + math.log(2.0 / 3.0) - 1.0) / 2
    assert metrics["train/skipped_updates"] == len(when)
    assert metrics["train/kl_mean"] == pytest.approx(kl_mean)
    assert metrics["train/kl_penalty"] == pytest.approx(0.04 * kl_mean)
    assert metrics["train/policy_loss"] == pytest.approx(0.0)
    assert metrics["train/total_loss"] == pytest.approx(0.04 * kl_mean)


def test_losses_are_means_over_updates_also_beside_a_dead_one() -> None:
    """One of two updates is of a group without advantages, and never forwarded; the other's loss is -(3 + 1)/2."""
    trainer, _ = by_hand(advantages=lambda batch: torch.tensor([3.0, 1.0, 0.0, 0.0]), config={"batch_size": 2})
    metrics = trainer.step(["a", "b"])
    assert metrics["train/skipped_updates"] == 1.0
    assert metrics["train/policy_loss"] == metrics["train/total_loss"] == -2.0


def test_an_update_that_broke_off_leaves_nothing_in_the_next_ones_metrics() -> None:
    """The first of two forwards is done, the second raises; then the same step, as if nothing had been."""
    seen = []
    for breaks in (False, True):
        trainer, policy = by_hand(reference_policy=quarters(), config={"micro_batch_size": 2})
        score = policy.get_log_probabilities
        if breaks:
            forwards = iter([True, True, True, False])  # both parts without gradient, then the first with one

            def failing(states: Any, actions: Any, score: Any = score, forwards: Any = forwards) -> Tensor:
                if next(forwards):
                    return score(states, actions)
                raise RuntimeError("out of memory")

            policy.get_log_probabilities = failing
            with pytest.raises(RuntimeError, match="out of memory"):
                trainer.step(["a", "b"])
            policy.get_log_probabilities = score
        metrics = trainer.step(["a", "b"])
        seen.append((without_time(metrics), policy.logits.tolist()))
    assert seen[0] == seen[1]


def test_metrics_of_rollouts_made_elsewhere_have_every_name() -> None:
    trainer, _ = by_hand(policy=TablePolicy())
    metrics = trainer.update(ExperienceBatch.from_rows(["a", "a"], [0, 1], [1.0, 0.0], [0, 0]))
    assert set(metrics) >= METRICS
    assert metrics["rows/dropped"] == metrics["time/sample"] == metrics["time/reward"] == 0.0


def test_weighted_rewards_report_their_parts() -> None:
    """R = 2 right + short = (2, 1, 2, 3): the advantages are 1/2, -1/2, -1/2, 1/2 as before."""
    parts = {"right": lambda s, a: [1, 0, 1, 1], "short": lambda s, a: np.array([0.0, 1.0, 0.0, 1.0])}
    policy = TablePolicy(script=SCRIPT)
    trainer = GRPOTrainer(
        config=GRPOConfig(group_size=2, max_grad_norm=None),
        policy=policy,
        reward_model=WeightedRewards(parts, {"right": 2, "short": 1}),
        optimizer=torch.optim.SGD(policy.parameters(), lr=1.0),
    )
    metrics = trainer.step(["a", "b"])
    assert metrics["rewards/right/mean"] == 0.75
    assert metrics["rewards/right/std"] == pytest.approx(0.5)  # 3/4 squared deviations over n - 1 = 3
    assert metrics["rewards/short/mean"] == 0.5
    assert metrics["rewards/short/std"] == pytest.approx(math.sqrt(1 / 3))
    assert metrics["rewards/mean"] == 2.0
    assert policy.logits[0].tolist() == [0.125, -0.125]


def test_weighted_rewards_that_differ_by_rounding_alone_are_equal() -> None:
    """In float32, 0.1 + 0.2 and 0.3 are apart by 7e-9 before they are rounded; divided by their std they would be +-0.7."""
    parts = {"x": lambda s, a: torch.tensor([0.3, 0.1] * 2), "y": lambda s, a: torch.tensor([0.0, 0.2] * 2)}
    trainer = GRPOTrainer(
        config=GRPOConfig(group_size=2, advantage=AdvantageConfig(scale="group")),
        policy=TablePolicy(),
        reward_model=WeightedRewards(parts),
    )
    assert trainer.advantages(trainer.collect(["a", "b"])).tolist() == [0.0] * 4


def test_steps_and_rewards_per_step_are_summed_over_the_policys_own() -> None:
    policy = RowScoring()
    mask = torch.tensor([[True, True, False], [True, False, False]])
    batch = ExperienceBatch.from_rows([0, 0], [(1, 0), (0,)], [[1.0, 2.0, 50.0], [4.0, 50.0, 50.0]], [0, 0], mask=mask)
    metrics = by_hand(policy=policy)[0].update(batch)
    assert (metrics["rewards/mean"], metrics["rewards/max"], metrics["rewards/min"]) == (3.5, 4.0, 3.0)
    assert (metrics["steps/mean"], metrics["steps/max"]) == (1.5, 2.0)


def test_evaluate_reports_the_reward_and_leaves_every_generator_untouched() -> None:
    class Restless(TablePolicy):
        def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> Any:
            random.random()
            np.random.random()  # noqa: NPY002
            return super().generate_actions(states, num_actions_per_state)

    rewards = [[1.0, 2.0, 4.0]]
    trainer, policy = by_hand(policy=Restless(), rewards=lambda states, actions: rewards[0])
    before = weights_of(policy), random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    report = trainer.evaluate(["a"], num_actions_per_state=3)
    after = weights_of(policy), random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    assert digest(*before) == digest(*after)
    mean = 7 / 3
    assert report == {
        "eval/avg_reward": pytest.approx(mean),
        "eval/avg_reward_std": pytest.approx(math.sqrt(sum((r - mean) ** 2 for r in rewards[0]) / 3)),
    }
    assert not policy.training


def test_train_reports_evaluations_to_history_and_sinks() -> None:
    class Sink:
        def __init__(self) -> None:
            self.seen: list[tuple[int, bool]] = []

        def log(self, metrics: Any, iteration: int) -> None:
            self.seen.append((iteration, "eval/avg_reward" in metrics))

        def close(self) -> None:
            raise AssertionError("whoever opened the sink closes it")

    sink = Sink()
    policy = TablePolicy()
    trainer, _ = by_hand(policy=policy, rewards=lambda states, actions: [float(a) for a in actions])
    history = trainer.train(["a", "b"], num_iterations=5, eval_states=["a"], eval_every=2, sinks=[sink], progress=False)
    assert sink.seen == [(1, False), (2, True), (3, False), (4, True), (5, True)]
    assert ["eval/avg_reward_std" in metrics for metrics in history] == [False, True, False, True, True]


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("name", ["num_iterations", "eval_every", "checkpoint_every", "keep_last"])
def test_counts_below_one_are_refused(name: str, value: int, tmp_path: Path) -> None:
    trainer, policy = by_hand()
    arguments: dict[str, Any] = {"num_iterations": 1, name: value}
    with pytest.raises(ConfigError, match=rf"{name} must be >= 1; got {value}"):
        trainer.train(["a", "b"], eval_states=["a"], checkpoint_dir=tmp_path, progress=False, **arguments)
    with pytest.raises(ConfigError, match=rf"num_actions_per_state must be >= 1; got {value}"):
        trainer.evaluate(["a", "b"], num_actions_per_state=value)
    assert policy.calls["generate"] == 0


# Optimizer and schedules


class CountingScheduler:
    """Sets the rate to 1, 1/2, 1/4, ... by the number of calls."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.calls = optimizer, 0

    def step(self) -> None:
        self.calls += 1
        for group in self.optimizer.param_groups:
            group["lr"] = 0.5**self.calls


def test_the_callers_optimizer_and_scheduler_are_the_ones_stepped() -> None:
    """12 rows in updates of 5: three per pass, two passes. The optimizer also holds a tensor of the caller's."""
    policy = TablePolicy()
    extra = torch.ones(1, dtype=torch.float64, requires_grad=True)
    optimizer = RecordingSGD(policy)
    optimizer.add_param_group({"params": [extra], "lr": 1.0})
    scheduler = CountingScheduler(optimizer)
    trainer, _ = by_hand(
        policy=policy,
        rewards=lambda states, actions: torch.arange(12.0),
        optimizer=optimizer,
        lr_scheduler=scheduler,
        config={"group_size": 6, "batch_size": 5, "num_epochs_per_update": 2},
    )
    metrics = trainer.step(["a", "b"])
    assert len(optimizer.gradients) == scheduler.calls == 6
    assert trainer.gradient.optimizer is optimizer
    assert metrics["train/skipped_updates"] == 0.0


def test_the_scheduler_is_not_stepped_by_a_skipped_update() -> None:
    policy = TablePolicy(script=SCRIPT)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    scheduler = CountingScheduler(optimizer)
    trainer, _ = by_hand(rewards=[2.0] * 4, policy=policy, optimizer=optimizer, lr_scheduler=scheduler)
    assert trainer.step(["a", "b"])["train/skipped_updates"] == 1.0
    assert scheduler.calls == 0


def test_a_callers_scheduler_is_in_force_during_train() -> None:
    """One update per iteration, the rate halved after each: 1, 1/2, 1/4."""
    policy = TablePolicy(script=SCRIPT)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    trainer, _ = by_hand(policy=policy, optimizer=optimizer, lr_scheduler=scheduler)
    history = trainer.train(["a", "b"], num_iterations=3, progress=False)
    assert [metrics["train/learning_rate"] for metrics in history] == [1.0, 0.5, 0.25]


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
def test_learning_rate_schedules(settings: dict[str, Any], rates: list[float]) -> None:
    trainer, _ = by_hand(config={**settings, "learning_rate": 0.25}, optimizer=None)
    history = trainer.train(["a", "b"], num_iterations=5, progress=False)
    assert [metrics["train/learning_rate"] for metrics in history] == pytest.approx([0.25 * rate for rate in rates])


def test_without_an_optimizer_it_is_adamw_without_decay() -> None:
    """Adam's first step is lr * sign(gradient), up to eps; a weight with no gradient stays: there is no decay."""
    policy = TablePolicy(num_actions=3, logits=[[5.0, 5.0, -900.0]] * 2, script=SCRIPT)
    trainer, _ = by_hand(policy=policy, optimizer=None, config={"learning_rate": 0.01})
    trainer.step(["a", "b"])
    expected = torch.tensor([[5.01, 4.99, -900.0]] * 2, dtype=torch.float64)
    torch.testing.assert_close(policy.logits.detach(), expected, rtol=0, atol=1e-8)


def test_gradients_are_clipped_to_their_total_norm() -> None:
    """The norm is 1/4 (each of four entries is +-1/8); clipped to 1/40, entries are +-1/80."""
    trainer, policy = by_hand(config={"max_grad_norm": 0.025})
    metrics = trainer.step(["a", "b"])
    assert metrics["train/grad_norm"] == pytest.approx(0.25)
    torch.testing.assert_close(policy.logits[0].tolist(), [1 / 80, -1 / 80], rtol=1e-4, atol=0)


def test_a_gradient_left_behind_by_the_caller_is_no_part_of_the_update() -> None:
    """As after supervised training that ended with optimizer.step()."""
    trainer, policy = by_hand()
    policy.logits.grad = torch.full_like(policy.logits, 100.0)
    trainer.step(["a", "b"])
    assert policy.logits[0].tolist() == [0.125, -0.125]


def test_an_optimizer_that_holds_none_of_the_parameters_is_refused() -> None:
    other = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ConfigError, match=r"optimizer holds none of the 1 trainable tensors of TablePolicy"):
        by_hand(optimizer=torch.optim.SGD([other], lr=1.0))


def test_two_things_that_set_the_learning_rate_are_refused() -> None:
    policy = TablePolicy()
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    scheduler = CountingScheduler(optimizer)
    for settings in ({"lr_schedule": "linear"}, {"warmup_ratio": 0.5}):
        with pytest.raises(ConfigError, match=r"lr_scheduler and config\.lr_schedule"):
            by_hand(policy=policy, optimizer=optimizer, lr_scheduler=scheduler, config=settings)


def test_a_policy_without_parameters_is_scored_and_not_updated() -> None:
    class Fixed(DuckPolicy):
        def get_parameters(self) -> dict[str, Tensor]:
            return {}

        def get_log_probabilities(self, states: Any, actions: Any) -> Tensor:
            return super().get_log_probabilities(states, actions).detach()

    trainer = GRPOTrainer(
        config=GRPOConfig(group_size=4, batch_size=2, num_epochs_per_update=2),
        policy=Fixed(),
        reward_model=lambda states, actions: torch.arange(8.0),
    )
    metrics = trainer.step([0, 1])
    assert metrics["train/skipped_updates"] == 8.0
    assert metrics["train/grad_norm"] == metrics["train/learning_rate"] == 0.0
    assert metrics["train/ratio_mean"] == 1.0


# Reference and KL


class WithReference(TablePolicy):
    """`ScoresReference`: probabilities 1/4 and 3/4."""

    def reference_log_probabilities(self, states: Any, actions: Any) -> Tensor:
        self.calls["reference"] += 1
        return torch.tensor([0.25, 0.75], dtype=torch.float64).log()[torch.as_tensor(actions)]


@pytest.mark.parametrize(
    ("kl_coef", "passes_reference", "in_force"),
    [(None, True, 0.04), (None, False, 0.0), (0.0, True, 0.0), (0.0, False, 0.0), (0.5, True, 0.5), (0.5, False, 0.5)],
)
def test_which_kl_coefficient_is_in_force_and_when_the_reference_is_scored(
    kl_coef: float | None, passes_reference: bool, in_force: float
) -> None:
    """A capability alone switches nothing on; an explicit 0 scores no reference; `reference_policy` comes first."""
    reference = quarters() if passes_reference else None
    policy = WithReference(script=SCRIPT)
    trainer, _ = by_hand(
        policy=policy, reference_policy=reference, config={"objective": ObjectiveConfig(kl_coef=kl_coef)}
    )
    metrics = trainer.step(["a", "b"])
    assert metrics["train/kl_coef"] == in_force
    scored_by_policy = policy.calls["reference"]
    scored_by_reference = 0 if reference is None else reference.calls["score"] + reference.calls["score with gradient"]
    wanted = in_force > 0
    assert (scored_by_reference, scored_by_policy) == (
        int(wanted and passes_reference),
        int(wanted and not passes_reference),
    )
    mean = (0.5 + LN2 - 1.0 + 1.5 + math.log(2.0 / 3.0) - 1.0) / 2
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


# Seeds, and halves of a step


def runs(seed: int | None) -> tuple[str, list[dict[str, float]]]:
    torch.manual_seed(11)
    policy = VectorPolicy()
    trainer = GRPOTrainer(
        config=GRPOConfig(group_size=4, batch_size=5, num_states_per_iteration=2, seed=seed),
        policy=policy,
        reward_model=lambda states, actions: [float(action == 1) + random.random() for action in actions],
    )
    history = trainer.train(torch.randn(5, 3), num_iterations=3, progress=False)
    return digest(weights_of(policy)), [without_time(metrics) for metrics in history]


def test_a_seed_repeats_a_run_exactly_and_another_does_not() -> None:
    first = runs(1)
    random.random()
    assert runs(1) == first
    assert runs(2)[0] != first[0]


@pytest.mark.parametrize("kind", [RowScoring, GroupScoring, ExactSampling])
def test_step_is_collect_and_update(kind: type[RowScoring]) -> None:
    results = []
    for halves in (False, True):
        torch.manual_seed(2)
        policy = kind()
        config = GRPOConfig(group_size=3, batch_size=4, num_epochs_per_update=2, seed=4)
        trainer = GRPOTrainer(
            config=config, policy=policy, reward_model=lambda s, actions: [float(sum(a)) for a in actions]
        )
        both = [trainer.update(trainer.collect([0, 1])) if halves else trainer.step([0, 1]) for _ in range(3)]
        results.append((digest(weights_of(policy)), [without_time(metrics) for metrics in both]))
    assert results[0] == results[1]


def test_rollouts_made_elsewhere_are_trained_on_alike() -> None:
    """The rows of the hand-worked step, interleaved, with any numbers as group ids; nothing is sampled."""
    trainer, policy = by_hand(policy=TablePolicy())
    batch = ExperienceBatch.from_rows(["b", "a", "b", "a"], [1, 0, 0, 1], [3.0, 1.0, 4.0, 0.0], [-5, 99, -5, 99])
    metrics = trainer.update(batch)
    assert policy.logits.tolist() == [[0.125, -0.125]] * 2
    assert policy.calls["generate"] == 0
    assert metrics["group_stats/num_groups"] == 2.0


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((["a"], [0, 1], [1.0, 0.0], [0, 0]), r"states must have one entry per row = 2; got a list of 1"),
        ((["a", "a"], [0], [1.0, 0.0], [0, 0]), r"actions must have one entry per row = 2; got a list of 1"),
        ((["a", "a"], [0, 1], [1.0], [0, 0]), r"rewards must return one number per row, \[N\] = \[2\]"),
        ((["a", "a"], [0, 1], [1.0, float("nan")], [0, 0]), r"rewards must be finite"),
        (([], [], [], []), r"[Nn]o rows|at least one"),
    ],
)
def test_rollouts_that_do_not_fit_together_are_refused(arguments: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        ExperienceBatch.from_rows(*arguments)


# Capabilities


class Synced(TablePolicy):
    def sync_sampler(self) -> None:
        self.calls["sync"] += 1


def test_the_sampler_is_given_the_weights_when_they_changed_and_only_then(tmp_path: Any) -> None:
    rewards = list(REWARDS)
    trainer, policy = by_hand(policy=Synced(script=SCRIPT), rewards=lambda states, actions: list(rewards))
    assert policy.calls["sync"] == 0
    trainer.collect(["a", "b"])
    assert policy.calls["sync"] == 1  # before the first collection
    trainer.collect(["a", "b"])
    trainer.evaluate(["a", "b"], num_actions_per_state=2)
    assert policy.calls["sync"] == 1
    trainer.step(["a", "b"])
    assert policy.calls["sync"] == 2  # this one changed weights
    rewards[:] = [1.0] * 4
    trainer.step(["a", "b"])
    assert policy.calls["sync"] == 2  # this one did not
    trainer.save_checkpoint(tmp_path / "here")
    trainer.load_checkpoint(tmp_path / "here")
    assert policy.calls["sync"] == 3
    trainer.collect(["a", "b"])
    assert policy.calls["sync"] == 3


def test_a_first_evaluation_syncs_the_sampler_too() -> None:
    trainer, policy = by_hand(policy=Synced(script=SCRIPT))
    trainer.evaluate(["a", "b"])
    assert policy.calls["sync"] == 1


def test_the_sampler_is_given_what_was_applied_before_a_run_of_bad_gradients_ended_it() -> None:
    """Two updates: the first is applied, the second is not finite and one too many; the caller goes on all the same."""
    policy = Synced(script=SCRIPT)
    num_backwards = 0

    def hook(gradient: Tensor) -> Tensor:
        nonlocal num_backwards
        num_backwards += 1
        return gradient * math.nan if num_backwards == 2 else gradient

    policy.logits.register_hook(hook)
    trainer, _ = by_hand(policy=policy, config={"batch_size": 2, "max_skipped_updates": 1})
    with pytest.raises(NonFiniteGradientError):
        trainer.step(["a", "b"])
    assert weights_of(policy).any()
    trainer.collect(["a", "b"])
    assert policy.calls["sync"] == 2


def counted(policy: Any, *, num_iterations: int = 1, **settings: Any) -> dict[str, int]:
    """How often each method was called in the last of some iterations."""
    trainer = GRPOTrainer(
        config=GRPOConfig(group_size=3, **settings),
        policy=policy,
        reward_model=lambda states, actions: torch.arange(6.0),
    )
    for _ in range(num_iterations):
        policy.calls.clear()
        trainer.step([0, 1])
    return dict(policy.calls)


def test_how_many_passes_each_kind_of_sampler_costs() -> None:
    exact, behaviour_only = ExactSampling(), ExactSampling()
    behaviour_only.tells_scores = False
    # exact scores: never a pass without gradient, whatever the number of updates (6 rows in updates of 2: 3 per pass)
    assert counted(exact) == {"sample": 1, "score with gradient": 1}
    assert counted(exact, batch_size=2, num_epochs_per_update=2) == {"sample": 1, "score with gradient": 6}
    # behaviour alone: none for one update, exactly one for several
    assert counted(behaviour_only) == {"sample": 1, "score with gradient": 1}
    assert counted(behaviour_only, num_epochs_per_update=2) == {"sample": 1, "score": 1, "score with gradient": 2}
    assert counted(behaviour_only, batch_size=2) == {"sample": 1, "score": 1, "score with gradient": 3}
    # a sampler that does not say which steps count: one pass finds them, and serves as the old log-probs
    assert counted(RowScoring()) == {"score": 1, "score with gradient": 1}
    assert counted(RowScoring(), num_epochs_per_update=2) == {"score": 1, "score with gradient": 2}
    # a plain policy that has shown one log-prob per row needs none for one update
    plain = {"generate": 1, "score with gradient": 1}
    assert counted(TablePolicy(states=(0, 1)), num_iterations=2) == plain
    assert counted(TablePolicy(states=(0, 1)), num_iterations=2, num_epochs_per_update=2) == {
        "generate": 1, "score": 1, "score with gradient": 2,
    }  # fmt: skip


def test_exact_scores_are_the_old_log_probs_and_behaviour_is_kept_apart() -> None:
    policy = ExactSampling()
    trainer = GRPOTrainer(
        config=GRPOConfig(group_size=3), policy=policy, reward_model=lambda states, actions: torch.arange(6.0)
    )
    batch = trainer.collect([0, 1])
    expected = policy.score_actions(batch.states, batch.actions)
    mask = batch.mask[:, : expected.mask.shape[1]]
    assert torch.equal(mask, expected.mask)
    assert batch.old_log_probs is not None
    torch.testing.assert_close(batch.old_log_probs[:, : mask.shape[1]][mask], expected.log_probs[mask].detach())
    assert batch.group_ids.tolist() == [0, 0, 0, 1, 1, 1]
    assert batch.states == [0, 0, 0, 1, 1, 1]
    policy.tells_scores = False
    batch = trainer.collect([0, 1])
    assert batch.old_log_probs is None
    assert batch.behaviour_log_probs is not None


RAGGED_GROUPS = [[(1, 2, 0), (0,)], [(2, 2, 2, 1)], [(1, 0), (0,), (2, 1)]]


def test_scoring_groups_is_scoring_rows_in_value_and_gradient() -> None:
    torch.manual_seed(8)
    by_group = GroupScoring()
    by_row = RowScoring()
    by_row.load_state_dict(by_group.state_dict())
    recorded = []
    for policy in (by_group, by_row):
        optimizer = RecordingSGD(policy)
        trainer, _ = by_hand(policy=policy, optimizer=optimizer)
        states = [state for state, group in enumerate(RAGGED_GROUPS) for _ in group]
        actions = [action for group in RAGGED_GROUPS for action in group]
        mask = torch.tensor([[place < len(action) for place in range(4)] for action in actions])
        batch = ExperienceBatch.from_rows(states, actions, [1.0, 2.0, 0.0, 3.0, 4.0, 8.0], states, mask=mask)
        scores = trainer.collector.scorer(batch.states, batch.actions, batch.group_ids)
        by_hand_scores = by_row.score_actions(states, actions)
        assert torch.equal(scores.mask, by_hand_scores.mask)
        torch.testing.assert_close(scores.log_probs, by_hand_scores.log_probs, equal_nan=True)
        trainer.update(batch)
        recorded.append(optimizer.gradients[0])
    torch.testing.assert_close(recorded[0], recorded[1], rtol=1e-12, atol=1e-14)
    assert by_group.group_sizes[0] == [2, 1, 3]
    assert by_group.group_sizes[-1] == [2, 3]  # the group of one has no advantage, and is not forwarded
    assert by_row.calls["groups"] == 0


class VectorGroups(VectorPolicy):
    """`ScoresGroups` over vectors: the hidden layer once per state. Remembers what it was given."""

    def score_groups(self, states: Any, actions: Any) -> Any:
        self.given = type(states), type(actions)
        log_softmax = self._log_softmax(states)
        chosen = [torch.as_tensor(group, dtype=torch.int64) for group in actions]
        rows = torch.repeat_interleave(torch.arange(len(chosen)), torch.tensor([len(group) for group in chosen]))
        log_probs = log_softmax[rows].gather(1, torch.cat(chosen).unsqueeze(1))
        return ActionScores(log_probs=log_probs, mask=torch.ones_like(log_probs, dtype=torch.bool))


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("container", ["list", "tensor", "array"])
def test_groups_of_lists_tensors_and_arrays(container: str, ragged: bool) -> None:
    torch.manual_seed(1)
    by_group = VectorGroups(dtype=torch.float64)
    by_row = VectorPolicy(dtype=torch.float64)
    by_row.load_state_dict(by_group.state_dict())
    make = {"list": lambda x: x.tolist(), "tensor": lambda x: x, "array": lambda x: x.numpy()}[container]
    sizes = [1, 3, 2] if ragged else [2, 2, 2]
    ids = [group for group, size in enumerate(sizes) for _ in range(size)]
    states = make(torch.randn(3, 3, dtype=torch.float64)[ids])
    actions = make(torch.randint(4, (6,)))
    recorded = []
    for policy in (by_group, by_row):
        optimizer = RecordingSGD(policy)
        objective = ObjectiveConfig(entropy_coef=0.1, entropy_estimator="score_function")
        trainer, _ = by_hand(policy=policy, optimizer=optimizer, config={"objective": objective})
        trainer.update(ExperienceBatch.from_rows(states, actions, [1.0, 0.0, 2.0, 5.0, 1.0, 0.5], ids))
        recorded.append(optimizer.gradients[0])
    torch.testing.assert_close(recorded[0], recorded[1], rtol=1e-12, atol=1e-14)
    kinds = {"list": list, "tensor": Tensor, "array": np.ndarray}
    assert by_group.given[0] is kinds[container]
    assert by_group.given[1] is (list if ragged else kinds[container])


@pytest.mark.parametrize("container", ["list", "tensor", "array"])
def test_states_and_actions_stay_what_they_are(container: str) -> None:
    """From the sampler to the reward and back to the policy; the same numbers, whatever the container."""
    weights, kinds = [], {"list": list, "tensor": Tensor, "array": np.ndarray}
    for kind in ("list", container):
        torch.manual_seed(6)
        policy = VectorPolicy(container=kind, dtype=torch.float64)
        states = torch.randn(3, 3, dtype=torch.float64)
        given = {"list": states.tolist(), "tensor": states, "array": states.numpy()}[kind]
        seen: list[Any] = []

        def reward(row_states: Any, actions: Any, seen: list[Any] = seen) -> Any:
            seen.append((type(row_states), type(actions), len(row_states), len(actions)))
            return [float(action) for action in actions]

        trainer = GRPOTrainer(
            config=GRPOConfig(group_size=4, batch_size=5, micro_batch_size=2, seed=9),
            policy=policy,
            reward_model=reward,
        )
        trainer.step(given)
        assert seen == [(kinds[kind], kinds[kind], 12, 12)]
        assert set(policy.seen) == {(kinds[kind], kinds[kind])}
        weights.append(weights_of(policy))
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-12, atol=1e-14)


def test_a_plan_of_the_policy_is_followed_in_scoring_and_updates() -> None:
    policy = Planning()
    policy.plan = lambda num_rows: [list(range(1, num_rows)), [0]]  # type: ignore[method-assign]
    assert counted(policy) == {"plan": 2, "score": 2, "score with gradient": 2}
    assert policy.rows_scored == [5, 1, 3, 1]  # rewards 0, 1, 2: the middle row of each group has no advantage


@pytest.mark.parametrize("plan", [[[0, 1]], [[0, 1, 2], [2, 3, 4, 5]], [[0, 1, 2, 3, 4, 6]], [[-1, 0, 1, 2, 3, 4]]])
def test_a_plan_that_is_no_partition_is_refused(plan: list[list[int]]) -> None:
    policy = Planning()
    policy.plan = lambda num_rows: plan  # type: ignore[method-assign]
    with pytest.raises(ContractError, match=r"Planning\.plan_micro_batches must return every row of range\(6\)"):
        counted(policy)


def episode_batch(policy: EpisodePolicy) -> tuple[ExperienceBatch, Tensor, Tensor, Tensor]:
    """Six episodes in two groups; and, step by step: observations, moves, advantages."""
    states = [0.0] * 3 + [1.0] * 3
    actions = [policy._play(state) for state in states]
    rewards = [1.0, 2.0, 6.0, 0.0, 1.0, 5.0]
    lengths = torch.tensor([len(moves) for _, moves in actions])
    mask = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
    batch = ExperienceBatch.from_rows(states, actions, rewards, [0, 0, 0, 1, 1, 1], mask=mask)
    advantages = torch.tensor([-2.0, -1.0, 3.0, -2.0, -1.0, 3.0], dtype=torch.float64).repeat_interleave(lengths)
    return batch, *policy.split_steps(states, actions), advantages


def test_split_steps_become_shuffled_minibatches_whose_gradients_are_brute_force() -> None:
    """At rate 0 the policy stays the old one: the gradients of all minibatches, weighted by their steps, are those of
    all steps at once; batch_size counts steps, and each epoch draws every step once."""
    policy = EpisodePolicy()
    batch, observations, moves, advantages = episode_batch(policy)
    num_steps = len(moves)
    optimizer = RecordingSGD(policy, lr=0.0)
    trainer, _ = by_hand(
        policy=policy, optimizer=optimizer, config={"batch_size": 4, "num_epochs_per_update": 2, "seed": 3}
    )
    policy.rows_scored.clear()
    trainer.update(batch)
    sizes = [4] * (num_steps // 4) + ([num_steps % 4] if num_steps % 4 else [])
    assert policy.rows_scored == [6, *sizes, *sizes]  # whole episodes for the old policy, then steps
    assert len(optimizer.gradients) == 2 * len(sizes)
    whole = gradient_of(policy, -(policy.log_probs_of(observations, moves) * advantages).sum())
    for epoch in (optimizer.gradients[: len(sizes)], optimizer.gradients[len(sizes) :]):
        total = sum((size * found for size, found in zip(sizes, epoch, strict=True)), torch.zeros(()))
        torch.testing.assert_close(total, whole, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(optimizer.gradients[0], optimizer.gradients[len(sizes)])  # drawn anew


def test_one_update_of_all_split_steps_is_their_mean() -> None:
    policy = EpisodePolicy()
    batch, observations, moves, advantages = episode_batch(policy)
    expected = gradient_of(policy, -(policy.log_probs_of(observations, moves) * advantages).mean())
    optimizer = RecordingSGD(policy)
    trainer, _ = by_hand(policy=policy, optimizer=optimizer)
    metrics = trainer.update(batch)
    torch.testing.assert_close(optimizer.gradients[0], expected, rtol=1e-12, atol=1e-14)
    assert metrics["rewards/mean"] == 2.5
    assert metrics["steps/mean"] == pytest.approx(len(moves) / 6)


def test_rows_without_an_advantage_are_counted_as_rows_where_steps_are_split() -> None:
    """Rewards 1, 2, 3 and 0, 1, 2: the middle episode of each group has advantage 0, however many steps it has."""
    policy = EpisodePolicy()
    batch, *_ = episode_batch(policy)
    batch = dataclasses.replace(batch, rewards=torch.tensor([1.0, 2.0, 3.0, 0.0, 1.0, 2.0]))
    assert int(batch.mask[1].sum() + batch.mask[4].sum()) > 2
    assert by_hand(policy=policy)[0].update(batch)["rows/skipped_zero_advantage"] == 2.0


def test_a_policy_that_splits_into_another_number_of_steps_is_refused() -> None:
    class Short(EpisodePolicy):
        def split_steps(self, states: Any, actions: Any) -> tuple[Tensor, Tensor]:
            observations, moves = super().split_steps(states, actions)
            return observations[1:], moves[1:]

    policy = Short()
    batch, observations, *_ = episode_batch(EpisodePolicy())
    with pytest.raises(
        ContractError, match=rf"Short\.split_steps must return one row per valid step = {len(observations)}"
    ):
        by_hand(policy=policy)[0].update(batch)


# What can stand in


def test_a_callable_or_a_model_is_a_reward() -> None:
    class Model:
        def __init__(self) -> None:
            self.modes: list[str] = []

        def compute_rewards(self, states: Any, actions: Any) -> Tensor:
            self.modes.append("compute")
            assert not torch.is_grad_enabled()
            return torch.tensor(REWARDS)

        def train(self) -> None:
            self.modes.append("train")

        def eval(self) -> None:
            self.modes.append("eval")

        def to(self, device: Any) -> None:
            self.modes.append(f"to {device}")

    model = Model()
    policy = TablePolicy(script=SCRIPT)
    optimizer = torch.optim.SGD(policy.parameters(), lr=1.0)
    config = GRPOConfig(group_size=2, max_grad_norm=None, device="cpu")
    GRPOTrainer(config=config, policy=policy, reward_model=model, optimizer=optimizer).step(["a", "b"])
    assert policy.logits[0].tolist() == [0.125, -0.125]
    assert model.modes == ["to cpu", "eval", "compute"]


def test_a_custom_objective_stands_in_for_the_loss() -> None:
    """loss = sum of log-probs over all rows, whatever the rewards: its gradient is sum over rows of (e - p)."""
    seen: list[ObjectiveInputs] = []

    def total(inputs: ObjectiveInputs) -> ObjectiveOutput:
        seen.append(inputs)
        loss = inputs.log_probs.sum()
        one = torch.tensor([1.0, 42.0, 42.0**2], dtype=torch.float64)
        return ObjectiveOutput(loss=loss, metrics={"answer": one})

    script = [[0, 0], [1, 0]]
    trainer, policy = by_hand(policy=TablePolicy(script=script), rewards=[5.0] * 4, objective=total)
    metrics = trainer.step(["a", "b"])
    assert policy.logits.tolist() == [[-1.0, 1.0], [0.0, 0.0]]
    assert metrics["train/answer"] == 42.0
    (inputs,) = seen
    assert inputs.advantages.tolist() == [0.0] * 4
    assert inputs.weights.tolist() == [[0.25]] * 4
    assert inputs.mask.tolist() == [[True]] * 4


@pytest.mark.parametrize("per_step", [False, True])
def test_custom_advantages_stand_in_for_the_estimator(per_step: bool) -> None:
    """Advantages 8, 0, 0, 0: only row (a, 0) counts, with weight 1/4: logits[a] moves by 2 (e0 - p) = (1, -1)."""
    values = torch.tensor([8.0, 0.0, 0.0, 0.0])
    trainer, policy = by_hand(advantages=lambda batch: values.unsqueeze(1) if per_step else values)
    metrics = trainer.step(["a", "b"])
    assert policy.logits.tolist() == [[1.0, -1.0], [0.0, 0.0]]
    assert metrics["rows/skipped_zero_advantage"] == 3.0


def test_custom_advantages_are_numbers_to_the_loss() -> None:
    """As a critic gives them, with a graph, which is left alone; the second pass, at a ratio of 1.76, is clipped."""
    values = torch.tensor([8.0, 0.0, 0.0, 0.0], requires_grad=True)
    trainer, policy = by_hand(advantages=lambda batch: 1.0 * values, config={"num_epochs_per_update": 2})
    trainer.step(["a", "b"])
    assert policy.logits.tolist() == [[1.0, -1.0], [0.0, 0.0]]
    assert values.grad is None


# Numbers and modes


def test_bfloat16_autocast_computes_in_it_and_trains_in_float32() -> None:
    gradients = []
    for dtype in (None, "bfloat16"):
        torch.manual_seed(4)
        policy = VectorPolicy(hidden=32)
        optimizer = RecordingSGD(policy, lr=1e-3)
        states = torch.randn(8, 3).repeat_interleave(4, 0)
        actions = torch.randint(4, (32,))
        batch = ExperienceBatch.from_rows(
            states, actions, torch.rand(32), torch.arange(8).repeat_interleave(4), mask=torch.ones(32, 1).bool()
        )
        trainer, _ = by_hand(policy=policy, optimizer=optimizer, config={"autocast_dtype": dtype})
        trainer.update(batch)
        assert policy.computed_in == [torch.float32 if dtype is None else torch.bfloat16]
        assert {tensor.dtype for tensor in policy.parameters()} == {torch.float32}
        gradients.append(optimizer.gradients[0])
    error = (gradients[1] - gradients[0]).norm() / gradients[0].norm()
    assert 0 < error < 0.03  # bfloat16 has 8 bits: 2^-8 = 0.004 per operation


def test_sampling_and_scoring_run_under_autocast_too() -> None:
    policy = VectorPolicy()
    trainer, _ = by_hand(policy=policy, rewards=[0.0, 1.0, 0.0, 1.0], config={"autocast_dtype": "bfloat16"})
    trainer.step(torch.randn(2, 3))
    assert set(policy.computed_in) == {torch.bfloat16}


def test_a_policy_with_dropout_is_told_so_once() -> None:
    policy = VectorPolicy(dropout=0.5, hidden=32)
    with torch.no_grad():
        policy.net[-1].weight.mul_(10)
    trainer, _ = by_hand(
        policy=policy,
        rewards=lambda s, actions: [float(a) for a in actions],
        config={"group_size": 8, "num_epochs_per_update": 2},
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            trainer.step(torch.randn(4, 3))
    messages = [str(warning.message) for warning in caught if "train()" in str(warning.message)]
    assert len(messages) == 1
    assert re.search(r"VectorPolicy: before any update.*first ratio is not 1.*[Dd]ropout", messages[0])


def test_a_policy_without_dropout_is_not_told() -> None:
    trainer, _ = by_hand(policy=VectorPolicy(), rewards=lambda s, actions: [float(a) for a in actions])
    for _ in range(3):
        trainer.step(torch.randn(4, 3))


def test_modes_while_collecting_and_while_updating() -> None:
    modes: list[tuple[str, bool]] = []

    class Watched(TablePolicy):
        def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> Any:
            modes.append(("generate", self.training))
            return super().generate_actions(states, num_actions_per_state)

        def get_log_probabilities(self, states: Any, actions: Any) -> Tensor:
            modes.append(("gradient" if torch.is_grad_enabled() else "score", self.training))
            return super().get_log_probabilities(states, actions)

    trainer, _ = by_hand(policy=Watched(script=SCRIPT), config={"num_epochs_per_update": 2})
    trainer.step(["a", "b"])
    assert modes == [("generate", False), ("score", False), ("gradient", True), ("gradient", True)]


# Nothing to learn from


def test_updates_of_dead_groups_are_skipped_counted_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Two updates of one group each, both without differences, for two epochs."""
    trainer, policy = by_hand(
        rewards=[1.0, 1.0, 7.0, 7.0],
        config={"batch_size": 2, "num_epochs_per_update": 2},
        optimizer=None,
    )
    before = digest(weights_of(policy))
    metrics, _ = trainer.step(["a", "b"]), trainer.step(["a", "b"])
    ((logger, level, said),) = caplog.record_tuples
    assert (logger, level) == ("grpo", logging.WARNING)
    assert said.startswith("all groups are dead: an iteration had nothing to learn from")
    assert digest(weights_of(policy)) == before
    assert trainer.gradient.optimizer is not None
    assert not trainer.gradient.optimizer.state  # Adam has not counted a step
    assert metrics["train/skipped_updates"] == 4.0
    assert metrics["group_stats/zero_variance_fraction"] == 1.0
    assert metrics["rows/skipped_zero_advantage"] == 4.0


def test_one_dead_group_of_two_skips_its_update_alone(caplog: pytest.LogCaptureFixture) -> None:
    trainer, policy = by_hand(rewards=[1.0, 0.0, 7.0, 7.0], config={"batch_size": 2})
    metrics = trainer.step(["a", "b"])
    assert not caplog.records  # that is an ordinary iteration
    assert metrics["train/skipped_updates"] == 1.0
    assert policy.logits.tolist() == [[0.25, -0.25], [0.0, 0.0]]  # an update of two rows: weights 1/2


def test_dead_groups_still_update_where_the_kl_has_a_gradient() -> None:
    """d/d logits of 0.5 (1/4) sum over rows of k3: per row 0.5/4 (1 - exp(-x)) (e - p); x = ln 2, ln 2/3."""
    objective = ObjectiveConfig(kl_coef=0.5)
    trainer, policy = by_hand(rewards=[1.0] * 4, reference_policy=quarters(), config={"objective": objective})
    metrics = trainer.step(["a", "b"])
    entry = 0.125 * (0.5 * 0.5 + (-0.5) * (-0.5))
    torch.testing.assert_close(policy.logits.detach(), torch.tensor([[-entry, entry]] * 2, dtype=torch.float64))
    assert metrics["train/skipped_updates"] == metrics["rows/skipped_zero_advantage"] == 0.0


def test_dead_groups_still_update_where_the_entropy_has_a_gradient() -> None:
    """-0.5 mean(-rho sg(log p)): per row 0.5/4 log p (e - p). From p = (1/4, 3/4), actions 0 and 1 of each state."""
    objective = ObjectiveConfig(entropy_coef=0.5, entropy_estimator="score_function")
    policy = TablePolicy(logits=[[0.0, math.log(3.0)]] * 2, script=SCRIPT)
    start = policy.logits.detach().clone()
    trainer, _ = by_hand(policy=policy, rewards=[1.0] * 4, config={"objective": objective})
    metrics = trainer.step(["a", "b"])
    low, high = math.log(0.25), math.log(0.75)
    gradient = 0.125 * (low * 0.75 - high * 0.25)
    torch.testing.assert_close(
        policy.logits.detach() - start,
        torch.tensor([[-gradient, gradient]] * 2, dtype=torch.float64),
        rtol=1e-9,
        atol=1e-12,
    )
    assert metrics["train/skipped_updates"] == 0.0


@pytest.mark.parametrize("aggregation", ["row_mean", "step_mean", "group_mean"])
@pytest.mark.parametrize("batch_size", [None, 4])
def test_rows_without_an_advantage_are_skipped_and_the_gradient_is_the_same(
    aggregation: Any, batch_size: int | None
) -> None:
    """A custom objective that calls the built-in one switches the skipping off."""
    objective = ObjectiveConfig(aggregation=aggregation)
    recorded = []
    for custom in (None, lambda inputs: grpo_objective(inputs, objective)):
        torch.manual_seed(3)
        policy = RowScoring()
        optimizer = RecordingSGD(policy)
        trainer, _ = by_hand(
            policy=policy,
            optimizer=optimizer,
            objective=custom,
            config={"objective": objective, "seed": 2, "batch_size": batch_size, "num_epochs_per_update": 2},
        )
        states = [0, 0, 0, 1, 1, 2, 2, 2]
        actions = [(1, 0), (2, 2, 0), (0,), (1, 1), (0,), (2, 0), (1, 1, 1, 1), (0,)]
        mask = torch.tensor([[place < len(action) for place in range(4)] for action in actions])
        rewards = [0.0, 1.0, 2.0, 5.0, 5.0, 1.0, 1.0, 7.0]  # row 1 and the whole second group have advantage 0
        policy.rows_scored.clear()
        metrics = trainer.update(ExperienceBatch.from_rows(states, actions, rewards, states, mask=mask))
        recorded.append((flat(optimizer.gradients), metrics["rows/skipped_zero_advantage"], sum(policy.rows_scored)))
    (skipping, num_skipped, forwarded), (whole, none_skipped, all_forwarded) = recorded
    torch.testing.assert_close(skipping, whole, rtol=1e-12, atol=1e-14)
    assert (num_skipped, none_skipped) == (3.0, 0.0)
    assert all_forwarded - forwarded == 2 * 3  # in each of two epochs
