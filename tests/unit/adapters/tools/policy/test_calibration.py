"""Calibration: added tools against known ones, and the threshold below which no tool is called."""

from typing import Any

import pytest
import torch

from adapters.tools import Tool, ToolTask
from adapters.tools.policy.distribution import offset_of_added
from adapters.tools.policy.threshold import best_threshold, confirmed_threshold
from grpo.errors import ConfigError, GRPOWarning
from tests.support.tool_policies import CATALOGUE, TEXTS, policy, pong


def sing(loud: bool) -> str:
    """Sing a song."""
    return str(loud)


ADDED = [Tool.from_function(pong), Tool.from_function(sing)]


def test_the_offset_equals_a_hand_worked_quantile() -> None:
    """Best known minus best added logit: 5 - 1, 3 - 2, 2 - 4, 6 - 0."""
    logits = torch.tensor([[5.0, 0.0, 1.0, -1.0], [3.0, 1.0, 0.0, 2.0], [1.0, 2.0, 4.0, 0.0], [6.0, 5.0, 0.0, -2.0]])
    is_added = torch.tensor([False, False, True, True])
    gaps = torch.tensor([4.0, 1.0, -2.0, 6.0])
    for share in (0.0, 1 / 3, 2 / 3, 1.0):
        assert offset_of_added(logits, is_added, share) == pytest.approx(float(gaps.quantile(share)))
    assert offset_of_added(logits, is_added, 0.5) == pytest.approx(2.5)


def test_the_threshold_has_the_highest_balanced_accuracy(subtests: pytest.Subtests) -> None:
    for wanted, unwanted, threshold in (
        ([0.9, 0.8, 0.7], [0.1, 0.3], 0.5),  # halfway between 0.3 and 0.7
        ([0.9, 0.4, 0.8], [0.5, 0.1, 0.2], 0.3),  # 1 + 2/3 = 5/3; 2/3 + 1 at 0.65 is equal, and higher
        ([0.2], [0.2], 0.2),  # nothing separates them
        ([0.1], [0.9], 0.1),  # the wrong way round: keep every tool
        ([0.1, 0.6], [0.3, 0.9], 0.1),  # 1 + 0; 1/2 + 1/2 at 0.45 is equal, and higher
        ([0.3, 0.5], [0.1], 0.2),  # 1 + 1; at 0.1 the unwanted confidence of 0.1 would suffice
    ):
        with subtests.test(str(wanted)):
            assert best_threshold(torch.tensor(wanted), torch.tensor(unwanted)) == pytest.approx(threshold)
    # Next to 0.5 is 0.5 + 2^-24. Halfway is 0.5 + 2^-25, which single precision rounds to 0.5.
    assert best_threshold(torch.tensor([0.5 + 2**-24]), torch.tensor([0.5])) == 0.5 + 2**-25


def calibrated(share: float, states: Any) -> Any:
    made = policy(scale=2.0)
    made.add_tools(*ADDED)
    made.calibrate(states, share=share)
    return made


STATES = [f"{text} {word}" for text in TEXTS for word in ("please", "now", "today", "again", "in red", "at once")]


def test_the_given_share_of_known_requests_goes_to_added_tools() -> None:
    for share in (0.0, 0.25, 0.5, 1.0):
        made = calibrated(share, STATES)
        going = sum(call.tool in ("pong", "sing") for call in made.predict(STATES)) / len(STATES)
        assert going == pytest.approx(share, abs=1.5 / len(STATES))


def shares(probabilities: torch.Tensor) -> torch.Tensor:
    return probabilities / probabilities.sum(1, keepdim=True)


def test_calibration_keeps_the_order_among_known_and_among_added_tools() -> None:
    made = policy(scale=2.0)
    made.add_tools(*ADDED)
    before = made.tool_probabilities(STATES)
    made.calibrate(STATES, share=0.3)
    after = made.tool_probabilities(STATES)
    for part in (slice(0, 4), slice(4, 6)):
        torch.testing.assert_close(shares(after[:, part]), shares(before[:, part]))
    ratio = (after[:, 4:].sum(1) / after[:, :4].sum(1)) / (before[:, 4:].sum(1) / before[:, :4].sum(1))
    torch.testing.assert_close(ratio, ratio[:1].expand(len(ratio)), rtol=1e-3, atol=0)
    made.calibrate(STATES, share=0.3)
    torch.testing.assert_close(made.tool_probabilities(STATES), after)


def test_other_changes_of_the_catalogue_keep_the_calibration() -> None:
    made = calibrated(0.3, STATES)
    before = made.tool_probabilities(STATES)
    made.add_tools(Tool.from_function(pong, name="table_tennis", description="Play."))
    made.remove_tools("table_tennis")
    assert torch.equal(made.tool_probabilities(STATES), before)
    assert set(made.menu.offset_of) == {"pong", "sing"}
    made.remove_tools("pong")
    torch.testing.assert_close(made.tool_probabilities(STATES), shares(before[:, [0, 1, 2, 3, 5]]))


def test_what_cannot_be_calibrated_is_refused(subtests: pytest.Subtests) -> None:
    known, added, both = policy(CATALOGUE), policy(CATALOGUE.without(*list(CATALOGUE)[1:])), policy(CATALOGUE)
    both.add_tools(ADDED[0])
    added.add_tools(ADDED[0])
    added.remove_tools("ping")
    for made, states, share, message in (
        (both, [], 0.1, "got 0 states"), (both, STATES, 1.1, "share=1.1"), (both, STATES, -0.1, "share=-0.1"),
        (known, STATES, 0.1, "0 added and 4 other tools"), (added, STATES, 0.1, "1 added and 0 other tools"),
    ):  # fmt: skip
        with subtests.test(message), pytest.raises(ConfigError, match=rf"calibrate needs states.*{message}"):
            made.calibrate(states, share=share)


def test_the_policys_threshold_separates_requests_of_both_kinds() -> None:
    made = policy(scale=2.0)
    confidences = torch.tensor([row[0].confidence for row in made.predict_top(STATES, 1)])
    order = confidences.argsort().tolist()
    unclear, clear = [STATES[place] for place in order[:10]], [STATES[place] for place in order[10:]]
    threshold = made.calibrate_threshold(clear, unclear)
    assert threshold == made.threshold
    assert made.predict(unclear) == [None] * 10
    assert None not in made.predict(clear)
    for states, no_tool_states in (([], unclear), (clear, [])):
        with pytest.raises(ConfigError, match="needs requests of both kinds"):
            made.calibrate_threshold(states, no_tool_states)


def test_what_changes_confidences_says_that_the_threshold_was_chosen_before(subtests: pytest.Subtests) -> None:
    for what, change in (
        ("add_tools", lambda made: made.add_tools(ADDED[1])),
        ("remove_tools", lambda made: made.remove_tools("ping")),
        ("calibrate", lambda made: made.calibrate(STATES)),
        ("fit", lambda made: made.fit([ToolTask(text="a", tool=name) for name in made.catalogue], num_folds=1)),
    ):
        with subtests.test(what):
            made = policy()
            made.add_tools(ADDED[0])  # without a threshold, nothing is said
            made.threshold = 0.5
            message = rf"{what} changes the confidences, and threshold=0\.5 was chosen before"
            with pytest.warns(GRPOWarning, match=message):
                change(made)
            assert made.threshold == 0.5


FEW = [
    # wanted, unwanted, present, threshold, gain +- error, number that is needed
    # Left out one by one, all six are on the right side of a threshold between .3 and .7: 3 of 3, counted as 4/5, twice.
    # gain = 1 - 1/2, error = sqrt(2 (4/5) (1/5) / 3) / 2 = 0.163
    ([0.9, 0.8, 0.7], [0.1, 0.2, 0.3], 0.0, 0.5, None, None),
    # Two of each are separated by chance in one case of six.
    ([0.9, 0.8], [0.1, 0.2], 0.0, 0.0, None, 150),
    # The present threshold is as good as the best one: gain 0.
    ([0.9, 0.8, 0.7], [0.1, 0.2, 0.3], 0.5, 0.5, "+0.000 +- 0.163", 128),
]


def test_a_threshold_stays_if_the_requests_do_not_tell(subtests: pytest.Subtests) -> None:
    """(2 error / 0.05)^2 times 3 requests are needed for error = 0.1633: 128. With 2 of each, nothing is left out:
    p = q = 1/4, error = sqrt(2 (1/4) (3/4) / 2) / 2 = 0.2165, and 2 (2 error / 0.05)^2 = 150."""
    for wanted, unwanted, present, expected, measured, needed in FEW:
        with subtests.test(wanted=wanted, present=present):
            arguments = torch.tensor(wanted), torch.tensor(unwanted), present
            if needed is None:
                assert confirmed_threshold(*arguments) == pytest.approx(expected)
                continue
            with pytest.warns(GRPOWarning, match=rf"threshold={present:g} stays") as warned:
                assert confirmed_threshold(*arguments) == expected
            text = str(warned[0].message)
            assert measured is None or f"changes by {measured}" in text
            assert f"About {needed} of each kind would tell" in text
    made = policy()
    with pytest.warns(GRPOWarning, match=r"calibrate_threshold: threshold=0 stays. 2 requests .* 2 without"):
        assert made.calibrate_threshold(STATES[:2], STATES[2:4]) == 0.0
    assert None not in made.predict(STATES)
