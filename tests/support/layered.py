"""A small policy of several layers, for ranks that divide its weights."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from grpo import ActionScores


class Layered(nn.Module):
    """A policy over 3 actions with layers of sizes that no number of ranks divides, a scalar, and a branch for some states."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3)])
        self.branch = nn.Linear(5, 3)
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def shard_units(self) -> list[nn.Module]:
        return list(self.layers)

    def inputs(self, states: Sequence[int]) -> Tensor:
        inputs = torch.stack([torch.randn(5, generator=torch.Generator().manual_seed(s)) for s in states])
        return inputs.to(self.temperature.dtype)

    def logits(self, states: Sequence[int]) -> Tensor:
        inputs = self.inputs(states)
        hidden = self.layers[1](self.layers[0](inputs).tanh()).tanh()
        logits = self.layers[2](hidden)
        if any(state % 2 for state in states):  # some ranks never reach the branch
            logits = logits + self.branch(inputs.to(self.branch.weight.dtype)) * torch.tensor(
                [[float(state % 2)] for state in states]
            )
        return logits / self.temperature

    def generate_actions(self, states: Sequence[int], num_actions_per_state: int, **kwargs: Any) -> list[list[int]]:
        drawn = torch.distributions.Categorical(logits=self.logits(states)).sample((num_actions_per_state,))
        return drawn.t().tolist()

    def get_log_probabilities(self, states: Sequence[int], actions: Sequence[int]) -> Tensor:
        return self.logits(states).log_softmax(1).gather(1, torch.tensor(list(actions))[:, None]).squeeze(1)

    def get_parameters(self) -> dict[str, Tensor]:
        return dict(self.named_parameters())


class Foreseeing(Layered):
    """Also foresees what the environment answers: state s is followed by s % 3 answers, each the action that was taken."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = nn.Linear(5, 3)

    def score_actions(self, states: Sequence[int], actions: Sequence[int]) -> ActionScores:
        taken = torch.tensor(list(actions))[:, None]
        foreseen = self.answers(self.inputs(states)).log_softmax(1).gather(1, taken)
        mask = torch.arange(2) < torch.tensor([[state % 3] for state in states])
        return ActionScores(
            log_probs=self.logits(states).log_softmax(1).gather(1, taken),
            mask=torch.ones_like(taken, dtype=torch.bool),
            observed_log_probs=torch.where(mask, foreseen, torch.nan),
            observed_mask=mask,
        )
