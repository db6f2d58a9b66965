"""One call of a judge scores an action by the named parts of a rubric."""

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from grpo._common.calls import Call
from grpo._common.conversion import describe, require_lengths
from grpo._rewarding.parts import PlannedCalls, ask
from grpo.errors import ConfigError
from grpo.reward_model_base import Rewards

from .answers import Judge, MalformedError


class RubricJudge(Judge):
    """A weighted score of named parts, from a judge that fills in a rubric for one action per call.

        R = sum over the parts k that apply of w[k] s[k] / sum over those with w[k] > 0 of w[k]

    `judge(state, action)` returns a score from 0 to 1 for each part, `{"right": 1, "clear": 0.5}`, and None for a part that
    does not apply to the action. A weight below 0 takes points away, such as for an invented source. An action that has all
    that is wanted and nothing else has R = 1. The trainer reports each part as `rewards/NAME/{mean,std,applies}`.

    An answer without a score from 0 to 1 for each part loses its row (`judge/malformed`), and so does a call that raises
    (`judge/failed`). If all calls fail, the error is raised, and `RewardConfig` says what happens. An action to which no part
    with a weight above 0 applies has no reward, which `RewardConfig.non_finite` handles.

    Args:
        judge: The function, which may be `async def`. The calls for several actions are awaited together.
        weights: Name of the part -> weight. Larger: the part counts more.

    Raises:
        ConfigError: `judge` is no function of two arguments, a weight is no finite number, or no weight is above 0.

    Example:
        >>> judge = RubricJudge(lambda state, action: {"right": action == "4", "short": 0.5}, {"right": 3.0, "short": 1.0})
        >>> judge.compute_rewards(["2 + 2"] * 2, ["4", "5"]).values.tolist()
        [0.875, 0.125]

    Source:
        Gunjal et al. 2025 (Rubrics as Rewards), arXiv:2507.17746: explicit aggregation.
    """

    arguments: ClassVar[str] = "(state, action)"
    returns: ClassVar[str] = "It returns a score from 0 to 1, or None, for each part of the rubric, by name."

    def __init__(self, judge: Callable[[Any, Any], Any], weights: Mapping[str, float]) -> None:
        super().__init__(judge)
        given: Any = weights
        if not isinstance(given, Mapping):
            raise ConfigError(f"RubricJudge: weights must be a dict by name; got {describe(weights)}.")
        for name, weight in given.items():
            if not _is_number(weight) or not math.isfinite(weight):
                raise ConfigError(
                    f"RubricJudge: the weight of {name!r} must be a finite number; got {describe(weight)}."
                )
        if not any(weight > 0 for weight in weights.values()):
            raise ConfigError(
                f"RubricJudge: a weight must be above 0, so that something can be earned; got {dict(weights)}."
            )
        self.weights = {name: float(weight) for name, weight in weights.items()}

    def compute_rewards(self, states: Any, actions: Any) -> Rewards:
        """Call the judge without a deadline, and return the rewards with their parts.

        Raises:
            RewardError: No answer fills in the rubric.
            Exception: What the judge raised, if it raised for every action.
        """
        rewards: Rewards = ask(self, states, actions)
        return rewards

    def plan_calls(self, states: Any, actions: Any) -> PlannedCalls:
        """One call for each action."""
        num_rows = len(states)
        require_lengths("RubricJudge", num_rows, actions=actions)
        function = self.guarded()
        calls = [
            Call(name=self.__name__, function=function, arguments=(states[row], actions[row]))
            for row in range(num_rows)
        ]

        def rewards(answers: list[Any]) -> Rewards:
            found, lost = self.readings(answers, lambda _, answer: self._scores(answer))
            scores = torch.full((num_rows, len(self.weights)), torch.nan, dtype=torch.float64)
            for row, of_row in found.items():
                scores[row] = torch.tensor(of_row, dtype=torch.float64)
            weights = torch.tensor([*self.weights.values()], dtype=torch.float64)
            possible = (~scores.isnan() * weights.clamp(min=0.0)).sum(1)
            values = (scores.nan_to_num(0.0) @ weights) / possible
            missing = {name: torch.zeros(num_rows, dtype=torch.bool) for name in lost}
            for name, rows in lost.items():
                missing[name][rows] = True
            return Rewards(
                torch.where(possible > 0, values, torch.nan),
                components=dict(zip(self.weights, scores.T, strict=True)),
                weights=self.weights,
                lost=missing,
            )

        return PlannedCalls(calls=calls, combine=rewards)

    def _scores(self, answer: Any) -> list[float]:
        """The scores in the order of the weights. NaN: the part does not apply."""
        required = f"the answer must have a score for each of {sorted(self.weights)}"
        if not isinstance(answer, Mapping) or set(answer) != set(self.weights):
            names = f"the names {sorted(map(str, answer))}" if isinstance(answer, Mapping) else describe(answer)
            raise MalformedError(f"{required}; got {names}.")
        scores = [math.nan if answer[name] is None else _as_number(answer[name]) for name in self.weights]
        for name, score in zip(self.weights, scores, strict=True):
            if not _is_number(score) or not (math.isnan(score) or 0 <= score <= 1):
                raise MalformedError(
                    f"the score of {name!r} must be from 0 to 1, or None; got {describe(answer[name])}."
                )
        return [float(score) for score in scores]


def _as_number(score: Any) -> Any:
    """The number of a tensor without an axis: a comparison such as `action == 4` is one if actions are tensors."""
    return score.item() if isinstance(score, torch.Tensor) and score.dim() == 0 else score


def _is_number(value: Any) -> bool:
    """Whether a value is a number, or True or False, which a judge may say of a part."""
    return isinstance(value, int | float | np.number | np.bool_)
