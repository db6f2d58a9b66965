"""The loss of supervised training, and the calibration of tool probabilities."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from adapters.tools.learning.tasks import ToolTask
from grpo.errors import ConfigError

if TYPE_CHECKING:
    from .policy import ToolSelectionPolicy


def negative_log_likelihood(policy: "ToolSelectionPolicy", tasks: Sequence[ToolTask]) -> Tensor:
    """Mean over the tasks of -log(sum over the right calls a of pi(a | request)), in nats.

    pi(a | request) is the product over the decisions that a determines: its tool, and the enumerated parameters whose values
    it names.
    """
    answers = [(row, call) for row, task in enumerate(tasks) for call in task.right_calls if call is not None]
    steps = policy.menu.steps_of([call for _, call in answers], partial=True)
    rows = torch.tensor([row for row, _ in answers])
    log_probs = policy.distribution(tasks).score(rows, steps).log_probs.sum(1)
    # logsumexp over the answers of each task
    rows = rows.to(log_probs.device)
    largest = log_probs.new_full((len(tasks),), -torch.inf).scatter_reduce(0, rows, log_probs.detach(), "amax")
    sums = log_probs.new_zeros(len(tasks)).index_add(0, rows, (log_probs - largest[rows]).exp())
    return -(largest + sums.log()).mean()


def offset_of_added(logits: Float[Tensor, "B K"], is_added: Bool[Tensor, " K"], share: float) -> float:
    """The number c to add to the logits of all added tools, so that they win the given share of requests of known tools.

        c = quantile_share over the requests of (max over known tools of the logit - max over added tools of the logit)

    Training raises the logits of known tools for all requests, also for those of added tools. On requests of known tools, an
    added tool should lose, but not by more than wrong known tools do.
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
    """The lowest threshold t with the highest balanced accuracy: the mean of P(wanted >= t) and P(unwanted < t).

    t lies halfway between two adjacent confidences.

    Source: Youden 1950, Index for Rating Diagnostic Tests, Cancer 3, 32-35.
    """
    if len(wanted) == 0 or len(unwanted) == 0:
        raise ConfigError(
            "ToolSelectionPolicy.calibrate_threshold needs requests of both kinds; got "
            f"{len(wanted)} with a right tool and {len(unwanted)} without one."
        )
    confidences = torch.cat([wanted, unwanted]).double().unique()
    thresholds = torch.cat([confidences[:1], (confidences[1:] + confidences[:-1]) / 2, confidences[-1:] + 1e-12])
    kept = (wanted.double() >= thresholds.unsqueeze(1)).double().mean(1)
    refused = (unwanted.double() < thresholds.unsqueeze(1)).double().mean(1)
    return float(thresholds[(kept + refused).argmax()])
