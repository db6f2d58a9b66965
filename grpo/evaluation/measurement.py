"""Measure the rewards of a policy in each of several states, without training it."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float64, Int
from torch import Tensor
from tqdm import tqdm

from grpo._common.global_state import seed_everything
from grpo._common.preserved import preserved_mode, preserved_random_state
from grpo._retrying.calls import RetriedCalls
from grpo._storage.encoding import encode
from grpo._storage.tensor_file import chunks_of
from grpo.config import RewardConfig
from grpo.engine import Engine, OneProcess
from grpo.errors import CheckpointError, ConfigError, ContractError, RewardError
from grpo.experience_collector import ExperienceCollector
from grpo.policy_base import SyncsSampler
from grpo.sinks import Samples, as_text
from grpo.types import Rows, row_totals, select_rows

from .attempts import Estimate, bootstrap_intervals, pass_at_k, passing_reward, require_confidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One action that a policy took in a state, as text, and the reward of this action."""

    text: str
    """The action as `str`, or a tensor's values as a list. More than 2,000 characters are cut in the middle."""
    reward: float
    """The reward of this action. Rewards per step are added up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyMeasurement:
    """The rewards of newly sampled actions, and the settings that another measurement must share to be comparable."""

    rewards: Float64[Tensor, "B G"]
    """Rewards of the G actions in each of B states. NaN: the row was dropped, as `RewardConfig` allows."""
    components: Mapping[str, Float64[Tensor, "B G"]]
    """Named parts of the reward, before weighting. NaN: the row was dropped, or the part does not apply to it."""
    reward_failures: Mapping[str, float]
    """Number of rows dropped, rewards set to 0 and calls repeated, by metric name."""
    num_steps: Float64[Tensor, "B G"] | None
    """Number of decisions in each row. NaN: the row was dropped. None: sampling does not tell the steps."""
    answers: tuple[Answer, ...]
    """One action for each state: the first sampled action that has a reward."""
    labels: tuple[str, ...]
    """The name of each state in a report."""
    fingerprints: tuple[str, ...]
    """A hash of each state's contents. An object that is not plain data is represented by its type."""
    batch_size: int
    """Number of states sampled at a time."""
    seed: int
    """Seed of the random numbers."""

    @property
    def num_actions_per_state(self) -> int:
        """The number of actions per state, G."""
        return self.rewards.shape[1]

    @property
    def mean_reward(self) -> float:
        """The mean reward. Every state has the same weight."""
        return float(self.rewards.nanmean(1).mean())

    @property
    def component_means(self) -> dict[str, float]:
        """The mean of each named part of the reward, over the rows it applies to. Every state has the same weight."""
        means = {name: float(part.nanmean(1).nanmean()) for name, part in self.components.items()}
        return {name: mean for name, mean in means.items() if math.isfinite(mean)}

    def average(self, *, confidence: float = 0.95) -> Estimate:
        """avg@k, for the k = `num_actions_per_state` attempts that were made: the mean reward, with its interval.

        Args:
            confidence: Confidence level of the interval. Larger: a wider interval.
        """
        return self._over_states(self.rewards.nanmean(1), confidence)

    def pass_at(self, k: int, *, pass_reward: float | None = None, confidence: float = 0.95) -> Estimate:
        """pass@k: the probability that at least one of k attempts at a state passes, with its interval (see `pass_at_k`).

        Args:
            k: Number of attempts, at most `num_actions_per_state`.
            pass_reward: Smallest reward of an attempt that passes. None: 1, if all rewards are 0 or 1.
            confidence: Confidence level of the interval. Larger: a wider interval.

        Raises:
            ConfigError: A state has fewer than k attempts, or nothing says what passes.
        """
        found = passing_reward(pass_reward, self.rewards)
        if found is None:
            raise ConfigError(
                "pass_at: the rewards are not all 0 or 1, so pass_reward must say from which reward on an attempt passes; got "
                "None. Pass a number."
            )
        return self._over_states(pass_at_k(self.rewards, k, found), confidence)

    def _over_states(self, values: Tensor, confidence: float) -> Estimate:
        require_confidence("PolicyMeasurement", confidence)
        (interval,) = bootstrap_intervals(values.unsqueeze(1).numpy(), confidence=confidence, seed=self.seed)
        return Estimate(value=float(values.mean()), interval=interval)

    def metrics(self) -> dict[str, float]:
        """The metrics of `GRPOTrainer.evaluate`. Every row has the same weight."""
        return evaluation_metrics(self.rewards, self.components, self.num_steps, OneProcess())


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
    """Measure what a policy earns in each state. Training changes a policy in place, so call this before training.

    Nothing is trained. Global random generators are restored, and a policy that shows its mode in `training` returns to that
    mode; any other policy stays in `eval()`. Each batch of states starts from its own seed, so that two policies draw the
    same random numbers. A generator that belongs to the policy, the reward model or an environment is not seeded. With
    several processes, each process measures by itself.

    Args:
        policy: A `PolicyModel`. `sync_sampler` is called first where the policy has it.
        states: B states.
        reward_model: A `RewardModel`, or a plain `(states, actions) -> rewards`. Rewards per step are added up.
        num_actions_per_state: Actions sampled per state. Larger: less noise, more work.
        batch_size: States sampled at a time. Smaller: less memory and more forward passes. If a policy draws one random number
            per step, smaller batches also let two policies share more of their random numbers.
        seed: Seed of all random numbers.
        reward: What to do when the reward model raises or returns NaN. None: the defaults of `RewardConfig`.
        label: Maps a state to its name in reports. None: a string is its own name; for anything else, the first 200
            characters of its `str`, with three digits of a float.
        progress: Show a progress bar.

    Raises:
        ProtocolError: The policy or the reward model lacks methods.
        ConfigError: A number is out of range.
        ContractError: There are no states, or the policy breaks its contract.
        RewardError: The reward model raised or returned NaN, or all rows of a state were dropped.
    """
    bounds = {"num_actions_per_state": (num_actions_per_state, 1), "batch_size": (batch_size, 1), "seed": (seed, 0)}
    for name, (value, bound) in bounds.items():
        if not bound <= value < 2**63:
            raise ConfigError(f"measure_policy: {name} must be >= {bound}; got {value}. Pass an integer below 2**63.")
    collector = ExperienceCollector(
        policy=policy,
        reward_model=reward_model,
        group_size=num_actions_per_state,
        reward=reward,
        reward_calls=RetriedCalls,
    )
    if len(states) == 0:
        raise ContractError("No states to measure in: pass at least one.")
    batches = _measure_batches(collector, states, batch_size=batch_size, seed=seed, progress=progress)
    labels = tuple(map(label or _label, _as_list(states)))
    rewards = torch.cat([batch.rewards for batch in batches])
    _require_rewards(rewards, labels)
    steps = [batch.num_steps for batch in batches if batch.num_steps is not None]
    return PolicyMeasurement(
        rewards=rewards,
        components=_joined_components(batches),
        reward_failures=dict(collector.costs.of_this_rank().counts),
        num_steps=torch.cat(steps) if steps else None,
        answers=tuple(answer for batch in batches for answer in batch.answers),
        labels=labels,
        fingerprints=fingerprints_of(states),
        batch_size=batch_size,
        seed=seed,
    )


def measured_rows(
    collector: ExperienceCollector, states: Rows, num_actions_per_state: int
) -> tuple[Samples, Int[Tensor, " K"]]:
    """Sample actions and ask for their rewards.

    Returns:
        The K of B * G rows that have a reward, and their positions [K] among all rows. State 0's rows are first.
    """
    row_states, row_actions, sampled = collector.sample(states, num_actions_per_state)
    group_ids = collector.groups_of(states).repeat_interleave(num_actions_per_state)
    mask = None if sampled is None else sampled.mask
    rewards = collector.rewards_of(row_states, row_actions, mask, group_ids)
    kept = torch.arange(len(group_ids)) if rewards.kept is None else rewards.kept.nonzero().squeeze(1)
    steps = None if mask is None else mask.cpu()[kept]
    rows = Samples(
        kind="eval",
        states=select_rows(row_states, kept),
        actions=select_rows(row_actions, kept),
        group_ids=group_ids[kept],
        rewards=row_totals(rewards.values, steps),
        reward_components={name: row_totals(part, steps) for name, part in rewards.components.items()},
        num_steps=None if steps is None else steps.sum(1),
    )
    return rows, kept


def evaluation_metrics(
    rewards: Tensor, components: Mapping[str, Tensor], num_steps: Tensor | None, engine: Engine
) -> dict[str, float]:
    """The metrics of an evaluation, over the rows of all ranks. NaN: the row was dropped, or a part does not apply to it."""

    def of_all_ranks(values: Tensor) -> Tensor:
        return engine.gather(values[~values.isnan()].double().cpu())[0]

    rewards = of_all_ranks(rewards)
    metrics = {"eval/avg_reward": float(rewards.mean()), "eval/avg_reward_std": float(rewards.std(correction=0))}
    for name, part in components.items():
        mean = float(of_all_ranks(part).mean())
        if not math.isnan(mean):
            metrics[f"eval/{name}/mean"] = mean
    if num_steps is not None:
        metrics["eval/steps_mean"] = float(of_all_ranks(num_steps).mean())
    return metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class _MeasuredBatch:
    rewards: Tensor
    components: dict[str, Tensor]
    num_steps: Tensor | None
    answers: tuple[Answer, ...]


def _measure_batches(
    collector: ExperienceCollector, states: Rows, *, batch_size: int, seed: int, progress: bool
) -> list[_MeasuredBatch]:
    """Measure all states, `batch_size` at a time. Restore the random generators and the policy's mode."""
    policy, num_states = collector.policy, len(states)
    batches = []
    with (
        preserved_random_state(),
        preserved_mode(policy),
        tqdm(total=num_states, desc="Measuring", unit="state", disable=not progress) as bar,
    ):
        if isinstance(policy, SyncsSampler):
            policy.sync_sampler()
        for start in range(0, num_states, batch_size):
            seed_everything(int(np.random.SeedSequence((seed, start)).generate_state(1, np.uint64)[0]))
            chosen = select_rows(states, torch.arange(start, min(start + batch_size, num_states)))
            batches.append(_measure_batch(collector, chosen))
            bar.update(len(chosen))
    return batches


def _measure_batch(collector: ExperienceCollector, states: Rows) -> _MeasuredBatch:
    """Sample actions. Return their rewards, the parts of the rewards and the steps, each [B, G], and an action per state."""
    num_states, group_size = len(states), collector.group_size
    rows, kept = measured_rows(collector, states, group_size)

    def by_state(values: Tensor) -> Tensor:
        placed = torch.full((num_states * group_size,), math.nan, dtype=torch.float64)
        placed[kept] = values.double()
        return placed.view(num_states, group_size)

    return _MeasuredBatch(
        rewards=by_state(rows.rewards),
        components={name: by_state(part) for name, part in rows.reward_components.items()},
        num_steps=None if rows.num_steps is None else by_state(rows.num_steps),
        answers=_first_answers(rows, (kept // group_size).tolist()),
    )


def _first_answers(rows: Samples, state_of_row: list[int]) -> tuple[Answer, ...]:
    """The first row of each state that has one."""
    firsts = {state: row for row, state in reversed([*enumerate(state_of_row)])}
    return tuple(
        Answer(text=as_text(rows.actions[row]), reward=float(rows.rewards[row])) for _, row in sorted(firsts.items())
    )


def _joined_components(batches: Sequence[_MeasuredBatch]) -> dict[str, Tensor]:
    """Join the named reward parts of all batches, with NaN for batches that do not have a part."""
    names = dict.fromkeys(name for batch in batches for name in batch.components)
    return {
        name: torch.cat([b.components.get(name, torch.full_like(b.rewards, math.nan)) for b in batches])
        for name in names
    }


def _require_rewards(rewards: Tensor, labels: Sequence[str]) -> None:
    """Raise a RewardError if a state has no row with a reward."""
    unknown = rewards.isnan().all(1).nonzero().squeeze(1).tolist()
    if unknown:
        raise RewardError(
            f"Every state needs a reward; all {rewards.shape[1]} rows of state(s) {unknown[:16]} were left out, the "
            f"first of which is {labels[unknown[0]]!r}. Fix the reward model, or leave these states out."
        )


def _as_list(states: Rows) -> Sequence[Any]:
    return [states[place] for place in range(len(states))]


def _label(state: Any) -> str:
    return state if isinstance(state, str) else as_text(state)[:200]


def fingerprints_of(states: Rows) -> tuple[str, ...]:
    """A hash of each state's contents. An object that is not plain data is represented by its type."""
    return tuple(map(_fingerprint, _as_list(states)))


def _fingerprint(state: Any) -> str:
    text: list[bytes] = []
    try:
        tensors = encode({"state": state}, text.append)
        value = json.loads(b"".join(text))
    except CheckpointError:  # recovery: the object of a user's own class is represented by its type
        value, tensors = repr(type(state)), {}
    sha = hashlib.sha256(json.dumps(value, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        sha.update(f"{name}{tensor.dtype}{list(tensor.shape)}".encode())
        for chunk in chunks_of(tensor):
            sha.update(chunk)
    return sha.hexdigest()
