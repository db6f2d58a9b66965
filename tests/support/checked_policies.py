"""Policies that keep every rule of the conformance kit, each with more capabilities than the one before."""

import random

import torch
from torch import nn

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

    def penalty(self):
        return 0.1 * (self.table - self.frozen).square().sum()

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


def table(**methods):
    """`Table` with methods replaced."""
    return type("Broken", (Table,), methods)()


def sequences(base=Sequences, **methods):
    """`Sequences` with methods replaced."""
    return type("Broken", (base,), methods)()


def raising(*args, **kwargs):
    raise RuntimeError("not today")


def greedy(self, states, num_actions_per_state, **kwargs):
    draws = Table.generate_actions(self, states, num_actions_per_state)
    return [[2 if random.random() < 0.15 else action for action in group] for group in draws]


def statuses(report):
    return {result.name: result.status for result in report.results}
