"""What a comparison prints and keeps: a table that fits a terminal, and JSON."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from grpo import ConfigError, WeightedRewards, compare_policies
from grpo.evaluation import ComparisonReport
from tests.support.comparisons import AFTER, BEFORE, action_itself, compared, measured, of_many, paying, scripted
from tests.support.policies import TablePolicy


def test_labels_come_from_the_states_cut_to_200_characters_or_from_label() -> None:
    states = ["a prompt", ("a", 1), "x" * 300, ("x" * 300,)]
    labels = measured(TablePolicy(states), states).labels
    assert (labels[:3], len(labels[3])) == (("a prompt", "('a', 1)", "x" * 300), 200)
    rows, policy = [{"prompt": "1+1="}, {"prompt": "2+2="}], TablePolicy(script=[[0], [1]])
    assert measured(policy, rows, num_actions_per_state=1, label=lambda row: row["prompt"]).labels == ("1+1=", "2+2=")


def test_the_json_of_a_report_is_complete_and_strict(tmp_path: Path) -> None:
    report = compared([[0, 0]], [[1, 0]], WeightedRewards({"part": action_itself}))
    assert report.improvement_percent is None
    assert report.confidence_interval is None
    path = tmp_path / "reports" / "report.json"
    text = report.to_json(path)
    assert (path.read_text(encoding="utf-8"), report.to_json()) == (text + "\n", text)
    assert text.startswith('{\n  "')  # a line for each field, for people and for diffs

    found = json.loads(text, parse_constant=pytest.fail)
    assert found["states"] == [{
        "label": "up", "before": 0.0, "after": 0.5, "difference": 0.5, "outcome": "improved",
        "answer_before": {"text": "0", "reward": 0.0}, "answer_after": {"text": "1", "reward": 1.0},
    }]  # fmt: skip
    assert found["improvement_percent"] is None
    assert found["components_after"] == {"part": 0.5}
    assert found["avg_at_k"] == {
        "k": 2, "before": 0.0, "before_interval": None, "after": 0.5, "after_interval": None, "difference": 0.5,
        "difference_interval": None,
    }  # fmt: skip
    assert [(at["k"], at["before"], at["after"]) for at in found["pass_at_k"]] == [(1, 0.0, 0.5), (2, 0.0, 1.0)]
    assert found == {**asdict(report), "states": found["states"], "pass_at_k": found["pass_at_k"]}
    interval = json.loads(compared(BEFORE, AFTER).to_json())["confidence_interval"]
    assert interval == pytest.approx([-0.5, 0.5])  # all three resampled alike: 1/27, more than 2.5 %


@pytest.mark.parametrize(
    "report", [compared(BEFORE, AFTER), compared([[0]], [[1]], WeightedRewards({"part": action_itself}))]
)
def test_a_report_is_read_back_from_its_json(report) -> None:
    assert ComparisonReport.from_json(report.to_json()) == report


WHOLE = json.loads(compared(BEFORE, AFTER).to_json())
STATE = WHOLE["states"][0]
WRONG: dict[str, list[Any]] = {
    "confidence_interval": [5, "x", [], {}, [0.1], [0.1, "x"], [0.1, 10**400]],
    "seed": [None, 0.5, True, []], "states": [5, None, {}], "components_before": [[], None, {"part": "x"}],
    "mean_reward_after": ["x", None, [], 10**400], "pass_reward": ["x", []], "pass_at_k": [5, None], "avg_at_k": [],
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("report.json", r"needs the JSON text that to_json wrote; got 'report.json'.* and not its path"),
        ("[]", "ComparisonReport needs mean_reward_before, .* got a list"),
        ('{"seed": 0}', "ComparisonReport needs .* got seed. Pass what to_json wrote"),
        (json.dumps({**WHOLE, "states": [{"label": "up"}]}), "StateComparison needs label, .* got label"),
        (json.dumps({**WHOLE, "states": [{**STATE, "answer_before": "0"}]}), "Answer needs text, reward; got a str"),
        (json.dumps({**WHOLE, "pass_at_k": [{"k": 1}]}), "AtK needs k, before, .* got k"),
        (
            json.dumps({**WHOLE, "states": [{**STATE, "answer_after": {"text": 5, "reward": 0.0}}]}),
            r"Answer\.text must be what to_json wrote; got int 5",
        ),
        *(
            (json.dumps({**WHOLE, name: value}), rf"ComparisonReport\.{name} must be what to_json wrote; got")
            for name, values in WRONG.items()
            for value in values
        ),
        *(
            (json.dumps({**WHOLE, "states": [{**STATE, name: value}]}), rf"StateComparison\.{name} must")
            for name, value in {"label": 5, "outcome": [], "before": None}.items()
        ),
        *(
            (json.dumps({**WHOLE, "avg_at_k": {**WHOLE["avg_at_k"], name: value}}), rf"AtK\.{name} must")
            for name, value in {"k": 0.5, "before": None, "after_interval": [0.1]}.items()
        ),
    ],
)
def test_text_that_is_no_report_is_refused(text, message) -> None:
    with pytest.raises(ConfigError, match=message):
        ComparisonReport.from_json(text)


def test_a_mean_before_that_is_not_positive_is_printed_without_a_percentage() -> None:
    first = str(compared([[0]], [[1]], paying(-2.0, 1.0))).splitlines()[0]
    assert first == "Mean reward: -2.0000 -> 1.0000, +3.0000 (no percentage: the mean before is not above 0)"


def test_the_printed_table_equals_the_expected_lines() -> None:
    report = compared(BEFORE, AFTER, WeightedRewards({"right": action_itself}))
    assert str(report).splitlines() == [
        "Mean reward: 0.5833 -> 0.5833, +0.0000 (+0 %)",
        "95 % confidence interval of the difference: -0.5000 to +0.5000",
        "avg@4: 0.2500 to 1.0000 before, 0.5000 to 0.7500 after",
        "3 states: 1 improved, 1 worse, 1 unchanged; 4 actions in each",
        "",
        "      before       after  difference  one of k actions earns at least 1",
        "      0.5833      0.5833     +0.0000  pass@1",
        "      0.7778      0.8889     +0.1111  pass@2",
        "      1.0000      1.0000     +0.0000  pass@4",
        "",
        "      before       after  difference  part of the reward",
        "      0.5833      0.5833     +0.0000  right",
        "",
        "      before       after  difference  state",
        "      0.2500      0.7500     +0.5000  up",
        "      0.5000      0.5000     +0.0000  same",
        "      1.0000      0.5000     -0.5000  down",
    ]


@pytest.mark.parametrize(("max_rows", "shown"), [
    (3, ["gains 5", "gains 4", "... 3 more", "gains 0"]), (2, ["gains 5", "... 4 more", "gains 0"]),
    (0, ["... 6 more"]), (6, [f"gains {k}" for k in (5, 4, 3, 2, 1, 0)]),
    (None, [f"gains {k}" for k in (5, 4, 3, 2, 1, 0)]),
])  # fmt: skip
def test_a_shortened_table_shows_the_largest_gains_and_losses(max_rows, shown) -> None:
    lines = of_many(6).table(max_rows=max_rows).splitlines()
    start = next(place for place, line in enumerate(lines) if line.endswith("difference  state"))
    assert [line[38:] for line in lines[start + 1 :]] == shown
    assert len(str(of_many(32)).splitlines()) == 4 + 2 + 21  # it is short by default


def test_no_label_can_widen_the_table_beyond_100_columns_or_break_a_line() -> None:
    states = ["long " * 100, "two\nlines\tand \x1b[31mred\x1b[0m \ud800", "x" * 62, "x" * 63]
    sides = [scripted([[k]] * 4, states) for k in (0, 1)]
    reward_model = WeightedRewards({"a name " * 30: lambda states, actions: [-1.23e30 * a for a in actions]})
    lines = str(compare_policies(*sides, states, reward_model, num_actions_per_state=1, progress=False)).splitlines()
    assert max(map(len, lines)) == 100
    assert "  -1.23e+30   -1.23e+30" in lines[6]
    assert lines[-3].endswith("  two lines and \\x1b[31mred\\x1b[0m \\ud800")
    assert lines[-2].endswith("x" * 62)
    assert lines[-1].endswith("x" * 59 + "...")
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0.0000"), (1e-4, "0.0001"), (99e-6, "9.90e-05"), (99_999, "99999.0000"), (-123_456, "-1.23e+05")],
)
def test_numbers_of_any_size_fit_their_column(value, shown):
    row = str(compared([[0]], [[1]], paying(value, value))).splitlines()[-1]
    assert row == f"{shown:>12}{shown:>12}{'+0.0000':>12}  up"
