"""The regression of rewards on requests and calls."""

import math
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from adapters.tools import Tool, ToolCall, ToolCatalogue, ToolSample
from adapters.tools.learning.reward_regression import RewardRegression, _Scores
from grpo.errors import ConfigError
from grpo.logs import LoggedRewards
from tests.support.tool_policies import call

HALF = (math.log(0.5),)
"""The log-prob of one of two tools."""


def add(number: float = 0.0) -> None: ...
def sort(order: Literal["up", "down"], sure: bool | None = None) -> None: ...
def wait() -> None: ...


CATALOGUE = ToolCatalogue(Tool.from_function(function, description="Do it.") for function in (add, sort, wait))
VECTORS = {"add": [1.0, 0, 0], "sort": [0, 1.0, 0], "wait": [0, 0, 1.0]}


def encode(texts: Any) -> Any:
    """Requests are named by the tool that they are near to."""
    return [next(v for name, v in VECTORS.items() if text.startswith(name)) for text in texts]


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
    assert CATALOGUE.decisions(None) == (), "no call has no decisions"
    assert CATALOGUE.decisions(call("sort", order="sideways", sure=1)) == (("sort",),)
    assert CATALOGUE.decisions(ToolCall(tool=["add"])) == ((None,),)  # type: ignore[arg-type]
    assert RewardRegression(CATALOGUE)._matrix(decisions).tolist() == [
        pytest.approx(values)
        for values in ([1] + [0] * 7, [0, 1, 0, 0, 0.3, 0, 0, 0.3], [0, 1, 0, 0.3, 0, 0, 0.3, 0], [0] * 8)
    ]


def test_with_many_decisions_the_estimate_is_the_mean_reward_of_each_call() -> None:
    """Two vectors, two tools and two values, each pair with its own mean between -1 and 3."""
    one, other = (1.0, 0.0), (0.0, 1.0)
    plus, up, down = call("add"), call("sort", order="up"), call("sort", order="down")
    pairs = [(one, plus), (one, up), (one, down), (other, plus), (other, up), (other, down)]
    means = [-1.0, 2.0, 0.0, 1.0, 0.5, 3.0]
    logs = [row(*pair, mean) for pair, mean in zip(pairs, means, strict=True) for _ in range(2000)]
    assert estimated(RewardRegression(CATALOGUE)(logs), *pairs) == pytest.approx(means, abs=0.1)


def test_estimates_stay_between_the_least_and_the_largest_logged_reward() -> None:
    logs = [row("add 1", call("add"), 5.0), row("add 2", call("add"), 5.0), row("wait 1", call("add"), 2.0)]
    q = RewardRegression(CATALOGUE, encode)(logs)
    low, high = estimated(q, ("wait 5", call("add")), ("add 5", call("add")))
    assert 2.0 < low < 3.0
    assert 4.0 < high < 5.0


def test_a_regression_with_one_weight_equals_hand_worked_values() -> None:
    """The weight w minimises 2 log(1 + exp(-w)) + ridge w^2 / 2, so 2 (1 - sigmoid(w)) = ridge w. With the default 0.03,
    w = 3.041. With 1, w = 0.6748. Vectors may be whole numbers, or arrays in double precision."""
    logs = [row((1.0,), call("add"), 1.0), row([-1], call("add"), 0.0)]
    asked = [(state, call("add")) for state in ((1.0,), (-1.0,), [1], np.array([1.0]), torch.tensor([-1]))]
    for ridge, high in (({}, 0.9544), ({"ridge": 1.0}, 0.6626)):
        expected = pytest.approx([high, 1 - high, high, high, 1 - high], abs=1e-3)
        q = RewardRegression(CATALOGUE, **ridge)(logs)
        assert [estimated(q, one)[0] for one in asked] == expected


def test_long_vectors_are_fitted_as_well_as_short_ones() -> None:
    """Rewards of 1, 1, 0 at 30, and 1, 0, 0 at -30: the means 2/3 and 1/3, which a small weight gives almost unpunished."""
    earned = ((30.0, 1.0), (30.0, 1.0), (30.0, 0.0), (-30.0, 1.0), (-30.0, 0.0), (-30.0, 0.0))
    q = RewardRegression(CATALOGUE)([row((vector,), call("add"), reward) for vector, reward in earned])
    assert estimated(q, ((30.0,), call("add")), ((-30.0,), call("add"))) == pytest.approx([2 / 3, 1 / 3], abs=1e-3)


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
    q = RewardRegression(CATALOGUE, encode)(iter(logs))  # logs may come one by one
    right, wrong = estimated(q, ("wait 9", call("wait")), ("add 9", call("wait")))
    assert right > 0.8
    assert wrong < 0.2


def test_a_tool_that_the_catalogue_lacks_has_the_estimate_of_no_decision() -> None:
    """Equal rewards are their own estimate."""
    for rewards, expected in (([1.0, 0.0, 1.0], 2 / 3), ([0.7], 0.7)):
        q = RewardRegression(CATALOGUE, encode)([row("add 1", call("fly"), reward) for reward in rewards])
        assert estimated(q, ("sort 1", call("sing"))) == pytest.approx([expected], abs=1e-3)


def test_wrong_settings_and_logs_are_refused(subtests: pytest.Subtests) -> None:
    text, vector = [row("add 1", call("add"), 0.7)], [row([1.0], call("add"), 0.7)]
    for arguments, ridge, logs, message in (
        ((CATALOGUE,), 1, text, "states must be texts if there is an encoder, and vectors if there is none"),
        ((CATALOGUE, encode), 1, vector, r"Pass encoder=policy\.encoder, or leave it out"),
        ((CATALOGUE, encode), 0, text, "ridge must be above 0; got 0"),
        ((CATALOGUE,), math.nan, vector, "ridge must be above 0; got nan"),
        ((list(CATALOGUE.values()),), 1, vector, "catalogue must be a ToolCatalogue"),
        ((CATALOGUE, encode), 1, ["add 1"], "logs must be a list of ToolSample objects; got 'add 1'"),
        ((CATALOGUE, encode), 1, [], "needs logged decisions; got none"),
    ):
        with subtests.test(message), pytest.raises(ConfigError, match=message):
            RewardRegression(*arguments, ridge=ridge)(logs)


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
    cosines = pytest.approx([-0.424264, 0.424264, 0, 0, 0, 0, 0], abs=1e-6)
    assert shared[0].T.tolist() == [cosines, [0] * 7, [1, 0, 0, 0, 0, 0, 0], [0] * 7]
    assert shared[1].T.tolist() == [cosines, [0, 1, 0, 0, 0, 0, 0], [0] * 7, [0, 0, 0, 1, 0, 0, 0]]
    _, of_vectors = RewardRegression(CATALOGUE)._features([[1.0, 2.0]], torch.zeros(2))
    assert not of_vectors.any(), "a policy over vectors has no shared features"


def test_a_score_holds_the_shared_features_by_their_weights() -> None:
    model = _Scores(1, torch.zeros(2, 0), num_decisions=2)
    with torch.no_grad():
        model.shared.copy_(torch.tensor([2.0, 1.0, -1.0, 0.5]))
    found = model.scores(torch.ones(1, 2), torch.tensor([[[0.1, 3.0, 2.0, 0.0], [0.0, 0.0, 0.0, 4.0]]]))
    assert found.tolist() == [pytest.approx([1.2, 2.0])]


def test_calls_are_compared_by_what_the_policy_decides() -> None:
    """The tool and the enumerated values; a call of an unknown tool counts in n. Of three decisions, each weighs 2 / 3."""
    made = (call("add", number=3.0), call("sort", order="up"), call("fly"))
    logs = [replace(row("x", one, reward), log_prob=HALF) for one, reward in zip(made, (1.0, 3.0, 9.0), strict=True)]
    rewards = LoggedRewards(logs, action_key=CATALOGUE.decisions)
    calls = [call("add", number=4.0), call("sort", order="up"), call("sort", order="down")]
    assert rewards.compute_rewards(["x"] * 3, calls).tolist() == pytest.approx([2 / 3, 2.0, 0.0])
