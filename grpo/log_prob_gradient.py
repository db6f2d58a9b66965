"""From slopes to the gradient with respect to the log-probs: the chain rule, once for all terms of the loss."""

from jaxtyping import Float
from torch import Tensor

from .objective_steps import Steps
from .ratios import mean_over_steps, slope_by_steps
from .step_loss import StepLoss, times


class LogProbGradient:
    """Adds up what the terms' slopes push each log-prob with.

    With x = log_probs - old_log_probs per step, rho = exp(log rho), and log rho some function of the row's x:

    d loss / d log_probs = sum over terms of c w (s_log_prob + (s_ratio rho + s_log_ratio) d log rho / dx)

    Slopes in the same argument are added up first, so that each link of the chain is followed once.

    Args:
        steps: the rows.
        wanted: False where nobody asks for the gradient: then nothing is computed.
    """

    def __init__(self, steps: Steps, *, wanted: bool) -> None:
        self._steps = steps
        self._wanted = wanted
        self._by_log_prob: Tensor | None = None
        self._by_ratio: Tensor | None = None
        self._by_log_ratio: Tensor | None = None
        self._by_step_ratio: Tensor | None = None
        self._by_row_mean: Tensor | None = None

    def add(
        self, term: StepLoss, weights: Float[Tensor, "N T"], coef: float = 1.0, *, by_own_ratio: bool = False
    ) -> None:
        """Add a term, coef x the sum of loss x weights.

        Args:
            term: its slopes.
            weights: 0 off the mask.
            coef: of the whole term.
            by_own_ratio: its ratio is each step's own, whatever the ratio level.
        """
        if not self._wanted:
            return
        self._by_log_prob = _plus(self._by_log_prob, term.by_log_prob, weights, coef)
        self._by_log_ratio = _plus(self._by_log_ratio, term.by_log_ratio, weights, coef)
        if by_own_ratio:
            self._by_step_ratio = _plus(self._by_step_ratio, term.by_ratio, weights, coef)
        else:
            self._by_ratio = _plus(self._by_ratio, term.by_ratio, weights, coef)
        if term.by_row_mean is not None and term.free is not None:
            pushed = _plus(None, term.by_row_mean, weights, coef)
            assert pushed is not None
            self._by_row_mean = mean_over_steps(pushed, self._steps.mask) * term.free

    def total(self) -> Float[Tensor, "N T"]:
        """The gradient, 0 off the mask."""
        steps = self._steps
        at_level = self._by_log_ratio
        if self._by_ratio is not None:
            at_level = _plus(at_level, self._by_ratio, steps.ratio.slope)
        if at_level is not None:
            at_level = slope_by_steps(at_level, steps.mask, steps.config.ratio_level)
        own = self._by_step_ratio
        if own is not None:
            own = times(own, steps.step_ratio.slope)
        parts = [part for part in (at_level, self._by_log_prob, own, self._by_row_mean) if part is not None]
        gradient = parts[0]
        for part in parts[1:]:
            gradient = gradient.add_(part)
        return gradient


def _plus(so_far: Tensor | None, slope: Tensor | None, factor: Tensor, coef: float = 1.0) -> Tensor | None:
    """so_far + coef x slope x factor, in place; None: 0."""
    if slope is None:
        return so_far
    if so_far is not None:
        return so_far.addcmul_(slope, factor, value=coef)
    product = times(slope, factor)
    return product if coef == 1.0 else product.mul_(coef)
