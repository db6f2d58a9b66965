"""Answers that are mathematics, by the real math-verify: equal forms, absent answers, threads, and texts that take for ever."""

import os
import sys
import threading
import time
from typing import Any

import pytest

from adapters.llm import Completion, CompletionRewards, MathMatch
from adapters.llm.rewards.math_answers import verdicts
from grpo import ConfigError, RewardError
from grpo.rewards import Call, ask_for_rewards


def said(text: str) -> Completion:
    return Completion(token_ids=(1,), text=text, finish_reason="end")


def verdict(answer: Any, text: str, **settings: Any) -> float | None:
    return MathMatch(**settings)(actions=[said(text)], states=[{"prompt": "?", "answer": answer}])[0]


def test_answers_are_compared_as_mathematics(subtests: pytest.Subtests) -> None:
    cases: list[tuple[Any, list[tuple[str, float]]]] = [
        (r"\frac{1}{2}", [("it is 0.5", 1.0), (r"\boxed{1/2}", 1.0), ("$0.51$", 0.0), ("no idea", 0.0), ("", 0.0)]),
        (1000, [("1,000", 1.0), ("first 7, then 1000.", 1.0), ("first 1000, then 7", 0.0)]),
        ("x^2 + 2x + 1", [("$(x+1)^2$", 1.0), ("$(x-1)^2$", 0.0)]),
        (r"We get 3, so \boxed{4}.", [("4", 1.0), ("3", 0.0)]),
        ("#### $72$", [("72", 1.0)]),
        (None, [("1", None)]),
        ("", [("1", None)]),
    ]
    rows = [(answer, text, expected) for answer, several in cases for text, expected in several]
    found = MathMatch()(actions=[said(text) for _, text, _ in rows], states=[{"answer": row[0]} for row in rows])
    for row, result in zip(rows, found, strict=True):
        with subtests.test(row=row):
            assert result == row[2]


def test_a_part_of_the_text_can_be_chosen() -> None:
    def after_answer(text: str) -> str | None:
        return text.partition("Answer:")[2] or None

    assert verdict(4, "Answer: 4. Check: 5", extract=lambda text: after_answer(text.partition("Check")[0])) == 1.0
    assert verdict(4, "4", extract=after_answer) == 0.0


def test_it_is_a_reward_of_completions_with_any_column_and_weight() -> None:
    rewards = CompletionRewards({"right": MathMatch(column="gold")}, weights={"right": 2.0})
    rows: list[Any] = [{"prompt": [{"role": "user", "content": "?"}], "gold": gold} for gold in ("0.5", "1", None)]
    found = ask_for_rewards(rewards, rows, [said("1/2")] * 3).components["right"]
    assert found.tolist()[:2] == [1.0, 0.0]
    assert found.isnan().tolist() == [False, False, True]
    assert rewards.compute_rewards(rows[:2], [said("1/2")] * 2).tolist() == [2.0, 0.0]


def test_it_works_outside_the_main_thread_where_signals_do_not() -> None:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(verdict("1/2", "0.5")))
    thread.start()
    thread.join()
    assert found == [1.0]


@pytest.mark.slow
def test_an_answer_that_takes_for_ever_gets_0_and_the_others_their_reward() -> None:
    texts = ["2", "$9^{9^{9^{9}}}$", "2"]
    found = MathMatch(timeout=1)(actions=list(map(said, texts)), states=[{"answer": "2"}] * 3)
    assert found == [1.0, 0.0, 1.0]


def test_a_call_that_hangs_beyond_the_limit_or_ends_its_process_gets_0_and_the_others_their_reward() -> None:
    calls = [
        Call(name="good", function=float, arguments=(1,)),
        Call(name="hangs", function=time.sleep, arguments=(60,)),
        Call(name="ends", function=os._exit, arguments=(1,)),
    ]
    assert verdicts(calls, seconds=0.3) == [1.0, 0.0, 0.0]


def test_wrong_settings_and_rows_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"MathMatch.timeout must be >= 1; got 0"):
        MathMatch(timeout=0)
    with pytest.raises(RewardError, match=r"MathMatch needs the column 'answer'; the row has 'prompt'"):
        MathMatch()(actions=[said("1")], states=[{"prompt": "?"}])
    assert MathMatch()(actions=[], states=[]) == []


def test_without_the_package_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ImportError, match=r'^MathMatch needs math-verify: pip install "\.\[math\]" in the checkout$'):
        MathMatch()
