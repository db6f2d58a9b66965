"""An update whose forward and backward passes ran out of memory is repeated with fewer rows per pass."""

from collections.abc import Callable
from functools import wraps
from typing import Any

from .update import Update


def repeated_with_fewer_rows(add_gradients: Callable[[Any, Update], None]) -> Callable[[Any, Update], None]:
    """Repeat a method of a learner until memory suffices for one attempt on every rank.

    Every repetition halves the rows per pass. A failed attempt leaves nothing behind: gradients, metrics, log-probs and random
    numbers are put back.
    """

    @wraps(add_gradients)
    def repeated(learner: Any, update: Update) -> None:
        forget_metrics = learner.meter.restore_point()

        def put_back() -> None:
            learner.optimizer_step.clear()
            update.forget_scores()
            forget_metrics()
            if hasattr(learner.policy, "release_memory"):  # such as a cache that a sampler keeps
                learner.policy.release_memory()

        learner.collector.updating.repeat(lambda: add_gradients(learner, update), put_back, together=True)

    return repeated
