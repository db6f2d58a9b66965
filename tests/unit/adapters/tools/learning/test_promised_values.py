"""Updates of a policy that chooses tools, under the presets for tools, with numbers worked out by hand."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adapters.tools.catalogue.calls import ToolCall
from adapters.tools.learning.buffers import GroupBuffer
from adapters.tools.learning.records import ToolSample
from adapters.tools.learning.sample_batches import batch_from_groups
from grpo import (
    ActionScores,
    AdvantageEstimator,
    ExperienceBatch,
    GRPOConfig,
    GRPOTrainer,
    presets,
)

TOOLS = ("first", "second", "third")
REWARDS = [0.8, 0.6, 0.9, 0.5]
# mean .7; deviations .1, -.1, .2, -.2; variance (.01 + .01 + .04 + .04) / 4 = .025; std .158114
ADVANTAGES = [0.632456, -0.632456, 1.264911, -1.264911]


class TwoNumbers(nn.Module):
    """A policy of two parameters: the logits of three tools are a, b and 0, whatever the state."""

    def __init__(self, a: float = 0.0, b: float = 0.0) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor(a, dtype=torch.float64))
        self.b = nn.Parameter(torch.tensor(b, dtype=torch.float64))

    def log_probs(self) -> Tensor:
        return torch.stack([self.a, self.b, torch.zeros_like(self.a)]).log_softmax(0)

    def score_actions(self, states: Any, actions: Any) -> ActionScores:
        every = self.log_probs()
        log_probs = every[[TOOLS.index(call.tool) for call in actions]].unsqueeze(1)
        entropy = -(every.exp() * every).sum().expand(log_probs.shape)
        return ActionScores(log_probs=log_probs, mask=torch.ones_like(log_probs, dtype=torch.bool), entropy=entropy)

    def get_log_probabilities(self, states: Any, actions: Any) -> Tensor:
        return self.score_actions(states, actions).log_probs.squeeze(1)

    def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> Any:
        drawn = torch.multinomial(self.log_probs().exp(), len(states) * num_actions_per_state, True)
        return [[ToolCall(tool=TOOLS[place]) for place in row] for row in drawn.view(len(states), -1).tolist()]

    def get_parameters(self) -> dict[str, Tensor]:
        return dict(self.named_parameters())


def four_samples() -> list[ToolSample]:
    """One group: the first tool twice, the second, and the third, drawn from the uniform policy."""
    chosen = ("first", "second", "third", "first")
    return [
        ToolSample(state="what now?", tool=tool, log_prob=(-math.log(3),), reward=reward)
        for tool, reward in zip(chosen, REWARDS, strict=True)
    ]


def trainer_of(config: GRPOConfig, policy: TwoNumbers, **others: Any) -> GRPOTrainer:
    return GRPOTrainer(config=config, policy=policy, reward_model=lambda states, actions: [0.0] * len(states), **others)


def one_update(config: GRPOConfig) -> GRPOConfig:
    return dataclasses.replace(config, num_epochs_per_update=1)


# --- the presets for tools


def test_every_preset_for_tools_trains_on_drained_samples(subtests: pytest.Subtests) -> None:
    for name in ("tool_default", "tool_use", "tool_exploration", "tool_stable"):
        with subtests.test(name):
            buffer = GroupBuffer[str, ToolSample]()
            buffer.extend("task", four_samples())
            policy = TwoNumbers()
            config: GRPOConfig = getattr(presets, name)()
            metrics = trainer_of(config, policy, reference_policy=TwoNumbers()).update(
                batch_from_groups(buffer.drain())
            )
            assert metrics["train/num_updates"] == config.num_epochs_per_update
            # the third tool had the best reward, and its logit is fixed at 0: those of the other two, .8 and .5, and .6, fall
            assert policy.a < 0 > policy.b


# --- advantages


def test_group_advantages_of_the_preset_equal_hand_worked_values() -> None:
    estimator = AdvantageEstimator(presets.tool_default().advantage)
    found = estimator(batch_from_groups({"one": four_samples(), "other": four_samples()[:2]}))
    # .8 and .6 alone: mean .7, deviations .1 and -.1, std .1
    assert found.tolist() == pytest.approx([*ADVANTAGES, 1.0, -1.0], abs=1e-6)


# --- the result of an update


def test_every_metric_of_an_update_equals_hand_worked_values() -> None:
    """A uniform policy, (1/3, 1/3, 1/3); its reference has (1/2, 1/4, 1/4): logits log 2, 0, 0.

    policy loss  -(sum of advantages) / 4 = 0: the ratio is 1
    KL           k3 = ref / pi - 1 - log(ref / pi); first: 1.5 - 1 - .405465 = .094535; others: .75 - 1 + .287682 = .037682;
                 rows first, second, third, first: (2 * .094535 + 2 * .037682) / 4 = .066108
    entropy      log 3 = 1.098612
    total        0 + .02 * .066108 - .01 * 1.098612 = -.009664
    gradient     of the surrogate: -1/4 sum A (chosen - 1/3) = -1/4 (.632456 - 1.264911, -.632456) = (.158114, .158114)
                 of k3: 1 - ref / pi is -.5, .25, .25, -.5, their sum -.5;
                 a: (-.5 - .5 + .5/3) / 4 = -.208333; b: (.25 + .5/3) / 4 = .104167; times .02: (-.004167, .002083)
                 of the entropy: 0, for it is at its maximum
                 norm of (.153947, .160197): sqrt(.0237 + .025663) = .222178
    """
    policy, reference = TwoNumbers(), TwoNumbers(a=math.log(2))
    trainer = trainer_of(one_update(presets.tool_default()), policy, reference_policy=reference)
    metrics = trainer.update(batch_from_groups({"task": four_samples()}))
    expected = {
        "train/policy_loss": 0.0,
        "train/kl_mean": 0.066108,
        "train/kl_penalty": 0.02 * 0.066108,
        "train/entropy": 1.098612,
        "train/entropy_bonus": 0.01 * 1.098612,
        "train/total_loss": -0.009664,
        "train/grad_norm": 0.222178,
        "train/advantages_mean": 0.0,
        "train/clip_fraction": 0.0,
        "train/kl_coef": 0.02,
        "train/kl_coef_next": 0.03,  # .066 is more than 1.5 times the target, .01
        "train/num_updates": 1.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, abs=1e-6)
    assert metrics["group_stats/num_groups"] * metrics["group_stats/avg_group_size"] == 4  # samples


def test_the_reported_gradient_norm_equals_the_norm_of_the_gradient() -> None:
    """Against autograd, with the loss written out anew, where nothing is uniform; `max_grad_norm` is below it."""
    policy, reference = TwoNumbers(0.7, -0.4), TwoNumbers(-0.2, 0.5)
    batch = batch_from_groups({"task": four_samples()})
    log_probs = policy.log_probs()
    rows, ref_rows = log_probs[[0, 1, 2, 0]], reference.log_probs().detach()[[0, 1, 2, 0]]
    ratio = (rows - rows.detach()).exp()
    advantages = torch.tensor(ADVANTAGES, dtype=torch.float64)
    k3 = (ref_rows - rows).exp() - 1 - (ref_rows - rows)
    entropy = -(log_probs.exp() * log_probs).sum()
    total = -(ratio * advantages).mean() + 0.02 * k3.mean() - 0.01 * entropy
    gradient = torch.stack(torch.autograd.grad(total, [policy.a, policy.b]))
    expected = total.item()

    config = dataclasses.replace(one_update(presets.tool_default()), max_grad_norm=0.01)
    trainer = trainer_of(
        config,
        policy,
        reference_policy=reference,
        optimizer=torch.optim.SGD(policy.parameters(), lr=1.0),
    )
    before = torch.stack([policy.a, policy.b]).detach()
    metrics = trainer.update(batch)
    assert metrics["train/total_loss"] == pytest.approx(expected, abs=1e-6)
    assert metrics["train/grad_norm"] == pytest.approx(float(gradient.norm()), abs=1e-6)
    assert metrics["train/grad_norm"] > 0.1
    assert metrics["train/grad_norm"] != pytest.approx(abs(expected) ** 0.5, rel=0.1)  # nor the root of the loss
    moved = before - torch.stack([policy.a, policy.b]).detach()
    torch.testing.assert_close(moved, gradient * 0.01 / gradient.norm(), rtol=1e-4, atol=1e-9)


def test_the_clip_fraction_equals_hand_worked_values() -> None:
    """Two passes, with SGD at a rate of 2 and neither KL nor entropy.

    First: the ratios are 1; the gradient is (.158114, .158114), so a = b = -.316228.
    Second: e^a = .728893, over 1 + 2 * .728893: pi = (.296565, .296565, .406870). Ratios to 1/3: .8897 .8897 1.2206 .8897.
    1.2206 is above 1.2 and its advantage positive: one of 4 steps is clipped, one of 8 over both passes.
    """
    plain = dataclasses.replace(presets.tool_default().objective, kl_coef=0.0, entropy_coef=0.0)
    config = dataclasses.replace(presets.tool_default(), objective=plain, kl_control=None, num_epochs_per_update=2)
    policy = TwoNumbers()
    trainer = trainer_of(config, policy, optimizer=torch.optim.SGD(policy.parameters(), lr=2.0))
    metrics = trainer.update(batch_from_groups({"task": four_samples()}))
    assert metrics["train/clip_fraction"] == pytest.approx(1 / 8)
    assert metrics["train/clip_fraction_high"] == pytest.approx(1 / 8)
    assert metrics["train/ratio_mean"] == pytest.approx((4 + 3 * 0.889695 + 1.220610) / 8, abs=1e-5)


# --- what is left over of the mini-batches


def test_an_update_also_uses_the_remaining_rows() -> None:
    rows_seen: list[int] = []

    class Counting(TwoNumbers):
        def score_actions(self, states: Any, actions: Any) -> ActionScores:
            if torch.is_grad_enabled():
                rows_seen.append(len(actions))
            return super().score_actions(states, actions)

    count = 70
    batch = ExperienceBatch.from_rows(
        states=["s"] * count,
        actions=[ToolCall(tool=TOOLS[row % 3]) for row in range(count)],
        rewards=[float(row % 5) for row in range(count)],
        group_ids=[row // 7 for row in range(count)],
    )
    config = one_update(presets.tool_default())
    metrics = trainer_of(config, Counting(), reference_policy=TwoNumbers()).update(batch)
    assert metrics["train/num_updates"] == 3
    assert sorted(rows_seen) == [6, 32, 32]
