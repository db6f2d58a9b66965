"""The conformance kit: conforming policies and rewards fail nothing, and for every rule there is one that breaks just that."""

import copy
import math
import random

import numpy as np
import pytest
import torch
from torch import nn

from grpo.checks import check_policy, check_reward_model
from grpo.checks.kit import POLICY_RULES, REWARD_RULES
from grpo.checks.sampling import chi_square_p_value, kolmogorov_smirnov
from grpo.errors import ConfigError, ContractError
from grpo.reward_model_base import WeightedRewards
from grpo.types import ActionScores, SampledActions

STATES = ["a", "b", "c"]


class Table:
    """pi(action | state) = softmax(logits): no base class, one log-prob per row."""

    def __init__(self):
        self.logits = torch.tensor([0.0, 0.5, 1.0, -1.0], requires_grad=True)

    def generate_actions(self, states, num_actions_per_state, **kwargs):
        probabilities = self.logits.detach().softmax(0)
        draws = [torch.multinomial(probabilities, num_actions_per_state, replacement=True) for _ in states]
        return [draw.tolist() for draw in draws]

    def get_log_probabilities(self, states, actions):
        return self.logits.log_softmax(0)[torch.as_tensor(actions)]

    def get_parameters(self):
        return {"logits": self.logits}

    def train(self):
        pass

    def eval(self):
        pass

    def to(self, device):
        self.logits.data = self.logits.data.to(device)


class Gaussian(Table):
    """One real number, from a generator of its own that a checkpoint has to keep."""

    def __init__(self):
        self.mean = torch.tensor(0.3, requires_grad=True)
        self.log_std = torch.tensor(-0.5, requires_grad=True)
        self.generator = torch.Generator().manual_seed(0)
        self.num_calls = 0

    def normal(self, *shape):
        return torch.randn(shape, generator=self.generator) * self.log_std.detach().exp() + self.mean.detach()

    def generate_actions(self, states, num_actions_per_state, **kwargs):
        self.num_calls += 1
        return self.normal(len(states), num_actions_per_state).tolist()

    def get_log_probabilities(self, states, actions):
        return torch.distributions.Normal(self.mean, self.log_std.exp()).log_prob(torch.as_tensor(actions))

    def get_parameters(self):
        return {"mean": self.mean, "log_std": self.log_std}

    def to(self, device):
        for value in self.get_parameters().values():
            value.data = value.data.to(device)

    def state_dict(self):
        return {"generator": self.generator.get_state(), "num_calls": self.num_calls}

    def load_state_dict(self, state):
        self.generator.set_state(state["generator"])
        self.num_calls = state["num_calls"]

    def __deepcopy__(self, memo):
        twin = type(self)()
        for name, value in self.get_parameters().items():
            twin.get_parameters()[name].data.copy_(value)
        twin.load_state_dict(self.state_dict())
        return twin


class Squashed(Gaussian):
    """tanh of a normal number, as tensors [1]; refuses to score what it cannot take."""

    def generate_actions(self, states, num_actions_per_state, **kwargs):
        return list(self.normal(len(states), num_actions_per_state, 1).tanh().unbind(0))

    def get_log_probabilities(self, states, actions):
        values = torch.stack(list(actions)).squeeze(1)
        if bool((values.abs() >= 1).any()):
            raise ValueError("outside of the support")
        return super().get_log_probabilities(states, values.atanh()) - torch.log1p(-values.square())


class Plane(Gaussian):
    """Two numbers that depend on one another, as a tensor [B, G, 2]."""

    def generate_actions(self, states, num_actions_per_state, **kwargs):
        first = self.normal(len(states), num_actions_per_state)
        return torch.stack([first, self.normal(len(states), num_actions_per_state) + first], -1)

    def get_log_probabilities(self, states, actions):
        normal = torch.distributions.Normal(self.mean, self.log_std.exp())
        return normal.log_prob(actions[:, 0]) + normal.log_prob(actions[:, 1] - actions[:, 0])


STEEP = torch.tensor([0.0, 1.0, 2.0, 3.0])


class Sequences(nn.Module):
    """One to three tokens, 0 ends; a state is (number, tokens so far). Every capability but `split_steps`."""

    def __init__(self, dropout=0.0):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.table = nn.Parameter(torch.randn(2, 3, 4, generator=generator))  # state, position, token
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("frozen", self.table.detach().clone())
        self.syncs = 0

    def all_log_probs(self, states, width, table):
        rows = []
        for number, prefix in states:
            places = torch.arange(len(prefix), len(prefix) + width).clamp(max=2)
            rows.append(table[number, places])
        return self.dropout(torch.stack(rows)).log_softmax(-1)

    def forward_scores(self, states, actions, table):
        width = max(map(len, actions))
        mask = torch.tensor([[t < len(action) for t in range(width)] for action in actions])
        tokens = torch.tensor([list(action) + [0] * (width - len(action)) for action in actions])
        log_probs = self.all_log_probs(states, width, table)
        chosen = log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        entropy = -(log_probs.exp() * log_probs).sum(-1)
        kl = (log_probs.exp() * (log_probs - self.all_log_probs(states, width, self.frozen + 0.1 * STEEP))).sum(-1)
        return ActionScores(
            log_probs=torch.where(mask, chosen, 0.0),
            mask=mask,
            entropy=entropy,
            values=log_probs.amax(-1),
            final_values=torch.zeros(len(actions)),
            kl=kl,
        )

    def score_actions(self, states, actions):
        return self.forward_scores(states, actions, self.table)

    def score_groups(self, states, actions):
        rows = [(state, action) for state, group in zip(states, actions, strict=True) for action in group]
        return self.score_actions([state for state, _ in rows], [action for _, action in rows])

    def draw(self, state):
        tokens = []
        while len(tokens) < 3 and (not tokens or tokens[-1] != 0):
            logits = self.table.detach()[state[0], len(tokens)]
            tokens.append(int(torch.multinomial(logits.softmax(-1), 1)))
        return tuple(tokens)

    def generate_actions(self, states, num_actions_per_state, **kwargs):
        return [[self.draw(state) for _ in range(num_actions_per_state)] for state in states]

    def sample_actions(self, states, num_actions_per_state):
        actions = self.generate_actions(states, num_actions_per_state)
        scores = Sequences.score_groups(self, states, actions)
        return SampledActions(actions=actions, mask=scores.mask, behaviour_log_probs=scores.log_probs, scores=scores)

    def get_log_probabilities(self, states, actions):
        return self.score_actions(states, actions).log_probs.sum(1)

    def reference_log_probabilities(self, states, actions):
        return self.forward_scores(states, actions, self.frozen).log_probs

    def plan_micro_batches(self, states, actions):
        order = sorted(range(len(actions)), key=lambda row: len(actions[row]))
        return [order[start : start + 3] for start in range(0, len(order), 3)]

    def state_keys(self, states, actions):
        width = max(map(len, actions))
        return torch.tensor([[10 * number + t for t in range(width)] for number, _ in states])

    def sync_sampler(self):
        self.syncs += 1

    def get_parameters(self):
        return dict(self.named_parameters())


class Episodes(Sequences):
    """The same, with steps that can be scored one by one."""

    def split_steps(self, states, actions):
        rows = [
            ((number, action[:t]), (action[t],))
            for (number, _), action in zip(states, actions, strict=True)
            for t in range(len(action))
        ]
        return [state for state, _ in rows], [action for _, action in rows]


SEQUENCE_STATES = [(0, ()), (1, ())]


def statuses(report):
    return {result.name: result.status for result in report.results}


@pytest.mark.parametrize(
    ("policy", "states", "not_passed"),
    [
        (
            Table(),
            STATES,
            {
                *("sync_sampler", "score_actions", "score_groups", "sample_actions", "sampled samples", "entropy"),
                *("plan_micro_batches", "split_steps", "reference", "state", "values", "kl", "state_keys"),
            },
        ),
        (
            Gaussian(),
            STATES,
            {
                *("sync_sampler", "score_actions", "score_groups", "sample_actions", "sampled samples", "entropy"),
                *("plan_micro_batches", "split_steps", "reference", "values", "kl", "state_keys"),
            },
        ),
        (Sequences(), SEQUENCE_STATES, {"split_steps"}),
        (Episodes(), SEQUENCE_STATES, {"generated samples", "sampled samples"}),
    ],
)
def test_conforming_policy_passes_every_check_that_applies(policy, states, not_passed):
    report = check_policy(policy, states, num_samples=2048, strict=True)
    assert report.ok
    others = {name: status for name, status in statuses(report).items() if status != "passed"}
    assert set(others) == set(not_passed)
    assert set(others.values()) <= {"absent", "skipped"}  # the entropy of a policy that has none is skipped


@pytest.mark.parametrize("policy", [Gaussian, Squashed, Plane])
def test_densities_are_compared_with_samples(policy):
    result = check_policy(policy(), STATES, strict=True)["generated samples"]
    assert result.status == "passed"
    assert "Kolmogorov-Smirnov" in result.message


def test_together_the_conforming_policies_pass_every_check():
    reports = [
        check_policy(Gaussian(), STATES),
        *(check_policy(kind(), SEQUENCE_STATES, num_samples=512) for kind in (Sequences, Episodes)),
    ]
    seen = {result.name for report in reports for result in report.results if result.status == "passed"}
    assert seen == {rule.name for rule in POLICY_RULES}


# One policy per rule that breaks it.


def table(**methods):
    """`Table` with methods replaced."""
    return type("Broken", (Table,), methods)()


def sequences(base=Sequences, **methods):
    """`Sequences` with methods replaced."""
    return type("Broken", (base,), methods)()


def raising(*args, **kwargs):
    raise RuntimeError("not today")


def plus_noise(self, states, actions):
    return Table.get_log_probabilities(self, states, actions) + torch.rand(())


def whole_batch(self, states, actions):
    found = Table.get_log_probabilities(self, states, actions)
    return found - found.detach().mean() * (1 - 1 / len(found))


def greedy(self, states, num_actions_per_state, **kwargs):
    draws = Table.generate_actions(self, states, num_actions_per_state)
    return [[2 if random.random() < 0.15 else action for action in group] for group in draws]


def scores_with(**changes):
    """`score_actions` whose fields are changed by functions of the right scores."""

    def score_actions(self, states, actions):
        scores = Sequences.score_actions(self, states, actions)
        fields = {name: getattr(scores, name) for name in ("log_probs", "mask", "entropy", "values", "kl")}
        return ActionScores(**{**fields, **{name: change(scores) for name, change in changes.items()}})

    return score_actions


def by_first_sight(self, states, actions):
    """Numbers states in the order in which they come."""
    keys = Sequences.state_keys(self, states, actions)
    seen = {}
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


class Constant(nn.Module):
    """A parameter that is not handed out."""

    def __init__(self):
        super().__init__()
        self.logits, self.extra = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(1))

    generate_actions, get_log_probabilities = Table.generate_actions, Table.get_log_probabilities
    get_parameters = Table.get_parameters


def split_wrong_order(self, states, actions):
    states, actions = Episodes.split_steps(self, states, actions)
    return states[::-1], actions[::-1]


def split_short(self, states, actions):
    states, actions = Episodes.split_steps(self, states, actions)
    return states[1:], actions[1:]


def log_probs_in_bits(self, states, actions):
    return Table.get_log_probabilities(self, states, actions) / math.log(2)


BROKEN = [
    (object(), "methods", "failed", "lacks generate_actions(), get_log_probabilities()"),
    (Table, "methods", "failed", "Call it first"),
    (table(train=None), "methods", "failed", "lacks train()"),
    (table(eval=raising), "modes", "failed", "RuntimeError: not today"),
    (table(get_parameters=lambda self: [self.logits]), "parameters", "failed", "dict of tensors"),
    (table(get_parameters=lambda self: {"logits": self.logits.clone()}), "parameters", "failed", "no clones"),
    (Constant(), "parameters", "note", "leaves out extra"),
    (sequences(sync_sampler=raising), "sync_sampler", "failed", "not today"),
    (
        table(generate_actions=lambda self, states, n: [[0] * (n - 1) for _ in states]),
        "number of actions",
        "failed",
        "must return 4 actions for each of 3 states",
    ),
    (table(generate_actions=raising), "number of actions", "failed", "Fix what raised it"),
    (
        table(get_log_probabilities=lambda self, s, a: self.logits.sum().expand(1, 4, 2)),
        "log-prob shape",
        "failed",
        "[N] = [12] or [N, T]; got [1, 4, 2]",
    ),
    (table(get_log_probabilities=lambda self, s, a: [0.0] * len(a)), "log-prob shape", "failed", "got a list of 12"),
    (table(get_log_probabilities=lambda self, s, a: torch.as_tensor(a)), "log-prob dtype", "failed", "not indices"),
    (
        table(get_log_probabilities=lambda self, s, a: Table.get_log_probabilities(self, s, a).to("meta")),
        "device",
        "failed",
        "on the parameters' device, cpu; got meta",
    ),
    (
        table(get_log_probabilities=lambda self, s, a: Table.get_log_probabilities(self, s, a).detach()),
        "gradient",
        "failed",
        "without no_grad()",
    ),
    (table(get_parameters=lambda self: {"logits": self.logits.detach()}), "gradient", "failed", "not state_dict()"),
    (
        table(
            get_parameters=lambda self: self.__dict__.setdefault(
                "other", {"logits": torch.zeros(4, requires_grad=True)}
            )
        ),
        "gradient",
        "failed",
        "reaches none",
    ),
    (
        table(
            get_log_probabilities=lambda self, s, a: (
                Table.get_log_probabilities(self, s, a) + (self.logits[0] * 0).sqrt()
            )
        ),
        "gradient",
        "failed",
        "sqrt(0)",
    ),
    (
        table(
            get_parameters=lambda self: {},
            get_log_probabilities=lambda self, s, a: Table.get_log_probabilities(self, s, a).detach(),
        ),
        "gradient",
        "note",
        "nothing is trained",
    ),
    (
        table(get_log_probabilities=lambda self, s, a: Table.get_log_probabilities(self, s, a) - torch.inf),
        "log-probs finite",
        "failed",
        "torch.finfo(dtype).min",
    ),
    (table(get_log_probabilities=plus_noise), "repeatable", "failed", "switch dropout off"),
    (sequences(__init__=lambda self: Sequences.__init__(self, dropout=0.3)), "train mode", "note", "set dropout to 0"),
    (table(get_log_probabilities=whole_batch), "independent rows", "failed", "padding masked"),
    (table(generate_actions=greedy), "generated samples", "failed", "Sample from the distribution that is scored"),
    (
        table(get_log_probabilities=lambda self, s, a: self.logits[torch.as_tensor(a)]),
        "generated samples",
        "failed",
        "log_softmax, not logits",
    ),
    (table(get_log_probabilities=log_probs_in_bits), "generated samples", "failed", "exp(log_probs)"),
    (WideGaussian(), "generated samples", "failed", "Sample from the distribution that is scored"),
    (WidePlane(), "generated samples", "failed", "Kolmogorov-Smirnov"),
    (Unnormalised(), "generated samples", "failed", "must integrate to 1 over all actions; it integrates to 1.649"),
    (NoJacobian(), "generated samples", "failed", "Jacobian of any squashing"),
    (SharedCopy(), "deepcopy", "failed", "Let __deepcopy__ copy every parameter"),
    (BoundCopy(), "deepcopy", "failed", "Keep no bound methods"),
    (table(__deepcopy__=raising), "deepcopy", "failed", "give the class a __deepcopy__"),
    (sequences(__deepcopy__=raising), "deepcopy", "note", "has reference_log_probabilities() instead"),
    (table(to=raising), "to", "failed", "not today"),
    (
        sequences(
            score_actions=lambda self, s, a: (0.0, 1.0),
            get_log_probabilities=lambda self, s, a: Sequences.score_actions(self, s, a).log_probs.sum(1),
        ),
        "score_actions",
        "failed",
        "must return ActionScores",
    ),
    (
        sequences(
            score_actions=scores_with(log_probs=lambda x: x.log_probs - 1),
            get_log_probabilities=lambda self, s, a: Sequences.score_actions(self, s, a).log_probs.sum(1),
        ),
        "score_actions",
        "failed",
        "must agree with get_log_probabilities()",
    ),
    (
        sequences(score_actions=scores_with(log_probs=lambda x: x.log_probs.detach())),
        "score_actions",
        "failed",
        "must carry a gradient",
    ),
    (sequences(score_groups=two_per_state), "score_groups", "failed", "with uneven groups"),
    (
        sequences(score_groups=lambda self, s, a: Sequences.score_groups(self, s[::-1], a)),
        "score_groups",
        "failed",
        "with equal groups",
    ),
    (sequences(sample_actions=sampled_with(mask=lambda x: x.mask.float())), "sample_actions", "failed", "mask"),
    (
        sequences(sample_actions=sampled_with(mask=lambda x: x.mask & False, scores=lambda x: None)),
        "sample_actions",
        "failed",
        "Mask the same steps",
    ),
    (
        sequences(
            sample_actions=sampled_with(scores=lambda x: ActionScores(log_probs=x.scores.log_probs / 2, mask=x.mask))
        ),
        "sample_actions",
        "failed",
        "leave scores=None",
    ),
    (
        sequences(sample_actions=sampled_with(behaviour_log_probs=lambda x: x.scores.log_probs - torch.inf)),
        "sample_actions",
        "failed",
        "finite, or NaN",
    ),
    (
        sequences(sample_actions=sampled_with(behaviour_log_probs=lambda x: x.scores.log_probs[:, :1])),
        "sample_actions",
        "failed",
        "behaviour_log_probs",
    ),
    (sequences(sample_actions=truncated), "sampled samples", "failed", "must return its behaviour_log_probs"),
    (
        sequences(sample_actions=sampled_with(behaviour_log_probs=lambda x: x.scores.log_probs * 1.3)),
        "sampled samples",
        "failed",
        "exp(log_probs)",
    ),
    (sequences(score_actions=scores_with(entropy=lambda x: x.entropy / math.log(2))), "entropy", "failed", "in nats"),
    (sequences(score_actions=scores_with(values=lambda x: x.values.log())), "values", "failed", "must be finite"),
    (sequences(score_actions=scores_with(values=lambda x: x.values.detach())), "values", "failed", "carry a gradient"),
    (
        sequences(score_actions=scores_with(final_values=lambda x: x.values[:, 0] / 0)),
        "values",
        "failed",
        "final_values must be finite",
    ),
    (sequences(score_actions=scores_with(kl=lambda x: -x.kl)), "kl", "failed", "never negative"),
    (sequences(score_actions=scores_with(kl=lambda x: x.kl.detach())), "kl", "failed", "carry a gradient"),
    (sequences(state_keys=lambda self, s, a: torch.zeros(len(a), 9)), "state_keys", "failed", "must return integers"),
    (sequences(state_keys=by_first_sight), "state_keys", "failed", "depend on the row alone"),
    (
        sequences(plan_micro_batches=lambda self, s, a: [range(len(a) - 1)]),
        "plan_micro_batches",
        "failed",
        "exactly once",
    ),
    (sequences(Episodes, split_steps=split_wrong_order), "split_steps", "failed", "row 0's steps first"),
    (sequences(Episodes, split_steps=split_short), "split_steps", "failed", "one row per valid step"),
    (
        sequences(reference_log_probabilities=lambda self, s, a: self.score_actions(s, a).log_probs),
        "reference",
        "failed",
        "Compute it from frozen weights",
    ),
    (sequences(reference_log_probabilities=lambda self, s, a: self.frozen), "reference", "failed", "[N]"),
    (Gone(), "state", "failed", "Put back every entry"),
    (Unsaved(), "state", "failed", "which a checkpoint cannot hold"),
]


@pytest.mark.parametrize(
    ("policy", "name", "status", "fragment"), BROKEN, ids=[f"{i}-{name}" for i, (_, name, *_) in enumerate(BROKEN)]
)
def test_a_broken_policy_fails_by_the_name_of_its_rule(policy, name, status, fragment):
    states = SEQUENCE_STATES if isinstance(policy, Sequences) else STATES
    report = check_policy(policy, states, num_samples=2048)
    result = report[name]
    assert result.status == status, str(report)
    assert fragment in result.message
    others = {other for other, found in statuses(report).items() if found == "failed"} - {name}
    assert not others, str(report)


def test_every_policy_rule_has_a_policy_that_breaks_it():
    assert {name for _, name, *_ in BROKEN} == {rule.name for rule in POLICY_RULES}


def test_rules_that_need_a_failed_one_are_skipped_and_the_others_run():
    report = check_policy(table(generate_actions=raising), STATES)
    assert report["parameters"].status == "passed"
    assert report["log-prob shape"].message == "Needs 'number of actions', which failed."
    assert report["log-prob dtype"].message == "Needs 'log-prob shape', which was skipped."
    assert report["gradient"].status == "skipped"


class Stirring(Sequences):
    """Changes everything it can while it is looked at, but what `get_parameters` and `load_state_dict` give back."""

    def __init__(self):
        super().__init__(dropout=0.3)
        self.register_buffer("calls", torch.zeros(1))

    def score_actions(self, states, actions):
        self.calls += 1
        np.random.rand()  # noqa: NPY002
        torch.rand(3)
        return super().score_actions(states, actions)


def test_the_policy_and_the_random_generators_are_left_as_they_were():
    policy = Stirring()
    policy.table.grad = torch.ones_like(policy.table)
    before = copy.deepcopy(policy.state_dict())
    # Python's own generator is not compared: the type checker that watches grpo in tests draws from it.
    random_states = np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    policy.eval()
    check_policy(policy, SEQUENCE_STATES, num_samples=256)
    assert policy.training
    assert all(torch.equal(value, before[name]) for name, value in policy.state_dict().items())
    assert torch.equal(policy.table.grad, torch.ones_like(policy.table))
    assert np.array_equal(np.random.get_state()[1], random_states[0][1])  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), random_states[1])


def test_further_state_is_put_back():
    policy = Gaussian()
    check_policy(policy, STATES, num_samples=256)
    assert policy.num_calls == 0
    assert torch.equal(policy.generator.get_state(), torch.Generator().manual_seed(0).get_state())


@pytest.mark.parametrize("kind", [Table, Gaussian, Squashed, Plane])
def test_conforming_samplers_are_not_accused_whatever_the_seed(kind):
    for seed in range(12):
        policy = kind()
        if isinstance(policy, Gaussian):
            policy.generator.manual_seed(seed)
        assert check_policy(policy, STATES, num_samples=1024, seed=seed)["generated samples"].status == "passed"


def test_the_same_seed_gives_the_same_report():
    assert check_policy(Table(), STATES) == check_policy(Table(), STATES)


def test_rules_can_be_left_out():
    report = check_policy(table(generate_actions=greedy), STATES, skip=["generated samples"], strict=True)
    assert report["generated samples"].message == "Left out by skip=."
    assert check_policy(Table(), STATES, num_samples=0)["generated samples"].message == "num_samples=0."
    with pytest.raises(ConfigError, match=r"skip names \['samples'\]; the checks are \['methods'"):
        check_policy(Table(), STATES, skip=["samples"])


def test_no_states_are_refused():
    with pytest.raises(ConfigError, match="at least one state"):
        check_policy(Table(), [])


def test_strict_raises_with_all_failures():
    policy = table(generate_actions=greedy, __deepcopy__=raising)
    with pytest.raises(
        ContractError, match=r"(?s)breaks 2 of 28 rules:\n- generated samples: .*\n- deepcopy: .*not today"
    ):
        check_policy(policy, STATES, strict=True)
    report = check_policy(policy, STATES)
    assert not report.ok
    assert [result.name for result in report.failures] == ["generated samples", "deepcopy"]
    with pytest.raises(ContractError, match="breaks 2 of 28"):
        report.raise_for_failures()


def test_the_report_prints_as_an_aligned_table():
    lines = str(check_policy(table(to=raising), STATES)).splitlines()
    assert lines[0] == "check_policy(Broken): 14 passed, 10 absent, 3 skipped, 1 failed"
    assert lines[1].startswith("  passed   methods             Broken has generate_actions")
    [failure] = [line for line in lines if line.startswith("  FAILED")]
    assert failure.startswith("  FAILED   to                  No exception was expected; RuntimeError: not today")
    assert max(map(len, lines)) <= 120
    absent = next(
        i for i, line in enumerate(lines) if line.startswith("  optional, not implemented: sync_sampler, score_")
    )
    assert all(line[30] == " " and line[31] != " " for line in lines[1:absent])


# Rewards


def right(states, actions):
    return [float(action == "yes") for action in actions]


ROW_STATES, ROW_ACTIONS = [{"q": 1}, {"q": 1}, {"q": 2}, {"q": 2}], ["yes", "no", "no", "yes"]


class Reward:
    """All methods of a reward model."""

    def compute_rewards(self, states, actions):
        return torch.tensor(right(states, actions))

    def train(self):
        pass

    def eval(self):
        pass

    def to(self, device):
        pass


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
    (
        lambda states, actions: [1.0, 2.0, 3.0, 4.0],
        "order of rows",
        "note",
        "depend on the order of rows, by up to 1.5",
    ),
]


@pytest.mark.parametrize(
    ("broken", "name", "status", "fragment"),
    BROKEN_REWARDS,
    ids=[f"{i}-{name}" for i, (_, name, *_) in enumerate(BROKEN_REWARDS)],
)
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


# The statistics behind it, against scipy


@pytest.mark.parametrize(("statistic", "degrees"), [(0.5, 1), (10.0, 3), (80.0, 20), (500.0, 400)])
def test_chi_square_tail(statistic, degrees):
    stats = pytest.importorskip("scipy.stats")
    assert chi_square_p_value(statistic, degrees) == pytest.approx(stats.chi2.sf(statistic, degrees), rel=1e-9)


@pytest.mark.parametrize("power", [1.0, 1.05, 1.3])
def test_kolmogorov_smirnov_tail(power):
    stats = pytest.importorskip("scipy.stats")
    uniforms = torch.rand(2000, dtype=torch.float64) ** power
    distance, p_value = kolmogorov_smirnov(uniforms)
    exact = stats.kstest(uniforms.numpy(), "uniform")
    assert distance == pytest.approx(exact.statistic, rel=1e-12)
    assert p_value == pytest.approx(exact.pvalue, rel=0.05)
