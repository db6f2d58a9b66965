"""The examples of agents: two seats, a calculator, and a game. Their rules and rewards by hand, and short runs."""

import json
import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.agents import AgentPolicy, Conversation, EnvironmentReward
from adapters.llm import HFPolicy
from examples import guessing_game, proposer_and_solver, text_game, tool_agent
from examples.tool_agent import Problem
from grpo import GRPOConfig, GRPOTrainer
from tests.support.example_runs import NUMBER
from tests.support.policies import digest, weights_of

# --- a proposer and a solver, and an agent whose user is not trained


def played(policy: AgentPolicy, state: Any, *turns: str) -> Conversation:
    (row,) = policy.replay([state], [turns])
    return row


def test_a_proposer_and_a_solver_have_rewards_of_their_own() -> None:
    """The answer to the problem d is the last digit of 7 d + 3: 4 has the answer 1, and 5 has the answer 8."""
    policy = proposer_and_solver.make_policy(proposer_and_solver.make_model())
    for turns, rewards in (
        (["4", "1"], {"proposer": 1.0, "solver": 1.0}),
        (["4", "2"], {"proposer": 1.0, "solver": 0.0}),
        (["5", "8"], {"proposer": 0.0, "solver": 1.0}),
        (["5", "1"], {"proposer": 0.0, "solver": 0.0}),
    ):
        row = played(policy, "1", *turns)
        assert {str(turn.seat): turn.reward for turn in row.turns} == rewards
        assert [said[0]["content"] for said, _ in row.contexts] == ["propose1", f"solve{turns[0]}"]
    (turn,) = played(policy, "1", "solve").turns
    assert (turn.seat, turn.reward) == ("proposer", 0.0), "what is no digit is not solved"
    alone = played(proposer_and_solver.make_policy(policy.policy, proposer_and_solver.from_a_list), "4", "1")
    assert [(turn.seat, turn.reward) for turn in alone.turns] == [("solver", 1.0)]


@pytest.mark.parametrize("is_model", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_user_answers_without_being_trained(is_model: bool) -> None:
    torch.manual_seed(0)
    user = guessing_game.make_frozen_user() if is_model else guessing_game.user
    policy = guessing_game.make_policy(user)
    if isinstance(user, HFPolicy):
        weights = digest(weights_of(user))
        trainer = GRPOTrainer(
            config=GRPOConfig(group_size=8), policy=policy, reward_model=EnvironmentReward(per_turn=True)
        )
        assert trainer.step(guessing_game.NUMBERS)["train/num_updates"] == 1
        assert digest(weights_of(user)) == weights
    for number, turns, answers, rewards in (
        (7, ["7"], ["yes"], [1.0]),
        (7, ["3", "8", "7"], ["higher", "lower", "yes"], [0.0, 0.0, 0.8]),
        (0, ["4", "3", "2", "1"], ["lower"] * 4, [0.0] * 4),
        (0, ["4", "3", "2", "0"], ["lower", "lower", "lower", "yes"], [0.0, 0.0, 0.0, 0.7]),
    ):
        row = played(policy, number, *turns)
        assert list(row.rewards) == pytest.approx(rewards)
        assert {turn.seat for turn in row.turns} == {"agent"}
        ((said, _),) = row.contexts
        assert [message["content"] for message in said[2::2]] == answers[:-1], (
            "the agent has read all but the last answer"
        )


def test_binary_search_finds_all_numbers_with_four_guesses_and_seven_with_three() -> None:
    assert [guessing_game.halving(num_guesses=guesses) for guesses in (0, 1, 2, 3, 4)] == [0, 1, 3, 7, 10]


@pytest.mark.parametrize(
    ("example", "options", "shares"),
    [
        (proposer_and_solver, [], rf"\| 0 \| both together \| {NUMBER}% \| {NUMBER}% \|"),
        (guessing_game, [], r"\| 0 \| \d+% \| 40% \| \d+% \| 100% \|"),
        pytest.param(
            guessing_game, ["--user", "model"], r"\| 0 \| \d+% \| 40% \| \d+% \| 100% \|", marks=pytest.mark.slow
        ),
    ],
)
def test_the_short_form_trains_and_prints_its_table(
    example: Any, options: list[str], shares: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [example.__name__, "--seeds", "0", "--iterations", "1", *options])
    example.main()
    assert re.search(shares, capsys.readouterr().out)


@pytest.mark.faults
def test_the_agent_listens_to_the_user() -> None:
    """A shorter run than the documented one. Without listening, no more than four numbers of ten can be found."""
    before, after, _ = guessing_game.train(seed=0, iterations=80)
    assert before < 0.1
    assert after > 0.5


@pytest.mark.slow
def test_one_policy_learns_both_seats() -> None:
    torch.manual_seed(0)
    model = proposer_and_solver.make_model()
    proposer_and_solver.train(model, 50, 0)
    assert min(proposer_and_solver.shares_right(model)) > 0.4


# --- examples/tool_agent.py: an agent with a calculator

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


# --- examples/text_game.py


@pytest.mark.slow
def test_chance_the_best_play_and_the_mediocre_player_of_the_warm_up_win_as_the_example_says() -> None:
    """After r, the opponent most likely plays p, and s wins; and so on. Five standard deviations are allowed."""
    games = range(2000, 2150)
    rates = [sum(text_game.play(number, share)[1] == 1 for number in games) / 150 for share in (0.0, 0.25, 1.0)]
    assert rates[0] == pytest.approx(0.40, abs=0.2)
    assert rates[1] < 0.75
    assert rates[2] == pytest.approx(0.97, abs=0.07)


def test_the_opponent_repeats_its_cycle_in_four_moves_of_five_and_more() -> None:
    """It follows the cycle with 4/5 + 1/5 x 1/3 = 0.867."""
    opponent = text_game.Opponent(text_game.random.Random(0))
    moves = [opponent("") for _ in range(3001)]
    follow = [after == {"r": "p", "p": "s", "s": "r"}[before] for before, after in pairwise(moves)]
    assert sum(follow) / len(follow) == pytest.approx(0.867, abs=0.03)


def test_a_game_follows_from_its_number_and_is_trained_on_or_measured() -> None:
    assert max(text_game.HELD_OUT) < min(text_game.TRAINING)
    assert text_game.play(3) == text_game.play(3) != text_game.play(4)
    assert {text_game.make_game(number).reset(seed=0)[1]["player"] for number in range(8)} == {0, 1}


def test_a_state_is_a_round_and_what_was_read() -> None:
    game = text_game.make_game(5)
    read = [game.reset(seed=5)[0]]
    keys = [game.state_key()]
    for _ in range(2):
        read.append(game.step({"content": "r"})[0])
        keys.append(game.state_key())
    assert keys == list(enumerate(read))


@pytest.mark.faults  # two minutes
def test_a_short_run_learns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["text_game", "--seeds", "0", "--iterations", "15"])
    text_game.main()
    printed = capsys.readouterr().out
    (before, warmed_up, after) = map(float, re.findall(r"^ +0 +([\d.]+)% +([\d.]+)% +([\d.]+)%", printed, re.M)[-1])
    assert before < 40, printed
    assert warmed_up < 65, printed
    assert after > warmed_up + 10, printed
    assert re.search(r"A game of seed 0 after GRPO \(reward -?\d\):\n  reads   b\n  policy  \w", printed), printed
