"""What an episode is worth: the environment's own rewards, and terms of one's own."""

from collections.abc import Callable, Sequence
from typing import Literal, assert_never

import torch
from jaxtyping import Float
from torch import Tensor, nn

from grpo.errors import ConfigError, RewardError

from .episodes import Episode, EpisodeStart, episode_mask, pad_to_steps


class EnvironmentReward(nn.Module):
    """The environment's own rewards, per step [N, T], or summed per episode [N].

    Per step, every decision is credited with what followed it (`credit="return_to_go"`, the default for such rewards), less the
    mean of the group's members that are still alive at that step. Per episode, all decisions share one number.

    An episode that is cut off counts as if nothing followed, unless there is a critic (`credit="gae"`).

    Args:
        per: which of the two.
        discount: per episode, of each step against the one before; per step it is `AdvantageConfig.gamma` that discounts.
    """

    def __init__(self, per: Literal["step", "episode"] = "step", discount: float = 1.0) -> None:
        super().__init__()
        if not 0.0 <= discount <= 1.0 or (per == "step" and discount != 1.0):
            raise ConfigError(
                f"EnvironmentReward: discount must lie in [0, 1], and with per='step' AdvantageConfig.gamma discounts; got "
                f"per={per!r}, discount={discount}."
            )
        self.per = per
        self.discount = discount

    def compute_rewards(
        self, states: Sequence[EpisodeStart], actions: Sequence[Episode]
    ) -> Float[Tensor, "N T"] | Float[Tensor, " N"]:
        """Rewards per step, 0 after an episode's end, or per episode."""
        match self.per:
            case "step":
                return _per_step([episode.rewards for episode in actions], actions)
            case "episode":
                return torch.stack([_discounted(episode.rewards, self.discount) for episode in actions])
            case _:
                assert_never(self.per)


class StepReward(nn.Module):
    """A shaping term: one number per decision, from the episode; give it a name and a weight with `WeightedRewards`.

    Args:
        term: an episode of L steps -> [L].

    Example:
        Pay for progress, and charge for effort::

            terms = {"env": EnvironmentReward(), "effort": StepReward(effort)}
            WeightedRewards(terms, weights={"env": 1.0, "effort": 0.1})
    """

    def __init__(self, term: Callable[[Episode], Tensor]) -> None:
        super().__init__()
        self.term = term

    def compute_rewards(
        self, states: Sequence[EpisodeStart], actions: Sequence[Episode]
    ) -> Float[Tensor, "N T"] | Float[Tensor, " N"]:
        """The term at every step, 0 after an episode's end."""
        values = [torch.as_tensor(self.term(episode), dtype=torch.float64) for episode in actions]
        for row, (value, episode) in enumerate(zip(values, actions, strict=True)):
            if value.shape != (len(episode),):
                name = getattr(self.term, "__name__", type(self.term).__name__)
                raise RewardError(
                    f"StepReward: {name} must give one number per step, [{len(episode)}]; got {list(value.shape)} for row "
                    f"{row}."
                )
        return _per_step(values, actions)


def effort(episode: Episode) -> Float[Tensor, " L"]:
    """-|action|^2 per step: what moving costs, for real-valued actions."""
    return -episode.actions.double().flatten(1).square().sum(1)


def _per_step(values: Sequence[Tensor], episodes: Sequence[Episode]) -> Float[Tensor, "N T"] | Float[Tensor, " N"]:
    """One number per step, 0 after an episode's end; [N] where each of several episodes has one step, as the trainer wants."""
    padded = pad_to_steps(torch.cat(list(values)), episode_mask(episodes))
    return padded.squeeze(1) if len(episodes) > 1 and padded.shape[1] == 1 else padded


def _discounted(rewards: Float[Tensor, " L"], discount: float) -> Float[Tensor, ""]:
    """sum over t of discount^t r[t]"""
    return (rewards * discount ** torch.arange(len(rewards), dtype=rewards.dtype)).sum()
