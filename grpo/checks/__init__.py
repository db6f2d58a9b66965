"""The conformance kit: run it on your own policy and reward model before training, as `check_env` on an environment.

report = check_policy(policy, states)
print(report)                # a table: what holds, what is broken and how to mend it, what could not be looked at
report.raise_for_failures()
"""

from .kit import check_policy, check_reward_model
from .report import CheckReport, CheckResult

__all__ = ["CheckReport", "CheckResult", "check_policy", "check_reward_model"]
