"""The conformance kit: run it on your own policy, reward model and loss before training, like Gymnasium's `check_env`.

report = check_policy(policy, states)
print(report)                # a table: which rules hold, which are broken and how to fix them, which were skipped and why
report.raise_for_failures()
"""

from .kit import check_policy, check_reward_model
from .objective import check_objective
from .report import CheckReport, CheckResult

__all__ = ["CheckReport", "CheckResult", "check_objective", "check_policy", "check_reward_model"]
