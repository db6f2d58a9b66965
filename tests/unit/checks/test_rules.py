"""For every rule of the conformance kit there is a policy that breaks just that rule."""

import copy
import math

import pytest
import torch
from torch import nn

from grpo import ObjectiveConfig, ObjectiveOutput, WeightedRewards
from grpo.arguments import pad_steps
from grpo.checks import check_objective, check_policy, check_reward_model
from grpo.checks.kit import POLICY_RULES, REWARD_RULES
from grpo.checks.objective import OBJECTIVE_RULES
from grpo.config import SURROGATES
from grpo.errors import ContractError
from grpo.surrogates import Clip
from grpo.types import ActionScores, SampledActions
from tests.support.checked_policies import (
    SEQUENCE_STATES,
    STATES,
    Episodes,
    Gaussian,
    Plane,
    Sequences,
    Squashed,
    Table,
    greedy,
    raising,
    sequences,
    statuses,
    table,
)
from tests.support.objective_inputs import as_users_run_it
from tests.support.published_bugs import loss, loss_with


def scored(change):
    """A table whose log-probs are changed by a function of the policy and the right ones."""
    return table(get_log_probabilities=lambda self, s, a: change(self, Table.get_log_probabilities(self, s, a)))


def scores_with(**changes):
    """`score_actions` whose fields are changed by functions of the right scores."""

    def score_actions(self, states, actions):
        scores = Sequences.score_actions(self, states, actions)
        fields = {name: getattr(scores, name) for name in ("log_probs", "mask", "entropy", "values", "kl")}
        return ActionScores(**{**fields, **{name: change(scores) for name, change in changes.items()}})

    return score_actions


def by_first_sight(self, states, actions):
    """Numbers states in the order in which they come."""
    keys, seen = Sequences.state_keys(self, states, actions), {}
    return torch.tensor([[seen.setdefault(key, len(seen)) for key in row] for row in keys.tolist()])


def sampled_with(**changes):
    """`sample_actions` whose fields are changed by functions of the right answer."""

    def sample_actions(self, states, num_actions_per_state):
        right = Sequences.sample_actions(self, states, num_actions_per_state)
        fields = {name: getattr(right, name) for name in ("actions", "mask", "behaviour_log_probs", "scores")}
        return SampledActions(**{**fields, **{name: change(right) for name, change in changes.items()}})

    return sample_actions


def two_per_state(self, states, actions):
    """Groups taken to be of equal size."""
    size = max(map(len, actions))
    rows = [state for state in states for _ in range(size)][: sum(map(len, actions))]
    return self.score_actions(rows, [action for group in actions for action in group])


def truncated(self, states, num_actions_per_state):
    """Never draws token 3 first, and says that it draws from the policy."""
    drawn = self.generate_actions(states, num_actions_per_state)
    actions = [[(0,) if action[0] == 3 else action for action in group] for group in drawn]
    return SampledActions(actions=actions, mask=Sequences.score_groups(self, states, actions).mask)


class SharedCopy(Table):
    def __deepcopy__(self, memo):
        twin = SharedCopy()
        twin.logits = self.logits
        return twin


class BoundCopy(Table):
    """Its scorer is a closure over the original, which deepcopy keeps."""

    def __init__(self):
        super().__init__()
        self.scorer = lambda actions: self.logits.log_softmax(0)[torch.as_tensor(actions)]

    def get_log_probabilities(self, states, actions):
        return self.scorer(actions)


class Gone(Gaussian):
    def load_state_dict(self, state):
        self.num_calls = 0


class Unsaved(Gaussian):
    def state_dict(self):
        return {**super().state_dict(), "seen": {1, 2}}


class WideGaussian(Gaussian):
    def normal(self, *shape):
        return 1.3 * super().normal(*shape)


class WidePlane(WideGaussian, Plane):
    pass


class Unnormalised(Gaussian):
    def get_log_probabilities(self, states, actions):
        return super().get_log_probabilities(states, actions) + 0.5


class NoJacobian(Squashed):
    def get_log_probabilities(self, states, actions):
        return Gaussian.get_log_probabilities(self, states, torch.stack(list(actions)).squeeze(1).atanh())


class Stale(Table):
    """Samples from a copy of the weights that it never renews."""

    def generate_actions(self, states, num_actions_per_state, **kwargs):
        if not hasattr(self, "copied"):
            self.copied = self.logits.detach().clone()
        probabilities = self.copied.softmax(0)
        return [torch.multinomial(probabilities, num_actions_per_state, replacement=True).tolist() for _ in states]


class Constant(nn.Module):
    """A parameter that is not handed out."""

    def __init__(self):
        super().__init__()
        self.logits, self.extra = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(1))

    generate_actions, get_log_probabilities = Table.generate_actions, Table.get_log_probabilities
    get_parameters = Table.get_parameters


def split_with(change):
    """Episodes whose steps are changed by a function."""
    return sequences(Episodes, split_steps=lambda self, s, a: tuple(map(change, Episodes.split_steps(self, s, a))))


def unsplit(self, states, actions):
    """As many rows as there are steps, of two steps each."""
    num_steps = sum(map(len, actions))
    return [SEQUENCE_STATES[0]] * num_steps, [(1, 0)] * num_steps


def scoring(**changes):
    return sequences(score_actions=scores_with(**changes))


def sampling(**changes):
    return sequences(sample_actions=sampled_with(**changes))


def row_sums(self, states, actions):
    return Sequences.score_actions(self, states, actions).log_probs.sum(1)


def other_logits(policy):
    return policy.__dict__.setdefault("other", {"logits": torch.zeros(4, requires_grad=True)})


BROKEN = [
    (object(), "methods", "lacks generate_actions(), get_log_probabilities()"),
    (Table, "methods", "Pass Table(...)"),
    (table(train=None), "methods", "lacks train()"),
    (table(score_actons=raising), "methods", "Rename score_actons to score_actions"),
    (table(eval=raising), "modes", "RuntimeError: not today"),
    (table(get_parameters=lambda self: [self.logits]), "parameters", "dict of tensors"),
    (table(get_parameters=lambda self: {"logits": self.logits.clone()}), "parameters", "no clones"),
    (sequences(sync_sampler=raising), "sync_sampler", "not today"),
    (
        table(generate_actions=lambda self, states, n: [[0] * (n - 1) for _ in states]),
        "number of actions",
        "must return 4 actions for each of 3 states",
    ),
    (table(generate_actions=raising), "number of actions", "Fix what raised it"),
    (scored(lambda p, _: p.logits.sum().expand(1, 4, 2)), "log-prob shape", "[N] = [12] or [N, T]; got [1, 4, 2]"),
    (scored(lambda _, x: [0.0] * len(x)), "log-prob shape", "got a list of 12"),
    (table(get_log_probabilities=lambda self, s, a: torch.as_tensor(a)), "log-prob dtype", "not indices"),
    (scored(lambda _, x: x.to("meta")), "device", "on the parameters' device, cpu; got meta"),
    (scored(lambda _, x: x.detach()), "gradient", "without no_grad()"),
    (table(get_parameters=lambda self: {"logits": self.logits.detach()}), "gradient", "not state_dict()"),
    (table(get_parameters=other_logits), "gradient", "reaches none"),
    (scored(lambda p, x: x + (p.logits[0] * 0).sqrt()), "gradient", "sqrt(0)"),
    (scored(lambda _, x: x - torch.inf), "log-probs finite", "torch.finfo(dtype).min"),
    (scored(lambda _, x: x + torch.rand(())), "repeatable", "switch dropout off"),
    (scored(lambda _, x: x - x.detach().mean() * (1 - 1 / len(x))), "independent rows", "padding masked"),
    (table(generate_actions=greedy), "generated samples", "Sample from the distribution that is scored"),
    (
        table(get_log_probabilities=lambda self, s, a: self.logits[torch.as_tensor(a)]),
        "generated samples",
        "log_softmax, not logits",
    ),
    (scored(lambda _, x: x / math.log(2)), "generated samples", "exp(log_probs)"),
    (WideGaussian(), "generated samples", "Sample from the distribution that is scored"),
    (WidePlane(), "generated samples", "Kolmogorov-Smirnov"),
    (Unnormalised(), "generated samples", "must integrate to 1 over all actions; it integrates to 1.649"),
    (NoJacobian(), "generated samples", "Jacobian of any squashing"),
    (Stale(), "samples after an update", "the sampler uses old weights"),
    (SharedCopy(), "deepcopy", "Let __deepcopy__ copy every parameter"),
    (BoundCopy(), "deepcopy", "Keep no bound methods"),
    (table(__deepcopy__=raising), "deepcopy", "give the class a __deepcopy__"),
    (table(to=raising), "to", "not today"),
    (
        sequences(score_actions=lambda self, s, a: (0.0, 1.0), get_log_probabilities=row_sums),
        "score_actions",
        "must return ActionScores",
    ),
    (
        sequences(score_actions=scores_with(log_probs=lambda x: x.log_probs - 1), get_log_probabilities=row_sums),
        "score_actions",
        "must agree with get_log_probabilities()",
    ),
    (scoring(log_probs=lambda x: x.log_probs.detach()), "score_actions", "must carry a gradient"),
    (sequences(score_groups=two_per_state), "score_groups", "with uneven groups"),
    (
        sequences(score_groups=lambda p, s, a: Sequences.score_groups(p, s[::-1], a)),
        "score_groups",
        "with equal groups",
    ),
    (sampling(mask=lambda x: x.mask.float()), "sample_actions", "mask"),
    (sampling(mask=lambda x: x.mask & False, scores=lambda x: None), "sample_actions", "Mask the same steps"),
    (
        sampling(scores=lambda x: ActionScores(log_probs=x.scores.log_probs / 2, mask=x.mask)),
        "sample_actions",
        "leave scores=None",
    ),
    (sampling(behaviour_log_probs=lambda x: x.scores.log_probs - torch.inf), "sample_actions", "finite, or NaN"),
    (sampling(behaviour_log_probs=lambda x: x.scores.log_probs[:, :1]), "sample_actions", "behaviour_log_probs"),
    (sequences(sample_actions=truncated), "sampled samples", "must return its behaviour_log_probs"),
    (sampling(behaviour_log_probs=lambda x: x.scores.log_probs * 1.3), "sampled samples", "exp(log_probs)"),
    (scoring(entropy=lambda x: x.entropy / math.log(2)), "entropy", "in nats"),
    (scoring(values=lambda x: x.values.log()), "values", "must be finite"),
    (scoring(values=lambda x: x.values.detach()), "values", "carry a gradient"),
    (scoring(final_values=lambda x: x.values[:, 0] / 0), "values", "final_values must be finite"),
    (scoring(kl=lambda x: -x.kl), "kl", "never negative"),
    (scoring(kl=lambda x: x.kl.detach()), "kl", "carry a gradient"),
    (sequences(state_keys=lambda self, s, a: torch.zeros(len(a), 9).long()), "state_keys", "return integers"),
    (sequences(state_keys=lambda self, s, a: Sequences.state_keys(self, s, a).float()), "state_keys", "float32"),
    (sequences(state_keys=by_first_sight), "state_keys", "depend on the row alone"),
    (sequences(plan_micro_batches=lambda self, s, a: [range(len(a) - 1)]), "plan_micro_batches", "exactly once"),
    (split_with(lambda steps: steps[::-1]), "split_steps", "row 0's steps first"),
    (split_with(lambda steps: steps[1:]), "split_steps", "one row per valid step"),
    (sequences(Episodes, split_steps=unsplit), "split_steps", "rows of one step each"),
    (sequences(penalty=lambda self: self.table.square()), "penalty", "a scalar tensor of floats"),
    (sequences(penalty=lambda self: 0.1), "penalty", "a scalar tensor of floats"),
    (sequences(penalty=lambda self: self.table.detach().sum()), "penalty", "have a gradient"),
    (sequences(penalty=lambda self: torch.zeros((), requires_grad=True)), "penalty", "have a gradient"),
    (sequences(penalty=lambda self: self.table.sum() / 0.0), "penalty", "the same finite number"),
    (sequences(penalty=lambda self: self.table.sum() * torch.rand(())), "penalty", "Draw nothing"),
    (
        sequences(reference_log_probabilities=lambda self, s, a: self.score_actions(s, a).log_probs),
        "reference",
        "Compute it from frozen weights",
    ),
    (sequences(reference_log_probabilities=lambda self, s, a: self.frozen), "reference", "[N]"),
    (Gone(), "state", "Put back every entry"),
    (Unsaved(), "state", "which a checkpoint cannot hold"),
]
NOTED = [
    (Constant(), "parameters", "leaves out extra"),
    (
        table(
            get_parameters=lambda self: {},
            get_log_probabilities=lambda self, s, a: Table.get_log_probabilities(self, s, a).detach(),
        ),
        "gradient",
        "nothing is trained",
    ),
    (sequences(__init__=lambda self: Sequences.__init__(self, dropout=0.3)), "train mode", "set dropout to 0"),
    (sequences(__deepcopy__=raising), "deepcopy", "has reference_log_probabilities() instead"),
]
"""What does not fail its rule, and is said all the same."""


BY_SAMPLES = {"generated samples", "sampled samples", "samples after an update", "entropy"}
"""Rules that compare samples with their log-probs, and need many."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "name", "fragment", "status"),
    [*((*case, "failed") for case in BROKEN), *((*case, "note") for case in NOTED)],
)
def test_a_broken_policy_fails_by_the_name_of_its_rule(policy, name, fragment, status):
    with as_users_run_it():
        states = SEQUENCE_STATES if isinstance(policy, Sequences) else STATES
        report = check_policy(policy, states, num_samples=2048 if name in BY_SAMPLES else 256)
        result = report[name]
        assert result.status == status, str(report)
        assert fragment in result.message
        assert not ({other for other, found in statuses(report).items() if found == "failed"} - {name}), str(report)


def test_every_policy_rule_has_a_policy_that_breaks_it():
    assert {name for _, name, _ in BROKEN + NOTED} == {rule.name for rule in POLICY_RULES}


def test_scores_agree_with_log_probs_that_are_wider_whatever_the_columns_beyond_hold():
    def wider(policy, states, actions):
        return pad_steps(Sequences.score_actions(policy, states, actions).log_probs, 4, -7.0)

    assert check_policy(sequences(get_log_probabilities=wider), SEQUENCE_STATES)["score_actions"].status == "passed"


# The conformance kit for rewards: conforming rewards pass, and for every rule there is one that breaks just that rule


def right(states, actions):
    return [float(action == "yes") for action in actions]


ROW_STATES, ROW_ACTIONS = [{"q": 1}, {"q": 1}, {"q": 2}, {"q": 2}], ["yes", "no", "no", "yes"]


class Reward:
    """All methods of a reward model."""

    def compute_rewards(self, states, actions):
        return torch.tensor(right(states, actions))

    def train(self): ...

    def eval(self): ...

    def to(self, device): ...


@pytest.mark.parametrize("reward", [right, Reward(), WeightedRewards({"right": right, "other": Reward()})])
def test_conforming_rewards_pass_every_check(reward):
    report = check_reward_model(reward, ROW_STATES, ROW_ACTIONS, strict=True)
    expected = dict.fromkeys([rule.name for rule in REWARD_RULES], "passed")
    if not isinstance(reward, WeightedRewards):
        expected["components"] = "absent"
    assert statuses(report) == expected


def reward(**methods):
    return type("BrokenReward", (Reward,), methods)()


def forgetting_copies(states, actions):
    for state in states:
        state["q"] = 0
    return right(states, actions)


def popping(states, actions):
    found = right(states, actions)
    actions.pop()
    return found


BROKEN_REWARDS = [
    (object(), "methods", "failed", "lacks compute_rewards(), train(), eval(), to()"),
    (reward(eval=raising), "methods", "failed", "not today"),
    (reward(in_group=raising), "methods", "failed", "Rename in_group to in_groups"),
    (reward(compute_rewards=raising), "inputs unchanged", "failed", "not today"),
    (forgetting_copies, "inputs unchanged", "failed", "it changed states"),
    (popping, "inputs unchanged", "failed", "it changed actions"),
    (lambda states, actions: right(states, actions)[1:], "reward shape", "failed", "[N] = [4]"),
    (lambda states, actions: torch.ones(4, 1), "reward shape", "failed", "Squeeze the last axis"),
    (lambda states, actions: ["good"] * 4, "reward shape", "failed", "tensor of numbers"),
    (lambda states, actions: [1.0, math.nan, 0.0, 1.0], "rewards finite", "failed", "rows [1] are not"),
    (
        WeightedRewards({"a": right, "b": lambda states, actions: [math.inf, 1, 1, 1]}),
        "components",
        "failed",
        "components must be finite; b is not",
    ),
    (lambda states, actions: torch.rand(4), "repeatable", "note", "random or depend on earlier calls"),
    (lambda s, a: [1.0, 2.0, 3.0, 4.0], "order of rows", "note", "depend on the order of rows, by up to 1.5"),
]


@pytest.mark.parametrize(("broken", "name", "status", "fragment"), BROKEN_REWARDS)
def test_a_broken_reward_fails_by_the_name_of_its_rule(broken, name, status, fragment):
    report = check_reward_model(broken, copy.deepcopy(ROW_STATES), list(ROW_ACTIONS))
    assert report[name].status == status, str(report)
    assert fragment in report[name].message
    assert not {result.name for result in report.failures} - {name}, str(report)


def test_every_reward_rule_has_a_reward_that_breaks_it():
    assert {name for _, name, *_ in BROKEN_REWARDS} == {rule.name for rule in REWARD_RULES}


def test_a_strict_reward_check_raises_and_lengths_have_to_agree():
    with pytest.raises(ContractError, match="rewards finite: "):
        check_reward_model(lambda states, actions: [math.nan] * 4, ROW_STATES, ROW_ACTIONS, strict=True)
    with pytest.raises(ContractError, match="actions must have one entry per row = 4"):
        check_reward_model(right, ROW_STATES, ROW_ACTIONS[1:])


LEVELS = [Clip(level=level) for level in ("row", "row_step", "none")]


@pytest.mark.parametrize("surrogate", [*(name for name in SURROGATES if name != "clip_cov"), *LEVELS])
def test_every_surrogate_and_ratio_level_of_this_library_keeps_the_identities(surrogate) -> None:
    """`clip_cov` leaves steps out."""
    with as_users_run_it():
        for seed in range(3):
            report = check_objective(ObjectiveConfig(surrogate=surrogate), seed=seed)
            assert report.ok, str(report)


@pytest.mark.parametrize(
    ("estimator", "status"), [("k1", "failed"), ("k2", "passed"), ("k3", "passed"), ("k3_weighted", "passed")]
)
def test_kl_estimators_lower_the_kl_except_the_log_ratio_itself(estimator, status):
    assert check_objective(ObjectiveConfig(kl_estimator=estimator))["kl"].status == status


def test_the_product_over_the_row_is_told_to_differ_from_reinforce() -> None:
    [failure] = check_objective(ObjectiveConfig(surrogate=Clip(level="row_sum"))).failures
    assert failure.name == "policy gradient"


def scaled(output: ObjectiveOutput, factor: float) -> ObjectiveOutput:
    return ObjectiveOutput(loss=output.loss * factor, metrics={})


BROKEN_LOSSES = [
    (lambda inputs: loss(inputs).loss, "output", "must return ObjectiveOutput"),
    (lambda inputs: ObjectiveOutput(loss=loss(inputs).loss.detach(), metrics={}), "output", "carry a gradient"),
    (lambda inputs: scaled(loss(inputs), -1.0), "policy gradient", "-1 times as large"),
    (loss_with(advantages=lambda a: a.unsqueeze(0)), "policy gradient", "advantages.unsqueeze(1)"),
    (loss_with(log_ratio=lambda now, old: (now - old).detach()), "output", "carry a gradient"),
    (loss_with(valid=lambda values, mask: values), "mask", "no influence"),
    (lambda inputs: scaled(loss(inputs), 4 / inputs.mask.shape[1]), "padding", "Take no means over columns"),
    (lambda inputs: scaled(loss(inputs), 4 / inputs.mask.shape[0]), "micro-batches", "Take no statistics over rows"),
    (loss_with(surrogate=torch.maximum), "bounds", "minimum of the two"),
    (loss_with(kl=lambda now, ref: now - ref), "kl", "expected gradient is 0"),
    (loss_with(kl=lambda now, ref: ref - now - (ref - now).exp()), "kl", "raises the KL"),
    (loss_with(log_probs=lambda values: values), "half precision", "float32 first"),
]


@pytest.mark.parametrize("broken", BROKEN_LOSSES, ids=[f"{name}: {fragment}" for _, name, fragment in BROKEN_LOSSES])
def test_a_broken_loss_fails_by_the_name_of_its_rule(broken) -> None:
    objective, name, fragment = broken
    with as_users_run_it():
        report = check_objective(objective)
    assert report[name].status == "failed", str(report)
    assert fragment in report[name].message


def test_every_rule_has_a_loss_that_breaks_it_and_a_correct_loss_breaks_none() -> None:
    assert {name for _, name, _ in BROKEN_LOSSES} == {rule.name for rule in OBJECTIVE_RULES}
    assert check_objective(loss, strict=True).ok
    with pytest.raises(ContractError, match=r"check_objective\(<lambda>\) breaks 1 of 8 rules:\n- kl"):
        check_objective(loss_with(kl=lambda now, ref: now - ref), strict=True)
    assert check_objective(loss_with(kl=lambda now, ref: now - ref), skip=["kl"]).ok
