"""Did training help? Measure what a policy earns, and compare two measurements state by state.

before = measure_policy(policy, states, reward_model)   # training changes the policy in place, so measure it first
trainer.train(training_states, num_iterations=100)
print(compare_policies(before, policy, states, reward_model))
"""

from .attempts import AtK, Estimate, pass_at_k
from .comparison import compare_policies, paired_interval
from .measurement import Answer, PolicyMeasurement, measure_policy
from .report import ComparisonReport, StateComparison

__all__ = [
    "Answer", "AtK", "ComparisonReport", "Estimate", "PolicyMeasurement", "StateComparison", "compare_policies",
    "measure_policy", "paired_interval", "pass_at_k",
]  # fmt: skip
