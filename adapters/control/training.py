"""A whole run: iterations until so many steps are taken, with evaluations on the way and the best policy kept."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tqdm import tqdm

from grpo import GRPOTrainer
from grpo.errors import ConfigError
from grpo.metrics import MetricSink

from .episodes import EpisodeStart
from .evaluation import EVALUATION_SEED, Evaluation, evaluate_policy
from .policies import EpisodePolicy


@dataclass(slots=True)
class LearningCurve:
    """Evaluations of a run: the same number of entries in each list."""

    iterations: list[int] = field(default_factory=list)
    """Of the trainer, done until then."""
    steps: list[int] = field(default_factory=list)
    """Steps of the environments that were trained on until then."""
    returns: list[float] = field(default_factory=list)
    """Mean return of an evaluation's episodes."""
    seconds: list[float] = field(default_factory=list)
    """Spent on training until then."""

    def steps_to(self, threshold: float) -> int | None:
        """Steps until the first evaluation at or above the threshold; None: there is none."""
        reached = (step for step, value in zip(self.steps, self.returns, strict=True) if value >= threshold)
        return next(reached, None)

    def ends_at(self, threshold: float | None) -> bool:
        """Whether the last evaluation is at or above the threshold; False where there is none of either."""
        return threshold is not None and bool(self.returns) and self.returns[-1] >= threshold


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
    folder: str | Path | None = None,
    progress: bool = True,
) -> LearningCurve:
    """Train an `EpisodePolicy` until its environments have taken `total_steps`.

    Args:
        trainer: of the policy.
        starts: iteration (from 0) -> states, as `episode_starts` makes them.
        total_steps: of training; the iteration in which they are reached is finished.
        evaluate_every: steps between evaluations, of which there is one at the end, too.
        num_eval_episodes: of each; they act without noise.
        eval_seed: of their first reset.
        max_eval_steps: of each episode, beside the environment's own limit.
        stop_at: end as soon as an evaluation reaches it; None: never early.
        sinks: given every iteration's metrics, and `eval/return` where there was an evaluation.
        folder: where `best` and `last` checkpoints and `curve.json` are written after evaluations; None: nowhere. A run
            whose `last` is there goes on from it, with the settings it had.
        progress: show a progress bar.

    Returns:
        The evaluations.

    Raises:
        ConfigError: `folder` has a run with other settings.
    """
    if evaluate_every < 1 or total_steps < 1:
        raise ConfigError(
            f"train_control: total_steps, evaluate_every must be >= 1; got {total_steps}, {evaluate_every}."
        )
    policy: EpisodePolicy = trainer.policy
    run = _Run(trainer, None if folder is None else Path(folder))
    with tqdm(total=total_steps, initial=run.steps, desc="control", unit="step", disable=not progress) as bar:
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
            for sink in sinks:
                sink.log({**metrics, "episodes/total_steps": float(run.steps)}, trainer.iteration)
    return run.curve


class _Run:
    """What is known of a run beside the trainer's state."""

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
                raise ConfigError(f"{folder} holds a run with other settings. Name another folder, or delete that one.")
            trainer.load_checkpoint(folder / "last")
            known = written["iterations"].index(trainer.iteration) + 1  # the curve is written first, and may be ahead
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
            unfinished = self.folder / "curve.json.new"
            unfinished.write_text(json.dumps({**asdict(self.curve), "settings": self.settings}))
            unfinished.replace(self.folder / "curve.json")
            for name in ("best", "last") if is_best else ("last",):
                self.trainer.save_checkpoint(self.folder / name)
