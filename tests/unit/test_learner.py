"""The learner alone: one iteration, without anything of a run."""

import copy
import json
import os
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo import ConfigError, ExperienceBatch, GRPOConfig, GRPOTrainer, RewardConfig
from grpo.errors import GRPOWarning
from grpo.learner import Learner
from tests.support.imitated_ranks import Twin
from tests.support.launches import printed_by
from tests.support.policies import ExactSampling, TablePolicy, digest, weights_of
from tests.support.trainers import by_hand, without_time

SCRIPT = """
import json, sys
import torch, numpy  # what these import on their own is not the learner's
import tests.support.light_packages  # the names that `grpo` exports are not the learner's either
before = {*sys.modules}
import grpo.learner
print(json.dumps(sorted({*sys.modules} - before)))
"""

OF_A_RUN = (
    "_storage", "_running", "_ranks", "_sharding", "_processes", "trainer", "checkpoint", "callbacks", "sinks", "distributed",
    "logs", "evaluation", "checks",
)  # fmt: skip


def test_a_learner_imports_nothing_of_a_run() -> None:
    """No storage, signals, ranks or progress bar, directly or through others."""
    imported = json.loads(printed_by("-c", SCRIPT))
    assert "grpo.learner" in imported
    rooms = {name.split(".")[1] for name in imported if name.startswith("grpo.")}
    assert rooms & {*OF_A_RUN} == set()
    assert {name.split(".")[0] for name in imported} & {"tqdm", "safetensors"} == set()


def test_a_learner_starts_no_process_for_a_reward() -> None:
    """A function that is not async needs one for its deadline, which a run starts."""

    def judge(states: Any, actions: Any) -> list[float]:
        return [float(os.getpid() != own_id)] * len(states)

    async def awaited(states: Any, actions: Any) -> list[float]:
        return judge(states, actions)

    own_id = os.getpid()
    config = GRPOConfig(group_size=4, reward=RewardConfig(timeout=60.0))
    with pytest.raises(ConfigError, match=r"only GRPOTrainer starts processes\. Use GRPOTrainer\."):
        Learner(config=config, policy=TablePolicy(), reward_model=judge)
    for kind, reward, is_elsewhere in ((Learner, awaited, 0.0), (GRPOTrainer, judge, 1.0), (GRPOTrainer, awaited, 0.0)):
        learner = kind(config=config, policy=TablePolicy(), reward_model=reward)
        assert learner.collect(["a"]).rewards.tolist() == [is_elsewhere] * 4


def learner_of(kind: type[Learner] = Learner, **settings: Any) -> Learner:
    torch.manual_seed(settings.get("seed", 0))
    return kind(
        config=GRPOConfig(**{"group_size": 4, "seed": 0, "learning_rate": 0.1, **settings}),
        policy=ExactSampling(),
        reward_model=lambda states, actions: [float(sum(action)) for action in actions],
    )


@pytest.mark.parametrize("settings", [{}, {"num_epochs_per_update": 2, "batch_size": 5}, {"replay_iterations": 1}])
def test_a_learner_makes_the_iterations_of_a_trainer(settings: dict[str, Any]) -> None:
    ends = []
    for kind in (Learner, GRPOTrainer):
        learner = learner_of(kind, **settings)
        metrics = [without_time(learner.step([0, 1, 2, 3])) for _ in range(3)]
        assert learner.iteration == 3
        ends.append(digest(weights_of(learner.policy), learner.optimizer.state_dict(), metrics, torch.get_rng_state()))
    assert ends[0] == ends[1]


def test_the_state_of_a_learner_continues_in_another_one() -> None:
    first, second = learner_of(num_epochs_per_update=2), learner_of(num_epochs_per_update=2, seed=7)
    first.step([0, 1])
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert second.iteration == 1
    ends = []
    for learner in (second, first):
        torch.manual_seed(3)
        learner.step([0, 1])
        ends.append(digest(weights_of(learner.policy), learner.parts.by_name["updates"].state_dict()))
    assert ends[0] == ends[1]


OF_TRAIN = r"config\.{}: only GRPOTrainer\.train honours this, because a Learner"
ASKS = r"reward\.num_retries=.* only GRPOTrainer asks again for rewards\. Use GRPOTrainer"


@pytest.mark.parametrize(("settings", "message"), [
    ({"lr_schedule": "cosine"}, OF_TRAIN.format("lr_schedule='cosine'")),
    ({"warmup_ratio": 0.1}, OF_TRAIN.format("warmup_ratio=0.1")),
    ({"iterations_ahead": 1}, OF_TRAIN.format("iterations_ahead=1")),
    ({"reward": RewardConfig(num_retries=1)}, ASKS),
    ({"reward": RewardConfig(on_failure="drop")}, ASKS),
])  # fmt: skip
def test_a_setting_that_needs_a_run_is_refused_by_a_learner_alone(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        learner_of(**settings)
    learner_of(GRPOTrainer, **settings)


def test_dynamic_sampling_needs_more_states_in_a_learner_alone() -> None:
    learner = learner_of(dynamic_sampling_rounds=2)
    with pytest.raises(ConfigError, match=r"dynamic_sampling_rounds=2 draws further states: only GRPOTrainer\.train"):
        learner.step([0, 1])
    assert learner.step([0, 1], more_states=lambda: [2, 3])["group_stats/num_drawn"] >= 2


def test_a_trainer_says_once_what_step_does_not_honour() -> None:
    trainer = learner_of(GRPOTrainer, lr_schedule="linear", dynamic_sampling_rounds=1)
    with pytest.warns(GRPOWarning, match=r"step\(\) does not honour config\.lr_schedule='linear', .*dynamic_sampling"):
        trainer.step([0, 1])
    trainer.step([0, 1])  # a second warning would be an error
    told = learner_of(GRPOTrainer, dynamic_sampling_rounds=1)
    told.step([0, 1], more_states=lambda: [2, 3])
    assert isinstance(told, GRPOTrainer)
    told.train([0, 1], num_iterations=2, progress=False)


class Counted(Twin):
    """Counts how often the ranks meet."""

    num_meetings = 0

    def met(self, value: Any) -> Any:
        self.num_meetings += 1
        return value

    def gather_objects(self, value: Any) -> list[Any]:
        return self.met(super().gather_objects(value))

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return self.met(super().sum(values))

    def add_up(self, values: torch.Tensor) -> torch.Tensor:
        return super().sum(values)  # after a meeting, which has told all ranks what comes

    def gather(self, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
        return self.met(super().gather(rows))

    def agree(self, error: BaseException | None = None) -> None:
        super().agree(self.met(error))


@pytest.mark.parametrize("num_updates", [1, 4])
def test_ranks_meet_at_most_five_times_per_iteration_and_twice_per_update(num_updates: int) -> None:
    """Once for rewards, once for the plan, once for the report, and once before the next iteration."""
    engine, seen = Counted(), []
    config = {"group_size": 4, "seed": 0, "num_epochs_per_update": num_updates}
    rewards = lambda states, actions: [float(n) for n in range(len(actions))]  # noqa: E731
    trainer, _ = by_hand(policy=TablePolicy(), rewards=rewards, config=config, engine=engine)
    watch = SimpleNamespace(on_iteration=lambda trainer, metrics: seen.append(engine.num_meetings))
    trainer.train(["a", "b"], num_iterations=3, callbacks=[watch], progress=False)
    per_iteration = {after - before for before, after in pairwise(seen)}
    assert per_iteration == {5 + 2 * num_updates}, "four meetings of the trainer, and one that asks the callbacks"


def test_a_batch_is_completed_once_per_step() -> None:
    learner, completed = learner_of(num_epochs_per_update=2), []
    complete = learner.collector.complete
    learner.collector.complete = lambda batch, **options: completed.append(batch) or complete(batch, **options)  # type: ignore[method-assign]
    learner.step([0, 1])
    assert len(completed) == 1
    mask = [[True, True], [True, False]]
    learner.update(ExperienceBatch.from_rows([0, 0], [(1, 0), (2,)], [1.0, 0.0], [0, 0], mask=mask))
    assert len(completed) == 2
