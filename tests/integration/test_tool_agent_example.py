"""The example of an agent with a calculator: its environment, its rewards and its split by hand, and a short run."""

import json
import random
import re
from pathlib import Path

import pytest
import torch

from examples import tool_agent
from examples.tool_agent import Problem
from tests.support.example_runs import NUMBER

FIRST, SECOND = Problem(17, 25, 6, sum_is_first=True), Problem(17, 25, 6, sum_is_first=False)


def call(expression: str) -> str:
    return expression.join(tool_agent.CALL)


def test_the_calculator_does_one_operation(subtests: pytest.Subtests) -> None:
    table = {"17+25": "42", "42*6": "252", "17-25": "-8", "0*7": "0", "17+25*6": "error", "(17+25)": "error"}
    table |= {"17/25": "error", "-8*6": "error", "1234567+1": "error", "": "error"}
    for expression, result in table.items():
        with subtests.test(expression):
            assert tool_agent.calculated(expression) == result


def test_a_problem_has_two_operations() -> None:
    assert (FIRST.question, FIRST.operations, FIRST.results) == ("(17+25)*6", ("17+25", "42*6"), ("42", "252"))
    assert SECOND.question == "6*(17+25)"
    assert (SECOND.operations, SECOND.results) == (FIRST.operations, FIRST.results)


def test_conversations_have_the_rewards_worked_out_by_hand(subtests: pytest.Subtests) -> None:
    policy = tool_agent.make_policy()
    table = {  # turns, what the calculator returned, reward of the answer, share of the results
        "perfect": ([call("17+25"), call("42*6"), "252"], ["42", "252"], 1.0, 1.0),
        "result copied wrongly": ([call("17+25"), call("42*6"), "225"], ["42", "252"], 0.0, 1.0),
        "product first": ([call("25*6"), call("17+150"), "167"], ["150", "167"], 0.0, 0.0),
        "number copied wrongly": ([call("17+25"), call("24*6"), "144"], ["42", "144"], 0.0, 0.5),
        "two operations at once": ([call("17+25*6"), "252"], ["error"], 1.0, 0.0),
        "answered at once": (["252"], [], 1.0, 0.0),
        "not only the number": ([call("17+25"), call("42*6"), "252!"], ["42", "252"], 0.0, 1.0),
    }
    found = policy.replay([FIRST] * len(table), [turns for turns, _, _, _ in table.values()])
    shares = tool_agent.share_calculated([FIRST] * len(table), found)
    for (name, (_, returned, reward, share)), conversation, found_share in zip(
        table.items(), found, shares, strict=True
    ):
        with subtests.test(name):
            results = [message["content"] for message in conversation.messages if message["role"] == "tool"]
            assert results == returned
            assert conversation.reward == reward
            assert found_share == share


def test_a_conversation_is_one_short_context_and_its_states_are_the_results() -> None:
    (conversation,) = tool_agent.make_policy().replay([SECOND], [[call("17+25"), call("6*42"), "252"]])
    tokenizer = tool_agent.make_tokenizer()
    (segment,) = conversation.segments
    begin, end = tool_agent.CALL
    assert tokenizer.decode(segment.token_ids) == (
        f"<|user|>6*(17+25)<|end|><|assistant|>{begin}17+25{end}<|end|><|tool|>42<|end|>"
        f"<|assistant|>{begin}6*42{end}<|end|><|tool|>252<|end|><|assistant|>252<|end|>"
    )
    assert [turn.num_tokens for turn in conversation.turns] == [8, 7, 4]  # the expression, its two marks, and the end
    assert [turn.state_key for turn in conversation.turns] == ["[]", "['42']", "['42', '252']"]


def test_no_other_problem_has_the_numbers_of_a_held_out_sum() -> None:
    parts = tool_agent.make_problems(num_scripts=50, seed=0)
    assert [len(parts[name]) for name in ("held out", "scripts", "train")] == [300, 50, 5_000]
    pairs = {name: {tuple(sorted((problem.a, problem.b))) for problem in some} for name, some in parts.items()}
    assert not pairs["held out"] & (pairs["scripts"] | pairs["train"])
    swapped = {problem.a > problem.b for problem in parts["held out"]}
    assert swapped == {True, False}
    assert tool_agent.make_problems(50, seed=0) == parts
    assert tool_agent.make_problems(50, seed=1) != parts


def test_one_script_in_six_is_right_and_all_calls_can_be_read() -> None:
    rng = random.Random(0)
    scripts = [tool_agent.make_script(FIRST, rng) for _ in range(600)]
    assert 80 <= scripts.count([call("17+25"), call("42*6"), "252"]) <= 120
    assert {tuple(script) for script in scripts} == {
        (call("17+25"), "42"),
        (call("17+25"), call("42+6"), "48"),
        (call("17+25"), call("42*6"), "252"),
        (call("25*6"), "150"),
        (call("25*6"), call("150+17"), "167"),
        (call("25*6"), call("150*17"), "2550"),
    }


def test_untrained_models_are_wrong() -> None:
    torch.manual_seed(0)
    assert tool_agent.accuracy(tool_agent.converse(tool_agent.make_policy(), [FIRST, SECOND] * 4)) == 0.0


@pytest.mark.faults
def test_the_agent_learns_to_use_the_calculator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A short run. The documented accuracy takes more iterations."""
    shortened = ["--seeds", "0", "--scripts", "1000", "--warmup-steps", "220", "--iterations", "10"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["tool_agent", *shortened])
    tool_agent.main()
    printed = capsys.readouterr().out
    ((before, warm, after),) = (
        [float(share) for share in row]
        for row in re.findall(rf"\| 0 \| ({NUMBER})% \| ({NUMBER})% \| ({NUMBER})%", printed)
    )
    assert before == 0
    assert after > warm + 5
    folder = tmp_path / "runs" / "tool_agent" / "seed-0"
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 10
    conversations = json.loads((folder / "conversations.json").read_text())
    assert len(conversations) == 300
    assert all(messages[0]["role"] == "user" for messages in conversations)
