"""Runs that a checkpoint has to resume exactly: one kind of trainer for each thing that a checkpoint holds."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grpo import (
    AdvantageConfig,
    EntropyControl,
    GRPOConfig,
    GRPOTrainer,
    KLControl,
    ObjectiveConfig,
    WeightedRewards,
)
from grpo.surrogates import ClipCov
from tests.support.policies import DuckPolicy, ExactSampling, VectorPolicy, digest, weights_of

FILES = ("manifest.json", "rank-0/state.json", "rank-0/tensors.safetensors")
"""The files of a checkpoint that one process has written."""


class ManyGenerators(VectorPolicy):
    """Samples by torch's generator, and now and then replaces an action by numpy's and Python's."""

    def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> Any:
        groups = super().generate_actions(states, num_actions_per_state)
        for group in groups:
            group[0] = random.randrange(4)
            group[1] = int(np.random.randint(4))  # noqa: NPY002
        return groups


class NoisyReward:
    """A callable with noise of a generator of its own, and a memory: what repeats too often is worth less."""

    def __init__(self, seed: int) -> None:
        self.generator = np.random.default_rng(seed)
        self.times_seen = dict.fromkeys(range(4), 0)

    def __call__(self, states: Any, actions: Any) -> list[float]:
        rewards = []
        for action in actions:
            self.times_seen[action] += 1
            rewards.append(self.generator.normal() + action - 0.01 * self.times_seen[action])
        return rewards

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.bit_generator.state, "times_seen": dict(self.times_seen)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.generator.bit_generator.state = state["generator"]
        self.times_seen = dict(state["times_seen"])


class NoisyModel(NoisyReward):
    """The same as a reward model."""

    compute_rewards = NoisyReward.__call__

    def train(self) -> None: ...

    def eval(self) -> None: ...

    def to(self, device: Any) -> None: ...


class CountingNetwork(torch.nn.Module):
    """A reward network with a running count, of which every reward takes a part."""

    times_seen: Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.worth = torch.nn.Linear(1, 1)
        torch.nn.init.ones_(self.worth.weight)
        torch.nn.init.zeros_(self.worth.bias)
        self.register_buffer("times_seen", torch.full((4,), float(seed)))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def compute_rewards(self, states: Any, actions: Any) -> Tensor:
        chosen = torch.as_tensor(actions)
        self.times_seen += torch.bincount(chosen, minlength=4)
        self.scratch += 1
        worth: Tensor = self.worth(chosen.float().unsqueeze(1)).squeeze(1)
        return worth - 0.1 * self.times_seen[chosen] + 0.01 * self.scratch * chosen


class CallableNetwork(torch.nn.Module):
    """The same as a callable."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.inner = CountingNetwork(seed)

    def forward(self, states: Any, actions: Any) -> Tensor:
        return self.inner.compute_rewards(states, actions)


class DrawsToScore(ManyGenerators):
    """Draws random numbers for every log-probability, as the README's first policy does."""

    def get_log_probabilities(self, states: Any, actions: Any) -> Tensor:
        return super().get_log_probabilities(states, actions) + 0.1 * torch.randn(len(actions))


def certain_reward(states: Any, actions: Any) -> list[float]:
    """A reward that draws nothing, so that it is asked for beside the updates if `iterations_ahead` is above 0."""
    return [float(action == 2) + 0.1 * float(state[0]) for state, action in zip(states, actions, strict=True)]


def plain_reward(states: Any, actions: Any) -> list[float]:
    """Some groups have no differences."""
    return [float(action == 2) + float(action == 1) * random.random() for action in actions]


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "micro-batches": {"micro_batch_size": 3},
    "epochs of batches": {"batch_size": 5, "num_epochs_per_update": 2},
    "Adam and a schedule": {"lr_schedule": "cosine", "warmup_ratio": 0.3, "learning_rate": 0.05},
    "reference": {"with_reference": True, "objective": ObjectiveConfig(kl_coef=0.1)},
    "running baseline": {"advantage": AdvantageConfig(baseline="global_mean")},
    "reward with a state": {"reward": NoisyModel},
    "callable reward with a state": {"reward": NoisyReward},
    "weighted rewards with a state": {
        "reward": lambda seed: WeightedRewards({"x": NoisyModel(seed), "y": plain_reward})
    },
    "reward network with a buffer": {"reward": CountingNetwork},
    "callable reward network with a buffer": {"reward": CallableNetwork},
    "weighted reward networks with buffers": {
        "reward": lambda seed: WeightedRewards({"x": CountingNetwork(seed), "y": plain_reward})
    },
    "random numbers in scoring": {"policy": DrawsToScore},
    "random numbers in scoring, several updates": {"policy": DrawsToScore, "batch_size": 5},
    "reference, running baseline, reward with a state and scheduler of the caller": {
        "with_reference": True,
        "objective": ObjectiveConfig(kl_coef=0.1),
        "advantage": AdvantageConfig(baseline="global_mean"),
        "reward": NoisyModel,
        "with_scheduler": True,
    },
    "loss scaler": {"with_scaler": True},
    "dropout": {"dropout": 0.5},
    "dropout, several updates": {"dropout": 0.5, "num_epochs_per_update": 2},
    "scheduler of the caller": {"with_scheduler": True, "batch_size": 4},
    "duck-typed with a state": {"duck": True},
    "exact sampler": {"exact": True, "num_epochs_per_update": 2},
    "evaluated": {"evaluated": True, "batch_size": 5},
    "replay": {"replay_iterations": 2, "batch_size": 6},
    "replay of lists": {"exact": True, "replay_iterations": 2},
    "dynamic sampling": {"dynamic_sampling_rounds": 2},
    "one iteration ahead, dropout": {
        "iterations_ahead": 1,
        "reward": lambda seed: certain_reward,
        "dropout": 0.5,
        "batch_size": 4,
    },
    "four iterations ahead, evaluated": {
        "iterations_ahead": 4,
        "reward": lambda seed: certain_reward,
        "evaluated": True,
    },
    "ahead, reward with a state": {"iterations_ahead": 2, "reward": NoisyModel},
    "reference that follows, adaptive KL": {
        "with_reference": True,
        "reference_sync_every": 2,
        "reference_mix": 0.5,
        "num_epochs_per_update": 2,
        "learning_rate": 0.05,
        "kl_control": KLControl(target=1e-3),
        "objective": ObjectiveConfig(kl_coef=0.01),
    },
    "adaptive entropy": {
        "entropy_control": EntropyControl(target=1.3),
        "objective": ObjectiveConfig(entropy_estimator="score_function"),
        "learning_rate": 0.1,
    },
    "running normalisation of rewards": {"advantage": AdvantageConfig(normalize_rewards=True)},
    "steps drawn at random": {
        "objective": ObjectiveConfig(surrogate=ClipCov(fraction=0.2, cov_low=-1.0)),
        "batch_size": 4,
    },
}


def built(case: str, seed: int) -> tuple[GRPOTrainer, Any, dict[str, Any]]:
    """A trainer of this kind whose weights and generators start from `seed`; its states; options of `train`."""
    options = dict(CASES[case])
    torch.manual_seed(seed)
    states: Any = torch.randn(7, 3, generator=torch.Generator().manual_seed(5))
    reward = options.pop("reward", None)
    reward_model: Any = plain_reward if reward is None else reward(seed)
    if options.pop("duck", False):
        policy: Any = DuckPolicy(num_actions=4, seed=seed)
        policy.tensors["logits"].data.normal_()
        states = [0, 1, 0]
    elif options.pop("exact", False):
        policy = ExactSampling()
        states = [0, 1, 2, 3]
        reward_model = lambda states, actions: [sum(action) + random.random() for action in actions]  # noqa: E731
    else:
        policy = options.pop("policy", ManyGenerators)(dropout=options.pop("dropout", 0.0))
    reference = None
    if options.pop("with_reference", False):
        reference = ManyGenerators()
    scheduler = optimizer = None
    with_scaler = options.pop("with_scaler", False)
    if options.pop("with_scheduler", False):
        optimizer = torch.optim.SGD(policy.parameters(), lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1 / (1 + count))
    extra = {"eval_states": states[:2], "eval_every": 3} if options.pop("evaluated", False) else {}
    trainer = GRPOTrainer(
        config=GRPOConfig(group_size=4, num_states_per_iteration=2, seed=seed, **options),
        policy=policy,
        reward_model=reward_model,
        reference_policy=reference,
        optimizer=optimizer,
        lr_scheduler=scheduler,
    )
    if with_scaler:
        scaler = torch.amp.GradScaler("cpu", init_scale=1000.0, growth_interval=3)
        trainer.optimizer_step.scaler = scaler
        trainer.parts.add(is_lasting=True, scaler=scaler)
    return trainer, states, {"progress": False, **extra}


def full_state_of(trainer: GRPOTrainer) -> str:
    """SHA-256 over all that loading may change."""
    optimizer = trainer.optimizer
    return digest(
        weights_of(trainer.policy),
        None if trainer.reference_policy is None else weights_of(trainer.reference_policy),
        optimizer.state_dict(),
        trainer.iteration,
        trainer.counters.data_seed,
        torch.get_rng_state(),
        random.getstate(),
        np.random.get_state(),  # noqa: NPY002
    )


SMALL = {"n": 1, "tensor": torch.arange(6.0), "nested": {"list": [1, 2.5, None, "x"], "array": np.arange(3)}}


def small(n: int) -> dict[str, Any]:
    return {**SMALL, "n": n, "tensor": torch.full((6,), float(n))}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
