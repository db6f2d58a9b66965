"""Advantages from a value function that is fitted in closed form: a critic without a network, a loss or an optimizer.

V(o) = theta . phi(o)

phi(o) are random Fourier features of the normalised observation (Rahimi and Recht 2007, "Random features for large-scale kernel
machines"), or, for discrete observations, one number per observation: a table. theta solves the equations of least-squares
temporal differences over the newest steps (Bradtke and Barto 1996, "Linear least-squares algorithms for temporal difference
learning"):

sum over steps of phi(o) (r + gamma V(o') - V(o)) = ridge n theta,  V(o') = 0 where the episode terminated

The advantages are generalised advantage estimates with this V.
"""

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from gymnasium import spaces
from jaxtyping import Float32, Float64
from torch import Tensor

from adapters.control.environments.episodes import Episode, pad_to_steps
from adapters.control.policy.episode_policy import EpisodePolicy
from grpo import ExperienceBatch
from grpo.advantage_estimator import generalized_advantages
from grpo.arguments import describe, require_instances, require_integers, require_numbers, with_checked_arguments
from grpo.errors import ConfigError, ContractError

MAX_TABLE = 1_000
"""Discrete observations with more values are no table: most would never be seen. They have Fourier features."""

MIN_STD = 1e-4
"""Parts of an observation that vary less are constant."""

MAX_DEVIATION = 5.0
"""Normalised observations are clamped to this many standard deviations."""


class FittedAdvantages:
    """Replaces the group's mean by a fitted value function: `GRPOTrainer(advantages=FittedAdvantages(policy, gamma=0.99))`.

    Each iteration, the value function is fitted anew to the newest steps, which are kept over iterations and saved in
    checkpoints. Advantages are generalised advantage estimates, whitened over the iteration's steps. Nothing is compared within
    a group, so `group_size=1` is enough, and episodes may begin anywhere: see `EpisodeOptions(num_steps=...)`.

    Rewards have to be per step, as those of `EnvironmentReward()`. On several ranks, each fits its own rows.

    Args:
        policy: The policy, whose observations are read.
        gamma: Discount factor per decision.
        gae_lambda: 1 sums all later rewards (no bias from the value function), 0 trusts it after one step (least variance).
        num_features: Number of Fourier features K. A larger number represents sharper functions, and takes K^3 time.
        width: Width of the features in standard deviations, per square root of the number of observations. A larger width is a
            smoother function.
        num_kept: Number of newest steps that are fitted. A larger number is less noisy, and more of it is from older policies.
        ridge: Penalty on theta, relative to the number of steps. A larger value is smoother and more biased; one below 1e-6 is
            near the rounding of the sums.
        seed: Seed of the features.

    Raises:
        ConfigError: Observations are images, or a number is out of its range.

    Source:
        Advantages: Schulman et al. 2016, arXiv:1506.02438.
    """

    @with_checked_arguments
    def __init__(
        self,
        policy: EpisodePolicy,
        *,
        gamma: float,
        gae_lambda: float = 0.95,
        num_features: int = 150,
        width: float = 1.0,
        num_kept: int = 8192,
        ridge: float = 1e-5,
        seed: int = 0,
    ) -> None:
        require_instances("FittedAdvantages", EpisodePolicy, "an EpisodePolicy", policy=policy)
        require_numbers("FittedAdvantages", gamma=gamma, gae_lambda=gae_lambda, width=width, ridge=ridge)
        require_integers("FittedAdvantages", 1, num_features=num_features, num_kept=num_kept)
        require_integers("FittedAdvantages", 0, seed=seed)
        if not (0.0 <= gamma <= 1.0 and 0.0 <= gae_lambda <= 1.0 and width > 0.0 and ridge > 0.0):
            raise ConfigError(
                "FittedAdvantages: gamma and gae_lambda must lie in [0, 1], and width and ridge above 0; got "
                f"gamma={gamma}, gae_lambda={gae_lambda}, width={width}, ridge={ridge}."
            )
        if policy.encoder.has_images:
            raise ConfigError(
                f"FittedAdvantages: observations must be numbers; got images, {policy.encoder.space}. Keep the group's mean, "
                "or use a critic: EpisodePolicy(critic=True) and advantage.credit='gae'."
            )
        self.gamma, self.gae_lambda, self.ridge, self.num_kept = gamma, gae_lambda, ridge, num_kept
        size = math.prod(policy.encoder.shape)
        self.is_table = isinstance(policy.encoder.space, spaces.Discrete) and size <= MAX_TABLE
        rng = np.random.default_rng(seed)
        self._frequencies = torch.from_numpy(rng.standard_normal((size, num_features)) / (width * size**0.5)).float()
        self._phases = torch.from_numpy(rng.uniform(0.0, 2 * np.pi, num_features)).float()
        self._kept = {
            "observations": torch.zeros(0, size),
            "rewards": torch.zeros(0, dtype=torch.float64),
            "is_last": torch.zeros(0, dtype=torch.bool),
            "terminated": torch.zeros(0, dtype=torch.bool),
        }
        self._finals = torch.zeros(0, size)  # the observation after each of the last steps

    def __call__(self, batch: ExperienceBatch) -> Tensor:
        """Advantages [N, T] of an iteration's episodes, float64, 0 after a row's last step.

        Raises:
            ContractError: Actions are no `Episode` objects, or rewards are not per step.
        """
        episodes, mask = self._episodes(batch), batch.mask.cpu()  # episodes and rewards are on the CPU
        rewards = batch.rewards.unsqueeze(1) if batch.rewards.dim() == 1 else batch.rewards
        ends = torch.tensor([len(one) for one in episodes]).cumsum(0) - 1
        is_terminated = torch.tensor([one.terminated for one in episodes])
        is_last = torch.zeros(int(ends[-1]) + 1, dtype=torch.bool).index_fill(0, ends, True)
        new = {
            "observations": torch.cat([one.observations for one in episodes]).flatten(1),
            "rewards": rewards[mask].double(),
            "is_last": is_last,
            "terminated": is_last.masked_scatter(is_last, is_terminated),
        }
        finals = torch.stack([one.final_observation for one in episodes]).flatten(1)
        self._kept = {name: torch.cat([rows, new[name]])[-self.num_kept :] for name, rows in self._kept.items()}
        self._finals = torch.cat([self._finals, finals])[-int(self._kept["is_last"].sum()) :]
        value = self._fit()
        advantages = generalized_advantages(
            rewards,
            pad_to_steps(value(new["observations"]), mask),
            mask,
            torch.where(is_terminated, 0.0, value(finals)),
            gamma=self.gamma,
            gae_lambda=self.gae_lambda,
        )
        std, mean = torch.std_mean(advantages[mask], correction=0)
        return torch.where(mask, (advantages - mean) / (std + 1e-8), 0.0)

    def _episodes(self, batch: ExperienceBatch) -> list[Episode]:
        episodes = list(batch.actions)
        if not all(isinstance(episode, Episode) for episode in episodes):
            raise ContractError(
                f"FittedAdvantages: actions must be Episode objects; got {describe(batch.actions)}. Use an EpisodePolicy."
            )
        if batch.rewards.dim() == 1 and max(map(len, episodes)) > 1:
            raise ContractError(
                f"FittedAdvantages: rewards must be per step, [N, T]; got {describe(batch.rewards)}. Use EnvironmentReward()."
            )
        return episodes

    def _fit(self) -> Callable[[Tensor], Float64[Tensor, " n"]]:
        """Solve for theta. Returns V as a function of observations [n, size]."""
        observations, ends = self._kept["observations"], (self._kept["is_last"], self._kept["terminated"])
        if self.is_table:
            of_table = self._solved(*self._sums_of_table(observations.argmax(1), self._finals.argmax(1), *ends))
            return lambda rows: of_table[rows.argmax(1)]
        features = self._features(observations)
        theta = self._solved(*self._sums(features(observations), features(self._finals), *ends))
        return lambda rows: features(rows).double() @ theta

    def _solved(self, matrix: Float64[Tensor, "K K"], totals: Float64[Tensor, " K"]) -> Float64[Tensor, " K"]:
        ridge = self.ridge * len(self._kept["rewards"])
        return torch.linalg.solve(matrix + ridge * torch.eye(len(matrix), dtype=matrix.dtype), totals)

    def _features(self, kept: Tensor) -> Callable[[Tensor], Float32[Tensor, "n K"]]:
        """Fourier features of observations, which are normalised as those that are kept."""
        std, mean = torch.std_mean(kept.double(), dim=0, correction=0)
        scale = torch.where(std > MIN_STD, 1.0 / std, 0.0)
        size = len(self._phases)

        def features(observations: Tensor) -> Float32[Tensor, "n K"]:
            normalised = ((observations.double() - mean) * scale).clamp(-MAX_DEVIATION, MAX_DEVIATION).float()
            phi = torch.ones(len(observations), size + 1)  # the last feature is constant
            waves = torch.addmm(self._phases, normalised, self._frequencies, out=phi[:, :size])
            waves.cos_().mul_((2.0 / size) ** 0.5)
            return phi

        return features

    def _sums(
        self, phi: Float32[Tensor, "n K"], finals: Float32[Tensor, "e K"], is_last: Tensor, terminated: Tensor
    ) -> tuple[Float64[Tensor, "K K"], Float64[Tensor, " K"]]:
        """The sums over steps of phi(o) (phi(o) - gamma phi(o')) and phi(o) r.

        Sums in float32 take a third of the time. Their rounding, about 1e-7 per step, is far below the ridge.
        """
        following = phi.roll(-1, 0)  # the next row is the next step, but for the last step of a part
        following[is_last] = finals
        following[terminated] = 0.0
        matrix, totals = phi.T @ phi.sub(following, alpha=self.gamma), phi.T @ self._kept["rewards"].float()
        return matrix.double(), totals.double()

    def _sums_of_table(
        self, number: Tensor, finals: Tensor, is_last: Tensor, terminated: Tensor
    ) -> tuple[Float64[Tensor, "K K"], Float64[Tensor, " K"]]:
        """The same, where phi(o) is 1 at the observation's number and 0 elsewhere."""
        following = number.roll(-1, 0)
        following[is_last] = finals
        size = self._kept["observations"].shape[1]
        matrix, totals = torch.zeros(size, size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
        matrix.index_put_((number, number), torch.ones(len(number), dtype=torch.float64), accumulate=True)
        matrix.index_put_((number, following), -self.gamma * (~terminated).double(), accumulate=True)
        return matrix, totals.index_add_(0, number, self._kept["rewards"])

    def state_dict(self) -> dict[str, Tensor]:
        """The steps that are kept."""
        return {**self._kept, "finals": self._finals}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` returned."""
        self._kept = {name: state[name] for name in self._kept}
        self._finals = state["finals"]
