"""Rules for optional parts of scores (a critic's values, an exact KL) and for state keys."""

from typing import Any

import torch
from torch import Tensor

from grpo._common.conversion import describe
from grpo.policy_base import KeysStates
from grpo.types import select_rows

from .probe import PolicyProbe, difference
from .report import Verdict, absent, failed, passed, skipped

NEGATIVE_BY_ROUNDING = -1e-4
"""Smallest exact KL that passes. Rounding can make a KL of 0 slightly negative, but not smaller than this."""


def check_values(probe: PolicyProbe) -> Verdict:
    """A critic's values are finite at every step of the mask, and carry a gradient."""
    scores = probe.row_scorer(*probe.rows)
    owner = f"{probe.name}.score_actions"
    if scores.values is None:
        return skipped("The scores have no values.")
    if not bool(scores.values[scores.mask].isfinite().all()):
        return failed(f"{owner}: values must be finite at every step of the mask. Look for 0/0 in the value head.")
    if scores.final_values is not None and not bool(scores.final_values.isfinite().all()):
        return failed(
            f"{owner}: final_values must be finite. Return 0 where a row terminated, V(next state) where it was truncated."
        )
    if probe.parameters and not scores.values.requires_grad:
        return failed(
            f"{owner}: values must carry a gradient, or the critic is not trained. Compute them without no_grad()."
        )
    return passed(f"{describe(scores.values)}" + ("" if scores.final_values is None else ", with final values") + ".")


def check_kl(probe: PolicyProbe) -> Verdict:
    """An exact KL is finite, never negative, and carries a gradient."""
    scores = probe.row_scorer(*probe.rows)
    owner = f"{probe.name}.score_actions"
    if scores.kl is None:
        return skipped("The scores have no kl.")
    at_steps = scores.kl.detach()[scores.mask]
    if not bool((at_steps.isfinite() & (at_steps >= NEGATIVE_BY_ROUNDING)).all()):
        return failed(
            f"{owner}: kl must be finite and never negative; its minimum is {float(at_steps.min()):.3g}. Return the sum over "
            "all actions of each step, not log_probs - ref_log_probs of the action that was taken."
        )
    if probe.parameters and not scores.kl.requires_grad:
        return failed(f"{owner}: kl must carry a gradient, or it has no effect. Compute it without no_grad().")
    return passed(f"{describe(scores.kl)}, mean {float(at_steps.mean()):.3g}.")


def check_state_keys(probe: PolicyProbe) -> Verdict:
    """State keys are integers [N, T], and a row's keys do not depend on the order of the rows."""
    if not isinstance(probe.policy, KeysStates):
        return absent("state_keys")
    owner, mask = f"{probe.name}.state_keys", probe.scores.mask
    states, actions, group_ids = probe.rows
    keys: Any = probe.policy.state_keys(states, actions)
    if not isinstance(keys, Tensor) or keys.shape != mask.shape or keys.is_floating_point():
        return failed(f"{owner} must return integers {list(mask.shape)}, one per step; got {describe(keys)}.")
    backwards = torch.arange(len(group_ids) - 1, -1, -1)
    again = probe.policy.state_keys(select_rows(states, backwards), select_rows(actions, backwards))
    if (
        again.shape != keys.shape
        or difference(again.cpu().double(), keys[backwards].cpu().double(), mask[backwards].cpu()) > 0
    ):
        return failed(
            f"{owner} must depend on the row alone; with rows in another order the keys differ. Compute a key from the "
            "contents of a state, not from the order in which states are first seen."
        )
    return passed(f"{len(keys[mask].unique())} states in {int(mask.sum())} steps.")
