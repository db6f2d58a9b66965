"""The policy that chooses tools, against its formulas, against enumeration, and through the conformance kit."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from adapters.tools import ToolCall, ToolCatalogue
from adapters.tools.policy.distribution import CallDistribution
from adapters.tools.text.encoders import HashingEncoder, with_own_feature
from examples.tool_workbench import make_workbench_tasks, workbench_catalogue
from grpo.checks import check_policy
from grpo.errors import ConfigError, ContractError
from tests.support.tool_policies import (
    ALL_CALLS,
    CATALOGUE,
    TEXTS,
    VECTORS,
    assert_gradients_agree,
    by_first_letter,
    call,
    policy,
    task,
    without_ping,
)

# --- conformance
KINDS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "texts": lambda: (policy(), TEXTS),
    "tasks": lambda: (policy(), [task("loud", text="a"), task("a longer text, soft", text="b", value=2.0)]),
    "a tensor": lambda: (policy(num_features=3), torch.tensor(VECTORS)),
    "hidden layers over vectors": lambda: (policy(num_features=3, hidden=[8]), VECTORS),
    "masks": lambda: (policy(available=by_first_letter), TEXTS),
    "no parameters": lambda: (policy(ToolCatalogue([CATALOGUE["ping"], replace(CATALOGUE["ping"], name="again")])), TEXTS),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_policy_passes_the_conformance_kit(kind: str) -> None:
    report = check_policy(*KINDS[kind](), strict=True)
    for name in ("score_actions", "score_groups", "sample_actions", "generated samples", "sampled samples", "entropy",
                 "gradient", "deepcopy"):  # fmt: skip
        assert report[name].status == "passed", report


# --- probabilities
NAMED = torch.tensor([[0.0, 0, 0, 0], [0, 1, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0]])
"""Enumerated values of each tool in `TEXTS`: "loud" is one of `shout` and of `whisper`, and "miles" one of `convert`."""
FILLED = torch.tensor([[0.0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]])
"""`convert` takes a number, such as "two". No parameter of this kind is required."""


VALUES: dict[str, dict[str, list[Any]]] = {
    "ping": {}, "shout": {"tone": ["loud", "soft", "plain"]}, "whisper": {"tone": ["loud", "soft"]},
    "convert": {"unit": ["mile", "foot"], "exact": ["false", "true", "left out"]},
}  # fmt: skip
CONTAINED = [None, "loud", "mile", None]
"""The enumerated value in each text."""


def test_log_probs_equal_the_documented_formula(subtests: pytest.Subtests) -> None:
    """softmax(e . (W h + b + 20 s x) + evidence), and the same for the values of each parameter."""
    made, encoder = policy(), HashingEncoder(48)
    network, s, t = made.network, made.network.similarity, 4 * made.network.evidence

    def of_values(x: Tensor, parameter: str, values: list[str], contained: str | None) -> Tensor:
        query = network.value_query.weight @ x + network.value_query.bias + s[1] * x
        texts = [f"{value} {parameter}" for value in values]
        bonus = torch.tensor([4.0 * (value == contained) for value in values])
        return (with_own_feature(texts, encoder(texts), 3.0) @ query + bonus).log_softmax(0)

    for row, text in enumerate(TEXTS):
        x = encoder([text])[0]
        query = network.tool_query.weight @ x + network.tool_query.bias + 20 * s[0] * x
        tools = encoder([tool.text for tool in CATALOGUE.values()]) @ query + t[0] * NAMED[row] + t[1] * FILLED[row]
        torch.testing.assert_close(made.tool_probabilities([text])[0], tools.softmax(0), rtol=1e-5, atol=1e-6)
        scores = made.score_actions([text] * len(ALL_CALLS), ALL_CALLS)
        for log_probs, mask, one in zip(scores.log_probs, scores.mask, ALL_CALLS, strict=True):
            expected = [tools.log_softmax(0)[list(CATALOGUE).index(one.tool)]]
            for parameter, values in VALUES[one.tool].items():
                place = values.index(str(one.arguments.get(parameter, "left out")).lower())
                expected.append(of_values(x, parameter, values, CONTAINED[row])[place])
            with subtests.test(text, call=str(one)):
                torch.testing.assert_close(log_probs[: len(expected)], torch.stack(expected), rtol=1e-5, atol=1e-5)
                assert mask.tolist() == [place < len(expected) for place in range(3)], "padded to the longest call"
                assert not log_probs[len(expected) :].any()


@pytest.mark.parametrize("options", [{}, {"hidden": [6]}, {"num_features": 3}])
def test_an_untrained_policy_chooses_by_similarity_and_evidence_alone(options: dict[str, Any]) -> None:
    network = policy(random=False, **options).network
    for query in (network.tool_query, network.value_query):
        assert not query.weight.any()
        assert not query.bias.any()
    if "num_features" in options:
        assert network.similarity is None, "a vector cannot be held against a text"
    else:
        assert (network.similarity.tolist(), network.evidence.tolist()) == ([0.5, 0.0], pytest.approx([0.5, 0.15]))


def test_hidden_layers_are_tanh_networks_over_the_vector() -> None:
    made = policy(num_features=3, hidden=[5])
    h = torch.tanh(made.network.body[0].weight @ torch.tensor(VECTORS[0]) + made.network.body[0].bias)
    logits = made.menu.tool_vectors @ (made.network.tool_query.weight @ h + made.network.tool_query.bias)
    torch.testing.assert_close(made.tool_probabilities(VECTORS[:1])[0], logits.softmax(0), rtol=1e-5, atol=1e-6)


def test_the_entropy_equals_that_of_the_enumerated_calls() -> None:
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


def test_the_entropy_of_each_step_equals_hand_worked_values() -> None:
    calls, made = [call("ping"), call("convert", unit="mile"), call("convert", unit="foot")], policy(random=False)
    log, tools = math.log, [float(-(p * p.log()).sum()) for p in made.tool_probabilities(TEXTS[:3])]
    mile = math.e**4 / (math.e**4 + 1)  # the text contains "miles"
    of_unit = -mile * log(mile) - (1 - mile) * log(1 - mile)
    expected = torch.tensor([[tools[0], 0, 0], [tools[1], log(2), log(3)], [tools[2], of_unit, log(3)]])
    entropy = made.score_actions(TEXTS[:3], calls).entropy
    torch.testing.assert_close(entropy, expected, rtol=0, atol=1e-6)


def test_the_entropy_counts_a_very_unlikely_tool_in_full() -> None:
    """p = exp(-20) for one of two tools: H = 20 p - (1 - p) log(1 - p), which is nearly 21 p."""
    unlikely = math.exp(-20)
    distribution = CallDistribution(
        tools=torch.tensor([[math.log1p(-unlikely), -20.0]], dtype=torch.float64),
        values=torch.zeros(1, 0, dtype=torch.float64),
        places=torch.zeros(2, 0, 0, dtype=torch.int64),
    )
    found = distribution.score(torch.tensor([0]), torch.tensor([[0]])).entropy
    assert found.tolist() == [[pytest.approx(21 * unlikely, rel=1e-6)]]


def likeliest(made: Any, text: str, tool: str) -> ToolCall:
    calls = [one for one in ALL_CALLS if one.tool == tool]
    return calls[int(made.get_log_probabilities([text] * len(calls), calls).argmax())]


def test_predict_top_ranks_tools_by_probability_with_their_likeliest_values() -> None:
    made = policy(scale=1.0)
    assert made.predict(TEXTS) == [row[0].call for row in made.predict_top(TEXTS, 1)]
    probabilities = made.tool_probabilities(TEXTS)
    for num_tools in (1, 3, 4, 9):
        for text, row, found in zip(TEXTS, probabilities, made.predict_top(TEXTS, num_tools), strict=True):
            order = row.argsort(descending=True)[:num_tools]
            assert [one.call.tool for one in found] == [list(CATALOGUE)[place] for place in order]
            confidences = row ** (1 / 3) / (row ** (1 / 3)).sum()
            assert [one.confidence for one in found] == pytest.approx(confidences[order].tolist(), abs=1e-6)
            assert [one.call for one in found] == [likeliest(made, text, one.call.tool) for one in found]
    found = policy(available=by_first_letter).predict_top(TEXTS, 4)
    assert [{one.call.tool for one in row} for row in found[:2]] == [{"ping"}, {"shout", "convert"}]
    assert [len(row) for row in found] == [1, 2, 4, 4]


def test_predict_calls_no_tool_below_the_threshold() -> None:
    made = policy()
    confidences = torch.tensor([row[0].confidence for row in made.predict_top(TEXTS, 1)], dtype=torch.float64)
    made.threshold = float(confidences.sort().values[1])
    lowest = int(confidences.argmin())
    calls = made.predict(TEXTS)
    assert [call is None for call in calls] == [place == lowest for place in range(4)], "the threshold itself suffices"
    made.threshold = 0.0
    assert None not in made.predict(TEXTS)


def test_removed_tools_share_out_their_probability() -> None:
    made = policy()
    before = made.tool_probabilities(TEXTS)
    made.remove_tools("ping", "convert")
    assert list(made.catalogue) == ["shout", "whisper"]
    expected = before[:, [1, 3]] / before[:, [1, 3]].sum(1, keepdim=True)
    torch.testing.assert_close(made.tool_probabilities(TEXTS), expected)
    for names, message in ((["fly"], "lacks fly"), (["shout", "whisper"], "at least one tool")):
        with pytest.raises(ConfigError, match=message):
            made.remove_tools(*names)


def test_equal_calls_are_equal_and_hashable() -> None:
    """The conformance kit counts calls, and so may users."""
    assert len({*ALL_CALLS, *ALL_CALLS}) == len(ALL_CALLS)
    one, same = (call("sort", items=["b", {"a": [1]}], number=number, ending=None) for number in (1, 1.0))
    assert one == same
    assert hash(one) == hash(same)


# --- steps
STEPS = [call("ping"), call("shout", tone="soft"), call("convert", unit="mile")]
"""Calls of one, two and three steps."""


def test_nan_gradients_of_padding_reach_no_weight() -> None:
    """The gradient of masked log-probs is set to NaN."""
    made = policy(hidden=[4])

    def gradients(of_padding: float) -> list[Tensor]:
        made.zero_grad()
        scores = made.score_actions(TEXTS[:3], STEPS)
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
def test_gradients_agree_with_finite_differences(options: dict[str, Any]) -> None:
    made = policy(**options).double()
    calls = ALL_CALLS[1:]
    states = (VECTORS if "num_features" in options else TEXTS)[2:3] * len(calls)
    weights = torch.randn(2, len(calls), 3, dtype=torch.float64)

    def loss() -> Tensor:
        scores = made.score_actions(states, calls)
        return (weights[0] * scores.log_probs).sum() + (weights[1] * scores.entropy).sum()

    assert_gradients_agree(made, loss, tolerance=1e-7)


# --- masks
def test_available_tools_share_the_probability_of_unavailable_ones_state_by_state() -> None:
    made, yes, no = policy(), True, False
    everything = made.tool_probabilities(TEXTS)
    made.available = without_ping
    masked = made.tool_probabilities(TEXTS)
    assert bool((masked[:, 0] == 0).all())
    torch.testing.assert_close(masked[:, 1:], everything[:, 1:] / everything[:, 1:].sum(1, keepdim=True))
    with torch.no_grad():
        scores = made.score_actions(TEXTS[1:2], [call("shout", tone="soft")])
    p = masked[1, 1:]
    assert float(scores.entropy[0, 0]) == pytest.approx(float(-(p * p.log()).sum()), abs=1e-6), "among three"
    made.available = by_first_letter
    positive = made.tool_probabilities(TEXTS) > 0
    assert positive.tolist() == [[yes, no, no, no], [no, yes, yes, no], [yes] * 4, [yes] * 4]
    alone = made.score_actions(TEXTS[:1], [call("ping")])
    assert (alone.log_probs.tolist(), alone.entropy.tolist()) == ([[0.0]], [[0.0]])


def test_the_gradient_of_a_strongly_weighted_entropy_is_finite_beside_unavailable_tools() -> None:
    """The log-prob of an unavailable tool is near the smallest float, so doubling it would give -inf."""
    made = policy(available=without_ping)
    (1e6 * made.score_actions(TEXTS[:1], [call("convert", unit="mile")]).entropy.sum()).backward()
    for value in made.parameters():
        assert bool(value.grad.isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_calls_of_unavailable_tools_are_impossible_and_refused_in_every_precision(dtype: torch.dtype) -> None:
    """The smallest float16 number is -65504, which could be an ordinary log-prob."""
    made = policy(available=by_first_letter, scale=0.05).to(dtype)
    assert made.tool_probabilities(TEXTS[:1])[0, 1:].tolist() == [0, 0, 0]
    calls = [call("shout", tone="soft"), call("ping")]
    made.score_actions(TEXTS[1:2] * 2, calls[:1] * 2)
    with pytest.raises(ContractError, match="ping must be available in the state of row 1 to be scored"):
        made.score_actions(TEXTS[1:2] * 2, calls)


# --- what a call was drawn with is what scoring it gives, at the size of the workbench: 33 tools, vectors of 1024
WORKBENCH = workbench_catalogue()
REQUESTS = make_workbench_tasks(5, seed=0)
GROUP_SIZE = 4
ROUNDINGS = 16
"""A logit is a sum of 1,024 products (or of 32, of sums of 1,024), which matrix products of other shapes add in another
order: the error of such a sum grows like the square root of its length, 32, and half of that is allowed."""


@pytest.mark.filterwarnings("ignore:ToolSelectionPolicy. fill gave no value")  # the tasks need only a few of the tools
@pytest.mark.parametrize(("hidden", "scale"), [((), 0.1), ((32,), 1.0)])
def test_log_probs_are_the_same_whatever_is_scored_with_them(hidden: tuple[int, ...], scale: float) -> None:
    torch.manual_seed(0)
    made = policy(WORKBENCH, scale=scale, encoder=None, hidden=hidden)
    sampled = made.sample_actions(REQUESTS, GROUP_SIZE)
    wanted = sampled.behaviour_log_probs
    assert wanted.shape[0] == len(REQUESTS) * GROUP_SIZE
    # a log-prob is as exact as its logits
    largest = max(1.0, float(made.tool_probabilities(REQUESTS).log().abs().max()))

    def require_same(found: Tensor, rows: slice) -> None:
        """Equal but for the order of sums. Rows alone may be narrower, where no call has more decisions."""
        assert bool((wanted[rows, found.shape[1] :] == 0).all())
        atol = ROUNDINGS * torch.finfo(torch.float32).eps * largest
        torch.testing.assert_close(found.detach(), wanted[rows, : found.shape[1]], rtol=0, atol=atol)

    calls = [call for group in sampled.actions for call in group]
    tasks = [task for task in REQUESTS for _ in range(GROUP_SIZE)]
    require_same(made.score_groups(REQUESTS, sampled.actions).log_probs, slice(None))
    for size in (1, 3, 7, len(calls)):
        for start in range(0, len(calls), size):
            rows = slice(start, start + size)
            require_same(made.score_actions(tasks[rows], calls[rows]).log_probs, rows)
