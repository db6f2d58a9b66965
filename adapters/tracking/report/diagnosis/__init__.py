"""What a run's numbers say, in words."""

from .findings import Finding
from .reward_rules import reward_change
from .rules import diagnose

__all__ = ["Finding", "diagnose", "reward_change"]
