"""Rewards of episodes: the environment's own rewards, and custom terms."""

from collections.abc import Callable, Sequence
from typing import Literal, assert_never

import torch
from jaxtyping import Float
from torch import Tensor, nn

from adapters.control.environments.episodes import Episode, EpisodeStart, episode_mask, pad_to_steps
from grpo.arguments import describe, require_instances, require_numbers
from grpo.errors import ConfigError, RewardError


class EnvironmentReward(nn.Module):
    """The environment's own rewards, per step [N, T], or summed per episode [N].

    Per step, the advantage of a decision is its return to go (`credit="return_to_go"`, the default for such rewards) minus the
    mean over the group's episodes that are active at that step. Per episode, all decisions share one advantage.

    A truncated episode counts as terminated, unless there is a critic (`credit="gae"`).

    Args:
        per: Whether rewards are per step or per episode.
        discount: Discount factor per step for `per="episode"`. With `per="step"`, use `AdvantageConfig.gamma` instead.
    """

    def __init__(self, per: Literal["step", "episode"] = "step", discount: float = 1.0) -> None:
        super().__init__()
        require_instances("EnvironmentReward", Literal["step", "episode"], per=per)
        require_numbers("EnvironmentReward", discount=discount)
        if not 0.0 <= discount <= 1.0 or (per == "step" and discount != 1.0):
            raise ConfigError(
                f"EnvironmentReward: discount must lie in [0, 1], and be 1 with per='step'; got per={per!r}, "
                f"discount={discount}. With per='step' set AdvantageConfig.gamma instead."
            )
        self.per = per
        self.discount = discount

    def compute_rewards(
        self, states: Sequence[EpisodeStart], actions: Sequence[Episode]
    ) -> Float[Tensor, "N T"] | Float[Tensor, " N"]:
        """Rewards per step [N, T], with 0 after an episode's end, or per episode [N]."""
        match self.per:
            case "step":
                return _per_step([episode.rewards for episode in actions], actions)
            case "episode":
                return torch.stack([_discounted(episode.rewards, self.discount) for episode in actions])
            case _:
                assert_never(self.per)


class StepReward(nn.Module):
    """A shaping term with one number per decision. `WeightedRewards` gives it a name and a weight.

    Args:
        term: Maps an episode of L steps to one number per step, [L].

    Example:
        Add a cost for effort to the environment's reward::

            terms = {"env": EnvironmentReward(), "effort": StepReward(effort)}
            WeightedRewards(terms, weights={"env": 1.0, "effort": 0.1})
    """

    def __init__(self, term: Callable[[Episode], Tensor]) -> None:
        super().__init__()
        if not callable(term):
            raise ConfigError(f"StepReward: term must be a function Episode -> [L]; got {describe(term)}.")
        self.term = term

    def compute_rewards(
        self, states: Sequence[EpisodeStart], actions: Sequence[Episode]
    ) -> Float[Tensor, "N T"] | Float[Tensor, " N"]:
        """The value of the term at each step, [N, T], with 0 after an episode's end."""
        values = [torch.as_tensor(self.term(episode), dtype=torch.float64) for episode in actions]
        for row, (value, episode) in enumerate(zip(values, actions, strict=True)):
            if value.shape != (len(episode),):
                name = getattr(self.term, "__name__", type(self.term).__name__)
                raise RewardError(
                    f"StepReward: {name} must return one number per step, [{len(episode)}]; got {list(value.shape)} for row "
                    f"{row}. Return a tensor as long as episode.rewards."
                )
        return _per_step(values, actions)


def effort(episode: Episode) -> Float[Tensor, " L"]:
    """Cost of effort at each step, -|action|^2, for real-valued actions."""
    return -episode.actions.double().flatten(1).square().sum(1)


def _per_step(values: Sequence[Tensor], episodes: Sequence[Episode]) -> Float[Tensor, "N T"] | Float[Tensor, " N"]:
    """Pad to [N, T] with 0 after an episode's end. Returns [N] if there are several episodes and each has one step."""
    padded = pad_to_steps(torch.cat(list(values)), episode_mask(episodes))
    return padded.squeeze(1) if len(episodes) > 1 and padded.shape[1] == 1 else padded


def _discounted(rewards: Float[Tensor, " L"], discount: float) -> Float[Tensor, ""]:
    """sum over t of discount^t r[t]."""
    return (rewards * discount ** torch.arange(len(rewards), dtype=rewards.dtype)).sum()
