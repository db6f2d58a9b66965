"""Baselines for GRPO on the tools workbench: other methods that choose a call for a request.

All baselines have the `predict` method of a policy. Methods that learn from rewards use the same rewards as GRPO: each call is
executed and scored by `ToolRewards`.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

from adapters.tools import (
    HashingEncoder,
    ToolCall,
    ToolCatalogue,
    ToolResult,
    ToolRewards,
    ToolSelectionPolicy,
    ToolTask,
)
from adapters.tools.catalogue.tools import ABSENT, ParameterChoices, Tool
from adapters.tools.learning.rewards import RIGHT_TOOL, RunsCalls, call_key
from adapters.tools.policy.menu import Menu
from adapters.tools.text.encoders import CachedEncoder
from grpo.rewards import ask_for_rewards

BASELINE_STEP = 0.1
"""Step size of REINFORCE's running mean and mean square, per update."""


class Counted:
    """An executor that counts its calls and keeps the last call that succeeded."""

    def __init__(self, executor: RunsCalls) -> None:
        self.executor = executor
        self.num_calls = 0
        self.last: tuple[ToolCall, ToolResult] | None = None

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Execute the calls and count them."""
        results = self.executor.run(calls)
        self.num_calls += len(calls)
        self.last = next(((call, result) for call, result in zip(calls, results, strict=True) if result.ok), self.last)
        return results


class Remembering:
    """An executor that executes each distinct call once and caches the result.

    This is valid because the workbench's tools have no side effects and depend only on their arguments.
    """

    def __init__(self, executor: RunsCalls) -> None:
        self.executor = executor
        self._results: dict[str | None, ToolResult] = {}

    def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """A result per call, in order."""
        keys = [call_key(call) for call in calls]
        assert None not in keys, "policies and bandits make calls that JSON can represent"
        new = {key: call for key, call in zip(keys, calls, strict=True) if key not in self._results}
        self._results |= dict(zip(new, self.executor.run(list(new.values())), strict=True))
        return [self._results[key] for key in keys]


def in_batches(tasks: Sequence[ToolTask], num_tasks: int, size: int, seed: int) -> Iterator[list[ToolTask]]:
    """Batches of `size` tasks, `num_tasks` in total. Each pass over the tasks has a new order."""
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    while num_tasks > 0:
        while len(order) < size:
            order += torch.randperm(len(tasks), generator=generator).tolist()
        taken, order = order[: min(size, num_tasks)], order[size:]
        num_tasks -= len(taken)
        yield [tasks[i] for i in taken]


class NearestDescription:
    """Choose the tool with the highest cosine similarity between description and request. Nothing is learned.

    A parameter gets its schema's default. A parameter without a default is omitted if it is
    optional, and otherwise gets its first value.
    """

    def __init__(self, catalogue: ToolCatalogue) -> None:
        self.encoder = HashingEncoder()
        self.menu = Menu(catalogue, self.encoder)
        self.usual = [[_usual(tool, choice) for choice in tool.choices] for tool in catalogue.values()]

    def predict(self, states: Sequence[ToolTask]) -> list[ToolCall]:
        """One call per task."""
        nearest = (self.encoder([task.text for task in states]) @ self.menu.tool_vectors.T).argmax(1).tolist()
        pairs = zip(states, nearest, strict=True)
        return [self.menu.call([tool, *self.usual[tool]], task.slots) for task, tool in pairs]


def _usual(tool: Tool, choice: ParameterChoices) -> int:
    default = tool.properties[choice.name].get("default", ABSENT)
    return choice.values.index(default) if default in choice.values else 0


def train_reinforce(
    policy: ToolSelectionPolicy,
    tasks: Sequence[ToolTask],
    rewards: ToolRewards,
    *,
    num_calls: int,
    batch_size: int,
    learning_rate: float,
    entropy_coef: float,
    seed: int,
) -> None:
    """REINFORCE, one call per task: l = -(r - m) / s log pi(call | task) - c H, with m and s averaged over updates.

    Source: Williams 1992, Simple Statistical Gradient-Following Algorithms, sec. 6 (reinforcement comparison).
    """
    optimizer = torch.optim.AdamW(policy.parameters(), lr=learning_rate, weight_decay=0.0)
    mean = mean_square = 0.0
    for update, states in enumerate(in_batches(tasks, num_calls, batch_size, seed)):
        calls = [group[0] for group in policy.sample_actions(states, 1).actions]
        reward = rewards.compute_rewards(states, calls).float()
        step = max(BASELINE_STEP, 1 / (update + 1))  # the plain mean over the first updates
        mean += step * (float(reward.mean()) - mean)
        mean_square += step * (float(reward.square().mean()) - mean_square)
        advantages = (reward - mean) / max(mean_square - mean**2, 1e-8) ** 0.5
        scores = policy.score_actions(states, calls)
        assert scores.entropy is not None
        loss = -(advantages * scores.log_probs.sum(1)).mean() - entropy_coef * scores.entropy.sum(1).mean()
        _apply(loss, policy, optimizer)


def train_supervised(
    policy: ToolSelectionPolicy, tasks: Sequence[ToolTask], *, num_tasks: int, learning_rate: float, seed: int
) -> None:
    """Supervised learning from the right calls: l = -log pi(right call | task)."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=learning_rate, weight_decay=0.0)
    for states in in_batches(tasks, num_tasks, 64, seed):
        right = [ToolCall(tool=task.tool, arguments=task.arguments) for task in states]
        _apply(-policy.get_log_probabilities(states, right).mean(), policy, optimizer)


def _apply(loss: Tensor, policy: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(policy.parameters(), 1.0)  # as the trainer does
    optimizer.step()


class LinearArms:
    """Ridge regression of the reward on the context for each arm, with upper confidence bounds.

    A_a = 1 + sum x x^T, b_a = sum r x, theta_a = A_a^-1 b_a;  score(x, a) = theta_a . x + alpha sqrt(x^T A_a^-1 x)

    The inverses are stored and updated by the Sherman-Morrison-Woodbury formula.

    Source: Li et al. 2010, A Contextual-Bandit Approach to Personalized News Article Recommendation, arXiv:1003.0146, alg. 1.
    """

    def __init__(self, num_arms: int, num_features: int, alpha: float) -> None:
        self.alpha = alpha
        self.inverse = torch.eye(num_features).repeat(num_arms, 1, 1)
        self.sums = torch.zeros(num_arms, num_features)
        self.theta = torch.zeros(num_arms, num_features)

    def scores(self, contexts: Float[Tensor, "n d"], arms: slice, *, explore: bool) -> Float[Tensor, "n k"]:
        """Scores of consecutive arms. Without exploration the bound is omitted."""
        means = contexts @ self.theta[arms].T
        if not explore:
            return means
        variance = ((contexts @ self.inverse[arms]) * contexts).sum(2).T
        return means + self.alpha * variance.clamp(min=0.0).sqrt()

    def learn(self, arm: int, contexts: Float[Tensor, "m d"], rewards: Float[Tensor, " m"]) -> None:
        """Learn from m pulls of one arm."""
        inverse = self.inverse[arm]
        spread = inverse @ contexts.T
        inner = torch.eye(len(contexts)) + contexts @ spread
        inverse -= spread @ torch.linalg.solve(inner, spread.T)
        self.sums[arm] += contexts.T @ rewards
        self.theta[arm] = inverse @ self.sums[arm]


class LinUCB:
    """LinUCB with disjoint arms: one arm per tool, and one per value of each parameter of each tool.

    LinUCB gets more information than the policies, which get one reward per call. A tool's arm learns from the tool part of the
    reward. A value's arm learns from the parameter part, and only from calls of the right tool.

    Args:
        catalogue: The tools.
        features: Maps texts to [N, F]. F should be about 256, because each arm has an F x F matrix.
        alpha: A larger value explores more.
        seed: Seed of the random tie-breaking.
    """

    def __init__(
        self, catalogue: ToolCatalogue, features: Callable[[Sequence[str]], Tensor], *, alpha: float, seed: int
    ) -> None:
        self.features = CachedEncoder(features)
        self.menu = Menu(catalogue, self.features)
        self.generator = torch.Generator().manual_seed(seed)
        num_arms = len(catalogue)
        self.value_arms: list[list[slice]] = []
        for choices in self.menu.choices:
            self.value_arms.append([])
            for choice in choices:
                self.value_arms[-1].append(slice(num_arms, num_arms + len(choice.values)))
                num_arms += len(choice.values)
        self.arms = LinearArms(num_arms, self._contexts([""]).shape[1], alpha)

    def _contexts(self, texts: Sequence[str]) -> Tensor:
        """The features of each text, followed by a constant."""
        return torch.cat([self.features(texts), torch.ones(len(texts), 1)], dim=1)

    def choose(self, contexts: Tensor, *, explore: bool) -> list[list[int]]:
        """Choose a tool for each context, then the value of each of the tool's parameters."""
        tools = self._best(contexts, slice(0, len(self.menu.tools)), explore)
        steps = [[int(tool)] for tool in tools]
        for tool in tools.unique().tolist():
            rows = (tools == tool).nonzero().flatten()
            for values in self.value_arms[tool]:
                for row, value in zip(rows.tolist(), self._best(contexts[rows], values, explore).tolist(), strict=True):
                    steps[row].append(value)
        return steps

    def _best(self, contexts: Tensor, arms: slice, explore: bool) -> Tensor:
        scores = self.arms.scores(contexts, arms, explore=explore)
        return (scores + 1e-6 * torch.rand(scores.shape, generator=self.generator)).argmax(1)

    def predict(self, states: Sequence[ToolTask]) -> list[ToolCall]:
        """One call per task, with the highest mean reward."""
        steps = self.choose(self._contexts([task.text for task in states]), explore=False)
        return [self.menu.call(taken, task.slots) for task, taken in zip(states, steps, strict=True)]

    def train(
        self, tasks: Sequence[ToolTask], rewards: ToolRewards, *, num_calls: int, batch_size: int, seed: int
    ) -> None:
        """One call per task. The rewards of a batch are learned before the next batch."""
        for states in in_batches(tasks, num_calls, batch_size, seed):
            contexts = self._contexts([task.text for task in states])
            steps = self.choose(contexts, explore=True)
            calls = [self.menu.call(taken, task.slots) for task, taken in zip(states, steps, strict=True)]
            parts = ask_for_rewards(rewards, states, calls).components
            of_tool, of_parameters = (
                torch.as_tensor(parts[name], dtype=torch.float32) for name in ("tool", "parameters")
            )
            pulls: dict[int, list[int]] = {}
            for row, taken in enumerate(steps):
                pulls.setdefault(taken[0], []).append(row)
                if of_tool[row] == RIGHT_TOOL:
                    for values, value in zip(self.value_arms[taken[0]], taken[1:], strict=True):
                        pulls.setdefault(values.start + value, []).append(row)
            for arm, rows in pulls.items():
                reward = of_tool if arm < len(self.menu.tools) else of_parameters
                self.arms.learn(arm, contexts[rows], reward[rows])


def principal_features(texts: Sequence[str], num_features: int) -> Callable[[Sequence[str]], Tensor]:
    """Unit vectors of `HashingEncoder`, projected onto the principal directions of `texts`."""
    encoder = HashingEncoder()
    vectors = encoder(texts)
    directions = torch.linalg.eigh(vectors.T @ vectors).eigenvectors[
        :, -num_features:
    ]  # of the largest, which come last

    def features(of: Sequence[str]) -> Tensor:
        return nn.functional.normalize(encoder(of) @ directions)

    return features
