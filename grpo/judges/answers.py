"""What judges have in common: a call that fails or answers with rubbish loses its own rows, and no others."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from grpo._common.calls import takes
from grpo._common.conversion import describe
from grpo._rewarding.answers import is_failed_call
from grpo._rewarding.deadlines import is_async
from grpo._rewarding.functions import AsksFunction
from grpo.errors import ConfigError, RewardError
from grpo.reward_model_base import is_function

FAILED, MALFORMED = "judge/failed", "judge/malformed"
"""Metrics that count the rows for which the judge raised, and the rows for which its answer cannot be read."""

logger = logging.getLogger("grpo")
Read = TypeVar("Read")


@dataclass(frozen=True, slots=True)
class Failure:
    """Stands in place of an answer: what a call of the judge raised."""

    error: Exception


class MalformedError(Exception):
    """An answer of a judge that cannot be read. It never leaves this package."""


class Judge(AsksFunction):
    """A function that judges, as a reward model. A subclass plans the calls, and reads their answers.

    Args:
        judge: The function of two arguments, which may be `async def`.

    Raises:
        ConfigError: `judge` is no function of two arguments.
    """

    arguments: ClassVar[str]
    """What the function gets, in words."""
    returns: ClassVar[str]
    """What the function returns, in a sentence."""

    def __init__(self, judge: Callable[[Any, Any], Any]) -> None:
        if not is_function(judge) or not takes(judge, 2):
            raise ConfigError(
                f"{type(self).__name__}: judge must be a function of {self.arguments}; got {describe(judge)}. {self.returns}"
            )
        super().__init__(judge)
        self._said: set[str] = set()  # shared by copies for groups

    def guarded(self) -> Callable[[Any, Any], Any]:
        """The function, which returns a `Failure` where it raises. `RewardConfig` handles its deadlines."""
        function = self._function.function

        async def awaited(state: Any, judged: Any) -> Any:
            try:
                return await function(state, judged)
            except Exception as error:  # recovery: the rows of this call are lost, and counted
                return _failure(error)

        def called(state: Any, judged: Any) -> Any:
            try:
                return function(state, judged)
            except Exception as error:  # recovery: the rows of this call are lost, and counted
                return _failure(error)

        return awaited if is_async(function) else called

    def readings(
        self, answers: Sequence[Any], read: Callable[[int, Any], Read]
    ) -> tuple[dict[int, Read], dict[str, list[int]]]:
        """Read the answers. Log the first failure of each kind.

        Args:
            answers: What the calls returned.
            read: Maps the place of an answer and the answer to what is read. Raises a `MalformedError`.

        Returns:
            What was read, by place; and the places of the answers that are lost, by metric.

        Raises:
            Exception: No answer can be read. The first error is raised, so that `RewardConfig` handles it.
        """
        found: dict[int, Read] = {}
        errors: dict[str, dict[int, Exception]] = {FAILED: {}, MALFORMED: {}}
        name = f"{type(self).__name__}({self.__name__})"
        for place, answer in enumerate(answers):
            if isinstance(answer, Failure):
                errors[FAILED][place] = answer.error
                continue
            try:
                found[place] = read(place, answer)
            except MalformedError as error:
                errors[MALFORMED][place] = RewardError(f"{name}: {error} {self.returns}")
        if answers and not found:
            everything = errors[FAILED] | errors[MALFORMED]
            raise everything[min(everything)]
        for metric, of_kind in errors.items():
            if of_kind and metric not in self._said:
                self._said.add(metric)
                first = of_kind[min(of_kind)]
                logger.warning(
                    "%s: %d of %d answers are lost, and so are their rows, which %s counts. The first: %s: %s (Logged once.)",
                    *(name, len(of_kind), len(answers), metric, type(first).__name__, first),
                )
        return found, {metric: sorted(of_kind) for metric, of_kind in errors.items()}


def _failure(error: Exception) -> Failure:
    """The failure of a call. An error of this package that has another reason is raised."""
    if not is_failed_call(error):
        raise error
    return Failure(error)
