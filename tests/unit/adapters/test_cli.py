"""The command line: settings, tasks, and what each command writes and prints."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from adapters.cli import main
from adapters.commands import RECIPES, settings_of
from grpo import ConfigError, GRPOConfig, presets, with_settings
from grpo.surrogates import Cispo

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}

TASKS = """
import torch
from grpo import WeightedRewards

class Softmax(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.logits = torch.nn.Parameter(torch.zeros(4))

    def generate_actions(self, states, num_actions_per_state):
        return torch.multinomial(self.logits.softmax(0).expand(len(states), 4), num_actions_per_state, replacement=True)

    def get_log_probabilities(self, states, actions):
        return self.logits.log_softmax(0)[actions]

    def get_parameters(self):
        return dict(self.named_parameters())

class Wrong(Softmax):
    def get_log_probabilities(self, states, actions):
        return self.logits[actions]

def reward(states, actions):
    return (actions == 3).float()

STATES = ["one", "two"]

def task():
    return Softmax(), reward, STATES

def wrong():
    return Wrong(), reward, STATES

def evaluated():
    return Softmax(), WeightedRewards({"right": reward}), STATES, ["three"]

def needs_a_seed(seed):
    return task()

class Needy(Softmax):
    def __init__(self, size):
        super().__init__()

def pair():
    return 1, 2

def drawn():
    return Softmax(), reward, lambda iteration: STATES

def random_start():
    policy = Softmax()
    torch.nn.init.normal_(policy.logits)
    return policy, reward, STATES

def broken():
    return open("cities.csv")

def interrupted():
    import os, signal
    def stops(states, actions):
        os.kill(os.getpid(), signal.SIGTERM)
        return reward(states, actions)
    return Softmax(), stops, STATES
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module of tasks, which is the current one."""
    (tmp_path / "own_tasks.py").write_text(TASKS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "own_tasks", raising=False)
    return tmp_path


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message of a command that ends with exit code 2."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    return capsys.readouterr().err


# Settings


def test_a_file_of_settings_starts_from_a_preset_and_is_changed_by_name(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text(
        "preset: dapo\n"
        "config:\n  learning_rate: 1e-5\n  objective: {surrogate: {kind: cispo, high: 4.0}, kl_coef: 0.1}\n"
        "train: {num_iterations: 20, eval_every: 5}\n"
    )
    config, options = settings_of(path, ["objective.kl_coef=.2", "train.num_iterations=7", "seed=3"])
    expected = with_settings(presets.dapo(), {"learning_rate": 1e-5, "objective.kl_coef": 0.2, "seed": 3})
    assert config == with_settings(expected, {"objective.surrogate": {"kind": "cispo", "high": 4.0}})
    assert config.objective.surrogate == Cispo(high=4.0)
    assert options == {"num_iterations": 7, "eval_every": 5}


def test_json_says_the_same_and_no_file_means_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    path.write_text('{"config": {"group_size": 4}}')
    assert settings_of(path, []) == (GRPOConfig(group_size=4), {"num_iterations": 100})
    assert settings_of(None, []) == (GRPOConfig(), {"num_iterations": 100})
    assert settings_of(None, ["train.num_epochs=2"]) == (GRPOConfig(), {"num_epochs": 2})


def test_values_of_the_command_line_are_numbers_words_and_json() -> None:
    changes = [
        "config.learning_rate=1e-4", "max_grad_norm=none", "compile_objective=true", "lr_schedule=cosine", "seed=7",
        'objective={"kl_coef": 0.5}',
    ]  # fmt: skip
    config, _ = settings_of(None, changes)
    expected = GRPOConfig(learning_rate=1e-4, max_grad_norm=None, compile_objective=True, lr_schedule="cosine", seed=7)
    assert config == with_settings(expected, {"objective.kl_coef": 0.5})


def test_unknown_names_are_refused_with_the_nearest_one(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """Of a name that stands twice, the last one would count, and the first block would be lost in silence."""
    for text, changes, message in [
        ("confg: {}", [], r"the file of settings has no setting 'confg'. Did you mean 'config'"),
        ("config: {groupsize: 4}", [], r"no setting 'groupsize'. Did you mean 'group_size'"),
        ("train: {iterations: 4}", [], r"train has no setting 'iterations'. Did you mean 'num_iterations'"),
        ("preset: dapoo", [], r"no preset 'dapoo'. Did you mean 'dapo'"),
        ("{}", ["objective.surogate.high=1"], r"Did you mean 'objective.surrogate.high'"),
        ("{}", ["train.keeplast=1"], r"Did you mean 'keep_last'"),
        ("{}", ["seed"], r"--set needs NAME=VALUE; got 'seed'"),
        ("- 3", [], r"must hold settings by name; got list"),
        ("config: [1, 2]", [], r"config must hold settings by name; got a list of 2"),
        ("config: 3", [], r"config must hold settings by name; got int 3"),
        ("train: [1]", [], r"train must hold settings by name"),
        ("preset: 3", [], r"preset must hold a name; got int 3"),
        ("{", [], r"is not YAML"),
        ("config: {}\ntrain: {}\nconfig: {}", [], r"settings.yaml, line 1: the setting 'config' stands twice"),
        (
            "config:\n  seed: 1\n  objective: {kl_coef: 1, kl_coef: 2}",
            [],
            r"line 3: the setting 'kl_coef' stands twice",
        ),
        ("config: {group_size: [{a: 1, a: 2}]}", [], r"the setting 'a' stands twice"),
        ("config: !!python/object/apply:os.system ['true']", [], r"is not YAML"),
        ('{"config": {"seed": 1}, "config": {}}', [], r"settings.json: the setting 'config' stands twice. Keep one of"),
        ('{"config": {"seed": 1, "seed": 2}}', [], r"settings.json: the setting 'seed' stands twice"),
    ]:
        path = tmp_path / ("settings.json" if text.startswith('{"') else "settings.yaml")
        path.write_text(text)
        with subtests.test(text=text, changes=changes), pytest.raises(ConfigError, match=message):
            settings_of(path, changes)


# Commands


def test_a_seed_makes_the_same_policy_again(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    how = ["--set", "seed=3", "--set", "train.num_iterations=2"]
    for out in ("one", "two"):
        main(["train", "own_tasks:random_start", *how, "--out", out])
    lines = [json.loads((folder / out / "metrics.jsonl").read_text().splitlines()[0]) for out in ("one", "two")]
    assert lines[0]["rewards/mean"] == lines[1]["rewards/mean"]
    assert lines[0]["train/grad_norm"] == lines[1]["train/grad_norm"]
    means = []
    for _ in range(2):
        main(["compare", "own_tasks:random_start", "one"])
        means.append(json.loads((folder / "one" / "comparison.json").read_text())["mean_reward_before"])
    assert means[0] == means[1]
    assert "has no seed" not in capsys.readouterr().out
    main(["train", "own_tasks:task", "--set", "train.num_iterations=1"])
    main(["compare", "own_tasks:task", "runs/task"])
    assert "The run has no seed" in capsys.readouterr().out


def test_states_may_be_a_function_of_the_iteration(folder: Path) -> None:
    main(["check", "own_tasks:drawn"])
    main(["train", "own_tasks:drawn", "--set", "train.num_iterations=1"])
    main(["compare", "own_tasks:drawn", "runs/drawn"])


def test_errors_of_the_tasks_own_code_keep_their_traceback(folder: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"cities\.csv"):
        main(["train", "own_tasks:broken"])
    (folder / "importing.py").write_text("import no_such_package")
    with pytest.raises(ModuleNotFoundError, match=r"no_such_package"):
        main(["train", "importing:task"])


def test_a_folder_has_one_run_and_a_start_that_failed_leaves_it_free(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "num_iterations" in fails(capsys, "train", "own_tasks:task", "--set", "train.num_iterations=0")
    main(["train", "own_tasks:task", "--set", "train.num_iterations=1"])
    assert (folder / "runs" / "task" / "report.html").exists()
    message = fails(capsys, "train", "own_tasks:task")
    assert "has a run already. Pass --resume to continue it, or --out with another folder." in message


@pytest.mark.slow
def test_train_keeps_a_run_that_can_be_resumed_compared_and_reported(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    how = ["--out", "run", "--set", "learning_rate=0.1", "--set", "seed=0"]
    main(["train", "own_tasks:evaluated", *how, "--set", "train.num_iterations=10"])
    assert "Iterations 1 to 10: the mean reward went from" in capsys.readouterr().out
    main(["train", "own_tasks:evaluated", *how, "--set", "train.num_iterations=60", "--resume"])
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == list(range(1, 61))
    assert "eval/right/mean" in lines[-1]
    main(["compare", "own_tasks:evaluated", "run"])
    printed = capsys.readouterr().out
    comparison = json.loads((folder / "run" / "comparison.json").read_text())
    assert comparison["mean_reward_after"] > 0.8 > 0.5 > comparison["mean_reward_before"]
    assert "three" in printed
    main(["report", "run", "--out", "page.html"])
    assert "answers" in (folder / "page.html").read_text().lower()


def test_check_tests_a_policy_and_its_reward(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["check", "own_tasks:task"])
    printed = capsys.readouterr().out
    assert "check_policy(Softmax): " in printed
    assert "check_reward_model(reward): " in printed
    main(["check", "own_tasks:Softmax", "--states", "own_tasks:STATES"])
    assert "check_reward_model" not in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        main(["check", "own_tasks:wrong"])
    assert caught.value.code == 1
    assert "generated samples" in capsys.readouterr().out


def test_presets_are_listed_and_printed_as_settings(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    main(["presets"])
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == list(RECIPES)
    assert "Decoupled clip, dynamic sampling" in "\n".join(listed)
    for name, recipe in RECIPES.items():
        main(["presets", name])
        printed = capsys.readouterr().out
        path = tmp_path / "recipe.json"
        settings = "\n".join(line for line in printed.splitlines() if not line.startswith("#"))
        path.write_text(json.dumps({"config": json.loads(settings)}))
        assert settings_of(path, [])[0] == recipe()


def test_names_that_lead_nowhere_are_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], subtests: pytest.Subtests
) -> None:
    cases: list[tuple[list[str], str]] = [
        (["train", "own_tasks"], "A task is named as MODULE:FUNCTION"),
        (["train", "own_tasks:tsk"], "own_tasks has no 'tsk'. Did you mean 'task'?"),
        (["train", "no_such_module:task"], "There is no module 'no_such_module' for no_such_module:task"),
        (
            ["train", "own_tasks:needs_a_seed"],
            "own_tasks:needs_a_seed must be callable without arguments; it takes (seed)",
        ),
        (
            ["check", "own_tasks:Needy", "--states", "own_tasks:STATES"],
            "own_tasks:Needy must be callable without arguments",
        ),
        (["train", "own_tasks:pair"], "must return (policy, reward_model, states)"),
        (["train", "own_tasks:task", "missing.yaml"], "The file of settings missing.yaml cannot be read: "),
        (["train", "own_tasks:task", "."], "The file of settings . cannot be read: "),
        (["compare", "own_tasks:task", "nowhere"], "nowhere"),
        (["report", "nowhere"], "nowhere"),
        (["presets", "grpo"], "There is no preset 'grpo'"),
    ]
    for arguments, message in cases:
        with subtests.test(arguments=arguments):
            assert message in fails(capsys, *arguments)
    assert not (folder / "runs").exists()


@pytest.mark.slow
def test_a_reader_that_ends_early_is_no_error() -> None:
    command = (
        f"{sys.executable} -c 'from adapters.cli import main; main()' presets dapo | head -1; exit ${{PIPESTATUS[0]}}"
    )
    done = subprocess.run(["bash", "-c", command], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 141)
    assert done.stdout.startswith("# ")
    assert done.stderr == ""


def test_a_signal_ends_a_run_with_its_exit_code(folder: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["train", "own_tasks:interrupted"])
    assert caught.value.code == 143


@pytest.mark.slow
def test_the_commands_of_the_guide_work_as_typed(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
    (code,), (settings,), (commands,) = (
        re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL) for kind in ("python", "yaml", "bash")
    )
    (tmp_path / "my_task.py").write_text(code)
    (tmp_path / "settings.yaml").write_text(settings)
    printed = {}
    for command in commands.strip().splitlines():
        assert command.startswith("grpo ")
        done = subprocess.run(
            [sys.executable, "-c", "from adapters.cli import main; main()", *shlex.split(command)[1:]],
            cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}: {done.stderr}"
        printed[command.split()[1]] = done.stdout
    assert "Iterations 31 to 50: the mean reward went from" in printed["train"]
    assert "dynamic_sampling_rounds" in printed["presets"]
    files = {path.name for path in (tmp_path / "runs" / "task").iterdir()}
    assert files == {
        "metrics.jsonl", "samples.jsonl", "settings.json", "checkpoints", "report.html", "comparison.json",
    }  # fmt: skip


def test_the_help_names_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    found = re.findall(r"^    (\w+) ", capsys.readouterr().out, re.MULTILINE)
    assert {"demo", "train", "check", "compare", "report", "presets"} <= {*found}


@pytest.mark.slow
def test_the_demo_is_plotted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["demo", "--plot", "demo.png"])
    assert "With the tuned settings" in capsys.readouterr().out
    assert (folder / "demo.png").exists()
