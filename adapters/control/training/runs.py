"""A whole training run up to a number of steps, with evaluations and a checkpoint of the best policy."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from adapters.control.environments.episodes import EpisodeStart
from adapters.control.policy.episode_policy import EpisodePolicy
from grpo import GRPOTrainer
from grpo.arguments import require_integers, with_checked_arguments
from grpo.callbacks import Callbacks
from grpo.errors import ConfigError
from grpo.sinks import GuardedSinks, MetricSink, Samples, replace_text, run_settings

from .evaluation import EVALUATION_SEED, Evaluation, evaluate_policy


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
    """Training time in seconds at each evaluation."""

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
    """Train an `EpisodePolicy` until its environments have taken `total_steps`.

    Args:
        trainer: Trainer of the policy.
        starts: Maps an iteration (from 0) to states, as `episode_starts` does.
        total_steps: Number of training steps. The last iteration is always finished.
        evaluate_every: Steps between evaluations. There is also an evaluation at the end.
        num_eval_episodes: Episodes per evaluation, without noise.
        eval_seed: Seed of the first evaluation reset.
        max_eval_steps: Maximum length of evaluation episodes, in addition to the environment's own limit.
        stop_at: Stop when an evaluation reaches this return. None never stops early.
        sinks: Receive the metrics of each iteration, with `eval/return` after evaluations, and samples of its episodes.
        callbacks: Called after each iteration, and may stop the run; see `grpo.callbacks`. `trainer.history` is this run's.
        folder: Folder for the `best` and `last` checkpoints and `curve.json`, written after evaluations. None writes nothing.
            If the folder has a `last` checkpoint of the same settings, the run resumes from it.
        progress: Whether to show a progress bar.

    Returns:
        The evaluations.

    Raises:
        ConfigError: `folder` contains a run with other settings, or `total_steps` or `evaluate_every` is below 1.
    """
    require_integers("train_control", 1, total_steps=total_steps, evaluate_every=evaluate_every)
    policy: EpisodePolicy = trainer.policy
    guarded, asked = GuardedSinks(sinks), Callbacks(callbacks)
    trainer.history = []
    run = _Run(trainer, None if folder is None else Path(folder))
    settings = run_settings(trainer.config, policy, trainer.reward_model) | {"total_steps": total_steps}
    guarded.start(settings, trainer.iteration + 1)
    bar = tqdm(total=total_steps, initial=run.steps, desc="control", unit="step", disable=not progress)
    with bar, _recorded(trainer, guarded) as samples:
        due = (run.steps // evaluate_every + 1) * evaluate_every
        is_over = run.steps >= total_steps or run.curve.ends_at(stop_at)
        while not is_over:
            began = time.perf_counter()
            metrics = trainer.step(starts(trainer.iteration))
            run.seconds += time.perf_counter() - began
            run.steps += round(metrics["episodes/steps"])
            bar.update(round(metrics["episodes/steps"]))
            is_over = run.steps >= total_steps
            if run.steps >= due or is_over:
                due = (run.steps // evaluate_every + 1) * evaluate_every
                result = evaluate_policy(
                    policy, num_episodes=num_eval_episodes, seed=eval_seed, max_steps=max_eval_steps
                )
                metrics = {**metrics, "eval/return": result.mean_return}
                run.note(result)
                bar.set_postfix(eval_return=f"{result.mean_return:.1f}", refresh=False)
                is_over = is_over or run.curve.ends_at(stop_at)
            metrics["episodes/total_steps"] = float(run.steps)
            guarded.log(metrics, trainer.iteration, samples, always=is_over or "eval/return" in metrics)
            samples.clear()
            trainer.history.append(metrics)
            is_over = bool(asked.on_iteration(trainer, metrics)) or is_over
    return run.curve


@contextmanager
def _recorded(trainer: GRPOTrainer, sinks: GuardedSinks) -> Iterator[list[Samples]]:
    """The samples of the current iteration. The list stays empty if no sink records samples."""
    samples: list[Samples] = []
    trainer.samples = samples if sinks.take_samples else None
    try:
        yield samples
    finally:
        trainer.samples = None


class _Run:
    """The state of a run that the trainer does not keep: steps, seconds, evaluations, and the folder."""

    def __init__(self, trainer: GRPOTrainer, folder: Path | None) -> None:
        self.trainer = trainer
        self.folder = folder
        self.steps = 0
        self.seconds = 0.0
        self.curve = LearningCurve()
        self.settings = json.loads(json.dumps(trainer.config.to_dict()))
        if folder is not None and (folder / "last").exists():
            written = json.loads((folder / "curve.json").read_text())
            if written.pop("settings") != self.settings:
                raise ConfigError(
                    f"train_control: the settings must equal those of the run in {folder}; they differ. Use another folder, "
                    "or delete this one."
                )
            trainer.load_checkpoint(folder / "last")
            # The curve is written before the checkpoint, so it may contain one evaluation more.
            known = written["iterations"].index(trainer.iteration) + 1
            self.curve = LearningCurve(**{name: values[:known] for name, values in written.items()})
            self.steps, self.seconds = self.curve.steps[-1], self.curve.seconds[-1]

    def note(self, result: Evaluation) -> None:
        is_best = not self.curve.returns or result.mean_return > max(self.curve.returns)
        self.curve.iterations.append(self.trainer.iteration)
        self.curve.steps.append(self.steps)
        self.curve.returns.append(result.mean_return)
        self.curve.seconds.append(self.seconds)
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_text(self.folder / "curve.json", json.dumps({**asdict(self.curve), "settings": self.settings}))
            for name in ("best", "last") if is_best else ("last",):
                self.trainer.save_checkpoint(self.folder / name)
