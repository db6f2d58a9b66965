"""Which rows are a group: ids of any kind in rollouts of one's own, and states that share a group by a key."""

from typing import Any

import numpy as np
import pytest
import torch

from grpo import ConfigError, ExperienceBatch, GRPOConfig, GRPOTrainer, PairwiseRewards, group_relative_advantages
from grpo.evaluation.measurement import measured_rows
from tests.support.bad_input_places import Grouping, Plain
from tests.support.objective_inputs import as_users_run_it


@pytest.mark.parametrize(("ids", "expected"), [
    *((ids, [7, 3, 7, 3]) for ids in ([7, 3, 7, 3], torch.tensor([7, 3, 7, 3]))),
    *((kind("baba"), [0, 1, 0, 1]) for kind in (list, tuple)),
    *((np.array([*"baba"], dtype=dtype), [0, 1, 0, 1]) for dtype in (None, object)),
    *((ids, [0, 1, 0, 1]) for ids in ([("q", 1), ("q", 2)] * 2, ["b", 1] * 2, list(np.array([*"baba"])))),
])  # fmt: skip
def test_integers_stay_as_they_are_and_other_ids_are_numbered_as_they_appear(ids: Any, expected: list[int]) -> None:
    batch = ExperienceBatch.from_rows([0] * 4, [0] * 4, [0.0, 1.0, 0.0, 1.0], ids)
    assert batch.group_ids.tolist() == expected


def test_text_ids_give_the_advantages_of_the_same_groups() -> None:
    batch = ExperienceBatch.from_rows(["s"] * 4, [0, 1, 0, 1], [1.0, 4.0, 3.0, 0.0], ["x", "y", "x", "y"])
    found = group_relative_advantages(batch.total_rewards.float(), batch.group_ids)
    assert found.tolist() == [-1.0, 2.0, 1.0, -2.0]
    GRPOTrainer(config=GRPOConfig(), policy=Plain(), reward_model=lambda s, a: [0.0] * len(a)).update(batch)


def place(states: Any, actions: Any) -> list[float]:
    return [float(number) for number in range(len(actions))]


def trainer_of(**arguments: Any) -> GRPOTrainer:
    given = {"config": GRPOConfig(group_size=2, seed=0), "policy": Plain(), "reward_model": place}
    return GRPOTrainer(**given | arguments)


def test_equal_states_at_two_places_share_a_group_only_by_a_key() -> None:
    """Rewards 0 to 5. By position the means are .5, 2.5, 4.5. With a key, "a" has the rewards 0, 1, 4, 5, of mean 2.5."""
    states = ["a", "b", "a"]
    alone = trainer_of().collect(states)
    assert alone.group_ids.tolist() == [0, 0, 1, 1, 2, 2]
    trainer = trainer_of(group_by=str)
    together = trainer.collect(states)
    assert together.group_ids.tolist() == [0, 0, 1, 1, 0, 0]
    assert trainer.advantages(together).tolist() == [-2.5, -1.5, -0.5, 0.5, 1.5, 2.5]
    assert trainer.step(states)["group_stats/num_groups"] == 2


def test_keys_may_be_any_hashable_value_of_a_row_or_a_tensor() -> None:
    rows = [{"prompt": "1+1", "id": 4}, {"prompt": "1+1", "id": 4}]
    assert trainer_of(group_by=lambda row: row["id"]).collect(rows).group_ids.tolist() == [0] * 4
    states = torch.tensor([[1.0, 2.0], [1.0, 3.0], [1.0, 2.0]])
    batch = trainer_of(group_by=lambda state: tuple(state.tolist())).collect(states)
    assert batch.group_ids.tolist() == [0, 0, 1, 1, 0, 0]


def test_updates_keep_the_rows_of_a_shared_group_together() -> None:
    """Groups of 4 and 2 rows in updates of 2: a policy that scores groups gets one state per adjacent run."""
    seen: list[list[str]] = []

    class Recording(Grouping):
        def score_groups(self, states: Any, actions: Any) -> Any:
            if torch.is_grad_enabled():
                seen.append(list(states))
            return super().score_groups(states, actions)

    config = GRPOConfig(group_size=2, batch_size=2, seed=0)
    trainer_of(config=config, policy=Recording(), group_by=str).step(["a", "b", "a"])
    assert sorted(seen) == [["a"], ["a"], ["b"]]


def test_win_rates_are_compared_within_shared_groups_also_in_evaluations() -> None:
    """The actions are 0 and 1 for each state: in a group of 4, a 1 beats two 0s and ties with the other 1."""
    rewards = PairwiseRewards(
        lambda _, first, second: [0.5 + 0.5 * (a - b) for a, b in zip(first, second, strict=True)]
    )
    trainer = trainer_of(reward_model=rewards, group_by=str)
    assert trainer.collect(["a", "a"]).rewards.tolist() == pytest.approx([1 / 6, 5 / 6] * 2)
    rows, _ = measured_rows(trainer.collector, ["a", "a"], 2)
    assert rows.group_ids.tolist() == [0] * 4


HASHABLE = "group_by must return a hashable value.*got {} for state 0"


@pytest.mark.parametrize(("group_by", "message"), [
    (lambda state: [state], HASHABLE.format("a list of 1 str")),
    (lambda state: torch.tensor(1.0), HASHABLE.format(r"\[\] float32")),
    (lambda state: np.zeros(2), HASHABLE.format(r"a numpy array \[2\] float64")),
    ("prompt", "group_by must be a function of a state, or None; got str 'prompt'"),
])  # fmt: skip
def test_wrong_keys_and_functions_are_refused(group_by: Any, message: str) -> None:
    with as_users_run_it(), pytest.raises(ConfigError, match=message):
        trainer_of(group_by=group_by).collect(["a", "b"])
