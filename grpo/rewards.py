"""Reward models that are made of functions: weighted sums of rewards, and win rates from preferences.

Also the door for code that calls rewards itself, or makes a reward of several calls.
"""

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from ._common.calls import Call, takes
from ._common.conversion import as_tensor, describe, reward_name
from ._common.protocols import kept_state, restore_state
from ._processes.calls import call_in_process
from ._rewarding.answers import checked
from ._rewarding.deadlines import await_all, is_async
from ._rewarding.functions import AsksAboutGroups
from ._rewarding.missing import causes_of
from ._rewarding.parts import PlannedCalls, PlansCalls, ask, compares_actions, planned, require_killable
from .config import MAX_CONCURRENT
from .errors import ConfigError, RewardError
from .metrics import add_counts_and_sums
from .reward_model_base import Rewards, as_reward_model, is_function
from .types import Rows, select_rows

__all__ = [
    "Call", "PairwiseRewards", "PlannedCalls", "PlansCalls", "WeightedRewards", "ask_for_rewards", "await_all",
    "call_in_process", "checked", "compares_actions", "is_async", "pairs_within_groups", "planned",
    "require_killable",
]  # fmt: skip


class WeightedRewards:
    """A weighted sum of named rewards: R = sum_k weight_k R_k. The trainer reports each part under its name.

    A part that returns NaN for a row does not apply to the row: R is the sum of the other parts. A row without any part has no
    reward, which `RewardConfig.non_finite` handles. `rewards/NAME/applies` is the fraction of rows to which a part applies.

    Args:
        rewards: Name -> reward model, or plain `(states, actions) -> rewards`.
        weights: Name -> weight. None: all weights are 1.

    Raises:
        ConfigError: There is no reward, or the names of rewards and weights differ.

    Example:
        >>> parts = {"right": lambda s, a: [1.0, 0.0], "short": lambda s, a: [2.0, 4.0]}
        >>> both = WeightedRewards(parts, {"right": 1, "short": 0.5})
        >>> both.compute_rewards(["s", "s"], ["a", "b"]).tolist()
        [2.0, 2.0]
    """

    def __init__(self, rewards: Mapping[str, Any], weights: Mapping[str, float] | None = None) -> None:
        for argument, value in (("rewards", rewards), ("weights", {} if weights is None else weights)):
            if not isinstance(value, Mapping):
                raise ConfigError(f"WeightedRewards: {argument} must be a dict by name; got {describe(value)}.")
        self.rewards = {name: as_reward_model(reward) for name, reward in rewards.items()}
        self.weights = dict.fromkeys(rewards, 1.0) if weights is None else dict(weights)
        if not rewards or set(self.weights) != set(self.rewards):
            raise ConfigError(
                "WeightedRewards needs at least one reward and one weight for each; "
                f"got rewards {sorted(self.rewards)}, weights {sorted(self.weights)}. "
                "Use the same names for both."
            )
        of_parts: Mapping[str, Any] = self.weights
        for name, weight in of_parts.items():
            if not isinstance(weight, int | float | np.number) or not math.isfinite(weight):
                raise ConfigError(
                    f"WeightedRewards: the weight of {name!r} must be a finite number; got {describe(weight)}."
                )

    def compute_rewards(self, states: Any, actions: Any) -> Float[Tensor, "N *T"]:
        """Call every part without a deadline, and return the weighted sum of all rewards, sum_k weight_k R_k.

        `ask_for_rewards` returns the parts, too.
        """
        rewards: Rewards = ask(self, states, actions)
        return rewards.values

    def parts(self) -> Iterable[Any]:
        """The reward models of the sum."""
        return self.rewards.values()

    def plan_calls(self, states: Any, actions: Any) -> PlannedCalls:
        """The calls of all parts, whose answers become `Rewards` with these parts."""
        parts = {name: planned(part, states, actions) for name, part in self.rewards.items()}
        return self.summed(parts, len(states))

    def summed(self, parts: Mapping[str, PlannedCalls], num_rows: int) -> PlannedCalls:
        """The calls of several parts, and R = sum_k weight_k R_k over the parts that apply. R is NaN where no part applies.

        The sum is added in float64, and the result has the dtype of the least precise part.
        """

        def total(answers: list[Any]) -> Rewards:
            in_order = iter(answers)
            of_parts = {name: part.combine([next(in_order) for _ in part.calls]) for name, part in parts.items()}
            # the rewards of a single row may have the shape [1, 1], which the caller checks
            found = {
                name: checked(reward_name(self.rewards[name]), answer, num_rows, one_step_is_a_step=num_rows == 1)
                for name, answer in of_parts.items()
            }
            return Rewards(
                values=_weighted_sum({name: part.values for name, part in found.items()}, self.weights),
                components={name: part.values for name, part in found.items()},
                weights=self.weights,
                lost=_joined_masks(part.lost for part in found.values()),
                metrics=add_counts_and_sums(part.metrics for part in found.values()),
            )

        return PlannedCalls(calls=[call for part in parts.values() for call in part.calls], combine=total)

    @property
    def in_groups(self) -> Callable[[Int[Tensor, " N"]], "WeightedRewards"]:
        """`in_groups(group_ids)` returns a copy that holds the same parts, for N rows of these groups.

        Raises:
            AttributeError: No part has `in_groups`, so a row's reward does not depend on the other rows.
        """
        if not any(map(compares_actions, self.rewards.values())):
            raise AttributeError("WeightedRewards has in_groups only if one of its parts has it.")
        return self._in_groups

    def explain_missing(self, states: Rows, actions: Rows) -> list[str]:
        """Why rows have no reward, from each part that knows."""
        return [text for reward in self.rewards.values() for text in causes_of(reward, states, actions)]

    def _in_groups(self, group_ids: Int[Tensor, " N"]) -> "WeightedRewards":
        grouped = copy.copy(self)
        grouped.rewards = {
            name: part.in_groups(group_ids) if compares_actions(part) else part for name, part in self.rewards.items()
        }
        return grouped

    def train(self) -> "WeightedRewards":
        """Switch every part to training mode."""
        for reward in self.rewards.values():
            reward.train()
        return self

    def eval(self) -> "WeightedRewards":
        """Switch every part to evaluation mode."""
        for reward in self.rewards.values():
            reward.eval()
        return self

    def to(self, device: torch.device | str) -> "WeightedRewards":
        """Move every part to a device."""
        for reward in self.rewards.values():
            reward.to(device)
        return self

    def state_dict(self) -> dict[str, Any]:
        """The state of each part, by name."""
        return {name: kept_state(reward) for name, reward in self.rewards.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for name, reward in self.rewards.items():
            restore_state(reward, state[name])


class PairwiseRewards(AsksAboutGroups):
    """The win rate of each action among the actions of its group, from preferences between two actions of one state.

        r[i] = mean over the opponents j of row i of p[i, j],    p[j, i] = 1 - p[i, j]

    `compare(states, first_actions, second_actions)` gets P pairs, and returns P numbers: the probability that the first action
    is better, or 1, 0 and 0.5 for better, worse and equally good. NaN leaves a pair out. A row with opponents and without a
    comparison has no reward, which `RewardConfig.non_finite` handles. An action without an opponent has the reward 0.5.

    The opponents of an action are the `num_opponents / 2` actions before it and after it in its group, in a circle, or all
    others. The actions of a group are independent samples, so fewer opponents give the same expected reward with more noise.
    An action comes first in half of its comparisons, so a judge that favours the first action favours nobody. If all pairs of
    an even number of actions are compared, one comparison of each action has no counterpart.

    The mean reward of a group is 1/2 if all of its pairs are compared, for a good policy too. Evaluate with another reward.

    Args:
        compare: The function, which may be `async def`. It gets lists, tensors or arrays of P rows, as the policy makes them.
        num_opponents: An even number of opponents per action. Larger: less noise, and more comparisons, `num_opponents / 2` per
            action. None: all others, (G - 1) / 2 comparisons per action of a group of G.

    Raises:
        ConfigError: `compare` is no function of three arguments, or `num_opponents` is not even.

    Example:
        >>> longer = PairwiseRewards(lambda states, first, second: [len(a) > len(b) for a, b in zip(first, second)])
        >>> longer.in_groups(torch.tensor([0, 0, 0])).compute_rewards(["s"] * 3, ["abc", "a", "ab"]).tolist()
        [1.0, 0.0, 0.5]

    Source:
        Swamy et al. 2024 (SPO), arXiv:2401.04056, algorithm 2.
    """

    def __init__(self, compare: Callable[[Any, Any, Any], Any], *, num_opponents: int | None = None) -> None:
        if not is_function(compare) or not takes(compare, 3):
            raise ConfigError(
                "PairwiseRewards: compare must be a function of (states, first_actions, second_actions); got "
                f"{describe(compare)}. It returns one preference per pair, from 0 to 1."
            )
        is_count = isinstance(num_opponents, int) and not isinstance(num_opponents, bool)
        if num_opponents is not None and (not is_count or num_opponents < 2 or num_opponents % 2):
            raise ConfigError(
                f"PairwiseRewards: num_opponents must be an even number from 2 on, or None; got {describe(num_opponents)}. "
                "A comparison gives both of its actions an opponent."
            )
        super().__init__(compare)
        self.num_opponents = num_opponents

    def compute_rewards(self, states: Any, actions: Any) -> Float64[Tensor, " N"]:
        """Call `compare` without a deadline, and return the win rate of each row. Call `in_groups` first; the trainer does so.

        Raises:
            ConfigError: The groups are not known.
            RewardError: `compare` did not return one number from 0 to 1, or NaN, per pair.
        """
        win_rates: Tensor = ask(self, states, actions)
        return win_rates

    def plan_calls(self, states: Any, actions: Any) -> PlannedCalls:
        """One call of `compare` with all pairs. Raises a ConfigError if the groups are not known."""
        group_ids = self.groups_of(states, actions)
        num_rows = len(group_ids)
        first, second, has_opponent = pairs_within_groups(group_ids, self.num_opponents)
        pairs = tuple(select_rows(rows, i) for rows, i in ((states, first), (actions, first), (actions, second)))
        call = Call(name=self.__name__, function=self._function.function, arguments=pairs)

        def win_rates(answers: list[Any]) -> Float64[Tensor, " N"]:
            preferences = self._checked(answers[0], first, second) if answers else torch.zeros(0, dtype=torch.float64)
            is_known = ~preferences.isnan()
            winners, losers, known = first[is_known], second[is_known], preferences[is_known]
            wins, num_met = torch.zeros(2, num_rows, dtype=torch.float64)
            wins.index_add_(0, winners, known).index_add_(0, losers, 1 - known)
            num_met += torch.cat([winners, losers]).bincount(minlength=num_rows)
            return torch.where(has_opponent, wins / num_met, 0.5)

        return PlannedCalls(calls=[call] if len(first) else [], combine=win_rates)

    def _checked(self, answer: Any, first: Tensor, second: Tensor) -> Float64[Tensor, " P"]:
        """The preferences as a tensor of one number from 0 to 1, or NaN, per pair."""
        required = f"{self.__name__} must return one preference per pair, [P] = [{len(first)}], from 0 to 1"
        values = as_tensor(required, answer, RewardError)
        if values.shape != first.shape or values.is_complex():
            raise RewardError(
                f"{required}; got {describe(answer)}. Return 1 if the first action is better, else 0 or 0.5."
            )
        preferences = values.detach().cpu().double()
        wrong = ((preferences < 0) | (preferences > 1)).nonzero().squeeze(1)
        if len(wrong):
            shown = preferences[wrong[:4]].tolist()
            rows = [(int(first[pair]), int(second[pair])) for pair in wrong[:4]]
            raise RewardError(f"{required}; got {shown} for the rows {rows}. Return probabilities, not scores.")
        return preferences


def pairs_within_groups(
    group_ids: Int[Tensor, " N"], num_opponents: int | None = None
) -> tuple[Int[Tensor, " P"], Int[Tensor, " P"], Bool[Tensor, " N"]]:
    """The pairs of rows that are compared: each row with the next ones of its group, in a circle.

    Args:
        group_ids: The group of each row.
        num_opponents: An even number of opponents per row. None, or as many as the group has: all others.

    Returns:
        The first rows of the pairs, the second rows, and whether a row has an opponent. A group's pairs are adjacent.

    Example:
        >>> first, second, _ = pairs_within_groups(torch.tensor([0, 0, 0, 0]))
        >>> list(zip(first.tolist(), second.tolist()))
        [(0, 1), (0, 2), (1, 2), (1, 3), (2, 3), (3, 0)]
    """
    by_group = group_ids.argsort(stable=True)  # the rows of a group in order, group after group
    counts = group_ids.unique(return_counts=True)[1]
    sizes = counts.repeat_interleave(counts)
    starts = (counts.cumsum(0) - counts).repeat_interleave(counts)
    places = torch.arange(len(group_ids)) - starts
    pairs = []
    for distance in range(1, int(sizes.max()) // 2 + 1):
        is_chosen = (2 * distance < sizes) | (
            (2 * distance == sizes) & (places < distance)
        )  # the half circle counts once
        if num_opponents is not None:
            is_chosen &= (2 * distance <= num_opponents) | (num_opponents >= sizes - 1)
        partners = starts + (places + distance) % sizes
        pairs.append(torch.stack([is_chosen.nonzero().squeeze(1), partners[is_chosen]]))
    first, second = torch.cat(pairs, dim=1) if pairs else torch.zeros(2, 0, dtype=torch.int64)
    order = first.argsort(stable=True)
    has_opponent = torch.zeros(len(group_ids), dtype=torch.bool)
    has_opponent[by_group[sizes > 1]] = True
    return by_group[first[order]], by_group[second[order]], has_opponent


def _weighted_sum(parts: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    absent = {name: part.isnan() for name, part in parts.items()}
    weighted = [weights[name] * part.double().masked_fill(absent[name], 0.0) for name, part in parts.items()]
    total = torch.stack(weighted).sum(0).masked_fill(torch.stack([*absent.values()]).all(0), torch.nan)
    return total.to(min((part.dtype for part in parts.values()), key=lambda dtype: dtype.itemsize))


def _joined_masks(several: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for masks in several:
        for name, rows in masks.items():
            found[name] = rows | found[name] if name in found else rows
    return found


def ask_for_rewards(
    reward_model: Any,
    states: Rows,
    actions: Rows,
    *,
    group_ids: Tensor | None = None,
    timeout: float | None = None,
    max_concurrent: int = MAX_CONCURRENT,
) -> Rewards:
    """Ask a reward model once for the rewards of N rows, outside of training.

    Args:
        reward_model: A `RewardModel`, or a plain `(states, actions) -> rewards`.
        states: N states.
        actions: N actions.
        group_ids: The group of each row, [N], for a reward model that compares the actions of a group. None: not known.
        timeout: Seconds per call, as `RewardConfig.timeout`. None: no deadline.
        max_concurrent: Largest number of calls that are awaited at the same time.

    Raises:
        RewardError: The reward model did not return one number per row or per step. What it raises is not caught.
        ConfigError: `timeout` is given, and a part cannot run in another process.

    Example:
        >>> ask_for_rewards(lambda states, actions: [len(action) for action in actions], ["s", "s"], ["a", "ab"]).values
        tensor([1., 2.], dtype=torch.float64)
    """
    model = as_reward_model(reward_model)
    require_killable(model, timeout)
    if group_ids is not None and compares_actions(model):
        model = model.in_groups(group_ids)
    answer = ask(model, states, actions, timeout=timeout, max_concurrent=max_concurrent, in_process=call_in_process)
    return checked(reward_name(model), answer, len(states))
