"""Samples and settings as tables."""

import re

from adapters.tracking.report.run_data import SampleTable, Start
from adapters.tracking.report.tables import sample_tables, settings_section
from grpo import GRPOConfig
from tests.support.run_folders import run_of, sample, settings


def cells(page: str, tag: str = "td") -> list[str]:
    """The texts of the cells, in order."""
    return [
        re.sub("<[^>]*>", "", cell)
        for cell in re.findall(f"<{tag}[ >].*?</{tag}>", page.replace("<td>", "<td >"), re.S)
    ]


def tables(*found: SampleTable) -> str:
    page = sample_tables(run_of({"a": 1.0}, tables=found))
    assert page is not None
    return page


def test_a_sample_table_has_the_columns_that_were_measured() -> None:
    rows = [
        sample(**{"reward/right": 1.0, "reward/short": None, "advantage": None}),
        sample(**{"reward/right": None, "reward/short": None, "advantage": None, "action": ""}),
    ]
    page = tables(SampleTable(iteration=1200, kind="eval", rows=rows))
    assert re.findall("<th [^>]*>(.*?)</th>", page) == ["state", "action", "reward", "steps", "reward/right"]
    assert cells(page) == ["2 + 2?", "4", "1", "1", "1", "2 + 2?", "(empty)", "1", "1", "-"]
    assert "<summary>Evaluation after iteration 1,200</summary>" in page


def test_no_completion_can_become_part_of_the_page() -> None:
    attack = "</div><script>alert(1)</script><img src=x onerror=alert(1)>&lt;b&gt;\x00"
    page = tables(
        SampleTable(iteration=1, kind="train", rows=[sample(state=attack, action=attack, **{"reward/<i>": 1.0})])
    )
    assert not re.search("<(script|img|i)[ >]", page)
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;") == 2
    assert "&amp;lt;b&amp;gt;\\x00" in page
    assert "reward/&lt;i&gt;" in page


def test_both_ends_of_the_run_are_open_and_other_tables_are_folded() -> None:
    found = [SampleTable(iteration=k, kind=kind, rows=[sample()]) for kind in ("eval", "train") for k in (1, 5, 9)]
    page = tables(*found)
    assert re.findall("<details( open)?><summary>(.*?)</summary>", page) == [
        (" open", "Evaluation after iteration 1"),
        ("", "Evaluation after iteration 5"),
        (" open", "Evaluation after iteration 9"),
        ("", "Training, iteration 1"),
        ("", "Training, iteration 5"),
        ("", "Training, iteration 9"),
    ]
    assert sample_tables(run_of({"a": 1.0})) is None


def test_settings_that_differ_from_the_defaults_come_first() -> None:
    given = settings(learning_rate=0.5, group_size=4)
    page = settings_section([Start(iteration=1, settings=given)])
    first, rest = page.split("<details>", 1)
    assert cells(first) == ["group_size", "4", "8", "learning_rate", "0.5", "0.001"]
    assert "group_size" not in rest
    assert "objective.kl_estimator" in cells(rest)
    assert {"policy", "TablePolicy", "versions.torch", "2.13.0", "num_iterations"} <= set(cells(rest))
    assert "All settings have their defaults." in settings_section([Start(iteration=1, settings=settings())])


def test_every_setting_of_a_config_is_on_the_page() -> None:
    page = settings_section([Start(iteration=1, settings=settings(seed=3))])
    assert {"seed", "advantage.scale", "objective.surrogate.high", "reward.timeout"} <= set(cells(page))
    assert len(GRPOConfig().to_dict()) > 20


def test_what_a_resume_changed_is_said() -> None:
    starts = [
        Start(iteration=1, settings=settings(100, learning_rate=0.5)),
        Start(iteration=51, settings=settings(200, learning_rate=0.1)),
        Start(iteration=81, settings=settings(200, learning_rate=0.1)),
    ]
    lines = re.findall("<li>(.*?)</li>", settings_section(starts))
    assert lines == [
        "Continued at iteration 51: config.learning_rate: 0.5 → 0.1; num_iterations: 100 → 200",
        "Continued at iteration 81: with the same settings",
    ]


def test_a_folder_without_settings_says_so() -> None:
    assert "no settings.json" in settings_section([])
