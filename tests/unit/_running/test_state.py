"""The state of a trainer: taken, loaded into another trainer, and refused where it does not fit."""

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch

from grpo import AdvantageConfig, CheckpointError, EntropyControl, GRPOConfig, GRPOTrainer, KLControl, ObjectiveConfig
from tests.support.policies import TablePolicy, digest
from tests.support.trainers import without_time

pytestmark = pytest.mark.usefixtures("without_type_checks")


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


def test_the_random_generators_are_restored() -> None:
    trainer = trained(1)
    state = copy.deepcopy(trainer.state_dict())
    drawn = torch.rand(3).tolist(), random.random(), np.random.random()  # noqa: NPY002
    trainer.load_state_dict(state)
    assert (torch.rand(3).tolist(), random.random(), np.random.random()) == drawn  # noqa: NPY002


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
