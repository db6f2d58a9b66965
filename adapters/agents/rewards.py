"""The rewards that environments and agent programs gave, as a reward model."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from grpo.arguments import describe
from grpo.errors import ContractError

from .conversations import Conversation


class EnvironmentReward:
    """Returns the rewards of the environments. Use it alone, or as a part of `WeightedRewards`.

    The reward of a conversation whose environment failed, or in which the model said nothing, is infinite.
    `RewardConfig.non_finite` says what happens to its row. NaN would say to `WeightedRewards` that this part does not apply,
    and the row would have the reward of the other parts.

    Args:
        per_turn: Whether each reward belongs to the last token of its turn, as credit per step needs it
            (`advantage.credit="return_to_go"`, for example). If not, a conversation has one reward, the sum over its turns.

    Example:
        Rewards of the environment, and a small price for each turn::

            def price(states, conversations):
                return [-0.01 * len(conversation.turns) for conversation in conversations]

            reward_model = WeightedRewards({"environment": EnvironmentReward(), "price": price})
    """

    def __init__(self, *, per_turn: bool = False) -> None:
        self._per_turn = per_turn

    def compute_rewards(
        self, states: Sequence[Any], actions: Sequence[Conversation]
    ) -> Float[Tensor, " N"] | Float[Tensor, "N T"]:
        """One reward per conversation, [N], or one per step, [N, T], which is 0 except at the last token of each turn.

        Raises:
            ContractError: The actions are no conversations.
        """
        for action in actions:
            if not isinstance(action, Conversation):
                raise ContractError(
                    f"EnvironmentReward: actions must be conversations of an AgentPolicy; got {describe(action)}. Pass "
                    "policy=AgentPolicy(...)."
                )
        width = max((len(action) for action in actions), default=0)
        if not self._per_turn or width < 2:  # if every row has one step, rewards per step are rewards per row
            rewards = torch.tensor([action.reward for action in actions], dtype=torch.float64)
            return rewards.masked_fill(rewards.isnan(), math.inf)
        rewards = torch.zeros(len(actions), width, dtype=torch.float64)
        for row, action in zip(rewards, actions, strict=True):
            if not action.turns:  # a fault of the whole row
                row[:] = math.inf
                continue
            ends = torch.tensor([turn.num_tokens for turn in action.turns], dtype=torch.int64).cumsum(0) - 1
            row[ends] = torch.tensor(action.rewards, dtype=torch.float64)
        return rewards.masked_fill(rewards.isnan(), math.inf)

    def explain_missing(self, states: Sequence[Any], actions: Sequence[Conversation]) -> list[str]:
        """Why conversations have no reward, each cause once: the state, what happened, and what to do."""
        found = {
            _cause(action): f"State {repr(state)[:80]}: {_cause(action)}"
            for state, action in zip(states, actions, strict=True)
            if math.isnan(action.reward)
        }
        return [*found.values()]

    def train(self, *_: Any) -> "EnvironmentReward":
        """Do nothing. `train`, `eval` and `to` do nothing, because there are no weights."""
        return self

    eval = to = train


def _cause(conversation: Conversation) -> str:
    """Why a conversation has no reward."""
    error = conversation.info.get("error", "no message")
    if conversation.ended_by == "timeout" and "turn_timeout" in error:
        return f"{error}. Raise AgentPolicy(turn_timeout=...), or lower max_new_tokens or concurrency."
    if conversation.ended_by == "timeout":
        return f"{error}. Find out what it waits for, or raise AgentPolicy(timeout=...)."
    if conversation.ended_by == "error":
        return f"the environment or the program raised {error}. Fix it, or set AgentPolicy(num_retries=...)."
    if not conversation.turns and conversation.ended_by == "length":
        return "its first prompt has no room for a message. Shorten the prompt, or raise AgentPolicy(max_tokens=...)."
    if not conversation.turns:
        return "the program returned without a message of the model. Await chat(messages)."
    return "the environment gave NaN as a reward. Return a number."
