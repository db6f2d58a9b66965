"""The regression of rewards on requests and calls."""

import math
from typing import Any, Literal

import numpy as np
import pytest
import torch

from adapters.tools.catalogue.calls import ToolCall
from adapters.tools.catalogue.tools import Tool, ToolCatalogue
from adapters.tools.learning.records import ToolSample
from adapters.tools.learning.reward_regression import RewardRegression, _Scores
from grpo.errors import ConfigError


def add(number: float = 0.0) -> None:
    """Add."""


def sort(order: Literal["up", "down"], sure: bool | None = None) -> None:
    """Sort."""


def wait() -> None:
    """Wait."""


CATALOGUE = ToolCatalogue(Tool.from_function(function) for function in (add, sort, wait))
VECTORS = {"add: Add.": [1.0, 0, 0], "sort: Sort.": [0, 1.0, 0], "wait: Wait.": [0, 0, 1.0]}


def encode(texts: Any) -> Any:
    """Requests are named by the tool that they are near to."""
    return [
        VECTORS.get(text) or next(v for name, v in VECTORS.items() if text.startswith(name.split(":")[0]))
        for text in texts
    ]


def call(tool: str, **arguments: Any) -> ToolCall:
    return ToolCall(tool=tool, arguments=arguments)


def row(state: Any, made: ToolCall, reward: float) -> ToolSample:
    return ToolSample(state=state, tool=made.tool, arguments=made.arguments, log_prob=[-1.0], reward=reward)


def estimated(q: Any, *pairs: tuple[Any, ToolCall]) -> list[float]:
    found: list[float] = q([state for state, _ in pairs], [made for _, made in pairs]).tolist()
    return found


def test_decisions_are_numbered_tools_first_and_then_values() -> None:
    """add 0, sort 1, wait 2; order: up 3, down 4; sure: false 5, true 6, left out 7. Values count 0.3."""
    made = [call("add", number=7.0), call("sort", order="down"), call("sort", order="up", sure=True), call("fly")]
    decisions = [CATALOGUE.decisions(one) for one in made]
    assert decisions[:2] == [(("add",),), (("sort",), ("sort", "order", 1), ("sort", "sure", 2))]
    assert decisions[3] == (("fly",),)
    assert CATALOGUE.decisions(call("sort", order="sideways", sure=1)) == (("sort",),)
    assert CATALOGUE.decisions(ToolCall(tool=["add"])) == ((None,),)  # type: ignore[arg-type]
    assert RewardRegression(CATALOGUE)._matrix(decisions).tolist() == [
        pytest.approx(values)
        for values in ([1] + [0] * 7, [0, 1, 0, 0, 0.3, 0, 0, 0.3], [0, 1, 0, 0.3, 0, 0, 0.3, 0], [0] * 8)
    ]


def test_with_many_decisions_the_estimate_is_the_mean_reward_of_each_call() -> None:
    """Two vectors, two tools and two values, each pair with its own mean between -1 and 3."""
    means = {
        ("a", "add"): -1.0,
        ("a", "up"): 2.0,
        ("a", "down"): 0.0,
        ("b", "add"): 1.0,
        ("b", "up"): 0.5,
        ("b", "down"): 3.0,
    }
    states, calls = (
        {"a": (1.0, 0.0), "b": (0.0, 1.0)},
        {"add": call("add"), "up": call("sort", order="up"), "down": call("sort", order="down")},
    )
    logs = [
        row(states[state], calls[name], mean + shift)
        for (state, name), mean in means.items()
        for shift in 2000 * (0.0,)
    ]
    q = RewardRegression(CATALOGUE)(logs)
    found = estimated(q, *((states[state], calls[name]) for state, name in means))
    assert found == pytest.approx(list(means.values()), abs=0.1)


def test_estimates_stay_between_the_least_and_the_largest_logged_reward() -> None:
    logs = [row("add 1", call("add"), 5.0), row("add 2", call("add"), 5.0), row("wait 1", call("add"), 2.0)]
    q = RewardRegression(CATALOGUE, encode)(logs)
    low, high = estimated(q, ("wait 5", call("add")), ("add 5", call("add")))
    assert 2.0 < low < 3.0
    assert 4.0 < high < 5.0


def test_a_larger_ridge_keeps_estimates_closer_to_each_other() -> None:
    logs = [row((1.0, 0.0), call("add"), 1.0), row((0.0, 1.0), call("add"), 0.0)]
    gaps = []
    for ridge in (0.01, 0.1, 1.0, 100.0):
        one, other = estimated(
            RewardRegression(CATALOGUE, ridge=ridge)(logs), ((1.0, 0.0), call("add")), ((0.0, 1.0), call("add"))
        )
        gaps.append(one - other)
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] > 0.8
    assert 0 < gaps[-1] < 0.02


def test_a_regression_with_one_weight_equals_hand_worked_values() -> None:
    """The weight w minimises 2 log(1 + exp(-w)) + ridge w^2 / 2, so 2 (1 - sigmoid(w)) = ridge w. With the default 0.03,
    w = 3.041. With 1, w = 0.6748."""
    logs = [row((1.0,), call("add"), 1.0), row((-1.0,), call("add"), 0.0)]
    for ridge, expected in (({}, 0.9544), ({"ridge": 1.0}, 0.6626)):
        found = estimated(RewardRegression(CATALOGUE, **ridge)(logs), ((1.0,), call("add")), ((-1.0,), call("add")))
        assert found == pytest.approx([expected, 1 - expected], abs=1e-3)


def test_long_vectors_are_fitted_as_well_as_short_ones() -> None:
    """Rewards of 1, 1, 0 at 30, and 1, 0, 0 at -30: the means 2/3 and 1/3, which a small weight gives almost unpunished."""
    logs = [
        *(row((30.0,), call("add"), reward) for reward in (1.0, 1.0, 0.0)),
        *(row((-30.0,), call("add"), reward) for reward in (1.0, 0.0, 0.0)),
    ]
    found = estimated(RewardRegression(CATALOGUE)(logs), ((30.0,), call("add")), ((-30.0,), call("add")))
    assert found == pytest.approx([2 / 3, 1 / 3], abs=1e-3)


def test_vectors_may_be_whole_numbers_or_arrays_in_double_precision() -> None:
    """The same decisions with the same weight w = 3.041: sigmoid(w) = .9544."""
    logs = [row([1], call("add"), 1.0), row([-1], call("add"), 0.0)]
    q = RewardRegression(CATALOGUE)(logs)
    found = estimated(q, ([1], call("add")), (np.array([1.0]), call("add")), (torch.tensor([-1]), call("add")))
    assert found == pytest.approx([0.9544, 0.9544, 1 - 0.9544], abs=1e-3)


def test_an_encoder_may_be_in_training_and_in_double_precision() -> None:
    """Neither the fit nor an estimate gives it a gradient."""
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    logs = [row("add 1", call("add"), 1.0), row("wait 1", call("add"), 0.0)]
    asked = ["add 2", "wait 2"], [call("add"), call("wait")]
    found = RewardRegression(CATALOGUE, lambda texts: weight * torch.tensor(encode(texts)).double())(logs)(*asked)
    assert not found.requires_grad
    assert weight.grad is None
    assert found.tolist() == pytest.approx(RewardRegression(CATALOGUE, encode)(logs)(*asked).tolist(), abs=1e-5)


def test_similarity_carries_over_to_a_tool_that_was_never_logged() -> None:
    """A request that is near to its tool earns 1. `wait` is in no decision, and only its description speaks for it."""
    requests = [f"{name} {number}" for name in ("add", "sort", "wait") for number in range(4)]
    logs = [row(text, call(tool), float(text.startswith(tool))) for text in requests for tool in ("add", "sort")]
    right, wrong = estimated(
        RewardRegression(CATALOGUE, encode)(logs), ("wait 9", call("wait")), ("add 9", call("wait"))
    )
    assert right > 0.8
    assert wrong < 0.2


def test_a_tool_that_the_catalogue_lacks_has_the_estimate_of_no_decision() -> None:
    logs = [row("add 1", call("fly"), 1.0), row("add 1", call("fly"), 0.0), row("add 1", call("fly"), 1.0)]
    assert estimated(RewardRegression(CATALOGUE, encode)(logs), ("sort 1", call("sing"))) == pytest.approx(
        [2 / 3], abs=1e-3
    )


def test_equal_rewards_are_their_own_estimate() -> None:
    assert estimated(
        RewardRegression(CATALOGUE, encode)([row("add 1", call("add"), 0.7)]), ("wait 1", call("wait"))
    ) == (pytest.approx([0.7]))


def test_texts_need_an_encoder_and_vectors_none() -> None:
    with pytest.raises(ConfigError, match="states must be texts if there is an encoder, and vectors if there is none"):
        RewardRegression(CATALOGUE)([row("add 1", call("add"), 0.7)])
    with pytest.raises(ConfigError, match=r"Pass encoder=policy\.encoder, or leave it out"):
        RewardRegression(CATALOGUE, encode)([row([1.0], call("add"), 0.7)])
    with pytest.raises(ConfigError, match="ridge must be above 0; got 0"):
        RewardRegression(CATALOGUE, encode, ridge=0)


def test_what_is_no_catalogue_and_no_logs_is_refused() -> None:
    with pytest.raises(ConfigError, match="catalogue must be a ToolCatalogue"):
        RewardRegression(list(CATALOGUE.values()))
    with pytest.raises(ConfigError, match="logs must be a list of ToolSample objects; got 'add 1'"):
        RewardRegression(CATALOGUE, encode)(["add 1"])
    with pytest.raises(ConfigError, match="needs logged decisions; got none"):
        RewardRegression(CATALOGUE, encode)([])


def test_logs_may_come_one_by_one() -> None:
    logs = [row("add 1", call("add"), 1.0), row("sort 1", call("add"), 0.0)]
    expected, found = RewardRegression(CATALOGUE, encode)(logs), RewardRegression(CATALOGUE, encode)(iter(logs))
    assert estimated(found, ("add 1", call("add"))) == estimated(expected, ("add 1", call("add")))


def test_a_ridge_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="ridge must be above 0; got nan"):
        RewardRegression(CATALOGUE, ridge=math.nan)


def test_the_penalty_is_the_least_that_own_and_shared_weights_with_these_sums_can_have() -> None:
    """The sum W = U + V E' leaves V free. Its best value solves a ridge regression: V = W E (1 + E' E)^-1."""
    tools = torch.tensor([[0.6, 0.8], [1.0, -0.5], [0.0, 2.0]])
    model = _Scores(4, tools, num_decisions=5)
    with torch.no_grad():
        for value in model.parameters():
            value.normal_(generator=torch.Generator().manual_seed(0))
    weights = model.scores(torch.eye(5), torch.zeros(5, 5, 4)).detach()
    of_tools = weights[:, :3]
    shared = of_tools @ tools @ torch.linalg.inv(torch.eye(2) + tools.T @ tools)
    own = of_tools - shared @ tools.T
    least = own.square().sum() + shared.square().sum() + weights[:, 3:].square().sum() + model.shared.square().sum()
    assert model.norm().item() == pytest.approx(least.item(), rel=1e-5)


def test_features_are_the_vector_a_constant_the_centred_cosines_and_the_evidence() -> None:
    """Tools (1, 0) and (0, 1) less their mean: (.707, -.707) and (-.707, .707). (4, 4) less the mean (1, 0): (.6, .8)."""
    tools = CATALOGUE.without("wait")
    vectors = dict(zip((tool.text for tool in tools.values()), ([1.0, 0.0], [0.0, 1.0]), strict=True))
    model = RewardRegression(tools, lambda texts: torch.tensor([vectors.get(text, [4.0, 4.0]) for text in texts]))
    given, shared = model._features(["2 up", "down down"], torch.tensor([1.0, 0.0]))
    assert given.tolist() == [pytest.approx([4.0, 4.0, 0.3])] * 2
    # add, sort, order=up, order=down, sure=False, sure=True, sure left out; "up" is too short to be looked for
    cosines = [-0.424264, 0.424264, 0, 0, 0, 0, 0]
    assert shared[0].T.tolist() == [pytest.approx(cosines, abs=1e-6), [0] * 7, [1, 0, 0, 0, 0, 0, 0], [0] * 7]
    assert shared[1].T.tolist() == [
        pytest.approx(cosines, abs=1e-6), [0, 1, 0, 0, 0, 0, 0], [0] * 7, [0, 0, 0, 1, 0, 0, 0]
    ]  # fmt: skip


def test_a_policy_over_vectors_has_no_shared_features() -> None:
    _, shared = RewardRegression(CATALOGUE)._features([[1.0, 2.0]], torch.zeros(2))
    assert not shared.any()


def test_a_score_holds_the_shared_features_by_their_weights() -> None:
    model = _Scores(1, torch.zeros(2, 0), num_decisions=2)
    with torch.no_grad():
        model.shared.copy_(torch.tensor([2.0, 1.0, -1.0, 0.5]))
    found = model.scores(torch.ones(1, 2), torch.tensor([[[0.1, 3.0, 2.0, 0.0], [0.0, 0.0, 0.0, 4.0]]]))
    assert found.tolist() == [pytest.approx([1.2, 2.0])]


def test_what_a_request_contains_carries_over_to_a_tool_that_was_never_logged() -> None:
    """The requests' vectors say nothing. Calls of a tool with a value of the request earn 1."""

    def tool(name: str, *values: str) -> Tool:
        schema = {"type": "object", "properties": {"it": {"enum": [*values]}}, "required": ["it"]}
        return Tool(name=name, description="Do it.", function=add, parameters=schema)

    tools = ToolCatalogue([tool("a", "iron", "gold"), tool("b", "silk", "wool"), tool("c", "oak", "pine")])
    logs = [
        row(value, call(name, it=it), float(value == it))
        for value in ("iron", "gold", "silk", "wool")
        for name, of in (("a", ("iron", "gold")), ("b", ("silk", "wool")))
        for it in of
    ] * 10
    q = RewardRegression(tools, lambda texts: torch.ones(len(texts), 1))(logs)
    right, other_value, other_tool = estimated(
        q, ("pine", call("c", it="pine")), ("pine", call("c", it="oak")), ("pine", call("a", it="iron"))
    )
    assert right > 0.5 > other_value > other_tool
