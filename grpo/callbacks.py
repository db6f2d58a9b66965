"""Callbacks: code that looks at a run after each iteration, and may stop it."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from ._common.checks import require_count
from ._common.conversion import describe
from ._common.names import nearest_name
from ._common.protocols import has_method
from ._sharding.tensors import copy_into, is_sharded
from .errors import CheckpointError, ConfigError, warn_user
from .policy_base import HasState, SyncsSampler

Decision: TypeAlias = Literal["stop"] | None
"""What a callback returns: "stop" ends the run after this iteration."""


@runtime_checkable
class RunningTrainer(Protocol):
    """What a callback may use of a `GRPOTrainer`."""

    config: Any
    """The settings."""
    policy: Any
    """The policy that is trained."""
    history: list[dict[str, float]]
    """The metrics of each iteration of this call of `train`."""

    @property
    def iteration(self) -> int:
        """Number of finished iterations."""
        ...

    def save_checkpoint(self, path: str | Path) -> Path:
        """Write a checkpoint."""
        ...


class Callback(Protocol):
    """An object that `train` calls. It has at least one of these methods; the others may be missing.

    An error in a callback ends the run. On several ranks, each rank calls its own callbacks, and "stop" on one rank stops all
    ranks. If a callback has `state_dict` and `load_state_dict`, checkpoints contain its state, and a resumed run restores it.
    """

    def on_start(self, trainer: RunningTrainer) -> Decision:
        """Called before the first iteration, when the state of a resumed run is restored. "stop": the run has ended already."""
        ...

    def on_iteration(self, trainer: RunningTrainer, metrics: Mapping[str, float]) -> Decision:
        """Called after each iteration and its evaluation. The sinks have received `metrics` already."""
        ...

    def on_evaluation(self, trainer: RunningTrainer, metrics: Mapping[str, float]) -> Decision:
        """Called after an evaluation, before `on_iteration`. `metrics` are those of the iteration and of the evaluation."""
        ...

    def on_checkpoint(self, trainer: RunningTrainer, path: Path) -> None:
        """Called after a checkpoint was written. With `checkpoint_async=True`, writing has begun, and may not have ended."""
        ...

    def on_interrupt(self, trainer: RunningTrainer, error: BaseException) -> None:
        """Called after SIGTERM, SIGINT or KeyboardInterrupt has stopped the run, and after its last checkpoint was written."""
        ...


METHODS = ("on_start", "on_iteration", "on_evaluation", "on_checkpoint", "on_interrupt")
"""The methods of a callback."""


class Callbacks:
    """Calls several callbacks, in order.

    Raises:
        ConfigError: An object has none of the methods, or a method whose name is nearly one of them.
    """

    def __init__(self, callbacks: Sequence[Any]) -> None:
        given: Any = callbacks
        if not isinstance(given, list | tuple):
            raise ConfigError(f"callbacks must be a list; got {describe(given)}. Pass [callback].")
        for callback in callbacks:
            _require_methods(callback)
        self._callbacks = list(callbacks)

    def on_start(self, trainer: RunningTrainer) -> list[str]:
        """Tell the callbacks that a run begins, or goes on.

        Returns:
            The names of the callbacks that say that it has ended already.
        """
        return [
            type(callback).__name__ for callback in self._callbacks if _decides_to_stop(callback, "on_start", trainer)
        ]

    def on_iteration(self, trainer: RunningTrainer, metrics: Mapping[str, float]) -> list[str]:
        """Call `on_evaluation`, if the iteration had an evaluation, and `on_iteration`.

        Returns:
            The names of the callbacks that stop the run.
        """
        has_evaluation = any(name.startswith("eval/") for name in metrics)
        names = ("on_evaluation", "on_iteration") if has_evaluation else ("on_iteration",)
        return [
            type(callback).__name__
            for name in names
            for callback in self._callbacks
            if _decides_to_stop(callback, name, trainer, metrics)
        ]

    def on_checkpoint(self, trainer: RunningTrainer, path: Path) -> None:
        """Tell the callbacks that a checkpoint was written."""
        for callback in self._callbacks:
            if has_method(callback, "on_checkpoint"):
                callback.on_checkpoint(trainer, path)

    def on_interrupt(self, trainer: RunningTrainer, error: BaseException) -> None:
        """Tell the callbacks that the run was stopped."""
        for callback in self._callbacks:
            if has_method(callback, "on_interrupt"):
                callback.on_interrupt(trainer, error)

    def require_evaluations(self) -> None:
        """Refuse callbacks that wait for an evaluation, because the run has none."""
        for callback in self._callbacks:
            if isinstance(callback, _Best) and callback.metric.startswith("eval/"):
                name = type(callback).__name__
                raise ConfigError(
                    f"{name} waits for {callback.metric}, and this run has no evaluations. Pass eval_states, or "
                    f'{name}("rewards/mean").'
                )

    def state_dict(self) -> dict[str, Any]:
        """The states of the callbacks that have one, by class. Several of one class are numbered in their order."""
        return {name: callback.state_dict() for name, callback in self._with_state().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the states.

        A callback without a saved state starts anew. A saved state without a callback is lost. A `GRPOWarning` names both.

        Raises:
            CheckpointError: A callback does not accept its state.
        """
        present = self._with_state()
        for name in present.keys() & state.keys():
            try:
                present[name].load_state_dict(state[name])
            except Exception as error:
                raise CheckpointError(
                    f"The callback {name} must accept its saved state, {describe(state[name])}; it raised {error!r}. Leave "
                    "the callback out, or use another checkpoint."
                ) from error
        new, lost = sorted(present.keys() - state.keys()), sorted(state.keys() - present.keys())
        if state and (new or lost):
            warn_user(
                f"The run is resumed with other callbacks. New: {', '.join(new) or 'none'}. Missing, so that their state is "
                f"lost: {', '.join(lost) or 'none'}."
            )

    def _with_state(self) -> dict[str, Any]:
        named: dict[str, Any] = {}
        for callback in self._callbacks:
            if isinstance(callback, HasState):
                kind = type(callback).__name__
                count = sum(name.partition(" ")[0] == kind for name in named)
                named[kind if not count else f"{kind} {count + 1}"] = callback
        return named


def _require_methods(callback: Any) -> None:
    name = type(callback).__name__
    if isinstance(callback, type):
        raise ConfigError(f"callbacks: {callback.__name__} is a class. Pass an object: {callback.__name__}(...).")
    own = [attribute for attribute in dir(callback) if attribute.startswith("on_") and has_method(callback, attribute)]
    unknown = [attribute for attribute in own if attribute not in METHODS]
    if unknown:
        near = get_close_matches(unknown[0], METHODS, n=1, cutoff=0.0)[0]
        raise ConfigError(f"callbacks: {name}.{unknown[0]} is never called. Did you mean {near}?")
    if not any(has_method(callback, method) for method in METHODS):
        raise ConfigError(f"callbacks: {name} must have at least one of the methods {', '.join(METHODS)}.")


def _decides_to_stop(callback: Any, name: str, *arguments: Any) -> bool:
    """Call a method of a callback, if the callback has it."""
    decision = getattr(callback, name)(*arguments) if has_method(callback, name) else None
    if decision is not None and decision != "stop":
        raise ConfigError(f'{type(callback).__name__}.{name} must return "stop" or None; got {describe(decision)}.')
    return decision is not None


class _Best:
    """The best value of a metric so far, and how many measurements ago it was.

    Args:
        metric: The metric's name. Iterations without the metric do not count.
        mode: "max" if larger is better.
        min_delta: The smallest change that counts as better.
    """

    def __init__(self, metric: str, mode: Literal["max", "min"], min_delta: float) -> None:
        if mode not in ("max", "min"):
            raise ConfigError(f'{type(self).__name__}.mode must be "max" or "min"; got {mode!r}.')
        if not 0 <= min_delta < math.inf:
            raise ConfigError(f"{type(self).__name__}.min_delta must be >= 0; got {min_delta!r}.")
        self.metric, self.mode, self.min_delta = metric, mode, min_delta
        self.best: float | None = None
        """The best value. None: nothing was measured."""
        self.best_iteration = 0
        """The iteration of the best value."""
        self.num_since_best = 0
        """Number of measurements since the best value."""

    def improves(self, iteration: int, metrics: Mapping[str, float]) -> bool:
        """Note one measurement, and return whether it is the best so far.

        Raises:
            ConfigError: The metric begins with `eval/`, and evaluations do not have it.
        """
        value = metrics.get(self.metric, math.nan)
        measured = [name for name in metrics if name.startswith("eval/")]
        if self.metric.startswith("eval/") and measured and self.metric not in measured:
            raise ConfigError(
                f"{type(self).__name__}: evaluations have no {self.metric!r}. {nearest_name(self.metric, measured)}"
            )
        if math.isnan(value):
            return False
        gain = math.inf if self.best is None else value - self.best if self.mode == "max" else self.best - value
        # a change of exactly min_delta counts, and an equal value does not
        if gain > self.min_delta or (gain == self.min_delta and self.min_delta > 0):
            self.best, self.best_iteration, self.num_since_best = value, iteration, 0
            return True
        self.num_since_best += 1
        return False

    def state_dict(self) -> dict[str, Any]:
        """The best value, its iteration, and the number of measurements since then."""
        return {"best": self.best, "best_iteration": self.best_iteration, "num_since_best": self.num_since_best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        values = [state[name] for name in ("best", "best_iteration", "num_since_best")]
        if not (values[0] is None or type(values[0]) in (int, float)) or not all(
            type(value) is int for value in values[1:]
        ):
            raise CheckpointError(f"best, best_iteration and num_since_best must be numbers; got {values!r}")
        self.best, self.best_iteration, self.num_since_best = values


class EarlyStopping(_Best):
    """Stops the run when a metric has not become better for some time.

    Args:
        metric: The metric's name. Iterations without the metric do not count, so that `eval/...` counts evaluations.
        patience: The run stops after this number of measurements in a row that are not better than the best. Larger: later.
        mode: "max" if larger is better.
        min_delta: The smallest change that counts as better.

    Example:
        >>> trainer.train(states, num_iterations=1000, eval_states=held_out,
        ...               callbacks=[EarlyStopping(patience=3)])  # doctest: +SKIP
    """

    def __init__(
        self,
        metric: str = "eval/avg_reward",
        *,
        patience: int = 5,
        mode: Literal["max", "min"] = "max",
        min_delta: float = 0.0,
    ) -> None:
        super().__init__(metric, mode, min_delta)
        self.patience = require_count("EarlyStopping.patience", patience)

    def on_start(self, trainer: RunningTrainer) -> Decision:
        """Stop if the patience is used up already."""
        return "stop" if self.num_since_best >= self.patience else None

    def on_iteration(self, trainer: RunningTrainer, metrics: Mapping[str, float]) -> Decision:
        """Note the metric. Stop after `patience` measurements without a better one."""
        self.improves(trainer.iteration, metrics)
        return "stop" if self.num_since_best >= self.patience else None


class KeepBestPolicy(_Best):
    """Keeps a copy of the weights with the best value of a metric, in memory. `restore` puts them into the policy.

    Args:
        metric: The metric's name. `eval/...` was measured with the weights that are kept. `rewards/mean` was measured before
            the iteration's updates, with the weights of one iteration earlier.
        mode: "max" if larger is better.
        min_delta: The smallest change that counts as better.

    Example:
        >>> best = KeepBestPolicy()
        >>> trainer.train(states, num_iterations=100, eval_states=held_out, callbacks=[best])  # doctest: +SKIP
        >>> best.restore(trainer.policy)  # doctest: +SKIP
    """

    def __init__(
        self, metric: str = "eval/avg_reward", *, mode: Literal["max", "min"] = "max", min_delta: float = 0.0
    ) -> None:
        super().__init__(metric, mode, min_delta)
        self.weights: dict[str, Tensor] = {}
        """The best weights by name, on the CPU, or divided among the ranks. Empty: nothing was measured."""

    def on_iteration(self, trainer: RunningTrainer, metrics: Mapping[str, float]) -> Decision:
        """Copy the weights if the metric is the best so far."""
        if self.improves(trainer.iteration, metrics):
            self.weights = {name: _copy(value) for name, value in trainer.policy.get_parameters().items()}
        return None

    def restore(self, policy: Any) -> None:
        """Copy the best weights into a policy, and into its separate sampler if there is one.

        Raises:
            ConfigError: Nothing was measured, or the policy has other parameters.
        """
        parameters: dict[str, Tensor] = policy.get_parameters()
        if not self.weights:
            raise ConfigError(
                f"KeepBestPolicy has no weights, because {self.metric} was never measured. Pass eval_states to train(), or "
                'KeepBestPolicy("rewards/mean").'
            )
        if {name: value.shape for name, value in parameters.items()} != {
            name: value.shape for name, value in self.weights.items()
        }:
            raise ConfigError(
                "KeepBestPolicy.restore: the policy must have the parameters of the one that was trained."
            )
        with torch.no_grad():
            for name, value in parameters.items():
                copy_into(value, self.weights[name])
        if isinstance(policy, SyncsSampler):
            policy.sync_sampler()

    def state_dict(self) -> dict[str, Any]:
        """The best value and its weights."""
        return {**super().state_dict(), "weights": dict(self.weights)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        super().load_state_dict(state)
        self.weights = dict(state["weights"])


def _copy(value: Tensor) -> Tensor:
    """A copy on the CPU, where a second copy of the weights fits, or of this rank's rows where they are."""
    return value.detach().clone() if is_sharded(value) else value.detach().to("cpu", copy=True)


class TimeBudget:
    """Stops the run before it exceeds a time. It ends after the last iteration that is expected to fit.

    The time begins with the first iteration. The next iteration is expected to take as long as the longest one so far, with
    its evaluation and checkpoint.

    Args:
        limit: The time. A resumed run has the whole time again.
        clock: Returns seconds.

    Example:
        >>> callbacks = [TimeBudget(timedelta(hours=8))]
    """

    def __init__(self, limit: timedelta, *, clock: Callable[[], float] = time.monotonic) -> None:
        given: Any = limit
        if not isinstance(given, timedelta) or given <= timedelta(0):
            raise ConfigError(f"TimeBudget.limit must be a timedelta longer than 0; got {describe(limit)}.")
        self.limit = limit
        self._clock = clock
        self._began: float | None = None
        self._last = self._longest = 0.0

    def on_iteration(self, trainer: RunningTrainer, metrics: Mapping[str, float]) -> Decision:
        """Stop if another iteration would take too long."""
        now = self._clock()
        if self._began is None:
            self._began = self._last = now - metrics.get("time/iteration", 0.0)
        self._longest = max(self._longest, now - self._last)
        self._last = now
        return "stop" if now - self._began + self._longest > self.limit.total_seconds() else None
