"""Every setting of `AdvantageConfig`, through the estimator that a trainer calls."""

import json
import math
from typing import get_args

import pytest
import torch
from torch import Tensor

from grpo import AdvantageConfig, AdvantageEstimator, ConfigError, ExperienceBatch
from grpo._advantages.groups import Credit
from tests.support.objective_inputs import double

NAN = math.nan


def batch_of(rewards: Tensor, group_ids: list[int], mask: Tensor | None = None, **others) -> ExperienceBatch:
    shape = rewards.shape if rewards.dim() == 2 else (len(rewards), 1)
    mask = torch.ones(shape, dtype=torch.bool) if mask is None else mask
    rows = list(range(len(rewards)))
    group_ids = torch.tensor(group_ids)
    return ExperienceBatch(states=rows, actions=rows, group_ids=group_ids, rewards=rewards, mask=mask, **others)


def estimate(batch: ExperienceBatch, **settings):
    return AdvantageEstimator(AdvantageConfig(**settings)).estimate(batch)


def advantages(batch: ExperienceBatch, **settings) -> Tensor:
    return AdvantageEstimator(AdvantageConfig(**settings))(batch)


# Credit. Two rows of one group: steps 1 2 4 and 3 5 (ended). gamma 1/2.
#   row           1 + 1 + 1 = 3;  3 + 2.5 = 5.5: mean 4.25
#   return_to_go  3 4 4 | 5.5 5: means 4.25, 4.5, alone
#   process       mean 15/5 = 3: -2 -1 1 | 0 2; to go: -2 - .5 + .25 = -2.25, -.5, 1 | 1, 2
#   gae           V 2 1 3 | 1 1: delta 4 - 3 = 1, 2 + 1.5 - 1 = 2.5, 1 + .5 - 2 = -.5 | 5 - 1 = 4, 3 + .5 - 1 = 2.5
#                 lambda 1/2: 1, 2.5 + .25, -.5 + .25 * 2.75 | 4, 2.5 + 1
#   gigpo         sums 7, 8: -.5 .5; keys 1 1 2 | 2 1: key 1: 3 4 5: mean 4: -1 0 1; key 2: 4, 5.5: -.75, .75; weight 2
STEPS = double([[1, 2, 4], [3, 5, NAN]])
MASK = torch.tensor([[True, True, True], [True, True, False]])
WITH_EVERYTHING = batch_of(
    STEPS, [4, 4], MASK, values=double([[2, 1, 3], [1, 1, NAN]]), state_keys=torch.tensor([[1, 1, 2], [2, 1, 1]])
)
CREDITS = {
    "row": [-1.25, 1.25],
    "return_to_go": [[-1.25, -0.5, 0.0], [1.25, 0.5, 0.0]],
    "process_supervision": [[-2.25, -0.5, 1.0], [1.0, 2.0, 0.0]],
    "gae": [[0.1875, 2.75, 1.0], [3.5, 4.0, 0.0]],
    "gigpo": [[-2.5, -0.5, -2.0], [2.0, 2.5, 0.0]],
}


HALVES = {"gamma": 0.5, "gae_lambda": 0.5}


@pytest.mark.parametrize("credit", [None, *get_args(Credit)])
def test_advantages_under_every_credit_equal_hand_worked_values(credit):
    assert {credit} <= {None, *CREDITS}, "work the credit out by hand in CREDITS"
    found = estimate(WITH_EVERYTHING, credit=credit, gigpo_weight=2.0, **HALVES)
    assert found.advantages.tolist() == CREDITS[credit or "return_to_go"]
    if credit == "gae":  # a critic is trained towards advantage plus value
        assert found.returns.tolist() == [[2.1875, 3.75, 4.0], [4.5, 5.0, 0.0]]
        assert found.returns.dtype == torch.float64
    else:
        assert found.returns is None


@pytest.mark.parametrize("scale", ["batch", "whiten"])
def test_scaling_advantages_does_not_change_the_critics_target(scale):
    plain, scaled = (estimate(WITH_EVERYTHING, credit="gae", scale=choice, **HALVES) for choice in ("none", scale))
    assert torch.equal(plain.returns, scaled.returns)
    # over the five valid steps: .1875 2.75 1 3.5 4
    valid = plain.advantages[MASK]
    shift = valid.mean() if scale == "whiten" else 0.0
    torch.testing.assert_close(scaled.advantages[MASK], (valid - shift) / valid.std(), rtol=1e-13, atol=0)
    assert scaled.advantages[~MASK].tolist() == [0]


def test_gae_places_the_reward_of_a_row_on_its_last_step():
    # reward 5 on the second step: delta 5 + .5 * 8 - 1 = 8, 0 + .5 - 2 = -1.5;  A: 8, -1.5 + .25 * 8
    values = {"values": double([[2, 1, NAN]]), "final_values": double([8])}
    found = estimate(batch_of(double([5]), [0], torch.tensor([[True, True, False]]), **values), credit="gae", **HALVES)
    assert found.advantages.tolist() == [[0.5, 8.0, 0.0]]
    assert found.returns.tolist() == [[2.5, 9.0, 0.0]]


@pytest.mark.parametrize(
    ("dtype", "found"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
def test_the_critics_precision_is_kept_and_half_precision_becomes_float32(dtype, found):
    result = estimate(batch_of(double([5]), [0], values=torch.tensor([[2.0]], dtype=dtype)), credit="gae")
    assert result.advantages.dtype == result.returns.dtype == found
    assert (result.advantages.item(), result.returns.item()) == (3.0, 5.0)


# Groups: 1 3 | 5 5 | 2 2 -> -1 1 | 0 0 | 0 0
SOME_DEAD = batch_of(double([1, 3, 5, 5, 2, 2]), [0, 0, 1, 1, 2, 2])
THREE = batch_of(double([0, 2, 4]), [0, 0, 0])
PAIRS = batch_of(double([1, 4, 2]), [0, 0, 0])
DEAD = batch_of(double([5, 5, 2, 2]), [0, 0, 1, 1])
UP = {"upweight_live_groups": True}
FAR = batch_of(double([-100, 0, 100]), [0, 0, 0])
UNEVEN = batch_of(double([1, 4]), [0, 0], torch.tensor([[True, True, True], [False, True, False]]))
TWO_STEPS = batch_of(
    double([4, 2]), [0, 0], torch.ones(2, 2, dtype=torch.bool), state_keys=torch.tensor([[0, 1], [0, 1]])
)


@pytest.mark.parametrize(("batch", "settings", "expected"), [
    # returns to go of 4 and 2 at the end, gamma 1/2: 2 4 | 1 2; rows: 1 -1; column keys: .5 -.5, 1 -1
    (TWO_STEPS, {"credit": "gigpo", "gamma": 0.5}, [[1.5, 2.0], [-1.5, -2.0]]),
    (UNEVEN, {"baseline": "length_weighted"}, [-0.75, 2.25]),  # lengths 3 and 1, rewards 1 and 4: b = 7/4
    # k = 2, pairs of 1, 4, 2: {1, 4}: 4 adds 3; {1, 2}: 2 adds 1; {4, 2}: 4 adds 2; times n / C(3, 2) = 1
    (PAIRS, {"baseline": "max_at_k", "k": 2}, [0, 5, 1]),
    (PAIRS, {"baseline": "max_at_k", "k": 3}, [0, 6, 0]),  # of 3, only the best adds, 4 - 2, times 3
    (SOME_DEAD, UP, [-3, 3, 0, 0, 0, 0]),  # six rows, two of them alive: times 3
    (batch_of(double([1, 3, 0, 2]), [0, 0, 1, 1]), UP, [-1, 1, -1, 1]),  # all are alive
    # groups of one row, with their rewards as advantages: one of four is not 0, times 4
    (batch_of(double([0, 3, 0, 0]), [0, 1, 2, 3]), {**UP, "baseline": "none"}, [0, 12, 0, 0]),
    (DEAD, UP, [0, 0, 0, 0]),
    (DEAD, {**UP, "baseline": "none"}, [5, 5, 2, 2]),  # nothing to make up for
    # to go 1 0 | 1 1: column 0 is constant, column 1: -.5 .5; the group of rows 2 and 3 is dead at every step: times 2
    (batch_of(double([[1, 0], [0, 1], [2, 2], [2, 2]]), [0, 0, 1, 1]), UP, [[0, -1], [0, 1], [0, 0], [0, 0]]),
    # 11 and 12 are 10 and 10: two of four rows are alive, times 2
    (batch_of(double([11, 12, 1, 3]), [0, 0, 1, 1]), {**UP, "reward_clip": 10.0}, [0, 0, -2, 2]),
    (SOME_DEAD, {**UP, "clip": 2.0}, [-2, 2, 0, 0, 0, 0]),  # 3, then bounded
    (THREE, {"negative_only": True}, [-2, 0, 0]),
    (THREE, {"negative_only": True, "positive_weight": 0.0}, [-2, 0, 0]),
    (THREE, {"positive_weight": 0.0}, [-2, 0, 0]),
    (THREE, {"positive_weight": 0.25}, [-2, 0, 0.5]),
    (THREE, {"positive_weight": 3.0}, [-2, 0, 6]),
    (THREE, {"clip": 1.5}, [-1.5, 0, 1.5]),
    (THREE, {"clip": 1.5, "positive_weight": 0.5}, [-1.5, 0, 1]),  # weighed, then bounded
    (THREE, {"clip": 2.5, "positive_weight": 3.0}, [-2, 0, 2.5]),
    (WITH_EVERYTHING, {"gamma": 0.5, "negative_only": True, "clip": 1.0}, [[-1, -0.5, 0], [0, 0, 0]]),  # per step
    (FAR, {"reward_clip": 3.0}, [-3, 0, 3]),
    # clipped first: -3 0 3: variance with n 6
    (FAR, {"reward_clip": 3.0, "normalize_rewards": True}, [-3 / math.sqrt(6), 0, 3 / math.sqrt(6)]),
    (batch_of(double([5]), [0]), {"normalize_rewards": True, "baseline": "none"}, [5]),  # a single reward has no deviation
    # sums 7 and 8 (the padding is not read): std .5, so every step counts double
    (WITH_EVERYTHING, {"gamma": 0.5, "normalize_rewards": True}, [[-2.5, -1.0, 0.0], [2.5, 1.0, 0.0]]),
    # each step's, not the row's: 3 + 3 and 1 + 1 -> 6, 2
    (batch_of(double([[9, 5], [1, 1]]), [0, 0]), {"reward_clip": 3.0, "credit": "row"}, [2, -2]),
])  # fmt: skip
def test_settings_change_advantages_as_worked_by_hand(batch, settings, expected):
    before = batch.rewards.clone()
    torch.testing.assert_close(advantages(batch, **settings), double(expected), rtol=1e-14, atol=0)
    torch.testing.assert_close(batch.rewards, before, rtol=0, atol=0, equal_nan=True)


def test_rewards_are_divided_by_the_deviation_of_all_seen_so_far():
    estimator = AdvantageEstimator(AdvantageConfig(normalize_rewards=True))
    # 1, 3: std with n 1;   1 3 5 7: mean 4, (9 + 1 + 1 + 9)/4 = 5
    assert estimator(batch_of(double([1, 3]), [0, 0])).tolist() == [-1, 1]
    found = estimator(batch_of(double([5, 7]), [0, 0])).tolist()
    assert found == pytest.approx([-1 / math.sqrt(5), 1 / math.sqrt(5)], rel=1e-14)


def test_running_statistics_survive_a_save():
    config = AdvantageConfig(normalize_rewards=True, baseline="global_mean")
    first, second = AdvantageEstimator(config), AdvantageEstimator(config)
    first(batch_of(double([1, 3, 8]), [0, 0, 0]))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for numbers in ([9, 2], [4, 4]):
        batch = batch_of(double(numbers), [0, 0])
        assert torch.equal(first(batch), second(batch))
    fresh = AdvantageEstimator(config)
    assert not torch.equal(fresh(batch_of(double([9, 2]), [0, 0])), first(batch_of(double([9, 2]), [0, 0])))


def of_two_rewards(**others) -> ExperienceBatch:
    parts = {"right": double([0, 1, 1, 1]), "brief": double([5, 1, 2, 9])}
    return batch_of(double([10, 3, 5, 19]), [0, 0, 1, 1], reward_components=parts, **others)


def test_normalize_each_equals_hand_worked_advantages():
    # Standardised with n - 1, the two values of a pair are -h and h, h = 1/sqrt 2, whatever their distance.
    #   right: 0 1 | 1 1 -> -h h | 0 0.   brief: 5 1 | 2 9 -> h -h | -h h, with weight 2: 2h -2h | -2h 2h
    # sum h -h | -2h 2h: mean 0, squares h^2 (1 + 1 + 4 + 4) = 5, over 3; without weights 0 0 | -h h: squares 1 over 3
    h = math.sqrt(0.5)
    weighed = advantages(of_two_rewards(reward_weights={"brief": 2.0}), several_rewards="normalize_each")
    assert weighed.tolist() == pytest.approx([x * h / math.sqrt(5 / 3) for x in (1, -1, -2, 2)], rel=1e-13)
    plain = advantages(of_two_rewards(), several_rewards="normalize_each")
    assert plain.tolist() == pytest.approx([0, 0, -h * math.sqrt(3), h * math.sqrt(3)], rel=1e-13, abs=1e-15)


def test_normalize_each_uses_ddof_and_eps():
    # ddof 0: pairs are -1 and 1 over (1/2 d + eps) / (d / 2), d their distance
    found = advantages(
        of_two_rewards(reward_weights={"right": 0.0}), several_rewards="normalize_each", std_ddof=0, std_eps=1.0
    )
    # brief: 2/(2 + 1), -2/3 | -3.5/4.5, 3.5/4.5; squares sum to 2 (4/9) + 2 (49/81) = 170/81, over 4
    std = math.sqrt(170 / 81 / 4) + 1
    assert found.tolist() == pytest.approx([x / std for x in (2 / 3, -2 / 3, -7 / 9, 7 / 9)], rel=1e-13)


ROWS, STEPWISE = double([1, 2]), double([[1, 2], [3, 4]])
PER_STEP = r"advantage\.credit='{}' needs rewards per step, \[N, T\]"
BY_NAME = r"several_rewards='normalize_each' needs several rewards by name"
EACH = {"several_rewards": "normalize_each"}


@pytest.mark.parametrize(("rewards", "parts", "settings", "message"), [
    (ROWS, {}, {"credit": "return_to_go"}, PER_STEP.format("return_to_go")),
    (ROWS, {}, {"credit": "process_supervision"}, PER_STEP.format("process_supervision")),
    (ROWS, {}, {"credit": "gae"}, r"advantage\.credit='gae' needs a critic's values.*ActionScores\.values"),
    (ROWS, {}, {"credit": "gigpo"}, r"advantage\.credit='gigpo' needs the state each step was taken in"),
    (ROWS, {}, EACH, BY_NAME),
    (ROWS, {"steps": STEPWISE}, EACH, BY_NAME),
    (STEPWISE, {"steps": STEPWISE}, EACH, rf"{BY_NAME}, one number per row each"),
])  # fmt: skip
def test_what_a_setting_needs_and_a_batch_lacks_is_named(rewards, parts, settings, message):
    with pytest.raises(ConfigError, match=message):
        advantages(batch_of(rewards, [0, 0], reward_components=parts), **settings)


@pytest.mark.parametrize("credit", [None, "process_supervision", "gigpo"])
@pytest.mark.parametrize("settings", [{"baseline": "max_at_k", "k": 2}, {"baseline": "length_weighted"}])
def test_baselines_of_rows_are_refused_for_steps_by_the_name_of_the_setting(credit, settings):
    """Not with "needs k=..." where k is set, nor with a `lengths` that no setting has."""
    with pytest.raises(ConfigError, match="credit"):
        advantages(WITH_EVERYTHING, credit=credit, **settings)
