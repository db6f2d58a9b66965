"""A reward for answers that are numbers or formulas. Requires math-verify (`pip install ".[math]"`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from adapters.llm.completions import Completion
from grpo.arguments import Settings, install_command, setting
from grpo.errors import CallError, DeadlineError
from grpo.rewards import Call, call_in_process

from .answer_text import answer_part, expected_part
from .columns import accepted_answers
from .equality import equal
from .formulas import read


@dataclass(frozen=True, slots=True, kw_only=True)
class MathMatch(Settings):
    r"""1 if the completion's answer equals a column of its row as mathematics, else 0: `0.5`, `1/2` and `\boxed{\frac{1}{2}}`.

    The answer of a completion is the content of the last box. If this box is empty or does not end, there is no answer, and an
    earlier box does not count. Without a box it is what follows the last "answer is", else the last formula in `$...$`, else
    the last number. The grammar of math-verify reads formulas. docs/llm.md has a table of what counts as equal.

    The column is LaTeX, a number, a list of accepted answers, or a text that contains the answer in `$...$` or `\boxed{...}`. A
    row whose column is None, NaN or empty gets None ("does not apply"). A column of words equals the same words.

    All rows of a call are verified in one process that can be killed, because a completion such as `9^{9^{9^{9}}}` may take for
    ever, and math-verify's own time limit works in the main thread only and cannot stop compiled code. An answer that takes too
    long, or that ends the process, gets 0. This works in every thread, on systems with `os.fork`.

    Example:
        >>> rewards = MathMatch()
        >>> half = Completion(token_ids=(1,), text=r"So it is $\frac{2}{4}$.", finish_reason="end")
        >>> rewards(actions=[half, half], states=[{"answer": "0.5"}, {"answer": "2"}])
        [1.0, 0.0]

    Raises:
        ImportError: The package math-verify is not installed.
    """

    column: str = "answer"
    """Column with the right answer."""
    extract: Callable | None = None
    """Maps the text to the part with the answer, or to None for reward 0. If `extract` is None, the whole text is read."""
    timeout: int = setting(5, at_least=1)
    """Seconds for parsing a text, and for a comparison. Larger: fewer difficult answers get 0, and hanging ones take longer."""

    def __post_init__(self) -> None:
        """Check the values, and import math-verify here, so that no process has to."""
        super(MathMatch, self).__post_init__()  # slots=True creates a new class, so super() needs arguments
        _require_math_verify()

    def __call__(self, actions: Sequence[Completion], states: Sequence[Any]) -> list[float | None]:
        """Compare each completion with its row's column. `CompletionRewards` calls this once with all rows."""
        accepted = [accepted_answers(state, self.column, self) for state in states]
        expected = [tuple(answer.text for answer in answers if answer.text.strip()) for answers in accepted]
        found = [action.text if self.extract is None else self.extract(action.text) for action in actions]
        calls = [
            Call(name=f"MathMatch at row {row}", function=_verdict, arguments=(*pair, self.timeout))
            for row, pair in enumerate(zip(expected, found, strict=True))
        ]
        return verdicts(calls, seconds=4.0 * self.timeout) if calls else []  # two texts, a comparison, and some room


def verdicts(calls: Sequence[Call], *, seconds: float) -> list[float | None]:
    """Make all calls in one process. If it hangs or dies, make each call in its own process; 0 if that hangs or dies, too."""
    try:
        return call_in_process(calls, timeout=seconds)
    except (DeadlineError, CallError):
        if len(calls) == 1:
            return [0.0]
        return [verdict for call in calls for verdict in verdicts([call], seconds=seconds)]


def _verdict(expected: tuple[str, ...], found: str | None, timeout: int) -> float | None:
    """Whether a text has an expected answer. None: nothing is expected. It runs in the main thread of its own process."""
    within, timed_out = _require_math_verify()
    if not expected:
        return None
    answer = answer_part(found or "")
    try:
        return float(bool(answer.strip()) and within(timeout_seconds=timeout)(_is_one_of)(answer, expected))
    except (timed_out, RecursionError):
        return 0.0


def _is_one_of(answer: str, expected: tuple[str, ...]) -> bool:
    return any(equal(read(expected_part(text)), read(answer)) for text in expected)


def _require_math_verify() -> tuple[Callable[..., Any], type[BaseException]]:
    """The decorator that limits the time of a call, and what it raises."""
    try:
        import math_verify.errors
        import math_verify.utils
    except ImportError as error:
        raise ImportError(f"MathMatch needs math-verify: {install_command('math')}") from error
    return math_verify.utils.timeout, math_verify.errors.TimeoutException
