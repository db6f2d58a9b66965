"""Distributions of real numbers, for `Box` spaces."""

import math
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from grpo.arguments import require_instances
from grpo.errors import ConfigError, ContractError

from .action_distribution import WithoutCategories, as_batch_of, wide

LOG_STD_LOW, LOG_STD_HIGH = -20.0, 2.0
"""Range to which log_std is clamped, as in the code of Haarnoja et al. 2018, arXiv:1801.01290."""

HALF_LOG_2PI = 0.5 * math.log(2 * math.pi)


def gaussian_sample(parameters: Float[Tensor, "n 2*D"], noise: Float[Tensor, "n D"]) -> Float[Tensor, "n D"]:
    """mean + std * noise. The parameters are mean and log_std, concatenated."""
    mean, log_std = parameters.chunk(2, -1)
    return torch.addcmul(mean, log_std.clamp(LOG_STD_LOW, LOG_STD_HIGH).exp(), noise)


def gaussian_log_prob(parameters: Float[Tensor, "n 2*D"], values: Float[Tensor, "n D"]) -> Float[Tensor, " n"]:
    """-sum over d of (z^2 / 2 + log_std + log(2 pi) / 2), z = (value - mean) / std."""
    mean, log_std = parameters.chunk(2, -1)
    log_std = log_std.clamp(LOG_STD_LOW, LOG_STD_HIGH)
    scaled = (values - mean) * (-log_std).exp()
    return (-0.5 * scaled.square() - log_std).sum(-1) - values.shape[-1] * HALF_LOG_2PI


class _BoxDistribution(WithoutCategories):
    """Base class for boxes: two parameters per dimension, and conversion to and from the environment."""

    action_dtype = torch.float32

    def __init__(self, space: spaces.Box) -> None:
        require_instances(type(self).__name__, spaces.Box, "a Box space", space=space)
        if not np.issubdtype(space.dtype, np.floating):
            raise ConfigError(
                f"{type(self).__name__} is for boxes of floats; got {space}. Use Discrete or MultiDiscrete for integers."
            )
        if 0 in space.shape:
            raise ConfigError(f"{type(self).__name__} needs a box with at least one number; got {space}.")
        self.env_shape, self.env_dtype = space.shape, space.dtype
        self.low, self.high = space.low.ravel(), space.high.ravel()
        self.num_noise = self.low.size
        self.num_parameters = 2 * self.low.size
        self.action_shape: tuple[int, ...] = (self.low.size,)

    def to_env(self, actions: Float[Tensor, "n D"]) -> NDArray[Any]:
        """Clip actions to the bounds, [n, *shape of the space]. Log-probs belong to the unclipped actions."""
        batch = np.clip(actions.detach().cpu().numpy(), self.low, self.high).astype(self.env_dtype, copy=False)
        return batch.reshape(len(batch), *self.env_shape)

    def from_env(self, actions: Any) -> Float[Tensor, "n D"]:
        """Convert the environment's actions to float32 [n, D]."""
        return torch.from_numpy(as_batch_of(self, actions, self.env_shape, "f").astype(np.float32))


class Gaussian(_BoxDistribution):
    """action = centre + half_width * u with u ~ N(mean, std^2), independent in each dimension.

    The parameters are mean and log_std, concatenated. In a dimension with two finite bounds, centre = (low + high) / 2 and
    half_width = (high - low) / 2, so u = -1 and u = 1 are the bounds. In any other dimension the action is u.

    log pi(action) = log N(u; mean, std^2) - sum over dimensions of log half_width

    log_std is clamped to [-20, 2]. Actions outside the box are clipped for the environment and scored unclipped: for the
    policy, clipping is part of the environment.
    """

    def __init__(self, space: spaces.Box) -> None:
        super().__init__(space)
        low, high = self.low.astype(np.float64), self.high.astype(np.float64)
        widths = high - low
        is_bounded = (widths > 0) & (widths < np.finfo(np.float32).max)
        half_widths = np.divide(widths, 2, out=np.ones_like(widths), where=is_bounded)
        centres = np.add(low / 2, high / 2, out=np.zeros_like(low), where=is_bounded)
        self._constants = {
            dtype: (torch.from_numpy(centres).to(dtype), torch.from_numpy(half_widths).to(dtype))
            for dtype in (torch.float32, torch.float64)
        }
        # log-probs are densities in the environment's units: change of variables from u to the action
        self._log_half_widths = float(np.log(half_widths).sum())

    def _scaled(self, values: Float[Tensor, "n D"]) -> Float[Tensor, "n D"]:
        """centre + half_width * u."""
        centre, half_width = (constant.to(values.device) for constant in self._constants[values.dtype])
        return torch.addcmul(centre, half_width, values)

    def noise(self, rng: np.random.Generator, num_steps: int) -> NDArray[np.float32]:
        """Standard normal noise."""
        return rng.standard_normal((num_steps, self.num_noise), dtype=np.float32)

    def _sample(self, parameters: Float[Tensor, "n 2*D"], noise: Float[Tensor, "n D"]) -> Float[Tensor, "n D"]:
        """centre + half_width * (mean + std * noise)."""
        return self._scaled(gaussian_sample(wide(parameters), noise))

    def _mode(self, parameters: Float[Tensor, "n 2*D"]) -> Float[Tensor, "n D"]:
        """Return the mean in the environment's units."""
        return self._scaled(wide(parameters).chunk(2, -1)[0])

    def _log_prob(self, parameters: Float[Tensor, "n 2*D"], actions: Float[Tensor, "n D"]) -> Float[Tensor, " n"]:
        """log pi(actions), summed over dimensions."""
        parameters = wide(parameters)
        centre, half_width = (constant.to(actions.device) for constant in self._constants[parameters.dtype])
        return gaussian_log_prob(parameters, (actions - centre) / half_width) - self._log_half_widths

    def _entropy(self, parameters: Float[Tensor, "n 2*D"]) -> Float[Tensor, " n"]:
        """Entropy: sum over d of (log_std + log half_width + (1 + log(2 pi)) / 2)."""
        log_std = wide(parameters).chunk(2, -1)[1].clamp(LOG_STD_LOW, LOG_STD_HIGH)
        return log_std.sum(-1) + (log_std.shape[-1] * (0.5 + HALF_LOG_2PI) + self._log_half_widths)


class _BoundedDistribution(_BoxDistribution):
    """Base class for boxes with finite bounds."""

    def __init__(self, space: spaces.Box) -> None:
        super().__init__(space)
        low, high = self.low.astype(np.float64), self.high.astype(np.float64)
        widths = high - low
        if not ((widths > 0) & (widths < np.finfo(np.float32).max)).all():
            raise ConfigError(
                f"{type(self).__name__} needs finite bounds with low < high in every dimension; got {space}. Use Gaussian "
                "(kind='gaussian'), or wrap the environment (gymnasium.wrappers.RescaleAction)."
            )
        self._constants = {
            dtype: [torch.from_numpy(constant).to(dtype) for constant in (low, high, widths)]
            for dtype in (torch.float32, torch.float64)
        }
        self._log_widths = float(np.log(widths).sum())

    def _log_fractions(
        self, actions: Float[Tensor, "n D"], like: Tensor
    ) -> tuple[Float[Tensor, "n D"], Float[Tensor, "n D"]]:
        """log x and log(1 - x), x = (action - low) / (high - low).

        Each distance is computed from its own bound, so it is exact near that bound. A distance of 0 is replaced by one
        rounding step, because an action at a bound stands for all actions that were rounded to it.
        """
        low, high, width = self._bounds(like)
        step = 0.25 * torch.finfo(actions.dtype).eps  # rounding step of x next to the bounds of [-1, 1]
        return ((actions - low) / width).clamp(min=step).log(), ((high - actions) / width).clamp(min=step).log()

    def _between(self, fractions: Float[Tensor, "n D"]) -> Float[Tensor, "n D"]:
        """low + (high - low) x."""
        low, _, width = self._bounds(fractions)
        return torch.addcmul(low, width, fractions)

    def _bounds(self, like: Tensor) -> list[Float[Tensor, " D"]]:
        """low, high and high - low, with the dtype and device of `like`."""
        return [constant.to(like.device) for constant in self._constants[like.dtype]]


class SquashedGaussian(_BoundedDistribution):
    """action = low + (high - low) (1 + tanh(u)) / 2 with a Gaussian u, whose parameters are mean and log_std, concatenated.

    log pi(action) = log N(u; mean, std^2) - sum over dimensions of log(d action / d u)
    u = (log x - log(1 - x)) / 2,  d action / d u = 2 (high - low) x (1 - x),  x = (action - low) / (high - low)

    The deterministic action is the squashed mean, which is the median. The mode of the density may lie at the bounds.

    Source:
        Haarnoja et al. 2018, arXiv:1801.01290, appendix C, with tanh written as 2 sigmoid(2u) - 1.
    """

    def noise(self, rng: np.random.Generator, num_steps: int) -> NDArray[np.float32]:
        """Standard normal noise."""
        return rng.standard_normal((num_steps, self.num_noise), dtype=np.float32)

    def _sample(self, parameters: Float[Tensor, "n 2*D"], noise: Float[Tensor, "n D"]) -> Float[Tensor, "n D"]:
        """Squash a Gaussian sample into the bounds."""
        return self._between((2.0 * gaussian_sample(wide(parameters), noise)).sigmoid())

    def _mode(self, parameters: Float[Tensor, "n 2*D"]) -> Float[Tensor, "n D"]:
        return self._between((2.0 * wide(parameters).chunk(2, -1)[0]).sigmoid())

    def _log_prob(self, parameters: Float[Tensor, "n 2*D"], actions: Float[Tensor, "n D"]) -> Float[Tensor, " n"]:
        """log pi(actions), summed over dimensions."""
        parameters = wide(parameters)
        log_x, log_rest = self._log_fractions(actions, parameters)
        log_derivatives = (log_x + log_rest).sum(-1) + (self._log_widths + self.num_noise * math.log(2.0))
        return gaussian_log_prob(parameters, 0.5 * (log_x - log_rest)) - log_derivatives

    def _entropy(self, parameters: Float[Tensor, "n 2*D"]) -> None:
        """Return None, because there is no closed form."""


class Beta(_BoundedDistribution):
    """Per dimension, x = (action - low) / (high - low) has density x^(alpha - 1) (1 - x)^(beta - 1) / B(alpha, beta).

    The parameters are raw_alpha and raw_beta, concatenated: alpha = 1 + softplus(raw_alpha), beta = 1 + softplus(raw_beta).
    Both are at least 1, so the density has one peak, which is the deterministic action.

    Logarithms are computed in float64, because log B is a small difference of large numbers.

    Source:
        Chou et al. 2017, "Improving Stochastic Policy Gradients in Continuous Control with Deep Reinforcement Learning using
        the Beta Distribution", section 4.
    """

    def __init__(self, space: spaces.Box) -> None:
        super().__init__(space)
        self.num_noise = 2

    def noise(self, rng: np.random.Generator, num_steps: int) -> NDArray[np.float32]:
        """Two halves of a 48-bit seed per row, as integers that float32 represents exactly.

        A Beta variable is sampled by rejection, which uses an unknown number of random numbers. Each row therefore has a seed
        for a generator.
        """
        return rng.integers(2**24, size=(num_steps, 2)).astype(np.float32)

    def _sample(self, parameters: Float[Tensor, "n 2*D"], noise: Float[Tensor, "n 2"]) -> Float[Tensor, "n D"]:
        """x = g / (g + h) of Gamma variables g and h, drawn by numpy from one random stream per row."""
        shapes = (1.0 + functional.softplus(parameters.detach().double())).cpu().numpy()
        if not np.isfinite(shapes).all():
            raise ContractError(
                "Beta: parameters must be finite; the network gave NaN or infinity. Lower the learning rate, or set "
                "max_grad_norm."
            )
        gammas = np.empty_like(shapes)
        bits = np.random.Philox(key=0)
        rng, stream = np.random.Generator(bits), bits.state
        for row, (left, right) in enumerate(noise.tolist()):
            stream["state"]["key"][0] = int(left) << 24 | int(right)
            bits.state = stream  # start of the key's stream, in half the time of a new generator
            gammas[row] = rng.standard_gamma(shapes[row])
        of_alpha, of_beta = np.split(gammas, 2, axis=1)
        return self._between(torch.from_numpy(of_alpha / (of_alpha + of_beta)).to(wide(parameters)))

    def _mode(self, parameters: Float[Tensor, "n 2*D"]) -> Float[Tensor, "n D"]:
        """The peak, x = (alpha - 1) / (alpha + beta - 2). The middle of the range if the density is flat."""
        alpha_less_1, beta_less_1 = (functional.softplus(wide(parameters)) + 1e-30).chunk(2, -1)
        return self._between(alpha_less_1 / (alpha_less_1 + beta_less_1))

    def _log_prob(self, parameters: Float[Tensor, "n 2*D"], actions: Float[Tensor, "n D"]) -> Float[Tensor, " n"]:
        """log pi(actions), summed over dimensions."""
        less_1 = functional.softplus(parameters.double())
        log_fractions = torch.cat(self._log_fractions(actions, less_1), dim=-1)
        log_prob = (less_1 * log_fractions).sum(-1) - self._log_normalisers(less_1)
        return log_prob.to(wide(parameters).dtype)

    def _entropy(self, parameters: Float[Tensor, "n 2*D"]) -> Float[Tensor, " n"]:
        """log B - (alpha - 1) psi(alpha) - (beta - 1) psi(beta) + (alpha + beta - 2) psi(alpha + beta) + log(high - low)."""
        less_1 = functional.softplus(parameters.double())
        both = less_1.unflatten(-1, (2, -1)).sum(-2)
        slopes = (both * torch.digamma(both + 2.0)).sum(-1) - (less_1 * torch.digamma(less_1 + 1.0)).sum(-1)
        return (self._log_normalisers(less_1) + slopes).to(wide(parameters).dtype)

    def _log_normalisers(self, less_1: Float[Tensor, "n 2*D"]) -> Float[Tensor, " n"]:
        """sum over d of log(B(alpha, beta) (high - low))."""
        both = less_1.unflatten(-1, (2, -1)).sum(-2)
        return torch.lgamma(less_1 + 1.0).sum(-1) - torch.lgamma(both + 2.0).sum(-1) + self._log_widths
