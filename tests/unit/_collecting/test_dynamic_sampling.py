"""Groups without differences are left out, and others drawn in their place: bounded, and counted."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo import ExperienceBatch, GRPOConfig, GRPOTrainer
from grpo._collecting.dynamic_sampling import collect_live_groups
from grpo.errors import GRPOWarning
from tests.support.policies import TablePolicy

STATES = list(range(8))
WITHOUT_MORE_STATES = r"step\(\) does not honour config\.dynamic_sampling_rounds=\d \(without more_states\)"


class Scripted(TablePolicy):
    """Every group is the actions 0 and 1; remembers the states it acted in."""

    def __init__(self) -> None:
        super().__init__(STATES)
        self.drawn: list[list[int]] = []

    def generate_actions(self, states: Any, num_actions_per_state: int, **kwargs: Any) -> Any:
        self.drawn.append(list(states))
        return [[0, 1] for _ in states]


def odd_states_differ(states: Any, actions: Any) -> list[float]:
    """Rewards differ in groups of odd states only: 0 and 1 there, 0.3 twice elsewhere."""
    return [float(action) if state % 2 else 0.3 for state, action in zip(states, actions, strict=True)]


def trainer_of(rounds: int, reward: Any = odd_states_differ, **settings: Any) -> tuple[GRPOTrainer, Scripted]:
    policy = Scripted()
    config = GRPOConfig(group_size=2, dynamic_sampling_rounds=rounds, **settings)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    return GRPOTrainer(config=config, policy=policy, reward_model=reward, optimizer=optimizer), policy


def test_dead_groups_are_replaced_until_the_batch_is_full() -> None:
    trainer, _ = trainer_of(rounds=5)
    further = iter([[2, 3], [5, 7], [1, 1]])
    batch = trainer.collect([0, 1, 4], more_states=lambda: next(further))
    # 0 and 4 are dead, so is 2; 1, 3 and 5 fill the three places, and 7 is one too many
    assert batch.states == [1, 1, 3, 3, 5, 5]
    assert batch.group_ids.tolist() == [0, 0, 1, 1, 2, 2]
    assert batch.metrics["group_stats/num_drawn"] == 7
    assert batch.metrics["group_stats/num_rounds"] == 2
    assert batch.metrics["group_stats/num_left_out"] == 4
    # of seven groups, 1, 3, 5 and 7 have the mean 1/2, and 0, 4 and 2 have 0.3
    assert batch.metrics["rewards/mean_drawn"] == pytest.approx((4 * 0.5 + 3 * 0.3) / 7)
    assert next(further) == [1, 1]


def test_sampling_stops_after_the_allowed_rounds_with_fewer_groups() -> None:
    trainer, policy = trainer_of(rounds=2)
    batch = trainer.collect([0, 1, 4], more_states=lambda: [6])
    assert len(policy.drawn) == 3
    assert batch.states == [1, 1]
    metrics = trainer.update(batch)
    assert metrics["group_stats/num_groups"] == 1
    assert metrics["group_stats/zero_variance_fraction"] == 0


def test_a_batch_without_dead_groups_draws_no_further_states() -> None:
    trainer, policy = trainer_of(rounds=2)
    batch = trainer.collect([1, 3], more_states=lambda: pytest.fail("nothing is missing"))
    assert batch.states == [1, 1, 3, 3]
    assert batch.metrics["group_stats/num_rounds"] == 0
    assert policy.drawn == [[1, 3]]


def test_if_all_groups_stay_dead_the_last_batch_is_returned() -> None:
    trainer, policy = trainer_of(rounds=1)
    before = policy.logits.detach().clone()
    metrics = trainer.step([0, 2], more_states=lambda: [4])
    assert metrics["group_stats/zero_variance_fraction"] == 1
    assert metrics["group_stats/num_left_out"] == 3
    assert torch.equal(policy.logits, before)


def test_a_step_without_further_states_only_leaves_dead_groups_out() -> None:
    trainer, policy = trainer_of(rounds=3)
    with pytest.warns(GRPOWarning, match=WITHOUT_MORE_STATES):
        metrics = trainer.step([0, 1])
    assert policy.drawn == [[0, 1]]
    assert metrics["group_stats/num_groups"] == 1


def test_left_out_groups_do_not_count_in_the_mean_of_the_loss() -> None:
    """The gradient is that of the live group alone: twice what it would be among two groups."""
    filtered, policy = trainer_of(rounds=1)
    with pytest.warns(GRPOWarning, match=WITHOUT_MORE_STATES):
        filtered.step([0, 1])
    alone, other = trainer_of(rounds=0)
    alone.step([1])
    assert torch.equal(policy.logits, other.logits)
    assert not torch.equal(policy.logits, torch.zeros_like(policy.logits))


def test_train_takes_further_draws_from_its_own_states() -> None:
    """With one state per draw, an iteration that meets an even state takes the next; none is seen twice in a pass."""
    trainer, policy = trainer_of(rounds=10, num_states_per_iteration=1, seed=3)
    trainer.train(STATES, num_iterations=4, progress=False)
    drawn = [state for states in policy.drawn for state in states]
    assert len(set(drawn[:8])) == len(drawn[:8])
    assert sum(state % 2 for state in drawn) == 4
    assert drawn[-1] % 2 == 1
    assert trainer.progress.num_draws == len(drawn)


def test_mean_drawn_sums_valid_steps_over_all_drawn_rows() -> None:
    """Rewards per step, with 50 behind the end of each row: rows of 3 and 4, then of 1 and 1 (dead), 11 in all for 5 rows."""
    drawn = iter(
        [
            ([[1.0, 2.0, 50.0], [4.0, 50.0, 50.0]], [[True, True, False], [True, False, False]]),
            ([[0.5, 0.5], [0.5, 0.5]], [[True, True], [True, True]]),
            ([[2.0, 50.0]], [[True, False]]),
        ]
    )

    def collect(states: Any) -> ExperienceBatch:
        rewards, mask = next(drawn)
        rows = [0] * len(rewards)
        batch = ExperienceBatch.from_rows(rows, rows, rewards, rows, mask=torch.tensor(mask))
        return replace(batch, rewards=torch.tensor(rewards))  # as a collector of the user's own may leave them

    batch = collect_live_groups(collect, [0, 1], lambda: [0], GRPOConfig(dynamic_sampling_rounds=2))
    assert batch.num_rows == 2
    assert batch.metrics["rewards/mean_drawn"] == pytest.approx((3.0 + 4.0 + 1.0 + 1.0 + 2.0) / 5)
    assert batch.metrics["group_stats/num_drawn"] == 3
