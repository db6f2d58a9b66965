"""The confidence below which a policy calls no tool, and whether the requests suffice to choose it.

Axes: P requests with a right tool, Q requests without one.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from adapters.tools.learning.held_out import VISIBLE
from grpo.errors import ConfigError, warn_user

NUM_FOLDS = 5
"""Number of parts, each of which is left out once. Fewer if there are fewer requests of a kind."""

FEWEST = 3
"""Fewer requests of a kind never suffice: confidences that mean nothing separate 2 from 2 in one case of 6, 3 from 3 of 20."""


def confirmed_threshold(wanted: Float[Tensor, " P"], unwanted: Float[Tensor, " Q"], present: float) -> float:
    """`best_threshold`, or the present threshold with a warning if requests that are left out do not confirm the gain.

    The standard error of a balanced accuracy is sqrt(p (1 - p) / P + q (1 - q) / Q) / 2, where p and q are the shares of right
    decisions. They are counted with one more right and one more wrong decision each, so that they are never 0 or 1.
    """
    found = best_threshold(wanted, unwanted)
    fewest = min(len(wanted), len(unwanted))
    num_folds = min(NUM_FOLDS, fewest)
    kept = refused = 0
    for fold in range(num_folds if fewest >= FEWEST else 0):
        rest = [values[torch.arange(len(values)) % num_folds != fold] for values in (wanted, unwanted)]
        threshold = best_threshold(rest[0], rest[1])
        kept += int((wanted[fold::num_folds] >= threshold).sum())
        refused += int((unwanted[fold::num_folds] < threshold).sum())
    before = (float((wanted >= present).double().mean()) + float((unwanted < present).double().mean())) / 2
    gain = (kept / len(wanted) + refused / len(unwanted)) / 2 - before
    shares = [((right + 1) / (len(of) + 2), len(of)) for right, of in ((kept, wanted), (refused, unwanted))]
    error = math.sqrt(sum(p * (1 - p) / count for p, count in shares)) / 2
    if fewest >= FEWEST and gain >= 2 * error:
        return found
    needed = max(fewest + 1, math.ceil(fewest * (2 * error / max(gain, VISIBLE)) ** 2))
    measured = ""
    if fewest >= FEWEST:
        measured = f": on requests that were left out, the balanced accuracy changes by {gain:+.3f} +- {error:.3f}"
    warn_user(
        f"ToolSelectionPolicy.calibrate_threshold: threshold={present:g} stays. {len(wanted)} requests with a right tool and "
        f"{len(unwanted)} without one do not tell whether another is better{measured}. About {needed} of each kind would "
        "tell. To choose one all the same, set policy.threshold."
    )
    return present


def best_threshold(wanted: Float[Tensor, " P"], unwanted: Float[Tensor, " Q"]) -> float:
    """The lowest threshold t with the highest balanced accuracy: the mean of P(wanted >= t) and P(unwanted < t).

    t lies halfway between two adjacent confidences. Source: Youden 1950, Index for Rating Diagnostic Tests, Cancer 3, 32-35.
    """
    if len(wanted) == 0 or len(unwanted) == 0:
        raise ConfigError(
            "ToolSelectionPolicy.calibrate_threshold needs requests of both kinds; got "
            f"{len(wanted)} with a right tool and {len(unwanted)} without one."
        )
    confidences = torch.cat([wanted, unwanted]).double().unique()
    thresholds = torch.cat([confidences[:1], (confidences[1:] + confidences[:-1]) / 2])
    kept = (wanted.double() >= thresholds.unsqueeze(1)).double().mean(1)
    refused = (unwanted.double() < thresholds.unsqueeze(1)).double().mean(1)
    return float(thresholds[(kept + refused).argmax()])
