"""Evaluations, and whole runs: when they evaluate, when they stop, and how an interrupted run resumes."""

import itertools
import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.envs.registration import EnvSpec

from adapters.control import (
    EnvironmentReward,
    EpisodeOptions,
    EpisodePolicy,
    Evaluation,
    FittedAdvantages,
    FromTorch,
    LearningCurve,
    evaluate_policy,
    train_control,
)
from adapters.control.environments.episodes import episode_starts
from adapters.control.environments.pools import SerialPool
from adapters.control.training.evaluation import EVALUATION_SEED
from grpo import AdvantageConfig, GRPOConfig, GRPOTrainer
from grpo.callbacks import EarlyStopping
from grpo.checkpoint import best_checkpoint
from grpo.errors import ConfigError, ContractError, GRPOWarning
from tests.support.control_environments import UNIT, Chance, Crossing, Spaces, Watched
from tests.support.control_policies import policy_of
from tests.support.stopped_runs import Calls, by_exception, by_signal, stopped

pytestmark = pytest.mark.usefixtures("without_type_checks")


OF_POLICY = ("distribution", "max_episode_steps", "normalize_observations", "num_steps", "repeat")


def trainer_of(environment: Any, *, is_fitted: bool = False, **settings: Any) -> GRPOTrainer:
    """Settings are those of the configuration and of the policy."""
    torch.manual_seed(2)
    options = {name: settings.pop(name) for name in OF_POLICY if name in settings}
    policy = policy_of(environment, hidden=(8,), num_members=4, **options)
    settings = {"group_size": 2, "batch_size": 16, "num_epochs_per_update": 2, "seed": 0} | settings
    return GRPOTrainer(
        config=GRPOConfig(**settings, advantage=AdvantageConfig(scale="batch")),
        policy=policy,
        reward_model=EnvironmentReward(),
        advantages=FittedAdvantages(policy, gamma=0.9, num_features=10, num_kept=100) if is_fitted else None,
    )


def of_five_steps(**config: Any) -> GRPOTrainer:
    """20 steps per iteration: two groups of two episodes of five."""
    return trainer_of(lambda: Chance(5), **config)


QUIET: dict[str, Any] = {"progress": False, "num_eval_episodes": 3}


def trained(environment: Any = "Pendulum-v1", **options: Any) -> EpisodePolicy:
    trainer = trainer_of(environment, max_episode_steps=9, **options)
    trainer.step(episode_starts(2)(0))
    return trainer.policy


def everything_random() -> list[Any]:
    return [torch.get_rng_state().tolist(), repr(np.random.get_state()), random.getstate()]  # noqa: NPY002


def test_an_evaluation_is_repeatable_and_changes_no_policy_state_mode_or_generator(subtests: pytest.Subtests) -> None:
    laplace = FromTorch(UNIT, 2, lambda mean: torch.distributions.Laplace(mean, 0.5))  # draws from a global generator
    policies = trained(normalize_observations=True), trained(lambda: Spaces(UNIT, UNIT), distribution=laplace)
    for policy, deterministic, is_training in (
        (policies[0], True, True),
        (policies[0], False, False),
        (policies[1], False, True),
    ):
        with subtests.test(policy=policies.index(policy), deterministic=deterministic, is_training=is_training):
            policy.train(is_training)
            policy.actor[0].eval()  # a part that the user keeps in evaluation mode
            before = {name: value.clone() for name, value in policy.state_dict().items()}
            drawn = everything_random()
            first, again, other = (
                evaluate_policy(policy, num_episodes=4, deterministic=deterministic, seed=seed) for seed in (3, 3, 1)
            )
            assert everything_random() == drawn
            assert first.returns.tolist() == again.returns.tolist() != other.returns.tolist()
            for name, value in policy.state_dict().items():
                assert torch.equal(value, before[name]), name
            assert (policy.training, policy.actor[0].training) == (is_training, False)


def test_evaluation_takes_the_most_likely_actions_unless_told_to_sample() -> None:
    policy = EpisodePolicy("CartPole-v1", num_members=2, options=EpisodeOptions(hidden=(4,)))
    with torch.no_grad():
        policy.actor[1].weight.zero_()
        policy.actor[1].bias.copy_(torch.tensor([0.0, 0.1]))  # always to the right
    result = evaluate_policy(policy, num_episodes=3)
    assert set(result.lengths.tolist()) <= {8, 9, 10}  # the pole falls at once
    assert result.returns.tolist() == result.lengths.tolist()  # 1 per step
    assert result.mean_return == result.returns.mean()
    noisy = evaluate_policy(policy, num_episodes=20, deterministic=False)
    assert noisy.mean_return > 12  # left and right about equally often


def test_an_evaluation_obeys_action_masks() -> None:
    policy = EpisodePolicy(lambda: Crossing(allows=2), action_mask="info", num_members=2)
    # the environment raises for a masked action
    assert evaluate_policy(policy, num_episodes=4).lengths.tolist() == [6] * 4


def test_an_evaluation_restores_the_mode_after_an_error() -> None:
    policy = EpisodePolicy(lambda: Crossing(tells=False), action_mask="info", num_members=1).train()
    with pytest.raises(ContractError):
        evaluate_policy(policy)
    assert policy.training


def test_limits_of_training_apply_to_evaluations_only_if_the_environment_has_none(subtests: pytest.Subtests) -> None:
    """What is registered limits an environment that never ends by itself, too."""
    registered = type("Registered", (Chance,), {"spec": EnvSpec("Registered", max_episode_steps=30)})
    for environment, lengths in (
        ("Pendulum-v1", [200, 11, 200]),
        ("CliffWalking-v1", [7, 11, 300]),  # a first policy walks into a wall
        (lambda: registered(length=10**9), [30, 11, 30]),
    ):
        policy = EpisodePolicy(environment, num_members=2, options=EpisodeOptions(max_episode_steps=7))
        for max_steps, length in zip((None, 11, 300), lengths, strict=True):
            with subtests.test(environment=environment, max_steps=max_steps):
                assert evaluate_policy(policy, num_episodes=2, max_steps=max_steps).lengths.tolist() == [length] * 2


def test_an_evaluation_prints_its_mean_and_numbers_below_1_are_refused() -> None:
    result = Evaluation(returns=np.array([1.0, 3.0]), lengths=np.array([10, 21]))
    assert str(result) == "return 2.0 +- 1.0 in 2 episodes of 16 steps"
    for name, value, words in (
        ("num_episodes", 0, ">= 1; got int 0"),
        ("max_steps", 0, ">= 1, or None; got int 0"),
        ("seed", -1, ">= 0; got int -1"),
    ):
        with pytest.raises(ConfigError, match=f"{name} must be an integer {words}"):
            evaluate_policy(EpisodePolicy(Chance), **{name: value})
    evaluate_policy(EpisodePolicy(Chance), num_episodes=1, max_steps=1, seed=0)


# --- runs


class Sink:
    """Records metrics."""

    def __init__(self) -> None:
        self.metrics: list[tuple[int, dict[str, float]]] = []

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.metrics.append((step, dict(metrics)))

    def close(self) -> None: ...


def test_evaluations_come_at_their_steps_and_at_the_end(subtests: pytest.Subtests) -> None:
    for total_steps, evaluate_every, evaluated_at in (
        (130, 50, [60, 100, 140]),  # due at 50 and 100, and at the end
        (100, 50, [60, 100]),
        (100, 1000, [100]),
        (60, 1, [20, 40, 60]),
        (1, 50, [20]),
    ):
        with subtests.test(total_steps=total_steps, evaluate_every=evaluate_every):
            sink, trainer = Sink(), of_five_steps()
            steps = {"total_steps": total_steps, "evaluate_every": evaluate_every}
            curve = train_control(trainer, episode_starts(2), sinks=[sink], **steps, **QUIET)
            assert curve.steps == evaluated_at
            assert trainer.iteration == evaluated_at[-1] // 20
            assert curve.iterations == [steps // 20 for steps in evaluated_at]
            assert [step for step, _ in sink.metrics] == list(range(1, trainer.iteration + 1))
            totals = [metrics["episodes/total_steps"] for _, metrics in sink.metrics]
            assert totals == [20 * step for step, _ in sink.metrics]
            logged = {20 * step: metrics["eval/return"] for step, metrics in sink.metrics if "eval/return" in metrics}
            assert logged == dict(zip(curve.steps, curve.returns, strict=True))
            assert curve.seconds == sorted(curve.seconds)
            assert curve.seconds[0] > 0.0


def test_numbers_of_steps_below_1_are_refused() -> None:
    for total_steps, evaluate_every, name in ((0, 1, "total_steps"), (1, 0, "evaluate_every")):
        with pytest.raises(ConfigError, match=f"{name} must be an integer >= 1; got int 0"):
            train_control(
                of_five_steps(), episode_starts(2), total_steps=total_steps, evaluate_every=evaluate_every, **QUIET
            )


def test_training_and_evaluation_use_their_own_starts() -> None:
    pool = Watched(SerialPool([Chance(5) for _ in range(4)]))
    trainer = trainer_of(pool)
    curve = train_control(trainer, episode_starts(2, seed=4), total_steps=20, evaluate_every=20, **QUIET)
    first, second = (start.seed for start in episode_starts(2, seed=4)(0))
    seeds = [start.seed for _, start in pool.begun]
    assert seeds == [first, first, second, second, *(EVALUATION_SEED + number for number in range(3))]
    assert curve.returns == [evaluate_policy(trainer.policy, num_episodes=3).mean_return]


def test_a_learning_curve_finds_when_and_whether_a_threshold_is_reached() -> None:
    curve = LearningCurve(iterations=[1, 2, 3], steps=[10, 20, 30], returns=[1.0, 5.0, 3.0], seconds=[0.1, 0.2, 0.3])
    assert [curve.steps_to(threshold) for threshold in (0.5, 1.0, 1.1, 5.0, 5.1)] == [10, 10, 20, 20, None]
    assert [curve.ends_at(threshold) for threshold in (2.9, 3.0, 3.1, None)] == [True, True, False, False]
    assert not LearningCurve().ends_at(0.0)


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "schedule": {"lr_schedule": "cosine", "warmup_ratio": 0.2},
    "ahead": {"iterations_ahead": 1, "lr_schedule": "linear"},
    "dynamic": {"dynamic_sampling_rounds": 2},
    "dynamic, with fitted values": {"dynamic_sampling_rounds": 2, "lr_schedule": "cosine", "is_fitted": True},
    "short iterations": {"num_steps": 20, "group_size": 1, "lr_schedule": "linear", "is_fitted": True},
}


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_run_that_was_stopped_ends_as_one_that_was_not(kind: str, tmp_path: Path, subtests: pytest.Subtests) -> None:
    """By a signal in an optimizer step, or while rewards are computed, whose collection is given up, and by an error in a
    callback. Everything goes on: weights, curve, callbacks."""

    def run(
        folder: Path | None, phase: str = "callback", stop: Any = by_exception, at: int | None = None
    ) -> tuple[LearningCurve, GRPOTrainer, EarlyStopping]:
        trainer = trainer_of("CartPole-v1", normalize_observations=True, **SETTINGS[kind])
        stopping = EarlyStopping("eval/return", patience=99)
        callbacks = [stopping, *Calls(trainer, phase, stop, at).callbacks]
        options = {"total_steps": 250, "evaluate_every": 90, "folder": folder, "callbacks": callbacks}
        return train_control(trainer, episode_starts(2), **options, **QUIET), trainer, stopping

    expected, first, best = run(None)
    assert len(expected.steps) >= 3
    for phase, stop, at in (("step", by_signal, 8), ("callback", by_exception, 2), ("reward", by_signal, 2)):
        with subtests.test(phase=phase):
            folder = tmp_path / phase
            with stopped():
                run(folder, phase, stop, at)
            curve, second, again = run(folder)
            for name in ("iterations", "steps", "returns"):
                assert getattr(curve, name) == getattr(expected, name)
            assert curve.seconds == sorted(curve.seconds)
            assert asdict(curve) == json.loads((folder / "curve.json").read_text())
            assert again.state_dict() == best.state_dict()
            for name, value in first.policy.state_dict().items():
                found = second.policy.state_dict()[name]  # with short iterations, also the episodes that go on
                assert torch.equal(found, value) if isinstance(value, torch.Tensor) else str(found) == str(value), name


def test_a_run_that_reached_its_target_or_its_total_stays_ended_and_says_so(tmp_path: Path) -> None:
    # the actions do not matter, so it is always the same
    target = evaluate_policy(of_five_steps().policy, num_episodes=3).mean_return

    def run(folder: Path | None = tmp_path, **settings: Any) -> LearningCurve:
        return train_control(of_five_steps(), episode_starts(2), evaluate_every=50, folder=folder, **QUIET, **settings)

    assert run(None, total_steps=100, stop_at=target + 0.01).steps == [60, 100]
    stopped_early = run(total_steps=200, stop_at=target)
    assert stopped_early.steps == [60]
    with pytest.warns(GRPOWarning, match="StopAt has ended the run already"):
        assert run(total_steps=200, stop_at=target) == stopped_early
    longer = run(total_steps=120)
    assert longer.steps == [60, 100, 120]
    with pytest.warns(GRPOWarning, match=r"episodes/steps=120 is the total, .* nothing left to do"):
        assert run(total_steps=120) == longer


def test_the_folder_of_another_run_is_refused_by_name(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """An environment of one's own has no keywords that a folder could note. What counts instances is no setting."""
    count = itertools.count()

    class Scaled(gymnasium.RewardWrapper):
        def __init__(self, env: gymnasium.Env, scale: float) -> None:
            super().__init__(env)
            self.scale, self.number = scale, next(count)
            self.nothing, self.huge, self.phase = float("nan"), 10**400, np.complex64(1j)  # are not compared

        def reward(self, reward: Any) -> Any:
            return self.scale * reward

    def own(length: int = 5, scale: float = 2.0) -> dict[str, Any]:
        return {"environment": lambda: Scaled(Chance(length), scale)}

    def run(folder: str, environment: Any, seed: int = 0, **options: Any) -> LearningCurve:
        options = {"max_episode_steps": 6, "num_members": 2, "hidden": (4,)} | options
        config, policy = GRPOConfig(group_size=2), policy_of(environment, **options)
        trainer = GRPOTrainer(config=config, policy=policy, reward_model=EnvironmentReward())
        steps = {"total_steps": 10, "evaluate_every": 10, "num_eval_episodes": 1, "max_eval_steps": 6}
        return train_control(trainer, episode_starts(1, seed=seed), folder=tmp_path / folder, progress=False, **steps)

    first = {"by id": {"environment": "Pendulum-v1"}, "own": own()}
    curves = {folder: run(folder, **given) for folder, given in first.items()}
    is_now = "environment was Pendulum-v1 and is"
    for folder, changed, words in (
        ("by id", {"g": 0.5}, r"make was \{\} and is \{'g': 0\.5\}"),
        ("by id", {"environment": lambda: gymnasium.make("Pendulum-v1", g=0.5)}, f"{is_now} function"),
        ("by id", {"environment": "MountainCarContinuous-v0"}, f"{is_now} MountainCarContinuous-v0"),
        ("by id", {"seed": 3}, r"first starts was \['seed \d+'\] and is \['seed \d+'\]"),
        ("by id", {"max_episode_steps": 5}, r"options was .*'max_episode_steps': 6.* is .*'max_episode_steps': 5"),
        ("by id", {"distribution": "beta"}, "distribution was auto and is beta"),
        ("own", own(length=4), r"Chance\.\w+ was 5 and is 4"),
        ("own", own(scale=3.0), "Scaled.scale was 2 and is 3"),
    ):
        with subtests.test(words), pytest.raises(ConfigError, match=f"holds another run: .*{words}"):
            run(folder, **first[folder] | changed)
    for folder, changed in (("by id", {"vectorization": "sync"}), ("own", {})):
        with subtests.test(folder), pytest.warns(GRPOWarning, match="nothing left to do"):
            assert run(folder, **first[folder] | changed) == curves[folder]


def test_the_best_checkpoint_has_the_highest_return(tmp_path: Path) -> None:
    trainer = trainer_of("CartPole-v1")
    curve = train_control(trainer, episode_starts(2), total_steps=400, evaluate_every=100, folder=tmp_path, **QUIET)
    assert len(curve.returns) > 3
    assert sum(path.name.startswith("iteration-") for path in tmp_path.iterdir()) in (3, 4)
    trainer.load_checkpoint(best_checkpoint(tmp_path))
    assert evaluate_policy(trainer.policy, num_episodes=3).mean_return == max(curve.returns)


def test_a_budget_of_few_iterations_is_said(caplog: pytest.LogCaptureFixture) -> None:
    for total_steps, is_said in ((60, True), (20 * 20, False)):
        caplog.clear()
        train_control(of_five_steps(), episode_starts(2), total_steps=total_steps, evaluate_every=1000, **QUIET)
        found = [line for line in caplog.messages if line.startswith("train_control")]
        assert found == (
            [f"train_control: {total_steps} steps were only 3 iterations" + found[0].partition("iterations")[2]]
            if is_said
            else []
        )


def test_without_a_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train_control(of_five_steps(), episode_starts(2), total_steps=40, evaluate_every=20, **QUIET)
    assert list(tmp_path.iterdir()) == []
