"""GSM8K, grade school mathematics problems: rows, prompts and the extraction of answers.

Source: Cobbe et al. 2021, arXiv:2110.14168, whose solutions end in a line `#### n`.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any

from grpo.arguments import describe
from grpo.errors import ConfigError

from .verifiers import last_match

# A sign, a currency and digits. "10-5" has no -5, and "x2" has no 2. 1{,}234 and \$ are LaTeX.
_MINUS = r"(?<![^\W_])(?<![)\]%])[-\u2212]"
_CURRENCY = r"(?:\\?[$\u20ac\u00a3]){1,2}[^\S\n]?"
_GROUPED = r"(?<![^\W_])[0-9]{1,3}(?:(?:,(?:\\!)?|\{,\}|\\,)[0-9]{3})+(?![0-9])(?:\.[0-9]+)?"
_PLAIN = r"(?<![^\W_])[0-9]+(?:\.[0-9]+)?|(?<![^\W_])(?<!\.)\.[0-9]+"
_NUMBER = rf"(?P<minus>{_MINUS})?(?:{_CURRENCY}(?P<inner>{_MINUS})?)?(?P<digits>(?>{_GROUPED}|{_PLAIN}))"
# Characters between a mark and its number. Their number is bounded; otherwise repeated marks would take quadratic time.
_ADORNED = r"(?:\\boxed|\\text|\\[(\[]|[*_:=~\[({\u2248]|SPACE){0,40}+"

NUMBER = re.compile(_NUMBER)
"""A number such as -1,234.5, $5 or .5, but not the 2 in x2."""
MARKED = re.compile("####" + _ADORNED.replace("SPACE", r"[^\S\n]") + _NUMBER + r"(?!\.[^\S\n]+\w)")
"""`#### n` in one line, as at the end of GSM8K's solutions. A heading such as `#### 1. Understand` does not match."""
BOXED = re.compile(r"\\boxed\s*\{" + _ADORNED.replace("SPACE", r"\s") + _NUMBER)
r"""An answer in a box: `\boxed{n}`."""
STATED = re.compile(
    r"(?i:\banswer[\s*_]*(?:is\b|equals\b|would\s+be\b|[:=]))" + _ADORNED.replace("SPACE", r"\s") + _NUMBER
)
"""A stated answer: `The answer is n` or `Answer: n`."""


def extract_answer(text: str) -> Decimal | None:
    r"""Extract the answer's number from a solution or a completion. None if there is no number.

    The answer is the first of these that exists: the last `#### n`, the last `\boxed{n}`, the last "answer is n" or
    "answer: n", the last number. Thousands separators, currency signs, a percent sign and a final full stop are ignored.

    Example:
        >>> extract_answer("12 * 100 = 1200, and 34 more.\n#### $1,234.")
        Decimal('1234')
        >>> extract_answer("#### 5.0") == extract_answer("So the answer is **5**.")
        True
    """
    for pattern in (MARKED, BOXED, STATED, NUMBER):
        match = last_match(pattern, text)
        if match is not None:
            number = Decimal(re.sub(r"[^0-9.]", "", match["digits"]))
            return -number if match["minus"] or match["inner"] else number
    return None


def gsm8k_prompt(question: str) -> str:
    """Prompt with the question, the required form of the answer, and "Answer:" at the end."""
    return (
        f"Question: {question.strip()}\n\n"
        "Work it out step by step. Write the result alone on the last line, in this form:\n"
        "#### [number]\n\n"
        "Answer:"
    )


def load_gsm8k(
    source: str | Path | Iterable[Mapping[str, Any]], num_samples: int | None = None
) -> list[dict[str, str]]:
    """Problems as rows with the columns prompt, question and answer (the written solution): states for a policy.

    Args:
        source: A JSONL file, or rows (a list of dicts or a `datasets.Dataset`), with "question" and "answer".
        num_samples: Maximum number of problems, taken from the start. None takes all.

    Raises:
        ConfigError: A line or row is not a problem, an answer holds no number, or there are no problems. The message names the
            line or row.

    Example:
        >>> load_gsm8k([{"question": "1 + 1?", "answer": "1 + 1 = 2\\n#### 2"}])[0]["question"]
        '1 + 1?'
    """
    if num_samples is not None and num_samples < 1:
        raise ConfigError(f"load_gsm8k: num_samples must be >= 1 or None; got {num_samples}.")
    rows = _lines(Path(source)) if isinstance(source, str | Path) else _numbered(source)
    problems = [_problem(where, row) for where, row in islice(rows, num_samples)]
    if not problems:
        raise ConfigError("load_gsm8k found no problems in the source. Pass rows with 'question' and 'answer'.")
    return problems


def _numbered(rows: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    for index, row in enumerate(rows):
        yield f"row {index}", row


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    """Position and content of each line. Empty lines are skipped."""
    try:
        file = path.open("rb")
    except OSError as error:
        raise ConfigError(f"load_gsm8k cannot read {path}: {error.strerror}. Pass a JSONL file, or rows.") from error
    with file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    yield f"{path}, line {number}", json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise ConfigError(
                        f"load_gsm8k: each line must be JSON; {path}, line {number} is not JSON: {error}."
                    ) from error


def _problem(where: str, row: Any) -> dict[str, str]:
    if not isinstance(row, Mapping) or not all(isinstance(row.get(name), str) for name in ("question", "answer")):
        got = sorted(row) if isinstance(row, Mapping) else describe(row)
        raise ConfigError(f"load_gsm8k: {where} must have the texts 'question' and 'answer'; got {got}.")
    if extract_answer(row["answer"]) is None:
        raise ConfigError(
            f"load_gsm8k: the answer of {where} must hold a number, as in '#### 72'; got {row['answer']!r}."
        )
    return {"prompt": gsm8k_prompt(row["question"]), "question": row["question"], "answer": row["answer"]}
