"""Calibration of a policy's tool probabilities: an offset for added tools, and a threshold for calling no tool."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def offset_of_added(logits: Float[Tensor, "B K"], is_added: Bool[Tensor, " K"], share: float) -> float:
    """The number c that makes added tools compete with known tools: adding c to the logits of all added tools lets them win
    the given share of requests that belong to known tools.

        c = quantile_share over the requests of (max over known tools of the logit - max over added tools of the logit)

    Training raises the logits of known tools for all requests, also for the requests of added tools. The lost rank of an added
    tool is therefore read off the requests of known tools: there it should lose, but not by more than wrong known tools do.

    Args:
        logits: Tool logits of requests whose right tools are known tools, without any offset.
        is_added: True for added tools.
        share: Share of these requests that may go to an added tool, between 0 and 1.
    """
    gap = logits[:, ~is_added].amax(1) - logits[:, is_added].amax(1)
    return float(gap.double().quantile(share))


def best_threshold(wanted: Float[Tensor, " P"], unwanted: Float[Tensor, " Q"]) -> float:
    """The threshold t with the highest balanced accuracy: the mean of P(wanted >= t) and P(unwanted < t).

    t lies halfway between two adjacent confidences. Ties go to the lowest threshold.

    Args:
        wanted: Confidences of requests that need a tool.
        unwanted: Confidences of requests for which no tool is right.

    Source:
        Youden 1950, Index for Rating Diagnostic Tests, Cancer 3, 32-35.
    """
    confidences = torch.cat([wanted, unwanted]).double().unique()
    thresholds = torch.cat([confidences[:1], (confidences[1:] + confidences[:-1]) / 2, confidences[-1:] + 1e-12])
    kept = (wanted.double().unsqueeze(0) >= thresholds.unsqueeze(1)).double().mean(1)
    refused = (unwanted.double().unsqueeze(0) < thresholds.unsqueeze(1)).double().mean(1)
    return float(thresholds[(kept + refused).argmax()])
