"""The examples with seats: a proposer and a solver, and an agent whose user is not trained. Rewards by hand, short runs."""

import re
from typing import Any

import pytest
import torch

from adapters.agents import AgentPolicy, Conversation, EnvironmentReward
from adapters.llm import HFPolicy
from examples import guessing_game, proposer_and_solver
from grpo import GRPOConfig, GRPOTrainer
from tests.support.example_runs import NUMBER
from tests.support.policies import digest, weights_of


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
