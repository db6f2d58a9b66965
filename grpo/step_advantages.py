"""One advantage per step: where rewards are given step by step, a critic knows values, or states recur.

Every function takes [N, T] padded on the right and looks at valid steps alone. Discounts are per column, and columns in between
that were not the policy's count as time.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .group_advantages import ABSOLUTE_BASELINES, Baseline, Scale, group_relative_advantages


def discounted_returns(rewards: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"], gamma: float) -> Float[Tensor, "N T"]:
    """G[n,t] = r[n,t] + gamma G[n,t+1], with rewards off the mask taken as 0.

    Example:
        >>> discounted_returns(torch.ones(1, 3), torch.ones(1, 3, dtype=torch.bool), 0.5).tolist()
        [[1.75, 1.5, 1.0]]

    Source:
        Sutton & Barto 2018, eq. 3.9.
    """
    clean = torch.where(mask, rewards, 0.0)
    if gamma == 1.0 or clean.shape[1] == 0:
        return clean.flip(1).cumsum(1).flip(1)
    returns, reach = clean, 1  # of the next `reach` rewards; twice as many each time
    while reach < clean.shape[1]:
        further = gamma**reach * returns[:, reach:]
        returns = torch.cat([returns[:, :-reach] + further, returns[:, -reach:]], dim=1)
        reach *= 2
    return returns


def group_relative_returns(
    rewards: Float[Tensor, "N T"],
    mask: Bool[Tensor, "N T"],
    group_ids: Int[Tensor, " N"],
    *,
    gamma: float = 1.0,
    baseline: Baseline = "group_mean",
    scale: Scale = "batch",
    std_ddof: int = 1,
    std_eps: float = 0.0,
    running_mean: float | None = None,
) -> Float[Tensor, "N T"]:
    """The return from each step on, relative to the group's members that have such a step.

    A[n,t] = (G[n,t] - b[n,t]) / s,  G[n,t] = r[n,t] + gamma G[n,t+1]

    The baseline of step t is over the group's rows whose column t is valid: a member that has ended is left out, not
    counted as 0, and one that is alone gets 0. `batch` is the std of G over all valid steps.

    Args:
        rewards: one number per step; off-mask values are never used.
        mask: the valid steps.
        group_ids: which rows belong together.
        gamma: discount per step.
        baseline: as in `group_relative_advantages`, per column.
        scale: as there; `group` is the std over one group's column.
        std_ddof: divisor n - ddof.
        std_eps: added to the standard deviation.
        running_mean: for `global_mean`.

    Returns:
        Advantages, 0 off the mask.

    Source:
        Shao et al. 2024, arXiv:2402.03300, sec. 4.1.3, without its normalisation of rewards before they are summed.
    """
    return _among_steps(
        discounted_returns(rewards, mask, gamma),
        mask,
        _pairs(group_ids.to(mask.device).unsqueeze(1), torch.arange(mask.shape[1], device=mask.device)),
        baseline=baseline,
        scale=scale,
        std_ddof=std_ddof,
        std_eps=std_eps,
        running_mean=running_mean,
    )


def process_supervised_advantages(
    rewards: Float[Tensor, "N T"],
    mask: Bool[Tensor, "N T"],
    group_ids: Int[Tensor, " N"],
    *,
    gamma: float,
    **options: Any,
) -> Float[Tensor, "N T"]:
    """Each step's reward relative to all step rewards of its group, then summed from the step on.

    A[n,t] = sum over s >= t of gamma^(s-t) (r[n,s] - b) / s_b,  b and s_b over all valid steps of the group

    Where every step gives the same reward (CartPole) it is 0: only what differs between steps is seen. 0 for a row alone in its
    group.

    Args:
        rewards: one number per step.
        mask: the valid steps.
        group_ids: which rows belong together.
        gamma: discount per step.
        **options: of `group_relative_advantages`; the paper's `scale` is `group`.

    Source:
        Shao et al. 2024, arXiv:2402.03300, sec. 4.1.3.
    """
    groups = group_ids.to(mask.device).unsqueeze(1).expand(mask.shape)
    _, places, counts = group_ids.to(mask.device).unique(return_inverse=True, return_counts=True)
    alone = (counts[places] == 1) & (options.get("baseline", "group_mean") not in ABSOLUTE_BASELINES)
    returns = discounted_returns(_among_steps(rewards, mask, groups, **options), mask, gamma)
    return torch.where(mask & ~alone.unsqueeze(1), returns, 0.0)


def state_group_advantages(
    rewards: Float[Tensor, " N"] | Float[Tensor, "N T"],
    mask: Bool[Tensor, "N T"],
    group_ids: Int[Tensor, " N"],
    state_keys: Int[Tensor, "N T"],
    *,
    gamma: float,
    weight: float,
    **options: Any,
) -> Float[Tensor, "N T"]:
    """GiGPO: the row among its group, plus the step among the group's steps that were taken in the same state.

    A[n,t] = A_row[n] + weight A_state[n,t],  A_row from the sum of the row's rewards, A_state from the discounted return from t
    on, among all steps of the group with the same key; a step alone in its state gets 0 there.

    Args:
        rewards: one number per step; or one per row, which its last step earns.
        mask: the valid steps.
        group_ids: which rows belong together.
        state_keys: equal numbers mark equal states within a group.
        gamma: discount per step.
        weight: omega. Larger listens more to what followed in the same state.
        **options: of `group_relative_advantages`, for both.

    Source:
        Feng et al. 2025 (GiGPO), arXiv:2505.10978, eq. 3 to 8.
    """
    totals, per_step = rewards, rewards
    if rewards.dim() == 1:
        per_step = rewards_at_the_end(rewards, mask)
    else:
        totals = torch.where(mask, rewards, 0.0).sum(1)
    of_rows = group_relative_advantages(totals, group_ids, **options).to(mask.device).unsqueeze(1)
    cells = _pairs(group_ids.to(mask.device).unsqueeze(1), state_keys)
    of_states = _among_steps(discounted_returns(per_step, mask, gamma), mask, cells, **options)
    return torch.where(mask, of_rows + weight * of_states, 0.0)


def generalized_advantages(
    rewards: Float[Tensor, "N T"],
    values: Float[Tensor, "N T"],
    mask: Bool[Tensor, "N T"],
    final_values: Float[Tensor, " N"] | None = None,
    *,
    gamma: float,
    gae_lambda: float,
) -> Float[Tensor, "N T"]:
    """Advantages from a critic (GAE); advantage + value is what the critic is trained towards.

    A[t] = delta[t] + gamma lambda A[t+1],  delta[t] = r[t] + gamma V[t+1] - V[t]

    V after a row's last step is its final value: 0 where the row terminated, the critic's value of the next state where it was
    only cut off (truncated). t + 1 is the row's next valid step; a gap of g columns discounts by gamma^g.

    Args:
        rewards: one number per step.
        values: V of the state each step was taken in.
        mask: the valid steps.
        final_values: see above; None: all rows terminated.
        gamma: discount per step.
        gae_lambda: 1 sums all that followed (no bias from the critic), 0 trusts the critic one step on (least variance).

    Returns:
        Advantages in float64, 0 off the mask.

    Source:
        Schulman et al. 2016, arXiv:1506.02438, eq. 16.
    """
    clean = [torch.where(mask, tensor.double(), 0.0).unbind(1) for tensor in (rewards, values)]
    after = torch.zeros(len(mask), dtype=torch.float64, device=mask.device)
    next_value = after if final_values is None else final_values.double()
    next_advantage = after
    discount = torch.tensor(gamma, dtype=torch.float64)
    # from a row's last valid step backwards: padding on the right takes no time
    begun = torch.zeros(len(mask), dtype=torch.bool, device=mask.device)
    columns = []
    for t in reversed(range(mask.shape[1])):
        valid = mask[:, t]
        begun = begun | valid
        delta = clean[0][t] + gamma * next_value - clean[1][t]
        advantage = delta + gamma * gae_lambda * next_advantage
        columns.append(torch.where(valid, advantage, 0.0))
        waited = torch.where(begun, discount, 1.0)
        next_advantage = torch.where(valid, advantage, waited * next_advantage)
        next_value = torch.where(valid, clean[1][t], waited * next_value)
    return torch.stack(columns[::-1], dim=1) if columns else torch.zeros_like(mask, dtype=torch.float64)


def rewards_at_the_end(rewards: Float[Tensor, " N"], mask: Bool[Tensor, "N T"]) -> Float[Tensor, "N T"]:
    """A row's one reward on its last valid step, 0 before; lost where a row has no step."""
    is_last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    return torch.where(is_last, rewards.to(mask.device).unsqueeze(1), 0.0)


def _among_steps(
    values: Float[Tensor, "N T"], mask: Bool[Tensor, "N T"], cells: Int[Tensor, "N T"], **options: Any
) -> Float[Tensor, "N T"]:
    """`group_relative_advantages` of the valid steps, those in equal `cells` being a group."""
    advantages = torch.zeros_like(values)
    advantages[mask] = group_relative_advantages(values[mask], cells[mask], **options)
    return advantages


def _pairs(first: Int[Tensor, "N 1"], second: Int[Tensor, "..."]) -> Int[Tensor, "N T"]:
    """A number for each pair: equal where both are."""
    _, first = first.unique(return_inverse=True)
    values, second = second.unique(return_inverse=True)
    return first * len(values) + second
