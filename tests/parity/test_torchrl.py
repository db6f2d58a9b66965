"""Losses, gradients and advantages against torchrl: its loss modules, on tables of log-probs and values for a model."""

import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grpo import (
    ObjectiveConfig,
    ObjectiveInputs,
    group_relative_advantages,
    grpo_objective,
    step_weights,
)
from grpo.advantage_estimator import discounted_returns, generalized_advantages
from grpo.surrogates import Cispo, Clip
from tests.support.peer_cases import Case, assert_equal, assert_equal_losses, draws, random_case


@cache
def peer() -> SimpleNamespace:
    """The parts of torchrl and tensordict that the tests use. The first test imports them, so that collecting stays fast."""
    pytest.importorskip("torchrl", minversion="0.14", reason='needs torchrl: pip install -e ".[bench]"')
    with warnings.catch_warnings():  # what its dependencies deprecate is not ours to fix
        warnings.simplefilter("ignore")
        import tensordict
        import tensordict.nn
        import torchrl.objectives.llm
        import torchrl.objectives.value.functional
    return SimpleNamespace(
        data=tensordict,
        modules=tensordict.nn,
        objectives=torchrl.objectives,
        llm=torchrl.objectives.llm,
        functional=torchrl.objectives.value.functional,
    )


@pytest.fixture(autouse=True)
def float64_buffers() -> Iterator[None]:
    """The modules keep their bounds as tensors of the default dtype."""
    peer()  # before the default changes
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@dataclass(frozen=True)
class GivenSteps:
    """What torchrl asks of a distribution over the steps of a language model."""

    log_probs: Tensor
    entropies: Tensor
    mask: Tensor

    def log_prob(self, actions: Tensor) -> Tensor:
        return self.log_probs

    def entropy(self) -> Tensor:
        return self.entropies


class GivenPolicy(nn.Module):
    """Stands for a language model."""

    def __init__(self, steps: GivenSteps) -> None:
        super().__init__()
        self.steps = steps

    def get_dist(self, tensordict: Any, logits_key: str) -> GivenSteps:
        return self.steps


def off_policy_case(seed: int, choose: random.Random, generator: torch.Generator) -> Case:
    """One that has old log-probs and a valid step."""
    while True:
        case = random_case(seed, choose, generator)
        if case.old_log_probs is not None and case.mask.any():
            return case


def language_model_batch(case: Case) -> Any:
    advantages = case.advantages if case.advantages.dim() == 2 else case.advantages.unsqueeze(1)
    return peer().data.TensorDict(
        {
            ("tokens", "full"): torch.zeros_like(case.mask, dtype=torch.long),
            ("log_probs", "full"): case.old_log_probs,
            ("next", "ref_log_probs", "full"): case.ref_log_probs,
            "advantage": advantages.expand_as(case.mask).unsqueeze(-1).clone(),
        },
        [len(case.mask)],
    )


def inputs_of(case: Case, log_probs: Tensor, weights: Tensor, **others: Tensor) -> ObjectiveInputs:
    return ObjectiveInputs(
        log_probs=log_probs,
        old_log_probs=case.old_log_probs,
        advantages=case.advantages,
        mask=case.mask,
        weights=weights,
        **others,
    )


def gradients(loss: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, leaves, retain_graph=True, materialize_grads=True)


@pytest.mark.parametrize(("theirs", "ours"), [("token_mean", "step_mean"), ("prompt_mean", "row_mean")])
def test_the_clip_loss_equals_torchrls_grpo_loss(theirs: str, ours: str) -> None:
    """`GRPOLoss`: the clipped surrogate and the entropy bonus, and the divergence, which it always averages over N T."""
    for seed, choose, generator in draws(20, 150):
        case = off_policy_case(seed, choose, generator)
        low, high = choose.choice([(0.2, 0.2), (0.2, 0.28), (0.0003, 0.0004), (0.9, 3.0)])
        leaves = case.log_probs.clone().requires_grad_(), case.entropy.clone().requires_grad_()
        module = peer().llm.GRPOLoss(
            GivenPolicy(GivenSteps(*leaves, case.mask)),
            clip_epsilon=(low, high),
            aggregation=theirs,
            entropy_coeff=0.1,
            kl_to_ref_coeff=0.04,
        )
        output = module(language_model_batch(case))
        config = ObjectiveConfig(surrogate=Clip(low=low, high=high), entropy_coef=0.1)
        policy = grpo_objective(
            inputs_of(case, leaves[0], step_weights(case.mask, ours), entropy=leaves[1]), config
        ).loss
        expected = (output.loss_objective + output.loss_entropy).squeeze()
        named = {"log_probs": leaves[0], "entropy": leaves[1]}
        assert_equal_losses(f"GRPOLoss, {theirs}", policy, expected, named, f"seed {seed}, {config}")

        only_kl = replace(case, advantages=torch.zeros_like(case.advantages))
        weights = step_weights(case.mask, "fixed_length", fixed_length=case.mask.shape[1])
        config = ObjectiveConfig(kl_coef=0.04)
        divergence = grpo_objective(
            inputs_of(only_kl, leaves[0], weights, ref_log_probs=case.ref_log_probs), config
        ).loss
        case_of = f"seed {seed}, {config}"
        assert_equal_losses("KL to the reference", divergence, output.loss_kl_to_ref, {"log_probs": leaves[0]}, case_of)


def test_the_cispo_gradient_equals_torchrls_inside_the_bounds() -> None:
    """torchrl's loss has no log pi in it: its value per step is the paper's gradient (arXiv:2506.13585, eq. 4), and its
    gradient is the paper's inside the bounds and 0 outside, where the paper's is the bound times A."""
    peer_loss = peer().llm.CISPOLoss
    for seed, choose, generator in draws(21, 150):
        case = off_policy_case(seed, choose, generator)
        low, high = choose.choice([(0.2, 0.28), (0.9, 3.0)])
        log_probs = case.log_probs.clone().requires_grad_()
        weights = step_weights(case.mask, "step_mean")
        config = ObjectiveConfig(surrogate=Cispo(low=low, high=high))
        (ours,) = gradients(grpo_objective(inputs_of(case, log_probs, weights), config).loss, log_probs)
        actor = GivenPolicy(GivenSteps(log_probs, case.entropy, case.mask))
        per_step, reduced = (
            peer_loss(actor, clip_epsilon=(low, high), aggregation=kind)(language_model_batch(case)).loss_objective
            for kind in ("none", "token_mean")
        )
        expected = per_step.detach().squeeze(-1) * weights
        assert_equal("CISPO, gradient per step", ours, expected, f"seed {seed}, {config}")
        ratio = (case.log_probs - case.old_log_probs).exp()
        inside = (ratio > 1.0 - low) & (ratio < 1.0 + high)
        (theirs,) = gradients(reduced.sum(), log_probs)
        inner = torch.where(inside, ours, 0.0)
        assert_equal("CISPO, gradient inside the bounds", inner, theirs, f"seed {seed}, {config}")


class Table(nn.Module):
    """Rows of parameters, looked up by number."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = nn.Parameter(rows)

    def forward(self, index: Tensor) -> Tensor:
        return self.rows[index]


def test_the_clip_loss_with_a_critic_equals_torchrls_clip_ppo_loss() -> None:
    """`ClipPPOLoss` of a categorical actor and a critic over the valid steps, down to the gradient in logits and values."""
    for seed, choose, generator in draws(22, 150):
        case = off_policy_case(seed, choose, generator)
        count, num_actions = int(case.mask.sum()), 4

        def normal(*shape: int, generator: torch.Generator = generator) -> Tensor:
            return torch.randn(*shape, generator=generator)

        logits, values = normal(count, num_actions), normal(count, 1)
        actions = torch.randint(num_actions, (count,), generator=generator)
        old_log_probs = (logits + choose.choice([0.1, 1.0]) * normal(count, num_actions)).log_softmax(1)
        steps = peer().data.TensorDict(
            {
                "step": torch.arange(count),
                "action": actions,
                "action_log_prob": old_log_probs[torch.arange(count), actions],
                "advantage": case.advantages.reshape(len(case.mask), -1).expand_as(case.mask)[case.mask].unsqueeze(1),
                "value_target": values + normal(count, 1),
                "state_value": values + 0.3 * normal(count, 1),
            },
            [count],
        )
        low, high = choose.choice([(0.2, 0.2), (0.2, 0.28), (0.9, 3.0)])
        value_clip = choose.choice([None, 0.1, 0.5])
        actor, critic = Table(logits), Table(values)
        module = peer().objectives.ClipPPOLoss(
            peer().modules.ProbabilisticTensorDictSequential(
                peer().modules.TensorDictModule(actor, in_keys=["step"], out_keys=["logits"]),
                peer().modules.ProbabilisticTensorDictModule(
                    in_keys=["logits"], out_keys=["action"], distribution_class=torch.distributions.Categorical
                ),
            ),
            peer().modules.TensorDictModule(critic, in_keys=["step"], out_keys=["state_value"]),
            clip_epsilon=(low, high),
            entropy_coeff=0.1,
            critic_coeff=0.5,
            loss_critic_type="l2",
            clip_value=value_clip,
        )
        output = module(steps)
        theirs = output["loss_objective"] + output["loss_entropy"] + output["loss_critic"]

        def on_steps(per_step: Tensor, mask: Tensor = case.mask) -> Tensor:
            return torch.full(mask.shape, torch.nan).masked_scatter(mask, per_step)

        categorical = torch.distributions.Categorical(logits=actor.rows)
        inputs = ObjectiveInputs(
            log_probs=on_steps(categorical.log_prob(actions)),
            old_log_probs=on_steps(steps["action_log_prob"]),
            advantages=case.advantages,
            mask=case.mask,
            weights=step_weights(case.mask, "step_mean"),
            entropy=on_steps(categorical.entropy()),
            values=on_steps(critic.rows.squeeze(1)),
            old_values=on_steps(steps["state_value"].squeeze(1)),
            returns=on_steps(steps["value_target"].squeeze(1)),
        )
        config = ObjectiveConfig(
            surrogate=Clip(low=low, high=high), entropy_coef=0.1, value_coef=0.5, value_clip=value_clip
        )
        ours = grpo_objective(inputs, config).loss
        where = f"seed {seed}, {config}"
        assert_equal("ClipPPOLoss, loss", ours, theirs, where)
        own, other = gradients(ours, actor.rows, critic.rows), gradients(theirs, *module.parameters())
        for name, mine, its in zip(("logits", "values"), own, other, strict=True):
            assert_equal(f"ClipPPOLoss, gradient in {name}", mine, its, where)


def ragged(choose: random.Random, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A mask of rows that end at different steps, at least one long, and where their last step is."""
    count, width = choose.randint(1, 6), choose.randint(1, 8)
    lengths = torch.randint(1, width + 1, (count, 1), generator=generator)
    steps = torch.arange(width)
    return steps < lengths, steps == lengths - 1


def test_generalized_advantages_equal_torchrls() -> None:
    for seed, choose, generator in draws(23, 300):
        mask, last = ragged(choose, generator)
        rewards, values = (torch.randn(mask.shape, generator=generator) for _ in range(2))
        truncated = torch.rand(len(mask), generator=generator) < 0.5
        final_values = torch.where(truncated, torch.randn(len(mask), generator=generator), 0.0)
        gamma, gae_lambda = choose.choice([0.0, 0.9, 1.0]), choose.choice([0.0, 0.95, 1.0])
        following = torch.cat([values[:, 1:], values.new_zeros(len(mask), 1)], 1)
        columns = (
            values,
            torch.where(last, final_values.unsqueeze(1), following),
            rewards,
            last,
            last & ~truncated.unsqueeze(1),
        )
        theirs, _ = peer().functional.generalized_advantage_estimate(
            gamma, gae_lambda, *(column.unsqueeze(-1) for column in columns)
        )
        ours = generalized_advantages(
            rewards.masked_fill(~mask, torch.nan),
            values.masked_fill(~mask, torch.nan),
            mask,
            final_values if choose.random() < 0.8 or truncated.any() else None,
            gamma=gamma,
            gae_lambda=gae_lambda,
        )
        case = f"seed {seed}, gamma {gamma}, lambda {gae_lambda}"
        assert_equal("GAE", ours, torch.where(mask, theirs.squeeze(-1), 0.0), case)


def test_discounted_returns_equal_torchrls_reward2go() -> None:
    """torchrl's convolution needs a discount above 0 and more than one step."""
    for seed, choose, generator in draws(24, 300):
        mask, last = ragged(choose, generator)
        if mask.shape[1] == 1:
            continue
        rewards, gamma = torch.randn(mask.shape, generator=generator), choose.choice([0.5, 0.9, 1.0])
        theirs = peer().functional.reward2go(rewards, last, gamma, time_dim=-1)
        ours = discounted_returns(rewards.masked_fill(~mask, torch.nan), mask, gamma)
        assert_equal("discounted returns", ours[mask], theirs[mask], f"seed {seed}, gamma {gamma}")


def test_group_advantages_equal_torchrls_mc_advantage() -> None:
    """`MCAdvantage` bounds the standard deviation from below by 1e-6, where we add nothing: nothing here is that close."""
    for seed, choose, generator in draws(25, 100):
        group_size, width = choose.randint(2, 6), choose.randint(1, 4)
        rewards = torch.randn(group_size, width, generator=generator)
        if choose.random() < 0.3:
            rewards = torch.full_like(rewards, 0.25)
        transform = peer().llm.MCAdvantage(group_size, prompt_key="group", trajectory_return="sum")
        end = torch.arange(width) == width - 1
        written = None
        for row in rewards:
            step = peer().data.TensorDict({"reward": row.unsqueeze(1), "done": end.unsqueeze(1)}, [width])
            written = transform.inv(
                peer().data.TensorDict({"group": torch.zeros(width, dtype=torch.long), "next": step}, [width])
            )
        theirs = written["advantage"].view(group_size, width)
        ours = group_relative_advantages(rewards.sum(1), torch.zeros(group_size, dtype=torch.long), scale="group")
        case = f"seed {seed}, rewards {rewards.tolist()}"
        assert_equal("group advantages", ours.unsqueeze(1).expand_as(theirs), theirs, case)
