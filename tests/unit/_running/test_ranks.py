"""The trainer on several ranks: which arguments must be equal, and that every method shares its errors."""

import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo import ExperienceBatch, GRPOConfig, GRPOTrainer, ObjectiveConfig, RewardConfig
from grpo._ranks.equality import comparable_settings, printed
from grpo._ranks.processes import SeveralProcesses
from grpo._running.ranks import comparable_arguments
from grpo.engine import OneProcess
from grpo.errors import RankError
from grpo.surrogates import Clip
from tests.support.policies import TablePolicy

ROOT = Path(__file__).parents[3]


def settings(**arguments: Any) -> dict[str, Any]:
    return comparable_settings({"config": GRPOConfig(), "policy": TablePolicy(), "optimizer": None, **arguments})


def differing(**arguments: Any) -> set[str]:
    """The names under which these arguments differ from the usual ones."""
    usual, other = settings(), settings(**arguments)
    usual, other = printed(usual), printed(other)
    return {name for name in usual | other if usual.get(name) != other.get(name)}


def objective(inputs: Any) -> Any:
    return inputs


def test_settings_of_ranks_are_compared_by_their_full_names(subtests: pytest.Subtests) -> None:
    usual = GRPOConfig()
    sgd = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    for arguments, expected in [
        ({"config": replace(usual, learning_rate=0.5)}, {"config.learning_rate"}),
        (
            {"config": replace(usual, objective=ObjectiveConfig(surrogate=Clip(high=0.3)))},
            {"config.objective.surrogate.high"},
        ),
        ({"config": replace(usual, device="cpu")}, set()),
        ({"policy": TablePolicy()}, set()),
        ({"policy": torch.nn.Linear(1, 1)}, {"policy"}),
        ({"reference_policy": TablePolicy()}, {"reference_policy"}),
        ({"reward_model": objective, "engine": OneProcess()}, {"reward_model"}),
        ({"objective": objective}, {"objective"}),
        ({"optimizer": sgd}, {"optimizer"}),  # its groups are compared when it is built
        ({"policy": Telling()}, {"policy", "policy.settings().sampling.temperature"}),
    ]:
        with subtests.test(expected=expected):
            assert differing(**arguments) == expected
    assert printed(settings(objective=objective))["objective"].startswith("objective(code=")
    assert settings(policy=TablePolicy())["policy"] == "TablePolicy"


class Telling:
    """A policy that says what must be equal on all ranks."""

    def settings(self) -> dict[str, Any]:
        return {"sampling": {"temperature": 0.5}}


def test_a_config_of_another_type_is_left_to_the_constructor() -> None:
    assert comparable_settings({"config": None}) == {}


def test_arguments_of_train_are_compared_where_ranks_would_meet_at_different_places() -> None:
    arguments: dict[str, Any] = {"self": 1, "states": [1, 2], "sinks": [3], "progress": True, "num_iterations": 4}
    arguments["demonstrations"] = ExperienceBatch.from_demonstrations(["a"] * 3, [0] * 3)
    found = comparable_arguments({**arguments, "eval_states": [1], "evaluation": None, "checkpoint_dir": None})
    words = {name: repr(value) for name, value in found.items()}
    assert words == {
        "num_iterations": "4",
        "eval_states": "given",
        "evaluation": "None",
        "checkpoint_dir": "None",
        "the number of states": "2",
        "the number of demonstrations": "3",
    }
    source = comparable_arguments(
        {**arguments, "states": iter([]), "eval_states": None, "evaluation": max, "checkpoint_dir": "x"}
    )
    assert (source["the number of states"], repr(source["checkpoint_dir"])) == ("list_iterator", "given")


class Listening(SeveralProcesses):
    """Two ranks with equal values. Whatever is shared is raised as a `RankError`."""

    num_ranks = 2

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        return 2 * values

    def gather(self, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
        return torch.cat([rows, rows]), 0

    def gather_objects(self, value: Any) -> list[Any]:
        return [value, value]

    def agree(self, error: BaseException | None = None) -> None:
        if error is not None:
            raise RankError(f"shared {type(error).__name__}") from error


def trainer_of(policy: Any, **arguments: Any) -> GRPOTrainer:
    config = GRPOConfig(group_size=2, seed=0)
    return GRPOTrainer(
        config=config, policy=policy, reward_model=lambda s, a: [1.0] * len(s), engine=Listening(), **arguments
    )


def test_every_method_of_the_trainer_shares_its_errors(subtests: pytest.Subtests, tmp_path: Any) -> None:
    trainer = trainer_of(TablePolicy())
    batch = trainer.collect(["a"])
    with subtests.test("constructor"), pytest.raises(RankError, match="shared ProtocolError"):
        trainer_of(None)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError

    trainer.sampler.sync = trainer.collector.complete = trainer.policy.get_parameters = broken  # type: ignore[method-assign]
    for name, call in {
        "step": lambda: trainer.step(["a"]),
        "collect": lambda: trainer.collect(["a"]),
        "prepared": lambda: trainer.prepared(replace(batch)),
        "update": lambda: trainer.update(batch),
        "evaluate": lambda: trainer.evaluate(["a"]),
        "train": lambda: trainer.train(["a", "b"], num_iterations=1, progress=False),
        "save_checkpoint": lambda: trainer.save_checkpoint(tmp_path / "a"),
    }.items():
        with subtests.test(name), pytest.raises(RankError, match=r"shared (ZeroDivisionError|RankError)"):
            call()
    with subtests.test("load_checkpoint"), pytest.raises(RankError, match="shared CheckpointError"):
        trainer.load_checkpoint(tmp_path / "missing")


USER = """
import copy, sys, tempfile, warnings
import torch
from grpo import ExperienceBatch, GRPOConfig, GRPOTrainer, ObjectiveConfig
from tests.support.policies import TablePolicy

def trainer(group_size):
    policy = TablePolicy()
    policy.extra = torch.nn.Parameter(torch.zeros(2))
    config = GRPOConfig(group_size=group_size, objective=ObjectiveConfig(kl_estimator="k1", kl_coef=0.1))
    how = {"reference_policy": copy.deepcopy(policy), "optimizer": torch.optim.SGD([policy.logits], lr=0.1)}
    return GRPOTrainer(config=config, policy=policy, reward_model=lambda s, a: [1.0] * len(s), **how)

folder = tempfile.mkdtemp()
with warnings.catch_warnings(record=True) as given:
    warnings.simplefilter("always")
    first = trainer(2)
    first.train(["a", "b"], num_iterations=1, progress=False, checkpoint_dir=folder)
    first.load_checkpoint(folder)
    first.train(["a", "b"], num_iterations=1, progress=False, checkpoint_dir=folder, resume="auto")
    trainer(3).load_checkpoint(folder)
for warning in given:
    print(f"{warning.filename}: {str(warning.message)[:20]}")
"""


@pytest.mark.slow
def test_warnings_name_the_line_of_the_user(tmp_path: Path) -> None:
    """The decorators of the trainer's methods are frames between the user and the warning. Type checks would add more."""
    script = tmp_path / "user.py"
    script.write_text(USER)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 6, lines  # two of each constructor, nothing left to do, changed settings
    assert [line for line in lines if not line.startswith(f"{script}: ")] == []


def test_the_trainer_tells_the_other_ranks_that_a_failing_reward_makes_it_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[float, str]] = []
    monkeypatch.setattr(Listening, "waiting", lambda self, *wait: told.append(wait) or nullcontext(), raising=False)
    fails = [True]

    def judge(states: Any, actions: Any) -> list[float]:
        if fails.pop() if fails else False:
            raise ConnectionError
        return [1.0] * len(actions)

    config = GRPOConfig(group_size=2, seed=0, reward=RewardConfig(num_retries=1, retry_delay=0.01))
    trainer = GRPOTrainer(config=config, policy=TablePolicy(), reward_model=judge, engine=Listening())
    trainer.collect(["a"])
    assert told == [(0.01, "judge failed, and is called again later (reward.num_retries)")]


def test_train_compares_its_arguments_with_their_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(TablePolicy())
    asked: list[Any] = []
    monkeypatch.setattr(trainer.engine, "gather_objects", lambda value: asked.append(value) or [value, value])
    trainer.train(["a", "b"], num_iterations=1, progress=False)
    compared = asked[0]
    assert compared["keep_last"] == "3"
    assert compared["num_iterations"] == "1"
    assert "sinks" not in compared
    assert "progress" not in compared
