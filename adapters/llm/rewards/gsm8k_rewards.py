"""Rewards for GSM8K: `correctness_first`, and `hybrid_reward` for comparison.

Both require rows with the column `answer`, as `load_gsm8k` returns them::

    GRPOTrainer(config=config, policy=policy, reward_model=correctness_first())
"""

import re
from decimal import Decimal
from typing import Any

from grpo.errors import RewardError

from .answer_text import boxed_answer
from .columns import answers_of
from .completion_rewards import CompletionRewards
from .gsm8k import MARKED, NUMBER, STATED, extract_answer

SIGNS_OF_MATHEMATICS = ("+", "-", "*", "/", "=", "total", "each", "times", "sum", "left")
STEP_WORD = re.compile(r"(?i:\b(?:step|first|second|then|next|finally|therefore)\b)")
EQUATION = re.compile(
    r"[0-9)%][^\S\n]{0,3}[-+*/x\u00d7\u00f7\u2212][^\S\n]{0,3}[($\u20ac\u00a3]?[0-9][0-9.,]{0,30}[^\S\n]{0,3}="
)


def correctness_first() -> CompletionRewards:
    """The recommended reward: a right answer beats a wrong answer, and a wrong answer beats no answer.

    Weights: correct 1, answered 0.1, marked 0.1 (the answer follows `####`). Each part is 0 or 1 before weighting, so
    `rewards/correct/mean` is the accuracy. A right answer gets at least 1.1, a wrong answer 0.1 or 0.2, no answer 0.

    Example:
        >>> from adapters.llm.completions import Completion
        >>> three = [Completion(token_ids=(7,), text=text, finish_reason="end") for text in ("so 6", "#### 5", "hm")]
        >>> correctness_first().compute_rewards([{"prompt": "2 * 3", "answer": "#### 6"}] * 3, three).tolist()
        [1.1, 0.2, 0.0]
    """
    return CompletionRewards(
        {"correct": correct, "answered": answered, "marked": marked},
        weights={"correct": 1.0, "answered": 0.1, "marked": 0.1},
    )


def hybrid_reward() -> CompletionRewards:
    """A sum of signs of a good solution, for comparison only: no answer (0.3) gets more than a wrong answer (0.2).

    correctness: right 0.6, wrong 0.2, no answer 0.3; length: 0.2 for more than 50 characters; mathematics: 0.1 for each of
    several operators and words, up to 0.5; steps: 0.3 for a word such as "then"; format: 0.15 for `#### n`, else 0.1 for
    another form of answer; number: 0.1 for any; equation: 0.1 for one like `2 * 3 = 6`.
    """
    return CompletionRewards(
        {
            "correctness": _correctness,
            "length": _length,
            "mathematics": _mathematics,
            "steps": _steps,
            "format": _format,
            "number": _number,
            "equation": _equation,
        }
    )


def correct(completion: str, answer: Any) -> float | None:
    """1 if the completion's number equals the solution's number, else 0. None if the column has no solution."""
    truths = _truths(answer)
    return float(extract_answer(completion) in truths) if truths else None


def answered(completion: str) -> float:
    """1 if the completion has a number that can be read as the answer, else 0."""
    return float(extract_answer(completion) is not None)


def marked(completion: str) -> float:
    """1 if an answer that can be read follows `####`, else 0."""
    return float(MARKED.search(completion) is not None and extract_answer(completion) is not None)


def _truths(answer: Any) -> list[Decimal]:
    """The numbers of the solutions that a row's column accepts.

    Raises:
        RewardError: No solution has a number, or the column has neither text nor numbers.
    """
    accepted = answers_of(answer, "answer", "correctness_first and hybrid_reward")
    truths = [number for each in accepted if (number := extract_answer(each.text)) is not None]
    if accepted and not truths:
        raise RewardError(f"The column 'answer' must hold a number, as in '#### 72'; got {accepted[0].text!r}.")
    return truths


def _correctness(completion: str, answer: Any) -> float | None:
    found, truths = extract_answer(completion), _truths(answer)
    return None if not truths else 0.3 if found is None else 0.6 if found in truths else 0.2


def _length(completion: str) -> float:
    return 0.2 if len(completion.strip()) > 50 else 0.0


def _mathematics(completion: str) -> float:
    text = completion.lower()
    return min(sum(sign in text for sign in SIGNS_OF_MATHEMATICS), 5) / 10


def _steps(completion: str) -> float:
    return 0.3 if STEP_WORD.search(completion) else 0.0


def _format(completion: str) -> float:
    if MARKED.search(completion):
        return 0.15
    return 0.1 if boxed_answer(completion) or STATED.search(completion) else 0.0


def _number(completion: str) -> float:
    return 0.1 if NUMBER.search(completion) else 0.0


def _equation(completion: str) -> float:
    return 0.1 if EQUATION.search(completion) else 0.0
