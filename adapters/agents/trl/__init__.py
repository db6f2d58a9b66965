"""TRL: our rewards and environments in TRL's `GRPOTrainer`, and our settings run by it. TRL is imported when it is used."""

from .handover import trl_environment, trl_reward_functions
from .settings import SETTINGS, Setting, settings_table
from .training import train_with_trl

__all__ = ["SETTINGS", "Setting", "settings_table", "train_with_trl", "trl_environment", "trl_reward_functions"]
