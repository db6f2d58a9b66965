"""The trainer on several ranks: which arguments must be equal, and that every method shares its errors."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from grpo import ExperienceBatch, GRPOConfig, GRPOTrainer, ObjectiveConfig, RewardConfig
from grpo._common.global_state import capture_random_state, restore_random_state
from grpo._ranks.equality import comparable_settings, printed
from grpo._ranks.processes import SeveralProcesses
from grpo._running.other_ranks import for_other_ranks
from grpo._running.ranks import comparable_arguments
from grpo.checkpoint import Checkpoint
from grpo.engine import OneProcess
from grpo.errors import CheckpointError, GRPOWarning, RankError
from grpo.surrogates import Clip
from tests.support.imitated_ranks import Twin
from tests.support.launches import printed_by
from tests.support.policies import TablePolicy


def settings(**arguments: Any) -> dict[str, Any]:
    return comparable_settings({"config": GRPOConfig(), "policy": TablePolicy(), "optimizer": None, **arguments})


def differing(**arguments: Any) -> set[str]:
    """The names under which these arguments differ from the usual ones."""
    usual, other = printed(settings()), printed(settings(**arguments))
    return {name for name in usual | other if usual.get(name) != other.get(name)}


def objective(inputs: Any) -> Any:
    return inputs


class Telling:
    """A policy that says what must be equal on all ranks."""

    def settings(self) -> dict[str, Any]:
        return {"sampling": {"temperature": 0.5}}


USUAL, SGD = GRPOConfig(), torch.optim.SGD([torch.zeros(1)], lr=0.5)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"config": replace(USUAL, learning_rate=0.5)}, {"config.learning_rate"}),
        (
            {"config": replace(USUAL, objective=ObjectiveConfig(surrogate=Clip(high=0.3)))},
            {"config.objective.surrogate.high"},
        ),
        ({"config": replace(USUAL, device="cpu")}, set()),
        ({"policy": TablePolicy()}, set()),
        ({"policy": torch.nn.Linear(1, 1)}, {"policy"}),
        ({"reference_policy": TablePolicy()}, {"reference_policy"}),
        ({"reward_model": objective, "engine": OneProcess()}, {"reward_model"}),
        ({"objective": objective}, {"objective"}),
        ({"optimizer": SGD}, {"optimizer"}),  # its groups are compared when it is built
        ({"policy": Telling()}, {"policy", "policy.settings().sampling.temperature"}),
    ],
)
def test_settings_of_ranks_are_compared_by_their_full_names(arguments, expected):
    assert differing(**arguments) == expected


def test_functions_are_compared_by_their_code_and_a_config_of_another_type_is_left_to_the_constructor() -> None:
    assert printed(settings(objective=objective))["objective"].startswith("objective(code=")
    assert settings(policy=TablePolicy())["policy"] == "TablePolicy"
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
    others = {"states": iter([]), "eval_states": None, "evaluation": max, "checkpoint_dir": "x"}
    source = comparable_arguments({**arguments, **others})
    assert (source["the number of states"], repr(source["checkpoint_dir"])) == ("list_iterator", "given")


class Listening(Twin):
    """Whatever is shared is raised as a `RankError`."""

    def agree(self, error: BaseException | None = None) -> None:
        if error is not None:
            raise RankError(f"shared {type(error).__name__}") from error


def trainer_of(policy: Any, **arguments: Any) -> GRPOTrainer:
    arguments = {"reward_model": lambda s, a: [1.0] * len(s), "config": GRPOConfig(group_size=2, seed=0), **arguments}
    return GRPOTrainer(policy=policy, engine=Listening(), **arguments)


@pytest.mark.parametrize(
    "call",
    [
        lambda trainer, batch: trainer.step(["a"]),
        lambda trainer, batch: trainer.collect(["a"]),
        lambda trainer, batch: trainer.prepared(replace(batch)),
        lambda trainer, batch: trainer.update(batch),
        lambda trainer, batch: trainer.evaluate(["a"]),
        lambda trainer, batch: trainer.train(["a", "b"], num_iterations=1, progress=False),
        lambda trainer, batch: trainer.save_checkpoint("never written"),
    ],
)
def test_every_method_of_the_trainer_shares_its_errors(call):
    trainer = trainer_of(TablePolicy())
    batch, broken = trainer.collect(["a"]), Mock(side_effect=ZeroDivisionError)
    trainer.sampler.sync = trainer.collector.complete = trainer.policy.get_parameters = broken  # type: ignore[method-assign]
    with pytest.raises(RankError, match=r"shared (ZeroDivisionError|RankError)"):
        call(trainer, batch)


def test_the_constructor_and_a_missing_checkpoint_share_their_errors(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="shared ProtocolError"):
        trainer_of(None)
    with pytest.raises(RankError, match="shared CheckpointError"):
        trainer_of(TablePolicy()).load_checkpoint(tmp_path / "missing")


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
    lines = printed_by(script).splitlines()
    assert len(lines) == 6, lines  # two of each constructor, nothing left to do, changed settings
    assert [line for line in lines if not line.startswith(f"{script}: ")] == []


def test_the_trainer_tells_the_other_ranks_that_a_failing_reward_makes_it_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[float, str]] = []
    monkeypatch.setattr(Listening, "waiting", lambda self, *wait: told.append(wait) or nullcontext(), raising=False)
    answers = iter([ConnectionError, None])

    def judge(states: Any, actions: Any) -> list[float]:
        if error := next(answers):
            raise error
        return [1.0] * len(actions)

    config = GRPOConfig(group_size=2, seed=0, reward=RewardConfig(num_retries=1, retry_delay=0.01))
    trainer_of(TablePolicy(), config=config, reward_model=judge).collect(["a"])
    assert told == [(0.01, "judge failed, and is called again later (reward.num_retries)")]


def test_train_compares_its_arguments_with_their_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = trainer_of(TablePolicy())
    asked: list[Any] = []
    monkeypatch.setattr(trainer.engine, "gather_objects", lambda value: asked.append(value) or [value, value])
    trainer.train(["a", "b"], num_iterations=1, progress=False)
    assert (asked[0]["keep_last"], asked[0]["num_iterations"]) == ("3", "1")
    assert not {"sinks", "progress"} & set(asked[0])


# What belongs to a rank and not to the run, when another number of ranks continues a run


WAITING = {"rows": {"group_ids": torch.zeros(4, dtype=torch.long)}}
"""An iteration of four rows that was sampled ahead."""


class Rank(SeveralProcesses):
    """One of several ranks. It never meets the others."""

    rank = num_ranks = 0

    def __init__(self, rank: int, num_ranks: int) -> None:
        self.rank, self.num_ranks = rank, num_ranks


def written_by(num_ranks: int, iteration: int = 5, rows: Any = None, num_ahead: int = 0) -> Checkpoint:
    """A checkpoint in memory. Its files are not needed."""
    checkpoint = object.__new__(Checkpoint)
    counters = {"data_seed": 3, "iteration": iteration}
    parts = {"replay": {"rows": ["old"]}, "policy": {"calls": 2}, "counters": counters, "in_progress": {"rows": rows}}
    parts |= {"ahead": {"pending": [WAITING] * num_ahead}, "progress": {"num_draws": 9, "best_score": 0.5}}
    whole = {"random": {"torch": "saved"}, "parts": parts}
    for name, value in {"path": Path("run"), "num_ranks": num_ranks, "state": whole}.items():
        object.__setattr__(checkpoint, name, value)
    return checkpoint


def test_the_same_number_of_ranks_continues_exactly_and_another_one_needs_a_finished_iteration() -> None:
    checkpoint = written_by(2, rows={"num_planned": 1})
    assert for_other_ranks(checkpoint, Rank(1, 2)) is checkpoint.state
    message = r"written by 2 ranks in the middle of an iteration, and 4 load it[.] Start 2 ranks"
    with pytest.raises(CheckpointError, match=message):
        for_other_ranks(checkpoint, Rank(0, 4))


def test_fewer_ranks_continue_their_own_states_and_say_what_is_left_out() -> None:
    checkpoint = written_by(4)
    message = r"run was written by 4 ranks, and 2 load it.*of the ranks from 2 on are left out"
    with pytest.warns(GRPOWarning, match=message):
        assert for_other_ranks(checkpoint, Rank(1, 2)) == checkpoint.state


def test_new_ranks_have_new_generators_and_nothing_to_replay() -> None:
    drawn = set()
    for iteration, rank in ((5, 2), (5, 3), (6, 2)):
        checkpoint, before = written_by(2, iteration), capture_random_state()
        with pytest.warns(GRPOWarning, match="the ranks from 2 on have new random generators and no replayed rows"):
            state = for_other_ranks(checkpoint, Rank(rank, 4))
        assert torch.equal(capture_random_state()["torch"], before["torch"])  # only the checkpoint's are replaced
        assert state["parts"] == checkpoint.state["parts"] | {"replay": {"rows": []}}
        assert checkpoint.state["parts"]["replay"] == {"rows": ["old"]}
        restore_random_state(state["random"])
        drawn.add(float(torch.rand(())))
        restore_random_state(before)
    assert len(drawn) == 3
    with pytest.warns(GRPOWarning, match="the ranks from 2 on have new"):
        assert for_other_ranks(written_by(2), Rank(1, 4))["random"] == {"torch": "saved"}


@pytest.mark.parametrize(("before", "others"), [(1, [(0, 2), (1, 2)]), (2, [(0, 1), (1, 4), (3, 4)])])
def test_iterations_that_were_sampled_ahead_are_sampled_again_in_the_same_states(before, others):
    checkpoint = written_by(before, num_ahead=3)
    assert for_other_ranks(checkpoint, Rank(0, before))["parts"]["ahead"] == {"pending": [WAITING] * 3}
    message = r"and 3 iterations that were sampled ahead \(12 rows per rank\) are sampled again[.]"
    for rank, now in others:
        with pytest.warns(GRPOWarning, match=message):
            parts = for_other_ranks(checkpoint, Rank(rank, now))["parts"]
        assert (parts["ahead"], parts["progress"]) == ({"pending": []}, {"num_draws": 6, "best_score": 0.5})
    assert checkpoint.state["parts"]["progress"]["num_draws"] == 9
