"""Every preset and every choice of the loss that no preset makes, small, and one update of each on fixed rows.

Read by the tests that hold for all of them (any split, several ranks), and by the script that runs on each rank.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from grpo import (
    ActionScores,
    AdvantageConfig,
    ExperienceBatch,
    GRPOConfig,
    GRPOTrainer,
    KPop,
    Mask,
    ObjectiveConfig,
    Truncate,
    presets,
)
from grpo.surrogates import Clip, ClipCov, Dppo, Dro, KlCov, Steps, Vespo
from tests.support.policies import GroupScoring, Planning, RecordingSGD, RowScoring, weights_of

PRESETS = {
    name: function
    for name, function in inspect.getmembers(presets, inspect.isfunction)
    if function.__module__ == presets.__name__ and not name.startswith("_")
}
"""Found, not listed: a new preset is tested by being there."""


def small(config: GRPOConfig, **changes: Any) -> GRPOConfig:
    """The same algorithm on a few rows: two passes, so that in the second the policy has moved."""
    length = config.objective.fixed_length
    sizes: dict[str, Any] = {
        "group_size": 4,
        "num_states_per_iteration": None,
        "batch_size": None,
        "micro_batch_size": None,
        "num_epochs_per_update": 2,
        "lr_schedule": "constant",
        "warmup_ratio": 0.0,
        "max_grad_norm": None,
        "dynamic_sampling_rounds": 0,
        "seed": 0,
        "objective": replace(config.objective, fixed_length=None if length is None else 6),
    }
    return replace(config, **{**sizes, **changes})


def squared_ratio(steps: Steps) -> Tensor:
    """A surrogate of a user's own, without attributes: -A (rho^2 + 1) / 2, whose gradient at rho = 1 is -A grad log pi."""
    return -steps.advantages * (steps.ratio("step").square() + 1.0) / 2.0


def _further(advantage: AdvantageConfig | None = None, **objective: Any) -> GRPOConfig:
    objective = {"kl_coef": 0.0, **objective}
    return small(GRPOConfig(advantage=advantage or AdvantageConfig(), objective=ObjectiveConfig(**objective)))


FURTHER = {
    "delta": _further(surrogate=Clip(delta=1.3)),
    "ratio_row_sum": _further(surrogate=Clip(level="row_sum"), aggregation="row_sum"),
    "ratio_row_step": _further(surrogate=Clip(level="row_step"), aggregation="step_mean"),
    "ratio_none": _further(surrogate=Clip(level="none"), aggregation="group_mean"),
    "vespo": _further(surrogate=Vespo(), aggregation="row_sum"),
    "vespo_corrected": _further(surrogate=Vespo(), sampler_correction=Truncate(low=0.1)),
    "dro": _further(surrogate=Dro(beta=0.5)),
    "dro_row_sum": _further(surrogate=Dro(level="row_sum")),
    "dppo": _further(surrogate=Dppo(tv_limit=0.02)),
    "kl_cov": _further(surrogate=KlCov(fraction=0.2, coef=0.5)),
    # All candidates are drawn. If only some were drawn, the choice would follow the order of the rows.
    "clip_cov": _further(surrogate=ClipCov(fraction=1.0, cov_low=0.01, cov_high=0.2)),
    "own_surrogate": _further(surrogate=squared_ratio, sampler_correction=Truncate(high=1.5)),
    "top_entropy": _further(top_entropy_fraction=0.3),
    "off_policy_threshold": _further(off_policy_threshold=0.05),
    "truncate_steps": _further(sampler_correction=Truncate(low=0.5, high=1.5)),
    "truncate_rows": _further(sampler_correction=Truncate(low=0.2, high=4.0, level="row")),
    "mask_steps": _further(sampler_correction=Mask(low=0.5, high=2.0)),
    "mask_rows": _further(sampler_correction=Mask(low=0.2, high=4.0, level="row")),
    "kpop": _further(sampler_correction=KPop(threshold=0.02)),
    "kl_k1": _further(kl_coef=0.3, kl_estimator="k1"),
    "kl_k2": _further(kl_coef=0.3, kl_estimator="k2", aggregation="step_mean"),
    "kl_k3": _further(kl_coef=0.3, kl_estimator="k3", aggregation="group_mean"),
    "kl_k3_weighted": _further(kl_coef=0.3, kl_estimator="k3_weighted"),
    "kl_k3_weighted_rows": _further(kl_coef=0.3, kl_estimator="k3_weighted", surrogate=Clip(level="row_sum")),
    "kl_exact": _further(kl_coef=0.3, kl_estimator="exact"),
    "entropy_sampled": _further(entropy_coef=0.1, entropy_estimator="score_function"),
    "entropy_apart": _further(entropy_coef=0.1, entropy_aggregation="step_mean"),
    "value_loss": _further(AdvantageConfig(credit="gae", gamma=0.9), value_clip=0.05),
    "return_to_go": _further(AdvantageConfig(credit="return_to_go", scale="batch"), aggregation="step_mean"),
    "process_supervision": _further(AdvantageConfig(credit="process_supervision", scale="group")),
    "gigpo": _further(AdvantageConfig(credit="gigpo", scale="group")),
    "length_weighted": _further(AdvantageConfig(baseline="length_weighted", scale="batch")),
    "max_at_k": _further(AdvantageConfig(baseline="max_at_k", k=2)),
    "global_mean": _further(AdvantageConfig(baseline="global_mean", normalize_rewards=True)),
}
"""Choices that no preset makes."""

EVERY = {name: small(preset()) for name, preset in PRESETS.items()} | FURTHER


class Telling(RowScoring):
    """Tells all that a loss may ask for: entropy, a critic's values, the exact KL from uniform, and how likely the observations
    in holes were; `extra` columns of padding."""

    def __init__(self, *args: Any, extra: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.critic, self.answers = (
            nn.Embedding(self.start.num_embeddings, 8, dtype=self.head.weight.dtype) for _ in range(2)
        )
        self.extra = extra

    def _scores(self, states: Any, actions: Any) -> ActionScores:
        scores = super()._scores(states, actions)
        width = scores.mask.shape[1]
        values, answers = (table(torch.tensor(list(states)))[:, :width] for table in (self.critic, self.answers))
        holes = torch.tensor([[token is None for token in (*action, *[0] * width)][:width] for action in actions])
        kl = torch.tensor(float(self.num_tokens)).log() - scores.entropy

        def wider(tensor: Tensor, fill: float | bool) -> Tensor:
            return nn.functional.pad(tensor, (0, self.extra), value=fill) if self.extra else tensor

        nan = float("nan")
        return ActionScores(
            log_probs=wider(scores.log_probs, nan),
            mask=wider(scores.mask, False),
            entropy=wider(scores.entropy, nan),
            values=wider(values, nan),
            kl=wider(kl, nan),
            observed_log_probs=wider(torch.where(holes, nn.functional.logsigmoid(answers), nan), nan),
            observed_mask=wider(holes, False),
        )


class TellingGroups(Telling, GroupScoring):
    """By group."""


class TellingPlanned(Telling, Planning):
    """In parts of its own."""


@dataclass(frozen=True)
class Rows:
    """Rollouts, [N] of each, and what `ExperienceBatch.from_rows` wants of them."""

    states: list[int]
    actions: list[tuple[int | None, ...]]
    group_ids: list[int]
    rewards: Tensor
    step_rewards: Tensor
    state_keys: Tensor
    behaviour_log_probs: Tensor

    @classmethod
    def example(cls, dtype: torch.dtype = torch.float64) -> "Rows":
        """Groups of 3, 5, 1 and 4 rows, and 2 of equal rewards, which have no advantage; ragged, with holes, one row empty."""
        generator = torch.Generator().manual_seed(1)

        def uniform(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=generator, dtype=torch.float64)

        groups = [0] * 3 + [1] * 5 + [2] + [3] * 4 + [4] * 2
        actions: list[tuple[int | None, ...]] = []
        for row, group in enumerate(groups):
            length = 5 if group == 1 else int(torch.randint(1, 4, (), generator=generator))
            tokens: list[int | None] = torch.randint(0, 5, (length,), generator=generator).tolist()
            if row % 4 == 0:
                tokens[0] = None
            actions.append((None,) if row == 9 else tuple(tokens))
        rewards = uniform(len(groups))
        rewards[-2:] = 0.3
        step_rewards = uniform(len(groups), 5)
        step_rewards[-2:] = 0.1
        behaviour = torch.log(0.2 * (0.3 + 1.4 * uniform(len(groups), 5)))
        behaviour[1, 0] = float("nan")  # unscored
        return cls(
            states=[group % 4 for group in groups],
            actions=actions,
            group_ids=groups,
            rewards=rewards.to(dtype),
            step_rewards=step_rewards.to(dtype),
            state_keys=torch.randint(0, 3, (len(groups), 5), generator=generator),
            behaviour_log_probs=behaviour.to(dtype),
        )

    def __len__(self) -> int:
        return len(self.states)

    def take(self, index: Sequence[int]) -> "Rows":
        """Some of them, in this order."""
        index = list(index)
        return Rows(
            states=[self.states[i] for i in index],
            actions=[self.actions[i] for i in index],
            group_ids=[self.group_ids[i] for i in index],
            rewards=self.rewards[index],
            step_rewards=self.step_rewards[index],
            state_keys=self.state_keys[index],
            behaviour_log_probs=self.behaviour_log_probs[index],
        )

    def batch(self, config: GRPOConfig, extra: int = 0) -> ExperienceBatch:
        """As wide as the longest row and `extra` columns, which hold NaN and False."""
        longest = max(len(action) for action in self.actions)
        width = longest + extra
        mask = torch.zeros(len(self), width, dtype=torch.bool)
        for row, action in enumerate(self.actions):
            mask[row, : len(action)] = torch.tensor([token is not None for token in action])

        def fitted(values: Tensor, fill: float) -> Tensor:
            return nn.functional.pad(values[:, :longest], (0, extra), value=fill)

        credit = config.advantage.credit
        per_step = credit in ("return_to_go", "process_supervision", "gigpo")
        nan = float("nan")
        return ExperienceBatch.from_rows(
            self.states,
            self.actions,
            fitted(self.step_rewards, nan) if per_step else self.rewards,
            self.group_ids,
            behaviour_log_probs=fitted(self.behaviour_log_probs, nan),
            mask=mask,
            state_keys=fitted(self.state_keys, 0) if credit == "gigpo" else None,
        )


@dataclass(frozen=True)
class Done:
    """What one call of `GRPOTrainer.update` did."""

    gradients: list[Tensor]
    """With respect to all parameters of the policy, as one vector per update."""
    weights: Tensor
    """Afterwards."""
    metrics: dict[str, float]


class StepsOfOneLength(RecordingSGD):
    """Moves the weights by the same distance whatever the loss, far enough for ratios to leave their bounds."""

    LENGTH = 1.0

    def step(self, closure: Any = None) -> None:
        (group,) = self.param_groups
        norm = torch.nn.utils.get_total_norm([p.grad for p in group["params"] if p.grad is not None])
        group["lr"] = self.LENGTH / max(float(norm), 1e-6)
        super().step(closure)


def make_trainer(
    config: GRPOConfig, policy: Any, *, reference: Any = None, engine: Any = None, **others: Any
) -> tuple[GRPOTrainer, RecordingSGD]:
    """An optimizer that remembers its gradients; the reference only where the loss needs one."""
    needs_reference = bool(config.objective.kl_coef) and config.objective.kl_estimator != "exact"
    optimizer = StepsOfOneLength(policy)
    trainer = GRPOTrainer(
        config=config,
        policy=policy,
        reward_model=others.pop("reward_model", lambda states, actions: [0.0] * len(states)),
        reference_policy=reference if needs_reference else None,
        optimizer=optimizer,
        engine=engine,
        **others,
    )
    return trainer, optimizer


def make_policy(kind: Any = Telling, dtype: torch.dtype = torch.float64, *, seed: int = 0, **options: Any) -> Any:
    """The same weights every time, whatever else the kind can do, and whatever the dtype."""
    torch.manual_seed(seed)
    return kind(num_tokens=5, max_steps=5, **options).to(dtype)


def update(
    config: GRPOConfig,
    rows: Rows,
    *,
    kind: Any = Telling,
    plan: Any = None,
    extra: int = 0,
    engine: Any = None,
) -> Done:
    """One call of `GRPOTrainer.update` on these rows by a policy that is the same every time."""
    dtype = rows.rewards.dtype
    policy = make_policy(kind, dtype, extra=extra)
    if plan is not None:
        policy.plan = plan
    trainer, optimizer = make_trainer(config, policy, reference=make_policy(RowScoring, dtype, seed=1), engine=engine)
    metrics = trainer.update(rows.batch(config, extra))
    return Done(gradients=optimizer.gradients, weights=weights_of(policy), metrics=metrics)
