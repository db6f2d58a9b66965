"""How much of what it learns a policy keeps: a share of the way to the trained weights, which held-out requests choose.

Axes: N requests, G calls of each, M shares.
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from jaxtyping import Float64
from torch import Tensor

from adapters.tools.catalogue.tools import ToolCatalogue
from adapters.tools.learning.held_out import HeldOut, folds
from adapters.tools.learning.tasks import ToolTask
from grpo import ActionScores, ExperienceBatch, GRPOConfig, Learner
from grpo.distillation import no_reward
from grpo.errors import ConfigError, warn_user
from grpo.evaluation import measure_policy

SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""The shares m among which held-out requests choose."""

AT_ONCE = 512
"""Held-out requests that are measured at once."""

MAX_SHOWN = 9
"""Number of tools that a warning names, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitReport:
    """Result of `ToolSelectionPolicy.fit` and `fit_to_rewards`. `print(report)` shows it in one to three lines."""

    share: float
    """m in start + m (trained - start). 1: the trained weights. 0: the policy is as it was."""
    held_out: HeldOut | None
    """Share of the requests with a right tool, or mean reward, with the weights before and with the share m. It is slightly
    too good, because the same requests choose m. None: `num_folds=1`."""
    fully_trained: HeldOut | None
    """The same for m = 1, to compare with."""
    losses: tuple[float, ...] = ()
    """Mean loss of the tasks in each epoch of `fit`, before their updates, in nats. Empty after `fit_to_rewards`."""

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

    def right_log_probs(self, tasks: Sequence[ToolTask], *, among: Collection[str] | None = None) -> Tensor:
        """The log-prob of each task's right calls together, with a choice among these tools, or among all."""

    def tool_probabilities(self, states: Sequence[ToolTask]) -> Tensor:
        """pi(tool | state)."""


class RightCalls:
    """A policy as a supervised run sees it: what is demonstrated in a task is all of its right calls at once.

    The policy's own mode and device stay as they are.
    """

    def __init__(self, policy: Fits, among: Collection[str]) -> None:
        self.policy, self.among = policy, among
        self.found: list[Tensor] = []
        """The log-probs that updates have computed since this list was emptied."""

    def score_actions(self, states: Sequence[ToolTask], actions: Any) -> ActionScores:
        """The log-prob of any right call, as one step. The tasks know their calls, so the actions are not read."""
        log_probs = self.policy.right_log_probs(states, among=self.among).unsqueeze(1)
        self.found.append(log_probs.detach())
        return ActionScores(log_probs=log_probs, mask=torch.ones_like(log_probs, dtype=torch.bool))

    def get_log_probabilities(self, states: Sequence[ToolTask], actions: Any) -> Tensor:
        """The same without an axis of steps."""
        return self.score_actions(states, actions).log_probs.squeeze(1)

    def get_parameters(self) -> dict[str, Tensor]:
        """The trained weights by their place."""
        return {str(place): value for place, value in enumerate(self.policy.parameters())}

    def generate_actions(self, states: Any, num_actions_per_state: int) -> Any:
        """Raise an error: nothing is sampled."""
        raise NotImplementedError("a supervised run does not sample")

    def train(self) -> None:
        """Do nothing."""

    def eval(self) -> None:
        """Do nothing."""

    def to(self, device: torch.device | str) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Descent:
    """Settings of one training with Adam."""

    num_epochs: int
    learning_rate: float
    batch_size: int
    seed: int

    def __call__(self, policy: Fits, tasks: Sequence[ToolTask], among: Collection[str]) -> tuple[float, ...]:
        """Train the policy in place to choose among these tools. Returns the mean loss of each epoch."""
        right_calls = RightCalls(policy, among)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(self.seed)  # a learner without a seed of its own draws one
            learner = Learner(
                config=GRPOConfig(batch_size=self.batch_size, max_grad_norm=None),
                policy=right_calls,
                reward_model=no_reward,
                optimizer=partial(torch.optim.Adam, lr=self.learning_rate),
            )
        given = ExperienceBatch.from_demonstrations(tasks, tasks, torch.ones(len(tasks), 1, dtype=torch.bool))
        losses = []
        for _ in range(self.num_epochs):
            learner.update(given)
            losses.append(-float(torch.cat(right_calls.found).mean()))
            right_calls.found.clear()
        return tuple(losses)


def fit(policy: Fits, tasks: Sequence[ToolTask], descent: Descent, num_folds: int) -> FitReport:
    """Carry out `ToolSelectionPolicy.fit` on tasks with a tool."""
    owner = "ToolSelectionPolicy.fit"
    _total_loss(policy, tasks)  # a task that cannot be learned is refused before any weight changes
    parts = [] if num_folds == 1 else folds([task.text for task in tasks], num_folds, descent.seed, owner=owner)
    asked_for = {call.tool for task in tasks for call in task.right_calls if call is not None}
    _warn_of_tools_without_requests(owner, [name for name in policy.catalogue if name not in asked_for])
    if num_folds == 1:
        return FitReport(losses=descent(policy, tasks, asked_for), share=1.0, held_out=None, fully_trained=None)

    def measure(places: Sequence[int]) -> tuple[float, Tensor]:
        some = [tasks[place] for place in places]
        return _total_loss(policy, some), has_right_tool(policy, some)

    trials, _ = _cross_validated(
        policy,
        parts,
        len(tasks),
        train=lambda places: descent(policy, [tasks[place] for place in places], asked_for),
        measure=measure,
    )
    # The loss of large weights is high where they are wrong, so it prefers smaller weights to those that choose best.
    clear = trials.of(1.0).is_clear and trials.of(1.0).gain > 0
    start = _weights(policy)
    losses = descent(policy, tasks, asked_for)
    report = _kept(policy, start, _weights(policy), trials, 1.0 if clear else trials.best, losses)
    falls = "fewer held-out requests get a right tool than before, although the right tools become likelier"
    _warn(owner, report, falls, "num_folds=1 to keep everything that is learned")
    return report


def fit_to_rewards(
    policy: Any,
    requests: Sequence[Any],
    train: Callable[[Sequence[Any]], Any],
    reward_model: Any,
    *,
    held_out: Sequence[Any] | None,
    num_folds: int,
    num_calls: int,
    seed: int,
) -> FitReport:
    """Carry out `ToolSelectionPolicy.fit_to_rewards`.

    The loss of a request is -log((sum of the rewards of its G calls + 1/2) / (G + 1)): -log of the mean reward, where 1/2 keeps
    it finite. If the right call has reward 1 and others 0, this estimates -log pi(right call), the loss of `fit`.
    """
    owner = "ToolSelectionPolicy.fit_to_rewards"
    rows = [*requests, *([] if held_out is None else held_out)]

    def measure(places: Sequence[int]) -> tuple[float, Tensor]:
        some = [rows[place] for place in places]
        rewards = measure_policy(
            policy, some, reward_model, num_actions_per_state=num_calls, batch_size=AT_ONCE, seed=seed, progress=False
        ).rewards
        if not bool(((rewards >= 0) & (rewards <= 1) | rewards.isnan()).all()):
            raise ConfigError(
                f"{owner}: rewards must be from 0 to 1; got from {rewards.min():.3g} to {rewards.max():.3g}. Scale them."
            )
        means = rewards.nanmean(1)
        return -float(((means * num_calls + 0.5) / (num_calls + 1)).log().sum()), means

    texts = [request.text if isinstance(request, ToolTask) else request for request in rows]
    keys: list[Hashable] = [text if isinstance(text, str) else place for place, text in enumerate(texts)]
    if held_out is None:
        parts = folds(keys, num_folds, seed, owner=owner)
    else:
        _require_apart(owner, keys[: len(requests)], keys[len(requests) :])
        parts = [[*range(len(requests), len(rows))]]
    start, has_changed = _weights(policy), False

    def train_on(some: Sequence[Any]) -> None:
        nonlocal has_changed
        train(some)
        has_changed |= any(not torch.equal(*pair) for pair in zip(start, policy.parameters(), strict=True))

    trials, trained = _cross_validated(
        policy, parts, len(rows), train=lambda places: train_on([rows[place] for place in places]), measure=measure
    )
    if held_out is None:
        train_on(requests)
        trained = _weights(policy)
    report = _kept(policy, start, trained, trials, trials.best)
    if not has_changed:
        warn_user(
            f"{owner}: train(requests) has changed no weight of this policy. Let it train this policy and no copy, with "
            "rewards that differ between the calls of a request."
        )
        return report
    falls = "the mean reward of held-out requests falls, although fewer of them earn nothing"
    _warn(owner, report, falls, "train without fit_to_rewards to keep everything that is learned")
    return report


def _require_apart(owner: str, learned: Sequence[Hashable], held_out: Sequence[Hashable]) -> None:
    """Raise a ConfigError unless there are both kinds of requests, and none is of both kinds."""
    if not learned or not held_out:
        raise ConfigError(
            f"{owner} needs requests to train on, and requests in held_out; got {len(learned)} and {len(held_out)}."
        )
    if both := sorted(map(str, set(learned) & set(held_out))):
        raise ConfigError(
            f"{owner}: held_out must have no request of the training; got {both[0]!r:.100} in both. Remove it from one of them."
        )


class _Weights(Protocol):
    def parameters(self) -> Iterator[torch.nn.Parameter]: ...


@dataclass(frozen=True, slots=True)
class _Trials:
    """What cross-validation found for each of `SHARES`."""

    losses: Float64[Tensor, " M"]
    scores: Float64[Tensor, "M N"]

    @property
    def best(self) -> float:
        """The share with the lowest loss."""
        return SHARES[int(self.losses.argmin())]

    def of(self, share: float) -> HeldOut:
        """The estimate for a share."""
        return HeldOut.of(self.scores[0].tolist(), self.scores[SHARES.index(share)].tolist())


def _cross_validated(
    policy: _Weights,
    parts: Sequence[Sequence[int]],
    num_requests: int,
    *,
    train: Callable[[Sequence[int]], Any],
    measure: Callable[[Sequence[int]], tuple[float, Tensor]],
) -> tuple[_Trials, list[Tensor]]:
    """Train without each part in turn, and measure each share on that part. The weights are then as they were.

    Args:
        policy: The policy.
        parts: The places of the requests of each part.
        num_requests: Number of all requests. Those of no part are in every training.
        train: Trains the policy in place on the requests at some places.
        measure: The sum of the losses of the requests at some places, and a score of each.

    Returns:
        What was measured, and the weights of the last training.
    """
    start = trained = _weights(policy)
    losses = torch.zeros(len(SHARES), dtype=torch.float64)
    scores: list[list[Tensor]] = [[] for _ in SHARES]

    def try_share(row: int, places: Sequence[int]) -> None:
        loss, score = measure(places)
        losses[row] += loss
        scores[row].append(score)

    try:
        for places in parts:
            left_out = set(places)
            try_share(0, places)  # before training: what cannot be measured is refused at once
            train([place for place in range(num_requests) if place not in left_out])
            trained = _weights(policy)
            for row, share in [*enumerate(SHARES)][1:]:
                _set(policy, start, trained, share)
                try_share(row, places)
            _set(policy, start, start, 0.0)
    finally:
        _set(policy, start, start, 0.0)
    return _Trials(losses, torch.stack([torch.cat(of) for of in scores])), trained


def _kept(
    policy: _Weights,
    start: Sequence[Tensor],
    trained: Sequence[Tensor],
    trials: _Trials,
    share: float,
    losses: tuple[float, ...] = (),
) -> FitReport:
    """Go a share of the way from the start to the trained weights."""
    _set(policy, start, trained, share)
    return FitReport(share=share, held_out=trials.of(share), fully_trained=trials.of(1.0), losses=losses)


def _warn(owner: str, report: FitReport, falls: str, otherwise: str) -> None:
    """Warn if the policy stays as it was, or if its estimate falls."""
    if report.held_out is None or (report.share > 0 and report.held_out.gain >= 0):
        return
    stays = "the weights stay as they were, because what other requests teach does not help on a held-out request"
    shown = "; ".join(str(report).splitlines())
    warn_user(
        f"{owner}: {stays if report.share == 0 else falls}. {shown}. Pass more requests per tool, or {otherwise}."
    )


def _warn_of_tools_without_requests(owner: str, names: Sequence[str]) -> None:
    """Warn of tools that no request asks for, because the held-out estimate says nothing of them."""
    if names:
        warn_user(
            f"{owner}: no request asks for {len(names)} of the tools, such as {', '.join(names[:MAX_SHOWN])}. Training raises "
            "the other tools, and no estimate says how often that is wrong. Pass requests for these tools, too, or "
            "remove_tools that nobody needs."
        )


@torch.no_grad()
def has_right_tool(policy: Fits, tasks: Sequence[ToolTask]) -> Float64[Tensor, " N"]:
    """1 for each task whose most likely tool is that of a right call, otherwise 0."""
    names = list(policy.catalogue)
    chosen = [tool for part in _parts(tasks) for tool in policy.tool_probabilities(part).argmax(1).tolist()]
    right = [
        any(call is not None and call.tool == names[tool] for call in task.right_calls)
        for tool, task in zip(chosen, tasks, strict=True)
    ]
    return torch.tensor(right, dtype=torch.float64)


@torch.no_grad()
def _total_loss(policy: Fits, tasks: Sequence[ToolTask]) -> float:
    """The sum of the losses of tasks."""
    return -sum(float(policy.right_log_probs(part).sum()) for part in _parts(tasks))


def _parts(tasks: Sequence[ToolTask]) -> Iterator[Sequence[ToolTask]]:
    return (tasks[i : i + AT_ONCE] for i in range(0, len(tasks), AT_ONCE))


def _weights(policy: _Weights) -> list[Tensor]:
    return [value.detach().clone() for value in policy.parameters()]


@torch.no_grad()
def _set(policy: _Weights, start: Sequence[Tensor], trained: Sequence[Tensor], share: float) -> None:
    """Set the weights to start + share (trained - start)."""
    for value, first, last in zip(policy.parameters(), start, trained, strict=True):
        value.copy_(last if share == 1 else first + share * (last - first))
