"""Settings that meet in one run: critics, state keys, dynamic sampling, replay, failing rewards, and groups by a key."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch

from grpo import (
    ActionScores,
    ConfigError,
    ContractError,
    ExperienceBatch,
    GRPOConfig,
    GRPOTrainer,
    ObjectiveOutput,
    PairwiseRewards,
)
from grpo.config import AdvantageConfig, EntropyControl, ObjectiveConfig, RewardConfig
from grpo.evaluation.measurement import measured_rows
from grpo.rewards import WeightedRewards
from tests.support.bad_input_places import Grouping, Plain
from tests.support.objective_inputs import as_users_run_it
from tests.support.policies import Critic, RowScoring, TablePolicy
from tests.support.trainers import by_hand, trainer_of

DROP = RewardConfig(non_finite="drop")


def totals(states: Any, actions: Any) -> list[float]:
    return [float(sum(action)) for action in actions]


class Keyed(RowScoring):
    """Always writes the same four rows, and all steps share one state. Keys are as wide as the given rows."""

    def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> Any:
        return [[(1, 1, 1), (1, 0), (1,), (0,)] for _ in states]

    def state_keys(self, states: Any, actions: Any) -> torch.Tensor:
        return torch.zeros(len(actions), max(map(len, actions)), dtype=torch.int64)


def test_the_values_of_a_critic_at_collection_do_not_change_in_updates() -> None:
    trainer = trainer_of(Critic(), totals, num_epochs_per_update=2, seed=0, advantage=AdvantageConfig(credit="gae"))
    batch = trainer.collect([0, 1])
    before = batch.values.clone()
    trainer.update(batch)
    assert torch.equal(batch.values, before)
    assert not torch.equal(trainer.policy.value, torch.zeros(4))


def test_state_keys_may_be_narrower_after_the_longest_row_was_dropped() -> None:
    def reward(states: Any, actions: Any) -> list[float]:
        return [math.nan if len(action) == 3 else float(action[0]) for action in actions]

    trainer = trainer_of(Keyed(), reward, advantage=AdvantageConfig(credit="gigpo"), reward=DROP)
    assert trainer.step([0, 1])["rows/dropped"] == 2


def test_state_keys_of_another_shape_are_refused() -> None:
    class Wrong(Keyed):
        def state_keys(self, states: Any, actions: Any) -> torch.Tensor:
            return super().state_keys(states, actions)[:, :1]

    trainer = trainer_of(Wrong(), totals, advantage=AdvantageConfig(credit="gigpo"))
    with pytest.raises(ContractError, match=r"Wrong.state_keys must return integers \[4, 3\]"):
        trainer.step([0])


def drawing(reward_model: Any, policy: Any = None, **settings: Any) -> GRPOTrainer:
    """A trainer with dynamic sampling."""
    settings = {"group_size": 2, "dynamic_sampling_rounds": 3, **settings}
    return trainer_of(policy or TablePolicy(range(4)), reward_model, **settings)


def test_dynamic_sampling_sees_differences_between_steps() -> None:
    """The totals are equal, the steps are not: the group stays."""
    policy = RowScoring()
    policy.generate_actions = lambda states, count, **_: [[(1, 2), (2, 1)] for _ in states]  # type: ignore[method-assign]
    trainer = drawing(lambda states, actions: [[1.0, 0.0], [0.0, 1.0]], policy)
    assert trainer.collect([0], more_states=lambda: pytest.fail("nothing is missing")).num_rows == 2


def test_dynamic_sampling_replaces_groups_whose_rewards_failed() -> None:
    trainer = drawing(lambda states, _: [math.nan if s == 0 else float(i) for i, s in enumerate(states)], reward=DROP)
    batch = trainer.collect([0, 1], more_states=lambda: [2])
    assert sorted(set(batch.states)) == [1, 2]
    assert batch.metrics["group_stats/num_rounds"] == 1


def test_dynamic_sampling_compares_clipped_rewards() -> None:
    """5 and 6 are the same once rewards are at most 1: the group teaches nothing, and is left out."""
    clipped = AdvantageConfig(reward_clip=1.0)
    trainer = drawing(lambda states, actions: [5.0, 6.0] if states[0] == 0 else [0.0, 1.0], advantage=clipped)
    batch = trainer.collect([0], more_states=lambda: [1])
    assert batch.states == [1, 1]
    assert batch.metrics["group_stats/num_left_out"] == 1


def test_dropped_rows_of_discarded_draws_are_counted_too() -> None:
    rewards = iter([[math.nan, 1.0, 1.0], [math.nan, 1.0, 1.0], [math.nan, 0.0, 1.0]])
    trainer = drawing(lambda states, actions: next(rewards), group_size=3, reward=DROP)
    batch = trainer.collect([0], more_states=lambda: [1])
    assert batch.metrics["group_stats/num_rounds"] == 2
    assert trainer.update(batch)["rows/dropped"] == 3


def test_rows_with_and_without_named_rewards_are_replayed_together() -> None:
    rewards = WeightedRewards({"x": lambda states, actions: [float(action) for action in actions]})
    trainer = trainer_of(TablePolicy(), rewards, group_size=2, replay_iterations=1, seed=0)
    trainer.update(ExperienceBatch.from_rows(["a", "a"], [0, 1], [0.0, 1.0], [0, 0]))
    assert trainer.step(["a", "b"])["rows/replayed"] == 2


def test_entropy_control_without_an_exact_entropy_is_refused_at_the_first_step() -> None:
    trainer = trainer_of(TablePolicy(), entropy_control=EntropyControl(target=0.5), seed=0)
    with pytest.raises(ConfigError, match=r"entropy_control needs an exact entropy, and TablePolicy gives none"):
        trainer.step(["a", "b"])


def test_a_critic_without_values_in_updates_is_refused() -> None:
    class SilentInUpdates(Critic):
        def score_actions(self, states: Any, actions: Any) -> ActionScores:
            scores = super().score_actions(states, actions)
            return dataclasses.replace(scores, values=None) if self.training else scores

    trainer = trainer_of(SilentInUpdates(), totals, group_size=2, advantage=AdvantageConfig(credit="gae"), seed=0)
    with pytest.raises(ContractError, match=r"the critic would not be trained"):
        trainer.step([0, 1])


def test_user_advantages_may_be_in_half_precision() -> None:
    trainer, _ = by_hand(advantages=lambda batch: (batch.rewards - 0.5).to(torch.bfloat16))
    assert trainer.step(["a", "b"])["train/num_updates"] == 1


def test_a_moved_reference_scores_replayed_rows_again() -> None:
    seen = []

    def objective(inputs: Any) -> ObjectiveOutput:
        seen.append(inputs.ref_log_probs)
        kl_penalty = torch.zeros(3, dtype=torch.float64)  # reported, so that nothing is said to be missing
        loss = -(inputs.log_probs.squeeze(1) * inputs.advantages).mean()
        return ObjectiveOutput(loss=loss, metrics={"kl_penalty": kl_penalty})

    reference, loss = TablePolicy(), ObjectiveConfig(kl_coef=0.1)
    config = {"replay_iterations": 1, "reference_sync_every": 1, "objective": loss, "max_grad_norm": 1.0}
    trainer, _ = by_hand(rewards=[1.0, 0.0, 0.0, 1.0], config=config, reference_policy=reference, objective=objective)
    trainer.step(["a", "b"])
    moved = reference.logits.detach().log_softmax(1)
    trainer.step(["a", "b"])
    new, replayed = seen[1][:4], seen[1][4:]
    assert torch.equal(new, replayed)  # the same states and actions: one reference, one answer
    assert torch.equal(replayed.squeeze(1), torch.stack([moved[0, 0], moved[0, 1], moved[1, 1], moved[1, 0]]))


# Which rows are a group: ids of any kind in rollouts of one's own, and states that share a group by a key


@pytest.mark.parametrize(("ids", "expected"), [
    *((ids, [7, 3, 7, 3]) for ids in ([7, 3, 7, 3], torch.tensor([7, 3, 7, 3]))),
    *((kind("baba"), [0, 1, 0, 1]) for kind in (list, tuple)),
    *((np.array([*"baba"], dtype=dtype), [0, 1, 0, 1]) for dtype in (None, object)),
    *((ids, [0, 1, 0, 1]) for ids in ([("q", 1), ("q", 2)] * 2, ["b", 1] * 2, list(np.array([*"baba"])))),
])  # fmt: skip
def test_integers_stay_as_they_are_and_other_ids_are_numbered_as_they_appear(ids: Any, expected: list[int]) -> None:
    batch = ExperienceBatch.from_rows([0] * 4, [0] * 4, [0.0, 1.0, 0.0, 1.0], ids)
    assert batch.group_ids.tolist() == expected


def place(states: Any, actions: Any) -> list[float]:
    return [float(number) for number in range(len(actions))]


def grouped(**arguments: Any) -> GRPOTrainer:
    given = {"config": GRPOConfig(group_size=2, seed=0), "policy": Plain(), "reward_model": place}
    return GRPOTrainer(**given | arguments)


def test_equal_states_at_two_places_share_a_group_only_by_a_key() -> None:
    """Rewards 0 to 5. By position the means are .5, 2.5, 4.5. With a key, "a" has the rewards 0, 1, 4, 5, of mean 2.5."""
    states = ["a", "b", "a"]
    alone = grouped().collect(states)
    assert alone.group_ids.tolist() == [0, 0, 1, 1, 2, 2]
    trainer = grouped(group_by=str)
    together = trainer.collect(states)
    assert together.group_ids.tolist() == [0, 0, 1, 1, 0, 0]
    assert trainer.advantages(together).tolist() == [-2.5, -1.5, -0.5, 0.5, 1.5, 2.5]
    assert trainer.step(states)["group_stats/num_groups"] == 2


def test_keys_may_be_any_hashable_value_of_a_row_or_a_tensor() -> None:
    rows = [{"prompt": "1+1", "id": 4}, {"prompt": "1+1", "id": 4}]
    assert grouped(group_by=lambda row: row["id"]).collect(rows).group_ids.tolist() == [0] * 4
    states = torch.tensor([[1.0, 2.0], [1.0, 3.0], [1.0, 2.0]])
    batch = grouped(group_by=lambda state: tuple(state.tolist())).collect(states)
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
    grouped(config=config, policy=Recording(), group_by=str).step(["a", "b", "a"])
    assert sorted(seen) == [["a"], ["a"], ["b"]]


def test_win_rates_are_compared_within_shared_groups_also_in_evaluations() -> None:
    """The actions are 0 and 1 for each state: in a group of 4, a 1 beats two 0s and ties with the other 1."""
    rewards = PairwiseRewards(
        lambda _, first, second: [0.5 + 0.5 * (a - b) for a, b in zip(first, second, strict=True)]
    )
    trainer = grouped(reward_model=rewards, group_by=str)
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
        grouped(group_by=group_by).collect(["a", "b"])
