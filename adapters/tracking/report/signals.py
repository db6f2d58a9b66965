"""What a run learned from: rewards, a teacher, demonstrations, or what the environment answered."""

from dataclasses import dataclass

import numpy as np

from grpo.evaluation.advice import TINY

from .run_data import RunData


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """One thing that a policy learned from."""

    source: str
    """What it is, as in "trained on the reward right". Empty: the reward has no name."""
    metric: str
    """The metric that tells how far the policy has come."""
    name: str
    """This metric in words."""


def signals_of(run: RunData) -> list[Signal]:
    """What a run learned from. The first signal is the one that the page names first.

    Rewards do not count where no row ever had an advantage and something else taught the policy.
    """
    found = []
    if is_distilled(run):
        found.append(Signal(source="its teacher", metric="train/kl_mean", name="KL to the teacher"))
    for metric, source, name in (
        ("train/demonstration_loss", "demonstrations", "loss of demonstrations"),
        ("train/observation_loss", "what the environment answered", "loss of observations"),
    ):
        if run.has(metric):
            found.append(Signal(source=source, metric=metric, name=name))
    if run.has("rewards/mean") and not (found and has_no_advantage(run)):
        reward = str(run.settings.get("reward_model") or "").removesuffix(".compute_rewards")
        found.insert(
            0, Signal(source=f"the reward {reward}" if reward else "", metric="rewards/mean", name="mean reward")
        )
    return found


def has_no_advantage(run: RunData) -> bool:
    """Whether rows were sampled, and none of them ever had an advantage."""
    advantages = np.abs(run.of("train/advantages_mean")) + run.of("train/advantages_std")
    measured = advantages[np.isfinite(advantages)]
    return bool(len(measured) and not measured.any())


def is_distilled(run: RunData) -> bool:
    """Whether no row ever had an advantage, and a KL pulled the policy to another policy: it learned from a teacher."""
    is_pulled = (run.of("train/kl_coef") > 0) & (run.of("train/kl_mean") > TINY)
    return has_no_advantage(run) and bool(is_pulled.any())
