"""A sampler with vLLM servers, over HTTP."""

import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from adapters.llm.model.merged_weights import is_divided, merged_weights
from adapters.llm.picture_prompts import Ids, PicturePrompt
from adapters.llm.prompts.pictures import Picture
from grpo.arguments import describe
from grpo.engine import Engine, OneProcess
from grpo.errors import ConfigError, warn_user

from .samplers import GivesRows, Ints, LimitsRows, OnRow, RowLimit, SampledTokens, SamplerError
from .sampling_config import SamplingConfig
from .vllm_requests import Answer, require_equal_prompts, require_room, row_settings, sampled_tokens
from .vllm_worker import FIRST_VERSION, ServerLostError, ServerTimeoutError, VLLMWorker

MAX_LOSSES = 3
"""A server that is lost more often in one call of `sample` ends the call with an error."""

SECONDS_BETWEEN_PROBES = 30.0
"""While other servers work, a lost server is looked for so often."""

SECONDS_FOR_ITS_RANK = 10.0
"""How long a rank that has no server waits for the rank of a restarted one to send it the weights, before it sends them."""

SECONDS_BETWEEN_POLLS = 0.5
"""While no server works, all servers are looked for so often."""


class VLLMServerSampler(LimitsRows, GivesRows):
    """vLLM servers on other devices or other machines. Weights are transferred through a shared folder.

    Start each server with the model that is trained::

        VLLM_SERVER_DEV_MODE=1 vllm serve Qwen/Qwen3-0.6B --host 127.0.0.1 --logprobs-mode processed_logprobs --enable-scale-out

    The weights of each `sync` have a version. A server changes its weights while no request runs on it. It reports the version
    with every completion, and a completion with another version is sampled again. All completions of a prompt are requested
    from one server. A completion depends on its row's seed and, through rounding, on what the server computes at the same
    time, so it does not matter which server answers.

    A server that does not answer is named in a warning, and the other servers sample its rows again. It gets the weights when
    it answers again. If no server answers, the sampler waits `restart_timeout` seconds for one.

    With several ranks, pass the trainer's `engine`. Rank 0 writes the weights, each server loads them once, and no rank samples
    before all ranks know their version.

    In development mode, everyone who can reach a server's port can change the weights, so do not expose the port. vLLM's
    kernels round differently, so its log-probs differ slightly from the trainer's: set `objective.sampler_correction`.

    Args:
        base_url: Address of the server, for example "http://localhost:8000", or a list of addresses.
        weights_folder: Folder that `sync` writes the weights to. The servers must see it under the same path.
        timeout: Time limit of one request in seconds. It includes the time that the request waits for earlier ones.
        max_concurrency: Maximum number of concurrent requests of this process to one server. Each completion is one request.
            The value of the server's `--max-num-seqs` is enough to keep the server busy.
        restart_timeout: How many seconds the sampler waits for a server if none answers.
        engine: The engine of the trainer, if there are several ranks. Every rank uses the same servers.
        group_readable: Whether the owner's group may read the weights, for servers of another user. Otherwise only the owner
            may: a folder in memory is open to all users of the computer.

    Raises:
        ConfigError: An argument is invalid.

    Example:
        >>> sampler = VLLMServerSampler("http://localhost:8000", weights_folder="/dev/shm/weights")  # doctest: +SKIP
        >>> policy = HFPolicy.from_pretrained("Qwen/Qwen3-0.6B", sampler=sampler)  # doctest: +SKIP
    """

    limits_rows = True
    gives_rows = True
    excluded_token_ids: Ints = ()
    """Tokens that no completion may have."""
    samples_beside = True
    """The server has its own weights, and each request its own seed."""
    reads_by_unit = True
    """All ranks read the weights layer by layer, if the ranks divide them."""

    def __init__(
        self,
        base_url: str | Sequence[str],
        *,
        weights_folder: str | Path,
        timeout: float = 600.0,
        max_concurrency: int = 256,
        restart_timeout: float = 600.0,
        engine: Engine | None = None,
        group_readable: bool = False,
    ) -> None:
        folder: Any = weights_folder
        if not isinstance(folder, str | Path) or type(max_concurrency) is not int or max_concurrency < 1:
            raise ConfigError(
                "VLLMServerSampler: weights_folder must be a path, and max_concurrency an integer of at least 1; got "
                f"{describe(folder)} and {describe(max_concurrency)}."
            )
        seconds: Any = restart_timeout
        if not isinstance(seconds, int | float) or not 0 <= seconds < float("inf"):
            raise ConfigError(
                f"VLLMServerSampler: restart_timeout must be a number of seconds of at least 0; got {seconds!r}."
            )
        urls: Any = base_url if isinstance(base_url, list | tuple) else [base_url]
        self._workers = [VLLMWorker(url, timeout=timeout) for url in urls]
        addresses = [worker.url for worker in self._workers]
        if not addresses or len(set(addresses)) < len(addresses):
            raise ConfigError(
                f"VLLMServerSampler: base_url must name at least one server, each once; got {base_url!r}."
            )
        self._folder = Path(weights_folder).resolve()
        self._mode = 0o750 if group_readable else 0o700
        self._timeout = timeout
        self._max_concurrency = max_concurrency
        self._restart_timeout = restart_timeout
        self._engine: Engine = OneProcess() if engine is None else engine
        self._version: str | None = None
        self._num_syncs = 0
        self._run = uuid.uuid4().hex
        self._next_probe: dict[VLLMWorker, float] = {}
        """When to look for each lost server again. The other servers work."""

    def sample(
        self,
        prompts: Sequence[Ids],
        num_per_prompt: int,
        config: SamplingConfig,
        *,
        end_token_ids: Ints,
        seeds: Ints,
        limits: Sequence[RowLimit] | None = None,
        on_row: OnRow | None = None,
    ) -> SampledTokens:
        """Sample completions; see `Sampler.sample`, `LimitsRows` and `GivesRows`.

        Each row is a request, and vLLM's prefix cache shares the prompts. `on_row` is called in other threads, one call at a
        time.

        Raises:
            ConfigError: VLLM does not support a setting, a prompt is too long, or a server was started with other options.
            SamplerError: No server answers, one rejects a request, or one has weights of another client.
        """
        settings = row_settings(config, end_token_ids, limits, len(seeds), self.excluded_token_ids)
        asked = [_asked(prompt) for prompt in prompts]
        bodies = [
            asked[row // num_per_prompt] | {"sampling_params": settings[row] | {"seed": seed}}
            for row, seed in enumerate(seeds)
        ]
        answers: dict[int, Answer] = {}
        losses: Counter[VLLMWorker] = Counter()
        giving = threading.Lock()

        def take(row: int, answer: Answer) -> None:
            require_equal_prompts([prompts[row // num_per_prompt]], [answer])
            with giving:
                answers[row] = answer
                if on_row is not None:
                    own = sampled_tokens([answer], config)
                    on_row(row, own.token_ids[0], own.behaviour_log_probs[0], own.finish_reasons[0])

        while len(answers) < len(bodies):
            workers = self._ready_workers()
            require_room(prompts, settings, min(worker.max_length() for worker in workers))
            shares: dict[VLLMWorker, list[int]] = {}
            for row in range(len(bodies)):
                if row not in answers:
                    group = row // num_per_prompt + self._engine.rank
                    shares.setdefault(workers[group % len(workers)], []).append(row)
            for worker, error in self._lost(shares, bodies, take):
                losses[worker] += 1
                if losses[worker] > MAX_LOSSES:
                    raise error
                num_left = sum(row not in answers for row in shares[worker])
                self._lose(worker, error, f"Its {num_left} rows are sampled again.")
        return sampled_tokens([answers[row] for row in range(len(bodies))], config)

    def sync(self, model: Any) -> None:
        """Send the weights of the trained model to the servers, with its adapters merged. All ranks call this method.

        Raises:
            ConfigError: An adapter cannot be merged, or a server was started with other options.
            SamplerError: No server answers, or one did not load the weights.
        """
        engine = self._engine
        with engine.together("sending weights to the vLLM servers"):
            weights = self._gathered(model) if is_divided(model) else None
            if engine.rank == 0:
                with engine.waiting(self._timeout, "it writes the weights for the vLLM servers"):
                    self._write(_copies(model) if weights is None else weights)
            self._num_syncs += 1
            # when all ranks have met, the file is complete, and no rank waits for completions
            self._run = engine.gather_objects(self._run)[0]
            self._version = f"{self._run}.{self._num_syncs}"
            with engine.waiting(self._timeout, "its vLLM servers load the weights"):
                loaded = self._load_own()
            loaded = {url for urls in engine.gather_objects(loaded) for url in urls}
            later = time.monotonic() + SECONDS_BETWEEN_PROBES
            self._next_probe = {worker: later for worker in self._workers if worker.url not in loaded}
            if not loaded and engine.rank == 0:
                self._ready_workers()
            engine.agree()

    def _gathered(self, model: Any) -> dict[str, Tensor]:
        """The weights that ranks divide, on the host of rank 0. All ranks gather one layer after another."""
        if self._engine.rank == 0:
            return _copies(model)
        deque(merged_weights(model), maxlen=0)
        return {}

    def _write(self, weights: dict[str, Tensor]) -> None:
        """Write the weights to the folder. The file changes only when it is complete."""
        if not self._folder.exists():  # the rights of a folder that is there are its owner's choice
            self._folder.mkdir(parents=True, mode=self._mode)
            self._folder.chmod(self._mode)  # whatever the umask is
        unfinished = self._folder / "unfinished"
        unfinished.unlink(missing_ok=True)
        unfinished.touch(mode=0o600, exist_ok=False)
        save_file(weights, unfinished)
        unfinished.chmod(self._mode & 0o640)
        unfinished.replace(self._folder / "model.safetensors")

    def _load_own(self) -> set[str]:
        """Let this rank's share of the servers load the weights of the last sync. Return the addresses of those that did."""
        own = [worker for worker in self._workers if self._sends_to(worker)]
        with ThreadPoolExecutor(max(len(own), 1)) as pool:
            failures = dict(zip(own, pool.map(self._load, own), strict=True))
        for worker, failure in failures.items():
            if failure is not None and worker not in self._next_probe:
                self._lose(worker, failure, "It is left out until it answers again.")
        return {worker.url for worker, failure in failures.items() if failure is None}

    def _load(self, worker: VLLMWorker) -> ServerLostError | None:
        """Let a server load the weights of the last sync. Return why that is not possible now."""
        assert self._version is not None
        try:
            if worker in self._next_probe:
                worker.version()  # a server that is still lost is not waited for
            worker.load(self._folder, self._version, self._label_while_loading(self._engine.rank))
        except ServerLostError as error:
            return error
        return None

    def _lost(
        self, shares: dict[VLLMWorker, list[int]], bodies: list[dict[str, Any]], take: Callable[[int, Answer], None]
    ) -> list[tuple[VLLMWorker, ServerLostError]]:
        """Let the servers answer, and `take` each answer as it comes. Return the servers that were lost meanwhile."""
        with ThreadPoolExecutor(len(shares)) as pool:
            futures = {
                worker: pool.submit(self._complete, worker, rows, bodies, take) for worker, rows in shares.items()
            }
        errors = ((worker, future.exception()) for worker, future in futures.items())
        lost = []
        for worker, error in errors:
            if isinstance(error, ServerLostError) and not isinstance(error, ServerTimeoutError):
                lost.append((worker, error))
            elif error is not None:  # among them a server that runs, and is too slow
                raise error
        return lost

    def _complete(
        self, worker: VLLMWorker, rows: list[int], bodies: list[dict[str, Any]], take: Callable[[int, Answer], None]
    ) -> None:
        """Take the answers of one server. If a request fails, none is sent any more, and its error raised."""
        failure: BaseException | None = None
        with ThreadPoolExecutor(min(self._max_concurrency, len(rows))) as pool:
            futures = {pool.submit(worker.complete, bodies[row], self._version): row for row in rows}
            for future in as_completed(futures):
                if future.cancelled():
                    continue
                if future.exception() is None:
                    take(futures[future], future.result())
                elif failure is None:
                    failure = future.exception()
                    for other in futures:
                        other.cancel()
        if failure is not None:
            raise failure

    def _lose(self, worker: VLLMWorker, error: ServerLostError, consequence: str) -> None:
        self._next_probe[worker] = time.monotonic() + SECONDS_BETWEEN_PROBES
        warn_user(f"{error} {consequence}")

    def _ready_workers(self) -> list[VLLMWorker]:
        """The servers that have the weights of the last sync. If there is none, wait until there is one.

        Raises:
            SamplerError: No server answered in time, or one has weights of another client.
        """
        ready = self._probe(only_due=True)
        if ready:
            return ready
        seconds = self._restart_timeout + self._timeout
        with self._engine.waiting(seconds, "no vLLM server answers it, and it waits for one to be started again"):
            start = time.monotonic()
            while not (ready := self._probe(only_due=False, is_late=time.monotonic() > start + SECONDS_FOR_ITS_RANK)):
                if time.monotonic() >= start + self._restart_timeout:
                    raise SamplerError(
                        f"VLLMServerSampler: none of the vLLM servers ({', '.join(w.url for w in self._workers)}) has answered "
                        f"for {self._restart_timeout:g} s. Start one, and resume from the last checkpoint, or raise "
                        "restart_timeout."
                    )
                time.sleep(SECONDS_BETWEEN_POLLS)
        return ready

    def _probe(self, *, only_due: bool, is_late: bool = False) -> list[VLLMWorker]:
        """The servers that answer and have the weights, in order. A restarted server gets them, from any rank if `is_late`."""
        ready = []
        for worker in self._workers:
            if only_due and time.monotonic() < self._next_probe.get(worker, 0.0):
                continue
            try:
                is_ready = self._has_weights(worker, is_late=is_late)
            except ServerLostError as error:
                if worker in self._next_probe:
                    self._next_probe[worker] = time.monotonic() + SECONDS_BETWEEN_PROBES
                else:
                    self._lose(worker, error, "It is left out until it answers again.")
                continue
            if is_ready:
                self._next_probe.pop(worker, None)
                ready.append(worker)
        return ready

    def _sends_to(self, worker: VLLMWorker) -> bool:
        """Whether this rank sends this server its weights."""
        return self._workers.index(worker) % self._engine.num_ranks == self._engine.rank

    def _has_weights(self, worker: VLLMWorker, *, is_late: bool) -> bool:
        """Whether a server has the weights of the last sync. If not, its rank sends them, so that no two ranks do at once."""
        found = worker.version()
        if self._version is None or found == self._version:
            if worker in self._next_probe:
                worker.resume()  # it may have been lost while it was paused
            return True
        if found in map(self._label_while_loading, range(self._engine.num_ranks)):
            if found != self._label_while_loading(self._engine.rank):
                return False
        elif found != FIRST_VERSION and not found.startswith(self._run):
            raise SamplerError(
                f"VLLMServerSampler: the vLLM server at {worker.url} no longer has the weights of the last sync: another "
                "client changed them. Use a server for one training run only, and resume from the last checkpoint, which sends "
                "the weights again."
            )
        if not self._sends_to(worker) and not is_late:  # its rank may have its rows already, and send nothing
            return False
        worker.load(self._folder, self._version, self._label_while_loading(self._engine.rank))
        return True

    def _label_while_loading(self, rank: int) -> str:
        return f"{self._version} is loaded by rank {rank}"


def _asked(prompt: Ids) -> dict[str, Any]:
    """The prompt of a request. The server replaces the mark of each picture by the picture's tokens, and reports them."""
    if not isinstance(prompt, PicturePrompt):
        return {"token_ids": list(prompt)}
    token_ids, pictures = prompt.marked
    parts = [{"type": "image_url", "url": Picture.of(picture).link} for picture in pictures]
    return {"token_ids": token_ids, "content_parts": parts, "return_token_ids": True}


def _copies(model: Any) -> dict[str, Tensor]:
    """Weights on the host. They are copies, because the file's format does not allow tensors that share memory."""
    return {name: weight.to("cpu", copy=True).contiguous() for name, weight in merged_weights(model)}
