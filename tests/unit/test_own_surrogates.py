"""A surrogate of the user's own, with a setting of its own, trained through `GRPOTrainer`.

The KL, the entropy bonus, the sampler correction and the metrics stay those of `grpo_objective`.
"""

import copy
import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from grpo import AdvantageEstimator, ConfigError, GRPOConfig, GRPOTrainer, ObjectiveConfig, Truncate, step_weights
from grpo.surrogates import Steps
from tests.support.configs import Rows, Telling, make_policy, make_trainer
from tests.support.policies import RowScoring, TablePolicy, gradient_of

pytestmark = pytest.mark.usefixtures("without_type_checks")


@dataclass(frozen=True)
class SoftClip:
    """l[n,t] = -A[n,t] width tanh((rho[n,t] - 1) / width): the ratio moves by no more than the width."""

    width: float = 0.5

    def __call__(self, steps: Steps) -> Tensor:
        return -steps.advantages * self.width * torch.tanh((steps.ratio() - 1) / self.width)

    def stopped(self, steps: Steps) -> tuple[Tensor, Tensor]:
        """Steps that have moved by more than twice the width."""
        moved = steps.ratio() - 1
        return moved < -2 * self.width, moved > 2 * self.width


HIGH, KL_COEF, ENTROPY_COEF = 1.5, 0.3, 0.2


def config_of(surrogate: Any, num_epochs: int = 2, **objective: Any) -> GRPOConfig:
    settings = {"sampler_correction": Truncate(high=HIGH), "kl_coef": KL_COEF, "entropy_coef": ENTROPY_COEF}
    return GRPOConfig(
        num_epochs_per_update=num_epochs,
        max_grad_norm=None,
        seed=0,
        objective=ObjectiveConfig(surrogate=surrogate, **settings | objective),
    )


def loss_by_hand(policy: Any, old_policy: Any, config: GRPOConfig, width: float) -> tuple[Tensor, dict[str, Tensor]]:
    """The whole loss and its metrics from the policy's log-probs, without `grpo_objective` and `Steps`."""
    rows = Rows.example()
    batch = rows.batch(config)
    mask = batch.mask
    scores, old, reference = (
        one.score_actions(batch.states, batch.actions) for one in (policy, old_policy, make_policy(RowScoring, seed=1))
    )
    weights = step_weights(mask, "row_mean")[mask]
    log_probs, old_log_probs, ref_log_probs = (
        one.log_probs[mask] for one in (scores, replace_detached(old), replace_detached(reference))
    )
    behaviour = batch.behaviour_log_probs[mask]
    u = (old_log_probs - torch.where(behaviour.isnan(), old_log_probs, behaviour)).exp().clamp(max=HIGH)
    advantages = AdvantageEstimator(config.advantage)(batch).unsqueeze(1).expand(mask.shape)[mask]
    rho = (log_probs - old_log_probs).exp()
    x = log_probs - ref_log_probs
    terms = {
        "policy_loss": (weights * u * -advantages * width * torch.tanh((rho - 1) / width)).sum(),
        "kl_penalty": KL_COEF * (weights * ((-x).exp() + x - 1)).sum(),
        "entropy_bonus": ENTROPY_COEF * (weights * scores.entropy[mask]).sum(),
    }
    loss = terms["policy_loss"] + terms["kl_penalty"] - terms["entropy_bonus"]
    further = {
        "ratio_mean": rho.mean(),
        "sampler_ratio_mean": u.mean(),
        "kl_mean": ((-x).exp() + x - 1).mean(),
        "clip_fraction": ((rho - 1).abs() > 2 * width).double().mean(),
    }
    return loss, {"total_loss": loss, **terms, **further}


def replace_detached(scores: Any) -> Any:
    return replace(scores, log_probs=scores.log_probs.detach())


def test_a_user_surrogate_keeps_the_kl_entropy_correction_and_metrics() -> None:
    """Both updates of an iteration against the loss by hand: the gradient of each, and the mean of each metric."""
    width = 0.3
    config = config_of(SoftClip(width=width))
    policies = [make_policy(Telling)]
    trainer, optimizer = make_trainer(config, copy.deepcopy(policies[0]), reference=make_policy(RowScoring, seed=1))
    optimizer.register_step_post_hook(lambda *_: policies.append(copy.deepcopy(trainer.policy)))
    metrics = trainer.update(Rows.example().batch(config))
    assert len(optimizer.gradients) == 2
    reported: list[dict[str, Tensor]] = []
    for policy, found in zip(policies, optimizer.gradients, strict=False):
        loss, terms = loss_by_hand(policy, policies[0], config, width)
        expected = gradient_of(policy, loss)
        assert (found - expected).norm() <= 1e-10 * expected.norm()
        reported.append(terms)
    assert reported[1]["clip_fraction"] > 0.05
    for name in reported[0]:
        mean = sum(terms[name].item() for terms in reported) / 2
        assert metrics[f"train/{name}"] == pytest.approx(mean, rel=1e-9, abs=1e-12), name


# What it says about itself


@dataclass(frozen=True)
class ForProbabilities(SoftClip):
    """Compares probabilities, which densities are not."""

    for_probabilities: ClassVar[bool] = True


def test_a_surrogate_for_probabilities_is_refused_for_densities() -> None:
    class Normal(TablePolicy):
        def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> Any:
            return [[0.5, -0.5] for _ in states]

        def get_log_probabilities(self, states: Any, actions: Any) -> Tensor:
            normal = torch.distributions.Normal(self.logits[0, 0], 1 / math.sqrt(2 * math.pi))
            return normal.log_prob(torch.tensor(actions, dtype=torch.float64))

    def trainer_of(surrogate: Any) -> GRPOTrainer:
        return GRPOTrainer(
            config=GRPOConfig(group_size=2, objective=ObjectiveConfig(surrogate=surrogate)),
            policy=Normal(),
            reward_model=lambda states, actions: list(actions),
        )

    assert trainer_of(SoftClip()).step(["a"])["train/num_updates"] == 1
    with pytest.raises(ConfigError, match=r"real numbers, which have densities"):
        trainer_of(ForProbabilities()).step(["a"])
