"""The policy that chooses tools, against its formulas, against enumeration, and through the conformance kit."""

import copy
import itertools
import json
import math
import os
import pickle
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from scipy import stats
from torch import Tensor

from adapters.tools.calls import ToolCall
from adapters.tools.catalogue import Tool, ToolCatalogue
from adapters.tools.encoders import HashingEncoder, with_own_feature
from adapters.tools.policies import ToolSelectionPolicy
from adapters.tools.tasks import ToolTask
from grpo.checks import check_policy
from grpo.errors import ConfigError, ContractError
from grpo.types import ActionScores


def ping() -> str:
    """Say that you are there."""
    return "pong"


def shout(text: str, tone: Literal["loud", "soft", "plain"] = "loud") -> str:
    """Write a text in capitals."""
    return text + tone


def convert(value: float, unit: Literal["mile", "foot"], exact: bool | None = None) -> float:
    """Convert a length."""
    return value


def whisper(text: str, tone: Literal["loud", "soft"]) -> str:
    """Write a text in small letters."""
    return text + tone


def pong(sure: bool) -> str:
    """Answer a greeting."""
    return str(sure)


CATALOGUE = ToolCatalogue(Tool.from_function(function) for function in (ping, shout, convert, whisper))
TEXTS = ["are you there?", "capital letters, loud", "how many feet are two miles?", "very quietly please"]
VECTORS = [[0.3, -1.0, 2.0], [1.5, 0.0, -0.5], [0.0, 0.0, 1.0], [-1.0, 1.0, 0.25]]


def call(tool: str, **arguments: Any) -> ToolCall:
    return ToolCall(tool=tool, arguments=arguments)


ALL_CALLS = [
    call("ping"),
    *(call("shout", tone=tone) for tone in ("loud", "soft", "plain")),
    *(call("convert", unit=unit, exact=exact) for unit in ("mile", "foot") for exact in (False, True)),
    *(call("convert", unit=unit) for unit in ("mile", "foot")),
    *(call("whisper", tone=tone) for tone in ("loud", "soft")),
]
"""1 + 3 + 2 * 3 + 2: there are no others."""


def task(asked: str, **slots: Any) -> ToolTask:
    return ToolTask(
        text=asked, tool="shout", arguments={}, category="general", difficulty="easy", slots=slots, shares_words=True
    )


def policy(catalogue: ToolCatalogue = CATALOGUE, *, random: bool = True, scale: float = 0.4, **options: Any) -> Any:
    """A policy over a small encoder; its weights are random unless told otherwise."""
    made = ToolSelectionPolicy(catalogue, **({"encoder": HashingEncoder(48)} | options))
    if random:
        with torch.no_grad():
            for value in made.parameters():
                value.normal_(0, scale)
    return made


def without_ping(state: Any) -> list[str]:
    return ["shout", "convert", "whisper"]


def by_first_letter(state: str) -> list[str] | None:
    return {"a": ["ping"], "c": ["shout", "convert"]}.get(state[0])


# --- conformance

KINDS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "texts": lambda: (policy(), TEXTS),
    "texts, untrained": lambda: (policy(random=False), TEXTS),
    "tasks": lambda: (policy(), [task("loud", text="a"), task("a longer text, soft", text="b", value=2.0)]),
    "vectors": lambda: (policy(num_features=3), VECTORS),
    "a tensor": lambda: (policy(num_features=3), torch.tensor(VECTORS)),
    "hidden layers": lambda: (policy(hidden=[8, 5]), TEXTS),
    "hidden layers over vectors": lambda: (policy(num_features=3, hidden=[8]), VECTORS),
    "masks": lambda: (policy(available=by_first_letter), TEXTS),
    "no parameters": lambda: (policy(ToolCatalogue([CATALOGUE["ping"], Tool.from_function(ping, name="again")])), TEXTS),
    "one tool": lambda: (policy(ToolCatalogue([CATALOGUE["convert"]])), TEXTS),
    "float64": lambda: (policy().double(), TEXTS),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_the_conformance_kit_finds_nothing(kind: str) -> None:
    made, states = KINDS[kind]()
    report = check_policy(made, states, strict=True)
    looked_at = ("score_actions", "score_groups", "sample_actions", "generated samples", "sampled samples", "entropy")
    assert {name: report[name].status for name in (*looked_at, "gradient", "deepcopy")} == dict.fromkeys(
        (*looked_at, "gradient", "deepcopy"), "passed"
    ), report


# --- probabilities


def test_everything_is_as_likely_as_everything_else_at_the_start() -> None:
    for options, states in (({}, TEXTS[:1]), ({"hidden": [6]}, TEXTS[:1]), ({"num_features": 3}, VECTORS[:1])):
        scores = policy(random=False, **options).score_actions(states * len(ALL_CALLS), ALL_CALLS)
        for row, made in zip(scores.log_probs, ALL_CALLS, strict=True):
            later = {"ping": [0, 0], "shout": [3, 0], "convert": [2, 3], "whisper": [2, 0]}[made.tool]
            expected = [-math.log(4), *(-math.log(count) if count else 0.0 for count in later)]
            torch.testing.assert_close(row, torch.tensor(expected), rtol=0, atol=1e-6)


def test_log_probs_are_those_of_the_formula() -> None:
    """Written out for one call of one state: softmax(e . (W h + b + 20 s x)), and the same with e' for each parameter."""
    made, encoder = policy(), HashingEncoder(48)
    x = encoder([TEXTS[2]])[0]
    s = made.similarity
    query = made.tool_query.weight @ x + made.tool_query.bias + 20 * s[0] * x
    logits = encoder([tool.text for tool in CATALOGUE.values()]) @ query
    value_query = made.value_query.weight @ x + made.value_query.bias + s[1] * x

    def values(*texts: str) -> Tensor:
        return (with_own_feature(texts, encoder(texts), 3.0) @ value_query).log_softmax(0)

    units, exact = values("mile unit", "foot unit"), values("false exact", "true exact", "left out exact")
    expected = torch.stack([logits.log_softmax(0)[2], units[1], exact[2]])
    found = made.score_actions([TEXTS[2]], [call("convert", unit="foot")]).log_probs[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(made.tool_probabilities([TEXTS[2]])[0], logits.softmax(0), rtol=1e-5, atol=1e-6)


def test_hidden_layers_are_tanh_networks_over_the_vector() -> None:
    made = policy(num_features=3, hidden=[5])
    h = torch.tanh(made.body[0].weight @ torch.tensor(VECTORS[0]) + made.body[0].bias)
    logits = made.tool_vectors @ (made.tool_query.weight @ h + made.tool_query.bias)
    torch.testing.assert_close(made.tool_probabilities(VECTORS[:1])[0], logits.softmax(0), rtol=1e-5, atol=1e-6)
    assert made.similarity is None, "a vector cannot be held against a text"


@pytest.mark.parametrize("options", [{}, {"hidden": [8]}, {"available": without_ping}])
def test_the_probabilities_of_all_calls_add_up_to_one(options: dict[str, Any]) -> None:
    made = policy(**options).double()
    calls = [call for call in ALL_CALLS if "available" not in options or call.tool != "ping"]
    for text in TEXTS:
        log_probs = made.get_log_probabilities([text] * len(calls), calls).detach()
        assert float(log_probs.exp().sum()) == pytest.approx(1, abs=1e-12)


def test_entropy_is_that_of_the_enumerated_calls() -> None:
    """- sum p log p over all calls = H(tool) + sum_k p(k) sum_j H(parameter j of k)."""
    made = policy().double()
    for text in TEXTS:
        scores = made.score_actions([text] * len(ALL_CALLS), ALL_CALLS)
        log_probs = scores.log_probs.sum(1)
        enumerated = -(log_probs.exp() * log_probs).sum()
        # each call has its tool's entropies, and the calls of one tool have its probability in all
        exact = scores.entropy[0, 0] + (log_probs.exp() * scores.entropy[:, 1:].sum(1)).sum()
        torch.testing.assert_close(exact, enumerated, rtol=0, atol=1e-12)
        assert bool((scores.entropy[:, 0] == scores.entropy[0, 0]).all())


def test_entropy_of_each_step_by_hand() -> None:
    made = policy(random=False)
    entropy = made.score_actions(
        TEXTS[:3], [call("ping"), call("convert", unit="mile"), call("shout", tone="soft")]
    ).entropy
    log = math.log
    expected = torch.tensor([[log(4), 0, 0], [log(4), log(2), log(3)], [log(4), log(3), 0]])
    torch.testing.assert_close(entropy, expected, rtol=0, atol=1e-6)


def test_sampled_log_probs_are_the_scored_ones() -> None:
    for options, states in (
        ({}, TEXTS), ({"hidden": [8]}, TEXTS), ({"available": by_first_letter}, TEXTS), ({"num_features": 3}, VECTORS),
    ):  # fmt: skip
        made = policy(**options)
        sampled = made.sample_actions(states, 25)
        assert [len(group) for group in sampled.actions] == [25] * 4
        flat = [one for group in sampled.actions for one in group]
        repeated = [state for state in states for _ in range(25)]
        by_row, by_group = made.score_actions(repeated, flat), made.score_groups(states, sampled.actions)
        for scores in (by_row, by_group):
            for name in ("log_probs", "entropy"):
                given, wanted = getattr(sampled.scores, name), getattr(scores, name)
                torch.testing.assert_close(given, wanted, rtol=0, atol=1e-6)
            assert torch.equal(sampled.mask, scores.mask)
        assert torch.equal(sampled.behaviour_log_probs, sampled.scores.log_probs)


def test_groups_may_differ_in_length() -> None:
    made = policy()
    groups = [ALL_CALLS[:1], ALL_CALLS[3:9], [], ALL_CALLS[9:]]
    rows = [text for text, group in zip(TEXTS, groups, strict=True) for _ in group]
    flat = [one for group in groups for one in group]
    found, expected = made.score_groups(TEXTS, groups), made.score_actions(rows, flat)
    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.entropy, expected.entropy, rtol=0, atol=1e-6)
    assert torch.equal(found.mask, expected.mask)


def frequencies(made: Any, text: str, seed: int, num_draws: int = 20_000) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    drawn = made.generate_actions([text], num_draws, generator=generator)[0]
    place = {(one.tool, *sorted(one.arguments.items())): i for i, one in enumerate(ALL_CALLS)}
    return torch.bincount(
        torch.tensor([place[one.tool, *sorted(one.arguments.items())] for one in drawn]), minlength=len(ALL_CALLS)
    )


def test_calls_are_as_frequent_as_their_probabilities_say() -> None:
    made = policy().double()
    with torch.no_grad():
        expected = made.get_log_probabilities([TEXTS[1]] * len(ALL_CALLS), ALL_CALLS).exp().numpy() * 20_000
        elsewhere = made.get_log_probabilities([TEXTS[3]] * len(ALL_CALLS), ALL_CALLS).exp().numpy() * 20_000
    assert expected.min() > 5, "or the test is not valid"
    p_values = []
    for seed in range(5):
        counts = frequencies(made, TEXTS[1], seed).numpy()
        p_values.append(stats.chisquare(counts, expected, sum_check=False).pvalue)
        assert stats.chisquare(counts, elsewhere, sum_check=False).pvalue < 1e-9, "it tells two states apart"
    assert min(p_values) > 1e-3, p_values
    assert stats.combine_pvalues(p_values).pvalue > 1e-2, p_values


def test_the_same_generator_draws_the_same_calls() -> None:
    made = policy()
    one, again, other = (
        made.generate_actions(TEXTS, 20, generator=torch.Generator().manual_seed(seed)) for seed in (3, 3, 4)
    )
    assert one == again
    assert one != other


def test_predict_takes_the_likeliest_tool_then_the_likeliest_values() -> None:
    made = policy(scale=1.0)
    for text in TEXTS:
        tool = list(CATALOGUE)[int(made.tool_probabilities([text]).argmax())]
        calls = [one for one in ALL_CALLS if one.tool == tool]
        best = made.get_log_probabilities([text] * len(calls), calls).argmax()
        assert made.predict([text]) == [calls[int(best)]]
    assert made.predict(TEXTS) == [made.predict([text])[0] for text in TEXTS]


def test_calls_can_be_counted() -> None:
    """By the conformance kit, and by whoever wants to know what was called how often."""
    assert len({*ALL_CALLS, *ALL_CALLS}) == len(ALL_CALLS)
    one, same = (call("sort", items=["b", {"a": [1]}], number=number, ending=None) for number in (1, 1.0))
    assert one == same
    assert hash(one) == hash(same)


# --- steps


def test_steps_are_padded_to_the_longest_call_that_is_there() -> None:
    made = policy()
    scores = made.score_actions(TEXTS[:3], [call("ping"), call("shout", tone="soft"), call("convert", unit="mile")])
    yes, no = True, False
    assert scores.mask.tolist() == [[yes, no, no], [yes, yes, no], [yes, yes, yes]]
    assert bool((scores.log_probs[~scores.mask] == 0).all())
    assert bool((scores.entropy[~scores.mask] == 0).all())
    short = made.score_actions(TEXTS[:2], [call("ping"), call("ping")])
    assert short.log_probs.shape == short.mask.shape == short.entropy.shape == (2, 1)


def test_nothing_comes_back_through_padding() -> None:
    """Poison: NaN as the gradient of what is masked reaches no weight."""
    made = policy(hidden=[4])
    calls = [call("ping"), call("shout", tone="soft"), call("convert", unit="mile")]

    def gradients(of_padding: float) -> list[Tensor]:
        made.zero_grad()
        scores = made.score_actions(TEXTS[:3], calls)
        upstream = torch.ones_like(scores.log_probs).masked_fill(~scores.mask, of_padding)
        torch.autograd.backward([scores.log_probs, scores.entropy], [upstream, upstream])
        return [value.grad.clone() for value in made.parameters()]

    for clean, poisoned in zip(gradients(0.0), gradients(math.nan), strict=True):
        assert torch.equal(clean, poisoned)
        assert bool(clean.isfinite().all())


# --- gradients


@pytest.mark.parametrize(
    "options", [{}, {"hidden": [6]}, {"available": without_ping}, {"num_features": 3, "hidden": [6, 4]}]
)
def test_gradients_are_those_of_finite_differences(options: dict[str, Any]) -> None:
    made = policy(**options).double()
    calls = ALL_CALLS[1:]
    states = (VECTORS if "num_features" in options else TEXTS)[:1] * len(calls)
    weights = torch.randn(2, len(calls), 3, dtype=torch.float64)

    def loss() -> Tensor:
        scores = made.score_actions(states, calls)
        return (weights[0] * scores.log_probs).sum() + (weights[1] * scores.entropy).sum()

    loss().backward()
    for name, value in made.named_parameters():
        direction = torch.randn_like(value)
        slopes = []
        for sign in (1, -1):
            with torch.no_grad():
                value += sign * 1e-5 * direction
                slopes.append(float(loss()))
                value -= sign * 1e-5 * direction
        numeric = (slopes[0] - slopes[1]) / 2e-5
        exact = float((value.grad * direction).sum())
        assert abs(exact) > 1e-6, f"{name}: zero would agree with anything broken"
        assert exact == pytest.approx(numeric, rel=1e-5, abs=1e-7), name


def test_a_large_gradient_of_the_entropy_stays_finite() -> None:
    """The log-prob of what is masked is almost -inf: twice that would be."""
    made = policy(available=without_ping)
    scores = made.score_actions(TEXTS[:1], [call("convert", unit="mile")])
    (1e6 * scores.entropy.sum()).backward()
    for name, value in made.named_parameters():
        assert bool(value.grad.isfinite().all()), name


def gradient_of_vectors(made: Any, states: Sequence[Any], calls: Sequence[ToolCall]) -> tuple[Tensor, Tensor]:
    """What comes back to the texts of tools and of values."""
    made.tool_vectors.requires_grad_()
    made.value_vectors.requires_grad_()
    scores: ActionScores = made.score_actions(states, calls)
    (scores.log_probs.sum() + scores.entropy.sum()).backward()
    return made.tool_vectors.grad, made.value_vectors.grad


def test_values_of_other_tools_get_exactly_no_gradient() -> None:
    made = policy()
    _, values = gradient_of_vectors(made, TEXTS[:2], [call("convert", unit="mile", exact=True), call("ping")])
    texts = made._tables.value_texts
    of_convert = [text.endswith((" unit", " exact")) for text in texts]
    assert sum(of_convert) == 5
    assert sum(not of for of in of_convert) == 3
    for text, of, gradient in zip(texts, of_convert, values, strict=True):
        assert bool(gradient.isfinite().all())
        assert bool((gradient != 0).any()) == of, text


# --- masks


def test_what_is_not_available_is_never_drawn() -> None:
    """Although it is by far the likeliest of all."""
    made = policy(random=False, available=without_ping)
    with torch.no_grad():
        made.tool_query.bias += 20 * made.tool_vectors[0]
    drawn = made.generate_actions(TEXTS[:1], 10_000)[0]
    assert {one.tool for one in drawn} == {"shout", "convert", "whisper"}
    assert made.predict(TEXTS)[0].tool != "ping"
    made.available = None
    assert sum(one.tool == "ping" for one in made.generate_actions(TEXTS[:1], 1_000)[0]) > 900


def test_the_others_share_the_probability_of_what_is_not_available() -> None:
    made = policy()
    everything = made.tool_probabilities(TEXTS)
    made.available = without_ping
    masked = made.tool_probabilities(TEXTS)
    assert bool((masked[:, 0] == 0).all())
    torch.testing.assert_close(masked[:, 1:], everything[:, 1:] / everything[:, 1:].sum(1, keepdim=True))
    with torch.no_grad():
        scores = made.score_actions(TEXTS[1:2], [call("shout", tone="soft")])
    p = masked[1, 1:]
    assert float(scores.entropy[0, 0]) == pytest.approx(float(-(p * p.log()).sum()), abs=1e-6), "among three"


def test_each_state_has_its_own_mask() -> None:
    made = policy(available=by_first_letter)
    positive = made.tool_probabilities(TEXTS) > 0
    yes, no = True, False
    assert positive.tolist() == [[yes, no, no, no], [no, yes, yes, no], [yes] * 4, [yes] * 4]
    alone = made.score_actions(TEXTS[:1], [call("ping")])
    assert alone.log_probs.tolist() == [[0.0]]
    assert alone.entropy.tolist() == [[0.0]]


def test_no_gradient_comes_through_what_is_not_available() -> None:
    made = policy(available=without_ping)
    tools, _ = gradient_of_vectors(made, TEXTS[:2], [call("shout", tone="soft"), call("convert", unit="mile")])
    assert bool((tools[0] == 0).all())
    for gradient in tools[1:]:
        assert bool((gradient != 0).any())
    for gradient in (tools, *(value.grad for value in made.parameters())):
        assert bool(gradient.isfinite().all())


def test_something_has_to_be_available() -> None:
    made = policy(available=lambda state: ["ping"] if state == TEXTS[0] else ["fly", "swim"])
    with pytest.raises(
        ContractError, match=r"must name at least one tool of the catalogue; for state 1 it named \['fly', 'swim'\]"
    ):
        made.tool_probabilities(TEXTS[:2])
    made.available = lambda state: []
    with pytest.raises(ContractError, match=r"for state 0 it named \[\]"):
        made.sample_actions(TEXTS, 2)


# --- what cannot be scored or read


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (call("fly"), "no tool is called 'fly'; there are ping, shout, convert, whisper"),
        (call("shout", tone="shrill"), r"shout\.tone must be one of \['loud', 'soft', 'plain'\]; got 'shrill'"),
        (call("whisper", tone="plain"), r"whisper\.tone must be one of \['loud', 'soft'\]; got 'plain'"),
        (call("convert", exact=True), r"convert\.unit must be one of \['mile', 'foot'\]; got nothing"),
    ],
)
def test_calls_that_it_cannot_have_made_are_named(wrong: ToolCall, message: str) -> None:
    made = policy()
    with pytest.raises(ContractError, match=message):
        made.score_actions(TEXTS[:2], [call("ping"), wrong])
    with pytest.raises(ContractError, match=message):
        made.score_groups(TEXTS[:1], [[call("ping"), wrong]])


def test_states_are_texts_unless_told_otherwise() -> None:
    with pytest.raises(
        ContractError, match=r"states must be texts; got list\. Pass num_features=\.\.\. if states are vectors"
    ):
        policy().predict([TEXTS[0], [1.0, 2.0]])
    with pytest.raises(ContractError, match="states must be texts; got dict"):
        policy(describe=lambda state: state | {}).predict([{"text": TEXTS[0]}])


@pytest.mark.parametrize(
    ("states", "got"),
    [([[1.0, 2.0]], r"\[2\]"), ([VECTORS[0], [1.0] * 4], r"\[4\]"), ([1.0], r"\[\]"), (["a"], "'a'"), ([""], "''")],
)
def test_vectors_have_the_length_that_was_agreed(states: list[Any], got: str) -> None:
    with pytest.raises(ContractError, match=rf"states must be vectors of num_features = 3; got {got}\."):
        policy(num_features=3).predict(states)


@pytest.mark.parametrize("options", [{"num_features": 0}, {"num_features": -1}, {"hidden": [0]}, {"hidden": [3, -2]}])
def test_sizes_below_one_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="num_features and hidden must be >= 1; got"):
        policy(**options)


# --- nothing is asked


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_features": 3},
        {"hidden": [4]},
        {"available": without_ping},
        {"catalogue": CATALOGUE.without("shout", "convert", "whisper")},
    ],
)
def test_of_no_states_there_are_no_calls_and_no_scores(options: dict[str, Any]) -> None:
    made = policy(**options)
    sampled = made.sample_actions([], 3)
    assert (sampled.actions, made.generate_actions([], 3), made.predict([])) == ([], [], [])
    assert sampled.mask.shape == sampled.behaviour_log_probs.shape == (0, 1)
    assert made.tool_probabilities([]).shape == (0, len(made.catalogue))
    for scores in (
        sampled.scores,
        made.score_actions([], []),
        made.score_groups([], []),
        made.score_groups(TEXTS[:0], []),
    ):
        assert scores.log_probs.shape == scores.mask.shape == scores.entropy.shape == (0, 1)
        assert scores.mask.dtype == torch.bool
    assert made.get_log_probabilities([], []).shape == (0,)
    made.score_actions([], []).log_probs.sum().backward()


def test_groups_may_all_be_empty() -> None:
    assert policy().score_groups(TEXTS, [[], [], [], []]).log_probs.shape == (0, 1)


# --- what is read and filled in


def test_a_task_is_its_text_and_its_slots_fill_what_is_free() -> None:
    made = policy()
    asked = task(TEXTS[1], text="hello", value=2.0, unit="mile", colour="red")
    assert torch.equal(made.tool_probabilities([asked]), made.tool_probabilities(TEXTS[1:2]))
    for one in made.generate_actions([asked], 200)[0]:
        free = {"ping": {}, "shout": {"text": "hello"}, "convert": {"value": 2.0}, "whisper": {"text": "hello"}}[
            one.tool
        ]
        assert {name: value for name, value in one.arguments.items() if name in ("text", "value", "colour")} == free
        if one.tool == "convert":
            assert one.arguments["unit"] in ("mile", "foot"), "decided, not filled in"


def test_what_is_filled_in_is_no_decision() -> None:
    made = policy()
    bare, filled = call("shout", tone="soft"), call("shout", tone="soft", text="hello")
    scores = made.score_actions(TEXTS[:1] * 2, [bare, filled])
    assert torch.equal(scores.log_probs[0], scores.log_probs[1])


def test_describing_and_filling_can_be_replaced() -> None:
    made = policy(
        describe=lambda state: state["asked"], fill=lambda state, tool: {"text": f"{state['name']} to {tool.name}"}
    )
    state = {"asked": TEXTS[1], "name": "Ann"}
    assert torch.equal(made.tool_probabilities([state]), made.tool_probabilities([state | {"name": "Bob"}]))
    texts = {one.tool: one.arguments.get("text") for one in made.generate_actions([state], 200)[0]}
    assert texts == {"ping": None, "convert": None, "shout": "Ann to shout", "whisper": "Ann to whisper"}


def test_an_encoder_is_asked_once_per_text() -> None:
    asked: list[str] = []

    def encode(texts: Sequence[str]) -> Tensor:
        asked.extend(texts)
        return HashingEncoder(16)(texts)

    made = policy(encoder=encode)
    for _ in range(2):
        sampled = made.sample_actions(TEXTS, 3)
        made.score_groups(TEXTS, sampled.actions)
    assert len(asked) == len(set(asked))
    assert asked[-4:] == TEXTS


# --- one more tool, a copy, a file, another precision


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


def test_a_tool_is_known_by_its_description() -> None:
    """With s alone (W = 0), a new tool is likely where the request has its words."""
    made = policy(random=False)
    with torch.no_grad():
        made.similarity[0] = 1.0
    made.add_tools(Tool.from_function(pong))
    assert int(made.tool_probabilities(["please answer this greeting"])[0].argmax()) == 4


def test_a_name_that_is_taken_is_refused_and_nothing_changes() -> None:
    made = policy()
    before = made.tool_probabilities(TEXTS)
    with pytest.raises(ConfigError, match="twice: ping"):
        made.add_tools(CATALOGUE["ping"])
    assert torch.equal(made.tool_probabilities(TEXTS), before)


def test_no_weight_belongs_to_one_tool() -> None:
    shapes = [
        {name: value.shape for name, value in policy(catalogue).get_parameters().items()}
        for catalogue in (CATALOGUE, CATALOGUE.without("convert", "whisper"))
    ]
    assert shapes[0] == shapes[1]
    assert set(shapes[0]) == {
        "tool_query.weight",
        "tool_query.bias",
        "value_query.weight",
        "value_query.bias",
        "similarity",
    }


def test_a_copy_is_a_policy_of_its_own() -> None:
    """What is left out too: a reference policy is a copy."""
    made = policy()
    other = copy.deepcopy(made)
    calls = [call("convert", unit="mile"), call("convert", unit="foot", exact=False)]
    assert torch.equal(made.score_actions(TEXTS[:2], calls).log_probs, other.score_actions(TEXTS[:2], calls).log_probs)
    one, same = (each.generate_actions(TEXTS, 50, generator=torch.Generator().manual_seed(1)) for each in (made, other))
    assert one == same
    before = made.tool_probabilities(TEXTS)
    with torch.no_grad():
        other.tool_query.weight += 1
    other.add_tools(Tool.from_function(pong))
    assert torch.equal(made.tool_probabilities(TEXTS), before)


@pytest.mark.parametrize("options", [{}, {"hidden": [6, 5]}, {"num_features": 3}, {"num_features": 3, "hidden": [4]}])
def test_what_was_saved_comes_back_bit_for_bit(tmp_path, options: dict[str, Any]) -> None:
    made, states = policy(**options), VECTORS if "num_features" in options else TEXTS
    made.save(tmp_path / "new" / "folder")
    loaded = ToolSelectionPolicy.load(tmp_path / "new" / "folder", CATALOGUE, encoder=HashingEncoder(48))
    assert torch.equal(loaded.tool_probabilities(states), made.tool_probabilities(states))
    calls = [call("ping"), call("shout", tone="plain"), call("convert", unit="foot"), call("whisper", tone="soft")]
    assert torch.equal(loaded.score_actions(states, calls).log_probs, made.score_actions(states, calls).log_probs)


def test_what_was_saved_can_choose_from_another_catalogue(tmp_path) -> None:
    made = policy()
    made.save(tmp_path)
    larger = CATALOGUE.with_tools(Tool.from_function(pong))
    loaded = ToolSelectionPolicy.load(tmp_path, larger, encoder=HashingEncoder(48))
    made.add_tools(larger["pong"])
    assert torch.equal(loaded.tool_probabilities(TEXTS), made.tool_probabilities(TEXTS))


@pytest.mark.parametrize("other", [HashingEncoder(32), HashingEncoder(48, pair_weight=0), None])
def test_what_learned_with_another_encoder_is_refused(tmp_path, other: HashingEncoder | None) -> None:
    policy().save(tmp_path)
    with pytest.raises(
        ConfigError, match=r"trained with an.*encoder.*Pass encoder=\.\.\. with the encoder of the training"
    ):
        ToolSelectionPolicy.load(tmp_path, CATALOGUE, encoder=other)


def test_an_encoder_may_answer_with_another_precision(tmp_path) -> None:
    made = policy()
    made.save(tmp_path)
    loaded = ToolSelectionPolicy.load(tmp_path, CATALOGUE, encoder=lambda texts: HashingEncoder(48)(texts).bfloat16())
    torch.testing.assert_close(loaded.tool_probabilities(TEXTS), made.tool_probabilities(TEXTS), rtol=0, atol=0.05)


def test_a_folder_without_a_policy_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere holds no policy: policy\.json is missing"):
        ToolSelectionPolicy.load(tmp_path / "nowhere", CATALOGUE)


def load(folder: Path) -> Any:
    return ToolSelectionPolicy.load(folder, CATALOGUE, encoder=HashingEncoder(48))


@pytest.mark.parametrize("length", [None, 0, 5, 100, -1])
def test_weights_that_are_missing_or_cut_are_named(tmp_path, length: int | None) -> None:
    policy().save(tmp_path)
    weights = tmp_path / "policy.safetensors"
    whole = weights.read_bytes()
    weights.unlink()
    if length is not None:
        weights.write_bytes(whole[:length])
    with pytest.raises(ConfigError, match=r"policy\.safetensors is (missing|not the file).* Save the policy again"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", r"policy\.json is not JSON"),
        (b"\xff", r"policy\.json is not JSON"),
        (b"[" * 100_000, r"policy\.json is not JSON"),
        (b"[]", r"policy\.json must hold an object; got \[\]"),
        (b"{}", r"policy\.json lacks num_features, hidden, num_text_features, weights_sha256"),
        (b'{"num_features": "3", "hidden": [], "num_text_features": 48, "weights_sha256": ""}', "lacks num_features,"),
        (b'{"num_features": 3, "hidden": ["4"], "num_text_features": 48, "weights_sha256": ""}', "lacks hidden,"),
    ],
)
def test_a_description_that_is_none_is_named(tmp_path, text: bytes, message: str) -> None:
    policy().save(tmp_path)
    (tmp_path / "policy.json").write_bytes(text)
    with pytest.raises(ConfigError, match=rf"{message}.* Save the policy again"):
        load(tmp_path)


def test_sizes_that_were_altered_are_named(tmp_path) -> None:
    policy(num_features=3, hidden=[4]).save(tmp_path)
    path = tmp_path / "policy.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden": [5]}))
    with pytest.raises(ConfigError, match=r"(?s)the weights are not of the sizes in policy\.json: .*size mismatch"):
        load(tmp_path)


def test_a_file_is_no_folder(tmp_path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file holds no policy: policy\.json is missing"):
        load(tmp_path / "file")


def test_the_weights_of_one_policy_do_not_load_with_the_sizes_of_another(tmp_path) -> None:
    for name in ("one", "other"):
        policy().save(tmp_path / name)
    (tmp_path / "one" / "policy.safetensors").replace(tmp_path / "other" / "policy.safetensors")
    with pytest.raises(ConfigError, match=r"policy\.safetensors is not the file that policy\.json was written with"):
        load(tmp_path / "other")


class Ended(BaseException):
    """The process, at this place."""


@pytest.mark.parametrize("function", ["fsync", "replace"])
@pytest.mark.parametrize("place", [1, 2])
def test_saving_that_is_interrupted_leaves_no_mixture(tmp_path, monkeypatch, function: str, place: int) -> None:
    """Weights and description are both on the disk, and then both moved: before the first move the old policy is whole."""
    before, after = policy(), policy()
    before.save(tmp_path)
    calls = itertools.count(1)
    real = getattr(os, function)

    def end(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == place:
            raise Ended
        return real(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, function, end)
        with pytest.raises(Ended):
            after.save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"policy.json", "policy.safetensors"}
    if function == "fsync" or place == 1:
        assert torch.equal(load(tmp_path).tool_probabilities(TEXTS), before.tool_probabilities(TEXTS))
    else:
        with pytest.raises(ConfigError, match="or saving was interrupted"):
            load(tmp_path)
    after.save(tmp_path)
    assert torch.equal(load(tmp_path).tool_probabilities(TEXTS), after.tool_probabilities(TEXTS))


@pytest.mark.parametrize(("options", "states"), [({}, TEXTS), ({"num_features": 3, "hidden": [4]}, VECTORS)])
def test_it_works_in_double_precision(options: dict[str, Any], states: list[Any]) -> None:
    single = policy(**options)
    double = copy.deepcopy(single).double()
    double.add_tools(Tool.from_function(pong))
    single.add_tools(Tool.from_function(pong))
    probabilities = double.tool_probabilities(states)
    assert probabilities.dtype == torch.float64
    assert bool(((probabilities.sum(1) - 1).abs() < 1e-12).all())
    torch.testing.assert_close(probabilities.float(), single.tool_probabilities(states), rtol=0, atol=1e-5)
    assert double.sample_actions(states, 3).behaviour_log_probs.dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_log_probs_of_a_policy_in_half_precision_are_single_precision(dtype: torch.dtype) -> None:
    """bfloat16 has -1.1016 for log(1/3), which is -1.0986."""
    made = policy(CATALOGUE.without("ping"), random=False).to(dtype)
    scores = made.score_actions(TEXTS[:1], [call("shout", tone="soft")])
    assert scores.log_probs.dtype == scores.entropy.dtype == torch.float32
    torch.testing.assert_close(scores.log_probs, torch.full((1, 2), -math.log(3)), rtol=0, atol=1e-6)
    torch.testing.assert_close(scores.entropy, torch.full((1, 2), math.log(3)), rtol=0, atol=1e-6)
    torch.testing.assert_close(made.tool_probabilities(TEXTS).sum(1), torch.ones(4), rtol=0, atol=1e-6)
    scores.log_probs.sum().backward()
    assert {value.grad.dtype for value in made.parameters() if value.grad is not None} == {dtype}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_what_is_not_available_is_not_available_in_half_precision_either(dtype: torch.dtype) -> None:
    """The least number of float16 is -65504, a log-prob like any other."""
    made = policy(available=without_ping, scale=0.05).to(dtype)
    with pytest.raises(ContractError, match="ping must be available in the state of row 0 to be scored"):
        made.score_actions(TEXTS[:1], [call("ping")])
    assert made.tool_probabilities(TEXTS[:1])[0, 0] == 0
    tools, _ = gradient_of_vectors(made, TEXTS[:2], [call("shout", tone="soft"), call("convert", unit="mile")])
    assert bool((tools[0] == 0).all())
    assert bool((tools[1] != 0).any())


def test_all_that_it_looks_up_moves_with_it() -> None:
    made = policy().to("meta")
    assert {value.device.type for value in itertools.chain(made.buffers(), made.parameters())} == {"meta"}
    made.add_tools(Tool.from_function(pong))
    assert {value.device.type for value in made.buffers()} == {"meta"}
    assert made.tool_vectors.shape[0] == 5


def test_a_batch_may_hold_fewer_decisions_than_the_longest_tool_has():
    """Tools of 1, 2 and 3 decisions: drawn with the longest unavailable, calls and scores are narrower, and agree."""

    def tool(name, parameters):
        properties = {parameter: {"enum": ["a", "b"]} for parameter in parameters}
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        return Tool(name=name, description=f"Do {name}.", function=len, parameters=schema)

    catalogue = ToolCatalogue([tool("one", "x"), tool("two", "xy"), tool("three", "xyz")])
    policy = ToolSelectionPolicy(catalogue, available=lambda state: {"one", "two"} if state == "short" else None)
    torch.manual_seed(0)
    for state, widths in (("short", {2, 3}), ("long", {4})):
        sampled = policy.sample_actions([state], 64)
        assert sampled.mask.shape[1] in widths
        [calls] = sampled.actions
        assert all(set(call.arguments) == set(catalogue[call.tool].properties) for call in calls)
        assert set(sampled.mask.sum(1).tolist()) == {1 + len(catalogue[call.tool].properties) for call in calls}
        remembered = policy.score_groups([state], [calls])
        read_back = policy.score_groups([state], [[replace(call) for call in calls]])  # equal, and not the same objects
        for scores in (remembered, read_back):
            torch.testing.assert_close(scores.log_probs, sampled.behaviour_log_probs)
            assert torch.equal(scores.mask, sampled.mask)


def test_what_a_call_chose_is_not_taken_from_another_that_was_drawn():
    """The policy remembers what it has just drawn by the objects themselves; others are read."""
    policy = ToolSelectionPolicy(ToolCatalogue([Tool.from_function(ping), Tool.from_function(pong)]))
    torch.manual_seed(0)
    [calls] = policy.sample_actions(["any"], 16).actions
    drawn = next(call for call in calls if call.tool == "pong")
    other = call("pong", sure=not drawn.arguments["sure"])
    with torch.no_grad():
        policy.value_query.bias.copy_(policy.value_vectors[int(drawn.arguments["sure"])])
    likely, unlikely = policy.get_log_probabilities(["any", "any"], [drawn, other]).tolist()
    assert likely > unlikely
    assert policy.get_log_probabilities(["any"], [replace(drawn)]).item() == pytest.approx(likely)


def test_a_call_of_a_tool_that_is_not_available_is_not_scored():
    policy = ToolSelectionPolicy(CATALOGUE, available=lambda state: {"ping"} if state == "closed" else None)
    calls = [call("ping"), call("shout", tone="loud")]
    policy.score_actions(["closed", "open"], calls)
    with pytest.raises(ContractError, match=r"shout must be available in the state of row 1 to be scored"):
        policy.score_actions(["open", "closed"], calls)


# --- threads


def test_threads_that_draw_from_one_policy_score_their_own_calls():
    """As a service does; what one draws must not be taken for what another chose."""
    made = policy()
    wrong: list[object] = []

    def serve(text: str) -> None:
        for _ in range(150):
            try:
                sampled = made.sample_actions([text], 128)
                scores = made.score_groups([text], sampled.actions)
                if not torch.equal(scores.log_probs, sampled.behaviour_log_probs):
                    wrong.append(text)
            except Exception as error:
                wrong.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=serve, args=(text,)) for text in TEXTS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert wrong == []


def test_a_policy_survives_pickle():
    made = policy()
    again = pickle.loads(pickle.dumps(made))
    assert torch.equal(again.tool_probabilities(TEXTS), made.tool_probabilities(TEXTS))
