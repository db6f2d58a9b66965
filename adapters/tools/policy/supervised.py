"""Supervised training of a policy on tasks with known right calls."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from adapters.tools.catalogue.inputs import require_real, require_whole
from adapters.tools.learning.tasks import ToolTask
from grpo.errors import ConfigError

if TYPE_CHECKING:
    from .policy import ToolSelectionPolicy


def fit_to_tasks(
    policy: "ToolSelectionPolicy",
    tasks: Sequence[ToolTask],
    *,
    num_epochs: int,
    learning_rate: float,
    batch_size: int,
    seed: int,
) -> list[float]:
    """Carry out `ToolSelectionPolicy.fit`."""
    require_whole("ToolSelectionPolicy.fit", num_epochs=num_epochs, batch_size=batch_size)
    require_real("ToolSelectionPolicy.fit", learning_rate=learning_rate)
    with_tool = [task for task in tasks if task.tool is not None]
    if not with_tool:
        raise ConfigError(
            "ToolSelectionPolicy.fit needs tasks with a right tool; got none. Pass ToolTasks with tool=..."
        )
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(policy.parameters(), lr=learning_rate)
    losses = []
    for _ in range(num_epochs):
        order, total = torch.randperm(len(with_tool), generator=generator).tolist(), 0.0
        for start in range(0, len(order), batch_size):
            batch = [with_tool[i] for i in order[start : start + batch_size]]
            loss = negative_log_likelihood(policy, batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += float(loss.detach()) * len(batch)
        losses.append(total / len(with_tool))
    return losses


def negative_log_likelihood(policy: "ToolSelectionPolicy", tasks: Sequence[ToolTask]) -> Tensor:
    """Mean over the tasks of -log(sum over the right calls a of pi(a | request)), in nats.

    pi(a | request) is the product over the decisions that a determines: its tool, and the enumerated parameters whose values
    it names.
    """
    answers = [(row, call) for row, task in enumerate(tasks) for call in task.right_calls if call is not None]
    rows = torch.tensor([row for row, _ in answers])
    steps, known = policy.menu.tables.parts_of([call for _, call in answers])
    per_step = (
        policy.distribution(tasks).score(*(each.to(policy.menu.values.device) for each in (rows, steps))).log_probs
    )
    rows = rows.to(per_step.device)
    log_probs = per_step.where(known[:, : per_step.shape[1]].to(per_step.device), 0.0).sum(1)
    # logsumexp over the answers of each task
    largest = log_probs.new_full((len(tasks),), -torch.inf).scatter_reduce(0, rows, log_probs.detach(), "amax")
    sums = log_probs.new_zeros(len(tasks)).index_add(0, rows, (log_probs - largest[rows]).exp())
    return -(largest + sums.log()).mean()
