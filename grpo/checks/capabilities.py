"""Rules for the optional capabilities: each must agree with the policy's six required methods."""

import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grpo._collecting.scoring import Scorer
from grpo._collecting.update_plan import planned_parts
from grpo._common.conversion import as_log_probs, describe, pad_steps, require_lengths
from grpo.checkpoint import read_checkpoint, write_checkpoint
from grpo.policy_base import (
    HasPenalty,
    HasState,
    PlansMicroBatches,
    SamplesWithScores,
    ScoresActions,
    ScoresGroups,
    ScoresReference,
    SplitsSteps,
    SyncsSampler,
)
from grpo.types import ActionScores, row_totals, select_rows

from .probe import Draws, PolicyProbe, difference, first_difference, perturbed, scores_difference
from .report import Verdict, absent, failed, passed, skipped
from .rules import judge


def check_sync_sampler(probe: PolicyProbe) -> Verdict:
    """`sync_sampler` does not raise. It is called before the first sample, as in training."""
    if not isinstance(probe.policy, SyncsSampler):
        return absent("sync_sampler")
    probe.policy.sync_sampler()
    return passed("sync_sampler() returns.")


def check_score_actions(probe: PolicyProbe) -> Verdict:
    """`score_actions` agrees with `get_log_probabilities` and carries a gradient."""
    if not isinstance(probe.policy, ScoresActions):
        return absent("score_actions")
    owner = f"{probe.name}.score_actions"
    states, actions, group_ids = probe.rows
    scores = probe.row_scorer(states, actions, group_ids)
    raw = probe.raw_log_probs(states, actions)
    if raw.dim() == 1:
        gap = difference(row_totals(scores.log_probs.cpu().double(), scores.mask.cpu()), raw)
    else:
        width = max(raw.shape[1], scores.mask.shape[1])
        mask = pad_steps(scores.mask, width, False)
        gap = difference(pad_steps(scores.log_probs, width, 0.0), pad_steps(raw, width, 0.0), mask)
    if gap > probe.tolerance:
        return failed(
            f"{owner} must agree with get_log_probabilities(): the log-probs at the mask (their sum over a row's steps, if "
            f"that returns [N]) differ by {gap:.2g}. Compute both in one forward; mask only what the policy did not decide."
        )
    return _require_gradient(probe, owner, scores) or passed(
        f"{describe(scores.log_probs)}, {int(scores.mask.sum())} steps."
    )


def _require_gradient(probe: PolicyProbe, owner: str, scores: ActionScores) -> Verdict | None:
    if bool(probe.parameters) == scores.log_probs.requires_grad:
        return None
    return failed(
        f"{owner}: log_probs must carry a gradient if and only if get_parameters() has tensors that require one "
        f"({len(probe.parameters)} here); requires_grad is {scores.log_probs.requires_grad}. Training uses this method: "
        "compute without no_grad() or detach(), and let get_parameters() return the parameters themselves."
    )


def check_score_groups(probe: PolicyProbe) -> Verdict:
    """`score_groups` agrees with scoring the rows, also when a dropped row makes the groups uneven."""
    if not isinstance(probe.policy, ScoresGroups):
        return absent("score_groups")
    owner = f"{probe.name}.score_groups"
    states, actions, group_ids = probe.rows
    scorer = Scorer(probe.only("score_groups"))
    for kind, kept in (("equal", slice(0, len(group_ids))), ("uneven", slice(1, len(group_ids)))):
        if kind == "uneven" and (probe.num_actions == 1 or len(probe.states) == 1):
            continue
        scores = scorer(select_rows(states, kept), select_rows(actions, kept), group_ids[kept])
        expected = ActionScores(log_probs=probe.scores.log_probs[kept], mask=probe.scores.mask[kept])
        gap = scores_difference(scores, expected)
        if gap > probe.tolerance:
            return failed(
                f"{owner} must score like the rows one by one, in the order of the groups; with {kind} groups it differs by "
                f"{gap:.2g} (inf: other steps are masked). Use state b's result for all of actions[b], however many they are."
            )
        if (verdict := _require_gradient(probe, owner, scores)) is not None:
            return verdict
    return passed("Equal and uneven groups score like their rows.")


def check_sample_actions(probe: PolicyProbe) -> Verdict:
    """`sample_actions` returns the right shapes, and its mask and scores agree with scoring the actions."""
    if not isinstance(probe.policy, SamplesWithScores):
        return absent("sample_actions")
    owner = f"{probe.name}.sample_actions"
    states, actions, sampled = probe.sample(probe.only("sample_actions"), probe.states, probe.num_actions)
    assert sampled is not None
    scores = probe.score(probe.row_scorer, states, actions, probe.rows[2])
    told = sampled.scores or ActionScores(log_probs=scores.log_probs, mask=scores.mask)
    width = max(sampled.mask.shape[1], scores.mask.shape[1])
    if not torch.equal(pad_steps(sampled.mask, width, False).cpu(), pad_steps(scores.mask, width, False).cpu()):
        return failed(
            f"{owner}: mask must equal the mask from scoring the sampled actions; they differ ({int(sampled.mask.sum())} and "
            f"{int(scores.mask.sum())} steps). Mask the same steps in both: True at the policy's own decisions."
        )
    gap = scores_difference(told, scores)
    if gap > probe.tolerance:
        return failed(
            f"{owner}: scores must equal what score_actions() returns for the sampled actions; log-probs differ by "
            f"{gap:.2g}. If the sampler is not the policy itself, leave scores=None and return behaviour_log_probs."
        )
    behaviour = sampled.behaviour_log_probs
    if behaviour is not None and bool((behaviour.isinf() & sampled.mask).any()):
        return failed(
            f"{owner}: behaviour_log_probs of sampled steps must be finite, or NaN if unscored; some are infinite."
        )
    return passed(f"{describe(sampled.mask)} mask, agrees with scoring.")


def check_sampled_samples(probe: PolicyProbe) -> Verdict:
    """`sample_actions` samples from the distribution of its behaviour log-probs, or from the policy if it has none."""
    if not isinstance(probe.policy, SamplesWithScores):
        return absent("sample_actions")
    if probe.no_sampling_test:
        return skipped(probe.no_sampling_test)
    return judge(probe, f"{probe.name}.sample_actions", probe.sampled)


def check_entropy(probe: PolicyProbe) -> Verdict:
    """The exact entropy agrees with samples: the sum of (entropy + log-prob) over a row has mean 0."""
    if probe.scores.entropy is None:
        return skipped("The scores have no entropy.")
    if probe.num_samples == 0:
        return skipped("num_samples=0.")
    draws = probe.drawn
    if not draws.is_exact or draws.scores.entropy is None:
        return skipped("sample_actions() draws from another distribution on purpose.")
    return _judge_entropy(f"{probe.name}.score_actions", draws, draws.scores.entropy)


def _judge_entropy(owner: str, draws: Draws, entropy: Tensor) -> Verdict:
    count = len(entropy)
    surplus = row_totals((entropy + draws.scores.log_probs).cpu().double(), draws.scores.mask.cpu())
    error = float(surplus.std(correction=0)) / math.sqrt(count)
    # the entropy of actions that all samples may miss: those of probability 15 / count are missed once in exp(15) = 3e6 cases
    unseen = 15 / count * (math.log(count) + 5)
    mean = float(surplus.mean())
    # six standard errors are 2e-9 for a normal mean; that of rare actions has longer tails
    if not abs(mean) <= 6 * error + unseen:
        exact = float(row_totals(entropy.cpu().double(), draws.scores.mask.cpu()).mean())
        return failed(
            f"{owner}: entropy must be the exact -sum p log p of each step's distribution, in nats; it sums to {exact:.4f} per "
            f"row, and {count} samples give -log p = {exact - mean:.4f} +- {error:.4f}. Compute it from the log_softmax that "
            "actions are sampled from, with the natural logarithm, or leave entropy=None."
        )
    return passed(f"The entropy agrees with -log p of {count} samples to {abs(mean):.2g} (+- {error:.2g}) nats.")


def check_plan(probe: PolicyProbe) -> Verdict:
    """`plan_micro_batches` puts every row into exactly one forward pass."""
    if not isinstance(probe.policy, PlansMicroBatches):
        return absent("plan_micro_batches")
    states, actions, _ = probe.rows
    plan = probe.policy.plan_micro_batches(states, actions)
    parts = planned_parts(f"{probe.name}.plan_micro_batches", plan, len(states))
    return passed(f"{len(states)} rows in {len(parts)} forwards.")


def check_split_steps(probe: PolicyProbe) -> Verdict:
    """`split_steps` returns one row per valid step, in order, and each row scores like its step."""
    if not isinstance(probe.policy, SplitsSteps):
        return absent("split_steps")
    owner = f"{probe.name}.split_steps"
    scores = probe.scores
    count = int(scores.mask.sum())
    states, actions = probe.policy.split_steps(*probe.rows[:2])
    require_lengths(f"{owner}, one row per valid step", count, states=states, actions=actions)
    split = probe.score(probe.row_scorer, states, actions, torch.arange(count))
    if split.mask.shape[1] != 1 or not bool(split.mask.all()):
        return failed(
            f"{owner} must return rows of one step each; they score as {describe(split.log_probs)}. Split every step."
        )
    gap = difference(split.log_probs.squeeze(1), scores.log_probs[scores.mask])
    if gap > probe.tolerance:
        return failed(
            f"{owner} must return one row per step, row 0's steps first and in order, and each must score like its step; "
            f"log-probs differ by {gap:.2g}. Leave masked steps out, and return each step with the state it was taken in."
        )
    return passed(f"{count} steps score like in their rows.")


def check_penalty(probe: PolicyProbe) -> Verdict:
    """`penalty` returns the same finite scalar each time, with a gradient for parameters."""
    if not isinstance(probe.policy, HasPenalty):
        return absent("penalty")
    owner = f"{probe.name}.penalty"
    penalty: Any = probe.policy.penalty()
    again = probe.policy.penalty()
    if not isinstance(penalty, Tensor) or penalty.dim() != 0 or not penalty.is_floating_point():
        return failed(f"{owner} must return a scalar tensor of floats; got {describe(penalty)}. Sum the penalty up.")
    trained = [value for value in probe.parameters.values() if value.requires_grad]
    if not trained:
        return skipped("No parameter is trained.")
    if not penalty.requires_grad or all(
        found is None for found in torch.autograd.grad(penalty, trained, allow_unused=True)
    ):
        return failed(
            f"{owner} must have a gradient for get_parameters(), or it would change nothing. Compute it from these tensors "
            "without no_grad(), detach() or item()."
        )
    value, other = float(penalty.detach()), float(again.detach())
    if not (math.isfinite(value) and abs(value - other) <= probe.tolerance):
        return failed(
            f"{owner} must return the same finite number each time, because every rank computes it; got {value} and {other}. "
            "Draw nothing in it."
        )
    return passed(f"It is {value:.4g}, with a gradient.")


def check_reference(probe: PolicyProbe) -> Verdict:
    """The reference's log-probs do not change when the policy's parameters change."""
    if not isinstance(probe.policy, ScoresReference):
        return absent("reference_log_probabilities")
    owner, width = f"{probe.name}.reference_log_probabilities", probe.scores.mask.shape[1]

    def ask() -> Tensor:
        with torch.no_grad():
            return as_log_probs(owner, probe.policy.reference_log_probabilities(*probe.rows[:2]), len(probe.rows[2]))

    before = ask()
    if before.shape[1] > width:
        return failed(
            f"{owner} must return at most the rows' {width} steps; got {describe(before)}. Score the same steps."
        )
    mask = probe.scores.mask[:, : before.shape[1]].to(before.device)
    if not bool((before.isfinite() | ~mask).all()):
        return failed(f"{owner} must be finite for actions that the policy takes. Give each of them some probability.")
    with perturbed(probe.parameters.values()):
        gap = difference(ask(), before, mask)
    if gap > probe.tolerance:
        return failed(
            f"{owner} must not change when get_parameters() changes; it changed by {gap:.2g}, so the KL would stay near 0. "
            "Compute it from frozen weights: with the adapter off, from a stored table or from a copy."
        )
    return passed("It has the rows' shape and does not change when the parameters change.")


def check_state(probe: PolicyProbe) -> Verdict:
    """`state_dict`, written to a checkpoint, read back and loaded, restores the same state after the policy has changed."""
    if not isinstance(probe.policy, HasState):
        return absent("state_dict")
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder) / "state", {"state": probe.policy.state_dict()}, iteration=0)
        saved, again = read_checkpoint(path)["state"], read_checkpoint(path)["state"]
    with perturbed(probe.parameters.values()):
        probe.sample(probe.only(), probe.states, probe.num_actions)
        probe.policy.load_state_dict(saved)
        lost = first_difference(probe.policy.state_dict(), again, "state")
    if lost:
        return failed(
            f"{probe.name}.load_state_dict must restore what state_dict() returned; {lost} differs after a checkpoint and "
            "some sampling. Put back every entry, and return copies of tensors that change in place."
        )
    return passed("The state survives a checkpoint.")
