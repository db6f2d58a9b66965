"""Sampling ahead: the rows of iteration n come from the policy after iteration n - 1 - K, their rewards come beside updates.

The lag K (`config.iterations_ahead`) decides every number. Threads decide only when the work is done:

    for n in 0, 1, 2, ...:
        sample the rows of every iteration up to n + K that has none     # in this thread, from generators of its own
        ask for their rewards                                            # in a second thread
        wait for the rewards of iteration n
        update the policy on iteration n
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from grpo._collecting.sampled_rows import SampledRows
from grpo._common.conversion import reward_name
from grpo._common.global_state import capture_random_state, restore_random_state, seed_everything
from grpo._common.preserved import preserved_random_state
from grpo._common.protocols import kept_state
from grpo._processes.process import ForkRefusedError, Process
from grpo._retrying.calls import RetriedCalls
from grpo._updating.parts import Counters
from grpo._updating.sampler import SamplerSync
from grpo.config import GRPOConfig
from grpo.engine import Engine
from grpo.errors import ConfigError
from grpo.experience_collector import ExperienceCollector
from grpo.types import ExperienceBatch, Rows

from .background import Background, Task
from .begun_rows import begun_rows
from .interrupts import Interrupts
from .pending import CollectedRewards, Pending, asked

LOGGER = logging.getLogger("grpo")

IN_ORDER = "GRPO_AHEAD_IN_ORDER"
"""The environment variable that makes a run do everything in one thread. Its value is not empty and not "0"."""

# a fork copies the locks that another thread holds, such as torch's, and nobody releases the copies
FORKS = "starts processes (call_in_process, or reward.timeout of a function that is not async)"
"""Why a reward is asked in the first thread."""
WAIT_SECONDS = 0.2
"""Longest wait at a time, before this thread looks at what the second thread does."""


class Ahead:
    """The iterations of a run that are sampled before the policy is updated on them."""

    def __init__(
        self,
        config: GRPOConfig,
        collector: ExperienceCollector,
        sampler: SamplerSync,
        engine: Engine,
        interrupts: Interrupts,
        counters: Counters,
    ) -> None:
        self.pending: list[Pending] = []
        """The iterations after the current one that are sampled already, in order."""
        self._config, self._collector, self._sampler, self._engine = config, collector, sampler, engine
        self._interrupts, self._counters, self.num_ahead = interrupts, counters, config.iterations_ahead
        self._first_thread: int | None = None
        self._calls: Any = None
        self._sampling = self._rewards = Background("", in_order=True)
        self._asks_in_order: bool | None = None
        self._busy: tuple[float, str] | None = None

    def require_train(self, method: str) -> None:
        """Refuse a call of a method that makes one iteration by hand."""
        if self.num_ahead > 0 and self._first_thread is None:
            raise ConfigError(
                f"config.iterations_ahead={self.num_ahead} samples iterations before the updates of earlier ones, and "
                f"{method}() knows one iteration only. Call train(), or set iterations_ahead=0."
            )

    @contextmanager
    def running(self) -> Iterator[None]:
        """A run of `train`, in the block. Ask again for the rewards that a loaded run was waiting for."""
        if self.num_ahead == 0 and not self.pending:
            yield
            return
        in_order = os.environ.get(IN_ORDER, "") not in ("", "0")
        self._sampling.wait()
        self._sampling = Background("sampling of later iterations", in_order=in_order)
        self._rewards = Background("rewards of later iterations", in_order=in_order)
        self._sampler.finish = self._finish_sampling
        self._calls = RetriedCalls(self._collector.reward_model, self._config.reward, waiting=self._waiting)
        self._first_thread, is_complete = threading.get_ident(), False
        Process.only_thread = self._first_thread
        try:
            with self._interrupts.at_once():
                for pending in self.pending:
                    self._ask(pending)
            yield
            is_complete = True
        finally:
            self._first_thread = Process.only_thread = None
            self._sampling.close(drops=False, waits=is_complete)  # a checkpoint holds no iteration without rows
            self._rewards.close(drops=True, waits=is_complete)

    def next_rows(self, draw: Callable[[], Rows], num_left: int) -> ExperienceBatch | None:
        """The rows of the next iteration. Before it waits for them, it samples the iterations whose policy this is.

        Returns:
            The rows, with their rewards. None: nothing is sampled ahead.
        """
        if self.num_ahead == 0 and not self.pending:
            return None
        self._sampler.sync()
        with self._interrupts.at_once():
            while len(self.pending) < min(self.num_ahead + 1, num_left):
                self.pending.append(self._sampled(draw()))
                self._ask(self.pending[-1])
            pending = self.pending[0]
            self._wait(pending)
            if isinstance(pending.answer.exception(), ForkRefusedError):
                pending.answer = self._asked_here(pending)
            rows, answer = pending.rows.result(), pending.answer.result()
        del self.pending[0]
        self._collector.costs.add(answer.counts, answer.measured)
        hidden = max(pending.rows.seconds + answer.seconds - pending.waited, 0.0)
        times = {"time/reward": answer.seconds, "time/waited": pending.waited, "time/hidden": hidden}
        return rows.with_rewards(answer.rewards, times)

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """The iterations that are sampled now."""
        pending = [*self.pending]
        return lambda: {"pending": [one.state_dict() for one in pending]}

    def state_dict(self) -> dict[str, Any]:
        """The iterations that are sampled already."""
        return self.snapshot()()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.pending = [Pending.from_state_dict(one, self._answer) for one in state["pending"]]

    def _sampled(self, states: Rows) -> Pending:
        """Sample the rows of an iteration. Every iteration has its own random numbers, whatever was drawn before."""
        iteration = self._counters.iteration + len(self.pending)
        with preserved_random_state():
            seed_everything(seed_of(self._counters.data_seed, iteration, self._engine.rank))
            begun = begun_rows(self._collector, states)
            if begun is None:
                return Pending(Task.of(self._collector.sample_rows(states, ahead=True)), self._answer)
        pending = Pending(Task(begun), self._answer)
        self._sampling.submit(pending.rows)
        return pending

    def _finish_sampling(self) -> None:
        """Wait until all rows are sampled, because the sampler's weights may change now."""
        late = [pending for pending in self.pending if not pending.rows.done()]
        start = time.perf_counter()
        self._sampling.wait()
        for pending in late:
            pending.waited += (time.perf_counter() - start) / len(late)
        for pending in self.pending:
            pending.rows.result()  # raises what sampling raised

    def _answer(self, rows: SampledRows) -> CollectedRewards:
        given = rows.states, rows.actions, rows.mask, rows.group_ids
        return asked(self._calls, lambda calls: self._collector.rewards_of(*given, calls))

    def _ask(self, pending: Pending) -> None:
        """Ask for the rewards of an iteration: beside the next updates, if this cannot change a number."""
        if pending.answer.done():
            return
        start = time.perf_counter()
        if self._asks_in_order is None:
            self._ask_first(pending.answer)
        elif self._asks_in_order:
            pending.answer.run()
            pending.answer.result()  # an error ends the run here, before a later call draws or changes the state
        else:
            self._rewards.submit(pending.answer)
        pending.waited += time.perf_counter() - start

    def _ask_first(self, answer: Task[CollectedRewards]) -> None:
        """Ask in this thread, and find out whether the reward model has to be asked in this thread."""
        reward_model, before = self._collector.reward_model, capture_random_state()
        num_started, has_state = Process.num_started, _has_entries(kept_state(reward_model))
        answer.run()
        has_state = has_state or _has_entries(kept_state(reward_model))
        if answer.exception() is not None or answer.result().counts["rewards/timeouts"]:
            restore_random_state(before)  # a call that was ended leaves the generators anywhere: the next call tells
            answer.result()
            return
        self._asks_in_order = False
        if not _same_random_state(before, capture_random_state()):
            self._ask_in_order("draws from the global random generators")
        elif has_state:
            self._ask_in_order("keeps a state")
        elif Process.num_started > num_started:
            self._ask_in_order(FORKS)

    def _asked_here(self, pending: Pending) -> Task[CollectedRewards]:
        """Ask once more in this thread, because the reward started a process only now, which the second thread must not do."""
        if not self._asks_in_order:
            self._ask_in_order(FORKS)
        answer = pending.question()
        with preserved_random_state():  # a process that ends sets the generators, and updates draw from them
            answer.run()
        pending.waited += answer.seconds
        return answer

    def _ask_in_order(self, reason: str) -> None:
        """Ask for all further rewards in this thread, and say why."""
        self._asks_in_order = True
        LOGGER.warning(
            "%s %s, so it is called between the updates and not beside them, and iterations_ahead=%d hides no time.",
            reward_name(self._collector.reward_model),
            reason,
            self.num_ahead,
        )

    def _wait(self, pending: Pending) -> None:
        """Wait for the rewards of an iteration. The other ranks learn from this thread why the second thread takes long."""
        start = time.perf_counter()
        while not wait([pending.answer], WAIT_SECONDS).done:
            busy = self._busy
            if busy is not None and (seconds := busy[0] - time.monotonic()) > 0:
                with self._engine.waiting(seconds, busy[1]):
                    wait([pending.answer], seconds)
        pending.waited += time.perf_counter() - start

    @contextmanager
    def _waiting(self, seconds: float, reason: str) -> Iterator[None]:
        """A block that may take long. The second thread only notes it, because it must not talk to the other ranks."""
        if threading.get_ident() == self._first_thread:
            with self._engine.waiting(seconds, reason):
                yield
            return
        self._busy = time.monotonic() + seconds, reason
        try:
            yield
        finally:
            self._busy = None


def seed_of(seed: int, iteration: int, rank: int) -> int:
    """The seed of the random numbers with which a rank samples an iteration."""
    return int(np.random.SeedSequence((seed, iteration, rank)).generate_state(1, np.uint64)[0])


def _same_random_state(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether the global random generators are where they were."""
    same_numpy = all(np.array_equal(a, b) for a, b in zip(one["numpy"], other["numpy"], strict=True))
    same_cuda = all(map(torch.equal, one["cuda"], other["cuda"]))
    return one["python"] == other["python"] and same_numpy and torch.equal(one["torch"], other["torch"]) and same_cuda


def _has_entries(state: Mapping[str, Any]) -> bool:
    """Whether a nested state holds anything. A sum of rewards without a state has an empty dict for each of them."""
    return any(not isinstance(value, Mapping) or _has_entries(value) for value in state.values())
