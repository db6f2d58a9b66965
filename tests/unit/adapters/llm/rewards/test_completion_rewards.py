"""Plain functions as rewards: their arguments, their return values, and training with them."""

import asyncio
import functools
import inspect
import math
import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adapters.llm.completions import Completion
from adapters.llm.rewards.completion_rewards import CompletionRewards
from adapters.llm.rewards.verifiers import ExactMatch, PerToken
from grpo import RewardConfig
from grpo._retrying.calls import RetriedCalls
from grpo.checks import check_reward_model
from grpo.errors import ConfigError, ContractError, ProtocolError, RewardError, RewardTimeoutError
from grpo.rewards import ask_for_rewards
from tests.support.clocks import CallsClock, skipping_clock
from tests.support.reward_faults import children


def completion(text: str) -> Completion:
    return Completion(token_ids=tuple(map(ord, text)), text=text, finish_reason="end")


A, B, C = completion("a"), completion("bb"), completion("ccc")
ROWS = [{"prompt": p, "answer": a} for p, a in (("p", "a"), ("q", "x"), ("r", "ccc"))]


def rewards_of(functions: Any, states: Sequence[Any] = ROWS, actions: Sequence[Completion] = (A, B, C), **options: Any):
    return CompletionRewards(functions, **options).compute_rewards(list(states), list(actions))


def retried(rewards: CompletionRewards, **settings: Any) -> Any:
    """The rewards of the three rows, asked for under these settings."""
    return RetriedCalls(rewards, RewardConfig(**settings))(ROWS, [A, B, C])


def right(completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def length(completion: str) -> int:
    return len(completion)


def test_rewards_are_weighted_by_name_or_in_order() -> None:
    # right: 1, 0, 1; length: 1, 2, 3.  right + .5 length: 1.5, 1, 2.5
    total = rewards_of([right, length], weights=[1.0, 0.5])
    assert total.dtype == torch.float64
    assert total.tolist() == [1.5, 1.0, 2.5]
    assert rewards_of({"r": right, "l": length}, weights={"l": 0.5, "r": 1}).tolist() == [1.5, 1.0, 2.5]
    assert rewards_of(length).tolist() == [1.0, 2.0, 3.0]
    parts = ask_for_rewards(CompletionRewards([right, length]), ROWS, [A, B, C]).components
    assert {name: part.tolist() for name, part in parts.items()} == {"right": [1, 0, 1], "length": [1, 2, 3]}


def test_a_function_with_kwargs_gets_the_arguments_that_trl_passes() -> None:
    seen: dict[str, Any] = {}

    def reward(**kwargs: Any) -> list[float]:
        seen.update(kwargs)
        return [0.0, 0.0]

    chat = [{"role": "user", "content": "hello"}]
    rows = [{"prompt": "p", "answer": 1, "completion": "gold"}, {"prompt": chat, "answer": 2, "completion": ""}]
    rewards_of(reward, rows, [A, B])
    assert seen == {
        "prompts": ["p", chat], "completions": ["a", [{"role": "assistant", "content": "bb"}]],
        "completion_ids": [[97], [98, 98]], "answer": [1, 2],
    }  # fmt: skip


def test_trls_own_reward_functions_work() -> None:
    trl_rewards = pytest.importorskip("trl.rewards")
    chats = [[{"role": "user", "content": "?"}]] * 2
    texts = [completion("<think>1</think>2"), completion("2")]
    overlong = trl_rewards.get_soft_overlong_punishment(max_completion_len=20, soft_punish_cache=4)
    # lengths 17 and 1: 17 is one token of four into the cache
    assert rewards_of([trl_rewards.think_format_reward, overlong], chats, texts).tolist() == [1.0 - 0.25, 0.0]


def test_a_function_of_one_row_gets_the_arguments_that_it_names() -> None:
    seen = []

    def reward(prompt: str, completion: str, action: Completion, state: Any, answer: str, scale: float = 2.0) -> float:
        seen.append((prompt, completion, action, state, answer))
        return scale

    assert rewards_of(functools.partial(reward, scale=3.0), ROWS[:1], [A]).tolist() == [3.0]
    assert seen == [("p", "a", A, ROWS[0], "a")]

    def everything(completion: str, **kwargs: Any) -> float:
        seen.append(kwargs)
        return 0.0

    rewards_of(everything, ROWS[:1], [A])
    assert seen[1] == {"prompt": "p", "answer": "a"}


def test_a_function_of_states_and_actions_works() -> None:
    def reward(states: list[Any], actions: list[Completion]) -> Tensor:
        return torch.tensor([len(state["prompt"]) + len(action) for state, action in zip(states, actions, strict=True)])

    assert rewards_of(reward).tolist() == [2.0, 3.0, 4.0]


def test_columns_with_the_names_of_the_trainers_objects_reach_functions(subtests: pytest.Subtests) -> None:
    rows = [{"prompt": "p", "state": "Ohio", "action": "walk", "states": 50, "actions": 3, "answer": "a"}]
    functions: list[tuple[Any, Any]] = [
        (lambda completion, state: state, "Ohio"), (lambda prompt, action: action, "walk"),
        (lambda completion, states, actions: [states, actions], [50, 3]),
        (lambda completions, state, **kwargs: [state, kwargs["action"]], [["Ohio"], ["walk"]]),
        (lambda prompts, states: states, [50]), (lambda state: state, "Ohio"),
    ]  # fmt: skip
    for number, (function, expected) in enumerate(functions):
        seen: list[Any] = []

        def recorded(
            *args: Any, function: Any = function, seen: list[Any] = seen, **kwargs: Any
        ) -> list[float] | float:
            seen.append(function(*args, **kwargs))
            return [0.0] if "completions" in kwargs or "prompts" in kwargs else 0.0

        recorded.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        with subtests.test(number=number):
            rewards_of(recorded, rows, [A])
            assert seen == [expected]
    with subtests.test("ready-made verifiers read the whole row"):
        assert rewards_of({"right": ExactMatch(), "length": PerToken(amount=1.0)}, rows, [A]).tolist() == [2.0]
    with subtests.test("without the column"), pytest.raises(RewardError, match="needs state; the rows offer"):
        rewards_of(lambda completions, state: [0.0])


def test_a_reward_model_is_summed_with_functions() -> None:
    class Model(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.register_buffer("value", torch.tensor(value))

        def compute_rewards(self, states: Any, actions: Any) -> Tensor:
            return self.value.expand(len(states))

    rewards = CompletionRewards({"model": Model(0.25), "length": length})
    assert rewards.compute_rewards(ROWS, [A, B, C]).tolist() == [1.25, 2.25, 3.25]
    assert rewards.state_dict()["model"] == {"value": torch.tensor(0.25)}
    assert CompletionRewards({"model": Model(math.nan)}).compute_rewards(["p"], [A]).tolist() == [math.inf]


def test_the_prompt_column_can_have_another_name() -> None:
    rows = [{"question": "p", "answer": "a"}]
    assert rewards_of(lambda prompt, question, answer, completion: prompt + question + answer == "ppa", rows, [A],
                      prompt_column="question").tolist() == [1.0]  # fmt: skip
    with pytest.raises(ContractError, match="needs the prompt column 'prompt'"):
        rewards_of(length, rows, [A])


def test_each_function_gets_its_own_lists() -> None:
    def careless(completions: list[str], **kwargs: Any) -> list[float]:
        completions.clear()
        return [0.0, 0.0, 0.0]

    assert rewards_of({"careless": careless, "right": right}).tolist() == [1.0, 0.0, 1.0]


NUMBERS = [
    [1, True, 2.5], (1.0, 1.0, 2.5), torch.tensor([1.0, 1.0, 2.5]), torch.tensor([1.0, 1.0, 2.5]).numpy(),
    [torch.tensor(1), torch.tensor(1.0).numpy()[()], torch.tensor(True).numpy()[()] + 1.5],
]  # fmt: skip


def test_any_kind_of_number_is_a_reward(subtests: pytest.Subtests) -> None:
    for answers in NUMBERS:
        with subtests.test(type=type(answers)):
            assert rewards_of(lambda prompts, answers=answers: answers).tolist() == [1.0, 1.0, 2.5]


# --- None and NaN


def only_short(completion: str) -> float | None:
    return 10.0 if completion == "a" else None


def long_or_fault(completion: str) -> float | None:
    return {"a": None, "bb": 2.0}.get(completion, math.nan)


def test_none_is_excluded_from_the_sum_of_a_row() -> None:
    rewards = CompletionRewards({"short": only_short, "long": long_or_fault}, {"short": 0.5, "long": 3.0})
    found = ask_for_rewards(rewards, ["p"] * 2, [A, B])
    parts = {name: part.tolist() for name, part in found.components.items()}
    assert str(parts) == "{'short': [10.0, nan], 'long': [nan, 2.0]}"
    assert found.values.tolist() == [5.0, 6.0]  # .5 * 10 and 3 * 2


def test_a_row_to_which_no_function_applies_has_reward_nan() -> None:
    rewards = CompletionRewards(only_short)
    with pytest.raises(RewardError, match=r"got \[nan, nan\] at rows \[1, 2\] of 3"):
        retried(rewards)
    kept = retried(rewards, non_finite="drop")
    assert kept.values.tolist() == kept.components["only_short"].tolist() == [10.0]
    assert kept.kept.tolist() == [True, False, False]


def test_nan_is_an_error_even_if_another_function_applies() -> None:
    rewards = CompletionRewards({"long": long_or_fault, "length": length}, {"long": 0.0, "length": 1.0})
    assert rewards.compute_rewards(["p"] * 2, [A, B]).tolist() == [1.0, 2.0]
    with pytest.raises(RewardError, match=r"must return finite numbers; got .* at rows \[2\] of 3"):
        retried(rewards)
    assert retried(rewards, non_finite="drop").values.tolist() == [1.0, 2.0]


# --- errors


WRONG_ANSWERS = [
    (lambda prompts: [1.0, 2.0], r"<lambda> must return one number or None per row, a list of 3; got a list of 2"),
    (lambda prompts: 1.0, r"a list of 3; got float 1.0 for rows 0 to 2"),
    (lambda prompts: "abc", r"a list of 3; got str 'abc'"),
    (lambda prompts: torch.zeros(3, 1), r"got a list of 1 float at row 0"),
    (lambda prompts: [1.0, "two", 3.0], r"must return a number, or None where it does not apply; got str 'two' at row 1"),
    (lambda completion: 1j, r"got complex 1j at row 0"),
    (lambda completion: torch.zeros(2), r"got \[2\] float32 at row 0"),
    (lambda completion, truth, hint: 0.0, r"<lambda> needs truth, hint; the rows offer action, answer, completion, "),
    (lambda completions, trainer_state: [0.0], r"<lambda> needs trainer_state; the rows offer actions, answer, "),
]  # fmt: skip


def test_an_error_says_what_a_function_returned_or_lacked(subtests: pytest.Subtests) -> None:
    for function, message in WRONG_ANSWERS:
        with subtests.test(message=message), pytest.raises(RewardError, match=message):
            rewards_of(function)


def test_rows_with_other_columns_and_actions_that_are_not_completions_are_refused() -> None:
    with pytest.raises(RewardError, match=r"the same columns; row 1 lacks 'answer'. Set the column to None"):
        rewards_of(length, [*ROWS[:1], "text only"], [A, B])
    with pytest.raises(RewardError, match=r"actions must be Completions; got str 'text' at row 1"):
        rewards_of(length, ROWS[:2], [A, "text"])  # type: ignore[list-item]


WRONG_SETTINGS = [
    (lambda p, c: 0.0, {}, r"<lambda>\(p, c\) must name its arguments: prompts, completions, .* Rename its parameters"),
    (lambda prompts, completion: 0.0, {}, "do not mix the two kinds"),
    (lambda answer: 0.0, {}, "must name its arguments"), (lambda completion, /: 0.0, {}, "must name its arguments"),
    ([length, length], {}, r"different names; got length, length. Pass {'name': function, ...}"),
    ([], {}, "needs at least one reward"), ([right, length], {"weights": [1.0]}, "one weight per function, 2; got 1"),
    ({"right": right}, {"weights": {"wrong": 1.0}}, "one weight for each"),
    (length, {"weights": 3}, "weights must be None, a mapping or a sequence"),
    (length, {"prompt_column": 3}, "prompt_column a text; got .* int 3"),
]  # fmt: skip


@pytest.mark.parametrize(("functions", "options", "message"), WRONG_SETTINGS)
def test_wrong_settings_are_refused(functions: Any, options: Any, message: Any) -> None:
    with pytest.raises(ConfigError, match=message):
        CompletionRewards(functions, **options)


def test_a_reward_that_is_not_a_function_is_refused() -> None:
    with pytest.raises(ProtocolError, match="reward_model must implement RewardModel; str lacks"):
        CompletionRewards({"name": "accuracy"})


def picky(completion: str) -> float:
    return {"a": 1.0, "ccc": 3.0}[completion]


def test_an_exception_names_the_function_and_can_drop_the_row() -> None:
    message = r"raised RuntimeError: picky raised KeyError: 'bb' at row 1 for rows 0 to 2"
    with pytest.raises(RewardError, match=message) as caught:
        retried(CompletionRewards(picky))
    assert isinstance(caught.value.__cause__.__cause__, KeyError)  # type: ignore[union-attr]
    kept = retried(CompletionRewards(picky), on_failure="drop")
    assert kept.values.tolist() == [1.0, 3.0]
    assert kept.metrics["rows/dropped"] == 1.0


# --- async


class Judge:
    """An async reward function that records its concurrent calls and its event loops."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.loops: set[Any] = set()

    async def __call__(self, completion: str) -> float:
        self.loops.add(asyncio.get_running_loop())
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0.01)
        self.now -= 1
        return float(len(completion))


async def later(completions: list[str], **kwargs: Any) -> list[float | None]:
    await asyncio.sleep(0.01)
    return [None, 0.5, 0.5]


@pytest.mark.parametrize(("limit", "most"), [(64, 3), (2, 2)])
def test_async_calls_run_together_up_to_the_limit(limit: Any, most: Any) -> None:
    judge = Judge()
    rewards = CompletionRewards({"judge": judge, "later": later, "right": right})
    ask = functools.partial(ask_for_rewards, rewards, ROWS, [A, B, C], max_concurrent=limit)
    assert ask().values.tolist() == [1.0 + 1.0, 2.0 + 0.5 + 0.0, 3.0 + 0.5 + 1.0]
    assert judge.most == most
    ask()
    assert len(judge.loops) == 1  # one loop for all calls, so open clients stay usable


def test_a_slow_awaited_call_times_out_and_names_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    skip = skipping_clock(monkeypatch)

    async def slow(completion: str) -> float:
        if completion == "bb":
            skip(90.0)
            await asyncio.sleep(3600)
        return 1.0

    message = r"exceeded reward\.timeout=60: slow at row 1 did not answer within 60 s for rows 0 to 2, in 1 call"
    with pytest.raises(RewardTimeoutError, match=message):
        retried(CompletionRewards(slow), timeout=60)
    dropped = retried(CompletionRewards(slow), timeout=60, on_failure="drop")
    assert dropped.values.tolist() == [1.0, 1.0]


def test_each_row_of_a_plain_function_has_the_whole_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows of 40 seconds by an imitated clock, one after another, with 80 seconds for each."""
    clock = CallsClock(monkeypatch)

    def steady(completion: str) -> float:
        clock.move(40.0)
        return float(len(completion))

    assert retried(CompletionRewards(steady), timeout=80).values.tolist() == [1.0, 2.0, 3.0]


def test_a_slow_plain_call_times_out_and_names_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = CallsClock(monkeypatch)

    def slow(completion: str) -> float:
        if completion == "bb":
            clock.hang()
        return 1.0

    with pytest.raises(RewardTimeoutError, match=r"slow at row 1 did not answer within 60 s for rows 0 to 2"):
        retried(CompletionRewards({"slow": slow, "right": right}), timeout=60)
    assert children() == set()


def test_parts_of_every_kind_run_within_a_time_limit() -> None:
    """right: 1, 0, 1; length: 1, 2, 3; later: -, .5, .5; the model: .25 each."""

    class Model(nn.Module):
        def compute_rewards(self, states: Any, actions: Any) -> Tensor:
            assert os.getpid() != parent
            return torch.full([len(states)], 0.25)

    parent = os.getpid()
    parts = {"right": right, "length": length, "later": later, "model": Model()}
    found = retried(CompletionRewards(parts), timeout=60.0)
    assert found.values.tolist() == [2.25, 2.75, 4.75]
    assert list(found.components) == [*parts]
    assert children() == set()


def test_an_exception_in_another_process_names_the_function_its_row_and_its_cause() -> None:
    message = "raised RuntimeError: picky raised KeyError: 'bb' at row 1 for rows"
    with pytest.raises(RewardError, match=message) as caught:
        retried(CompletionRewards(picky), timeout=60.0)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert isinstance(caught.value.__cause__.__cause__, KeyError)
    assert "in picky" in caught.value.__cause__.__notes__[0]


def test_the_conformance_kit_passes() -> None:
    rewards = CompletionRewards({"right": right, "judge": Judge()})
    check_reward_model(rewards, ROWS, [A, B, C], strict=True).raise_for_failures()


def test_the_state_of_a_function_is_saved_and_loaded() -> None:
    class Fading:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, completions: list[str]) -> list[float]:
            self.calls += 1
            return [1.0 / self.calls] * len(completions)

        def state_dict(self) -> dict[str, Any]:
            return {"calls": self.calls}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.calls = state["calls"]

    first, second = CompletionRewards(Fading()), CompletionRewards(Fading())
    first.compute_rewards(ROWS, [A, B, C])
    second.load_state_dict(first.state_dict())
    assert second.compute_rewards(ROWS, [A, B, C]).tolist() == [0.5, 0.5, 0.5]
