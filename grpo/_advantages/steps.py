"""Advantages per step, from rewards per step, from steps taken in equal states, or from a critic.

Every function takes [N, T], padded on the right, and reads valid steps only. The discount applies per column, so masked columns
between two valid steps count too.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Bool, Float, Int, Real
from torch import Tensor

from grpo._common.conversion import as_float32, widest_float
from grpo._common.tensors import require_finite_values, require_tensors
from grpo.errors import ConfigError, RewardError
from grpo.types import CONTINUES, ExperienceBatch, row_totals, zero_outside

from .groups import ABSOLUTE_BASELINES, Baseline, Credit

Relative: TypeAlias = Callable[[Float[Tensor, " S"], Int[Tensor, " S"]], Float[Tensor, " S"]]
"""A function that maps (values, group ids) to advantages, such as `group_relative_advantages` with fixed settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The result of the advantage estimator for one batch, on the CPU."""

    advantages: Float[Tensor, " N"] | Float[Tensor, "N T"]
    """The advantage of each row, or of each step."""
    returns: Float[Tensor, "N T"] | None = None
    """The returns that the critic is trained on. None: there is no critic."""


def finite_rewards(rewards: Real[Tensor, "N *T"], mask: Bool[Tensor, "N T"] | None = None) -> Float[Tensor, "N *T"]:
    """Rewards as floats, 0 outside the mask. Integers become float64."""
    rewards = rewards if rewards.is_floating_point() else rewards.double()
    rewards = rewards if mask is None else zero_outside(rewards, mask.to(rewards.device))
    require_finite_values("rewards", rewards, error=RewardError)
    return rewards


def discounted_returns(rewards: Real[Tensor, "N T"], mask: Bool[Tensor, "N T"], gamma: float) -> Float[Tensor, "N T"]:
    """The discounted sum of the rewards from each step on. Rewards outside the mask count as 0.

    G[n,t] = r[n,t] + gamma G[n,t+1]

    Example:
        >>> discounted_returns(torch.ones(1, 3), torch.ones(1, 3, dtype=torch.bool), 0.5).tolist()
        [[1.75, 1.5, 1.0]]

    Source:
        Sutton & Barto 2018, eq. 3.9.
    """
    require_tensors(discounted_returns, rewards=rewards, mask=mask, gamma=gamma)
    returns = finite_rewards(rewards, mask)
    if gamma == 1.0:
        return returns.flip(1).cumsum(1).flip(1)
    reach = 1  # each return is the sum of `reach` discounted rewards; one pass doubles it
    while reach < returns.shape[1]:
        further = gamma**reach * returns[:, reach:]
        returns = torch.cat([returns[:, :-reach] + further, returns[:, -reach:]], dim=1)
        reach *= 2
    return returns


def generalized_advantages(
    rewards: Real[Tensor, "N T"],
    values: Float[Tensor, "N T"],
    mask: Bool[Tensor, "N T"],
    final_values: Float[Tensor, " N"] | None = None,
    *,
    gamma: float,
    gae_lambda: float,
) -> Float[Tensor, "N T"]:
    """Advantages from a critic (GAE). The critic is trained towards advantage + value.

    A[t] = delta[t] + gamma lambda A[t+1],  delta[t] = r[t] + gamma V[t+1] - V[t]

    t + 1 is the row's next valid step. A gap of g columns discounts by gamma^g. After the row's last step, V is the final
    value: 0 where the row terminated, the critic's value of the next state where the row was truncated.

    Args:
        rewards: One number per step.
        values: V of the state in which each step was taken.
        mask: The valid steps.
        final_values: V after each row's last step. None: all rows terminated.
        gamma: Discount per column. Smaller looks less far ahead.
        gae_lambda: 1 sums all later rewards (no bias from the critic), 0 trusts the critic after one step (least variance).

    Returns:
        Advantages in float64 (float32 on devices without it), 0 outside the mask.

    Source:
        Schulman et al. 2016, arXiv:1506.02438, eq. 16.
    """
    given = {"rewards": rewards, "values": values, "mask": mask, "final_values": final_values}
    require_tensors(generalized_advantages, **given, gamma=gamma, gae_lambda=gae_lambda)
    dtype = widest_float(values.device)
    rewards, values = finite_rewards(rewards, mask).to(dtype), zero_outside(values.to(dtype), mask)
    require_finite_values("values", values)
    if final_values is not None:
        require_finite_values("final_values", final_values)
    advantages = torch.zeros_like(values)
    next_advantage = values.new_zeros(len(values))
    next_value = next_advantage if final_values is None else final_values.to(dtype)
    discount = torch.tensor(gamma, dtype=dtype)
    started = torch.zeros_like(next_advantage, dtype=torch.bool)
    for t in reversed(range(mask.shape[1])):
        valid = mask[:, t]
        started = started | valid
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantage = delta + gamma * gae_lambda * next_advantage
        advantages[:, t] = torch.where(valid, advantage, 0.0)
        waiting = torch.where(started, discount, 1.0)  # a gap discounts; padding after the last step takes no time
        next_advantage = torch.where(valid, advantage, waiting * next_advantage)
        next_value = torch.where(valid, values[:, t], waiting * next_value)
    return advantages


def process_supervised_advantages(
    rewards: Real[Tensor, "N T"],
    mask: Bool[Tensor, "N T"],
    group_ids: Int[Tensor, " N"],
    relative: Relative,
    *,
    gamma: float,
    baseline: Baseline = "group_mean",
) -> Float[Tensor, "N T"]:
    """Standardise each step's reward among all step rewards of its group, then sum from the step on.

    A[n,t] = sum over s >= t of gamma^(s-t) (r[n,s] - b) / s_b,  b and s_b over all valid steps of the group

    If every step has the same reward (CartPole), all advantages are 0: only differences between steps count.

    `relative` computes (r - b) / s_b. The paper uses the baseline `group_mean` and the scale `group`. `baseline` names the
    baseline that `relative` subtracts. If this baseline depends on the group, the only row of a group has advantage 0.

    Source:
        Shao et al. 2024, arXiv:2402.03300, sec. 4.1.3.
    """
    given = {"rewards": rewards, "mask": mask, "group_ids": group_ids, "relative": relative, "gamma": gamma}
    require_tensors(process_supervised_advantages, **given)
    rewards = finite_rewards(rewards, mask)
    _, places, counts = group_ids.to(mask.device).unique(return_inverse=True, return_counts=True)
    compared = among_steps(rewards, mask, places.unsqueeze(1).expand(mask.shape), relative)
    returns = discounted_returns(compared, mask, gamma)
    has_peers = (counts[places] > 1).unsqueeze(1)
    return zero_outside(returns, mask if baseline in ABSOLUTE_BASELINES else mask & has_peers)


def state_group_advantages(
    rewards: Real[Tensor, " N"] | Real[Tensor, "N T"],
    mask: Bool[Tensor, "N T"],
    group_ids: Int[Tensor, " N"],
    state_keys: Int[Tensor, "N T"] | None,
    relative: Relative,
    *,
    gamma: float,
    weight: float,
) -> Float[Tensor, "N T"]:
    """GiGPO: the row's advantage in its group, plus the step's advantage among the group's steps in the same state.

    A[n,t] = A_row[n] + weight A_state[n,t]

    A_row compares the sums of the rows' rewards. A_state compares the discounted return from step t on with the returns of all
    steps of the group that have the same key. A step with a unique key has A_state = 0. A step with the key `CONTINUES`
    continues the decision of the step before it in its row: it has the same A_state, and is not compared itself. So a decision
    of many tokens counts once.

    `relative` computes A_row and A_state. If there is one reward per row, it counts as the reward of the row's last step.
    `weight` is the paper's omega: larger gives the comparison of equal states more weight.

    Source:
        Feng et al. 2025 (GiGPO), arXiv:2505.10978, eq. 3 to 8.
    """
    if state_keys is None:
        raise ConfigError(
            "advantage.credit='gigpo' needs the state each step was taken in. Give the policy a method "
            "state_keys(states, actions) -> [N, T] integers, or pass state_keys to ExperienceBatch.from_rows."
        )
    given = {"rewards": rewards, "mask": mask, "group_ids": group_ids, "state_keys": state_keys, "relative": relative}
    require_tensors(state_group_advantages, **given, gamma=gamma, weight=weight)
    rewards = finite_rewards(rewards, mask if rewards.dim() == 2 else None)
    of_rows = relative(row_totals(rewards, mask), group_ids).to(mask.device).unsqueeze(1)
    returns = discounted_returns(step_rewards(rewards, mask), mask, gamma)
    keys = state_keys.to(mask.device)
    begins = mask & (keys != CONTINUES)
    of_states = among_steps(returns, begins, cell_ids(group_ids, keys), relative)
    columns = torch.arange(mask.shape[1], device=mask.device).expand(mask.shape)
    begin = torch.where(begins, columns, 0).cummax(1).values  # the column in which each step's decision begins
    return zero_outside(of_rows + weight * of_states.gather(1, begin), mask)


def among_steps(
    values: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"], cells: Int[Tensor, "N T"], relative: Relative
) -> Float[Tensor, "N T"]:
    """Compute the advantage of each valid step among the valid steps with the same number in `cells`; 0 outside the mask."""
    advantages = torch.zeros_like(values)
    advantages[mask] = relative(values[mask], cells[mask])
    return advantages


def cell_ids(group_ids: Int[Tensor, " N"], keys: Int[Tensor, "... T"]) -> Int[Tensor, "N T"]:
    """Return one number per step. Steps with the same group and the same state key have equal numbers."""
    _, groups = group_ids.to(keys.device).unique(return_inverse=True)
    distinct, places = keys.unique(return_inverse=True)
    cells: Tensor = groups.unsqueeze(1) * len(distinct) + places
    return cells


def step_rewards(rewards: Float[Tensor, "N *T"], mask: Bool[Tensor, "N T"]) -> Float[Tensor, "N T"]:
    """Return one reward per step. If a row has a single reward, its last valid step gets this reward."""
    if rewards.dim() == 2:
        return rewards
    is_last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    return zero_outside(rewards.to(mask.device).unsqueeze(1), is_last)


def require_step_rewards(rewards: Tensor, credit: Credit, baseline: Baseline) -> None:
    """Require rewards per step, and a baseline that does not compare whole rows."""
    if rewards.dim() == 1:
        raise ConfigError(
            f"advantage.credit={credit!r} needs rewards per step, [N, T]; the reward model gives [N]. Use credit='row'."
        )
    if baseline in ("max_at_k", "length_weighted"):
        raise ConfigError(
            f"advantage.baseline={baseline!r} compares whole rows, and these rewards are per step: set credit='row'."
        )


def critic_estimate(
    batch: ExperienceBatch,
    rewards: Float[Tensor, "N *T"],
    mask: Bool[Tensor, "N T"],
    relative: Relative,
    *,
    gamma: float,
    gae_lambda: float,
) -> Estimate:
    """Generalized advantages, scaled over all valid steps by `relative`, and the critic's targets, which are not scaled."""
    if batch.values is None:
        raise ConfigError(
            "advantage.credit='gae' needs a critic's values. Return them in ActionScores.values (and final_values where "
            "rows are truncated), or set credit=None for group-relative advantages."
        )
    values = as_float32(batch.values.cpu())
    final_values = None if batch.final_values is None else batch.final_values.cpu()
    rewards = step_rewards(rewards, mask)
    advantages = generalized_advantages(rewards, values, mask, final_values, gamma=gamma, gae_lambda=gae_lambda)
    returns = zero_outside(advantages + values, mask)
    scaled = among_steps(advantages, mask, torch.zeros_like(mask, dtype=torch.int64), relative)
    return Estimate(advantages=scaled.to(values.dtype), returns=returns.to(values.dtype))
