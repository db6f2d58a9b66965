"""A whole training run up to a number of steps, with evaluations and checkpoints: `GRPOTrainer.train` with a budget."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from adapters.control.environments.episodes import EpisodeStart
from adapters.control.environments.pools import AsyncPool, SerialPool
from adapters.control.policy.policy_files import as_plain
from grpo import GRPOTrainer
from grpo.arguments import require_integers, with_checked_arguments
from grpo.callbacks import Decision, RunningTrainer
from grpo.errors import ConfigError
from grpo.sinks import MetricSink, replace_text

from .evaluation import EVALUATION_SEED, evaluate_policy

STEPS = "episodes/steps"
"""The metric that counts the steps of the environments."""

FEW_ITERATIONS = 20
"""A run with fewer iterations has hardly improved its policy, and is told so."""


@dataclass(slots=True)
class LearningCurve:
    """Evaluations of a run. All lists have the same length."""

    iterations: list[int] = field(default_factory=list)
    """Number of finished iterations at each evaluation."""
    steps: list[int] = field(default_factory=list)
    """Number of training steps at each evaluation."""
    returns: list[float] = field(default_factory=list)
    """Mean return of each evaluation."""
    seconds: list[float] = field(default_factory=list)
    """Training time in seconds at each evaluation, of all processes that made the run."""

    def steps_to(self, threshold: float) -> int | None:
        """Steps until the first evaluation at or above the threshold. None if no evaluation reaches it."""
        reached = (step for step, value in zip(self.steps, self.returns, strict=True) if value >= threshold)
        return next(reached, None)

    def ends_at(self, threshold: float | None) -> bool:
        """Whether the last evaluation is at or above the threshold. False without an evaluation or a threshold."""
        return threshold is not None and bool(self.returns) and self.returns[-1] >= threshold


@with_checked_arguments
def train_control(
    trainer: GRPOTrainer,
    starts: Callable[[int], Sequence[EpisodeStart]],
    *,
    total_steps: int,
    evaluate_every: int,
    num_eval_episodes: int = 20,
    eval_seed: int = EVALUATION_SEED,
    max_eval_steps: int | None = None,
    stop_at: float | None = None,
    sinks: Sequence[MetricSink] = (),
    callbacks: Sequence[Any] = (),
    folder: str | Path | None = None,
    progress: bool = True,
) -> LearningCurve:
    """Train an `EpisodePolicy` until its environments have taken `total_steps`: `trainer.train` with a budget of steps.

    All that `train` does is done: learning rate schedules cover the total, dynamic sampling draws further starts, whose steps
    count, signals leave a checkpoint, and callbacks go on where they were.

    Args:
        trainer: Trainer of the policy.
        starts: Maps the number of a draw (from 0) to states, as `episode_starts` does.
        total_steps: Number of training steps in total, those of earlier calls included. The last iteration is always finished.
        evaluate_every: Steps between evaluations. There is also an evaluation at the end.
        num_eval_episodes: Episodes per evaluation, without noise.
        eval_seed: Seed of the first evaluation reset.
        max_eval_steps: Maximum length of evaluation episodes, in addition to the environment's own limit.
        stop_at: Stop when an evaluation reaches this return. None never stops early.
        sinks: Receive the metrics of each iteration, with `eval/return` after evaluations, and samples of its episodes.
        callbacks: Called after each iteration, and may stop the run; see `grpo.callbacks`. `trainer.history` is this run's.
        folder: Folder for `curve.json` and for checkpoints, which are written after evaluations: the newest three, and the best
            by its return, which `best_checkpoint(folder)` finds. A run that is there is continued, if its environment, starts
            and policy are these. None writes nothing.
        progress: Whether to show a progress bar.

    Returns:
        The evaluations.

    Raises:
        ConfigError: `total_steps` or `evaluate_every` is below 1, the trainer has made `total_steps` steps already, or `folder`
            holds a run of another environment, with other starts or another policy. Of an environment without keywords, the
            attributes that are numbers are compared.
        TrainingInterrupted: As in `GRPOTrainer.train`.
    """
    require_integers("train_control", 1, total_steps=total_steps, evaluate_every=evaluate_every)
    if folder is not None:
        _require_same_run(Path(folder), trainer, starts)
    recorder = CurveRecorder(None if folder is None or trainer.engine.rank > 0 else Path(folder))
    own = [recorder] if stop_at is None else [recorder, StopAt(stop_at, recorder)]

    def evaluation() -> dict[str, float]:
        result = evaluate_policy(
            trainer.policy, num_episodes=num_eval_episodes, seed=eval_seed, max_steps=max_eval_steps
        )
        return {"eval/return": result.mean_return}

    history = trainer.train(
        starts,
        budget=(STEPS, total_steps),
        evaluation=evaluation,
        eval_every=evaluate_every,
        sinks=sinks,
        callbacks=[*own, *callbacks],
        checkpoint_dir=folder,
        checkpoint_every=evaluate_every,
        resume=None if folder is None else "auto",
        progress=progress,
    )
    if history and trainer.iteration < FEW_ITERATIONS and not recorder.curve.ends_at(stop_at):
        logging.getLogger("grpo").warning(
            "train_control: %s steps were only %d iterations, and a policy improves once in an iteration. Use fewer or shorter "
            "episodes per iteration (a smaller group_size, num_groups or max_episode_steps), or raise total_steps.",
            f"{total_steps:,}",
            trainer.iteration,
        )
    return recorder.curve


def _require_same_run(folder: Path, trainer: GRPOTrainer, starts: Any) -> None:
    """Check that a folder holds no run of another environment, with other starts or another policy, and note this run there.

    Raises:
        ConfigError: Names what differs.
    """
    path = folder / "run.json"
    settings, pool = dict(trainer.policy.settings()), trainer.policy.pool
    settings |= {
        "make": {name: value for name, value in settings["make"].items() if name != "vectorization"},
        "environment and wrappers": pool.layers if isinstance(pool, SerialPool | AsyncPool) else None,
        "first starts": [str(start) for start in starts(0)] if callable(starts) else None,
    }
    now = json.loads(json.dumps(settings, default=as_plain))
    del now["num_members"]  # like vectorization, it changes no episode
    numbers = pool.numbers if isinstance(pool, SerialPool) else {}  # of an environment without keywords
    if path.is_file() and any(folder.glob("iteration-*")):
        before = json.loads(path.read_text(encoding="utf-8"))
        names = [
            name for name in now if None not in (before.get(name), now[name]) or name != "environment and wrappers"
        ]
        changed = [
            f"{name} was {before.get(name)} and is {now[name]}" for name in names if before.get(name) != now[name]
        ]
        were = before.get("numbers", {})
        changed += [
            f"{name} was {were[name]:g} and is {numbers[name]:g}"
            for name in numbers.keys() & were.keys()
            if numbers[name] != were[name]
        ]
        if changed:
            raise ConfigError(
                f"train_control: {folder} holds another run: {'; '.join(changed)}. Use another folder, or delete this one. To "
                "go on from its weights, use load_weights(folder, policy)."
            )
    elif trainer.engine.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(path, json.dumps(now | {"numbers": numbers}))


class CurveRecorder:
    """A callback that keeps the learning curve. Checkpoints hold it.

    Args:
        folder: Folder for `curve.json`. None: none is written.
    """

    def __init__(self, folder: Path | None) -> None:
        self.curve = LearningCurve()
        self._seconds = 0.0
        self._folder = folder

    def on_iteration(self, trainer: RunningTrainer, metrics: Mapping[str, float]) -> None:
        """Note the evaluation, if there was one."""
        self._seconds += metrics["time/iteration"]
        if "eval/return" not in metrics:
            return
        self.curve.iterations.append(trainer.iteration)
        self.curve.steps.append(round(metrics["episodes/total_steps"]))
        self.curve.returns.append(metrics["eval/return"])
        self.curve.seconds.append(self._seconds)
        if self._folder is not None:
            replace_text(self._folder / "curve.json", json.dumps(asdict(self.curve)))

    def state_dict(self) -> dict[str, Any]:
        """The curve, and the training time so far."""
        return {"curve": asdict(self.curve), "seconds": self._seconds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.curve, self._seconds = LearningCurve(**state["curve"]), state["seconds"]


class StopAt:
    """A callback that stops the run when an evaluation reaches a return.

    Args:
        value: The return.
        recorder: Keeps the evaluations. It is called before this callback.
    """

    def __init__(self, value: float, recorder: CurveRecorder) -> None:
        self._value, self._recorder = value, recorder

    def on_start(self, trainer: RunningTrainer) -> Decision:
        """Stop if the last evaluation has reached the return already."""
        return "stop" if self._recorder.curve.ends_at(self._value) else None

    def on_evaluation(self, trainer: RunningTrainer, metrics: Mapping[str, float]) -> Decision:
        """Stop after an evaluation that has reached the return."""
        return "stop" if metrics["eval/return"] >= self._value else None
