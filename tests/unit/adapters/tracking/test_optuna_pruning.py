"""Optuna's own study records pruned trials, and a pruned run leaves the trainer as it was."""

from typing import Any

import numpy as np
import optuna
import pytest
import torch

from adapters.bandits import SoftmaxPolicy
from adapters.tracking import OptunaPruning
from grpo import GRPOConfig, GRPOTrainer, with_settings
from tests.support.tracked_runs import STATES, rewards, train, trainer

CONFIG = GRPOConfig(group_size=8, seed=0)


class Threshold(optuna.pruners.BasePruner):
    """Prunes a trial whose latest value is below a bound."""

    def prune(self, study: Any, trial: Any) -> bool:
        return bool(trial.intermediate_values[trial.last_step] < 0.6)


def test_a_study_over_the_learning_rate_prunes_the_trials_that_do_not_learn() -> None:
    def objective(trial: Any) -> float:
        rate = trial.suggest_categorical("learning_rate", [1e-6, 0.3])
        torch.manual_seed(0)
        config = with_settings(CONFIG, {"learning_rate": rate})
        trained = GRPOTrainer(config=config, policy=SoftmaxPolicy(3, num_states=2), reward_model=rewards)
        trained.train(
            STATES, num_iterations=20, eval_states=np.tile(STATES, 20), eval_every=10, callbacks=[OptunaPruning(trial)]
        )
        return trained.evaluate(STATES)["eval/avg_reward"]

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = optuna.samplers.GridSampler({"learning_rate": [1e-6, 0.3]}, seed=0)
    study = optuna.create_study(direction="maximize", pruner=Threshold(), sampler=sampler)
    study.optimize(objective, n_trials=2)
    by_rate = {trial.params["learning_rate"]: trial for trial in study.trials}
    assert by_rate[1e-6].state.name == "PRUNED"
    assert list(by_rate[1e-6].intermediate_values) == [10]
    assert by_rate[0.3].state.name == "COMPLETE"
    assert list(by_rate[0.3].intermediate_values) == [10, 20]


def trial_that_prunes() -> Any:
    return optuna.create_study(direction="maximize", pruner=Threshold()).ask()


def test_the_error_leaves_train_as_it_is_and_the_trainer_unharmed() -> None:
    pruned = trainer()
    with pytest.raises(optuna.TrialPruned, match=r"rewards/mean = 0\.\d+ at iteration 1"):
        pruned.train(STATES, num_iterations=5, callbacks=[OptunaPruning(trial_that_prunes(), "rewards/mean")])
    whole = trainer()
    whole.train(STATES, num_iterations=1)
    assert pruned.iteration == 1
    for name, weights in whole.policy.get_parameters().items():
        assert torch.equal(pruned.policy.get_parameters()[name], weights)
    pruned.train(STATES, num_iterations=4)
    assert pruned.iteration == 4


def test_iterations_without_the_metric_are_not_reported() -> None:
    trial = trial_that_prunes()
    train([], 3, callbacks=[OptunaPruning(trial, "eval/avg_reward")])
    assert trial.study.trials[0].intermediate_values == {}
