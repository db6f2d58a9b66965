"""A callback that prunes the trials of an Optuna study."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from .tracker_sink import require_installed


class OptunaPruning:
    """Reports a metric to an Optuna trial, and raises `optuna.TrialPruned` if the study's pruner gives the trial up.

    Pass it to `train(callbacks=[...])`. `train` does not catch the error, and the study records a pruned trial.

    Args:
        trial: The `optuna.Trial` that the study passes to the objective.
        metric: The metric that the pruner compares between trials. It is reported in every iteration that has it.

    Raises:
        ConfigError: `optuna` is not installed.

    Example:
        Search for a learning rate::

            def objective(trial):
                rate = trial.suggest_float("learning_rate", 1e-4, 1.0, log=True)
                rated = with_settings(config, {"learning_rate": rate})
                trainer = GRPOTrainer(config=rated, policy=new_policy(), reward_model=reward)
                trainer.train(states, num_iterations=100, eval_states=states, callbacks=[OptunaPruning(trial)])
                return trainer.evaluate(states)["eval/avg_reward"]

            study = optuna.create_study(direction="maximize", pruner=optuna.pruners.MedianPruner())
            study.optimize(objective, n_trials=20)
    """

    def __init__(self, trial: Any, metric: str = "eval/avg_reward") -> None:
        require_installed("optuna", by="OptunaPruning", install="optuna")
        self.trial, self.metric = trial, metric

    def on_iteration(self, trainer: Any, metrics: Mapping[str, float]) -> None:
        """Report the metric of an iteration.

        Raises:
            optuna.TrialPruned: the pruner gives the trial up.
        """
        if self.metric not in metrics:
            return
        self.trial.report(metrics[self.metric], trainer.iteration)
        if self.trial.should_prune():
            found = f"{self.metric} = {metrics[self.metric]:.6g} at iteration {trainer.iteration}"
            raise import_module("optuna").TrialPruned(found)
