"""The state of a trainer, and `train(resume="auto")`: what is loaded, started, continued and refused."""

import copy
import math
import random
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo import (
    AdvantageConfig,
    CheckpointError,
    ConfigError,
    EntropyControl,
    GRPOConfig,
    GRPOTrainer,
    GRPOWarning,
    KLControl,
    ObjectiveConfig,
)
from grpo.checkpoint import open_checkpoint, read_checkpoint, write_checkpoint
from tests.support.checkpoint_runs import built, names_in
from tests.support.policies import TablePolicy, digest, weights_of
from tests.support.stopped_runs import (
    Calls,
    StoppingCallback,
    assert_same_metrics,
    by_exception,
    by_signal,
    end_of,
    stopped,
)
from tests.support.trainers import by_hand, without_time

pytestmark = pytest.mark.usefixtures("without_type_checks")


@pytest.mark.parametrize("exists", [False, True])
def test_resume_auto_starts_in_a_missing_or_empty_folder_and_goes_on_in_a_used_one(exists, tmp_path: Path) -> None:
    whole, states, options = built("epochs of batches", seed=1)
    history = whole.train(states, num_iterations=5, **options)
    options |= {"checkpoint_dir": tmp_path if exists else tmp_path / "missing", "resume": "auto"}
    built("epochs of batches", seed=1)[0].train(states, num_iterations=3, **options)
    second, _, _ = built("epochs of batches", seed=2)
    assert_same_metrics(second.train(states, num_iterations=5, **options), history[3:])
    assert end_of(second) == end_of(whole)


@pytest.mark.parametrize(("resume", "has_folder"), [("auto", False), ("never", True), (True, True), ("", True)])
def test_resume_needs_a_folder_and_knows_no_other_word(resume, has_folder, tmp_path: Path) -> None:
    (trainer, policy), folder = by_hand(), tmp_path if has_folder else None
    with pytest.raises(ConfigError, match=r"resume must be None, or 'auto' with a checkpoint_dir; got resume="):
        trainer.train(["a"], num_iterations=1, checkpoint_dir=folder, resume=resume, progress=False)
    assert policy.calls["generate"] == 0


def test_a_run_in_a_used_folder_without_resume_is_refused(tmp_path: Path) -> None:
    by_hand()[0].train(["a", "b"], num_iterations=2, checkpoint_dir=tmp_path, progress=False)
    with pytest.raises(CheckpointError, match=r"iteration-00000002 is of iteration 2, and this trainer is at 0"):
        by_hand()[0].train(["a", "b"], num_iterations=2, checkpoint_dir=tmp_path, progress=False)


def test_a_new_run_in_the_folder_of_an_unfinished_iteration_is_refused(tmp_path: Path) -> None:
    trainer, states, options = built("epochs of batches", seed=1)
    Calls(trainer, "step", by_exception, at=3)
    with stopped():
        trainer.train(states, num_iterations=3, checkpoint_dir=tmp_path, **options)
    assert names_in(tmp_path) == ["iteration-00000000-update-0002"]
    fresh, _, _ = built("epochs of batches", seed=1)
    with pytest.raises(CheckpointError, match="is of iteration 0 and 2 updates, and this trainer is at 0"):
        fresh.train(states, num_iterations=3, checkpoint_dir=tmp_path, **options)
    fresh.load_checkpoint(tmp_path)
    assert len(fresh.train(states, num_iterations=3, checkpoint_dir=tmp_path, **options)) == 3


def test_a_trainer_that_is_ahead_of_the_folder_is_not_set_back(tmp_path: Path) -> None:
    by_hand()[0].train(["a", "b"], num_iterations=2, checkpoint_dir=tmp_path, progress=False)
    trainer, _ = by_hand()
    for _ in range(3):
        trainer.step(["a", "b"])
    before = digest(weights_of(trainer.policy))
    with pytest.raises(CheckpointError, match=r"iteration-00000002 is behind this trainer, which is at iteration 3"):
        trainer.train(["a", "b"], num_iterations=4, checkpoint_dir=tmp_path, resume="auto", progress=False)
    assert (trainer.iteration, digest(weights_of(trainer.policy))) == (3, before)


def test_if_every_checkpoint_is_damaged_nothing_starts_over(tmp_path: Path) -> None:
    by_hand()[0].train(["a", "b"], num_iterations=2, checkpoint_dir=tmp_path, progress=False)
    for path in tmp_path.glob("*/manifest.json"):
        path.write_text("{}")
    trainer, policy = by_hand()
    with pytest.raises(CheckpointError, match=r"No checkpoint in .* has an intact manifest"):
        trainer.train(["a", "b"], num_iterations=2, checkpoint_dir=tmp_path, resume="auto", progress=False)
    assert policy.calls["generate"] == 0


def test_changed_settings_are_named_and_count(tmp_path: Path) -> None:
    def trainer(**changes: Any) -> GRPOTrainer:
        return GRPOTrainer(
            config=replace(GRPOConfig(group_size=2, learning_rate=0.5, seed=1), **changes),
            policy=TablePolicy(),
            reward_model=lambda states, actions: [float(action) for action in actions],
        )

    trainer().save_checkpoint(tmp_path / "checkpoint")
    changed = trainer(learning_rate=0.25, seed=9, objective=ObjectiveConfig(surrogate="reinforce"))
    with pytest.warns(GRPOWarning) as caught:
        changed.load_checkpoint(tmp_path / "checkpoint")
    (message,) = [str(warning.message) for warning in caught]
    assert "learning_rate was 0.5 and is 0.25" in message
    assert "objective.surrogate.kind was 'clip' and is 'reinforce'" in message
    assert "objective.surrogate.low was 0.2 and is None" in message
    assert "seed" not in message
    assert "group_size" not in message
    trainer(seed=2).load_checkpoint(tmp_path / "checkpoint")  # a warning would be an error
    assert changed.step(["a", "b"])["train/learning_rate"] == 0.25


def test_a_changed_learning_rate_counts_under_a_schedule_too(tmp_path: Path) -> None:
    """Of four iterations, the first two have 1 and 3/4 of the old rate, and the others 1/2 and 1/4 of the new one."""

    def train(learning_rate: float, num_iterations: int) -> list[float]:
        config = GRPOConfig(group_size=2, learning_rate=learning_rate, seed=1, lr_schedule="linear")
        rewards = lambda states, actions: [float(action) for action in actions]  # noqa: E731
        trainer = GRPOTrainer(config=config, policy=TablePolicy(), reward_model=rewards)
        stop = StoppingCallback(lambda: by_exception() if trainer.iteration == 2 else None)
        options: dict[str, Any] = {"num_iterations": 4, "checkpoint_dir": tmp_path, "resume": "auto", "progress": False}
        if num_iterations == 2:
            with stopped():
                trainer.train(["a", "b"], callbacks=[stop], **options)
        else:
            with pytest.warns(GRPOWarning, match="learning_rate was 0.5 and is 0.25"):
                trainer.train(["a", "b"], **options)
        return [metrics["train/learning_rate"] for metrics in trainer.history]

    assert (train(0.5, 2), train(0.25, 4)) == ([0.5], [0.375, 0.125, 0.0625])


def test_a_loaded_unfinished_iteration_is_finished_by_train_and_dropped_by_step_with_a_warning(tmp_path: Path) -> None:
    trainer, states, options = built("epochs of batches", seed=1)
    Calls(trainer, "step", by_exception, at=6)
    with stopped():
        trainer.train(states, num_iterations=3, checkpoint_dir=tmp_path, **options)
    assert names_in(tmp_path) == ["iteration-00000001", "iteration-00000001-update-0001"]
    loaded, _, _ = built("epochs of batches", seed=2)
    loaded.load_checkpoint(tmp_path)
    assert (loaded.iteration, loaded.in_progress.num_planned) == (1, 1)
    loaded.save_checkpoint(tmp_path / "by hand")
    again, _, _ = built("epochs of batches", seed=3)
    again.load_checkpoint(tmp_path / "by hand")
    assert end_of(again) == end_of(loaded)
    with pytest.warns(GRPOWarning, match=r"was written after update 1 of an iteration, and the other updates"):
        loaded.step(states[:2])
    loaded.step(states[:2])
    assert len(again.train(states, num_iterations=3, **options)) == 2


def test_an_iteration_that_was_not_recorded_is_forgotten_by_step(tmp_path: Path) -> None:
    trainer, states, options = built("plain", seed=1)
    calls = Calls(trainer, "callback", by_exception, at=2)
    with stopped():
        trainer.train(states, num_iterations=3, callbacks=calls.callbacks, checkpoint_dir=tmp_path, **options)
    loaded, _, _ = built("plain", seed=2)
    loaded.load_checkpoint(tmp_path)
    assert loaded.iteration == 2
    assert loaded.progress.unrecorded is not None
    metrics = loaded.step(states[:2])
    rest = loaded.train(states, num_iterations=5, **options)
    assert (loaded.iteration, len(rest)) == (5, 2)
    assert rest[0]["rewards/mean"] != metrics["rewards/mean"]


def test_a_checkpoint_restarts_the_time_to_the_next(tmp_path: Path) -> None:
    """Iteration 1 takes 30 seconds by this clock, and each later one 8: 24 have passed since the save when 4 ends."""
    now = 0.0

    def reward(states: Any, actions: Any) -> list[float]:
        nonlocal now
        now += 8.0 if now else 30.0
        return [float(action) for action in actions]

    trainer, _ = by_hand(policy=TablePolicy(), rewards=reward)
    trainer.meter.clock = lambda: now
    every: dict[str, Any] = {"checkpoint_every": timedelta(seconds=20), "checkpoint_dir": tmp_path}
    trainer.train(["a", "b"], num_iterations=6, keep_last=9, progress=False, **every)
    assert names_in(tmp_path) == [f"iteration-{number:08d}" for number in (1, 4, 6)]


@pytest.mark.parametrize("every", [timedelta(0), timedelta(seconds=-1)])
def test_a_time_between_checkpoints_of_0_is_refused(tmp_path, every):
    with pytest.raises(ConfigError, match="checkpoint_every must be longer than 0; got"):
        by_hand()[0].train(["a"], num_iterations=1, checkpoint_dir=tmp_path, checkpoint_every=every, progress=False)


def test_the_best_evaluation_is_remembered_across_a_stop(tmp_path: Path) -> None:
    """Scores 3, 1 | 2, 0: after the stop, 2 is not the best so far, and gives no checkpoint of its own."""
    scores = iter([3.0, 1.0, 2.0, 0.0])

    def made() -> GRPOTrainer:
        trainer, _ = by_hand(policy=TablePolicy(), rewards=lambda states, actions: [float(a) for a in actions])
        trainer.evaluate = lambda states: {"eval/avg_reward": next(scores)}  # type: ignore[method-assign]
        return trainer

    evaluation: dict[str, Any] = {"eval_states": ["a"], "eval_every": 1, "progress": False}
    options = {"checkpoint_dir": tmp_path, "checkpoint_every": 9, "keep_last": 9, "resume": "auto", **evaluation}
    trainer = made()
    Calls(trainer, "reward", by_signal, at=3)
    with stopped():
        trainer.train(["a", "b"], num_iterations=4, **options)
    assert names_in(tmp_path) == ["iteration-00000001", "iteration-00000002"]
    made().train(["a", "b"], num_iterations=4, **options)
    assert names_in(tmp_path) == [f"iteration-{number:08d}" for number in (1, 2, 4)]


class Plain: ...


class Wrapping(TablePolicy):
    """Wraps each action in an object that no checkpoint can hold."""

    def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> Any:
        groups = super().generate_actions(states, num_actions_per_state)
        return [[SimpleNamespace(arm=action) for action in group] for group in groups]

    def get_log_probabilities(self, states: Any, actions: Any) -> Any:
        return super().get_log_probabilities(states, [action.arm for action in actions])


def test_actions_that_no_checkpoint_can_hold_are_refused_in_the_first_iteration(tmp_path: Path) -> None:
    trainer, _ = by_hand(policy=Wrapping(), rewards=lambda states, actions: [float(action.arm) for action in actions])
    message = r"actions\[0\] is a SimpleNamespace, which a checkpoint cannot hold.* to_state"
    with pytest.raises(CheckpointError, match=message):
        trainer.train(["a", "b"], num_iterations=9, checkpoint_dir=tmp_path, progress=False)
    assert trainer.iteration == 0
    trainer.train(["a", "b"], num_iterations=1, progress=False)


class Keeping(TablePolicy):
    def state_dict(self, *arguments: Any, **named: Any) -> Any:
        return {"thing": Plain()}


@pytest.mark.parametrize(
    ("kind", "states", "where"),
    [
        (Keeping, ["a", "b"], r"the trainer's state\['parts'\]\['policy'\]\['thing'\]"),
        (TablePolicy, [Plain(), Plain()], r"states\[0\]"),
    ],
)
def test_a_state_that_no_checkpoint_can_hold_is_refused_before_the_first_iteration(kind, states, where, tmp_path):
    trainer, policy = by_hand(policy=kind())
    with pytest.raises(CheckpointError, match=rf"{where} is a Plain, which a checkpoint cannot hold"):
        trainer.train(states, num_iterations=9, checkpoint_dir=tmp_path, progress=False)
    assert (policy.calls["generate"], names_in(tmp_path)) == (0, [])


@pytest.mark.parametrize(("stop", "names"), [(by_exception, []), (by_signal, ["iteration-00000000"])])
def test_an_error_in_the_first_collection_leaves_no_checkpoint_but_a_signal_does(tmp_path, stop, names):
    trainer, states, options = built("plain", seed=1)
    Calls(trainer, "reward", stop, at=1)
    with stopped():
        trainer.train(states, num_iterations=3, checkpoint_dir=tmp_path / stop.__name__, **options)
    assert names_in(tmp_path / stop.__name__) == names


def test_a_signal_right_after_a_save_or_a_resume_leaves_the_checkpoint_and_its_score(tmp_path: Path) -> None:
    first, states, options = built("plain", seed=1)
    Calls(first, "reward", by_signal, at=3)
    with stopped():
        first.train(states, num_iterations=4, checkpoint_dir=tmp_path, checkpoint_every=1, **options)
    assert names_in(tmp_path) == ["iteration-00000001", "iteration-00000002"]
    scores = [open_checkpoint(path, None).score for path in sorted(tmp_path.glob("iteration-*"))]
    second, _, _ = built("plain", seed=2)
    Calls(second, "reward", by_signal, at=1)
    with stopped():
        second.train(states, num_iterations=4, checkpoint_dir=tmp_path, resume="auto", **options)
    assert None not in scores
    assert [open_checkpoint(path, None).score for path in sorted(tmp_path.glob("iteration-*"))] == scores


def test_an_optimizer_that_fails_between_two_weights_gets_no_checkpoint(tmp_path: Path) -> None:
    trainer, states, options = built("epochs of batches", seed=1)
    optimizer = trainer.optimizer_step.optimizer
    assert optimizer is not None
    step, calls = optimizer.step, []

    def failing(*arguments: Any, **named: Any) -> Any:
        calls.append(len(calls))
        if len(calls) == 6:
            with torch.no_grad():
                next(iter(trainer.policy.parameters())).add_(1.0)
            raise MemoryError
        return step(*arguments, **named)

    optimizer.step = failing  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        trainer.train(states, num_iterations=3, checkpoint_dir=tmp_path, checkpoint_every=1, **options)
    assert names_in(tmp_path) == ["iteration-00000001"]


@pytest.mark.parametrize(("part", "name", "value"), [
    ("counters", "iteration", -1), ("optimizer_step", "num_applied", 1.5), ("optimizer", "lr", math.nan),
    ("optimizer", "weight_decay", math.inf),
])  # fmt: skip
def test_a_checkpoint_with_absurd_numbers_is_passed_over(part, name, value, tmp_path: Path) -> None:
    """The files are intact, as those of a broken writer would be."""
    trainer, states, options = built("epochs of batches", seed=1)
    built("epochs of batches", seed=1)[0].train(states, num_iterations=1, checkpoint_dir=tmp_path, **options)
    state = read_checkpoint(tmp_path)
    changed = state["parts"][part]
    (changed["param_groups"][0] if part == "optimizer" else changed)[name] = value
    write_checkpoint(tmp_path / "iteration-00000002", state, iteration=2)
    trainer.load_checkpoint(tmp_path)
    assert trainer.iteration == 1
    with pytest.raises(CheckpointError, match=rf"{name}={value}"):
        trainer.load_checkpoint(tmp_path / "iteration-00000002")


class Remembering(TablePolicy):
    """A policy with a state beside its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = 0.0

    def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> Any:
        self.memory += 1.0
        return super().generate_actions(states, num_actions_per_state, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {"memory": self.memory}

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        self.memory = state["memory"]


class Tiring:
    """A reward that falls with every call, and has the count as its state."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, states: Any, actions: Any) -> Any:
        self.num_calls += 1
        return [float(action) / self.num_calls + random.random() for action in actions]

    def state_dict(self) -> dict[str, Any]:
        return {"num_calls": self.num_calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_calls = state["num_calls"]


def trainer_of(seed: int = 1) -> GRPOTrainer:
    """With everything that has a state: a moving reference, replay, controls, a running baseline, a scheduler."""
    policy = Remembering()
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    parts = {"reward_model": Tiring(), "reference_policy": TablePolicy(), "optimizer": optimizer}
    config = GRPOConfig(
        group_size=4,
        batch_size=3,
        seed=seed,
        replay_iterations=1,
        reference_sync_every=2,
        reference_mix=0.5,
        kl_control=KLControl(target=0.25),
        entropy_control=EntropyControl(target=0.5, delta=0.001),
        advantage=AdvantageConfig(normalize_rewards=True),
        objective=ObjectiveConfig(entropy_estimator="score_function"),
    )
    return GRPOTrainer(config=config, policy=policy, lr_scheduler=scheduler, **parts)


def trained(num_steps: int, **options: Any) -> GRPOTrainer:
    trainer = trainer_of(**options)
    for _ in range(num_steps):
        trainer.step(["a", "b"])
    return trainer


def test_a_loaded_trainer_continues_exactly_as_the_first_one() -> None:
    first = trained(3)
    first.progress.total, first.progress.num_draws, first.optimizer_step.skipped_in_a_row = 7, 8, 1
    state = copy.deepcopy(first.state_dict())
    metrics = [first.step(["a", "b"]) for _ in range(2)]
    second = trained(1, seed=2)
    second.load_state_dict(state)
    assert digest(second.state_dict() | {"config": None}) == digest(state | {"config": None})  # another seed is allowed
    assert (second.iteration, second.counters.data_seed) == (3, 1)
    assert (second.progress.total, second.progress.num_draws) == (7, 8)
    assert second.optimizer_step.skipped_in_a_row == 1
    assert second.policy.memory == second.reward_model.function.num_calls == 3
    assert [*map(without_time, [second.step(["a", "b"]) for _ in range(2)])] == [*map(without_time, metrics)]
    ends = [trainer.state_dict() for trainer in (first, second)]
    for end in ends:
        del end["parts"]["replay"], end["config"]  # the kept rows hold how long they took
    assert digest(ends[0]) == digest(ends[1])


def test_loading_keeps_the_identity_of_all_parameter_tensors() -> None:
    trainer = trained(1)
    logits, reference = trainer.policy.logits, trainer.reference_policy.logits
    trainer.load_state_dict(copy.deepcopy(trained(2).state_dict()))
    assert trainer.policy.logits is logits
    assert trainer.reference_policy.logits is reference


OF_A_LEARNER = {
    "policy", "reward_model", "counters", "advantages", "collector", "scorer", "updates", "coefficients", "replay",
    "optimizer_step", "moving_reference", "optimizer", "lr_scheduler",
}  # fmt: skip
OF_A_RUN = {"progress", "in_progress", "ahead"}


def test_every_part_that_there_is_is_in_the_state():
    state = trained(1).state_dict()
    assert set(state["parts"]) == set(state["kinds"]) == OF_A_LEARNER | OF_A_RUN
    assert (state["kinds"]["optimizer"], state["kinds"]["reward_model"]) == ("Adam", "RewardFunction")
    assert set(state["reference"]) == {"logits"}
    assert state["parts"]["counters"] == {"data_seed": 1, "iteration": 1}
    trainer = GRPOTrainer(config=GRPOConfig(), policy=TablePolicy(), reward_model=Tiring())
    state = trainer.state_dict()
    assert (state["reference"], set(state["parts"])) == ({}, (OF_A_LEARNER | OF_A_RUN) - {"lr_scheduler"})
    trainer.load_state_dict(copy.deepcopy(state))
    assert digest(trainer.state_dict()) == digest(state)


@pytest.mark.parametrize(("num_steps", "knows"), [(0, False), (1, True)])
def test_knowledge_that_the_policy_has_one_step_per_row_is_restored(num_steps, knows):
    """A policy that has shown one log-prob per row needs no pass to find its steps."""
    trainer = trained(1 - num_steps)
    trainer.load_state_dict(copy.deepcopy(trained(num_steps).state_dict()))
    assert trainer.collector.scorer.one_step_device == (trainer.optimizer_step.device if knows else None)


def changed(state: dict[str, Any], path: tuple[str, ...], value: Any = None) -> dict[str, Any]:
    """The state with another value at the path, or without it."""
    part = state = copy.deepcopy(state)
    for key in path[:-1]:
        part = part[key]
    if value is None:
        del part[path[-1]]
    else:
        part[path[-1]] = value
    return state


MATCH = "must match this trainer; missing:"
UNCHANGED = "The checkpoint does not fit this trainer, which is unchanged"


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("random",), None, rf"The checkpoint {MATCH} \['random'\], unexpected: nothing"),
        (("extra",), 1, rf"The checkpoint {MATCH} nothing, unexpected: \['extra'\]"),
        (("reference", "logits"), None, rf"reference Remembering's parameters in the checkpoint {MATCH} \['logits'\]"),
        (("kinds", "replay"), None, rf"The checkpoint's 'kinds' {MATCH} \['replay'\], unexpected: nothing"),
        (("parts", "optimizer"), None, rf"The checkpoint's 'parts' {MATCH} \['optimizer'\], unexpected: nothing"),
        (("parts", "counters", "iteration"), None, rf"{UNCHANGED}: .*counters: 'iteration'"),
        (("random", "torch"), None, rf"The checkpoint's 'random' {MATCH} \['torch'\], unexpected: nothing"),
        (("kinds", "optimizer"), "SGD", r"The checkpoint's optimizer is a SGD; this trainer's is a Adam\. Build"),
        (("parameters", "logits"), None, rf"Remembering's parameters in the checkpoint {MATCH} \['logits'\]"),
        (("parameters", "logits"), torch.zeros(2, 3), r"Remembering: logits has shape \[2, 2\], but \[2, 3\] in the"),
        (("reference", "logits"), torch.zeros(1, 2), r"reference Remembering: logits has shape \[2, 2\]"),
        (("parts", "policy"), {}, rf"{UNCHANGED}: .*policy: 'memory'"),
        (("random", "torch"), torch.zeros(1), UNCHANGED),
    ],
)
def test_a_state_that_does_not_fit_is_named_and_changes_nothing(path, value, message):
    saved, trainer = copy.deepcopy(trained(1).state_dict()), trained(2, seed=3)
    before = digest(trainer.state_dict())
    with pytest.raises(CheckpointError, match=message):
        trainer.load_state_dict(changed(saved, path, value))
    assert digest(trainer.state_dict()) == before


def test_a_safe_point_copies_buffers_and_no_weights() -> None:
    class WithBuffer(TablePolicy):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(2))

    trainer = GRPOTrainer(config=GRPOConfig(), policy=WithBuffer(), reward_model=Tiring())
    noted = trainer.run_state.passing_state()["parts"]["policy"]
    assert noted["logits"].data_ptr() == trainer.policy.logits.data_ptr()
    trainer.policy.seen += 1
    assert noted["seen"].tolist() == [0.0, 0.0]
