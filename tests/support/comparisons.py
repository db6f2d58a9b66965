"""Policies whose actions are fixed, measured and compared without a progress bar."""

from typing import Any

from grpo import compare_policies, measure_policy
from grpo.evaluation import ComparisonReport, PolicyMeasurement
from tests.support.policies import TablePolicy

STATES = ["up", "down", "same"]
# reward = action: means .25, 1, .5 before, and .75, .5, .5 after
BEFORE = [[0, 0, 1, 0], [1, 1, 1, 1], [1, 0, 1, 0]]
AFTER = [[1, 1, 1, 0], [1, 0, 0, 1], [0, 0, 1, 1]]


def action_itself(states: Any, actions: Any) -> list[float]:
    return [float(action) for action in actions]


def paying(*rewards: Any) -> Any:
    """Action k pays `rewards[k]`."""
    return lambda states, actions: [rewards[action] for action in actions]


def scripted(script: list[list[int]], states: Any = STATES) -> TablePolicy:
    return TablePolicy(states, script=script)


def compared(before: Any, after: Any, reward_model: Any = action_itself, **options: Any) -> ComparisonReport:
    """Scripted policies side by side; as many actions as the scripts have."""
    states = STATES[: len(before)]
    options = {"num_actions_per_state": len(before[0]), "progress": False, **options}
    return compare_policies(scripted(before, states), scripted(after, states), states, reward_model, **options)


def measured(policy: Any, states: Any = STATES, reward_model: Any = action_itself, **options: Any) -> PolicyMeasurement:
    return measure_policy(policy, states, reward_model, **{"progress": False, **options})


def of_many(num_states: int, reward_model: Any = action_itself, seed: int = 0) -> ComparisonReport:
    """State k goes from action 0 to action k."""
    states = [f"gains {k}" for k in range(num_states)]
    sides = [scripted([[0]] * num_states, states), scripted([[k] for k in range(num_states)], states)]
    return compare_policies(*sides, states, reward_model, num_actions_per_state=1, seed=seed, progress=False)
