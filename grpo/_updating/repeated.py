"""An update whose forward and backward passes ran out of memory is repeated with fewer rows per pass."""

from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol, TypeVar, runtime_checkable

from grpo.experience_collector import ExperienceCollector
from grpo.metrics import Meter

from .optimizer_step import OptimizerStep
from .update import Update


@runtime_checkable
class AddsGradients(Protocol):
    """What has to be put back before a repetition."""

    policy: Any
    collector: ExperienceCollector
    meter: Meter
    optimizer_step: OptimizerStep


LearnerT = TypeVar("LearnerT", bound=AddsGradients)


def repeated_with_fewer_rows(add_gradients: Callable[[LearnerT, Update], None]) -> Callable[[LearnerT, Update], None]:
    """Repeat a method until memory suffices for one attempt on every rank. Every repetition halves the rows per pass.

    A failed attempt leaves nothing behind: gradients, metrics, log-probs and random numbers are put back.
    """

    @wraps(add_gradients)
    def repeated(learner: LearnerT, update: Update) -> None:
        forget_metrics = learner.meter.restore_point()

        def put_back() -> None:
            learner.optimizer_step.clear()
            update.forget_scores()
            forget_metrics()
            if hasattr(learner.policy, "release_memory"):  # such as a cache that a sampler keeps
                learner.policy.release_memory()

        for attempt in learner.collector.updating.attempts(put_back, together=True):
            with attempt:
                add_gradients(learner, update)

    return repeated
