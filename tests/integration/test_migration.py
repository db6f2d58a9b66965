"""The scripts of examples/migration: how many lines change when a script moves over, and that both versions run."""

import ast
import copy
import difflib
import runpy
import shutil
import sys
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from adapters.llm import CompletionRewards, HFPolicy, SamplingConfig
from benchmarks._trl import run_trl
from grpo import GRPOConfig, GRPOTrainer
from tests.support.launches import printed_by
from tests.support.llm_models import character_tokenizer, tiny_model
from tests.support.objective_inputs import as_users_run_it
from tests.support.vision_models import picture, tiny_vision

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "examples" / "migration"
MAX_CHANGED = 15


def code_of(name: str) -> list[str]:
    """The lines of a script without its docstring and without empty lines."""
    text = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
    begin = ast.parse(text).body[0].end_lineno
    return [line for line in text.splitlines()[begin:] if line.strip()]


def new_lines(before: list[str], after: list[str]) -> list[str]:
    """The lines of `after` that were added, or that replaced another line."""
    changes = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return [line for kind, _, _, begin, end in changes if kind != "equal" for line in after[begin:end]]


def test_new_lines_are_those_added_or_replaced() -> None:
    assert new_lines(["a", "b", "c", "d"], ["a", "x", "c", "d", "y"]) == ["x", "y"]
    assert new_lines(["a", "b"], ["a"]) == []


@pytest.mark.parametrize("library", ["trl", "sb3"])
def test_a_script_moves_over_in_at_most_15_changed_lines(library: str) -> None:
    before, after = code_of(f"{library}_before"), code_of(f"{library}_after")
    changed = new_lines(before, after)
    assert len(changed) <= MAX_CHANGED, "\n".join(changed)
    assert len(before) > 20
    assert len(set(before) & set(after)) >= 7  # the data and the command line stay as they are


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_model().save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return folder


def run(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
    with as_users_run_it():  # the type checks of the tests do not know datasets.Dataset
        runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")


def scalars(folder: Path) -> set[str]:
    found = EventAccumulator(str(folder))
    found.Reload()
    return set(found.Tags()["scalars"])


@pytest.mark.slow
def test_our_version_of_the_trl_script_trains_tracks_saves_and_resumes(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(monkeypatch, "trl_after", "--model", model_folder, "--output", tmp_path)
    assert {"rewards/right/mean", "rewards/short/mean", "train/total_loss"} <= scalars(tmp_path)
    assert "iterations | 8 |" in (tmp_path / "README.md").read_text()
    adapter = load_file(tmp_path / "adapter_model.safetensors")
    assert any(bool(value.any()) for name, value in adapter.items() if "lora_B" in name)  # these are 0 at the start
    shutil.rmtree(tmp_path / "iteration-00000008")
    (tmp_path / "adapter_model.safetensors").unlink()
    run(monkeypatch, "trl_after", "--model", model_folder, "--output", tmp_path, "--resume")
    again = load_file(tmp_path / "adapter_model.safetensors")
    assert all(value.equal(again[name]) for name, value in adapter.items())


def test_our_version_of_the_sb3_script_trains_tracks_saves_and_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, "sb3_after", "--steps", 2_000, "--output", tmp_path)
    assert {"eval/return", "rewards/mean"} <= scalars(tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert {"curve.json", "final"} <= names
    assert any(name.startswith("iteration-") for name in names)
    said = capsys.readouterr().out
    assert "best policy: return " in said
    assert float(said.split("best policy: return ")[1].split()[0]) > 25  # random actions get about 20


def run_as_file(name: str, *arguments: object) -> str:
    return printed_by(SCRIPTS / f"{name}.py", *arguments, seconds=280, HF_HUB_OFFLINE="1")


@pytest.mark.slow
def test_the_trl_script_that_moves_over_trains_and_resumes(model_folder: Path, tmp_path: Path) -> None:
    run_as_file("trl_before", "--model", model_folder, "--output", tmp_path)
    assert (tmp_path / "adapter_model.safetensors").is_file()
    run_as_file("trl_before", "--model", model_folder, "--output", tmp_path, "--resume")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options", "least"), [
    ("sb3_before", ["--steps", 4_000], 0), ("sb3_after", [], 475),
    pytest.param("sb3_before", [], 475, marks=pytest.mark.faults),
])  # fmt: skip
def test_both_versions_of_the_sb3_script_run_and_learn_to_balance_the_pole(
    name: str, options: list[object], least: int, tmp_path: Path
) -> None:
    said = run_as_file(name, *options, "--output", tmp_path)
    assert float(said.split("best policy: return ")[1].split()[0]) >= least


@pytest.mark.slow
def test_rows_with_an_image_column_are_the_same_prompts_as_in_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    """One iteration of TRL's own trainer, with a reward function that names the column. Ours has the same rows and function."""
    model, processor = tiny_vision("llava")
    rows = [{"prompt": [{"role": "user", "content": text}], "image": picture(seed=i)} for i, text in enumerate("ab")]
    rewarded: list[list[Any]] = []
    read: list[Any] = []

    def brightness(completions: Any, image: Any, **columns: Any) -> list[float]:
        rewarded.append([np.asarray(own).mean() for own in image])
        return [len(str(said)) * mean for said, mean in zip(completions, rewarded[-1], strict=True)]

    def generate(self: Any, *args: Any, **options: Any) -> Any:
        read.append({name: options[name].clone() for name in ("input_ids", "attention_mask", "pixel_values")})
        return type(self).generate(self, *args, **options)

    theirs = copy.deepcopy(model)
    theirs.generate = MethodType(generate, theirs)
    arguments = {"max_completion_length": 4}
    run_trl(theirs, processor, rows, 1, lambda _: None, group=2, passes=1, arguments=arguments, reward_funcs=brightness)
    policy = HFPolicy(model, processor, sampling=SamplingConfig(max_new_tokens=4))
    trainer = GRPOTrainer(config=GRPOConfig(group_size=2), policy=policy, reward_model=CompletionRewards(brightness))
    trainer.step(rows)
    assert sorted(rewarded[0]) == sorted(rewarded[1])
    [inputs] = read
    found = {
        tuple(ids[mask.bool()].tolist()): pixels
        for ids, mask, pixels in zip(inputs["input_ids"], inputs["attention_mask"], inputs["pixel_values"], strict=True)
    }
    prompts = policy._encode(rows)
    assert {tuple(prompt) for prompt in prompts} == found.keys()
    assert all(found[tuple(prompt)].equal(prompt.fields["pixel_values"][0]) for prompt in prompts)  # type: ignore[union-attr]
