"""The names of TRL in the page about coming from another library exist in the installed TRL."""

import dataclasses
import inspect
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[4] / "docs" / "coming_from.md"
NO_SETTINGS = {"async", "accuracy_reward", "prompt"}


def names_of_the_tables() -> set[str]:
    section = PAGE.read_text(encoding="utf-8").partition("\n## TRL\n")[2].partition("\n## ")[0]
    cells = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| ")]
    quoted = [text for cell in cells for text in re.findall(r"`([^`]+)`", cell)]
    return {match[1] for text in quoted if (match := re.fullmatch(r"([a-z]\w*)(?:=.+)?", text))}


@pytest.mark.filterwarnings("ignore:.*deprecated.*:FutureWarning")  # TRL takes old and new names
def test_every_name_is_a_setting_of_trl_and_its_config_is_built_from_all_of_them(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    defaults = trl.GRPOConfig(output_dir=str(tmp_path), bf16=False, report_to="none", use_cpu=True)
    fields = {field.name for field in dataclasses.fields(trl.GRPOConfig) if field.init}
    arguments = set(inspect.signature(trl.GRPOTrainer.__init__).parameters)
    names = names_of_the_tables()
    modes = {name for name in names if name.startswith(("token_", "sequence_"))}
    unknown = names - fields - arguments - NO_SETTINGS - modes
    assert not unknown
    assert {"generation_kwargs", "eval_steps", "weight_decay", "warmup_steps"} <= names & fields
    # resolved by the config itself from the others
    derived = {"generation_batch_size", "steps_per_generation"}
    chosen = {name: getattr(defaults, name) for name in names & fields - derived}
    assert trl.GRPOConfig(**chosen | {"output_dir": str(tmp_path), "use_cpu": True}).beta == defaults.beta
