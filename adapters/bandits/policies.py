"""Policies over K arms: a table of logits, and a small network on state features.

Axis letters as in `grpo`: B states, G actions per state, N = B * G rows; one decision per row, so T = 1. K is the
number of actions, S the rows of the table, F the features.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias, assert_never

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from grpo.arguments import require_instances, require_integers, require_widths
from grpo.errors import ContractError
from grpo.types import ActionScores, SampledActions

Activation: TypeAlias = Literal["tanh", "relu"]


def categorical_entropy(log_probs: Float[Tensor, "*rows K"]) -> Float[Tensor, "*rows"]:
    """H = - sum_a p(a) log p(a), in nats, exact and differentiable, from normalised log-probs."""
    return -torch.linalg.vecdot(log_probs.exp(), log_probs)


def single_step_scores(log_probs: Float[Tensor, " N"], entropy: Float[Tensor, " N"]) -> ActionScores:
    """Scores of single-step rows: [N] becomes [N, 1] with a mask of all True."""
    mask = torch.ones(len(log_probs), 1, dtype=torch.bool, device=log_probs.device)
    return ActionScores(log_probs=log_probs.unsqueeze(1), mask=mask, entropy=entropy.unsqueeze(1))


def exact_sample(actions: Int64[Tensor, "B G"], scores: ActionScores) -> SampledActions:
    """Sampled actions with the policy's own scores, so `behaviour_log_probs` equal the scores' log-probs."""
    return SampledActions(actions=actions, mask=scores.mask, behaviour_log_probs=scores.log_probs, scores=scores)


def as_indices(name: str, values: Any, limit: int, device: torch.device) -> Int64[Tensor, " N"]:
    """Convert integers in [0, limit) to an int64 tensor [N].

    Raises:
        ContractError: The values have another shape, dtype or range.
    """
    indices = torch.as_tensor(values, device=device)
    if indices.dim() != 1 or indices.is_floating_point():
        raise ContractError(
            f"{name} must be whole numbers [N]; got {str(indices.dtype).removeprefix('torch.')} {list(indices.shape)}."
        )
    if len(indices):
        low, high = (int(bound) for bound in indices.aminmax())
        if low < 0 or high >= limit:
            raise ContractError(f"{name} must lie in 0..{limit - 1}; got {low} to {high}.")
    return indices.long()


class SoftmaxPolicy(nn.Module):
    """pi(a | s) = softmax(logits[s])[a], uniform at the start.

    With `num_states=1` the policy ignores the values of states and uses only their number. Otherwise a state is a row of the
    table, 0 <= s < num_states. The policy's own reference (`ScoresReference`) is the uniform policy, -log K everywhere.

    Args:
        num_actions: Number of actions, K.
        num_states: Number of rows of the table, S.

    Example:
        >>> policy = SoftmaxPolicy(num_actions=4)
        >>> policy.get_log_probabilities(["any"], [2]).exp()
        tensor([0.2500], grad_fn=<ExpBackward0>)
    """

    def __init__(self, num_actions: int, num_states: int = 1) -> None:
        super().__init__()
        require_integers("SoftmaxPolicy", 1, num_actions=num_actions, num_states=num_states)
        self.num_actions = num_actions
        self.num_states = num_states
        self.logits = nn.Parameter(torch.zeros(num_states, num_actions))

    def score_actions(self, states: Any, actions: Any) -> ActionScores:
        """Log-probs [N, 1] and exact entropy. The softmax is computed once per state of the table, not once per row."""
        device = self.logits.device
        arms = as_indices("SoftmaxPolicy: actions", actions, self.num_actions, device)
        if self.num_states == 1:
            rows = torch.zeros_like(arms)
        else:
            rows = as_indices("SoftmaxPolicy: states", states, self.num_states, device)
        if len(rows) != len(arms):
            raise ContractError(
                f"SoftmaxPolicy needs one action per state; got {len(rows)} states, {len(arms)} actions."
            )
        log_probs = self.logits.log_softmax(dim=1)
        # one index into the flat table is faster than two, forward and backward
        chosen = log_probs.flatten().index_select(0, rows * self.num_actions + arms)
        return single_step_scores(chosen, categorical_entropy(log_probs).index_select(0, rows))

    @torch.no_grad()
    def sample_actions(
        self, states: Any, num_actions_per_state: int, generator: torch.Generator | None = None
    ) -> SampledActions:
        """G independent draws per state, [B, G], with their scores."""
        num_states = len(states)
        if self.num_states == 1:  # one draw for all states, which share the row
            rows: Any = None
            drawn = torch.multinomial(
                self.probabilities()[0], num_states * num_actions_per_state, replacement=True, generator=generator
            ).view(num_states, num_actions_per_state)
        else:
            indices = as_indices("SoftmaxPolicy: states", states, self.num_states, self.logits.device)
            rows = indices.repeat_interleave(num_actions_per_state)
            drawn = torch.multinomial(
                self.logits.index_select(0, indices).softmax(dim=1),
                num_actions_per_state,
                replacement=True,
                generator=generator,
            )
        return exact_sample(drawn, self.score_actions(rows, drawn.flatten()))

    def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> Int64[Tensor, "B G"]:
        """Sample actions as `sample_actions` does, and return them without scores. Keywords are passed to it."""
        return self.sample_actions(states, num_actions_per_state, **kwargs).actions

    def get_log_probabilities(self, states: Any, actions: Any) -> Float[Tensor, " N"]:
        """log pi(actions[n] | states[n])."""
        return self.score_actions(states, actions).log_probs.squeeze(1)

    def reference_log_probabilities(self, states: Any, actions: Any) -> Float[Tensor, "N 1"]:
        """log 1/K for every row: the uniform policy."""
        return self.logits.new_full((len(actions), 1), -float(np.log(self.num_actions)))

    def get_parameters(self) -> dict[str, Tensor]:
        """The trainable logits."""
        return dict(self.named_parameters())

    def probabilities(self) -> Float[Tensor, "S K"]:
        """pi(a | s) of the whole table, detached."""
        return self.logits.detach().softmax(dim=1)


class MLPPolicy(nn.Module):
    """pi(a | x) = softmax(f(x))[a] with a fully connected f; nearly uniform at the start.

    The last layer's initial weights are scaled by 0.01, so that no action is preferred before the first reward
    (Andrychowicz et al. 2021, arXiv:2006.05990, section 3.2).

    Args:
        num_features: Length F of a state.
        num_actions: Number of actions K.
        hidden: Widths of the hidden layers. Empty makes a linear policy.
        activation: Activation between layers.
    """

    def __init__(
        self,
        num_features: int,
        num_actions: int,
        hidden: Sequence[int] = (64, 64),
        *,
        activation: Activation = "tanh",
    ) -> None:
        super().__init__()
        require_integers("MLPPolicy", 1, num_features=num_features, num_actions=num_actions)
        require_widths("MLPPolicy", hidden)
        require_instances("MLPPolicy", Activation, activation=activation)
        self.num_actions = num_actions
        widths = (num_features, *hidden)
        layers: list[nn.Module] = []
        for i in range(len(hidden)):
            layers += [nn.Linear(widths[i], widths[i + 1]), _activation(activation)]
        self.head = nn.Linear(widths[-1], num_actions)
        self.body = nn.Sequential(*layers)
        with torch.no_grad():
            self.head.weight.mul_(0.01)
            self.head.bias.zero_()

    def action_log_probs(self, states: Any) -> Float[Tensor, "B K"]:
        """log pi(a | x) for all actions, from one forward pass."""
        weight = self.head.weight
        if isinstance(states, list | tuple):
            states = torch.stack([torch.as_tensor(state) for state in states])
        features = torch.as_tensor(states, dtype=weight.dtype, device=weight.device)
        return self.head(self.body(features)).log_softmax(dim=1)

    def score_actions(self, states: Any, actions: Any) -> ActionScores:
        """Log-probs [N, 1]. The forward pass has one row per (state, action) pair."""
        log_probs = self.action_log_probs(states)
        arms = as_indices("MLPPolicy: actions", actions, self.num_actions, log_probs.device)
        if len(arms) != len(log_probs):
            raise ContractError(
                f"MLPPolicy needs one action per state; got {len(log_probs)} states, {len(arms)} actions."
            )
        chosen = log_probs.gather(1, arms.unsqueeze(1)).squeeze(1)
        return single_step_scores(chosen, categorical_entropy(log_probs))

    def score_groups(self, states: Any, actions: Any) -> ActionScores:
        """Log-probs [N, 1]. The forward pass has one row per *state*. Groups may differ in size."""
        log_probs = self.action_log_probs(states)
        if len(actions) != len(log_probs):
            raise ContractError(
                f"MLPPolicy.score_groups needs one group of actions per state; "
                f"got {len(log_probs)} states, {len(actions)} groups."
            )
        if isinstance(actions, Tensor | np.ndarray):
            repeats: Any = actions.shape[1]
            flat: Any = actions.reshape(-1)
        else:
            groups = [torch.as_tensor(group, dtype=torch.int64) for group in actions]
            repeats = torch.tensor([len(group) for group in groups], device=log_probs.device)
            flat = torch.cat(groups)
        return self._group_scores(log_probs, repeats, flat)

    def _group_scores(self, log_probs: Float[Tensor, "B K"], repeats: Any, actions: Any) -> ActionScores:
        """Scores of consecutive groups with `repeats` rows each (one number, or one number per state)."""
        device = log_probs.device
        arms = as_indices("MLPPolicy: actions", actions, self.num_actions, device)
        groups = torch.arange(len(log_probs), device=device).repeat_interleave(repeats)
        chosen = log_probs.flatten().index_select(0, groups * self.num_actions + arms)
        return single_step_scores(chosen, categorical_entropy(log_probs).index_select(0, groups))

    @torch.no_grad()
    def sample_actions(
        self, states: Any, num_actions_per_state: int, generator: torch.Generator | None = None
    ) -> SampledActions:
        """G independent draws per state, [B, G], with their scores, from one forward pass of B rows."""
        log_probs = self.action_log_probs(states)
        drawn = torch.multinomial(log_probs.exp(), num_actions_per_state, replacement=True, generator=generator)
        return exact_sample(drawn, self._group_scores(log_probs, num_actions_per_state, drawn.flatten()))

    def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> Int64[Tensor, "B G"]:
        """Sample actions as `sample_actions` does, and return them without scores. Keywords are passed to it."""
        return self.sample_actions(states, num_actions_per_state, **kwargs).actions

    def get_log_probabilities(self, states: Any, actions: Any) -> Float[Tensor, " N"]:
        """log pi(actions[n] | states[n])."""
        return self.score_actions(states, actions).log_probs.squeeze(1)

    def get_parameters(self) -> dict[str, Tensor]:
        """The network's weights."""
        return dict(self.named_parameters())


def _activation(activation: Activation) -> nn.Module:
    match activation:
        case "tanh":
            return nn.Tanh()
        case "relu":
            return nn.ReLU()
        case _:
            assert_never(activation)
