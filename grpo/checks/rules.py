"""Rules for every policy: methods, shapes, gradients, independent rows, and samples that match their log-probs."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from grpo._collecting.scoring import Scorer
from grpo._common.conversion import describe
from grpo._common.protocols import refuse_near_misses, require_methods
from grpo.errors import ContractError
from grpo.policy_base import CAPABILITIES, POLICY_METHODS, ScoresActions, ScoresReference, SyncsSampler
from grpo.types import ActionScores, Rows, select_rows

from .probe import Draws, PolicyProbe, difference, perturbed, scores_difference, some_rows
from .report import Verdict, failed, note, passed, skipped
from .steps import judge_draws


def check_methods(probe: PolicyProbe) -> Verdict:
    """The policy is an instance with all six required methods, and no method is one letter off an optional one."""
    require_methods(probe.policy, POLICY_METHODS, "policy", "PolicyModel")
    refuse_near_misses(probe.policy, "policy", CAPABILITIES)
    return passed(f"{probe.name} has {', '.join(POLICY_METHODS)}.")


def check_modes(probe: PolicyProbe) -> Verdict:
    """train() and eval() can be called."""
    probe.policy.train()
    probe.policy.eval()
    return passed("train() and eval() switch.")


def check_number_of_actions(probe: PolicyProbe) -> Verdict:
    """`generate_actions` returns G actions for each of B states."""
    rows = len(probe.rows[0])
    return passed(f"{rows} = {len(probe.states)} states x {probe.num_actions} actions.")


def check_shape(probe: PolicyProbe) -> Verdict:
    """`get_log_probabilities` returns a tensor [N] or [N, T]."""
    states, actions, group_ids = probe.rows
    found, count = probe.raw_log_probs(states, actions), len(group_ids)
    if not isinstance(found, Tensor) or found.dim() not in (1, 2) or len(found) != count:
        return failed(
            f"{probe.name}.get_log_probabilities must return a tensor [N] = [{count}] or [N, T]; got {describe(found)}. "
            "Return one log-probability per (state, action) pair, or one per step."
        )
    return passed(f"{describe(found)}.")


def check_dtype(probe: PolicyProbe) -> Verdict:
    """`get_log_probabilities` returns floating-point numbers."""
    found = probe.raw_log_probs(*probe.rows[:2])
    if not found.is_floating_point():
        return failed(
            f"{probe.name}.get_log_probabilities must return floating-point numbers; got {describe(found)}. "
            "Return log-probabilities, not indices."
        )
    return passed(f"{str(found.dtype).removeprefix('torch.')}.")


def check_device(probe: PolicyProbe) -> Verdict:
    """Log-probs are on the device of a parameter."""
    found = probe.raw_log_probs(*probe.rows[:2]).device
    devices = sorted({str(value.device) for value in probe.policy.get_parameters().values()})
    if devices and str(found) not in devices:
        return failed(
            f"{probe.name}.get_log_probabilities must return log-probs on the parameters' device, {', '.join(devices)}; got "
            f"{found}. Create new tensors on the device of a parameter, and do not move the result."
        )
    return passed(f"{found}.") if devices else skipped("The policy has no parameters to compare with.")


def check_finite(probe: PolicyProbe) -> Verdict:
    """Log-probs of sampled actions are finite: a sampled action has a probability above 0."""
    scores = probe.scores
    bad = (~scores.log_probs.isfinite() & scores.mask).any(1).nonzero().squeeze(1).tolist()
    if bad:
        return failed(
            f"{probe.name}: log-probs of sampled actions must be finite; rows {bad[:16]} are not. A sampled action cannot have "
            "probability 0: mask logits with torch.finfo(dtype).min, not -inf, and score the action that was sampled."
        )
    return passed(f"{len(scores.log_probs)} rows.")


def check_parameters(probe: PolicyProbe) -> Verdict:
    """`get_parameters` returns the policy's own tensors by name, not copies, so that an optimizer can train them."""
    owner = f"{probe.name}.get_parameters"
    first, second = probe.policy.get_parameters(), probe.policy.get_parameters()
    if not isinstance(first, dict) or not all(isinstance(value, Tensor) for value in first.values()):
        return failed(f"{owner} must return a dict of tensors by name; got {describe(first)}.")
    copies = [
        name for name, value in first.items() if second.get(name, value.new_empty(1)).data_ptr() != value.data_ptr()
    ]
    made = [name for name, value in first.items() if value.requires_grad and not value.is_leaf]
    if copies or made:
        return failed(
            f"{owner} must return the parameters themselves; {', '.join((copies + made)[:5])} is a copy or the result "
            "of a computation, so an optimizer would not train the policy. Return dict(self.named_parameters()), no clones."
        )
    returned = {value.data_ptr() for value in first.values()}
    module_parameters = probe.policy.named_parameters() if isinstance(probe.policy, nn.Module) else ()
    left_out = [n for n, value in module_parameters if value.requires_grad and value.data_ptr() not in returned]
    if left_out:
        return note(f"{owner} leaves out {', '.join(left_out[:5])}: they require a gradient but will not be trained.")
    trained = sum(value.requires_grad for value in first.values())
    return passed(f"{trained} of {len(first)} tensors are trained.") if trained else note("No tensor is trained.")


def check_gradient(probe: PolicyProbe) -> Verdict:
    """The gradient of the log-probs reaches at least one parameter and is finite.

    The log-probs are summed with random weights, because an unweighted sum can cancel.
    """
    probe.policy.train()
    states, actions, group_ids = probe.rows
    scores = probe.row_scorer(states, actions, group_ids)
    parameters = probe.parameters
    if not parameters and not scores.log_probs.requires_grad:
        return note(f"{probe.name} has no parameters that require a gradient: it is scored, but nothing is trained.")
    cure = (
        "Compute log-probabilities without no_grad(), detach() or item(), and let get_parameters() return the tensors that "
        "they are computed from: dict(self.named_parameters()), not copies and not state_dict()."
    )
    if not parameters:
        return failed(
            f"{probe.name}: log-probs carry a gradient, but get_parameters() has no tensor that requires one. {cure}"
        )
    if not scores.log_probs.requires_grad:
        return failed(f"{probe.name}: log-probs must carry a gradient to get_parameters(); they carry none. {cure}")
    weighted = torch.where(scores.mask, scores.log_probs * torch.rand_like(scores.log_probs), 0.0).sum()
    gradients: Any = torch.autograd.grad(weighted, list(parameters.values()), allow_unused=True)
    found = dict(zip(parameters, gradients, strict=True))
    missed = [name for name, gradient in found.items() if gradient is None]
    wild = [name for name, gradient in found.items() if gradient is not None and not bool(gradient.isfinite().all())]
    if len(missed) == len(found):
        return failed(
            f"{probe.name}: the gradient of the log-probs must reach get_parameters(); it reaches none. {cure}"
        )
    if wild:
        return failed(
            f"{probe.name}: the gradient of the log-probs must be finite; it is not for {', '.join(wild[:5])}. Look for "
            "log(0), 0/0 or sqrt(0); torch.autograd.set_detect_anomaly(True) names the operation."
        )
    unreached = f"; not {', '.join(missed[:8])}" if missed else ""
    return passed(f"The gradient reaches {len(found) - len(missed)} of {len(found)} parameters{unreached}.")


def check_repeatable(probe: PolicyProbe) -> Verdict:
    """Two calls in `eval()` return the same log-probs."""
    first, second = (probe.score(probe.row_scorer, *probe.rows) for _ in range(2))
    gap = scores_difference(second, first)
    if gap > (1e-6 if probe.tolerance < 1e-3 else probe.tolerance):
        return failed(
            f"{probe.name}: log-probs of the same rows must not change between calls in eval(); they change by {gap:.2g}. Let "
            "eval() switch dropout off, draw no random numbers while scoring, and do not depend on earlier calls."
        )
    return passed("Two calls in eval() agree.")


def check_train_mode(probe: PolicyProbe) -> Verdict:
    """Log-probs in `train()` equal those in `eval()`. Dropout makes the first ratio of an iteration differ from 1."""
    probe.policy.train()
    gap = scores_difference(probe.score(probe.row_scorer, *probe.rows), probe.scores)
    if gap > probe.tolerance:
        return note(
            f"Log-probs in train() differ by up to {gap:.2g} from those in eval(), so the first ratio of an iteration is not "
            "1. Dropout or batch normalisation is on in train(): set dropout to 0 unless it is intended."
        )
    return passed("Log-probs in train() and eval() agree.")


def check_rows(probe: PolicyProbe) -> Verdict:
    """A row's log-probs depend neither on the other rows of the batch nor on their padding."""
    states, actions, group_ids = probe.rows
    scorers = {"get_log_probabilities": Scorer(probe.only())}
    if isinstance(probe.policy, ScoresActions):
        scorers["score_actions"] = probe.row_scorer
    rows = some_rows(len(group_ids))
    for method, scorer in scorers.items():
        whole = probe.score(scorer, states, actions, group_ids)
        for row in rows:
            one = slice(row, row + 1)
            alone = probe.score(scorer, select_rows(states, one), select_rows(actions, one), group_ids[one])
            in_batch = ActionScores(log_probs=whole.log_probs[one], mask=whole.mask[one])
            gap = scores_difference(alone, in_batch)
            if gap > probe.tolerance:
                return failed(
                    f"{probe.name}.{method} must score a row the same alone and in a batch; row {row} differs by {gap:.2g}. "
                    "Use no batch statistics, keep padding masked, and make position ids independent of padding."
                )
    return passed(f"{len(rows)} rows score the same alone and in the batch.")


def check_generated_samples(probe: PolicyProbe) -> Verdict:
    """`generate_actions` samples from exp(`get_log_probabilities`)."""
    reason = probe.no_sampling_test
    if reason:
        return skipped(reason)
    if not probe.drawn.is_exact:
        return skipped("Training uses sample_actions(), which draws from another distribution on purpose.")
    return judge(probe, f"{probe.name}.generate_actions", probe.generated)


def judge(probe: PolicyProbe, owner: str, draws: Draws) -> Verdict:
    """Compare samples with their behaviour log-probs, or with the policy's log-probs if those are the same."""
    if draws.is_exact:
        state = select_rows(draws.states, slice(0, 1))
        log_probs, mask = draws.scores.log_probs, draws.scores.mask
        return judge_draws(
            owner, draws.actions, log_probs, mask, lambda actions: probe.score_one_state(state, actions), probe.noise
        )
    assert draws.sampled is not None
    assert draws.sampled.behaviour_log_probs is not None
    behaviour, mask = draws.sampled.behaviour_log_probs, draws.sampled.mask
    if not bool(behaviour[mask].isfinite().all()):
        return skipped("behaviour_log_probs contains unscored steps (NaN).")
    return judge_draws(owner, draws.actions, behaviour, mask, None)


def check_samples_after_update(probe: PolicyProbe) -> Verdict:
    """Samples still match their log-probs after the parameters have changed and `sync_sampler`, if any, was called."""
    if probe.no_sampling_test:
        return skipped(probe.no_sampling_test)
    if not probe.parameters:
        return skipped("The policy has no parameters that require a gradient.")

    def sync() -> None:
        probe.policy.train()  # as in training, for policies that copy their weights in eval()
        if isinstance(probe.policy, SyncsSampler):
            probe.policy.sync_sampler()
        probe.policy.eval()

    # so much that samples with the old weights differ, and so little that actions stay various
    with perturbed(probe.parameters.values(), relative=0.3):
        sync()
        verdict = judge(probe, f"{probe.name}, after its parameters have changed,", probe.draw())
    sync()
    if verdict.status != "failed":
        return verdict
    return failed(
        f"{verdict.message} Before, they agreed: the sampler uses old weights. Sample with the current parameters, or "
        "copy them into the sampler in sync_sampler()."
    )


def check_copy(probe: PolicyProbe) -> Verdict:
    """`copy.deepcopy(policy)` can serve as a reference: it scores like the policy and does not change with it."""
    try:
        twin = copy.deepcopy(probe.policy)
    except Exception as error:  # recovery: reported as a note or a failure
        message = f"copy.deepcopy({probe.name}) raised {type(error).__name__}: {error}."
        if isinstance(probe.policy, ScoresReference):
            return note(f"{message} The policy has reference_log_probabilities() instead.")
        return failed(
            f"{message} A reference_policy is such a copy: give the class a __deepcopy__ or reference_log_probabilities()."
        )
    shared = _shared_storage(probe.policy.get_parameters(), twin.get_parameters())
    if shared:
        return failed(
            f"A deepcopy of {probe.name} must have its own tensors; {', '.join(shared[:5])} are shared, so a reference "
            "would change with the policy. Let __deepcopy__ copy every parameter."
        )
    other = PolicyProbe(twin, probe.states, probe.num_actions, 0, 0)
    twin.eval()
    if (gap := scores_difference(other.score(other.row_scorer, *probe.rows), probe.scores)) > probe.tolerance:
        return failed(
            f"A deepcopy of {probe.name} must score like the policy; it differs by {gap:.2g}. Copy every parameter."
        )
    with perturbed(other.parameters.values()):
        if (gap := _gap(probe, probe)) > probe.tolerance:
            return failed(
                f"A deepcopy of {probe.name} must be independent; changing its parameters changes the policy's log-probs by "
                f"{gap:.2g}. Keep no tensors and no closures that both share."
            )
        moved = _gap(other, probe)
    with perturbed(probe.parameters.values()):
        expected = _gap(probe, probe)
    if expected > probe.tolerance and moved == 0.0:
        return failed(
            f"A deepcopy of {probe.name} must score with its own parameters; changing them changes nothing. Keep no bound "
            "methods or closures of the original in attributes: they keep using the original's parameters."
        )
    return passed("A deepcopy shares nothing and scores like the policy.")


def _gap(scored: PolicyProbe, probe: PolicyProbe) -> float:
    """How far the scores of the probe's rows are from what they were."""
    try:
        return scores_difference(scored.score(scored.row_scorer, *probe.rows), probe.scores)
    except Exception:  # recovery: with other parameters, the actions may lie outside the support
        return float("inf")


def _shared_storage(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    storages = {value.untyped_storage().data_ptr() for value in first.values() if value.numel()}
    return [n for n, value in second.items() if value.numel() and value.untyped_storage().data_ptr() in storages]


def check_to(probe: PolicyProbe) -> Verdict:
    """`to(device)` moves the parameters, and the log-probs are then computed on that device."""
    home = next((value.device for value in probe.policy.get_parameters().values()), torch.device("cpu"))
    targets = [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]
    try:
        for target in targets:
            _move(probe, target)
    finally:
        probe.policy.to(home)
    return passed(f"Parameters and log-probs move to {', '.join(map(str, targets))}.")


def _move(probe: PolicyProbe, target: torch.device) -> None:
    probe.policy.to(target)
    parameters = probe.policy.get_parameters()
    stayed = [name for name, value in parameters.items() if value.device.type != target.type]
    broken = [name for name, value in parameters.items() if value.requires_grad and not value.is_leaf]
    if stayed or broken:
        raise ContractError(
            f"{probe.name}.to({str(target)!r}) must move every parameter in place; {', '.join((stayed + broken)[:5])} did not "
            "move or became the result of a computation. Without nn.Module, use value.data = value.data.to(device)."
        )
    states, actions, group_ids = probe.rows
    scores = probe.score(probe.row_scorer, states, _on(target, actions), group_ids)
    if parameters and scores.log_probs.device.type != target.type:
        raise ContractError(
            f"{probe.name}: after to({str(target)!r}) log-probs must be on {target}; they are on {scores.log_probs.device}. "
            "Create new tensors on the device of a parameter."
        )
    gap = difference(scores.log_probs, probe.scores.log_probs, probe.scores.mask)
    if gap > max(probe.tolerance, 1e-3):
        raise ContractError(
            f"{probe.name}: to({str(target)!r}) must not change log-probs; they differ by {gap:.2g}. Move every tensor that "
            "the policy computes with."
        )


def _on(device: torch.device, actions: Rows) -> Rows:
    """The actions as the policy would have sampled them on `device`."""
    if isinstance(actions, Tensor):
        return actions.to(device)
    if isinstance(actions, list):
        return [action.to(device) if isinstance(action, Tensor) else action for action in actions]
    return actions
