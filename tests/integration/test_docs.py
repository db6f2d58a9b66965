"""What docs/ and grpo/README.md say exists: settings, their choices, metrics, headings.

`test_readme.py` runs the code on each page, and compares what it prints.
"""

import ast
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch

from adapters.bandits import SoftmaxPolicy
from adapters.control import PRESETS
from adapters.llm import SamplingConfig
from grpo import (
    ActionScores,
    AdvantageConfig,
    EntropyControl,
    GRPOConfig,
    GRPOTrainer,
    KLControl,
    ObjectiveConfig,
    RewardConfig,
    WeightedRewards,
    presets,
)
from grpo.config import CORRECTIONS
from grpo.evaluation.advice import RULES
from grpo.surrogates import SURROGATES
from tests.support.policies import TablePolicy

DOCS = Path(__file__).resolve().parents[2] / "docs"
CORE = DOCS.parent / "grpo" / "README.md"
PAGES = [CORE, *sorted(DOCS.glob("*.md"))]
COMING_FROM, DEBUGGING, CONTROL, LLM, TOOLS = (
    DOCS / f"{name}.md" for name in ("coming_from", "debugging", "control", "llm", "tools")
)
DOCUMENTED = ("docs", "grpo", "adapters", "benchmarks")
"""Folders with documents."""

SECTIONS: dict[str, type] = {
    "objective": ObjectiveConfig,
    "advantage": AdvantageConfig,
    "reward": RewardConfig,
    "config": GRPOConfig,
    "sampling": SamplingConfig,
}
NAMED = {"surrogate": SURROGATES, "sampler_correction": CORRECTIONS}
"""Fields that take an object or its name."""

SETTING = re.compile(r"(?<![\w.-])(objective|advantage|reward|config|sampling)\.(?!py\b)([a-z]\w*)(?:=\"(\w+)\")?")
OBJECTS = {kind.__name__: kind for kind in (*SURROGATES.values(), *CORRECTIONS.values(), EntropyControl, KLControl)}
OBJECT = re.compile(rf"(?<![\w.])(?<!class )({'|'.join(OBJECTS)})(?:\(([^()\n]*)\)|\.([a-z]\w*))")
METRIC = re.compile(r"(?<![\w/])((?:train|rewards|group_stats|rows|steps|time|eval)/[a-z0-9_]+)(?![\w/{])")


def test_the_pages_contain_enough_settings_and_metrics_to_check() -> None:
    assert {COMING_FROM, DEBUGGING, CONTROL, LLM, TOOLS} <= set(PAGES)
    assert len(SETTING.findall(COMING_FROM.read_text(encoding="utf-8"))) > 100
    assert len(set(METRIC.findall(DEBUGGING.read_text(encoding="utf-8")))) > 25
    assert len(OBJECT.findall(CORE.read_text(encoding="utf-8"))) > 20
    assert len(OBJECT.findall(COMING_FROM.read_text(encoding="utf-8"))) > 40


def test_every_documented_setting_is_a_field_and_every_choice_is_allowed(subtests: pytest.Subtests) -> None:
    for page in PAGES:
        with subtests.test(page=page.name):
            for section, name, choice in SETTING.findall(page.read_text(encoding="utf-8")):
                kind = SECTIONS[section]
                assert name in {field.name for field in fields(kind)}, f"{page.name}: {section}.{name}"
                if choice:
                    known = NAMED.get(name) or choices(get_type_hints(kind)[name])
                    assert choice in known, f'{page.name}: {section}.{name}="{choice}"'


def test_every_documented_surrogate_and_correction_accepts_its_documented_settings(subtests: pytest.Subtests) -> None:
    """Values that are written out are allowed; `...` stands for any."""
    for page in PAGES:
        with subtests.test(page=page.name):
            for name, arguments, field in OBJECT.findall(page.read_text(encoding="utf-8")):
                settings = {field: "..."} if field else dict(part.split("=") for part in arguments.split(", ") if part)
                unknown = set(settings) - {field.name for field in fields(OBJECTS[name])}
                assert not unknown, f"{page.name}: {name} has no {unknown}"
                values = {key: ast.literal_eval(value) for key, value in settings.items() if is_literal(value)}
                OBJECTS[name](**values)


def is_literal(text: str) -> bool:
    """Whether it is a number or a string, and not `...` or the name of a variable."""
    return text != "..." and not text.isidentifier()


def choices(hint: Any) -> set[str]:
    """The strings that an annotation allows, in unions too."""
    return {hint} if isinstance(hint, str) else {word for part in get_args(hint) for word in choices(part)}


def test_every_documented_metric_is_measured(subtests: pytest.Subtests) -> None:
    """A plain run measures most metrics. Runs with a KL, with a sampler's correction and with further draws measure theirs."""
    runs = metrics_of_small_runs()
    for page in PAGES:
        with subtests.test(page=page.name):
            for name in set(METRIC.findall(page.read_text(encoding="utf-8"))) - OWN:
                run = next((run for sign, run in RUN_OF.items() if sign in name), "plain")
                assert name in runs[run], f"{page.name}: {name}"
            assert runs["kl"]["train/kl_mean"] > 0
            assert runs["sampler"]["train/sampler_ratio_mean"] == 1.0
            assert runs["drawn"]["rewards/mean_drawn"] == 0.5
            assert not [name for name in runs["plain"] if "sampler" in name or "drawn" in name]


OWN = {"eval/pass_at_2", "eval/pass_at_8"}
"""Metrics that an evaluation of the page's own returns."""

RUN_OF = {
    "kl": "kl",
    "sampler": "sampler",
    "effective_sample_size": "sampler",
    "drawn": "drawn",
    "eval/steps": "sampler",
    "waited": "ahead",
    "auxiliary": "balanced",
    "observation": "foreseen",
    "hidden": "ahead",
}
"""Part of a metric's name, and the run below that measures it. The policy of this run samples with a mask."""


def metrics_of_small_runs() -> dict[str, dict[str, float]]:
    """Two states, two actions, two epochs of updates: a step and an evaluation each."""
    truncate = ObjectiveConfig(sampler_correction="truncate")
    reference = TablePolicy([0, 1])
    half_right = [[0, 1, 0, 1], [0, 1, 0, 1]]
    return {
        "plain": metrics_of(TablePolicy([0, 1])),
        "kl": metrics_of(TablePolicy([0, 1]), reference, objective=ObjectiveConfig(kl_coef=0.1)),
        "sampler": metrics_of(SoftmaxPolicy(num_actions=2, num_states=2), objective=truncate),
        "drawn": metrics_of(TablePolicy([0, 1], script=half_right), dynamic_sampling_rounds=1),
        "ahead": metrics_of(TablePolicy([0, 1]), iterations_ahead=1),
        "balanced": metrics_of(Balanced(num_actions=2, num_states=2)),
        "foreseen": metrics_of(
            Foreseeing(num_actions=2, num_states=2), objective=ObjectiveConfig(observation_coef=0.1)
        ),
    }


class Balanced(SoftmaxPolicy):
    """It has a loss of its own, as a mixture of experts has."""

    def score_actions(self, states: Any, actions: Any) -> ActionScores:
        scores = super().score_actions(states, actions)
        return replace(scores, auxiliary_loss=scores.log_probs.square())


class Foreseeing(SoftmaxPolicy):
    """It foresees what its environment answers."""

    def score_actions(self, states: Any, actions: Any) -> ActionScores:
        scores = super().score_actions(states, actions)
        return replace(scores, observed_log_probs=scores.log_probs, observed_mask=scores.mask)


def metrics_of(policy: Any, reference: Any = None, **settings: Any) -> dict[str, float]:
    def right(states: Any, actions: Any) -> torch.Tensor:
        return torch.tensor([float(action == state) for state, action in zip(states, actions, strict=True)])

    trainer = GRPOTrainer(
        config=GRPOConfig(group_size=4, num_epochs_per_update=2, learning_rate=0.5, seed=0, **settings),
        policy=policy,
        reward_model=WeightedRewards({"right": right}),
        reference_policy=reference,
    )
    (metrics,) = trainer.train([0, 1], num_iterations=1, progress=False)
    return metrics | trainer.evaluate([0, 1])


def test_every_advice_in_the_log_is_explained_in_the_debugging_page() -> None:
    text = " ".join(DEBUGGING.read_text(encoding="utf-8").split())
    assert set(re.findall(r"log says \"([^\"]+)\"", text)) == {rule.sign for rule in RULES}


def test_every_documented_preset_exists() -> None:
    lists = re.findall(r"`grpo\.presets`: ([^|\n]+)", COMING_FROM.read_text(encoding="utf-8"))
    names = [name for found in lists for name in re.findall(r"`(\w+)`", found)]
    assert len(names) > 10
    for name in names:
        assert isinstance(getattr(presets, name)(), GRPOConfig), name


def test_the_control_presets_match_their_table() -> None:
    rows = re.findall(r"^\| `([\w-]+-v\d+)` \| (.+) \|$", CONTROL.read_text(encoding="utf-8"), re.MULTILINE)
    assert {env_id for env_id, _ in rows} == set(PRESETS)
    for env_id, cells in rows:
        preset = PRESETS[env_id]
        assert cells.split(" | ") == [
            f"{preset.total_steps:,}",
            f"{preset.threshold:g}",
            f"{preset.gamma:g}",
            f"{preset.num_groups} x {preset.group_size}",
            f"{preset.batch_size}",
            f"{preset.num_epochs}",
            f"{preset.learning_rate:g}",
            "normalised" if preset.normalize_observations else "as they are",
        ], env_id
    # the text below the table
    assert {(preset.clip, preset.entropy_coef) for preset in PRESETS.values()} == {(0.2, 0.0)}
    others = [(env_id, p.initial_log_std, p.max_episode_steps) for env_id, p in PRESETS.items()]
    others = [row for row in others if row[1:] != (0.0, None)]
    assert others == [("Reacher-v5", -1.0, None), ("HalfCheetah-v5", 0.0, 250)]


def test_every_link_leads_to_an_existing_file_and_heading() -> None:
    """Files and headings that the repository's documents link to exist."""
    root = DOCS.parent
    documents = [*root.glob("*.md"), *(path for room in DOCUMENTED for path in (root / room).rglob("*.md"))]
    assert {root / "README.md", *PAGES, root / "docs/decisions/README.md", root / "adapters/README.md"} <= set(
        documents
    )
    for page in documents:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                name, _, anchor = target.partition("#")
                linked = page.parent / name if name else page
                assert linked.exists(), f"{page.relative_to(root)}: {target}"
                assert not anchor or anchor in anchors(linked), f"{page.relative_to(root)}: {target}"


def test_each_decision_has_its_number_once_a_status_and_a_line_in_the_table() -> None:
    """The table of `docs/decisions/README.md` has the decisions of all pages, in their order, with the status of each."""
    folder = DOCS / "decisions"
    table = (folder / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[(\d{4})\]\((\w+\.md)#\S+\) \| (.+) \| (.+) \|$", table, re.MULTILINE)
    pages = re.findall(r"\*\*\[.+\]\((\w+\.md)\)\*\*", table)
    assert sorted(pages) == sorted(path.name for path in folder.glob("*.md") if path.name != "README.md")
    written = []
    for page in pages:
        text = (folder / page).read_text(encoding="utf-8")
        for number, title, status in re.findall(r"^## (\d{4}): (.+)\n\*(.*)$", text, re.MULTILINE):
            superseded = re.match(r"Superseded by \[(\d{4})\]", status)
            assert superseded or re.match(r"Accepted, \d{4}-\d\d-\d\d", status), number
            written.append((number, page, title, f"superseded by {superseded[1]}" if superseded else "accepted"))
        assert len(re.findall(r"^## ", text, re.MULTILINE)) == len([1 for row in written if row[1] == page]), page
    assert listed == written
    numbers = [number for number, *_ in written]
    assert len(set(numbers)) == len(numbers) > 100


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings."""
    return {heading_anchor(line) for line in re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)}


def heading_anchor(heading: str) -> str:
    """The anchor that GitHub makes: lower case, no punctuation, hyphens for spaces."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
