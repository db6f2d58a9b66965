"""How far training may take the weights from their start: a ridge for GRPO, and a share of the way for `fit`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from adapters.tools.catalogue.tools import ToolCatalogue
from adapters.tools.learning.held_out import HeldOut, folds
from adapters.tools.learning.tasks import ToolTask
from grpo.errors import warn_user

SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""The shares m among which held-out requests choose."""

AT_ONCE = 512
"""Held-out tasks that are scored in one forward pass."""


class Ridge:
    """A prior around a start: coef / 2 |w - start|^2.

    Args:
        parameters: The weights by name, as they are now: the start.
        coef: Larger keeps the weights closer to the start.

    Source:
        Hoerl and Kennard 1970, Ridge Regression, Technometrics 12, 55-67, around a start instead of 0.
    """

    def __init__(self, parameters: Mapping[str, Tensor], coef: float) -> None:
        self.coef = coef
        self.start = {name: value.detach().clone() for name, value in parameters.items()}

    def __call__(self, parameters: Mapping[str, Tensor]) -> Float[Tensor, ""]:
        """The penalty of these weights."""
        squares = [(value - self.start[name].to(value)).square().sum() for name, value in parameters.items()]
        return self.coef / 2 * torch.stack(squares).sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class FitReport:
    """Result of `ToolSelectionPolicy.fit`. `print(report)` shows it in one to three lines."""

    losses: tuple[float, ...]
    """Mean loss of each epoch on all tasks, in nats."""
    share: float
    """m in start + m (trained - start). 1: the trained weights. 0: the policy is as it was."""
    held_out: HeldOut | None
    """Share of the requests with a right tool, with the weights before and with the share m. It is slightly too good, because
    the same requests choose m. None: `num_folds=1`."""
    fully_trained: HeldOut | None
    """The same for m = 1, to compare with."""

    def __str__(self) -> str:
        """The share and the estimates."""
        if self.held_out is None or self.fully_trained is None:
            return f"loss {self.losses[0]:.3f} to {self.losses[-1]:.3f}; no request was held out"
        lines = [f"share {self.share:g} of the way to the trained weights"]
        if self.share > 0:
            lines.append(str(self.held_out))
        if self.share < 1:
            lines.append(f"fully trained, {self.fully_trained}")
        return "\n".join(lines)


class Fits(Protocol):
    """What `fit` needs of a policy."""

    @property
    def catalogue(self) -> ToolCatalogue:
        """The tools."""

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        """The trained weights."""

    def loss(self, tasks: Sequence[ToolTask]) -> Tensor:
        """The mean loss of tasks."""

    def tool_probabilities(self, states: Sequence[ToolTask]) -> Tensor:
        """pi(tool | state)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Descent:
    """Settings of one training with Adam."""

    num_epochs: int
    learning_rate: float
    batch_size: int
    seed: int

    def __call__(self, policy: Fits, tasks: Sequence[ToolTask]) -> tuple[float, ...]:
        """Train the policy in place. Returns the mean loss of each epoch."""
        generator = torch.Generator().manual_seed(self.seed)
        optimizer = torch.optim.Adam(policy.parameters(), lr=self.learning_rate)
        losses = []
        for _ in range(self.num_epochs):
            order, total = torch.randperm(len(tasks), generator=generator), 0.0
            for places in order.split(self.batch_size):
                loss = policy.loss([tasks[i] for i in places.tolist()])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                total += float(loss.detach()) * len(places)
            losses.append(total / len(tasks))
        return tuple(losses)


def fit(policy: Fits, tasks: Sequence[ToolTask], descent: Descent, num_folds: int) -> FitReport:
    """Carry out `ToolSelectionPolicy.fit` on tasks with a tool."""
    _total_loss(policy, tasks)  # a task that cannot be learned is refused before any weight changes
    start = _weights(policy)
    found = None if num_folds == 1 else _cross_validated(policy, tasks, start, descent, num_folds)
    losses = descent(policy, tasks)
    if found is None:
        return FitReport(losses=losses, share=1.0, held_out=None, fully_trained=None)
    share, held_out, fully_trained = found
    _set(policy, start, _weights(policy), share)
    report = FitReport(losses=losses, share=share, held_out=held_out, fully_trained=fully_trained)
    if share == 0 or held_out.gain < 0:
        what = (
            "the weights stay as they were, because what other requests teach does not help on a held-out request"
            if share == 0
            else "fewer held-out requests get a right tool than before, although the right tools become likelier"
        )
        shown = "; ".join(str(report).splitlines())
        warn_user(
            f"ToolSelectionPolicy.fit: {what}. {shown}. Pass more requests per tool, or num_folds=1 to keep everything that "
            "is learned."
        )
    return report


def _cross_validated(
    policy: Fits, tasks: Sequence[ToolTask], start: Sequence[Tensor], descent: Descent, num_folds: int
) -> tuple[float, HeldOut, HeldOut]:
    """The share that is kept, its estimate, and the estimate of the trained weights.

    It is the share with the lowest loss on held-out tasks. That of large weights is high where they are wrong, so it prefers
    smaller ones to those that choose best. Therefore the share is 1 if the trained weights have clearly more right tools.
    """
    losses = torch.zeros(len(SHARES), dtype=torch.float64)
    right = torch.zeros(len(SHARES), len(tasks))
    try:
        for places in folds([task.text for task in tasks], num_folds, descent.seed, owner="ToolSelectionPolicy.fit"):
            left_out, held = set(places), [tasks[place] for place in places]
            _set(policy, start, start, 0.0)
            descent(policy, [task for place, task in enumerate(tasks) if place not in left_out])
            trained = _weights(policy)
            for row, share in enumerate(SHARES):
                _set(policy, start, trained, share)
                losses[row] += _total_loss(policy, held)
                right[row, places] = has_right_tool(policy, held)
    finally:
        _set(policy, start, start, 0.0)
    best = int(losses.argmin())
    held_out, fully_trained = (HeldOut.of(right[0].tolist(), right[row].tolist()) for row in (best, -1))
    if fully_trained.is_clear and fully_trained.gain > 0:
        return 1.0, fully_trained, fully_trained
    return SHARES[best], held_out, fully_trained


@torch.no_grad()
def has_right_tool(policy: Fits, tasks: Sequence[ToolTask]) -> Float[Tensor, " N"]:
    """1 for each task whose most likely tool is that of a right call, otherwise 0."""
    names = list(policy.catalogue)
    chosen = [tool for part in _parts(tasks) for tool in policy.tool_probabilities(part).argmax(1).tolist()]
    right = [
        any(call is not None and call.tool == names[tool] for call in task.right_calls)
        for tool, task in zip(chosen, tasks, strict=True)
    ]
    return torch.tensor(right, dtype=torch.float32)


@torch.no_grad()
def _total_loss(policy: Fits, tasks: Sequence[ToolTask]) -> float:
    """The sum of the losses of tasks."""
    return sum(len(part) * float(policy.loss(part)) for part in _parts(tasks))


def _parts(tasks: Sequence[ToolTask]) -> Iterator[Sequence[ToolTask]]:
    return (tasks[i : i + AT_ONCE] for i in range(0, len(tasks), AT_ONCE))


def _weights(policy: Fits) -> list[Tensor]:
    return [value.detach().clone() for value in policy.parameters()]


@torch.no_grad()
def _set(policy: Fits, start: Sequence[Tensor], trained: Sequence[Tensor], share: float) -> None:
    """Set the weights to start + share (trained - start)."""
    for value, first, last in zip(policy.parameters(), start, trained, strict=True):
        value.copy_(last if share == 1 else first + share * (last - first))
