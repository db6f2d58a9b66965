"""The command `grpo`: try the demo, train a task from a file of settings, check a policy, compare, and write reports.

A task is a function of your own that returns what is trained. Its name is given on the command line only, as MODULE:FUNCTION:

    def task():
        return policy, reward_model, states            # or (policy, reward_model, states, eval_states)

A file of settings has plain values only, in YAML or JSON, so that reading it runs no code:

    preset: bnpo                                       # a recipe of grpo.presets to start from; left out: the defaults
    config: {group_size: 16, objective: {kl_coef: 0.0}}
    train: {num_iterations: 200, eval_every: 20}       # numbers that GRPOTrainer.train takes
"""

import argparse
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo import (
    GRPOConfig,
    GRPOTrainer,
    compare_policies,
    load_weights,
    measure_policy,
    presets,
    seed_everything,
    with_settings,
)
from grpo.arguments import describe, nearest_name
from grpo.checks import check_policy, check_reward_model
from grpo.errors import ConfigError, GRPOError, TrainingInterrupted
from grpo.experience_collector import ExperienceCollector

TRAIN = ("num_iterations", "num_epochs", "eval_every", "checkpoint_every", "keep_last")
"""The arguments of `train` that a file of settings may have."""
SECTIONS = ("preset", "config", "train")
CHECKPOINTS = "checkpoints"
"""The folder of checkpoints in a run's folder."""
RECIPES: dict[str, Callable[[], GRPOConfig]] = {
    name: recipe
    for name, recipe in vars(presets).items()
    if inspect.isfunction(recipe) and recipe.__module__ == presets.__name__ and not name.startswith("_")
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. An error that the user can correct is printed without a traceback, and ends with exit code 2.

    Args:
        arguments: The words after `grpo`. None: those of this process.
    """
    args = _parser().parse_args(arguments)
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - as `python -m` does, so that tasks beside you are found
    try:
        args.run(args)
    except TrainingInterrupted as error:
        raise SystemExit(128 + error.signal_number) from None
    except (
        BrokenPipeError
    ):  # the reader of a pipe, such as `head`, has ended; Python would complain once more at the exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(141) from None
    except GRPOError as error:
        print(f"grpo {args.command}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def _parser() -> argparse.ArgumentParser:
    description, _, details = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="grpo", description=description, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    demo = commands.add_parser("demo", help="train a policy on a bandit whose best arm moves, and plot it")
    demo.add_argument("--seed", default="0")
    demo.add_argument("--plot", default="runs/dynamic_bandit.png", help="PNG file to write")
    demo.set_defaults(run=_demo)

    train = commands.add_parser("train", help="train a task, and keep the run in a folder")
    train.add_argument("task", metavar="MODULE:TASK")
    train.add_argument("settings", nargs="?", type=Path, metavar="SETTINGS.yaml")
    train.add_argument(
        "--set",
        dest="changes",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="change a setting: --set objective.surrogate.high=.28, or an argument of train: --set train.num_iterations=50",
    )
    train.add_argument("--out", type=Path, help="the run's folder; runs/TASK if it is left out")
    train.add_argument("--resume", action="store_true", help="continue the run in the folder")
    train.set_defaults(run=_train)

    check = commands.add_parser("check", help="test whether a policy keeps its contract")
    check.add_argument("policy", metavar="MODULE:POLICY", help="a task, or a policy or a function that makes one")
    check.add_argument("--states", metavar="MODULE:STATES", help="a few states, for a policy that no task returns")
    check.add_argument("--num-samples", type=int, default=4096, help="0 for language models")
    check.set_defaults(run=_check)

    compare = commands.add_parser("compare", help="compare a task's policy before training and with a run's weights")
    compare.add_argument("task", metavar="MODULE:TASK")
    compare.add_argument("folder", type=Path, metavar="RUN", help="a folder that `grpo train` wrote")
    compare.add_argument("--num-actions", type=int, default=8, help="actions sampled in each state")
    compare.set_defaults(run=_compare)

    report = commands.add_parser("report", help="make one HTML page of a run's folder")
    report.add_argument("folder", type=Path, metavar="RUN")
    report.add_argument("--out", type=Path, help="the page; RUN/report.html if it is left out")
    report.set_defaults(run=_report)

    recipes = commands.add_parser("presets", help="list the recipes, or print the settings of one")
    recipes.add_argument("name", nargs="?")
    recipes.set_defaults(run=_presets)
    return parser


# Commands


def _demo(args: argparse.Namespace) -> None:
    from .bandits.demo import main as demo

    demo(["--seed", args.seed, "--plot", args.plot])


def _train(args: argparse.Namespace) -> None:
    from .tracking import RunFolder, write_report
    from .tracking.run_folder import METRICS

    config, options = settings_of(args.settings, args.changes)
    policy, reward_model, states, eval_states = task_of(args.task, seed=config.seed)
    folder = args.out or Path("runs") / args.task.partition(":")[2]
    if not args.resume and ((folder / METRICS).exists() or any((folder / CHECKPOINTS).glob("iteration-*"))):
        raise ConfigError(f"{folder} has a run already. Pass --resume to continue it, or --out with another folder.")
    trainer = GRPOTrainer(config=config, policy=policy, reward_model=reward_model)
    with RunFolder(folder) as sink:
        history = trainer.train(
            states,
            eval_states=eval_states,
            sinks=[sink],
            checkpoint_dir=folder / CHECKPOINTS,
            resume="auto" if args.resume else None,
            **options,
        )
    if history:
        first, last = history[0]["rewards/mean"], history[-1]["rewards/mean"]
        start = trainer.iteration - len(history) + 1
        print(f"Iterations {start} to {trainer.iteration}: the mean reward went from {first:.3f} to {last:.3f}.")
    print(f"Report: {write_report(folder)}")


def _check(args: argparse.Namespace) -> None:
    reward_model = None
    if args.states is None:
        policy, reward_model, states, _ = task_of(args.policy)
    else:
        policy, states = _made(named(args.policy)), named(args.states)
    states = drawn(states)[:8]
    report = check_policy(policy, states, num_samples=args.num_samples)
    print(report)
    is_sound = not report.failures
    if reward_model is not None:
        collector = ExperienceCollector(policy=policy, reward_model=reward_model, group_size=1)
        row_states, actions, _ = collector.sample(states, 1)
        of_rewards = check_reward_model(reward_model, states=row_states, actions=actions)
        print(f"\n{of_rewards}")
        is_sound = is_sound and not of_rewards.failures
    if not is_sound:
        raise SystemExit(1)


def _compare(args: argparse.Namespace) -> None:
    from .tracking import write_report
    from .tracking.run_folder import COMPARISON

    config = settings_in(args.folder)
    policy, reward_model, states, eval_states = task_of(args.task, seed=config.get("seed"))
    states = drawn(states) if eval_states is None else eval_states
    if config.get("seed") is None:
        print(
            "The run has no seed, so the policy before training is not the run's, but another one that the task makes."
        )
    before = measure_policy(policy, states, reward_model, num_actions_per_state=args.num_actions)
    load_weights(args.folder / CHECKPOINTS, policy)
    report = compare_policies(before, policy, states, reward_model)
    print(report)
    report.to_json(args.folder / COMPARISON)
    print(f"\nReport: {write_report(args.folder)}")


def _report(args: argparse.Namespace) -> None:
    from .tracking import write_report

    print(write_report(args.folder, args.out))


def _presets(args: argparse.Namespace) -> None:
    if args.name is None:
        for name, recipe in RECIPES.items():
            print(f"{name:30s}{(recipe.__doc__ or '').partition(chr(10))[0]}")
        return
    recipe = _recipe(args.name)
    print(f"# {inspect.getdoc(recipe)}".replace("\n", "\n# ").replace("# \n", "#\n"))
    print(json.dumps(recipe().to_dict(), indent=2))


# Settings


def settings_of(path: Path | None, changes: Sequence[str]) -> tuple[GRPOConfig, dict[str, Any]]:
    """Read a file of settings, and apply changes such as "objective.kl_coef=0.1".

    Returns:
        The config, and the arguments of `train`.

    Raises:
        ConfigError: A name is unknown (the message has the nearest one), or a value is not allowed.
    """
    given = {} if path is None else _read(path)
    _require_known("the file of settings", given, SECTIONS)
    kinds = {"preset": (str, "a name"), "config": (dict, "settings by name"), "train": (dict, "settings by name")}
    for section, (kind, words) in kinds.items():
        if not isinstance(given.get(section) or kind(), kind):
            raise ConfigError(f"{section} must hold {words}; got {describe(given[section])}.")
    config = _recipe(given["preset"])() if given.get("preset") else GRPOConfig()
    options = dict(given.get("train") or {})
    named_changes: dict[str, Any] = {}
    for change in changes:
        name, sign, text = change.partition("=")
        if not sign:
            raise ConfigError(f"--set needs NAME=VALUE; got {change!r}.")
        if name.startswith("train."):
            options[name.removeprefix("train.")] = _parsed(text)
        else:
            named_changes[name.removeprefix("config.")] = _parsed(text)
    _require_known("train", options, TRAIN)
    config = with_settings(with_settings(config, given.get("config") or {}), named_changes)
    return config, options if "num_epochs" in options else {"num_iterations": 100} | options


def _read(path: Path) -> dict[str, Any]:
    """Read YAML or JSON. Numbers such as 1e-5, which YAML takes for text, become numbers."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The file of settings {path} cannot be read: {error}") from error
    values = _load(text, path.suffix == ".json", str(path))
    if values is not None and not isinstance(values, Mapping):
        raise ConfigError(f"{path} must hold settings by name; got {type(values).__name__}.")
    plain: dict[str, Any] = _with_numbers(values or {})
    return plain


def _load(text: str, is_json: bool, where: str) -> Any:
    if is_json:
        try:
            return json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{where} is not JSON: {error}") from error
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(
            'Settings in YAML need pip install "model-agnostic-grpo[cli]". JSON needs nothing.'
        ) from error
    try:
        # files of settings are passed on and not read as programs, so they must not run code
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not YAML: {error}") from error


def _with_numbers(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _with_numbers(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_with_numbers(entry) for entry in value]
    return _number(value) if isinstance(value, str) else value


def _number(text: str) -> int | float | str:
    """The number that a text stands for, or the text."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def _parsed(text: str) -> Any:
    """A value of the command line: a number, true, false, null, a JSON list or dict, or a word."""
    try:
        return json.loads(text)
    except ValueError:
        words = {"none": None, "true": True, "false": False}
        return words[text.lower()] if text.lower() in words else _number(text)


def _require_known(where: str, given: Mapping[str, Any], names: Sequence[str]) -> None:
    for name in given:
        if name not in names:
            raise ConfigError(f"{where} has no setting {name!r}. {nearest_name(name, names)}")


def _recipe(name: str) -> Callable[[], GRPOConfig]:
    if name not in RECIPES:
        raise ConfigError(f"There is no preset {name!r}. {nearest_name(name, list(RECIPES))}")
    return RECIPES[name]


# Objects that the command line names


def named(name: str) -> Any:
    """Import what MODULE:NAME names.

    Raises:
        ConfigError: The name has another form, or the module lacks it.
    """
    module, sign, attribute = name.partition(":")
    if not (module and sign and attribute):
        raise ConfigError(f"A task is named as MODULE:FUNCTION, such as my_project.tasks:task; got {name!r}.")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module is there, and imports one that is not
        raise ConfigError(f"There is no module {error.name!r} for {name}. Run grpo where the module is.") from error
    if not hasattr(found, attribute):
        public = [each for each in vars(found) if not each.startswith("_")]
        raise ConfigError(f"{module} has no {attribute!r}. {nearest_name(attribute, public)}")
    return getattr(found, attribute)


def task_of(name: str, *, seed: int | None = None) -> tuple[Any, Any, Any, Any]:
    """Call a task: its policy, reward model, states, and the states of evaluations or None.

    Args:
        name: MODULE:FUNCTION.
        seed: Seeds the generators first, so that the task makes the same policy again. None: they are not seeded.

    Raises:
        ConfigError: The task returns something else.
    """
    task = named(name)
    if seed is not None:
        seed_everything(seed)
    made = _made(task)
    if not isinstance(made, tuple) or len(made) not in (3, 4):
        kind = f"{len(made)} values" if isinstance(made, tuple) else type(made).__name__
        raise ConfigError(
            f"{name} must return (policy, reward_model, states) or (policy, reward_model, states, eval_states); got {kind}."
        )
    policy, reward_model, states, eval_states = (*made, None)[:4]
    return policy, reward_model, states, eval_states


def drawn(states: Any) -> Any:
    """The states themselves, or the first ones that a function of the iteration returns."""
    return states(0) if callable(states) else states


def settings_in(folder: Path) -> dict[str, Any]:
    """The config of the run in a folder, as it was started last."""
    from .tracking.run_folder import SETTINGS

    try:
        starts = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))["starts"]
        config: dict[str, Any] = starts[-1]["settings"]["config"]
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{folder} is not a folder that `grpo train` wrote: {error}") from error
    return config


def _made(value: Any) -> Any:
    """The result of a function or a class, or the object itself."""
    return value() if inspect.isfunction(value) or inspect.isclass(value) else value
