"""Groups that branch: what is sampled and forwarded once, which rows result, and which advantages their tokens get."""

import asyncio
import threading
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from adapters.agents import AgentPolicy, Branching, Conversation, EnvironmentReward
from grpo import AdvantageConfig, AdvantageEstimator, GRPOConfig, GRPOTrainer
from grpo.errors import ConfigError, ContractError
from grpo.types import ExperienceBatch
from tests.support.agent_parts import before_each_batch, changed, model_with, rows_of
from tests.support.agents import CHATML, FORGETFUL, Echo, Scripted, Tools, language_model, says_call, scores_one_by_one
from tests.support.clocks import ConversationClocks
from tests.support.llm_models import FLOAT32_GRADIENT, forward_shapes, gradients, relative_difference

BINARY = Branching(at=(1, 2), width=(2, 2))
ONCE = Branching(at=(1,), width=(2,))


class Forkable(Echo):
    """Says what it has heard. Its snapshot refers to its own list, as careless snapshots do."""

    def snapshot(self) -> Any:
        return {"count": self.count, "said": self.said}

    def restore(self, state: Any) -> None:
        assert self.seed is None  # no reset
        self.count, self.said = state["count"], state["said"]

    def step(self, action: Any) -> Any:
        _, *rest, info = super().step(action)
        return f"I heard {'|'.join(self.said)}", *rest, info


def branched(policy: Any, make: Any = Forkable, *, states: Any = ("you", "me"), size: int = 4, **options: Any) -> Any:
    torch.manual_seed(0)
    agent = AgentPolicy(policy, make, **{"branch": BINARY} | options)
    return agent, agent.sample_actions(list(states), size)


def said_in(row: Conversation) -> str:
    """The first letter of each turn."""
    return "".join(message["content"][0] for message in row.messages if message["role"] == "assistant")


def ending(turns: int) -> Any:
    """An environment that ends after this number of turns, or at a message with an x."""

    def step(self: Any, action: Any) -> Any:
        observation, reward, _, truncated, info = Forkable.step(self, action)
        return observation, reward, "x" in action["content"] or self.count == turns, truncated, info

    return changed(Forkable, step=step)


@cache
def script() -> Scripted:
    return Scripted([], max_new_tokens=100)


def scripted(turns: Any, make: Any = Forkable, *, size: int = 2, **options: Any) -> Any:
    """Rows of one group. One conversation is held at a time, to its end. The branches of the first fork come first."""
    script().turns = list(turns)
    options = {"branch": ONCE, "concurrency": 1} | options
    _, sampled = branched(script().policy, make, states=["you"], size=size, **options)
    return rows_of(sampled.actions), sampled.metrics


# Conversations


def test_branches_share_what_comes_before_the_fork_and_nothing_after() -> None:
    """Two branches after the first turn, and three after the second."""
    rows, metrics = scripted(list("abcdefghi"), size=6, branch=Branching(at=(1, 2), width=(2, 3)))
    heard = [[m["content"] for m in row.messages if m["role"] == "user"] for row in rows]
    assert heard == [
        ["Hello you", "I heard a", f"I heard a|{second}", f"I heard a|{second}|{third}"]
        for second, third in ("bc", "bf", "bg", "de", "dh", "di")
    ]
    assert [row.rewards for row in rows] == [(1.0, 2.0, 3.0)] * 6
    keys = [[turn.state_key for turn in row.turns] for row in rows]
    assert keys == [["()", "(1, 0)", "(2, 0)"]] * 3 + [["()", "(1, 0)", "(2, 3)"]] * 3
    assert not any(turn.continues for row in rows for turn in row.turns)
    assert {row.ended_by for row in rows} == {"environment"}
    # 1 + 2 + 6 turns of a letter and an end
    assert (metrics["agents/turns"], metrics["agents/tokens"], metrics["agents/ended_by_environment"]) == (9, 18, 6)


def test_a_conversation_that_ends_before_a_fork_stands_for_all_its_rows(subtests: pytest.Subtests) -> None:
    for turns, expected, num_turns in (
        ("x", ["x", "x", "x", "x"], 1),
        ("axbcd", ["ax", "ax", "abc", "abd"], 5),
        ("abcxd", ["abc", "abd", "ax", "ax"], 5),
    ):
        with subtests.test(turns=turns):
            rows, metrics = scripted(list(turns), ending(3), size=4, branch=BINARY)
            assert list(map(said_in, rows)) == expected
            assert (metrics["agents/turns"], metrics["agents/ended_by_environment"]) == (num_turns, 4)
            policy = script().policy
            scores = AgentPolicy(policy, Forkable).score_actions([None] * 4, rows)
            for row, log_probs in zip(rows, scores.log_probs, strict=True):
                expected_log_probs = scores_one_by_one(policy.model, row)
                torch.testing.assert_close(log_probs[: len(row)], expected_log_probs, atol=1e-5, rtol=0)


def test_conversations_fork_between_tool_calls_and_with_async_environments() -> None:
    class Caller(Tools):
        async def snapshot(self) -> Any:
            await asyncio.sleep(0)
            return self.said

        async def restore(self, state: Any) -> None:
            await asyncio.sleep(0)
            self.said = state

    call, called = says_call(), ["assistant", "tool"]
    rows, metrics = scripted([call, "a", call, "b"], Caller)
    roles = [[m["role"] for m in row.messages] for row in rows]
    assert roles == [["user", *called * times, "assistant", "user"] for times in (1, 2)]
    assert [row.rewards for row in rows] == [(0.0, 1.0), (0.0, 0.0, 1.0)]
    assert all(len(row.segments) == 1 for row in rows)
    assert metrics["agents/failed_calls"] == 0
    # a failed call before the fork counts once
    assert scripted([says_call("nothing"), "a", "b"], Caller)[1]["agents/failed_calls"] == 1


def test_single_conversations_do_not_branch() -> None:
    agent = AgentPolicy(language_model(max_new_tokens=20), Echo, branch=BINARY)  # no snapshot() is needed
    assert [row.turns[0].state_key for row in agent.generate_actions(["you"], 3)[0]] == [None] * 3
    trainer = GRPOTrainer(config=GRPOConfig(group_size=4), policy=agent, reward_model=EnvironmentReward())
    assert "eval/avg_reward" in trainer.evaluate(["you", "me"], num_actions_per_state=1)


def test_concurrency_changes_no_token() -> None:
    policy = language_model(max_new_tokens=30)
    found = []
    for concurrency in (1, 3, 64):
        _, sampled = branched(policy, size=4, concurrency=concurrency)
        rows = rows_of(sampled.actions)
        found.append([([s.token_ids for s in row.segments], row.turns, row.messages) for row in rows])
    assert found[0] == found[1] == found[2]
    assert len({str(tokens) for tokens, *_ in found[0]}) > 5


def test_each_branch_has_random_numbers_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """After equal turns, branches of different trees do not sample the same tokens."""
    asked = Mock(wraps=script().policy.sample_tokens)
    monkeypatch.setattr(script().policy, "sample_tokens", asked)
    scripted("a" * 14, size=8, branch=BINARY)
    seeds = [seed for call in asked.call_args_list for seed in call.kwargs["seeds"]]
    assert len(set(seeds)) == len(seeds) == 14


def test_the_number_of_open_environments_is_bounded() -> None:
    open_now, most = [0], [0]

    class Counted(Forkable):
        def __init__(self, state: Any) -> None:
            super().__init__(state)
            open_now[0] += 1
            most[0] = max(most[0], open_now[0])

        def close(self) -> None:
            open_now[0] -= 1

    branched(language_model(max_new_tokens=30), Counted, size=8, concurrency=3)
    assert (open_now, most) == ([0], [3])


# Failures


@pytest.mark.parametrize(
    ("method", "turns", "lost"),
    [
        ("step", "x", [True, True]),  # before the fork: all rows
        ("step", "axbc", [True, False]),  # in the first branch
        ("step", "abcx", [False, True]),  # in the second
        ("snapshot", "x", [True, True]),
        ("restore", "abc", [False, True]),
    ],
)
def test_a_failure_loses_the_rows_below_it(method: str, turns: str, lost: list[bool]) -> None:
    """Each method is called in the environment's own thread, so one that hangs is given up as any other."""
    threads: set[str] = set()

    def fails(self: Any, *given: Any) -> Any:
        threads.add(threading.current_thread().name)
        if method == "restore" or "x" in (given[0]["content"] if given else self.said):
            raise KeyError("lost")
        return getattr(Forkable, method)(self, *given)

    rows, metrics = scripted(list(turns), changed(Forkable, **{method: fails}))
    assert [row.reward != row.reward for row in rows] == lost
    assert [row.ended_by == "error" for row in rows] == lost
    assert metrics["agents/ended_by_error"] == sum(lost)
    assert threads == {"environment"}


def test_a_branch_that_waits_for_its_turn_has_not_timed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One conversation at a time: the second branch begins after more than the timeout."""
    policy, clocks = Scripted(list("abcde"), max_new_tokens=100).policy, ConversationClocks(monkeypatch)
    before_each_batch(policy, lambda prompts: clocks.move())
    _, sampled = branched(policy, states=["you"], size=2, branch=ONCE, concurrency=1, timeout=0.2)
    assert [row.ended_by for row in rows_of(sampled.actions)] == ["environment"] * 2


NO_RESTORE = changed(Echo, snapshot=lambda self: None)
UNCOPIED = changed(Forkable, snapshot=lambda self: threading.Lock())


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda: Branching(at=(), width=()), ConfigError, r"ascending integers of at least 1.*at=\(\) and width=\(\)"),
        (lambda: Branching(at=(2, 2), width=(2, 2)), ConfigError, r"got at=\(2, 2\)"),
        (lambda: Branching(at=(0,), width=(2,)), ConfigError, r"got at=\(0,\)"),
        (lambda: Branching(at=(1,), width=(1,)), ConfigError, r"width=\(1,\)"),
        (lambda: Branching(at=(1, 2), width=(2,)), ConfigError, r"width=\(2,\)"),
        (lambda: Branching(at=(1.0,), width=(2,)), ConfigError, r"got at=\(1.0,\)"),  # type: ignore[arg-type]
        (lambda: Branching(at=1, width=2), ConfigError, r"got at=1 and width=2"),  # type: ignore[arg-type]
        (lambda: made(branch=2), ConfigError, r"branch must be a Branching; got int 2"),
        (lambda: made(max_turns=2), ConfigError, r"branch.at must be below max_turns=2.*got \(1, 2\)"),
        (lambda: made(make=play), ConfigError, r"branch needs environments.*got an agent program"),
        (lambda: branched(script().policy, size=6), ConfigError, r"a multiple of 4.*width=\(2, 2\); got 6. Use 8"),
        (lambda: scripted("a", NO_RESTORE), ContractError, r"snapshot\(\) and restore\(state\); Changed lacks one"),
        (lambda: scripted("a", UNCOPIED), ContractError, r"Changed.snapshot must return a value that copy.deepcopy"),
    ],
)
def test_what_cannot_branch_is_refused(act: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        act()


async def play(chat: Any, state: Any) -> float:
    return 0.0


def made(make: Any = Forkable, **options: Any) -> Any:
    return AgentPolicy(SimpleNamespace(tokenizer=None), make, **{"branch": BINARY} | options)  # type: ignore[arg-type]


# Scores


@pytest.mark.parametrize("template", [CHATML, FORGETFUL], ids=["appends", "rewrites"])
def test_the_gradient_is_the_sum_over_rows_and_contexts_one_by_one(template: str) -> None:
    policy = model_with(template, max_new_tokens=40)
    agent, sampled = branched(policy, size=4)
    rows = rows_of(sampled.actions)
    assert max(len(row.turns) for row in rows) == 3
    assert max(len(row.segments) for row in rows) > 1 or template == CHATML
    weights = torch.randn(sampled.mask.shape)
    scores = agent.score_actions([None] * 8, rows)
    torch.testing.assert_close(scores.log_probs, sampled.behaviour_log_probs, atol=1e-5, rtol=0)
    assert torch.equal(scores.mask, sampled.mask)
    whole = gradients(policy.model, (scores.log_probs * weights).sum())
    expected: dict[str, Any] = {}
    for row, weight in zip(rows, weights, strict=True):
        slopes = gradients(policy.model, (scores_one_by_one(policy.model, row) * weight[: len(row)]).sum())
        expected = {name: slope + expected.get(name, 0) for name, slope in slopes.items()}
    assert relative_difference(whole, expected) < FLOAT32_GRADIENT
    # split into passes and micro-batches
    narrow = model_with(template, max_new_tokens=40, max_tokens_per_forward=100)
    agent = AgentPolicy(narrow, Forkable, branch=BINARY)
    parts = agent.plan_micro_batches([None] * 8, rows)
    assert len(parts) > 2
    assert sorted(i for part in parts for i in part) == list(range(8))
    total = torch.zeros(())
    for part in parts:
        some = agent.score_actions([None] * len(part), [rows[i] for i in part]).log_probs
        total = total + (some * weights[list(part), : some.shape[1]]).sum()
    assert relative_difference(gradients(narrow.model, total), expected) < FLOAT32_GRADIENT


def test_each_token_of_a_tree_is_forwarded_once() -> None:
    """Turns of one length, so that nothing is padded: 1 root, 2 branches and 4 leaves, and not 4 x 3 turns."""
    policy = script().policy
    rows, _ = scripted(list("abcdefg"), size=4, branch=BINARY)
    first, second = rows[0].segments[0].forks
    prompt, whole = rows[0].segments[0].num_context_tokens, len(rows[0].segments[0].token_ids)
    assert {len(row.segments[0].token_ids) for row in rows} == {whole}
    shapes = forward_shapes(policy.model)
    agent = AgentPolicy(policy, Forkable)
    agent.score_actions([None] * 4, rows)
    assert shapes == [(1, prompt), (1, first - prompt), (2, second - first), (4, whole - second)]
    budget = first + 4 * (whole - first)  # what is shared until the first fork counts once
    narrow = AgentPolicy(language_model(max_tokens_per_forward=budget), Forkable)
    assert narrow.plan_micro_batches([None] * 4, rows) == [[0, 1, 2, 3]]
    # a root that ended early: four equal rows are one
    rows, _ = scripted(["y" * 100], size=4, branch=BINARY)
    shapes.clear()
    agent.score_actions([None] * 4, rows)
    assert [count for count, _ in shapes] == [1, 1]


# Credit


def test_gigpo_weighs_each_edge_by_its_leaves_and_compares_it_with_its_siblings() -> None:
    """Two roots with the branches (2, 2), turns of different lengths, and two turns after the last fork. The rewards of the
    first: 8 4 | 2 2, of the second, whose first branch ended early: 3 3 | 0 2. V(group) = 24 / 8 = 3; V after the roots' edges:
    4 and 2; after the branches: 6, 2, 3, 1.

    Leaves x (V(child) - V(parent)): roots 4 x (4 - 3) = 4 and 4 x (2 - 3) = -4; branches 2 x (6 - 4) = 4, 2 x (2 - 4) = -4,
    2 x (3 - 2) = 2, 2 x (1 - 2) = -2; leaves 8 - 6 = 2, -2, 0, 0, 0 - 1 = -1, 1. The early end has no leaves of its own."""
    turns = {(): iter("ah"), ("a",): iter("be"), ("a", "b"): iter("cd"), ("a", "e"): iter("fg")}
    turns |= {("h",): iter("xi"), ("h", "i"): iter("jk")}
    rows = tree_of(turns)
    said = list(map(said_in, rows))
    assert said == ["abcz", "abdz", "aefz", "aegz", "hx", "hx", "hijz", "hikz"]
    assert [[turn.continues for turn in row.turns] for row in rows[3:5]] == [[False] * 3 + [True], [False] * 2]
    agent = AgentPolicy(script().policy, Forkable)
    mask, keys = agent.score_actions([None] * 8, rows).mask, agent.state_keys([None] * 8, rows)
    rewards, group_ids = torch.tensor([8.0, 4.0, 2.0, 2.0, 3.0, 3.0, 0.0, 2.0]), torch.zeros(8, dtype=torch.int64)
    given = {"rewards": rewards, "group_ids": group_ids, "state_keys": keys, "mask": mask}
    batch = ExperienceBatch.from_rows([0] * 8, rows, **given)
    both = AdvantageEstimator(AdvantageConfig(credit="gigpo"))(batch)
    between = AdvantageEstimator(AdvantageConfig(credit="row"))(batch)[:, None].expand(batch.mask.shape)

    def of_turns(advantages: torch.Tensor) -> dict[str, float]:
        """The sum over rows of each turn's weight, which is the same for all tokens of the turn."""
        sums: dict[str, float] = {}
        for row, text, values in zip(rows, said, advantages, strict=True):
            parts = values[: len(row)].split([turn.num_tokens for turn in row.turns])
            for number, of_turn in enumerate(parts, start=1):
                assert torch.equal(of_turn, of_turn[:1].expand(len(of_turn)))
                sums[text[:number]] = sums.get(text[:number], 0.0) + of_turn[0].item()
        return sums

    edges = ["a", "ab", "abc", "abd", "ae", "aef", "aeg", "h", "hx", "hi", "hij", "hik"]
    within = dict(zip(edges, [4, 4, 2, -2, -4, 0, 0, -4, 2, -2, -1, 1], strict=True))
    assert of_turns(both - between) == within | {f"{edge}z": within[edge] for edge in edges if len(edge) == 3}
    # leaves x (V(child) - V(group)): a 4 x 1, ab 2 x 3, abc 5, abd 1, ae 2 x -1, aef -1, aeg -1,
    # h 4 x -1, hx 2 x 0, hi 2 x -2, hij -3, hik -1
    outer = dict(zip(edges, [4, 6, 5, 1, -2, -1, -1, -4, 0, -4, -3, -1], strict=True))
    assert of_turns(between) == outer | {f"{edge}z": outer[edge] for edge in edges if len(edge) == 3}


def tree_of(turns: dict[Any, Any]) -> list[Conversation]:
    """Two trees of four rows, in which a turn depends on what was said before, and on how often it was asked for."""

    def turn(text: str) -> str:
        letter = next(turns.get(tuple(said[0] for said in text.split("assistant\n")[1:-1]), iter("z")))
        return letter * (1 + ord(letter) % 5)

    policy = Scripted(turn, max_new_tokens=100).policy
    return rows_of(branched(policy, ending(4), states=["you"], size=8, concurrency=1)[1].actions)


@pytest.mark.parametrize("credit", ["gigpo", "return_to_go"])
def test_the_core_trains_on_trees(credit: Any) -> None:
    agent = AgentPolicy(model_with(FORGETFUL, max_new_tokens=20), Forkable, max_turns=3, branch=ONCE)
    advantage, reward = AdvantageConfig(credit=credit), EnvironmentReward(per_turn=credit == "return_to_go")
    config = GRPOConfig(group_size=4, seed=0, advantage=advantage, num_epochs_per_update=2, micro_batch_size=3)
    trainer = GRPOTrainer(config=config, policy=agent, reward_model=reward)
    batch = trainer.collect(["you", "me"])
    assert (batch.state_keys is not None) == (credit == "gigpo")
    metrics = trainer.update(batch)
    assert metrics["train/num_updates"] == 2
    assert metrics["train/ratio_mean"] == pytest.approx(1, abs=0.2)
    assert metrics["train/grad_norm"] > 0


def test_the_best_of_k_rows_needs_independent_rows() -> None:
    config = GRPOConfig(group_size=4, advantage=AdvantageConfig(baseline="max_at_k", k=2))
    alone, trees = (AgentPolicy(script().policy, Forkable, branch=branch) for branch in (None, ONCE))
    GRPOTrainer(config=config, policy=alone, reward_model=EnvironmentReward())
    with pytest.raises(ConfigError, match=r"'max_at_k' needs .* independently; AgentPolicy.has_dependent_rows is True"):
        GRPOTrainer(config=config, policy=trees, reward_model=EnvironmentReward())


def test_rows_of_a_tree_come_back_from_their_states() -> None:
    rows, _ = scripted(list("abcde"))
    assert rows[0].segments[0].forks
    assert [Conversation.from_state(row.to_state()) for row in rows] == rows
