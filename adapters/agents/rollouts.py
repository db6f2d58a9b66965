"""Rollouts: many conversations at the same time, whose turns are sampled together.

Conversations run in an event loop in a thread of their own, so this works in notebooks too. The caller's thread samples: it
collects the contexts that wait for a turn, samples all of them in one call, and gives each turn back when it ends.
"""

import asyncio
import logging
import queue
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo.errors import ContractError, DeadlineError, GRPOError

from .branching import Saved
from .chat import Chat, ConversationEnded, SampledTurn, SampleTurn
from .conversations import Conversation
from .speakers import Speaker
from .threads import OwnThread

PATIENCE = 0.2
"""How long a batch waits for conversations that are still busy, as a share of the time that the last batch took."""
SHORTEST_WAIT = 0.02
"""The least that a batch waits, in seconds, if conversations are still busy. Most environments answer within it."""
SETTLE_SECONDS = 0.005
"""How long a batch waits for more requests of conversations that wait already, once a conversation had several at a time."""
GRACE_SECONDS = 1.0
"""How long a cancelled conversation may take to end before its environment is given up."""
BLOCKED_SECONDS = 10.0
"""How long the event loop may be blocked after nobody has asked for a turn within the timeout."""
BEAT_SECONDS = 0.5
"""How often it is measured whether the event loop can work."""
MOST_ALONE = 8
"""Number of conversations that are held again alone in the life of a policy, to find out why they failed."""
MOST_HANGING = 8
"""Number of states whose environments may hang at the same time. Each environment keeps a thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One conversation to hold."""

    index: int
    """Place of the conversation among all."""
    state: Any
    """What it is about."""
    seed: int
    """Seed of the environment."""
    sampling_seed: int
    """Seed of the policy's turns."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """A context that waits for a turn."""

    index: int
    """Place of the conversation among all."""
    context: Sequence[int]
    """Token ids, with pictures if the context has some."""
    seed: int
    """Seed of the turn."""
    max_new_tokens: int
    """Maximum number of tokens of the turn."""
    stop: tuple[str, ...]
    """Texts that end the turn, in addition to those of the policy."""
    turn: asyncio.Future
    """Gets the `SampledTurn`."""
    speaker: Speaker | None
    """Who speaks. None: the trained model."""


GiveTurn = Callable[[Request, SampledTurn], None]
"""Gives a turn to the conversation that waits for it."""
SampleBatch = Callable[[Sequence[Request], GiveTurn], list[SampledTurn]]
"""Samples a turn for each request. It may give each turn as soon as the turn ends."""
MakeChat = Callable[[Job, SampleTurn], Chat]


class Rollouts:
    """Holds conversations, at most `concurrency` at a time.

    Args:
        play: `async def play(chat, state)`, which holds one conversation.
        concurrency: Maximum number of conversations at a time. More make larger batches, and need more memory and
            environments.
        timeout: Seconds that `play` may be busy between two messages of the policy, without those in which no conversation
            could go on. None: no limit.
        turn_timeout: Seconds that a message of the policy may take, with the time that its request waits. None: no limit.
        num_retries: How often a conversation is held again whose environment or program fails or hangs.
        tries_alone: Whether a conversation that failed beside others is held again alone, to find out if that is the cause.
    """

    def __init__(
        self,
        play: Callable[[Chat, Any], Coroutine],
        *,
        concurrency: int,
        timeout: float | None,
        turn_timeout: float | None = None,
        num_retries: int = 0,
        tries_alone: bool = False,
    ) -> None:
        self._play = play
        self._num_retries = num_retries
        self._concurrency = concurrency
        self._timeout, self._turn_timeout = timeout, turn_timeout
        self.num_abandoned = 0
        """Environments that were given up."""
        self._hanging: dict[int, tuple[Any, list[OwnThread]]] = {}
        """The states of these environments by their `id`, which belongs to them as long as they are kept, and the threads."""
        self.num_retried = 0
        """Conversations that were held again."""
        self._has_logged = False
        self._num_tries_alone = MOST_ALONE if tries_alone and concurrency > 1 else 0
        """How many more conversations may be held again alone."""

    def run(self, jobs: Sequence[Job], make_chat: MakeChat, sample: SampleBatch) -> list[tuple[Chat, Conversation]]:
        """Hold one conversation per job, and its branches, and return them in order. `sample` is called in the caller's thread.

        Raises:
            DeadlineError: Environments of too many states hang, or an agent program blocks the event loop.
            GRPOError: An environment or an agent program breaks its contract.
        """
        batches = _Batches(self._timeout, self._concurrency, self._turn_timeout)
        finished: list[Any] = []

        async def hold() -> None:
            try:
                finished.append(await self._hold_all(jobs, make_chat, batches))
            except BaseException as error:  # raised again in the caller's thread
                finished.append(error)
            finally:
                batches.end()

        def work() -> None:
            try:
                asyncio.run(hold())
            except (SystemExit, KeyboardInterrupt) as error:  # asyncio ends the event loop
                finished[:] = [
                    ContractError(
                        f"AgentPolicy: a task of an agent program raised {type(error).__name__}, which ends the event loop of "
                        "all conversations. Raise another error."
                    )
                ]

        # a second thread: the caller's may run an event loop (notebooks), and autocast belongs to a thread
        thread = threading.Thread(target=work, daemon=True, name="conversations")
        thread.start()
        try:
            while requests := batches.next():
                began = time.monotonic()
                turns = sample(requests, batches.give)
                batches.seconds = time.monotonic() - began
                for request, turn in zip(requests, turns, strict=True):
                    batches.give(request, turn)
        except BaseException:  # also an interrupt: no conversation goes on without its turns
            batches.cancel()
            thread.join(3 * GRACE_SECONDS)
            raise
        thread.join(3 * GRACE_SECONDS)  # programs that ignore that they were cancelled do not hold up the run
        if isinstance(finished[0], BaseException):
            raise finished[0]
        return finished[0]

    async def _hold_all(self, jobs: Sequence[Job], make_chat: MakeChat, batches: "_Batches") -> list[Any]:
        batches.loop, batches.main = asyncio.get_running_loop(), asyncio.current_task()
        room = asyncio.Semaphore(self._concurrency)
        clock = _LoopClock()
        beat = asyncio.create_task(clock.beat())

        def new_chat(job: Job) -> Chat:
            chat = make_chat(job, batches.sampler(job.index))
            chat.now = clock.now
            chat.restart_clock()
            return chat

        tasks: list[asyncio.Task] = []
        ended: asyncio.Queue[asyncio.Task] = asyncio.Queue()

        async def hold(job: Job, chat: Chat) -> tuple[int, tuple[Chat, Conversation]]:
            async with room:
                with batches.one_more():
                    chat.restart_clock()
                    return job.index, await self._hold(job, chat, lambda: new_chat(job))

        def end(task: asyncio.Task) -> None:
            if not task.cancelled():
                task.exception()  # asyncio logs errors that nobody has asked for
            ended.put_nowait(task)

        def begin(job: Job, chat: Chat) -> None:
            def fork(saved: Sequence[Saved]) -> None:
                for leaf, branch in chat.forked(saved, batches.sampler):
                    begin(replace(job, index=leaf), branch)

            chat.fork = fork
            task = asyncio.create_task(hold(job, chat))
            task.add_done_callback(end)
            tasks.append(task)

        for job in jobs:
            begin(job, new_chat(job))
        try:
            held: list[Any] = []
            while len(held) < len(tasks):
                held.append((await ended.get()).result())
            held.sort(key=lambda pair: pair[0])
            if len(held) > 1:
                await self._try_alone(jobs, held, new_chat, batches)
            return [conversation for _, conversation in held]
        finally:
            for task in [*tasks, beat]:
                task.cancel()
            await asyncio.wait(tasks, timeout=2 * GRACE_SECONDS)

    async def _hold(self, job: Job, chat: Chat, again: Callable[[], Chat]) -> tuple[Chat, Conversation]:
        """Hold a conversation, and hold it again in a new environment if that fails and there are retries left."""
        for _ in range(self._num_retries):
            held = await self._hold_once(job, chat)
            if chat.ended_by not in ("error", "timeout") or chat.branch is not None or self._hangs(job.state):
                return held
            self.num_retried += 1
            chat = again()
        return await self._hold_once(job, chat)

    async def _try_alone(
        self,
        jobs: Sequence[Job],
        held: list[tuple[int, tuple[Chat, Conversation]]],
        new_chat: Callable[[Job], Chat],
        batches: "_Batches",
    ) -> None:
        """Hold conversations that failed again, one after another: one for each state, at most `MOST_ALONE` in all, until one
        of them does not fail. Its package may then not be safe in several threads."""
        by_index, tried = {job.index: job for job in jobs}, set()
        for place, (index, (chat, failed)) in enumerate(held):
            job = by_index.get(index)  # None: a branch
            if job is None or chat.ended_by != "error" or chat.branch is not None or id(job.state) in tried:
                continue
            if chat.has_lost_call:  # not by the environment
                continue
            if self._num_tries_alone == 0:
                return
            tried.add(id(job.state))
            self._num_tries_alone -= 1
            self.num_retried += 1
            with batches.one_more():
                again = await self._hold_once(job, new_chat(job))
            if again[0].ended_by not in ("error", "timeout"):
                held[place] = index, again
                self._num_tries_alone = 0
                logging.getLogger("grpo").warning(
                    "AgentPolicy: the environment of the state %.80r failed beside others and not alone: its package may not "
                    "be safe in several threads. Set one_at_a_time=True, or num_retries=1 if it fails now and then. Its error: "
                    "%s",
                    job.state,
                    failed.info.get("error"),
                )

    async def _hold_once(self, job: Job, chat: Chat) -> tuple[Chat, Conversation]:
        if self._hangs(job.state):  # each try would keep another thread
            chat.ended_by, chat.info = "timeout", {"error": "an earlier environment of this state still hangs"}
            return chat, chat.conversation(float("nan"))
        chat.program = task = asyncio.ensure_future(_without_exits(self._play(chat, job.state)))
        try:
            while not task.done() and chat.ended_by != "timeout":
                left = None if self._timeout is None else self._timeout - chat.seconds_without_request
                if left is None or left > 0:
                    await asyncio.wait({task}, timeout=left)
                else:
                    chat.ended_by = "timeout"
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=GRACE_SECONDS)
            if task.done() and not task.cancelled():
                task.exception()  # asyncio logs errors that nobody has asked for
            await chat.remove_folder()
        return chat, chat.conversation(self._rewards(task, job, chat))

    def _hangs(self, state: Any) -> bool:
        """Whether an environment of this state was given up, and has not answered yet. Without a thread, it never does."""
        if id(state) not in self._hanging:
            return False
        _, threads = self._hanging[id(state)]
        if threads and not any(thread.is_alive for thread in threads):  # it was slow
            del self._hanging[id(state)]
            return False
        return True

    def _rewards(self, task: asyncio.Future, job: Job, chat: Chat) -> Any:
        """The rewards that `play` returned. NaN if it failed, so that `RewardConfig` decides about the row.

        Raises:
            DeadlineError: Environments of too many states hang.
        """
        if not task.done():
            self.num_abandoned += 1
            _, threads = self._hanging.get(id(job.state), (job.state, []))
            self._hanging[id(job.state)] = job.state, [*threads, *(each for each in chat.threads if each.is_alive)]
            if sum(self._hangs(state) for state, _ in list(self._hanging.values())) >= MOST_HANGING:
                raise DeadlineError(
                    f"AgentPolicy: environments of {MOST_HANGING} states did not answer within timeout={self._timeout:g} s "
                    "and still hang. Raise the timeout, or find out what they wait for."
                )
        if chat.ended_by == "timeout":
            chat.info = {"error": chat.is_late or f"no answer within {self._timeout:g} s"}
            return float("nan")
        error = RuntimeError("the agent program was cancelled") if task.cancelled() else task.exception()
        if error is None:
            return task.result()
        if (limit := _limit(error)) is not None:  # nothing went wrong, and `play` had no other reward to give
            chat.ended_by = chat.ended_by or limit.ended_by
            return 0.0
        if isinstance(error, GRPOError) or not isinstance(error, Exception):
            raise error
        chat.ended_by = "error"
        chat.info = {"error": f"{type(error).__name__}: {error}"}
        if not self._has_logged:
            self._has_logged = True
            logging.getLogger("grpo").warning(
                "AgentPolicy: a conversation failed, and has no reward: RewardConfig decides about its row. (This message "
                "appears once; agents/ended_by_error counts.)\n%s",
                "".join(traceback.format_exception(error)),
            )
        return float("nan")


async def _without_exits(play: Coroutine) -> Any:
    """What a program returns. Errors that would end the event loop of all conversations are errors of this one."""
    try:
        return await play
    except (SystemExit, KeyboardInterrupt) as error:
        raise RuntimeError(f"the agent program raised {type(error).__name__}: {error}") from error


def _limit(error: BaseException) -> ConversationEnded | None:
    """The limit that an agent program did not catch. A task group raises those of its tasks together."""
    while isinstance(error, BaseExceptionGroup) and error.split(ConversationEnded)[1] is None:
        error = error.exceptions[0]
    return error if isinstance(error, ConversationEnded) else None


class _LoopClock:
    """The seconds in which the event loop can work.

    Those in which the process was stopped, starved of CPU, or held up by an async function are no environment's, so they do
    not count for `AgentPolicy(timeout=...)`.
    """

    def __init__(self) -> None:
        self._lost = 0.0

    def now(self) -> float:
        """The seconds so far."""
        return time.monotonic() - self._lost

    async def beat(self) -> None:
        """Measure by how much the event loop wakes this task too late."""
        while True:
            due = time.monotonic() + BEAT_SECONDS
            await asyncio.sleep(BEAT_SECONDS)
            self._lost += max(0.0, time.monotonic() - due)


class _Batches:
    """Requests on their way from the conversations' thread to the caller's thread, and turns on their way back."""

    def __init__(self, timeout: float | None, max_requests: int, turn_timeout: float | None = None) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.main: asyncio.Task | None = None
        self.seconds = 1.0
        """How long the last batch took. Before the first batch, a guess."""
        self._requests: queue.SimpleQueue[Request | str] = queue.SimpleQueue()
        self._max_requests = max_requests
        self._left: list[Request] = []
        """Requests that the last batch had no place for."""
        self._is_parallel = False
        """Whether a conversation has had several requests at a time."""
        self._num_active = 0
        self._timeout, self._turn_timeout = timeout, turn_timeout
        self._has_ended = False

    def sampler(self, index: int) -> SampleTurn:
        """A function that requests turns for one conversation, for the conversations' thread."""

        async def sample(
            context: Sequence[int], seed: int, max_new_tokens: int, stop: tuple[str, ...], speaker: Speaker | None
        ) -> SampledTurn:
            turn = asyncio.get_running_loop().create_future()
            self._requests.put(
                Request(
                    index=index,
                    context=context,
                    seed=seed,
                    max_new_tokens=max_new_tokens,
                    stop=stop,
                    turn=turn,
                    speaker=speaker,
                )
            )
            try:
                return await asyncio.wait_for(turn, self._turn_timeout)
            except TimeoutError:
                raise TimeoutError(f"the model sent no message within turn_timeout={self._turn_timeout:g} s") from None

        return sample

    def one_more(self) -> "_Batches":
        """Context of one conversation. A batch is complete when all of these wait for a turn."""
        return self

    def __enter__(self) -> None:
        self._num_active += 1

    def __exit__(self, *_: object) -> None:
        self._num_active -= 1
        self._requests.put("one less")

    def end(self) -> None:
        """Tell the caller's thread that there are no more requests."""
        self._requests.put("end")

    def next(self) -> list[Request]:
        """The next batch, in the order of the conversations. Empty after the last one.

        Each conversation has its first request in the batch before another one has its second, and what does not fit waits.
        """
        requests, self._left = [request for request in self._left if not request.turn.done()], []
        until = time.monotonic() + self._patience() if requests else float("inf")
        while not self._has_ended:
            asking = {request.index for request in requests}
            is_complete = bool(requests) and len(asking) >= self._num_active
            self._is_parallel |= len(asking) < len(requests)
            seconds = until - time.monotonic()
            if is_complete:  # other requests of the same conversations come right after
                seconds = min(seconds, SETTLE_SECONDS if self._is_parallel else 0.0)
            try:
                item = self._get(None if not requests else max(0.0, seconds))
            except queue.Empty:
                break
            if item == "end":
                self._has_ended = True
            elif isinstance(item, Request):
                if not requests:
                    until = time.monotonic() + self._patience()
                requests.append(item)
            requests = [request for request in requests if not request.turn.done()]  # given up meanwhile
        if self._has_ended:
            return []
        places: Counter[int] = Counter()
        order = []
        for request in requests:
            order.append((places[request.index], request.index))
            places[request.index] += 1
        fair = sorted(range(len(requests)), key=order.__getitem__)
        self._left = [requests[i] for i in sorted(fair[self._max_requests :])]
        return sorted((requests[i] for i in fair[: self._max_requests]), key=lambda request: request.index)

    def _patience(self) -> float:
        """How long a batch waits for conversations that are still busy."""
        return max(SHORTEST_WAIT, PATIENCE * self.seconds)

    def give(self, request: Request, turn: SampledTurn) -> None:
        """Give a turn to its conversation, unless the conversation has it already."""
        self._call(_give, request.turn, turn)

    def cancel(self) -> None:
        """End all conversations."""
        if self.main is not None:
            self._call(self.main.cancel)

    def _get(self, seconds: float | None) -> Request | str:
        if seconds is not None or self._timeout is None:
            return self._requests.get(timeout=seconds)
        while True:
            try:
                return self._requests.get(timeout=self._timeout)
            except queue.Empty:
                self._require_running_loop()

    def _require_running_loop(self) -> None:
        """Raise a DeadlineError if an agent program blocks the event loop, in which all conversations run."""
        runs = threading.Event()
        if self.loop is None or not self._call(runs.set):
            return
        task = asyncio.current_task(self.loop)
        while not runs.wait(BLOCKED_SECONDS) and self._requests.empty():
            before, task = task, asyncio.current_task(self.loop)
            if task is not before:  # the process is starved of CPU, and the tasks go on all the same
                continue
            self._has_ended = True
            raise DeadlineError(
                f"AgentPolicy: an async function has not awaited anything for {BLOCKED_SECONDS:g} s, and holds up all "
                "conversations. Await inside it, or make it a plain method of an environment, which has its own thread."
            )

    def _call(self, function: Callable[..., Any], *args: Any) -> bool:
        """Call a function in the conversations' thread. Returns False if there is no such thread, or no longer."""
        try:
            if self.loop is None:
                return False
            self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the event loop is closed
            return False
        return True


def _give(future: asyncio.Future, turn: SampledTurn) -> None:
    if not future.done():
        future.set_result(turn)
