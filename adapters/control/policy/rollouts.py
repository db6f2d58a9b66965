"""Concurrent episodes: one batched decision per time step for all active members."""

import copy
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Shaped
from numpy.typing import NDArray
from torch import Tensor

from adapters.control.environments.episodes import EpisodeStart
from adapters.control.environments.pool_base import put_rows
from adapters.control.environments.pools import EnvironmentPool, PoolStep, WorkerLost
from grpo.errors import ContractError

from .distributions import ActionDistribution
from .noise import StepNoise
from .observations import ObservationEncoder
from .open_episodes import OpenEpisode

MAX_STEPS = 10_000
"""Maximum length of an episode, if neither the environment nor the user has a limit. Longer ones are truncated."""

MAX_LOSSES_IN_A_ROW = 3
"""Maximum number of times that environments may be lost without a finished episode in between. An episode that is run again
repeats the same steps, so it usually fails again."""

Decide = Callable[[Shaped[Tensor, "n *features"]], Float[Tensor, "n P"]]
"""Maps encoded observations to parameters of the action distribution."""

Allow = Callable[[Shaped[Tensor, "n *features"], Sequence[dict[str, Any]] | None], Bool[Tensor, "n K"] | None]
"""Maps encoded observations and the environments' infos to the mask of allowed categories. None allows all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The S decisions of N episodes, one episode after the other."""

    lengths: list[int]
    """Number of decisions of each episode, [N]."""
    num_steps: list[int]
    """Number of steps of the environment in each episode, [N]. A decision that is repeated is several steps."""
    observations: Shaped[Tensor, "S *features"]
    """Encoded observation at each step."""
    parameters: Float[Tensor, "S P"]
    """Parameters of the distribution from which each action was drawn."""
    actions: Shaped[Tensor, "S *action"]
    """Encoded action at each step."""
    rewards: Float[Tensor, " S"]
    """The environment's reward of each decision, float64: the sum over its steps."""
    allowed: Bool[Tensor, "S K"] | None
    """Mask of the allowed categories at each step. None if all were allowed."""
    terminated: list[bool]
    """Whether the environment terminated each episode, [N]. The other episodes were truncated, or go on."""
    going_on: list[OpenEpisode | None]
    """The episodes that were cut and go on, [N]. None for those that have ended."""
    final_observations: list[Tensor]
    """Encoded observation [*features] after the last step of each episode, [N]."""
    num_lost: int
    """Number of environments that died or hung. Their unfinished episodes were run again."""


def roll_out(
    pool: EnvironmentPool,
    starts: Sequence[EpisodeStart],
    *,
    decide: Decide,
    distribution: ActionDistribution,
    encode: ObservationEncoder,
    allow: Allow,
    seed: int,
    max_steps: int,
    repeat: int = 1,
    deterministic: bool = False,
    num_steps: int | None = None,
    open_episodes: Sequence[OpenEpisode | None] = (),
) -> Record:
    """Run one episode from each of N starts, or the next part of each of N episodes.

    A member with a finished episode starts the next waiting episode. If no episode waits, the member is no longer stepped. The
    noise of an episode is keyed by (seed, row, step), so it does not depend on the member or on other episodes. The number of
    rows in a batch changes the network's outputs by rounding only. With the same pool, results are equal bit for bit.

    Args:
        pool: The M environments.
        starts: The N episode starts.
        decide: The network: maps observations to parameters of the distribution.
        distribution: Distribution of the actions.
        encode: Converts observations to tensors.
        allow: Mask of the allowed categories.
        seed: Seed of the noise.
        max_steps: Maximum number of steps of an episode, in addition to the environment's own limit.
        repeat: Number of steps for which each action is repeated, unless the episode ends before.
        deterministic: Whether to take the most likely action at each step, instead of a random one.
        num_steps: Number of steps after which an episode is cut, at its next decision. Needs a member per row. None: none is.
        open_episodes: With `num_steps`, the episodes that go on, by row and member, [N]. None starts one.

    Raises:
        ContractError: An environment or the network returns a non-finite value, or workers are lost repeatedly.
        WorkerLost: Environments died or hung, and `num_steps` is given. The caller puts the others where they were.
    """
    running = _Running(pool, starts, distribution, seed, open_episodes)
    num_lost = 0
    decisions_left = None if num_steps is None else -(-num_steps // repeat)
    observations, allowed = running.going_on()
    while running.unfinished:
        try:
            beginning = running.begin_waiting()
            if beginning is not None:
                begun = encode(beginning[0])
                observations, allowed = _with(observations, begun), _with(allowed, allow(begun, beginning[1]))
            assert observations is not None  # an unfinished episode is running or has just started
            parameters = decide(observations)
            if deterministic:
                actions = distribution.mode(parameters, allowed)
            else:
                actions = distribution.sample(parameters, running.noise.of_step(running.members), allowed)
            left = max_steps - running.taken
            step, counts = _steps(pool, running.members, parameters, distribution.to_env(actions), left, repeat)
        except WorkerLost as lost:
            if num_steps is not None:
                raise
            num_lost += len(lost.members)
            running.start_over(lost)
            observations, allowed = None, None
            continue
        following = encode(step.observations)
        running.keep(observations, parameters, actions, step.rewards, allowed)
        alive = running.finish(step.terminated, step.truncated, following, counts, max_steps)
        infos = step.infos
        if alive is not None:  # the last info of an episode may have no mask
            following = following[alive]
            infos = None if infos is None else [infos[place] for place in alive.nonzero().squeeze(1).tolist()]
        observations, allowed = (following, allow(following, infos)) if len(following) else (None, None)
        if decisions_left is not None:
            decisions_left -= 1
            if decisions_left == 0 and observations is not None:
                running.cut(observations, allowed)
    return running.record(num_lost)


def _with(rows: Tensor | None, more: Tensor | None) -> Tensor | None:
    """Append rows to a batch. None stands for a batch without rows, or for no masks."""
    return more if rows is None or more is None else torch.cat([rows, more])


def _steps(
    pool: EnvironmentPool,
    members: NDArray[np.int64],
    parameters: Tensor,
    actions: Any,
    left: NDArray[np.int64],
    repeat: int,
) -> tuple[PoolStep, NDArray[np.int64]]:
    """`take_steps`, with an error that names the network if its outputs are the cause."""
    try:
        return take_steps(pool, members, actions, left, repeat)
    except WorkerLost:
        raise
    except Exception:  # actions from a diverged network can make an environment raise anything
        require_finite(parameters)
        raise


def take_steps(
    pool: EnvironmentPool, members: NDArray[np.int64], actions: Any, left: NDArray[np.int64], repeat: int
) -> tuple[PoolStep, NDArray[np.int64]]:
    """Take an action in each member, up to `repeat` times or the number of steps that are left.

    Returns:
        The sums of rewards, with observations and ends after each member's last step; and its number of steps.
    """
    kept = actions if repeat == 1 else copy.deepcopy(actions)  # an environment may write into the action that it gets
    step, counts = pool.step(members, actions), np.ones(len(members), dtype=np.int64)
    if repeat == 1:
        return step, counts
    whole = PoolStep(
        observations=_copied(step.observations),
        rewards=step.rewards.copy(),
        terminated=step.terminated.copy(),
        truncated=step.truncated.copy(),
        infos=None if step.infos is None else list(step.infos),
    )
    for _ in range(repeat - 1):
        rows = np.flatnonzero(~(whole.terminated | whole.truncated) & (counts < left))
        if not len(rows):
            break
        held = [kept[row] for row in rows] if isinstance(kept, list) else kept[rows]
        step = pool.step(members[rows], copy.deepcopy(held))
        put_rows(whole.observations, rows, step.observations)
        whole.rewards[rows] += step.rewards
        whole.terminated[rows], whole.truncated[rows] = step.terminated, step.truncated
        counts[rows] += 1
        if isinstance(whole.infos, list) and step.infos is not None:
            for row, info in zip(rows.tolist(), step.infos, strict=True):
                whole.infos[row] = info
    return whole, counts


def _copied(batch: Any) -> Any:
    """A copy of the arrays of a nested batch."""
    if isinstance(batch, dict):
        return {name: _copied(part) for name, part in batch.items()}
    return tuple(map(_copied, batch)) if isinstance(batch, tuple) else batch.copy()


def require_finite(parameters: Tensor) -> None:
    """Raise a `ContractError` if the outputs of the network are not finite."""
    if not bool(parameters.isfinite().all()):
        raise ContractError(
            "EpisodePolicy: the network's outputs must be finite; got NaN or infinity, so training has diverged. Lower the "
            "learning rate, or set max_grad_norm."
        )


class _Running:
    """Records which member of the pool runs which episode.

    A run is one attempt at an episode. Runs that a lost worker ended are discarded.
    """

    def __init__(
        self,
        pool: EnvironmentPool,
        starts: Sequence[EpisodeStart],
        distribution: ActionDistribution,
        seed: int,
        open_episodes: Sequence[OpenEpisode | None],
    ) -> None:
        self.pool = pool
        self.starts = starts
        self.noise = StepNoise(distribution, pool.num_members, seed)
        self.begun = {row: one for row, one in enumerate(open_episodes[: len(starts)]) if one is not None}
        self.waiting = deque(row for row in range(len(starts)) if row not in self.begun)
        self.free = [member for member in range(pool.num_members) if member not in self.begun]
        self.members = np.empty(0, dtype=np.int64)  # active members in the order of the batch, the earliest start first
        self.runs = np.empty(0, dtype=np.int64)  # the run of each active member
        self.taken = np.empty(0, dtype=np.int64)  # number of steps of each run
        self.row_of_run: list[int] = []
        self.ends: dict[int, tuple[int, bool, Tensor, int]] = {}  # row -> run, terminated, final observation, steps
        self.cuts: dict[int, tuple[Tensor, Tensor | None]] = {}  # row -> next observation, its mask
        self.losses_in_a_row = 0
        self.num_ended = 0  # number of finished episodes at the last loss
        self.steps: list[tuple[NDArray[np.int64], Tensor, Tensor, Tensor, NDArray[np.float64], Tensor | None]] = []

    @property
    def unfinished(self) -> bool:
        return len(self.ends) < len(self.starts)

    def begin_waiting(self) -> tuple[Any, Sequence[dict[str, Any]]] | None:
        """Start waiting episodes in members that run none. Returns observations and infos, or None if no episode starts."""
        count = min(len(self.free), len(self.waiting))
        if not count:
            return None
        members, self.free = self.free[:count], self.free[count:]
        rows = [self.waiting.popleft() for _ in range(count)]
        self._begin(members, rows, [0] * count)
        return self.pool.reset(members, [self.starts[row] for row in rows])

    def going_on(self) -> tuple[Tensor | None, Tensor | None]:
        """Go on with the open episodes, in the members of their rows. Returns observations and masks, if there are any."""
        if not self.begun:
            return None, None
        rows = sorted(self.begun, key=lambda row: -self.begun[row].num_steps)  # the earliest start comes first
        episodes = [self.begun[row] for row in rows]
        self._begin(rows, rows, [one.num_steps for one in episodes])
        masks = [one.allowed for one in episodes]
        allowed = None if masks[0] is None else torch.stack(masks)  # type: ignore[arg-type]
        return torch.stack([one.observation for one in episodes]), allowed

    def _begin(self, members: Sequence[int], rows: Sequence[int], taken: Sequence[int]) -> None:
        runs = range(len(self.row_of_run), len(self.row_of_run) + len(rows))
        self.row_of_run += rows
        self.members = np.concatenate([self.members, members])
        self.runs = np.concatenate([self.runs, runs])
        self.taken = np.concatenate([self.taken, taken])
        for member, row in zip(members, rows, strict=True):
            self.noise.begin(member, row)

    def keep(
        self,
        observations: Tensor,
        parameters: Tensor,
        actions: Tensor,
        rewards: NDArray[np.float64],
        allowed: Tensor | None,
    ) -> None:
        self.steps.append((self.runs, observations, parameters, actions, rewards, allowed))

    def finish(
        self,
        terminated: NDArray[np.bool_],
        truncated: NDArray[np.bool_],
        following: Tensor,
        counts: NDArray[np.int64],
        max_steps: int,
    ) -> Tensor | None:
        """Record the episodes that end. Returns the mask of rows that are still active, or None if all are active."""
        ended = terminated | truncated
        self.taken = self.taken + counts
        if self.taken[0] >= max_steps:  # the earliest run has the most steps
            ended |= self.taken >= max_steps
        if not np.count_nonzero(ended):
            return None
        places = torch.from_numpy(ended.nonzero()[0])
        runs, members, finals = self.runs[ended].tolist(), self.members[ended].tolist(), following[places].unbind()
        fallen, taken = terminated[ended].tolist(), self.taken[ended].tolist()
        for run, member, fell, final, count in zip(runs, members, fallen, finals, taken, strict=True):
            self.ends[self.row_of_run[run]] = (run, fell, final, count)
            self.noise.end(member)
        alive = ~ended
        self.free += members
        self.members, self.runs, self.taken = self.members[alive], self.runs[alive], self.taken[alive]
        return torch.from_numpy(alive)

    def cut(self, following: Tensor, allowed: Tensor | None) -> None:
        """Leave all active episodes where they are."""
        for place, (run, count) in enumerate(zip(self.runs.tolist(), self.taken.tolist(), strict=True)):
            row = self.row_of_run[run]
            self.ends[row] = (run, False, following[place], count)
            self.cuts[row] = following[place], None if allowed is None else allowed[place]

    def start_over(self, lost: WorkerLost) -> None:
        """After a rebuild of the pool, put the unfinished episodes back to the front of the queue.

        Raises:
            ContractError: Environments are lost repeatedly without a finished episode in between.
        """
        self.losses_in_a_row = self.losses_in_a_row + 1 if len(self.ends) == self.num_ended else 1
        self.num_ended = len(self.ends)
        if self.losses_in_a_row > MAX_LOSSES_IN_A_ROW:
            raise ContractError(
                f"Environments were lost {self.losses_in_a_row} times without a finished episode in between. The last loss: "
                f"{lost.reason}. The same episodes fail repeatedly: run them with vectorization='sync' to see the "
                "environment's own errors."
            ) from lost
        self.waiting.extendleft(sorted({self.row_of_run[run] for run in self.runs.tolist()}, reverse=True))
        for member in self.members.tolist():
            self.noise.end(member)
        self.members, self.runs, self.taken = self.members[:0], self.runs[:0], self.taken[:0]
        self.free = list(range(self.pool.num_members))

    def record(self, num_lost: int) -> Record:
        runs = np.concatenate([step[0] for step in self.steps])
        row_of_run = np.array(self.row_of_run)
        finished = np.zeros(len(row_of_run), dtype=bool)
        finished[[run for run, *_ in self.ends.values()]] = True
        kept = np.flatnonzero(finished[runs])
        rows = row_of_run[runs[kept]]
        # a stable sort keeps the steps of an episode in order
        order = torch.from_numpy(kept[np.argsort(rows, kind="stable")])
        allowed = [step[5] for step in self.steps]
        parameters = torch.cat([step[2] for step in self.steps])[order]
        require_finite(parameters)
        ends = [self.ends[row] for row in range(len(self.starts))]
        lengths = np.bincount(rows, minlength=len(self.starts)).tolist()
        actions = torch.cat([step[3] for step in self.steps])[order]
        rewards = torch.from_numpy(np.concatenate([step[4] for step in self.steps]))[order]
        return Record(
            lengths=lengths,
            observations=torch.cat([step[1] for step in self.steps])[order],
            parameters=parameters,
            actions=actions,
            rewards=rewards,
            allowed=None if allowed[0] is None else torch.cat(allowed)[order],  # type: ignore[arg-type]
            num_steps=[
                count - (self.begun[row].num_steps if row in self.begun else 0) for row, (*_, count) in enumerate(ends)
            ],
            going_on=self._going_on(actions.split(lengths), rewards.split(lengths)),
            terminated=[terminated for _, terminated, _, _ in ends],
            final_observations=[observation for _, _, observation, _ in ends],
            num_lost=num_lost,
        )

    def _going_on(self, actions: Sequence[Tensor], rewards: Sequence[Tensor]) -> list[OpenEpisode | None]:
        """The episodes that were cut, with the decisions of this and earlier parts."""
        episodes: list[OpenEpisode | None] = [None] * len(self.starts)
        for row, (observation, allowed) in self.cuts.items():
            before, total = self.begun.get(row), float(rewards[row].sum())
            episodes[row] = OpenEpisode(
                start=self.starts[row] if before is None else before.start,
                actions=actions[row].clone() if before is None else torch.cat([before.actions, actions[row]]),
                num_steps=self.ends[row][3],
                total=total if before is None else before.total + total,
                observation=observation.clone(),
                allowed=None if allowed is None else allowed.clone(),
            )
        return episodes
