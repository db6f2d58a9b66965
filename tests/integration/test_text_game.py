"""`examples/text_game.py`: the game is the one that its first lines describe, and a short run learns."""

import re
import sys
from itertools import pairwise

import pytest

from examples import text_game


def share_won(numbers: range, reply: dict[str, str]) -> float:
    """Share of games won by a player that replies so to what it reads."""
    num_won = 0
    for number in numbers:
        game = text_game.make_game(number)
        text, _ = game.reset(seed=number)
        is_over, reward = False, 0.0
        while not is_over:
            text, reward, is_over, _, _ = game.step({"content": reply[text]})
        num_won += reward == 1
    return num_won / len(numbers)


@pytest.mark.slow
def test_chance_and_the_best_play_are_as_the_example_says() -> None:
    """After r, the opponent most likely plays p, and s wins; and so on. Five standard deviations are allowed."""
    numbers = range(2000, 2150)
    assert share_won(numbers, {"b": "r", "r": "s", "p": "r", "s": "p"}) == pytest.approx(0.97, abs=0.07)
    random_wins = sum(text_game.play(number)[1] == 1 for number in numbers) / len(numbers)
    assert random_wins == pytest.approx(0.40, abs=0.2)


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


@pytest.mark.slow
def test_the_player_of_the_warm_up_is_mediocre() -> None:
    """All moves right win 97 %, and no move 40 %."""
    numbers = range(2000, 2150)
    rates = [sum(text_game.play(number, share)[1] == 1 for number in numbers) / 150 for share in (0.25, 1.0)]
    assert rates[0] < 0.75 < 0.9 < rates[1]


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
    monkeypatch.setattr(sys, "argv", ["text_game", "--seeds", "0", "--iterations", "15"])
    text_game.main()
    printed = capsys.readouterr().out
    (before, warmed_up, after) = map(float, re.findall(r"^ +0 +([\d.]+)% +([\d.]+)% +([\d.]+)%", printed, re.M)[-1])
    assert before < 40, printed
    assert warmed_up < 65, printed
    assert after > warmed_up + 10, printed
    assert re.search(r"A game of seed 0 after GRPO \(reward -?\d\):\n  reads   b\n  policy  \w", printed), printed
