"""`check_policy` and `check_reward_model`, and the rules that they check, in order."""

import copy
from collections.abc import Collection
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from grpo._common.conversion import describe, require_lengths, reward_name
from grpo._common.preserved import preserved_random_state
from grpo.errors import ConfigError, ContractError, RewardError
from grpo.policy_base import POLICY_METHODS
from grpo.reward_model_base import Rewards, as_reward_model
from grpo.rewards import ask_for_rewards, compares_actions
from grpo.types import Rows, select_rows

from . import capabilities as capability
from . import extras as extra
from . import rules as rule
from .probe import FULL_PRECISION, PolicyProbe, difference, first_difference, left_as_found
from .report import CheckReport, CheckResult, Rule, Verdict, failed, note, passed, run_rules, skipped

POLICY_RULES: tuple[Rule, ...] = (
    Rule("methods", rule.check_methods),
    Rule("modes", rule.check_modes, ("methods",)),
    Rule("parameters", rule.check_parameters, ("modes",)),
    Rule("sync_sampler", capability.check_sync_sampler, ("modes",)),
    Rule("number of actions", rule.check_number_of_actions, ("modes", "sync_sampler")),
    Rule("log-prob shape", rule.check_shape, ("number of actions",)),
    Rule("log-prob dtype", rule.check_dtype, ("log-prob shape",)),
    Rule("device", rule.check_device, ("log-prob dtype", "parameters")),
    Rule("score_actions", capability.check_score_actions, ("device",)),
    Rule("gradient", rule.check_gradient, ("score_actions",)),
    Rule("log-probs finite", rule.check_finite, ("score_actions",)),
    Rule("repeatable", rule.check_repeatable, ("log-probs finite",)),
    Rule("train mode", rule.check_train_mode, ("repeatable",)),
    Rule("independent rows", rule.check_rows, ("repeatable",)),
    Rule("score_groups", capability.check_score_groups, ("repeatable",)),
    Rule("sample_actions", capability.check_sample_actions, ("repeatable",)),
    Rule("generated samples", rule.check_generated_samples, ("independent rows", "sample_actions")),
    Rule("sampled samples", capability.check_sampled_samples, ("independent rows", "sample_actions")),
    Rule("samples after an update", rule.check_samples_after_update, ("generated samples", "sampled samples")),
    Rule("entropy", capability.check_entropy, ("generated samples", "sampled samples")),
    Rule("values", extra.check_values, ("score_actions",)),
    Rule("kl", extra.check_kl, ("score_actions",)),
    Rule("state_keys", extra.check_state_keys, ("repeatable",)),
    Rule("plan_micro_batches", capability.check_plan, ("number of actions",)),
    Rule("split_steps", capability.check_split_steps, ("repeatable",)),
    Rule("penalty", capability.check_penalty, ("repeatable",)),
    Rule("reference", capability.check_reference, ("repeatable",)),
    Rule("state", capability.check_state, ("number of actions", "parameters")),
    Rule("deepcopy", rule.check_copy, ("repeatable",)),
    Rule("to", rule.check_to, ("repeatable",)),
)
"""The rules in order. Each rule comes after the rules that it needs."""


def check_policy(
    policy: Any,
    states: Rows,
    *,
    num_actions_per_state: int = 4,
    num_samples: int = 4096,
    seed: int = 0,
    strict: bool = False,
    device: torch.device | str | None = None,
    skip: Collection[str] = (),
) -> CheckReport:
    """Check every rule for a `PolicyModel` and its optional capabilities.

    Parameters, buffers, `state_dict()`, device and global random generators are restored; the policy ends in `train()`.
    During the checks, memory holds two copies of the parameters. All tests of samples together fail for at most one correct
    policy in a million. If nothing could be tested, the report begins with NOT CHECKED.

    Args:
        policy: Your policy.
        states: A few of your states, at least two, and of different lengths if states have lengths. More: slower, but
            more mistakes are found.
        num_actions_per_state: Actions sampled per state.
        num_samples: Number of actions drawn in one call for the first state, to compare their frequencies with their
            log-probs. Larger finds smaller differences (4096 finds a standard deviation that is 10 % off) and needs more
            memory. 0: no comparison, for language models.
        seed: Seed of all random numbers of the checks.
        strict: Raise if a rule is broken.
        device: Device to test on. The policy is moved back afterwards. None: where the policy is.
        skip: Names of rules to leave out.

    Returns:
        One result per rule. Use `print(report)` and `report.ok`.

    Raises:
        ContractError: `strict` is set and a rule is broken. The message lists all failures.
        ConfigError: There are no states, a number is out of range, or `skip` contains an unknown name.
    """
    if len(states) == 0 or num_actions_per_state < 1 or num_samples < 0:
        raise ConfigError(
            f"check_policy needs at least one state, num_actions_per_state >= 1 and num_samples >= 0; got {len(states)} "
            f"states, {num_actions_per_state} and {num_samples}."
        )
    probe = PolicyProbe(policy, states, num_actions_per_state, seed, num_samples, device)
    if "generated samples" in skip:  # after an update, samples can only be held against samples that agreed before
        skip = {*skip, "samples after an update"}
    is_whole = not isinstance(policy, type) and all(callable(getattr(policy, name, None)) for name in POLICY_METHODS)
    with preserved_random_state(), left_as_found(policy) if is_whole else nullcontext():
        results = run_rules(POLICY_RULES, probe, prepare=probe.prepare, skip=skip)
    return _report(f"check_policy({probe.name})", results, strict, _samples_not_checked(results))


def _samples_not_checked(results: tuple[CheckResult, ...]) -> str:
    """Say so if no rule compared samples with their log-probs."""
    of_samples = [result for result in results if result.name in ("generated samples", "sampled samples")]
    if any(result.status not in ("skipped", "absent") for result in of_samples):
        return ""
    reason = next(result.message for result in of_samples if result.status == "skipped")
    return (
        f"whether samples come from exp(log_probs), where most mistakes are. {reason} Try a small instance of the policy: "
        "few values per step, few steps and short states, so that sampled values repeat, with num_samples=4096."
    )


def _report(subject: str, results: tuple[CheckResult, ...], strict: bool, not_checked: str = "") -> CheckReport:
    report = CheckReport(subject=subject, results=results, not_checked=not_checked)
    if strict:
        report.raise_for_failures()
    return report


@dataclass(frozen=True, slots=True)
class RewardProbe:
    """A reward model and the rows that it is tested with."""

    given: Any
    """The reward model as the user passed it."""
    states: Rows
    """N states."""
    actions: Rows
    """N actions."""

    def ask(self, states: Rows, actions: Rows) -> Rewards:
        """Ask for the rewards of the given rows, as in training. If actions are compared, rows of equal states are a group."""
        model = as_reward_model(self.given)
        model.eval()
        group_ids = _groups_of(states) if compares_actions(model) else None
        with torch.no_grad():
            return ask_for_rewards(model, states, actions, group_ids=group_ids)

    @property
    def name(self) -> str:
        """The name of the reward model in messages."""
        return reward_name(as_reward_model(self.given))


def _groups_of(states: Rows) -> Tensor:
    """The place of the first equal state, for each row."""
    rows = range(len(states))
    return torch.tensor(
        [next(first for first in rows if not first_difference(states[first], states[row])) for row in rows]
    )


def _check_reward_methods(probe: RewardProbe) -> Verdict:
    model = as_reward_model(probe.given)
    model.train()
    model.eval()
    return passed(f"{reward_name(model)} can be called.")


def _check_reward_shape(probe: RewardProbe) -> Verdict:
    return passed(f"{describe(probe.ask(probe.states, probe.actions).values)}.")


def _check_reward_finite(probe: RewardProbe) -> Verdict:
    rewards = probe.ask(probe.states, probe.actions).values
    bad = (~rewards.isfinite()).nonzero()[:, 0].unique().tolist()
    if bad:
        return failed(
            f"{probe.name} must return finite numbers; rows {bad[:16]} are not. Fix it, or "
            "train with reward.non_finite='drop' or 'zero'."
        )
    return passed(f"From {float(rewards.min()):.4g} to {float(rewards.max()):.4g}.")


def _check_reward_repeatable(probe: RewardProbe) -> Verdict:
    first, second = (probe.ask(probe.states, probe.actions).values for _ in range(2))
    gap = difference(second, first) if second.shape == first.shape else float("inf")
    if gap > 0:
        return note(
            f"Two calls differ by up to {gap:.2g}: the rewards are random or depend on earlier calls, which adds noise to "
            "advantages."
        )
    return passed("Two calls agree.")


def _check_reward_order(probe: RewardProbe) -> Verdict:
    count = len(probe.states)
    order = torch.arange(count).flip(0)
    first, again = (probe.ask(probe.states, probe.actions).values for _ in range(2))
    if count < 2 or first.shape != again.shape or difference(again, first) > FULL_PRECISION:
        return skipped("This needs at least two rows, and equal rewards from two calls.")
    turned = probe.ask(select_rows(probe.states, order), select_rows(probe.actions, order)).values
    gap = difference(turned[order], first) if turned.shape == first.shape else float("inf")
    if gap > FULL_PRECISION:
        return note(
            f"Rewards depend on the order of rows, by up to {gap:.2g}, so a row's reward depends on other rows. With "
            "reward.on_failure='drop', rows are rewarded one by one after a failure, and their rewards would change."
        )
    return passed("Reversed rows have reversed rewards.")


def _check_reward_inputs(probe: RewardProbe) -> Verdict:
    try:
        before = copy.deepcopy((probe.states, probe.actions))
    except Exception as error:  # recovery: the rule is skipped
        return skipped(
            f"States and actions cannot be copied ({type(error).__name__}: {error}), so they cannot be compared."
        )
    given = copy.deepcopy(before)
    with suppress(RewardError):  # "reward shape" fails with it
        probe.ask(*given)
    named = zip(("states", "actions"), given, before, strict=True)
    changed = [name for name, now, then in named if first_difference(now, then)]
    if changed:
        return failed(
            f"{probe.name} must not change its arguments; it changed "
            f"{' and '.join(changed)}, which the policy is trained on afterwards. Work on a copy."
        )
    return passed("States and actions are not changed.")


def _check_reward_components(probe: RewardProbe) -> Verdict:
    found = probe.ask(probe.states, probe.actions)
    if not found.components:
        return Verdict("absent", "There are no Rewards(components=...), which are optional.")
    wrong = ~found.values.isfinite()  # a part may be NaN where it does not apply, if the total leaves it out
    bad = [key for key, part in found.components.items() if not bool(part[wrong].isfinite().all())]
    if bad:
        return failed(
            f"{probe.name}: components must be finite; {', '.join(bad)} is not. Fix that part: a weight of 0 does not hide NaN."
        )
    return passed(f"{', '.join(found.components)} are finite or left out of the sum.")


REWARD_RULES: tuple[Rule, ...] = (
    Rule("methods", _check_reward_methods),
    Rule("inputs unchanged", _check_reward_inputs, ("methods",)),
    Rule("reward shape", _check_reward_shape, ("inputs unchanged",)),
    Rule("components", _check_reward_components, ("reward shape",)),
    Rule("rewards finite", _check_reward_finite, ("components",)),
    Rule("repeatable", _check_reward_repeatable, ("reward shape",)),
    Rule("order of rows", _check_reward_order, ("rewards finite",)),
)
"""The rules in order. Each rule comes after the rules that it needs."""


def check_reward_model(reward_model: Any, states: Rows, actions: Rows, *, strict: bool = False) -> CheckReport:
    """Check every rule for a `RewardModel` or a plain `(states, actions) -> rewards`.

    Args:
        reward_model: Your reward model or function.
        states: N states, one per row.
        actions: N actions.
        strict: Raise if a rule is broken.

    Returns:
        One result per rule. Use `print(report)` and `report.ok`.

    Raises:
        ContractError: There are no rows, the numbers of states and actions differ, or `strict` is set and a rule is
            broken. The message lists all failures.

    Example:
        >>> check_reward_model(lambda states, actions: [float(a == "yes") for a in actions], ["s", "s"], ["yes", "no"]).ok
        True
    """
    if len(states) == 0:
        raise ContractError(
            "check_reward_model needs at least one row; got no states. Pass states=[...] and actions=[...]."
        )
    require_lengths("check_reward_model", len(states), actions=actions)
    with preserved_random_state():
        results = run_rules(REWARD_RULES, RewardProbe(reward_model, states, actions), prepare=lambda: None, skip=())
    return _report(f"check_reward_model({_name(reward_model)})", results, strict)


def _name(reward_model: Any) -> str:
    return getattr(reward_model, "__name__", type(reward_model).__name__)
