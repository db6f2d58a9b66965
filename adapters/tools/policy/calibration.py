"""Calibration of a policy's tool probabilities: an offset for added tools, and a threshold for calling no tool."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo.errors import ConfigError


def offset_of_added(logits: Float[Tensor, "B K"], is_added: Bool[Tensor, " K"], share: float) -> float:
    """The number c that makes added tools compete with known tools: adding c to the logits of all added tools lets them win
    the given share of requests that belong to known tools.

        c = quantile_share over the requests of (max over known tools of the logit - max over added tools of the logit)

    Training raises the logits of known tools for all requests, also for the requests of added tools. The lost rank of an added
    tool is therefore read off the requests of known tools: there it should lose, but not by more than wrong known tools do.

    Args:
        logits: Tool logits of requests whose right tools are known tools, without any offset.
        is_added: True for added tools.
        share: Share of these requests that may go to an added tool, from 0 to 1.

    Raises:
        ConfigError: There is no request, no added tool or no other tool, or `share` is not from 0 to 1.
    """
    if len(logits) == 0 or not 0 <= share <= 1 or bool(is_added.all()) or not bool(is_added.any()):
        raise ConfigError(
            "ToolSelectionPolicy.calibrate needs states, a share from 0 to 1, and both added and other tools; got "
            f"{len(logits)} states, share={share}, {int(is_added.sum())} added and {int((~is_added).sum())} other tools. "
            "Call it after add_tools, with requests of the other tools."
        )
    gap = logits[:, ~is_added].amax(1) - logits[:, is_added].amax(1)
    return float(gap.double().quantile(share))


def best_threshold(wanted: Float[Tensor, " P"], unwanted: Float[Tensor, " Q"]) -> float:
    """The threshold t with the highest balanced accuracy: the mean of P(wanted >= t) and P(unwanted < t).

    t lies halfway between two adjacent confidences. Ties go to the lowest threshold.

    Args:
        wanted: Confidences of requests that need a tool.
        unwanted: Confidences of requests for which no tool is right.

    Raises:
        ConfigError: One of the two is empty.

    Source:
        Youden 1950, Index for Rating Diagnostic Tests, Cancer 3, 32-35.
    """
    if len(wanted) == 0 or len(unwanted) == 0:
        raise ConfigError(
            "ToolSelectionPolicy.calibrate_threshold needs requests of both kinds; got "
            f"{len(wanted)} with a right tool and {len(unwanted)} without one."
        )
    confidences = torch.cat([wanted, unwanted]).double().unique()
    thresholds = torch.cat([confidences[:1], (confidences[1:] + confidences[:-1]) / 2, confidences[-1:] + 1e-12])
    kept = (wanted.double().unsqueeze(0) >= thresholds.unsqueeze(1)).double().mean(1)
    refused = (unwanted.double().unsqueeze(0) < thresholds.unsqueeze(1)).double().mean(1)
    return float(thresholds[(kept + refused).argmax()])
