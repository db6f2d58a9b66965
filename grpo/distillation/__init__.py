"""Distillation: the policy acts, and a teacher says how likely it would have done the same.

config = dataclasses.replace(presets.on_policy_distillation(), learning_rate=1e-3)
trainer = GRPOTrainer(config=config, policy=student, reference_policy=teacher, reward_model=no_reward)

A teacher is any policy with `get_log_probabilities`, or a function: `Teacher(log_probs)`. It is passed as the reference, and
the KL to it is the whole loss. `docs/distillation.md` is the guide.
"""

from .exact import exact_kl
from .teachers import Hinted, Teacher, Teachers, no_reward

__all__ = ["Hinted", "Teacher", "Teachers", "exact_kl", "no_reward"]
