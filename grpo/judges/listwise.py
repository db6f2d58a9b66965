"""One call of a judge ranks all actions of a group."""

from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from grpo._common.calls import Call
from grpo._common.conversion import describe
from grpo._rewarding.functions import AsksAboutGroups
from grpo._rewarding.parts import PlannedCalls, ask
from grpo.reward_model_base import Rewards
from grpo.types import select_rows

from .answers import Judge, MalformedError


class ListwiseJudge(Judge, AsksAboutGroups):
    """The place of each action among the actions of its group, from a judge that ranks them in one call.

        r[i] = (number of actions behind i + half the number of other actions beside i) / (G - 1)

    `judge(state, actions)` gets a state and the G actions of its group. It returns their places from the best to the worst: for
    `[2, 0, 1]`, the action `actions[2]` is the best. A list inside is a tie: for `[2, [0, 1]]`, the other two are equally good.
    The reward is the share of the other actions that an action beats, as `PairwiseRewards` gives if it compares all of them,
    with one call instead of G (G - 1) / 2. An action without another one in its group has the reward 0.5.

    An answer that is no ranking of the group loses the group's rows (`judge/malformed`), and so does a call that raises
    (`judge/failed`): the trainer drops and counts them. If all calls fail, the error is raised, and `RewardConfig` says what
    happens, as it does when a call exceeds its deadline.

    The actions of a group are independent samples, so a judge that prefers a place in the list prefers no action. The mean
    reward of a group is 1/2, for a good policy too. Evaluate with another reward.

    Args:
        judge: The function, which may be `async def`. The calls for several groups are awaited together.

    Raises:
        ConfigError: `judge` is no function of two arguments.

    Example:
        >>> longest = ListwiseJudge(lambda state, actions: sorted(range(len(actions)), key=lambda i: -len(actions[i])))
        >>> longest.in_groups(torch.tensor([0, 0, 0])).compute_rewards(["s"] * 3, ["abc", "a", "ab"]).values.tolist()
        [1.0, 0.0, 0.5]
    """

    arguments: ClassVar[str] = "(state, actions)"
    returns: ClassVar[str] = (
        "It returns the places of the actions from the best to the worst, such as [2, 0, 1]; a list inside is a tie."
    )

    def compute_rewards(self, states: Any, actions: Any) -> Rewards:
        """Call the judge without a deadline, and return the rewards. Call `in_groups` first; the trainer does so.

        Raises:
            ConfigError: The groups are not known.
            RewardError: No answer is a ranking.
            Exception: What the judge raised, if it raised for every group.
        """
        rewards: Rewards = ask(self, states, actions)
        return rewards

    def plan_calls(self, states: Any, actions: Any) -> PlannedCalls:
        """One call for each group of several actions. Raises a ConfigError if the groups are not known."""
        group_ids = self.groups_of(states, actions)
        num_rows, counts = len(group_ids), group_ids.unique(return_counts=True)[1]
        groups = [rows for rows in group_ids.argsort(stable=True).split(counts.tolist()) if len(rows) > 1]
        function = self.guarded()

        def rewards(answers: list[Any]) -> Rewards:
            found, lost = self.readings(answers, lambda place, answer: shares_beaten(answer, len(groups[place])))
            values = torch.full((num_rows,), 0.5, dtype=torch.float64)
            for place, shares in found.items():
                values[groups[place]] = shares
            return Rewards(values, lost={name: _rows_of(groups, places, num_rows) for name, places in lost.items()})

        calls = [
            Call(name=self.__name__, function=function, arguments=(states[int(rows[0])], select_rows(actions, rows)))
            for rows in groups
        ]
        return PlannedCalls(calls=calls, combine=rewards)


def shares_beaten(ranking: Any, num_actions: int) -> Tensor:
    """The share of the other actions that each action beats, from a ranking of them. A tie counts half.

    Raises:
        MalformedError: The ranking does not have each of the places 0 to `num_actions` - 1 once.
    """
    required = (
        f"a ranking must have each place from 0 to {num_actions - 1} once, the best first; got {describe(ranking)}"
    )
    tiers = [_places(tier, required) for tier in _entries(ranking, required)]
    found = [place for tier in tiers for place in tier]
    if sorted(found) != list(range(num_actions)):
        raise MalformedError(f"{required} with the places {found[:20]}.")
    shares, num_behind = torch.zeros(num_actions, dtype=torch.float64), num_actions
    for tier in tiers:
        num_behind -= len(tier)
        shares[tier] = (num_behind + (len(tier) - 1) / 2) / (num_actions - 1)
    return shares


def _entries(ranking: Any, required: str) -> Iterable[Any]:
    """The entries of a list, a tuple, or a tensor or array of one axis."""
    if isinstance(ranking, Tensor | np.ndarray):
        ranking = ranking.tolist()
    if not isinstance(ranking, list | tuple):
        raise MalformedError(f"{required}.")
    return ranking


def _places(tier: Any, required: str) -> list[int]:
    """The places that one entry of a ranking names: one, or several that are a tie."""
    places = list(tier) if isinstance(tier, list | tuple) else [tier]
    if not places or not all(isinstance(place, int | np.integer) and not isinstance(place, bool) for place in places):
        raise MalformedError(f"{required}.")
    return [int(place) for place in places]


def _rows_of(groups: list[Tensor], places: list[int], num_rows: int) -> Tensor:
    lost = torch.zeros(num_rows, dtype=torch.bool)
    for place in places:
        lost[groups[place]] = True
    return lost
