"""Checks of the first iteration of a run: a gradient reaches the parameters, and the KL to the policy's own reference is 0."""

from collections.abc import Mapping

import torch

from grpo._common.preserved import preserved_random_state
from grpo._updating.first_ratio import TOLERANCE, dropout_of
from grpo._updating.optimizer_step import OptimizerStep
from grpo._updating.update_context import UpdateContext
from grpo._updating.update_rows import UpdateRows
from grpo.errors import ContractError, warn_user
from grpo.types import select_rows, zero_outside

KL_TOLERANCE = 1e-4
"""Largest mean KL that counts as rounding. Log-probs that half precision moves by 0.01 have a KL of 0.00005."""
CERTAIN = -1e-6
"""Log-prob above which an action counts as certain. Its gradient may be exactly 0."""


def check_first_iteration(
    rows: UpdateRows,
    metrics: Mapping[str, float],
    context: UpdateContext,
    optimizer_step: OptimizerStep,
    *,
    has_own_reference: bool,
) -> None:
    """Check an iteration that was the first of its run, by its rows and its metrics."""
    if metrics.get("train/zero_gradients") == 1 and not context.engine.divides_weights:
        _require_dependence(rows, context, optimizer_step)
    if has_own_reference and getattr(context.collector.policy, "reference_is_start", True):
        _compare_with_reference(rows, metrics, context)


def _require_dependence(rows: UpdateRows, context: UpdateContext, optimizer_step: OptimizerStep) -> None:
    """Raise an error if no log-prob of the rows that have an advantage, or are demonstrations, depends on any parameter.

    A gradient of 0 alone is no error: equal actions with opposite advantages cancel. Weights that differ from step to step do
    not cancel.
    """
    batch, parameters = rows.data.batch, list(optimizer_step.parameters.values())
    live = rows.data.advantages != 0
    chosen = ((live if live.dim() == 1 else live.any(1)) | ~rows.data.is_sampled).nonzero().squeeze(1)
    if not len(chosen):
        return
    is_certain = True
    for part in context.collector.plan_parts(batch.states, batch.actions, chosen):
        index = chosen[part]
        with preserved_random_state(), torch.enable_grad():
            states, actions = select_rows(batch.states, index), select_rows(batch.actions, index)
            scores = context.collector.scorer(states, actions, batch.group_ids[index])
            log_probs = zero_outside(scores.log_probs, scores.mask)
            weights = torch.arange(1, log_probs.numel() + 1, device=log_probs.device).sin().view(log_probs.shape)
            found = torch.autograd.grad((log_probs * weights).sum(), parameters, materialize_grads=True)
        if any(bool(slope.any()) for slope in found):
            return
        is_certain &= bool((log_probs > CERTAIN).all())
    if is_certain:
        return
    names = list(optimizer_step.parameters)
    raise ContractError(
        f"{context.policy_name}: in the first update, the gradient of every parameter must not be exactly 0 while rows have "
        f"advantages; it is 0 for all {len(names)} ({', '.join(names[:4])}{' ...' if len(names) > 4 else ''}), because no "
        "log-probability of the sampled actions depends on them. The policy computes its log-probabilities without these "
        "parameters: an adapter or a layer that is trained is not active where actions are scored."
    )


def _compare_with_reference(rows: UpdateRows, metrics: Mapping[str, float], context: UpdateContext) -> None:
    """Warn if the policy's own reference is not the policy as the run began. The KL must then begin at 0."""
    batch, policy = rows.data.batch, context.collector.policy
    reference = batch.ref_log_probs
    if reference is None or rows.data.num_replayed:
        return
    tolerance = TOLERANCE
    random = dropout_of(policy)
    if not rows.data.old_is_current and batch.old_log_probs is not None:
        old = batch.old_log_probs.to(reference.device)
        gap = zero_outside(old.double() - reference.double(), batch.mask.to(reference.device)).abs().max().item()
        found, random = f"log-probabilities differ by up to {gap:.2g}", []  # both were computed in eval()
    else:  # one update: its metric was measured before any weight changed
        gap, tolerance = abs(metrics.get("train/kl_mean", 0.0)), KL_TOLERANCE
        found = f"train/kl_mean is {gap:.2g}"
    if not gap > tolerance:
        return
    if random:
        cause = f"Dropout is on in updates ({', '.join(random[:3])}) and off in the reference: set it to 0."
    else:
        cause = (
            "Its weights changed after it took its reference, or reference_log_probabilities() scores another model than the "
            "policy at the start. Make the policy after its weights are loaded, or pass the reference that is meant as "
            "reference_policy=..."
        )
    warn_user(
        f"{context.policy_name}: the policy's own reference should be the policy as the run began, with a KL of 0; before the "
        f"first update, {found}. {cause}"
    )
