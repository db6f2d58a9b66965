"""Rewards from judges: a function, usually a language model, that ranks a group's actions or scores them by a rubric.

trainer = GRPOTrainer(policy=policy, reward_model=ListwiseJudge(rank), config=config)

Measure a judge on pairs with known answers first: `print(measure_judge(ListwiseJudge(rank), pairs))`. `docs/judges.md` is the
guide.
"""

from .calibration import JudgeReport, KnownPair, measure_judge
from .listwise import ListwiseJudge
from .rubric import RubricJudge

__all__ = ["JudgeReport", "KnownPair", "ListwiseJudge", "RubricJudge", "measure_judge"]
