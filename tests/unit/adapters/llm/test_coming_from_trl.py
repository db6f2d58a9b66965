"""The names of TRL in the page about coming from another library exist in the installed TRL."""

import ast
import dataclasses
import inspect
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[4] / "docs" / "coming_from.md"
NO_SETTINGS = {"async", "accuracy_reward", "prompt", "image", "images"}
ROWS = {
    "generation_kwargs", "cache_implementation", "use_transformers_continuous_batching", "eval_dataset", "eval_strategy",
    "eval_steps", "logging_steps", "log_completions", "run_name", "callbacks", "load_best_model_at_end", "weight_decay",
    "optim_args", "processing_class", "use_liger_kernel", "vllm_enable_sleep_mode", "vllm_structured_outputs_regex",
    "warmup_steps", "train_dataset", "reward_funcs", "peft_config", "chat_template_kwargs",
}  # fmt: skip
"""Settings that a script has, and that do not concern the algorithm."""


def settings_of_the_tables() -> list[tuple[str, str | None]]:
    """Names, each with the value that the table gives it."""
    section = PAGE.read_text(encoding="utf-8").partition("\n## TRL\n")[2].partition("\n## ")[0]
    cells = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| ")]
    quoted = [text for cell in cells for text in re.findall(r"`([^`]+)`", cell)]
    found = [re.fullmatch(r"([a-z]\w*)(?:=(.+))?", text) for text in quoted]
    return [(match[1], match[2]) for match in found if match]


@pytest.mark.filterwarnings("ignore:.*deprecated.*:FutureWarning")  # TRL takes old and new names
def test_every_name_is_a_setting_of_trl_and_its_config_is_built_from_all_of_them(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    defaults = trl.GRPOConfig(output_dir=str(tmp_path), bf16=False, report_to="none", use_cpu=True)
    fields = {field.name for field in dataclasses.fields(trl.GRPOConfig) if field.init}
    arguments = set(inspect.signature(trl.GRPOTrainer.__init__).parameters)
    names = {name for name, _ in settings_of_the_tables()}
    modes = {name for name in names if name.startswith(("token_", "sequence_"))}
    unknown = names - fields - arguments - NO_SETTINGS - modes
    assert not unknown
    assert names >= ROWS
    assert "warmup_ratio" not in fields | names
    # resolved by the config itself from the others
    derived = {"generation_batch_size", "steps_per_generation"}
    chosen = {name: getattr(defaults, name) for name in names & fields - derived}
    assert trl.GRPOConfig(**chosen | {"output_dir": str(tmp_path), "use_cpu": True}).beta == defaults.beta
    # and from each value that the tables name
    valued = [(name, ast.literal_eval(value)) for name, value in settings_of_the_tables() if value and name in fields]
    assert len(valued) >= 20
    for name, value in valued:
        config = trl.GRPOConfig(**chosen | {"output_dir": str(tmp_path), "use_cpu": True, name: value})
        assert getattr(config, name) == value
