"""What a policy that chooses tools reads and fills in, and that it is copied, extended and shared without harm."""

import copy
import itertools
import math
import pickle
from functools import partial
from typing import Any

import pytest
import torch

from adapters.tools import HashingEncoder, Tool, ToolSelectionPolicy
from grpo.checks import check_policy
from grpo.errors import ConfigError, ContractError
from tests.support.threads import run_together
from tests.support.tool_policies import CATALOGUE, TEXTS, VECTORS, call, policy, pong, task, without_ping


def test_calls_the_policy_cannot_have_made_are_refused_by_name(subtests: pytest.Subtests) -> None:
    for wrong, message in (
        (call("fly"), "one of the tools ping, shout, convert, whisper; got fly\\(\\)"),
        ("ping", "must be a ToolCall of one of the tools ping, shout, convert, whisper; got ping\\."),
        (None, "must be a ToolCall of one of the tools ping, shout, convert, whisper; got None"),
        (call("shout", tone="shrill"), r"shout\.tone must be one of \['loud', 'soft', 'plain'\]; got shout\(tone='shrill'\)"),
        (call("whisper", tone="plain"), r"whisper\.tone must be one of \['loud', 'soft'\]; got whisper\(tone='plain'\)"),
        (call("convert", unit="mile", exact=1), r"exact must be one of \[False, True, 'left out'\]; got convert\(.*exact=1\)"),
        (call("convert", exact=True), r"convert\.unit must be one of \['mile', 'foot'\]; got convert\(exact=True\)"),
    ):  # fmt: skip
        with subtests.test(message):
            made = policy()
            with pytest.raises(ContractError, match=message):
                made.score_actions(TEXTS[:2], [call("ping"), wrong])
            with pytest.raises(ContractError, match=message):
                made.score_groups(TEXTS[:1], [[call("ping"), wrong]])


def test_states_and_tools_that_the_policy_cannot_read_are_refused(subtests: pytest.Subtests) -> None:
    def vectors(got: str) -> str:
        return rf"states must be .*vectors.*; got {got} with num_features=3\."

    three: dict[str, Any] = {"num_features": 3}
    ask = {TEXTS[0]: ["ping"]}
    for options, states, message in (
        ({}, [TEXTS[0], [1.0, 2.0]], r"be texts.*; got \[1\.0, 2\.0\] with num_features=None\. Pass num_features="),
        ({"describe": lambda state: state | {}}, [{"text": TEXTS[0]}], r"states must be texts.*; got \{'text'"),
        (three, [[0.0, 1.0, 0.0], [math.nan, 0.0, 0.0]], "finite vectors; got NaN or infinity"),
        (three, [["a", "b", "c"]], "states must be vectors of numbers; "), (three, [[1.0, 2.0]], vectors(r"\[1\.0, 2\.0\]")),
        (three, [VECTORS[0], [1.0] * 4], vectors(r"\[1\.0, 1\.0, 1\.0, 1\.0\]")), (three, [1.0], vectors(r"1\.0")),
        (three, ["a"], vectors("'a'")), (three, [""], vectors("''")),
        ({"available": lambda state: ask.get(state, ["fly", "swim"])}, TEXTS[:2],
         r"must name at least one tool of the catalogue; for state 1 it named \['fly', 'swim'\]"),
        ({"available": lambda state: []}, TEXTS, r"for state 0 it named \[\]"),
        # "ping" in "pinging" is true
        ({"available": lambda state: "pinging"}, TEXTS, "must return a list of names, or None; got a text"),
        ({}, TEXTS[0], "states must be a list with one entry per row"),  # or each letter would get a call
    ):  # fmt: skip
        made = policy(**options)
        for ask_for, number in ((made.predict, ()), (made.predict_top, (1,)), (made.sample_actions, (2,))):
            with subtests.test(message), pytest.raises(ContractError, match=message):
                ask_for(states, *number)


WRONG_SIZES = (0, -1, True, 2.5, "3")


def test_wrong_arguments_are_refused_by_name(subtests: pytest.Subtests) -> None:
    functions = ("encoder", "describe", "fill", "available")
    for options, message in (
        ({"catalogue": list(CATALOGUE.values())}, "catalogue must be a ToolCatalogue"),
        ({"hidden": 8}, "hidden must be a list of widths; got int 8"),
        *(({"num_features": size}, "num_features must be an integer >= 1, or None; got ") for size in WRONG_SIZES),
        *(({"hidden": [3, size]}, r"hidden\[1\] must be an integer >= 1; got ") for size in WRONG_SIZES),
        *(({name: "x"}, f"{name} must be a function; got str 'x'") for name in functions),
    ):
        with subtests.test(message), pytest.raises(ConfigError, match=f"^ToolSelectionPolicy: {message}"):
            ToolSelectionPolicy(**{"catalogue": CATALOGUE} | options)


def test_no_states_give_no_calls_and_no_scores(subtests: pytest.Subtests) -> None:
    for options in (
        {}, {"num_features": 3}, {"hidden": [4]}, {"available": without_ping},
        {"catalogue": CATALOGUE.without("shout", "convert", "whisper")},
    ):  # fmt: skip
        with subtests.test(str(list(options))):
            made = policy(**options)
            sampled = made.sample_actions([], 3)
            assert (sampled.actions, made.generate_actions([], 3), made.predict([])) == ([], [], [])
            assert sampled.mask.shape == sampled.behaviour_log_probs.shape == (0, 1)
            assert made.tool_probabilities([]).shape == (0, len(made.catalogue))
            for scores in (
                sampled.scores, made.score_actions([], []), made.score_groups([], []), made.score_groups(TEXTS[:0], []),
            ):  # fmt: skip
                assert scores.log_probs.shape == scores.mask.shape == scores.entropy.shape == (0, 1)
                assert scores.mask.dtype == torch.bool
            assert made.get_log_probabilities([], []).shape == (0,)
            made.score_actions([], []).log_probs.sum().backward()
    assert policy().score_groups(TEXTS, [[], [], [], []]).log_probs.shape == (0, 1)


def test_a_task_is_its_text_and_its_slots_fill_what_is_free() -> None:
    made = policy()
    asked = task(TEXTS[1], text="hello", value=2.0, unit="mile", colour="red")
    assert torch.equal(made.tool_probabilities([asked]), made.tool_probabilities(TEXTS[1:2]))
    free = {"ping": {}, "shout": {"text": "hello"}, "convert": {"value": 2.0}, "whisper": {"text": "hello"}}
    for one in made.generate_actions([asked], 200)[0]:
        filled = {name: value for name, value in one.arguments.items() if name in ("text", "value", "colour")}
        assert filled == free[one.tool]
        assert one.tool != "convert" or one.arguments["unit"] in ("mile", "foot"), "decided, not filled in"
    bare, filled = call("shout", tone="soft"), call("shout", tone="soft", text="hello")
    scores = made.score_actions(TEXTS[:1] * 2, [bare, filled])
    assert torch.equal(scores.log_probs[0], scores.log_probs[1]), "what is filled in has no log-prob"


def test_describe_and_fill_can_be_replaced_by_the_user() -> None:
    def fill(state: dict[str, str], tool: Tool) -> dict[str, str]:
        return {"text": f"{state['name']} to {tool.name}"}

    made = policy(describe=lambda state: state["asked"], fill=fill)
    state = {"asked": TEXTS[1], "name": "Ann"}
    assert torch.equal(made.tool_probabilities([state]), made.tool_probabilities([state | {"name": "Bob"}]))
    texts = {one.tool: one.arguments.get("text") for one in made.generate_actions([state], 200)[0]}
    assert texts == {"ping": None, "convert": None, "shout": "Ann to shout", "whisper": "Ann to whisper"}


def test_the_encoder_is_called_once_per_text() -> None:
    asked: list[str] = []
    made = policy(encoder=lambda texts: asked.extend(texts) or HashingEncoder(16)(texts))
    for _ in range(2):
        sampled = made.sample_actions(TEXTS, 3)
        made.score_groups(TEXTS, sampled.actions)
    assert len(asked) == len(set(asked))
    assert asked[-4:] == TEXTS


def test_a_tool_that_is_added_changes_no_weight_and_no_ratio() -> None:
    made = policy()
    weights = {name: value.detach().clone() for name, value in made.get_parameters().items()}
    identities = [id(value) for value in made.parameters()]
    before = made.tool_probabilities(TEXTS)
    given = made.score_actions(TEXTS[:1], [call("convert", unit="foot")]).log_probs[:, 1:]
    made.add_tools(Tool.from_function(pong))
    after = made.tool_probabilities(TEXTS)
    assert list(made.catalogue) == ["ping", "shout", "convert", "whisper", "pong"]
    assert bool((after[:, 4] > 0).all())
    torch.testing.assert_close(after[:, :4] / after[:, :4].sum(1, keepdim=True), before)
    torch.testing.assert_close(made.score_actions(TEXTS[:1], [call("convert", unit="foot")]).log_probs[:, 1:], given)
    assert [id(value) for value in made.parameters()] == identities, "an optimizer can go on"
    assert all(torch.equal(value, weights[name]) for name, value in made.get_parameters().items())
    check_policy(made, TEXTS, strict=True)
    with pytest.raises(ConfigError, match="several have ping"):
        made.add_tools(CATALOGUE["ping"])
    assert torch.equal(made.tool_probabilities(TEXTS), after)


def test_a_pickled_policy_and_a_generator_draw_the_same_calls() -> None:
    made = policy()
    other = pickle.loads(pickle.dumps(made))
    drawn = [
        each.generate_actions(TEXTS, 20, generator=torch.Generator().manual_seed(seed))
        for each, seed in ((made, 3), (other, 3), (made, 4))
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_policy_works_in_double_precision(subtests: pytest.Subtests) -> None:
    for options, states in (({}, TEXTS), ({"num_features": 3, "hidden": [4]}, VECTORS)):
        with subtests.test(str(options)):
            single = policy(**options)
            double = copy.deepcopy(single).double()
            double.add_tools(Tool.from_function(pong))
            single.add_tools(Tool.from_function(pong))
            probabilities = double.tool_probabilities(states)
            assert probabilities.dtype == torch.float64
            assert bool(((probabilities.sum(1) - 1).abs() < 1e-12).all())
            torch.testing.assert_close(probabilities.float(), single.tool_probabilities(states), rtol=0, atol=1e-5)
            assert double.sample_actions(states, 3).behaviour_log_probs.dtype == torch.float64


def test_log_probs_of_a_policy_in_half_precision_are_single_precision(subtests: pytest.Subtests) -> None:
    """bfloat16 has -1.1016 for log(1/3), which is -1.0986."""
    for dtype in (torch.bfloat16, torch.float16):
        with subtests.test(str(dtype)):
            made = policy(CATALOGUE.without("ping"), random=False).to(dtype)
            scores = made.score_actions(TEXTS[:1], [call("shout", tone="soft")])
            assert scores.log_probs.dtype == scores.entropy.dtype == torch.float32
            three = math.log(3)  # equally likely values
            assert float(scores.log_probs[0, 1].detach()) == pytest.approx(-three, abs=1e-6)
            assert float(scores.entropy[0, 1].detach()) == pytest.approx(three, abs=1e-6)
            torch.testing.assert_close(made.tool_probabilities(TEXTS).sum(1), torch.ones(4), rtol=0, atol=1e-6)
            scores.log_probs.sum().backward()
            assert {value.grad.dtype for value in made.parameters() if value.grad is not None} == {dtype}


def test_lookup_tables_move_with_the_policy_to_a_device() -> None:
    made = policy().to("meta")
    assert {value.device.type for value in itertools.chain(made.buffers(), made.parameters())} == {"meta"}
    made.add_tools(Tool.from_function(pong))
    assert {value.device.type for value in made.buffers()} == {"meta"}
    assert made.menu.tool_vectors.shape[0] == 5


def test_threads_that_draw_from_one_policy_score_their_own_calls():
    """A service draws in several threads. A call drawn in one thread must not be scored with the choices of another."""
    made = policy()

    def serve(text: str) -> None:
        for _ in range(40):
            sampled = made.sample_actions([text], 64)
            assert torch.equal(made.score_groups([text], sampled.actions).log_probs, sampled.behaviour_log_probs)

    run_together(*(partial(serve, text) for text in TEXTS))
