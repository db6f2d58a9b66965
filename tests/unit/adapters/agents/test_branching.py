"""Groups that branch: what is sampled and forwarded once, which rows result, and which advantages their tokens get."""

import asyncio
import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adapters.agents import AgentPolicy, Branching, Conversation, EnvironmentReward, rollouts
from adapters.llm import SampledTokens
from grpo import AdvantageConfig, AdvantageEstimator, GRPOConfig, GRPOTrainer, RewardConfig
from grpo.errors import ConfigError, ContractError
from grpo.types import ExperienceBatch
from tests.support.agents import (
    FORGETFUL,
    Echo,
    Scripted,
    Tools,
    chat_tokenizer,
    language_model,
    says_call,
    scores_one_by_one,
)
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


def rows_of(sampled: Any) -> list[Conversation]:
    return [row for group in sampled.actions for row in group]


def branched(policy: Any, make: Any = Forkable, *, states: Any = ("you", "me"), size: int = 4, **options: Any) -> Any:
    torch.manual_seed(0)
    agent = AgentPolicy(policy, make, **{"branch": BINARY} | options)
    return agent, agent.sample_actions(list(states), size)


@cache
def script() -> Scripted:
    return Scripted([], max_new_tokens=100)


def scripted(turns: Any, make: Any = Forkable, *, size: int = 2, **options: Any) -> Any:
    """Rows of one group. One conversation is held at a time, to its end. The branches of the first fork come first."""
    script().turns = list(turns)
    _, sampled = branched(
        script().policy, make, states=["you"], size=size, **{"branch": ONCE, "concurrency": 1} | options
    )
    return rows_of(sampled), sampled.metrics


# Conversations


def test_branches_share_what_comes_before_the_fork_and_nothing_after() -> None:
    rows, metrics = scripted(list("abcdefg"), size=4, branch=BINARY)
    heard = [[m["content"] for m in row.messages if m["role"] == "user"] for row in rows]
    assert heard == [
        ["Hello you", "I heard a", f"I heard a|{second}", f"I heard a|{second}|{third}"]
        for second, third in ("bc", "bf", "de", "dg")
    ]
    assert [row.rewards for row in rows] == [(1.0, 2.0, 3.0)] * 4
    assert [[turn.state_key for turn in row.turns] for row in rows] == [
        ["()", "(1, 0)", "(2, 0)"],
        ["()", "(1, 0)", "(2, 0)"],
        ["()", "(1, 0)", "(2, 2)"],
        ["()", "(1, 0)", "(2, 2)"],
    ]
    assert not any(turn.continues for row in rows for turn in row.turns)
    assert {row.ended_by for row in rows} == {"environment"}
    # 1 + 2 + 4 turns of a letter and an end
    assert (metrics["agents/turns"], metrics["agents/tokens"], metrics["agents/ended_by_environment"]) == (7, 14, 4)


def test_forks_may_have_different_widths() -> None:
    rows, metrics = scripted(list("abcdefghi"), size=6, branch=Branching(at=(1, 2), width=(2, 3)))
    assert [row.turns[2].state_key for row in rows] == ["(2, 0)"] * 3 + ["(2, 3)"] * 3
    assert metrics["agents/turns"] == 1 + 2 + 6


def test_a_conversation_that_ends_before_a_fork_stands_for_all_its_rows(subtests: pytest.Subtests) -> None:
    class Ends(Forkable):
        def step(self, action: Any) -> Any:
            observation, reward, _, truncated, info = super().step(action)
            return observation, reward, "x" in action["content"] or self.count == 3, truncated, info

    for turns, expected, num_turns in (
        ("x", ["x", "x", "x", "x"], 1),
        ("axbcd", ["ax", "ax", "abc", "abd"], 5),
        ("abcxd", ["abc", "abd", "ax", "ax"], 5),
    ):
        with subtests.test(turns=turns):
            rows, metrics = scripted(list(turns), Ends, size=4, branch=BINARY)
            said = ["".join(m["content"] for m in row.messages if m["role"] == "assistant") for row in rows]
            assert said == expected
            assert metrics["agents/turns"] == num_turns
            assert metrics["agents/ended_by_environment"] == 4
            policy = script().policy
            scores = AgentPolicy(policy, Ends).score_actions([None] * 4, rows)
            for row, log_probs in zip(rows, scores.log_probs, strict=True):
                torch.testing.assert_close(
                    log_probs[: len(row)], scores_one_by_one(policy.model, row), atol=1e-5, rtol=0
                )


def test_conversations_fork_between_tool_calls_and_with_async_environments() -> None:
    class Caller(Tools):
        async def snapshot(self) -> Any:
            await asyncio.sleep(0)
            return self.said

        async def restore(self, state: Any) -> None:
            await asyncio.sleep(0)
            self.said = state

    call = says_call()
    rows, metrics = scripted([call, "a", call, "b"], Caller)
    assert [[m["role"] for m in row.messages] for row in rows] == [
        ["user", "assistant", "tool", "assistant", "user"],
        ["user", "assistant", "tool", "assistant", "tool", "assistant", "user"],
    ]
    assert [row.rewards for row in rows] == [(0.0, 1.0), (0.0, 0.0, 1.0)]
    assert all(len(row.segments) == 1 for row in rows)
    assert metrics["agents/failed_calls"] == 0
    # a failed call before the fork counts once
    assert scripted([says_call("nothing"), "a", "b"], Caller)[1]["agents/failed_calls"] == 1


def test_single_conversations_do_not_branch() -> None:
    agent = AgentPolicy(language_model(max_new_tokens=20), Echo, branch=BINARY)  # no snapshot() is needed
    (conversations,) = agent.generate_actions(["you"], 3)
    assert [row.turns[0].state_key for row in conversations] == [None] * 3
    trainer = GRPOTrainer(config=GRPOConfig(group_size=4), policy=agent, reward_model=EnvironmentReward())
    assert "eval/avg_reward" in trainer.evaluate(["you", "me"], num_actions_per_state=1)


def test_concurrency_changes_no_token() -> None:
    policy = language_model(max_new_tokens=30)
    found = []
    for concurrency in (1, 3, 64):
        _, sampled = branched(policy, size=4, concurrency=concurrency)
        found.append([([s.token_ids for s in row.segments], row.turns, row.messages) for row in rows_of(sampled)])
    assert found[0] == found[1] == found[2]
    assert len({str(tokens) for tokens, *_ in found[0]}) > 5


def test_each_branch_has_random_numbers_of_its_own() -> None:
    """After equal turns, branches of different trees do not sample the same tokens."""
    asked: list[tuple[tuple[int, ...], int]] = []
    real = script().policy.sample_tokens

    class Listening:
        def __getattr__(self, name: str) -> Any:
            return getattr(script().policy, name)

        def sample_tokens(self, prompts: Any, *, seeds: Any, **options: Any) -> Any:
            asked.extend(zip(map(tuple, prompts), seeds, strict=True))
            return real(prompts, seeds=seeds, **options)

    script().turns = list("aaaaaaaaaaaaaaaa")
    branched(Listening(), states=["you"], size=8)
    assert len({seed for _, seed in asked}) == len(asked) == 14


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


class Failing(Forkable):
    """Fails at a message, in a method."""

    method, word = "step", "x"

    def step(self, action: Any) -> Any:
        self.fail("step", action["content"])
        return super().step(action)

    def snapshot(self) -> Any:
        self.fail("snapshot", self.said[-1])
        return super().snapshot()

    def restore(self, state: Any) -> None:
        self.fail("restore", self.word)
        super().restore(state)

    def fail(self, method: str, word: str) -> None:
        if method == self.method and word == self.word:
            raise KeyError("lost")


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
    make = type("Failing", (Failing,), {"method": method})
    rows, metrics = scripted(list(turns), make)
    assert [row.reward != row.reward for row in rows] == lost
    assert [row.ended_by == "error" for row in rows] == lost
    assert metrics["agents/ended_by_error"] == sum(lost)


def test_a_hanging_branch_loses_its_row_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "GRACE_SECONDS", 0.05)
    release = threading.Event()

    class Hangs(Forkable):
        def restore(self, state: Any) -> None:
            release.wait(20)

    rows, metrics = scripted(list("abc"), Hangs, timeout=0.2)
    release.set()
    assert [row.ended_by for row in rows] == ["environment", "timeout"]
    assert [len(row.turns) for row in rows] == [3, 1]
    assert metrics["agents/abandoned"] == 1


def test_a_branch_that_waits_for_its_turn_has_not_timed_out() -> None:
    """One conversation at a time: the second branch begins after more than the timeout."""
    script = Scripted(list("abcde"), max_new_tokens=100)
    real = script.policy.sample_tokens

    def slow(*args: Any, **options: Any) -> Any:
        threading.Event().wait(0.15)
        return real(*args, **options)

    script.policy.sample_tokens = slow
    _, sampled = branched(script.policy, states=["you"], size=2, branch=ONCE, concurrency=1, timeout=0.2)
    assert [row.ended_by for row in rows_of(sampled)] == ["environment"] * 2


def test_an_error_of_a_branch_ends_the_run_at_once() -> None:
    class Wrong(Forkable):
        def step(self, action: Any) -> Any:
            return "wrong" if action["content"] == "x" else super().step(action)

    with pytest.raises(ContractError, match=r"Wrong.step must return"):
        scripted(["a", "b", "c", "x"], Wrong)


class NoRestore(Echo):
    def snapshot(self) -> Any:
        return None


class Uncopied(Forkable):
    def snapshot(self) -> Any:
        return threading.Lock()


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (
            lambda: Branching(at=(), width=()),
            ConfigError,
            r"ascending integers of at least 1.*got at=\(\) and width=\(\)",
        ),
        (lambda: Branching(at=(2, 2), width=(2, 2)), ConfigError, r"got at=\(2, 2\)"),
        (lambda: Branching(at=(0,), width=(2,)), ConfigError, r"got at=\(0,\)"),
        (lambda: Branching(at=(1,), width=(1,)), ConfigError, r"width=\(1,\)"),
        (lambda: Branching(at=(1, 2), width=(2,)), ConfigError, r"width=\(2,\)"),
        (lambda: Branching(at=(1.0,), width=(2,)), ConfigError, r"got at=\(1.0,\)"),  # type: ignore[arg-type]
        (lambda: Branching(at=1, width=2), ConfigError, r"got at=1 and width=2"),  # type: ignore[arg-type]
        (lambda: made(branch=2), ConfigError, r"branch must be a Branching; got int 2"),
        (lambda: made(max_turns=2), ConfigError, r"branch.at must be below max_turns=2.*got \(1, 2\)"),
        (lambda: made(make=play), ConfigError, r"branch needs environments.*got an agent program"),
        (
            lambda: branched(script().policy, size=6),
            ConfigError,
            r"must be a multiple of 4.*width=\(2, 2\); got 6. Use 8",
        ),
        (lambda: scripted(["a"], NoRestore), ContractError, r"snapshot\(\) and restore\(state\); NoRestore lacks one"),
        (lambda: scripted(["a"], Uncopied), ContractError, r"Uncopied.snapshot must return a value that copy.deepcopy"),
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


@pytest.mark.parametrize("template", [None, FORGETFUL], ids=["appends", "rewrites"])
def test_the_gradient_is_the_sum_over_rows_and_contexts_one_by_one(template: str | None) -> None:
    tokenizer = chat_tokenizer(template) if template else None
    policy = language_model(tokenizer=tokenizer, max_new_tokens=40)
    agent, sampled = branched(policy, size=4)
    rows = rows_of(sampled)
    assert max(len(row.turns) for row in rows) == 3
    assert max(len(row.segments) for row in rows) > 1 or template is None
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
    narrow = language_model(tokenizer=tokenizer, max_new_tokens=40, max_tokens_per_forward=100)
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


def test_no_history_is_computed_again_when_a_conversation_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted positions of sampling. A branch computes the last token before the fork, which the first row has not read yet,
    what the environment answered, and its own turn but for its last token: as many tokens as the edge has. The root has no
    token before it. Nothing is padded, because all turns have one token."""
    monkeypatch.setattr(rollouts, "SHORTEST_WAIT", 30.0)  # however busy this machine is
    policy = language_model()
    real = policy.sample_tokens

    def one_token_each(prompts: Any, **options: Any) -> Any:
        return real(prompts, **options | {"end_token_ids": range(len(policy.tokenizer))})

    policy.sample_tokens = one_token_each
    shapes = forward_shapes(policy.model)
    _, sampled = branched(policy, states=["you"], size=4)
    rows = rows_of(sampled)
    assert sampled.metrics["agents/turns"] == 7
    forks, whole = rows[0].segments[0].forks, len(rows[0].segments[0].token_ids)
    edges = [(1, forks[0]), (2, forks[1] - forks[0]), (4, whole - forks[1])]
    assert {turn.num_tokens for row in rows for turn in row.turns} == {1}
    assert sum(a * b for a, b in shapes) == sum(count * length for count, length in edges) - 1


# Credit


def batch_of(rows: list[Conversation], rewards: Any = None) -> ExperienceBatch:
    agent = AgentPolicy(script().policy, Forkable)
    scores = agent.score_actions([None] * len(rows), rows)
    rewards = EnvironmentReward().compute_rewards([], rows) if rewards is None else torch.tensor(rewards)
    keys = agent.state_keys([None] * len(rows), rows)
    given = {"rewards": rewards, "group_ids": torch.zeros(len(rows), dtype=torch.int64), "state_keys": keys}
    return ExperienceBatch.from_rows([0] * len(rows), rows, **given, mask=scores.mask)


def test_gigpo_weighs_each_edge_by_its_leaves_and_compares_it_with_its_siblings() -> None:
    """Two roots with the branches (2, 2), turns of different lengths, and two turns after the last fork. The rewards of the
    first: 8 4 | 2 2, of the second, whose first branch ended early: 3 3 | 0 2. V(group) = 24 / 8 = 3; V after the roots' edges:
    4 and 2; after the branches: 6, 2, 3, 1.

    Leaves x (V(child) - V(parent)): roots 4 x (4 - 3) = 4 and 4 x (2 - 3) = -4; branches 2 x (6 - 4) = 4, 2 x (2 - 4) = -4,
    2 x (3 - 2) = 2, 2 x (1 - 2) = -2; leaves 8 - 6 = 2, -2, 0, 0, 0 - 1 = -1, 1. The early end has no leaves of its own."""

    class Ends(Forkable):
        def step(self, action: Any) -> Any:
            observation, reward, _, truncated, info = super().step(action)
            return observation, reward, "x" in action["content"] or self.count == 4, truncated, info

    policy = Scripted([], max_new_tokens=100).policy
    turns = {(): iter("ah"), ("a",): iter("be"), ("a", "b"): iter("cd"), ("a", "e"): iter("fg")}
    turns |= {("h",): iter("xi"), ("h", "i"): iter("jk")}
    rows = tree_of(policy, turns, Ends)
    said = ["".join(m["content"][0] for m in row.messages if m["role"] == "assistant") for row in rows]
    assert said == ["abcz", "abdz", "aefz", "aegz", "hx", "hx", "hijz", "hikz"]
    assert [[turn.continues for turn in row.turns] for row in rows[3:5]] == [
        [False, False, False, True],
        [False, False],
    ]
    batch = batch_of(rows, [8.0, 4.0, 2.0, 2.0, 3.0, 3.0, 0.0, 2.0])
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


def tree_of(policy: Any, turns: dict[Any, Any], make: Any) -> list[Conversation]:
    """Two trees of four rows, in which a turn depends on what was said before, and on how often it was asked for."""
    tokenizer = policy.tokenizer
    sampler = policy._sampler

    def sample(prompts: Any, num_per_prompt: int, config: Any, **options: Any) -> Any:
        rows = []
        for prompt in prompts:
            said = tuple(tokenizer.decode(prompt).split("assistant\n")[1:-1])
            letter = next(turns.get(tuple(part[0] for part in said), iter("z")))
            text = letter * (1 + ord(letter) % 5)
            rows.append([*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id])
        return SampledTokens(
            token_ids=rows, finish_reasons=["end"] * len(rows), behaviour_log_probs=[[-1.0] * len(row) for row in rows]
        )

    sampler.sample = sample
    _, sampled = branched(policy, make, states=["you"], size=8, concurrency=1)
    return rows_of(sampled)


def test_early_ends_leave_the_gradient_unbiased() -> None:
    """All outcomes, weighted by their probabilities. The root says x with probability p, which ends the conversation with the
    reward 5, or a, and then two branches say y (reward 1) or z (reward 3) with probabilities q and 1 - q.

    E[R] = 5 p + (1 - p) (q + 3 (1 - q));  dE/dp = 5 - q - 3 (1 - q);  dE/dq = -2 (1 - p)
    """

    class Ends(Forkable):
        def step(self, action: Any) -> Any:
            word = action["content"]
            return "", {"x": 5.0, "a": 0.0, "y": 1.0, "z": 3.0}[word], word != "a", False, {}

    p, q = 0.4, 0.3
    prob = {"x": p, "a": 1 - p, "y": q, "z": 1 - q}
    slope_p = {"x": 1 / p, "a": -1 / (1 - p), "y": 0.0, "z": 0.0}
    slope_q = {"x": 0.0, "a": 0.0, "y": 1 / q, "z": -1 / (1 - q)}
    found = torch.zeros(3, dtype=torch.float64)
    for script in (["x"], *(["a", *branches] for branches in itertools.product("yz", repeat=2))):
        rows, _ = scripted(script, Ends)
        for row in rows:
            words = [m["content"] for m in row.messages if m["role"] == "assistant"]
            slopes = [1.0, *(sum(slope[word] for word in words) for slope in (slope_p, slope_q))]
            weight = torch.tensor([prob[word] for word in script], dtype=torch.float64).prod() / len(rows)
            found += weight * row.reward * torch.tensor(slopes, dtype=torch.float64)
    expected = [5 * p + (1 - p) * (q + 3 * (1 - q)), 5 - q - 3 * (1 - q), -2 * (1 - p)]
    assert found.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    "credit",
    ["gigpo", "return_to_go", *(pytest.param(c, marks=pytest.mark.slow) for c in ("row", "process_supervision"))],
)
def test_the_core_trains_on_trees(credit: Any) -> None:
    policy = language_model(max_new_tokens=20, tokenizer=chat_tokenizer(FORGETFUL))
    agent = AgentPolicy(policy, Forkable, max_turns=3, branch=ONCE)
    before = {name: weight.clone() for name, weight in agent.get_parameters().items()}
    reward = EnvironmentReward(per_turn=credit in ("return_to_go", "process_supervision"))
    config = GRPOConfig(
        group_size=4, seed=0, advantage=AdvantageConfig(credit=credit), num_epochs_per_update=2, micro_batch_size=3
    )
    trainer = GRPOTrainer(config=config, policy=agent, reward_model=reward)
    batch = trainer.collect(["you", "me"])
    assert (batch.state_keys is not None) == (credit == "gigpo")
    metrics = trainer.update(batch)
    assert metrics["train/num_updates"] == 2
    assert metrics["train/ratio_mean"] == pytest.approx(1, abs=0.2)
    assert any(not torch.equal(before[name], weight) for name, weight in agent.get_parameters().items())


def test_the_best_of_k_rows_needs_independent_rows() -> None:
    config = GRPOConfig(group_size=4, advantage=AdvantageConfig(baseline="max_at_k", k=2))
    alone, trees = (AgentPolicy(script().policy, Forkable, branch=branch) for branch in (None, ONCE))
    GRPOTrainer(config=config, policy=alone, reward_model=EnvironmentReward())
    with pytest.raises(ConfigError, match=r"'max_at_k' needs .* independently; AgentPolicy.has_dependent_rows is True"):
        GRPOTrainer(config=config, policy=trees, reward_model=EnvironmentReward())


def test_rows_of_a_failed_trunk_are_dropped_together() -> None:
    make = type("Failing", (Failing,), {"word": "x"})
    policy = Scripted(["x", "a", "b", "c", "d", "e"], max_new_tokens=100).policy
    agent = AgentPolicy(policy, make, branch=ONCE, concurrency=1)
    config = GRPOConfig(group_size=4, seed=0, reward=RewardConfig(non_finite="drop"))
    metrics = GRPOTrainer(config=config, policy=agent, reward_model=EnvironmentReward()).step(["you"])
    assert metrics["rows/dropped"] == 2


def test_states_of_rows_can_be_saved() -> None:
    rows, _ = scripted(list("abcde"))
    assert [Conversation.from_state(row.to_state()) for row in rows] == rows
    old = rows[0].to_state()
    for segment in old["segments"]:
        del segment["forks"]  # from before there were forks
    loaded = Conversation.from_state(old)
    assert loaded == replace(rows[0], segments=tuple(replace(segment, forks=()) for segment in rows[0].segments))
