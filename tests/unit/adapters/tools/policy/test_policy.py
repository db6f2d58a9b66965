"""The policy that chooses tools, against its formulas, against enumeration, and through the conformance kit."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from adapters.tools import ToolCall, ToolCatalogue, ToolResult, ToolRewards, ToolSelectionPolicy, standard_rewards
from adapters.tools.policy.distribution import CallDistribution
from adapters.tools.text.encoders import HashingEncoder, with_own_feature
from examples.tool_workbench import make_workbench_tasks, workbench_catalogue
from grpo import AdvantageConfig, GRPOConfig, GRPOTrainer, ObjectiveConfig
from grpo.checks import check_policy
from grpo.errors import ConfigError, ContractError
from grpo.types import ActionScores
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


def untrained(texts: Sequence[str]) -> Tensor:
    """Tool logits of an untrained policy: 20 / 2 times the cosine of request and tool, and the evidence."""
    encoder = HashingEncoder(48)
    similar = 10 * encoder(texts) @ encoder([tool.text for tool in CATALOGUE.values()]).T
    rows = [TEXTS.index(text) for text in texts]
    return similar + 2 * NAMED[rows] + 0.6 * FILLED[rows]


VALUES = {"shout": ["loud", "soft", "plain"], "whisper": ["loud", "soft"], "convert": ["mile", "foot"]}


def untrained_values(row: int, made: ToolCall) -> list[float]:
    """Log-probs of a call's values: all values are equally likely but for those in the text, which have e^4 times the odds."""
    if made.tool == "ping":
        return [0, 0]
    contained = {1: "loud", 2: "mile"}.get(row)
    odds = {value: math.e**4 if value == contained else 1 for value in VALUES[made.tool]}
    first = math.log(odds[made.arguments["unit" if made.tool == "convert" else "tone"]] / sum(odds.values()))
    return [first, -math.log(3) if made.tool == "convert" else 0]


def test_an_untrained_policy_prefers_similar_texts_and_what_the_request_contains() -> None:
    for row, text in enumerate(TEXTS):
        scores = policy(random=False).score_actions([text] * len(ALL_CALLS), ALL_CALLS)
        tools = untrained([text])[0].log_softmax(0)
        for found, made in zip(scores.log_probs, ALL_CALLS, strict=True):
            expected = [float(tools[list(CATALOGUE).index(made.tool)]), *untrained_values(row, made)]
            torch.testing.assert_close(found, torch.tensor(expected), rtol=0, atol=1e-5)
    found = policy(random=False, hidden=[6]).tool_probabilities(TEXTS)  # an untrained network adds nothing to this
    torch.testing.assert_close(found, untrained(TEXTS).softmax(1), rtol=0, atol=1e-5)


def test_an_untrained_policy_over_vectors_is_uniform() -> None:
    scores = policy(random=False, num_features=3).score_actions(VECTORS[:1] * len(ALL_CALLS), ALL_CALLS)
    counts = {"ping": [4], "shout": [4, 3], "convert": [4, 2, 3], "whisper": [4, 2]}
    for found, made in zip(scores.log_probs, ALL_CALLS, strict=True):
        expected = [-math.log(count) for count in counts[made.tool]]
        torch.testing.assert_close(found[: len(expected)], torch.tensor(expected), rtol=0, atol=1e-5)


def test_log_probs_equal_the_documented_formula() -> None:
    """Written out for one call of one state: softmax(e . (W h + b + 20 s x) + evidence), and the same for each parameter."""
    made, encoder = policy(), HashingEncoder(48)
    x = encoder([TEXTS[2]])[0]
    s = made.network.similarity
    query = made.network.tool_query.weight @ x + made.network.tool_query.bias + 20 * s[0] * x
    t = 4 * made.network.evidence
    logits = encoder([tool.text for tool in CATALOGUE.values()]) @ query + t[0] * NAMED[2] + t[1] * FILLED[2]
    value_query = made.network.value_query.weight @ x + made.network.value_query.bias + s[1] * x

    def values(*texts: str) -> Tensor:
        contained = torch.tensor([float(text.startswith("mile")) for text in texts])
        return (with_own_feature(texts, encoder(texts), 3.0) @ value_query + 4 * contained).log_softmax(0)

    units, exact = values("mile unit", "foot unit"), values("false exact", "true exact", "left out exact")
    expected = torch.stack([logits.log_softmax(0)[2], units[1], exact[2]])
    found = made.score_actions([TEXTS[2]], [call("convert", unit="foot")]).log_probs[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(made.tool_probabilities([TEXTS[2]])[0], logits.softmax(0), rtol=1e-5, atol=1e-6)


def test_hidden_layers_are_tanh_networks_over_the_vector() -> None:
    made = policy(num_features=3, hidden=[5])
    h = torch.tanh(made.network.body[0].weight @ torch.tensor(VECTORS[0]) + made.network.body[0].bias)
    logits = made.menu.tool_vectors @ (made.network.tool_query.weight @ h + made.network.tool_query.bias)
    torch.testing.assert_close(made.tool_probabilities(VECTORS[:1])[0], logits.softmax(0), rtol=1e-5, atol=1e-6)
    assert made.network.similarity is None, "a vector cannot be held against a text"


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
    calls = [call("ping"), call("convert", unit="mile"), call("convert", unit="foot")]
    entropy = policy(random=False).score_actions(TEXTS[:3], calls).entropy
    log = math.log
    tools = torch.distributions.Categorical(logits=untrained(TEXTS[:3])).entropy().tolist()
    mile = math.e**4 / (math.e**4 + 1)  # the text contains "miles"
    of_unit = -mile * log(mile) - (1 - mile) * log(1 - mile)
    expected = torch.tensor([[tools[0], 0, 0], [tools[1], log(2), log(3)], [tools[2], of_unit, log(3)]])
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


def assert_same_scores(found: ActionScores, expected: ActionScores) -> None:
    torch.testing.assert_close(found.log_probs, expected.log_probs, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.entropy, expected.entropy, rtol=0, atol=1e-6)
    assert torch.equal(found.mask, expected.mask)


def test_log_probs_of_samples_equal_the_scored_ones() -> None:
    for options, states in (
        ({}, TEXTS), ({"hidden": [8]}, TEXTS), ({"available": by_first_letter}, TEXTS), ({"num_features": 3}, VECTORS),
    ):  # fmt: skip
        made = policy(**options)
        sampled = made.sample_actions(states, 25)
        assert [len(group) for group in sampled.actions] == [25] * 4
        flat = [one for group in sampled.actions for one in group]
        assert_same_scores(sampled.scores, made.score_actions([state for state in states for _ in range(25)], flat))
        assert_same_scores(sampled.scores, made.score_groups(states, sampled.actions))
        assert torch.equal(sampled.mask, sampled.scores.mask)
        assert torch.equal(sampled.behaviour_log_probs, sampled.scores.log_probs)
    groups = [ALL_CALLS[:1], ALL_CALLS[3:9], [], ALL_CALLS[9:]]  # groups may differ in length
    rows = [text for text, group in zip(TEXTS, groups, strict=True) for _ in group]
    flat = [one for group in groups for one in group]
    made = policy()
    assert_same_scores(made.score_groups(TEXTS, groups), made.score_actions(rows, flat))


def frequencies(made: Any, text: str, seed: int, num_draws: int = 20_000) -> Tensor:
    drawn = made.generate_actions([text], num_draws, generator=torch.Generator().manual_seed(seed))[0]
    return torch.bincount(torch.tensor([ALL_CALLS.index(one) for one in drawn]), minlength=len(ALL_CALLS))


def test_sampled_calls_are_as_frequent_as_their_probabilities() -> None:
    made = policy().double()
    with torch.no_grad():
        expected = made.get_log_probabilities([TEXTS[1]] * len(ALL_CALLS), ALL_CALLS).exp().numpy() * 20_000
        elsewhere = made.get_log_probabilities([TEXTS[3]] * len(ALL_CALLS), ALL_CALLS).exp().numpy() * 20_000
    assert expected.min() > 5, "or the test is not valid"
    p_values = []
    for seed in range(4, 7):
        counts = frequencies(made, TEXTS[1], seed).numpy()
        p_values.append(stats.chisquare(counts, expected, sum_check=False).pvalue)
        assert stats.chisquare(counts, elsewhere, sum_check=False).pvalue < 1e-9, "it tells two states apart"
    assert min(p_values) > 1e-3, p_values
    assert stats.combine_pvalues(p_values).pvalue > 1e-2, p_values


def test_the_same_generator_draws_the_same_calls() -> None:
    made, generators = policy(), [torch.Generator().manual_seed(seed) for seed in (3, 3, 4)]
    one, again, other = (made.generate_actions(TEXTS, 20, generator=each) for each in generators)
    assert one == again
    assert one != other


def likeliest(made: Any, text: str, tool: str) -> ToolCall:
    calls = [one for one in ALL_CALLS if one.tool == tool]
    return calls[int(made.get_log_probabilities([text] * len(calls), calls).argmax())]


def test_predict_takes_the_likeliest_tool_then_the_likeliest_values() -> None:
    made = policy(scale=1.0)
    tools = [list(CATALOGUE)[place] for place in made.tool_probabilities(TEXTS).argmax(1).tolist()]
    expected = [likeliest(made, text, tool) for text, tool in zip(TEXTS, tools, strict=True)]
    assert made.predict(TEXTS) == [made.predict([text])[0] for text in TEXTS] == expected


def test_predict_top_ranks_tools_by_probability_with_their_likeliest_values() -> None:
    made = policy(scale=1.0)
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


def test_steps_are_padded_to_the_longest_call_of_the_batch() -> None:
    made, yes, no = policy(), True, False
    scores = made.score_actions(TEXTS[:3], STEPS)
    assert scores.mask.tolist() == [[yes, no, no], [yes, yes, no], [yes, yes, yes]]
    assert bool((scores.log_probs[~scores.mask] == 0).all())
    assert bool((scores.entropy[~scores.mask] == 0).all())
    short = made.score_actions(TEXTS[:2], [call("ping"), call("ping")])
    assert short.log_probs.shape == short.mask.shape == short.entropy.shape == (2, 1)


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


def gradient_of_vectors(made: Any, states: Sequence[Any], calls: Sequence[ToolCall]) -> tuple[Tensor, Tensor]:
    """What comes back to the texts of tools and of values."""
    made.menu.tool_vectors.requires_grad_()
    made.menu.value_vectors.requires_grad_()
    scores: ActionScores = made.score_actions(states, calls)
    (scores.log_probs.sum() + scores.entropy.sum()).backward()
    return made.menu.tool_vectors.grad, made.menu.value_vectors.grad


def test_values_of_other_tools_get_exactly_no_gradient() -> None:
    made = policy()
    _, values = gradient_of_vectors(made, TEXTS[:2], [call("convert", unit="mile", exact=True), call("ping")])
    texts = list(made.catalogue.value_places)
    of_convert = [text.endswith((" unit", " exact")) for text in texts]
    assert sum(of_convert) == 5
    assert sum(not of for of in of_convert) == 3
    for text, of, gradient in zip(texts, of_convert, values, strict=True):
        assert bool(gradient.isfinite().all())
        assert bool((gradient != 0).any()) == of, text


# --- masks
def test_an_unavailable_tool_is_never_drawn() -> None:
    """Although it is by far the likeliest of all."""
    made = policy(random=False, available=without_ping)
    with torch.no_grad():
        made.network.tool_query.bias += 20 * made.menu.tool_vectors[0]
    drawn = made.generate_actions(TEXTS[:1], 10_000)[0]
    assert {one.tool for one in drawn} == {"shout", "convert", "whisper"}
    assert made.predict(TEXTS)[0].tool != "ping"
    made.available = None
    assert sum(one.tool == "ping" for one in made.generate_actions(TEXTS[:1], 1_000)[0]) > 900


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


def test_no_gradient_flows_through_unavailable_tools_and_that_of_a_strongly_weighted_entropy_is_finite() -> None:
    """The log-prob of an unavailable tool is near the smallest float, so doubling it would give -inf."""
    made = policy(available=without_ping)
    tools, _ = gradient_of_vectors(made, TEXTS[:2], [call("shout", tone="soft"), call("convert", unit="mile")])
    assert bool((tools[0] == 0).all())
    for gradient in tools[1:]:
        assert bool((gradient != 0).any())
    (1e6 * made.score_actions(TEXTS[:1], [call("convert", unit="mile")]).entropy.sum()).backward()
    for gradient in (tools, *(value.grad for value in made.parameters())):
        assert bool(gradient.isfinite().all())


def test_unavailable_tools_stay_impossible_in_half_precision(subtests: pytest.Subtests) -> None:
    """The smallest float16 number is -65504, which could be an ordinary log-prob."""
    for dtype in (torch.bfloat16, torch.float16):
        with subtests.test(str(dtype)):
            made = policy(available=without_ping, scale=0.05).to(dtype)
            with pytest.raises(ContractError, match="ping must be available in the state of row 0 to be scored"):
                made.score_actions(TEXTS[:1], [call("ping")])
            assert made.tool_probabilities(TEXTS[:1])[0, 0] == 0
            tools, _ = gradient_of_vectors(made, TEXTS[:2], [call("shout", tone="soft"), call("convert", unit="mile")])
            assert bool((tools[0] == 0).all())
            assert bool((tools[1] != 0).any())


# --- what a call was drawn with is what scoring it gives, at the size of the workbench: 33 tools, vectors of 1024
WORKBENCH = workbench_catalogue()
REQUESTS = make_workbench_tasks(5, seed=0)
GROUP_SIZE = 4


def trained_policy(**options: Any) -> ToolSelectionPolicy:
    made = ToolSelectionPolicy(WORKBENCH, **options)
    config = GRPOConfig(
        group_size=8, num_states_per_iteration=32, learning_rate=0.02, advantage=AdvantageConfig(scale="batch"),
        objective=ObjectiveConfig(aggregation="row_sum", entropy_coef=0.07), seed=0,
    )  # fmt: skip
    runs_all = SimpleNamespace(run=lambda calls: [ToolResult() for _ in calls])
    rewards = ToolRewards(runs_all, standard_rewards(WORKBENCH))
    trainer = GRPOTrainer(config=config, policy=made, reward_model=rewards)
    trainer.train(REQUESTS, num_iterations=10, progress=False)
    assert made.tool_probabilities(REQUESTS).max() > 0.2, "it has learned something"
    return made


POLICIES: dict[str, Callable[[], ToolSelectionPolicy]] = {
    "trained": trained_policy,
    "trained, hidden layer": lambda: trained_policy(hidden=[32]),
    "weights of 1, hidden layer": lambda: policy(WORKBENCH, scale=1.0, encoder=None, hidden=[32]),
}
ROUNDINGS = 16
"""A logit is a sum of 1,024 products (or of 32, of sums of 1,024), which matrix products of other shapes add in another
order: the error of such a sum grows like the square root of its length, 32, and half of that is allowed."""


@pytest.mark.filterwarnings("ignore:ToolSelectionPolicy. fill gave no value")  # the tasks need only a few of the tools
@pytest.mark.parametrize("kind", POLICIES)
def test_log_probs_are_the_same_whatever_is_scored_with_them(kind: str) -> None:
    torch.manual_seed(0)
    made = POLICIES[kind]()
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
    for place, group in enumerate(sampled.actions):
        rows = slice(place * GROUP_SIZE, (place + 1) * GROUP_SIZE)
        require_same(made.score_groups(REQUESTS[place : place + 1], [group]).log_probs, rows)
