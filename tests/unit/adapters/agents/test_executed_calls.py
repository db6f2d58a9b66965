"""Agents whose tools run in an executor: results, errors and deadlines are messages, and lost calls leave no reward."""

import asyncio
import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from adapters.agents import AgentPolicy, Branching, Chat, Conversation, EnvironmentReward, Message, ToolCallLostError
from adapters.tools import ExecutorOptions, ServerLostError, Tool, ToolCatalogue, ToolExecutor, WorkerLostError
from grpo import GRPOConfig, GRPOTrainer
from grpo.config import RewardConfig
from grpo.errors import ConfigError, ContractError
from tests.support import hostile_tools, tool_functions
from tests.support.agent_parts import changed, user
from tests.support.agents import Echo, Scripted, converse, language_model, lookup, says_call
from tests.support.clocks import ConversationClocks
from tests.support.tool_executors import LINUX, LONG, OWN_USERS, number_here, soon
from tests.unit.adapters.tools.execution.test_hostile_calls import CATALOGUE as HOSTILE
from tests.unit.adapters.tools.execution.test_hostile_calls import DAILY, KINDS, LIMITS, RUNS, Case

pytestmark = LINUX

lost_once: list[int] = []


async def loses(times: int) -> str:
    """Lose some calls, and answer later ones."""
    lost_once.append(1)
    if len(lost_once) <= times:
        raise ServerLostError("the server is gone")
    return "found"


NAMES = ("add", "echo", "leave", "read", "write_for_ever")
CATALOGUE = ToolCatalogue(
    [
        *(Tool.from_function(getattr(tool_functions, name)) for name in NAMES),
        Tool.from_function(hostile_tools.misbehave),
        Tool.from_function(hostile_tools.misbehave, name="hang", timeout=0.4),
        Tool.from_function(loses, remote=True),
    ]
)
LIMITED = ExecutorOptions(timeout=LONG, max_output_bytes=1000, max_folder_bytes=2**20)


@pytest.fixture(scope="module")
def executor() -> Iterator[ToolExecutor]:
    with ToolExecutor(CATALOGUE, num_workers=2, options=LIMITED) as made:
        assert made.confinement == "bubblewrap"
        yield made


class Plain(Echo):
    """Ends at the first message without a call. It has no `tools()`, so it has all tools of the executor."""

    def step(self, action: Message) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return "bye", 1.0, True, False, {}


def calls(*named: tuple[str, dict[str, Any]]) -> str:
    return "".join(says_call(name, json.dumps(arguments)) for name, arguments in named)


def says(*turns: str) -> Any:
    return Scripted(turns, max_new_tokens=2000, positions=100_000).policy


def results(row: Conversation) -> list[str]:
    return [message["content"] for message in row.messages if message["role"] == "tool"]


def test_results_and_errors_of_calls_are_messages_in_the_order_of_the_calls(executor: ToolExecutor) -> None:
    turn = calls(
        ("add", {"a": 1, "b": 2}), ("add", {"a": "x"}), ("nope", {}), ("echo", {"value": {"a": [1, "b"]}}),
        ("misbehave", {"how": "raise_base"}), ("echo", {"value": "plain"}), ("misbehave", {"how": "long_text"}),
        ("read", {"path": "../secret"}), ("misbehave", {"how": "os_exit_7"}),
    )  # fmt: skip
    alone = calls(("write_for_ever", {}))  # calls beside it would find the folder full, too
    agent = AgentPolicy(says(turn, alone, "done"), Plain, executor=executor)
    sampled = agent.sample_actions(["you"], 1)
    ((row,),) = sampled.actions
    begins = [
        "3", "Error: InvalidArgumentsError: add: ",
        "Error: there is no tool 'nope'. The tools are add, echo, leave, read, write_for_ever, misbehave, hang, loses.",
        '{"a": [1, "b"]}', "Error: ToolRaisedError: misbehave: BaseException: base", "plain",
        "Error: OutputTooLargeError: misbehave: output must take at most 1000 bytes as JSON",
        "Error: PathOutsideRootError: read: ", "Error: WorkerDiedError: misbehave: ",
        "Error: FolderFullError: write_for_ever: the files in its folder take more than 1048576 bytes",
    ]  # fmt: skip
    found = results(row)
    assert [said[: len(begin)] for said, begin in zip(found, begins, strict=True)] == begins
    assert (row.reward, row.ended_by, sampled.metrics["agents/failed_calls"]) == (1.0, "environment", 7.0)
    assert row.messages[-2]["content"] == "done"


def test_an_endless_loop_ends_at_its_deadline_and_the_conversation_goes_on(
    executor: ToolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline of the tool is later than that of the environment: waiting for a call is not the environment's time."""
    clocks, run = ConversationClocks(monkeypatch), executor.run_async

    async def run_for_an_hour(*given: Any) -> Any:
        clocks.move()
        return await run(*given)

    monkeypatch.setattr(executor, "run_async", run_for_an_hour)
    turns = [calls(("hang", {"how": "busy"}), ("add", {"a": 1})), calls(("add", {"a": 2})), "done"]
    row = converse(says(*turns), Plain, executor=executor, timeout=0.3)[0]
    assert results(row) == ["Error: ToolTimeoutError: hang: no answer within 0.4 s; the worker was killed.", "2", "3"]
    assert (row.reward, row.ended_by) == (1.0, "environment")


def test_the_model_reads_the_tools_of_the_catalogue_that_the_environment_has(executor: ToolExecutor) -> None:
    some = changed(Plain, tools=lambda self: [tool_functions.add, CATALOGUE["hang"]])
    scripted = Scripted([calls(("misbehave", {"how": "sleep"})), "done"], max_new_tokens=2000, positions=100_000)
    (row,) = converse(scripted.policy, some, executor=executor)
    assert results(row) == ["Error: there is no tool 'misbehave'. The tools are add, hang."]
    shown = scripted.policy.tokenizer.decode(scripted.contexts[0])
    schemas = json.loads(shown.partition("Tools: ")[2].partition("<|im_end|>")[0])
    assert schemas == [CATALOGUE["add"].schema, CATALOGUE["hang"].schema]
    add = {"name": "add", "description": "Add two numbers.", "parameters": dict(CATALOGUE["add"].parameters)}
    assert schemas[0]["function"] == add


def test_each_conversation_has_a_folder_of_its_own_which_is_removed(executor: ToolExecutor) -> None:
    turns = [calls(("leave", {"name": "a"})), calls(("leave", {"name": "b"}), ("add", {"a": 1})), "done"]
    policy = AgentPolicy(language_model(max_new_tokens=400, positions=100_000), Plain, executor=executor)
    rows = policy.replay(["you"] * 4, [turns] * 4)
    assert [results(row) for row in rows] == [['["a"]', '["a", "b"]', "2"]] * 4
    assert [path.name for path in executor.root.iterdir() if path.name.startswith("conversation")] == []


def test_a_conversation_that_is_given_up_ends_its_call_and_leaves_no_folder(executor: ToolExecutor) -> None:
    async def play(chat: Chat, state: Any) -> float:
        message = await chat([user("you")], chat.tools)
        if state == "fails":
            while not list(executor.root.glob("conversation-*/file-0")):
                await asyncio.sleep(0.01)
            raise ContractError("the program is wrong")
        await chat.call_tools(message)
        return 1.0

    with ToolExecutor(CATALOGUE, num_workers=2, options=ExecutorOptions(timeout=10 * LONG)) as executor:
        policy = AgentPolicy(says(*[calls(("write_for_ever", {}))] * 2), play, executor=executor)
        with pytest.raises(ContractError, match="the program is wrong"):
            policy.generate_actions(["waits", "fails"], 1)
        assert soon(lambda: not list(executor.root.glob("conversation-*")))
        assert results(converse(says(calls(("add", {"a": 1})), "done"), Plain, executor=executor)[0]) == ["2"]


def test_a_lost_call_leaves_no_reward_and_is_explained(executor: ToolExecutor, subtests: pytest.Subtests) -> None:
    turn = calls(("misbehave", {"how": "kill_self"}))
    with subtests.test("explained"):
        agent = AgentPolicy(says(turn), Plain, executor=executor)
        sampled = agent.sample_actions(["you"], 1)
        ((row,),) = sampled.actions
        assert (row.ended_by, sampled.metrics["agents/lost_calls"], row.reward != row.reward) == ("error", 1.0, True)
        assert row.info["error"].startswith("ToolCallLostError: WorkerLostError: misbehave: the worker ended during")
        [told] = EnvironmentReward().explain_missing(["you"], [row])
        assert told.startswith("State 'you': the environment or the program raised ToolCallLostError: WorkerLostError")
        assert told.endswith("Fix it, or set AgentPolicy(num_retries=...).")
    with subtests.test("held again"):
        lost_once.clear()
        again = says(*[calls(("loses", {"times": 1}))] * 2, "done")
        sampled = AgentPolicy(again, Plain, executor=executor, num_retries=1).sample_actions(["you"], 1)
        ((row,),) = sampled.actions
        assert (row.reward, results(row)) == (1.0, ["found"])
        assert (sampled.metrics["agents/lost_calls"], sampled.metrics["agents/retries"]) == (1.0, 1.0)
    with subtests.test("dropped"):
        config = GRPOConfig(group_size=2, reward=RewardConfig(non_finite="drop"))
        policy = AgentPolicy(says(*[turn] * 2, *["done"] * 2), Plain, executor=executor, concurrency=2)
        trainer = GRPOTrainer(config=config, policy=policy, reward_model=EnvironmentReward())
        # no conversation is tried alone: the environment did not fail
        assert trainer.collect(["you", "me"]).num_rows == 2
    with subtests.test("caught"):

        async def play(chat: Chat, state: Any) -> float:
            message = await chat([user("you")], chat.tools)
            with pytest.raises(ToolCallLostError):
                await chat.call_tools(message)
            return 0.5

        assert converse(says(turn), play, executor=executor)[0].reward == 0.5


def test_a_server_that_is_gone_for_good_ends_the_run(executor: ToolExecutor) -> None:
    lost_once.clear()
    policy = AgentPolicy(says(*[calls(("loses", {"times": 99}))] * 40), Plain, executor=executor, concurrency=1)
    with pytest.raises(ServerLostError, match="32 calls of the tool loses were lost in a row"):
        policy.generate_actions(["you"], 40)


def test_a_program_calls_tools_by_the_chat(executor: ToolExecutor) -> None:
    async def play(chat: Chat, state: Any) -> float:
        messages = [user("you")]
        while (message := await chat(messages, chat.tools)).get("tool_calls"):
            messages = [*chat.messages, *await chat.call_tools(message)]
        return float(message["content"] == "done")

    (row,) = converse(says(calls(("add", {"a": 1}), ("nope", {})), "done"), play, executor=executor)
    assert (row.reward, [said[:18] for said in results(row)]) == (1.0, ["2", "Error: there is no"])

    async def without(chat: Chat, state: Any) -> float:
        assert chat.tools == []
        await chat.call_tools({"role": "assistant", "content": ""})
        return 0.0

    with pytest.raises(ContractError, match=re.escape("call_tools needs an executor. Pass AgentPolicy(executor=")):
        converse(says(), without)


def test_what_does_not_fit_together_is_refused(executor: ToolExecutor, subtests: pytest.Subtests) -> None:
    others = changed(Plain, tools=lambda self: [lookup])
    both: Any = {"executor": executor, "branch": Branching(at=(1,), width=(2,))}
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: AgentPolicy(says(), Plain, executor="bwrap"), ConfigError, "executor must be a ToolExecutor"),
        (lambda: AgentPolicy(says(), Plain, **both), ConfigError, "branch needs tools without"),
        (lambda: converse(says(), others, executor=executor), ContractError, "must return tools of AgentPolicy's exec"),
    ]
    for make, error, message in cases:
        with subtests.test(message), pytest.raises(error, match=re.escape(message)):
            make()


# --- the hostile calls of the executor's own tests, said by a model

MOST = 110_000
"""Most characters of a call: more than its arguments may have."""
NOT_SAID = {
    "the arguments are no object": (
        "arguments", "list, none, text, bytes, number, raising, raising an exit, cancelling, endless"),
    "JSON has no such value": (
        "arguments", "bytes within, set, complex, object, class, circle, raising at depth, endless at depth"),
    "JSON has no such key": ("arguments", "number as key, none as key, bytes as key, tuple as key, boolean as key"),
    "Python reads no such number from a text": ("arguments", "huge integer"),
    "longer than any turn": ("arguments", "long text, long key, wide, laughs, many keys"),
    "a longer name than any turn": ("unknown", f"'{'x' * 29}"),
    "the name is no text": ("unknown", "None, 5, b'add', ['add'], {'a': 1}, ('add',), int, list, dict, Raises, object, Name"),
    "the name is more than a text": ("a", "known name of a class of its own"),
    "JSON has no bytes": ("not allowed", "b''"),
}  # fmt: skip
"""Why no text of a model makes these calls: their group and their names."""
SAID = [run for run in RUNS if run.values[0] == "bubblewrap" or run.values[1] in DAILY]
"""All kinds of calls in the first confinement, and in the others those that depend on the confinement the most."""


def as_text(case: Case) -> str | None:
    """The model's text that makes this call. None: no text of a model makes it."""
    if type(case.tool) is not str or not isinstance(case.arguments, dict):
        return None
    try:
        text = "".join(islice(json.JSONEncoder().iterencode(case.arguments), MOST))  # some never end
        # by what they are written as, because NaN is not equal to itself
        is_said = len(text) + len(case.tool) <= MOST and repr(json.loads(text)) == repr(case.arguments)
    except (TypeError, ValueError, RecursionError):
        return None
    return says_call(json.dumps(case.tool)[1:-1], text) if is_said else None


def as_value(text: str) -> Any:
    """The output that the message of a tool has as text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def test_a_model_says_every_hostile_call_that_json_can_say_in_one_turn() -> None:
    cases = [case for kind in KINDS.values() for case in kind]
    left_out = [case.name for case in cases if as_text(case) is None]
    expected = [f"{group} {name}" for group, names in NOT_SAID.values() for name in names.split(", ")]
    assert sorted(left_out) == sorted(expected)
    page = (Path(__file__).resolve().parents[4] / "docs/agents.md").read_text(encoding="utf-8")
    assert f"{len(cases) - len(left_out)} of {len(cases)} hostile calls" in page


@pytest.mark.parametrize(("confinement", "kind"), SAID)
def test_each_hostile_call_of_a_model_ends_as_required_and_harms_no_other_conversation(
    confinement: Any, kind: str, subtests: pytest.Subtests
) -> None:
    """The corpus of `test_hostile_calls`: its tools, its limits and its ends. Every second conversation is an honest one."""
    spoken = [(case, as_text(case)) for case in KINDS[kind] if OWN_USERS or not case.own_user]
    said = [(case, text) for case, text in spoken if text is not None]
    lost = [case.ends is WorkerLostError for case, _ in said]
    lay, after = says_call("lay_files_here", "{}"), says_call("add", '{"a": 41}')
    catalogue = HOSTILE.with_tools(Tool.from_function(hostile_tools.lay_files_here))
    options = ExecutorOptions(timeout=LONG, limits=LIMITS, confinement=confinement)
    model = language_model(max_new_tokens=MOST + 500, positions=1_000_000)
    with ToolExecutor(catalogue, allow=[*set(catalogue) - {"nap"}], num_workers=4, options=options) as executor:
        assert executor.confinement == confinement
        policy = AgentPolicy(model, Plain, executor=executor, concurrency=4)
        scripts = [[lay, text, after, "done"] for (_, text), is_lost in zip(said, lost, strict=True) if not is_lost]
        both = [script for hostile in scripts for script in (hostile, [after, after, "done"])]
        replayed = policy.replay(["you"] * len(both), both) if both else []
        rows = iter(replayed[::2])
        honest = [(results(row), row.reward, row.ended_by) for row in replayed[1::2]]
        assert honest == [(["42", "42"], 1.0, "environment")] * len(scripts)
        for (case, text), is_lost in zip(said, lost, strict=True):
            if is_lost:
                (row,) = converse(says(text), Plain, executor=executor)
                with subtests.test(case.name):
                    assert (row.ended_by, row.reward != row.reward) == ("error", True)
                    assert "ToolCallLostError: WorkerLostError" in row.info["error"]
                continue
            row = next(rows)
            with subtests.test(case.name):
                laid, result, added = results(row)
                assert (laid, added, row.reward) == ("laid", "42", 1.0)
                assert len(result) < 4000
                if isinstance(case.ends, type):
                    missing = case.tool not in executor.tools
                    begin = "Error: there is no tool " if missing else f"Error: {case.ends.__name__}: "
                    assert result.startswith(begin), result
                else:
                    assert not result.startswith("Error: "), result
                    output = as_value(result)
                    if case.ends is None:
                        assert soon(lambda pid=output: number_here(executor, pid) is None), result
                    else:
                        assert case.ends(output) or case.ends(result), result
        assert list(executor.root.iterdir()) == []
    for outside in ("/owned", "/etc/owned", "/tmp/owned", "owned"):
        assert not Path(outside).exists()
