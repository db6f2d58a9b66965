"""What a policy earns in each of several states, measured without training it."""

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64
from torch import Tensor
from tqdm import tqdm

from .errors import CheckpointError, ConfigError, ContractError, RewardError
from .experience_collector import ExperienceCollector
from .policy_base import SyncsSampler
from .random_state import preserved_random_state, seed_everything
from .reward_calls import RewardCalls, RewardConfig
from .state_codec import encode
from .types import Rows, select_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyMeasurement:
    """One side of a comparison: rewards of actions sampled afresh, and what has to be equal on the other side."""

    rewards: Float64[Tensor, "B G"]
    """NaN: the row was left out, as `RewardConfig` allowed."""
    components: Mapping[str, Float64[Tensor, "B G"]]
    """Named parts of the reward, before weighting. NaN: the row was left out, or the part does not apply to it."""
    reward_failures: Mapping[str, float]
    """Rows left out, rewards set to 0, calls made again."""
    labels: tuple[str, ...]
    """What each state is called."""
    fingerprints: tuple[str, ...]
    """What each state holds, as a hash; of an object that is no plain data, its type alone."""
    batch_size: int
    """States sampled at a time."""
    seed: int
    """Of the random numbers."""

    @property
    def num_actions_per_state(self) -> int:
        """G."""
        return self.rewards.shape[1]

    @property
    def mean_reward(self) -> float:
        """Mean over states of each state's mean."""
        return float(self.rewards.nanmean(1).mean())

    @property
    def component_means(self) -> dict[str, float]:
        """Likewise, of each part over the rows it applies to; a part that applies to none is missing."""
        means = {name: float(part.nanmean(1).nanmean()) for name, part in self.components.items()}
        return {name: mean for name, mean in means.items() if math.isfinite(mean)}


def measure_policy(
    policy: Any,
    states: Rows,
    reward_model: Any,
    *,
    num_actions_per_state: int = 8,
    batch_size: int = 32,
    seed: int = 0,
    reward: RewardConfig | None = None,
    label: Callable[[Any], str] | None = None,
    progress: bool = True,
) -> PolicyMeasurement:
    """What a policy earns in each state, now: training changes it in place, so this is taken before.

    Nothing is trained, global random generators are left as they were, and a policy that was in training mode is put back
    into it (one that does not show its mode by `training` stays in `eval()`). Each batch of states starts from a seed of its
    own, so that two policies meet the same random numbers. A generator that the policy, the reward model or an environment
    keeps is not reached by it, and moves on. Several processes measure independently of one another.

    Args:
        policy: a `PolicyModel`; one with a separate sampler is asked to give it the weights.
        states: B states.
        reward_model: a `RewardModel`, or a plain `(states, actions) -> rewards`. Rewards per step are added up.
        num_actions_per_state: actions sampled in each. More: less noise, more work.
        batch_size: states sampled at a time. Smaller: less memory, more forwards; random numbers are shared more exactly
            where a policy draws as many as its actions are long.
        seed: of all random numbers.
        reward: what to do when a reward cannot be had.
        label: state -> what to call it; None: a string itself, the `repr` of anything else, cut to 200 characters.
        progress: show a progress bar.

    Raises:
        ProtocolError: the policy or the reward model lacks methods.
        ConfigError: a number out of range.
        ContractError: no states, or a policy that breaks its contract.
        RewardError: a reward could not be had, or all rows of a state were left out.
    """
    for name, value, bound in (
        ("num_actions_per_state", num_actions_per_state, 1),
        ("batch_size", batch_size, 1),
        ("seed", seed, 0),
    ):
        if value < bound:
            raise ConfigError(f"measure_policy: {name} must be >= {bound}; got {value}.")
    collector = ExperienceCollector(policy=policy, reward_model=reward_model, group_size=num_actions_per_state)
    calls = RewardCalls(reward_model, reward or RewardConfig())
    num_states = len(states)
    if num_states == 0:
        raise ContractError("No states to measure in: pass at least one.")
    batches = []
    with (
        preserved_random_state(),
        _mode_kept(policy),
        tqdm(total=num_states, desc="Measuring", unit="state", disable=not progress) as bar,
    ):
        if isinstance(policy, SyncsSampler):
            policy.sync_sampler()
        for start in range(0, num_states, batch_size):
            seed_everything(int(np.random.SeedSequence((seed, start)).generate_state(1, np.uint64)[0]))
            chosen = select_rows(states, torch.arange(start, min(start + batch_size, num_states)))
            batches.append(_measure_batch(collector, calls, chosen))
            bar.update(len(chosen))
    labels = tuple(map(label or _label, _each(states)))
    rewards = torch.cat([batch.rewards for batch in batches])
    unknown = rewards.isnan().all(1).nonzero().squeeze(1).tolist()
    if unknown:
        raise RewardError(
            f"Every state needs a reward; all {num_actions_per_state} rows of state(s) {unknown[:16]} were left out, the "
            f"first of which is {labels[unknown[0]]!r}. Mend the reward, or leave these states out."
        )
    names = dict.fromkeys(name for batch in batches for name in batch.components)
    return PolicyMeasurement(
        rewards=rewards,
        components={
            name: torch.cat([b.components.get(name, torch.full_like(b.rewards, math.nan)) for b in batches])
            for name in names
        },
        reward_failures={name: sum(batch.failures[name] for batch in batches) for name in batches[0].failures},
        labels=labels,
        fingerprints=fingerprints_of(states),
        batch_size=batch_size,
        seed=seed,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _MeasuredBatch:
    rewards: Tensor
    components: dict[str, Tensor]
    failures: dict[str, float]


def _measure_batch(collector: ExperienceCollector, calls: RewardCalls, states: Rows) -> _MeasuredBatch:
    """Freshly sampled rows' rewards and their parts, [B, G] each."""
    row_states, row_actions, sampled = collector.sample(states, collector.group_size)
    mask = None if sampled is None else sampled.mask.cpu()
    with torch.no_grad():
        found = calls(row_states, row_actions, mask)
    kept = torch.ones(len(row_states), dtype=torch.bool) if found.kept is None else found.kept
    mask = None if mask is None else mask[kept]

    def by_state(values: Tensor) -> Tensor:
        if values.dim() == 2:
            values = values.sum(1) if mask is None else values.where(mask, 0.0).sum(1)
        rows = torch.full(kept.shape, math.nan, dtype=torch.float64)
        rows[kept] = values.double()
        return rows.view(len(states), -1)

    return _MeasuredBatch(
        rewards=by_state(found.values),
        components={name: by_state(part) for name, part in found.components.items()},
        failures=found.metrics,
    )


@contextmanager
def _mode_kept(policy: Any) -> Iterator[None]:
    """Sampling puts a policy into `eval()`; it comes out as it went in, where its mode can be seen."""
    was_training = getattr(policy, "training", None) is True
    modules = policy.modules() if isinstance(policy, torch.nn.Module) else ()
    modes = {module: module.training for module in modules}
    try:
        yield
    finally:
        if was_training:
            policy.train()
        for module, mode in modes.items():  # each as it was: someone may have frozen one
            module.training = mode


def _each(states: Rows) -> Sequence[Any]:
    return [states[place] for place in range(len(states))]


def _label(state: Any) -> str:
    return state if isinstance(state, str) else repr(state)[:200]


def fingerprints_of(states: Rows) -> tuple[str, ...]:
    """A hash of what each state holds; of an object that is no plain data, of its type alone."""
    return tuple(map(_fingerprint, _each(states)))


def _fingerprint(state: Any) -> str:
    try:
        value, tensors = encode({"state": state})
    except CheckpointError:  # an object of the user's own, of which nothing is known that lasts: its type has to do
        value, tensors = repr(type(state)), {}
    sha = hashlib.sha256(json.dumps(value, sort_keys=True).encode())
    for name, tensor in tensors.items():
        sha.update(f"{name}{tensor.dtype}{list(tensor.shape)}".encode())
        sha.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()
