"""GSM8K, grade school mathematics problems: rows, prompts and the extraction of answers.

Source:
    Cobbe et al. 2021, arXiv:2110.14168, whose solutions end in a line `#### n`.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from decimal import Decimal, localcontext
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

from grpo.arguments import describe
from grpo.errors import ConfigError

from .answer_text import boxed_answer, last_match
from .arithmetic import MAX_CHARS, SCALES, NoValueError, has_last_decimal, plain, read_value

# A sign, a currency and digits. "10-5" has no -5, and "x2" has no 2. 1{,}234 and \$ are LaTeX.
_MINUS = r"(?<![^\W_])(?<![)\]%])[-\u2212]"
_CURRENCY = r"(?:\\?[$\u20ac\u00a3]){1,2}[^\S\n]?"
_GROUPED = r"(?<![^\W_])[0-9]{1,3}(?:(?:,(?:\\!)?|\{,\}|\\,)[0-9]{3})+(?![0-9])(?:\.[0-9]+)?"
_PLAIN = r"(?<![^\W_])[0-9]+(?:\.[0-9]+)?|(?<![^\W_])(?<!\.)\.[0-9]+"
_NUMBER = rf"(?P<minus>{_MINUS})?(?:{_CURRENCY}(?P<inner>{_MINUS})?)?(?P<digits>(?>{_GROUPED}|{_PLAIN}))"
# Characters between a mark and its answer. Their number is bounded; otherwise repeated marks would take quadratic time.
_ADORNED = r"(?:\\text\s?\{|\\[(\[]|[*_:=~\u2248]|SPACE){0,40}+"
# How an answer begins: a number, a bracket, a fraction or a root, a name before "=", or a letter before an operator.
_ANSWER = (
    rf"(?={_NUMBER}|(?:[-\u2212]\s?)?(?:{_CURRENCY})?"
    r"(?:[-\u2212(\[{ ]{0,9}(?:[0-9.]|\\[$dtc]?(?:frac|sqrt))|[\u221a\u00bc-\u00be\u2150-\u215e])"
    r"|\\(?:boxed|fbox|mathbf)|[$]{0,2}[A-Za-z]\w{0,20}(?:\([a-z]\))?\s?=|[$]{0,2}[A-Za-z]\s?[-\u2212+*/^][\s\w\\({])"
)

NUMBER = re.compile(_NUMBER)
"""A number such as -1,234.5, $5 or .5, but not the 2 in x2."""
MARKED = re.compile("####" + _ADORNED.replace("SPACE", r"[^\S\n]") + r"(?![-$\w,.]{1,30}\.[^\S\n]+\w)" + _ANSWER)
"""`#### n` in one line, as at the end of GSM8K's solutions. A heading such as `#### 1. Understand` does not match."""
STATED = re.compile(
    r"(?i:\banswer[\s*_]*(?:is\b|equals\b|would\s+be\b|[:=]))" + _ADORNED.replace("SPACE", r"\s") + _ANSWER
)
"""A stated answer: `The answer is n` or `Answer: n`."""
_TIGHT = re.compile(r"(?:[^\s$*_~=<>]|(?<=[0-9)}])\s?[/^]\s?(?=[0-9({\\-])){1,120}")
_IN_A_FORMULA = re.compile(
    r"[/^{}_:]|\\(?:frac|sqrt|times|cdot)|[0-9][eE][-+]?[0-9]|[\u00bc-\u00be\u2150-\u215e\u221a\u00b2\u00b3]"
)
_NAME = re.compile(r"\s*[A-Za-z]\w{0,20}(?:\([a-z]\))?\s*=(?!=)")
_UNITS_INSIDE = re.compile(
    rf"(?<=[0-9)}}%])(?:\s*(?!(?:and|or|so|but|because|since|then|where|as|if|with|{'|'.join(SCALES)})\b)[A-Za-z]{{2,}}){{1,2}}"
    r"\s*(?=[-+*/=]\s?[$0-9(\\])"
)
_ENDS = re.compile(r"^[\s*_$})\]\u20ac\u00a3%]*")
_GOES_ON = re.compile(r"[+*/^=<>|\\\u2264\u2265\u2260\u00b1]|-\s?[0-9({\\]|[:.]\s?[0-9]|\{|_[0-9{]|,[0-9]{3}(?![0-9])")
_VARIABLE = re.compile(r"(?![mghslL])[A-Za-z](?![A-Za-z])")
_GOES_ON_AS_A_RANGE = re.compile(
    r"(?:or|to)\s+[-$\u20ac\u00a3]?[0-9]+(?!\S*\s+(?:decimal|significant|places|digits|d\.p|s\.f))"
)
_TIMES = re.compile(r"(?<=[0-9)])\s[xX]\s(?=[$0-9(])")
_GOES_ON_AS_A_LIST = re.compile(r"!|[,;]\s*[-$\\(]?[0-9]|(?:\\text\s*\{)?\s*(?:or|and|to)\b[\s}$]*[-\\(]?[0-9]")


def extract_answer(text: str) -> Decimal | None:
    r"""Extract the answer's number from a solution or a completion. None if there is no number.

    The answer is the first of these that exists: the last `#### n`, the last `\boxed{n}`, the last "answer is n" or
    "answer: n", the last number. Thousands separators, currency signs, a percent sign and a final full stop are ignored.

    A formula has its value: `3/4`, `\frac{3}{4}`, `2^3`, `1.5e3`, `2\frac{1}{2}`, `\sqrt{16}`. An equation has the value behind
    its last `=`. The answer is None if a mark, a box or a statement goes on with something else, such as `x/4`, `\sqrt{2}`,
    `12:30` or `5 or 6`, and if the last box is empty or does not end. A value without a last decimal is rounded to 28 digits.

    Example:
        >>> extract_answer("12 * 100 = 1200, and 34 more.\n#### $1,234.")
        Decimal('1234')
        >>> extract_answer("#### 5.0") == extract_answer("So the answer is **5**.")
        True
        >>> extract_answer(r"\boxed{\frac{3}{4}}"), extract_answer("The answer is 6 * 7 = 42 eggs."), extract_answer("#### x/4")
        (Decimal('0.75'), Decimal('42'), None)
    """
    marked = last_match(MARKED, text)
    if marked is not None:
        return _as_decimal(_value(_line(text, marked.end()), is_alone=True))
    boxed = boxed_answer(text, joins_lists=False)
    if boxed is not None:
        return _as_decimal(_value(boxed, is_alone=True))
    stated = last_match(STATED, text)
    if stated is not None:
        return _as_decimal(_value(_line(text, stated.end()), is_alone=False))
    last = last_match(NUMBER, text)
    if last is None:
        return None
    formula = _formula_around(text, last)
    if formula is not None:
        return _as_decimal(_value(formula, is_alone=False))
    number = Decimal(re.sub(r"[^0-9.]", "", last["digits"]))
    return -number if last["minus"] or last["inner"] else number


def _line(text: str, begin: int) -> str:
    return text[begin : begin + MAX_CHARS].partition("\n")[0]


def _formula_around(text: str, number: re.Match[str]) -> str | None:
    """The formula without spaces that the number is a part of, if it is a part of one."""
    begin = max(number.start() - 100, 0)
    window = text[begin : number.end() + 100]
    inside = number.start("digits") - begin
    for run in _TIGHT.finditer(window):
        if run.start() <= inside < run.end():
            formula = run[0].rstrip(".,;:!?")
            own = number["digits"]
            return formula if _IN_A_FORMULA.search(formula.replace(own, "0", 1)) and formula != own else None
    return None


def _value(text: str, *, is_alone: bool) -> Fraction | None:
    """The value of an answer: behind its last `=`, without the words after it. None if it goes on with something unreadable.

    Args:
        text: The answer and what follows it.
        is_alone: Whether the text has nothing but the answer, as a box has. It may then not be a list.
    """
    rest = _TIMES.sub("*", _UNITS_INSIDE.sub("", plain(text)))
    if name := _NAME.match(rest.lstrip("$ ")):
        rest = rest.lstrip("$ ")[name.end() :]
    while True:
        rest = rest.lstrip("*_ ~:=")
        try:
            value, rest = read_value(rest)
        except NoValueError:
            if not rest.startswith(("(", "[", "{")):
                return None
            rest = rest[1:]
            continue
        following = _ENDS.sub("", rest, count=1)
        if following.startswith("="):
            rest = following
            continue
        patterns = [_GOES_ON, _GOES_ON_AS_A_RANGE, *([_GOES_ON_AS_A_LIST] if is_alone else [])]
        if _VARIABLE.match(rest) or any(pattern.match(following) for pattern in patterns):
            return None
        return value


def _as_decimal(value: Fraction | None) -> Decimal | None:
    if value is None:
        return None
    with localcontext() as context:
        all_digits = len(str(value.numerator)) + value.denominator.bit_length()
        context.prec = max(all_digits, 28) if has_last_decimal(value) else 28
        return Decimal(value.numerator) / Decimal(value.denominator)


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
    if isinstance(source, str | Path):
        rows = _lines(Path(source))
    else:
        rows = ((f"row {index}", row) for index, row in enumerate(source))
    problems = [_problem(where, row) for where, row in islice(rows, num_samples)]
    if not problems:
        raise ConfigError("load_gsm8k found no problems in the source. Pass rows with 'question' and 'answer'.")
    return problems


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
